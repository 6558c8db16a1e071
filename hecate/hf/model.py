"""A `LanguageModel` of hecate and its config as a model and a config of transformers: `HecateConfig`, `HecateModel` and
`HecateForCausalLM`."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NoReturn, Self

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.generation.continuous_batching.requests import GenerationOutput, RequestStatus
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.utils import can_return_tuple, logging

from hecate.checks import check_room, expect, expect_tokens
from hecate.errors import ConfigError, Problem, faults_under, install_line, shorten
from hecate.files import make_folder, refusing, write_file
from hecate.hf.cache import (
    StateLayer,
    document_starts,
    no_continuous_batching,
    record_drafts,
    state_layers,
    written_tokens,
)
from hecate.models import LanguageModel, LanguageModelConfig
from hecate.models.language_model import MemoryBlock, parameters_of
from hecate.nn import ShortConv
from hecate.nn.parameters import redraw
from hecate.serve import Request, Scheduler
from hecate.train.evaluate import evaluating

REMOTE = "modeling_hecate"
# transformers does not check imports inside `try`; for others it says to install the package of that name, and `hecate`
# on the package index is another project.
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
"""Fields of a `LanguageModelConfig` by transformers' names for them."""
_FIELDS = {**{name: name for name in LanguageModelConfig.model_fields}, **ALIASES}
# Further arguments that transformers accepts in any config, besides the fields of `PreTrainedConfig`.
_THEIRS = frozenset({
    "attn_implementation", "bos_token_id", "eos_token_id", "experts_implementation", "model_type", "name_or_path",
    "num_labels", "output_attentions", "pad_token_id", "quantization_config", "sep_token_id", "torch_dtype",
})  # fmt: skip


class HecateConfig(PreTrainedConfig):
    """A config of transformers with a complete `LanguageModelConfig` in its field `model`. [HF-CONFIG-D1]

        HecateConfig(vocab_size=256, hidden_size=512, num_hidden_layers=8, memory="titans")

    Every field of the model, also under transformers' name, is an attribute that reads from `model`, so that none can
    disagree with it; setting one changes that field. There are no `layer_types`: if all layers are linear, transformers
    knows no length, which `generate` needs.

    Args:
        model: a `LanguageModelConfig`, or its fields; None means 256 tokens and defaults.
        use_cache: whether calls return their state by default.
        kwargs: fields of `LanguageModelConfig` in place of `model`, by their names or as `hidden_size`,
            `num_hidden_layers`, `num_attention_heads` and `tie_word_embeddings`; and any field of transformers' own,
            such as `dtype` or `eos_token_id`.

    Raises:
        ConfigError: anything that `LanguageModelConfig` refuses, by its path; an unknown name; two names of the same
            field that disagree; a model without `vocab_size`.
    """

    model_type: ClassVar[str] = "hecate"
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values"]

    model: Any = None
    use_cache: bool = True

    def __post_init__(self, **kwargs: Any) -> None:
        """Validates `model` and stores it as plain values."""
        kwargs.pop("auto_map", None)
        # A file written by transformers may have any attributes; if a caller gives a name, it must be a field.
        others = _THEIRS if self.transformers_version is None else kwargs.keys() - _FIELDS.keys()
        named = {name: kwargs.pop(name) for name in sorted(kwargs.keys() - others, key=lambda n: (n in ALIASES, n))}
        self._set(self.model, named)
        super().__post_init__(**kwargs)

    @property
    def language_model(self) -> LanguageModelConfig:
        """The config of the model itself."""
        return LanguageModelConfig.model_validate(self.model)

    def _set(self, model: LanguageModelConfig | Mapping[str, Any] | None, named: Mapping[str, Any]) -> None:
        """Sets `model` from a model, or without one from fields by name; fields beside a model must agree with it."""
        words: dict[str, str] = {}
        for name, value in named.items():
            field = ALIASES.get(name, name)
            if words.setdefault(field, name) != name and named[words[field]] != value:
                both = f"{shorten(value)} and {shorten(named[field])}"
                raise ConfigError(f"is {field} in other words, and both are set: {both}; keep one", (name,))
        with faults_under("model"):
            whole = LanguageModelConfig() if model is None else LanguageModelConfig.model_validate(model)
        fields = {field: named[name] for field, name in words.items()}
        before = {"vocab_size": 256} if model is None else whole.model_dump()
        try:
            config = LanguageModelConfig.model_validate({**before, **fields})
        except ConfigError as error:
            named_so = [(*(words.get(str(at), at) for at in path[:1]), *path[1:]) for path, _ in error.problems]
            raise ConfigError(map(Problem, named_so, (item.message for item in error.problems))) from None
        for field, name in words.items() if model is not None else ():
            expected = getattr(whole, field)
            if getattr(config, field) != expected and (field, expected) != ("vocab_size", None):
                raise ConfigError(f"must be {shorten(expected)}, as model.{field} is; change that one", (name,))
        if config.vocab_size is None:
            path = ("vocab_size",) if model is None else ("model", "vocab_size")
            raise ConfigError("must be set to build a model", path)
        self.model = config.model_dump(mode="json")

    def to_dict(self) -> dict[str, Any]:
        """The config as a dict, including sizes under the names that other programs use."""
        return {**super().to_dict(), **{name: self.model[_FIELDS[name]] for name in ("vocab_size", *ALIASES)}}

    def save_pretrained(self, save_directory: str | os.PathLike[str], *args: Any, **kwargs: Any) -> None:
        """Writes `config.json`, and beside it the file with which transformers finds the model's code.
        [HF-REMOTE-D1]"""
        self.auto_map = {auto: f"{REMOTE}.{name}" for auto, name in _CLASSES.items()}
        folder = Path(save_directory)
        with refusing(f"write {folder}", "choose another folder"):
            make_folder(folder)
            write_file(folder / f"{REMOTE}.py", REMOTE_CODE)
        super().save_pretrained(save_directory, *args, **kwargs)

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoConfig") -> None:
        """Does nothing: every folder that is written names its classes."""


def _field(name: str, field: str) -> property:
    """A property that reads and sets a field of the model under a name."""

    def get(self: HecateConfig) -> Any:
        return self.model[field]

    def change(self: HecateConfig, value: Any) -> None:
        if name == "tie_word_embeddings" and value != self.model[field]:
            raise ConfigError(f"must be {self.model[field]}, as model.{field} is; change that one", (name,))
        self._set(None, {**self.model, field: value})

    return property(get, change)


for _name, _of in _FIELDS.items():
    setattr(HecateConfig, _name, _field(_name, _of))


# The models.

_LOG = logging.get_logger(__name__)
# Arguments that callers pass to any model, and that have no effect here.
_UNREAD = frozenset({"cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx", "cache_position"})
_OF_LOSS = frozenset({"num_items_in_batch", "shift_labels"})
# Settings of a GenerationConfig that are used here, and those that do not affect tokens; any other that is set is
# refused.
_READ = {"max_new_tokens", "max_length", "do_sample", "temperature", "top_k", "top_p", "eos_token_id"}
_SILENT = {
    "pad_token_id", "bos_token_id", "use_cache", "transformers_version", "disable_compile", "is_assistant",
    "return_dict_in_generate", "remove_invalid_values",
}  # fmt: skip


class HecateBlock(GradientCheckpointingLayer, MemoryBlock):
    """A block with gradient checkpointing by transformers: recomputed in the backward pass instead of stored."""


class _Blocks(LanguageModel):
    block = HecateBlock


def _check_room(config: HecateConfig, each: int) -> None:
    """Refuses a model whose parameters, with `each` bytes per number, this machine cannot hold."""
    count = parameters_of(config.language_model)
    check_room(each * count, f"model: has {count:,} parameters", "lower d_model or layers, or take a larger machine")


class HecatePreTrainedModel(PreTrainedModel):
    """Base of both models, with their settings for transformers."""

    config_class = HecateConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules: ClassVar[list[str]] = ["HecateBlock"]
    _supports_sdpa = True

    def _initialize_weights(self, module: nn.Module, is_custom_code: bool = False) -> None:
        super()._initialize_weights(module, False)  # True would skip modules without parameters of their own

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Initialises weights that a checkpoint lacks as hecate does, and leaves all others."""
        if isinstance(module, LanguageModel):
            named = [*module.named_parameters(), *module.named_buffers()]
            missing = {name: tensor for name, tensor in named if not getattr(tensor, "_is_hf_initialized", False)}
            drawn = LanguageModel(module.config, device="cpu").state_dict() if missing else {}
            for name, tensor in missing.items():
                tensor.copy_(drawn[name])
        elif isinstance(module, nn.Linear | nn.Embedding) and not getattr(module.weight, "_is_hf_initialized", False):
            redraw(None, module)

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: str | os.PathLike[str], *args: Any, config: Any = None, **kwargs: Any
    ) -> Any:
        """Loads a model as transformers does. The config of a folder may claim any size, so a model that this machine
        cannot hold is refused before its weights are read, unless it is dispatched to devices or quantised."""
        name = pretrained_model_name_or_path
        if config is None and os.path.isdir(name):  # noqa: PTH112 - a name of the hub may be no path
            config = cls.config_class.from_pretrained(name)
        if isinstance(config, HecateConfig) and not {"device_map", "quantization_config"} & kwargs.keys():
            _check_room(config, torch.bfloat16.itemsize)
        return super().from_pretrained(name, *args, config=config, **kwargs)

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoModel") -> None:
        """Does nothing: every folder that is written names its classes."""


class HecateModel(HecatePreTrainedModel):
    """Embedding, blocks and final norm: tokens `[B, T]` to hidden states `[B, T, d_model]`. [HF-MODEL-D1]

    `lm` is the `LanguageModel` itself, with its parameter names, for everything that hecate does with one.

    Args:
        config: config of the model; weights that are not loaded are drawn from torch's default generator.
    """

    def __init__(self, config: HecateConfig) -> None:
        super().__init__(config)
        if torch.get_default_device().type != "meta":
            _check_room(config, torch.get_default_dtype().itemsize)
        self.lm = _Blocks(config.language_model)
        for layer in self.lm.modules():
            if isinstance(layer, ShortConv):
                layer.inert = True  # padding may be anywhere in a row
        for tensor in self.lm.state_dict(keep_vars=True).values():
            tensor._is_hf_initialized = not tensor.is_meta
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        """The embedding layer."""
        return self.lm.embedding

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        """Replaces the embedding; its size becomes the vocabulary's."""
        self.lm.embedding = value
        self.lm.config = self.lm.config.model_copy(update={"vocab_size": value.num_embeddings})

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        cu_seq_lens_q: Tensor | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """Hidden states, and the state after the last token in `past_key_values`.

        Args:
            input_ids: `[B, T]`; or `inputs_embeds`, rows of the embedding `[B, T, d_model]`.
            attention_mask: `[B, T]`, or of all tokens so far; 0 at padding, which is neither read nor written.
            position_ids: `[B, T]`; a 0 after other tokens begins another document in the row, and without
                attention_mask so does any step other than 1.
            past_key_values: the cache with the states after earlier tokens; it is updated.
            use_cache: whether to make a cache if none is given; None means as in the config, but not in training. With
                gradient checkpointing in training no cache is made, with a warning.
            cu_seq_lens_q: `[N + 1]`, the positions at which the documents of a single row begin, and its length.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ConfigError("give either input_ids or inputs_embeds")
        if inputs_embeds is None:
            expect_tokens(input_ids, "input_ids")
        else:
            expect(inputs_embeds, "B T d_model", name="inputs_embeds")
        _check_known(kwargs)
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training
        if self.training and self.is_activation_checkpointing:
            if past_key_values is not None:
                raise ConfigError(
                    "past_key_values and activation checkpointing exclude each other in training: drop one"
                )
            if use_cache:
                _LOG.warning_once(
                    "`use_cache=True` is incompatible with gradient checkpointing in training: setting "
                    "`use_cache=False`, so past_key_values is None and the next call starts without a past."
                )
            use_cache = False
        if use_cache and past_key_values is None:
            past_key_values = Cache(layers=[StateLayer() for _ in self.lm.blocks])
        layers = None if past_key_values is None else state_layers(past_key_values, len(self.lm.blocks))
        inputs: Any = input_ids if inputs_embeds is None else inputs_embeds
        past = None if layers is None else layers[0]
        written = written_tokens(attention_mask, inputs.shape[1], past)
        starts = document_starts(position_ids, cu_seq_lens_q, written, inputs.shape[:2], past)
        if inputs_embeds is not None:
            x = self.lm.scaled(inputs_embeds)
        else:  # the padding token of a tokenizer may be outside the model's vocabulary
            x = self.lm.embedded(inputs if written is None else inputs.masked_fill(~written, 0))
        hidden_states = []
        for index, block in enumerate(self.lm.blocks):
            hidden_states.append(x)
            if layers is None:
                x, _ = block(x, None, write_mask=written, reset_mask=starts)
            else:
                x = layers[index].advance(block, x, written, starts, counts=not index)
        x = self.lm.norm(x)
        wanted = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        return BaseModelOutputWithPast(x, past_key_values, (*hidden_states, x) if wanted else None)


def _check_known(kwargs: dict[str, Any]) -> None:
    if kwargs.pop("output_attentions", None):
        raise ConfigError(
            "output_attentions: memories have no attention weights; hecate.microscope looks at what they attend to"
        )
    unknown = [name for name, value in kwargs.items() if name not in _UNREAD and value is not None]
    if unknown:
        raise ConfigError(f"a hecate model takes no {unknown[0]!r}; leave it out")


class TiedHead(nn.Module):
    """The output layer if it is tied to the embedding: a module that peft can find, without weights of its own, and not
    an `nn.Linear`, which tools would adapt or quantise separately from the embedding."""

    bias: None = None

    def __init__(self, lm: LanguageModel) -> None:
        super().__init__()
        self._lm = (lm,)  # in a tuple, so that it is not registered as a submodule

    @property
    def weight(self) -> Tensor:
        """The weight of the model's current embedding."""
        return self._lm[0].embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        """Hidden states `[..., d_model]` to logits `[..., vocab]`."""
        return nn.functional.linear(x, self.weight)


class HecateForCausalLM(HecatePreTrainedModel, GenerationMixin):
    """`HecateModel` with the output layer and a loss. [HF-LM-D1]

    The output layer uses the embedding's weights if `model.tie_embeddings` is true, else the head of the
    `LanguageModel`. Parameters have that model's names, with `model.lm.` in front.
    """

    continuous_batching_context_manager = no_continuous_batching

    def __init__(self, config: HecateConfig) -> None:
        super().__init__(config)
        self.model = HecateModel(config)
        self.tied_head = TiedHead(self.model.lm) if self.model.lm.head is None else None
        self.post_init()

    @classmethod
    def of(cls, model: LanguageModel) -> Self:
        """A model of transformers with copies of a language model's weights, in their dtypes."""
        with torch.device("meta"):
            wrapper = cls(HecateConfig(model=model.config))
        copied = {name: value.detach().clone() for name, value in model.state_dict().items()}
        wrapper.model.lm.load_state_dict(copied, assign=True)
        return wrapper.train(model.training)

    @property
    def init_continuous_batching(self) -> NoReturn:
        """Not available, so that programs that test for it with `hasattr` use `generate` instead. `generate_batch`
        is available."""
        raise AttributeError("init_continuous_batching")

    def generate_batch(
        self,
        inputs: Sequence[Sequence[int]],
        generation_config: GenerationConfig | None = None,
        *,
        max_batch: int = 16,
        seed: int = 0,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Continues prompts of any lengths, `max_batch` at a time, each as `generate` would alone; returns
        `GenerationOutput`s by "req_0", "req_1", ... A failed one has the reason in `error`. [HF-GEN-D3]

        Args:
            inputs: tokens of each prompt.
            generation_config, kwargs: lengths, `do_sample`, `temperature`, `top_k`, `top_p`, `eos_token_id`; other
                settings are refused. `progress_bar` and `warmup` have no effect.
            max_batch: number of prompts at a time, a power of two.
            seed: seed of the first prompt's draws; each further prompt has the next number.

        Raises:
            ConfigError: a prompt without tokens, or a setting that is not supported here.
        """
        for name in ("progress_bar", "warmup"):
            kwargs.pop(name, None)
        config, unknown = self._prepare_generation_config(generation_config, **kwargs)
        if unknown:
            raise ConfigError(f"generate_batch knows no {next(iter(unknown))}; leave it out or call generate")
        plain = GenerationConfig()
        plain.update(**plain._get_default_generation_params())
        for name, value in config.to_dict().items():
            silent = name in _READ | _SILENT or name.startswith("_") or "assistant" in name
            if not silent and value not in (None, False, getattr(plain, name, None)):
                text = f"generate_batch knows no {name} (got {shorten(value)}); leave it out or call generate"
                raise ConfigError(text)
        ends = config.eos_token_id
        how: dict[str, Any] = {"stop": frozenset([ends] if isinstance(ends, int) else ends or ())}
        how["temperature"] = (1.0 if config.temperature is None else config.temperature) if config.do_sample else 0.0
        how |= {"top_k": config.top_k or None, "top_p": config.top_p} if config.do_sample else {}
        born, requests = time.perf_counter(), []
        for number, prompt in enumerate(inputs):
            room = config.max_new_tokens
            if room is None:
                room = plain.max_length if config.max_length == plain.max_length else config.max_length - len(prompt)
            if room < 1:
                text = f"max_length {config.max_length} leaves no room after a prompt of {len(prompt)} tokens"
                raise ConfigError(text)
            requests.append(Request([int(token) for token in prompt], room, seed=seed + number, **how))
        with evaluating(self.model.lm):
            scheduler = Scheduler(self.model.lm, max_batch=max_batch, max_queue=max(1, len(requests)))
            for request in requests:
                scheduler.submit(request)
            while scheduler.step():
                pass
        outputs = {}
        for number, request in enumerate(requests):
            status = RequestStatus.FINISHED if request.error is None else RequestStatus.FAILED
            outputs[f"req_{number}"] = GenerationOutput(
                f"req_{number}", list(request.tokens), request.made, status=status, created_time=born,
                error=None if request.error is None else str(request.error), lifespan=(born, time.perf_counter()),
            )  # fmt: skip
        return outputs

    def new_cache(self) -> Cache:
        """An empty cache on which `activate_past_recording` can be called before the first token; a `DynamicCache()`
        has no layers yet, so that the call would have no effect."""
        return Cache(layers=[StateLayer() for _ in self.model.lm.blocks])

    def _prepare_cache_for_generation(
        self, generation_config: GenerationConfig, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> None:
        """Puts layers for states into the cache from the start, so that they can be told to record."""
        super()._prepare_cache_for_generation(generation_config, model_kwargs, *args, **kwargs)
        cache = model_kwargs.get("past_key_values")
        if isinstance(cache, Cache):
            record_drafts(generation_config, *state_layers(cache, len(self.model.lm.blocks)))

    def _prepare_attention_mask_for_generation(
        self, inputs_tensor: Tensor, generation_config: GenerationConfig, model_kwargs: dict[str, Any]
    ) -> Tensor:
        """The attention mask. An assistant gets the mask of the main model; if it gets none, there is no padding, even
        if the padding token occurs in the text."""
        if getattr(generation_config, "is_assistant", False):
            return torch.ones(inputs_tensor.shape[:2], dtype=torch.int64, device=inputs_tensor.device)
        return super()._prepare_attention_mask_for_generation(inputs_tensor, generation_config, model_kwargs)

    def get_output_embeddings(self) -> Any:
        """The output layer; if it is tied, a `TiedHead`."""
        return self.model.lm.head if self.tied_head is None else self.tied_head

    def _get_resized_lm_head(self, old_lm_head: nn.Linear | TiedHead, *args: Any, **kwargs: Any) -> Any:
        if isinstance(old_lm_head, TiedHead):  # resized with the embedding
            return old_lm_head
        return super()._get_resized_lm_head(old_lm_head, *args, **kwargs)

    def set_output_embeddings(self, value: Any) -> None:
        """Replaces the output layer; `ConfigError` if it is tied and the new one does not share the embedding's
        weights."""
        lm = self.model.lm
        if lm.head is not None:
            lm.head = value
        elif value.weight is not lm.embedding.weight:
            raise ConfigError(
                "the output layer is the embedding (model.tie_embeddings): set_input_embeddings sets both"
            )

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Logits `[B, T, vocab]` of the next tokens, and their loss. Arguments are those of `HecateModel`, and:

        Args:
            labels: `[B, T]`, the tokens themselves; -100 where there is no label.
            logits_to_keep: number of last positions with logits, or indices of positions; 0 for all.
            kwargs: `num_items_in_batch`, the divisor of the sum of losses; `shift_labels` in place of `labels`, the
                token after each.
        """
        of_loss = {name: kwargs.pop(name) for name in _OF_LOSS & kwargs.keys()}
        if isinstance(past_key_values, Cache) and isinstance(logits_to_keep, int):
            for layer in past_key_values.layers:  # all of these positions except the first may be a draft
                if isinstance(layer, StateLayer) and layer.record_past:
                    layer.activate_past_recording(logits_to_keep)
        base = self.model(input_ids, attention_mask, position_ids, past_key_values, inputs_embeds, use_cache, **kwargs)
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep  # -0: all
        logits = self.model.lm.logits(base.last_hidden_state[:, kept])
        loss = None
        if labels is not None or of_loss.get("shift_labels") is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=logits.shape[-1], **of_loss)
        return CausalLMOutputWithPast(loss, logits, base.past_key_values, base.hidden_states)
