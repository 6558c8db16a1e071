"""Resuming with other settings than a checkpoint was trained with, where they are allowed by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from hecate.errors import CheckpointError, ConfigError, did_you_mean, format_path, shorten
from hecate.train.checkpoint import Checkpoint
from hecate.train.compose import parse_path, paths
from hecate.train.config import ExperimentConfig
from hecate.train.document import Location
from hecate.train.state import MOVING
from hecate.train.trainer import Trainer

CURSOR = {"seed": "seed", "batch_size": "budget.batch_size", "seq_len": "budget.seq_len"}
"""The settings that entries of a data cursor are of; the fingerprint is of any below `data`."""


class Allowed(NamedTuple):
    """A checkpoint as if it had been trained with this run's settings; of each setting that differed, both values."""

    checkpoint: Checkpoint
    changed: dict[str, tuple[Any, Any]]


def check_allowed(names: Sequence[str], config: ExperimentConfig, resume: bool) -> None:
    """Refuses names that are no settings, or that have nothing to be compared with."""
    if names and not resume:
        raise ConfigError(f"--allow {names[0]} is for a run that is resumed; give --resume as well, or leave it out")
    tree = config.model_dump(mode="json")
    for name in names:
        path = parse_path(name)
        if path is None or _at(tree, path) is None:
            known = map(format_path, paths(tree))
            raise ConfigError(
                f"--allow {shorten(name)}: an experiment has no such setting.{did_you_mean(name, known)} "
                "Write its whole path, such as optim.lr"
            )


def allowing(checkpoint: Checkpoint, trainer: Trainer, names: Sequence[str]) -> Allowed:
    """Takes over the run's own values of the settings that are named, and of what is below them. [CKPT-ALLOW-D1]

    What depends on them follows: the options of the optimiser, and the data cursor, which goes on at the first batch of
    the new size of which nothing was read. What is not named stays, for `Trainer.restore` to compare. Other batches
    are refused where rows go on from batch to batch with their states.
    """
    facts, changed = dict(checkpoint.facts), dict[str, tuple[Any, Any]]()
    saved, own = facts.get("config"), trainer.config.model_dump(mode="json")
    if not names or not isinstance(saved, Mapping):
        return Allowed(checkpoint, changed)
    saved = _filled(saved)
    for name in names:
        path = parse_path(name) or ()
        here, there = _at(own, path), _at(saved, path)
        if here is not None and there is not None and here != there:
            changed[name] = (there[0], here[0])
            saved = _with(saved, path, here[0])
    groups = [group for optimizer in trainer.optimizers.values() for group in optimizer.param_groups]
    facts |= {
        "config": saved,
        "cursor": _cursor(facts.get("cursor"), trainer, names, changed),
        "optimizer": _options(facts.get("optimizer"), groups, [name for name in changed if _within("optim", name)]),
    }
    return Allowed(Checkpoint(checkpoint.tensors, facts), changed)


def _cursor(saved: Any, trainer: Trainer, names: Sequence[str], changed: dict[str, tuple[Any, Any]]) -> Any:
    if not isinstance(saved, Mapping):
        return saved
    own, cursor = trainer.loader.state_dict(), dict(saved)
    free = [entry for entry, setting in CURSOR.items() if any(_within(name, setting) for name in names)]
    free += ["fingerprint"] if any(_within("data", name) for name in names) else []
    free += ["seq_len"] if "data" in names else []
    if trainer.source.carries and any(cursor.get(entry) != own[entry] for entry in free):
        raise CheckpointError(
            "--allow: rows go on from batch to batch with their states (data.state=carry), and only those of the same "
            "data, seed and batch; start another run, with init_from"
        )
    step, before, now = cursor.get("step"), _tokens(cursor), _tokens(own)
    if trainer.source.ordered and {"batch_size", "seq_len"} & set(free) and isinstance(step, int) and before and now:
        cursor["step"] = -(-step * before // now)
    if "fingerprint" in free and cursor.get("fingerprint") != own["fingerprint"]:
        changed.setdefault("data", (cursor.get("fingerprint"), own["fingerprint"]))
    return cursor | {entry: own[entry] for entry in free}


def _tokens(cursor: Mapping[str, Any]) -> int:
    """Tokens of a batch of a cursor; 0 of what is none."""
    rows, length = cursor.get("batch_size"), cursor.get("seq_len")
    return max(rows, 0) * max(length, 0) if isinstance(rows, int) and isinstance(length, int) else 0


def _options(saved: Any, groups: Sequence[Mapping[str, Any]], names: Sequence[str]) -> Any:
    """The saved groups with the run's own options where these were allowed to differ."""
    if not names or not isinstance(saved, Mapping) or len(saved.get("groups", ())) != len(groups):
        return saved
    whole = {"optim", "optim.optimizer"} & set(names)
    wanted = None if whole else {name.rpartition(".")[2] for name in names}
    merged = [
        there | {k: v for k, v in own.items() if k in there and k not in MOVING and (wanted is None or k in wanted)}
        for there, own in zip(saved["groups"], groups, strict=True)
    ]
    return {**saved, "groups": merged}


def _filled(saved: Mapping[str, Any]) -> Mapping[str, Any]:
    """With the fields that it had no name for when it was written."""
    try:
        return ExperimentConfig.model_validate(saved).model_dump(mode="json")
    except ConfigError:  # which `Trainer.restore` tells
        return saved


def _within(outer: str, inner: str) -> bool:
    """True if setting `inner` is `outer`, or below it."""
    return inner == outer or inner.startswith((f"{outer}.", f"{outer}["))


def _at(tree: Any, path: Location) -> tuple[Any] | None:
    """The value at a path, as a tuple of one; None if there is none."""
    for part in path:
        items: Any = tree if isinstance(tree, Mapping) else dict(enumerate(tree)) if isinstance(tree, list) else {}
        if part not in items:
            return None
        tree = items[part]
    return (tree,)


def _with(tree: Any, path: Location, value: Any) -> Any:
    """The tree with another value at a path."""
    if not path:
        return value
    head, rest = path[0], path[1:]
    if isinstance(tree, list):
        return [_with(item, rest, value) if n == head else item for n, item in enumerate(tree)]
    return {key: _with(item, rest, value) if key == head else item for key, item in tree.items()}
