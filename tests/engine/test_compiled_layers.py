"""The engine compiled_layers against the token loop, and where it must leave the work to others."""

from __future__ import annotations

from typing import Literal

import pytest
import torch

from hecate import MemoryConfig, memory_scan
from hecate.engine import Engine, Plan, choose
from hecate.errors import ConfigError
from hecate.retention import KL, Retention
from tests.engine.test_properties import in_pieces, whole
from tests.memories import Case, case_of, close, config_of

numba = pytest.importorskip("numba")

ENGINE = Engine.registry["compiled_layers"]
MLP = {"kind": "mlp", "layers": 2, "expansion": 2}
MIRAS = {**MLP, "residual": True, "norm": "layer", "norm_eps": 1e-2}


class Sorted(KL):
    """sorted: weights that no kernel knows."""

    kind: Literal["layers_test_sorted"] = "layers_test_sorted"

    def weights(self, carried):
        return carried.sort(-1).values


del Retention._registry["layers_test_sorted"]
RULES = {
    "titans": {"structure": {**MLP, "activation": "silu"}, "retention": "decay", "algorithm": "momentum"},
    "early": {"structure": {**MLP, "activation": "tanh", "bias": True}, "retention": "decay", "algorithm": "momentum"}
    | {"decay_order": "before_gradient", "read": "before", "bias": {"kind": "lp", "p": 3.0}},
    "deep": {"structure": {"kind": "mlp", "layers": 3, "activation": "relu"}, "bias": {"kind": "huber", "delta": 0.7}},
    "yaad": {"structure": MIRAS, "retention": {"kind": "l2", "decoupled": True}, "decay_order": "before_gradient"}
    | {"bias": {"kind": "yaad", "delta": 0.7, "eps": 0.1}},
    "memora": {"structure": {**MIRAS, "bias": True}, "retention": {"kind": "kl", "scale": 3.0}},
    "told": {"structure": MIRAS, "retention": {"kind": "kl", "scale": 3.0}, "bias": "dot", "read": "before"},
    "moneta": {"structure": MIRAS, "retention": {"kind": "lq", "eps": 0.1}, "bias": {"kind": "lp", "p": 3.0}},
    "moving": {"structure": MLP, "retention": {"kind": "lq", "eps": 0.01}, "algorithm": "momentum", "read": "before"},
    "gated": {"structure": "gated_mlp", "retention": "decay", "algorithm": "momentum"},
    "classes": {"structure": MLP, "bias": {"kind": "kl", "temperature": 0.7}, "retention": "decay"},
    "matrix": {"structure": "matrix", "retention": {"kind": "kl", "scale": 3.0}, "bias": "l1"},
    "signed": {"structure": MIRAS, "retention": {"kind": "kl", "signed": True}, "bias": "huber"},
    "capped": {"structure": MLP, "retention": {"kind": "norm_cap", "norm": 0.7, "retention": "kl"}},
    "cubes": {"structure": MLP, "retention": {"kind": "lq", "q": 3.0, "eps": 0.1}, "bias": {"kind": "lp", "p": 3.0}},
}


@pytest.mark.spec("ENG-LAYERS-D1", "ENG-LAYERS-I1", "ENG-LAYERS-V1", "ENG-LAYERS-D3")
@pytest.mark.parametrize("name", RULES)
def test_against_the_token_loop(name):
    """Outputs, final state and all gradients, in whole and in pieces, with masks and without."""
    config = config_of(**RULES[name])
    assert ENGINE.refuses(config) is None
    for length, d, masks in ((0, 3, False), (1, 3, False), (9, 3, False), (23, 5, True)):
        case = case_of(config, length=length, d=d, width=d, masks=masks, ends=0.2)
        expected = whole(case, engine="sequential")
        whole(case, engine="compiled_layers", autodiff="torch").equals(expected)
        if masks:
            whole(case, engine="compiled_layers", autodiff="tape").equals(expected)
            in_pieces(case, [4, 5, 17], engine="compiled_layers").equals(expected)


@pytest.mark.spec("ENG-LAYERS-I1")
@pytest.mark.parametrize("d", [5, 6, 7, 27])
def test_rows_that_are_alike_below_a_norm(d):
    """A state of 0 behind this link makes rows alike: their mean is rounded, by each engine otherwise."""
    structure = {"kind": "mlp", "layers": 1, "residual": True, "norm": "layer", "norm_eps": 1e-2}
    case = case_of(config_of(structure=structure, retention={"kind": "kl", "scale": 3.0}), d=d, width=d, length=9)
    forgets = torch.arange(9).view(1, 9, 1) == 4
    lr, retain = (torch.where(forgets, 0.0, gate) for gate in case.gates[:2])
    case = case._replace(gates=case.gates._replace(lr=lr, retain=retain)).fresh()
    whole(case, engine="compiled_layers", autodiff="torch").equals(whole(case, engine="sequential"))


@pytest.mark.spec("ENG-LAYERS-I1")
@pytest.mark.parametrize(("d", "width"), [(1, 1), (1, 9), (8, 4), (17, 16)])
def test_widths_around_whole_vectors(d, width):
    """Numbers beyond a weight's own stay 0, whatever link and bias do to them."""
    for fields in (RULES["titans"], {**RULES["memora"], "structure": MLP}, {**RULES["moneta"], "structure": MLP}):
        case = case_of(config_of(**fields), d=d, width=width, length=6, masks=True)
        whole(case, engine="compiled_layers").equals(whole(case, engine="sequential"))


@pytest.mark.spec("ENG-LAYERS-V2")
def test_second_derivatives_go_through_the_token_loop():
    def twice(engine: str) -> torch.Tensor:
        case = case_of(config_of(**RULES["titans"]), d=3, width=3, length=5).fresh()
        y, _ = case.scan(engine=engine)
        (g,) = torch.autograd.grad(y.square().sum(), case.k, create_graph=True)
        return torch.autograd.grad(g.square().sum(), case.v)[0]

    close(twice("compiled_layers"), twice("sequential"), 1e-9, "second derivative")


@pytest.mark.spec("ENG-LAYERS-D4")
@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"structure": MLP, "chunk": 4}, "remembered state"),
        ({"structure": "slots"}, "not made of linear layers"),
        ({"structure": MLP, "algorithm": {"kind": "momentum", "nesterov": True}}, "'momentum' as configured"),
        ({"structure": MLP, "algorithm": "newton_schulz"}, "'newton_schulz' as configured"),
        ({"structure": MLP, "retention": "elastic_net"}, "retention 'elastic_net'"),
        ({"structure": MLP, "retention": "l2"}, "retention 'l2'"),
        ({"structure": MLP, "retention": Sorted()}, "retention 'layers_test_sorted' .*: aten.sort has no kernel form"),
        ({"structure": MLP, "retention": "kl", "decay_order": "before_gradient"}, "ahead of the gradient"),
        ({"structure": MLP, "retention": "kl", "algorithm": "momentum"}, "without their mean"),
    ],
    ids=lambda given: str(given) if isinstance(given, str) else "",
)
def test_refusals_name_the_reason(fields, reason):
    config = MemoryConfig(**fields)
    with pytest.raises(ConfigError, match=reason):
        choose(Plan.sketch(config, length=64), "compiled_layers")


@pytest.mark.spec("ENG-LAYERS-D4")
def test_a_call_may_be_unfit():
    config = MemoryConfig(retention="kl")
    assert "per phi channel" in (ENGINE.unfit(Plan.sketch(config, channels=True)) or "")
    assert "on cuda" in (ENGINE.unfit(Plan.sketch(config, device="cuda")) or "")
    assert "float16" in (ENGINE.unfit(Plan.sketch(config, dtype=torch.float16)) or "")
    assert "torch.compile" in (ENGINE.unable(Plan.sketch(config, traced=True)) or "")


@pytest.mark.slow
@pytest.mark.spec("ENG-LAYERS-D2")
@pytest.mark.parametrize("name", [name for name in RULES if name not in ("early", "moving")])  # which run away here
def test_float32_is_as_near_as_the_token_loop(name):
    """Polynomials for exp, erf and roots: both err from float64 by a few eps times the number of tokens."""
    config = config_of(**RULES[name])
    case = case_of(config, d=16, width=16, length=10)
    true, _ = case.scan(engine="sequential")

    def error(engine: str) -> float:
        leaves = [item.float() for item in case.leaves]
        own = Case(config.model_copy(update={"state_dtype": "float32"}), *case[1:]).with_leaves(leaves)
        y, _ = own.scan(engine=engine)
        return float((y.double() - true).norm() / true.norm())

    eps = torch.finfo(torch.float32).eps
    assert error("compiled_layers") <= 2 * error("sequential") + 10 * eps


@pytest.mark.spec("ENG-LAYERS-V1")
def test_a_norm_of_nearly_equal_numbers_has_the_gradient_of_autograd():
    """A cotangent of the norm has no mean, which rows of weights that are nearly equal would make large."""
    draws = torch.Generator().manual_seed(0)
    q, k, v, w_1 = (torch.randn(1, 32, 1, 32, generator=draws, dtype=torch.float32) for _ in range(4))
    w_2 = 1 + 1e-3 * torch.randn(1, 32, 32, generator=draws, dtype=torch.float32)
    config = {"structure": {"kind": "mlp", "expansion": 1, "norm": "layer"}, "algorithm": {"kind": "gd", "lr": 1e-4}}

    def gradient(dtype: torch.dtype, engine: str = "sequential", autodiff: str = "torch") -> torch.Tensor:
        queries, *others = (item.to(dtype).requires_grad_() for item in (q, k, v, w_1[:, :, 0], w_2))
        own = MemoryConfig.model_validate({**config, "state_dtype": str(dtype).removeprefix("torch.")})
        y, _ = memory_scan(
            own, queries, *others[:2], initial=dict(zip(("w1", "w2"), others[2:], strict=True)),
            engine=engine, autodiff=autodiff,
        )  # fmt: skip
        return torch.autograd.grad((y * others[1].detach()).sum(), queries)[0].double()

    true = gradient(torch.float64)
    allowed = 4 * float((gradient(torch.float32) - true).norm())
    for how in (("sequential", "tape"), ("compiled_layers", "auto")):
        assert float((gradient(torch.float32, *how) - true).norm()) < allowed, how
