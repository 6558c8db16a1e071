"""Saving checkpoints while a run goes on: at once, or written behind it from a copy of the moment. [CKPT-ASYNC-D1]"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from torch import Tensor

from hecate.train.checkpoint import (
    Checkpoint,
    Skipped,
    aliases_of,
    copies,
    newest_checkpoint,
    prune_checkpoints,
    write_checkpoint,
)
from hecate.train.sharded import Restorable, Team, newest_for, staged, write_sharded

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class Saver:
    """Writes a run's checkpoints into `folder` and keeps the `keep` newest there, and the best.

    `behind`: `save` returns once all is copied to memory, and a thread writes the copy; the next save, `wait` and the
    end of the `with` block wait for it. What fails there is raised by whichever of them comes first.
    `group`: a gloo group of its own (`torch.distributed.new_group(backend="gloo")`) where many processes save together.
    Leaving the block with an error waits, too, and adds what failed to it as a note.
    """

    def __init__(self, folder: Path, keep: int, *, behind: bool = False, group: ProcessGroup | None = None) -> None:

        self.folder, self.keep = folder, keep
        self._team = None if group is None else Team(group)
        self._thread = ThreadPoolExecutor(1, "checkpoint") if behind else None
        self._pending: Future[None] | None = None

    def save(self, step: int, checkpoint: Checkpoint) -> None:
        """Saves what the tensors and facts are now. Raises `CheckpointError`, of the former save as well."""
        self.wait()
        if self._team is None:
            aliases = aliases_of(checkpoint.tensors)
            stored = copies(checkpoint.tensors, aliases)
        else:
            stored, aliases = staged(checkpoint.tensors, self._team)
        given = step, stored, aliases, copy.deepcopy(checkpoint.facts)
        if self._thread is None:
            self._write(*given)
        else:
            self._pending = self._thread.submit(self._write, *given)

    def newest(self, run: Restorable) -> tuple[Path, Checkpoint, list[Skipped]] | None:
        """As `newest_checkpoint`; many processes find the same one together, its tensors placed as the run's."""
        return newest_checkpoint(self.folder) if self._team is None else newest_for(run, self.folder, self._team.group)

    def wait(self) -> None:
        """Returns once what was saved is on disk. Raises `CheckpointError` where it could not be written."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def _write(
        self, step: int, stored: Mapping[str, Tensor], aliases: Mapping[str, str], facts: Mapping[str, Any]
    ) -> None:
        if self._team is None:
            write_checkpoint(self.folder, step, stored, aliases, facts)
        else:
            write_sharded(self.folder, step, stored, aliases, facts, self._team)
        if self._team is None or self._team.rank == 0:
            prune_checkpoints(self.folder, self.keep, upto=step)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.wait()
        except Exception as late:
            if error is None:
                raise
            error.add_note(f"and the checkpoint written behind the run failed: {late}")
        finally:
            if self._thread is not None:
                self._thread.shutdown()
