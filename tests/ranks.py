"""A function on several gloo processes of this machine, with the environment that torchrun gives them."""

from __future__ import annotations

import os
import socket
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.multiprocessing as mp

PATIENCE = 120  # seconds for all of them together


def run_ranks(size: int, function: Callable[..., Any], *arguments: Any, lost: Sequence[int] = ()) -> list[Any]:
    """What `function(*arguments)` returns on each rank, in order, as plain values; it is importable by name.

    An error on any rank is raised here with its traceback; None stands for ranks that are to be `lost`.
    """
    context = mp.get_context("spawn")
    pipes = [context.Pipe(duplex=False) for _ in range(size)]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = [
        context.Process(target=_rank, args=(rank, size, port, pipes[rank][1], function, arguments), daemon=True)
        for rank in range(size)
    ]
    for process in processes:
        process.start()
    for _, end in pipes:
        end.close()  # so that a process that dies is seen
    found: list[Any] = [None] * size
    try:
        for rank, (pipe, _) in enumerate(pipes):
            if rank in lost:
                continue
            if not pipe.poll(PATIENCE):
                raise AssertionError(f"rank {rank} of {size} has not answered within {PATIENCE} seconds")
            found[rank] = pipe.recv()
    except EOFError:
        raise AssertionError(f"rank {rank} of {size} died") from None
    finally:
        for process in processes:
            process.join(0 if process.exitcode is None and found[processes.index(process)] is None else 10)
            process.kill()
    faults = [text for kind, text in filter(None, found) if kind == "fault"]
    if faults:
        raise AssertionError("\n".join(faults))
    return [None if each is None else each[1] for each in found]


def _rank(rank: int, size: int, port: int, pipe: Any, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    os.environ |= {**address, "RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank)}
    try:
        pipe.send(("value", function(*arguments)))
    except BaseException:
        pipe.send(("fault", f"rank {rank}:\n{traceback.format_exc()}"))
    finally:
        pipe.close()
