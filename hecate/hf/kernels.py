"""The kernels of adopted layers, with the signatures of transformers' own: a causal convolution, the delta rule per
head or per channel, Mamba-2's recurrence, and steps of one token.

Documents in a row are kept apart: `hecate_starts`, bool `[B, T]` or None, is True where another one begins. Other
keywords that transformers passes to every kernel are ignored.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad, silu, softplus
from transformers.activations import ACT2FN

from hecate.engine import load_kernels, memory_scan
from hecate.nn.blocks import EXACT, LEAST, convolution
from hecate.nn.sums import state_of_sums
from hecate.rule import Gates, MemoryConfig, named_rule
from hecate.tape import is_recorded, is_traced

_SMALL = 1 << 20  # numbers of a state beyond which torch, with several threads, is as fast per token
_PLAIN: dict[str, Any] = {"key_norm": "none", "on_nonfinite": "propagate"}  # as in transformers: NaN shows in the loss
RULES: dict[str, MemoryConfig] = {
    "gated_delta": named_rule("gated_delta").model_copy(update={"query_scale": "key_dim", **_PLAIN}),
    "kda": named_rule("kda").model_copy(update={"query_scale": "key_dim", **_PLAIN}),
    "mamba2": MemoryConfig.model_validate({"bias": "dot", "retention": "decay", **_PLAIN}),
}


def causal_conv(
    hidden_states: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, *,
    hecate_starts: Tensor | None = None, **_: Any,
) -> Tensor:  # fmt: skip
    """y_t = activation(bias + sum_j w_j x_(t - j)) within a document; x `[B, C, T]`, weight `[C, K]`, last tap last."""
    smooth, x = activation in ("silu", "swish"), hidden_states.to(weight.dtype).mT
    if x.dtype not in EXACT and (x.dtype != torch.bfloat16 or x.numel() < LEAST):  # narrow sums of taps lose digits
        x = x.float()
    taps, segment = weight.mT.flip(0).to(x.dtype), None
    if hecate_starts is not None:
        segment = pad(hecate_starts.cumsum(1), (len(taps) - 1, 0), value=-1)
    y = convolution(x, None, taps, segment, None, active=smooth and bias is None)
    if bias is not None:
        y = y + bias.to(y.dtype)
        y = silu(y) if smooth else y
    y = y.to(hidden_states.dtype).mT
    return y if smooth or activation is None else ACT2FN[activation](y)


def causal_conv_update(
    hidden_states: Tensor, conv_state: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None
) -> Tensor:
    """`causal_conv` of one token `[B, C, 1]` after those in conv_state `[B, C, K]`, which is updated in place."""
    x, weights = hidden_states, (weight, *(() if bias is None else (bias,)))
    if activation in ("silu", "swish") and (kernels := _token_kernels(x, *weights, conv_state)):
        none, rows, y = weight.new_empty(0) if bias is None else bias, x.shape[:2], x.new_empty(x.shape)
        kernels.conv_update(*_arrays(x.reshape(rows), conv_state, weight, none, y.view(rows)))
        return y
    conv_state.copy_(torch.cat([conv_state[..., 1:], x.to(conv_state.dtype)], -1))
    total = (conv_state.to(weight.dtype) * weight).sum(-1, keepdim=True)
    total = total if bias is None else total + bias[:, None]
    return (total if activation is None else ACT2FN[activation](total)).to(x.dtype)


# The recurrences.


def delta_rule(
    rule: str, query: Tensor, key: Tensor, value: Tensor, *, g: Tensor, beta: Tensor,
    initial_state: Tensor | None = None, output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False,
    hecate_starts: Tensor | None = None, hecate_engine: Any = "auto", **_: Any,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """S_t = decay_t S_(t-1) + beta_t k_t (v_t - k_t^T decay_t S_(t-1)), y_t = S_t^T q_t / sqrt(K), decay_t = exp(g_t).

    Shapes: query, key `[B, T, H', K]`, each for the H / H' heads that follow one another; value `[B, T, H, V]`; beta
    and g `[B, T, H]`, the latter `[B, T, H, K]` per channel; states `[B, H, K, V]`. y has query's dtype.
    """
    kind, single = query.dtype, key.shape[1] == 1 and initial_state is not None and hecate_starts is None
    query, key, value, g, beta = [x if x.dtype in EXACT else x.float() for x in (query, key, value, g, beta)]
    inputs = query, key, value, g, beta
    if single and use_qk_l2norm_in_kernel and (kernels := _token_kernels(*inputs, initial_state)):
        y, scratch = value.new_empty(value.shape), value.new_empty(4, key.shape[-1] + value.shape[-1])
        q, k, v, decay, rate = (x.squeeze(1) for x in inputs)
        decay = decay if decay.dim() == 3 else decay.unsqueeze(-1)
        kernels.delta_update(*_arrays(q, k, v, decay, rate, initial_state, y.squeeze(1), scratch))
        return y.to(kind), initial_state  # updated in place: the cache copies the result onto the same tensor
    if use_qk_l2norm_in_kernel:
        query, key = [x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (query, key)]
    if (several := value.shape[2] // key.shape[2]) > 1:
        query, key = query.repeat_interleave(several, 2), key.repeat_interleave(several, 2)
    state = None if initial_state is None else initial_state.to(value.dtype)
    if single and state is not None:
        y, state = _token(query, key, value, g, beta, state)
    else:
        gates, weight = Gates(lr=beta, retain=g.exp()), None if state is None else state.mT.contiguous()
        y, weight = _scan(rule, query, key, value, gates, weight, hecate_starts, hecate_engine)
        state = weight.mT.contiguous()  # a cache keeps the strides of the first state
    return y.to(kind), state if output_final_state else None


def _token(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """`delta_rule` of one token in torch: y `[B, 1, H, V]` and the state `[B, H, K, V]`."""
    q, k, v = q.squeeze(1).unsqueeze(-1), k.squeeze(1).unsqueeze(-1), v.squeeze(1)  # [B, H, K, 1], [B, H, V]
    decay = g.exp().squeeze(1)
    state = state * (decay.unsqueeze(-1) if decay.dim() == 3 else decay[..., None, None])
    # Sums rather than matrix products, which autocast would compute in half precision.
    state = state + k * ((v - (state * k).sum(-2)) * beta.squeeze(1).unsqueeze(-1)).unsqueeze(-2)
    return (state * q).sum(-2).unsqueeze(1) * q.shape[-2] ** -0.5, state


def _scan(
    rule: str, q: Tensor, k: Tensor, v: Tensor, gates: Gates, weight: Tensor | None, starts: Tensor | None, engine: Any
) -> tuple[Tensor, Tensor]:
    """y, and the weight `[B, H, V, K]` after the last token, starting from a weight or empty."""
    state = None if weight is None else state_of_sums(weight)
    y, after = memory_scan(RULES[rule], q, k, v, gates, state=state, reset_mask=starts, engine=engine)
    return y.contiguous(), after.memory["weight"]  # callers make views of y


def state_space(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, *, D: Tensor | None = None, dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None, dt_softplus: bool = False, dt_limit: tuple[float, float] = (0.0, math.inf),
    return_final_states: bool = False, hecate_starts: Tensor | None = None, hecate_engine: Any = "auto", **_: Any,
) -> Any:  # fmt: skip
    """S_t = exp(A dt_t) S_(t-1) + dt_t x_t B_t^T, y_t = S_t C_t + D x_t, dt clamped after bias and softplus.

    Shapes: x, y `[B, T, H, V]`; dt `[B, T, H]`; A, D, dt_bias `[H]`; B, C `[B, T, groups, K]`; states `[B, H, V, K]`,
    returned beside y if asked for.
    """
    dt = dt if dt_bias is None else dt + dt_bias.to(dt.dtype)
    dt = (softplus(dt) if dt_softplus else dt).clamp(*dt_limit)
    x, dt, B, C = [item if item.dtype in EXACT else item.float() for item in (x, dt, B, C)]
    if (several := x.shape[2] // B.shape[2]) > 1:
        B, C = B.repeat_interleave(several, 2), C.repeat_interleave(several, 2)
    weight = None if initial_states is None else initial_states.to(x.dtype).contiguous()
    gates = Gates(lr=dt, retain=(A.to(dt.dtype) * dt).exp())
    y, after = _scan("mamba2", C, B, x, gates, weight, hecate_starts, hecate_engine)
    y = y if D is None else torch.addcmul(y, D[:, None].to(y.dtype), x)
    return (y, after) if return_final_states else y


def _token_kernels(*tensors: Tensor | None) -> Any:
    """The compiled kernels, if they can take a token with these tensors, the last being the state; else None."""
    for tensor in tensors:
        if tensor is None or tensor.dtype is not torch.float32 or not tensor.is_cpu:
            return None
    state: Any = tensors[-1]
    few = state.numel() <= _SMALL or torch.get_num_threads() == 1
    if not few or not state.is_contiguous() or is_traced(*tensors) or is_recorded(tensors):
        return None
    return load_kernels("token")


def _arrays(*tensors: Any) -> list[Any]:
    return [(x.detach() if x.requires_grad else x).contiguous().numpy() for x in tensors]
