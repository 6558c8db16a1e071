"""A memory over time: norms and effective ranks of its weights, gates, and states to ask."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from hecate.engine import Sequence, check_params, complete, numbered, to_tokens
from hecate.nn.asked import Asked
from hecate.rule import MemoryState
from hecate.tape import execute


class Moment(NamedTuple):
    """The state after some tokens."""

    tokens: int
    state: MemoryState


def moments(scans: list[Asked], points: int) -> Iterator[Moment]:
    """States before the first token and after some, at most `points`, evenly spread; the last
    token is among them. Any split of a scan is exact, so the pieces change nothing."""
    length = sum(asked.v.shape[1] for asked in scans)
    cuts = {round(length * index / points) for index in range(1, points + 1)} - {0}
    yield Moment(0, scans[0].between(0, 0, scans[0].state).scan()[1])
    begun = 0
    for asked in scans:
        own, state = asked.v.shape[1], asked.state
        for at, end in pairwise([0, *sorted(c - begun for c in cuts if 0 < c - begun < own), own]):
            _, state = asked.between(at, end, state).scan()
            if begun + end in cuts:
                yield Moment(begun + end, state)
        begun += own


def norms_of(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Frobenius norm of each weight, `[B, H]`."""
    return {name: weight.flatten(2).norm(dim=2) for name, weight in weights.items()}


def ranks_of(weights: dict[str, Tensor], *, diagonal: bool) -> dict[str, Tensor]:
    """Effective rank of each weight that is a matrix, `[B, H]`. [SCOPE-RANK-D1]

    exp of the entropy of s / sum(s), s the singular values (Roy and Vetterli, The effective rank, 2007): between 1 and
    the rank, and the rank where they are equal; 0 for a matrix of zeros. A diagonal memory is the matrix with its
    weights on the diagonal.
    """
    ranks: dict[str, Tensor] = {}
    for name, weight in weights.items():
        if diagonal:
            ranks[name] = effective_rank(weight.abs())
        elif weight.dim() == 4 and min(weight.shape[2:]) > 1:
            ranks[name] = effective_rank(torch.linalg.svdvals(weight))
    return ranks


def effective_rank(values: Tensor) -> Tensor:
    """exp of the entropy of what is on the last axis, as shares of its sum; 0 for all zeros."""
    total = values.sum(-1, keepdim=True)
    share = values / torch.where(total > 0, total, 1.0)
    return torch.where(total.squeeze(-1) > 0, torch.special.entr(share).sum(-1).exp(), 0.0)


def gates_of(scans: list[Asked]) -> dict[str, Tensor]:
    """Every gate that the rule has, defaults filled in, `[B, T, H]` (retain `[B, T, H, P]` per channel)."""
    config = scans[0].config
    sequences = [_sequence(asked) for asked in scans]
    has = {"lr": True, "retain": config.retention.uses_retain, "momentum": config.algorithm.uses_momentum}
    return {name: torch.cat([getattr(item, name) for item in sequences], 1) for name, used in has.items() if used}


def key_features(scans: list[Asked]) -> Tensor:
    """phi(k) of every token as the memory is written with it, `[B, T, H, P]`."""
    features = []
    for asked in scans:
        params = check_params(asked.config.feature_map, asked.phi_params, asked.k)
        sequence, _ = numbered(asked.config, asked.state, _sequence(asked))
        tokens = to_tokens(asked.config, sequence, params, asked.k.dtype, execute)
        features.append(tokens.phi_k)
    return torch.cat(features, 1)


def _sequence(asked: Asked) -> Sequence:
    masks = (asked.write_mask, asked.reset_mask, None)
    return complete(asked.config, asked.q, asked.k, asked.v, asked.gates, *masks, going_on=True)
