"""Sums with a weight per distance: y_i = sum_j c_(i-j) (q_i.k_j) v_j, as convolutions by FFT."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hecate.engine import written_before
from hecate.nn.attention.sums import Pass


def by_distance(
    q: Tensor, k: Tensor, v: Tensor, start: Tensor | None, how: Pass, *, factors: Tensor, causal: bool
) -> tuple[Tensor, Tensor]:
    """The sums for queries `[B, T r, G, P]`, and an empty state: nothing can go on from one.

    `factors` are c of distances 0..T - 1, `[G, T]`, or -(T - 1)..T - 1 if not causal. Masked
    tokens count for no distance: the convolution runs over the written ones, moved together, and a query reads it where
    it stands among them. A masked query stands where the next written token does, which it may not see, so a causal
    convolution leaves out distance 0; a token's own
    product is added. [ATT-REL-D2]
    """
    batch, length, heads = k.shape[:3]
    group = q.shape[1] // length if length else 1
    after = v.new_zeros(batch, heads, v.shape[-1], 0)
    if not q.numel() or not v.numel():
        return q.new_zeros(*q.shape[:3], v.shape[-1]), after
    q = q.unflatten(1, (length, group))
    place, own = None, q.new_zeros(())
    if causal:
        weight = torch.einsum("btrgp,btgp->btrg", q, _written(k, how)) * factors[:, 0]
        own = torch.einsum("btrg,btgv->btrgv", weight, v)
    if how.write is not None:
        k, order = _written(k, how), (~how.write).int().argsort(dim=1, stable=True)
        k, v = (part.take_along_dim(order[..., None, None], 1) for part in (k, v))
        zero = torch.zeros(batch, dtype=torch.int64, device=k.device)
        place = written_before(zero, how.write, None, length)
    products = torch.einsum("bsgv,bsgp->gvpbs", v, k)
    sums = _convolved(products, _kernel(factors, length, causal=causal))
    if place is not None:
        sums = sums.take_along_dim(place[None, None, None], -1)
    y = torch.einsum("btrgp,gvpbt->btrgv", q, sums) + own
    return y.flatten(1, 2), after


def _written(k: Tensor, how: Pass) -> Tensor:
    return k if how.write is None else torch.where(how.write[..., None, None], k, 0.0)


def _kernel(factors: Tensor, length: int, *, causal: bool) -> Tensor:
    """c as a circular kernel of 2 T entries, `[G, 2 T]`: distance n at place n mod 2 T."""
    zero = torch.zeros_like(factors[:, :1])
    if causal:
        return torch.cat([zero, factors[:, 1:], zero.expand(-1, length)], -1)
    past, future = factors[:, length - 1 :], factors[:, : length - 1]
    return torch.cat([past, zero, future], -1)


def _convolved(x: Tensor, kernel: Tensor) -> Tensor:
    """x `[G, V, P, B, T]` convolved over T with kernels `[G, 2 T]`, in float64, because rounding errors are shares of
    what all tokens sum to, beside which the first sums are small; what rounding leaves of a sum that is 0 is 0, because
    a normaliser has to tell."""
    length, dtype = x.shape[-1], x.dtype
    x, kernel = x.double(), kernel[:, None, None, None].double()
    spectrum = torch.fft.rfft(x, n=2 * length) * torch.fft.rfft(kernel)
    sums = torch.fft.irfft(spectrum, n=2 * length)[..., :length]
    # No sum exceeds the product of norms, and three transforms lose less than this share of it.
    share = 4 * torch.finfo(x.dtype).eps * math.log2(4 * length)
    noise = share * x.norm(dim=-1, keepdim=True) * kernel.norm(dim=-1, keepdim=True)
    return (sums - torch.where(sums.abs() <= noise, sums, 0.0).detach()).to(dtype)
