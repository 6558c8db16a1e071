"""PhiMomentum as it comes: every map trains at every length of gradient; when it is SGD."""

from __future__ import annotations

import pytest
import torch

from hecate import phi
from hecate.errors import ConfigError, StabilityWarning
from hecate.optim import PhiMomentum
from tests.optim.test_fixed_points_and_descent import EVERY, label

SIZES = (1e-6, 3.0, 1e6)


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    rows = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return rows / rows.norm(dim=-1, keepdim=True)


def fall(start: torch.Tensor, steps: int = 8, **options) -> tuple[float, dict]:
    """What is left of |w|^2 / 2, whose gradient is w, and the options as they were resolved."""
    w = torch.nn.Parameter(start.clone())
    optimizer = PhiMomentum([w], **options)
    for _ in range(steps):
        w.grad = w.detach().clone()
        optimizer.step()
    wide, first = w.detach().double(), start.double()
    return float((wide.norm() / first.norm()) ** 2), optimizer.param_groups[0]


@pytest.mark.spec("OPT-PHI-D5", "OPT-PHI-I2")
@pytest.mark.parametrize("made", EVERY, ids=label)
def test_defaults_descend_at_every_length_of_gradient(made):
    left = []
    for size in SIZES:
        try:
            share, group = fall(size * draw(6, 5), feature_map=made)
        except ConfigError as error:  # says by how much, before any step
            assert "misses 0." in str(error) and made.kind == "random_fourier"
            return
        left.append(share)
    assert max(left) < 1 - 1e-9, left
    if group["input_scale"] == "restored" or made.traits().degree == 1:
        # Homogeneous: 8 steps of lr 1e-3 amplify nothing, so rounding is that of a few sums.
        assert max(left) - min(left) < 1e-12 and max(left) < 0.999, left


@pytest.mark.spec("OPT-PHI-D5")
def test_random_fourier_features_of_wide_rows_train_as_they_come():
    for dtype in (torch.float32, torch.float64):
        made = phi.RandomFourier(d_phi=128)
        for size in (1e-30, *SIZES, 1e25):  # squares leave float32
            share, group = fall(size * draw(7, 64).to(dtype), 100, feature_map=made)
            assert (group["lift"], group["input_scale"]) == ("pinv", "restored") and share < 0.5
        with pytest.raises(ConfigError, match=r"misses \d\.\d+ .* use input_scale='restored', more"):
            fall(draw(7, 64), feature_map=made, input_scale="none")


@pytest.mark.spec("OPT-PHI-D5")
def test_updates_are_as_long_as_gaussian_gradients_whatever_phi():
    for made in (phi.Softmax(), phi.Polysketch(degree=4, sketch=3), phi.SquaredReLU()):
        w = torch.nn.Parameter(torch.zeros(64, 32))
        row_map = (optimizer := PhiMomentum([w], feature_map=made)).row_map(optimizer.param_groups[0], w.data)
        g = torch.randn(32, 32, generator=torch.Generator().manual_seed(0))  # as they are gauged
        torch.testing.assert_close(row_map(g).norm(), g.norm(), rtol=1e-12, atol=0)
        torch.testing.assert_close(row_map(1e3 * g), 1e3 * row_map(g), rtol=1e-12, atol=1e-12)


@pytest.mark.spec("OPT-PHI-D5")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_updates_that_do_not_descend_are_warned_of_with_their_cosine(dtype):
    flat = phi.Compose(maps=[phi.Normalise(inner="identity"), phi.RandomFourier(d_phi=8)])
    w = torch.nn.Parameter(torch.zeros(3, 5, dtype=dtype))
    with pytest.warns(UserWarning, match=r"rows of 5 by 'compose' .* the cosine -?0\.000 with"):
        PhiMomentum([w], feature_map=flat, lift="vjp")
    with pytest.warns(UserWarning, match="rows of 1 by 'softmax' and lift 'vjp' have the cosine"):
        PhiMomentum([torch.nn.Parameter(torch.zeros((), dtype=dtype))], feature_map="softmax")
    assert PhiMomentum([w], feature_map=flat).param_groups[0]["lift"] == "pinv"


@pytest.mark.spec("OPT-LIFT-I3")
def test_what_pinv_misses_is_told_with_the_rate_below_which_it_descends():
    g = torch.Generator().manual_seed(0)
    ends = []
    for over in (0.5, 8.0):
        w = torch.nn.Parameter(torch.randn(8, 64, generator=g, dtype=torch.float64))
        with pytest.warns(StabilityWarning, match=r"misses 0\.6\d of .*curvature is above 0\.026"):
            optimizer = PhiMomentum([w], 0.025 * over, feature_map=phi.RandomFourier(d_phi=128))
        start = w.square().sum().item()
        for _ in range(120):
            w.grad = w.detach().clone()  # of |w|^2 / 2, whose curvature is 1
            optimizer.step()
        ends.append(w.square().sum().item() / start)
    assert ends[0] < 0.5 and ends[1] > 1
