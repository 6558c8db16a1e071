"""Scores of a model on validation batches, and the size of its state."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils import _pytree as pytree

from hecate.data import IGNORED, Batch, Source

UNIT = {"bits_per_byte": "bits per byte", "accuracy": "accuracy"}


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
        extra = {metric: self.value(metric)} if metric != "accuracy" else {}
        return {"validation_loss": self.loss, "accuracy": self.accuracy, **extra}


class StateLeaf(NamedTuple):
    """One tensor of a recurrent state."""

    path: str
    shape: tuple[int, ...]
    bytes: int
    norm: float


def batch_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy in nats over labelled positions, in float32."""
    return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORED)


@torch.no_grad()
def evaluate(model: nn.Module, batches: Iterable[Batch], device: torch.device) -> Score:
    """The score over all labels of all batches, each label with equal weight. [TRAIN-EVAL-D1]"""
    training = model.training
    model.eval()
    loss, correct, labels = 0.0, 0, 0
    try:
        for batch in batches:
            tokens, targets = batch.tokens.to(device), batch.targets.to(device)
            logits, _ = model(tokens)
            labelled = targets != IGNORED
            count = int(labelled.sum())
            loss += float(batch_loss(logits, targets)) * count if count else 0.0
            correct += int((logits.argmax(-1) == targets)[labelled].sum())
            labels += count
    finally:
        model.train(training)
    return Score(loss / max(labels, 1), correct / max(labels, 1), labels)


@torch.no_grad()
def state_leaves(model: nn.Module, source: Source, seq_len: int, device: torch.device) -> list[StateLeaf]:
    """What one sequence carries from call to call, after `seq_len` validation tokens."""
    batch = next(iter(source.validation_batches(1, seq_len, 1)))
    training = model.training
    model.eval()
    try:
        _, state = model(batch.tokens[:1].to(device))
    finally:
        model.train(training)
    leaves: list[StateLeaf] = []
    found: list[tuple[Any, Any]] = pytree.tree_flatten_with_path(state)[0]
    for path, leaf in found:
        if isinstance(leaf, Tensor):
            norm = float(leaf.double().norm()) if leaf.is_floating_point() else math.nan
            size = leaf.numel() * leaf.element_size()
            leaves.append(StateLeaf(pytree.keystr(path), tuple(leaf.shape), size, norm))
    return leaves
