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


@pytest.mark.spec("ALG-MOM-I2")
@pytest.mark.parametrize("nesterov", [False, True])
def test_keys_that_return_among_others(nesterov):
    """64 orthogonal keys in turn: the limit is 2 (1 - momentum), far below that of one key, and both are told."""
    knob = algorithm.Momentum(momentum=0.9, nesterov=nesterov)
    assert knob.returning_step == pytest.approx(0.2) and knob.stable_step > knob.returning_step
    config = MemoryConfig(algorithm=knob, state_dtype="float64", on_nonfinite="propagate")
    keys = torch.eye(64)[torch.arange(64 * 40) % 64].reshape(1, -1, 1, 64)
    start = {"weight": torch.ones(1, 1, 64)}

    def left(lr):
        _, state = memory_scan(config, keys, keys, 0 * keys[..., :1], Gates(lr=lr, momentum=0.9), initial=start)
        return float(state.memory["weight"].abs().max())

    # The error of a key that comes back after 63 others: times 1 - lr / (1 - momentum), up to 0.9^64.
    assert left(0.19) < 0.9**40 * 2 and left(0.21) > 1.1**40 / 2
    told = "3.8" if not nesterov else "1.35714"
    with pytest.raises(ConfigError, match=rf"diverges beyond {told} where one key .* again, beyond 0\.2 where it ret"):
        MemoryConfig(key_norm="l2", algorithm=knob.model_copy(update={"lr": 4.0}))
    assert "returns" not in algorithm.GD().limits()


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
