"""A retain of its own for every head, where no gate is given and where a layer's gate starts."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from hecate import Gates, MemoryConfig, memory_scan, memory_step, named_rule
from hecate.errors import ConfigError
from hecate.nn import Memory
from hecate.retention import Decay, NormCap
from tests.memories import close
from tests.reference import gates_2026, papers_2025

HEADS, T, D, V = 3, 9, 4, 2


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.spec("RET-DECAY-D2")
def test_retnet_has_its_rate_in_every_head():
    q, k, v = draw(1, T, HEADS, D), draw(1, T, HEADS, D, seed=1), draw(1, T, HEADS, V, seed=2)
    gamma = gates_2026.retnet(HEADS)
    true, states = papers_2025.retention(*(x[0].transpose(0, 1).numpy() for x in (q, k, v)), gamma)
    for engine in ("auto", "sequential", "parallel"):
        y, state = memory_scan(named_rule("retnet"), q, k, v, Gates(1.0), engine=engine)
        close(y[0].transpose(0, 1), torch.from_numpy(true), 1e-13)
        close(state.memory["weight"][0], torch.from_numpy(states), 1e-13)
    state, rows = None, []
    for t in range(T):  # the second token on is a bound program
        y, state = memory_step(named_rule("retnet"), q[:, t], k[:, t], v[:, t], Gates(1.0), state=state)
        rows.append(y)
    close(torch.stack(rows, 1)[0].transpose(0, 1), torch.from_numpy(true), 1e-13)
    assert np.allclose(Decay(retain="retnet").default_retains(HEADS), gamma, rtol=0, atol=0)


@pytest.mark.spec("RET-DECAY-D2")
def test_a_list_is_the_gate_of_each_head():
    own = [0.5, 1.0, 0.25]
    for config in (
        MemoryConfig(retention={"kind": "decay", "retain": own}),
        MemoryConfig(retention=NormCap(retention=Decay(retain=tuple(own)))),
    ):
        q, k, v = draw(2, T, HEADS, D), draw(2, T, HEADS, D, seed=1), draw(2, T, HEADS, V, seed=2)
        given = Gates(0.1, torch.tensor(own).expand(2, T, HEADS))
        y, _ = memory_scan(config, q, k, v, Gates(0.1))
        close(y, memory_scan(config, q, k, v, given)[0], 0)
    several = named_rule("delta_product").model_copy(update={"retention": Decay(retain=tuple(own))})
    k, v = draw(2, T, 2, HEADS, D, seed=1), draw(2, T, 2, HEADS, V, seed=2)
    y, _ = memory_scan(several, q, k, v, Gates(0.1))
    close(y, memory_scan(several, q, k, v, Gates(0.1, given.retain))[0], 0)
    read = MemoryConfig.model_validate_json(config.model_dump_json())
    assert read == config


@pytest.mark.spec("RET-DECAY-D2")
def test_a_layers_gates_start_there():
    gates = Memory(6, HEADS, named_rule("retnet", gating="none")).gates(torch.zeros(1, 1, 6))
    close(gates.retain[0, 0], gates_2026.retnet(HEADS), 1e-6)
    channels = Decay(retain=(0.5, 0.9, 0.8), channels=True)
    gates = Memory(6, HEADS, MemoryConfig(retention=channels)).gates(torch.zeros(1, 1, 6))
    close(gates.retain[0, 0], np.repeat([[0.5], [0.9], [0.8]], 2, 1), 1e-6)


def test_as_many_as_there_are_heads():
    config = MemoryConfig(retention=Decay(retain=(0.5, 0.9)))
    x = draw(1, T, HEADS, D)
    with pytest.raises(ConfigError, match=r"retain=\[0.5, 0.9\] is one number for each of 2 heads, and there are 3"):
        memory_scan(config, x, x, x)
    with pytest.raises(ConfigError, match="2 heads, and there are 3"):
        Memory(6, HEADS, config)


@pytest.mark.parametrize("retain", [1.5, "hgrn", (), (0.5, 2.0), True, None], ids=str)
def test_what_is_no_share_is_refused_in_one_sentence(retain):
    with pytest.raises(ConfigError, match=r"^retain: must be a number in \[0, 1\], a list with one for each head, or"):
        Decay(retain=retain)
