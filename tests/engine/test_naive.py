"""The recurrence as it is written, against the token loop: every knob."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import normalize

from hecate.engine.naive import naive
from hecate.rule import TokenGates
from tests.memories import DEEP, case_of, close, config_of

CONFIGS = [
    {},
    {"retention": "decay", "algorithm": "momentum", "key_norm": "l2"},
    {"bias": "dot", "retention": "decay", "read": "before", "feature_map": "elu"},
    {"bias": {"kind": "huber", "delta": 0.5, "norm": True}, "algorithm": {"kind": "momentum", "nesterov": True}},
    {"structure": DEEP, "retention": "decay", "algorithm": "momentum"},
    {"structure": DEEP, "retention": "decay", "algorithm": "momentum", "chunk": 4, "commit": "chunk"},
    {"structure": "gated_mlp", "algorithm": "momentum", "chunk": 4, "commit": "chunk", "rates": True},
    {"structure": "vector", "bias": {"kind": "lp", "p": 1.5, "eps": 0.1}, "retention": "decay", "channels": True},
    {"structure": "slots", "bias": "l1", "retention": "elastic_net"},
    {"structure": {"kind": "gated_mlp"}, "retention": "decay", "decay_order": "before_gradient", "chunk": 3},
    {"retention": "decay", "decay_order": "before_gradient", "chunk": 4, "commit": "chunk", "read": "before"},
    {"bias": "kl", "retention": "kl", "chunk": 4},
    {"retention": {"kind": "kl", "link_at": "chunk"}, "chunk": 4},
    {"structure": DEEP, "retention": {"kind": "lq", "eps": 0.1, "link_at": "linear"}, "chunk": 3, "read": "before"},
    {"retention": "sphere", "algorithm": "newton_schulz", "read": "before"},
    {"algorithm": {"kind": "omega", "window": 3}, "retention": "decay"},
    {"algorithm": "delta_momentum", "chunk": 3},
    {"algorithm": "ftrl", "retention": "lq"},
    {"algorithm": "implicit", "retention": "decay", "decay_order": "before_gradient", "channels": True},
]


@pytest.mark.spec("ENG-NAIVE-D1")
@pytest.mark.parametrize("fields", CONFIGS, ids=lambda fields: "-".join(map(str, fields.values())) or "plain")
def test_every_knob_against_the_token_loop(fields):
    fields = dict(fields)
    given = {name: fields.pop(name, False) for name in ("channels", "rates")}
    config = config_of(**fields)
    case = case_of(config, d=3, width=3, length=10, ends=0.2, **given).fresh()
    if config.bias.kind == "kl":
        case = case._replace(v=case.v.softmax(-1).detach().requires_grad_())
    y, state = case.scan(engine="sequential")

    heads, flat = case.k.shape[2], lambda x: x.transpose(1, 2).flatten(0, 1)
    k, q = (config.feature_map(x) for x in (case.k, case.q))
    if config.key_norm == "l2":
        k, q = normalize(k, dim=-1), normalize(q, dim=-1)
    default = (config.algorithm.lr, config.retention.default_retain, config.algorithm.default_momentum)
    gates = (
        torch.full_like(case.k[..., 0], fill) if gate is None else gate
        for gate, fill in zip(case.gates[:3], default, strict=True)
    )
    start = case.part(0, 0).scan()[1].memory.values()
    given = [flat(x) for x in (q, k, case.v)]
    ours, left = naive(config, *given, TokenGates(*map(flat, gates)), tuple(x.flatten(0, 1) for x in start))
    ours = ours.unflatten(0, (-1, heads)).transpose(1, 2)
    close(ours, y, 1e-10, "y")
    for mine, (name, true) in zip(left, state.memory.items(), strict=True):
        close(mine, true.flatten(0, 1), 1e-10, name)
    g = torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=y.dtype)
    leaves = [leaf for leaf in case.leaves]
    pairs = zip(*(torch.autograd.grad(out, leaves, g, materialize_grads=True) for out in (ours, y)), strict=True)
    for index, (mine, true) in enumerate(pairs):
        close(mine, true, 1e-8, f"gradient {index}")
