"""View of a memory in the microscope: its attention map; and its norms, ranks, gates and recall over time.

The map is the attention that a memory computes implicitly. If every step is linear in the values, the answer is
y_t = sum_s A[t, s] v_s + a part due to the initial state, with A determined by queries, keys and gates. A is found by
scans of one-hot values and of zero values, with the rule's own engine and conventions.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cached_property
from itertools import chain, count, pairwise
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import normalize
from torch.utils import _pytree as pytree

from hecate.cms.health import Strength, write_strength
from hecate.engine import Inputs, check_params, complete, numbered, predict, to_tokens
from hecate.errors import ConfigError, ShapeError, not_known
from hecate.figure import images_of, write_images
from hecate.microscope.draw import draw_memory
from hecate.nn.rule import ScanArguments
from hecate.rule import MemoryConfig, MemoryState, memory_weights
from hecate.tape import execute

Tree = TypeVar("Tree")
# Tolerance for rounding in float64, allowing for the condition number of a usable memory.
AGREES = 1e-6


class Attention(NamedTuple):
    """y = A v + start, exactly. [SCOPE-ATT-D1]

    Fields:
        map: A `[B, H, T, S]`, or `[B, H, T, S, V]` for a diagonal memory, which has a map for each
            coordinate. Rows are reading tokens, columns written tokens.
        start: contribution of the state before the first token to every answer, `[B, H, T, V]`.
    """

    map: Tensor
    start: Tensor

    def applied(self, v: Tensor) -> Tensor:
        """The memory's answers `[B, T, H, V]` to values `[B, T, H, V]`."""
        ends = "bhtsv" if self.map.dim() == 5 else "bhts"
        y = torch.einsum(f"{ends},bshv->bhtv", self.map, v.to(self.map.dtype)) + self.start
        return y.transpose(1, 2)


def nonlinearity(config: MemoryConfig) -> str | None:
    """A sentence on the setting whose declared traits make answers non-linear in values; None if there is none."""
    structure, bias, retention, algorithm = (config.structure, config.bias, config.retention, config.algorithm)
    if not structure.weighted_sum:
        return f"structure {structure.kind!r} is not linear in the weights that hold values"
    if not bias.linear:
        return f"bias {bias.kind!r} has a gradient that is not linear in prediction and value"
    if not retention.weighted_sum:
        return f"retention {retention.kind!r} does not keep a weighted sum of what was written"
    if not algorithm.weighted_sum:
        return f"algorithm {algorithm.kind!r} takes steps that are not linear in gradients"
    return None


def implicit_attention(asked: ScanArguments) -> Attention:
    """The attention map of a scan, and the contribution of its start.

    Cost: a scan of ceil(T / V) + 1 times as many sequences; for a diagonal memory of T + 1 times as many.

    Raises:
        ConfigError: a rule that is not linear in its values, naming the setting at fault; or one
            that wrongly declares to be.
    """
    reason = nonlinearity(asked.config)
    if reason is not None:
        cure = "norms, ranks, gates and recall do not need one"
        raise ConfigError(f"there is no attention map: {reason}, so the answers are no weighted sum of values; {cure}")
    asked = in_double(asked)
    batch, length, heads, width = asked.v.shape
    # Copy n of the sequences has ones in the values of tokens n * stride, n * stride + 1, ..., each in a different
    # coordinate, or in all of them if coordinates do not mix; the last copy has only zeros.
    diagonal = asked.config.structure.diagonal
    stride = 1 if diagonal else width
    copies = -(-length // stride)
    ones = torch.eye(copies * stride, dtype=asked.v.dtype, device=asked.v.device)[:, :length]
    values = torch.cat([ones.unflatten(0, (copies, stride)).mT, ones.new_zeros(1, length, stride)])
    values = values[:, None, :, None].expand(-1, batch, -1, heads, width).flatten(0, 1)
    y, _ = asked.repeat(copies + 1)._replace(v=values).scan()
    y = y.unflatten(0, (copies + 1, batch)).transpose(2, 3)
    weights, start = y[:-1] - y[-1], y[-1]
    weights = weights.movedim(0, 3) if diagonal else weights.movedim(0, 3).flatten(3)[..., :length]
    # Weights that are 0 up to rounding, such as those of later tokens, are set to 0.
    noise = 16 * torch.finfo(y.dtype).eps * start.flatten(2).norm(dim=2)
    weights = torch.where(weights.abs() > noise.reshape(batch, heads, *[1] * (weights.dim() - 2)), weights, 0.0)
    attention = Attention(weights, start)
    if length:
        _check(asked, attention)
    return attention


def _check(asked: ScanArguments, attention: Attention) -> None:
    """Refuses a map for which A v + start differs from the token loop, as with a wrong declaration."""
    answers, _ = asked.scan(engine="sequential")
    v = asked.v
    if asked.write_mask is not None:  # values of tokens that are not written are arbitrary
        v = torch.where(asked.write_mask[..., None, None], v, 0.0)
    summed = attention.applied(v)
    scale = max(float(answers.abs().max()), 1e-300)
    if not float((summed - answers).abs().max()) <= AGREES * scale:
        raise ConfigError(
            "the rule says that it is linear in its values, but a sum over one-hot values differs from its answers; a "
            "knob declares `linear` or `weighted_sum` wrongly, or on_nonfinite='skip' has left tokens out"
        )


def in_double(tree: Tree) -> Tree:
    """A pytree with its floating-point tensors in float64, detached."""
    return pytree.tree_map_only(Tensor, lambda x: (x.double() if x.is_floating_point() else x).detach(), tree)


class Recall(NamedTuple):
    """Answers to phi(k_s) after t tokens, compared with v_s; NaN if the memory does not contain s:
    a later token, masked, not fired, or of an earlier document. [SCOPE-RECALL-D1]

    Fields:
        times: number of tokens read at each of N moments, `[N]`; the age of s is t - 1 - s.
        cosine: cosine between the answer and v_s, `[B, H, N, T]`.
        error: |answer - v_s| / |v_s|, `[B, H, N, T]`; also NaN if v_s is 0.
        chance: mean cosine between the answer and the values of other tokens, `[B, H, N, T]`.
    """

    times: Tensor
    cosine: Tensor
    error: Tensor
    chance: Tensor

    def known(self, row: int = 0) -> bool:
        """True if a sequence wrote anything to recall; heads that never fire have nothing."""
        return not bool(self.cosine[row].isnan().all())

    def by_age(self, name: str = "cosine", row: int = 0) -> AgeCurve:
        """`cosine`, `error` or `chance` by age, in bins 0, 1, 2-3, 4-7, ..., over all moments of a sequence."""
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
    """Means by age: the mean age of each bin in tokens `[A]`, and the mean per head `[H, A]`, NaN for a head that wrote
    no token of that age."""

    ages: Tensor
    means: Tensor


class MemoryView:
    """Analysis of one memory on B sequences of T tokens; everything in float64. [SCOPE-VIEW-D1]

    Args:
        name: name of the memory in its model.
        scans: arguments of its scans; more than one if its state was replaced in between.
        points: largest number of moments at which its state is analysed, besides the start.
        unread: reason why its answers to q are not used; None if they are.
    """

    def __init__(self, name: str, scans: list[ScanArguments], points: int = 64, *, unread: str | None = None) -> None:
        self.name, self.scans, self.points, self.unread = name, scans, points, unread

    @property
    def config(self) -> MemoryConfig:
        """The memory's rule."""
        return self.scans[0].config

    @property
    def length(self) -> int:
        """Number of tokens T."""
        return sum(asked.v.shape[1] for asked in self.scans)

    @property
    def heads(self) -> int:
        """Number of heads H."""
        return self.scans[0].v.shape[2]

    @property
    def refusal(self) -> str | None:
        """Reason why there is no attention map; None if there is one."""
        return self.unread or nonlinearity(self.config)

    @property
    def unasked(self) -> str | None:
        """Reason why there is no recall; None if there is."""
        readout = self.config.readout
        return None if readout.plain else f"readout {readout.kind!r} asks the memory other than by phi"

    @cached_property
    @torch.no_grad()
    def attention(self) -> Attention:
        """The implicit attention map; if the state was replaced, the tokens before contribute to `start`.

        Raises:
            ConfigError: a rule that is not linear in its values, naming the setting at fault.
        """
        if self.unread is not None:
            raise ConfigError(f"{self.name} has no attention map: {self.unread}")
        maps = [implicit_attention(asked) for asked in self.scans]
        shape = list(maps[0].map.shape)
        shape[2] = shape[3] = self.length
        whole, at = maps[0].map.new_zeros(shape), 0
        for item in maps:
            end = at + item.map.shape[2]
            whole[:, :, at:end, at:end] = item.map
            at = end
        return Attention(whole, torch.cat([item.start for item in maps], 2))

    @cached_property
    @torch.no_grad()
    def answers(self) -> Tensor:
        """The memory's answers to q, `[B, T, H, V]`."""
        return torch.cat([asked.scan()[0] for asked in self.scans], 1)

    @cached_property
    def gates(self) -> dict[str, Tensor]:
        """lr, retain and momentum, those that the rule has, with defaults filled in, `[B, T, H]`; retain per channel is
        `[B, T, H, P]`, lr per weight `[B, T, H, W]`."""
        rule, sequences = self.config, [_sequence(asked) for asked in self.scans]
        has = {"lr": True, "retain": rule.retention.uses_retain, "momentum": rule.algorithm.uses_momentum}
        return {name: torch.cat([getattr(item, name) for item in sequences], 1) for name, used in has.items() if used}

    @property
    def times(self) -> Tensor:
        """Number of tokens read at each of the N moments, from 0 to T."""
        return self._over_time[0]

    @property
    def recall(self) -> Recall:
        """Recall of written values, over time.

        Raises:
            ConfigError: a readout other than direct.
        """
        if self.unasked is not None:
            raise ConfigError(f"{self.name} has no recall: {self.unasked}")
        return Recall(self.times, **{name: item.cpu() for name, item in self._over_time[1].items()})

    @property
    def norms(self) -> dict[str, Tensor]:
        """Frobenius norm of each weight at each moment, `[B, H, N]`."""
        return self._over_time[2]

    @property
    def ranks(self) -> dict[str, Tensor]:
        """Effective rank of each weight that is a matrix at each moment, `[B, H, N]`. [SCOPE-RANK-D1]

        exp of the entropy of s / sum(s), s the singular values (Roy and Vetterli, The effective rank, 2007): between 1
        and the rank, which it equals if all non-zero s are equal; 0 for a matrix of zeros. A diagonal memory counts as
        the matrix with its weights on the diagonal.
        """
        return self._over_time[3]

    @cached_property
    def strength(self) -> Strength | None:
        """Effect of single writes in its longest scan, at once and 32 tokens later; None if no write can be followed
        that long. [NN-WRITE-D1]"""
        return write_strength(max(self.scans, key=lambda asked: asked.v.shape[1]))

    @cached_property
    @torch.no_grad()
    def _over_time(self) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
        """Moments, recall, norms and ranks, in one pass over the moments, so that no state is kept."""
        norms, ranks, times, recalled = [], [], [], []
        lr = self.gates["lr"]
        written = _Written(self.scans, lr > 0 if lr.dim() == 3 else (lr > 0).any(-1))
        for tokens, state in _moments(self.scans, self.points):
            weights = memory_weights(self.config, state)
            norms.append({name: weight.flatten(2).norm(dim=2) for name, weight in weights.items()})
            ranks.append(_ranks_of(weights, diagonal=self.config.structure.diagonal))
            recalled.append({} if self.unasked else written.recalled(tokens, state))
            times.append(tokens)
        return torch.tensor(times), _stack(recalled), _stack(norms), _stack(ranks)

    def draw(self, figure: Any = None, *, row: int = 0, heads: int = 4) -> Any:
        """Draws sequence `row`, with maps of at most `heads` heads; returns the matplotlib figure."""
        return draw_memory(self, figure, row=row, heads=heads)

    def save(self, path: Path | str, *, row: int = 0, heads: int = 4) -> Path:
        """Writes a PNG file, and an SVG file beside it, each atomically; returns the path of the PNG."""
        return write_images(Path(path), images_of(self.draw(row=row, heads=heads)))[0]


def _of_each(name: str) -> Any:
    """A property of a `View`: a mapping of each memory's property of that name."""
    return property(lambda view: {key: getattr(item, name) for key, item in view.items()}, doc=f"Each's `{name}`.")


class View(dict[str, MemoryView]):
    """The views of every memory of a model, by name; properties of memories are available as mappings."""

    def __missing__(self, name: str) -> NoReturn:
        raise ConfigError(f"no memory is called {name!r}{not_known(name, self)}")

    @property
    def attention(self) -> dict[str, Attention]:
        """The attention maps of the memories that have one."""
        return {name: item.attention for name, item in self.items() if item.refusal is None}

    @property
    def refusals(self) -> dict[str, str]:
        """Reasons why the other memories have none."""
        return {name: item.refusal for name, item in self.items() if item.refusal is not None}

    @property
    def recall(self) -> dict[str, Recall]:
        """Recall of those memories that are asked by phi."""
        return {name: item.recall for name, item in self.items() if item.unasked is None}

    gates: dict[str, dict[str, Tensor]] = _of_each("gates")
    norms: dict[str, dict[str, Tensor]] = _of_each("norms")
    ranks: dict[str, dict[str, Tensor]] = _of_each("ranks")
    strength: dict[str, Strength | None] = _of_each("strength")

    def save(self, folder: Path | str, *, row: int = 0, heads: int = 4) -> list[Path]:
        """Writes a PNG file per memory, `microscope-NAME.png`, and an SVG beside it; returns the paths of the PNGs."""
        folder, files = Path(folder), _file_names(list(self))
        folder.mkdir(parents=True, exist_ok=True)
        return [item.save(folder / files[name], row=row, heads=heads) for name, item in self.items()]


def _file_names(names: list[str]) -> dict[str, str]:
    """File names by memory; names that only differ in special characters are numbered."""
    file_names: dict[str, str] = {}
    for name in names:
        stem = "microscope-" + re.sub(r"[^A-Za-z0-9._-]+", "_", name)
        files = chain([f"{stem}.png"], (f"{stem}-{number}.png" for number in count(2)))
        file_names[name] = next(file for file in files if file not in file_names.values())
    return file_names


class _Written:
    """Keys and values of all scans, to query states with; `fired` `[B, T, H]` says which heads wrote a token."""

    def __init__(self, scans: list[ScanArguments], fired: Tensor) -> None:
        self.config = scans[0].config
        self.keys = torch.cat([_key_features(asked) for asked in scans], 1)
        self.values = torch.cat([asked.v for asked in scans], 1)
        self.document = joined_mask(scans, "reset_mask").cumsum(1)
        self.present = joined_mask(scans, "write_mask").unsqueeze(-1) & fired

    def recalled(self, tokens: int, state: MemoryState) -> dict[str, Tensor]:
        """Cosine, error and chance of a state's answers after this number of tokens, `[B, H, T]`; see `Recall`."""
        answers = answered(self.config, state, self.keys)
        v = torch.where(self.present[..., None], self.values, 0.0)
        unit, target = (normalize(x, dim=-1, eps=torch.finfo(x.dtype).tiny) for x in (answers, v))
        cosine = (unit * target).sum(-1)
        at = max(tokens, 1)
        same = self.document == self.document[:, at - 1 : at]
        place = torch.arange(self.keys.shape[1], device=self.keys.device)
        present = self.present & (same & (place < tokens)).unsqueeze(-1)
        shown = present.to(target.dtype)
        total = (target * shown[..., None]).sum(1, keepdim=True)
        others = (shown.sum(1, keepdim=True) - 1).clamp(min=1)
        chance = ((unit * total).sum(-1) - cosine) / others
        length = v.norm(dim=-1)  # a value of 0 has no relative error
        error = (answers - v).norm(dim=-1) / torch.where(length > 0, length, torch.nan)
        curves = {"cosine": cosine, "error": error, "chance": chance}
        return {name: torch.where(present, item, torch.nan).transpose(1, 2) for name, item in curves.items()}


def answered(config: MemoryConfig, state: MemoryState, phi: Tensor) -> Tensor:
    """A state's answers `[B, T, H, V]` to features `[B, T, H, P]`, without query_scale."""
    batch, _, heads, _ = phi.shape
    queries = phi.transpose(1, 2).flatten(0, 1)
    memory = tuple(weight.flatten(0, 1) for weight in memory_weights(config, state).values())
    y = predict(config, memory, queries)
    if state.normalizer is not None:
        count = tuple(weight.flatten(0, 1) for weight in state.normalizer.memory.values())
        z = predict(config.counting, count, queries)
        y = y / torch.where(z > 0, z, 1.0)
    return y.unflatten(0, (batch, heads)).transpose(1, 2)


def _moments(scans: list[ScanArguments], points: int) -> Iterator[tuple[int, MemoryState]]:
    """States before the first token and after at most `points` others, evenly spaced and including the last, each with
    the number of tokens read. Splitting a scan is exact, so the cuts change nothing."""
    length = sum(asked.v.shape[1] for asked in scans)
    cuts = {round(length * index / points) for index in range(1, points + 1)} - {0}
    yield 0, scans[0].between(0, 0, scans[0].state).scan()[1]
    begun = 0
    for asked in scans:
        tokens, state = asked.v.shape[1], asked.state
        for at, end in pairwise([0, *sorted(c - begun for c in cuts if 0 < c - begun < tokens), tokens]):
            _, state = asked.between(at, end, state).scan()
            if begun + end in cuts:
                yield begun + end, state
        begun += tokens


def _ranks_of(weights: dict[str, Tensor], *, diagonal: bool) -> dict[str, Tensor]:
    """Effective rank of each weight that is a matrix, `[B, H]`."""
    if diagonal:
        return {name: effective_rank(weight.abs()) for name, weight in weights.items()}
    matrices = {name: item for name, item in weights.items() if item.dim() == 4 and min(item.shape[2:]) > 1}
    return {name: effective_rank(torch.linalg.svdvals(item)) for name, item in matrices.items()}


def effective_rank(values: Tensor) -> Tensor:
    """exp of the entropy of the values along the last axis, as shares of their sum; 0 if all are zero."""
    total = values.sum(-1, keepdim=True)
    share = values / torch.where(total > 0, total, 1.0)
    return torch.where(total.squeeze(-1) > 0, torch.special.entr(share).sum(-1).exp(), 0.0)


def _key_features(asked: ScanArguments) -> Tensor:
    """phi(k) of every token, as the memory writes it, `[B, T, H, P]`."""
    params = check_params(asked.config.feature_map, asked.phi_params, asked.k)
    sequence, _ = numbered(asked.config, asked.state, _sequence(asked))
    return to_tokens(asked.config, sequence, params, asked.k.dtype, execute).phi_k


def _sequence(asked: ScanArguments) -> Inputs:
    masks = (asked.write_mask, asked.reset_mask, None)
    return complete(asked.config, asked.q, asked.k, asked.v, asked.gates, *masks, going_on=True)


def joined_mask(scans: list[ScanArguments], name: str) -> Tensor:
    """`write_mask` or `reset_mask` of consecutive calls, joined, `[B, T]`; None means all written, or none reset."""
    masks = ((getattr(asked, name), asked.v.new_full(asked.v.shape[:2], name == "write_mask")) for asked in scans)
    return torch.cat([default.bool() if mask is None else mask for mask, default in masks], 1)


def _stack(moments: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.stack([item[name] for item in moments], 2) for name in moments[0]}
