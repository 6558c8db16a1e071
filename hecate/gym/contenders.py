"""Contenders: memories with a common signature, each with a small grid of settings; hecate's rules, and sums of
them."""

from __future__ import annotations

import hashlib
import importlib
import inspect
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial, reduce
from itertools import product
from operator import getitem
from pathlib import Path
from types import CodeType, FunctionType, MethodType
from typing import Any, Protocol

import numpy as np
import torch
from pydantic import BaseModel
from torch import Generator, Tensor, nn

from hecate.engine import memory_scan
from hecate.errors import ConfigError, not_known, retelling, shorten
from hecate.nn import Memory as Layer
from hecate.processes import import_modules
from hecate.rule import RULES, MemoryConfig
from hecate.train.document import parse_value, read_yaml

HEADS = 4
"""Number of heads of a layer in tasks that train."""
Setting = Mapping[str, Any]


class Memory(Protocol):
    """Signature of a memory: `(keys [B, T, D], values [B, T, V], state) -> (answers [B, T, V], state)`. [GYM-CALL-D1]

    Every key is answered from what was written before its token, then written with its value. With values None, keys
    are answered and nothing is written. `state` is None at the start, and must contain everything that is carried over.
    An optional method `write(keys, values, state) -> state` is called for tokens whose answers are not scored. A memory
    that diverges raises `NonFiniteError`.
    """

    def __call__(self, keys: Tensor, values: Tensor | None, state: Any, /) -> tuple[Tensor, Any]:
        """Answers, and the state after the last token."""
        ...


@dataclass(frozen=True)
class Contender:
    """A contender of the gym.

    Fields:
        name: its name in tables.
        build: function from a setting and a seed to a `Memory`, with random maps and starts drawn from the seed; None
            if it can only be trained.
        settings: settings to choose from, on another seed than those reported; the first is the default.
        facts: everything that determines its numbers, as JSON; stored results are reused if the facts are equal.
        longest: length of a row, in tokens, beyond which it is not run; None for no limit.
        layer: for tasks that train, function from a width and a generator for all draws to a causal module `(x [B, T,
            width], state) -> (y, state)`, with state None at the start; None if it cannot be trained.
        missing: reason why it cannot run here, with the remedy; empty if it can.
    """

    name: str
    build: Callable[[Setting, int], Memory] | None
    settings: Sequence[Setting] = ({},)
    facts: Mapping[str, Any] = field(default_factory=dict)
    longest: int | None = None
    missing: str = ""
    layer: Callable[[int, Generator], nn.Module] | None = None


class Rule:
    """hecate's memory of a config as a `Memory`: one head, read before the write, random draws from the seed. Values,
    which have a mean length of about 1, are multiplied by sqrt(V) if the rule's layer normalises values to a root mean
    square of 1, and answers divided by it.
    """

    def __init__(self, config: MemoryConfig, seed: int) -> None:
        self.config, self._seed = changed(config, {"read": "before"}), seed

    def __call__(self, keys: Tensor, values: Tensor | None, state: Any) -> tuple[Tensor, Any]:
        config, (width, memory) = self.config, state or ((keys if values is None else values).shape[-1], None)
        features, start, mask = config.feature_map.output_dim(keys.shape[-1]), None, None
        params = config.feature_map.init(keys.shape[-1], generator=torch.Generator().manual_seed(self._seed))
        if config.structure.drawn:
            start = config.structure.init(features, width, generator=torch.Generator().manual_seed(self._seed))
        if values is None:
            mask = torch.zeros(keys.shape[:2], dtype=torch.bool)
            values = keys.new_zeros(*mask.shape, width)
        k, scale = keys.unsqueeze(2), width**0.5 if config.layer_v_norm == "rms" else 1.0
        how: dict[str, Any] = {"phi_params": params, "initial": start, "write_mask": mask}
        answers, memory = memory_scan(config, k, k, scale * values.unsqueeze(2), state=memory, **how)
        return answers.squeeze(2) / scale, (width, memory)


class Together:
    """Several memories as one: levels, each written with the value minus the answers of those before it, with summed
    answers; or heads, each written with the value, with averaged answers."""

    def __init__(self, members: Sequence[Memory], levels: bool) -> None:
        self.members, self.levels = members, levels

    def __call__(self, keys: Tensor, values: Tensor | None, state: Any) -> tuple[Tensor, Any]:
        total, states = torch.zeros(()), []
        for member, part in zip(self.members, state or [None] * len(self.members), strict=True):
            residual = values - total if self.levels and values is not None else values
            answers, part = member(keys, residual, part)
            total = total + answers
            states.append(part)
        return total if self.levels else total / len(states), tuple(states)


def numbers(state: Any, rows: int) -> int:
    """Number of floating-point numbers per row in a tree of tensors; integers, which count tokens, are left out."""
    leaves = torch.utils._pytree.tree_leaves(state)
    return sum(leaf.numel() for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()) // rows


def changed(config: MemoryConfig, setting: Setting) -> MemoryConfig:
    """The config with fields set by their paths, such as `algorithm.lr`."""
    fields: Any = config.model_dump()
    for path, value in setting.items():
        *above, last = path.split(".")
        reduce(getitem, above, fields)[last] = value
    return MemoryConfig.model_validate(fields)


def grid(axes: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Every combination of the values of each path; the first has the first value of every path."""
    return [dict(zip(axes, values, strict=True)) for values in product(*axes.values())]


def of_rules(
    name: str, parts: Sequence[str], *, levels: bool = True, axes: Mapping[str, Sequence[Any]] | None = None
) -> Contender:
    """A contender of one rule, or of several as levels or heads, each given by name or YAML. `axes` is the grid of
    settings; with several rules its paths begin with the number of the rule. Settings that a config refuses are left
    out. A single rule also has a layer, without a convolution, so that its keys depend on one token only."""
    configs = [_config(part) for part in parts]
    alone, writes = len(configs) == 1, max(config.writes for config in configs)
    if writes > 1 and not alone:
        raise ConfigError(
            f"contender {shorten(name)} writes {writes} pairs a token, and a stream has one: set writes to 1"
        )

    def built(setting: Setting) -> list[MemoryConfig]:
        overrides: list[dict[str, Any]] = [{} for _ in configs]
        for path, value in setting.items():
            place, _, rest = ("0", "", path) if alone else path.partition(".")
            overrides[int(place)][rest] = value
        return [changed(config, fields) for config, fields in zip(configs, overrides, strict=True)]

    def build(setting: Setting, seed: int) -> Memory:
        members = [Rule(config, seed + place) for place, config in enumerate(built(setting))]
        return members[0] if alone else Together(members, levels)

    settings: list[Setting] = []
    for setting in grid(_axes(configs) if axes is None else axes):
        with suppress(ConfigError):
            built(setting)
            settings.append(setting)
    facts = {"rules": [config.model_dump(mode="json") for config in configs], "levels": levels}
    layer = partial(_layer, configs[0]) if alone else None
    return Contender(name, build if writes == 1 else None, settings or [{}], facts, layer=layer)


def _config(text: str) -> MemoryConfig:
    """The config for the name of a rule, YAML, or a YAML file."""
    with retelling(ConfigError, f"contender {shorten(text)}"):
        if text.endswith((".yaml", ".yml")):
            source: Any = read_yaml(Path(text)).value
        else:
            source = parse_value(text, "contender")[0] if text.startswith("{") else text
        return MemoryConfig.model_validate(source)


def _layer(config: MemoryConfig, width: int, generator: Generator) -> nn.Module:
    return Layer(width, HEADS, config, conv_kernel=0, generator=generator)


_SHARES = {1: (1, 0.7, 0.5, 0.3, 0.2, 0.1, 0.05, 0.02), 2: (1, 0.5, 0.2, 0.05), 3: (1, 0.2)}
"""Multiples of a rule's lr in its grid, by the number of axes of the grid."""


def _axes(configs: Sequence[MemoryConfig]) -> dict[str, list[Any]]:
    """The default grid of rules: lr, retain, and the bandwidth of a random feature map."""
    axes: dict[str, list[Any]] = {}
    for place, config in enumerate(configs):
        lead = f"{place}." if len(configs) > 1 else ""
        if hasattr(config.algorithm, "lr"):
            axes[f"{lead}algorithm.lr"] = [config.algorithm.lr]
        retain = getattr(config.retention, "retain", None)
        if isinstance(retain, float) and (place + 1 == len(configs)):
            axes[f"{lead}retention.retain"] = [retain, 0.98 if retain == 1 else 1.0]
        if hasattr(config.feature_map, "sigma") and len(configs) == 1:
            axes["feature_map.sigma"] = [config.feature_map.sigma, config.feature_map.sigma / 2]
    shares = _SHARES[min(len(axes), 3)] if axes else ()
    for path, values in axes.items():
        if path.endswith("algorithm.lr"):
            axes[path] = [values[0] * share for share in shares]
    return axes


def _function(text: str) -> Contender:
    """The contender for a user's `module:name`, which is a `Contender` or a memory."""
    module, _, name = text.partition(":")
    import_modules([module])
    target: Any = importlib.import_module(module)
    for part in name.split("."):
        target = getattr(target, part, None)
    if isinstance(target, Contender):
        return target
    if not callable(target):
        raise ConfigError(f"contender {shorten(text)}: {module} has no memory called {name!r}; name a function of it")
    return of_callable(text, target)


def of_callable(name: str, memory: Memory) -> Contender:
    """A contender for a memory without settings, or for a module class, which is a layer to train; stored results are
    reused if the source code is the same."""
    called: Any = memory
    layer = inspect.isclass(called)
    takes = "width, generator" if layer else "keys, values, state"
    if layer and not issubclass(called, nn.Module):
        hint = "of classes only a torch.nn.Module is one, a layer to train; name a function, or an object of the class"
        raise ConfigError(f"contender {shorten(name)} is a class, and {hint}")
    try:
        inspect.signature(called.forward if isinstance(called, nn.Module) else called).bind(*takes.split(", "))
    except (TypeError, ValueError) as error:
        what = "a layer is made of" if layer else "a memory is called with"
        raise ConfigError(f"contender {shorten(name)}: {what} ({takes}), which fails here: {error}") from None
    digest = hashlib.sha256(json.dumps(held_by(memory)).encode()).hexdigest()
    facts = {"source": source_of(memory), "held": digest}
    if layer:
        return Contender(name, None, facts=facts, layer=called)
    return Contender(name, lambda setting, seed: memory, facts=facts)


def held_by(node: Any, above: tuple[int, ...] = ()) -> Any:
    """The content of an object other than its source file, as JSON: attributes, arguments of a partial, closures, and
    bytecode, since code in a notebook has no file. Anything else is left out."""
    if node is None or isinstance(node, str | bytes | int | float | complex):
        return repr(node)
    if id(node) in above or inspect.ismodule(node):
        return type(node).__qualname__
    inner = partial(held_by, above=(*above, id(node)))
    if isinstance(node, Tensor | np.ndarray):
        numbers = torch.as_tensor(node).detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        return [str(node.dtype), list(node.shape), hashlib.sha256(numbers.numpy().tobytes()).hexdigest()]
    if isinstance(node, BaseModel):
        return node.model_dump_json()
    if isinstance(node, Mapping):
        return [[inner(name), inner(value)] for name, value in node.items()]
    if isinstance(node, list | tuple):
        return [inner(item) for item in node]
    if isinstance(node, partial):
        return [inner(part) for part in (node.func, node.args, node.keywords)]
    if isinstance(node, CodeType):
        return [node.co_code.hex(), node.co_names, inner(node.co_consts)]
    if isinstance(node, MethodType):
        return [inner(node.__func__), inner(node.__self__)]
    if isinstance(node, FunctionType):
        cells = [cell.cell_contents for cell in node.__closure__ or ()]
        return [node.__qualname__, *map(inner, (node.__code__, node.__defaults__, node.__kwdefaults__, cells))]
    if inspect.isclass(node):
        return [node.__qualname__, inner([part for part in vars(node).values() if isinstance(part, FunctionType)])]
    return [inner(type(node)), inner(getattr(node, "__dict__", None))]


def source_of(target: Any) -> str:
    """SHA-256 of the source file of a function, or of an object's class; of its name if there is no file."""
    inner = getattr(target, "func", target)  # the function of a partial
    code = inner if inspect.isroutine(inner) or inspect.isclass(inner) else type(inner)
    try:
        text = Path(inspect.getsourcefile(code) or "").read_text(encoding="utf-8")
    except (OSError, TypeError):
        text = repr(code.__qualname__)
    return hashlib.sha256(text.encode()).hexdigest()


def contender_of(given: str | Contender | Memory, known: Mapping[str, Callable[[], Contender]]) -> Contender:
    """The contender for a name; for the name of a rule, YAML of a config or a YAML file, or several of these joined by
    + (levels) or | (heads); for a user's `module:name`; or for an object. [GYM-NAME-D1]"""
    if isinstance(given, Contender):
        return given
    if not isinstance(given, str):
        if not callable(given):
            raise ConfigError(f"a contender must be a name, a Contender or a function, got {shorten(given)}")
        return of_callable(getattr(given, "__name__", type(given).__name__), given)
    if given in known:
        return known[given]()
    sign = "|" if "|" in given else "+"
    a_file = given.endswith((".yaml", ".yml")) and Path(given).is_file()  # its name may contain + or |
    parts = [given] if a_file else [part.strip() for part in re.split(rf"[{sign}](?![^{{]*\}})", given)]
    if len(parts) == 1 and not given.startswith("{") and not given.endswith((".yaml", ".yml")):
        if ":" in given:
            return _function(given)
        if given not in RULES:
            raise ConfigError(f"no contender {shorten(given)}{not_known(given, [*known, *RULES])}")
    return of_rules(given, parts, levels=sign == "+")


def _titans(**fields: str) -> str:
    return "{kind: titans, " + ", ".join(f"{name}: {value}" for name, value in fields.items()) + "}"


_RFF = "{feature_map: {kind: random_fourier, d_phi: 128, sigma: 0.4}}"
_GELU = "{kind: mlp, layers: 2, expansion: 2, activation: gelu, bias: true, last: 0.1}"
_PRINTED = _titans(
    retention="{kind: decay, retain: 0.99, towards: zero}", step="raw", algorithm="{kind: momentum, lr: 0.01}"
)


def ours() -> Iterator[tuple[str, Callable[[], Contender]]]:
    """hecate's own contenders, which run by default."""

    def rules(name: str, *parts: str, **how: Any) -> tuple[str, Callable[[], Contender]]:
        return name, partial(of_rules, name, parts or (name,), **how)

    def both(*rates: float) -> dict[str, Any]:
        return {"0.algorithm.lr": rates, "1.algorithm.lr": (0.4, 0.7), "1.retention.retain": (0.98, 0.995)}

    deep = {"algorithm.lr": (2.0, 1.0, 0.5, 0.1), "retention.retain": (0.9999, 1.0)}
    yield rules("linear_attention")
    yield rules("delta")
    yield rules("gated_delta", axes={"algorithm.lr": (1.0, 0.4, 0.1, 0.03), "retention.retain": (0.99, 1.0)})
    yield rules("delta, rff", _RFF, axes={"algorithm.lr": (1.0, 0.1), "feature_map.sigma": (0.4, 0.2, 0.8, 1.6)})
    yield rules("delta, dpfp", "{key_norm: l2, feature_map: {kind: dpfp, nu: 4}}")
    bounded = {"algorithm.lr": (1.0, 0.4, 0.2, 0.1), "bias.delta": (0.3, 1.0)}
    yield rules("delta, huber", "{key_norm: l2, bias: {kind: huber, norm: true}}", axes=bounded)
    yield rules("titans", axes=deep)
    yield rules("titans, gelu", _titans(structure=_GELU), axes=deep)
    yield rules("titans, chunk 16", _titans(chunk="16"), axes=deep)
    yield rules("titans, chunk 64", _titans(chunk="64"), axes=deep)
    yield rules("delta_product, 4 writes", "{kind: delta_product, writes: 4}")
    printed = {"algorithm.lr": (0.01, 0.003, 0.03, 0.05), "retention.retain": (0.99, 1.0)}
    yield rules("titans, as printed", _PRINTED, axes=printed)
    yield rules("ttt_mlp", axes={"algorithm.lr": (0.1, 1.0, 0.5, 0.2, 0.05, 0.02, 0.01, 0.005)})
    yield rules("titans + gated_delta", "titans", "gated_delta", axes=both(2.0, 0.5))
    yield rules("delta + gated_delta", "delta", "gated_delta", axes=both(0.03, 0.01))
    yield rules("delta | gated_delta", "delta", "gated_delta", levels=False, axes=both(0.1, 0.4))
