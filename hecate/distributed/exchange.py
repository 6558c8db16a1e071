"""Exchange between ranks that hold pieces of one sequence, with derivatives.

Every rank has to take part in a collective, in the backward pass too: there autograd calls only what a loss depends on.
So each result here comes with an anchor, a zero that depends on it, which the caller adds to what it returns.
`torch.distributed` is imported where it is used: one process never needs it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from hecate.errors import ConfigError
from hecate.states import with_tensors

AXES = 8  # most axes of a tensor that is sent
There = Callable[..., tuple[Tensor, ...]]  # what is exchanged in the forward pass
Back = Callable[..., Sequence[Tensor | None]]  # the gradients of what was sent, from those of what was received


@dataclass(frozen=True, eq=False)
class Ranks:
    """The ranks of a process group in order."""

    group: Any
    rank: int
    size: int

    @classmethod
    def of(cls, group: Any) -> Self:
        """The ranks of a group of which this process is a member."""
        import torch.distributed as dist

        rank = dist.get_rank(group)
        if rank < 0:
            raise ConfigError("group must be one of which this process is a member")
        return cls(group, rank, dist.get_world_size(group))

    def __deepcopy__(self, memo: object) -> Self:
        return self  # a copy of a model is in the same group

    @property
    def last(self) -> bool:
        """True if this rank holds the last piece."""
        return self.rank == self.size - 1


def anchor_of(*tensors: Any) -> Tensor | float:
    """A 0 whose graph leads to each floating point tensor; NaN in them does not reach it."""
    empty = [item.flatten()[:0].sum() for item in tensors if isinstance(item, Tensor) and item.is_floating_point()]
    return sum(empty, torch.zeros(())) if len(empty) > 1 else empty[0] if empty else 0.0


class _Exchange(torch.autograd.Function):
    """An exchange of tensors, and that of their gradients in the backward pass."""

    @staticmethod
    def forward(ctx: Any, there: There, back: Back, handle: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.back = back
        ctx.save_for_backward(handle)
        received = there(*tensors)
        ctx.mark_non_differentiable(*[item for item in received if not item.is_floating_point()])
        return received

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        _begin(ctx)
        return None, None, None, *ctx.back(*grads)


def _exchange(there: There, back: Back, like: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
    """`there(*tensors)`, with gradients by `back(*grads)`; on every rank, as a handle requires a gradient also where
    nothing else does. Neither function may hold the tensors."""
    handle = torch.zeros((), device=like.device, requires_grad=torch.is_grad_enabled())
    return _Exchange.apply(there, back, handle, *tensors)  # type: ignore[no-untyped-call]


def _begin(ctx: Any) -> None:
    """To be called before an exchange in a backward pass. If activations are recomputed, that has exchanges of its own,
    which reading a saved tensor triggers: on every rank before this one."""
    _ = ctx.saved_tensors
    if torch.is_grad_enabled():
        raise ConfigError(
            "a sequence over several ranks has first derivatives only: create_graph=True would lose what they tell "
            "each other; take second derivatives in one process"
        )


def _collective(now: str, before: str) -> Any:
    """A collective of torch.distributed, by the name of newer or of older versions."""
    import torch.distributed as dist

    return getattr(dist, now, None) or getattr(dist, before)


# One tensor of every rank.


def _all_gather(mine: Tensor, ranks: Ranks) -> Tensor:
    out = mine.new_empty(ranks.size, *mine.shape)
    if mine.numel():
        _collective("all_gather_single", "all_gather_into_tensor")(
            out.view(-1), mine.contiguous().view(-1), group=ranks.group
        )
    return out


def gather(mine: Tensor, ranks: Ranks) -> Tensor:
    """`[ranks, ...]` of tensors of one shape; the gradient of each is summed over all ranks and sent to its rank."""
    if not mine.is_floating_point():
        return _all_gather(mine, ranks)

    def back(grad: Tensor) -> list[Tensor]:
        part = torch.empty_like(grad[0], memory_format=torch.contiguous_format)
        if part.numel():
            scatter = _collective("reduce_scatter_single", "reduce_scatter_tensor")
            scatter(part.view(-1), grad.contiguous().view(-1), group=ranks.group)
        return [part]

    return _exchange(lambda x: (_all_gather(x, ranks),), back, mine, mine)[0]


def lengths_of(length: int, ranks: Ranks, device: torch.device) -> list[int]:
    """The length of every rank's piece."""
    return _all_gather(torch.tensor([length], device=device), ranks).flatten().tolist()


def joined(mine: Tensor, lengths: list[int], ranks: Ranks) -> Tensor:
    """A mask `[B, T]` of the whole sequence, from the masks of all pieces."""
    padded = mine.new_zeros(mine.shape[0], max(lengths), dtype=torch.uint8)
    padded[:, : mine.shape[1]] = mine
    whole = _all_gather(padded, ranks)
    return torch.cat([part[:, :length] for part, length in zip(whole, lengths, strict=True)], 1).to(mine.dtype)


# Tokens in exchange for heads.


def _all_to_all(x: Tensor, ranks: Ranks, lengths: list[int], there: bool) -> Tensor:
    import torch.distributed as dist

    tokens, (batch, _, heads, width) = lengths[ranks.rank], x.shape
    if there:
        parts, some = x.chunk(ranks.size, 2), heads // ranks.size
        shapes = [(batch, length, some, width) for length in lengths]
    else:
        parts = x.split(lengths, 1)
        shapes = [(batch, tokens, heads, width)] * ranks.size
    sent = torch.cat([part.reshape(-1) for part in parts])
    sizes = [torch.Size(shape).numel() for shape in shapes]
    got = x.new_empty(sum(sizes))
    dist.all_to_all_single(got, sent, sizes, [part.numel() for part in parts], group=ranks.group)
    blocks = [part.view(shape) for part, shape in zip(got.split(sizes), shapes, strict=True)]
    return torch.cat(blocks, 1 if there else 2)


def swap(x: Tensor, ranks: Ranks, lengths: list[int], *, there: bool) -> Tensor:
    """`[B, own length, H, D]` -> `[B, T, H / ranks, D]`, all tokens of some heads; or back."""

    def moved(x: Tensor, there: bool) -> tuple[Tensor]:
        return (_all_to_all(x, ranks, lengths, there),)

    return _exchange(partial(moved, there=there), partial(moved, there=not there), x, x)[0]


# From rank to rank.


def _give(tensors: list[Tensor], ranks: Ranks, to: int, *, shaped: bool) -> None:
    import torch.distributed as dist

    if shaped and tensors:
        dist.send(_sizes(tensors), group=ranks.group, group_dst=to)
    for item in tensors:
        if item.numel():
            dist.send(item.detach().contiguous(), group=ranks.group, group_dst=to)


def _take(like: list[Tensor], ranks: Ranks, source: int, *, shaped: bool) -> list[Tensor]:
    """Receives what `_give` sent: as many tensors as these, of their dtypes, and unless `shaped` of their shapes."""
    import torch.distributed as dist

    shapes = [list(item.shape) for item in like]
    if shaped and like:
        sizes = torch.empty(len(like), AXES + 1, dtype=torch.int64, device=like[0].device)
        dist.recv(sizes, group=ranks.group, group_src=source)
        shapes = _shapes(sizes)
    tensors = [item.new_empty(shape) for item, shape in zip(like, shapes, strict=True)]
    for item in tensors:
        if item.numel():
            dist.recv(item, group=ranks.group, group_src=source)
    return tensors


def _sizes(tensors: list[Tensor]) -> Tensor:
    sizes = [[item.dim(), *item.shape, *[0] * (AXES - item.dim())] for item in tensors]
    return torch.tensor(sizes, device=tensors[0].device)


def _shapes(sizes: Tensor) -> list[list[int]]:
    return [row[1 : 1 + row[0]] for row in sizes.tolist()]


def receive(like: Any, ranks: Ranks) -> tuple[Any, Tensor | float]:
    """The state that the rank before sends, a pytree like `like` except for shapes, and its anchor."""
    leaves, spec = pytree.tree_flatten(like)
    tensors = [item.detach() for item in leaves if isinstance(item, Tensor)]
    if not tensors:
        return like, 0.0
    floats = [item.is_floating_point() for item in tensors]

    def back(*grads: Tensor) -> list[None]:
        floating = [grad for grad, is_float in zip(grads, floats, strict=True) if is_float]
        _give(floating, ranks, ranks.rank - 1, shaped=False)
        return []

    received = _exchange(lambda: tuple(_take(tensors, ranks, ranks.rank - 1, shaped=True)), back, tensors[0])
    return with_tensors(leaves, spec, received), anchor_of(*received)


def send(state: Any, ranks: Ranks) -> Tensor | float:
    """Sends a state to the next rank, and returns its anchor."""
    tensors = [item for item in pytree.tree_leaves(state) if isinstance(item, Tensor)]
    if not tensors:
        return 0.0
    device, like = tensors[0].device, [torch.empty_like(item, device="meta") for item in tensors]

    def there(*given: Tensor) -> tuple[Tensor]:
        _give(list(given), ranks, ranks.rank + 1, shaped=True)
        return (torch.zeros((), device=device),)

    def back(_: Tensor) -> list[Tensor | None]:
        floating = [torch.empty_like(item, device=device) for item in like if item.is_floating_point()]
        incoming = iter(_take(floating, ranks, ranks.rank + 1, shaped=False))
        return [next(incoming) if item.is_floating_point() else None for item in like]

    return _exchange(there, back, tensors[0], *tensors)[0]


def from_last(state: Any, ranks: Ranks, *, alike: bool) -> Any:
    """The last rank's state on every rank, `alike` if all ranks have one of the same shapes; its gradients flow on the
    last rank alone."""
    import torch.distributed as dist

    leaves, spec = pytree.tree_flatten(state)
    tensors = [item for item in leaves if isinstance(item, Tensor)]
    if not tensors:
        return state
    shapes = [list(item.shape) for item in tensors]
    if not alike:
        sizes = _sizes(tensors)
        dist.broadcast(sizes, group=ranks.group, group_src=ranks.size - 1)
        shapes = _shapes(sizes)
    copies: list[Tensor] = []
    for item, shape in zip(tensors, shapes, strict=True):
        copies.append(item.detach().contiguous() if ranks.last else item.new_empty(shape))
        if copies[-1].numel():
            dist.broadcast(copies[-1], group=ranks.group, group_src=ranks.size - 1)
    return state if ranks.last else with_tensors(leaves, spec, copies)
