"""Tokenizing corpora into shards, in several processes; the result does not depend on their number, and a killed run
can be continued.

Documents are read in order and sent to workers in batches; the results are written in order. A *part* is a training
shard with the validation shard of the same documents. First its files and then its record are put in place, each
atomically, so that every part with a record is finished; a continued run skips documents up to the end of the last one.
"""

from __future__ import annotations

import hashlib
import os
import signal
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import connection, forkserver, get_context, parent_process, resource_tracker
from pathlib import Path
from threading import Thread
from typing import Any, BinaryIO, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hecate.data.corpus import Limits, documents, find
from hecate.data.shards import LENGTHS, SIDECAR, TOKENIZER, Digest, Number, Shard, Sidecar, digest_of, file_sha256
from hecate.data.tokenizer import FileTokenizer, Tokenizer, open_tokenizer
from hecate.errors import ConfigError, DataError
from hecate.files import TEMPORARY, cure, lock, read_file, sync, temporary_name, write_file
from hecate.processes import safe_path, without_interrupts
from hecate.variant import Config

JOB = "job.json"
BATCH_TEXTS, BATCH_LETTERS = 1024, 1 << 20
SHARD_TOKENS = 1 << 27


class Job(Config):
    """Settings that determine every byte of a folder; a run that continues it must have the same."""

    inputs: Digest
    tokenizer: Digest
    field: str
    separator: str | None
    end: Number | None
    validation: float
    shard_tokens: Number


class Part(Config):
    """A finished part: its shards, and the place in the inputs where its documents end."""

    file: Number
    document: Number
    train: Shard
    validation: Shard

    @property
    def shards(self) -> tuple[Shard, Shard]:
        """Both of its shards."""
        return self.train, self.validation


class Encoded(NamedTuple):
    """Encoded documents: their tokens in a row; and for each document its number of tokens, its bytes of text, and
    whether it is held out."""

    tokens: NDArray[np.uint32]
    counts: NDArray[np.int64]
    text: NDArray[np.int64]
    held_out: NDArray[np.bool_]


class Progress(NamedTuple):
    """Progress so far: documents and tokens written, and the file being read, of `files` input files."""

    documents: int
    tokens: int
    file: int
    files: int
    note: str = ""


def tokenize(
    inputs: Sequence[str],
    out: Path,
    *,
    tokenizer: str,
    workers: int = 1,
    field: str = "text",
    separator: str | None = None,
    validation: float = 0.01,
    shard_tokens: int = SHARD_TOKENS,
    limits: Limits = Limits(),  # noqa: B008 - frozen
    progress: Callable[[Progress], None] = lambda _: None,
) -> Sidecar:
    """Writes the documents of inputs as token shards to the folder `out`; returns its sidecar. [DATA-TOKENIZE-D1]

    A document is held out for validation if the hash of its text falls into that share, so that equal documents are in
    the same split. It ends with the token `<|endoftext|>` if the tokenizer has one. `limits` bound the memory.
    """
    if not 0 <= validation < 1:
        raise DataError(f"--validation must be a share in [0, 1), got {validation}")
    files, encoder = find(inputs), open_tokenizer(tokenizer)
    listing = [[str(path), path.stat().st_size, path.stat().st_mtime_ns] for path in files]
    job = Job(
        inputs=digest_of(listing), tokenizer=encoder.sha256, field=field, separator=separator, end=encoder.end,
        validation=validation, shard_tokens=shard_tokens,
    )  # fmt: skip
    try:
        out.mkdir(parents=True, exist_ok=True)
        with _claim(out, job):
            if isinstance(encoder, FileTokenizer):
                write_file(out / TOKENIZER, encoder.text)
            parts = finished_parts(out, progress, len(files))
            source = _batches(files, job, parts[-1] if parts else None, limits)
            with _encoders(encoder, out, validation, workers) as encode:
                parts.extend(_parts(out, encoder, encode(source), len(parts), shard_tokens, progress, len(files)))
            sidecar = _sidecar(out, encoder, parts)
            write_file(out / SIDECAR, sidecar.text())
            empty = [shard for part in parts for shard in part.shards if not shard.tokens]
            spare = [out / name for shard in empty for name in shard.digests()]
            for path in (*spare, *(_record(out, number) for number in range(len(parts))), out / JOB):
                path.unlink()
    except OSError as error:
        raise DataError(
            f"cannot write {out}: {error.strerror or error}; {cure(error) or 'mend that'}, and the same command goes on"
        ) from None
    except BrokenProcessPool:
        remedy = "the same command goes on, with fewer --workers if need be"
        raise DataError(f"a worker ended before its time, maybe for want of memory; {remedy}") from None
    return sidecar


@contextmanager
def _claim(out: Path, job: Job) -> Iterator[None]:
    """Context in which the folder belongs to this job and is locked; refuses a folder of another job or process."""
    if (out / SIDECAR).exists():
        raise DataError(f"{out} already holds tokens; `hecate data inspect` shows them, or choose another --out")
    job_file = out / JOB
    if not job_file.exists():
        if any(not item.name.startswith(TEMPORARY) for item in out.iterdir()):
            raise DataError(f"{out} holds other files; choose another --out")
        write_file(job_file, job.model_dump_json())
    with job_file.open("r+b") as file:  # NFS only locks files that are open for writing
        try:
            lock(file.fileno(), job_file)
        except BlockingIOError:
            raise DataError(f"another process is writing {out}: wait for it, or choose another --out") from None
        try:
            started = Job.model_validate_json(file.read(1 << 20))
        except ConfigError:
            raise DataError(f"{job_file} is damaged; delete {out} and begin again") from None
        for name in Job.model_fields:
            if getattr(started, name) != getattr(job, name):
                raise DataError(
                    f"{out} was begun with other {name}; go on with the command that began it, or choose another --out"
                )
        for path in out.glob(f"{TEMPORARY}*"):
            path.unlink()
        try:
            yield
        except DataError:
            if not _record(out, 0).exists():  # no part to continue from: the next run may have other inputs or options
                job_file.unlink()
            raise


def finished_parts(out: Path, progress: Callable[[Progress], None], files: int) -> list[Part]:
    """The parts that a killed run has finished, verified; from the first damaged one on, all are written again."""
    parts: list[Part] = []
    while (path := _record(out, len(parts))).exists():
        try:
            part = Part.model_validate_json(read_file(path, 1 << 20))
            for shard in part.shards:
                for name, digest in shard.digests().items():
                    if file_sha256(out / name) != digest:
                        raise DataError(f"{name} is damaged")
        except (ConfigError, DataError) as error:
            progress(Progress(0, 0, 0, files, f"part {len(parts)} is written again: {error}"))
            break
        parts.append(part)
    if parts:
        shards = [shard for part in parts for shard in part.shards]
        counts = sum(s.documents for s in shards), sum(s.tokens for s in shards)
        progress(Progress(*counts, parts[-1].file, files, f"going on after {len(parts)} finished parts"))
    number = len(parts)
    while (path := _record(out, number)).exists():
        path.unlink()
        number += 1
    return parts


class Place(NamedTuple):
    """The place after the last document of a batch: the number of its file, and of documents read from that file."""

    file: int
    document: int


def _batches(files: Sequence[Path], job: Job, after: Part | None, limits: Limits) -> Iterator[tuple[list[str], Place]]:
    """Documents after those of a part, in batches large enough to be sent to workers, but not beyond a shard."""
    most = min(BATCH_LETTERS, job.shard_tokens)
    first, skip = (after.file, after.document) if after else (0, 0)
    texts: list[str] = []
    letters, place = 0, Place(first, skip)
    for number in range(first, len(files)):
        source = documents(files[number], field=job.field, separator=job.separator, limits=limits)
        for index, text in enumerate(source, 1):
            place = Place(number, index)
            if (number == first and index <= skip) or not text:
                continue
            texts.append(text)
            letters += len(text)
            if len(texts) >= BATCH_TEXTS or letters >= most:
                yield texts, place
                texts, letters = [], 0
    if texts:
        yield texts, place


_encoder: Any = None  # in a worker, its tokenizer and the share to hold out


def _prepare(source: str, validation: float) -> None:
    """Prepares a worker; it ends when the process that started it ends, in whatever way."""
    global _encoder
    parent = parent_process()
    if parent is not None:
        Thread(target=lambda: (connection.wait([parent.sentinel]), os._exit(1)), daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C for all
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    tokenizer = open_tokenizer(source, tried=True)  # the parent has tried it
    _encoder = tokenizer, validation


def _encode(texts: list[str]) -> Encoded:
    return encoded(texts, *_encoder)


def encoded(texts: list[str], tokenizer: Tokenizer, validation: float) -> Encoded:
    """Encodes documents."""
    # JSON may contain lone surrogates, which are not valid in text: they become U+FFFD.
    texts = [text.encode("utf-16", "surrogatepass").decode("utf-16", "replace") for text in texts]
    raw = [text.encode() for text in texts]
    ids = tokenizer.encode(texts)
    if tokenizer.end is not None:
        ids = [np.append(item, np.uint32(tokenizer.end)) for item in ids]
    bound = int(validation * 2**64)
    held_out = [int.from_bytes(hashlib.blake2b(item, digest_size=8).digest(), "big") < bound for item in raw]
    return Encoded(
        np.concatenate(ids) if ids else np.zeros(0, dtype=np.uint32),
        np.array([len(item) for item in ids], dtype=np.int64),
        np.array([len(item) for item in raw], dtype=np.int64),
        np.array(held_out, dtype=bool),
    )


@contextmanager
def _encoders(tokenizer: Tokenizer, out: Path, validation: float, workers: int) -> Iterator[Callable[..., Any]]:
    """Context with a function from batches to encoded batches, in order; the number of batches in flight, and of their
    characters, is limited."""
    if workers <= 1:
        yield lambda batches: ((encoded(texts, tokenizer, validation), place) for texts, place in batches)
        return
    context = get_context("forkserver")
    context.set_forkserver_preload([__name__])
    with safe_path():
        resource_tracker.ensure_running()  # starting it unblocks Ctrl-C
        with without_interrupts():
            forkserver.ensure_running()
        ready = context.Process(target=os.getpid)  # so that modules are loaded: Ctrl-C leaves no half-started worker
        ready.start()
        ready.join()
    source = str(out / TOKENIZER) if isinstance(tokenizer, FileTokenizer) else "bytes"
    with ProcessPoolExecutor(workers, context, _prepare, (source, validation)) as pool:

        def encode_batches(batches: Iterator[tuple[list[str], Place]]) -> Iterator[tuple[Encoded, Place]]:
            waiting: deque[tuple[Future[Encoded], Place, int]] = deque()
            for texts, place in batches:
                waiting.append((pool.submit(_encode, texts), place, sum(map(len, texts))))
                while len(waiting) > 2 * workers or sum(item[2] for item in waiting) > 2 * workers * BATCH_LETTERS:
                    future, place, _ = waiting.popleft()
                    yield future.result(), place
            for future, place, _ in waiting:
                yield future.result(), place

        yield encode_batches


def _parts(
    out: Path,
    tokenizer: Tokenizer,
    batches: Iterator[tuple[Encoded, Place]],
    number: int,
    shard_tokens: int,
    progress: Callable[[Progress], None],
    files: int,
) -> Iterator[Part]:
    """Writes parts, numbered from `number` on, and yields each when it is complete."""
    documents = tokens = 0
    ahead = next(batches, None)
    while ahead is not None:
        with (
            _Writer(out, f"train-{number:05d}", _dtype_of(tokenizer)) as train,
            _Writer(out, f"validation-{number:05d}", _dtype_of(tokenizer)) as validation,
        ):
            while ahead is not None and train.tokens < shard_tokens:
                batch, place = ahead
                train.add(batch, ~batch.held_out)
                validation.add(batch, batch.held_out)
                documents, tokens = documents + len(batch.counts), tokens + len(batch.tokens)
                progress(Progress(documents, tokens, place.file + 1, files))
                ahead = next(batches, None)
            part = Part(file=place.file, document=place.document, train=train.put(), validation=validation.put())
        write_file(_record(out, number), part.model_dump_json())
        yield part
        number += 1


def _dtype_of(tokenizer: Tokenizer) -> Literal["uint16", "uint32"]:
    """Dtype in which shards have its ids."""
    return "uint16" if tokenizer.size <= 1 << 16 else "uint32"


class _Writer:
    """Writer of the two files of a shard, which have temporary names until they are complete."""

    def __init__(self, out: Path, name: str, dtype: str) -> None:
        self.paths = out / f"{name}.bin", out / f"{name}.starts"
        self._held: list[BinaryIO] = [temporary_name(path).open("xb") for path in self.paths]
        self._hashes = hashlib.sha256(), hashlib.sha256()
        self._dtype = np.dtype(dtype).newbyteorder("<")
        self.tokens = self.documents = self.text = 0

    def add(self, batch: Encoded, chosen: NDArray[np.bool_]) -> None:
        """Appends the chosen documents of a batch."""
        counts = batch.counts[chosen]
        starts = self.tokens + np.cumsum(counts) - counts
        ids = batch.tokens[np.repeat(chosen, batch.counts)]
        for file, digest, raw in zip(
            self._held, self._hashes, (ids.astype(self._dtype).tobytes(), starts.astype("<u8").tobytes()), strict=True
        ):
            file.write(raw)
            digest.update(raw)
        self.tokens += len(ids)
        self.documents += len(counts)
        self.text += int(batch.text[chosen].sum())

    def put(self) -> Shard:
        """Forces the files to disk and renames them; returns the shard."""
        for file, path in zip(self._held, self.paths, strict=True):
            file.flush()
            sync(path, file.fileno())
            temporary_name(path).replace(path)
        sync(self.paths[0].parent)
        tokens, starts = (digest.hexdigest() for digest in self._hashes)
        return Shard(
            file=self.paths[0].name, tokens=self.tokens, sha256=tokens, starts=self.paths[1].name,
            documents=self.documents, starts_sha256=starts, text=self.text,
        )  # fmt: skip

    def __enter__(self) -> _Writer:
        return self

    def __exit__(self, *_: object) -> None:
        for file, path in zip(self._held, self.paths, strict=True):
            file.close()
            temporary_name(path).unlink(missing_ok=True)


def _sidecar(out: Path, tokenizer: Tokenizer, parts: Sequence[Part]) -> Sidecar:
    """The sidecar of all parts, without empty shards."""
    train = tuple(part.train for part in parts if part.train.tokens)
    validation = tuple(part.validation for part in parts if part.validation.tokens)
    if not train:
        raise DataError("there is no document to train on; name more files, or lower --validation")
    table, lengths = tokenizer.lengths(), None
    if table is not None:
        raw = table.astype("<u4").tobytes()
        write_file(out / LENGTHS, raw)
        lengths = hashlib.sha256(raw).hexdigest()
    return Sidecar(
        dtype=_dtype_of(tokenizer),
        vocabulary=tokenizer.size,
        tokenizer=tokenizer.sha256 if isinstance(tokenizer, FileTokenizer) else None,
        end=tokenizer.end,
        lengths=lengths,
        train=train,
        validation=validation,
    )


def _record(out: Path, number: int) -> Path:
    return out / f"part-{number:05d}.json"
