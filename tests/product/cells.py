"""The product of all knobs: every combination runs right, or is refused with a reason.

    phi x bias x retention x algorithm x structure x (chunk, commit)

A cell is one combination of kinds at their example settings. It *passes* when a short scan in
float64 is finite, has gradients above a signal floor, and gives the same outputs, final state and
gradients by the tape, by autograd, in pieces and on every engine that runs it. It is *refused* when
validation raises a `ConfigError` that names two of its settings. Anything else is a *fault*.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any, Literal, NamedTuple

import torch

from hecate.algorithm import AlgorithmKind
from hecate.bias import BiasKind
from hecate.engine import exact_engines
from hecate.errors import ConfigError, HecateError
from hecate.phi import FeatureMapKind
from hecate.retention import RetentionKind
from hecate.rule import MemoryConfig
from hecate.structure import StructureKind
from hecate.testing.rule import _floats, _inputs, _run, _same
from hecate.testing.vjp import SIGNAL_FLOOR, require
from hecate.variant import Variant
from tests.product.examples import example, shipped

FAMILIES: dict[str, type[Variant]] = {
    "structure": StructureKind,
    "bias": BiasKind,
    "retention": RetentionKind,
    "algorithm": AlgorithmKind,
    "feature_map": FeatureMapKind,
}
ROUNDINGS = 4.0
"""Roundings of a scan's inputs that its own operations may add up to."""
WAYS = ("token", "frozen", "commit", "large")
_WAYS: dict[str, dict[str, Any]] = {
    "token": {"chunk": 1, "commit": "token"},
    "frozen": {"chunk": 3, "commit": "token"},
    "commit": {"chunk": 1, "commit": "chunk"},
    "large": {"chunk": 3, "commit": "chunk"},
}


class Cell(NamedTuple):
    """One combination: a kind of each family, and how gradients are taken and committed."""

    structure: str
    bias: str
    retention: str
    algorithm: str
    feature_map: str
    way: str

    def fields(self) -> dict[str, Any]:
        """The fields of its `MemoryConfig`."""
        knobs = {name: FAMILIES[name].variants()[getattr(self, name)] for name in FAMILIES}
        examples = {name: example(variant) for name, variant in knobs.items()}
        if self.retention == "lq":
            # The root has its chord below eps: one this wide leaves no slope near infinity.
            examples["retention"] = examples["retention"].model_copy(update={"eps": 0.05})
        lr = examples["algorithm"].model_copy(update={"lr": 0.2})
        return {**examples, "algorithm": lr, **_WAYS[self.way], "key_norm": "l2", "state_dtype": "float64"}


class Verdict(NamedTuple):
    """What became of a cell, and why."""

    cell: Cell
    status: Literal["passed", "refused", "fault"]
    reason: str = ""


def axes() -> dict[str, list[str]]:
    """The kinds along each axis of the product."""
    return {**{name: list(shipped(root)) for name, root in FAMILIES.items()}, "way": list(WAYS)}


def every_cell() -> Iterator[Cell]:
    """All cells, feature map by feature map."""
    found = axes()
    for values in product(*(found[name] for name in Cell._fields)):
        yield Cell(*values)


def every_rule() -> Iterator[Cell]:
    """Every cell of the knobs with one feature map each, taken in turn.

    phi meets a rule only through its values, so a rule that is right with one map is right with
    all; taking them in turn lets every map meet every kind of each other knob.
    """
    found = axes()
    maps = found.pop("feature_map")
    for index, values in enumerate(product(*found.values())):
        yield Cell(**dict(zip(found, values, strict=True)), feature_map=maps[index % len(maps)])


def pairwise(seed: int = 0) -> list[Cell]:
    """Cells among which any two kinds of different families meet at least once."""
    found = axes()
    names = Cell._fields
    generator = torch.Generator().manual_seed(seed)
    missing = {
        ((a, x), (b, y)) for i, a in enumerate(names) for b in names[i + 1 :] for x in found[a] for y in found[b]
    }
    cells: list[Cell] = []
    while missing:
        best = max(
            (_around(pair, found, generator) for pair in sorted(missing)[:4] for _ in range(8)),
            key=lambda cell: len(missing & _pairs(cell)),
        )
        cells.append(best)
        missing -= _pairs(best)
    return cells


def _around(
    pair: tuple[tuple[str, str], tuple[str, str]], found: dict[str, list[str]], generator: torch.Generator
) -> Cell:
    """A random cell with two kinds given."""
    drawn = {name: kinds[int(torch.randint(len(kinds), (), generator=generator))] for name, kinds in found.items()}
    return Cell(**{**drawn, **dict(pair)})


def _pairs(cell: Cell) -> set[tuple[tuple[str, str], tuple[str, str]]]:
    named = list(cell._asdict().items())
    return {(a, b) for i, a in enumerate(named) for b in named[i + 1 :]}


def validate(cell: Cell) -> MemoryConfig | Verdict:
    """The cell's configuration, or the verdict on its refusal."""
    try:
        return MemoryConfig.model_validate(cell.fields())
    except ConfigError as error:
        text = str(error)
        named = [name for name in (*FAMILIES, "chunk", "commit") if _mentions(text, name, cell)]
        if len(named) < 2:
            return Verdict(cell, "fault", f"refused without naming two settings: {text}")
        return Verdict(cell, "refused", text)


def _mentions(text: str, name: str, cell: Cell) -> bool:
    if name in ("chunk", "commit"):
        return f"{name}=" in text
    return name in text and repr(getattr(cell, name)) in text


def check_cell(cell: Cell) -> Verdict:
    """Runs one cell."""
    config = validate(cell)
    if isinstance(config, Verdict):
        return config
    try:
        _check(config)
    except (AssertionError, HecateError, RuntimeError, TypeError, ValueError, KeyError) as error:
        return Verdict(cell, "fault", f"{type(error).__name__}: {error}")
    return Verdict(cell, "passed")


def _check(config: MemoryConfig) -> None:
    length, d = 5, 4
    # Values as wide as phi, which vectors and residuals ask for.
    width = config.feature_map.output_dim(d)
    case = _inputs(config, d, width, 1, length, torch.Generator().manual_seed(0))
    if not config.structure.linear:
        # The curvature of a deep memory grows with its weights: smaller steps stay in range.
        case.leaves["lr"] = 0.2 * case.leaves["lr"]
    whole = _run(case, autodiff="torch")
    for item in (whole.y, *_floats(whole.state), *whole.grads.values()):
        require(bool(torch.isfinite(item).all()), "something is not finite")
    signal = max(float(grad.norm()) for grad in whole.grads.values())
    require(signal > SIGNAL_FLOOR, f"no gradient above {SIGNAL_FLOOR}")
    _agree(case, "the tape against autograd", _run(case), whole)
    _agree(case, "in pieces against the whole", _run(case, cuts=(0, 2, length)), whole)
    for engine in exact_engines(config, length=length):
        got = _run(case, engine=engine, autodiff="auto")
        _agree(case, f"engine {engine} against sequential", got, whole)


def _agree(case: Any, what: str, got: Any, whole: Any) -> None:
    """Equal to 1e-10, or within what rounding the inputs alone does to an ill-conditioned cell."""
    try:
        _same(case.config, what, got, whole)
    except AssertionError:
        errors = _distances(got, whole)
        rounded = [_distances(_run(_rounded(case, seed), autodiff="torch"), whole) for seed in (0, 1)]
        bounds = [ROUNDINGS * max(both) for both in zip(*rounded, strict=True)]
        if any(error > bound for error, bound in zip(errors, bounds, strict=True)):
            raise


def _distances(got: Any, whole: Any) -> list[float]:
    """Of outputs, states and gradients."""
    mine, theirs = ((r.y, *_floats(r.state), *r.grads.values()) for r in (got, whole))
    return [float((a - b).detach().norm()) for a, b in zip(mine, theirs, strict=True)]


def _rounded(case: Any, seed: int) -> Any:
    """The case with every input number moved by a unit in its last place, up or down."""
    source = torch.Generator().manual_seed(seed)
    moved = {}
    for name, item in case.leaves.items():
        sign = torch.randint(2, item.shape, generator=source).to(item.dtype) * 2 - 1
        moved[name] = item * (1 + torch.finfo(item.dtype).eps * sign)
    return case._replace(leaves=moved)
