"""The loop kernels in Triton's interpreter, in float32, against the token loop in float64."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import pytest
import torch
from torch import Tensor

from hecate import Gates, MemoryConfig, memory_scan
from hecate.algorithm import Algorithm
from hecate.engine.triton import table
from hecate.tape.ops import over
from tests.formula.test_algorithms import Smooth

BOUND = 2e-6  # float32's rounding over some dozen tokens, relative to a tensor's norm
LQ = {"kind": "lq", "q": 4.0, "eps": 1e-3}
RETENTIONS = [
    {"kind": "elastic_net", "threshold": 0.02}, {"kind": "l2", "penalty": 0.05}, {"kind": "sphere"},
    {"kind": "sphere", "slot": "row", "form": "divide"}, {"kind": "kl", "scale": 8.0},
    {"kind": "kl", "scale": 8.0, "signed": True}, {"kind": "bounded", "low": -1.0}, LQ,
    {"kind": "norm_cap", "norm": 3.0, "retention": "decay"},
    {"kind": "norm_cap", "norm": 3.0, "retention": {"kind": "kl", "scale": 8.0}},
]  # fmt: skip
BIASES = [
    {"kind": "dot"}, {"kind": "l2"}, {"kind": "huber", "delta": 0.5}, {"kind": "huber", "delta": 0.5, "norm": True},
    {"kind": "kl"}, {"kind": "l1", "eps": 0.1}, {"kind": "lp", "p": 3.0}, {"kind": "lp", "p": 1.5, "eps": 0.1},
    {"kind": "yaad", "delta": 0.7, "eps": 0.1}, {"kind": "robust", "eps": 0.1},
]  # fmt: skip
NESTEROV, PAPER = {"kind": "momentum", "nesterov": True}, {"kind": "delta_momentum", "form": "paper"}
PRINTED = {"kind": "ftrl", "l1": 0.02, "l2": 0.1}
ALGORITHMS = ["gd", "momentum", NESTEROV, "delta_momentum", PAPER, PRINTED]


class Settled(Algorithm):
    """settled: D = -lr tanh(S') with S' = momentum S + G."""

    kind: Literal["loop_test_settled"] = "loop_test_settled"
    slots: ClassVar[tuple[str, ...]] = ("sum",)
    uses_momentum: ClassVar[bool] = True

    def direction(self, grad: Tensor, lr: Tensor, momentum: Tensor, *slots: Tensor) -> tuple[Tensor, ...]:
        total = over(momentum, grad) * slots[0] + grad
        return -over(lr, grad) * total.tanh(), total


del Algorithm._registry["loop_test_settled"]  # passed as a value: tests of all known kinds need not know it


@pytest.fixture(autouse=True)
def short_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hecate.engine.triton.loops.SEGMENT", 16)  # that few tokens cross one


def scanned(
    config: MemoryConfig, leaves: dict[str, torch.Tensor], engine: str, masks: dict[str, Any], pieces: list[int]
) -> list[Any]:
    """Outputs, final weights and slots, and gradients by all leaves, of a sequence in pieces."""
    leaves = {name: item.detach().clone().requires_grad_() for name, item in leaves.items()}
    rows = [item.split(pieces, 1) if name != "M" else [item] * len(pieces) for name, item in leaves.items()]
    outputs, state = [], None
    for at, piece in enumerate(zip(*rows, strict=True)):
        own = dict(zip(leaves, piece, strict=True))
        gates = Gates(**{name: item for name, item in own.items() if name not in ("q", "k", "v", "M")})
        held = {name: mask if name == "cu_seqlens" else mask.split(pieces, 1)[at] for name, mask in masks.items()}
        y, state = memory_scan(
            config,
            own["q"],
            own["k"],
            own["v"],
            gates,
            initial={"weight": own["M"]},
            state=state,
            engine=engine,
            **held,
        )
        outputs.append(y)
    outputs += [*state.memory.values(), *state.slots.values()]
    source = torch.Generator().manual_seed(1)
    total = sum((x * torch.randn(x.shape, generator=source, dtype=torch.float64).to(x.dtype)).sum() for x in outputs)
    grads = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
    return [item if item is None else item.detach() for item in (*outputs, *grads)]


def drawn(
    config: MemoryConfig, lead: tuple[int, int, int], widths: tuple[int, int], extra: str
) -> dict[str, torch.Tensor]:
    """Leaves that let no rule diverge, some gates 0."""
    source, (p, v) = torch.Generator().manual_seed(0), widths

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=source, dtype=torch.float64)

    leaves = {
        "q": draw(*lead, p),
        "k": torch.nn.functional.normalize(draw(*lead, p), dim=-1),
        "v": 0.5 * draw(*lead, v),
    }
    leaves |= {"lr": 0.4 * draw(*lead).sigmoid(), "M": 0.3 * draw(lead[2], v, p)}
    if config.retention.uses_retain:
        leaves["retain"] = (draw(*lead, *([p] if "channels" in extra else [])) + 3).sigmoid()
        leaves["retain"][:, lead[1] // 3] = 0
        if "values" in extra:
            leaves["retain_value"] = (draw(*lead, v) + 3).sigmoid()
    if config.algorithm.uses_momentum:
        leaves["momentum"] = 0.6 * draw(*lead).sigmoid()
    if "general" in extra:
        leaves |= {"erase": draw(*lead, p).sigmoid(), "write": draw(*lead, p).sigmoid()}
    if "silence" in extra:  # errors of exactly 0: all of them at first, the first coordinate's throughout
        leaves["v"][:, : lead[1] // 2], leaves["v"][..., 0], leaves["M"] = 0, 0, 0 * leaves["M"]
    return leaves


def trial(
    config: dict[str, Any], *, length: int = 8, widths: tuple[int, int] = (16, 12), heads: int = 1, extra: str = ""
) -> None:
    """extra: of "masks", "documents", "channels", "values", "general", "silence", "pieces" those asked for; "float32"
    allows eight times what plain torch in float32 is off, where that is more than the bound: powers here are e^(m log
    x), which rounds m log x, at the floor of lq 7 in size, where a power of torch's rounds once."""
    own, lead = MemoryConfig.model_validate(config), (1, length, heads)
    leaves, masks, places = drawn(own, lead, widths, extra), {}, torch.arange(length)[None]
    if "masks" in extra:
        masks = {"write_mask": places % 4 != 2, "reset_mask": (places + 1) % 6 == 0}
    if "documents" in extra:
        masks = {"write_mask": places % 4 != 2, "cu_seqlens": torch.tensor([0, 2, 3, 3, length])}
    pieces = [length // 2, length - length // 2] if "pieces" in extra else [length]
    wide = MemoryConfig.model_validate({**config, "state_dtype": "float64"})
    right = scanned(wide, leaves, "sequential", masks, pieces)
    narrow = {name: item.float() for name, item in leaves.items()}
    plain = scanned(own, narrow, "sequential", masks, pieces) if "float32" in extra else right
    mine = scanned(own, narrow, "triton", masks, pieces)
    for found, beside, wanted in zip(mine, plain, right, strict=True):
        assert (found is None) == (wanted is None)
        if wanted is not None and float(wanted.norm()) > 1e-12:
            bound = max(BOUND, 8 * float((beside.double() - wanted).norm() / wanted.norm()))
            assert float((found.double() - wanted).norm() / wanted.norm()) <= bound


def conditioned(retention: Any) -> str:
    """The powers of lq are ill-conditioned at small numbers, in plain torch too."""
    return "float32" if "lq" in retention.values() else ""


def named(item: Any) -> str:
    return item if isinstance(item, str) else "-".join(map(str, item.values()))


@pytest.mark.spec("ENG-TRITON-D5")
@pytest.mark.parametrize("retention", RETENTIONS, ids=named)
def test_every_retention(retention: dict[str, Any]) -> None:
    trial(
        {"bias": "l2", "retention": retention, "algorithm": "momentum"},
        extra=f"masks {conditioned(retention)}",
        heads=2,
    )


@pytest.mark.parametrize("retention", [RETENTIONS[1], RETENTIONS[2], RETENTIONS[4], LQ], ids=named)
def test_the_gradient_at_the_decayed_memory_and_reads_before(retention: dict[str, Any]) -> None:
    config = {"retention": retention, "decay_order": "before_gradient", "read": "before"}
    trial({"bias": "huber", **config}, extra=f"masks {conditioned(retention)}", length=7)


@pytest.mark.parametrize("bias", BIASES, ids=named)
def test_every_bias(bias: dict[str, Any]) -> None:
    trial({"bias": bias, "retention": {"kind": "elastic_net", "threshold": 0.02}}, length=6)


@pytest.mark.spec("BIAS-L1-I1")
@pytest.mark.parametrize("bias", [BIASES[5], *BIASES[8:]], ids=named)
def test_errors_of_exactly_zero(bias: dict[str, Any]) -> None:
    trial({"bias": bias}, extra="silence", length=6)


@pytest.mark.parametrize("algorithm", ALGORITHMS[2:], ids=named)
def test_every_algorithm(algorithm: Any) -> None:
    trial({"bias": "l2", "retention": "decay", "algorithm": algorithm}, extra="masks pieces")


@pytest.mark.spec("ENG-TRITON-D5")
@pytest.mark.parametrize(("retention", "extra"), [("decay", "masks pieces"), ("kl", "channels general")])
@pytest.mark.parametrize("algorithm", [Smooth(), Settled()], ids=lambda algorithm: algorithm.kind)
def test_algorithms_of_a_users_own(algorithm: Algorithm, retention: str, extra: str) -> None:
    trial({"bias": "huber", "retention": retention, "algorithm": algorithm}, extra=extra, widths=(7, 5), heads=2)


@pytest.mark.parametrize(
    ("retention", "extra"),
    [("decay", "channels"), ("decay", "values general masks"), ("kl", "channels values"),
     ("elastic_net", "general pieces"), ("sphere", "channels values")],
)  # fmt: skip
def test_gates_of_channels_and_values_and_written_keys(retention: str, extra: str) -> None:
    algorithm = "momentum" if extra == "channels" else "gd"  # blocks take channels under gradient descent
    trial({"bias": "l2", "retention": retention, "algorithm": algorithm}, length=7, extra=extra)


@pytest.mark.spec("ENG-TRITON-D3")
@pytest.mark.parametrize(("retention", "heads"), [(RETENTIONS[0], 2), (RETENTIONS[4], 1)], ids=["thresholds", "link"])
def test_documents_go_side_by_side(retention: dict[str, Any], heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    counts: list[int] = []
    own = table._tables
    monkeypatch.setattr(table, "_tables", lambda borders, segment: counts.append(len(borders)) or own(borders, segment))
    config = {"bias": "l2", "retention": retention, "algorithm": "momentum"}
    trial(config, length=22, widths=(8, 6), heads=heads, extra="documents")
    assert counts == [4, 4]  # forward and backward, of three documents


@pytest.mark.parametrize(
    ("length", "widths"), [(1, (16, 16)), (2, (5, 3)), (18, (7, 9)), (4, (40, 70)), (3, (128, 96))]
)
def test_lengths_segments_and_widths(length: int, widths: tuple[int, int]) -> None:
    trial({"bias": "kl", "retention": "sphere", "algorithm": "momentum"}, length=length, widths=widths, extra="float32")


def test_the_same_bits_every_run_and_in_half_precision() -> None:
    config = MemoryConfig(bias="l2", retention=RETENTIONS[0], key_norm="l2")
    q, k, v = (torch.randn(1, 8, 2, 16, generator=torch.Generator().manual_seed(i)).bfloat16() for i in range(3))
    y, state = memory_scan(config, q, k, v, engine="triton")
    again, _ = memory_scan(config, q, k, v, engine="triton")
    right, _ = memory_scan(config, q, k, v, engine="sequential")
    assert torch.equal(y, again) and y.dtype == torch.bfloat16
    assert all(item.dtype == torch.float32 for item in state.memory.values())
    assert float((y - right).float().norm()) <= 2**-8 * float(right.float().norm())


def test_what_is_no_number_stays_none() -> None:
    q, k, v = (torch.ones(1, 3, 1, 16, dtype=torch.float32) for _ in range(3))
    v[0, 1, 0, 4] = torch.nan
    for bias in (bias for bias in BIASES if bias["kind"] != "kl"):
        config = MemoryConfig(bias=bias, retention=RETENTIONS[0], on_nonfinite="propagate")
        _, state = memory_scan(config, q, k, v, Gates(lr=0.01), engine="triton")
        _, right = memory_scan(config, q, k, v, Gates(lr=0.01), engine="sequential")
        assert torch.equal(state.memory["weight"].isnan(), right.memory["weight"].isnan())


@pytest.mark.spec("ENG-TRITON-D5")
def test_a_small_memory_behind_a_signed_link_keeps_its_digits() -> None:
    config = MemoryConfig(bias="l2", retention={"kind": "kl", "signed": True}, key_norm="l2")
    q, k, v = (torch.randn(1, 6, 1, 8, generator=torch.Generator().manual_seed(i)) for i in range(3))
    q, k, v = q.float(), k.float(), 1e-6 * v.float()
    wide = config.model_copy(update={"state_dtype": "float64"})
    right, _ = memory_scan(wide, q.double(), k.double(), v.double(), Gates(0.1, 0.99), engine="sequential")
    y, _ = memory_scan(config, q, k, v, Gates(0.1, 0.99), engine="triton")
    assert float((y.double() - right).norm() / right.norm()) <= BOUND


@pytest.mark.spec("ENG-RESET-D1")
def test_a_new_start_knows_nothing_of_what_was_no_number() -> None:
    q, k, v = (torch.randn(1, 9, 1, 4, generator=torch.Generator().manual_seed(i)).float() for i in range(3))
    v[0, 2] = torch.nan
    reset = torch.arange(9)[None] == 5
    fields = {"retention": "sphere", "algorithm": "momentum", "key_norm": "l2", "on_nonfinite": "propagate"}
    v.requires_grad_()
    y, state = memory_scan(MemoryConfig(**fields), q, k, v, reset_mask=reset, engine="triton")
    assert y[0, 5:].isfinite().all() and state.memory["weight"].isfinite().all()
    (g,) = torch.autograd.grad(y[0, 5:].sum(), v)
    assert g[0, 5:].isfinite().all()


@pytest.mark.slow
@pytest.mark.parametrize("order", ["with_step", "before_gradient"])
@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=named)
@pytest.mark.parametrize("retention", RETENTIONS, ids=named)
def test_all_together(retention: dict[str, Any], algorithm: Any, order: str) -> None:
    # Every pair of a retention and an algorithm, each with a bias; a retention meets all of them.
    bias = BIASES[(RETENTIONS.index(retention) + 2 * ALGORITHMS.index(algorithm) + len(order)) % len(BIASES)]
    config = {"bias": bias, "retention": retention, "algorithm": algorithm, "decay_order": order}
    config["read"] = "before" if order == "with_step" else "after"
    trial(config, length=20, widths=(10, 7), extra="masks pieces float32")
