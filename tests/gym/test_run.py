"""The gym itself: cheats and dead memories are told, cells are kept, bad input is one sentence."""

from __future__ import annotations

import csv
import json
import math
import sys
from functools import partial

import pytest
import torch

from hecate.errors import CheckpointError, ConfigError, NonFiniteError
from hecate.gym import Contender, contender_of, report, run, tasks
from hecate.gym.peers import Attention
from hecate.gym.run import scored
from hecate.gym.tasks import Facts, LinearMap, NoisyMap, Recall

LINEAR, NOISY = LinearMap(rows=4), NoisyMap(rows=2, length=128)


def dead(keys, values, state):
    return torch.zeros_like(keys), None


def constant(keys, values, state):
    return torch.ones_like(keys), None


def sees_the_answer(keys, values, state):
    return (torch.zeros_like(keys) if values is None else 0.9 * values), None


def sees_the_next_key(keys, values, state):
    return torch.roll(keys, -1, 1), None


class Asked:
    """The mean of what was written; being asked counts as being written."""

    def __call__(self, keys, values, state):
        total, count = state or (torch.zeros_like(keys[:, :1]), 0)
        said = torch.zeros_like(keys) if values is None else values
        running = total + said.cumsum(1)
        counts = count + torch.arange(1, keys.shape[1] + 1)[:, None]
        return (running - said) / counts, (running[:, -1:], count + keys.shape[1])


class WritesOtherwise(Asked):
    """A `write` that does not do what the call does."""

    def __call__(self, keys, values, state):
        if values is None:
            return (torch.zeros_like(keys) if state is None else state[0].expand_as(keys)), state
        before = torch.zeros_like(keys[:, :1]) if state is None else state[0]
        running = before + values.cumsum(1)
        return torch.cat([before, running[:, :-1]], 1), (running[:, -1:],)

    def write(self, keys, values, state):
        return (values[:, -1:],)


def knows_the_seed(task):
    """A contender that draws the stream itself, and so answers before anything is written."""

    class Knows:
        def __init__(self, seed):
            self.values = task.stream(seed).values

        def __call__(self, keys, values, state):
            start = state or 0
            found = self.values[: len(keys), start : start + keys.shape[1]]
            return found.clone(), start if values is None else start + keys.shape[1]

    return Contender("knows the seed", lambda setting, seed: Knows(seed))


@pytest.mark.parametrize(
    ("memory", "verdict", "reason"),
    [
        (dead, "no better than chance", "chance is 1"),
        (constant, "no better than chance", "chance is 1"),
        (sees_the_answer, "cheats", "answers depend on later tokens or on the right answer: token 0"),
        (sees_the_next_key, "cheats", "answers depend on later tokens or on the right answer"),
        (Asked(), "cheats", "answers depend on later tokens|being asked changes its answers"),
        (WritesOtherwise(), "cheats", "writing without an answer leaves another state"),
    ],
    ids=["dead", "constant", "answer", "future", "asked", "write"],
)
@pytest.mark.spec("GYM-FLAG-D1")
def test_planted_cheats_and_dead_memories_are_told(memory, verdict, reason):
    import re

    planted, ridge = run([memory, "ridge"], [LINEAR], seeds=2, reference="ridge")
    assert planted.verdict == verdict and re.search(reason, planted.reason) and planted.pair is None
    assert ridge.verdict == "reference" and not ridge.reason


class Recent:
    """The value before each token."""

    def __call__(self, keys, values, state):
        before = torch.zeros_like(keys[:, :1]) if state is None else state
        if values is None:
            return before.expand_as(keys), before
        return torch.cat([before, values[:, :-1]], 1), values[:, -1:].clone()


class PeeksInLongCalls(Recent):
    """As one whose blocks of 64 leak."""

    def __call__(self, keys, values, state):
        answers, state = super().__call__(keys, values, state)
        return (answers if values is None or keys.shape[1] < 64 else values), state


class PeeksInManyRows(Recent):
    def __call__(self, keys, values, state):
        answers, state = super().__call__(keys, values, state)
        return (answers if values is None or len(keys) < 3 else values), state


@pytest.mark.parametrize("memory", [PeeksInLongCalls(), PeeksInManyRows()], ids=["long", "rows"])
@pytest.mark.spec("GYM-FLAG-D1")
def test_who_cheats_in_whole_streams_alone_is_told(memory):
    task = NoisyMap(rows=3, length=128)
    planted, fair = run([memory, Recent()], [task], seeds=1, reference="Recent")
    assert planted.verdict == "cheats" and "right answer: token 85 differs" in planted.reason  # 128 * 2 // 3
    assert fair.verdict == "no better than chance"


@pytest.mark.spec("GYM-CALL-D1")
def test_what_a_memory_writes_into_its_arguments_reaches_nobody():
    class Overwrites(Recent):
        def __call__(self, keys, values, state):
            answers, state = super().__call__(keys, values, state)
            for given in (keys, keys if values is None else values):
                given.copy_(answers)
            return answers, state

    (alone,) = run([Recent()], [LINEAR], seeds=1)
    beside, after = run([Overwrites(), Recent()], [LINEAR], seeds=1)
    assert alone.scores == after.scores == beside.scores


@pytest.mark.spec("GYM-RUN-D1")
def test_objects_of_one_file_that_carry_something_else_are_run_anew(tmp_path):
    def scale(keys, values, state, by):
        return by * keys, state

    class Scaled:
        def __init__(self, by):
            self.by = by

        def __call__(self, keys, values, state):
            return scale(keys, values, state, self.by)

    def closed(by):
        return lambda keys, values, state: (by * keys, state)

    for made in (Scaled, closed, lambda by: partial(scale, by=by)):
        found = [run([made(by)], [LINEAR], seeds=1, out=tmp_path)[0] for by in (1.0, 3.0, torch.ones(()), 1.0)]
        assert found[0].scores == found[2].scores != found[1].scores
        assert found[0].seconds == found[3].seconds


def test_code_without_a_file_is_told_by_what_it_does():
    def made(text):
        space = {}
        exec(compile(text, "<cell>", "exec"), space)
        return contender_of(space["memory"], {}).facts

    text = "def memory(keys, values, state):\n    return {} * keys, state\n"
    assert made(text.format(2)) == made(text.format(2)) != made(text.format(3))


@pytest.mark.spec("GYM-FLAG-D1")
def test_who_knows_the_seed_is_below_the_noise():
    planted, ridge = run([knows_the_seed(NOISY), "ridge"], [NOISY], seeds=2, reference="ridge")
    assert planted.verdict == "beats what is possible" and planted.scores == (0.0, 0.0)
    assert ridge.verdict == "reference" and min(ridge.scores) > ridge.floor > 0.15
    assert ridge.scores[0] < 0.5


@pytest.mark.spec("GYM-FLAG-D1")
def test_accuracies_have_a_chance_too():
    task = Recall(rows=8, pairs=16)
    deaf, full = run([dead, "attention"], [task], seeds=2, reference="attention")
    assert deaf.verdict == "no better than chance" and abs(deaf.spread.mean - 1 / 16) < 1e-12
    assert full.verdict == "reference" and full.spread.mean == 1
    soft = Contender("soft", lambda setting, seed: Attention(1.0))
    half, _ = run([soft, "attention"], [task], seeds=2, reference="attention")
    assert half.verdict == "worse" and half.pair.difference.mean == half.spread.mean - 1 < 0 < half.spread.mean - 1 / 16


def bad(found):
    return lambda keys, values, state: (found(keys), state)


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"wanted": ["liner"]}, "no task 'liner' in the gym. Did you mean 'linear'?"),
        ({"given": ["ridgee"]}, "no contender 'ridgee'. Did you mean 'ridge'?"),
        ({"seeds": 0}, "--seeds"),
        ({"reference": "delta"}, "--reference 'delta' is no contender here"),
        ({"given": ["ridge", "ridge"]}, "named twice"),
        ({"given": [bad(lambda keys: keys * math.nan)]}, "answers with what is not finite at row 0, token 0"),
        ({"given": [bad(lambda keys: keys[:, :1])]}, "must answer with a floating-point tensor"),
        ({"given": [bad(lambda keys: None)]}, "must answer with a floating-point tensor"),
        ({"given": [bad(lambda keys: keys.long())]}, "got torch.int64"),
        ({"given": [lambda keys, values, state: keys]}, "must return (answers, state)"),
        ({"wanted": [LINEAR, "linear"]}, "task 'linear' is named twice"),
    ],
)
def test_bad_input_is_one_sentence(how, said):
    with pytest.raises(ConfigError) as caught:
        run(**{"given": ["ridge"], "wanted": [LINEAR], "seeds": 2, **how})
    assert said in str(caught.value) and "\n" not in str(caught.value)


def counting(name="mine", scale=1.0, stop=None):
    """Recent values, and the settings and seeds that were run."""
    calls = []

    class Last:
        def __call__(self, keys, values, state):
            before = torch.zeros_like(keys[:, :1]) if state is None else state
            if values is None:
                return scale * before.expand_as(keys), before
            return scale * torch.cat([before, values[:, :-1]], 1), values[:, -1:]

    def build(setting, seed):
        if len(calls) == stop:
            raise KeyboardInterrupt
        calls.append((setting["gain"], seed))
        return Last()

    return Contender(name, build, [{"gain": 1}, {"gain": 2}], {"scale": scale}), calls


@pytest.mark.spec("GYM-RUN-D1")
def test_what_is_done_is_kept(tmp_path):
    mine, calls = counting()
    first = run([mine, "ridge"], [LINEAR], seeds=2, out=tmp_path)
    assert calls == [(1, 1_000_000), (2, 1_000_000), (1, 1_000_000), (1, 0), (1, 1)]  # both tuned, one checked, seeds
    again, more = counting()
    second = run([again, "ridge"], [LINEAR], seeds=2, out=tmp_path)
    assert not more and [row.scores for row in first] == [row.scores for row in second]
    assert [row.seconds for row in first] == [row.seconds for row in second]
    run([again, "ridge"], [LINEAR], seeds=3, out=tmp_path)
    assert more == [(1, 2)]
    for changed, task in ((counting(scale=2.0), LINEAR), (counting("other"), LINEAR), (counting(), LinearMap(rows=3))):
        run([changed[0]], [task], seeds=1, out=tmp_path)
        assert len(changed[1]) == 4, "a changed config was taken for a kept one"


@pytest.mark.spec("GYM-RUN-D1")
def test_a_run_that_is_stopped_goes_on(tmp_path):
    stopped, calls = counting(stop=4)
    with pytest.raises(KeyboardInterrupt):
        run([stopped], [LINEAR], seeds=2, out=tmp_path)
    assert len(calls) == 4
    again, more = counting()
    run([again], [LINEAR], seeds=2, out=tmp_path)
    assert more == [(1, 1)]
    (tmp_path / "cells.json").write_text("{")
    with pytest.raises(CheckpointError, match="delete it"):
        run([again], [LINEAR], seeds=2, out=tmp_path)


def test_settings_are_chosen_on_another_seed_and_divergence_is_told():
    def build(setting, seed):
        def memory(keys, values, state):
            if setting["at"] == seed or setting["at"] == "always":
                raise NonFiniteError("it diverges")
            return setting["gain"] * (torch.zeros_like(keys) if values is None else state_of(keys, state)), keys

        return memory

    def state_of(keys, state):
        return torch.cat([torch.zeros_like(keys[:, :1]) if state is None else state[:, -1:], keys[:, :-1]], 1)

    def made(name, *settings):
        return Contender(name, build, [{"at": at, "gain": gain} for at, gain in settings])

    rows = run(
        [made("lost", ("always", 1)), made("late", (1, 0.0)), made("finds", ("always", 0), (None, 0.0)), "ridge"],
        [LINEAR], seeds=2, reference="ridge",
    )  # fmt: skip
    lost, late, finds, _ = rows
    assert (lost.verdict, lost.reason) == ("diverged", "with every setting") and math.isnan(lost.default)
    assert late.verdict == "diverged" and late.reason == "on 1 of 2 seeds"
    assert finds.setting == {"at": None, "gain": 0.0} and math.isnan(finds.default)
    shown = {line[1]: line for line in report.table(rows)[1]}
    assert shown["finds"][7] == "at None, gain 0 (of 2)" and shown["lost"][4] == "diverged: with every setting"


def test_who_reads_too_little_is_not_run():
    short = Contender("short", lambda setting, seed: dead, longest=10)
    (row,) = run([short], [LINEAR], seeds=1)
    assert (row.verdict, row.reason) == ("not run", "it reads 10 tokens at most")


def test_a_package_that_has_changed_is_told_and_a_memory_that_fails_raises():
    def fails(keys, values, state):
        raise AttributeError("no such kernel")

    rows = run(
        [Contender("theirs", lambda setting, seed: fails, facts={"package": "theirs"}), "ridge"], [LINEAR], seeds=1
    )
    assert (rows[0].verdict, rows[1].verdict) == ("not run", "no reference")
    assert rows[0].reason == "theirs fails with AttributeError: 'no such kernel'"
    with pytest.raises(AttributeError) as caught:
        run([fails], [LINEAR], seeds=1)
    assert caught.value.__notes__ == ["contender 'fails' in task 'linear'"]


def test_the_command_blames_a_memory_of_the_user_that_fails(hecate, here, tmp_path, monkeypatch):
    (tmp_path / "my_broken_memory.py").write_text("def fails(keys, values, state):\n    return 1 / 0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    code, _, told = hecate("gym", "my_broken_memory:fails", "--tasks", "linear", "--quick", "--out", "out")
    assert code == 2 and "a report is welcome" not in told
    assert "contender 'my_broken_memory:fails' in task 'linear' fails with ZeroDivisionError" in told


def test_written_tokens_that_nobody_asks_for_are_only_written():
    task, wrote = Facts(rows=1, distances=(5, 40)), []

    class Writes:
        def __call__(self, keys, values, state):
            assert values is None
            return torch.zeros_like(keys), state

        def write(self, keys, values, state):
            wrote.append(keys.shape[1])
            return torch.zeros(1, 7)

    parts, size = scored(Writes(), task.stream(0), "writes")
    assert wrote == [8 + 5, 35] and size == 7 and set(parts) == {"all distances", "after 5", "after 40"}


@pytest.fixture
def here(monkeypatch, tmp_path, float32):
    monkeypatch.chdir(tmp_path)


MINE = """
import torch

def memory(keys, values, state):
    return torch.zeros_like(keys), None
"""


@pytest.mark.spec("GYM-NAME-D1", "GYM-RUN-D1")
def test_the_command(hecate, here, tmp_path):
    (tmp_path / "mygym.py").write_text(MINE)
    line = ("gym", "gated_delta", "ridge", "mygym:memory", "--tasks", "linear,recall", "--quick", "--out", "there")
    code, out, err = hecate(*line)
    assert code == 0, err
    assert "linear: ridge: " in err and "no better than chance" in out
    rows = list(csv.DictReader((tmp_path / "there/gym.csv").read_text().splitlines()))
    assert [row["contender"] for row in rows] == ["gated_delta", "ridge", "mygym:memory"] * 2
    whole = json.loads((tmp_path / "there/gym.json").read_text())
    assert whole["tasks"]["linear"]["known"]["least squares"] == 0 and len(whole["results"]) == 6
    assert float(rows[1]["mean"]) == whole["results"][1]["mean"] < 0.01
    assert (tmp_path / "there/gym.png").read_bytes().startswith(b"\x89PNG")
    kept = (tmp_path / "there/cells.json").read_bytes()
    assert hecate(*line)[1] == out and (tmp_path / "there/cells.json").read_bytes() == kept
    for argv, said in (
        (("--tasks", "lineal"), "Did you mean 'linear'?"),
        (("--seeds", "0"), "--seeds"),
        (("ridgy",), "Did you mean 'ridge'?"),
    ):
        code, _, err = hecate("gym", *argv, "--out", "other")
        assert code == 2 and said in err and not (tmp_path / "other/gym.csv").exists()


def test_the_list_names_tasks_contenders_and_what_is_missing(hecate, here, monkeypatch):
    import importlib.metadata

    found = importlib.metadata.version

    def version(name):
        if name == "titans-pytorch":
            raise importlib.metadata.PackageNotFoundError(name)
        return found(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    code, out, _ = hecate("gym", "--list")
    assert code == 0 and all(kind in out for kind in tasks())
    assert "titans-pytorch is not installed: pip install" in out and "titans + gated_delta" in out
    (row,) = run(["titans-pytorch"], [LINEAR], seeds=1)
    assert row.verdict == "not run" and "pip install" in row.reason


def test_without_matplotlib_there_is_no_figure(hecate, here, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    code, out, _ = hecate("gym", "ridge", "--tasks", "linear", "--quick", "--out", "there")
    assert code == 0 and "no figure without matplotlib" in out and not (tmp_path / "there/gym.png").exists()


def test_signs_of_mathematics_in_a_task_or_a_name_are_drawn_as_they_are(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(LinearMap, "about", "costs 3$ a_{ 2$")
    found = run([Contender("$x_{$", lambda setting, seed: dead)], [LINEAR], seeds=1)
    assert {tmp_path / "gym.png", tmp_path / "gym.svg"} <= set(report.write(found, tmp_path))
