"""The window engine: memories that descend the loss of their last tokens at every token, exactly and in blocks.

A window's gradient has W terms, each of rank one and taken at the present memory. Within a block of n tokens over the
features R `[L, F]` of its rows, the c keys of the context and its own n, every state is

    M_t = sum_b a_(t,b) B_b + Y_t R

with base states B_b (first M, first S, initial M). So features meet states in one product per block,
`[keys, phi(k), phi(q)] [B, keys]^T`, and the next states are another; between them tokens meet in kernels of their keys
alone. What makes y and Y of these products is `linear_block`, where a step is linear in the gradients (one triangular
system of n W rows), or `gram_block`, where a function of the momentum's Gram matrix mixes its rows (token by token,
matrices of V x V).

Where phi(x).phi(y) is a polynomial of x.y, the kernels are that polynomial and features are made for one block at a
time, in the layout of `hecate.phi.polynomial`; elsewhere they are made first and the kernel is their product.

The backward pass goes through the blocks in reverse. Of B blocks the forward keeps the base states of every sqrt(B)-th,
and of all others what they are combinations of, from which they are made again. The products with
features are pulled back by hand: with P the products, X the features, O = [Y; ...] the combinations and G the
cotangents of the states that leave,

    g_O = G X^T,   g_X = g_P B + O^T G,   g_B = g_P^T X + a G,   g_a = <G, B>

and what lies between is made again and recorded by autograd, one block at a time. Where gradients are taken at a
chunk's start, `hecate.engine.window.chunks` runs. [ENG-WIN-D1, ENG-WIN-V1]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hecate.engine.call import Call, Plan
from hecate.engine.chunk.engine import steps_of
from hecate.engine.engine import Engine
from hecate.engine.features import cast_inputs, to_tokens
from hecate.engine.loop import root
from hecate.engine.parallel import coordinate_refusal
from hecate.engine.tokens import Carry, Tokens, by_head, in_folds, run_by_hand
from hecate.engine.window import blocks
from hecate.engine.window.blocks import Leaves, Outcome, Rows, Settings, gram_block, linear_block, rows_of
from hecate.engine.window.chunks import SIZE, Rooms, in_chunks, inner_product
from hecate.phi.polynomial import given_features
from hecate.rule import MemoryConfig
from hecate.structure import Memory
from hecate.tape import Autodiff, ByHand, Run, Tensors, can_inspect, execute, one
from hecate.tape.ops import over, reach


class Window(Engine):
    """Blocks of tokens at once, for linear memories whose algorithm looks back or mixes rows."""

    name = "window"

    def refuses(self, config: MemoryConfig) -> str | None:
        """Refuses configs without a window of gradients at the present memory, or stepped otherwise."""
        structure, retention, algorithm = config.structure, config.retention, config.algorithm
        if config.commit == "chunk" and config.chunk == 1:
            return f"commit={config.commit!r} with chunk=1 is a step at each token; set commit='token'"
        if not structure.linear or structure.diagonal:
            return f"structure {structure.kind!r} is not a matrix"
        if not retention.linear:
            return f"retention {retention.kind!r} is not linear"
        # Which gradient a step takes, and what an algorithm inside makes of it.
        form = algorithm.window_form()
        if form is None:
            return f"algorithm {algorithm.kind!r} makes its gradient otherwise than from the last tokens' own"
        if form.inner.kernel_form() is None and form.inner.gram_form() is None:
            neither = "neither a linear recurrence of the gates alone nor a function of its momentum's Gram matrix"
            return f"algorithm {form.inner.kind!r} is {neither}"
        waits = config.chunk == 1 and form.inner.kernel_form() is None
        if waits and not (config.forms.error or config.forms.target):
            matrix = f"of which algorithm {form.inner.kind!r} takes the Gram matrix"
            return f"bias {config.bias.kind!r} is not linear in the errors, {matrix}"
        if not form.remembers and form.inner.kernel_form() is not None:
            return f"algorithm {algorithm.kind!r} looks at its own token alone, as 'parallel' does in less"
        if config.normalizer != "none":
            return f"normalizer={config.normalizer!r} would need a window of its own"
        return coordinate_refusal(config)

    def unfit(self, plan: Plan) -> str | None:
        """Gates that the kernels do not know, or keys whose kernels overflow."""
        if plan.channels:
            return "a retain per phi channel decays features apart, which meet in one kernel here"
        if plan.steps is not None or (lift := _lift(plan.config, plan.width)) is None:  # a sketch tells no keys
            return None
        # The answer depends on numbers, so it holds for this call only.
        keys = plan.tensors.inputs[:2]
        if not can_inspect(*keys, free=True) or not keys[1].numel():
            return None
        degree, size = len(lift.coefficients) - 1, max(float(x.detach().abs().amax()) for x in keys)
        if size ** (2 * degree) * plan.width**degree > reach(plan.dtype, 0.45):
            return f"keys or queries of size {size:.2g} leave the range of {plan.dtype} in a kernel of degree {degree}"
        return None

    def steps(self, plan: Plan | Call) -> int:
        """The blocks of tokens, each of many operations."""
        return plan.length

    def cost(self, plan: Plan) -> float:
        """From six tokens on it has been faster than the token loop, whatever the sizes; a span takes less than two of
        its tokens (measured)."""
        return 300.0 + (40.0 * plan.length if plan.config.chunk == 1 else 150.0 * max(1, steps_of(plan, SIZE)))

    def about(self, plan: Plan) -> str:
        """A word on how gradients and steps are taken."""
        if plan.config.chunk == 1:
            return "linear memory, window or Gram matrix: exact in blocks"
        when = "one step per chunk" if plan.config.commit == "chunk" else "a step per token"
        return f"window or Gram matrix, gradients at the chunk's start, {when}: exact in spans of {SIZE} tokens"

    def autodiff(self, config: MemoryConfig) -> Autodiff:
        """In chunks the tape, which can run spans again: autograd would keep those of all tokens."""
        return "torch" if config.chunk == 1 else "auto"

    def run(self, call: Call, run: Run = execute) -> Tensors:
        """Features where the kernel needs them, and the blocks."""
        config, inputs = call.config, call.inputs
        lift = _lift(config, inputs.k.shape[-1])
        if lift is None:
            tokens, normed, scale = to_tokens(config, inputs, call.params, call.plan.dtype, run), False, 1.0
            lift = given_features(tokens.phi_k.shape[-1])
        else:
            q, k, *rest = cast_inputs(config, inputs, call.plan.dtype, run)
            heads = inputs.k.shape[2]
            # [B, T] to [B, T, H], as `to_tokens` has them.
            masks = [None if mask is None else by_head(mask, heads) for mask in inputs[6:8]]
            tokens, normed = Tokens(k, q, *rest, *masks), config.key_norm == "l2"
            scale = inputs.k.shape[-1] ** -0.5 if config.query_scale == "key_dim" else 1.0
        form: Any = config.algorithm.window_form()  # the engine refuses algorithms without one
        settings = Settings(config, form, lift, normed, scale, call.shape)
        initial, carry = call.memories[0]
        walk = partial(_in_blocks, settings) if config.chunk == 1 else partial(in_chunks, settings, call.place)
        y, carry = in_folds(walk, config, tokens, carry, initial, run=run)
        return y, *carry.flat


def _lift(config: MemoryConfig, width: int) -> Any:
    """The form in which keys stay keys, if there is one."""
    plain = config.step == "raw" and config.key_norm != "sum"
    return config.feature_map.power_form(width) if plain else None


def _in_blocks(
    settings: Settings, config: MemoryConfig, tokens: Tokens, carry: Carry, initial: Memory, *, run: Run
) -> tuple[Tensor, Carry]:
    """Runs tokens `[N, T, *]`: outputs and the final carry."""
    walk = _Walk(settings)
    hand = ByHand(f"engine.window.{walk.name}", walk.forward, walk.backward, walk.plain)
    return run_by_hand(hand, tokens, carry, initial, run=run)


class _State(NamedTuple):
    """State between blocks, over features of the lift: M, S, initial M and context keys `[N, *, F]`, the context's
    values and marks; None where there is no such thing."""

    memory: Tensor
    slot: Tensor | None
    initial: Tensor | None
    keys: Tensor | None
    values: Tensor | None
    filled: Tensor

    def bases(self) -> list[Tensor]:
        """Base states, and last the context's keys."""
        return [*self.met(), *([] if self.keys is None else [self.keys])]

    def met(self) -> list[Tensor]:
        """Base states."""
        return [item for item in self[:3] if item is not None]


class _Walk(Rooms):
    """The blocks of a scan one after the other, forward and backward."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        mixes = settings.form.inner.kernel_form() is None
        self.name, self.mixes = ("gram", True) if mixes else ("linear", False)
        self.block: Callable[..., tuple[Outcome, Any]] = gram_block if mixes else linear_block
        self.size = blocks.SIZE

    def named(self, inputs: Tensors) -> tuple[_State, Tokens, int]:
        """States over the lift's features and tokens, of what the block is given, and the number of slots."""
        settings, spread = self.settings, self.settings.lift.spread
        count = len(settings.form.inner.slots)
        context = 3 if settings.form.remembers else 0
        memory, *slots = inputs[: 1 + count + context]
        initial, tokens = inputs[1 + count + context], Tokens(*inputs[2 + count + context :])  # type: ignore[arg-type]
        none = one((memory,)).new_zeros(len(tokens.v), 0)
        keys, values, filled = slots[count:] if context else (None, None, none)
        states = (memory, slots[0] if count else None, None if tokens.reset is None else initial, keys)
        # From phi's numbers to the lift's features, of which one or two hold the same number.
        memory, slot, initial, keys = (None if item is None else spread(item) for item in states)
        return _State(one((memory,)), slot, initial, keys, values, one((filled,))), tokens, count

    def spans(self, tokens: Tokens) -> list[slice]:
        """The tokens of every block."""
        length = tokens.v.shape[1]
        return [slice(at, min(at + self.size, length)) for at in range(0, length, self.size)]

    def plain(self, *inputs: Tensor | None) -> Tensors:
        """The whole walk by operations that torch differentiates."""
        return self.walked(inputs, keeps=False, by_hand=False)[0]

    def forward(self, inputs: Tensors, keeps: bool) -> tuple[Tensors, list[Any]]:
        """Outputs and last states, and as record what each block started from and computed."""
        outputs, record = self.walked(inputs, keeps=keeps, by_hand=True)
        self.rooms.clear()
        return outputs, record

    def walked(self, inputs: Tensors, *, keeps: bool, by_hand: bool) -> tuple[Tensors, list[Any]]:
        """The blocks in their order."""
        state, tokens, _ = self.named(inputs)
        outputs, record = [], []
        spans = self.spans(tokens)
        for at, span in enumerate(spans):
            part = _part(tokens, span)
            features, rows = self.rows_met(state, part, by_hand=by_hand), self.rows(state, part)
            # All products of a block's features with the states that enter it, [N, rows, *], in one.
            products = torch.cat([features @ base.mT for base in state.bases()], -1)
            outcome, steps = self.block(
                self.settings, rows, (part.write, part.reset), self.leaves(products, part, state)
            )
            if keeps:
                # Base states are [V, F]: of most blocks what makes them is kept in their place.
                first = state if at % root(len(spans)) == 0 else None
                record.append((first, products, steps, outcome._replace(y=None)))  # type: ignore[arg-type]
            outputs.append(outcome.y)
            state = self.after(state, rows, features, outcome)
        back = self.settings.lift.gathered
        context = () if state.keys is None else (back(state.keys), state.values, state.filled)
        slots = (back(state.slot),) if state.slot is not None else ()
        return (torch.cat(outputs, 1), back(state.memory), *slots, *context), record

    def rows_met(self, state: _State, part: Tokens, *, by_hand: bool = True) -> Tensor:
        """The features of a block: with first S where rows are mixed."""
        slot = state.slot if self.mixes else None
        return self.features(torch.cat((part.phi_k, part.phi_q), 1), state.keys, slot, by_hand=by_hand)

    def rows(self, state: _State, part: Tokens) -> Rows:
        """The rows of a block's writes."""
        return rows_of(self.settings, state.filled, part.v.shape[1], part.write, part.reset)

    def leaves(self, products: Tensor, part: Tokens, state: _State) -> Leaves:
        """Inputs of an outcome."""
        return products, part.phi_k, part.phi_q, part.v, state.values, part.lr, part.retain, part.momentum

    def after(self, state: _State, rows: Rows, features: Tensor, outcome: Outcome) -> _State:
        """The states that leave a block."""
        end = rows.context.shape[-1]
        # M' = Y R + sum_b a_b B_b, R the features of the rows that were written.
        ontos = outcome.memory[..., :end], outcome.slot, outcome.keys
        memory, slot, keys = (None if onto is None else torch.bmm(onto, features[:, :end]) for onto in ontos)
        memory = one((memory,))
        if self.mixes:
            memory.baddbmm_(outcome.memory[..., end:], one((state.slot,)))
        for weight, base in zip(outcome.bases.unbind(-1), state.met(), strict=True):
            memory.addcmul_(over(weight, base), base)
        if slot is not None and state.slot is not None and outcome.slot_base is not None:
            slot.addcmul_(over(outcome.slot_base, slot), state.slot)
        return _State(memory, slot, state.initial, keys, outcome.values, rows.filled)

    # Backwards.

    def backward(self, inputs: Tensors, record: list[Any], cotangents: Sequence[Tensor]) -> Tensors:
        """Cotangents of all inputs."""
        state, tokens, count = self.named(inputs)
        gy, gmemory, *rest = cotangents
        wide = self.settings.lift.spread
        gslots, context = rest[:count], rest[count:]
        # Cotangents lie where the states do that they are of.
        later = _State(
            wide(gmemory), wide(gslots[0]) if count else None,
            None if state.initial is None else torch.zeros_like(state.initial),
            wide(context[0]) if context else None, context[1] if context else None, state.filled,
        )  # fmt: skip
        gtokens: list[Tensors] = []
        spans = self.spans(tokens)
        each = root(len(spans))
        for first in reversed(range(0, len(spans), each)):
            parts = [_part(tokens, span) for span in spans[first : first + each]]
            # Forward once more from the kept states, sqrt(B) blocks at a time.
            entered = self.entered(parts, record[first:])
            for span, part in zip(reversed(spans[first : first + len(parts)]), reversed(parts), strict=True):
                shares, later = self.block_back(part, entered.pop(), record.pop()[1:], gy[:, span], later)
                gtokens.append(shares)
        self.rooms.clear()
        back = self.settings.lift.gathered
        joined = [None if column[0] is None else torch.cat(column[::-1], 1) for column in zip(*gtokens, strict=True)]
        states = (later.memory, later.slot, later.keys)
        memory, slot, keys = (None if item is None else back(item) for item in states)
        slots = (*((slot,) if count else ()), *((keys, later.values, None) if context else ()))
        initial = None if later.initial is None else back(later.initial)
        masks = (None,) * (len(tokens) - len(joined))
        return (memory, *slots, initial, *joined, *masks)

    def entered(self, parts: list[Tokens], record: list[Any]) -> list[_State]:
        """The states that entered some blocks, from those that entered the first and from what the others became."""
        state = record[0][0]
        states = [state]
        for part, (*_, outcome) in zip(parts[:-1], record, strict=False):
            state = self.after(state, self.rows(state, part), self.rows_met(state, part), outcome)
            states.append(state)
        return states

    def block_back(
        self, part: Tokens, state: _State, record: tuple[Tensor, Any, Outcome], gy: Tensor, later: _State
    ) -> tuple[Tensors, _State]:
        """Cotangents of a block's tokens and of the states that enter it."""
        (products, steps, outcome), features, count = record, self.rows_met(state, part), part.v.shape[1]
        context, end = self.settings.context, self.settings.context + count
        met, rows = self.meeting(state, later, features[:, :end]), self.rows(state, part)

        def between(*leaves: Any) -> Tensors:
            again, _ = self.block(self.settings, rows, (part.write, part.reset), leaves, steps)
            return tuple(item for item in again if item is not None)

        # What lies between products and combinations is small, and autograd's.
        pulled = ByHand("window.between", self.forward, self.backward, between).by_autograd(
            self.leaves(products, part, state), [g for g in (gy, *met) if g is not None]
        )
        gproducts, gk, gq, gv, gvalues, *ggates = pulled
        shares = one((gproducts,)).split([base.shape[1] for base in state.bases()], -1)
        gbases = [torch.bmm(share.mT, features) for share in shares]
        # g_X = g_P B + O^T G: the first sum here, the second below.
        gfeatures = torch.bmm(shares[0], state.bases()[0], out=self.room("cotangents", features, features.shape[1]))
        for share, base in zip(shares[1:], state.bases()[1:], strict=True):
            gfeatures.baddbmm_(share, base)
        states = ((outcome.memory[..., :end], later.memory), (outcome.slot, later.slot), (outcome.keys, later.keys))
        for onto, g in states:
            if onto is not None and g is not None:
                gfeatures[:, :end].baddbmm_(onto.mT, g)
        x = torch.cat((part.phi_k, part.phi_q), 1)
        gx = self.settings.lift.pullback(x, gfeatures[:, context : end + count])
        gk, gq = (b if a is None else a + b for a, b in zip((gk, gq), gx.split(count, 1), strict=True))
        return (gk, gq, gv, *ggates), self.entering(state, outcome, later, gbases, gfeatures, gvalues)

    def meeting(self, state: _State, later: _State, rows: Tensor) -> tuple[Tensor | None, ...]:
        """Cotangents of an outcome's combinations, from those of the states that they make."""
        memory = later.memory @ rows.mT
        if self.mixes:
            memory = torch.cat((memory, later.memory @ one((state.slot,)).mT), -1)
        slot = slot_base = None
        if later.slot is not None and state.slot is not None:
            slot, slot_base = later.slot @ rows.mT, inner_product(later.slot, state.slot)
        keys = None if later.keys is None else later.keys @ rows.mT
        weights = torch.stack([inner_product(later.memory, base) for base in state.met()], -1)
        return memory, slot, keys, weights, slot_base, later.values

    def entering(
        self,
        state: _State,
        outcome: Outcome,
        later: _State,
        gbases: list[Tensor],
        gfeatures: Tensor,
        gvalues: Tensor | None,
    ) -> _State:
        """Cotangents of the states that enter a block: of what met features, what went on, and what was a feature."""
        shares, weights, wide = iter(gbases), iter(outcome.bases.unbind(-1)), later.memory
        memory, slot, initial, keys = (None if item is None else next(shares) for item in state[:4])
        memory = one((memory,)).addcmul_(over(next(weights), wide), wide)
        if slot is not None and later.slot is not None and outcome.slot_base is not None:
            slot.addcmul_(over(next(weights), wide), wide).addcmul_(over(outcome.slot_base, slot), later.slot)
            if self.mixes:
                height = slot.shape[1]
                slot.add_(gfeatures[:, -height:]).baddbmm_(outcome.memory[..., -height:].mT, wide)
        if initial is not None and later.initial is not None:
            initial.add_(later.initial).addcmul_(over(next(weights), wide), wide)
        if keys is not None:
            keys.add_(gfeatures[:, : keys.shape[1]])
        return _State(memory, slot, initial, keys, gvalues, state.filled)


def _part(tokens: Tokens, span: slice) -> Tokens:
    return Tokens(*(None if item is None else item[:, span] for item in tokens))  # type: ignore[arg-type]
