"""The Hopfield memory against numpy and torch's attention; energy, bound, and limit."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from hecate.errors import ConfigError, ShapeError
from hecate.nn import Hopfield
from tests.nn.layers import near, seeded
from tests.reference import hopfield as reference


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=seeded(seed))


def on_sphere(count, width, radius, seed=0):
    x = normal(count, width, seed=seed)
    return radius * x / x.norm(dim=-1, keepdim=True)


@pytest.mark.spec("TRF-HOP-D1")
@pytest.mark.parametrize("steps", [1, 2, 4])
@pytest.mark.parametrize("masked", [False, True])
def test_against_numpy(steps, masked):
    patterns, query, values = normal(2, 5, 3), normal(2, 4, 3, seed=1), normal(2, 5, 2, seed=2)
    here = torch.ones(2, 5, dtype=torch.bool)
    if masked:
        here[0, 1:3] = here[1, 4] = False
        patterns = torch.where(here.unsqueeze(-1), patterns, 9 * patterns)  # the longest ones
    memory = Hopfield(1.3, steps=steps)
    got = memory(query, patterns, values, mask=here if masked else None)
    energies = memory.energy(query, patterns, mask=here if masked else None)
    for b in range(2):
        stored, held = patterns[b][here[b]].numpy(), values[b][here[b]].numpy()
        for q in range(4):
            xi = query[b, q].numpy()
            assert float(energies[b, q]) == pytest.approx(reference.energy(xi, stored, 1.3))
            for _ in range(steps - 1):
                xi = reference.update(xi, stored, 1.3)
            answer = reference.weights(xi, stored, 1.3) @ held
            near(got.values[b, q], torch.from_numpy(answer))
            near(got.query[b, q], torch.from_numpy(reference.update(xi, stored, 1.3)))
    assert got.steps.unique().tolist() == [steps]


@pytest.mark.spec("TRF-HOP-R1")
@pytest.mark.parametrize("masked", [False, True])
def test_one_step_with_values_is_torch_s_attention(masked):
    q, k, v = (normal(2, 3, n, 8, seed=n).requires_grad_() for n in (4, 6, 5))
    v = normal(2, 3, 6, 7, seed=9).requires_grad_()
    mask = None
    if masked:
        mask = torch.rand(2, 3, 6, generator=seeded(3)) < 0.6
        mask[..., 0] = True
    mine = Hopfield(8**-0.5)(q, k, v, mask=mask).values
    seen = None if mask is None else mask.unsqueeze(-2).expand(2, 3, 4, 6)
    theirs = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
    near(mine, theirs)
    probe = normal(2, 3, 4, 7, seed=5)
    gradients = [torch.autograd.grad((y * probe).sum(), [q, k, v]) for y in (mine, theirs)]
    near(gradients[0], gradients[1])


def test_gradients_through_all_updates():
    memory, mask = Hopfield(1.5, steps=3), torch.tensor([True, False, True, True])
    tensors = [normal(n, w, seed=n).requires_grad_() for n, w in ((2, 3), (4, 3), (4, 2))]
    assert torch.autograd.gradcheck(lambda q, x, v: memory(q, x, v, mask=mask).values, tensors)
    nobody = torch.zeros(4, dtype=torch.bool)
    gradients = torch.autograd.grad(memory(*tensors, mask=nobody).values.sum(), tensors)
    assert all(bool((g == 0).all()) for g in gradients)


@pytest.mark.spec("TRF-HOP-I1")
@given(
    seed=st.integers(0, 10**6),
    count=st.integers(1, 8),
    sharpness=st.floats(0.05, 20),
    scale=st.floats(0.1, 5),
    masked=st.booleans(),
)
def test_an_update_lowers_the_energy_by_half_its_square(seed, count, sharpness, scale, masked):
    torch.set_default_dtype(torch.float64)
    patterns, query = scale * normal(count, 4, seed=seed), 2 * scale * normal(3, 4, seed=seed + 1)
    mask = torch.rand(count, generator=seeded(seed)) < 0.7 if masked else None
    memory = Hopfield(sharpness)
    before, moved = memory.energy(query, patterns, mask=mask), memory(query, patterns, mask=mask)
    after = memory.energy(moved.query, patterns, mask=mask)
    fall = (moved.query - query).square().sum(-1) / 2
    rounding = 1e-13 * (1 + before.abs() + query.square().sum(-1) * (1 + sharpness))
    assert bool((after <= before - fall + rounding).all())
    assert bool((after >= -rounding).all())
    longest = patterns.norm(dim=-1).max()  # no less than that of the present ones
    inside = query.norm(dim=-1) <= longest
    if mask is None:
        assert bool((before <= 2 * longest**2 + rounding)[inside].all())


@pytest.mark.spec("TRF-HOP-I1")
def test_the_energy_of_no_pattern_and_its_minimum():
    memory, query, nobody = Hopfield(2.0), normal(2, 4), {"mask": torch.zeros(3, dtype=torch.bool)}
    for patterns, absent in ((normal(3, 4, seed=1), nobody), (normal(0, 4), {})):
        assert not memory.weights(query, patterns, **absent).any()
        assert memory(query, patterns, **absent).values.eq(0).all()
        near(memory.energy(query, patterns, **absent), query.square().sum(-1) / 2)
    assert Hopfield.separation(normal(0, 4)).shape == (0,)
    assert memory.error_bound(query, normal(0, 4)).shape == (2, 0)


@pytest.mark.spec("TRF-HOP-I2")
def test_separated_patterns_are_fixed_points_and_attract():
    patterns = on_sphere(20, 32, 4.0)
    memory = Hopfield(2.0, steps=50, tolerance=1e-13)
    assert float(memory.separation(patterns).min()) > 5
    near_them = patterns + 0.3 * on_sphere(20, 32, 1.0, seed=1)
    settled = memory(near_them, patterns)
    assert int(settled.steps.max()) < 50
    again = memory(settled.query, patterns)
    assert float((again.query - settled.query).norm(dim=-1).max()) < 1e-12
    assert float((settled.query - patterns).norm(dim=-1).max()) < 1e-3
    # Sharpness 0 in the limit: one fixed point, the mean of all patterns.
    blunt = Hopfield(1e-9, steps=3)(near_them, patterns).query
    near(blunt, patterns.mean(0).expand(20, -1), 1e-6)


@pytest.mark.spec("TRF-HOP-I2")
@given(seed=st.integers(0, 10**6), count=st.integers(2, 9), sharpness=st.floats(0.5, 8), distance=st.floats(0, 1))
def test_the_retrieval_bound(seed, count, sharpness, distance):
    torch.set_default_dtype(torch.float64)
    patterns = 1.5 * normal(count, 6, seed=seed)
    query = patterns + distance * on_sphere(count, 6, 1.0, seed=seed + 1)
    memory = Hopfield(sharpness)
    bound = memory.error_bound(query, patterns)
    moved = memory(query, patterns).query
    error = (moved.unsqueeze(-2) - patterns).norm(dim=-1)
    assert bool((error <= bound * (1 + 1e-9) + 1e-12).all())
    resting = Hopfield(sharpness, steps=300, tolerance=1e-14)(query, patterns).query
    stored = patterns.numpy()
    for i in range(count):
        apart = reference.separation(stored, i)
        assert float(memory.separation(patterns)[i]) == pytest.approx(apart)
        own = reference.error_bound(query[0].numpy(), stored, i, sharpness)
        assert float(bound[0, i]) == pytest.approx(own)
        paper = reference.error_bound(query[0].numpy(), stored, i, sharpness, resting[i].numpy())
        assert own <= paper * (1 + 1e-12)


def test_the_bound_is_near_the_error_for_two_opposite_patterns():
    # x and -x: the error is 2 |x| p with p = 1 / (1 + exp(2 sharpness |x|^2)), the bound its limit.
    patterns = torch.tensor([[2.0, 0.0], [-2.0, 0.0]])
    memory = Hopfield(1.0)
    error = (memory(patterns, patterns).query - patterns).norm(dim=-1)
    near(error, torch.full((2,), 4 / (1 + math.exp(8))))
    bound = memory.error_bound(patterns, patterns).diagonal()
    near(bound, torch.full((2,), 4 * math.exp(-8)))


@pytest.mark.spec("TRF-HOP-I2")
def test_masked_patterns_count_for_nothing():
    patterns, query = normal(2, 5, 4), normal(2, 3, 4, seed=1)
    mask = torch.tensor([[True, False, True, True, False], [False, True, False, False, False]])
    patterns = torch.where(mask.unsqueeze(-1), patterns, 9 * patterns)  # longer than the present
    memory = Hopfield(1.0)
    apart, bound = (memory.separation(patterns, mask=mask), memory.error_bound(query, patterns, mask=mask))
    kept = patterns[0][mask[0]]
    near(apart[0][mask[0]], memory.separation(kept))
    near(bound[0][:, mask[0]], memory.error_bound(query[0], kept))
    assert bool(apart[~mask].isnan().all()) and bool((bound[0][:, ~mask[0]] == math.inf).all())
    assert float(apart[1, 1]) == math.inf and bool((bound[1, :, 1] == 0).all())
    near(memory(query, patterns, mask=mask).query[1], patterns[1, 1].expand(3, -1))


def test_a_query_comes_to_rest_whatever_the_others_do():
    patterns = on_sphere(6, 8, 3.0)
    slow = patterns[:2].mean(0) + 0.01 * normal(8, seed=4)  # between two patterns
    queries = torch.stack([patterns[0], slow])
    memory = Hopfield(0.9, steps=40, tolerance=1e-9)
    both, values = memory(queries, patterns, normal(6, 2, seed=5)), normal(6, 2, seed=5)
    assert 1 < int(both.steps[0]) < int(both.steps[1]) < 40
    for i in range(2):
        alone = memory(queries[i : i + 1], patterns, values)
        near(both.values[i], alone.values[0])
        near(both.query[i], alone.query[0])
        assert int(alone.steps[0]) == int(both.steps[i])
        xi, moved, count = queries[i].numpy(), math.inf, 0
        while moved > 1e-9:
            new = reference.update(xi, patterns.numpy(), 0.9)
            xi, moved, count = new, float(np.linalg.norm(new - xi)), count + 1
        assert int(alone.steps[0]) == count
        plain = Hopfield(0.9, steps=int(alone.steps[0]))(queries[i : i + 1], patterns, values)
        near(alone.values, plain.values)


@pytest.mark.spec("TRF-HOP-D1")
def test_dtypes_and_devices():
    q, x = normal(3, 4).float(), normal(5, 4, seed=1).float()
    wide = Hopfield(2.0, steps=3)(q.double(), x.double())
    single = Hopfield(2.0, steps=3)(q, x)
    assert single.values.dtype == torch.float32
    near(single.values, wide.values, 1e-5)
    half = Hopfield(2.0)(q.bfloat16(), x.bfloat16())
    assert half.values.dtype == torch.bfloat16
    meta = Hopfield(2.0, steps=3)(q.to("meta"), x.to("meta"))
    assert meta.values.shape == (3, 4) and meta.steps.shape == (3,)


def test_what_cannot_be_built_or_does_not_fit():
    for options, named in (
        ({"sharpness": 0}, "sharpness must be a finite number > 0, got 0"),
        ({"sharpness": math.inf}, "sharpness"),
        ({"sharpness": 1.0, "steps": 0}, "steps must be an integer >= 1, got 0"),
        ({"sharpness": 1.0, "tolerance": -1.0}, "tolerance must be a finite number >= 0"),
    ):
        with pytest.raises(ConfigError, match=named):
            Hopfield(**options)


@pytest.mark.spec("TRF-HOP-D1")
def test_autocast_does_not_round_the_scores():
    memory, query, patterns = Hopfield(2.0, steps=3), normal(3, 4), normal(5, 4, seed=1)
    expected = memory(query.float(), patterns.float())
    energy, bound = (f(query.float(), patterns.float()) for f in (memory.energy, memory.error_bound))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = memory(query.float(), patterns.float())
        assert torch.equal(memory.energy(query.float(), patterns.float()), energy)
        assert torch.equal(memory.error_bound(query.float(), patterns.float()), bound)
    assert torch.equal(got.values, expected.values) and torch.equal(got.query, expected.query)


def test_an_absent_pattern_may_hold_anything():
    memory, query, patterns = Hopfield(2.0, steps=3), normal(3, 4), normal(5, 4, seed=1)
    here = torch.tensor([True, True, False, True, True])
    bad = torch.where(here.unsqueeze(-1), patterns, math.nan)
    for ask in (memory.weights, memory.energy, lambda *x, mask: memory(*x, mask=mask).values):
        assert torch.equal(ask(query, bad, mask=here), ask(query, patterns, mask=here))


def test_tolerance_under_transforms():
    memory, query, patterns = Hopfield(2.0, steps=9, tolerance=1e-2), normal(2, 3, 4), normal(5, 4)
    expected = memory(query, patterns)
    for got in (
        torch.vmap(lambda q: memory(q, patterns))(query),
        torch.compile(memory, backend="eager", fullgraph=True)(query, patterns),
    ):
        near(got.values, expected.values)
        assert torch.equal(got.steps, expected.steps)


@pytest.mark.parametrize("name", ["forward", "weights", "energy", "error_bound"])
def test_what_does_not_fit(name):
    ask, x = getattr(Hopfield(1.0), name), normal(2, 3, 4)
    for query, patterns, rest, named in (
        (x.long(), x, {}, "query must be a floating point tensor, got torch.int64"),
        (x, x.tolist(), {}, "patterns must be a floating point tensor, got list"),
        (x[0], x[0, :, :2], {}, r"query must be .* got \[3, 4\] and \[3, 2\]"),
        (x[0, 0], x[0], {}, "query must be"),
        (x, normal(5, 3, 4), {}, "leading axes"),
        (x, x, {"mask": torch.ones(2, 3)}, "mask must be bool"),
        (x, x, {"mask": torch.ones(2, 4, dtype=torch.bool)}, "mask must"),
        (x, x, {"mask": [[True] * 3] * 2}, "mask must be bool.* no tensor"),
    ):
        with pytest.raises(ShapeError, match=named):
            ask(query, patterns, **rest)
    with pytest.raises(ShapeError, match=r"values must .* \[5\] .*\[4, 2\]"):
        Hopfield(1.0)(torch.zeros(3, 4), torch.zeros(5, 4), values=torch.zeros(4, 2))
