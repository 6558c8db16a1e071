"""A token in place, in Triton's interpreter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from hecate import Gates, MemoryConfig, stepper
from hecate.engine.triton import decode, engine, kernel, launch, loops, tiles
from hecate.errors import ConfigError
from hecate.phi import SquaredReLU

CONFIGS = [
    {"key_norm": "l2"}, {"retention": "decay", "algorithm": "momentum", "bias": "huber"}, {"retention": "kl"},
    {"retention": "elastic_net", "read": "before"}, {"retention": "sphere", "algorithm": "delta_momentum"},
]  # fmt: skip

# Of maps, norms, rules and what they are given: all that the kernel of one token makes itself, and what torch does.
MADE = [
    ({"key_norm": "l2", "retention": "decay"}, ""),
    ({"key_norm": "l2", "retention": "decay", "query_scale": "key_dim", "algorithm": "momentum"}, "half"),
    ({"feature_map": "elu", "key_norm": "sum", "retention": "decay", "decay_order": "before_gradient"}, "channels"),
    ({"feature_map": "relu", "key_norm": "l2", "bias": "huber", "read": "before"}, "values"),
    ({"feature_map": {"kind": "relu", "shift": 0.1}, "key_norm": "sum", "bias": "dot"}, "half"),
    ({"feature_map": "leaky_relu", "key_norm": "l2", "retention": "kl", "algorithm": "momentum"}, ""),
    ({"feature_map": "squared_relu", "key_norm": "sum", "bias": "kl", "retention": "decay"}, "channels"),
    ({"feature_map": "elu", "key_norm": "l2", "retention": "sphere", "algorithm": "delta_momentum"}, "half"),
    ({"key_norm": "l2", "retention": "decay", "algorithm": {"kind": "momentum", "nesterov": True}}, "channels keys"),
    ({"key_norm": "l2", "retention": "decay"}, "keys values half"), ({"key_norm": "l2", "retention": "decay"}, "write"),
    ({"feature_map": "elu", "bias": "dot", "retention": "decay"}, "write"),
    ({"feature_map": "tanh", "key_norm": "l2", "retention": "decay"}, "keys values"),
    ({"step": "normalized", "retention": "decay"}, "half"),
    ({"key_norm": "l2", "algorithm": {"kind": "momentum", "dampening": True}}, "half"),
    ({"key_norm": "l2", "retention": "kl", "algorithm": {"kind": "ftrl", "l1": 0.02}}, ""),
]  # fmt: skip


def given(config: MemoryConfig, count: int, extra: str) -> list[Any]:
    """Tokens of two rows and three heads as slices of a sequence: neither rows, nor heads, nor channels lie as in a
    tensor of their own. Numbers that bfloat16 has, in it for those that are "half"."""
    source, lead, (p, v) = torch.Generator().manual_seed(0), (2, 3, count), (10, 7)
    dtype = torch.bfloat16 if "half" in extra else torch.float32

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*lead, *shape, generator=source).to(torch.bfloat16).to(dtype).movedim(2, 0)

    q, k, values = (draw(width, 2)[..., 0] for width in (p, p, v))
    gates = {"lr": draw().sigmoid() / 4}
    if config.retention.uses_retain:
        gates["retain"] = (draw(*([p] if "channels" in extra else [])) + 2).sigmoid()
    if config.algorithm.uses_momentum:
        gates["momentum"] = draw().sigmoid() / 2
    if "values" in extra and config.retention.uses_retain:
        gates["retain_value"] = (draw(v) + 2).sigmoid()
    if "keys" in extra:
        gates |= {"erase": draw(p).sigmoid(), "write": draw().sigmoid()}
    if "write" in extra:
        gates["write"] = draw(p).sigmoid()
    return [(q[t], k[t], values[t], Gates(**{name: x[t] for name, x in gates.items()})) for t in range(count)]


def tokens(count: int, gates: tuple[bool, bool], dtype: torch.dtype = torch.float32) -> list[Any]:
    source, found = torch.Generator().manual_seed(0), []
    for _ in range(count):
        q, k, v = (torch.randn(2, 3, width, generator=source).to(dtype) for width in (10, 10, 7))
        lr, retain = (torch.rand(2, 3, generator=source) for _ in range(2))
        found.append((q, torch.nn.functional.normalize(k, dim=-1), v, Gates(0.3 * lr, retain if gates[1] else None)))
    return found


@pytest.mark.spec("ENG-TRITON-D6")
@pytest.mark.parametrize("own", CONFIGS, ids=str)
def test_a_token_in_place_is_the_functional_one(own: dict[str, Any]) -> None:
    config = MemoryConfig.model_validate({**own, "on_nonfinite": "propagate"})
    wide = MemoryConfig.model_validate({**own, "state_dtype": "float64"})
    right, mine = stepper(wide), stepper(config, in_place=True)
    places = set()
    for at, (q, k, v, gates) in enumerate(tokens(6, config.forms.gates)):
        if at == 3:
            gates = Gates(lr=0.25)  # numbers, and no more than the config's own retain
        wanted, found = right(q.double(), k.double(), v.double(), gates), mine(q, k, v, gates)
        assert float((found.double() - wanted).norm()) <= 2e-6 * float(wanted.norm()) + 1e-12
        places.add(mine.state.memory["weight"].data_ptr())
    assert len(places) == 1
    for field in ("memory", "slots"):
        for name, item in getattr(right.state, field).items():
            assert torch.allclose(getattr(mine.state, field)[name].double(), item, rtol=1e-5, atol=1e-6)


@pytest.mark.spec("ENG-TRITON-D6", "ENG-TRITON-D7")
@pytest.mark.parametrize(("own", "extra"), MADE, ids=str)
def test_features_are_made_of_what_lies_as_it_lies(own: dict[str, Any], extra: str) -> None:
    config = MemoryConfig.model_validate({**own, "on_nonfinite": "propagate"})
    right = stepper(MemoryConfig.model_validate({**own, "state_dtype": "float64"}))
    mine = stepper(config, in_place=True)
    for q, k, v, gates in given(config, 5, extra):
        exact = Gates(*(None if x is None else x.double() for x in gates))
        wanted, found = right(q.double(), k.double(), v.double(), exact), mine(q, k, v, gates)
        bound = 2.0**-7 if "half" in extra else 2e-6  # the interpreter cuts to bfloat16, and rounds nothing
        assert found.dtype == v.dtype and float((found.double() - wanted).norm()) <= bound * float(wanted.norm())
    for field in ("memory", "slots"):
        for name, item in getattr(right.state, field).items():
            off = getattr(mine.state, field)[name].double() - item
            assert float(off.norm()) <= 2e-6 * float(item.norm())


class Launches:
    """In the place of a kernel: what it is launched with, by a compiler at first, and then directly."""

    def __init__(self, names: list[str], first: bool = True) -> None:
        self.arg_names, self.calls, self.made = names, [], Launches(names, False) if first else None

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launched(*own: Any, num_warps: int = 0, **flags: Any) -> Any:
            self.calls.append({**dict(zip(self.arg_names, own, strict=flags == {})), **flags, "grid": grid})
            return self.made

        return launched


@pytest.mark.spec("ENG-TRITON-D6")
def test_a_token_is_one_launch_and_no_operation_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = Launches(loops.one_token.arg_names)
    monkeypatch.setattr(loops, "one_token", seen)
    monkeypatch.setattr(decode, "waits", lambda x: True)  # as tensors on a card
    config = MemoryConfig(key_norm="l2", retention="decay", algorithm="momentum", on_nonfinite="propagate")
    mine = stepper(config, in_place=True)
    first, *rest = given(config, 4, "")
    mine(*first)
    with profile(activities=[ProfilerActivity.CPU]) as told:
        outputs = [mine(*token) for token in rest]
    assert [event.name for event in told.events() if event.name.startswith("aten::")] == []
    (first_call,), direct = seen.calls, seen.made.calls
    assert len(direct) == 3 and len({y.data_ptr() for y in outputs}) == 1
    varies = {"q", "k", "v", "lr", "retain", "momentum"}
    for at, call in enumerate(direct):
        assert call.keys() == first_call.keys() and call["grid"] == first_call["grid"] == (2, 3, 1)
        assert all(call[name] is item for name, item in first_call.items() if name not in varies)
        q, k, v, gates = rest[at]
        assert [call[name] for name in ("q", "k", "v")] == [q, k, v] and call["retain"] is gates.retain
    other = given(config, 1, "")[0]
    mine(other[0].contiguous(), *other[1:])  # another place of its numbers is another launch
    assert [call["q_b"] for call in seen.calls] == [first[0].stride(0), 30] != [30, 30]


@pytest.mark.spec("ENG-TRITON-I1")
@pytest.mark.parametrize(
    ("own", "flags"),
    [
        ({"key_norm": "l2", "query_scale": "key_dim"}, ("loop", "token")),
        (
            {"feature_map": "elu", "key_norm": "sum", "algorithm": "momentum"},
            ("loop", "token", "narrow", "narrow gates", "channels"),
        ),
        ({"feature_map": "leaky_relu", "retention": "sphere"}, ("loop", "token", "phi_w", "narrow", "narrow gates")),
    ],
    ids=str,
)
def test_the_trial_of_a_token_sees_what_the_kernel_makes(
    own: dict[str, Any], flags: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = MemoryConfig.model_validate({"retention": "decay", **own})
    dtype = torch.bfloat16 if "narrow" in flags else torch.float32
    monkeypatch.setattr(kernel, "TRIAL", 12, raising=False)
    monkeypatch.setattr("hecate.engine.triton.parity.TRIAL", 12)

    def judged() -> str | None:
        return kernel.distrust(config, flags, dtype, "cpu", (7, 10))

    assert judged() is None
    there, back, norm, scale = launch.phi_of(config, 10)
    square = tiles.map_of(SquaredReLU())[0]
    false = {(square, back, norm, scale), (there, back, norm, 2 * scale)}
    if norm != "none":
        false.add((there, back, "none", scale))
    for phi in false:
        with monkeypatch.context() as patch:
            patch.setattr(loops, "phi_of", lambda config, width, phi=phi: phi)
            assert "its kernel differs from the token loop in float64" in (judged() or "")
    if norm == "l2":  # of queries alone
        walked = kernel._token_by_token

        def bare(config: MemoryConfig, states: Any, given: Any, dtype: torch.dtype) -> Any:
            return walked(config, states, (torch.nn.functional.normalize(given[0], dim=-1), *given[1:]), dtype)

        monkeypatch.setattr(loops, "phi_of", lambda config, width: (there, back, "none", scale))
        monkeypatch.setattr(kernel, "_token_by_token", bare)
        assert "its kernel differs from the token loop in float64" in (judged() or "")


@pytest.mark.spec("ENG-TRITON-I1")
@pytest.mark.parametrize(("own", "extra"), MADE[:3] + MADE[8:15], ids=str)
def test_the_kernel_that_is_asked_for_is_the_one_judged(
    own: dict[str, Any], extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(engine, "verdict", lambda *given: asked.append(given))
    config = MemoryConfig.model_validate({**own, "on_nonfinite": "propagate"})
    mine = stepper(config, in_place=True)
    (token,) = given(config, 1, extra)
    mine(*token)
    engine._trusted(mine.buffers.call(*token), loops=True, token=True)
    ((rule, flags, dtype, _, widths),) = asked
    assert {"loop", "token"} <= set(flags) and "l2" not in flags and widths == (7, 10)
    made = engine.raw_token(config)
    assert rule.key_norm == (config.key_norm if made else "none")
    assert rule.feature_map.kind == (config.feature_map.kind if made else "identity")
    assert ("narrow" in flags) == (made and "half" in extra) and ("narrow gates" in flags) == ("half" in extra)
    assert dtype == token[2].dtype
    gates = token[3]
    assert ("phi_w" in flags) == (gates.erase is not None or gates.write is not None)
    assert ("retain_value" in flags) == (gates.retain_value is not None)


def test_outputs_and_states_are_buffers_and_given_states_are_copied() -> None:
    config = MemoryConfig(retention="decay", on_nonfinite="propagate")
    first, *rest = tokens(4, config.forms.gates)
    start = stepper(config)
    start(*first)
    kept = start.state.memory["weight"].clone()
    mine = stepper(config, start.state, in_place=True)
    y = mine(*rest[0])
    assert mine(*rest[1]).data_ptr() == y.data_ptr()
    held = mine.state.memory["weight"]
    mine.state = start.state
    again = mine(*rest[0]).clone()
    assert mine.state.memory["weight"].data_ptr() == held.data_ptr()
    assert torch.equal(start.state.memory["weight"], kept)
    assert torch.allclose(again, start(*rest[0]), rtol=1e-5, atol=1e-6)


def test_values_in_half_precision_are_answered_in_it() -> None:
    mine = stepper(MemoryConfig(on_nonfinite="propagate"), in_place=True)
    for token in tokens(2, (True, False), torch.bfloat16):
        assert mine(*token).dtype == torch.bfloat16
    assert mine.state.memory["weight"].dtype == torch.float32


def test_what_in_place_cannot_keep_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"in_place=True overwrites .* on_nonfinite='raise'"):
        stepper(MemoryConfig(), in_place=True)
    own: dict[str, Any] = {"on_nonfinite": "propagate"}
    with pytest.raises(ConfigError, match=r"in_place=True .* normalizer='sum'"):
        stepper(MemoryConfig(bias="dot", feature_map="elu", normalizer="sum", **own), in_place=True)
    ((q, k, v, gates),) = tokens(1, (True, False))
    with pytest.raises(ConfigError, match=r"in_place=True .*structure 'mlp' has no kernel"):
        stepper(MemoryConfig(structure="mlp", **own), in_place=True)(q[..., :7], k[..., :7], v)
    with pytest.raises(ConfigError, match=r"in_place=True records no gradients"):
        stepper(MemoryConfig(**own), in_place=True)(q.requires_grad_(), k, v, gates)
    mine = stepper(MemoryConfig(**own), in_place=True)
    for _ in range(2):  # before any token of these looks, and after one
        with pytest.raises(ConfigError, match=r"gates.lr"):
            mine(q.detach(), k, v, gates._replace(lr=-gates.lr))
        mine(q.detach(), k, v, gates)
    with pytest.raises(ConfigError, match=r"gates.lr|one lr of a token"):
        mine(q.detach(), k, v, gates._replace(lr=gates.lr.unsqueeze(-1)))
