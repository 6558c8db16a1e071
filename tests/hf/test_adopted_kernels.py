"""The kernels of adopted layers: values and derivatives against the formula, token by token."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.nn import functional as F

pytest.importorskip("transformers", minversion="5")

from hecate.hf import kernels

ACTIVATIONS = {None: lambda x: x, "silu": F.silu, "gelu": F.gelu}


def drawn(*shape: int, generator: torch.Generator, **how: Any) -> Tensor:
    return torch.randn(*shape, generator=generator, **how)


def convolved(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, sizes: tuple[int, ...]) -> Tensor:
    """The definition, a document at a time."""
    parts = []
    for part in x.split(sizes, -1):
        padded = F.conv1d(part, weight.unsqueeze(1), bias, padding=weight.shape[1] - 1, groups=weight.shape[0])
        parts.append(padded[..., : part.shape[-1]])
    return ACTIVATIONS[activation](torch.cat(parts, -1))


LEAST = "hecate.nn.blocks.LEAST"  # numbers for which a convolution takes a kernel, not plain torch
SIZES = [(41,), (17, 1, 2, 21), (1,), (2,)]
# Every activation with all sizes, by turns in torch and in a kernel.
CASES = [(*pair, n // 4 + n & 1) for n, pair in enumerate(product(ACTIVATIONS, SIZES))]


@pytest.mark.spec("HF-ADOPT-D1", "HF-ADOPT-D2")
@pytest.mark.parametrize(("activation", "sizes", "kernel"), CASES)
def test_a_convolution_and_its_derivative(monkeypatch, generator, activation, sizes, kernel):
    monkeypatch.setattr(LEAST, 1 if kernel else 1 << 30)
    x, w, b = (drawn(*shape, generator=generator) for shape in ((2, 3, sum(sizes)), (3, 4), (3,)))
    starts = torch.zeros(2, sum(sizes), dtype=torch.bool)
    starts[:, torch.tensor(sizes).cumsum(0)[:-1]] = True
    given = starts if len(sizes) > 1 else None
    g = drawn(2, 3, sum(sizes), generator=generator)
    for bias in (None, b):
        leaves = [t.clone().requires_grad_() for t in (x, w, *(() if bias is None else (bias,)))]
        arguments = *leaves[:2], None if bias is None else leaves[2], activation
        own, wanted = kernels.causal_conv(*arguments, hecate_starts=given), convolved(*arguments, sizes)
        torch.testing.assert_close(own, wanted, rtol=1e-12, atol=1e-12)
        theirs = torch.autograd.grad(wanted, leaves, g)
        for ours, right in zip(torch.autograd.grad(own, leaves, g), theirs, strict=True):
            torch.testing.assert_close(ours, right, rtol=1e-12, atol=1e-12)


@pytest.mark.spec("HF-ADOPT-D1")
@pytest.mark.parametrize("least", [1, 1 << 30])
def test_second_derivatives_and_transforms_of_a_convolution(monkeypatch, generator, least):
    monkeypatch.setattr(LEAST, least)
    starts = torch.tensor([[False] * 5 + [True] * 2 + [False] * 12])
    leaves = [drawn(*s, generator=generator).requires_grad_() for s in ((1, 2, 19), (2, 4), (2,))]

    def function(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return kernels.causal_conv(x, w, b, "silu", hecate_starts=starts)

    assert gradcheck(function, leaves) and gradgradcheck(function, leaves)
    x, w, b = (leaf.detach() for leaf in leaves)
    _, tangent = torch.func.jvp(lambda w: function(x, w, b), (w,), (torch.ones_like(w),))
    step = (function(x, w + 1e-6, b) - function(x, w - 1e-6, b)) / 2e-6
    torch.testing.assert_close(tangent, step, rtol=1e-7, atol=1e-8)


def stepped(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """The definition of the delta rule, of one head after another; states `[B, H, K, V]`."""
    y, state, several = torch.empty_like(v), state.clone(), v.shape[2] // k.shape[2]
    for b, t, h in torch.cartesian_prod(*(torch.arange(n) for n in v.shape[:3])).tolist():
        key, query = k[b, t, h // several], q[b, t, h // several]
        key, query = key / (key.square().sum() + 1e-6).sqrt(), query / (query.square().sum() + 1e-6).sqrt()
        held = state[b, h] * g[b, t, h].exp().reshape(-1, 1)
        state[b, h] = held + beta[b, t, h] * torch.outer(key, v[b, t, h] - key @ held)
        y[b, t, h] = query @ state[b, h] / key.numel() ** 0.5
    return y, state


@pytest.mark.spec("HF-ADOPT-D1")
@pytest.mark.parametrize(("rule", "length", "dtype"), [
    ("gated_delta", 1, torch.float32), ("gated_delta", 1, torch.float64), ("gated_delta", 2, torch.bfloat16),
    ("gated_delta", 70, torch.float64), ("kda", 1, torch.bfloat16), ("kda", 1, torch.float64),
    ("kda", 2, torch.float64), ("kda", 70, torch.float32),
])  # fmt: skip
def test_the_delta_rule_from_a_state(generator, rule, length, dtype):
    """The compiled step, the step in torch and the scan, in turn."""
    heads, groups = (6, 3) if rule == "gated_delta" else (3, 3)
    q, k = (drawn(2, length, groups, 5, generator=generator) for _ in "qk")
    v, state = drawn(2, length, heads, 7, generator=generator), drawn(2, heads, 5, 7, generator=generator)
    beta = 2 * torch.rand(2, length, heads, generator=generator)
    g = -torch.rand(2, length, heads, *([5] if rule == "kda" else []), generator=generator)
    q, k, v, g, beta = (t.to(dtype) for t in (q, k, v, g, beta))
    state = state.to(torch.promote_types(dtype, torch.float32))
    y, after = stepped(*(t.double() for t in (q, k, v, g, beta, state)))
    how = {"initial_state": state, "output_final_state": True, "use_qk_l2norm_in_kernel": True}
    own, found = kernels.delta_rule(rule, q, k, v, g=g, beta=beta, **how)
    assert own.dtype == dtype and found is not None and found.is_contiguous()
    assert (found is state) == (length == 1 and dtype != torch.float64)
    close = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    torch.testing.assert_close(own.double(), y, rtol=close, atol=close)
    torch.testing.assert_close(found.double(), after, rtol=close / 10, atol=close / 10)


@pytest.mark.spec("HF-ADOPT-D1")
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_token_of_a_convolution(generator, activation, dtype):
    x, w, b = drawn(2, 3, 9, generator=generator), drawn(3, 4, generator=generator), drawn(3, generator=generator)
    x, w, b = (t.to(dtype) for t in (x, w, b))
    for bias in (None, b):
        state = x[..., :4].contiguous()
        wanted = convolved(x, w, bias, activation, (9,))
        for t in range(4, 9):
            y = kernels.causal_conv_update(x[..., t : t + 1], state, w, bias, activation)
            torch.testing.assert_close(y, wanted[..., t : t + 1], rtol=1e-5, atol=1e-6)
            assert torch.equal(state, x[..., t - 3 : t + 1])


@pytest.mark.spec("HF-ADOPT-D1", "HF-ADOPT-D2")
@pytest.mark.parametrize("sizes", [(37,), (20, 1, 16)])
def test_the_recurrence_of_mamba2(generator, sizes):
    length = sum(sizes)
    x, dt = drawn(2, length, 4, 3, generator=generator), drawn(2, length, 4, generator=generator)
    B, C = (drawn(2, length, 2, 5, generator=generator) for _ in "BC")
    A, D, shift = -drawn(4, generator=generator).exp(), drawn(4, generator=generator), drawn(4, generator=generator)
    state = drawn(2, 4, 3, 5, generator=generator) if len(sizes) == 1 else torch.zeros(2, 4, 3, 5)
    starts = torch.zeros(2, length, dtype=torch.bool)
    starts[:, torch.tensor(sizes).cumsum(0)[:-1]] = True
    step, held, wanted = F.softplus(dt + shift).clamp(0.1, 1.5), state.clone(), []
    for t in range(length):
        held = torch.where(starts[:, t, None, None, None], 0.0, held) * (A * step[:, t]).exp()[..., None, None]
        key, query = B[:, t].repeat_interleave(2, 1), C[:, t].repeat_interleave(2, 1)
        held = held + step[:, t, :, None, None] * x[:, t].unsqueeze(-1) * key.unsqueeze(-2)
        wanted.append((held @ query.unsqueeze(-1)).squeeze(-1) + D[:, None] * x[:, t])
    how = {"D": D, "dt_bias": shift, "dt_softplus": True, "dt_limit": (0.1, 1.5), "return_final_states": True}
    how |= {"initial_states": state} if len(sizes) == 1 else {"hecate_starts": starts}
    y, after = kernels.state_space(x, dt, A, B, C, chunk_size=16, **how)
    torch.testing.assert_close(y, torch.stack(wanted, 1), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(after, held, rtol=1e-12, atol=1e-12)
