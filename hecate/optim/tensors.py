"""Tensors of a step: their matrices, the dtype of state, shards, batches of small tensors, arithmetic on lists.

`DTensor` is imported only where one is met: plain training does not wait for torch.distributed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain, repeat
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors
from torch.autograd.graph import increment_version

from hecate.distributed import is_sharded
from hecate.engine import lies, load_kernels, share_out
from hecate.errors import ConfigError
from hecate.formula import Text
from hecate.tape import is_traced

Tensors = list[Tensor]
State = dict[str, Tensor]
SMALL = 1 << 14  # numbers; smaller tensors are joined, because a call costs more than a copy
PIECE, SHARE = 1 << 16, 1 << 20  # numbers in a piece for kernels, and numbers that are worth another thread


def state_dtype(p: Tensor, option: str) -> torch.dtype:
    """float32 or better (`"full"`), or the parameter's own (`"parameter"`)."""
    return p.dtype if option == "parameter" else torch.promote_types(p.dtype, torch.float32)


def as_matrix(x: Tensor, view: str) -> Tensor:
    """x `[...]` as `[rows, columns]`, without a copy where its memory allows."""
    if x.ndim == 2:
        return x
    if x.ndim < 2:
        return x.reshape(1, -1)
    return x.flatten(1) if view == "flatten" else x.reshape(-1, x.shape[-1])


def largest(x: Tensor, dim: int | tuple[int, ...]) -> Tensor:
    """The largest |entry| along dim, kept as a dimension of 1; where all are zero, 1."""
    if not x.numel():
        return x.detach().sum(dim, keepdim=True) + 1
    size = x.detach().abs().amax(dim, keepdim=True)
    return torch.where(size > 0, size, 1)


def tamed(x: Tensor, dim: int | tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x / s and s: the largest |entry| along dim where its fourth power leaves dtype, else 1."""
    size = largest(x, dim)
    size = torch.where(size > torch.finfo(dtype).max ** 0.25, size, 1)
    return x / size, size


def outline(p: Tensor) -> Tensor:
    """A tensor of p's shape without data, for views that an unevenly sharded p would refuse."""
    return torch.empty(p.shape, device="meta")


# Sharded parameters.


def local(value: Any) -> Tensor:
    """This process's shard of a tensor, without communication; the tensor itself if it is whole."""
    if not is_sharded(value):
        return value
    if any(placement.is_partial() for placement in value.placements):
        cure = "redistribute it to the placements of its parameter before step"
        raise ConfigError(f"a gradient is placed {value.placements}: its parts are not summed yet; {cure}")
    return value.to_local()


def agreed(params: list[Any], bad: set[Tensor]) -> set[Tensor]:
    """The params that are bad on any process with a part of them; all processes pass `params` in the same order.

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
    """This process's rows `mine` as a tensor placed like `p`, with p's first dimension."""
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


# Lists.


def sum_is_finite(tensors: list[Tensor]) -> bool:
    """True if the sum of all entries is finite: then every entry is; the converse may fail.

    The tensors are on one device.
    """
    if (pieces := Pieces.of(tensors)) is not None:
        return pieces.are_finite()
    sums = [x.sum() for x in tensors if x.numel() >= SMALL]
    small = [x for x in tensors if x.numel() < SMALL]
    if small:
        sums.append(_flatten_dense_tensors(small).sum())
    total = sums[0] if len(sums) == 1 else torch.stack(sums).sum()
    return math.isfinite(total.item())


class Pieces:
    """Lists of contiguous tensors of equal sizes and one float type on a CPU, cut into pieces for kernels.

    Attributes:
        places: address of each piece of each list, int64 `[lists, pieces]`.
        sizes: numbers of each piece.
    """

    def __init__(self, kernels: Any, lists: tuple[Tensors, ...], places: Any, sizes: Any) -> None:
        self.kernels, self.lists, self.places, self.sizes = kernels, lists, places, sizes
        self.float = np.float32 if lists[0][0].dtype == torch.float32 else np.float64

    @classmethod
    def of(cls, *lists: Tensors, widths: Sequence[int] | None = None) -> Pieces | None:
        """The pieces, with `widths` one for each row; None if kernels cannot take the tensors."""
        first = lists[0][0]
        if first.dtype not in (torch.float32, torch.float64) or not first.is_cpu or is_traced():
            return None
        sizes = [x.numel() for x in lists[0]]
        for xs in lists:
            for x, size in zip(xs, sizes, strict=True):
                if x.dtype != first.dtype or x.numel() != size or not lies(x):
                    return None
        if (kernels := load_kernels("momentum")) is None:
            return None
        places = np.array([[x.data_ptr() for x in xs] for xs in lists], np.int64)
        if not places.all():  # zeros for which torch has allocated no memory
            return None
        counts = np.array(sizes, np.int64)
        if len(lists) > 1 and _overlap(places.ravel(), np.tile(counts * first.element_size(), len(lists))):
            return None
        if widths or (max(sizes) > PIECE and torch.get_num_threads() > 1):
            cuts = -(-counts // (most := np.array(widths or PIECE, np.int64)))
            most = np.repeat(np.broadcast_to(most, cuts.shape), cuts)
            at = (np.arange(cuts.sum()) - np.repeat(cuts.cumsum() - cuts, cuts)) * most
            places = np.repeat(places, cuts, 1) + at * first.element_size()
            counts = np.minimum(np.repeat(counts, cuts) - at, most)
        return cls(kernels, lists, places, counts)

    def are_finite(self) -> bool:
        """True if all numbers of the first list are finite."""
        sums: list[float] = []
        like = np.zeros(1, self.float)

        def work(lo: int, hi: int) -> None:
            sums.append(self.kernels.finite(lo, hi, like, self.places[0], self.sizes))

        share_out(work, len(self.sizes), int(self.sizes.sum()), SHARE)
        return math.isfinite(sum(sums))

    def move(
        self, written: Text, factors: Sequence[float], hope: bool, nesterov: bool,
        scales: Mapping[int, tuple[float, float]],
    ) -> None:  # fmt: skip
        """A step of momentum, defined in `hecate.engine.cpu.momentum.mover`; `scales` has `RowMap.lengths` by width of
        rows."""
        move = self.kernels.mover(written.source)
        form, numbers = (np.array(scalars or (0.0,), self.float) for scalars in (factors, written.numbers))
        rows = np.zeros((2, len(self.sizes) if scales else 0), self.float)
        for width, scale in scales.items():
            rows[:, self.sizes == width] = np.array(scale)[:, None]

        def work(lo: int, hi: int) -> None:
            move(lo, hi, form, numbers, hope, nesterov, rows, self.places, self.sizes)

        share_out(work, len(self.sizes), int(self.sizes.sum()), SHARE)
        weights, _, *states = self.lists
        # As torch's in-place operations do, so that a graph that has saved the old values raises.
        increment_version([*weights, *chain(*states)])


def _overlap(places: Any, sizes: Any) -> bool:
    """True if spans of bytes overlap: there a kernel would read numbers that it, or another thread, has overwritten."""
    order = places.argsort()
    starts = places[order]
    return bool((starts[1:] < (starts + sizes[order])[:-1]).any())


def grouped(keys: Iterable[Any]) -> list[list[int]]:
    """Indices of keys, those of equal keys together."""
    places: dict[Any, list[int]] = {}
    for i, key in enumerate(keys):
        places.setdefault(key, []).append(i)
    return list(places.values())


def together(tensors: list[Tensor], group: dict[str, Any]) -> list[list[int]]:
    """Indices of tensors, those of equal small shapes together, because a call costs more than their arithmetic."""
    alone = group["foreach"] is False
    return grouped(i if alone or x.numel() >= SMALL else x.shape for i, x in enumerate(tensors))


def by_group(groups: list[list[int]], f: Callable[[list[int]], Iterable[Any]]) -> list[Any]:
    """Results of f on each group of indices, one for each index, in the order of indices."""
    results = dict[int, Any]()
    for members in groups:
        results.update(zip(members, f(members), strict=True))
    return [results[i] for i in range(len(results))]


class Bulk:
    """In-place arithmetic on lists of tensors: by foreach kernels, by a loop, or differentiably.

    In float32 and float64 foreach and loop compute the same numbers bit for bit, except for phi and lengths of rows,
    which kernels compute. In half precision torch's foreach kernels round factors to it on a CPU, so there only an
    explicit `foreach=True` takes them. A factor may be a tensor of one element that autograd follows; then nothing that
    autograd saved is overwritten.
    """

    def __init__(self, group: dict[str, Any], tensors: list[Tensor]) -> None:
        foreach, self.differentiable = group["foreach"], bool(group["differentiable"])
        halves = foreach is None and tensors[0].dtype.itemsize < 4
        self.foreach = not (foreach is False or self.differentiable or halves)

    def number(self, value: Any) -> Any:
        """A factor as a Python number, or the tensor itself if autograd is to follow it."""
        return value.item() if isinstance(value, Tensor) and not self.differentiable else value

    def apply(self, name: str, xs: Tensors, *operands: Any, **factor: Any) -> Tensors:
        """torch's operation `name` on each x and its operands; in place if the name ends in _."""
        if self.foreach:
            return getattr(torch, "_foreach_" + name)(xs, *operands, **factor) or xs
        rows = zip(xs, *(y if isinstance(y, list) else repeat(y) for y in operands), strict=False)
        return [getattr(x, name)(*beside, **factor) for x, *beside in rows]

    def decay(self, xs: Tensors, factor: Any) -> Tensors:
        """x <- factor x; under autograd new tensors."""
        if self.differentiable:
            return [factor * x.clone() for x in xs]  # x itself may be written to later
        return self.apply("mul_", xs, factor)

    def add(self, xs: Tensors, ys: Tensors, factor: Any = 1) -> Tensors:
        """x <- x + factor y; under autograd new tensors."""
        return self.sum(xs, ys, factor) if self.differentiable else self.apply("add_", xs, ys, alpha=factor)

    def sum(self, xs: Tensors, ys: Tensors, factor: Any) -> Tensors:
        """x + factor y, leaving both as they are."""
        if self.differentiable:
            return [x + factor * y for x, y in zip(xs, ys, strict=True)]
        return list(self.apply("add", xs, ys, alpha=factor))

    def lerp(self, xs: Tensors, ys: Tensors, weight: Any) -> Tensors:
        """x <- x + weight (y - x); under autograd new tensors."""
        if self.differentiable:
            return [x + weight * (y - x) for x, y in zip(xs, ys, strict=True)]
        return self.apply("lerp_", xs, ys, weight)

    def put(self, states: list[State], key: str, values: Tensors) -> None:
        """Puts new values into states: in place, or as new tensors under autograd."""
        for state, value in zip(states, values, strict=True):
            if self.differentiable:
                state[key] = value
            elif state[key] is not value:
                state[key].copy_(value)

    def move(
        self, params: Tensors, updates: Tensors, lr: Any, decay: Any, ratios: Any = None, step: Any = None
    ) -> None:
        """p <- (1 - lr decay) p - step ratio u; step is lr and ratios are 1 by default."""
        values = self.decay(params, 1 - lr * decay) if decay else params
        step = lr if step is None else step
        if ratios is None:
            moved = self.add(values, updates, -step)
        else:
            rows = zip(values, updates, ratios, strict=True)
            moved = [self.add([p], [u], -(step * ratio))[0] for p, u, ratio in rows]
        for p, value in zip(params, moved, strict=True):
            if p is not value:  # under autograd
                p.copy_(value)
