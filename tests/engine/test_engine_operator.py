"""Scans that torch.compile would unroll, as one operator."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from hecate.engine.scan import UNROLLED
from tests.memories import DEEP, Case, case_of, close, config_of, flat_state

RULES: dict[str, tuple[str, dict[str, Any]]] = {
    "token by token": ("sequential", {"structure": DEEP, "retention": "elastic_net", "feature_map": "dpfp"}),
    "in chunks": ("chunk", {"structure": DEEP, "chunk": 2, "algorithm": "momentum", "retention": "decay"}),
    "to a chunk's end": ("chunk", {"chunk": 2, "commit": "chunk", "retention": "decay", "key_norm": "l2"}),
    "a window": ("window", {"algorithm": {"kind": "omega", "window": 3}, "retention": "decay", "feature_map": "elu"}),
    "factors": ("factored", {"algorithm": "deep_momentum", "retention": "decay"}),
    "a normaliser": ("sequential", {"bias": "dot", "feature_map": "elu", "normalizer": "sum"}),
}


def step(case: Case, *leaves: Tensor, **how: Any) -> tuple[Tensor, ...]:
    """Outputs and states."""
    y, state = case.with_leaves(list(leaves)).scan(**how)
    return y, *(t for t in flat_state(state).values() if t.is_floating_point())


def differentiated(run: Any, case: Case, **how: Any) -> tuple[Tensor, ...]:
    """Those, and gradients."""
    leaves = case.fresh().leaves
    outputs = run(case, *leaves, **how)
    squares = [x.square().sum() for x in outputs if x.requires_grad]  # not what a chunk's end leaves of its sums
    return *outputs, *torch.autograd.grad(squares, leaves, materialize_grads=True)


@pytest.mark.spec("ENG-COMPILE-D1", "ENG-COMPILE-I1")
@pytest.mark.parametrize("name", RULES)
def test_a_scan_of_many_steps_is_one_node_whatever_the_length(name: str) -> None:
    """With outputs, states and gradients of the engine itself; a short one is unrolled as before."""
    torch._dynamo.reset()
    engine, fields = RULES[name]
    counter, config = CompileCounterWithBackend("aot_eager"), config_of(**fields)
    dynamic = name in ("token by token", "a window")
    compiled = torch.compile(step, backend=counter, fullgraph=True, dynamic=dynamic)
    counts = []
    for length in (2 * UNROLLED + 3, 2 * UNROLLED + 8) if dynamic else (2 * UNROLLED + 3,):
        case = case_of(config, width=3, length=length, masks=name != "to a chunk's end")
        mine = differentiated(compiled, case, engine=engine)
        for one, other in zip(mine, differentiated(step, case, engine=engine), strict=True):
            close(one, other, 1e-12)
        targets = [str(node.target) for node in counter.graphs[-1].graph.nodes]
        assert targets.count("hecate.engine_scan.default") == 1 and len(targets) < 120
        counts.append(counter.frame_count)
    assert len({*counts}) == 1
    short = case_of(config, width=3, length=2)
    torch.compile(step, backend=counter, fullgraph=True)(short, *short.leaves, engine=engine)
    assert not any("engine_scan" in str(node.target) for node in counter.graphs[-1].graph.nodes)
