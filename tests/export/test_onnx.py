"""Files of ONNX in ONNX Runtime against torch, at sizes at which nothing was traced."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hecate import states
from hecate.errors import CheckpointError, ConfigError
from hecate.models import LanguageModel
from hecate.nn import Memory
from hecate.rule import MemoryConfig

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

from hecate import onnx as exporting  # noqa: E402
from hecate.onnx import SEQUENCE, STEP, export_folder, export_onnx, update_rule  # noqa: E402

OPERATORS = {
    "hebbian": "linear", "retnet": "gated", "gla": "gated", "mamba2": "gated", "hgrn2": "gated", "delta": "delta",
    "longhorn": "delta", "efla": "delta", "gated_delta": "gated_delta", "kda": "gated_delta",
}  # fmt: skip
LOOPS = ("linear_attention", "delta_product", "rwkv7", "oja", "dgd", "mesa", "gsa", "titans_linear", "titans",
         "ttt_linear", "delta_momentum")  # fmt: skip
LOOP = {"bias": "dot", "retention": "decay", "read": "before"}
BOUND = 1e-5


class Two(nn.Module):
    """A memory that is ONNX's own operator beside one that is a loop."""

    d_model = 8

    def __init__(self) -> None:
        super().__init__()
        bare: dict[str, Any] = {"conv_kernel": 0, "qk_norm": "none", "output_gate": False, "dtype": torch.float32}
        bare["generator"] = torch.Generator().manual_seed(0)
        self.first, self.second = Memory(8, 2, "gla", **bare), Memory(8, 2, LOOP, **bare)

    def forward(self, x: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        first, second = (None, None) if state is None else state
        y, first = self.first(x, first)
        z, second = self.second(x, second)
        return y + z, (first, second)


def opened(folder: Path, name: str) -> Any:
    return onnxruntime.InferenceSession(folder / name, providers=["CPUExecutionProvider"])


def operators(folder: Path, name: str) -> list[str]:
    return [node.op_type for node in onnx.load(folder / name).graph.node]


@torch.no_grad()
def check(folder: Path, model: nn.Module, draw: Any) -> None:
    """Sequences from the start, and token by token from the state after a few."""
    whole, step = opened(folder, SEQUENCE), opened(folder, STEP)
    for batch, length in ((1, 2), (4, 29)):
        x = draw(batch, length)
        y, state = model(x)
        wanted = [y, *states.leaves(state).values()]
        for got, want in zip(whole.run(None, {"input": x.numpy()}), wanted, strict=True):
            assert not want.numel() or (torch.from_numpy(got) - want).abs().max() <= BOUND * want.abs().max()
        names = [item.name.replace("present.", "past.") for item in step.get_outputs()]
        found = dict(zip(names, whole.run(None, {"input": x[:, :1].numpy()}), strict=True))
        for t in range(1, length):
            found["input"] = x[:, t : t + 1].numpy()
            fed = {item.name: found[item.name] for item in step.get_inputs()}
            found = dict(zip(names, step.run(None, fed), strict=True))
        for got, want in zip(found.values(), [y[:, -1:], *wanted[1:]], strict=True):
            assert not want.numel() or (torch.from_numpy(got) - want).abs().max() <= BOUND * want.abs().max()


def floats(batch: int, length: int) -> Tensor:
    return torch.randn(batch, length, 8, generator=torch.Generator().manual_seed(length), dtype=torch.float32)


@pytest.mark.spec("ONNX-FILE-D1", "ENG-EXPORT-D2")
def test_a_file_is_its_model_by_an_operator_and_by_a_loop(tmp_path):
    model, folder = Two(), tmp_path / "two"
    found = export_onnx(model, folder)
    assert found.error < BOUND and sorted(path.name for path in folder.iterdir()) == [SEQUENCE, STEP]
    once, each = operators(folder, SEQUENCE), operators(folder, STEP)
    assert once.count("LinearAttention") == each.count("LinearAttention") == once.count("Scan") == 1
    assert "Scan" not in each and found.step_nodes == len(each) < 2 * 100
    assert [entry.version for entry in onnx.load(folder / STEP).opset_import] == [27]
    check(folder, model, floats)
    with pytest.raises(CheckpointError, match="exists already"):
        export_onnx(model, folder)


@pytest.mark.slow
@pytest.mark.parametrize("rule", [*OPERATORS, *LOOPS])
@pytest.mark.spec("ONNX-FILE-D1", "ENG-EXPORT-D2")
def test_rules(rule, tmp_path):
    model = Memory(8, 2, rule, generator=torch.Generator().manual_seed(0), dtype=torch.float32)
    export_onnx(model, tmp_path / rule)
    assert ("LinearAttention" in operators(tmp_path / rule, SEQUENCE)) == (rule in OPERATORS)
    check(tmp_path / rule, model, floats)


@pytest.mark.spec("ONNX-FILE-D1")
def test_rules_that_are_onnxs_own_operator():
    rules = {name: MemoryConfig.model_validate(name) for name in (*OPERATORS, *LOOPS)}
    assert {name: kind for name, rule in rules.items() if (kind := update_rule(rule))} == OPERATORS
    for fields in ({"chunk": 2}, {"read": "before"}, {"normalizer": "sum", "bias": "dot", "feature_map": "elu"},
                   {"retention": "decay"}, {"bias": "huber"}, {"algorithm": "momentum"}):  # fmt: skip
        assert update_rule(MemoryConfig.model_validate(fields)) is None, fields


@pytest.mark.parametrize(("model", "name"), [
    (lambda: Memory(8, 2, "mlstm"), "gating 'mlstm' steps through a sequence by itself"),
    (lambda: LanguageModel({"vocab_size": 9, "d_model": 8, "heads": 2, "attention": {"kind": "attention"}}),
     "attention of .* steps through a sequence by itself"),
])  # fmt: skip
@pytest.mark.spec("ONNX-FILE-D1")
def test_what_does_not_convert_is_refused_by_name(model, name, tmp_path):
    with pytest.raises(ConfigError, match=name):
        export_onnx(model(), tmp_path / "out")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize(("rule", "why"), [
    ("gated_mesa", "readout=ridge does not convert to ONNX"), ("omeganet", "polynomial.*does not convert to ONNX"),
    ("memora", "kl.*gives other numbers than torch"),
])  # fmt: skip
@pytest.mark.spec("ONNX-FILE-D1")
def test_rules_that_are_refused(rule, why, tmp_path):
    with pytest.raises(ConfigError, match=why):
        export_onnx(Memory(8, 2, rule, generator=torch.Generator().manual_seed(0)), tmp_path / "out")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.spec("ONNX-FILE-D1")
def test_other_numbers_are_refused(tmp_path, monkeypatch):
    plain = exporting._operator
    monkeypatch.setattr(exporting, "_operator", lambda *given: [plain(*given)[0] + 0.1, *plain(*given)[1:]])
    with pytest.raises(ConfigError, match="ONNX Runtime gives other numbers than torch"):
        export_onnx(Memory(8, 2, "gla"), tmp_path / "out")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.spec("ONNX-FILE-D1")
def test_a_folder_of_transformers(tmp_path):
    pytest.importorskip("transformers")
    from hecate.hf import HecateConfig, HecateForCausalLM, byte_tokenizer

    fields = {"vocab_size": 256, "d_model": 8, "heads": 2, "layers": 2, "memory": "gated_delta"}
    model = HecateForCausalLM(HecateConfig(model=fields)).eval().float()
    model.save_pretrained(tmp_path / "hf")
    byte_tokenizer().save_pretrained(tmp_path / "hf")
    export_folder(tmp_path / "hf", tmp_path / "out")
    assert {"tokenizer.json", "config.json", STEP} <= {path.name for path in (tmp_path / "out").iterdir()}
    draws = torch.Generator().manual_seed(0)
    check(
        tmp_path / "out", model.model.lm, lambda batch, length: torch.randint(0, 256, (batch, length), generator=draws)
    )
    with pytest.raises(ConfigError, match="is no model of hecate"):
        (tmp_path / "none").mkdir()
        (tmp_path / "none" / "config.json").write_text("{}")
        export_folder(tmp_path / "none", tmp_path / "other")


def test_what_is_no_number_is_no_small_difference():
    class Session:
        def __init__(self, *outputs: Any) -> None:
            self.outputs = outputs

        def run(self, *_: Any) -> tuple[Any, ...]:
            return self.outputs

        def get_outputs(self) -> list[Any]:
            return [SimpleNamespace(name=f"present.{place}") for place in range(2)]

        def get_inputs(self) -> list[Any]:
            return []

    class Own(nn.Module):
        model = Memory(4, 2, "gla")

        def forward(self, x: Tensor, past: Any = ()) -> tuple[Tensor, ...]:
            return torch.ones(2), torch.ones(3)

    ones, broken = torch.ones(3).numpy(), torch.full((3,), torch.nan).numpy()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exporting, "_session", lambda made: made)
        differences = [
            exporting._difference(Own(), Session(ones[:2], whole), Session(ones[:2], step), 1, 1)
            for whole, step in ((ones, ones), (broken, ones), (ones, broken))
        ]
    assert differences[0] == 0 and not any(found <= exporting.TOLERANCE for found in differences[1:])
