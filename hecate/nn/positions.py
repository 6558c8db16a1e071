"""Positions in attention, which tell tokens at different distances apart: rotations, and an additive bias."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from hecate.checks import Size
from hecate.errors import ConfigError
from hecate.variant import Conflicts, Variant

Params = dict[str, Tensor]
BASE = 10_000.0


class Position(Variant, family="position"):
    """Effect of a token's position on attention; positions count the written tokens of a document. [ATT-POS-D1]

    A kind turns vectors (`turned`), keeps a share of the past per token (`retain`), or has a free weight per distance
    (`factors`). Every learned parameter has a leading axis of key heads.
    """

    needs_order: ClassVar[bool] = True
    """True if queries and keys have to be of the same tokens."""
    weighs_distance: ClassVar[bool] = False
    """True if a distance has a factor, by `retain` or `factors`, in the sum of values and that of weights."""

    @property
    def needs_position(self) -> bool:
        """True if tokens have to be counted from call to call."""
        return self.needs_order

    @property
    def turns_features(self) -> bool:
        """True if `turned` acts on phi(q) and phi(k) in the sum of values, not on q and k ahead of phi."""
        return False

    @property
    def sums_past(self) -> bool:
        """True if sums of fixed size stand for the past, so that calls can go on from a state."""
        return True

    def init(
        self,
        width: int,
        *,
        heads: int = 1,
        causal: bool = True,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> Params:
        """Learned parameters as they start, for vectors of a width; nothing is drawn."""
        start = self.start(width, heads, causal=causal)
        return {name: value.to(dtype=dtype, device=device) for name, value in start.items()}

    def start(self, width: int, heads: int, *, causal: bool) -> Params:
        """The parameters of `init`, in float64 on the CPU."""
        return {}

    def refusal(self, width: int) -> str | None:
        """Reason why vectors of a width cannot be given positions; None if they can."""
        return None

    def check_past(self, past: str, instead: str) -> None:
        """Refuses what stands for earlier tokens, such as "a state", where `sums_past` is False."""

    def turned_width(self, width: int) -> int:
        """Width of what `turned` makes of vectors of a width."""
        return width

    def turned(self, x: Tensor, position: Tensor, params: Params) -> Tensor:
        """x `[B, T, G, width]` turned by position `[B, T]`, in x's dtype."""
        return x

    def turned_keys(self, x: Tensor, position: Tensor, params: Params) -> Tensor:
        """`turned` for keys, where those are not turned as queries are."""
        return self.turned(x, position, params)

    def retain(self, like: Tensor, params: Params) -> Tensor | None:
        """Kept fraction of the past per token, `[B, S, G]` for keys `[B, S, G, *]`; None: all of it."""
        return None

    def factors(self, like: Tensor, params: Params, *, causal: bool) -> Tensor | None:
        """Factors of distances 0..S - 1 for keys `[B, S, G, *]`, or -(S - 1)..S - 1 if not causal: `[G, S]` or
        `[G, 2 S - 1]`; None without a free weight per distance."""
        return None


class NoPosition(Position):
    r"""none: weights phi(q_i).phi(k_j), whatever the distance.

    The feature map itself may depend on positions (`cosformer`).

    Formula: $w_{ij} = \phi(q_i)^\top \phi(k_j)$
    References: Transformers are RNNs (Katharopoulos et al., 2020, arXiv 2006.16236). [ATT-POS-D1]"""

    kind: Literal["none"] = "none"
    needs_order: ClassVar[bool] = False


def turn_pairs(x: Tensor, position: Tensor, pairs: int, base: float) -> Tensor:
    """Channels (c, c + pairs) of x `[..., D]` turned by position * base^(-c / pairs).

    position: whole numbers that broadcast to `[...]`. Channels from 2 * pairs on stay.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    steps = torch.arange(pairs, dtype=torch.float64, device=x.device)
    # In float64: at position 10^5 an angle in float32 has lost two digits of its turn.
    angle = position.unsqueeze(-1) * base ** (-steps / pairs)
    cos, sin = angle.cos().to(wide), angle.sin().to(wide)
    a, b, rest = x.split([pairs, pairs, x.shape[-1] - 2 * pairs], -1)
    turned = torch.cat([a * cos - b * sin, a * sin + b * cos], -1)
    return torch.cat([turned.to(x.dtype), rest], -1)


def rotated(x: Tensor, position: Tensor) -> Tensor:
    """The first half of the channels turned in pairs by position * 10000^(-pair / pairs).

    The product of two rotated vectors depends on their positions by the difference alone; the second half of the
    channels carries no position. [ATT-ROT-D1]

    Shapes: x `[..., D]`, D divisible by 4; position int64 that broadcasts to `[...]`.
    """
    return turn_pairs(x, position, x.shape[-1] // 4, BASE)


class Rotation(Position):
    """A rotation of vectors by their token's position: (R_i x).(R_j y) depends on i - j alone.

    where: "before" turns q and k ahead of phi, so that the weight phi(R_i q).phi(R_j k) is still positive, but for a
    nonlinear phi no function of the distance; "numerator" turns phi(q) and phi(k) in the sum of values and leaves the
    sum of weights as it is, so that the weight is a function of the distance, but not always positive, and weights do
    not add up to 1.
    """

    where: Literal["before", "numerator"] = "before"

    @property
    def turns_features(self) -> bool:
        return self.where == "numerator"

    def turned(self, x: Tensor, position: Tensor, params: Params) -> Tensor:
        raise NotImplementedError(f"{type(self).__name__} defines no turned")


class Rotary(Rotation):
    r"""rotary: R_i turns channels (c, c + P) of P = floor(width / 2) pairs by i base^(-c / P).

    (R_i x).(R_j y) depends on i - j alone; of an odd width the last channel stays. With `where` = "numerator" this is
    the rotary form of the linear transformer: y_t = sum_s (R_t phi(q_t)).(R_s phi(k_s)) v_s / sum_s phi(q_t).phi(k_s).

    Formula: $w_{ij} = \phi(R_i q_i)^\top \phi(R_j k_j)$
    $w_{ij} = (R_i \phi(q_i))^\top (R_j \phi(k_j)) \quad \text{on the numerator}$
    $R_i \ \text{turns channels } (c, c + n) \ \text{by the angle } i\, \mathrm{base}^{-c / n},\quad n = \lfloor
    \mathrm{width} / 2 \rfloor$
    Shapes: x `[B, T, G, width]`, positions `[B, T]`.
    Cost: O(width) per token; angles in float64.
    Warning: "before" a nonlinear phi the weight is no function of i - j; on the "numerator" it may be negative, and a
    small sum of weights makes y large.
    References: RoFormer: Enhanced Transformer with Rotary Position Embedding (Su et al., 2021, arXiv 2104.09864).
    [ATT-ROT-D2]
    """

    kind: Literal["rotary"] = "rotary"
    base: float = Field(default=BASE, gt=0, description="the slowest pair turns by about 1 / base")

    def refusal(self, width: int) -> str | None:
        return None if width > 1 else f"a width of {width} has no pair of channels to turn"

    def turned(self, x: Tensor, position: Tensor, params: Params) -> Tensor:
        return turn_pairs(x, position.unsqueeze(-1), x.shape[-1] // 2, self.base)


class CirculantString(Rotation):
    r"""circulant_string: R_i = exp(i (C - C^T)), C the circulant matrix of a learned column c.

    Circulant matrices share their eigenvectors, those of the Fourier transform, so R_i x = irfft(e^(j i s) rfft(x))
    with the speeds s = 2 Im rfft(c), and (R_i x).(R_j y) depends on i - j alone. The speeds of every head are learned;
    they start as those of `rotary`.

    Formula: $w_{ij} = \phi(R_i q_i)^\top \phi(R_j k_j),\quad R_i = \exp\left(i\, (C - C^\top)\right)$
    Shapes: x `[B, T, G, width]`, positions `[B, T]`; c `[G, width]`.
    Cost: O(width log width) per token; angles in float64.
    Warning: as for `rotary`. Of an even width two frequencies, of an odd width one, stay.
    References: Learning the RoPEs: Better 2D and 3D Position Encodings with STRING (Schenck et al., 2025, arXiv
    2502.02562). [ATT-STRING-D1]
    """

    kind: Literal["circulant_string"] = "circulant_string"

    def refusal(self, width: int) -> str | None:
        return None if width > 2 else f"a circulant of width {width} is its own transpose"

    def start(self, width: int, heads: int, *, causal: bool) -> Params:
        place: dict[str, Any] = {"dtype": torch.float64, "device": "cpu"}
        pairs = (width - 1) // 2
        speed = torch.zeros(width // 2 + 1, **place)
        # Frequency 0 of a real transform, and the middle one of an even width, have no phase to turn.
        speed[1 : 1 + pairs] = BASE ** (-torch.arange(pairs, **place) / pairs)
        column = torch.fft.irfft(torch.complex(torch.zeros_like(speed), speed / 2), n=width)
        return {"circulant": column.repeat(heads, 1)}

    def turned(self, x: Tensor, position: Tensor, params: Params) -> Tensor:
        if not x.numel():  # nothing that a Fourier transform would take
            return x
        wide = torch.promote_types(x.dtype, torch.float32)
        speed = 2 * torch.fft.rfft(params["circulant"].double()).imag
        angle = position[..., None, None] * speed
        turn = torch.complex(angle.cos().to(wide), angle.sin().to(wide))
        # n: an inverse transform could not tell an odd width from the even one below.
        return torch.fft.irfft(torch.fft.rfft(x.to(wide)) * turn, n=x.shape[-1]).to(x.dtype)


class Polar(Position):
    r"""polar: weights sum_c phi(q_i)_c phi(k_j)_c cos((i - j) base^(-c / P) - b_c) in the sum of values, P channels.

    Features are lengths, positions angles: R_i f = [f cos(i s), f sin(i s)] with s_c = base^(-c / P), and a key's angle
    is greater by b, learned per head and channel, 0 at the start. What a token is (phi) and where it stands no longer
    mix, as where `rotary` turns pairs of channels. PoPE is this with feature_map "softplus". A sum of weights is that
    of phi(q).phi(k), as for `rotary` with `where` = "numerator".

    Formula: $w_{ij} = \sum_c \phi(q_i)_c\, \phi(k_j)_c \cos\left((i - j)\, \mathrm{base}^{-c / P} - b_c\right)$
    Shapes: phi(x) `[B, T, G, P]` to `[B, T, G, 2 P]`, positions `[B, T]`; b `[G, P]`.
    Cost: O(P) per token and twice the state; angles in float64.
    Warning: the weight of two tokens may be negative. A released program clamps b to [-2 pi, 0], where a b that starts
    at 0 and moves up has no gradient again; the cosine has that period, so no b is lost without the clamp.
    References: Decoupling the "What" and "Where" With Polar Coordinate Positional Embeddings (Gopalakrishnan et al.,
    2025, arXiv 2509.10534). [ATT-POLAR-D1, ATT-POLAR-E1]
    """

    kind: Literal["polar"] = "polar"
    turns_features: ClassVar[bool] = True
    base: float = Field(default=BASE, gt=0, description="the slowest channel turns by about 1 / base")

    def start(self, width: int, heads: int, *, causal: bool) -> Params:
        return {"offset": torch.zeros(heads, width, dtype=torch.float64, device="cpu")}

    def turned_width(self, width: int) -> int:
        return 2 * width

    def turned(self, x: Tensor, position: Tensor, params: Params) -> Tensor:
        return self._cartesian(x, self._angle(x, position))

    def turned_keys(self, x: Tensor, position: Tensor, params: Params) -> Tensor:
        return self._cartesian(x, self._angle(x, position) + params["offset"].double())

    def _angle(self, x: Tensor, position: Tensor) -> Tensor:
        steps = torch.arange(x.shape[-1], dtype=torch.float64, device=x.device)
        return position[..., None, None] * self.base ** (-steps / max(x.shape[-1], 1))

    def _cartesian(self, x: Tensor, angle: Tensor) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        # [., P] to [., 2 P]: cosines of all channels, then sines.
        return torch.cat([x * angle.cos().to(wide), x * angle.sin().to(wide)], -1).to(x.dtype)


class Relative(Position):
    r"""relative: weights exp(b_(i-j)) phi(q_i).phi(k_j), in the sum of values and that of weights.

    What adding b_(i-j) to the scores is to softmax. `form` = "table": b is learned for every distance up to
    `max_distance` either way and constant beyond, 0 at the start. The weights are a Toeplitz matrix times a product of
    features, so the sums are convolutions, by FFT. Nothing of fixed size sums up the past: no state can be gone on
    from, and no documents be packed. `form` = "linear": b = -slope |i - j| with a learned slope per head, exp(-slope) =
    sigmoid(logit); then causal sums decay, as a `retain` gate does, with a state and documents as ever. Slopes start at
    2^(-8 g / G) for head g of 1..G.

    Formula: $w_{ij} = \exp(b_{i-j})\, \phi(q_i)^\top \phi(k_j)$
    $b_{i-j} = -\mathrm{slope}\, |i - j| \quad \text{if form is linear}$
    Shapes: b `[G, K + 1]` for distances 0..K, `[G, 2 K + 1]` for -K..K if not causal; logit `[G]`.
    Cost: table O(T log T P V) and T P V numbers in float64; linear as without positions, twice if not causal.
    Warning: an FFT mixes rounding errors of all tokens: a later token that changes moves the table form's earlier
    outputs in their last digits, and one that is not finite makes all so. A weight far below the largest is as inexact
    as that one.
    References: Stable, Fast and Accurate: Kernelized Attention with Relative Positional Encoding (Luo et al., 2021,
    arXiv 2106.12566); linear: Train Short, Test Long (Press et al., 2021, arXiv 2108.12409). [ATT-REL-D1, ATT-REL-D2]
    """

    kind: Literal["relative"] = "relative"
    weighs_distance: ClassVar[bool] = True
    needs_position: ClassVar[bool] = False
    form: Literal["table", "linear"] = "table"
    max_distance: Size = Field(default=128, gt=0, description="K, the largest of the table")

    def conflicts(self) -> Conflicts:
        if self.form == "linear" and self.max_distance != type(self).model_fields["max_distance"].default:
            reason = f"got {self.max_distance} with form='linear', whose bias goes on with any distance"
            yield ("max_distance",), f"is the size of a table, {reason}; leave it out or use form='table'"

    @property
    def sums_past(self) -> bool:
        return self.form == "linear"

    def start(self, width: int, heads: int, *, causal: bool) -> Params:
        place: dict[str, Any] = {"dtype": torch.float64, "device": "cpu"}
        if self.form == "linear":
            slope = 2.0 ** (-8 * torch.arange(1, heads + 1, **place) / heads)
            return {"logit": -slope.expm1().log()}
        return {"bias": torch.zeros(heads, (1 if causal else 2) * self.max_distance + 1, **place)}

    def check_past(self, past: str, instead: str) -> None:
        if not self.sums_past:
            raise ConfigError(
                f"positions 'relative' with form='table' and {past}: with a free weight per distance no sum of "
                f"fixed size stands for what lies behind; {instead}, or use form='linear'"
            )

    def retain(self, like: Tensor, params: Params) -> Tensor | None:
        return params["logit"].to(like.dtype).sigmoid().expand(like.shape[:3]) if self.form == "linear" else None

    def factors(self, like: Tensor, params: Params, *, causal: bool) -> Tensor | None:
        if self.form == "linear":
            return None
        length = like.shape[1]
        distance = torch.arange(0 if causal else 1 - length, max(length, 1), device=like.device)
        index = distance.clamp(-self.max_distance, self.max_distance)
        index = index if causal else index + self.max_distance
        return params["bias"].to(like.dtype)[:, index].exp()
