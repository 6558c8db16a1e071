"""Where the records of a run go beside metrics.jsonl: a family of loggers, each a kind with its options."""

from __future__ import annotations

import importlib
import os
import secrets
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any, ClassVar, Literal

from hecate.errors import ConfigError, HookError, install_line
from hecate.files import refusing, write_file
from hecate.variant import Variant

Record = dict[str, Any]
Place = tuple[str | int, ...]
"""Of a setting in the config."""


class Logger(ABC):
    """Takes the records of a run, one after the other; rank 0 alone has one."""

    @abstractmethod
    def log(self, record: Mapping[str, Any]) -> None:
        """One record, as in metrics.jsonl: an event, its step, and facts by name."""

    @abstractmethod
    def close(self) -> None:
        """Ends it: nothing is lost of what was logged."""


class LoggerKind(Variant, family="logger"):
    """Config that opens a logger. A subclass with a `kind` joins the family; `loggers` of an experiment lists them.

    `package` is what has to be installed, `name` how people call it.
    """

    package: ClassVar[str]
    name: ClassVar[str]

    def open(self, folder: Path, config: Mapping[str, Any]) -> Logger:
        """The logger of a run in its folder, with the settings of the experiment."""
        raise NotImplementedError(f"{type(self).__name__} does not define open")


class Tensorboard(LoggerKind):
    """tensorboard: numbers as scalars EVENT/NAME by step, in the folder `tensorboard` of the run.

    References: the TensorBoard documentation. [TRAIN-LOG-D1]
    """

    kind: Literal["tensorboard"] = "tensorboard"
    package, name = "torch.utils.tensorboard", "TensorBoard"

    def open(self, folder: Path, config: Mapping[str, Any]) -> Logger:
        writer = importlib.import_module(self.package).SummaryWriter(str(folder / "tensorboard"))

        def tell(found: dict[str, float], record: Mapping[str, Any]) -> None:
            for name, value in found.items():
                writer.add_scalar(name, value, record["step"], walltime=record.get("time"))

        return _Library(tell, writer.close)


class Wandb(LoggerKind):
    """wandb: numbers as EVENT/NAME over `step`, in the folder `wandb` of the run.

    Offline, unless `mode` or the environment's WANDB_MODE says otherwise: `wandb sync` sends what was written. A run
    that is resumed is one run there, too.

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
            id=identity_of(folder), resume=None if mode == "offline" else "allow", mode=mode,
            settings=wandb.Settings(console="off", silent=True),
        )  # fmt: skip
        run.define_metric("step")
        run.define_metric("*", step_metric="step")  # steps that a resume repeats are told again
        return _Library(lambda found, record: run.log({**found, "step": record["step"]}), run.finish)


class Trackio(LoggerKind):
    """trackio: numbers as EVENT/NAME by step, in trackio's own folder on this machine.

    The run is called by the name of the experiment and a part of its own, and is one run when it is resumed.

    References: the documentation of trackio. [TRAIN-LOG-D1]
    """

    kind: Literal["trackio"] = "trackio"
    project: str = "hecate"
    package, name = "trackio", "trackio"

    def open(self, folder: Path, config: Mapping[str, Any]) -> Logger:
        trackio = importlib.import_module(self.package)
        name = f"{config['name']}-{identity_of(folder)[:8]}"
        with redirect_stdout(sys.stderr):  # it greets, and standard output is the result's
            run = trackio.init(project=self.project, name=name, config=dict(config), resume="allow")

        def end() -> None:
            with redirect_stdout(sys.stderr):
                run.finish()

        return _Library(lambda found, record: run.log(found, step=record["step"]), end)


class _Library(Logger):
    """Hands the numbers of records on to a library."""

    def __init__(self, tell: Callable[[dict[str, float], Mapping[str, Any]], None], end: Callable[[], None]) -> None:
        self._tell, self._end = tell, end

    def log(self, record: Mapping[str, Any]) -> None:
        if found := numbers(record):
            self._tell(found, record)

    def close(self) -> None:
        self._end()


def numbers(record: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a record as `EVENT/NAME`, but for its step and its time."""
    return {
        f"{record['event']}/{name}": value
        for name, value in record.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and name not in ("step", "time")
    }


def identity_of(folder: Path) -> str:
    """By what a logger knows the run in a folder again, drawn when it is first asked for."""
    own = folder / "logger-id.txt"
    with refusing(f"write {own}", "make it writable"):
        if not own.exists():
            write_file(own, secrets.token_hex(8))
        return own.read_text(encoding="utf-8").strip()


def check_loggers(asked: Iterable[tuple[Place, LoggerKind]]) -> None:
    """Refuses a logger whose package is not here, by the setting that asks for it, and two of one kind."""
    seen: set[str] = set()
    for path, kind in asked:
        if kind.kind in seen:
            raise ConfigError(f"{kind.kind!r} is given twice; keep one", path)
        seen.add(kind.kind)
        try:
            importlib.import_module(kind.package)
        except ImportError as error:
            out = "false" if path == ("tensorboard",) else "out"
            raise ConfigError(f"needs {kind.name}: {install_line('track')}, or leave it {out}", path) from error


def open_loggers(
    asked: Iterable[tuple[Place, LoggerKind]], folder: Path, config: Mapping[str, Any]
) -> Iterator[tuple[str, Logger]]:
    """Opens the loggers of a run, with their names."""
    for _, kind in asked:
        with telling(f"logger {kind.kind}"):
            logger = kind.open(folder, config)
        yield kind.kind, logger


@contextmanager
def telling(what: str) -> Iterator[None]:
    """Tells an exception in what a run calls of others as `HookError`, with the name of it. [TRAIN-HOOK-D1]"""
    try:
        yield
    except HookError:
        raise
    except Exception as error:
        raise HookError(
            f"{what} failed with {type(error).__name__}: {error}; the run can be continued with --resume"
        ) from error
