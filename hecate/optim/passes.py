"""A step's way through phi-space for lists of gradients: number by number, or row by row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from hecate.optim.base import State, put
from hecate.optim.internal import GRAM, learn_lift, learn_phi, own_phi
from hecate.optim.lift import RowMap, on_numbers
from hecate.optim.options import Group
from hecate.optim.orthogonal import orthogonalised
from hecate.optim.phi_rows import map_of
from hecate.optim.precondition import COLUMNS, ROWS, SQUARE, diagonal, kronecker
from hecate.optim.tensors import Bulk, as_matrix, pointwise
from hecate.phi import Identity


class Pass(Protocol):
    """What an accumulator is written with, and how what it holds becomes an update."""

    def enter(self, grads: list[Tensor]) -> list[Tensor]:
        """What the gradients write."""

    def leave(self, held: list[Tensor]) -> list[Tensor]:
        """The updates of the weights from what is held."""


def acts_on_numbers(group: Group) -> bool:
    """Whether P phi~ of a number depends on that number alone."""
    direct = group["lift"] in ("identity", "vjp") and group["input_scale"] == "none"
    return direct and on_numbers(map_of(group))


def number_by_number(group: Group) -> bool:
    """Whether an update needs no more than each number's phi, momentum and mean square."""
    more = group["precondition"] == "kronecker" or group["orthogonalize"]
    plain = group["space"] == "weight" and group["guard"] == "none" and not more
    return plain and acts_on_numbers(group)


class Numberwise:
    """For maps that act on every number alone: shapes do not matter, small tensors go together.

    `squares`, if any, are those of the diagonal preconditioner, before a step and then after it."""

    def __init__(self, group: Group, bulk: Bulk, row_map: RowMap, squares: list[Tensor]) -> None:
        self.group, self.bulk, self.row_map = group, bulk, row_map
        self.squares = squares

    def enter(self, grads: list[Tensor]) -> list[Tensor]:
        """P phi~(g), preconditioned."""
        updates = grads
        if not isinstance(self.row_map.feature_map, Identity):
            joined = self.bulk.foreach
            updates = pointwise(self.row_map, grads) if joined else [self.row_map(g) for g in grads]
        if self.squares:
            retain, eps = self.group["retain"], self.group["eps"]
            updates, self.squares = diagonal(self.bulk, self.squares, updates, retain, eps)
        return updates

    def leave(self, held: list[Tensor]) -> list[Tensor]:
        """Held as it is."""
        return held


class Batch(NamedTuple):
    """Rows of one width from several gradients, and what phi made of them."""

    members: list[int]
    rows: Tensor
    row_map: RowMap
    features: Tensor
    residuals: Any


class Rowwise:
    """For all maps, lifts, preconditioners and accumulators, on matrices `[rows, columns]`.

    Gradients of one width go through phi together, unless each parameter learns its own lift or phi. `guarded` counts
    rows that the guard changed.
    """

    def __init__(self, group: Group, bulk: Bulk, states: list[State], map_for: Callable[[Tensor], RowMap]) -> None:
        self.group, self.bulk, self.states, self.map_for = group, bulk, states, map_for
        self.in_phi = group["space"] == "phi"
        self.guarded: Tensor | int = 0
        self.grads: list[Tensor] = []
        self.batches: list[Batch] = []

    def enter(self, grads: list[Tensor]) -> list[Tensor]:
        """phi~(g) `[rows, d_phi]` in phi-space, else the preconditioned P phi~(g)."""
        self.grads = grads
        self.batches = [self._batch(members) for members in self._together()]
        if self.in_phi:
            written = self._spread([batch.features for batch in self.batches])
        else:
            lifted = [self._guard(batch, self._back(batch, batch.features)) for batch in self.batches]
            written = self._preconditioned(self._shaped(self._spread(lifted)))
        if self.group["phi_lr"]:
            for batch in self.batches:
                state = self.states[batch.members[0]]
                learn_phi(batch.row_map, state, batch.rows, self.group["phi_lr"])
        return written

    def leave(self, held: list[Tensor]) -> list[Tensor]:
        """The lifted accumulator, preconditioned, where it lives in phi-space; orthogonalised."""
        if self.in_phi:
            joined = [self._joined(held, batch.members) for batch in self.batches]
            lifted = [self._back(*pair) for pair in zip(self.batches, joined, strict=True)]
            held = self._preconditioned(self._shaped(self._spread(lifted)))
        options, view = self.group["orthogonalize"], self.group["matrix"]
        if options is None:
            return held
        return [orthogonalised(as_matrix(u, view), options).reshape(u.shape) for u in held]

    def _together(self) -> list[list[int]]:
        if self.group["phi_lr"] or self.group["lift"] == "learned":
            return [[i] for i in range(len(self.grads))]
        widths: dict[int, list[int]] = {}
        for i, g in enumerate(self.grads):
            widths.setdefault(as_matrix(g, self.group["matrix"]).shape[-1], []).append(i)
        return list(widths.values())

    def _batch(self, members: list[int]) -> Batch:
        matrices = [as_matrix(self.grads[i], self.group["matrix"]) for i in members]
        rows = self._joined(matrices, range(len(matrices)))
        row_map, state = self.map_for(rows), self.states[members[0]]
        if self.group["phi_lr"]:
            row_map = own_phi(row_map, state, rows)
        features, residuals = row_map.features(rows)
        if GRAM in state:
            forget, ridge = self.group["forget"], self.group["ridge"]
            decoder = learn_lift(state, features, row_map.target(rows), forget, ridge)
            row_map = row_map.decoded(decoder.to(rows))
        return Batch(members, rows, row_map, features, residuals)

    def _back(self, batch: Batch, held: Tensor) -> Tensor:
        return batch.row_map.back(held, batch.rows, batch.residuals)

    def _guard(self, batch: Batch, update: Tensor) -> Tensor:
        """Rows that climb, <g, u> < 0, are left out or turned round."""
        mode = self.group["guard"]
        if mode == "none":
            return update
        climbs = (update * batch.rows).sum(-1, keepdim=True) < 0
        self.guarded = self.guarded + climbs.sum()
        return torch.where(climbs, 0 if mode == "skip" else -update, update)

    def _preconditioned(self, updates: list[Tensor]) -> list[Tensor]:
        name, retain, eps = (self.group[k] for k in ("precondition", "retain", "eps"))
        if name is None:
            return updates
        if name == "diagonal":
            squares = [state[SQUARE] for state in self.states]
            updates, squares = diagonal(self.bulk, squares, updates, retain, eps)
            for state, square in zip(self.states, squares, strict=True):
                state[SQUARE] = square
            return updates
        found = []
        for update, state in zip(updates, self.states, strict=True):
            matrix = as_matrix(update, self.group["matrix"])
            matrix, left, right = kronecker(state[ROWS], state[COLUMNS], matrix, retain, eps)
            put(self.group, state, ROWS, left)
            put(self.group, state, COLUMNS, right)
            found.append(matrix.reshape(update.shape))
        return found

    def _joined(self, matrices: list[Tensor], members: Any) -> Tensor:
        chosen = [matrices[i] for i in members]
        return chosen[0] if len(chosen) == 1 else torch.cat(chosen)

    def _spread(self, values: list[Tensor]) -> list[Tensor]:
        """Batches as one matrix per gradient, in their order."""
        found: dict[int, Tensor] = {}
        for batch, value in zip(self.batches, values, strict=True):
            counts = [self._rows(i) for i in batch.members]
            found.update(zip(batch.members, value.split(counts), strict=True))
        return [found[i] for i in range(len(self.grads))]

    def _rows(self, i: int) -> int:
        return as_matrix(self.grads[i], self.group["matrix"]).shape[0]

    def _shaped(self, matrices: list[Tensor]) -> list[Tensor]:
        return [m.reshape(g.shape) for m, g in zip(matrices, self.grads, strict=True)]


def move(
    group: Group, bulk: Bulk, through: Pass, params: list[Tensor], grads: list[Tensor], held: list[Tensor]
) -> list[Tensor]:
    """One step in place; the new momentum, which under autograd is not the old tensor."""
    lr, momentum = bulk.number(group["lr"]), bulk.number(group["momentum"])
    decay, gain = bulk.number(group["weight_decay"]), 1 - group["dampening"]
    hope = group["form"] == "hope"
    if grads[0].dtype != held[0].dtype:
        grads = [g.to(m.dtype) for g, m in zip(grads, held, strict=True)]
    if decay and not group["decoupled"]:
        grads = bulk.sum(grads, params, decay)
    written = through.enter(grads)
    held = bulk.decay(held, momentum)
    held = bulk.add(held, written, -lr * gain if hope else gain)
    ahead = held
    if group["nesterov"]:
        ahead = bulk.sum(bulk.scaled(written, -lr) if hope else written, held, momentum)
    values = bulk.decay(params, 1 - lr * decay) if decay and group["decoupled"] else params
    values = bulk.add(values, through.leave(ahead), 1 if hope else -lr)
    bulk.write(params, values)
    return held
