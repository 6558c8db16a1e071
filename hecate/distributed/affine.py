"""Pieces of a sequence at once, for rules that are affine in their state.

A piece maps the state X that enters it to X A + B, and its outputs are y_B + X y_A, whatever X is. Rows of a matrix
memory do not affect one another, so one scan of values [v, 0] from the state [0; I] gives B, A, y_B and y_A; with
momentum values [v, 0, 0] from M = [0; I; 0] and S = [0; 0; I]. If the gradient does not depend on the memory, A is a
product of gates and is computed from these alone, and in a diagonal memory coordinates do not affect one another: in
both cases A is a number for each head or channel. Ranks gather (A, B), whose size does not depend on the length, and
combine those of the ranks before them. [CTX-ALGEBRA-D1]
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from hecate.distributed.exchange import Ranks, gather
from hecate.engine import DIVIDE, complete, memory_scan, numbered, to_tokens
from hecate.gating import Masks, Plain
from hecate.gating.base import running
from hecate.phi import Params
from hecate.rule import Gates, MemoryConfig, MemoryState
from hecate.tape import execute, one
from hecate.tape.bridge import without_autocast


def not_affine(config: MemoryConfig, gates: Gates | None = None) -> str | None:
    """Reason why a piece of a sequence is no affine function of the state that enters it, or not known to be one; None
    if it is."""
    rule, forms = config.rule, config.forms
    if config.chunk != 1 or config.commit != "token":
        return f"chunk={config.chunk}, commit={config.commit!r} take gradients at a remembered state"
    if not forms.linear:
        return f"{config.structure.named} is not linear in its weights"
    if not (forms.target or forms.error):
        return f"bias {rule.bias.kind!r} is not linear in what the memory predicts"
    if rule.retention.dual or not rule.retention.weighted_sum:
        return f"retention {rule.retention.kind!r} is not linear"
    algorithm, shape = rule.algorithm, (2, 3)
    slots = algorithm.slot_shapes(shape)
    if not algorithm.linear or algorithm.context_shapes(2, 3) or any(size != shape for size in slots.values()):
        return f"algorithm {algorithm.kind!r} is not linear in gradients and slots of the memory's own shape"
    if not config.readout.plain:
        return f"readout {config.readout.kind!r} has a state of its own"
    if config.on_nonfinite == "skip":
        return "on_nonfinite='skip' asks the state which tokens are written"
    if gates is not None and gates.retain_value is not None:
        if slots:
            return f"a retain per value channel decays the memory and not the slots of algorithm {algorithm.kind!r}"
        if forms.error and config.decay_order == "with_step":
            return "a retain per value channel with decay_order='with_step' gives every value channel an A of its own"
    return None


@lru_cache(maxsize=256)
def spreading(config: MemoryConfig) -> MemoryConfig:
    """The config that ranks run: a rank that raised alone would leave the others waiting, so NaN and infinity spread to
    the loss, which all ranks see."""
    return config.model_copy(update={"on_nonfinite": "propagate"}) if config.on_nonfinite == "raise" else config


@lru_cache(maxsize=256)
def _split_normalizer(config: MemoryConfig) -> tuple[MemoryConfig, MemoryConfig]:
    """The memory without its normaliser, and the normaliser, both without a gating, as scans need none."""
    plain = config.model_copy(update={"gating": Plain()})
    return plain.model_copy(update={"normalizer": "none"}), plain.counting


class Scan(NamedTuple):
    """The arguments of `memory_scan` for a piece of a sequence; `state` is a `MemoryState`, or None to start anew."""

    config: MemoryConfig
    q: Tensor
    k: Tensor
    v: Tensor
    gates: Gates
    state: Any
    phi_params: Params | None
    initial: dict[str, Tensor] | None
    write_mask: Tensor | None
    reset_mask: Tensor | None
    how: dict[str, Any]

    def run(self) -> tuple[Tensor, MemoryState]:
        """Outputs and the state after the last token."""
        config, q, k, v, gates, state, params, initial, write, reset, how = self
        options: dict[str, Any] = {"phi_params": params, "initial": initial, "write_mask": write, "reset_mask": reset}
        return memory_scan(config, q, k, v, gates, state=state, **options, **how)

    def fresh(self) -> MemoryState:
        """The state before any token, at which a reset restarts."""
        none = (slice(None), slice(0))
        gates = Gates(*(gate[none] if isinstance(gate, Tensor) else gate for gate in self.gates))  # type: ignore[arg-type]
        empty = self._replace(q=self.q[none], k=self.k[none], v=self.v[none], gates=gates, state=None)
        return empty._replace(write_mask=None, reset_mask=None, how={}).run()[1]

    @property
    def slots(self) -> list[Tensor]:
        """The memory and the slots of its state, `[B, H, ...]`."""
        return [self.state.memory["weight"], *self.state.slots.values()]

    def of(self, v: Tensor, slots: list[Tensor], initial: Tensor, gate: Tensor | None) -> tuple[Tensor, list[Tensor]]:
        """The scan with other values, state and initial weights: its outputs, and the memory and slots at its end."""
        named = dict(zip(self.state.slots, slots[1:], strict=True))
        state = self.state._replace(memory={"weight": slots[0]}, slots=named)
        gates = self.gates._replace(retain_value=gate)
        y, end = self._replace(v=v, gates=gates, state=state, initial={"weight": initial}).run()
        return y, [end.memory["weight"], *end.slots.values()]


class Piece(NamedTuple):
    """A piece as an affine map of whatever state enters it.

    Fields:
        y: its outputs from the state 0.
        ends: the memory and the slots at its end from there.
        moves: maps from the memory and slots that enter to each of these: matrices `[n][n] [B, H, P, P]` from the
            right, or factors that multiply componentwise.
        reads: maps from the memory and slots that enter to what they add to y; see `answered`.
        rows: factors of value channels besides A, at the end `[B, H, V, 1]`, and for every output; None if there are
            none.
    """

    y: Tensor
    ends: list[Tensor]
    moves: list[list[Tensor]]
    reads: list[Tensor]
    dense: bool
    rows: Tensor | None = None
    rows_read: Tensor | None = None

    def moved(self, states: list[Tensor], moves: list[list[Tensor]], rows: Tensor | None) -> list[Tensor]:
        """X A, part by part."""
        ends = []
        for row in moves:
            terms = [x @ a if self.dense else x * a for x, a in zip(states, row, strict=True)]
            total = sum(terms[1:], terms[0])
            ends.append(total if rows is None else total * rows)
        return ends

    def answered(self, states: list[Tensor]) -> Tensor:
        """y_B + X y_A: reads are `[B, T, H, P]`, to which X `[B, H, V, P]` is applied; a diagonal X multiplies them."""
        total = None
        for x, read in zip(states, self.reads, strict=True):
            added = torch.einsum("bhvp,bthp->bthv", x, read) if x.dim() == 4 else x.unsqueeze(1) * read
            total = added if total is None else total + added
        if total is None:
            return self.y
        return self.y + (total if self.rows_read is None else total * self.rows_read)


def affine_scan(ranks: Ranks, scan: Scan) -> tuple[Tensor, MemoryState]:
    """Outputs of this rank's piece and the state after the last rank's, on every rank."""
    config = scan.config
    if config.normalizer == "none":
        return _combine(ranks, scan)
    floor, gates = scan.gates.floor, scan.gates._replace(floor=None)
    normalizer = scan.state.normalizer
    memory, counting = _split_normalizer(config)
    plain = scan._replace(config=memory, gates=gates, state=scan.state._replace(normalizer=None))
    y, state = _combine(ranks, plain)
    zero = {"weight": torch.zeros_like(normalizer.memory["weight"])}
    normalizer = normalizer._replace(seen=scan.state.seen)
    counter = plain._replace(config=counting, v=torch.ones_like(scan.v[..., :1]), initial=zero, state=normalizer)
    z, count = _combine(ranks, counter)
    if config.normalizer == "sum":
        y = one(execute(DIVIDE, y, z))
    else:
        least: Any = 1.0 if floor is None else floor
        least = least.to(z.dtype).unsqueeze(-1) if isinstance(least, Tensor) else torch.full_like(z, float(least))
        y = y / torch.maximum(z.abs(), least)
    return y, state._replace(normalizer=count._replace(seen=None))


def _combine(ranks: Ranks, scan: Scan) -> tuple[Tensor, MemoryState]:
    config, forms = scan.config, scan.config.forms
    # Gates alone give A for steps M' = retain M + D whose direction is that of gd or momentum.
    gated = forms.target and forms.plain and forms.algorithm is not None
    compute = _diagonal_piece if config.structure.diagonal else _gated_piece if gated else _matrix_piece
    piece = compute(scan)
    sent = [*piece.ends, *(move for row in piece.moves for move in row)]
    sent += [] if piece.rows is None else [piece.rows]
    every = gather(torch.cat([item.flatten() for item in sent]), ranks)
    states, mine = scan.slots, scan.slots
    count = len(piece.ends)
    for rank, flat in enumerate(every):
        if rank == ranks.rank:
            mine = states
        parts = [part.view(item.shape) for part, item in zip(flat.split([x.numel() for x in sent]), sent, strict=True)]
        rows = None if piece.rows is None else parts.pop()
        moves = [parts[at : at + count] for at in range(count, len(parts), count)]
        states = [a + b for a, b in zip(piece.moved(states, moves, rows), parts[:count], strict=True)]
    y = piece.answered(mine)
    # An empty sum is zero, has a graph, and cannot spread another rank's NaN.
    y = y + every[:0].sum()
    if not ranks.last:
        states = [item.detach() for item in states]
    slots = dict(zip(scan.state.slots, states[1:], strict=True))
    return y, scan.state._replace(memory={"weight": states[0]}, slots=slots)


# Computing a piece.


def _matrix_piece(scan: Scan) -> Piece:
    """One scan of values [v, 0] from [0; I]: row V + i P + j of outputs is what unit j of slot i adds to reads."""
    v, states, start = scan.v, scan.slots, scan.fresh().memory["weight"]
    count, (width, phi) = len(states), start.shape[-2:]
    wide = pad(v, (0, count * phi))
    restart = pad(start, (0, 0, 0, count * phi))
    unit = torch.eye(phi, dtype=start.dtype, device=start.device)
    blocks = [pad(unit, (0, 0, width + n * phi, (count - 1 - n) * phi)).expand_as(restart) for n in range(count)]
    retain_value = scan.gates.retain_value
    row_retain = None if retain_value is None else pad(retain_value, (0, count * phi), value=1.0)
    y, ends = scan.of(wide, blocks, restart, row_retain)
    y, *reads = y.split([width, *[phi] * count], -1)
    parts = [end.split([width, *[phi] * count], -2) for end in ends]
    return Piece(y, [part[0] for part in parts], [list(part[1:]) for part in parts], reads, True, *_rows(scan))


def _diagonal_piece(scan: Scan) -> Piece:
    """A scan for each part of the state: coordinates are numbers, so a scan from 1 gives the factor of all."""
    restart = scan.fresh().memory["weight"]
    none = [torch.zeros_like(item) for item in scan.slots]
    y, ends = scan.of(scan.v, none, restart, None)
    reads, columns = [], []
    for index in range(len(none)):
        single = [torch.ones_like(item) if at == index else item for at, item in enumerate(none)]
        read, column = scan.of(torch.zeros_like(scan.v), single, torch.zeros_like(restart), None)
        reads.append(read)
        columns.append(column)
    return Piece(y, ends, [list(row) for row in zip(*columns, strict=True)], reads, False)


def _gated_piece(scan: Scan) -> Piece:
    """A plain scan from 0, and products of gates: if writes do not depend on the memory, X is multiplied by these."""
    config = scan.config
    restart = scan.fresh().memory["weight"]
    none = [torch.zeros_like(item) for item in scan.slots]
    y, ends = scan.of(scan.v, none, restart, scan.gates.retain_value)
    q, dtype = scan.q, restart.dtype
    k, v = (x if config.writes == 1 else x[:, :, 0] for x in (scan.k, scan.v))
    few = Gates(retain=scan.gates.retain, momentum=scan.gates.momentum)
    inputs = complete(config.single, q, k, v, few, scan.write_mask, scan.reset_mask, None, going_on=True)
    inputs, _ = numbered(config, scan.state, inputs)
    with without_autocast(q.device.type):
        params = scan.phi_params or {"learned": {}, "frozen": {}}
        phi_q = to_tokens(config.single, inputs, params, dtype, execute).phi_q
    retain = _neutral(inputs.retain.to(dtype), scan, reset=True)
    retain = retain.unsqueeze(-1) if retain.dim() == 3 else retain
    after = [retain.cumprod(1)]
    if config.algorithm.uses_momentum:
        momentum = _neutral(inputs.momentum.to(dtype), scan, reset=True).unsqueeze(-1)
        slot = momentum.cumprod(1)
        form = config.forms.algorithm
        added = momentum * slot if form is not None and form.nesterov else slot
        if scan.write_mask is not None:
            added = torch.where(scan.write_mask[..., None, None], added, 0.0)
        shape = added.shape[:3] + retain.shape[3:]
        carried = running(retain, added.expand(shape), added.new_zeros(shape[:1] + shape[2:]), Masks())
        after = [after[0], carried, torch.zeros_like(slot), slot]
    reads = [
        _as_read(config, factor, scan.reset_mask, first=1.0 - at) * phi_q
        for at, factor in enumerate(after[: len(none)])
    ]
    count = len(none)
    last = [_at_end(factor, 1.0 if at in (0, 3) else 0.0).unsqueeze(-2) for at, factor in enumerate(after)]
    moves = [last[at : at + count] for at in range(0, len(last), count)]
    return Piece(y, ends, moves, reads, False, *_rows(scan))


def _neutral(gate: Tensor, scan: Scan, *, reset: bool) -> Tensor:
    """A gate `[B, T, H, *]` that is 1 where nothing is written, and 0 where a reset forgets the state that entered."""
    trailing = [1] * (gate.dim() - 2)
    if scan.write_mask is not None:
        gate = torch.where(scan.write_mask.reshape(*scan.write_mask.shape, *trailing), gate, 1.0)
    if reset and scan.reset_mask is not None:
        gate = torch.where(scan.reset_mask.reshape(*scan.reset_mask.shape, *trailing), 0.0, gate)
    return gate


def _as_read(config: MemoryConfig, after: Tensor, reset: Tensor | None, *, first: float) -> Tensor:
    """The factor in the state that each token reads, from those after each token; `first` is that before any token."""
    if config.read == "after" or not after.shape[1]:
        return after
    before = torch.cat([torch.full_like(after[:, :1], first), after[:, :-1]], 1)
    return before if reset is None else torch.where(reset[..., None, None], 0.0, before)


def _at_end(after: Tensor, start: float) -> Tensor:
    return after[:, -1] if after.shape[1] else after.new_full((after.shape[0], *after.shape[2:]), start)


def _rows(scan: Scan) -> tuple[Tensor | None, Tensor | None]:
    """The products of retain_value at the end `[B, H, V, 1]`, and in the state that each token reads; None without."""
    if scan.gates.retain_value is None:
        return None, None
    after = _neutral(scan.gates.retain_value.to(scan.slots[0].dtype), scan, reset=False).cumprod(1)
    return _at_end(after, 1.0).unsqueeze(-1), _as_read(scan.config, after, None, first=1.0)
