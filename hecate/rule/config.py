"""`MemoryConfig`: everything about a memory that changes numbers."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, NamedTuple, TypeVar

import torch
from pydantic import Field, GetJsonSchemaHandler, SerializerFunctionWrapHandler, model_serializer, model_validator
from pydantic_core import CoreSchema

from hecate.algorithm import GD, AlgorithmKind
from hecate.bias import L2, Bias, BiasKind, Dot
from hecate.checks import Count, Depth, Taps
from hecate.errors import ConfigError, not_known, shorten
from hecate.formula import MIXES, activation_nodes
from hecate.gating import GatingKind, Plain
from hecate.phi import FeatureMap, FeatureMapKind, Identity
from hecate.readout import Direct, ReadoutKind
from hecate.retention import Decay, NoRetention, RetentionKind
from hecate.rule.layer import LayerOptions
from hecate.rule.rule import Forms, MemoryRule, acts_of, knobs_of
from hecate.structure import Matrix, StructureKind
from hecate.structure.bound import BLOCK, unbounded
from hecate.variant import Config, Conflicts, briefly

LAYER_FIELDS = ("layer_qk_norm", "layer_conv_kernel", "layer_activation", "layer_options")
"""Fields of a config that a layer around the memory reads, and a scan does not."""

_OF_ENGINES = {  # without layer_v_norm it would read as of an earlier version
    *MemoryRule.model_fields, "feature_map", "chunk", "commit", "read", "decay_order", "normalizer", "key_norm",
    "query_scale", "step", "state_dtype", "on_nonfinite", "layer_v_norm",
}  # fmt: skip
Named = str | Mapping[str, Any]
"""A variant by its kind or as a mapping, or a config by the name of a rule: what is validated into one."""
Value = TypeVar("Value")


class Knob(Generic[Value]):
    """A field that is read as a value, and may be given by its kind or as a mapping, too. Type checkers take what
    `__get__` returns and `__set__` accepts; when the program runs it is the value's own type, and its default."""

    if TYPE_CHECKING:

        def __init__(self, default: Value) -> None: ...
        def __get__(self, config: Any, of: Any) -> Value: ...
        def __set__(self, config: Any, value: Value | Named) -> None: ...

    else:

        def __class_getitem__(cls, of: Any) -> Any:
            return of

        def __new__(cls, default: Any) -> Any:
            """The default itself."""
            return default


class MemoryConfig(Config):
    """A memory rule, its feature map, and the conventions on which papers differ.

    The default is the delta rule: matrix, l2, no retention, gd with lr 1, identity. Where a config is read, the name of
    a rule stands for its fields: `titans`, or `{kind: titans, chunk: 16}` to change some.

    Fields beside the knobs:
        gating: how a layer makes keys, values and gates, beyond a gate of each kind from x; a scan takes those it is
            given.
        chunk: gradients are taken at the state of the chunk's start; 1 means at the previous token.
        commit: "token" steps at each token; "chunk" sums the chunk's lr-weighted gradients and
            takes one step at its last token, with retain the product of the chunk's and momentum that of the last.
        readout: what a query is turned into before it is answered, by what the keys so far have made.
        read: y_t reads the state "after" or "before" token t (and the commit that it triggers).
        decay_order: "before_gradient" lets the gradient see the decayed memory, as gated DeltaNet
            does; with chunk > 1, that of the chunk's start, decayed by the product of retain since.
        normalizer: "sum" divides the read by phi(q).z, where z is the same memory with bias dot and value 1; "max" by
            max(|phi(q).z|, floor), with the gate floor.
        key_norm: "l2" or "sum" normalisation of phi(k) and phi(q), after phi.
        query_scale: "key_dim" multiplies phi(q) by D^(-1/2), D the key width, after key_norm.
        layer_qk_norm, layer_conv_kernel: what `qk_norm` and `conv_kernel` of a layer around the memory are where they
            are left out; None, "l2" and 4.
        layer_activation: what a layer does to q, k and v behind its convolution, or without one; None, "silu" behind
            one alone.
        layer_options: heads that share keys, convolution, output gate and norm of a layer; see `LayerOptions`. These
            four are written out only where they are set; a scan takes q, k and v as they come.
        layer_v_norm: what a layer around the memory does to values: "none", "l2" brings them to length 1, "rms" to a
            root of mean squares of 1; a scan takes them as they come. Errors of a deep memory's step grow with theirs.
        writes: pairs of key and value that a token writes, one after the other: k `[B, T, n, H, D]`, v `[B, T, n, H,
            V]`, lr, erase and write `[B, T, n, H]`. Retention acts once, before the first; it is read once.
        step: "raw" lr; "normalized" lr over a bound of the largest eigenvalue of J J^T, J the derivative of predictions
            by the weights: lr/(eps + |phi|^2), eps = 1e-6, for a linear memory with chunk=1, else as
            `hecate.structure.bound` says, in chunks by the row sums of their Gram matrix; "key_normalized" lr/(eps +
            |phi|^2) for every memory and chunk, which "normalized" was up to 0.2; "implicit" lr/(1 + lr |phi|^2);
            "flow" (1 - exp(-lr |phi|^2))/|phi|^2, for l2 the exact solution of gradient flow over a time lr;
            "weighted", of rls, lr as the weight of the token's square error.
        state_dtype: float32 or float64; inputs of higher precision raise it.
        on_nonfinite: "raise", "skip" (leave such a token unwritten) or "propagate".
    """

    structure: Knob[StructureKind] = Knob(Matrix())
    bias: Knob[BiasKind] = Knob(L2())
    retention: Knob[RetentionKind] = Knob(NoRetention())
    algorithm: Knob[AlgorithmKind] = Knob(GD())
    feature_map: Knob[FeatureMapKind] = Knob(Identity())
    gating: Knob[GatingKind] = Knob(Plain())
    readout: Knob[ReadoutKind] = Knob(Direct())
    chunk: Count = Field(1, ge=1)
    writes: Depth = Field(1, ge=1)
    commit: Literal["token", "chunk"] = "token"
    read: Literal["after", "before"] = "after"
    decay_order: Literal["with_step", "before_gradient"] = "with_step"
    normalizer: Literal["none", "sum", "max"] = "none"
    key_norm: Literal["none", "l2", "sum"] = "none"
    query_scale: Literal["none", "key_dim"] = "none"
    layer_qk_norm: Literal["none", "l2", "rms"] | None = None
    layer_conv_kernel: Taps | None = None
    layer_activation: Literal["none", "silu"] | None = None
    layer_options: Knob[LayerOptions | None] = Knob(None)
    layer_v_norm: Literal["none", "l2", "rms"] = "none"
    step: Literal["raw", "normalized", "key_normalized", "implicit", "flow", "weighted"] = "raw"
    state_dtype: Literal["float32", "float64"] = "float32"
    on_nonfinite: Literal["raise", "skip", "propagate"] = "raise"

    __slots__ = (
        *("_direct", "_single", "accumulated_retain", "blocks", "by_key", "cascade", "codes", "counting", "forms"),
        *("frozen_gradients", "launches", "plans", "programs", "refusals", "remembered_keys", "rule"),
        "text",
    )
    # Of each config: no fields, and read without a call. `rule` has the four knobs, `counting` is the memory of the sum
    # normaliser: bias dot, to be written with the value 1. `codes` is the memory in which a readout learns codes by
    # heart: its slots decay, each by a gate of its own; `cascade` are both matrices of a structure that is two, the
    # first under the bias of its link. `blocks` of a chunk's writes are what the step is normalised by, 0 where it is
    # raw or each key has its own (`by_key`) [RULE-STEP-D3]; of an unfinished chunk tokens carry on `remembered_keys`,
    # with `accumulated_retain` the product of its gates, and with `frozen_gradients` the state at which they are taken;
    # `refusals` is what engines have said of it, by engine. `plans` and `launches` of scans and `programs` of single
    # tokens are kept by the looks of their tensors; no copy has them. `text` is what engines read, in JSON, which a
    # compiler cannot make; None where reading it would give another rule.
    accumulated_retain: ClassVar[bool]
    blocks: ClassVar[int]
    by_key: ClassVar[bool]
    cascade: ClassVar[tuple[MemoryConfig, MemoryConfig] | None]
    codes: ClassVar[MemoryConfig]
    counting: ClassVar[MemoryConfig]
    forms: ClassVar[Forms]
    frozen_gradients: ClassVar[bool]
    launches: ClassVar[dict[Any, Any]]
    plans: ClassVar[dict[Any, Any]]
    programs: ClassVar[dict[Any, Any]]
    remembered_keys: ClassVar[int]
    refusals: ClassVar[dict[Any, str | None]]
    rule: ClassVar[MemoryRule]
    text: ClassVar[str | None]

    def model_post_init(self, context: object) -> None:
        """Stores the four knobs as a rule, the config of the sum normaliser, and empty caches for plans and such."""
        keep = partial(object.__setattr__, self)
        for name in ("launches", "plans", "programs", "refusals"):
            keep(name, {})
        deep = getattr(self.structure, "factored", False) and not self.structure.linear
        if hasattr(self.retention, "settled") and not getattr(self.structure, "transposed", True):
            keep("retention", self.retention.settled(deep=deep))
        fields = {name: getattr(self, name, None) for name in type(self).model_fields}

        def but(**changes: Any) -> MemoryConfig:
            return type(self).model_construct(**{**fields, **changes})

        keep("rule", MemoryRule.model_construct(**{name: fields[name] for name in MemoryRule.model_fields}))
        names = ("structure", "bias", "retention", "algorithm", "feature_map")
        if all(hasattr(fields[name], "kernel_form") for name in names):  # else it is refused when it is checked
            keep("forms", Forms(self.rule, self.feature_map))
            self._keep_what_chunks_are(keep)
            readable = isinstance(self.bias, Bias) and _is_readable(self.rule, self.feature_map)
            keep("text", self.model_dump_json(include=_OF_ENGINES, warnings=False) if readable else None)
            link = self.structure.cascade()
            both = None if link is None else tuple(but(structure=Matrix(), bias=b) for b in (link, self.bias))
            keep("cascade", both)
        if self.writes > 1:
            keep("_single", but(gating=Plain(), writes=1, chunk=self.chunk * self.writes if self.chunk > 1 else 1))
        if not getattr(self.readout, "plain", True):
            ready = {"feature_map": Identity(), "key_norm": "none", "query_scale": "none", "gating": Plain()}
            ready["readout"] = Direct()
            keep("_direct", but(**ready))
            keep("codes", but(**ready, structure=Matrix(learns="key"), retention=Decay(retain=1.0)))
        if self.normalizer != "none":
            keep("counting", but(bias=Dot(), normalizer="none"))

    def _keep_what_chunks_are(self, keep: Callable[[str, Any], None]) -> None:
        chunk = self.chunk if isinstance(self.chunk, int) else 1  # of a copy that is not checked yet
        gram = self.step == "normalized" and self.structure.factored and self.algorithm.takes_any_gradient()
        gram = gram and not (self.forms.linear and chunk == 1)
        frozen, summed = chunk > 1 and self.commit == "token", self.commit == "chunk"
        product = self.decay_order == "before_gradient" or self.retention.links == "linear"
        keep("accumulated_retain", summed or (frozen and product))
        keep("blocks", -(-chunk // BLOCK) if gram else 0)
        keep("by_key", self.step != "raw" and not gram)
        keep("frozen_gradients", frozen)
        keep("remembered_keys", min(chunk, BLOCK) - 1 if gram else 0)

    @model_serializer(mode="wrap")
    def _written(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        # So that a config that does not set it is still written as before.
        return {name: value for name, value in write(self).items() if name not in LAYER_FIELDS or value is not None}

    def brief(self) -> dict[str, Any]:
        """The short form of any config; or a rule's name with the fields that differ from it, if that is shorter."""
        fields, shortest = {name: vars(self).get(name) for name in type(self).model_fields}, super().brief()
        for rule, (config, *_) in RULES.items():
            if config.model_fields_set <= self.model_fields_set:
                plain = {name: field.default for name, field in type(self).model_fields.items()}
                plain |= {name: getattr(config, name) for name in MemoryConfig.model_fields}
                changes = {name: briefly(value) for name, value in fields.items() if value != plain[name]}
                shortest = min(shortest, {"kind": rule, **changes}, key=len)
        return shortest

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """Fields, which may include a rule whose other fields they take, or the name of a rule alone."""
        schema = super().__get_pydantic_json_schema__(core, handler)
        whole = handler.resolve_ref_schema(schema)
        rule = {"type": "string", "enum": list(RULES), "description": "A rule of the literature, by its name."}
        fields = {**whole, "properties": {"kind": rule, **whole["properties"]}}
        whole.clear()
        whole.update({"title": fields.pop("title"), "anyOf": [fields, rule]})
        return schema

    @property
    def single(self) -> MemoryConfig:
        """The config of the same memory for a scan in which every write is a token."""
        return self._single if self.writes > 1 else self  # type: ignore[attr-defined]

    @property
    def direct(self) -> MemoryConfig:
        """The config of the memory behind a readout, whose queries and keys are features that the readout has made."""
        return self if self.readout.plain else self._direct  # type: ignore[attr-defined]

    @property
    def dtype(self) -> torch.dtype:
        """`state_dtype` as torch's."""
        return torch.float64 if self.state_dtype == "float64" else torch.float32

    @property
    def key_bound(self) -> float | None:
        """Upper bound of |phi(k)|^2 after key_norm; None if there is none."""
        return self.feature_map.norm_bound if self.key_norm == "none" else 1.0

    def diverging(self, square: float, lr: float | None = None) -> float | None:
        """lr |phi|^2 curvature at |phi|^2 = `square`, if it exceeds `stable_step` or is negative, so that repeated
        writes may diverge; None if they cannot. [RULE-STABLE-D1]

        A write multiplies the error at its key by 1 minus this number; with gates erase and write, `square` is <erase
        phi, write phi>. `lr` is that of every token, or the ceiling of a gate (by default `algorithm.lr`, that of a
        layer's gate); the limit itself is allowed. A bias whose curvature has no bound counts as l2. A memory that is
        not linear is not judged."""
        curvature = self.bias.curvature
        largest = square * (self.algorithm.lr if lr is None else lr)
        largest *= 1.0 if curvature is None else curvature
        linear = self.structure.linear and self.retention.linear
        # 1e-9, so that rounding does not decide at the limit.
        beyond = linear and (largest < 0 or largest > self.algorithm.stable_step * (1 + 1e-9))
        return largest if beyond else None

    def check_step(self, lr: float, erases: float | None = None) -> None:
        """Refuses an inner learning rate at which repeated writes of one key provably diverge.

        The test is on the eigenvalue 1 - lr <erase phi, write phi> of a write; `erases` is erase times write, by
        default the most that the gating makes. The norm of one write is not tested: if the two keys differ it may pass
        1, up to sqrt(4/3) for lr |phi|^2 = write = 1 and erase in [0, 1], sqrt(2) in [0, 2]."""
        curvature, bound = self.bias.curvature, self.key_bound
        if self.step != "raw" or curvature is None or bound is None:
            return
        most = self.gating.erases if erases is None else erases
        largest, limit = self.diverging(most * bound, lr), self.algorithm.stable_step
        if largest is not None:
            gain, cure = "lr * |phi|^2", f"lower lr to {limit / abs(most * bound * curvature):g}"
            if most != 1:
                source = f"gating {self.gating.kind!r}" if erases is None else "gates.erase times gates.write"
                gain = f"lr * <erase phi, write phi>, {most:g} times lr * |phi|^2 with {source},"
            limits = self.algorithm.limits(limit if largest > 0 else 0.0)
            other = " or set step='normalized', 'implicit' or 'flow'" if most == 1 else " or the gates"
            reached = f"with feature_map {self.feature_map.kind!r} and key_norm {self.key_norm!r}: {gain} can reach"
            diverges = f"bias {self.bias.kind!r} under algorithm {self.algorithm.kind!r} diverges beyond {limits}"
            cure = cure + other if most > 0 else "turn a sign"
            message = f"lr={lr:g} {reached} {largest:g}, and {diverges}; {cure}"
            raise ConfigError(message, path=("algorithm", "lr"))

    @model_validator(mode="before")
    @classmethod
    def _from_rule(cls, data: Any) -> Any:
        """A rule's name, or a mapping with one under `kind`, stands for its fields."""
        if isinstance(data, str):
            data = {"kind": data}
        if not isinstance(data, Mapping) or "kind" not in data:
            return _of_earlier(data) if isinstance(data, Mapping) else data
        rule, fields = named_rule(data["kind"]), {k: v for k, v in data.items() if k != "kind"}
        return {**{name: getattr(rule, name) for name in rule.model_fields_set}, **fields}

    def conflicts(self) -> Conflicts:
        """Combinations of knobs and conventions that are ruled out."""
        structure, retention, algorithm = self.structure, self.retention, self.algorithm
        if (act := next((act for act in acts_of(structure) if activation_nodes(act) == MIXES), None)) is not None:
            yield ("structure",), f"activation {act.kind!r}: {MIXES}, and so do its derivatives here"
        form = algorithm.token_form()
        if self.step == "weighted" and (form is None or form.ridge is None):
            other = f"algorithm {algorithm.kind!r} solves no least squares, in which a token could weigh lr"
            yield ("step",), f"'weighted': {other}; use algorithm 'rls', or step 'raw'"
        if self.decay_order == "before_gradient" and not retention.uses_retain:
            nothing = f"retention {retention.kind!r} has nothing to decay"
            yield ("decay_order",), f"'before_gradient' needs a retention that decays; {nothing}"
        if retention.gate_form.channels and not structure.linear:
            cause = "retention.channels gives every phi channel a retain of its own"
            without = f"{structure.named} has weights without a phi axis"
            cure = "leave channels out or use structure 'matrix' or 'vector'"
            if structure.transposed:
                without, cure = f"{structure.named} decays channels of values", "use gates.retain_value"
            yield ("retention", "channels"), f"{cause}, but {without}; {cure}"
        if retention.needs_weights and not structure.drawn:
            cause = f"{structure.named} starts at zero, and slots without a length would keep none"
            yield ("retention", "pattern"), f"False: {cause}; leave it True, or use a structure that starts at a draw"
        if retention.links != "token":
            for reason in self._no_border():
                yield ("retention", "link_at"), f"{retention.links!r}: {reason}; use link_at='token'"
        curvature = self.bias.curvature
        refusal = algorithm.refusal(linear=structure.linear, diagonal=structure.diagonal, curvature=curvature)
        if refusal is not None:
            named = f"algorithm {algorithm.kind!r} with {structure.named} and bias {self.bias.kind!r}"
            yield ("algorithm",), f"{named}: {refusal}"
        for refusal in self._no_gating():
            yield ("gating",), f"gating {self.gating.kind!r}: {refusal}"
        for refusal in self.readout.refusals(self):
            yield ("readout",), f"readout {self.readout.kind!r}: {refusal}"
        if self.writes > 1:
            for reason in self._no_writes():
                yield ("writes",), f"{self.writes} writes a token: {reason}"
        if structure.transposed and not algorithm.takes_any_gradient():
            cause = f"and algorithm {algorithm.kind!r} makes its gradient from keys and values in their own places"
            yield ("structure", "learns"), f"'key' lets them change places, {cause}; use algorithm 'gd' or 'momentum'"
        if structure.transposed and self.step != "raw":
            gain = f"step={self.step!r} divides lr by |phi(k)|^2, and the gain of a write is lr |v|^2"
            yield ("structure", "learns"), f"with 'key' {gain}; use step 'raw'"
        if self.normalizer != "none":
            for reason in self._no_quotient():
                yield ("normalizer",), f"{self.normalizer!r}: {reason}"
        if self.key_norm == "sum" and not self.feature_map.non_negative:
            negative = f"feature_map {self.feature_map.kind!r} can be negative; use key_norm='l2' or another map"
            yield ("key_norm",), f"'sum' divides by the sum of phi, which needs phi >= 0; {negative}"
        yield from self._no_bound()
        formula = self.forms.retention
        if self.retention.additive and not isinstance(formula, str) and not formula.adds:
            sums = "the carried state times its retain gate, or 1 without, plus the direction"
            yield ("retention",), f"{self.retention.kind!r} is declared linear, and its `step` is not {sums}"
        if not (retention.uses_retain or isinstance(formula, str)) and "in r" in formula.single.operations:
            unsaid = "reads the retain gate, which it is not declared to take; set uses_retain = True"
            yield ("retention",), f"the `step` of {retention.kind!r} {unsaid}"
        self.check_step(self.algorithm.lr)

    def _no_bound(self) -> Conflicts:
        """Reason why a step cannot be normalised, or the memory cannot forget towards its start."""
        structure, deep = self.structure, not (self.forms.linear or self.forms.transposed)
        if self.step == "normalized" and deep and structure.factored:
            if (reason := unbounded(structure.graph())) is not None:
                yield ("step",), f"'normalized' with {structure.named}: {reason}; use step='raw'"
            if not self.algorithm.takes_any_gradient():
                cause = f"algorithm {self.algorithm.kind!r} descends a loss of its own, whose curvature"
                yield ("step",), f"'normalized' with {structure.named}: {cause} has no bound here; use step='raw'"
        if self.blocks and self.chunk > 1 and self.decay_order == "before_gradient":
            cause = "token of a chunk takes its gradient at weights of its own, and no row sum bounds what they do"
            yield ("step",), f"'normalized' with decay_order='before_gradient' and chunk={self.chunk}: every {cause}"
        if self.retention.anchored:
            towards = f"retention {self.retention.kind!r} towards 'start'"
            if not self.readout.plain:
                solves = f"readout {self.readout.kind!r} solves for sums of values alone"
                yield ("retention", "towards"), f"'start': {solves}"
            if self.normalizer != "none":
                sums = "the start is no weighted sum of values, which the normaliser could divide"
                yield ("normalizer",), f"{self.normalizer!r}: {sums}; {towards} needs normalizer='none'"
            if self.writes > 1:
                yield ("writes",), f"{self.writes} writes a token: {towards} would go back at each of them"

    def _no_gating(self) -> Iterator[str]:
        """Reason why its gating cannot make what its memory takes."""
        gating, structure = self.gating, self.structure
        if (refusal := gating.refusal(self)) is not None:
            yield refusal
        if gating.one_key and self.writes > 1:
            yield f"it knows one key per token, not writes={self.writes}"
        if "retain" in gating.channels and not structure.linear:
            yield f"it makes retain per phi channel, and {structure.named} has no phi axis; use structure 'matrix'"
        for name, reason in self.gate_refusals():
            if name in gating.gates:
                yield f"it makes gates.{name}, but {reason}"

    def gate_refusals(self) -> Iterator[tuple[str, str]]:
        """The gates, besides lr, retain and momentum, that have no meaning for this config, each with the reason."""
        structure = self.structure.named
        for name in ("erase", "write"):
            if not self.forms.linear:
                without = "writes along v" if self.forms.transposed else "has weights without a phi axis"
                cure = "use structure 'matrix' or 'vector', whose predictions are of values"
                yield name, f"{structure} {without}; {cure}"
            if not self.algorithm.takes_any_gradient():
                cause = f"algorithm {self.algorithm.kind!r} makes its gradient from phi(k) itself, and no paper says"
                yield name, f"{cause} how one that is gated would enter; use algorithm 'gd' or 'momentum'"
            if self.step != "raw":
                cause = f"step={self.step!r} divides lr by |phi(k)|^2"
                yield name, f"{cause}, not the gain of such a write; use step 'raw'"
        readout, named = self.readout, f"readout {self.readout.kind!r}"
        for name in ("ridge", "mix"):
            if name not in readout.gates:
                yield name, f"{named} has no {name}; use readout 'ridge'"
        if not readout.plain:
            for name in ("write", "retain_value"):
                if name not in readout.gates:
                    yield name, f"{named} knows lr and retain{''.join(f', {gate}' for gate in readout.gates)} alone"
        if self.forms.target:
            yield "erase", f"bias {self.bias.kind!r} never asks the memory what to unlearn; use bias 'l2'"
        if self.normalizer != "max":
            yield "floor", f"normalizer={self.normalizer!r} has no least divisor; use normalizer='max'"
        if self.normalizer != "none":
            for name in ("erase", "retain_value"):
                yield (name, f"normalizer={self.normalizer!r} divides by one sum of weights for all value channels")
        if not self.retention.uses_retain:
            yield "retain_value", f"retention {self.retention.kind!r} takes no retain gate; choose retention 'decay'"
        if not (self.forms.linear or self.forms.transposed) or self.structure.diagonal:
            yield "retain_value", f"{structure} has no axis of value channels beside phi's; use structure 'matrix'"
        if self.accumulated_retain:
            chunks = f"chunk={self.chunk} with commit={self.commit!r} and decay_order={self.decay_order!r}"
            yield "retain_value", f"{chunks} keeps the product of a chunk's retain gates, not that of value channels"

    def rates_refusal(self) -> str | None:
        """Reason why weights cannot have an lr each; None if they can. [RULE-RATES-D1]"""
        if self.commit != "chunk":
            return f"commit={self.commit!r} takes steps whose lr the algorithm knows; it needs commit='chunk'"
        if self.forms.linear or self.forms.transposed:
            return f"{self.structure.named} is one weight"
        if self.step != "raw":
            return f"step={self.step!r} makes lr of phi(k), which only one weight meets"
        if not self.algorithm.takes_any_gradient():
            return f"algorithm {self.algorithm.kind!r} makes gradients with one lr for all weights"
        return None

    def _no_border(self) -> Iterator[str]:
        """Reason why the link cannot be taken at a chunk's start."""
        retention = self.retention
        if not retention.dual:
            yield f"retention {retention.kind!r} as configured has no link, its weights are what it carries"
        if self.chunk == 1:
            yield "with chunk=1 every token begins a chunk of its own"
        elif self.commit == "chunk":
            yield "with commit='chunk' what is carried moves at the chunk's end alone, and so does link(A)"
        if self.decay_order == "before_gradient":
            yield "decay_order='before_gradient' takes every gradient at a link of its own"
        if retention.links == "chunk" and self.read == "before":
            yield "a chunk's tokens read one memory, so read='before' would change nothing"

    def _no_writes(self) -> Iterator[str]:
        """Reason why a token cannot have several writes."""
        algorithm = self.algorithm
        if algorithm.slots:
            added = "carries a slot that every write would add to the memory once more"
            yield f"algorithm {algorithm.kind!r} {added}; it needs algorithm gd"
        elif algorithm.context_shapes(1, 1):
            yield f"algorithm {algorithm.kind!r} remembers tokens, not writes; it needs algorithm gd"
        if self.feature_map.needs_position:
            yield f"feature_map {self.feature_map.kind!r} counts tokens, of which each write would be one"
        if self.commit == "chunk" and self.chunk == 1:
            yield "commit='chunk' with chunk=1 takes one step per token; it needs commit='token'"

    def _no_quotient(self) -> Iterator[str]:
        """Reason why the normaliser cannot divide."""
        phi, structure = f"feature_map {self.feature_map.kind!r}", self.structure.named
        if self.normalizer == "sum" and not self.feature_map.kernel_non_negative:
            cure = "it needs a map with a non-negative kernel, such as elu or favor"
            yield f"phi(q).z can vanish or change sign with {phi}; {cure}"
        if not self.structure.linear:
            no_sum = "is not a weighted sum of values, so there is no sum of weights to divide by"
            yield f"{structure} {no_sum}; it needs structure matrix"
        if self.structure.diagonal:
            cancels = "phi(q) cancels in the quotient and nothing could be looked up"
            yield f"{structure} reads coordinate by coordinate, where {cancels}; it needs structure matrix"
        no_sum = "so the read is not a weighted sum of values"
        if not self.retention.weighted_sum:
            yield f"retention {self.retention.kind!r} is not linear, {no_sum}; it needs retention none, decay or l2"
        if not self.algorithm.linear:
            gradients = f"algorithm {self.algorithm.kind!r} is not linear in the gradients"
            yield f"{gradients}, {no_sum}; it needs algorithm gd or momentum"
        if self.normalizer == "sum" and self.query_scale != "none":
            yield f"query_scale={self.query_scale!r} cancels in the quotient; set it to 'none'"


def _is_readable(rule: MemoryRule, phi: FeatureMap) -> bool:
    """True if a rule's text is read back as the same rule: fields of a user's own kinds may be left out or rounded."""
    if all(type(knob).__module__.startswith("hecate.") for knob in (*knobs_of(rule), phi)):
        return True
    try:
        same = type(phi).model_validate_json(phi.model_dump_json(warnings=False)) == phi
        return same and MemoryRule.model_validate_json(rule.model_dump_json(warnings=False)) == rule
    except ConfigError:
        return False


_ALWAYS = frozenset(
    "structure bias retention algorithm feature_map chunk commit read decay_order normalizer key_norm query_scale step "
    "state_dtype on_nonfinite".split()
)


def _of_earlier(data: Mapping[str, Any]) -> Mapping[str, Any]:
    """The fields of a config, those that a version before 0.3 has written out whole as they are spelled now: what it
    meant keeps its numbers. [RULE-OLD-I1]"""
    if not _ALWAYS <= data.keys() or "layer_v_norm" in data:
        return data
    fields, retention = dict(data), data["retention"]
    if isinstance(retention, Mapping) and retention.get("kind") in ("decay", "l2"):
        fields["retention"] = {"towards": "zero", **retention}
    if data["step"] == "normalized":
        fields["step"] = "key_normalized"
    return fields


class Difference(NamedTuple):
    """A deliberate difference between a rule's default layer and the published one: `what` it does, and `by` how much,
    relatively, it moves the output of a fresh layer."""

    name: str
    what: str
    by: float


class NamedRule(NamedTuple):
    """A rule's configuration, where it comes from, what sets its default layer apart from the published one, and its
    equations in LaTeX, one a line between dollars."""

    config: MemoryConfig
    paper: str
    differs: tuple[Difference, ...] = ()
    equation: str = ""

    @property
    def text(self) -> str:
        """The paper, and each difference with its number."""
        differences = ", ".join(f"{item.what} ({item.by:.2f})" for item in self.differs)
        return f"{self.paper}; unlike the published layer it has {differences}" if differences else self.paper


class Rules(UserDict[str, NamedRule]):
    """The rules of `rules.yaml` by name. The file is read when one is first asked for, and each rule is made when it is
    first needed: to make all of them, with checks and traced formulas, would take half of the time of an import. A rule
    may be stored as a function without arguments, too, which makes it then."""

    def __init__(self, rules: Mapping[str, Any] | None = None) -> None:
        """Reads nothing yet, or has other rules."""
        if rules is not None:
            super().__init__(rules)

    def __copy__(self) -> Rules:
        return Rules(self.data)

    @cached_property
    def data(self) -> dict[str, Any]:  # type: ignore[override]
        """Each rule, or its fields until it is made."""
        import yaml

        text = Path(__file__).with_name("rules.yaml").read_text("ascii")
        file = yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))  # the one in C takes a tenth of the time
        for rule in file["rules"].values():
            by = rule.get("differs", {})
            rule["differs"] = tuple([Difference(name, file["differences"][name], by[name]) for name in by])
        return dict(file["rules"])

    def __getitem__(self, name: str) -> NamedRule:
        rule = self.data[name]
        if isinstance(rule, dict):
            self.data[name] = rule = NamedRule(**{**rule, "config": MemoryConfig(**rule["config"])})
        elif not isinstance(rule, NamedRule):
            self.data[name] = rule = rule()
        return rule


RULES = Rules()
"""The rules of the literature by name."""


def named_rule(name: str, **fields: Any) -> MemoryConfig:
    """The configuration of a rule of the literature; `hecate list rules` shows all.

    `fields` of `MemoryConfig` take the place of the rule's: `named_rule("titans", chunk=16)`. [RULE-NAMED-D1]

    Raises:
        ConfigError: an unknown name or field, with the known ones and the nearest.
    """
    if not isinstance(name, str) or name not in RULES:
        raise ConfigError(f"unknown rule {shorten(name)}{not_known(name, RULES)}")
    config = RULES[name].config
    return config.model_copy(update=fields) if fields else config
