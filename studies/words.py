"""words: what memories do at lengths beyond those of training: parity, and the words of S_3 and S_5."""

from __future__ import annotations

from typing import Any, NamedTuple

from hecate.gym.training import BATCH
from studies.layers import JUDGE, JUDGED, settled
from studies.pictures import dot_plot
from studies.study import Result, Run, Spread, Study, progress

WIDTH, HEADS, STEPS = 32, 4, 800
RATES = (3e-3, 1e-2)  # to choose from
LENGTHS = (24, 48, 96)  # of training, and beyond
QUICK = ("delta, lr to 1", "delta, lr to 2")
TASKS: dict[str, dict[str, Any]] = {
    "parity": {"kind": "parity"},
    "S_3": {"kind": "permutations", "degree": 3},
    "S_5, swaps": {"kind": "permutations", "degree": 5, "elements": "swaps"},
    "S_5, generators": {"kind": "permutations", "degree": 5, "elements": "generators"},
}
MORE_STEPS = {"S_5, generators": 3}  # times the steps


class Contender(NamedTuple):
    """A memory, and on which tasks theory lets one layer of it follow any length; None where it says nothing."""

    name: str
    model: dict[str, Any]
    able: tuple[str, ...] | None = None


def contenders() -> list[Contender]:
    """From those whose state moves along a diagonal to those that write several times."""

    around = {"d_model": WIDTH, "heads": HEADS, "mlp_ratio": 2.0}

    def rule(kind: str, most: float | None = None, **own: int) -> dict[str, Any]:
        algorithm = {} if most is None else {"algorithm": {"kind": "gd", "lr": most}}
        return {**around, "memory": {"kind": kind, **algorithm, **own}, "conv_kernel": 0}  # keys of a token alone

    single, every = ("parity", "S_5, swaps"), tuple(TASKS)
    return [
        Contender("linear_attention", rule("linear_attention"), ()),
        Contender("mamba2", rule("mamba2"), ()),
        Contender("delta, lr to 1", rule("delta", 1.0), ()),
        Contender("delta, lr to 2", rule("delta", 2.0), single),
        Contender("gated_delta, lr to 2", rule("gated_delta", 2.0), single),
        Contender("delta_product, 2 writes, lr to 1", rule("delta_product", 1.0)),
        Contender("delta_product, 2 writes, lr to 2", rule("delta_product", 2.0), every[:-1]),
        Contender("delta_product, 4 writes, lr to 2", rule("delta_product", 2.0, writes=4), every),
        Contender("rwkv7", rule("rwkv7")),
        Contender("mamba3", rule("mamba3")),
        Contender("titans_linear", rule("titans_linear")),
        Contender("attention", {**around, "attention": {"kind": "attention"}}, ()),
    ]


def words(run: Run) -> Result:
    """Trains every contender on every task, at the rate that is best on a seed of its own."""
    steps, rates, lengths = (60, RATES[1:], LENGTHS[:2]) if run.quick else (STEPS, RATES, LENGTHS)
    chosen = [contender for contender in contenders() if not run.quick or contender.name in QUICK]
    kept, rows = run.kept(), []
    names, panels = [contender.name for contender in chosen], {}
    for task in list(TASKS)[: 1 if run.quick else None]:
        own, tasks = steps * MORE_STEPS.get(task, 1), [at(task, length) for length in lengths]
        scores = []
        for contender in progress(chosen, f"{task}, {own} steps each"):
            found = settled([contender.model], tasks, own, rates, run.seeds, 0.5, kept=kept)
            able = None if contender.able is None else "yes" if task in contender.able else "no"
            scores.append([Spread.of(values) for values in found.scores])
            rows.append([task, contender.name, found.bytes, own, found.lr, able, *scores[-1]])
        panels[task] = {
            f"{length} tokens": each for length, each in zip(lengths, zip(*scores, strict=True), strict=True)
        }
    columns = ["task", "memory", "state (bytes)", "steps", "outer lr", "able in theory"]
    columns += [f"accuracy at {length}" for length in lengths]
    notes = [
        f"one layer of width {WIDTH}, {HEADS} heads, no convolution, an MLP; {steps} steps of AdamW, on S_5's "
        f"generators three times as many, on words of {lengths[0]}, batch {BATCH}; accuracy on the later half of "
        f"{JUDGED} words; mean +- standard error over seeds; the better of {len(RATES)} rates on seed {JUDGE}",
        "a guess is right in .5 of parity, .17 of S_3, and .008 of S_5, .017 once its sign is known; generators: a "
        "swap, the cycle of all five letters and its inverse",
        "able: one layer can follow every length in real numbers: a reflection, lr 2, flips a sign or swaps two "
        "letters, the product of two moves three, and of four all five (Grazzi et al., 2411.12537; Siems et al., "
        "2502.10297); a state that moves along a positive diagonal cannot (Merrill et al., 2404.08819)",
        "attention: the state is its cache",
    ]
    size = (2.0 + 3.0 * len(panels), 4.8)
    return Result(columns, rows, notes, lambda figure: dot_plot(figure, names, panels, "accuracy"), size)


WORDS = Study("words", "Which memories keep count, and beyond the lengths of training?", words, seeds=3)


def at(task: str, length: int) -> dict[str, Any]:
    """A task on words of this length."""
    return {**TASKS[task], "seq_len": length}
