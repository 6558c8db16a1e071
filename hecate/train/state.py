"""Conversion of a training run to named tensors and plain facts, and back, including the states that rows carry from
batch to batch; and checks that a checkpoint fits a run, except in settings that are allowed to differ by name."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import reduce
from itertools import chain, islice
from operator import getitem
from typing import Any, NamedTuple, Protocol

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from hecate.data import Loader, Source
from hecate.distributed import World, is_sharded
from hecate.errors import CheckpointError, ConfigError, did_you_mean, format_path, retelling, shorten
from hecate.optim import Leveled
from hecate.optim.base import MatrixOptimizer
from hecate.states import clone, detach, leaves, stack, with_tensors
from hecate.states import rows as rows_of
from hecate.train.checkpoint import Checkpoint
from hecate.train.compose import parse_path, settings
from hecate.train.config import ExperimentConfig
from hecate.variant import Config

PREFIX = "carried/"
MOVING = ("params", "param_names", "lr", "elapsed", "commits")
WAYS = ("fused", "foreach")  # implementations of a step, which may change when a run is resumed
_MUST_MATCH = ("optim", "seed", "model", "data", "init_from")
_SHOWN = 8
_ALONE = World.alone()


class Carried:
    """States that the rows of this process carry from batch to batch and through checkpoints, detached from the graph;
    empty before the first batch. [TRAIN-CARRY-D1]

    A step in several micro-batches, which are consecutive rows in order, has a state for each. A checkpoint has them
    concatenated along the rows, so that they can be split for another number of micro-batches or processes.
    """

    def __init__(self) -> None:
        self._states: list[Any] = []

    def arguments(self, micro: int = 0) -> Sequence[Any]:
        """The state before a micro-batch, as the model's second argument; empty if there is none yet."""
        return self._states[micro : micro + 1]

    def take(self, *states: Any) -> None:
        """Stores the states after a step, one for each micro-batch."""
        if not self._states:
            for state in states:
                _check_rows(state)
        self._states = [detach(state) for state in states]

    def tensors(self, world: World = _ALONE) -> dict[str, Tensor]:
        """The states as tensors `carried/PATH`, with the rows of all micro-batches and processes along the first axis:
        equal on every process of a world, which call it together."""
        whole = leaves(stack(self._states)) if self._states else {}
        return {PREFIX + path: world.rows_of_all(leaf) for path, leaf in whole.items()}

    def load(
        self,
        tensors: Mapping[str, Tensor],
        model: nn.Module,
        rows: range,
        device: torch.device,
        where: str,
        micros: int = 1,
    ) -> None:
        """Loads the states of some rows from the tensors of a checkpoint; `CheckpointError` if they are of another
        model."""
        model.eval()
        with torch.no_grad():
            probe = torch.zeros(1, 1, dtype=torch.int64, device=device)
            _, shape = model(probe, reset_mask=torch.ones_like(probe, dtype=torch.bool))
        wanted = leaves(shape)
        saved = {name.removeprefix(PREFIX): x for name, x in tensors.items() if name.startswith(PREFIX)}
        _check_names(where, "carried state", wanted, saved, "it is of another model, or of data.state=fresh")
        for path, leaf in wanted.items():
            tensor = saved[path]
            if tensor.dtype != leaf.dtype or tensor.dim() != leaf.dim() or tensor.shape[0] < rows.stop:
                raise CheckpointError(
                    f"{where}: carried state {path!r} is {list(tensor.shape)} {tensor.dtype}, which is not of "
                    f"{rows.stop} rows of this model"
                )
        ours = (saved[path][rows.start : rows.stop].to(device) for path in wanted)
        whole, count = with_tensors(*pytree.tree_flatten(shape), ours), len(rows) // micros
        # copies: a model that changes its state must change neither the checkpoint nor the state of other rows
        self._states = [clone(rows_of(whole, slice(first, first + count))) for first in range(0, len(rows), count)]


def _check_names(where: str, what: str, here: Mapping[str, Any], there: Mapping[str, Any], why: str) -> None:
    """Refuses names that this run or the checkpoint has alone, of what they are the names; `why` is the reason."""
    for name in sorted(here.keys() ^ there.keys()):
        raise CheckpointError(f"{where} {'lacks' if name in here else 'has an unknown'} {what} {name!r}: {why}")


def _check_rows(state: Any) -> None:
    """Refuses a state whose tensors do not have the batch as their first axis: it could not be split by rows."""
    if not (named := leaves(state)):
        raise ConfigError("is 'carry', but the model returns no state; write data.state=fresh", ("data", "state"))
    count = next(iter(named.values())).shape[:1]
    for path, leaf in named.items():
        if not leaf.dim() or leaf.shape[:1] != count:
            odd = f"{path!r} of shape {list(leaf.shape)}, which is not by rows of the batch"
            raise ConfigError(f"is 'carry', but the model's state has {odd}; write data.state=fresh", ("data", "state"))


class OptimizerFacts(Config):
    """Facts of the optimisers other than tensors: their names, groups, and plain state by parameter."""

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


_MISSING = type("Missing", (), {"__repr__": lambda _: "missing"})()


def run_facts(facts: Mapping[str, Any], where: str) -> RunFacts:
    """The facts of a checkpoint, validated; `CheckpointError` names all that are not valid."""
    with retelling(CheckpointError, f"{where} is not valid", "use an earlier checkpoint"):
        return RunFacts.model_validate(dict(facts))


def refuse_other_config(checkpoint: Checkpoint, trainer: Restorable, where: str) -> None:
    """Refuses a checkpoint whose settings differ from the run's, naming them with both values, and what can be done."""
    saved, fault = checkpoint.facts["config"], None
    expected = trainer.config.model_dump(mode="json")
    try:
        saved = ExperimentConfig.model_validate(saved).model_dump(mode="json")
    except ConfigError as error:  # a kind that is not registered here, or not a config
        fault = error
    found = {part: differences(saved.get(part, _MISSING), expected[part], part) for part in _MUST_MATCH}
    if every := list(chain(*found.values())):
        lines = list(map(str, every))
        if kinds := [item for item in every if item.path == "optim.optimizer.kind"]:
            what = f"optimizer {kinds[0].there!r}, this run has {kinds[0].here!r}"
        else:
            more = f"; and {len(lines) - _SHOWN} more" if lines[_SHOWN:] else ""
            parts = " and ".join(repr(part) for part in _MUST_MATCH if found[part])
            what = f"another {parts} ({'; '.join(lines[:_SHOWN])}{more})"
        cure = _cure(checkpoint, trainer, [] if fault else _names_of(every), where)
        raise CheckpointError(f"{where} was trained with {what}; resume with the config of its run folder, or {cure}")
    if fault is not None:
        raise CheckpointError(f"{where} has a config that is not valid: {fault}; use an earlier checkpoint")


def _names_of(found: Sequence[Difference]) -> list[str]:
    """The names to `--allow` for all that differs: of what holds a setting if one side lacks it, of all periods if one
    differs, as the names of parameters have dots, and of whole parts if there are many."""
    names = dict.fromkeys(
        "optim.periods" if _within("optim.periods", path) else path.rpartition(".")[0] if _MISSING in values else path
        for path, *values in found
    )
    if len(names) > _SHOWN:
        names = dict.fromkeys(name.partition(".")[0] for name in names)
    return [name for name in names if not any(other != name and _within(other, name) for other in names)]


def _cure(checkpoint: Checkpoint, trainer: Restorable, names: Sequence[str], where: str) -> str:
    """A remedy for settings that differ: `--allow` with these names if the checkpoint then fits the run."""
    model, stored = trainer.model, checkpoint.tensors
    try:
        facts = run_facts(allowing(checkpoint, trainer, names)[0].facts, where)
        _fitting(model, list(trainer.optimizers.values()), stored, facts.optimizer, where)
        fits = bool(names)
    except CheckpointError:
        fits = False
    if fits:
        return f"let settings differ by name: --allow {','.join(names)}"
    common = [stored[f"model/{n}"].shape == x.shape for n, x in model.state_dict().items() if f"model/{n}" in stored]
    return "start another run" + (" with its parameters, by init_from" if common and all(common) else "")


class Difference(NamedTuple):
    """A setting with its saved value and this run's, `_MISSING` where there is none; as text, a sentence."""

    path: str
    there: Any
    here: Any

    def __str__(self) -> str:
        return f"{self.path} is {shorten(self.there)} there and {shorten(self.here)} here"


def differences(saved: Any, expected: Any, path: str) -> list[Difference]:
    """Differences between two trees of settings."""
    if isinstance(saved, Mapping) and isinstance(expected, Mapping):
        keys = [*expected, *(key for key in saved if key not in expected)]
        pairs = [(saved.get(k, _MISSING), expected.get(k, _MISSING), f"{path}.{k}") for k in keys]
        return [item for pair in pairs for item in differences(*pair)]
    if saved == expected and isinstance(saved, bool) == isinstance(expected, bool):
        return []
    return [Difference(path, saved, expected)]


def pack(model: nn.Module, optimizers: Iterable[Optimizer]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """A model and its optimisers as tensors by name (`model/...`, `optimizer/<parameter>/...`) and plain values."""
    tensors = {f"model/{name}": value for name, value in model.state_dict().items()}
    values: dict[str, dict[str, Any]] = {}
    groups: list[dict[str, Any]] = []
    optimizers = list(optimizers)
    for optimizer in optimizers:
        named, state = _parameter_names(model, optimizer), optimizer.state_dict()
        names = list(chain(*named))
        for index, entries in state["state"].items():
            for key, value in entries.items():
                if isinstance(value, Tensor):
                    tensors[f"optimizer/{names[index]}/{key}"] = value
                else:
                    values.setdefault(names[index], {})[key] = value
        for group, params in zip(state["param_groups"], named, strict=True):
            groups.append({**{k: v for k, v in group.items() if k != "param_names"}, "params": params})
    return tensors, {"optimizer": _class_names(optimizers), "groups": groups, "values": values}


def unpack(
    model: nn.Module, optimizers: Iterable[Optimizer], tensors: Mapping[str, Tensor], facts: OptimizerFacts, where: str
) -> None:
    """Loads the result of `pack` into a model and its optimisers; `CheckpointError` names the first part that does not
    fit."""
    optimizers = list(optimizers)
    saved, states = _fitting(model, optimizers, tensors, facts, where)
    with retelling(CheckpointError, f"{where} does not fit this run's optimiser"):
        for optimizer, state in zip(optimizers, states, strict=True):
            optimizer.load_state_dict(state)
    model.load_state_dict(saved)


def _fitting(
    model: nn.Module, optimizers: Sequence[Optimizer], tensors: Mapping[str, Tensor], facts: OptimizerFacts, where: str
) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
    """The state dicts of a model and its optimisers, checked and not loaded yet."""
    if facts.optimizer != _class_names(optimizers):
        raise CheckpointError(f"{where} was trained with {facts.optimizer}, this run uses {_class_names(optimizers)}")
    group_names = [names for optimizer in optimizers for names in _parameter_names(model, optimizer)]
    saved_names = [group.get("params") for group in facts.groups]
    if [isinstance(n, list) and sorted(map(str, n)) for n in saved_names] != [sorted(names) for names in group_names]:
        raise CheckpointError(
            f"{where} optimises other parameters than this model, or in other groups; use its own config"
        )
    entries = _entries(chain(*group_names), tensors, facts.values, where)
    # By name: another version may have registered the same parameters in another order.
    groups = iter([{**group, "params": names} for group, names in zip(facts.groups, group_names, strict=True)])
    saved = model_state(model, tensors, where)
    with retelling(CheckpointError, f"{where} does not fit this run's optimiser"):
        return saved, [_state(o, list(islice(groups, len(o.param_groups))), entries) for o in optimizers]


def sharded_like(run: Restorable, shapes: Mapping[str, Sequence[int]]) -> dict[str, Any]:
    """For each tensor of a checkpoint that is sharded in this run, by name, one with the placement to use: for
    optimiser state that does not exist yet the parameter. Tensors of another shape than the run's are left out:
    `restore` reports the differences."""
    tensors, _ = pack(run.model, run.optimizers.values())
    params = {f"optimizer/{name}": value for name, value in run.model.named_parameters()}
    like: dict[str, Any] = {name: tensors.get(name, params.get(name.rpartition("/")[0])) for name in shapes}
    return {name: x for name, x in like.items() if is_sharded(x) and tuple(x.shape) == tuple(shapes[name])}


def _entries(
    names: Iterable[str], tensors: Mapping[str, Tensor], values: Mapping[str, dict[str, Any]], where: str
) -> dict[str, dict[str, Any]]:
    """The optimiser state of each parameter, by name; refuses state of unknown parameters."""
    entries: dict[str, dict[str, Any]] = {name: {} for name in names}
    for key in [*tensors, *(f"optimizer/{name}/" for name in values)]:
        name, _, entry = key.removeprefix("optimizer/").rpartition("/")
        if not key.startswith(("model/", "optimizer/", "rng/", "carried/")):
            raise CheckpointError(f"{where} has an unknown tensor {key!r}")
        if key.startswith("optimizer/"):
            if name not in entries:
                raise CheckpointError(f"{where} has state {key!r} of a parameter that is not trained")
            # clone: optimisers change their state in place, and the caller's checkpoint must not change
            entries[name] |= {entry: tensors[key].clone()} if key in tensors else values[name]
    return entries


def _state(optimizer: Optimizer, saved: list[dict[str, Any]], entries: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """The state dict of one optimiser, from groups and entries, after checking that they fit it."""
    groups, names = [], list(chain(*(group["params"] for group in saved)))
    order = {name: index for index, name in enumerate(names)}
    for number, (group, options) in enumerate(zip(saved, optimizer.param_groups, strict=True)):
        _check_options(f"groups.{number}", group, options)
        # Values that change while training, such as the learning rate, are the checkpoint's.
        moved = {key: group[key] for key in MOVING if key in group}  # all other options are those of the config
        named = group["params"]
        merged = {**options, **moved, "params": [order[name] for name in named], "param_names": named}
        if "commits" not in group:
            merged.pop("commits", None)  # an older version did not count: 0 would drop the state as unused
        groups.append(merged)
    params = chain(*(group["params"] for group in optimizer.param_groups))
    for name, p, known in zip(names, params, _probe_states(optimizer), strict=True):
        _check_entries(name, entries[name], known, p if isinstance(optimizer, Leveled) else None)
    return {"state": {order[name]: entries[name] for name in names if entries[name]}, "param_groups": groups}


def _check_options(path: str, saved: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Refuses saved options that differ from the config's, and an invalid learning rate or position in a period."""
    # Both through JSON, in which tuples are lists.
    bound = ({k: v for k, v in options.items() if k not in (*MOVING, *WAYS)} for options in (expected, saved))
    here, there = (json.loads(json.dumps(options)) for options in bound)
    lines = list(map(str, differences({**here, **there}, here, path)))  # older versions had fewer options
    lr, elapsed = saved.get("lr"), saved.get("elapsed", 0)
    if isinstance(lr, bool) or not isinstance(lr, int | float) or not 0 <= lr < math.inf:
        lines.append(f"{path}.lr must be a finite number >= 0, got {shorten(lr)}")
    # A window may be longer than the period: it began under a longer one, and the next step commits it.
    if type(elapsed) is not int or elapsed < 0 or (elapsed and "period" not in expected):
        lines.append(f"{path}.elapsed must be within a period, got {elapsed!r}")
    if lines:
        raise ConfigError("; ".join(lines))


def _check_entries(name: str, saved: Mapping[str, Any], spec: Mapping[str, Any] | None, leveled: Tensor | None) -> None:
    """Refuses the state of a parameter unless it is empty, or as after a step (`spec`); with `leveled`, the parameter
    of a `Leveled` optimiser, it may also have a window."""
    entries = dict(saved)
    if leveled is not None:
        entries.pop("has_window", None)
        window = entries.pop("window", None)
        if window is not None and (not isinstance(window, Tensor) or window.shape != leveled.shape):
            raise ConfigError(f"the window of {name} has not its shape {list(leveled.shape)}")
    if entries and spec is not None:
        kinds, expected = ({k: _kind(v) for k, v in item.items()} for item in (entries, spec))
        if found := differences(kinds, expected, f"the state of {name}"):
            raise ConfigError("; ".join(map(str, found)))


def _probe_states(optimizer: Optimizer) -> list[Any]:
    """State of each parameter after a first step, on the meta device; None for each if the step cannot run there."""
    inner = optimizer.inner if isinstance(optimizer, Leveled) else optimizer
    if isinstance(inner, MatrixOptimizer):
        return [inner.state[p] for group in inner.param_groups for p in group["params"]]
    # A step of the same optimiser on the meta device shows which state it keeps, and its shapes.
    groups = [dict(group) for group in inner.param_groups]
    for group in groups:
        group |= dict.fromkeys([way for way in WAYS if way in group])  # fused steps do not run on meta
        group["params"] = [nn.Parameter(torch.empty_like(p, device="meta")) for p in group["params"]]
    parameters = [p for group in groups for p in group["params"]]
    try:
        kind: Callable[..., Optimizer] = type(inner)
        probe = kind(groups)
        for p in parameters:
            p.grad = torch.zeros_like(p)
        probe.step()
    except (TypeError, ValueError, RuntimeError, NotImplementedError):
        return [None] * len(parameters)
    return [probe.state[p] for p in parameters]


def _kind(value: Any) -> str:
    """Type, or shape and dtype, of an entry, for comparison. Scalars are only told apart as float or integer, because
    step counts have torch's default dtype."""
    if not isinstance(value, Tensor):
        return type(value).__name__
    if not value.dim():
        return "a float" if value.is_floating_point() else "an integer"
    return f"{list(value.shape)} {value.dtype}"


def model_state(model: nn.Module, tensors: Mapping[str, Tensor], where: str) -> dict[str, Tensor]:
    """Parameters and buffers among saved tensors; refuses names, shapes or dtypes other than the model's."""
    saved = {k.removeprefix("model/"): v for k, v in tensors.items() if k.startswith("model/")}
    state = model.state_dict()
    _check_names(where, "tensor", state, saved, "it belongs to another model config")
    for name, value in state.items():
        there, here = (f"{list(x.shape)} {x.dtype}" for x in (saved[name], value))
        if there != here:
            raise CheckpointError(
                f"{where}: tensor {name!r} is {there}, the model has {here}: it belongs to another model config"
            )
    return saved


def _parameter_names(model: nn.Module, optimizer: Optimizer) -> list[list[str]]:
    # Optimisers hold tensors; checkpoints need names.
    by_id = {id(parameter): name for name, parameter in model.named_parameters()}
    return [[by_id[id(p)] for p in group["params"]] for group in optimizer.param_groups]


def _class_names(optimizers: Iterable[Optimizer]) -> str:
    """Names of the classes: `Muon + AdamW`, `Leveled(AdamW)`."""
    return " + ".join(
        f"Leveled({type(o.inner).__name__})" if isinstance(o, Leveled) else type(o).__name__ for o in optimizers
    )


class Restorable(Protocol):
    """Interface of the `Trainer` that a checkpoint is loaded into."""

    config: ExperimentConfig
    model: nn.Module
    optimizers: dict[str, Optimizer]
    source: Source
    loader: Loader


CURSOR = {"seed": "seed", "batch_size": "budget.batch_size", "seq_len": "budget.seq_len", "fingerprint": "data"}
"""The setting that determines each entry of a data cursor, with all settings below it."""
Changes = dict[str, tuple[Any, Any]]


def check_allowed(names: Sequence[str], config: ExperimentConfig, resume: bool) -> None:
    """Refuses names of `--allow` that are not settings, and any of them without `--resume`."""
    if names and not resume:
        raise ConfigError(f"--allow {names[0]} is for a run that is resumed; give --resume as well, or leave it out")
    known = settings(config.model_dump(mode="json"))
    for name in names:
        if parse_path(name) not in known:
            hint = did_you_mean(name, map(format_path, known))
            raise ConfigError(
                f"--allow {shorten(name)}: an experiment has no such setting.{hint} "
                "Write its whole path, such as optim.lr"
            )


def allowing(checkpoint: Checkpoint, trainer: Restorable, names: Sequence[str]) -> tuple[Checkpoint, Changes]:
    """The checkpoint with the run's values for the named settings and all below them; and for each that differed, both
    values. [CKPT-ALLOW-D1]

    Whatever depends on them changes with them: the options of the optimiser, and the data cursor, which moves to the
    first batch of the new size that has no token read before. Other settings stay, for `Trainer.restore` to compare.
    Batches of another size are refused if rows carry their states from batch to batch.
    """
    facts, changed = dict(checkpoint.facts), Changes()
    saved, ours = facts.get("config"), settings(trainer.config.model_dump(mode="json"))
    if not names or not isinstance(saved, Mapping):
        return checkpoint, changed
    # A copy: the caller's checkpoint must not change.
    tree: Any = copy.deepcopy(saved)
    with suppress(ConfigError):  # adds fields that older versions lacked; `Trainer.restore` reports an invalid config
        tree = ExperimentConfig.model_validate(saved).model_dump(mode="json")
    for name in names:
        path = parse_path(name) or ()
        here, there = ours.get(path, _MISSING), settings(tree).get(path, _MISSING)
        if _MISSING not in (here, there) and here != there:
            changed[name] = (there, here)
            reduce(getitem, path[:-1], tree)[path[-1]] = here
    groups = [group for optimizer in trainer.optimizers.values() for group in optimizer.param_groups]
    facts |= {
        "config": tree,
        "cursor": _cursor(facts.get("cursor"), trainer, names, changed),
        "optimizer": _options(facts.get("optimizer"), groups, [name for name in changed if _within("optim", name)]),
    }
    return Checkpoint(checkpoint.tensors, facts), changed


def _cursor(saved: Any, trainer: Restorable, names: Sequence[str], changed: Changes) -> Any:
    if not isinstance(saved, Mapping):
        return saved
    position, cursor = trainer.loader.state_dict(), dict(saved)
    free = [entry for entry, place in CURSOR.items() if any(_within(n, place) or _within(place, n) for n in names)]
    free += ["seq_len"] if "data" in names else []
    if trainer.source.carries and any(cursor.get(entry) != position[entry] for entry in free):
        raise CheckpointError(
            "--allow: rows go on from batch to batch with their states (data.state=carry), and only those of the same "
            "data, seed and batch; start another run, with init_from"
        )
    step, before, now = cursor.get("step"), _tokens(cursor), _tokens(position)
    if trainer.source.ordered and {"batch_size", "seq_len"} & set(free) and isinstance(step, int) and before and now:
        # In tokens, rounded up: no token is read twice if the batch size changes.
        cursor["step"] = -(-step * before // now)
    if "fingerprint" in free and cursor.get("fingerprint") != position["fingerprint"]:
        changed.setdefault("data", (cursor.get("fingerprint"), position["fingerprint"]))
    return cursor | {entry: position[entry] for entry in free}


def _tokens(cursor: Mapping[str, Any]) -> int:
    """Tokens per batch of a cursor; 0 if it is invalid."""
    rows, length = cursor.get("batch_size"), cursor.get("seq_len")
    return max(rows, 0) * max(length, 0) if isinstance(rows, int) and isinstance(length, int) else 0


def _options(saved: Any, groups: Sequence[Mapping[str, Any]], names: Sequence[str]) -> Any:
    """The saved optimiser facts, with the run's own options where they are allowed to differ."""
    if not names or not isinstance(saved, Mapping) or len(saved.get("groups", ())) != len(groups):
        return saved
    whole = {"optim", "optim.optimizer"} & set(names)
    wanted = None if whole else {
        "period" if _within("optim.periods", name) else name.rpartition(".")[2] for name in names
    }  # fmt: skip
    merged = [
        there | {k: v for k, v in options.items() if k in there and k not in MOVING and (wanted is None or k in wanted)}
        for there, options in zip(saved["groups"], groups, strict=True)
    ]
    return {**saved, "groups": merged}


def _within(outer: str, inner: str) -> bool:
    """True if the setting `inner` is `outer` or below it."""
    return inner == outer or inner.startswith((f"{outer}.", f"{outer}["))
