"""Attention and a memory in one layer: the memory as gate, as layer, as context."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hecate.nn.arguments import check_sequence
from hecate.nn.compose.config import AttentionConfig
from hecate.nn.compose.gate import Gate
from hecate.nn.compose.segments import pieces_of, where_rows
from hecate.nn.compose.state import ComposedState, check_memory, check_rows, check_state
from hecate.nn.conv import ShortConv
from hecate.nn.sliding import SlidingAttention


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
        config = AttentionConfig.model_validate(AttentionConfig() if config is None else config)
        check_memory(config, d_model, memory)
        place: dict[str, Any] = {"device": device, "dtype": dtype}
        self.config, self.d_model, self.name = config, d_model, name
        self.attention = SlidingAttention(
            d_model,
            heads,
            window=config.segment if config.kind == "mac" else config.window,
            persistent=config.persistent,
            rotary=config.rotary,
            kv_heads=config.kv_heads,
            qk_norm=config.qk_norm,
            name=f"{name} (attention)",
            generator=generator,
            **place,
        )
        self.memory: Any = memory
        self.gate: Any = None
        if memory is not None:
            alone = config.kind == "mal"
            self.gate = Gate(config.combination, d_model, memory_alone=alone, **place)
            convs = [item for item in memory.modules() if isinstance(item, ShortConv)]
            self.reach = max((conv.kernel - 1 for conv in convs), default=0)

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draws every parameter anew from `generator`, the memory's too."""
        # The memory was drawn before the attention beside it was built.
        if self.memory is not None:
            self.gate.reset_parameters()
            self.memory.reset_parameters(generator)
        self.attention.reset_parameters(generator)

    def forward(
        self,
        x: Tensor,
        state: ComposedState | None = None,
        *,
        write_mask: Tensor | None = None,
        reset_mask: Tensor | None = None,
    ) -> tuple[Tensor, ComposedState]:
        """One pass over x `[B, T, d_model]` from a state; masks are bool `[B, T]`."""
        if not torch.compiler.is_compiling():
            check_sequence(self.attention.query.weight, x, write_mask=write_mask, reset_mask=reset_mask)
            check_state(self.config.kind, self.name, x, state)
        if self.config.kind == "mac":
            return self._context(x, state, write_mask, reset_mask)
        masks = {"write_mask": write_mask, "reset_mask": reset_mask}
        attention, memory = (None, None) if state is None else state[:2]
        if self.memory is None:
            y, attention = self.attention(x, attention, **masks)
            return y, ComposedState(attention)
        answer, memory = self.memory(x, memory, **masks)
        if self.config.kind == "mal":
            y, attention = self.attention(self.gate(x, answer), attention, **masks)
        else:
            y, attention = self.attention(x, attention, **masks)
            y = self.gate(y, answer)
        return y, ComposedState(attention, memory)

    def _context(
        self, x: Tensor, state: ComposedState | None, write_mask: Tensor | None, reset_mask: Tensor | None
    ) -> tuple[Tensor, ComposedState]:
        """Memory as context, over pieces in which every row stays within one segment."""
        fresh = self._fresh(x)
        state = fresh if state is None else state
        size: Any = self.config.segment
        ys = [x[:, :0]]
        for piece in pieces_of(state.place, x, write_mask, reset_mask, size):
            part = slice(piece.begin, piece.end)
            write = None if write_mask is None else write_mask[:, part]
            if piece.restarts and reset_mask is not None:
                state = where_rows(reset_mask[:, piece.begin], fresh, state)
            read, _ = self.memory(x[:, part], state.start, write_mask=_nowhere(x[:, part]))
            a, attention = self.attention(
                x[:, part], None if piece.aligned else state.attention, write_mask=write, beside=read
            )
            answer, memory = self.memory(a, state.memory, write_mask=write)
            ys.append(self.gate(a, answer))
            place = state.place + (a.shape[1] if write is None else write.sum(1))
            state = ComposedState(attention, memory, state.start, place)
            if piece.closes:
                begun = fresh._replace(memory=memory, start=self._emptied(x, memory))
                state = where_rows(place == size, begun, state)
        return torch.cat(ys, 1), state

    def _fresh(self, x: Tensor) -> ComposedState:
        """The state before any token."""
        none = x[:, :0]
        _, attention = self.attention(none, beside=none)
        _, memory = self.memory(none)
        place = torch.zeros(x.shape[0], dtype=torch.int64, device=x.device)
        check_rows(self.name, self.memory, memory, x.shape[0])
        return ComposedState(attention, memory, memory, place)

    def _emptied(self, x: Tensor, memory: Any) -> Any:
        """The memory as it is, its convolutions empty: what they held would reach into some of
        the segment's reads, and into others where the sequence is cut elsewhere.
        """
        if not self.reach:
            return memory
        none = x.new_zeros(x.shape[0], self.reach, self.d_model)
        return self.memory(none, memory, write_mask=_nowhere(none))[1]

    def extra_repr(self) -> str:
        """The kind."""
        return f"kind={self.config.kind}"


def _nowhere(x: Tensor) -> Tensor:
    """A mask under which nothing is written."""
    return torch.zeros(x.shape[:2], dtype=torch.bool, device=x.device)
