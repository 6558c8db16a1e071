"""Every example runs from the installed package alone, in an empty folder, and says what it is to show."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest
import torch

from tests.registries import restore_registries

ROOT = Path(__file__).parent.parent
EXAMPLES = {path.stem: path for path in (ROOT / "notebooks" / "examples").glob("*.py")}
FEW = {
    "train_on_your_text": (["text.txt", "--steps", "2"], "held out: "),
    "fast_weight_recall": (["--steps", "2", "--pairs", "4", "--phi", "elu"], "recalled"),
    "phi_momentum": (["--steps", "2"], "phi-momentum, tanh"),
    "adopt_and_lora": (["--steps", "1", "--length", "16"], "released: Qwen3NextForCausalLM"),
    "memory_per_user": ([], "turn 4  ada: as after reading 51 tokens"),
    "write_a_rule": (["--length", "32"], "a layer of it: [2, 32, 64]"),
}


def test_every_example_is_run():
    assert EXAMPLES.keys() == FEW.keys()


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")  # between peft and transformers
@pytest.mark.parametrize("name", FEW)
def test_an_example_runs(name, tmp_path, monkeypatch, capsys):
    options, said = FEW[name]
    if name == "adopt_and_lora":
        pytest.importorskip("peft")
        pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("a line of text that is read again and again\n" * 200)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path and not (Path(path) / "studies").is_dir()])
    monkeypatch.setattr(sys, "argv", [name, *options])
    restore_registries(monkeypatch)
    torch.set_default_dtype(torch.float32)  # as a reader has it
    runpy.run_path(str(EXAMPLES[name]), run_name="__main__")
    assert said in capsys.readouterr().out
