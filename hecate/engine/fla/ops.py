"""The kernels as operators of torch: one node under torch.compile, forward and backward, whatever the length.

The package keeps a graph of autograd between its forward and its backward pass, and an operator cannot: the backward
operator runs the forward pass again, recorded, and takes its gradients. Whether a kernel is trusted is asked when an
operator runs; where it is not, it runs plain torch, and the log says why once. [ENG-FLA-D2]
"""

import logging
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from hecate.engine.fla.kernel import by_kernel, verdict
from hecate.engine.tokens import Carry, Tokens
from hecate.engine.triton.ops import config_of, recorded, rule_of
from hecate.rule import MemoryConfig
from hecate.tape import ByHand, Tensors, one, several

_LOG = logging.getLogger("hecate.engine")


def scanned(config: MemoryConfig, dtype: torch.dtype, tokens: Tokens, carry: Carry) -> tuple[Tensor, Carry]:
    """Outputs and the new state, by the operators."""
    (memory,) = carry.memory
    y, last = fla_scan(rule_of(config, "as blocks", raw=False), dtype, memory, *tokens[:5])
    return y, carry._replace(memory=(last,))


def _kernel(rule: str, dtype: torch.dtype, memory: Tensor, *tensors: Tensor) -> tuple[ByHand, Tensors, bool]:
    """The kernel with its plain torch, their inputs, and whether it is trusted."""
    config, (lr, retain) = config_of(rule), tensors[3:]
    carry = Carry((memory,), (), (), (), (), (), torch.zeros(2, dtype=torch.int64, device=memory.device))
    reason = verdict(config, retain.dim() == 4, dtype, memory.device.type, tuple(memory.shape[1:]))
    if reason is not None:
        _tell(reason)
    # Starts of documents and momentum are not used here.
    inputs = (memory, memory, *Tokens(*tensors, torch.zeros_like(lr)))  # type: ignore[call-arg]
    return by_kernel(config, carry, dtype), inputs, reason is None


@cache
def _tell(reason: str) -> None:
    _LOG.warning("engine 'fla' runs plain torch: %s", reason)


@torch.library.custom_op("hecate::fla_scan", mutates_args=())
def fla_scan(
    rule: str, dtype: torch.dtype, memory: Tensor, phi_k: Tensor, phi_q: Tensor, v: Tensor, lr: Tensor, retain: Tensor
) -> tuple[Tensor, Tensor]:
    """y and the last memory, by a kernel that computes in a dtype."""
    kernel, inputs, trusted = _kernel(rule, dtype, memory, phi_k, phi_q, v, lr, retain)
    y, last = several(kernel.forward(inputs, False)[0] if trusted else kernel.plain(*inputs))
    return y.contiguous(), last.contiguous()


@fla_scan.register_fake
def _(rule: str, dtype: torch.dtype, memory: Tensor, *tensors: Tensor) -> tuple[Tensor, Tensor]:
    return memory.new_empty(tensors[2].shape), memory.new_empty(memory.shape)


@torch.library.custom_op("hecate::fla_scan_backward", mutates_args=())
def fla_scan_backward(
    rule: str, dtype: torch.dtype, tensors: Sequence[Tensor], cotangents: Sequence[Tensor]
) -> list[Tensor]:
    """Cotangents of the tensors of `fla_scan`; of retain only if it decays."""
    kernel, inputs, trusted = _kernel(rule, dtype, *tensors)
    with recorded():
        if trusted:
            grads = kernel.vjp(inputs, kernel.forward(inputs, True)[1], tuple(cotangents))
        else:
            grads = kernel.by_autograd(inputs, tuple(cotangents))
    memory, _, *rest = grads
    return [one((item,)).contiguous() for item, _ in zip((memory, *rest), _moved(rule, tensors), strict=False)]


def _moved(rule: str, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """The tensors that have a cotangent: retain, the last, only where it decays."""
    return tensors if config_of(rule).retention.uses_retain else tensors[:-1]


@fla_scan_backward.register_fake
def _(rule: str, dtype: torch.dtype, tensors: Sequence[Tensor], cotangents: Sequence[Tensor]) -> list[Tensor]:
    return [item.new_empty(item.shape) for item in _moved(rule, tensors)]


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensors) -> None:
    ctx.rule, ctx.dtype, *tensors = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
    tensors = ctx.saved_tensors
    grads: list[Tensor | None] = list(fla_scan_backward(ctx.rule, ctx.dtype, tensors, cotangents))
    return None, None, *grads, *[None] * (len(tensors) - len(grads))


fla_scan.register_autograd(_backward, setup_context=_setup)
