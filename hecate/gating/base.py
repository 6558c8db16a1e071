"""Gating: the map from a layer's projections and gates to the inputs of its memory; and scans of what it carries from
token to token, with masks and resets: the value before, sums and maxima."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from hecate.variant import Variant

Shapes = dict[str, tuple[int, ...]]
Named = Mapping[str, Tensor]  # parameters of a gating, or its state
Start = float | Callable[[tuple[int, ...], torch.Generator], Tensor]  # a number, or a draw in float64
Parts = dict[str, tuple[tuple[int, ...], Start]]


class Sizes(NamedTuple):
    """Sizes of the layer: its width, heads, widths of keys and values per head, writes per token, and number of weights
    of a memory."""

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


Gated = tuple[Written, dict[str, Tensor]]  # inputs to the memory, and the gating's state after the last token


class Masks(NamedTuple):
    """Masks `[B, T]`, bool or None, of tokens that are written and of tokens that reset the memory; and the number of
    written tokens in a chunk."""

    write: Tensor | None = None
    reset: Tensor | None = None
    chunk: int = 1


class Gating(Variant, family="gating"):
    """A map from a layer's input x, its q, k, v and its gates to the inputs of its memory.

    The gates of a rule (lr, retain, momentum, and erase, write, retain_value if the config gives them a head) come from
    heads of their own; a variant changes them, replaces them, or adds others, as its paper says. It may carry state
    from token to token, `state`, which masks and resets treat as the memory does: an unwritten token leaves it, a reset
    restarts it.

    A variant defines `forward`, and the shapes and starting values of its parameters: as `parts`, or as `shapes` and
    `start`.

    Shapes: x `[B, T, d_model]`; parameters as in `shapes`, state `[B, ...]` as in `state_shapes`, zero at the start.
    """

    plain: ClassVar[bool] = False  # whether it leaves everything as it is
    one_key: ClassVar[bool] = False  # whether it needs a single key per token
    channels: ClassVar[tuple[str, ...]] = ()  # gates that it makes per key channel; phi must keep their number
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
        """Largest value of erase times write from its gates, by which it multiplies a step's curvature."""
        return 1.0

    def refusal(self, config: Any) -> str | None:
        """Reason why it cannot gate a `MemoryConfig`; None if it can."""
        return None

    def pairs(self, writes: int) -> int:
        """Number of keys and values that the layer projects per token, for this number of writes."""
        return writes

    def parts(self, sizes: Sizes) -> Parts:
        """Its parameters by name: a shape, and the starting value."""
        return {}

    def shapes(self, sizes: Sizes) -> Shapes:
        """Shapes of its parameters by name."""
        return {name: shape for name, (shape, _) in self.parts(sizes).items()}

    def state_shapes(self, sizes: Sizes) -> Shapes:
        """Shapes of its state for one sequence, by name."""
        return {}

    def start(self, name: str, shape: tuple[int, ...], sizes: Sizes, source: torch.Generator) -> Tensor:
        """Starting values of a parameter, in float64."""
        if name not in (parts := self.parts(sizes)):
            raise NotImplementedError(f"{type(self).__name__} has a parameter {name!r} and no start for it")
        start = parts[name][1]
        return start(shape, source) if callable(start) else torch.full(shape, start, dtype=torch.float64)

    def forward(self, params: Named, x: Tensor, inputs: Written, state: Named, masks: Masks) -> Gated:
        """Inputs to the memory, and the gating's state after the last token."""
        raise NotImplementedError(f"{type(self).__name__} defines no forward")


class Plain(Gating):
    r"""none: the layer's q, k, v and gates as they are.

    Formula: $q_t,\ k_t,\ v_t,\ \eta_t,\ \alpha_t,\ \mu_t \ \text{as the layer has made them of } x_t$
    Shapes: no parameters, no state.
    Origin: a gate of each kind from x, as Titans and gated DeltaNet have them. [GATE-NONE-D1]
    """

    kind: Literal["none"] = "none"
    plain: ClassVar[bool] = True

    def forward(self, params: Named, x: Tensor, inputs: Written, state: Named, masks: Masks) -> Gated:
        return inputs, {}


GatingKind = Gating


# For variants that use the token before.


def latest(values: Tensor, state: Tensor, masks: Masks) -> tuple[Tensor, Tensor]:
    """The value `[B, T, ...]` of the last token written before each one, and the value `[B, ...]` after the last token;
    `state` before the first write, and zero after a reset."""
    batch, length = values.shape[:2]
    if not length:
        return values, state
    if masks.write is None and masks.reset is None:
        earlier = torch.cat([state.unsqueeze(1).to(values.dtype), values[:, :-1]], 1)
        return earlier, values[:, -1]
    # Places: 0 for `state`, 1 for the zero after a reset, t + 2 for token t.
    steps = torch.arange(length, device=values.device)
    marks = torch.zeros(batch, length, 2, dtype=torch.int64, device=values.device)
    if masks.reset is not None:
        marks[..., 0] = torch.where(masks.reset, 2 * steps + 1, 0)
    written = torch.ones(batch, length, dtype=torch.bool, device=values.device) if masks.write is None else masks.write
    marks[..., 1] = torch.where(written, 2 * steps + 2, 0)
    newest = marks.flatten(1).cummax(1).values.unflatten(1, (length, 2))
    places = torch.where(newest % 2 == 1, 1, torch.where(newest == 0, 0, newest // 2 + 1))
    before, after = places[..., 0], places[:, -1, 1]

    start = torch.stack([state.to(values.dtype), torch.zeros_like(state, dtype=values.dtype)], 1)
    table, rows = torch.cat([start, values], 1), torch.arange(batch, device=values.device)
    return table[rows.unsqueeze(1), before], table[rows, after]


Join = Callable[..., Tensor]


def running(decay: Tensor, added: Tensor, state: Tensor, masks: Masks) -> Tensor:
    """s_t = decay_t s_{t-1} + added_t, `[B, T, ...]`, from `state`: an unwritten token leaves it, a reset makes it 0.

    A doubling scan: log2(T) passes over the sequence.
    """
    return _doubling_scan(decay, added, state, masks, lambda a, b, later: b * later + a, torch.mul, 1.0, 0.0)


def running_max(fall: Tensor, added: Tensor, state: Tensor, masks: Masks) -> Tensor:
    """m_t = max(m_{t-1} + fall_t, added_t), `[B, T, ...]`, from `state`; masks as in `running`."""

    def join(a: Tensor, b: Tensor, later: Tensor) -> Tensor:
        return torch.maximum(a, b + later)

    return _doubling_scan(fall, added, state, masks, join, torch.add, 0.0, -torch.inf)


def _doubling_scan(
    gate: Tensor, added: Tensor, state: Tensor, masks: Masks, join: Join, chain: Join, one: float, none: float
) -> Tensor:
    wide = [1] * (added.dim() - 2)
    if masks.write is not None:
        write = masks.write.reshape(*masks.write.shape, *wide)
        gate, added = torch.where(write, gate, one), torch.where(write, added, none)
    if masks.reset is not None:
        reset = masks.reset.reshape(*masks.reset.shape, *wide)
        # A reset leaves 0, which then goes through the token's own gate.
        fresh = join(added, torch.zeros_like(added), gate.expand_as(added))
        gate, added = torch.where(reset, none if one == 0.0 else 0.0, gate), torch.where(reset, fresh, added)
    gate = gate.expand_as(added)
    step, length = 1, added.shape[1]
    while step < length:
        head = added[:, :step], gate[:, :step]
        added = torch.cat([head[0], join(added[:, step:], added[:, :-step], gate[:, step:])], 1)
        gate = torch.cat([head[1], chain(gate[:, step:], gate[:, :-step])], 1)
        step *= 2
    return join(added, state.unsqueeze(1).to(added.dtype), gate)


def __getattr__(name: str) -> Any:
    """Heads, which pickles of before name here."""
    if name not in ("Head", "Heads"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("hecate.gating"), name)
