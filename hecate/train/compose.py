"""Composition of an `ExperimentConfig` from a file or preset, the files that it extends, and `--set` overrides."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

from hecate.errors import ConfigError, Problem, did_you_mean, format_path, not_known, shorten
from hecate.models import LanguageModelConfig
from hecate.rule import RULES
from hecate.train.config import OF_ADAMW, ExperimentConfig
from hecate.train.document import MAX_DEPTH, Document, Location, dump_yaml, parse_value, read_yaml
from hecate.variant import Config

MAX_EXTENDS = 8
BY_RULE = ("mqar", "quickstart")
RECALL_CHUNK = 8
"""Longest chunk of `mqar-RULE`: what is committed per chunk can only be recalled in later chunks."""
_FOLDER = Path(__file__).resolve().parent.parent / "presets"
FILES = {path.stem: path for path in sorted(_FOLDER.glob("*.yaml"))}
"""Presets that have a file of their own."""
BACKBONES = {path.stem: path for path in sorted((_FOLDER / "backbones").glob("*.yaml"))}
BY_BACKBONE = tuple(name for name in FILES if name.startswith("lm-"))
_STEP = re.compile(r"([^.\[\]]+)|\[(\d{1,9})\]")
_PATH = re.compile(r"[^.\[\]]+(?:\.[^.\[\]]+|\[\d{1,9}\])*")


def presets() -> list[str]:
    """Names of the presets that ship with hecate. Those of `BY_RULE` also exist as `PRESET-RULE`, with the rule's own
    settings (`mqar-RULE` limits chunks to `RECALL_CHUNK`); those of `BY_BACKBONE` also as `PRESET-BACKBONE`, with other
    blocks."""
    by_rule = [f"{name}-{rule}" for name in BY_RULE for rule in RULES]
    return [*FILES, *by_rule, *(f"{name}-{blocks}" for name in BY_BACKBONE for blocks in BACKBONES)]


def folded_presets() -> list[str]:
    """`presets` in short: variants by rule as PRESET-RULE, by backbone as lm-SIZE-BACKBONE."""
    return [*FILES, *(f"{name}-RULE" for name in BY_RULE), "lm-SIZE-BACKBONE"]


def preset_about(name: str, files: Mapping[str, Path] = FILES) -> str:
    """Description of a preset, or of one of the `BACKBONES`: the first sentence of its file's comment."""
    lines = files[name].read_text(encoding="utf-8").splitlines()
    comment = " ".join(line.removeprefix("#").strip() for line in takewhile(lambda line: line.startswith("#"), lines))
    return re.split(r"(?<=\.) ", comment)[0].rstrip(".")


def load_experiment(source: str | Path, overrides: Sequence[str] = ()) -> ExperimentConfig:
    """The experiment of a preset name or YAML file with `a.b.c=value` overrides. [TRAIN-COMPOSE-D1]

    Every problem is reported with the path of the setting, and the line or the `--set` that set it.
    """
    if not isinstance(source, str | Path):
        cure = "ExperimentConfig.model_validate takes the settings themselves"
        raise ConfigError(f"source must be a preset or the path of a file, got {shorten(source)}; {cure}")
    if isinstance(overrides, str):
        raise ConfigError(f"overrides must be a list of path=value, got {overrides!r}; write [{overrides!r}]")
    # Files first, then `--set`, then validation, with marks that say where each setting was written.
    document = _extend(_open(str(source), None), [])
    if overrides:
        document = _apply(document, [_parse_override(text) for text in overrides])
    try:
        return ExperimentConfig.model_validate(document.value)
    except ConfigError as error:
        problems = []
        for path, message in error.problems:
            # A setting that was not written has the mark of the innermost mapping around it that was.
            known = (document.marks[path[:n]] for n in range(len(path), 0, -1) if path[:n] in document.marks)
            problems.append(Problem(path, f"{message}  [{next(known, document.label)}]"))
        raise ConfigError(problems) from None


def raw_settings(source: str | Path) -> dict[str, Any]:
    """The settings written in a preset or a file and in the files that it extends, unvalidated."""
    return dict(_extend(_open(str(source), None), []).value)


def dump_experiment(config: ExperimentConfig) -> str:
    """The resolved YAML of an experiment; loading it gives an equal one."""
    return dump_yaml(config.model_dump(mode="json"))


def experiment_schema() -> dict[str, Any]:
    """The JSON schema of the files that `load_experiment` reads. [VAR-SCHEMA-I1]"""
    schema = ExperimentConfig.model_json_schema()
    old, adamw = schema["$defs"]["OptimConfig"]["properties"], schema["$defs"]["optimizer.adamw"]["properties"]
    old |= {name: {**adamw[name], "deprecated": True} for name in OF_ADAMW}
    about = "A preset, or a file in the folder of this one, whose settings hold where this file has none."
    fields = {"extends": {"type": "string", "description": about}, **schema["properties"]}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "properties": fields}


def _open(name: str, folder: Path | None) -> tuple[Document, Path]:
    """Reads a preset by name, or a file; with `folder` (for `extends`) only a file in that folder."""
    known = folder is None and os.path.isfile(name)  # noqa: PTH113 - no error where the name is too long
    if not (known or name.endswith((".yaml", ".yml"))):
        return _preset(name)
    path = Path(name) if folder is None else folder / name
    # With links resolved: a config must not read files outside its folder.
    if folder is not None and not _real_path(path).is_relative_to(_real_path(folder)):
        raise ConfigError(f"must name a preset or a file in the folder of the config, got {name!r}", ("extends",))
    return read_yaml(path), path


def _real_path(path: Path) -> Path:
    return Path(os.path.realpath(path))  # unlike `Path.resolve`, without an error for loops


def _preset(name: str) -> tuple[Document, Path]:
    if name in FILES:
        return read_yaml(FILES[name]), FILES[name]
    stem, _, part = name.rpartition("-")
    replaced: tuple[str, ...] = ("memory",)
    if stem in BY_BACKBONE and part in BACKBONES:
        over = read_yaml(BACKBONES[part])
    elif stem in BY_RULE and part in RULES:
        chunked = stem == "mqar" and RULES[part].config.chunk > RECALL_CHUNK
        over = Document({"memory": {"kind": part, "chunk": RECALL_CHUNK} if chunked else part}, {}, "")
        # The rule brings its own layer, so the preset's settings of the layer are dropped as well.
        replaced += LanguageModelConfig.follows
    else:
        listing = not_known(name[:80], folded_presets(), did_you_mean(name[:80], presets()))
        raise ConfigError(f"no preset {shorten(name)}{listing} A file must end in .yaml or .yml")
    document = read_yaml(FILES[stem])
    around = {key: value for key, value in document.value.get("model", {}).items() if key not in replaced}
    base = document._replace(value={**document.value, "model": around})
    named = {"name": name, "model": over.value}
    marks = dict.fromkeys(settings(named), f"preset {name}")
    marks |= {("model", *path): mark for path, mark in over.marks.items()}
    return _merged(base, Document(named, marks, document.label)), FILES[stem]


def _extend(opened: tuple[Document, Path], chain: list[Path]) -> Document:
    document, path = opened
    if _real_path(path) in chain or len(chain) >= MAX_EXTENDS:
        names = " -> ".join(p.name for p in [*chain, path])
        raise ConfigError(f"'extends' goes in a circle or too deep: {names}")
    if "extends" not in document.value:
        return document
    rest, mark = dict(document.value), document.marks[("extends",)]
    base_name = rest.pop("extends")
    if not isinstance(base_name, str) or not base_name or "\0" in base_name:
        raise ConfigError(f"must be a preset or a file name, got {shorten(base_name)}  [{mark}]", ("extends",))
    try:
        base = _extend(_open(base_name, path.parent), [*chain, _real_path(path)])
    except ConfigError as error:
        if any("  [" in p.message for p in error.problems):
            raise
        raise ConfigError(Problem(p.path or ("extends",), f"{p.message}  [{mark}]") for p in error.problems) from None
    return _merged(base, document._replace(value=rest))


def _merged(base: Document, over: Document) -> Document:
    """A document with the settings of another over its own."""
    value = _merge(base.value, over.value)
    return Document(value, _marks_of(value, {**base.marks, **over.marks}), over.label)


def _marks_of(value: Any, marks: dict[Location, str]) -> dict[Location, str]:
    """The marks of settings that there are."""
    known = settings(value)
    return {path: mark for path, mark in marks.items() if path in known}


def _merge(base: Any, over: Any) -> Any:
    """`over` merged into `base`; a mapping of another kind replaces the old one, as its fields are others."""
    # `phi: elu` in the base and fields of it in `over`: the text is its kind.
    if isinstance(base, str) and isinstance(over, dict) and "kind" not in over:
        base = {"kind": base}
    mappings = isinstance(over, dict) and isinstance(base, dict)
    if not (mappings and ("kind" not in over or over["kind"] == base.get("kind", over["kind"]))):
        return over
    return base | {key: _merge(base.get(key), value) for key, value in over.items()}


class _Override(NamedTuple):
    path: Location
    value: Any
    text: str


def parse_path(text: str) -> Location | None:
    """`levels[1].memory` as a tuple of names and numbers; None if the text is not a path."""
    if not _PATH.fullmatch(text):
        return None
    return tuple(name or int(index) for name, index in _STEP.findall(text))


def _parse_override(text: str) -> _Override:
    path, equals, value = text.partition("=")
    path = path.strip()
    parts = parse_path(path)
    if not equals or parts is None:
        raise ConfigError(f"--set needs path=value, such as optim.lr=1e-3, got {shorten(text)}")
    if len(parts) > MAX_DEPTH:
        raise ConfigError(f"--set takes a path of at most {MAX_DEPTH} steps, got {len(parts)}: {shorten(path)}")
    label = f"--set {text}" if len(text) < 200 else f"--set {text[:197]}..."
    if parts[0] == "optim" and parts[1:2] and parts[1] in OF_ADAMW:
        parts = ("optim", "optimizer", *parts[1:])
    return _Override(parts, parse_value(value, label)[0], label)


def _apply(document: Document, overrides: list[_Override]) -> Document:
    """Applies overrides; those that choose a kind come before those that set its fields."""
    known = value = document.value
    with suppress(ConfigError):  # the overrides may repair it
        config = ExperimentConfig.model_validate(document.value)
        # The resolved settings, so that fields of default values can be set as well.
        known = config.model_dump(mode="json")
        value = _drop_unset(config, known)
    resolved = [item._replace(path=_full_path(item, list(settings(known)))) for item in overrides]
    marks, texts = document.marks, dict[Location, str]()
    # Outer settings first: choosing a kind drops fields that were set before.
    for item in sorted(resolved, key=lambda item: len(_subject(item.path))):
        subject = _subject(item.path)
        if subject in texts:
            raise ConfigError(f"set twice, {texts[subject]} and {item.text}", subject)
        texts[subject] = item.text
        value = _assign(value, item.path, (), item)
        marks = _marks_of(value, marks) | dict.fromkeys([subject, *settings(item.value, item.path)], item.text)
    return Document(value, marks, document.label)


def _drop_unset(config: Any, value: Any) -> Any:
    """The values of a config without fields that follow from others and were not set, so that they follow again."""
    if isinstance(value, list):
        return [_drop_unset(*pair) for pair in zip(config, value, strict=True)]
    if not isinstance(config, Config) or not isinstance(value, dict):  # a variant without settings is a text
        return value
    unset = set(config.follows) - config.model_fields_set
    return {name: _drop_unset(getattr(config, name), item) for name, item in value.items() if name not in unset}


def _subject(path: Location) -> Location:
    return path[:-1] if path[-1] == "kind" else path


def settings(tree: Any, path: Location = ()) -> dict[Location, Any]:
    """All settings in a tree by their paths, those that hold others as well."""
    values = {path: tree} if path else {}
    keys: Iterable[Any] = tree if isinstance(tree, dict) else range(len(tree)) if isinstance(tree, list) else ()
    for key in keys:
        values |= settings(tree[key], (*path, key))
    return values


def _full_path(item: _Override, known: list[Location]) -> Location:
    """The full path of a short one such as `feature_map`, which must end exactly one known path."""
    if item.path[0] in ExperimentConfig.model_fields:
        return item.path
    for length in range(len(item.path), 0, -1):
        head = item.path[:length]
        # The longest beginning of the path that ends a known one; an ambiguous one is refused.
        matches = [path for path in known if path[-length:] == head]
        if len(matches) == 1:
            return matches[0] + item.path[length:]
        if matches:
            listing = ", ".join(format_path(path) for path in matches)
            raise ConfigError(f"could mean {listing}; write the whole path  [{item.text}]", head)
    names = {str(path[-1]) for path in known}
    raise ConfigError(f"no such setting.{did_you_mean(item.path[-1], names)}  [{item.text}]", item.path)


def _assign(value: Any, rest: Location, path: Location, item: _Override) -> Any:
    if not rest:
        return item.value
    head, here = rest[0], (*path, rest[0])
    if isinstance(head, int):
        if not isinstance(value, list) or head >= len(value):
            size = f"a list of {len(value)}" if isinstance(value, list) else "no list"
            raise ConfigError(f"there is {size} here; give an index below its length  [{item.text}]", here)
        return [_assign(v, rest[1:], here, item) if i == head else v for i, v in enumerate(value)]
    if isinstance(value, str):
        value = {"kind": value}
    if value is not None and not isinstance(value, dict):
        raise ConfigError(f"has no fields, it is {shorten(value)}  [{item.text}]", path)
    fields = dict(value or {})
    # Another kind has other fields: the old ones are dropped.
    if rest == ("kind",) and fields.get("kind") != item.value:
        fields = {}
    fields[head] = _assign(fields.get(head), rest[1:], here, item)
    return fields
