"""Trials of kernels in a child process. A kernel that hangs or accesses memory out of bounds takes the CUDA context of
its process with it; in this process that could cost a training run. [ENG-TRITON-I4]"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from hecate.engine.triton.parity import Unrun
from hecate.rule import MemoryConfig

CHILD = "from hecate.engine.triton.apart import answer; answer()"
BEGUN = "begun"  # the child prints this line once it has the card
PATIENCE = 600.0  # seconds: compilation is slow on a busy machine
Judge = Callable[[MemoryConfig, tuple[str, ...], torch.dtype, str, tuple[int, ...]], str | None]


def tried(
    judge: Judge, config: MemoryConfig, flags: tuple[str, ...], dtype: torch.dtype, device: str, shape: tuple[int, ...]
) -> str | None:
    """Runs `judge` (a module-level function) on a kernel in a child process and returns its verdict. It runs in this
    process where there is no card to lose, and where the child cannot run it: the card has no room left, or a class
    exists in this process only."""
    here = (config, flags, dtype, device, shape)
    if device != "cuda" or not sys.executable:
        return judge(*here)
    asked = {
        "judge": [judge.__module__, judge.__name__], "config": config.model_dump(mode="json"), "flags": flags,
        "dtype": str(dtype).removeprefix("torch."), "device": device, "shape": shape,
        "index": torch.cuda.current_device(),
    }  # fmt: skip
    where = f"on {dtype} with widths {shape}"
    paths = [str(Path(path).resolve()) for path in sys.path]
    try:
        done = subprocess.run(
            [sys.executable, "-c", CHILD], input=json.dumps(asked), capture_output=True, text=True, timeout=PATIENCE,
            check=False, env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"its kernel gives no answer in {PATIENCE:.0f} s {where}"
    lines = done.stdout.splitlines()
    if BEGUN not in lines:
        return judge(*here)
    if done.returncode or lines[-1] == BEGUN:
        said = done.stderr.strip().splitlines() or [""]
        return f"its kernel ends the process that tries it, by {done.returncode}, {where}: {said[-1][:300]}"
    reply = json.loads(lines[-1])
    if reply["lost"]:
        return f"its kernel takes the card with it {where}: {reply['reason']}"
    return judge(*here) if reply["unrun"] else reply["reason"]


def answer() -> None:
    """Entry point of the child: judges the kernel that standard input describes, prints the verdict as a line of
    JSON."""
    asked = json.loads(sys.stdin.read())
    device = asked["device"]
    if device == "cuda":
        torch.cuda.set_device(asked["index"])
    module, name = asked["judge"]
    config = MemoryConfig.model_validate(asked["config"])
    dtype: torch.dtype = getattr(torch, asked["dtype"])
    judge: Judge = getattr(importlib.import_module(module), name)
    torch.zeros(1, device=device)
    print(BEGUN, flush=True)
    reason, lost = judge(config, tuple(asked["flags"]), dtype, device, tuple(asked["shape"])), False
    if device == "cuda":
        try:
            torch.cuda.synchronize()
        except RuntimeError as error:
            reason, lost = f"{reason or error}", True
    print(json.dumps({"reason": reason, "unrun": isinstance(reason, Unrun), "lost": lost}), flush=True)
