"""Chunks whose gradients see the decayed state of the chunk's start."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch

from hecate import MemoryConfig, named_rule
from hecate.engine import Plan, explain
from hecate.engine.chunk.engine import span_size
from hecate.errors import ShapeError
from tests.engine.test_properties import Result, in_pieces, step_by_step, whole
from tests.memories import Case, case_of, close, config_of

DECAYED = {"retention": "decay", "decay_order": "before_gradient"}
DEEP = {"kind": "mlp", "layers": 2, "expansion": 1, "activation": "tanh", "bias": True}
NO_PARAMS = {"learned": {}, "frozen": {}}
KINDS = {
    "matrix": {},
    "momentum": {"algorithm": "momentum"},
    "normalised": {"feature_map": "elu", "normalizer": "sum", "read": "before"},
    "adaptive": {"algorithm": "adaptive"},
    "coupled": {"retention": {"kind": "l2", "penalty": 0.2}},
    "sparse": {"retention": {"kind": "elastic_net", "threshold": 0.05}},
    "vector": {"structure": "vector", "algorithm": "momentum"},
    "deep": {"structure": DEEP, "algorithm": "momentum"},
}


def decayed(chunk: int = 3, **fields: Any) -> MemoryConfig:
    return config_of(**{**DECAYED, "chunk": chunk, **fields})


def chosen(case: Case, **options: Any) -> list[Result]:
    """By the token loop and by the chunk engine, whole and in pieces, on the tape and without."""
    results = [whole(case, engine="sequential", autodiff="tape")]
    results += [whole(case, engine="chunk", autodiff=how) for how in ("tape", "torch")]
    return [*results, in_pieces(case, [1, 5, 8], engine="chunk", **options)]


@pytest.mark.spec("RULE-ORDER-D1", "ENG-CHUNK-D1", "ENG-CHUNK-D3", "ENG-CHUNK-D5", "ENG-CHUNK-V1")
@pytest.mark.parametrize("commit", ["token", "chunk"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_chunk_engine_is_the_token_loop(kind, commit, monkeypatch):
    """Masks and resets, gates of 0 and 1, per head and per channel; chunks of several steps."""
    config = decayed(commit=commit, **KINDS[kind])
    wide = [False, True] if config.structure.linear else [False]
    for name in ("DUAL", "BUILT"):
        monkeypatch.setattr(f"hecate.engine.chunk.engine.{name}", 2)
    for channels, masks in product(wide, (False, True)):
        case = case_of(config, length=10, d=2, channels=channels, masks=masks, ends=0.2)
        expected, *others = chosen(case)
        for result in others:
            result.equals(expected, 1e-12)


@pytest.mark.spec("RULE-ORDER-D1", "ENG-STEP-D1", "ENG-CHUNK-I1")
@pytest.mark.parametrize("commit", ["token", "chunk"])
def test_steps_and_engines_in_turn_go_on_with_the_chunk(commit):
    case = case_of(decayed(4, commit=commit, algorithm="momentum"), length=10)
    expected = whole(case, engine="sequential")
    step_by_step(case).equals(expected, 1e-12)
    for first, second in (("chunk", "sequential"), ("sequential", "chunk")):
        own = case.fresh()
        y, state = own.part(0, 6).scan(engine=first)
        z, state = own.part(6, 10).scan(state, engine=second)
        Result(own, torch.cat([y, z], 1), state).equals(expected, 1e-12)
    # The product belongs to the chunk: two gates in, and 1 where a chunk has closed.
    _, state = case.part(0, 6).scan()
    close(state.pending["retain"], case.gates.retain[:, 4:6].prod(1), 1e-15)
    _, state = case.part(0, 8).scan()
    assert bool((state.pending["retain"] == 1).all())


@pytest.mark.spec("RULE-ORDER-D1")
def test_one_gate_for_all_channels_is_a_gate_per_head_and_either_goes_on_with_the_other():
    case = case_of(decayed(4), length=7)
    retain = case.gates.retain
    wide = case._replace(gates=case.gates._replace(retain=retain.unsqueeze(-1).expand(2, 7, 2, 3)))
    y, state = case.scan()
    z, final = wide.scan()
    close(z, y, 1e-12)
    close(final.pending["retain"], state.pending["retain"].unsqueeze(-1).expand(2, 2, 3), 1e-12)
    for first, second in ((case, wide), (wide, case)):
        _, half = first.part(0, 2).scan()
        close(second.part(2, 7).scan(half)[0], y[:, 2:], 1e-12)


@pytest.mark.spec("RULE-ORDER-D1")
@pytest.mark.parametrize("commit", ["token", "chunk"])
@pytest.mark.parametrize(
    "retention",
    [
        {"kind": "l2", "penalty": 0.2},
        {"kind": "elastic_net", "threshold": 0.05},
        {"kind": "sphere"},
        {"kind": "norm_cap", "norm": 0.7, "retention": "decay"},
    ],
    ids=lambda fields: fields["kind"],
)
def test_the_anchor_is_the_first_state_decayed_once_by_the_product(retention, commit):
    """Written out with the retention's own step: not decayed gate after gate."""
    config = decayed(retention=retention, commit=commit)
    case = case_of(config, batch=1, heads=1, length=8)
    step = config.retention.step
    p, q, v = case.k[0, :, 0], case.q[0, :, 0], case.v[0, :, 0]
    lr, retain = case.gates.lr[0, :, 0], case.gates.retain[0, :, 0]
    memory = config.retention.start(case.initial["weight"])
    rows = []
    for t in range(8):
        if t % 3 == 0:
            first, kept, total = memory, torch.ones(1), torch.zeros_like(memory)
        kept = kept * retain[t]
        anchor = step(first, torch.zeros_like(first), kept)
        grad = torch.outer(anchor[0] @ p[t] - v[t], p[t])
        if commit == "token":
            memory = step(memory, -lr[t] * grad, retain[t : t + 1])
        else:
            total = total - lr[t] * grad
            memory = step(memory, total, kept) if t % 3 == 2 else memory
        rows.append(memory[0] @ q[t])
    for engine in ("sequential", "chunk"):
        y, state = case.scan(engine=engine)
        close(y[0, :, 0], torch.stack(rows), 1e-12)
        close(state.memory["weight"][0, 0], memory[0], 1e-12)


@pytest.mark.spec("RULE-ORDER-R2")
@pytest.mark.parametrize("commit", ["token", "chunk"])
def test_a_matrix_s_decayed_error_is_that_of_decayed_keys(commit):
    """In one chunk: with_step on values v - M_0 (a_t k_t) + M_0 k_t, whatever else is decayed."""
    case = case_of(decayed(9, commit=commit, algorithm="momentum"), length=9)
    start, kept = case.initial["weight"], case.gates.retain.cumprod(1)
    seen = torch.einsum("hvp,bthp->bthv", start, kept.unsqueeze(-1) * case.k)
    plain = case.config.model_copy(update={"decay_order": "with_step"})
    moved = case.v - seen + torch.einsum("hvp,bthp->bthv", start, case.k)
    y, state = case.scan()
    z, final = case._replace(config=plain, v=moved).scan()
    close(y, z, 1e-12)
    close(state.memory["weight"], final.memory["weight"], 1e-12)


@pytest.mark.spec("ENG-CHUNK-I6")
def test_auto_takes_the_chunk_engine_with_as_many_tokens_to_a_step():
    rule = named_rule("gated_delta").model_copy(update={"chunk": 64})
    for commit in ("token", "chunk"):
        own = rule.model_copy(update={"commit": commit})
        assert explain(Plan.sketch(own, length=256, steps=4))[0] == "chunk"
        assert span_size(own, channelwise=False) == 64


@pytest.mark.spec("ENG-CALL-I3")
def test_a_state_without_the_product_is_refused():
    case = case_of(decayed())
    plain = case.config.model_copy(update={"decay_order": "with_step"})
    _, state = case._replace(config=plain).scan()
    with pytest.raises(ShapeError, match=r"state.pending must hold \['retain'\], got nothing"):
        case.scan(state)
