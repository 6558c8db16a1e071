"""Sizes of an experiment before it is run, and tapes of its memories."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from hecate.checks import check_room, memory_of, readable
from hecate.distributed import AXES, each_of
from hecate.distributed.context import Way, ways
from hecate.engine import memory_scan
from hecate.errors import CheckpointError, ConfigError, shorten
from hecate.models import LanguageModel
from hecate.models.language_model import parameters_of
from hecate.rule import Gates, bytes_of
from hecate.tape import Tape
from hecate.train.config import ExperimentConfig

FLOAT = 4  # bytes of a float32


class Sizes(NamedTuple):
    """Sizes of a model.

    Fields:
        parameters: parameters of the model.
        block: parameters of one of its blocks.
        own: parameters held by the first process, which has the largest part.
        state: bytes of the state of one sequence.
        work: weights of linear layers that a token is multiplied with.
    """

    parameters: int
    block: int
    own: int
    state: int
    work: int


class Share(NamedTuple):
    """Share of one process in a run: number of shards of the parameters, rows in one pass, tokens of each row."""

    shards: int
    rows: int
    tokens: int


def share_of(config: ExperimentConfig, processes: int = 1) -> Share:
    """The share of each of `processes`; `ConfigError` if the mesh or the batch does not fit that number."""
    replicate, data, context = config.parallel.shape(processes)
    rows = each_of(config.budget.batch_size, replicate * data)
    return Share(data, -(-rows // config.budget.accumulate), -(-config.seq_len // context))


def sizes_of(config: ExperimentConfig, shards: int = 1) -> Sizes:
    """Sizes of the model that `train` builds, computed from one of its blocks on the meta device.

    Parameters are sharded along their first dimension, in equal parts except the last. [TRAIN-EST-D4]
    """
    model, layers = _one_block(config), config.model.layers
    _, (state,) = model(torch.zeros(1, 0, dtype=torch.int64, device="meta"))

    def whole(of: Callable[[nn.Module], int]) -> int:
        return of(model) + (layers - 1) * of(model.blocks[0])

    def weights(module: nn.Module) -> int:
        return sum(item.weight.numel() for item in module.modules() if isinstance(item, nn.Linear))

    def shard(module: nn.Module) -> int:
        return sum(-(-len(p) // shards) * (p.numel() // max(len(p), 1)) for p in module.parameters())

    tied = model.embedding.weight.numel() if model.head is None else 0
    parameters, block = whole(_numbers), _numbers(model.blocks[0])
    return Sizes(parameters, block, whole(shard), layers * bytes_of(state), whole(weights) + tied)


@lru_cache(maxsize=256)
def flops_of(config: ExperimentConfig) -> float:
    """Operations per token of a forward pass over a sequence: products in layers, memories and attention, two for each
    multiplication and addition, counted by `FlopCounterMode` in one block on the meta device. Attention counts half of
    all pairs, which is what a causal mask or a window leaves. [TRAIN-EST-D5]"""
    from torch.utils.flop_counter import FlopCounterMode

    model, layers = _one_block(config), config.model.layers
    with torch.no_grad(), FlopCounterMode(display=False) as counter, _Pairs() as pairs:
        model(torch.zeros(1, config.seq_len, dtype=torch.int64, device="meta"))
    block = sum(counter.flop_counts["LanguageModel.blocks.0"].values()) + pairs.flops
    return float(counter.get_total_flops() + pairs.flops + (layers - 1) * block) / config.seq_len


def _one_block(config: ExperimentConfig) -> LanguageModel:
    """The model that `train` builds, with a single block, on the meta device."""
    return LanguageModel(config.model_for_data().model_copy(update={"layers": 1}), device="meta")


class _Pairs(TorchFunctionMode):
    """Counter of attention's operations, from shapes: 2 D for the score of a query and a key, 2 V for its value."""

    flops = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not nn.functional.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        q, k, v = args[:3]
        # Causal: half of all pairs count.
        self.flops += q.shape[:-1].numel() * k.shape[-2] * (q.shape[-1] + v.shape[-1])  # half the pairs, each twice
        return q.new_empty((*q.shape[:-1], v.shape[-1]))


def ways_of(config: ExperimentConfig) -> dict[str, Way]:
    """The way in which each layer of a block runs on ranks that share a sequence, by its path in the model; empty if
    each process has whole sequences. [CTX-WAY-D2]"""
    ranks = config.parallel.context
    return {} if ranks == 1 else ways(_one_block(config), ranks)


def training_bytes(config: ExperimentConfig, sizes: Sizes, share: Share) -> dict[str, int]:
    """Lower bound of the bytes of a process, by purpose: weights, gradients and two moments of its part; the parameters
    gathered while a block runs; the states of its rows; and the logits and block inputs kept for the backward pass.
    [TRAIN-EST-D3]"""
    model, low = config.model, config.budget.precision == "bfloat16"
    each, tokens = FLOAT // 2 if low else FLOAT, share.rows * share.tokens
    around = sizes.parameters - (model.layers - 1) * sizes.block  # outside of blocks, and in one block
    return {
        "weights, gradients and two moments in training": 4 * FLOAT * sizes.own,
        "parameters gathered from others while a block runs": each * around if share.shards > 1 else 0,
        f"states of {share.rows:,} sequences": share.rows * sizes.state,
        "logits, and inputs of blocks": tokens
        * (FLOAT * config.data.vocabulary() + each * model.layers * model.d_model),
    }


def check_memory(config: ExperimentConfig, limit: int | None, processes: int = 1) -> None:
    """Refuses an experiment if each of `processes` needs more bytes than `limit`, or than its device has if that is
    None. [TRAIN-EST-D3]"""
    share = share_of(config, processes)
    sizes, budget = sizes_of(config, share.shards), config.budget
    parts = training_bytes(config, sizes, share)
    needed, limit = sum(parts.values()), limit or memory_of(budget.device)
    if needed > limit:
        weights, *_ = parts.values()
        knobs = ["model.d_model", "model.layers"]
        knobs += ["budget.batch_size"] if share.rows > 1 and processes == 1 else []
        knobs += ["budget.seq_len"] if config.data.length() is None else []
        raises = ["budget.accumulate"] if share.rows > 1 else []
        raises += ["parallel.data (more processes)"] if 2 * weights > needed else []
        place = "training takes" if processes == 1 else f"each of {processes:,} processes takes"
        raise ConfigError(
            f"{place} at least {readable(needed)}, more than the limit of {readable(limit)}: "
            f"{readable(weights)} for {sizes.own:,} parameters, the rest for batches of "
            f"{share.rows:,} sequences of {share.tokens:,} tokens; lower {_join_names(knobs)}, or raise "
            f"{_join_names([*raises, '--mem-limit'])}",
            ("model",) if 2 * weights > needed else ("budget", "batch_size"),
        )


def check_weights(config: ExperimentConfig) -> None:
    """Refuses a model whose parameters this machine cannot hold, before it is built. [TRAIN-EST-D6]"""
    count = parameters_of(config.model_for_data())
    cure = "lower model.d_model or model.layers, or take a larger machine"
    check_room(FLOAT * count, f"model: has {count:,} parameters", cure)


def check_opening(config: ExperimentConfig, stored: Mapping[str, Tensor], where: str, *, scored: bool) -> None:
    """Refuses, before it is built, a model that this machine cannot hold (if `scored` with a batch for evaluation), and
    one whose config claims more parameters than the `stored` tensors have elements. [TRAIN-EST-D6]"""
    check_weights(config)
    count = parameters_of(config.model_for_data())
    # The config of a file could claim a model of any size; the stored tensors bound it.
    there = sum(tensor.numel() for name, tensor in stored.items() if name.startswith("model/"))
    if count > there:
        raise CheckpointError(
            f"{where} has {there:,} numbers of a model, whose config claims {count:,} parameters: it belongs to "
            "another model config"
        )
    if scored:
        tokens = config.budget.batch_size * config.seq_len
        size = FLOAT * (count + tokens * config.data.vocabulary()) + config.budget.batch_size * sizes_of(config).state
        what = f"an evaluation takes {count:,} parameters and batches of {tokens:,} tokens"
        check_room(size, what, "lower budget.batch_size in the config of the run", device=config.budget.device)


def _join_names(names: list[str]) -> str:
    return " or ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def parse_bytes(text: str) -> int:
    """A size such as 8G, 512M or 1.5TiB in bytes; units are powers of 1024."""
    match = re.fullmatch(r"(\d{1,15}(?:\.\d{1,9})?) ?([KMGT]?)(?:i?B)?", text.strip(), re.I)
    if match is None or not float(match[1]):
        raise ConfigError(f"--mem-limit must be a size such as 8G or 512M, got {shorten(text)}")
    return math.ceil(float(match[1]) * 1024 ** " KMGT".index(match[2].upper() or " "))


def _numbers(module: nn.Module) -> int:
    return sum(item.numel() for item in module.parameters())


def estimate_rows(config: ExperimentConfig, processes: int = 1) -> list[tuple[str, str]]:
    """Rows of the estimate: parameters, state and work of the model, and the share of each of `processes`; nothing is
    allocated. [TRAIN-EST-D1]

    State: bytes that one sequence carries from token to token; without attention independent of its length.
    Work: operations per token of a forward pass.
    """
    share = share_of(config, processes)
    sizes, batch = sizes_of(config, share.shards), config.budget.batch_size
    tokens = batch * config.seq_len
    # Bytes per token in the cache of a transformer of this size: a key and a value in each layer.
    cache = 2 * config.model.d_model * config.model.layers * FLOAT
    parts = training_bytes(config, sizes, share)
    taken = [(what, readable(size)) for what, size in parts.items() if size]
    if processes > 1:
        shape = ", ".join(f"{n:,} {axis}" for axis, n in zip(AXES, config.parallel.shape(processes), strict=True))
        parameters = f"{sizes.own:,} ({sizes.own / sizes.parameters:.2%})"
        taken = [(f"each of {processes:,} processes", shape), ("parameters on one", parameters), *taken]
    return [
        ("parameters", f"{sizes.parameters:,}"),
        (f"of which in each of {config.model.layers} blocks", f"{sizes.block:,}"),
        ("weights", readable(sizes.parameters * FLOAT)),
        *taken,
        ("training takes at least", readable(sum(parts.values()))),
        ("state per sequence", readable(sizes.state)),
        (f"state of a batch of {batch}", readable(sizes.state * batch)),
        ("tokens whose keys and values in attention weigh as much", f"{sizes.state / cache:,.0f}"),
        ("work with weights per token", f"{2e-6 * sizes.work:,.2f} MFLOP"),
        ("work per token, memories and attention included", f"{1e-6 * flops_of(config):,.2f} MFLOP"),
        ("tokens per step", f"{tokens:,}"),
        ("tokens in all", f"{tokens * config.budget.steps:,}"),
        *((f"engine of model.{path}", name) for path, (name, _) in config.engines().items()),
        *((f"context of {path}", ": ".join(way)) for path, way in ways_of(config).items()),
    ]


def taped(config: ExperimentConfig, tokens: int) -> dict[str, tuple[str, dict[str, float]]]:
    """Tapes of a scan of random tokens by each memory of a block, by its path; and the norms of cotangents by label,
    from a unit cotangent of the output. [TRAIN-EST-D2]"""
    heads, tapes = config.model.heads, {}
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
        # In a deep memory at zero all cotangents would be 0: weights are drawn as in a layer.
        start = memory.structure.init(memory.feature_map.output_dim(d_key), d_value, **how)
        tape = Tape(observe=True)
        with torch.no_grad():
            y, _ = memory_scan(memory, q, k, v, Gates(), phi_params=params, initial=start, tape=tape)
            tape.backward([y], [torch.full_like(y, y.numel() ** -0.5)], [q, k, v])
        tapes[path] = str(tape), {name: float(norm) for name, norm in tape.norms().items()}
    return tapes
