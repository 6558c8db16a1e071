"""The processes of a run: the rank of this one, the mesh they form, and how they agree.

`torchrun` starts them and sets their ranks by environment variables; without it there is one process, and nothing of
torch.distributed is loaded. What ranks exchange before training is sent as JSON through the store at which torch's
processes meet: nothing is pickled, and no rank waits for ever.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cache
from itertools import count
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from hecate import errors
from hecate.checks import Size
from hecate.errors import ConfigError, HecateError, ParallelError, shorten
from hecate.variant import Config, Conflicts

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store
    from torch.distributed.device_mesh import DeviceMesh

Extent = Annotated[Size, Field(ge=1)]
AXES = ("replicate", "data", "context")
GRACE = 10.0  # seconds that others wait longer than rank 0, which names the ranks that did not answer
LOOK = 1.0  # seconds between rank 0's checks that a rank that does not answer is still there
_CPU = torch.device("cpu")
_RESTARTS = "TORCHELASTIC_RESTART_COUNT"


class ParallelConfig(Config):
    """Division of a run's work among its processes: replicate x data x context of them. [DIST-WORLD-D1]

    Fields:
        data: processes over which parameters are sharded; they share the batch. `auto`: all that the other axes leave.
        replicate: copies of those, which also share the batch; `auto` as for `data`, but not for both.
        context: processes that share the tokens of a sequence.
    """

    data: Extent | Literal["auto"] = "auto"
    replicate: Extent | Literal["auto"] = 1
    context: Extent = 1

    def conflicts(self) -> Conflicts:
        """Two axes that would each take what the other leaves."""
        if self.data == self.replicate == "auto":
            yield ("replicate",), "data is auto, too; give one of them"

    def shape(self, size: int) -> tuple[int, int, int]:
        """replicate, data and context of a world of `size` processes."""
        extents = {axis: getattr(self, axis) for axis in AXES}
        free = [axis for axis, number in extents.items() if number == "auto"]
        rest = prod(number for number in extents.values() if number != "auto")
        if free and size % rest == 0:
            extents[free[0]] = size // rest
        elif free or rest != size:
            asked = " x ".join(f"{axis} {extents[axis]}" for axis in AXES)
            launch = "start it under torchrun" if size == 1 else "start as many processes, or take data: auto"
            raise ConfigError(
                f"{asked} does not fit {'one process' if size == 1 else f'a world of {size} processes'}; {launch}",
                ("parallel",),
            )
        return extents["replicate"], extents["data"], extents["context"]


def each_of(batch_size: int, processes: int) -> int:
    """Rows of a batch for each process that shares it."""
    each, remainder = divmod(batch_size, processes)
    if remainder:
        those = f"the {processes} processes that share it (parallel.replicate x parallel.data)"
        raise ConfigError(f"must be a multiple of {those}, got {batch_size}", ("budget", "batch_size"))
    return each


@dataclass(frozen=True)
class World:
    """One process among `size`: its rank, its device, and the mesh `("replicate", "data", "context")` of them all.

    `timeout` is the time in seconds to wait for other ranks. [DIST-WORLD-D1]
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    device: torch.device = _CPU
    mesh: DeviceMesh | None = None
    timeout: float = 600.0
    restarts: int = 0
    store: Store | None = None
    _calls: Iterator[int] = field(default_factory=count, repr=False, compare=False)

    @classmethod
    def alone(cls, device: torch.device | str = "cpu") -> World:
        """The world of one process."""
        return cls(device=torch.device(device))

    @property
    def main(self) -> bool:
        """True on the rank that writes and prints."""
        return self.rank == 0

    def extent(self, axis: str) -> int:
        """Number of processes along an axis of the mesh."""
        return 1 if self.mesh is None else self.mesh.size(AXES.index(axis))

    @property
    def batch_ranks(self) -> int:
        """Number of processes that share a batch: replicate x data."""
        return self.extent("replicate") * self.extent("data")

    @property
    def batch_rank(self) -> int:
        """Index of this process's share of a batch among `batch_ranks`."""
        if self.mesh is None:
            return 0
        return self.mesh.get_local_rank("replicate") * self.extent("data") + self.mesh.get_local_rank("data")

    def rows(self, batch_size: int) -> range:
        """This process's rows of a batch, dealt in order."""
        each = each_of(batch_size, self.batch_ranks)
        return range(self.batch_rank * each, (self.batch_rank + 1) * each)

    def sum(self, values: Tensor) -> Tensor:
        """The sum over all ranks, on every rank; the tensor itself where there is one."""
        if self.size == 1:
            return values
        from torch import distributed

        total = values.to(self.device, copy=True)
        distributed.all_reduce(total)
        return total

    def rows_of_all(self, tensor: Tensor) -> Tensor:
        """Rows of a batch `[rows, ...]` of every process that shares it, in order, on every rank."""
        if self.batch_ranks == 1:
            return tensor
        from torch import distributed

        rows = len(tensor)
        whole = tensor.new_zeros(rows * self.batch_ranks, *tensor.shape[1:])
        if self.mesh is not None and self.mesh.get_local_rank("context") == 0:
            whole[self.batch_rank * rows : (self.batch_rank + 1) * rows] = tensor
        distributed.all_reduce(whole)
        return whole

    def any(self, flag: bool) -> bool:
        """True if a flag is set on any rank: the same answer on every rank."""
        return flag if self.size == 1 else bool(self.sum(torch.tensor(int(flag))))

    def agree(self, facts: Mapping[str, Any]) -> None:
        """Raises `ParallelError` on every rank if facts, trees of plain JSON, differ between ranks; it names the first
        that does, with both values. [DIST-WORLD-D2]"""
        if self.size == 1:
            return
        fault = self._ask(dict(flat(facts)), _difference)
        if fault is not None:
            raise ParallelError(fault)

    def from_main(self, make: Callable[[], Any]) -> Any:
        """The result of `make` on rank 0, plain JSON, on every rank; its `HecateError` is raised on every rank."""
        if self.size == 1:
            return make()
        fault: BaseException | None = None
        message: dict[str, Any] | None = None
        if self.main:
            try:
                message = {"value": make()}
            except HecateError as error:
                fault, message = error, {"error": type(error).__name__, "text": str(error)}
        answer = self._ask(message, lambda values: values[0])
        if fault is not None:
            raise fault
        if "error" in answer:
            raise _error_of(answer["error"], answer["text"])
        return answer["value"]

    def raise_first(self, error: HecateError | None) -> None:
        """Raises on every rank if any has an error: a rank with an error raises its own, the others that of the lowest
        such rank, which they name. [DIST-RUN-D3]"""
        if not self.any(error is not None):
            return
        if error is not None and self.size == 1:
            raise error
        first = self.first_of(None if error is None else json.dumps([type(error).__name__, str(error)]))
        if error is not None:
            raise error
        if first is not None:
            kind, text = json.loads(first[1])
            raise _error_of(kind, f"on rank {first[0]}, {text}")

    def first_of(self, text: str | None) -> tuple[int, str] | None:
        """The lowest rank with a text, and its text: the same on every rank."""
        first = self._ask(text, lambda values: next(([n, v] for n, v in enumerate(values) if v is not None), None))
        return None if first is None else (first[0], first[1])

    def destination(self, choose: Callable[[], str]) -> tuple[str, bool]:
        """The folder that rank 0 chooses, for every rank; and whether earlier processes of this launch were training
        there, before torchrun restarted them."""

        def found() -> list[Any]:
            launch = None if self.store is None else _beneath(self.store)
            if self.restarts and launch is not None and launch.check([_out()]):
                return [launch.get(_out()).decode(), True]
            return [choose(), False]

        folder, again = self.from_main(found)
        return folder, again

    def remember(self, folder: str) -> None:
        """Lets `destination` find the folder after a restart."""
        if self.main and self.store is not None:
            _beneath(self.store).set(_out(), folder)

    def _ask(self, value: Any, judge: Callable[[list[Any]], Any]) -> Any:
        """Result of `judge` on rank 0 for the plain values of all ranks, in order; the same on every rank."""
        store, name = self.store, str(next(self._calls))
        if store is None:
            return judge([value])
        if not self.main:
            store.set(f"{name}/{self.rank}", json.dumps(value))
            answer = self._wait(store, f"{name}/answer", self.timeout + GRACE)
            if answer is None:
                raise ParallelError(f"rank 0 did not answer within {self.timeout:g} seconds; see what it reported")
            if store.add(f"{name}/heard", 1) == self.size - 1:
                store.set(f"{name}/all", "")
        else:
            until = time.monotonic() + self.timeout
            others = (self._wait(store, f"{name}/{n}", until - time.monotonic(), n) for n in range(1, self.size))
            texts = [json.dumps(value), *others]
            missing = [n for n, text in enumerate(texts) if text is None]
            values = [json.loads(text) for text in texts if text is not None]
            late = self._late(store, missing[0]) if missing else ""
            answer = json.dumps({"late": late, "value": None if missing else judge(values)})
            store.set(f"{name}/answer", answer)
            if not missing:  # rank 0 may host the store, and may end after this
                self._wait(store, f"{name}/all", GRACE)
        message = json.loads(answer)
        if message["late"]:
            raise ParallelError(message["late"])
        return message["value"]

    def _late(self, store: Store, rank: int) -> str:
        if _has_ended(store, rank):
            return f"rank {rank} of {self.size} has ended; see what it reported"
        asked = f"rank {rank} of {self.size} did not answer within {self.timeout:g} seconds"
        return f"{asked}; see what it reported, or raise budget.timeout"

    @staticmethod
    def _wait(store: Store, key: str, seconds: float, rank: int | None = None) -> str | None:
        """Value of a key; None if it is not set in time, or once the `rank` that should set it has ended."""
        from torch.distributed import DistError

        until = time.monotonic() + seconds
        while True:
            began = time.monotonic()
            look = max(until - began, 0.01) if rank is None else min(max(until - began, 0.01), LOOK)
            try:
                store.wait([key], timedelta(seconds=look))
                return str(store.get(key), "utf-8")
            except (DistError, RuntimeError):  # late, or the process that hosts the store is gone
                gone = time.monotonic() - began < 0.5 * look
            if gone or time.monotonic() >= until or (rank is not None and _has_ended(store, rank)):
                return None


def _error_of(kind: str, text: str) -> HecateError:
    """An error of another rank."""
    return getattr(errors, kind, HecateError)(text)


def _out() -> str:
    """The key under which a launch stores its folder, from one attempt of its processes to the next."""
    return f"hecate/out/{os.environ.get('TORCHELASTIC_RUN_ID', '')}"


def _beneath(store: Store) -> Store:
    """The store of the whole launch, without the prefixes for one attempt."""
    while (under := getattr(store, "underlying_store", None)) is not None:
        store = under
    return store


def flat(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Leaves of a tree by their paths."""
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from flat(item, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list | tuple) and value:
        for index, item in enumerate(value):
            yield from flat(item, f"{path}[{index}]")
    else:
        yield path, value


def _difference(ranks: list[dict[str, Any]]) -> str | None:
    """The first fact in which a rank differs from rank 0."""
    first, missing = ranks[0], object()
    for number, facts in enumerate(ranks):
        for name in [*first, *(name for name in facts if name not in first)]:
            here, there = first.get(name, missing), facts.get(name, missing)
            if here != there or isinstance(here, bool) != isinstance(there, bool):
                shown = ["nothing" if value is missing else shorten(value) for value in (there, here)]
                return (
                    f"{name} is {shown[0]} on rank {number} and {shown[1]} on rank 0; start every rank with the same "
                    "config, code and versions"
                )
    return None


def _card(local_rank: int) -> torch.device:
    """The CUDA device of a process of this machine."""
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not devices:
        raise ConfigError("is 'cuda', but no CUDA device is available", ("budget", "device"))
    if local_rank >= devices:
        few = f"is 'cuda', and this machine has {devices} CUDA devices for more processes than that"
        cure = f"start as many as it has (torchrun --nproc-per-node {devices})"
        raise ConfigError(f"{few}; {cure}", ("budget", "device"))
    return torch.device("cuda", local_rank)


@contextmanager
def start(parallel: ParallelConfig, device: torch.device | str = "cpu", timeout: float = 600.0) -> Iterator[World]:
    """The world in which torchrun started this process, or that of one process; raises `ParallelError` if another rank
    ended. [DIST-WORLD-D1]

    Every rank raises if the mesh does not fit the world, or if code or settings differ between ranks.
    """
    place = torch.device(device)
    launched = _launch_ranks()
    if launched is None:
        parallel.shape(1)
        yield World.alone(place)
        return
    rank, size, local_rank = launched
    world = _meet(World(rank, size, local_rank, place, None, timeout, int(os.environ.get(_RESTARTS, "0"))))
    facts = {"parallel": parallel.model_dump(mode="json"), "budget": {"device": place.type, "timeout": timeout}}
    world.agree({**facts, "code": code(), "torch": torch.__version__})
    shape = parallel.shape(size)
    if place.type == "cuda":
        place = _card(local_rank)
        torch.cuda.set_device(place)
    world = replace(world, device=place)
    if size == 1:
        yield world
        return
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh

    backend = "cpu:gloo,cuda:nccl" if place.type == "cuda" else "gloo"
    how: dict[str, Any] = {"rank": rank, "world_size": size, "timeout": timedelta(seconds=timeout)}
    distributed.init_process_group(backend, store=_part(world.store, "torch"), **how)
    try:
        mesh = init_device_mesh(place.type, shape, mesh_dim_names=AXES)
        with _naming_loss(world):
            yield replace(world, mesh=mesh)
    finally:
        with suppress(RuntimeError):
            distributed.destroy_process_group()


def _launch_ranks() -> tuple[int, int, int] | None:
    """Rank, size and local rank by the environment; None without torchrun."""
    if "WORLD_SIZE" not in os.environ:
        return None
    try:
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        local_rank = int(os.environ.get("LOCAL_RANK", rank))
    except (KeyError, ValueError):
        facts = {name: os.environ.get(name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
        raise ParallelError(f"the environment of torchrun is not whole, got {facts}; start it by torchrun") from None
    if not 0 <= rank < size:
        raise ParallelError(f"RANK must be in 0..{size - 1}, got {rank}; start it by torchrun")
    return rank, size, local_rank


def _meet(world: World) -> World:
    """The world with the store at which its ranks meet."""
    from torch.distributed.rendezvous import rendezvous

    try:
        wait = timedelta(seconds=world.timeout)
        store, _, _ = next(iter(rendezvous("env://", world.rank, world.size, timeout=wait)))
    except (RuntimeError, ValueError) as error:
        raise ParallelError(
            f"rank {world.rank} of {world.size} did not reach the others within {world.timeout:g} seconds: "
            f"{str(error).splitlines()[0]}; see that every rank was started"
        ) from error
    # A prefix for each restart: torchrun's store outlives them.
    world = replace(world, store=_part(store, f"hecate/{world.restarts}/{world.size}"))
    if world.store is not None:
        world.store.set(f"process/{world.rank}", json.dumps([_machine(), os.getpid(), _start_time(os.getpid())]))
    return world


def _machine() -> str:
    """Identity of this machine until it reboots, and of its process numbering; empty if it is not known."""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
        return f"{boot.strip()} {Path('/proc/self/ns/pid').readlink()}"
    return ""


def _start_time(process: int) -> str:
    """Start time of a process of this machine; empty if it has ended."""
    with suppress(OSError):
        state, *facts = Path(f"/proc/{process}/stat").read_bytes().rpartition(b") ")[2].split()
        return "" if state in (b"Z", b"X") else facts[18].decode()
    return ""


def _has_ended(store: Store, rank: int) -> bool:
    """True if the process of a rank is known to have ended; this is known for processes of this machine only."""
    if not _machine() or not store.check([f"process/{rank}"]):
        return False
    machine, process, begun = json.loads(store.get(f"process/{rank}"))
    return bool(machine == _machine() and begun and _start_time(process) != begun)


def _part(store: Any, name: str) -> Store:
    from torch._C._distributed_c10d import PrefixStore

    return PrefixStore(name, store)


@contextmanager
def _naming_loss(world: World) -> Iterator[None]:
    """Turns torch's errors for a lost rank into a `ParallelError`."""
    from torch.distributed import DistError

    try:
        yield
    except RuntimeError as error:
        text = str(error)
        if isinstance(error, HecateError) or not (isinstance(error, DistError) or "gloo" in text or "NCCL" in text):
            raise
        raise ParallelError(
            f"rank {world.rank} of {world.size} lost another rank: it ended, or did not answer within "
            f"{world.timeout:g} seconds ({text.splitlines()[0][:200]})"
        ) from error


@cache
def code() -> str:
    """A hash of the sources of this package."""
    digest, package = hashlib.sha256(), Path(__file__).resolve().parent.parent
    for path in sorted(package.rglob("*.py")):
        digest.update(path.relative_to(package).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]
