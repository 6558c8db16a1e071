"""Linear attention without projections: y_t = sum_s w_ts v_s / sum_s w_ts, w = phi(q).phi(k).

Keys and values enter as sums of phi(k) and v phi(k)^T, so the cost is linear in the number of tokens and what is
carried from token to token has a fixed size. The sums of a causal pass run in a memory with bias dot, whose engines
keep the states of a few tokens and compute the others again in the backward pass.
"""

from __future__ import annotations

import math
from functools import reduce
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from hecate.checks import described, expect_beside, expect_choice, expect_number, swapped, warn_if_turned
from hecate.engine import (
    DIVIDE,
    EngineName,
    check_mask,
    check_params,
    check_tokens,
    counted,
    document_starts,
    memory_scan,
    written_before,
)
from hecate.errors import ConfigError, ShapeError, shorten
from hecate.nn.arguments import Mask, check_engine
from hecate.nn.positions import Position
from hecate.phi import FeatureMap, FeatureMapKind, Params
from hecate.rule import Gates, MemoryConfig, MemoryState
from hecate.tape import Autodiff, by_hand, execute, one
from hecate.tape.bridge import without_autocast
from hecate.tape.ops import largest, levelling, near_one

Normalizer = Literal["sum", "none"]
Pair = tuple[Tensor, Tensor]
LinearAttentionState = MemoryState  # what linear attention carries is the state of a memory


class Weights(NamedTuple):
    """Weights of pairs of a query and a key: phi, the effect of distance, and the parameters of both."""

    feature_map: FeatureMap
    params: Params
    positions: Position
    position_params: dict[str, Tensor]

    def places(
        self, state: MemoryState | None, write: Mask, reset: Mask, k: Tensor
    ) -> tuple[Tensor | None, Tensor | None]:
        """Places `[B, S]` of the tokens k `[B, S, ...]` in their documents, and the number of tokens after the last;
        None where nothing depends on them."""
        if not (self.positions.needs_position or self.feature_map.needs_position):
            return None, None
        count = k.new_zeros(k.shape[0], dtype=torch.int64) if state is None else state.seen
        return counted(one((count,)), write, reset, k.shape[1])

    def turned(self, x: Tensor, place: Tensor | None) -> Tensor:
        """Tokens `[B, T, G, D]` at places `[B, T]` as phi sees them."""
        if place is None or self.positions.turns_features:
            return x
        return self.positions.turned(x, place, self.position_params)

    def features(self, x: Tensor, place: Tensor | None, *, keys: bool = False) -> tuple[Tensor, Tensor]:
        """phi(x) of queries or keys as it enters the sum of values and that of weights, with its own derivative."""
        params = self.params
        if self.feature_map.needs_position and place is not None:
            # [B, T] to [B, T, 1]: heads share their tokens' places.
            params = {**params, "position": place.unsqueeze(-1)}
        block, tensors = self.feature_map.block(params)
        if block.hand_written:
            block = by_hand(block)
        x = one(execute(block, self.turned(x, place), *tensors))
        if place is None or not self.positions.turns_features:
            return x, x
        turned = self.positions.turned_keys if keys else self.positions.turned
        return turned(x, place, self.position_params), x


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    feature_map: FeatureMapKind | str = "elu",
    params: Params | None = None,
    *,
    causal: bool = True,
    normalizer: Normalizer = "sum",
    eps: float = 0.0,
    positions: Position | str = "none",
    position_params: dict[str, Tensor] | None = None,
    state: MemoryState | None = None,
    write_mask: Mask = None,
    reset_mask: Mask = None,
    cu_seqlens: Tensor | None = None,
    engine: EngineName = "auto",
    autodiff: Autodiff = "auto",
    name: str = "linear_attention",
) -> tuple[Tensor, MemoryState]:
    """Linear attention as a function: y, and the sums to go on from. [LIN-ATT-D1]

    Shapes: q `[B, T, H, D]`, k `[B, S, G, D]`, v `[B, S, G, V]`, H a multiple of G (query heads h G/H share a key
    head); y `[B, T, H, V]` in v's dtype. Causal attention needs S = T, as do positions and documents. The state is that
    of a memory with bias dot and lr 1 per key head: sums of v phi(k)^T, `memory["weight"]` `[B, G, V, P]`, and with a
    normaliser of phi(k), `normalizer.memory["weight"]` `[B, G, 1, P]`, in float32 or better; `seen` `[B]` counts the
    tokens of the present document where positions need it. [LIN-ATT-I1]

    Args:
        feature_map, params: phi and its parameters, from `feature_map.init(D, heads=G)`.
        causal: whether a query sees the tokens up to its own or all.
        normalizer: "sum" divides by eps plus the sum of weights, which needs a feature map with a
            non-negative kernel; "none" leaves the sum of values.
        positions, position_params: what distance does to a weight.
        state: the sums to add to.
        write_mask: `[B, S]` bool; at False a key is nowhere seen, whatever it holds.
        reset_mask: `[B, T]` bool; at True a document starts, which sees nothing of the others.
        cu_seqlens: `[documents + 1]` int, borders of documents packed into one row (B = 1).
        engine, autodiff: passed to `memory_scan`, which runs causal sums.
        name: what errors call this attention.

    A query that sees no token, or whose kernel with all it sees is 0, gets 0, as in `memory_scan`."""
    if not isinstance(feature_map, FeatureMap):
        feature_map = FeatureMap.model_validate(feature_map)
    if not isinstance(positions, Position):
        positions = Position.model_validate(positions)
    reset_mask = document_starts(reset_mask, cu_seqlens, k, going_on=state is not None)
    position_params = {} if position_params is None else position_params
    weights = Weights(feature_map, {"learned": {}, "frozen": {}}, positions, position_params)
    sums = Sums(causal, write_mask, reset_mask, {"engine": engine, "autodiff": autodiff, "name": name})
    if not torch.compiler.is_compiling():
        check_options(feature_map, causal=causal, normalizer=normalizer, eps=eps, engine=engine, autodiff=autodiff)
        _check_tensors(weights, sums, q, k, v)
        if name == "linear_attention" and state is None and write_mask is reset_mask is None:  # a layer has a name
            warn_if_turned(q, None, stacklevel=3)
        if state is not None:
            _check_state(weights, sums, k, v, state, normalizer)
    weights = weights._replace(params=check_params(feature_map, params, k))
    group = q.shape[2] // k.shape[2]
    dtype = reduce(torch.promote_types, (q.dtype, k.dtype, v.dtype), torch.float32)
    with without_autocast(k.device.type):
        # [B, T, G r, D] to [B, T r, G, D]: the r queries of a group become r tokens of their key head.
        queries = q.to(dtype).unflatten(2, (-1, group)).transpose(2, 3).flatten(1, 2)  # by groups
        keys, values = (zero_masked(x.to(dtype), write_mask) for x in (k, v))
        place, count = weights.places(state, write_mask, reset_mask, k)
        phi_q = weights.features(queries, None if place is None else place.repeat_interleave(group, 1))
        phi_k = weights.features(keys, place, keys=True)
        retain = positions.retain(keys, weights.position_params)
        factors = positions.factors(keys, weights.position_params, causal=causal)
        sums = sums._replace(retain=retain, factors=factors)
        if normalizer == "sum":
            y, memory, total = _mean(sums, phi_q, phi_k, values, state, eps)
        else:
            start = None if state is None else state.memory["weight"].to(values.dtype)
            (y, memory), total = sums(phi_q[0], phi_k[0], values, start), None
    # And back: the queries of a group become heads again.
    y = y.unflatten(1, (q.shape[1], group)).transpose(2, 3).flatten(2, 3)
    return y.to(v.dtype), state_of_sums(memory, total, count)


def _mean(
    sums: Sums, phi_q: Pair, phi_k: Pair, v: Tensor, state: MemoryState | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """y `[B, T r, G, V]`, and the sums of weighted values and of features."""
    (q, weight_q), (k, weight_k) = phi_q, phi_k
    memory = total = None
    if state is not None and state.normalizer is not None:
        memory = state.memory["weight"].to(v.dtype)
        total = state.normalizer.memory["weight"].to(v.dtype)
    alike, size = q is weight_q, largest(weight_q)
    units: tuple[Tensor, ...] = ()
    if eps == 0 and not near_one(size):  # else no sum is small; a query's own size cancels
        units = (levelling(size),)
        q, weight_q = q * units[0], weight_q * units[0]
    ones = torch.ones_like(v[..., :1])
    if alike:  # one pass for both sums: the sum of weights has the value 1
        # [B, G, V, P] and [B, G, 1, P] as one state of V + 1 rows.
        start = None if memory is None or total is None else torch.cat([memory, total], 2)
        y, after = sums(q, k, torch.cat([v, ones], -1), start)
        y, weight = y[..., :-1], y[..., -1:]
        memory, total = after[:, :, :-1], after[:, :, -1:]
    else:
        y, memory = sums(q, k, v, memory)
        weight, total = sums(weight_q, weight_k, ones, total)
        y = torch.where(weight + eps > 0, y, 0.0)
    return one(execute(DIVIDE, y, weight + eps, *units)), memory, total


def check_options(
    feature_map: FeatureMap, *, causal: bool, normalizer: str, eps: float, engine: EngineName, autodiff: Autodiff
) -> None:
    """Refuses a normaliser that the feature map does not allow, and unknown engines."""
    check_engine(MEMORIES["after", False], engine, autodiff)
    expect_choice(normalizer, "normalizer", get_args(Normalizer))
    if not isinstance(causal, bool):
        raise ConfigError(f"causal must be True or False, got {shorten(causal)}")
    expect_number(eps, "eps")
    if normalizer == "sum" and not feature_map.kernel_non_negative:
        raise ConfigError(
            f"normalizer='sum' with feature_map {feature_map.kind!r}: the sum of weights could vanish or change sign; "
            "use a map with a non-negative kernel, such as elu or favor, or normalizer='none'",
            path=("normalizer",),
        )
    if normalizer == "none" and eps:
        raise ConfigError(f"eps={eps:g} is added to the sum of weights, but normalizer is 'none'", ("eps",))


def turned_width(positions: Position, feature_map: FeatureMap, d_key: int) -> int:
    """Width of the vectors that a position turns, of keys or of their features; refused where it cannot turn them."""
    width = feature_map.output_dim(d_key) if positions.turns_features else d_key
    refusal = positions.refusal(width)
    if refusal is not None:
        raise ConfigError(
            f"positions {positions.kind!r} with feature_map {feature_map.kind!r} and keys of width "
            f"{d_key}: {refusal}; change the widths or the positions",
            path=("positions",),
        )
    return width


def _check_tensors(weights: Weights, sums: Sums, q: Tensor, k: Tensor, v: Tensor) -> None:
    check_tokens(q, k, v, "B T heads width")
    if v.shape[:3] != k.shape[:3] or q.shape[0] != k.shape[0] or q.shape[-1] != k.shape[-1]:
        raise ShapeError(
            "q must be [B, T, H, D], k [B, S, G, D] and v [B, S, G, V] with equal B, S, G, D; got "
            f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}{swapped(v.shape, k.shape)}"
        )
    if not k.shape[2] or not q.shape[2] or q.shape[2] % k.shape[2]:
        raise ShapeError(f"{k.shape[2]} key heads do not divide {q.shape[2]} query heads")
    check_mask("write_mask", sums.write, k)
    check_mask("reset_mask", sums.reset, k)
    positions = weights.positions
    if sums.reset is not None:
        positions.check_past("documents packed into a row", "give each a row of its own")
    ordered = sums.causal or positions.needs_order or weights.feature_map.needs_position
    if (ordered or sums.reset is not None) and q.shape[1] != k.shape[1]:
        raise ShapeError(
            "causal attention, positions and documents need one query per key, got "
            f"{q.shape[1]} queries and {k.shape[1]} keys; use causal=False, positions='none', no "
            "reset_mask and a feature map without positions to look at other tokens"
        )
    params, heads = weights.position_params, k.shape[2]
    if not isinstance(params, dict) or not all(
        isinstance(x, Tensor) and x.is_floating_point() for x in params.values()
    ):
        raise ShapeError(
            "position_params must be a mapping of names to floating point tensors, as "
            f"positions.init returns it, got {shorten(params)}"
        )
    width = turned_width(positions, weights.feature_map, k.shape[-1])
    init = positions.init(width, heads=heads, causal=sums.causal, device="meta")
    expected, shapes = ({name: tuple(x.shape) for name, x in tensors.items()} for tensors in (init, params))
    if shapes != expected:
        raise ConfigError(
            f"positions {positions.kind!r} need parameters {expected or 'none'}, got "
            f"{shapes or 'none'}; pass positions.init({width}, heads={heads}, causal={sums.causal})"
        )


def _check_state(
    weights: Weights, sums: Sums, k: Tensor, v: Tensor, state: MemoryState, normalizer: Normalizer
) -> None:
    """Refuses a state of another attention or batch, and any state where the options allow none."""
    positions, feature_map = weights.positions, weights.feature_map
    positions.check_past("a state", "give the whole sequence in one call")
    if not sums.causal and (sums.reset is not None or positions.weighs_distance):
        other = f"positions {positions.kind!r}" if positions.weighs_distance else "reset_mask"
        raise ConfigError(
            f"causal=False with a state and {other}: sums from both sides start at a document's "
            "two ends, and a state knows one; give the whole sequence in one call"
        )
    if not isinstance(state, MemoryState):
        raise ShapeError(f"state must be the MemoryState that this attention returned, got {type(state).__name__}")
    others = [*state.slots, *state.anchor, *state.pending]
    if others:
        raise ShapeError(f"state must hold sums alone, got {others} too; was it made by another memory?")
    batch, heads, width = k.shape[0], k.shape[2], feature_map.output_dim(k.shape[-1])
    total = None if state.normalizer is None else state.normalizer.memory.get("weight")
    summed = positions.turned_width(width) if positions.turns_features else width
    for name, tensor, shape in (
        ("memory['weight']", state.memory.get("weight"), (batch, heads, v.shape[-1], summed)),
        ("normalizer", total, (batch, heads, 1, width) if normalizer == "sum" else None),
        ("seen", state.seen, (batch,) if positions.needs_position or feature_map.needs_position else None),
    ):
        if tensor is None and shape is None:
            continue
        count = name == "seen"
        wanted = isinstance(tensor, Tensor) and (tensor.dtype == torch.int64 if count else tensor.is_floating_point())
        if not isinstance(tensor, Tensor) or not wanted or tuple(tensor.shape) != shape:
            raise ShapeError(
                f"state.{name} must be {'int64 ' if count and shape else ''}{list(shape) if shape else None} here, got "
                f"{described(tensor)}; was it made by another attention or with another batch?"
            )
        expect_beside(tensor, k, f"state.{name}")


Read = Literal["after", "before"]


# The memories that hold the sums. They do not check values: NaN shows in the outputs, as in other attention.
MEMORIES = {
    (read, decays): MemoryConfig(
        bias="dot", retention="decay" if decays else "none", on_nonfinite="propagate", read=read
    )
    for read in get_args(Read)
    for decays in (False, True)
}


def state_of_sums(weight: Tensor, total: Tensor | None = None, count: Tensor | None = None) -> MemoryState:
    """The state of a memory of weights `[B, G, V, P]`, and of its normaliser `[B, G, 1, P]`."""
    place = torch.zeros(weight.shape[:2], dtype=torch.int64, device=weight.device)
    normalizer = None if total is None else MemoryState({"weight": total}, {}, {}, {}, place)
    return MemoryState({"weight": weight}, {}, {}, {}, place, normalizer, count)


class Sums(NamedTuple):
    """The weighted sums y_t = sum_s c_(t-s) (q_t.k_s) v_s of a call, those of values and of weights.

    Keys k `[B, S, G, P]` and values v `[B, S, G, V]` are features and what they stand for; queries `[B, T r, G, P]`
    come with the r queries of a key head's group side by side.

    Fields:
        causal: whether a query sees the keys up to its own, or all of its document.
        write, reset: masks `[B, S]`.
        how: engine, autodiff and name, passed to `memory_scan`.
        retain: what is kept per token, `[B, S, G]`.
        factors: c of every distance: see `Position.factors`.
    """

    causal: bool
    write: Mask
    reset: Mask
    how: dict[str, Any]
    retain: Tensor | None = None
    factors: Tensor | None = None

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, start: Tensor | None) -> tuple[Tensor, Tensor]:
        """y `[B, T r, G, V]`, and the state `[B, G, V, P]` after the last token."""
        if self.factors is not None:  # no state of fixed size sums up the past
            return self.by_distance(q, k, v, self.factors), v.new_zeros(v.shape[0], *v.shape[2:], 0)
        if self.causal:
            return self.running(q, k, v, start)
        if self.reset is None and self.retain is None:
            return self.over_all(q, k, v, start)
        return self.from_both_sides(q, k, v, start)

    def running(
        self, q: Tensor, k: Tensor, v: Tensor, start: Tensor | None, *, read: Read = "after"
    ) -> tuple[Tensor, Tensor]:
        """Sums over the tokens up to each one, and the state after the last.

        The r queries of a group are r tokens to the memory, of which one is written. With `retain` a token j written
        tokens away weighs retain^j. A memory decays at its write, so a query that reads it without a write, or before
        one, finds the last token one step too near.
        """
        group = q.shape[1] // k.shape[1] if k.shape[1] else 1
        write, reset, retain = self.write, self.reset, self.retain
        writes = torch.ones(k.shape[:2], dtype=torch.bool, device=k.device) if write is None else write
        if retain is not None:
            nearer = (writes if read == "before" else ~writes).unsqueeze(-1)
            decay = torch.where(nearer, retain, 1.0).repeat_interleave(group, 1)
            q, retain = q * decay.unsqueeze(-1), retain.repeat_interleave(group, 1)
        if group > 1:
            # Queries that read before the write go before the token that writes.
            writer = 0 if read == "after" else group - 1
            k, v, write = (_spread(x, writer, group) for x in (k, v, writes))
            reset = None if reset is None else _spread(reset, 0, group)
        state = None if start is None else state_of_sums(start)
        options: dict[str, Any] = {"state": state, "write_mask": write, "reset_mask": reset, **self.how}
        y, after = memory_scan(MEMORIES[read, retain is not None], q, k, v, Gates(retain=retain), **options)
        return y, after.memory["weight"]

    def over_all(self, q: Tensor, k: Tensor, v: Tensor, start: Tensor | None) -> tuple[Tensor, Tensor]:
        """Sums over all written tokens, the same for every query: O((T + S) P V)."""
        memory = torch.einsum("bsgv,bsgp->bgvp", v, zero_masked(k, self.write))
        memory = memory if start is None else memory + start
        return torch.einsum("btgp,bgvp->btgv", q, memory), memory

    def from_both_sides(self, q: Tensor, k: Tensor, v: Tensor, start: Tensor | None) -> tuple[Tensor, Tensor]:
        """Sums over the whole document of each token: those up to it, and those from its end back to it."""
        y, after = self.running(q, k, v, start)
        reset = self.reset
        if reset is not None:  # backwards a document starts with its last token
            reset = torch.cat([reset[:, 1:], torch.ones_like(reset[:, :1])], 1)
        write, reset, retain = (None if x is None else x.flip(1) for x in (self.write, reset, self.retain))
        back = self._replace(write=write, reset=reset, retain=retain)
        later, _ = back.running(q.flip(1), k.flip(1), v.flip(1), None, read="before")
        return y + later.flip(1), after

    def by_distance(self, q: Tensor, k: Tensor, v: Tensor, factors: Tensor) -> Tensor:
        """Sums with a weight per distance, as convolutions by FFT.

        Masked tokens count for no distance: the convolution runs over the written ones, moved together, and a query
        reads it where it stands among them. A masked query stands where the next written token does, which it may not
        see, so a causal convolution leaves out distance 0; a token's own product is added. [ATT-REL-D2]
        """
        batch, length = k.shape[:2]
        if not q.numel() or not v.numel():
            return q.new_zeros(*q.shape[:3], v.shape[-1])
        q = q.unflatten(1, (length, -1))
        place, diagonal = None, q.new_zeros(())
        if self.causal:
            weight = torch.einsum("btrgp,btgp->btrg", q, zero_masked(k, self.write)) * factors[:, 0]
            diagonal = torch.einsum("btrg,btgv->btrgv", weight, v)
        if self.write is not None:
            k, order = zero_masked(k, self.write), (~self.write).int().argsort(dim=1, stable=True)
            k, v = (x.take_along_dim(order[..., None, None], 1) for x in (k, v))
            zero = torch.zeros(batch, dtype=torch.int64, device=k.device)
            place = written_before(zero, self.write, None, length)
        products = torch.einsum("bsgv,bsgp->gvpbs", v, k)
        sums = _convolve(products, _kernel(factors, length, causal=self.causal))
        if place is not None:
            sums = sums.take_along_dim(place[None, None, None], -1)
        return (torch.einsum("btrgp,gvpbt->btrgv", q, sums) + diagonal).flatten(1, 2)


def zero_masked(x: Tensor, write: Mask) -> Tensor:
    """x `[B, S, G, *]` with zeros for masked tokens, which may hold NaN, so that a product with 0 would not do."""
    return x if write is None else torch.where(write[..., None, None], x, 0.0)


def _spread(x: Tensor, place: int, group: int) -> Tensor:
    """`[B, S, ...]` as `[B, S * group, ...]`: every token at one place of its group, else 0."""
    zero = torch.zeros_like(x)
    return torch.stack([x if index == place else zero for index in range(group)], 2).flatten(1, 2)


def _kernel(factors: Tensor, length: int, *, causal: bool) -> Tensor:
    """c as a circular kernel of 2 T entries, `[G, 2 T]`: distance n at place n mod 2 T."""
    zero = torch.zeros_like(factors[:, :1])
    if causal:
        return torch.cat([zero, factors[:, 1:], zero.expand(-1, length)], -1)
    past, future = factors[:, length - 1 :], factors[:, : length - 1]
    return torch.cat([past, zero, future], -1)


def _convolve(x: Tensor, kernel: Tensor) -> Tensor:
    """x `[G, V, P, B, T]` convolved over T with kernels `[G, 2 T]`, in float64, because rounding errors are shares of
    what all tokens sum to, beside which the first sums are small; what rounding leaves of a sum that is 0 is 0, because
    a normaliser has to tell."""
    length, dtype = x.shape[-1], x.dtype
    x, kernel = x.double(), kernel[:, None, None, None].double()
    spectrum = torch.fft.rfft(x, n=2 * length) * torch.fft.rfft(kernel)
    sums = torch.fft.irfft(spectrum, n=2 * length)[..., :length]
    # No sum exceeds the product of norms, and three transforms lose less than this share of it.
    share = 4 * torch.finfo(x.dtype).eps * math.log2(4 * length)
    noise = share * x.norm(dim=-1, keepdim=True) * kernel.norm(dim=-1, keepdim=True)
    return (sums - torch.where(sums.abs() <= noise, sums, 0.0).detach()).to(dtype)
