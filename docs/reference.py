"""The pages that follow from the package: its API, one page a room, the table of variants, the list of specs."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hecate.rule import RULES
from hecate.train.catalogue import FAMILIES, HEADER, VARIANTS, catalogue, field_rows
from hecate.train.compose import experiment_schema
from hecate.train.report import Table
from hecate.variant import equation

FIRST: dict[str, tuple[str, ...]] = {
    "hecate": (),
    "hecate.nn": ("Memory", "LinearAttention", "SlidingAttention", "Composed", "PerformerAttention", "Hopfield"),
    "hecate.rule": ("MemoryConfig", "named_rule", "Gates", "MemoryState", "NamedRule", "LayerOptions"),
    "hecate.engine": ("memory_scan", "memory_step", "stepper", "explain", "Engine", "TokenEngine"),
    "hecate.phi": ("FeatureMap", "Traits"),
    "hecate.cms": ("CMS", "CMSConfig", "LevelConfig", "SelfReferential", "SelfReferenceConfig"),
    "hecate.models": ("LanguageModel", "LanguageModelConfig", "Hope", "HopeConfig", "LinearTransformer"),
    "hecate.optim": ("PhiMomentum", "DeltaMomentum", "DeepMomentum", "KernelMomentum", "M3", "Muon", "DGD"),
    "hecate.train": ("open_model", "generate", "run_experiment", "load_experiment", "Trainer", "ExperimentConfig"),
    "hecate.data": ("Text", "Tokens", "Bundled", "MQAR", "Task"),
    "hecate.hf": ("adopt", "release", "upgrade", "graft", "from_layer", "to_layer", "HecateForCausalLM"),
    "hecate.serve": ("Scheduler", "Request", "PrefixCache", "Memories"),
    "hecate.testing": ("check_feature_map", "check_rule", "check_vjp", "check_knobs", "check_streaming"),
    "hecate.microscope": ("look", "write_strength", "implicit_attention"),
    "hecate.compare": ("compare", "cells_of", "Budget"),
    "hecate.evals": ("evaluate_tasks", "evaluate_run"),
    "hecate.tape": ("Tape", "Block", "differentiate"),
    "hecate.formula": ("bias_formula", "retention_formula"),
    "hecate.bias": ("Bias",),
    "hecate.retention": ("Retention", "Link"),
    "hecate.algorithm": ("Algorithm",),
    "hecate.structure": ("Structure",),
    "hecate.gating": ("Gating",),
    "hecate.readout": ("Readout",),
}
"""Packages in the order in which a newcomer meets them, and of each the names that come first."""

PLACES = {
    "ExperimentConfig": "An experiment", "LanguageModelConfig": "model", "MemoryConfig": "model.memory",
    "LevelConfig": "model.levels, a list of these", "AttentionConfig": "model.attention",
    "SelfReferenceConfig": "model.self_reference", "FeatureMemoryConfig": "model.feature_memory",
    "OptimConfig": "optim", "BudgetConfig": "budget", "ParallelConfig": "parallel", "SampleConfig": "sample",
}  # fmt: skip
"""Sections of an experiment, by the names of their classes."""


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
    """The packages in the order in which a newcomer meets them, each with its first line."""
    rows = []
    for name in sorted(packages, key=lambda name: [*FIRST, name].index(name)):
        first = (importlib.import_module(name).__doc__ or "").strip().split("\n\n")[0]
        rows.append(f"| [{name}]({name}.md) | {cell(' '.join(first.split()))} |")
    return "# API\n\n| package | what it is |\n|---|---|\n" + "\n".join(rows) + "\n" + toctree(packages)


def package(name: str) -> str:
    """The page of a package: what it is, a summary of its names, the important ones first, then each in full; the top
    one has the names of others, which have pages of their own."""
    module = importlib.import_module(name)
    head = f"# {name}\n\n```{{eval-rst}}\n.. automodule:: {name}\n"
    if name == "hecate" or not hasattr(module, "__path__"):
        return head + ("   :no-members:\n" if name == "hecate" else "") + "```\n"
    first = FIRST.get(name, ())
    names = [*first, *(other for other in module.__all__ if other not in first)]
    own = {other: thing for other in names if _is_of(thing := getattr(module, other), name)}
    rows = [(f"{{py:obj}}`{other} <{name}.{other}>`", summary(thing)) for other, thing in own.items()]
    kinds = {other: "autoclass" if inspect.isclass(thing) else "autofunction" for other, thing in own.items()}
    full = "\n".join(f".. {kind}:: {name}.{other}" for other, kind in kinds.items())
    table = "\n".join(f"| {what} | {cell(text)} |" for what, text in rows)
    return f"{head}   :no-members:\n```\n\n| name | what it is |\n|---|---|\n{table}\n\n```{{eval-rst}}\n{full}\n```\n"


def _is_of(thing: Any, room: str) -> bool:
    """True for a class or function with a docstring that no other package has."""
    home = getattr(thing, "__module__", None) or ""
    return (
        f"{home}.".startswith(f"{room}.")
        and (inspect.isclass(thing) or inspect.isroutine(thing))
        and bool(thing.__doc__)
    )


def summary(thing: Any) -> str:
    """The first sentence of a docstring, without the ids that it cites."""
    text = " ".join((inspect.getdoc(thing) or "").split("\n\n")[0].split())
    return re.sub(r"\s*\[[A-Z]+-[^\]]*\]", "", re.split(r"(?<=[.])\s|:$", text)[0])


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


def layers_of_rules() -> str:
    """How our layer of every named rule differs from the published one, and by how much."""
    said = [(name, ", ".join(f"{item.what} ({item.by:.2f})" for item in rule.differs)) for name, rule in RULES.items()]
    return lines(("rule", "unlike the published layer it has"), [(name, text or "-") for name, text in said])


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


def tables() -> dict[str, Table]:
    """Every table of settings, by the place that they are written in: sections first, then each kind of each family
    that has settings."""
    schema = experiment_schema()
    found: dict[str, Table] = {PLACES["ExperimentConfig"]: (HEADER, field_rows(schema))}
    objects = schema["$defs"]
    for name, place in PLACES.items():
        if name in objects:
            found[place] = (HEADER, field_rows(objects[name]))
    for name, own in objects.items():
        if name not in PLACES and (rows := field_rows(own)):
            found[name] = (HEADER, rows)
    return found


def lines(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown."""
    table = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cell(text) for text in row) + " |" for row in table) + "\n"


def cell(text: str) -> str:
    """A text inside a table: no bar ends the cell, and outside of code no star starts an emphasis."""
    if text == "---":
        return text
    parts = re.split(r"(`[^`]*`)", str(text))
    return "".join(re.sub(r"\|" if part.startswith("`") else r"([|*_<\[\]])", r"\\\g<0>", part) for part in parts)
