"""The short convolution and the normalisation of q and k, against loops in numpy."""

import numpy as np
import pytest
import torch

from hecate.errors import ConfigError
from hecate.nn import ShortConv, normalise_qk
from tests.nn.layers import inputs, near, seeded


def conv_of(kernel=4, channels=3):
    conv = ShortConv(channels, kernel)
    conv.reset_parameters(seeded())
    with torch.no_grad():
        conv.weight += torch.randn(conv.weight.shape, generator=seeded(1))
    return conv


def loop(weight, x, document):
    """One sequence: the taps that stay in the document of their token, then SiLU."""
    y = np.zeros_like(x)
    for t in range(len(x)):
        for j in range(len(weight)):
            if t >= j and document[t - j] == document[t]:
                y[t] += weight[j] * x[t - j]
    return y / (1 + np.exp(-y))


@pytest.mark.spec("NN-CONV-D1")
@pytest.mark.parametrize("kernel", [2, 3, 4, 9])
def test_against_a_loop(kernel):
    conv, x = conv_of(kernel), inputs(width=3)
    y, state = conv(x)
    weight = conv.weight.detach().numpy()
    near(y, torch.from_numpy(np.stack([loop(weight, row, np.zeros(7)) for row in x.numpy()])))
    padded = torch.cat([torch.zeros(2, kernel, 3), x], 1)
    near(state, padded[:, -(kernel - 1) :], 0.0)


@pytest.mark.spec("NN-CONV-I2")
def test_documents_against_a_loop():
    conv, x = conv_of(), inputs(width=3)
    documents = torch.tensor([[0, 0, 1, 2, 2, 2, 2], [0, 0, 0, 0, 0, 1, 1]])
    y, _ = conv(x, segment=torch.cat([torch.zeros(2, 3, dtype=torch.int64), documents], 1))
    pairs = zip(x.numpy(), documents.numpy(), strict=True)
    weight = conv.weight.detach().numpy()
    near(y, torch.from_numpy(np.stack([loop(weight, row, of) for row, of in pairs])))


@pytest.mark.spec("NN-CONV-I3")
def test_starts_near_the_identity():
    conv = ShortConv(1000, 4)
    conv.reset_parameters(seeded())
    noise = conv.weight.detach() - torch.tensor([1.0, 0, 0, 0]).unsqueeze(1)
    # 4000 draws: the standard deviation of their root mean square is 0.02 / sqrt(8000).
    assert abs(float(noise.square().mean().sqrt()) - 0.02) < 5 * 0.02 / 8000**0.5
    assert repr(conv) == "ShortConv(1000, kernel=4)"


@pytest.mark.spec("NN-MEM-D2")
def test_normalise_qk():
    x = inputs(2, 3, width=5).unflatten(-1, (1, 5))
    near(normalise_qk(x, "none"), x, 0.0)
    near(normalise_qk(x, "l2").norm(dim=-1), torch.ones(2, 3, 1), 1e-11)
    near(normalise_qk(x, "rms").square().mean(-1), torch.ones(2, 3, 1), 1e-11)
    near(normalise_qk(x, "rms"), normalise_qk(x, "l2") * 5**0.5, 1e-11)
    with pytest.raises(ConfigError, match="qk_norm must be one of .*'rms'.*got 'L2'"):
        normalise_qk(x, "L2")


@pytest.mark.spec("NN-MEM-D2")
@pytest.mark.parametrize("norm", ["l2", "rms"])
def test_normalise_qk_of_zero_and_of_small_and_low_precision(norm):
    zero = torch.zeros(1, 4, requires_grad=True)
    y = normalise_qk(zero, norm)
    assert torch.equal(y, torch.zeros(1, 4))
    assert torch.isfinite(torch.autograd.grad(y.sum(), zero)[0]).all()
    for dtype in (torch.float16, torch.bfloat16):
        # The square of 1e-4 underflows in float16; that of 300 overflows.
        for size in (1e-4, 300.0):
            y = normalise_qk(torch.full((1, 4), size, dtype=dtype), norm)
            expected = torch.full((1, 4), 0.5 if norm == "l2" else 1.0, dtype=dtype)
            assert y.dtype == dtype
            near(y, expected, torch.finfo(dtype).eps)
