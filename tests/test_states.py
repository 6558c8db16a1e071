"""States saved, joined, repeated and cut into rows go on as each sequence would have alone."""

from __future__ import annotations

import io
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from torch.utils import _pytree as pytree

from hecate import states
from hecate.cms import CMS, CMSConfig, SelfReferenceConfig, SelfReferential
from hecate.errors import CheckpointError, ConfigError, ShapeError
from hecate.models import LinearTransformer, LinearTransformerConfig
from hecate.nn import Composed, LayerState, LinearAttention, Memory, PerformerAttention, SlidingAttention
from hecate.rule import MemoryState
from tests.cms.common import GATED, JOINS, cms_of
from tests.models.test_language_model import model_of
from tests.models.test_mixers import MIXERS
from tests.nn.attentions import CONFIGS
from tests.nn.layers import D_MODEL, HEADS, OTHER_RULES, layer_of, leaves, near, rules, seeded

SIZES, ATTENTION = (D_MODEL, HEADS), (16, 2)
SEED = {"generator": seeded()}


def composed(fields: dict[str, Any]) -> nn.Module:
    memory = None if fields["kind"] == "attention" else Memory(*ATTENTION, "titans_linear", **SEED)
    return Composed(*ATTENTION, fields, memory, **SEED)


def transformer(**fields: Any) -> nn.Module:
    own = {"embed_dim": D_MODEL, "hidden_size": D_MODEL, "num_layers": 2, "num_heads": HEADS, "dropout": 0.0, **fields}
    return LinearTransformer(LinearTransformerConfig(**own), **SEED).eval()


LAYERS: dict[str, Any] = {
    **{f"rule {name}": lambda name=name: layer_of(rules()[name]) for name in rules()},
    **{f"rule {name} learned firing": lambda name=name: layer_of(name, firing="learned") for name in ("gated_delta",)},
    "feature memory": lambda: layer_of("titans_linear", feature_memory="gated_delta"),
    "projection": lambda: layer_of({"chunk": 3}, query_projection="orthogonal"),
    "cosformer": lambda: layer_of({"feature_map": {"kind": "cosformer", "max_length": 16}}),
    **{f"cms {'-'.join(join)}": lambda join=join: cms_of(*join) for join in JOINS},
    "cms gated": lambda: cms_of(levels=GATED),
    "carry": lambda: CMS(*SIZES, CMSConfig(levels=[{"name": "ages"}], composition="carry", carry_levels=4), **SEED),
    "self": lambda: SelfReferential(*SIZES, SelfReferenceConfig(chunk=3), conv_kernel=3, **SEED),
    "self feature": lambda: SelfReferential(*SIZES, None, feature_memory="gated_delta", conv_kernel=3, **SEED),
    **{f"composed {name}": lambda fields=fields: composed(fields) for name, fields in CONFIGS.items()},
    "sliding": lambda: SlidingAttention(*ATTENTION, window=5, **SEED),
    "sliding all": lambda: SlidingAttention(*ATTENTION, window=None, **SEED),
    "linear attention": lambda: LinearAttention(*SIZES, **SEED),
    "performer": lambda: PerformerAttention(*SIZES, **SEED),
    "transformer": transformer,
    "transformer last": lambda: transformer(output="last"),
    **{f"model {name}": lambda name=name: model_of(**MIXERS[name][0]) for name in MIXERS},
}
RULES = (*OTHER_RULES, "titans", "kda", "gated_mesa", "raven", "mamba3", "osdn", "gated_delta learned firing")
SEVERAL = [*(f"rule {name}" for name in RULES), "feature memory", "projection", "cosformer", "cms nested-sum", "carry"]
SEVERAL += ["self", "composed mac", "composed mal", "sliding", "sliding all", "linear attention", "performer"]
SEVERAL += ["transformer last", "model hope", "model mag"]


def given(layer: nn.Module, length: int, seed: int) -> Any:
    generator = seeded(seed)
    if hasattr(layer, "embedding"):
        return torch.randint(layer.config.vocab_size, (3, length), generator=generator)
    width = getattr(layer, "d_model", None) or D_MODEL
    return torch.randn(3, length, width, generator=generator)


def goes_on(name: str, tmp_path: Any) -> None:
    """Everything that STATE-ROWS-I1 and STATE-LOAD-I1 promise, of three sequences of different lengths."""
    layer = LAYERS[name]()
    x, more = given(layer, 7, 2), given(layer, 3, 3)
    apart = [layer(x[i : i + 1, : 4 + i])[1] for i in range(3)]
    alone = [layer(more[i : i + 1], state) for i, state in enumerate(apart)]
    if name == "sliding all" or (name.startswith("composed") and LAYERS[name]().attention.window is None):
        with pytest.raises(ShapeError, match="only the number of rows may differ"):
            states.stack(apart)
        apart = [layer(x[i : i + 1])[1] for i in range(3)]
        alone = [layer(more[i : i + 1], state) for i, state in enumerate(apart)]
    before = [leaf.clone() for leaf in leaves(apart)]
    together = states.stack(apart)

    order = [2, 0, 0, 1]
    y, after = layer(more[order], states.rows(together, order))
    near(y, torch.cat([alone[i][0] for i in order]), what="y")
    near(after, states.stack([alone[i][1] for i in order]), what="state")
    near(layer(more[1:], states.rows(together, slice(1, None)))[0], torch.cat([alone[i][0] for i in (1, 2)]))
    y, _ = layer(more.repeat_interleave(2, 0), states.repeat(together, 2))
    near(y[1::2], torch.cat([y for y, _ in alone]))

    states.save(together, tmp_path / "state.safetensors")
    stream = io.BytesIO()
    torch.save(together, stream)
    stream.seek(0)
    expected, _ = layer(more, together)
    for found in (states.load(tmp_path / "state.safetensors"), torch.load(stream, weights_only=True)):
        assert pytree.tree_structure(found) == pytree.tree_structure(together)
        same = zip(leaves(found), leaves(together), strict=True)
        assert all(torch.equal(a, b) and a.dtype == b.dtype and not a.requires_grad for a, b in same)
        assert torch.equal(layer(more, found)[0], expected)
    assert all(torch.equal(a, b) for a, b in zip(leaves(apart), before, strict=True))  # nothing was written to


@pytest.mark.spec("STATE-ROWS-I1", "STATE-LOAD-I1", "STATE-TREE-D1")
@pytest.mark.parametrize("name", SEVERAL)
@torch.no_grad()
def test_going_on(name, tmp_path):
    goes_on(name, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in LAYERS if name not in SEVERAL])
@torch.no_grad()
def test_going_on_with_every_rule(name, tmp_path):
    goes_on(name, tmp_path)


@pytest.mark.spec("STATE-TO-D1")
def test_to_a_dtype_and_a_device():
    _, state = model_of(**MIXERS["hope"][0])(torch.zeros(1, 4, dtype=torch.int64))
    low = states.to(state, torch.bfloat16, "cpu")
    assert type(low[0]) is type(state[0]) and low[0].memory.conv.dtype == torch.bfloat16
    boxes = low[0].memory
    held = leaves((boxes.boxes.memory, boxes.boxes.slots, boxes.anchor, low[0].levels.levels[0].memory.pending))
    assert held and {leaf.dtype for leaf in held} == {torch.float32}
    assert boxes.boxes.position.dtype == boxes.position.dtype == torch.int64
    assert {leaf.device.type for leaf in leaves(states.to(state, "meta"))} == {"meta"}
    layer = layer_of("momentum_delta", dtype=torch.float32)
    state = layer(torch.zeros(1, 3, D_MODEL, dtype=torch.float32))[1].to(torch.bfloat16)
    assert {leaf.dtype for leaf in (state.gating or {}).values()} <= {torch.float32}
    assert layer(torch.zeros(1, 1, D_MODEL, dtype=torch.float32), state.to(torch.float32))[0].isfinite().all()
    for wrong in ((), (torch.int64,), ("cpu", "meta"), (torch.float32, torch.float64)):
        with pytest.raises(ConfigError, match="a device, a floating point dtype or one of each"):
            state.to(*wrong)


def test_gradients_flow_through_rows_and_stack():
    layer = layer_of("titans_linear")
    x = torch.randn(2, 4, D_MODEL, generator=seeded(5), requires_grad=True)
    whole = torch.autograd.grad(layer(x[:, 2:], layer(x[:, :2])[1])[0].square().sum(), x)[0]
    _, state = layer(x[:, :2])
    state = LayerState.stack([state.rows([1]), state.rows([0])]).rows([1, 0]).repeat(1)
    near(torch.autograd.grad(layer(x[:, 2:], state)[0].square().sum(), x)[0], whole)
    assert not any(leaf.requires_grad for leaf in leaves(state.detach()))


@pytest.fixture
def state() -> LayerState:
    return layer_of("titans_linear")(torch.zeros(2, 3, D_MODEL))[1]


@pytest.mark.spec("STATE-ROWS-I1")
def test_rows_that_cannot_be(state):
    assert state.rows(torch.tensor([False, True])).conv.shape[0] == 1
    assert state.rows([]).conv.shape[0] == 0 and state.rows([-1]).conv.shape[0] == 1
    for which, sentence in {
        "number": (1, "one row is [i]"),
        "fractions": ([0.5], "whole numbers"),
        "text": ("0", "whole numbers"),
        "table": ([[0]], "whole numbers"),
        "mask": (torch.ones(3, dtype=torch.bool), "must be bool [2]"),
        "beyond": ([2], "rows [2] of a state of 2 sequences"),
        "before": ([-3], "rows [-3]"),
    }.values():
        with pytest.raises(ShapeError) as caught:
            state.rows(which)
        assert sentence in str(caught.value)
    with pytest.raises(ShapeError, match="a pytree of tensors"):
        states.rows(None, [0])
    with pytest.raises(ShapeError, match=r"state\[1\] is \[3\], not by the 2 rows of state\[0\]"):
        states.rows((torch.zeros(2), torch.zeros(3)), [0])
    for times in (0, 1.5, True):
        with pytest.raises(ConfigError, match="a whole number of times"):
            state.repeat(times)


@pytest.mark.spec("STATE-ROWS-I1")
def test_states_that_cannot_be_stacked(state):
    with pytest.raises(ShapeError, match="no states"):
        states.stack([])
    reset = layer_of("titans_linear")(torch.zeros(1, 1, D_MODEL), reset_mask=torch.ones(1, 1, dtype=torch.bool))[1]
    with pytest.raises(ShapeError, match="state 1 has state.conv_segment, state 0 has none"):
        states.stack([state, reset])
    with pytest.raises(ShapeError, match="state.conv is torch.float32 .* in state 1, torch.float64"):
        states.stack([state, state.to(torch.float32)._replace(memory=state.memory)])
    redrawn = PerformerAttention(*SIZES, **SEED)(torch.zeros(1, 1, D_MODEL))[1]
    with pytest.raises(ShapeError, match="state.redraws belongs to all rows, and is 1 in state 1 and 0 in state 0"):
        states.stack([redrawn, redrawn._replace(redraws=redrawn.redraws + 1)])


NONE = "is not a state that hecate.states.save wrote"
TREES = {
    '{"state": "Unheard", "fields": {}}': "Unheard, a class that is not imported",
    '{"state": "LayerState", "fields": {"conv": null}}': "has the fields",
    '{"tensor": "b"}': "'b'",
    **dict.fromkeys(("[" * 10_000, "7", '"tensor"', "{}", "[1]", '{"dict": []}', '{"list": 5}', '{"state": []}'), NONE),
    **dict.fromkeys(('{"tensor": {}}', '{"list": ["tensor"]}'), NONE),
    **dict.fromkeys(('{"state": "LayerState"}', '{"state": "LayerState", "fields": []}'), NONE),
}


@pytest.mark.spec("STATE-LOAD-I1")
def test_files_that_are_no_state(state, tmp_path):
    path = tmp_path / "s"
    for wrong in (None, {}, (1.5, torch.zeros(2)), {1: torch.zeros(2)}, object()):
        with pytest.raises(CheckpointError, match=r"no state|a state is made of"):
            states.save(wrong, path)
    assert not path.exists()
    with pytest.raises(CheckpointError, match="cannot write state .*No such file"):
        state.save(tmp_path / "away" / "s")
    with pytest.raises(CheckpointError, match="cannot read state"):
        states.load(path)
    path.write_bytes(b"{}")
    with pytest.raises(CheckpointError, match="cannot read state"):
        states.load(path)
    save_file({"state": torch.zeros(1)}, path)
    with pytest.raises(CheckpointError, match="is not a state that hecate.states.save wrote"):
        states.load(path)
    for tree, sentence in TREES.items():
        save_file({"a": torch.zeros(1)}, path, metadata={"format": "hecate.state.1", "tree": tree})
        with pytest.raises(CheckpointError) as caught:
            states.load(path)
        assert sentence in str(caught.value)
    state.save(path)
    with pytest.raises(CheckpointError, match="holds a LayerState, not a MemoryState"):
        MemoryState.load(path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(CheckpointError, match="cannot read state .*pipe: it is a pipe or a device"):
        states.load(tmp_path / "pipe")
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(CheckpointError, match="cannot read state"):
        LayerState.load(path)


class _Fields(NamedTuple):
    x: torch.Tensor


class OwnState(states.State, _Fields):
    """A user's own."""

    __slots__ = ()


def test_a_state_of_ones_own(tmp_path):
    OwnState(torch.arange(3.0)).save(tmp_path / "own")
    assert OwnState.load(tmp_path / "own").rows([2]).x.tolist() == [2.0]
    with pytest.raises(ConfigError, match="a state class LayerState exists already in hecate.nn.memory"):
        type("LayerState", (states.State, _Fields), {"__slots__": ()})
    with pytest.raises(ConfigError, match="F a NamedTuple"):
        type("Bare", (states.State,), {"__slots__": ()})


@pytest.mark.spec("STATE-LOAD-I1")
def test_threads_that_save_to_one_file_do_not_meet(tmp_path):
    path, kept = tmp_path / "one.safetensors", {"x": torch.ones(1, 1 << 18)}

    def write(_: int) -> None:
        for _ in range(20):
            states.save(kept, path)
            assert torch.equal(states.load(path)["x"], kept["x"])

    with ThreadPoolExecutor(3) as threads:
        list(threads.map(write, range(3)))
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


@pytest.mark.spec("STATE-LOAD-I1")
def test_only_states_become_loadable():
    ours = {
        item for item in torch.serialization.get_safe_globals() if getattr(item, "__module__", "").startswith("hecate.")
    }
    assert len(ours) == 12 and all(issubclass(item, states.State) for item in ours)


def forged(state, path, field, dtype):
    """A file in which the tensors of a field have another dtype."""
    state.save(path)
    with safe_open(path, "pt") as file:
        metadata, tensors = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}
    for name, tensor in tensors.items():
        if name.endswith(f".{field}") or f".{field}[" in name:
            tensors[name] = tensor.to(dtype)
    save_file(tensors, path, metadata)


@pytest.mark.spec("STATE-LOAD-I2")
@pytest.mark.parametrize("dtype", [torch.int64, torch.int8, torch.bool, torch.complex64, torch.float32])
@pytest.mark.parametrize(("name", "field"), [
    ("rule gated_delta", "memory"), ("rule gated_delta", "position"), ("rule titans", "slots"), ("self", "anchor"),
    ("cosformer", "seen"), ("feature memory", "conv"), ("sliding", "keys"), ("sliding", "present"),
    ("performer", "redraws"), ("cms nested-sum", "written"), ("composed mac", "place"), ("transformer last", "last"),
])  # fmt: skip
@torch.no_grad()
def test_tensors_of_another_kind_are_refused(name, field, dtype, tmp_path):
    """In the place of numbers with a point, and in that of counts and flags."""
    layer = LAYERS[name]()
    state = layer(given(layer, 7, 2))[1]
    forged(state, tmp_path / "s", field, dtype)
    whole = {"position": torch.int64, "seen": torch.int64, "redraws": torch.int64, "written": torch.int64,
             "place": torch.int64, "present": torch.bool}  # fmt: skip
    if dtype == whole.get(field, torch.float32):
        states.load(tmp_path / "s")
        return
    wanted = str(whole.get(field, "floating point")).removeprefix("torch.")
    short = str(dtype).removeprefix("torch.")
    with pytest.raises(CheckpointError, match=rf"is not a state .*{field}.* is {short}, where {wanted} must stand"):
        states.load(tmp_path / "s")


@pytest.mark.spec("STATE-LOAD-I2")
@torch.no_grad()
def test_what_is_saved_is_held_to_the_same(state, tmp_path):
    wrong = state._replace(conv=state.conv.to(torch.int64))
    with pytest.raises(CheckpointError, match="state.conv is int64, where floating point must stand"):
        wrong.save(tmp_path / "s")
    with pytest.raises(CheckpointError, match=r"state\['x'\] is complex64, where real numbers must stand"):
        states.save({"x": torch.zeros(1, dtype=torch.complex64)}, tmp_path / "s")
    assert not (tmp_path / "s").exists()


@pytest.mark.spec("STATE-LOAD-I2")
@pytest.mark.parametrize("kind", states._KINDS.values())
def test_every_state_says_what_its_tensors_are_and_is_rebuilt_by_its_class(kind):
    assert kind._replace is states.State._replace  # torch 2.11 returns none of NamedTuple's own from a graph
    if kind.__module__.startswith("hecate."):
        assert (kind.whole is None) == (kind is states.Parked)  # which has any tree in it
        assert {name for name, _ in kind.whole or ()} <= set(kind._fields)
