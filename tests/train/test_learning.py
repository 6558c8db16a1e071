"""Every named rule learns to recall from its default start."""

from __future__ import annotations

import pytest

from hecate.rule import RULES
from hecate.train import Trainer, load_experiment

STEPS = 150
SMALL = (
    "data.num_pairs=2",
    "data.seq_len=8",
    "data.vocab_size=12",
    "model.d_model=16",
    "model.heads=1",
    "optim.lr=1e-2",
    "optim.warmup=10",
    f"budget.steps={STEPS}",
    "budget.batch_size=32",
    "budget.eval_batches=8",
)


def small(rule: str) -> Trainer:
    own, config = list(SMALL), RULES[rule].config
    if hasattr(config.structure, "expansion"):
        own.append("model.memory.structure.expansion=1")
    if config.chunk > 2:
        own.append("model.memory.chunk=2")
    return Trainer(load_experiment(f"mqar-{rule}", own))


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
def test_every_rule_learns_to_recall(rule):
    """Chance is 1/6, or 1/2 for who knows the row's two values: 0.6 of 512 answers is 4.5 standard
    deviations above it."""
    trainer = small(rule)
    before = trainer.evaluate().value(trainer.source.metric)
    for _ in range(STEPS):
        trainer.train_step()
    after = trainer.evaluate().value(trainer.source.metric)
    assert after > 0.6 > before, f"{rule}: {before:.2f}, then {after:.2f}"
