"""Evaluation tasks: needles in text and chains of assignments, as in RULER; the synthetic task of training at any
length; the loss by position."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar
from uuid import UUID

import numpy as np
from pydantic import Field

from hecate.checks import Count
from hecate.data import IGNORED, DataConfig, Task, Tokenizer, stream
from hecate.data.corpus import Limits, documents, find
from hecate.errors import ConfigError, DataError, shorten
from hecate.evals.base import Encoder, Evaluation, Given, Ids, Metric, Part, Row, check_lengths, draws
from hecate.variant import Conflicts

MOST = 1 << 20
"""Largest number of characters of a text that are used."""
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
"""RULER's noise, which is repeated line by line as the haystack."""
_SENTENCE, _LINE = re.compile(r"(?<=[.!?])\s+|\n+"), re.compile(r"\n+")


def encoder_of(tokenizer: Any) -> Encoder:
    """The encoder for a tokenizer of hecate or transformers. If the latter puts a token before a text, rows begin with
    it."""
    if isinstance(tokenizer, Tokenizer):
        return Encoder(lambda texts: [tokens.astype(np.int64) for tokens in tokenizer.encode(texts)])
    if not callable(getattr(tokenizer, "encode", None)):
        raise ConfigError(
            f"tokenizer must be one of hecate's or have transformers' encode(text, add_special_tokens=False), got "
            f"{shorten(tokenizer)}"
        )
    begin, ahead = getattr(tokenizer, "bos_token_id", None), list(tokenizer.encode("a"))[:1]

    def ids(texts: Sequence[str]) -> list[Ids]:
        return [np.array(tokenizer.encode(text, add_special_tokens=False), dtype=np.int64) for text in texts]

    return Encoder(ids, (begin,) if begin is not None and ahead == [begin] else ())


class Haystack:
    """A cyclic sequence of sentences, each with the space or line end after it.

    Sentences end after `.`, `!` or `?` and a space, and at line ends; with `lines` only at line ends.
    [EVAL-HAYSTACK-D1]
    """

    def __init__(self, text: str, encoder: Encoder, *, lines: bool = False) -> None:
        self.text = text
        cuts = [0, *(match.end() for match in (_LINE if lines else _SENTENCE).finditer(text)), len(text)]
        sentences = [text[a:b] for a, b in pairwise(cuts) if text[a:b].strip()]
        tokens = [ids for ids in encoder.ids(sentences) if len(ids)] if sentences else []
        if not tokens:
            raise DataError("the text for the haystack has no sentence; name a file with text")
        self._ids = np.concatenate(tokens)
        self._starts = np.cumsum([0, *(len(ids) for ids in tokens)])[:-1]

    def around(
        self, rng: np.random.Generator, room: int, needles: Sequence[Ids], depths: Sequence[float]
    ) -> tuple[Ids, list[int]]:
        """`room` tokens up to the end of a random sentence, including the needles, and the start of each needle.

        A needle is inserted before the sentence whose start is nearest to its depth, a share of the text's tokens; at
        depth 1 it comes last. The first sentence may be cut. `room` must hold the needles.
        """
        length, size = room - sum(map(len, needles)), len(self._ids)
        begin = int(self._starts[rng.integers(len(self._starts))]) - length
        text = self._ids[(begin + np.arange(length)) % size]
        laps = np.arange(begin // size, (begin + length) // size + 1)[:, None] * size
        starts = (laps + self._starts).ravel() - begin
        places = np.array([0, *starts[(starts > 0) & (starts < length)], length])
        chosen = [int(places[np.argmin(np.abs(places - depth * length))]) for depth in depths]
        parts, at, begins, done = [], 0, [0] * len(needles), 0
        for which in sorted(range(len(needles)), key=lambda n: (chosen[n], n)):
            parts += [text[at : chosen[which]], needles[which]]
            done, at = done + chosen[which] - at, chosen[which]
            begins[which] = done
            done += len(needles[which])
        return np.concatenate([*parts, text[at:]]), begins


def read_text(path: Path) -> str:
    """The text of a file or of the files in a folder, up to `MOST` characters; `DataError` if there is none."""
    pieces, room = [], MOST
    for file in find([str(path)]):
        for document in documents(file, limits=Limits(cut=4 * MOST)):  # a character has at most four bytes
            pieces.append(document[:room])
            room -= len(pieces[-1])
            if room <= 0:
                return "\n".join(pieces)
    return "\n".join(pieces)


Lengths = Annotated[tuple[Annotated[int, Field(ge=16, le=1 << 24)], ...], Field(strict=False, min_length=1)]
Samples = Annotated[int, Field(ge=1, le=1 << 20)]
_FIRST = (
    "amber brave calm dark eager faint gentle hollow idle jolly keen lively mellow narrow odd plain quiet rapid silent "
    "tidy urban vivid warm young zealous"
).split()
_SECOND = (
    "anchor basket candle desert engine forest garden harbour island jacket kettle ladder mirror needle orchard pencil "
    "quarry ribbon saddle tunnel umbrella valley window yard zipper"
).split()
_INTRO = (
    "A special magic {what} is hidden within the following text. Make sure to memorize it. I will quiz you about the "
    "{what} afterwards.\n"
)
_NEEDLE = "One of the special magic {what}s for {key} is: {value}."
_QUESTION = (
    "\nWhat is the special magic {what} for {key} mentioned in the provided text? The special magic {what} for {key} "
    "mentioned in the provided text is"
)
_TRACK = "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n"
_ASKED = (
    "\nQuestion: Find all variables that are assigned the value {value} in the text above. Answer: According to the "
    "chain(s) of variable assignment in the text above, {count} variables are assigned the value {value}, they are:"
)
_TRIES = 100
Drawn = TypeVar("Drawn", str, list[str])


class Niah(Evaluation):
    """niah: text with one needle, its question, and the answer; right if every token of the answer is the likeliest.

    RULER's single needles. Form 1: repeated noise, a number of 7 digits (the pass-key); 2: text, a number; 3: text, a
    uuid. Prompt and answer have exactly `length` tokens. Row i has its needle at depth (i mod `depths`) / (depths - 1),
    at the nearest start of a sentence. One forward pass on the right answer shows whether greedy generation would begin
    with it; RULER generates 128 tokens and accepts the value anywhere in them, which is more lenient.

    Shapes: rows of `length` tokens; the labels are those of the answer.
    Cost: a forward pass of length tokens for each of `samples` rows.
    Warning: the text is the given one, not RULER's essays, and keys come from 625 pairs of words.
    References: RULER: What's the Real Context Size of Your Long-Context Language Models? (Hsieh et al., 2024, arXiv
    2404.06654). [EVAL-NIAH-D1]
    """

    kind: Literal["niah"] = "niah"
    forms: Annotated[tuple[Literal[1, 2, 3], ...], Field(strict=False, min_length=1)] = (1, 2, 3)
    lengths: Lengths = (1024, 2048, 4096)
    samples: Samples = 40
    depths: int = Field(5, ge=2, le=1 << 10)
    seed: Count = Field(1, ge=0)

    def parts(self, given: Given) -> list[Part]:
        """A part for every form and length; `DataError` if a text is needed and there is none."""
        encoder, parts = _encoder(self, given), list[Part]()
        for form in self.forms:
            name, chance = f"niah_{form}", 2.0**-122 if form == 3 else 1 / 9_000_000
            hay = _noise(encoder) if form == 1 else _text(f"the haystack of {name}", given, encoder, ", or take niah_1")
            parts += _parts(self, name, partial(self._row, form, hay, encoder), chance)
        return parts

    def _row(self, form: int, hay: Haystack, encoder: Encoder, length: int, index: int) -> Row:
        rng = draws(self.seed, form, index)
        what = "uuid" if form == 3 else "number"
        key = _absent(hay.text, lambda: f"{_FIRST[rng.integers(25)]}-{_SECOND[rng.integers(25)]}")
        value = _absent(hay.text, lambda: _uuid(rng) if form == 3 else str(rng.integers(10**6, 10**7)))
        words = {"what": what, "key": key, "value": value}
        texts = [_INTRO, _NEEDLE + ("\n" if form == 1 else " "), _QUESTION, " {value}"]
        intro, needle, question, answer = encoder.ids([text.format(**words) for text in texts])
        depth = index % self.depths / (self.depths - 1)
        fixed = [np.array(encoder.start, dtype=np.int64), intro, question, answer]
        room = _room(f"niah_{form}", length, fixed, [needle])
        text, _ = hay.around(rng, room, [needle], [depth])
        return _row_of([*fixed[:2], text, question], [answer], depth)


class VariableTracking(Evaluation):
    """variable_tracking: chains `VAR B = VAR A` hidden in noise; the names that hold a value are the answer, in order.

    RULER's task: `chains` chains of 1 + `hops` names of 5 letters, whose sentences are at random depths, in order,
    among repeated noise; an example of the format comes first. The answer is the names of the first chain, and the
    score is the share of names all of whose tokens are the likeliest, given the right names before. RULER counts the
    names anywhere in the generated text.

    Shapes: rows of `length` tokens, 1 + hops answers each.
    Cost: a forward pass of length tokens for each of `samples` rows.
    References: RULER: What's the Real Context Size of Your Long-Context Language Models? (Hsieh et al., 2024, arXiv
    2404.06654). [EVAL-TRACK-D1]
    """

    kind: Literal["variable_tracking"] = "variable_tracking"
    lengths: Lengths = (1024, 2048, 4096)
    chains: int = Field(1, ge=1, le=64)
    hops: int = Field(4, ge=1, le=64)
    samples: Samples = 40
    seed: Count = Field(1, ge=0)

    def parts(self, given: Given) -> list[Part]:
        """A part for every length."""
        encoder, chance = _encoder(self, given), 1 / (self.chains * (1 + self.hops))
        return _parts(self, self.kind, partial(self._row, _noise(encoder), encoder), chance)

    def _row(self, hay: Haystack, encoder: Encoder, length: int, index: int) -> Row:
        rng = draws(self.seed, 0, index)
        names, values = _names(rng, self.chains * (1 + self.hops)), _values(rng, self.chains)
        chains = [names[n * (1 + self.hops) : (n + 1) * (1 + self.hops)] for n in range(self.chains)]
        sentences, depths = [], []
        for chain, value in zip(chains, values, strict=True):
            sentences += _assignments(chain, value)
            depths += np.sort(rng.random(len(chain))).tolist()
        asked = _ASKED.format(value=values[0], count=1 + self.hops)
        shown = _example(rng, names, values, self.hops)
        intro, question, *needles = encoder.ids([shown + _TRACK, asked, *sentences])
        answers = encoder.ids([f" {name}" for name in chains[0]])
        fixed = [np.array(encoder.start, dtype=np.int64), intro, question, *answers]
        room = _room(self.kind, length, fixed, needles)
        text, _ = hay.around(rng, room, needles, depths)
        return _row_of([*fixed[:2], text, question], answers)


def _assignments(chain: Sequence[str], value: str) -> list[str]:
    """The sentences of a chain, one per line."""
    return [f"VAR {chain[0]} = {value}\n"] + [f"VAR {b} = VAR {a}\n" for a, b in pairwise(chain)]


def _example(rng: np.random.Generator, names: Sequence[str], values: Sequence[str], hops: int) -> str:
    """A short example of the task with its answer, with names of 3 letters and a value that are not in the row."""
    chain = _absent(" ".join(["VAR", *names]), lambda: _names(rng, 1 + hops, 3))
    (value,) = _absent(" ".join(values), lambda: _values(rng, 1))
    text = f"{NOISE}\n{''.join(_assignments(chain, value))}{NOISE}"
    return f"{_TRACK}{text}{_ASKED.format(value=value, count=1 + hops)} {' '.join(chain)}\n\n"


def _names(rng: np.random.Generator, count: int, letters: int = 5) -> list[str]:
    """Different names of capital letters."""
    names: dict[str, None] = {}
    while len(names) < count:
        names["".join(map(chr, 65 + rng.integers(26, size=letters)))] = None
    return list(names)


def _values(rng: np.random.Generator, count: int) -> list[str]:
    """Different numbers of 5 digits."""
    return [str(10_000 + number) for number in rng.choice(90_000, size=count, replace=False)]


def _uuid(rng: np.random.Generator) -> str:
    """A random uuid of version 4."""
    return str(UUID("".join(f"{digit:x}" for digit in rng.integers(16, size=32)), version=4))


def _absent(text: str, draw: Callable[[], Drawn]) -> Drawn:
    """The first draw that does not occur in the text: the answer must be in one place only."""
    for _ in range(_TRIES):
        drawn = draw()
        if not any(part in text for part in ([drawn] if isinstance(drawn, str) else drawn)):
            return drawn
    raise DataError("the text for the haystack has every key or value that was drawn to hide in it; take another text")


def _noise(encoder: Encoder) -> Haystack:
    """The haystack of RULER's noise, line by line."""
    return Haystack(f"{NOISE}\n", encoder, lines=True)


def _text(what: str, inputs: Given, encoder: Encoder, instead: str = "") -> Haystack:
    if inputs.text is None:
        raise DataError(f"no text for {what}; name a file or folder with --data{instead}")
    return Haystack(inputs.text, encoder)


def _encoder(task: Any, inputs: Given) -> Encoder:
    """The encoder for a task in text, whose lengths the model must be able to read."""
    check_lengths(task.kind, inputs, task.lengths)
    if inputs.encoder is None:
        raise ConfigError(f"{task.kind} is a task in text, and the model comes without a tokenizer; give one")
    return inputs.encoder


def _parts(
    task: Any, name: str, row: Callable[[int, int], Row], chance: float | None, metric: Metric = "exact"
) -> list[Part]:
    """A part for every length of a task in text; raises if a row `row(length, index)` does not fit."""
    parts = [Part(name, length, task.samples, partial(row, length), metric, chance) for length in task.lengths]
    for part in parts:
        part.row(0)
    return parts


def _room(name: str, length: int, fixed: Sequence[Ids], needles: Sequence[Ids]) -> int:
    """Number of tokens for the text with its needles; refuses a length that is too short."""
    around, inside = sum(map(len, fixed)), sum(map(len, needles))
    if around + inside > length:
        raise ConfigError(
            f"{name} of length {length} has no room for its question, needle and answer, {around + inside} tokens; "
            f"take at least {around + inside}"
        )
    return length - around


def _row_of(prompt: Sequence[Ids], answers: Sequence[Ids], depth: float | None = None) -> Row:
    """A row of prompt and answers; the token before each token of an answer is labelled with it."""
    tokens = np.concatenate([*prompt, *answers])
    targets, numbers = np.full_like(tokens, IGNORED), np.full_like(tokens, -1)
    place = sum(map(len, prompt))
    for number, answer in enumerate(answers):
        span = slice(place - 1, place - 1 + len(answer))
        targets[span], numbers[span] = answer, number
        place += len(answer)
    return Row(tokens, targets, numbers, depth)


class Synthetic(Evaluation):
    """synthetic: accuracy on the labels of a task of hecate.data, and the share of rows with all labels right.

    It is for a model that was trained on the task; its ids mean nothing to other models. `lengths` null takes the
    task's own length and, if its other fields allow that, twice the length. Row i is drawn from the validation stream
    of (seed, i), so that a seed other than 0 shares no row with training or its validation.

    Shapes: those of the task's rows.
    Cost: a forward pass for each of `samples` rows.
    References: those of the task. [EVAL-SYNTHETIC-D1]
    """

    kind: Literal["synthetic"] = "synthetic"
    data: DataConfig
    lengths: Annotated[tuple[Annotated[int, Field(ge=1, le=1 << 20)], ...] | None, Field(strict=False)] = None
    samples: Samples = 256
    seed: Count = Field(1, ge=1)

    def conflicts(self) -> Conflicts:
        """Data that are not a task."""
        if not isinstance(self.data, Task):
            yield ("data",), f"must be a synthetic task, got {self.data.kind!r}, a text"

    def parts(self, given: Given) -> list[Part]:
        """A part for every length; `ConfigError` if the model knows too few ids."""
        parts = []
        for task in self._tasks(given):
            length, needs = task.length() or 0, task.vocabulary()
            check_lengths(task.kind, given, [length])
            if given.vocabulary is not None and needs > given.vocabulary:
                raise ConfigError(
                    f"task {task.kind!r} of length {length} has {needs} token ids, and the model knows "
                    f"{given.vocabulary}; train one on it, or take another length"
                )
            row, chance = partial(self._row, task), max(task.chances().values())
            parts.append(Part(task.kind, length, self.samples, row, "accuracy", chance))
        return parts

    def _tasks(self, inputs: Given) -> list[Task]:
        task: Any = self.data
        if self.lengths is not None:
            return [task.of_length(length) for length in self.lengths]
        if "seq_len" not in type(task).model_fields:
            return [task]
        try:
            longer = task.of_length(2 * task.length())
        except ConfigError:  # a length that the task cannot have, such as an even one
            return [task]
        known = inputs.vocabulary is None or longer.vocabulary() <= inputs.vocabulary
        return [task, longer] if known and longer.vocabulary() == task.vocabulary() else [task]

    def _row(self, task: Task, index: int) -> Row:
        tokens, targets = task.sample(stream(self.seed, "validation", index), 1)
        return Row(tokens[0], targets[0], np.zeros_like(tokens[0]))


class LossByPosition(Evaluation):
    """loss_by_position: windows of text, every token labelled with the next; the loss by the number of tokens before.

    Windows end at the ends of random sentences. If a memory retains what it has read, the loss falls with the number of
    tokens read; if it fills up, or was trained on shorter sequences, the loss rises again.

    Shapes: rows of `length` tokens.
    Cost: a forward pass of length tokens for each of `samples` rows.
    Origin: hecate's own choice of buckets, 0, 1, 2-3, 4-7, ... [EVAL-POSITION-D1]
    """

    kind: Literal["loss_by_position"] = "loss_by_position"
    lengths: Lengths = (1024, 2048, 4096)
    samples: Samples = 40
    seed: Count = Field(1, ge=0)

    def parts(self, given: Given) -> list[Part]:
        """A part for every length; `DataError` without a text."""
        encoder = _encoder(self, given)
        hay = _text(self.kind, given, encoder)
        return _parts(self, self.kind, partial(self._row, hay, encoder.start), None, "loss")

    def _row(self, hay: Haystack, start: tuple[int, ...], length: int, index: int) -> Row:
        text, _ = hay.around(draws(self.seed, 0, index), length + 1 - len(start), [], [])
        text = np.concatenate([np.array(start, dtype=np.int64), text])
        return Row(text[:-1], text[1:], np.arange(length))
