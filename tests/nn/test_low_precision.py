"""What stands around a memory computes in float32 in a layer of low precision and under autocast, as a scan does."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from torch.utils import _pytree as pytree

from hecate import named_rule, phi, states
from hecate.cms import SelfReferential
from hecate.nn import Memory
from hecate.nn.blocks import rms_norm
from hecate.nn.rule import features_of
from hecate.rule import RULES, MemoryConfig
from tests.nn.layers import leaves, seeded
from tests.registries import restore_registries

GATED = [name for name in RULES if not named_rule(name).gating.plain]
MAPS = ("dpfp", {"kind": "random_fourier", "d_phi": 8}, "hedgehog")


@pytest.fixture(autouse=True)
def single():
    torch.set_default_dtype(torch.float32)


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=seeded(1))


def alike_under_autocast(function, *given) -> None:
    with torch.no_grad():
        plain = leaves(function(*given))
        with torch.autocast("cpu", torch.bfloat16):
            cast = leaves(function(*given))
    assert plain and all(map(torch.equal, plain, cast))


@pytest.mark.spec("NN-MEM-I12", "STATE-TO-D1")
@pytest.mark.parametrize("rule", GATED)
def test_a_gating_computes_and_keeps_its_state_in_float32(rule):
    layer, seen = Memory(8, 2, rule, generator=seeded()), []
    hook = layer.gating.register_forward_pre_hook(lambda _, given: seen.append(given))
    layer(draw(2, 5, 8))
    hook.remove()
    alike_under_autocast(layer.gating, *seen[0])
    x, q, k, v, gates, _, masks = pytree.tree_map_only(
        torch.Tensor, lambda item: item.bfloat16().repeat_interleave(60, 1), seen[0]
    )
    fresh = {n: torch.zeros(2, *s) for n, s in layer.gating.gating.state_shapes(layer.gating.sizes).items()}
    counted, told = (layer.gating(x, q, k, v, gates, before, masks) for before in (None, fresh))
    assert all(map(torch.equal, leaves(counted), leaves(told)))
    kept = [layer.bfloat16()(draw(2, length, 8).bfloat16())[1] for length in (0, 1, 5)]
    assert {item.dtype for item in leaves([state.gating for state in kept])} <= {torch.float32}
    states.stack([state._replace(conv=None) for state in kept])


@pytest.mark.spec("CMS-TNT-D2", "NN-MEM-I12")
@pytest.mark.parametrize("feature_map", MAPS)
def test_projected_queries_are_made_of_features_as_a_scan_has_them(feature_map):
    config = MemoryConfig.model_validate({"feature_map": feature_map, "key_norm": "l2", "step": "normalized"})
    params, (q, k) = config.feature_map.init(8, heads=2, generator=seeded()), draw(2, 2, 5, 2, 8)
    alike_under_autocast(features_of, config, q, k, params)
    low = features_of(config, q.bfloat16(), k.bfloat16(), params)
    for rough, wide in zip(low, features_of(config, q.bfloat16().float(), k.bfloat16().float(), params), strict=True):
        assert rough.dtype == torch.float32 and torch.allclose(rough, wide, rtol=1e-5, atol=1e-6)


def test_a_map_of_ones_own_is_seen_by_projected_queries_without_autocast(monkeypatch):
    restore_registries(monkeypatch)

    class Turned(phi.FeatureMap):
        """turned: phi(x) = x W."""

        kind: Literal["turned"] = "turned"

        def features(self, x: torch.Tensor, params: phi.Params) -> torch.Tensor:
            return x @ torch.linspace(-1, 1, 64).view(8, 8).to(x)

    config = MemoryConfig(feature_map=Turned())
    alike_under_autocast(features_of, config, *draw(2, 2, 5, 2, 8), {"learned": {}, "frozen": {}})


@pytest.mark.spec("SELF-LAYER-I2", "NN-MEM-I12")
@pytest.mark.parametrize("feature_map", MAPS)
def test_boxes_of_a_self_referential_memory_are_asked_in_float32(feature_map):
    rule = {"retention": "decay", "feature_map": feature_map, "key_norm": "l2"}
    layer = SelfReferential(8, 2, {"memory": rule}, generator=seeded())
    asked, heads = [], draw(2, 5, 2, 4)
    layer.boxes.read_static = lambda phi, read=layer.boxes.read_static: asked.append(phi) or read(phi)
    hook = layer.into.register_forward_hook(lambda *_: heads.flatten(2))  # the projections are autocast's
    layer.conv, layer.read_out = None, lambda x, y: y
    alike_under_autocast(lambda: (layer(draw(2, 5, 8)), asked.pop()))
    hook.remove()
    layer.bfloat16()(draw(2, 5, 8).bfloat16())
    assert asked.pop().dtype == torch.float32


@pytest.mark.spec("NN-MEM-D2")
@pytest.mark.parametrize("size", [1.0, 1e-4, 1e-5, 0.0])
def test_small_rows_of_float16_are_normalised_with_gradients_as_without(size):
    x = (size * draw(3, 6)).half()
    y = rms_norm(x.requires_grad_(), torch.ones(6).half())
    assert torch.equal(y, rms_norm(x.detach(), torch.ones(6).half()))
