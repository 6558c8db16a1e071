"""Check that a model gives a sequence the same outputs whole, in pieces and token by token."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from hecate.errors import ConfigError

Model = Callable[..., tuple[Tensor, Any]]


def check_streaming(model: Model, x: Tensor, *, tolerance: float | None = None) -> None:
    """Holds a model's training, prefill and decoding to one another: `model(x, state) -> (y, state)`, state None at the
    start. [STATE-STREAM-I1]

        check_streaming(layer, torch.randn(2, 12, 64, dtype=torch.float64))

    y of all of x is what training sees. It must be what comes of x in two pieces at every place, the second from the
    state of the first, and token by token; a call must leave the state that it was given as it was, and twice the same
    call must give the same. What the state lacks is found by this: all of it, the inputs of a convolution, a position.

    Args:
        model: a module or function; without dropout, such as in `eval()`.
        x: `[B, T, ...]`, numbers or tokens, T at least 3; longer than any window, chunk or convolution to be tested.
        tolerance: largest difference of a token's outputs, relative to the norm of the largest token's; None for
            eps^(2/3) of y's dtype: 4e-11 in float64, 2e-5 in float32.

    Raises:
        AssertionError: the first way of cutting x that gives something else, the token and the difference.
        ConfigError: x too short to be cut.
    """
    if x.dim() < 2 or x.shape[1] < 3:
        raise ConfigError(f"x must be [B, T, ...] with T at least 3, to be cut in pieces, got {list(x.shape)}")
    length = x.shape[1]
    with torch.no_grad():
        whole, _ = model(x, None)
        if not isinstance(whole, Tensor) or whole.shape[:2] != x.shape[:2]:
            found = list(whole.shape) if isinstance(whole, Tensor) else type(whole).__name__
            raise AssertionError(f"y of x {list(x.shape)} must be [B, T, ...] = {list(x.shape[:2])} first, got {found}")
        limit = torch.finfo(whole.dtype).eps ** (2 / 3) if tolerance is None else tolerance
        _compare("the same call, once more", model(x, None)[0], whole, limit)
        for cut in range(1, length):
            _compare(f"tokens 0..{cut - 1}, then the rest", _joined(model, x, [0, cut, length]), whole, limit)
        _compare("token by token", _joined(model, x, [*range(length + 1)]), whole, limit)
        _, state = model(x[:, : length // 2], None)
        first, second = (model(x[:, length // 2 :], state)[0] for _ in range(2))
        _compare("twice from one state, which the first call has written to", second, first, limit)


def _joined(model: Model, x: Tensor, borders: Sequence[int]) -> Tensor:
    """y of x in pieces, each from the state of the last."""

    def pieces() -> Iterator[Tensor]:
        state = None
        for at, end in pairwise(borders):
            y, state = model(x[:, at:end], state)
            yield y

    return torch.cat([*pieces()], 1)


def _compare(how: str, got: Tensor, whole: Tensor, limit: float) -> None:
    """AssertionError with the first token whose outputs differ."""
    if got.shape != whole.shape:
        raise AssertionError(f"{how}: y is {list(got.shape)}, of the whole sequence {list(whole.shape)}")
    size = whole.reshape(*whole.shape[:2], -1).norm(dim=-1).max().clamp(min=torch.finfo(whole.dtype).tiny)
    error = (got - whole).reshape(*whole.shape[:2], -1).norm(dim=-1) / size
    wrong = ~(error <= limit)  # NaN is wrong, too
    if bool(wrong.any()):
        row, token = wrong.nonzero()[wrong.nonzero()[:, 1].argmin()].tolist()
        raise AssertionError(
            f"{how}: token {token} of row {row} differs from the whole sequence by {float(error[row, token]):.2g} of "
            f"the largest output, beyond {limit:.2g}; what it needs of the tokens before is not in the state"
        )
