"""`HecateConfig`: a language model's config as transformers keeps it in `config.json`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from transformers import PreTrainedConfig

from hecate.errors import ConfigError, Problem, install_line, shorten
from hecate.files import make_folder, refusing, write_file
from hecate.models import LanguageModelConfig

REMOTE = "modeling_hecate"
# What stands in `try` is not what transformers tells to install by its name, which is another project's on the index.
REMOTE_CODE = f"""try:
    from hecate.hf import HecateConfig, HecateForCausalLM, HecateModel
except ModuleNotFoundError as error:
    raise ImportError({f"this is a model of hecate, which is not installed: {install_line('hf')}"!r}) from error

__all__ = ["HecateConfig", "HecateForCausalLM", "HecateModel"]
"""
_CLASSES = {"AutoConfig": "HecateConfig", "AutoModel": "HecateModel", "AutoModelForCausalLM": "HecateForCausalLM"}
ALIASES = {
    "hidden_size": "d_model", "num_hidden_layers": "layers", "num_attention_heads": "heads",
    "tie_word_embeddings": "tie_embeddings",
}  # fmt: skip
"""Fields of a `LanguageModelConfig` by the names that transformers has for them."""
_FIELDS = {**{name: name for name in LanguageModelConfig.model_fields}, **ALIASES}
# What transformers takes of any config beside the fields of `PreTrainedConfig`.
_THEIRS = frozenset({
    "attn_implementation", "bos_token_id", "eos_token_id", "experts_implementation", "model_type", "name_or_path",
    "num_labels", "output_attentions", "pad_token_id", "quantization_config", "sep_token_id", "torch_dtype",
})  # fmt: skip


class HecateConfig(PreTrainedConfig):
    """A `LanguageModelConfig` under `model`, whole, and what transformers asks of any config. [HF-CONFIG-D1]

        HecateConfig(vocab_size=256, hidden_size=512, num_hidden_layers=8, memory="titans")

    Every field of the model, and transformers' name of it, is read from `model`, so that none can differ from it; to
    set one changes that field alone. No `layer_types`: of layers that are all linear transformers knows no length, and
    `generate` asks for one.

    Args:
        model: a `LanguageModelConfig`, or its fields; None is that of bytes with every default.
        use_cache: whether a call that is not told returns its state.
        kwargs: fields of `LanguageModelConfig` in place of `model`, by their names or as `hidden_size`,
            `num_hidden_layers`, `num_attention_heads` and `tie_word_embeddings`; any field of transformers' own, such
            as `dtype` or `eos_token_id`.

    Raises:
        ConfigError: what `LanguageModelConfig` refuses, by its path, a name that is no field's, two names of a field
            that disagree, or a model without `vocab_size`.
    """

    model_type: ClassVar[str] = "hecate"
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values"]

    model: Any = None
    use_cache: bool = True

    def __post_init__(self, **kwargs: Any) -> None:
        """Checks `model` and keeps it as plain values."""
        kwargs.pop("auto_map", None)
        # A file that transformers has written may have attributes of anybody's; a caller meant a field by every name.
        others = _THEIRS if self.transformers_version is None else kwargs.keys() - _FIELDS.keys()
        named = {name: kwargs.pop(name) for name in sorted(kwargs.keys() - others, key=lambda n: (n in ALIASES, n))}
        self._set(self.model, named)
        super().__post_init__(**kwargs)

    @property
    def language_model(self) -> LanguageModelConfig:
        """The config of the model itself."""
        return LanguageModelConfig.model_validate(self.model)

    def _set(self, model: LanguageModelConfig | Mapping[str, Any] | None, named: Mapping[str, Any]) -> None:
        """Takes a model, or without one its fields by name; beside a model a field repeats what it says."""
        words: dict[str, str] = {}
        for name, value in named.items():
            field = ALIASES.get(name, name)
            if words.setdefault(field, name) != name and named[words[field]] != value:
                both = f"{shorten(value)} and {shorten(named[field])}"
                raise ConfigError(f"is {field} in other words, and both are set: {both}; keep one", (name,))
        try:
            whole = LanguageModelConfig() if model is None else LanguageModelConfig.model_validate(_plain(model))
        except ConfigError as error:
            raise error.under("model") from None
        fields = {field: named[name] for field, name in words.items()}
        before = {"vocab_size": 256} if model is None else whole.model_dump()
        try:
            made = LanguageModelConfig.model_validate({**before, **fields})
        except ConfigError as error:
            named_so = [(*(words.get(str(at), at) for at in path[:1]), *path[1:]) for path, _ in error.problems]
            raise ConfigError(map(Problem, named_so, (item.message for item in error.problems))) from None
        for field, name in words.items() if model is not None else ():
            own = getattr(whole, field)
            if getattr(made, field) != own and (field, own) != ("vocab_size", None):
                raise ConfigError(f"must be {shorten(own)}, as model.{field} is; change that one", (name,))
        if made.vocab_size is None:
            path = ("vocab_size",) if model is None else ("model", "vocab_size")
            raise ConfigError("must be set to build a model", path)
        self.model = made.model_dump(mode="json")

    def to_dict(self) -> dict[str, Any]:
        """As of any config, with the sizes under the names by which other programs ask for them."""
        return {**super().to_dict(), **{name: self.model[_FIELDS[name]] for name in ("vocab_size", *ALIASES)}}

    def save_pretrained(self, save_directory: str | os.PathLike[str], *args: Any, **kwargs: Any) -> None:
        """Writes `config.json`, and beside it the lines that are the model's code to others. [HF-REMOTE-D1]"""
        self.auto_map = {auto: f"{REMOTE}.{name}" for auto, name in _CLASSES.items()}
        folder = Path(save_directory)
        with refusing(f"write {folder}", "choose another folder"):
            make_folder(folder)
            write_file(folder / f"{REMOTE}.py", REMOTE_CODE)
        super().save_pretrained(save_directory, *args, **kwargs)

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoConfig") -> None:
        """Nothing is left to do: every folder that is written names its classes."""


def _plain(model: LanguageModelConfig | Mapping[str, Any]) -> Mapping[str, Any]:
    return model.model_dump() if isinstance(model, LanguageModelConfig) else model


def _field(name: str, field: str) -> property:
    """A field of the model, as transformers may set one of its own."""

    def get(self: HecateConfig) -> Any:
        return self.model[field]

    def change(self: HecateConfig, value: Any) -> None:
        if name == "tie_word_embeddings" and value != self.model[field]:
            raise ConfigError(f"must be {self.model[field]}, as model.{field} is; change that one", (name,))
        self._set(None, {**self.model, field: value})

    return property(get, change)


for _name, _of in _FIELDS.items():
    setattr(HecateConfig, _name, _field(_name, _of))
