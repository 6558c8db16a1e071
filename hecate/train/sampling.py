"""Drawing tokens after prompts, and the text they are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from hecate.checks import expect_ids
from hecate.data import Tokenizer
from hecate.errors import ConfigError, DataError


def likely(logits: Tensor, temperature: float, top_k: int | None = None, top_p: float | None = None) -> Tensor:
    """Probabilities `[V]` to draw from: softmax(logits / temperature) of the `top_k` likeliest tokens, of these the
    fewest that hold a share `top_p`. [TRAIN-GEN-D2]"""
    logits = logits / temperature
    if top_k is not None and top_k < len(logits):
        kept = torch.topk(logits, top_k).indices
        logits = torch.full_like(logits, -torch.inf).index_copy(0, kept, logits[kept])
    chances = torch.softmax(logits, -1)
    if top_p is not None and top_p < 1:
        ordered, order = chances.sort(descending=True, stable=True)
        ahead = ordered.cumsum(0) - ordered
        chances = chances.index_fill(0, order[ahead >= top_p], 0.0)  # the likeliest has nothing ahead of it
    return chances


class Draws:
    """Tokens drawn after several prompts at once, as far as they are asked for: a state of constant size each.
    [TRAIN-GEN-D1]

    Prompts are read once; shorter ones begin later, and what stands before them writes nothing. Row n draws from
    generator n alone: what it says does not depend on the others.
    """

    def __init__(
        self,
        model: nn.Module,
        prompts: Sequence[Sequence[int]],
        generators: Sequence[torch.Generator],
        *,
        temperature: float,
        top_k: int | None = None,
        top_p: float | None = None,
        device: torch.device | None = None,
    ) -> None:
        for prompt in prompts:
            expect_ids(prompt, "prompt")
        if not all(prompts):
            raise ConfigError("generation needs a prompt of at least one token; give --prompt a text")
        for name, value, bound, sound in (
            ("temperature", temperature, "at least 0", temperature >= 0),
            ("top_k", top_k, "at least 1", top_k is None or top_k >= 1),
            ("top_p", top_p, "above 0 and at most 1", top_p is None or 0 < top_p <= 1),
        ):
            if not sound:
                raise ConfigError(f"{name} must be {bound}, got {value}")
        if temperature and not all(isinstance(draws, torch.Generator) for draws in generators):
            raise ConfigError("generator must be a torch.Generator: torch.Generator().manual_seed(0) is one")
        self._model, self._generators, self._how = model, list(generators), (temperature, top_k, top_p)
        longest = max(map(len, prompts))
        self._feed = torch.tensor([[0] * (longest - len(row)) + list(row) for row in prompts], device=device)
        here = torch.tensor([[False] * (longest - len(row)) + [True] * len(row) for row in prompts], device=device)
        self._masks = {} if here.all() else {"write_mask": here}
        self._state: Any = None
        self._drawn: list[list[int]] = [[] for _ in prompts]

    def row(self, number: int, tokens: int) -> Iterator[int]:
        """The first `tokens` ids of a row, each as soon as it is drawn."""
        for place in range(tokens):
            while len(self._drawn[number]) <= place:
                self._step()
            yield self._drawn[number][place]

    @torch.no_grad()
    def _step(self) -> None:
        training = self._model.training
        self._model.eval()
        try:
            logits, self._state = self._model(self._feed, self._state, **self._masks)
        finally:
            self._model.train(training)
        temperature, top_k, top_p = self._how
        for row, last, draws in zip(self._drawn, logits[:, -1].float().cpu(), self._generators, strict=True):
            if temperature == 0:
                row.append(int(last.argmax()))
            else:
                row.append(int(torch.multinomial(likely(last, temperature, top_k, top_p), 1, generator=draws)))
        self._feed, self._masks = torch.tensor([[row[-1]] for row in self._drawn], device=self._feed.device), {}


def generate(
    model: nn.Module,
    prompt: Sequence[int],
    tokens: int,
    *,
    temperature: float,
    generator: torch.Generator,
    top_k: int | None = None,
    top_p: float | None = None,
    device: torch.device | None = None,
) -> Iterator[int]:
    """Yields `tokens` ids drawn after `prompt`; temperature 0 takes the likeliest. [TRAIN-GEN-D1]

    The prompt is read once, then every token costs one step on the carried state, however long the text.
    """
    how: dict[str, Any] = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "device": device}
    return Draws(model, [prompt], [generator], **how).row(0, tokens)


def written(tokenizer: Tokenizer, prompt: Sequence[int], ids: Iterator[int], stop: Sequence[str] = ()) -> Iterator[str]:
    """A prompt and what follows it as text, in parts as soon as they are known; what follows ends ahead of the first
    of `stop`, which is not shown. [TRAIN-GEN-D3]"""
    if not all(text and text.encode("utf-8", "ignore").decode() == text for text in stop):
        raise ConfigError("--stop must be a text of at least one character, in UTF-8")
    ahead, held = len(tokenizer.decode(prompt)), ""
    for piece in tokenizer.pieces(chain(prompt, ids)):
        shown, held = piece[:ahead], held + piece[ahead:]
        ahead -= len(shown)
        found = [place for place in map(held.find, stop) if place >= 0]
        if found:
            yield shown + held[: min(found)]
            return
        open_ = max((n for text in stop for n in range(1, len(text)) if held.endswith(text[:n])), default=0)
        yield shown + held[: len(held) - open_]
        held = held[len(held) - open_ :]
    yield held


def prompts_of(tokenizer: Tokenizer, texts: Sequence[str], size: int, where: str) -> list[list[int]]:
    """The ids of prompts, all of which a model of `size` tokens knows."""
    found = [ids.tolist() for ids in tokenizer.encode(list(texts))]
    for text, ids in zip(texts, found, strict=True):
        if ids and max(ids) >= size:
            raise DataError(f"the prompt {text[:40]!r} has token {max(ids)}, and the model of {where} knows {size}")
    return found
