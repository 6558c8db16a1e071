"""How deep variants lie inside one another, whatever they are written in."""

from __future__ import annotations

import json

import pytest
import torch

from hecate import MemoryConfig, algorithm, phi, retention
from hecate.errors import ConfigError
from hecate.train import OptimizerKind
from hecate.variant import MAX_NESTING, Variant
from tests.clock import within

MAPS = {"compose": "maps", "concat": "maps", "tensor_product": "maps", "odd_lift": "inner"}
MAPS |= {"normalise": "inner"}
CASES = [
    *((phi.FeatureMap, kind, field, "elu") for kind, field in MAPS.items()),
    (retention.Retention, "norm_cap", "retention", "none"),
    (algorithm.Algorithm, "omega", "inner", "gd"),
    (OptimizerKind, "muon", "fallback", "adamw"),
]


def nested(kind: str, field: str, inner, depth: int):
    for _ in range(depth):
        many = {"compose": [inner], "concat": [inner]}.get(kind, [inner, "elu"])
        inner = {"kind": kind, field: many if field == "maps" else inner}
    return inner


def refused(build) -> str:
    with within(1), pytest.raises(ConfigError) as caught:
        build()
    return str(caught.value)


@pytest.mark.spec("VAR-NEST-I1")
@pytest.mark.parametrize(("family", "kind", "field", "leaf"), CASES, ids=[c[1] for c in CASES])
def test_every_family_that_nests_has_an_end(family: type[Variant], kind, field, leaf):
    for depth in (MAX_NESTING + 1, 300, 30_000):
        value = nested(kind, field, leaf, depth)
        text = refused(lambda value=value: family.model_validate(value))
        # Two of them refuse to lie inside themselves at all.
        assert f"more than {MAX_NESTING} variants" in text or kind in ("omega", "muon")
        if depth < 1000:
            refused(lambda value=value: family.model_validate(json.loads(json.dumps(value))))
    if kind not in ("omega", "muon"):
        family.model_validate(nested(kind, field, leaf, MAX_NESTING - 1))


@pytest.mark.spec("VAR-NEST-I1")
@pytest.mark.parametrize("kind", sorted(MAPS))
def test_instances_are_counted_too(kind):
    held = phi.ELU()

    def build() -> None:
        nonlocal held
        for _ in range(MAX_NESTING + 1):
            both = (held, phi.ELU()) if kind == "tensor_product" else (held,)
            field = {MAPS[kind]: both if MAPS[kind] == "maps" else held}
            held = phi.FeatureMap.variants()[kind](**field)

    assert f"more than {MAX_NESTING} variants" in refused(build)
    assert MemoryConfig(feature_map=held).feature_map == held


@pytest.mark.spec("VAR-NEST-I1")
def test_json_texts():
    deep = '{"kind": "odd_lift", "inner": ' * 100_000 + '"elu"' + "}" * 100_000
    assert "nested too deeply" in refused(lambda: phi.OddLift.model_validate_json(deep))
    twice = '{"feature_map": {"kind": "linear", "d_phi": 4, "d_phi": 8}}'
    text = refused(lambda: MemoryConfig.model_validate_json(twice))
    assert text == "d_phi: given twice in one JSON object; keep one"
    for wrong in ("", "{", "nul", b"\xff\xff", '{"chunk": ' + "9" * 5000 + "}", 3):
        assert "not valid JSON" in refused(lambda wrong=wrong: MemoryConfig.model_validate_json(wrong))


def test_values_too_deep_or_too_long_to_show():
    deep: list = []
    for _ in range(100_000):
        deep = [deep]
    assert "chunk" in refused(lambda: MemoryConfig(chunk=deep))
    assert "chunk" in refused(lambda: MemoryConfig(chunk=10**5000))


@pytest.mark.parametrize("odd", ["identity", "tanh", {"kind": "odd_lift", "inner": "elu"}])
def test_an_odd_map_inside_odd_lift_is_evaluated_once(odd, monkeypatch):
    inner = phi.FeatureMap.model_validate(odd)
    lift, calls = phi.OddLift(inner=inner), []
    forward = type(inner).forward
    monkeypatch.setattr(type(inner), "forward", lambda s, x, p: calls.append(s is lift.inner) or forward(s, x, p))
    x = torch.linspace(-2, 2, 12).reshape(3, 4)
    assert torch.equal(lift(x), inner(x)) and sum(calls) == 1
    features, residuals = lift.forward(x, {"learned": {}, "frozen": {}})
    g = torch.ones_like(features)
    assert torch.equal(lift.vjp(residuals, g)[0], inner.vjp(residuals[0], g)[0])
