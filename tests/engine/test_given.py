"""What is passed in: one sentence for what cannot be used, and everything that can."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from hecate import Gates, MemoryConfig, memory_scan, memory_step, phi
from hecate.cms import CMS, CMSConfig
from hecate.engine import memory_features
from hecate.errors import ConfigError, HecateError, ShapeError
from hecate.nn import LinearAttention, Memory, PerformerAttention, SlidingAttention, linear_attention
from tests.memories import case_of, config_of, flat_state

X = torch.ones(2, 4, 3, 5)
LR = X[..., 0] / 2
ROWS = torch.ones(2, 4, dtype=torch.bool)
DECAY = MemoryConfig(retention="decay", algorithm="momentum")
LINEAR = MemoryConfig(feature_map=phi.Linear(d_phi=7))
MAPPED = MemoryConfig(feature_map=phi.RandomFourier(d_phi=8), key_norm="l2")


def scan(**changes: Any) -> Any:
    given = {"config": MemoryConfig(), "q": X, "k": X, "v": X, "gates": Gates(0.5)}
    return memory_scan(**{**given, **changes})


def step(**changes: Any) -> Any:
    x = X[:, 0]
    given = {"config": MemoryConfig(), "q": x, "k": x, "v": x, "gates": Gates(0.5)}
    return memory_step(**{**given, **changes})


def features(**changes: Any) -> Any:
    given = {"inner": MemoryConfig(), "q": X, "k": X, "v": X, "gates": Gates(0.5)}
    return memory_features(**{**given, **changes})


def attention(**changes: Any) -> Any:
    return linear_attention(**{"q": X, "k": X, "v": X, **changes})


KINDS: dict[str, Any] = {"list": [[1.0]], "array": X.numpy(), "number": 1.0, "text": "x"}
PLACES: dict[Callable[..., Any], list[str]] = {
    scan: [
        *("q", "k", "v", "write_mask", "reset_mask", "cu_seqlens", "gates", "phi_params"),
        *("state", "initial", "config"),
    ],
    step: ["q", "k", "v", "gates", "phi_params", "state", "initial", "config"],
    features: ["q", "k", "v", "write_mask", "reset_mask", "gates", "phi_params", "state", "inner"],
    attention: ["q", "k", "v", "write_mask", "reset_mask", "cu_seqlens", "params", "state"],
}


@pytest.mark.spec("ENG-CALL-I1")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("call", "name"),
    [(call, name) for call, names in PLACES.items() for name in names],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_what_is_no_tensor_is_one_sentence(call, name, kind):
    with pytest.raises(HecateError) as caught:
        call(**{name: KINDS[kind]})
    text = str(caught.value)
    assert len(text.splitlines()) == 1
    assert {"inner": "config", "params": "phi_params"}.get(name, name) in text


STATE = scan()[1]
PARAMS = MAPPED.feature_map.init(5, heads=3, generator=torch.Generator())
REFUSED: dict[str, tuple[Callable[..., Any], dict[str, Any], list[str]]] = {
    "None for k": (scan, {"k": None}, ["k must be a tensor", "None"]),
    "None for v of a step": (step, {"v": None}, ["v must be a tensor [B, H, width]"]),
    "a step's time axis": (step, {"q": X, "k": X, "v": X}, ["q must be [B, H, width]", "[2, 4, 3, 5]"]),
    "a dict for the config": (scan, {"config": {"bias": "dot"}}, ["MemoryConfig", "(dict)"]),
    "a tuple of gates": (scan, {"gates": (0.1, None, None)}, ["Gates(lr, retain, momentum)", "(tuple)"]),
    "a text as a gate": (scan, {"gates": Gates("high")}, ["gates.lr", "'high'"]),
    "a list as a gate": (scan, {"gates": Gates([0.1])}, ["gates.lr", "[2, 4, 3]", "(list)"]),
    "a tensor of params": (scan, {"config": LINEAR, "phi_params": X}, ["phi_params", "'learned'"]),
    "a tensor for the state": (scan, {"state": X}, ["state must be the MemoryState"]),
    "a state's list": (scan, {"state": STATE._replace(slots=[])}, ["state.slots", "mapping"]),
    "a state's number": (scan, {"state": STATE._replace(position=0)}, ["state.position", "(int)"]),
    "a state's None": (
        scan,
        {"state": STATE._replace(memory={"weight": None})},
        ["state.memory['weight'] must be a tensor", "None"],
    ),
    "an initial tensor": (scan, {"initial": X}, ["initial must be a mapping"]),
    "a float mask": (features, {"write_mask": ROWS.float()}, ["write_mask must be bool", "float"]),
}


@pytest.mark.spec("ENG-CALL-I1")
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_used_is_named(name):
    call, changes, words = REFUSED[name]
    with pytest.raises(HecateError) as caught:
        call(**changes)
    for word in words:
        assert word in str(caught.value), str(caught.value)


def changed(group: str, name: str, change: Callable[[Tensor], Any]) -> dict[str, Any]:
    return {**PARAMS, group: {**PARAMS[group], name: change(PARAMS[group][name])}}


W = "w"
BAD_PARAMS: dict[str, tuple[Any, list[str]]] = {
    "device": (changed("frozen", W, lambda w: w.to("meta")), ["'w' is on meta", "k on cpu"]),
    "dtype": (changed("frozen", W, lambda w: w.long()), ["'w' must be floating point", "int64"]),
    "complex": (changed("frozen", W, lambda w: w.cfloat()), ["'w' must be floating", "complex64"]),
    "shape": (changed("frozen", W, lambda w: w[..., :3]), ["'w'", "[3, 5, 8]", "[3, 5, 3]"]),
    "rank": (changed("frozen", W, lambda w: w[0, 0, 0]), ["'w'", "[3, 5, 8]", "[]"]),
    "heads": (changed("frozen", W, lambda w: w[:2]), ["'w' is for 2 heads", "k has 3"]),
    "no tensor": (changed("frozen", W, lambda w: w.tolist()), ["'frozen'", "['w'] must be a tensor"]),
    "a name": ({"learned": {}, "frozen": {"a": PARAMS["frozen"][W]}}, ["'w'", "'a'", "another map"]),
    "one missing": ({"learned": {}, "frozen": {}}, ["'w'", "another map"]),
    "the group": ({"learned": PARAMS["frozen"], "frozen": {}}, ["'frozen'", "another map"]),
    "no groups": ({"w": X}, ["'learned' and 'frozen'"]),
    "a list": ({"learned": [X], "frozen": {}}, ["phi_params['learned']", "mapping"]),
}


@pytest.mark.spec("ENG-CALL-I6")
@pytest.mark.parametrize("name", BAD_PARAMS)
def test_parameters_that_are_not_those_of_the_map(name):
    params, words = BAD_PARAMS[name]
    for call in (scan, step):
        with pytest.raises((ConfigError, ShapeError)) as caught:
            call(config=MAPPED, phi_params=params)
        for word in words:
            assert word in str(caught.value), str(caught.value)
    with pytest.raises((ConfigError, ShapeError)):
        attention(feature_map=MAPPED.feature_map, params=params, normalizer="none")


@pytest.mark.spec("ENG-CALL-I6")
def test_parameters_of_one_head_or_another_precision_serve():
    one = MAPPED.feature_map.init(5, generator=torch.Generator(), dtype=torch.float64)
    assert scan(config=MAPPED, phi_params=one)[0].shape == X.shape
    # A map without parameters takes what its init returns, or nothing.
    assert scan(phi_params={"learned": {}, "frozen": {}})[0].shape == X.shape
    with pytest.raises(ConfigError, match="another map"):
        scan(phi_params=one)


def at(value: float, *where: int) -> Tensor:
    """LR with a value at a place."""
    return LR.index_put(tuple(torch.tensor(index) for index in where), torch.tensor(value, dtype=LR.dtype))


@pytest.mark.spec("ENG-CALL-I5")
@pytest.mark.parametrize(
    ("name", "value", "limit"),
    [
        ("lr", -0.25, ">= 0"),
        ("retain", 1.5, "[0, 1]"),
        ("retain", -1e-3, "[0, 1]"),
        ("momentum", 1.25, "[0, 1]"),
        ("momentum", -1.0, "[0, 1]"),
    ],
)
def test_gates_out_of_range_are_refused_with_their_place(name, value, limit):
    gate = at(value, 1, 2, 0)
    bad = Gates(**{"lr": LR, name: gate})
    with pytest.raises(ConfigError) as caught:
        scan(config=DECAY, gates=bad)
    for word in (f"gates.{name} must be", limit, f"got {value:g} at batch row 1, token 2, head 0"):
        assert word in str(caught.value), str(caught.value)
    with pytest.raises(ConfigError, match=f"{value:g}"):
        scan(config=DECAY, gates=Gates(**{name: value}))
    with pytest.raises(ConfigError, match="batch row 1, token 0, head 0"):
        step(config=DECAY, gates=Gates(**{name: gate[:, 2]}))
    # Where nothing is written a gate may hold anything.
    mask = ROWS.clone()
    mask[1, 2] = False
    scan(config=DECAY, gates=bad, write_mask=mask)
    # What may not be looked at is not.
    meta = [X.to("meta"), Gates(**{n: g if g is None else g.to("meta") for n, g in bad._asdict().items()})]
    assert memory_scan(DECAY, meta[0], meta[0], meta[0], meta[1])[0].is_meta
    torch.func.vmap(lambda g: scan(config=DECAY, gates=Gates(**{name: g}))[0])(gate[None])


@pytest.mark.spec("ENG-CALL-I5")
def test_a_gate_per_channel_names_the_channel():
    retain = X.clone()
    retain[0, 1, 2, 4] = 2.0
    with pytest.raises(ConfigError, match="2 at batch row 0, token 1, head 2, channel 4"):
        scan(config=DECAY, gates=Gates(retain=retain))
    edges = torch.stack([0 * LR, 0 * LR + 1])
    for gate in edges:
        scan(config=DECAY, gates=Gates(gate, gate, gate))


LAYERS: dict[str, Callable[[], torch.nn.Module]] = {
    "memory": lambda: Memory(8, 2),
    "cms": lambda: CMS(8, 2, CMSConfig(levels=[{"name": "a", "period": 2}])),
    "linear": lambda: LinearAttention(8, 2),
    "performer": lambda: PerformerAttention(8, 2),
    "sliding": lambda: SlidingAttention(8, 2, window=4),
}


@pytest.mark.spec("ENG-CALL-I1")
@pytest.mark.parametrize("name", LAYERS)
def test_layers_say_what_they_were_given(name):
    layer, x = LAYERS[name](), torch.ones(1, 3, 8)
    for bad in (*KINDS.values(), None, x.long(), x[0], x.to("meta")):
        with pytest.raises(HecateError):
            layer(bad)
    for key in ("state", "write_mask", "reset_mask"):
        for bad in KINDS.values():
            with pytest.raises(HecateError, match=key):
                layer(x, **{key: bad})


@pytest.mark.spec("RULE-DTYPE-D1")
@pytest.mark.parametrize("length", [0, 1, 40])
def test_a_state_keeps_its_precision(length):
    fields = {"feature_map": "elu", "bias": "dot", "normalizer": "sum"}
    for more in ({}, {"chunk": 3, "commit": "chunk"}):
        wide = MemoryConfig(state_dtype="float64", **fields, **more)
        single = MemoryConfig(**fields, **more)
        x = torch.randn(1, length + 2, 2, 3, generator=torch.Generator().manual_seed(0)).float()
        _, state = memory_scan(wide, x, x, x, Gates(0.5))
        part = x[:, :length]
        y, after = memory_scan(single, part, part, part, Gates(0.5), state=state)
        expected, true = memory_scan(wide, part, part, part, Gates(0.5), state=state)
        assert y.dtype == torch.float32 and torch.equal(y, expected)
        for name, item in flat_state(after).items():
            assert torch.equal(item, flat_state(true)[name])
            assert item.dtype in (torch.float64, torch.int64)


@pytest.mark.spec("ENG-SCAN-I3", "ENG-SCAN-I4")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_leaves_views_and_narrow_inputs_are_read_and_left_alone(dtype):
    case = case_of(config_of(retention="decay", key_norm="l2"), length=6, dtype=torch.float32)
    tensors = [x.to(dtype) for x in (case.q, case.k, case.v)]
    y, _ = memory_scan(case.config, *tensors, Gates(*case.gates))
    strange = [x.mT.contiguous().mT.detach().requires_grad_() for x in tensors]
    before = [(x._version, x.detach().clone()) for x in strange]
    again, _ = memory_scan(case.config, *strange, Gates(*case.gates))
    again.float().sum().backward()
    assert again.dtype == dtype and torch.equal(again, y)
    for x, (version, old) in zip(strange, before, strict=True):
        assert x._version == version and torch.equal(x, old) and x.grad.dtype == dtype
