"""The factored engine: linear memories token by token, where the algorithm makes a step of low rank of a gradient u p^T
without building it.

    u = grad ell(A p, v),  (L, R, S') = algorithm(u, p, S),  M' = retain M + L R^T

with A the memory, or what is left of it where the gradient decays it first. The forward keeps the states of every
sqrt(T)-th token; the backward makes the steps between two of them again and pulls them back by hand:

    G += g q^T,  g_q = M'^T g,  g_L = G R,  g_R = G^T L,  G_A = g_pred p^T,  g_p += A^T g_pred

The same numbers as those of the token loop, but for rounding. [ENG-FACT-D1, ENG-FACT-V1]
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hecate.engine.call import Call, Plan
from hecate.engine.engine import TokenEngine, chunk_refusal
from hecate.engine.loop import root
from hecate.engine.tokens import Carry, Tokens, by_token, expand_to, in_folds, run_by_hand
from hecate.rule import MemoryConfig
from hecate.structure import Memory
from hecate.tape import ByHand, Run, Tensors, execute, one, several
from hecate.tape.ops import over, sum_to_gate

State = tuple[Tensor, ...]  # the memory and its slots


class Factored(TokenEngine):
    """Token by token, with gradients and steps as factors."""

    name = "factored"
    reason = "gradients and steps as factors, token by token"

    def refuses(self, config: MemoryConfig) -> str | None:
        """Refuses configs that need whole gradients, or take them elsewhere."""
        if (reason := chunk_refusal(config)) is not None:
            return reason
        if not config.forms.linear or config.structure.diagonal:
            return f"structure {config.structure.kind!r} is not a matrix"
        if not config.retention.linear:
            return f"retention {config.retention.kind!r} is not linear"
        if config.algorithm.factored_form() is None:
            return f"algorithm {config.algorithm.kind!r} as configured makes no step of narrow factors"
        return None

    def steps(self, plan: Plan | Call) -> int:
        """Every token."""
        return plan.length

    def cost(self, plan: Plan) -> float:
        """Half of what the loop takes (measured)."""
        return 60.0 * (1 + plan.length)

    def scan(self, call: Call, tokens: Tokens, carry: Carry, initial: Memory, *, run: Run) -> tuple[Tensor, Carry]:
        """Token by token."""
        return in_folds(factored, call.config, tokens, carry, initial, run=run)


def factored(config: MemoryConfig, tokens: Tokens, carry: Carry, initial: Memory, *, run: Run) -> tuple[Tensor, Carry]:
    """Runs tokens `[N, T, *]`: outputs and the final carry."""
    loop = _Loop(config)
    hand = ByHand("engine.factored", loop.forward, loop.backward, lambda *inputs: loop.forward(inputs, False)[0])
    return run_by_hand(hand, tokens, carry, initial, run=run)


class _Record(NamedTuple):
    """Record of one token for the backward pass: the states before and after it, the weights at which its gradient was
    taken, its prediction, the residuals of bias and step, and the factors."""

    before: State
    after: State
    at: Tensor
    of_bias: Any
    of_step: Any
    left: Tensor
    right: Tensor


class _Loop:
    """The tokens of a scan one after the other, forward and backward."""

    def __init__(self, config: MemoryConfig) -> None:
        self.config, self.bias = config, config.bias.block()
        self.step: Any = config.algorithm.factored_form()  # the engine refuses algorithms without one
        self.decays, self.early = config.retention.uses_retain, config.read == "before"
        self.decayed = config.decay_order == "before_gradient"

    def split(self, inputs: Tensors) -> tuple[State, State, list[Tokens]]:
        """The first state, the state after a restart, and the tokens."""
        count = 1 + len(self.config.algorithm.slots)
        state, initial = several(inputs[:count]), one((inputs[count],))
        tokens = by_token(Tokens(*inputs[count + 1 :]), execute)  # type: ignore[arg-type]
        return state, (initial, *map(torch.zeros_like, state[1:])), tokens

    def forward(self, inputs: Tensors, keeps: bool) -> tuple[Tensors, list[State]]:
        """Outputs and the last state, and as record the state at every sqrt(T)-th token."""
        state, fresh, tokens = self.split(inputs)
        every, starts, outputs = root(len(tokens)), [], []
        for t, token in enumerate(tokens):
            if keeps and t % every == 0:
                starts.append(state)
            state = self.entered(token, fresh, state)
            new, _ = self.stepped(token, state)
            outputs.append(torch.bmm(token.phi_q.unsqueeze(1), (state if self.early else new)[0].mT))
            state = new
        return (torch.cat(outputs, 1), *state), starts

    def stepped(self, token: Tokens, state: State) -> tuple[State, _Record]:
        """One write."""
        memory, *slots = state
        decayed = over(token.retain, memory) * memory if self.decays else memory
        at = decayed if self.decayed else memory
        pred = torch.bmm(token.phi_k.unsqueeze(1), at.mT).squeeze(1)
        (u,), of_bias = self.bias.apply((pred, token.v))
        (left, right, *new), of_step = self.step.apply((u, token.phi_k, token.lr, token.momentum, *slots))
        after = (torch.baddbmm(decayed, left, right.mT), *new)
        record = _Record(state, after, at, of_bias, of_step, left, right)
        return (after if token.write is None else _where(token.write, after, state)), record

    def entered(self, token: Tokens, fresh: State, state: State) -> State:
        """The state before a token, restarted if the token resets it."""
        return state if token.reset is None else _where(token.reset, fresh, state)

    def backward(self, inputs: Tensors, starts: list[State], cotangents: Sequence[Tensor]) -> Tensors:
        """Cotangents of all inputs."""
        _, fresh, tokens = self.split(inputs)
        gy, *later = cotangents
        rows, state = gy.split(1, 1), tuple(later)
        ginitial = torch.zeros_like(fresh[0])
        every, shares = root(len(tokens)), []
        # From the last kept state: forward to the next one, then back through those steps.
        for begin in reversed(range(0, len(tokens), every)):
            at, steps = starts[begin // every], []
            for token in tokens[begin : begin + every]:
                at, record = self.stepped(token, self.entered(token, fresh, at))
                steps.append(record)
            for t in reversed(range(begin, begin + len(steps))):
                share, state = self.back(tokens[t], steps.pop(), rows[t], state)
                shares.append(share)
                if (reset := tokens[t].reset) is not None:
                    ginitial = ginitial + torch.where(expand_to(reset, state[0]), state[0], 0.0)
                    state = _where(reset, tuple(map(torch.zeros_like, state)), state)
        joined = [None if column[0] is None else torch.stack(column[::-1], 1) for column in zip(*shares, strict=True)]
        return *state, ginitial, *joined, *[None] * (len(Tokens._fields) - len(joined))

    def back(self, token: Tokens, record: _Record, g: Tensor, later: State) -> tuple[tuple[Tensor | None, ...], State]:
        """Cotangents of a token's phi_k, phi_q, v and gates, and of the state before it."""
        memory, q = record.before[0], token.phi_q.unsqueeze(1)
        if self.early:
            gq = torch.bmm(g, memory)
        else:
            read_from = record.after[0]
            if token.write is not None:
                read_from = torch.where(expand_to(token.write, memory), read_from, memory)
            gq = torch.bmm(g, read_from)
            later = (torch.addcmul(later[0], g.mT, q), *later[1:])
        passed = None
        if token.write is not None:
            none = tuple(map(torch.zeros_like, later))
            later, passed = _where(token.write, later, none), _where(token.write, none, later)
        gmemory, *gslots = later
        # M' = r M + L R^T with ranks far below V and P, so that no gradient of the memory's size is needed.
        gleft, gright = torch.bmm(gmemory, record.right), torch.bmm(gmemory.mT, record.left)
        gu, gp, glr, gmomentum, *gslots = self.step.pullback(record.of_step, [gleft, gright, *gslots])
        gpred, gv = self.bias.pullback(record.of_bias, [gu])
        gretain, before = None, gmemory
        if gpred is not None:
            gpred = gpred.unsqueeze(1)
            gp = torch.baddbmm(gp.unsqueeze(1), gpred, record.at).squeeze(1)
            if self.decayed:
                before = gmemory = torch.addcmul(gmemory, gpred.mT, token.phi_k.unsqueeze(1))
        if self.decays:
            gretain = sum_to_gate(gmemory * memory, token.retain)
            before = over(token.retain, memory) * gmemory
        if gpred is not None and not self.decayed:
            before = torch.addcmul(before, gpred.mT, token.phi_k.unsqueeze(1))
        if self.early:
            before = torch.addcmul(before, g.mT, q)
        state = (before, *gslots)
        if passed is not None:
            state = tuple(a + b for a, b in zip(state, passed, strict=True))
        return (gp, gq.squeeze(1), gv, glr, gretain, gmomentum), state


def _where(mask: Tensor, yes: State, no: State) -> State:
    return tuple(torch.where(expand_to(mask, a), a, b) for a, b in zip(yes, no, strict=True))
