"""The kernels of adopted layers, called as transformers calls its own: a causal convolution, the gated delta rule per
head or per channel, Mamba-2's recurrence, and one token of each.

Documents of one row stay apart: `starts`, bool `[B, T]` or None, is True where another one begins.
"""

from __future__ import annotations

import math
from functools import cache, partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad, silu, softplus
from transformers.activations import ACT2FN

from hecate.engine import memory_scan
from hecate.rule import Gates, MemoryConfig, MemoryState, named_rule
from hecate.tape import ByHand, Tensors, execute, is_recorded, is_traced, one

_EXACT = (torch.float32, torch.float64)
_BLOCK = 1 << 17  # numbers of a convolution that are worked on at once: they stay in the second cache
_SMALL = 1 << 20  # cells of a state beyond which torch, with several threads, steps as fast
_PLAIN: dict[str, Any] = {"key_norm": "none", "on_nonfinite": "propagate"}  # as transformers: NaN is the loss's affair
RULES = {
    "gated_delta": named_rule("gated_delta").model_copy(update={"query_scale": "key_dim", **_PLAIN}),
    "kda": named_rule("kda").model_copy(update={"query_scale": "key_dim", **_PLAIN}),
    "mamba2": MemoryConfig.model_validate({"bias": "dot", "retention": "decay", **_PLAIN}),
}


# The convolution. torch's depthwise conv1d is slow on a CPU, and its derivative more so: a sum of taps over [B, T, C],
# block by block of time, takes a third.


def causal_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, *,
    starts: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """y_t = activation(bias + sum_j w_j x_(t - j)) within a document; x `[B, C, T]`, weight `[C, K]`, last tap last."""
    smooth = activation in ("silu", "swish")
    kind, tokens = x.dtype, x.to(weight.dtype).mT
    y = one(execute(_CONVOLUTIONS[smooth].block(), tokens, weight, bias, starts)).to(kind).mT
    return y if smooth or activation is None else ACT2FN[activation](y)


def _shared(starts: Tensor | None, j: int) -> Tensor | None:
    """True `[B, T, 1]` where token t and token t - j are of one document."""
    if starts is None:
        return None
    number = starts.cumsum(1)
    return (number == pad(number, (j, 0), value=-1)[:, : number.shape[1]]).unsqueeze(-1)


def _convolved(x: Tensor, weight: Tensor, bias: Tensor | None, starts: Tensor | None, *, smooth: bool) -> Tensors:
    """The convolution in differentiable operations; x `[B, T, C]`."""
    kernel = weight.shape[1]
    total = x * weight[:, -1] if bias is None else torch.addcmul(bias, x, weight[:, -1])
    for j in range(1, kernel):
        tap, same = pad(x, (0, 0, j, 0))[:, : x.shape[1]], _shared(starts, j)
        total = torch.addcmul(total, tap if same is None else torch.where(same, tap, 0.0), weight[:, -1 - j])
    return (silu(total) if smooth else total,)


class _Taps:
    """The inputs of a convolution block by block: x `[B, T, C]` and taps `[K, C]`, in float32 or better."""

    def __init__(self, inputs: Tensors) -> None:
        x, weight, self.bias, starts = inputs
        if x is None or weight is None:
            raise TypeError("a convolution has tokens and taps")
        self.wide = x.dtype if x.dtype in _EXACT else torch.float32
        self.x, self.taps = x.to(self.wide).contiguous(), weight.mT.to(self.wide).contiguous()
        self.same = [_shared(starts, j) for j in range(len(self.taps))]
        size = max(16, _BLOCK // (x.shape[0] * x.shape[2] or 1))
        self.blocks = [(lo, min(lo + size, x.shape[1])) for lo in range(0, x.shape[1], size)]

    def tap(self, j: int, lo: int, hi: int) -> tuple[int, Tensor]:
        """The first token of lo <= t < hi that reads j tokens back, and what all of these read."""
        first = max(lo, j)
        read, same = self.x[:, first - j : max(hi - j, first - j)], self.same[j]
        return first, read if same is None or not j else torch.where(same[:, first:hi], read, 0.0)

    def total(self, lo: int, hi: int, out: Tensor) -> Tensor:
        """The sums of tokens lo <= t < hi, written into `out`."""
        torch.mul(self.x[:, lo:hi], self.taps[-1], out=out)
        for j in range(1, len(self.taps)):
            first, read = self.tap(j, lo, hi)
            out[:, first - lo :].addcmul_(read, self.taps[-1 - j])
        return out if self.bias is None else out.add_(self.bias)


def _convolve(inputs: Tensors, _: bool, *, smooth: bool) -> tuple[Tensors, tuple[()]]:
    with torch.no_grad():
        call = _Taps(inputs)
        y = torch.empty_like(call.x)
        for lo, hi in call.blocks:
            total = call.total(lo, hi, y[:, lo:hi])
            if smooth:
                silu(total, inplace=True)
        return (y.to(inputs[0].dtype),), ()  # type: ignore[union-attr]


def _convolve_vjp(inputs: Tensors, _: Any, cotangents: Any, *, smooth: bool) -> tuple[Tensor | None, ...]:
    """Of y = silu(z): gz = gy silu'(z), gx_(t - j) += w_j gz_t, gw_j = sum_t gz_t x_(t - j), gbias = sum_t gz_t."""
    call = _Taps(inputs)
    gx, gtaps, gbias = torch.zeros_like(call.x), torch.zeros_like(call.taps), torch.zeros_like(call.taps[0])
    given = cotangents[0].to(call.wide).contiguous()
    spare = [torch.empty_like(given[:, slice(*call.blocks[0])]) for _ in "xy"] if call.blocks else []
    for lo, hi in call.blocks:
        gz, (sums, products) = given[:, lo:hi], [item[:, : hi - lo] for item in spare]
        if smooth:
            gz = torch.ops.aten.silu_backward.grad_input(gz, call.total(lo, hi, sums), grad_input=sums)
        gbias += gz.sum((0, 1))
        for j in range(len(call.taps)):
            first, read = call.tap(j, lo, hi)
            here, same = gz[:, first - lo :], call.same[j]
            gtaps[-1 - j] += torch.mul(here, read, out=products[:, first - lo :]).sum((0, 1))
            here = here if same is None or not j else torch.where(same[:, first:hi], here, 0.0)
            gx[:, first - j : first - j + here.shape[1]].addcmul_(here, call.taps[-1 - j])
    x, weight, bias, _ = inputs
    gweight = gtaps.mT.to(weight.dtype)  # type: ignore[union-attr]
    return gx.to(x.dtype), gweight, None if bias is None else gbias.to(bias.dtype), None  # type: ignore[union-attr]


_CONVOLUTIONS = [
    ByHand(
        "hf.convolution", partial(_convolve, smooth=smooth), partial(_convolve_vjp, smooth=smooth),
        lambda *x, smooth=smooth: _convolved(*x, smooth=smooth),
    )
    for smooth in (False, True)
]  # fmt: skip


def causal_conv_update(
    x: Tensor, conv_state: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None
) -> Tensor:
    """`causal_conv` of one token `[B, C, 1]` after those of conv_state `[B, C, K]`, which takes it in place."""
    smooth = activation in ("silu", "swish")
    if smooth and _by_machine(x, conv_state, weight, *(() if bias is None else (bias,))):
        return _machine().convolved(x, conv_state, weight, bias)
    conv_state.copy_(torch.cat([conv_state[..., x.shape[-1] :], x.to(conv_state.dtype)], -1))
    total = (conv_state.to(weight.dtype) * weight).sum(-1, keepdim=True)
    total = total if bias is None else total + bias[:, None]
    return (total if activation is None else ACT2FN[activation](total)).to(x.dtype)


# The recurrences.


def delta_rule(
    rule: str, query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, *,
    initial_state: Tensor | None = None, output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False,
    starts: Tensor | None = None, engine: str = "auto",
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """S_t = decay_t S_(t-1) + beta_t k_t (v_t - k_t^T decay_t S_(t-1)), y_t = S_t^T q_t / sqrt(K), decay_t = exp(g_t).

    Shapes: query, key `[B, T, H', K]`, each for the H / H' heads that follow one another; value `[B, T, H, V]`; beta
    and g `[B, T, H]`, the latter `[B, T, H, K]` per channel; states `[B, H, K, V]`. y has query's dtype.
    """
    if key.shape[1] == 1 and initial_state is not None and starts is None:
        # In place: their cache copies the result onto the state that it gave.
        if use_qk_l2norm_in_kernel and _by_machine(query, key, value, g, beta, initial_state):
            return _machine().stepped(query, key, value, g, beta, initial_state)
    kind = query.dtype
    query, key, value, g, beta = [x if x.dtype in _EXACT else x.float() for x in (query, key, value, g, beta)]
    if use_qk_l2norm_in_kernel:
        query, key = _unit(query), _unit(key)
    if (several := value.shape[2] // key.shape[2]) > 1:
        query, key = query.repeat_interleave(several, 2), key.repeat_interleave(several, 2)
    if key.shape[1] == 1 and initial_state is not None and starts is None:
        y, after = _token(query, key, value, g, beta, initial_state.to(value.dtype))
    else:
        weight = None if initial_state is None else initial_state.to(value.dtype).mT.contiguous()
        y, weight = _scanned(rule, query, key, value, Gates(lr=beta, retain=g.exp()), weight, starts, engine)
        after = weight.mT.contiguous() if output_final_state else None  # a cache keeps the strides it first sees
    return y.to(kind), after if output_final_state else None


def _unit(x: Tensor) -> Tensor:
    """x over its length, 1e-6 beside the squared length as in transformers and fla."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def _token(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """`delta_rule` of one token in torch: y `[B, 1, H, V]` and the state `[B, H, K, V]`."""
    q, k, v = [x.squeeze(1).unsqueeze(-2) for x in (q, k, v)]  # [B, H, 1, D]
    decay = g.exp().squeeze(1)
    held = state * (decay.unsqueeze(-1) if decay.dim() == 3 else decay[..., None, None])
    held = held + k.mT * ((v - k @ held) * beta.squeeze(1)[..., None, None])
    return ((q * q.shape[-1] ** -0.5) @ held).transpose(1, 2), held


def _scanned(
    rule: str, q: Tensor, k: Tensor, v: Tensor, gates: Gates, weight: Tensor | None, starts: Tensor | None, engine: str
) -> tuple[Tensor, Tensor]:
    """y and the weight `[B, H, V, K]` after the last token, from another weight."""
    state = None
    if weight is not None:
        position = torch.zeros(weight.shape[:2], dtype=torch.int64, device=weight.device)
        state = MemoryState(memory={"weight": weight}, slots={}, anchor={}, pending={}, position=position)
    y, after = memory_scan(RULES[rule], q, k, v, gates, state=state, reset_mask=starts, engine=engine)  # type: ignore[arg-type]
    return y.contiguous(), after.memory["weight"]  # callers take views of it


def state_space(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None = None, *, dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None, dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, math.inf), return_final_states: bool = False,
    starts: Tensor | None = None, engine: str = "auto",
) -> Any:  # fmt: skip
    """S_t = exp(A dt_t) S_(t-1) + dt_t x_t B_t^T, y_t = S_t C_t + D x_t, dt clamped after bias and softplus.

    Shapes: x, y `[B, T, H, V]`; dt `[B, T, H]`; A, D, dt_bias `[H]`; B, C `[B, T, groups, K]`; states `[B, H, V, K]`,
    returned beside y if asked for.
    """
    dt = dt if dt_bias is None else dt + dt_bias.to(dt.dtype)
    dt = (softplus(dt) if dt_softplus else dt).clamp(*dt_limit).float()
    x, B, C = [item if item.dtype in _EXACT else item.float() for item in (x, B, C)]
    if (several := x.shape[2] // B.shape[2]) > 1:
        B, C = B.repeat_interleave(several, 2), C.repeat_interleave(several, 2)
    weight = None if initial_states is None else initial_states.to(x.dtype).contiguous()
    gates = Gates(lr=dt, retain=(A.to(dt.dtype) * dt).exp())
    y, after = _scanned("mamba2", C, B, x, gates, weight, starts, engine)
    y = y if D is None else torch.addcmul(y, D[:, None].to(y.dtype), x)
    return (y, after) if return_final_states else y


@cache
def _machine() -> Any:
    """The steps of `token_kernels`, or None without numba."""
    if find_spec("numba") is None:
        return None
    from hecate.hf import token_kernels

    return token_kernels


def _by_machine(*tensors: Tensor) -> bool:
    """True where a token of these, the state last, takes a compiled step."""
    for tensor in tensors:
        if tensor.dtype is not torch.float32 or not tensor.is_cpu:
            return False
    if is_traced(*tensors) or is_recorded(tensors) or not tensors[-1].is_contiguous() or _machine() is None:
        return False
    return tensors[-1].numel() <= _SMALL or torch.get_num_threads() == 1
