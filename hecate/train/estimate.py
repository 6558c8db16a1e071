"""Sizes of an experiment before it is run, and its memories on a tape."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hecate.engine import memory_scan
from hecate.models import LanguageModel
from hecate.models.config import Scanned
from hecate.rule import Gates, bytes_of
from hecate.tape import Tape
from hecate.train.config import ExperimentConfig

FLOAT = 4  # bytes


def estimate_rows(config: ExperimentConfig) -> list[tuple[str, str]]:
    """What the model weighs, carries and computes; nothing is allocated. [TRAIN-EST-D1]

    State: what one sequence carries from token to token, whatever its length without attention.
    Work: multiplications and additions of a token with the weights of linear layers, forward.
    """
    with torch.device("meta"):
        model = LanguageModel(config.model_for_data())
        _, state = model(torch.zeros(1, 0, dtype=torch.int64))
    parameters = sum(item.numel() for item in model.parameters())
    block = sum(item.numel() for item in model.blocks[0].parameters())
    batch = config.budget.batch_size
    tokens = batch * config.seq_len
    carried, cache = bytes_of(state), 2 * config.model.d_model * config.model.layers * FLOAT
    linear = [item for item in model.modules() if isinstance(item, nn.Linear)]
    work = sum(item.weight.numel() for item in linear)
    work += model.embedding.weight.numel() if model.head is None else 0
    return [
        ("parameters", f"{parameters:,}"),
        (f"of which in each of {config.model.layers} blocks", f"{block:,}"),
        ("weights", _size(parameters * FLOAT)),
        ("weights, gradients and two moments in training", _size(4 * parameters * FLOAT)),
        ("state per sequence", _size(carried)),
        (
            f"state of a batch of {config.budget.batch_size}",
            _size(carried * config.budget.batch_size),
        ),
        ("tokens whose keys and values in attention weigh as much", f"{carried / cache:,.0f}"),
        ("work with weights per token", f"{2e-6 * work:,.2f} MFLOP"),
        ("tokens per step", f"{tokens:,}"),
        ("tokens in all", f"{tokens * config.budget.steps:,}"),
        *((f"engine of model.{path}", name) for path, (name, _) in config.engines().items()),
    ]


def taped(config: ExperimentConfig, tokens: int) -> dict[str, tuple[str, dict[str, float]]]:
    """Every memory of a model's block, by its path, scanned over random tokens: the tape and the
    norms of the cotangents by label, from a unit cotangent of the output. [TRAIN-EST-D2]"""
    heads = config.model.heads
    return {path: _taped(rule, heads, tokens) for path, rule in config.model.rules().items()}


def _taped(rule: Scanned, heads: int, tokens: int) -> tuple[str, dict[str, float]]:
    source = torch.Generator().manual_seed(0)

    def draw(width: int) -> torch.Tensor:
        return torch.randn(1, tokens, heads, width, generator=source, device="cpu")

    q, k = (nn.functional.normalize(draw(rule.d_key), dim=-1) for _ in range(2))
    v = draw(rule.d_value)
    how: dict[str, Any] = {"heads": heads, "generator": source}
    params = rule.config.feature_map.init(rule.d_key, **how)
    d_phi = rule.config.feature_map.output_dim(rule.d_key)
    start = rule.config.structure.init(d_phi, rule.d_value, **how)
    tape = Tape(observe=True)
    with torch.no_grad():
        y, _ = memory_scan(
            rule.config, q, k, v, Gates(), phi_params=params, initial=start, tape=tape
        )
        tape.backward([y], [torch.full_like(y, y.numel() ** -0.5)], [q, k, v])
    return str(tape), {name: float(norm) for name, norm in tape.norms().items()}


def _size(count: float) -> str:
    for unit in ("bytes", "KiB", "MiB"):
        if count < 1024:
            return f"{count:,.4g} {unit}"
        count /= 1024
    return f"{count:,.4g} GiB"
