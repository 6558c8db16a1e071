"""Sizes of a language model and the layers that mix its tokens."""

from __future__ import annotations

from typing import Literal, NamedTuple, Self

from pydantic import Field, model_validator

from hecate.cms import Aggregation, CMSConfig, Composition, LevelConfig, SelfReferenceConfig
from hecate.errors import ConfigError
from hecate.nn import AttentionConfig, FeatureMemoryConfig
from hecate.rule import MemoryConfig
from hecate.sizes import MAX_SIZE, Depth, Size, check_shapes
from hecate.variant import Config


class Scanned(NamedTuple):
    """A memory as a layer runs it: widths of keys and values, most tokens in one scan."""

    config: MemoryConfig
    d_key: int
    d_value: int
    window: int | None = None


def _seen(features: FeatureMemoryConfig | None, d_key: int) -> int:
    """Width of what a memory's phi sees of keys."""
    return d_key if features is None else features.width(d_key)


def _features(config: FeatureMemoryConfig, d_key: int) -> Scanned:
    return Scanned(config, d_key, config.width(d_key))


_RULE = ("memory", "d_key", "d_value", "qk_norm", "learned_initial")
_AROUND = ("conv_kernel", "output_gate", "feature_memory")


class LanguageModelConfig(Config):
    """Sizes of a `LanguageModel` and what mixes the tokens of its blocks. [LM-MIXER-D1]

    One memory per block is the default. `levels` puts a continuum of memories in its place, `self_reference` a
    self-referential memory, `attention` composes either with softmax attention; self-reference (or attention alone)
    with levels puts the levels after it, as HOPE does.

    Fields:
        vocab_size: tokens; None is filled from the data.
        d_model, layers, heads: width, depth, memories per layer.
        d_key, d_value: widths per head; None means d_model // heads.
        memory: rule and conventions of every layer's memory.
        conv_kernel, qk_norm, output_gate, learned_initial, feature_memory: as in
            `hecate.nn.Memory`. Levels bring their own, and self-reference its rule: what they
            leave unread stays at its default.
        levels, composition, aggregation: as in `hecate.cms.CMSConfig`.
        self_reference: as in `hecate.cms.SelfReferential`.
        attention: as in `hecate.nn.Composed`.
        mlp_ratio: hidden width of the gated MLP over d_model; 0 leaves it out.
        tie_embeddings: whether the output layer shares the embedding's weights.
    """

    vocab_size: Size | None = Field(None, ge=2)
    d_model: Size = Field(128, ge=1)
    layers: Depth = Field(2, ge=1)
    heads: Size = Field(4, ge=1)
    d_key: Size | None = Field(None, ge=1)
    d_value: Size | None = Field(None, ge=1)
    memory: MemoryConfig = MemoryConfig()
    conv_kernel: Depth = Field(4, ge=0)
    qk_norm: Literal["none", "l2", "rms"] = "l2"
    output_gate: bool = True
    learned_initial: bool = True
    feature_memory: FeatureMemoryConfig | None = None
    levels: tuple[LevelConfig, ...] = ()
    composition: Composition = "sequential"
    aggregation: Aggregation = "sum"
    self_reference: SelfReferenceConfig | None = None
    attention: AttentionConfig | None = None
    mlp_ratio: float = Field(2.0, ge=0, le=MAX_SIZE)
    tie_embeddings: bool = True

    @model_validator(mode="after")
    def _sizes(self) -> Self:
        if self.d_model % self.heads and (self.d_key is None or self.d_value is None):
            raise ConfigError(
                f"must divide d_model={self.d_model}, got {self.heads}; or give d_key and d_value", path=("heads",)
            )
        if self.conv_kernel == 1:
            raise ConfigError("must be 0 (none) or at least 2, got 1", path=("conv_kernel",))
        if 0 < self.mlp_ratio * self.d_model < 1:
            raise ConfigError(
                f"gives no hidden unit at d_model={self.d_model}, got {self.mlp_ratio:g}; set it "
                f"to 0 or to at least {1 / self.d_model:g}",
                path=("mlp_ratio",),
            )
        d_key, d_value = self._widths()
        seen = _seen(self.feature_memory, d_key)
        own: dict[str, tuple[MemoryConfig | None, int, int]] = {
            "feature_memory": (self.feature_memory, d_key, seen),
            "memory": (self.memory, seen, d_value),
        }
        for field, (memory, key, value) in own.items():
            try:
                if memory is not None:
                    memory.structure.shapes(memory.feature_map.output_dim(key), value)
            except ConfigError as error:
                raise ConfigError(f"{error} (keys have width {key})", path=(field,)) from None
        return self

    @model_validator(mode="after")
    def _one_mixer(self) -> Self:
        """Refuses settings that nothing would read."""
        if not self.levels:
            for field in ("composition", "aggregation"):
                if self._is_set(field):
                    raise ConfigError(
                        f"{getattr(self, field)!r} joins levels, and there are none; give levels or leave it out",
                        path=(field,),
                    )
        if self.plain:
            return self
        other = "levels" if self.self_reference is None else "self_reference"
        if self.levels == () and self.self_reference is None:
            other = "attention"
        for field in _RULE if other == "self_reference" else _RULE + _AROUND:
            if self._is_set(field):
                raise ConfigError(
                    f"belongs to a block's plain memory, but {other} takes its place; set it "
                    f"within {other} where it has such a field, or leave it out",
                    path=(field,),
                )
        return self

    @model_validator(mode="after")
    def _buildable(self) -> Self:
        """Builds a block without storage, so that layers refuse here what they would refuse."""
        from hecate.models.block import Block

        try:
            check_shapes({"embedding": (self.vocab_size or 1, self.d_model)}, "lower d_model")
            Block(self, "layer", device="meta")
        except ConfigError as error:
            raise error.or_at("d_model") from None
        return self

    @property
    def plain(self) -> bool:
        """Whether blocks have the memory of `memory`."""
        alone = self.attention is not None and self.attention.kind == "attention"
        return not (self.levels or self.self_reference is not None or alone)

    def rules(self) -> dict[str, Scanned]:
        """Every memory of a block that scans a sequence, by its path in this config."""
        found: dict[str, Scanned] = {}
        key, value = self._widths()
        head = self.d_model // self.heads
        if self.plain:
            found["memory"] = Scanned(self.memory, _seen(self.feature_memory, key), value)
        if self.self_reference is not None:
            inner = self.self_reference
            window = inner.period if inner.refers else None
            found["self_reference.memory"] = Scanned(inner.memory, head, head, window)
        if self.feature_memory is not None:
            width = key if self.plain else head
            found["feature_memory"] = _features(self.feature_memory, width)
        for index, level in enumerate(self.levels):
            own = self.d_model // (level.heads or self.heads)
            path, key = f"levels[{index}]", level.d_key or own
            seen = _seen(level.feature_memory, key)
            found[f"{path}.memory"] = Scanned(level.rule, seen, level.d_value or own)
            if level.feature_memory is not None:
                found[f"{path}.feature_memory"] = _features(level.feature_memory, key)
        return found

    def _is_set(self, field: str) -> bool:
        return bool(getattr(self, field) != type(self).model_fields[field].default)

    def _widths(self) -> tuple[int, int]:
        width = self.d_model // self.heads
        return self.d_key or width, self.d_value or width

    @property
    def cms(self) -> CMSConfig | None:
        """The levels as one layer's config; None without any."""
        if not self.levels:
            return None
        return CMSConfig(levels=self.levels, composition=self.composition, aggregation=self.aggregation)
