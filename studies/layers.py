"""recall, words, mad: small layers, trained on a task and judged there and beyond it: what they answer of pairs that
others replace, from long ago, or more than keys are wide; whether they keep count beyond the lengths of training, in
parity and words of S_3 and S_5; and what they memorise in their weights, beside published accuracies."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Generator, Tensor, nn

from hecate.data import IGNORED, DataConfig, Task
from hecate.errors import NonFiniteError
from hecate.figure import GREY, finish
from hecate.gym.training import BATCH, Fields, trained
from hecate.nn import SlidingAttention
from hecate.nn.conv import ShortConv
from hecate.nn.sliding import SlidingState
from hecate.rule import bytes_of
from hecate.train.trainer import Trainer
from studies.study import Cell, Kept, Result, Run, Spread, Study, dot_plot, progress, reach, spread_line

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
    store: Kept, since: float = 0.0, mixer: Callable[[Generator], nn.Module] | None = None, batch: int = BATCH,
) -> Outcome:  # fmt: skip
    """Trains on the first task from every seed and judges on all of them; on a seed of its own the rate is chosen, for
    the first model, then the model at that rate. Runs that are kept are not run again."""

    def run(model: int, lr: float, seed: int) -> Sequence[Any]:
        """Accuracies of a trained layer by task, and bytes of its state."""

        def fit() -> Sequence[Any]:
            trainer = trained(models[model], tasks[0], seed, lr, steps, mixer, batch)
            with torch.no_grad():
                _, state = trainer.model(torch.zeros(1, trainer.config.seq_len, dtype=torch.int64))
            return [judged(trainer, task, since) for task in tasks], bytes_of(state)

        return store([models[model], list(tasks), steps, lr, seed, since, mixer and mixer.__name__, batch], fit)

    def score(lr: float, model: int) -> float:
        try:
            return run(model, lr, JUDGE)[0][0]
        except NonFiniteError:
            return 0.0

    lr = best(rates, lambda lr: score(lr, 0))
    model = best(range(len(models)), lambda model: score(lr, model))
    scores, sizes = zip(*(run(model, lr, seed) for seed in seeds), strict=True)
    return Outcome([list(column) for column in zip(*scores, strict=True)], lr, model, sizes[0])


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
    answered = targets != IGNORED
    return float((logits.argmax(-1) == targets)[answered].double().mean())


def best(among: Sequence[T], score: Callable[[T], float]) -> T:
    """The one whose score is the highest, the first of equals; a lone one is not asked, nor who comes after a score of
    1."""
    winner, top = among[0], -1.0
    for candidate in among if len(among) > 1 else ():
        if top < 1 and (points := score(candidate)) > top:
            winner, top = candidate, points
    return winner


WIDTH, TAPS, KEYS, STEPS = 32, 2, 8, 900
RATES = (1e-2, 2e-2, 5e-3, 4e-2, 2.5e-3)
ATTENTION = "attention, the same convolution"


class Convolved(nn.Module):
    """Attention over all tokens behind the convolution that memories have, without which it never sees what follows a
    key."""

    def __init__(self, generator: Generator) -> None:
        super().__init__()
        self.conv = ShortConv(WIDTH, TAPS)
        self.conv.reset_parameters(generator)
        self.attention = SlidingAttention(WIDTH, 1, window=None, generator=generator)

    def forward(self, x: Tensor, state: None, **masks: None) -> tuple[Tensor, SlidingState]:
        """From the start of a sequence, without masks: that is how it is trained here."""
        y, after = self.attention(self.conv(x)[0])
        return y, after


def model(memory: Any, d_key: int = 16, d_value: int = WIDTH) -> dict[str, Any]:
    """A layer of one head, without an MLP."""
    sizes = {"d_model": WIDTH, "heads": 1, "mlp_ratio": 0, "d_key": d_key, "d_value": d_value}
    return {**sizes, "conv_kernel": TAPS, "output_gate": False, "memory": memory}


def rules() -> dict[str, list[dict[str, Any]]]:
    """Models by the rule of their memory and the width of its keys, and attention; of several the best is taken."""
    momentum = {"kind": "momentum", "lr_start": 0.75, "dampening": True}
    titans = [{"kind": "titans", "algorithm": {**momentum, "lr": lr}} for lr in (2.0, 1.0, 0.5)]
    flat = ("linear_attention", "delta", "gated_delta", "mesa", "titans_linear")
    return {
        "gated_delta, d_key 4": [model("gated_delta", 4)],
        **{rule: [model(rule)] for rule in flat},
        "deep: titans": [model(rule, d_value=16) for rule in titans],
        ATTENTION: [{"d_model": WIDTH, "heads": 1, "mlp_ratio": 0, "attention": {"kind": "attention"}}],
    }


def maps() -> dict[str, list[dict[str, Any]]]:
    """Models by the phi of their delta rule; all but the first hold as many numbers."""

    def delta(d_key: int, *maps: Any) -> list[dict[str, Any]]:
        return [model({"kind": "delta", "key_norm": "l2", "feature_map": phi}, d_key) for phi in maps]

    wide = 8 * KEYS
    fourier = [{"kind": "random_fourier", "d_phi": wide, "sigma": sigma} for sigma in (0.4, 0.2, 0.8)]
    composed = {"kind": "compose", "maps": [{"kind": "linear", "d_phi": wide}, "elu"]}
    return {
        f"delta, d_key {KEYS}": delta(KEYS, "identity"),
        f"delta, d_key {wide}": delta(wide, "identity"),
        "delta, dpfp, nu 4": delta(KEYS, {"kind": "dpfp", "nu": 4}),
        "delta, random_fourier": delta(KEYS, *fourier),
        "delta, a trained phi (linear, elu)": delta(KEYS, composed),
    }


class Trial(NamedTuple):
    """A task, at the length of training and beyond it, what guessing scores, and who is trained on it."""

    data: dict[str, Any]
    lengths: tuple[int, ...]
    chance: float
    models: Mapping[str, list[dict[str, Any]]]


def at(task: dict[str, Any], length: int) -> dict[str, Any]:
    """A task at a length; 0 where it has but one."""
    return {**task, "seq_len": length} if length else task


_MQAR = {"kind": "mqar", "vocab_size": 64, "random_filler": False}
TASKS = {
    "replaced": Trial({"kind": "retrieval", "num_keys": 8, "queries": 4, "replacement": True}, (0,), 1 / 8, rules()),
    "far": Trial({**_MQAR, "num_pairs": 4, "power": 1.0}, (64, 256, 1024), 1 / 32, rules()),
    "beyond": Trial({**_MQAR, "num_pairs": 16, "seq_len": 64}, (0,), 1 / 32, maps()),
}
QUICK = ("delta", "linear_attention")


def recall(run: Run) -> Result:
    """Trains every contender on every task from every seed."""
    steps, rates = (120, (2e-2,)) if run.quick else (STEPS, RATES)
    outcomes: dict[str, dict[str, Outcome]] = {}
    store = run.kept()
    for kind in list(TASKS)[: 1 if run.quick else None]:
        task, outcomes[kind] = TASKS[kind], {}
        for name in progress(QUICK if run.quick else tuple(task.models), kind):
            mixer, since = Convolved if name == ATTENTION else None, 0.5 if len(task.lengths) > 1 else 0.0
            tasks = [at(task.data, length) for length in task.lengths]
            outcomes[kind][name] = settled(task.models[name], tasks, steps, rates, run.seeds, store, since, mixer)
    return report(outcomes)


ABOUT = "What do trained memories answer of pairs replaced, long ago, or more than keys are wide?"
RECALL = Study("recall", ABOUT, recall, seeds=3)


def report(outcomes: Mapping[str, Mapping[str, Outcome]]) -> Result:
    """The table, with intervals, and the figure."""
    scores = {
        f"{kind}, {length} tokens" if length else kind: {name: outcome.scores[at] for name, outcome in models.items()}
        for kind, models in outcomes.items()
        for at, length in enumerate(TASKS[kind].lengths)
    }
    chances = [TASKS[title.split(",")[0]].chance for title in scores]
    columns = ["memory", "state (bytes)", *(text for title in scores for text in (title, "95 %"))]
    rows: list[list[Cell]] = [["a guess", None, *(cell for chance in chances for cell in (round(chance, 3), None))]]
    names = list(dict.fromkeys(chain(*outcomes.values())))
    columns_of = {name: [seeds.get(name, ()) for seeds in scores.values()] for name in names}
    spreads = {name: [Spread.of(seeds) if seeds else None for seeds in columns_of[name]] for name in names}
    rates = []
    for name in names:
        reaches = [reach(seeds, ".2f", 1.0) for seeds in columns_of[name]]
        chosen = [models[name] for models in outcomes.values() if name in models]
        rows.append([name, chosen[0].bytes, *chain(*zip(spreads[name], reaches, strict=True))])
        places = (f"{outcome.lr:g}" + (f" of {outcome.model + 1}" if outcome.model else "") for outcome in chosen)
        rates.append(f"{name} {', '.join(places)}")
    notes = [
        "replaced: 4 of 8 keys of 16 pairs, asked for their last values; far: 4 pairs and then nothing, asked in the "
        f"later half, trained at {TASKS['far'].lengths[0]} tokens; beyond: 16 pairs among 64 tokens, keys of width "
        f"{KEYS} unless said; who knows the values, not whose they are, is right in 1/4 of far, 1/16 of beyond",
        f"one layer of width {WIDTH}, one head, keys of width 16 unless said; {STEPS} steps of 32 sequences; state: of "
        "attention its cache",
        "rates, and which of several models: " + "; ".join(rates),
    ]
    panels = {title: {"": [cells[at] for cells in spreads.values()]} for at, title in enumerate(scores)}
    size = (2.6 * len(panels) + 2.0, 0.28 * len(names) + 1.4)
    data = {kind: {name: outcome._asdict() for name, outcome in kin.items()} for kind, kin in outcomes.items()}
    return Result(columns, rows, notes, lambda figure: dot_plot(figure, names, panels, "accuracy", chances), size, data)


HEADS, WORD_STEPS = 4, 800
WORD_RATES = (3e-3, 1e-2)  # to choose from
LENGTHS = (24, 48, 96)  # of training, and beyond
QUICK_WORDS = ("delta, lr to 1", "delta, lr to 2")
GROUPS: dict[str, dict[str, Any]] = {
    "parity": {"kind": "parity"},
    "S_3": {"kind": "permutations", "degree": 3},
    "S_5, swaps": {"kind": "permutations", "degree": 5, "elements": "swaps"},
    "S_5, generators": {"kind": "permutations", "degree": 5, "elements": "generators"},
}
MORE_STEPS = {"S_5, generators": 3}  # times the steps


# On which tasks theory lets one layer follow any length; None where it says nothing. A reflection, lr 2, flips a sign
# or swaps two letters, the product of two moves three, and of four all five; a state on a positive diagonal does not.
Able = tuple[str, ...] | None


def contenders() -> dict[str, tuple[dict[str, Any], Able]]:
    """From memories whose state moves along a diagonal to those that write several times, and attention."""
    around = {"d_model": WIDTH, "heads": HEADS, "mlp_ratio": 2.0}

    def rule(kind: str, most: float | None = None, **fields: int) -> dict[str, Any]:
        algorithm = {} if most is None else {"algorithm": {"kind": "gd", "lr": most}}
        return {**around, "memory": {"kind": kind, **algorithm, **fields}, "conv_kernel": 0}  # keys of a token alone

    single, every = ("parity", "S_5, swaps"), tuple(GROUPS)
    return {
        "linear_attention": (rule("linear_attention"), ()),
        "mamba2": (rule("mamba2"), ()),
        "delta, lr to 1": (rule("delta", 1.0), ()),
        "delta, lr to 2": (rule("delta", 2.0), single),
        "gated_delta, lr to 2": (rule("gated_delta", 2.0), single),
        "delta_product, 2 writes, lr to 1": (rule("delta_product", 1.0), None),
        "delta_product, 2 writes, lr to 2": (rule("delta_product", 2.0), every[:-1]),
        "delta_product, 4 writes, lr to 2": (rule("delta_product", 2.0, writes=4), every),
        **{kind: (rule(kind), None) for kind in ("rwkv7", "mamba3", "titans_linear")},
        "attention": ({**around, "attention": {"kind": "attention"}}, ()),
    }


def words(run: Run) -> Result:
    """Trains every contender on every task, at the rate that is best on a seed of its own."""
    base, rates, lengths = (60, WORD_RATES[1:], LENGTHS[:2]) if run.quick else (WORD_STEPS, WORD_RATES, LENGTHS)
    every, names = contenders(), QUICK_WORDS if run.quick else tuple(contenders())
    titles = [f"{length} tokens" for length in lengths]
    store, rows, panels = run.kept(), [], {}
    for task in list(GROUPS)[: 1 if run.quick else None]:
        steps, tasks = base * MORE_STEPS.get(task, 1), [at(GROUPS[task], length) for length in lengths]
        scores = []
        for name in progress(names, f"{task}, {steps} steps each"):
            model, able = every[name]
            outcome = settled([model], tasks, steps, rates, run.seeds, store, 0.5)
            scores.append([Spread.of(accuracies) for accuracies in outcome.scores])
            known = None if able is None else "yes" if task in able else "no"
            rows.append([task, name, outcome.bytes, steps, outcome.lr, known, *scores[-1]])
        panels[task] = dict(zip(titles, zip(*scores, strict=True), strict=True))
    columns = ["task", "memory", "state (bytes)", "steps", "outer lr", "able in theory"]
    columns += [f"accuracy at {length}" for length in lengths]
    notes = [
        f"one layer of width {WIDTH}, {HEADS} heads, no convolution, an MLP; trained on words of {lengths[0]}; "
        f"accuracy on the later half of {JUDGED} words, where a guess is right in .5 of parity, .17 of S_3, and .008 "
        "of S_5, .017 once its sign is known; state: of attention its cache",
        "able: one layer can follow every length in real numbers (Grazzi et al., 2411.12537; Siems et al., 2502.10297; "
        "Merrill et al., 2404.08819)",
    ]
    size = (2.0 + 3.0 * len(panels), 4.8)
    return Result(columns, rows, notes, lambda figure: dot_plot(figure, names, panels, "accuracy"), size)


WORDS = Study("words", "Which memories keep count, and beyond the lengths of training?", words, seeds=3)


VOCABULARIES, EXAMPLES, PAIRS = (256, 512, 1024, 2048, 4096, 8192), 256, 16
FACTS_BATCH, FACTS_STEPS, CHOOSING = 128, 400, 4096  # 200 epochs; the vocabulary that rates are chosen at
FACTS_RATES = (8e-3, 1.6e-2, 3.2e-2, 6.4e-2)
_BLOCKS = {"layers": 2, "d_model": 128, "mlp_ratio": 2.75, "tie_embeddings": False}
MEMORISING: dict[str, tuple[dict[str, Any], float | None]] = {  # and the accuracy that Yang et al. report
    "delta": ({**_BLOCKS, "heads": 2, "memory": "delta"}, 0.528),
    "gla": ({**_BLOCKS, "heads": 8, "memory": "gla", "conv_kernel": 0}, 0.633),
    "attention": ({**_BLOCKS, "heads": 16, "attention": {"kind": "attention", "qk_norm": "none"}}, 0.852),
    "attention, q and k normalised": ({**_BLOCKS, "heads": 16, "attention": {"kind": "attention"}}, None),
}


def mad(run: Run) -> Result:
    """Trains every model on the same facts for 200 epochs, at every vocabulary, at the rate that is best at one."""
    sizes, names = ((256,), ["delta"]) if run.quick else (VOCABULARIES, list(MEMORISING))
    steps, rates = (5, FACTS_RATES[:1]) if run.quick else (FACTS_STEPS, FACTS_RATES)
    store = run.kept()

    def outcome(name: str, size: int, rates: Sequence[float]) -> Outcome:
        task = {"kind": "mad_memorization", "vocab_size": size, "examples": EXAMPLES}
        return settled([MEMORISING[name][0]], [task], steps, rates, run.seeds, store, batch=FACTS_BATCH)

    shown = [1 - (1 - 1 / ((size - 1) // 2)) ** (EXAMPLES * PAIRS) for size in sizes]
    rows: list[list[Cell]] = [["all that was shown", None, round(statistics.fmean(shown), 3), None, None, *shown, None]]
    lines = {}
    for name in progress(names, f"{len(sizes)} vocabularies"):
        lr = outcome(name, CHOOSING if CHOOSING in sizes else sizes[0], rates).lr
        scores = [outcome(name, size, [lr]).scores[0] for size in sizes]
        means = [statistics.fmean(seed) for seed in zip(*scores, strict=True)]
        lines[name] = [Spread.of(accuracies) for accuracies in scores]
        ours = [Spread.of(means), reach(means, ".3f", 1.0), len(means)]
        rows.append([name, MEMORISING[name][1], *ours, *lines[name], lr])
    columns = ["model", "published", "ours", "95 %", "seeds", *(f"vocabulary {size}" for size in sizes), "outer lr"]
    notes = [
        "MAD's memorization (Poli et al., 2024, arXiv 2403.17844): accuracy, mean of six vocabularies; published by "
        "Yang et al. (2024, arXiv 2406.06484), figure 3, delta their own, the others of Poli et al.",
        f"the rate, one of {', '.join(f'{rate:g}' for rate in rates)}, is chosen at a vocabulary of {CHOOSING:,}; the "
        "published are 1e-4 to 1e-3, each vocabulary its best",
        "all that was shown: the share of keys that training sequences hold; who knows those scores no more",
        "MAD's other tasks: 20,000 steps of 128 longer sequences a level, which were not trained",
    ]

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        axes.plot(sizes, shown, color=GREY, linestyle=":", linewidth=1, label="all that was shown")
        for index, (name, spreads) in enumerate(lines.items()):
            spread_line(axes, index, name, sizes, spreads)
        axes.set_xscale("log", base=2)
        finish(axes, "Facts memorised in 200 epochs", "vocabulary", "accuracy", xticks=sizes, ylim=(-0.03, 1.03))

    return Result(columns, rows, notes, draw, (6.4, 4.0))


MAD = Study("mad", "Do memories memorise facts in their weights as published?", mad, seeds=3)
