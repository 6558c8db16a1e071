"""Hooks for Python code of a user while a run goes on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hecate.train.loggers import telling

if TYPE_CHECKING:
    from hecate.train.trainer import Trainer


class Hooks:
    """Calls of a run, each of which does nothing until a subclass overrides it. [TRAIN-HOOK-D1]

        class Shout(Hooks):
            def on_eval(self, trainer, record):
                print(record["step"], record["validation_loss"])

        run_experiment(config, folder, hooks=[Shout()])

    Records are those of metrics.jsonl. In a world of several processes every one has its hooks called; `trainer.world`
    tells which it is. An exception ends the run, which can be resumed. A hook that changes the trainer changes the run;
    of torch's random numbers it should draw from a generator of its own.
    """

    def on_step(self, trainer: Trainer, record: Mapping[str, Any]) -> None:
        """After each step, whose record has loss, lr, grad_norm and tokens."""

    def on_eval(self, trainer: Trainer, record: Mapping[str, Any]) -> None:
        """After each evaluation, whose record has validation_loss."""

    def on_checkpoint(self, trainer: Trainer, path: Path) -> None:
        """After a checkpoint is on disk, complete; of one that is written behind the run, ahead of the next."""


def call_hooks(hooks: Sequence[Hooks], name: str, *given: Any) -> None:
    """Calls `name` of each in turn; an exception of one is told as `HookError` with its name."""
    for hook in hooks:
        act: Callable[..., None] = getattr(hook, name)
        with telling(f"hook {type(hook).__name__}.{name}"):
            act(*given)
