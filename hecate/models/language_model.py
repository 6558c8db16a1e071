"""A language model whose token mixing is done by memories."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hecate.errors import ConfigError, ShapeError
from hecate.models.block import Block
from hecate.models.config import LanguageModelConfig
from hecate.nn.parameters import blank, draw_normal, source_of


class LanguageModel(nn.Module):
    """Pre-norm blocks of memories and gated MLP between an embedding and a linear head.

    `model(tokens [B, T], state=None) -> (logits [B, T, vocab], state)`: any split of a sequence gives the same logits,
    and a token costs the same whatever came before it. [LM-MODEL-D1]

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
            Block(config, f"layer {index}", generator, **place) for index in range(config.layers)
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
        state: tuple[Any, ...] | None = None,
        *,
        write_mask: Tensor | None = None,
        reset_mask: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Any, ...]]:
        """Logits of the next token at every position, and the state after the last one."""
        if tokens.dim() != 2 or tokens.dtype not in (torch.int64, torch.int32):
            raise ShapeError(f"tokens must be int64 or int32 [B, T], got {tokens.dtype} {list(tokens.shape)}")
        if state is not None and len(state) != len(self.blocks):
            raise ShapeError(
                f"state must hold one state for each of {len(self.blocks)} layers, got "
                f"{len(state)}; was it made by another model?"
            )
        # The tied head needs small rows, the blocks an input of unit scale.
        x = self._embed(tokens) * self.config.d_model**0.5
        carried: list[Any] = []
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
