"""Every optimiser under torch's own rules, and torch's own optimisers to hold the rules true."""

from __future__ import annotations

import pytest
import torch

from hecate import phi
from hecate.optim import DGD, M3, DeepMomentum, DeltaMomentum, KernelMomentum, Leveled, Muon, PhiMomentum
from tests.optim.rules import CHECKS, Rule

pytest.importorskip("expecttest")

C = 5
RFF = phi.RandomFourier(d_phi=64, sigma=3.0)
PHI = {
    "identity": {},
    "identity-hope-nesterov": {"form": "hope", "nesterov": True},
    "tanh-odd": {"feature_map": phi.Tanh(), "odd": True, "input_scale": "rms"},
    "rff-vjp": {"feature_map": RFF, "lift": "vjp"},
    "polynomial-phi-space": {"feature_map": phi.Polynomial(degree=2), "lift": "prefix", "space": "phi"},
    "tanh-phi-space": {"feature_map": phi.Tanh(), "lift": "vjp", "space": "phi"},
    "linear-learned": {"feature_map": phi.Linear(d_phi=4), "lift": "learned"},
    "mlp-trained": {"feature_map": phi.MLP(d_hidden=3), "phi_lr": 0.01},
    "diagonal": {"precondition": "diagonal", "guard": "flip"},
    "kronecker": {"precondition": "kronecker"},
    "orthogonalized": {"orthogonalize": True},
}


def leveled(params, lr=1e-2, **options):
    return Leveled(params, torch.optim.AdamW, lr=lr, **options)


OURS = [
    *(Rule(f"phi-{name}", PhiMomentum, {"lr": 1e-2, **options}) for name, options in PHI.items()),
    Rule("kernel-rows", KernelMomentum, {"lr": 1e-3, "keys": "rows"}),
    Rule("delta-matrix", DeltaMomentum, {"lr": 1e-2}),
    Rule("delta-rows", DeltaMomentum, {"lr": 1e-2, "reading": "rows", "erase": 0.1}),
    Rule("delta-scalar", DeltaMomentum, {"lr": 1e-3, "reading": "scalar", "erase": "lr"}),
    Rule("delta-hope", DeltaMomentum, {"lr": 1e-3, "form": "hope", "erase": 1e-7}),
    Rule("deep", DeepMomentum, {"lr": 1e-2, "rate": 1.0}),
    Rule("deep-shared", DeepMomentum, {"lr": 1e-2, "rate": 1.0, "shared": True, "width": 4}, apart=False),
    Rule("m3", M3, {"lr": 1e-2, "slow_period": 2}),
    Rule("m3-last-before", M3, {"lr": 1e-2, "accumulate": "ema_last", "second_moment": "before"}),
    Rule(
        "m3-sum-after",
        M3,
        {"lr": 1e-2, "accumulate": "sum", "second_moment": "after", "vectors": "row", "slow_period": 3},
    ),
    Rule("muon", Muon, {"lr": 1e-2}, matrices_only=True),
    Rule("dgd-unattached", DGD, {"lr": 1e-3, "unattached": "sgd"}, stateless=True),
    Rule("leveled", leveled, {"lr": 1e-2}, complex=True, copies=False),
]
THEIRS = [
    Rule("torch-adamw", torch.optim.AdamW, {"lr": 1e-2}, complex=True, copies=False),
    Rule(
        "torch-muon", torch.optim.Muon, {"lr": 1e-2},
        foreach=False, maximize=False, matrices_only=True, copies=False,
    ),
]  # fmt: skip


@pytest.mark.spec("OPT-BASE-D1")
@pytest.mark.parametrize("rule", [*OURS, *THEIRS], ids=lambda rule: rule.name)
def test_rule(rule):
    assert len(CHECKS) >= 20
    for check in CHECKS.values():
        check(rule)
