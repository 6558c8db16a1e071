"""Memories that learn: delta rules, momentum, deep memories, other biases."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from hecate import Gates, MemoryConfig, bias, memory_scan, named_rule, retention, structure
from studies.costs import peers
from studies.costs.harness import WIDTH, Row, Size, compare, gates, scan, sequence
from studies.costs.loops import matrix_loop

FLA = "fla-core einops"
TITANS = "titans-pytorch"


def delta(size: Size) -> Iterator[Row]:
    """The delta rule against fla-core's chunked reference."""
    theirs = None
    if peers.installed("fla-core"):
        chunked = peers.fla("delta_rule").delta_rule_chunkwise

        def theirs(q: Tensor, k: Tensor, v: Tensor, lr: Tensor) -> Tensor:
            return chunked(*(x.transpose(1, 2) for x in (q, k, v, lr)))[0].transpose(1, 2)

    yield compare(
        f"delta, T={size.length}",
        scan(MemoryConfig(query_scale="key_dim")),
        "fla-core naive chunk (C=32)",
        theirs,
        (*sequence(size.length), gates(size.length)[0]),
        repeats=size.repeats,
        package=FLA,
    )


def gated_delta(size: Size) -> Iterator[Row]:
    """The gated delta rule against fla-core's chunked reference."""
    theirs = None
    if peers.installed("fla-core"):
        chunked = peers.fla("gated_delta_rule").naive_chunk_gated_delta_rule

        def theirs(q: Tensor, k: Tensor, v: Tensor, lr: Tensor, retain: Tensor) -> Tensor:
            return chunked(q, k, v, retain.log(), lr, chunk_size=32)[0]

    config = named_rule("gated_delta").model_copy(update={"key_norm": "none", "query_scale": "key_dim"})
    yield compare(
        f"gated delta, T={size.length}",
        scan(config),
        "fla-core naive chunk (C=32)",
        theirs,
        (*sequence(size.length), *gates(size.length)[:2]),
        repeats=size.repeats,
        package=FLA,
    )


def titans(size: Size) -> Iterator[Row]:
    """Titans with one linear layer: exact token by token, where the peer approximates."""
    yield compare(
        f"Titans linear with momentum, exact, T={size.length}",
        scan(MemoryConfig(retention="decay", algorithm="momentum")),
        "titans-pytorch, chunks of 64 (an approximation)",
        _titans(peers.Titans(chunk=64, batch=64), weight=torch.zeros(4, WIDTH, WIDTH, dtype=torch.float32)),
        (*sequence(size.length), *gates(size.length, largest=0.1)),
        repeats=size.repeats,
        tolerance=None,
        package=TITANS,
    )


def mlp(size: Size) -> Iterator[Row]:
    """Titans with two layers and gradients frozen at a chunk's start, the same function."""
    deep = structure.MLP(layers=2, expansion=1, activation="gelu")
    for chunk, length, per_chunk in ((64, size.length, True), (64, size.short(512), False)):
        config = MemoryConfig(
            structure=deep,
            retention=retention.Decay(towards="zero"),
            algorithm="momentum",
            chunk=chunk,
            commit="chunk" if per_chunk else "token",
        )
        peer = peers.Titans(depth=2, chunk=chunk if per_chunk else 1, batch=chunk)
        initial = deep.init(WIDTH, WIDTH, heads=4)
        lr, retain, momentum = gates(length, largest=0.01)
        if per_chunk:  # one step per chunk has one gate: the peer's is the mean over the chunk
            retain, momentum = (gate[:, ::chunk].repeat_interleave(chunk, 1)[:, :length] for gate in (retain, momentum))
        yield compare(
            f"Titans MLP, one step per {'chunk' if per_chunk else 'token'}, T={length}",
            _mlp(config, initial, per_chunk),
            f"titans-pytorch, batches of {chunk}, same function",
            _titans(peer, **initial),
            (*sequence(length), lr, retain, momentum),
            repeats=size.fewer(2),
            package=TITANS,
        )


def _mlp(config: MemoryConfig, initial: dict[str, Tensor], per_chunk: bool) -> Callable[..., Tensor]:
    def run(q: Tensor, k: Tensor, v: Tensor, lr: Tensor, retain: Tensor, momentum: Tensor) -> Tensor:
        if per_chunk:  # a chunk keeps the product of its retain gates, and its last momentum
            retain = retain ** (1 / config.chunk)
            means = momentum.unflatten(1, (-1, config.chunk)).mean(2)
            momentum = means.repeat_interleave(config.chunk, 1)
        return memory_scan(config, q, k, v, Gates(lr, retain, momentum), initial=initial)[0]

    return run


def _titans(peer: peers.Titans, **initial: Tensor) -> Callable[..., Tensor] | None:
    if not peers.installed(TITANS):
        return None
    module = peer.build(WIDTH)
    return lambda *inputs: peer.run(module, *inputs, **initial)[0]


def biases(size: Size) -> Iterator[Row]:
    """Biases for which no peer has a parallel form, against the rule's token loop."""
    length = size.short(512)
    l1 = 1e-2
    for name, loss, slope in (
        ("huber", bias.Huber(delta=0.5), partial(torch.clamp, min=-0.5, max=0.5)),
        ("near l1 (lp 1.01)", bias.Lp(p=1.01, eps=l1), partial(_power, p=1.01, eps=l1)),
    ):
        yield compare(
            f"{name}, T={length}",
            scan(MemoryConfig(bias=loss, retention="decay")),
            "token loop in torch under autograd",
            partial(matrix_loop, slope=slope),
            (*sequence(length), *gates(length, largest=0.1)[:2]),
            repeats=size.fewer(2),
        )


def _power(error: Tensor, p: float, eps: float) -> Tensor:
    radius = (error.square() + eps**2).sqrt()
    return (error.square() / (radius + eps)) ** (p - 1) * error / radius
