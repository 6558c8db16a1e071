"""Requests in one batch: what each is answered is what it is answered alone, whoever comes, goes or fails beside it."""

from __future__ import annotations

import gc
import random
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from hecate import states
from hecate.errors import CheckpointError, ConfigError, NonFiniteError, ShapeError
from hecate.serve import Memories, PrefixCache, QueueFull, Request, Scheduler
from tests.serve.common import KINDS, alone, drawn, made, run

SOME = [kind if kind == "gated_delta" else pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS]


@pytest.mark.parametrize("kind", SOME)
@pytest.mark.spec("SERVE-BATCH-D1")
def test_64_requests_that_come_and_go_are_answered_as_alone(kind):
    model, draws = made(kind), random.Random(1)
    prompts = drawn(1, *(draws.randrange(1, 60) for _ in range(64)))
    counts = [draws.randrange(1, 12) for _ in prompts]
    scheduler = Scheduler(model, max_batch=8, piece=16)
    asked: list[Request] = []
    cancelled: set[int] = set()
    admitted: dict[int, int] = {}
    while scheduler.step() or len(asked) < 64:
        for _ in range(draws.randrange(3)):
            if len(asked) < 64:
                asked.append(scheduler.submit(Request(prompts[len(asked)], counts[len(asked)])))
        if draws.random() < 0.3 and asked:
            number = draws.randrange(len(asked))
            if asked[number].finish is None:
                asked[number].cancelled = True
                cancelled.add(number)
        for number, request in enumerate(asked):
            if request.made:
                admitted.setdefault(number, scheduler.counts["steps"])
        assert scheduler.running <= 9
    assert len(cancelled) > 3
    for number, request in enumerate(asked):
        wanted = alone(model, [prompts[number]], counts[number])[0]
        assert request.made == wanted[: len(request.made)]
        assert request.finish == ("cancelled" if number in cancelled and len(request.made) < len(wanted) else "length")
        assert request.finish == "cancelled" or request.made == wanted
    order = [step for _, step in sorted(admitted.items())]
    assert order == sorted(order)  # in the order of arrival: nobody starves
    assert scheduler.running == scheduler.waiting == 0 and scheduler.counts["requests"] == 64


@pytest.mark.spec("SERVE-BATCH-D1")
def test_a_long_prompt_keeps_nobody_waiting():
    model = made()
    scheduler = Scheduler(model, piece=8, max_batch=4)
    short = scheduler.submit(Request([1, 2], 30))
    scheduler.step()
    long = scheduler.submit(Request(drawn(1, 160)[0], 1))
    scheduler.step()
    before = len(short.made)
    for step in range(5):
        assert scheduler.step() and len(short.made) == before + step + 1
    assert not long.made
    run(scheduler)
    assert len(long.made) == 1


@pytest.mark.spec("SERVE-BATCH-D1")
def test_draws_are_of_the_request_and_its_seed():
    model, prompts = made(), drawn(2, 5, 9, 13)
    how: dict[str, Any] = {"temperature": 0.8, "top_p": 0.9, "top_k": 40}

    def answers(numbers: tuple[int, ...]) -> dict[int, list[int]]:
        scheduler = Scheduler(model)
        asked = {number: scheduler.submit(Request(prompts[number], 8, seed=number, **how)) for number in numbers}
        run(scheduler)
        return {number: request.made for number, request in asked.items()}

    together = answers((0, 1, 2))
    assert together == answers((2, 1, 0)) == answers((0,)) | answers((1,)) | answers((2,))
    other = Scheduler(model).submit(Request(prompts[0], 8, seed=9, **how))
    assert other.made == [] and together[0] != alone(model, [prompts[0]], 8)[0]


@pytest.mark.spec("SERVE-BATCH-D2")
def test_a_row_that_fails_ends_alone(monkeypatch):
    model, prompts = made(), drawn(3, 5, 7, 9, 11)
    wanted = [alone(model, [prompt], 12)[0] for prompt in prompts]
    scheduler = Scheduler(model)
    asked = [scheduler.submit(Request(prompt, 12)) for prompt in prompts]
    for _ in range(4):
        scheduler.step()
    for leaf in states.leaves(scheduler._state).values():  # the state of one row is spoilt
        leaf[2] = float("nan") if leaf.is_floating_point() else leaf[2]
    run(scheduler)
    assert [request.finish for request in asked] == ["length", "length", "error", "length"]
    assert isinstance(asked[2].error, NonFiniteError) and asked[2].made == wanted[2][: len(asked[2].made)]
    assert [request.made for n, request in enumerate(asked) if n != 2] == [wanted[n] for n in (0, 1, 3)]
    # Numbers that no layer looks at, but for the logits.
    forward = type(model).forward

    def spoilt(self: Any, tokens: torch.Tensor, state: Any = None, **masks: Any) -> Any:
        logits, state = forward(self, tokens, state, **masks)
        return torch.where((tokens[:, -1:, None] == wanted[1][0]), float("nan"), logits), state

    monkeypatch.setattr(type(model), "forward", spoilt)
    asked = [scheduler.submit(Request(prompt, 1 + n)) for n, prompt in enumerate(prompts[:2])]
    run(scheduler)
    assert [request.finish for request in asked] == ["length", "error"] and len(asked[1].made) == 1


@pytest.mark.spec("SERVE-BATCH-D2")
def test_bounds_and_bad_requests():
    model = made()
    scheduler = Scheduler(model, max_queue=2, max_batch=1)
    first = scheduler.submit(Request([1], 3))
    late = scheduler.submit(Request([2], 3, deadline=time.monotonic() - 1))
    with pytest.raises(QueueFull, match="2 requests wait already"):
        scheduler.submit(Request([3], 3))
    run(scheduler)
    assert first.finish == "length" and late.finish == "timeout" and late.made == []
    stopped = scheduler.submit(Request([1], 9, frozenset(first.made[1:2])))
    run(scheduler)
    assert stopped.finish == "stop" and stopped.made == first.made[: len(stopped.made)] and len(stopped.made) <= 2
    for bad, error, match in (
        (Request([]), ConfigError, "at least one token"), (Request([256]), ShapeError, "tokens must be in 0..255"),
        (Request([-1]), ShapeError, "tokens must be"), (Request([1], 0), ConfigError, "max_tokens must be"),
        (Request([1], temperature=float("nan")), ConfigError, "temperature must be"),
        (Request([1], top_p=2.0), ConfigError, "top_p must be"),
        (Request([1], user="a"), ConfigError, "leave user out"),
    ):  # fmt: skip
        with pytest.raises(error, match=match):
            scheduler.submit(bad)
    with pytest.raises(ConfigError, match="power of two"):
        Scheduler(model, max_batch=3)
    grows = made(attention={"kind": "mag"})
    with pytest.raises(ConfigError, match="grow with the tokens, and make no batch: give its attention a window"):
        Scheduler(grows)


@pytest.mark.spec("SERVE-BATCH-D2")
def test_a_failure_ends_everybody_and_is_told(monkeypatch):
    scheduler = Scheduler(made())
    asked = [scheduler.submit(Request([n + 1], 500)) for n in range(3)]
    told = threading.Event()
    asked[2].tell = lambda token: told.set() if token is None else None
    scheduler.start()
    assert scheduler.alive
    monkeypatch.setattr(scheduler, "_run", lambda *args: 1 / 0)
    assert told.wait(20) and all(request.finish == "error" for request in asked)
    scheduler.stop()
    assert not scheduler.alive
    with pytest.raises(ConfigError, match="has ended after a failure"):
        scheduler.submit(Request([1]))


@pytest.mark.spec("SERVE-USER-D1")
def test_a_user_is_remembered_by_files_of_one_model(tmp_path):
    model, turns = made("levels"), drawn(5, 7, 5, 6)
    mark, wanted = states.fingerprint(model), alone(model, turns, 6)
    folder = tmp_path / "users"
    for turn, answer in zip(turns, wanted, strict=True):  # each with a scheduler of its own, as after a restart
        memories = Memories(folder, mark)
        scheduler = Scheduler(model, memories=memories, prefixes=PrefixCache(block=4))
        user, other = scheduler.submit(Request(turn, 6, user="../ada")), scheduler.submit(Request(turn, 6, user="bob"))
        broken = scheduler.submit(Request(turn, 6, user="eve"))
        broken.tell = lambda token, own=broken: setattr(own, "cancelled", True)  # by its first token
        run(scheduler)
        memories.close()
        assert user.made == answer and broken.finish == "cancelled"
    assert other.made == alone(model, turns, 6)[2]  # whose turns were the same
    assert sorted(path.name for path in folder.iterdir() if path.suffix) == sorted(
        memories.path(user).name for user in ("../ada", "bob")
    )
    with pytest.raises(CheckpointError, match="or stop the server that has it"):
        kept = Memories(folder, mark)
        Memories(folder, mark)
    kept.close()
    # Two turns of one user at once are answered one after the other.
    memories = Memories(folder, mark, max_bytes=1)
    assert memories.delete("../ada") and not memories.delete("../ada")
    memories.max_bytes = 1 << 30
    scheduler = Scheduler(model, memories=memories)
    asked = [scheduler.submit(Request(turn, 6, user="ada")) for turn in turns]
    scheduler.step()
    with pytest.raises(ConfigError, match="a request of this user is being answered"):
        scheduler.forget("ada")
    run(scheduler)
    assert [request.made for request in asked] == wanted and scheduler.forget("ada")
    memories.max_bytes = memories.bytes - 1  # a limit lowered since is for new users
    with pytest.raises(ConfigError, match="memories have .* is not kept"):
        scheduler.submit(Request([1], user="new"))
    known = scheduler.submit(Request([1], 1, user="bob"))
    run(scheduler)
    assert known.finish == "length"
    memories.close()
    foreign = Memories(folder, "0" * 64)
    strange = Scheduler(model, memories=foreign)
    found = strange.submit(Request([1], 2, user="bob"))
    run(strange)
    assert found.finish == "error" and isinstance(found.error, CheckpointError)
    foreign.close()


@pytest.mark.spec("SERVE-USER-D1")
def test_new_users_at_once_are_counted_before_they_have_files(tmp_path):
    model, bob = made(), Request([1], 1, user="bob")
    memories = Memories(tmp_path, states.fingerprint(model))
    scheduler = Scheduler(model, memories=memories)
    memories.max_bytes = 2 * scheduler.file_bytes
    gone = scheduler.submit(Request([1], 1, user="eve", deadline=time.monotonic() - 1))
    for request in (bob, Request([2], 1, user="bob")):
        scheduler.submit(request)
    for _ in range(2):  # waiting, then running
        with pytest.raises(ConfigError, match="memories have .* is not kept"):
            scheduler.submit(Request([1], 1, user="new"))
        scheduler._end_early()
        assert scheduler.submit(Request([1], 500, user="eve")) and gone.finish == "timeout"
        scheduler.step()
    run(scheduler)
    assert len(memories) == 2 and memories.bytes == memories.max_bytes
    memories.close()


@pytest.mark.spec("SERVE-BATCH-D2", "SERVE-USER-D1")
def test_a_memory_that_the_last_token_spoils_is_not_kept(tmp_path, monkeypatch):
    model = made()
    memories, whole = Memories(tmp_path, states.fingerprint(model)), Scheduler._run
    scheduler = Scheduler(model, memories=memories)
    asked = scheduler.submit(Request([1, 2], 3, user="ada"))

    def spoilt(self: Any, tokens: Any, state: Any) -> Any:
        logits, state = whole(self, tokens, state)
        return logits * (float("nan") if len(asked.made) == 3 else 1), state

    monkeypatch.setattr(Scheduler, "_run", spoilt)
    run(scheduler)
    assert asked.finish == "error" and isinstance(asked.error, NonFiniteError) and len(memories) == 0
    memories.close()


@pytest.fixture
def new_objects() -> Iterator[None]:
    """Collections and lists of objects leave out what is there already, which a session has many of."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.usefixtures("new_objects")
@pytest.mark.spec("SERVE-BATCH-D1")
def test_nothing_is_kept_of_requests_that_have_ended():
    scheduler = Scheduler(made(), max_batch=4)

    def kept() -> int:
        gc.collect()
        return len(gc.get_objects())

    def ask(count: int) -> None:
        for prompt in drawn(7, *[3] * count):
            scheduler.submit(Request(prompt, 3))
            if scheduler.waiting > 8:
                run(scheduler)
        run(scheduler)

    ask(12)
    before = kept()
    ask(40)
    assert 0 < kept() <= before + 2 and scheduler._state is None
