"""Experiments for several processes, and what every rank of them finds."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import torch

from hecate.distributed import ParallelConfig, World, gathered, start
from hecate.distributed.shard import settle
from hecate.distributed.world import AXES
from hecate.train import ExperimentConfig, Trainer

MODELS: dict[str, dict[str, Any]] = {
    "delta": {"memory": {"kind": "gated_delta", "feature_map": "elu"}},
    "titans": {"memory": "titans_linear"},
    "levels": {
        "levels": [
            {"name": "fast", "period": 1, "memory": "gated_delta"},
            {"name": "middle", "period": 4, "memory": "gated_delta"},
            {"name": "slow", "period": 8, "memory": "gated_delta"},
        ]
    },
    "mlp": {
        "memory": {"structure": {"kind": "mlp", "residual": True}, "algorithm": {"kind": "gd", "lr": 0.1}, "chunk": 4}
    },
    "favor": {
        "memory": {"kind": "gated_delta", "feature_map": {"kind": "favor", "num_features": 8}},
        "tie_embeddings": False,
    },
    "hedgehog": {"memory": {"kind": "gated_delta", "feature_map": "hedgehog"}},
}
TASK = {"kind": "mqar", "vocab_size": 24, "num_pairs": 3, "seq_len": 16}


def experiment(model: str = "delta", **fields: Any) -> ExperimentConfig:
    """A tiny model of two blocks on batches of twelve, which 1, 2, 3 and 4 processes can share."""
    budget = {
        "steps": 20,
        "batch_size": 12,
        "eval_batches": 2,
        "eval_every": 10,
        "checkpoint_every": 10,
        "timeout": 60.0,
    }
    sizes = {"d_model": 16, "layers": 2, "heads": 2, "mlp_ratio": 1.0, "conv_kernel": 2}
    shape = {"d_model": 16, "layers": 2, "heads": 2, "mlp_ratio": 1.0} if "levels" in MODELS[model] else sizes
    return ExperimentConfig.model_validate(
        {
            "name": "worlds",
            "model": shape | MODELS[model],
            "data": TASK,
            "budget": budget | fields.pop("budget", {}),
            "optim": {"warmup": 3, "lr": 1e-2} | fields.pop("optim", {}),
            **fields,
        }
    )


def trained(config: ExperimentConfig, world: World, steps: int = 20) -> dict[str, Any]:
    """Losses and norms of steps, the score, and all parameters as nested lists."""
    trainer = Trainer(config, world=world)
    fresh = whole(trainer)
    results = [trainer.train_step() for _ in range(steps)]
    score = trainer.evaluate()
    return {
        "fresh": fresh,
        "losses": [r.loss for r in results],
        "norms": [r.grad_norm for r in results],
        "tokens": results[-1].tokens,
        "score": list(score),
        "after": whole(trainer),
    }


def whole(trainer: Trainer) -> dict[str, Any]:
    """All tensors of the model, whole, on every rank."""
    settle(trainer.model)
    return {name: gathered(value).detach().numpy().copy() for name, value in trainer.model.state_dict().items()}


def many(dtype: torch.dtype, cases: dict[str, tuple[ExperimentConfig, int]]) -> dict[str, Any]:
    """`trained` for every case in turn, by one set of processes."""
    warnings.simplefilter("ignore")
    torch.set_default_dtype(dtype)
    found = {}
    with start(ParallelConfig(), timeout=60.0) as world:
        for name, (config, steps) in cases.items():
            found[name] = trained(config, meshed(world, config), steps)
    return found


def meshed(world: World, config: ExperimentConfig) -> World:
    """The same processes in the mesh of a config."""
    if world.size == 1:
        return world
    from torch.distributed.device_mesh import init_device_mesh

    return replace(world, mesh=init_device_mesh("cpu", config.parallel.shape(world.size), mesh_dim_names=AXES))
