"""The corpus that every Python carries."""

from __future__ import annotations

import hashlib
import importlib
import sys
import sysconfig
from pathlib import Path
from typing import Literal

from pydantic import Field

from hecate.data.base import DataConfig
from hecate.data.ngram import BYTES
from hecate.data.text import TextSource
from hecate.errors import DataError


class Bundled(DataConfig):
    """bundled: bytes of Python's own language reference and standard library.

    Needs no network and no file of ours: the topics of `pydoc_data.topics` (the text behind `help()`) and the top-level
    `.py` files of the standard library, found at run time. Documents longer than 64 KiB are cut there, the order is
    that of the SHA-256 of their names (prose and code mixed, so that the held-out tail resembles the rest), and the
    whole is cut at `max_bytes`.

    Shapes: tokens, targets `[B, T]`; every position is labelled with the next byte.
    Cost: at most `max_bytes` in memory.
    Warning: another Python version ships other texts, so bits per byte compare only within one version; the report
    prints the version and the SHA-256 of the corpus.
    References: the Python documentation and standard library, PSF licence. [DATA-BUNDLED-D1]
    """

    kind: Literal["bundled"] = "bundled"
    validation: float = Field(0.1, gt=0, lt=1)
    max_bytes: int = Field(4 << 20, ge=1 << 12, le=64 << 20)

    def vocabulary(self) -> int:
        return BYTES

    def load(self) -> TextSource:
        """Collects the documents; `DataError` if this Python carries neither of the two."""
        documents = {**_topics(), **_library()}
        if not documents:
            raise DataError(
                "this Python ships neither pydoc_data.topics nor standard library sources; give text of your own with "
                "--set data.kind=text --set 'data.paths=[FILE_OR_FOLDER]'"
            )
        chosen, room = [], self.max_bytes
        for name in sorted(documents, key=lambda name: hashlib.sha256(name.encode()).digest()):
            if room <= 0:
                break
            chosen.append(documents[name][: min(_DOCUMENT_BYTES, room)])
            room -= len(chosen[-1]) + 1
        version = ".".join(map(str, sys.version_info[:3]))
        return TextSource(chosen, self.validation, {"documents": len(chosen), "python": version})


_DOCUMENT_BYTES = 64 << 10


def _topics() -> dict[str, bytes]:
    try:
        topics = importlib.import_module("pydoc_data.topics").topics
    except (ImportError, AttributeError):
        return {}
    return {f"topic/{name}": str(text).encode() for name, text in topics.items()}


def _library() -> dict[str, bytes]:
    folder = sysconfig.get_paths().get("stdlib", "")
    found: dict[str, bytes] = {}
    for path in sorted(Path(folder).glob("*.py")) if folder else []:
        try:
            found[f"library/{path.name}"] = path.read_bytes()
        except OSError:  # an unreadable module is one document fewer
            continue
    return found
