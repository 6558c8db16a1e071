"""Processes that talk to one another on this machine."""

from __future__ import annotations

import socket
import traceback
from datetime import timedelta
from multiprocessing.queues import SimpleQueue

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

SECONDS = 60.0


def world(size: int, function, *args) -> list:
    """What `function(rank, size, *args)` returns on each of so many processes of one gloo group."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    found = mp.get_context("spawn").SimpleQueue()
    mp.spawn(_run, (size, port, found, function, args), nprocs=size)
    answers = dict(found.get() for _ in range(size))
    return [answers[rank] for rank in range(size)]


def _run(rank: int, size: int, port: int, found: SimpleQueue, function, args) -> None:
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    dist.init_process_group(
        "gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=size, timeout=timedelta(seconds=SECONDS)
    )
    try:
        found.put((rank, function(rank, size, *args)))
    except Exception:
        traceback.print_exc()
        raise
    finally:
        dist.destroy_process_group()
