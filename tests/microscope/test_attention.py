"""Implicit attention: exact, refused where there is none, and equal to closed forms."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import pytest
import torch

from hecate.algorithm import FTRL, GD, RLS, Algorithm, Omega
from hecate.bias import L2, Bias
from hecate.errors import ConfigError
from hecate.microscope import implicit_attention, nonlinearity
from hecate.retention import L2 as Coupled
from hecate.retention import Decay, Retention
from hecate.rule import RULES, Gates
from hecate.structure import MLP, Matrix, Structure, TwoPass
from tests.memories import config_of
from tests.microscope.common import asked_of, second_half
from tests.reference import implicit_attention as reference
from tests.registries import shipped_kinds

# Rules and conventions that keep answers linear in values; every knob and field is among them.
LINEAR: dict[str, dict[str, Any]] = {
    "dot": {"bias": "dot"},
    "lp 2": {"bias": {"kind": "lp", "p": 2.0}},
    "robust 0": {"bias": {"kind": "robust", "radius": 0.0}},
    "vector": {"structure": "vector"},
    "vector, omega": {"structure": "vector", "algorithm": "omega"},
    "vector, implicit": {"structure": "vector", "algorithm": "implicit"},
    "l2 coupled": {"retention": "l2"},
    "bregman": {"retention": "bregman"},
    "nesterov": {"algorithm": {"kind": "momentum", "nesterov": True}, "retention": "decay"},
    "implicit": {"algorithm": "implicit"},
    "omega of momentum": {"algorithm": {"kind": "omega", "inner": "momentum"}},
    "rls": {"algorithm": {"kind": "rls", "discount": 0.9}},
    "rls, dot": {"algorithm": "rls", "bias": "dot"},
    "ftrl 0": {"algorithm": {"kind": "ftrl", "l1": 0.0, "l2": 0.3}},
    "chunk": {"chunk": 3, "retention": "decay"},
    "commit": {"chunk": 3, "commit": "chunk", "retention": "decay", "algorithm": "momentum"},
    "commit, rls": {"chunk": 3, "commit": "chunk", "algorithm": "rls"},
    "before": {"read": "before", "retention": "decay"},
    "decay first": {"decay_order": "before_gradient", "retention": "decay"},
    "normalised": {"bias": "dot", "feature_map": "elu", "normalizer": "sum"},
    "normalised delta": {"feature_map": "elu", "normalizer": "sum", "retention": "decay"},
    "scaled": {"query_scale": "key_dim", "key_norm": "l2", "step": "normalized"},
    "positions": {"feature_map": "cosformer", "key_norm": "sum"},
    "parameters": {"feature_map": {"kind": "random_fourier", "d_phi": 4}, "step": "implicit"},
}
TWO_PASS = {
    "structure": {"kind": "two_pass", "codes": 2},
    "feature_map": {"kind": "concat", "maps": ["identity", "identity"]},
    "algorithm": "momentum",
    "chunk": 3,
    "retention": "decay",
}
LINEAR |= {"two_pass, chunk": TWO_PASS, "two_pass, commit": TWO_PASS | {"commit": "chunk"}}
ONE_WRITE = {name: rule.config for name, rule in RULES.items() if rule.config.writes == 1}
NAMED = {name: config for name, config in ONE_WRITE.items() if nonlinearity(config) is None}


def random_scan(fields: Any, **options: Any) -> Any:
    width = options.pop("width", 3)
    config = config_of(**fields) if isinstance(fields, dict) else fields
    return asked_of(config, length=9, width=width, **options)


def agree(asked: Any) -> None:
    attention = implicit_attention(asked)
    y, _ = asked.scan()
    v = asked.v if asked.write_mask is None else asked.v * asked.write_mask[..., None, None]
    assert float(y.abs().max()) > 1e-2
    torch.testing.assert_close(attention.applied(v), y, rtol=1e-10, atol=1e-10)
    above = attention.map.flatten(4).sum(-1) if attention.map.dim() == 5 else attention.map
    assert not above.triu(1).any(), "a token looks ahead"


@pytest.mark.spec("SCOPE-ATT-D1")
@pytest.mark.parametrize("name", [*LINEAR, *NAMED])
def test_map_and_start_are_the_answer(name):
    agree(random_scan((LINEAR | NAMED)[name]))


@pytest.mark.spec("SCOPE-ATT-D1")
@pytest.mark.parametrize("name", LINEAR)
def test_from_a_state_and_under_masks(name):
    agree(random_scan(LINEAR[name], masks=True))
    rest, state = second_half(random_scan(LINEAR[name]))
    agree(rest)
    if state.slots and name != "ftrl 0":  # whose sum cancels: elsewhere slots take part
        lost = rest._replace(state=state._replace(slots={k: 0 * s for k, s in state.slots.items()}))
        assert not torch.allclose(lost.scan()[0], rest.scan()[0])


def test_retain_per_channel():
    agree(asked_of(config_of(retention="decay"), length=9, channels=True))


def test_a_start_per_sequence(generator):
    asked = random_scan(LINEAR["before"])
    start = torch.randn(2, 2, 3, 3, generator=generator)
    agree(asked._replace(initial={"weight": start}))


def test_a_value_that_is_not_written_may_be_anything():
    asked = random_scan(LINEAR["dot"])
    write = torch.ones(asked.v.shape[:2], dtype=torch.bool)
    write[:, 4] = False
    v = asked.v.clone()
    v[:, 4] = torch.nan
    attention = implicit_attention(asked._replace(v=v, write_mask=write))
    assert not attention.map[..., 4].any() and attention.map.isfinite().all()


@pytest.mark.spec("SCOPE-ATT-R1")
@pytest.mark.parametrize("retention", ["none", "decay"])
@pytest.mark.parametrize("bias", ["dot", "l2"])
def test_closed_forms(bias, retention):
    order = "before_gradient" if (bias, retention) == ("l2", "decay") else "with_step"
    config = config_of(bias=bias, retention=retention, decay_order=order)
    asked = asked_of(config, length=12, d=4)._replace(initial=None)
    found = implicit_attention(asked)
    assert not found.start.any()
    form = reference.delta if bias == "l2" else reference.hebbian
    for row in range(2):
        for head in range(2):
            q, k, lr, retain = (
                item[row, :, head].numpy() for item in (asked.q, asked.k, asked.gates.lr, _retain(asked))
            )
            expected = form(q, k, lr, retain)
            np.testing.assert_allclose(found.map[row, head].numpy(), expected, rtol=0, atol=1e-12)


@pytest.mark.spec("SCOPE-ATT-R1")
def test_closed_form_of_the_normaliser():
    config = config_of(bias="dot", feature_map="relu", normalizer="sum")
    asked = asked_of(config, length=12, d=4)
    asked = asked._replace(q=asked.q.abs(), k=asked.k.abs(), initial=None)  # relu keeps them
    found = implicit_attention(asked).map
    q, k, lr = (item[1, :, 0].numpy() for item in (asked.q, asked.k, asked.gates.lr))
    expected = reference.normalised(q, k, lr)
    np.testing.assert_allclose(found[1, 0].numpy(), expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(found.sum(-1), torch.ones(2, 2, 12))


def _retain(asked):
    return torch.ones_like(asked.gates.lr) if asked.gates.retain is None else asked.gates.retain


def additive(config: Any, generator: torch.Generator) -> bool:
    """Whether answers minus the start are additive in values, some of them large."""
    asked = asked_of(config, length=6, width=3, d=3)
    a, b = (5 * torch.randn(asked.v.shape, generator=generator) for _ in range(2))
    y = {name: asked._replace(v=v).scan()[0] for name, v in {"a": a, "b": b, "both": a + b, "none": 0 * a}.items()}
    gap = y["both"] - y["a"] - y["b"] + y["none"]
    return float(gap.abs().max()) < 1e-9 * max(float(item.abs().max()) for item in y.values())


def variants() -> dict[str, Any]:
    """Every variant of every knob in an otherwise linear rule, and every named rule."""
    found: dict[str, Any] = dict(ONE_WRITE)
    families = {"structure": Structure, "bias": Bias, "retention": Retention, "algorithm": Algorithm}
    for field, family in families.items():
        for kind in shipped_kinds(family):
            if kind != "two_pass":  # among the rules
                found[f"{field} {kind}"] = config_of(**{field: kind})
    found |= {name: config_of(**fields) for name, fields in LINEAR.items()}
    # Chunks that end within the few tokens of a test.
    return {name: item.model_copy(update={"chunk": min(item.chunk, 3)}) for name, item in found.items()}


@pytest.mark.spec("SCOPE-ATT-D2")
def test_declarations_are_true(generator):
    configs = variants()
    assert len(configs) > 60
    wrong = [name for name, config in configs.items() if additive(config, generator) != (nonlinearity(config) is None)]
    assert not wrong


@pytest.mark.spec("SCOPE-ATT-D2")
@pytest.mark.parametrize(
    ("fields", "culprit"),
    [
        ({"structure": "mlp"}, "structure 'mlp'"),
        ({"bias": "huber"}, "bias 'huber'"),
        ({"retention": "norm_cap"}, "retention 'norm_cap'"),
        ({"algorithm": "newton_schulz"}, "algorithm 'newton_schulz'"),
        ({"algorithm": "delta_momentum"}, "algorithm 'delta_momentum'"),
        ({"algorithm": {"kind": "omega", "inner": "adaptive"}}, "algorithm 'omega'"),
    ],
    ids=str,
)
def test_refusals_name_the_setting(fields, culprit):
    with pytest.raises(ConfigError, match=f"no attention map: {culprit}"):
        implicit_attention(asked_of(config_of(**fields), width=3))


@pytest.mark.spec("SCOPE-ATT-D2")
def test_a_wrong_declaration_is_found_out(monkeypatch):
    for family in (Bias, Algorithm):
        monkeypatch.setattr(family, "_registry", dict(family._registry))

    class Heir(L2):
        kind: Literal["heir_of_a_test"] = "heir_of_a_test"

        def psi(self, error):
            return error.pow(3)

        def psi_jvp(self, error, tangent):
            return 3 * error.square() * tangent

    class Liar(Heir):
        kind: Literal["liar_of_a_test"] = "liar_of_a_test"

        @property
        def linear(self) -> bool:
            return True

    class Steps(GD):
        kind: Literal["steps_of_a_test"] = "steps_of_a_test"

        def direction(self, grad, lr, momentum, *slots):
            return (-grad.sign(),)

    assert "steps_of_a_test" in (nonlinearity(config_of(algorithm=Steps())) or "")
    assert "heir_of_a_test" in (nonlinearity(config_of(bias=Heir())) or "")
    for of_shipped, culprit in redefined(monkeypatch):
        assert repr(culprit) in (nonlinearity(config_of(**of_shipped)) or "")
    liar = config_of(bias=Liar())
    assert nonlinearity(liar) is None
    with pytest.raises(ConfigError, match="says that it is linear"):
        implicit_attention(asked_of(liar))


def redefined(monkeypatch: pytest.MonkeyPatch) -> list[tuple[dict[str, Any], str]]:
    """Subclasses of shipped kinds that declare a weighted sum, each with one formula of its own."""

    def unread(self: Any, *_: Any) -> Any:  # kernels are printed of a direction, where one can be
        raise RuntimeError("a declaration is read, no formula")

    heirs: list[tuple[dict[str, Any], str]] = []
    for field, shipped, formula, fields in (
        ("structure", TwoPass, "predict", {"codes": 2}),
        ("structure", Matrix, "graph", {}),
        ("structure", MLP, "predict", {}),
        ("retention", Coupled, "start", {}),
        ("retention", Decay, "start", {}),
        ("algorithm", RLS, "gradient", {}),
        ("algorithm", FTRL, "direction", {"l1": 0.0}),
        ("algorithm", Omega, "gradient", {}),
    ):
        monkeypatch.setattr(shipped, "_registry", dict(shipped._registry))
        kind = f"heir_of_{shipped.__name__.lower()}"
        body = {"__annotations__": {"kind": Literal[kind]}, "kind": kind, "__module__": __name__, formula: unread}
        heir = type(shipped)(shipped.__name__, (shipped,), body)(**fields)
        heirs.append(({**(TWO_PASS if shipped is TwoPass else {}), field: heir}, kind))
    return heirs


def test_nothing_read_and_float32():
    asked = asked_of()
    empty = implicit_attention(asked.between(0, 0, None))
    assert empty.map.shape == (2, 2, 0, 0) and empty.start.shape == (2, 2, 0, 2)
    narrow = asked._replace(q=asked.q.float(), k=asked.k.float(), v=asked.v.float(), gates=Gates(lr=0.25))
    assert implicit_attention(narrow).map.dtype == torch.float64
