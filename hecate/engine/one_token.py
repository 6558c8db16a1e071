"""A single token: a config's formulas, prepared once for tensors that look alike, then run in a few torch calls.

The first token of its looks (shapes, dtypes, devices) is scanned like any sequence, with all checks and errors, and
leaves a program. Later ones run the program, the same arithmetic to the bit: no zero state, no tensors for gates that
are not given, no folding of heads. Where it is not enough (values out of range, results that are not finite, or torch
has to see every operation), the token is scanned as a sequence again. [ENG-STEP-I2]
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hecate.engine import nonfinite
from hecate.engine.arguments import Named, check_params, retain_per_head
from hecate.engine.call import DEFAULTS, GENERAL, NO_PARAMS, NUMERIC, carry_of, keep, looks_in, named_state
from hecate.engine.engine import apart, chunk_refusal, loops
from hecate.engine.features import L2_NORM, SUM_NORM, levelled, quotient, stepped
from hecate.engine.loop import CELLS, blocks_of, token_step
from hecate.engine.tokens import Tokens
from hecate.errors import HecateError
from hecate.phi import Params
from hecate.rule import Gates, MemoryConfig, MemoryState
from hecate.structure import starts
from hecate.tape import STEADY, execute, is_traced, one
from hecate.tape.bridge import below_autograd
from hecate.tape.ops import reach

TokenStep = Callable[..., tuple[Tensor, MemoryState]]  # (phi_k, phi_q, v, lr, retain, momentum, state)

FEW = 16
WINDOW = 5  # tokens that go one by one, measured: an engine takes the time of 6.8 for 2 to 16 of a linear memory


class Unfit(Exception):
    """Raised by a program: this token has to be scanned in full, to raise an error, rescale features or be recorded."""


def looks_of(
    q: Tensor, k: Tensor, v: Tensor, gates: Gates, state: MemoryState, params: Params | None, initial: Named | None
) -> tuple[object, ...] | None:
    """The looks of a call of one token: everything but the values of its tensors. None where no program may run: under
    autograd, transforms and tracing, and with arguments of a wrong type.

    Numbers given for gates are part of the looks, and so is whether parameters of phi are given.
    """
    if type(gates) is not Gates or type(state) is not MemoryState or is_traced():
        return None
    lr, retain, momentum, erase, write, value, floor, ridge, mix = gates
    *fields, normalizer, count, readout = state
    tensors: list[Any] = [q, k, v]
    every: tuple[Any, ...] = (lr, retain, momentum, initial, *fields, count, readout, *(normalizer or ()))
    if not erase is write is value is floor is ridge is mix is None:
        every += gates[3:]
    looks = looks_in(every, tensors)
    if looks is None or (torch.is_grad_enabled() and any([tensor.requires_grad for tensor in tensors])):
        return None
    return (params is None, STEADY.get(), *looks)


def short_way(
    config: MemoryConfig, q: Tensor, k: Tensor, v: Tensor, gates: Gates | None, state: MemoryState | None,
    params: Params | None, initial: Named | None, name: str, squashed: bool = False,
) -> tuple[Tensor, MemoryState] | None:  # fmt: skip
    """One token `[B, H, *]` or `[B, 1, H, *]` by the program for its looks; None without one, or if it raises `Unfit`.
    `squashed`: retain and momentum are known to lie in [0, 1] and lr above 0, unless they are NaN."""
    if state is None or not isinstance(config, MemoryConfig):
        return None
    gates = DEFAULTS if gates is None else gates
    program = config.programs.get(looks_of(q, k, v, gates, state, params, initial))
    try:
        return None if program is None else program(q, k, v, gates, state, params, initial, name, squashed)
    except Unfit:
        return None


def keep_program(
    config: MemoryConfig, q: Tensor, k: Tensor, v: Tensor, gates: Gates | None, state: MemoryState,
    params: Params | None, initial: Named | None,
) -> None:  # fmt: skip
    """Stores a program for the next token: `state` is what a full scan, with every check, has just returned for this
    one."""
    if not _has_programs(config) or k.is_meta or not q.numel() or not v.numel():
        return
    gates, programs = DEFAULTS if gates is None else gates, config.programs
    looks, product = looks_of(q, k, v, gates, state, params, initial), state.pending.get("retain")
    channels = isinstance(gates.retain, Tensor) and gates.retain.dim() == k.dim()
    # None where the chunk began with a retain of another width.
    if looks is not None and looks not in programs and (product is None or (product.dim() > 2) == channels):
        keep(programs, looks, OneToken(config.validated(), q, k, v, gates, state, channels))


def _has_programs(config: MemoryConfig) -> bool:
    plain = config.writes == 1 and not config.forms.transposed and config.readout.plain
    exact = not torch.compiler.is_compiling() and STEADY.get()  # `steady`, without a frame
    return plain and config.on_nonfinite != "skip" and (not exact or loops(config))


def one_by_one(
    scan: Callable[..., tuple[Tensor, MemoryState]], config: MemoryConfig, q: Tensor, k: Tensor, v: Tensor,
    gates: Gates | None, state: MemoryState, **options: Any,
) -> tuple[Tensor, MemoryState] | None:  # fmt: skip
    """Two to `WINDOW` tokens from a state, each by `scan`: done before an engine would have started, and with the bits
    of single tokens. None where there are no programs, or where something is wrong, for the full scan to report."""
    given_all = isinstance(config, MemoryConfig) and type(state) is MemoryState
    if not given_all or not all(isinstance(x, Tensor) and x.dim() == 4 for x in (q, k, v)):
        return None
    tokens = range(q.shape[1])
    every = [q, k, v, *(gate for gate in gates or () if isinstance(gate, Tensor))]
    if not 1 < len(tokens) <= WINDOW or any(x.dim() < 3 or x.shape[1] != len(tokens) for x in every):
        return None
    if not _has_programs(config):
        return None

    def at(t: int) -> tuple[Tensor, Tensor, Tensor, Gates]:
        rows: Any = [gate[:, t : t + 1] if isinstance(gate, Tensor) else gate for gate in gates or DEFAULTS]
        return q[:, t : t + 1], k[:, t : t + 1], v[:, t : t + 1], Gates(*rows)

    if looks_of(*at(0), state, options["phi_params"], options["initial"]) is None:
        return None
    outputs = []
    try:
        for t in tokens:
            y, state = scan(config, *at(t), state=state, **options)
            outputs.append(y)
    except HecateError:
        return None
    return torch.cat(outputs, 1), state


class OneToken:
    """A program: the arithmetic of one token for tensors of known looks, with a time axis or without."""

    def __init__(
        self, config: MemoryConfig, q: Tensor, k: Tensor, v: Tensor, gates: Gates, state: MemoryState, channels: bool
    ) -> None:
        """`channels` says that retain has one value per phi channel."""
        self.config, self.shape, self.values, self.timed = config, v.shape, v.dtype, k.dim() == 4
        self.width = k.shape[-1]
        batch, heads = k.shape[0], k.shape[-2]
        self.device, self.dtype = k.device.type, next(iter(state.memory.values())).dtype
        self.casts = q.dtype != self.dtype or k.dtype != self.dtype
        self.scale = 1 / math.sqrt(k.shape[-1]) if config.query_scale == "key_dim" else None
        self.tops = config.forms.tops
        self.inspects, self.far = self.device == "cpu", reach(self.dtype, 0.5)
        self.watches, self.late = config.on_nonfinite == "raise", nonfinite.is_late(k)
        self.keyed = not gates.erase is gates.write is gates.retain_value is None
        # With bias dot the key to write with is the only key.
        single = not self.keyed or (config.forms.target and gates.retain_value is None)
        direct = single and _is_direct(config)
        # Of one gate per memory, and of what has a width: every memory's vector a row where products take rows.
        self.scalar = (batch * heads, 1, 1) if direct else (batch * heads,)
        self.row = (batch * heads, 1, -1) if direct else (batch * heads, -1)
        self.dampens, self.anchored = config.forms.dampens, config.retention.anchored
        self.quotients = config.by_key or config.normalizer == "sum"  # which want lr beside phi(k)
        self.features = (batch, 1, heads, -1) if self.quotients else self.row
        # For elementwise operations a time axis changes no bit.
        self.lifts = not self.timed and (self.quotients or not config.feature_map.traits().componentwise)
        rates = isinstance(gates.lr, Tensor) and gates.lr.dim() == k.dim()  # one for each weight
        lr = (batch, 1, heads) if self.quotients else self.row if rates else self.scalar
        self.shapes = (lr, self.row if channels else self.scalar, self.scalar)
        keyed = not single and _is_online(config) and config.algorithm.takes_any_gradient()
        how = partial(_direct, given_lr=gates.lr) if direct else _keyed if keyed else _general
        self.steps = [how(config)]
        if config.normalizer != "none":
            self.steps.append(how(config.counting) if direct else _general(config.counting))
        known = direct and (config.forms.error or config.forms.target)  # a bias of unknown form may differentiate
        self.context: Callable[[], AbstractContextManager[Any]] = below_autograd if known else nullcontext
        # Under a direct step NaN or infinity in gates and slots shows in the memory, too.
        self.tells, self.summed = direct and self.watches, 1 if direct else 4
        defaults = config.forms.defaults
        wide = torch.promote_types(k.dtype, torch.float32)
        with torch.inference_mode(False):
            self.numbers = [
                torch.full(shape, default if gate is None else gate, dtype=wide, device=k.device).to(self.dtype)
                if not isinstance(gate, Tensor) else None
                for gate, default, shape in zip(gates[:3], defaults, self.shapes, strict=True)
            ]  # fmt: skip
            if config.forms.per_head and gates.retain is None:
                every = retain_per_head(config, (batch, heads), k).to(self.dtype)
                self.numbers[1] = every.reshape(self.shapes[1]).contiguous()
            self.factors = {
                name: torch.full((batch * heads,), number, dtype=wide, device=k.device).to(self.dtype).view(*self.row)
                for name, number in gates._asdict().items() if name in GENERAL and type(number) in NUMERIC
            }  # fmt: skip

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, gates: Gates, state: MemoryState, params: Params | None,
        initial: Named | None, name: str, squashed: bool,
    ) -> tuple[Tensor, MemoryState]:  # fmt: skip
        """y and the new state; `squashed` is that of `short_way`."""
        if torch.is_autocast_enabled(self.device):
            raise Unfit
        lr, retain, momentum = self.numbers
        lr = self.gate(0, gates.lr, squashed) if lr is None else lr
        retain = self.gate(1, gates.retain, squashed) if retain is None else retain
        momentum = self.gate(2, gates.momentum, squashed) if momentum is None else momentum
        if self.dampens:
            lr = lr * (1 - momentum).reshape(lr.shape)
        phi_q, phi_k = self.features_of(q, k, state, params)
        if self.values != self.dtype:
            v = v.to(self.dtype)
        if self.quotients:
            v = v.reshape(*self.features)
            if self.config.by_key:
                phi_k, v, lr = stepped(self.config, phi_k, v, lr, execute)
            if self.config.normalizer == "sum":
                near = Tokens(phi_k, phi_q, v, lr, retain, momentum)
                carries = [((), carry_of(state)), ((), carry_of(state.normalizer))]  # type: ignore[arg-type]
                _, _, units, back = levelled(self.config, near, carries, execute)  # type: ignore[arg-type]
                if units or back is not None:
                    raise Unfit
            phi_k, phi_q, lr = phi_k.reshape(*self.row), phi_q.reshape(*self.row), lr.reshape(*self.scalar)
        with self.context():
            v = v.reshape(*self.row).contiguous()
            token: tuple[Any, ...] = (phi_k, phi_q, v, lr, retain, momentum)
            if self.keyed:
                token = self.gated(token, gates)
            if self.anchored:
                token = (*token, *[None] * (len(Tokens._fields) - len(token)), self.start(initial, state))
            y, new = self.steps[0](*token, state)
            if state.normalizer is not None:
                phi_k = phi_k if gates.write is None else phi_k * self.factor("write", gates.write)
                z, counted = self.steps[1](phi_k, phi_q, torch.ones_like(v[..., :1]), *token[3:6], state.normalizer)
                floor = None if gates.floor is None else self.factor("floor", gates.floor).reshape(y.shape[:-1])
                y, new = quotient(self.config, y, z, execute, floor), new._replace(normalizer=counted)
            if state.seen is not None:
                new = new._replace(seen=state.seen + 1)
            y = y.view(*self.shape)
            if self.values != self.dtype:
                y = y.to(self.values)
            if self.watches and self.late:
                nonfinite.check_late(name, y if self.timed else y.unsqueeze(1), new)
            elif self.watches and not self.is_finite(y, new):
                raise Unfit
        return y, new

    def gate(self, index: int, gate: Any, squashed: bool) -> Tensor:
        """A gate in the state's dtype and in the shape that the step takes."""
        if self.inspects and not (squashed and self.tells):
            expect_within(gate, 0, self.tops[index])
        return (gate if gate.dtype == self.dtype else gate.to(self.dtype)).reshape(*self.shapes[index])

    def start(self, initial: Named | None, state: MemoryState) -> tuple[Tensor, ...]:
        """The weights `[N, ...]` that the memory decays towards."""
        batch, heads = state.position.shape
        if initial is None:
            shapes = (self.config.feature_map.output_dim(self.width), self.shape[-1])
            initial = starts(
                self.config.structure, *shapes, heads=heads, dtype=self.dtype, device=state.position.device
            )
        pairs = [(initial[name].to(self.dtype), weight.dim()) for name, weight in state.memory.items()]
        return tuple([x.expand(batch, *x.shape[-rank + 1 :]).flatten(0, 1) for x, rank in pairs])

    def gated(self, token: tuple[Any, ...], gates: Gates) -> tuple[Any, ...]:
        """The token with the keys that it erases and writes with, and its retain_value: as `to_tokens` has them."""
        phi_k, pairs = token[0], zip(GENERAL[:3], gates[3:6], strict=True)
        erase, write, decay = [None if gate is None else self.factor(name, gate) for name, gate in pairs]
        erased = phi_k if erase is None else phi_k * erase
        written = phi_k if write is None else phi_k * write
        if self.config.forms.target:
            return (written, *token[1:]) if decay is None else (written, *token[1:], None, None, None, decay)
        return erased, *token[1:], None, None, None if written is erased else written, decay

    def factor(self, name: str, gate: Any) -> Tensor:
        """erase, write, retain_value or floor of every memory as a row."""
        if name in self.factors:
            return self.factors[name]
        if self.inspects and name not in ("erase", "write"):
            expect_within(gate, 0, 1.0 if name == "retain_value" else math.inf)
        return (gate if gate.dtype == self.dtype else gate.to(self.dtype)).reshape(*self.row)

    def features_of(self, q: Tensor, k: Tensor, state: MemoryState, params: Params | None) -> tuple[Tensor, Tensor]:
        """phi(q) and phi(k) after key_norm and query_scale."""
        config, phi = self.config, NO_PARAMS
        if self.lifts:
            q, k = q.unsqueeze(1), k.unsqueeze(1)
        if params is not None:
            phi = check_params(config.feature_map, params, k if k.dim() == 4 else k.unsqueeze(1))
            if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in phi["learned"].values()):
                raise Unfit
        if state.seen is not None:
            phi = {**phi, "position": state.seen[:, None, None]}
        if self.casts:
            q, k = q.to(self.dtype), k.to(self.dtype)
        phi_k, _ = config.feature_map.forward(k, phi)
        phi_q, _ = config.feature_map.forward(q, phi)
        if config.key_norm == "none":
            phi_q, phi_k = phi_q.reshape(*self.features).contiguous(), phi_k.reshape(*self.features).contiguous()
        elif phi_q.stride(-1) != 1 or phi_k.stride(-1) != 1:
            raise Unfit  # sums along strides are rounded in another order
        else:  # rows know nothing of each other
            with below_autograd():
                phi_q, phi_k = self.normed(torch.stack((phi_q, phi_k))).view(2, *self.features).unbind(0)
        return (phi_q if self.scale is None else phi_q * self.scale), phi_k

    def normed(self, x: Tensor) -> Tensor:
        """key_norm of x, whose sizes are near enough to 1 for the plain quotient."""
        l2 = self.config.key_norm == "l2"
        if not self.inspects:
            return one(execute(L2_NORM if l2 else SUM_NORM, x))
        size = (x.square() if l2 else x).sum(-1, keepdim=True)
        expect_within(size, 1 / self.far, self.far)
        return x / (size.sqrt() if l2 else size)

    def is_finite(self, y: Tensor, state: MemoryState) -> bool:
        """True if the sums of outputs and state are finite, as these then are. If not, a full scan finds out whether a
        sum alone has overflowed."""
        total = y.sum().item()
        for named in state[: self.summed]:
            for tensor in named.values():  # type: ignore[union-attr]
                total += tensor.sum().item()
        return math.isfinite(total) and (state.normalizer is None or self.is_finite(y, state.normalizer))


def expect_within(x: Tensor, low: float, high: Any) -> None:
    """Raises `Unfit` for numbers outside `low` to `high`; a few are compared in Python, which is faster."""
    values = x.reshape(-1).tolist() if x.numel() <= FEW else [end.item() for end in x.aminmax()]
    if not all([low <= value <= high for value in values]):
        raise Unfit


def _is_online(config: MemoryConfig) -> bool:
    """True if a linear memory takes a linear step at every token."""
    return chunk_refusal(config) is None and config.forms.linear and _decays_plainly(config)


def _decays_plainly(config: MemoryConfig) -> bool:
    return config.retention.linear and not config.retention.anchored


def _is_direct(config: MemoryConfig) -> bool:
    """True if a write is `a M - lr u k^T` for one matrix, with momentum or without, at every token."""
    return _is_online(config) and not config.structure.diagonal and config.rule.write_block() is not None


class TokenForm(NamedTuple):
    """Form of a write, for the kernel that runs a single token of a layer.

    Fields:
        blind: whether the error is -v, without a prediction.
        early: whether the gradient is taken at the decayed memory.
        after: whether a token's answer sees its own write.
        decays, dampens: whether the retention decays, and whether the algorithm multiplies lr by (1 - momentum).
        chunk: tokens whose gradients are summed up for one step of the memory; 1 for a step at each.
    """

    blind: bool
    early: bool
    after: bool
    decays: bool
    dampens: bool
    chunk: int


def token_form(config: MemoryConfig) -> TokenForm | None:
    """The form in which the kernel of a single token writes: l2 or dot, by gd or momentum at every token or gd at the
    end of a chunk, with the identity as phi. None for any other config."""
    known: dict[Any, Any] = config.refusals
    if token_form not in known:
        plain = config.writes == 1 and config.readout.plain and not (config.forms.transposed or config.by_key)
        plain = plain and config.forms.identity and config.normalizer == "none" and config.key_norm != "sum"
        fits = plain and config.on_nonfinite != "skip" and (config.forms.error or config.forms.target)
        early, after = config.decay_order == "before_gradient", config.read == "after"
        form = TokenForm(
            config.forms.target, early, after, config.retention.uses_retain, config.forms.dampens, config.chunk
        )
        known[token_form] = form if fits and (_is_direct(config) or _gathers(config)) else None
    return known[token_form]


def _gathers(config: MemoryConfig) -> bool:
    """True if all that a token does is to add lr u k^T to a sum, which moves one matrix by gd at the chunk's end."""
    linear = config.forms.linear and _decays_plainly(config) and not config.structure.diagonal
    plain = not (config.algorithm.slots or config.forms.dampens or config.blocks)
    return config.commit == "chunk" and config.chunk > 1 and linear and plain and config.rule.write_block() is not None


def _direct(config: MemoryConfig, given_lr: Any) -> TokenStep:
    """M' = a M - lr u k^T, or S' = momentum S - lr u k^T and M' = a M + S': the formulas of the rule's own block."""
    late, early = config.read == "after", config.decay_order == "before_gradient"
    decays, blind = config.retention.uses_retain, config.forms.target  # blind: u is -v, without a prediction
    grad = torch.sub if config.forms.error else config.bias.grad
    scaled = config.by_key or config.forms.dampens  # lr arrives changed
    lr_given = config.algorithm.lr if given_lr is None else given_lr
    full = not scaled and not isinstance(given_lr, Tensor) and lr_given == 1

    def step(
        k: Tensor, q: Tensor, v: Tensor, lr: Tensor, retain: Tensor, momentum: Tensor, state: MemoryState
    ) -> tuple[Tensor, MemoryState]:
        ((name, carried),) = state.memory.items()
        memory = carried.flatten(0, 1)
        decayed = retain * memory if decays and (early or not state.slots) else memory
        at = decayed if early else memory
        u = grad(v if blind else torch.bmm(k, at.mT), v)
        d = (u if full else lr * u).mT
        slots = {}
        if state.slots:
            ((slot, old),) = state.slots.items()
            moved = torch.addcmul(momentum * old.flatten(0, 1), d, k, value=-1)
            slots[slot] = moved.view_as(old)
            new = torch.addcmul(moved, retain, memory) if decays else moved + memory
        else:
            new = torch.addcmul(decayed, d, k, value=-1)
        y = torch.bmm(q, (new if late else memory).mT)
        return y, MemoryState({name: new.view_as(carried)}, slots, {}, {}, state.position)

    return step


def _keyed(config: MemoryConfig) -> TokenStep:
    """A write with its own key phi_w, or with retain_value: the formulas of the rule's knobs, one by one."""
    structure, bias, retention, algorithm = config.structure, config.bias, config.retention, config.algorithm
    late, early = config.read == "after", config.decay_order == "before_gradient"

    def step(*inputs: Any) -> tuple[Tensor, MemoryState]:
        k, q, v, lr, retain, momentum, _, _, written, retain_value, state = inputs
        ((name, carried),) = state.memory.items()
        memory = carried.flatten(0, 1)
        if retain_value is not None:
            retain = one(execute(CELLS, retain, retain_value))
        at = (retention.step(memory, torch.zeros_like(memory), retain) if early else memory,)
        u = bias.grad(structure.predict(at, k), v)
        (g,) = structure.pullback(at, k if written is None else written, u)
        d, *new = algorithm.direction(g, lr, momentum, *(slot.flatten(0, 1) for slot in state.slots.values()))
        moved = retention.step(memory, d, retain)
        slots = {slot: item.view_as(carried) for slot, item in zip(state.slots, new, strict=True)}
        y = structure.read((moved if late else memory,), q)
        return y, MemoryState({name: moved.view_as(carried)}, slots, {}, {}, state.position)

    return step


def _general(config: MemoryConfig) -> TokenStep:
    """Any other rule, by `token_step` of the token loop."""
    blocks = blocks_of(config)

    def step(*inputs: Any) -> tuple[Tensor, MemoryState]:
        *token, state = inputs
        carry, fields = carry_of(state), len(Tokens._fields)
        start = token[fields] if len(token) > fields else ()
        y, new, _ = token_step(config, Tokens(*token[:fields]), carry, start, run=execute, blocks=blocks)
        new = new.rebuilt(tuple(apart(new.flat, carry.flat, execute)))  # type: ignore[arg-type]
        return y, named_state(tuple(state.memory), tuple(state.slots), new, state.position.shape)

    return step
