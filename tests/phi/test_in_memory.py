"""Every map in a memory: the engine that `auto` picks agrees with the token loop."""

from __future__ import annotations

import pytest
import torch

from hecate import Gates, MemoryConfig, memory_scan
from hecate.phi import ArcCosine
from tests.memories import close, same_state
from tests.phi.examples import examples, named

ALL = [*examples(), ArcCosine(order=0, num_features=8)]


@pytest.mark.parametrize("instance", ALL, ids=named)
@pytest.mark.parametrize("bias", ["dot", "l2"])
def test_engines_agree(instance, bias):
    # Normalised features keep a delta rule stable; a sum normaliser needs a kernel >= 0.
    config = MemoryConfig(
        bias=bias,
        retention="decay",
        feature_map=instance,
        key_norm="l2",
        normalizer="sum" if bias == "dot" and instance.non_negative else "none",
        state_dtype="float64",
    )
    source = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 9, 2, d, generator=source) for d in (5, 5, 3))
    gates = Gates(0.5 * torch.rand(2, 9, 2, generator=source), torch.full((2, 9, 2), 0.9))
    params = instance.init(5, heads=2, generator=source, dtype=torch.float64)
    y, state = memory_scan(config, q, k, v, gates, phi_params=params)
    expected, final = memory_scan(config, q, k, v, gates, phi_params=params, engine="sequential")
    assert bool(y.isfinite().all()) and float(y.norm()) > 1e-3
    close(y, expected, 1e-10, "outputs")
    same_state(state, final, 1e-10)
