"""Checkpoints of many processes: read by any world to the bit, whole after any kill, refused where damaged."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import shutil
import signal
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from hecate.errors import CheckpointError
from hecate.models import LanguageModel, LanguageModelConfig
from hecate.optim import PhiMomentum
from hecate.train import Checkpoint, checkpoints, load_checkpoint, newest_checkpoint, save_checkpoint
from hecate.train import sharded as module
from hecate.train.checkpoint import LeftAloneError, best_checkpoint, prune_checkpoints, tiles
from hecate.train.sharded import Saver, Team, fill, staged, verified, write_sharded
from hecate.train.state import OptimizerFacts, pack, unpack
from tests.ranks import run_ranks

from .common import same_bits

WIDTHS = LanguageModelConfig(vocab_size=19, d_model=10, layers=2, heads=2, memory={"retention": "decay"})


SECONDS = 20.0
"""How long a process waits for another: a test that fails does not hang."""


def save_sharded(folder, step, tensors, facts, group):
    """Writes a checkpoint together."""
    team = Team(group)
    return write_sharded(folder, staged(step, Checkpoint(tensors, facts), team), team)


def load_sharded(path, tensors, group):
    """Fills tensors from a checkpoint together; gives its facts."""
    team = Team(group)
    content = verified(path, team)
    fill(path, content, tensors, team)
    return content.facts


def gloo() -> Any:
    """Another group of all processes."""
    return dist.new_group(backend="gloo", timeout=timedelta(seconds=SECONDS))


class Training:
    """A model and its optimisers in the world of this process, which may be alone."""

    def __init__(self, seed: int) -> None:
        torch.set_default_dtype(torch.float32)
        self.model: nn.Module = LanguageModel(WIDTHS, generator=torch.Generator().manual_seed(seed))
        self.mesh = init_device_mesh("cpu", (dist.get_world_size(),)) if dist.is_initialized() else None
        if self.mesh is not None:
            for block in self.model.blocks:
                fully_shard(block, mesh=self.mesh)
            fully_shard(self.model, mesh=self.mesh)
        matrices = [p for p in self.model.blocks.parameters() if p.ndim == 2]
        rest = [p for p in self.model.parameters() if not any(p is m for m in matrices)]
        self.optimizers = {"phi": PhiMomentum(matrices, lr=1e-2), "adamw": torch.optim.AdamW(rest, lr=1e-2)}

    def train(self, steps: range) -> None:
        for step in steps:
            tokens = torch.randint(0, 19, (2, 9), generator=torch.Generator().manual_seed(step))
            logits, _ = self.model(tokens[:, :-1])
            nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
            for optimizer in self.optimizers.values():
                optimizer.step()
                optimizer.zero_grad()

    def checkpoint(self) -> Checkpoint:
        tensors, optimizer = pack(self.model, self.optimizers.values())
        return Checkpoint(tensors, {"optimizer": optimizer, "metrics": {"validation_loss": 1.0}})

    def restore(self, checkpoint: Checkpoint, where: str) -> None:
        facts = OptimizerFacts.model_validate(checkpoint.facts["optimizer"])
        unpack(self.model, self.optimizers.values(), checkpoint.tensors, facts, where)


def whole(tensors) -> dict[str, torch.Tensor]:
    return {k: (v.full_tensor() if isinstance(v, DTensor) else v).detach().clone() for k, v in tensors.items()}


def message(act, kind: type[Exception] = CheckpointError) -> str:
    try:
        act()
    except kind as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def odd(mesh) -> dict[str, torch.Tensor]:
    """Parts that are uneven, empty, columns, of no dimension, of other dtypes, the same memory."""
    draw = torch.Generator().manual_seed(5)
    spread = {
        "bf16": torch.randn(7, 3, generator=draw).bfloat16(),
        "one row": torch.randn(1, 4, generator=draw),
        "none": torch.zeros(0, 3),
        "count": torch.arange(3),
    }
    found = {f"x/{k}": distribute_tensor(v, mesh, [Shard(0)]) for k, v in spread.items()}
    found["x/columns"] = distribute_tensor(torch.randn(4, 6, generator=draw), mesh, [Shard(1)])
    found["x/copied"] = distribute_tensor(torch.tensor(2.5), mesh, [Replicate()])
    plain = torch.randn(4, 4, generator=draw)
    found |= {
        "x/plain": plain,
        "x/view": plain[1:3],
        "x/turned": plain.T,
        "x/tied": plain,
        "x/flag": torch.tensor([True]),
    }
    return found | {"x/a row too": found["x/one row"].detach(), "x/u16": torch.arange(5).to(torch.uint16)}


# One pair of processes for all that two can show.


def pair(folder: str) -> list[Any]:
    here, group, first = Path(folder), gloo(), dist.get_rank() == 0
    training = Training(seed=0)
    training.train(range(3))
    given = training.checkpoint()
    given = given._replace(tensors={**given.tensors, **odd(training.mesh)})
    reference = whole(given.tensors)
    if first:  # what one process would write
        save_checkpoint(here / "one", 3, Checkpoint(reference, given.facts))
    path = save_sharded(here / "two", 3, given.tensors, given.facts, group)
    assert path == here / "two" / "step_00000003"
    save_sharded(here / "two", 3, given.tensors, {**given.facts, "again": 1}, group)
    assert [p.name for p in checkpoints(here / "two")] == [path.name]
    found = [other_placements(path, training.mesh, reference, group)]
    bare = {k: v for k, v in given.tensors.items() if not k.startswith("x/")}
    if first:
        save_checkpoint(here / "alone", 3, Checkpoint(whole_of(bare, reference), given.facts))
    dist.barrier()
    found.append(resumed(here / "alone", reference, group))
    found.append(behind(here / "behind", training, group))
    dist.barrier()
    return [*found, damages(here, path, group), failures(here / "failing", training, group)]


def whole_of(names, reference) -> dict[str, torch.Tensor]:
    return {name: reference[name] for name in names}


def other_placements(path: Path, mesh, reference, group) -> bool:
    """Into tensors placed otherwise than they were written."""
    into: dict[str, torch.Tensor] = {
        "x/columns": distribute_tensor(torch.zeros(4, 6), mesh, [Shard(0)]),
        "x/bf16": torch.zeros(7, 3, dtype=torch.bfloat16),
        "x/one row": distribute_tensor(torch.zeros(1, 4), mesh, [Replicate()]),
        "x/plain": distribute_tensor(torch.zeros(4, 4), mesh, [Shard(1)]),
        "x/tied": torch.zeros(4, 4),
        "x/none": torch.zeros(0, 3),
        "x/copied": torch.zeros(()),
    }
    facts = load_sharded(path, into, group)
    return facts["again"] == 1 and same_bits(whole(into), {name: reference[name] for name in into})


def resumed(folder: Path, reference, group) -> list[bool]:
    """What one process wrote, on two."""
    other = Training(seed=1)
    path, found, skipped = Saver(folder, 1, group=group).newest(other)
    other.restore(found, str(path))
    placed = all(isinstance(p, DTensor) for p in other.model.parameters())
    after = whole(other.checkpoint().tensors)
    return [skipped == [], placed, same_bits(after, {name: reference[name] for name in after})]


def behind(folder: Path, training: Training, group) -> list[bool]:
    """Written from a copy of the moment, while the run goes on."""
    before = whole(training.checkpoint().tensors)
    with Saver(folder, 2, behind=True, group=group) as saver:
        for step in (1, 2, 3):
            given = training.checkpoint()
            given.facts["note"] = [step]
            saver.save(step, given)
            with torch.no_grad():
                for p in training.model.parameters():
                    p.to_local().add_(1.0)
            given.facts["note"].append("later")
            if step == 1:
                saver.wait()
                first = load_checkpoint(folder / "step_00000001")
    dist.barrier()  # rank 0 deletes what is older
    names = [path.name for path in checkpoints(folder)]
    return [same_bits(first.tensors, before), first.facts["note"] == [1], names == ["step_00000002", "step_00000003"]]


def shard(path: Path, number: int) -> Path:
    return path / f"shard-0000{number}-model-00001-of-00001.safetensors"


def _cut(path: Path) -> None:
    data = shard(path, 2).read_bytes()
    shard(path, 2).write_bytes(data[:-8])


def _flip(path: Path) -> None:
    data = bytearray(shard(path, 1).read_bytes())
    data[-3] ^= 1
    shard(path, 1).write_bytes(data)


def _forge(change):
    """A manifest whose digests are right and that says something else."""

    def act(path: Path) -> None:
        from hecate.train.checkpoint import describe_file, manifest_text

        document = json.loads((path / "manifest.json").read_text())
        content = document["content"]
        change(path, content)
        for name in content["files"]:
            content["files"][name] = describe_file(path / name).model_dump()
        (path / "manifest.json").write_text(manifest_text(2, **content))

    return act


def _cast(path: Path, _: dict) -> None:
    from safetensors import safe_open

    for number in (1, 2):
        with safe_open(shard(path, number), "pt") as opened:
            about = opened.metadata()
        tensors = load_file(shard(path, number))
        tensors["model/embedding.weight"] = tensors["model/embedding.weight"].double()
        save_file(tensors, shard(path, number), about)


def _swap(_: Path, content: dict) -> None:
    for piece in content["tensors"]["model/embedding.weight"]["pieces"]:
        piece["file"] = shard(Path(), 3 - int(piece["file"][10])).name


DAMAGE = {
    "first missing": (lambda path: shard(path, 1).unlink(), "shard-00001-.* is missing; delete"),
    "last missing": (lambda path: shard(path, 2).unlink(), "shard-00002-.* is missing; delete"),
    "of a larger world": (lambda path: shutil.copy(shard(path, 2), shard(path, 3)),
                          "shard-00003-.* is not of this checkpoint: no manifest lists it; delete"),
    "cut off": (_cut, r"shard-00002-.* is cut off: \d+ of \d+ bytes; delete"),
    "a flipped bit": (_flip, "shard-00001-.* is damaged: it has another sha256 than recorded; delete"),
    "no manifest": (lambda path: (path / "manifest.json").unlink(), "manifest.json is missing; delete"),
    "a folder in its place": (lambda path: (shard(path, 1).unlink(), shard(path, 1).mkdir()),
                              "shard-00001-.* cannot be read"),
    "another dtype": (_forge(_cast), "shard-00001-.* tensor 'model/embedding.weight'"),
    "swapped blocks": (_forge(_swap), "shard-0000.-.* tensor 'model/embedding.weight'"),
}  # fmt: skip


def damages(here: Path, path: Path, group) -> dict[str, str]:
    """What each damage is refused with on this rank, which nothing has been changed on."""
    found = {}
    for number, (kind, (act, _)) in enumerate(DAMAGE.items()):
        bad = here / "damaged" / str(number) / path.name
        if dist.get_rank() == 0:
            shutil.copytree(path, bad)
            act(bad)
        dist.barrier()
        into = {"model/embedding.weight": torch.full((19, 10), -1.0)}
        found[kind] = message(lambda bad=bad, into=into: load_sharded(bad, into, group))
        assert bool((into["model/embedding.weight"] == -1).all())
    for kind, tensor in {
        "dtype here": torch.zeros(19, 10, dtype=torch.bfloat16),
        "shape here": torch.zeros(18, 10),
    }.items():
        into = {"model/embedding.weight": tensor}
        found[kind] = message(lambda into=into: load_sharded(path, into, group))
    found["name here"] = message(lambda: load_sharded(path, {"model/other": torch.zeros(1)}, group))
    return found


def failures(folder: Path, training: Training, group) -> list[str]:
    """A rank that cannot write, has another model, or does not see the folder: all ranks say so, nothing is lost."""
    given, second = training.checkpoint(), dist.get_rank() == 1
    save_sharded(folder, 1, given.tensors, given.facts, group)
    real, found = module.store.describe_file, []

    def full(file: Path):
        raise OSError(28, "No space left on device") if second else OSError("never")

    module.store.describe_file = full if second else real
    found.append(message(lambda: save_sharded(folder, 2, given.tensors, given.facts, group)))
    module.store.describe_file = real
    other = {**given.tensors, "x": torch.zeros(2 + second)}
    found.append(message(lambda: save_sharded(folder, 2, other, given.facts, group)))
    found.append(message(lambda: save_sharded(folder, 2, given.tensors, {"bad": float("nan")}, group)))
    with Saver(folder, 1, behind=True, group=group) as saver:
        module.store.describe_file = full if second else real
        saver.save(2, given)
        found.append(message(saver.wait))
        module.store.describe_file = real
    dist.barrier()
    assert [path.name for path in folder.iterdir()] == ["step_00000001"]
    dist.barrier()
    shutil.copytree(folder / "step_00000001", folder / "step_00000009") if not second else None
    dist.barrier()
    found.append(str([(p.name, s.path.name) for p, _, (s,) in [Saver(folder, 1, group=group).newest(training)]]))
    return found


@pytest.fixture(scope="module")
def two(tmp_path_factory) -> SimpleNamespace:
    folder = tmp_path_factory.mktemp("two")
    ranks = run_ranks(2, pair, str(folder), group=True)
    return SimpleNamespace(folder=folder, ranks=ranks)


@pytest.mark.spec("CKPT-SHARD-D1", "CKPT-SHARD-D2")
def test_two_write_what_one_reads_to_the_bit(two):
    path = two.folder / "two" / "step_00000003"
    one, found = load_checkpoint(two.folder / "one" / "step_00000003"), load_checkpoint(path)
    assert same_bits(found.tensors, one.tensors) and found.facts == {**one.facts, "again": 1}
    assert newest_checkpoint(path.parent)[0] == best_checkpoint(path.parent) == path
    names = sorted(p.name for p in path.iterdir())
    assert names == ["manifest.json", shard(path, 1).name, shard(path, 2).name]
    document = json.loads((path / "manifest.json").read_text())
    assert document["version"] == 2 and set(document["content"]["files"]) == set(names[1:])
    assert document["content"]["aliases"]["x/tied"] == "x/plain"  # and of a row that one rank has none of
    assert document["content"]["aliases"]["x/one row"] == "x/a row too"
    alone = Training(seed=3)
    alone.restore(Checkpoint({k: v for k, v in found.tensors.items() if not k.startswith("x/")}, found.facts), "two")
    expected = {k: v for k, v in one.tensors.items() if not k.startswith("x/")}
    assert same_bits(alone.checkpoint().tensors, expected)


@pytest.mark.spec("CKPT-SHARD-D2")
def test_what_was_written_is_read_into_other_placements_and_worlds(two):
    for placements, resumed_, *_ in two.ranks:
        assert placements and resumed_ == [True, True, True]


@pytest.mark.spec("CKPT-ASYNC-D1")
def test_two_write_behind_the_run_what_was_at_the_moment_of_the_call(two):
    assert [rank[2] for rank in two.ranks] == [[True, True, True]] * 2


@pytest.mark.spec("CKPT-SHARD-D3")
def test_every_damage_is_one_error_on_every_rank(two):
    import re

    one, other = (rank[3] for rank in two.ranks)
    assert one == other
    for kind, (_, expected) in DAMAGE.items():
        assert re.match(f"CheckpointError: {re.escape(str(two.folder))}.*{expected}", one[kind]), (kind, one[kind])
    assert "is [19, 10] torch.float32 there and [19, 10] torch.bfloat16 here" in one["dtype here"]
    assert "is [19, 10] torch.float32 there and [18, 10] torch.float32 here" in one["shape here"]
    assert "tensor 'model/other' is missing there" in one["name here"]


@pytest.mark.spec("CKPT-SHARD-D3")
@pytest.mark.parametrize("kind", [kind for kind in DAMAGE if kind != "swapped blocks"])
def test_one_process_refuses_the_same_damage(two, tmp_path, kind):
    number = list(DAMAGE).index(kind)
    with pytest.raises(CheckpointError, match=DAMAGE[kind][1]):
        load_checkpoint(two.folder / "damaged" / str(number) / "step_00000003")


@pytest.mark.spec("CKPT-SHARD-D3")
def test_what_fails_on_one_rank_is_raised_on_all(two):
    one, other = (rank[4] for rank in two.ranks)
    assert one == other
    full, differs, facts, late, skipped = one
    assert full.endswith("OSError: [Errno 28] No space left on device") and "cannot write checkpoint" in full
    assert "tensor 'x' is [2] torch.float32 on rank 0 and [3] torch.float32 on rank 1; all ranks must" in differs
    assert "plain JSON with finite numbers" in facts and late == full
    assert skipped == "[('step_00000001', 'step_00000009')]"


# A rank is killed at any moment.


def content(step: int) -> dict[str, torch.Tensor]:
    return {"w": torch.full((300_001, 3), float(step)), "m": torch.arange(5) * step, "step": torch.tensor(step)}


def write_on(rank: int, folder: Path, behind: bool) -> None:
    """Saves one step after the other until it is killed, or the other is."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    wait = timedelta(seconds=SECONDS)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2, timeout=wait)
    mesh = init_device_mesh("cpu", (2,))
    with Saver(folder / "checkpoints", 1, behind=behind, group=gloo()) as saver:
        for step in range(1, 10_000):
            full = content(step // 2)  # each step is written twice: over itself, too
            spread = {k: distribute_tensor(v, mesh, [Shard(0)], src_data_rank=None) for k, v in full.items() if v.ndim}
            saver.save(step // 2, Checkpoint(full | spread, {"step": step // 2}))


def ended_by(rank: int, folder: Path, behind: bool) -> None:
    try:
        write_on(rank, folder, behind)
    except LeftAloneError:
        os._exit(7)
    except BaseException:
        import traceback

        (folder / f"error-{rank}").write_text(traceback.format_exc())
        os._exit(1)


def killed(folder: Path, after: float, victim: int, behind: bool) -> int:
    """The step of the newest checkpoint after a kill of one of two ranks; the other ends with an error."""
    folder.mkdir()
    fork = multiprocessing.get_context("fork")
    ranks = [fork.Process(target=ended_by, args=(rank, folder, behind)) for rank in range(2)]
    for process in ranks:
        process.start()
    began = time.monotonic()
    while not checkpoints(folder / "checkpoints") and time.monotonic() - began < 60:
        time.sleep(0.005)
    time.sleep(after)
    os.kill(ranks[victim].pid, signal.SIGKILL)
    for process in ranks:
        process.join(60)
    faults = [file.read_text() for file in folder.glob("error-*")]
    assert ranks[1 - victim].exitcode == 7, faults
    _, found, skipped = newest_checkpoint(folder / "checkpoints")
    step = found.facts["step"]
    assert skipped == [] and same_bits(found.tensors, content(step))
    save_checkpoint(folder / "checkpoints", step + 1, found._replace(facts={}))
    prune_checkpoints(folder / "checkpoints", 1)
    assert [p.name for p in (folder / "checkpoints").iterdir()] == [f"step_{step + 1:08d}"]
    return step


@pytest.mark.spec("CKPT-SHARD-D1")
def test_a_rank_killed_at_any_moment_leaves_a_complete_checkpoint(tmp_path):
    chosen = random.Random(4)
    for number in range(4):
        killed(tmp_path / str(number), chosen.uniform(0, 0.5), number % 2, behind=number > 1)


# One process.


@pytest.mark.spec("CKPT-ASYNC-D1")
def test_one_process_writes_behind_the_run_what_was_at_the_moment_of_the_call(tmp_path):
    weight = torch.zeros(100_000)
    with Saver(tmp_path, 5, behind=True) as saver:
        for step in (1, 2, 3):
            facts = {"note": [step]}
            saver.save(step, Checkpoint({"w": weight.fill_(step), "tied": weight}, facts))
            weight.fill_(-1)
            facts["note"].append("later")
    for step in (1, 2, 3):
        found = load_checkpoint(tmp_path / f"step_0000000{step}")
        assert bool((found.tensors["tied"] == step).all()) and found.facts == {"note": [step]}
    save_checkpoint(tmp_path / "now", 3, found)
    for name in ("manifest.json", "tensors.safetensors"):
        now, late = (folder / "step_00000003" / name for folder in (tmp_path / "now", tmp_path))
        assert now.read_bytes() == late.read_bytes()


@pytest.mark.spec("CKPT-ASYNC-D1")
def test_what_fails_behind_the_run_is_raised_by_whatever_comes_next(tmp_path):
    blocked = tmp_path / "file"
    blocked.touch()
    given = Checkpoint({"w": torch.zeros(3)}, {})
    with Saver(blocked, 1, behind=True) as saver:
        saver.save(1, given)
        with pytest.raises(CheckpointError, match="cannot write checkpoint .*step_00000001"):
            saver.save(2, given)
    with pytest.raises(CheckpointError, match="step_00000003"), Saver(blocked, 1, behind=True) as saver:
        saver.save(3, given)
    with pytest.raises(KeyError) as caught, Saver(blocked, 1, behind=True) as saver:
        saver.save(4, given)
        raise KeyError("the run's own")
    assert "step_00000004" in caught.value.__notes__[0]


@pytest.mark.spec("CKPT-WRITE-D1")
def test_checkpoints_have_the_mode_of_any_file(tmp_path):
    for mask, mode in ((0o002, 0o664), (0o077, 0o600)):
        before = os.umask(mask)
        try:
            path = save_checkpoint(tmp_path / str(mask), 1, Checkpoint({"w": torch.zeros(3)}, {}))
        finally:
            os.umask(before)
        assert {file.stat().st_mode & 0o777 for file in path.iterdir()} == {mode}


def test_blocks_cover_a_tensor_once():
    for boxes, shape, complete in (
        ([[(0, 3)], [(3, 2)]], (5,), True),
        ([[(3, 2)], [(0, 3)]], (5,), True),
        ([[(0, 3)]], (5,), False),
        ([[(0, 3)], [(2, 3)]], (5,), False),
        ([[(0, 3)], [(0, 3)], [(3, 2)]], (5,), False),
        ([[(0, 3)], [(3, 3)]], (5,), False),
        ([[(0, 2), (0, 3)], [(0, 2), (3, 3)], [(2, 1), (0, 6)]], (3, 6), True),
        ([[(0, 2), (0, 3)], [(0, 2), (4, 2)], [(2, 1), (0, 6)]], (3, 6), False),
        ([[]], (), True),
        ([], (), False),
        ([], (0, 3), True),
        ([], (2,), False),
    ):
        assert tiles(boxes, shape) is complete
