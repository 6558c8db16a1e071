"""A gradient from outside that is not finite: named where it enters, never spread."""

from __future__ import annotations

import pytest
import torch

from hecate import Gates, MemoryConfig, NonFiniteError, memory_scan, memory_step
from hecate.nn import Memory
from tests.engine.test_finite import RUNS, spoiled


@pytest.mark.spec("ENG-FINITE-V1")
@pytest.mark.parametrize("junk", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("autodiff", ["tape", "torch"])
@pytest.mark.parametrize(("name", "engine"), RUNS)
def test_an_infinite_cotangent_is_named(name, engine, autodiff, junk):
    case = spoiled(name, []).fresh()
    y, state = case.scan(engine=engine, autodiff=autodiff, name="level 1")
    g = torch.ones_like(y)
    g[1, 4, 0, 0] = junk
    place = "memory 'level 1' at outputs is .* at batch row 1, token 4, head 0"
    with pytest.raises(NonFiniteError, match=place):
        y.backward(g, retain_graph=True)
    assert all(leaf.grad is None for leaf in case.leaves)
    field, item = next(iter(state.memory.items()))
    g = torch.ones_like(item)
    g[2, 1] = junk
    with pytest.raises(NonFiniteError, match=rf"state.memory\['{field}'\].*batch row 2, head 1"):
        item.backward(g, retain_graph=True)
    # What is finite, however large, passes, and so do batches of cotangents.
    torch.autograd.grad(y, case.leaves, torch.full_like(y, 1e300), retain_graph=True)
    if (engine, autodiff) != ("parallel", "torch"):
        return
    both = torch.stack([torch.ones_like(y), torch.zeros_like(y)])
    torch.autograd.grad(y, case.leaves[:1], both, is_grads_batched=True)


@pytest.mark.spec("ENG-FINITE-V1")
def test_other_policies_let_it_through():
    for policy in ("skip", "propagate"):
        case = spoiled("delta", [], policy).fresh()
        y, _ = case.scan()
        (g,) = torch.autograd.grad(y.sum() * torch.inf, [case.q])
        assert not bool(g.isfinite().all())


@pytest.mark.spec("ENG-FINITE-V1")
def test_steps_and_layers_are_watched_too():
    x = torch.ones(1, 2, 3).requires_grad_()
    y, _ = memory_step(MemoryConfig(), x, x, x, Gates(0.1), name="mine")
    with pytest.raises(NonFiniteError, match="memory 'mine' at outputs is inf"):
        (y * torch.inf).sum().backward()
    layer = Memory(4, 2, name="level 2")
    with pytest.raises(NonFiniteError, match="memory 'level 2' at outputs"):
        (layer(torch.ones(1, 3, 4))[0] * torch.inf).sum().backward()
    assert all(parameter.grad is None for parameter in [layer.qkv.weight, layer.initial.weight])
    # Where values may not be looked at nothing is.
    torch.func.grad(lambda x: (memory_scan(MemoryConfig(), x, x, x)[0] * torch.inf).sum())(x[None])
