"""The end of a gate is open: a step at the limit is allowed, one beyond it is refused or warned of,
and everything that asks asks one question."""

import math
import warnings

import numpy as np
import pytest
import torch

from hecate import Gates, MemoryConfig, algorithm, memory_scan, named_rule
from hecate.cms import CMS, SelfReferenceConfig, SelfReferential
from hecate.errors import ConfigError, StabilityWarning
from hecate.nn import Memory

KNOBS = {
    "gd": lambda lr: algorithm.GD(lr=lr),
    "momentum": lambda lr: algorithm.Momentum(lr=lr, momentum=0.5),
    "nesterov": lambda lr: algorithm.Momentum(lr=lr, momentum=0.5, nesterov=True),
    "ftrl": lambda lr: algorithm.FTRL(lr=lr, l2=0.3),
    "omega": lambda lr: algorithm.Omega(lr=lr, window=3, decay=0.7),
}
BEYOND = 1 + 1e-6


def limit_of(knob):
    return KNOBS[knob](1e-3).stable_step


def quiet(build):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return build()


@pytest.mark.spec("RULE-STABLE-D1")
@pytest.mark.parametrize("knob", KNOBS)
@pytest.mark.parametrize("bias", ["l2", "kl"])
def test_the_limit_is_allowed_and_nothing_beyond(knob, bias):
    limit = limit_of(knob) / MemoryConfig(bias=bias).bias.curvature
    config = MemoryConfig(bias=bias, key_norm="l2", algorithm=KNOBS[knob](limit))
    quiet(lambda: Memory(4, 1, config))
    x = torch.randn(1, 2, 1, 3)
    quiet(lambda: memory_scan(config, x, x, x, Gates(lr=limit)))
    with pytest.raises(ConfigError, match=r"algorithm\.lr: .*diverges beyond"):
        MemoryConfig(bias=bias, key_norm="l2", algorithm=KNOBS[knob](limit * BEYOND))
    with pytest.raises(ConfigError, match="diverges beyond"):
        memory_scan(config, x, x, x, Gates(lr=limit * BEYOND))
    memory_scan(config, x, x, x, Gates(lr=torch.full((1, 2, 1), 9.0)))  # values are not looked at


@pytest.mark.spec("RULE-STABLE-D1")
def test_reflections():
    """lr = 2 on a unit key is the reflection I - 2 k k^T; a layer's gate comes near it."""
    layer = Memory(4, 1, {"key_norm": "l2", "algorithm": {"kind": "gd", "lr": 2.0}})
    torch.nn.init.constant_(layer.gates.bias["lr"], 30.0)
    lr = layer.gates(torch.randn(1, 3, 4)).lr
    assert ((lr > 1.999) & (lr <= 2)).all()
    config, k = MemoryConfig(key_norm="l2"), torch.tensor([3.0, 4.0]).expand(1, 1, 1, 2)
    start = torch.randn(1, 2, 2)
    given = {"weight": start}
    _, state = memory_scan(config, k, k, 0 * k, Gates(lr=2.0), initial=given)
    key = k[0, 0, 0] / 5
    mirror = torch.eye(2) - 2 * torch.outer(key, key)
    assert torch.allclose(state.memory["weight"][0], start @ mirror)


@pytest.mark.spec("RULE-STABLE-D1", "NN-MEM-I9", "CMS-LAYER-I4", "SELF-ERASE-D1")
def test_layers_ask_the_same_question():
    """Keys of width 1 and unit length: every measure is exact, at the limit and beyond."""

    def rule(lr, **fields):
        return {"algorithm": {"kind": "gd", "lr": lr}, **fields}

    def level(lr):
        return {"levels": [{"name": "a", "period": 8, "memory": rule(lr)}]}

    builders = {
        "a layer": (2.0, lambda lr: Memory(1, 1, rule(lr))),
        "a window": (2.0 / 8, lambda lr: CMS(1, 1, level(lr))),
        "a box": (2.0, lambda lr: SelfReferential(1, 1, {"memory": rule(lr)})),
        "a box that erases twice": (1.0, lambda lr: SelfReferential(1, 1, {"memory": rule(lr), "erase": "twice"})),
    }
    for what, (limit, build) in builders.items():
        quiet(lambda build=build, limit=limit: build(limit))
        with pytest.warns(StabilityWarning, match="diverge beyond 2"):
            build(1.001 * limit)
        assert what
    twice = {"erase": "twice", "memory": rule(1.0, key_norm="l2")}
    SelfReferenceConfig.model_validate(twice)
    with pytest.raises(ConfigError, match="counts twice.*at most 1"):
        SelfReferenceConfig.model_validate({**twice, "memory": rule(BEYOND, key_norm="l2")})


@pytest.mark.spec("RULE-STABLE-D1")
def test_the_question_itself():
    config = MemoryConfig(algorithm={"kind": "gd", "lr": 0.5})
    assert config.diverging(4.0) is None and config.diverging(4.1) == pytest.approx(2.05)
    assert config.diverging(1.0, lr=2.5) == 2.5
    free = ({"bias": "dot"}, {"algorithm": "implicit"}, {"structure": "mlp"}, {"retention": "kl"})
    for fields in free:
        assert MemoryConfig.model_validate(fields).diverging(math.inf) is None


def transition(lr, key, erase, write):
    """What a write does to a row of the memory, in numpy: m (I - lr a b^T)."""
    return np.eye(len(key)) - lr * np.outer(erase * key, write * key)


@pytest.mark.spec("RULE-STABLE-D1")
@pytest.mark.parametrize(
    ("erase", "write"), [(1.5, 1.0), (0.5, 1.0), (2.0, 2.0), (-0.5, -3.0), (-1.0, 0.5), (0.0, 3.0)]
)
@pytest.mark.parametrize("lr", [0.3, 1.0, 1.4])
def test_numbers_for_gates_are_asked_of_the_eigenvalue(erase, write, lr):
    key = np.random.default_rng(0).normal(size=4)
    key /= np.linalg.norm(key)
    radius = np.abs(np.linalg.eigvals(transition(lr, key, erase, write))).max()
    config, k = MemoryConfig(key_norm="l2"), torch.tensor(key)[None, None, None]

    def written(count):
        many = k.expand(1, count, 1, 4)
        return memory_scan(config, many, many, 0 * many, gates, initial={"weight": torch.ones(1, 4, 4).double()})

    gates = Gates(lr, erase=erase, write=write)
    if radius > 1 + 1e-9:
        with pytest.raises(ConfigError, match="<erase phi, write phi>.*gates.erase times gates.write"):
            written(1)
        gates = Gates(torch.full((1, 60, 1), lr).double(), erase=erase, write=write)  # values are not looked at
        assert written(60)[1].memory["weight"].abs().max() > 10
    else:
        assert written(60)[1].memory["weight"].abs().max() < 10


@pytest.mark.spec("RULE-STABLE-D1")
def test_the_norm_of_a_write_whose_keys_differ():
    """Its square grows to 4/3 where erase lies in [0, 1], to 2 in [0, 2], and no eigenvalue leaves [-1, 1]."""
    rng, most = np.random.default_rng(1), {1.0: 0.0, 2.0: 0.0}
    for top, _ in [(top, seed) for top in most for seed in range(300)]:
        key = rng.normal(size=3)
        key /= np.linalg.norm(key)
        gate = top * rng.integers(0, 2, 3) if _ % 2 else top * rng.uniform(size=3)
        matrix = transition(1.0, key, gate, np.ones(3))
        norm, a, c = np.linalg.norm(matrix, 2), gate * key, gate * key @ key
        assert np.abs(np.linalg.eigvals(matrix)).max() <= 1 + 1e-12
        assert norm**2 + (1 - c) ** 2 / norm**2 == pytest.approx(2 - 2 * c + a @ a, rel=1e-9) or norm <= 1 + 1e-9
        most[top] = max(most[top], norm)
    for top, bound in ((1.0, math.sqrt(4 / 3)), (2.0, math.sqrt(2))):
        assert 0.99 * bound < most[top] <= bound + 1e-12


@pytest.mark.spec("RULE-STABLE-D1")
def test_a_gating_is_asked_for_the_most_that_it_erases():
    def config(lr, top, **fields):
        gating = {"kind": "heads", "erase": {"channels": True, "top": top}}
        return MemoryConfig.model_validate({"algorithm": {"kind": "gd", "lr": lr}, "gating": gating, **fields})

    quiet(lambda: config(1.0, 2.0, key_norm="l2"))
    with pytest.raises(ConfigError, match=r"algorithm\.lr: .*2\.1 times .* with gating 'heads'.*diverges beyond 2"):
        config(1.0, 2.1, key_norm="l2")
    quiet(lambda: config(3.9, 0.5, key_norm="l2"))
    quiet(lambda: Memory(4, 1, config(1.0, 2.0)))
    with pytest.warns(StabilityWarning, match="times 2.1, the most that erase"):
        Memory(4, 1, config(1.0, 2.1))
    quiet(lambda: named_rule("rwkv7").check_step(9.0))  # what it erases with is of its own length


@pytest.mark.spec("RULE-STEP-I1")
@pytest.mark.parametrize("rule", ["efla", "longhorn", "dgd"])
@pytest.mark.parametrize("size", [0.1, 30.0])
def test_layers_that_leave_keys_their_length_stay_bounded_in_long_streams(rule, size):
    """A step in closed form takes away a share of the error along the key, below 1 at any length: writes that repeat do
    not add up."""
    layer = quiet(lambda: Memory(8, 2, rule, generator=torch.Generator().manual_seed(0), dtype=torch.float64))
    assert layer.qk_norm == "none"
    x = size * torch.randn(1, 500, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    state, sizes = None, []
    with torch.no_grad():
        for _ in range(12):
            y, state = layer(x, state)
            sizes.append(float(state.memory.memory["weight"].norm()))
            assert y.isfinite().all()
    first, last = sizes[1] - sizes[0], sizes[-1] - sizes[-2]  # the same tokens again: what they ask for is approached
    assert last <= max(0.5 * first, 1e-9 * sizes[0]) and sizes[-1] < 10 * sizes[0]
