"""Folders in the format of transformers: export of a run's model and tokenizer, with the same ids; `save` and `load` of
models that were adopted, upgraded or grafted."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers
from torch import Tensor
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.convert_slow_tokenizer import bytes_to_unicode

from hecate.checks import expect_choice
from hecate.data.tokenizer import END, Bytes, FileTokenizer, Tokenizer
from hecate.errors import CheckpointError, ConfigError, printable, retelling, shorten
from hecate.files import expect_free, read_whole, write_file, written_folder
from hecate.hf.adopt import hook_models
from hecate.hf.graft import BRANCH, GRAFT, Branch, GraftConfig, Grafted, Train, build, decoder_of, freeze, install
from hecate.hf.graft_mlp import KEY, Fast, FastMLP, MLPGraftConfig, build_mlps, install_mlps
from hecate.hf.model import HecateForCausalLM
from hecate.hf.upgrade import LAYERS, Hosted, HostedConfig, describe_hosted
from hecate.train.checkpoint import open_tensors, write_tensors
from hecate.train.trained import open_model
from hecate.variant import read_json


class Exported(NamedTuple):
    """An exported model: its folder, its training step, and whether its tokenizer was written beside it."""

    folder: Path
    step: int
    has_tokenizer: bool


def export_run(run: Path | str, out: Path | str, which: str = "best") -> Exported:
    """Writes the model of a run, or of a checkpoint folder, to the new folder `out`, complete or not at all:
    `config.json`, `model.safetensors`, `generation_config.json`, the file for remote code, and the tokenizer of the run
    if it was trained on text. [HF-EXPORT-D1]

    Raises:
        CheckpointError: `run` is not a run or checkpoint, or `out` cannot be written.
    """
    out = Path(out)
    expect_free(out, "choose another --out")
    trained = open_model(run, which, "cpu")
    model = HecateForCausalLM.of(trained.model)
    tokenizer = None if trained.tokenizer is None else tokenizer_of(trained.tokenizer)
    if tokenizer is not None:
        ends, pads = tokenizer.eos_token_id, tokenizer.pad_token_id
        model.generation_config.eos_token_id, model.generation_config.pad_token_id = ends, pads
    with written_folder(out, "choose another --out") as folder:
        model.save_pretrained(folder)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
    return Exported(out, trained.step, tokenizer is not None)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer whose ids are the bytes of UTF-8; the padding is byte 0. [HF-BYTES-D1]

    Any text can be decoded from its ids exactly. There is no token that ends a text.
    """
    names = bytes_to_unicode()  # GPT-2's characters for bytes
    backend = Backend(models.BPE({name: byte for byte, name in names.items()}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return _fast(backend, pad_token=names[0])


def file_tokenizer(text: str) -> PreTrainedTokenizerFast:
    """The tokenizer of a `tokenizer.json`, with the same ids as in `hecate train`: templates add no tokens, and special
    tokens are not recognised in text. If it has `<|endoftext|>`, that ends a text and is the padding. [HF-FILE-D1]"""
    description = json.loads(text) | {"truncation": None, "padding": None, "post_processor": None}
    backend = Backend.from_str(json.dumps(description))
    end = {} if backend.token_to_id(END) is None else {"eos_token": END, "pad_token": END}
    return _fast(backend, **end)


def load_tokenizer(folder: str | Path) -> Any:
    """The tokenizer beside a model of transformers in a folder; None if there is none. No code from the folder is run.

    Raises:
        CheckpointError: a tokenizer that transformers cannot open.
    """
    folder = Path(folder)
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")):
        return None
    try:
        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{folder} has a tokenizer that transformers does not open: {shorten(str(error))}"
        ) from None


def tokenizer_of(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    """The tokenizer of transformers with the same ids."""
    if isinstance(tokenizer, FileTokenizer):
        return file_tokenizer(tokenizer.text)
    if not isinstance(tokenizer, Bytes):
        raise TypeError(f"{type(tokenizer).__name__} has no form in transformers")
    return byte_tokenizer()


def _fast(backend: Backend, **tokens: Any) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        clean_up_tokenization_spaces=False,
        split_special_tokens=True,
        padding_side="left",
        model_input_names=["input_ids", "attention_mask"],
        **tokens,
    )


_TENSORS = "hecate.safetensors"
_GRAFT, _FACTS = "graft.safetensors", "graft.json"
_NAME = re.compile(rf"(?:^|\.)layers\.(\d+)\.self_attn\.{BRANCH}\.(.+)")


def save(model: Any, folder: str | Path) -> None:
    """Writes a model, adopted, upgraded or grafted, to a new folder, complete or not at all. [HF-SAVED-D1]

        hecate.hf.save(model, "mine")
        model = hecate.hf.load("mine")

    It writes the folder of `save_pretrained`, with the changes in config.json, and the weights of added modules in
    hecate.safetensors. If only kernels were changed (`adopt`), it is the ordinary folder of the official class.

    Raises:
        TypeError: not a model of transformers.
        ConfigError: a model that `AutoModelForCausalLM` does not load, or weights sharded over devices or on meta.
        CheckpointError: a folder that exists, or cannot be written.
    """
    if not isinstance(model, PreTrainedModel):
        after = "; save the model of its merge_and_unload()" if hasattr(model, "get_base_model") else ""
        raise TypeError(f"save takes a model of transformers, got a {type(model).__name__}{after}")
    kind = type(model.config)
    if kind not in MODEL_FOR_CAUSAL_LM_MAPPING or MODEL_FOR_CAUSAL_LM_MAPPING[kind].__name__ != type(model).__name__:
        raise ConfigError(f"{type(model).__name__} is no class of AutoModelForCausalLM, by which load loads")
    if any(hasattr(parameter, "placements") for parameter in model.parameters()):
        raise ConfigError("the model is sharded over devices; write it with save_pretrained of accelerate or Trainer")
    if any(parameter.is_meta for parameter in model.parameters()):
        raise ConfigError("the model is on the meta device, or offloaded, and has no weights to write; load them first")
    folder = Path(folder)
    expect_free(folder, "choose another folder")
    describe_hosted(model)
    tensors = model.state_dict()
    # Transformers renames some tensors when writing, so that those of upgraded layers and of MLP grafts could not be
    # found again.
    parts = {name: part for name, part in model.named_modules() if isinstance(part, Hosted | Fast)}
    names = [f"{name}.{key}" for name, part in parts.items() for key in part.state_dict()]
    added = {name: tensors.pop(name).detach().cpu().contiguous() for name in names}
    with written_folder(folder, "choose another folder") as room:
        model.save_pretrained(room, state_dict=tensors)
        if added:
            write_tensors(added, room / _TENSORS)


def load(folder: str | Path, *, train: Train = "all", **options: Any) -> Any:
    """Loads the model of a folder that `save`, `save_pretrained` or Trainer wrote, with its upgraded layers and grafts,
    with the same bits. [HF-SAVED-D1]

    Kernels are those of transformers; `adopt` the model again for hecate's.

    Args:
        folder: a folder on disk.
        train: "memory" freezes all weights except those of grafts; "all" none.
        options: options of `AutoModelForCausalLM.from_pretrained`; weights of memories keep their dtype.

    Raises:
        CheckpointError: a folder without a model, with weights that do not fit its config, or of a newer version.
        ConfigError: options that dispatch or quantise the model, as memories cannot be added to such a model.
    """
    expect_choice(train, "train", ("memory", "all"))
    for name in ("device_map", "quantization_config", "load_in_4bit", "load_in_8bit"):
        if options.get(name) is not None:
            raise ConfigError(f"{name}: memories are put into a model on one device, in floating point; leave it out")
    folder = Path(folder)
    facts = _facts(folder)
    hosted, mlps = _settings(folder, facts)
    _check_all_taken(folder, hosted, graft=facts.get(GRAFT) is not None, mlps=mlps is not None)
    model = load_plain(folder, options, tuple(f"{name}." for name in hosted))
    for name, config in hosted.items():
        _host(folder, model, name, config)
    hook_models(model)
    describe_hosted(model)
    if facts.get(GRAFT) is not None:
        load_graft(folder, model, train="all")
    if mlps is not None:
        _fill_mlps(folder, model, mlps)
    if train == "memory":
        freeze(model)
    return model


def _facts(folder: Path) -> dict[str, Any]:
    with retelling(CheckpointError, f"{folder} has no config.json of a model", "name another"):
        facts = read_json(read_whole(folder / "config.json"))
        if not isinstance(facts, dict):
            raise ValueError("no object")
    return facts


def _settings(folder: Path, facts: dict[str, Any]) -> tuple[dict[str, HostedConfig], MLPGraftConfig | None]:
    """Configs of upgraded layers, by name, and of the MLP graft, from config.json."""
    layers, mlps = facts.get(LAYERS) or {}, facts.get(KEY)
    every = [*(layers.values() if isinstance(layers, dict) else [layers]), *([] if mlps is None else [mlps])]
    if any(not isinstance(fields, dict) or fields.get("version") != 1 for fields in every):
        raise CheckpointError(f"{folder} has {LAYERS} or {KEY} of another version than 1; load it with a newer hecate")
    hosted = {}
    for name, fields in layers.items():
        with retelling(CheckpointError, f"{folder} has settings of {name} that do not fit"):
            hosted[str(name)] = HostedConfig.model_validate(fields)
    with retelling(CheckpointError, f"{folder} has settings that do not fit"):
        return hosted, None if mlps is None else MLPGraftConfig.model_validate(mlps)


def _check_all_taken(folder: Path, hosted: Mapping[str, Any], *, graft: bool, mlps: bool) -> None:
    """Refuses weights of memories that the config does not mention, as the model would silently lack them."""
    names: list[str] = []
    for pattern in ("model*.safetensors", _TENSORS):
        for _ in read_tensors(folder, names.append, pattern):  # collects the names, and reads no tensor
            pass
        if pattern != _TENSORS:
            names = [name for name in names if f".{BRANCH}." in name]
    for name in names:
        if f".{BRANCH}." in name:
            known = graft if f".self_attn.{BRANCH}." in name else mlps
        else:
            known = name.startswith(tuple(f"{layer}." for layer in hosted))
        if not known:
            raise CheckpointError(
                f"{folder} has weights {name}, of which its config says nothing; save the model again"
            )


def _host(folder: Path, model: Any, name: str, config: HostedConfig) -> None:
    """Replaces a layer of the official class by an upgraded layer, with its weights."""
    parent, _, last = name.rpartition(".")
    try:
        layer = model.get_submodule(name)
    except AttributeError:
        raise CheckpointError(f"{folder} has an upgraded layer {name}, and its model none of that name") from None
    with retelling(CheckpointError, f"{folder} has settings of {name} that do not fit"):
        hosted = Hosted(config.build(), config.layer_idx)
        if (number := getattr(layer, "layer_idx", None)) != config.layer_idx:
            raise ConfigError(f"layer_idx={config.layer_idx}, and the model's layer has {number}")
    _take(folder, hosted, f"{name}.")
    device = next((p.device for p in layer.parameters()), torch.device("cpu"))
    setattr(model.get_submodule(parent), last, hosted.to(device).train(layer.training))


def _fill_mlps(folder: Path, model: Any, config: MLPGraftConfig) -> None:
    decoder = decoder_of(model, FastMLP)
    with retelling(CheckpointError, f"{folder} does not fit its model"):
        grafts = build_mlps(decoder, config, torch.Generator().manual_seed(0))
    where = next(name for name, part in model.named_modules() if part is decoder)
    for index, (name, fast) in grafts.items():
        device = next(fast.parameters()).device
        _take(folder, fast, f"{where}.layers.{index}.{name}.{BRANCH}.".lstrip("."))
        fast.to(device)
    install_mlps(model, decoder, config, grafts, "all")


def _take(folder: Path, part: Any, start: str) -> None:
    """Loads the tensors of a folder whose names begin with `start` into a module, in their dtypes."""
    pattern = _TENSORS if (folder / _TENSORS).exists() else "model*.safetensors"  # from save_pretrained or Trainer
    pairs = read_tensors(folder, lambda name: name.startswith(start), pattern)
    tensors = {name.removeprefix(start): value for name, value in pairs}
    _check_fit(folder, part, tensors, start)
    part.load_state_dict(tensors, assign=True)
    part.requires_grad_(True)


def _check_fit(folder: Path, part: Any, tensors: Mapping[str, Tensor], start: str) -> None:
    """Refuses tensors that differ from a module's in name or shape, or are not floating point."""
    wanted = part.state_dict()
    for name in sorted(tensors.keys() | wanted.keys()):
        shapes = [list(each[name].shape) if name in each else None for each in (tensors, wanted)]
        if shapes[0] != shapes[1]:
            raise CheckpointError(
                f"{folder} does not fit its config: {start}{name} is of shape {shapes[0]}, expected {shapes[1]}; save "
                "the model again"
            )
        if not (tensor := tensors[name]).is_floating_point():
            raise CheckpointError(f"{folder} has {start}{name} as {tensor.dtype}, no floating point; save it again")


# Grafts beside attention, alone or with their model.


def save_graft(model: Any, folder: str | Path) -> None:
    """Writes the weights and config of a graft alone to a new folder, complete or not at all. [HF-GRAFT-D4]

    Raises: ConfigError for a model without a graft; CheckpointError if the folder cannot be written.
    """
    folder = Path(folder)
    branches = {module.layer_idx: getattr(module, BRANCH) for module in model.modules() if isinstance(module, Grafted)}
    if not branches:
        raise ConfigError(f"the {type(model).__name__} has no graft; graft it first")
    if not isinstance(model, PreTrainedModel) or not all(isinstance(branch, Branch) for branch in branches.values()):
        cure = "save the model of its merge_and_unload()"
        raise ConfigError(f"the {type(model).__name__} or its memories are wrapped, as by peft; {cure}")
    tensors = {f"layers.{i}.self_attn.{BRANCH}.{n}": v for i, b in branches.items() for n, v in b.state_dict().items()}
    if any(hasattr(value, "placements") for value in tensors.values()):
        raise ConfigError("the graft is sharded over devices; write it with save_pretrained of accelerate or Trainer")
    expect_free(folder, "choose another folder")
    with written_folder(folder, "choose another folder") as room:
        write_tensors({name: value.detach().cpu().contiguous() for name, value in tensors.items()}, room / _GRAFT)
        write_file(room / _FACTS, json.dumps(getattr(model.config, GRAFT), indent=2) + "\n")


def load_graft(folder: str | Path, model: Any = None, *, train: Train = "memory", **options: Any) -> Any:
    """Loads a model with the graft of a folder.

        model = load_graft("whole")                              # of model.save_pretrained
        model = load_graft("graft", model=LlamaForCausalLM(...))  # of save_graft, or of save_pretrained

    Args:
        folder: a folder written by `save_pretrained` of a grafted model, or by `save_graft`.
        model: the model to add the graft to, in place; None loads the folder's own.
        train: as in `graft`.
        options: options of `AutoModelForCausalLM.from_pretrained`, only without `model`. Weights of the graft keep
            their dtype.

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
    with retelling(CheckpointError, f"{folder} does not fit the model"):
        branches = build(decoder, config, False, torch.Generator().manual_seed(0))
    for index, (_, branch) in branches.items():
        weights = tensors.pop(index, {})
        _check_fit(folder, branch, weights, f"layers.{index}.self_attn.{BRANCH}.")
        branch.load_state_dict(weights)
    if tensors:
        raise CheckpointError(f"{folder} has memories in layers {sorted(tensors)}, which its config does not name")
    return install(model, decoder, config, branches, train)


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
    pattern = _GRAFT if (folder / _FACTS).exists() else "model*.safetensors"
    tensors: dict[int, dict[str, Tensor]] = {}
    for name, value in read_tensors(folder, _NAME.search, pattern):
        if match := _NAME.search(name):
            tensors.setdefault(int(match[1]), {})[match[2]] = value
    if not tensors:
        raise CheckpointError(f"{folder} has no tensors of a graft in {pattern}; save the grafted model again")
    return tensors


def read_tensors(
    folder: Path, wanted: Callable[[str], Any], pattern: str = "model*.safetensors"
) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a folder's files for whose names `wanted` is true, on the CPU."""
    for path in sorted(folder.glob(pattern)):
        with open_tensors(path, "save it again") as file:
            yield from ((name, file.get_tensor(name)) for name in file.keys() if wanted(name))


def load_plain(folder: Path, options: Mapping[str, Any], instead: tuple[str, ...] = ()) -> Any:
    """Loads a folder's model without hecate's additions; weights whose names begin with one of `instead` may be missing
    or unexpected, as their layers are replaced afterwards."""
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
    strange = sorted(n for n in facts["unexpected_keys"] if f".{BRANCH}." not in n and not n.startswith(instead))
    missing = sorted(name for name in facts["missing_keys"] if not name.startswith(instead))
    for what, names in (("lacks", missing), ("has, unexpectedly,", strange)):
        if names:
            raise CheckpointError(f"{folder} {what} {names[0]} (and {len(names) - 1} more); save the model again")
    return model


@contextmanager
def _without_report() -> Iterator[None]:
    """Context without transformers' report of unknown names, such as a graft's; `load_plain` checks names itself."""

    def quiet(record: logging.LogRecord) -> bool:
        return "LOAD REPORT" not in record.getMessage()

    logger = logging.getLogger("transformers.modeling_utils")
    logger.addFilter(quiet)
    try:
        yield
    finally:
        logger.removeFilter(quiet)
