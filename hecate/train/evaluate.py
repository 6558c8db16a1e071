"""What a model does: its score on validation batches, its state and levels, and the text it goes on with."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils import _pytree as pytree

from hecate.cms import CMS, LevelHealth
from hecate.data import IGNORED, Batch, Source
from hecate.distributed import World
from hecate.errors import ConfigError, HealthWarning


class Score(NamedTuple):
    """Means over labelled positions: loss in nats, and the share of correct arg-max answers."""

    loss: float
    accuracy: float
    labels: int

    def value(self, metric: str) -> float:
        """The score in a source's metric."""
        return self.loss / math.log(2) if metric == "bits_per_byte" else self.accuracy

    def record(self, metric: str) -> dict[str, float]:
        """For metrics.jsonl and checkpoint manifests."""
        return {"validation_loss": self.loss, "accuracy": self.accuracy, metric: self.value(metric)}


def batch_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy in nats over labelled positions, in float32."""
    return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORED)


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """The model as it evaluates, without gradients; as it was afterwards."""
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(training)


def evaluate(model: nn.Module, batches: Iterable[Batch], device: torch.device, world: World | None = None) -> Score:
    """The score over all labels of all batches, each label with equal weight; the ranks of a world share the rows of
    each batch. [TRAIN-EVAL-D1] [DIST-EVAL-D1]"""
    loss, correct, labels = 0.0, 0, 0
    with _evaluating(model):
        for batch in batches:
            own = batch if world is None else _rows_of(batch, world)
            tokens, targets = own.tokens.to(device), own.targets.to(device)
            logits, _ = model(tokens)
            count = int((targets != IGNORED).sum())
            loss += float(batch_loss(logits, targets)) * count if count else 0.0
            correct += int((logits.argmax(-1) == targets).sum())  # IGNORED is no token
            labels += count
    if world is not None and world.size > 1:
        loss = float(world.sum(torch.tensor(loss, dtype=torch.float64)))
        correct, labels = world.sum(torch.tensor([correct, labels])).tolist()
    return Score(loss / max(labels, 1), correct / max(labels, 1), labels)


def _rows_of(batch: Batch, world: World) -> Batch:
    """This rank's rows of a batch; one without labels where there are fewer rows than ranks, for every rank has to
    call the model."""
    if world.batch_ranks == 1:
        return batch
    each = -(-len(batch.tokens) // world.batch_ranks)
    own = slice(world.batch_rank * each, (world.batch_rank + 1) * each)
    if len(batch.tokens[own]):
        return batch._replace(tokens=batch.tokens[own], targets=batch.targets[own])
    return batch._replace(tokens=batch.tokens[:1], targets=torch.full_like(batch.targets[:1], IGNORED))


def _one_sequence(model: nn.Module, source: Source, seq_len: int, device: torch.device) -> tuple[Batch, Tensor, Any]:
    """A validation batch of one sequence, the model's logits on it, and its state after it."""
    batch = next(iter(source.validation_batches(1, seq_len, 1)))
    with _evaluating(model):
        logits, state = model(batch.tokens[:1].to(device))
    return batch, logits, state


def state_leaves(model: nn.Module, source: Source, seq_len: int, device: torch.device) -> dict[str, Tensor]:
    """What one sequence carries from call to call, after `seq_len` validation tokens: tensors by their paths."""
    *_, state = _one_sequence(model, source, seq_len, device)
    found: list[tuple[Any, Any]] = pytree.tree_flatten_with_path(state)[0]
    return {pytree.keystr(path): leaf for path, leaf in found if isinstance(leaf, Tensor)}


def model_health(model: nn.Module, source: Source, seq_len: int, device: torch.device) -> dict[str, list[LevelHealth]]:
    """`CMS.health` of every layer of levels, on what it is given on one validation sequence."""
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, CMS)}
    seen: dict[nn.Module, Tensor] = {}

    def note(layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        seen[layer] = inputs[0].detach()

    with ExitStack() as hooks:
        for layer in layers.values():
            hooks.enter_context(layer.register_forward_pre_hook(note))
        if layers:
            _one_sequence(model, source, seq_len, device)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", HealthWarning)  # the table has a column for it
        return {name: layer.health(seen[layer]) for name, layer in layers.items() if layer in seen}


@torch.no_grad()
def generate(
    model: nn.Module,
    prompt: Sequence[int],
    tokens: int,
    *,
    temperature: float,
    generator: torch.Generator,
    device: torch.device | None = None,
) -> Iterator[int]:
    """Yields `tokens` ids drawn after `prompt`; temperature 0 takes the likeliest. [TRAIN-GEN-D1]

    The prompt is read once, then every token costs one step on the carried state, however long the text.
    """
    if not prompt:
        raise ConfigError("generation needs a prompt of at least one token; give --prompt a text")
    model.eval()
    state = None
    feed = torch.tensor([list(prompt)], device=device)
    for _ in range(tokens):
        logits, state = model(feed, state)
        last = logits[0, -1].float().cpu()
        if temperature == 0:
            choice = int(last.argmax())
        else:
            choice = int(torch.multinomial(torch.softmax(last / temperature, -1), 1, generator=generator))
        yield choice
        feed = torch.tensor([[choice]], device=device)


def solved_example(model: nn.Module, source: Source, seq_len: int, device: torch.device) -> str:
    """The answers to one validation example of a task, beside its labels."""
    batch, logits, _ = _one_sequence(model, source, seq_len, device)
    tokens, targets, answers = (x.tolist() for x in (batch.tokens[0], batch.targets[0], logits[0].argmax(-1)))
    lines = [f"tokens: {' '.join(map(str, tokens))}"]
    for position, (token, target, answer) in enumerate(zip(tokens, targets, answers, strict=True)):
        if target != IGNORED:
            verdict = "right" if answer == target else "wrong"
            lines.append(f"position {position}: after {token} answer {answer}, label {target}: {verdict}")
    return "\n".join(lines)
