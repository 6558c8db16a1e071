"""Untrained memories by their names on streams: what a deep one learns in context, and beside a fast one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from hecate import MemoryConfig, memory_scan, named_rule

ROWS, WIDTH = 8, 16
Stream = tuple[Tensor, Tensor]


def regression(length: int, seed: int, *, even: bool = False) -> Stream:
    """x of unit length and y = V f(W x) through two directions, |y|^2 = 1 in the mean; f is tanh, or the size of a
    number less its mean."""
    source = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=source)

    x = normalize(draw(ROWS, length, WIDTH), dim=-1)
    w, v = 1.5 * WIDTH**0.5 * normalize(draw(ROWS, 2, WIDTH), dim=-1), draw(ROWS, WIDTH, 2)
    z = torch.einsum("brd,btd->btr", w, x)
    made = z.abs() - z.abs().mean(1, keepdim=True) if even else torch.tanh(1.5 * z)
    y = torch.einsum("bvr,btr->btv", v, made)
    return x, y / y.square().sum(-1, keepdim=True).mean((1, 2), keepdim=True).sqrt()


def two_paces(length: int, seed: int) -> Stream:
    """The same map for 70 % of y, and for 30 % a linear one that is drawn anew every 256 tokens."""
    x, slow = regression(length, seed)
    maps = torch.randn(ROWS, length // 256, WIDTH, WIDTH, generator=torch.Generator().manual_seed(seed + 50))
    fast = torch.einsum("btvd,btd->btv", maps.repeat_interleave(256, 1), x)
    fast = fast / fast.square().sum(-1, keepdim=True).mean((1, 2), keepdim=True).sqrt()
    return x, 0.7**0.5 * slow + 0.3**0.5 * fast


def predicted(config: MemoryConfig, x: Tensor, y: Tensor) -> Tensor:
    """The answer to every x before its y is written."""
    config = config.model_copy(update={"read": "before"})
    with torch.no_grad():
        return memory_scan(config, x.unsqueeze(2), x.unsqueeze(2), y.unsqueeze(2))[0].squeeze(2)


def late(error: Tensor) -> float:
    """Mean square error of the second half."""
    return float(error.square().sum(-1)[:, error.shape[1] // 2 :].mean())


@pytest.mark.spec("STR-MLP-D2")
def test_titans_learns_features_in_context():
    x, y = regression(2048, 7)
    assert late(predicted(named_rule("titans"), x, y) - y) <= 0.05
    printed = MemoryConfig.model_validate({
        "kind": "titans", "step": "raw", "structure": {"kind": "mlp", "activation": "silu"},
        "retention": {"kind": "decay", "towards": "zero"}, "algorithm": {"kind": "momentum", "lr": 0.01},
    })  # fmt: skip
    assert late(predicted(printed, x, y) - y) >= 0.95


@pytest.mark.slow
@pytest.mark.spec("STR-MLP-D2")
def test_long_streams():
    """8,192 tokens: below .02 with tanh where the map is odd, above .9 where it is even, which gelu with bias learns;
    a slow deep memory and a fast one behind it come below .10 in the mean of 16 rows."""
    titans = named_rule("titans")
    gelu = titans.structure.model_copy(update={"activation": "gelu", "bias": True})
    even = titans.model_copy(update={"structure": gelu})
    x, y = regression(8192, 7)
    assert late(predicted(titans, x, y) - y) <= 0.02
    x, y = regression(8192, 7, even=True)
    assert late(predicted(titans, x, y) - y) >= 0.9
    assert late(predicted(even, x, y) - y) <= 0.2
    fast, errors = MemoryConfig.model_validate({"kind": "gated_delta", "algorithm": {"kind": "gd", "lr": 0.5}}), []
    for seed in (7, 8):  # eight rows of one are .096 to .102
        x, y = two_paces(8192, seed)
        slow = predicted(titans, x, y)
        errors.append(late(slow + predicted(fast, x, y - slow) - y))
    assert sum(errors) / 2 <= 0.1
