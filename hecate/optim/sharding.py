"""Sharded parameters: a process's own part, state laid out alike, and whole rows where needed."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from hecate.errors import ConfigError


def is_sharded(value: Tensor) -> bool:
    """Whether a tensor is spread over processes, or at least declared to be."""
    return isinstance(value, DTensor)


def local(value: Tensor) -> Tensor:
    """This process's own part of a tensor, without communication; the tensor itself if whole."""
    if not isinstance(value, DTensor):
        return value
    if any(isinstance(placement, Partial) for placement in value.placements):
        raise ConfigError(
            f"a gradient is placed {value.placements}: its parts are not summed yet; "
            "redistribute it to the placements of its parameter before step"
        )
    return value.to_local()


def whole(value: Tensor) -> Tensor:
    """All of a tensor, gathered from every process; the tensor itself if it is whole."""
    return value.full_tensor().detach() if isinstance(value, DTensor) else value


def put_back(value: Tensor, found: Tensor) -> None:
    """Writes this process's part of `found`, the whole of a sharded tensor's new value."""
    if isinstance(value, DTensor):
        everywhere = [Replicate()] * value.device_mesh.ndim
        spread = DTensor.from_local(found, value.device_mesh, everywhere, run_check=False)
        value.to_local().detach().copy_(spread.redistribute(placements=value.placements).to_local())


def like(p: Tensor, mine: Tensor) -> Tensor:
    """`mine`, this process's rows, as a tensor placed as `p`: first dimension as p's."""
    if not isinstance(p, DTensor):
        return mine
    shape = torch.Size((p.shape[0], *mine.shape[1:]))
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        mine, p.device_mesh, p.placements, run_check=False, shape=shape, stride=stride
    )


def is_spread(p: Tensor) -> bool:
    """Whether processes hold different parts of p."""
    return isinstance(p, DTensor) and not all(isinstance(x, Replicate) for x in p.placements)


def rows_are_whole(p: Tensor, matrix: str) -> bool:
    """Whether each row of p's matrix lies on one process."""
    if not isinstance(p, DTensor):
        return True
    along = range(p.ndim - 1) if matrix == "last" else range(min(1, p.ndim - 1))
    return all(
        isinstance(placement, Replicate)
        or (isinstance(placement, Shard) and placement.dim in along)
        for placement in p.placements
    )
