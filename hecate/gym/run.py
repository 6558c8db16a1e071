"""Running the gym in a folder: settings are chosen on another seed, every cell is stored, and contenders that cheat,
diverge or are no better than chance are flagged."""

from __future__ import annotations

import hashlib
import json
import math
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hecate.checks import described
from hecate.compare.cells import seeds_of
from hecate.compare.run import locked, stored
from hecate.compare.statistics import Interval, Pair, against, interval, pooled_intervals
from hecate.errors import ConfigError, HecateError, NonFiniteError, StabilityWarning, not_known, shorten
from hecate.files import read_whole, refusing, write_file
from hecate.gym.contenders import Contender, Memory, Setting, contender_of, numbers, source_of
from hecate.gym.peers import contenders
from hecate.gym.tasks import GymTask, Stream, tasks
from hecate.variant import read_json

RECORDS = "cells.json"
PIECE, CHECKED = 16_384, 48
"""Largest number of tokens per call; number of tokens of a stream on which answers are checked one by one."""
ROUNDING = 1e-3
"""Largest difference between two answers, relative to the largest answer, that counts as rounding."""
Say = Callable[[str], None]


class Cell(NamedTuple):
    """Outcome of a contender with one setting on one seed of a task: scores of rows (empty if it diverged), scores of
    parts, number of numbers in a row's final state, seconds."""

    rows: list[float]
    parts: dict[str, float]
    state: int
    seconds: float

    @property
    def score(self) -> float:
        """Mean over rows; NaN if it diverged."""
        return statistics.fmean(self.rows) if self.rows else math.nan


_NOTHING = Interval(math.nan, math.nan)


@dataclass(frozen=True)
class Result:
    """Result of a contender in a task.

    Fields:
        verdict: compared with the reference: better, worse, cannot tell, reference; or the flag.
        reason: reason of a flag; else empty.
        scores: one for each seed, NaN if it diverged; empty if it was not run.
        spread: mean and 95 % interval, by the deviation pooled over the contenders without a flag.
        setting: the chosen setting, of `settings` in number; default: score of the first one on the tuning seed.
        pair: difference to the reference's score, with p by Dunnett's method; None for flagged contenders.
    """

    task: GymTask
    contender: str
    verdict: str
    reason: str = ""
    scores: tuple[float, ...] = ()
    parts: Mapping[str, float] = field(default_factory=dict)
    spread: Interval = _NOTHING
    setting: Setting = field(default_factory=dict)
    settings: int = 0
    default: float = math.nan
    state: int = 0
    seconds: float = 0.0
    floor: float = 0.0
    pair: Pair | None = None


@dataclass
class _Store:
    """Store of cells by digest, in a folder, or without one in memory."""

    folder: Path | None
    cells: dict[str, Any] = field(default_factory=dict)
    fresh: int = 0

    def __post_init__(self) -> None:
        if self.folder is None or not (path := self.folder / RECORDS).is_file():
            return
        with stored(path, "delete it, and its cells are run anew"):
            for digest, cell in read_json(read_whole(path)).items():
                self.cells[digest] = cell if isinstance(cell, str) else list(Cell(*cell))

    def get(self, make: Callable[[], Any], *what: Any) -> Any:
        """The cell stored under these facts, or a new one."""
        digest = hashlib.sha256(json.dumps(what, sort_keys=True, default=str).encode()).hexdigest()[:32]
        if digest not in self.cells:
            self.cells[digest] = make()
            self.fresh += 1
        return self.cells[digest]

    def save(self) -> None:
        """Writes the cells if any is new."""
        if self.folder is not None and self.fresh:
            with refusing(f"write {self.folder / RECORDS}", then="call the same line again"):
                write_file(self.folder / RECORDS, json.dumps(self.cells, indent=0) + "\n")
            self.fresh = 0


def scored(memory: Memory, stream: Stream, name: str) -> tuple[dict[str, Tensor], int]:
    """Scores of a memory's rows in a stream, by part, and the number of numbers in its state per row."""
    answers, state = answered(memory, stream, name)
    return {part: stream.scores(answers, part) for part in stream.parts}, numbers(state, len(stream.keys))


def answered(memory: Memory, stream: Stream, name: str) -> tuple[Tensor, Any]:
    """Answers of a memory in a stream, each before its token is written, and its final state; computed in pieces."""
    asked = torch.stack(list(stream.parts.values())).any(0)
    answers, state = torch.zeros_like(stream.values), None
    for span in _spans(stream.written, asked):
        keys, values = stream.keys[:, span], stream.values[:, span]
        if stream.written[span.start] and not asked[span.start] and hasattr(memory, "write"):
            state = memory.write(keys.clone(), values.clone(), state)
            continue
        writes = values if stream.written[span.start] else None
        answers[:, span], state = _ask(memory, keys, writes, state, values, name, span.start)
    return answers, state


def _spans(*masks: Tensor) -> Iterator[slice]:
    """Pieces, of at most `PIECE` tokens, in which every mask is constant."""
    marks, length = torch.stack(masks), masks[0].shape[0]
    borders = ((marks[:, 1:] != marks[:, :-1]).any(0).nonzero().flatten() + 1).tolist()
    for start, end in zip([0, *borders], [*borders, length], strict=True):
        for first in range(start, end, PIECE):
            yield slice(first, min(first + PIECE, end))


def _ask(
    memory: Memory, keys: Tensor, values: Tensor | None, state: Any, like: Tensor, name: str, start: int = 0
) -> tuple[Tensor, Any]:
    """Answers, of the shape of `like`, and the state. The memory gets copies, as other contenders read the same
    stream."""
    output: Any = memory(keys.clone(), None if values is None else values.clone(), state)
    if not isinstance(output, tuple) or len(output) != 2:
        raise ConfigError(f"contender {shorten(name)} must return (answers, state), got {described(output)}")
    answers, state = output
    if not isinstance(answers, Tensor) or answers.shape != like.shape or not answers.is_floating_point():
        raise ConfigError(
            f"contender {shorten(name)} must answer with a floating-point tensor {list(like.shape)}, got "
            f"{described(answers)}"
        )
    if not answers.isfinite().all():
        row, token, _ = (~answers.isfinite()).nonzero()[0].tolist()
        raise ConfigError(
            f"contender {shorten(name)} answers with what is not finite at row {row}, token {start + token}; raise "
            "NonFiniteError where a memory diverges"
        )
    return answers.detach().clone(), state


def unlike(memory: Memory, keys: Tensor, values: Tensor, name: str) -> str:
    """Reason why a memory's answers in one call differ from those of calls token by token, asked before each write, in
    which it cannot see later tokens or the right answer; empty if they agree. [GYM-FLAG-D1]"""
    whole, state = _ask(memory, keys, values, None, values, name)
    once, asked = _ask(memory, keys, None, state, values, name)
    twice = _ask(memory, keys, None, asked, values, name)[0]
    carried, single = None, []
    for token in range(keys.shape[1]):
        one = slice(token, token + 1)
        # Before the first write no memory knows the width of values, so it gets the value with the opposite sign.
        now, said = keys[:, one], values[:, one]
        answer, asked = _ask(memory, now, None if token else -said, carried, said, name, token)
        single.append(answer)
        carried = _ask(memory, now, said, asked if token else None, said, name, token)[1]
    blind = after = _ask(memory, keys, None, carried, values, name)[0]
    if hasattr(memory, "write"):
        blind = _ask(memory, keys, None, memory.write(keys.clone(), values.clone(), None), values, name)[0]
    largest = max(float(item.abs().max()) for item in (whole, values, once))
    for what, expected, actual in (
        ("answers depend on later tokens or on the right answer", whole, torch.cat(single, 1)),
        ("being asked changes its answers", once, twice),
        ("a state handed on in pieces is another", once, after),
        ("writing without an answer leaves another state", after, blind),
    ):
        if why := _apart(what, expected, actual, largest):
            return why
    return ""


def unfolded(memory: Memory, keys: Tensor, values: Tensor, name: str) -> str:
    """Reason why answers in one call, in a stream where nothing is written, differ from those of a call per token with
    the state passed on; empty if they agree. [GYM-FLAG-D1]"""
    whole, single, state = _ask(memory, keys, None, None, values, name)[0], [], None
    for token in range(keys.shape[1]):
        answer, state = _ask(memory, keys[:, token, None], None, state, values[:, token, None], name, token)
        single.append(answer)
    what = "answers depend on later tokens, or on more than the state"
    return _apart(what, whole, torch.cat(single, 1), float(whole.abs().max()))


def foreseen(memory: Memory, stream: Stream, name: str) -> str:
    """Reason why answers in a whole stream depend on later tokens; empty if they do not.

    The stream is changed from two thirds of its longest scored piece on (one that is written, if any is): answers
    before that must stay the same, in calls as long as the scored ones. [GYM-FLAG-D1]
    """
    asked = torch.stack(list(stream.parts.values())).any(0)
    taken = asked & stream.written if stream.written.any() else asked
    spans = [span for span in _spans(stream.written, asked) if taken[span.start]]
    if not spans:
        return ""
    longest = max(spans, key=lambda span: span.stop - span.start)
    at = longest.start + 2 * (longest.stop - longest.start) // 3
    keys, values = stream.keys.clone(), stream.values.clone()
    keys[:, at + 1 :], values[:, at:] = keys[:, at + 1 :].roll(1, -1), -values[:, at:].roll(1, -1)
    before, _ = answered(memory, stream, name)
    try:
        after, _ = answered(memory, stream._replace(keys=keys, values=values), name)
    except NonFiniteError:  # it diverges on the changed stream
        return ""
    largest = max(float(item.abs().max()) for item in (before, after))
    what = "answers depend on later tokens or on the right answer"
    return _apart(what, before[:, : at + 1], after[:, : at + 1], largest)


def _apart(what: str, expected: Tensor, actual: Tensor, largest: float) -> str:
    """A sentence on the first token at which two answers differ by more than rounding; empty if none does."""
    apart = (expected - actual).abs().amax((0, 2)) / largest if largest else expected.new_zeros(expected.shape[1])
    if bool((apart <= ROUNDING).all()):
        return ""
    first = int((~(apart <= ROUNDING)).nonzero()[0])
    return f"{what}: token {first} differs by {float(apart[first]):.2g} of the largest"


def run(
    given: Sequence[str | Contender | Memory] = (),
    wanted: Sequence[str | GymTask] = (),
    *,
    seeds: int = 5,
    out: Path | str | None = None,
    reference: str | None = None,
    quick: bool = False,
    say: Say = lambda text: None,
) -> list[Result]:
    """Runs every contender in every task. [GYM-RUN-D1]

    Args:
        given: contenders by name, as in `hecate gym --list`, or as objects; all default ones if empty.
        wanted: tasks by name, or as objects; all if empty.
        seeds: number of reported seeds, from 0; settings are chosen on another one.
        out: folder in which finished cells are stored, so that the same call continues.
        reference: the contender that others are compared with; gated_delta, or the first.
        quick: small tasks, at most two seeds, and two settings, for a first look.
        say: function that gets a line for every finished contender.

    Raises:
        ConfigError: an unknown task or contender, no seeds, answers of a wrong shape or that are not finite.
    """
    reported, (tuning,) = seeds_of(min(seeds, 2) if quick else seeds, 1)
    chosen = [_task(task) for task in wanted or tasks()]
    chosen = [task.quick() for task in chosen] if quick else chosen
    known = contenders()
    fighters = [contender_of(name, known) for name in given or known]
    if quick and not given:  # importing them takes as long as running all others
        fighters = [fighter for fighter in fighters if "package" not in fighter.facts]
    names = [fighter.name for fighter in fighters]
    for what, listed in (("task", [task.kind for task in chosen]), ("contender", names)):
        if twice := [name for name in listed if listed.count(name) > 1]:
            raise ConfigError(f"{what} {shorten(twice[0])} is named twice; name it once, or call run for each")
    base = reference or ("gated_delta" if "gated_delta" in names else names[0])
    if base not in names:
        raise ConfigError(f"--reference {shorten(base)} is no contender here{not_known(base, names)}")
    folder = None if out is None else Path(out)
    results: list[Result] = []
    with nullcontext() if folder is None else locked(folder), warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore", StabilityWarning)
        store = _Store(folder)
        for task in chosen:
            stream = lru_cache(len(reported) + 1)(task.stream)
            rows = []
            # A contender that cannot enter is only listed if it was named.
            for fighter in (one for one in fighters if given or one.name == base or not task.refuses(one)):
                try:
                    rows.append(_enter(store, task, fighter, stream, reported, tuning, quick))
                except HecateError:
                    raise
                except Exception as error:  # another version of a package may have another interface
                    why = f"fails with {type(error).__name__}: {shorten(str(error))}"
                    if "package" not in fighter.facts:
                        error.add_note(f"contender {shorten(fighter.name)} in task {shorten(task.kind)}")
                        raise
                    rows.append(Result(task, fighter.name, "not run", f"{fighter.facts['package']} {why}"))
                finally:
                    store.save()
                say(f"{task.kind}: {fighter.name}: {_summary(rows[-1])}")
            results += _judge(rows, base)
    return results


def _task(task: str | GymTask) -> GymTask:
    if isinstance(task, GymTask):
        return task
    if task not in tasks():
        raise ConfigError(f"no task {shorten(task)} in the gym{not_known(task, tasks())}")
    return tasks()[task].model_validate({})


def _summary(row: Result) -> str:
    score = "" if math.isnan(row.spread.mean) else f"{row.spread.mean:.4g}"
    return ", ".join(filter(None, (score, row.verdict, row.reason)))


def _enter(
    store: _Store, task: GymTask, fighter: Contender, stream: Callable[[int], Stream], seeds: Sequence[int],
    tuning: int, quick: bool,
) -> Result:  # fmt: skip
    """The result of a contender in a task: chooses its setting, checks its answers, computes its scores; with verdicts
    that need no other contender."""
    length = stream(tuning).keys.shape[1] if fighter.longest is not None else 0
    short = fighter.longest is not None and length > fighter.longest
    why = fighter.missing or task.refuses(fighter) or (f"it reads {fighter.longest:,} tokens at most" if short else "")
    if why:
        return Result(task, fighter.name, "not run", why)
    sources = [source_of(part) for part in (fighter.build, fighter.layer) if part is not None]
    code = sys.modules["hecate"].__version__, sources
    facts = task.model_dump(mode="json"), fighter.name, dict(fighter.facts), code

    def cell(setting: Setting, seed: int) -> Cell:
        return Cell(*store.get(lambda: list(_cell(task, fighter, setting, stream(seed), seed)), *facts, setting, seed))

    settings = list(task.settings(fighter))[: 2 if quick else None]
    sign = 1 if task.metric == "error" else -1
    tried = [cell(setting, tuning).score for setting in settings]
    places = [place for place, score in enumerate(tried) if math.isfinite(score)]
    same: dict[str, Any] = {"settings": len(settings), "default": tried[0]}
    if not places:
        return Result(task, fighter.name, "diverged", "with every setting", **same)
    setting = settings[min(places, key=lambda place: sign * tried[place])]
    count = CHECKED // 4 if quick else CHECKED

    def suspicion() -> str:
        memory, sample = task.memory(fighter, setting, tuning), stream(tuning)
        alike = unlike if sample.written.any() else unfolded
        return alike(memory, *sample.head(count), fighter.name) or foreseen(memory, sample, fighter.name)

    reason = store.get(suspicion, "checked", count, *facts, setting)
    cells = [cell(setting, seed) for seed in seeds]
    scores = tuple(one.score for one in cells)
    floors = [stream(seed).floor for seed in seeds]
    same |= {
        "setting": setting, "scores": scores, "spread": interval(scores), "state": cells[0].state,
        "parts": {part: statistics.fmean(one.parts.get(part, math.nan) for one in cells) for part in cells[0].parts},
        "floor": statistics.fmean(floors), "seconds": statistics.median(one.seconds for one in cells),
    }  # fmt: skip
    verdict, why = _alone(task, [row for one in cells for row in one.rows], scores, [stream(seed) for seed in seeds])
    return Result(task, fighter.name, *(("cheats", reason) if reason else (verdict, why)), **same)


def _alone(task: GymTask, rows: Sequence[float], scores: Sequence[float], streams: Sequence[Stream]) -> tuple[str, str]:
    """Flag for scores that needs no other contender, and its reason; empty if there is none."""
    lost = sum(map(math.isnan, scores))
    if lost:
        return "diverged", f"on {lost} of {len(scores)} seeds"
    for stream, score in zip(streams, scores, strict=True):
        if score < _least(stream):
            return "beats what is possible", f"{score:.4g}, where {stream.floor:.4g} is noise"
    sign, spread = (1 if task.metric == "error" else -1), interval(rows)
    if sign * (spread.mean - task.chance()) + (0.0 if math.isnan(spread.half) else spread.half) >= 0:
        return "no better than chance", f"chance is {task.chance():.3g}"
    return "", ""


def _cell(task: GymTask, fighter: Contender, setting: Setting, stream: Stream, seed: int) -> Cell:
    began = time.perf_counter()
    try:
        parts, state = scored(task.memory(fighter, setting, seed), stream, fighter.name)
    except NonFiniteError:
        return Cell([], {}, 0, time.perf_counter() - began)
    rows = parts[next(iter(parts))].tolist()
    rows = rows if all(map(math.isfinite, rows)) else []
    return Cell(rows, {name: float(part.mean()) for name, part in parts.items()}, state, time.perf_counter() - began)


def _least(stream: Stream) -> float:
    """The floor minus what luck may gain: answers that are independent of the noise gain at most z^2 of the energy of n
    noisy coordinates, a share z^2 / n, with z standard normal; z = 5. [GYM-FLAG-D1]"""
    scored = int(next(iter(stream.parts.values())).sum()) * stream.values.shape[0] * stream.values.shape[2]
    return stream.floor * (1 - 25 / scored)


def _judge(rows: Sequence[Result], base: str) -> list[Result]:
    """Adds verdicts relative to the reference; the deviation is pooled over it and all contenders without a flag.
    [GYM-RUN-D1]"""
    sign = 1 if rows[0].task.metric == "error" else -1
    control = next(row for row in rows if row.contender == base)
    usable = control.verdict in ("", "no better than chance")
    compared = [row for row in rows if not row.verdict or (usable and row is control)]
    values = {row.contender: [sign * score for score in row.scores] for row in compared}
    spreads = pooled_intervals(values) if values else {}
    pairs = {pair.first: pair for pair in against(values, base)} if usable else {}
    results = []
    for row in rows:
        pair, spread = pairs.get(row.contender), row.spread
        if row.contender in spreads:
            spread = Interval(spread.mean, spreads[row.contender].half)
        if pair is not None:
            pair = pair._replace(difference=Interval(sign * pair.difference.mean, pair.difference.half))
        beside = "reference" if row is control else pair.verdict if pair is not None else "no reference"
        results.append(replace(row, verdict=row.verdict or beside, spread=spread, pair=pair))
    return results
