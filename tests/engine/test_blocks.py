"""Windows, Gram matrices, cascades and factors: what the fast engines give is what the token loop gives."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch

from hecate import MemoryConfig, phi
from hecate.algorithm import DeepMomentum, NewtonSchulz, Omega
from hecate.engine import Plan, choose, verdicts
from hecate.engine.window import blocks, chunks
from hecate.errors import ConfigError
from hecate.phi import polynomial
from hecate.testing import check_vjp
from tests.engine.test_properties import in_pieces, whole
from tests.memories import case_of, config_of

QUADRATIC = {"kind": "polynomial", "degree": 2}
GATED = {"retention": "decay", "decay_order": "before_gradient"}


def omega(**fields: Any) -> dict[str, Any]:
    return {"algorithm": {"kind": "omega", "lr": 0.3, "window": 3, "decay": 0.9, **fields}}


LINEAR = {
    "omeganet": {**omega(), "feature_map": QUADRATIC, "key_norm": "l2", "retention": "decay"},
    "momentum": {**omega(inner="momentum"), **GATED, "feature_map": {"kind": "polynomial", "degree": 3}},
    "nesterov": {
        **omega(inner={"kind": "momentum", "nesterov": True}),
        "feature_map": "taylor",
        "key_norm": "l2",
        "query_scale": "key_dim",
        "read": "before",
    },
    "huber": {**omega(), **GATED, "bias": "huber", "feature_map": "elu", "step": "normalized"},
    "dot": {**omega(), "bias": "dot", "feature_map": {**QUADRATIC, "form": "raw"}, "retention": "decay"},
}
MIXED = {
    "atlas": {
        **omega(inner="newton_schulz"), "feature_map": QUADRATIC, "key_norm": "l2", "retention": "decay"
    },
    "decayed first": {
        **omega(inner={"kind": "newton_schulz", "rescale": True, "polynomial": "cubic", "steps": 3}),
        **GATED,
        "read": "before",
    },
    "without a window": {"algorithm": "newton_schulz", "bias": "dot", "feature_map": "elu"},
}  # fmt: skip
TWO = {"kind": "two_pass", "codes": 2}
CASCADES = {
    "silu": {"structure": TWO, "retention": "decay"},
    "softmax": {"structure": {**TWO, "link": "softmax"}, **GATED, "algorithm": "momentum"},
    "identity": {"structure": {**TWO, "link": "identity"}, "bias": "huber", "read": "before"},
}
DEEP = {"algorithm": {"kind": "deep_momentum", "width": 3}}
FACTORED = {
    "l2": {**DEEP, "retention": "decay", "key_norm": "l2"},
    "huber": {**DEEP, **GATED, "bias": "huber", "read": "before", "feature_map": "elu"},
    "dot": {**DEEP, "bias": "dot", "step": "normalized"},
}
ENGINES = {"window": {**LINEAR, **MIXED}, "cascade": CASCADES, "factored": FACTORED}
CASES = [(name, fields) for name, cases in ENGINES.items() for fields in cases.values()]
IDS = [f"{name}-{case}" for name, cases in ENGINES.items() for case in cases]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """So that a few tokens are several blocks, and several spans of a block."""
    monkeypatch.setattr(blocks, "SIZE", 4)
    monkeypatch.setattr(blocks, "AGAIN", 3)
    monkeypatch.setattr(chunks, "SIZE", 4)


@pytest.mark.spec("ENG-WIN-I1", "ENG-WIN-D1", "ENG-WIN-D2", "ENG-WIN-V1", "ENG-WIN-V2", "ENG-CASC-D1", "ENG-CASC-I1")
@pytest.mark.spec("ENG-FACT-D1", "ENG-FACT-V1", "ENG-FACT-I1")
@pytest.mark.parametrize("masks", [False, True], ids=["", "masks"])
@pytest.mark.parametrize(("engine", "fields"), CASES, ids=IDS)
def test_equals_the_token_loop(engine, fields, masks):
    wide = 4 if "structure" in fields else 3
    case = case_of(config_of(**fields), batch=1, length=13, d=wide, masks=masks, seed=3)
    own, rtol = case.config.algorithm, 1e-10
    # Five quintic iterations magnify what is nearly singular by 3.4445^5.
    if isinstance(getattr(own, "inner", own), NewtonSchulz):
        rtol = 1e-8
    in_pieces(case, [6], engine=engine).equals(whole(case, engine="sequential"), rtol)


CHUNKS = {**LINEAR, **MIXED, "mixed huber": {**omega(inner="newton_schulz"), "bias": "huber"}}


@pytest.mark.spec("ENG-WIN-I1", "ENG-WIN-D3", "ENG-WIN-D4", "ENG-WIN-V3", "ALG-OMEGA-D2")
@pytest.mark.parametrize("masks", [False, True], ids=["", "masks"])
@pytest.mark.parametrize("commit", ["token", "chunk"])
@pytest.mark.parametrize("name", CHUNKS)
def test_chunks_equal_the_token_loop(name, commit, masks):
    """Chunks longer than a span, cut where they are not full."""
    case = case_of(config_of(**CHUNKS[name], chunk=6, commit=commit), batch=1, length=13, masks=masks, seed=3)
    rtol = 1e-8 if name in ("atlas", "mixed huber") else 1e-10
    in_pieces(case, [2, 7], engine="window").equals(whole(case, engine="sequential"), rtol)


# What algorithms and maps tell of themselves.


@pytest.mark.spec("ALG-NS-I3")
@pytest.mark.parametrize("fields", [{}, {"polynomial": "cubic", "steps": 3, "rescale": True}])
def test_newton_schulz_by_its_gram_matrix(fields):
    own = NewtonSchulz(**fields)
    s = torch.randn(2, 3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    block = own.gram_form().gain((3, 5))
    (gain,), _ = block.apply((s @ s.mT,))
    one = torch.ones(2, dtype=torch.float64)
    torch.testing.assert_close(-gain @ s, own.direction(s, one, one, 0 * s)[0])
    check_vjp(block, [s @ s.mT], rtol=1e-9, difference_rtol=1e-4)


@pytest.mark.spec("ALG-DEEP-I2")
def test_deep_momentum_by_factors():
    own, generator = DeepMomentum(width=3), torch.Generator().manual_seed(0)
    shapes = ((2, 4), (2, 5), (2,), (2,), (2, 3, 5), (2, 5, 3))
    u, p, lr, momentum, *slots = (torch.randn(*s, dtype=torch.float64, generator=generator) for s in shapes)
    block = own.factored_form()
    (left, right, *new), _ = block.apply((u, p, lr, momentum, *slots))
    direction, *true = own.direction(u.unsqueeze(-1) * p.unsqueeze(-2), lr, momentum, *slots)
    for mine, other in zip((left @ right.mT, *new), (direction, *true), strict=True):
        torch.testing.assert_close(mine, other)
    check_vjp(block, [u, p, lr, momentum, *slots])
    assert DeepMomentum(objective="paper").factored_form() is None


@pytest.mark.spec("STR-TWO-D1", "ENG-CASC-D1")
@pytest.mark.parametrize("link", ["silu", "softmax", "identity"])
def test_the_loss_behind_a_link(link):
    form = config_of(structure={**TWO, "link": link}).structure.cascade()
    z, a, g = torch.randn(3, 2, 4, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    loss = 0.5 * (form.link.forward(z)[0][0] - a).square().sum()
    (true,) = torch.autograd.grad(loss, z, create_graph=True)
    torch.testing.assert_close(form.grad(z, a), true)
    for mine, other in zip(form.grad_vjp(z, a, g), torch.autograd.grad(true, (z, a), g), strict=True):
        torch.testing.assert_close(mine, other)
    check_vjp(form.link, [z.detach()])


@pytest.mark.spec("PHI-SERIES-D1")
@pytest.mark.parametrize("d", [1, 3, 19])
@pytest.mark.parametrize("own", [phi.Polynomial(degree=2), phi.Taylor(), phi.Polynomial(degree=2, form="raw")])
def test_features_of_a_power_series(own, d):
    x, y = torch.randn(2, 4, d, dtype=torch.float64, generator=torch.Generator().manual_seed(d))
    form = own.power_form(d)
    weights = torch.sin(torch.arange(2.0 * own.output_dim(d), dtype=torch.float64)).view(2, -1)
    kernel = form.kernel((x * y).sum(-1))
    torch.testing.assert_close(kernel, (own(x) * own(y)).sum(-1))
    torch.testing.assert_close(kernel, (form.features(x) * form.features(y)).sum(-1))
    torch.testing.assert_close(own(x) @ weights.mT, form.features(x) @ form.spread(weights).mT)
    torch.testing.assert_close(form.gathered(form.spread(weights)), weights)
    out = torch.empty(4, form.width, dtype=torch.float64)
    assert form.features(x, out) is out
    torch.testing.assert_close(out, form.features(x))
    x = x.requires_grad_()
    g = torch.cos(out * 7)
    torch.testing.assert_close(form.pullback(x.detach(), g), torch.autograd.grad(form.features(x), x, g)[0])


@pytest.mark.spec("PHI-SERIES-D1", "ENG-COMPILE-I1")
def test_what_a_power_series_keeps_is_made_within_a_graph_and_whatever_the_default_device():
    own = phi.Taylor()

    def features(x):
        return own.power_form(5).features(x)

    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(5))
    polynomial._places.cache_clear()
    found = torch.compile(features, backend="eager", fullgraph=True)(x)
    with torch.device("meta"):
        torch.testing.assert_close(found, features(x))


def test_features_of_a_subclass_with_its_own_formula():
    class Other(phi.Taylor):
        kind: Literal["blocks_test_taylor"] = "blocks_test_taylor"

        def forward(self, x, params):
            return super().forward(2 * x, params)

    try:
        assert Other().power_form(3) is None and phi.Taylor().power_form(3) is not None
    finally:
        phi.FeatureMap.variants().pop("blocks_test_taylor", None)


# Refusals.


@pytest.mark.spec("ENG-WIN-I2")
@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"algorithm": "omega", "commit": "chunk"}, "commit='chunk' with chunk=1"),
        ({"algorithm": "omega", "structure": "vector"}, "structure 'vector'"),
        ({"algorithm": "omega", "retention": "sphere"}, "retention 'sphere'"),
        ({"algorithm": {"kind": "omega", "inner": "ftrl"}}, "algorithm 'ftrl'"),
        ({"algorithm": "newton_schulz", "bias": "huber"}, "bias 'huber'"),
        ({"algorithm": "rls"}, "algorithm 'rls'"),
        ({"algorithm": "momentum"}, "looks at its own token alone"),
    ],
)
def test_refuses_by_name(fields, reason):
    said = verdicts(Plan.sketch(MemoryConfig(**fields)))["window"]
    assert reason in said
    with pytest.raises(ConfigError, match="cannot run this memory exactly"):
        choose(Plan.sketch(MemoryConfig(**fields)), "window")


@pytest.mark.spec("ENG-WIN-I2")
def test_refuses_gates_and_sizes_that_kernels_do_not_know():
    wide = case_of(config_of(**LINEAR["dot"]), channels=True)
    with pytest.raises(ConfigError, match="retain per phi channel"):
        wide.scan(engine="window")
    wide.scan()
    case = case_of(config_of(**LINEAR["omeganet"], state_dtype="float32"), dtype=torch.float32)
    far = case._replace(k=1e7 * case.k)
    with pytest.raises(ConfigError, match="leave the range"):
        far.scan(engine="window")
    assert far.scan()[0].isfinite().all()


@pytest.mark.spec("ENG-WIN-D1")
def test_auto_takes_it():
    config = MemoryConfig.model_validate("omeganet")
    assert choose(Plan.sketch(config, length=64)).name == "window"
    for commit, said in (("token", "a step per token"), ("chunk", "one step per chunk")):
        call = Plan.sketch(config.model_copy(update={"chunk": 64, "commit": commit}), length=64)
        assert choose(call).name == "window" and said in verdicts(call)["window"]
    assert choose(Plan.sketch(MemoryConfig.model_validate("trellis"), length=64)).name == "cascade"
    assert Omega(window=3, decay=0.5).window_form().weights == (1.0, 0.5, 0.25)


def test_constants_are_as_precise_under_a_default_of_float32():
    from hecate.phi import polynomial as series

    series._places.cache_clear()
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        factor = next(item for item in series._places(3) if item.dtype == torch.float64)
    finally:
        torch.set_default_dtype(before)
        series._places.cache_clear()
    assert set(factor.tolist()) == {1.0, 0.5**0.5}
