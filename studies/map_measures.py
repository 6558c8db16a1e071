"""What the study of feature maps measures: instances of every map, and each column of its table."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hecate import phi
from hecate.phi import FeatureMap
from studies.against_softmax import Tokens, correlation, features, normalised, output_error, parameters
from studies.timing import cpu_times

WIDTH, WIDE = 16, 64  # of inputs; of features, where they can be chosen
QUERIES, KEYS = 64, 256
LONG = 2.0  # scale of the entries of q and k in the harder half; 1 in the other
SPREADS = (0.1, 1.0, 10.0)  # of inputs, for stability
ROWS = 4  # at which the Jacobian is taken, for each of them
NOTHING = 1e-30  # a gradient at or below this counts as none
PRECISION = 1e-6  # singular values below this share of the largest do not count

MAPS: tuple[FeatureMap, ...] = (
    phi.Identity(), phi.Normalise(inner=phi.Identity()), phi.Tanh(),
    phi.ELU(), phi.ReLU(), phi.ReLU(shift=0.001), phi.LeakyReLU(), phi.SquaredReLU(),
    phi.LeakyReLUSquared(),
    phi.GELUShifted(), phi.Softplus(), phi.Sigmoid(), phi.Exp(),
    phi.Softmax(), phi.Softmax(half_space=True), phi.CReLU(), phi.CosFormer(max_length=KEYS),
    phi.DPFP(), phi.DPFP(nu=3),
    phi.Polynomial(degree=2), phi.Polynomial(degree=3), phi.Taylor(), phi.Rebased(),
    phi.Polysketch(sketch=8), phi.RandomMaclaurin(d_phi=WIDE),
    phi.RandomFourier(d_phi=WIDE), phi.RandomFourier(d_phi=WIDE, form="paired"),
    phi.SORF(d_phi=WIDE), phi.Nystrom(num_centres=WIDE, sigma=4.0),
    phi.Favor(num_features=WIDE), phi.Favor(num_features=4 * WIDE),
    phi.Favor(num_features=WIDE, norms="sqrt"),
    phi.Favor(num_features=WIDE, variant="hyperbolic"),
    phi.Favor(num_features=WIDE, variant="trigonometric"),
    phi.PerformerReLU(num_features=WIDE), phi.ArcCosine(num_features=WIDE, order=0),
    phi.ArcCosine(num_features=WIDE, order=2),
    phi.Linear(d_phi=WIDE), phi.MLP(d_hidden=WIDE), phi.T2R(d_phi=WIDE), phi.Hadamard(d_phi=WIDE),
    phi.GLU(d_hidden=WIDE), phi.Hedgehog(), phi.Hedgehog(joint=True), phi.SLAY(nodes=4, m=1),
    phi.OddLift(inner=phi.ELU()), phi.Concat(maps=(phi.ELU(), phi.Favor(num_features=WIDE))),
    phi.Compose(
        maps=(phi.Normalise(inner=phi.Identity()), phi.Favor(num_features=WIDE, scale="none"))
    ),
    phi.TensorProduct(maps=(phi.ELU(), phi.ELU())),
)  # fmt: skip


class Quality(NamedTuple):
    """Against softmax on one seed's tokens, the inputs of phi scaled by one number."""

    error: float  # of what is read; the plain mean of the values has 1
    correlation: float  # of kernel values with softmax weights


class Facts(NamedTuple):
    """What holds without softmax, on one seed's vectors."""

    size: float  # log10 of the largest |phi|^2
    steepest: float  # log10 of the largest singular value of the Jacobian
    flattest: float  # log10 of the smallest of the largest singular values
    lost32: float  # share of features that float32 makes 0 or infinite at spread 10
    lost16: float  # as many in bfloat16
    negative: float  # share of features below 0
    negative_kernel: float  # share of kernel values below 0
    zero_kernel: float  # share of kernel values that are exactly 0
    rank: int  # of KEYS random keys

    @property
    def floor(self) -> float:
        """Least mean loss 1/2 |v - M phi(k)|^2 of any M, for KEYS keys and one-hot values."""
        return (1 - self.rank / KEYS) / 2


class Measured(NamedTuple):
    """A map's row."""

    map_: FeatureMap
    facts: Facts
    as_is: Sequence[Quality]
    scales: tuple[float, float]  # best at length 1 and at LONG, on other seeds
    scaled: Sequence[Quality]
    long: Sequence[Quality]

    @property
    def error(self) -> float:
        """Mean error at the best scale."""
        return sum(q.error for q in self.scaled) / len(self.scaled)

    @property
    def kept(self) -> bool:
        """Whether the declared signs hold."""
        features = not self.map_.non_negative or self.facts.negative == 0
        return features and (not self.map_.kernel_non_negative or self.facts.negative_kernel == 0)


def title(map_: FeatureMap) -> str:
    """Kind and what is not at its default: `dpfp nu=3`."""
    fields = map_.model_dump(exclude={"kind"}, exclude_defaults=True)
    return " ".join([map_.kind, *(_field(name, value) for name, value in fields.items())])


def _field(name: str, value: Any) -> str:
    if isinstance(value, dict):
        return str(value["kind"])
    if isinstance(value, list | tuple):
        return "+".join(_field(name, item) for item in value)
    if isinstance(value, str):
        return value if name != "scale" else f"scale={value}"
    if isinstance(value, bool):
        return name
    short = {"num_features": "m", "d_phi": "m", "num_centres": "m", "max_length": "M"}
    return f"{short.get(name, name)}={value:g}"


def measure(map_: FeatureMap, seeds: Sequence[int], others: Sequence[int], scales: Sequence[float]) -> Measured:
    """All that stands in the table."""
    best = [best_scale(map_, others, scales, length) for length in (1.0, LONG)]
    as_is, scaled, long = (
        [quality(map_, seed, scale, length) for seed in seeds]
        for scale, length in ((1.0, 1.0), (best[0], 1.0), (best[1], LONG))
    )
    return Measured(map_, facts(map_, seeds[0]), as_is, (best[0], best[1]), scaled, long)


def quality(map_: FeatureMap, seed: int, scale: float, length: float) -> Quality:
    """Tokens of scale `length`, of which phi sees `scale` times as much."""
    tokens = Tokens.drawn(seed, WIDTH, QUERIES, KEYS, length)
    kernel = tokens.kernel(map_, parameters(map_, WIDTH, seed), scale)
    target = tokens.softmax()
    error = output_error(normalised(kernel), target, tokens.v)
    return Quality(error, correlation(kernel, target))


def best_scale(map_: FeatureMap, seeds: Sequence[int], scales: Sequence[float], length: float) -> float:
    """The scale with the smallest mean error on these seeds."""
    errors = [sum(quality(map_, seed, s, length).error for seed in seeds) for s in scales]
    return scales[errors.index(min(errors))]


def facts(map_: FeatureMap, seed: int) -> Facts:
    """Everything about the map alone."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(KEYS, WIDTH, generator=g, dtype=torch.float64)
    params = parameters(map_, WIDTH, seed)
    size = max(2 * log_norm(features(map_, params, s * x)) for s in SPREADS)
    slopes = torch.cat([slope(map_, s * x[:ROWS], seed) for s in SPREADS])
    keys = features(map_, params, x)
    kernel = keys[: KEYS // 2] @ keys[KEYS // 2 :].T
    values = torch.linalg.svdvals(keys)
    shares = [float(where.double().mean()) for where in (keys < 0, kernel < 0, kernel == 0)]
    return Facts(
        size,
        _log(float(slopes.max())),
        _log(float(slopes.min())),
        lost(map_, SPREADS[-1] * x, torch.float32, seed),
        lost(map_, SPREADS[-1] * x, torch.bfloat16, seed),
        shares[0],
        shares[1],
        shares[2],
        int((values > PRECISION * values[0]).sum()),
    )


def slope(map_: FeatureMap, x: Tensor, seed: int) -> Tensor:
    """The largest singular value of the Jacobian at every row of x, by the map's own VJP."""
    params = parameters(map_, WIDTH, seed)
    d_phi = map_.output_dim(WIDTH)
    many = x.expand(d_phi, *x.shape)
    if map_.needs_position:
        params = {**params, "position": torch.arange(x.shape[0])}
    _, residuals = map_.forward(many, params)
    units = torch.eye(d_phi, dtype=x.dtype)[:, None].expand(d_phi, x.shape[0], d_phi)
    jacobian = map_.vjp(residuals, units)[0].transpose(0, 1)  # [rows, d_phi, WIDTH]
    unit = jacobian.abs().amax((-2, -1), keepdim=True).clamp(min=NOTHING)  # squares overflow
    squares = (jacobian / unit).mT @ (jacobian / unit)
    return torch.linalg.eigvalsh(squares)[..., -1].clamp(min=0).sqrt() * unit[:, 0, 0]


def log_norm(rows: Tensor) -> float:
    """log10 of the largest norm of a row, which may be too large to square."""
    unit = rows.abs().max()
    return float((rows / unit).norm(dim=-1).max().log10() + unit.log10())


def lost(map_: FeatureMap, x: Tensor, dtype: torch.dtype, seed: int) -> float:
    """Share of features that are neither 0 nor infinite in float64, but are so in `dtype`."""
    exact = features(map_, parameters(map_, WIDTH, seed), x)
    rough = features(map_, parameters(map_, WIDTH, seed, dtype), x.to(dtype))
    alive = (exact != 0) & exact.isfinite()
    gone = alive & ((rough == 0) | ~rough.isfinite())
    return float(gone.sum() / alive.sum())


def _log(value: float) -> float:
    return math.log10(max(value, NOTHING))


def costs(maps: Sequence[FeatureMap], vectors: int = 4096, rounds: int = 5) -> list[float]:
    """CPU time of phi and of the products with a state, as a multiple of that of identity."""
    g = torch.Generator().manual_seed(0)
    x, v = (torch.randn(vectors, WIDTH, generator=g) for _ in range(2))
    position = torch.arange(vectors) % KEYS

    def attending(map_: FeatureMap) -> Callable[[], object]:
        params = parameters(map_, WIDTH, 0, torch.float32)

        def run() -> Tensor:
            keys = map_(x, params, position=position if map_.needs_position else None)
            return keys @ (keys.T @ v)

        return run

    runs = {str(i): attending(map_) for i, map_ in enumerate((phi.Identity(), *maps))}
    least = [float(times.min()) for times in cpu_times(runs, rounds).values()]
    return [round(time / least[0], 1) for time in least[1:]]
