"""One training run in memory: its optimisers, steps, evaluation and exact state; no files and no output."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hecate.data import Bytes, Loader, Source, Tokenizer
from hecate.errors import CheckpointError, ConfigError, DataError, NonFiniteError
from hecate.late import look
from hecate.models import LanguageModel
from hecate.optim import Leveled, OptimizerKind, level_groups
from hecate.optim.options import Group, Named
from hecate.train.carried import Carried
from hecate.train.checkpoint import Checkpoint
from hecate.train.config import ExperimentConfig, OptimConfig
from hecate.train.evaluate import Score, batch_loss, evaluate, generate, resets_of, solved_example
from hecate.train.optimisers import PartialKind, is_vector
from hecate.train.state import pack, refuse_other_config, run_facts, unpack


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
        self.carried = Carried()
        self._validation = config.budget.batch_size, config.seq_len, config.budget.eval_batches

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
            logits, state = self.model(tokens, *self.carried.given(), **resets_of(batch, self.device))
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
                f"step {self.step + 1}: {error}; the parameters are untouched by this step. Lower optim.lr or the "
                "memory's lr, or set a memory key_norm"
            ) from error
        for optimizer in self.optimizers.values():
            optimizer.step()
            if self.step + 1 == budget.steps and isinstance(optimizer, Leveled):
                optimizer.flush()
        if self.source.carries:
            self.carried.take(state)
        self.step += 1
        return StepResult(value, norm, lr, tokens.numel())

    def evaluate(self) -> Score:
        """The score on the validation batches of the budget."""
        batches = self.source.validation_batches(*self._validation)
        return evaluate(self.model, batches, self.device, self.source.lengths)

    def baselines(self) -> dict[str, float]:
        """Scores of the simple predictors on the same validation batches."""
        return self.source.baselines(*self._validation)

    def sample(self) -> str:
        """Text from the model as it stands, drawn with the experiment's seed; of a task one solved example, of tokens
        without a tokenizer the ids."""
        if self.source.metric == "accuracy":
            return solved_example(self.model, self.source, self.config.seq_len, self.device)
        how, tokenizer = self.config.sample, self.tokenizer
        if tokenizer is None:
            prompt = next(iter(self.source.validation_batches(1, 1, 1))).tokens[0].tolist()
        else:
            prompt = tokenizer.encode([how.prompt or "\n"])[0].tolist()
        draws = torch.Generator().manual_seed(self.config.seed)
        drawn = generate(
            self.model, prompt, how.tokens, temperature=how.temperature, generator=draws, device=self.device
        )
        ids = [*prompt, *drawn]
        return " ".join(map(str, ids)) if tokenizer is None else tokenizer.decode(ids)

    @property
    def tokenizer(self) -> Tokenizer | None:
        """What turns text into tokens and back: bytes, where the data do not say otherwise; None of what is no text."""
        if self.source.metric == "bits_per_byte":
            return self.config.data.tokenizer() or Bytes()
        return self.config.data.tokenizer()

    def checkpoint(self, metrics: dict[str, float] | None = None) -> Checkpoint:
        """Everything that the next step depends on."""
        tensors, optimizer = pack(self.model, self.optimizers.values())
        tensors |= self.carried.tensors()
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
        cuda = self.device.type == "cuda" and "rng/cuda" in checkpoint.tensors
        for name, device in {"rng/torch": "cpu", **({"rng/cuda": "cuda"} if cuda else {})}.items():
            try:  # whether it is one, before anything of the run is changed
                torch.Generator(device).set_state(checkpoint.tensors[name])
            except (KeyError, RuntimeError, TypeError):
                raise CheckpointError(
                    f"{where} has no random state in tensor {name!r}; use an earlier checkpoint"
                ) from None
        try:
            self.loader.load_state_dict(facts.cursor)
        except DataError as error:
            raise CheckpointError(f"{where}: {error}") from None
        held = Carried()
        if self.source.carries and facts.step:
            held.load(checkpoint.tensors, self.model, range(self.config.budget.batch_size), self.device, where)
        unpack(self.model, self.optimizers.values(), checkpoint.tensors, facts.optimizer, where)
        self.carried = held
        torch.set_rng_state(checkpoint.tensors["rng/torch"])
        if cuda:
            torch.cuda.set_rng_state(checkpoint.tensors["rng/cuda"], self.device)
        self.step = facts.step


def build_optimizers(model: nn.Module, optim: OptimConfig) -> dict[str, Optimizer]:
    """The optimisers of a run by kind: one, or two with a fallback. [TRAIN-OPTIM-D2]"""
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    kind: OptimizerKind = optim.optimizer
    own = kind.trains(model)
    try:
        levels = level_groups(named, optim.periods) if optim.periods else []
    except ConfigError as error:
        raise error.or_at("optim", "periods") from None
    periods = {p: level["period"] for level in levels for p in level["params"]}
    trained: dict[tuple[str, ...], tuple[OptimizerKind, Named]] = {("optim", "optimizer"): (kind, own)}
    if isinstance(kind, PartialKind):
        if not own:
            raise ConfigError(
                f"{kind.kind!r} trains {kind.about}, and this model has none; choose a kind for any parameter, such as "
                "adamw",
                ("optim", "optimizer"),
            )
        chosen = {name for name, _ in own}
        others = [(name, p) for name, p in named if name not in chosen]
        trained["optim", "optimizer", "fallback"] = kind.fallback, others
    found: dict[str, Optimizer] = {}
    for path, (kind, owned) in trained.items():
        try:
            if owned:
                groups = parameter_groups(owned, optim.weight_decay, periods)
                build = partial(kind.build, model, lr=optim.lr)
                found[kind.kind] = Leveled(groups, build) if kind.windowed and periods else build(groups)
        except ConfigError as error:
            raise error.under(*path) from None
    return found


def parameter_groups(named: Named, weight_decay: float, periods: Mapping[Tensor, int] | None = None) -> list[Group]:
    """Groups by decay and period: matrices decay, vectors (scales, biases) do not. [TRAIN-OPTIM-D1]"""
    found: dict[tuple[bool, int], Group] = {}
    for name, p in named:
        vector, period = is_vector(name, p), (periods or {}).get(p, 1)
        group = found.setdefault((vector, period), {"params": [], "param_names": []})
        group["params"].append(p)
        group["param_names"].append(name)
        group["weight_decay"] = 0.0 if vector else weight_decay
        if periods:
            group["period"] = period
    return [found[key] for key in sorted(found)]
