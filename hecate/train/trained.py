"""Trained models: opening them from a run folder without its data; their loss on other data and on longer sequences
than in training; exporting and importing weights as safetensors, for torch and for DCP. [CKPT-EXPORT-D1]

Nothing is unpickled: torch's `.pt` files and DCP's own folders are written for other programs, and refused as input,
since they contain pickles.
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
from torch import Tensor

from hecate.checks import check_room, expect_choice
from hecate.data import Bytes, Source, Text, Tokenizer, Tokens
from hecate.data.shards import SIDECAR, TOKENIZER
from hecate.data.tokenizer import open_tokenizer
from hecate.distributed import overwrite
from hecate.distributed.shard import settle
from hecate.errors import CheckpointError, ConfigError, DataError, retelling, shorten
from hecate.files import expect_free, read_whole, write_file, written_folder
from hecate.models import LanguageModel
from hecate.train import checkpoint as store
from hecate.train.checkpoint import MANIFEST, Checkpoint, load_checkpoint
from hecate.train.compose import dump_experiment, load_experiment
from hecate.train.config import ExperimentConfig
from hecate.train.estimate import check_opening, check_weights
from hecate.train.evaluate import Positions, loss_by_position
from hecate.train.report import Table, table_by_position
from hecate.train.state import model_state, run_facts
from hecate.train.trainer import Trainer, build_model

# A run folder may come from somebody else. So everything that hecate reads or writes in it by name must be a regular
# file or folder: no link, which could lead to another file of the user's, and no pipe or device, on which reading could
# block. The run folder itself may be anywhere, and may be reached through a link.
CONFIG, METRICS, CHECKPOINTS, WEIGHTS = "config.yaml", "metrics.jsonl", "checkpoints", "model.safetensors"
NAMES = (CONFIG, "env.json", METRICS, "samples.txt", "report.md", "report.html", "logger-id.txt", TOKENIZER,
         CHECKPOINTS, "figures", "evals", "tensorboard", "wandb")  # fmt: skip
"""Names of the files and folders that are read or written in a run folder."""


def expect_run(folder: Path, cure: str = "name one that `hecate train` has written, such as runs/quickstart") -> None:
    """Refuses a folder that is not a run folder, or that has links in it; `cure` is the remedy in the message."""
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
    """True if a folder is a model of transformers: it has a config.json, and no config of a run."""
    return (folder / "config.json").is_file() and not (folder / CONFIG).exists()


def check_entries(folder: Path) -> None:
    """Refuses a folder with a link, a pipe or a device in place of one of a run's files or folders.
    [TRAIN-FOLDER-D1]"""
    for path in map(folder.joinpath, NAMES):
        store.refuse_link(path)
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise CheckpointError(f"{path} is a pipe or a device; put a run's own file in its place")


def home_of(path: Path) -> Path | None:
    """The folder with the config.yaml for a path: the path, its parent if it is a file, or for a checkpoint the run's
    folder; None if there is none."""
    above = path.resolve().parent
    for folder in (path if path.is_dir() else path.parent, *([above.parent] if above.name == CHECKPOINTS else [])):
        check_entries(folder)
        if (folder / CONFIG).is_file():
            return folder
    return None


class Trained(NamedTuple):
    """A model with the parameters of a checkpoint, in evaluation mode on `device`."""

    model: LanguageModel
    config: ExperimentConfig
    step: int
    tokenizer: Tokenizer | None
    device: torch.device


def open_model(folder: Path | str, which: str = "best", device: str | None = None) -> Trained:
    """The model of a run folder's `best` or `newest` checkpoint, or of a checkpoint folder; the training data are not
    needed. [TRAIN-OPEN-D1]

    `device` None takes the device of the run, or the CPU if this machine lacks it.
    """
    expect_choice(which, "checkpoint", ("best", "newest"))
    path = Path(folder)
    if not (path / MANIFEST).is_file():
        expect_run(path)
    path, checkpoint = chosen_checkpoint(path, which)
    facts = run_facts(checkpoint.facts, str(path))
    with retelling(CheckpointError, f"{path} has a config that is not valid here"):
        config = ExperimentConfig.model_validate(facts.config)
    check_opening(config, checkpoint.tensors, str(path), scored=False)
    wanted = config.budget.device if device is None else device
    place = torch.device(wanted if wanted != "cuda" or torch.cuda.is_available() else "cpu")
    model = build_model(config)
    model.load_state_dict(model_state(model, checkpoint.tensors, str(path)))
    home = home_of(path)
    file = None if home is None else home / TOKENIZER  # a copy, so that the data are not needed
    tokenizer = open_tokenizer(file) if file is not None and file.is_file() else config.data.tokenizer()
    return Trained(model.to(place).eval(), config, facts.step, tokenizer, place)


def chosen_checkpoint(folder: Path, which: str) -> tuple[Path, Checkpoint]:
    """The `best` checkpoint of a run folder, verified; the newest if that is asked for or none was evaluated; of a
    checkpoint's own folder that one."""
    if (folder / MANIFEST).is_file():
        return folder, load_checkpoint(folder)
    check_entries(folder)
    path = store.best_checkpoint(folder / CHECKPOINTS) if which == "best" else None
    chosen = store.newest_checkpoint(folder / CHECKPOINTS) if path is None else (path, load_checkpoint(path))
    if chosen is None and (folder / WEIGHTS).is_file():
        raise CheckpointError(f"{folder} is an export, without a checkpoint; make a run of it with `hecate import`")
    if chosen is None:
        raise CheckpointError(f"{folder} has no checkpoint yet; train it first")
    return chosen[:2]


def reads_text(trained: Trained, where: str) -> Tokenizer:
    """The tokenizer of a model; `ConfigError` if it has none."""
    if trained.tokenizer is not None:
        return trained.tokenizer
    what = f"trained on task {trained.config.data.kind!r}, which has no text to continue"
    if trained.config.data.length() is None:
        what = "trained on tokens that came without a tokenizer: put its tokenizer.json into the run folder"
    raise ConfigError(f"{where} was {what}; see samples.txt in the run folder")


class OfLength(NamedTuple):
    """A model's loss on sequences of one length, by position."""

    length: int
    sequences: int
    positions: list[Positions]

    @property
    def labels(self) -> int:
        """Number of labels in these sequences."""
        return sum(span.labels for span in self.positions)

    @property
    def loss(self) -> float:
        """Mean loss over the labels, in nats."""
        return math.fsum(span.loss * span.labels for span in self.positions) / self.labels


def parse_lengths(text: str) -> list[int]:
    """Lengths in tokens from a text such as 512,4k, sorted; k is 1,024, m its square."""
    matches = [re.fullmatch(r"(\d{1,9})([km]?)", part.strip(), re.I) for part in text.split(",")]
    lengths = [int(match[1]) * 1024 ** " km".index(match[2].lower() or " ") for match in matches if match]
    if len(lengths) < len(matches) or not all(0 < length <= 1 << 30 for length in lengths):
        raise ConfigError(f"--lengths must be numbers of tokens such as 1k,4k,16k, got {shorten(text)}")
    return sorted(set(lengths))


def source_of(trained: Trained, path: Path | None) -> Source:
    """The run's own data; or with a path all of the data there, for validation."""
    data = trained.config.data
    if path is None:
        return data.load()
    if isinstance(data, Tokens):
        if not ((path / SIDECAR).is_file() or path.suffix == ".bin" or any(path.glob("*.bin"))):
            cure = f"make some with: hecate data tokenize {path} --tokenizer TOKENIZER --out FOLDER"
            raise DataError(f"{path} are no token shards, which this run was trained on; {cure}")
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
    """The loss at every length, each on about as many tokens as an evaluation of the run. [TRAIN-EVAL-D3]"""
    budget, fixed = trained.config.budget, trained.config.data.length()
    if fixed is not None and list(lengths) != [fixed]:
        raise ConfigError(
            f"--lengths: data {trained.config.data.kind!r} has sequences of length {fixed}, got "
            f"{', '.join(map(str, lengths))}; leave it out"
        )
    scores = []
    for length in lengths:
        # As many tokens per batch as in training, which is known to fit into memory.
        rows = max(1, min(budget.batch_size, budget.batch_size * trained.config.seq_len // length))
        batches = list(source.validation_batches(rows, length, budget.eval_batches))
        sequences = sum(len(batch.tokens) for batch in batches)
        scores.append(OfLength(length, sequences, loss_by_position(trained.model, batches, trained.device)))
    return scores


def tables(trained: Trained, source: Source, scores: Sequence[OfLength]) -> list[Table]:
    """The tables to print: a row for each length, and the loss by position at all lengths."""
    each = source.metric == "bits_per_byte" and source.lengths is None
    header = "length", "sequences", "labels", "loss (nats)", "bits per byte" if each else "perplexity"
    rows = []
    for score in scores:
        counts, loss = (score.length, score.sequences, score.labels), score.loss
        last = loss / math.log(2) if each else math.exp(min(loss, 700))
        rows.append((*(f"{count:,}" for count in counts), f"{loss:.4f}", f"{last:.4f}"))
    return [(header, rows), table_by_position((score.length, score.positions) for score in scores)]


# Export and import of weights.

FORMATS = ("safetensors", "torch", "dcp")
_INDEX = "model.safetensors.index.json"


def read_weights(path: Path, which: str = "best") -> dict[str, Tensor]:
    """Parameters and buffers of a model by name, on the CPU.

    `path`: a run folder (its `best` or `newest` checkpoint), a checkpoint folder, a safetensors file, or a folder of
    such files (`model.safetensors`, or those listed in `model.safetensors.index.json`). Raises `CheckpointError`.
    """
    expect_choice(which, "checkpoint", ("best", "newest"))
    if (path / MANIFEST).is_file() or (path / CHECKPOINTS).is_dir():
        home, checkpoint = chosen_checkpoint(path, which)
        return _model(checkpoint, home)
    if path.is_dir():
        files = _indexed_files(path) if (path / _INDEX).exists() else [path / WEIGHTS]
        return {name: value for file in files for name, value in _read_file(file).items()}
    return _read_file(path)


def _model(checkpoint: Checkpoint, path: Path) -> dict[str, Tensor]:
    """The tensors of the model in a checkpoint. Every caller copies them, so it refuses if memory does not suffice for
    a copy, or for the model of the checkpoint's config."""
    stored = checkpoint.tensors.items()
    weights = {name.removeprefix("model/"): value for name, value in stored if name.startswith("model/")}
    if not weights:
        raise CheckpointError(f"{path} holds no model; name a checkpoint of a run")
    try:
        config = ExperimentConfig.model_validate(checkpoint.facts.get("config"))
    except ConfigError:
        pass  # it may have kinds that are not imported here; the weights can be exported all the same
    else:
        check_weights(config)
    size = sum(value.nbytes for value in weights.values())
    check_room(size, f"{path} has tensors of a model", "use a larger machine", error=CheckpointError)
    return weights


def _indexed_files(folder: Path) -> list[Path]:
    """The files that an index lists; refuses files outside its folder."""
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
        cure = "write its tensors with safetensors.torch.save_file and name that file"
        raise CheckpointError(f"{file} is a pickle, which can run code when it is read; {cure}")
    if not file.is_file():
        raise CheckpointError(
            f"{file} is missing; name a run folder, a checkpoint folder or a safetensors file, such as {WEIGHTS}"
        )
    with store.open_tensors(file, "write it again") as opened:
        return {name: opened.get_tensor(name) for name in opened.keys()}


def export_weights(run: Path, to: str, out: Path, which: str = "best") -> Path:
    """Writes a run's weights and config into the new folder `out`, complete or not at all.

    `safetensors`: `model.safetensors`; `torch`: `model.pt` for `torch.load(weights_only=True)`; `dcp`: a folder `model`
    in the format of torch's distributed checkpoint. Names are those of `state_dict()`; `config.yaml` and, if the run
    has one, `tokenizer.json` are written beside it.
    """
    expect_choice(to, "format", FORMATS)
    expect_free(out, "choose another --out")
    tensors = {name: value.clone() for name, value in read_weights(run, which).items()}  # tied weights become separate
    home = home_of(run)
    with written_folder(out, "choose another --out") as folder:
        if to == "safetensors":
            store.write_tensors(tensors, folder / WEIGHTS)
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
    """Copies the tokenizer, if there is one, so that texts can be encoded without the data."""
    if (home / TOKENIZER).is_file():
        write_file(folder / TOKENIZER, read_whole(home / TOKENIZER))


def _write_dcp(tensors: dict[str, Tensor], folder: Path) -> None:
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # one process is intended
        save(dict(tensors), storage_writer=FileSystemWriter(folder), no_dist=True)


def import_weights(source: Path, out: Path, config: ExperimentConfig | None = None) -> Path:
    """Makes a run folder at step 0 whose model has the weights that `read_weights` finds in `source`.

    `config` None takes the `config.yaml` beside them. Names, shapes and dtypes must be the model's. `hecate train --out
    OUT --resume` trains it from there. Raises `CheckpointError`, `ConfigError`.
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
        # With optimisers that have not stepped, and the data cursor at the beginning.
        checkpoint = trainer.checkpoint()
    with written_folder(out, "choose another --out") as folder:
        store.save_checkpoint(folder / CHECKPOINTS, 0, checkpoint)
        write_file(folder / CONFIG, dump_experiment(config))
        _copy_tokenizer(beside.parent, folder)
    return out


SHOWN = 5


def begin_from(trainer: Trainer, path: Path) -> list[str]:
    """Overwrites a model's parameters and buffers with those of a run, a checkpoint or a safetensors file, by name;
    returns lines for the user. [TRAIN-INIT-D1]

    Names that only one side has are listed in the lines; parameters that only the model has stay as they were drawn.
    Refused are a tensor of another shape, a file without any matching name, and files that differ between ranks.
    Floating-point numbers are converted to the model's dtype.
    """
    settle(trainer.model)
    state, weights, lines, fault = trainer.model.state_dict(), dict[str, Tensor](), list[str](), None
    try:
        weights, lines = _fitting_tensors(path, state)
    except CheckpointError as error:
        fault = str(error)
    if first := trainer.world.first_of(fault):  # on every rank, as the others would wait
        raise CheckpointError(f"init_from: {first[1]}")
    if trainer.world.size > 1:  # each rank has read its own file
        trainer.world.agree({"init_from": {name: store.summary(value)["sha256"] for name, value in weights.items()}})
    with torch.no_grad():
        for name, value in weights.items():
            overwrite(state[name], value.to(state[name].dtype))
    return lines


def _fitting_tensors(path: Path, state: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], list[str]]:
    """The stored tensors with names of the model, and lines about them and the others."""
    weights = read_weights(path)
    matches = {name: value for name, value in weights.items() if name in state}
    if not matches:
        raise CheckpointError(
            f"no tensor of {path} has a name of this model; there are {_names(weights)} there and {_names(state)} here"
        )
    for name, value in matches.items():
        target, where = state[name], f"tensor {name!r} of {path}"
        if value.shape != target.shape:
            raise CheckpointError(
                f"{where} is {list(value.shape)}, the model has {list(target.shape)}: they are of other sizes"
            )
        # Integers, floating point and complex numbers are of other kinds.
        if value.is_floating_point() != target.is_floating_point() or value.is_complex() != target.is_complex():
            raise CheckpointError(f"{where} is {value.dtype}, the model has {target.dtype}")
    sides = {"not there, and drawn anew": state.keys() - matches.keys(), "left over": weights.keys() - state.keys()}
    lines = [f"{what}: {_names(sorted(names))}" for what, names in sides.items() if names]
    return matches, [f"began from {path}: {len(matches)} tensors", *lines]


def _names(names: Iterable[str]) -> str:
    shown = list(names)
    return ", ".join(shown[:SHOWN]) + (f" and {len(shown) - SHOWN} more" if shown[SHOWN:] else "")
