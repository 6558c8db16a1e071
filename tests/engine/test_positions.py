"""Positions of a scan: counted across calls, restarting with documents, wherever phi needs them."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hecate import Gates, MemoryConfig, memory_scan, memory_step, phi
from hecate.engine import exact_engines
from hecate.errors import ConfigError, ShapeError
from hecate.nn import Memory
from hecate.testing import check_rule
from tests.memories import close
from tests.reference import positions as reference

B, T, H, LARGEST = 2, 9, 2, 11
LINEAR = {"bias": "dot", "normalizer": "sum"}
RULES = {
    "attention": LINEAR,
    "delta": {"key_norm": "l2", "retention": "decay"},
    "deep": {"structure": {"kind": "mlp", "expansion": 1}, "chunk": 2, "key_norm": "l2"},
}


def config_of(name="attention", largest=LARGEST, **fields):
    feature_map = phi.CosFormer(max_length=largest)
    fields = {**RULES[name], **fields}
    return MemoryConfig(feature_map=feature_map, state_dtype="float64", **fields)


def drawn(batch=B, length=T, seed=0):
    source = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(batch, length, H, d, generator=source) for d in (3, 3, 2))
    return q, k, v, 0.5 * torch.rand(batch, length, H, generator=source)


def masks_of(seed=1, batch=B):
    source = torch.Generator().manual_seed(seed)
    write = torch.rand(batch, T, generator=source) < 0.7
    reset = torch.rand(batch, T, generator=source) < 0.3
    return write, reset


@pytest.mark.spec("ENG-POS-D1", "PHI-COSFORMER-D1", "PHI-COSFORMER-D2")
@pytest.mark.parametrize("normalizer", ["none", "sum"])
@pytest.mark.parametrize("masked", [False, True])
def test_equals_the_sum_over_all_pairs(normalizer, masked):
    q, k, v, lr = drawn()
    write, reset = masks_of() if masked else (None, None)
    config = config_of(normalizer=normalizer)
    w = np.ones((B, T), bool) if write is None else write.numpy()
    r = np.zeros((B, T), bool) if reset is None else reset.numpy()
    for engine in ("auto", *exact_engines(config, length=T)):
        y, state = memory_scan(config, q, k, v, Gates(lr), write_mask=write, reset_mask=reset, engine=engine)
        for b in range(B):
            assert int(state.seen[b]) == reference.positions(w[b], r[b])[1]
            for h in range(H):
                own = (item[b, :, h].numpy() for item in (q, k, v, lr))
                expected = reference.attention(*own, w[b], r[b], LARGEST, normalizer == "sum")
                close(y[b, :, h], torch.tensor(expected), 1e-12, f"{engine} {b} {h}")


@pytest.mark.spec("ENG-POS-I1")
@pytest.mark.parametrize("name", RULES)
@settings(max_examples=15)
@given(
    cuts=st.lists(st.integers(0, T), max_size=T),
    write=st.lists(st.booleans(), min_size=B * T, max_size=B * T),
    reset=st.lists(st.booleans(), min_size=B * T, max_size=B * T),
)
def test_any_split(name, cuts, write, reset):
    config, (q, k, v, lr) = config_of(name), drawn()
    write, reset = (torch.tensor(rows).reshape(B, T) for rows in (write, reset))

    def run(at, end, state):
        part = [item[:, at:end] for item in (q, k, v)]
        gates, masks = Gates(lr[:, at:end]), (write[:, at:end], reset[:, at:end])
        return memory_scan(config, *part, gates, state=state, write_mask=masks[0], reset_mask=masks[1])

    expected, last = run(0, T, None)
    state, ys = None, []
    for at, end in pairwise([0, *sorted(cuts), T]):
        y, state = run(at, end, state)
        ys.append(y)
    close(torch.cat(ys, 1), expected, 1e-12, "y")
    assert torch.equal(state.seen, last.seen)


@pytest.mark.spec("ENG-POS-I1")
def test_token_by_token():
    config, (q, k, v, lr) = config_of(), drawn()
    expected, last = memory_scan(config, q, k, v, Gates(lr))
    state = None
    for t in range(T):
        one = (item[:, t] for item in (q, k, v))
        y, state = memory_step(config, *one, Gates(lr[:, t]), state=state)
        close(y, expected[:, t], 1e-12, f"token {t}")
    assert state.seen.tolist() == last.seen.tolist() == [T] * B


@pytest.mark.spec("ENG-POS-I2")
@pytest.mark.parametrize("name", RULES)
def test_packed_documents_start_at_zero(name):
    config, (q, k, v, lr) = config_of(name, largest=4), drawn(1)
    borders = [0, 2, 3, 7, T]
    packed, state = memory_scan(config, q, k, v, Gates(lr), cu_seqlens=torch.tensor(borders))
    pieces = []
    for at, end in pairwise(borders):
        part = (item[:, at:end] for item in (q, k, v))
        pieces.append(memory_scan(config, *part, Gates(lr[:, at:end]))[0])
    close(packed, torch.cat(pieces, 1), 1e-12, "documents")
    assert state.seen.tolist() == [2]


@pytest.mark.spec("ENG-POS-D1")
def test_a_token_left_out_as_non_finite_counts():
    config, (q, k, v, lr) = config_of(on_nonfinite="skip"), drawn()
    v[0, 3, 1, 0] = torch.inf
    y, state = memory_scan(config, q, k, v, Gates(lr))
    assert state.seen.tolist() == [T] * B
    lr = lr.clone()
    lr[0, 3, 1] = 0.0
    expected, _ = memory_scan(config, q, k, v.nan_to_num(posinf=0.0), Gates(lr))
    close(y, expected, 1e-12, "y")


@pytest.mark.spec("ENG-POS-I1")
@pytest.mark.parametrize("name", RULES)
def test_rule_conforms_with_positions(name):
    check_rule(config_of(name))


def test_transforms_and_compile():
    config, (q, k, v, lr) = config_of(), drawn()
    _, state = memory_scan(config, q[:, :2], k[:, :2], v[:, :2], Gates(lr[:, :2]))
    reset = masks_of()[1][:, 2:]

    def step(q, k, v, lr, state, reset):
        y, after = memory_scan(config, q, k, v, Gates(lr), state=state, reset_mask=reset)
        return y.sin().sum(), (y, after.seen)

    args = (q[:, 2:], k[:, 2:], v[:, 2:], lr[:, 2:])
    inputs = [item.clone().requires_grad_() for item in args]
    total, (y, seen) = step(*inputs, state, reset)
    expected = torch.autograd.grad(total, inputs)

    # vmap takes no None, so the state goes in as its tensors.
    leaves, layout = torch.utils._pytree.tree_flatten(state)
    held = [leaf for leaf in leaves if leaf is not None]

    def one(*given):
        rows = iter(item.unsqueeze(0) for item in given)
        q, k, v, lr, reset = (next(rows) for _ in range(5))
        own = [None if leaf is None else next(rows) for leaf in leaves]
        state = torch.utils._pytree.tree_unflatten(own, layout)
        return step(q, k, v, lr, state, reset)

    gradient = torch.func.grad(one, argnums=(0, 1, 2, 3), has_aux=True)
    got, (rows, counts) = torch.func.vmap(gradient)(*args, reset, *held)
    close(rows.squeeze(1), y, 1e-12, "vmap")
    assert torch.equal(counts.squeeze(1), seen)
    for mine, true in zip(got, expected, strict=True):
        close(mine, true, 1e-10, "gradients")

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    again, (rows, counts) = compiled(*inputs, state, reset)
    close(rows, y, 1e-12, "compiled")
    assert torch.equal(counts, seen)
    for mine, true in zip(torch.autograd.grad(again, inputs), expected, strict=True):
        close(mine, true, 1e-10, "compiled gradients")


@pytest.mark.spec("PHI-COSFORMER-I1")
def test_beyond_the_largest_position():
    q, k, v, lr = drawn()
    exact = config_of(largest=T - 1)
    _, state = memory_scan(exact, q, k, v, Gates(lr))
    with pytest.raises(ConfigError, match=r"max_length=8 .*0\.\.8, got 9\.\.9.*max_length or reset"):
        memory_step(exact, q[:, 0], k[:, 0], v[:, 0], Gates(lr[:, 0]), state=state)
    reset = torch.ones(B, 1, dtype=torch.bool)
    part = (item[:, :1] for item in (q, k, v))
    _, fresh = memory_scan(exact, *part, Gates(lr[:, :1]), state=state, reset_mask=reset)
    assert fresh.seen.tolist() == [1] * B
    # Where values cannot be looked at the features are NaN, not a kernel of the wrong sign.
    short = config_of(largest=T - 2, on_nonfinite="propagate")
    run = torch.compile(lambda *x: memory_scan(short, *x)[0], backend="aot_eager", fullgraph=True)
    y = run(q, k, v)
    assert bool(y[:, :-1].isfinite().all()) and bool(y[:, -1].isnan().all())


@pytest.mark.spec("ENG-POS-D2")
def test_the_state_counts_only_where_phi_needs_it():
    q, k, v, lr = drawn()
    counted, plain = config_of(), MemoryConfig(state_dtype="float64", bias="dot")
    _, with_count = memory_scan(counted, q, k, v, Gates(lr))
    _, without = memory_scan(plain, q, k, v, Gates(lr))
    assert without.seen is None
    assert with_count.bytes == with_count._replace(seen=None).bytes + 8 * B
    assert with_count.detach().seen.dtype == torch.int64
    with pytest.raises(ShapeError, match=r"state\.seen is None, but.*'cosformer' needs one"):
        memory_scan(counted, q, k, v, state=with_count._replace(seen=None))
    with pytest.raises(ShapeError, match=r"state\.seen is a count.*'identity' needs none"):
        memory_scan(plain, q, k, v, state=without._replace(seen=with_count.seen))
    for wrong in (with_count.seen[:1], with_count.seen.double()):
        with pytest.raises(ShapeError, match=r"state\.seen must be int64 \[2\]"):
            memory_scan(counted, q, k, v, state=with_count._replace(seen=wrong))
    params = {"learned": {}, "frozen": {}, "position": torch.arange(T)}
    with pytest.raises(ConfigError, match="leave 'position' out"):
        memory_scan(counted, q, k, v, phi_params=params)
    for batch, length in ((0, 3), (2, 0)):
        _, state = memory_scan(counted, *drawn(batch, length)[:3])
        assert state.seen.tolist() == [0] * batch


@pytest.mark.spec("PHI-COSFORMER-I1")
def test_a_layer_beyond_the_largest_position():
    shorter = {"feature_map": {"kind": "cosformer", "max_length": 4}, **LINEAR}
    with pytest.raises(ConfigError, match="max_length=4"):
        Memory(6, 2, shorter)(torch.ones(B, T, 6))
