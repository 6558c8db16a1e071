"""Maps of a key's components: each alone, or its positive and negative parts side by side, multiplied, and turned by
the token's position."""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from hecate.checks import Count, Size
from hecate.errors import ConfigError
from hecate.late import put_off
from hecate.phi.base import FeatureMap, Params, Traits, position_of, widened
from hecate.tape import Block
from hecate.tape.bridge import can_inspect, is_traced, waits

_POSITIVE = Traits(non_negative=True, kernel_non_negative=True, componentwise=True)


class Elementwise(FeatureMap):
    """Helper for maps that act on each component alone: a variant defines `value` and `pull`.

    Both are called with float32 or better; features and cotangents are rounded once, to the dtype of x."""

    @abstractmethod
    def value(self, x: Tensor) -> Tensor:
        """phi, componentwise."""

    @abstractmethod
    def pull(self, x: Tensor, value: Tensor, g: Tensor) -> Tensor:
        """The cotangent of x from that of its value; at a kink, for the side that the docstring names."""

    def forward(self, x: Tensor, params: Params) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        wide = widened(x)
        value = self.value(wide)
        return value.to(x.dtype), (wide, value)

    def vjp(self, residuals: tuple[Tensor, Tensor], g: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return self.pull(*residuals, g.to(residuals[0].dtype)).to(g.dtype), {}


# A program without blocks, so that autograd records nothing. A view, so that cotangents are summed before they reach x.
_SAME = Block("phi.identity", lambda x: ((x.view_as(x),), None), lambda _, g: (g,), lambda run, x: (x,))


class Identity(FeatureMap):
    r"""identity: phi(x) = x.

    The plain key space of DeltaNet, Titans and their relatives; copy-free.

    Formula: $\phi(x) = x$
    Shapes: x `[..., D]` -> `[..., D]`.
    VJP: gx = g.
    Traits: odd, degree 1.
    Cost: none.
    References: Linear Transformers Are Secretly Fast Weight Programmers (Schlag et al., 2021,
    arXiv 2102.11174). [PHI-ID-D1]
    """

    kind: Literal["identity"] = "identity"
    promises = Traits(parity="odd", degree=1, componentwise=True, rising="everywhere", bounded_slope=True)

    def forward(self, x: Tensor, params: Params) -> tuple[Tensor, None]:
        return x, None

    def vjp(self, residuals: None, g: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return g, {}

    def block(self, params: Params) -> tuple[Block, tuple[Tensor, ...]]:
        return _SAME, ()

    def exact_kernel(self, x: Tensor, y: Tensor) -> Tensor:
        return (x * y).sum(-1)


class ELU(FeatureMap):
    r"""elu: phi(x) = x + 1 for x > 0, exp(x) otherwise.

    The map of the linear transformer, strictly positive down to the underflow of exp: `elu(x) + 1` cancels to 0 below
    about x = -17 in float32 and -6.25 in bfloat16. Near zero it is almost constant: small inputs are all alike.

    Formula: $\phi(x)_i = \max(x_i, 0) + \exp(\min(x_i, 0))$
    Shapes: x `[..., D]` -> `[..., D]`.
    VJP: gx = g for x > 0, g exp(x) otherwise; the derivative at 0 is 1 from both sides, the second is not continuous
    there.
    Traits: non_negative, kernel_non_negative.
    Cost: O(D).
    References: Transformers are RNNs (Katharopoulos et al., 2020, arXiv 2006.16236). [PHI-ELU-D1]"""

    kind: Literal["elu"] = "elu"
    promises = _POSITIVE._replace(rising="everywhere", bounded_slope=True)

    def forward(self, x: Tensor, params: Params) -> tuple[Tensor, Tensor]:
        # For x > 0 the tail is 1: no choice between branches, neither here nor in the derivative.
        tail = x.clamp(max=0).exp()
        return torch.relu(x) + tail, tail

    def vjp(self, residuals: Tensor, g: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return g * residuals, {}


class Exp(Elementwise):
    r"""exp: phi(x) = exp(x - shift), componentwise.

    Strictly positive and sharp. Its kernel is sum_i exp(x_i + y_i - 2 shift), which is not exp(x.y): for an
    approximation of softmax use `taylor` or `favor`. The shift, one for all keys and queries, leaves normalised weights
    as they are and moves the range: features are finite for x <= shift + 88.7 in float32 and bfloat16, shift + 11.0 in
    float16, shift + 709.7 in float64. Beyond it they are infinite, visibly so: a clamp would change values and stop
    gradients, a maximum per key would change attention weights. To bound inputs compose with `normalise`.

    Formula: $\phi(x)_i = \exp(x_i - \mathrm{shift})$
    Shapes: x `[..., D]` -> `[..., D]`.
    VJP: gx = exp(x - shift) g.
    Traits: non_negative, kernel_non_negative.
    Cost: O(D).
    Warning: |phi(x)|^2 grows exponentially; delta-type rules need normalised features.
    Origin: a variant known from tutorials on linear attention. [PHI-EXP-D1]
    """

    kind: Literal["exp"] = "exp"
    shift: float = Field(default=0.0)
    promises = _POSITIVE._replace(rising="everywhere")

    def value(self, x: Tensor) -> Tensor:
        return (x - self.shift).exp() if self.shift else x.exp()

    def pull(self, x: Tensor, value: Tensor, g: Tensor) -> Tensor:
        return g * value

    def exact_kernel(self, x: Tensor, y: Tensor) -> Tensor:
        return (x + y - 2 * self.shift).exp().sum(-1)


class ReLU(Elementwise):
    r"""relu: phi(x) = max(x, 0) + shift.

    Sparse non-negative features. Without a shift a query may have all-zero features, and a read divided by phi(q).z is
    then 0/0; a small one (1e-3 is usual) makes every feature positive, but revives no gradient for x < 0.

    Formula: $\phi(x)_i = \max(x_i, 0) + \mathrm{shift}$
    Shapes: x `[..., D]` -> `[..., D]`.
    VJP: gx = g for x > 0, else 0; the derivative at 0 is taken as 0.
    Traits: non_negative, kernel_non_negative; degree 1 when shift = 0.
    Cost: O(D).
    References: Rethinking Attention with Performers (Choromanski et al., 2021, arXiv 2009.14794). [PHI-RELU-D1]
    """

    kind: Literal["relu"] = "relu"
    shift: float = Field(default=0.0, ge=0)

    def traits(self) -> Traits:
        degree = 1.0 if self.shift == 0 else None
        return _POSITIVE._replace(degree=degree, rising="odd_part", bounded_slope=True)

    def value(self, x: Tensor) -> Tensor:
        return torch.relu(x) + self.shift if self.shift else torch.relu(x)

    def pull(self, x: Tensor, value: Tensor, g: Tensor) -> Tensor:
        return torch.ops.aten.threshold_backward(g, x, 0)


class SquaredReLU(Elementwise):
    r"""squared_relu: phi(x) = max(x, 0)^2.

    Sharper than relu, and no approximation of softmax. Half of the features are exactly 0 for symmetric inputs.

    Formula: $\phi(x)_i = \max(x_i, 0)^2$
    Shapes: x `[..., D]` -> `[..., D]`.
    VJP: gx = 2 max(x, 0) g; continuous at 0, the second derivative is not.
    Traits: non_negative, kernel_non_negative, degree 2.
    Cost: O(D).
    Warning: |phi(x)|^2 grows with the fourth power of x; normalise keys for delta-type rules.
    References: Primer: Searching for Efficient Transformers for Language Modeling (So et al., 2021, arXiv 2109.08668)
    for the activation. [PHI-SQRELU-D1]
    """

    kind: Literal["squared_relu"] = "squared_relu"
    promises = _POSITIVE._replace(degree=2, rising="odd_part")

    def value(self, x: Tensor) -> Tensor:
        return torch.relu(x).square()

    def pull(self, x: Tensor, value: Tensor, g: Tensor) -> Tensor:
        return g * (2 * torch.relu(x))


class LeakyReLU(Elementwise):
    r"""leaky_relu: phi(x) = x for x > 0, slope x otherwise.

    A relu that keeps the sign and a gradient of every component, and so all of x. It does not keep relu's promise:
    kernels have either sign, and one in eight is negative for Gaussian keys of width 8.

    Formula: $\phi(x)_i = \max(x_i, 0) + \mathrm{slope}\, \min(x_i, 0)$
    Shapes: x `[..., D]` -> `[..., D]`.
    VJP: gx = g for x > 0, slope g otherwise; the derivative at 0 is taken as slope.
    Traits: degree 1; non_negative, kernel_non_negative when slope = 0, where it is `relu`.
    Cost: O(D).
    Warning: a sum normaliser refuses it.
    References: Rectifier Nonlinearities Improve Neural Network Acoustic Models (Maas et al., 2013) for the activation;
    tutorials on linear attention list it among their maps. [PHI-LEAKY-D1]
    """

    kind: Literal["leaky_relu"] = "leaky_relu"
    slope: float = Field(default=0.01, ge=0, lt=1)

    def traits(self) -> Traits:
        signed = Traits(degree=1, componentwise=True, rising="everywhere", bounded_slope=True)
        return _POSITIVE._replace(degree=1, rising="odd_part", bounded_slope=True) if self.slope == 0 else signed

    def value(self, x: Tensor) -> Tensor:
        return torch.nn.functional.leaky_relu(x, self.slope)

    def pull(self, x: Tensor, value: Tensor, g: Tensor) -> Tensor:
        return torch.ops.aten.leaky_relu_backward(g, x, self.slope, False)


class LeakyReLUSquared(Elementwise):
    r"""leaky_relu_squared: phi(x) = (x + shift)^2 for x > 0, (slope x + shift)^2 otherwise.

    A sharp non-negative map that keeps a gradient for negative inputs.

    Formula: $\phi(x)_i = \left(\max(x_i, 0) + \mathrm{slope}\, \min(x_i, 0) + \mathrm{shift}\right)^2$
    Shapes: x `[..., D]` -> `[..., D]`.
    VJP: gx = 2 (x + shift) g for x > 0, 2 slope (slope x + shift) g otherwise; at 0 the second holds.
    Traits: non_negative, kernel_non_negative; degree 2 when shift = 0.
    Cost: O(D).
    Warning: not monotone: 0 at x = -shift/slope (-5 by default), below it rises again.
    Origin: a variant known from tutorials on linear attention. [PHI-LEAKY2-D1]
    """

    kind: Literal["leaky_relu_squared"] = "leaky_relu_squared"
    slope: float = Field(default=0.01, ge=0, lt=1)
    shift: float = Field(default=0.05, ge=0)

    def traits(self) -> Traits:
        degree = 2.0 if self.shift == 0 else None
        return _POSITIVE._replace(degree=degree, rising="odd_part")

    def value(self, x: Tensor) -> Tensor:
        return self._root(x).square()

    def pull(self, x: Tensor, value: Tensor, g: Tensor) -> Tensor:
        outer = 2 * self._root(x) * g
        return torch.ops.aten.leaky_relu_backward(outer, x, self.slope, False)

    def _root(self, x: Tensor) -> Tensor:
        return torch.nn.functional.leaky_relu(x, self.slope) + self.shift


_DEPTH = 0.1699712075  # -min of x Phi(x) = 0.16997120747990..., at x = -0.75179, rounded up


class GELUShifted(Elementwise):
    r"""gelu_shifted: phi(x) = x Phi(x) + shift, Phi the standard normal distribution function.

    GELU in its exact erf form, lifted by a constant. Its minimum is shift - 0.16997 at x = -0.7518, so the default
    shift keeps every feature positive; a smaller one than 0.16997 is allowed and declares no sign.

    Formula: $\phi(x)_i = \frac{1}{2} x_i \left(1 + \mathrm{erf}\left(\frac{x_i}{\sqrt{2}}\right)\right) +
    \mathrm{shift}$
    Shapes: x `[..., D]` -> `[..., D]`.
    VJP: gx = (Phi(x) + x density(x)) g.
    Traits: non_negative and kernel_non_negative when shift >= 0.16997121.
    Cost: O(D).
    Warning: not monotone: it falls until x = -0.7518 and rises after it.
    References: Gaussian Error Linear Units (Hendrycks and Gimpel, 2016, arXiv 1606.08415). [PHI-GELU-D1]
    """

    kind: Literal["gelu_shifted"] = "gelu_shifted"
    shift: float = Field(default=0.2)

    def traits(self) -> Traits:
        sure = self.shift >= _DEPTH
        return _POSITIVE._replace(non_negative=sure, kernel_non_negative=sure, rising="odd_part", bounded_slope=True)

    def value(self, x: Tensor) -> Tensor:
        return torch.nn.functional.gelu(x) + self.shift

    def pull(self, x: Tensor, value: Tensor, g: Tensor) -> Tensor:
        return torch.ops.aten.gelu_backward(g, x)


class Softplus(Elementwise):
    r"""softplus: phi(x) = log(1 + exp(beta x)) / beta.

    A smooth, strictly positive relu; beta sets how sharp the bend is. Evaluated without a threshold, so it is positive
    down to the underflow of exp(beta x) and has all derivatives everywhere.

    Formula: $\phi(x)_i = \frac{1}{\beta} \log(1 + \exp(\beta x_i))$
    Shapes: x `[..., D]` -> `[..., D]`.
    VJP: gx = sigmoid(beta x) g.
    Traits: non_negative, kernel_non_negative.
    Cost: O(D).
    Origin: a common activation; no source proposes it for linear attention. [PHI-SOFTPLUS-D1]
    """

    kind: Literal["softplus"] = "softplus"
    beta: float = Field(default=1.0, gt=0)
    promises = _POSITIVE._replace(rising="everywhere", bounded_slope=True)

    def value(self, x: Tensor) -> Tensor:
        # torch's softplus returns x itself above a threshold, which drops exp(-beta x).
        return -torch.nn.functional.logsigmoid(-self.beta * x) / self.beta

    def pull(self, x: Tensor, value: Tensor, g: Tensor) -> Tensor:
        return g * torch.sigmoid(self.beta * x)


class Sigmoid(Elementwise):
    r"""sigmoid: phi(x) = 1 / (1 + exp(-x)), componentwise.

    Strictly positive and bounded: a sum normaliser is safe, and |phi(x)|^2 < D.

    Formula: $\phi(x)_i = \frac{1}{1 + \exp(-x_i)}$
    Shapes: x `[..., D]` -> `[..., D]`.
    VJP: gx = sigmoid(x) sigmoid(-x) g.
    Traits: non_negative, kernel_non_negative.
    Cost: O(D).
    Warning: every kernel of small inputs is close to D / 4: compare `elu`, which is as flat.
    Origin: a common activation; no source proposes it for linear attention. [PHI-SIGMOID-D1]
    """

    kind: Literal["sigmoid"] = "sigmoid"
    promises = _POSITIVE._replace(rising="everywhere", bounded_slope=True)

    def value(self, x: Tensor) -> Tensor:
        # Torch rounds the last bit of strided tensors differently.
        return torch.sigmoid(x.contiguous())

    def pull(self, x: Tensor, value: Tensor, g: Tensor) -> Tensor:
        # 1 - value would cancel.
        return g * value * self.value(-x)


class Tanh(Elementwise):
    r"""tanh: phi(x) = tanh(x), componentwise.

    Bounded and odd: it keeps signs and clips outliers, and |phi(x)|^2 < D keeps a delta rule stable for lr < 2 / D.

    Formula: $\phi(x)_i = \tanh(x_i)$
    Shapes: x `[..., D]` -> `[..., D]`.
    VJP: gx = (1 - tanh(x)^2) g.
    Traits: odd.
    Cost: O(D).
    Warning: components beyond 3 all look alike and pass next to no gradient.
    Origin: a common activation; fast weight programmers use it for keys. [PHI-TANH-D1]
    """

    kind: Literal["tanh"] = "tanh"
    promises = Traits(parity="odd", componentwise=True, rising="everywhere", bounded_slope=True)

    def value(self, x: Tensor) -> Tensor:
        return torch.tanh(x)

    def pull(self, x: Tensor, value: Tensor, g: Tensor) -> Tensor:
        return torch.ops.aten.tanh_backward(g, value)


class CReLU(FeatureMap):
    r"""crelu: phi(x) = [max(x, 0), max(-x, 0)].

    Non-negative without losing anything: x is the difference of the halves, and unit keys stay unit keys.

    Formula: $\phi(x) = [\max(x, 0),\ \max(-x, 0)]$
    Shapes: x `[..., D]` -> `[..., 2 D]`.
    VJP: gx = g_up for x > 0, -g_down for x < 0, 0 at x = 0.
    Traits: non_negative, kernel_non_negative, degree 1.
    Cost: O(D).
    Warning: keys of opposite orthants have a kernel of exactly 0: a sum normaliser may divide by 0.
    References: Understanding and Improving Convolutional Neural Networks via Concatenated Rectified Linear Units (Shang
    et al., 2016, arXiv 1603.05201) for the activation. [PHI-CRELU-D1]
    """

    kind: Literal["crelu"] = "crelu"
    widening: ClassVar[int] = 2
    promises = Traits(non_negative=True, kernel_non_negative=True, degree=1)

    def forward(self, x: Tensor, params: Params) -> tuple[Tensor, Tensor]:
        features = halves(x)
        return features, features

    def vjp(self, residuals: Tensor, g: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return halves_vjp(residuals, g), {}


def halves(x: Tensor) -> Tensor:
    """The positive and the negative part, side by side: `[..., 2 D]`."""
    return torch.cat([torch.relu(x), torch.relu(-x)], -1)


def halves_vjp(y: Tensor, g: Tensor) -> Tensor:
    """Cotangent of x from that of `y = halves(x)`; 0 at the kink."""
    up, down = torch.ops.aten.threshold_backward(g, y, 0).chunk(2, -1)
    return up - down


class DPFP(FeatureMap):
    r"""dpfp: phi(x) = [y * roll(y, 1), ..., y * roll(y, nu)], y = [relu(x), relu(-x)].

    Sparse products of rectified components: orthants of key space get features of their own, without any parameter.

    Formula: $\phi(x) = [y \odot \mathrm{roll}(y, 1),\, \ldots,\, y \odot \mathrm{roll}(y, \nu)]$
    $y = [\max(x, 0),\ \max(-x, 0)],\quad \mathrm{roll}(y, j)_i = y_{i-j}$
    Shapes: x `[..., D]` -> `[..., 2 D nu]`; `roll(y, j)[i] = y[i - j]`.
    VJP: gy = sum_j (g_j roll(y, j) + roll(g_j y, -j)), gx = gy[:D] for x > 0, -gy[D:] for x < 0, 0 at x = 0.
    Traits: non_negative, kernel_non_negative, degree 2.
    Cost: O(D nu).
    Warning: |phi(x)|^2 grows with the fourth power of x, so normalise features for delta-type rules. For small D all
    features may be 0 (always for D = 1). The negative half is relu(-x): an implementation with -relu(x) loses the sign
    of x and half the rank. nu above D repeats products in other places.
    References: Linear Transformers Are Secretly Fast Weight Programmers (Schlag et al., 2021, arXiv 2102.11174).
    [PHI-DPFP-D1]
    """

    kind: Literal["dpfp"] = "dpfp"
    nu: Size = Field(default=1, ge=1)
    promises = Traits(non_negative=True, kernel_non_negative=True, degree=2)

    def output_dim(self, d: int) -> int:
        if self.nu > 2 * d - 1:
            wanted = f"must be at most 2 d - 1 = {2 * d - 1} for inputs of width {d}, got {self.nu}"
            raise ConfigError(f"{wanted}; a roll by 2 d is none, and larger ones repeat the first", ("nu",))
        return 2 * d * self.nu

    def forward(self, x: Tensor, params: Params) -> tuple[Tensor, tuple[Tensor, list[Tensor]]]:
        self.output_dim(x.shape[-1])
        y = halves(widened(x))
        rolled = [y.roll(j, -1) for j in range(1, self.nu + 1)]
        products = [y * other for other in rolled]
        return torch.cat(products, -1).to(x.dtype), (y, rolled)

    def vjp(self, residuals: tuple[Tensor, list[Tensor]], g: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        y, rolled = residuals
        parts = g.to(y.dtype).chunk(self.nu, -1)
        gy = (parts[0] * y).roll(-1, -1)
        for j, gj in enumerate(parts[1:], start=2):
            gy = gy + (gj * y).roll(-j, -1)
        for gj, other in zip(parts, rolled, strict=True):
            gy = torch.addcmul(gy, gj, other)
        return halves_vjp(y, gy).to(g.dtype), {}


class CosFormer(FeatureMap):
    r"""cosformer: phi(x, i) = [max(x, 0) cos(pi i / 2M), max(x, 0) sin(pi i / 2M)], M = max_length.

    The kernel relu(q).relu(k) cos(pi (i - j) / 2M) prefers recent keys: it falls from 1 to 0 as the distance i - j goes
    from 0 to M. Positions run from 0 to M, as beyond it the kernel would be negative; every reset starts again from 0.

    Formula: $\phi(x, i) = \left[\max(x, 0) \cos\frac{\pi i}{2 L},\ \max(x, 0) \sin\frac{\pi i}{2 L}\right],\quad L =
    \mathrm{max\_length}$
    Shapes: x `[..., D]` -> `[..., 2 D]`; position `[...]` or what broadcasts to it.
    VJP: gx = g_cos cos(pi i / 2M) + g_sin sin(pi i / 2M) for x > 0, else 0.
    Traits: non_negative, kernel_non_negative, degree 1, needs_position.
    Cost: O(D).
    Warning: a position beyond M raises ConfigError, or gives NaN where values cannot be read, as under torch.compile.
    Keys at distance M, and keys without a common positive entry, have a kernel of exactly 0.
    References: cosFormer: Rethinking Softmax in Attention (Qin et al., 2022, arXiv 2202.08791). [PHI-COSFORMER-D1]
    """

    kind: Literal["cosformer"] = "cosformer"
    max_length: Count = Field(default=2048, gt=0, description="M, the largest position")
    widening: ClassVar[int] = 2
    promises = Traits(non_negative=True, kernel_non_negative=True, degree=1, needs_position=True)

    def forward(self, x: Tensor, params: Params) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
        rectified = widened(torch.relu(x))
        cos, sin = self._turn(position_of(self.kind, x, params), rectified.dtype)
        features = torch.cat([rectified * cos, rectified * sin], -1)
        return features.to(x.dtype), (x, cos, sin)

    def vjp(self, residuals: tuple[Tensor, Tensor, Tensor], g: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        x, cos, sin = residuals
        g_cos, g_sin = g.to(cos.dtype).chunk(2, -1)
        rectified = torch.addcmul(g_cos * cos, g_sin, sin).to(x.dtype)
        return torch.ops.aten.threshold_backward(rectified, x, 0), {}

    def _refuse(self, ends: Tensor) -> None:
        low, high = ends.tolist()
        if low < 0 or high > self.max_length:
            takes = f"has max_length={self.max_length} and takes the positions 0..{self.max_length}"
            cure = "raise max_length or reset the memory earlier"
            raise ConfigError(f"feature map 'cosformer' {takes}, got {int(low)}..{int(high)}; {cure}")

    def _turn(self, position: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        inside = (position >= 0) & (position <= self.max_length)
        if can_inspect(inside) and inside.numel():
            if waits(inside) and not is_traced(inside):
                put_off(torch.stack(position.aminmax()), self._refuse)
            elif not bool(inside.all()):
                self._refuse(torch.stack(position.aminmax()))
        step = 0.5 * math.pi / self.max_length
        ahead, behind = (
            torch.where(inside, steps.to(dtype) * step, math.nan).unsqueeze(-1)
            for steps in (position, self.max_length - position)
        )
        # cos(a) as sin(pi/2 - a): no rounding makes it negative at the end of the quarter turn.
        return behind.sin(), ahead.sin()
