"""Small layers, trained on a task and judged there and beyond it: what studies of trained memories share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Generator, nn

from hecate.data import IGNORED, DataConfig, Task
from hecate.errors import NonFiniteError
from hecate.gym.training import BATCH, Fields, trained
from hecate.rule import bytes_of
from hecate.train.trainer import Trainer
from studies.study import Kept

JUDGED = 256  # sequences that are judged
JUDGE = 1000  # the seed that learning rates and settings are chosen on
T = TypeVar("T")


class Outcome(NamedTuple):
    """Accuracies by task and seed, the rate and the place of the model that were chosen, bytes of a state."""

    scores: list[list[float]]
    lr: float
    model: int
    bytes: int


def settled(
    models: Sequence[Fields], tasks: Sequence[Fields], steps: int, rates: Sequence[float], seeds: Sequence[int],
    since: float = 0.0, mixer: Callable[[Generator], nn.Module] | None = None, kept: Kept | None = None,
) -> Outcome:  # fmt: skip
    """Trains on the first task from every seed and judges on all of them; on a seed of its own the rate is chosen, for
    the first model, then the model at that rate. Runs that are kept are not run again."""
    keep = kept or Kept()

    def run(model: int, lr: float, seed: int) -> tuple[list[float], int]:
        """Accuracies of a trained layer by task, and bytes of its state."""

        def made() -> tuple[list[float], int]:
            trainer = trained(models[model], tasks[0], seed, lr, steps, mixer)
            with torch.no_grad():
                _, state = trainer.model(torch.zeros(1, trainer.config.seq_len, dtype=torch.int64))
            return [judged(trainer, task, since) for task in tasks], bytes_of(state)

        scores, size = keep([models[model], list(tasks), steps, lr, seed, since, mixer and mixer.__name__], made)
        return scores, size

    def score(lr: float, model: int) -> float:
        try:
            return run(model, lr, JUDGE)[0][0]
        except NonFiniteError:
            return 0.0

    lr = best(rates, lambda lr: score(lr, 0))
    model = best(range(len(models)), lambda model: score(lr, model))
    scores, sizes = zip(*(run(model, lr, seed) for seed in seeds), strict=True)
    return Outcome([list(own) for own in zip(*scores, strict=True)], lr, model, sizes[0])


@torch.no_grad()
def judged(trainer: Trainer, task: Fields, since: float = 0.0) -> float:
    """Accuracy on sequences of a task, from a share of their length on."""
    data = DataConfig.model_validate(task)
    if not isinstance(data, Task):
        raise TypeError(f"{task} is no task")
    tokens, targets = (torch.from_numpy(part) for part in data.sample(np.random.default_rng(data.length()), JUDGED))
    targets[:, : int(since * targets.shape[1])] = IGNORED
    trainer.model.eval()
    logits = torch.cat([trainer.model(inputs)[0] for inputs in tokens.split(BATCH)])
    trainer.model.train()
    answered = targets != IGNORED
    return float((logits.argmax(-1) == targets)[answered].double().mean())


def best(among: Sequence[T], score: Callable[[T], float]) -> T:
    """The one whose score is the highest, the first of equals; a lone one is not asked, nor who comes after a score of
    1."""
    found, top = among[0], -1.0
    for one in among if len(among) > 1 else ():
        if top < 1 and (own := score(one)) > top:
            found, top = one, own
    return found
