"""Traits that a class declares about its own formulas."""

from __future__ import annotations


def still_declared(value: object, trait: str, formulas: tuple[str, ...]) -> bool:
    """Whether no class below the one that declares a trait redefines one of these formulas.

    A subclass that changes the maths inherits the words about the old: they no longer hold.
    """
    for cls in type(value).__mro__:
        if trait in vars(cls):
            return True
        if not vars(cls).keys().isdisjoint(formulas):
            return False
    return False
