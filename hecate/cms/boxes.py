"""The boxes of a self-referential memory: what they start from, answer and are written with."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from hecate.cms.self_reference import SelfReferenceConfig
from hecate.engine import L2_NORM, SUM_NORM, memory_scan, predict
from hecate.nn.gates import RetainForm, start_logit
from hecate.nn.norm import normalise_qk
from hecate.nn.parameters import TensorDict
from hecate.nn.rule import draw_answering, warn_if_unstable
from hecate.phi import Params
from hecate.rule import Gates, MemoryState
from hecate.rule.rule import one
from hecate.tape import execute

Weights = dict[str, Tensor]


class Boxes(nn.Module):
    """H heads of boxes, each a memory `D -> D` of one rule, with the phi they share. [SELF-BOX-D1]

    A box answers x by M(phi(n(x))): the path of a key, n the `input_norm`, `key_norm` included and `query_scale` not.
    Weights of several boxes lie on the head axis, box after box. A gate is sigmoid(w.answer + b) per head, with w = 1/D
    (the mean) and b the rule's own value to start.
    """

    def __init__(
        self,
        heads: int,
        config: SelfReferenceConfig,
        *,
        d_head: int,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        self.config, self.heads, self.d_head = config, heads, d_head
        self.written = (*config.moving, "memory")
        rule, place = config.memory, {"device": device, "dtype": dtype}
        # Shapes first, on no device; the draws follow in `draw`.
        shapes: dict[str, Any] = {"dtype": dtype or torch.get_default_dtype(), "device": "meta"}
        params = rule.feature_map.init(d_head, heads=heads, **shapes)
        d_phi = rule.feature_map.output_dim(d_head)
        start = rule.structure.init(d_phi, d_head, heads=heads, **shapes)
        own: dict[str, Any] = dict(place)
        self.initial = nn.ModuleDict({box: TensorDict(start, learned=True, **own) for box in (*config.boxes, "memory")})
        self.phi_learned = TensorDict(params["learned"], learned=True, **own)
        self.phi_frozen = TensorDict(params["frozen"], learned=False, **own)
        momentum = rule.algorithm.default_momentum
        starts = {"lr": 0.5 * (1 - momentum), "momentum": momentum}
        starts["retain"] = rule.retention.default_retain
        self.starts = {gate: starts[gate] for gate in config.boxes if gate in starts}
        self.retain = None
        shapes = {gate: (heads, d_head) for gate in self.starts}
        if "retain" in shapes:
            form = rule.retention.gate_form
            self.retain = RetainForm(form, heads, d_head, d_head=d_head, d_phi=d_phi, **own)
            shapes["retain"] = (self.retain.rows, self.retain.inputs)
        self.gate_weight = nn.ParameterDict({gate: torch.empty(shape, **own) for gate, shape in shapes.items()})
        self.gate_bias = nn.ParameterDict({gate: torch.empty(shape[0], **own) for gate, shape in shapes.items()})

    def draw(self, source: torch.Generator, like: Tensor) -> None:
        """Everything anew from a generator, in the dtype and on the device of `like`."""
        rule, width = self.config.memory, self.d_head
        place: dict[str, Any] = {"dtype": like.dtype, "device": like.device, "generator": source}
        params = rule.feature_map.init(width, heads=self.heads, **place)
        self.phi_learned.copy_(params["learned"])
        self.phi_frozen.copy_(params["frozen"])
        d_phi = rule.feature_map.output_dim(width)
        for name in self.initial:
            how: dict[str, Any] = {"heads": self.heads, "source": source, "like": like}
            draw_answering(rule.structure, self._box(name), d_phi, width, **how)
        for gate, start in self.starts.items():
            weight, bias = self.gate_weight[gate], self.gate_bias[gate]
            if gate == "retain" and self.retain is not None:
                self.retain.draw(source, weight, bias, start, fill=1 / width)
            else:
                nn.init.constant_(weight, 1 / width)
                nn.init.constant_(bias, start_logit(start))

    def warn_if_unstable(self, name: str) -> None:
        """Measures the step on random keys at the lr gate's ceiling."""
        how: dict[str, Any] = {"qk_norm": self.config.qk_norm, "erases": self.config.erases}
        how |= {"heads": self.heads, "d_key": self.d_head, "name": name}
        warn_if_unstable(self.config.memory, self.params(), **how)

    def _box(self, name: str) -> TensorDict:
        return cast(TensorDict, self.initial[name])

    @property
    def start(self) -> Weights:
        """Initial weights `[boxes H, ...]` of the boxes that are written."""
        own = [self._box(name).tensors for name in self.written]
        return {name: torch.cat([weights[name] for weights in own]) for name in own[0]}

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of those by name."""
        count, one = len(self.written) * self.heads, self._box("memory").tensors
        return {name: (count, *weight.shape[1:]) for name, weight in one.items()}

    def state(self, batch: int) -> MemoryState:
        """The boxes that are written, before any token."""
        none = self.gate_bias["lr"].new_empty(batch, 0, self.heads, self.d_head)
        how = {"initial": self.start, "phi_params": self.params(len(self.written))}
        return self(none, none, (none,) * len(self.written), {}, state=None, **how)[1]

    def params(self, boxes: int = 1) -> Params:
        """The shared phi's parameters for this many boxes on the head axis."""

        def wide(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
            return {
                name: item if len(item) == 1 else item.repeat(boxes, *[1] * (item.dim() - 1))
                for name, item in tensors.items()
            }

        return {"learned": wide(self.phi_learned.tensors), "frozen": wide(self.phi_frozen.tensors)}

    def asked(self, x: Tensor) -> Tensor:
        """Features of what boxes are asked, `[B, T, H, D] -> [B, T, H, P]`."""
        return self.features(normalise_qk(x, self.config.input_norm))

    def features(self, k: Tensor) -> Tensor:
        """phi of keys under the rule's key_norm, as a scan has them, in the state's dtype."""
        rule = self.config.memory
        wide = k.to(torch.promote_types(k.dtype, rule.dtype))
        phi = rule.feature_map(wide, self.params())
        if rule.key_norm != "none":
            norm = L2_NORM if rule.key_norm == "l2" else SUM_NORM
            phi = one(execute(norm.block(keeps=False), phi))
        return phi

    def ask(self, carried: Weights, phi: Tensor) -> tuple[Tensor, ...]:
        """Answers `[B, T, H, D]` to one phi of the boxes that carry `[B, boxes H, ...]`."""
        batch, _, heads, _ = phi.shape
        boxes = next(iter(carried.values())).shape[1] // heads
        asked = phi.transpose(1, 2).unsqueeze(1).expand(-1, boxes, -1, -1, -1).flatten(0, 2)
        rule = self.config.memory
        memory = rule.rule.weights(tuple(item.flatten(0, 1) for item in carried.values()))
        answers = predict(rule, memory, asked, run=execute, label="")
        return answers.unflatten(0, (batch, boxes, heads)).transpose(2, 3).unbind(1)

    def ask_static(self, phi: Tensor) -> dict[str, Tensor]:
        """Answers of the projections that are not written, for a whole sequence."""
        still = [box for box in self.config.boxes if box not in self.written]
        rows = phi.flatten(0, 1).unsqueeze(0)  # one state for all: tokens of one row
        answers: dict[str, Tensor] = {}
        for box in still:
            start = self.config.memory.retention.start
            weights = {name: start(w.to(phi.dtype)) for name, w in self._box(box).tensors.items()}
            (answer,) = self.ask({name: w.unsqueeze(0) for name, w in weights.items()}, rows)
            answers[box] = answer.squeeze(0).unflatten(0, phi.shape[:2])
        return answers

    def gates(self, answers: dict[str, Tensor]) -> dict[str, Tensor]:
        """The gates `[B, T, H]` from the answers of their boxes; retain per channel with P."""
        values = {}
        for gate, weight in self.gate_weight.items():
            form = self.retain if gate == "retain" else None
            answer = answers[gate] if form is None else form.seen(answers[gate])
            # Heads have rows of their own: one, or one per channel.
            own = weight.to(answer.dtype).unflatten(0, (self.heads, -1))
            logit = torch.einsum("bthd,hcd->bthc", answer, own).flatten(-2) + self.gate_bias[gate]
            values[gate] = torch.sigmoid(logit) if form is None else form(logit)
        values["lr"] = self.config.memory.algorithm.lr * values["lr"]
        return values

    def forward(
        self, q: Tensor, k: Tensor, targets: tuple[Tensor, ...], gates: dict[str, Tensor], **how: Any
    ) -> tuple[Tensor, MemoryState]:
        """Writes every box at k with its target, all `[B, T, H, D]`, and reads the memory at q."""
        boxes = len(self.written)
        y, state = memory_scan(
            self.config.memory,
            q.repeat(1, 1, boxes, 1),
            k.repeat(1, 1, boxes, 1),
            torch.cat(targets, 2),
            Gates(**{name: torch.cat([gate] * boxes, 2) for name, gate in gates.items()}),
            **how,
        )
        return y[:, :, -self.heads :], state
