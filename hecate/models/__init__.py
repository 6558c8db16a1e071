"""Models whose layers are memories."""

from hecate.models.language_model import Hope, HopeConfig, LanguageModel, LanguageModelConfig
from hecate.models.linear_transformer import LinearTransformer, LinearTransformerConfig

__all__ = ["Hope", "HopeConfig", "LanguageModel", "LanguageModelConfig", "LinearTransformer", "LinearTransformerConfig"]
