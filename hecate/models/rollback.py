"""Taking back the last tokens of a layer, by keeping earlier states and the inputs since then.

A memory cannot undo a write, but its state is a value: the state before a call can be kept at no cost, and the call can
be repeated with fewer tokens. This needs no knowledge of a rule, and works for memories, levels, convolutions and
windows of attention alike. Neighbouring older calls are joined, so that few states are kept; about as many tokens are
run again as are taken back.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hecate.checks import expect_count
from hecate.errors import ConfigError
from hecate.states import State

WINDOW = 64
"""Tokens that can be taken back."""
Run = Callable[..., tuple[Any, Any]]
"""A layer: `(x, state, write_mask=, reset_mask=) -> (y, state)`."""


class _CallFields(NamedTuple):
    state: Any
    x: Tensor
    write_mask: Tensor | None
    reset_mask: Tensor | None


class RecordedCall(State, _CallFields):
    """A call of a layer.

    Fields:
        state: the state before it; None before the first token.
        x: the layer's inputs `[B, T, d_model]`.
        write_mask, reset_mask: the masks of the call, bool `[B, T]`, or None.
    """

    __slots__ = ()
    whole = (("write_mask", torch.bool), ("reset_mask", torch.bool))

    @property
    def tokens(self) -> int:
        """Number of tokens of the call."""
        return self.x.shape[1]

    @property
    def masks(self) -> dict[str, Tensor | None]:
        """The masks by name."""
        return {"write_mask": self.write_mask, "reset_mask": self.reset_mask}

    def part(self, start: int, end: int) -> RecordedCall:
        """The call with only the tokens `start .. end`; its state stays that before the whole call."""
        write, reset = (None if mask is None else mask[:, start:end] for mask in (self.write_mask, self.reset_mask))
        return RecordedCall(self.state, self.x[:, start:end], write, reset)


class _RecordedFields(NamedTuple):
    state: Any
    calls: tuple[RecordedCall, ...]


class Recorded(State, _RecordedFields):
    """A layer's state, and the calls with its last tokens, oldest first. [LM-BACK-D1]"""

    __slots__ = ()
    whole = ()

    @property
    def tokens(self) -> int:
        """Number of tokens that can be taken back."""
        return sum(call.tokens for call in self.calls)


def advance(
    run: Run, x: Tensor, past: Recorded, most: int = WINDOW, *, write_mask: Tensor | None, reset_mask: Tensor | None
) -> tuple[Tensor, Recorded]:
    """The layer's output `[B, T, d_model]`, and its state with at least the last `most` tokens recorded, if there are
    so many, and at most twice as many.

    A longer call is split in two, of which only the second, the last `most` tokens, is recorded.
    """
    call = RecordedCall(past.state, x, write_mask, reset_mask)
    edge = x.shape[1] - most
    if edge > 0:
        first, rest = call.part(0, edge), call.part(edge, x.shape[1])
        y, state = run(first.x, past.state, **first.masks)
        # A clone: a view of the inputs would keep all of them in memory.
        more, after = advance(run, rest.x.clone(), Recorded(state, ()), most, **rest.masks)
        return torch.cat([y, more], 1), after
    y, state = run(x, past.state, **call.masks)
    return y, Recorded(state, _shorten([*past.calls, call], most))


def check_recorded(past: Recorded, count: int) -> None:
    """Refuses to take more tokens back than are recorded."""
    expect_count(count, "tokens to take back", 0)
    if count > past.tokens:
        cure = "draft fewer at once, or keep the state ahead of them"
        raise ConfigError(f"{count} tokens are to be taken back, and {past.tokens} are recorded; {cure}")


def take_back(run: Run, past: Recorded, count: int) -> Recorded:
    """The state as it was `count` tokens ago, up to rounding; the tokens recorded before these can still be taken back.

    Raises:
        ConfigError: more tokens than are recorded.
    """
    check_recorded(past, count)
    state, calls = past.state, list(past.calls)
    while count:
        call = calls.pop()
        state = call.state
        if call.tokens > count:
            first = call.part(0, call.tokens - count)
            state = run(first.x, state, **first.masks)[1]
            calls.append(first)
        count -= min(count, call.tokens)
    return Recorded(state, tuple(calls))


def _shorten(calls: list[RecordedCall], most: int) -> tuple[RecordedCall, ...]:
    """The calls without those before the last `most` tokens. Two neighbours that together are no longer than all calls
    after them are joined, so that the number of states grows as the logarithm of the tokens."""
    after = [0, *accumulate(call.tokens for call in reversed(calls))]
    while len(calls) > 1 and after[len(calls) - 1] >= most:
        del calls[0]
    joined: list[RecordedCall] = []
    for index, call in enumerate(calls):
        if joined and joined[-1].tokens + call.tokens <= after[len(calls) - 1 - index]:
            joined[-1] = _join_calls(joined[-1], call)
        else:
            joined.append(call)
    return tuple(joined)


def _join_calls(first: RecordedCall, second: RecordedCall) -> RecordedCall:
    """Joins two consecutive calls into one."""

    def both(a: Tensor | None, b: Tensor | None, left_out: bool) -> Tensor | None:
        if a is None and b is None:
            return None
        pair = zip((a, b), (first, second), strict=True)
        full = (call.x.new_full(call.x.shape[:2], left_out, dtype=torch.bool) if m is None else m for m, call in pair)
        return torch.cat(list(full), 1)

    write = both(first.write_mask, second.write_mask, True)
    reset = both(first.reset_mask, second.reset_mask, False)
    return RecordedCall(first.state, torch.cat([first.x, second.x], 1), write, reset)
