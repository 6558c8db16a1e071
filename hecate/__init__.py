"""hecate: memories that are written and read at every token.

A `MemoryRule` has four knobs (structure, attentional bias, retention, algorithm). A feature map phi is applied to keys
and queries first; `memory_scan` runs the rule over a sequence.
"""

import importlib
from typing import Any

__version__ = "0.3.0"

# The modules that define each name. They are imported on first use: torch alone takes seconds, and `hecate --help`
# needs none of it. Type checkers read `__init__.pyi`, which has the same names.
_PACKAGES = (
    "activation", "algorithm", "bias", "cms", "data", "distributed", "engine", "errors", "gating", "microscope",
    "models", "nn", "optim", "phi", "readout", "retention", "rule", "states", "structure", "tape", "testing", "train",
    "variant",
)  # fmt: skip
_EXTRAS = ("hf", "serve")  # they need the packages of an extra, so a star import leaves them out
_NAMES = {
    "hecate.engine": ("memory_scan", "memory_step", "stepper"),
    "hecate.errors": (
        "CheckpointError",
        "ConfigError",
        "DataError",
        "HealthWarning",
        "HecateError",
        "NonFiniteError",
        "ShapeError",
        "StabilityWarning",
    ),
    "hecate.phi": ("FeatureMapKind",),
    "hecate.tape": ("exact",),
    "hecate.rule": ("Gates", "MemoryConfig", "MemoryRule", "MemoryState", "memory_weights", "named_rule"),
}
_ELSEWHERE = {"CMS": "cms", "Hope": "models", "LanguageModel": "models", "LinearAttention": "nn", "Memory": "nn"}
_HOME = {name: home for home, names in _NAMES.items() for name in names}

__all__ = sorted([*_PACKAGES, *_HOME, "__version__"])


def __getattr__(name: str) -> Any:
    if name in _PACKAGES or name in _EXTRAS:
        return importlib.import_module(f"hecate.{name}")
    if name not in _HOME:
        hint = f"; it is hecate.{_ELSEWHERE[name]}.{name}" if name in _ELSEWHERE else ""
        raise AttributeError(f"module 'hecate' has no attribute {name!r}{hint}")
    value = globals()[name] = getattr(importlib.import_module(_HOME[name]), name)
    return value


def __dir__() -> list[str]:
    return __all__
