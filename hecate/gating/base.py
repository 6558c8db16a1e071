"""Gating: the map from a layer's projections and gates to the inputs of its memory; and heads, each a linear map, for
the gates that few rules have: erase, write, retain_value, and a gate on the value."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor
from torch.nn.functional import linear, softplus

from hecate.checks import Size
from hecate.tape.ops import unit
from hecate.variant import Config, Variant

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


class Head(Config):
    """top sigmoid(W x + b), per head or per channel.

    Fields:
        channels: a gate per channel instead of per head.
        rank: W = W_2 W_1 with this many rows in W_1, which all heads share.
        start: share of `top` where x is 0, b = log(start / (1 - start)).
        top: the ceiling, never reached.
        bias: whether b is learned; without it `start` is 1/2.
    """

    channels: bool = False
    rank: Annotated[Size, Field(ge=1)] | None = None
    start: float = Field(0.5, gt=0, lt=1)
    top: float = Field(1.0, gt=0)
    bias: bool = True


class Heads(Gating):
    r"""heads: a head each for erase, write, retain_value and the value: v becomes value * v.

    With n writes per token, each write has its own gates, except for retain_value, which acts once. Weights start at
    N(0, 0.02^2). With lr or retain off, that gate is the rule's number at every token, as in linear attention and
    RetNet.

    Formula: $\mathrm{gate}_t = \mathrm{top}\; \mathrm{sigmoid}(W x_t + b)$
    $v_t \leftarrow \mathrm{value}_t \odot v_t$
    Shapes: per head `[B, T, (n,) H]`, per channel `[B, T, (n,) H, D or V]`; retain_value is per channel always.
    References: `erase` and `value` per channel are the gates b and w of Gated DeltaNet-2 (2026, arXiv 2605.22791),
    `erase` up to 2 its reflections; `unit_values` is for memories that learn keys from values. [GATE-HEADS-D1]
    """

    kind: Literal["heads"] = "heads"
    erase: Head | None = None
    write: Head | None = None
    retain_value: Head | None = None
    value: Head | None = None
    lr: bool = Field(True, description="whether lr has its head; else it is the algorithm's lr")
    retain: bool = Field(True, description="whether retain has its head; else it is the retention's")
    unit_values: bool = Field(False, description="whether values are then brought to unit length")

    @property
    def plain(self) -> bool:  # type: ignore[override]
        """True if it has no heads and leaves values as they are; gates without a head keep a scan's defaults."""
        return self.value is None and not self.gates and not self.unit_values

    @property
    def replaces(self) -> tuple[str, ...]:
        return tuple([name for name in ("lr", "retain") if not getattr(self, name)])

    @property
    def channels(self) -> tuple[str, ...]:  # type: ignore[override]
        heads = {"erase": self.erase, "write": self.write}
        return tuple(name for name, head in heads.items() if head is not None and head.channels)

    @property
    def gates(self) -> tuple[str, ...]:
        return tuple(name for name in ("erase", "write", "retain_value") if getattr(self, name) is not None)

    @property
    def erases(self) -> float:
        return math.prod(head.top for head in (self.erase, self.write) if head is not None)

    def refusal(self, config: Any) -> str | None:
        if self.retain_value is not None and not self.retain_value.channels:
            return "retain_value is one gate per value channel; set retain_value.channels, or use retain"
        return None

    def _rows(self, sizes: Sizes) -> dict[str, tuple[Head, tuple[int, ...]]]:
        """Each head with the shape of a token's gates."""
        rows, key, value = {}, sizes.d_key, sizes.d_value
        for name, width in {"erase": key, "write": key, "retain_value": value, "value": value}.items():
            head: Head | None = getattr(self, name)
            if head is not None:
                times = (sizes.writes,) if sizes.writes > 1 and name != "retain_value" else ()
                rows[name] = head, (*times, sizes.heads, *((width,) if head.channels else ()))
        return rows

    def parts(self, sizes: Sizes) -> Parts:
        parts, draw = Parts(), partial(normal, std=0.02)
        for name, (head, rows) in self._rows(sizes).items():
            if head.rank is not None:
                parts[f"{name}.down"] = (head.rank, sizes.d_model), draw
            parts[f"{name}.weight"] = (*rows, sizes.d_model if head.rank is None else head.rank), draw
            if head.bias:
                parts[f"{name}.bias"] = rows, inverse_sigmoid(head.start)
        return parts

    def forward(self, params: Named, x: Tensor, inputs: Written, state: Named, masks: Masks) -> Gated:
        wide, gates = x.to(torch.promote_types(x.dtype, torch.float32)), dict(inputs.gates)
        v = inputs.v
        for name in ("erase", "write", "retain_value", "value"):
            head = getattr(self, name)
            if head is None:
                continue
            weight = params[f"{name}.weight"]
            inner = linear(wide, params[f"{name}.down"].to(wide.dtype)) if f"{name}.down" in params else wide
            logits = linear(inner, weight.flatten(0, -2).to(wide.dtype)).unflatten(-1, weight.shape[:-1])
            if f"{name}.bias" in params:
                logits = logits + params[f"{name}.bias"].to(wide.dtype)
            gate = head.top * torch.sigmoid(logits)
            if name == "value":
                v = v * (gate if head.channels else gate.unsqueeze(-1)).to(v.dtype)
            else:
                gates[name] = gate
        if self.unit_values:
            v = unit(v.to(wide.dtype), 1e-6).to(v.dtype)
        return inputs._replace(v=v, gates=gates), {}


# For other variants: heads, and starting values of parameters.


def normal(shape: tuple[int, ...], source: torch.Generator, std: float) -> Tensor:
    """N(0, std^2), drawn on the CPU whatever the default device is."""
    return std * torch.randn(shape, generator=source, dtype=torch.float64, device="cpu")


def inverse_sigmoid(share: float) -> float:
    """The number whose sigmoid is a share."""
    return math.log(share / (1 - share))


def inverse_softplus(value: float) -> float:
    """The number whose softplus is a positive one."""
    return value + math.log(-math.expm1(-value))


def head(params: Named, name: str, x: Tensor) -> Tensor:
    """W x + b in float32 or better."""
    wide = torch.promote_types(x.dtype, torch.float32)
    bias = params.get(f"{name}.bias")
    return linear(x.to(wide), params[f"{name}.weight"].to(wide), None if bias is None else bias.to(wide))


def rate_start(shape: tuple[int, ...], source: torch.Generator, low: float = 1e-3, high: float = 1e-1) -> Tensor:
    """b with softplus(b) log-uniform in [low, high], as Mamba starts its step."""
    draw = torch.rand(shape, generator=source, dtype=torch.float64, device="cpu")
    return torch.exp(math.log(low) + (math.log(high) - math.log(low)) * draw).expm1().log()


def spread(shape: tuple[int, ...], source: torch.Generator, low: float, high: float) -> Tensor:
    """log A with A uniform in [low, high], kept off zero."""
    draw = torch.rand(shape, generator=source, dtype=torch.float64, device="cpu")
    return (low + (high - low) * draw).clamp(min=1e-4).log()


def weight_start(sizes: Sizes) -> Start:
    """Starting values of weights that map x: N(0, 1/d_model)."""
    return partial(normal, std=sizes.d_model**-0.5)


def weights(sizes: Sizes) -> tuple[tuple[int, ...], Start]:
    """Parts of a linear map of x for each head, as `Gating.parts` gives them."""
    return (sizes.heads, sizes.d_model), weight_start(sizes)


rates = partial(spread, low=1.0, high=16.0)


def shrink(params: Named, name: str, x: Tensor) -> Tensor:
    """-A softplus(W x + b): the logarithm of a decay, A = exp of the parameter `name`.rate per head."""
    logits = head(params, name, x)
    return -params[f"{name}.rate"].to(logits.dtype).exp() * softplus(logits)
