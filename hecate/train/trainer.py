"""One training run in memory: steps, evaluation and its exact state; no files and no output."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import nn

from hecate.data import Loader, Source
from hecate.errors import CheckpointError, ConfigError, DataError, NonFiniteError
from hecate.late import look
from hecate.models import LanguageModel
from hecate.optim import Leveled
from hecate.train.checkpoint import Checkpoint
from hecate.train.config import ExperimentConfig
from hecate.train.evaluate import Score, batch_loss, evaluate
from hecate.train.facts import refuse_other_config, run_facts
from hecate.train.groups import build_optimizers
from hecate.train.state import pack, unpack


class StepResult(NamedTuple):
    """What one optimiser step saw."""

    loss: float
    grad_norm: float
    lr: float
    tokens: int


def build_model(config: ExperimentConfig) -> nn.Module:
    """The model of an experiment, initialised from its seed alone."""
    generator = torch.Generator().manual_seed(config.seed)
    return LanguageModel(config.model_for_data(), generator=generator)


class Trainer:
    """Model, optimiser and data cursor of an experiment. [TRAIN-LOOP-D1]

    The same config gives the same bits, at any thread count for which torch does, and a restored trainer continues with
    the bits of one that never stopped.
    """

    def __init__(
        self, config: ExperimentConfig, *, source: Source | None = None, model: nn.Module | None = None
    ) -> None:
        config = config.validated()
        if config.budget.device == "cuda" and not torch.cuda.is_available():
            raise ConfigError("is 'cuda', but no CUDA device is available", ("budget", "device"))
        self.config = config
        self.device = torch.device(config.budget.device)
        self.source = source or config.data.load()
        self.model = (model or build_model(config)).to(self.device)
        self.optimizers = build_optimizers(self.model, config.optim)
        self.loader = Loader(self.source, seed=config.seed, batch_size=config.budget.batch_size, seq_len=config.seq_len)
        self.step = 0

    def train_step(self) -> StepResult:
        """One batch, one update; `NonFiniteError` before a bad update would touch a parameter."""
        optim, budget = self.config.optim, self.config.budget
        lr = optim.rate(self.step, budget.steps)
        for optimizer in self.optimizers.values():
            for group in optimizer.param_groups:
                group["lr"] = lr
            optimizer.zero_grad(set_to_none=True)
        batch = self.loader.next()
        tokens, targets = batch.tokens.to(self.device), batch.targets.to(self.device)
        self.model.train()
        try:
            logits, _ = self.model(tokens)
            loss = batch_loss(logits, targets)
            value = float(loss.detach())  # waits for the device, where every look that was put off has arrived
            look(wait=True)
            if not math.isfinite(value):
                raise NonFiniteError(f"the loss is {value} at learning rate {lr:g}")
            loss.backward()
            limit = optim.clip if optim.clip is not None else math.inf
            norm = float(nn.utils.clip_grad_norm_(self.model.parameters(), limit))
            if not math.isfinite(norm):
                raise NonFiniteError(f"the gradient norm is {norm} at learning rate {lr:g}")
        except NonFiniteError as error:
            raise NonFiniteError(
                f"step {self.step + 1}: {error}; the parameters are untouched by this step. "
                "Lower optim.lr "
                "or the memory's lr, or set a memory key_norm"
            ) from error
        for optimizer in self.optimizers.values():
            optimizer.step()
            if self.step + 1 == budget.steps and isinstance(optimizer, Leveled):
                optimizer.flush()
        self.step += 1
        return StepResult(value, norm, lr, tokens.numel())

    def evaluate(self) -> Score:
        """The score on the validation batches of the budget."""
        budget = self.config.budget
        batches = self.source.validation_batches(budget.batch_size, self.config.seq_len, budget.eval_batches)
        return evaluate(self.model, batches, self.device)

    def baselines(self) -> dict[str, float]:
        """Scores of the simple predictors on the same validation batches."""
        budget = self.config.budget
        return self.source.baselines(budget.batch_size, self.config.seq_len, budget.eval_batches)

    def checkpoint(self, metrics: dict[str, float] | None = None) -> Checkpoint:
        """Everything that the next step depends on."""
        tensors, optimizer = pack(self.model, self.optimizers.values())
        tensors["rng/torch"] = torch.get_rng_state()
        if self.device.type == "cuda":
            tensors["rng/cuda"] = torch.cuda.get_rng_state(self.device)
        facts = {
            "step": self.step,
            "config": self.config.model_dump(mode="json"),
            "optimizer": optimizer,
            "cursor": self.loader.state_dict(),
            "metrics": metrics or {},
            "versions": {"torch": torch.__version__},
        }
        return Checkpoint(tensors, facts)

    def restore(self, checkpoint: Checkpoint, where: str) -> None:
        """Continues from a checkpoint of the same experiment; `where` names it in errors."""
        facts = run_facts(checkpoint.facts, where)
        refuse_other_config(facts.config, self.config, where)
        if facts.step > self.config.budget.steps:
            raise CheckpointError(
                f"{where} is at step {facts.step}, beyond budget.steps={self.config.budget.steps}; "
                f"give --steps of at least {facts.step}, or start another run"
            )
        self._check_random(checkpoint.tensors, where)
        try:
            self.loader.load_state_dict(facts.cursor)
        except DataError as error:
            raise CheckpointError(f"{where}: {error}") from None
        optimizers, values = self.optimizers.values(), checkpoint.facts["optimizer"]
        unpack(self.model, optimizers, checkpoint.tensors, values, where)
        torch.set_rng_state(checkpoint.tensors["rng/torch"])
        if self.device.type == "cuda" and "rng/cuda" in checkpoint.tensors:
            torch.cuda.set_rng_state(checkpoint.tensors["rng/cuda"], self.device)
        self.step = facts.step

    def _check_random(self, tensors: dict[str, torch.Tensor], where: str) -> None:
        """Random states that generators take, before the run's own are changed."""
        for name in ("rng/torch", "rng/cuda"):
            if name == "rng/cuda" and (self.device.type != "cuda" or name not in tensors):
                continue
            device = "cuda" if name == "rng/cuda" else "cpu"
            try:
                torch.Generator(device).set_state(tensors[name])
            except (KeyError, RuntimeError, TypeError):
                raise CheckpointError(
                    f"{where} has no random state in tensor {name!r}; use an earlier checkpoint"
                ) from None
