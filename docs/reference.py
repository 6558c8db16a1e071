"""The pages that follow from the package: its API, one page a room, the table of variants, the list of specs."""

from __future__ import annotations

import importlib
import re
from collections.abc import Sequence
from pathlib import Path

from hecate.rule import RULES
from hecate.train.catalogue import FAMILIES, VARIANTS, catalogue
from hecate.train.settings import tables
from hecate.variant import equation


def write_reference(root: Path) -> None:
    """Writes `docs/reference`; a page that says what it said keeps its time, and one of the past goes."""
    folder = root / "docs" / "reference"
    folder.mkdir(exist_ok=True)
    rooms = sorted(path.parent.name for path in (root / "hecate").glob("*/__init__.py"))
    packages = ["hecate", *(f"hecate.{room}" for room in rooms), "hecate.errors", "hecate.variant"]
    pages = {"settings": settings(), "variants": variants(), "api": api(packages), "specs": specs(root)}
    pages |= {name: package(name) for name in packages}
    for name, text in pages.items():
        path = folder / f"{name}.md"
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
    for path in folder.glob("*.md"):
        if path.stem not in pages:
            path.unlink()


def api(packages: list[str]) -> str:
    """The list of packages, each with its first line."""
    rows = []
    for name in packages:
        first = (importlib.import_module(name).__doc__ or "").strip().split("\n\n")[0]
        rows.append(f"| [{name}]({name}.md) | {cell(' '.join(first.split()))} |")
    return "# API\n\n| package | what it is |\n|---|---|\n" + "\n".join(rows) + "\n" + toctree(packages)


def package(name: str) -> str:
    """The page of a package; the top one has the names of others, which have pages of their own."""
    members = "   :no-members:\n" if name == "hecate" else ""
    return f"# {name}\n\n```{{eval-rst}}\n.. automodule:: {name}\n{members}```\n"


def specs(root: Path) -> str:
    """The list of specs by their titles."""
    names = sorted(path.stem for path in (root / "specs").glob("*.md"))
    about = "What holds, one id for each promise; the tests run the examples and name the ids that they exercise."
    return f"# Specs\n\n{about}\n" + toctree([f"../../specs/{name}" for name in names], hidden=False)


def toctree(names: list[str], *, hidden: bool = True) -> str:
    """Pages below this one."""
    return "\n```{toctree}\n" + (":hidden:\n" if hidden else "") + ":maxdepth: 1\n\n" + "\n".join(names) + "\n```\n"


def variants() -> str:
    """Every family as `hecate list` prints it, and the equations of its variants."""
    about = "What `hecate list` prints, formula, traits, gradient and paper, and equations in [one notation]({}).\n"
    parts = ["# Variants\n\n" + about.format("../pages/notation.md")]
    for family in FAMILIES:
        parts.append(f"## {family}\n\n" + lines(*catalogue(family)))
        kinds = VARIANTS[family].variants() if family in VARIANTS else {}
        found = {kind: equation(cls) for kind, cls in kinds.items()}
        if any(found.values()):
            parts.append(equations("kind", found))
    return "\n".join(parts)


def equations_of_rules() -> str:
    """The equations of every named rule."""
    return equations("rule", {name: rule.equation for name, rule in RULES.items()})


def equations(head: str, found: dict[str, str]) -> str:
    """A table of equations by name; a bar in one is none between cells."""
    shown = {cell(name): text.replace("|", r"\|").replace("\n", "<br>") for name, text in found.items()}
    rows = [f"| {name} | {text} |" for name, text in shown.items()]
    return f"| {head} | equations |\n|---|---|\n" + "\n".join(rows) + "\n"


def settings() -> str:
    """Every setting of an experiment: what it accepts, its default and its meaning."""
    about = (
        "Every setting of an experiment, as YAML and `--set` take it: `optim.lr=1e-3`. `hecate init my.yaml` writes a "
        "commented file of them to start from, `hecate show` prints what an experiment resolves to, and `hecate "
        "schema` is for editors that complete YAML. Below the sections stands each kind of each family that has "
        "settings of its own: write `feature_map: {kind: dpfp, nu: 2}`."
    )
    parts = [f"# Settings\n\n{about}\n"]
    for place, table in tables().items():
        parts.append(f"## {place}\n\n" + lines(*table))
    return "\n".join(parts)


def lines(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown."""
    table = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cell(text) for text in row) + " |" for row in table) + "\n"


def cell(text: str) -> str:
    """A text inside a table: no bar ends the cell, no star starts an emphasis."""
    return re.sub(r"([|*_<\[\]])", r"\\\1", str(text)) if text != "---" else text
