"""HOPE: a self-modifying memory followed by a continuum of memories."""

from __future__ import annotations

from hecate.cms import LevelConfig, SelfReferenceConfig
from hecate.models.config import LanguageModelConfig
from hecate.models.language_model import LanguageModel
from hecate.rule import MemoryConfig


def _level(name: str, period: int) -> LevelConfig:
    """A residual MLP memory; the steps that a window sums up are as long for every period."""
    memory = {"structure": {"kind": "mlp", "residual": True}, "algorithm": {"kind": "gd", "lr": 0.16 / period}}
    return LevelConfig(name=name, period=period, memory=MemoryConfig.model_validate(memory))


class HopeConfig(LanguageModelConfig):
    """A `LanguageModelConfig` that starts from HOPE's blocks. [LM-HOPE-D1]

    o = self-referential memory of x, then the levels, MLP memories that stand where a transformer has its MLP: their
    weights are learned, and forgotten by no decay. Projections are read where chunks of 16 tokens start. Hope-Attention
    is
    `self_reference=None, attention={"kind": "attention", "window": 256}`.

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
