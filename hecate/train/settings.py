"""Settings as people look them up: tables of fields, a page for one variant, a commented file to start from."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel

from hecate.engine import Engine
from hecate.errors import MESSAGE, ConfigError, not_known, printable
from hecate.rule import RULES
from hecate.train.catalogue import FAMILIES, VARIANTS
from hecate.train.compose import (
    dump_experiment,
    experiment_schema,
    load_experiment,
    preset_about,
    presets,
    raw_settings,
    shipped_presets,
)
from hecate.train.config import ExperimentConfig
from hecate.train.document import dump_yaml, flow, short
from hecate.train.report import Table

SECTIONS = ("model", "optim", "budget", "parallel", "sample")
HEADER = ["setting", "accepts", "default", "meaning"]
PATHS = {
    "phi": "feature_map",
    "optimizer": "optim.optimizer",
    "logger": "loggers",
    "activation": "structure.activation",
}
_PLACES = {
    "ExperimentConfig": "An experiment", "LanguageModelConfig": "model", "MemoryConfig": "model.memory",
    "LevelConfig": "model.levels, a list of these", "AttentionConfig": "model.attention",
    "SelfReferenceConfig": "model.self_reference", "FeatureMemoryConfig": "model.feature_memory",
    "OptimConfig": "optim", "BudgetConfig": "budget", "ParallelConfig": "parallel", "SampleConfig": "sample",
}  # fmt: skip


def field_rows(schema: Mapping[str, Any]) -> list[list[str]]:
    """Name, accepted values, default and meaning of every field of an object in the JSON schema."""
    about = str(schema.get("description", "")).split("\n\n")[0].split("\n")
    rows = []
    for name, own in schema.get("properties", {}).items():
        if name == "kind" or own.get("deprecated"):
            continue
        text = str(own.get("description", ""))
        meaning = "" if text.split() == " ".join(about).split() else text
        required = name in schema.get("required", ())
        rows.append([name, accepts(own), "required" if required else flow(own.get("default")), meaning])
    return rows


def accepts(schema: Mapping[str, Any]) -> str:
    """The values that a field takes, in words: its type, its range, its choices."""
    if "$ref" in schema:
        name = str(schema["$ref"]).rpartition("/")[2]
        return f"a {name} kind" if name[0].islower() else name
    if "anyOf" in schema or "oneOf" in schema:
        found = [accepts(own) for own in schema.get("anyOf") or schema["oneOf"]]
        return " or ".join(dict.fromkeys(found))
    if "enum" in schema:
        return ", ".join(flow(item) for item in schema["enum"])
    if "const" in schema:
        return flow(schema["const"])
    kind = str(schema.get("type", "any value"))
    if kind == "array":
        items = schema.get("prefixItems") or [schema.get("items") or {}]
        return "list of " + ", ".join(dict.fromkeys(accepts(item) for item in items))
    low = [f"{sign} {schema[key]:g}" for sign, key in ((">=", "minimum"), (">", "exclusiveMinimum")) if key in schema]
    high = [
        f"{sign} {schema[key]:g}"
        for sign, key in (("<=", "maximum"), ("<", "exclusiveMaximum"))
        if key in schema and schema[key] < 1 << 20
    ]
    named = {"object": "mapping", "string": "text", "boolean": "true or false"}.get(kind, kind)
    return " ".join([named, " and ".join(low + high)]).strip()


def tables() -> dict[str, Table]:
    """Every table of settings, by the place that they are written in: sections first, then each kind of each family
    that has settings."""
    schema = experiment_schema()
    found: dict[str, Table] = {_PLACES["ExperimentConfig"]: (HEADER, field_rows(schema))}
    objects = schema["$defs"]
    for name, place in _PLACES.items():
        if name in objects:
            found[place] = (HEADER, field_rows(objects[name]))
    for name, own in objects.items():
        if name not in _PLACES and (rows := field_rows(own)):
            found[name] = (HEADER, rows)
    return found


def variant_page(family: str, name: str) -> tuple[str, Table | None, str]:
    """All about one variant: its text, a table of its settings if it has some, and an example. [TRAIN-LIST-D2]"""
    if family not in FAMILIES:
        raise ConfigError(f"no family {family!r}{not_known(family, FAMILIES)}")
    if family == "presets":
        _known(family, name, presets())
        about = f"{preset_about(name)}\n\n" if name in shipped_presets() else ""
        return f"{name}: {about}{dump_experiment(load_experiment(name))}".rstrip(), None, f"hecate train {name}"
    if family == "rules":
        _known(family, name, RULES)
        config = dump_yaml({"memory": short(RULES[name].config)})
        text = textwrap.fill(f"{name}: {RULES[name].text}", 100)
        return f"{text}\n\n{RULES[name].equation}\n\n{config}".rstrip(), None, f"hecate train mqar-{name}"
    if family == "engines":
        _known(family, name, Engine.registry)
        return inspect.getdoc(type(Engine.registry[name])) or name, None, "hecate show quickstart --engine"
    own = VARIANTS[family].variants()
    _known(family, name, own)
    schema = own[name].model_json_schema()
    rows = field_rows(schema)
    path = PATHS.get(family, family)
    given = {"kind": name} | {row[0]: "..." for row in rows if row[2] == "required"}
    example = f"{path}: {flow(given) if len(given) > 1 else name}"
    text = inspect.getdoc(own[name]) or name
    return text, (HEADER, rows) if rows else None, example


def _known(family: str, name: str, names: Any) -> None:
    if name not in names:
        one = family.removesuffix("s") if family in ("rules", "presets", "engines") else family
        raise ConfigError(f"no {one} {name!r}{not_known(name, names)}")


def starter(source: str | Path = "quickstart", target: str = "my.yaml") -> str:
    """A commented YAML file with every setting: those of a preset or file as it writes them, the others behind a #,
    with the value that they have there. [TRAIN-START-D1]"""
    config, written = load_experiment(source), raw_settings(source)
    source, target = (printable(str(name), MESSAGE) for name in (source, target))  # on one line
    lines = [
        f"# An experiment, begun from {source}. A setting right behind a # has that value without it, too:",
        "# take the # away to change it. `hecate list FAMILY` names the kinds of each family,",
        f"# `hecate show {target}` prints the whole experiment, `hecate train {target}` trains it.",
    ]
    for name in type(config).model_fields:
        value, own = getattr(config, name), written.get(name)
        if name not in SECTIONS:
            lines += ["", *_entry(type(config), name, value, written, "")]
            continue
        lines += ["", f"{name}:" if own else f"#{name}:"]
        for field in type(value).model_fields:
            lines += _entry(type(value), field, getattr(value, field), own or {}, "  ", unset=not own)
    return "\n".join(lines) + "\n"


def _entry(
    owner: type[BaseModel], name: str, value: Any, written: Mapping[str, Any], pad: str, *, unset: bool = False
) -> list[str]:
    """A setting's lines: its meaning, and its value, behind a # where the source is silent."""
    about = textwrap.wrap(" ".join(str(_descriptions(owner).get(name, "")).split()), 110)
    lines = [f"{pad}# {line}" for line in about]
    if name not in written:
        mark = f"#{pad}" if unset else f"{pad}#"
        return [*lines, f"{mark}{name}: {flow(short(value))}"]
    own = written[name]
    if not own or not isinstance(own, (list, dict)):
        return [*lines, f"{pad}{name}: {flow(own)}"]
    text = yaml.safe_dump(own, default_flow_style=None, sort_keys=False, allow_unicode=True, width=100)
    flat = text.startswith(("{", "[")) and text.count("\n") == 1
    return [*lines, f"{pad}{name}: {text.rstrip()}"] if flat else [
        *lines, f"{pad}{name}:", *(f"{pad}  {line}" for line in text.splitlines()),
    ]  # fmt: skip


@cache
def _descriptions(owner: type[BaseModel]) -> dict[str, str]:
    schema = experiment_schema() if owner is ExperimentConfig else owner.model_json_schema()
    return {name: own.get("description", "") for name, own in schema["properties"].items()}
