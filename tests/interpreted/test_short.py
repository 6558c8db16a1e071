"""The short way of calls whose looks were seen before: the bits of the whole way, and what it leaves to it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hecate import Gates, MemoryConfig, memory_scan
from hecate.engine import Call, choose
from hecate.engine.triton import engine
from hecate.engine.triton.short import Short
from tests.launches import as_on_a_device

KEPT = {"on_nonfinite": "propagate"}
WAYS = {
    "gated_delta": ({"retention": "decay", "key_norm": "l2"}, {}),
    "momentum": ({"retention": "decay", "algorithm": "momentum", "key_norm": "l2"}, {}),
    "numbers": ({"bias": "dot", "retention": "decay"}, {"lr": None, "retain": 0.9}),
    "initial": ({"key_norm": "l2"}, {"initial": True}),
    "goes on": ({"retention": "decay", "algorithm": "momentum", "key_norm": "l2"}, {"state": True}),
    "parts": ({"retention": "decay", "key_norm": "l2"}, {"part": 64}),
}


def case(rule: dict[str, Any], given: dict[str, Any]) -> tuple[MemoryConfig, list[torch.Tensor], Any]:
    """A config, the leaves of a call, and the call: outputs, states and gradients."""
    config, source = MemoryConfig(**rule, **KEPT), torch.Generator().manual_seed(0)
    lead, width = (1, 130, 1) if "part" in given else (1, 19, 2), 16

    def drawn(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=source, dtype=torch.float32).requires_grad_()

    leaves = [drawn(*lead, width) for _ in range(3)] + [drawn(*lead) for _ in range(3)]
    q, k, v, lr, retain, momentum = leaves
    gates: dict[str, Any] = {"lr": lr}
    gates |= {"retain": retain} if config.retention.uses_retain else {}
    gates |= {"momentum": momentum} if config.algorithm.slots else {}
    gates |= {name: given[name] for name in ("lr", "retain") if name in given}
    more: dict[str, Any] = {}
    if "initial" in given:
        more["initial"] = {"weight": drawn(2, width, width)}
        leaves.append(more["initial"]["weight"])
    if "state" in given:
        _, state = memory_scan(config, q, k, v, Gates(**gates), engine="sequential")
        held = [{n: x.detach().requires_grad_() for n, x in own.items()} for own in (state.memory, state.slots)]
        more["state"] = state._replace(memory=held[0], slots=held[1])
        leaves += [x for own in held for x in own.values()]

    def scan() -> list[torch.Tensor]:
        y, state = memory_scan(config, q, k, v, Gates(**gates), engine="triton", **more)
        outputs = [y, *state.memory.values(), *state.slots.values()]
        total = sum((item.square().sum() for item in outputs), torch.zeros(()))
        grads = torch.autograd.grad(total, leaves, allow_unused=True)
        return [*(x.detach() for x in outputs), state.position, *(x for x in grads if x is not None)]

    return config, leaves, scan


@pytest.mark.spec("ENG-TRITON-D12")
@pytest.mark.parametrize("name", WAYS)
def test_a_call_whose_looks_were_seen_has_the_bits_of_the_first(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rule, given = WAYS[name]
    monkeypatch.setattr(engine, "_part", lambda plan: given.get("part", 0))
    config, _, scan = case(rule, given)
    with as_on_a_device():
        first = scan()
        plan = list(config.plans.values())[-1]
        assert isinstance(plan.short, Short)
        monkeypatch.setattr(engine.Triton, "_scan", None)  # the whole way
        again = scan()
    assert len(first) == len(again) and all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.spec("ENG-TRITON-D12")
def test_second_derivatives_of_the_short_way() -> None:
    config, leaves, _ = case(*WAYS["gated_delta"])
    q, k, v, lr, retain, _ = leaves
    found = []
    with as_on_a_device():
        for asked in ("triton", "triton", "sequential"):
            y, _ = memory_scan(config, q, k, v, Gates(lr, retain), engine=asked)
            first = torch.autograd.grad(y.square().sum(), [q, k, v, lr, retain], create_graph=True)
            found.append(torch.autograd.grad(sum(g.square().sum() for g in first), [q, k, v, lr, retain]))
    for whole, short, right in zip(*found, strict=True):
        assert torch.equal(whole, short)
        torch.testing.assert_close(short, right, rtol=1e-3, atol=1e-5 * float(right.abs().max()))


@pytest.mark.spec("ENG-TRITON-D12")
def test_without_momentum_and_retain_second_derivatives_fill_them_in() -> None:
    config, leaves, _ = case({"key_norm": "l2"}, {})
    q, k, v, lr, *_ = leaves
    found = []
    with as_on_a_device():
        for _ in range(2):
            y, _ = memory_scan(config, q, k, v, Gates(lr), engine="triton")
            (g,) = torch.autograd.grad(y.square().sum(), [k], create_graph=True)
            found.append(torch.autograd.grad(g.square().sum(), [q, k, v, lr]))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.spec("ENG-TRITON-D12")
def test_a_call_of_the_short_way_has_tensors_for_who_asks() -> None:
    config, leaves, scan = case(*WAYS["momentum"])
    q, k, v, lr, retain, momentum = leaves
    with as_on_a_device():
        scan()
        call = Call.of(config, q, k, v, Gates(lr, retain, momentum))
        assert call.given is not None and call.inputs.momentum is momentum and len(call.memories) == 1
        expected, _ = memory_scan(config, q, k, v, Gates(lr, retain, momentum), engine="sequential")
        found, _ = memory_scan(config, q, k, v, Gates(lr, retain, momentum), engine="triton")
        assert choose(call, "triton").name == "triton"
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    for bad in ({"write_mask": torch.ones(1, 19)}, {"gates": Gates(lr[:, :3], retain, momentum)}):
        with as_on_a_device(), pytest.raises(Exception, match="must be"):
            memory_scan(config, q, k, v, bad.get("gates", Gates(lr, retain, momentum)), engine="triton",
                        **{name: item for name, item in bad.items() if name != "gates"})  # fmt: skip
