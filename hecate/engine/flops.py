"""FLOPs of a memory over a sequence, reported to torch's `FlopCounterMode`. [ENG-FLOP-D1]

They count the model, not the engine: the products of the recurrence, token by token, whichever engine runs it and
however often it recomputes something. A backward pass has twice those of the forward, as with products of matrices. As
torch counts, a multiplication and its addition are two, and elementwise work (decay, momentum, norms) is not counted.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.utils import _python_dispatch
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from hecate.engine.call import Call
from hecate.engine.loop import committed_chunk
from hecate.errors import ConfigError
from hecate.phi import Params
from hecate.rule import Gates, MemoryConfig
from hecate.structure.bound import BLOCK
from hecate.tape import differentiable, execute

NAME = "hecate.memory_scan"
SAMPLE = 3
"""Tokens of a chunk that are counted one by one; one more where what a token takes grows with the chunk."""
Shape = tuple[int, ...]
Scan = Callable[..., Any]


def scan_flops(
    scan: Scan, config: MemoryConfig, q: Tensor, k: Tensor, v: Tensor, gates: Gates | None, phi_params: Params | None
) -> int:
    """Flops of one forward pass of `scan` over q, k `[B, T, H, D]` and v `[B, T, H, V]`; their values do not matter.

    A delta rule of a matrix has 6 D_phi V for each token and head: the prediction, the outer product, the answer; one
    whose bias asks for no prediction 4 D_phi V. Products of phi, of readouts and of algorithms come on top.
    """
    shapes = tuple(tuple(x.shape[2:]) if isinstance(x, Tensor) else None for x in (q, k, v, *(gates or Gates())))
    groups = tuple(sorted((name, _shapes(group)) for name, group in (phi_params or {}).items()))
    rounds, rest = divmod(q.shape[1], config.chunk)
    parts = ((rounds, config.chunk), (1, rest))
    per_row = sum(times * _of_chunk(scan, config, length, shapes, groups) for times, length in parts if times * length)
    return int(q.shape[0] * per_row)


def _of_chunk(scan: Scan, config: MemoryConfig, length: int, *rest: Any) -> int:
    """Flops of a chunk, or of its first `length` tokens: those of its end, and for each token as many as the third one
    adds."""
    if length <= SAMPLE + bool(config.blocks):
        return _of_tokens(scan, config, length, *rest)
    whole = length == config.chunk

    def of(n: int) -> int:
        return _of_tokens(scan, config.model_copy(update={"chunk": n}) if whole else config, n, *rest)

    two, three = of(SAMPLE - 1), of(SAMPLE)
    each = three - two
    if whole and config.blocks:  # each token's step depends on the chunk's keys, at most BLOCK of them
        four = of(SAMPLE + 1)
        # f(n) = c + n (a + b min(n, BLOCK)), whose second difference is 2 b
        pair = (four - 2 * three + two) // 2
        base = each - pair * (2 * SAMPLE - 1)  # a
        return three + (length - SAMPLE) * base + (length * min(length, BLOCK) - SAMPLE**2) * pair
    return three + (length - SAMPLE) * each


def _shapes(group: Any) -> Any:
    return tuple((name, tuple(item.shape)) for name, item in group.items()) if isinstance(group, dict) else ()


@lru_cache(maxsize=256)
def _of_tokens(
    scan: Scan, config: MemoryConfig, length: int, shapes: tuple[Shape | None, ...], groups: tuple[Any, ...]
) -> int:
    """Products of the token loop over so many tokens of one row, without storage."""
    from torch.utils.flop_counter import FlopCounterMode

    def blank(*shape: int) -> Tensor:
        return torch.empty(shape, device="meta", dtype=torch.float32)

    q, k, v, *gates = (None if shape is None else blank(1, length, *shape) for shape in shapes)
    params: Any = {name: {key: blank(*shape) for key, shape in group} for name, group in groups} or None
    aten = torch.ops.aten
    outer = {aten.mul: _outer, aten.addcmul: lambda _, a, b, **how: _outer(a, b, **how)}
    with torch.no_grad(), FlopCounterMode(display=False, custom_mapping=outer) as counter:
        scan(config, q, k, v, Gates(*gates), phi_params=params, engine="sequential")
    flops = counter.get_total_flops()
    if config.forms.linear and config.forms.target and config.writes == 1:
        heads, width, answer = v.shape[-2], config.feature_map.output_dim(q.shape[-1]), v.shape[-1]  # type: ignore[union-attr]
        flops -= 2 * length * heads * width * answer  # a prediction that the loop makes, though nothing uses it
    if config.commit == "chunk":
        call = Call.of(config, q[:, :1], k[:, :1], v[:, :1], None, phi_params=params)  # type: ignore[index]
        start, carry = call.memories[0]
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            committed_chunk(config, carry, start, blank(v.shape[-2]), execute)  # type: ignore[union-attr]
        flops -= (length - length // config.chunk) * counter.get_total_flops()  # the loop tries one at every token
    return int(flops)


def _outer(a: Any, b: Any, *_: Any, out_shape: Any = None, **__: Any) -> int:
    """Flops of an elementwise product that is an outer product, a column times a row."""
    if not all(isinstance(shape, tuple) and len(shape) > 1 for shape in (a, b)):
        return 0
    (m, x), (y, n) = a[-2:], b[-2:]
    crossed = min(m, n) > 1 == x == y or min(x, y) > 1 == m == n
    return 2 * out_shape.numel() if crossed else 0


# torch's counter.


def counters() -> list[Any]:
    """The active `FlopCounterMode`s; called only where there are dispatch modes."""
    if (module := sys.modules.get("torch.utils.flop_counter")) is None or torch._C._are_functorch_transforms_active():
        return []
    modes = _python_dispatch._get_current_dispatch_mode_stack()
    return [counter for mode in modes if isinstance(counter := getattr(mode, "counter", None), module.FlopCounterMode)]


def counted(scan: Scan, counting: Sequence[Any], flops: int, *args: Any, **options: Any) -> Any:
    """The results of `scan`, which counts as `flops`, and its backward pass as twice as many; the operations that they
    run are hidden from the counters. Differentiable once."""
    leaves, layout = tree_flatten((args, options))
    tensors = [leaf if isinstance(leaf, Tensor) else None for leaf in leaves]
    specs: list[Any] = []

    def run(*inputs: Tensor | None) -> list[Any]:
        mixed = [leaf if tensor is None else tensor for leaf, tensor in zip(leaves, inputs, strict=True)]
        args, options = tree_unflatten(mixed, layout)
        outputs, spec = tree_flatten(scan(*args, **options))
        specs[:] = [spec]
        return outputs

    recorded = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)
    if recorded:
        outputs: Sequence[Any] = _Counted.apply(run, counting, flops, *tensors)  # type: ignore[no-untyped-call]
    else:
        with hidden(counting):
            outputs = run(*tensors)
    tell(counting, flops)
    return tree_unflatten(list(outputs), specs[0])


def tell(counting: Sequence[Any], flops: int) -> None:
    """Adds to the counts of these counters, for the modules that are running."""
    for counter in counting:
        for place in set(counter.mod_tracker.parents):
            counter.flop_counts[place][NAME] += flops


@contextmanager
def hidden(counting: Sequence[Any]) -> Iterator[None]:
    """Context in which counters see nothing; unless another mode is active, engines run as they do without counters."""
    known = [counter.flop_registry for counter in counting]
    popped = []
    for counter in counting:
        counter.flop_registry = {}
    while getattr(_python_dispatch._get_current_dispatch_mode(), "counter", None) in counting:
        popped.append(_python_dispatch._pop_mode())
    try:
        yield
    finally:
        for mode in reversed(popped):
            _python_dispatch._push_mode(mode)
        for counter, registry in zip(counting, known, strict=True):
            counter.flop_registry = registry


class _Counted(torch.autograd.Function):
    """(run, counters, flops, *inputs) -> outputs, with a graph of its own inside."""

    @staticmethod
    def forward(ctx: Any, run: Callable[..., list[Any]], counting: Any, flops: int, *inputs: Tensor | None) -> Any:
        leaves = tree_map_only(Tensor, lambda x: x.detach().requires_grad_(x.requires_grad), inputs)
        with hidden(counting), torch.enable_grad():
            outputs = run(*leaves)
        ctx.graph, ctx.counting, ctx.flops = (leaves, outputs), counting, flops
        ctx.mark_non_differentiable(*[x for x in outputs if isinstance(x, Tensor) and not differentiable(x)])
        return tuple(x.detach() if isinstance(x, Tensor) else x for x in outputs)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> Any:
        if torch.is_grad_enabled():
            raise ConfigError(
                "a scan under FlopCounterMode is differentiated once; take create_graph=True outside of it"
            )
        inputs, outputs = ctx.graph
        moving = [isinstance(x, Tensor) and x.requires_grad for x in outputs]
        ys, gs = ([x for x, take in zip(each, moving, strict=True) if take] for each in (outputs, cotangents))
        leaves = [x for x in inputs if x is not None and x.requires_grad]
        with hidden(ctx.counting):
            grads = iter(torch.autograd.grad(ys, leaves, gs, allow_unused=True))
        tell(ctx.counting, 2 * ctx.flops)
        return None, None, None, *(next(grads) if x is not None and x.requires_grad else None for x in inputs)
