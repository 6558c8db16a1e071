"""The study of kernels: the note's numbers, its misprints, and weights against loops in numpy."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from hecate.phi import ELU, CosFormer, Favor, Tanh
from studies import against_softmax as lab
from studies import kernels
from tests.reference import phi as reference

FUNCTIONS = {
    "softmax": np.exp,
    "leaky": reference.leaky_relu_squared,
    "elu": reference.elu,
    "gelu": reference.gelu_shifted,
}


def weights(name, scores):
    values = FUNCTIONS[name](np.array(scores))
    return values / values.sum()


@pytest.mark.parametrize("name", FUNCTIONS)
def test_weights_of_the_scores(name):
    ours = kernels.weights_of(name, torch.tensor(kernels.SCORES)).numpy()
    np.testing.assert_allclose(ours, weights(name, kernels.SCORES), rtol=1e-12)
    if name in kernels.PRINTED:
        # The leaky row is printed to two digits: 0.88 stands for anything in 0.875..0.885.
        tolerance = 3e-3 if name == "leaky" else 1e-3
        printed = [float(text) for text in kernels.PRINTED[name]]
        np.testing.assert_allclose(ours, printed, rtol=0, atol=tolerance)


def test_softmax_of_the_scores_is_nearly_uniform():
    found = kernels.weights_of("softmax", torch.tensor(kernels.SCORES))
    expected = torch.tensor([0.311, 0.201, 0.189, 0.116, 0.183])
    assert (found - expected).abs().max() < 5e-4  # half of the last digit


def test_the_scores_follow_from_the_weights():
    """elu + 1 is x + 1 above 0 and exp(x) below, so one score gives the sum, the sum the rest."""
    five = np.array([0.28780, 0.20662, 0.19555, 0.12001, 0.19002])
    total = math.exp(-0.43) / five[3]
    solved = np.where(np.arange(5) == 3, -0.43, five * total - 1)
    # An error of 5e-6 in a weight of 0.12 moves the sum by 4e-5 of itself.
    np.testing.assert_allclose(solved, kernels.SCORES, rtol=0, atol=2e-4)
    printed = np.array([float(text) for text in kernels.PRINTED["elu"]])
    solved = printed * math.exp(-0.43) / printed[3] - 1
    np.testing.assert_allclose(solved[[0, 1, 2, 4]], np.delete(kernels.SCORES, 3), atol=0.02)
    assert kernels.residual() < 5.1e-6


def test_exactly_three_last_digits_are_off_and_rounding_explains_them():
    assert [text.split(" ")[0] for text in kernels.missed(kernels.SCORES)] == [
        "leaky[4]", "gelu[0]", "gelu[4]",
    ]  # fmt: skip
    assert kernels.missed(kernels.UNROUNDED) == []
    assert np.round(kernels.UNROUNDED, 2).tolist() == list(kernels.SCORES)
    wrong = (0.60, *kernels.SCORES[1:])
    assert len(kernels.missed(wrong)) > 3


def test_weights_and_measures_against_loops():
    tokens = lab.Tokens.drawn(3, 4, 5, 6)
    q, k = tokens.q.numpy(), tokens.k.numpy()
    by_hand = np.zeros((5, 6))
    for i, j in itertools.product(range(5), range(6)):
        by_hand[i, j] = reference.elu(q[i]) @ reference.elu(k[j])
    by_hand /= by_hand.sum(1, keepdims=True)
    target = np.exp(q @ k.T / 2)
    target /= target.sum(1, keepdims=True)
    ours = lab.normalised(tokens.kernel(ELU(), lab.parameters(ELU(), 4, 0)))
    np.testing.assert_allclose(ours.numpy(), by_hand, rtol=1e-12)
    np.testing.assert_allclose(tokens.softmax().numpy(), target, rtol=1e-12)
    soft = tokens.softmax()
    assert lab.distance(ours, soft) == pytest.approx(abs(by_hand - target).sum(1).mean() / 2)
    assert lab.keys_in_use(ours) == pytest.approx((1 / (by_hand**2).sum(1)).mean())
    pairs = [np.corrcoef(a, b)[0, 1] for a, b in zip(by_hand, target, strict=True)]
    assert lab.correlation(ours, soft) == pytest.approx(np.mean(pairs))
    v = tokens.v.numpy()
    off = np.linalg.norm((by_hand - target) @ v, axis=1)
    uniform = np.linalg.norm(v.mean(0) - target @ v, axis=1)
    # torch takes the lower of the two middle values; five queries have one.
    expected = np.median(off) / np.median(uniform)
    assert lab.output_error(ours, soft, tokens.v) == pytest.approx(expected)


def test_a_row_without_weight_is_read_uniformly_and_measures_know_their_ends():
    kernel = torch.tensor([[0.0, 0.0], [1.0, 3.0]])
    assert lab.normalised(kernel).tolist() == [[0.5, 0.5], [0.25, 0.75]]
    sure, even = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.5, 0.5]])
    assert lab.distance(sure, even) == 0.5 and lab.distance(sure, sure) == 0
    assert lab.keys_in_use(sure) == 1 and lab.keys_in_use(even) == 2
    v = torch.tensor([[1.0], [3.0]])
    assert lab.output_error(even, sure, v) == 1 and lab.output_error(sure, sure, v) == 0


def test_tokens_are_those_of_their_seed():
    one, other = lab.Tokens.drawn(1, 8, 3, 4), lab.Tokens.drawn(1, 8, 3, 4, scale=2.0)
    assert torch.equal(2 * one.q, other.q) and torch.equal(one.v, other.v)
    assert not torch.equal(one.q, lab.Tokens.drawn(2, 8, 3, 4).q)
    near = CosFormer(max_length=4)
    kernel = one.kernel(near, lab.parameters(near, 8, 0))
    ages = torch.arange(3)[:, None] - torch.arange(4)
    expected = one.q.relu() @ one.k.relu().T * torch.cos(math.pi * ages / 8)
    torch.testing.assert_close(kernel, expected)


def test_the_kernel_of_favor_nears_softmax_and_that_of_tanh_does_not():
    tokens = lab.Tokens.drawn(0, 8, 16, 32, scale=0.5)
    favor = Favor(num_features=4096)
    found = [
        lab.distance(lab.normalised(tokens.kernel(phi, lab.parameters(phi, 8, 0))), tokens.softmax())
        for phi in (favor, Tanh())
    ]
    assert found[0] < 0.02 < found[1]


def test_the_rank_of_the_weights_tells_a_function_of_the_score_from_features():
    found = kernels.every_map(0, 8, 1.0)
    assert {name: m.rank for name, m in found.items() if name.endswith("phi")} == {
        "leaky phi": 8, "elu phi": 8, "gelu phi": 8, "favor phi": 64,
    }  # fmt: skip
    assert all(m.rank > 30 for name, m in found.items() if name.endswith(" f"))
