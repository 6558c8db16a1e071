"""The product of all knobs: every combination runs right, or is refused with a reason.

    phi x bias x retention x algorithm x structure x (chunk, commit)
        x gating x readout x writes x gates given x step x normalizer x read x decay_order

A cell is one combination of kinds at their example settings. It *passes* when a short scan, or with a gating a layer,
in float64 is finite, has gradients above a signal floor, and gives the same outputs, final state and gradients by the
tape, by autograd, in pieces and on every engine that runs it, and where there is neither readout nor normaliser the
outputs of the recurrence as it is written. It is *refused* when validation, or where gates are given the call, raises a
`ConfigError` that names two of its settings. Anything else is a *fault*.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from itertools import combinations, product
from typing import Any, Literal, NamedTuple

import torch

from hecate.algorithm import AlgorithmKind, Momentum
from hecate.bias import BiasKind
from hecate.errors import ConfigError
from hecate.gating import GatingKind, Head
from hecate.phi import FeatureMapKind
from hecate.readout import ReadoutKind
from hecate.retention import RetentionKind
from hecate.rule import MemoryConfig
from hecate.structure import Matrix, StructureKind
from hecate.variant import Variant
from tests.product.examples import example
from tests.registries import shipped_kinds

FAMILIES: dict[str, type[Variant]] = {
    "structure": StructureKind,
    "bias": BiasKind,
    "retention": RetentionKind,
    "algorithm": AlgorithmKind,
    "feature_map": FeatureMapKind,
    "gating": GatingKind,
    "readout": ReadoutKind,
}
WIDTH = 4
"""Of keys."""
WAYS = ("token", "frozen", "commit", "large")
_WAYS: dict[str, dict[str, Any]] = {
    "token": {"chunk": 1, "commit": "token"},
    "frozen": {"chunk": 3, "commit": "token"},
    "commit": {"chunk": 1, "commit": "chunk"},
    "large": {"chunk": 3, "commit": "chunk"},
}
GATES: dict[str, dict[str, str]] = {
    "none": {},
    "erase": {"erase": "phi"},
    "write": {"write": "phi"},
    "both": {"erase": "head", "write": "phi"},
    "retain": {"retain": "phi"},
    "retain_value": {"retain_value": "value"},
    "rows": {"erase": "phi", "write": "head", "retain_value": "value"},
    "floor": {"floor": "head"},
    "ridge": {"ridge": "phi"},
    "mix": {"ridge": "head", "mix": "head"},
}
"""Gates given beside lr, retain and momentum: one per head, per phi channel or per value channel."""
PLAIN: dict[str, tuple[str, ...]] = {
    "writes": ("1", "2", "3"),
    "gates": tuple(GATES),
    "step": ("raw", "normalized", "implicit", "flow"),
    "normalizer": ("none", "sum", "max"),
    "read": ("after", "before"),
    "decay_order": ("with_step", "before_gradient"),
}
RULE = ("structure", "bias", "retention", "algorithm", "feature_map", "way")
DECAYS, TWO = {"retention": "decay"}, {"writes": "2"}
SLOTS = {"readout": "slots", "bias": "dot", **DECAYS}
NEEDS: dict[tuple[str, str], dict[str, str]] = {
    ("gating", "complement"): DECAYS,
    ("gating", "rwkv7"): {**TWO, **DECAYS},
    ("gating", "mamba2"): DECAYS,
    ("gating", "mamba3"): {**TWO, **DECAYS},
    ("gating", "mlstm"): {"normalizer": "max", **DECAYS},
    ("gating", "momentum_delta"): {"algorithm": "momentum.free", **DECAYS},
    ("gating", "mesa"): {"readout": "ridge", "bias": "dot"},
    ("gating", "kalmanet"): {"readout": "ridge", "bias": "dot"},
    ("gating", "gsa"): SLOTS,
    ("gating", "abc"): SLOTS,
    ("gating", "raven"): SLOTS,
    ("gating", "target_conv"): {"bias": "dot", "way": "large", "read": "before", **TWO},
    ("gating", "large_chunk"): {"structure": "gated_mlp", "algorithm": "momentum", "way": "large"},
    ("gating", "heads.rows"): DECAYS,
    ("readout", "ridge"): {"bias": "dot"},
    ("readout", "slots"): {"bias": "dot", **DECAYS},
    ("gates", "retain"): DECAYS,
    ("gates", "retain_value"): DECAYS,
    ("gates", "rows"): DECAYS,
    ("gates", "floor"): {"normalizer": "max"},
    ("gates", "ridge"): {"readout": "ridge", "bias": "dot"},
    ("gates", "mix"): {"readout": "ridge", "bias": "dot"},
    ("decay_order", "before_gradient"): DECAYS,
    ("normalizer", "sum"): {"feature_map": "elu"},
}
"""What a kind cannot be without, where that is not the default."""


@cache
def settings() -> dict[str, dict[str, Any]]:
    """Of each family the variants under the names of the cells: its kinds at their examples, and `kind.setting`."""
    found = {name: {kind: example(cls) for kind, cls in shipped_kinds(root).items()} for name, root in FAMILIES.items()}
    found["structure"]["matrix.key"] = Matrix(learns="key")
    found["algorithm"]["momentum.free"] = Momentum(bounded=False)
    found["feature_map"]["hedgehog.joint"] = found["feature_map"]["hedgehog"].model_copy(update={"joint": True})
    for kind, own in list(found["retention"].items()):
        if "link_at" in type(own).model_fields and own.dual:
            for at in ("chunk", "linear"):
                found["retention"][f"{kind}.{at}"] = own.model_copy(update={"link_at": at})
    heads, per_channel = found["gating"]["heads"], Head(channels=True)
    found["gating"]["heads"] = heads.model_copy(update={"erase": per_channel, "write": Head(), "value": Head()})
    found["gating"]["heads.rows"] = heads.model_copy(update={"retain_value": per_channel})
    found["gating"]["complement"] = found["gating"]["complement"].model_copy(update={"keys": True})
    found["gating"]["target_conv"] = found["gating"]["target_conv"].model_copy(update={"taps": 3, "ahead": 1})
    return found


class Cell(NamedTuple):
    """One combination: a kind of each family, how gradients are taken and committed, and the fields around it."""

    structure: str
    bias: str
    retention: str
    algorithm: str
    feature_map: str
    way: str
    gating: str = "none"
    readout: str = "direct"
    writes: str = "1"
    gates: str = "none"
    step: str = "raw"
    normalizer: str = "none"
    read: str = "after"
    decay_order: str = "with_step"

    @property
    def name(self) -> str:
        """The rule, and what is not as by default."""
        around = [value for name, value in zip(self._fields, self, strict=True) if value != DEFAULT[name]]
        return "-".join((*self[: len(RULE)], *[value for value in around if value not in self[: len(RULE)]]))

    def fields(self) -> dict[str, Any]:
        """The fields of its `MemoryConfig`."""
        known = settings()
        examples = {name: known[name][getattr(self, name)] for name in FAMILIES}
        if self.retention.startswith("lq"):
            # The root has its chord below eps: one this wide leaves no slope near infinity.
            examples["retention"] = examples["retention"].model_copy(update={"eps": 0.05})
        lr = examples["algorithm"].model_copy(update={"lr": 0.2})
        plain = {name: getattr(self, name) for name in PLAIN if name not in ("gates", "writes")}
        # Comba's layer has made its keys of unit length before.
        norm = "none" if self.gating == "comba" else "l2"
        around = {**_WAYS[self.way], "writes": int(self.writes), "key_norm": norm, "state_dtype": "float64"}
        return {**examples, "algorithm": lr, **plain, **around}


DEFAULT: dict[str, str] = {
    **{"structure": "matrix", "bias": "l2", "retention": "none", "algorithm": "gd", "feature_map": "identity"},
    **{"way": "token", **Cell._field_defaults},
}


class Verdict(NamedTuple):
    """What became of a cell, and why."""

    cell: Cell
    status: Literal["passed", "refused", "fault"]
    reason: str = ""


def axes() -> dict[str, list[str]]:
    """The kinds along each axis of the product of the knobs of a rule."""
    return {**{name: list(shipped_kinds(FAMILIES[name])) for name in RULE[:-1]}, "way": list(WAYS)}


def all_axes() -> dict[str, list[str]]:
    """The kinds along every axis, with the settings beside the examples."""
    known = settings()
    found = {name: [*known[name]] for name in FAMILIES} | {"way": list(WAYS)} | {k: list(v) for k, v in PLAIN.items()}
    return {name: found[name] for name in Cell._fields}


def every_cell() -> Iterator[Cell]:
    """All cells of the knobs of a rule, feature map by feature map."""
    found = axes()
    for values in product(*(found[name] for name in RULE)):
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
    """Cells among which any two kinds of different knobs of a rule meet at least once."""
    found = axes()
    generator = torch.Generator().manual_seed(seed)
    missing = {((a, x), (b, y)) for a, b in combinations(RULE, 2) for x in found[a] for y in found[b]}
    cells: list[Cell] = []
    while missing:
        best = max(
            (_around(pair, found, generator) for pair in sorted(missing)[:4] for _ in range(8)),
            key=lambda cell: len(missing & _pairs(cell, RULE)),
        )
        cells.append(best)
        missing -= _pairs(best, RULE)
    return cells


Pair = tuple[tuple[str, str], tuple[str, str]]
TRIES = 2
"""Kinds that are tried in the place of a default, as most are refused beside what is there."""


def _around(pair: Pair, found: dict[str, list[str]], generator: torch.Generator) -> Cell:
    """A random cell with two kinds given."""
    drawn = {name: kinds[int(torch.randint(len(kinds), (), generator=generator))] for name, kinds in found.items()}
    return Cell(**{**drawn, **dict(pair)})


def _pairs(cell: Cell, names: tuple[str, ...], one: str = "") -> set[Pair]:
    """All pairs of kinds in a cell, or those with the kind of one axis."""
    kinds = [(name, getattr(cell, name)) for name in names]
    if not one:
        return set(combinations(kinds, 2))
    at = names.index(one)
    return {(kind, kinds[at]) for kind in kinds[:at]} | {(kinds[at], kind) for kind in kinds[at + 1 :]}


def fieldwise(names: tuple[str, ...] = Cell._fields, seed: int = 0) -> list[Cell]:
    """Cells that run among which any two kinds of these axes meet at least once, and for any two that are refused with
    what both need, one that is. Kinds of other axes come along as they can.

    A gating makes the gates itself, and is not met by gates that are given.
    """
    found, source = all_axes(), torch.Generator().manual_seed(seed)
    # Axes of many kinds first: their pairs ask for the most cells, in which those of the others find places.
    axes_of_pairs = sorted(combinations(names, 2), key=lambda both: -len(found[both[0]]) * len(found[both[1]]))
    pairs = [
        pair
        for a, b in axes_of_pairs
        for pair in product([(a, x) for x in found[a]], [(b, y) for y in found[b]])
        if {a, b} != {"gating", "gates"} or "none" in (pair[0][1], pair[1][1])
    ]
    cells = [cell for cell in map(nearest, pairs) if not runs(cell)]
    missing = {pair for pair in pairs if runs(nearest(pair))}
    for pair in pairs:
        if pair in missing:
            cells.append(_moved(nearest(pair), pair, found, names, missing, source))
            missing -= _pairs(cells[-1], names)
    return cells


def nearest(pair: Pair) -> Cell:
    """Two kinds with what they need, and by default otherwise."""
    needed = {**NEEDS.get(pair[0], {}), **NEEDS.get(pair[1], {}), **dict(pair)}
    if needed.get("retention", "").endswith((".chunk", ".linear")):
        needed.setdefault("way", "frozen")
    return Cell(**{**DEFAULT, **needed})


def _moved(
    cell: Cell, pair: Pair, found: dict[str, list[str]], names: tuple[str, ...], missing: set[Pair],
    source: torch.Generator,
) -> Cell:  # fmt: skip
    """An allowed cell with defaults of another replaced, each by a kind that most of the others have not met yet."""
    fixed = {*dict(pair), *NEEDS.get(pair[0], {}), *NEEDS.get(pair[1], {})}
    free = [name for name in Cell._fields if name not in fixed]
    for at in torch.randperm(len(free), generator=source).tolist():
        name = free[at]
        kinds = [found[name][index] for index in torch.randperm(len(found[name]), generator=source).tolist()]
        if name in names:
            new = {kind: len(_pairs(cell._replace(**{name: kind}), names, name) & missing) for kind in kinds}
            kinds = sorted(filter(new.__getitem__, kinds), key=new.__getitem__, reverse=True)
        for kind in kinds[:TRIES]:
            if runs(other := cell._replace(**{name: kind})):
                cell = other
                break
    return cell


@cache
def runs(cell: Cell) -> bool:
    """Whether a cell is allowed with the gates that it is given or its layer makes."""
    config, given = validate(cell), GATES[cell.gates]
    if not isinstance(config, MemoryConfig) or (given and cell.gating != "none"):
        return False
    if given.get("retain") and not (config.structure.linear and (config.readout.plain or config.readout.channels)):
        return False
    wide = config.gating.channels and config.feature_map.output_dim(WIDTH) != WIDTH
    return not wide and not any(name in given for name, _ in config.gate_refusals())


def some_cells(count: int, seed: int = 0) -> Iterator[Cell]:
    """So many random cells of the product of all axes."""
    found, source = all_axes(), torch.Generator().manual_seed(seed)
    for _ in range(count):
        drawn = {name: kinds[int(torch.randint(len(kinds), (), generator=source))] for name, kinds in found.items()}
        yield Cell(**(drawn if drawn["gating"] == "none" else {**drawn, "gates": "none"}))


@cache
def validate(cell: Cell) -> MemoryConfig | Verdict:
    """The cell's configuration, or the verdict on its refusal."""
    try:
        return MemoryConfig.model_validate(cell.fields())
    except ConfigError as error:
        return refused(cell, error)


def refused(cell: Cell, error: ConfigError) -> Verdict:
    """A fault where two settings are not named."""
    text = str(error)
    named = {name for name in (*FAMILIES, "chunk", "commit", *PLAIN) if _mentions(text, name, cell)}
    if len(named) < 2:
        return Verdict(cell, "fault", f"refused without naming two settings: {text}")
    return Verdict(cell, "refused", text)


def _mentions(text: str, name: str, cell: Cell) -> bool:
    """A family by its kind, or by a field of the variant; a plain setting by its value; gates by their names."""
    if name == "gates":
        return any(f"gates.{gate}" in text for gate in GATES[cell.gates])
    if name not in FAMILIES:
        return re.search(rf"(^|\W){name}(=|: )", text) is not None
    kind = getattr(cell, name).partition(".")[0]
    return f"{name}." in text or f"{name}=" in text or (name in text and repr(kind) in text)
