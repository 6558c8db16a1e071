"""Linear attention and memories that learn, beside peers: delta rules, momentum, deep memories, other biases."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from hecate import Gates, MemoryConfig, bias, memory_scan, named_rule, phi, retention, structure
from studies.costs import peers
from studies.costs.harness import WIDTH, Peer, Row, Size, compare, cost, drawn, scan
from studies.costs.loops import matrix_loop
from studies.timing import Function
from tests.oracle.peers import Titans


@cost
def linear(size: Size) -> Iterator[Row]:
    """Causal linear attention against a C++ kernel, softmax attention and performer-pytorch."""
    case, inputs = "linear attention, T={}".format, drawn(size.length)
    ours, softmax = scan(named_rule("hebbian")), peers.sdpa()
    for peer in (peers.stock(), peers.native()):
        yield compare(case(size.length), ours, peer, inputs, size.repeats)
    yield compare(case(size.length), ours, softmax, inputs, size.repeats, tolerance=None)
    long = size.short(16384)
    yield compare(case(long), ours, softmax, drawn(long, batch=1), size.fewer(9), tolerance=None)
    relu = phi.PerformerReLU(kernel_epsilon=1e-3 * WIDTH**0.25)
    params = relu.init(WIDTH)
    config = MemoryConfig(bias="dot", feature_map=relu, normalizer="sum")
    peer = peers.performer(params["frozen"]["w"][0].mT.contiguous())
    name = f"linear attention, ReLU features ({relu.output_dim(WIDTH)}), normaliser"
    yield compare(name, scan(config, phi_params=params), peer, inputs, size.fewer(3))


@cost
def delta(size: Size) -> Iterator[Row]:
    """The delta rule against fla-core's chunked reference."""
    peer = peers.fla("delta_rule", lambda module, *inputs: _heads_first(module.delta_rule_chunkwise, *inputs))
    ours = scan(MemoryConfig(query_scale="key_dim"))
    yield compare(f"delta, T={size.length}", ours, peer, drawn(size.length, 1), size.repeats)


def _heads_first(call: Function, *inputs: Tensor) -> Tensor:
    return call(*(x.transpose(1, 2) for x in inputs))[0].transpose(1, 2)


@cost
def gated_delta(size: Size) -> Iterator[Row]:
    """The gated delta rule against fla-core's chunked reference."""

    def theirs(module, q: Tensor, k: Tensor, v: Tensor, lr: Tensor, retain: Tensor) -> Tensor:
        return module.naive_chunk_gated_delta_rule(q, k, v, retain.log(), lr, chunk_size=32)[0]

    ours = scan(named_rule("gated_delta").model_copy(update={"key_norm": "none", "query_scale": "key_dim"}))
    peer = peers.fla("gated_delta_rule", theirs)
    yield compare(f"gated delta, T={size.length}", ours, peer, drawn(size.length, 2), size.repeats)


@cost
def titans(size: Size) -> Iterator[Row]:
    """Titans with one linear layer: exact token by token, where the peer approximates."""
    name, weight = "titans-pytorch, chunks of 64 (an approximation)", torch.zeros(4, WIDTH, WIDTH, dtype=torch.float32)
    peer = peers.titans(name, Titans(chunk=64, batch=64), weight=weight)
    ours, inputs = scan(MemoryConfig(retention="decay", algorithm="momentum")), drawn(size.length, 3, largest=0.1)
    case = f"Titans linear with momentum, exact, T={size.length}"
    yield compare(case, ours, peer, inputs, size.repeats, tolerance=None)


@cost
def mlp(size: Size) -> Iterator[Row]:
    """Titans with two layers and gradients frozen at a chunk's start, the same function."""
    deep, chunk = structure.MLP(layers=2, expansion=1, activation="gelu"), 64
    initial = deep.init(WIDTH, WIDTH, heads=4)
    for commit, length in (("chunk", size.length), ("token", size.short(512))):
        per_chunk = commit == "chunk"
        decay = retention.Decay(towards="zero")
        config = MemoryConfig(structure=deep, retention=decay, algorithm="momentum", chunk=chunk, commit=commit)
        settings = Titans(depth=2, chunk=chunk if per_chunk else 1, batch=chunk)
        q, k, v, lr, *gates = drawn(length, 3, largest=0.01)
        if per_chunk:  # one step per chunk has one gate: the peer's is the mean over the chunk
            gates = [gate[:, ::chunk].repeat_interleave(chunk, 1)[:, :length] for gate in gates]
        peer = peers.titans(f"titans-pytorch, batches of {chunk}, same function", settings, **initial)
        ours = partial(_mlp, config, initial)
        case = f"Titans MLP, one step per {commit}, T={length}"
        yield compare(case, ours, peer, (q, k, v, lr, *gates), size.fewer(2))


def _mlp(config: MemoryConfig, initial: dict[str, Tensor], *inputs: Tensor) -> Tensor:
    q, k, v, lr, retain, momentum = inputs
    if config.commit == "chunk":  # a chunk keeps the product of its retain gates, and its last momentum
        retain = retain ** (1 / config.chunk)
        momentum = momentum.unflatten(1, (-1, config.chunk)).mean(2).repeat_interleave(config.chunk, 1)
    return memory_scan(config, q, k, v, Gates(lr, retain, momentum), initial=initial)[0]


@cost
def biases(size: Size) -> Iterator[Row]:
    """Biases for which no peer has a parallel form, against the rule's token loop."""
    length, near = size.short(512), {"p": 1.01, "eps": 1e-2}
    for name, loss, slope in (
        ("huber", bias.Huber(delta=0.5), partial(torch.clamp, min=-0.5, max=0.5)),
        ("near l1 (lp 1.01)", bias.Lp(**near), partial(_power, **near)),
    ):
        peer = Peer("token loop in torch under autograd", partial(matrix_loop, slope=slope))
        ours, inputs = scan(MemoryConfig(bias=loss, retention="decay")), drawn(length, 2, largest=0.1)
        yield compare(f"{name}, T={length}", ours, peer, inputs, size.fewer(2))


def _power(error: Tensor, p: float, eps: float) -> Tensor:
    radius = (error.square() + eps**2).sqrt()
    return (error.square() / (radius + eps)) ** (p - 1) * error / radius
