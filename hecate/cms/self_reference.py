"""The boxes of a self-referential memory: their rule, what they start from, answer and are written with."""

from __future__ import annotations

from typing import Any, Literal, Self, cast

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from hecate.engine import L2_NORM, SUM_NORM, memory_scan, predict
from hecate.errors import ConfigError
from hecate.nn.conv import QKNorm, normalise_qk
from hecate.nn.gates import draw_gates, gate_starts, hold_gates
from hecate.nn.parameters import TensorDict, without_numbers
from hecate.nn.rule import HeldRule
from hecate.phi import Params
from hecate.rule import Gates, MemoryConfig, MemoryState
from hecate.sizes import Count
from hecate.tape import execute, one
from hecate.variant import Config

Box = Literal["k", "v", "q", "lr", "retain", "momentum"]
Weights = dict[str, Tensor]


class SelfReferenceConfig(Config):
    """A memory whose projections are memories of the same kind: boxes. [SELF-CONFIG-D1]

    Fields:
        memory: the rule of every box; `algorithm.lr` is the ceiling of the lr gate.
        phase: 1, projections stay as they start; 2, boxes learn k_t -> v_t; 3, each box learns
            k_t -> its own answer to v_t.
        adaptive: the projections that are written too; None takes none in phase 1 and all but q,
            which the paper keeps static, in phases 2 and 3.
        erase: "once" by the bias alone; "twice" by delta gradient descent on top of bias l2, as
            printed, whose fixed point is half the target.
        chunk: projections and targets of this many tokens are read in the boxes as they were
            before the first of them; None takes `memory.chunk`, where gradients are taken.
        qk_norm: normalisation of q and k before phi.
        input_norm: that of what boxes are asked, x and v; without one they can grow without bound.

    Warning: the gradients of a long `memory.chunk`, all taken at one state, add up and can diverge at an lr that one
    token stands. `chunk=C` with `memory.chunk=1` adapts projections as rarely and stays stable.
    """

    memory: MemoryConfig = MemoryConfig.model_validate({"retention": "decay"})
    phase: Literal[1, 2, 3] = 3
    adaptive: tuple[Box, ...] | None = None
    erase: Literal["once", "twice"] = "once"
    chunk: Count | None = Field(None, ge=1)
    qk_norm: QKNorm = "l2"
    input_norm: QKNorm = "l2"

    @property
    def boxes(self) -> tuple[Box, ...]:
        """The projections that this rule has."""
        found: list[Box] = ["k", "v", "q", "lr"]
        if self.memory.retention.uses_retain:
            found.append("retain")
        if self.memory.algorithm.uses_momentum:
            found.append("momentum")
        return tuple(found)

    @property
    def moving(self) -> tuple[Box, ...]:
        """The projections that are written."""
        if self.adaptive is None:
            return () if self.phase == 1 else tuple(box for box in self.boxes if box != "q")
        return tuple(box for box in self.boxes if box in self.adaptive)

    @property
    def period(self) -> int:
        """Tokens that read the boxes in one state."""
        return self.memory.chunk if self.chunk is None else self.chunk

    @property
    def refers(self) -> bool:
        """Whether what is written depends on what was written before."""
        return bool(self.moving) or self.phase == 3 or self.erase == "twice"

    @property
    def erases(self) -> int:
        """How often a write takes the key's direction out of a box."""
        return 2 if self.erase == "twice" else 1

    @property
    def anchored(self) -> bool:
        """Whether the state keeps what boxes were at the chunk's start."""
        return self.refers and self.period > 1

    @model_validator(mode="after")
    def _possible(self) -> Self:
        refusal = self._refusal()
        if refusal is None and self.erase == "twice" and (reason := self._erases_once_only()):
            refusal = "erase", f"'twice': {reason}, or erase='once'"
        if refusal is not None:
            raise ConfigError(refusal[1], path=refusal[0].split("."))
        return self

    def _refusal(self) -> tuple[str, str] | None:
        """A field and why it does not fit the others; None if all do."""
        memory, given = self.memory, self.adaptive or ()
        if memory.normalizer != "none":
            return "memory.normalizer", (
                f"memory.normalizer={memory.normalizer!r} divides by a sum of weights that is 0 before the first "
                "write, where a projection has to answer already; use memory.normalizer='none'"
            )
        if memory.feature_map.needs_position:
            return "memory.feature_map", (
                f"feature_map {memory.feature_map.kind!r} depends on the token's position, so a projection would "
                "change along the sequence though nothing is learned; use a feature_map without positions"
            )
        if self.phase == 1 and given:
            return "adaptive", (
                f"phase 1 keeps projections as they start, but adaptive={given!r} writes them; use phase 2 or 3, or "
                "leave adaptive out"
            )
        if len(set(given)) < len(given):
            return "adaptive", f"names each box once, got {given!r}"
        absent = [box for box in given if box not in self.boxes]
        if absent:
            return "adaptive", (
                f"{absent[0]!r} is no box of this memory: retention {memory.retention.kind!r} and algorithm "
                f"{memory.algorithm.kind!r} take the boxes {', '.join(self.boxes)}"
            )
        return None

    def _erases_once_only(self) -> str | None:
        """Why the rule cannot erase twice, and what to use; None if it can."""
        rule, bias = self.memory, self.memory.bias.kernel_form()
        if rule.structure.diagonal or not rule.structure.linear:
            return (
                f"the second erase multiplies a matrix by I - lr k k^T, and structure {rule.structure.kind!r} is none; "
                "use structure 'matrix'"
            )
        if bias is None or bias.name != "error":
            return (
                f"it adds the erase of delta gradient descent to that of bias l2, got bias {rule.bias.kind!r}; with "
                "bias 'dot' the result is bias 'l2' and erase='once'"
            )
        if rule.algorithm.kernel_form() is None:
            return (
                f"it is one gradient step with two terms, and algorithm {rule.algorithm.kind!r} is no gradient step; "
                "use algorithm 'gd' or 'momentum'"
            )
        if rule.decay_order != "with_step":
            return (
                f"it decays and erases in one step, decay_order={rule.decay_order!r} one after the other; use "
                "decay_order 'with_step'"
            )
        bound, limit = rule.key_bound, rule.algorithm.stable_step
        largest = None if rule.step != "raw" or bound is None else rule.diverging(self.erases * bound)
        if largest is None or bound is None:
            return None
        return (
            f"lr={rule.algorithm.lr:g} counts twice, 2 lr |phi|^2 can reach {largest:g}, and algorithm "
            f"{rule.algorithm.kind!r} diverges beyond {limit:g}; use an lr of at most {limit / (2 * bound):g}"
        )


class Boxes(HeldRule):
    """H heads of boxes, each a memory `D -> D` of one rule, with the phi they share. [SELF-BOX-D1]

    A box answers x by M(phi(n(x))): the path of a key, n the `input_norm`, `key_norm` included and `query_scale` not.
    Weights of several boxes lie on the head axis, box after box. A gate is sigmoid(w.answer + b) per head, with w = 1/D
    (the mean) and b the rule's own value to start.
    """

    def __init__(self, heads: int, config: SelfReferenceConfig, *, d_head: int, **place: Any) -> None:
        super().__init__()
        self.config, self.heads, self.d_head = config, heads, d_head
        self.rule, self.erases, self.written = config.memory, config.erases, (*config.moving, "memory")
        rule, names = config.memory, (*config.boxes, "memory")
        d_phi = rule.feature_map.output_dim(d_head)
        start = rule.structure.init(d_phi, d_head, heads=heads, **without_numbers(place["dtype"]))
        self.initial = nn.ModuleDict({name: TensorDict(start, learned=True, **place) for name in names})
        self.hold_features(rule.feature_map, heads, d_head, **place)
        self.starts = gate_starts(rule)
        held = hold_gates(rule, self.starts, heads, d_head, d_head, **place)
        self.retain, self.gate_weight, self.gate_bias = held

    def draw_rule(self, source: torch.Generator, like: Tensor) -> None:
        """Everything anew from a generator, in the dtype and on the device of `like`."""
        self.draw_features(source, like)
        for name in self.initial:
            self.draw_answering(self._box(name), self.d_head, source, like)
        draw_gates(self.starts, (self.retain, self.gate_weight, self.gate_bias), source, 1 / self.d_head)

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
        count = len(self.written) * self.heads
        return {name: (count, *weight.shape[1:]) for name, weight in self._box("memory").tensors.items()}

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

    def input_features(self, x: Tensor) -> Tensor:
        """phi(n(x)), at which boxes are read: `[B, T, H, D] -> [B, T, H, P]`."""
        return self.features(normalise_qk(x, self.config.input_norm))

    def features(self, k: Tensor) -> Tensor:
        """phi of keys under the rule's key_norm, as a scan has them, in the state's dtype."""
        rule = self.rule
        wide = k.to(torch.promote_types(k.dtype, rule.dtype))
        phi = rule.feature_map(wide, self.phi_params)
        if rule.key_norm != "none":
            norm = L2_NORM if rule.key_norm == "l2" else SUM_NORM
            phi = one(execute(norm, phi))
        return phi

    def read(self, carried: Weights, phi: Tensor) -> tuple[Tensor, ...]:
        """Answers `[B, T, H, D]` at one phi of the boxes that carry `[B, boxes H, ...]`."""
        batch, _, heads, _ = phi.shape
        boxes = next(iter(carried.values())).shape[1] // heads
        queries = phi.transpose(1, 2).unsqueeze(1).expand(-1, boxes, -1, -1, -1).flatten(0, 2)
        memory = self.rule.rule.weights(tuple(item.flatten(0, 1) for item in carried.values()))
        answers = predict(self.rule, memory, queries, run=execute, label="")
        return answers.unflatten(0, (batch, boxes, heads)).transpose(2, 3).unbind(1)

    def read_static(self, phi: Tensor) -> dict[str, Tensor]:
        """Answers of the projections that are not written, for a whole sequence."""
        answers: dict[str, Tensor] = {}
        start, tokens = self.rule.retention.start, phi.flatten(0, 1).unsqueeze(0)  # one state for all of them
        for box in self.config.boxes:
            if box not in self.written:
                weights = {name: start(w.to(phi.dtype)).unsqueeze(0) for name, w in self._box(box).tensors.items()}
                (answer,) = self.read(weights, tokens)
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
        values["lr"] = self.rule.algorithm.lr * values["lr"]
        return values

    def forward(
        self, q: Tensor, k: Tensor, targets: tuple[Tensor, ...], gates: dict[str, Tensor], **how: Any
    ) -> tuple[Tensor, MemoryState]:
        """Writes every box at k with its target, all `[B, T, H, D]`, and reads the memory at q."""
        boxes = len(self.written)
        y, state = memory_scan(
            self.rule,
            q.repeat(1, 1, boxes, 1),
            k.repeat(1, 1, boxes, 1),
            torch.cat(targets, 2),
            Gates(**{name: torch.cat([gate] * boxes, 2) for name, gate in gates.items()}),
            **how,
        )
        return y[:, :, -self.heads :], state
