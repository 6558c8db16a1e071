"""Calls and configurations that cannot be honoured: one error each, naming what was given."""

from __future__ import annotations

from itertools import product
from typing import ClassVar, Literal

import pytest
import torch

from hecate import ConfigError, Gates, MemoryConfig, ShapeError, memory_scan, memory_step, named_rule, phi, retention
from hecate.errors import HecateError, LayoutWarning
from hecate.nn import LinearAttention, Memory
from hecate.nn.sums import linear_attention
from hecate.tape.ops import over
from tests.registries import restore_registries


class Root(retention.Retention):
    """root_of_a_test: M' = retain asinh(M) + D."""

    kind: Literal["root_of_a_test"] = "root_of_a_test"
    uses_retain: ClassVar[bool] = True

    def step(self, memory, direction, retain):
        return over(retain, memory) * memory.asinh() + direction


IMPOSSIBLE = [
    ({"decay_order": "before_gradient"}, ["decay_order", "before_gradient", "retention 'none'"]),
    ({"normalizer": "sum"}, ["normalizer", "'sum'", "feature_map 'identity'"]),
    ({"normalizer": "sum", "feature_map": {"kind": "linear", "d_phi": 4}}, ["normalizer", "feature_map 'linear'"]),
    ({"normalizer": "sum", "feature_map": "elu", "structure": "mlp"}, ["normalizer", "structure 'mlp'"]),
    (
        {"normalizer": "sum", "feature_map": "elu", "retention": "root_of_a_test"},
        ["normalizer", "retention 'root_of_a_test'"],
    ),
    ({"normalizer": "sum", "feature_map": "elu", "query_scale": "key_dim"}, ["normalizer", "query_scale='key_dim'"]),
    ({"key_norm": "sum"}, ["key_norm", "'sum'", "feature_map 'identity'"]),
    ({"key_norm": "l2", "algorithm": {"kind": "gd", "lr": 2.5}}, ["algorithm.lr", "lr=2.5", "key_norm 'l2'"]),
    (
        {"feature_map": {"kind": "random_fourier", "d_phi": 8}, "algorithm": {"kind": "gd", "lr": 3}},
        ["algorithm.lr", "lr=3", "feature_map 'random_fourier'"],
    ),
    (
        {"key_norm": "sum", "feature_map": "elu", "algorithm": {"kind": "momentum", "lr": 4.0}},
        ["algorithm.lr", "lr=4", "algorithm 'momentum'"],
    ),
    (
        {"bias": "huber", "key_norm": "l2", "algorithm": {"kind": "gd", "lr": 2.5}},
        ["algorithm.lr", "lr=2.5", "bias 'huber'"],
    ),
]


@pytest.mark.spec("RULE-CONFIG-I1")
@pytest.mark.parametrize(("fields", "words"), IMPOSSIBLE, ids=lambda value: str(value)[:60])
def test_impossible_combinations_name_both_settings(fields, words):
    with pytest.raises(ConfigError) as caught:
        MemoryConfig(**fields)
    assert len(caught.value.problems) == 1
    for word in words:
        assert word in str(caught.value)
    # A copy cannot smuggle it in either.
    with pytest.raises(ConfigError):
        MemoryConfig().model_copy(update=fields)
    own = {k: v for k, v in fields.items() if k in ("decay_order", "normalizer", "key_norm", "chunk")}
    if set(own) == set(fields):
        forged = MemoryConfig().model_copy()
        object.__setattr__(forged, "__dict__", {**forged.__dict__, **own})
        k = torch.zeros(1, 1, 1, 2)
        with pytest.raises(ConfigError):
            memory_scan(forged, k, k, k)


@pytest.mark.spec("RULE-CONFIG-I1")
@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"chunk": 0}, "chunk: must be >= 1, got 0"),
        ({"chunk": True}, "chunk"),
        ({"chunk": "8"}, "chunk"),
        ({"bias": {"kind": "lp", "p": 1.0}}, "bias.p: must be > 1"),
        ({"bias": {"kind": "lp", "eps": 0.0}}, "bias.eps: must be > 0"),
        ({"bias": {"kind": "huber", "delta": float("nan")}}, "bias.delta"),
        ({"retention": {"kind": "decay", "retain": 1.5}}, "retention.retain: must be a number in [0, 1]"),
        ({"algorithm": {"kind": "momentum", "momentum": 1.0}}, "algorithm.momentum: must be < 1"),
        ({"algorithm": {"kind": "gd", "lr": -0.1}}, "algorithm.lr: must be >= 0"),
        ({"structure": {"kind": "mlp", "layers": 0}}, "structure.layers: must be >= 1"),
        ({"bias": "hubber"}, "Did you mean 'huber'?"),
        ({"bias": "hubber"}, "One of your own needs its module imported, with --import MODULE on the command line"),
        ({"bias": "cosh"}, "One of your own needs its module imported, with --import MODULE on the command line"),
        ({"comit": "chunk"}, "Did you mean 'commit'?"),
    ],
    ids=str,
)
def test_values_out_of_range(fields, word):
    with pytest.raises(ConfigError) as caught:
        MemoryConfig(**fields)
    assert word in str(caught.value)


def call(config: MemoryConfig | None = None, **changes):
    """A valid call with some arguments replaced."""
    given = {
        "q": torch.ones(2, 4, 3, 5),
        "k": torch.ones(2, 4, 3, 5),
        "v": torch.ones(2, 4, 3, 6),
        "gates": None,
        **changes,
    }
    return memory_scan(config or MemoryConfig(), **given)


X = torch.ones(2, 4, 3, 5)
ROWS = torch.ones(2, 4, dtype=torch.bool)
DECAY = MemoryConfig(retention="decay")
MOMENTUM = MemoryConfig(algorithm="momentum")
TENSORS = {
    "rank": ({"q": X[0]}, ["q must be [B, T, H, width]", "[4, 3, 5]"]),
    "integer keys": ({"k": X.long(), "q": X}, ["k must be floating point", "int64"]),
    "complex keys": ({"k": X.cfloat()}, ["k must be floating point", "complex64"]),
    "complex values": ({"v": X.cfloat()}, ["v must be floating point"]),
    "key width": ({"q": X[..., :4]}, ["q and k", "[2, 4, 3, 4]", "[2, 4, 3, 5]"]),
    "value heads": ({"v": X[:, :, :2]}, ["[2, 4, 2, 5]"]),
    "value length": ({"v": X[:, :3]}, ["[2, 3, 3, 5]"]),
    "device of q": ({"q": X.to("meta")}, ["q is on meta", "cpu"]),
    "device of v": ({"v": X.to("meta")}, ["v is on meta", "cpu"]),
    "device of a gate": ({"gates": Gates(lr=X[..., 0].to("meta"))}, ["gates.lr is on meta"]),
    "device of a mask": ({"write_mask": ROWS.to("meta")}, ["write_mask is on meta", "cpu"]),
    "device of a reset": ({"reset_mask": ROWS.to("meta")}, ["reset_mask is on meta", "cpu"]),
    "device of initial": (
        {"initial": {"weight": torch.ones(3, 6, 5, device="meta")}},
        ["initial['weight'] is on meta", "cpu"],
    ),
    "mask shape": ({"write_mask": ROWS[:, :3]}, ["write_mask", "[2, 4]", "[2, 3]"]),
    "mask dtype": ({"reset_mask": ROWS.float()}, ["reset_mask", "bool", "float32"]),
    "gate shape": ({"gates": Gates(lr=X[:, :, 0, 0])}, ["gates.lr", "[2, 4, 3]", "[2, 4]"]),
    "gate dtype": ({"gates": Gates(lr=X[..., 0].long())}, ["gates.lr", "int64"]),
    "initial names": ({"initial": {"w": torch.ones(3, 6, 5)}}, ["initial", "['weight']", "['w']"]),
    "initial shape": ({"initial": {"weight": torch.ones(3, 5, 6)}}, ["[3, 6, 5]", "[3, 5, 6]"]),
    "borders rank": ({"cu_seqlens": torch.zeros(1, 2).long()}, ["cu_seqlens", "B = 2"]),
}


@pytest.mark.spec("ENG-CALL-I1")
@pytest.mark.parametrize("name", TENSORS)
def test_tensors_that_do_not_fit(name):
    changes, words = TENSORS[name]
    with pytest.raises(ShapeError) as caught:
        call(**changes)
    for word in words:
        assert word in str(caught.value), str(caught.value)


@pytest.mark.spec("ENG-CALL-I2")
@pytest.mark.parametrize(
    ("config", "changes", "words"),
    [
        (None, {"gates": Gates(lr=X)}, ["gates.lr", "commit='chunk'", "[B, T, H]"]),
        (None, {"gates": Gates(retain=0.5)}, ["gates.retain", "retention 'none'"]),
        (None, {"gates": Gates(retain=X[..., 0])}, ["gates.retain", "retention 'none'"]),
        (None, {"gates": Gates(momentum=0.5)}, ["gates.momentum", "algorithm 'gd'"]),
        (DECAY, {"gates": Gates(momentum=X[..., 0])}, ["gates.momentum", "algorithm 'gd'"]),
        (None, {"gates": Gates(lr=float("nan"))}, ["gates.lr", "finite", "nan"]),
        (None, {"gates": Gates(lr=float("inf"))}, ["gates.lr", "finite", "inf"]),
        (
            MemoryConfig(structure="mlp", retention="decay"),
            {"gates": Gates(retain=X)},
            ["gates.retain", "structure 'mlp'"],
        ),
        (DECAY, {"gates": Gates(retain=torch.ones(2, 4, 3, 7))}, ["[B, T, H, 5]", "[2, 4, 3, 7]"]),
        (None, {"cu_seqlens": torch.tensor([0, 4]), "reset_mask": ROWS}, ["cu_seqlens", "reset_mask"]),
        (
            MemoryConfig(feature_map={"kind": "linear", "d_phi": 7}),
            {},
            ["feature_map 'linear'", "phi_params", "weight"],
        ),
        (None, {"engine": "fast"}, ["engine", "'fast'"]),
        (None, {"autodiff": "jax"}, ["autodiff", "'jax'"]),
        (MemoryConfig(structure={"kind": "mlp", "residual": True}), {}, ["residual=True", "d_phi=5", "6"]),
    ],
)
def test_arguments_that_the_config_cannot_honour(config, changes, words):
    with pytest.raises(HecateError) as caught:
        call(config, **changes)
    for word in words:
        assert word in str(caught.value), str(caught.value)


@pytest.mark.spec("ENG-PAR-I4")
@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"chunk": 4}, "chunk=4"),
        ({"commit": "chunk"}, "commit='chunk'"),
        ({"structure": "mlp"}, "structure 'mlp'"),
        ({"retention": "root_of_a_test"}, "retention 'root_of_a_test'"),
    ],
)
def test_parallel_engine_refuses_by_name_and_auto_never_picks_it(fields, word):
    config = MemoryConfig(**fields)
    with pytest.raises(ConfigError) as caught:
        call(config, engine="parallel")
    assert "engine='parallel'" in str(caught.value) and word in str(caught.value)
    y, _ = call(config, engine="auto")
    assert torch.equal(y, call(config, engine="sequential")[0])


@pytest.mark.spec("ENG-CALL-I3")
def test_states_of_another_config_are_refused():
    """Every field of a state is told apart."""
    configs = {
        "matrix": MemoryConfig(),
        "mlp": MemoryConfig(structure="mlp"),
        "momentum": MOMENTUM,
        "frozen": MemoryConfig(chunk=3),
        "chunk commit": MemoryConfig(chunk=3, commit="chunk"),
        "normalised": MemoryConfig(bias="dot", feature_map="elu", normalizer="sum"),
    }
    states = {name: call(config)[1] for name, config in configs.items()}
    for (mine, config), (theirs, state) in product(configs.items(), states.items()):
        if mine == theirs:
            call(config, state=state)
        else:
            with pytest.raises(ShapeError, match="state"):
                call(config, state=state)
    narrow = memory_scan(MemoryConfig(), X, X, X)[1]
    with pytest.raises(ShapeError, match=r"state\.memory.*\[2, 3, 6, 5\].*\[2, 3, 5, 5\]"):
        call(state=narrow)
    with pytest.raises(ShapeError, match=r"state"):
        call(state=call(q=X[:1], k=X[:1], v=torch.ones(1, 4, 3, 6))[1])
    bad = states["matrix"]._replace(position=torch.zeros(2, 2, dtype=torch.int64))
    with pytest.raises(ShapeError, match=r"state\.position"):
        call(state=bad)
    elsewhere = states["matrix"]._replace(memory={"weight": torch.ones(2, 3, 6, 5, device="meta")})
    with pytest.raises(ShapeError, match=r"state\.memory\['weight'\] is on meta"):
        call(state=elsewhere)


@pytest.mark.spec("ENG-CALL-I4")
@pytest.mark.parametrize("borders", [[0, 5, 9], [0, 3], [1, 4], [0, 3, 2, 4], [0, -1, 4], [], [0]], ids=str)
def test_borders_that_are_not_borders(borders):
    one = X[:1]
    with pytest.raises(ShapeError, match=r"cu_seqlens.*from 0 to T = 4"):
        memory_scan(MemoryConfig(), one, one, one, cu_seqlens=torch.tensor(borders).long())


@pytest.mark.spec("ENG-CALL-I4")
def test_a_state_and_borders_contradict_each_other():
    one = X[:1]
    _, state = memory_scan(MemoryConfig(), one, one, one)
    with pytest.raises(ConfigError, match=r"cu_seqlens.*state"):
        memory_scan(MemoryConfig(), one, one, one, cu_seqlens=torch.tensor([0, 4]), state=state)
    # Empty documents are allowed: a border may repeat.
    memory_scan(MemoryConfig(), one, one, one, cu_seqlens=torch.tensor([0, 0, 2, 2, 4]))


@pytest.mark.spec("RULE-DTYPE-D1")
def test_the_highest_precision_among_inputs_and_config_holds_the_state():
    double, half = X.double(), X.bfloat16()
    for q, k, v, expected in (
        (X, X, X, torch.float32),
        (half, half, half, torch.float32),
        (double, X, X, torch.float64),
        (X, double, X, torch.float64),
        (X, X, double, torch.float64),
    ):
        y, state = memory_scan(MemoryConfig(), q, k, v, Gates(0.1))
        assert state.memory["weight"].dtype == expected
        assert y.dtype == v.dtype
    _, state = memory_scan(MemoryConfig(state_dtype="float64"), half, half, half, Gates(0.1))
    assert state.memory["weight"].dtype == torch.float64


@pytest.mark.spec("ENG-STEP-D1")
def test_a_step_with_wrong_shapes_names_them():
    with pytest.raises(ShapeError, match="q and k"):
        memory_step(MemoryConfig(), X[:, 0], X[:, 0, :2], X[:, 0])


@pytest.mark.spec("ENG-CHAN-I1")
@pytest.mark.parametrize("first", ["token", "channel"])
def test_an_unfinished_chunk_takes_retain_of_either_width(first):
    """The product of retain gates of one chunk, some per head and some per phi channel."""
    config = MemoryConfig(retention="decay", chunk=4, commit="chunk", state_dtype="float64")
    generator = torch.Generator().manual_seed(0)
    k, v = (torch.randn(2, 7, 3, 5, generator=generator), torch.randn(2, 7, 3, 2, generator=generator))
    retain = torch.rand(2, 7, 3, 5, generator=generator)
    narrow = torch.arange(7) < 2 if first == "token" else torch.arange(7) >= 2
    retain = torch.where(narrow[:, None, None], retain[..., :1], retain)
    y, final = memory_scan(config, k, k, v, Gates(0.1, retain))
    rows, state = [], None
    for part in (slice(0, 2), slice(2, 3), slice(3, 7)):
        own = retain[:, part]
        own = own[..., 0] if bool(narrow[part].all()) else own
        row, state = memory_scan(config, k[:, part], k[:, part], v[:, part], Gates(0.1, own), state=state)
        rows.append(row)
    torch.testing.assert_close(torch.cat(rows, 1), y, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(state.memory, final.memory, rtol=1e-12, atol=1e-14)


TURNED = "T and H look swapped: tokens are \\[B, T, H, D\\], of \\[B, H, T, D\\] give x.transpose"


@pytest.mark.spec("ENG-CALL-I1")
def test_whatever_tells_heads_from_tokens_refuses_the_other_layout():
    rule, fourier = MemoryConfig(key_norm="l2"), MemoryConfig(feature_map={"kind": "random_fourier", "d_phi": 8})
    turned = torch.randn(2, 4, 6, 8)  # [B, H, T, D]
    tokens = turned.transpose(1, 2)
    _, state = memory_scan(rule, tokens, tokens, tokens)
    params = fourier.feature_map.init(8, heads=4, generator=torch.Generator())
    channels, mask = torch.rand(2, 6, 4, 8), torch.ones(2, 6, dtype=torch.bool)
    calls = {
        "lr": lambda: memory_scan(rule, turned, turned, turned, Gates(lr=channels[..., 0])),
        "state": lambda: memory_scan(rule, turned, turned, turned, state=state),
        "initial": lambda: memory_scan(rule, turned, turned, turned, initial={"weight": torch.zeros(4, 8, 8)}),
        "initial of each": lambda: memory_scan(
            rule, turned, turned, turned, initial={"weight": torch.zeros(2, 4, 8, 8)}
        ),
        "phi": lambda: memory_scan(fourier, turned, turned, turned, phi_params=params),
        "mask": lambda: memory_scan(rule, turned, turned, turned, write_mask=mask),
        "reset": lambda: memory_scan(rule, turned, turned, turned, reset_mask=~mask),
        "retain": lambda: memory_scan(named_rule("kda"), turned, turned, turned, Gates(retain=channels)),
        "erase": lambda: memory_scan(named_rule("gated_delta_2"), turned, turned, turned, Gates(erase=channels)),
        "values": lambda: memory_scan(rule, turned, turned, tokens),
        "attention": lambda: linear_attention(turned, turned, tokens),
    }
    for name, call in calls.items():
        with pytest.raises(ShapeError, match=TURNED):
            call()
            pytest.fail(name)


@pytest.mark.spec("ENG-CALL-I1")
def test_the_other_layout_is_warned_of_where_nothing_tells():
    rule = MemoryConfig(key_norm="l2")

    def scanned(*shape, **given):
        x = torch.zeros(shape)
        return memory_scan(rule, x, x, x, **given)

    for shape in ((2, 4, 128, 16), (1, 8, 1024, 8), (3, 2, 32, 4)):
        for gates in (None, Gates(lr=0.1)):
            with pytest.warns(LayoutWarning, match=f"as {shape[1]} tokens of {shape[2]} heads; " + TURNED):
                scanned(*shape, gates=gates)
    turned = torch.zeros(1, 2, 50, 16)
    for causal in (True, False):
        with pytest.warns(LayoutWarning, match="as 2 tokens of 50 heads; " + TURNED) as told:
            linear_attention(turned, turned, turned, causal=causal)
        assert told[0].filename == __file__
    # What is ordinary, or says what it is, is not: warnings are errors here.
    for shape in ((2, 128, 4, 16), (2, 1, 128, 16), (2, 8, 32, 4), (2, 3, 16, 4), (2, 0, 64, 4), (2, 64, 64, 4)):
        scanned(*shape)
    _, state = scanned(2, 1, 64, 4)
    scanned(2, 4, 64, 4, state=state)
    scanned(2, 4, 64, 4, write_mask=torch.ones(2, 4, dtype=torch.bool))
    scanned(2, 4, 64, 4, gates=Gates(lr=torch.rand(2, 4, 64)))
    scanned(2, 4, 64, 4, name="mine")
    Memory(64, heads=32)(torch.zeros(2, 3, 64))
    LinearAttention(64, heads=32)(torch.zeros(2, 3, 64))
    torch.compile(lambda x: memory_scan(rule, x, x, x)[0], backend="eager")(torch.zeros(1, 2, 32, 4))


@pytest.mark.spec("ENG-CALL-I6")
@pytest.mark.parametrize("length", [1, 3, 40])  # 40: a kernel, which would read beyond a row that is too short
def test_features_of_another_width_or_dtype_than_declared_are_refused(length, monkeypatch):
    restore_registries(monkeypatch)

    class Halves(phi.FeatureMap):
        """halves: every other number of x, which its width does not say."""

        kind: Literal["halves"] = "halves"

        def features(self, x, params):
            return x[..., ::2]

    class Single(phi.FeatureMap):
        """single: sin(x) in float32, whatever x is."""

        kind: Literal["single"] = "single"

        def features(self, x, params):
            return x.float().sin()

    q, k, v = torch.randn(3, 1, length, 2, 4, dtype=torch.float64).unbind()
    for feature_map, words in (
        (Halves(), "'halves' makes 2 features of width 4, where its output_dim says 4"),
        (Single(), "'single' makes torch.float32 of torch.float64; give features in the dtype of x"),
    ):
        with pytest.raises(ShapeError, match=f"feature map {words}"):
            memory_scan(MemoryConfig(feature_map=feature_map), q, k, v, Gates(lr=0.1))
