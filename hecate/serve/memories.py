"""A served model's memory of each user: one file, replaced whole whenever an answer is complete."""

from __future__ import annotations

import os
from hashlib import sha256
from pathlib import Path
from typing import Any

from hecate import states
from hecate.checks import readable
from hecate.errors import ConfigError, shorten
from hecate.files import TEMPORARY, lock, make_folder, refusing, sync
from hecate.serve.parked import ParkedDtype, parking

MAX_BYTES = 4 << 30
"""Bytes of all files of a folder, above which no new user is remembered."""


class Memories:
    """A folder with a state for each user. [SERVE-USER-D1]

    Files are named by a hash of the user, never by the user's text, and are of one model: those of another are refused.
    Whoever is killed while writing leaves the old file or the new one.

    Args:
        folder: made if it is not there.
        model: the `hecate.states.fingerprint` of the model.
        max_bytes: of all files; who is remembered already goes on beyond it.
        parked_dtype: "float16" writes files of half the bytes; those of the other kind are read all the same.
            [SERVE-PARK-D1]

    Raises:
        CheckpointError: the folder cannot be made.
    """

    def __init__(
        self, folder: Path | str, model: str, max_bytes: int = MAX_BYTES, *, parked_dtype: ParkedDtype | None = None
    ) -> None:
        if not isinstance(model, str):
            raise ConfigError(f"model must be what states.fingerprint(model) says, got {shorten(model)}")
        self.folder, self.model, self.max_bytes = Path(folder), model, max_bytes
        self.park, self.parked_dtype = parking(parked_dtype), parked_dtype
        with refusing(f"use {folder}", "choose another folder, or stop the server that has it"):
            make_folder(self.folder.absolute())
            self._lock = os.open(self.folder / ".lock", os.O_CREAT | os.O_RDWR, 0o600)  # as long as this process lives
            lock(self._lock, self.folder)
            for path in self.folder.glob(f"{TEMPORARY}*.safetensors-*"):  # of a writer that was killed
                path.unlink(missing_ok=True)
            self._sizes = {path.name: path.stat().st_size for path in self.folder.glob("*.safetensors")}

    def path(self, user: str) -> Path:
        """The file of a user."""
        return self.folder / f"{sha256(user.encode('utf-8', 'surrogatepass')).hexdigest()}.safetensors"

    @property
    def bytes(self) -> int:
        """Size of all files."""
        return sum(self._sizes.values())

    def __len__(self) -> int:
        return len(self._sizes)

    def close(self) -> None:
        """Leaves the folder to another process."""
        os.close(self._lock)

    def check_room(self, user: str, size: int) -> None:
        """Refuses a user who is not remembered yet where a file of so many bytes is too much.

        Raises:
            ConfigError: says how much there is.
        """
        if self.path(user).name not in self._sizes and self.bytes + size > self.max_bytes:
            raise ConfigError(
                f"memories have {readable(self.bytes)} of {readable(self.max_bytes)}, and one of {readable(size)} more "
                "is not kept; delete some (DELETE /v1/memories/USER), or leave user out"
            )

    def load(self, user: str) -> Any:
        """The state that was saved last; None of a user who is not remembered.

        Raises:
            CheckpointError: a file that is damaged or of another model.
        """
        path = self.path(user)
        return states.unpark(states.load(path, model=self.model)) if path.exists() else None

    def save(self, user: str, state: Any) -> None:
        """Replaces the user's file.

        Raises:
            CheckpointError: it cannot be written; the old one is still there.
        """
        path = self.path(user)
        states.save(self.park(state), path, self.model)
        self._sizes[path.name] = path.stat().st_size

    def delete(self, user: str) -> bool:
        """Forgets a user; False where nothing was remembered.

        Raises:
            CheckpointError: the file cannot be deleted.
        """
        path = self.path(user)
        with refusing(f"delete {path}"):
            if not path.exists():
                return False
            path.unlink()
            sync(self.folder)
        self._sizes.pop(path.name, None)
        return True
