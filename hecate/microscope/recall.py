"""What a memory still answers to the keys that it was written with, by their age."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hecate.engine import predict
from hecate.errors import ConfigError, ShapeError
from hecate.microscope.calls import joined_mask
from hecate.microscope.states import Moment, gates_of, key_features
from hecate.nn.asked import Asked
from hecate.rule import MemoryConfig, MemoryState, memory_weights
from hecate.tape import execute


class Recall(NamedTuple):
    """Answers to phi(k_s) after t tokens, beside v_s; NaN where s is not in the memory's past:
    not yet there, masked, not fired, or of an earlier document. [SCOPE-RECALL-D1]

    Fields:
        times: tokens read at each of N moments, `[N]`; the age of s is t - 1 - s.
        cosine: between the answer and v_s, `[B, H, N, T]`.
        error: |answer - v_s| / |v_s|, the same; NaN too where v_s is 0.
        chance: mean cosine between the answer and the values of the other tokens, the same.
    """

    times: Tensor
    cosine: Tensor
    error: Tensor
    chance: Tensor

    def known(self, row: int = 0) -> bool:
        """Whether a sequence left anything to recall: no memory of a head that never fires does."""
        return not bool(self.cosine[row].isnan().all())

    def by_age(self, name: str = "cosine", row: int = 0) -> AgeCurve:
        """One of the three by age, in bins 0, 1, 2-3, 4-7, ..., over the moments of a sequence."""
        if name not in ("cosine", "error", "chance"):
            raise ConfigError(f"must be 'cosine', 'error' or 'chance', got {name!r}", path=("name",))
        if not 0 <= row < len(self.cosine):
            raise ConfigError(f"there are {len(self.cosine)} sequences, got row {row}")
        ages = self.times[:, None] - 1 - torch.arange(self.cosine.shape[-1])
        values: Tensor = getattr(self, name)[row]
        bins = torch.where(ages > 0, ages.clamp(min=1).log2().floor() + 1, 0)
        curves, means = [], []
        for number in range(int(bins.max()) + 1 if bins.numel() else 0):
            inside = (bins == number) & (ages >= 0) & ~values.isnan().all(0)
            if inside.any():
                curves.append(torch.nanmean(values[:, inside], 1))
                means.append(ages[inside].double().mean())
        if not curves:
            raise ShapeError("nothing was written, so nothing can be recalled")
        return AgeCurve(torch.stack(means), torch.stack(curves, 1))


class AgeCurve(NamedTuple):
    """Means by age: the mean age of each bin in tokens `[A]`, and a mean per head `[H, A]`, NaN for a head that wrote
    nothing of that age."""

    ages: Tensor
    means: Tensor


class Recaller:
    """Asks states for what was written, moment by moment."""

    def __init__(self, scans: list[Asked]) -> None:
        self.config = scans[0].config
        self.keys = key_features(scans)
        self.values = torch.cat([asked.v for asked in scans], 1)
        write = joined_mask(scans, "write_mask")
        self.document = joined_mask(scans, "reset_mask").cumsum(1)
        self.written = write.unsqueeze(-1) & (gates_of(scans)["lr"] > 0)
        self.times: list[int] = []
        self.found: dict[str, list[Tensor]] = {"cosine": [], "error": [], "chance": []}

    def ask(self, moment: Moment) -> None:
        """Notes the answers of a state."""
        answers = answered(self.config, moment.state, self.keys)
        v = torch.where(self.written[..., None], self.values, 0.0)
        unit, own = _unit(answers), _unit(v)
        cosine = (unit * own).sum(-1)
        present = self._present(moment.tokens)
        shown = present.to(own.dtype)
        total = (own * shown[..., None]).sum(1, keepdim=True)
        others = (shown.sum(1, keepdim=True) - 1).clamp(min=1)
        chance = ((unit * total).sum(-1) - cosine) / others
        length = v.norm(dim=-1)  # of a value of 0 there is no relative error
        error = (answers - v).norm(dim=-1) / torch.where(length > 0, length, torch.nan)
        self.times.append(moment.tokens)
        for name, item in {"cosine": cosine, "error": error, "chance": chance}.items():
            self.found[name].append(torch.where(present, item, torch.nan).transpose(1, 2))

    def result(self) -> Recall:
        """All that was noted."""
        columns = {name: torch.stack(items, 2).cpu() for name, items in self.found.items()}
        return Recall(torch.tensor(self.times), **columns)

    def _present(self, tokens: int) -> Tensor:
        """Which tokens are in the memory's past after so many, `[B, T, H]`."""
        place = torch.arange(self.keys.shape[1], device=self.keys.device)
        if tokens == 0:
            return torch.zeros_like(self.written)
        same = self.document == self.document[:, tokens - 1 : tokens]
        return self.written & (same & (place < tokens)).unsqueeze(-1)


def answered(config: MemoryConfig, state: MemoryState, phi: Tensor) -> Tensor:
    """A state's answers `[B, T, H, V]` to features `[B, T, H, P]`, without query_scale."""
    batch, _, heads, _ = phi.shape
    asked = phi.transpose(1, 2).flatten(0, 1)
    memory = tuple(weight.flatten(0, 1) for weight in memory_weights(config, state).values())
    y = predict(config, memory, asked, run=execute, label="")
    if state.normalizer is not None:
        count = tuple(weight.flatten(0, 1) for weight in state.normalizer.memory.values())
        z = predict(config.counting, count, asked, run=execute, label="")
        y = y / torch.where(z > 0, z, 1.0)
    return y.unflatten(0, (batch, heads)).transpose(1, 2)


def _unit(x: Tensor) -> Tensor:
    length = x.norm(dim=-1, keepdim=True)
    return x / torch.where(length > 0, length, 1.0)
