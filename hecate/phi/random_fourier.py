"""Random Fourier features, by a dense projection and by a fast structured one."""

from __future__ import annotations

import math
from typing import Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from hecate.checks import Size
from hecate.errors import ConfigError, ShapeError
from hecate.phi.base import Params, Traits, compute_dtype, per_head
from hecate.phi.random import RandomMap, project_precisely, projections
from hecate.tape.bridge import without_autocast


class RandomFourier(RandomMap):
    """random_fourier: phi(x) = sqrt(2/d_phi) cos(Wx + b), W ~ N(0, 1/sigma^2), b ~ U[0, 2 pi).

    The Gaussian kernel exp(-|x - y|^2 / (2 sigma^2)) in expectation: sigma is the distance within which two keys count
    as alike. `form="paired"` is [cos(Wx), sin(Wx)] / sqrt(m) with d_phi = 2m and no b; at equal width it never has the
    larger variance, and |phi(x)| = 1. `orthogonal` draws W in Haar blocks with chi norms, which lowers the variance
    where the kernel is large. Bounded features keep a delta rule stable for every lr < 1.

    Shapes: x `[..., D]` or `[..., H, D]` -> `[..., d_phi]`; frozen w `[H, D, d_phi]` and b `[H, d_phi]`, or w `[H, D,
    d_phi / 2]` alone when paired.
    VJP: gx = W^T (-sqrt(2/d_phi) sin(Wx + b) g); paired: gx = W^T (cos(Wx) g_sin - sin(Wx) g_cos) / sqrt(m).
    Traits: is_random, norm_bound 2 (paired: 1). Neither features nor kernel are non-negative.
    Cost: O(D d_phi) multiplications, one cosine per feature.
    Warning: the error of a phase grows with |Wx|: in float32 up to 6e-5 at |x| = 100 and 6e-3 at 1e4. Phases are never
    computed below float32; float64 draws make them float64.
    References: Random Features for Large-Scale Kernel Machines (Rahimi and Recht, 2007); Random Feature Attention (Peng
    et al., 2021, arXiv 2103.02143); Orthogonal Random Features (Yu et al., 2016, arXiv 1610.09072). [PHI-RFF-D1]
    """

    kind: Literal["random_fourier"] = "random_fourier"
    d_phi: Size = Field(gt=0, description="number of features; even when paired")
    sigma: float = Field(default=1.0, gt=0, description="bandwidth of the Gaussian kernel")
    form: Literal["phased", "paired"] = "phased"
    orthogonal: bool = False

    @model_validator(mode="after")
    def _even_pairs(self) -> Self:
        if self.form == "paired" and self.d_phi % 2:
            raise ConfigError(
                f"must be even for form 'paired' (a cosine and a sine each), got {self.d_phi}; "
                f"use {self.d_phi + 1} or form 'phased'",
                ("d_phi",),
            )
        return self

    def traits(self) -> Traits:
        bound = 1.0 if self.form == "paired" else 2.0
        return Traits(is_random=True, norm_bound=bound, bounded_slope=True, decodes=True)

    def shapes(self, d: int) -> dict[str, tuple[int, ...]]:
        if self.form == "paired":
            return {"w": (d, self.d_phi // 2)}
        return {"w": (d, self.d_phi), "b": (self.d_phi,)}

    def draw(self, d: int, generator: torch.Generator) -> dict[str, Tensor]:
        m = self.shapes(d)["w"][1]
        w = projections(d, m, generator, orthogonal=self.orthogonal) / self.sigma
        if self.form == "paired":
            return {"w": w}
        turns = torch.rand(m, dtype=torch.float64, device="cpu", generator=generator)
        return {"w": w, "b": 2 * math.pi * turns}

    def forward(self, x: Tensor, params: Params) -> tuple[Tensor, tuple[Tensor, ...]]:
        w = self.drawn(params, "w")
        phase = project_precisely(x, w)
        if self.form == "phased":
            b = self.drawn(params, "b").to(phase)
            phase = phase + per_head(b, x)
            features = phase.cos() * math.sqrt(2 / self.d_phi)
        else:
            features = _paired(phase)
        return features.to(x.dtype), (w, phase)

    def vjp(self, residuals: tuple[Tensor, ...], g: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        w, phase = residuals
        if self.form == "phased":
            gphase = phase.sin() * g * -math.sqrt(2 / self.d_phi)
        else:
            gphase = _paired_vjp(phase, g)
        return project_precisely(gphase, w.mT).to(g.dtype), {}

    def exact_kernel(self, x: Tensor, y: Tensor) -> Tensor:
        x, y = x.to(compute_dtype(x)), y.to(compute_dtype(y))
        return (-(x - y).square().sum(-1) / (2 * self.sigma**2)).exp()


def _paired(phase: Tensor) -> Tensor:
    """[cos, sin] / sqrt(m) of m phases."""
    return torch.cat([phase.cos(), phase.sin()], -1) / math.sqrt(phase.shape[-1])


def _paired_vjp(phase: Tensor, g: Tensor) -> Tensor:
    """Cotangent of the phases from that of `_paired`."""
    gcos, gsin = g.chunk(2, -1)
    return (phase.cos() * gsin - phase.sin() * gcos) / math.sqrt(phase.shape[-1])


class SORF(RandomMap):
    """sorf: phi(x) = [cos(Wx), sin(Wx)] / sqrt(m), W = sqrt(P) / sigma H S_3 H S_2 H S_1, m rows.

    `random_fourier` (paired) with a product of random signs S and Walsh-Hadamard matrices H in place of a Gaussian
    matrix: D log D operations instead of D^2, 3 bits per row instead of D numbers. P is the smallest power of two from
    D on, x is padded with zeros to it, and ceil(m / P) independent blocks are stacked. The rows of a block are
    orthogonal and have length sqrt(P).

    The kernel approximates exp(-|x - y|^2 / (2 sigma^2)) and, unlike those of the other random maps, not without bias,
    as rows are only nearly uniform on the sphere: `exact_kernel` is None.

    Shapes: x `[..., D]` or `[..., H, D]` -> `[..., d_phi]`, d_phi = 2 m; frozen w `[H, D, blocks]` (S_1, padding needs
    no sign) and signs `[H, blocks, 2, P]`.
    VJP: gz = (cos(Wx) g_sin - sin(Wx) g_cos) / sqrt(m); gx = W^T gz, the same steps backwards.
    Traits: is_random, norm_bound 1. Neither features nor kernel are non-negative.
    Cost: O((d_phi + P) log P) additions, one cosine per feature. Measured on one CPU core: four times slower than
    `random_fourier` at D = 64, even at 256, faster at 1024.
    Warning: for D = 1 the kernel is cos((x - y) / sigma); for small D prefer `random_fourier`.
    References: Orthogonal Random Features (Yu et al., 2016, arXiv 1610.09072). [PHI-SORF-D1]
    """

    kind: Literal["sorf"] = "sorf"
    d_phi: Size = Field(gt=0, multiple_of=2, description="number of features: cosines and sines")
    sigma: float = Field(default=1.0, gt=0, description="bandwidth of the Gaussian kernel")
    promises = Traits(is_random=True, norm_bound=1.0)

    def shapes(self, d: int) -> dict[str, tuple[int, ...]]:
        padded = _padded(d)
        blocks = -(-self.d_phi // (2 * padded))
        return {"w": (d, blocks), "signs": (blocks, 2, padded)}

    def draw(self, d: int, generator: torch.Generator) -> dict[str, Tensor]:
        def signs(*shape: int) -> Tensor:
            drawn = torch.randint(0, 2, shape, device="cpu", generator=generator)
            return 2.0 * drawn.double() - 1

        return {name: signs(*shape) for name, shape in self.shapes(d).items()}

    def forward(self, x: Tensor, params: Params) -> tuple[Tensor, tuple[Tensor, ...]]:
        w, signs = self.drawn(params, "w"), self.drawn(params, "signs")
        d, padded = w.shape[-2], signs.shape[-1]
        if x.shape[-1] != d:
            raise ShapeError(f"expected inputs of width {d}, got {list(x.shape)}")
        dtype = torch.promote_types(compute_dtype(x), w.dtype)
        first, later = (per_head(item, x).to(dtype) for item in (w.mT, signs))
        z = torch.nn.functional.pad(x.to(dtype).unsqueeze(-2) * first, (0, padded - d))
        for step in range(2):
            z = walsh_hadamard(z) * later[..., step, :]
        phase = walsh_hadamard(z).flatten(-2)[..., : self.d_phi // 2] * self._length(padded)
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
    left = x.shape[-1]
    with without_autocast(x.device.type):
        while left > 1:
            digit = min(left, 16)
            left //= digit
            x = (x.unflatten(-1, (digit, -1)).mT @ _small(digit, x)).flatten(-2)
    return x / math.sqrt(x.shape[-1])


def _small(size: int, like: Tensor) -> Tensor:
    """Sylvester's matrix of 1 and -1, built by doubling."""
    h = torch.ones(1, 1, dtype=like.dtype, device=like.device)
    while h.shape[0] < size:
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)], 0)
    return h


def _padded(d: int) -> int:
    return 1 << (d - 1).bit_length()
