"""Every knob by itself (`pytest -k that_kind`): derivatives, traits, conventions at kinks."""

from __future__ import annotations

import itertools
from typing import Any, ClassVar, Literal

import numpy as np
import pytest
import torch
from pydantic import Field
from torch import Tensor

from hecate import Gates, MemoryConfig, algorithm, bias, memory_scan, retention, structure
from hecate.activation import Activation, ReLU
from hecate.errors import ConfigError, ShapeError
from hecate.tape.ops import over, sum_to_gate
from hecate.testing import check_knobs, check_rule, check_vjp
from tests.reference import memory as reference
from tests.registries import restore_registries, shipped_kinds

# A user's own knobs, with the least that a family asks for, defined after the library was imported.


class LogCosh(bias.Bias):
    """log_cosh_of_a_user: ell = sum log cosh e."""

    kind: Literal["log_cosh_of_a_user"] = "log_cosh_of_a_user"

    def loss(self, pred: Tensor, target: Tensor) -> Tensor:
        return (pred - target).cosh().log().sum(-1)


class SoftClip(retention.Retention):
    """soft_clip_of_a_user: M' = c tanh((retain M + D)/c)."""

    kind: Literal["soft_clip_of_a_user"] = "soft_clip_of_a_user"
    c: float = Field(2.0, gt=0)
    uses_retain: ClassVar[bool] = True

    def step(self, memory: Tensor, direction: Tensor, retain: Tensor) -> Tensor:
        return self.c * ((over(retain, memory) * memory + direction) / self.c).tanh()


class SmoothSign(algorithm.Algorithm):
    """smooth_sign_of_a_user: D = -lr tanh(G + S/2), S' = G."""

    kind: Literal["smooth_sign_of_a_user"] = "smooth_sign_of_a_user"
    slots: ClassVar[tuple[str, ...]] = ("previous",)

    def direction(self, grad, lr, momentum, *slots):
        return -over(lr, grad) * (grad + 0.5 * slots[0]).tanh(), grad


class Diagonal(structure.Structure):
    """diagonal_of_a_user: pred = w (A p), A a fixed mixing of phi into V channels."""

    kind: Literal["diagonal_of_a_user"] = "diagonal_of_a_user"

    def shapes(self, d_phi: int, d_v: int) -> dict[str, tuple[int, ...]]:
        return {"scale": (d_v,), "shift": (d_v,)}

    def init(self, d_phi, d_v, *, heads=1, generator=None, dtype=torch.float32, device=None):
        one = torch.ones(heads, d_v, dtype=dtype, device=device)
        return {"scale": one, "shift": 0 * one}

    def predict(self, memory, p: Tensor) -> Tensor:
        scale, shift = memory
        mixing = torch.ones(p.shape[-1], scale.shape[-1], dtype=p.dtype).tril()
        return scale * torch.tanh(p @ mixing) + shift


EXAMPLES = {  # by kind, or by family.kind where two families share a name
    "l1": [{"eps": 0.1}, {"eps": 1.0}],
    "yaad": [{"delta": 1.5, "eps": 0.1}, {"delta": 0.1, "eps": 0.1}, {"delta": 9.0}],
    "robust": [{"radius": 0.5, "eps": 0.1}, {"radius": 0.5}, {"radius": 0.0}],
    "bias.kl": [{}, {"temperature": 0.5}, {"target": "distribution"}],
    "retention.kl": [{}, {"scale": 3.0}, {"signed": True}, {"signed": True, "scale": 3.0}],
    "retention.l2": [{}, {"decoupled": True}],
    "lq": [
        {"q": 4.0, "form": "exact"},
        {"q": 1.5, "form": "exact"},
        {"q": 2.0, "form": "exact"},
        {"q": 4.0, "form": "paper"},
        {"q": 2.5, "form": "paper"},
    ],
    "bounded": [{}, {"low": -2.0, "high": 1.5}],
    "elastic_net": [{"threshold": 0.0}, {"threshold": 0.1}],
    "sphere": [{"slot": "column"}, {"slot": "row", "retain": 0.9}, {"form": "divide"}],
    "bregman": [
        {"link": "identity"},
        {"link": {"kind": "softmax", "scale": 2.0}},
        {"link": "signed_softmax"},
        {"link": "sigmoid"},
        {"link": {"kind": "lq", "q": 3.0}},
    ],
    "norm_cap": [
        {"norm": 0.5},
        {"norm": 50.0, "retention": "decay"},
        {"norm": 0.5, "retention": {"kind": "kl", "signed": True}},
        {"norm": 0.5, "retention": "lq"},
        {"norm": 1.0, "retention": "sphere"},
        {"norm": 0.5, "retention": {"kind": "norm_cap", "norm": 1.0, "retention": "bounded"}},
    ],
    "lp": [{"p": 3.0}, {"p": 2.0}, {"p": 4.5}, {"p": 1.5, "eps": 0.1}, {"p": 1.1, "eps": 0.5}],
    "huber": [{"delta": 0.7}, {"delta": 0.7, "norm": True}],
    "mlp": [
        {"layers": n, "expansion": 1, "activation": a, "residual": r}
        for n, a, r in [
            (2, "gelu", False),
            (2, "silu", True),
            (3, "tanh", False),
            (3, "gelu", True),
            (4, "silu", False),
            (4, "tanh", True),
            (3, "relu", False),
        ]
    ]
    + [
        {"layers": 1, "residual": True, "norm": "layer", "bias": True},
        {"layers": 3, "expansion": 1, "norm": "layer", "activation": "tanh"},
        {"layers": 2, "expansion": 1, "residual": True, "norm": "layer", "bias": True},
    ],
    "gated_mlp": [{"expansion": 1}, {"activation": "gelu"}, {"activation": "relu"}],
}
FAMILIES = {
    "bias": bias.BiasKind,
    "retention": retention.RetentionKind,
    "algorithm": algorithm.AlgorithmKind,
    "structure": structure.StructureKind,
}


def every_variant() -> list[dict[str, dict]]:
    return [
        {family: {"kind": kind, **fields}}
        for family, root in FAMILIES.items()
        for kind, cls in root.variants().items()
        if cls.__module__.startswith(("hecate.", __name__))
        for fields in EXAMPLES.get(f"{family}.{kind}", EXAMPLES.get(kind, [{}]))
    ]


def name_of(knob: dict[str, dict]) -> str:
    ((family, fields),) = knob.items()
    return "-".join([family, *(str(value) for value in fields.values())])


def smooth(knob: dict[str, dict]) -> bool:
    return "relu" not in str(knob)


WAYS = {"token": {"retention": "decay", "algorithm": "momentum"}, "chunk": {"chunk": 3, "commit": "chunk"}}


def in_turn(knobs: list[dict[str, dict]]) -> list[tuple[dict[str, dict], str, bool]]:
    """Token by token and in chunks, a kind alone both ways, settings of one by turns; and whether in whole scans, too,
    as some of the settings of a kind are, the first two among them."""
    found, ways = [], itertools.cycle(WAYS)
    for _, own in itertools.groupby(knobs, lambda knob: [(family, fields["kind"]) for family, fields in knob.items()]):
        same = list(own)
        turns = zip(same, ways, strict=False) if len(same) > 1 else [(same[0], way) for way in WAYS]
        found += [(knob, way, at < 2 or at % 3 == 0) for at, (knob, way) in enumerate(turns)]
    return found


@pytest.mark.spec("BIAS-ANY-V1", "RET-ANY-V1", "ALG-ANY-V1", "STR-ANY-V1")
@pytest.mark.spec("BIAS-DOT-V1", "BIAS-L2-V1", "BIAS-LP-V1", "BIAS-HUBER-V1", "RET-NONE-V1")
@pytest.mark.spec("BIAS-L1-V1", "BIAS-YAAD-V1", "BIAS-ROBUST-V1", "BIAS-KL-V1")
@pytest.mark.spec("RET-DECAY-V1", "ALG-GD-V1", "ALG-MOM-V1", "STR-MATRIX-V1", "STR-MLP-V1")
@pytest.mark.spec("RULE-ANY-I1")
@pytest.mark.parametrize(
    ("knob", "way", "scanned"), in_turn(every_variant()), ids=lambda x: name_of(x) if type(x) is dict else str(x)
)
def test_every_variant_in_a_scan(knob, way, scanned):
    """Its derivatives and traits by themselves, then a scan."""
    (check_rule if scanned else check_knobs)(MemoryConfig(**{**WAYS[way], **knob}), smooth=smooth(knob))


def test_users_variants_together():
    mine = {"bias": LogCosh, "retention": SoftClip, "algorithm": SmoothSign, "structure": Diagonal}
    for family, knob in mine.items():
        assert FAMILIES[family].variants()[knob().kind] is knob
    config = MemoryConfig(**{family: knob().kind for family, knob in mine.items()})
    assert not any(
        type(knob).hand_written() for knob in (config.bias, config.retention, config.algorithm, config.structure)
    )
    check_rule(config)
    check_rule(MemoryConfig(algorithm={"kind": "omega", "window": 2, "inner": SmoothSign()}))


def test_shipped_kinds_have_their_derivatives_by_hand():
    """Those of torch.func cannot be exported; two go through networks."""
    kinds = [item for family in FAMILIES.values() for item in shipped_kinds(family).items()]
    left = {kind for kind, cls in kinds if cls._derivatives and not cls.hand_written()}
    assert left == {"deep_momentum", "two_pass"}


def test_check_rule_finds_a_wrong_knob(monkeypatch):
    config = MemoryConfig(bias="l2", retention="decay", algorithm="momentum")
    faults = [
        (bias.L2, "psi_jvp", lambda self, e, t: 2 * t, "bias.l2"),
        (bias.L2, "rho", lambda self, e: e.square().sum(-1), "grad against autograd of loss"),
        (bias.L2, "curvature", property(lambda self: 0.5), "declared curvature"),
        (
            retention.Decay,
            "step_vjp",
            lambda self, m, d, r, g: (over(r, m) * g, g, sum_to_gate(g * d, r)),
            "retention.decay",
        ),
        (retention.Decay, "step", lambda self, m, d, r: over(r, m) * (m + d), "retention.*declared linear"),
        (
            algorithm.Momentum,
            "direction_vjp",
            lambda self, i, *g: (-over(i[1], i[0]) * g[0], None, None, None),
            "algorithm.momentum",
        ),
        (structure.Matrix, "pullback_vjp", lambda self, m, p, u, c: (c[0], 0 * p, 0 * u), "structure.matrix.pullback"),
    ]
    check_rule(config)
    for owner, name, fault, words in faults:
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, fault)
            with pytest.raises((AssertionError, ConfigError), match=words):
                check_rule(config)
    check_rule(config)


@pytest.mark.parametrize("name", ["gelu", "silu", "tanh", "relu"])
def test_activations_are_those_of_the_reference(name):
    x = torch.linspace(-4, 4, 41).add(0.01)
    ours = [float(v) for v in Activation.variants()[name]().value(x)]
    theirs = [float(reference.ACTIVATIONS[name][0](v)) for v in x.detach().numpy()]
    np.testing.assert_allclose(ours, theirs, rtol=1e-13, atol=1e-16)


@pytest.mark.spec("STR-MLP-I1")
def test_relu_at_its_kink():
    relu, zero = ReLU(), torch.zeros(1)
    orders = relu.value(zero), relu.slope(zero, zero), relu.bend(zero, zero, zero)
    assert [float(item) for item in orders] == [0, 0, 0]


@pytest.mark.spec("BIAS-HUBER-I1")
@pytest.mark.parametrize("norm", [False, True])
def test_huber_at_its_threshold(norm):
    knob = bias.Huber(delta=2.0, norm=norm)
    at = torch.tensor([2.0]), torch.zeros(1)
    assert float(knob.loss(*at)) == 2.0
    assert float(knob.grad(*at)) == 2.0
    # The threshold counts as inside; beyond it a coordinate (or a radius) has no curvature.
    assert float(knob.grad_jvp(*at, torch.ones(1))) == 1.0
    assert float(knob.grad_jvp(torch.tensor([2.0 + 1e-9]), at[1], torch.ones(1))) == 0.0
    # Autograd through the same forward agrees on both sides and at the threshold.
    for pred in (1.9, 2.0, 2.1, -2.0, -2.1):
        point = torch.tensor([pred], requires_grad=True)
        (slope,) = torch.autograd.grad(knob.grad(point, at[1]).sum(), point)
        assert float(slope) == float(knob.grad_jvp(point.detach(), at[1], torch.ones(1))), pred


@pytest.mark.spec("BIAS-LP-I1")
@pytest.mark.parametrize(("p", "slope"), [(1.01, 0.0), (1.5, 0.0), (2.0, 1.0), (2.5, 0.0), (3.0, 0.0)])
def test_lp_at_zero_error(p, slope):
    knob = bias.Lp(p=p)
    point, target = torch.zeros(2, requires_grad=True), torch.zeros(2)
    ones = torch.ones(2)
    assert float(knob.loss(point.detach(), target)) == 0.0
    assert knob.grad(point, target).tolist() == [0.0, 0.0]
    assert knob.grad_jvp(point.detach(), target, ones).tolist() == [slope, slope]
    (auto,) = torch.autograd.grad(knob.grad(point, target), point, ones)
    assert auto.tolist() == [slope, slope]


@pytest.mark.spec("BIAS-LP-I2", "BIAS-HUBER-I2")
@pytest.mark.parametrize("size", [1e-12, 1e-7, 1e-6, 1e-3, 1.0, 1e6])
def test_curvature_of_small_and_large_errors_is_exact(size):
    e = torch.tensor([size])
    for knob in (bias.Lp(p=1.5), bias.Lp(p=3.0), bias.Huber(norm=True), bias.Huber()):
        point = e.clone().requires_grad_()
        (true,) = torch.autograd.grad(knob.grad(point, torch.zeros(1)).sum(), point)
        hand = knob.grad_jvp(e, torch.zeros(1), torch.ones(1))
        assert torch.isfinite(hand).all()
        torch.testing.assert_close(hand, true, rtol=1e-9, atol=1e-12)


@pytest.mark.spec("BIAS-LP-R1", "BIAS-HUBER-R1")
def test_reductions_of_the_losses_to_l2(generator):
    pred, target, g = (torch.randn(30, 4, generator=generator) for _ in range(3))
    for knob in (bias.Lp(p=2.0), bias.Huber(delta=1e3), bias.Huber(delta=1e3, norm=True)):
        for mine, true in (
            (knob.loss(pred, target), bias.L2().loss(pred, target)),
            (knob.grad(pred, target), bias.L2().grad(pred, target)),
            (knob.grad_jvp(pred, target, g), g),
        ):
            torch.testing.assert_close(mine, true, rtol=1e-14, atol=0)


@pytest.mark.spec("RET-DECAY-V1")
@pytest.mark.parametrize("shape", [(4,), (4, 3)], ids=["scalar", "channel"])
@pytest.mark.parametrize("value", [0.0, 1.0])
def test_decay_vjp_at_gates_of_zero_and_one(shape, value, generator):
    memory, direction = (torch.randn(4, 2, 3, generator=generator) for _ in range(2))
    check_vjp(retention.Decay().block(), [memory, direction, torch.full(shape, value)])


@pytest.mark.spec("STR-MLP-I2", "STR-GATED-D1")
@pytest.mark.parametrize(
    ("mlp", "shapes"),
    [
        (structure.MLP(layers=3), {"w1": (3, 16, 4), "w2": (3, 16, 16), "w3": (3, 2, 16)}),
        (structure.GatedMLP(), {"w1": (3, 8, 4), "w2": (3, 2, 8), "w3": (3, 8, 4)}),
    ],
    ids=["mlp", "gated"],
)
def test_initial_weights_flow_and_are_reproducible(mlp, shapes):
    weights = mlp.init(4, 2, heads=3, dtype=torch.float64)
    assert {name: tuple(w.shape) for name, w in weights.items()} == shapes
    again = mlp.init(4, 2, heads=3, dtype=torch.float64)
    assert all(torch.equal(weights[name], again[name]) for name in weights)
    other = mlp.init(4, 2, heads=3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    assert not torch.equal(weights["w1"], other["w1"])
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    mlp.init(4, 2)
    assert torch.equal(before, torch.random.get_rng_state())
    grads = mlp.pullback(tuple(weights.values()), torch.ones(3, 4), torch.ones(3, 2))
    assert all(float(grad.norm()) > 1e-2 for grad in grads)
    dead = mlp.pullback(tuple(0 * w for w in weights.values()), torch.ones(3, 4), torch.ones(3, 2))
    assert all(float(grad.norm()) == 0 for grad in dead)


@pytest.mark.spec("ALG-MOM-I1")
def test_momentum_is_unscaled_and_uncorrected():
    knob, one = algorithm.Momentum(), torch.ones(1)
    slot = torch.zeros(1, 1)
    for expected in (-0.5, -0.95, -1.355):
        direction, slot = knob.direction(torch.ones(1, 1), 0.5 * one, 0.9 * one, slot)
        assert float(direction) == float(slot) == pytest.approx(expected, rel=1e-15)


@pytest.mark.spec("ALG-MOM-I2", "ALG-GD-I1")
@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
def test_stability_limit_is_sharp(momentum):
    """One item written for ever: contracts just below the declared limit, grows just beyond."""
    knob = algorithm.Momentum(momentum=momentum) if momentum else algorithm.GD()
    for factor, contracts in ((0.98, True), (1.02, False)):
        lr = factor * knob.stable_step
        config = MemoryConfig(algorithm=knob, state_dtype="float64")
        ones = torch.ones(1, 2000, 1, 1)
        gates = Gates(lr=torch.full((1, 2000, 1), lr))
        y, _ = memory_scan(config, ones, ones, ones, gates, engine="parallel")
        assert (abs(float(y[0, -1, 0, 0]) - 1) < 1e-3) == contracts


# What a user gets wrong.


def knob(name: str, base: Any, **own: Any) -> Any:
    """A knob of a user's: a subclass with these methods and traits, and a kind of its own."""
    kind = f"{name.lower()}_of_a_user"
    types = {"kind": Literal[kind], "retain": float, "linear": ClassVar[bool], "slots": ClassVar[tuple[str, ...]]}
    types = {field: item for field, item in types.items() if field in ("kind", *own)}
    about = {"__module__": __name__, "__doc__": f"{kind}: wrong.", "__annotations__": types}
    return type(name, (base,), {**about, "kind": kind, **own})()


def plain(lr: Tensor, grad: Tensor) -> Tensor:
    return -over(lr, grad) * grad


def decayed(self: Any, memory: Tensor, direction: Tensor, retain: Tensor) -> Tensor:
    return over(retain, memory) * memory + direction


def squares(self: Any, pred: Tensor, target: Tensor) -> Tensor:
    return (pred - target).square().sum(-1)


def wrong(name: str) -> dict[str, Any]:
    """Knobs that are no knobs, by name: a family, its class, and methods that are not what it asks for."""
    family, base, own = {
        # No tuple; no new slot; the sum over rows; a slot with a number for each row; a gate that is not declared.
        "Bare": ("algorithm", algorithm.Algorithm, {"direction": lambda self, grad, lr, momentum: plain(lr, grad)}),
        "Forgetful": ("algorithm", algorithm.Algorithm, {
            "slots": ("previous",), "direction": lambda self, grad, lr, momentum, previous: (plain(lr, grad),),
        }),
        "Total": ("algorithm", algorithm.Algorithm, {
            "direction": lambda self, grad, lr, momentum: (plain(lr, grad).sum(-2, keepdim=True),),
        }),
        "Mean": ("algorithm", algorithm.Algorithm, {
            "slots": ("mean",), "direction": lambda self, grad, lr, momentum, mean: (plain(lr, grad), grad.mean(-1)),
        }),
        "Rolling": ("algorithm", algorithm.Algorithm, {
            "direction": lambda self, grad, lr, momentum: (plain(momentum * lr, grad),),
        }),
        # An answer without the sum.
        "Spread": ("structure", structure.Structure, {
            "shapes": lambda self, d_phi, d_v: {"weight": (d_v, d_phi)},
            "predict": lambda self, memory, p: memory[0] * p.unsqueeze(-2),
        }),
        # The mean of all memories; one column; a gate that is not declared, and in a form without a kernel.
        "Centred": ("retention", retention.Retention, {
            "step": lambda self, memory, direction, retain: memory + direction - memory.mean(0, keepdim=True),
        }),
        "Narrow": ("retention", retention.Retention, {
            "step": lambda self, memory, direction, retain: (memory + direction)[..., :1],
        }),
        "Fading": ("retention", retention.Retention, {"retain": 0.5, "step": decayed}),
        "Sorted": ("retention", retention.Retention, {
            "retain": 0.5,
            "step": lambda self, memory, *rest: decayed(self, memory.sort(-1).values, *rest),
        }),
        # The sum of a row; a start without the first column.
        "Summed": ("link", retention.Link, {"memory": lambda self, dual: dual.sum(-1, keepdim=True)}),
        "Late": ("link", retention.Link, {
            "memory": lambda self, dual: dual.sinh(), "start": lambda self, weights: weights[..., 1:],
        }),
        # A loss that hears of no answer; the mean error for a gradient; a curve said to be linear.
        "Deaf": ("bias", bias.Bias, {"loss": lambda self, pred, target: target.square().sum(-1)}),
        "Lone": ("bias", bias.Bias, {
            "loss": squares, "grad": lambda self, pred, target: (pred - target).mean(-1, keepdim=True),
        }),
        "Straight": ("bias", bias.Bias, {"linear": True, "loss": LogCosh.loss}),
    }[name]  # fmt: skip
    made = knob(name, base, **own)
    return {"retention": retention.Bregman(link=made)} if family == "link" else {family: made}


@pytest.mark.spec("RULE-ANY-I1")
@pytest.mark.parametrize(("name", "sentence"), [
    ("Bare", r"algorithm 'bare_of_a_user': direction must return the tuple \(direction,\), got a Tensor"),
    ("Forgetful", r"direction must return the tuple \(direction, previous\), got 1 of them"),
    ("Spread", r"structure.spread_of_a_user.predict: shape \[4, 3, 3\], expected \[4, 3\]"),
    ("Centred", "retention.centred_of_a_user: a memory beside others against the same alone"),
    ("Summed", r"retention.bregman.weights of Bregman\(link='summed_of_a_user'\) must be \[1, 3, 3\]"),
    ("Deaf", "bias.deaf_of_a_user: the loss does not depend on pred"),
    ("Fading", "step` of 'fading_of_a_user' reads the retain gate, which it is not declared to take; set uses_retain"),
    ("Sorted", "retention.sorted_of_a_user: it reads the retain gate, which it does not declare; set uses_retain"),
    ("Rolling", "algorithm.rolling_of_a_user: it reads the momentum gate, which it does not declare"),
    ("Straight", "bias.straight_of_a_user: declared linear, grad against a pred"),
])  # fmt: skip
def test_a_check_says_what_is_wrong_with_a_knob(name, sentence, monkeypatch):
    restore_registries(monkeypatch)
    with pytest.raises((AssertionError, ShapeError, ConfigError), match=sentence):
        check_knobs(MemoryConfig(**wrong(name), key_norm="l2"))


@pytest.mark.spec("RULE-ANY-I1")
@pytest.mark.parametrize(("name", "sentence"), [
    ("Bare", "'bare_of_a_user': direction must return the tuple"),
    ("Forgetful", "'forgetful_of_a_user': direction must return the tuple"),
    ("Spread", r"structure 'spread_of_a_user' answers \[1, 20, 1, 4, 4\] where v is \[1, 20, 1, 4\]"),
    ("Summed", r"weights of Bregman\(link='summed_of_a_user'\) must be \[1, 4, 4\], .* got torch.float64 \[1, 4, 1\]"),
    ("Late", r"start of Bregman\(link='late_of_a_user'\) must be \[N, \*\[4, 4\]\], got \[1, 4, 3\]"),
    ("Narrow", r"retention.narrow_of_a_user of Narrow\(\) must be \[1, 4, 4\], .* \[1, 4, 1\]"),
    ("Total", r"'total_of_a_user': the direction that direction returns must be \[1, 4, 4\], got \[1, 1, 4\]"),
    ("Mean", r"'mean_of_a_user': the mean that direction returns must be \[1, 4, 4\], got \[1, 4\]"),
    ("Lone", r"bias.lone_of_a_user of Lone\(\) must be \[1, 4\], as its first input is, got torch.float64 \[1, 1\]"),
])  # fmt: skip
def test_a_scan_refuses_knobs_that_give_something_else(name, sentence, monkeypatch):
    restore_registries(monkeypatch)
    q, k, v = torch.randn(3, 1, 20, 1, 4).unbind()
    with pytest.raises(ShapeError, match=sentence):
        memory_scan(MemoryConfig(**wrong(name), key_norm="l2"), q, k, v, Gates(lr=0.1), engine="sequential")
