"""Small models that optimisers train: one reads text, one recalls pairs (MQAR)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from hecate.data import MQAR, Bundled
from studies.descents import CEILING, LOST, Make, Score

Example = tuple[Tensor, Tensor]

CONTEXT, EMBEDDING, HIDDEN, BYTES = 4, 8, 32, 256  # of the text model
PAIRS, SYMBOLS, LENGTH, WIDTH = 8, 64, 32, 8  # of the task of recall and its model


class Lesson(NamedTuple):
    """What is learned: batches by seed, what is held out, and the model that learns it."""

    batches: dict[int, list[Example]]
    held_out: Example
    facts: dict[str, str | int | float]
    chance: float  # bits that a guess without reading costs
    model: Callable[[int], list[Tensor]]
    loss: Callable[[list[Tensor], Example], Tensor]


def draw_text(seeds: Sequence[int], steps: int, batch: int = 128) -> Lesson:
    """The texts that every Python carries, cut at 256 KiB: bytes `[B, CONTEXT]`, the next `[B]`."""
    source = Bundled(max_bytes=1 << 18).load()
    batches = {
        seed: [
            (drawn.tokens, drawn.targets[:, -1])
            for drawn in (source.train_batch(seed, step, batch, CONTEXT) for step in range(steps))
        ]
        for seed in seeds
    }
    (held,) = source.validation_batches(2048, CONTEXT, 1)
    unigram = source.baselines(2048, CONTEXT, 1)["unigram"]
    shown = (held.tokens, held.targets[:, -1])
    return Lesson(batches, shown, source.describe(), unigram, text_model, text_loss)


def text_model(seed: int) -> list[Tensor]:
    """Embedding, hidden and output matrix of a network that sees CONTEXT bytes; no biases."""
    return _matrices(seed, (BYTES, EMBEDDING), (HIDDEN, CONTEXT * EMBEDDING), (BYTES, HIDDEN))


def text_loss(params: list[Tensor], example: Example) -> Tensor:
    """Cross-entropy of the next byte, in nats."""
    embedding, hidden, out = params
    tokens, target = example
    seen = F.embedding(tokens, embedding).flatten(1)
    return F.cross_entropy(torch.tanh(seen @ hidden.mT) @ out.mT, target)


def draw_recall(seeds: Sequence[int], steps: int, batch: int = 32) -> Lesson:
    """MQAR: tokens and targets `[B, LENGTH]`, labels at the PAIRS queries alone."""
    source = MQAR(vocab_size=SYMBOLS, num_pairs=PAIRS, seq_len=LENGTH, random_filler=False).load()
    batches = {
        seed: [
            (drawn.tokens, drawn.targets)
            for drawn in (source.train_batch(seed, step, batch, LENGTH) for step in range(steps))
        ]
        for seed in seeds
    }
    (held,) = source.validation_batches(256, LENGTH, 1)
    chance = math.log2(SYMBOLS // 2)
    shown = (held.tokens, held.targets)
    return Lesson(batches, shown, source.describe(), chance, recall_model, recall_loss)


def recall_model(seed: int) -> list[Tensor]:
    """Embedding, queries, keys, values and output of one layer of attention; no biases."""
    square = (WIDTH, WIDTH)
    return _matrices(seed, (SYMBOLS, WIDTH), square, square, square, (SYMBOLS, WIDTH))


def recall_loss(params: list[Tensor], example: Example) -> Tensor:
    """Cross-entropy of the answers, in nats; a token's key is that of the token before it."""
    embedding, to_query, to_key, to_value, out = params
    tokens, targets = example
    seen = F.embedding(tokens, embedding)
    before = F.pad(seen, (0, 0, 1, 0))[:, :-1]
    query, key, value = seen @ to_query.mT, before @ to_key.mT, seen @ to_value.mT
    read = F.scaled_dot_product_attention(query, key, value, is_causal=True)
    return F.cross_entropy((read @ out.mT).flatten(0, 1), targets.flatten())


def learn(make: Make, lr: float, seed: int, lesson: Lesson) -> float:
    """Bits per answer on what is held out, after one pass over a seed's batches."""
    params = lesson.model(seed)
    optimizer = make([{"params": params, "lr": lr}])
    for example in lesson.batches[seed]:
        loss = lesson.loss(params, example)
        if not loss.item() < LOST:
            break
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        bits = lesson.loss(params, lesson.held_out).item() / math.log(2)
    return bits if bits < CEILING else CEILING


def score_lesson(make: Make, grid: Sequence[float], seeds: Sequence[int], other: int, lesson: Lesson) -> Score:
    """Bits held out, at the learning rate that was best on one other seed."""
    tried = [learn(make, lr, other, lesson) for lr in grid]
    lr = grid[tried.index(min(tried))]
    shown = [learn(make, lr, seed, lesson) for seed in seeds]
    return Score(torch.tensor(shown, dtype=torch.float64), min(tried), lr)


def _matrices(seed: int, *shapes: tuple[int, int]) -> list[Tensor]:
    """Normal draws; all but the first, an embedding, divided by the root of their columns."""
    generator = torch.Generator().manual_seed(seed)
    drawn = [torch.randn(s, generator=generator, dtype=torch.float32) for s in shapes]
    scales = [1.0, *(columns**-0.5 for _, columns in shapes[1:])]
    return [(s * x).requires_grad_() for s, x in zip(scales, drawn, strict=True)]
