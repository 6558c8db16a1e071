"""The attention map that a memory computes without ever forming it.

Where every step is linear in the values, the answer is y_t = sum_s A[t, s] v_s + what is left of the start, with A
fixed by queries, keys and gates. A is read off by scanning one-hot values from
an empty memory, with the engine and the conventions of the rule itself.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from hecate.errors import ConfigError
from hecate.microscope.calls import in_double
from hecate.nn.asked import Asked
from hecate.rule import MemoryConfig, MemoryState
from hecate.variant import still_declared

# What rounding may leave in float64, times the condition of a memory that still works.
AGREES = 1e-6


class Attention(NamedTuple):
    """y = A v + start, exactly. [SCOPE-ATT-D1]

    Fields:
        map: A `[B, H, T, S]`, or `[B, H, T, S, V]` for a diagonal memory, whose coordinates have
            a map each. Rows are tokens that read, columns tokens that were written.
        start: what the state before the first token adds to every answer, `[B, H, T, V]`.
    """

    map: Tensor
    start: Tensor

    def applied(self, v: Tensor) -> Tensor:
        """The memory's answers `[B, T, H, V]` to values `[B, T, H, V]`."""
        ends = "bhtsv" if self.map.dim() == 5 else "bhts"
        y = torch.einsum(f"{ends},bshv->bhtv", self.map, v.to(self.map.dtype)) + self.start
        return y.transpose(1, 2)


def nonlinearity(config: MemoryConfig) -> str | None:
    """The setting that makes answers non-linear in values, as declared; None if none does."""
    structure, bias, retention, algorithm = (config.structure, config.bias, config.retention, config.algorithm)
    if not (structure.weighted_sum and _declared(structure, ("predict", "graph", "gradient"))):
        return f"structure {structure.kind!r} is not linear in the weights that hold values"
    if not (bias.linear and still_declared(bias, "linear", ("loss", "grad", "rho", "psi"))):
        return f"bias {bias.kind!r} has a gradient that is not linear in prediction and value"
    if not (retention.weighted_sum and _declared(retention, ("step", "start", "weights"))):
        return f"retention {retention.kind!r} does not keep a weighted sum of what was written"
    if not (algorithm.weighted_sum and _declared(algorithm, ("direction", "gradient"))):
        return f"algorithm {algorithm.kind!r} takes steps that are not linear in gradients"
    return None


def _declared(knob: object, formulas: tuple[str, ...]) -> bool:
    return any(still_declared(knob, trait, formulas) for trait in ("linear", "weighted_sum"))


def implicit_attention(asked: Asked) -> Attention:
    """The attention map of a scan, and what the start adds.

    Cost: a scan with values as wide as the sequence is long; for a diagonal memory one of T times as many sequences.

    Raises:
        ConfigError: a rule that is not linear in its values, with the setting at fault; or one
            that says it is and is not.
    """
    reason = nonlinearity(asked.config)
    if reason is not None:
        raise ConfigError(
            f"there is no attention map: {reason}, so the answers are no weighted sum of values; "
            "norms, ranks, gates and recall do not need one"
        )
    asked = in_double(asked)
    batch, length, heads, width = asked.v.shape
    start, _ = asked._replace(v=torch.zeros_like(asked.v)).scan()
    start = start.transpose(1, 2)
    if length == 0:
        return Attention(asked.v.new_zeros(batch, heads, 0, 0), start)
    eye = torch.eye(length, dtype=asked.v.dtype, device=asked.v.device)
    if asked.config.structure.diagonal:
        v = eye[None, :, :, None, None].expand(batch, -1, -1, heads, width).flatten(0, 1)
        y = _from_empty(_repeated(asked, length)._replace(v=v), asked.v.shape[-1])
        found = y.unflatten(0, (batch, length)).permute(0, 3, 2, 1, 4)
    else:
        v = eye[None, :, None].expand(batch, -1, heads, -1)
        found = _from_empty(asked._replace(v=v), asked.v.shape[-1]).transpose(1, 2)
    attention = Attention(found, start)
    _check(asked, attention)
    return attention


def _from_empty(asked: Asked, width: int) -> Tensor:
    """The answers of a memory that starts empty: in whatever holds values, and in nothing else."""
    config = asked.config
    d_phi = config.feature_map.output_dim(asked.k.shape[-1])
    start = asked.initial
    if start is None:
        how: dict[str, Any] = {"heads": asked.k.shape[2], "dtype": asked.v.dtype}
        start = config.structure.init(d_phi, width, device=asked.v.device, **how)
    shapes, blind = config.structure.shapes(d_phi, asked.v.shape[-1]), _blind(config, d_phi, width)
    initial = {
        name: weight
        if name in blind
        else weight.new_zeros(*weight.shape[: weight.dim() - len(shapes[name])], *shapes[name])
        for name, weight in start.items()
    }
    asked, state = asked._replace(initial=initial, state=None), asked.state
    if state is not None:
        _, empty = asked.between(0, 0, None).scan()
        asked = asked._replace(state=_emptied(state, empty, blind))
    return asked.scan()[0]


def _blind(config: MemoryConfig, d_phi: int, width: int) -> set[str]:
    """Weights and slots without the values' width in their shape: they hear of no value."""
    one = config.algorithm.context_shapes(d_phi, width)
    other = config.algorithm.context_shapes(d_phi, width + 1)
    if not config.structure.diagonal:  # whose weights are as wide as phi, which is as wide as v
        one = one | config.structure.shapes(d_phi, width)
        other = other | config.structure.shapes(d_phi, width + 1)
    return {name for name in one if one[name] == other[name]}


def _emptied(state: MemoryState, empty: MemoryState, blind: set[str]) -> MemoryState:
    """A state without values: what is blind to them stays as it is, counts included."""

    def chosen(given: dict[str, Tensor], fresh: dict[str, Tensor]) -> dict[str, Tensor]:
        # A slot of a weight is called slot.weight.
        return {name: given[name] if name.rpartition(".")[2] in blind else zero for name, zero in fresh.items()}

    return empty._replace(
        memory=chosen(state.memory, empty.memory),
        slots=chosen(state.slots, empty.slots),
        anchor=chosen(state.anchor, empty.anchor),
        pending={
            **chosen(state.pending, empty.pending),
            **{name: state.pending[name] for name in ("retain",) if name in state.pending},
        },
        position=state.position,
        normalizer=state.normalizer,
        seen=state.seen,
    )


def _repeated(asked: Asked, times: int) -> Asked:
    """Every sequence so many times in a row; the starting weights do not matter."""
    given = asked._replace(phi_params=None, initial=None)
    rows = pytree.tree_map_only(Tensor, lambda x: x.repeat_interleave(times, 0), given)
    return rows._replace(phi_params=asked.phi_params)


def _check(asked: Asked, attention: Attention) -> None:
    """Holds A v + start against the token loop: a declaration may be wrong."""
    answers, _ = asked.scan(engine="sequential")
    v = asked.v
    if asked.write_mask is not None:  # the value of a token that is not written may be anything
        v = torch.where(asked.write_mask[..., None, None], v, 0.0)
    summed = attention.applied(v)
    scale = max(float(answers.abs().max()), 1e-300)
    if not float((summed - answers).abs().max()) <= AGREES * scale:
        raise ConfigError(
            "the rule says that it is linear in its values, but a sum over one-hot values differs "
            "from its answers; a knob declares `linear` or `weighted_sum` wrongly, or "
            "on_nonfinite='skip' has left tokens out"
        )
