"""Every engine on a CUDA device: parity with the CPU's token loop in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hecate import MemoryConfig
from hecate.engine import Plan, explain
from tests.memories import Case, case_of, config_of, flat_state

pytestmark = pytest.mark.gpu

TITANS = {"retention": "decay", "algorithm": "momentum", "key_norm": "l2"}
CASES = {
    "loop": ("sequential", TITANS),
    "loop, deep": ("sequential", {"structure": {"kind": "mlp", "expansion": 1}, **TITANS}),
    "hebbian": ("parallel", {"bias": "dot", "key_norm": "l2"}),
    "delta": ("parallel", {"key_norm": "l2"}),
    "titans": ("parallel", TITANS),
    "gated": ("parallel", {**TITANS, "decay_order": "before_gradient"}),
    "huber": ("parallel", {**TITANS, "bias": {"kind": "huber", "delta": 0.4}}),
    "lp": ("parallel", {**TITANS, "bias": {"kind": "lp", "p": 1.5, "eps": 0.1}}),
    "vector": ("parallel", {**TITANS, "structure": "vector"}),
    "attention": ("parallel", {"bias": "dot", "feature_map": "elu", "normalizer": "sum", "key_norm": "l2"}),
    "frozen": ("chunk", {**TITANS, "chunk": 8}),
    "commit": ("chunk", {**TITANS, "chunk": 8, "commit": "chunk"}),
    "frozen, deep": ("chunk", {**TITANS, "chunk": 8, "structure": {"kind": "mlp", "expansion": 1}}),
}
EVERY = pytest.mark.parametrize(("engine", "fields"), CASES.values(), ids=CASES)


def moved(case: Case, dtype: torch.dtype, device: str) -> Case:
    """The same numbers in another dtype, on another device."""
    own = case.with_leaves([leaf.to(device, dtype) for leaf in case.leaves])
    write, reset = (None if mask is None else mask.to(device) for mask in case[-2:])
    return own._replace(write=write, reset=reset)


def results(case: Case, engine: str, autodiff: str = "auto") -> list[Tensor]:
    """Outputs, final state and all gradients, as float64 on the CPU."""
    leaves = [leaf.detach().clone().requires_grad_() for leaf in case.leaves]
    y, state = case.with_leaves(leaves).scan(engine=engine, autodiff=autodiff)
    found = [y, *(item for item in flat_state(state).values() if item.is_floating_point())]
    ways = torch.Generator().manual_seed(3)
    # Numbers that bfloat16 holds, so that every dtype gets the same cotangents.
    draws = [torch.randn(item.shape, generator=ways).bfloat16().to(item) for item in found]
    return [
        item.detach().double().cpu()
        for item in (*found, *torch.autograd.grad(found, leaves, draws, materialize_grads=True))
    ]


def error(mine: list[Tensor], true: list[Tensor]) -> float:
    """The largest error in norm, relative to the norm of the truth."""
    return max(float((a - b).norm()) / max(float(b.norm()), 1e-6) for a, b in zip(mine, true, strict=True))


def drawn(fields: dict, dtype: torch.dtype, *, masks: bool = False) -> tuple[Case, Case]:
    """A case in a dtype, and the same rounded numbers in float64."""
    low = case_of(MemoryConfig(**fields), length=150, d=16, width=16, masks=masks, dtype=dtype)
    return low, moved(low, torch.float64, "cpu")._replace(config=config_of(**fields))


@EVERY
@pytest.mark.parametrize("autodiff", ["tape", "torch"])
def test_single_precision(engine, fields, autodiff):
    """150 tokens: contractions carry each token's roundings to the end at most once."""
    low, exact = drawn(fields, torch.float32)
    true = results(exact, "sequential")
    assert error(results(moved(low, torch.float32, "cuda"), engine, autodiff), true) < 1e-4


@EVERY
def test_double_precision(engine, fields):
    _, exact = drawn(fields, torch.float32)
    true = results(exact, "sequential")
    assert error(results(moved(exact, torch.float64, "cuda"), engine), true) < 1e-10


@EVERY
def test_bfloat16_inputs(engine, fields):
    """The memory runs in float32: outputs and gradients are rounded once, by 2^-8 at most."""
    low, exact = drawn(fields, torch.bfloat16)
    mine, true = results(moved(low, torch.bfloat16, "cuda"), engine), results(exact, "sequential")
    grads = len(low.leaves)
    assert error(mine[:-grads], true[:-grads]) < 2e-3
    assert error(mine[-grads:], true[-grads:]) < 2**-8


@pytest.mark.parametrize("engine", ["sequential", "parallel"])
def test_masks_and_resets(engine):
    low, exact = drawn(TITANS, torch.float32, masks=True)
    true = results(exact, "sequential")
    assert error(results(moved(low, torch.float32, "cuda"), engine), true) < 1e-4


def test_retain_per_channel():
    case = case_of(config_of(**TITANS), length=70, d=8, width=4, channels=True)
    true = results(case, "sequential")
    assert error(results(moved(case, torch.float64, "cuda"), "parallel"), true) < 1e-10


def test_auto_never_takes_cpu_kernels():
    assert explain(Plan.sketch(MemoryConfig(), length=1000, device="cuda"))[0] == "parallel"


def test_derivatives_of_second_order():
    case = moved(case_of(config_of(**TITANS), batch=1, heads=1, length=4, d=2), torch.float64, "cuda")
    case = case.fresh()
    y, _ = case.scan(engine="parallel")
    (grad,) = torch.autograd.grad(y.square().sum(), case.k, create_graph=True)
    second = torch.autograd.grad(grad.square().sum(), case.leaves)
    host = moved(case, torch.float64, "cpu").fresh()
    y, _ = host.scan(engine="sequential", autodiff="torch")
    (grad,) = torch.autograd.grad(y.square().sum(), host.k, create_graph=True)
    true = torch.autograd.grad(grad.square().sum(), host.leaves)
    assert error([item.cpu() for item in second], list(true)) < 1e-9
