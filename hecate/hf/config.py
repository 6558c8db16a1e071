"""`HecateConfig`: a language model's config as transformers keeps it in `config.json`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from transformers import PreTrainedConfig

from hecate.errors import ConfigError
from hecate.files import make_folder, refusing, write_file
from hecate.models import LanguageModelConfig

REMOTE = "modeling_hecate"
REMOTE_CODE = """# A model of hecate: pip install "hecate[hf]"
from hecate.hf import HecateConfig, HecateForCausalLM, HecateModel

__all__ = ["HecateConfig", "HecateForCausalLM", "HecateModel"]
"""
_CLASSES = {"AutoConfig": "HecateConfig", "AutoModel": "HecateModel", "AutoModelForCausalLM": "HecateForCausalLM"}


class HecateConfig(PreTrainedConfig):
    """Every field of a `LanguageModelConfig` under `model`, and what transformers asks of any config. [HF-CONFIG-D1]

    `vocab_size`, `hidden_size` and the like are read from `model`, so that none can differ from it. No `layer_types`:
    of layers that are all linear transformers knows no length, and `generate` asks for one.

    Args:
        model: a `LanguageModelConfig`, or its fields; None is that of bytes with every default.
        use_cache: whether a call that is not told returns its state.
        kwargs: any other field of transformers, such as `dtype` or `eos_token_id`.

    Raises:
        ConfigError: what `LanguageModelConfig` refuses, by its path, or a model without `vocab_size`.
    """

    model_type: ClassVar[str] = "hecate"
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values"]

    model: Any = None
    use_cache: bool = True

    def __post_init__(self, **kwargs: Any) -> None:
        """Checks `model` and keeps it as plain values."""
        self._set({"vocab_size": 256} if self.model is None else self.model)
        super().__post_init__(**{name: value for name, value in kwargs.items() if name != "auto_map"})

    @property
    def language_model(self) -> LanguageModelConfig:
        """The config of the model itself."""
        return LanguageModelConfig.model_validate(self.model)

    def _set(self, model: LanguageModelConfig | Mapping[str, Any]) -> None:
        if isinstance(model, LanguageModelConfig):
            model = model.model_dump()
        try:
            made = LanguageModelConfig.model_validate(model)
        except ConfigError as error:
            raise error.under("model") from None
        if made.vocab_size is None:
            raise ConfigError("must be set to build a model", path=("model", "vocab_size"))
        self.model = made.model_dump(mode="json")

    @property
    def vocab_size(self) -> int:
        """Tokens that the model knows."""
        return int(self.model["vocab_size"])

    @vocab_size.setter
    def vocab_size(self, size: int) -> None:
        self._set({**self.model, "vocab_size": size})

    @property
    def tie_word_embeddings(self) -> bool:
        """Whether the output layer has the embedding's weights."""
        return bool(self.model["tie_embeddings"])

    @tie_word_embeddings.setter
    def tie_word_embeddings(self, tied: bool) -> None:
        if bool(tied) != self.tie_word_embeddings:
            raise ConfigError(
                f"must be {self.tie_word_embeddings}, as model.tie_embeddings is; change that one",
                path=("tie_word_embeddings",),
            )

    @property
    def hidden_size(self) -> int:
        """Width."""
        return int(self.model["d_model"])

    @property
    def num_hidden_layers(self) -> int:
        """Blocks."""
        return int(self.model["layers"])

    @property
    def num_attention_heads(self) -> int:
        """Memories of a block."""
        return int(self.model["heads"])

    def save_pretrained(self, save_directory: str | os.PathLike[str], *args: Any, **kwargs: Any) -> None:
        """Writes `config.json`, and beside it the three lines that are the model's code to others. [HF-REMOTE-D1]"""
        self.auto_map = {auto: f"{REMOTE}.{name}" for auto, name in _CLASSES.items()}
        folder = Path(save_directory)
        with refusing(f"write {folder}", "choose another folder"):
            make_folder(folder)
            write_file(folder / f"{REMOTE}.py", REMOTE_CODE)
        super().save_pretrained(save_directory, *args, **kwargs)

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoConfig") -> None:
        """Nothing is left to do: every folder that is written names its classes."""
