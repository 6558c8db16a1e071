"""Models built of memories."""

from hecate.models.config import LanguageModelConfig
from hecate.models.hope import Hope, HopeConfig
from hecate.models.language_model import LanguageModel

__all__ = ["Hope", "HopeConfig", "LanguageModel", "LanguageModelConfig"]
