"""Traits of a config's knobs that engines ask for at every call."""

from __future__ import annotations

import math
from typing import NamedTuple

from hecate.activation import Activation
from hecate.algorithm import AlgorithmForm
from hecate.bias import Bias
from hecate.formula import Formula, activation_nodes, formula_of
from hecate.formula.retention import RetentionFormula, retention_formula
from hecate.phi import FeatureMapKind, Identity, MapForm
from hecate.rule.rule import MemoryRule
from hecate.structure import Structure
from hecate.structure.base import SlotForm


class Forms(NamedTuple):
    """Forms and traits of a config's knobs that engines need at every call, computed once.

    Fields:
        retention: printed, or why it cannot be.
        algorithm: its `kernel_form()`.
        tokens: its `token_form()`, and that of the structure.
        plain: whether the memory itself is carried, by steps r X + D.
        texts: bias, both and phi in JSON, which a tracer could not make.
        phi: its `kernel_form()`.
        identity: whether phi is the identity.
        target, error: whether u is that of bias dot, which does not look at the prediction, or that of l2.
        formula: of the bias, printed; None if there is none.
        apart: whether no coordinate of u is known to need another.
        unprinted: why no kernel can be printed of the bias or an activation; torch's compiler cannot trace a trace.
        linear, transposed: as the structure says.
        gates: which of lr, retain and momentum the knobs take, in the order of `TokenGates`.
        defaults: what these are where none is given.
        tops: the largest they may be.
        per_head: whether the default retain differs between heads; then it is that of the first.
    """

    retention: RetentionFormula | str
    algorithm: AlgorithmForm | None
    tokens: tuple[AlgorithmForm | None, SlotForm | None]
    plain: bool
    texts: tuple[str, ...]
    phi: MapForm | None
    identity: bool
    target: bool
    error: bool
    formula: Formula | None
    apart: bool
    unprinted: str | None
    linear: bool
    transposed: bool
    gates: tuple[bool, ...]
    defaults: tuple[float, ...]
    tops: tuple[float, ...]
    per_head: bool

    @classmethod
    def of(cls, rule: MemoryRule, phi: FeatureMapKind) -> Forms:
        """The forms of a rule's knobs and phi."""
        bias, retention, algorithm = rule.bias, rule.retention, rule.algorithm
        found = formula_of(bias) if isinstance(bias, Bias) else "it is no variant"
        formula = None if isinstance(found, str) else found
        return cls(
            retention=(kept := retention_formula(retention)),
            algorithm=algorithm.kernel_form(),
            tokens=(algorithm.token_form(), rule.structure.token_form()),
            plain=not isinstance(kept, str) and kept.plain,
            texts=tuple(knob.model_dump_json() for knob in (bias, retention, algorithm, phi)),
            phi=phi.kernel_form(),
            identity=type(phi) is Identity,
            target=formula is not None and formula.target,
            error=formula is not None and formula.error,
            formula=formula,
            apart=formula is not None and formula.coordinatewise,
            unprinted=_inactive(rule.structure)
            if formula is not None
            else f"bias {bias.kind!r} as configured has no kernel: {found}",
            linear=rule.structure.linear,
            transposed=rule.structure.transposed,
            gates=(True, retention.uses_retain, algorithm.uses_momentum),
            defaults=(algorithm.lr, retention.default_retain, algorithm.default_momentum),
            tops=(math.inf, 1.0, algorithm.momentum_top),
            per_head=retention.uses_retain and retention.per_head,
        )


def acts_of(structure: Structure) -> set[Activation]:
    """The activations among the fields of a structure."""
    return {value for name in type(structure).model_fields if isinstance(value := getattr(structure, name), Activation)}


def _inactive(structure: Structure) -> str | None:
    for act in acts_of(structure):
        if isinstance(reason := activation_nodes(act), str):
            return f"activation {act.kind!r} of structure {structure.kind!r} has no kernel: {reason}"
    return None
