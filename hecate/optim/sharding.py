"""Sharded parameters: a process's own part, state laid out alike, and whether rows are whole.

`DTensor` is imported only where one is met: plain training does not wait for torch.distributed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hecate.distributed import is_sharded
from hecate.errors import ConfigError

__all__ = ["agreed", "like", "local", "rows_are_whole"]


def local(value: Any) -> Tensor:
    """This process's own part of a tensor, without communication; the tensor itself if whole."""
    if not is_sharded(value):
        return value
    if any(placement.is_partial() for placement in value.placements):
        raise ConfigError(
            f"a gradient is placed {value.placements}: its parts are not summed yet; redistribute it to the "
            "placements of its parameter before step"
        )
    return value.to_local()


def agreed(params: list[Any], bad: set[Tensor]) -> set[Tensor]:
    """The params that are bad on any process with a part of them; all processes give them in the same order.

    One reduction of a flag for each parameter (for a mesh of several dimensions: along each), and none where nothing is
    sharded.
    """
    meshes = dict.fromkeys(p.device_mesh for p in params if is_sharded(p))
    if not meshes or torch.compiler.is_compiling():
        return bad
    from torch import distributed

    device = next(iter(meshes)).device_type
    flags = torch.tensor([p in bad for p in params], dtype=torch.int32, device=device)
    for group in dict.fromkeys(group for mesh in meshes for group in mesh.get_all_groups()):
        distributed.all_reduce(flags, distributed.ReduceOp.MAX, group)
    return {p for p, flag in zip(params, flags.tolist(), strict=True) if flag}


def like(p: Any, mine: Tensor) -> Tensor:
    """`mine`, this process's rows, as a tensor placed as `p`: first dimension as p's."""
    if not is_sharded(p):
        return mine
    from torch.distributed.tensor import DTensor

    shape = torch.Size((p.shape[0], *mine.shape[1:]))
    stride = torch.empty(shape, device="meta").stride()
    mesh, placements = p.device_mesh, p.placements
    return DTensor.from_local(mine, mesh, placements, run_check=False, shape=shape, stride=stride)


def rows_are_whole(p: Any, matrix: str) -> bool:
    """True if each row of p's matrix lies on one process."""
    if not is_sharded(p):
        return True
    along = range(p.ndim - 1) if matrix == "last" else range(min(1, p.ndim - 1))
    return all(x.is_replicate() or any(x.is_shard(dim) for dim in along) for x in p.placements)
