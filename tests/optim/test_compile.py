"""A step under `torch.compile`: what it computes is what it computes without."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from hecate.optim import PhiMomentum, tensors
from tests.optim.test_edges import KINDS

SOME = "diagonal, kernel, delta, deep, muon, m3"
CASES = {name: KINDS[name] for name in SOME.split(", ")} | {
    "identity": (PhiMomentum, {"nesterov": True, "weight_decay": 0.1}),
    "tanh": (PhiMomentum, {"feature_map": "tanh"}),
    "rows": (PhiMomentum, {"feature_map": "hedgehog"}),
}
SLOW = ("tanh", "diagonal", "rows", "kernel", "delta", "muon")
"""Kin of `identity`, `deep` and `m3`, at three seconds each."""


@pytest.mark.spec("OPT-BASE-I4")
@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in CASES])
@pytest.mark.filterwarnings("ignore:.*:UserWarning")
@torch._dynamo.config.patch(enable_dynamo_decompositions=False)  # those of some versions of torch round otherwise
def test_a_compiled_step_is_the_plain_one(name, monkeypatch):
    """Bit for bit with the backend that runs what was traced, without kernels; the trace breaks as torch's does."""
    monkeypatch.setattr(tensors, "load_kernels", lambda name: None)
    cls, options = CASES[name]
    torch._dynamo.reset()
    draws, count = torch.randn(2, 4, 5, generator=torch.Generator().manual_seed(0)), 2 if name == "identity" else 1
    sets = [[torch.nn.Parameter(draw.clone()) for draw in draws[:count]] for _ in range(2)]
    plain, compiled = (cls(params, 0.1, **options) for params in sets)
    traced = CompileCounter()
    step = torch.compile(compiled.step, backend=traced)
    for number in range(4):
        for p, q in zip(*sets, strict=True):
            draws = torch.Generator().manual_seed(100 + number)
            p.grad = torch.randn(4, 5, generator=draws)
            q.grad = p.grad.clone()
        plain.step()
        step()
    assert traced.op_count > 0
    for p, q in zip(*sets, strict=True):
        assert torch.equal(p, q)
        for key, value in plain.state[p].items():
            assert torch.equal(value, compiled.state[q][key])
