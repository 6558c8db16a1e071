"""`check_streaming` passes what streams, and finds each planted fault."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import pad

from hecate.cms import CMS
from hecate.errors import ConfigError
from hecate.models import LanguageModel
from hecate.nn import Memory, SlidingAttention
from hecate.testing import check_streaming
from tests.nn.layers import seeded

KERNEL = 3


class Own(nn.Module):
    """A user's own: a sum that runs, a convolution of three taps, a position; each can be planted wrong."""

    def __init__(self, fault: str = "") -> None:
        super().__init__()
        self.fault, self.drop = fault, nn.Dropout(0.5 if fault == "dropout" else 0.0)

    def forward(self, x, state=None):
        if state is None:
            state = x.new_zeros(len(x), x.shape[-1]), x.new_zeros(len(x), KERNEL - 1, x.shape[-1]), x.new_zeros(len(x))
        total, past, place = state
        if self.fault == "sum":
            total = torch.zeros_like(total)
        seen = pad(x, (0, 0, KERNEL - 1, 0)) if self.fault == "halo" else torch.cat([past, x], 1)
        mixed = sum(seen[:, tap : tap + x.shape[1]] * (tap + 1) for tap in range(KERNEL))
        sums = total[:, None] + x.cumsum(1)
        start = torch.zeros_like(place) if self.fault == "position" else place
        places = start[:, None] + torch.arange(x.shape[1], dtype=x.dtype)
        if self.fault == "future":
            mixed = mixed + x.mean(1, keepdim=True)
        if self.fault == "in place":
            total.add_(1.0)
        y = self.drop(mixed + sums * (1 + 0.1 * places[..., None].sin()))
        return y, (sums[:, -1].clone(), torch.cat([past, x], 1)[:, -(KERNEL - 1) :], place + x.shape[1])


def drawn(*shape):
    return torch.randn(*shape, generator=seeded(3))


@pytest.mark.spec("STATE-STREAM-I1")
def test_a_planted_fault_is_found():
    for fault, sentence in {
        "sum": "tokens 0..0, then the rest: token 1 of row 0 differs",
        "halo": "tokens 0..0, then the rest: token 1 ",
        "position": "tokens 0..0, then the rest: token 1 ",
        "future": "tokens 0..0, then the rest: token 0 ",
        "in place": "which the first call has written to",
        "dropout": "the same call, once more",
    }.items():
        check_streaming(Own(), drawn(2, 7, 4))
        with pytest.raises(AssertionError) as caught:
            check_streaming(Own(fault), drawn(2, 7, 4))
        assert sentence in str(caught.value)


@pytest.mark.spec("STATE-STREAM-I1")
def test_layers_stream():
    slow = {"name": "slow", "period": 3, "memory": {"retention": "decay"}}
    for layer in (
        Memory(16, 2, "titans_linear", generator=seeded()),
        Memory(16, 2, {"chunk": 3, "commit": "chunk"}, generator=seeded()),
        CMS(16, 2, {"levels": [{"name": "fast"}, slow]}, generator=seeded()),
        SlidingAttention(16, 2, window=3, generator=seeded()),
    ):
        check_streaming(layer, drawn(2, 8, 16))
    model = LanguageModel({"vocab_size": 5, "d_model": 8, "heads": 2, "layers": 1}, generator=seeded())
    check_streaming(model, torch.randint(5, (2, 8), generator=seeded()))


def test_what_cannot_be_checked():
    with pytest.raises(ConfigError, match="T at least 3"):
        check_streaming(Own(), drawn(2, 2, 4))
    with pytest.raises(AssertionError, match="must be"):
        check_streaming(lambda x, state: (x[:, -1], state), drawn(2, 4, 3))
