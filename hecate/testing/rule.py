"""Checks of a memory configuration: the knobs it is made of, then whole scans on every engine."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from itertools import pairwise, product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hecate.algorithm import Algorithm
from hecate.engine import exact_engines, memory_scan
from hecate.formula import formula_of
from hecate.formula.nodes import NAMES
from hecate.formula.printer import Text, printed
from hecate.phi import Params
from hecate.rule import Gates, MemoryConfig, MemoryState
from hecate.structure import Structure
from hecate.tape import Block, several
from hecate.tape.ops import over
from hecate.testing.block import SIGNAL_FLOOR, check_vjp, close, require

_KERNELS = "by which kernels such as engine compiled go"


def check_rule(
    config: MemoryConfig,
    *,
    d: int = 3,
    width: int = 3,
    heads: int = 2,
    length: int = 6,
    smooth: bool = True,
    generator: torch.Generator | None = None,
) -> None:
    """Checks a configuration in float64: its knobs' derivatives and traits, then a whole scan.

    A scan must give the same outputs, final state and gradients by tape and by autograd, whole and in pieces, on every
    engine that runs it, and with masked tokens (holding NaN) as without them;
    a later token must change nothing before it. `smooth=False` leaves out second derivatives.
    Keys have width `d`, values `width`. Raises AssertionError naming what failed.
    """
    generator = generator or torch.Generator().manual_seed(0)
    config = config.model_copy(update={"state_dtype": "float64"})
    check_knobs(config, d=d, width=width, smooth=smooth, generator=generator)
    case = _inputs(config, d, width, heads, length, generator)
    whole = _run(case, autodiff="torch")
    signal = max(float(grad.norm()) for grad in whole.grads.values())
    require(signal > SIGNAL_FLOOR, f"{_name(config)}: no gradient above {SIGNAL_FLOOR}")
    _same(config, "the tape against autograd", _run(case), whole)
    _same(config, "a scan in pieces against the whole", _run(case, cuts=(0, 1, 1, length // 2 + 1, length)), whole)
    for engine, autodiff in product(exact_engines(config, length=length), ("tape", "torch")):
        got = _run(case, engine=engine, autodiff=autodiff)
        _same(config, f"engine {engine} ({autodiff}) against sequential", got, whole)
    _check_masks(case)
    _check_causality(case)


def check_knobs(
    config: MemoryConfig, *, d: int = 3, width: int = 3, smooth: bool = True, generator: torch.Generator | None = None
) -> None:
    """Checks the derivatives, declared traits and kernel forms of bias, retention, algorithm and structure."""
    generator = generator or torch.Generator().manual_seed(0)
    draw = partial(torch.randn, dtype=torch.float64, generator=generator)

    def gate(*shape: int) -> Tensor:
        return 0.2 + 0.7 * torch.rand(*shape, dtype=torch.float64, generator=generator)

    def check(block: Any, *inputs: Tensor, shape: torch.Size | None = None) -> None:
        """Checks a block's derivatives, that memories do not affect one another, and the shape of its output."""
        alone, _ = block.apply(tuple(item[:1] for item in inputs))
        for one, beside in zip(alone, block.apply(inputs)[0], strict=True):
            if shape is not None:
                require(beside.shape == shape, f"{block.name}: shape {list(beside.shape)}, expected {list(shape)}")
            close(f"{block.name}: a memory beside others against the same alone", beside[:1], one)
        check_vjp(block, inputs, second_order=smooth, generator=generator)

    n, d_phi = 4, config.feature_map.output_dim(d)
    _check_bias(config, draw(64, width), draw(64, width), draw(64, width))
    check(config.bias.block(), draw(n, width), draw(n, width))
    memory = tuple(draw(n, *shape) / shape[-1] ** 0.5 for shape in config.structure.shapes(d_phi, width).values())
    p, u = draw(n, d_phi), draw(n, width)
    check(config.structure.predict_block(), p, *memory, shape=u.shape)
    check(config.structure.pullback_block(), p, u, *memory)
    check(config.structure.gradient_block(config.bias.block()), p, draw(n, width), *memory)
    _check_structure(config, memory, p, u)

    def slots_of(weight: Tensor) -> list[Tensor]:
        """Slots after two writes: not every tensor is a valid slot (a mean of squares is >= 0)."""
        sizes = config.algorithm.slot_shapes(tuple(weight.shape[1:])).values()
        slots: list[Any] = [torch.zeros(n, *size, dtype=torch.float64) for size in sizes]
        for _ in range(2):
            outputs, _ = config.algorithm.block().apply((draw(*weight.shape), gate(n), gate(n), *slots))
            _, *slots = several(outputs)
        return slots

    shape = memory[0].shape
    inputs = (draw(*shape), gate(n), gate(n), *slots_of(memory[0]))
    check(config.algorithm.block(), *inputs)
    if not config.algorithm.uses_momentum:
        _check_unread(config.algorithm.block(), inputs, "momentum")
    _check_algorithm(config.algorithm, *inputs)
    gates = [gate(n)]
    if config.retention.uses_retain and config.structure.linear:
        gates.append(gate(n, shape[-1]))
    start, grads = config.retention.start, [0.3 * draw(*weight.shape) for weight in memory]
    slots = [slot for weight in memory for slot in slots_of(weight)]
    for retain in gates:
        check(config.retention.block(), start(draw(*shape)), draw(*shape), retain, shape=shape)
        if not config.retention.uses_retain:
            _check_unread(config.retention.block(), (start(draw(*shape)), draw(*shape), retain), "retain")
        moved = config.retention.step(start(draw(*shape)), draw(*shape), retain)
        check(config.retention.weights_block(), moved, shape=shape)
        states = [start(draw(*weight.shape)) for weight in memory]
        check(config.rule.step_block(), gate(n), retain, gate(n), *grads, *states, *slots)
        _check_retention(config, draw(*shape), draw(*shape), retain)


def _check_unread(block: Block, inputs: tuple[Tensor, ...], gate: str) -> None:
    """Moves the gate that a variant does not say that it takes, the third of its inputs."""
    before, after = (block.apply((*inputs[:2], scale * inputs[2], *inputs[3:]))[0] for scale in (1.0, 0.5))
    same = all(torch.equal(*pair) for pair in zip(several(before), several(after), strict=True))
    require(same, f"{block.name}: it reads the {gate} gate, which it does not declare; set uses_{gate} = True")


def _check_bias(config: MemoryConfig, pred: Tensor, target: Tensor, way: Tensor) -> None:
    bias, name = config.bias, f"bias.{config.bias.kind}"
    point = pred.clone().requires_grad_()
    loss = bias.loss(point, target)
    require(loss.shape == pred.shape[:-1], f"{name}: loss of shape {list(loss.shape)}")
    require(loss.requires_grad, f"{name}: the loss does not depend on pred")
    (true,) = torch.autograd.grad(loss.sum(), point)
    close(f"{name}: grad against autograd of loss", bias.grad(pred, target), true)
    other = way.roll(1, 0)
    lhs = (bias.grad_jvp(pred, target, way) * other).sum(-1)
    rhs = (bias.grad_jvp(pred, target, other) * way).sum(-1)
    close(f"{name}: the Hessian is not symmetric", lhs, rhs)
    if bias.linear:
        one, zero = torch.ones_like(pred), torch.zeros_like(pred)
        a, b = bias.grad(one, zero)[..., :1], bias.grad(zero, one)[..., :1]
        close(f"{name}: declared linear, grad against a pred + b v", bias.grad(pred, target), a * pred + b * target)
    if bias.curvature is not None:
        most = (bias.grad_jvp(pred, target, way) * way).sum(-1) / way.square().sum(-1)
        within = bool((most <= bias.curvature + 1e-12).all())
        require(within, f"{name}: declared curvature {bias.curvature:g}, found {float(most.max()):g}")
    formula = formula_of(bias)
    if not isinstance(formula, str):
        text = in_torch(formula.psi, pred.dtype, pred.shape[-1])(pred, target, formula.psi.numbers)
        close(f"{name}: its text, {_KERNELS}", bias.grad(pred, target), text.expand_as(pred))


def in_torch(text: Text, dtype: torch.dtype, width: int, height: int = 1) -> Callable[..., Any]:
    """A text as a function of tensors and the numbers c, run by torch's functions of the same names."""

    def where(condition: Tensor, x: Any, y: Any) -> Tensor:
        x, y = (item if isinstance(item, Tensor) else torch.tensor(item, dtype=dtype) for item in (x, y))
        return torch.where(condition, x, y)

    names = {name: getattr(torch, name) for name in NAMES if hasattr(torch, name)}
    names |= {
        "where": where, "power": torch.pow, "total": lambda x: x.sum(-1, keepdim=True),
        "top": lambda x: x.amax(-1, keepdim=True), "column_total": lambda x: x.sum(-2, keepdim=True),
        "column_top": lambda x: x.amax(-2, keepdim=True),
        "INF": math.inf, "NAN": math.nan, "N": float(width), "M": float(height),
    }  # fmt: skip
    exec(compile(text.source, f"<formula {text.name}>", "exec"), names)
    return names[text.name]


def _check_algorithm(algorithm: Algorithm, grad: Tensor, lr: Tensor, momentum: Tensor, *slots: Tensor) -> None:
    form, name = algorithm.kernel_form(), f"algorithm.{algorithm.kind}"
    if form is None:
        return
    fits = (len(slots), algorithm.uses_momentum, algorithm.linear) == (int(form.momentum), form.momentum, True)
    fits = fits and algorithm.takes_any_gradient() and not algorithm.context_shapes(1, 1)
    says = "linear in the token's own gradient, with one slot and a momentum gate if it says momentum, else none"
    require(fits, f"{name}: declared {form}: {says}")
    step, keep = -over(lr, grad) * grad, over(momentum, grad)
    carried = [keep * slot + step for slot in slots]
    expected = [keep * carried[0] + step if form.nesterov else carried[0] if carried else step, *carried]
    for got, true in zip(algorithm.direction(grad, lr, momentum, *slots), expected, strict=True):
        close(f"{name}: declared {form}, {_KERNELS}", got, true)


def _check_structure(config: MemoryConfig, memory: tuple[Tensor, ...], p: Tensor, u: Tensor) -> None:
    structure, name = config.structure, f"structure.{config.structure.kind}"
    whole, _ = structure.predict_vjp(memory, p, u)
    for got, expected in zip(structure.pullback(memory, p, u), whole, strict=True):
        close(f"{name}: pullback against predict_vjp", got, expected)
    if structure.linear:
        doubled = structure.predict(tuple(2 * weight for weight in memory), p)
        close(f"{name}: declared linear in the weights", doubled, 2 * structure.predict(memory, p))
        wanted = (p.shape[-1],) if structure.diagonal else (u.shape[-1], p.shape[-1])
        single = [tuple(weight.shape[1:]) for weight in memory] == [wanted]
        require(single, f"{name}: declared linear, needs one weight [V, P], or [P] if diagonal")
    if structure.diagonal:
        check_diagonal(name, structure, memory, p)


def check_diagonal(name: str, structure: Structure, memory: tuple[Tensor, ...], p: Tensor) -> None:
    """Moves the first coordinate of weight and p, which must leave the others of pred."""
    moved = [torch.cat([2 * item[..., :1] + 1, item[..., 1:]], -1) for item in (*memory, p)]
    pred, other = structure.predict(memory, p), structure.predict(tuple(moved[:-1]), moved[-1])
    require(structure.linear, f"{name}: declared diagonal, which only a linear structure can be")
    apart = torch.equal(pred[..., 1:], other[..., 1:])
    require(apart, f"{name}: declared diagonal, but coordinates of the prediction mix")


def _check_retention(config: MemoryConfig, memory: Tensor, direction: Tensor, retain: Tensor) -> None:
    retention, name = config.retention, f"retention.{config.retention.kind}"
    same = torch.equal(retention.weights(memory), memory)
    require(same or retention.dual, f"{name}: `weights` is a function of a dual state not declared")
    reason = "what is carried is a dual state, which only the step can be linear in: declare it additive"
    require(not (retention.linear and retention.dual), f"{name}: declared linear, but {reason}")
    formula = config.forms.retention
    if not isinstance(formula, str) and retain.dim() == 1 and memory.dim() == 3:
        text = printed("step", ("X", "D", "r"), [formula.single.out])
        step = in_torch(text, memory.dtype, memory.shape[-1], memory.shape[-2])
        moved = step(memory, direction, retain.view(-1, 1, 1), text.numbers)
        close(f"{name}: its text, {_KERNELS}", retention.step(memory, direction, retain), moved)
    if not retention.additive:
        return
    decayed = retention.step(memory, torch.zeros_like(direction), retain)
    both = retention.step(2 * memory, direction, retain)
    added = direction if retention.linear else retention.centred(direction, retain)
    declared = "linear, so a M + D" if retention.linear else "additive, so a X + D"
    close(f"{name}: declared {declared}", both, 2 * decayed + added)
    whole, centred = (retention.weights(decayed + item) for item in (direction, added))
    close(f"{name}: `centred` leaves out what the memory sees", centred, whole)


class _Case(NamedTuple):
    config: MemoryConfig
    leaves: dict[str, Tensor]  # q, k, v, gates, initial weights and learned parameters, by name
    frozen: dict[str, Tensor]


class _Result(NamedTuple):
    y: Tensor
    state: MemoryState
    grads: dict[str, Tensor]  # by the names of the leaves


def _inputs(config: MemoryConfig, d: int, width: int, heads: int, length: int, generator: torch.Generator) -> _Case:
    lead = (2, length, heads)
    each = lead if config.writes == 1 else (2, length, config.writes, heads)  # of every write
    draw = partial(torch.randn, dtype=torch.float64, generator=generator)

    def gate(low: float, high: float, lead: tuple[int, ...] = lead) -> Tensor:
        return low + (high - low) * torch.rand(*lead, dtype=torch.float64, generator=generator)

    phi = config.feature_map.init(d, heads=heads, generator=generator, dtype=torch.float64)
    leaves = {"q": draw(*lead, d), "k": draw(*each, d) / d**0.5, "v": draw(*each, width)}
    leaves["lr"] = gate(0.05, 0.3, each)
    if config.retention.uses_retain:
        leaves["retain"] = gate(0.5, 0.95)
    if config.algorithm.uses_momentum:
        leaves["momentum"] = gate(0.2, 0.8)
    shapes = config.structure.shapes(config.feature_map.output_dim(d), width)
    leaves |= {f"initial.{name}": draw(heads, *shape) / shape[-1] ** 0.5 for name, shape in shapes.items()}
    leaves |= {f"phi.{name}": tensor for name, tensor in phi["learned"].items()}
    return _Case(config, leaves, phi["frozen"])


def _scan(case: _Case, leaves: dict[str, Tensor], **options: Any) -> tuple[Tensor, MemoryState]:
    def under(prefix: str) -> dict[str, Tensor]:
        return {name.removeprefix(prefix): item for name, item in leaves.items() if name.startswith(prefix)}

    gates = Gates(leaves["lr"], leaves.get("retain"), leaves.get("momentum"))
    params: Params = {"learned": under("phi."), "frozen": case.frozen}
    q, k, v = (leaves[name] for name in "qkv")
    return memory_scan(case.config, q, k, v, gates, phi_params=params, initial=under("initial."), **options)


def _run(
    case: _Case, *, engine: Any = "sequential", autodiff: Any = "tape", cuts: tuple[int, ...] | None = None
) -> _Result:
    points = {name: item.detach().clone().requires_grad_() for name, item in case.leaves.items()}
    state: Any = None
    rows = []
    for at, end in pairwise(cuts or (0, points["q"].shape[1])):
        y, state = _scan(case, _cut(points, slice(at, end)), state=state, engine=engine, autodiff=autodiff)
        rows.append(y)
    y = torch.cat(rows, 1)
    outputs, source = [y, *_floats(state)], torch.Generator().manual_seed(1)
    weights = [torch.randn(item.shape, generator=source, dtype=item.dtype) for item in outputs]
    total = torch.stack([(item * weight).sum() for item, weight in zip(outputs, weights, strict=True)]).sum()
    grads = torch.autograd.grad(total, list(points.values()), materialize_grads=True)
    return _Result(y, state, dict(zip(points, grads, strict=True)))


def _cut(leaves: dict[str, Tensor], tokens: slice | list[int]) -> dict[str, Tensor]:
    """The leaves with a time axis, cut to some tokens; the others as they are."""
    return {name: item if "." in name else item[:, tokens] for name, item in leaves.items()}


def _check_masks(case: _Case) -> None:
    """Masked tokens, holding NaN, against a sequence without them."""
    length = case.leaves["q"].shape[1]
    written = [t for t in range(length) if t % 3 != 1]
    write = torch.zeros(2, length, dtype=torch.bool)
    write[:, written] = True
    dirty = dict(case.leaves)
    for name in ("k", "v"):
        wide = write.reshape(*write.shape, *[1] * (dirty[name].dim() - 2))
        dirty[name] = torch.where(wide, dirty[name], torch.nan)
    for engine in ("sequential", *exact_engines(case.config, length=length, masked=True)):
        with torch.no_grad():
            y, state = _scan(case, dirty, write_mask=write, engine=engine)
            expected, final = _scan(case, _cut(case.leaves, written), engine=engine)
        what = f"{_name(case.config)}: masked tokens on engine {engine} against none"
        close(f"{what}: outputs", y[:, written], expected)
        for got, true in zip(_floats(state), _floats(final), strict=True):
            close(f"{what}: state", got, true)


def _check_causality(case: _Case) -> None:
    last = case.leaves["q"].shape[1] - 1
    changed = {
        name: item if "." in name else torch.cat([item[:, :last], 0.9 * item[:, last:]], 1)
        for name, item in case.leaves.items()
    }
    with torch.no_grad():
        y, other = (_scan(case, leaves, engine="sequential")[0][:, :last] for leaves in (case.leaves, changed))
    require(torch.equal(y, other), f"{_name(case.config)}: the last token changes outputs before it")


def _same(config: MemoryConfig, what: str, got: _Result, expected: _Result) -> None:
    what = f"{_name(config)}: {what}"
    close(f"{what}: outputs", got.y, expected.y)
    for mine, theirs in zip(_floats(got.state), _floats(expected.state), strict=True):
        close(f"{what}: final state", mine, theirs)
    require(torch.equal(got.state.position, expected.state.position), f"{what}: position in the chunk")
    signal = max(float(grad.norm()) for grad in expected.grads.values())
    for name, mine in got.grads.items():
        close(f"{what}: gradient of {name}", mine, expected.grads[name], signal)


def _floats(state: MemoryState) -> list[Tensor]:
    leaves = torch.utils._pytree.tree_leaves(state)
    return [item for item in leaves if isinstance(item, Tensor) and item.is_floating_point()]


def _name(config: MemoryConfig) -> str:
    knobs = (config.structure, config.bias, config.retention, config.algorithm)
    return " x ".join(knob.kind for knob in knobs)
