"""Orthogonalised updates: the Newton-Schulz iteration of the memories, on a parameter's matrix."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from hecate.algorithm import NewtonSchulz


def settings(given: bool | Mapping[str, Any] | NewtonSchulz | None) -> dict[str, Any] | None:
    """An option `orthogonalize` as plain values: None, or the fields of `NewtonSchulz`."""
    if given is None or given is False:
        return None
    if isinstance(given, NewtonSchulz):
        return given.model_dump()
    return NewtonSchulz(**({} if given is True else given)).model_dump()


def orthogonalised(matrix: Tensor, options: Mapping[str, Any]) -> Tensor:
    """NS(matrix) `[r, c]`: singular values towards 1; a zero matrix stays zero. [OPT-ORTH-D1]

    Acts on the whole matrix: rows of a shard alone would be another algorithm.
    """
    rule = NewtonSchulz.model_validate(dict(options))
    one = matrix.new_ones(1)
    batch = matrix.unsqueeze(0)
    return rule.direction(batch, -one, 0 * one, 0 * batch)[0].squeeze(0)
