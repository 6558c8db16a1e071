"""How often a feature map is evaluated: once forward, and once more in a taped backward pass, by hand or not."""

from __future__ import annotations

from typing import ClassVar, Literal

import pytest
import torch
from torch import Tensor

from hecate import Gates, MemoryConfig, memory_scan, phi
from hecate.tape import Block, Tape
from tests.memories import close


class Tally(phi.FeatureMap):
    """tally_of_a_test: phi(x) = a sin(x), counting its evaluations."""

    kind: Literal["tally_of_a_test"] = "tally_of_a_test"
    count: ClassVar[list[int]] = [0]

    def init(self, d, *, heads=1, generator=None, dtype=torch.float32, device=None):
        return {"learned": {"a": torch.ones(1, d, dtype=dtype, device=device)}, "frozen": {}}

    def features(self, x: Tensor, params: phi.Params) -> Tensor:
        self.count[0] += 1
        return params["learned"]["a"][0] * x.sin()


class TallyByHand(phi.FeatureMap):
    """tally_by_hand_of_a_test: phi(x) = a x^3, counting its evaluations."""

    kind: Literal["tally_by_hand_of_a_test"] = "tally_by_hand_of_a_test"
    init = Tally.init

    def forward(self, x: Tensor, params: phi.Params):
        Tally.count[0] += 1
        a = params["learned"]["a"][0]
        return a * x**3, (a, x)

    def vjp(self, residuals, g: Tensor):
        a, x = residuals
        return 3 * a * x**2 * g, {"a": (x**3 * g).flatten(0, -2).sum(0, keepdim=True)}


MAPS = {
    "alone": Tally(),
    "by hand": TallyByHand(),
    "inside another": phi.Compose(maps=(phi.Tanh(), Tally())),
    "around another": phi.Normalise(inner=phi.OddLift(inner=phi.ReLU())),
}
RUNS = [
    (engine, autodiff, fields)
    for engine, fields in (
        ("sequential", {}),
        ("parallel", {}),
        ("compiled", {}),
        ("chunk", {"chunk": 3}),
        ("auto", {"chunk": 3, "commit": "chunk"}),
    )
    for autodiff in ("tape", "torch")
]


def inputs(feature_map: phi.FeatureMap) -> tuple[list[Tensor], phi.Params]:
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(1, 40, 2, 3, generator=generator).requires_grad_() for _ in range(3)]
    params = feature_map.init(3, heads=2, dtype=torch.float64)
    for tensor in params["learned"].values():
        tensor.requires_grad_()
    return tensors, params


@pytest.mark.spec("PHI-FAMILY-V2")
@pytest.mark.parametrize("name", ["alone", "by hand", "inside another"])
@pytest.mark.parametrize(("engine", "autodiff", "fields"), RUNS)
def test_a_map_is_evaluated_once_and_again_where_a_tape_goes_back(name, engine, autodiff, fields):
    config = MemoryConfig(feature_map=MAPS[name], key_norm="l2", state_dtype="float64", **fields)
    tensors, params = inputs(config.feature_map)
    how = {"phi_params": params, "engine": engine, "autodiff": autodiff}
    Tally.count[0] = 0
    with torch.no_grad():
        memory_scan(config, *tensors, Gates(0.5), **how)
    assert Tally.count == [2]  # k and q
    Tally.count[0] = 0
    y, _ = memory_scan(config, *tensors, Gates(0.5), **how)
    assert Tally.count == [2]
    leaves = [*tensors, *params["learned"].values()]
    torch.autograd.grad(y.square().sum(), leaves, retain_graph=True)
    assert Tally.count == [4 if autodiff == "tape" else 2]
    Tally.count[0] -= 2 if autodiff == "tape" else 0
    first = torch.autograd.grad(y.square().sum(), leaves, create_graph=True)
    if name != "by hand":  # whose one evaluation serves second derivatives too
        assert Tally.count == [4 if autodiff == "tape" else 2]
    second = torch.autograd.grad(sum(item.sum() for item in first), leaves)
    y, _ = memory_scan(config, *tensors, Gates(0.5), phi_params=params, autodiff="torch")
    true = torch.autograd.grad(y.square().sum(), leaves, create_graph=True)
    true += torch.autograd.grad(sum(item.sum() for item in true), leaves)
    for got, expected in zip((*first, *second), true, strict=True):
        close(got, expected, 1e-11)


@pytest.mark.spec("TAPE-BLOCK-D1")
def test_a_block_without_a_vjp_runs_once_on_a_tape_and_pulls_back_as_often_as_asked():
    runs = []

    def forward(x: Tensor, whole: Tensor, none: None):
        runs.append(x)
        return (x.sin(), None, whole + 1, x), ()

    x, whole, tape = torch.ones(3), torch.arange(3), Tape()
    y, _, more, same = tape(Block("sine", forward), x, whole, None)
    assert more.tolist() == [1, 2, 3] and len(runs) == 1
    for _ in range(2):
        (gx, gwhole) = tape.backward([y, same], [torch.ones(3), torch.ones(3)], [x, whole])
        torch.testing.assert_close(gx, x.cos() + 1)
        assert gwhole is None
    assert len(runs) == 1
    (only,), pull = Block("whole", lambda x: ((x + 1,), ())).apply((whole,))
    assert only.tolist() == [1, 2, 3] and pull(torch.zeros(3)) == [None]


@pytest.mark.spec("PHI-FAMILY-V2")
def test_only_maps_that_hold_no_other_derivative_are_by_hand():
    for name, by_hand in (("alone", False), ("inside another", False), ("around another", True), ("by hand", True)):
        map_ = MAPS[name]
        block, _ = map_.block(map_.init(3))
        assert block.hand_written == by_hand
