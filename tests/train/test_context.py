"""Training with sequences shared by several processes, against one."""

from __future__ import annotations

import warnings
from collections.abc import Collection
from contextlib import ExitStack
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from hecate.data import IGNORED
from hecate.distributed import ParallelConfig, World, start
from hecate.errors import ConfigError
from hecate.train import evaluate, trainer
from tests.ranks import run_ranks
from tests.train.worlds import experiment, many, meshed, trained

STEPS = 5


def configs(context: int, data: int = 1) -> dict[str, Any]:
    shape = {"parallel": {"data": data, "context": context}} if context * data > 1 else {}
    again = {"budget": {"accumulate": 2, "recompute": "full"}}
    return {
        "delta": (experiment("delta", **shape), STEPS),
        "levels, in parts": (experiment("levels", **shape, **again), STEPS),
        "mlp": (experiment("mlp", **shape), STEPS),
    }


def precise_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)


def precisely(cases: dict[str, Any]) -> dict[str, Any]:
    """`many` in float64, the loss too, which is float32 otherwise: its rounding is no matter of pieces."""
    with (
        mock.patch.object(trainer, "batch_loss", precise_loss),
        mock.patch.object(evaluate, "batch_loss", precise_loss),
    ):
        return many(torch.float64, cases)


def here(names: Collection[str] = ("delta", "levels, in parts", "mlp")) -> dict[str, Any]:
    """What one process finds."""
    precise = (mock.patch.object(module, "batch_loss", precise_loss) for module in (trainer, evaluate))
    with ExitStack() as stack:
        for patch in precise:
            stack.enter_context(patch)
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")  # of tiny models, that their steps are large
        return {
            name: trained(config, World.alone(), steps) for name, (config, steps) in configs(1).items() if name in names
        }


def compare(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    for name, want in wanted.items():
        for field in ("losses", "norms", "score"):
            np.testing.assert_allclose(found[name][field], want[field], rtol=1e-11, atol=1e-11)
        assert found[name]["tokens"] == want["tokens"]
        for key, tensor in want["after"].items():
            np.testing.assert_allclose(
                found[name]["after"][key], tensor, rtol=1e-11, atol=1e-11, err_msg=f"{name}: {key}"
            )


def refused() -> list[str]:
    """What cannot be shared, on this rank."""
    said = []
    with start(ParallelConfig(context=2), timeout=30.0) as world:
        for budget in ({"compile": "block"},):
            config = experiment("delta", parallel={"context": 2}, budget=budget)
            try:
                trained(config, meshed(world, config), 1)
                said.append("")
            except ConfigError as error:
                said.append(str(error))
    return said


@pytest.mark.spec("CTX-TRAIN-I1")
def test_two_processes_share_sequences():
    few = {name: case for name, case in configs(2).items() if name != "mlp"}
    first, second = run_ranks(2, precisely, few)
    compare(first, here(few))
    compare(second, first)


@pytest.mark.slow
@pytest.mark.spec("CTX-TRAIN-I1")
@pytest.mark.parametrize(("context", "data"), [(2, 2), (4, 1), (3, 1)])
def test_with_data_and_context(context, data):
    compare(run_ranks(context * data, precisely, configs(context, data))[0], here())


@pytest.mark.slow
@pytest.mark.spec("CTX-TRAIN-I1")
def test_compiled_blocks_are_refused_on_every_rank():
    first, second = run_ranks(2, refused)
    assert first == second and "budget.compile='block'" in first[0]
