"""What the checkpoint of a run says of it, and whether that is this run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field

from hecate.errors import CheckpointError, ConfigError, shorten
from hecate.train.config import ExperimentConfig
from hecate.variant import Config

_MUST_MATCH = ("optim", "seed", "model", "data")
_SHOWN = 8


class OptimizerFacts(Config):
    """What of optimisers is no tensor: their names, groups, and plain state by parameter."""

    optimizer: str
    groups: tuple[dict[str, Any], ...]
    values: dict[str, dict[str, Any]]


class RunFacts(Config):
    """The facts of a run's checkpoint."""

    step: int = Field(ge=0)
    config: dict[str, Any]
    optimizer: OptimizerFacts
    cursor: dict[str, int | str]
    metrics: dict[str, float]
    versions: dict[str, str]


class _Missing:
    def __repr__(self) -> str:
        return "missing"


_MISSING = _Missing()


def run_facts(facts: Mapping[str, Any], where: str) -> RunFacts:
    """The facts of a checkpoint; `CheckpointError` names all that are not a run's."""
    try:
        return RunFacts.model_validate(dict(facts))
    except ConfigError as error:
        raise CheckpointError(f"{where} is not valid: {error}; use an earlier checkpoint") from None


def refuse_other_config(saved: Mapping[str, Any], config: ExperimentConfig, where: str) -> None:
    """Names the settings that differ from those of a checkpoint, with both values."""
    own, fault = config.model_dump(mode="json"), None
    try:
        saved = ExperimentConfig.model_validate(saved).model_dump(mode="json")
    except ConfigError as error:  # a kind that is not registered here, or no config
        fault = error
    for part in _MUST_MATCH:
        lines = differences(saved.get(part, _MISSING), own[part], part)
        if not lines:
            continue
        kind = next((line for line in lines if line.startswith("optim.optimizer.kind ")), None)
        if kind is not None:
            there, here = saved[part]["optimizer"]["kind"], own[part]["optimizer"]["kind"]
            what = f"optimizer {there!r}, this run has {here!r}"
        else:
            more = f"; and {len(lines) - _SHOWN} more" if lines[_SHOWN:] else ""
            what = f"another {part!r} ({'; '.join(lines[:_SHOWN])}{more})"
        raise CheckpointError(f"{where} was trained with {what}; resume with the config of its run folder")
    if fault is not None:
        raise CheckpointError(f"{where} has a config that is not valid: {fault}; use an earlier checkpoint")


def differences(saved: Any, own: Any, path: str) -> list[str]:
    """Where two trees of settings differ: path, the saved value and this run's."""
    if isinstance(saved, Mapping) and isinstance(own, Mapping):
        keys = [*own, *(key for key in saved if key not in own)]
        pairs = [(saved.get(k, _MISSING), own.get(k, _MISSING), f"{path}.{k}") for k in keys]
        return [line for pair in pairs for line in differences(*pair)]
    if saved == own and isinstance(saved, bool) == isinstance(own, bool):
        return []
    return [f"{path} is {shorten(saved)} there and {shorten(own)} here"]
