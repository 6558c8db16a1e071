"""The general kernel of the compiled engine: one walk over tokens, and the parts that a memory brings to it.

For matrix and slot memories under any bias, retention and algorithm that names a form, with every gate: all that the
kernels of `Scan` cannot run. A part and a walk are compiled once per float type, each by itself, and kept on disk; see
`parts`. [ENG-NUM-D8]
"""

from __future__ import annotations

import importlib
import math
import types
import warnings
from collections.abc import Callable, Sequence
from functools import cache
from itertools import chain, repeat
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hecate.algorithm import AlgorithmForm
from hecate.engine.cpu.arrays import BYTES, NO_MASK, ROWS, arrays, padded, share_out
from hecate.engine.engine import chunk_refusal
from hecate.engine.tokens import Tokens
from hecate.formula import AlgorithmFormula, Formula, Weights
from hecate.rule import MemoryConfig
from hecate.tape import Tensors, several

PRINTED = "learn_", "act_", "step_", "link_", "descend_"  # names of printed parts begin so; a digest follows
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
    """A memory's parts of the walk, in the order of the walk's arguments."""

    learn: Part
    predict: Part
    descend: Part
    step: Part
    link: Part
    gain: Part
    plain: bool  # a step is r X - lr u w^T with r of one number a row, for which the walk has one pass

    @property
    def parts(self) -> tuple[Part, ...]:
        """The parts alone."""
        return self.learn, self.predict, self.descend, self.step, self.link, self.gain


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


def parts_of(config: MemoryConfig, *, channels: bool, values: bool, wide: tuple[int, bool] = (1, False)) -> Parts:
    """The parts of a memory whose retain is per phi channel, per value channel, both or one number; `wide` as `at_once`
    has it."""
    rule, retention, descent = config.rule, config.forms.retention, config.forms.descent
    algorithm = config.rule.algorithm.token_form() or AlgorithmForm()
    slots = None if rule.structure.linear else rule.structure.token_form()
    learn, single = printed_part(config.forms.formula), not (channels or values)
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
    adds = retention.single.sum and not channels and descend == Part("descent", (), (False,))
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


# Compiling.

Wanted = tuple[str, tuple[Any, ...], str, bool]  # a part's name, options, place in `Parts`, and whether backward

# Arguments of parts, do and back: A an array, f a number, i a whole one; of walks before their parts also B a mask, I
# whole numbers in a row, R the rule and P a plan.
_ARGUMENTS = {
    "learn": ("AAAiA", "AAAAAAiA"),
    "act": ("AAAAiA", ""),
    "predict": ("AAAiiAA", "AAAAAiiAA"),
    "descend": ("AAAAffAiiiiAA", "AAAAffAAAAAiiiiAA"),
    "step": ("AAAAAiiiiAA", "AAAAAAAAiiiiiAA"),
    "link": ("AAiiiiAA", "AAAAiiiiAA"),
    "gain": ("AAAAiiAA", "AAAAAiiAA"),
    "walk": ("iiRAAAAAABB" + "A" * 12, "iiRAAAAAABB" + "A" * 26 + "I"),
    "layers": (
        "iiiiPf" + "i" * 8 + "AAAAAABB" + "A" * 6 + "iiiiiif" + "A" * 8,
        "iiiiPf" + "i" * 8 + "AAAAAABB" + "A" * 13 + "iiiiiif" + "A" * 17,
    ),
}
PLACES = Parts._fields[:-1]
WALKS = {"walk": (PLACES, PLACES), "layers": (("learn", "act", "link"), ("learn", "link"))}  # parts, and back


def _python(name: str, options: tuple[Any, ...], back: bool) -> Callable[..., Any]:
    """The Python function of a part or a walk, for numba to compile."""
    if name in WALKS:
        return getattr(importlib.import_module(f"hecate.engine.cpu.{name}"), "backward" if back else "forward")
    if name.startswith(PRINTED):
        return importlib.import_module("hecate.engine.cpu.rows").function(name, back, *options)
    parts = importlib.import_module("hecate.engine.cpu.parts")
    return getattr(parts, name)(*options)[back] if options else getattr(parts, f"{name}_back" if back else name)


def _signature(place: str, back: bool, dtype: Any) -> Any:
    """Signature of the part in a place, or of a walk, whose last arguments are its parts, each followed by its numbers,
    and then the derivatives of parts."""
    from numba import types as nb

    from hecate.engine.cpu.walk import Rule

    number = nb.float32 if dtype == np.float32 else nb.float64
    array = nb.Array(number, 1, "C")
    kinds = {
        "A": array, "f": number, "i": nb.int64, "B": nb.Array(nb.boolean, 1, "C"), "I": nb.Array(nb.int64, 1, "C"),
        "R": nb.NamedUniTuple(nb.int64, len(Rule._fields), Rule), "P": nb.Array(nb.int64, 2, "C"),
    }  # fmt: skip
    given = [kinds[letter] for letter in _ARGUMENTS[place][back]]
    parts, derivatives = WALKS.get(place, ((), ()))
    for own in parts:
        given += [nb.FunctionType(_signature(own, False, dtype)), array]
    if back:
        given += [nb.FunctionType(_signature(own, True, dtype)) for own in derivatives]
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
    kernels = [_built(*item, dtype) for item in wanted]
    for kernel, (_, _, place, back) in zip(kernels, wanted, strict=True):
        if not kernel.signatures:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # numba still warns that functions as arguments are experimental
                kernel.compile(_signature(place, back, dtype))
            kernel.disable_compile()
    return kernels


# Running.


class Walk:
    """The inputs of one call: states `[N, V, P]` and tokens, `[B, T, H, *]` as they lie; `[N, T, *]` are those of one
    head."""

    def __init__(self, config: MemoryConfig, inputs: Tensors) -> None:
        """From memory, slots, initial memory and the fields of `Tokens`, flat."""
        form, descent = config.algorithm.token_form() or AlgorithmForm(), config.forms.descent
        slots = descent.slots if isinstance(descent, AlgorithmFormula) else 0
        self.apart = slots > 0  # the direction is not one of the slots
        self.carried, self.gains = slots or int(form.momentum), form.ridge is not None
        self.moving = self.carried + self.apart
        states = 1 + self.carried + self.gains
        memory, *more = several(inputs[:states])
        self.tokens = tokens = Tokens(*inputs[states + 1 :])  # type: ignore[arg-type]
        self.config, self.memory, self.slots, self.initial = config, memory, more, inputs[states]
        (self.count, self.values, self.channels) = memory.shape
        vector = BYTES // memory.element_size()
        self.height, self.width = -(-self.values // ROWS) * ROWS, -(-self.channels // vector) * vector
        self.by_channel = tokens.retain.dim() > tokens.lr.dim()
        self.length = tokens.v.shape[1]
        self.segment = max(LEAST, math.isqrt(self.length))
        self.parts = parts_of(
            config, channels=self.by_channel, values=tokens.retain_value is not None,
            wide=at_once([self.channels], [self.width], vector),
        )  # fmt: skip
        self.linked = self.parts.link.name != "no_link"

    @property
    def cells(self) -> int:
        """Numbers in a state, padding included."""
        return self.height * self.width

    @property
    def spare(self) -> int:
        """Numbers of scratch space for the parts."""
        most = (part.room(self.height, self.width) for part in self.parts.parts)
        return max(self.cells + 8 * (self.height + self.width), *most)

    def state(self, state: Tensor) -> Tensor:
        """A copy of a state with padding."""
        return padded(state, self.height, self.width).clone()

    def square(self, context: Tensor) -> Tensor:
        """A copy of a gain's matrix with padding."""
        return padded(context, self.width, self.width).clone()

    def copies(self, states: Sequence[Tensor]) -> list[Tensor]:
        """Copies of memory, of slots `[N, slots, V, P]`, the direction's place being the last, and of gain's matrix, of
        size 0 where there is none."""
        none = self.memory.new_empty(0)
        memory, *given = (self.state(state) for state in states[: 1 + self.carried])
        if self.apart:
            given = [*given, torch.zeros_like(memory)]
        slots = torch.stack(given, 1) if given else none
        return [memory, slots, self.square(states[-1]) if self.gains else none]

    def cut(self, states: Sequence[Tensor]) -> list[Tensor]:
        """Memory, slots and gain's matrix without their padding."""
        memory, slots, square = states
        v, p = self.values, self.channels
        kept = [memory[:, :v, :p], *(slots[:, at, :v, :p] for at in range(self.carried))]
        return [item.contiguous() for item in (*kept, *([square[:, :p, :p]] if self.gains else []))]

    def launch(self, name: str, given: Sequence[Tensor], scratch: Sequence[int]) -> None:
        """Runs a walk over all memories, on the inputs and the arrays `given`; each thread has its own scratch space,
        filled with zeros."""
        config, tokens, none = self.config, self.tokens, self.memory.new_empty(0)
        rule = importlib.import_module("hecate.engine.cpu.walk").Rule(
            tokens.lr.shape[2] if tokens.lr.dim() == 3 else 1, self.length, self.height, self.width, self.values,
            self.channels, self.segment, int(self.by_channel), int(config.retention.uses_retain),
            int(config.decay_order == "before_gradient"), int(config.read == "before"), self.moving,
            int(self.linked), int(self.gains), int(self.parts.plain),
        )  # fmt: skip
        wide, high, back = (self.width,), (self.height,), name == "backward"
        keys = padded(tokens.phi_k, self.width)
        write, reset = (NO_MASK if mask is None else mask for mask in (tokens.write, tokens.reset))
        initial, whole = (none, ()) if tokens.reset is None else (self.initial, (self.height, self.width))
        phi_w, value = keys if tokens.phi_w is None else tokens.phi_w, tokens.retain_value
        value, high_value = (none, ()) if value is None else (value, high)
        own = (keys, tokens.phi_q, tokens.v, *tokens[3:6], write, reset, phi_w, value, initial)
        sizes = ((), wide, high, (), wide if self.by_channel else (), (), (), (), wide, high_value, whole)
        rows = arrays((*own, *given), chain(sizes, repeat(())))
        dtype = rows[0].dtype.type
        named = [(part.name, part.options, place) for place, part in zip(PLACES, self.parts.parts, strict=True)]
        ways = (False, True) if back else (False,)
        run, *parts = ready((("walk", (), "walk", back), *((*item, way) for way in ways for item in named)), dtype)
        functions: list[Any] = []
        for part, function in zip(self.parts.parts, parts, strict=False):
            functions += [function, np.array(part.numbers, dtype)]
        functions += parts[len(PLACES) :]

        def work(lo: int, hi: int) -> None:
            own = arrays([none.new_zeros(size) for size in scratch])
            slots = [np.zeros(2 * self.segment, np.int64)] if back else []
            run(lo, hi, rule, *rows, *own, *slots, *functions)

        share_out(work, self.count, self.count * self.length * self.cells)


def walked(config: MemoryConfig, inputs: Tensors, keeps: bool) -> tuple[Tensors, Tensors]:
    """Outputs and final states; and the record for `walked_vjp` if asked for."""
    call = Walk(config, inputs)
    *shape, v = call.tokens.v.shape
    new, height, width = call.memory.new_empty, call.height, call.width
    states = call.copies([call.memory, *call.slots])
    y = new(*shape, height)
    segments = -(-call.length // call.segment) if keeps else 0
    kept = [new(call.count * segments * size) for size in (call.cells, call.cells * call.moving, width**2 * call.gains)]
    scratch = [(5 + max(call.moving, 1)) * call.cells + call.spare, 3 * height + 2 * width + 2]
    call.launch("forward", (*states, y, *kept), scratch)
    return (y[..., :v], *call.cut(states)), tuple(kept)


def walked_vjp(config: MemoryConfig, inputs: Tensors, record: Tensors, cotangents: Sequence[Tensor]) -> Tensors:
    """Cotangents of all inputs."""
    call = Walk(config, inputs)
    tokens, height, width, cells = call.tokens, call.height, call.width, call.cells
    gy, *finals = cotangents
    states = call.copies(finals)
    (*shape, v), p = tokens.v.shape, call.channels
    zeros = call.memory.new_zeros
    initial = zeros(states[0].shape if tokens.reset is not None else 0)
    gk, gq, gv = zeros(*shape, width), zeros(*shape, width), zeros(*shape, height)
    moves = config.algorithm.uses_momentum
    glr, gmomentum = zeros(*shape), zeros(*shape if moves else [0])
    gretain = zeros(*shape, width) if call.by_channel else zeros(*shape)
    gw = zeros(*shape, width) if tokens.phi_w is not None else zeros(0)
    gvalue = zeros(*shape, height) if tokens.retain_value is not None else zeros(0)
    count = call.segment * (2 if tokens.reset is not None else 1) + 1
    scratch = [
        count * cells, count * cells * call.moving, count * width**2 * call.gains, count * cells * call.linked,
        7 * cells + call.spare, width**2 * call.gains, 4 * (height + width) + 2 + 2 * call.segment * height,
    ]  # fmt: skip
    given = (padded(gy, height), *states, initial, gk, gq, gv, glr, gretain, gmomentum, gw, gvalue)
    call.launch("backward", (*several(record), *given), scratch)
    decays = config.retention.uses_retain
    return (
        *call.cut(states), initial[:, :v, :p].contiguous() if tokens.reset is not None else None,
        gk[..., :p], gq[..., :p], gv[..., :v],
        glr, (gretain[..., :p] if call.by_channel else gretain) if decays else None, gmomentum if moves else None,
        None, None, gw[..., :p] if tokens.phi_w is not None else None,
        gvalue[..., :v] if tokens.retain_value is not None else None,
    )  # fmt: skip
