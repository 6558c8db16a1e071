"""Trained models: opened from a run folder, without its data; their loss on other data and on longer sequences than
they were trained on; their weights out of runs and into them, by safetensors, torch and DCP. [CKPT-EXPORT-D1]

Nothing is unpickled: torch's `.pt` files and DCP's own folders are written for others to read, and refused where they
are given, since what they hold is a pickle.
"""

from __future__ import annotations

import json
import math
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from hecate.checks import check_room, expect_choice
from hecate.data import Bytes, Source, Text, Tokenizer, Tokens
from hecate.data.shards import SIDECAR, TOKENIZER
from hecate.data.tokenizer import open_tokenizer
from hecate.distributed import overwrite
from hecate.distributed.shard import settle
from hecate.errors import CheckpointError, ConfigError, DataError, shorten
from hecate.files import expect_free, read_whole, write_file, written_folder
from hecate.train.checkpoint import (
    MANIFEST,
    Checkpoint,
    best_checkpoint,
    load_checkpoint,
    newest_checkpoint,
    refuse_link,
    save_checkpoint,
    summary,
    write_tensors,
)
from hecate.train.compose import dump_experiment, load_experiment
from hecate.train.config import ExperimentConfig
from hecate.train.estimate import check_opening, check_weights
from hecate.train.evaluate import Positions, loss_by_position
from hecate.train.report import Table, table_by_position
from hecate.train.state import model_state, run_facts
from hecate.train.trainer import Trainer, build_model

# A run folder may come by mail. So what hecate reads or writes in it by name is a file or a folder of its own: no link,
# which could lead to a file of the reader's, and no pipe or device, which would be waited for. The folder itself may be
# reached through a link and lie anywhere.
CONFIG, METRICS, CHECKPOINTS, WEIGHTS = "config.yaml", "metrics.jsonl", "checkpoints", "model.safetensors"
NAMES = (CONFIG, "env.json", METRICS, "samples.txt", "report.md", "report.html", "logger-id.txt", TOKENIZER,
         CHECKPOINTS, "figures", "evals", "tensorboard", "wandb")  # fmt: skip
"""Names that are read or written in a run folder."""


def expect_run(folder: Path, cure: str = "name one that `hecate train` has written, such as runs/quickstart") -> None:
    """Refuses what is no run folder, or one with links; `cure`: what helps."""
    check_entries(folder)
    if is_pretrained(folder):
        raise CheckpointError(
            f"{folder} is a model of transformers, no run folder: `hecate eval {folder} --tasks` asks it, "
            "`hecate serve` serves one that `hecate export` wrote, hecate.hf.load loads any"
        )
    if not (folder / CONFIG).exists():
        lacks = "it has no config.yaml" if folder.exists() else "there is no such folder"
        raise CheckpointError(f"{folder} is not a run folder: {lacks}; {cure}")


def is_pretrained(folder: Path) -> bool:
    """True of a folder of transformers': with a config.json, and no run's config."""
    return (folder / "config.json").is_file() and not (folder / CONFIG).exists()


def check_entries(folder: Path) -> None:
    """Refuses a folder in which a link, a pipe or a device stands where a run has a file or a folder.
    [TRAIN-FOLDER-D1]"""
    for path in map(folder.joinpath, NAMES):
        refuse_link(path)
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise CheckpointError(f"{path} is a pipe or a device; put a run's own file in its place")


def home_of(path: Path) -> Path | None:
    """The run folder that a path is or that a file lies in, or a checkpoint's own folder; None where there is none."""
    above = path.resolve().parent
    for folder in (path if path.is_dir() else path.parent, *([above.parent] if above.name == CHECKPOINTS else [])):
        check_entries(folder)
        if (folder / CONFIG).is_file():
            return folder
    return None


class Trained(NamedTuple):
    """A model with the parameters of a checkpoint, ready to evaluate, on the CPU or its own device."""

    model: nn.Module
    config: ExperimentConfig
    step: int
    tokenizer: Tokenizer | None
    device: torch.device


def open_model(folder: Path | str, which: str = "best", device: str | None = None) -> Trained:
    """The model of a run folder's `best` or `newest` checkpoint, or of a checkpoint's own folder; the data it was
    trained on are not needed. [TRAIN-OPEN-D1]

    `device` None takes that of the run, or the CPU where it is not here.
    """
    path = Path(folder)
    expect_choice(which, "checkpoint", ("best", "newest"))
    if (path / MANIFEST).is_file():
        checkpoint = load_checkpoint(path)
    else:
        expect_run(path)
        path, checkpoint = chosen_checkpoint(path, which)
    facts = run_facts(checkpoint.facts, str(path))
    try:
        config = ExperimentConfig.model_validate(facts.config)
    except ConfigError as error:
        raise CheckpointError(f"{path} has a config that is not valid here: {error.line}") from None
    check_opening(config, checkpoint.tensors, str(path), scored=False)
    wanted = config.budget.device if device is None else device
    place = torch.device(wanted if wanted != "cuda" or torch.cuda.is_available() else "cpu")
    model = build_model(config)
    model.load_state_dict(model_state(model, checkpoint.tensors, str(path)))
    home = home_of(path)
    file = None if home is None else home / TOKENIZER  # a copy: the data are not needed
    tokenizer = open_tokenizer(file) if file is not None and file.is_file() else config.data.tokenizer()
    return Trained(model.to(place).eval(), config, facts.step, tokenizer, place)


def chosen_checkpoint(folder: Path, which: str) -> tuple[Path, Checkpoint]:
    """The `best` verified checkpoint of a run folder, or the newest where it is asked for or none was evaluated."""
    check_entries(folder)
    path = best_checkpoint(folder / CHECKPOINTS) if which == "best" else None
    chosen = newest_checkpoint(folder / CHECKPOINTS) if path is None else (path, load_checkpoint(path))
    if chosen is None and (folder / WEIGHTS).is_file():
        raise CheckpointError(f"{folder} is an export, without a checkpoint; make a run of it with `hecate import`")
    if chosen is None:
        raise CheckpointError(f"{folder} has no checkpoint yet; train it first")
    return chosen[0], chosen[1]


def reads_text(trained: Trained, where: str) -> Tokenizer:
    """The tokenizer of a model; `ConfigError` where it has none."""
    if trained.tokenizer is not None:
        return trained.tokenizer
    what = f"trained on task {trained.config.data.kind!r}, which has no text to continue"
    if trained.config.data.length() is None:
        what = "trained on tokens that came without a tokenizer: put its tokenizer.json into the run folder"
    raise ConfigError(f"{where} was {what}; see samples.txt in the run folder")


class OfLength(NamedTuple):
    """A model's loss on sequences of a length, by how much of them it has read."""

    length: int
    sequences: int
    positions: list[Positions]

    @property
    def labels(self) -> int:
        """All labels of these sequences."""
        return sum(span.labels for span in self.positions)

    @property
    def loss(self) -> float:
        """The mean over them, in nats."""
        return math.fsum(span.loss * span.labels for span in self.positions) / self.labels


def parse_lengths(text: str) -> list[int]:
    """Numbers of tokens, such as 512,4k: k is 1,024, m its square."""
    matches = [re.fullmatch(r"(\d{1,9})([km]?)", part.strip(), re.I) for part in text.split(",")]
    lengths = [int(match[1]) * 1024 ** " km".index(match[2].lower() or " ") for match in matches if match]
    if len(lengths) < len(matches) or not all(0 < length <= 1 << 30 for length in lengths):
        raise ConfigError(f"--lengths must be numbers of tokens such as 1k,4k,16k, got {shorten(text)}")
    return sorted(set(lengths))


def source_of(trained: Trained, path: Path | None) -> Source:
    """The run's own data, or all of other ones for validation."""
    data = trained.config.data
    if path is None:
        return data.load()
    if isinstance(data, Tokens):
        if not ((path / SIDECAR).is_file() or path.suffix == ".bin" or any(path.glob("*.bin"))):
            raise DataError(
                f"{path} are no token shards, which this run was trained on; make some with: hecate data tokenize "
                f"{path} --tokenizer TOKENIZER --out FOLDER"
            )
        digest = getattr(trained.tokenizer, "sha256", None)
        other = data.model_copy(update={"path": str(path), "validation": str(path), "tokenizer_file": None})
        theirs = other.tokenizer()
        if digest is not None and theirs is not None and theirs.sha256 != digest:
            raise DataError(
                f"the tokens of {path} are of another tokenizer than those of the run; tokenize it with that"
            )
        return other.load()
    if not isinstance(trained.tokenizer, Bytes):
        raise ConfigError(f"--data is for texts and tokens, and the run was trained on {data.kind!r}; leave it out")
    return Text.model_validate({"paths": [str(path)]}).load().held_out()


def by_length(trained: Trained, source: Source, lengths: Sequence[int]) -> list[OfLength]:
    """The loss of every length, each on about as many tokens as an evaluation of the run takes. [TRAIN-EVAL-D3]"""
    budget, fixed = trained.config.budget, trained.config.data.length()
    if fixed is not None and list(lengths) != [fixed]:
        raise ConfigError(
            f"--lengths: data {trained.config.data.kind!r} has sequences of length {fixed}, got "
            f"{', '.join(map(str, lengths))}; leave it out"
        )
    scores = []
    for length in lengths:
        # As many tokens a batch as in training, which is known to fit.
        rows = max(1, min(budget.batch_size, budget.batch_size * trained.config.seq_len // length))
        batches = list(source.validation_batches(rows, length, budget.eval_batches))
        sequences = sum(len(batch.tokens) for batch in batches)
        scores.append(OfLength(length, sequences, loss_by_position(trained.model, batches, trained.device)))
    return scores


def tables(trained: Trained, source: Source, scores: Sequence[OfLength]) -> list[Table]:
    """The printed tables: a row for each length, and the loss by position of all of them."""
    each = source.metric == "bits_per_byte" and source.lengths is None
    header = "length", "sequences", "labels", "loss (nats)", "bits per byte" if each else "perplexity"
    rows = []
    for score in scores:
        counts, loss = (score.length, score.sequences, score.labels), score.loss
        last = loss / math.log(2) if each else math.exp(min(loss, 700))
        rows.append((*(f"{count:,}" for count in counts), f"{loss:.4f}", f"{last:.4f}"))
    return [(header, rows), table_by_position((score.length, score.positions) for score in scores)]


# Weights.

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
        files = _indexed_files(path) if (path / _INDEX).exists() else [path / WEIGHTS]
        return {name: value for file in files for name, value in _read_file(file).items()}
    return _read_file(path)


def _model(checkpoint: Checkpoint, path: Path) -> dict[str, Tensor]:
    """The tensors of the model, which every caller copies: refused where there is no room for them, or for what the
    checkpoint claims."""
    stored = checkpoint.tensors.items()
    weights = {name.removeprefix("model/"): value for name, value in stored if name.startswith("model/")}
    if not weights:
        raise CheckpointError(f"{path} holds no model; name a checkpoint of a run")
    try:
        config = ExperimentConfig.model_validate(checkpoint.facts.get("config"))
    except ConfigError:  # of kinds that are not imported here: the weights can be written all the same
        config = None
    if config is not None:
        check_weights(config)
    size = sum(value.nbytes for value in weights.values())
    check_room(size, f"{path} has tensors of a model", "use a larger machine", error=CheckpointError)
    return weights


def _indexed_files(folder: Path) -> list[Path]:
    """Files that an index lists, of this folder alone."""
    try:
        names = sorted(set(json.loads(read_whole(folder / _INDEX))["weight_map"].values()))
        inside = all(isinstance(name, str) and Path(name).name == name for name in names)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        inside = False
    if not inside:
        raise CheckpointError(f"{folder / _INDEX} is not an index of files in its folder; name one safetensors file")
    return [folder / name for name in names]


def _read_file(file: Path) -> dict[str, Tensor]:
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
        checkpoint = trainer.checkpoint()
    with written_folder(out, "choose another --out") as folder:
        save_checkpoint(folder / CHECKPOINTS, 0, checkpoint)
        write_file(folder / CONFIG, dump_experiment(config))
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
    state, weights, lines, fault = trainer.model.state_dict(), dict[str, Tensor](), list[str](), None
    try:
        weights, lines = _fitting_tensors(path, state)
    except CheckpointError as error:
        fault = str(error)
    if first := trainer.world.first_of(fault):  # on every rank, for the others would wait
        raise CheckpointError(f"init_from: {first[1]}")
    if trainer.world.size > 1:  # each has read it where it runs
        trainer.world.agree({"init_from": {name: summary(value)["sha256"] for name, value in weights.items()}})
    with torch.no_grad():
        for name, value in weights.items():
            overwrite(state[name], value.to(state[name].dtype))
    return lines


def _fitting_tensors(path: Path, state: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], list[str]]:
    """The stored tensors that a model takes, and notes on these and on the rest."""
    weights = read_weights(path)
    matches = {name: value for name, value in weights.items() if name in state}
    if not matches:
        raise CheckpointError(
            f"no tensor of {path} has a name of this model; there are {_names(weights)} there and {_names(state)} here"
        )
    for name, value in matches.items():
        _check_kind(f"tensor {name!r} of {path}", value, state[name])
    sides = {"not there, and drawn anew": state.keys() - matches.keys(), "left over": weights.keys() - state.keys()}
    lines = [f"{what}: {_names(sorted(names))}" for what, names in sides.items() if names]
    return matches, [f"began from {path}: {len(matches)} tensors", *lines]


def _check_kind(where: str, value: Tensor, target: Tensor) -> None:
    """Refuses another shape, and numbers of another kind."""
    if value.shape != target.shape:
        raise CheckpointError(
            f"{where} is {list(value.shape)}, the model has {list(target.shape)}: they are of other sizes"
        )
    if value.is_floating_point() != target.is_floating_point() or value.is_complex() != target.is_complex():
        raise CheckpointError(f"{where} is {value.dtype}, the model has {target.dtype}")


def _names(names: Iterable[str]) -> str:
    shown = list(names)
    return ", ".join(shown[:SHOWN]) + (f" and {len(shown) - SHOWN} more" if shown[SHOWN:] else "")
