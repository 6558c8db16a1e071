"""Random feature maps: draws, orthogonal blocks, redrawing and precise projections, which all of them share; and
features of the Gaussian kernel: random Fourier features, dense or fast, and kernel values at centres."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from hecate.checks import Size
from hecate.errors import ConfigError, ShapeError
from hecate.phi.base import FeatureMap, Params, Traits, per_head, project_precisely, project_vjp, sum_to_heads, widened
from hecate.tape.bridge import without_autocast
from hecate.variant import Conflicts

Norms = Literal["chi", "sqrt"]


class RandomMap(FeatureMap):
    """A feature map with frozen random draws. A variant defines `draw`, the draws of one head, unless they are standard
    normal, and their `shapes` unless it draws a single projection.

    Draws are made in float64 on the CPU, head after head, and then cast: one seed gives one map on every dtype and
    device, and the first heads of a map do not depend on how many follow. Without a generator the seed is 0; the global
    random state is neither read nor changed. [PHI-RAND-I1]"""

    def shapes(self, d: int) -> dict[str, tuple[int, ...]]:
        """By default the shape of a projection `w` onto the features."""
        return {"w": (d, self.output_dim(d))}

    def draw(self, d: int, generator: torch.Generator) -> dict[str, Tensor]:
        """Fresh draws for one head: float64 CPU tensors without the head axis; by default standard normal ones."""
        return {name: normal(shape, generator) for name, shape in self.shapes(d).items()}

    def fresh(self, d: int, heads: int, generator: torch.Generator) -> dict[str, Tensor]:
        if d < 1 or heads < 1:
            raise ShapeError(f"{self.kind} needs a width and a head count of at least 1, got {d} and {heads}")
        if generator.device.type != "cpu":
            reason = "so that a seed gives the same map on every device"
            got = f"got a generator on {generator.device}; pass a CPU torch.Generator"
            raise ConfigError(f"{self.kind} draws on the CPU, {reason}, {got}")
        draws = [self.draw(d, generator) for _ in range(heads)]
        return {name: torch.stack([one[name] for one in draws]) for name in draws[0]}


class Projected(RandomMap):
    """Helper for maps of random projections w. A variant has the fields below, wherever they stand among its others."""

    if TYPE_CHECKING:
        num_features: int | None
        orthogonal: bool
        norms: Norms

    def output_dim(self, d: int) -> int:
        return default_width(d) if self.num_features is None else self.num_features

    def draw(self, d: int, generator: torch.Generator) -> dict[str, Tensor]:
        m = self.shapes(d)["w"][1]
        return {"w": projections(d, m, generator, orthogonal=self.orthogonal, norms=self.norms)}


def normal(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Standard normal numbers, in float64 on the CPU."""
    return torch.randn(shape, dtype=torch.float64, device="cpu", generator=generator)


def signs(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """1 or -1 with even chances, in float64 on the CPU."""
    return 2.0 * torch.randint(0, 2, shape, device="cpu", generator=generator).double() - 1


def haar(d: int, generator: torch.Generator) -> Tensor:
    """A Haar-distributed orthogonal `[d, d]`: QR of a Gaussian, the diagonal of R made positive.

    Without the signs Q is not Haar (LAPACK fixes them by convention), which biases every one-sided map.
    References: How to generate random matrices from the classical compact groups (Mezzadri, 2006, arXiv
    math-ph/0609050). [PHI-RAND-D1]
    """
    gaussian, threads = normal((d, d), generator), torch.get_num_threads()
    torch.set_num_threads(1)  # LAPACK's rounding depends on it, so one seed would give other last bits
    try:
        q, r = torch.linalg.qr(gaussian)
    finally:
        torch.set_num_threads(threads)
    return q * torch.where(r.diagonal() < 0, -1.0, 1.0)


def projections(d: int, m: int, generator: torch.Generator, *, orthogonal: bool, norms: Norms = "chi") -> Tensor:
    """m projection vectors as the columns of a `[d, m]` matrix.

    `orthogonal` stacks ceil(m / d) independent Haar blocks and cuts them to m columns; otherwise the directions are
    independent. `norms="chi"` gives lengths of fresh Gaussian vectors, so that each column is marginally N(0, I);
    `"sqrt"` gives all columns the length sqrt(d). [PHI-RAND-D2]"""
    if orthogonal:
        columns = torch.cat([haar(d, generator) for _ in range(-(-m // d))], dim=1)[:, :m]
    else:
        columns = normal((d, m), generator)
        if norms == "chi":
            return columns
        columns = columns / columns.norm(dim=0)
    return columns * (normal((d, m), generator).norm(dim=0) if norms == "chi" else math.sqrt(d))


def default_width(d: int) -> int:
    """The usual number of random features: int(d log d), but never fewer than d."""
    return max(d, int(d * math.log(d)))


class RandomFourier(RandomMap):
    r"""random_fourier: phi(x) = sqrt(2/d_phi) cos(Wx + b), W ~ N(0, 1/sigma^2), b ~ U[0, 2 pi).

    The Gaussian kernel exp(-|x - y|^2 / (2 sigma^2)) in expectation: sigma is the distance within which two keys count
    as similar. `form="paired"` is [cos(Wx), sin(Wx)] / sqrt(m) with d_phi = 2m and no b; at equal width it never has
    the larger variance, and |phi(x)| = 1. `orthogonal` draws W in Haar blocks with chi norms, which lowers the variance
    where the kernel is large. Bounded features keep a delta rule stable for every lr < 1.

    Formula: $\phi(x) = \sqrt{\frac{2}{P}} \cos(W^\top x + b),\quad W_{ij} \sim \mathcal{N}(0, \sigma^{-2}),\quad b_i
    \sim \mathcal{U}[0, 2 \pi)$
    $\phi(x) = \frac{1}{\sqrt{m}} [\cos(W^\top x),\ \sin(W^\top x)] \quad \text{if paired}$
    $\mathrm{E}[\phi(x)^\top \phi(y)] = \exp\left(-\frac{\Vert x - y \Vert^2}{2 \sigma^2}\right)$
    Shapes: x `[..., D]` or `[..., H, D]` -> `[..., d_phi]` (None: 4 D); frozen w `[H, D, d_phi]` and b `[H, d_phi]`, or
    w `[H, D, d_phi / 2]` alone when paired.
    VJP: gx = W^T (-sqrt(2/d_phi) sin(Wx + b) g); paired: gx = W^T (cos(Wx) g_sin - sin(Wx) g_cos) / sqrt(m).
    Traits: is_random, norm_bound 2 (paired: 1). Neither features nor kernel are non-negative.
    Cost: O(D d_phi) multiplications, one cosine per feature.
    Warning: the error of a phase grows with |Wx|: in float32 up to 6e-5 at |x| = 100 and 6e-3 at 1e4. Phases are never
    computed below float32; float64 draws make them float64.
    References: Random Features for Large-Scale Kernel Machines (Rahimi and Recht, 2007); Random Feature Attention (Peng
    et al., 2021, arXiv 2103.02143); Orthogonal Random Features (Yu et al., 2016, arXiv 1610.09072). [PHI-RFF-D1]
    """

    kind: Literal["random_fourier"] = "random_fourier"
    d_phi: Size | None = Field(default=None, gt=0, description="number of features, even when paired; null: 4 D")
    sigma: float = Field(default=0.4, gt=0, description="bandwidth of the Gaussian kernel")
    form: Literal["phased", "paired"] = "phased"
    orthogonal: bool = False
    unit_scale: ClassVar[Mapping[str, Any]] = {"sigma": 1.0}
    widening: ClassVar[int] = 4

    def conflicts(self) -> Conflicts:
        if self.form == "paired" and self.d_phi is not None and self.d_phi % 2:
            even = f"must be even for form 'paired' (a cosine and a sine each), got {self.d_phi}"
            yield ("d_phi",), f"{even}; use {self.d_phi + 1} or form 'phased'"

    def traits(self) -> Traits:
        bound = 1.0 if self.form == "paired" else 2.0
        return Traits(is_random=True, norm_bound=bound, bounded_slope=True, decodes=True)

    def shapes(self, d: int) -> dict[str, tuple[int, ...]]:
        width = self.output_dim(d)
        return {"w": (d, width // 2)} if self.form == "paired" else {"w": (d, width), "b": (width,)}

    def draw(self, d: int, generator: torch.Generator) -> dict[str, Tensor]:
        m = self.shapes(d)["w"][1]
        w = projections(d, m, generator, orthogonal=self.orthogonal) / self.sigma
        if self.form == "paired":
            return {"w": w}
        turns = torch.rand(m, dtype=torch.float64, device="cpu", generator=generator)
        return {"w": w, "b": 2 * math.pi * turns}

    def forward(self, x: Tensor, params: Params) -> tuple[Tensor, tuple[Tensor, ...]]:
        w, *b = self.parameters(params, *self.shapes(x.shape[-1]))
        phase = project_precisely(x, w)
        if self.form == "phased":
            phase = phase + per_head(b[0], x).to(phase)
            features = phase.cos() * math.sqrt(2 / w.shape[-1])
        else:
            features = _paired(phase)
        return features.to(x.dtype), (w, phase)

    def vjp(self, residuals: tuple[Tensor, ...], g: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        w, phase = residuals
        if self.form == "phased":
            gphase = phase.sin() * g * -math.sqrt(2 / w.shape[-1])
        else:
            gphase = _paired_vjp(phase, g)
        return project_precisely(gphase, w.mT).to(g.dtype), {}

    def exact_kernel(self, x: Tensor, y: Tensor) -> Tensor:
        x, y = widened(x), widened(y)
        return (-(x - y).square().sum(-1) / (2 * self.sigma**2)).exp()


def _paired(phase: Tensor) -> Tensor:
    """[cos, sin] / sqrt(m) of m phases."""
    return torch.cat([phase.cos(), phase.sin()], -1) / math.sqrt(phase.shape[-1])


def _paired_vjp(phase: Tensor, g: Tensor) -> Tensor:
    """Cotangent of the phases from that of `_paired`."""
    gcos, gsin = g.chunk(2, -1)
    return (phase.cos() * gsin - phase.sin() * gcos) / math.sqrt(phase.shape[-1])


class SORF(RandomMap):
    r"""sorf: phi(x) = [cos(Wx), sin(Wx)] / sqrt(m), W = sqrt(P) / sigma H S_3 H S_2 H S_1, m rows.

    `random_fourier` (paired) with a product of random signs S and Walsh-Hadamard matrices H in place of a Gaussian
    matrix: D log D operations instead of D^2, 3 bits per row instead of D numbers. P is the smallest power of two from
    D on, x is padded with zeros to it, and ceil(m / P) independent blocks of orthogonal rows of length sqrt(P) are
    stacked. The kernel approximates exp(-|x - y|^2 / (2 sigma^2)), not without bias, as rows are only nearly uniform on
    the sphere: `exact_kernel` is None.

    Formula: $\phi(x) = \frac{1}{\sqrt{m}} [\cos(W x),\ \sin(W x)],\quad W = \frac{\sqrt{n}}{\sigma} H S_3 H S_2 H
    S_1,\quad n = 2^{\lceil \log_2 d \rceil}$
    Shapes: x `[..., D]` or `[..., H, D]` -> `[..., d_phi]`, d_phi = 2 m (None: 4 D); frozen w `[H, D, blocks]` (S_1,
    padding needs no sign) and signs `[H, blocks, 2, P]`.
    VJP: gz = (cos(Wx) g_sin - sin(Wx) g_cos) / sqrt(m); gx = W^T gz, the same steps backwards.
    Traits: is_random, norm_bound 1. Neither features nor kernel are non-negative.
    Cost: O((d_phi + P) log P) additions, one cosine per feature. Measured on one CPU core: four times slower than
    `random_fourier` at D = 64, even at 256, faster at 1024.
    Warning: for D = 1 the kernel is cos((x - y) / sigma); for small D prefer `random_fourier`.
    References: Orthogonal Random Features (Yu et al., 2016, arXiv 1610.09072). [PHI-SORF-D1]
    """

    kind: Literal["sorf"] = "sorf"
    d_phi: Size | None = Field(
        default=None, gt=0, multiple_of=2, description="number of features, cosines and sines; null: 4 D"
    )
    sigma: float = Field(default=1.0, gt=0, description="bandwidth of the Gaussian kernel")
    unit_scale: ClassVar[Mapping[str, Any]] = {"sigma": 1.0}
    widening: ClassVar[int] = 4
    promises = Traits(is_random=True, norm_bound=1.0)

    def shapes(self, d: int) -> dict[str, tuple[int, ...]]:
        padded = 1 << (d - 1).bit_length()
        blocks = -(-self.output_dim(d) // (2 * padded))
        return {"w": (d, blocks), "signs": (blocks, 2, padded)}

    def draw(self, d: int, generator: torch.Generator) -> dict[str, Tensor]:
        return {name: signs(shape, generator) for name, shape in self.shapes(d).items()}

    def forward(self, x: Tensor, params: Params) -> tuple[Tensor, tuple[Tensor, ...]]:
        w, signs = self.parameters(params, "w", "signs")
        d, padded = w.shape[-2], signs.shape[-1]
        if x.shape[-1] != d:
            raise ShapeError(f"expected inputs of width {d}, got {list(x.shape)}")
        wide = widened(x, w)
        first, later = (per_head(item, x).to(wide.dtype) for item in (w.mT, signs))
        z = torch.nn.functional.pad(wide.unsqueeze(-2) * first, (0, padded - d))
        for step in range(2):
            z = walsh_hadamard(z) * later[..., step, :]
        phase = walsh_hadamard(z).flatten(-2)[..., : self.output_dim(d) // 2] * self._length(padded)
        return _paired(phase).to(x.dtype), (phase, w, signs)

    def vjp(self, residuals: tuple[Tensor, ...], g: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        phase, w, signs = residuals
        blocks, padded = signs.shape[1], signs.shape[-1]
        first, later = (per_head(item, g).to(phase) for item in (w.mT, signs))
        gphase = _paired_vjp(phase, g)
        cut = blocks * padded - gphase.shape[-1]
        gz = torch.nn.functional.pad(gphase * self._length(padded), (0, cut))
        gz = walsh_hadamard(gz.unflatten(-1, (blocks, padded)))
        for step in (1, 0):
            gz = walsh_hadamard(gz * later[..., step, :])
        return (gz[..., : w.shape[-2]] * first).sum(-2).to(g.dtype), {}

    def _length(self, padded: int) -> float:
        return math.sqrt(padded) / self.sigma


def walsh_hadamard(x: Tensor) -> Tensor:
    """The orthonormal Walsh-Hadamard transform of `[..., P]`, P a power of two; its own inverse.

    H_P is a Kronecker product of small H: each one transforms the leading digits of the index and moves them to the
    end. Products of 16 x 16 take fewer passes over memory than single sums.
    """
    size = x.shape[-1]
    with without_autocast(x.device.type):
        while size > 1:
            digit = min(size, 16)
            size //= digit
            x = (x.unflatten(-1, (digit, -1)).mT @ _small(digit, x)).flatten(-2)
    return x / math.sqrt(x.shape[-1])


def _small(size: int, like: Tensor) -> Tensor:
    """Sylvester's matrix of 1 and -1, built by doubling."""
    h = torch.ones(1, 1, dtype=like.dtype, device=like.device)
    while h.shape[0] < size:
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)], 0)
    return h


class Nystrom(RandomMap):
    r"""nystrom: phi(x) = k(x, C) R, R R^T = (K_CC + eps I)^(-1), k Gaussian of bandwidth sigma.

    C holds num_centres points, and K_CC their kernel values. phi(x).phi(y) is the best approximation of k(x, y) =
    exp(-|x - y|^2 / (2 sigma^2)) that the centres allow: nearly exact where x or y is a centre, too small elsewhere,
    close to 0 far from all of them. Few centres in the right place beat many random features. R is triangular, from
    Cholesky. Centres are drawn from N(0, spread^2) once, or learned from there on.

    Formula: $\phi(x) = R^\top \kappa(C, x),\quad R R^\top = (\kappa(C, C) + \varepsilon I)^{-1}$
    $\kappa(c, x) = \exp\left(-\frac{\Vert x - c \Vert^2}{2 \sigma^2}\right)$
    Shapes: x `[..., D]` or `[..., H, D]` -> `[..., num_centres]` (None: 4 D); w `[H, D, num_centres]`, a centre per
    column, frozen or learned.
    VJP: with k = k(x, C): gk = g R^T, gR = k^T g; ga = gk k / sigma^2, gx = ga W^T - x sum(ga), gW = x^T ga - W
    sum(ga). Through R: gK_CC = -R low((R^T gR)^T) R^T, low the lower triangle with half the diagonal, then as for x.
    Traits: is_random unless centres are learned; norm_bound 1. The kernel has either sign.
    Cost: O(D num_centres + num_centres^2), and O(num_centres^3) once per call, in float64.
    Warning: eps bounds how far rounding errors grow, by 1 / sqrt(eps): lower it in float64 only. At a centre the kernel
    is too small by up to sqrt(eps) / 2. In float32 kernel values are off by about 1e-7 |x|^2 / sigma^2.
    References: Using the Nystrom Method to Speed Up Kernel Machines (Williams and Seeger, 2001). [PHI-NYSTROM-D1]
    """

    kind: Literal["nystrom"] = "nystrom"
    num_centres: int | None = Field(default=None, gt=0, le=1 << 14, description="d_phi; null: 4 D")
    sigma: float = Field(default=1.0, gt=0, description="bandwidth of the Gaussian kernel")
    centres: Literal["drawn", "learned"] = "drawn"
    spread: float = Field(default=1.0, gt=0, description="deviation of a centre's components")
    eps: float = Field(default=1e-4, gt=0, description="ridge; a kernel value of a point is 1")
    widening: ClassVar[int] = 4

    def output_dim(self, d: int) -> int:
        return super().output_dim(d) if self.num_centres is None else self.num_centres

    def traits(self) -> Traits:
        return Traits(is_random=self.centres == "drawn", norm_bound=1.0)

    def draw(self, d: int, generator: torch.Generator) -> dict[str, Tensor]:
        return {"w": self.spread * normal((d, self.output_dim(d)), generator)}

    def forward(self, x: Tensor, params: Params) -> tuple[Tensor, tuple[Tensor, ...]]:
        (w,) = self.parameters(params, "w")
        root, between = self._root(w)
        products = project_precisely(x, w)
        wide, half = x.to(products), w.to(products).square().sum(-2) / 2
        exponents = products - wide.square().sum(-1, keepdim=True) / 2 - per_head(half, x)
        kernel = (exponents / self.sigma**2).exp()
        features = project_precisely(kernel, root.to(kernel))
        return features.to(x.dtype), (wide, w, kernel, root, between)

    def vjp(self, residuals: tuple[Tensor, ...], g: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        x, w, kernel, root, between = residuals
        centres = w.to(x)
        gkernel, groot = project_vjp(kernel, root.to(x), g.to(x))
        gexponents = gkernel * kernel / self.sigma**2
        gx, gw = project_vjp(x, centres, gexponents)
        gx = (gx - x * gexponents.sum(-1, keepdim=True)).to(g.dtype)
        if self.is_random:
            return gx, {}
        total = sum_to_heads(gexponents, w.shape[0]).unsqueeze(-2)
        return gx, {"w": (gw - centres * total + self._root_vjp(w, between, root, groot)).to(w)}

    def _root(self, w: Tensor) -> tuple[Tensor, Tensor]:
        """R and K_CC `[H, num_centres, num_centres]`, in float64."""
        w = w.double()
        half = w.square().sum(-2) / 2
        exponents = w.mT @ w - half.unsqueeze(-1) - half.unsqueeze(-2)
        between = (exponents / self.sigma**2).exp()
        eye = torch.eye(w.shape[-1], dtype=w.dtype, device=w.device)
        lower = torch.linalg.cholesky(between + self.eps * eye)
        return torch.linalg.solve_triangular(lower.mT, eye, upper=True), between

    def _root_vjp(self, w: Tensor, between: Tensor, root: Tensor, groot: Tensor) -> Tensor:
        """Cotangent of the centres from that of R."""
        inner = (root.mT @ groot.to(root)).mT.tril()
        inner = inner - inner.diagonal(dim1=-2, dim2=-1).diag_embed() / 2
        gbetween = -root @ inner @ root.mT
        weights = (gbetween + gbetween.mT) * between / self.sigma**2
        w = w.double()
        return (w @ weights - w * weights.sum(-2, keepdim=True)).to(groot)
