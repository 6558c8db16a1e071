"""The cascade engine: two linear memories, of which the second is read with what the first answers.

The key of each is known beforehand, a part of phi(k), so each is a linear memory of its own and runs in blocks as in
`hecate.engine.parallel`: the first under the loss of its answer behind the link, |f(W_1 w) - a|^2 / 2, whose errors are
solved as those of any bias that is not linear, the second under the config's bias. The first's answers to the queries,
through the link, are the second's queries. [ENG-CASC-D1]
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from hecate.engine.call import Call, Plan
from hecate.engine.engine import TokenEngine, chunk_refusal
from hecate.engine.parallel import parallel
from hecate.engine.tokens import Carry, Tokens, in_folds, split_time
from hecate.rule import MemoryConfig
from hecate.structure import Memory
from hecate.tape import Autodiff, Run, one, several


class Cascade(TokenEngine):
    """Both memories block by block, one after the other."""

    name = "cascade"
    reason = "two linear memories, each exact in blocks"

    def refuses(self, config: MemoryConfig) -> str | None:
        """Refuses configs that are no cascade, or not linear in the states of its memories."""
        if config.cascade is None:
            return f"structure {config.structure.kind!r} is no cascade of linear memories"
        if (reason := chunk_refusal(config)) is not None:
            return reason
        if not config.retention.linear:
            return f"retention {config.retention.kind!r} is not linear"
        if config.forms.algorithm is None:
            return f"algorithm {config.algorithm.kind!r} is not a linear recurrence of the gates alone"
        return None

    def steps(self, plan: Plan | Call) -> int:
        """The blocks of both memories, each of many operations."""
        return plan.length

    def cost(self, plan: Plan) -> float:
        """From six tokens on it has been faster than the token loop, whatever the sizes (measured)."""
        return 300.0 + 45.0 * plan.length

    def autodiff(self, config: MemoryConfig) -> Autodiff:
        """Both keep what their blocks make."""
        return "torch"

    def scan(self, call: Call, tokens: Tokens, carry: Carry, initial: Memory, *, run: Run) -> tuple[Tensor, Carry]:
        """The first memory, the link, the second."""
        return in_folds(cascaded, call.config, tokens, carry, initial, run=run)


def cascaded(config: MemoryConfig, tokens: Tokens, carry: Carry, initial: Memory, *, run: Run) -> tuple[Tensor, Carry]:
    """Runs tokens `[N, T, *]`: outputs and the final carry."""
    cascade: Any = config.cascade  # the engine refuses other structures
    front, rear = cascade
    form: Any = front.bias
    apart = split_time([tokens.phi_k.shape[-1] - form.codes, form.codes], -1)
    keys, codes = several(run(apart, tokens.phi_k, label="phi(k)"))
    queries, _ = several(run(apart, tokens.phi_q, label="phi(q)"))
    count = len(config.algorithm.slots)
    parts = [
        carry._replace(memory=carry.memory[at : at + 1], slots=carry.slots[at * count : (at + 1) * count])
        for at in range(2)
    ]
    first = tokens._replace(phi_k=keys, phi_q=queries, v=codes)
    z, carried = parallel(front, first, parts[0], initial[:1], run=run)
    second = tokens._replace(phi_k=codes, phi_q=one(run(form.link, z, label="codes")))
    y, after = parallel(rear, second, parts[1], initial[1:], run=run)
    return y, carry._replace(memory=(*carried.memory, *after.memory), slots=(*carried.slots, *after.slots))
