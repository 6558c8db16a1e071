"""A multilayer perceptron."""

from __future__ import annotations

import math
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from hecate.errors import ConfigError
from hecate.structure.base import Memory, Structure, matvec, outer
from hecate.tape.activation import Activation, activate


class MLP(Structure):
    """mlp: pred = W_L act(W_(L-1) ... act(W_1 p)), plus p if residual.

    The deep memory of Titans (at least two layers). Hidden width is `expansion` times the larger of
    the input and output widths. The inner gradient is backpropagation, so the outer gradient is of
    second order: the activation's second derivative is kept.

    Shapes: W_1 `[N, E, P]`, W_i `[N, E, E]`, W_L `[N, V, E]`, p `[N, P]`, u `[N, V]`.
    VJP: predict: backpropagation. Pullback G_i = d_i h_(i-1)^T with d_(i-1) = act'(z_(i-1)) W_i^T
    d_i: the reverse of both passes, written out in the code's two loops.
    Cost: 2 (E P + (L-2) E^2 + V E) per read, three times that per write.
    Warning: all-zero weights are a point where no gradient flows; `init` draws N(0, 1/fan_in).
    References: Titans (Behrouz et al., 2025, arXiv 2501.00663); Learning to (Learn at Test Time)
    (Sun et al., 2024, arXiv 2407.04620). [STR-MLP-D1]
    """

    kind: Literal["mlp"] = "mlp"
    layers: int = Field(2, ge=2)
    expansion: int = Field(4, ge=1)
    activation: Activation = "gelu"
    residual: bool = False

    def shapes(self, d_phi: int, d_v: int) -> dict[str, tuple[int, ...]]:
        if self.residual and d_phi != d_v:
            raise ConfigError(
                f"residual=True adds the input of width d_phi={d_phi} to the output of width "
                f"{d_v}; make them equal or set residual=False",
                path=("residual",),
            )
        hidden = self.expansion * max(d_phi, d_v)
        widths = [d_phi, *[hidden] * (self.layers - 1), d_v]
        return {f"w{i + 1}": (widths[i + 1], widths[i]) for i in range(self.layers)}

    def init(
        self,
        d_phi: int,
        d_v: int,
        *,
        heads: int = 1,
        generator: torch.Generator | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> dict[str, Tensor]:
        generator = generator or torch.Generator().manual_seed(0)
        return {
            name: (
                torch.randn(heads, *shape, generator=generator, dtype=torch.float64, device="cpu")
                / math.sqrt(shape[-1])
            ).to(device=device, dtype=dtype)
            for name, shape in self.shapes(d_phi, d_v).items()
        }

    def predict(self, memory: Memory, p: Tensor) -> Tensor:
        z, _ = self._forward(memory, p)
        return z[-1] + p if self.residual else z[-1]

    def predict_vjp(self, memory: Memory, p: Tensor, u: Tensor) -> tuple[Memory, Tensor]:
        z, h = self._forward(memory, p)
        grads, d = self._backward(memory, z, h, u)
        gp = matvec(memory[0].mT, d[0])
        return grads, gp + u if self.residual else gp

    def pullback(self, memory: Memory, p: Tensor, u: Tensor) -> Memory:
        z, h = self._forward(memory, p)
        return self._backward(memory, z, h, u)[0]

    def pullback_vjp(
        self, memory: Memory, p: Tensor, u: Tensor, cotangents: Memory
    ) -> tuple[Memory, Tensor, Tensor]:
        z, h = self._forward(memory, p)
        _, d = self._backward(memory, z, h, u)
        last = self.layers - 1
        gmemory = [torch.zeros_like(w) for w in memory]
        gh = [matvec(cotangents[i].mT, d[i]) for i in range(self.layers)]
        gz: list[Tensor] = []
        # Reverse of the backward pass: d_i is built from d_(i+1), so its cotangent travels upward.
        gd = matvec(cotangents[0], h[0])
        for i in range(last):
            pushed = matvec(memory[i + 1].mT, d[i + 1])
            gz.append(gd * pushed * activate(self.activation, z[i], 2))
            scaled = gd * activate(self.activation, z[i], 1)
            gmemory[i + 1] = gmemory[i + 1] + outer(d[i + 1], scaled)
            gd = matvec(cotangents[i + 1], h[i + 1]) + matvec(memory[i + 1], scaled)
        # Reverse of the forward pass: z_i and h_(i+1) carry what the gradients took from them.
        back = torch.zeros_like(h[last])
        for i in reversed(range(last)):
            gzi = gz[i] + (gh[i + 1] + back) * activate(self.activation, z[i], 1)
            gmemory[i] = gmemory[i] + outer(gzi, h[i])
            back = matvec(memory[i].mT, gzi)
        return tuple(gmemory), gh[0] + back, gd

    def _forward(self, memory: Memory, p: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Pre-activations z_1..z_L and the inputs h_0..h_(L-1) of the layers."""
        z: list[Tensor] = []
        h = [p]
        for index, weight in enumerate(memory):
            z.append(matvec(weight, h[-1]))
            if index < self.layers - 1:
                h.append(activate(self.activation, z[-1], 0))
        return z, h

    def _backward(
        self, memory: Memory, z: list[Tensor], h: list[Tensor], u: Tensor
    ) -> tuple[Memory, list[Tensor]]:
        """Weight gradients and the cotangents d_1..d_L of the pre-activations."""
        d = [u]
        for index in reversed(range(1, self.layers)):
            pushed = matvec(memory[index].mT, d[0])
            d.insert(0, pushed * activate(self.activation, z[index - 1], 1))
        return tuple(outer(di, hi) for di, hi in zip(d, h, strict=True)), d
