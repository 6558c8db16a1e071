"""A memory whose projections are memories of the same rule, boxes: it learns how to read and write."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from hecate.checks import Count, named
from hecate.engine import L2_NORM, SUM_NORM, EngineName, memory_scan, predict, written_before
from hecate.errors import ConfigError
from hecate.nn.arguments import Mask, check_engine, check_length, check_sequence, check_sizes, check_state, check_type
from hecate.nn.conv import DEFAULT_CONV_KERNEL, DEFAULT_QK_NORM, LayerConfig, QKNorm, ShortConv, convolved, normalise_qk
from hecate.nn.gates import draw_gates, gate_starts, hold_gates
from hecate.nn.memory import MemoryLayer, rule_repr, where_rows
from hecate.nn.parameters import TensorDict, blank, without_numbers
from hecate.nn.rule import FeatureMemory, FeatureMemoryConfig, HeldRule, between
from hecate.phi import Params
from hecate.rule import Gates, MemoryConfig, MemoryState
from hecate.states import State
from hecate.tape import Autodiff, execute, one
from hecate.tape.bridge import can_inspect, without_autocast
from hecate.variant import Conflicts

Box = Literal["k", "v", "q", "lr", "retain", "momentum"]
Weights = dict[str, Tensor]


class SelfReferenceConfig(LayerConfig):
    """A memory whose projections are memories of the same kind: boxes. [SELF-CONFIG-D1]

    Fields:
        memory: the rule of every box; `algorithm.lr` is the ceiling of the lr gate. Its `layer_conv_kernel`,
            `layer_activation` and `layer_v_norm` are for a plain layer, and do not apply here.
        phase: 1, projections stay as they start; 2, boxes learn k_t -> v_t; 3, each box learns
            k_t -> its own answer to v_t.
        adaptive: the projections that are written; None means none in phase 1, and in phases 2 and 3 all but q, which
            the paper keeps static.
        erase: "once" by the bias alone; "twice" by delta gradient descent on top of bias l2, as printed, whose fixed
            point is half the target.
        chunk: number of tokens whose projections and targets are read from the boxes as they were before the first of
            them; None takes `memory.chunk`, the number of tokens whose gradients are taken at one state.
        qk_norm: normalisation of q and k before phi; left out, `memory.layer_qk_norm`, if that names one.
        input_norm: normalisation of the boxes' inputs, x and v; without one, boxes can grow without bound.

    Warning: the gradients of a long `memory.chunk`, all taken at one state, add up and can diverge at an lr that is
    stable for one token. `chunk=C` with `memory.chunk=1` adapts projections as rarely and stays stable.
    """

    follows: ClassVar[tuple[str, ...]] = ("qk_norm",)
    memory: MemoryConfig = MemoryConfig.model_validate({"retention": "decay"})
    phase: Literal[1, 2, 3] = 3
    adaptive: tuple[Box, ...] | None = None
    erase: Literal["once", "twice"] = "once"
    chunk: Count | None = Field(None, ge=1)
    qk_norm: QKNorm = DEFAULT_QK_NORM
    input_norm: QKNorm = "l2"

    @property
    def boxes(self) -> tuple[str, ...]:
        """The projections that this rule has."""
        return ("k", "v", "q", *gate_starts(self.memory))

    @property
    def moving(self) -> tuple[str, ...]:
        """The projections that are written."""
        if self.adaptive is None:
            return () if self.phase == 1 else tuple(box for box in self.boxes if box != "q")
        return tuple(box for box in self.boxes if box in self.adaptive)

    @property
    def period(self) -> int:
        """Number of tokens that read the boxes in the same state."""
        return self.memory.chunk if self.chunk is None else self.chunk

    @property
    def refers(self) -> bool:
        """True if writes depend on earlier writes."""
        return bool(self.moving) or self.phase == 3 or self.erase == "twice"

    @property
    def erases(self) -> int:
        """Number of times that a write erases the key's direction from a box."""
        return 2 if self.erase == "twice" else 1

    @property
    def anchored(self) -> bool:
        """True if the state keeps the boxes as they were at the chunk's start."""
        return self.refers and self.period > 1

    def conflicts(self) -> Conflicts:
        """Rules that boxes cannot have, and names that are not those of boxes."""
        memory, adaptive = self.memory, self.adaptive or ()
        if memory.structure.transposed:
            reason = f"a box answers with what it predicts; {memory.structure.named} predicts keys"
            yield ("memory", "structure"), reason
        if not memory.readout.plain:
            reason = f"a box answers with what it predicts; readout {memory.readout.kind!r} asks otherwise"
            yield ("memory", "readout"), reason
        if memory.layer_options is not None:
            reason = "boxes make q, k, v and gates themselves, and the layer has none of these"
            yield ("memory", "layer_options"), reason
        if memory.writes > 1:
            reason = f"writes={memory.writes}: a box answers a token with one key and one value"
            yield ("memory", "writes"), f"{reason}; use writes=1"
        if not memory.gating.plain:
            reason = f"gating {memory.gating.kind!r}: boxes make the gates, of their answers"
            yield ("memory", "gating"), f"{reason}; use gating 'none'"
        if memory.normalizer != "none":
            total = "a sum of weights that is 0 before the first write, where a projection has to answer already"
            reason = f"memory.normalizer={memory.normalizer!r} divides by {total}"
            yield ("memory", "normalizer"), f"{reason}; use memory.normalizer='none'"
        if memory.feature_map.needs_position:
            reason = f"feature_map {memory.feature_map.kind!r} depends on the token's position"
            moves = "a projection would change along the sequence though nothing is learned"
            yield ("memory", "feature_map"), f"{reason}, so {moves}; use a feature_map without positions"
        if memory.retention.links != "token":
            reason = f"link_at={memory.retention.links!r} answers with weights of the chunk's start"
            cure = "boxes are read at what they carry; use link_at='token'"
            yield ("memory", "retention", "link_at"), f"{reason}, and {cure}"
        if self.phase == 1 and adaptive:
            reason = f"phase 1 keeps projections as they start, but adaptive={adaptive!r} writes them"
            yield ("adaptive",), f"{reason}; use phase 2 or 3, or leave adaptive out"
        if len(set(adaptive)) < len(adaptive):
            yield ("adaptive",), f"names each box once, got {adaptive!r}"
        for box in adaptive:
            if box not in self.boxes:
                kinds = f"retention {memory.retention.kind!r} and algorithm {memory.algorithm.kind!r}"
                reason = f"{kinds} take the boxes {', '.join(self.boxes)}"
                yield ("adaptive",), f"{box!r} is no box of this memory: {reason}"
        if self.erase == "twice" and (refusal := self._erases_once_only()):
            yield ("erase",), f"'twice': {refusal}, or erase='once'"

    def _erases_once_only(self) -> str | None:
        """Reason why the rule cannot erase twice, and what to use; None if it can."""
        rule = self.memory
        if rule.structure.diagonal or not rule.structure.linear:
            second = "the second erase multiplies a matrix by I - lr k k^T"
            return f"{second}, and structure {rule.structure.kind!r} is none; use structure 'matrix'"
        if not rule.forms.error:
            adds = f"it adds the erase of delta gradient descent to that of bias l2, got bias {rule.bias.kind!r}"
            return f"{adds}; with bias 'dot' the result is bias 'l2' and erase='once'"
        if rule.algorithm.kernel_form() is None:
            step = f"it is one gradient step with two terms, and algorithm {rule.algorithm.kind!r} is no gradient step"
            return f"{step}; use algorithm 'gd' or 'momentum'"
        if rule.decay_order != "with_step":
            order = f"it decays and erases in one step, decay_order={rule.decay_order!r} one after the other"
            return f"{order}; use decay_order 'with_step'"
        bound, limit = rule.key_bound, rule.algorithm.stable_step
        largest = None if rule.step != "raw" or bound is None else rule.diverging(self.erases * bound)
        if largest is None or bound is None:
            return None
        size = f"lr={rule.algorithm.lr:g} counts twice, 2 lr |phi|^2 can reach {largest:g}"
        limits = f"algorithm {rule.algorithm.kind!r} diverges beyond {rule.algorithm.limits()}"
        return f"{size}, and {limits}; use an lr of at most {limit / (2 * bound):g}"


class Boxes(HeldRule):
    """H heads of boxes, each a memory `D -> D` of one rule, with the phi they share. [SELF-BOX-D1]

    A box answers x with M(phi(n(x))), n the `input_norm`: x is treated like a key, so that `key_norm` applies and
    `query_scale` does not. Weights of several boxes lie on the head axis, box after box. A gate is sigmoid(w.answer +
    b) per head; at first w = 1/D (the mean), and b is the rule's default.
    """

    def __init__(self, heads: int, config: SelfReferenceConfig, *, d_head: int, **place: Any) -> None:
        super().__init__()
        self.config, self.heads, self.d_head = config, heads, d_head
        self.rule, self.erases, self.written = config.memory, config.erases, (*config.moving, "memory")
        rule, names = config.memory, (*config.boxes, "memory")
        d_phi = rule.feature_map.output_dim(d_head)
        start = rule.structure.init(d_phi, d_head, heads=heads, **without_numbers(place["dtype"]))
        self.initial: Any = nn.ModuleDict({name: TensorDict(start, learned=True, **place) for name in names})
        self.hold_features(rule.feature_map, heads, d_head, **place)
        self.starts = gate_starts(rule, heads)
        self.retain, self.gate_weight, self.gate_bias = hold_gates(rule, self.starts, heads, d_head, d_head, **place)

    def draw_rule(self, source: torch.Generator, like: Tensor) -> None:
        """Draws all parameters anew from a generator, in the dtype and on the device of `like`."""
        self.draw_features(source, like)
        for name in self.initial:
            self.draw_answering(self.initial[name], self.d_head, source, like)
        draw_gates(self.starts, (self.retain, self.gate_weight, self.gate_bias), source, 1 / self.d_head)

    @property
    def start(self) -> Weights:
        """Initial weights `[boxes H, ...]` of the boxes that are written."""
        boxes = [self.initial[name].tensors for name in self.written]
        return {name: torch.cat([weights[name] for weights in boxes]) for name in boxes[0]}

    def state(self, batch: int) -> MemoryState:
        """The boxes that are written, before any token."""
        none = next(self.initial.parameters()).new_empty(batch, 0, self.heads, self.d_head)
        how = {"initial": self.start, "phi_params": self.params(len(self.written))}
        return self(none, none, (none,) * len(self.written), {}, state=None, **how)[1]

    def params(self, boxes: int = 1) -> Params:
        """The shared phi's parameters for this many boxes on the head axis."""

        def wide(item: Tensor) -> Tensor:
            return item if len(item) == 1 else item.repeat(boxes, *[1] * (item.dim() - 1))

        return pytree.tree_map(wide, self.phi_params)

    def input_features(self, x: Tensor) -> Tensor:
        """phi(n(x)), at which boxes are read: `[B, T, H, D] -> [B, T, H, P]`."""
        return self.features(normalise_qk(x, self.config.input_norm))

    def features(self, k: Tensor) -> Tensor:
        """phi of keys under the rule's key_norm, as a scan has them, in the state's dtype."""
        rule = self.rule
        phi = rule.feature_map(k.to(torch.promote_types(k.dtype, rule.dtype)), self.phi_params)
        if rule.key_norm == "none":
            return phi
        norm = L2_NORM if rule.key_norm == "l2" else SUM_NORM
        return one(execute(norm, phi))

    def read(self, carried: Weights, phi: Tensor) -> tuple[Tensor, ...]:
        """Answers `[B, T, H, D]` to one phi from each of the boxes with the state `carried` `[B, boxes H, ...]`."""
        batch, _, heads, _ = phi.shape
        dtype = torch.promote_types(phi.dtype, next(iter(carried.values())).dtype)  # as a scan goes on from a state
        phi, carried = phi.to(dtype), {name: item.to(dtype) for name, item in carried.items()}
        boxes = next(iter(carried.values())).shape[1] // heads
        queries = phi.transpose(1, 2).unsqueeze(1).expand(-1, boxes, -1, -1, -1).flatten(0, 2)
        memory = self.rule.rule.weights(tuple(item.flatten(0, 1) for item in carried.values()))
        answers = predict(self.rule, memory, queries)
        return answers.unflatten(0, (batch, boxes, heads)).transpose(2, 3).unbind(1)

    def read_static(self, phi: Tensor) -> dict[str, Tensor]:
        """Answers of the projections that are not written, for a whole sequence."""
        answers: dict[str, Tensor] = {}
        start, tokens = self.rule.retention.start, phi.flatten(0, 1).unsqueeze(0)  # one state for all of them
        for box in self.config.boxes:
            if box not in self.written:
                weights = {name: start(w.to(phi.dtype)).unsqueeze(0) for name, w in self.initial[box].tensors.items()}
                (answer,) = self.read(weights, tokens)
                answers[box] = answer.squeeze(0).unflatten(0, phi.shape[:2])
        return answers

    def gates(self, answers: dict[str, Tensor]) -> dict[str, Tensor]:
        """The gates `[B, T, H]` from the answers of their boxes; retain per channel with P."""
        values = {}
        for gate, weight in self.gate_weight.items():
            form = self.retain if gate == "retain" else None
            answer = answers[gate] if form is None else form.project(answers[gate])
            # Each head has its own rows: one, or one per channel.
            weight = weight.to(answer.dtype).unflatten(0, (self.heads, -1))
            logit = torch.einsum("bthd,hcd->bthc", answer, weight).flatten(-2) + self.gate_bias[gate]
            values[gate] = torch.sigmoid(logit) if form is None else form(logit)
        if "lr" in values:
            values["lr"] = self.rule.algorithm.lr * values["lr"]
        retention = self.rule.retention
        if "retain" not in values and retention.uses_retain and retention.per_head:  # the scan has heads for every box
            answer = next(iter(answers.values()))
            values["retain"] = answer.new_tensor(retention.default_retains(self.heads)).expand(answer.shape[:-1])
        return values

    def forward(
        self, q: Tensor, k: Tensor, targets: tuple[Tensor, ...], gates: dict[str, Tensor], **how: Any
    ) -> tuple[Tensor, MemoryState]:
        """Writes every box at k with its target, all `[B, T, H, D]`, and reads the memory with q."""
        boxes = len(self.written)
        q, k = q.repeat(1, 1, boxes, 1), k.repeat(1, 1, boxes, 1)
        repeated = Gates(**{name: torch.cat([gate] * boxes, 2) for name, gate in gates.items()})
        y, state = memory_scan(self.rule, q, k, torch.cat(targets, 2), repeated, **how)
        return y[:, :, -self.heads :], state


class _SelfReferentialFields(NamedTuple):
    boxes: MemoryState
    anchor: dict[str, Tensor]
    position: Tensor
    conv: Tensor | None
    conv_segment: Tensor | None
    features: MemoryState | None = None


class SelfReferentialState(State, _SelfReferentialFields):
    """State of a `SelfReferential` layer between calls: a pytree of tensors. [SELF-LAYER-I1]

    Fields:
        boxes: the boxes that are written, the memory last; box-major on the head axis.
        anchor: their weights where the present chunk started; empty if a chunk is one token.
        position: tokens written since then, `[B]` int64.
        conv, conv_segment: as in `hecate.nn.LayerState`.
        features: the state of the feature memory; None without one.
    """

    __slots__ = ()
    whole = (("position", torch.int64), ("conv_segment", torch.int64))
    wide = ("anchor",)


@named(*SelfReferenceConfig.model_fields)
class SelfReferential(MemoryLayer):
    """A self-referential layer: `(x [B, T, d_model], state=None) -> (y, state)`. [SELF-LAYER-D1]

        layer = SelfReferential(256, heads=4)
        y, state = layer(x)             # a whole sequence
        y, state = layer(more, state)   # and on from there; any split gives the same result

    Every head has a memory and its projections k, v, q, lr, retain (and momentum), all boxes of one rule. x goes
    through a static projection to heads and a short causal convolution; each box answers it, the answers are the
    token's key, value, query and gates, and the boxes are written at that key. Their initial weights are parameters:
    the projections of a plain memory, which then change along the sequence.

    Args:
        d_model: width of x and y.
        heads: number of memories; each box maps `d_head` to `d_head`.
        config: the rule and how it refers to itself.
        d_head: per head; default d_model // heads.
        conv_kernel: taps of the short convolution, 0 for none.
        output_gate: whether the output is multiplied by silu(W x).
        feature_memory: a memory whose answers are added to q and k before phi; see
            `hecate.nn.rule.FeatureMemory`. The boxes' inputs x and v are used without it.
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
        conv_kernel: int = DEFAULT_CONV_KERNEL,
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
        width, _ = check_sizes(d_model, heads, d_head, d_head, conv_kernel)
        check_engine(config.memory, engine, autodiff)
        self.config, self.d_model, self.heads, self.d_head, self.name = config, d_model, heads, width, name
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
                    f"d_value={inner.d_value} in a self-referential memory: its boxes are written at features of k and "
                    f"asked x and v, which are {width} wide; leave d_value out",
                    path=("feature_memory", "d_value"),
                )
            self.feature_memory = FeatureMemory(d_model, heads, inner, d_key=width, learned_initial=True, **place)
        self.hold_output(d_model, heads, width, output_gate, **place)
        if self.into.weight.device.type != "meta":
            MemoryLayer.reset_parameters(self, generator)  # not a subclass's, which has parameters of its own to come

    def _first_and_rule(self) -> tuple[nn.Linear, Any]:
        return self.into, self.boxes

    def forward(
        self, x: Tensor, state: SelfReferentialState | None = None, *, write_mask: Mask = None, reset_mask: Mask = None
    ) -> tuple[Tensor, SelfReferentialState]:
        """One pass over x `[B, T, d_model]` from a state; masks are bool `[B, T]` as in `memory_scan`. A masked token's
        input is zero to the convolution."""
        masks = {"write_mask": write_mask, "reset_mask": reset_mask}
        check_sequence(self.into.weight, x, **masks)
        check_length(x, "a self-referential memory")
        self._check_state(state, x)
        mixed, conv, segment = convolved(self.conv, self.into(x), state, write_mask, reset_mask)
        with without_autocast(x.device.type):
            phi = self.boxes.input_features(mixed.unflatten(-1, (self.heads, -1)))
            y, after = self._run({"x": x, "phi": phi, "answers": self.boxes.read_static(phi), **masks}, state)
        return self.read_out(x, y.to(mixed.dtype)), after._replace(conv=conv, conv_segment=segment)

    def _run(self, tokens: dict[str, Any], state: SelfReferentialState | None) -> tuple[Tensor, SelfReferentialState]:
        """Runs span by span; all tokens of a span read the boxes in the same state. `tokens` as in `_span`."""
        config, (batch, length), reset = self.config, tokens["x"].shape[:2], tokens["reset_mask"]
        fresh: Any = None if state is not None and reset is None else self.boxes.state(batch)
        if state is None:
            position = torch.zeros(batch, dtype=torch.int64, device=tokens["x"].device)
            state = SelfReferentialState(fresh, fresh.memory if config.anchored else {}, position, None, None)
        borders, opens, position = [0, length], None, state.position
        cuts = config.refers and length > 0
        if cuts:
            borders, opens, position = spans(config.period, position, tokens["write_mask"], reset, length)
        autodiff = self.autodiff
        if autodiff == "auto" and config.refers and config.period == 1:
            autodiff = "torch"  # a tape saves memory over many tokens, here every scan has one
        how: dict[str, Any] = {"engine": self.engine, "autodiff": autodiff, "name": self.name}
        how |= {"initial": self.boxes.start, "phi_params": self.boxes.params(len(self.boxes.written))}
        outputs = []
        for at, end in pairwise(borders):
            anchor = state.boxes.memory
            if reset is not None and cuts:
                anchor = where_rows(reset[:, at], fresh.memory, anchor)
            if opens is not None:
                anchor = where_rows(opens[:, at], anchor, state.anchor)
            elif config.anchored:  # no token, so no chunk opens
                anchor = {name: weight.clone() for name, weight in state.anchor.items()}
            y, state = self._span(state, anchor, how, between(tokens, at, end))
            outputs.append(y)
        return torch.cat(outputs, 1), state._replace(position=position.clone())

    def _span(
        self, state: SelfReferentialState, anchor: Weights, how: dict[str, Any], tokens: dict[str, Any]
    ) -> tuple[Tensor, SelfReferentialState]:
        """Reads the projections at the anchor, writes the boxes, reads the memory at q.

        `tokens` has the layer's inputs x, their features phi, the answers of the boxes that are not written, and the
        masks."""
        boxes, config, masks = self.boxes, self.config, dict(tokens)
        x, phi, answers = (masks.pop(name) for name in ("x", "phi", "answers"))
        moving = len(config.moving) * self.heads
        if moving:
            carried = {name: weight[:, :moving] for name, weight in anchor.items()}
            answers = answers | dict(zip(config.moving, boxes.read(carried, phi), strict=True))
        q, k = normalise_qk(answers["q"], config.qk_norm), normalise_qk(answers["k"], config.qk_norm)
        q, k, features = self.with_features(x, q, k, state.features, autodiff=how["autodiff"], **masks)
        targets = (answers["v"],) * len(boxes.written)
        if config.phase == 3:
            targets = boxes.read(anchor, boxes.input_features(answers["v"]))
        if config.erase == "twice":
            # Delta gradient descent is the l2 rule whose target is the negative gradient of the l2 loss.
            predictions = boxes.read(anchor, boxes.features(k))
            targets = tuple(v - answer for v, answer in zip(targets, predictions, strict=True))
        y, memory = boxes(q, k, targets, boxes.gates(answers), state=state.boxes, **masks, **how)
        return y, state._replace(boxes=memory, anchor=anchor if config.anchored else {}, features=features)

    def _check_state(self, state: SelfReferentialState | None, x: Tensor) -> None:
        """Refuses a state of another layer or batch; the scan checks the other fields of the boxes."""
        if not check_type(state, SelfReferentialState):
            return
        weights, count = self.boxes.initial["memory"].tensors, len(self.boxes.written) * self.heads
        wanted = {name: (len(x), count, *weight.shape[1:]) for name, weight in weights.items()}
        anchor = wanted if self.config.anchored else {}
        tensors: dict[str, Any] = {"position": (state.position, x.shape[:1])}
        for name in {**wanted, **state.boxes.memory, **state.anchor}:
            tensors[f"boxes.memory[{name!r}]"] = (state.boxes.memory.get(name), wanted.get(name))
            tensors[f"anchor[{name!r}]"] = (state.anchor.get(name), anchor.get(name))
        check_state(state, x, tensors, self.conv, features=self.feature_memory is not None)

    def extra_repr(self) -> str:
        """The rule and sizes."""
        config, sizes = self.config, f"{self.d_model}, heads={self.heads}, d_head={self.d_head}"
        written = f"phase={config.phase}, written={'+'.join(self.boxes.written)}"
        return f"{sizes}, {written}, chunk={config.period}, erase={config.erase}, {rule_repr(config.memory)}"


def spans(
    period: int, position: Tensor, write: Mask, reset: Mask, length: int
) -> tuple[list[int], Tensor | None, Tensor]:
    """Borders of spans, 0, cuts, T: a cut wherever a chunk of `period` written tokens ends or a document starts in any
    row, so that each span reads the boxes in one state. Also a mask `[B, T]` of the tokens that start a chunk, None if
    one starts at every cut; and `position` `[B]`, tokens written since the last chunk's start, at the end.

    Masked tokens do not count; a reset starts a chunk. If values cannot be read, every token is a span, which is as
    exact but slower; on meta, where there are none, one span has all tokens. [SELF-CHUNK-D1]
    """
    if period == 1:
        return [*range(length + 1)], None, position
    before = written_before(position, write, reset, length)
    after = (before + (1 if write is None else write)) % period
    place = before % period
    cuts = [] if place.is_meta else [*range(1, length)]
    if can_inspect(place):
        ends = (place > after).any(0)[:-1]
        if reset is not None:
            ends = ends | reset.any(0)[1:]
        cuts = [at for at, end in enumerate(ends.tolist(), 1) if end]
    return [0, *cuts, length], place == 0, after[:, -1]
