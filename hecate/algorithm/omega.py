"""Descent on a window of tokens."""

from __future__ import annotations

from typing import Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from hecate.algorithm.base import Algorithm, InnerLoss, Token
from hecate.algorithm.descent import GD
from hecate.errors import ConfigError
from hecate.sizes import Depth
from hecate.tape import Block, Tensors


class Omega(Algorithm):
    """omega: G = sum_(a < window) decay^a grad ell(M; phi_(t-a), v_(t-a)), then `inner`'s step.

    Every write descends the loss of the last `window` tokens at the present memory, the token a steps back weighted by
    decay^a, instead of the loss of its own token: the Omega rule of ATLAS. Any algorithm may follow (`inner`); window =
    1 is that algorithm itself. The step size is this algorithm's lr.

    Shapes: context `keys` `[N, window, P]`, `values` `[N, window, V]`, `filled` `[N, window]` (0 where no token has
    been), oldest first.
    VJP: that of each token's gradient; the window passes cotangents on to the tokens it holds,
    and none to `filled`, which is a mark and no quantity.
    Traits: those of `inner`, whose stability bound is divided by the sum of weights.
    Cost: window times the gradient of one token, and window (P + V) more state.
    References: ATLAS (Behrouz et al., 2025, arXiv 2505.23735). [ALG-OMEGA-D1]
    """

    kind: Literal["omega"] = "omega"
    window: Depth = Field(4, ge=1, description="tokens")
    decay: float = Field(1.0, gt=0, le=1, description="weight of a token relative to the next one")
    inner: Algorithm = GD()

    @model_validator(mode="after")
    def _one_lr(self) -> Self:
        if self.inner.lr != type(self.inner).model_fields["lr"].default:
            raise ConfigError(
                f"inner.lr={self.inner.lr:g} would not be used: the step size is algorithm.lr="
                f"{self.lr:g} of omega; set it there and leave inner.lr out",
                path=("inner", "lr"),
            )
        if not self.inner.takes_any_gradient():
            raise ConfigError(
                f"omega chooses the gradient and so does its inner algorithm {self.inner.kind!r}; "
                "use one that takes the gradient as it comes, such as gd, momentum, newton_schulz",
                path=("inner",),
            )
        return self

    @property
    def slots(self) -> tuple[str, ...]:  # type: ignore[override]
        """Those of the inner algorithm."""
        return self.inner.slots

    @property
    def uses_momentum(self) -> bool:  # type: ignore[override]
        """Whether the inner algorithm does."""
        return self.inner.uses_momentum

    @property
    def weighted_sum(self) -> bool:
        return self.inner.weighted_sum

    @property
    def default_momentum(self) -> float:
        return self.inner.default_momentum

    @property
    def stable_step(self) -> float:
        return self.inner.stable_step / sum(self.decay**age for age in range(self.window))

    def refusal(self, *, linear: bool, diagonal: bool, curvature: float | None) -> str | None:
        return self.inner.refusal(linear=linear, diagonal=diagonal, curvature=curvature)

    def slot_shapes(self, weight: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        return self.inner.slot_shapes(weight)

    def context_shapes(self, d_phi: int, d_v: int) -> dict[str, tuple[int, ...]]:
        return {"keys": (self.window, d_phi), "values": (self.window, d_v), "filled": (self.window,)}

    def gradient(
        self, loss: InnerLoss, token: Token, context: tuple[Tensor, ...]
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        keys, values, filled = loss.run(_PUSH, token.phi_k, token.v, *context)
        columns = [loss.run(_UNBIND, item) for item in (keys, values, filled)]
        total: tuple[Tensor, ...] = ()
        for age, (p, v, weight) in enumerate(zip(*(reversed(item) for item in columns), strict=True)):
            block = _weighted(self.decay**age)
            grads = [loss.run(block, g, weight)[0] for g in loss.gradient(p, v)]
            total = tuple(loss.run(_ADD, a, b)[0] for a, b in zip(total, grads, strict=True)) if total else tuple(grads)
        return total, (keys, values, filled)

    def direction(self, grad: Tensor, lr: Tensor, momentum: Tensor, *slots: Tensor) -> tuple[Tensor, ...]:
        return self.inner.direction(grad, lr, momentum, *slots)

    def direction_vjp(self, inputs: tuple[Tensor, ...], *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        return self.inner.direction_vjp(inputs, *cotangents)


def _push(phi: Tensor, v: Tensor, *window: Tensor) -> tuple[Tensors, None]:
    newest = (phi, v, torch.ones_like(phi[:, 0]))
    pairs = zip(window, newest, strict=True)
    return tuple(torch.cat([old[:, 1:], new.unsqueeze(1)], 1) for old, new in pairs), None


def _push_vjp(_: None, *cotangents: Tensor) -> Tensors:
    gold = [torch.cat([torch.zeros_like(g[:, :1]), g[:, :-1]], 1) for g in cotangents]
    return cotangents[0][:, -1], cotangents[1][:, -1], *gold


def _weighted(factor: float) -> Block:
    """factor w G, w a constant `[N]`."""

    def forward(grad: Tensor, weight: Tensor) -> tuple[Tensors, Tensor]:
        wide = weight.detach().reshape(-1, *[1] * (grad.dim() - 1))
        return (factor * wide * grad,), wide

    def vjp(wide: Tensor, g: Tensor) -> Tensors:
        return factor * wide * g, None

    return Block("algorithm.omega.weight", forward, vjp)


_PUSH = Block("algorithm.omega.push", _push, _push_vjp)
_UNBIND = Block(
    "algorithm.omega.unbind", lambda x: (x.unbind(1), None), lambda _, *cotangents: (torch.stack(cotangents, 1),)
)
_ADD = Block("algorithm.omega.add", lambda a, b: ((a + b,), None), lambda _, g: (g, g))
