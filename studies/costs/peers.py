"""Published implementations as peers: each takes and gives hecate's layouts, q, k, v `[B, T, H, width]` and gates
`[B, T, H]`, and is imported only where it is asked for. And token loops in plain torch, for autograd to record, as a
careful person writes them without this library: tensors unbound once, batched products, no indexing inside the loop."""

from __future__ import annotations

import importlib.metadata
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from studies.costs.harness import WIDTH, Function, Peer
from tests.oracle import peers

Slope = Callable[[Tensor], Tensor]
NATIVE = Path("runs/fast-transformers-native")


def peer(name: str, package: str, load: Callable[[], Function]) -> Peer:
    """The function of a package, or what pip is to install."""
    return Peer(name, load() if peers.installed(package.split()[0]) else None, package)


def fla(operation: str, call: Callable[..., Tensor]) -> Peer:
    """fla-core's plain torch reference of an operation; `call` gives its module what it wants."""
    return peer("fla-core naive chunk (C=32)", "fla-core einops", lambda: partial(call, peers.fla(operation)))


def titans(name: str, settings: peers.Titans, **initial: Tensor) -> Peer:
    """titans-pytorch's memory of these settings, from these weights."""

    def load() -> Function:
        module = settings.build(WIDTH)
        return lambda *inputs: settings.run(module, *inputs, **initial)[0]

    return peer(name, "titans-pytorch", load)


def sdpa() -> Peer:
    """Causal softmax attention, another function of the same shapes."""

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        heads = (item.transpose(1, 2) for item in (q, k, v))
        return torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2)

    return Peer("torch SDPA, causal", run, same=False)


def fast_transformers(native: bool = False) -> Peer:
    """fast-transformers' C++ kernel as pip builds it, or built for this processor into the folder NATIVE."""
    package = "pytorch-fast-transformers"
    if native:
        how = f"--target {NATIVE} {package} with CFLAGS='-O3 -march=native'"
        return Peer("fast-transformers C++, native build", _causal_product(NATIVE) if NATIVE.exists() else None, how)

    def load() -> Function:
        return _causal_product(Path(str(importlib.metadata.distribution(package).locate_file(""))))

    return peer("fast-transformers C++, stock build", package, load)


def _causal_product(folder: Path) -> Function:
    (path,) = folder.glob("fast_transformers/causal_product/causal_product_cpu*.so")
    # A name of its own for each build: a second module of one name would be the first again.
    kernel = peers.load(path, f"{folder.name}.causal_product_cpu")

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            ctx.save_for_backward(q, k, v)
            y = torch.zeros_like(v)
            kernel.causal_dot_product(q, k, v, y)
            return y

        @staticmethod
        def backward(ctx: Any, gy: Tensor) -> tuple[Tensor, ...]:
            grads = tuple(torch.zeros_like(item) for item in ctx.saved_tensors)
            kernel.causal_dot_backward(*ctx.saved_tensors, gy.contiguous(), *grads)
            return grads

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        heads = (item.transpose(1, 2).contiguous() for item in (q, k, v))
        return Product.apply(*heads).transpose(1, 2)

    return run


def performer(projection: Tensor) -> Peer:
    """performer-pytorch's causal attention with ReLU features, on a CPU without extensions."""

    def load() -> Function:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from performer_pytorch import performer_pytorch as module

        def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            heads = [item.transpose(1, 2) for item in (q, k, v)]
            phi = [module.generalized_kernel(x, projection_matrix=projection) for x in heads[:2]]
            return module.causal_linear_attention_noncuda(*phi, heads[2]).transpose(1, 2)

        return run

    return peer("performer-pytorch on a CPU", "performer-pytorch", load)


def by_token(*tensors: Tensor) -> list[tuple[Tensor, ...]]:
    """`[B, T, H, ...]` as T tuples of `[B * H, ...]`."""
    columns = [item.transpose(1, 2).flatten(0, 1).unbind(1) for item in tensors]
    return list(zip(*columns, strict=True))


def together(outputs: list[Tensor], like: Tensor) -> Tensor:
    """T tensors `[B * H, V]` as `[B, T, H, V]`."""
    return torch.stack(outputs, 1).unflatten(0, (-1, like.shape[2])).transpose(1, 2)


def matrix_loop(q: Tensor, k: Tensor, v: Tensor, lr: Tensor, retain: Tensor, slope: Slope = torch.positive) -> Tensor:
    """M = retain M - lr slope(M k - v) k^T; y = M q."""
    memory = q.new_zeros(q.shape[0] * q.shape[2], v.shape[-1], q.shape[-1])
    outputs = []
    for qt, kt, vt, step, decay in by_token(q, k, v, lr, retain):
        error = torch.bmm(memory, kt.unsqueeze(-1)).squeeze(-1) - vt
        write = (-step.unsqueeze(-1) * slope(error)).unsqueeze(-1) * kt.unsqueeze(-2)
        memory = torch.addcmul(write, decay[:, None, None], memory)
        outputs.append(torch.bmm(memory, qt.unsqueeze(-1)).squeeze(-1))
    return together(outputs, q)


def mlp_loop(q: Tensor, k: Tensor, v: Tensor, lr: Tensor, retain: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    """Two layers with SiLU, l2, decay and plain steps; the inner gradient by hand."""
    batch = q.shape[0]
    first = w1.expand(batch, *w1.shape).flatten(0, 1)
    second = w2.expand(batch, *w2.shape).flatten(0, 1)
    outputs = []
    for qt, kt, vt, step, decay in by_token(q, k, v, lr, retain):
        step, decay = step[:, None, None], decay[:, None, None]
        key = kt.unsqueeze(-1)
        z = torch.bmm(first, key)
        gate = torch.sigmoid(z)
        hidden = z * gate
        error = torch.bmm(second, hidden) - vt.unsqueeze(-1)
        back = torch.bmm(second.mT, error) * (gate + hidden * (1 - gate))
        second = decay * second - torch.bmm(step * error, hidden.mT)
        first = decay * first - torch.bmm(step * back, key.mT)
        read = torch.nn.functional.silu(torch.bmm(first, qt.unsqueeze(-1)))
        outputs.append(torch.bmm(second, read).squeeze(-1))
    return together(outputs, q)
