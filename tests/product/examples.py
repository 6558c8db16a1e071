"""One small instance of a variant."""

from __future__ import annotations

from typing import Any, get_args, get_origin

from hecate.variant import Variant
from tests.registries import shipped_kinds

SMALL = {"num_centres": 4, "sketch": 4, "m": 4, "nodes": 2}


def example(variant: type[Variant]) -> Any:
    """An instance at its defaults, with something small where none is given or the default is large.

    A required variant becomes the first of its family that needs nothing itself.
    """
    fields = variant.model_fields
    required = {name: field.annotation for name, field in fields.items() if field.is_required()}
    narrow = {name: size for name, size in SMALL.items() if name in fields}
    if "d_phi" in fields and "d_hidden" not in fields:
        narrow["d_phi"] = 4
    return variant(**narrow, **{name: _small(annotation) for name, annotation in required.items()})


def _small(annotation: Any) -> Any:
    if get_origin(annotation) is tuple:
        return (_small(get_args(annotation)[0]),) * 2
    if isinstance(annotation, type) and issubclass(annotation, Variant):
        for variant in shipped_kinds(annotation).values():
            if not any(field.is_required() for field in variant.model_fields.values()):
                return variant()
    return {int: 4, float: 1.0}.get(annotation)
