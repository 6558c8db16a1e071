"""A trained model from its run folder, without its data; and its loss on other data and on longer sequences than it was
trained on."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from hecate.checks import expect_choice
from hecate.data import Bytes, Source, Text, Tokenizer, Tokens
from hecate.data.shards import SIDECAR, TOKENIZER
from hecate.data.tokenizer import open_tokenizer
from hecate.errors import CheckpointError, ConfigError, DataError, shorten
from hecate.train import checkpoint as store
from hecate.train.config import ExperimentConfig
from hecate.train.estimate import check_opening
from hecate.train.evaluate import Positions, loss_by_position
from hecate.train.report import Table, table_by_position
from hecate.train.state import model_state, run_facts
from hecate.train.trainer import build_model

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
        store.refuse_link(path)
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
    if (path / store.MANIFEST).is_file():
        checkpoint = store.load_checkpoint(path)
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
    own = None if home is None else home / TOKENIZER  # a copy: the data are not needed
    tokenizer = open_tokenizer(own) if own is not None and own.is_file() else config.data.tokenizer()
    return Trained(model.to(place).eval(), config, facts.step, tokenizer, place)


def chosen_checkpoint(folder: Path, which: str) -> tuple[Path, store.Checkpoint]:
    """The `best` verified checkpoint of a run folder, or the newest where it is asked for or none was evaluated."""
    check_entries(folder)
    path = store.best_checkpoint(folder / CHECKPOINTS) if which == "best" else None
    found = store.newest_checkpoint(folder / CHECKPOINTS) if path is None else (path, store.load_checkpoint(path))
    if found is None and (folder / WEIGHTS).is_file():
        raise CheckpointError(f"{folder} is an export, without a checkpoint; make a run of it with `hecate import`")
    if found is None:
        raise CheckpointError(f"{folder} has no checkpoint yet; train it first")
    return found[0], found[1]


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
    found = [re.fullmatch(r"(\d{1,9})([km]?)", part.strip(), re.I) for part in text.split(",")]
    lengths = [int(x[1]) * 1024 ** " km".index(x[2].lower() or " ") for x in found if x]
    if len(lengths) < len(found) or not all(0 < length <= 1 << 30 for length in lengths):
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
        own = getattr(trained.tokenizer, "sha256", None)
        other = data.model_copy(update={"path": str(path), "validation": str(path), "tokenizer_file": None})
        theirs = other.tokenizer()
        if own is not None and theirs is not None and theirs.sha256 != own:
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
    found = []
    for length in lengths:
        # As many tokens a batch as in training, which is known to fit.
        rows = max(1, min(budget.batch_size, budget.batch_size * trained.config.seq_len // length))
        batches = list(source.validation_batches(rows, length, budget.eval_batches))
        sequences = sum(len(batch.tokens) for batch in batches)
        found.append(OfLength(length, sequences, loss_by_position(trained.model, batches, trained.device)))
    return found


def tables(trained: Trained, source: Source, found: Sequence[OfLength]) -> list[Table]:
    """The printed tables: a row for each length, and the loss by position of all of them."""
    each = source.metric == "bits_per_byte" and source.lengths is None
    header = "length", "sequences", "labels", "loss (nats)", "bits per byte" if each else "perplexity"
    rows = []
    for own in found:
        last = own.loss / math.log(2) if each else math.exp(min(own.loss, 700))
        rows.append((f"{own.length:,}", f"{own.sequences:,}", f"{own.labels:,}", f"{own.loss:.4f}", f"{last:.4f}"))
    return [(header, rows), table_by_position((own.length, own.positions) for own in found)]
