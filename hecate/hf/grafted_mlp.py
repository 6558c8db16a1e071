"""MLPs that go on learning as they read: modules of a graft into the MLPs of a model of transformers.

An MLP keeps its place, its weights and their names; its class becomes a subclass with memories that start at these
weights. Its layer tells it of masks and of the cache, where its states lie beside those of the attention.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from hecate.engine import memory_scan
from hecate.errors import ConfigError, ShapeError
from hecate.gating import Masks as GatingMasks
from hecate.gating import Sizes
from hecate.hf.grafted import BRANCH, MASKS, Holder, Masks, remembering
from hecate.nn import LayerState
from hecate.nn.gates import GateHeads
from hecate.nn.parameters import blank
from hecate.nn.rule import GatingParameters
from hecate.rule import Gates, MemoryConfig

PLACE = "mlp"
"""The place of its states in a layer of a cache."""
States = tuple[LayerState, ...]


class FastWeights(nn.Module):
    """A memory whose keys are given: values v = W x, W zero at first, and gates from x; no other layer around it.

    With values of zero a memory stays where it starts. The gradient of W is not zero; the gates get theirs as soon as
    W is not.
    """

    def __init__(self, d_model: int, d_key: int, config: MemoryConfig, name: str, **place: Any) -> None:
        super().__init__()
        self.config, self.name = config, name
        weights = len(config.structure.shapes(d_key, d_model))
        sizes = Sizes(d_model, 1, d_key, d_model, config.writes, weights)
        self.gates = GateHeads(d_model, 1, config, d_key=d_key, **place)
        self.gating = None if config.gating.plain else GatingParameters(config, sizes, **place)
        self.value = blank(nn.Linear, d_model, d_model, bias=False, **place)

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Values at zero; gates as the rule starts them."""
        nn.init.zeros_(self.value.weight)
        self.gates.reset_parameters(generator)
        if self.gating is not None:
            self.gating.draw(torch.default_generator if generator is None else generator)

    def forward(
        self, x: Tensor, keys: Tensor, initial: Mapping[str, Tensor] | None, state: LayerState | None, masks: Masks
    ) -> tuple[Tensor, LayerState]:
        """x `[B, T, d_model]` and keys `[B, T, d_key]`, which are queries, too; answers `[B, T, d_model]`."""
        q = k = keys.unsqueeze(2)
        v, gates, skip, held = self.value(x).unsqueeze(2), self.gates(x), None, None
        if self.gating is not None:
            own = None if state is None else state.gating
            made, held = self.gating(x, q, k, v, gates, own, GatingMasks(masks.write, masks.reset))
            (q, k, v, _, skip), gates = made, Gates(**made.gates)
        how: dict[str, Any] = {"write_mask": masks.write, "reset_mask": masks.reset, "name": self.name}
        past = None if state is None else state.memory
        start = None if initial is None else dict(initial)
        y, memory = memory_scan(self.config, q, k, v, gates, state=past, initial=start, **how)
        y = y if skip is None else y + skip
        return y.squeeze(2), LayerState(memory, None, None, gating=held or None)


class Fast(nn.Module):
    """The memories of an MLP, one for each period.

    Fields:
        last: the name of the layer whose weights go on learning; None where all do.
        weights: names of the MLP's layers by those of the memory's weights; of `last` none.
        mix: weight of each memory's answer, `[memories, d_model]`; None of one memory, and where answers are added.
    """

    def __init__(
        self, d_model: int, d_key: int, rules: Sequence[MemoryConfig], last: str | None,
        weights: Mapping[str, str], name: str, **place: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        names = [f"{name} (period {rule.chunk})" for rule in rules]
        made = (FastWeights(d_model, d_key, *own, **place) for own in zip(rules, names, strict=True))
        self.last, self.weights, self.levels, self.mix = last, dict(weights), nn.ModuleList(made), None
        if last is None and len(rules) > 1:
            self.mix = nn.Parameter(torch.empty(len(rules), d_model, **place))

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Everything at its start: memories that answer as their first weights do, and as much of each."""
        for level in self.levels:
            level.reset_parameters(generator)  # type: ignore[operator]
        if self.mix is not None:
            nn.init.constant_(self.mix, 1 / len(self.levels))

    def forward(
        self, x: Tensor, keys: Tensor, initial: Mapping[str, Tensor] | None, states: States | None, masks: Masks
    ) -> tuple[Tensor, States]:
        """x `[B, T, d_model]`, keys `[B, T, d_key]`: the answers of all memories, added, and their states."""
        dtype: Any = self.levels[0].value.weight.dtype  # type: ignore[union-attr]
        x, keys = x.to(dtype), keys.to(dtype)
        if masks.write is not None:  # attention answers padding with NaN where it has no key to look at
            x, keys = (item.masked_fill(~masks.write.unsqueeze(-1), 0) for item in (x, keys))
        answers, after = [], []
        for index, level in enumerate(self.levels):
            y, state = level(x, keys, initial, None if states is None else states[index], masks)
            answers.append(y if self.mix is None else self.mix[index] * y)
            after.append(state)
        return sum(answers[1:], answers[0]), tuple(after)


class FastMLP(Holder):
    """Mixin for an MLP whose weights are where memories start."""

    def forward(self, x: Tensor, *, hecate_call: tuple[Any, Masks] | None = None) -> Tensor:
        """x `[B, T, d_model]`; the answers of the weights as they are by then. `hecate_call`: the cache and masks."""
        if hecate_call is None:
            raise ConfigError(
                f"no masks reached the MLP of layer {self.layer_idx}: it was called on its own; call its layer or model"
            )
        past, masks = hecate_call
        if past is None:
            return self.masked(x, None, write_mask=masks.write, reset_mask=masks.reset)[0]
        return remembering(past.layers[self.layer_idx]).answers(PLACE, self, x, masks)

    def masked(
        self, x: Tensor, states: States | None, *, write_mask: Tensor | None, reset_mask: Tensor | None
    ) -> tuple[Tensor, States]:
        """The answers `[B, T, d_model]` and the states after the last token."""
        fast, masks = getattr(self, BRANCH), Masks(write_mask, reset_mask)
        if fast.last is None:
            tensors = {name: self.get_parameter(own) for name, own in fast.weights.items()}
            initial = {n: w[None] if w.dim() == 2 else w[None, :, None] for n, w in tensors.items()}
            y, states = fast(x, x, initial, states, masks)
            return y.to(x.dtype), states
        linear, after = getattr(self, fast.last), states

        def last(hidden: Tensor) -> Tensor:
            nonlocal after
            beside, after = fast(x, hidden, None, states, masks)
            y = linear(hidden)
            return y + beside.to(y.dtype)

        y = super(FastMLP, changed(self, **{fast.last: last})).forward(x)
        return y, after  # type: ignore[return-value]


class Handing(nn.Module):
    """Mixin for a decoder layer that tells its MLP of masks and the cache."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The layer's own, with the same arguments."""
        masks = kwargs.get(MASKS)
        past = next((value for value in (*args, *kwargs.values()) if isinstance(value, Cache)), None)
        name, mlp = next((name, part) for name, part in self.named_children() if isinstance(part, FastMLP))
        if masks is None:
            raise ConfigError(f"no masks reached layer {mlp.layer_idx}: it was called on its own; call its model")
        if past is not None:
            _expect_read(past, mlp.layer_idx)
        told = changed(self, **{name: partial(mlp, hecate_call=(past, masks))})
        return super(Handing, told).forward(*args, **kwargs)


def _expect_read(past: Any, index: int) -> None:
    """Refuses a cache whose tokens the memories of an MLP have not read."""
    held = past.layers[index] if index < len(past.layers) else None
    if held is None or PLACE in getattr(held, "memories", ()):
        return
    linear = getattr(held, "has_previous_state", None)
    if any(linear.values()) if linear is not None else int(held.get_seq_length()) > 0:
        raise ShapeError(
            f"past_key_values holds tokens that the MLP of layer {index} has not read; fill it with the grafted model"
        )


def changed(module: Any, **attributes: Any) -> Any:
    """The same module, parameters and all, with other attributes: what a call alone knows stays in that call."""
    twin = object.__new__(type(module))
    twin.__dict__.update(module.__dict__, **attributes)
    return twin


@cache
def with_base(kind: Any, base: Any) -> Any:
    """A class of transformers with a mixin ahead of it, under its name."""
    return type(f"{base.__name__}{kind.__name__}", (base, kind), {})
