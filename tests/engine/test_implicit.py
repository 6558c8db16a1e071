"""The fixed point of a block: exact at any coupling, first and second derivatives too."""

from __future__ import annotations

import pytest
import torch

from hecate import bias
from hecate.engine.implicit import SUB_BLOCK, implicit_gradients, solve

BIASES = [bias.L2(), bias.Huber(delta=0.5), bias.Huber(delta=0.5, norm=True), bias.Lp(p=1.5, eps=0.1), bias.Lp(p=2.5)]


def _inputs(length: int, coupling: float, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    base, v = (torch.randn(2, length, 3, generator=generator) for _ in range(2))
    lower = coupling * torch.randn(2, length, length, generator=generator).tril(-1)
    return [base, lower, v]


def _by_substitution(of: bias.Bias, base, lower, v):
    rows: list[torch.Tensor] = []
    for t in range(base.shape[1]):
        pred = base[:, t]
        for i, row in enumerate(rows):
            pred = pred - lower[:, t, i, None] * row
        rows.append(of.grad(pred, v[:, t]))
    return torch.stack(rows, 1)


@pytest.mark.spec("ENG-IMP-D1", "ENG-IMP-V1")
@pytest.mark.parametrize("of", BIASES, ids=repr)
@pytest.mark.parametrize("length", [1, 2, SUB_BLOCK, SUB_BLOCK + 1, 50])
def test_equals_substitution_with_its_gradients(of, length):
    inputs = [item.requires_grad_() for item in _inputs(length, 0.05)]
    ours, true = implicit_gradients(of, *inputs), _by_substitution(of, *inputs)
    torch.testing.assert_close(ours, true, rtol=1e-11, atol=1e-12)
    g = torch.randn(ours.shape, generator=torch.Generator().manual_seed(1))
    for got, expected in zip(
        torch.autograd.grad(ours, inputs, g),
        torch.autograd.grad(true, inputs, g, materialize_grads=True, allow_unused=True),
        strict=True,
    ):
        size = max(float(expected.norm()), 1e-3)
        assert float((got - expected).norm()) <= 1e-10 * size


@pytest.mark.spec("ENG-IMP-D1")
def test_exact_where_the_iteration_overshoots():
    """Strongly coupled rows: the iterates overshoot before they settle."""
    base, lower, v = _inputs(SUB_BLOCK, 2.0)
    of = bias.L2()
    true = torch.linalg.solve_triangular(lower.tril(-1), base - v, upper=False, unitriangular=True)
    ours = implicit_gradients(of, base, lower, v)
    assert float(true.abs().max()) > 1e3
    torch.testing.assert_close(ours, true, rtol=1e-9, atol=1e-9 * float(true.abs().max()))


@pytest.mark.spec("ENG-IMP-D1")
def test_a_row_that_overflows_on_the_way_spoils_no_other():
    """Unsettled rows of a steep loss explode; settled ones stay what they are."""
    of = bias.Lp(p=4.0)
    base, lower, v = _inputs(SUB_BLOCK, 1.0, seed=3)
    base, v = 0.2 * base, 0.2 * v
    base[:, 0] += 30.0
    true = _by_substitution(of, base.float(), lower.float(), v.float())
    finite = torch.isfinite(true).all(-1).all(0).cumprod(0).bool()
    assert 1 <= int(finite.sum())
    ours = implicit_gradients(of, base.float(), lower.float(), v.float())
    torch.testing.assert_close(ours[:, finite], true[:, finite], rtol=1e-4, atol=1e-4)


@pytest.mark.spec("ENG-IMP-V1")
@pytest.mark.parametrize("of", [bias.L2(), bias.Lp(p=1.5, eps=0.3)], ids=repr)
def test_second_derivatives(of):
    inputs = [item.requires_grad_() for item in _inputs(4, 0.3)]

    def function(base, lower, v):
        return implicit_gradients(of, base, lower.tril(-1), v)

    assert torch.autograd.gradcheck(function, inputs)
    assert torch.autograd.gradgradcheck(function, inputs)


@pytest.mark.spec("ENG-IMP-D1")
def test_iterates_that_pass_through_infinity_go_on_to_what_settles():
    """Equal keys under lp: iterates square from step to step until the last row is infinite, and are 1 in the end."""
    of, base, v = bias.Lp(p=3.0), torch.zeros(1, SUB_BLOCK, 2), torch.tensor([2.0, -1.5]).expand(1, SUB_BLOCK, 2)
    lower = torch.full((1, SUB_BLOCK, SUB_BLOCK), 0.5).tril(-1)
    true = _by_substitution(of, base, lower, v)
    assert float(true.abs().max()) < 5
    torch.testing.assert_close(solve(of, base, lower, v), true, rtol=1e-12, atol=1e-12)


@pytest.mark.spec("ENG-IMP-D1")
def test_a_large_memory_does_not_settle_a_small_one():
    """The second memory's rows do not meet, so that it settles at once, and are 1e18 times as long."""
    base, lower, v = _inputs(SUB_BLOCK, 0.3)
    base, v = (torch.stack([item[0], 1e18 * item[1]]) for item in (base, v))
    lower, of = torch.stack([lower[0], 0 * lower[1]]), bias.L2()
    both, alone = solve(of, base, lower, v), solve(of, base[:1], lower[:1], v[:1])
    torch.testing.assert_close(alone, _by_substitution(of, base[:1], lower[:1], v[:1]), rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(both[:1], alone, rtol=1e-12, atol=1e-12)
