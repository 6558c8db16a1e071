"""Random scans: every engine, every split and every mask give what the token loop gives."""

from __future__ import annotations

import math
import random
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from hecate import Gates, MemoryConfig, memory_scan
from hecate.engine.select import ENGINES, exact_engines
from hecate.errors import ConfigError, HecateError, NonFiniteError
from tests.fuzz.configs import schema_of
from tests.fuzz.draw import value_of
from tests.fuzz.limits import within

ROUNDINGS = 16.0
"""What an engine may lose, in losses of moving every input by a unit in its last place."""
MAX_WIDTH = 40
LENGTHS = (0, 1, 2, 3, 5, 5, 17, 33)
DTYPES = (torch.float32, torch.float32, torch.float64, torch.bfloat16)


class Scan(NamedTuple):
    """A call: `leaves` by dotted name, of which `q`, `k`, `v` and gates have tokens in axis 1."""

    config: MemoryConfig
    leaves: dict[str, Tensor]
    numbers: dict[str, float]
    frozen: dict[str, Tensor]
    masks: dict[str, Tensor]
    state: Any = None  # its floating point tensors are leaves

    @property
    def dtype(self) -> torch.dtype:
        """In which the scan computes."""
        dtype = self.config.dtype
        for name in "qkv":
            dtype = torch.promote_types(dtype, self.leaves[name].dtype)
        return dtype

    @property
    def length(self) -> int:
        return self.leaves["q"].shape[1]


class Result(NamedTuple):
    """What a scan gives, by name: outputs, state and gradients."""

    tensors: dict[str, Tensor]
    state: Any


def drawn(seed: int, lengths: tuple[int, ...] = LENGTHS) -> Scan:
    rng = random.Random(seed)
    source = torch.Generator().manual_seed(seed)
    d, heads, batch = rng.randint(1, 9), rng.randint(1, 3), rng.choice([0, 1, 1, 2, 2, 3])
    length = rng.choice(lengths)
    config = _config(rng, d)
    d_phi = config.feature_map.output_dim(d)
    width = d_phi if rng.random() < 0.2 else rng.randint(1, 9)
    try:
        shapes = config.structure.shapes(d_phi, width)
    except ConfigError:  # vectors and residuals ask for one width
        width = d_phi
        shapes = config.structure.shapes(d_phi, width)
    lead, dtype = (batch, length, heads), rng.choice(DTYPES)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return scale * torch.randn(*shape, dtype=torch.float64, generator=source)

    size = 10.0 ** rng.choice([0] * 8 + [-30, -10, -2, 2, 10, 30])
    leaves = {"q": normal(*lead, d), "k": normal(*lead, d, scale=size), "v": normal(*lead, width)}
    numbers: dict[str, float] = {}
    for name, used in (
        ("lr", True),
        ("retain", config.retention.uses_retain),
        ("momentum", config.algorithm.uses_momentum),
    ):
        form = rng.choice(["none", "number", "tensor", "tensor", "channels"]) if used else "none"
        if form == "number":
            numbers[name] = rng.choice([0.0, 0.1, 0.5, 0.9, 1.0])
        elif form != "none":
            wide = form == "channels" and name == "retain" and config.structure.linear
            gate = torch.rand(*lead, *([d_phi] if wide else []), generator=source).double()
            ends = torch.rand(gate.shape, generator=source) < rng.choice([0.0, 0.2])
            leaves[name] = torch.where(ends, gate.round(), gate)
    if rng.random() < 0.5:
        for name, shape in shapes.items():
            per = (batch,) if rng.random() < 0.2 else ()
            leaves[f"initial.{name}"] = normal(*per, heads, *shape, scale=shape[-1] ** -0.5)
    phi = config.feature_map.init(d, heads=heads, generator=source, dtype=torch.float64)
    leaves |= {f"phi.{name}": item for name, item in phi["learned"].items()}
    leaves = {name: item.to(dtype) for name, item in leaves.items()}
    frozen = {n: t.to(dtype) if t.is_floating_point() else t for n, t in phi["frozen"].items()}
    if rng.random() < 0.1:
        leaves["v"] = leaves["v"].to(rng.choice(DTYPES))
    masks = {
        name: torch.rand(batch, length, generator=source) < share
        for name, share in (("write_mask", 0.7), ("reset_mask", 0.15))
        if rng.random() < 0.3
    }
    if batch == 1 and "reset_mask" not in masks and rng.random() < 0.5:
        cuts = sorted(rng.choices(range(length + 1), k=rng.randrange(3)))
        masks["cu_seqlens"] = torch.tensor([0, *cuts, length])
    scan = Scan(config, leaves, numbers, frozen, masks)
    if rng.random() < 0.3 and "cu_seqlens" not in masks and length > 1:
        at = rng.randrange(1, length)
        try:
            before = run(part(scan, 0, at), grads=False)
        except HecateError:
            return scan
        scan = part(scan, at, length)
        tensors, layout = pytree.tree_flatten(before.state)
        floats = {f"state.{i}": t for i, t in enumerate(tensors) if _is_float(t)}
        rest = [None if _is_float(t) else t for t in tensors]
        scan = scan._replace(leaves={**scan.leaves, **floats}, state=(rest, layout))
    return scan


def _config(rng: random.Random, d: int) -> MemoryConfig:
    """A random configuration that is allowed, and whose map is not too wide to be quick."""
    while True:
        value = value_of(schema_of(MemoryConfig), rng, rng.choice([0.2, 0.4, 0.6]))
        if rng.random() < 0.3:
            value["key_norm"] = "l2"
        try:
            config = MemoryConfig.model_validate(value)
            wide = config.feature_map.output_dim(d)
            config.feature_map.init(d, generator=torch.Generator())
            config.structure.shapes(wide, wide)
        except ConfigError:
            continue
        if wide <= MAX_WIDTH:
            return config


def part(scan: Scan, at: int, end: int) -> Scan:
    """The tokens at <= t < end; borders of documents as resets."""
    tokens = ("q", "k", "v", "lr", "retain", "momentum")
    leaves = {n: t[:, at:end] if n in tokens else t for n, t in scan.leaves.items()}
    masks = {name: mask[:, at:end] for name, mask in _as_resets(scan).items()}
    return scan._replace(leaves=leaves, masks=masks)


def _as_resets(scan: Scan) -> dict[str, Tensor]:
    masks = dict(scan.masks)
    if "cu_seqlens" in masks:
        steps = torch.arange(scan.length)
        masks["reset_mask"] = torch.isin(steps, masks.pop("cu_seqlens")).unsqueeze(0)
    return masks


def run(
    scan: Scan,
    *,
    engine: Any = "sequential",
    autodiff: Any = "torch",
    cuts: tuple[int, ...] = (),
    grads: bool = True,
) -> Result:
    """Runs a scan, whole or in pieces, and the gradients of a random function of all it gives."""
    originals = scan
    points = {n: t.detach().clone().requires_grad_(grads) for n, t in scan.leaves.items()}
    fixed = {n: t.clone() for n, t in scan.frozen.items()}
    scan = scan._replace(
        leaves=points, frozen=fixed, masks={n: t.clone() for n, t in scan.masks.items()}
    )
    state = None
    if scan.state is not None:
        rest, layout = scan.state
        tensors = [points.get(f"state.{i}", item) for i, item in enumerate(rest)]
        state = pytree.tree_unflatten(tensors, layout)
    rows = []
    for at, end in pairwise((0, *cuts, scan.length)):
        y, state = _call(part(scan, at, end) if cuts else scan, state, engine, autodiff)
        rows.append(y)
    for mine, given in (
        (points, originals.leaves),
        (fixed, originals.frozen),
        (scan.masks, originals.masks),
    ):
        for name, item in given.items():
            assert torch.equal(mine[name], item) or item.isnan().any(), f"{name} is changed"
    kept = [t for t in pytree.tree_leaves(state) if isinstance(t, Tensor)]
    held = {t.untyped_storage().data_ptr(): name for name, t in points.items() if t.numel()}
    for item in (rows[-1], *kept):
        owner = held.get(item.untyped_storage().data_ptr()) if item.numel() else None
        assert owner is None, f"a result is a view of {owner}"
    given = {"y": torch.cat(rows, 1)} | {f"state[{i}]": t for i, t in enumerate(kept)}
    if grads:
        given |= _gradients(given, points)
    return Result({name: item.detach() for name, item in given.items()}, state)


def _call(scan: Scan, state: Any, engine: Any, autodiff: Any) -> tuple[Tensor, Any]:
    leaves = scan.leaves

    def under(prefix: str) -> dict[str, Tensor]:
        found = ((name.partition(prefix), item) for name, item in leaves.items())
        return {name[2]: item for name, item in found if name[0] == "" and name[1]}

    gates = Gates(*({**scan.numbers, **leaves}.get(name) for name in Gates._fields))
    return memory_scan(
        scan.config,
        *(leaves[name] for name in "qkv"),
        gates,
        phi_params={"learned": under("phi."), "frozen": scan.frozen},
        state=state,
        initial=under("initial.") or None,
        engine=engine,
        autodiff=autodiff,
        **scan.masks,
    )


def _gradients(given: dict[str, Tensor], points: dict[str, Tensor]) -> dict[str, Tensor]:
    source = torch.Generator().manual_seed(1)
    total = torch.zeros((), dtype=torch.float64)
    for item in given.values():
        if item.is_floating_point():
            weights = torch.randn(item.shape, generator=source, dtype=torch.float64)
            total = total + (item.double() * weights).sum()
    if not total.requires_grad:
        return {f"grad {name}": torch.zeros_like(item) for name, item in points.items()}
    found = torch.autograd.grad(total, list(points.values()), materialize_grads=True)
    return {f"grad {name}": item for name, item in zip(points, found, strict=True)}


def _is_float(item: Any) -> bool:
    return isinstance(item, Tensor) and item.is_floating_point()


def check(seed: int, lengths: tuple[int, ...] = LENGTHS) -> str:
    """The outcome of one scan: what it agreed in, or what it was refused as.

    Raises AssertionError where engines, pieces, masks or ways of differentiating disagree by more
    than rounding does, where an input is changed or a state is a view of one.
    """
    scan = drawn(seed, lengths)
    rng = random.Random(~seed)
    truth = _outcome(scan)
    others: dict[str, dict[str, Any]] = {"the tape": {"autodiff": "tape"}}
    exact = exact_engines(scan.config, length=scan.length)
    for engine in exact:
        others[f"engine {engine}"] = {"engine": engine, "autodiff": rng.choice(["tape", "auto"])}
    cuts = tuple(sorted(rng.choices(range(scan.length + 1), k=rng.randint(1, 3))))
    engine = rng.choice(["sequential", "auto", *exact])
    others[f"pieces {cuts} on {engine}"] = {"engine": engine, "autodiff": "auto", "cuts": cuts}
    for name in set(ENGINES) - {*exact, "auto", "sequential"}:
        _refused_by_name(scan, name)
    found = {name: _outcome(scan, **options) for name, options in others.items()}
    if _overflows(scan, truth, found.values()):
        return "overflows"
    if isinstance(truth, HecateError):
        for name, other in found.items():
            assert type(other) is type(truth), f"{name}: {other!r}, the token loop: {truth!r}"
        return type(truth).__name__
    bounds = _bounds(scan, truth)
    for name, other in found.items():
        assert isinstance(other, Result), f"{name}: {other!r}"
        _agree(name, other.tensors, truth.tensors, bounds)
    _masked(scan, others[rng.choice(list(others))])
    loose = max(bounds[name] / (_norm(item) or 1) for name, item in truth.tensors.items())
    return "agrees" if loose < 0.01 else "agrees, ill-conditioned"


def _overflows(scan: Scan, truth: Any, others: Any) -> bool:
    """Whether the dtype is at the end of its range: a product of two numbers of this scan is
    infinite, so that the order of operations decides, and in float64 all is finite."""
    found = [truth, *others]
    finite = [isinstance(item, Result) and _is_finite(item) for item in found]
    if all(finite) or scan.dtype == torch.float64:
        return False
    wide = scan._replace(
        config=scan.config.model_copy(update={"state_dtype": "float64"}),
        leaves={name: item.double() for name, item in scan.leaves.items()},
        frozen={n: t.double() if t.is_floating_point() else t for n, t in scan.frozen.items()},
    )
    exact = _outcome(wide)
    if not isinstance(exact, Result):
        return isinstance(exact, NonFiniteError) and any(finite)
    largest = max(_norm(t) for t in (*exact.tensors.values(), *scan.leaves.values()))
    return largest**2 > torch.finfo(scan.dtype).max


def _is_finite(result: Result) -> bool:
    return all(math.isfinite(_norm(item)) for item in result.tensors.values())


def _outcome(scan: Scan, **options: Any) -> Result | HecateError:
    try:
        with within(allowed=None):
            return run(scan, **options)
    except HecateError as error:
        return error


def _refused_by_name(scan: Scan, engine: str) -> None:
    try:
        run(scan, engine=engine, grads=False)
    except HecateError as error:
        assert f"engine={engine!r}" in str(error) or not isinstance(error, ConfigError), error
        return
    raise AssertionError(f"engine {engine} is not exact for this memory and runs it")


def _bounds(scan: Scan, truth: Result) -> dict[str, float]:
    """By name, what rounding may move: measured on inputs that are moved by a unit in the last
    place of the dtype in which the scan computes.

    A gradient may also be off by what moves the sum that it is of as much as rounding its terms
    or an input does: where inputs cancel, as in the direction of one number, none else is seen.
    """
    errors = dict.fromkeys(truth.tensors, 0.0)
    for seed in range(3):
        moved = _outcome(_moved(scan, seed))
        if isinstance(moved, HecateError):
            return dict.fromkeys(errors, math.inf)
        for name, error in _errors(moved.tensors, truth.tensors).items():
            errors[name] = max(errors[name], error)
    sizes = {f"grad {name}": _norm(item) for name, item in scan.leaves.items()}
    given = [_norm(item) for name, item in truth.tensors.items() if name not in sizes]
    effect = max(*given, *(size * _norm(truth.tensors[name]) for name, size in sizes.items()))
    bounds = {}
    for name, item in truth.tensors.items():
        own = _norm(item)
        if sizes.get(name):
            own = max(own, effect / sizes[name])
        errors[name] += torch.finfo(scan.dtype).eps * own + _coarse(item) * _norm(item)
        bounds[name] = ROUNDINGS * errors[name] + 1e3 * torch.finfo(scan.dtype).tiny
    return bounds


def _coarse(item: Tensor) -> float:
    """Rounding of a result that is given in a coarser dtype than it is computed in."""
    return torch.finfo(item.dtype).eps if item.is_floating_point() else 0.0


def _moved(scan: Scan, seed: int) -> Scan:
    source = torch.Generator().manual_seed(seed)
    config, shape = scan.config, scan.leaves["q"].shape[:3]
    defaults = {
        "lr": config.algorithm.lr,
        "retain": config.retention.default_retain if config.retention.uses_retain else None,
        "momentum": config.algorithm.default_momentum if config.algorithm.uses_momentum else None,
    }
    gates = {
        name: torch.full(shape, number, dtype=scan.dtype)
        for name, number in {**defaults, **scan.numbers}.items()
        if number is not None and name not in scan.leaves
    }
    moved = {}
    for name, item in {**scan.leaves, **gates}.items():
        sign = torch.randint(2, item.shape, generator=source) * 2 - 1
        item = item.to(torch.promote_types(item.dtype, scan.dtype))
        moved[name] = item * (1 + torch.finfo(item.dtype).eps * sign.to(item.dtype))
    return scan._replace(leaves=moved, numbers={})


def _errors(mine: dict[str, Tensor], theirs: dict[str, Tensor]) -> dict[str, float]:
    assert mine.keys() >= theirs.keys(), f"{sorted(mine)} against {sorted(theirs)}"
    found = {}
    for name, true in theirs.items():
        assert mine[name].shape == true.shape, (
            f"{name}: {list(mine[name].shape)}, {list(true.shape)}"
        )
        found[name] = _norm(mine[name].double() - true.double())
    return found


def _norm(item: Tensor) -> float:
    return float(item.double().norm())


def _agree(
    what: str, mine: dict[str, Tensor], theirs: dict[str, Tensor], bounds: dict[str, float]
) -> None:
    for name, error in _errors(mine, theirs).items():
        if math.isfinite(_norm(theirs[name])):
            assert error <= bounds[name], (
                f"{what}, {name}: error {error:.2e}, rounding {bounds[name]:.2e}, "
                f"norm {_norm(theirs[name]):.2e}"
            )


def _masked(scan: Scan, options: dict[str, Any]) -> None:
    """What a masked token holds changes nothing, to the bit."""
    if "write_mask" not in scan.masks:
        return
    dirty, write = dict(scan.leaves), scan.masks["write_mask"]
    for name in ("k", "v", "lr", "retain", "momentum"):
        if name in dirty:
            wide = write.reshape(*write.shape, *[1] * (dirty[name].dim() - 2))
            dirty[name] = torch.where(wide, dirty[name], torch.nan)
    clean = run(scan, **options)
    for name, item in run(scan._replace(leaves=dirty), **options).tensors.items():
        same = (
            torch.equal(item, clean.tensors[name]) or not torch.isfinite(clean.tensors[name]).all()
        )
        assert same, f"{options}: {name} depends on what a masked token holds"
