"""phi: pairs beyond the width of keys, through feature maps, wider keys and a deep memory of equal state.

First nothing is trained: random keys of unit length are written once and asked. Then a layer is trained to recall,
where the projection of keys, and a phi of its own, may learn to make room.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize

from hecate.engine import memory_scan
from hecate.figure import COLOURS, MARKERS, finish
from hecate.rule import MemoryConfig, bytes_of
from studies.dots import dot_plot
from studies.layers import JUDGE, JUDGED, judged, trained
from studies.study import Cell, Progress, Result, Spread, Study

WIDTH, FEATURES, PAIRS = 16, 128, (16, 32, 64, 128)
LRS, SIGMAS = (0.3, 0.6, 1.0), (0.1, 0.2, 0.4, 0.8)
KEYS, VALUES, STEPS, RATES = 8, 32, 300, (2e-2, 5e-3)  # of the trained layer
TASK = {"kind": "mqar", "vocab_size": 64, "num_pairs": 16, "seq_len": 64, "random_filler": False}


class Setting(NamedTuple):
    """A memory, and how far the first weights of a deep one are scaled."""

    config: MemoryConfig
    scale: float = 1.0


def fourier(features: int, sigma: float) -> dict[str, Any]:
    """Random Fourier features of a Gaussian kernel of this width."""
    return {"kind": "random_fourier", "d_phi": features, "sigma": sigma}


def untrained() -> dict[str, list[Setting]]:
    """Memories and the settings that each is chosen from; all but the first hold some 2,000 numbers."""

    lasting: dict[str, Any] = {"retention": "none", "on_nonfinite": "propagate"}  # a diverged setting is not chosen

    def delta(*maps: Any) -> list[Setting]:
        own = {**lasting, "key_norm": "l2"}
        return [
            Setting(MemoryConfig.model_validate({**own, "feature_map": phi, "algorithm": {"kind": "gd", "lr": lr}}))
            for phi, lr in itertools.product(maps, LRS)
        ]

    deep = {"kind": "mlp", "layers": 2, "expansion": 4, "activation": "gelu"}
    steps = [("raw", lr) for lr in (0.1, 0.2, 0.4, 0.8)] + [("normalized", lr) for lr in (0.2, 0.5, 1.0)]
    return {
        "identity": delta("identity"),
        "keys widened by a random matrix": delta({"kind": "linear", "d_phi": FEATURES}),
        "deep memory (MLP)": [
            Setting(
                MemoryConfig.model_validate(
                    {**lasting, "structure": deep, "step": step, "algorithm": {"kind": "gd", "lr": lr}}
                ),
                scale,
            )
            for (step, lr), scale in itertools.product(steps, (1.0, 4.0))
        ],
        "dpfp, nu 4": delta({"kind": "dpfp", "nu": 4}),
        "polynomial, degree 2": delta({"kind": "polynomial", "degree": 2}),
        "random_fourier, sigma tuned": delta(*(fourier(FEATURES, sigma) for sigma in SIGMAS)),
    }


def draw_pairs(seeds: Sequence[int], count: int) -> tuple[Tensor, Tensor]:
    """Keys and values of unit length, `[seeds, count, WIDTH]`."""
    drawn = []
    for seed in seeds:
        g = torch.Generator().manual_seed(seed)
        drawn.append(normalize(torch.randn(2, count, WIDTH, generator=g), dim=-1))
    keys, values = torch.stack(drawn, 1)
    return keys, values


@torch.no_grad()
def recalled(setting: Setting, keys: Tensor, values: Tensor, seed: int = 0) -> tuple[list[float], int]:
    """Shares of pairs whose value is the nearest of all after each was written once; numbers of the state."""
    config, g = setting.config, torch.Generator().manual_seed(seed)
    params = config.feature_map.init(WIDTH, generator=g)
    initial = None
    if config.structure.kind != "matrix":
        initial = config.structure.init(WIDTH, WIDTH, heads=1, generator=g, dtype=torch.float32)
        first = next(iter(initial))
        initial = {name: weight * (setting.scale if name == first else 1.0) for name, weight in initial.items()}
    k, v = keys.unsqueeze(2), values.unsqueeze(2)
    _, state = memory_scan(config, k, k, v, phi_params=params, initial=initial)
    mask = torch.zeros(keys.shape[:2], dtype=torch.bool)
    y, _ = memory_scan(config, k, k, v, phi_params=params, state=state, write_mask=mask)
    near = (y.squeeze(2) @ values.mT).argmax(-1) == torch.arange(keys.shape[1])
    return near.double().mean(1).tolist(), bytes_of(state.memory) // 4 // len(keys)


def chosen(settings: Sequence[Setting], count: int) -> Setting:
    """The setting that recalls most on other seeds."""
    keys, values = draw_pairs(range(JUDGE, JUDGE + 4), count)
    return max(settings, key=lambda setting: sum(recalled(setting, keys, values, JUDGE)[0]))


def layers() -> dict[str, list[dict[str, Any]]]:
    """Models by the memory that they train, each the delta rule; of several the one that is best on the judge."""

    def delta(d_key: int, *maps: Any) -> list[dict[str, Any]]:
        sizes = {"d_model": 32, "heads": 1, "mlp_ratio": 0, "d_key": d_key, "d_value": VALUES}
        sizes |= {"conv_kernel": 2, "output_gate": False}
        return [{**sizes, "memory": {"kind": "delta", "key_norm": "l2", "feature_map": phi}} for phi in maps]

    wide = 8 * KEYS
    return {
        f"identity, keys of {KEYS}": delta(KEYS, "identity"),
        f"identity, keys of {wide}": delta(wide, "identity"),
        "dpfp, nu 4": delta(KEYS, {"kind": "dpfp", "nu": 4}),
        "random_fourier, sigma tuned": delta(KEYS, *(fourier(wide, sigma) for sigma in SIGMAS[1:])),
        "trained phi: linear, elu": delta(
            KEYS, {"kind": "compose", "maps": [{"kind": "linear", "d_phi": wide}, "elu"]}
        ),
    }


class Phi(Study):
    """Maps against wider keys and a deep memory, untrained and trained."""

    name: ClassVar[str] = "phi"
    about: ClassVar[str] = (
        "Does a feature map hold more pairs than keys are wide, and more than wider keys of equal state?"
    )
    count: ClassVar[int] = 5

    def run(self, quick: bool, seeds: Sequence[int], progress: Progress) -> Result:
        """Streams at every number of pairs, then layers; three seeds of these at most."""
        free: dict[str, list[Spread]] = {}
        numbers: dict[str, int] = {}
        settings: dict[str, str] = {}
        for name, own in progress(list(untrained().items()), "untrained"):
            free[name] = []
            for count in PAIRS[1:3] if quick else PAIRS:
                best = chosen(own, count)
                shares, numbers[name] = recalled(best, *draw_pairs(seeds, count))
                free[name].append(Spread.of(shares))
                sigma = getattr(best.config.feature_map, "sigma", None)
                settings[name] = f"lr {best.config.algorithm.lr:g}" + (f", sigma {sigma:g}" if sigma else "")
        found: dict[str, Spread] = {}
        steps, rates = (20, RATES[:1]) if quick else (STEPS, RATES)
        for name, models in progress(list(layers().items())[: 1 if quick else None], f"trained, {steps} steps"):
            cells = [(model, lr) for model in models for lr in rates]
            if len(cells) > 1:
                model, lr = max(cells, key=lambda cell: judged(trained(cell[0], TASK, JUDGE, cell[1], steps), TASK))
            else:
                model, lr = cells[0]
            phi = model["memory"]["feature_map"]
            settings[f"{name}, trained"] = f"rate {lr:g}" + (f", sigma {phi['sigma']:g}" if "sigma" in phi else "")
            found[name] = Spread.of(judged(trained(model, TASK, seed, lr, steps), TASK) for seed in seeds[:3])
        return report(free, numbers, found, settings, PAIRS[1:3] if quick else PAIRS)


def report(
    free: dict[str, list[Spread]], numbers: dict[str, int], found: dict[str, Spread], settings: dict[str, str],
    pairs: Sequence[int],
) -> Result:  # fmt: skip
    """The table of both parts, and the figure."""
    columns = ["memory", "numbers of state", *(f"{count} pairs" for count in pairs), "trained layer"]
    rows: list[list[Cell]] = [[name, numbers[name], *shares, None] for name, shares in free.items()]
    rows += [[f"{name}, trained", None, *(None for _ in pairs), accuracy] for name, accuracy in found.items()]
    notes = [
        f"untrained: random unit keys of width {WIDTH} and unit values, each written once, then all asked; the share "
        "whose value is the nearest of all, a guess 1 of the pairs; lr, sigma and the scale of a deep memory's first "
        "weights chosen on four other draws for every number of pairs; mean +- standard error over seeds",
        f"trained: a layer of width 32, keys of {KEYS} unless said, values of {VALUES}, the delta rule, 16 pairs of 31 "
        f"keys and 32 values among 64 tokens, {STEPS} steps, three seeds, rate and sigma chosen on another; {JUDGED} "
        f"sequences judged, a guess 1 of 16; all but the first hold {8 * KEYS * VALUES} numbers",
        "chosen, at the last number of pairs: " + "; ".join(f"{name} {text}" for name, text in settings.items()),
    ]

    def draw(figure: Any) -> None:
        left, right = figure.subfigures(1, 2, width_ratios=(1.3, 1.0))
        axes = left.subplots()
        for index, (name, shares) in enumerate(free.items()):
            axes.errorbar(
                pairs, [share.mean for share in shares], [share.error for share in shares], label=name,
                color=COLOURS[index], marker=MARKERS[index],
            )  # fmt: skip
        finish(
            axes, f"Untrained, keys of width {WIDTH}", "pairs", "share recalled", xscale="log", xticks=pairs,
            ylim=(0, 1.03),
        )  # fmt: skip
        axes.set_xticklabels(map(str, pairs))
        axes.minorticks_off()
        dot_plot(
            right, list(found), {f"Trained, 16 pairs, keys of {KEYS}": {"": list(found.values())}}, "accuracy", [1 / 16]
        )

    return Result(columns, rows, notes, draw, size=(12, 4.6))
