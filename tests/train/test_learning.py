"""Every named rule runs from YAML, and learns to recall from its default start."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator

import pytest
import torch

from hecate.cli import main
from hecate.rule import RULES
from hecate.train import load_experiment
from hecate.train.loggers import read_metrics
from studies.learning import LEAST, PAIRS, STEPS, UNWRITTEN, Start
from studies.rules import train


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


@pytest.mark.spec("TRAIN-NAMED-I1")
@pytest.mark.parametrize("rule", RULES)
def test_the_name_of_a_rule_in_a_file_is_enough_to_train(rule, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)  # drawing takes a second
    file, run = tmp_path / "named.yaml", tmp_path / "run"
    file.write_text(NAMED.format(rule=rule))
    with pytest.raises(SystemExit) as caught:
        main(["train", str(file), "--quiet", "--out", str(run)])
    assert not caught.value.code
    assert load_experiment(run / "config.yaml").model.memory == RULES[rule].config
    losses = [record["loss"] for record in read_metrics(run / "metrics.jsonl") if record["event"] == "train"]
    assert len(losses) == 2 and all(0 < loss < 2 * math.log(16) for loss in losses)


@pytest.mark.slow
@pytest.mark.spec("TRAIN-NAMED-I2")
@pytest.mark.parametrize("rule", RULES)
def test_every_rule_learns_to_recall(rule):
    """One pair kept and guesses among the other values are right in 1/2 of all answers; see `studies.learning`."""
    record = train(Start(rule, 0, STEPS))
    assert record.get("value", 0.0) > LEAST, record


@pytest.mark.slow
@pytest.mark.spec("TRAIN-NAMED-I2")
def test_the_bound_takes_a_memory():
    """The same model, whose memory nothing is written to, cannot even tell the values of the row, 1 of `PAIRS`."""
    assert train(Start(UNWRITTEN, 0, STEPS))["value"] < 1 / PAIRS
