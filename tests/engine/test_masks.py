"""Write masks, reset masks, packed documents; shared, strided and untouched inputs."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from hecate import Gates, memory_scan
from hecate.algorithm import Momentum
from hecate.engine import Engine, exact_engines
from tests.memories import BIASES, DEEP, Case, case_of, close, config_of, flat_state, ways

CONFIGS = {
    "delta": {},
    "titans": {"retention": "decay", "algorithm": "momentum", "key_norm": "l2"},
    "gated delta": {"retention": "decay", "decay_order": "before_gradient"},
    "linear attention": {"bias": "dot", "feature_map": "elu", "normalizer": "sum"},
    "frozen": {"chunk": 3, "bias": BIASES[2]},
    "chunk commit": {"chunk": 3, "commit": "chunk", "retention": "decay", "algorithm": "momentum"},
    "deep": {"structure": DEEP, "retention": "decay", "algorithm": "momentum"},
    "before": {"read": "before", "step": "implicit", "retention": "decay"},
}


RUNS = pytest.mark.parametrize(("name", "engine"), ways(CONFIGS, ("sequential", "parallel", "chunk")))


def write_mask(case: Case, share: float = 0.6) -> Tensor:
    generator = torch.Generator().manual_seed(4)
    return torch.rand(case.k.shape[:2], generator=generator) < share


def gradients(case: Case, y: Tensor, state: object) -> list[Tensor]:
    items = [y, *(item for item in flat_state(state).values() if item.is_floating_point())]
    total = sum(((index + 1) * item.sin()).sum() for index, item in enumerate(items))
    return list(torch.autograd.grad(total, case.leaves, materialize_grads=True))


@pytest.mark.spec("ENG-MASK-D1", "ENG-MASK-I1", "ENG-CHUNK-D4")
@pytest.mark.parametrize("junk", [torch.nan, torch.inf, -torch.inf, 1e300])
@pytest.mark.parametrize("autodiff", ["tape", "torch"])
@RUNS
def test_what_a_masked_token_carries_changes_no_bit(name, engine, autodiff, junk):
    case = case_of(config_of(**CONFIGS[name]), length=9)
    mask = write_mask(case)
    clean = case._replace(write=mask).fresh()

    def dirty(item: Tensor | None) -> Tensor | None:
        where = mask.reshape(*mask.shape, *[1] * (item.dim() - 2)) if item is not None else None
        return None if item is None else torch.where(where, item, junk)

    spoiled = clean._replace(k=dirty(case.k), v=dirty(case.v), gates=Gates(*map(dirty, case.gates))).fresh()
    results = []
    for own in (clean, spoiled):
        y, state = own.scan(engine=engine, autodiff=autodiff)
        results.append((y, *flat_state(state).values(), *gradients(own, y, state)))
    for mine, theirs in zip(*results, strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.spec("ENG-MASK-I2")
@RUNS
def test_masked_tokens_might_as_well_be_absent(name, engine):
    case = case_of(config_of(**CONFIGS[name]), batch=1, length=9)
    kept = [0, 1, 3, 4, 7, 8]
    mask = torch.zeros(1, 9, dtype=torch.bool)
    mask[:, kept] = True
    y, state = case._replace(write=mask).scan(engine=engine)
    short = case._replace(
        **{n: getattr(case, n)[:, kept] for n in ("q", "k", "v")},
        gates=Gates(*(None if g is None else g[:, kept] for g in case.gates)),
    )
    expected, final = short.scan(engine=engine)
    close(y[:, kept], expected, 1e-12)
    for key, item in flat_state(state).items():
        close(item, flat_state(final)[key], 1e-12, key)
    if engine == "sequential":
        assert torch.equal(y[:, kept], expected)
    # A masked token is still answered, from the memory as it is.
    again = case._replace(write=torch.zeros(1, 9, dtype=torch.bool))
    frozen, unchanged = again.scan(engine=engine)
    assert float(frozen.norm()) > 0.01 or name == "linear attention"
    assert torch.equal(unchanged.memory[next(iter(case.initial))][0], case.initial[next(iter(case.initial))])


@pytest.mark.spec("ENG-RESET-D1", "ENG-RESET-I1")
@RUNS
def test_resets_are_separate_scans(name, engine):
    case = case_of(config_of(**CONFIGS[name]), batch=1, length=10).fresh()
    borders = [0, 4, 5, 10]
    reset = torch.zeros(1, 10, dtype=torch.bool)
    reset[:, [0, 4, 5]] = True
    y, state = case._replace(reset=reset).scan(engine=engine)
    got = (y, *flat_state(state).values(), *gradients(case, y, state))
    cu_seqlens = torch.tensor(borders, dtype=torch.int32)
    other, _ = memory_scan(
        case.config, case.q, case.k, case.v, case.gates, initial=case.initial, cu_seqlens=cu_seqlens, engine=engine
    )
    assert torch.equal(y, other)
    rows = []
    for at, end in pairwise(borders):
        part, final = case.part(at, end).scan(engine=engine)
        rows.append(part)
    whole = torch.cat(rows, 1)
    expected = (whole, *flat_state(final).values(), *gradients(case, whole, final))
    for mine, theirs in zip(got, expected, strict=True):
        close(mine, theirs, 1e-11)


@pytest.mark.spec("ENG-RESET-I2")
def test_a_reset_happens_at_a_masked_token_too():
    case = case_of(config_of(), batch=1, length=4)
    reset = torch.tensor([[False, False, True, False]])
    for engine in ("sequential", "parallel"):
        y, state = case._replace(reset=reset, write=~reset).scan(engine=engine)
        expected, final = case.part(3, 4).scan(engine=engine)
        close(y[:, 3:], expected, 1e-12)
        start = torch.einsum("hvp,bthp->bthv", case.initial["weight"], case.q)
        close(y[:, 2], start[:, 2], 1e-12)
        close(state.memory["weight"], final.memory["weight"], 1e-12)


@pytest.mark.spec("ENG-SCAN-I3")
@pytest.mark.parametrize(("name", "engine"), ways(CONFIGS, sorted(Engine.registry.keys() - {"triton", "fla", "fused"})))
def test_inputs_are_never_changed(name, engine):
    case = case_of(config_of(**CONFIGS[name]), masks=True, length=35 if "compiled" in engine else 7)
    _, state = case.scan(engine=engine)
    given = [*case.leaves, case.write, case.reset, *flat_state(state).values()]
    before = [(item.clone(), item._version) for item in given]
    for autodiff in ("tape", "torch"):
        fresh = case.fresh()
        y, after = fresh.scan(state, engine=engine, autodiff=autodiff)
        outputs = [y, *after.memory.values()]
        cotangents = [torch.ones_like(item) for item in outputs]
        torch.autograd.grad(outputs, fresh.leaves, cotangents, materialize_grads=True)
        assert all(bool((g == 1).all()) for g in cotangents)
    assert all(
        torch.equal(item, copy) and item._version == version
        for item, (copy, version) in zip(given, before, strict=True)
    )


@pytest.mark.spec("ENG-SCAN-I4")
@RUNS
def test_strided_and_expanded_inputs(name, engine):
    case = case_of(config_of(**CONFIGS[name]))
    expected, final = case.scan(engine=engine)
    turned = [item.transpose(1, 2).contiguous().transpose(1, 2) for item in case.leaves[:3]]
    gates = Gates(*(None if g is None else g.mT.contiguous().mT for g in case.gates))
    y, state = case._replace(q=turned[0], k=turned[1], v=turned[2], gates=gates).scan(engine=engine)
    close(y, expected, 1e-14)
    one = case._replace(
        **{n: getattr(case, n)[:1, :, :1].expand(2, -1, 2, -1) for n in ("q", "k", "v")},
        gates=Gates(*(None if g is None else g[:1, :, :1].expand(2, -1, 2) for g in case.gates)),
    ).fresh()
    full = one._replace(**{n: getattr(one, n).contiguous() for n in ("q", "k", "v")})
    y, state = one.scan(engine=engine)
    expected, final = full.scan(engine=engine)
    assert torch.equal(y, expected)
    for mine, theirs in zip(gradients(one, y, state), gradients(one, expected, final), strict=True):
        close(mine, theirs, 1e-12)


@pytest.mark.spec("ENG-SCAN-I4")
def test_one_tensor_as_query_key_and_value():
    for engine in ("sequential", "parallel"):
        case = case_of(config_of(retention="decay"), width=3)
        x = case.k.clone().requires_grad_()
        y, _ = case._replace(q=x, k=x, v=x).scan(engine=engine)
        (got,) = torch.autograd.grad(y.sin().sum(), x)
        three = [case.k.clone().requires_grad_() for _ in range(3)]
        y, _ = case._replace(q=three[0], k=three[1], v=three[2]).scan(engine=engine)
        close(got, sum(torch.autograd.grad(y.sin().sum(), three)), 1e-12)


@pytest.mark.spec("ENG-RESET-I1")
def test_gates_above_one_do_not_multiply_over_documents():
    """Momentum of 1e150 at the start of every document, whose product over four is no float64."""
    source = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 12, 2, 4, generator=source) for _ in range(3))
    config = config_of(algorithm=Momentum(bounded=False), retention="decay", key_norm="l2")
    reset = torch.arange(12).remainder(3).eq(0).expand(1, 12)
    momentum = torch.where(reset.unsqueeze(-1), 1e150, 0.5).expand(1, 12, 2)
    gates = Gates(lr=0.5, retain=0.9, momentum=momentum)
    expected, _ = memory_scan(config, q, k, v, gates, reset_mask=reset, engine="sequential")
    for engine in exact_engines(config, length=12, masked=True):
        found, _ = memory_scan(config, q, k, v, gates, reset_mask=reset, engine=engine)
        torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-12)
