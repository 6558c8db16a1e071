"""words: what memories do at lengths beyond those of training: parity, and the words of S_3 and S_5."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

from hecate.gym.training import BATCH
from studies.layers import JUDGE, JUDGED, settled
from studies.pictures import dot_plot
from studies.study import Progress, Result, Spread, Study

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

    def model(own: dict[str, Any]) -> dict[str, Any]:
        return {"d_model": WIDTH, "heads": HEADS, "mlp_ratio": 2.0, **own}

    def rule(kind: str, most: float | None = None, writes: int | None = None) -> dict[str, Any]:
        own: dict[str, Any] = {} if most is None else {"algorithm": {"kind": "gd", "lr": most}}
        own |= {} if writes is None else {"writes": writes}
        return model({"memory": {"kind": kind, **own}, "conv_kernel": 0})  # keys of a token alone

    single, every = ("parity", "S_5, swaps"), tuple(TASKS)
    return [
        Contender("linear_attention", rule("linear_attention"), ()),
        Contender("mamba2", rule("mamba2"), ()),
        Contender("delta, lr to 1", rule("delta", 1.0), ()),
        Contender("delta, lr to 2", rule("delta", 2.0), single),
        Contender("gated_delta, lr to 2", rule("gated_delta", 2.0), single),
        Contender("delta_product, 2 writes, lr to 1", rule("delta_product", 1.0)),
        Contender("delta_product, 2 writes, lr to 2", rule("delta_product", 2.0), every[:-1]),
        Contender("delta_product, 4 writes, lr to 2", rule("delta_product", 2.0, 4), every),
        Contender("rwkv7", rule("rwkv7")),
        Contender("mamba3", rule("mamba3")),
        Contender("titans_linear", rule("titans_linear")),
        Contender("attention", model({"attention": {"kind": "attention"}}), ()),
    ]


class Words(Study):
    """One layer on words of groups."""

    name: ClassVar[str] = "words"
    about: ClassVar[str] = "Which memories keep count, and beyond the lengths of training?"
    count: ClassVar[int] = 3

    def run(self, quick: bool, seeds: Sequence[int], progress: Progress) -> Result:
        """Trains every contender on every task, at the rate that is best on a seed of its own."""
        steps, rates, lengths = (60, RATES[1:], LENGTHS[:2]) if quick else (STEPS, RATES, LENGTHS)
        chosen = [contender for contender in contenders() if not quick or contender.name in QUICK]
        kept, rows = self.kept(quick), []
        for task in list(TASKS)[: 1 if quick else None]:
            own, tasks = steps * MORE_STEPS.get(task, 1), [at(task, length) for length in lengths]
            for contender in progress(chosen, f"{task}, {own} steps each"):
                found = settled([contender.model], tasks, own, rates, seeds, 0.5, kept=kept)
                able = None if contender.able is None else "yes" if task in contender.able else "no"
                scores = map(Spread.of, found.scores)
                rows.append([task, contender.name, found.bytes, own, found.lr, able, *scores])
        return report(rows, lengths)


def report(rows: Sequence[Sequence[Any]], lengths: Sequence[int]) -> Result:
    """The table and the figure, a panel a task."""
    names, tasks = (list(dict.fromkeys(row[at] for row in rows)) for at in (1, 0))
    columns = ["task", "memory", "state (bytes)", "steps", "outer lr", "able in theory"]
    columns += [f"accuracy at {length}" for length in lengths]

    def draw(figure: Any) -> None:
        panels = {}
        for task in tasks:
            scores = zip(*(row[6:] for row in rows if row[0] == task), strict=True)
            panels[task] = {f"{length} tokens": own for length, own in zip(lengths, scores, strict=True)}
        dot_plot(figure, names, panels, "accuracy")

    notes = [
        f"one layer of width {WIDTH}, {HEADS} heads, no convolution, an MLP; {rows[0][3]} steps of AdamW, on S_5's "
        f"generators three times as many, on words of {lengths[0]}, batch {BATCH}; accuracy on the later half of "
        f"{JUDGED} words; mean +- standard error over seeds; the better of {len(RATES)} rates on seed {JUDGE}",
        "a guess is right in .5 of parity, .17 of S_3, and .008 of S_5, .017 once its sign is known; generators: a "
        "swap, the cycle of all five letters and its inverse",
        "able: one layer can follow every length in real numbers: a reflection, lr 2, flips a sign or swaps two "
        "letters, the product of two moves three, and of four all five (Grazzi et al., 2411.12537; Siems et al., "
        "2502.10297); a state that moves along a positive diagonal cannot (Merrill et al., 2404.08819)",
        "attention: the state is its cache",
    ]
    return Result(columns, rows, notes, draw, (2.0 + 3.0 * len(tasks), 4.8))


def at(task: str, length: int) -> dict[str, Any]:
    """A task on words of this length."""
    return {**TASKS[task], "seq_len": length}
