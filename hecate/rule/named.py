"""Rules of the literature as values of the knobs."""

from __future__ import annotations

from typing import NamedTuple

from hecate.algorithm import GD, Momentum
from hecate.bias import L2, Dot
from hecate.errors import ConfigError, did_you_mean
from hecate.phi import ELU, Identity
from hecate.retention import Decay, NoRetention
from hecate.rule.config import MemoryConfig
from hecate.structure import MLP, Matrix


class NamedRule(NamedTuple):
    """A rule's configuration and where it comes from."""

    config: MemoryConfig
    paper: str


RULES: dict[str, NamedRule] = {
    "hebbian": NamedRule(
        MemoryConfig(structure=Matrix(), bias=Dot(), retention=NoRetention(), algorithm=GD()),
        "Linear Transformers Are Secretly Fast Weight Programmers (Schlag et al., 2021, arXiv "
        "2102.11174), the sum rule",
    ),
    "linear_attention": NamedRule(
        MemoryConfig(bias=Dot(), feature_map=ELU(), normalizer="sum"),
        "Transformers are RNNs (Katharopoulos et al., 2020, arXiv 2006.16236)",
    ),
    "retnet": NamedRule(
        MemoryConfig(bias=Dot(), retention=Decay(retain=1 - 2**-5), query_scale="key_dim"),
        "Retentive Network (Sun et al., 2023, arXiv 2307.08621): one fixed retain per head, here "
        "that of its first head; pass gates.retain for the others",
    ),
    "gla": NamedRule(
        MemoryConfig(bias=Dot(), retention=Decay(retain=0.95), query_scale="key_dim"),
        "Gated Linear Attention (Yang et al., 2024, arXiv 2312.06635): retain per phi channel, "
        "gates.retain [B, T, H, P]",
    ),
    "delta": NamedRule(
        MemoryConfig(bias=L2(), key_norm="l2"),
        "Parallelizing Linear Transformers with the Delta Rule (Yang et al., 2024, arXiv "
        "2406.06484)",
    ),
    "gated_delta": NamedRule(
        MemoryConfig(bias=L2(), retention=Decay(), decay_order="before_gradient", key_norm="l2"),
        "Gated Delta Networks (Yang et al., 2024, arXiv 2412.06464)",
    ),
    "longhorn": NamedRule(
        MemoryConfig(bias=L2(), step="implicit"),
        "Longhorn (Liu et al., 2024, arXiv 2407.14207): the exact proximal step, not its diagonal "
        "approximation",
    ),
    "titans_linear": NamedRule(
        MemoryConfig(bias=L2(), retention=Decay(), algorithm=Momentum(), key_norm="l2"),
        "Titans (Behrouz et al., 2025, arXiv 2501.00663), one linear layer",
    ),
    "titans": NamedRule(
        MemoryConfig(
            structure=MLP(layers=2, expansion=4, activation="silu"),
            bias=L2(),
            retention=Decay(),
            algorithm=Momentum(lr=0.1),
            feature_map=Identity(),
            key_norm="l2",
        ),
        "Titans (Behrouz et al., 2025, arXiv 2501.00663), a memory of two layers",
    ),
    "ttt_linear": NamedRule(
        MemoryConfig(bias=L2(), key_norm="l2", chunk=16),
        "Learning to (Learn at Test Time) (Sun et al., 2024, arXiv 2407.04620): gradients at the "
        "start of blocks of 16, without the paper's residual and layer norm inside the memory",
    ),
    "ttt_linear_norm": NamedRule(
        MemoryConfig(
            structure=MLP(layers=1, residual=True, norm="layer", bias=True),
            bias=L2(),
            algorithm=GD(lr=1.0),
            chunk=16,
        ),
        "Learning to (Learn at Test Time) (Sun et al., 2024, arXiv 2407.04620): x + LN(W x + b), "
        "without gain and offset of the norm; lr is eta of the released code, whose gate also "
        "divides by the head's width",
    ),
    "ttt_mlp": NamedRule(
        MemoryConfig(
            structure=MLP(
                layers=2, expansion=4, activation="gelu", residual=True, norm="layer", bias=True
            ),
            bias=L2(),
            algorithm=GD(lr=0.1),
            chunk=16,
        ),
        "Learning to (Learn at Test Time) (Sun et al., 2024, arXiv 2407.04620): x + LN(f(x)), f of "
        "two layers with gelu; norm and lr as in ttt_linear_norm",
    ),
}


def named_rule(name: str) -> MemoryConfig:
    """The configuration of a rule of the literature; `hecate list rules` shows all.

    Conventions on which papers differ are set to the paper's own; lr is the default of the gate.

    Raises:
        ConfigError: an unknown name, with the known ones and the nearest.
    """
    if not isinstance(name, str) or name not in RULES:
        raise ConfigError(
            f"unknown rule {name!r}; known: {', '.join(RULES)}.{did_you_mean(name, RULES)}"
        )
    return RULES[name].config
