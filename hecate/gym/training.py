"""Tasks of the gym that train: one layer in a small model, evaluated at the training length and beyond."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Literal, Self

import numpy as np
import torch
from pydantic import Field
from torch import Generator, Tensor, nn

from hecate.checks import Size
from hecate.data import Permutations
from hecate.gym.contenders import Contender, Memory, Setting
from hecate.gym.tasks import GymTask, Metric, Row
from hecate.models import LanguageModel
from hecate.train.config import ExperimentConfig
from hecate.train.trainer import Trainer

BATCH = 32
"""Sequences per step."""
Fields = Mapping[str, Any]


def trained(
    model: Fields, data: Fields, seed: int, lr: float, steps: int,
    mixer: Callable[[Generator], nn.Module] | None = None, batch: int = BATCH,
) -> Trainer:  # fmt: skip
    """Trains a model, by default of one layer, by AdamW without weight decay; `mixer` makes the layer that replaces its
    memory."""
    config = ExperimentConfig.model_validate({
        "seed": seed, "model": {"layers": 1, **model}, "data": data,
        "optim": {"lr": lr, "weight_decay": 0.0, "warmup": min(20, steps // 2)},
        "budget": {"steps": steps, "batch_size": batch, "eval_batches": 1},
    })  # fmt: skip
    network = None
    if mixer is not None:
        generator = Generator().manual_seed(seed)
        network = LanguageModel(config.model_for_data(), generator=generator)
        network.blocks[0].memory = mixer(generator)
    trainer = Trainer(config, model=network)
    for _ in range(steps):
        trainer.train_step()
    return trainer


class StateTracking(GymTask):
    r"""state_tracking: words x_1 x_2 ... of the permutations S_n, each prefix asked for its product x_t ... x_1.

    A layer of the contender, in a block with an MLP between an embedding and a head, is trained on words of `length`
    tokens by AdamW, with a learning rate from `rates`. Scores are for the later halves of words `times` as long, and of
    words of the training length. Tokens are uniform, so that the product is uniform, too, if one token is unknown.

    Formula: $s_t = x_t s_{t-1}, \quad P(s_t = \hat s_t) = 1 / n!$

    Origin: the word problem as a test of layers (Merrill, Petty and Sabharwal, 2024, arXiv 2404.08819). [GYM-TRAIN-D1]
    """

    kind: Literal["state_tracking"] = "state_tracking"
    rows: Size = Field(256, ge=1, description="Words of a seed, whose scores are averaged.")
    width: Size = Field(32, ge=16, le=1024, multiple_of=16, description="Width of the layer, four heads.")
    degree: int = Field(3, ge=2, le=5, description="n: what is permuted.")
    length: Size = Field(24, ge=2, le=1 << 12, description="Tokens of a word in training.")
    times: Size = Field(4, ge=1, le=64, description="Lengths of training that a judged word has.")
    steps: Size = Field(800, ge=2, description="Steps of training, of 32 words each.")
    rates: tuple[float, ...] = Field(
        (0.01, 0.0025, 0.005, 0.02, 0.04), min_length=1, description="Learning rates to choose from, the default first."
    )
    metric: ClassVar[Metric] = "accuracy"
    about: ClassVar[str] = "words of S_3: a trained layer at 4 times its training length"

    def words(self, length: int) -> Permutations:
        """The task of words of this length."""
        return Permutations(degree=self.degree, seq_len=length)

    def row(self, rng: np.random.Generator) -> Row:
        letters, products = self.words(self.length * self.times).sample(rng, 1)
        one_hot = np.eye(self.words(1).vocabulary())
        return Row(one_hot[letters[0]], one_hot[products[0]], one_hot)

    def layout(self) -> tuple[Tensor, dict[str, Tensor]]:
        at = torch.arange(self.length * self.times)
        lengths = dict.fromkeys((self.length * self.times, self.length))
        return torch.zeros_like(at, dtype=torch.bool), {
            f"{length} tokens": (at >= length // 2) & (at < length) for length in lengths
        }

    def chance(self) -> float:
        """Accuracy of guessing any permutation."""
        return 1 / self.words(1).vocabulary()

    def known(self) -> dict[str, float]:
        """Accuracy with the sign of the product known, which one reflection per letter can track (Grazzi et al., 2024,
        arXiv 2411.12537)."""
        return {"any of the right sign": 2 * self.chance()}

    def quick(self) -> Self:
        return self.model_copy(update={"rows": 2, "length": 8, "steps": 4})

    def refuses(self, contender: Contender) -> str:
        return "" if contender.layer else "it has no layer that could be trained"

    def settings(self, contender: Contender) -> Sequence[Setting]:
        return [{"rate": rate} for rate in self.rates]

    def memory(self, contender: Contender, setting: Setting, seed: int) -> Memory:
        """The contender's layer, trained with this seed, in its model, which is only asked: keys are one-hot tokens,
        answers are logits."""
        layer: Any = contender.layer
        model = {"d_model": self.width, "heads": 1, "mlp_ratio": 2.0}
        data = self.words(self.length).model_dump(mode="json")
        with torch.enable_grad():
            run = trained(model, data, seed, setting["rate"], self.steps, partial(layer, self.width))
        network = run.model.eval()
        return lambda keys, values, state: network(keys.argmax(-1), state)
