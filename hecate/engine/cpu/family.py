"""The general kernel of the compiled engine: one walk over tokens, and the parts that a memory brings to it.

For matrix and slot memories under any bias, retention and algorithm that names a form, with every gate and rows of any
width: all that the kernels of `Scan` cannot run. A part and a walk are compiled once per float type, each by itself,
and kept on disk; see `parts`. [ENG-NUM-D8]
"""

from __future__ import annotations

import importlib
import math
import types
import warnings
from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from itertools import chain, repeat
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hecate.algorithm import AlgorithmForm
from hecate.engine.cpu.arrays import BYTES, LOADING, NO_MASK, ROWS, arrays, padded, share_out, whole
from hecate.engine.engine import chunk_refusal
from hecate.engine.tokens import Tokens
from hecate.formula import AlgorithmFormula, Formula, Weights
from hecate.rule import MemoryConfig
from hecate.structure.bound import FLOOR
from hecate.tape import Tensors, several

KERNELS = "hecate.engine.cpu.walk"
PRINTED = "learn_", "act_", "step_", "link_", "descend_"  # names of printed parts begin so; a digest follows
BLOCK = 1 << 14  # bytes of rows of a memory that go through a segment together: a third of a first cache
LEAST = 16  # least number of tokens between kept states; sqrt(T) if that is more


class Part(NamedTuple):
    """A part of the walk: its name, the numbers of its form, the arguments for its factory, and the scratch space that
    it needs, in states, rows of a state and vectors per row."""

    name: str
    numbers: tuple[float, ...] = ()
    options: tuple[Any, ...] = ()
    scratch: tuple[int, int, int] = (0, 0, 0)

    def room(self, height: int, width: int) -> int:
        """Numbers of scratch space for a state of this size."""
        states, rows, vectors = self.scratch
        return (states + vectors) * height * width + rows * width


class Parts(NamedTuple):
    """A memory's parts of the walk, in the order of the walk's arguments; with a graph `predict` is its activation, and
    there are no descend, step and gain."""

    learn: Part
    predict: Part
    descend: Part | None
    step: Part | None
    link: Part
    gain: Part | None
    plain: bool = False  # a write is one of `hecate.engine.cpu.plain`

    @property
    def parts(self) -> tuple[Part | None, ...]:
        """The parts alone."""
        return self[:-1]


def refusal(config: MemoryConfig) -> str | None:
    """Reason for no kernel: a knob without a form, or forms without a kernel together; None if there is one."""
    rule = config.rule
    if (reason := chunk_refusal(config)) is not None:
        return reason
    structure, retention, (form, slots) = rule.structure, config.forms.retention, config.forms.tokens
    if not structure.linear and slots is None:
        return f"structure {structure.kind!r} has no kernel"
    if config.forms.unprinted is not None:
        return config.forms.unprinted
    if isinstance(config.forms.descent, str):
        return f"algorithm {rule.algorithm.kind!r} as configured has no kernel: {config.forms.descent}"
    if isinstance(retention, str):
        return f"retention {rule.retention.kind!r} as configured has no kernel: {retention}"
    plain = form is not None and form.plain and not form.nesterov
    if not structure.linear and not plain:
        return (
            f"algorithm {rule.algorithm.kind!r} has a kernel for gradients of rank one, and those of structure "
            f"{structure.kind!r} are of any rank"
        )
    if structure.diagonal:
        for name, variant, apart in (
            ("algorithm", rule.algorithm, plain or config.forms.descent is not None),
            ("bias", rule.bias, config.forms.apart),
            ("retention", rule.retention, retention.cellwise),
        ):
            if not apart:
                return (
                    f"structure {structure.kind!r} goes coordinate by coordinate in kernels, and {name} "
                    f"{variant.kind!r} as configured is not known to treat them apart"
                )
    return None


def parts_of(
    config: MemoryConfig, *, channels: bool, values: bool, wide: tuple[int, bool] = (1, False), vectors: bool = False
) -> Parts:
    """The parts of a memory whose retain is per phi channel, per value channel, both or one number; `wide` as `at_once`
    has it; `vectors`: values are whole vectors, not fours."""
    rule, retention, descent = config.rule, config.forms.retention, config.forms.descent
    algorithm = config.rule.algorithm.token_form() or AlgorithmForm()
    slots = None if rule.structure.linear else rule.structure.token_form()
    learn, single = printed_part(config.forms.formula)._replace(options=(int(vectors),)), not (channels or values)
    if isinstance(retention, str):
        raise TypeError("the engine was chosen without its refusal being asked")
    kind = "single" if single else "channels" if channels else "rows"
    own = printed_part(retention.single if single else retention.cells, kind)._replace(options=wide)
    if slots is not None:
        predict, descend = Part("directions", (slots.least,)), Part("turning", (slots.least,), (algorithm.momentum,))
    elif isinstance(descent, AlgorithmFormula):
        predict, descend = Part("matrix"), printed_part(descent)._replace(options=wide)
    elif algorithm.erase is not None:
        predict, descend = Part("matrix"), Part("erasing", (algorithm.erase, float(algorithm.bounded)))
    else:
        predict, descend = Part("matrix"), Part("descent", (), (algorithm.momentum,))
    gain = Part("no_gain") if algorithm.ridge is None else Part("filtering", (1 / algorithm.ridge, algorithm.discount))
    # A retain per phi channel scales a matrix's cells as one number does.
    adds = retention.plain and not values and predict.name == "matrix" and descend.name == "descent"
    return Parts(learn, predict, descend, own, link_part(config, wide), gain, adds)


def link_part(config: MemoryConfig, wide: tuple[int, bool]) -> Part:
    """The part that maps the carried state to weights; it does nothing where the two are the same."""
    found = config.forms.retention
    link = None if isinstance(found, str) else found.link
    return Part("no_link") if link is None else printed_part(link)._replace(options=wide)


def at_once(rows: Sequence[int], padded: Sequence[int], vector: int) -> tuple[int, bool]:
    """The number of vectors, at most four, that kernels may take at once from rows of these padded sizes; and whether
    the rows have no padding."""
    count = next(count for count in (4, 2, 1) if all(size % (count * vector) == 0 for size in padded))
    return count, list(rows) == list(padded)


@cache
def printed_part(found: Formula | Weights | AlgorithmFormula | tuple[Any, ...] | str | None, kind: str = "") -> Part:
    """The part of a bias, an activation's nodes, an algorithm, a link or a step. Raises TypeError for what has none."""
    if found is None or isinstance(found, str):
        raise TypeError("the engine was chosen without its refusal being asked")
    return Part(*importlib.import_module("hecate.engine.cpu.rows").part(found, kind))


@lru_cache(maxsize=256)
def block_of(height: int, unit: int, row: int) -> int:
    """Rows of a memory that go through a segment together, in whole units: of no more than BLOCK bytes, if that can be,
    and so many that little is padded."""
    units = whole(height, unit) // unit
    least = min(-(-height * row // BLOCK), units)
    blocks = [-(-units // count) * unit for count in range(least, min(2 * least, units) + 1)]
    return min(blocks, key=lambda block: (whole(height, block), -block))


class Layout(NamedTuple):
    """Places of weights in a state.

    Fields:
        places: where each weight begins, with its rows and columns, padded.
        cells: numbers of a state.
        largest: rows and columns that no weight has more of.
        wide: as `at_once` says of them.
    """

    places: tuple[tuple[int, int, int], ...]
    cells: int
    largest: tuple[int, int]
    wide: tuple[int, bool]


@lru_cache(maxsize=256)
def layout_of(shapes: tuple[tuple[int, ...], ...], vector: int, block: int = ROWS) -> Layout:
    """The layout of weights of these shapes, a vector having so many numbers, in whole blocks of rows."""
    places, at = [], 0
    for height, width in shapes:
        places.append((at, whole(height, block), whole(width, vector)))
        at += places[-1][1] * places[-1][2]
    _, rows, columns = zip(*places, strict=True)
    return Layout(
        tuple(places), at, (max(rows), max(columns)), at_once([width for _, width in shapes], columns, vector)
    )


# Compiling.

RouteOf = Callable[..., Any]  # the route of a graph for shapes
Wanted = tuple[str, tuple[Any, ...], str, bool]  # a part's name, options, place in `Parts`, and whether backward

# Arguments of parts, do and back: A an array, f a number, i a whole one; of walks before their parts also B a mask, I
# whole numbers in a row, R the rule and G a graph.
_ARGUMENTS = {
    "learn": ("AAAiA", "AAAAAAiA"),
    "act": ("AAAAiA", ""),
    "predict": ("AAAiiAA", "AAAAAiiAA"),
    "descend": ("AAAAffAiiiiAA", "AAAAffAAAAAiiiiAA"),
    "step": ("AAAAAiiiiAA", "AAAAAAAAiiiiiAA"),
    "link": ("AAiiiiAA", "AAAAiiiiAA"),
    "gain": ("AAAAiiAA", "AAAAAiiAA"),
    "walk": ("iiRGAAAAAABB" + "A" * 13, "iiRGAAAAAABB" + "A" * 27 + "I"),
}
PLACES = Parts._fields[:-1]
WALKS: dict[str, tuple[str | None, ...]] = {"walk": PLACES, "layers": ("learn", "act", None, None, "link", None)}


def _python(name: str, options: tuple[Any, ...], back: bool) -> Callable[..., Any]:
    """The Python function of a part or a walk, for numba to compile."""
    if name in WALKS:
        return getattr(importlib.import_module(KERNELS), "backward" if back else "forward")
    if name.startswith(PRINTED):
        return importlib.import_module("hecate.engine.cpu.rows").function(name, back, *options)
    parts = importlib.import_module("hecate.engine.cpu.parts")
    return getattr(parts, name)(*options)[back] if options else getattr(parts, f"{name}_back" if back else name)


def _signature(place: str, back: bool, dtype: Any) -> Any:
    """Signature of the part in a place, or of a walk, whose last arguments are its parts, each followed by its numbers,
    and then the derivatives of parts."""
    from numba import types as nb

    from hecate.engine.cpu.layers import Graph
    from hecate.engine.cpu.walk import Rule

    number = nb.float32 if dtype == np.float32 else nb.float64
    array, nodes = nb.Array(number, 1, "C"), nb.Array(nb.int64, 2, "C")
    kinds = {
        "A": array, "f": number, "i": nb.int64, "B": nb.Array(nb.boolean, 1, "C"), "I": nb.Array(nb.int64, 1, "C"),
        "R": nb.NamedUniTuple(nb.int64, len(Rule._fields), Rule),
        "G": nb.NamedTuple((nodes, array, array), Graph) if place == "layers" else nb.none,
    }  # fmt: skip
    parts = WALKS.get(place, ())
    given = [kinds[letter] for letter in _ARGUMENTS["walk" if parts else place][back]]
    for own in parts:
        given += [nb.intp, array] if own else [nb.none, nb.none]
    for own in parts if back else ():
        given.append(nb.intp if own and _ARGUMENTS[own][1] else nb.none)
    return nb.void(*given)


@cache
def _built(name: str, options: tuple[Any, ...], place: str, back: bool, dtype: Any) -> Any:
    """A kernel of a part or a walk under its full name; numba compiles it, or loads it from disk."""
    from hecate.engine.cpu.disk import compiled

    found = _python(name, options, back)
    named = types.FunctionType(found.__code__, found.__globals__, found.__name__, None, found.__closure__)
    named.__qualname__ = f"{_named(name, options, back)}_{np.dtype(dtype).name}"
    return compiled(named)


def _named(name: str, options: tuple[Any, ...], back: bool) -> str:
    return "_".join([name, *(str(int(item)) for item in options), *(["back"] if back else [])])


@cache
def ready(wanted: tuple[Wanted, ...], dtype: Any) -> list[Any]:
    """The functions as machine code, compiled for a float type."""
    with LOADING, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # numba still warns that functions as arguments are experimental
        kernels = [_built(*item, dtype) for item in wanted]
        for kernel, (_, _, place, back) in zip(kernels, wanted, strict=True):
            if not kernel.signatures:
                kernel.compile(_signature(place, back, dtype))
                kernel.disable_compile()
    return kernels


@cache
def functions_of(name: str, parts: Parts, back: bool, dtype: Any) -> list[Any]:
    """A walk in machine code, then the addresses and numbers of the parts that it is given."""
    places = [(place, part) for place, part in zip(WALKS[name], parts.parts, strict=True) if place and part]
    wanted = [
        (part.name, part.options, place, way)
        for way in (False, True)[: 1 + back] for place, part in places if _ARGUMENTS[place][way]
    ]  # fmt: skip
    run, *code = ready(((name, (), name, back), *wanted), dtype)
    built: dict[Any, Any] = {}
    for (_, _, at, way), kernel in zip(wanted, code, strict=True):
        (result,) = kernel.overloads.values()
        built[at, way] = result.library.get_pointer_to_function(result.fndesc.llvm_func_name)
    numbers: dict[Any, Any] = {place: np.array(part.numbers, dtype) for place, part in places}
    functions = [run]
    for place in WALKS[name]:
        functions += [built.get((place, False)), numbers.get(place)]
    return functions + [built.get((place, True)) for place in WALKS[name]] if back else functions


# Running.


class Walk:
    """The inputs of one call: states `[N, size]`, their weights padded, and tokens, `[B, T, H, *]` as they lie;
    `[N, T, *]` are those of one head."""

    def __init__(self, config: MemoryConfig, inputs: Tensors, route_of: RouteOf | None = None) -> None:
        """From memory, slots, initial memory and the fields of `Tokens`, flat; `route_of` where the kernels go through
        the structure's graph."""
        count = len(inputs) - len(Tokens._fields)
        if route_of is None:
            form, descent = config.algorithm.token_form() or AlgorithmForm(), config.forms.descent
            slots = descent.slots if isinstance(descent, AlgorithmFormula) else 0
            self.carried, self.gains, self.weights = slots or int(form.momentum), form.ridge is not None, 1
            self.apart = slots > 0  # the direction is none of the slots
        else:
            self.weights = config.structure.graph().weights
            self.carried, self.gains, self.apart = count // self.weights - 2, False, False
        self.moving = self.carried + self.apart
        self.states = several(inputs[: count - self.weights])
        self.initial: Any = inputs[count - self.weights : count]
        self.config, self.tokens = config, Tokens(*inputs[count:])  # type: ignore[arg-type]
        tokens, first = self.tokens, self.states[0]
        self.values, self.channels, self.length = tokens.v.shape[-1], tokens.phi_k.shape[-1], tokens.v.shape[1]
        self.shapes = tuple([weight.shape[1:] for weight in self.states[: self.weights]])
        self.count, self.new, self.zeros, vector = len(first), first.new_empty, first.new_zeros, BYTES // first.itemsize
        self.layout = layout_of(self.shapes, vector)
        self.cells, wide = self.layout.cells, self.layout.wide
        self.height, self.width = whole(self.values, vector if route_of else ROWS), whole(self.channels, vector)
        self.by_channel = tokens.retain.dim() > tokens.lr.dim()
        self.segment = max(LEAST, math.isqrt(self.length))
        self.route = route_of and route_of(config.structure, self.shapes, self.channels, vector, config.forms.acts)
        self.row, self.record, full = 0, 2 * self.height, self.height % vector == 0
        if self.route is None:
            values = tokens.retain_value is not None
            self.parts = parts_of(config, channels=self.by_channel, values=values, wide=wide, vectors=full)
        else:
            self.row, self.record = self.route.row, 2 * self.route.row + self.height
            learn, link = printed_part(config.forms.formula), link_part(config, wide)
            self.parts = Parts(learn, self.route.act, None, None, link, None)
        self.linked = self.parts.link.name != "no_link"
        self.blocks = 1
        if self.parts.plain and config.forms.apart and not self.gains:
            block = block_of(self.height, vector if full else ROWS, self.width * first.itemsize)
            self.layout = layout_of(self.shapes, vector, block)
            self.cells, self.height = self.layout.cells, whole(self.values, block)
            self.blocks, self.record = self.height // block, 2 * block
        self.anchored = config.retention.anchored
        self.starts = tokens.reset is not None or self.anchored  # whether the start takes part

    @property
    def spare(self) -> int:
        """Numbers of scratch space for the parts."""
        rows = 8 * (self.height + self.width)
        if self.parts.plain:
            return rows
        most = self.cells + rows
        for part in self.parts.parts:
            if part is not None and any(part.scratch):
                most = max(most, part.room(*self.layout.largest))
        return most

    def packed(self, weights: Sequence[Tensor]) -> Tensor:
        """A state of these weights."""
        # Padding is 0 and stays so: no write, norm or sum sees it.
        flat = []
        for weight, (_, rows, columns) in zip(weights, self.layout.places, strict=True):
            if weight.shape[1:] != (rows, columns):
                weight = padded(weight, rows, columns)
            flat.append(weight.detach().flatten(1))
        return torch.cat(flat, 1)

    def unpacked(self, state: Tensor) -> list[Tensor]:
        """The weights of a state."""
        return [
            state[:, o : o + rows * columns].unflatten(1, (rows, columns))[:, :height, :width].contiguous()
            for (height, width), (o, rows, columns) in zip(self.shapes, self.layout.places, strict=True)
        ]

    def copies(self, states: Sequence[Tensor]) -> list[Tensor]:
        """Copies of memory, of slots `[N, slots, size]`, the direction's place being the last, and of gain's matrix, of
        size 0 where there is none."""
        none, slots = self.new(0), []
        for at in range(0, self.weights * (1 + self.carried), self.weights):
            slots.append(self.packed(states[at : at + self.weights]))
        memory = slots.pop(0)
        if self.apart:
            slots.append(torch.zeros_like(memory))
        square = padded(states[-1], self.width, self.width).clone() if self.gains else none
        return [memory, torch.stack(slots, 1) if slots else none, square]

    def cut(self, states: Sequence[Tensor]) -> list[Tensor]:
        """Memory, slots and gain's matrix without their padding."""
        memory, slots, square = states
        weights = self.unpacked(memory)
        for at in range(self.carried):
            weights += self.unpacked(slots[:, at])
        return [*weights, *([square[:, : self.channels, : self.channels].contiguous()] if self.gains else [])]

    def launch(self, back: bool, given: Sequence[Tensor], scratch: Sequence[int]) -> None:
        """Runs a walk over all memories on what is given beside their tokens, each worker with scratch space of its
        own, filled with zeros."""
        tokens, none, high, kernels = self.tokens, self.new(0), (self.height,), importlib.import_module(KERNELS)
        wide, of_retain = (self.width,), (self.width,) if self.by_channel else ()
        write = NO_MASK if tokens.write is None else tokens.write
        reset = NO_MASK if tokens.reset is None else tokens.reset
        initial = self.packed(self.initial) if self.starts else none
        value, of_value = (none, ()) if tokens.retain_value is None else (tokens.retain_value, high)
        tensors = (*tokens[:6], write, reset, tokens.phi_w, value, initial, *given)
        rows = arrays(tensors, chain((wide, wide, high, (), of_retain, (), (), (), wide, of_value), repeat(())))
        if tokens.phi_w is None:
            rows[8] = rows[0]
        rule, dtype = self.rule(kernels), rows[0].dtype.type
        run, *functions = functions_of("walk" if self.route is None else "layers", self.parts, back, dtype)

        def work(lo: int, hi: int) -> None:
            space, graph = arrays([self.zeros(size) for size in scratch]), None
            if self.route is not None:
                floor = FLOOR if self.config.blocks else 0.0
                values = np.zeros(self.route.scratch, dtype)
                numbers = np.array([self.route.eps, floor, np.finfo(dtype).eps], dtype)
                graph = kernels.layers.Graph(self.route.nodes, numbers, values)
            slots = [np.zeros(2 * self.segment, np.int64)] if back else []
            run(lo, hi, rule, graph, *rows, *space, *slots, *functions)

        # A cell of layers takes some four times as long as one of a matrix.
        share_out(work, self.count, self.count * self.length * self.cells * (1 if self.route is None else 4))

    def rule(self, kernels: types.ModuleType) -> Any:
        """The numbers that steer a walk."""
        config, lr, retention = self.config, self.tokens.lr, self.config.retention
        return kernels.Rule(
            lr.shape[2] if lr.dim() == 3 else 1, self.length, self.blocks, self.height // self.blocks, self.width,
            self.values, self.channels, self.cells // self.blocks, self.row, self.record, self.segment,
            int(self.by_channel), int(retention.uses_retain), int(config.decay_order == "before_gradient"),
            int(config.read == "before"), self.moving, int(self.linked), int(self.gains),
            int(self.parts.plain), int(retention.centring), int(self.anchored),
        )  # fmt: skip


def walked(
    config: MemoryConfig, inputs: Tensors, keeps: bool, route_of: RouteOf | None = None
) -> tuple[Tensors, Tensors]:
    """Outputs and final states; and the record for `walked_vjp` if asked for."""
    call = Walk(config, inputs, route_of)
    *shape, v = call.tokens.v.shape
    height, width = call.height, call.width
    states = call.copies(call.states)
    y = call.new(*shape, height)
    segments = call.count * -(-call.length // call.segment) if keeps else 0
    kept = [call.new(segments * size) for size in (call.cells, call.cells * call.moving, width**2 * call.gains)]
    kept.append(call.new(*shape, height) if keeps and call.parts.plain else call.new(0))
    room = 0 if call.parts.plain else 5
    scratch = [room * call.cells + call.spare, call.record + height + 2 * width]
    call.launch(False, (*states, y, *kept), scratch)
    return (y[..., :v], *call.cut(states)), tuple(kept)


def walked_vjp(
    config: MemoryConfig, inputs: Tensors, record: Tensors, cotangents: Sequence[Tensor],
    route_of: RouteOf | None = None,
) -> Tensors:  # fmt: skip
    """Cotangents of all inputs."""
    call = Walk(config, inputs, route_of)
    tokens, height, width, cells = call.tokens, call.height, call.width, call.cells // call.blocks
    gy, *finals = cotangents
    states = call.copies(finals)
    (*shape, v), p = tokens.v.shape, call.channels
    initial, zeros = call.zeros(states[0].shape if call.starts else 0), call.zeros
    gk, gq, gv = zeros(*shape, width), zeros(*shape, width), zeros(*shape, height)
    moves = config.algorithm.uses_momentum
    glr, gmomentum = zeros(*shape), zeros(*shape if moves else [0])
    gretain = zeros(*shape, width) if call.by_channel else zeros(*shape)
    gw = zeros(*shape, width) if tokens.phi_w is not None else zeros(0)
    gvalue = zeros(*shape, height) if tokens.retain_value is not None else zeros(0)
    count = call.segment * (2 if tokens.reset is not None else 1) + 1
    scratch = [
        count * cells, count * cells * call.moving, count * width**2 * call.gains, count * cells * call.linked,
        (0 if call.parts.plain else 7 * cells) + call.spare, width**2 * call.gains,
        4 * (height + width) + 2 + call.segment * call.record,
    ]  # fmt: skip
    given = (padded(gy, height), *states, initial, gk, gq, gv, glr, gretain, gmomentum, gw, gvalue)
    call.launch(True, (*several(record), *given), scratch)
    decays = config.retention.uses_retain
    return (
        *call.cut(states), *(call.unpacked(initial) if call.starts else [None] * call.weights),
        gk[..., :p], gq[..., :p], gv[..., :v],
        glr, (gretain[..., :p] if call.by_channel else gretain) if decays else None, gmomentum if moves else None,
        None, None, gw[..., :p] if tokens.phi_w is not None else None,
        gvalue[..., :v] if tokens.retain_value is not None else None,
    )  # fmt: skip
