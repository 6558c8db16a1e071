"""The kernels as operators of torch: what compiles, what it is checked for, and what it comes to."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from hecate import Gates, MemoryConfig, memory_scan
from hecate.bias import Bias
from hecate.engine.triton import kernel, ops
from tests.engine.own_biases import LossAlone, Sorted

RULES: dict[str, dict[str, Any]] = {
    "own bias": {"bias": LossAlone(scale=0.7), "key_norm": "l2"},
    "delta": {"key_norm": "l2"},
    "gated huber, momentum": {
        "bias": "huber", "retention": "decay", "algorithm": "momentum", "decay_order": "before_gradient",
        "key_norm": "l2",
    },
    "kda": {"retention": "decay", "decay_order": "before_gradient", "key_norm": "l2"},
    "loop: kl, nesterov": {
        "bias": {"kind": "lp", "p": 3.0}, "retention": {"kind": "kl", "signed": True},
        "algorithm": {"kind": "momentum", "nesterov": True, "lr": 0.1},
    },
    "dot, decayed": {"bias": "dot", "retention": "decay", "read": "before", "feature_map": "elu"},
}  # fmt: skip
FEW = ("own bias", "loop: kl, nesterov")


@pytest.fixture(autouse=True)
def anew() -> None:
    torch._dynamo.reset()


def leaves_of(config: MemoryConfig, length: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    source = torch.Generator().manual_seed(length)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(1, length, 1, *shape, generator=source, dtype=torch.float64)

    own = [draw(8), draw(8), draw(6), draw().sigmoid()]
    channels = [8] * (config.decay_order == "before_gradient" and not config.algorithm.slots)
    own += [(draw(*channels) + 2).sigmoid()] * config.retention.uses_retain
    own += [draw().sigmoid()] * bool(config.algorithm.slots)
    return [item.to(dtype).requires_grad_() for item in own]


def scan(config: MemoryConfig, *leaves: torch.Tensor, engine: str = "triton", **masks: Any) -> tuple[torch.Tensor, ...]:
    q, k, v, lr, *rest = leaves
    gates = Gates(lr, *rest) if config.retention.uses_retain else Gates(lr, None, *rest)
    y, state = memory_scan(config, q, k, v, gates, engine=engine, **masks)
    return y, *state.memory.values(), *state.slots.values()


def grads(outputs: tuple[torch.Tensor, ...], leaves: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    return torch.autograd.grad(sum(item.square().sum() for item in outputs), leaves)


@pytest.mark.spec("ENG-TRITON-D8", "ENG-TRITON-D9")
@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in FEW else pytest.mark.slow) for name in RULES])
def test_one_graph_for_every_length_with_the_same_bits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(Bias._registry, "printed_loss", LossAlone)
    config = MemoryConfig.model_validate({**RULES[name], "on_nonfinite": "propagate"})
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda *leaves: scan(config, *leaves), backend=counter, fullgraph=True)
    for length in (3, 18) if name.startswith("loop") else (20, 66):
        leaves = leaves_of(config, length)
        for leaf in leaves:
            torch._dynamo.mark_dynamic(leaf, 1)
        own, plain = compiled(*leaves), scan(config, *leaves)
        pairs = zip((*own, *grads(own, leaves)), (*plain, *grads(plain, leaves)), strict=True)
        assert all((mine - true).norm() <= 1e-6 * true.norm() for mine, true in pairs)
    assert counter.frame_count == 1
    (graph,) = counter.graphs
    nodes = [node for node in graph.graph.nodes if "matrix_scan" in str(node.target)]
    assert len(nodes) == 1


@pytest.mark.spec("ENG-TRITON-D8")
def test_masks_and_narrow_inputs_compile() -> None:
    config = MemoryConfig(retention="decay", key_norm="l2", on_nonfinite="propagate")
    leaves = leaves_of(config, 30, torch.float16)
    masks = {"write_mask": torch.arange(30)[None] % 3 > 0, "reset_mask": torch.arange(30)[None] % 11 == 0}
    compiled = torch.compile(lambda *own: scan(config, *own, **masks), backend="aot_eager", fullgraph=True)
    own, plain = compiled(*leaves), scan(config, *leaves, **masks)
    assert own[0].dtype == torch.float16
    for mine, true in zip((*own, *grads(own, leaves)), (*plain, *grads(plain, leaves)), strict=True):
        assert (mine - true).norm() <= 2 * torch.finfo(torch.float16).eps * true.norm()


def arguments(momentum: bool, masked: bool, grad: bool, loop: bool = False) -> tuple[Any, ...]:
    source = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        drawn = torch.randn(*shape, generator=source, dtype=torch.float32)
        return drawn.requires_grad_(grad)

    config = MemoryConfig(retention="decay", algorithm="momentum" if momentum else "gd")
    states = [draw(2, 6, 8), draw(2, 6, 8) if momentum else None, draw(2, 6, 8)]
    tokens = [draw(1, 20, 2, 8), draw(1, 20, 2, 8), draw(1, 20, 2, 6)]
    gates = [
        torch.rand(1, 20, 2, generator=source, dtype=torch.float32).mul(0.1).requires_grad_(grad) for _ in range(3)
    ]
    masks = [torch.arange(20)[None, :, None].expand(1, 20, 2) % 7 == at for at in (1, 2)] if masked else [None, None]
    beside, exact = [None, None], None if loop else "tf32x3"
    if loop:
        gates[1], beside = draw(1, 20, 2, 8).sigmoid(), [draw(1, 20, 2, 8), draw(1, 20, 2, 6).sigmoid()]
        gates[1], beside[1] = (item.detach().requires_grad_(grad) for item in (gates[1], beside[1]))
    return ops.rule_of(config, exact, raw=False), exact, grad, *states, *tokens, *gates, *masks, *beside


@pytest.mark.spec("ENG-TRITON-D8")
@pytest.mark.parametrize(
    ("momentum", "masked", "grad", "loop"),
    [
        (True, False, False, False),
        (True, True, True, True),
        *(pytest.param(*which, True, False, marks=pytest.mark.slow) for which in ((False, False), (True, True))),
    ],
)
def test_operators_keep_what_torch_asks_of_them(momentum: bool, masked: bool, grad: bool, loop: bool) -> None:
    found = torch.library.opcheck(ops.matrix_scan, arguments(momentum, masked, grad, loop))
    assert set(found.values()) == {"SUCCESS"}


@pytest.mark.spec("ENG-TRITON-D8")
@pytest.mark.parametrize("loop", [False, True])
def test_an_operator_whose_kernels_are_not_trusted_runs_torch(loop: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    given = arguments(True, True, True, loop)
    leaves = [item for item in given[3:] if item is not None and item.requires_grad]
    results = []
    for trusted in (True, False):
        monkeypatch.setattr(ops, "interpreting", lambda own=trusted: own)
        monkeypatch.setattr(ops, "verdict", lambda *_: "it is not trusted")
        own = ops.matrix_scan(*given)
        results.append((*own[:3], *grads(own[:3], leaves)))
    for mine, true in zip(*results, strict=True):
        assert (mine - true).norm() <= 2e-6 * true.norm()


@pytest.mark.spec("ENG-TRITON-D9")
def test_a_bias_without_a_kernel_is_refused() -> None:
    config = MemoryConfig(bias=Sorted(), on_nonfinite="propagate")
    with pytest.raises(Exception, match=r"aten\.sort has no kernel form"):
        torch.compile(lambda *own: scan(config, *own), backend="aot_eager")(*leaves_of(config, 20))


def test_a_rule_is_that_of_a_class_as_it_is_now(monkeypatch: pytest.MonkeyPatch) -> None:
    told = ops.rule_of(MemoryConfig(bias=LossAlone()), "tf32x3", raw=False)
    for cls in (LossAlone, type("LossAlone", (LossAlone,), {"loss": Sorted.loss, "__module__": __name__})):
        monkeypatch.setitem(Bias._registry, "printed_loss", cls)
        assert type(ops.config_of(told).bias) is cls


def test_a_rule_is_told_to_the_last_number() -> None:
    config = MemoryConfig(bias={"kind": "huber", "delta": 1 / 3}, retention="decay", read="before")
    told = MemoryConfig.model_validate_json(ops.rule_of(config, "tf32x3", raw=True))
    assert (told.bias, told.read, told.decay_order) == (config.bias, "before", "with_step")
    assert told.retention.uses_retain and not told.algorithm.slots and kernel.interpreting()
