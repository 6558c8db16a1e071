"""Common parts of random feature maps: draws, orthogonal blocks, redrawing, precise projections."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from hecate.errors import ConfigError, ShapeError
from hecate.phi.base import FeatureMap, Params

Norms = Literal["chi", "sqrt"]


class RandomMap(FeatureMap):
    """A feature map with frozen random draws. A variant gives `draw`, the draws of one head, and their `shapes` where
    they are not those of one projection.

    Draws are made in float64 on the CPU, head after head, and then cast: one seed gives one map on every dtype and
    device, and the first heads of a map do not depend on how many follow. Without a generator the seed is 0; the global
    random state is neither read nor changed. [PHI-RAND-I1]"""

    def shapes(self, d: int) -> dict[str, tuple[int, ...]]:
        """By default those of a projection `w` onto the features."""
        return {"w": (d, self.output_dim(d))}

    def draw(self, d: int, generator: torch.Generator) -> dict[str, Tensor]:
        """Fresh draws for one head: float64 CPU tensors without the head axis."""
        raise NotImplementedError(f"{type(self).__name__} does not define draw")

    def fresh(self, d: int, heads: int, generator: torch.Generator) -> dict[str, Tensor]:
        if d < 1 or heads < 1:
            raise ShapeError(f"{self.kind} needs a width and a head count of at least 1, got {d} and {heads}")
        if generator.device.type != "cpu":
            raise ConfigError(
                f"{self.kind} draws on the CPU, so that a seed gives the same map on every device, "
                f"got a generator on {generator.device}; pass a CPU torch.Generator"
            )
        draws = [self.draw(d, generator) for _ in range(heads)]
        return {name: torch.stack([one[name] for one in draws]) for name in draws[0]}

    def redraw(self, params: Params, generator: torch.Generator) -> Params:
        """New params with fresh draws of the same shapes, dtypes and device; learned ones stay."""
        if not self.is_random:
            return super().redraw(params, generator)
        (w,) = self.parameters(params, "w")
        fresh = self.init(w.shape[-2], heads=w.shape[0], generator=generator, dtype=torch.float64)
        frozen = {name: value.to(params["frozen"][name]) for name, value in fresh["frozen"].items()}
        return {"learned": params["learned"], "frozen": frozen}


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


def normal(d: int, m: int, generator: torch.Generator) -> Tensor:
    """Standard normal `[d, m]` in float64 on the CPU."""
    return torch.randn(d, m, dtype=torch.float64, device="cpu", generator=generator)


def signs(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """1 or -1 with even chances, in float64 on the CPU."""
    return 2.0 * torch.randint(0, 2, shape, device="cpu", generator=generator).double() - 1


def haar(d: int, generator: torch.Generator) -> Tensor:
    """A Haar-distributed orthogonal `[d, d]`: QR of a Gaussian, the diagonal of R made positive.

    Without the signs Q is not Haar (LAPACK fixes them by convention), which biases every one-sided map.
    References: How to generate random matrices from the classical compact groups (Mezzadri, 2006, arXiv
    math-ph/0609050). [PHI-RAND-D1]
    """
    gaussian, threads = normal(d, d, generator), torch.get_num_threads()
    torch.set_num_threads(1)  # LAPACK's sums depend on it: the same seed would give other last bits
    try:
        q, r = torch.linalg.qr(gaussian)
    finally:
        torch.set_num_threads(threads)
    signed: Tensor = q * torch.where(r.diagonal() < 0, -1.0, 1.0)
    return signed


def projections(d: int, m: int, generator: torch.Generator, *, orthogonal: bool, norms: Norms = "chi") -> Tensor:
    """m projection vectors as the columns of a `[d, m]` matrix.

    `orthogonal` stacks ceil(m / d) independent Haar blocks and cuts them to m columns; otherwise the directions are
    independent. `norms="chi"` gives lengths of fresh Gaussian vectors, so that each column is marginally N(0, I);
    `"sqrt"` gives all columns the length sqrt(d). [PHI-RAND-D2]"""
    if orthogonal:
        columns = torch.cat([haar(d, generator) for _ in range(-(-m // d))], dim=1)[:, :m]
    else:
        columns = normal(d, m, generator)
        if norms == "chi":
            return columns
        columns = columns / columns.norm(dim=0)
    return columns * (normal(d, m, generator).norm(dim=0) if norms == "chi" else math.sqrt(d))


def default_width(d: int) -> int:
    """The usual number of random features: int(d log d), but never fewer than d."""
    return max(d, int(d * math.log(d)))
