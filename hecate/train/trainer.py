"""A training run in memory: optimisers, steps, evaluation and exact state; no files and no output."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hecate.data import IGNORED, Batch, Bytes, Loader, Source, Tokenizer
from hecate.distributed import World, adapt, copied, gathered, is_sharded, shard, spread
from hecate.distributed.context import Context, piece, share, sum_gradients, unshare
from hecate.distributed.shard import materialise, part_of_step, settle
from hecate.engine import check_exact
from hecate.errors import CheckpointError, ConfigError, DataError, NonFiniteError, faults_at, faults_under, shorten
from hecate.late import forget, holding, look
from hecate.models import LanguageModel
from hecate.nn import Memory
from hecate.optim import Leveled, OptimizerKind, level_groups
from hecate.optim.base import Group, Named
from hecate.states import detach
from hecate.train.checkpoint import Checkpoint
from hecate.train.config import ExperimentConfig, OptimConfig, PartialKind, is_vector
from hecate.train.estimate import check_weights
from hecate.train.evaluate import Score, batch_loss, bytes_per_label, evaluate, generate, resets_of, solved_example
from hecate.train.state import CURSOR, Carried, pack, refuse_other_config, run_facts, sharded_like, unpack


class StepResult(NamedTuple):
    """Results of one optimiser step; `bytes_per_label` is the mean bytes of text per label of this process."""

    loss: float
    grad_norm: float
    lr: float
    tokens: int
    bytes_per_label: float = 1.0


def build_model(config: ExperimentConfig, device: str | None = None) -> LanguageModel:
    """The model of an experiment, initialised from its seed alone; on the meta device without numbers, elsewhere
    refused before it is drawn if the machine cannot hold it."""
    if device != "meta":
        check_weights(config)
    return LanguageModel(config.model_for_data(), generator=seeded(config), device=device)


def seeded(config: ExperimentConfig) -> torch.Generator:
    """Generator for drawing a model's parameters, seeded by the config."""
    return torch.Generator().manual_seed(config.seed)


class Objective(nn.Module):
    """A model with its loss as one module: a wrapper that reduces gradients sees the loss as its output."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, tokens: Tensor, targets: Tensor, *before: Any, labelled: bool = True, keeps: bool = False, **masks: Tensor
    ) -> tuple[Tensor, Any]:
        """Mean cross-entropy over the labels, in float32, 0 if there are none; and with `keeps` the state, detached:
        gradients end with the batch, and the wrapper of replicas must not wait for any through the state."""
        logits, state = self.model(tokens, *before, **masks)
        loss = batch_loss(logits, targets) if labelled else logits[:0].sum(dtype=torch.float32)
        return loss, detach(state) if keeps else None


class Trainer:
    """Model, optimiser and data cursor of an experiment. [TRAIN-LOOP-D1]

    The same config gives the same results to the bit, at any thread count at which torch does, and a restored trainer
    continues exactly like one that never stopped. In a `world` of several processes all call the same methods, and
    loss, gradients and parameters are those of a single process up to rounding. [DIST-STEP-D1]
    """

    def __init__(
        self,
        config: ExperimentConfig,
        *,
        source: Source | None = None,
        model: nn.Module | None = None,
        world: World | None = None,
    ) -> None:
        config = config.validated()
        if config.budget.device == "cuda" and not torch.cuda.is_available():
            raise ConfigError("is 'cuda', but no CUDA device is available", ("budget", "device"))
        self.config, budget = config, config.budget
        self.world = world or World.alone(budget.device)
        self.device = self.world.device
        self.source = source or config.data.load()
        facts = {"fingerprint": self.source.fingerprint, "dtype": str(torch.get_default_dtype())}
        self.world.agree({"config": config.model_dump(mode="json"), "data": facts})
        rows = self.world.rows(budget.batch_size)
        check_parts(config, self.world, len(rows))
        sizes = {"seed": config.seed, "batch_size": budget.batch_size, "seq_len": config.seq_len}
        self.loader = Loader(self.source, rows=None if self.world.batch_ranks == 1 else rows, **sizes)
        self.context = context_of(config, self.world)
        self.own_model = model is not None  # the caller's model, which the config does not describe
        self.model, self._objective = lay_out(config, self.world, model, self.context)
        self.optimizers = build_optimizers(self.model, config.optim)
        self.step = 0
        self.carried = Carried()
        self._validation = budget.batch_size, config.seq_len, budget.eval_batches

    def train_step(self) -> StepResult:
        """Trains on one batch. A loss or gradient that is not finite raises `NonFiniteError` on every rank before any
        parameter is changed. [DIST-NAN-D1]"""
        optim, budget = self.config.optim, self.config.budget
        lr = optim.rate(self.step, budget.steps)
        for optimizer in self.optimizers.values():
            for group in optimizer.param_groups:
                group["lr"] = lr
            optimizer.zero_grad(set_to_none=True)
        batch = self.loader.next()
        self.model.train()
        try:
            value, states = self._gradients(batch, lr)
            limit = optim.clip if optim.clip is not None else math.inf
            norm = float(gathered(nn.utils.clip_grad_norm_(self.model.parameters(), limit)))
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
            self.carried.take(*states)
        self.step += 1
        tokens = batch.tokens.numel() * self.world.batch_ranks
        return StepResult(value, norm, lr, tokens, bytes_per_label(batch.targets, self.source.lengths))

    def _gradients(self, batch: Batch, lr: float) -> tuple[float, list[Any]]:
        """Computes the gradient of the mean loss over all labels of the step, on all ranks; returns the loss, and the
        states after the batch, one for each micro-batch."""
        world, parts = self.world, self.config.budget.accumulate
        if self.context is not None:
            batch = piece(batch, self.context.rank, self.context.size)
        # [rows, T] in `parts` of equal rows: their gradients add up to that of the whole batch.
        each = len(batch.tokens) // parts
        micros = [batch.part(range(first, first + each)) for first in range(0, each * parts, each)]
        # Parts have different numbers of labels, and each label must have the same weight over all ranks.
        labels = [int((micro.targets != IGNORED).sum()) for micro in micros]
        starts = [int(micro.resets is not None and micro.resets.any()) for micro in micros]
        total, *starts = world.sum(torch.tensor([sum(labels), *starts])).tolist()
        value, fault, states = 0.0, None, []
        with ExitStack() as stack:
            if world.size > 1:
                stack.enter_context(holding())
                stack.enter_context(self._own_draws())
            for index, (micro, count) in enumerate(zip(micros, labels, strict=True)):
                # Which parameters get gradients can depend on the mask, and all ranks must reduce the same ones.
                masks = resets_of(micro, self.device, shared=self.context is not None or starts[index] > 0)
                with part_of_step(self._objective, self.model, index + 1 == parts):
                    # Without a label in the whole step the loss is NaN, a mean over nothing.
                    share = count / total if total else math.nan
                    loss, state = self._objective(
                        micro.tokens.to(self.device), micro.targets.to(self.device), *self.carried.arguments(index),
                        labelled=count > 0, keeps=self.source.carries, **masks,
                    )  # fmt: skip
                    states.append(state)
                    micro_loss = float(loss.detach()) * share  # waits for the device, and so for all deferred checks
                    value += micro_loss
                    try:
                        look(wait=True)
                        if not math.isfinite(micro_loss):
                            raise NonFiniteError(f"the loss is {micro_loss} at learning rate {lr:g}")
                    except NonFiniteError as error:
                        if world.size == 1:
                            raise
                        fault = fault or error
                    # Torch averages gradients over processes; the factor makes it a sum.
                    (loss * (share * world.batch_ranks)).backward()
        if world.any(fault is not None):
            # All ranks raise the error of the first that has one.
            rank, text = world.first_of(None if fault is None else str(fault)) or (0, "")
            raise NonFiniteError(f"on rank {rank}, {text}") from fault
        if self.context is not None:
            sum_gradients(self.model, self.context)
        if world.size > 1:
            value = float(world.sum(torch.tensor(value, dtype=torch.float64)))
        return value, states

    @contextmanager
    def _own_draws(self) -> Iterator[None]:
        """Context in which torch's generators, for dropout for instance, are seeded by the step and this rank's rows
        alone."""
        devices = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):
            # By a hash, so that steps and ranks draw different numbers, which also differ from the run's own.
            where = f"{self.config.seed} {self.step} {self.world.batch_rank}".encode()
            torch.manual_seed(int.from_bytes(hashlib.sha256(where).digest()[:8], "big") >> 1)
            yield

    def evaluate(self) -> Score:
        """The score on the validation batches of the budget."""
        batches = self.source.validation_batches(*self._validation)
        return evaluate(self.model, batches, self.device, self.source.lengths, self.world)

    def baselines(self) -> dict[str, float]:
        """Scores of the baseline predictors on the same validation batches."""
        return self.source.baselines(*self._validation)

    def sample(self) -> str:
        """A text generated by the current model with the experiment's seed; for a task a solved example, for tokens
        without a tokenizer the ids."""
        with self.whole_sequences():
            if self.source.metric == "accuracy":
                return solved_example(self.model, self.source, self.config.seq_len, self.device)
            how, tokenizer, prompt = self.config.sample, self.tokenizer, self.prompt()
            choice: dict[str, Any] = {"temperature": how.temperature, "generator": seeded(self.config)}
            ids = [*prompt, *generate(self.model, prompt, how.tokens, device=self.device, **choice)]
        return " ".join(map(str, ids)) if tokenizer is None else tokenizer.decode(ids)

    def prompt(self) -> list[int]:
        """The ids that a sampled text goes on from: those of its prompt, or where that has none a token of the data.
        Raises `DataError` for a prompt that the model cannot read."""
        asked, tokenizer, size = self.config.sample.prompt, self.tokenizer, self.config.data.vocabulary()
        ids: list[int] = [] if tokenizer is None else tokenizer.encode([asked or "\n"])[0].tolist()
        if max(ids, default=0) >= size:
            raise DataError(f"sample.prompt {shorten(asked)} has token {max(ids)}, and the model knows {size}")
        return ids or next(iter(self.source.validation_batches(1, 1, 1))).tokens[0].tolist()

    @contextmanager
    def whole_sequences(self) -> Iterator[None]:
        """Context in which the model takes whole sequences, the same ones on every process."""
        if self.context is not None:
            unshare(self.model)
        try:
            yield
        finally:
            if self.context is not None:
                share(self.model, self.context)

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer of the data, by default bytes for text; None for data without a tokenizer, such as tasks."""
        default = Bytes() if self.source.metric == "bits_per_byte" else None
        return self.config.data.tokenizer() or default

    def checkpoint(self, metrics: dict[str, float] | None = None) -> Checkpoint:
        """Everything that the next step depends on; of sharded parameters only this rank's part."""
        settle(self.model)
        tensors, optimizer = pack(self.model, self.optimizers.values())
        tensors |= self.carried.tensors(self.world)
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
        refuse_other_config(checkpoint, self, where)
        if facts.step > self.config.budget.steps:
            raise CheckpointError(
                f"{where} is at step {facts.step}, beyond budget.steps={self.config.budget.steps}; "
                f"give --steps of at least {facts.step}, or start another run"
            )
        cuda = self.device.type == "cuda" and "rng/cuda" in checkpoint.tensors
        for name, device in {"rng/torch": "cpu", **({"rng/cuda": "cuda"} if cuda else {})}.items():
            try:  # before anything of the run is changed
                # A new generator takes it first: an invalid state must not leave the run half restored.
                torch.Generator(device).set_state(checkpoint.tensors[name])
            except (KeyError, RuntimeError, TypeError):
                raise CheckpointError(
                    f"{where} has no random state in tensor {name!r}; use an earlier checkpoint"
                ) from None
        try:
            self.loader.load_state_dict(facts.cursor)
        except DataError as error:
            here = self.loader.state_dict()
            names = [setting for entry, setting in CURSOR.items() if facts.cursor.get(entry) != here[entry]]
            more = f", or --allow {','.join(names)}" if names and not self.source.carries else ""
            raise CheckpointError(f"{where}: {error}{more}") from None
        carried, budget = Carried(), self.config.budget
        if self.source.carries and facts.step:
            rows = self.world.rows(budget.batch_size)
            with self.whole_sequences():
                carried.load(checkpoint.tensors, self.model, rows, self.device, where, budget.accumulate)
        settle(self.model)
        # A checkpoint of one process has whole tensors, also of what this world shards.
        like = sharded_like(self, {name: x.shape for name, x in checkpoint.tensors.items()})
        tensors = {n: x if is_sharded(x) else spread(x, like.get(n)) for n, x in checkpoint.tensors.items()}
        unpack(self.model, self.optimizers.values(), tensors, facts.optimizer, where)
        self.carried = carried
        torch.set_rng_state(checkpoint.tensors["rng/torch"])
        if cuda:
            torch.cuda.set_rng_state(checkpoint.tensors["rng/cuda"], self.device)
        self.step = facts.step


def check_parts(config: ExperimentConfig, world: World, rows: int) -> None:
    """Refuses a batch that `accumulate` does not divide, and an optimiser that cannot use gradients summed over
    parts."""
    parts = config.budget.accumulate
    if rows % parts:
        whole = f"the {rows} rows of budget.batch_size={config.budget.batch_size} that each process has"
        raise ConfigError(f"must divide {whole}, got {parts}", ("budget", "accumulate"))
    kind = config.optim.optimizer
    if not kind.windowed and (parts > 1 or world.size > 1):
        raise ConfigError(
            f"{kind.kind!r} steps by the samples of one backward pass, and budget.accumulate or several processes take "
            "a step's batch in parts; use one process and accumulate: 1, or another kind",
            ("optim", "optimizer"),
        )


def context_of(config: ExperimentConfig, world: World) -> Context | None:
    """The ranks that share sequences with this one; None if each has whole sequences."""
    ranks = world.extent("context")
    if ranks == 1 or world.mesh is None:
        return None
    if config.seq_len < ranks:
        raise ConfigError(f"is {ranks}, and sequences of {config.seq_len} tokens cannot be shared by as many", _CONTEXT)
    if config.budget.compile != "none":
        compiled = f"budget.compile={config.budget.compile!r} compiles blocks that exchange states as they run"
        raise ConfigError(f"is {ranks}, and {compiled}; take compile: none, or context: 1", _CONTEXT)
    return Context.of(world.mesh.get_group("context"))


_CONTEXT = ("parallel", "context")


def compile_chunks(model: nn.Module) -> None:
    """Sets the engine of all memories with chunks longer than a token to "fused", which compiles them."""
    memories = [module for module in model.modules() if isinstance(module, Memory) and module.config.chunk > 1]
    if not memories:
        raise ConfigError("'chunk' finds no memory with chunk > 1; leave it out", ("budget", "compile"))
    for memory in memories:
        check_exact(memory.config, "fused")
        memory.engine = "fused"


def lay_out(
    config: ExperimentConfig, world: World, model: nn.Module | None, context: Context | None = None
) -> tuple[nn.Module, nn.Module]:
    """The model of an experiment, or the one given, distributed over a world; and its `Objective`, as steps call it."""
    budget, sharded = config.budget, world.extent("data") > 1
    low, drawn = budget.precision == "bfloat16", model is None
    if model is None:
        model = build_model(config, "meta" if sharded else None)
    # A sharded model is drawn shard by shard, after `shard`, as a process might not be able to hold the whole.
    if not (drawn and sharded):
        model = model.to(world.device)
    if context is not None:
        share(model, context)
    adapt(model, low=low and not sharded, recompute=budget.recompute, compiled=budget.compile == "block")
    if budget.compile == "chunk":
        compile_chunks(model)
    if sharded:
        shard(model, world, low=low)
        if drawn:
            materialise(model, world.device, seeded(config))
    # Model and loss as one module: its wrapper sees every parameter in one forward call.
    objective = Objective(model)
    if sharded or world.extent("replicate") == 1:
        return model, objective
    return model, copied(objective, world, unused=not drawn or has_unused(objective, config, world.device))


def has_unused(objective: nn.Module, config: ExperimentConfig, device: torch.device) -> bool:
    """True if some parameters get no gradient, tested on one sequence of the training length."""
    # Any tokens will do: which parameters get gradients does not depend on them.
    tokens = (torch.arange(config.seq_len, device=device) % config.data.vocabulary())[None]
    with holding():
        loss, _ = objective(tokens, tokens)
        loss.backward()
        forget()  # its numbers need no checks
    params = [p for p in objective.parameters() if p.requires_grad]
    unused = any(p.grad is None for p in params)
    for p in params:
        p.grad = None
    return unused


def build_optimizers(model: nn.Module, optim: OptimConfig) -> dict[str, Optimizer]:
    """The optimisers of a run by kind: one, or two with a fallback. [TRAIN-OPTIM-D2]"""
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    kind: OptimizerKind = optim.optimizer
    parameters = kind.trains(model)
    with faults_at("optim", "periods"):
        levels = level_groups(named, optim.periods) if optim.periods else []
    periods = {p: level["period"] for level in levels for p in level["params"]}
    trained: dict[tuple[str, ...], tuple[OptimizerKind, Named]] = {("optim", "optimizer"): (kind, parameters)}
    if isinstance(kind, PartialKind):
        if not parameters:
            none = f"{kind.kind!r} trains {kind.about}, and this model has none"
            raise ConfigError(f"{none}; choose a kind for any parameter, such as adamw", ("optim", "optimizer"))
        chosen = {name for name, _ in parameters}
        others = [(name, p) for name, p in named if name not in chosen]
        trained["optim", "optimizer", "fallback"] = kind.fallback, others
    optimizers: dict[str, Optimizer] = {}
    for path, (kind, owned) in trained.items():
        with faults_under(*path):
            if owned:
                groups = parameter_groups(owned, optim.weight_decay, periods)
                build = partial(kind.build, model, lr=optim.lr)
                optimizers[kind.kind] = Leveled(groups, build) if kind.windowed and periods else build(groups)
    return optimizers


def parameter_groups(named: Named, weight_decay: float, periods: Mapping[Tensor, int] | None = None) -> list[Group]:
    """Groups by decay and period: matrices decay, vectors (scales, biases) do not. [TRAIN-OPTIM-D1]"""
    groups: dict[tuple[bool, int], Group] = {}
    for name, p in named:
        # Only matrices decay; scales and biases keep their size.
        vector, period = is_vector(name, p), (periods or {}).get(p, 1)
        group = groups.setdefault((vector, period), {"params": [], "param_names": []})
        group["params"].append(p)
        group["param_names"].append(name)
        group["weight_decay"] = 0.0 if vector else weight_decay
        if periods:
            group["period"] = period
    return [groups[key] for key in sorted(groups)]
