"""Published implementations behind one signature; each is used only if it is installed.

Every function takes and gives hecate's layouts: q, k, v `[B, T, H, width]`, gates `[B, T, H]`,
states `[B, H, V, P]`. None of them is imported before it is asked for.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import warnings
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
        gates = 3 * width
        for name, chosen in {
            "to_queries": lambda x: x[..., :width],
            "to_keys": lambda x: x[..., width : 2 * width],
            "to_values": lambda x: x[..., 2 * width : gates],
            "to_adaptive_step": lambda x: x[..., gates],
            "to_momentum": lambda x: x[..., gates + 1 : gates + 2].unsqueeze(0),
            "to_decay_factor": lambda x: x[..., gates + 2 : gates + 3],
        }.items():
            delattr(module, name)  # a module, in whose place no function can be set
            setattr(module, name, chosen)
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
