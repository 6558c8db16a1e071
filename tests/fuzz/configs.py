"""Random configurations by every way in: read alike and written back, or refused with a path."""

from __future__ import annotations

import copy
import functools
import json
import random
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from hecate import MemoryConfig, memory_scan
from hecate.cms import CMS, CMSConfig
from hecate.errors import ConfigError, HecateError, StabilityWarning
from hecate.models import Hope, HopeConfig, LinearTransformer, LinearTransformerConfig
from hecate.train import ExperimentConfig, Trainer
from hecate.train.document import dump_yaml, parse_yaml
from hecate.variant import Config, Variant
from tests.fuzz.draw import DEEP, nodes, spoilt, value_of
from tests.fuzz.limits import within
from tests.registries import shipped_kinds

BUILT = 4
"""One in so many of the allowed configurations that nothing has spoilt takes a training step."""
ROOM = 1 << 30
"""Bytes for that step; what only reads and checks has far less."""
SMALL: dict[str, dict[str, Any]] = {
    "ExperimentConfig": {
        "model": {"d_model": 8, "heads": 2, "layers": 1},
        "budget": {"batch_size": 2, "seq_len": 8},
        "data": {"kind": "bundled", "max_bytes": 4096},
    },
    "LinearTransformerConfig": {"hidden_size": 8, "num_heads": 2, "num_layers": 1},
    "HopeConfig": {"vocab_size": 7, "d_model": 8, "heads": 2, "layers": 1},
}
"""Sizes where a draw leaves them to defaults, which take seconds to build."""


@functools.cache
def schema_of(root: type[Config]) -> dict[str, Any]:
    """Without the variants of other tests: a seed draws the same, whatever else has been imported."""
    schema = root.model_json_schema()
    for family in Variant.__subclasses__():
        if family._family in schema["$defs"]:
            kinds = list(shipped_kinds(family))
            members: list[dict[str, Any]] = [{"$ref": f"#/$defs/{family._family}.{kind}"} for kind in kinds]
            schema["$defs"][family._family]["oneOf"] = [*members, {"type": "string", "enum": kinds}]
    fields = schema.pop("anyOf", [{}])[0]  # of a memory, which a rule's name alone may be as well
    return {**schema, **fields}


def check(seed: int) -> str:
    """The outcome of one configuration: "allowed", "built" or what it was refused as.

    Two in three are spoilt. Raises where Python, JSON and YAML do not read one thing, where a
    refusal has no path, where a dump reads as something else, or where what was read does not run.
    """
    rng = random.Random(seed)
    root = rng.choice(list(BUILDS))
    value = value_of(schema_of(root), rng, rng.choice([0.05, 0.15, 0.3]))
    value = _with_defaults(value, SMALL.get(root.__name__, {}))
    drawn = rng.random() < 1 / 3
    if not drawn:
        value = spoilt(value, rng)
    with within():
        whole = not isinstance(value, dict) or "kind" in value  # then the fault may be the value's
        found = {name: outcome(read, whole) for name, read in ways(root, value).items()}
    first = found["python"]
    for name, other in found.items():
        same = other == first if isinstance(first, Config) else not isinstance(other, Config)
        assert same, f"{name} reads {other!r}, python {first!r}"
    if not isinstance(first, Config):
        return type(first).__name__
    with within():
        check_dumps(first)
    if not drawn or rng.randrange(BUILT):
        return "allowed"
    with within(allowed=ROOM):
        return build(first)


def ways(root: type[Config], value: Any) -> dict[str, Callable[[], Config]]:
    """The ways in that can say a value: YAML has no depth of thousands, nor texts that are none."""
    found: dict[str, Callable[[], Config]] = {"python": lambda: root.model_validate(value)}
    if isinstance(value, dict) and all(isinstance(key, str) and key.isidentifier() for key in value):
        found["fields"] = lambda: root(**value)
    if all(len(path) < DEEP for path, _ in nodes(value)):
        text = json.dumps(value)
        found["json"] = lambda: root.model_validate_json(text)
        if isinstance(value, dict):
            own = text.replace("NaN", ".nan").replace("Infinity", ".inf")
            found["yaml"] = lambda: root.model_validate(parse_yaml(own, "x.yaml").value)
    return found


def outcome(read: Callable[[], Config], spoilt_at_root: bool) -> Config | ConfigError:
    """The config, or a refusal that says where, in a readable length."""
    try:
        return read()
    except ConfigError as error:
        for problem in error.problems:
            no_text = "[x.yaml" in problem.message or problem.message.startswith("invalid JSON")
            assert problem.path or spoilt_at_root or no_text, f"no path: {error}"
            assert len(str(problem)) < 3000, f"a sentence of {len(str(problem))} characters"
        return error


def check_dumps(config: Config) -> None:
    root, plain = type(config), config.model_dump(mode="json")
    again = {
        "python": root.model_validate(config.model_dump()),
        "plain": root.model_validate(plain),
        "json": root.model_validate_json(config.model_dump_json()),
        "yaml": root.model_validate(parse_yaml(dump_yaml(plain), "dump").value),
        "copy": config.model_copy(),
    }
    for name, other in again.items():
        assert other == config, f"{name}: {other!r} is not {config!r}"
        assert hash(other) == hash(config), f"{name}: another hash"
        assert other.model_dump_json() == config.model_dump_json(), f"{name}: another dump"


def build(config: Config) -> str:
    """Builds what is configured and takes one step; a refusal has to be of the inputs' sizes."""
    torch.manual_seed(0)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", StabilityWarning)  # advice, which a layer builds with
            BUILDS[type(config)](config)
    except HecateError as error:
        return f"built: {type(error).__name__}"
    return "built"


def _experiment(config: Any) -> None:
    if config.budget.compile != type(config.budget)().compile:
        return  # takes longer to compile than a step may
    trainer = Trainer(config)
    trainer.train_step()


def _memory(config: Any) -> None:
    d, heads = 4, 2
    params = config.feature_map.init(d, heads=heads, generator=torch.Generator().manual_seed(0))
    width = config.feature_map.output_dim(d)
    q, k, v = (torch.randn(2, 5, heads, n, requires_grad=True) for n in (d, d, width))
    y, _ = memory_scan(config, q, k, v, phi_params=params)
    y.square().sum().backward()


def _layer(make: Callable[[Any], nn.Module], inputs: Callable[[Any], Tensor]) -> Any:
    def run(config: Any) -> None:
        y = make(config)(inputs(config))
        (y if isinstance(y, Tensor) else y[0]).square().sum().backward()

    return run


BUILDS: dict[Any, Callable[[Any], None]] = {
    ExperimentConfig: _experiment,
    MemoryConfig: _memory,
    CMSConfig: _layer(lambda config: CMS(8, 2, config), lambda _: torch.randn(2, 9, 8)),
    LinearTransformerConfig: _layer(LinearTransformer, lambda config: torch.randn(2, 5, config.embed_dim)),
    HopeConfig: _layer(Hope, lambda _: torch.tensor([[0, 1, 1, 0]])),
}


def _with_defaults(value: Any, defaults: dict[str, Any]) -> Any:
    """`value` with what it leaves out; a mapping's kind decides whether its fields can be meant."""
    value = dict(value)
    for name, default in defaults.items():
        if name not in value:
            value[name] = copy.deepcopy(default)
        elif isinstance(default, dict) and isinstance(value[name], dict) and "kind" not in default:
            value[name] = _with_defaults(value[name], default)
    return value
