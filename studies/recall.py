"""recall: accuracy of associative recall against the size of the state, by feature map and rule."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from hecate.data import MQAR
from hecate.microscope.style import COLOURS, MARKERS, finish
from hecate.models import LanguageModel, LanguageModelConfig
from hecate.nn import SlidingAttention
from hecate.nn.conv import ShortConv
from hecate.nn.sliding import SlidingState
from hecate.rule import bytes_of
from hecate.train.config import BudgetConfig, ExperimentConfig, OptimConfig
from hecate.train.trainer import Trainer
from studies.study import Cell, Progress, Result, Spread, Study

TASK = MQAR(vocab_size=32, num_pairs=8, seq_len=32, random_filler=False)
WIDTH = 32  # of the model and of values
RATES = (2e-2, 5e-3)  # outer learning rates to choose from; a quick run takes the first
JUDGE = 1000  # the seed that they are chosen on
BATCH, EVAL_BATCHES = 32, 16
QUICK = {("sum", "elu", 16), ("delta", "elu", 4), ("delta", "elu", 16)}
TAPS = 2  # of the convolution that shows a token the one before it


class Mixer(NamedTuple):
    """A memory of one size; softmax attention where there is none."""

    rule: str
    phi: str
    d_key: int
    memory: dict[str, Any] | None
    qk_norm: str = "none"
    quick: bool = False

    @property
    def name(self) -> str:
        """The curve that it is a point of."""
        return f"{self.rule}, {self.phi}" if self.phi else self.rule


def mixers() -> list[Mixer]:
    """Every point of every curve, from the smallest state to the largest."""
    plain = {"bias": "dot", "normalizer": "sum"}
    found = [Mixer("softmax attention", "", WIDTH, None)]

    def add(rule: str, phi: str, memory: dict[str, Any], *widths: int) -> None:
        norm = "l2" if phi == "identity" else "none"
        for d in widths:
            quick = (rule, phi, d) in QUICK
            found.append(Mixer(rule, phi, d, memory, norm, quick))

    add("sum", "elu", {**plain, "feature_map": "elu"}, 4, 8, 16, 32)
    add("sum", "DPFP-1", {**plain, "feature_map": "dpfp"}, 2, 4, 8, 16)
    add("sum", "Taylor", {**plain, "feature_map": "taylor"}, 4, 8, 16)
    for features in (8, 16, 32, 64):
        favor = {"kind": "favor", "num_features": features}
        add("sum", "FAVOR+", {**plain, "feature_map": favor}, 16)
    for rule, kind, most in (("delta", "delta", 4), ("gated delta", "gated_delta", 3)):
        add(rule, "identity", {"kind": kind}, *(4, 8, 16, 32)[:most])
        add(rule, "elu", {"kind": kind, "feature_map": "elu"}, *(4, 8, 16, 32)[:most])
        add(rule, "DPFP-1", {"kind": kind, "feature_map": "dpfp"}, *(2, 4, 8, 16)[:most])
    return found


class Convolved(nn.Module):
    """Attention over all tokens, behind the short convolution that a memory layer has within."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self.conv = ShortConv(WIDTH, TAPS)
        self.conv.reset_parameters(generator)
        self.attention = SlidingAttention(WIDTH, 1, window=None, generator=generator)

    def forward(self, x: Tensor, state: None, **masks: None) -> tuple[Tensor, SlidingState]:
        """From the start of a sequence, without masks: that is how it is trained here."""
        y, after = self.attention(self.conv(x)[0])
        return y, after


def trainer_of(mixer: Mixer, seed: int, steps: int, lr: float) -> Trainer:
    """A model of one layer, without MLP or output gate, and its training."""
    sizes: dict[str, Any] = {"d_model": WIDTH, "layers": 1, "heads": 1, "mlp_ratio": 0}
    if mixer.memory is None:
        model = LanguageModelConfig.model_validate({**sizes, "attention": {"kind": "attention"}})
    else:
        model = LanguageModelConfig.model_validate({
            **sizes, "memory": mixer.memory, "d_key": mixer.d_key, "d_value": WIDTH,
            "qk_norm": mixer.qk_norm, "conv_kernel": TAPS, "output_gate": False,
            "learned_initial": False,
        })  # fmt: skip
    config = ExperimentConfig(
        seed=seed,
        model=model,
        data=TASK,
        optim=OptimConfig(lr=lr, weight_decay=0.0),
        budget=BudgetConfig(steps=steps, batch_size=BATCH, eval_batches=EVAL_BATCHES),
    )
    if mixer.memory is not None:
        return Trainer(config)
    generator = torch.Generator().manual_seed(seed)
    own = LanguageModel(config.model_for_data(), generator=generator)
    own.blocks[0].memory = Convolved(generator)
    return Trainer(config, model=own)


@torch.no_grad()
def state_bytes(model: nn.Module) -> int:
    """Bytes that a sequence of the task leaves in the weights of a memory and its normaliser, or
    in the keys and values of attention."""
    _, (state,) = model(torch.zeros(1, TASK.seq_len, dtype=torch.int64))
    if isinstance(state, SlidingState):
        return bytes_of((state.keys, state.values))
    memory = state.memory
    own = [memory.memory] if memory.normalizer is None else [memory.memory, memory.normalizer.memory]
    return bytes_of(own)


def accuracy_of(mixer: Mixer, seed: int, steps: int, lr: float) -> tuple[float, int]:
    """Accuracy after training, and the bytes of the state."""
    trainer = trainer_of(mixer, seed, steps, lr)
    for _ in range(steps):
        trainer.train_step()
    return trainer.evaluate().accuracy, state_bytes(trainer.model)


class Outcome(NamedTuple):
    """A mixer, its size, the rate that was best for it, and its accuracy by seed."""

    mixer: Mixer
    bytes: int
    lr: float
    accuracy: list[float]

    @property
    def mean(self) -> float:
        """Over seeds."""
        return sum(self.accuracy) / len(self.accuracy)


class Recall(Study):
    """A small form of the recall studies of Zoology (Arora et al., 2023, arXiv 2312.04927) and
    Based (Arora et al., 2024, arXiv 2402.18668)."""

    name: ClassVar[str] = "recall"
    about: ClassVar[str] = "How much recall does a byte of state buy, by feature map and rule?"
    count: ClassVar[int] = 2

    def run(self, quick: bool, seeds: Sequence[int], progress: Progress) -> Result:
        """Trains every mixer from every seed, at the rate that was better on a seed of its own."""
        steps, rates = (200, RATES[:1]) if quick else (400, RATES)
        chosen = [mixer for mixer in mixers() if mixer.quick or not quick]
        outcomes = []
        for mixer in progress(chosen, f"{steps} steps each"):
            lr = rates[0]
            if len(rates) > 1:
                tries = [accuracy_of(mixer, JUDGE, steps, rate)[0] for rate in rates]
                lr = rates[tries.index(max(tries))]
            found = [accuracy_of(mixer, seed, steps, lr) for seed in seeds]
            outcomes.append(Outcome(mixer, found[0][1], lr, [accuracy for accuracy, _ in found]))
        return report(outcomes, steps)


def ordered(outcomes: Sequence[Outcome]) -> tuple[int, int]:
    """Pairs in which the larger state is at least as accurate, and all whose sizes differ by more
    than a normaliser's share."""
    pairs = [sorted(pair, key=lambda o: o.bytes) for pair in itertools.combinations(outcomes, 2)]
    apart = [(a, b) for a, b in pairs if b.bytes > 1.1 * a.bytes]
    return sum(b.mean >= a.mean for a, b in apart), len(apart)


def against_sum(outcomes: Sequence[Outcome], rule: str) -> list[tuple[str, Spread]]:
    """Accuracy of a rule minus that of the sum with the same map and width, seed by seed."""
    by = {(o.mixer.rule, o.mixer.phi, o.mixer.d_key): o for o in outcomes}
    found = []
    for (other, phi, d), outcome in by.items():
        base = by.get(("sum", phi, d))
        if other == rule and base is not None:
            gaps = [a - b for a, b in zip(outcome.accuracy, base.accuracy, strict=True)]
            found.append((f"{phi} {d}", Spread.of(gaps)))
    return found


def claims(outcomes: Sequence[Outcome]) -> list[str]:
    """What is published, and whether it is so here."""
    fixed = [o for o in outcomes if o.mixer.memory is not None]
    right, pairs = ordered(fixed)
    said = [
        "claimed (Zoology, 2023; Based, 2024): accuracy follows the size of the state; here the "
        "larger of two states is at "
        f"least as accurate in {right} of {pairs} pairs"
    ]
    names = dict.fromkeys(o.mixer.name for o in fixed)
    within = {name: ordered([o for o in fixed if o.mixer.name == name]) for name in names}
    fails = [f"{name} ({r} of {n} pairs)" for name, (r, n) in within.items() if r < n]
    said.append(
        "claimed: so it does within one map and rule (Based: with the width of Taylor); here "
        + (f"it does NOT in {', '.join(fails)}" if fails else "it holds for every one")
    )
    sources = {"delta": "claimed (DeltaNet, 2024)", "gated delta": "to be expected then"}
    for rule, source in sources.items():
        gaps = against_sum(outcomes, rule)
        if gaps:
            ahead = sum(gap.mean > gap.error for _, gap in gaps)
            behind = sum(gap.mean < -gap.error for _, gap in gaps)
            listed = ", ".join(f"{name}: {gap}" for name, gap in gaps)
            said.append(
                f"{source}: {rule} above sum at equal state; here by more than a standard error in "
                f"{ahead} of {len(gaps)} cases, below by as much in {behind} (difference in "
                f"accuracy by phi and d_key: {listed})"
            )
    return said


def report(outcomes: list[Outcome], steps: int) -> Result:
    """The table, what it means and the figure."""
    columns = [
        "rule", "phi", "d_key", "state (bytes)", "outer lr", "published", "accuracy (share)",
    ]  # fmt: skip
    rows: list[list[Cell]] = [
        [
            o.mixer.rule, o.mixer.phi or None, o.mixer.d_key, o.bytes, o.lr,
            "figure only", Spread.of(o.accuracy),
        ]
        for o in outcomes
    ]  # fmt: skip
    notes = [
        f"multi-query associative recall: {TASK.num_pairs} pairs, {TASK.seq_len} tokens, "
        f"vocabulary {TASK.vocab_size}; a guess among the values of the row is right in 1 of "
        f"{TASK.num_pairs}; the rest of a row is token 0; mean +- standard error over seeds",
        f"one layer of width {WIDTH} with one head, values of width {WIDTH}, a convolution of "
        f"{TAPS} taps, no MLP, no output gate, memories that start at zero",
        f"{steps} steps of AdamW, batch {BATCH}, cosine decay, and of the rates in the table the "
        f"one that was better on seed {JUDGE}; not all have converged",
        "published figures (Zoology, Based: vocabulary 8192, 2 layers, 64 epochs, swept rates) "
        "have no table and are out of reach here; their statements are compared instead",
        "state: weights of a memory with those of its normaliser; of attention the keys and values "
        f"of {TASK.seq_len} tokens, which grow with every token",
        "phi of delta rules is brought to unit length; FAVOR+: positive features of d_key 16, more "
        "and more of them, drawn once",
        *claims(outcomes),
    ]

    def draw(figure: Any) -> None:
        rules = list(dict.fromkeys(o.mixer.rule for o in outcomes if o.mixer.memory is not None))
        panels = figure.subplots(1, len(rules), sharex=True, sharey=True)
        for axes, rule in zip(panels, rules, strict=True):
            _draw(axes, outcomes, rule)

    data = {f"{o.mixer.name} {o.bytes}": o.accuracy for o in outcomes}
    return Result(columns, rows, notes, draw, size=(13, 5.5), data=data)


def _draw(axes: Any, outcomes: list[Outcome], rule: str) -> None:
    names = list(dict.fromkeys(o.mixer.phi for o in outcomes if o.mixer.phi))
    for index, phi in enumerate(names):
        own = [o for o in outcomes if (o.mixer.rule, o.mixer.phi) == (rule, phi)]
        if own:
            spreads = [Spread.of(o.accuracy) for o in own]
            errors = [spread.error if spread.seeds > 1 else 0 for spread in spreads]
            axes.errorbar(
                [o.bytes for o in own], [o.mean for o in own], errors, capsize=2, label=phi,
                color=COLOURS[index], marker=MARKERS[index],
            )  # fmt: skip
    for o in outcomes:
        if o.mixer.memory is None:
            label = f"softmax attention, {o.bytes} bytes"
            axes.axhline(o.mean, color="0.5", linestyle="--", linewidth=1, label=label)
    finish(
        axes, f"{rule} rule", "state of a sequence (bytes)", "accuracy (share of queries)",
        xscale="log", ylim=(0, 1.04),
    )  # fmt: skip
