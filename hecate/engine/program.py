"""A scan as a function of its tensors: phi, engines, the sum normaliser's quotient."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hecate.engine.by_hand import is_traced
from hecate.engine.chunk import chunked
from hecate.engine.cpu import compiled
from hecate.engine.fla import by_fla
from hecate.engine.loop import sequential
from hecate.engine.parallel import parallel
from hecate.engine.parts import Part, counting_along
from hecate.engine.prepare import Sequence, cast, in_folds, params_tensors, to_tokens, with_tensors
from hecate.engine.quotients import DIVIDE, Levelled, levelled, times
from hecate.engine.tokens import Carry, Tokens
from hecate.phi import Params
from hecate.rule.rule import one
from hecate.structure import Memory
from hecate.tape import Block, Program, Run, Tensors, execute


def program_of(
    parts: list[Part], params: Params, dtype: torch.dtype, engines: list[Callable[..., Any]], along: bool
) -> Program:
    """The scan as a function of its tensors; `along` lets one scan run memory and normaliser."""
    config, fields, n_params = parts[0].config, len(Sequence._fields), len(params_tensors(params))
    # A program computes with its arguments alone: under torch.func the tensors in `parts` belong to another level, so
    # only their number and order are used.
    layouts = [(part.config, len(part.initial), part.carry, runs) for part, runs in zip(parts, engines, strict=True)]

    def program(run: Run, *flat: Tensor) -> Tensors:
        at = fields + n_params
        own = with_tensors(params, flat[fields:at])
        tokens = to_tokens(config, Sequence(*flat[:fields]), own, dtype, run)
        initials: list[Memory] = []
        carries: list[Carry] = []
        for _, count, layout, _ in layouts:
            initials.append(flat[at : at + count])
            at += count
            carries.append(layout.rebuilt(flat[at:]))
            at += len(layout.flat)
        given = Levelled(tokens, carries, initials)
        if len(layouts) > 1:
            given = levelled(config, given, run)
        tokens, carries, initials, units, back = given
        if along:
            results = counting_along(engines[0], config, tokens, carries, initials, run=run)
        else:
            results = [
                runs(own, counting(tokens) if index else tokens, *start, run=run)
                for index, ((own, _, _, runs), *start) in enumerate(zip(layouts, carries, initials, strict=True))
            ]
        (y, _), *others = results
        for z, _ in others:
            y = one(run(DIVIDE.block(keeps=run is not execute), y, z, *units, label="normalizer"))
        if back is not None:
            results = [(out, times(carry, back, run)) for out, carry in results]
        if y.dtype != (asked := flat[Sequence._fields.index("v")].dtype):
            y = one(run(cast(asked), y, label="outputs"))
        return (y, *apart([item for _, carry in results for item in carry.flat], flat, run))

    return program


def apart(state: list[Tensor], given: Tensors, run: Run) -> list[Tensor]:
    """The state with copies of what no token has changed, such as an anchor: no result is an input, nor a view of
    one."""
    known = [item for item in given if item is not None]
    where: Callable[[Tensor], int] = id if is_traced(*known) else _storage
    held = {where(item) for item in known}
    return [
        one(run(_COPY, item, label="state")) if item.is_floating_point() and where(item) in held else item
        for item in state
    ]


def _storage(item: Tensor) -> int:
    return item.untyped_storage().data_ptr()


def _copy(x: Tensor) -> tuple[Tensors, None]:
    return (x.clone(),), None


_COPY = Block("copy", _copy, lambda _, g: (g,))


def engine_of(name: str, part: Part, values: torch.dtype) -> Callable[..., tuple[Tensor, Carry]]:
    """An engine by its name, as a function of config, tokens, carry and initial weights."""
    engines: dict[str, Callable[..., tuple[Tensor, Carry]]] = {
        "chunk": partial(in_folds, partial(chunked, position=part.position)),
        "compiled": compiled,
        "fla": partial(by_fla, dtype=values),
        "parallel": partial(in_folds, parallel),
        "sequential": partial(in_folds, sequential),
    }
    return engines[name]


def counting(tokens: Tokens) -> Tokens:
    """The tokens of a sum normaliser: the value is 1."""
    return tokens._replace(v=torch.ones_like(tokens.v[..., :1]))
