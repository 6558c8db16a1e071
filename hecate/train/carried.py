"""The states that rows of a batch go on with, from batch to batch and through checkpoints. [TRAIN-CARRY-D1]"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from hecate.distributed import World
from hecate.errors import CheckpointError, ConfigError

PREFIX = "carried/"
_ALONE = World.alone()


class Carried:
    """The state of every row of this process, cut off from the graph that made it; empty before the first batch.

    A step in several micro-batches, each of consecutive rows and in the order of the rows, has a state for each; a
    checkpoint has them as one, by rows, so that they can be dealt to another number of micro-batches or processes.
    """

    def __init__(self) -> None:
        self._states: list[Any] = []

    def given(self, micro: int = 0) -> Sequence[Any]:
        """The state ahead of a micro-batch, as the model's second argument; empty if there is none yet."""
        return self._states[micro : micro + 1]

    def take(self, *states: Any) -> None:
        """Takes the states after a step, one of each micro-batch."""
        if not self._states:
            for state in states:
                _check_rows(state)
        self._states = [pytree.tree_map_only(Tensor, Tensor.detach, state) for state in states]

    def tensors(self, world: World = _ALONE) -> dict[str, Tensor]:
        """The states by rows, `carried/PATH`, with the rows of all micro-batches and processes as their first axis:
        the same on every process of a world, all of which call it."""
        if not self._states:
            return {}
        leaves = [dict(_leaves(state)) for state in self._states]
        return {
            PREFIX + path: world.rows_of_all(own if len(leaves) == 1 else torch.cat([other[path] for other in leaves]))
            for path, own in leaves[0].items()
        }

    def load(
        self,
        tensors: Mapping[str, Tensor],
        model: nn.Module,
        rows: range,
        device: torch.device,
        where: str,
        micros: int = 1,
    ) -> None:
        """Takes up the states of some rows among those of a checkpoint; `CheckpointError` where they are of another
        model."""
        model.eval()
        with torch.no_grad():
            probe = torch.zeros(1, 1, dtype=torch.int64, device=device)
            _, shape = model(probe, reset_mask=torch.ones_like(probe, dtype=torch.bool))
        wanted = dict(_leaves(shape))
        saved = {name.removeprefix(PREFIX): x for name, x in tensors.items() if name.startswith(PREFIX)}
        for path in sorted(wanted.keys() ^ saved.keys()):
            side = "lacks" if path in wanted else "has an unknown"
            raise CheckpointError(
                f"{where} {side} carried state {path!r}: it is of another model, or of data.state=fresh"
            )
        for path, own in wanted.items():
            found = saved[path]
            if found.dtype != own.dtype or found.dim() != own.dim() or found.shape[0] < rows.stop:
                raise CheckpointError(
                    f"{where}: carried state {path!r} is {list(found.shape)} {found.dtype}, which is not of "
                    f"{rows.stop} rows of this model"
                )
        count = len(rows) // micros
        self._states = []
        for first in range(rows.start, rows.stop, count):
            # clone: what a model does with a state must not reach the checkpoint
            part = {path: x[first : first + count].to(device, copy=True) for path, x in saved.items()}
            self._states.append(_replaced(shape, part))


def _leaves(state: Any) -> list[tuple[str, Tensor]]:
    """Tensors of a state by path; every one has the rows as its first axis."""
    found: list[tuple[Any, Any]] = pytree.tree_flatten_with_path(state)[0]
    return [(pytree.keystr(path), leaf) for path, leaf in found if isinstance(leaf, Tensor)]


def _replaced(state: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The same tree with other tensors."""
    found, spec = pytree.tree_flatten_with_path(state)
    leaves = [tensors[pytree.keystr(path)] if isinstance(leaf, Tensor) else leaf for path, leaf in found]
    return pytree.tree_unflatten(leaves, spec)


def _check_rows(state: Any) -> None:
    """Refuses a state whose tensors are not by rows: which of it belongs to whom could not be told."""
    leaves = _leaves(state)
    for path, leaf in leaves:
        if not leaf.dim() or leaf.shape[0] != leaves[0][1].shape[0]:
            raise ConfigError(
                f"is 'carry', but the model's state has {path!r} of shape {list(leaf.shape)}, which is not by rows of "
                "the batch; write data.state=fresh",
                ("data", "state"),
            )
