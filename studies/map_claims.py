"""What a chapter says of some feature maps, and the measurements that answer it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch

from studies.map_measures import KEYS, SPREADS, WIDTH, Measured


def cancelled(dtype: torch.dtype) -> float:
    """Share of features of elu(x) + 1, as often written, that cancel to 0 at the widest spread."""
    g = torch.Generator().manual_seed(0)
    x = SPREADS[-1] * torch.randn(KEYS, WIDTH, generator=g, dtype=torch.float64)
    return float(((torch.nn.functional.elu(x.to(dtype)) + 1) == 0).double().mean())


class Claim(NamedTuple):
    """A chapter's words on a map, and what is found. Its stars, unsourced, are not repeated."""

    claimed: str
    verdict: str
    because: Callable[[Measured], str]


CLAIMS: Mapping[str, Claim] = {
    "elu": Claim(
        "numerical issues",
        "only as often written",
        lambda m: (
            f"in this form {m.facts.lost32:.0%} of features are lost in float32 and "
            f"{m.facts.lost16:.0%} in bfloat16; F.elu(x) + 1 loses {cancelled(torch.float32):.0%} "
            f"and {cancelled(torch.bfloat16):.0%}"
        ),
    ),
    "relu": Claim(
        "positive; elsewhere: not",
        "never < 0, can be 0",
        lambda m: f"{m.facts.zero_kernel:.1%} of kernel values are exactly 0",
    ),
    "squared_relu": Claim(
        "positive",
        "no",
        lambda m: f"{m.facts.zero_kernel:.1%} of kernel values are exactly 0; error {m.error:.2f} of the plain mean's",
    ),
    "exp": Claim(
        "closest to softmax; stable",
        "no",
        lambda m: (
            f"its kernel is sum exp(q_i + k_i), not exp(q.k): error {m.error:.2f} of the plain "
            f"mean's; |phi|^2 reaches 1e{m.facts.size:.0f}"
        ),
    ),
    "random_fourier m=64": Claim(
        "positive by construction",
        "no",
        lambda m: f"{m.facts.negative:.0%} of features and {m.facts.negative_kernel:.0%} of kernel values are negative",
    ),
    "favor m=64 trigonometric": Claim(
        "exact; unbiased with exp(-|x|^2/2)",
        "no",
        lambda m: (
            "unbiased with exp(+|x|^2/2) and not exact: "
            f"{m.facts.negative_kernel:.0%} of kernel values are negative, error {m.error:.2f} of "
            "the plain mean's"
        ),
    ),
}
