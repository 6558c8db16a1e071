"""Random values of a JSON schema, and ways to spoil them."""

from __future__ import annotations

import copy
import math
import random
import string
import sys
from collections.abc import Iterator
from typing import Any

DEPTH = 5
"""Below this many mappings, optional fields are left out and kinds without required ones taken."""
DEEP = 30
"""Below this many, nothing is spoilt and no text is written."""


def value_of(schema: dict[str, Any], rng: random.Random, share: float) -> Any:
    """A random value that the schema allows, with a `share` of the optional fields, sizes small."""
    return _Drawer(schema.get("$defs", {}), rng, share).draw(schema, 0)


class _Drawer:
    def __init__(self, definitions: dict[str, Any], rng: random.Random, share: float) -> None:
        self.definitions, self.rng, self.share = definitions, rng, share

    def draw(self, node: dict[str, Any], depth: int) -> Any:
        if "$ref" in node:
            return self.draw(self.definitions[node["$ref"].rpartition("/")[2]], depth)
        if "const" in node:
            return node["const"]
        if "enum" in node:
            kinds = [kind for kind in node["enum"] if kind != "cuda"]
            return self.rng.choice(kinds)
        options = node.get("anyOf") or node.get("oneOf")
        if options:
            if depth >= DEPTH:
                options = [item for item in options if self._flat(item)] or options
            return self.draw(self.rng.choice(options), depth)
        return getattr(self, "_" + node["type"])(node, depth)

    def _flat(self, node: dict[str, Any]) -> bool:
        """Whether a value needs no other mapping; a bare kind may, which is then refused."""
        if "$ref" not in node:
            return True
        node = self.definitions[node["$ref"].rpartition("/")[2]]
        inner = [node.get("properties", {}).get(name, {}) for name in node.get("required", ())]
        return "oneOf" not in node and not any("$ref" in item or "items" in item for item in inner)

    def _object(self, node: dict[str, Any], depth: int) -> dict[str, Any]:
        drawn = {}
        for name, field in node.get("properties", {}).items():
            share = self.share if depth < DEPTH else 0.0
            if name in node.get("required", ()) or self.rng.random() < share:
                drawn[name] = self.draw(field, depth + 1)
        if isinstance(inner := node.get("additionalProperties"), dict):
            for name in self.rng.sample(["*.norm*", "head*", "blocks.0.*"], self.rng.randrange(3)):
                drawn[name] = self.draw(inner, depth + 1)
        return drawn

    def _array(self, node: dict[str, Any], depth: int) -> list[Any]:
        if "prefixItems" in node:
            return [self.draw(item, depth + 1) for item in node["prefixItems"]]
        least = node.get("minItems", 0)
        return [self.draw(node["items"], depth + 1) for _ in range(self.rng.randint(least, 2))]

    def _integer(self, node: dict[str, Any], _: int) -> int:
        step = node.get("multipleOf", 1)
        low = max(node.get("minimum", 0), node.get("exclusiveMinimum", -1) + 1)
        high = min(node.get("maximum", math.inf), node.get("exclusiveMaximum", math.inf) - 1)
        drawn = low + step * self.rng.choice([0, 0, 1, 1, 2, 3, 7])
        return int(min(-(-drawn // step) * step, high))

    def _number(self, node: dict[str, Any], _: int) -> float:
        low = node.get("minimum", node.get("exclusiveMinimum", 0.0))
        high = min(low + 2.0, node.get("maximum", node.get("exclusiveMaximum", math.inf)))
        ends = [end for end in (low, high) if end in (node.get("minimum"), node.get("maximum"))]
        inside = [low + (high - low) * part for part in (0.01, 0.3, 0.5, 0.9)]
        return self.rng.choice(inside + ends)

    def _string(self, node: dict[str, Any], _: int) -> str:
        return "".join(self.rng.choices(string.ascii_lowercase, k=4))

    def _boolean(self, node: dict[str, Any], _: int) -> bool:
        return self.rng.random() < 0.5

    def _null(self, node: dict[str, Any], _: int) -> None:
        return None


BAD = [
    None, True, False, "8", "", "nan", "elu", "1e3", 0, -1, -3.5, 0.5, 1e-300, 1e300, 5e-324,
    math.nan, math.inf, -math.inf, 10**9, 10**12, -(10**12), 10**19, 10**400, -(10**400), 1 << 63,
    [], {}, [[]], {"kind": None}, {"kind": []}, {"kind": "nothing"}, "\ud800", "\0", "x" * 10_000,
    [1] * 1000, {"": 0}, {"kind": "compose", "maps": []},
]  # fmt: skip
"""What a field may be given by mistake or malice; lone surrogates and NULs included."""


def copied(value: Any) -> Any:
    """A copy, however deep the value is."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(20_000)
    try:
        return copy.deepcopy(value)
    finally:
        sys.setrecursionlimit(before)


def spoilt(value: Any, rng: random.Random) -> Any:
    """A copy with one to three random faults, some of which are none."""
    value = copied(value)
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        value = _SPOILERS[rng.randrange(len(_SPOILERS))](value, rng)
    return value


def _replace(value: Any, rng: random.Random) -> Any:
    return _at_random(value, rng, lambda _: copied(rng.choice(BAD)))


def _drop(value: Any, rng: random.Random) -> Any:
    def without(node: Any) -> Any:
        if isinstance(node, dict) and node:
            del node[rng.choice(list(node))]
        return node

    return _at_random(value, rng, without)


def _misspell(value: Any, rng: random.Random) -> Any:
    """A letter of a text or of a field's name is doubled, or a field nobody knows is added."""

    def other(node: Any) -> Any:
        if isinstance(node, str):
            return node[:1] + node
        if isinstance(node, dict):
            name = rng.choice([*node, "unknown", "kind", "_registry", "__class__", "model_config"])
            return {name + name[-1:] if k == name else k: v for k, v in node.items()} | (
                {} if name in node else {name: 1}
            )
        return node

    return _at_random(value, rng, other)


def _nest(value: Any, rng: random.Random) -> Any:
    """A value inside many lists, or inside many maps of its own family."""
    times = rng.choice([1, 10, 100, 2000])

    def nested(node: Any) -> Any:
        for _ in range(times):
            node = [node] if form == 0 else {"kind": "odd_lift", "inner": node}
            node = {"kind": "compose", "maps": [node, "elu"]} if form == 2 else node
        return node

    form = rng.randrange(3)
    return _at_random(value, rng, nested)


def _swap(value: Any, rng: random.Random) -> Any:
    """A value in place of another: often a kind of one family where another stands."""
    found = [node for _, node in nodes(value)]
    return _at_random(value, rng, lambda _: copied(rng.choice(found)))


_SPOILERS = [_replace, _replace, _replace, _drop, _misspell, _misspell, _nest, _swap]


def nodes(value: Any) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Every value less than `DEEP` mappings and lists down, itself first, with its path."""
    stack: list[tuple[tuple[Any, ...], Any]] = [((), value)]
    while stack:
        path, node = stack.pop()
        yield path, node
        if isinstance(node, dict | list) and len(path) < DEEP:
            items = node.items() if isinstance(node, dict) else enumerate(node)
            stack += [((*path, key), item) for key, item in items]


def _at_random(value: Any, rng: random.Random, change: Any) -> Any:
    """`value` with one of its nodes, rarely the root, put through `change`."""
    paths = [path for path, _ in nodes(value)]
    path = rng.choice(paths[1:]) if len(paths) > 1 and rng.random() < 0.95 else ()
    if not path:
        return change(value)
    node = value
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = change(node[path[-1]])
    return value
