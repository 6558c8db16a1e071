"""The short convolution and the normalisation of q and k, against loops in numpy."""

import numpy as np
import pytest
import torch

from hecate.errors import ConfigError
from hecate.nn import ShortConv, normalise_qk
from hecate.nn.conv import convolved
from hecate.nn.memory import LayerState
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


@pytest.mark.spec("NN-CONV-I4")
@pytest.mark.parametrize("resets", [(), (0, 4), (3,), (2, 8)])
def test_an_inert_convolution_does_not_know_of_masked_tokens(resets):
    conv, x = conv_of(channels=5), inputs(1, 9, width=5)
    conv.inert = True
    write = torch.tensor([[True, False, True, False, False, True, True, False, False]])
    reset = torch.zeros(1, 9, dtype=torch.bool)
    reset[:, list(resets)] = True
    # A document that a masked token opens is that of the next written one, here or in the next call.
    last, own, written = 0, [], []
    for t in range(9):
        last += int(reset[0, t])
        if write[0, t]:
            own.append(last)
            written.append(t)
    for resetting in (reset if resets else None, reset):
        after = inputs(1, 2, seed=1, width=5)
        expected = loop(conv.weight.detach().numpy(), torch.cat([x[0, written], after[0]]).numpy(), [*own, last, last])
        state, found = None, []
        for part in (slice(0, 4), slice(4, 5), slice(5, 9)):
            masks = write[:, part], None if resetting is None else resetting[:, part]
            y, taps, segment = convolved(conv, x[:, part], state, *masks)
            state = LayerState(None, taps, segment)
            found.append(y)
        y, _, _ = convolved(conv, after, state, None, None)
        near(torch.cat([torch.cat(found, 1)[:, written], y], 1)[0], torch.from_numpy(expected))
        alone = torch.nn.functional.silu(x * conv.weight[0])
        near(torch.cat(found, 1)[~write], alone[~write])
