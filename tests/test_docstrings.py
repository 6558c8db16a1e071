"""Docstrings: of every variant that ships formula, origin, and the ids of its statements."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterator

import hecate
from hecate.variant import Variant
from tests.spec_files import SPEC_ID, stated


def shipped() -> list[type[Variant]]:
    """Every concrete variant that the package defines."""
    for module in pkgutil.walk_packages(hecate.__path__, "hecate."):
        # These import packages that are optional, and define no variants.
        names = ("formulas", "lanes", "layers", "parts", "passes", "registers", "steps", "vectors", "walk", "wide")
        kernels = (f"hecate.engine.cpu.{name}" for name in names)
        if not module.name.startswith(("hecate.interop", "hecate.__main__", "hecate.engine.triton.", *kernels)):
            importlib.import_module(module.name)

    def below(cls: type[Variant]) -> Iterator[type[Variant]]:
        for child in cls.__subclasses__():
            yield child
            yield from below(child)

    ours = {cls for cls in below(Variant) if cls.__module__.startswith("hecate.")}
    return sorted((cls for cls in ours if not cls.is_family()), key=lambda cls: cls.__qualname__)


def docstring_faults(kind: str, docstring: str, known: set[str]) -> list[str]:
    first = docstring.split("\n\n", 1)[0]
    cited = {name for group in re.findall(r"\[([^\]]+)\]", docstring) for name in SPEC_ID.findall(group)}
    faults = []
    if not (first.startswith(f"{kind}: ") and first.endswith(".")):
        faults.append(f"the first paragraph must read `{kind}: formula.`, got {first!r}")
    if not re.search(r"^(References?|Origin):", docstring, re.MULTILINE):
        faults.append("neither `References:` nor `Origin:`")
    if not cited:
        faults.append("no spec id in brackets")
    faults += [f"cites {name}, which no spec states" for name in sorted(cited - known)]
    return faults


def test_docstrings_of_variants():
    variants, known = shipped(), stated()
    assert len(variants) >= 20, "the walk over the package found too few variants"
    found = [
        f"{cls.__module__}.{cls.__qualname__}: {fault}"
        for cls in variants
        for fault in docstring_faults(
            cls.model_fields["kind"].default, inspect.cleandoc(vars(cls).get("__doc__") or ""), known
        )
    ]
    assert not found, "\n".join(found)


def test_docstring_check_itself():
    good = "elu: phi(x).\n\nReferences: A paper (2020). [PHI-ELU-D1]"
    assert docstring_faults("elu", good, {"PHI-ELU-D1"}) == []
    assert docstring_faults("relu", good, {"PHI-ELU-D1"})
    assert docstring_faults("elu", good, set())
    assert docstring_faults("elu", good.replace("References", "See"), {"PHI-ELU-D1"})
    assert docstring_faults("elu", good.replace("[", "").replace("]", ""), {"PHI-ELU-D1"})


def test_concrete_variants_are_final():
    subclassed = {
        f"{child.__qualname__} subclasses {cls.__qualname__}"
        for cls in shipped()
        for child in cls.__subclasses__()
        if child.__module__.startswith("hecate.")
    }
    assert not subclassed
