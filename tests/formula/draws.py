"""Variants of any settings that their fields allow."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hecate.errors import ConfigError


def drawn(
    shipped: Mapping[str, type], count: int, words: Mapping[str, Sequence[str]], without: Sequence[str] = ()
) -> Iterator[Any]:
    """So many of the shipped kinds; fields of words are drawn from `words`, the flags `without` stay as they are."""
    source = random.Random(0)
    while count:
        cls: Any = shipped[source.choice(sorted(shipped))]
        fields: dict[str, Any] = {}
        for name, field in cls.model_fields.items():
            if field.annotation is float and source.random() < 0.7:
                fields[name] = round(math.exp(source.uniform(-3, 1.5)), 4)
            elif field.annotation is bool and name not in without:
                fields[name] = source.random() < 0.5
            elif name in words:
                fields[name] = source.choice(words[name])
        try:
            yield cls(**fields)
        except ConfigError:
            continue
        count -= 1
