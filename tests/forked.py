"""Processes that have torch and the training code loaded: all are forked of one that has done nothing else.

To load them costs seconds, which a test is to pay only where what is loaded, and when, is what it is about.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import pickle
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
LOADED = (
    "torch._dynamo", "torch.distributed.tensor", "torch.distributed.fsdp", "hecate.train", "hecate.cli", "numba",
    "pytest",
)  # fmt: skip
"""By what tests run in processes; torch itself loads the first at a first step of its Adam."""
MAIN = """
import sys
from tests.forked import serve
given = serve(int(sys.argv[1]))
if given:  # in a process of its own: as by `python -c`, its end included
    sys.argv = ["-c", *given.argv]
    exec(compile(given.code, "<string>", "exec"), {"__name__": "__main__"})
"""


class Asked(NamedTuple):
    """What a process is to run, and where."""

    code: str
    argv: tuple[str, ...]
    cwd: str
    env: dict[str, str]


class Forked:
    """A process that runs `code`, as by `python -c` but for what is loaded already; `files` are its first, by number:
    what it reads and where it writes."""

    _home: socket.socket | None = None

    def __init__(self, code: str, *argv: object, files: tuple[int, ...] = (0, 1, 2), cwd: str | Path = ".") -> None:
        self._said, end = Pipe()
        asked = Asked(code, tuple(map(str, argv)), str(Path(cwd).resolve()), dict(os.environ))
        message = pickle.dumps(asked)
        with end:
            socket.send_fds(self._begun(), [len(message).to_bytes(8)], [end.fileno(), *files])
            self._begun().sendall(message)
        self.pid: int = self._said.recv()
        self.returncode: int | None = None

    @classmethod
    def _begun(cls) -> socket.socket:
        """The way to the process that others are forked of."""
        if cls._home is None:
            cls._home, end = socket.socketpair()
            with end:
                paths = filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))
                own = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
                command = [sys.executable, "-c", MAIN, str(end.fileno())]
                process = subprocess.Popen(command, env=own, cwd=ROOT, pass_fds=[end.fileno()])
            atexit.register(lambda home: (home.close(), process.wait()), cls._home)
        return cls._home

    def wait(self, timeout: float = 120.0) -> int:
        """Its exit code, as of `subprocess`."""
        if self.returncode is None:
            if not self._said.poll(timeout):
                raise subprocess.TimeoutExpired("a forked process", timeout)
            self.returncode = self._said.recv()
        return self.returncode

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Sends it a signal, unless it is known to have ended."""
        with contextlib.suppress(ProcessLookupError):
            if self.returncode is None:
                os.kill(self.pid, number)


def run(code: str, *argv: object, **how: Any) -> subprocess.CompletedProcess[str]:
    """As `subprocess.run([sys.executable, "-c", code, *argv], capture_output=True, text=True)`."""
    ends = [os.pipe() for _ in range(2)]
    with Path(os.devnull).open() as nothing:
        process = Forked(code, *argv, files=(nothing.fileno(), *(write for _, write in ends)), **how)
    for _, write in ends:
        os.close(write)
    with ThreadPoolExecutor(2) as pool:
        out, err = pool.map(_all_of, (read for read, _ in ends))
    return subprocess.CompletedProcess(argv, process.wait(), out, err)


def _all_of(number: int) -> str:
    with os.fdopen(number) as file:
        return file.read()


def serve(number: int) -> Asked | None:
    """Forks a process for each request, in which this returns it; None once there will be no more."""
    for name in LOADED:
        __import__(name)
    home, waiting = socket.socket(fileno=number), set[int]()
    while True:
        size, files, *_ = socket.recv_fds(home, 8, 8)
        if not size:
            return None
        message = bytearray()
        while len(message) < int.from_bytes(size):
            message += home.recv(int.from_bytes(size) - len(message))
        if between := os.fork():
            for file in files:
                os.close(file)
            waiting = {each for each in {*waiting, between} if not os.waitpid(each, os.WNOHANG)[0]}
            continue
        home.close()
        said = Connection(files[0])
        if child := os.fork():  # from the one in between, which tells how it ends
            for file in files[1:]:
                os.close(file)
            said.send(child)
            status = os.waitpid(child, 0)[1]
            with contextlib.suppress(OSError):  # nobody asks for it
                said.send(os.waitstatus_to_exitcode(status))
            os._exit(0)
        said.close()
        for place, file in enumerate(files[1:]):
            os.dup2(file, place)
            os.close(file)
        sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", 1, errors="backslashreplace", closefd=False)
        asked: Asked = pickle.loads(message)
        os.chdir(asked.cwd)
        os.environ.clear()
        os.environ.update(asked.env)
        return asked
