"""Text that something is hidden in: sentences as tokens, cut to a length exactly."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from hecate.data import Tokenizer
from hecate.data.corpus import Limits, documents, find
from hecate.errors import ConfigError, DataError, shorten

MOST = 1 << 20
"""Characters of a text that are used."""
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
"""RULER's repeated haystack, a line of its own each time."""
_SENTENCE, _LINE = re.compile(r"(?<=[.!?])\s+|\n+"), re.compile(r"\n+")
Ids = NDArray[np.int64]


class Encoder(Protocol):
    """Encoder of texts into ids."""

    start: tuple[int, ...]
    """Ids that every row begins with."""

    def ids(self, texts: Sequence[str]) -> list[Ids]:
        """The ids of each text."""
        ...


class _Own:
    """A tokenizer of hecate's."""

    start: tuple[int, ...] = ()

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def ids(self, texts: Sequence[str]) -> list[Ids]:
        """The ids of each text."""
        return [found.astype(np.int64) for found in self._tokenizer.encode(texts)]


class _Theirs:
    """A tokenizer with transformers' `encode`; a row begins with the token that it puts ahead of a text."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        begin = getattr(tokenizer, "bos_token_id", None)
        ahead = list(tokenizer.encode("a"))[:1]
        self.start: tuple[int, ...] = (begin,) if begin is not None and ahead == [begin] else ()

    def ids(self, texts: Sequence[str]) -> list[Ids]:
        """The ids of each text, without special tokens."""
        return [np.array(self._tokenizer.encode(text, add_special_tokens=False), dtype=np.int64) for text in texts]


def encoder_of(tokenizer: Any) -> Encoder:
    """A tokenizer of hecate's or of transformers, as what tasks ask."""
    if isinstance(tokenizer, Tokenizer):
        return _Own(tokenizer)
    if not callable(getattr(tokenizer, "encode", None)):
        raise ConfigError(
            f"tokenizer must be one of hecate's or have transformers' encode(text, add_special_tokens=False), got "
            f"{shorten(tokenizer)}"
        )
    return _Theirs(tokenizer)


class Haystack:
    """Sentences one after the other, from the first again where they end; each keeps the space or line end behind it.

    Sentences end behind `.`, `!` or `?` and a space, and where a line does; with `lines` there alone.
    [EVAL-HAYSTACK-D1]
    """

    def __init__(self, text: str, encoder: Encoder, *, lines: bool = False) -> None:
        self.text = text
        cuts = [0, *(match.end() for match in (_LINE if lines else _SENTENCE).finditer(text)), len(text)]
        sentences = [text[a:b] for a, b in pairwise(cuts) if text[a:b].strip()]
        found = [ids for ids in encoder.ids(sentences) if len(ids)] if sentences else []
        if not found:
            raise DataError("the text for the haystack has no sentence; name a file with text")
        self._ids = np.concatenate(found)
        self._starts = np.cumsum([0, *(len(ids) for ids in found)])[:-1]

    def around(
        self, rng: np.random.Generator, room: int, needles: Sequence[Ids], depths: Sequence[float]
    ) -> tuple[Ids, list[int]]:
        """`room` tokens up to the end of a random sentence, the needles included, and where each needle starts.

        A needle stands ahead of the sentence that starts nearest to its depth, a share of the text's tokens; at depth 1
        it is the last. The first sentence is the one that is cut. Raises ConfigError if `room` is smaller than the
        needles.
        """
        length, size = room - sum(map(len, needles)), len(self._ids)
        if length < 0:
            raise ConfigError(f"{room} tokens cannot hold needles of {room - length}")
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
    """The text of a file or of a folder of them, as far as it is used; `DataError` where there is none."""
    found, room = [], MOST
    for file in find([str(path)]):
        for document in documents(file, limits=Limits(cut=4 * MOST)):  # a character has at most four bytes
            found.append(document[:room])
            room -= len(found[-1])
            if room <= 0:
                return "\n".join(found)
    return "\n".join(found)
