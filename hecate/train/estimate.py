"""Sizes of an experiment before it is run, and its memories on a tape."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from hecate.checks import readable
from hecate.distributed import World
from hecate.engine import memory_scan
from hecate.errors import ConfigError, shorten
from hecate.models import LanguageModel
from hecate.rule import Gates, bytes_of
from hecate.tape import Tape
from hecate.train.config import ExperimentConfig

FLOAT = 4  # bytes


class Sizes(NamedTuple):
    """Numbers of a model and of one of its blocks, bytes of a sequence's state, weights that a token meets in linear
    layers."""

    parameters: int
    block: int
    state: int
    work: int


def sizes_of(config: ExperimentConfig) -> Sizes:
    """Those of the model that `train` builds, from one of its blocks, without storage."""
    one, layers = config.model_for_data().model_copy(update={"layers": 1}), config.model.layers
    with torch.device("meta"):
        model = LanguageModel(one)
        _, (state,) = model(torch.zeros(1, 0, dtype=torch.int64))

    def whole(of: Callable[[nn.Module], int]) -> int:
        return of(model) + (layers - 1) * of(model.blocks[0])

    def weights(module: nn.Module) -> int:
        return sum(item.weight.numel() for item in module.modules() if isinstance(item, nn.Linear))

    tied = model.embedding.weight.numel() if model.head is None else 0
    return Sizes(whole(_numbers), _numbers(model.blocks[0]), layers * bytes_of(state), whole(weights) + tied)


def training_bytes(config: ExperimentConfig, sizes: Sizes) -> int:
    """What training takes at least: weights, gradients, two moments, the states of a batch, and
    the logits and the inputs of every block that the backward pass reads. [TRAIN-EST-D3]"""
    model, batch = config.model, config.budget.batch_size
    activations = batch * config.seq_len * (config.data.vocabulary() + model.layers * model.d_model)
    return FLOAT * (4 * sizes.parameters + activations) + batch * sizes.state


def check_memory(config: ExperimentConfig, limit: int | None, world: World | None = None) -> None:
    """Refuses an experiment of which this process of a world takes more bytes than `limit`, or than its device has
    where that is None. [TRAIN-EST-D3]"""
    sizes, budget = sizes_of(config), config.budget
    if world is not None:
        rows = max(len(world.rows(budget.batch_size)) // budget.accumulate, 1)
        config = config.model_copy(update={"budget": budget.model_copy(update={"batch_size": rows, "accumulate": 1})})
        sizes, budget = sizes._replace(parameters=-(-sizes.parameters // world.extent("data"))), config.budget
    needed, limit = training_bytes(config, sizes), limit or _installed(budget.device)
    if needed > limit:
        raise ConfigError(
            f"training takes at least {readable(needed)}, more than the limit of {readable(limit)}: "
            f"{readable(4 * FLOAT * sizes.parameters)} for {sizes.parameters:,} parameters, the rest for batches of "
            f"{budget.batch_size:,} sequences of {config.seq_len:,} tokens; lower model.d_model, model.layers, "
            "budget.batch_size or budget.seq_len, or raise --mem-limit",
            ("model",) if 8 * FLOAT * sizes.parameters > needed else ("budget", "batch_size"),
        )


def parse_bytes(text: str) -> int:
    """A size such as 8G, 512M or 1.5TiB in bytes; units are powers of 1024."""
    found = re.fullmatch(r"(\d{1,15}(?:\.\d{1,9})?) ?([KMGT]?)(?:i?B)?", text.strip(), re.I)
    if found is None or not float(found[1]):
        raise ConfigError(f"--mem-limit must be a size such as 8G or 512M, got {shorten(text)}")
    return math.ceil(float(found[1]) * 1024 ** " KMGT".index(found[2].upper() or " "))


def _installed(device: str) -> int:
    if device == "cuda" and torch.cuda.is_available():
        return int(torch.cuda.mem_get_info()[1])
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # not on this platform
        return 1 << 40


def _numbers(module: nn.Module) -> int:
    return sum(item.numel() for item in module.parameters())


def estimate_rows(config: ExperimentConfig) -> list[tuple[str, str]]:
    """What the model weighs, carries and computes; nothing is allocated. [TRAIN-EST-D1]

    State: what one sequence carries from token to token, whatever its length without attention.
    Work: multiplications and additions of a token with the weights of linear layers, forward.
    """
    sizes, batch = sizes_of(config), config.budget.batch_size
    tokens = batch * config.seq_len
    cache = 2 * config.model.d_model * config.model.layers * FLOAT
    return [
        ("parameters", f"{sizes.parameters:,}"),
        (f"of which in each of {config.model.layers} blocks", f"{sizes.block:,}"),
        ("weights", readable(sizes.parameters * FLOAT)),
        ("weights, gradients and two moments in training", readable(4 * sizes.parameters * FLOAT)),
        ("training takes at least", readable(training_bytes(config, sizes))),
        ("state per sequence", readable(sizes.state)),
        (f"state of a batch of {batch}", readable(sizes.state * batch)),
        ("tokens whose keys and values in attention weigh as much", f"{sizes.state / cache:,.0f}"),
        ("work with weights per token", f"{2e-6 * sizes.work:,.2f} MFLOP"),
        ("tokens per step", f"{tokens:,}"),
        ("tokens in all", f"{tokens * config.budget.steps:,}"),
        *((f"engine of model.{path}", name) for path, (name, _) in config.engines().items()),
    ]


def taped(config: ExperimentConfig, tokens: int) -> dict[str, tuple[str, dict[str, float]]]:
    """Every memory of a model's block, by its path, scanned over random tokens: the tape and the norms of the
    cotangents by label, from a unit cotangent of the output. [TRAIN-EST-D2]"""
    heads, found = config.model.heads, {}
    for path, (memory, d_key, d_value, _) in config.model.rules().items():
        source = torch.Generator().manual_seed(0)
        each = (tokens, heads) if memory.writes == 1 else (tokens, memory.writes, heads)
        q, k, v = (
            torch.randn(1, *lead, width, generator=source, device="cpu")
            for lead, width in (((tokens, heads), d_key), (each, d_key), (each, d_value))
        )
        q, k = (nn.functional.normalize(x, dim=-1) for x in (q, k))
        how: dict[str, Any] = {"heads": heads, "generator": source}
        params = memory.feature_map.init(d_key, **how)
        start = memory.structure.init(memory.feature_map.output_dim(d_key), d_value, **how)
        tape = Tape(observe=True)
        with torch.no_grad():
            y, _ = memory_scan(memory, q, k, v, Gates(), phi_params=params, initial=start, tape=tape)
            tape.backward([y], [torch.full_like(y, y.numel() ** -0.5)], [q, k, v])
        found[path] = str(tape), {name: float(norm) for name, norm in tape.norms().items()}
    return found
