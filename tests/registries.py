"""Which variants are the library's, whatever tests, pages and notebooks define beside them."""

from __future__ import annotations

from typing import Any

import pytest

import hecate.train  # noqa: F401  whose kinds, registered while copies stand, would be lost with them
from hecate.engine import Engine
from hecate.variant import Variant


def shipped_kinds(family: type[Variant]) -> dict[str, type[Any]]:
    """The variants of a family that come with hecate, those of a test left out."""
    return {kind: cls for kind, cls in family.variants().items() if cls.__module__.startswith("hecate.")}


def restore_registries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies of the registries until the test is over."""
    monkeypatch.setattr(Engine, "registry", dict(Engine.registry))
    for family in Variant.__subclasses__():
        if "_registry" in vars(family):
            monkeypatch.setattr(family, "_registry", dict(family._registry))
