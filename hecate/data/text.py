"""Byte-level text from files, folders and globs, or from the sources that come with Python; n-gram baselines."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
import sysconfig
from collections.abc import Iterable, Sequence
from contextlib import suppress
from copy import copy
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from hecate.checks import Count
from hecate.data.base import Batch, DataConfig, WindowSource, as_batch, stream
from hecate.data.corpus import GLOB, files_of
from hecate.data.tokenizer import BYTES, Bytes, Tokenizer
from hecate.errors import DataError
from hecate.files import read_file, reading

SEPARATOR = b"\n"
_DOCUMENT_BYTES, _SUFFIXES = 64 << 10, (".txt", ".md", ".rst", ".py")


class _OfBytes(DataConfig):
    """A text whose tokens are its bytes."""

    def vocabulary(self) -> int:
        return BYTES

    def tokenizer(self) -> Tokenizer:
        return Bytes()


class Text(_OfBytes):
    """text: bytes of files; the last `validation` of them held out.

    `paths` are files, folders (every file below whose suffix is in `suffixes`) or globs, relative to the working
    directory. Files are sorted by path and joined by a newline; the contiguous tail of the whole is the validation
    split, so that no byte is in both. Token ids are bytes.

    Shapes: tokens, targets `[B, T]`; every position is labelled with the next byte.
    Cost: the bytes are held in memory once; `max_bytes` refuses a corpus that is larger than expected.
    References: the split and the random windows are those of common character-level tutorials. [DATA-TEXT-D1]
    """

    kind: Literal["text"] = "text"
    paths: Annotated[tuple[str, ...], Field(strict=False, min_length=1)]
    suffixes: Annotated[tuple[str, ...], Field(strict=False)] = _SUFFIXES
    validation: float = Field(0.1, gt=0, lt=1)
    max_bytes: Count = Field(64 << 20, ge=2)

    def load(self) -> TextSource:
        """Reads every file; `DataError` names what is missing, empty, unreadable or too large."""
        documents, total = [], 0
        for path in sorted({path for text in self.paths for path in self._matches(text)}):
            with reading(path, ""):
                documents.append(read_file(path, self.max_bytes - total + 1))  # whatever size it reports
            total += len(documents[-1])
            if total > self.max_bytes:
                raise DataError(
                    f"the corpus exceeds max_bytes={self.max_bytes} at {path}; raise data.max_bytes or name fewer files"
                )
        return TextSource(documents, self.validation, {"files": len(documents)})

    def _matches(self, text: str) -> list[Path]:
        matches = files_of(text, lambda path: path.suffix in self.suffixes)
        if not matches:
            what = "files matching" if GLOB & set(text) else "file or folder"
            if text and Path(text).is_dir():
                what = f"files ending in {', '.join(self.suffixes)} in folder"
            raise DataError(f"data.paths: no {what} {text!r} (working directory {Path.cwd()})")
        return matches


class TextSource(WindowSource):
    """A corpus of bytes with its contiguous validation tail."""

    metric = "bits_per_byte"
    unit = "bytes"

    def __init__(self, documents: Sequence[bytes], validation: float, facts: dict[str, str | int | float]) -> None:
        corpus = np.frombuffer(SEPARATOR.join(documents), dtype=np.uint8)
        cut = len(corpus) - max(int(len(corpus) * validation), 1)
        self.train, self.validation = corpus[: max(cut, 0)], corpus[max(cut, 0) :]
        self._facts = facts
        self.fingerprint = hashlib.sha256(corpus.tobytes() + f"/{cut}".encode()).hexdigest()

    def train_batch(self, seed: int, step: int, batch_size: int, seq_len: int, rows: range | None = None) -> Batch:
        for split in ("training", "validation"):
            self.windows_of(split, seq_len)
        starts = stream(seed, "train", step).integers(0, len(self.train) - seq_len, size=batch_size)
        return self.windows(self.train, starts if rows is None else starts[rows.start : rows.stop], seq_len)

    def windows(self, part: Any, starts: NDArray[np.int64], seq_len: int) -> Batch:
        windows = part[starts[:, None] + np.arange(seq_len + 1)].astype(np.int64)
        return as_batch(windows[:, :-1], windows[:, 1:])

    def baselines(self, batch_size: int, seq_len: int, batches: int) -> dict[str, float]:
        starts = self.held_out_starts(batch_size, seq_len, batches)
        windows = self.validation[starts[:, None] + np.arange(seq_len + 1)]
        unigram, bigram = fit_ngrams(self.train).bits(windows[:, :-1].ravel(), windows[:, 1:].ravel())
        return {"uniform": 8.0, "unigram": unigram, "bigram": bigram}

    def held_out(self) -> TextSource:
        """The same text, all of it for validation; baselines are fitted on it, too."""
        source = copy(self)
        source.train = source.validation = np.concatenate([self.train, self.validation])
        return source

    def describe(self) -> dict[str, str | int | float]:
        sizes = {"training bytes": len(self.train), "validation bytes": len(self.validation)}
        return {**self._facts, **sizes, "sha256": self.fingerprint}


class Bundled(_OfBytes):
    """bundled: bytes of Python's own language reference and standard library, and of installed packages.

    Needs neither a network nor data files: the topics of `pydoc_data.topics` (the text of `help()`) and the top-level
    `.py` files of the standard library, found at run time; and every source and documentation file (.py, .md, .rst,
    .txt) of `packages`, such as numpy or json. Documents are cut at 64 KiB, ordered by the SHA-256 of their names (this
    mixes prose and code, so that the held-out tail resembles the rest), and the whole is cut at `max_bytes`.

    Shapes: tokens, targets `[B, T]`; every position is labelled with the next byte.
    Cost: at most `max_bytes` in memory.
    Warning: another Python or package version ships other texts, so bits per byte compare only within one version; the
    report prints the version and the SHA-256 of the corpus.
    References: the Python documentation and standard library, PSF licence; packages keep theirs. [DATA-BUNDLED-D1]
    """

    kind: Literal["bundled"] = "bundled"
    validation: float = Field(0.1, gt=0, lt=1)
    max_bytes: int = Field(4 << 20, ge=1 << 12, le=64 << 20)
    packages: Annotated[tuple[str, ...], Field(strict=False)] = ()

    def load(self) -> TextSource:
        """Collects the documents; `DataError` if this Python has neither topics nor sources, or for a package that is
        not installed."""
        documents = {**_topics(), **_library()}
        for package in self.packages:
            documents |= _package_files(package)
        if not documents:
            cure = "give text of your own with --set data.kind=text --set 'data.paths=[FILE_OR_FOLDER]'"
            raise DataError(f"this Python ships neither pydoc_data.topics nor standard library sources; {cure}")
        chosen, room = [], self.max_bytes
        for name in sorted(documents, key=lambda name: hashlib.sha256(name.encode()).digest()):
            if room <= 0:
                break
            chosen.append(documents[name][: min(_DOCUMENT_BYTES, room)])
            room -= len(chosen[-1]) + 1
        version = ".".join(map(str, sys.version_info[:3]))
        return TextSource(chosen, self.validation, {"documents": len(chosen), "python": version})


def _topics() -> dict[str, bytes]:
    try:
        topics = importlib.import_module("pydoc_data.topics").topics
    except (ImportError, AttributeError):
        return {}
    return {f"topic/{name}": str(text).encode() for name, text in topics.items()}


def _library() -> dict[str, bytes]:
    folder = sysconfig.get_paths().get("stdlib", "")
    return _readable("library", Path(folder), Path(folder).glob("*.py")) if folder else {}


def _readable(lead: str, root: Path, paths: Iterable[Path]) -> dict[str, bytes]:
    """Beginnings of files by their paths below a root; files that cannot be read are skipped."""
    documents: dict[str, bytes] = {}
    for path in sorted(paths):
        with suppress(OSError):
            documents[f"{lead}/{path.relative_to(root).as_posix()}"] = read_file(path, _DOCUMENT_BYTES)
    return documents


def _package_files(name: str) -> dict[str, bytes]:
    spec = importlib.util.find_spec(name) if name.isidentifier() else None
    if spec is None or not spec.submodule_search_locations:
        raise DataError(f"data.packages: {name!r} is no package that is installed; leave it out or install it")
    root = Path(spec.submodule_search_locations[0])
    paths = (path for path in root.rglob("*") if path.suffix in _SUFFIXES and path.is_file())
    return _readable(f"package/{name}", root, paths)


_GRID = (0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0)


class NGrams(NamedTuple):
    """Byte probabilities: unigram `[256]` and bigram `[256, 256]` (row: previous byte)."""

    unigram: NDArray[np.float64]
    bigram: NDArray[np.float64]

    def bits(self, previous: NDArray[np.uint8], following: NDArray[np.uint8]) -> tuple[float, float]:
        """Mean bits per byte of `following` under the unigram, and under the bigram given `previous`."""
        chances = (self.unigram[following], self.bigram[previous, following])
        unigram, bigram = (float(-np.log2(chance).mean()) for chance in chances)
        return unigram, bigram


def fit_ngrams(train: NDArray[np.uint8]) -> NGrams:
    """Smoothed counts of the training bytes. [DATA-NGRAM-D1]

    Unigram p(b) = (c(b) + 1) / (n + 256). Bigram p(b|a) = (c(ab) + m p(b)) / (c(a) + m): a Dirichlet prior of weight m
    around the unigram. m is the best of a fixed grid when counts of the first nine tenths predict the last tenth; the
    returned model uses the counts of all training bytes. Validation bytes are never used.
    """
    cut = max(len(train) - len(train) // 10, 1)
    head, tail = train[:cut], train[cut - 1 :]
    weight = 1.0
    if len(tail) > 1:
        costs = [_smooth(head, m).bits(tail[:-1], tail[1:])[1] for m in _GRID]
        weight = _GRID[int(np.argmin(costs))]
    return _smooth(train, weight)


def _smooth(text: NDArray[np.uint8], weight: float) -> NGrams:
    single = np.bincount(text, minlength=BYTES).astype(np.float64)
    pair_ids = text[:-1].astype(np.int64) * BYTES + text[1:]
    pairs = np.bincount(pair_ids, minlength=BYTES * BYTES).astype(np.float64).reshape(BYTES, BYTES)
    unigram = (single + 1) / (single.sum() + BYTES)
    bigram = (pairs + weight * unigram) / (pairs.sum(1, keepdims=True) + weight)
    return NGrams(unigram, bigram)
