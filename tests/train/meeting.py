"""Processes of one machine that meet over gloo, and what each of them found."""

from __future__ import annotations

import json
import multiprocessing
import os
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

SECONDS = 20.0
"""How long a process waits for another: a test that fails does not hang."""


def enter(rank: int, size: int, store: Path) -> None:
    """Makes this process one of `size`, that meet at a file."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    where, wait = f"file://{store}", timedelta(seconds=SECONDS)
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=size, timeout=wait)


def gloo() -> Any:
    """Another group of all processes."""
    return dist.new_group(backend="gloo", timeout=timedelta(seconds=SECONDS))


def _work(rank: int, size: int, folder: Path, act: Callable[..., Any], given: tuple[Any, ...]) -> None:
    try:
        enter(rank, size, folder / "store")
        found = {"value": act(*given)}
        dist.destroy_process_group()
    except BaseException:
        found = {"error": traceback.format_exc()}
    (folder / f"{rank}.json").write_text(json.dumps(found))


def in_world(size: int, folder: Path, act: Callable[..., Any], *given: Any) -> list[Any]:
    """What `act(*given)`, a function of a module, gives on each of `size` processes: plain JSON."""
    folder.mkdir()
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=_work, args=(rank, size, folder, act, given)) for rank in range(size)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
        if process.is_alive():
            process.kill()
    files = [folder / f"{rank}.json" for rank in range(size)]
    found = [json.loads(file.read_text()) if file.exists() else {"error": "it did not end"} for file in files]
    assert not (faults := [each["error"] for each in found if "error" in each]), "\n".join(faults)
    return [each["value"] for each in found]
