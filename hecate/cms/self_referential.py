"""A memory whose projections are memories: it changes how it reads and writes as it goes."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hecate.cms.boxes import Boxes, Weights
from hecate.cms.self_reference import SelfReferenceConfig, SelfReferentialState, check_state
from hecate.cms.stretches import Stretches, stretches
from hecate.engine import EngineName
from hecate.errors import ConfigError
from hecate.nn.arguments import check_engine, check_sequence, check_sizes
from hecate.nn.conv import ShortConv, mix
from hecate.nn.feature_memory import FeatureMemory, FeatureMemoryConfig
from hecate.nn.norm import normalise_qk
from hecate.nn.parameters import blank, draw_normal, source_of
from hecate.rule import MemoryConfig
from hecate.tape import Autodiff
from hecate.tape.bridge import without_autocast


class SelfReferential(nn.Module):
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
        self.engine, self.autodiff = engine, autodiff
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
        self.output_gate = None
        if output_gate:
            self.output_gate = blank(nn.Linear, d_model, heads * width, bias=False, **place)
        self.norm = nn.Parameter(torch.empty(heads, width, **place))
        self.out = blank(nn.Linear, heads * width, d_model, bias=False, **place)
        if self.into.weight.device.type != "meta":
            self._draw(generator)
            self._warn()

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draws every parameter anew from `generator` (None: torch's default generator)."""
        self._draw(generator)
        self._warn()

    def _draw(self, generator: torch.Generator | None) -> None:
        source, like = source_of(generator), self.into.weight
        for linear in (self.into, self.output_gate, self.out):
            if linear is not None:
                draw_normal(linear.weight, linear.in_features**-0.5, source)
        if self.conv is not None:
            self.conv.reset_parameters(source)
        nn.init.ones_(self.norm)
        self.boxes.draw(source, like)
        if self.feature_memory is not None:
            self.feature_memory.draw_rule(source, like)

    def _warn(self) -> None:
        self.boxes.warn_if_unstable(self.name)
        if self.feature_memory is not None:
            label = f"{self.name} (features)"
            self.feature_memory.warn_if_unstable(label, self.config.qk_norm)

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
            self._check(x, state, write_mask, reset_mask)
        mixed, conv, segment = mix(
            self.conv,
            self.into(x),
            None if state is None else state.conv,
            None if state is None else state.conv_segment,
            write_mask=write_mask,
            reset_mask=reset_mask,
        )
        with without_autocast(x.device.type):
            phi = self.boxes.asked(mixed.unflatten(-1, (self.heads, -1)))
            tokens = _Tokens(x, phi, self.boxes.ask_static(phi), write_mask, reset_mask)
            y, own = self._run(tokens, state)
        y = nn.functional.rms_norm(y.to(mixed.dtype), (self.d_head,), eps=1e-6) * self.norm
        y = y.flatten(-2)
        if self.output_gate is not None:
            y = y * nn.functional.silu(self.output_gate(x))
        return self.out(y), own._replace(conv=conv, conv_segment=segment)

    def _run(self, tokens: _Tokens, state: SelfReferentialState | None) -> tuple[Tensor, SelfReferentialState]:
        """Stretch by stretch; all tokens of one read the boxes in the same state."""
        config, (batch, length) = self.config, tokens.x.shape[:2]
        start: Weights = {}
        if state is None or tokens.reset is not None:
            fresh = self.boxes.state(batch)
            start = fresh.memory
        if state is None:
            position = torch.zeros(batch, dtype=torch.int64, device=tokens.x.device)
            anchor = start if config.anchored else {}
            state = SelfReferentialState(fresh, anchor, position, None, None)
        masks = (tokens.write, tokens.reset)
        cut = Stretches([0, length], None, state.position)
        if config.refers and length:
            cut = stretches(config.period, state.position, *masks, length)
        outputs, how = [], self._how()
        for at, end in pairwise(cut.borders):
            here = tokens.between(at, end)
            anchor = state.boxes.memory
            if here.reset is not None and config.refers and length:
                anchor = _where(here.reset[:, 0], start, anchor)
            if cut.opens is not None:
                anchor = _where(cut.opens[:, at], anchor, state.anchor)
            elif config.anchored:  # no token, so no chunk opens
                anchor = state.anchor
            y, state = self._stretch(here, state, anchor, how)
            outputs.append(y)
        return torch.cat(outputs, 1), state._replace(position=cut.position.clone())

    def _how(self) -> dict[str, Any]:
        """What every scan of the boxes is told."""
        autodiff = self.autodiff
        if autodiff == "auto" and self.config.refers and self.config.period == 1:
            autodiff = "torch"  # a tape saves memory over many tokens, here every scan has one
        params = self.boxes.params(len(self.boxes.written))
        return {
            "initial": self.boxes.start,
            "phi_params": params,
            "engine": self.engine,
            "autodiff": autodiff,
            "name": self.name,
        }

    def _stretch(
        self, tokens: _Tokens, state: SelfReferentialState, anchor: Weights, how: dict[str, Any]
    ) -> tuple[Tensor, SelfReferentialState]:
        """Asks the boxes at the anchor, writes them, reads the memory at q."""
        boxes, config = self.boxes, self.config
        answers = dict(tokens.answers)
        moving = len(config.moving) * self.heads
        if moving:
            read = {name: weight[:, :moving] for name, weight in anchor.items()}
            answers |= zip(config.moving, boxes.ask(read, tokens.phi), strict=True)
        q, k = (normalise_qk(answers[box], config.qk_norm) for box in ("q", "k"))
        masks = {"write_mask": tokens.write, "reset_mask": tokens.reset}
        features = state.features
        if self.feature_memory is not None:
            own = {key: how[key] for key in ("engine", "autodiff")}
            own["name"] = f"{self.name} (features)"
            q, k, features = self.feature_memory(tokens.x, q, k, features, **masks, **own)
            q, k = (normalise_qk(item, config.qk_norm) for item in (q, k))
        targets = (answers["v"],) * len(boxes.written)
        if config.phase == 3:
            targets = boxes.ask(anchor, boxes.asked(answers["v"]))
        if config.erase == "twice":
            # Delta gradient descent is the l2 rule whose target is the step of another: - gradient.
            held = boxes.ask(anchor, boxes.features(k))
            targets = tuple(v - answer for v, answer in zip(targets, held, strict=True))
        gates = boxes.gates(answers)
        y, memory = boxes(q, k, targets, gates, state=state.boxes, **masks, **how)
        if not config.anchored:
            anchor = {}
        return y, state._replace(boxes=memory, anchor=anchor, features=features)

    def _check(
        self, x: Tensor, state: SelfReferentialState | None, write_mask: Tensor | None, reset_mask: Tensor | None
    ) -> None:
        check_sequence(self.into.weight, x, write_mask=write_mask, reset_mask=reset_mask)
        if state is None:
            return
        batch, conv = x.shape[0], self.conv
        shapes: dict[str, tuple[int, ...] | None] = {"position": (batch,), "conv": None}
        for name, shape in self.boxes.shapes.items():
            shapes[f"boxes.memory[{name!r}]"] = (batch, *shape)
            if self.config.anchored:
                shapes[f"anchor[{name!r}]"] = (batch, *shape)
        if conv is not None:
            shapes["conv"] = (batch, conv.kernel - 1, self.into.out_features)
            shapes["conv_segment"] = (batch, conv.kernel - 1)
        check_state(state, shapes, batch, features=self.feature_memory is not None)

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


def _where(rows: Tensor, yes: Weights, no: Weights) -> Weights:
    """Per sequence, one set of weights or the other."""
    return {name: torch.where(rows.reshape(-1, *[1] * (yes[name].dim() - 1)), yes[name], no[name]) for name in yes}
