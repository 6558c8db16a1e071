"""JSON as it is read, and the schemas of open unions."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from hecate.errors import ConfigError

FAMILY = "x-hecate-family"
"""Marks where a schema refers to a family."""

Schema = dict[str, Any]


def read_json(text: str | bytes | bytearray) -> Any:
    """The value of a JSON text whose objects have no key twice."""
    try:
        return json.loads(text, object_pairs_hook=_distinct)
    except ConfigError:
        raise
    except RecursionError:
        raise ConfigError("not valid JSON: nested too deeply") from None
    except (ValueError, TypeError) as error:
        raise ConfigError(f"not valid JSON: {error}") from None


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ConfigError("given twice in one JSON object; keep one", (key,))
        found[key] = value
    return found


def resolve_families(schema: Schema, find: Callable[[str], tuple[Schema, dict[str, Schema]]]) -> Schema:
    """Replaces family placeholders by references, and adds what they refer to: `find` gives the union of a family and
    the schema of each of its kinds.

    pydantic cannot do this itself: a family is open, so its union is not known when a class is built, and it is
    recursive, because combinators hold members of their own family.
    """
    definitions: Schema = schema.pop("$defs", {})

    def visit(node: Any) -> Any:
        if isinstance(node, list):
            return [visit(item) for item in node]
        if not isinstance(node, dict):
            return node
        if FAMILY in node:
            define(node[FAMILY])
            rest = {key: visit(value) for key, value in node.items() if key != FAMILY}
            return {**rest, "$ref": f"#/$defs/{node[FAMILY]}"}
        return {key: visit(value) for key, value in node.items()}

    def define(family: str) -> None:
        if family in definitions:
            return
        definitions[family], kinds = find(family)
        for kind, inner in kinds.items():
            definitions.update(inner.pop("$defs", {}))
            # As a member of the union a variant is told apart by its kind, which has to be there.
            inner["required"] = sorted({"kind", *inner.get("required", [])})
            definitions[f"{family}.{kind}"] = visit(inner)

    resolved = visit(schema)
    for name in list(definitions):
        definitions[name] = visit(definitions[name])
    return {**resolved, "$defs": definitions} if definitions else dict(resolved)
