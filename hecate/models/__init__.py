"""Models built of memories."""

from hecate.models.config import LanguageModelConfig
from hecate.models.language_model import LanguageModel

__all__ = ["LanguageModel", "LanguageModelConfig"]
