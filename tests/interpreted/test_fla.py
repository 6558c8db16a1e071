"""The adapter to flash-linear-attention with the norm of keys that it launches, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from hecate import Gates, MemoryConfig, memory_scan, named_rule
from hecate.engine import Engine
from hecate.engine.fla import kernel as fla
from hecate.engine.triton import launch
from tests.engine.test_fla import kernel

FLA = Engine.registry["fla"]


@pytest.mark.spec("ENG-FLA-D1")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_keys_come_to_unit_length_in_their_own_dtype(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """One launch for keys and one for queries, in place of casts and the operations of a norm in torch."""
    seen: list[torch.Tensor] = []
    launched: list[torch.dtype] = []
    own = launch.normed

    def stand_in(**given: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        seen.append(given["k"])
        return kernel(**given)

    monkeypatch.setattr(fla, "load_kernel", lambda _: stand_in)
    monkeypatch.setattr(type(FLA), "unfit", lambda *call: None)
    monkeypatch.setattr(launch, "normed", lambda inputs: launched.append(inputs[0].dtype) or own(inputs))
    source = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 6, 2, 8, generator=source, dtype=torch.float64) for _ in range(3))
    k = k.transpose(1, 2).contiguous().transpose(1, 2)  # heads ahead of tokens
    k[0, 2, 1] = 0.0
    lr, retain = (torch.rand(1, 6, 2, generator=source, dtype=torch.float64) for _ in range(2))

    def answers(config: MemoryConfig, engine: str, to: torch.dtype) -> list[torch.Tensor]:
        leaves = [item.to(dtype).to(to).requires_grad_() for item in (q, k, v)]
        gates = Gates(lr.to(dtype).to(to), retain.to(dtype).to(to))
        y, state = memory_scan(config, *leaves, gates, engine=engine)
        total = y.double().square().sum() + state.memory["weight"].double().square().sum()
        return [y.detach(), *torch.autograd.grad(total, leaves)]

    config = named_rule("gated_delta")
    mine = answers(config, "fla", dtype)
    true = answers(config.model_copy(update={"state_dtype": "float64"}), "sequential", torch.float64)
    assert launched == [dtype, dtype] and seen[0].dtype == dtype
    # Of bfloat16, a stand-in that rounds at every token.
    for found, right in zip(mine, true, strict=True):
        assert found.dtype == dtype
        assert float((found.double() - right).norm() / right.norm()) <= (2.0**-5 if dtype == torch.bfloat16 else 2e-6)
