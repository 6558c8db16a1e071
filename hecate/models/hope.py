"""HOPE: a self-modifying memory followed by a continuum of memories."""

from __future__ import annotations

from hecate.cms import LevelConfig, SelfReferenceConfig
from hecate.models.config import LanguageModelConfig
from hecate.models.language_model import LanguageModel
from hecate.rule import MemoryConfig

_BLOCK = MemoryConfig.model_validate(
    {
        "structure": {"kind": "mlp", "residual": True},
        "retention": "decay",
        "algorithm": {"kind": "gd", "lr": 0.1},
    }
)


class HopeConfig(LanguageModelConfig):
    """A `LanguageModelConfig` that starts from HOPE's blocks. [LM-HOPE-D1]

    o = self-referential memory of x, then the levels, MLP memories that stand where a transformer
    has its MLP; the slower a level the more tokens its steps average over. Projections are read
    where chunks of 16 tokens start. Hope-Attention is
    `self_reference=None, attention={"kind": "attention", "window": 256}`.

    References: Nested Learning (Behrouz et al., 2025, arXiv 2512.24695), eq 94 to 97.
    """

    self_reference: SelfReferenceConfig | None = SelfReferenceConfig.model_validate(
        {"memory": {"retention": "decay"}, "chunk": 16}
    )
    levels: tuple[LevelConfig, ...] = tuple(
        LevelConfig(name=name, period=period, memory=_BLOCK)
        for name, period in (("fast", 16), ("middle", 64), ("slow", 256))
    )
    mlp_ratio: float = 0.0


class Hope(LanguageModel):
    """The language model of a `HopeConfig`: `(tokens, state=None) -> (logits, state)`.

        model = Hope(HopeConfig(vocab_size=256, d_model=128, heads=4))
        logits, state = model(tokens)

    Everything else is as in `LanguageModel`.
    """
