"""Write strength: what one write of a memory changes, right after it and some tokens on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from hecate.errors import ShapeError
from hecate.nn.rule import ScanArguments

LATER = 32  # tokens on
NOTHING = 1e-3  # a memory none of whose writes changes an answer by more writes nothing


class Strength(NamedTuple):
    """Effect of the writes of N tokens, means over sequences and heads, `[N]`. [NN-WRITE-D1]

    A token's write is taken out, and the memory asked for its key either way: e and e' are the distances of its answers
    to the value without the write and with it, y and y' the answers.

    Fields:
        tokens: the tokens whose writes these are.
        share: 1 - |e'| / |e| as soon as the write can be read, of e that is not 0.
        share_later: the same some tokens on, after their writes.
        pull: <y' - y, v> / |v|^2, what sums do that learn no error.
        pull_later: the same some tokens on.
        size: |y'| / |v| in the mean.
    """

    tokens: Tensor
    share: Tensor
    share_later: Tensor
    pull: Tensor
    pull_later: Tensor
    size: Tensor

    @property
    def largest(self) -> float:
        """The most that any of the writes changes, by any measure."""
        return max(float(item.abs().max()) for item in self[1:5])


def reading_lag(asked: ScanArguments) -> int:
    """After how many tokens a write can be read first."""
    config = asked.config
    if config.commit == "chunk":
        return config.chunk
    return 1 if config.read == "before" else 0


def places(asked: ScanArguments, count: int = 4, later: int = LATER) -> list[int]:
    """At most so many tokens, evenly spread, whose writes can be followed for `later` tokens in every sequence; those
    that close a chunk where it commits as one."""
    length, lag = asked.v.shape[1], reading_lag(asked)
    written = asked.v.new_ones(length, dtype=torch.bool)
    if asked.write_mask is not None:
        written = asked.write_mask.all(0)
    fits: list[int] = []
    for t in range(length - lag - later):
        whole = lag < 2 or (t + 1) % lag == 0
        restarts = asked.reset_mask is not None and bool(asked.reset_mask[:, t + 1 : t + lag + later + 1].any())
        if whole and bool(written[t]) and not restarts:
            fits.append(t)
    if len(fits) <= count:
        return fits
    return [fits[round(index * (len(fits) - 1) / (count - 1))] for index in range(count)]


@torch.no_grad()
def write_strength(asked: ScanArguments, tokens: Sequence[int] | None = None, *, later: int = LATER) -> Strength | None:
    """Effect of the writes of some tokens; None where no write can be followed for so long.

    Args:
        asked: the scan, as `Memory.asked` makes it, one write a token.
        tokens: which writes; None takes those of `places`.
        later: how many tokens on they are looked for again.

    Raises:
        ShapeError: a token whose write cannot be followed.
    """
    lag, length = reading_lag(asked), asked.v.shape[1]
    chosen = places(asked, later=later) if tokens is None else list(tokens)
    if not chosen:
        return None
    for t in chosen:
        if not 0 <= t < length - lag - later:
            raise ShapeError(
                f"the write of token {t} is read from token {t + lag} on and looked for {later} later, and there are "
                f"{length} tokens; give one below {length - lag - later}"
            )
    with_write, without = (_answers(asked, chosen, lag, later, written) for written in (True, False))
    k_tokens = torch.tensor(chosen, device=asked.v.device)
    v = asked.v[:, k_tokens].double()  # [B, N, H, V]
    found: list[Tensor] = []
    for y1, y0 in zip(with_write, without, strict=True):
        error, before = (v - y1).norm(dim=-1), (v - y0).norm(dim=-1)
        share = torch.where(before > 0, 1 - error / before, torch.nan)
        square = v.square().sum(-1)
        pull = torch.where(square > 0, ((y1 - y0) * v).sum(-1) / square, torch.nan)
        found += [share.nanmean((0, 2)), pull.nanmean((0, 2))]
    size = with_write[0].norm(dim=-1).mean((0, 2)) / v.norm(dim=-1).mean((0, 2))
    share, pull, share_later, pull_later = (item.nan_to_num(0.0).cpu() for item in found)
    return Strength(k_tokens.cpu(), share, share_later, pull, pull_later, size.cpu())


def _answers(asked: ScanArguments, tokens: Iterable[int], lag: int, later: int, written: bool) -> tuple[Tensor, Tensor]:
    """The answers to the keys of tokens, `[B, N, H, V]`, when their writes can be read and some tokens on; with the
    writes or without. A copy of the sequences for every token."""
    batch, length = asked.v.shape[:2]
    q: list[Tensor] = []
    masks: list[Tensor] = []
    steps: list[Tensor] = []
    mask = asked.v.new_ones(batch, length, dtype=torch.bool) if asked.write_mask is None else asked.write_mask
    lr = asked.gates.lr if asked.config.commit == "chunk" else None
    tokens = list(tokens)
    for t in tokens:
        key, own = asked.q.clone(), mask.clone()
        key[:, t + lag] = key[:, t + lag + later] = asked.k[:, t]
        if isinstance(lr, Tensor):  # a masked token does not count, so that its chunk would close later
            steps.append(lr.clone())
            steps[-1][:, t] *= written
        else:
            own[:, t] &= written
        q.append(key)
        masks.append(own)
    copies = len(tokens)

    def repeated(item: Any) -> Any:
        return pytree.tree_map_only(Tensor, lambda x: x.repeat(copies, *[1] * (x.dim() - 1)), item)

    gates = repeated(asked.gates)
    gates = gates._replace(lr=torch.cat(steps)) if steps else gates
    copied = asked._replace(
        q=torch.cat(q), k=repeated(asked.k), v=repeated(asked.v), gates=gates,
        state=repeated(asked.state), write_mask=torch.cat(masks), reset_mask=repeated(asked.reset_mask),
    )  # fmt: skip
    y = copied.scan()[0].double().unflatten(0, (copies, batch))  # [N, B, T, H, V]
    rows = torch.arange(copies, device=y.device)
    at = torch.tensor(tokens, device=y.device) + lag
    return y[rows, :, at].transpose(0, 1), y[rows, :, at + later].transpose(0, 1)
