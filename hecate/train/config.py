"""Config of an experiment: model, data, optimiser and budget, as one strict value.

Optimisers train the parameters of a model, not its memories. Kinds that train only some parameters have a fallback for
the others. Every kind uses the learning rate and weight decay of `OptimConfig`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import AfterValidator, Field, model_validator
from torch import Tensor, nn

from hecate import optim
from hecate.checks import Count, Size, check_shapes
from hecate.data import Bundled, DataConfig
from hecate.distributed import ParallelConfig
from hecate.engine import Plan, explain
from hecate.errors import ConfigError, DataError, faults_at, faults_under, shorten
from hecate.models import LanguageModelConfig
from hecate.optim.base import Group, Named, OptimizerKind, Positive, Share
from hecate.train.loggers import Asked, LoggerKind, Tensorboard
from hecate.variant import Config, Conflicts, FrozenDict


class AdamW(OptimizerKind):
    r"""adamw: w <- (1 - lr weight_decay) w - lr m^ / (sqrt(v^) + eps).

    m and v are moving averages of gradients and their squares with rates `betas`; ^ divides by 1 - beta^t. On a CPU it
    uses torch's fused form, which takes a quarter of the time.

    Formula: $m_t = \beta_1 m_{t-1} + (1 - \beta_1) g_t,\quad v_t = \beta_2 v_{t-1} + (1 - \beta_2) g_t^2$
    $w_t = (1 - \eta \lambda) w_{t-1} - \eta\, \frac{m_t / (1 - \beta_1^t)}{\sqrt{v_t / (1 - \beta_2^t)} + \varepsilon}$
    References: Loshchilov and Hutter, Decoupled weight decay regularization, 2019, arXiv 1711.05101. [TRAIN-OPTIM-D1]
    """

    kind: Literal["adamw"] = "adamw"
    betas: Annotated[tuple[Share, Share], Field(strict=False)] = (0.9, 0.95)
    eps: Positive = 1e-8
    factory = torch.optim.AdamW

    def build(self, model: nn.Module, groups: list[Group], lr: float) -> torch.optim.Optimizer:
        """The optimiser of these parameter groups, fused if all parameters are unsharded and on a CPU."""
        every = [p for group in groups for p in group["params"]]
        fused = all(p.is_cpu and p.is_floating_point() and not hasattr(p, "device_mesh") for p in every)
        return torch.optim.AdamW(groups, lr=lr, betas=self.betas, eps=self.eps, fused=True if fused and every else None)


class SGD(OptimizerKind):
    r"""sgd: m <- momentum m + g + weight_decay w, w <- w - lr m.

    `torch.optim.SGD`, which adds the decay to the gradient, ahead of momentum. `nesterov` steps by g + momentum m.

    Formula: $m_t = \mu m_{t-1} + g_t + \lambda w_{t-1},\quad w_t = w_{t-1} - \eta m_t$
    References: B. Polyak, Some methods of speeding up the convergence of iteration methods, 1964. [TRAIN-OPTIM-D2]
    """

    kind: Literal["sgd"] = "sgd"
    momentum: Share = 0.9
    nesterov: bool = False
    factory = torch.optim.SGD

    def conflicts(self) -> Conflicts:
        """`nesterov` without momentum."""
        if self.nesterov and not self.momentum:
            yield ("nesterov",), "needs momentum above 0; give one or leave it out"


class PartialKind(OptimizerKind):
    """An optimiser of some parameters; all others are trained by `fallback`, at the same lr."""

    fallback: OptimizerKind
    about: ClassVar[str]  # the parameters that it trains

    def conflicts(self) -> Conflicts:
        """A fallback that itself trains some parameters only."""
        if isinstance(self.fallback, PartialKind):
            choice = f"{self.fallback.kind!r}, which trains {self.fallback.about}"
            yield ("fallback",), f"must be a kind for any parameter, got {choice}; take adamw"
        yield from super().conflicts()


class DGD(PartialKind, optim.DGD.Options):
    r"""dgd: w <- w ((1 - lr weight_decay) I - c x x^T) - c g x^T, c = lr / (1 + lr |x|^2).

    `hecate.optim.DGD`, attached to the model, for the weights of Linear layers that no other module shares, except the
    output layer. `fallback` trains the others, by plain gradient descent unless set. Clipping scales its samples, too.

    Formula: $w_t = w_{t-1} \left((1 - \eta \lambda) I - c\, x x^\top\right) - c\, g x^\top,\quad c = \frac{\eta}{1 +
    \eta \Vert x \Vert^2}$
    References: Nested Learning (Behrouz et al., 2025, arXiv 2512.24695), eq. 57. [TRAIN-OPTIM-D6]
    """

    kind: Literal["dgd"] = "dgd"
    fallback: OptimizerKind = SGD(momentum=0.0)
    factory = optim.DGD
    windowed = False
    about = "the weights of Linear layers"

    def trains(self, model: nn.Module) -> Named:
        """Weights of Linear layers that no other module shares, without the output layer."""
        users = Counter(id(p) for m in model.modules() for p in m.parameters(recurse=False))
        layers = {id(m.weight) for m in model.modules() if isinstance(m, nn.Linear)}
        named, outer = super().trains(model), outer_layers(model)
        inner = [(n, p) for n, p in named if id(p) in layers and id(p) not in outer]
        return [(n, p) for n, p in inner if users[id(p)] == 1]

    def build(self, model: nn.Module, groups: list[Group], lr: float) -> torch.optim.Optimizer:
        """The optimiser, attached to the model; refuses a period."""
        for group in groups:
            if group.get("period", 1) > 1:
                raise ConfigError(
                    "'dgd' steps by the samples of one backward pass, and optim.periods collects "
                    f"those of {group['period']} for {group['param_names'][0]!r}; leave it at 1"
                )
        bare = [{k: v for k, v in group.items() if k != "period"} for group in groups]
        optimizer = optim.DGD(bare, lr, rescaled="follow", **self.options())
        optimizer.attach(model)
        return optimizer


class MatrixKind(PartialKind):
    """An optimiser of the matrices between the embedding (with weights tied to it) and the output layer `head.*`.

    `match_rms_adamw` makes steps as long as AdamW's, so that one lr suits both.
    """

    fallback: OptimizerKind = AdamW()
    adjust_lr_fn: Literal["original", "match_rms_adamw", "none"] = "match_rms_adamw"
    about = "matrices between the embedding and the output layer"

    def trains(self, model: nn.Module) -> Named:
        """The parameters that are neither vectors nor in outer layers, by name."""
        named, outer = super().trains(model), outer_layers(model)
        return [(n, p) for n, p in named if not (is_vector(n, p) or id(p) in outer)]


class M3(MatrixKind, optim.M3.Options):
    r"""m3: w <- (1 - lr weight_decay) w - lr a (NS(m1) + slow NS(m2)), m2 moved once a slow_period.

    `hecate.optim.M3`, where its options are explained, for the parameters of `MatrixKind`.

    Formula: $m_t = \mu m_{t-1} + (1 - \mu) g_t,\quad n_T = \mu_s n_{T-1} + (1 - \mu_s)\, \mathrm{mean}(g) \ \text{once
    a slow period}$
    $w_t = (1 - \eta \lambda) w_{t-1} - \eta\, a \left(\mathrm{NS}(m_t) + \mathrm{slow}\, \mathrm{NS}(n_T)\right)$
    References: Nested Learning (Behrouz et al., 2025, arXiv 2512.24695), Algorithm 1. [TRAIN-OPTIM-D3]
    """

    kind: Literal["m3"] = "m3"
    factory = optim.M3


class Muon(MatrixKind, optim.Muon.Options):
    r"""muon: m <- momentum m + (1 - momentum) g, w <- (1 - lr weight_decay) w - lr a NS(u).

    `hecate.optim.Muon`, where its options are explained, for the parameters of `MatrixKind`.

    Formula: $m_t = \mu m_{t-1} + (1 - \mu) g_t,\quad w_t = (1 - \eta \lambda) w_{t-1} - \eta\, a\, \mathrm{NS}(\mu m_t
    + (1 - \mu) g_t)$
    References: Muon (Jordan et al., 2024); Nested Learning (Behrouz et al., 2025, arXiv 2512.24695), eq. 42.
    [TRAIN-OPTIM-D3]
    """

    kind: Literal["muon"] = "muon"
    factory = optim.Muon


def is_vector(name: str, p: Tensor) -> bool:
    """True if a parameter is a vector by its shape or its name: norms and biases per head are matrices by shape."""
    return p.dim() < 2 or name.rsplit(".", 1)[-1] in ("norm", "bias")


def outer_layers(model: nn.Module) -> set[int]:
    """Ids of the weights of embeddings (and those tied to them) and of the output layer."""
    outer = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    # A model of transformers, possibly inside another module, returns its output layer.
    parts: list[Any] = [m for m in model.modules() if hasattr(m, "get_output_embeddings")]
    heads = [part.get_output_embeddings() for part in parts]
    outer |= {id(p) for head in heads if isinstance(head, nn.Module) for p in head.parameters()}
    return outer | {id(p) for n, p in model.named_parameters() if n.startswith("head.")}


TEXT_LENGTH = 256
"""Length of text sequences if `budget.seq_len` is not given."""

OF_ADAMW = ("betas", "eps")
"""Fields of `optim.optimizer` that were fields of `optim` while AdamW was the only kind."""


def _freeze(periods: dict[str, int]) -> FrozenDict[str, int]:
    """`FrozenDict` as a function: pydantic needs a signature, which a generic class lacks from Python 3.12 on."""
    return FrozenDict(periods)


class OptimConfig(Config):
    """The outer optimiser, which trains the parameters (not the memories), and its learning rate.

    Fields:
        lr: the highest learning rate, the same for every kind.
        optimizer: how the step is taken; `hecate list optimizer` has the kinds.
        weight_decay: decay of matrices; norm scales, biases and other vectors have none.
        warmup: steps over which the rate rises linearly to `lr`.
        schedule: how the rate falls from `lr` to the last step of the budget.
        final: the rate of the last step, as a share of `lr`.
        clip: the largest norm of the whole gradient; null turns clipping off.
        periods: mapping from patterns of parameter names (shell style, the first match counts) to a number n: those
            parameters are updated once every n steps, by the mean of their gradients.
    """

    lr: float = Field(3e-3, gt=0)
    optimizer: OptimizerKind = AdamW()
    weight_decay: float = Field(0.1, ge=0)
    warmup: Count = Field(20, ge=0)
    schedule: Literal["cosine", "constant", "linear"] = "cosine"
    final: float = Field(0.1, ge=0, le=1)
    clip: float | None = Field(1.0, gt=0)
    periods: Annotated[dict[str, Annotated[Count, Field(ge=1)]], AfterValidator(_freeze)] = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _adamw_fields(cls, data: Any) -> Any:
        """Moves fields of AdamW, which older files have here, to the optimiser."""
        old = {name: data[name] for name in OF_ADAMW if name in data} if isinstance(data, Mapping) else {}
        if not old:
            return data
        kind = data.get("optimizer", "adamw")
        chosen = {"kind": kind} if isinstance(kind, str) else kind
        plain = isinstance(chosen, Mapping) and chosen.get("kind") == "adamw"
        for name in old:
            if not plain or name in chosen:
                cure = f"write optim.optimizer.{name} if it is adamw, else leave it out"
                raise ConfigError(f"belongs to optimizer 'adamw', and optimizer is given; {cure}", (name,))
        AdamW(**old)  # so that an invalid value is reported where it was written
        rest = {name: value for name, value in data.items() if name not in OF_ADAMW}
        return {**rest, "optimizer": {**chosen, **old}}

    def rate(self, step: int, steps: int) -> float:
        """Learning rate of 0-based `step`; a pure function, so that there is no state to save."""
        if step < self.warmup:
            return self.lr * (step + 1) / self.warmup
        done = min((step - self.warmup) / max(steps - 1 - self.warmup, 1), 1.0)
        if self.schedule == "constant":
            return self.lr
        curve = 1 - done if self.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * done))
        return self.lr * (self.final + (1 - self.final) * curve)


class BudgetConfig(Config):
    """Budget of a run: how long, how often and on what. [DIST-STEP-D1]

    Fields:
        steps: steps of the optimiser; a run resumed with another number follows the new schedule from there on.
        minutes: time after which a run ends early, counted anew when it is resumed; it is then not reproducible.
        batch_size: sequences per step, over all processes.
        accumulate: parts into which a step's batch is split to save memory; the gradient is that of the whole.
        seq_len: tokens per sequence of text, 256 when null; tasks have their own length.
        eval_every: steps between validations.
        eval_batches: batches per validation.
        checkpoint_every: steps between checkpoints.
        keep: number of newest checkpoints to keep, besides the best one.
        threads: CPU threads; only the command line applies it.
        device: device on which the model trains.
        precision: "bfloat16" runs forward and backward passes in it; trained parameters, sums over processes and the
            states of memories stay float32.
        recompute: blocks that store only their inputs and compute the rest again in the backward pass: all ("full"),
            every n-th, or none.
        compile: parts compiled by torch.compile: each "block", or on a GPU only the "chunk" of memories.
        save: "async" copies a checkpoint to memory and writes it while training continues.
        timeout: seconds that a process waits for the others.
    """

    steps: Count = Field(400, ge=1)
    minutes: float | None = Field(None, gt=0)
    batch_size: Size = Field(16, ge=1)
    accumulate: Size = Field(1, ge=1)
    seq_len: int | None = Field(None, ge=1, le=1 << 20)
    eval_every: Count = Field(100, ge=1)
    eval_batches: Size = Field(8, ge=1)
    checkpoint_every: Count = Field(100, ge=1)
    keep: Count = Field(2, ge=1)
    threads: int | None = Field(None, ge=1, le=1024)
    device: Literal["cpu", "cuda"] = "cpu"
    precision: Literal["float32", "bfloat16"] = "float32"
    recompute: Annotated[Size, Field(ge=1)] | Literal["none", "full"] = "none"
    compile: Literal["none", "block", "chunk"] = "none"
    save: Literal["sync", "async"] = "sync"
    timeout: float = Field(600.0, gt=0, le=86400)

    def conflicts(self) -> Conflicts:
        """`accumulate` that does not divide the batch, and compiled chunks on a CPU."""
        if self.batch_size % self.accumulate:
            yield ("accumulate",), f"must divide batch_size={self.batch_size}, got {self.accumulate}"
        if self.compile == "chunk" and self.device == "cpu":
            yield ("compile",), "'chunk' is for a GPU, and device is 'cpu'; take none or block"


class SampleConfig(Config):
    """Samples that a model writes into samples.txt.

    Fields:
        prompt: the text to continue.
        tokens: number of tokens to generate.
        temperature: randomness of the choice; 0 takes the likeliest token.
        every: steps between samples; 0 samples at the end only.
    """

    prompt: str = "def "
    tokens: int = Field(200, ge=0, le=1 << 20)
    temperature: float = Field(0.8, ge=0)
    every: Count = Field(0, ge=0)


class ExperimentConfig(Config):
    """A whole experiment; `hecate train` reads it from YAML. [TRAIN-CONFIG-D1]

    Fields:
        name: name of the run's folder and of its row in tables.
        seed: seed of the parameters and of the order of the data.
        model: its sizes and its memories.
        data: text, tokens or task to train on; `hecate list data` has the kinds.
        optim: the outer optimiser and its learning rate.
        budget: how long, how often and on what.
        parallel: how the processes of a run share its work.
        sample: samples of the model, written to samples.txt.
        tensorboard: true adds the logger for TensorBoard.
        loggers: further destinations of the metrics, such as wandb; `hecate list logger` has the kinds.
        init_from: run, checkpoint or safetensors file with the parameters to start from. [TRAIN-INIT-D1]
    """

    name: str = Field("experiment", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
    seed: int = Field(0, ge=0, lt=1 << 63)
    model: LanguageModelConfig = LanguageModelConfig()
    data: DataConfig = Bundled()
    optim: OptimConfig = OptimConfig()
    budget: BudgetConfig = BudgetConfig()
    parallel: ParallelConfig = ParallelConfig()
    sample: SampleConfig = SampleConfig()
    tensorboard: bool = False
    loggers: tuple[LoggerKind, ...] = ()
    init_from: str | None = Field(None, min_length=1)

    @model_validator(mode="before")
    @classmethod
    def _of_this_version(cls, data: Any) -> Any:
        if isinstance(data, Mapping) and "schema_version" in data:
            raise ConfigError(
                f"is {shorten(data['schema_version'])}: the config is of a newer hecate, as those of this one have no "
                "versions; upgrade hecate, or leave it out to have the rest read as it is",
                ("schema_version",),
            )
        return data

    def conflicts(self) -> Conflicts:
        """Parts of an experiment that do not fit together."""
        size = self.model.vocab_size
        try:
            with faults_under("data"), faults_at("path"):
                needed = self.data.vocabulary()
        except DataError as error:
            raise ConfigError(str(error), ("data", "path")) from None
        if size is not None and size != needed:
            wanted = f"the vocabulary of data {self.data.kind!r}, {needed}"
            yield ("model", "vocab_size"), f"must equal {wanted}, got {size}; leave it out and it is filled in"
        with faults_at("model", "d_model"):
            check_shapes({"embedding": (needed, self.model.d_model)}, "lower d_model")
        fixed, asked = self.data.length(), self.budget.seq_len
        if fixed is not None and asked not in (None, fixed):
            fits = f"data {self.data.kind!r} has sequences of length {fixed}"
            yield ("budget", "seq_len"), f"{fits}, got {asked}; leave it out"
        attention = self.model.attention
        if self.data.carries and attention is not None and attention.window is None and not attention.by_segment:
            grows = "model.attention.window is null: the keys of every token so far would be kept"
            yield ("data", "state"), f"is 'carry', but {grows}; give a window, or write data.state=fresh"
        steps = self.budget.steps
        for pattern, period in self.optim.periods.items():
            if period > steps:
                late = f"must be at most budget.steps, {steps}, got {period}: those parameters would never step"
                yield ("optim", "periods", pattern), late

    def asked_loggers(self) -> list[Asked]:
        """Every logger once, with the path of the setting that asks for it."""
        asked: list[Asked] = [(("loggers", number), kind) for number, kind in enumerate(self.loggers)]
        if self.tensorboard and not any(isinstance(kind, Tensorboard) for kind in self.loggers):
            asked.append((("tensorboard",), Tensorboard()))
        return asked

    @property
    def seq_len(self) -> int:
        """Length of the training sequences."""
        return self.data.length() or self.budget.seq_len or TEXT_LENGTH

    def engines(self) -> dict[str, tuple[str, str]]:
        """The engine that runs each memory in training on this machine, and the reason, by the memory's path."""
        engines = {}
        for path, (memory, d_key, d_value, window) in self.model.rules().items():
            shape, length = (d_value, memory.feature_map.output_dim(d_key)), min(self.seq_len, window or self.seq_len)
            plan = Plan.sketch(memory, length=length, shape=shape, device=self.budget.device, dtype=memory.dtype)
            asked = "fused" if self.budget.compile == "chunk" and memory.chunk > 1 else "auto"
            engines[path] = explain(plan, asked, others=True)
        return engines

    def widened(self) -> dict[str, tuple[str, int, int]]:
        """Memories whose features differ in width from their keys, by path: the kind of map, width of features, width
        of keys."""
        maps = {path: (rule.config.feature_map, rule.d_key) for path, rule in self.model.rules().items()}
        widths = {path: (phi.kind, phi.output_dim(d_key), d_key) for path, (phi, d_key) in maps.items()}
        return {path: (kind, width, d_key) for path, (kind, width, d_key) in widths.items() if width != d_key}

    def model_for_data(self) -> LanguageModelConfig:
        """The model's config with the vocabulary filled in from the data."""
        return self.model.model_copy(update={"vocab_size": self.data.vocabulary()})
