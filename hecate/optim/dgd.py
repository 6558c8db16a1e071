"""Delta gradient descent: a layer forgets what it answers to an input as it learns from it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from hecate.errors import ConfigError
from hecate.optim.base import MatrixOptimizer, State
from hecate.optim.options import Group, NonNegative, OptimizerKind, name_of
from hecate.optim.sharding import is_sharded
from hecate.optim.tensors import Bulk, state_dtype
from hecate.tape.bridge import can_inspect

CHUNK = 256  # samples whose order is resolved by one triangular system


class Samples(NamedTuple):
    """What a layer saw in one backward pass: inputs `[n, in]`, gradients of outputs `[n, out]`."""

    inputs: Tensor
    grads: Tensor


class DGD(MatrixOptimizer):
    """dgd: w <- w ((1 - lr weight_decay) I - c x x^T) - c g x^T, c = lr / (1 + lr |x|^2).

    The exact minimiser of |w' x + g|^2 / 2 + |w' - w|^2 / (2 lr) at an input x whose output has the gradient g: descent
    that also lowers w's own answer to x. It needs every sample's x and g, which `attach` takes from the
    `torch.nn.Linear` layers of a module.

    batch: how n samples make one step. `mean` averages their steps, each from the w before it; `sequential` takes them
    in order, each from the w that the last one left, with the gradients of the w before the first. The decay is taken
    once.
    reduction: how the loss joins samples. `mean` (the default): a sample's own gradient is n times what reaches the
    layer; `sum`: it is that.
    unattached: what happens to parameters that are no weight of an attached layer, such as biases: `refuse`, or `sgd`,
    w <- (1 - lr weight_decay) w - lr gradient.

    rescaled: what happens to a gradient that is a multiple of what the samples make up, as after clipping by norm or
    under a loss scaler: `refuse`, or `follow`, which multiplies their g alike.

    Shapes: w `[out, in]`; inputs `[..., in]`. No state.
    Cost: `mean` two products of n out in; `sequential` also n CHUNK (in + out).
    Warning: samples are kept from the backward pass until this optimiser's `zero_grad`. They must account for the
    gradient: what is clipped by value or averaged over processes is refused, and
    so are sharded weights, whose samples no process has all of.
    Eq. 57 has c = lr / (1 + lr), which holds for |x| = 1.

    References: Nested Learning (Behrouz et al., 2025, arXiv 2512.24695), eq. 57. [OPT-DGD-D1]
    """

    class Options(OptimizerKind):
        batch: Literal["mean", "sequential"] = "mean"
        reduction: Literal["mean", "sum"] = "mean"

    class Extras(MatrixOptimizer.Extras):
        lr: NonNegative = 1e-2
        unattached: Literal["refuse", "sgd"] = "refuse"
        rescaled: Literal["refuse", "follow"] = "refuse"

    def prepared(self, given: Group) -> Group:
        self._seen: dict[Tensor, list[Samples]] = {}
        self._scales: dict[Tensor, Tensor | float] = {}
        return super().prepared(given)

    def attach(self, module: nn.Module) -> list[RemovableHandle]:
        """Takes samples from every Linear in `module` whose weight is here, until removed."""
        mine = {p for group in self.param_groups for p in group["params"]}
        layers = [m for m in module.modules() if isinstance(m, nn.Linear) and m.weight in mine]
        if not layers:
            raise ConfigError(
                "attach found no torch.nn.Linear whose weight this optimiser has; construct it "
                "with the module's parameters"
            )
        for layer in layers:
            self._seen.setdefault(layer.weight, [])
        return [m.register_forward_hook(_watch(self._seen[m.weight])) for m in layers]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets gradients, and the samples they came from."""
        super().zero_grad(set_to_none)
        for seen in self._seen.values():
            seen.clear()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.setdefault("_seen", {})  # a copy is attached to nothing
        self.__dict__.setdefault("_scales", {})
        super().__setstate__(state)

    def check(self, group: Group) -> None:
        super().check(group)
        for p in group["params"]:
            if is_sharded(p):
                raise ConfigError(
                    f"DGD needs every sample of every process, {name_of(group, p)} is a DTensor; "
                    "train it on one process"
                )

    def examine(self, group: Group, params: list[Tensor], grads: list[Tensor]) -> None:
        for p, grad in zip(params, grads, strict=True):
            if p not in self._seen:
                if group["unattached"] == "refuse":
                    raise ConfigError(
                        f"DGD needs the inputs of {name_of(group, p)}: call attach(module), or "
                        "set unattached='sgd' for parameters that are no weight of a Linear"
                    )
                continue
            seen = self._seen[p]
            found = sum((s.grads.mT.to(p) @ s.inputs.to(p) for s in seen), torch.zeros_like(p))
            self._scales[p] = _multiple(grad, found) if group["rescaled"] == "follow" else 1.0
            found = self._scales[p] * found
            if not can_inspect(grad, found):
                continue
            coarsest = max((torch.finfo(s.grads.dtype).eps for s in seen), default=0.0)
            allowed = max(coarsest, torch.finfo(p.dtype).eps) ** 0.5 * grad.norm()
            if not (found - grad).norm() <= allowed:
                raise ConfigError(
                    f"the {len(seen)} passes seen by DGD do not make up the gradient of {name_of(group, p)}; use this "
                    "optimiser's own zero_grad, do not clip gradients by value nor average them over processes, and "
                    "set rescaled='follow' if they are scaled or clipped by norm"
                )

    def update(self, group: Group, params: list[Tensor], grads: list[Tensor], states: list[State]) -> None:
        bulk = Bulk(group, params)
        lr, decay = bulk.number(group["lr"]), group["weight_decay"]
        attached = [p in self._seen for p in params]
        plain = [(p, g) for p, g, has in zip(params, grads, attached, strict=True) if not has]
        if plain:
            bulk.move([p for p, _ in plain], [g for _, g in plain], lr, decay)
        layers = [p for p, has in zip(params, attached, strict=True) if has]
        if layers:
            bulk.move(layers, [self._direction(group, p, lr) for p in layers], 1, lr * decay)

    def _direction(self, group: Group, p: Tensor, lr: Any) -> Tensor:
        """sum_t c_t (w x_t + g_t) x_t^T over the samples, or its mean."""
        dtype, seen = state_dtype(p, group["state_dtype"]), self._seen[p]
        w = p.to(dtype)
        x = torch.cat([s.inputs for s in seen]).to(dtype)
        g = torch.cat([len(s.grads) * s.grads if group["reduction"] == "mean" else s.grads
                       for s in seen]).to(dtype)  # fmt: skip
        g = self._scales.get(p, 1.0) * (-g if group["maximize"] else g)
        c = lr / (1 + lr * (x * x).sum(-1, keepdim=True))
        if group["batch"] == "mean":
            return (c * (x @ w.mT + g)).mT @ x / max(1, len(x))
        moved = w
        for xs, gs, cs in zip(x.split(CHUNK), g.split(CHUNK), c.split(CHUNK), strict=True):
            # An error e_t = w_t x_t + g_t with w_t = w - sum_(s < t) c_s e_s x_s^T: triangular.
            system = torch.tril(xs @ xs.mT, -1) * cs.mT
            errors = torch.linalg.solve_triangular(system, xs @ moved.mT + gs, upper=False, unitriangular=True)
            moved = moved - (cs * errors).mT @ xs
        return w - moved


def _multiple(grad: Tensor, found: Tensor) -> Tensor:
    """s of the s found that is nearest to grad; 1 if nothing was found."""
    power = found.square().sum()
    return torch.where(power > 0, (found * grad).sum() / torch.where(power > 0, power, 1), 1)


def _watch(seen: list[Samples]) -> Callable[[nn.Module, tuple[Any, ...], Any], None]:
    """A forward hook that adds inputs and, in the backward pass, gradients of outputs."""

    def watch(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if isinstance(output, Tensor) and output.requires_grad:
            inputs = args[0].detach()

            def keep(grad: Tensor) -> None:
                grads = grad.detach().reshape(-1, grad.shape[-1])
                seen.append(Samples(inputs.reshape(-1, inputs.shape[-1]), grads))

            output.register_hook(keep)

    return watch
