"""Positions in linear attention: rotations before and after phi, and biases by distance."""

import pytest
import torch

from hecate.errors import ConfigError
from hecate.nn import LinearAttention, linear_attention
from hecate.nn.positions import CirculantString, Position, Relative, Rotary
from hecate.train.catalogue import catalogue
from tests.nn.attentions import masks_of
from tests.nn.layers import inputs as narrow
from tests.nn.layers import near, seeded
from tests.nn.linear_cases import Case
from tests.reference import linear_attention as reference

BOTH = ("write", "reset")
MAPPED = [
    ("identity", ("write",), "none"),
    ("cosformer", ("write",), "sum"),
]  # a map without signs, and one with positions
either_way = pytest.mark.parametrize("causal", [True, False], ids=["causal", "all"])
ROTATIONS = {
    f"{kind}-{where}": {"kind": kind, "where": where}
    for kind in ("rotary", "circulant_string")
    for where in ("before", "numerator")
}
TABLE = {"kind": "relative", "max_distance": 3}
POLAR = {"kind": "polar", "base": 100.0}
LINEAR = {"kind": "relative", "form": "linear"}


# By name: positions, and the feature maps, masks and normalisers under which they are held against the reference.
PAIRS = {
    **{name: (kind, [("elu", (), "sum"), ("t2r", BOTH, "sum")]) for name, kind in ROTATIONS.items()},
    "rotary, mapped": (ROTATIONS["rotary-numerator"], MAPPED),
    "polar": (POLAR, [("elu", (), "sum"), ("elu", BOTH, "sum"), ("t2r", BOTH, "none")]),
    "decay": (LINEAR, [("t2r", (), "sum"), ("t2r", BOTH, "sum"), ("elu", BOTH, "none"), *MAPPED]),
    "table": (TABLE, [("t2r", (), "sum"), ("t2r", ("write",), "sum"), ("t2r", ("write",), "none"), *MAPPED]),
}


@pytest.mark.spec("ATT-ROT-D2", "ATT-STRING-D1", "ATT-POLAR-D1", "ATT-REL-D1", "ATT-REL-D2")
@pytest.mark.parametrize("name", PAIRS)
@either_way
def test_against_a_weight_for_every_pair(name, causal):
    positions, cases = PAIRS[name]
    for feature_map, masks, normalizer in cases:
        case = {"causal": causal, "positions": positions, "masks": masks, "normalizer": normalizer}
        for length in (1, 9) if name == "table" else (6,):
            Case(feature_map, length=length, **case).check()


@pytest.mark.spec("ATT-POLAR-D1", "ATT-POLAR-E1")
def test_polar_weighs_by_distance_and_its_offset_has_a_period():
    case = Case("elu", batch=1, length=4, heads=2, groups=1, positions=POLAR, normalizer="none")
    q, k, _ = (part[0, :, 0] for part in case.qkv)
    lengths = (reference.elu(q, 0)[:, None] * reference.elu(k, 0)[None]).detach()
    distance = (torch.arange(4)[:, None] - torch.arange(4)[None]).unsqueeze(-1)
    angle = distance * 100.0 ** (-torch.arange(5) / 5) - case.turns["offset"][0].detach()
    weights = (lengths * angle.cos()).sum(-1).tril()
    near(case.run()[0][0, :, 0], weights @ case.qkv[2][0, :, 0])
    around = {"offset": case.turns["offset"] + 2 * torch.pi}  # where a clamp to [-2 pi, 0] would give no gradient
    near(case.run(position_params=around)[0], case.run()[0])
    (g,) = torch.autograd.grad(case.run(position_params=around)[0].sum(), around["offset"])
    assert g.abs().min() > 1e-3


@pytest.mark.spec("ATT-REL-D2")
@either_way
def test_a_table_sees_the_future_by_rounding_alone(causal):
    case = Case("elu", causal=causal, positions=TABLE, length=20)
    y, v = case.run()[0], case.qkv[2]
    moved = case.run(v=v + 10.0 * (torch.arange(20) == 9).view(-1, 1, 1))[0] - y
    assert (moved[:, 9:].abs().amax((0, 2, 3)) > 1e-3).all()
    before = moved[:, :9].abs().amax()
    assert before < 1e-13 if causal else before > 1e-3


@pytest.mark.spec("ATT-ROT-D2", "ATT-STRING-D1")
@pytest.mark.parametrize("positions", ROTATIONS.values(), ids=ROTATIONS)
def test_on_the_numerator_only_the_distance_counts(positions):
    case = Case("identity", batch=1, length=9, positions=positions, normalizer="none")
    mapped = Case("elu", batch=1, length=9, positions=positions, normalizer="none")
    for one, relative in ((case, True), (mapped, positions["where"] == "numerator")):
        # The same four tokens at places 0..3 and, after five without values, at 5..8.
        q, k, v = (torch.cat([part[:, :5], part[:, :4]], 1) for part in one.qkv)
        first, _ = one.run(q[:, 5:], k[:, 5:], v[:, 5:])
        later, _ = one.run(q, k, torch.cat([torch.zeros_like(v[:, :5]), v[:, 5:]], 1))
        gap = (later[:, 5:] - first).abs().max()
        assert gap < 1e-10 if relative else gap > 1e-3, gap


@pytest.mark.spec("ATT-STRING-D1")
@pytest.mark.parametrize("width", [3, 4, 7, 8])
def test_a_circulant_starts_with_the_speeds_of_rotary_and_keeps_lengths(width):
    kind = CirculantString()
    params = kind.init(width, heads=2, dtype=torch.float64)
    speeds = 2 * torch.fft.rfft(params["circulant"][0]).imag
    pairs = (width - 1) // 2
    near(speeds[1 : 1 + pairs], 10_000.0 ** (-torch.arange(pairs) / pairs))
    assert speeds.abs().gt(1e-12).sum() == pairs
    x = torch.randn(1, 3, 2, width, generator=seeded())
    turned = kind.turned(x, torch.tensor([[0, 3, 1000]]), params)
    near(turned.norm(dim=-1), x.norm(dim=-1))
    near(turned[:, 0], x[:, 0])
    near(turned[0, 1, 0], reference.string(params["circulant"][0])(x[0, 1, 0], 3))


@pytest.mark.spec("ATT-REL-D1")
def test_slopes_and_tables_start_where_they_say():
    slopes = Relative(form="linear").init(4, heads=4, dtype=torch.float64)["logit"].sigmoid().log()
    near(-slopes, torch.tensor([2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8]))
    for causal, size in ((True, 4), (False, 7)):
        table = Relative(max_distance=3).init(4, heads=2, causal=causal)["bias"]
        assert table.shape == (2, size) and not table.any()


@pytest.mark.spec("ATT-REL-D2")
def test_what_a_table_cannot_do_is_refused():
    layer, both = (LinearAttention(8, 2, positions=p, causal=p is TABLE, generator=seeded()) for p in (TABLE, LINEAR))
    x, reset = narrow(1, 4, width=8), torch.zeros(1, 4, dtype=torch.bool)
    _, state = layer(x)
    assert state.memory["weight"].numel() == 0
    for words, call in {
        "form='table' and a state.*form='linear'": lambda: layer(x, state),
        "form='table' and documents.*row of its own": lambda: layer(x, reset_mask=reset),
        "form='table' and documents": lambda: layer(x, cu_seqlens=torch.tensor([0, 2, 4])),
        "causal=False with a state and positions 'relative'": lambda: both(x, both(x)[1]),
        "'relative' with d_context=3.*no distance": lambda: LinearAttention(
            8, 2, positions=TABLE, causal=False, d_context=3
        ),
    }.items():
        with pytest.raises(ConfigError, match=words):
            call()


@pytest.mark.spec("ATT-REL-D1")
@either_way
def test_second_derivatives_of_a_table(causal):
    case = Case(batch=1, length=3, heads=2, groups=1, causal=causal, positions=TABLE, masks=("write",))

    def run(q, k, v, bias):
        return case.run(q, k, v, position_params={"bias": bias})[0]

    given = (*case.qkv, case.turns["bias"])
    assert torch.autograd.gradcheck(run, given) and torch.autograd.gradgradcheck(run, given, fast_mode=True)


@pytest.mark.spec("ATT-REL-D2")
@either_way
def test_tables_of_no_tokens(causal):
    layer = LinearAttention(8, 2, positions=TABLE, causal=causal, generator=seeded())
    for batch, length in ((0, 3), (2, 0)):
        write = masks_of(batch, length)["write_mask"]
        assert layer(narrow(batch, length, width=8), write_mask=write)[0].shape == (batch, length, 8)


@pytest.mark.spec("ATT-ROT-D2", "ATT-STRING-D1", "ATT-REL-D1")
@pytest.mark.parametrize("positions", [*ROTATIONS.values(), POLAR, LINEAR, TABLE], ids=str)
def test_low_precision_inputs_are_turned_and_summed_in_float32(positions):
    case = Case("elu", positions=positions, length=40)
    low = [item.detach().bfloat16() for item in case.qkv]
    y, _ = case.run(*low)
    truth, _ = case.run(*[item.double() for item in low])
    assert y.dtype == torch.bfloat16
    # Angles in float64, sums in float32; only y is rounded to bfloat16.
    near(y / truth.norm(), truth / truth.norm(), torch.finfo(torch.bfloat16).eps)


@pytest.mark.spec("ATT-POS-D1")
def test_the_family_is_listed_and_open():
    header, rows = catalogue("position")
    kinds = {row[0]: row for row in rows}
    assert list(kinds) == ["circulant_string", "none", "polar", "relative", "rotary"]
    assert "2502.02562" in kinds["circulant_string"][header.index("paper")]
    assert "exp(b_(i-j))" in kinds["relative"][header.index("formula")]
    assert Position.model_validate("rotary") == Rotary()
    with pytest.raises(ConfigError, match="max_distance: is the size of a table, got 4"):
        Position.model_validate({"kind": "relative", "form": "linear", "max_distance": 4})
    with pytest.raises(ConfigError, match="unknown field of Rotary.*base"):
        Position.model_validate({"kind": "rotary", "bas": 3.0})
    x = torch.ones(1, 2, 1, 4)
    with pytest.raises(ConfigError, match="unknown position kind 'alibi'"):
        linear_attention(x, x, x, positions="alibi")


@pytest.mark.spec("ATT-REL-D2")
def test_first_answers_of_a_long_table_are_not_lost_in_rounding():
    q, k, v = torch.randn(3, 1, 4096, 1, 4, generator=seeded()).unbind()
    expected, _ = linear_attention(q, k, v)
    bias = {"bias": torch.zeros(1, 129, dtype=torch.float32)}
    single = (part.float() for part in (q, k, v))
    y, _ = linear_attention(*single, positions="relative", position_params=bias)
    # Of features, products and quotients of a dozen operations each; the mean of v is at most 5.
    bound = 5 * 12 * torch.finfo(torch.float32).eps
    assert float((y - expected).abs().max()) < bound


def _head(length, width=4):
    q, k, v = (torch.randn(length, width, generator=seeded(seed)) for seed in range(3))
    return q, k, v, [part[None, :, None] for part in (q, k, v)]


@pytest.mark.spec("PHI-FAMILY-E2")
@either_way
def test_a_quadratic_relu_kernel_is_no_feature_map(causal):
    """On keys and queries without a negative entry the relu has nothing to do, and the direct kernel is that of phi =
    relu; elsewhere it is another function, and what it needs of the past grows with the past."""
    q, k, v, heads = _head(24)
    direct = reference.quadratic_relu(q, k, v, causal=causal)
    ours = linear_attention(*heads, "relu", causal=causal)[0][0, :, 0]
    assert float((direct - ours).norm()) > 0.1 * float(direct.norm())
    near(
        linear_attention(*(part.abs() for part in heads), "relu", causal=causal)[0][0, :, 0],
        reference.quadratic_relu(q.abs(), k.abs(), v.abs(), causal=causal),
    )
    keys = torch.eye(len(v))  # as values: the answers are the weights themselves
    assert int(torch.linalg.matrix_rank(reference.quadratic_relu(q, k, keys, causal=False))) > 4 + 8
    weights = linear_attention(heads[0], heads[1], keys[None, :, None], "relu", causal=False)[0][0, :, 0]
    assert int(torch.linalg.matrix_rank(weights)) <= 4


def _decline(distance):
    return -0.3 * abs(distance)


def _beside_the_sums(q, k, v, bias, causal):
    """(Q K^T + B) V over its row sums, from sums and a convolution alone."""
    ones = torch.cat([v, torch.ones(len(v), 1)], 1)
    heads = (part[None, :, None] for part in (q, k, ones))
    sums = linear_attention(*heads, "identity", causal=causal, normalizer="none")[0][0, :, 0]
    tokens = range(len(v))
    between = torch.tensor([[bias(t - s) if s <= t or not causal else 0.0 for s in tokens] for t in tokens])
    both = sums + between @ ones
    return both[:, :-1] / both[:, -1:]


@pytest.mark.spec("ATT-REL-E1")
@either_way
def test_an_additive_relative_bias_is_a_convolution_only_where_the_relu_cuts_nothing(causal):
    q, k, v, _ = _head(12)
    near(
        reference.additive_relative(q, k, v, lambda distance: 0.0, causal=causal),
        reference.quadratic_relu(q, k, v, causal=causal),
    )
    cut = reference.additive_relative(q, k, v, _decline, causal=causal)
    assert float((cut - _beside_the_sums(q, k, v, _decline, causal)).norm()) > 0.1 * float(cut.norm())
    q, k = q.abs() + 1, k.abs() + 1  # scores of 4 and more, and a bias above -3.4
    near(reference.additive_relative(q, k, v, _decline, causal=causal), _beside_the_sums(q, k, v, _decline, causal))
