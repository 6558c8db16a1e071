"""Optimisers that are algorithms of the memories, over parameters: delta and deep momentum, delta gradient descent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, NamedTuple
from weakref import ref

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from hecate.algorithm import Algorithm
from hecate.algorithm import DeepMomentum as Network
from hecate.checks import Size
from hecate.distributed import is_sharded
from hecate.errors import ConfigError, StabilityWarning
from hecate.optim.base import Group, MatrixOptimizer, MatrixView, NonNegative, OptimizerKind, Share, name_of, warn
from hecate.optim.muon import MOMENTUM, orthogonalised, settings
from hecate.optim.tensors import Bulk, State, as_matrix, by_group, grouped, largest, state_dtype, tamed, together
from hecate.tape.bridge import can_inspect

CHANGE, OUT = "w_in", "w_out"  # in the state of a parameter
CHUNK = 256  # samples whose order is resolved by one triangular system


class DeltaMomentum(MatrixOptimizer):
    r"""delta_momentum: m <- m (momentum I - c g^T g) + g, w <- (1 - lr weight_decay) w - lr m.

    The momentum is a delta-rule memory of gradients: its content along the present gradient is erased before that is
    added. Eq. 49 writes -lr g into m and adds m to w, which is the same while lr is constant. Its g^T g lacks the step
    size that descent would give it; here that is `erase`, a number or `"lr"`.

    reading: what g^T g is. `matrix`, of all rows; `rows`, each row of m is erased along its own row of g; `scalar`, the
    number |g|^2 of the whole gradient, m <- max(0, momentum - erase |g|^2) m + g. The last two, with `erase="lr"`, beat
    tuned momentum on two thirds of eq. 53's surfaces.
    form: `stable`, c = erase / (1 + erase |g|^2) with |g| of the matrix or row, so that no eigenvalue of the bracket
    leaves [momentum - 1, momentum]; for `scalar` the max. `hope`, c = erase and no max, as printed; a gradient with
    erase |g|_2^2 > 1 + momentum, at which m grows, is refused (`beyond="raise"`) or warned of (`"warn"`).
    orthogonalize: Newton-Schulz on m before it moves the weights; True, or fields of its algorithm.

    Formula: $m_t = m_{t-1} (\mu I - c_t g_t^\top g_t) + g_t,\quad c_t = \frac{\mathrm{erase}}{1 + \mathrm{erase}\,
    \Vert g_t \Vert_F^2}$
    $w_t = (1 - \eta \lambda) w_{t-1} - \eta m_t$
    Shapes: see `MatrixOptimizer`; momentum like the parameter.
    Cost: `matrix` two products of min(r, c)^2 max(r, c); others memory-bound. Sharded parameters are gathered.
    References: Nested Learning (Behrouz et al., 2025, arXiv 2512.24695), eqs. 48 and 49. [OPT-DELTA-D1]
    """

    class Options(OptimizerKind):
        kind: Literal["delta_momentum"] = "delta_momentum"
        momentum: Share = 0.9
        erase: NonNegative | Literal["lr"] = 1.0
        reading: Literal["matrix", "rows", "scalar"] = "matrix"
        form: Literal["stable", "hope"] = "stable"
        beyond: Literal["raise", "warn"] = "raise"
        orthogonalize: bool = False
        matrix: MatrixView = "flatten"

    class Extras(MatrixOptimizer.Extras):
        orthogonalize: Any = False

    held = (MOMENTUM,)
    positional = ("lr", "momentum", "erase")
    only_with: ClassVar[Mapping[str, tuple[str, Sequence[Any]]]] = {"beyond": ("form", ("hope",))}

    def check(self, group: Group) -> None:
        group["orthogonalize"] = settings(group["orthogonalize"])
        super().check(group)

    def examine(self, group: Group, params: list[Tensor], grads: list[Tensor]) -> None:
        if group["form"] == "stable" or not can_inspect(*grads):
            return
        bound = 1 + float(group["momentum"])
        for p, grad in zip(params, grads, strict=True):
            g = as_matrix(grad, group["matrix"]).to(torch.promote_types(grad.dtype, torch.float32))
            if group["reading"] == "matrix":
                power = torch.linalg.matrix_norm(g, 2).square()
            else:
                square = (g * g).sum(-1)
                power = square.max() if group["reading"] == "rows" else square.sum()
            largest = float(_erase(group) * power)
            if largest > bound:
                message = (
                    f"erase |g|^2 = {largest:.3g} for {name_of(group, p)}, and form 'hope' grows beyond 1 + momentum = "
                    f"{bound:.3g}; lower erase, clip gradients, or use form 'stable'"
                )
                if group["beyond"] == "raise":
                    raise ConfigError(message)
                warn(message, StabilityWarning)

    def update(self, group: Group, params: list[Tensor], grads: list[Tensor], states: list[State]) -> None:
        momenta = [state[MOMENTUM] for state in states]
        bulk = Bulk(group, momenta)
        grads = [g.to(m.dtype) for g, m in zip(grads, momenta, strict=True)]
        erased = [self._erasure(group, m, g) for m, g in zip(momenta, grads, strict=True)]
        momenta = bulk.add(bulk.decay(momenta, bulk.number(group["momentum"])), grads)
        momenta = bulk.add(momenta, erased, -1)
        updates = [orthogonalised(m, group) for m in momenta]
        bulk.move(params, updates, bulk.number(group["lr"]), group["weight_decay"])
        bulk.put(states, MOMENTUM, momenta)

    def _erasure(self, group: Group, memory: Tensor, grad: Tensor) -> Tensor:
        """The part of the momentum erased by the gradient, to be subtracted."""
        m, g = (as_matrix(x, group["matrix"]) for x in (memory, grad))
        stable, rows = group["form"] == "stable", group["reading"] == "rows"
        g, size = tamed(g, -1 if rows else (-2, -1), g.dtype)
        weight = _erase(group) * size * size
        square = (g * g).sum(-1, keepdim=True) if rows else (g * g).sum()
        if group["reading"] == "scalar":
            momentum = torch.as_tensor(group["momentum"], dtype=square.dtype, device=square.device)
            factor = weight * square
            return ((torch.minimum(factor, momentum) if stable else factor) * m).reshape(memory.shape)
        if stable:
            weight = weight.clamp(max=torch.finfo(g.dtype).max ** 0.75)  # the quotient is at its limit
            weight = weight / (1 + weight * square)
        if rows:
            out = weight * (m * g).sum(-1, keepdim=True) * g
        elif len(g) > g.shape[-1]:
            out = m @ (weight * (g.mT @ g))
        else:
            out = (weight * (m @ g.mT)) @ g
        return out.reshape(memory.shape)


def _erase(group: Group) -> Any:
    return group["lr"] if group["erase"] == "lr" else group["erase"]


class DeepMomentum(MatrixOptimizer):
    r"""deep_momentum: w <- (1 - lr weight_decay) w + lr NS m(g), m <- momentum m - c grad ell(m; g).

    The momentum is the network m(u) = W_2 tanh(W_1 u) of the memories' `deep_momentum`, on rows of the gradient,
    trained by one explicit step before it is read: `objective="descent"` teaches it -g with c = rate / (1 + rate B), B
    a bound of its curvature, so that no gradient makes it overshoot; `"paper"` is the printed ell = <m(g), 1> with c =
    rate, whose direction does not depend on the sign of g. It starts at a fixed draw for W_1 and at W_2 = 0; `momentum`
    decays the distance from there. The loss is the sum over rows.

    input_scale: `rms` (the default of `descent`) divides the gradient by the root mean square of its rows that are not
    zero (`shared`: of all of them). Without it, gradients of length s train m by factors s^2 and get answers of length
    s, so that steps shrink like s^3 and a model whose gradients are small stands still. With it B is of the order of
    rows times width, c close to 1/B.
    orthogonalize: Newton-Schulz on m'(g), eq. 52 (the default of `descent`); True, False, or fields of its algorithm.
    In a direction with the share v of the rows' power, m answers less than about v / (v + 1 - momentum) of what it
    should, so without orthogonalisation only the strongest direction moves. Steps are as long as those of `Muon` with
    adjust_lr_fn="none" at the same lr.
    shared: one network for all rows of one width in a group, trained on all rows of a step together; every parameter of
    that width keeps a copy, also one without a gradient. Otherwise each parameter has its own network.
    width: number of hidden units, and the largest rank of an answer. rate: step size of the network.

    Formula: $\theta_t = \theta_0 + \mu (\theta_{t-1} - \theta_0) - c_t \nabla_\theta \ell(m_{t-1}; g_t),\quad m(u) =
    W_2 \tanh(W_1 u),\quad \ell(m; g) = \frac{1}{2} \Vert m(g) + g \Vert^2$
    $w_t = (1 - \eta \lambda) w_{t-1} + \eta\, \mathrm{NS}(m_t(g_t))$
    Shapes: gradient `[r, c]`; state W_1 minus its start `[width, c]`, W_2 `[c, width]`.
    Cost: 10 r c width. Sharded parameters are gathered.
    Warning: eq. 50 alone, `objective="paper"`, or `descent` with `input_scale="none"` and `orthogonalize=False`, trains
    slowly or not at all.
    References: Nested Learning (Behrouz et al., 2025, arXiv 2512.24695), eq. 50. [OPT-DEEP-D1]
    """

    class Options(OptimizerKind):
        kind: Literal["deep_momentum"] = "deep_momentum"
        momentum: Share = 0.9
        width: Size = Field(32, ge=1)
        rate: NonNegative = 0.1
        shared: bool = False
        objective: Literal["descent", "paper"] = "descent"
        input_scale: Literal["rms", "none"] | None = None
        orthogonalize: bool | None = None
        matrix: MatrixView = "flatten"

    class Extras(MatrixOptimizer.Extras):
        orthogonalize: Any = None

    positional = ("lr", "momentum", "width", "rate")
    structural: ClassVar[tuple[str, ...]] = (*MatrixOptimizer.structural, "shared", "width", "input_scale")

    def check(self, group: Group) -> None:
        """Resolves the defaults that depend on the objective, and refuses options that are not valid."""
        taught = group["objective"] == "descent"
        if group["input_scale"] is None:
            group["input_scale"] = "rms" if taught else "none"
        if group["orthogonalize"] is None:
            group["orthogonalize"] = taught
        group["orthogonalize"] = settings(group["orthogonalize"]) or False
        super().check(group)
        self._network(group)

    def fresh_state(self, p: Tensor, group: Group) -> State:
        width, (_, columns) = group["width"], self.sides(p, group)
        return {CHANGE: self.zeros(p, group, width, columns), OUT: self.zeros(p, group, columns, width)}

    def update(self, group: Group, params: list[Tensor], grads: list[Tensor], states: list[State]) -> None:
        bulk = Bulk(group, [states[0][OUT]])
        rows = [as_matrix(g, group["matrix"]).to(state[OUT]) for g, state in zip(grads, states, strict=True)]
        network, shared, keys = self._network(group), group["shared"], (CHANGE, OUT)

        def answered(members: list[int]) -> Sequence[Tensor]:
            batch, owners = [rows[i] for i in members], [[states[i]] for i in members]
            if shared:
                every = [self.state[p] for p in group["params"] if p.numel()]
                owners = [[state for state in every if _alike(state[OUT], states[members[0]][OUT])]]
            joined = torch.cat(batch)[None] if shared else torch.stack(batch)
            layers = [torch.stack([states[i][key] for i in members[: len(owners)]]) for key in keys]
            answers, *layers = _answers(network, group, joined, layers)
            for key, values in zip(keys, layers, strict=True):
                for owner, value in zip(owners, values, strict=True):
                    bulk.put(owner, key, [value] * len(owner))
            return answers[0].split([len(x) for x in batch]) if shared else answers.unbind()

        outputs = by_group(grouped(x.shape[-1] for x in rows) if shared else together(rows, group), answered)
        updates = [-orthogonalised(u.reshape(p.shape), group) for u, p in zip(outputs, params, strict=True)]
        bulk.move(params, updates, bulk.number(group["lr"]), group["weight_decay"])

    def _network(self, group: Group) -> Network:
        return Network(**{name: group[name] for name in ("width", "rate", "objective")})


def _answers(network: Algorithm, group: Group, rows: Tensor, layers: list[Tensor]) -> tuple[Tensor, ...]:
    """Answers of networks `[n, ...]` to the rows `[n, r, c]` that train them, and the trained networks."""
    scale = _length(rows) if group["input_scale"] == "rms" else rows.new_ones(1, 1, 1)
    one = rows.new_ones(len(rows))
    step, *layers = network.direction(rows / scale, one, one * group["momentum"], *layers)
    options = group["orthogonalize"]
    forgets = options and not options["rescale"]  # the rows' length, unless it is below eps
    return step if forgets else scale * step, *layers


def _alike(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and one.device == other.device


def _length(rows: Tensor) -> Tensor:
    """Root mean square of the rows that are not zero, for each matrix, `[n, 1, 1]`; 1 if all are zero."""
    moved = (rows != 0).any(-1, keepdim=True).sum(-2, keepdim=True) * rows.shape[-1]
    size = largest(rows, (-2, -1))  # so that no square overflows
    power = (rows / size).square().sum((-2, -1), keepdim=True) / moved.clamp(min=1)
    return size * torch.where(power > 0, power, 1).sqrt()


class Samples(NamedTuple):
    """A layer's samples of one backward pass: inputs `[n, in]`, gradients of outputs `[n, out]`."""

    inputs: Tensor
    grads: Tensor


class Passes(list[Samples]):
    """The samples of a layer; unlike a plain list it allows weak references."""


class DGD(MatrixOptimizer):
    """dgd: w <- w ((1 - lr weight_decay) I - c x x^T) - c g x^T, c = lr / (1 + lr |x|^2).

    The exact minimiser of |w' x + g|^2 / 2 + |w' - w|^2 / (2 lr) at an input x whose output has the gradient g: descent
    that also lowers w's own answer to x. It needs every sample's x and g, which `attach` takes from the
    `torch.nn.Linear` layers of a module.

    batch: how n samples make one step. `mean` averages their steps, each from the w before it; `sequential` takes them
    in order, each from the w after the step before it, with all gradients those at the first w. Weight decay is applied
    once.
    reduction: how the loss is reduced over samples. With `mean` (the default), a sample's own gradient is n times the
    one that reaches the layer, n over all passes of the step; with `sum`, it is that one.
    unattached: treatment of parameters that are not the weight of an attached layer, such as biases: `refuse`, or
    `sgd`, w <- (1 - lr weight_decay) w - lr gradient.

    rescaled: treatment of a gradient that is a multiple of the samples' sum, after clipping by norm or under a loss
    scaler, for instance: `refuse`, or `follow`, which multiplies each g by the same factor.

    Shapes: w `[out, in]`; inputs `[..., in]`. No state.
    Cost: `mean` two products of n out in; `sequential` also n CHUNK (in + out).
    Warning: samples are kept from the backward pass until this optimiser's `zero_grad`. They must account for the
    gradient: one that is clipped by value or averaged over processes is refused, and so are sharded weights, as no
    process has all of their samples. Eq. 57 has c = lr / (1 + lr), which holds for |x| = 1.

    References: Nested Learning (Behrouz et al., 2025, arXiv 2512.24695), eq. 57. [OPT-DGD-D1]
    """

    class Options(OptimizerKind):
        batch: Literal["mean", "sequential"] = "mean"
        reduction: Literal["mean", "sum"] = "mean"

    class Extras(MatrixOptimizer.Extras):
        lr: NonNegative = 1e-2
        unattached: Literal["refuse", "sgd"] = "refuse"
        rescaled: Literal["refuse", "follow"] = "refuse"

    carried = ("_seen", "_scales")

    def prepared(self, options: Group) -> Group:
        self._seen: dict[Tensor, Passes] = {}
        self._scales: dict[Tensor, Tensor | float] = {}
        return super().prepared(options)

    def attach(self, module: nn.Module) -> list[RemovableHandle]:
        """Collects samples of each Linear in `module` whose weight is here, until the returned handles are removed."""
        mine = {p for group in self.param_groups for p in group["params"]}
        layers = [m for m in module.modules() if isinstance(m, nn.Linear) and m.weight in mine]
        if not layers:
            cure = "construct it with the module's parameters"
            raise ConfigError(f"attach found no torch.nn.Linear whose weight this optimiser has; {cure}")
        for layer in layers:
            passes = self._seen.setdefault(layer.weight, Passes())
            for hook in layer._forward_hooks.values():
                if isinstance(hook, _Watch) and hook.passes() is passes:
                    raise ConfigError("attach would count samples twice: it has this module; remove its handles first")
        return [m.register_forward_hook(_Watch(self._seen[m.weight]), with_kwargs=True) for m in layers]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears gradients, and the samples they came from."""
        super().zero_grad(set_to_none)
        for samples in self._seen.values():
            samples.clear()

    def check(self, group: Group) -> None:
        super().check(group)
        for p in group["params"]:
            if is_sharded(p):
                spread = f"{name_of(group, p)} is a DTensor; train it on one process"
                raise ConfigError(f"DGD needs every sample of every process, {spread}")

    def examine(self, group: Group, params: list[Tensor], grads: list[Tensor]) -> None:
        for p, grad in zip(params, grads, strict=True):
            if p not in self._seen:
                if group["unattached"] == "refuse":
                    cure = "call attach(module), or set unattached='sgd' for parameters that are no weight of a Linear"
                    raise ConfigError(f"DGD needs the inputs of {name_of(group, p)}: {cure}")
                continue
            samples = self._seen[p]
            sample_grad = sum((s.grads.mT.to(p) @ s.inputs.to(p) for s in samples), torch.zeros_like(p))
            self._scales[p] = _multiple(grad, sample_grad) if group["rescaled"] == "follow" else 1.0
            sample_grad = self._scales[p] * sample_grad
            if not can_inspect(grad, sample_grad):
                continue
            coarsest = max((torch.finfo(s.grads.dtype).eps for s in samples), default=0.0)
            allowed = max(coarsest, torch.finfo(p.dtype).eps) ** 0.5 * grad.norm()
            if not (sample_grad - grad).norm() <= allowed:
                raise ConfigError(
                    f"the {len(samples)} passes seen by DGD do not make up the gradient of {name_of(group, p)}; use "
                    "this optimiser's own zero_grad, do not clip gradients by value nor average them over processes, "
                    "and set rescaled='follow' if they are scaled or clipped by norm"
                )

    def update(self, group: Group, params: list[Tensor], grads: list[Tensor], states: list[State]) -> None:
        bulk = Bulk(group, params)
        lr, decay = bulk.number(group["lr"]), group["weight_decay"]
        if plain := [(p, g) for p, g in zip(params, grads, strict=True) if p not in self._seen]:
            bulk.move([p for p, _ in plain], [g for _, g in plain], lr, decay)
        if layers := [p for p in params if p in self._seen]:
            bulk.move(layers, [self._direction(group, p, lr) for p in layers], 1, lr * decay)

    def _direction(self, group: Group, p: Tensor, lr: Any) -> Tensor:
        """Direction of a step: sum_t c_t (w x_t + g_t) x_t^T over the samples, or its mean."""
        dtype, samples = state_dtype(p, group["state_dtype"]), self._seen[p]
        w = p.to(dtype)
        x = torch.cat([s.inputs for s in samples]).to(dtype)
        g = torch.cat([s.grads for s in samples]).to(dtype)
        g = len(g) * g if group["reduction"] == "mean" else g  # those of every pass: the loss of one is a share of it
        g = self._scales.get(p, 1.0) * (-g if group["maximize"] else g)
        c = lr / (1 + lr * (x * x).sum(-1, keepdim=True))
        if group["batch"] == "mean":
            return (c * (x @ w.mT + g)).mT @ x / max(1, len(x))
        moved = w
        for xs, gs, cs in zip(x.split(CHUNK), g.split(CHUNK), c.split(CHUNK), strict=True):
            # Errors e_t = w_t x_t + g_t with w_t = w - sum_(s < t) c_s e_s x_s^T: a triangular system.
            system = torch.tril(xs @ xs.mT, -1) * cs.mT
            errors = torch.linalg.solve_triangular(system, xs @ moved.mT + gs, upper=False, unitriangular=True)
            moved = moved - (cs * errors).mT @ xs
        return w - moved


def _multiple(grad: Tensor, sample_grad: Tensor) -> Tensor:
    """The factor s with s sample_grad nearest to grad; 1 if sample_grad is zero."""
    power = sample_grad.square().sum()
    return torch.where(power > 0, (sample_grad * grad).sum() / torch.where(power > 0, power, 1), 1)


class _Watch:
    """A forward hook that adds a layer's inputs and, in the backward pass, gradients of its outputs to an optimiser's
    passes.

    It refers to them weakly: in a copy of the layer without the optimiser, it adds nothing."""

    def __init__(self, passes: Passes) -> None:
        self.passes = ref(passes)

    def __reduce__(self) -> tuple[type[_Watch], tuple[Passes]]:
        passes = self.passes()
        return _Watch, (Passes() if passes is None else passes,)

    def __call__(self, module: nn.Module, args: tuple[Any, ...], named: dict[str, Any], output: Any) -> None:
        passes = self.passes()
        if passes is not None and isinstance(output, Tensor) and output.requires_grad:
            inputs = (args or tuple(named.values()))[0].detach()
            output.register_hook(lambda grad: passes.append(Samples(_rows(inputs), _rows(grad.detach()))))


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])
