"""Models built of memories."""

from hecate.models.language_model import LanguageModel, LanguageModelConfig

__all__ = ["LanguageModel", "LanguageModelConfig"]
