"""A key memory that reads codes, and a value memory that codes read."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from hecate.errors import ConfigError
from hecate.sizes import Size
from hecate.structure.base import Memory, Structure, matvec, outer
from hecate.tape import Block, Tensors, one


class TwoPass(Structure):
    """two_pass: y = W_v f(W_k w), phi = [w; a], written so that f(W_k w) -> a and W_v a -> v.

    A bounded memory of `codes` slots: the key memory W_k learns to answer a key w with its code a, the value memory W_v
    to answer the code with the value. The last `codes` coordinates of phi(k) are the code that the model gives its
    token; those of phi(q) are not looked at. The key pass descends |f(W_k w) - a|^2 / 2 through f, the value pass the
    bias at W_v a.

    Shapes: w_key `[N, codes, P - codes]`, w_value `[N, V, codes]`, p `[N, P]`.
    VJP: by torch.func.
    Cost: 2 codes (P + V) per read, three times that per write.
    Warning: reading with the key instead of the query, or leaving out the Jacobian of f, are errors of circulating
    programs.
    References: Trellis (2025, arXiv 2512.23852). [STR-TWO-D1]
    """

    kind: Literal["two_pass"] = "two_pass"
    codes: Size = Field(2, ge=1, description="slots: width of a code")
    link: Literal["silu", "softmax", "identity"] = "silu"
    weighted_sum: ClassVar[bool] = True

    def shapes(self, d_phi: int, d_v: int) -> dict[str, tuple[int, ...]]:
        if d_phi <= self.codes:
            raise ConfigError(
                f"codes={self.codes} takes that many of the d_phi={d_phi} coordinates of phi(k) "
                "and leaves none for the key; make phi wider or codes fewer",
                path=("codes",),
            )
        return {"w_key": (self.codes, d_phi - self.codes), "w_value": (d_v, self.codes)}

    def predict(self, memory: Memory, p: Tensor) -> Tensor:
        keys, values = memory
        return matvec(values, self._code(matvec(keys, p[..., : -self.codes])))

    def gradient(self, bias: Block, memory: Memory, p: Tensor, target: Tensor) -> tuple[Memory, Any]:
        keys, values = memory
        w, a = p[..., : -self.codes], p[..., -self.codes :]
        z = matvec(keys, w)
        code, pull = torch.func.vjp(self._code, z)  # type: ignore[misc]
        (error,) = pull(code - a)
        u = one(bias.forward(matvec(values, a), target)[0])
        return (outer(error, w), outer(u, a)), (memory, p, target)

    def gradient_vjp(self, bias: Block, kept: Any, cotangents: Memory) -> tuple[Tensors, Tensors]:
        def of(memory: Memory, p: Tensor, target: Tensor) -> Memory:
            return self.gradient(bias, memory, p, target)[0]

        _, pull = torch.func.vjp(of, *kept)  # type: ignore[misc]
        gmemory, gp, gtarget = pull(cotangents)
        return gmemory, (gp, gtarget)

    def gradient_block(self, bias: Block) -> Block:
        # No program inside: it is not the gradient of `predict`.
        return super().gradient_block(bias)._replace(program=None)

    def _code(self, z: Tensor) -> Tensor:
        if self.link == "softmax":
            return z.softmax(-1)
        if self.link == "identity":
            return z
        active = torch.nn.functional.silu(z)
        return active / (active.square().sum(-1, keepdim=True) + 1e-6).sqrt()
