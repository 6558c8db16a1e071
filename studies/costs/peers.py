"""Published implementations behind one signature; each is used only if it is installed.

Every function takes and gives hecate's layouts: q, k, v `[B, T, H, width]`, gates `[B, T, H]`,
states `[B, H, V, P]`. None of them is imported before it is asked for.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


def installed(package: str) -> bool:
    """Whether a distribution is there, without importing it."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return bool(importlib.metadata.version(package))
    return False


def load(path: Path, name: str) -> ModuleType:
    """A module by its file, without importing the package around it."""
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python module")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def fla(operation: str) -> ModuleType:
    """fla-core's plain torch reference of an operation; its package would import triton."""
    path = importlib.metadata.distribution("fla-core").locate_file(f"fla/ops/{operation}/naive.py")
    return load(Path(str(path)), f"fla_{operation.replace('/', '_')}_naive")


def causal_product(folder: Path | None = None) -> Callable[..., Tensor]:
    """fast-transformers' C++ kernel, from its installation or from a `pip install --target`."""
    if folder is None:
        found = importlib.metadata.distribution("pytorch-fast-transformers")
        folder = Path(str(found.locate_file("")))
    (path,) = folder.glob("fast_transformers/causal_product/causal_product_cpu*.so")
    # A name of its own for each build: a second module of one name would be the first again.
    kernel = load(path, f"{folder.name}.causal_product_cpu")

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


def performer(projection: Tensor) -> Callable[..., Tensor]:
    """performer-pytorch's causal attention with ReLU features, on a CPU without extensions."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from performer_pytorch import performer_pytorch as module

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        heads = [item.transpose(1, 2) for item in (q, k, v)]
        phi = [module.generalized_kernel(x, projection_matrix=projection) for x in heads[:2]]
        return module.causal_linear_attention_noncuda(*phi, heads[2]).transpose(1, 2)

    return run


class Titans(NamedTuple):
    """titans-pytorch's `NeuralMemory` with everything beside Titans' equations switched off.

    No norm, residual or projection; loss 1/2 |M(k) - v|^2; q, k, v and gates are read off its
    input. One sequence of one head per batch row. Gradients are taken at the start of every `batch`
    tokens; every `chunk` tokens share one step with their mean gates.
    """

    depth: int = 1
    expansion: float = 1.0
    chunk: int = 1
    batch: int | None = 1

    def build(self, width: int) -> nn.Module:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from titans_pytorch import MemoryMLP, NeuralMemory

        module: nn.Module = NeuralMemory(
            width,
            chunk_size=self.chunk,
            batch_size=self.batch,
            model=MemoryMLP(width, depth=self.depth, expansion_factor=self.expansion),
            store_memory_loss_fn=lambda p, v: 0.5 * (p - v).square().sum(-1),
            adaptive_step_transform=lambda lr: lr,
            pre_rmsnorm=False,
            mem_model_norm_add_residual=False,
        )
        parts = ("to_queries", "to_keys", "to_values")
        for index, name in enumerate(parts):
            setattr(module, name, _Columns(index * width, (index + 1) * width))
        module.to_adaptive_step = _Columns(3 * width)
        module.to_momentum = nn.Sequential(_Columns(3 * width + 1, 3 * width + 2), _Leading())
        module.to_decay_factor = _Columns(3 * width + 2, 3 * width + 3)
        return module

    def run(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, *gates: Tensor, **initial: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """y `[B, T, H, V]` and the last weights `[B, H, out, in]`; gates lr, retain, momentum.

        `initial` holds weights `[H, out, in]`.
        """
        batch, _, heads, _ = q.shape
        lr, retain, momentum = (gate.unsqueeze(-1) for gate in gates)
        packed = torch.cat([q, k, v, lr, momentum.logit(), (1 - retain).logit()], -1)
        rows = packed.transpose(1, 2).flatten(0, 1)
        names = module.memory_model_parameter_names
        weights = {
            name: weight.mT.expand(batch, *weight.mT.shape).flatten(0, 1)
            for name, weight in zip(names, initial.values(), strict=True)
        }
        module.init_weights = lambda _: _tensors(weights)
        module.init_momentum = lambda _: _tensors(
            {name: torch.zeros_like(weight).unsqueeze(0) for name, weight in weights.items()}
        )
        y, state = module(rows)
        last = state.states[0]
        final = {
            name: last[theirs].mT.unflatten(0, (batch, heads)) for name, theirs in zip(initial, names, strict=True)
        }
        return y.unflatten(0, (batch, heads)).transpose(1, 2), final


def _tensors(values: dict[str, Tensor]) -> Any:
    from tensordict import TensorDict

    return TensorDict(values)


class _Columns(nn.Module):
    """A projection that only picks: columns from `start` to `end`, or the one at `start`."""

    def __init__(self, start: int, end: int | None = None) -> None:
        super().__init__()
        self.columns = start if end is None else slice(start, end)

    def forward(self, x: Tensor) -> Tensor:
        return x[..., self.columns]


class _Leading(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.unsqueeze(0)
