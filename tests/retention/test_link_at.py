"""Where in a chunk a mirror memory's link is taken: against numpy, and what cannot be."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hecate import MemoryConfig, memory_weights
from hecate.cms import SelfReferenceConfig
from hecate.engine import Engine, Plan, explain
from hecate.errors import ConfigError
from tests.engine.test_properties import in_pieces, whole
from tests.memories import Case, case_of, config_of

MIRAS = {"kind": "mlp", "layers": 2, "expansion": 2, "residual": True, "norm": "layer", "norm_eps": 1e-2}
CHUNK = 4


def softmax(a: np.ndarray) -> np.ndarray:
    e = np.exp(a - a.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def told(case: Case, link_at: str, read: str) -> np.ndarray:
    """A matrix memory under kl and l2, token by token, with masks: outputs `[B, T, H, V]`."""
    q, k, v, lr, retain = (x.numpy() for x in (case.q, case.k, case.v, *case.gates[:2]))
    y = np.zeros(v.shape)
    for b, h in np.ndindex(v.shape[0], v.shape[2]):
        start = case.initial["weight"][h].numpy()
        A, W, anchor, place = start, None, start, 0
        for t in range(v.shape[1]):
            if case.reset is not None and case.reset[b, t]:
                A, place = start, 0
            if place == 0:
                anchor = W = softmax(A)
            before = W
            if case.write is None or case.write[b, t]:
                error = anchor @ k[b, t, h] - v[b, t, h]
                D = -lr[b, t, h] * np.outer(error, k[b, t, h] - k[b, t, h].mean())
                A, W = retain[b, t, h] * A + D, retain[b, t, h] * W + D
                place = (place + 1) % CHUNK
            moved = W if read == "after" else before
            y[b, t, h] = (anchor if link_at == "chunk" else moved) @ q[b, t, h]
    return y


@pytest.mark.spec("RET-MIRROR-D3")
@pytest.mark.parametrize(("link_at", "read"), [("chunk", "after"), ("linear", "after"), ("linear", "before")])
@pytest.mark.parametrize("masks", [False, True])
def test_against_numpy(link_at, read, masks):
    config = config_of(retention={"kind": "kl", "link_at": link_at}, chunk=CHUNK, read=read)
    case = case_of(config, length=11, d=3, width=2, masks=masks)
    expected = told(case, link_at, read)
    for engine in ("sequential", "chunk"):
        y, _ = case.scan(engine=engine)
        np.testing.assert_allclose(y.numpy(), expected, rtol=1e-11, atol=1e-12)


@pytest.mark.spec("RET-MIRROR-D3", "ENG-CHUNK-D7")
@pytest.mark.parametrize(
    ("fields", "link_at"),
    [
        ({"structure": MIRAS, "retention": {"kind": "kl", "scale": 3.0}}, "linear"),
        ({"structure": MIRAS, "retention": {"kind": "lq", "eps": 0.1}, "algorithm": "momentum"}, "linear"),
        ({"structure": MIRAS, "retention": {"kind": "lq", "eps": 0.1}, "bias": {"kind": "lp", "p": 3.0}}, "chunk"),
        ({"structure": "gated_mlp", "retention": "bounded", "read": "before"}, "linear"),
    ],
)
def test_chunk_engine_against_the_token_loop(fields, link_at):
    kind = fields["retention"]
    retention = {**(kind if isinstance(kind, dict) else {"kind": kind}), "link_at": link_at}
    config = config_of(**{**fields, "retention": retention}, chunk=CHUNK)
    for length, masks in ((10, False), (17, True)):
        case = case_of(config, length=length, d=3, width=3, masks=masks, ends=0.1)
        expected = whole(case, engine="sequential")
        in_pieces(case, [3, 5, 9], engine="sequential").equals(expected)
        whole(case, engine="chunk", autodiff="tape").equals(expected)
        whole(case, engine="chunk", autodiff="torch").equals(expected)
        in_pieces(case, [3, 5, 9], engine="chunk").equals(expected)


@pytest.mark.spec("RET-MIRROR-D3", "RET-MIRROR-D2")
@pytest.mark.parametrize("link_at", ["chunk", "linear"])
def test_weights_of_a_state_are_those_that_answer(link_at):
    config = config_of(retention={"kind": "kl", "link_at": link_at}, chunk=CHUNK)
    for length in (2, 4, 7):
        case = case_of(config, length=length, d=3, width=2)
        _, state = case.scan()
        silent = case.part(length - 1, length)._replace(write=torch.zeros(2, 1, dtype=torch.bool))
        answer, _ = silent.scan(state)
        weights = memory_weights(config, state)["weight"]
        expected = torch.einsum("bhvp,bhp->bhv", weights, case.q[:, -1])
        torch.testing.assert_close(answer[:, 0], expected)


@pytest.mark.spec("RET-MIRROR-D3")
@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"retention": {"kind": "kl", "link_at": "chunk"}}, "chunk=1"),
        ({"retention": {"kind": "kl", "link_at": "chunk"}, "chunk": 4, "commit": "chunk"}, "commit='chunk'"),
        ({"retention": {"kind": "bregman", "link_at": "linear"}, "chunk": 4}, "has no link"),
        (
            {"retention": {"kind": "kl", "link_at": "linear"}, "chunk": 4, "decay_order": "before_gradient"},
            "before_gradient",
        ),
        ({"retention": {"kind": "kl", "link_at": "chunk"}, "chunk": 4, "read": "before"}, "read='before'"),
    ],
)
def test_where_it_has_no_meaning(fields, reason):
    with pytest.raises(ConfigError, match=reason):
        MemoryConfig(**fields)


@pytest.mark.spec("RET-MIRROR-D3")
def test_projections_that_write_themselves_refuse_it():
    memory = MemoryConfig(retention={"kind": "kl", "link_at": "linear"}, chunk=4)
    with pytest.raises(ConfigError, match="boxes are read at what they carry"):
        SelfReferenceConfig(memory=memory)


@pytest.mark.spec("ENG-CHUNK-D7")
def test_what_the_chunk_engine_leaves_to_the_token_loop():
    chunk, linear = Engine.registry["chunk"], {"kind": "kl", "link_at": "linear"}
    moving = MemoryConfig(retention=linear, chunk=4, algorithm="momentum")
    assert "without their mean" in (chunk.refuses(moving) or "")
    assert explain(Plan.sketch(moving, length=8, steps=2))[0] == "sequential"
    assert "linear layers" in (chunk.refuses(MemoryConfig(retention=linear, chunk=4, structure="slots")) or "")
    adaptive = MemoryConfig(retention={"kind": "lq", "link_at": "chunk"}, chunk=4, algorithm="adaptive")
    assert "linear in their gradients" in (chunk.refuses(adaptive) or "")
    plain = MemoryConfig(retention=linear, chunk=4)
    assert "per phi channel" in (chunk.unfit(Plan.sketch(plain, channels=True)) or "")
