"""Softmax attention over the last tokens, with an explicit state and linear cost.

A query sees the slots behind it that its window reaches and its document holds (`slots.py`). Blocks of queries, each
with the slots that its window can reach, go through torch's attention in one call."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hecate.errors import ConfigError, ShapeError, shorten
from hecate.nn.arguments import check_sequence, check_sizes
from hecate.nn.conv import normalise_qk
from hecate.nn.parameters import blank, draw_normal, source_of
from hecate.nn.positions import rotated
from hecate.nn.slots import Blocks, Line, in_order, last, line_of
from hecate.rule import bytes_of, detached
from hecate.sizes import check_shapes, check_size

AttentionNorm = Literal["none", "rms"]


class SlidingState(NamedTuple):
    """What a `SlidingAttention` carries: a pytree of tensors. [ATT-SLIDE-I3]

    Fields:
        keys, values: of the last written tokens, `[B, N, R, G, D]`: N = window - 1 slots (without a
            window one per token), R inputs per token, G key heads; keys before rotation.
        present: whether a slot holds a token of the present document, `[B, N]` bool.
    """

    keys: Tensor
    values: Tensor
    present: Tensor

    def detach(self) -> SlidingState:
        """The same state cut off from the graph that produced it."""
        return detached(self)

    @property
    def bytes(self) -> int:
        """Size of all tensors; with a window it does not grow with the number of tokens seen."""
        return bytes_of(self)


class SlidingAttention(nn.Module):
    """Causal attention of width `window`: `(x [B, T, d_model], state=None) -> (y, state)`.

    y_t = W_out softmax(q_t . k_s / sqrt(D)) v_s over the `persistent` tokens and the written tokens s <= t of t's
    document, the last `window` of them. [ATT-SLIDE-D1]

    A masked token takes no place: it sees the tokens written before it, not itself, nobody sees it, and the state stays
    as it was. Where it sees nothing y is 0. The kernel is torch's.

    Args:
        d_model, heads: width of x and y, number of query heads of width D = d_model // heads.
        window: tokens that a token sees, itself included; None for all (T^2 cost, growing state).
        persistent: learned inputs p_1..p_n whose keys and values every token sees. They have no
            position, are not queries, and reach nothing but this attention.
        rotary: whether the first half of every head's channels is rotated by the position; the
            other half carries none, and by it alone persistent tokens are found.
        kv_heads: heads of keys and values, each shared by heads // kv_heads; None means `heads`.
        qk_norm: "rms" gives q and k unit root mean square and q a learned gain per head.
        name: what errors call this layer.
        generator: source of all draws; None uses torch's default generator.

    Cost: window + block - 1 keys per query in blocks of max(64, window / 2) queries. Without a window T (N + T)
    products after N tokens, and unless torch's causal kernel applies (no state, masks nor persistent tokens) a mask of
    that size.

    References: Beltagy et al., Longformer (2020), arXiv 2004.05150; persistent memory: Behrouz et al., Titans (2025),
    arXiv 2501.00663; rotation: Su et al. (2021), arXiv 2104.09864; shared heads: Ainslie et al. (2023), arXiv
    2305.13245.
    """

    def __init__(
        self,
        d_model: int,
        heads: int,
        *,
        window: int | None,
        persistent: int = 0,
        rotary: bool = True,
        kv_heads: int | None = None,
        qk_norm: AttentionNorm = "rms",
        name: str = "attention",
        generator: torch.Generator | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        kv_heads = heads if kv_heads is None else kv_heads
        check_sizes(d_model, heads, None, None, 0)
        self.d_model, self.heads, self.width = d_model, heads, d_model // heads
        self.window, self.persistent, self.rotary = window, persistent, rotary
        self.kv_heads, self.qk_norm, self.name = kv_heads, qk_norm, name
        self._check_options()
        place: dict[str, Any] = {"device": device, "dtype": dtype}
        self.query = blank(nn.Linear, d_model, d_model, bias=False, **place)
        self.key_value = blank(nn.Linear, d_model, 2 * kv_heads * self.width, bias=False, **place)
        self.out = blank(nn.Linear, d_model, d_model, bias=False, **place)
        self.tokens = None
        if persistent:
            self.tokens = nn.Parameter(torch.empty(persistent, d_model, **place))
        self.gain = nn.Parameter(torch.empty(heads, 1, **place)) if qk_norm == "rms" else None
        if self.out.weight.device.type != "meta":
            self.reset_parameters(generator)

    def _check_options(self) -> None:
        least = {"window": 1, "persistent": 0, "kv_heads": 1}
        for name, low in least.items():
            given = getattr(self, name)
            if given is None and name == "window":
                continue
            if type(given) is not int or given < low:
                raise ConfigError(f"{name} must be an integer >= {low}, got {shorten(given)}")
            check_size(given, name, "lower it")
        check_shapes({"tokens": (self.persistent, self.d_model)}, "lower persistent or d_model")
        if self.heads % self.kv_heads:
            reason = f"kv_heads={self.kv_heads} does not divide heads={self.heads}"
            raise ConfigError(reason, ("kv_heads",))
        if self.qk_norm not in get_args(AttentionNorm):
            raise ConfigError(f"qk_norm must be one of {get_args(AttentionNorm)}, got {shorten(self.qk_norm)}")
        if self.rotary and self.width % 4:
            raise ConfigError(
                f"rotary=True turns half of a head's channels in pairs: d_model={self.d_model} "
                f"over heads={self.heads} must be divisible by 4, got {self.width}; change one of "
                "them or set rotary=False"
            )

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draws every parameter anew from `generator` (None: torch's default generator)."""
        source = source_of(generator)
        for linear in (self.query, self.key_value, self.out):
            draw_normal(linear.weight, self.d_model**-0.5, source)
        if self.tokens is not None:
            draw_normal(self.tokens, 1.0, source)
        if self.gain is not None:
            nn.init.ones_(self.gain)

    def forward(
        self,
        x: Tensor,
        state: SlidingState | None = None,
        *,
        write_mask: Tensor | None = None,
        reset_mask: Tensor | None = None,
        beside: Tensor | None = None,
    ) -> tuple[Tensor, SlidingState]:
        """One pass over x `[B, T, d_model]` from a state; masks are bool `[B, T]`.

        `beside` `[B, T, d_model]` gives each token a second input, seen wherever the token is.
        """
        if not torch.compiler.is_compiling():
            check_sequence(self.query.weight, x, write_mask=write_mask, reset_mask=reset_mask)
            self._check(x, state, beside)
        inputs = x.unsqueeze(2) if beside is None else torch.stack([beside, x], 2)
        k, v = self._keys_values(inputs)
        q = self.query(x).unflatten(-1, (self.heads, self.width))
        if self.gain is not None:
            q = normalise_qk(q, "rms") * self.gain.to(q.dtype)
        if write_mask is not None:  # never seen; zero, so that equal tokens leave equal states
            k, v = (torch.where(write_mask[..., None, None, None], part, 0.0) for part in (k, v))
        line = line_of(None if state is None else state.present, x, write_mask, reset_mask)
        if state is not None:
            k = torch.cat([state.keys.to(k.dtype), k], 1)
            v = torch.cat([state.values.to(v.dtype), v], 1)
        k, v = in_order(line, k), in_order(line, v)
        plain = state is None and write_mask is None and reset_mask is None
        if q.numel():
            y = self._attend(q, k, v, line, plain)
        else:  # of no tokens every parameter has the gradient 0
            unread = (k, v) if self.tokens is None else (k, v, self.tokens)
            y = q + sum(part.sum().to(q.dtype) for part in unread)
        return self.out(y.flatten(-2)), self._carried(k, v, line, state)

    def _keys_values(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values `[..., G, D]` of inputs `[..., d_model]`."""
        k, v = self.key_value(x).unflatten(-1, (2, self.kv_heads, self.width)).unbind(-3)
        return (k if self.gain is None else normalise_qk(k, "rms")), v

    def _carried(self, k: Tensor, v: Tensor, line: Line, before: SlidingState | None) -> SlidingState:
        count = None if self.window is None else self.window - 1
        if line.own.shape[1]:
            present = (line.document == line.own[:, -1:]).expand(k.shape[0], -1)
        elif before is not None:
            present = before.present.clone()
        else:
            present = k.new_zeros(k.shape[:2], dtype=torch.bool)
        return SlidingState(last(k, count), last(v, count), last(present, count))

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, line: Line, plain: bool) -> Tensor:
        """Answers `[B, T, H, D]` to queries from the slots of a line, `[B, N, R, G, D]`."""
        if self.rotary:
            place = torch.arange(k.shape[1], device=k.device)
            q, k = rotated(q, line.rank.unsqueeze(-1)), rotated(k, place[:, None, None])
        blocks = Blocks(line, self.window)
        # All blocks of all sequences are one batch; a slot's inputs are neighbours.
        k, v = (blocks.slots(part).flatten(0, 1).flatten(1, 2) for part in (k, v))
        inputs, mask, blind = k.shape[1] // blocks.reach, None, None
        causal = plain and blocks.reaches_all and inputs == 1 and not self.persistent
        if not causal:
            seen = blocks.visible()
            rows = 1 if seen.shape[:2] == (1, 1) else q.shape[0]
            mask = seen.expand(rows, -1, -1, -1).flatten(0, 1)
            mask = F.pad(mask.repeat_interleave(inputs, -1), (self.persistent, 0), value=True)
            blind = ~mask.any(-1, keepdim=True)  # a softmax over nothing has no value
            mask, blind = (mask | blind).unsqueeze(1), blind.unsqueeze(1)
        if self.tokens is not None:
            k, v = self._with_persistent(self.tokens, k, v)
        y = F.scaled_dot_product_attention(
            blocks.queries(q).flatten(0, 1).transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            attn_mask=mask,
            is_causal=causal,
            enable_gqa=self.kv_heads != self.heads,
        )
        if blind is not None:
            y = torch.where(blind, 0.0, y)
        return y.transpose(1, 2).unflatten(0, (q.shape[0], -1)).flatten(1, 2)[:, : q.shape[1]]

    def _with_persistent(self, tokens: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values `[M, N, G, D]` with those of the persistent tokens ahead of them."""
        own_k, own_v = self._keys_values(tokens)
        if self.rotary:  # the rotated half would make the answer depend on where counting began
            own_k = F.pad(own_k[..., self.width // 2 :], (self.width // 2, 0))
        own_k, own_v = (part.expand(k.shape[0], -1, -1, -1) for part in (own_k, own_v))
        return torch.cat([own_k.to(k.dtype), k], 1), torch.cat([own_v.to(v.dtype), v], 1)

    def _check(self, x: Tensor, state: SlidingState | None, beside: Tensor | None) -> None:
        if beside is not None and beside.shape != x.shape:
            raise ShapeError(f"{self.name}: beside must be {list(x.shape)} like x, got {list(beside.shape)}")
        if state is None:
            return
        if not isinstance(state, SlidingState):
            raise ShapeError(
                f"{self.name}: state must be the SlidingState that this layer returned, got {type(state).__name__}"
            )
        slots = state.present.shape[-1] if self.window is None else self.window - 1
        shape = (x.shape[0], slots, 1 if beside is None else 2, self.kv_heads, self.width)
        for field, expected in (("keys", shape), ("values", shape), ("present", shape[:2])):
            given = tuple(getattr(state, field).shape)
            if given != expected:
                raise ShapeError(
                    f"{self.name}: state.{field} must be {list(expected)} for this layer and "
                    f"{x.shape[0]} sequences, got {list(given)}; was it made by another layer or "
                    "with another batch?"
                )

    def extra_repr(self) -> str:
        """The sizes."""
        return (
            f"{self.d_model}, heads={self.heads}, kv_heads={self.kv_heads}, window={self.window}, "
            f"persistent={self.persistent}, rotary={self.rotary}, qk_norm={self.qk_norm}"
        )
