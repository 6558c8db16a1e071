"""`hecate report`: analysis of a trained run's memories, added to its report."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from hecate.cms.health import NOTHING
from hecate.errors import CheckpointError, ConfigError, HealthWarning
from hecate.figure import figure_type
from hecate.files import read_whole, refusing
from hecate.microscope.look import look
from hecate.microscope.view import MemoryView, View
from hecate.train.report import markdown_table, write_page
from hecate.train.run import open_run
from hecate.train.trainer import Trainer

BEGIN, END = "<!-- microscope -->", "<!-- end of microscope -->"
LONGEST = 256  # default number of tokens: maps of more are too fine for a figure


class Reported(NamedTuple):
    """Written files, the run's step, and the number of tokens read."""

    report: Path
    figures: list[Path]
    step: int
    tokens: int


def report_run(run: Path | str, *, tokens: int | None = None, out: Path | str | None = None) -> Reported:
    """Draws the memories of a run's newest sound checkpoint on its first validation sequence, and adds the figures to
    its report. [SCOPE-REPORT-D1]

    Args:
        run: a run folder.
        tokens: number of tokens to read; None takes the run's own length, at most 256. Tasks have a
            fixed length: more tokens are refused, and fewer are the beginning of a sequence.
        out: folder for `figures/` and `report.md`; None takes the run folder.

    Warns:
        HealthWarning: a memory whose writes have no effect.

    Raises:
        CheckpointError: not a run folder, no checkpoint, or a folder that cannot be written.
        ConfigError: a model without memories, or matplotlib is not installed.
    """
    figure_type("a report with pictures")
    trainer, step = open_run(run, "newest")
    read = _sequence(trainer, tokens)
    view = look(trainer.model, read)
    warn_of_silence(view)
    folder = Path(run if out is None else out)
    with refusing(f"write the report into {folder}", "choose another --out"):
        path = folder / "report.md"
        try:  # as bytes, so that line ends are not changed
            before = read_whole(path).decode() if path.exists() else f"# {trainer.config.name}\n"
        except UnicodeDecodeError:
            raise CheckpointError(
                f"{path} is no UTF-8 text, so nothing can be added to it; move it away, or choose another --out"
            ) from None
        figures = view.save(folder / "figures")
        write_page(path, with_section(before, _section(view, figures, step, read.shape[1])))
    return Reported(path, figures, step, read.shape[1])


def with_section(text: str, section: str) -> str:
    """A report with the microscope's section, in place of the last one, or else at the end.

    Everything outside of the markers stays unchanged. [SCOPE-REPORT-I1]
    """
    end = text.rfind(END)
    begin = text.rfind(BEGIN, 0, max(end, 0))
    if begin < 0:
        gap = "" if not text or text.endswith("\n\n") else "\n" if text.endswith("\n") else "\n\n"
        return f"{text}{gap}{BEGIN}\n{section}\n{END}\n"
    return f"{text[:begin]}{BEGIN}\n{section}\n{text[end:]}"


def _sequence(trainer: Trainer, tokens: int | None) -> Tensor:
    """The first validation sequence, `[1, T]`."""
    config, fixed = trainer.config, trainer.config.data.length()
    if tokens is not None and tokens < 1:
        raise ConfigError(f"must be at least 1, got {tokens}", path=("tokens",))
    count = min(config.seq_len, LONGEST) if tokens is None else tokens
    if fixed is not None and count > fixed:
        raise ConfigError(
            f"sequences of task {config.data.kind!r} have {fixed} tokens, got {count}; give at most that many",
            path=("tokens",),
        )
    batch = next(iter(trainer.source.validation_batches(1, fixed or count, 1)))
    return batch.tokens[:1, :count].to(trainer.device)


def _section(view: View, figures: Sequence[Path], step: int, tokens: int) -> str:
    rows = [(f"`{name}`", *_facts(item)) for name, item in view.items()]
    lines = [
        "## Memory microscope",
        f"Checkpoint of step {step}, the first {tokens} tokens of the first validation sequence. "
        "Map: how much of each written token's value is in each answer, exactly, where the rule is "
        "linear in its values. Bands: least to largest over heads. Recall: the cosine between the "
        "answer to a key and the value that was written with it, by age. Write: the share of an error that one write "
        "takes away at once, and 32 tokens on.",
        markdown_table(
            ("memory", "norm", "effective rank", "recall, newest -> oldest", "write", "attention map"), rows
        ),
        *(f"![{name}](figures/{path.with_suffix('.svg').name})" for name, path in zip(view, figures, strict=True)),
    ]
    return "\n\n".join(lines) + "\n"


def warn_of_silence(view: View) -> None:
    """Warns (`HealthWarning`, two calls up) of every memory whose writes have no effect. [SCOPE-STRENGTH-I1]"""
    for name, item in view.items():
        if item.strength is not None and item.strength.largest < NOTHING:
            warnings.warn(
                f"memory {name!r} writes nothing: no write that was followed changes an answer by more than "
                f"{item.strength.largest:.1g} of a value; raise algorithm.lr or lr_start, let a deep memory forget "
                "towards its start (retention.towards), or take step='normalized'",
                HealthWarning,
                stacklevel=3,
            )


def _facts(view: MemoryView) -> tuple[str, str, str, str, str]:
    """Table cells of a memory, as means over heads and weights: norm and rank at start and end, recall of the newest
    and oldest tokens, strength of writes, and whether there is a map."""
    norm, rank = (
        " -> ".join(f"{_mean(items, at):.3g}" for at in (0, -1)) if items else "-" for items in (view.norms, view.ranks)
    )
    recall = view.unasked or "nothing was written"
    if not view.unasked and view.recall.known():
        recalled = view.recall.by_age().means.nanmean(0)
        recall = f"{float(recalled[0]):.2f} -> {float(recalled[-1]):.2f}"
    strength, write = view.strength, "too short to tell"
    if strength is not None:
        write = " -> ".join(f"{100 * float(item.mean()):.1f} %" for item in (strength.share, strength.share_later))
    return norm, rank, recall, write, view.refusal or "yes"


def _mean(items: dict[str, Tensor], at: int) -> float:
    return sum(float(item[0, :, at].mean()) for item in items.values()) / len(items)
