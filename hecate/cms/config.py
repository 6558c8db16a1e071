"""Config of a continuum memory: its levels, their periods and their composition."""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from hecate.checks import Count, Size, Taps
from hecate.engine import MOST_LEVELS, tree_refusal
from hecate.nn.conv import DEFAULT_CONV_KERNEL, DEFAULT_QK_NORM, LayerConfig, QKNorm
from hecate.nn.gates import Firing, check_firing
from hecate.nn.rule import FeatureMemoryConfig, Projection, check_projection
from hecate.retention import Retention
from hecate.rule import MemoryConfig
from hecate.variant import Config, Conflicts


class LevelConfig(LayerConfig):
    """One level: an `nn.Memory` that commits every `period` tokens.

    Fields:
        name: its name in errors and reports; unique among the levels.
        period: tokens between commits. Above 1, `memory` gets `chunk=period, commit="chunk"`; at 1
            it stays as it is given.
        memory: rule and conventions; the name of a rule stands for its fields.
        heads, d_key, d_value, conv_kernel, qk_norm, output_gate, learned_initial, feature_memory:
            as in `hecate.nn.Memory`; heads None takes those of the `CMS`, and conv_kernel and qk_norm
            left out are `memory.layer_conv_kernel` and `memory.layer_qk_norm`, if it names them.
        firing: "learned" lets a gate decide token by token and head by head whether the level is
            written; of any level, the fastest too. [CMS-FIRE-D1]
        restart: number of tokens after which the memory restarts from its starting weights, each time; None: never.
        query_projection: "sum" or "orthogonal" projects phi(q) onto the keys of the present chunk.
    """

    follows: ClassVar[tuple[str, ...]] = ("conv_kernel", "qk_norm")
    name: str = Field(min_length=1)
    period: Count = Field(1, ge=1)
    memory: MemoryConfig = MemoryConfig()
    heads: Size | None = Field(None, ge=1)
    d_key: Size | None = Field(None, ge=1)
    d_value: Size | None = Field(None, ge=1)
    conv_kernel: Taps = DEFAULT_CONV_KERNEL
    qk_norm: QKNorm = DEFAULT_QK_NORM
    output_gate: bool = True
    learned_initial: bool = True
    feature_memory: FeatureMemoryConfig | None = None
    firing: Firing = "always"
    restart: Count | None = Field(None, ge=1)
    query_projection: Projection = "none"

    def conflicts(self) -> Conflicts:
        """Settings that do not go with the period, `restart`, the firing gate or the query projection."""
        memory = self.memory
        schedule = (memory.chunk, memory.commit)
        if self.period > 1 and schedule not in ((1, "token"), (self.period, "chunk")):
            sets = f"period={self.period} sets chunk={self.period} and commit='chunk'"
            has = f"memory has chunk={memory.chunk} and commit={memory.commit!r}"
            yield ("period",), f"{sets}, but {has}; leave both out of memory, or set period=1 to keep them"
        rule = self.rule  # its own refusals are the level's
        if self.restart is not None and self.restart % rule.chunk:
            reason = f"restart={self.restart} would cut a chunk of {rule.chunk} tokens short"
            yield ("restart",), f"{reason}; use a multiple of {rule.chunk}"
        check_firing(rule, self.firing)
        check_projection(rule, self.query_projection)

    @property
    def rule(self) -> MemoryConfig:
        """`memory` as the level runs it."""
        if self.period == 1:
            return self.memory
        return self.memory.model_copy(update={"chunk": self.period, "commit": "chunk"})


Composition = Literal["sequential", "nested", "independent", "chained", "carry"]
Aggregation = Literal["sum", "rsqrt", "learned", "gated"]
Levels = Annotated[Count, Field(ge=1, le=MOST_LEVELS)]


class CMSConfig(Config):
    """Levels from fast to slow and how their outputs are combined.

    Fields:
        levels: at least one, with unique names and periods that never fall.
        composition: "sequential" adds each level's output to what the next one reads; "nested" does
            too, and a commit of a slower level restarts the faster one from it; "chained" passes outputs alone;
            "independent" lets every level read the input; "carry" makes a tree of one level, whose content is kept
            apart by age and read with learned weights (log-linear attention, `hecate.cms.CarryMemory`).
        aggregation: how "independent" adds up outputs: "sum"; "rsqrt" times 1/sqrt(levels);
            "learned" times a weight per level and channel; "gated" times sigmoid(W x + b).
        carry_levels: number of levels of that tree, of periods 1, 2, 4, ...; T tokens need ceil(log2 T) + 1, and older
            content stays in the last level.
    """

    levels: tuple[LevelConfig, ...] = Field(min_length=1)
    composition: Composition = "sequential"
    aggregation: Aggregation = "sum"
    carry_levels: Levels = 15

    def conflicts(self) -> Conflicts:
        """Levels that do not go together, or not in this composition."""
        yield from self._of_carry()
        names = [level.name for level in self.levels]
        for index, (fast, slow) in enumerate(pairwise(self.levels), 1):
            if slow.period < fast.period:
                both = f"level {slow.name!r} has period {slow.period}, level {fast.name!r} before it {fast.period}"
                reason = f"levels go from fast to slow: {both}; swap them or change a period"
                yield ("levels", index, "period"), reason
        for index, name in enumerate(names):
            if name in names[:index]:
                reason = f"{name!r} is the name of level {names.index(name)} already"
                yield ("levels", index, "name"), f"{reason}; give each level one of its own"
        if self.composition != "independent" and self.aggregation != "sum":
            does = "weighs outputs of levels that read one input, which only composition 'independent' does"
            yield ("aggregation",), f"{self.aggregation!r} {does}; with composition {self.composition!r} leave it out"
        for index, (fast, slow) in enumerate(pairwise(self.levels), 1):
            for path, reason in _of_nested(fast, slow) if self.composition == "nested" else ():
                yield ("levels", index, *path), f"nested levels {fast.name!r} and {slow.name!r}: {reason}"

    def _of_carry(self) -> Conflicts:
        """Levels from which no tree can be made, and a size of the tree where there is none."""
        if self.composition != "carry":
            if self.carry_levels != type(self).model_fields["carry_levels"].default:
                reason = f"{self.carry_levels} levels are those of composition 'carry'"
                yield ("carry_levels",), f"{reason}; with composition {self.composition!r} leave it out"
            return
        if len(self.levels) > 1:
            reason = "composition 'carry' makes its levels of one, which gives projections and gates to all"
            cure = "leave the others out and set carry_levels"
            yield ("levels", 1), f"{reason}, got {len(self.levels)}; {cure}"
        level = self.levels[0]
        if level.period > 1:
            reason = f"composition 'carry' has levels of periods 1, 2, 4, ..., not {level.period}; leave it out"
            yield ("levels", 0, "period"), reason
        if refusal := tree_refusal(level.memory):
            yield ("levels", 0, "memory", refusal[0]), f"composition 'carry': {refusal[1]}"


def _of_nested(fast: LevelConfig, slow: LevelConfig) -> Conflicts:
    """Reason why a level cannot restart from the next one, with the latter's field."""
    if slow.period == 1:
        reason = f"{slow.name!r} commits at every token, so {fast.name!r} would restart at every token"
        yield ("period",), f"{reason}; give it a period of at least 2"
    if slow.period % fast.rule.chunk:
        reason = f"period {slow.period} is no multiple of {fast.rule.chunk}"
        yield ("period",), f"{reason}, so {fast.name!r} would restart within a window; use a multiple"
    if fast.restart is not None or slow.restart is not None:
        reason = "a level with restart goes back to its own starting weights, a nested one to those of the slower level"
        yield ("restart",), f"{reason}; leave restart out, or use another composition"
    if fast.rule.normalizer != slow.rule.normalizer:
        both = f"normalizer {fast.rule.normalizer!r} against {slow.rule.normalizer!r}"
        reason = "a memory goes with its sum of weights, so both need one or neither"
        yield ("memory", "normalizer"), f"{both}; {reason}"
    ways = (fast.rule.retention, slow.rule.retention)
    if ways[0] != ways[1] and any(way.dual or type(way).start is not Retention.start for way in ways):
        both = f"retention {ways[0].kind!r} and {ways[1].kind!r} keep memories in sets of their own"
        yield ("memory", "retention"), f"{both}, and a copy need not lie in the other; give both the same retention"
    if "skip" in (fast.rule.on_nonfinite, slow.rule.on_nonfinite):
        reason = "on_nonfinite='skip' lets one level leave out a token that another counts"
        yield ("memory", "on_nonfinite"), f"{reason}, so commits would no longer meet; use 'raise' or 'propagate'"
