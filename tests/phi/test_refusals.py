"""What feature maps refuse: fields that do not go together, widths beyond the limit, inputs that do not fit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch

from hecate import phi
from hecate.errors import ConfigError, ShapeError
from tests.phi.random_common import F64, gaussian, seeded


class Square(phi.FeatureMap):
    """square_of_refusals: phi(x) = x^2, an even map."""

    kind: Literal["square_of_refusals"] = "square_of_refusals"

    def traits(self) -> phi.Traits:
        return phi.Traits(parity="even")


PHASES, MACLAURIN, COEFFICIENTS = phi.RandomFourier, phi.RandomMaclaurin, "left out when coefficients are given, got"
# A map, fields, and what the sentence says from its path on.
FIELDS: list[tuple[type[phi.FeatureMap], dict[str, Any], str]] = [
    (phi.Polynomial, {"degree": 3, "form": "raw"}, "degree: must be 2 when form is 'raw', got 3"),
    (phi.Polynomial, {"degree": 2, "form": "raw", "coefficients": "learned"}, "coefficients: .*'raw', got 'learned'"),
    (phi.Polynomial, {"degree": 0}, "degree"),
    (phi.MLP, {"d_hidden": 3, "d_phi": 4}, "d_phi: .*residual"),
    (phi.LeakyReLUSquared, {"slope": 1.0}, "slope"),
    (phi.Softmax, {"temperature": 0.0}, "temperature"),
    (phi.T2R, {"d_phi": 0}, "d_phi"),
    (phi.Rebased, {"eps": 0.0}, "eps"),
    (phi.Normalise, {}, "inner"),
    (phi.Normalise, {"inner": "identity", "norm": "sum"}, "inner: must be non-negative when norm is 'sum'"),
    (phi.Normalise, {"inner": "identity", "eps": 0.0}, "eps"),
    (phi.OddLift, {"inner": Square()}, "inner: must not be an even map"),
    (phi.TensorProduct, {"maps": ["elu"]}, "maps"),
    (phi.Compose, {"maps": []}, "maps"),
    (phi.Concat, {"maps": ["elu", {"kind": "odd_lift", "inner": "el"}]}, r"maps\[1\]\.inner: unknown .* kind 'el'"),
    (phi.CosFormer, {"max_length": 0}, "max_length"),
    (PHASES, {"d_phi": 7, "form": "paired"}, "d_phi: .*use 8 or form 'phased'"),
    (PHASES, {"d_phi": 0}, "d_phi: .*must be > 0"),
    (PHASES, {"d_phi": 4, "sigma": 0.0}, "sigma: .*must be > 0"),
    (PHASES, {"d_phi": True}, "d_phi: .*integer"),
    (phi.Favor, {"num_features": 3, "variant": "hyperbolic"}, "num_features: .*use 4"),
    (phi.Favor, {"num_features": 3, "variant": "trigonometric"}, "num_features: .*use 4"),
    (phi.Favor, {"variant": "cosine"}, "variant: .*'trigonometric'"),
    (phi.Favor, {"norms": "sphere"}, "norms: .*'chi' or 'sqrt'"),
    (phi.PerformerReLU, {"kernel_epsilon": -1e-3}, "kernel_epsilon: .*must be >= 0"),
    (phi.ArcCosine, {"order": 3}, "order: .*0, 1 or 2"),
    (MACLAURIN, {"d_phi": 4, "coefficients": [1.0]}, "coefficients.*beyond a_0"),
    (MACLAURIN, {"d_phi": 4, "coefficients": []}, "coefficients.*beyond a_0"),
    (MACLAURIN, {"d_phi": 4, "coefficients": [0.0, -1.0, 1.0]}, "coefficients.*without a negative one"),
    (MACLAURIN, {"d_phi": 4, "coefficients": [0.0, 1.0], "degree": 1}, f"degree: .*{COEFFICIENTS} 1"),
    (MACLAURIN, {"d_phi": 4, "coefficients": [0.0, 1.0], "series": "binomial"}, f"series: .*{COEFFICIENTS} 'binomial'"),
    (phi.Polysketch, {"sketch": 4, "degree": 6}, "degree: .*power of two from 4 on, got 6"),
    (phi.Polysketch, {"sketch": 4, "degree": 2}, "degree: .*4"),
    (phi.SORF, {"d_phi": 7}, "d_phi: .*multiple of 2"),
    (phi.Nystrom, {"num_centres": 4, "eps": 0.0}, "eps: .*must be > 0"),
    (phi.SLAY, {"eps": 0.0, "m": 4}, "eps"),
    (phi.SLAY, {"nodes": 1, "m": 4}, "nodes"),
    (phi.SLAY, {"m": 0}, "m"),
]


@pytest.mark.spec("PHI-POLY-D2", "PHI-MLP-D2", "PHI-NORM-D2", "PHI-ODD-D2", "PHI-SLAY-D1")
@pytest.mark.parametrize(("made", "fields", "sentence"), FIELDS, ids=lambda x: getattr(x, "__name__", str(x)))
def test_fields_that_do_not_go_together(made, fields, sentence):
    with pytest.raises(ConfigError, match=f"^{sentence}"):
        made(**fields)


WIDE: list[tuple[phi.FeatureMap, int, str]] = [
    (phi.Polynomial(degree=3), 1024, r"degree: gives d_phi = [\d,]+ .* 65,536.*lower degree"),
    (phi.Polynomial(degree=2, form="raw"), 256, r"degree: gives d_phi = [\d,]+ .* 65,536.*lower degree"),
    (phi.Taylor(), 512, r"order: gives d_phi = [\d,]+ .* 65,536.*lower order"),
    (phi.Taylor(order=9), 16, r"order: gives d_phi = [\d,]+ .* 65,536.*lower order"),
    (phi.Rebased(), 500, "max_d_phi: .*65,536; put a narrower"),
    (phi.Rebased(max_d_phi=9), 500, "max_d_phi: gives d_phi = 125,250"),
    (phi.TensorProduct(maps=("identity", "elu")), 500, "maps: .*take fewer or narrower maps, put"),
    (phi.Polysketch(sketch=500), 500, "sketch: .*lower sketch, put"),
]


@pytest.mark.spec("PHI-POLY-D4")
@pytest.mark.parametrize(("made", "width", "sentence"), WIDE, ids=str)
def test_a_width_beyond_the_limit_is_refused_without_allocating(made, width, sentence):
    calls = (made.output_dim, made.init, lambda d: made(torch.zeros(1, d)))
    for call in calls[:2] if made.is_random else calls:  # a random map looks for its draws first
        with pytest.raises(ConfigError, match=f"^{sentence}"):
            call(width)
    assert made.model_copy(update={"max_d_phi": 10**10}).output_dim(width) > 65_536


class Elsewhere:
    device = torch.device("cuda")


POSITIONED, FAVOR, X = phi.CosFormer(max_length=8), phi.Favor(num_features=4), gaussian(3, 4)
CALLS: list[tuple[type[Exception], str, Callable[[], Any]]] = [
    (ConfigError, "^nu: must be at most 2 d - 1 = 5 .* got 6", lambda: phi.DPFP(nu=6).output_dim(3)),
    (ConfigError, "lower m, put a narrower `linear` before it", lambda: phi.SLAY(m=4).output_dim(64)),
    (ConfigError, r"takes the positions 0\.\.8, got", lambda: POSITIONED(X, position=torch.tensor([0, 4, 9]))),
    (ConfigError, r"takes the positions 0\.\.8, got", lambda: POSITIONED(X, position=torch.tensor([-1, 0, 1]))),
    (ConfigError, "'cosformer' needs every token's position", lambda: POSITIONED(X)),
    (ShapeError, r"broadcast to \[3\]", lambda: POSITIONED(X, position=torch.arange(4))),
    (ShapeError, r"broadcast to \[3\]", lambda: POSITIONED(X, position=torch.zeros(1, 3, dtype=torch.int64))),
    (ShapeError, r"broadcast to \[3\]", lambda: POSITIONED(X, position=torch.zeros(3))),
    (ConfigError, r"needs its draw 'w'.*pass params=feature_map.init", lambda: FAVOR(gaussian(2, 3))),
    (ShapeError, "expected inputs of width 3", lambda: FAVOR(gaussian(2, 5), FAVOR.init(3, dtype=F64))),
    (ShapeError, "at least 1, got 0", lambda: FAVOR.init(0)),
    (ConfigError, "pass a CPU", lambda: FAVOR.init(3, generator=Elsewhere())),
    (ConfigError, "'elu' has nothing to redraw", lambda: phi.ELU().redraw(phi.ELU().init(3), seeded())),
]


@pytest.mark.spec("PHI-COSFORMER-I1", "PHI-FAMILY-D4", "PHI-DPFP-D2")
@pytest.mark.parametrize(("kind", "sentence", "call"), CALLS, ids=[f"{at}" for at in range(len(CALLS))])
def test_what_does_not_fit(kind, sentence, call):
    with pytest.raises(kind, match=sentence):
        call()
