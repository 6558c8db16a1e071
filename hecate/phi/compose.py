"""Several maps one after another."""

from __future__ import annotations

from typing import Any, Literal

from torch import Tensor

from hecate.phi.base import Params, Parity, Traits
from hecate.phi.nested import Several, own, prefixed


class Compose(Several):
    """compose: phi(x) = phi_n(... phi_2(phi_1(x))), the maps applied from left to right.

    For instance a narrowing `linear` before `taylor`, or unit keys before `random_fourier`.
    Parameters are named by position: `0.weight`.

    Shapes: x `[..., D]` -> `[..., width of the last map]`; each map's width is the next one's D.
    VJP: the maps' VJPs from right to left.
    Traits: non_negative, kernel_non_negative and norm_bound of the last map; odd if all are odd, even if the first one
    that is not odd is even; degree the product if all have one; is_random, needs_position if any is.
    Cost: the sum of the maps' costs at their widths.
    Origin: ours; composition of functions. [PHI-COMPOSE-D1]
    """

    kind: Literal["compose"] = "compose"

    def output_dim(self, d: int) -> int:
        return self._widths(d)[-1]

    def input_dims(self, d: int) -> list[int]:
        return self._widths(d)[:-1]

    def traits(self) -> Traits:
        each = [map_.traits() for map_ in self.maps]
        degree: float | None = 1.0
        for t in each:
            degree = None if degree is None or t.degree is None else degree * t.degree
        return Traits(
            non_negative=each[-1].non_negative,
            kernel_non_negative=each[-1].kernel_non_negative,
            parity=_parity([t.parity for t in each]),
            degree=degree,
            norm_bound=each[-1].norm_bound,
            is_random=any(t.is_random for t in each),
            needs_position=any(t.needs_position for t in each),
            forgets_length=next((t.forgets_length for t in each if t.degree is None), False),
        )

    def forward(self, x: Tensor, params: Params) -> tuple[Tensor, tuple[Any, ...]]:
        residuals = []
        for index, map_ in enumerate(self.maps):
            x, residual = map_.forward(x, own(params, index))
            residuals.append(residual)
        return x, tuple(residuals)

    def vjp(self, residuals: tuple[Any, ...], g: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        grads: dict[str, Tensor] = {}
        for index in reversed(range(len(self.maps))):
            g, glearned = self.maps[index].vjp(residuals[index], g)
            grads = {**prefixed(glearned, index), **grads}
        return g, grads

    def exact_kernel(self, x: Tensor, y: Tensor) -> Tensor | None:
        """The last map's kernel of the images under the others, None if those have parameters
        or need positions."""
        for map_ in self.maps[:-1]:
            params = map_.init(x.shape[-1], dtype=x.dtype, device=x.device)
            if params["learned"] or params["frozen"] or map_.needs_position:
                return None
            x, y = map_(x), map_(y)
        return self.maps[-1].exact_kernel(x, y)

    def _widths(self, d: int) -> list[int]:
        widths = [d]
        for map_ in self.maps:
            widths.append(map_.output_dim(widths[-1]))
        return widths


def _parity(parities: list[Parity]) -> Parity:
    # Behind an odd map the sign survives, behind an even one it is gone for good.
    return next((parity for parity in parities if parity != "odd"), "odd")
