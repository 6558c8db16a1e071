"""Checks for anyone who writes a feature map, a knob or a block: three opinions on every derivative."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hecate.phi.base import FeatureMap, Params
from hecate.tape import Block

SIGNAL_FLOOR = 1e-3


def check_vjp(
    block: Block,
    inputs: Sequence[Tensor | None],
    *,
    rtol: float = 1e-10,
    difference_rtol: float = 1e-6,
    second_order: bool = True,
    signal_floor: float = SIGNAL_FLOOR,
    generator: torch.Generator | None = None,
) -> None:
    """Checks a block's VJP in float64 against autograd through its forward and against central differences.

    Errors are relative to the norm of the true gradient, which must exceed `signal_floor`: a gradient that
    is zero everywhere proves nothing. `second_order` compares the gradient of the VJP with autograd's.
    Raises AssertionError with the input's index and both numbers.
    """
    generator = generator or torch.Generator().manual_seed(0)
    tensors = [None if item is None else item.detach().clone() for item in inputs]
    varied = [i for i, item in enumerate(tensors) if item is not None and item.is_floating_point()]
    for index in varied:
        if tensors[index].dtype != torch.float64:  # type: ignore[union-attr]
            raise AssertionError(f"{block.name}: input {index} must be float64")
        tensors[index].requires_grad_()  # type: ignore[union-attr]
    outputs, residuals = block.apply(tuple(tensors))
    real = [out for out in outputs if out is not None]
    cotangents = [torch.randn(out.shape, dtype=out.dtype, generator=generator) for out in real]
    hand = block.pullback(residuals, cotangents)
    true = torch.autograd.grad(
        real, [tensors[i] for i in varied], cotangents,  # type: ignore[misc]
        create_graph=second_order, allow_unused=True,
    )

    def value(*args: Tensor) -> Tensor:
        filled = list(tensors)
        for index, arg in zip(varied, args, strict=True):
            filled[index] = arg
        outs = [out for out in block.forward(*filled)[0] if out is not None]
        return torch.stack([(out * g).sum() for out, g in zip(outs, cotangents, strict=True)]).sum()

    signal = max((float(g.norm()) for g in true if g is not None), default=0.0)
    if signal < signal_floor:
        raise AssertionError(f"{block.name}: no gradient above {signal_floor}, the check would prove nothing")
    for index, expected in zip(varied, true, strict=True):
        expected = torch.zeros_like(tensors[index]) if expected is None else expected  # type: ignore[arg-type]
        got = hand[index]
        got = torch.zeros_like(expected) if got is None else got
        _close(f"{block.name}: VJP of input {index} against autograd", got, expected, rtol, signal)
    _check_differences(block.name, value, [tensors[i] for i in varied], true, difference_rtol, signal, generator)  # type: ignore[misc]
    if second_order:
        _check_second_order(block.name, tensors, varied, hand, true, rtol * 100, generator)


def check_feature_map(
    feature_map: FeatureMap,
    d: int = 5,
    *,
    heads: int = 3,
    smooth: bool = True,
    generator: torch.Generator | None = None,
) -> None:
    """Checks a feature map: shapes, dtypes, the VJP, every declared trait and reproducible draws.

    Inputs are sampled at random, so kinks (where a map is not differentiable) have probability zero.
    `smooth=False` skips the second derivatives. Raises AssertionError naming what failed.
    """
    generator = generator or torch.Generator().manual_seed(0)
    name = f"phi.{feature_map.kind}"
    params = feature_map.init(d, heads=heads, generator=_seeded(7), dtype=torch.float64)
    again = feature_map.init(d, heads=heads, generator=_seeded(7), dtype=torch.float64)
    for group in ("learned", "frozen"):
        for key, tensor in params[group].items():  # type: ignore[literal-required]
            _require(torch.equal(tensor, again[group][key]), f"{name}: init is not reproducible in {key!r}")  # type: ignore[literal-required]
            _require(tensor.shape[0] in (1, heads), f"{name}: {key!r} lacks the leading head axis")
    x = torch.randn(4, heads, d, dtype=torch.float64, generator=generator)
    features = feature_map(x, params)
    width = feature_map.output_dim(d)
    _require(features.shape == (4, heads, width), f"{name}: features {list(features.shape)}, d_phi {width}")
    _require(features.dtype == torch.float64, f"{name}: float64 in, {features.dtype} out")
    low = _cast(params, torch.float32)
    _require(
        feature_map(x.bfloat16(), low).dtype == torch.bfloat16, f"{name}: bfloat16 in, other dtype out"
    )
    block, tensors = feature_map.block(params)
    check_vjp(block, [x, *tensors], second_order=smooth, generator=generator)
    _check_traits(feature_map, params, heads, d, generator)


def _check_traits(
    feature_map: FeatureMap, params: Params, heads: int, d: int, generator: torch.Generator
) -> None:
    name, declared = f"phi.{feature_map.kind}", feature_map.traits()
    for scale in (0.1, 1.0, 5.0):
        x = scale * torch.randn(256, heads, d, dtype=torch.float64, generator=generator)
        f = feature_map(x, params)
        minus = feature_map(-x, params)
        size = f.abs().max().clamp(min=1e-300)
        kernel = torch.einsum("nhp,mhp->hnm", f, f)
        floor = -1e-12 * float(kernel.abs().max())
        if declared.non_negative:
            _require(bool((f >= 0).all()), f"{name}: declared non_negative, got {float(f.min())}")
        if declared.kernel_non_negative:
            _require(bool((kernel >= floor).all()), f"{name}: declared kernel_non_negative")
        if declared.parity != "none":
            sign = 1 if declared.parity == "even" else -1
            _require(bool((f - sign * minus).abs().max() <= 1e-12 * size), f"{name}: not {declared.parity}")
        if declared.degree is not None:
            error = (feature_map(3.0 * x, params) - 3.0**declared.degree * f).abs().max()
            _require(
                bool(error <= 1e-10 * 3.0**declared.degree * size), f"{name}: not of degree {declared.degree}"
            )
        if declared.norm_bound is not None:
            largest = float(f.square().sum(-1).max())
            _require(largest <= declared.norm_bound * (1 + 1e-12), f"{name}: |phi|^2 reached {largest}")


def _check_differences(
    name: str, value: Callable[..., Tensor], points: list[Tensor], true: Sequence[Tensor | None],
    rtol: float, signal: float, generator: torch.Generator,
) -> None:
    step = 1e-6
    with torch.no_grad():
        for _ in range(3):
            ways = [torch.randn(p.shape, dtype=p.dtype, generator=generator) for p in points]
            ahead = value(*(p + step * w for p, w in zip(points, ways, strict=True)))
            behind = value(*(p - step * w for p, w in zip(points, ways, strict=True)))
            slope = (ahead - behind) / (2 * step)
            exact = sum((g * w).sum() for g, w in zip(true, ways, strict=True) if g is not None)
            # Round-off of the two values, divided by the step, adds to the truncation error.
            noise = 1e-15 * float(ahead.abs() + behind.abs()) / step
            error = float((slope - exact).abs())
            if error > rtol * max(signal, float(torch.as_tensor(exact).abs())) + 10 * noise:
                raise AssertionError(
                    f"{name}: directional derivative {float(exact):.9g} from the VJP, "
                    f"{float(slope):.9g} from central differences"
                )


def _check_second_order(
    name: str, tensors: Sequence[Tensor | None], varied: Sequence[int], hand: Sequence[Tensor | None],
    true: Sequence[Tensor | None], rtol: float, generator: torch.Generator,
) -> None:
    points = [tensors[i] for i in varied]
    pairs = [(hand[i], t) for i, t in zip(varied, true, strict=True) if t is not None and t.requires_grad]
    if not pairs:
        return
    ways = [torch.randn(t.shape, dtype=t.dtype, generator=generator) for _, t in pairs]
    expected = torch.autograd.grad([t for _, t in pairs], points, ways, allow_unused=True, retain_graph=True)  # type: ignore[arg-type]
    sides = [(h, w) for (h, _), w in zip(pairs, ways, strict=True) if h is not None and h.requires_grad]
    got = torch.autograd.grad([h for h, _ in sides], points, [w for _, w in sides], allow_unused=True) if sides else [None] * len(points)  # type: ignore[arg-type]
    signal = max((float(g.norm()) for g in expected if g is not None), default=0.0)
    for index, ours, theirs in zip(varied, got, expected, strict=True):
        if theirs is None and ours is None:
            continue
        zero = torch.zeros_like(tensors[index])  # type: ignore[arg-type]
        _close(
            f"{name}: second derivative by input {index}",
            zero if ours is None else ours, zero if theirs is None else theirs, rtol, signal,
        )


def _close(what: str, got: Tensor, expected: Tensor, rtol: float, signal: float) -> None:
    _require(got.shape == expected.shape, f"{what}: shape {list(got.shape)}, expected {list(expected.shape)}")
    error = float((got - expected).norm())
    scale = max(float(expected.norm()), 1e-3 * signal)
    if not error <= rtol * scale:
        raise AssertionError(f"{what}: error {error:.3e} against a norm of {float(expected.norm()):.3e}")


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise AssertionError(message)


def _seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _cast(params: Params, dtype: torch.dtype) -> Any:
    return {group: {key: t.to(dtype) for key, t in tensors.items()} for group, tensors in params.items()}  # type: ignore[attr-defined]
