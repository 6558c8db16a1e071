"""A memory whose projections are memories: it changes how it reads and writes as it goes."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hecate.cms.self_reference import Boxes, SelfReferenceConfig, Weights
from hecate.engine import EngineName, written_before
from hecate.errors import ConfigError
from hecate.nn.arguments import check_engine, check_sequence, check_sizes, check_state
from hecate.nn.conv import ShortConv, convolved, normalise_qk
from hecate.nn.feature_memory import FeatureMemory, FeatureMemoryConfig
from hecate.nn.memory import MemoryLayer, where_rows
from hecate.nn.parameters import blank
from hecate.rule import MemoryConfig, MemoryState, bytes_of, detached
from hecate.tape import Autodiff
from hecate.tape.bridge import can_inspect, without_autocast


class SelfReferentialState(NamedTuple):
    """What a `SelfReferential` layer carries between calls: a pytree of tensors. [SELF-LAYER-I1]

    Fields:
        boxes: the boxes that are written, the memory last; box-major on the head axis.
        anchor: their weights where the present chunk started; empty if a chunk is one token.
        position: tokens written since then, `[B]` int64.
        conv, conv_segment: as in `hecate.nn.LayerState`.
        features: the state of the feature memory; None without one.
    """

    boxes: MemoryState
    anchor: dict[str, Tensor]
    position: Tensor
    conv: Tensor | None
    conv_segment: Tensor | None
    features: MemoryState | None = None

    def detach(self) -> SelfReferentialState:
        """The same state cut off from the graph that produced it."""
        return detached(self)

    @property
    def bytes(self) -> int:
        """Size of all tensors; it does not grow with the number of tokens seen."""
        return bytes_of(self)


class SelfReferential(MemoryLayer):
    """A self-referential layer: `(x [B, T, d_model], state=None) -> (y, state)`. [SELF-LAYER-D1]

        layer = SelfReferential(256, heads=4)
        y, state = layer(x)             # a whole sequence
        y, state = layer(more, state)   # and on from there; any split gives the same result

    Every head has a memory and its projections k, v, q, lr, retain (and momentum), all boxes of
    one rule. x goes through a static projection to heads and a short causal convolution; each box answers it, the
    answers are the token's key, value, query and gates, and the boxes are written at that key. Their initial weights
    are parameters: the projections of a plain memory, from
    which they depart as the sequence goes by.

    Args:
        d_model: width of x and y.
        heads: number of memories; each box maps `d_head` to `d_head`.
        config: the rule and how it refers to itself.
        d_head: per head; default d_model // heads.
        conv_kernel: taps of the short convolution, 0 for none.
        output_gate: whether the output is multiplied by silu(W x).
        feature_memory: a memory whose answers are added to q and k before phi; see
            `hecate.nn.feature_memory.FeatureMemory`. Boxes are asked x and v without it.
        engine, autodiff: passed to `memory_scan`; they change speed and memory only.
        name: what errors call this memory.
        generator: source of all draws; None uses torch's default generator.

    Raises:
        ConfigError: sizes or settings that do not fit.
    Warns:
        StabilityWarning: as `hecate.nn.Memory`.
    """

    def __init__(
        self,
        d_model: int,
        heads: int,
        config: SelfReferenceConfig | None = None,
        *,
        d_head: int | None = None,
        conv_kernel: int = 4,
        output_gate: bool = True,
        feature_memory: MemoryConfig | None = None,
        engine: EngineName = "auto",
        autodiff: Autodiff = "auto",
        name: str = "self-referential memory",
        generator: torch.Generator | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        config = SelfReferenceConfig.model_validate(config or SelfReferenceConfig())
        check_sizes(d_model, heads, d_head, d_head, conv_kernel)
        check_engine(config.memory, engine, autodiff)
        self.config, self.d_model, self.heads, self.name = config, d_model, heads, name
        self.d_head = width = d_model // heads if d_head is None else d_head
        self.engine, self.autodiff, self.qk_norm = engine, autodiff, config.qk_norm
        place: dict[str, Any] = {"device": device, "dtype": dtype}
        self.into = blank(nn.Linear, d_model, heads * width, bias=False, **place)
        self.conv = ShortConv(heads * width, conv_kernel, **place) if conv_kernel else None
        self.boxes = Boxes(heads, config, d_head=width, **place)
        self.feature_memory = None
        if feature_memory is not None:
            inner = FeatureMemoryConfig.model_validate(feature_memory)
            check_engine(inner, engine, autodiff)
            if inner.width(width) != width:
                raise ConfigError(
                    f"d_value={inner.d_value} in a self-referential memory: its boxes are "
                    f"written at features of k and asked x and v, which are {width} wide; leave "
                    "d_value out",
                    path=("feature_memory", "d_value"),
                )
            self.feature_memory = FeatureMemory(d_model, heads, inner, d_key=width, learned_initial=True, **place)
        self.hold_output(d_model, heads, width, output_gate, **place)
        if self.into.weight.device.type != "meta":
            self._draw(generator)
            self._warn()

    def _first_and_rule(self) -> tuple[nn.Linear, Any]:
        return self.into, self.boxes

    def forward(
        self,
        x: Tensor,
        state: SelfReferentialState | None = None,
        *,
        write_mask: Tensor | None = None,
        reset_mask: Tensor | None = None,
    ) -> tuple[Tensor, SelfReferentialState]:
        """One pass over x `[B, T, d_model]` from a state; masks are bool `[B, T]` as in `memory_scan`. A masked token's
        input is zero to the convolution."""
        if not torch.compiler.is_compiling():
            check_sequence(self.into.weight, x, write_mask=write_mask, reset_mask=reset_mask)
            if state is not None:
                self._check_state(state, x.shape[0])
        mixed, conv, segment = convolved(self.conv, self.into(x), state, write_mask, reset_mask)
        with without_autocast(x.device.type):
            phi = self.boxes.input_features(mixed.unflatten(-1, (self.heads, -1)))
            tokens = _Tokens(x, phi, self.boxes.read_static(phi), write_mask, reset_mask)
            y, own = self._run(tokens, state)
        return self.read_out(x, y.to(mixed.dtype)), own._replace(conv=conv, conv_segment=segment)

    def _run(self, tokens: _Tokens, state: SelfReferentialState | None) -> tuple[Tensor, SelfReferentialState]:
        """Span by span; all tokens of one read the boxes in the same state."""
        config, (batch, length) = self.config, tokens.x.shape[:2]
        start: Weights = {}
        if state is None or tokens.reset is not None:
            fresh = self.boxes.state(batch)
            start = fresh.memory
        if state is None:
            position = torch.zeros(batch, dtype=torch.int64, device=tokens.x.device)
            anchor = start if config.anchored else {}
            state = SelfReferentialState(fresh, anchor, position, None, None)
        cut = Spans([0, length], None, state.position)
        if config.refers and length:
            cut = spans(config.period, state.position, tokens.write, tokens.reset, length)
        outputs, how = [], self._how()
        for at, end in pairwise(cut.borders):
            here = tokens.between(at, end)
            anchor = state.boxes.memory
            if here.reset is not None and config.refers and length:
                anchor = where_rows(here.reset[:, 0], start, anchor)
            if cut.opens is not None:
                anchor = where_rows(cut.opens[:, at], anchor, state.anchor)
            elif config.anchored:  # no token, so no chunk opens
                anchor = state.anchor
            y, state = self._span(here, state, anchor, how)
            outputs.append(y)
        return torch.cat(outputs, 1), state._replace(position=cut.position.clone())

    def _how(self) -> dict[str, Any]:
        """What every scan of the boxes is told."""
        autodiff = self.autodiff
        if autodiff == "auto" and self.config.refers and self.config.period == 1:
            autodiff = "torch"  # a tape saves memory over many tokens, here every scan has one
        params = self.boxes.params(len(self.boxes.written))
        own = {"engine": self.engine, "autodiff": autodiff, "name": self.name}
        return {"initial": self.boxes.start, "phi_params": params, **own}

    def _span(
        self, tokens: _Tokens, state: SelfReferentialState, anchor: Weights, how: dict[str, Any]
    ) -> tuple[Tensor, SelfReferentialState]:
        """Reads the projections at the anchor, writes the boxes, reads the memory at q."""
        boxes, config = self.boxes, self.config
        answers = dict(tokens.answers)
        moving = len(config.moving) * self.heads
        if moving:
            carried = {name: weight[:, :moving] for name, weight in anchor.items()}
            answers |= zip(config.moving, boxes.read(carried, tokens.phi), strict=True)
        q, k = normalise_qk(answers["q"], config.qk_norm), normalise_qk(answers["k"], config.qk_norm)
        masks = {"write_mask": tokens.write, "reset_mask": tokens.reset}
        q, k, features = self.with_features(tokens.x, q, k, state.features, autodiff=how["autodiff"], **masks)
        targets = (answers["v"],) * len(boxes.written)
        if config.phase == 3:
            targets = boxes.read(anchor, boxes.input_features(answers["v"]))
        if config.erase == "twice":
            # Delta gradient descent is the l2 rule whose target is the step of another: - gradient.
            held = boxes.read(anchor, boxes.features(k))
            targets = tuple(v - answer for v, answer in zip(targets, held, strict=True))
        y, memory = boxes(q, k, targets, boxes.gates(answers), state=state.boxes, **masks, **how)
        return y, state._replace(boxes=memory, anchor=anchor if config.anchored else {}, features=features)

    def _check_state(self, state: SelfReferentialState, batch: int) -> None:
        """Refuses a state that another layer or batch made; a scan looks at the rest of the boxes."""
        tensors: dict[str, Any] = {}
        if isinstance(state, SelfReferentialState):
            tensors["position"] = (state.position, (batch,))
            wanted = {name: (batch, *shape) for name, shape in self.boxes.shapes.items()}
            anchor = wanted if self.config.anchored else {}
            for name in {**wanted, **state.boxes.memory, **state.anchor}:
                tensors[f"boxes.memory[{name!r}]"] = (state.boxes.memory.get(name), wanted.get(name))
                tensors[f"anchor[{name!r}]"] = (state.anchor.get(name), anchor.get(name))
        features = self.feature_memory is not None
        check_state(state, SelfReferentialState, self.conv, batch, tensors, features=features)

    def extra_repr(self) -> str:
        """The rule and sizes."""
        config, rule = self.config, self.config.memory
        return (
            f"{self.d_model}, heads={self.heads}, d_head={self.d_head}, phase={config.phase}, "
            f"written={'+'.join(self.boxes.written)}, chunk={config.period}, "
            f"erase={config.erase}, structure={rule.structure.kind}, bias={rule.bias.kind}, "
            f"retention={rule.retention.kind}, algorithm={rule.algorithm.kind}, "
            f"feature_map={rule.feature_map.kind}"
        )


class _Tokens(NamedTuple):
    """Tokens of a call: layer inputs, their phi, the static boxes' answers, masks."""

    x: Tensor
    phi: Tensor
    answers: dict[str, Tensor]
    write: Tensor | None
    reset: Tensor | None

    def between(self, at: int, end: int) -> _Tokens:
        """Some of them."""
        x, phi, answers, *masks = self
        own = {box: answer[:, at:end] for box, answer in answers.items()}
        cut = (None if mask is None else mask[:, at:end] for mask in masks)
        return _Tokens(x[:, at:end], phi[:, at:end], own, *cut)


class Spans(NamedTuple):
    """Where a sequence of T tokens is cut so that each span reads the boxes in one state.

    Fields:
        borders: 0, the cuts, T.
        opens: `[B, T]`, whether a chunk starts with the token; None where one does at every cut.
        position: `[B]`, tokens written since the last chunk's start.
    """

    borders: list[int]
    opens: Tensor | None
    position: Tensor


def spans(period: int, position: Tensor, write: Tensor | None, reset: Tensor | None, length: int) -> Spans:
    """A cut wherever a chunk of `period` written tokens ends, or a document starts, in any row.

    Masked tokens do not count; a reset starts a chunk. Where values cannot be looked at, every token is a span of
    its own, which is as exact and slower. [SELF-CHUNK-D1]
    """
    if period == 1:
        return Spans([*range(length + 1)], None, position)
    before = written_before(position, write, reset, length)
    after = (before + (1 if write is None else write)) % period
    place = before % period
    if can_inspect(place):
        ends = (place > after).any(0)[:-1]
        if reset is not None:
            ends = ends | reset.any(0)[1:]
        cuts = [at + 1 for at, end in enumerate(ends.tolist()) if end]
    else:
        cuts = [*range(1, length)]
    return Spans([0, *cuts, length], place == 0, after[:, -1])
