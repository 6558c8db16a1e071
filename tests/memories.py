"""Random memories for tests, and the numpy reference run over batch and heads."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hecate import Gates, MemoryConfig, MemoryState, memory_scan
from hecate.engine import Engine
from hecate.errors import ConfigError
from tests.reference import memory as reference

BIASES: list[Any] = [
    "dot",
    "l2",
    {"kind": "lp", "p": 1.5, "eps": 0.1},
    {"kind": "lp", "p": 3.0},
    {"kind": "huber", "delta": 0.7},
    {"kind": "huber", "delta": 0.7, "norm": True},
]
DEEP = {"kind": "mlp", "layers": 2, "expansion": 1, "activation": "silu"}


class Case(NamedTuple):
    """Everything `memory_scan` takes."""

    config: MemoryConfig
    q: Tensor
    k: Tensor
    v: Tensor
    gates: Gates
    initial: dict[str, Tensor]
    write: Tensor | None = None
    reset: Tensor | None = None

    @property
    def leaves(self) -> list[Tensor]:
        """Every floating point input that is a tensor."""
        given = [self.q, self.k, self.v, *self.gates, *self.initial.values()]
        return [item for item in given if isinstance(item, Tensor)]

    def with_leaves(self, leaves: list[Tensor]) -> Case:
        """The same case with other tensors in place of `leaves`."""
        left = iter(leaves)
        q, k, v = next(left), next(left), next(left)
        gates = Gates(*(next(left) if isinstance(g, Tensor) else g for g in self.gates))
        return self._replace(q=q, k=k, v=v, gates=gates, initial={name: next(left) for name in self.initial})

    def fresh(self) -> Case:
        """Detached copies that require gradients."""
        return self.with_leaves([item.detach().clone().requires_grad_() for item in self.leaves])

    def part(self, at: int, end: int) -> Case:
        """Tokens at <= t < end."""
        cut = [item[:, at:end] for item in (self.q, self.k, self.v)]
        gates = Gates(*(g[:, at:end] if isinstance(g, Tensor) else g for g in self.gates))
        masks = [None if mask is None else mask[:, at:end] for mask in (self.write, self.reset)]
        return Case(self.config, *cut, gates, self.initial, *masks)

    def scan(self, state: MemoryState | None = None, **options: Any) -> tuple[Tensor, MemoryState]:
        return memory_scan(
            self.config,
            self.q,
            self.k,
            self.v,
            self.gates,
            state=state,
            initial=self.initial,
            write_mask=self.write,
            reset_mask=self.reset,
            **options,
        )


def config_of(**fields: Any) -> MemoryConfig:
    """A float64 configuration whose steps are tame whatever the bias."""
    return MemoryConfig.model_validate({"state_dtype": "float64", **fields})


def case_of(
    config: MemoryConfig,
    *,
    batch: int = 2,
    length: int = 7,
    heads: int = 2,
    d: int = 3,
    width: int = 2,
    channels: bool = False,
    rates: bool = False,
    masks: bool = False,
    ends: float = 0.0,
    more: Sequence[str] = (),
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
) -> Case:
    """Random inputs; `rates` makes lr one for each weight, `ends` is the share of gates that are exactly 0 or 1, `more`
    names gates of channels beside lr, retain and momentum."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    def gate(low: float, high: float, *shape: int) -> Tensor:
        values = low + (high - low) * torch.rand(*shape, generator=generator)
        extreme = torch.randint(0, 2, shape, generator=generator).to(values.dtype)
        chosen = torch.rand(*shape, generator=generator) < ends
        return torch.where(chosen, extreme * min(high, 1.0), values).to(dtype)

    lead = (batch, length, heads)
    d_phi = config.feature_map.output_dim(d)
    initial = {
        name: normal(heads, *shape) / shape[-1] ** 0.5 for name, shape in config.structure.shapes(d_phi, width).items()
    }
    wide = (*lead, d_phi) if channels else lead
    several = (batch, length, config.writes, heads) if config.writes > 1 else lead
    # A deep memory's curvature grows with its weights: steps that a matrix bears blow it up.
    top = 0.5 if config.structure.linear else 0.1
    gates = Gates(
        gate(0.1 * top, top, *several, *((len(initial),) if rates else ())),
        gate(0.5, 1.0, *wide) if config.retention.uses_retain else None,
        gate(0.1, 0.9, *lead) if config.algorithm.uses_momentum else None,
    )
    q, k, v = normal(*lead, d), normal(*several, d) / d**0.5, normal(*several, width)
    shapes = {"erase": (*several, d_phi), "write": (*several, d_phi), "retain_value": (*lead, width)}
    gates = gates._replace(**{name: gate(0.5, 1.0, *shapes[name]) for name in more})
    masked = [torch.rand(batch, length, generator=generator) < share if masks else None for share in (0.7, 0.2)]
    return Case(config, q, k, v, gates, initial, *masked)


def reference_of(config: MemoryConfig) -> reference.Rule:
    """The same choices by the names of the numpy reference."""
    bias = config.bias.model_dump(exclude={"kind"})
    structure = config.structure.model_dump(include={"activation", "residual"})
    if getattr(config.structure, "norm", "none") == "layer":
        structure["norm_eps"] = config.structure.norm_eps
    structure["biased"] = getattr(config.structure, "bias", False)
    structure["gated"] = config.structure.kind == "gated_mlp"
    names = ("chunk", "commit", "read", "decay_order", "normalizer")
    names += ("key_norm", "query_scale", "step")
    maps = {"identity": lambda x: x, "elu": reference.elu, "relu": lambda x: np.maximum(x, 0)}
    return reference.Rule(
        bias=config.bias.kind,
        decay=config.retention.kind == "decay",
        towards="start" if config.retention.anchored else "zero",
        momentum=config.algorithm.kind == "momentum",
        phi=maps[config.feature_map.kind],
        **bias,
        **structure,
        **{name: getattr(config, name) for name in names},
    )


def reference_scan(case: Case) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Outputs `[B, T, H, V]` and the final tensors by the names of the state."""
    rule = reference_of(case.config)
    batch, length, heads, _ = case.k.shape
    names = list(case.initial)
    y = np.zeros((batch, length, heads, case.v.shape[-1]))
    final: dict[str, list[np.ndarray]] = {}
    lr, retain, momentum = (
        g.detach().double().numpy() if isinstance(g, Tensor) else np.full(case.k.shape[:3], fill)
        for g, fill in zip(case.gates[:3], (1.0, 1.0, 0.0), strict=True)
    )
    q, k, v = (item.detach().double().numpy() for item in (case.q, case.k, case.v))
    masks = [None if mask is None else mask.numpy() for mask in (case.write, case.reset)]
    for b in range(batch):
        for h in range(heads):
            weights = [case.initial[name][h].detach().double().numpy() for name in names]
            y[b, :, h], state = reference.scan(
                rule,
                *(item[b, :, h] for item in (q, k, v, lr, retain, momentum)),
                weights,
                *(None if mask is None else mask[b] for mask in masks),
            )
            for name, weight, slot, pending in zip(names, state.weights, state.slots, state.pending, strict=True):
                final.setdefault(f"memory.{name}", []).append(weight)
                final.setdefault(f"slots.momentum.{name}", []).append(slot)
                final.setdefault(f"pending.{name}", []).append(pending)
            kept = np.broadcast_to(state.kept, retain.shape[3:])
            final.setdefault("pending.retain", []).append(kept)
    lead = (batch, heads)
    return y, {n: np.stack(items).reshape(*lead, *items[0].shape) for n, items in final.items()}


def flat_state(state: MemoryState) -> dict[str, Tensor]:
    """Every tensor of a state by a dotted name."""
    out = {"position": state.position}
    for part in ("memory", "slots", "anchor", "pending"):
        out.update({f"{part}.{name}": item for name, item in getattr(state, part).items()})
    if state.normalizer is not None:
        out.update({f"normalizer.{n}": item for n, item in flat_state(state.normalizer).items()})
    return out


def weighted(y: Tensor, state: MemoryState, seed: int = 9) -> Tensor:
    """A random linear function of the outputs and of every tensor of the state."""
    generator = torch.Generator().manual_seed(seed)
    items = [item for item in flat_state(state).values() if item.is_floating_point()]
    total = (y * torch.randn(y.shape, generator=generator)).sum()
    for item in items:
        total = total + (item * torch.randn(item.shape, generator=generator)).sum()
    return total


def close(got: Any, expected: Any, rtol: float, what: str = "") -> None:
    """The error in norm, relative to the norm of the truth (at least 1e-3)."""
    got, expected = (torch.as_tensor(item).detach().double() for item in (got, expected))
    assert got.shape == expected.shape, f"{what}: {list(got.shape)} against {list(expected.shape)}"
    error, size = float((got - expected).norm()), max(float(expected.norm()), 1e-3)
    assert error <= rtol * size, f"{what}: error {error:.3e} against a norm of {size:.3e}"


def same_state(got: MemoryState, expected: MemoryState, rtol: float) -> None:
    mine, theirs = flat_state(got), flat_state(expected)
    assert mine.keys() == theirs.keys()
    for name, item in mine.items():
        close(item, theirs[name], rtol, name)


def ways(
    configs: dict[str, dict[str, Any]], engines: Sequence[str] = ("sequential", "parallel")
) -> list[tuple[str, str]]:
    """Every configuration by name with every engine that runs it."""
    pairs = product(configs, engines)
    return [(name, own) for name, own in pairs if Engine.registry[own].refuses(config_of(**configs[name])) is None]


def possible(fields: dict[str, Any]) -> MemoryConfig | None:
    """The configuration, or None where the combination is refused."""
    try:
        return config_of(**fields)
    except ConfigError:
        return None
