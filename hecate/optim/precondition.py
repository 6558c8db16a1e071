"""Preconditioners of an update: a diagonal one, and a Kronecker-factored one."""

from __future__ import annotations

import torch
from torch import Tensor

from hecate.errors import NonFiniteError
from hecate.optim.tensors import Bulk

SQUARE, ROWS, COLUMNS = "square", "kronecker_rows", "kronecker_columns"
WIDEST = 8192  # the largest side of a matrix whose factors are still kept


def diagonal(
    bulk: Bulk, squares: list[Tensor], updates: list[Tensor], retain: float, eps: float
) -> tuple[list[Tensor], list[Tensor]]:
    """v <- retain v + (1 - retain) u^2, u / (sqrt(v) + eps): the updates, then the v.

    v is overwritten, unless autograd is to follow it. [OPT-PRE-D1]
    """
    if bulk.differentiable:
        pairs = zip(squares, updates, strict=True)
        squares = [retain * v + (1 - retain) * u * u for v, u in pairs]
        return [u / (v.sqrt() + eps) for u, v in zip(updates, squares, strict=True)], squares
    if bulk.foreach:
        torch._foreach_mul_(squares, retain)
        torch._foreach_addcmul_(squares, updates, updates, 1 - retain)
        roots = torch._foreach_sqrt(squares)
        torch._foreach_add_(roots, eps)
        return list(torch._foreach_div(updates, roots)), squares
    for v, u in zip(squares, updates, strict=True):
        v.mul_(retain).addcmul_(u, u, value=1 - retain)
    return [u / v.sqrt().add_(eps) for u, v in zip(updates, squares, strict=True)], squares


def kronecker(
    rows: Tensor, columns: Tensor, update: Tensor, retain: float, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """L <- retain L + (1 - retain) U U^T, R alike with U^T U, L^(-1/4) U R^(-1/4): update, L, R.

    Shapes: U `[r, c]`, L `[r, r]`, R `[c, c]`.
    References: Shampoo (Gupta et al., 2018, arXiv 1802.09568). [OPT-PRE-D2]
    """
    rows = retain * rows + (1 - retain) * (update @ update.mT)
    columns = retain * columns + (1 - retain) * (update.mT @ update)
    return root(rows, eps) @ update @ root(columns, eps), rows, columns


def root(factor: Tensor, eps: float) -> Tensor:
    """(A + eps max(eigenvalue))^(-1/4) of a positive semi-definite A."""
    try:
        values, vectors = torch.linalg.eigh(factor)
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
        raise NonFiniteError(
            f"precondition 'kronecker' met statistics without eigenvalues, {list(factor.shape)}: "
            f"squares of an update left {factor.dtype}, or a NaN came by on_nonfinite='propagate'; "
            "clip gradients, or use precondition 'diagonal'"
        ) from None
    values = values.clamp(min=0)
    damped = values + eps * values[-1:] + torch.finfo(values.dtype).tiny
    return (vectors * damped.pow(-0.25)) @ vectors.mT
