"""One token by the short way: the bits, the errors and the states of the whole way."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils import _pytree as pytree

import hecate
from hecate import Gates, MemoryConfig, MemoryState, memory_scan, memory_step, named_rule, phi
from hecate.engine import Stepper, scan
from hecate.engine.call import MOST
from hecate.errors import ConfigError, HecateError, NonFiniteError, ShapeError
from hecate.rule import RULES

FLOAT: Any = {"dtype": torch.float32}
VARIANTS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "read before": {"read": "before"},
    "key_norm": {"key_norm": "l2"},
    "key_norm sum": {"key_norm": "sum", "feature_map": "elu"},
    "normalized": {"step": "normalized"},
    "implicit": {"step": "implicit", "key_norm": "l2"},
    "query_scale": {"query_scale": "key_dim"},
    "chunk": {"chunk": 3},
    "commit": {"chunk": 2, "commit": "chunk"},
    "early": {"decay_order": "before_gradient"},
    "early chunk": {"decay_order": "before_gradient", "chunk": 3},
    "early momentum": {"decay_order": "before_gradient", "algorithm": "momentum"},
    "nesterov": {"algorithm": {"kind": "momentum", "nesterov": True}},
    "dual": {"retention": "kl"},
    "mlp": {"structure": "mlp"},
    "vector": {"structure": "vector"},
    "drawn map": {"feature_map": phi.RandomFourier(d_phi=6)},
    "learned map": {"feature_map": phi.Linear(d_phi=5)},
    "positions": {"feature_map": "cosformer"},
    "propagate": {"on_nonfinite": "propagate"},
    "float64": {"state_dtype": "float64"},
    "normalizer": {"normalizer": "sum", "feature_map": "elu", "bias": "dot"},
    "normalizer of l2": {"normalizer": "sum", "feature_map": "elu", "step": "normalized"},
}
GATES = ("none", "numbers", "tensors", "channels")


@pytest.fixture(autouse=True)
def without_grad() -> Any:
    with torch.no_grad():
        yield


def gates_of(kind: str, config: MemoryConfig, lead: tuple[int, ...], width: int, g: torch.Generator) -> Gates:
    decays, moves = config.retention.uses_retain, config.algorithm.uses_momentum
    if kind in ("none", "numbers"):
        number = kind == "numbers"
        return Gates(0.05, 0.9 if number and decays else None, 0.5 if number and moves else None)
    wide = (*lead, config.feature_map.output_dim(width)) if kind == "channels" and config.structure.linear else lead

    def draw(shape: tuple[int, ...], top: float) -> Tensor:
        return top * torch.rand(shape, generator=g, **FLOAT)

    return Gates(draw(lead, 0.1), draw(wide, 1.0) if decays else None, draw(lead, 0.9) if moves else None)


def token(config: MemoryConfig, kind: str, g: torch.Generator, lead: tuple[int, ...] = (3, 2), width: int = 6) -> Any:
    q, k, v = (torch.randn(*lead, width, generator=g, **FLOAT) for _ in range(3))
    return F.normalize(q, dim=-1), F.normalize(k, dim=-1), v, gates_of(kind, config, lead, width, g)


def whole(
    config: MemoryConfig, q: Tensor, k: Tensor, v: Tensor, gates: Gates, **given: Any
) -> tuple[Tensor, MemoryState]:
    """The token loop, which has no short way."""
    timed = Gates(*(g.unsqueeze(1) if isinstance(g, Tensor) else g for g in gates))
    y, state = memory_scan(config, *(x.unsqueeze(1) for x in (q, k, v)), timed, engine="sequential", **given)
    return y.squeeze(1), state


def same(a: Any, b: Any) -> bool:
    mine, others = (pytree.tree_flatten_with_path(tree)[0] for tree in (a, b))
    pairs = [(x, y) for (at, x), (where, y) in zip(mine, others, strict=True) if at == where]
    equal = (x is y if x is None or y is None else x.dtype == y.dtype and torch.equal(x, y) for x, y in pairs)
    return len(pairs) == len(mine) and all(equal)


def walk(
    config: MemoryConfig, kind: str = "tensors", dtype: torch.dtype = torch.float32, width: int = 6, tokens: int = 4
) -> None:
    """Steps beside the whole way: the same bits at every token, of outputs and of all that is carried."""
    g, state = torch.Generator().manual_seed(0), None
    given: Any = {"phi_params": config.feature_map.init(width, heads=2, generator=g, **FLOAT)}
    for _ in range(tokens):
        q, k, v, gates = token(config, kind, g, width=width)
        q, k, v = (x.to(dtype) for x in (q, k, v))
        expected = whole(config, q, k, v, gates, state=state, **given)
        assert same(memory_step(config, q, k, v, gates, state=state, **given), expected)
        state = expected[1]


@pytest.fixture
def short_only(monkeypatch: pytest.MonkeyPatch) -> Any:
    """From its call on, the whole way fails."""

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("the whole way")

    return lambda: monkeypatch.setattr(scan, "whole_scan", refuse)


@pytest.mark.spec("ENG-STEP-I2")
@pytest.mark.parametrize("name", [name for name, rule in RULES.items() if rule.config.writes == 1])
def test_steps_of_every_rule_have_the_bits_of_the_whole_way(name: str):
    config = named_rule(name)
    walk(config, width=20)
    walk(config, dtype=torch.bfloat16, width=20)
    walk(config.model_copy(update={"read": "before"}), "numbers", width=20)


@pytest.mark.spec("ENG-STEP-I2")
@pytest.mark.parametrize("kind", GATES)
@pytest.mark.parametrize("fields", VARIANTS.values(), ids=VARIANTS)
def test_every_convention_and_gates_of_every_kind(kind: str, fields: dict[str, Any]):
    config = MemoryConfig.model_validate({"retention": "decay", **fields})
    walk(config, kind)
    assert len(config.programs) == 1


UNIT_LR: dict[str, dict[str, Any]] = {
    **{step: {"step": step} for step in ("raw", "implicit", "flow", "normalized", "key_normalized")},
    "dampened": {"algorithm": {"kind": "momentum", "lr": 1.0, "dampening": True}},
}


@pytest.mark.spec("ENG-STEP-I2")
@pytest.mark.parametrize("gates", [Gates(), Gates(1.0)], ids=["default", "number"])
@pytest.mark.parametrize("fields", UNIT_LR.values(), ids=UNIT_LR)
def test_an_lr_of_one_is_divided_and_dampened_like_any_other(fields: dict[str, Any], gates: Gates):
    config, g, state = MemoryConfig.model_validate(fields), torch.Generator().manual_seed(0), None
    for _ in range(4):
        q, k, v, _ = token(config, "none", g)
        expected = whole(config, q, k, v, gates, state=state)
        assert same(memory_step(config, q, k, v, gates, state=state), expected)
        state = expected[1]


@pytest.mark.parametrize("fields", VARIANTS.values(), ids=VARIANTS)
def test_a_second_token_goes_the_short_way(fields: dict[str, Any], short_only: Any):
    config, g = MemoryConfig.model_validate({"retention": "decay", **fields}), torch.Generator().manual_seed(0)
    params = config.feature_map.init(6, heads=2, generator=g, **FLOAT)
    given: Any = {"phi_params": params if params["learned"] or params["frozen"] else None}
    _, state = memory_step(config, *token(config, "tensors", g), **given)
    short_only()
    for _ in range(3):
        _, state = memory_step(config, *token(config, "tensors", g), state=state, **given)


KEYED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "erase": ({"retention": "decay"}, {"erase": (6,)}),
    "erase and write": ({"decay_order": "before_gradient", "retention": "decay"}, {"erase": (), "write": (6,)}),
    "numbers": ({"retention": "decay", "read": "before"}, {"erase": 0.1, "write": 0.3}),
    "values": ({"retention": "decay"}, {"erase": 0.1, "retain_value": (6,)}),
    "momentum": ({"algorithm": "momentum"}, {"write": (6,)}),
    "nesterov": ({"algorithm": {"kind": "momentum", "nesterov": True}, "retention": "decay"}, {"retain_value": (6,)}),
    "vector": ({"structure": "vector", "bias": "huber"}, {"erase": (6,), "write": ()}),
    "dot": ({"bias": "dot"}, {"write": (6,)}),
    "dot and values": ({"bias": "dot", "retention": "decay"}, {"write": 0.7, "retain_value": (6,)}),
    "floor": ({"bias": "dot", "retention": "decay", "normalizer": "max"}, {"floor": ()}),
    "floor of a number": ({"normalizer": "max", "step": "flow"}, {"floor": 0.2}),
    "no floor": ({"bias": "dot", "normalizer": "max", "algorithm": "momentum"}, {"write": (6,)}),
    "floor of l2": ({"normalizer": "max"}, {"write": (6,), "floor": ()}),
    "chunk": ({"chunk": 3, "retention": "decay"}, {"erase": (), "write": (6,), "retain_value": (6,)}),
    "dual": ({"retention": "kl", "bias": "kl"}, {"erase": (6,), "retain_value": (6,)}),
    "float64": ({"state_dtype": "float64"}, {"erase": 0.1, "write": (6,)}),
}


@pytest.mark.spec("ENG-STEP-I2")
@pytest.mark.parametrize(("fields", "given"), KEYED.values(), ids=KEYED)
def test_gates_of_the_general_write_go_the_short_way(fields: dict[str, Any], given: dict[str, Any], short_only: Any):
    config, g = MemoryConfig.model_validate(fields), torch.Generator().manual_seed(0)
    tokens = []
    for _ in range(5):
        q, k, v, gates = token(config, "tensors", g)
        own = {n: torch.rand(3, 2, *w, generator=g, **FLOAT) if type(w) is tuple else w for n, w in given.items()}
        tokens.append((q, k, v, gates._replace(**own)))
    states: list[Any] = [None]
    expected = []
    for each in tokens:
        y, state = whole(config, *each, state=states[-1])
        expected.append((y, state))
        states.append(state)
    assert same(memory_step(config, *tokens[0]), expected[0])
    short_only()
    for each, state, both in list(zip(tokens, states, expected, strict=False))[1:]:
        assert same(memory_step(config, *each, state=state), both)


@pytest.mark.parametrize("name", ["retain_value", "floor"])
def test_a_gate_out_of_range_goes_the_whole_way_which_says_so(name: str):
    config = MemoryConfig(retention="decay", bias="dot", normalizer="max" if name == "floor" else "none")
    g = torch.Generator().manual_seed(0)
    q, k, v, gates = token(config, "tensors", g)
    fine = torch.rand(3, 2, *((6,) if name == "retain_value" else ()), generator=g, **FLOAT)
    _, state = memory_step(config, q, k, v, gates._replace(**{name: fine}))
    memory_step(config, q, k, v, gates._replace(**{name: fine}), state=state)
    with pytest.raises(ConfigError, match=rf"gates\.{name} must be"):
        memory_step(config, q, k, v, gates._replace(**{name: -fine}), state=state)


def test_a_scan_of_one_token_takes_the_short_way_too():
    config, g = named_rule("gated_delta").model_copy(), torch.Generator().manual_seed(0)
    q, k, v, gates = token(config, "tensors", g, (2, 1, 3))
    _, state = memory_scan(config, q, k, v, gates)
    assert len(config.programs) == 1
    expected = memory_scan(config, q, k, v, gates, state=state, engine="sequential")
    assert same(memory_scan(config, q, k, v, gates, state=state), expected)


def test_a_state_goes_on_across_looks():
    config, g, state = MemoryConfig(retention="decay", key_norm="l2"), torch.Generator().manual_seed(0), None
    for turn in range(3 * len(GATES)):
        q, k, v, gates = token(config, GATES[turn % 4], g)
        v = v.bfloat16() if turn % 3 else v
        expected = whole(config, q, k, v, gates, state=state)
        assert same(memory_step(config, q, k, v, gates, state=state), expected)
        state = expected[1]
    wider = whole(config, q.double(), k, v, gates, state=state)  # raises the state's precision, from each of its kinds
    for given in (state, state, wider[1], wider[1]):
        both = memory_step(config, q.double(), k, v, gates, state=given)
        assert same(both, whole(config, q.double(), k, v, gates, state=given))


def test_strided_expanded_and_shared_inputs():
    for fields in ({}, {"key_norm": "l2"}, {"feature_map": phi.RandomFourier(d_phi=8)}, {"structure": "mlp"}):
        config, g = MemoryConfig.model_validate({"retention": "decay", **fields}), torch.Generator().manual_seed(0)
        params = config.feature_map.init(8, heads=4, generator=g, **FLOAT)
        x = torch.randn(8, 4, 3, generator=g, **FLOAT).permute(2, 1, 0)
        wide = torch.randn(3, 4, 24, generator=g, **FLOAT)
        parts = wide.split(8, -1)
        row = torch.randn(4, 1, generator=g, **FLOAT).expand(3, 4, 8)
        rate = torch.rand(1, 4, generator=g, **FLOAT).expand(3, 4) / 50
        for q, k, v in ((x, x, x), parts, (parts[0], row, parts[0])):
            state = whole(config, q, k, v, Gates(rate), phi_params=params)[1]
            for _ in range(2):
                expected = whole(config, q, k, v, Gates(rate), state=state, phi_params=params)
                assert same(memory_step(config, q, k, v, Gates(rate), state=state, phi_params=params), expected)


def bad_calls(config: MemoryConfig, good: dict[str, Any]) -> dict[str, dict[str, Any]]:
    q, v, lr, state = good["q"], good["v"], good["gates"].lr, good["state"]
    far = lr.clone()
    far[1, 0] = -0.5
    broken = v.clone()
    broken[2, 1, 0] = float("inf")
    part = dict(state.memory)
    return {
        "a gate out of range": {"gates": Gates(far, 0.9)},
        "a number out of range": {"gates": Gates(lr, 1.5)},
        "a gate that is no number": {"gates": Gates(lr * float("nan"), 0.9)},
        "a gate of another kind": {"gates": Gates([0.1], 0.9)},
        "no such gate": {"gates": Gates(lr, 0.9, 0.5)},
        "no gates": {"gates": 0.5},
        "an infinite value": {"v": broken},
        "an infinite query": {"q": q / 0},
        "a wider query": {"q": q[..., :3]},
        "whole numbers": {"q": q.long()},
        "no tensor": {"v": None},
        "another rank": {"q": q[0], "k": q[0], "v": v[0]},
        "a smaller state": {"state": state._replace(memory={"weight": part["weight"][:, :1]})},
        "an unknown name": {"state": state._replace(memory={"w": part["weight"]})},
        "no state": {"state": 1},
        "parameters of another map": {"phi_params": {"learned": {"w": q}, "frozen": {}}},
        "weights of another size": {"initial": {"weight": q}},
        "no config": {"config": "delta"},
    }


@pytest.mark.spec("ENG-STEP-I2")
def test_what_is_wrong_is_said_as_ever_and_the_state_survives():
    def said(call: dict[str, Any]) -> str:
        with pytest.raises(HecateError) as info:
            memory_step(**call)
        return f"{type(info.value).__name__}: {info.value}"

    config, fresh = (MemoryConfig(retention="decay") for _ in range(2))
    q, k, v, gates = token(config, "tensors", torch.Generator().manual_seed(0))
    good: dict[str, Any] = {"config": config, "q": q, "k": k, "v": v, "gates": Gates(gates.lr, 0.9), "name": "level 1"}
    for _ in range(3):
        _, good["state"] = memory_step(**good)
    kept = copy.deepcopy(good["state"])
    assert config.programs
    for what, change in bad_calls(config, good).items():
        assert said({**good, **change}) == said({**good, "config": fresh, **change}), what
    assert not fresh.programs and same(good["state"], kept)
    with pytest.raises(ConfigError, match="must be a finite number >= 0, got -0.5 at batch row 1, token 0, head 0"):
        memory_step(**{**good, **bad_calls(config, good)["a gate out of range"]})
    with pytest.raises(NonFiniteError, match="memory 'level 1' became non-finite at batch row 2, head 1, token 0"):
        memory_step(**{**good, **bad_calls(config, good)["an infinite value"]})


def test_keys_that_cannot_be_squared_or_are_zero():
    for fields in ({"key_norm": "l2"}, {"step": "normalized"}, {"step": "implicit", "bias": "dot"}):
        config, g = MemoryConfig.model_validate(fields), torch.Generator().manual_seed(0)
        q, k, v, gates = token(config, "numbers", g)
        _, state = memory_step(config, q, k, v, gates)
        for size in (1.0, 1e25, 1e-30, 0.0):
            expected = whole(config, q, k * size, v, gates, state=state)
            assert same(memory_step(config, q, k * size, v, gates, state=state), expected)


def test_autograd_and_transforms_see_the_whole_way():
    config, g = named_rule("gated_delta").model_copy(), torch.Generator().manual_seed(0)
    q, k, v, gates = token(config, "tensors", g)
    _, state = memory_step(config, q, k, v, gates)
    _, state = memory_step(config, q, k, v, gates, state=state)

    def twice(call: Any, k: Tensor, v: Tensor) -> Tensor:
        y, after = call(config, q, k, v, gates, state=state)
        more, _ = call(config, q, k, y, gates, state=after)
        return (more * more).sum()

    with torch.enable_grad():
        grads = []
        for call in (memory_step, whole):
            leaves = [k.clone().requires_grad_(), v.clone().requires_grad_()]
            grads.append(torch.autograd.grad(twice(call, *leaves), leaves, create_graph=True))
        assert same(*grads) and grads[0][0].requires_grad
        assert same(*(torch.func.grad(twice, 1)(call, k, v) for call in (memory_step, whole)))
    spread = torch.func.vmap(lambda v: memory_step(config, q, k, v, gates, state=state)[0])(torch.stack((v, 2 * v)))
    assert torch.allclose(spread[1], memory_step(config, q, k, 2 * v, gates, state=state)[0])


def test_frozen_inputs_under_autograd_and_autocast():
    config, g = named_rule("delta").model_copy(), torch.Generator().manual_seed(0)
    q, k, v, gates = token(config, "tensors", g)
    expected = whole(config, q, k, v, gates, state=(state := memory_step(config, q, k, v, gates)[1]))
    with torch.enable_grad(), torch.autocast("cpu", torch.bfloat16):
        assert same(memory_step(config, q, k, v, gates, state=state), expected)
    with torch.enable_grad():
        y, _ = memory_step(config, q, k, v, gates, state=state)
    assert torch.equal(y, expected[0]) and not y.requires_grad


def test_tensors_without_values_take_the_whole_way():
    config, x = MemoryConfig(), torch.ones(2, 3, 4, device="meta")
    _, state = memory_step(config, x, x, x)
    y, _ = memory_step(config, x, x, x, state=state)
    assert y.shape == x.shape and y.is_meta and not config.programs


def test_programs_belong_to_one_config_alone():
    config, g = named_rule("delta").model_copy(), torch.Generator().manual_seed(0)
    q, k, v, gates = token(config, "tensors", g)
    _, state = memory_step(config, q, k, v, gates)
    assert config.programs
    others = [copy.copy(config), copy.deepcopy(config), pickle.loads(pickle.dumps(config)), config.model_copy()]
    for other in others:
        assert other == config and hash(other) == hash(config) and not other.programs
    assert config.model_dump() == MemoryConfig(key_norm="l2").model_dump() == others[0].model_dump()
    kept = weakref.ref(state.memory["weight"])
    del state
    gc.collect()
    assert kept() is None  # a program holds no state


def windows(config: MemoryConfig, kind: str, length: int) -> tuple[Any, ...]:
    """Arguments of a call of so many tokens, and the state that it goes on from."""
    g = torch.Generator().manual_seed(2)
    q, k, v = torch.randn(3, 2, length, 3, 4, generator=g).mul(0.5).unbind()
    own = gates_of(kind, config, (2, length, 3), 4, g)
    params = config.feature_map.init(4, heads=3, generator=g)
    _, state = memory_scan(config, q[:, :2], k[:, :2], v[:, :2], phi_params=params)
    return q, k, v, own, params, state


@pytest.mark.spec("ENG-STEP-I3")
@pytest.mark.parametrize("kind", GATES)
@pytest.mark.parametrize("name", ["as it is", "chunk", "commit", "early", "dual", "positions", "normalizer", "mlp"])
def test_few_tokens_have_the_bits_of_single_ones(name: str, kind: str):
    config = MemoryConfig(**{"retention": "decay", **VARIANTS[name]})
    if kind == "channels" and not config.structure.linear:
        return
    q, k, v, gates, params, state = windows(config, kind, 5)

    def at(first: int, last: int) -> tuple[Any, ...]:
        own = Gates(*(gate[:, first:last] if isinstance(gate, Tensor) else gate for gate in gates))
        return q[:, first:last], k[:, first:last], v[:, first:last], own

    y, end = memory_scan(config, *at(0, 5), phi_params=params, state=state)
    outputs, one = [], state
    for t in range(5):
        out, one = memory_scan(config, *at(t, t + 1), phi_params=params, state=one)
        outputs.append(out)
    assert torch.equal(y, torch.cat(outputs, 1))
    same = zip(pytree.tree_leaves(end), pytree.tree_leaves(one), strict=True)
    assert all(torch.equal(a, b) for a, b in same if isinstance(a, Tensor))
    expected, _ = memory_scan(config, *at(0, 5), phi_params=params, state=state, engine="sequential")
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.spec("ENG-STEP-I3")
def test_what_is_wrong_with_few_tokens_is_said_of_the_whole_call():
    config = MemoryConfig(retention="decay")
    q, k, v, _, _, state = windows(config, "none", 4)
    with pytest.raises(ShapeError, match=r"retain"):
        memory_scan(config, q, k, v, Gates(retain=torch.full((2, 5, 3), 0.5)), state=state)
    with pytest.raises(ShapeError):
        memory_scan(config, q, k[:, :3], v, state=state)
    late = v.clone()
    late[1, 2, 0, 0] = torch.inf
    with pytest.raises(NonFiniteError, match="batch row 1, head 0, token 2"):
        memory_scan(config, q, k, late, state=state)
    with torch.enable_grad():
        y, _ = memory_scan(config, q.clone().requires_grad_(), k, v, state=state)
        assert y.requires_grad


@pytest.mark.spec("ENG-STEP-I2")
def test_programs_are_bounded_in_number():
    config, g = MemoryConfig(), torch.Generator().manual_seed(0)
    q, k, v, _ = token(config, "none", g, (1, 1), 2)
    for turn in range(MOST + 5):
        memory_step(config, q, k, v, Gates(turn / 100))
    assert len(config.programs) == MOST


def test_nothing_is_changed_in_place_and_no_result_is_an_input():
    for fields in ({}, {"algorithm": "momentum"}, {"chunk": 3}, {"chunk": 3, "commit": "chunk"}, {"structure": "mlp"}):
        config, g = MemoryConfig.model_validate({"retention": "decay", **fields}), torch.Generator().manual_seed(0)
        q, k, v, gates = token(config, "tensors", g)
        _, state = memory_step(config, q, k, v, gates)
        for _ in range(3):
            before, given = copy.deepcopy(state), pytree.tree_leaves((q, k, v, state))
            y, after = memory_step(config, q, k, v, gates, state=state)
            assert same(state, before)
            held = {item.untyped_storage().data_ptr() for item in given if item is not None}
            results = [y, *(x for x in pytree.tree_leaves(after) if x is not None and x.is_floating_point())]
            assert not held & {item.untyped_storage().data_ptr() for item in results}
            state = after


@pytest.mark.spec("ENG-STEP-D2")
def test_a_stepper_holds_the_state():
    config, g = named_rule("titans_linear").model_copy(), torch.Generator().manual_seed(0)
    stepper = hecate.stepper(config, heads=2, d_key=6, d_value=6)
    assert isinstance(stepper, Stepper) and stepper.state is None
    state = None
    for _ in range(4):
        given = token(config, "tensors", g)
        y, state = memory_step(config, *given, state=state)
        assert torch.equal(stepper(*given), y) and same(stepper.state, state)
    q, k, v, gates = given
    with pytest.raises(NonFiniteError):
        stepper(q, k, v / 0, gates)
    assert same(stepper.state, state)
    for wrong, name in ((q[..., :5], "q"), (q[:, :1], "q"), (None, "q")):
        with pytest.raises(ShapeError, match=name):
            stepper(wrong, k, v, gates)
    with pytest.raises(ShapeError, match=r"v must be \[B, 2, 6\] for this stepper, got \[3, 2, 5\]"):
        stepper(q, k, v[..., :5], gates)
    on = hecate.stepper(config, state)
    assert torch.equal(on(*given), stepper(*given))


def test_a_stepper_starts_at_initial_weights_and_takes_parameters_of_phi():
    config, g = MemoryConfig(feature_map=phi.Linear(d_phi=5)), torch.Generator().manual_seed(0)
    params, start = (
        config.feature_map.init(6, heads=2, generator=g, **FLOAT),
        torch.randn(2, 6, 5, generator=g, **FLOAT),
    )
    stepper = Stepper(config, phi_params=params, initial={"weight": start}, name="a name")
    state = None
    for _ in range(3):
        given, initial = token(config, "none", g), None if state else {"weight": start}
        y, state = whole(config, *given, state=state, initial=initial, phi_params=params)
        assert torch.equal(stepper(*given), y)
    with pytest.raises(NonFiniteError, match="a name"):
        stepper(*(x / 0 for x in given[:3]))
