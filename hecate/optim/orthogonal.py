"""Orthogonalised updates: the Newton-Schulz iteration of the memories, on a parameter's matrix."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from hecate.algorithm import NewtonSchulz
from hecate.algorithm.newton_schulz import POLYNOMIALS, Coefficients, iterated
from hecate.errors import ConfigError
from hecate.optim.options import Group, check_choice, check_count, check_number
from hecate.optim.tensors import SMALL, tamed

Polynomial = Literal["quintic", "cubic"] | tuple[float, float, float]
AdjustLr = Literal["original", "match_rms_adamw", "none"]
DTYPES = ("bfloat16", "float16", "float32", "float64")


def newton_schulz(
    matrix: Tensor,
    coefficients: Coefficients = POLYNOMIALS["quintic"],
    steps: int = 5,
    eps: float = 1e-7,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """NS(U) `[..., r, c]`: singular values of U / max(|U|_F, eps) towards 1. [OPT-ORTH-D1]

    Zero stays zero. `dtype` is that of the iteration, None the matrix's own. Acts on the whole matrix: rows of a shard
    alone would be another algorithm.
    """
    tall = matrix.shape[-2] > matrix.shape[-1]
    dtype = dtype or matrix.dtype
    x = tamed(matrix, (-2, -1), dtype)[0].to(dtype)
    x = x.mT if tall else x
    # One matrix takes its norm as `torch.optim.Muon` does, bit for bit.
    length = x.norm() if x.ndim == 2 else x.norm(dim=(-2, -1), keepdim=True)
    x = x / length.clamp(min=eps)
    for _ in range(steps):
        x = iterated(x, coefficients)
    return (x.mT if tall else x).to(matrix.dtype)


def settings(given: bool | Mapping[str, Any] | NewtonSchulz | None) -> dict[str, Any] | None:
    """An option `orthogonalize` as plain values: None, or the fields of `NewtonSchulz`."""
    if given is None or given is False:
        return None
    if not (given is True or isinstance(given, Mapping | NewtonSchulz)):
        raise ConfigError(f"orthogonalize must be a bool or fields of NewtonSchulz, got {given!r}")
    made = NewtonSchulz(**({} if given is True else dict(given)))
    for name in ("lr", "momentum"):
        if getattr(made, name) != NewtonSchulz.model_fields[name].default:
            raise ConfigError(f"orthogonalize has no {name}, got {getattr(made, name)}; set the optimiser's own")
    return made.model_dump()


def orthogonalised(matrix: Tensor, options: Mapping[str, Any] | None) -> Tensor:
    """NS(matrix) by `settings`, of the matrix's own length with `rescale`; None leaves it."""
    if options is None:
        return matrix
    found = newton_schulz(matrix, POLYNOMIALS[options["polynomial"]], options["steps"], options["eps"])
    if options["rescale"]:
        small, size = tamed(matrix, (-2, -1), matrix.dtype)
        found = found * (size * (small.norm() / math.sqrt(min(matrix.shape))))
    return found


def muon_steps(matrices: list[Tensor], group: Group) -> list[Tensor]:
    """NS of each matrix by a group's `ns_coefficients`, `ns_steps`, `eps` and `ns_dtype`.

    Small matrices of one shape go together, because a call costs more than their arithmetic.
    """
    given = group["ns_coefficients"]
    coefficients = POLYNOMIALS[given] if isinstance(given, str) else given
    dtype = getattr(torch, group["ns_dtype"]) if group["ns_dtype"] else None
    arguments = coefficients, group["ns_steps"], group["eps"], dtype
    together: dict[Any, list[int]] = {}
    for i, u in enumerate(matrices):
        joins = u.numel() < SMALL and group["foreach"] is not False
        together.setdefault(u.shape if joins else i, []).append(i)
    found = dict[int, Tensor]()
    for members in together.values():
        if len(members) == 1:
            found[members[0]] = newton_schulz(matrices[members[0]], *arguments)
        else:
            joined = newton_schulz(torch.stack([matrices[i] for i in members]), *arguments)
            found.update(zip(members, joined, strict=True))
    return [found[i] for i in range(len(matrices))]


def adjustment(how: str, rows: int, columns: int) -> float:
    """What lr is multiplied by: the root of max(1, rows / columns), or 0.2 of the longer side's."""
    if how == "original":
        return math.sqrt(max(1, rows / max(1, columns)))
    return 0.2 * math.sqrt(max(rows, columns)) if how == "match_rms_adamw" else 1.0


def check_muon_steps(group: Group) -> None:
    """Refuses options that `muon_steps` and `adjustment` cannot take."""
    given = group["ns_coefficients"]
    if isinstance(given, str):
        check_choice(group, "ns_coefficients", tuple(POLYNOMIALS))
    elif not (isinstance(given, tuple | list) and len(given) == 3 and all(map(_is_finite, given))):
        raise ConfigError(f"ns_coefficients must be three numbers or one of {list(POLYNOMIALS)}, got {given}")
    check_count(group, "ns_steps", 99)
    check_number(group, "eps")
    if not group["eps"]:
        raise ConfigError("eps must be above 0: a zero matrix is divided by it")
    if isinstance(group["ns_dtype"], torch.dtype):
        group["ns_dtype"] = str(group["ns_dtype"]).removeprefix("torch.")
    check_choice(group, "ns_dtype", (None, *DTYPES))
    group["adjust_lr_fn"] = group["adjust_lr_fn"] or "original"
    check_choice(group, "adjust_lr_fn", ("original", "match_rms_adamw", "none"))


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
