"""A cell runs, every way there is, and all ways agree."""

from __future__ import annotations

import warnings
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.func import functional_call
from torch.utils import _pytree as pytree

from hecate.engine import Engine, Inputs, one_write_each, to_tokens
from hecate.engine.naive import naive
from hecate.errors import ConfigError, HecateError, StabilityWarning
from hecate.nn import Memory
from hecate.nn.rule import ScanArguments
from hecate.rule import Gates, MemoryConfig, TokenGates
from hecate.tape import execute
from hecate.testing.block import SIGNAL_FLOOR, close, require
from hecate.testing.rule import _Case, _cut, _inputs
from tests.product.cells import GATES, WIDTH, Cell, Verdict, refused, validate

ROUNDINGS = 4.0
"""Roundings of a scan's inputs that its own operations may add up to."""
LENGTH = 5
INEXACT = "cannot run this memory exactly"
RANGES = {"erase": (0.2, 1.2), "write": (-0.3, 1.1), "floor": (0.05, 0.4), "ridge": (0.3, 0.9)}


class Ran(NamedTuple):
    """Outputs, tensors of the final state, and gradients by the names of the leaves."""

    y: Tensor
    state: list[Tensor]
    grads: dict[str, Tensor]

    @property
    def numbers(self) -> list[Tensor]:
        return [self.y, *(item for item in self.state if item.is_floating_point()), *self.grads.values()]


class Scanned(NamedTuple):
    """A scan of given keys, values and gates."""

    case: _Case
    leaves: dict[str, Tensor]

    @property
    def config(self) -> MemoryConfig:
        return self.case.config

    def asked(self, leaves: dict[str, Tensor], state: Any) -> ScanArguments:
        def under(prefix: str) -> dict[str, Tensor]:
            return {name.removeprefix(prefix): item for name, item in leaves.items() if name.startswith(prefix)}

        q, k, v = (leaves[name] for name in "qkv")
        gates = Gates(**{name: leaves[name] for name in Gates._fields if name in leaves})
        params: Any = {"learned": under("phi."), "frozen": self.case.frozen}
        return ScanArguments(self.case.config, q, k, v, gates, params, under("initial."), state)

    def call(self, leaves: dict[str, Tensor], state: Any, **how: Any) -> tuple[Tensor, Any]:
        return self.asked(leaves, state).scan(**how)


class Layer(NamedTuple):
    """A layer whose gating makes keys, values and gates from x."""

    layer: Memory
    leaves: dict[str, Tensor]

    @property
    def config(self) -> MemoryConfig:
        return self.layer.config

    def asked(self, leaves: dict[str, Tensor], state: Any) -> ScanArguments:
        return self.layer.asked(leaves["x"], state)[0]

    def call(self, leaves: dict[str, Tensor], state: Any, **how: Any) -> tuple[Tensor, Any]:
        self.layer.engine, self.layer.autodiff = how["engine"], how["autodiff"]
        own = {name.removeprefix("layer."): item for name, item in leaves.items() if name != "x"}
        return functional_call(self.layer, own, (leaves["x"], state))  # type: ignore[no-any-return]


def check_cell(cell: Cell) -> Verdict:
    """Runs one cell."""
    config = validate(cell)
    if isinstance(config, Verdict):
        return config
    try:
        check(layer_of(config) if cell.gating != "none" else scan_of(config, cell.gates))
    except ConfigError as error:
        return refused(cell, error)
    except (AssertionError, HecateError, RuntimeError, TypeError, ValueError, KeyError) as error:
        return Verdict(cell, "fault", f"{type(error).__name__}: {error}")
    return Verdict(cell, "passed")


def scan_of(config: MemoryConfig, given: str = "none") -> Scanned:
    """Random inputs of a scan with gates of these names."""
    source = torch.Generator().manual_seed(0)
    # Values as wide as phi, which vectors and residuals ask for.
    width = config.feature_map.output_dim(WIDTH)
    case = _inputs(config, WIDTH, width, 1, LENGTH, source)
    if not config.structure.linear:
        # The curvature of a deep memory grows with its weights: smaller steps stay in range.
        case.leaves["lr"] = 0.2 * case.leaves["lr"]
    for name, channels in GATES[given].items():
        lead = case.leaves["lr"].shape if name in ("erase", "write") else case.leaves["q"].shape[:-1]
        shape = lead if channels == "head" else (*lead, width)
        low, high = RANGES.get(name, (0.5, 0.95))
        case.leaves[name] = low + (high - low) * torch.rand(shape, dtype=torch.float64, generator=source)
    return Scanned(case, case.leaves)


def layer_of(config: MemoryConfig) -> Layer:
    """A layer with its parameters off their start, and an input."""
    source, width = torch.Generator().manual_seed(0), config.feature_map.output_dim(WIDTH)
    draw = partial(torch.randn, dtype=torch.float64, generator=source)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", StabilityWarning)
        layer = Memory(
            6, 1, config, d_key=WIDTH, d_value=width, conv_kernel=0, output_gate=False, generator=source,
            dtype=torch.float64, engine="sequential",
        )  # fmt: skip
    leaves = {"x": draw(2, LENGTH, 6)}
    for name, item in layer.named_parameters():
        near = 0.5 if name.startswith("initial") else 0.1
        item.data.add_(near * draw(*item.shape))
        leaves[f"layer.{name}"] = item.detach()
    return Layer(layer, leaves)


def check(case: Scanned | Layer) -> None:
    """Every way against the token loop under autograd."""
    whole = run(case, autodiff="torch")
    for item in whole.numbers:
        require(bool(torch.isfinite(item).all()), "something is not finite")
    signal = max(float(grad.norm()) for grad in whole.grads.values())
    require(signal > SIGNAL_FLOOR, f"no gradient above {SIGNAL_FLOOR}")
    check_recurrence(case)
    agree(case, "the tape, in pieces, against autograd of the whole", run(case, cuts=(0, 1, LENGTH)), whole)
    for name, engine in Engine.registry.items():
        if engine.truth or engine.excludes(case.config):  # whatever the inputs
            continue
        try:
            got = run(case, engine=name, autodiff="auto")
        except ConfigError as error:
            if INEXACT not in str(error):
                raise
        else:
            agree(case, f"engine {name} against sequential", got, whole)


def run(
    case: Scanned | Layer, *, engine: str = "sequential", autodiff: str = "tape", cuts: tuple[int, ...] = (0, LENGTH)
) -> Ran:
    """Outputs, state and gradients of one random sum of outputs and state."""
    points = {name: item.detach().clone().requires_grad_() for name, item in case.leaves.items()}
    state: Any = None
    rows = []
    for at, end in pairwise(cuts):
        y, state = case.call(_cut(points, slice(at, end)), state, engine=engine, autodiff=autodiff)
        rows.append(y)
    y, source = torch.cat(rows, 1), torch.Generator().manual_seed(1)
    tensors = [item for item in pytree.tree_leaves(state) if isinstance(item, Tensor)]
    outputs = [y, *(item for item in tensors if item.is_floating_point())]
    weights = [torch.randn(item.shape, generator=source, dtype=item.dtype) for item in outputs]
    total = torch.stack([(item * weight).sum() for item, weight in zip(outputs, weights, strict=True)]).sum()
    grads = torch.autograd.grad(total, list(points.values()), materialize_grads=True)
    return Ran(y, tensors, dict(zip(points, grads, strict=True)))


def check_recurrence(case: Scanned | Layer) -> None:
    """The token loop against `naive`, where tokens in phi-space are all there is."""
    with torch.no_grad():
        asked = case.asked(case.leaves, None)
        config, n = asked.config, asked.config.writes
        if config.normalizer != "none" or not config.readout.plain:
            return
        y, state = asked.scan(engine="sequential", autodiff="torch")
        q, k, v, gates = asked.q, asked.k, asked.v, asked.gates
        if n > 1:
            config, (q, k, v, gates), _ = one_write_each(config, q, k, v, gates, run=execute)
        shape = k.shape[:3]
        defaults = (config.algorithm.lr, config.retention.default_retain, config.algorithm.default_momentum)
        lr, retain, momentum = (
            torch.full(shape, default, dtype=k.dtype) if gate is None else gate.to(k.dtype)
            for gate, default in zip(gates[:3], defaults, strict=True)
        )
        position = torch.arange(shape[1]).expand(shape[:2]) if config.feature_map.needs_position else None
        given = Inputs(
            q, k, v, lr, retain, momentum, position=position, erase=gates.erase, write_gate=gates.write,
            retain_value=gates.retain_value,
        )  # fmt: skip
        tokens = to_tokens(config, given, asked.phi_params, k.dtype, execute)  # type: ignore[arg-type]

        def flat(x: Tensor | None) -> Any:
            return None if x is None else x.transpose(1, 2).flatten(0, 1)

        start = []
        for item in (asked.initial or {}).values():
            begun = config.retention.start(item.to(k.dtype))
            start.append(begun.expand(shape[0], *begun.shape).flatten(0, 1))
        own = TokenGates(flat(tokens.lr), flat(tokens.retain), flat(tokens.momentum))
        mine, left = naive(
            config, flat(tokens.phi_q), flat(tokens.phi_k), flat(tokens.v), own, tuple(start),
            phi_w=flat(tokens.phi_w), retain_value=flat(tokens.retain_value),
        )  # fmt: skip
        mine = mine[:, n - 1 :: n] if config.read == "after" else mine[:, ::n]
        close("the token loop against the recurrence: outputs", flat(y), mine)
        for a, b in zip(state.memory.values(), left, strict=True):
            close("the token loop against the recurrence: memory", a.flatten(0, 1), b)


def agree(case: Any, what: str, got: Ran, whole: Ran) -> None:
    """Equal to 1e-10, or within what rounding the inputs alone does to an ill-conditioned cell."""
    try:
        same(what, got, whole)
    except AssertionError:
        errors = _distances(got, whole)
        rounded = [_distances(run(_rounded(case, seed), autodiff="torch"), whole) for seed in (0, 1)]
        bounds = [ROUNDINGS * max(both) for both in zip(*rounded, strict=True)]
        if any(error > bound for error, bound in zip(errors, bounds, strict=True)):
            raise


def same(what: str, got: Ran, expected: Ran) -> None:
    """Outputs, state and gradients within 1e-10."""
    close(f"{what}: outputs", got.y, expected.y)
    for mine, theirs in zip(got.state, expected.state, strict=True):
        if mine.is_floating_point():
            close(f"{what}: final state", mine, theirs)
        else:
            require(torch.equal(mine, theirs), f"{what}: a count of the state")
    signal = max(float(grad.norm()) for grad in expected.grads.values())
    for name, grad in got.grads.items():
        close(f"{what}: gradient of {name}", grad, expected.grads[name], signal)


def _distances(got: Ran, whole: Ran) -> list[float]:
    return [float((a - b).detach().norm()) for a, b in zip(got.numbers, whole.numbers, strict=True)]


def _rounded(case: Any, seed: int) -> Any:
    """The case with every input number moved by a unit in its last place, up or down."""
    source = torch.Generator().manual_seed(seed)
    moved = {}
    for name, item in case.leaves.items():
        sign = torch.randint(2, item.shape, generator=source).to(item.dtype) * 2 - 1
        moved[name] = item * (1 + torch.finfo(item.dtype).eps * sign)
    return case._replace(leaves=moved)
