"""A memory rule: the four knobs, the formula that combines them, and the traits of theirs that engines need."""

from __future__ import annotations

import math
from functools import reduce
from operator import add
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hecate.activation import Activation
from hecate.algorithm import GD, AlgorithmForm, AlgorithmKind, InnerLoss, Token
from hecate.bias import L2, Bias, BiasKind
from hecate.formula import activation_nodes, algorithm_formula, formula_of, is_cheap, retention_formula
from hecate.phi import FeatureMapKind, Identity
from hecate.retention import NoRetention, RetentionKind
from hecate.structure import Matrix, Memory, Structure, StructureKind
from hecate.structure.base import SlotForm
from hecate.structure.graph import descent, outers
from hecate.tape import Block, Run, Tensors, execute, formula_block, one, several
from hecate.tape.ops import over, sum_to_gate
from hecate.variant import Config


class TokenGates(NamedTuple):
    """Gates of one token for N memories: lr and momentum `[N]`, retain `[N]`, `[N, P]` or `[N, V, P]`."""

    lr: Tensor
    retain: Tensor
    momentum: Tensor


class MemoryRule(Config):
    """Structure, attentional bias, retention and algorithm: the four choices of MIRAS.

    Every method works on phi(k) and phi(q), never on keys themselves, which is why any feature map goes with any rule.
    All are pure: they return new tensors and touch nothing. `run` executes the blocks: `execute` forgets them, a `Tape`
    records them.

    `memory` is what is carried from token to token, `weights` what predicts: the same, unless the retention carries a
    dual state. A write is retain times what is carried plus the step on the gradient by the weights.

    Shapes: phi_k, phi_q `[N, P]`, v `[N, V]`; weights and slots `[N, ...]` in the structure's order, slots of one
    weight after the other. [RULE-WRITE-D1]
    """

    structure: StructureKind = Matrix()
    bias: BiasKind = L2()
    retention: RetentionKind = NoRetention()
    algorithm: AlgorithmKind = GD()

    def weights(self, memory: Memory, *, run: Run = execute, label: str = "") -> Memory:
        """The weights that a memory predicts with, from what it carries."""
        if not self.retention.dual:
            return memory
        block = self.retention.weights_block()
        return tuple(one(run(block, item, label=label)) for item in memory)

    def moved(
        self, memory: Memory, anchor: Memory, weights: Memory, share: Tensor, *, run: Run = execute, label: str = ""
    ) -> Memory:
        """The weights of a memory that has moved in the primal from those of an anchor, of which `share` is left:
        memory + share (weights - anchor). [RET-MIRROR-D3]"""
        rows = zip(memory, anchor, weights, strict=True)
        return tuple(one(run(_MOVED, *row, share, label=label)) for row in rows)

    def read(self, memory: Memory, phi_q: Tensor, *, run: Run = execute, label: str = "") -> Tensor:
        """y = f(weights, phi_q)."""
        weights = self.weights(memory, run=run, label=label)
        return one(run(self.structure.read_block(), phi_q, *weights, label=label))

    def gradient(self, memory: Memory, phi_k: Tensor, v: Tensor, *, run: Run = execute, label: str = "") -> Memory:
        """Gradient of the inner loss by the weights, taken at those of a memory."""
        weights = self.weights(memory, run=run, label=label)
        return self._loss(weights, run, label).gradient(phi_k, v)

    def _loss(self, weights: Memory, run: Run, label: str) -> InnerLoss:
        structure, bias = self.structure, self.bias.block()

        def several_of(block: Block, *inputs: Tensor) -> tuple[Tensor, ...]:
            return several(run(block, *inputs, label=label))

        def error(phi_k: Tensor, v: Tensor) -> Tensor:
            return one(several_of(bias, *several_of(structure.predict_block(), phi_k, *weights), v))

        return InnerLoss(
            curvature=self.bias.curvature,
            diagonal=structure.diagonal,
            gradient=lambda phi_k, v: several_of(structure.gradient_block(bias), phi_k, v, *weights),
            error=error,
            pullback=lambda phi_k, u: several_of(structure.pullback_block(), phi_k, u, *weights),
            run=several_of,
        )

    def descended(
        self, weights: Memory, token: Token, slots: Memory = (), *, run: Run = execute, label: str = ""
    ) -> tuple[Memory, Memory]:
        """The gradient that the algorithm descends at weights, and the slots with its context.

        With a key phi_w of its own for the write it is d ell / d pred at phi_k, pulled back at phi_w."""
        count, loss = len(self.algorithm.slots) * len(weights), self._loss(weights, run, label)
        if token.phi_w is not None:
            return loss.pullback(token.phi_w, loss.error(token.phi_k, token.v)), slots
        grads, context = self.algorithm.gradient(loss, token, slots[count:])
        return grads, (*slots[:count], *context)

    def apply(
        self, memory: Memory, slots: Memory, gradient: Memory, gates: TokenGates, *, run: Run = execute, label: str = ""
    ) -> tuple[Memory, Memory]:
        """One step of the algorithm followed by retention: the new memory and slots."""
        context = len(self.algorithm.slots) * len(memory)
        new = several(run(self.step_block(), *gates, *gradient, *memory, *slots[:context], label=label))
        return new[: len(memory)], (*new[len(memory) :], *slots[context:])

    def step_block(self) -> Block:
        """`apply` as one block: (lr, retain, momentum, *gradient, *memory, *slots) -> (*memory, *slots).

        Its derivative is the chain rule over those of the algorithm and of the retention.
        """
        algorithm, retention = self.algorithm.block(), self.retention.block()
        count = len(self.algorithm.slots)

        def forward(*inputs: Tensor) -> tuple[Tensors, Any]:
            record: list[Any] = []

            def run(block: Block, *inputs: Tensor | None, label: str = "") -> Tensors:
                outputs, residuals = block.apply(inputs)
                record.append(residuals)
                return outputs

            return program(run, *inputs), record

        def vjp(record: list[Any], *cotangents: Tensor) -> Tensors:
            weights = len(record) // 2
            of_gates: tuple[list[Tensor], ...] = ([], [], [])
            ggradient: list[Tensor | None] = []
            gmemory: list[Tensor | None] = []
            gslots: list[Tensor | None] = []
            for index, g in enumerate(cotangents[:weights]):
                gweight, gdirection, more = retention.pullback(record[2 * index + 1], [g])
                into = cotangents[weights + index * count :][:count]
                gdirection = torch.zeros_like(g) if gdirection is None else gdirection
                pulled = algorithm.pullback(record[2 * index], [gdirection, *into])
                ggradient.append(pulled[0])
                gmemory.append(gweight)
                gslots += pulled[3:]
                for terms, term in zip(of_gates, (pulled[1], more, pulled[2]), strict=True):
                    terms += [] if term is None else [term]
            return *(reduce(add, terms) if terms else None for terms in of_gates), *ggradient, *gmemory, *gslots

        def program(run: Run, lr: Tensor, retain: Tensor, momentum: Tensor, *rest: Tensor) -> Tensors:
            weights = len(rest) // (2 + count)
            new: list[Tensor | None] = []
            carried: list[Tensor | None] = []
            for index in range(weights):
                slots = rest[2 * weights + index * count :][:count]
                direction, *more = run(algorithm, rest[index], lr, momentum, *slots)
                new += run(retention, rest[weights + index], direction, retain)
                carried += more
            return *new, *carried

        return Block(f"step.{self.algorithm.kind}.{self.retention.kind}", forward, vjp, program)

    def write(
        self,
        memory: Memory,
        slots: Memory,
        phi_k: Tensor,
        v: Tensor,
        gates: TokenGates,
        *,
        phi_w: Tensor | None = None,
        weights: Memory | None = None,
        run: Run = execute,
        label: str = "",
    ) -> tuple[Memory, Memory]:
        """One token's write; the gradient is taken at weights, by default those of the memory, and written at phi_w, by
        default phi_k."""
        if weights is None and self.retention.dual:
            weights = self.weights(memory, run=run, label=label)
        block = self.write_block()
        if block is not None and phi_w is None and gates.retain.dim() < 3:
            state = (*memory, *slots, *(weights or ()))
            new = several(run(block, *gates, phi_k, v, *state, label=label))
            return new[: len(memory)], new[len(memory) :]
        token = Token(phi_k, v, gates.lr, phi_w)
        grads, slots = self.descended(weights or memory, token, slots, run=run, label=label)
        return self.apply(memory, slots, grads, gates, run=run, label=label)

    def write_block(self) -> Block | None:
        """`write` as one block where gradients need not be built; None elsewhere.

        (lr, retain, momentum, phi_k, v, *memory, *slots, *weights) -> (*memory, *slots), weights left out where they
        are the memory.
        """
        form = self.algorithm.kernel_form()
        refused = form is None or form.nesterov or not (self.retention.additive and self.structure.factored)
        return None if refused else _rank_one_block(self)

    def decayed(self, memory: Memory, retain: Tensor, *, run: Run = execute, label: str = "") -> Memory:
        """The carried state after retention and before any step: where `before_gradient` takes the gradient.

        `retain` is the token's gate, or in a chunk the product of its gates up to the token.
        """
        block = self.retention.block()
        return tuple(one(run(block, weight, torch.zeros_like(weight), retain, label=label)) for weight in memory)


def _moved_vjp(memory: Tensor, anchor: Tensor, weights: Tensor, share: Tensor, g: Tensor) -> Tensors:
    gweights = over(share, g) * g
    return g, -gweights, gweights, sum_to_gate(g * (weights - anchor), share)


_MOVED = formula_block(
    "memory.moved", lambda memory, anchor, weights, share: memory + over(share, memory) * (weights - anchor), _moved_vjp
)


def _rank_one_block(rule: MemoryRule) -> Block:
    """A write whose gradient has rank one in every layer, as one block that never builds it.

    Where retention keeps `a X + D` and the direction is linear in the gradients d h^T, a token's write is two rank-one
    products per layer and its derivative needs those of d and h alone. It equals the gradient followed by the step,
    block by block, which is its program. The gradient is taken at the memory X itself, or at other weights: those of a
    dual state X, or of a chunk's start. [RULE-WRITE-D1]
    """
    graph, loss, retention = rule.structure.graph(), rule.bias.block(), rule.retention
    step, gradient = rule.step_block(), rule.structure.gradient_block(loss)
    count = graph.weights
    split = count * (1 + len(rule.algorithm.slots))

    def forward(
        lr: Tensor, retain: Tensor, momentum: Tensor, p: Tensor, v: Tensor, *state: Tensor
    ) -> tuple[Tensors, Any]:
        memory, slots = state[:count], state[count:split]
        trace = descent(graph, loss, state[split:] or memory, p, v)
        down = -over(lr, memory[0])
        stepped = [down * di for di in trace.d]
        keep = over(retain, memory[0]) if retention.uses_retain else None
        carried: list[Tensor] = []
        if slots:
            factor = over(momentum, slots[0])
            carried = [outers(factor * s, di, hi) for s, di, hi in zip(slots, stepped, trace.h, strict=True)]
            pairs = zip([retention.centred(s, retain) for s in carried], memory, strict=True)
            new = [s + m if keep is None else torch.addcmul(s, keep, m) for s, m in pairs]
        else:
            decayed = memory if keep is None else [keep * weight for weight in memory]
            rows = zip(decayed, stepped, [retention.centred(hi, retain) for hi in trace.h], strict=True)
            new = [outers(m, di, hi) for m, di, hi in rows]
        return (*new, *carried), ((down, keep, retain, momentum), state, stepped, trace)

    def vjp(residuals: Any, *cotangents: Tensor) -> Tensors:
        (down, keep, retain, momentum), state, stepped, trace = residuals
        memory, slots, weights = state[:count], state[count:split], state[split:]
        gmemory, later = list(cotangents[:count]), cotangents[count:]
        gretain = gmomentum = None
        known, gslots = gmemory, []
        if keep is not None:
            known = [keep * g for g in gmemory]
            gretain = reduce(add, [sum_to_gate(g * m, retain) for g, m in zip(gmemory, memory, strict=True)])
        gmemory = [retention.centred(g, retain) for g in gmemory]
        if slots:
            gmemory = [a + b for a, b in zip(gmemory, later, strict=True)]
            gslots = [over(momentum, g) * g for g in gmemory]
            gmomentum = reduce(add, [sum_to_gate(g * s, momentum) for g, s in zip(gmemory, slots, strict=True)])
        pulled = [torch.bmm(hi, g.mT) for hi, g in zip(trace.h, gmemory, strict=True)]
        glr = -reduce(add, [(di * x).sum((1, 2)) for di, x in zip(trace.d, pulled, strict=True)])
        gd = [down * x for x in pulled]
        gh = [torch.bmm(di, g) for di, g in zip(stepped, gmemory, strict=True)]
        gweights, gp, gv = trace.vjp(loss, gd, gh, () if weights else known)
        gstate = (*known, *gslots, *gweights) if weights else (*gweights, *gslots)
        return glr, gretain, gmomentum, gp, gv, *gstate

    def program(
        run: Run, lr: Tensor, retain: Tensor, momentum: Tensor, p: Tensor, v: Tensor, *state: Tensor
    ) -> Tensors:
        grads = run(gradient, p, v, *(state[split:] or state[:count]))
        return run(step, lr, retain, momentum, *grads, *state[:split])

    return Block(f"write.{step.name.removeprefix('step.')}", forward, vjp, program)


# Traits of the knobs.


class Forms:
    """Forms and traits of a config's knobs that engines need at every call, computed once.

    Fields:
        retention: printed, or why it cannot be.
        algorithm: its `kernel_form()`.
        tokens: its `token_form()`, and that of the structure.
        descent: of the algorithm where kernels know none of these, printed, or why it cannot be.
        plain: whether the memory itself is carried, by steps r X + D.
        texts: bias, both and phi in JSON, which a tracer could not make.
        cheap: whether kernels make features as they load a row: phi is printed, of few operations.
        identity: whether phi is the identity.
        target, error: whether u is that of bias dot, which does not look at the prediction, or that of l2.
        formula: of the bias, printed; None if there is none.
        apart: whether no coordinate of u is known to need another.
        acts: the nodes of the structure's activations, or why there are none.
        unprinted: why no kernel can be printed of the bias or an activation; torch's compiler cannot trace a trace.
        linear, transposed: as the structure says.
        gates: which of lr, retain and momentum the knobs take, in the order of `TokenGates`.
        defaults: what these are where none is given.
        tops: the largest they may be.
        per_head: whether the default retain differs between heads; then it is that of the first.
        dampens: whether the algorithm multiplies lr by (1 - momentum).
    """

    def __init__(self, rule: MemoryRule, phi: FeatureMapKind) -> None:
        bias, retention, algorithm, structure = rule.bias, rule.retention, rule.algorithm, rule.structure
        printed = formula_of(bias) if isinstance(bias, Bias) else "it is no variant"
        self.formula = None if isinstance(printed, str) else printed
        self.target = self.formula is not None and self.formula.target
        self.error = self.formula is not None and self.formula.error
        self.apart = self.formula is not None and self.formula.coordinatewise
        self.retention = retention_formula(retention)
        self.plain = not isinstance(self.retention, str) and self.retention.plain
        self.algorithm: AlgorithmForm | None = algorithm.kernel_form()
        form: AlgorithmForm | None = algorithm.token_form()
        self.tokens: tuple[AlgorithmForm | None, SlotForm | None] = (form, structure.token_form())
        described = form is not None and not form.nesterov
        self.descent = None if described else algorithm_formula(algorithm)
        self.texts = tuple(knob.model_dump_json() for knob in (bias, retention, algorithm, phi))
        self.cheap = is_cheap(phi)
        self.identity = type(phi) is Identity
        self.acts: tuple[Any, ...] = tuple(map(activation_nodes, acts_of(structure)))
        self.unprinted = _act_without_kernel(structure)
        if isinstance(printed, str):
            self.unprinted = f"bias {bias.kind!r} as configured has no kernel: {printed}"
        self.linear = structure.linear
        self.transposed = structure.transposed
        self.gates = (True, retention.uses_retain, algorithm.uses_momentum)
        self.defaults = (algorithm.lr, retention.default_retain, algorithm.default_momentum)
        self.tops = (math.inf, 1.0, algorithm.momentum_top)
        self.per_head = retention.uses_retain and retention.per_head
        self.dampens = algorithm.dampens


def acts_of(structure: Structure) -> set[Activation]:
    """The activations among the fields of a structure."""
    return {value for value in vars(structure).values() if isinstance(value, Activation)}


def knobs_of(rule: MemoryRule) -> list[Any]:
    """The knobs, and the variants among their fields, such as an activation; torch.compile can trace it."""
    values = [*vars(rule).values()]
    for value in values:  # nested variants are appended as they are found
        if hasattr(type(value), "_registry"):  # of the type, as dynamic=True makes symbols of numbers
            values.extend(vars(value).values())
    return [value for value in values if hasattr(type(value), "_registry")]


def _act_without_kernel(structure: Structure) -> str | None:
    for act in acts_of(structure):
        if isinstance(reason := activation_nodes(act), str):
            return f"activation {act.kind!r} of structure {structure.kind!r} has no kernel: {reason}"
    return None
