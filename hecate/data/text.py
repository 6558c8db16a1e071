"""Bytes of files, folders and globs."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from hecate.data.base import Batch, DataConfig, Source, as_batch, stream
from hecate.data.ngram import BYTES, fit_ngrams
from hecate.errors import DataError
from hecate.sizes import Count

SEPARATOR = b"\n"
_GLOB = frozenset("*?[")


class Text(DataConfig):
    """text: bytes of files; the last `validation` of them held out.

    `paths` are files, folders (every file below whose suffix is in `suffixes`) or globs, relative to the working
    directory. Files are sorted by path and joined by a newline; the contiguous tail of the whole is the validation
    split, so no byte is in both. Token ids are bytes, and there is no tokeniser.

    Shapes: tokens, targets `[B, T]`; every position is labelled with the next byte.
    Cost: the bytes are held in memory once; `max_bytes` refuses a corpus that is larger than expected.
    References: the split and the random windows are those of common character-level tutorials. [DATA-TEXT-D1]
    """

    kind: Literal["text"] = "text"
    paths: Annotated[tuple[str, ...], Field(strict=False, min_length=1)]
    suffixes: Annotated[tuple[str, ...], Field(strict=False)] = (".txt", ".md", ".rst", ".py")
    validation: float = Field(0.1, gt=0, lt=1)
    max_bytes: Count = Field(64 << 20, ge=2)

    def vocabulary(self) -> int:
        return BYTES

    def load(self) -> TextSource:
        """Reads every file; `DataError` names what is missing, empty, unreadable or too large."""
        documents, total = [], 0
        for path in self._files():
            try:
                total += path.stat().st_size
                if total > self.max_bytes:
                    raise DataError(
                        f"the corpus exceeds max_bytes={self.max_bytes} at {path}; raise data.max_bytes or name fewer "
                        "files"
                    )
                documents.append(path.read_bytes())
            except OSError as error:
                raise DataError(f"cannot read {path}: {error.strerror or error}") from None
        return TextSource(documents, self.validation, {"files": len(documents)})

    def _files(self) -> list[Path]:
        found: set[Path] = set()
        for text in self.paths:
            path = Path(text)
            if path.is_dir():
                matches = [p for p in path.rglob("*") if p.is_file() and p.suffix in self.suffixes]
                wanted = f"files ending in {', '.join(self.suffixes)} in folder"
            elif path.is_file():
                matches, wanted = [path], ""
            elif _GLOB & set(text):
                anchor = Path(path.anchor) if path.anchor else Path()
                pattern = str(path.relative_to(path.anchor)) if path.anchor else text
                matches, wanted = [p for p in anchor.glob(pattern) if p.is_file()], "files matching"
            else:
                matches, wanted = [], "file or folder"
            if not matches:
                raise DataError(f"no {wanted} {text!r} (working directory {Path.cwd()})")
            found.update(matches)
        return sorted(found)


class TextSource(Source):
    """A corpus of bytes with its contiguous validation tail."""

    metric = "bits_per_byte"
    vocab_size = BYTES

    def __init__(self, documents: Sequence[bytes], validation: float, facts: dict[str, str | int | float]) -> None:
        corpus = np.frombuffer(SEPARATOR.join(documents), dtype=np.uint8)
        cut = len(corpus) - max(int(len(corpus) * validation), 1)
        self.train: NDArray[np.uint8] = corpus[: max(cut, 0)]
        self.validation: NDArray[np.uint8] = corpus[max(cut, 0) :]
        self._facts = facts
        self._digest = hashlib.sha256(corpus.tobytes() + f"/{cut}".encode()).hexdigest()

    @property
    def fingerprint(self) -> str:
        return self._digest

    def train_batch(self, seed: int, step: int, batch_size: int, seq_len: int) -> Batch:
        self._check(seq_len)
        starts = stream(seed, "train", step).integers(0, len(self.train) - seq_len, size=batch_size)
        return _windows(self.train, starts, seq_len)

    def validation_batches(self, batch_size: int, seq_len: int, batches: int) -> Iterator[Batch]:
        starts = self._validation_starts(batch_size, seq_len, batches)
        for first in range(0, len(starts), batch_size):
            yield _windows(self.validation, starts[first : first + batch_size], seq_len)

    def baselines(self, batch_size: int, seq_len: int, batches: int) -> dict[str, float]:
        starts = self._validation_starts(batch_size, seq_len, batches)
        windows = self.validation[starts[:, None] + np.arange(seq_len + 1)]
        unigram, bigram = fit_ngrams(self.train).bits(windows[:, :-1].ravel(), windows[:, 1:].ravel())
        return {"uniform": 8.0, "unigram": unigram, "bigram": bigram}

    def describe(self) -> dict[str, str | int | float]:
        return {
            **self._facts,
            "training bytes": len(self.train),
            "validation bytes": len(self.validation),
            "sha256": self._digest,
        }

    def _validation_starts(self, batch_size: int, seq_len: int, batches: int) -> NDArray[np.int64]:
        """Starts of windows that share no label, spread evenly over the validation split."""
        self._check(seq_len)
        available = (len(self.validation) - 1) // seq_len
        count = min(batch_size * batches, available)
        return np.arange(count, dtype=np.int64) * available // count * seq_len

    def _check(self, seq_len: int) -> None:
        for name, part in (("training", self.train), ("validation", self.validation)):
            if len(part) <= seq_len:
                raise DataError(
                    f"the {name} split has {len(part)} bytes, a window of seq_len={seq_len} needs {seq_len + 1}; use "
                    "more text, another data.validation or a smaller budget.seq_len"
                )


def _windows(text: NDArray[np.uint8], starts: NDArray[np.int64], seq_len: int) -> Batch:
    windows = text[starts[:, None] + np.arange(seq_len + 1)].astype(np.int64)
    return as_batch(windows[:, :-1], windows[:, 1:])
