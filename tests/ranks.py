"""A function on several gloo processes of this machine, with the environment that torchrun gives them.

Those that have answered wait for the next function.
"""

from __future__ import annotations

import faulthandler
import os
import pickle
import socket
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tests.forked import Forked

PATIENCE = 120.0  # seconds for all of them together
ROOT = Path(__file__).parents[1]
SECONDS = 60.0  # for which one waits for another in a group


class Task(NamedTuple):
    """What a process is to do, and as whom."""

    rank: int
    size: int
    port: int
    group: bool
    dtype: torch.dtype
    function: Callable[..., Any]
    arguments: tuple[Any, ...]


class Worker:
    """A process that does one task after another."""

    def __init__(self) -> None:
        self.pipe, end = Pipe()
        with end:  # so that a process that dies is seen
            self.process = Forked("from tests.ranks import work; work()", files=(end.fileno(), 1, 2), cwd=ROOT)

    def end(self) -> None:
        """Kills it."""
        self.process.kill()
        self.process.wait(10)
        self.pipe.close()


_IDLE: list[Worker] = []  # by rank: torch keeps what a rank has of a mesh, whoever it is later


def run_ranks(
    size: int,
    function: Callable[..., Any],
    *arguments: Any,
    lost: Sequence[int] = (),
    group: bool = False,
    dtype: torch.dtype = torch.float32,
    patience: float = PATIENCE,
) -> list[Any]:
    """What `function(*arguments)` returns on each rank, in order, as plain values; it is importable by name.

    An error on any rank is raised here with its traceback; None stands for ranks that are to be `lost`. With `group`
    they are one process group already. `dtype` is torch's default there.

    A process that has been in groups before and dies without a word gets one more try, as a new one: gloo's threads of
    a group that is over have spoilt a heap once in some thousand tasks. A fault of the function kills the new one, too.
    """
    options: dict[str, Any] = {"lost": lost, "group": group, "dtype": dtype, "patience": patience}
    reused = bool(_IDLE) and not lost
    try:
        return _run(size, function, arguments, **options)
    except Died as death:
        if not reused:
            raise
        print(f"{death}; once more, in new processes", file=sys.stderr)
        return _run(size, function, arguments, **options)


class Died(AssertionError):
    """A process that ended without an answer."""


def _run(
    size: int, function: Callable[..., Any], arguments: tuple[Any, ...], *, lost: Sequence[int], group: bool,
    dtype: torch.dtype, patience: float,
) -> list[Any]:  # fmt: skip
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    while len(_IDLE) < size and not lost:
        _IDLE.append(Worker())
    workers = [Worker() for _ in range(size)] if lost else _IDLE[:size]
    found: list[Any] = [None] * size
    until, done = time.monotonic() + patience, False
    try:
        for rank, worker in enumerate(workers):
            worker.pipe.send(Task(rank, size, port, group, dtype, function, arguments))
        for rank, worker in enumerate(workers):
            if rank in lost:
                continue
            if not worker.pipe.poll(max(0.0, until - time.monotonic())):
                raise AssertionError(f"rank {rank} of {size} has not answered within {patience:g} seconds")
            found[rank] = worker.pipe.recv()
        done = not lost and all(kind == "value" for kind, _ in found)
    except EOFError:
        raise Died(f"rank {rank} of {size} died (exit {worker.process.wait(10)})") from None
    finally:
        if not done:
            for worker in workers if lost else _IDLE:
                worker.end()
            if not lost:
                _IDLE.clear()
    faults = [text for kind, text in filter(None, found) if kind == "fault"]
    if faults:
        raise AssertionError("\n".join(faults))
    return [None if each is None else each[1] for each in found]


def work() -> None:
    """One task after another, which come by what is standard input elsewhere."""
    pipe = Connection(os.dup(0))
    faulthandler.enable()  # a signal leaves the stack of every thread
    torch.set_num_threads(1)
    while True:
        try:
            given = pipe.recv_bytes()
        except EOFError:
            return
        try:
            task: Task = pickle.loads(given)
            with _as(task):
                answer = "value", task.function(*task.arguments)
        except BaseException:
            answer = "fault", f"process {os.getpid()}:\n{traceback.format_exc()}"
        pipe.send(answer)


@contextmanager
def _as(task: Task) -> Iterator[None]:
    """This process as one of a world, with torch as it is at the start."""
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(task.port), "GLOO_SOCKET_IFNAME": "lo"}
    place = {"RANK": str(task.rank), "WORLD_SIZE": str(task.size), "LOCAL_RANK": str(task.rank)}
    before, hidden = dict(os.environ), {name for name, module in sys.modules.items() if module is None}
    os.environ.update(address | place)
    torch.set_default_dtype(task.dtype)
    torch.manual_seed(0)
    try:
        with warnings.catch_warnings():
            if task.group:
                torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=SECONDS))
            yield
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        _forget_meshes()
        torch.set_default_dtype(torch.float32)
        os.environ.clear()
        os.environ.update(before)
        for name in [name for name, module in sys.modules.items() if module is None and name not in hidden]:
            del sys.modules[name]


def _forget_meshes() -> None:
    """Drops what torch remembers of meshes, which it takes for those of a later world of the same shape."""
    if "torch.distributed.tensor" in sys.modules:
        from torch.distributed.tensor import _redistribute
        from torch.distributed.tensor.debug import _clear_sharding_prop_cache

        _clear_sharding_prop_cache()
        _redistribute._gen_transform_infos.cache_clear()
        _redistribute.clear_redistribute_planner_cache()


def descendants(pid: int) -> list[int]:
    """The processes that a process has started, and theirs, as long as they are there."""
    try:
        files = [task / "children" for task in Path(f"/proc/{pid}/task").iterdir()]
        children = [int(child) for file in files for child in file.read_text().split()]
    except OSError:
        return []
    return [each for child in children for each in (child, *descendants(child))]
