"""Run folders as anybody may have made them: what is in one is looked at before it is read or written.

A run folder may come by mail. So what hecate reads or writes in it by name is a file or a folder of its own: no link,
which could lead to a file of the reader's, and no pipe or device, which would be waited for. The folder itself may be
reached through a link and lie anywhere.
"""

from __future__ import annotations

from pathlib import Path

from hecate.data.shards import TOKENIZER
from hecate.errors import CheckpointError

CONFIG, METRICS, CHECKPOINTS = "config.yaml", "metrics.jsonl", "checkpoints"
NAMES = (CONFIG, "env.json", METRICS, "samples.txt", "report.md", "logger-id.txt", TOKENIZER,
         CHECKPOINTS, "figures", "evals", "tensorboard", "wandb")  # fmt: skip
"""Names that are read or written in a run folder."""


def expect_run(folder: Path) -> None:
    """Refuses what is no run folder, or one with links."""
    check_entries(folder)
    if not (folder / CONFIG).exists():
        raise CheckpointError(
            f"{folder} is not a run folder: it has no config.yaml; name one that `hecate train` has written, such as "
            "runs/quickstart"
        )


def check_entries(folder: Path) -> None:
    """Refuses a folder in which a link, a pipe or a device stands where a run has a file or a folder.
    [TRAIN-FOLDER-D1]"""
    for path in map(folder.joinpath, NAMES):
        refuse_link(path)
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise CheckpointError(f"{path} is a pipe or a device; put a run's own file in its place")


def refuse_link(path: Path) -> None:
    """A link may lead out of the run: to a file of others, or one that changes."""
    if path.is_symlink():
        raise CheckpointError(
            f"{path} is a symbolic link, which may lead out of the run; put what it points to in its place"
        )


def home_of(path: Path) -> Path | None:
    """The run folder that a path is or that a file lies in, or a checkpoint's own folder; None where there is none."""
    above = path.resolve().parent
    for folder in (path if path.is_dir() else path.parent, *([above.parent] if above.name == CHECKPOINTS else [])):
        check_entries(folder)
        if (folder / CONFIG).is_file():
            return folder
    return None
