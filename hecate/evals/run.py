"""Asking a model several tasks: any callable, or a run of hecate's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from hecate.data import DataConfig, Task, Tokenizer
from hecate.errors import CheckpointError, ConfigError, not_known, shorten
from hecate.evals.base import PIECE, Evaluation, Given, Reader, Result
from hecate.evals.report import Report
from hecate.evals.tasks import MOST, Niah, Synthetic, encoder_of, read_text
from hecate.models import LanguageModel
from hecate.train.trained import Trained, home_of, open_model

AT_ONCE = 1 << 14
"""Tokens of a batch."""


def task_names() -> list[str]:
    """Names of all tasks: the evaluations in text, then the synthetic tasks."""
    text = [name for name in Evaluation.variants() if name != "synthetic"]
    own = [name for name, kind in DataConfig.variants().items() if issubclass(kind, Task)]
    return [*text, "niah_1", "niah_2", "niah_3", *own]


def evaluation_of(name: str | Evaluation | Task, **fields: Any) -> Evaluation:
    """The evaluation of a name, such as niah, niah_2 or parity, with the fields given that it has and that are not
    None; `ConfigError` names the nearest where there is none."""
    if isinstance(name, Evaluation):
        return name
    if isinstance(name, Task):
        return Synthetic(data=name, **_shared(Synthetic, fields))
    if name not in task_names():
        known = task_names()
        raise ConfigError(f"no task {shorten(name)}{not_known(name, known)}")
    if name in DataConfig.variants():
        return Synthetic(data=DataConfig.model_validate({"kind": name}), **_shared(Synthetic, fields))
    if name.startswith("niah_"):
        return Niah.model_validate({"forms": (int(name[-1]),), **_shared(Niah, fields)})
    kind = Evaluation.variants()[name]
    return kind(**_shared(kind, fields))


def _shared(kind: type[Any], fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None and name in kind.model_fields}


def evaluate_tasks(
    model: Callable[..., Any],
    tokenizer: Any,
    tasks: Sequence[str | Evaluation | Task],
    *,
    text: str | None = None,
    vocabulary: int | None = None,
    longest: int | None = None,
    device: torch.device | str | None = None,
    tokens_at_once: int = AT_ONCE,
) -> list[Result]:
    """Scores a model in tasks: names, `Evaluation`s, or tasks of `hecate.data` that it was trained on. [EVAL-TASKS-D1]

    Args:
        model: tokens int64 `[B, T]` to logits `[B, T, V]`; also what gives an object with `.logits` (any transformers
            causal model) or a tuple with the logits first. A `LanguageModel` of hecate's reads 1,024 tokens at a time
            on its state. A module is evaluated in eval mode and is left as it was.
        tokenizer: hecate's or transformers'; None for tasks that have no text.
        text: what needles are hidden in and the loss is measured on; niah_1 and variable_tracking need none.
        vocabulary: how many ids the model knows; None asks `model.config.vocab_size`.
        longest: the most tokens that it reads; None asks `model.config.max_position_embeddings`.
        device: where tokens go; None for the model's own.
        tokens_at_once: tokens a call, one row at least; scores do not depend on it but for rounding.

    Raises:
        ConfigError: an unknown task, a length that does not fit, a vocabulary that is too small, a missing tokenizer.
        DataError: a task in text without one.
    """
    config = getattr(model, "config", None)
    vocabulary = getattr(config, "vocab_size", None) if vocabulary is None else vocabulary
    longest = getattr(config, "max_position_embeddings", None) if longest is None else longest
    encoder = None if tokenizer is None else encoder_of(tokenizer)
    piece = PIECE if isinstance(model, LanguageModel) else None
    reader = Reader(model, None if device is None else torch.device(device), piece, vocabulary)
    given = Given(encoder, text, vocabulary, longest)
    parts = [part for task in tasks for part in evaluation_of(task).parts(given)]  # what cannot be asked is told first
    return [reader.scored(part, tokens_at_once) for part in parts]


def evaluate_run(
    folder: Path | str,
    tasks: Sequence[str],
    *,
    checkpoint: str = "best",
    data: Path | str | None = None,
    lengths: Sequence[int] | None = None,
    samples: int | None = None,
    out: Path | str | None = None,
) -> tuple[Report, Path]:
    """The report of a run's checkpoint on named tasks, and the new folder in RUN/evals (or `out`) that has it.
    [EVAL-RUN-D1]

    A synthetic task is that of the run, with its fields; the text of `data`, or else the run's own validation data.
    """
    trained = open_model(folder, checkpoint)
    place = Path(out) if out is not None else _evals(Path(folder))
    given = None if lengths is None else tuple(lengths)
    wanted = [_of_run(trained, name, {"lengths": given, "samples": samples}) for name in tasks]
    text = None
    if not all(isinstance(task, Synthetic) for task in wanted):
        text = read_text(Path(data)) if data is not None else _own_text(trained)
    elif data is not None:
        raise ConfigError(f"--data is for tasks in text, and {', '.join(tasks)} have none; leave it out")
    size = trained.config.data.vocabulary()
    how: dict[str, Any] = {"text": text, "vocabulary": size, "device": trained.device}
    report = Report(evaluate_tasks(trained.model, trained.tokenizer, wanted, **how))
    origin = None if text is None else str(data or "the run's own")
    asked = [task.model_dump(mode="json") for task in wanted]
    facts = {"run": trained.config.name, "step": trained.step, "text": origin, "tasks": asked}
    return report, report.save(place, f"step-{trained.step}", facts)


def _of_run(trained: Trained, name: str, fields: dict[str, Any]) -> Evaluation:
    own = trained.config.data
    found = evaluation_of(own if isinstance(own, Task) and name == own.kind else name, **fields)
    if not isinstance(found, Synthetic):
        if not isinstance(trained.tokenizer, Tokenizer):
            raise ConfigError(
                f"{name} is a task in text, and the run was trained on {own.kind!r} without a tokenizer; take one "
                "that was trained on text"
            )
        return found
    if name != own.kind:
        raise ConfigError(
            f"task {name!r} is for a model that was trained on it, and the run was trained on {own.kind!r}; train "
            f"one with data.kind={name}"
        )
    return found


def _own_text(trained: Trained) -> str | None:
    """The validation text of a run; None where it cannot be had and needles in noise are still possible."""
    tokenizer, config = trained.tokenizer, trained.config
    if tokenizer is None or config.data.length() is not None:
        return None
    batches = config.data.load().validation_batches(1, config.seq_len, max(1, MOST // config.seq_len))
    return "\n".join(tokenizer.decode(batch.tokens[0].tolist()) for batch in batches)[:MOST]


def _evals(folder: Path) -> Path:
    """Where a run keeps its evaluations, given its folder or that of a checkpoint in it."""
    home = home_of(folder)
    if home is None:
        raise CheckpointError(f"{folder} is a checkpoint outside of a run folder; say with --out where its evals go")
    return home / "evals"
