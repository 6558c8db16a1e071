"""Weights out of runs and into them: safetensors, torch and DCP; runs that begin with the parameters of another one.
[CKPT-EXPORT-D1]

Nothing is unpickled: torch's `.pt` files and DCP's own folders are written for others to read, and refused where they
are given, since what they hold is a pickle.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from hecate.checks import check_room, expect_choice
from hecate.data.shards import TOKENIZER
from hecate.distributed import overwrite
from hecate.distributed.shard import settle
from hecate.errors import CheckpointError, ConfigError
from hecate.files import expect_free, read_whole, write_file, written_folder
from hecate.train.checkpoint import MANIFEST, Checkpoint, load_checkpoint, save_checkpoint, summary, write_tensors
from hecate.train.compose import dump_experiment, load_experiment
from hecate.train.config import ExperimentConfig
from hecate.train.estimate import check_weights
from hecate.train.state import model_state
from hecate.train.trained import CHECKPOINTS, CONFIG, WEIGHTS, chosen_checkpoint, home_of
from hecate.train.trainer import Trainer

FORMATS = ("safetensors", "torch", "dcp")
_INDEX = "model.safetensors.index.json"


def read_weights(path: Path, which: str = "best") -> dict[str, Tensor]:
    """Parameters and buffers of a model by name, on the CPU.

    `path`: a run folder (its `best` or `newest` checkpoint), a checkpoint folder, a safetensors file, or a folder with
    such files (`model.safetensors`, or those that a `model.safetensors.index.json` lists). Raises `CheckpointError`.
    """
    expect_choice(which, "checkpoint", ("best", "newest"))
    if path.is_dir() and (path / MANIFEST).exists():
        return _model(load_checkpoint(path), path)
    if path.is_dir() and (path / CHECKPOINTS).is_dir():
        home, checkpoint = chosen_checkpoint(path, which)
        return _model(checkpoint, home)
    if path.is_dir():
        files = _listed(path) if (path / _INDEX).exists() else [path / WEIGHTS]
        return {name: value for file in files for name, value in _read(file).items()}
    return _read(path)


def _model(checkpoint: Checkpoint, path: Path) -> dict[str, Tensor]:
    """The tensors of the model, which every caller copies: refused where there is no room for them, or for what the
    checkpoint claims."""
    stored = checkpoint.tensors.items()
    found = {name.removeprefix("model/"): value for name, value in stored if name.startswith("model/")}
    if not found:
        raise CheckpointError(f"{path} holds no model; name a checkpoint of a run")
    try:
        config = ExperimentConfig.model_validate(checkpoint.facts.get("config"))
    except ConfigError:  # of kinds that are not imported here: the weights can be written all the same
        config = None
    if config is not None:
        check_weights(config)
    size = sum(value.nbytes for value in found.values())
    check_room(size, f"{path} has tensors of a model", "use a larger machine", error=CheckpointError)
    return found


def _listed(folder: Path) -> list[Path]:
    """Files that an index lists, of this folder alone."""
    try:
        names = sorted(set(json.loads(read_whole(folder / _INDEX))["weight_map"].values()))
        inside = all(isinstance(name, str) and Path(name).name == name for name in names)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        inside = False
    if not inside:
        raise CheckpointError(f"{folder / _INDEX} is not an index of files in its folder; name one safetensors file")
    return [folder / name for name in names]


def _read(file: Path) -> dict[str, Tensor]:
    if file.suffix in (".pt", ".pth", ".bin", ".ckpt") or (file.parent / ".metadata").exists():
        raise CheckpointError(
            f"{file} is a pickle, which can run code when it is read; write its tensors with "
            "safetensors.torch.save_file and name that file"
        )
    if not file.is_file():
        raise CheckpointError(
            f"{file} is missing; name a run folder, a checkpoint folder or a safetensors file, such as {WEIGHTS}"
        )
    try:
        return dict(load_file(file))
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(f"{file} is truncated or not a safetensors file ({error}); write it again") from None


def export_weights(run: Path, to: str, out: Path, which: str = "best") -> Path:
    """Writes a run's weights and its config into the new folder `out`, complete or not at all.

    `safetensors`: `model.safetensors`; `torch`: `model.pt`, which `torch.load(weights_only=True)` reads; `dcp`: a
    folder `model` of torch's distributed checkpoint. Each has the names of `state_dict()` and beside it `config.yaml`
    and, where the run has one, `tokenizer.json`.
    """
    expect_choice(to, "format", FORMATS)
    expect_free(out, "choose another --out")
    tensors = {name: value.clone() for name, value in read_weights(run, which).items()}  # tied ones one by one
    home = home_of(run)
    with written_folder(out, "choose another --out") as folder:
        if to == "safetensors":
            write_tensors(tensors, folder / WEIGHTS)
        elif to == "torch":
            with (folder / "model.pt").open("wb") as file:
                torch.save(tensors, file)
        else:
            _write_dcp(tensors, folder / "model")
        if home is not None:
            write_file(folder / CONFIG, read_whole(home / CONFIG))
            _copy_tokenizer(home, folder)
    return out


def _copy_tokenizer(home: Path, folder: Path) -> None:
    """Copies the tokenizer, so that reading texts needs no data either."""
    if (home / TOKENIZER).is_file():
        write_file(folder / TOKENIZER, read_whole(home / TOKENIZER))


def _write_dcp(tensors: dict[str, Tensor], folder: Path) -> None:
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # one process writes it, as is meant
        save(dict(tensors), storage_writer=FileSystemWriter(folder), no_dist=True)


def import_weights(source: Path, out: Path, config: ExperimentConfig | None = None) -> Path:
    """Makes a run folder at step 0 whose model has the weights of `source`, as `read_weights` finds them.

    `config`: None takes the `config.yaml` beside them. Names, shapes and dtypes must be the model's. `hecate train
    --out OUT --resume` trains on from there. Raises `CheckpointError`, `ConfigError`.
    """
    expect_free(out, "choose another --out")
    beside = (source if source.is_dir() else source.parent) / CONFIG
    weights = read_weights(source)
    if config is None:
        if not beside.is_file():
            raise CheckpointError(f"{source} has no config.yaml beside it; say which model it is: --config PRESET|FILE")
        config = load_experiment(beside)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        trainer = Trainer(config)
        named = {f"model/{name}": value for name, value in weights.items()}
        trainer.model.load_state_dict(model_state(trainer.model, named, str(source)))
        # With an optimiser that has not stepped, and the data at their beginning.
        given = trainer.checkpoint()
    with written_folder(out, "choose another --out") as folder:
        save_checkpoint(folder / CHECKPOINTS, 0, given)
        write_file(folder / "config.yaml", dump_experiment(config))
        _copy_tokenizer(beside.parent, folder)
    return out


SHOWN = 5


def begin_from(trainer: Trainer, path: Path) -> list[str]:
    """Overwrites a model's parameters and buffers with those of a run, a checkpoint or a safetensors file, by name;
    what there is to tell of it, in lines. [TRAIN-INIT-D1]

    Names that one of both lacks are told: those of the model stay as they were drawn. A tensor of another shape is
    refused, and so is a file of which nothing fits, and on every rank what is not the same on every rank.
    Floating-point numbers take the model's dtype.
    """
    settle(trainer.model)
    own, found, lines, fault = trainer.model.state_dict(), dict[str, Tensor](), list[str](), None
    try:
        found, lines = _fitting(path, own)
    except CheckpointError as error:
        fault = str(error)
    if told := trainer.world.first_of(fault):  # on every rank, for the others would wait
        raise CheckpointError(f"init_from: {told[1]}")
    if trainer.world.size > 1:  # each has read it where it runs
        trainer.world.agree({"init_from": {name: summary(value)["sha256"] for name, value in found.items()}})
    with torch.no_grad():
        for name, value in found.items():
            overwrite(own[name], value.to(own[name].dtype))
    return lines


def _fitting(path: Path, own: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], list[str]]:
    """The stored tensors that a model takes, and notes on these and on the rest."""
    given = read_weights(path)
    found = {name: value for name, value in given.items() if name in own}
    if not found:
        raise CheckpointError(
            f"no tensor of {path} has a name of this model; there are {_named(given)} there and {_named(own)} here"
        )
    for name, value in found.items():
        _check_kind(f"tensor {name!r} of {path}", value, own[name])
    sides = {"not there, and drawn anew": own.keys() - found.keys(), "left over": given.keys() - own.keys()}
    lines = [f"{what}: {_named(sorted(names))}" for what, names in sides.items() if names]
    return found, [f"began from {path}: {len(found)} tensors", *lines]


def _check_kind(where: str, value: Tensor, own: Tensor) -> None:
    """Refuses another shape, and numbers of another kind."""
    if value.shape != own.shape:
        raise CheckpointError(
            f"{where} is {list(value.shape)}, the model has {list(own.shape)}: they are of other sizes"
        )
    if value.is_floating_point() != own.is_floating_point() or value.is_complex() != own.is_complex():
        raise CheckpointError(f"{where} is {value.dtype}, the model has {own.dtype}")


def _named(names: Iterable[str]) -> str:
    shown = list(names)
    return ", ".join(shown[:SHOWN]) + (f" and {len(shown) - SHOWN} more" if shown[SHOWN:] else "")
