"""Models built of memories."""

from hecate.models.config import LanguageModelConfig
from hecate.models.hope import Hope, HopeConfig
from hecate.models.language_model import LanguageModel
from hecate.models.linear_transformer import LinearTransformer, LinearTransformerConfig

__all__ = ["Hope", "HopeConfig", "LanguageModel", "LanguageModelConfig", "LinearTransformer", "LinearTransformerConfig"]
