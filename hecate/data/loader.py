"""The cursor of a training run over its data."""

from __future__ import annotations

from hecate.data.base import Batch, Source
from hecate.errors import DataError


class Loader:
    """Training batches in order; the whole state is five plain values. [DATA-LOADER-D1]

    The batch of a step depends on (seed, step) alone, so resuming needs no replay and no generator state.
    """

    def __init__(self, source: Source, *, seed: int, batch_size: int, seq_len: int) -> None:
        self.source, self.seed = source, seed
        self.batch_size, self.seq_len = batch_size, seq_len
        self.step = 0

    def next(self) -> Batch:
        """The batch at the cursor; advances the cursor by one."""
        batch = self.source.train_batch(self.seed, self.step, self.batch_size, self.seq_len)
        self.step += 1
        return batch

    def state_dict(self) -> dict[str, int | str]:
        """The cursor, and what must be equal for it to mean the same batches."""
        return {"step": self.step, **self._identity()}

    def load_state_dict(self, state: dict[str, int | str]) -> None:
        """Moves the cursor; refuses a cursor over other data."""
        for name, here in self._identity().items():
            if state.get(name) != here:
                raise DataError(
                    f"the saved data cursor has {name}={state.get(name)!r}, this run has {here!r}: the batches would "
                    "differ; resume with the data, seed and batch of the original run"
                )
        step = state.get("step")
        if type(step) is not int or step < 0:
            raise DataError(f"the saved data cursor has step={step!r}, which must be a count")
        self.step = step

    def _identity(self) -> dict[str, int | str]:
        return {
            "seed": self.seed,
            "batch_size": self.batch_size,
            "seq_len": self.seq_len,
            "fingerprint": self.source.fingerprint,
        }
