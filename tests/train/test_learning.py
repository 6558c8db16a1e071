"""Every named rule runs from YAML, and learns to recall from its default start."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator

import pytest
import torch

from hecate.rule import RULES
from hecate.train import Trainer, load_experiment
from hecate.train.compose import RECALL_CHUNK
from hecate.train.loggers import read_metrics


@pytest.fixture(autouse=True)
def as_on_the_command_line() -> Iterator[None]:
    """float32; a job flushes subnormal numbers in its process."""
    torch.set_default_dtype(torch.float32)
    yield
    torch.set_flush_denormal(False)


NAMED = """
model: {{d_model: 8, layers: 1, heads: 2, memory: {rule}}}
data: {{kind: mqar, vocab_size: 16, num_pairs: 2, seq_len: 8}}
budget: {{steps: 2, batch_size: 2, eval_batches: 1}}
"""


FEW = ("delta", "titans", "mamba3", "gsa", "in_place_ttt")  # tests/nn takes a step with a layer by every rule


@pytest.mark.spec("TRAIN-NAMED-I1")
@pytest.mark.parametrize("rule", [pytest.param(n, marks=() if n in FEW else pytest.mark.slow) for n in RULES])
def test_the_name_of_a_rule_in_a_file_is_enough_to_train(rule, hecate, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)  # drawing takes a second
    file, run = tmp_path / "named.yaml", tmp_path / "run"
    file.write_text(NAMED.format(rule=rule))
    assert hecate("train", file, "--quiet", "--out", run)[0] == 0
    assert load_experiment(run / "config.yaml").model.memory == RULES[rule].config
    losses = [record["loss"] for record in read_metrics(run / "metrics.jsonl") if record["event"] == "train"]
    assert len(losses) == 2 and all(0 < loss < 2 * math.log(16) for loss in losses)


PAIRS, LEAST = 4, 0.6
RECALL = """
data: {{kind: mqar, num_pairs: {pairs}, seq_len: 16, vocab_size: 24}}
model: {{d_model: 32, layers: 1, heads: 2, mlp_ratio: 0, {conv}memory: {memory}}}
optim: {{lr: 1.0e-2, weight_decay: 0, warmup: 20}}
budget: {{steps: 300, batch_size: 32, eval_batches: 16}}
"""
UNWRITTEN = "{algorithm: {kind: gd, lr: 1.0e-30}}"  # what it writes is lost in rounding


def recalled(memory: str, tmp_path, conv: str = "") -> float:
    """Accuracy of one block on associative recall after training, all else at its default."""
    file = tmp_path / "recall.yaml"
    file.write_text(RECALL.format(pairs=PAIRS, memory=memory, conv=conv))
    config = load_experiment(file)
    torch.set_flush_denormal(True)
    torch.manual_seed(config.seed)
    trainer = Trainer(config)
    for _ in range(config.budget.steps):
        trainer.train_step()
    return trainer.evaluate().accuracy


@pytest.mark.slow
@pytest.mark.spec("TRAIN-NAMED-I2")
@pytest.mark.parametrize("rule", RULES)
def test_every_rule_learns_to_recall(rule, tmp_path):
    """A row has N = 4 pairs of a key and a value, each asked for once. Who keeps m of the pairs answers m queries, and
    the others by one of the N - m values that are left: (m + 1)/N of all answers are right. Without a memory that is at
    most 1/4, for values seen in passing; a convolution that sees one pair besides the query reaches 1/2 at best.
    `LEAST` lies above that by 4.5 standard deviations of 512 rows, were the four answers of a row a single draw."""
    config = RULES[rule].config
    memory = f"{{kind: {rule}, chunk: {RECALL_CHUNK}}}" if config.chunk > RECALL_CHUNK else rule
    # Where the layer has no convolution a key would never meet the value that follows it.
    assert recalled(memory, tmp_path, "conv_kernel: 4, " if config.layer_conv_kernel == 0 else "") > LEAST


@pytest.mark.slow
@pytest.mark.spec("TRAIN-NAMED-I2")
def test_the_bound_takes_a_memory(tmp_path):
    """The same model, whose memory nothing is written to, cannot even tell the values of the row, 1 of `PAIRS`."""
    assert recalled(UNWRITTEN, tmp_path) < 1 / PAIRS
