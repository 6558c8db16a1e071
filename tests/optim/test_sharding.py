"""Sharded parameters: the same numbers as whole ones, most of them without communication."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

from hecate import phi
from hecate.errors import ConfigError, NonFiniteError
from hecate.optim import DGD, M3, DeepMomentum, DeltaMomentum, KernelMomentum, Muon, PhiMomentum
from tests.optim.rules import draw
from tests.ranks import run_ranks

WAVES = {"feature_map": phi.RandomFourier(d_phi=32, sigma=4.0)}
RFF = {**WAVES, "lift": "vjp"}
ROWWISE = [
    {},
    {"feature_map": phi.ELU(), "weight_decay": 0.1, "nesterov": True, "on_nonfinite": "propagate"},
    {**RFF, "space": "phi"},
    {**RFF, "precondition": "diagonal", "guard": "flip", "input_scale": "unit"},
    {"feature_map": phi.Linear(d_phi=9), "lift": "pinv"},
]
SHAPES = [(8, 6), (5, 7), (1, 4), (3, 2, 3)]  # even, uneven, empty on some, a convolution

MATRICES = [(8, 6), (3, 18), (5, 7), (1, 4)]
GATHERING = [
    (Muon, {"weight_decay": 0.1}),
    (M3, {"slow_period": 2, "second_moment": "after"}),
    (M3, {"slow_period": 3, "accumulate": "sum", "second_moment": "before"}),
    (DeltaMomentum, {}),
    (DeltaMomentum, {"reading": "scalar", "orthogonalize": True}),
    (DeepMomentum, {"width": 3}),
    (DeepMomentum, {"width": 3, "shared": True}),
    (KernelMomentum, {}),
    (KernelMomentum, {**WAVES, "keys": "rows"}),
    *((PhiMomentum, options) for options in (
        {"orthogonalize": True, "weight_decay": 0.1},
        {"precondition": "kronecker", "feature_map": phi.Tanh()},
        {"feature_map": phi.Linear(d_phi=4), "lift": "learned"},
        {"feature_map": phi.Linear(d_phi=4), "lift": "learned", "space": "phi"},
        {"feature_map": phi.MLP(d_hidden=3), "phi_lr": 0.01},
    )),
]  # fmt: skip
KEEPS_PLACE = (Muon, M3, DeltaMomentum, PhiMomentum)
ACROSS = [  # options that need a row as a whole, on rows that are cut
    RFF,
    {**RFF, "space": "phi", "nesterov": True},
    {**RFF, "precondition": "diagonal", "guard": "flip", "input_scale": "unit"},
    {"feature_map": phi.Tanh(), "guard": "skip"},
    {"feature_map": phi.Tanh(), "space": "phi"},
]


def same_as_whole(mesh, options: dict) -> None:
    whole = [torch.nn.Parameter(draw(*s, seed=i)) for i, s in enumerate(SHAPES)]
    spread = [torch.nn.Parameter(distribute_tensor(p.detach().clone(), mesh, [Shard(0)])) for p in whole]
    one, two = PhiMomentum(whole, 0.05, **options), PhiMomentum(spread, 0.05, **options)
    looks = options.get("on_nonfinite") != "propagate"  # at one flag per parameter, in one message
    for step in range(4):
        for i, (p, q) in enumerate(zip(whole, spread, strict=True)):
            p.grad = draw(*p.shape, seed=100 * step + i)
            q.grad = distribute_tensor(p.grad.clone(), mesh, [Shard(0)])
        one.step()
        with CommDebugMode() as counted:
            two.step()
        assert counted.get_total_counts() == looks, counted.get_comm_counts()
    for p, q in zip(whole, spread, strict=True):
        torch.testing.assert_close(q.full_tensor().detach(), p.detach(), rtol=1e-12, atol=1e-12)
        for key, value in one.state[p].items():
            found = two.state[q][key]
            assert isinstance(found, DTensor) and found.placements == q.placements
            torch.testing.assert_close(found.full_tensor(), value, rtol=1e-12, atol=1e-12)


def gathered_exactly(mesh, cls, options: dict, placement, shapes=()) -> None:
    """Whole matrices on every process: not a bit of difference."""
    shapes = shapes or MATRICES + ([(3, 2, 3)] if cls is Muon else [(7,)])
    whole = [torch.nn.Parameter(draw(*s, seed=i)) for i, s in enumerate(shapes)]
    spread = [torch.nn.Parameter(distribute_tensor(p.detach().clone(), mesh, [placement(p)])) for p in whole]
    one, two = cls(whole, 0.05, **options), cls(spread, 0.05, **options)
    for step in range(4):
        for i, (p, q) in enumerate(zip(whole, spread, strict=True)):
            p.grad = draw(*p.shape, seed=100 * step + i)
            q.grad = distribute_tensor(p.grad.clone(), mesh, [placement(p)])
        if step == 2:  # what is missing on one process is missing on all
            whole[0].grad = spread[0].grad = None
        if step == 3:  # one entry on one process: all agree
            whole[1].grad[0, 0] = float("nan")
            spread[1].grad = distribute_tensor(whole[1].grad.clone(), mesh, [placement(whole[1])])
            for optimizer in (one, two):
                with pytest.raises(NonFiniteError, match="parameter 1"):
                    optimizer.step()
                optimizer.param_groups[0]["on_nonfinite"] = "skip"
        one.step()
        two.step()
    for p, q in zip(whole, spread, strict=True):
        assert torch.equal(q.full_tensor().detach(), p.detach()), (cls, p.shape)
        for key, value in one.state[p].items():
            found = two.state[q][key]
            placed = cls in KEEPS_PLACE and "space" not in options and p.ndim > 1
            if placed and value.shape == p.shape:
                assert isinstance(found, DTensor) and found.placements == q.placements
            found = found.full_tensor() if isinstance(found, DTensor) else found
            assert torch.equal(found, value), (cls, options, key)


def bad_on_one_process(mesh, cls, options: dict) -> None:
    """A NaN in one process's part: all raise and nothing moves, or all leave that parameter."""
    values = [draw(6, 4, seed=1), draw(8, 4, seed=2), draw(3, 4, seed=3)]
    spread = [torch.nn.Parameter(distribute_tensor(v.clone(), mesh, [Shard(0)])) for v in values]
    plain = torch.nn.Parameter(draw(2, 4, seed=4))
    params = [*spread, plain]
    optimizer = cls(params, 0.05, **options)

    def step(bad: int) -> None:
        for i, p in enumerate(params):
            p.grad = torch.ones_like(p)
            if i == bad and dist.get_rank() == dist.get_world_size() - 1:
                (p.grad.to_local() if i < 3 else p.grad)[0] = float("nan")
        optimizer.step()

    def numbers() -> list[torch.Tensor]:
        held = [x for state in optimizer.state.values() for x in state.values()]
        every = (x.full_tensor() if isinstance(x, DTensor) else x for x in (*params, *held))
        return [x.detach().clone() for x in every]

    step(-1)
    for bad in (1, 3):
        before = numbers()
        with pytest.raises(NonFiniteError, match=f"gradient of parameter {bad} .* nothing was"):
            step(bad)
        assert all(torch.equal(x, y) for x, y in zip(before, numbers(), strict=True))
        optimizer.param_groups[0]["on_nonfinite"] = "skip"
        step(bad)
        still = [torch.equal(x, y) for x, y in zip(before[:4], numbers()[:4], strict=True)]
        assert still == [i == bad for i in range(4)], (cls, bad, still)
        optimizer.param_groups[0]["on_nonfinite"] = "raise"
    optimizer.param_groups[0]["on_nonfinite"] = "propagate"
    step(1)  # nobody looks, nobody waits
    step(-1)
    assert torch.isnan(spread[1].full_tensor()).any()


def same_under_fsdp() -> None:
    def model() -> torch.nn.Module:
        made = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3))
        with torch.no_grad():
            for i, p in enumerate(made.parameters()):
                p.copy_(draw(*p.shape, seed=i))
        return made

    options = {"feature_map": phi.Tanh()}
    plain, spread = model(), model()
    fully_shard(spread)
    one = PhiMomentum(plain.parameters(), 0.05, **options)
    two = PhiMomentum(spread.parameters(), 0.05, **options)
    for step in range(3):
        x = draw(6, 4, seed=50 + step)
        for made, optimizer in ((plain, one), (spread, two)):
            optimizer.zero_grad()
            made(x).square().sum().backward()
            optimizer.step()
    for p, q in zip(plain.parameters(), spread.parameters(), strict=True):
        torch.testing.assert_close(q.full_tensor().detach(), p.detach(), rtol=1e-12, atol=1e-12)


def refusals(mesh) -> None:
    rows = torch.nn.Parameter(distribute_tensor(draw(4, 6), mesh, [Shard(0)]))
    with pytest.raises(ConfigError, match="DGD needs every sample"):
        DGD([rows])
    with pytest.raises(ConfigError, match="differentiable=True takes whole parameters"):
        PhiMomentum([rows], differentiable=True)


def worker() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for cls, options in GATHERING:
        gathered_exactly(mesh, cls, options, lambda p: Shard(0))
    chosen = [GATHERING[0], *GATHERING[1:10:3], (PhiMomentum, {}), (PhiMomentum, RFF)]
    for cls, options in chosen:
        bad_on_one_process(mesh, cls, options)
    gathered_exactly(mesh, Muon, {"matrix": "last"}, lambda p: Shard(1))
    gathered_exactly(mesh, DeepMomentum, {"width": 3}, lambda p: Shard(p.ndim - 1))
    gathered_exactly(mesh, Muon, {}, lambda p: Replicate())
    for options in ACROSS:
        gathered_exactly(mesh, PhiMomentum, options, lambda p: Shard(p.ndim - 1))
    stacks = {**RFF, "space": "phi", "matrix": "last"}
    gathered_exactly(mesh, PhiMomentum, stacks, lambda p: Shard(0), [(4, 2, 6), (3, 1, 2)])
    gathered_exactly(mesh, KernelMomentum, {}, lambda p: Shard(p.ndim - 1))
    for options in ({}, {"orthogonalize": True}):
        gathered_exactly(mesh, PhiMomentum, options, lambda p: Replicate())
    if mesh.size() == 1:
        return  # one process holds whole rows: nothing else differs
    for options in ROWWISE:
        same_as_whole(mesh, options)
    same_under_fsdp()
    refusals(mesh)


@pytest.mark.spec("OPT-SHARD-D1", "OPT-SHARD-D2", "OPT-SHARD-D3", "OPT-SHARD-D4")
@pytest.mark.spec("OPT-SHARD-I1", "OPT-SHARD-I2")
@pytest.mark.parametrize("world", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
def test_shards_step_as_the_whole_does(world):
    run_ranks(world, worker, group=True, dtype=torch.float64)
