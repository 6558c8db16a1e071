"""Checks of a memory configuration: its knobs, then whole scans on every engine."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from hecate.engine import exact_engines, memory_scan
from hecate.phi import Params
from hecate.rule import Gates, MemoryConfig, MemoryState
from hecate.testing.knobs import check_knobs, close
from hecate.testing.vjp import SIGNAL_FLOOR, require


def check_rule(
    config: MemoryConfig,
    *,
    d: int = 3,
    width: int = 3,
    heads: int = 2,
    length: int = 6,
    smooth: bool = True,
    generator: torch.Generator | None = None,
) -> None:
    """Checks a configuration in float64: its knobs' derivatives and traits, then a whole scan.

    A scan must give the same outputs, final state and gradients by tape and by autograd, whole and in pieces, on every
    engine that runs it, and with masked tokens (holding NaN) as without them;
    a later token must change nothing before it. `smooth=False` leaves out second derivatives.
    Keys have width `d`, values `width`. Raises AssertionError naming what failed.
    """
    generator = generator or torch.Generator().manual_seed(0)
    config = config.model_copy(update={"state_dtype": "float64"})
    check_knobs(config, d=d, width=width, smooth=smooth, generator=generator)
    case = _inputs(config, d, width, heads, length, generator)
    whole = _run(case, engine="sequential", autodiff="torch")
    signal = max(float(grad.norm()) for grad in whole.grads)
    require(signal > SIGNAL_FLOOR, f"{_name(config)}: no gradient above {SIGNAL_FLOOR}")
    taped = _run(case, engine="sequential", autodiff="tape")
    _same(config, "the tape against autograd", taped, whole)
    cuts = (0, 1, 1, length // 2 + 1, length)
    _same(config, "a scan in pieces against the whole", _run(case, cuts=cuts), whole)
    for engine in exact_engines(config, length=length):
        for autodiff in ("tape", "torch"):
            got = _run(case, engine=engine, autodiff=autodiff)
            _same(config, f"engine {engine} ({autodiff}) against sequential", got, whole)
    _check_masks(case)
    _check_causality(case)


class _Case(NamedTuple):
    config: MemoryConfig
    leaves: dict[str, Tensor]  # q, k, v, gates, initial weights and learned parameters, by name
    frozen: dict[str, Tensor]
    write: Tensor | None = None


class _Result(NamedTuple):
    y: Tensor
    state: MemoryState
    grads: list[Tensor]
    names: list[str]


def _inputs(config: MemoryConfig, d: int, width: int, heads: int, length: int, generator: torch.Generator) -> _Case:
    lead = (2, length, heads)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    def gate(low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(*lead, dtype=torch.float64, generator=generator)

    phi = config.feature_map.init(d, heads=heads, generator=generator, dtype=torch.float64)
    leaves = {"q": draw(*lead, d), "k": draw(*lead, d) / d**0.5, "v": draw(*lead, width)}
    leaves["lr"] = gate(0.05, 0.3)
    if config.retention.uses_retain:
        leaves["retain"] = gate(0.5, 0.95)
    if config.algorithm.uses_momentum:
        leaves["momentum"] = gate(0.2, 0.8)
    shapes = config.structure.shapes(config.feature_map.output_dim(d), width)
    for name, shape in shapes.items():
        leaves[f"initial.{name}"] = draw(heads, *shape) / shape[-1] ** 0.5
    for name, tensor in phi["learned"].items():
        leaves[f"phi.{name}"] = tensor
    return _Case(config, leaves, phi["frozen"])


def _scan(case: _Case, leaves: dict[str, Tensor], **options: Any) -> tuple[Tensor, MemoryState]:
    def under(prefix: str) -> dict[str, Tensor]:
        return {name.removeprefix(prefix): item for name, item in leaves.items() if name.startswith(prefix)}

    gates = Gates(leaves["lr"], leaves.get("retain"), leaves.get("momentum"))
    params: Params = {"learned": under("phi."), "frozen": case.frozen}
    return memory_scan(
        case.config,
        leaves["q"],
        leaves["k"],
        leaves["v"],
        gates,
        phi_params=params,
        initial=under("initial."),
        **options,
    )


def _run(
    case: _Case, *, engine: Any = "sequential", autodiff: Any = "tape", cuts: tuple[int, ...] | None = None
) -> _Result:
    points = {name: item.detach().clone().requires_grad_() for name, item in case.leaves.items()}
    length = points["q"].shape[1]
    state, rows = None, []
    for at, end in zip((cuts or (0, length))[:-1], (cuts or (0, length))[1:], strict=True):
        part = _cut(points, slice(at, end))
        mask = None if case.write is None else case.write[:, at:end]
        y, state = _scan(case, part, state=state, write_mask=mask, engine=engine, autodiff=autodiff)
        rows.append(y)
    y, names = torch.cat(rows, 1), list(points)
    if state is None:
        raise ValueError("cuts must name at least one piece")
    weights = torch.Generator().manual_seed(1)
    total = torch.zeros((), dtype=torch.float64)
    for item in [y, *_floats(state)]:
        total = total + (item * torch.randn(item.shape, generator=weights, dtype=item.dtype)).sum()
    grads = torch.autograd.grad(total, list(points.values()), materialize_grads=True)
    return _Result(y, state, list(grads), names)


def _cut(leaves: dict[str, Tensor], tokens: slice | list[int]) -> dict[str, Tensor]:
    """The leaves with a time axis, cut to some tokens; the others as they are."""
    return {name: item if "." in name else item[:, tokens] for name, item in leaves.items()}


def _check_masks(case: _Case) -> None:
    """Masked tokens, holding NaN, against a sequence without them."""
    length = case.leaves["q"].shape[1]
    kept = [t for t in range(length) if t % 3 != 1]
    write = torch.zeros(2, length, dtype=torch.bool)
    write[:, kept] = True
    dirty = dict(case.leaves)
    for name in ("k", "v"):
        dirty[name] = torch.where(write[..., None, None], dirty[name], torch.nan)
    engines = ["sequential", *exact_engines(case.config, length=length)]
    for engine in engines:
        with torch.no_grad():
            y, state = _scan(case, dirty, write_mask=write, engine=engine)
            short = _cut(case.leaves, kept)
            expected, final = _scan(case, short, engine=engine)
        what = f"{_name(case.config)}: masked tokens on engine {engine} against none"
        close(f"{what}: outputs", y[:, kept], expected)
        for got, true in zip(_floats(state), _floats(final), strict=True):
            close(f"{what}: state", got, true)


def _check_causality(case: _Case) -> None:
    last = case.leaves["q"].shape[1] - 1
    changed = {
        name: item if "." in name else torch.cat([item[:, :last], 0.9 * item[:, last:]], 1)
        for name, item in case.leaves.items()
    }
    with torch.no_grad():
        y, _ = _scan(case, case.leaves, engine="sequential")
        other, _ = _scan(case, changed, engine="sequential")
    require(
        torch.equal(y[:, :last], other[:, :last]), f"{_name(case.config)}: the last token changes outputs before it"
    )


def _same(config: MemoryConfig, what: str, got: _Result, expected: _Result) -> None:
    what = f"{_name(config)}: {what}"
    close(f"{what}: outputs", got.y, expected.y)
    for mine, theirs in zip(_floats(got.state), _floats(expected.state), strict=True):
        close(f"{what}: final state", mine, theirs)
    require(torch.equal(got.state.position, expected.state.position), f"{what}: position in the chunk")
    signal = max(float(grad.norm()) for grad in expected.grads)
    for name, mine, theirs in zip(got.names, got.grads, expected.grads, strict=True):
        close(f"{what}: gradient of {name}", mine, theirs, signal)


def _floats(state: MemoryState) -> list[Tensor]:
    leaves = torch.utils._pytree.tree_leaves(state)
    return [item for item in leaves if isinstance(item, Tensor) and item.is_floating_point()]


def _name(config: MemoryConfig) -> str:
    knobs = (config.structure, config.bias, config.retention, config.algorithm)
    return " x ".join(knob.kind for knob in knobs)
