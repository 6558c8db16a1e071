"""Everything that a feature map promises, checked on random inputs."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from hecate.phi.base import FeatureMap, Params
from hecate.testing.block import SIGNAL_FLOOR, check_vjp, require

# Features are rounded once or, in combinations, a few times: eight roundings of bfloat16.
_BFLOAT16_ERROR = 8 * 2.0**-8


def check_feature_map(
    feature_map: FeatureMap,
    d: int = 5,
    *,
    heads: int = 3,
    smooth: bool = True,
    positions: int = 256,
    generator: torch.Generator | None = None,
) -> None:
    """Checks a feature map: draws, shapes, dtypes, heads, the VJP and every declared trait.

    All checks run with parameters per head and with one set for all heads; learned ones are moved away from their
    initial values, where gradients may vanish. Inputs are sampled at random, so kinks (where a map is not
    differentiable) have probability zero; at x = 0 features and cotangents must be finite. `smooth=False` skips the
    second derivatives. Maps that need positions get some spread over 0..positions - 1. Raises AssertionError naming
    what failed.
    """
    generator = generator or torch.Generator().manual_seed(0)
    name = f"phi.{feature_map.kind}"
    for count in (heads, 1):
        params = _move_learned(_check_init(name, feature_map, d, count), generator)
        x = torch.randn(4, heads, d, dtype=torch.float64, generator=generator)
        if feature_map.needs_position:
            params = _with_positions(params, len(x), positions)
            same = feature_map(x[:1].expand_as(x), params)
            spread = float((same - same[:1]).abs().max())
            require(spread > SIGNAL_FLOOR, f"{name}: declared needs_position, but no position matters")
        for check in (_check_features, _check_heads, _check_low_precision, _check_zero, _check_kernel):
            check(name, feature_map, params, x)
        block, tensors = feature_map.block(params)
        learned = len(params["learned"])
        frozen = range(1 + learned, 1 + len(tensors))  # and the positions
        check_vjp(block, [x, *tensors], constants=frozen, second_order=smooth, generator=generator)
        _check_parameters_matter(name, feature_map, params, x)
        if feature_map.needs_position:
            params = _with_positions(params, 256, positions)
        _check_traits(name, feature_map, params, heads, d, generator)


def _with_positions(params: Params, tokens: int, positions: int) -> Params:
    steps = torch.linspace(0, positions - 1, tokens).round().long()
    return {**params, "position": steps.unsqueeze(-1)}


def _check_init(name: str, feature_map: FeatureMap, d: int, heads: int) -> Params:
    def fresh(seed: int) -> Params:
        source = torch.Generator().manual_seed(seed)
        return feature_map.init(d, heads=heads, generator=source, dtype=torch.float64)

    before = torch.get_rng_state()
    params, again, other = fresh(7), fresh(7), fresh(8)
    require(torch.equal(before, torch.get_rng_state()), f"{name}: init uses the global generator")
    for group in ("learned", "frozen"):
        first, second = params[group], again[group]
        require(first.keys() == second.keys(), f"{name}: init is not reproducible")
        for key, item in first.items():
            require(torch.equal(item, second[key]), f"{name}: init is not reproducible in {key!r}")
            require(item.shape[0] in (1, heads), f"{name}: {key!r} lacks the leading head axis")
            as_told = item.dtype == torch.float64 or not item.is_floating_point()
            require(as_told, f"{name}: {key!r} is {item.dtype}, float64 was asked for")
    drawn = [key for key, t in params["frozen"].items() if not torch.equal(t, other["frozen"][key])]
    idle = feature_map.is_random and not drawn
    require(not idle, f"{name}: declared is_random, but no seed changes a frozen parameter")
    require(not drawn or feature_map.is_random, f"{name}: frozen {drawn} depend on the seed; declare is_random")
    return params


def _move_learned(params: Params, generator: torch.Generator) -> Params:
    draw = partial(torch.randn, generator=generator)
    return {**params, "learned": {k: t + 0.3 * draw(t.shape, dtype=t.dtype) for k, t in params["learned"].items()}}


def _check_features(name: str, feature_map: FeatureMap, params: Params, x: Tensor) -> None:
    before, width = x.clone(), feature_map.output_dim(x.shape[-1])
    features, residuals = feature_map.forward(x, params)
    expected = (*x.shape[:-1], width)
    require(features.shape == expected, f"{name}: features {list(features.shape)}, d_phi {width}")
    require(features.dtype == x.dtype, f"{name}: {x.dtype} in, {features.dtype} out")
    require(bool(features.isfinite().all()), f"{name}: features of ordinary inputs are not finite")
    g = torch.ones_like(features)
    first, second = feature_map.vjp(residuals, g)[0], feature_map.vjp(residuals, g)[0]
    require(torch.equal(first, second), f"{name}: the VJP changes its residuals or its cotangent")
    require(torch.equal(x, before), f"{name}: changes its input in place")


def _check_heads(name: str, feature_map: FeatureMap, params: Params, x: Tensor) -> None:
    features = feature_map(x, params)
    for head in range(x.shape[1]):
        one = pytree.tree_map(lambda t: t if len(t) == 1 else t[head : head + 1], params)  # noqa: B023
        if "position" in params:
            one["position"] = params["position"][:, 0]
        alone = feature_map(x[:, head], one)
        error, size = float((features[:, head] - alone).abs().max()), float(alone.abs().max())
        require(error <= 1e-12 * size, f"{name}: head {head} differs from the same head alone by {error:.3e}")


def _check_low_precision(name: str, feature_map: FeatureMap, params: Params, x: Tensor) -> None:
    low = _cast(params, torch.float32)
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, _BFLOAT16_ERROR)):
        rounded = x.to(dtype)
        features, residuals = feature_map.forward(rounded, low)
        require(features.dtype == dtype, f"{name}: {dtype} in, {features.dtype} out")
        exact = feature_map(rounded.double(), params)
        error, size = float((features.double() - exact).abs().max()), float(exact.abs().max())
        require(error <= tolerance * size, f"{name}: off by {error:.3e} in {dtype}; evaluate in float32 or better")
        gx, glearned = feature_map.vjp(residuals, torch.ones_like(features))
        require(gx.dtype == dtype, f"{name}: {dtype} in, cotangent in {gx.dtype}")
        require(gx.shape == x.shape, f"{name}: cotangent of x has shape {list(gx.shape)}")
        for key, item in low["learned"].items():
            got = glearned[key]
            alike = (got.shape, got.dtype) == (item.shape, item.dtype)
            require(alike, f"{name}: cotangent of {key!r} is {list(got.shape)} in {got.dtype}")
    low = _cast(params, torch.bfloat16)
    features, residuals = feature_map.forward(x.float(), low)
    for key, got in feature_map.vjp(residuals, torch.ones_like(features))[1].items():
        require(got.dtype == torch.bfloat16, f"{name}: {key!r} is bfloat16, its cotangent {got.dtype}")


def _check_zero(name: str, feature_map: FeatureMap, params: Params, x: Tensor) -> None:
    zero = torch.zeros_like(x).requires_grad_()
    features, residuals = feature_map.forward(zero, params)
    g = torch.ones_like(features)
    gx = feature_map.vjp(residuals, g)[0]
    for what, value in (("features", features), ("cotangents", gx)):
        require(bool(value.isfinite().all()), f"{name}: {what} at x = 0 are not finite")
    (traced,) = torch.autograd.grad(features, zero, g, allow_unused=True)
    if traced is not None:
        require(bool(traced.isfinite().all()), f"{name}: autograd at x = 0 is not finite")


def _check_kernel(name: str, feature_map: FeatureMap, params: Params, x: Tensor) -> None:
    y = x.flip(0)
    kernel, mirrored = feature_map.exact_kernel(x, y), feature_map.exact_kernel(y, x)
    if kernel is None or mirrored is None:
        require(kernel is mirrored, f"{name}: exact_kernel is sometimes None")
        return
    require(kernel.shape == x.shape[:-1], f"{name}: exact_kernel has shape {list(kernel.shape)}")
    size = float(kernel.abs().max())
    require(bool((kernel - mirrored).abs().max() <= 1e-12 * size), f"{name}: exact_kernel not symmetric")


def _check_parameters_matter(name: str, feature_map: FeatureMap, params: Params, x: Tensor) -> None:
    features, residuals = feature_map.forward(x, params)
    glearned = feature_map.vjp(residuals, torch.ones_like(features).cumsum(-1))[1]
    known = params["learned"].keys()
    require(glearned.keys() == known, f"{name}: the VJP returns {sorted(glearned)}, learned are {sorted(known)}")
    for key, g in glearned.items():
        size = float(g.norm())
        require(size > SIGNAL_FLOOR, f"{name}: {key!r} has a gradient of {size:.1e}: it does nothing")


def _check_traits(
    name: str, feature_map: FeatureMap, params: Params, heads: int, d: int, generator: torch.Generator
) -> None:
    declared = feature_map.traits()
    # Small inputs too: a degree or a bound may hold except near zero, where an epsilon shows.
    for scale in (1e-3, 0.1, 1.0, 5.0):
        x = scale * torch.randn(256, heads, d, dtype=torch.float64, generator=generator)
        f = feature_map(x, params)
        size = f.abs().max().clamp(min=1e-300)
        if declared.non_negative:
            require(bool((f >= 0).all()), f"{name}: declared non_negative, got {float(f.min())}")
        if declared.kernel_non_negative:
            kernel = torch.einsum("nhp,mhp->hnm", f, f)
            floor = -1e-12 * float(kernel.abs().max())
            require(bool((kernel >= floor).all()), f"{name}: declared kernel_non_negative, got {float(kernel.min())}")
        if declared.parity != "none":
            sign = 1 if declared.parity == "even" else -1
            error = (f - sign * feature_map(-x, params)).abs().max()
            require(bool(error <= 1e-12 * size), f"{name}: not {declared.parity}")
        if declared.degree is not None:
            grown = 3.0**declared.degree
            error = (feature_map(3.0 * x, params) - grown * f).abs().max()
            require(bool(error <= 1e-10 * grown * size), f"{name}: not of degree {declared.degree}")
        if declared.norm_bound is not None:
            largest = float(f.square().sum(-1).max())
            require(largest <= declared.norm_bound * (1 + 1e-12), f"{name}: |phi|^2 reached {largest}")
        if declared.componentwise:
            swapped = feature_map(x.flip(-1), params)
            others = feature_map(torch.cat([x[..., :1], x[..., 1:].roll(1, 0)], -1), params)  # all but the first
            same = f.shape == x.shape and bool((swapped.flip(-1) == f).all() and (others[..., 0] == f[..., 0]).all())
            require(same, f"{name}: not componentwise")
        if declared.rising != "none":
            odd = declared.rising == "odd_part"
            y = x + 0.1 * scale
            gained = feature_map(y, params) - f - (feature_map(-y, params) - feature_map(-x, params) if odd else 0)
            require(bool((gained > 0).all()), f"{name}: not rising {declared.rising}")
        if declared.forgets_length:
            long = feature_map(1e8 * x, params)
            error = (feature_map(3e8 * x, params) - long).abs().max() / long.abs().max()
            require(bool(error <= 1e-4), f"{name}: does not forget lengths")
        if declared.linear_at is not None:
            linear = f[..., declared.linear_at : declared.linear_at + d]
            factor = (linear * x).sum((0, 2), keepdim=True) / x.square().sum((0, 2), keepdim=True)
            fits = linear.shape == x.shape and bool(((linear - factor * x).abs() <= 1e-10 * size).all())
            require(fits, f"{name}: no features linear in x at {declared.linear_at}")
    if declared.decodes:
        require(declared.parity != "even", f"{name}: even, so it decodes nothing")
        _check_decodes(name, feature_map, params, 1e-3 * torch.randn(256, heads, d, dtype=x.dtype, generator=generator))
    if declared.bounded_slope:
        step = torch.randn(256, heads, d, dtype=torch.float64, generator=generator)
        near, far = (feature_map(at + step, params) - feature_map(at, params) for at in (step, 50.0 * step))
        require(float(far.norm()) <= 3 * float(near.norm()), f"{name}: its slope grows")


def _check_decodes(name: str, feature_map: FeatureMap, params: Params, x: Tensor) -> None:
    """Fits a linear map with a constant from features to x on half of the inputs, and checks it on the others."""
    features = torch.cat([feature_map(x, params), torch.ones_like(x[..., :1])], -1)
    (known, other), (x, wanted) = (item.transpose(0, 1).chunk(2, 1) for item in (features, x))
    decoded = other @ torch.linalg.lstsq(known, x).solution
    alike = float((decoded * wanted).sum() / (decoded.norm() * wanted.norm()))
    require(alike > 0.05, f"{name}: declared decodes, but nothing tells x back")


def _cast(params: Params, dtype: torch.dtype) -> Any:
    return pytree.tree_map(lambda t: t.to(dtype) if t.is_floating_point() else t, params)
