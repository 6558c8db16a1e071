"""The block kernels in Triton's interpreter, in float32, against the token loop in float64."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product
from typing import Any, Literal

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st
from triton.runtime.interpreter import GridExecutor

from hecate import Gates, MemoryConfig, late, memory_scan, named_rule
from hecate.engine.triton import block, engine, factors, kernel, launch, scan, table
from hecate.engine.triton import channels as channel_kernels
from hecate.engine.triton.kernel import distrust
from hecate.errors import ConfigError
from hecate.phi import FeatureMap, Tanh
from hecate.phi.elementwise import Elementwise
from tests.interpreted.test_loop import BIASES as LOOPED
from tests.interpreted.test_loop import scanned
from tests.launches import as_on_a_device, counted

SLOW = pytest.mark.slow
BOUND = 2e-6  # float32's rounding over a hundred tokens, relative to a tensor's norm
BIASES = [*(bias for bias in LOOPED if bias.get("p") != 3.0), {"kind": "kl", "target": "distribution"}]
TIMINGS = list(product(["gd", "momentum"], ["with_step", "before_gradient"], ["after", "before"], ["dot", "l2"]))


def trial(
    config: dict[str, Any], *, length: int = 21, widths: tuple[int, int] = (16, 24), masked: bool = False,
    general: bool = False, batch: int = 1, heads: int = 1, channels: bool = False, ceiling: float = 1.0,
    borders: Sequence[int] = (), silence: bool = False, adverse: bool = False, keeps: bool = False,
) -> None:  # fmt: skip
    source, (p, v), lead = torch.Generator().manual_seed(0), widths, (batch, length, heads)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=source, dtype=torch.float64)

    leaves = {"q": draw(*lead, p), "k": torch.nn.functional.normalize(draw(*lead, p), dim=-1), "v": draw(*lead, v)}
    leaves |= {"lr": ceiling * draw(*lead).sigmoid(), "M": draw(heads, v, p)}
    own = MemoryConfig.model_validate(config)
    if own.retention.uses_retain:
        leaves["retain"] = (draw(*lead, *[p] * channels) + 2).sigmoid()
        leaves["retain"][:, length // 3] = 0
    if own.algorithm.uses_momentum:
        leaves["momentum"] = draw(*lead).sigmoid()
        leaves["momentum"][:, length // 2] = 0
    if adverse:  # nearly equal keys and equal ones, in runs, and gates of 0 and 1 among them
        k, run = leaves["k"], slice(3, 2 * length // 3)
        k[:, run] = torch.nn.functional.normalize(k[:, :1] + k[:, run] / 100, dim=-1)
        k[:, length // 3 : 2 * length // 3], leaves["lr"][:, run] = k[:, :1], 1.0
        for name in ("retain", "momentum"):
            if name in leaves:
                leaves[name][:, length // 4 : length // 4 + (2 if name == "momentum" else 20)] = 1
                leaves[name][:, [0, length // 3, length - 1]] = 0
    if keeps:  # nearly all of a state, however long
        leaves["lr"] /= 16
        for name in {"retain", "momentum"} & leaves.keys():
            leaves[name] = (draw(*leaves[name].shape) + (7 if name == "retain" else 3)).sigmoid()
    if general:
        leaves["write"] = draw(*lead, p).sigmoid()
    if silence:  # errors of exactly 0: all of them at first, the first coordinate's throughout
        leaves["v"][:, : length // 2], leaves["v"][..., 0], leaves["M"] = 0, 0, 0 * leaves["M"]
    masks = {}
    if masked:
        masks = {"write_mask": draw(1, length) < 0.8, "reset_mask": draw(1, length) > 1.2}
    if borders:
        masks = {"write_mask": draw(1, length) < 0.8, "cu_seqlens": torch.tensor(borders)}
    right = scanned(
        MemoryConfig.model_validate({**config, "state_dtype": "float64"}), leaves, "sequential", masks, [length]
    )
    narrow = {name: item.float() for name, item in leaves.items()}
    mine = scanned(own, narrow, "triton", masks, [length])
    # Where keys are equal, products of many tokens cancel: torch's own chunks show by how much float32 is off then, and
    # that differs from processor to processor.
    beside = scanned(own, narrow, "parallel", masks, [length]) if adverse else right
    for found, plain, wanted in zip(mine, beside, right, strict=True):
        assert (found is None) == (wanted is None)
        if wanted is not None and float(wanted.norm()) > 1e-12:
            bound = max(BOUND * float(wanted.norm()), 4 * float((plain.double() - wanted).norm()))
            assert float((found.double() - wanted).norm()) <= bound


@pytest.mark.spec("ENG-TRITON-D1", "ENG-TRITON-D2")
@pytest.mark.parametrize(
    "bias",
    [each if at in (0, 2, 9) else pytest.param(each, marks=SLOW) for at, each in enumerate(BIASES)],
    ids=lambda bias: "-".join(map(str, bias.values())),
)
def test_every_form_of_a_bias(bias: dict[str, Any]) -> None:
    trial({"bias": bias, "retention": "decay", "algorithm": "momentum"}, masked=True)


@pytest.mark.spec("BIAS-L1-I1")
@pytest.mark.parametrize("bias", [BIASES[5], *[pytest.param(each, marks=SLOW) for each in BIASES[7:9]]])
def test_errors_of_exactly_zero(bias: dict[str, Any]) -> None:
    trial({"bias": bias}, silence=True)


@pytest.mark.parametrize(
    ("algorithm", "order", "read", "bias"),
    [each if at in (3, 4, 10, 13) else pytest.param(*each, marks=SLOW) for at, each in enumerate(TIMINGS)],
)
def test_every_timing(algorithm: str, order: str, read: str, bias: str) -> None:
    config = {"bias": bias, "retention": "decay", "algorithm": algorithm, "decay_order": order, "read": read}
    trial(config, length=19, heads=2, masked=True, general=bias == "l2" and read == "after")


@pytest.fixture
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """float32 goes as bfloat16 does on a card, 64 tokens a chunk and matrices of pairs in two halves, but unrounded."""
    for module in (kernel, engine):
        monkeypatch.setattr(module, "precision_of", lambda *_, narrow: "bf16")


WIDE = [  # of what `test_every_timing` and `trial` take
    ("momentum", "before_gradient", "after", "l2", {"length": 131, "heads": 2, "masked": True, "general": True}),
    ("gd", "with_step", "before", "l2", {"length": 67, "borders": [0, 2, 2, 67]}),
    ("gd", "before_gradient", "after", "dot", {"length": 65, "masked": True}),
    ("momentum", "with_step", "before", "l2", {"length": 1, "heads": 2}),
    ("gd", "before_gradient", "after", "l2",
     {"length": 66, "masked": True, "general": True, "channels": True}),
    ("gd", "with_step", "before", "dot", {"length": 67, "borders": [0, 2, 2, 67], "channels": True}),
    *(pytest.param(*timing, {"length": 150, "masked": True, "general": timing[3] == "l2"}, marks=SLOW)
      for timing in TIMINGS),
    *(pytest.param(*TIMINGS[at], {"length": 130, "borders": [0, 64, 65, 130]}, marks=SLOW) for at in (1, 6, 9, 15)),
    *(pytest.param(*timing, {"length": 90, "masked": True, "channels": True}, marks=SLOW) for timing in TIMINGS[:8]),
]  # fmt: skip


@pytest.mark.spec("ENG-TRITON-D10")
@pytest.mark.usefixtures("wide")
@pytest.mark.parametrize(("algorithm", "order", "read", "bias", "given"), WIDE)
def test_chunks_of_a_segment(algorithm: str, order: str, read: str, bias: str, given: dict[str, Any]) -> None:
    fields = {"key_norm": "l2", "query_scale": "key_dim"} if bias == "l2" else {"feature_map": "elu"}
    config = {"bias": bias, "retention": "decay", "algorithm": algorithm, "decay_order": order, "read": read, **fields}
    trial(config, ceiling=1.0 if bias == "l2" else 0.02, **given)


@pytest.mark.spec("ENG-TRITON-D10")
@pytest.mark.parametrize(("algorithm", "channels"), [("gd", False), ("momentum", False), ("gd", True)])
def test_equal_keys_at_full_steps(algorithm: str, channels: bool, request: pytest.FixtureRequest) -> None:
    config = {"bias": "l2", "retention": "decay", "algorithm": algorithm}
    trial(config, length=24, adverse=True, channels=channels)
    request.getfixturevalue("wide")
    trial(config, length=70, adverse=True, channels=channels)


@triton.jit
def rounded(x, DT: tl.constexpr):
    """To bfloat16, which the interpreter cannot do, and held in float32."""
    bits = x.to(tl.float32).to(tl.int32, bitcast=True)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)


ROUNDED = [  # of a config, and the flag of a verdict
    ({"retention": "decay", "algorithm": "momentum"}, "reset"),
    ({"retention": "decay", "decay_order": "before_gradient"}, "channels"), ({"retention": "decay"}, "parted"),
    *(pytest.param(fields, "reset", marks=SLOW) for fields in (
        {"bias": "dot", "retention": "decay"}, {}, {"retention": "decay", "read": "before"},
        {"retention": "decay", "algorithm": "momentum", "decay_order": "before_gradient"})),
    pytest.param({"bias": "dot", "retention": "decay", "read": "before"}, "channels", marks=SLOW),
]  # fmt: skip


@pytest.mark.spec("ENG-TRITON-D10", "ENG-TRITON-I1")
@pytest.mark.parametrize(("fields", "flag"), ROUNDED)
def test_operands_in_bfloat16_pass_the_gate(
    fields: dict[str, Any], flag: str, monkeypatch: pytest.MonkeyPatch, wide: None
) -> None:
    for module in (block, channel_kernels, factors, scan):
        monkeypatch.setattr(module, "narrowed", rounded)
    config = MemoryConfig.model_validate(fields)
    assert distrust(config, (flag,), torch.bfloat16, "cpu", (32, 32) if flag == "channels" else (64, 64)) is None


@triton.jit
def doubled(L, i, LOG: tl.constexpr, HALVES: tl.constexpr, DT: tl.constexpr, EXACT: tl.constexpr):
    """(I - L)(I + L^2)(I + L^4)..., the inverse by powers of L, which cancel."""
    one = tl.where(i[:, None] == i[None, :], 1.0, 0.0)
    X, power = one - L, L
    for _ in tl.static_range(1, LOG):
        power = tl.dot(power, power)
        X = tl.dot(X, one + power)
    return X


def test_the_gate_sees_an_inverse_that_random_keys_hide(monkeypatch: pytest.MonkeyPatch, wide: None) -> None:
    monkeypatch.setattr(factors, "inverse", doubled)
    trial({"bias": "l2"}, length=64)
    reason = distrust(MemoryConfig(), (), torch.float32, "cpu", (16, 16))
    assert reason is not None and "differs from the token loop" in reason


CHANNELS = [  # of a bias, an order, a read, and a length
    ("l2", "before_gradient", "after", 66), ("huber", "with_step", "before", 19), ("dot", "with_step", "after", 1),
    *(pytest.param(bias, order, read, 20, marks=SLOW)
      for bias, order, read in product(["dot", "l2", "kl"], ["with_step", "before_gradient"], ["after", "before"])),
]  # fmt: skip


@pytest.mark.parametrize(("bias", "order", "read", "length"), CHANNELS)
def test_retain_of_each_channel(bias: str, order: str, read: str, length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("hecate.engine.triton.loops.Loop")  # the blocks take it
    config = {"bias": bias, "retention": "decay", "decay_order": order, "read": read}
    trial(config, length=length, widths=(12, 20), masked=length > 1, general=length == 66, channels=True)


class Tilted(Elementwise):
    """tilted: scale x |x|."""

    kind: Literal["block_test_tilted"] = "block_test_tilted"
    scale: float = 0.7
    promises = Tanh.promises

    def value(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale * x * x.abs()

    def pull(self, x: torch.Tensor, value: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
        return 2 * self.scale * x.abs() * g


del FeatureMap._registry["block_test_tilted"]  # passed as a value: tests of all known kinds need not know it

FEATURES = [  # phi, key_norm, the ceiling of steps that its keys allow, and whether retain is one of each channel
    ("elu", "none", 0.02, False), ("identity", "l2", 1.0, True), ({"kind": "relu", "shift": 0.1}, "sum", 1.0, False),
    (Tilted(), "l2", 1.0, False),
    *(pytest.param(phi, norm, ceiling, channels, marks=SLOW) for phi, norm, ceiling, channels in [
        ({"kind": "leaky_relu", "slope": 0.3}, "l2", 1.0, True), ("leaky_relu", "none", 0.2, False),
        ("elu", "l2", 1.0, True), ("elu", "sum", 1.0, False), ("squared_relu", "l2", 1.0, False),
        ("squared_relu", "none", 1.0, True), ("leaky_relu_squared", "l2", 1.0, False),
        ("relu", "none", 1.0, False), ("identity", "none", 1.0, False)]),
]  # fmt: skip


@pytest.mark.spec("ENG-TRITON-D7")
@pytest.mark.parametrize(("phi", "norm", "ceiling", "channels"), FEATURES)
def test_features_are_made_as_rows_are_read(
    phi: Any, norm: str, ceiling: float, channels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []
    own = engine._raw
    monkeypatch.setattr(engine, "_raw", lambda call: asked.append(own(call)) or asked[-1])
    config = {"feature_map": phi, "key_norm": norm, "query_scale": "key_dim", "bias": "huber", "retention": "decay"}
    trial(config, widths=(12, 20), masked=True, ceiling=ceiling, channels=channels)
    assert asked and all(asked)


PARTS = [  # of what `test_every_timing` and `trial` take, and whether keys go as in bfloat16
    ("momentum", "before_gradient", "before", "l2", {"general": True}, False),
    ("gd", "with_step", "after", "dot", {}, True),
    ("gd", "before_gradient", "after", "l2", {"channels": True, "batch": 1}, True),
    *(pytest.param(*timing, {"general": timing[3] == "l2"}, wide, marks=SLOW)
      for at, timing in enumerate(TIMINGS) for wide in [at % 2 == 0]),
]  # fmt: skip


@pytest.mark.spec("ENG-TRITON-D11")
@pytest.mark.parametrize(("algorithm", "order", "read", "bias", "given", "narrow"), PARTS)
def test_parts_of_a_long_row_go_side_by_side(
    algorithm: str, order: str, read: str, bias: str, given: dict[str, Any], narrow: bool,
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    if narrow:
        request.getfixturevalue("wide")
    asked: list[int] = []
    own = engine._part
    monkeypatch.setattr(engine, "LONGEST", 100)
    monkeypatch.setattr(engine, "PART", 17)
    monkeypatch.setattr(engine, "_part", lambda plan: asked.append(own(plan)) or asked[-1])
    config = {"bias": bias, "retention": "decay", "algorithm": algorithm, "decay_order": order, "read": read}
    trial(config, **{"widths": (12, 20), "length": 136, "batch": 2, "keeps": True, **given})
    assert set(asked) == {64}


DOCUMENTS = [  # of a bias, an algorithm, an order, a read, and whether retain is one of each channel
    ("huber", "momentum", "before_gradient", "after", False), ("l2", "gd", "with_step", "before", True),
    *(pytest.param(*each, marks=SLOW) for each in [
        ("dot", "gd", "with_step", "after", False), ("dot", "momentum", "with_step", "before", False),
        ("l2", "gd", "before_gradient", "after", False), ("l2", "momentum", "with_step", "before", False),
        ("kl", "gd", "before_gradient", "after", True), ("dot", "gd", "with_step", "before", True)]),
]  # fmt: skip


@pytest.mark.spec("ENG-TRITON-D3")
@pytest.mark.parametrize(("bias", "algorithm", "order", "read", "channels"), DOCUMENTS)
def test_documents_go_side_by_side(
    bias: str, algorithm: str, order: str, read: str, channels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    grids: list[tuple[int, ...]] = []
    own = table._tables
    monkeypatch.setattr(table, "_tables", lambda borders, segment: grids.append(borders) or own(borders, segment))
    config = {"bias": bias, "algorithm": algorithm, "decay_order": order, "read": read, "retention": "decay"}
    borders = [0, 17, 18, 18, 20] if channels else [0, 2, 2, 67]
    trial(config, widths=(8, 12), length=borders[-1], channels=channels, borders=borders, heads=1 + (bias == "huber"))
    assert grids and all(each == tuple(sorted(set(borders))) for each in grids)


@pytest.mark.parametrize("length", [1, 65, *(pytest.param(length, marks=SLOW) for length in (2, 16, 64, 131))])
def test_blocks_and_segments(length: int) -> None:
    trial({"bias": "l2", "retention": "decay", "algorithm": "momentum"}, length=length, masked=length > 2)


@pytest.mark.parametrize("widths", [(5, 3), (256, 16), *(pytest.param(w, marks=SLOW) for w in [(40, 24), (64, 130)])])
def test_widths(widths: tuple[int, int]) -> None:
    trial({"bias": "huber", "retention": "none"}, widths=widths, length=18)


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def near(found: torch.Tensor, right: torch.Tensor, bound: float = BOUND) -> bool:
    return float((found.double() - right.double()).norm()) <= bound * float(right.double().norm())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_inputs_in_half_precision_are_answered_in_it(dtype: torch.dtype) -> None:
    q, k, v = (drawn(1, 20, 2, 16, seed=i).to(dtype) for i in range(3))
    config = MemoryConfig(key_norm="l2")
    y, state = memory_scan(config, q, k, v, engine="triton")
    right, _ = memory_scan(config, q, k, v, engine="sequential")
    assert y.dtype == dtype and all(item.dtype == torch.float32 for item in state.memory.values())
    assert near(y, right, 2 * torch.finfo(dtype).eps)  # the interpreter truncates where a card rounds


@pytest.mark.spec("ENG-TRITON-D7")
def test_gradients_of_half_precision_are_answered_in_it() -> None:
    config = MemoryConfig(key_norm="l2", retention="decay", algorithm="momentum")
    given = [drawn(1, 20, 2, 16, seed=i) for i in range(3)]
    given += [drawn(1, 20, 2, seed=3 + i).sigmoid() for i in range(3)]
    given[1][0, 5, 0] = 0.0  # a key without a direction
    given = [item.half() for item in given]

    def grads(engine: str, wide: bool, order: int = 1) -> list[torch.Tensor]:
        own = [(item.double() if wide else item).requires_grad_() for item in map(torch.Tensor.clone, given)]
        q, k, v, *gates = own
        exact = config.model_copy(update={"state_dtype": "float64"}) if wide else config
        y, state = memory_scan(exact, q, k, v, Gates(*gates), engine=engine)
        assert y.dtype == v.dtype
        total = y.double().square().sum() + state.memory["weight"].double().square().sum()
        found = torch.autograd.grad(total, own, create_graph=order == 2)
        if order == 2:
            found = torch.autograd.grad(sum(item.double().square().sum() for item in found), own)
        return [item.detach() for item in found]

    eps = torch.finfo(torch.float16).eps
    for order in (1, 2):
        found, right = grads("triton", False, order), grads("sequential", True, order)
        for own, other in zip(found, right, strict=True):
            assert own.dtype == torch.float16 and near(own, other, 2 * order * eps)


AROUND = {  # launches of torch around the kernels, forward, and forward and backward: what GPU users wait for
    "delta": MemoryConfig(key_norm="l2"), "gated delta": named_rule("gated_delta"),
    "titans linear": named_rule("titans_linear"), "kda": named_rule("kda"),
    "huber": named_rule("gated_delta", bias="huber"),
}  # fmt: skip


@pytest.mark.spec("ENG-TRITON-D7")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", AROUND)
def test_launches_around_the_kernels(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    config, lead = AROUND[name], (1, 64, 2)
    q, k, v = (torch.randn(*lead, 32, dtype=dtype).requires_grad_() for _ in range(3))
    lr, *rest = (torch.rand(lead, dtype=dtype).requires_grad_() for _ in range(3))
    if name == "kda":
        rest[0] = torch.rand(*lead, 32, dtype=dtype).requires_grad_()
    used = (config.retention.uses_retain, config.algorithm.uses_momentum)
    gates = Gates(lr, *(gate if there else None for gate, there in zip(rest, used, strict=True)))
    ran: list[str] = []
    monkeypatch.setattr(GridExecutor, "__call__", lambda kernel, *_, **__: ran.append(kernel.fn.__name__))

    def forward() -> torch.Tensor:
        return memory_scan(config, q, k, v, gates, engine="triton")[0]

    def both() -> None:
        forward().backward(torch.ones_like(v))

    with as_on_a_device():
        for call, most in ((forward, 8), (both, 18)):
            for _ in range(2):  # the first makes what is made once
                late.forget()  # kernels that do not run leave numbers that mean nothing
                ran.clear()
                found = counted(call)
            assert found.launches <= most and not found.waits
    ahead, back = "factors", ["tokens", *["gates"] * sum(used)]
    if name == "kda":
        ahead, back = "channel_factors", ["channel_pairs", "channel_borders", "channel_tokens"]
    scans = ["scan"] * (1 + (name == "titans linear" and dtype == torch.bfloat16))  # states, and then outputs
    assert [own for own in ran if own not in back] == [ahead, *scans, ahead, "pull"]
    assert not {"unit", "unit_back"}.intersection(ran)


def test_heads_that_lie_apart_and_documents() -> None:
    q, k, v = (drawn(1, 2, 23, 16, seed=i).transpose(1, 2) for i in range(3))  # heads ahead of tokens
    given = {"gates": Gates(lr=drawn(1, 23, 2).sigmoid(), retain=(drawn(1, 23, 2, seed=1) + 2).sigmoid())}
    config = MemoryConfig(key_norm="l2", retention="decay")
    borders = torch.tensor([0, 5, 6, 23])
    right, last = memory_scan(
        config.model_copy(update={"state_dtype": "float64"}), q, k, v, **given, cu_seqlens=borders, engine="sequential"
    )
    short = {"gates": Gates(lr=given["gates"].lr.float(), retain=given["gates"].retain.float())}
    y, state = memory_scan(config, q.float(), k.float(), v.float(), **short, cu_seqlens=borders, engine="triton")
    assert near(y, right) and near(state.memory["weight"], last.memory["weight"])


@pytest.mark.parametrize("bias", ["dot", "l2"])
def test_a_sum_normalizer(bias: str) -> None:
    fields = {"bias": bias, "feature_map": "elu", "normalizer": "sum", "retention": "decay"}
    q, k, v = (drawn(1, 19, 2, 8, seed=i) for i in range(3))
    right, _ = memory_scan(MemoryConfig(**fields, state_dtype="float64"), q, k, v, engine="sequential")
    y, _ = memory_scan(MemoryConfig(**fields), q.float(), k.float(), v.float(), engine="triton")
    assert near(y, right)


@pytest.mark.parametrize("chunks", [None, "wide"])
def test_a_call_goes_on_where_another_ended_and_leaves_its_inputs(
    chunks: str | None, request: pytest.FixtureRequest
) -> None:
    if chunks is not None:
        request.getfixturevalue(chunks)
    config = MemoryConfig(key_norm="l2", retention="decay", algorithm="momentum")
    q, k, v = (drawn(1, 37, 2, 16, seed=i).float() for i in range(3))
    before = [item.clone() for item in (q, k, v)]
    whole, last = memory_scan(config, q, k, v, engine="triton")
    first, state = memory_scan(config, q[:, :20], k[:, :20], v[:, :20], engine="triton")
    second, end = memory_scan(config, q[:, 20:], k[:, 20:], v[:, 20:], state=state, engine="triton")
    assert near(torch.cat([first, second], 1), whole) and near(end.memory["weight"], last.memory["weight"])
    assert all(torch.equal(*pair) for pair in zip((q, k, v), before, strict=True))


def test_second_derivatives_are_those_of_the_token_loop() -> None:
    config = MemoryConfig(retention="decay")
    values = drawn(1, 9, 1, 4).float()

    def second(engine: str) -> torch.Tensor:
        k = values.clone().requires_grad_()
        y, _ = memory_scan(config, k, k, values, engine=engine)
        (first,) = torch.autograd.grad(y.square().sum(), k, create_graph=True)
        return torch.autograd.grad(first.square().sum(), k)[0]

    assert near(second("triton"), second("sequential"), 1e-5)  # float32 on both sides


@pytest.mark.parametrize("flags", [("write", "reset", "phi_w"), pytest.param(("write", "phi_w", "parted"), marks=SLOW)])
def test_the_kernels_pass_their_own_gate(flags: tuple[str, ...]) -> None:
    config = MemoryConfig(retention="decay", algorithm="momentum")
    assert distrust(config, flags, torch.float32, "cpu", (24, 16)) is None


@SLOW
def test_kernels_of_channels_pass_their_own_gate() -> None:
    config = MemoryConfig(retention="decay", decay_order="before_gradient")
    assert distrust(config, ("channels",), torch.float32, "cpu", (16, 16)) is None


@SLOW
@pytest.mark.parametrize(("phi", "norm"), [("elu", "l2"), ("elu", "none"), ({"kind": "relu", "shift": 3.0}, "none")])
def test_kernels_of_features_and_documents_pass_their_own_gate(phi: Any, norm: str) -> None:
    config = MemoryConfig(retention="decay", key_norm=norm, feature_map=phi)
    assert distrust(config, ("reset", "narrow", "packed"), torch.float16, "cpu", (24, 16)) is None
    assert distrust(config, (), torch.float32, "cpu", (24, 16)) is None


def test_a_norm_that_is_wrong_is_not_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    own = launch.normed
    monkeypatch.setattr(launch, "normed", lambda inputs: own((inputs[0] + 1e-3,)))
    reason = distrust(MemoryConfig(), ("l2",), torch.float32, "cpu", (8, 8))
    assert reason is not None and "keys at unit length" in reason


@SLOW
@settings(max_examples=25, deadline=None)
@given(st.data())
def test_random_configs(data: st.DataObject) -> None:
    config = {
        "bias": data.draw(st.sampled_from(BIASES)), "retention": data.draw(st.sampled_from(["none", "decay"])),
        "algorithm": data.draw(st.sampled_from(["gd", "momentum"])),
        "read": data.draw(st.sampled_from(["after", "before"])),
        "decay_order": data.draw(st.sampled_from(["with_step", "before_gradient"])),
    }  # fmt: skip
    try:
        MemoryConfig.model_validate(config)
    except ConfigError:
        return
    widths = data.draw(st.tuples(st.integers(1, 40), st.integers(1, 40)))
    masked, channels = data.draw(st.booleans()), config["algorithm"] == "gd" and data.draw(st.booleans())
    length = data.draw(st.integers(1, 70))
    heads = math.ceil(16 / length)  # a gate's gradient is one inner product, which may cancel: never fewer than 16
    # Near zero an error's gradient rises by 1/eps: steps beyond 2 eps amplify what float32 rounds, in any engine.
    ceiling = config["bias"].get("eps", 1.0)
    trial(config, length=length, widths=widths, heads=heads, masked=masked, channels=channels, ceiling=ceiling)
