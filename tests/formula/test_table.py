"""Every operation of torch that a formula may call, traced and run as text, against torch itself."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from hecate.formula.nodes import ALONG, COMPONENTWISE, ROWWISE, Nodes, Unprintable
from hecate.formula.printer import nodes_of, printed, traced
from hecate.testing.rule import in_torch

SPECIAL = [0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 2.0, 20.0, 21.0, -21.0, 1e30, -1e30, math.inf, -math.inf, math.nan]
EXACT = "sub rsub mul div neg reciprocal sqrt abs sign sgn floor relu maximum minimum where threshold".split()
a = torch.ops.aten

# By operation: a function of x, y, z that calls it. Backward operations are called as autograd does.
CALLS: dict[str, Callable[..., Tensor | tuple[Tensor, ...]]] = {
    "add": lambda x, y, z: torch.add(x, y, alpha=3), "sub": lambda x, y, z: torch.sub(x, y, alpha=2),
    "rsub": lambda x, y, z: 1.5 - x, "mul": lambda x, y, z: (x * y, x * -1.0, -1.0 * y), "div": lambda x, y, z: x / y,
    "neg": lambda x, y, z: -x, "reciprocal": lambda x, y, z: x.reciprocal(),
    "pow": lambda x, y, z: (x**2, x**3, x**0.5, x**-1, x**-0.5, x**1.7, x.pow(0)), "sqrt": lambda x, y, z: x.sqrt(),
    "rsqrt": lambda x, y, z: x.rsqrt(), "abs": lambda x, y, z: x.abs(), "sign": lambda x, y, z: x.sign(),
    "sgn": lambda x, y, z: x.sgn(), "floor": lambda x, y, z: x.floor(), "exp": lambda x, y, z: x.exp(),
    "exp2": lambda x, y, z: x.exp2(), "expm1": lambda x, y, z: x.expm1(), "log": lambda x, y, z: x.log(),
    "log1p": lambda x, y, z: x.log1p(), "log2": lambda x, y, z: x.log2(),
    "logaddexp": lambda x, y, z: torch.logaddexp(x, y),
    "sin": lambda x, y, z: x.sin(), "cos": lambda x, y, z: x.cos(), "tanh": lambda x, y, z: x.tanh(),
    "sinh": lambda x, y, z: x.sinh(), "cosh": lambda x, y, z: x.cosh(), "erf": lambda x, y, z: x.erf(),
    "sigmoid": lambda x, y, z: x.sigmoid(), "relu": lambda x, y, z: x.relu(),
    "silu": lambda x, y, z: functional.silu(x),
    "gelu": lambda x, y, z: functional.gelu(x), "leaky_relu": lambda x, y, z: functional.leaky_relu(x, 0.3),
    "softplus": lambda x, y, z: functional.softplus(x, 2), "softshrink": lambda x, y, z: functional.softshrink(x, 0.4),
    "elu": lambda x, y, z: functional.elu(x, 1.5), "log_sigmoid_forward": lambda x, y, z: functional.logsigmoid(x),
    "threshold": lambda x, y, z: functional.threshold(x, 0.5, 7.0),
    "clamp": lambda x, y, z: (x.clamp(-1, 2), x.clamp(max=0.5)),
    "clamp_min": lambda x, y, z: x.clamp_min(-0.5), "clamp_max": lambda x, y, z: x.clamp_max(0.5),
    "hardtanh": lambda x, y, z: functional.hardtanh(x),
    "masked_fill": lambda x, y, z: (x.masked_fill(y > 0, 3.0), (x + 0).masked_fill_(y > 0, 3.0)),
    "maximum": lambda x, y, z: torch.maximum(x, y),
    "minimum": lambda x, y, z: torch.minimum(x, y), "where": lambda x, y, z: torch.where(x > y, x, 2.0),
    "lerp": lambda x, y, z: torch.lerp(x, y, 0.3), "addcmul": lambda x, y, z: torch.addcmul(x, y, z, value=-2),
    "addcdiv": lambda x, y, z: torch.addcdiv(x, y, z, value=2), "tanh_backward": lambda x, y, z: a.tanh_backward(x, y),
    "sigmoid_backward": lambda x, y, z: a.sigmoid_backward(x, y),
    "threshold_backward": lambda x, y, z: a.threshold_backward(x, y, 0.5),
    "silu_backward": lambda x, y, z: a.silu_backward(x, y),
    "gelu_backward": lambda x, y, z: a.gelu_backward(x, y),
    "elu_backward": lambda x, y, z: (a.elu_backward(x, 1.5, 1, 1, False, y), a.elu_backward(x, 1.5, 1, 1, True, y)),
    "softplus_backward": lambda x, y, z: a.softplus_backward(x, y, 2, 20),
    "leaky_relu_backward": lambda x, y, z: a.leaky_relu_backward(x, y, 0.3, False),
    "log_sigmoid_backward": lambda x, y, z: a.log_sigmoid_backward(x, y, a.log_sigmoid_forward(y)[1]),
    "hardtanh_backward": lambda x, y, z: a.hardtanh_backward(x, y, -1, 1),
    "softshrink_backward": lambda x, y, z: a.softshrink_backward(x, y, 0.5),
    "lt": lambda x, y, z: torch.where(x < y, x, z), "le": lambda x, y, z: torch.where(x <= y, x, z),
    "gt": lambda x, y, z: torch.where(x > 0.5, x, z), "ge": lambda x, y, z: torch.where(x >= 0.5, x, z),
    "eq": lambda x, y, z: torch.where(x == y, x, z), "ne": lambda x, y, z: torch.where(x != y, x, z),
    "isnan": lambda x, y, z: torch.where(x.isnan(), 0.0, x),
    "logical_and": lambda x, y, z: torch.where(torch.logical_and(x > y, y > z), x, z),
    "bitwise_and": lambda x, y, z: torch.where((x > y) & (y > z), x, z),
    "logical_not": lambda x, y, z: torch.where(torch.logical_not(x > y), x, z),
    "bitwise_not": lambda x, y, z: torch.where(~(x > y), x, z),
    "logical_or": lambda x, y, z: torch.where(torch.logical_or(x > y, y > z), x, z),
    "bitwise_or": lambda x, y, z: torch.where((x > y) | (y > z), x, z),
    "sum": lambda x, y, z: (x * x.sum(-1, keepdim=True), x * torch.full_like(x, 0.5).sum(-1, keepdim=True)),
    "mean": lambda x, y, z: x - x.mean(-1, keepdim=True),
    "amax": lambda x, y, z: x - x.amax(-1, keepdim=True),
    "logsumexp": lambda x, y, z: x - x.logsumexp(-1, keepdim=True),
    "linalg_vector_norm": lambda x, y, z: tuple(
        x * torch.linalg.vector_norm(x, order, dim=-1, keepdim=True) for order in (2, 1, math.inf)
    ),
    "any": lambda x, y, z: torch.where((x > 1).any(-1, keepdim=True), x, y),
    "all": lambda x, y, z: torch.where((x < 1).all(-1, keepdim=True), x, y),
    "_softmax": lambda x, y, z: x.softmax(-1), "_log_softmax": lambda x, y, z: x.log_softmax(-1),
    "_softmax_backward_data": lambda x, y, z: a._softmax_backward_data(x, y.softmax(-1), -1, x.dtype),
    "_log_softmax_backward_data": lambda x, y, z: a._log_softmax_backward_data(x, y.log_softmax(-1), -1, x.dtype),
}  # fmt: skip


class Nothing:
    """A variant without fields of its own."""

    model_fields: ClassVar[dict[str, Any]] = {}


def text_of(function: Callable[..., object], inputs: str = "xyz"):
    axes = dict.fromkeys(inputs, ALONG)
    _, trace = traced(function, axes, Nodes())
    return printed("f", inputs, nodes_of(Nothing(), lambda _: function, axes, Nodes())), trace


def run(text, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    found = in_torch(text, inputs[0].dtype, inputs[0].shape[-1])(*inputs, text.numbers)
    return found if isinstance(found, tuple) else (found,)


@contextmanager
def without_onednn() -> Iterator[None]:
    """torch's own operations: oneDNN's gelu of infinity is NaN on some processors."""
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before)


def test_every_operation_has_a_call():
    assert set(CALLS) == set(COMPONENTWISE) | set(ROWWISE)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_the_text_of_an_operation_is_torch(name, dtype):
    function = CALLS[name]
    text, trace = text_of(function)
    assert name in {operation.rstrip("_") for operation in trace.operations} | set(trace.operations)
    special = torch.tensor(SPECIAL, dtype=dtype)
    source = torch.Generator().manual_seed(0)
    drawn = [3 * torch.randn(40, 6, generator=source, dtype=dtype) for _ in range(3)]
    cases = [drawn]
    if name in COMPONENTWISE:
        # Whole vectors of a CPU: in what is left of them torch has other results for NaN.
        x, y = (item.flatten().repeat(32) for item in torch.meshgrid(special, special, indexing="ij"))
        cases.append([x[None], y[None], y.roll(7)[None]])
    for inputs in cases:
        with without_onednn():
            expected = function(*inputs)
        for y, other in zip(expected if isinstance(expected, tuple) else (expected,), run(text, inputs), strict=True):
            other = other.to(dtype) if isinstance(other, Tensor) else torch.full_like(y, other)
            assert torch.equal(y.isnan(), other.expand_as(y).isnan()), name
            # Powers and exponentials of sums of two or three roundings, e^x of |x| below 21 amplifying one by |x|.
            bound = 0.0 if name in EXACT else 64 * torch.finfo(dtype).eps
            torch.testing.assert_close(other.expand_as(y), y, rtol=bound, atol=bound, equal_nan=True)


OWN = torch.tensor([0.5], dtype=torch.float64)  # may be written to after a kernel was made


def unrolled(x: Tensor) -> Tensor:
    y = x
    for _ in range(100):
        y = y - 0.1 * (y - x.tanh())
    return y


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda x: x.sort(-1).values, "aten.sort has no kernel form"),
        (lambda x: x * 2 if x.sum() else x, "on the host"),
        (lambda x: x * torch.arange(5), "a tensor of its own"),
        (lambda x: x.cumsum(-1), "aten.cumsum has no kernel form"),
        (lambda x: x.sum(0, keepdim=True) * x, "more than a row"),
        (lambda x: x[..., :1] * x, "aten.slice has no kernel form"),
        (lambda x: x.mul_(2), "aten.mul_ writes into what has another name"),
        (lambda x: (y := x + 1).detach() * y.mul_(2), "aten.mul_ writes into what has another name"),
        (lambda x: x * torch.rand(()), "aten.rand draws random numbers"),
        (lambda x: x + torch.rand_like(x), "aten.rand_like draws random numbers"),
        (lambda x: x * math.sin(x.shape[-1]), "follows from how many there are"),
        (lambda x: x * x if x.shape[-1] > 6 else x, "takes another way for rows of another width"),
        (lambda x: x * (1 + (3 * x).to(torch.int64)), r"computes in torch\.int64"),
        (lambda x: x * ((x > 0) + (x > 1)), r"computes in torch\.bool, in aten\.add"),
        (lambda x: torch.where((x > 0).amax(-1, keepdim=True), x, 0 * x), r"computes in torch\.bool, in aten\.amax"),
        (lambda x: x * torch.full_like(x, 2.7, dtype=torch.int64), r"computes in torch\.int64"),
        (lambda x: x * (~(x > 0).long()), r"computes in torch\.int64"),
        (lambda x: x * ((x > 1) * 0.3), r"computes in torch\.float(32|64), in aten\.mul"),
        (lambda x: (x + torch.finfo(x.dtype).eps).sqrt(), "or from the dtype"),
        (lambda x: x * (0.1 if x.dtype == torch.float32 else 1.0), "or from the dtype"),
        (lambda x: x * (0.1 if x.shape[-1] > 16 else 1.0), "follows from how many there are"),
        (lambda x: x / x.shape[0], "follows from how many there are"),
        (lambda x: x / max(x.shape[-1], 4), "values|width|how many"),
        (lambda x: x / (1 if x.shape[-1] > 2 else 2), "values|width|how many"),
        (lambda x: x / (1 if x.shape[-1] <= 64 else 2), "values|width|how many"),
        (lambda x: x * OWN, "a tensor of its own"),
        (unrolled, "operations deep"),
        (lambda x: torch.where(torch.logical_and(x, x > 0), x, 0 * x), "takes a number for an answer"),
        (lambda x: x.to(torch.float32), "computes in torch.float32"),
        (lambda x: functional.gelu(x, approximate="tanh"), "as called has no kernel form"),
        (lambda x: torch.linalg.vector_norm(x, 3, dim=-1, keepdim=True) * x, "as called has no kernel form"),
        (lambda x: torch.stack([x, x], -1), "aten.stack has no kernel form"),
    ],
)
def test_a_refusal_names_the_operation(function, reason):
    with pytest.raises(Unprintable, match=reason):
        text_of(function, "x")
