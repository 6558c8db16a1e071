"""Compiled steps of the chunk engine, the CPU taken for a device, against the token loop."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from hecate.engine import Engine, Plan, explain
from hecate.engine.chunk import engine as chunk
from hecate.errors import ConfigError
from hecate.train import ExperimentConfig
from hecate.train.trainer import Trainer, build_model, compile_chunks
from tests.launches import as_on_a_device, counted
from tests.memories import Case, case_of, close, config_of, flat_state
from tests.rule import test_knobs as users  # registers variants of a user

pytestmark = [
    pytest.mark.spec("ENG-CHUNK-D8"),
    pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning"),  # inductor's own
]
MLP = {"kind": "mlp", "layers": 2, "expansion": 2, "activation": "silu", "residual": True}
CASES = {
    "dual": {"structure": MLP, "retention": "decay", "algorithm": "momentum"},
    "built": {"structure": MLP, "retention": "soft_clip_of_a_user", "decay_order": "before_gradient"},
    "commit": {"structure": MLP, "retention": "decay", "algorithm": "momentum", "commit": "chunk"},
}


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[None]:
    monkeypatch.setattr(chunk, "BACKEND", getattr(request, "param", "aot_eager"))
    with as_on_a_device():
        yield
    chunk._compiled_block.cache_clear()


def results(case: Case, engine: str, autodiff: str = "auto") -> list[Tensor]:
    """Outputs, state and all gradients."""
    own = case.fresh()
    y, state = own.scan(engine=engine, autodiff=autodiff)
    found = [y, *(item for item in flat_state(state).values() if item.is_floating_point())]
    ways = torch.Generator().manual_seed(1)
    draws = [torch.randn(item.shape, generator=ways, dtype=item.dtype) for item in found]
    return [*found, *torch.autograd.grad(found, own.leaves, draws, materialize_grads=True)]


def agree(fields: dict, *, masks: bool, chunk: int = 4) -> None:
    case = case_of(config_of(chunk=chunk, **fields), length=2 * chunk + 3, d=2, width=2, masks=masks)
    true = results(case, "sequential")
    for autodiff in ("auto", "torch"):
        for mine, wanted in zip(results(case, "fused", autodiff), true, strict=True):
            close(mine, wanted, 1e-10)


@pytest.mark.parametrize(("fields", "masks"), [(CASES["dual"], False), (CASES["commit"], True)], ids=["dual", "commit"])
def test_against_the_token_loop(fields: dict, masks: bool, device: None) -> None:
    agree(fields, masks=masks)
    assert users  # its variants are known


@pytest.mark.slow
@pytest.mark.parametrize("device", ["inductor"], indirect=True)
@pytest.mark.parametrize("masks", [False, True], ids=["", "masks"])
@pytest.mark.parametrize("fields", CASES.values(), ids=CASES)
def test_as_torch_compiles_it(fields: dict, masks: bool, device: None) -> None:
    agree(fields, masks=masks, chunk=16)


@pytest.mark.slow
@pytest.mark.parametrize("device", ["inductor"], indirect=True)
def test_it_launches_less(device: None) -> None:
    """Kernels that torch has made of a step, once each for every step, and the operations that are left."""
    from torch._inductor import metrics

    case = case_of(config_of(chunk=16, **CASES["dual"]), length=256, d=8, width=8)
    metrics.reset()
    results(case, "fused")
    made = metrics.generated_kernel_count
    mine = counted(lambda: results(case, "fused")).launches
    assert 3 * (mine + 256 // 16 * made) < 2 * counted(lambda: results(case, "chunk")).launches


def test_second_derivatives_and_retained_graphs(device: None) -> None:
    case = case_of(config_of(chunk=2, **CASES["dual"]), length=4, d=2, width=2).fresh()
    y, _ = case.scan(engine="fused")
    first = torch.autograd.grad(y.square().sum(), case.leaves, retain_graph=True)
    for mine, again in zip(first, torch.autograd.grad(y.square().sum(), case.leaves), strict=True):
        assert torch.equal(mine, again)

    def twice(engine: str) -> tuple[Tensor, ...]:
        y, _ = case.scan(engine=engine)
        grads = torch.autograd.grad(y.square().sum(), case.leaves, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in grads), case.leaves)

    for mine, wanted in zip(twice("fused"), twice("sequential"), strict=True):
        close(mine, wanted, 1e-9)


def test_one_program_for_all_chunks(device: None) -> None:
    case = case_of(config_of(chunk=2, **CASES["dual"]), length=16, d=2, width=2)
    case.scan(engine="fused")
    assert chunk._compiled_block.cache_info().misses == 1
    case.scan(engine="fused")
    assert chunk._compiled_block.cache_info().misses == 1


def test_where_it_is_not_for() -> None:
    config = config_of(chunk=4, structure=MLP)
    with pytest.raises(ConfigError, match="engine='fused' cannot run .* compiles steps for a GPU"):
        case_of(config, d=2, width=2).scan(engine="fused")
    with as_on_a_device():
        assert explain(Plan.sketch(config))[0] == "chunk"  # only if asked for
    there = Plan.sketch(config, length=16, steps=4, device="cuda")
    assert "4 times" in Engine.registry["fused"].about(there)


def test_a_model_is_told_in_its_budget(device: None) -> None:
    own = {"structure": MLP, "retention": "decay", "chunk": 4}
    shape = {"d_model": 8, "layers": 1, "heads": 2, "memory": own}
    given = {"model": shape, "budget": {"steps": 1, "batch_size": 2, "seq_len": 8}}
    with pytest.raises(ConfigError, match="budget.compile: 'chunk' is for a GPU"):
        ExperimentConfig.model_validate({**given, "budget": {"compile": "chunk"}})
    there = ExperimentConfig.model_validate({**given, "budget": {"compile": "chunk", "device": "cuda"}})
    assert there.engines()["memory"] == ("fused", "asked for")
    plain, told = (Trainer(ExperimentConfig.model_validate(given)) for _ in range(2))
    compile_chunks(told.model)
    assert plain.train_step().loss == pytest.approx(told.train_step().loss, rel=1e-6)
    short = ExperimentConfig.model_validate({**given, "model": {**shape, "memory": {**own, "chunk": 1}}})
    with pytest.raises(ConfigError, match="budget.compile: 'chunk' finds no memory with chunk > 1"):
        compile_chunks(build_model(short))
