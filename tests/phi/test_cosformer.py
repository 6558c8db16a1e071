"""cosFormer outside a scan: its kernel, its bounds, and positions through combinators."""

import numpy as np
import pytest
import torch

from hecate import MemoryConfig, phi
from tests.phi.random_common import gaussian
from tests.reference.positions import attention


@pytest.mark.spec("PHI-COSFORMER-D1", "PHI-COSFORMER-D2")
def test_kernel_is_that_of_the_paper():
    x, place = gaussian(7, 4), torch.arange(7)
    features = phi.CosFormer(max_length=6)(x, position=place)
    near = torch.cos(torch.pi * (place[:, None] - place) / 12)
    kernel = torch.relu(x) @ torch.relu(x).T * near
    torch.testing.assert_close(features @ features.T, kernel, rtol=1e-12, atol=1e-15)
    ones = np.ones(7)
    read = attention(x.numpy(), x.numpy(), np.eye(7), ones, ones, 0 * ones, 6, False)
    torch.testing.assert_close(kernel.tril(), torch.tensor(read), rtol=1e-12, atol=1e-15)


@pytest.mark.spec("PHI-COSFORMER-I1")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("largest", [1, 3, 2048, 1_000_003])
def test_no_rounding_makes_a_feature_negative(dtype, largest):
    map_ = phi.CosFormer(max_length=largest)
    ends = torch.tensor([0, 1, largest - 1, largest])
    features = map_(torch.ones(4, 1, dtype=dtype), position=ends)
    assert bool((features >= 0).all())
    assert features[0].tolist() == [1.0, 0.0] and features[-1].tolist() == [0.0, 1.0]


@pytest.mark.spec("PHI-FAMILY-D4")
def test_combinators_hand_positions_on():
    inner, x, place = phi.CosFormer(), gaussian(3, 4), torch.arange(3)
    alone = inner(x, position=place)
    both = phi.Concat(maps=(phi.Identity(), inner))
    torch.testing.assert_close(both(x, position=place), torch.cat([x, alone], -1))
    behind = phi.Compose(maps=(phi.ReLU(), inner))
    torch.testing.assert_close(behind(x, position=place), alone)
    lifted = phi.OddLift(inner=phi.Normalise(inner=phi.Compose(maps=(inner, phi.Identity()))))
    assert lifted.needs_position and both.needs_position and behind.needs_position
    lifted(x, position=place)
    assert phi.Compose(maps=(inner, phi.Polynomial(degree=2))).exact_kernel(x, x) is None


def test_a_sum_normaliser_takes_it():
    config = MemoryConfig(feature_map="cosformer", normalizer="sum", bias="dot", key_norm="sum")
    assert config.feature_map == phi.CosFormer()
