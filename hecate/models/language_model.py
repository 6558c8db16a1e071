"""A language model whose token mixing is done by memories."""

from __future__ import annotations

from typing import Any, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from hecate.errors import ConfigError, ShapeError
from hecate.nn import LayerState, Memory
from hecate.nn.parameters import blank, draw_normal, source_of
from hecate.rule import MemoryConfig
from hecate.variant import Config


class LanguageModelConfig(Config):
    """Sizes of a `LanguageModel` and the memory of its layers.

    Fields:
        vocab_size: tokens; None is filled from the data.
        d_model, layers, heads: width, depth, memories per layer.
        d_key, d_value: widths per head; None means d_model // heads.
        memory: rule and conventions of every layer's memory.
        conv_kernel, qk_norm, output_gate, learned_initial, feature_memory: as in
            `hecate.nn.Memory`.
        mlp_ratio: hidden width of the gated MLP over d_model; 0 leaves it out.
        tie_embeddings: whether the output layer shares the embedding's weights.
    """

    vocab_size: int | None = Field(None, ge=2)
    d_model: int = Field(128, ge=1)
    layers: int = Field(2, ge=1)
    heads: int = Field(4, ge=1)
    d_key: int | None = Field(None, ge=1)
    d_value: int | None = Field(None, ge=1)
    memory: MemoryConfig = MemoryConfig()
    conv_kernel: int = Field(4, ge=0)
    qk_norm: Literal["none", "l2", "rms"] = "l2"
    output_gate: bool = True
    learned_initial: bool = True
    feature_memory: MemoryConfig | None = None
    mlp_ratio: float = Field(2.0, ge=0)
    tie_embeddings: bool = True

    @model_validator(mode="after")
    def _sizes(self) -> LanguageModelConfig:
        if self.d_model % self.heads and (self.d_key is None or self.d_value is None):
            raise ConfigError(
                f"must divide d_model={self.d_model}, got {self.heads}; or give d_key and d_value",
                path=("heads",),
            )
        if self.conv_kernel == 1:
            raise ConfigError("must be 0 (none) or at least 2, got 1", path=("conv_kernel",))
        if 0 < self.mlp_ratio * self.d_model < 1:
            raise ConfigError(
                f"gives no hidden unit at d_model={self.d_model}, got {self.mlp_ratio:g}; set it "
                f"to 0 or to at least {1 / self.d_model:g}",
                path=("mlp_ratio",),
            )
        d_key = self.d_key or self.d_model // self.heads
        d_value = self.d_value or self.d_model // self.heads
        own = {"memory": (self.memory, d_value), "feature_memory": (self.feature_memory, d_key)}
        for field, (memory, width) in own.items():
            try:
                if memory is not None:
                    memory.structure.shapes(memory.feature_map.output_dim(d_key), width)
            except ConfigError as error:
                raise ConfigError(f"{error} (keys have width {d_key})", path=(field,)) from None
        return self


class LanguageModel(nn.Module):
    """Pre-norm blocks of memory and gated MLP between an embedding and a linear head.

    `model(tokens [B, T], state=None) -> (logits [B, T, vocab], state)`: any split of a sequence
    gives the same logits, and a token costs the same whatever came before it. [LM-MODEL-D1]

    Args:
        config: sizes and memory; `vocab_size` must be set.
        generator: source of all draws; None uses torch's default generator.
    """

    def __init__(
        self,
        config: LanguageModelConfig,
        *,
        generator: torch.Generator | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        config = config.validated()
        if config.vocab_size is None:
            raise ConfigError("vocab_size must be set to build a model", path=("vocab_size",))
        self.config = config
        place: dict[str, Any] = {"device": device, "dtype": dtype}
        self.embedding = blank(nn.Embedding, config.vocab_size, config.d_model, **place)
        self.blocks = nn.ModuleList(
            _Block(config, f"layer {index}", generator, **place) for index in range(config.layers)
        )
        self.norm = nn.RMSNorm(config.d_model, eps=1e-6, **place)
        self.head = None
        if not config.tie_embeddings:
            self.head = blank(nn.Linear, config.d_model, config.vocab_size, bias=False, **place)
        if self.embedding.weight.device.type != "meta":
            self._draw(generator)

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draws every parameter anew from `generator` (None: torch's default generator)."""
        for block in self.blocks:
            block.reset_parameters(generator)  # type: ignore[operator]
        nn.init.ones_(self.norm.weight)
        self._draw(generator)

    def _draw(self, generator: torch.Generator | None) -> None:
        for layer in (self.embedding, self.head):
            if layer is not None:
                draw_normal(layer.weight, self.config.d_model**-0.5, source_of(generator))

    def forward(
        self,
        tokens: Tensor,
        state: tuple[LayerState, ...] | None = None,
        *,
        write_mask: Tensor | None = None,
        reset_mask: Tensor | None = None,
    ) -> tuple[Tensor, tuple[LayerState, ...]]:
        """Logits of the next token at every position, and the state after the last one."""
        if tokens.dim() != 2 or tokens.dtype not in (torch.int64, torch.int32):
            raise ShapeError(
                f"tokens must be int64 or int32 [B, T], got {tokens.dtype} {list(tokens.shape)}"
            )
        if state is not None and len(state) != len(self.blocks):
            raise ShapeError(
                f"state must hold one LayerState for each of {len(self.blocks)} layers, got "
                f"{len(state)}; was it made by another model?"
            )
        # The tied head needs small rows, the blocks an input of unit scale.
        x = self._embed(tokens) * self.config.d_model**0.5
        carried: list[LayerState] = []
        for index, block in enumerate(self.blocks):
            before = None if state is None else state[index]
            x, after = block(x, before, write_mask=write_mask, reset_mask=reset_mask)
            carried.append(after)
        weight = self.embedding.weight if self.head is None else self.head.weight
        return nn.functional.linear(self.norm(x), weight), tuple(carried)

    def _embed(self, tokens: Tensor) -> Tensor:
        try:
            x: Tensor = self.embedding(tokens)
        except IndexError:  # on the CPU; a GPU reports it by itself, later and less clearly
            least, most = tokens.aminmax()
            raise ShapeError(
                f"tokens must be in 0..{self.embedding.num_embeddings - 1}, the vocabulary, got "
                f"{int(least)}..{int(most)}"
            ) from None
        return x


class _Block(nn.Module):
    def __init__(
        self,
        config: LanguageModelConfig,
        name: str,
        generator: torch.Generator | None,
        *,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        place: dict[str, Any] = {"device": device, "dtype": dtype}
        self.memory_norm = nn.RMSNorm(config.d_model, eps=1e-6, **place)
        self.memory = Memory(
            config.d_model,
            config.heads,
            config.memory,
            d_key=config.d_key,
            d_value=config.d_value,
            conv_kernel=config.conv_kernel,
            qk_norm=config.qk_norm,
            output_gate=config.output_gate,
            learned_initial=config.learned_initial,
            feature_memory=config.feature_memory,
            name=name,
            generator=generator,
            **place,
        )
        hidden = int(config.mlp_ratio * config.d_model)
        self.mlp = _GatedMLP(config.d_model, hidden, **place) if hidden else None
        if self.mlp is not None and self.mlp.down.weight.device.type != "meta":
            self.mlp.reset_parameters(generator)

    def reset_parameters(self, generator: torch.Generator | None) -> None:
        nn.init.ones_(self.memory_norm.weight)
        self.memory.reset_parameters(generator)
        if self.mlp is not None:
            self.mlp.reset_parameters(generator)

    def forward(
        self,
        x: Tensor,
        state: LayerState | None,
        *,
        write_mask: Tensor | None,
        reset_mask: Tensor | None,
    ) -> tuple[Tensor, LayerState]:
        y, after = self.memory(
            self.memory_norm(x), state, write_mask=write_mask, reset_mask=reset_mask
        )
        x = x + y
        return (x if self.mlp is None else x + self.mlp(x)), after


class _GatedMLP(nn.Module):
    """W_down(silu(W_gate x) * W_up x) of the normalised input."""

    def __init__(
        self,
        width: int,
        hidden: int,
        *,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        place: dict[str, Any] = {"bias": False, "device": device, "dtype": dtype}
        self.norm = nn.RMSNorm(width, eps=1e-6, device=device, dtype=dtype)
        self.up = blank(nn.Linear, width, 2 * hidden, **place)
        self.down = blank(nn.Linear, hidden, width, **place)

    def reset_parameters(self, generator: torch.Generator | None) -> None:
        nn.init.ones_(self.norm.weight)
        for linear in (self.up, self.down):
            draw_normal(linear.weight, linear.in_features**-0.5, source_of(generator))

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.up(self.norm(x)).chunk(2, -1)
        return self.down(nn.functional.silu(gate) * value)
