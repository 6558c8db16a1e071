"""A language model in which memories mix the tokens: its config, its blocks, and HOPE."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from typing import Any, ClassVar, NamedTuple

import torch
from pydantic import Field
from torch import Tensor, nn

from hecate.checks import MAX_SIZE, Depth, Size, Taps, check_shapes, expect_tokens, named, outside_vocabulary
from hecate.cms import CMS, CMSConfig, CMSState, LevelConfig, SelfReferenceConfig, SelfReferential
from hecate.cms.config import Aggregation, Composition, Levels
from hecate.distributed.context import Shares
from hecate.errors import ConfigError, ShapeError, faults_at, faults_under
from hecate.models.rollback import Recorded, advance, take_back
from hecate.nn import AttentionConfig, Composed, FeatureMemoryConfig, Memory
from hecate.nn.arguments import Mask
from hecate.nn.blocks import GatedMLP, Layers, RMSNorm, add_norm, gated_product, hidden_width, token_kernels
from hecate.nn.conv import DEFAULT_CONV_KERNEL, DEFAULT_QK_NORM, LayerConfig, QKNorm
from hecate.nn.parameters import blank, redraw, unheard
from hecate.rule import MemoryConfig
from hecate.states import State
from hecate.variant import Conflicts


class Scanned(NamedTuple):
    """A memory as a layer runs it: its config, widths of keys and values, and the largest number of tokens per
    scan."""

    config: MemoryConfig
    d_key: int
    d_value: int
    window: int | None = None


def _scans(path: str, layer: LanguageModelConfig | LevelConfig, memory: MemoryConfig, head: int) -> dict[str, Scanned]:
    """The memory of a layer, and its feature memory if it has one, by path; `head` is the width of keys and values that
    have none of their own."""
    features, d_key, d_value = layer.feature_memory, layer.d_key or head, layer.d_value or head
    if features is None:
        return {f"{path}memory": Scanned(memory, d_key, d_value)}
    width = features.width(d_key)  # the width that the memory's phi gets
    return {f"{path}memory": Scanned(memory, width, d_value), f"{path}feature_memory": Scanned(features, d_key, width)}


_RULE = ("d_key", "d_value", "qk_norm", "learned_initial")
_JOIN = ("composition", "aggregation", "carry_levels")
_AROUND = ("conv_kernel", "output_gate", "feature_memory")


class LanguageModelConfig(LayerConfig):
    """Sizes of a `LanguageModel`, and the layers that mix tokens in its blocks. [LM-MIXER-D1]

    The default is one memory per block. `levels` replaces it by a continuum of memories, `self_reference` by a
    self-referential memory; `attention` composes either with softmax attention. With self-reference (or attention
    alone), levels come after it, as in HOPE.

    Fields:
        vocab_size: size of the vocabulary; null takes that of the data.
        d_model: width of the model.
        layers: number of blocks.
        heads: number of memories in a layer, which share its width.
        d_key: width of a head's keys and queries; null means d_model // heads.
        d_value: width of a head's values; null means d_model // heads.
        memory: the rule of every layer's memory; `hecate list rules` has the named ones.
        conv_kernel, qk_norm, output_gate, learned_initial, feature_memory: as in
            `hecate.nn.Memory`; conv_kernel and qk_norm default to `memory.layer_conv_kernel` and
            `memory.layer_qk_norm`, if the rule has them. Levels have their own settings, and
            self-reference its own rule: fields without effect must stay at their defaults.
        levels, composition, aggregation, carry_levels: as in `hecate.cms.CMSConfig`.
        self_reference: a self-referential memory, as in `hecate.cms.SelfReferential`.
        attention: softmax attention beside the memory or alone, as in `hecate.nn.Composed`.
        mlp_ratio: hidden width of the gated MLP over d_model; 0 leaves it out.
        tie_embeddings: whether the output layer shares the embedding's weights.
    """

    follows: ClassVar[tuple[str, ...]] = ("conv_kernel", "qk_norm")
    vocab_size: Size | None = Field(None, ge=2)
    d_model: Size = Field(128, ge=1)
    layers: Depth = Field(2, ge=1)
    heads: Size = Field(4, ge=1)
    d_key: Size | None = Field(None, ge=1)
    d_value: Size | None = Field(None, ge=1)
    memory: MemoryConfig = MemoryConfig()
    conv_kernel: Taps = DEFAULT_CONV_KERNEL
    qk_norm: QKNorm = DEFAULT_QK_NORM
    output_gate: bool = True
    learned_initial: bool = True
    feature_memory: FeatureMemoryConfig | None = None
    levels: tuple[LevelConfig, ...] = ()
    composition: Composition = "sequential"
    aggregation: Aggregation = "sum"
    carry_levels: Levels = 15
    self_reference: SelfReferenceConfig | None = None
    attention: AttentionConfig | None = None
    mlp_ratio: float = Field(2.0, ge=0, le=MAX_SIZE)
    tie_embeddings: bool = True

    def conflicts(self) -> Conflicts:
        """Sizes that do not fit, settings without effect, and anything that the layers of a block refuse."""
        if self.d_model % self.heads and (self.d_key is None or self.d_value is None):
            yield ("heads",), f"must divide d_model={self.d_model}, got {self.heads}; or give d_key and d_value"
        hidden_width(self.d_model, self.mlp_ratio, "d_model")
        scans = _scans("", self, self.memory, self.d_model // self.heads)
        for field, (memory, key, value, _) in sorted(scans.items()):
            try:
                memory.structure.shapes(memory.feature_map.output_dim(key), value)
            except ConfigError as error:
                yield (field,), f"{error} (keys have width {key})"
        for field in filter(self._is_set, () if self.levels else _JOIN):
            yield (field,), f"{getattr(self, field)!r} joins levels, and there are none; give levels or leave it out"
        refers = self.self_reference is not None
        other = "self_reference" if refers else "levels" if self.levels else "attention"
        for field in filter(self._is_set, () if self.plain else ("memory", *_RULE, *(() if refers else _AROUND))):
            reason = f"belongs to a block's plain memory, but {other} takes its place; set it within {other}"
            yield (field,), f"{reason} where it has such a field, or leave it out"
        with faults_at("d_model"):  # on the meta device, so that layers refuse here what they would refuse later
            check_shapes({"embedding": (self.vocab_size or 1, self.d_model)}, "lower d_model")
            MemoryBlock(self, "layer", device="meta")

    @property
    def plain(self) -> bool:
        """True if blocks have the plain memory of the field `memory`: no levels, no self-reference, not attention
        alone."""
        return not (self.levels or self.self_reference is not None or self._attends_alone)

    @property
    def _attends_alone(self) -> bool:
        return self.attention is not None and not self.attention.has_memory

    def rules(self) -> dict[str, Scanned]:
        """Every memory of a block that scans a sequence, by its path in this config."""
        scans: dict[str, Scanned] = {}
        head = self.d_model // self.heads
        if self.plain:
            scans |= _scans("", self, self.memory, head)
        elif self.self_reference is not None:
            inner, features = self.self_reference, self.feature_memory
            scans["self_reference.memory"] = Scanned(inner.memory, head, head, inner.period if inner.refers else None)
            if features is not None:
                scans["feature_memory"] = Scanned(features, head, features.width(head))
        for index, level in enumerate(self.levels):
            scans |= _scans(f"levels[{index}].", level, level.rule, self.d_model // (level.heads or self.heads))
        return scans

    def _is_set(self, field: str) -> bool:
        return bool(getattr(self, field) != type(self).model_fields[field].default)


class _BlockFields(NamedTuple):
    memory: Any
    levels: CMSState


class BlockState(State, _BlockFields):
    """State of a block with levels after its memory: a pytree of tensors."""

    __slots__ = ()
    whole = ()


class MemoryBlock(Layers):
    """x + memory(norm(x)), then the same with levels if there are any, then x + mlp(x).

    The memory and the levels are those of a `LanguageModelConfig`, each a layer `(x, state, masks) -> (y, state)`. The
    state is the memory's, or with levels a `BlockState`. [LM-MIXER-D1]
    """

    shares: ClassVar[Shares] = "layers"

    def __init__(
        self, config: LanguageModelConfig, name: str, generator: torch.Generator | None = None, **place: Any
    ) -> None:
        super().__init__()
        norm = partial(RMSNorm, config.d_model, **place)
        memory, levels = _mixers(config, name, generator=generator, **place)
        self.memory_norm, self.memory = norm(), memory
        self.levels_norm = None if levels is None else norm()
        self.levels = levels
        hidden = hidden_width(config.d_model, config.mlp_ratio, "d_model")
        self.mlp = GatedMLP(config.d_model, hidden, generator, **place) if hidden else None

    def forward(self, x: Tensor, state: Any, *, mlp: bool = True, **masks: Mask) -> tuple[Tensor, Any]:
        """The block's output and its state after the last token; mlp=False omits the MLP, which the state does not
        need."""
        alone = mlp and state is not None and x.shape[1] == 1 and not torch.is_grad_enabled()
        if alone and masks.get("write_mask") is masks.get("reset_mask") is None:
            if (output := self._token(x, state)) is not None:
                return output
        after = None
        if self.levels is not None and state is not None:
            if not isinstance(state, BlockState):
                raise ShapeError(
                    "state of a block with levels after its memory must be a BlockState, got "
                    f"{type(state).__name__}; was it made by another model?"
                )
            state, after = state
        y, state = self.memory(self.memory_norm(x), state, **masks)
        x = x + y
        if self.levels is not None and self.levels_norm is not None:
            y, after = self.levels(self.levels_norm(x), after, **masks)
            x, state = x + y, BlockState(state, after)
        return (x + self.mlp(x) if mlp and self.mlp is not None else x), state

    def _token(self, x: Tensor, state: Any) -> tuple[Tensor, Any] | None:
        """`forward` for a single token, without torch's module calls, each of which takes as long as a product; the
        same bits, except with kernels. None if its modules are of other types, or have hooks."""
        parts: Any = self._modules
        norm, memory, mlp = map(parts.get, ("memory_norm", "memory", "mlp"))
        if parts.get("levels") is not None or type(mlp) is not GatedMLP or torch.compiler.is_compiling():
            return None
        inner: Any = mlp._modules
        norms, up, down = map(inner.get, ("norm", "up", "down"))
        maps = (up, nn.Linear), (down, nn.Linear)
        if not unheard((norm, RMSNorm), (memory, type(memory)), (mlp, GatedMLP), (norms, RMSNorm), *maps):
            return None
        linear = nn.functional.linear
        kernels = token_kernels(x, x.shape[-1], down._parameters["weight"].shape[1])
        _, hidden = add_norm(kernels, x, None, norm._parameters["weight"])
        y, state = memory.forward(hidden, state)
        x, hidden = add_norm(kernels, x, y, norms._parameters["weight"])
        hidden = gated_product(kernels, linear(hidden, up._parameters["weight"], up._parameters["bias"]))
        return x + linear(hidden, down._parameters["weight"], down._parameters["bias"]), state


def _mixers(config: LanguageModelConfig, name: str, **how: Any) -> tuple[Any, nn.Module | None]:
    """A block's memory, and the levels after it, if any."""
    sizes = config.d_model, config.heads
    around: dict[str, Any] = {"name": name, **how, **{field: getattr(config, field) for field in _AROUND}}
    memory: nn.Module | None = None
    levels: Callable[[], CMS] | None = None
    if config.levels:
        cms = CMSConfig(levels=config.levels, **{field: getattr(config, field) for field in _JOIN})
        levels = partial(CMS, *sizes, cms, name=f"{name} levels", **how)
    if config.self_reference is not None:
        memory = SelfReferential(*sizes, config.self_reference, **around)
    elif config.plain:
        around |= {field: getattr(config, field) for field in _RULE}
        memory = Memory(*sizes, config.memory, **around)
    elif levels is not None and not config._attends_alone:
        memory, levels = levels(), None
    if config.attention is not None:
        with faults_under("attention"):
            memory = Composed(*sizes, config.attention, memory, name=name, **how)
    # Levels are built last, so that parameters are drawn in the order of `reset_parameters`.
    return memory, None if levels is None else levels()


@named(*LanguageModelConfig.model_fields)
class LanguageModel(nn.Module):
    """Pre-norm blocks of memories and gated MLP between an embedding and a linear head.

    `model(tokens [B, T], state=None) -> (logits [B, T, vocab], state)`: any split of a sequence gives the same logits,
    and the cost of a token does not depend on the number of tokens before it. [LM-MODEL-D1]

    Args:
        config: sizes and memory, or a mapping of them; `vocab_size` must be set.
        generator: source of all draws; None uses torch's default generator.
    """

    shares: ClassVar[Shares] = "layers"
    block: ClassVar[type[MemoryBlock]] = MemoryBlock
    """Class of its blocks; a subclass may use another."""
    config_type: ClassVar[type[LanguageModelConfig]] = LanguageModelConfig

    def __init__(
        self,
        config: LanguageModelConfig | Mapping[str, Any],
        *,
        generator: torch.Generator | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(config, LanguageModelConfig):
            config = self.config_type.model_validate(config)
        config = config.validated()
        if config.vocab_size is None:
            raise ConfigError("vocab_size must be set to build a model", path=("vocab_size",))
        self.config = config
        place: dict[str, Any] = {"device": device, "dtype": dtype}
        self.embedding = blank(nn.Embedding, config.vocab_size, config.d_model, **place)
        self.blocks = nn.ModuleList(
            self.block(config, f"layer {index}", generator, **place) for index in range(config.layers)
        )
        self.norm = RMSNorm(config.d_model, **place)
        sizes = config.d_model, config.vocab_size
        self.head = None if config.tie_embeddings else blank(nn.Linear, *sizes, bias=False, **place)
        redraw(generator, self.embedding, self.head)

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draws every parameter anew from `generator` (None: torch's default generator)."""
        redraw(generator, *self.blocks, self.norm, self.embedding, self.head)

    def forward(
        self, tokens: Tensor, state: tuple[Any, ...] | None = None, *, write_mask: Mask = None, reset_mask: Mask = None
    ) -> tuple[Tensor, tuple[Any, ...]]:
        """Logits of the next token at every position, and the state after the last one."""
        expect_tokens(tokens)
        if state is not None and len(state) != len(self.blocks):
            wanted = f"one state for each of {len(self.blocks)} layers"
            raise ShapeError(f"state must hold {wanted}, got {len(state)}; was it made by another model?")
        x = self.embedded(tokens)
        carried: list[Any] = []
        masks: dict[str, Any] = {"write_mask": write_mask, "reset_mask": reset_mask}
        for block, before in zip(self.blocks, state or (None,) * len(self.blocks), strict=True):
            recorded = isinstance(before, Recorded)
            x, after = advance(block, x, before, **masks) if recorded else block(x, before, **masks)
            carried.append(after)
        return self.logits(self.norm(x)), tuple(carried)

    def record(self, state: tuple[Any, ...] | None = None) -> tuple[Recorded, ...]:
        """A state (None: that before the first token) that from now on records at least the last 64 tokens, for
        `take_back`; longer calls are split in two. [LM-BACK-D1]"""
        return tuple(Recorded(before, ()) for before in state or (None,) * len(self.blocks))

    def take_back(self, state: tuple[Any, ...], count: int) -> tuple[Recorded, ...]:
        """A recorded state as it was `count` tokens ago, up to rounding, for example to reject a draft. [LM-BACK-D1]

        Raises:
            ConfigError: a state that is not recorded, or one with fewer recorded tokens.
        """
        if not all(isinstance(before, Recorded) for before in state):
            raise ConfigError("the state is not recorded; begin with `state = model.record(state)`")
        pairs = zip(self.blocks, state, strict=True)
        return tuple(take_back(partial(block, mlp=False), before, count) for block, before in pairs)

    def embedded(self, tokens: Tensor) -> Tensor:
        """Input of the first block `[B, T, d_model]`; `ShapeError` for tokens outside the vocabulary."""
        try:
            return self.scaled(self.embedding(tokens))
        except IndexError as error:  # raised on the CPU; a GPU reports it later, and less clearly
            raise outside_vocabulary(tokens, self.embedding.num_embeddings) or error from None

    def scaled(self, rows: Tensor) -> Tensor:
        """Rows of the embedding, scaled for the blocks: a tied head needs small rows, the blocks rows of unit scale."""
        return rows * self.config.d_model**0.5

    def logits(self, x: Tensor) -> Tensor:
        """Logits `[..., vocab]` of the normalised output of the last block."""
        return nn.functional.linear(x, self.embedding.weight) if self.head is None else self.head(x)


def _level(name: str, period: int) -> LevelConfig:
    """A level with a residual MLP memory; lr is divided by the period, so that a whole window makes equally long
    steps at every level."""
    memory = {"structure": {"kind": "mlp", "residual": True}, "algorithm": {"kind": "gd", "lr": 0.16 / period}}
    return LevelConfig(name=name, period=period, memory=MemoryConfig.model_validate(memory))


class HopeConfig(LanguageModelConfig):
    """A `LanguageModelConfig` that starts from HOPE's blocks. [LM-HOPE-D1]

    o = self-referential memory of x, then the levels, MLP memories in place of a transformer's MLP; their initial
    weights are learned, and do not decay. Projections are read at the start of every chunk of 16 tokens. Hope-Attention
    is `self_reference=None, attention={"kind": "attention", "window": 256}`.

    References: Nested Learning (Behrouz et al., 2025, arXiv 2512.24695), eq 94 to 97.
    """

    self_reference: SelfReferenceConfig | None = SelfReferenceConfig.model_validate(
        {"memory": {"retention": "decay"}, "chunk": 16}
    )
    levels: tuple[LevelConfig, ...] = (_level("fast", 16), _level("middle", 64), _level("slow", 256))
    mlp_ratio: float = 0.0


class Hope(LanguageModel):
    """The language model of a `HopeConfig`: `(tokens, state=None) -> (logits, state)`.

        model = Hope(HopeConfig(vocab_size=256, d_model=128, heads=4))
        logits, state = model(tokens)

    Everything else is as in `LanguageModel`.
    """

    config_type: ClassVar[type[LanguageModelConfig]] = HopeConfig


@lru_cache(maxsize=64)
def parameters_of(config: LanguageModelConfig) -> int:
    """Number of a model's parameters, computed from one of its blocks on the meta device."""
    one = LanguageModel(config.model_copy(update={"layers": 1}), device="meta")
    whole, block = (sum(p.numel() for p in module.parameters()) for module in (one, one.blocks[0]))
    return whole + (config.layers - 1) * block
