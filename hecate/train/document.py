"""Reading and writing YAML: plain values with the line of every key; ambiguous documents are refused.

Scalars follow the YAML 1.2 core schema, not PyYAML's 1.1: `1e-3` is a number; `no`, `on`, dates and numbers with a
leading zero are texts, which are refused where a number is expected.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from pydantic import BaseModel

from hecate.errors import ConfigError, shorten
from hecate.files import read_whole

Location = tuple[str | int, ...]

MAX_BYTES = 1 << 20
MAX_ALIASES = 64
MAX_VALUES = 20_000
MAX_DEPTH = 64
_TAG = "tag:yaml.org,2002:"
_INT = re.compile(r"[-+]?(?:0|[1-9][0-9]*)|0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = (
    r"[-+]?(?:(?:\.[0-9]+|[0-9]+\.[0-9]*)(?:[eE][-+]?[0-9]+)?|[0-9]+[eE][-+]?[0-9]+)"
    r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)"
)


def _integer(text: str) -> int:
    number = int(text, 0) if _INT.fullmatch(text) else int(text)
    str(number)  # Python refuses to write a number with too many digits; refuse it on reading
    return number


# For each tag, the texts that have it, and the function that converts them.
_SCALARS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "null": (r"~|null|Null|NULL|", lambda text: None),
    "bool": (r"true|True|TRUE|false|False|FALSE", lambda text: text.lower() == "true"),
    "int": (_INT.pattern, _integer),
    "float": (_FLOAT, lambda text: float(re.sub(r"\.(inf|nan)$", r"\1", text.lower()))),
}
# The key None: PyYAML tries these for any first character.
_RESOLVERS = {None: [(_TAG + tag, re.compile(f"^(?:{pattern})$")) for tag, (pattern, _) in _SCALARS.items()]}


class Document(NamedTuple):
    """A mapping read from text, and where each of its paths was written (`file.yaml:12`)."""

    value: dict[str, Any]
    marks: dict[Location, str]
    label: str


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers = _RESOLVERS
    aliases = depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.depth > MAX_DEPTH:
            raise RecursionError
        if self.check_event(yaml.AliasEvent):
            self.aliases += 1
            if self.aliases > MAX_ALIASES:
                problem = f"more than {MAX_ALIASES} aliases; write the values out"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=self.get_mark())
        self.depth += 1
        # Counted while the tree is composed: an alias bomb is refused before it is expanded.
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node


class _Dumper(yaml.SafeDumper):
    yaml_implicit_resolvers = _RESOLVERS

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def write_as_is(self, text: str) -> yaml.ScalarNode:
        """A text as a node, escaped if it has a character that YAML takes for a line break and would fold."""
        style = '"' if any(mark in text for mark in "\x85\u2028\u2029") else None
        return self.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _Dumper.write_as_is)


def dump_yaml(value: Mapping[str, Any]) -> str:
    """YAML that `parse_yaml` reads back to an equal value. [TRAIN-YAML-I1]"""
    return yaml.dump(dict(value), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=96)


def flow(value: Any) -> str:
    """A value in YAML on one line."""
    text = yaml.safe_dump(value, default_flow_style=True, width=1 << 20, allow_unicode=True, sort_keys=False)
    return text.removesuffix("\n").removesuffix("\n...")


def short(value: Any) -> Any:
    """A config as a user would write it: without fields at their defaults, a kind without settings as its name."""
    if isinstance(value, BaseModel):
        # Not by `model_dump`: variants in fields are shortened as well.
        usual = {n: field.get_default(call_default_factory=True) for n, field in type(value).model_fields.items()}
        fields = {name: getattr(value, name) for name in usual if name != "kind"}
        settings = {name: short(setting) for name, setting in fields.items() if setting != usual[name]}
        kind = vars(value).get("kind")
        if kind is None:
            return settings
        return {"kind": kind, **settings} if settings else kind
    if isinstance(value, Mapping):
        return {key: short(entry) for key, entry in value.items()}
    return [short(entry) for entry in value] if isinstance(value, (tuple, list)) else value


def read_yaml(path: Path) -> Document:
    """Reads a YAML file; `ConfigError` names the file, and the line if there is one."""
    name = str(path) if len(str(path)) < 200 else shorten(str(path))
    try:
        text = read_whole(path, MAX_BYTES).decode()
    except OSError as error:
        cure = f"; `hecate init {name}` writes one" if isinstance(error, FileNotFoundError) else ""
        raise ConfigError(f"cannot read config {name}: {error.strerror or error}{cure}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{name} is not UTF-8 text (byte {error.start}); save it as UTF-8") from None
    except ValueError as error:  # an impossible path
        raise ConfigError(f"cannot read config {name}: {error}") from None
    return parse_yaml(text, path.name)


def parse_yaml(text: str, label: str) -> Document:
    """Parses a mapping; `label` names the source in marks and errors. [TRAIN-YAML-D1]"""
    value, marks = parse_value(text, label)
    if not isinstance(value, dict | None):
        raise ConfigError(f"must be a mapping of settings, got {shorten(value)}  [{label}:1]")
    return Document(value or {}, marks, label)


def parse_value(text: str, label: str) -> tuple[Any, dict[Location, str]]:
    """Parses any YAML value, such as the right-hand side of `--set`."""
    try:
        node, reader = _Loader(text).get_single_node(), _Reader(label)
        return (None if node is None else reader.read(node, ())), reader.marks
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise ConfigError(f"not valid YAML: {error.problem or error.context}  [{_place(label, mark)}]") from None
    except yaml.reader.ReaderError as error:
        raise ConfigError(f"not valid YAML: character #x{error.character:04x} is not allowed  [{label}]") from None
    except RecursionError:
        raise ConfigError(f"nested too deeply for a config  [{label}]") from None


class _Reader:
    """Converts a node graph to plain values; counts every mention of a node, so that aliases cannot explode."""

    def __init__(self, label: str) -> None:
        self.label = label
        self.marks: dict[Location, str] = {}
        self._open: set[int] = set()
        self._count = 0

    def read(self, node: yaml.Node, path: Location) -> Any:
        self._count += 1
        if self._count > MAX_VALUES:
            raise self._refuse(path, f"expands to more than {MAX_VALUES} values", node)
        if id(node) in self._open:
            raise self._refuse(path, "contains itself through an alias", node)
        self.marks.setdefault(path, _place(self.label, node.start_mark))
        self._open.add(id(node))
        try:
            if isinstance(node, yaml.ScalarNode):
                return self._scalar(node, path)
            if node.tag not in (_TAG + "map", _TAG + "seq"):
                raise self._refuse(path, f"tag {node.tag!r} is not allowed", node)
            if isinstance(node, yaml.MappingNode):
                return self._mapping(node, path)
            return [self.read(item, (*path, i)) for i, item in enumerate(node.value)]
        finally:
            self._open.discard(id(node))

    def _mapping(self, node: yaml.MappingNode, path: Location) -> dict[str, Any]:
        lines: dict[str, int] = {}
        result: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key, line = key_node.value, key_node.start_mark.line + 1
            if not isinstance(key_node, yaml.ScalarNode) or key_node.tag != _TAG + "str":
                shown = repr(key) if isinstance(key, str) else f"a {key_node.id}"
                raise self._refuse(path, f"a key must be a text, got {shown}", key_node)
            if key == "<<":
                raise self._refuse(path, "merge keys (<<) are not supported; use 'extends'", key_node)
            if key in lines:
                raise self._refuse((*path, key), f"given twice, in lines {lines[key]} and {line}; keep one", key_node)
            lines[key] = line
            self.marks[(*path, key)] = _place(self.label, key_node.start_mark)
            result[key] = self.read(value_node, (*path, key))
        return result

    def _scalar(self, node: yaml.Node, path: Location) -> Any:
        text, tag = node.value, node.tag.removeprefix(_TAG)
        if tag == "str":
            return text
        if tag not in _SCALARS:
            raise self._refuse(path, f"tag {node.tag!r} is not allowed", node)
        try:
            return _SCALARS[tag][1](text)
        except ValueError:
            raise self._refuse(path, f"is not a readable {tag}: {text[:40]!r}", node) from None

    def _refuse(self, path: Location, message: str, node: yaml.Node) -> ConfigError:
        return ConfigError(f"{message}  [{_place(self.label, node.start_mark)}]", path)


def _place(label: str, mark: Any) -> str:
    return label if mark is None or label.startswith("--") else f"{label}:{mark.line + 1}"
