"""Reads `specs/`: statements, worked examples, and the markers of the tests that exercise them."""

from __future__ import annotations

import ast
import re
import sys
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest
import torch

ROOT = Path(__file__).parents[1]
SPECS = ROOT / "specs"
SPEC_ID = re.compile(r"\b[A-Z][A-Z0-9]*(?:-[A-Z0-9]+)+-[DVIRE]\d+\b")
STATEMENT = re.compile(rf"^- \*\*({SPEC_ID.pattern})\*\*")


class Example(NamedTuple):
    """A fenced python block of a section, and the document's imports, which it starts from."""

    path: Path
    line: int  # of its first line of code
    source: str
    setup: str = ""

    @property
    def name(self) -> str:
        return f"{self.path.stem}-{self.line}"


def examples(path: Path) -> list[Example]:
    """The blocks of a document's sections; a block before the first section is their setup."""
    found, start = [], None
    lines = path.read_text().splitlines()
    sections = [number for number, line in enumerate(lines) if line.startswith("## ")]
    for number, line in enumerate(lines):
        if start is None and line.strip() == "```python":
            start = number + 1
        elif start is not None and line.strip() == "```":
            found.append(Example(path, start + 1, "\n".join(lines[start:number]) + "\n"))
            start = None
    if start is not None:
        raise ValueError(f"{path.name}:{start}: this python block is never closed")
    setup = "".join(e.source for e in found if sections and e.line <= sections[0])
    return [e._replace(setup=setup) for e in found if not sections or e.line > sections[0]]


def statements(text: str) -> list[str]:
    """The ids stated in a text, in order, repetitions included."""
    return [m.group(1) for line in text.splitlines() if (m := STATEMENT.match(line))]


def files() -> list[Path]:
    return sorted(SPECS.glob("*.md"))


@cache
def stated() -> set[str]:
    return {name for path in files() for name in statements(path.read_text())}


def marked(source: str) -> set[str]:
    """Ids in the `pytest.mark.spec(...)` calls of a test file."""
    names = set()
    for node in ast.walk(ast.parse(source)) if "mark.spec" in source else ():
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "spec":
            names |= {arg.value for arg in node.args if isinstance(arg, ast.Constant)}
    return names


@cache
def marked_in_tests() -> set[str]:
    return {name for path in (ROOT / "tests").rglob("*.py") for name in marked(path.read_text())}


def run_example(example: Example, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs it as a reader does, in a module of its own and at torch's default dtype."""
    torch.set_default_dtype(torch.float32)
    module = ModuleType("worked_example")
    # Blank lines ahead of it make a traceback point into the document.
    code = compile("\n" * (example.line - 1) + example.source, str(example.path), "exec", dont_inherit=True)
    with monkeypatch.context() as patch:  # pydantic and pickle look names up in the module
        patch.setitem(sys.modules, module.__name__, module)
        exec(example.setup, vars(module))
        exec(code, vars(module))
