"""Gating: what a layer makes of a token before it is written, where that is more than a gate of each kind."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from hecate.variant import Variant

Shapes = dict[str, tuple[int, ...]]
Named = Mapping[str, Tensor]  # parameters of a gating, or what it carries on
Start = float | Callable[[tuple[int, ...], torch.Generator], Tensor]  # a number, or a draw in float64
Parts = dict[str, tuple[tuple[int, ...], Start]]


class Sizes(NamedTuple):
    """Of the layer that gates: its width, heads, widths of keys and values per head, writes per token, and weights of
    a memory."""

    d_model: int
    heads: int
    d_key: int
    d_value: int
    writes: int = 1
    weights: int = 1


class Written(NamedTuple):
    """Inputs of a layer to its memory: q `[B, T, H, D]`, k and v `[B, T, (n,) H, *]`, and the gates of
    `hecate.rule.Gates` by name, `[B, T, (n,) H, *]`; `skip` `[B, T, H, V]` is added to the answer."""

    q: Tensor
    k: Tensor
    v: Tensor
    gates: dict[str, Tensor | None]
    skip: Tensor | None = None


Gated = tuple[Written, dict[str, Tensor]]  # inputs to the memory, and what is carried on after the last token


class Masks(NamedTuple):
    """`[B, T]` bool or None: which tokens are written, and before which a memory starts anew; and how many written
    tokens are a chunk of it."""

    write: Tensor | None = None
    reset: Tensor | None = None
    chunk: int = 1


class Gating(Variant, family="gating"):
    """A map of what a layer has made of its input, (x, q, k, v and gates), to what its memory gets.

    The gates of a rule (lr, retain, momentum, and erase, write, retain_value where the config gives them a head) come
    from heads of their own; a variant changes them, replaces them, or adds others, as its paper says. It may carry
    state from token to token, `held`, which masks and resets treat as the memory does: an unwritten token leaves it, a
    reset restarts it.

    A variant gives `forward`, and the shapes of its parameters and how they start: as `parts`, or as `shapes` and
    `start`.

    Shapes: x `[B, T, d_model]`; parameters as in `shapes`, state `[B, ...]` as in `state_shapes`, zero at the start.
    """

    plain: ClassVar[bool] = False  # whether it leaves everything as it is
    one_key: ClassVar[bool] = False  # whether it looks at the one key of a token
    channels: ClassVar[tuple[str, ...]] = ()  # gates that it makes per key channel, of which phi then has as many
    _makes: ClassVar[tuple[str, ...]] = ()
    _formulas = ("forward", "parts", "shapes", "start", "state_shapes")

    @property
    def gates(self) -> tuple[str, ...]:
        """The gates that it makes among erase, write, retain_value and floor."""
        return tuple(name for name in self._makes if name not in ("lr", "retain", "momentum"))

    @property
    def replaces(self) -> tuple[str, ...]:
        """Gates that it makes itself, or leaves at the rule's default, and that get no head."""
        return self._makes

    @property
    def erases(self) -> float:
        """The most by which its gates multiply erase times write: a step's curvature grows as much."""
        return 1.0

    def refusal(self, config: Any) -> str | None:
        """Why it cannot gate a `MemoryConfig`; None if it can."""
        return None

    def pairs(self, writes: int) -> int:
        """Number of keys and values that the layer projects per token, for so many writes."""
        return writes

    def parts(self, sizes: Sizes) -> Parts:
        """Its parameters by name: a shape, and the value at the start."""
        return {}

    def shapes(self, sizes: Sizes) -> Shapes:
        """Shapes of its parameters by name."""
        return {name: shape for name, (shape, _) in self.parts(sizes).items()}

    def state_shapes(self, sizes: Sizes) -> Shapes:
        """Shapes of what it carries on, of one sequence, by name."""
        return {}

    def start(self, name: str, shape: tuple[int, ...], sizes: Sizes, source: torch.Generator) -> Tensor:
        """Starting values of a parameter, in float64."""
        if name not in (parts := self.parts(sizes)):
            raise NotImplementedError(f"{type(self).__name__} has a parameter {name!r} and no start for it")
        start = parts[name][1]
        return start(shape, source) if callable(start) else torch.full(shape, start, dtype=torch.float64)

    def forward(self, params: Named, x: Tensor, made: Written, held: Named, masks: Masks) -> Gated:
        """Inputs to the memory, and the gating's state after the last token."""
        raise NotImplementedError(f"{type(self).__name__} defines no forward")


class Plain(Gating):
    r"""none: what the layer has made, as it is.

    Formula: $q_t,\ k_t,\ v_t,\ \eta_t,\ \alpha_t,\ \mu_t \ \text{as the layer has made them of } x_t$
    Shapes: no parameters, no state.
    Origin: a gate of each kind from x, as Titans and gated DeltaNet have them. [GATE-NONE-D1]
    """

    kind: Literal["none"] = "none"
    plain: ClassVar[bool] = True

    def forward(self, params: Named, x: Tensor, made: Written, held: Named, masks: Masks) -> Gated:
        return made, {}


GatingKind = Gating


# For variants that look at the token before.


def latest(values: Tensor, held: Tensor, masks: Masks) -> tuple[Tensor, Tensor]:
    """The value `[B, T, ...]` of the last token written before each one in its document, and that after the last token
    `[B, ...]`; `held` before the first. After a reset it is zero."""
    batch, length = values.shape[:2]
    if not length:
        return values, held
    if masks.write is None and masks.reset is None:
        earlier = torch.cat([held.unsqueeze(1).to(values.dtype), values[:, :-1]], 1)
        return earlier, values[:, -1]
    # Places: 0 is `held`, 1 what a reset leaves, t + 2 token t.
    steps = torch.arange(length, device=values.device)
    marks = torch.zeros(batch, length, 2, dtype=torch.int64, device=values.device)
    if masks.reset is not None:
        marks[..., 0] = torch.where(masks.reset, 2 * steps + 1, 0)
    written = torch.ones(batch, length, dtype=torch.bool, device=values.device) if masks.write is None else masks.write
    marks[..., 1] = torch.where(written, 2 * steps + 2, 0)
    newest = marks.flatten(1).cummax(1).values.unflatten(1, (length, 2))
    places = torch.where(newest % 2 == 1, 1, torch.where(newest == 0, 0, newest // 2 + 1))
    before, after = places[..., 0], places[:, -1, 1]

    start = torch.stack([held.to(values.dtype), torch.zeros_like(held, dtype=values.dtype)], 1)
    table, rows = torch.cat([start, values], 1), torch.arange(batch, device=values.device)
    return table[rows.unsqueeze(1), before], table[rows, after]


Join = Callable[..., Tensor]


def running(decay: Tensor, added: Tensor, held: Tensor, masks: Masks) -> Tensor:
    """s_t = decay_t s_{t-1} + added_t, `[B, T, ...]`, from `held`: an unwritten token leaves it, a reset takes it to 0.

    A doubling scan: log2(T) passes over the sequence.
    """
    return _doubled(decay, added, held, masks, lambda a, b, later: b * later + a, torch.mul, 1.0, 0.0)


def running_max(fall: Tensor, added: Tensor, held: Tensor, masks: Masks) -> Tensor:
    """m_t = max(m_{t-1} + fall_t, added_t), `[B, T, ...]`, from `held`; masks as in `running`."""

    def join(a: Tensor, b: Tensor, later: Tensor) -> Tensor:
        return torch.maximum(a, b + later)

    return _doubled(fall, added, held, masks, join, torch.add, 0.0, -torch.inf)


def _doubled(
    gate: Tensor, added: Tensor, held: Tensor, masks: Masks, join: Join, chain: Join, one: float, none: float
) -> Tensor:
    wide = [1] * (added.dim() - 2)
    if masks.write is not None:
        write = masks.write.reshape(*masks.write.shape, *wide)
        gate, added = torch.where(write, gate, one), torch.where(write, added, none)
    if masks.reset is not None:
        reset = masks.reset.reshape(*masks.reset.shape, *wide)
        # What a reset leaves is 0, which goes through the token's own gate.
        fresh = join(added, torch.zeros_like(added), gate.expand_as(added))
        gate, added = torch.where(reset, none if one == 0.0 else 0.0, gate), torch.where(reset, fresh, added)
    gate = gate.expand_as(added)
    step, length = 1, added.shape[1]
    while step < length:
        head = added[:, :step], gate[:, :step]
        added = torch.cat([head[0], join(added[:, step:], added[:, :-step], gate[:, step:])], 1)
        gate = torch.cat([head[1], chain(gate[:, step:], gate[:, :-step])], 1)
        step *= 2
    return join(added, held.unsqueeze(1).to(added.dtype), gate)
