"""A trained model from its folder, without its data."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from hecate.checks import expect_choice
from hecate.data import Tokenizer
from hecate.data.shards import TOKENIZER
from hecate.data.tokenizer import open_tokenizer
from hecate.errors import CheckpointError, ConfigError
from hecate.train.checkpoint import MANIFEST, Checkpoint, best_checkpoint, load_checkpoint, newest_checkpoint
from hecate.train.config import ExperimentConfig
from hecate.train.estimate import check_opening
from hecate.train.folder import CHECKPOINTS, check_entries, expect_run, home_of
from hecate.train.state import model_state, run_facts
from hecate.train.trainer import build_model

WEIGHTS = "model.safetensors"


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
    path, checkpoint = find_checkpoint(Path(folder), which)
    facts = run_facts(checkpoint.facts, str(path))
    try:
        config = ExperimentConfig.model_validate(facts.config)
    except ConfigError as error:
        raise CheckpointError(f"{path} has a config that is not valid here: {error.line}") from None
    check_opening(config, numbers_of(checkpoint), str(path), scored=False)
    wanted = config.budget.device if device is None else device
    place = torch.device(wanted if wanted != "cuda" or torch.cuda.is_available() else "cpu")
    model = build_model(config)
    model.load_state_dict(model_state(model, checkpoint.tensors, str(path)))
    return Trained(model.to(place).eval(), config, facts.step, _tokenizer(path, config), place)


def numbers_of(checkpoint: Checkpoint) -> list[tuple[str, int]]:
    """Number of elements of each tensor, by name."""
    return [(name, tensor.numel()) for name, tensor in checkpoint.tensors.items()]


def find_checkpoint(folder: Path, which: str = "best") -> tuple[Path, Checkpoint]:
    """A verified checkpoint of a run folder, or the one whose folder it is."""
    expect_choice(which, "checkpoint", ("best", "newest"))
    if (folder / MANIFEST).is_file():
        return folder, load_checkpoint(folder)
    expect_run(folder)
    return chosen_checkpoint(folder, which)


def chosen_checkpoint(folder: Path, which: str) -> tuple[Path, Checkpoint]:
    """The `best` verified checkpoint of a run folder, or the newest where it is asked for or none was evaluated."""
    check_entries(folder)
    path = best_checkpoint(folder / CHECKPOINTS) if which == "best" else None
    found = newest_checkpoint(folder / CHECKPOINTS) if path is None else (path, load_checkpoint(path))
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


def _tokenizer(path: Path, config: ExperimentConfig) -> Tokenizer | None:
    """The copy that lies in the run folder, else the data's own."""
    home = home_of(path)
    copy = None if home is None else home / TOKENIZER
    return open_tokenizer(copy) if copy is not None and copy.is_file() else config.data.tokenizer()
