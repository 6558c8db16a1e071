"""Tasks of the gym: streams of keys and values, whose rows only depend on (seed, index), and scores that are known by
formulas."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self, cast

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from hecate.checks import Size, check_room, described
from hecate.errors import ConfigError, ShapeError
from hecate.gym.contenders import Contender, Memory, Setting
from hecate.variant import Conflicts, Variant

Array = NDArray[np.float64]
Metric = Literal["error", "accuracy"]
Rows = Annotated[Size, Field(ge=1, description="Rows of a seed, whose scores are averaged.")]
Length = Annotated[Size, Field(le=1 << 20, description="Tokens of a row.")]


class Stream(NamedTuple):
    """Tokens of B rows: for each token the memory is asked for the value of its key, then the pair may be written.

    Fields:
        keys, values: `[B, T, D]` and `[B, T, V]`; the value is written, and is the right answer.
        written: bool `[T]`; where False the key is asked and nothing is written.
        parts: masks of scored answers, bool `[T]`, by name; the first is the score, others are reported beside it.
        candidates: `[B, N, V]`; the one nearest to an answer is its choice. None if the error is measured.
        floor: the smallest relative error that is possible; 0 without noise.
    """

    keys: Tensor
    values: Tensor
    written: Tensor
    parts: dict[str, Tensor]
    candidates: Tensor | None = None
    floor: float = 0.0

    def scores(self, answers: Tensor, part: str) -> Tensor:
        """Score `[B]` of each row in a part: the sum of |answer - value|^2 over that of |value|^2, or the share of
        answers whose nearest candidate is the value. [GYM-SCORE-D1]"""
        chosen = self.parts[part]
        scored, right = answers[:, chosen].double(), self.values[:, chosen].double()
        if self.candidates is None:
            return (scored - right).square().sum((1, 2)) / right.square().sum((1, 2))
        among = self.candidates.double()
        return (torch.cdist(scored, among).argmin(-1) == torch.cdist(right, among).argmin(-1)).double().mean(1)

    def head(self, count: int) -> tuple[Tensor, Tensor]:
        """Keys and values of the first tokens of two rows."""
        return self.keys[:2, :count], self.values[:2, :count]


class Row(NamedTuple):
    """One row of a stream: keys `[T, D]`, values `[T, V]`, candidates `[N, V]`, and the noise in the values."""

    keys: Array
    values: Array
    candidates: Array | None = None
    noise: Array | None = None


class GymTask(Variant, family="gym_task"):
    """A task of the gym: `row` draws a row, `layout` says which tokens are written and which answers are scored."""

    rows: Rows = 8
    width: Size = Field(16, ge=4, le=1024, description="Width of keys and of values.")

    metric: ClassVar[Metric] = "error"
    about: ClassVar[str] = ""

    def row(self, rng: np.random.Generator) -> Row:
        """One row, drawn from `rng` alone."""
        raise NotImplementedError(f"{type(self).__name__} does not define row")

    def layout(self) -> tuple[Tensor, dict[str, Tensor]]:
        """`Stream.written` and `Stream.parts`."""
        raise NotImplementedError(f"{type(self).__name__} does not define layout")

    def chance(self) -> float:
        """The score without a memory: answering zero has a relative error of exactly 1. [GYM-SCORE-D1]"""
        return 1.0

    def known(self) -> dict[str, float]:
        """Scores that are known by a formula, by name, besides that of chance."""
        return {}

    def quick(self) -> Self:
        """A small version of the task, for a first look."""
        return self.model_copy(update={"rows": 2})

    def refuses(self, contender: Contender) -> str:
        """Reason why the contender cannot enter; empty if it can."""
        return "" if contender.build else "it has no memory that runs untrained, one pair a token"

    def settings(self, contender: Contender) -> Sequence[Setting]:
        """Settings of the contender, of which one is chosen on another seed; the default is first."""
        return contender.settings

    def memory(self, contender: Contender, setting: Setting, seed: int) -> Memory:
        """The contender's memory for this task."""
        build: Any = contender.build
        return cast(Memory, build(setting, seed))

    def stream(self, seed: int) -> Stream:
        """The stream with the rows of a seed. [GYM-ROW-D1]"""
        name = int.from_bytes(hashlib.sha256(self.kind.encode()).digest()[:4])

        def drawn(index: int) -> Row:
            return self.row(np.random.Generator(np.random.PCG64(np.random.SeedSequence((name, seed, index)))))

        needed = self.rows * sum(part.nbytes for part in drawn(0) if part is not None)
        check_room(needed, f"rows: {self.rows:,} of task {self.kind!r}", "lower rows, or what makes one long")
        rows = [drawn(index) for index in range(self.rows)]

        def stack(*arrays: Array) -> Tensor:
            return torch.from_numpy(np.stack(arrays).astype(np.float32))

        candidates = [row.candidates for row in rows if row.candidates is not None]
        written, parts = self.layout()
        self._check(rows, written, parts)
        scored = next(iter(parts.values())).numpy()
        noisy = [
            (row.noise[scored] ** 2).sum() / (row.values[scored] ** 2).sum() for row in rows if row.noise is not None
        ]
        return Stream(
            stack(*(row.keys for row in rows)), stack(*(row.values for row in rows)), written, parts,
            stack(*candidates) if candidates else None, float(sum(noisy)) / len(rows),
        )  # fmt: skip

    def _check(self, rows: Sequence[Row], written: Tensor, parts: Mapping[str, Tensor]) -> None:
        """Refuses rows of different shapes, and a layout that does not fit them."""
        length, who = len(rows[0].keys), f"task {self.kind!r}:"
        for row in rows:
            wanted = rows[0].keys.shape, (length, rows[0].values.shape[-1])
            if (row.keys.shape, row.values.shape) != wanted or row.keys.ndim != 2:
                shapes = list(row.keys.shape), list(row.values.shape)
                raise ShapeError(f"{who} keys [T, D] and values [T, V] must be alike in all rows, got {shapes}")
            if (row.candidates is not None) != (self.metric == "accuracy"):
                raise ConfigError(f"{who} metric {self.metric!r}: candidates are for an accuracy, and no error has any")
            if not (np.isfinite(row.keys).all() and np.isfinite(row.values).all()):
                raise ConfigError(f"{who} keys and values must be finite")
        for name, mask in {"written": written, **parts}.items():
            if mask.dtype != torch.bool or mask.shape != (length,):
                raise ShapeError(f"{who} layout must give {name!r} as bool [{length}], got {described(mask)}")
        for name, mask in parts.items():
            if not all((row.values[mask.numpy()] ** 2).sum() > 0 for row in rows):
                raise ConfigError(f"{who} part {name!r} has no token, or values of zero alone, and no score")
        if not parts:
            raise ConfigError(f"{who} layout names no part, and nothing is scored")


def _units(rng: np.random.Generator, *shape: int) -> Array:
    drawn = rng.standard_normal(shape)
    return np.asarray(drawn / np.linalg.norm(drawn, axis=-1, keepdims=True))


def _orthonormal(rng: np.random.Generator, width: int, count: int) -> Array:
    """Orthonormal rows `[count, width]` with a uniformly distributed span."""
    return np.asarray(np.linalg.qr(rng.standard_normal((width, count)))[0].T)


def _scale_to(values: Array, share: float = 1.0) -> Array:
    """Values scaled to a mean squared length of `share`."""
    return np.asarray(values * math.sqrt(share / (values**2).sum(-1).mean()))


def _span(length: int, start: int, end: int) -> Tensor:
    mask = torch.zeros(length, dtype=torch.bool)
    mask[start:end] = True
    return mask


class _Predicted(GymTask):
    """Helper for streams in which every token is predicted and written: one map from keys to values, or several."""

    length: Annotated[Length, Field(ge=64)] = 8192

    def layout(self) -> tuple[Tensor, dict[str, Tensor]]:
        half = self.length // 2
        parts = {"second half": _span(self.length, half, self.length), "first half": _span(self.length, 0, half)}
        return torch.ones(self.length, dtype=torch.bool), parts

    def quick(self) -> Self:
        return self.model_copy(update={"rows": 2, "length": max(64, self.length // 8)})


def _mean_error(width: int, start: int, end: int) -> float:
    """Mean of (1 - 1/D)^t over tokens: the share of an error that the delta rule with lr 1 leaves, for random keys."""
    rate = 1 - 1 / width
    return (rate**start - rate**end) * width / (end - start)


class LinearMap(_Predicted):
    r"""linear: v = A k, A a matrix of N(0, 1) for each row, k uniform on the unit sphere; scored from token D to 4 D.

    It measures how fast a memory learns: recursive least squares knows A after D tokens, and the delta rule with lr 1
    has a mean error of exactly (1 - 1/D)^t after t tokens (Strohmer and Vershynin, 2009, with equality for isotropic
    keys).

    Formula: $v_t = A k_t, \quad A_{ij} \sim N(0, 1)$

    Origin: in-context linear regression (Garg et al., 2022, arXiv 2208.01066), predicted before it is written.
    [GYM-MAP-D1]
    """

    kind: Literal["linear"] = "linear"
    length: Annotated[Length, Field(ge=16)] = 64
    rows: Rows = 32
    about: ClassVar[str] = "a linear map, learned fast: tokens D to 4 D"

    def conflicts(self) -> Conflicts:
        if self.length < 2 * self.width:
            yield ("length",), f"length={self.length} ends before width={self.width} keys are learned; give twice that"

    def row(self, rng: np.random.Generator) -> Row:
        keys = _units(rng, self.length, self.width)
        return Row(keys, keys @ rng.standard_normal((self.width, self.width)))

    def layout(self) -> tuple[Tensor, dict[str, Tensor]]:
        start, end = self.width, min(4 * self.width, self.length)
        return torch.ones(self.length, dtype=torch.bool), {"D to 4 D": _span(self.length, start, end)}

    def known(self) -> dict[str, float]:
        """Errors of the delta rule with lr 1, and of least squares."""
        end = min(4 * self.width, self.length)
        return {"delta rule, lr 1": _mean_error(self.width, self.width, end), "least squares": 0.0}


class NoisyMap(_Predicted):
    r"""noisy: v = A k + e, e of N(0, s^2) with a share `noise` of |v|^2; the error is that of the noisy value.

    No memory can have an error below the share of noise, which is known exactly for each stream. The error of the delta
    rule with a constant lr converges to noise (1 + lr / (2 - lr)), where contraction and noise balance.

    Formula: $v_t = A k_t + e_t, \quad e_t \sim N(0, s^2 I)$

    Origin: misadjustment of normalised LMS (Widrow and Stearns, 1985). [GYM-MAP-D1]
    """

    kind: Literal["noisy"] = "noisy"
    length: Annotated[Length, Field(ge=64)] = 1024
    noise: float = Field(0.2, gt=0, lt=1, description="Share of the values' energy that is noise.")
    about: ClassVar[str] = "a linear map, noise in the values"

    def row(self, rng: np.random.Generator) -> Row:
        keys = _units(rng, self.length, self.width)
        clean = _scale_to(keys @ rng.standard_normal((self.width, self.width)), 1 - self.noise)
        noise = rng.standard_normal(clean.shape) * math.sqrt(self.noise / self.width)
        return Row(keys, clean + noise, noise=noise)

    def known(self) -> dict[str, float]:
        """The smallest possible error, and the limit of the delta rule with lr 1."""
        return {"floor": self.noise, "delta rule, lr 1": 2 * self.noise}


class Outliers(_Predicted):
    r"""outliers: v = A k, but every tenth value is wrong, `times` as long and in a random direction; scored on the
    right ones.

    With a squared error a wrong value moves a memory in proportion to its error; with a bias of bounded gradient it
    does not. The error of the delta rule with lr 1 converges to (1 + times^2) (1 - a^9) / (9 (1 - a^10)), a = 1 - 1/D.

    Formula: $v_t = A k_t, \quad v_{10 i + 9} = s n_i, \quad |n_i| = 1$

    Origin: gross errors (Huber, Robust estimation of a location parameter, 1964). [GYM-MAP-D1]
    """

    kind: Literal["outliers"] = "outliers"
    length: Annotated[Length, Field(ge=64)] = 1024
    times: float = Field(3.0, gt=0, le=1e6, description="Length of a wrong value, of right ones' root mean square.")
    about: ClassVar[str] = "a linear map, every tenth value wrong"

    def row(self, rng: np.random.Generator) -> Row:
        keys = _units(rng, self.length, self.width)
        values = _scale_to(keys @ rng.standard_normal((self.width, self.width)))
        values[9::10] = self.times * _units(rng, *values[9::10].shape)
        return Row(keys, values)

    def layout(self) -> tuple[Tensor, dict[str, Tensor]]:
        written, parts = super().layout()
        right = torch.arange(self.length) % 10 != 9
        return written, {f"right ones of the {name}": part & right for name, part in parts.items()}

    def known(self) -> dict[str, float]:
        """The limit of the delta rule with lr 1."""
        rate = 1 - 1 / self.width
        return {"delta rule, lr 1": (1 + self.times**2) * (1 - rate**9) / (9 * (1 - rate**10))}


class _Teacher(_Predicted):
    """Helper for values V f(W k), with W two orthonormal directions times `scale`."""

    rows: Rows = 4

    scale: float = Field(9.0, gt=0, description="Length of the two directions that the teacher looks along.")

    def taught(self, rng: np.random.Generator, keys: Array, share: float = 1.0) -> Array:
        """Values of the teacher, `[T, V]`."""
        features = self.bent(keys @ (self.scale * _orthonormal(rng, self.width, 2)).T)
        return _scale_to(features @ rng.standard_normal((2, self.width)), share)

    def bent(self, projections: Array) -> Array:
        """f of the projections W k `[T, 2]`."""
        return np.tanh(projections)

    def row(self, rng: np.random.Generator) -> Row:
        keys = _units(rng, self.length, self.width)
        return Row(keys, self.taught(rng, keys))

    def known(self) -> dict[str, float]:
        """Error of the best linear map, which treats each direction separately: 1 - E[u f]^2 / (E[u^2] E[f^2]), with
        u / scale a coordinate of the unit sphere, of density (1 - u^2)^((D - 3) / 2)."""
        at, weight = np.polynomial.legendre.leggauss(400)
        weight = weight * (1 - at**2) ** ((self.width - 3) / 2)
        bent = self.bent(self.scale * at[:, None])[:, 0]
        bent = bent - (weight * bent).sum() / weight.sum()
        error = 1 - (weight * at * bent).sum() ** 2 / (weight * at**2).sum() / (weight * bent**2).sum()
        return {"best linear map": float(error)}


class OddTeacher(_Teacher):
    r"""odd: v = V tanh(s W k), W two orthonormal directions of the key, V of N(0, 1), scaled to a mean |v|^2 of 1.

    To do better than the best linear map, whose error is an integral, a memory has to find two directions among D.

    Formula: $v_t = V \tanh(s W k_t), \quad W W^\top = I$

    Origin: teacher and student networks (Saad and Solla, 1995), in context. [GYM-MAP-D1]
    """

    kind: Literal["odd"] = "odd"
    about: ClassVar[str] = "a nonlinear map, V tanh(W k)"


class EvenTeacher(_Teacher):
    r"""even: v = V (|s W k| - E|s W k|), as `odd` with an even function: no linear map does better than zero.

    Formula: $v_t = V (\vert s W k_t \vert - E \vert s W k_t \vert)$

    Origin: teacher and student networks (Saad and Solla, 1995), in context. [GYM-MAP-D1]
    """

    kind: Literal["even"] = "even"
    about: ClassVar[str] = "a nonlinear map, V |W k|"

    def bent(self, projections: Array) -> Array:
        half = math.lgamma(self.width / 2) - math.lgamma((self.width + 1) / 2)  # E|u| of a coordinate of the sphere
        return np.asarray(np.abs(projections) - self.scale * math.exp(half) / math.sqrt(math.pi))


class Recall(GymTask):
    r"""recall: `pairs` random unit keys and values, each written once, then all asked; the nearest value counts.

    With more pairs than the width of keys, no linear memory of the keys themselves can hold all of them.

    Formula: $\frac{1}{S} \sum_i [\arg\min_j \Vert M(k_i) - v_j \Vert = i]$

    Origin: capacity of fast weight programmers (Schlag, Irie and Schmidhuber, 2021, arXiv 2102.11174). [GYM-RECALL-D1]
    """

    kind: Literal["recall"] = "recall"
    pairs: Size = Field(64, ge=2, le=1 << 14, description="Pairs that are written.")
    metric: ClassVar[Metric] = "accuracy"
    about: ClassVar[str] = "64 pairs of width 16, written once"

    def row(self, rng: np.random.Generator) -> Row:
        keys, values = _units(rng, 2, self.pairs, self.width)
        return Row(np.tile(keys, (2, 1)), np.tile(values, (2, 1)), values)

    def layout(self) -> tuple[Tensor, dict[str, Tensor]]:
        asked = _span(2 * self.pairs, self.pairs, 2 * self.pairs)
        return ~asked, {"all pairs": asked}

    def chance(self) -> float:
        """Accuracy of guessing one of the values."""
        return 1 / self.pairs


class Overwrite(GymTask):
    r"""overwrite: `keys` unit keys, each written `times` times in random order with new values; the latest counts.

    The nearest of all values counts. A sum of everything written is right with probability 1/`times`.

    Formula: $\frac{1}{S} \sum_i [\arg\min_j \Vert M(k_i) - v_j \Vert = \mathrm{last}(i)]$

    Origin: the second setting of Schlag, Irie and Schmidhuber (2021, arXiv 2102.11174). [GYM-RECALL-D1]
    """

    kind: Literal["overwrite"] = "overwrite"
    rows: Rows = 16
    keys: Size = Field(8, ge=1, le=1 << 12, description="Different keys.")
    times: Size = Field(16, ge=2, le=1 << 12, description="Values that each key gets, one after the other.")
    metric: ClassVar[Metric] = "accuracy"
    about: ClassVar[str] = "8 keys, each written 16 times with new values"

    def row(self, rng: np.random.Generator) -> Row:
        keys = _units(rng, self.keys, self.width)
        order = rng.permutation(np.repeat(np.arange(self.keys), self.times))
        values = _units(rng, len(order), self.width)
        last = [int(np.flatnonzero(order == key)[-1]) for key in range(self.keys)]
        return Row(np.concatenate([keys[order], keys]), np.concatenate([values, values[last]]), values)

    def layout(self) -> tuple[Tensor, dict[str, Tensor]]:
        written = self.keys * self.times
        asked = _span(written + self.keys, written, written + self.keys)
        return ~asked, {"all keys": asked}

    def chance(self) -> float:
        """Accuracy of guessing one of all values."""
        return 1 / (self.keys * self.times)

    def known(self) -> dict[str, float]:
        """Accuracy of guessing a value of the right key."""
        return {"any value of the key": 1 / self.times}


class TwoPaces(_Teacher):
    r"""two_paces: a fixed teacher V tanh(s W k), with a share `1 - fast` of |v|^2, plus U k, with U drawn anew every
    `period` tokens.

    A memory that only knows the teacher has an error of `fast`.

    Formula: $v_t = V \tanh(s W k_t) + U_{\lfloor t / \mathrm{period} \rfloor} k_t$

    Origin: levels of several frequencies (Nested Learning, Behrouz et al., 2025, arXiv 2512.24695). [GYM-CHANGE-D1]
    """

    kind: Literal["two_paces"] = "two_paces"
    period: Size = Field(256, ge=1, description="Tokens after which the matrix is drawn anew.")
    fast: float = Field(0.3, gt=0, lt=1, description="Share of the values' energy that the matrix has.")
    about: ClassVar[str] = "a slow nonlinear map and a matrix drawn anew every 256 tokens"

    def row(self, rng: np.random.Generator) -> Row:
        keys = _units(rng, self.length, self.width)
        slow = self.taught(rng, keys, 1 - self.fast)
        count = -(-self.length // self.period)
        maps = rng.standard_normal((count, self.width, self.width))[np.arange(self.length) // self.period]
        return Row(keys, slow + _scale_to(np.einsum("td,tdv->tv", keys, maps), self.fast))

    def known(self) -> dict[str, float]:
        """Error with the teacher known and the matrix unknown."""
        return {"the teacher alone": self.fast}


class Return(GymTask):
    r"""return: a matrix A for `phase` tokens, another, B, for as many, then A again; scored on the first `scored`
    tokens of its return.

    A memory that holds B starts at an error of 2, an empty one at 1; the delta rule with lr 1 has 2 (1 - 1/D)^t.

    Formula: $v_t = A k_t, \quad v_t = B k_t, \quad v_t = A k_t$

    Origin: savings in relearning (Ebbinghaus, 1885), as a test of levels. [GYM-CHANGE-D1]
    """

    kind: Literal["return"] = "return"
    phase: Size = Field(512, ge=1, le=1 << 18, description="Tokens of a phase; the return has `scored` of them.")
    scored: Size = Field(64, ge=1, le=1 << 18, description="Tokens of the return, all scored.")
    about: ClassVar[str] = "a matrix A, then B, then A again: the first 64 tokens after A returns"

    def row(self, rng: np.random.Generator) -> Row:
        first, second = rng.standard_normal((2, self.width, self.width))
        keys = _units(rng, 2 * self.phase + self.scored, self.width)
        phases = np.concatenate([keys[: self.phase] @ first, keys[self.phase : 2 * self.phase] @ second])
        return Row(keys, np.concatenate([phases, keys[2 * self.phase :] @ first]))

    def layout(self) -> tuple[Tensor, dict[str, Tensor]]:
        total = 2 * self.phase + self.scored
        return torch.ones(total, dtype=torch.bool), {"the return": _span(total, 2 * self.phase, total)}

    def known(self) -> dict[str, float]:
        """Errors of the delta rule with lr 1, starting from B and starting empty."""
        anew = _mean_error(self.width, 0, self.scored)
        return {"delta rule, lr 1": 2 * anew, "delta rule, lr 1, started anew": anew}


class Facts(GymTask):
    r"""facts: D/2 facts written once, then noise; after each number of tokens in `distances`, every fact is asked.

    Keys of facts and of noise are in two orthogonal halves of the space, except for an `overlap`: the projection of a
    noise key on the half of the facts has that length. Values are unit vectors; the nearest of the facts' counts.

    Formula: $\frac{1}{S} \sum_i [\arg\min_j \Vert M_{t + \mathrm{distance}}(k_i) - v_j \Vert = i]$

    Origin: long-range recall as of needles in text (Hsieh et al., 2024, arXiv 2404.06654), on streams. [GYM-RECALL-D1]
    """

    kind: Literal["facts"] = "facts"
    rows: Rows = 2
    distances: tuple[Size, ...] = Field(
        (100, 1_000, 10_000, 100_000), min_length=1, description="Tokens of noise before each round of questions."
    )
    overlap: float = Field(0.02, ge=0, lt=1, description="Length of the part of a noise key among those of facts.")
    metric: ClassVar[Metric] = "accuracy"
    about: ClassVar[str] = "8 facts written once, asked after 100 to 100,000 tokens of noise"

    def conflicts(self) -> Conflicts:
        if list(self.distances) != sorted(set(self.distances)):
            yield ("distances",), f"must rise, got {list(self.distances)}"

    def row(self, rng: np.random.Generator) -> Row:
        count, total = self.width // 2, self.distances[-1]
        turn = _orthonormal(rng, self.width, self.width)
        keys, values = _units(rng, count, count) @ turn[:count], _units(rng, count, self.width)
        among = self.overlap * _units(rng, total, count)
        beside = math.sqrt(1 - self.overlap**2) * _units(rng, total, self.width - count)
        noise, said = np.concatenate([among, beside], 1) @ turn, _units(rng, total, self.width)
        parts = [(keys, values)]
        for start, end in zip((0, *self.distances), self.distances, strict=False):
            parts += [(noise[start:end], said[start:end]), (keys, values)]
        tokens, answers = (np.concatenate(pieces) for pieces in zip(*parts, strict=True))
        return Row(tokens, answers, values)

    def layout(self) -> tuple[Tensor, dict[str, Tensor]]:
        count = self.width // 2
        total = self.distances[-1] + count * (len(self.distances) + 1)
        at = {far: far + count * (place + 1) for place, far in enumerate(self.distances)}
        parts = {f"after {far:,}": _span(total, start, start + count) for far, start in at.items()}
        asked = torch.stack(list(parts.values())).any(0)
        return ~asked, {"all distances": asked, **parts}

    def chance(self) -> float:
        """Accuracy of guessing one of the facts' values."""
        return 1 / (self.width // 2)

    def quick(self) -> Self:
        return self.model_copy(update={"distances": (10, 100, 1_000)})


def tasks() -> Mapping[str, type[GymTask]]:
    """Every task by name, including a user's own."""
    return GymTask.variants()
