"""Records that a run writes, and drops after the step from which it is resumed: metrics.jsonl, one JSON object per
line, appended to and locked while the run trains; samples.txt; and the family of loggers, each a kind with options."""

from __future__ import annotations

import importlib
import json
import os
import re
import secrets
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, redirect_stdout
from pathlib import Path
from typing import Any, ClassVar, Literal

from hecate.errors import CheckpointError, ConfigError, HookError, install_line
from hecate.files import lock, read_whole, refusing, sync, write_file
from hecate.train.document import Location
from hecate.variant import Variant

Record = dict[str, Any]


class Logger(ABC):
    """Receiver of a run's records, one after the other; only rank 0 has loggers."""

    @abstractmethod
    def log(self, record: Mapping[str, Any]) -> None:
        """Logs one record, as in metrics.jsonl: an event, its step, and facts by name."""

    @abstractmethod
    def close(self) -> None:
        """Closes the logger, after everything logged is written or sent."""


class LoggerKind(Variant, family="logger"):
    """Config that opens a logger. A subclass with a `kind` joins the family; an experiment lists its `loggers`.

    `package` is the module that has to be installed, `name` its name in messages.
    """

    package: ClassVar[str]
    name: ClassVar[str]

    def open(self, folder: Path, config: Mapping[str, Any]) -> Logger:
        """Opens the logger of the run in this folder; `config` has the settings of the experiment."""
        raise NotImplementedError(f"{type(self).__name__} does not define open")


class Tensorboard(LoggerKind):
    """tensorboard: numbers as scalars EVENT/NAME by step, in the folder `tensorboard` of the run.

    References: the TensorBoard documentation. [TRAIN-LOG-D1]
    """

    kind: Literal["tensorboard"] = "tensorboard"
    package, name = "torch.utils.tensorboard", "TensorBoard"

    def open(self, folder: Path, config: Mapping[str, Any]) -> Logger:
        writer = importlib.import_module(self.package).SummaryWriter(str(folder / "tensorboard"))

        def tell(scalars: dict[str, float], record: Mapping[str, Any]) -> None:
            for name, value in scalars.items():
                writer.add_scalar(name, value, record["step"], walltime=record.get("time"))

        return _Library(tell, writer.close)


class Wandb(LoggerKind):
    """wandb: numbers as EVENT/NAME over `step`, in the folder `wandb` of the run.

    Offline, unless `mode` or the environment variable WANDB_MODE says otherwise: `wandb sync` uploads the files. A
    resumed run remains the same run there.

    References: the documentation of Weights & Biases. [TRAIN-LOG-D1]
    """

    kind: Literal["wandb"] = "wandb"
    project: str = "hecate"
    entity: str | None = None
    mode: Literal["offline", "online", "shared", "disabled"] | None = None
    package, name = "wandb", "wandb"

    def open(self, folder: Path, config: Mapping[str, Any]) -> Logger:
        wandb = importlib.import_module(self.package)
        mode = self.mode or os.environ.get("WANDB_MODE") or "offline"
        run = wandb.init(
            project=self.project, entity=self.entity, name=config["name"], dir=str(folder), config=dict(config),
            # Offline there is no server to ask for the run; syncing merges runs with the same id.
            id=identity_of(folder), resume=None if mode == "offline" else "allow", mode=mode,
            settings=wandb.Settings(console="off", silent=True),
        )  # fmt: skip
        run.define_metric("step")
        run.define_metric("*", step_metric="step")  # a resume logs some steps again
        return _Library(lambda scalars, record: run.log({**scalars, "step": record["step"]}), run.finish)


class Trackio(LoggerKind):
    """trackio: numbers as EVENT/NAME by step, in trackio's own folder on this machine.

    The run is named after the experiment, with a unique suffix; a resumed run remains the same run.

    References: the documentation of trackio. [TRAIN-LOG-D1]
    """

    kind: Literal["trackio"] = "trackio"
    project: str = "hecate"
    package, name = "trackio", "trackio"

    def open(self, folder: Path, config: Mapping[str, Any]) -> Logger:
        trackio = importlib.import_module(self.package)
        name = f"{config['name']}-{identity_of(folder)[:8]}"
        with redirect_stdout(sys.stderr):  # it prints a greeting, and standard output is for the result
            run = trackio.init(project=self.project, name=name, config=dict(config), resume="allow")

        def end() -> None:
            with redirect_stdout(sys.stderr):
                run.finish()

        return _Library(lambda scalars, record: run.log(scalars, step=record["step"]), end)


class _Library(Logger):
    """Logger that passes the numbers of records to a library's function."""

    def __init__(self, tell: Callable[[dict[str, float], Mapping[str, Any]], None], end: Callable[[], None]) -> None:
        self._tell, self._end = tell, end

    def log(self, record: Mapping[str, Any]) -> None:
        if scalars := numbers(record):
            self._tell(scalars, record)

    def close(self) -> None:
        self._end()


def numbers(record: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a record as `EVENT/NAME`, without its step and time."""
    return {
        f"{record['event']}/{name}": value
        for name, value in record.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and name not in ("step", "time")
    }


def identity_of(folder: Path) -> str:
    """Random id by which loggers recognise the run in a folder; drawn and stored on first use."""
    file = folder / "logger-id.txt"
    with refusing(f"write {file}", "make it writable"):
        if not file.exists():
            write_file(file, secrets.token_hex(8))
        return file.read_text(encoding="utf-8").strip()


Asked = tuple[Location, LoggerKind]
"""A logger, and the path of the setting that asks for it."""


def check_loggers(asked: Iterable[Asked]) -> None:
    """Refuses a logger whose package is not installed, naming the setting that asks for it, and two of one kind."""
    kinds: set[str] = set()
    for path, kind in asked:
        if kind.kind in kinds:
            raise ConfigError(f"{kind.kind!r} is given twice; keep one", path)
        kinds.add(kind.kind)
        try:
            importlib.import_module(kind.package)
        except ImportError as error:
            out = "false" if path == ("tensorboard",) else "out"
            raise ConfigError(f"needs {kind.name}: {install_line('track')}, or leave it {out}", path) from error


def open_loggers(asked: Iterable[Asked], folder: Path, config: Mapping[str, Any]) -> Iterator[tuple[str, Logger]]:
    """Opens the loggers of a run, and yields each with its name."""
    for _, kind in asked:
        with telling(f"logger {kind.kind}"):
            logger = kind.open(folder, config)
        yield kind.kind, logger


@contextmanager
def telling(what: str) -> Iterator[None]:
    """Context that turns an exception in a user's or library's code into a `HookError` that names it.
    [TRAIN-HOOK-D1]"""
    try:
        yield
    except HookError:
        raise
    except Exception as error:
        raise HookError(
            f"{what} failed with {type(error).__name__}: {error}; the run can be continued with --resume"
        ) from error


CLOCK = ("time", "elapsed")
"""Fields of a record that differ when the same step is recorded again."""
NUMBERS = frozenset((
    *CLOCK, "loss", "lr", "grad_norm", "tokens", "tokens_per_second", "peak_memory", "mfu", "seconds",
    "validation_loss", "accuracy", "bits_per_byte", "perplexity",
))  # fmt: skip
"""Facts that must be numbers: those in an untrusted file that are not are ignored, and any may be missing."""
MOST = 1 << 63
"""Bound of the integers in records."""
_HEADER = re.compile(rb"^--- step (\d+)\n", re.MULTILINE)  # the header of a sample
_AFTER = "continue with --resume"


class MetricsWriter(AbstractContextManager["MetricsWriter"]):
    """Writer that appends records to metrics.jsonl, and passes them to `loggers`, pairs of name and logger.

    One process at a time can write: the lock ends with the process, however it ends. [TRAIN-RUN-D6]
    """

    def __init__(self, path: Path) -> None:
        self.loggers: list[tuple[str, Logger]] = []
        self._path = path
        self._again: list[Record] = []
        with refusing(f"write {path}", then=_AFTER):
            if path.is_file() and not path.is_symlink() and path.stat().st_nlink > 1:
                write_file(path, read_whole(path))  # a hard link: appending would change the file under its other names
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o666)
            try:
                lock(self._file, path)
            except OSError as error:
                os.close(self._file)
                if not isinstance(error, BlockingIOError):
                    raise
                raise CheckpointError(
                    f"another process is training in {path.parent}: wait for it, or choose another --out"
                ) from None
        self._cut(len(b"".join(_lines(path))))

    def write(self, record: Record) -> None:
        """Appends a record as one line, without buffering, so that readers see it at once."""
        if _timeless(record) in self._again:
            return
        with self._writing():
            # In one write if the system accepts it, so that readers see whole lines.
            rest = (json.dumps(record) + "\n").encode()
            while rest:
                rest = rest[os.write(self._file, rest) :]
        for name, logger in self.loggers:
            with telling(f"logger {name}"):
                logger.log(record)

    def rewind(self, step: int) -> Record:
        """Drops the records after `step`, which a run that continues there writes again; returns the latest value of
        each fact in the remaining ones.

        Records of `step` itself that are written a second time are skipped. [TRAIN-METRICS-D1]
        """
        # Whole lines only: an incomplete line of a killed process is cut off.
        lines = _lines(self._path)
        records = [(n, record) for n, record in enumerate(map(_parse, lines), 1) if record and record["step"] <= step]
        self._cut(sum(map(len, lines[: records[-1][0] if records else 0])))
        # An evaluation at the step of the checkpoint may be repeated, and must not be recorded twice.
        self._again = [_timeless(record) for _, record in records if record["step"] == step]
        return {key: value for _, record in records for key, value in record.items()}

    def sync(self) -> None:
        """Forces the records to disk: a checkpoint must not be on disk before the records up to it."""
        with self._writing():
            sync(self._path, self._file)

    def _cut(self, length: int) -> None:
        with refusing(f"write {self._path}", then=_AFTER):
            if os.fstat(self._file).st_size > length:
                os.ftruncate(self._file, length)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Context of a write; refuses if the file was moved or deleted, as further records would be lost."""
        with refusing(f"write {self._path}", then=_AFTER):
            if not (self._path.exists() and os.path.samestat(os.fstat(self._file), self._path.stat())):
                cure = "continue with --resume where the run folder is now, or start again"
                raise CheckpointError(f"{self._path} was moved or deleted while the run was writing it; {cure}")
            yield

    def __exit__(self, *_: object) -> None:
        with ExitStack() as stack:
            stack.callback(os.close, self._file)
            for name, logger in self.loggers:  # each is closed, even if another one fails
                stack.enter_context(telling(f"logger {name}"))
                stack.callback(logger.close)


def read_metrics(path: Path) -> list[Record]:
    """The valid records of a run, without those that a later resume has undone."""
    records: list[Record] = []
    for record in filter(None, map(_parse, _lines(path))):
        if record["event"] == "resume":
            records = [r for r in records if r["step"] <= record["step"]]
        records.append(record)
    return records


def _timeless(record: Record) -> Record:
    return {key: value for key, value in record.items() if key not in CLOCK}


def _lines(path: Path) -> list[bytes]:
    """The complete lines of a file, without an incomplete last line of a killed writer."""
    with refusing(f"read {path}", "put a run's own file in its place"):
        lines = read_whole(path).splitlines(keepends=True) if path.exists() else []
    return lines[:-1] if lines and not lines[-1].endswith(b"\n") else lines


def _parse(line: bytes) -> Record | None:
    """A record with an event and a step; None for anything else."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    known = isinstance(record, dict) and isinstance(record.get("event"), str)
    if not known or type(record.get("step")) is not int or not 0 <= record["step"] < MOST:
        return None
    return {name: value for name, value in record.items() if name not in NUMBERS or _is_number(value)}


def _is_number(value: Any) -> bool:
    return isinstance(value, float) or (type(value) is int and abs(value) < MOST)


def add_sample(path: Path, step: int, text: str) -> None:
    """Appends a sample to those of earlier steps; drops those of the same or later steps, which a resume has undone."""
    indented = _HEADER.sub(rb" \g<0>", text.encode() + b"\n")  # a model may generate a header, too
    _replace(path, step - 1, b"--- step %d\n" % step + indented)


def rewind_samples(path: Path, step: int) -> None:
    """Drops the samples after `step`, which a run that continues there draws again."""
    if path.exists():
        _replace(path, step, b"")


def _replace(path: Path, step: int, more: bytes) -> None:
    with refusing(f"write {path}", then=_AFTER):
        _, *parts = _HEADER.split(read_whole(path) if path.exists() else b"")
        pairs = zip(parts[::2], parts[1::2], strict=True)
        samples = [b"--- step %s\n%s" % pair for pair in pairs if int(pair[0]) <= step]
        write_file(path, b"".join(samples) + more)
