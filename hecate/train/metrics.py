"""metrics.jsonl: one JSON object per line, appended and safe against a killed writer."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from hecate.errors import ConfigError

Record = dict[str, Any]


class MetricsWriter:
    """Appends records; with `tensorboard` also writes their numbers as scalars."""

    def __init__(self, path: Path, tensorboard: Path | None = None) -> None:
        self._board = _board(tensorboard) if tensorboard else None
        _drop_partial_line(path)
        self._file = path.open("a", encoding="utf-8")

    def write(self, record: Record) -> None:
        """One line, flushed, so that a reader never waits for it."""
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()
        if self._board is not None and "step" in record:
            for name, value in record.items():
                if isinstance(value, float):
                    self._board.add_scalar(f"{record['event']}/{name}", value, record["step"])

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()
        if self._board is not None:
            self._board.close()


def read_metrics(path: Path) -> list[Record]:
    """The records of the run as it stands: those that a later resume has undone are left out."""
    records: list[Record] = []
    if not path.exists():
        return records
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            record = json.loads(line)
        except ValueError:  # the last line of a killed writer
            continue
        if record.get("event") == "resume":
            records = [r for r in records if r.get("step", 0) <= record["step"]]
        records.append(record)
    return records


def _drop_partial_line(path: Path) -> None:
    if not path.exists():
        return
    data = path.read_bytes()
    whole = data.rfind(b"\n") + 1
    if whole < len(data):
        os.truncate(path, whole)


def _board(folder: Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise ConfigError(
            "needs TensorBoard: install hecate[track] or leave it false", ("tensorboard",)
        ) from None
    return SummaryWriter(str(folder))
