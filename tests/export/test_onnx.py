"""Files of ONNX in ONNX Runtime against torch, at sizes at which nothing was traced."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

from hecate import bias, states
from hecate.cms import CMS
from hecate.engine.features import L2_NORM
from hecate.errors import CheckpointError, ConfigError
from hecate.models import LanguageModel, LinearTransformer
from hecate.nn import Memory, PerformerAttention
from hecate.nn.blocks import units
from hecate.rule import MemoryConfig
from hecate.tape import execute
from tests.registries import restore_registries

onnx = pytest.importorskip("onnx")
onnx_ir = pytest.importorskip("onnx_ir")
onnxruntime = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

from hecate import onnx as exporting  # noqa: E402
from hecate.onnx import SEQUENCE, STEP, export_folder, export_onnx, shorter, update_rule  # noqa: E402

OPERATORS = {
    "hebbian": "linear", "retnet": "gated", "gla": "gated", "mamba2": "gated", "hgrn2": "gated", "delta": "delta",
    "longhorn": "delta", "efla": "delta", "gated_delta": "gated_delta", "kda": "gated_delta",
}  # fmt: skip
LOOPS = ("linear_attention", "delta_product", "rwkv7", "oja", "dgd", "mesa", "gsa", "titans_linear", "titans",
         "ttt_linear", "delta_momentum", "omeganet")  # fmt: skip
NODES = {"hebbian": 36, "retnet": 41, "mamba2": 43, "delta": 46, "gla": 49, "hgrn2": 49, "gated_delta": 50, "kda": 55,
         "longhorn": 60, "titans_linear": 72}  # fmt: skip
"""Of a block of a language model and one token: norms, convolution, memory, gated MLP."""
NODES_OF_TWO = 65
LOOP = {"bias": "dot", "retention": "decay", "read": "before"}
BOUND = 1e-5


class Two(nn.Module):
    """A memory that is ONNX's own operator beside one that is a loop."""

    d_model = 8

    def __init__(self) -> None:
        super().__init__()
        bare: dict[str, Any] = {"qk_norm": "none", "output_gate": False, "dtype": torch.float32}
        bare["generator"] = torch.Generator().manual_seed(0)
        self.first = Memory(8, 2, "gla", conv_kernel=2, **bare)
        self.second = Memory(8, 2, LOOP, conv_kernel=0, **bare)

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
        last = y[:, -1:] if y.dim() == 3 else y  # some models answer their last token alone
        for got, want in zip(found.values(), [last, *wanted[1:]], strict=True):
            assert not want.numel() or (torch.from_numpy(got) - want).abs().max() <= BOUND * want.abs().max()


def drawn(model: Any) -> Any:
    """A model whose parameters all differ, so that none is another's."""
    draws = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        parameter.data.add_(torch.randn(parameter.shape, generator=draws) / 10)
    return model


def floats(batch: int, length: int) -> Tensor:
    return torch.randn(batch, length, 8, generator=torch.Generator().manual_seed(length), dtype=torch.float32)


def converted_once(convert: Any) -> Any:
    """`_to_onnx`, which takes seconds: a sequence of the same weights is not converted twice."""
    made: dict[Any, Any] = {}

    def to_onnx(sequence: nn.Module, *given: Any, **how: Any) -> Any:
        key = (*how.values(), *(weight.numpy().tobytes() for weight in sequence.state_dict().values()))
        if key not in made:
            made[key] = convert(sequence, *given, **how)
        return deepcopy(made[key])

    return to_onnx


@pytest.fixture(scope="module")
def files(tmp_path_factory: Any) -> SimpleNamespace:
    """Two memories in float16, and in float32 with the weights that these files should hold."""
    home, model = tmp_path_factory.mktemp("files"), drawn(Two())
    rounded = deepcopy(model)
    for weight in rounded.parameters():
        weight.data = weight.data.half().float() if weight.dim() > 1 else weight.data
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exporting, "_to_onnx", converted_once(exporting._to_onnx))
        whole = export_onnx(rounded, home / "whole")
        half = export_onnx(model, home / "half", dtype="float16")
    return SimpleNamespace(model=model, rounded=rounded, whole=whole, half=half)


@pytest.mark.spec("ONNX-FILE-D1", "ENG-EXPORT-D2")
def test_a_file_is_its_model_by_an_operator_and_by_a_loop(files):
    found, folder = files.whole, files.whole.folder
    assert found.error < BOUND and sorted(path.name for path in folder.iterdir()) == [SEQUENCE, STEP]
    once, each = operators(folder, SEQUENCE), operators(folder, STEP)
    assert once.count("LinearAttention") == each.count("LinearAttention") == once.count("Scan") == 1
    assert "Scan" not in each and found.step_nodes == len(each) <= NODES_OF_TWO
    assert [entry.version for entry in onnx.load(folder / STEP).opset_import] == [27]
    check(folder, files.rounded, floats)
    with pytest.raises(CheckpointError, match="exists already"):
        export_onnx(files.model, folder)


@pytest.mark.slow
@pytest.mark.parametrize("rule", [*OPERATORS, *LOOPS])
@pytest.mark.spec("ONNX-FILE-D1", "ENG-EXPORT-D2")
def test_rules(rule, tmp_path):
    model = Memory(8, 2, rule, generator=torch.Generator().manual_seed(0), dtype=torch.float32)
    export_onnx(model, tmp_path / rule)
    assert ("LinearAttention" in operators(tmp_path / rule, SEQUENCE)) == (rule in OPERATORS)
    check(tmp_path / rule, model, floats)


@pytest.mark.slow
@pytest.mark.parametrize("rule", NODES)
@pytest.mark.spec("ONNX-FILE-D2")
def test_nodes_of_a_layer_and_a_token(rule, tmp_path):
    fields = {"vocab_size": 64, "d_model": 16, "heads": 2, "memory": rule}
    nodes = []
    for layers in (1, 2):
        model = LanguageModel(fields | {"layers": layers}, generator=torch.Generator().manual_seed(0))
        nodes.append(export_onnx(drawn(model), tmp_path / str(layers)).step_nodes)
    assert nodes[1] - nodes[0] <= NODES[rule]


class Units(nn.Module):
    """What a layer, a rule and one behind the other make of rows."""

    def forward(self, x: Tensor, y: Tensor, z: Tensor) -> tuple[Tensor, ...]:
        x, z = units(x, z, norm="l2")
        return x, *execute(L2_NORM, y), *execute(L2_NORM, z)


@pytest.mark.spec("ONNX-FILE-D2")
def test_norms_are_one_operator_at_every_size():
    sizes = torch.tensor([0.0, 1e-30, 1e-6, 1.0, 1e15, 1e30, 1e37], dtype=torch.float32).view(-1, 1, 1)
    x = sizes * torch.randn(7, 5, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float32)
    with exporting._quiet():
        made = shorter(torch.onnx.export(Units().eval(), (x, x + 0, x + 0), dynamo=True, verbose=False).model)
    found = [node.op_type for node in made.graph]
    assert found.count("RMSNormalization") == 3 and len(found) == 3 * 4
    made.opset_imports[""] = 27
    answers = exporting._session(onnx_ir.to_proto(made)).run(None, {item.name: x.numpy() for item in made.graph.inputs})
    wide, length = x.double(), x.double().norm(dim=-1, keepdim=True)
    keys = wide / length.clamp(min=1e-300)
    # Of float32: the sums, the quotients, the root and the products round some ten times.
    for got, want in zip(answers, (wide / (length.square() + 1e-12).sqrt(), keys, keys), strict=True):
        assert (torch.from_numpy(got) - want).abs().max() <= 10 * 2.0**-24, got


class Ways(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        row = x.unsqueeze(1).transpose(1, 2).reshape(-1, 12)
        return row + 1, x.view(-1, 3, 4) * 2, x.flip(1), x.transpose(1, 2), x.reshape(-1, 12).view(-1, 3, 4).squeeze(0)


@pytest.mark.spec("ONNX-FILE-D2")
def test_what_says_a_shape_is_said_once_and_what_moves_numbers_stays():
    x = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float32)
    with exporting._quiet():
        sizes = {"x": {0: torch.export.Dim("batch", min=1, max=99)}}
        made = shorter(torch.onnx.export(Ways().eval(), (x,), dynamo=True, verbose=False, dynamic_shapes=sizes).model)
    found = [node.op_type for node in made.graph if node.op_type != "Slice"]
    assert sorted(found) == ["Add", "Mul", "Reshape", "Reshape", "Transpose"]  # the last output is an input
    other = torch.randn(5, 3, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float32)
    answers = exporting._session(onnx_ir.to_proto(made)).run(None, {"x": other.numpy()})
    assert all(torch.equal(torch.from_numpy(got), want) for got, want in zip(answers, Ways()(other), strict=True))


@pytest.mark.spec("ONNX-FILE-D3")
def test_weights_in_float16_are_half_the_bytes_and_round_once(files):
    model, folder = files.model, files.half.folder
    assert files.half.error < BOUND
    matrices = {name: weight for name, weight in model.named_parameters() if weight.dim() > 1}
    asked = sum(weight.numel() for name, weight in matrices.items() if "initial" not in name)  # a step has a state
    held = [onnx.numpy_helper.to_array(item) for item in onnx.load(folder / STEP).graph.initializer]
    assert sum(item.size for item in held if item.dtype == "float16") == asked
    assert not any(item.ndim > 1 for item in held if item.dtype == "float32")
    x = floats(1, 5)
    (got, *_) = opened(folder, SEQUENCE).run(None, {"input": x.numpy()})
    y = model(x)[0]
    for at in range(8):
        slopes = torch.autograd.grad(y[0, -1, at], [*matrices.values()], retain_graph=True)
        # To first order a weight w moves an output by its slope times 2^-11 |w|, or 2^-25 where digits are fewer.
        least = [(2.0**-11 * weight.abs()).clamp(min=2.0**-25) for weight in matrices.values()]
        bound = sum((g.abs() * step).sum() for g, step in zip(slopes, least, strict=True))
        moved = (torch.from_numpy(got)[0, -1, at] - y[0, -1, at]).abs()
        assert 0 < moved <= bound + BOUND * y.abs().max(), (at, moved, bound)


@pytest.mark.spec("ONNX-FILE-D3")
def test_weights_that_float16_has_no_number_for_are_refused(tmp_path):
    model = Memory(8, 2, "gla")
    model.out.weight.data[0, 0] = 7e4
    with pytest.raises(ConfigError, match="dtype='float16', and out.weight has 7e\\+04, beyond its 65504"):
        export_onnx(model, tmp_path / "out", dtype="float16")
    with pytest.raises(ConfigError, match="dtype must be one of 'float32', 'float16', got 'int8'"):
        export_onnx(model, tmp_path / "out", dtype="int8")  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())


@pytest.mark.spec("ONNX-FILE-D1")
def test_rules_that_are_onnxs_own_operator():
    rules = {name: MemoryConfig.model_validate(name) for name in (*OPERATORS, *LOOPS)}
    assert {name: kind for name, rule in rules.items() if (kind := update_rule(rule))} == OPERATORS
    for fields in ({"chunk": 2}, {"read": "before"}, {"normalizer": "sum", "bias": "dot", "feature_map": "elu"},
                   {"retention": "decay"}, {"bias": "huber"}, {"algorithm": "momentum"}):  # fmt: skip
        assert update_rule(MemoryConfig.model_validate(fields)) is None, fields


@pytest.mark.spec("ONNX-FILE-D1")
def test_a_bias_of_a_user_without_derivatives_by_hand_is_refused_by_name(tmp_path, monkeypatch):
    restore_registries(monkeypatch)

    class Cosh(bias.Bias):
        """cosh_of_a_user: ell = sum log cosh(pred - v)."""

        kind: Literal["cosh_of_a_user"] = "cosh_of_a_user"

        def loss(self, pred, target):
            return (pred - target).cosh().log().sum(-1)

    said = r"torch.func takes derivatives of bias 'cosh_of_a_user' \(grad, grad_vjp\), which the exporter cannot follow"
    levels = [{"name": "fast", "memory": "delta"}, {"name": "slow", "period": 2, "memory": {"bias": Cosh()}}]
    with pytest.raises(ConfigError, match=f"CMS does not convert to ONNX: {said}"):
        export_onnx(CMS(8, 2, {"levels": levels}), tmp_path / "out")


@pytest.mark.parametrize(("model", "name"), [
    (lambda: Memory(8, 2, "mlstm"), "gating 'mlstm' steps through a sequence by itself"),
    (lambda: LanguageModel({"vocab_size": 9, "d_model": 8, "heads": 2, "attention": {"kind": "attention"}}),
     "attention of .* steps through a sequence by itself"),
    (lambda: Memory(8, 2, "gated_mesa"), "Memory of .*readout=ridge: queries solve systems of equations"),
    (lambda: PerformerAttention(8, 2), "PerformerAttention is no model and no layer with its width as `d_model`"),
    (lambda: nn.Linear(8, 8), "Linear is no model and no layer"), (lambda: "model", "str is no model and no layer"),
])  # fmt: skip
@pytest.mark.spec("ONNX-FILE-D1")
def test_what_does_not_convert_is_refused_by_name(model, name, tmp_path):
    with pytest.raises(ConfigError, match=name):
        export_onnx(model(), tmp_path / "out")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.spec("ONNX-FILE-D1")
def test_a_compiled_linear_transformer_that_counts_tokens(tmp_path):
    fields: dict[str, Any] = {"hidden_size": 8, "num_heads": 2, "num_layers": 1, "positions": "rotary"}
    model = LinearTransformer.build(embed_dim=6, **fields, generator=torch.Generator().manual_seed(0)).float().eval()
    export_onnx(torch.compile(model, backend="eager"), tmp_path / "out")
    check(tmp_path / "out", model, lambda batch, length: torch.randn(batch, length, 6, dtype=torch.float32))


@pytest.mark.slow
@pytest.mark.spec("ONNX-FILE-D1")
def test_a_rule_that_float32_does_not_hold_to_1e_5_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="kl.*gives other numbers than torch"):
        export_onnx(Memory(8, 2, "memora", generator=torch.Generator().manual_seed(0)), tmp_path / "out")
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
