"""learning: does every named rule recall, from its default start?

What a user writes who only names a rule: `memory: RULE` in one block, everything else of the memory and of its layer at
its default, trained for a few hundred steps on associative recall (MQAR) at one outer learning rate. Chunks alone are
cut to 8 tokens, as in the presets `mqar-RULE`.

The bound. A row has N = 4 pairs of a key and a value, each asked for once. Who keeps m of the pairs answers m queries,
and the others by one of the N - m values that are left: (m + 1)/N of all answers are right. Without a memory that is at
most 1/4, for values seen in passing; a convolution that sees one pair besides the query reaches 1/2 at best. `LEAST`
lies above that by 4.5 standard deviations of 512 rows, were the four answers of a row a single draw.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from hecate.microscope.style import COLOURS, finish
from hecate.rule import RULES
from hecate.train import ExperimentConfig, load_experiment
from hecate.train.compose import RECALL_CHUNK
from studies.rules import Record, results, train
from studies.study import Cell, Progress, Result, Spread, Study

STEPS = 300
PAIRS = 4
LEAST = 0.6
YAML = """
seed: {seed}
data: {{kind: mqar, num_pairs: {pairs}, seq_len: 16, vocab_size: 24}}
model: {{d_model: 32, layers: 1, heads: 2, mlp_ratio: 0, {conv}memory: {memory}}}
optim: {{lr: 1.0e-2, weight_decay: 0, warmup: 20}}
budget: {{steps: {steps}, batch_size: 32, eval_batches: 16}}
"""
UNWRITTEN = "without a memory"
_UNWRITTEN = "{algorithm: {kind: gd, lr: 1.0e-30}}"  # what it writes is lost in rounding
HEAD = ("rule", "engine", "accuracy", "learns", "seconds")


class Start(NamedTuple):
    """One rule, or `UNWRITTEN`, from its default start for some steps."""

    rule: str
    seed: int
    steps: int

    def text(self) -> str:
        """The experiment as a user writes it; a convolution for rules whose layer has none, where a key would never
        meet the value that follows it."""
        memory, conv = _UNWRITTEN, ""
        if self.rule != UNWRITTEN:
            rule = RULES[self.rule]
            chunked = f"{{kind: {self.rule}, chunk: {RECALL_CHUNK}}}"
            memory = chunked if rule.config.chunk > RECALL_CHUNK else self.rule
            conv = "conv_kernel: 4, " if rule.config.layer_conv_kernel == 0 else ""
        return YAML.format(seed=self.seed, pairs=PAIRS, memory=memory, conv=conv, steps=self.steps)

    def experiment(self) -> ExperimentConfig:
        """The experiment, read from a file."""
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "recall.yaml"
            file.write_text(self.text())
            return load_experiment(file)


class Learning(Study):
    """Which rules learn to recall when only their name is given?"""

    name: ClassVar[str] = "learning"
    about: ClassVar[str] = "Does every named rule learn to recall from its default start?"
    count: ClassVar[int] = 2
    timed: ClassVar[bool] = True
    workers: ClassVar[int] = 2  # processes of one thread
    path: ClassVar[Path] = Path("runs/learning.jsonl")  # what it already holds is not run again

    def run(self, quick: bool, seeds: Sequence[int], progress: Progress) -> Result:
        """Every rule in the registry; a quick run takes two for a few steps."""
        rules = [UNWRITTEN, *(["delta", "hebbian"] if quick else RULES)]
        jobs = [Start(rule, seed, 10 if quick else STEPS) for rule in rules for seed in seeds]
        if quick:
            records = [train(job) for job in progress(jobs, "rules")]
        else:
            found = results(jobs, self.path, self.workers)
            records = [next(found) for _ in progress(jobs, "rules")]
        return report(rules, records)


def report(rules: Sequence[str], records: Sequence[Record]) -> Result:
    """A row per rule."""
    rows: list[tuple[Cell, ...]] = []
    for rule in rules:
        own = [record for record in records if record["rule"] == rule]
        values = [record["value"] for record in own if "value" in record]
        accuracy = Spread.of(values) if values else "failed"
        learns = len(values) == len(own) and min(values) > LEAST
        engine = next((record["engine"] for record in own if "engine" in record), None)
        seconds = sum(record["seconds"] for record in own) / len(own)
        rows.append((rule, engine, accuracy, "yes" if learns else "no", round(seconds)))
    notes = [
        f"accuracy: share of answers; keeping m of the {PAIRS} pairs and guessing among the other values gives (m + 1)/"
        f"{PAIRS}; learns: more than {LEAST:g} at every seed",
        f"seconds: of one core, for one training of {records[0]['steps']} steps",
        f"{UNWRITTEN}: the delta rule with a step too small to write anything",
        "; ".join(YAML.replace("{{", "{").replace("}}", "}").split("\n")[2:-1]),
        *(f"{r['rule']}, seed {r['seed']}: {r['failed']}" for r in records if "failed" in r),
    ]
    return Result(HEAD, rows, notes, partial(draw, rows=rows), size=(9.0, 4.0))


def draw(figure: Any, rows: Sequence[Sequence[Cell]]) -> None:
    """A bar per rule, and the bound."""
    axes = figure.subplots()
    values = [row[2].mean if isinstance(row[2], Spread) else 0.0 for row in rows]
    axes.bar(range(len(rows)), values, color=COLOURS[0])
    axes.axhline(LEAST, color="0.5", linestyle="--", linewidth=1)
    finish(axes, "", "", "accuracy", legend=False)
    axes.set_xticks(range(len(rows)), [str(row[0]) for row in rows], rotation=90, fontsize=8)
