"""A small model trained on a task, and its accuracy there: what studies of trained memories share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Generator, nn

from hecate.data import IGNORED, DataConfig
from hecate.data.tasks import Task
from hecate.models import LanguageModel
from hecate.train.config import ExperimentConfig
from hecate.train.trainer import Trainer

BATCH, JUDGED = 32, 256  # sequences: of a step, and that are judged
JUDGE = 1000  # the seed that learning rates are chosen on
Fields = Mapping[str, Any]


def experiment(model: Fields, data: Fields, seed: int, lr: float, steps: int) -> ExperimentConfig:
    """AdamW without weight decay, one layer unless the model says otherwise."""
    return ExperimentConfig.model_validate({
        "seed": seed, "model": {"layers": 1, **model}, "data": data,
        "optim": {"lr": lr, "weight_decay": 0.0, "warmup": min(20, steps // 2)},
        "budget": {"steps": steps, "batch_size": BATCH, "eval_batches": 1},
    })  # fmt: skip


def trained(
    model: Fields, data: Fields, seed: int, lr: float, steps: int, mixer: Callable[[Generator], nn.Module] | None = None
) -> Trainer:
    """Such a model, trained; `mixer` draws what takes the place of its memory."""
    config, own = experiment(model, data, seed, lr, steps), None
    if mixer is not None:
        generator = Generator().manual_seed(seed)
        own = LanguageModel(config.model_for_data(), generator=generator)
        own.blocks[0].memory = mixer(generator)
    trainer = Trainer(config) if own is None else Trainer(config, model=own)
    for _ in range(steps):
        trainer.train_step()
    return trainer


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


def best_rate(rates: Sequence[float], score: Callable[[float], float]) -> float:
    """The learning rate whose score is the highest; where there is one, without asking."""
    return rates[0] if len(rates) == 1 else max(rates, key=score)
