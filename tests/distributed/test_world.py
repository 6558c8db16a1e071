"""Who a process is among others, how they agree, and what happens where one is missing."""

from __future__ import annotations

import os
import socket
import time

import pytest
import torch

from hecate.distributed import ParallelConfig, World, start
from hecate.errors import CheckpointError, ConfigError, ParallelError
from tests.ranks import run_ranks


@pytest.mark.spec("DIST-WORLD-D1")
@pytest.mark.parametrize(
    ("given", "size", "shape"),
    [
        ({}, 1, (1, 1, 1)),
        ({}, 6, (1, 6, 1)),
        ({"replicate": 2}, 6, (2, 3, 1)),
        ({"data": 1, "replicate": "auto"}, 4, (4, 1, 1)),
        ({"data": 2, "context": 2}, 4, (1, 2, 2)),
    ],
)
def test_a_mesh_fills_the_world(given, size, shape):
    assert ParallelConfig(**given).shape(size) == shape


@pytest.mark.spec("DIST-WORLD-D1")
@pytest.mark.parametrize(
    ("given", "size", "message"),
    [
        ({"data": 4}, 2, "replicate 1 x data 4 x context 1 does not fit a world of 2 processes"),
        ({"data": 4}, 1, "does not fit one process; start it under torchrun"),
        ({"replicate": 2}, 3, "replicate 2 x data auto x context 1 does not fit a world of 3 processes"),
    ],
)
def test_a_mesh_of_another_size_is_refused(given, size, message):
    with pytest.raises(ConfigError, match=message):
        ParallelConfig(**given).shape(size)


def test_one_process_is_a_world_without_a_mesh():
    with start(ParallelConfig()) as world:
        assert (world.rank, world.size, world.main, world.mesh) == (0, 1, True, None)
        assert world.rows(5) == range(5) and world.any(True) and not world.any(False)
        assert world.from_main(lambda: 3) == 3 and float(world.sum(torch.tensor(2.0))) == 2
        world.agree({"a": 1})
    with pytest.raises(ConfigError, match="one process"), start(ParallelConfig(replicate=2)):
        pass


def test_an_environment_that_is_not_whole_is_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ParallelError, match="not whole"), start(ParallelConfig()):
        pass


@pytest.mark.parametrize(
    ("cards", "sentence"), [(0, "no CUDA device is available"), (2, r"2 CUDA devices .*torchrun --nproc-per-node 2")]
)
def test_a_card_that_is_not_here_is_refused(monkeypatch, cards, sentence):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    place = {"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cards > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: cards)
    with pytest.raises(ConfigError, match=f"budget.device: is 'cuda', .*{sentence}"), start(ParallelConfig(), "cuda"):
        pass


def asked() -> dict[str, object]:
    """What two ranks tell one another."""
    found: dict[str, object] = {}
    with start(ParallelConfig(), timeout=30.0) as world:
        found["sum"] = world.sum(torch.tensor([world.rank + 1, 10])).tolist()
        found["any"] = world.any(world.rank == 1), world.any(False)
        found["rows"] = list(world.rows(6))
        found["told"] = world.from_main(lambda: {"rank": world.rank})
        found["first"] = world.first_of("late" if world.rank == 1 else None), world.first_of(None)
        for name, mine in {"value": {"a": {"b": [1, world.rank]}}, "type": {"a": (1, True)[world.rank]}}.items():
            try:
                world.agree(mine)
            except ParallelError as error:
                found[name] = str(error)
        try:
            world.from_main(lambda: refuse(world))
        except CheckpointError as error:
            found["refused"] = str(error)
        try:
            world.rows(5)
        except ConfigError as error:
            found["uneven"] = str(error)
        world.remember("there")
        found["fresh"] = world.destination(lambda: f"of {world.rank}")
        object.__setattr__(world, "restarts", 1)
        found["again"] = world.destination(lambda: f"of {world.rank}")
    return found


def refuse(world: World) -> None:
    raise CheckpointError(f"no room on rank {world.rank}")


@pytest.mark.spec("DIST-WORLD-D2")
def test_ranks_tell_one_another():
    for rank, found in enumerate(run_ranks(2, asked)):
        assert found["sum"] == [3, 20] and found["any"] == (True, False)
        assert found["rows"] == list(range(3 * rank, 3 * rank + 3)) and found["told"] == {"rank": 0}
        assert found["first"] == ((1, "late"), None)
        assert str(found["value"]).startswith("a.b[1] is 1 on rank 1 and 0 on rank 0; start every rank with the same")
        assert str(found["type"]).startswith("a is True on rank 1 and 1 on rank 0")
        assert found["refused"] == "no room on rank 0"
        assert "must be a multiple of the 2 processes" in str(found["uneven"])
        assert found["fresh"] == ("of 0", False) and found["again"] == ("there", True)


def lonely(mode: str) -> tuple[str, str, float]:
    """What is raised, and after how many seconds."""
    rank, began = int(os.environ["RANK"]), time.monotonic()
    parallel = ParallelConfig(data=2) if mode == "other" and rank else ParallelConfig()
    if mode == "shape":
        parallel = ParallelConfig(data=3)
    try:
        with start(parallel, timeout=8.0) as world:
            world.any(False)
            began = time.monotonic()
            time.sleep(20 * rank)
            world.any(False)
    except (ParallelError, ConfigError) as error:
        return type(error).__name__, str(error), time.monotonic() - began
    return "", "", 0.0


@pytest.mark.spec("DIST-WORLD-D2")
def test_a_rank_of_another_kind_is_an_error_in_time():
    for kind, text, seconds in run_ranks(2, lonely, "other"):
        assert kind == "ParallelError" and seconds < 10
        assert text.startswith("parallel.data is 2 on rank 1 and 'auto' on rank 0")


def ended() -> list[tuple[str, float]]:
    """What rank 0 is told of two others that have ended, by a question and by a sum, and after how many seconds."""
    found, began = [], 0.0
    try:
        with start(ParallelConfig(), timeout=60.0) as world:
            world.any(False)
            if world.rank:
                os._exit(3)
            began = time.monotonic()
            with pytest.raises(ParallelError) as told:
                world.from_main(lambda: 1)
            found.append((str(told.value), time.monotonic() - began))
            began = time.monotonic()
            world.any(False)
    except ParallelError as error:
        found.append((str(error), time.monotonic() - began))
    return found


@pytest.mark.spec("DIST-WORLD-D3")
def test_ranks_that_have_ended_are_not_waited_for():
    ((asked, seconds), (summed, more)), *_ = run_ranks(3, ended, lost=[1, 2])
    assert asked == "rank 1 of 3 has ended; see what it reported" and seconds < 20
    assert "rank 0 of 3 lost another rank" in summed and more < 10


@pytest.mark.slow
def test_a_mesh_that_does_not_fit_and_a_rank_that_sleeps_are_errors_in_time():
    for kind, text, seconds in run_ranks(2, lonely, "shape"):
        assert kind == "ConfigError" and "does not fit a world of 2" in text and seconds < 10
    (kind, text, seconds), _ = run_ranks(2, lonely, "asleep", lost=[1])
    assert kind == "ParallelError" and "lost another rank" in text and seconds < 15
