"""A multilayer perceptron."""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from hecate.errors import ConfigError
from hecate.structure.base import Memory, Structure, matvec, outer
from hecate.tape import Block, Tensors, one
from hecate.tape.activation import Activation, activate


class MLP(Structure):
    """mlp: pred = W_L act(W_(L-1) ... act(W_1 p)), plus p if residual.

    The deep memory of Titans (at least two layers). Hidden width is `expansion` times the larger of
    the input and output widths. The inner gradient is backpropagation, so the outer gradient is of
    second order: the activation's second derivative is kept.

    Shapes: W_1 `[N, E, P]`, W_i `[N, E, E]`, W_L `[N, V, E]`, p `[N, P]`, u `[N, V]`.
    VJP: predict: backpropagation. Pullback G_i = d_i h_(i-1)^T with d_(i-1) = act'(z_(i-1)) W_i^T
    d_i: the reverse of both passes, written out in the code's loops.
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
        return self._forward(memory, p)[0]

    def predict_vjp(self, memory: Memory, p: Tensor, u: Tensor) -> tuple[Memory, Tensor]:
        return self._predict_vjp(memory, self._forward(memory, p)[1], u)

    def pullback(self, memory: Memory, p: Tensor, u: Tensor) -> Memory:
        return self._backward(memory, self._forward(memory, p)[1], u)[0]

    def pullback_vjp(
        self, memory: Memory, p: Tensor, u: Tensor, cotangents: Memory
    ) -> tuple[Memory, Tensor, Tensor]:
        past = self._forward(memory, p)[1]
        passed = self._backward(memory, past, u)[1]
        gu, gpast = self._backward_vjp(memory, past, passed, cotangents)
        return *self._forward_vjp(memory, past, passed, gpast, torch.zeros_like(u)), gu

    def predict_block(self) -> Block:
        if type(self) is not MLP:  # whose methods a subclass may have replaced
            return super().predict_block()

        def forward(p: Tensor, *memory: Tensor) -> tuple[Tensors, Any]:
            pred, past = self._forward(memory, p)
            return (pred,), (memory, past)

        def vjp(kept: Any, g: Tensor) -> Tensors:
            memory, past = kept
            gmemory, gp = self._predict_vjp(memory, past, g)
            return gp, *gmemory

        return Block(f"structure.{self.kind}.predict", forward, vjp)

    def gradient(
        self, bias: Block, memory: Memory, p: Tensor, target: Tensor
    ) -> tuple[Memory, Any]:
        if type(self) is not MLP:
            return super().gradient(bias, memory, p, target)
        pred, past = self._forward(memory, p)
        outputs, of_bias = bias.apply((pred, target))
        grads, passed = self._backward(memory, past, one(outputs))
        return grads, (memory, past, passed, of_bias)

    def gradient_vjp(self, bias: Block, kept: Any, cotangents: Memory) -> tuple[Tensors, Tensors]:
        if type(self) is not MLP:
            return super().gradient_vjp(bias, kept, cotangents)
        memory, past, passed, of_bias = kept
        gu, gpast = self._backward_vjp(memory, past, passed, cotangents)
        gpred, gtarget = bias.pullback(of_bias, [gu])
        if gpred is None:
            gpred = torch.zeros_like(gu)
        gmemory, gp = self._forward_vjp(memory, past, passed, gpast, gpred)
        return gmemory, (gp, gtarget)

    def _forward(self, memory: Memory, p: Tensor) -> tuple[Tensor, _Past]:
        z: list[Tensor] = []
        h = [p]
        for weight in memory[:-1]:
            z.append(matvec(weight, h[-1]))
            h.append(activate(self.activation, z[-1], 0))
        pred = matvec(memory[-1], h[-1])
        return pred + p if self.residual else pred, _Past(z, h)

    def _backward(self, memory: Memory, past: _Past, u: Tensor) -> tuple[Memory, _Passed]:
        """The weight gradients d_i h_(i-1)^T, and what they were made of."""
        passed = _Passed([u], [], [])
        for weight, z in zip(reversed(memory[1:]), reversed(past.z), strict=True):
            passed.pushed.insert(0, matvec(weight.mT, passed.d[0]))
            passed.slopes.insert(0, activate(self.activation, z, 1))
            passed.d.insert(0, passed.pushed[0] * passed.slopes[0])
        return tuple(outer(d, h) for d, h in zip(passed.d, past.h, strict=True)), passed

    def _predict_vjp(self, memory: Memory, past: _Past, g: Tensor) -> tuple[Memory, Tensor]:
        grads, passed = self._backward(memory, past, g)
        gp = matvec(memory[0].mT, passed.d[0])
        return grads, gp + g if self.residual else gp

    def _backward_vjp(
        self, memory: Memory, past: _Past, passed: _Passed, cotangents: Memory
    ) -> tuple[Tensor, _Taken]:
        """Cotangent of u, and what the gradients take from the forward pass.

        d_i is built from d_(i+1), so its cotangent travels upward.
        """
        gz: list[Tensor] = []
        scaled: list[Tensor] = []
        gd = matvec(cotangents[0], past.h[0])
        for i, z in enumerate(past.z):
            gz.append(gd * passed.pushed[i] * activate(self.activation, z, 2))
            scaled.append(gd * passed.slopes[i])
            gd = matvec(cotangents[i + 1], past.h[i + 1]) + matvec(memory[i + 1], scaled[i])
        gh = [matvec(c.mT, d) for c, d in zip(cotangents, passed.d, strict=True)]
        return gd, _Taken(gz, gh, scaled)

    def _forward_vjp(
        self, memory: Memory, past: _Past, passed: _Passed, taken: _Taken, gpred: Tensor
    ) -> tuple[Memory, Tensor]:
        """Cotangents of weights and p from that of the prediction and from `taken`."""
        gmemory: list[Tensor] = []
        gz = gpred
        for i in reversed(range(self.layers)):
            gweight = outer(gz, past.h[i])
            if i:
                gweight = torch.addcmul(
                    gweight, passed.d[i].unsqueeze(-1), taken.scaled[i - 1].unsqueeze(-2)
                )
            gmemory.insert(0, gweight)
            gh = taken.h[i] + matvec(memory[i].mT, gz)
            if i:
                gz = torch.addcmul(taken.z[i - 1], gh, passed.slopes[i - 1])
        return tuple(gmemory), gh + gpred if self.residual else gh


class _Past(NamedTuple):
    """A forward pass: pre-activations z_1..z_(L-1) and the layers' inputs h_0..h_(L-1)."""

    z: list[Tensor]
    h: list[Tensor]


class _Passed(NamedTuple):
    """A backward pass: cotangents d_1..d_L of the layers, and d_i = pushed_i act'(z_i), i < L."""

    d: list[Tensor]
    pushed: list[Tensor]
    slopes: list[Tensor]


class _Taken(NamedTuple):
    """What gradients take from a forward pass: cotangents of z, h; W_(i+1) gets d scaled^T."""

    z: list[Tensor]
    h: list[Tensor]
    scaled: list[Tensor]
