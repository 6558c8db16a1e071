"""Files that versions 0.1 have written are read, and give the numbers that those versions gave.

The folders of `tests/golden` were written by the code of their dates: run folders, cut to their middle checkpoint, with
the losses of the whole run and the logits of the checkpoint; configs of every named rule with the outputs of a scan;
and memory states after its fourth token.
"""

from __future__ import annotations

import json
import shutil
import sys
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from hecate import states
from hecate.engine import memory_scan
from hecate.rule import MemoryConfig, MemoryState
from hecate.train import load_experiment, open_model, run_experiment

GOLDEN = Path(__file__).parent / "golden"
RUNS = sorted(path.parent for path in GOLDEN.glob("*/*/config.yaml"))
RULES = sorted(GOLDEN.glob("*/rules.json"))
# Sums in another order: a few times the rounding of float64, which Newton-Schulz steps multiply.
SAME = {"rtol": 1e-11, "atol": 1e-12}
# The same in float32, for losses of 3 and logits of 1.
NEAR = {"rtol": 2e-5, "atol": 2e-5}


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 6, 2, 4, generator=generator, dtype=torch.float64) for _ in range(3))
    return q, k / k.norm(dim=-1, keepdim=True), v


def read(fields: dict) -> MemoryConfig:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "KL.eps is left out", FutureWarning)
        return MemoryConfig.model_validate_json(json.dumps(fields))


def params_of(config: MemoryConfig) -> dict:
    generator = torch.Generator().manual_seed(1)
    return config.feature_map.init(4, heads=2, generator=generator, dtype=torch.float64)


@pytest.mark.spec("STATE-OLD-I1")
@pytest.mark.parametrize("file", RULES, ids=lambda file: file.parent.name)
def test_configs_of_rules_mean_what_they_meant(file):
    q, k, v = inputs()
    for name, golden in json.loads(file.read_text()).items():
        config = read(golden["config"])
        y, _ = memory_scan(config, q, k, v, phi_params=params_of(config), engine="sequential")
        for at, key in ((3, "y"), (5, "after")):
            torch.testing.assert_close(y[0, at].flatten(), torch.tensor(golden[key]).to(y), **SAME, msg=name)


@pytest.mark.spec("STATE-OLD-I1")
def test_states_go_on(tmp_path):
    folder, found = GOLDEN / "2026-11-21-night", {}
    for path, value in load_file(folder / "states.safetensors").items():
        rule, field, *name = path.split("/")
        fields = found.setdefault(rule, {"memory": {}, "slots": {}, "anchor": {}, "pending": {}})
        if name:
            fields[field][name[0]] = value
        else:
            fields[field] = value
    golden = json.loads((folder / "rules.json").read_text())
    assert sorted(found) == ["gated_delta", "longhorn", "titans_linear", "ttt_linear"]
    for rule, fields in found.items():
        config, rest = read(golden[rule]["config"]), [item[:, 4:] for item in inputs()]
        state = MemoryState(**fields)
        state.save(tmp_path / rule)
        for start in (state, MemoryState.load(tmp_path / rule)):
            y, _ = memory_scan(config, *rest, state=start, phi_params=params_of(config), engine="sequential")
            torch.testing.assert_close(y[0, -1].flatten(), torch.tensor(golden[rule]["after"]).to(y), **SAME)


@pytest.mark.spec("STATE-OLD-I1")
def test_state_files_are_read():
    """A file of `states.save`, by the first code that had one."""
    state = states.load(GOLDEN / "2026-11-23" / "state.safetensors")
    golden = json.loads((GOLDEN / "2026-11-23" / "state.json").read_text())
    y, _ = memory_scan(read(golden["config"]), *[item[:, 4:] for item in inputs()], state=state, engine="sequential")
    torch.testing.assert_close(y[0, -1].flatten(), torch.tensor(golden["after"]).to(y), **SAME)


@pytest.mark.spec("CKPT-OLD-I1")
@pytest.mark.parametrize("golden", RUNS, ids=lambda path: f"{path.parent.name}-{path.name}")
def test_runs_are_opened_and_resumed(golden, tmp_path, monkeypatch):
    """The model, its answers, the optimiser's state, the cursor of the data: one of them lost would show in a loss."""
    torch.set_default_dtype(torch.float32)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)  # drawing takes a second
    folder = tmp_path / "run"
    shutil.copytree(golden, folder)
    known = json.loads((folder / "golden.json").read_text())
    trained = open_model(folder)
    with torch.no_grad():
        logits = trained.model(torch.arange(12)[None])[0][0, -1]
    assert trained.step == 3
    torch.testing.assert_close(logits, torch.tensor(known["logits"]), **NEAR)

    result = run_experiment(load_experiment(str(folder / "config.yaml")), folder, resume=True)
    assert (result.status, result.step) == ("finished", 6)
    told = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for event, key, wanted in (("train", "loss", "losses"), ("eval", "validation_loss", "validation")):
        values = {str(one["step"]): one[key] for one in told if one["event"] == event}
        assert values == pytest.approx(known[wanted], rel=NEAR["rtol"])
