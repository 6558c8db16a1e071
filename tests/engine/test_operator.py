"""Kernels of the CPU as operators under torch.compile."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch
from pydantic import Field
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from hecate import MemoryConfig, memory_scan
from hecate.activation import GELU, SiLU
from hecate.bias import L2, Huber
from hecate.engine import Engine, Plan
from hecate.engine.cpu import operator
from hecate.errors import ConfigError
from tests.memories import DEEP, Case, case_of, close, config_of, flat_state

pytest.importorskip("numba")

CONFIGS: dict[str, dict[str, Any]] = {
    "rows": {"retention": "decay", "algorithm": "momentum", "key_norm": "l2"},
    "parts": {"bias": "huber", "retention": {"kind": "elastic_net"}, "key_norm": "l2"},
    "coordinates": {"structure": "vector", "retention": "decay"},
    "normaliser": {"bias": "dot", "feature_map": "elu", "normalizer": "sum"},
    "layers": {"structure": DEEP, "retention": "decay", "algorithm": "momentum", "key_norm": "l2"},
}


def differentiated(run: Any, case: Case, **how: Any) -> tuple[Tensor, ...]:
    """Outputs, states and gradients."""
    leaves = case.fresh().leaves
    outputs = run(case, *leaves, **how)
    grads = torch.autograd.grad([x.square().sum() for x in outputs], leaves, materialize_grads=True)
    return *outputs, *grads


@pytest.mark.spec("ENG-NUM-D10", "ENG-NUM-D3")
@pytest.mark.parametrize("name", CONFIGS)
def test_one_node_whatever_the_length_with_the_numbers_of_the_token_loop(name: str) -> None:
    """Either engine where lengths are symbols, and for the second no graph; and where they are numbers."""
    torch._dynamo.reset()
    counter, counts, dynamic = CompileCounterWithBackend("aot_eager"), [], name in ("rows", "layers")

    def step(case: Case, *leaves: Tensor, **how: Any) -> tuple[Tensor, ...]:
        y, state = case.with_leaves(list(leaves)).scan(**how)
        return y, *(t for t in flat_state(state).values() if t.is_floating_point())

    compiled = torch.compile(step, backend=counter, fullgraph=True, dynamic=dynamic)
    config = config_of(**CONFIGS[name])
    for length in (20, 45) if dynamic else (20,):
        case = case_of(config, width=3, length=length, masks=True)
        for mine, true in zip(
            differentiated(compiled, case), differentiated(step, case, engine="sequential"), strict=True
        ):
            close(mine, true, 1e-10)
        targets = [str(node.target) for node in counter.graphs[-1].graph.nodes]
        assert targets.count("hecate.kernel_scan.default") == 1
        counts.append(counter.frame_count)
    assert len(set(counts)) == 1


class HiddenHuber(Huber):
    """hidden_huber: huber whose threshold is not written out."""

    kind: Literal["hidden_huber"] = "hidden_huber"
    delta: float = Field(1.0, exclude=True)


@pytest.mark.spec("ENG-NUM-D10")
def test_a_rule_that_its_text_does_not_tell_keeps_its_numbers() -> None:
    torch._dynamo.reset()
    case = case_of(config_of(bias=HiddenHuber(delta=0.1), retention="decay"), length=20)
    y = torch.compile(lambda: case.scan()[0], backend="eager", fullgraph=True)()
    close(y, case.scan()[0], 1e-10)
    with pytest.raises(ConfigError, match="handed the rule as text, which reads as another one"):
        torch.compile(lambda: case.scan(engine="compiled")[0], backend="eager", fullgraph=False)()


@pytest.mark.spec("ENG-NUM-D10", "ENG-EXPORT-D1")
def test_no_operator_is_handed_a_rule_that_its_text_does_not_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    config = MemoryConfig(bias=HiddenHuber(delta=0.1))
    q = torch.ones(1, 2, 1, 4, dtype=torch.float32)

    class Scan(torch.nn.Module):
        def forward(self, q: Tensor) -> Tensor:
            return memory_scan(config, q, q, q)[0]

    with pytest.raises(ConfigError, match="keeps the rule as text, which reads as another one: bias"):
        torch.export.export(Scan(), (q,), strict=False)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    plan = Plan.sketch(config, traced=True, device="cuda", values=torch.bfloat16)
    for name in ("triton", "fla"):
        assert "handed the rule as text" in (Engine.registry[name].unfit(plan) or ""), name


@pytest.mark.spec("ENG-NUM-D10")
@pytest.mark.parametrize(("old", "new"), [(Huber, L2), (SiLU, GELU)])
def test_a_kind_that_is_defined_anew_leaves_compiled_layers_of_the_old_one_their_numbers(
    old: Any, new: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def define(base: Any) -> Any:
        class Own(base):  # type: ignore[misc]
            kind: Literal["defined_anew"] = "defined_anew"

        return Own()

    torch._dynamo.reset()
    for module in ("engine", "deep"):
        monkeypatch.setattr(f"hecate.engine.cpu.{module}.TOKENS", 1)
    own = define(old)
    knobs = {"bias": own} if old is Huber else {"structure": {**DEEP, "activation": own}}
    case = case_of(config_of(**knobs, retention="decay"), length=3)
    scan = torch.compile(lambda: case.scan()[0], backend="eager", fullgraph=True)
    before = scan()
    define(new)
    close(scan(), before, 1e-10)
    torch._dynamo.reset()
    close(scan(), before, 1e-10)


@pytest.mark.spec("ENG-NUM-D10")
@pytest.mark.parametrize("engine", ["compiled", "compiled_layers"])
@pytest.mark.parametrize("masked", [False, True])
def test_operators_keep_what_torch_asks_of_them(engine: str, masked: bool) -> None:
    source = torch.Generator().manual_seed(0)
    config = MemoryConfig(**CONFIGS["rows" if engine == "compiled" else "layers"])
    weights = list(config.structure.init(3, 2, heads=4, generator=source, dtype=torch.float64).values())
    states = [*weights, *(weight / 2 for weight in weights), *weights]  # a slot each, and the start
    drawn = [torch.randn(2, 5, 2, *width, generator=source) for width in ((3,), (3,), (2,), (), (), ())]
    tokens = [*drawn[:3], *(gate.sigmoid() for gate in drawn[3:])]
    masks = [torch.rand(2, 5, 2, generator=source) > 0.3 for _ in range(2)] if masked else []
    inputs = [x.detach().clone().requires_grad_(x.is_floating_point()) for x in (*states, *tokens, *masks)]
    there = [True] * (len(states) + len(tokens)) + [masked] * 2 + [False] * 2
    facts = (engine, config.text, len(weights), there)
    found = torch.library.opcheck(operator.kernel_scan, (*facts, inputs))
    cotangents = [torch.ones_like(x) for x in operator.kernel_scan(*facts, inputs)]
    plain = [x.detach() for x in inputs]
    back = torch.library.opcheck(operator.kernel_scan_backward, (*facts, plain, cotangents))
    assert {*found.values(), *back.values()} == {"SUCCESS"}
