"""Evaluation of a model: its score on validation batches, its state and levels, and text generated token by token."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from hecate.checks import expect_count, expect_ids, expect_number
from hecate.cms import CMS, LevelHealth
from hecate.data import IGNORED, Batch, Source, Tokenizer, places_of
from hecate.distributed import World
from hecate.distributed.context import piece
from hecate.distributed.shard import unsharded
from hecate.errors import ConfigError, DataError, HealthWarning, NonFiniteError
from hecate.states import leaves


class Score(NamedTuple):
    """Means over labelled positions: loss in nats, share of correct arg-max answers; and bytes of text per label."""

    loss: float
    accuracy: float
    labels: int
    bytes_per_label: float = 1.0

    def value(self, metric: str) -> float:
        """The score in a metric: bits_per_byte, perplexity, or else the accuracy."""
        if metric == "bits_per_byte":
            return self.loss / math.log(2) / self.bytes_per_label
        if metric == "perplexity":
            return math.exp(self.loss) if self.loss < 700 else math.inf
        return self.accuracy

    def record(self, metric: str) -> dict[str, float]:
        """The score as a record, for metrics.jsonl and checkpoint manifests."""
        return {"validation_loss": self.loss, "accuracy": self.accuracy, metric: self.value(metric)}


def batch_loss(logits: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    """Cross-entropy in nats, in float32: the mean over labelled positions, or without a reduction that of all
    positions, 0 where there is no label."""
    logits, targets = logits.flatten(0, 1).float(), targets.flatten()
    return functional.cross_entropy(logits, targets, ignore_index=IGNORED, reduction=reduction)


def bytes_per_label(targets: Tensor, lengths: Tensor | None) -> float:
    """The mean number of bytes of text per label; `lengths` are the bytes of every token, None means 1 each."""
    labels = targets[targets != IGNORED]
    return 1.0 if lengths is None or not labels.numel() else float(lengths[labels].double().mean())


def resets_of(batch: Batch, device: torch.device, *, shared: bool = False) -> dict[str, Tensor]:
    """Keyword arguments that tell a model where documents start: empty if none starts in the batch, except with
    `shared`, when all ranks must pass the same arguments."""
    if batch.resets is None or not (shared or batch.resets.any()):
        return {}
    return {"reset_mask": batch.resets.to(device)}


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Context with the model in evaluation mode and without gradients; the mode of each part is restored afterwards."""
    training = [part for part in model.modules() if part.training]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for part in training:
            part.training = True


def evaluate(
    model: nn.Module,
    batches: Iterable[Batch],
    device: torch.device,
    lengths: Tensor | None = None,
    world: World | None = None,
) -> Score:
    """The score over all labels of all batches, each label with equal weight; the ranks of a world share the rows of
    each batch [DIST-EVAL-D1]. [TRAIN-EVAL-D1]

    `lengths` are the source's: bytes of text of every token, None for 1 each. [DATA-TOKENS-D4]
    """
    loss, correct, labels, size = 0.0, 0, 0, 0
    shared = world is not None and world.extent("context") > 1
    with evaluating(model):
        for batch in batches:
            part = batch if world is None else _own_part(batch, world)
            tokens, targets = part.tokens.to(device), part.targets.to(device)
            logits, _ = model(tokens, **resets_of(part, device, shared=shared))
            count = int((targets != IGNORED).sum())
            size += count if lengths is None else int(lengths[part.targets[part.targets != IGNORED]].sum())
            # The mean times the number of labels, so that every label has the same weight in whatever batch.
            loss += float(batch_loss(logits, targets)) * count if count else 0.0
            correct += int((logits.argmax(-1) == targets).sum())  # IGNORED never equals a token
            labels += count
    if world is not None and world.size > 1:
        loss = float(world.sum(torch.tensor(loss, dtype=torch.float64)))
        correct, labels, size = world.sum(torch.tensor([correct, labels, size])).tolist()
    return Score(loss / max(labels, 1), correct / max(labels, 1), labels, size / labels if size else 1.0)


class Positions(NamedTuple):
    """Mean loss in nats over the labels `first .. last` tokens after the start of their document or row."""

    first: int
    last: int
    loss: float
    labels: int


class Buckets:
    """Sums of losses at positions 0, 1, 2-3, 4-7, ..."""

    def __init__(self) -> None:
        self._sums, self._counts = torch.zeros(64, dtype=torch.float64), torch.zeros(64, dtype=torch.int64)

    def add(self, places: Tensor, losses: Tensor) -> None:
        """Adds losses, float64 `[N]`, at positions, int64 `[N]`."""
        # bucket n holds positions 2^(n-1) .. 2^n - 1: frexp gives that exponent, exactly
        buckets = torch.frexp(places.double()).exponent.long()
        self._sums.index_add_(0, buckets, losses)
        self._counts += torch.bincount(buckets, minlength=64)

    def positions(self) -> list[Positions]:
        """The mean of every bucket with labels."""
        spans = ((0, 0), *((1 << n, (2 << n) - 1) for n in range(63)))
        buckets = zip(spans, self._sums.tolist(), self._counts.tolist(), strict=True)
        return [Positions(*span, total / count, count) for span, total, count in buckets if count]


def loss_by_position(
    model: nn.Module, batches: Iterable[Batch], device: torch.device, *, piece: int = 1024
) -> list[Positions]:
    """The loss by the number of tokens read, in buckets 0, 1, 2-3, 4-7, ..., without buckets that have no label.

    Position 0 is the start of a row or a document. Sequences may be longer than in training: they are read in pieces of
    `piece` tokens with the state carried over, so that only the batch itself grows with the length. [TRAIN-EVAL-D2]
    """
    buckets = Buckets()
    with evaluating(model):
        for batch in batches:
            state: Any = None
            starts = torch.zeros_like(batch.tokens, dtype=torch.bool) if batch.resets is None else batch.resets
            # [B, T]: tokens since the start of each token's document.
            places = places_of(starts)
            for first in range(0, batch.tokens.shape[1], piece):
                part = batch.part(span=slice(first, first + piece))
                carried = () if state is None else (state,)
                logits, state = model(part.tokens.to(device), *carried, **resets_of(part, device))
                losses = batch_loss(logits, part.targets.to(device), "none").cpu()
                labelled = part.targets.flatten() != IGNORED
                buckets.add(places[:, first : first + piece].flatten()[labelled], losses[labelled].double())
    return buckets.positions()


def _own_part(batch: Batch, world: World) -> Batch:
    """This rank's rows of a batch, and its part of their tokens if ranks share sequences. A rank without rows gets one
    row without labels, because every rank has to call the model."""
    if world.batch_ranks > 1:
        # Rounded up: the last ranks may have fewer rows, or none.
        each = -(-len(batch.tokens) // world.batch_ranks)
        rows = batch.part(range(world.batch_rank * each, (world.batch_rank + 1) * each))
        if not len(rows.tokens):
            rows = batch.part(range(1))
            rows = rows._replace(targets=torch.full_like(rows.targets, IGNORED))
        batch = rows
    ranks = world.extent("context")
    return batch if ranks == 1 or world.mesh is None else piece(batch, world.mesh.get_local_rank("context"), ranks)


def _one_sequence(model: nn.Module, source: Source, seq_len: int, device: torch.device) -> tuple[Batch, Tensor, Any]:
    """A validation batch of one sequence, the model's logits for it, and the state after it."""
    batch = next(iter(source.validation_batches(1, seq_len, 1)))
    with evaluating(model):
        logits, state = model(batch.tokens[:1].to(device))
    return batch, logits, state


def state_leaves(model: nn.Module, source: Source, seq_len: int, device: torch.device) -> dict[str, Tensor]:
    """Tensors of one sequence's state, by path, after `seq_len` validation tokens."""
    *_, state = _one_sequence(model, source, seq_len, device)
    return leaves(state)


def model_health(model: nn.Module, source: Source, seq_len: int, device: torch.device) -> dict[str, list[LevelHealth]]:
    """`CMS.health` of every `CMS` layer, by name, on its inputs for one validation sequence."""
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, CMS)}
    activations: dict[nn.Module, Tensor] = {}

    def note(layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        activations[layer] = inputs[0].detach()

    with ExitStack() as hooks:
        for layer in layers.values():
            hooks.enter_context(layer.register_forward_pre_hook(note))
        if layers:
            _one_sequence(model, source, seq_len, device)
    with warnings.catch_warnings(), unsharded(model):
        warnings.simplefilter("ignore", HealthWarning)  # the report has a column for it
        # Called alone, a layer computes with its float32 parameters; in a bfloat16 run its inputs were bfloat16.
        activations = {layer: x.to(next(layer.parameters()).dtype) for layer, x in activations.items()}
        return {name: layer.health(activations[layer]) for name, layer in layers.items() if layer in activations}


def solved_example(model: nn.Module, source: Source, seq_len: int, device: torch.device) -> str:
    """A validation example of a task as text, with the model's answers beside the labels."""
    batch, logits, _ = _one_sequence(model, source, seq_len, device)
    tokens, targets, answers = (x.tolist() for x in (batch.tokens[0], batch.targets[0], logits[0].argmax(-1)))
    lines = [f"tokens: {' '.join(map(str, tokens))}"]
    for position, (token, target, answer) in enumerate(zip(tokens, targets, answers, strict=True)):
        if target != IGNORED:
            verdict = "right" if answer == target else "wrong"
            lines.append(f"position {position}: after {token} answer {answer}, label {target}: {verdict}")
    return "\n".join(lines)


def likely(logits: Tensor, temperature: float, top_k: int | None = None, top_p: float | None = None) -> Tensor:
    """Probabilities `[V]` to draw from: softmax(logits / temperature) over the `top_k` likeliest tokens, of which only
    the fewest are kept whose probabilities reach `top_p` in all. [TRAIN-GEN-D2]"""
    # Minus the largest, so that for small temperatures the likeliest stays at 0; `tiny` avoids 0 / 0.
    logits = (logits - logits.max()) / max(temperature, torch.finfo(logits.dtype).tiny)
    if top_k is not None and top_k < len(logits):
        # -inf for all others, so that the softmax is over the likeliest only.
        indices = torch.topk(logits, top_k).indices
        logits = torch.full_like(logits, -torch.inf).index_copy(0, indices, logits[indices])
    chances = torch.softmax(logits, -1)
    if top_p is not None and top_p < 1:
        ordered, order = chances.sort(descending=True, stable=True)
        ahead = ordered.cumsum(0) - ordered
        chances = chances.index_fill(0, order[1:][ahead[1:] >= top_p], 0.0)  # the likeliest stays, even for top_p = 0
    return chances


class Draws:
    """Generation after several prompts at once, lazily, with a state of constant size for each. [TRAIN-GEN-D1]

    Prompts are read once; shorter ones are padded on the left, with tokens that are not written. Row n draws from
    generator n only, so that its tokens do not depend on the other rows.
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
        expect_number(temperature, "temperature")
        if top_k is not None:
            expect_count(top_k, "top_k")
        if top_p is not None:
            expect_number(top_p, "top_p", high=1.0)
            if top_p == 0:
                raise ConfigError("top_p must be above 0 and at most 1, got 0; top_k=1 takes the likeliest alone")
        if temperature and not all(isinstance(draws, torch.Generator) for draws in generators):
            raise ConfigError("generator must be a torch.Generator: torch.Generator().manual_seed(0) is one")
        self._model, self._generators, self._how = model, list(generators), (temperature, top_k, top_p)
        longest = max(map(len, prompts))
        # Shorter prompts are aligned to the right: all rows draw at the last position.
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

    def _step(self) -> None:
        with evaluating(self._model):
            logits, self._state = self._model(self._feed, self._state, **self._masks)
        temperature, top_k, top_p = self._how
        for row, last, draws in zip(self._drawn, logits[:, -1].float().cpu(), self._generators, strict=True):
            if not bool(last.isfinite().all()):
                raise NonFiniteError("the logits are not finite: weights or a state hold NaN or infinity")
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

    The prompt is read once; then every token costs one step on the carried state, however long the text is.
    """
    expect_count(tokens, "tokens", 0)
    how: dict[str, Any] = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "device": device}
    return Draws(model, [prompt], [generator], **how).row(0, tokens)


def written(tokenizer: Tokenizer, prompt: Sequence[int], ids: Iterator[int], stop: Sequence[str] = ()) -> Iterator[str]:
    """A prompt and its continuation as text, in pieces as soon as they are final; the continuation ends before the
    first of the texts `stop`. [TRAIN-GEN-D3]"""
    if not all(text and text.encode("utf-8", "ignore").decode() == text for text in stop):
        raise ConfigError("--stop must be a text of at least one character, in UTF-8")
    ahead, pending = len(tokenizer.decode(prompt)), ""
    for text in tokenizer.pieces(chain(prompt, ids)):
        shown, pending = text[:ahead], pending + text[ahead:]
        ahead -= len(shown)
        # If there are several, the earliest one counts.
        places = [place for place in map(pending.find, stop) if place >= 0]
        if places:
            yield shown + pending[: min(places)]
            return
        # If the text so far ends with the beginning of a stop, that part is held back until more is known.
        open_ = max((n for text in stop for n in range(1, len(text)) if pending.endswith(text[:n])), default=0)
        yield shown + pending[: len(pending) - open_]
        pending = pending[len(pending) - open_ :]
    yield pending


def prompts_of(tokenizer: Tokenizer, texts: Sequence[str], size: int, where: str) -> list[list[int]]:
    """The ids of prompts; refuses ids beyond a model's vocabulary of `size` tokens."""
    prompts = [ids.tolist() for ids in tokenizer.encode(list(texts))]
    for text, ids in zip(texts, prompts, strict=True):
        if ids and max(ids) >= size:
            raise DataError(f"the prompt {text[:40]!r} has token {max(ids)}, and the model of {where} knows {size}")
    return prompts
