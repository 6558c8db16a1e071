"""recall: what trained memories answer of pairs that others replace, from long ago, or more than keys are wide."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Any, NamedTuple

from torch import Generator, Tensor, nn

from hecate.nn import SlidingAttention
from hecate.nn.conv import ShortConv
from hecate.nn.sliding import SlidingState
from studies.layers import JUDGE, JUDGED, Outcome, settled
from studies.pictures import dot_plot
from studies.study import Cell, Result, Run, Spread, Study, progress, reach

WIDTH, TAPS, KEYS, STEPS = 32, 2, 8, 900
RATES = (1e-2, 2e-2, 5e-3, 4e-2, 2.5e-3)
ATTENTION = "attention, the same convolution"
DEEP = "deep: "  # before the names of memories of more than one layer


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
        f"{DEEP}titans": [model(rule, d_value=16) for rule in titans],
        ATTENTION: [{"d_model": WIDTH, "heads": 1, "mlp_ratio": 0, "attention": {"kind": "attention"}}],
    }


def maps() -> dict[str, list[dict[str, Any]]]:
    """Models by the phi of their delta rule; all but the first hold as many numbers."""

    def delta(d_key: int, *maps: Any) -> list[dict[str, Any]]:
        return [model({"kind": "delta", "key_norm": "l2", "feature_map": phi}, d_key) for phi in maps]

    wide = 8 * KEYS
    fourier = [{"kind": "random_fourier", "d_phi": wide, "sigma": sigma} for sigma in (0.4, 0.2, 0.8)]
    return {
        f"delta, d_key {KEYS}": delta(KEYS, "identity"),
        f"delta, d_key {wide}": delta(wide, "identity"),
        "delta, dpfp, nu 4": delta(KEYS, {"kind": "dpfp", "nu": 4}),
        "delta, random_fourier": delta(KEYS, *fourier),
        "delta, a trained phi (linear, elu)": delta(
            KEYS, {"kind": "compose", "maps": [{"kind": "linear", "d_phi": wide}, "elu"]}
        ),
    }


class Task(NamedTuple):
    """A task, at the length of training and beyond it, what guessing scores, and who is trained on it."""

    data: dict[str, Any]
    lengths: tuple[int, ...]
    chance: float
    models: Mapping[str, list[dict[str, Any]]]

    def at(self, length: int) -> dict[str, Any]:
        """The task at a length; 0 where it has but one."""
        return {**self.data, "seq_len": length} if length else self.data


_MQAR = {"kind": "mqar", "vocab_size": 64, "random_filler": False}
TASKS = {
    "replaced": Task({"kind": "retrieval", "num_keys": 8, "queries": 4, "replacement": True}, (0,), 1 / 8, rules()),
    "far": Task({**_MQAR, "num_pairs": 4, "power": 1.0}, (64, 256, 1024), 1 / 32, rules()),
    "beyond": Task({**_MQAR, "num_pairs": 16, "seq_len": 64}, (0,), 1 / 32, maps()),
}
QUICK = ("delta", "linear_attention")


def recall(run: Run) -> Result:
    """Trains every contender on every task from every seed."""
    steps, rates = (120, (2e-2,)) if run.quick else (STEPS, RATES)
    found: dict[str, dict[str, Outcome]] = {}
    kept = run.kept()
    for kind in list(TASKS)[: 1 if run.quick else None]:
        task, found[kind] = TASKS[kind], {}
        for name in progress(QUICK if run.quick else tuple(task.models), kind):
            mixer, since = Convolved if name == ATTENTION else None, 0.5 if len(task.lengths) > 1 else 0.0
            tasks = [task.at(length) for length in task.lengths]
            found[kind][name] = settled(task.models[name], tasks, steps, rates, run.seeds, since, mixer, kept)
    return report(found)


ABOUT = "What do trained memories answer of pairs replaced, long ago, or more than keys are wide?"
RECALL = Study("recall", ABOUT, recall, seeds=3)


def report(found: Mapping[str, Mapping[str, Outcome]]) -> Result:
    """The table, with intervals, and the figure."""
    scores = {
        f"{kind}, {length} tokens" if length else kind: {name: outcome.scores[at] for name, outcome in own.items()}
        for kind, own in found.items()
        for at, length in enumerate(TASKS[kind].lengths)
    }
    chances = [TASKS[title.split(",")[0]].chance for title in scores]
    columns = ["memory", "state (bytes)", *(text for title in scores for text in (title, "95 %"))]
    rows: list[list[Cell]] = [["a guess", None, *(cell for chance in chances for cell in (round(chance, 3), None))]]
    names = list(dict.fromkeys(name for own in found.values() for name in own))
    spreads = {name: [Spread.of(own[name]) if name in own else None for own in scores.values()] for name in names}
    rates = []
    for name in names:
        reaches = [reach(own.get(name, ()), ".2f", 1.0) for own in scores.values()]
        own = [outcomes[name] for outcomes in found.values() if name in outcomes]
        rows.append([name, own[0].bytes, *chain(*zip(spreads[name], reaches, strict=True))])
        chosen = (f"{one.lr:g}" + (f" of {one.model + 1}" if one.model else "") for one in own)
        rates.append(f"{name} {', '.join(chosen)}")
    notes = [
        "replaced: 16 pairs of 8 keys and 8 values, drawn with replacement, then 4 keys, asked for their last values; "
        "far: 4 pairs of 31 keys and 32 values, then a token that means nothing, again and again, and anywhere in it "
        f"each key once, asked in the later half, trained at {TASKS['far'].lengths[0]} tokens; beyond: 16 such pairs "
        f"among 64 tokens, keys of width {KEYS} unless said; who knows a sequence's values, and not whose they are, is "
        "right in 1/4 of far, 1/16 of beyond",
        f"one layer of width {WIDTH}, one head, keys of width 16 unless said, a convolution of 2 taps, no MLP, no "
        f"output gate; AdamW, {STEPS} steps of 32 sequences; the best of {len(RATES)} rates, then of three inner rates "
        f"of titans and three sigmas, on seed {JUDGE}; {JUDGED} sequences judged",
        "mean +- standard error over seeds, and Student's interval of 95 %, cut at 0 and 1; state: all that is carried "
        "after a sequence of the first task, of attention its cache",
        f"{DEEP}memories of two layers, values of width 16; the others are a matrix",
        "rates, and which of several models: " + "; ".join(rates),
    ]
    panels = {title: {"": [own[at] for own in spreads.values()]} for at, title in enumerate(scores)}
    size = (2.6 * len(panels) + 2.0, 0.28 * len(names) + 1.4)
    data = {kind: {name: outcome._asdict() for name, outcome in own.items()} for kind, own in found.items()}
    return Result(columns, rows, notes, lambda figure: dot_plot(figure, names, panels, "accuracy", chances), size, data)
