"""Memories in models that people have: beside the attention of a model of transformers, or in its place."""

from __future__ import annotations

import inspect
import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MethodType
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from hecate.checks import Depth, Size, expect_choice
from hecate.errors import CheckpointError, ConfigError, HecateError, printable, shorten
from hecate.files import make_folder, new_folder, read_whole, refusing, write_file
from hecate.hf.cache import no_continuous_batching
from hecate.hf.grafted import BRANCH, Beside, Branch, Grafted, InPlace, grafted, hand_masks, prepare_cache
from hecate.nn import FeatureMemoryConfig, Memory
from hecate.nn.arguments import Firing
from hecate.nn.conv import QKNorm
from hecate.nn.projection import Projection
from hecate.rule import MemoryConfig
from hecate.train.checkpoint import write_tensors
from hecate.variant import Config, read_json

Mode = Literal["add", "replace"]
Train = Literal["memory", "all"]
_TENSORS, _FACTS = "graft.safetensors", "graft.json"
GRAFT = "hecate_graft"
"""The key of a graft beside attention in a model's config."""
_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
FLOATS = ("float16", "bfloat16", "float32", "float64")
_NAME = re.compile(rf"(?:^|\.)layers\.(\d+)\.self_attn\.{BRANCH}\.(.+)")


class GraftConfig(Config):
    """Config of a graft: all that is needed to load its weights again.

    Fields:
        layers: the layers that have a memory.
        memory: its rule.
        mode: "add" beside the attention, "replace" in its place.
        heads, d_key, d_value: its sizes; None takes those of the attention's queries, or, where heads are given, those
            of `hecate.nn.Memory`.
        conv_kernel, qk_norm, output_gate, learned_initial, feature_memory, firing, query_projection: as in
            `hecate.nn.Memory`.
        dtype: of its weights; None is the model's, float32 where that is narrower.
    """

    layers: tuple[Annotated[Depth, Field(ge=0)], ...] = Field(min_length=1)
    memory: MemoryConfig = MemoryConfig()
    mode: Mode = "add"
    heads: Size | None = Field(None, ge=1)
    d_key: Size | None = Field(None, ge=1)
    d_value: Size | None = Field(None, ge=1)
    conv_kernel: Depth | None = Field(None, ge=0)
    qk_norm: QKNorm | None = None
    output_gate: bool = True
    learned_initial: bool = True
    feature_memory: FeatureMemoryConfig | None = None
    firing: Firing = "always"
    query_projection: Projection = "none"
    dtype: Literal["float16", "bfloat16", "float32", "float64"] | None = None


def graft(
    model: Any,
    layers: Sequence[int] | None = None,
    memory: MemoryConfig | str | Mapping[str, Any] = "delta",
    *,
    mode: Mode = "add",
    train: Train = "memory",
    reuse: bool = True,
    dtype: torch.dtype | None = None,
    generator: torch.Generator | None = None,
    **sizes: Any,
) -> Any:
    """Puts a memory beside the attention of some layers of a model, or in its place; the model itself, changed.

        model = AutoModelForCausalLM.from_pretrained(folder)
        graft(model, layers=[4, 8], memory="titans")

    Any model of transformers whose decoder has `layers`, each with a `self_attn` that has q_proj, k_proj, v_proj and
    o_proj, as Llama, Mistral, Qwen and Gemma have. With "add" the memory reads what the attention reads, and its
    answers, times a gate per channel that is zero at first, are added to those of the attention: until the gate is
    trained the model computes what it did. [HF-GRAFT-I1] With "replace" its answers stand in the attention's place:
    the model computes something else, and has to be trained. [HF-GRAFT-D2]

    Names of weights stay; new ones have `.self_attn.hecate.` in theirs. `save_pretrained` writes all of them and puts
    the graft into the model's config, for `load_graft`; `save_graft` writes what is new alone. [HF-GRAFT-D4]

    Args:
        model: on its device, with its weights; none whose forward accelerate dispatches over devices, and no
            `PeftModel`, which comes after the graft.
        layers: indices from 0; None for all.
        memory: a rule, or what stands for one, as in `hecate.nn.Memory`.
        mode: "add" or "replace".
        train: "memory" freezes all weights but the new ones; "all" freezes none of them, but for those of an attention
            that is replaced, which are not used.
        reuse: begins with the weights of q, k, v and o where their shapes are those of the memory's, keys and values of
            grouped queries repeated; their biases are left out. What was reused stands in the model's `repr`.
        dtype: of the new weights; None is the model's, float32 where that is narrower.
        generator: source of all draws; None uses torch's default generator.
        sizes: the other fields of `GraftConfig`.

    Raises:
        ConfigError: what cannot be; the model is then as it was.
    """
    name = None if dtype is None else str(dtype).removeprefix("torch.")
    decoder = decoder_of(model, Grafted)
    given = range(len(decoder.layers)) if layers is None else layers
    given = tuple(given) if isinstance(given, range) else given
    config = GraftConfig.model_validate({"layers": given, "memory": memory, "mode": mode, "dtype": name, **sizes})
    expect_choice(train, "train", ("memory", "all"))
    expect_choice(reuse, "reuse", (True, False))
    return _install(model, decoder, config, _build(decoder, config, reuse, generator), train)


def _build(
    decoder: Any, config: GraftConfig, reuse: bool, generator: torch.Generator | None
) -> dict[int, tuple[Any, Branch]]:
    """The attention of each layer and the memory for it; changes nothing."""
    expect_layers(decoder, config.layers)
    found = {index: _attention(decoder, index, reuse) for index in config.layers}
    return {index: (at, _branch(index, at, config, reuse, generator)) for index, at in found.items()}


def expect_layers(decoder: Any, layers: Sequence[int]) -> None:
    """Refuses layers that are not there, or named twice."""
    for index in layers:
        if index >= len(decoder.layers):
            raise ConfigError(
                f"has layer {index}, but the model has layers 0 to {len(decoder.layers) - 1}", ("layers",)
            )
    if len(set(layers)) < len(layers):
        raise ConfigError(f"names a layer twice: {list(layers)}", ("layers",))


def freeze(model: Any) -> None:
    """Freezes all weights but those of grafts."""
    for name, parameter in model.named_parameters():
        if f".{BRANCH}." not in name:
            parameter.requires_grad_(False)


def _install(model: Any, decoder: Any, config: GraftConfig, made: dict[int, tuple[Any, Branch]], train: str) -> Any:
    if train == "memory":
        freeze(model)
    for attention, branch in made.values():
        if config.mode == "replace":
            attention.requires_grad_(False)
        setattr(attention, BRANCH, branch.train(attention.training))
        kind: Any = type(attention)
        attention.__class__ = grafted(kind, Beside if config.mode == "add" else InPlace)
    return announce(model, decoder, GRAFT, json.loads(config.model_dump_json()))


def announce(model: Any, decoder: Any, key: str, config: Any) -> Any:
    """Lets a model, whose config says so from now on, hand masks to memories and generate with their states."""
    if hand_masks not in decoder._forward_pre_hooks.values():
        decoder.register_forward_pre_hook(hand_masks, with_kwargs=True)
    setattr(model.config, key, config)
    model.init_continuous_batching = no_continuous_batching
    model._prepare_cache_for_generation = MethodType(prepare_cache, model)  # a method: a copy of the model has its own
    if getattr(model, "generation_config", None) is not None:
        model.generation_config.disable_compile = True  # states change their place, which graphs of static caches fix
    # Memories read [B, T]: what is padding cannot be told from masks over keys, made ahead for static caches.
    model.create_masks_for_generate = _unchanged_mask
    return model


def _unchanged_mask(*, attention_mask: Tensor | None, **_: Any) -> Tensor | None:
    return attention_mask


def decoder_of(model: Any, kind: type[nn.Module]) -> Any:
    """The part of a model that has the layers, none of which has a graft of this kind."""
    if not isinstance(model, PreTrainedModel):
        after = "; graft the model first and wrap it then" if hasattr(model, "get_base_model") else ""
        raise ConfigError(f"a graft needs a PreTrainedModel of transformers, got a {type(model).__name__}{after}")
    name = type(model).__name__
    decoder = model.get_decoder()
    layers = getattr(decoder, "layers", None)
    if not isinstance(layers, nn.ModuleList) or not layers:
        raise ConfigError(f"a graft needs a decoder with a list of layers, and the {name} has no .layers")
    if any(isinstance(module, kind) for module in model.modules()):
        raise ConfigError(f"the {name} has a graft already; begin with the model as it was and name all layers at once")
    if any(parameter.is_meta for parameter in model.parameters()):
        raise ConfigError(f"the {name} is on the meta device; load its weights before the graft")
    if any(hasattr(parameter, "placements") for parameter in model.parameters()):
        raise ConfigError(f"the {name} is sharded over devices; graft it before it is sharded")
    for part in (decoder, layers[0]):
        expect_keywords(part, **{"**": "does not hand keywords on, by which its memories get masks"})
    return decoder


def expect_keywords(module: nn.Module, **needed: str) -> None:
    """Refuses a module whose forward lacks an argument, `**` for any keyword."""
    known = inspect.signature(type(module).forward).parameters.values()
    names = {"**" if p.kind is p.VAR_KEYWORD else p.name for p in known}
    for name, why in needed.items():
        if name not in names:
            raise ConfigError(f"{type(module).__name__} {why}")


def _attention(decoder: Any, index: int, reuse: bool) -> Any:
    """The attention of a layer, if a memory fits it."""
    layer = decoder.layers[index]
    attention = getattr(layer, "self_attn", None)
    if attention is None:
        raise ConfigError(f"layer {index}, a {type(layer).__name__}, has no self_attn to put a memory beside")
    kind = type(attention).__name__
    for name in (*_PROJECTIONS, "head_dim", "layer_idx"):
        if not hasattr(attention, name):
            raise ConfigError(f"layer {index}: a graft needs self_attn.{name}, which {kind} does not have")
    expect_keywords(attention, past_key_values="takes no past_key_values, where memories keep their states")
    if "forward" in vars(attention):
        raise ConfigError(
            f"layer {index}: the forward of its {kind} is not that of its class, as where accelerate dispatches a "
            "model over devices; graft the model on one device, and dispatch it then"
        )
    for name in _PROJECTIONS if reuse else ():
        linear = getattr(attention, name)
        plain = isinstance(linear, nn.Linear) and str(linear.weight.dtype).removeprefix("torch.") in FLOATS
        if not plain:
            dtype = linear.weight.dtype if isinstance(getattr(linear, "weight", None), Tensor) else "no tensor"
            raise ConfigError(
                f"reuse=True copies the weights of {name}, but that of layer {index} is a {type(linear).__name__} of "
                f"{dtype}, quantised or adapted; set reuse=False"
            )
    return attention


def _branch(index: int, attention: Any, config: GraftConfig, reuse: bool, generator: torch.Generator | None) -> Branch:
    """A memory for an attention, with its weights where they fit."""
    width, linear = attention.head_dim, attention.q_proj
    model_dtype = linear.weight.dtype if str(linear.weight.dtype).removeprefix("torch.") in FLOATS else torch.float32
    dtype = torch.promote_types(model_dtype, torch.float32) if config.dtype is None else getattr(torch, config.dtype)
    own = config.model_dump(
        include={"conv_kernel", "qk_norm", "output_gate", "learned_initial", "firing", "query_projection"}
    )
    heads, like = config.heads, config.heads is None
    memory = Memory(
        linear.in_features,
        linear.out_features // width if heads is None else heads,
        config.memory,
        d_key=width if like and config.d_key is None else config.d_key,
        d_value=width if like and config.d_value is None else config.d_value,
        feature_memory=config.feature_memory,
        name=f"layer {index}",
        generator=generator,
        device=linear.weight.device,
        dtype=dtype,
        **own,
    )
    reused = _reuse(memory, attention) if reuse else ()
    return Branch(memory, gated=config.mode == "add", reused=reused)


@torch.no_grad()
def _reuse(memory: Memory, attention: Any) -> tuple[str, ...]:
    """Copies the weights of an attention whose shapes fit; their names."""
    places = dict(zip("qkv", memory.qkv.weight.split(memory.splits), strict=True)) | {"o": memory.out.weight}
    width, taken = attention.head_dim, []
    for name, place in places.items():
        weight = getattr(attention, f"{name}_proj").weight
        head = memory.d_key if name in "qk" else memory.d_value
        if name in "kv" and head == width and memory.pairs == 1 and weight.shape[0] % width == 0:
            groups = weight.unflatten(0, (-1, width))
            if memory.heads % len(groups) == 0:
                weight = groups.repeat_interleave(memory.heads // len(groups), 0).flatten(0, 1)
        if head == width and weight.shape == place.shape:
            place.copy_(weight)
            taken.append(name)
    return tuple(taken)


def save_graft(model: Any, folder: str | Path) -> None:
    """Writes what a graft added, its weights and config, into a new folder, complete or not at all. [HF-GRAFT-D4]

    Raises: ConfigError for a model without a graft; CheckpointError where it cannot be written.
    """
    folder, branches = Path(folder), _branches(model)
    tensors = {f"layers.{i}.self_attn.{BRANCH}.{n}": v for i, b in branches.items() for n, v in b.state_dict().items()}
    if any(hasattr(value, "placements") for value in tensors.values()):
        raise ConfigError("the graft is sharded over devices; write it with save_pretrained of accelerate or Trainer")
    if folder.exists():
        raise CheckpointError(f"{folder} exists already; choose another folder")
    with refusing(f"write {folder}", "choose another folder"):
        make_folder(folder.absolute().parent)
        with new_folder(folder.absolute()) as room:
            write_tensors({name: value.detach().cpu().contiguous() for name, value in tensors.items()}, room / _TENSORS)
            write_file(room / _FACTS, json.dumps(getattr(model.config, GRAFT), indent=2) + "\n")


def load_graft(folder: str | Path, model: Any = None, *, train: Train = "memory", **options: Any) -> Any:
    """A model with the graft of a folder.

        model = load_graft("whole")                              # of model.save_pretrained
        model = load_graft("graft", model=LlamaForCausalLM(...))  # of save_graft, or of save_pretrained

    Args:
        folder: what `save_pretrained` of a grafted model wrote, or `save_graft`.
        model: the model to put it into, changed in place; None loads the folder's own.
        train: as in `graft`.
        options: of `AutoModelForCausalLM.from_pretrained`, where it is called. Weights of the graft keep their dtype.

    Raises:
        CheckpointError: a folder without a graft, or one that does not fit the model.
    """
    folder = Path(folder)
    config, tensors = _read_config(folder), _read_tensors(folder)
    if model is None:
        if (folder / _FACTS).exists():
            raise CheckpointError(f"{folder} holds what a graft added alone; give the model it was made from as model=")
        model = load_plain(folder, options)
    elif options:
        raise ConfigError(f"{', '.join(options)} would load a model, and one is given as model=; leave one of them out")
    decoder = decoder_of(model, Grafted)
    try:
        made = _build(decoder, config, False, torch.Generator().manual_seed(0))
    except HecateError as error:
        raise CheckpointError(f"{folder} does not fit the model: {error.line}") from None
    for index, (_, branch) in made.items():
        own, wanted = tensors.pop(index, {}), branch.state_dict()
        faults = [name for name in wanted.keys() | own.keys() if _shape(wanted, name) != _shape(own, name)]
        if faults:
            first = sorted(faults)[0]
            raise CheckpointError(
                f"{folder} does not fit its config: layer {index} has {first} of shape {_shape(own, first)}, expected "
                f"{_shape(wanted, first)}; save the model again"
            )
        branch.load_state_dict(own)
    if tensors:
        raise CheckpointError(f"{folder} has memories in layers {sorted(tensors)}, which its config does not name")
    return _install(model, decoder, config, made, train)


def _shape(tensors: Mapping[str, Tensor], name: str) -> list[int] | None:
    return list(tensors[name].shape) if name in tensors else None


def _branches(model: Any) -> dict[int, Branch]:
    """The memories of a model by layer, unwrapped."""
    found = {module.layer_idx: getattr(module, BRANCH) for module in model.modules() if isinstance(module, Grafted)}
    if not found:
        raise ConfigError(f"the {type(model).__name__} has no graft; graft it first")
    if not isinstance(model, PreTrainedModel) or not all(isinstance(branch, Branch) for branch in found.values()):
        raise ConfigError(
            f"the {type(model).__name__} or its memories are wrapped, as by peft; save the model of its "
            "merge_and_unload()"
        )
    return found


def _read_config(folder: Path) -> GraftConfig:
    for file in (folder / _FACTS, folder / "config.json"):
        if not file.is_file():
            continue
        try:
            facts = read_json(read_whole(file))
            return GraftConfig.model_validate(facts if file.name == _FACTS else facts[GRAFT])
        except (OSError, ValueError, KeyError, TypeError) as error:
            why = f"has no {GRAFT}" if isinstance(error, KeyError) else f"is not of a graft ({shorten(str(error))})"
            raise CheckpointError(f"{file} {why}; name a folder of save_graft or of a grafted model") from None
    raise CheckpointError(f"{folder} has neither {_FACTS} nor config.json; name a folder of save_graft")


def _read_tensors(folder: Path) -> dict[int, dict[str, Tensor]]:
    """The tensors of a graft by layer and name, on the CPU."""
    pattern = _TENSORS if (folder / _FACTS).exists() else "model*.safetensors"
    found: dict[int, dict[str, Tensor]] = {}
    for name, value in read_tensors(folder, _NAME.search, pattern):
        if match := _NAME.search(name):
            found.setdefault(int(match[1]), {})[match[2]] = value
    if not found:
        raise CheckpointError(f"{folder} has no tensors of a graft in {pattern}; save the grafted model again")
    return found


def read_tensors(
    folder: Path, wanted: Callable[[str], Any], pattern: str = "model*.safetensors"
) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a folder whose names are wanted, on the CPU."""
    for path in sorted(folder.glob(pattern)):
        try:
            with safe_open(path, framework="pt") as file:
                yield from ((name, file.get_tensor(name)) for name in file.keys() if wanted(name))
        except (SafetensorError, OSError, ValueError) as error:
            raise CheckpointError(f"{path} is truncated or not a safetensors file ({error}); save it again") from None


def load_plain(folder: Path, options: Mapping[str, Any], instead: tuple[str, ...] = ()) -> Any:
    """The folder's model without what hecate added, and without the weights of layers, by the beginnings of their
    names, that others stand in for."""
    try:
        with _without_report():
            model, facts = AutoModelForCausalLM.from_pretrained(folder, **options, output_loading_info=True)
    except torch.OutOfMemoryError:
        raise
    except (OSError, RuntimeError, ValueError, SafetensorError) as error:
        why = printable(" ".join(str(error).split()), 300)
        if "mismatched_sizes" in why:
            why = "weights of other shapes than its config says"
        raise CheckpointError(f"{folder} has a model that cannot be loaded: {why}") from error
    added = f".{BRANCH}."
    strange = sorted(n for n in facts["unexpected_keys"] if added not in n and not n.startswith(instead))
    missing = sorted(name for name in facts["missing_keys"] if not name.startswith(instead))
    for what, names in (("lacks", missing), ("has, unexpectedly,", strange)):
        if names:
            raise CheckpointError(f"{folder} {what} {names[0]} (and {len(names) - 1} more); save the model again")
    return model


@contextmanager
def _without_report() -> Iterator[None]:
    """Without what transformers says of names it does not know, as those of a graft are; `load_plain` looks itself."""

    def quiet(record: logging.LogRecord) -> bool:
        return "LOAD REPORT" not in record.getMessage()

    logger = logging.getLogger("transformers.modeling_utils")
    logger.addFilter(quiet)
    try:
        yield
    finally:
        logger.removeFilter(quiet)
