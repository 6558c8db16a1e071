"""Random scans: every engine, every split and every mask give what the token loop gives."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from hecate.engine import Engine
from hecate.errors import ConfigError, HecateError, NonFiniteError
from tests.fuzz.limits import within
from tests.fuzz.scan import LENGTHS, Scan, drawn, run

ROUNDINGS = 16.0
"""What an engine may lose, in losses of moving every input by a unit in its last place."""
Found = dict[str, Tensor] | HecateError


def check(seed: int, lengths: tuple[int, ...] = LENGTHS) -> str:
    """The outcome of one scan: that all agree, or what it was refused as.

    Raises AssertionError where engines, pieces, masks or ways of differentiating disagree by more
    than rounding does, where an input is changed or a state is a view of one.
    """
    scan, rng = drawn(seed, lengths), random.Random(~seed)
    truth = _outcome(scan)
    exact = []
    for name in sorted(set(Engine.registry) - {"sequential"}):
        if Engine.registry[name].excludes(scan.config) is not None:
            _refused_by_name(scan, name)
        else:  # it may still refuse the call: its masks, its gates
            one = _outcome(scan, engine=name, grads=False)
            if not (isinstance(one, ConfigError) and f"engine={name!r}" in str(one)):
                exact.append(name)
    others: dict[str, dict[str, Any]] = {"the tape": {"autodiff": "tape"}}
    for engine in exact:
        others[f"engine {engine}"] = {"engine": engine, "autodiff": rng.choice(["tape", "auto"])}
    cuts = tuple(sorted(rng.choices(range(scan.length + 1), k=rng.randint(1, 3))))
    engine = rng.choice(["sequential", "auto", *exact])
    others[f"pieces {cuts} on {engine}"] = {"engine": engine, "autodiff": "auto", "cuts": cuts}
    found = {name: _outcome(scan, **options) for name, options in others.items()}
    if _overflows(scan, [truth, *found.values()]):
        return "overflows"
    if isinstance(truth, HecateError):
        for name, other in found.items():
            assert type(other) is type(truth), f"{name}: {other!r}, the token loop: {truth!r}"
        return type(truth).__name__
    bounds = _bounds(scan, truth)
    for name, other in found.items():
        assert not isinstance(other, HecateError), f"{name}: {other!r}"
        for item, error in _errors(other, truth).items():
            size = _norm(truth[item])
            text = f"error {error:.2e}, rounding {bounds[item]:.2e}, norm {size:.2e}"
            assert error <= bounds[item] or not math.isfinite(size), f"{name}, {item}: {text}"
    _check_masked(scan, others[rng.choice(list(others))])
    loose = max(bounds[name] / (_norm(item) or 1) for name, item in truth.items())
    return "agrees" if loose < 0.01 else "agrees, ill-conditioned"


def _outcome(scan: Scan, **options: Any) -> Found:
    try:
        with within(allowed=None):
            return run(scan, **options)
    except HecateError as error:
        return error


def _refused_by_name(scan: Scan, engine: str) -> None:
    refusal = _outcome(scan, engine=engine, grads=False)
    assert isinstance(refusal, HecateError), f"engine {engine} is not exact here, and runs"
    assert f"engine={engine!r}" in str(refusal) or not isinstance(refusal, ConfigError), refusal


def _overflows(scan: Scan, found: list[Found]) -> bool:
    """Whether the dtype is at the end of its range: a product of two numbers of this scan is
    infinite, so that the order of operations decides, and in float64 all is finite."""
    if all(map(_is_finite, found)) or scan.dtype == torch.float64:
        return False
    exact = _outcome(_wide(scan))
    if isinstance(exact, HecateError):
        return isinstance(exact, NonFiniteError) and any(map(_is_finite, found))
    largest = max(map(_norm, (*exact.values(), *scan.leaves.values())))
    return largest**2 > torch.finfo(scan.dtype).max


def _wide(scan: Scan) -> Scan:
    """In float64."""
    return scan._replace(
        config=scan.config.model_copy(update={"state_dtype": "float64"}),
        leaves={name: item.double() for name, item in scan.leaves.items()},
        frozen={n: t.double() if t.is_floating_point() else t for n, t in scan.frozen.items()},
    )


def _is_finite(found: Found) -> bool:
    return isinstance(found, dict) and all(math.isfinite(_norm(item)) for item in found.values())


def _bounds(scan: Scan, truth: dict[str, Tensor]) -> dict[str, float]:
    """By name, what rounding may move: measured on inputs that are moved by a unit in the last
    place of the dtype in which the scan computes; each step of an algorithm of several rounds anew.

    A gradient may also be off by what moves the sum that it is of as much as rounding its terms
    or an input does: where inputs cancel, as in the direction of one number, none else is seen.
    """
    errors = dict.fromkeys(truth, 0.0)
    if _is_lost(scan, truth):
        return dict.fromkeys(errors, math.inf)
    for seed in range(3):
        moved = _outcome(_moved(scan, seed))
        if isinstance(moved, HecateError):
            return dict.fromkeys(errors, math.inf)
        for name, error in _errors(moved, truth).items():
            errors[name] = max(errors[name], math.inf if math.isnan(error) else error)
    sizes = {f"grad {name}": _norm(item) for name, item in scan.leaves.items()}
    given = [_norm(item) for name, item in truth.items() if name not in sizes]
    effect = max(*given, *(size * _norm(truth[name]) for name, size in sizes.items()))
    unit, least = torch.finfo(scan.dtype).eps, 1e3 * torch.finfo(scan.dtype).tiny
    for name, item in truth.items():
        own = effect / sizes[name] if sizes.get(name) else 0.0
        coarse = torch.finfo(item.dtype).eps if item.is_floating_point() else 0.0
        errors[name] += unit * max(own, _norm(item)) + coarse * _norm(item)
    roundings = ROUNDINGS * getattr(scan.config.algorithm, "steps", 1)
    return {name: math.inf if math.isnan(error) else roundings * error + least for name, error in errors.items()}


def _is_lost(scan: Scan, truth: dict[str, Tensor]) -> bool:
    """True if rounding leaves an output or a state no digit: in float64 it is another."""
    exact = None if scan.dtype == torch.float64 else _outcome(_wide(scan))
    if not isinstance(exact, dict):
        return exact is not None
    errors = _errors(exact, {name: item for name, item in truth.items() if not name.startswith("grad ")})
    return any(not error <= 0.1 * _norm(exact[name]) for name, error in errors.items())


def _moved(scan: Scan, seed: int) -> Scan:
    """Every input moved up or down, gates that are numbers too."""
    source, config = torch.Generator().manual_seed(seed), scan.config
    numbers = {"lr": config.algorithm.lr}
    if config.retention.uses_retain:
        numbers["retain"] = config.retention.default_retain
    if config.algorithm.uses_momentum:
        numbers["momentum"] = config.algorithm.default_momentum
    shape, leaves = scan.leaves["q"].shape[:3], {}
    for name, number in {**numbers, **scan.numbers}.items():
        leaves[name] = torch.full(shape, number, dtype=scan.dtype)
    for name, item in {**leaves, **scan.leaves}.items():
        item = item.to(torch.promote_types(item.dtype, scan.dtype))
        sign = torch.randint(2, item.shape, generator=source).to(item.dtype) * 2 - 1
        leaves[name] = item * (1 + torch.finfo(item.dtype).eps * sign)
    return scan._replace(leaves=leaves, numbers={})


def _errors(mine: dict[str, Tensor], theirs: dict[str, Tensor]) -> dict[str, float]:
    assert mine.keys() >= theirs.keys(), f"{sorted(mine)} against {sorted(theirs)}"
    for name, true in theirs.items():
        assert mine[name].shape == true.shape, (name, mine[name].shape, true.shape)
    return {name: _norm(mine[name].double() - true.double()) for name, true in theirs.items()}


def _norm(item: Tensor) -> float:
    return float(item.double().norm())


def _check_masked(scan: Scan, options: dict[str, Any]) -> None:
    """What a masked token holds changes nothing, to the bit."""
    if "write_mask" not in scan.masks:
        return
    dirty, write = dict(scan.leaves), scan.masks["write_mask"]
    for name in {"k", "v", "lr", "retain", "momentum"} & dirty.keys():
        wide = write.reshape(*write.shape, *[1] * (dirty[name].dim() - 2))
        dirty[name] = torch.where(wide, dirty[name], torch.nan)
    clean, masked = run(scan, **options), run(scan._replace(leaves=dirty), **options)
    for name, item in clean.items():
        same = torch.equal(item, masked[name]) or not item.isfinite().all()
        assert same, f"{options}: {name} depends on what a masked token holds"


def describe(seed: int) -> Iterable[str]:
    """What a seed draws, to be read."""
    scan = drawn(seed)
    yield scan.config.model_dump_json(exclude_defaults=True)
    for name, item in scan.leaves.items():
        most = float(item.double().abs().max()) if item.numel() else 0.0
        yield f"{name}: {item.dtype} {list(item.shape)}, at most {most:.1e}"
    yield f"{scan.numbers} { {name: mask.int().tolist() for name, mask in scan.masks.items()} }"
