"""Sizes and sums far from 1: what a dtype can hold at the end, it holds on the way."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from hecate import Gates, MemoryConfig, memory_scan
from hecate.engine import exact_engines
from hecate.nn import linear_attention, normalise_qk
from tests.memories import close


def draw(size: float, dtype: torch.dtype, *, length: int = 5, d: int = 3) -> list[Tensor]:
    """q and k of a size, v; as leaves."""
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, length, 2, d, generator=g, dtype=torch.float64) for _ in range(3))
    return [x.to(dtype).requires_grad_() for x in (size * q, size * k, v)]


def engines_of(config: MemoryConfig) -> list[str]:
    return ["sequential", *exact_engines(config)]


def results(config: MemoryConfig, tensors: list[Tensor], engine: str, autodiff: str) -> list[Tensor]:
    """y and the gradients, each in units of its own size."""
    lr = torch.full(tensors[1].shape[:3], 0.5, dtype=tensors[1].dtype).requires_grad_()
    y, _ = memory_scan(config, *tensors, Gates(lr), engine=engine, autodiff=autodiff)
    probe = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y.dtype)
    found = [y, *torch.autograd.grad((y * probe).sum(), [*tensors, lr])]
    return [item.detach().double() for item in found]


def agree(got: list[Tensor], true: list[Tensor], rtol: float) -> None:
    for name, mine, other in zip(("y", "q", "k", "v", "lr"), got, true, strict=True):
        assert bool(torch.isfinite(mine).all()), name
        if name == "lr":  # an implicit step of long keys does not depend on it, up to rounding
            assert float((mine - other).norm()) <= rtol * max(float(other.norm()), 1.0)
            continue
        units = [float(item.abs().amax()) if name in "qk" else 1.0 for item in (mine, other)]
        close(mine / units[0], other / units[1], rtol, name)


SIZES = [(torch.float32, 1e30), (torch.float32, 1e12), (torch.float32, 1e-30), (torch.float64, 1e200)]
NORMS = [
    {"key_norm": "l2"},
    {"key_norm": "l2", "bias": "huber"},
    {"key_norm": "sum", "feature_map": "relu"},
    {"key_norm": "sum", "feature_map": "relu", "bias": "dot", "normalizer": "sum"},
]
STEPS = [
    {"step": step, "bias": bias, **more}
    for step in ("normalized", "implicit")
    for bias, more in (
        ("l2", {}),
        ("dot", {}),
        ("l2", {"retention": "decay", "algorithm": "momentum"}),
        ("l2", {"structure": "vector"}),
        ("dot", {"feature_map": "relu", "normalizer": "sum"}),
    )
]


@pytest.mark.spec("RULE-RANGE-I1", "RULE-STEP-I2")
@pytest.mark.parametrize("autodiff", ["tape", "torch"])
@pytest.mark.parametrize("fields", [*NORMS, *STEPS], ids=str)
@pytest.mark.parametrize(("dtype", "size"), SIZES, ids=str)
def test_lengths_whose_square_is_out_of_range(dtype, size, fields, autodiff):
    """Against float64 at lengths it can square: beyond them results scale with the length."""
    if size < 1 and "step" in fields:
        pytest.skip("1e-6 and 1 outweigh such keys, and the reads are below the dtype's range")
    config = MemoryConfig(**fields)
    wide = MemoryConfig(**fields, state_dtype="float64")
    true = results(wide, draw(min(size, 1e30), torch.float64), "sequential", "torch")
    for engine in engines_of(config):
        got = results(config, draw(size, dtype), engine, autodiff)
        agree(got, true, 2e-5 if dtype == torch.float32 else 1e-12)


@pytest.mark.spec("RULE-STEP-I2")
@pytest.mark.parametrize("fields", [{"bias": "huber"}, {"bias": "huber", "chunk": 2}], ids=str)
def test_other_rules_cut_keys_to_what_can_be_squared(fields):
    for step in ("normalized", "implicit"):
        config = MemoryConfig(step=step, **fields)
        tensors = draw(1e30, torch.float32)
        tensors[0] = torch.ones_like(tensors[0]).requires_grad_()
        true = results(config, tensors, "sequential", "torch")
        assert all(bool(torch.isfinite(item).all()) for item in true)
        for engine in engines_of(config):
            agree(results(config, tensors, engine, "tape"), true, 1e-4)


@pytest.mark.spec("RULE-STEP-I2")
def test_a_key_that_is_not_finite_is_still_found():
    q, k, v = draw(1.0, torch.float32)
    for junk in (torch.inf, torch.nan):
        bad = torch.where(torch.arange(3) < 1, junk, k.detach())
        for step in ("normalized", "implicit"):
            with pytest.raises(ArithmeticError, match="batch row 0, head 0, token 0"):
                memory_scan(MemoryConfig(step=step), q, bad, v, Gates(0.5))


def depths(dtype: torch.dtype) -> list[float]:
    edge = -87.0 if dtype == torch.float32 else -708.0  # the last e^x that is a normal number
    return [-1.0, -10.0, edge / 2 + 1, edge / 2 - 10, edge + 20, edge]


@pytest.mark.spec("RULE-NORM-V1")
@pytest.mark.parametrize("autodiff", ["tape", "torch"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("fields", [{}, {"algorithm": "momentum", "retention": "decay"}, {"chunk": 2}], ids=str)
def test_a_mean_over_small_weights_and_its_gradient(fields, dtype, autodiff):
    """With equal keys y is a mean of values whatever the size of phi: the truth is that of x = 0
    where elu's slope is 1 as well; a gradient by keys or queries scales as phi'(x) / phi(x) = 1."""
    feature = {"bias": "dot", "feature_map": "elu", "normalizer": "sum", "state_dtype": "float32"}
    config = MemoryConfig(**feature, **fields)
    g = torch.Generator().manual_seed(0)
    v = torch.randn(1, 4, 1, 2, generator=g, dtype=torch.float64)
    probe = 4 * torch.randn(1, 4, 1, 2, generator=g, dtype=torch.float64)

    def run(x: float, dtype: torch.dtype, engine: str, autodiff: str) -> list[Tensor]:
        q, k = (torch.full((1, 4, 1, 2), x, dtype=dtype).requires_grad_() for _ in range(2))
        own = v.to(dtype).requires_grad_()
        y, _ = memory_scan(config, q, k, own, Gates(0.5), engine=engine, autodiff=autodiff)
        grads = torch.autograd.grad((y * probe.to(dtype)).sum(), [q, k, own])
        return [item.detach().double() for item in (y, *grads)]

    true = run(0.0, torch.float64, "sequential", "torch")
    for engine in engines_of(config):
        for x in depths(dtype):
            # exp rounds its argument: phi is off by about |x| roundings, of which the mean knows.
            tolerance = 4 * abs(x) * torch.finfo(dtype).eps
            for mine, other in zip(run(x, dtype, engine, autodiff), true, strict=True):
                assert bool(torch.isfinite(mine).all()), (engine, x)
                assert float((mine - other).abs().max()) <= tolerance + 1e-5 * small(dtype)


def small(dtype: torch.dtype) -> float:
    return 1.0 if dtype == torch.float32 else 1e-8


@pytest.mark.spec("RULE-RANGE-I1")
@pytest.mark.parametrize("norm", ["l2", "rms"])
@pytest.mark.parametrize(("dtype", "size"), [*SIZES[::2], (torch.float32, 1e-4)], ids=str)
def test_layers_normalise_queries_and_keys_of_any_length(dtype, size, norm):
    x = draw(size, dtype)[0]
    wide = (x.detach().double() / size).requires_grad_()
    y, true = normalise_qk(x, norm), normalise_qk(wide, norm, eps=1e-6 / size)
    close(y, true, 1e-6)
    (g,), (gtrue,) = (torch.autograd.grad(a.pow(3).sum(), b) for a, b in ((y, x), (true, wide)))
    close(g.double() * size, gtrue, 1e-5)


@pytest.mark.spec("RULE-NORM-V1")
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_attention_over_small_weights(dtype, causal):
    g = torch.Generator().manual_seed(0)
    v = torch.randn(1, 4, 1, 2, generator=g).to(dtype).requires_grad_()
    found = []
    for x in (0.0, *depths(dtype)):
        q, k = (torch.full((1, 4, 1, 2), x, dtype=dtype).requires_grad_() for _ in range(2))
        y, _ = linear_attention(q, k, v, causal=causal)
        found.append((y, *torch.autograd.grad(y.square().sum(), [q, k, v])))
        for mine, true in zip(found[-1], found[0], strict=True):
            tolerance = 8 * (abs(x) + 1) * torch.finfo(dtype).eps
            torch.testing.assert_close(mine, true, rtol=tolerance, atol=10 * tolerance)


@pytest.mark.spec("RULE-NORM-D1")
def test_an_empty_memory_divides_by_one_whatever_the_size_of_features():
    fields = {"bias": "dot", "feature_map": "elu", "normalizer": "sum", "read": "before"}
    config = MemoryConfig(**fields)
    x = torch.full((1, 3, 1, 2), -60.0, dtype=torch.float32)
    start = {"weight": torch.ones(1, 2, 2, dtype=torch.float32)}
    for engine in engines_of(config):
        y, _ = memory_scan(config, x, x, x, Gates(0.5), initial=start, engine=engine)
        assert float(y[0, 0, 0, 0]) == pytest.approx(2 * math.exp(-60.0), rel=1e-4, abs=0)
