"""A run under torchrun whose processes are killed at random moments, and what it leaves."""

from __future__ import annotations

import hashlib
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import torch

from hecate.train import dump_experiment, load_checkpoint
from hecate.train.checkpoint import checkpoints
from hecate.train.loggers import read_metrics
from tests.ranks import descendants
from tests.train.worlds import experiment

ROOT = Path(__file__).parents[2]
LIMIT = 1500.0  # seconds for a run


class Left(NamedTuple):
    """What a run has left: losses of its steps, tokens after each, a hash of all tensors at its end; the steps after
    which a process was killed, the steps that attempts began at, and seconds in all."""

    losses: list[float]
    tokens: list[int]
    weights: str
    killed: list[int]
    resumed: list[int]
    seconds: float


def run_killed(folder: Path, kills: int, *, steps: int = 120, save: str = "sync", seed: int = 0, size: int = 2) -> Left:
    """Trains under torchrun, of which so many times a process is killed, any of them: half of the times a while after
    all have started, whatever they do then, half of the times once the run has come further."""
    folder.mkdir(parents=True)
    budget = {"steps": steps, "save": save, "checkpoint_every": 5, "eval_every": 40, "timeout": 30.0}
    (folder / "it.yaml").write_text(dump_experiment(experiment("delta", budget=budget)))
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size)]
    launch += ["--max-restarts", str(kills), "-m", "hecate", "train", "it.yaml", "--out", "run"]
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    env = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    began, chosen, killed = time.monotonic(), random.Random(seed), list[int]()
    with (folder / "said").open("wb") as said:
        agent = subprocess.Popen([sys.executable, *launch], cwd=folder, env=env, stdout=said, stderr=said)
        try:
            known: set[int] = set()
            for number in range(kills):
                ranks = _fresh(agent, size, known, began)
                goal = (number + 1) * steps // (kills + 1)
                patience = chosen.uniform(0, 8) if number % 2 else 60.0
                until = time.monotonic() + patience
                while time.monotonic() < until and _step(folder) < goal and agent.poll() is None:
                    time.sleep(0.02)
                time.sleep(chosen.uniform(0, 0.2))
                if agent.poll() is not None or len(ranks) < size:
                    break
                killed.append(_step(folder))
                known |= set(ranks)
                os.kill(chosen.choice(ranks), signal.SIGKILL)
            code = agent.wait(max(1.0, LIMIT - (time.monotonic() - began)))
        finally:
            agent.kill()
    if code:
        raise AssertionError((folder / "said").read_text()[-4000:])
    records = read_metrics(folder / "run/metrics.jsonl")
    train = [record for record in records if record["event"] == "train"]
    digest, tensors = hashlib.sha256(), load_checkpoint(checkpoints(folder / "run/checkpoints")[-1]).tensors
    for name in sorted(tensors):
        digest.update(name.encode() + tensors[name].contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return Left(
        [record["loss"] for record in train], [record["tokens"] for record in train], digest.hexdigest(), killed,
        [record["step"] for record in records if record["event"] == "resume"], time.monotonic() - began,
    )  # fmt: skip


def _fresh(agent: subprocess.Popen[bytes], size: int, known: set[int], began: float) -> list[int]:
    """The processes of the next attempt, once there are all."""
    while agent.poll() is None and time.monotonic() - began < LIMIT:
        ranks = [pid for pid in descendants(agent.pid) if pid not in known and _is_rank(pid)]
        if len(ranks) == size:
            return ranks
        time.sleep(0.02)
    return []


def _is_rank(pid: int) -> bool:
    try:
        return b"hecate" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False


def _step(folder: Path) -> int:
    """How far a run has come."""
    file = folder / "run/metrics.jsonl"
    steps = [record["step"] for record in read_metrics(file)] if file.exists() else []
    return steps[-1] if steps else 0
