"""Softmax attention over the last tokens, with an explicit state and linear cost.

A query sees the earlier cache entries that lie in its window and belong to its document. Queries are cut into chunks,
and all chunks, each with the entries that its windows can reach, go through torch's attention in one call."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, ClassVar, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import _pytree as pytree

from hecate.checks import check_shapes, check_size, expect_choice, expect_count, named
from hecate.distributed.context import Context, Shares
from hecate.errors import ConfigError, ShapeError
from hecate.nn.arguments import Mask, check_length, check_sequence, check_sizes, check_state, check_type
from hecate.nn.blocks import readout
from hecate.nn.conv import ShortConv, convolved, normalise_qk
from hecate.nn.parameters import blank, draw_normal, redraw, source_of
from hecate.nn.positions import rotated
from hecate.nn.rule import between
from hecate.states import State
from hecate.tape import steady
from hecate.tape.exact import MOST

AttentionNorm = Literal["none", "rms"]


class _SlidingFields(NamedTuple):
    keys: Tensor
    values: Tensor
    present: Tensor
    conv: Tensor | None = None
    conv_segment: Tensor | None = None


class SlidingState(State, _SlidingFields):
    """State of a `SlidingAttention`: a pytree of tensors. [ATT-SLIDE-I3]

    Fields:
        keys, values: of the last written tokens, `[B, N, R, G, D]`: N = window - 1 entries (without a
            window one per token), R inputs per token, G key heads; keys before rotation.
        present: whether an entry is a token of the present document, `[B, N]` bool.
        conv: the last inputs of the convolution, `[B, kernel-1, C]`; None without one.
        conv_segment: the documents that they are of, `[B, kernel-1]` int64; None before any reset mask.
    """

    __slots__ = ()
    whole = (("present", torch.bool), ("conv_segment", torch.int64))


@named()
class SlidingAttention(nn.Module):
    """Causal attention of width `window`: `(x [B, T, d_model], state=None) -> (y, state)`.

    y_t = W_out softmax(q_t . k_s / sqrt(D)) v_s over the `persistent` tokens and the written tokens s <= t of t's
    document, the last `window` of them. [ATT-SLIDE-D1] q, k, v = Linear(x), with `conv_kernel` the short convolution of
    these; with `output_gate` each head's answer is normalised and multiplied by silu(W x) before W_out.

    A masked token has no entry: it sees the tokens written before it, not itself, no token sees it, and the state stays
    as it was. Where it sees nothing y is 0. In the convolution it counts as zero for the tokens after it, and takes up
    a tap, as in `Memory`. The kernel is torch's: second derivatives need
    `torch.nn.attention.sdpa_kernel(SDPBackend.MATH)`, as its other kernels have none.

    Args:
        d_model, heads: width of x and y, number of query heads of width D = d_model // heads.
        window: tokens that a token sees, itself included; None for all (T^2 cost, growing state).
        persistent: learned inputs p_1..p_n whose keys and values every token sees. They have no
            position, are not queries, and reach nothing but this attention.
        rotary: whether the first half of every head's channels is rotated by the position; the
            other half carries none, and by it alone persistent tokens are found.
        kv_heads: heads of keys and values, each shared by heads // kv_heads; None means `heads`.
        qk_norm: "rms" gives q and k unit root mean square and q a learned gain per head.
        conv_kernel: taps of a causal convolution with SiLU over q, k and v, as memories have one; 0 for none. The
            inputs `persistent` have no neighbours and pass it by.
        output_gate: whether the answers are normalised head by head and gated, as those of memories are.
        name: what errors call this layer.
        generator: source of all draws; None uses torch's default generator.

    Cost: window + chunk - 1 keys per query in chunks of max(64, window / 2) queries. Without a window T (N + T)
    products after N tokens, and unless torch's causal kernel applies (no state, masks nor persistent tokens) a mask of
    that size.

    References: Beltagy et al., Longformer (2020), arXiv 2004.05150; persistent memory: Behrouz et al., Titans (2025),
    arXiv 2501.00663; rotation: Su et al. (2021), arXiv 2104.09864; shared heads: Ainslie et al. (2023), arXiv
    2305.13245.
    """

    shares: ClassVar[Shares] = "itself"
    context: Context | None = None  # the ranks that hold the other pieces of its sequences

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
        conv_kernel: int = 0,
        output_gate: bool = False,
        name: str = "attention",
        generator: torch.Generator | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        kv_heads = heads if kv_heads is None else kv_heads
        check_sizes(d_model, heads, None, None, conv_kernel)
        self.d_model, self.heads, self.width = d_model, heads, d_model // heads
        self.window, self.persistent, self.rotary = window, persistent, rotary
        self.kv_heads, self.qk_norm, self.name = kv_heads, qk_norm, name
        sizes: dict[str, Any] = {"window": window, "persistent": persistent, "kv_heads": kv_heads}
        for what, size in sizes.items():
            if size is not None or what != "window":
                expect_count(size, what, 0 if what == "persistent" else 1)
                check_size(size, what, "lower it")
        check_shapes({"tokens": (persistent, d_model)}, "lower persistent or d_model")
        if heads % kv_heads:
            raise ConfigError(f"kv_heads={kv_heads} does not divide heads={heads}", ("kv_heads",))
        expect_choice(qk_norm, "qk_norm", get_args(AttentionNorm))
        if rotary and self.width % 4:
            raise ConfigError(
                f"rotary=True turns half of a head's channels in pairs: d_model={d_model} over heads={heads} must be "
                f"divisible by 4, got {self.width}; change one of them or set rotary=False"
            )
        place: dict[str, Any] = {"device": device, "dtype": dtype}
        self.query = blank(nn.Linear, d_model, d_model, bias=False, **place)
        self.key_value = blank(nn.Linear, d_model, 2 * kv_heads * self.width, bias=False, **place)
        self.out = blank(nn.Linear, d_model, d_model, bias=False, **place)
        self.tokens = nn.Parameter(torch.empty(persistent, d_model, **place)) if persistent else None
        self.gain = nn.Parameter(torch.empty(heads, 1, **place)) if qk_norm == "rms" else None
        self.splits = d_model, 2 * kv_heads * self.width
        self.conv = ShortConv(sum(self.splits), conv_kernel, **place) if conv_kernel else None
        self.output_gate = blank(nn.Linear, d_model, d_model, bias=False, **place) if output_gate else None
        self.norm = nn.Parameter(torch.empty(heads, self.width, **place)) if output_gate else None
        if self.out.weight.device.type != "meta":
            self.reset_parameters(generator)

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draws every parameter anew from `generator` (None: torch's default generator)."""
        source = source_of(generator)
        redraw(source, self.query, self.key_value, self.out, self.output_gate)
        if self.tokens is not None:
            draw_normal(self.tokens, 1.0, source)
        redraw(source, self.conv)
        for ones in (self.gain, self.norm):
            if ones is not None:
                nn.init.ones_(ones)

    def forward(
        self,
        x: Tensor,
        state: SlidingState | None = None,
        *,
        write_mask: Mask = None,
        reset_mask: Mask = None,
        beside: Tensor | None = None,
    ) -> tuple[Tensor, SlidingState]:
        """One pass over x `[B, T, d_model]` from a state; masks are bool `[B, T]`.

        `beside` `[B, T, d_model]` gives each token a second input, seen wherever the token is.
        """
        check_sequence(self.query.weight, x, write_mask=write_mask, reset_mask=reset_mask)
        check_length(x, f"attention of {self.name}")
        if beside is not None and beside.shape != x.shape:
            raise ShapeError(f"{self.name}: beside must be {list(x.shape)} like x, got {list(beside.shape)}")
        if beside is not None and self.conv is not None:
            raise ConfigError(
                f"{self.name}: conv_kernel={self.conv.kernel} mixes neighbours in one sequence, and beside is a second "
                "one; leave conv_kernel out, or give no beside",
                path=("conv_kernel",),
            )
        if check_type(state, SlidingState, self.name):
            count = state.present.shape[-1] if self.window is None else self.window - 1
            shape = (x.shape[0], count, 1 if beside is None else 2, self.kv_heads, self.width)
            tensors: dict[str, Any] = {"keys": (state.keys, shape), "values": (state.values, shape)}
            check_state(state, x, {**tensors, "present": (state.present, shape[:2])}, self.conv, self.name)
        q, k, v, conv = self._project(x, beside, state, write_mask, reset_mask)
        if write_mask is not None:  # never seen; zero, so that the state does not depend on it
            k, v = (torch.where(write_mask[..., None, None, None], part, 0.0) for part in (k, v))
        tokens: dict[str, Any] = {"x": x, "k": k, "v": v, "write_mask": write_mask, "reset_mask": reset_mask}
        y, after = (self._one_by_one if steady() else self._at_once)(q, tokens, state)
        gate = None if self.output_gate is None else self.output_gate(x)
        y = self.out(y.flatten(-2) if self.norm is None else readout(y, self.norm, gate))
        return y, after._replace(conv=conv[0], conv_segment=conv[1])

    def _at_once(self, q: Tensor, tokens: dict[str, Any], state: SlidingState | None) -> tuple[Tensor, SlidingState]:
        """Answers `[B, T, H, D]` to queries, and the state after the tokens, which are arguments of `_enter`."""
        if self.context is None:
            (k, v, entries), after = self._enter(**tokens, state=state)
        else:  # handed on before anybody attends
            (k, v, entries), after, anchor = self.context.relay(
                lambda state: self._enter(**tokens, state=state),
                state,
                lambda: self._enter(**between(tokens, 0, 0), state=None)[1],
            )
            k, after = k + anchor, self.context.final(after, alike=self.window is not None)
        if q.numel():
            return self._attend(q, k, v, entries), after
        unread = (k, v) if self.tokens is None else (k, v, self.tokens)  # every parameter has the gradient 0
        return q + sum(part.sum().to(q.dtype) for part in unread), after

    def _one_by_one(self, q: Tensor, tokens: dict[str, Any], state: SlidingState | None) -> tuple[Tensor, SlidingState]:
        """`_at_once` with each token as a batch row, with the entries before it, the same number for all.
        [TAPE-EXACT-D1]"""
        masked = tokens["write_mask"] is not None or tokens["reset_mask"] is not None
        if self.context is not None:
            raise ConfigError(f"{self.name}: exact, and ranks that share a sequence cut it: leave one of them out")
        if self.window is None and masked:
            raise ConfigError(
                f"{self.name}: exact and window=None: padding and documents move the places that tokens are turned by; "
                "give the attention a window, rows of one length and document, or leave exact out"
            )
        (batch, length), (_, state) = q.shape[:2], self._enter(**between(tokens, 0, 0), state=state)
        size, answers = 1, [q[:, :0]]  # masks move entries, and without a window every token has more of them
        if self.window is not None and not masked:
            # Each token has its own copy of its window's entries: as many tokens at once as MOST allows.
            size = max(1, MOST // (batch * self.window * self.d_model))
        for at in range(0, length, size):
            some = between(tokens, at, at + size)
            # [B, T, ...] to [B T, 1, ...]: each token a sequence of one, with the entries that it would have met.
            rows = pytree.tree_map_only(Tensor, lambda part: part.flatten(0, 1).unsqueeze(1), some)
            query = q[:, at : at + size].flatten(0, 1).unsqueeze(1)
            present = torch.ones_like(some["k"][:, :, 0, 0, 0], dtype=torch.bool)
            pairs = zip(state[:3], (some["k"], some["v"], present), strict=True)
            places = state.present.shape[1]
            ahead = (torch.cat(pair, 1).unfold(1, places, 1)[:, :-1].movedim(-1, 2).flatten(0, 1) for pair in pairs)
            entries, _ = self._enter(**rows, state=SlidingState(*ahead))
            answers.append(self._attend(query, *entries).view(batch, -1, *q.shape[2:]))
            state = self._enter(**some, state=state)[1]
        return torch.cat(answers, 1), state

    def _project(
        self, x: Tensor, beside: Tensor | None, state: SlidingState | None, write: Mask, reset: Mask
    ) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor | None, Tensor | None]]:
        """Queries `[B, T, H, D]`, keys and values `[B, T, R, G, D]`, and the convolution's part of the next state."""
        after: tuple[Tensor | None, Tensor | None] = None, None
        if self.conv is None:
            q, kv = self.query(x), self.key_value(x.unsqueeze(2) if beside is None else torch.stack([beside, x], 2))
        else:
            mixed = torch.cat([self.query(x), self.key_value(x)], -1)
            mixed, inputs, segment = convolved(self.conv, mixed, state, write, reset, self.context)
            after = (inputs, segment) if self.context is None else self.context.final((inputs, segment))
            q, kv = mixed.split(self.splits, -1)
            kv = kv.unsqueeze(2)
        q = q.unflatten(-1, (self.heads, self.width))
        if self.gain is not None:
            q = normalise_qk(q, "rms") * self.gain.to(q.dtype)
        return q, *self._keys_values(kv), after

    def _enter(
        self, x: Tensor, k: Tensor, v: Tensor, state: SlidingState | None, write_mask: Mask, reset_mask: Mask
    ) -> tuple[tuple[Tensor, Tensor, Entries], SlidingState]:
        """All entries that the tokens of x may see, and those to keep for the next call."""
        entries = entries_of(None if state is None else state.present, x, write_mask, reset_mask)
        if state is not None:
            k = torch.cat([state.keys.to(k.dtype), k], 1)
            v = torch.cat([state.values.to(v.dtype), v], 1)
        # [B, N, R, G, D], N entries, each of R inputs.
        k, v = entries.in_order(k), entries.in_order(v)
        if state is not None and not x.shape[1]:
            present = state.present.clone()
        else:
            present = (entries.document == entries.query_document[:, -1:]).expand(x.shape[0], -1)
        count = None if self.window is None else self.window - 1
        return (k, v, entries), SlidingState(last(k, count), last(v, count), last(present, count))

    def _keys_values(self, kv: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values `[..., G, D]` of what `key_value` makes of inputs."""
        k, v = kv.unflatten(-1, (2, self.kv_heads, self.width)).unbind(-3)
        return (k if self.gain is None else normalise_qk(k, "rms")), v

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, entries: Entries) -> Tensor:
        """Answers `[B, T, H, D]` to queries from cache entries `[B, N, R, G, D]`."""
        if self.rotary:
            place = torch.arange(k.shape[1], device=k.device)
            q, k = rotated(q, entries.rank.unsqueeze(-1)), rotated(k, place[:, None, None])
        windows = Windows(entries, self.window)
        # All chunks of all sequences are one batch; an entry's inputs are neighbours.
        k, v = (windows.reached(part).flatten(0, 1).flatten(1, 2) for part in (k, v))
        inputs, mask, blind = k.shape[1] // windows.reach, None, None
        causal = entries.plain and windows.reaches_all and inputs == 1 and not self.persistent
        if not causal:
            visible = windows.visible()
            sequences = 1 if visible.shape[:2] == (1, 1) else q.shape[0]
            mask = visible.expand(sequences, -1, -1, -1).flatten(0, 1)
            mask = F.pad(mask.repeat_interleave(inputs, -1), (self.persistent, 0), value=True)
            blind = ~mask.any(-1, keepdim=True)  # a softmax over nothing has no value
            mask, blind = (mask | blind).unsqueeze(1), blind.unsqueeze(1)
        if self.tokens is not None:
            own_k, own_v = self._keys_values(self.key_value(self.tokens))
            if self.rotary:  # the rotated half would make the answer depend on where counting began
                own_k = F.pad(own_k[..., self.width // 2 :], (self.width // 2, 0))
            own_k, own_v = (part.expand(k.shape[0], -1, -1, -1) for part in (own_k, own_v))
            k, v = torch.cat([own_k.to(k.dtype), k], 1), torch.cat([own_v.to(v.dtype), v], 1)
        # Fused kernels have no tangents.
        plain = sdpa_kernel(SDPBackend.MATH) if forward_ad._current_level >= 0 else nullcontext()
        with plain:
            y = F.scaled_dot_product_attention(
                windows.queries(q).flatten(0, 1).transpose(1, 2),
                k.transpose(1, 2),
                v.transpose(1, 2),
                attn_mask=mask,
                is_causal=causal,
                enable_gqa=self.kv_heads != self.heads,
            )
        if blind is not None:
            y = torch.where(blind, 0.0, y)
        return y.transpose(1, 2).unflatten(0, (q.shape[0], -1)).flatten(1, 2)[:, : q.shape[1]]

    def extra_repr(self) -> str:
        """The sizes."""
        return (
            f"{self.d_model}, heads={self.heads}, kv_heads={self.kv_heads}, window={self.window}, "
            f"persistent={self.persistent}, rotary={self.rotary}, qk_norm={self.qk_norm}, "
            f"output_gate={self.output_gate is not None}"
        )


class Entries(NamedTuple):
    """N cache entries, those kept from earlier calls and T new tokens, in the order of writing.

    The first axis is 1 where all sequences are alike. Entries that nobody may see come first: masked tokens and places
    that were never filled.

    Fields:
        order: where each entry is in kept and new tokens, `[B, N]`; None: in that order.
        document: of each entry, `[B or 1, N]`; -1 for one of an earlier call or of no document.
        query_document: of each new token, `[B or 1, T]`.
        rank: entry that each new token is, or would have been unmasked, `[B or 1, T]`.
        end: entries from here on are hidden from the token, `[B or 1, T]`.
        plain: whether all are new tokens of one document, written one after the other.
    """

    order: Tensor | None
    document: Tensor
    query_document: Tensor
    rank: Tensor
    end: Tensor
    plain: bool

    def in_order(self, x: Tensor) -> Tensor:
        """x `[B, N, ...]` of kept and new tokens, entry by entry."""
        if self.order is None:
            return x
        return torch.take_along_dim(x, self.order.reshape(*x.shape[:2], *[1] * (x.dim() - 2)), 1)


def entries_of(present: Tensor | None, like: Tensor, write: Mask, reset: Mask) -> Entries:
    """Entries for the kept ones, `present` `[B, K]`, and for the new tokens of `like` `[B, T, ...]`."""
    batch, length = like.shape[:2]
    cached = 0 if present is None else present.shape[1]
    sequences = batch if present is not None or write is not None else 1
    query_document = like.new_zeros(sequences, length, dtype=torch.int64) if reset is None else reset.cumsum(1)
    document = query_document if write is None else torch.where(write, query_document, -1)
    if present is not None:
        past = torch.where(present, 0, -1)
        document = torch.cat([past, document.expand(batch, -1)], 1)
    rank = cached + torch.arange(length, device=like.device).unsqueeze(0)
    if write is None:
        return Entries(None, document, query_document, rank, rank + 1, present is None and reset is None)
    count = write.cumsum(1)
    hidden = length - count[:, -1:]
    stays = torch.cat([write.new_ones(batch, cached), write], 1)
    # Masked tokens move to the front, where no window reaches them; the others keep their order.
    order = stays.int().argsort(dim=1, stable=True)
    end = cached + hidden + count
    rank = end - write.long()
    return Entries(order, document.gather(1, order), query_document, rank, end, plain=False)


def last(x: Tensor, count: int | None) -> Tensor:
    """The last entries of x `[B, N, ...]`, zeros ahead of them where N is less; None: all of them."""
    if count is None:
        return x
    missing = max(count - x.shape[1], 0)
    x = F.pad(x, (0, 0) * (x.dim() - 2) + (missing, 0))
    # A copy: a view would keep all entries in memory.
    return x[:, x.shape[1] - count :].clone()


class Windows:
    """Queries in chunks, and for every chunk the entries that its windows reach.

    A sequence no longer than a window or 64 tokens, or without window, is a single chunk that reaches all entries.
    """

    def __init__(self, entries: Entries, window: int | None) -> None:
        self.entries, self.window, self.length = entries, window, entries.rank.shape[1]
        count = entries.document.shape[1]
        self.single = window is None or self.length <= max(64, window)
        self.reaches_all = window is None or self.length <= window
        self.lead = self.tail = 0
        self.size, self.reach = self.length, count
        self.starts: Tensor | None = None
        if window is not None and not self.single:
            self.size = max(64, window // 2)
            self.reach = window - 1 + self.size
            # As many entries before the first token as its window reaches back.
            self.lead = max(window - 1 - (count - self.length), 0)
            self.tail = -self.length % self.size
            if entries.order is not None:
                self.starts = entries.rank[:, :: self.size] + self.lead - (window - 1)

    def queries(self, q: Tensor) -> Tensor:
        """`[B, T, ...]` -> `[B, chunks, size, ...]`."""
        return F.pad(q, (0, 0) * (q.dim() - 2) + (0, self.tail)).unflatten(1, (-1, self.size))

    def reached(self, x: Tensor) -> Tensor:
        """`[B, N, ...]` -> `[B, chunks, reach, ...]`."""
        if self.single:
            return x.unsqueeze(1)
        x = F.pad(x, (0, 0) * (x.dim() - 2) + (self.lead, self.tail))
        if self.starts is None:
            return x.unfold(1, self.reach, self.size).movedim(-1, 2)
        index = self._places(self.starts).clamp(max=x.shape[1] - 1)
        flat = index.reshape(*[x.shape[0], -1], *[1] * (x.dim() - 2))
        return torch.take_along_dim(x, flat, 1).unflatten(1, (-1, self.reach))

    def _places(self, starts: Tensor) -> Tensor:
        return starts.unsqueeze(-1) + torch.arange(self.reach, device=starts.device)

    def visible(self) -> Tensor:
        """Mask of the entries that each query sees, `[B or 1, chunks, size, reach]`."""
        entries, starts = self.entries, self.starts
        if starts is None:
            starts = torch.arange(0, self.length, self.size, device=entries.rank.device).unsqueeze(0)
        place = (self._places(starts) - self.lead).unsqueeze(2)
        # The entries added at both ends have been set to zero, as of no document.
        shown = self.reached(entries.document + 1).unsqueeze(2) - 1
        tokens = entries.query_document, entries.rank, entries.end
        document, rank, end = (self.queries(x).unsqueeze(-1) for x in tokens)
        mask = (shown == document) & (place < end)
        return mask if self.window is None else mask & (place > rank - self.window)
