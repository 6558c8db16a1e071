"""Attention and a memory in one layer: the memory as context, as gate, as layer (MAC, MAG, MAL)."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from hecate.checks import Size, Taps, named
from hecate.distributed.context import Shares
from hecate.engine import written_before
from hecate.errors import ConfigError, ShapeError, shorten
from hecate.nn.arguments import Mask, check_sequence, check_type
from hecate.nn.blocks import rms_norm
from hecate.nn.conv import ShortConv
from hecate.nn.memory import where_rows
from hecate.nn.sliding import AttentionNorm, SlidingAttention, SlidingState
from hecate.states import State
from hecate.tape import can_inspect
from hecate.variant import Config, Conflicts

Combination = Literal["multiply", "add", "paper"]


class AttentionConfig(Config):
    """Config of a layer made of attention and memory.

    Fields:
        kind: "mag" gates attention by the memory, "mal" attends to the memory's answers, "mac"
            attends within segments to what the memory said at their start, "attention" leaves the memory out.
        window: tokens that a token sees, itself included; None for all. Not for mac.
        segment: tokens of a segment; mac needs it, nothing else has it.
        persistent, rotary, kv_heads, qk_norm, conv_kernel, output_gate: as in `SlidingAttention`; mac, whose attention
            reads the memory's answers beside the tokens, has no convolution.
        gate: how two vectors become one, see `Gate`; None for multiply (mag, mac) or add (mal).
    """

    kind: Literal["mac", "mag", "mal", "attention"] = "mag"
    window: Size | None = Field(None, ge=1)
    segment: Size | None = Field(None, ge=1)
    persistent: Size = Field(0, ge=0)
    rotary: bool = True
    kv_heads: Size | None = Field(None, ge=1)
    qk_norm: AttentionNorm = "rms"
    conv_kernel: Taps = 0
    output_gate: bool = False
    gate: Combination | None = None

    def conflicts(self) -> Conflicts:
        """Settings of mac with other kinds, and of others with mac."""
        if self.by_segment and self.window is not None:
            reason = f"kind 'mac' attends within segment={self.segment}, which takes the window's place"
            yield ("window",), f"is {self.window}, but {reason}; leave window out, or choose kind 'mag' or 'mal'"
        if self.by_segment and self.segment is None:
            reason = "the tokens of a segment, at whose start the memory is asked"
            yield ("segment",), f"is None, but kind 'mac' needs it: {reason}"
        if self.segment is not None and not self.by_segment:
            reason = f"only kind 'mac' has segments, not {self.kind!r}"
            yield ("segment",), f"is {self.segment}, but {reason}; set window instead"
        if self.by_segment and self.conv_kernel:
            reason = "kind 'mac' attends to the memory's answers beside the tokens, which are no sequence of neighbours"
            cure = "leave it out, or choose kind 'mag', 'mal' or 'attention'"
            yield ("conv_kernel",), f"is {self.conv_kernel}, but {reason}; {cure}"
        if self.gate is not None and not self.has_memory:
            yield ("gate",), f"is {self.gate!r}, but kind 'attention' has no memory to gate with; leave it out"

    @property
    def has_memory(self) -> bool:
        """True if there is a memory beside the attention."""
        return self.kind != "attention"

    @property
    def by_segment(self) -> bool:
        """True if attention ends at segments, at whose start the memory is asked."""
        return self.kind == "mac"

    @property
    def memory_first(self) -> bool:
        """True if attention sees the memory's answers."""
        return self.kind == "mal"


class Gate(nn.Module):
    """One vector from a carrier c and a memory's answer m, with learned weights w. [ATT-GATE-D1]

    multiply: c * (1 + tanh(w * m)); add: c + w * m. Both leave c whole where the memory answers 0.
    paper: rms(c) w_c * sigmoid(rms(m) w_m), which then halves it; for mal m alone.
    """

    def __init__(self, combination: Combination, d_model: int, *, memory_alone: bool, **place: Any) -> None:
        super().__init__()
        self.kind = "memory" if combination == "paper" and memory_alone else combination
        count = {"multiply": 1, "add": 1, "paper": 2, "memory": 0}[self.kind]
        self.weight = nn.Parameter(torch.ones(count, d_model, **place)) if count else None

    def reset_parameters(self) -> None:
        """Weights to one; draws nothing."""
        if self.weight is not None:
            nn.init.ones_(self.weight)

    def forward(self, carrier: Tensor, answer: Tensor) -> Tensor:
        """Both `[..., d_model]`."""
        if self.weight is None:
            return answer
        weight = self.weight.to(carrier.dtype)
        if self.kind == "paper":
            return rms_norm(carrier, weight[0]) * torch.sigmoid(rms_norm(answer, self.weight[1].to(answer.dtype)))
        if self.kind == "add":
            return carrier + weight[0] * answer
        return carrier * (1 + torch.tanh(weight[0] * answer))

    def extra_repr(self) -> str:
        """The kind."""
        return self.kind


class _ComposedFields(NamedTuple):
    attention: SlidingState
    memory: Any = None
    start: Any = None
    place: Any = None


class ComposedState(State, _ComposedFields):
    """State of a `Composed` layer: a pytree of tensors. [ATT-COMP-I1]

    Fields:
        attention: of the attention.
        memory: of the memory layer; None without one.
        start: mac only: the memory's state where the present segment began.
        place: mac only: tokens written in the present segment, `[B]` int64.
    """

    __slots__ = ()
    whole = (("place", torch.int64),)


@named(*AttentionConfig.model_fields)
class Composed(nn.Module):
    """Attention composed with a memory layer: `(x [B, T, d_model], state=None) -> (y, state)`.

    With o = Gate(carrier, answer), M the memory layer and A the attention:

    - mag: y = Gate(A(x), M(x)). [ATT-MAG-D1]
    - mal: y = A(Gate(x, M(x))). [ATT-MAG-D1]
    - mac: per segment, h_t = M read with x_t as M was at the segment's start;
      a_t = A(x_t over persistent tokens, h_s and x_s, s <= t in the segment);
      y_t = Gate(a_t, M(a_t)), where M(a_t) writes and reads. [ATT-MAC-D1]
    - attention: y = A(x).

    The memory is any layer with the call of `nn.Memory`. For mac its state must be a pytree whose tensors have a row
    per sequence, and a masked token must be read and leave the memory alone: that is how h is read. Segments begin with
    their document and count written tokens.

    Args:
        d_model, heads: width, and heads of the attention.
        config: an `AttentionConfig` or its fields.
        memory: the memory layer, already drawn; None for kind "attention".
        name: what errors call this layer.
        generator: source of the attention's draws; None uses torch's default generator.

    Cost: attention (`SlidingAttention`) plus memory; for mac the memory is called twice per segment, one segment after
    another, and its places are read back to the host.

    References: Behrouz et al., Titans (2025), arXiv 2501.00663, section 4.
    """

    def __init__(
        self,
        d_model: int,
        heads: int,
        config: AttentionConfig | None = None,
        memory: nn.Module | None = None,
        *,
        name: str = "composed",
        generator: torch.Generator | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        config = AttentionConfig.model_validate({} if config is None else config)
        if memory is not None and not config.has_memory:
            cure = "choose kind 'mag', 'mal' or 'mac', or leave it out"
            raise ConfigError(f"kind 'attention' has no memory, got a {type(memory).__name__}; {cure}")
        if config.has_memory and not isinstance(memory, nn.Module):
            cure = "give one, or choose kind 'attention'"
            raise ConfigError(f"kind {config.kind!r} needs a memory layer, got {shorten(memory)}; {cure}")
        width = getattr(memory, "d_model", d_model)
        if width != d_model:
            raise ConfigError(f"d_model={d_model}, but the memory layer's d_model is {width}")
        place: dict[str, Any] = {"device": device, "dtype": dtype}
        self.config, self.d_model, self.name = config, d_model, name
        options = config.model_dump(exclude={"kind", "segment", "gate"})
        options |= {"window": config.segment if config.by_segment else config.window, "name": f"{name} (attention)"}
        self.attention = SlidingAttention(d_model, heads, generator=generator, **options, **place)
        self.memory: Any = memory
        self.gate: Any = None
        if memory is not None:
            combination = config.gate or ("add" if config.memory_first else "multiply")
            self.gate = Gate(combination, d_model, memory_alone=config.memory_first, **place)
            self.reach = max((conv.kernel - 1 for conv in memory.modules() if isinstance(conv, ShortConv)), default=0)

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draws every parameter anew from `generator`, the memory's too."""
        # The memory was drawn before the attention beside it was built.
        if self.memory is not None:
            self.gate.reset_parameters()
            self.memory.reset_parameters(generator)
        self.attention.reset_parameters(generator)

    def forward(
        self, x: Tensor, state: ComposedState | None = None, *, write_mask: Mask = None, reset_mask: Mask = None
    ) -> tuple[Tensor, ComposedState]:
        """One pass over x `[B, T, d_model]` from a state; masks are bool `[B, T]`."""
        masks = {"write_mask": write_mask, "reset_mask": reset_mask}
        check_sequence(self.attention.query.weight, x, **masks)
        self._check_state(x, state)
        if self.config.by_segment:
            return self._by_segment(x, state, **masks)
        attention, memory = (None, None) if state is None else state[:2]
        if self.memory is None:
            y, attention = self.attention(x, attention, **masks)
            return y, ComposedState(attention)
        # mal puts the memory ahead of the attention, mag beside it.
        answer, memory = self.memory(x, memory, **masks)
        if self.config.memory_first:
            y, attention = self.attention(self.gate(x, answer), attention, **masks)
        else:
            y, attention = self.attention(x, attention, **masks)
            y = self.gate(y, answer)
        return y, ComposedState(attention, memory)

    @property
    def shares(self) -> Shares:
        """Mode of context parallelism: segments follow one another, so ranks take turns."""
        return "turns" if self.config.by_segment else "layers"

    def _by_segment(
        self, x: Tensor, state: ComposedState | None, write_mask: Mask, reset_mask: Mask
    ) -> tuple[Tensor, ComposedState]:
        """Memory as context, over spans in which every sequence stays within one segment."""
        fresh = self._fresh(x)
        state = fresh if state is None else state
        start = state.start
        size: Any = self.config.segment
        ys, nowhere = [x[:, :0]], torch.zeros(x.shape[:2], dtype=torch.bool, device=x.device)
        for span, restarts, closes, aligned in spans_of(state.place, x.shape[1], write_mask, reset_mask, size):
            tokens, write = x[:, span], None if write_mask is None else write_mask[:, span]
            if restarts and reset_mask is not None:
                state = where_rows(reset_mask[:, span.start], fresh, state)
            # h: masked everywhere, so that the memory answers and is not written.
            read, _ = self.memory(tokens, state.start, write_mask=nowhere[:, span])
            a, attention = self.attention(tokens, None if aligned else state.attention, write_mask=write, beside=read)
            # M(a) writes what attention made of the segment, and reads it.
            answer, memory = self.memory(a, state.memory, write_mask=write)
            ys.append(self.gate(a, answer))
            place = state.place + (a.shape[1] if write is None else write.sum(1))
            state = ComposedState(attention, memory, state.start, place)
            if closes:
                start = memory
                if self.reach:  # zeros flush a convolution's state, which reads would see, depending on where x is cut
                    none = x.new_zeros(x.shape[0], self.reach, self.d_model)
                    _, start = self.memory(none, memory, write_mask=torch.zeros_like(none[..., 0], dtype=torch.bool))
                # Attention ends with its segment: the next one sees none of its cache.
                begun = fresh._replace(memory=memory, start=start)
                state = where_rows(place == size, begun, state)
        if state.start is start:  # the segment goes on; a copy, as no result may be an input
            state = state._replace(start=pytree.tree_map_only(Tensor, torch.clone, start))
        return torch.cat(ys, 1), state

    def _fresh(self, x: Tensor) -> ComposedState:
        """The state before the first token; refuses a memory whose state cannot be split by sequences."""
        none = x[:, :0]
        _, attention = self.attention(none, beside=none)
        _, memory = self.memory(none)
        place = torch.zeros(x.shape[0], dtype=torch.int64, device=x.device)
        for leaf in pytree.tree_leaves(memory):
            shape = list(leaf.shape) if isinstance(leaf, Tensor) else shorten(leaf)
            if leaf is not None and (not isinstance(shape, list) or shape[:1] != [len(x)]):
                raise ShapeError(
                    f"{self.name}: kind 'mac' begins segments row by row, so every tensor of the memory's state must "
                    f"have {len(x)} rows, one per sequence; that of {type(self.memory).__name__} holds {shape}"
                )
        return ComposedState(attention, memory, memory, place)

    def _check_state(self, x: Tensor, state: ComposedState | None) -> None:
        if not check_type(state, ComposedState, self.name):
            return
        segments = self.config.by_segment
        for field, needed in {"memory": self.config.has_memory, "start": segments, "place": segments}.items():
            if (getattr(state, field) is not None) != needed:
                raise ShapeError(
                    f"{self.name}: state.{field} must {'not ' if needed else ''}be None for kind "
                    f"{self.config.kind!r}; was it made by another layer?"
                )
        if segments and state.place.shape != x.shape[:1]:
            raise ShapeError(
                f"{self.name}: state.place must be {list(x.shape[:1])}, got {list(state.place.shape)}; was it made "
                "with another batch?"
            )

    def extra_repr(self) -> str:
        """The kind."""
        return f"kind={self.config.kind}"


def spans_of(
    place: Tensor, length: int, write: Mask, reset: Mask, size: int
) -> Iterator[tuple[slice, bool, bool, bool]]:
    """Spans of `length` tokens, cut wherever some sequence begins a segment or document; `place` `[B]` tokens of the
    present segment have gone before.

    With each: whether some sequence begins a document, some completes a segment, all are at the beginning of one."""
    if place.is_meta:  # no values to read: whole segments
        yield from (
            (slice(at, min(at + size, length)), False, at + size <= length, True) for at in range(0, length, size)
        )
        return
    if length == 0:  # one span of none, in which every parameter has the gradient 0
        yield slice(0, 0), False, False, False
        return
    # Place of each token in its segment, [B, T], masked tokens at that of the next one written.
    within = written_before(place, write, reset, length) % size
    closing = within == size - 1 if write is None else write & (within == size - 1)
    flags = [torch.zeros_like(closing) if reset is None else reset, closing]
    if not (torch.compiler.is_compiling() or can_inspect(*flags)):  # within vmap: each token is a span of its own
        yield from ((slice(t, t + 1), reset is not None, True, False) for t in range(length))
        return
    restarts, closes, aligned = torch.stack([*(flag.any(0) for flag in flags), (within == 0).all(0)]).tolist()
    # A span ends wherever any sequence of the batch begins a segment: all rows are cut together.
    cuts = {0, length} | {t for t, restart in enumerate(restarts) if restart}
    cuts |= {t + 1 for t, close in enumerate(closes) if close}
    for at, end in pairwise(sorted(cuts)):
        yield slice(at, end), restarts[at], closes[end - 1], aligned[at]
