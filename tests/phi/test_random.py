"""Random feature maps: definitions, draws, seeds, redrawing, bad input."""

import math

import numpy as np
import pytest
import torch

from hecate.phi import (
    SLAY,
    SORF,
    ArcCosine,
    Favor,
    FeatureMap,
    Nystrom,
    PerformerReLU,
    Polysketch,
    RandomFourier,
    RandomMaclaurin,
)
from hecate.phi.random import default_width, haar, projections
from tests.phi.random_common import F64, SIGMAS, deviation, each_map, estimates, gaussian, one_sided_pair, seeded
from tests.reference import random_features as reference
from tests.reference.phi import monomials


def walked(frozen: dict[str, np.ndarray], feature_map: Polysketch) -> list:
    """The mixing matrices in the order in which the recursion of the paper asks for them."""
    width, levels = feature_map.sketch, [np.split(frozen["w"], feature_map.degree // 2, axis=1)]
    levels += [list(frozen[f"v{level}"]) for level in range(1, len(frozen))]
    assert all(matrix.shape[1] == width for level in levels for matrix in level)

    def below(level: int, node: int) -> list:
        own = (levels[level][2 * node], levels[level][2 * node + 1])
        if level == 0:
            return [own]
        return [*below(level - 1, 2 * node), *below(level - 1, 2 * node + 1), own]

    return below(len(levels) - 1, 0)


def reference_features(feature_map: FeatureMap, x: np.ndarray, params) -> np.ndarray:
    frozen = {name: value[0].numpy() for name, value in params["frozen"].items()}
    w = frozen["w"].T
    if isinstance(feature_map, ArcCosine):
        return reference.rectified_powers(x, w, feature_map.order)
    if isinstance(feature_map, Nystrom):
        return reference.nystrom(x, w, feature_map.sigma, feature_map.eps)
    if isinstance(feature_map, SORF):
        rows = reference.sorf_projections(len(x), w, frozen["signs"], feature_map.sigma, feature_map.d_phi // 2)
        return reference.fourier_paired(x, rows)
    if isinstance(feature_map, RandomMaclaurin):
        used = frozen["offset"].reshape(-1, feature_map.d_phi).T == 0
        rows = w.reshape(-1, feature_map.d_phi, len(x)).transpose(1, 0, 2)
        chosen = [list(each[mask]) for each, mask in zip(rows, used, strict=True)]
        return reference.maclaurin(x, chosen, feature_map.probabilities, feature_map.terms)
    if isinstance(feature_map, Polysketch):
        return reference.polysketch(x, feature_map.degree, walked(frozen, feature_map))
    if isinstance(feature_map, RandomFourier):
        if feature_map.form == "paired":
            return reference.fourier_paired(x, w)
        return reference.fourier_phased(x, w, params["frozen"]["b"][0].numpy())
    if isinstance(feature_map, PerformerReLU):
        return reference.relu_features(x, w, feature_map.kernel_epsilon)
    if isinstance(feature_map, SLAY):
        u = x / np.sqrt(x @ x + 1e-12)
        return reference.slay(u, w, feature_map.eps, feature_map.nodes, monomials(u, 2))
    scaled = x * len(x) ** -0.25 if feature_map.scale == "softmax" else x
    return getattr(reference, f"favor_{feature_map.variant}")(scaled, w)


@each_map
@pytest.mark.spec(
    "PHI-RFF-D1", "PHI-RFF-D2", "PHI-FAVOR-D1", "PHI-FAVOR-D2", "PHI-PRELU-D1", "PHI-ARCCOS-D1",
    "PHI-MACL-D1", "PHI-PSKETCH-D1", "PHI-SORF-D1", "PHI-NYSTROM-D1",
)  # fmt: skip
def test_features_match_the_formula(feature_map):
    params = feature_map.init(5, dtype=F64)
    for row in gaussian(20, 5, seed=3):
        got = feature_map(row, params).numpy()
        np.testing.assert_allclose(got, reference_features(feature_map, row.numpy(), params), rtol=1e-12, atol=1e-14)


@pytest.mark.spec("PHI-FAVOR-R1")
def test_the_trigonometric_map_is_paired_fourier_features_times_an_amplitude():
    favor = Favor(num_features=16, variant="trigonometric", scale="none")
    fourier = RandomFourier(d_phi=16, form="paired", orthogonal=True, sigma=1.0)
    params = favor.init(4, dtype=F64)
    assert torch.equal(params["frozen"]["w"], fourier.init(4, dtype=F64)["frozen"]["w"])
    x = gaussian(30, 4)
    amplitude = (x.square().sum(-1, keepdim=True) / 2).exp()
    torch.testing.assert_close(favor(x, params), amplitude * fourier(x, params))


@pytest.mark.spec("PHI-PRELU-R1")
def test_the_reference_scaling_is_another_epsilon():
    d, epsilon = 16, 1e-3
    feature_map = PerformerReLU(num_features=24, kernel_epsilon=epsilon * d**0.25)
    params = feature_map.init(d, dtype=F64)
    x = gaussian(10, d)
    published = (x * d**-0.25 @ params["frozen"]["w"][0]).relu() + epsilon
    torch.testing.assert_close(published / math.sqrt(24), d**-0.25 * feature_map(x, params), rtol=1e-12, atol=0)


@pytest.mark.spec("PHI-RAND-D3", "PHI-PRELU-E5")
def test_default_width():
    assert [default_width(d) for d in (1, 2, 8, 64)] == [1, 2, 16, 266]
    assert Favor().output_dim(64) == 266
    assert Favor(variant="hyperbolic").output_dim(5) == 8 and Favor().output_dim(5) == 8
    assert Favor(variant="trigonometric").output_dim(1) == 2  # 1, made even
    for feature_map in (Favor(), Favor(variant="hyperbolic"), PerformerReLU()):
        x = gaussian(3, 1)
        assert feature_map(x, feature_map.init(1, dtype=F64)).shape == (3, feature_map.output_dim(1))


@pytest.mark.spec("PHI-RAND-D1", "PHI-RAND-E1")
def test_haar_blocks_have_no_preferred_sign():
    d, n = 8, 4000
    generator = seeded(5)
    q = torch.stack([haar(d, generator) for _ in range(n)])
    eye = torch.eye(d, dtype=F64)
    assert float((q.mT @ q - eye).abs().max()) < 1e-13
    # An entry has mean 0 and variance 1/d; 64 entries, so 5 standard errors are 1 in 30,000.
    assert float(q.mean(0).abs().max()) < SIGMAS / math.sqrt(d * n)
    # Haar: E trace = 0, E trace^2 = 1, E trace^4 = 3, and both determinants are equally likely.
    trace = q.diagonal(dim1=-2, dim2=-1).sum(-1)
    assert deviation(trace, 0.0) < SIGMAS
    assert deviation(trace**2, 1.0) < SIGMAS
    assert deviation(trace**4, 3.0) < SIGMAS
    assert deviation(torch.linalg.det(q), 0.0) < SIGMAS

    raw = np.stack([np.linalg.qr(gaussian(d, d, seed=i).numpy())[0] for i in range(500)])
    first = -math.gamma(d / 2) / (math.sqrt(math.pi) * math.gamma((d + 1) / 2))
    assert first == pytest.approx(-0.291, abs=5e-4)
    spread = raw[:, 0, 0].std() / math.sqrt(500)
    assert abs(raw[:, 0, 0].mean() - first) < SIGMAS * spread, "what LAPACK's Q does"
    assert abs(raw[:, 0, 0].mean()) > 5 * SIGMAS * spread


@pytest.mark.spec("PHI-RAND-E1", "PHI-FAVOR-E2")
def test_one_sided_softmax_features_are_unbiased_where_raw_qr_is_not():
    x, y = one_sided_pair()
    kernel = math.exp(float(x @ y))
    assert kernel == pytest.approx(1.350, abs=5e-4)
    samples = estimates(Favor(num_features=8, scale="none"), x, y, 6000)
    assert deviation(samples, kernel) < SIGMAS
    rng = np.random.default_rng(0)
    raw = []
    for _ in range(6000):
        w = reference.raw_qr_projections(8, rng)
        raw.append(reference.favor_positive(x.numpy(), w) @ reference.favor_positive(y.numpy(), w))
    assert deviation(torch.tensor(raw), 1.166) < SIGMAS
    assert deviation(torch.tensor(raw), kernel) > 4 * SIGMAS


@pytest.mark.spec("PHI-RAND-E1", "PHI-PRELU-E2", "PHI-PRELU-E3")
def test_one_sided_relu_features_are_unbiased_where_raw_qr_is_not():
    x, y = one_sided_pair()
    kernel = reference.arc_cosine(x.numpy(), y.numpy())
    assert kernel == pytest.approx(0.1545, abs=5e-5)
    errors = {}
    for norms in ("chi", "sqrt"):
        feature_map = PerformerReLU(num_features=8, kernel_epsilon=0, norms=norms)
        samples = estimates(feature_map, x, y, 6000)
        assert deviation(samples, kernel) < SIGMAS
        errors[norms] = (samples - kernel) ** 2
    # sqrt(d) norms lower the error: the measured gap against its standard error.
    gap = errors["chi"].mean() - errors["sqrt"].mean()
    assert gap > SIGMAS * (errors["chi"].var() + errors["sqrt"].var()).sqrt() / math.sqrt(6000)
    rng = np.random.default_rng(1)
    raw = []
    for _ in range(6000):
        w = reference.raw_qr_projections(8, rng)
        raw.append(reference.relu_features(x.numpy(), w, 0) @ reference.relu_features(y.numpy(), w, 0))
    assert deviation(torch.tensor(raw), kernel) > 4 * SIGMAS
    assert np.mean(raw) == pytest.approx(0.81 * kernel, rel=0.05), "19 per cent too small"


@pytest.mark.parametrize("d,m", [(6, 6), (6, 4), (6, 12), (6, 15), (1, 4), (8, 16)])
@pytest.mark.spec("PHI-RAND-D2", "PHI-PRELU-E1")
def test_blocks_are_orthogonal_stacked_and_cut(d, m):
    w = projections(d, m, seeded(2), orthogonal=True, norms="sqrt")
    assert w.shape == (d, m)
    torch.testing.assert_close(w.norm(dim=0), torch.full((m,), math.sqrt(d), dtype=F64))
    blocks = [w[:, start : start + d] / math.sqrt(d) for start in range(0, m, d)]
    assert len(blocks) == math.ceil(m / d)
    for block in blocks:
        eye = torch.eye(block.shape[1], dtype=F64)
        torch.testing.assert_close(block.mT @ block, eye, rtol=0, atol=1e-13)
    if d > 1 and m > d:
        reduced = np.linalg.qr(np.ones((d, m)) + np.eye(d, m))[0]
        assert reduced.shape == (d, d), "one QR of a d x m matrix has no m columns to give"


@pytest.mark.parametrize("orthogonal", [False, True])
@pytest.mark.spec("PHI-RAND-D2", "PHI-PRELU-E2")
def test_row_norms(orthogonal):
    d, replicas = 6, 2000
    generator = seeded(4)
    chi, sqrt = (
        torch.stack([projections(d, 9, generator, orthogonal=orthogonal, norms=norms) for _ in range(replicas)])
        for norms in ("chi", "sqrt")
    )
    torch.testing.assert_close(sqrt.square().sum(1), torch.full((replicas, 9), float(d), dtype=F64))
    squares = chi.square().sum(1)
    for column in (0, 5, 8):  # first block, its end, the cut block
        assert deviation(squares[:, column], d) < SIGMAS  # chi^2_d: mean d, variance 2 d
        assert deviation((squares[:, column] - d) ** 2, 2 * d) < SIGMAS
        assert deviation(chi[:, 2, column] ** 2, 1.0) < SIGMAS  # each entry is N(0, 1)
        assert deviation(chi[:, 2, column] ** 4, 3.0) < SIGMAS
        assert deviation(sqrt[:, 2, column] ** 4, 3 * d / (d + 2)) < SIGMAS
    # Columns of different blocks are independent directions: inner products as on a sphere.
    cosine = (sqrt[:, :, 0] * sqrt[:, :, 6]).sum(1) / d
    assert deviation(cosine, 0.0) < SIGMAS
    assert deviation(cosine**2, 1 / d) < SIGMAS
    # The norms are drawn afresh, independent of the directions and of each other.
    first = chi[:, 0, 0] / squares[:, 0].sqrt()
    assert deviation((squares[:, 0] - d) * (first**2 - 1 / d), 0.0) < SIGMAS
    assert deviation((squares[:, 0] - d) * (squares[:, 1] - d), 0.0) < SIGMAS


@each_map
@pytest.mark.spec("PHI-RAND-I1")
def test_draws_come_from_the_generator_alone(feature_map):
    torch.manual_seed(1)
    before = torch.get_rng_state()
    one = feature_map.init(6, heads=3, generator=seeded(9))
    default = feature_map.init(6, heads=3)
    assert torch.equal(torch.get_rng_state(), before), "the global random state was used"
    torch.manual_seed(2)
    two = feature_map.init(6, heads=3, generator=seeded(9))
    zero = feature_map.init(6, heads=3, generator=seeded(0))
    other = feature_map.init(6, heads=3, generator=seeded(10))
    double = feature_map.init(6, heads=3, generator=seeded(9), dtype=F64)
    more = feature_map.init(6, heads=5, generator=seeded(9))
    assert one["learned"] == {}
    for name, value in one["frozen"].items():
        assert value.dtype == torch.float32 and value.shape[0] == 3
        assert torch.equal(value, two["frozen"][name]), "same seed, same bits"
        assert torch.equal(default["frozen"][name], zero["frozen"][name]), "no generator: seed 0"
        assert not torch.equal(value, other["frozen"][name])
        assert torch.equal(value, double["frozen"][name].float()), "the dtype is only a cast"
        assert torch.equal(value, more["frozen"][name][:3]), "later heads do not disturb earlier"
        for first, second in ((0, 1), (1, 2)):
            assert float((value[first] - value[second]).abs().max()) > 1e-2, "heads differ"


@pytest.mark.spec("PHI-RAND-I1")
def test_draws_do_not_depend_on_the_number_of_threads():
    before = torch.get_num_threads()
    try:
        draws = []
        for threads in (1, 2):
            torch.set_num_threads(threads)
            draws.append(Favor(num_features=128).init(96, dtype=F64)["frozen"]["w"])
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*draws)


@each_map
def test_a_default_device_does_not_move_the_draws(feature_map):
    expected = feature_map.init(3)["frozen"]
    with torch.device("meta"):
        got = feature_map.init(3)["frozen"]
    assert all(torch.equal(got[name], expected[name]) for name in expected)
    away = feature_map.init(3, device="meta")
    assert feature_map(torch.zeros(4, 3, device="meta"), away).shape == (4, feature_map.output_dim(3))


@each_map
@pytest.mark.spec("PHI-RAND-I2")
def test_redraw(feature_map):
    params = feature_map.init(6, heads=2, generator=seeded(1), dtype=torch.float32)
    kept = {name: value.clone() for name, value in params["frozen"].items()}
    params["learned"]["extra"] = torch.ones(1)
    one = feature_map.redraw(params, seeded(2))
    two = feature_map.redraw(params, seeded(2))
    fresh = feature_map.init(6, heads=2, generator=seeded(2), dtype=torch.float32)
    assert one["learned"]["extra"] is params["learned"]["extra"]
    for name, value in params["frozen"].items():
        assert torch.equal(value, kept[name]), "redraw changed its input"
        assert one["frozen"][name].shape == value.shape
        assert one["frozen"][name].dtype == value.dtype
        assert not torch.equal(one["frozen"][name], value)
        assert torch.equal(one["frozen"][name], two["frozen"][name])
        assert torch.equal(one["frozen"][name], fresh["frozen"][name])


@pytest.mark.spec("PHI-RFF-D1")
def test_offsets_are_uniform_over_a_whole_turn():
    b = RandomFourier(d_phi=10000).init(1, dtype=F64)["frozen"]["b"][0]
    assert 0 <= float(b.min()) and float(b.max()) < 2 * math.pi
    assert deviation(b, math.pi) < SIGMAS
    assert deviation((b - math.pi) ** 2, math.pi**2 / 3) < SIGMAS
