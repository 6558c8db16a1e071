"""What later versions of Python and earlier ones of torch do not take, and those that the other tests run on do."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import hecate.cms
import hecate.models  # noqa: F401  states of every layer
from hecate import states

PACKAGE = Path(states.__file__).parent
TRACED = ("bias", "cms", "engine", "gating", "models", "nn", "phi", "retention", "rule", "structure", "tape")
"""Folders that torch.compile walks through, but for kernels."""
CHANGES = {"append", "clear", "extend", "insert", "pop", "remove", "reverse", "sort"}


def found(source: str) -> Iterator[str]:
    """What versions of torch before 2.13 break a graph at, in code."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Name) and node.id == "starmap":
            yield "starmap"
        if isinstance(node, ast.Name) and node.id == "id" and isinstance(node.ctx, ast.Load):
            yield "id"
        if isinstance(node, ast.FunctionDef):
            yield from (f"{name} is changed in place" for name in changed(node))


def changed(function: ast.FunctionDef) -> Iterator[str]:
    """Names that take what a star leaves, a tuple to torch before 2.13, and are changed in place."""
    starred: set[str] = set()
    for node in ast.walk(function):
        if isinstance(node, ast.Assign):
            parts = [part for target in node.targets for part in ast.walk(target)]
            starred |= {
                part.value.id for part in parts if isinstance(part, ast.Starred) and isinstance(part.value, ast.Name)
            }
    for node in ast.walk(function):
        written = isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store)
        called = isinstance(node, ast.Attribute) and node.attr in CHANGES
        if (written or called) and isinstance(node.value, ast.Name) and node.value.id in starred:
            yield node.value.id


def test_what_is_traced_is_written_as_every_torch_traces_it():
    files = [path for folder in TRACED for path in (PACKAGE / folder).rglob("*.py")]
    assert len(files) > 50
    assert [f"{path.relative_to(PACKAGE)}: {fault}" for path in files for fault in found(path.read_text())] == []


def test_and_what_is_not_is_noticed():
    for source in (
        "starmap(f, x)",
        "known = set(map(id, x))",
        "def f(x):\n    a, *b = x\n    b[0] = a",
        "def f(x):\n    *b, a = x\n    b.pop()",
    ):
        assert [*found(source)]


def test_states_are_rebuilt_by_their_class():
    """NamedTuple's own `_replace` makes what torch 2.11 cannot return from a graph."""
    kinds = [*states._KINDS.values()]
    assert len(kinds) > 5 and all(kind._replace is states.State._replace for kind in kinds)


def test_validators_have_signatures():
    """pydantic asks for them; from Python 3.12 on a generic class, such as FrozenDict[str, int], has none."""
    faults = []
    for path in PACKAGE.rglob("*.py"):
        text = path.read_text()
        for node in ast.walk(ast.parse(text)) if "Validator(" in text else ():
            called = isinstance(node, ast.Call) and getattr(node.func, "id", "").endswith("Validator")
            if called and any(isinstance(given, ast.Subscript) for given in node.args):
                faults.append(f"{path.relative_to(PACKAGE)}: {ast.unparse(node)}")
    assert not faults
