"""Forms of torch's operations under `exact`: their values, and that rows, places and cuts change no bit of them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import hecate
from hecate.tape import STEADY

DTYPES = [torch.float32, torch.float64, torch.bfloat16]
FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    name: getattr(home, name)
    for home, names in (
        (torch, "sigmoid tanh exp expm1 log log1p sin cos sinh cosh erf rsqrt"),
        (F, "silu softplus logsigmoid gelu mish elu"),
    )
    for name in names.split()
} | {
    "method": Tensor.sigmoid, "builtin": torch._C._nn.silu, "pow": lambda x: x.abs() ** 1.3, "rpow": lambda x: 1.7**x,
    "raised": lambda x: torch.pow(x.abs(), x),
}  # fmt: skip


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def near(found: Tensor, wanted: Tensor) -> bool:
    """Within rounding of 64 additions of the size of the largest number."""
    bound = 64 * torch.finfo(found.dtype).eps * float(wanted.abs().amax())
    return found.shape == wanted.shape and float((found.double() - wanted.double()).abs().amax()) <= bound


def rows_alone(form: Callable[[Tensor], Tensor], x: Tensor) -> None:
    """The form of rows is that of each, at every place, and of any number of them."""
    with hecate.exact():
        alone = torch.cat([form(x[n : n + 1]) for n in range(len(x))])
        for at, end in ((0, len(x)), (0, 2), (1, 9), (3, 8), (2, 2 + 16)):
            assert torch.equal(form(x[at:end]), alone[at:end]), (at, end)
        assert torch.equal(form(x.flip(0)), alone.flip(0))
    assert near(alone, form(x))


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.spec("TAPE-EXACT-D1")
def test_products_with_weights(dtype, threads):
    torch.set_num_threads(threads)
    try:
        sizes = ((1, 3), (5, 2), (33, 65), (64, 192), (100, 7), (256, 300))
        for width, out in sizes if threads == 1 else sizes[2::3]:
            weight, bias = draw(out, width, seed=1, dtype=dtype), draw(out, seed=2, dtype=dtype)
            x = draw(21, width, dtype=dtype)
            rows_alone(partial(F.linear, weight=weight), x)
            rows_alone(partial(F.linear, weight=weight, bias=bias), x)
            rows_alone(partial(torch.matmul, other=weight.mT), x)
        with hecate.exact():
            assert F.linear(x[:0], weight, bias).shape == (0, out)
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.spec("TAPE-EXACT-D1")
def test_products_of_rows(dtype):
    a, b = draw(19, 5, 33, dtype=dtype), draw(19, 33, 7, seed=1, dtype=dtype)

    def of(form: Callable[..., Tensor]) -> Callable[[Tensor], Tensor]:
        return lambda rows: form(rows[:, :5], rows[:, 5:12].mT)

    whole = torch.cat([a, b.mT], 1)
    for form in (
        torch.matmul, torch.bmm, lambda a, b: a @ b, lambda a, b: a[:, None] @ b[:, None],
        lambda a, b: torch.einsum("nmk,nkp->npm", a, b), lambda a, b: torch.einsum("nmk,nkp->np", a, b),
        lambda a, b: (a[:, :1] @ b).squeeze(1), lambda a, b: torch.baddbmm(a[..., :7], a, b, alpha=-2.0),
    ):  # fmt: skip
        rows_alone(of(form), whole)
    with hecate.exact():  # tokens as rows: one by one, or at once
        assert torch.equal(torch.cat([a[:, t : t + 1] @ b for t in range(5)], 1), a @ b)
        assert torch.equal(a[0, 0] @ b[0], (a[0] @ b[0])[0]) and torch.equal(a @ b[0, :, 0], (a @ b[0, :, :1])[..., 0])


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.spec("TAPE-EXACT-D1")
def test_functions_of_single_numbers(name, dtype):
    x = draw(37, 7, dtype=dtype)
    rows_alone(FUNCTIONS[name], x.abs() + 0.01 if name in ("log", "log1p", "rsqrt") else x)


@pytest.mark.spec("TAPE-EXACT-D1")
def test_functions_of_many_numbers_are_shared_out_among_no_threads():
    x, threads = draw(5, 33_003), 3
    with hecate.exact():
        alone = torch.cat([F.silu(row) for row in x.split(1)])
        torch.set_num_threads(threads)
        try:
            assert torch.equal(F.silu(x), alone) and torch.equal(F.silu(x.mT.contiguous()).mT, alone)
        finally:
            torch.set_num_threads(1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.spec("TAPE-EXACT-D1")
def test_attention(dtype):
    q, k, v = (draw(2, 4, 9, 12, seed=seed, dtype=dtype) for seed in range(3))
    own = draw(9, 9) > 0
    seen = own | torch.eye(9, dtype=torch.bool)
    added = torch.zeros(9, 9, dtype=dtype).masked_fill(~seen, -torch.inf)
    for how in ({}, {"is_causal": True}, {"attn_mask": seen}, {"attn_mask": added}, {"scale": 0.3}):
        wanted = F.scaled_dot_product_attention(q, k, v, **how)
        with hecate.exact():
            found = F.scaled_dot_product_attention(q, k, v, **how)
            assert near(found, wanted)
            assert torch.equal(F.scaled_dot_product_attention(q[1:], k[1:], v[1:], **how), found[1:])
    few: Any = (q, k[:, :2], v[:, :2])
    with hecate.exact():
        assert near(F.scaled_dot_product_attention(*few, enable_gqa=True), F.scaled_dot_product_attention(
            q, *(x.repeat_interleave(2, 1) for x in few[1:])
        ))  # fmt: skip
        causal = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        for t in range(9):  # without those behind it, and with padding ahead of all
            ahead = [F.pad(x[..., : t + 1, :], (0, 0, 70, 0)) for x in (k, v)]
            mask = torch.arange(71 + t) >= 70
            alone = F.scaled_dot_product_attention(q[..., t : t + 1, :], *ahead, attn_mask=mask[None])
            assert torch.equal(alone, causal[..., t : t + 1, :])


@pytest.mark.spec("TAPE-EXACT-D1")
def test_it_is_of_its_thread_and_ends():
    x, weight = draw(3, 64), draw(200, 64, seed=1)
    plain, told = F.linear(x, weight), []
    with pytest.raises(ZeroDivisionError), hecate.exact():
        with hecate.exact():
            pass
        assert STEADY.get() and not torch.is_grad_enabled()
        thread = threading.Thread(target=lambda: told.append((STEADY.get(), torch.equal(F.linear(x, weight), plain))))
        thread.start()
        thread.join()
        1 / 0  # noqa: B018
    assert told == [(False, True)] and not STEADY.get() and torch.is_grad_enabled()
    assert torch.equal(F.linear(x, weight), plain)
