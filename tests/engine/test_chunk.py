"""The chunk engine against the token loop: streaming, transforms, refusals, special cases."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, reject
from hypothesis import strategies as st
from torch import Tensor

from hecate import MemoryConfig, named_rule
from hecate.bias import L2
from hecate.engine import Engine, Plan, choose, explain
from hecate.engine.chunk import engine as chunk
from hecate.errors import ConfigError, NonFiniteError, ShapeError
from hecate.tape import Tape
from tests.engine.test_properties import Result, cases, in_pieces, whole
from tests.memories import BIASES, Case, case_of, close, config_of, flat_state, same_state
from tests.rule import test_knobs as users  # registers variants of a user
from tests.rule.distance import errors

NO_PARAMS = {"learned": {}, "frozen": {}}
OWN = (users.SoftClip, users.SmoothSign, users.Diagonal)
SMOOTH = {"kind": "mlp", "layers": 3, "expansion": 2, "activation": "tanh", "residual": True}
NORMED = {"kind": "mlp", "layers": 1, "residual": True, "norm": "layer", "bias": True}
STRUCTURES = st.one_of(
    st.just("matrix"),
    st.fixed_dictionaries(
        {
            "kind": st.just("mlp"),
            "layers": st.integers(1, 4),
            "expansion": st.integers(1, 2),
            "activation": st.sampled_from(["gelu", "silu", "tanh", "relu"]),
            "residual": st.booleans(),
            "norm": st.sampled_from(["none", "none", "layer"]),
            "norm_eps": st.just(0.1),
            "bias": st.booleans(),
        }
    ),
    st.fixed_dictionaries({"kind": st.just("gated_mlp"), "expansion": st.integers(1, 2)}),
    st.just("diagonal_of_a_user"),
)
FIELDS = st.fixed_dictionaries(
    {
        "structure": STRUCTURES,
        "bias": st.sampled_from(BIASES),
        "retention": st.sampled_from(["none", "decay", "decay", "soft_clip_of_a_user"]),
        "algorithm": st.sampled_from(["gd", "momentum", "momentum", "smooth_sign_of_a_user"]),
        "feature_map": st.sampled_from(["identity", "elu"]),
        "chunk": st.integers(2, 7),
        "commit": st.sampled_from(["token", "chunk"]),
        "read": st.sampled_from(["after", "before"]),
        "decay_order": st.sampled_from(["with_step", "before_gradient"]),
        "normalizer": st.sampled_from(["none", "none", "sum"]),
        "key_norm": st.sampled_from(["none", "l2"]),
        "step": st.sampled_from(["raw", "normalized"]),
    }
)


@st.composite
def chunk_cases(draw: Any, **fixed: Any) -> Case:
    """Cases with chunk > 1: masks, resets, and per-channel retain where a matrix takes it."""
    width = draw(st.integers(1, 3))
    sizes = {"d": width, "width": width, "length": draw(st.integers(1, 15))}
    return draw(cases(FIELDS, **{**sizes, **fixed}))


@pytest.mark.spec("ENG-CHUNK-D1", "ENG-CHUNK-D2", "ENG-CHUNK-D3", "ENG-CHUNK-V1", "ENG-CHUNK-I1")
@pytest.mark.spec("ENG-CHUNK-D4", "ENG-CHUNK-D5", "ENG-CHUNK-D6", "ENG-CHUNK-I5")
@given(st.data())
def test_whole_and_pieces_against_the_token_loop(data):
    """Outputs, anchor, pending, position, and gradients of every input, gate and initial weight.

    Whatever structure, bias, retention and algorithm, those of a user included.
    """
    case = data.draw(chunk_cases())
    try:
        expected = whole(case, engine="sequential", autodiff="tape")
    except NonFiniteError:  # a deep memory that blows up by itself leaves nothing to compare
        reject()
    for autodiff in ("tape", "torch"):
        whole(case, engine="chunk", autodiff=autodiff).equals(expected)
    cuts = data.draw(st.lists(st.integers(0, case.k.shape[1]), max_size=4))
    in_pieces(case, cuts, engine="chunk").equals(expected)


@pytest.mark.spec("ENG-RATES-D1")
@pytest.mark.parametrize("masks", [False, True])
@pytest.mark.parametrize(
    "fields",
    [
        {"structure": "gated_mlp", "bias": "dot", "algorithm": "newton_schulz"},
        {"structure": SMOOTH, "retention": "decay", "decay_order": "before_gradient"},
        {"structure": NORMED, "algorithm": "momentum", "read": "before"},
    ],
    ids=lambda fields: str(fields["structure"]),
)
def test_an_lr_for_every_weight(fields, masks):
    """Columns that are alike are one lr; others are those of the token loop, whole and in pieces, with gradients."""
    case = case_of(config_of(chunk=4, commit="chunk", **fields), d=3, width=3, length=11, rates=True, masks=masks)
    expected = whole(case, engine="sequential", autodiff="tape")
    for autodiff in ("tape", "torch"):
        whole(case, engine="chunk", autodiff=autodiff).equals(expected)
    in_pieces(case, [2, 3, 9], engine="chunk").equals(expected)
    one, count = case.gates.lr[..., 0], case.gates.lr.shape[-1]
    plain = case._replace(gates=case.gates._replace(lr=one))
    alike = case._replace(gates=case.gates._replace(lr=one.unsqueeze(-1).expand(*one.shape, count)))
    for engine in ("sequential", "chunk"):
        close(alike.scan(engine=engine)[0], plain.scan(engine=engine)[0], 1e-13)
        assert (plain.scan()[0] - case.scan(engine=engine)[0]).norm() > 1e-3


@pytest.mark.spec("RULE-RATES-D1")
def test_an_lr_for_every_weight_is_refused_where_it_means_nothing():
    deep = {"structure": "gated_mlp", "chunk": 4, "commit": "chunk"}
    for fields, reason in (
        ({**deep, "commit": "token"}, "commit='token' takes steps whose lr the algorithm knows"),
        ({**deep, "structure": "matrix"}, "structure 'matrix' is one weight"),
        ({**deep, "step": "normalized"}, "step='normalized' makes lr of phi"),
        ({**deep, "algorithm": "omega"}, "algorithm 'omega' makes gradients with one lr"),
    ):
        case = case_of(config_of(**fields), rates=True)
        with pytest.raises(ConfigError, match=f"gates.lr has one value for each weight, but {reason}.*pass .B, T, H."):
            case.scan()
    case = case_of(config_of(**deep))
    lr = case.gates.lr.unsqueeze(-1)
    with pytest.raises(ShapeError, match=r"must be \[B, T, H, 3\], in the order of w1, w2, w3, got \[2, 7, 2, 1\]"):
        case._replace(gates=case.gates._replace(lr=lr)).scan()
    lr = lr.expand(*lr.shape[:-1], 3).clone()
    lr[1, 2, 0, 1] = -1
    with pytest.raises(ConfigError, match="got -1 at batch row 1, token 2, head 0, weight 1"):
        case._replace(gates=case.gates._replace(lr=lr)).scan()


@pytest.mark.spec("ENG-CHUNK-I1")
@given(st.data())
def test_engines_may_take_turns(data):
    """A state of one engine goes on in another, in the middle of a chunk."""
    case = data.draw(chunk_cases())
    expected = whole(case, engine="sequential", autodiff="tape")
    at = data.draw(st.integers(0, case.k.shape[1]))
    for first, second in (("chunk", "sequential"), ("sequential", "chunk")):
        case = case.fresh()
        y, state = case.part(0, at).scan(engine=first)
        z, state = case.part(at, case.k.shape[1]).scan(state, engine=second)
        Result(case, torch.cat([y, z], 1), state).equals(expected)


@pytest.mark.spec("ENG-CHUNK-I2")
@pytest.mark.parametrize("commit", ["token", "chunk"])
@pytest.mark.parametrize("structure", ["matrix", SMOOTH], ids=["matrix", "mlp"])
def test_float32_errs_no_more_than_its_sums(structure, commit):
    """A token passes through T / C chunks, each of whose sums of C terms errs by C eps at most."""
    fields = {"structure": structure, "retention": "decay", "algorithm": "momentum"}
    config = MemoryConfig(**fields, chunk=16, commit=commit, key_norm="l2")
    case = case_of(config, length=96, d=8, width=8)
    case = case._replace(gates=case.gates._replace(lr=case.gates.lr / 16))
    y, state = case.scan(engine="chunk")
    small = case.with_leaves([leaf.float() for leaf in case.leaves])
    z, final = small.scan(engine="chunk")
    assert z.dtype == torch.float32
    bound = 96 * torch.finfo(torch.float32).eps
    close(z, y, bound)
    for name, item in flat_state(final).items():
        close(item, flat_state(state)[name], bound, name)


@pytest.mark.spec("ENG-CHUNK-V1")
def test_relu_at_exactly_zero_has_no_slope_anywhere():
    """Where retain is 0 and a gradient too, a layer vanishes and pre-activations are exactly 0."""
    deep = {"kind": "mlp", "layers": 3, "expansion": 2, "activation": "relu"}
    config = config_of(structure=deep, retention="decay", chunk=2, bias="dot")
    case = case_of(config, batch=1, heads=1, d=1, width=1, length=6, ends=0.3, seed=75)
    expected = whole(case, engine="sequential", autodiff="tape")
    for engine in ("sequential", "chunk"):
        for autodiff in ("tape", "torch"):
            whole(case, engine=engine, autodiff=autodiff).equals(expected)


@pytest.mark.spec("ENG-CHUNK-I4")
def test_the_tape_can_be_read_and_keeps_few_carries(monkeypatch):
    monkeypatch.setattr(chunk, "KEPT", 0)
    case = case_of(config_of(structure=SMOOTH, chunk=2), length=18, d=2, width=2, batch=1)
    tape = Tape(observe=True)
    y, _ = case.scan(engine="chunk", tape=tape)
    assert "segment 2" in str(tape) and "segment 3" not in str(tape)
    inputs = [case.q, case.k, case.v, case.gates.lr]
    grads = tape.backward([y], [torch.ones_like(y)], inputs)
    assert float(tape.norms("chunk 4")["segment 1/chunk 4/chunk.step"]) > 1e-6
    fresh = case.fresh()
    z, _ = fresh.scan(engine="sequential")
    trues = torch.autograd.grad(z.sum(), [fresh.q, fresh.k, fresh.v, fresh.gates.lr])
    for mine, true in zip(grads, trues, strict=True):
        close(mine, true, 1e-12)


@pytest.mark.spec("ENG-CHUNK-I4")
@pytest.mark.parametrize("commit", ["token", "chunk"])
def test_small_scans_run_once_and_long_ones_in_segments(commit, monkeypatch):
    """The same gradients; counts of the inner gradients taken, by the bias they pass."""
    taken = []
    grad = L2.grad
    monkeypatch.setattr(L2, "grad", lambda *a: taken.append(1) or grad(*a))
    retention = {"kind": "decay", "towards": "zero"}  # cotangents of a start add up in another order
    config = config_of(structure=SMOOTH, chunk=2, commit=commit, retention=retention)
    case = case_of(config, length=17, d=2, width=2)
    results, counts = [], []
    for kept in (chunk.KEPT, 0):
        monkeypatch.setattr(chunk, "KEPT", kept)
        own = case.fresh()
        y, state = own.scan(engine="chunk", autodiff="tape")
        total = y.sin().sum() + state.memory["w1"].square().sum()
        for keep in (True, False):
            taken.clear()
            results.append(torch.autograd.grad(total, own.leaves, retain_graph=keep))
            counts.append(len(taken))
    # What was kept is let go of by the first backward pass.
    assert counts == [0, 9, 9, 9]
    for other in results[1:]:
        assert all(torch.equal(*pair) for pair in zip(results[0], other, strict=True))


# Special cases.


@pytest.mark.spec("ENG-CHUNK-R1")
@pytest.mark.parametrize("commit", ["token", "chunk"])
def test_one_chunk_of_l2_is_linear_attention_on_corrected_values(commit):
    """Gradients at M_0 alone: M_t = M_0 + sum lr_i (v_i - M_0 k_i) k_i^T."""
    length = 9
    case = case_of(config_of(chunk=length, commit=commit), length=length)
    start = case.initial["weight"]
    corrected = case.v - torch.einsum("hvp,bthp->bthv", start, case.k)
    sums = case._replace(config=config_of(bias="dot"), v=corrected)
    expected, final = sums.scan(engine="parallel")
    y, state = case.scan(engine="chunk")
    if commit == "token":
        close(y, expected, 1e-12)
    else:  # All but the closing token read the start.
        close(y[:, -1], expected[:, -1], 1e-12)
        still = torch.einsum("hvp,bthp->bthv", start, case.q)
        close(y[:, :-1], still[:, :-1], 1e-12)
    close(state.memory["weight"], final.memory["weight"], 1e-12)


@pytest.mark.spec("ENG-CHUNK-R2", "ENG-CHUNK-R3", "STR-MLP-R2")
@pytest.mark.parametrize("name", ["ttt_linear", "ttt_linear_norm", "ttt_mlp"])
def test_ttt_against_its_paper(name):
    assert named_rule(name).chunk == 16
    for length in (16, 37):
        assert max(errors(name, length, engine="chunk").values()) <= 1e-10


# Masks and resets, and memories at different places of their chunk.


def marked(*rows: list[int], length: int) -> Tensor:
    """A mask that is True at the tokens named for each batch row."""
    mask = torch.zeros(len(rows), length, dtype=torch.bool)
    for row, tokens in zip(mask, rows, strict=True):
        row[tokens] = True
    return mask


PLACES = [
    ({}, {}),
    ({"write": ([0, 1, 2], [])}, {}),  # a row begins masked
    ({"write": ([7, 8, 9, 10], [3])}, {}),  # more masked tokens than a chunk holds
    ({"write": (list(range(11)), [10])}, {}),  # nothing written at all
    ({}, {"reset": ([0], [5])}),
    ({}, {"reset": ([3, 4, 5], [10])}),
    ({"write": ([2, 3], [9, 10])}, {"reset": ([3], [9])}),  # restarts at masked tokens
]


@pytest.mark.spec("ENG-CHUNK-D4")
@pytest.mark.parametrize("place", range(len(PLACES)))
@pytest.mark.parametrize("commit", ["token", "chunk"])
def test_masks_and_resets_where_chunks_begin_and_end(place, commit):
    holes, resets = PLACES[place]
    for turn, structure in enumerate(("matrix", SMOOTH, "diagonal_of_a_user")):
        read = ("after", "before")[(place + turn + (commit == "chunk")) % 2]
        config = config_of(
            structure=structure, retention="decay", algorithm="momentum", chunk=3, commit=commit, read=read
        )
        case = case_of(config, length=11, d=2, width=2)
        write = ~marked(*holes["write"], length=11) if holes else None
        reset = marked(*resets["reset"], length=11) if resets else None
        case = case._replace(write=write, reset=reset)
        expected = whole(case, engine="sequential")
        whole(case, engine="chunk").equals(expected)
        in_pieces(case, [4, 8], engine="chunk").equals(expected)


@pytest.mark.spec("ENG-CHUNK-D4")
@pytest.mark.parametrize("commit", ["token", "chunk"])
def test_memories_at_different_places_of_their_chunk(commit):
    case = case_of(config_of(chunk=4, commit=commit, structure=SMOOTH), length=7, d=2, width=2)
    _, state = case._replace(write=~marked([], [1], length=7)).scan(engine="chunk")
    assert state.position.tolist() == [[3, 3], [2, 2]]
    y, final = case.scan(state, engine="chunk")
    expected, true = case.scan(state, engine="sequential")
    close(y, expected, 1e-12)
    same_state(final, true, 1e-12)
    # Places beyond the chunk, which a state of longer chunks may name.
    far = state._replace(position=state.position + 2)
    y, final = case.scan(far, engine="chunk")
    expected, true = case.scan(far, engine="sequential")
    close(y, expected, 1e-12)
    same_state(final, true, 1e-12)


@pytest.mark.spec("ENG-CHUNK-D4", "ENG-CHUNK-I3")
@pytest.mark.parametrize("commit", ["token", "chunk"])
def test_places_that_may_not_be_seen(commit):
    """Under vmap the number of spans is a bound, not what the masks need."""
    config = config_of(chunk=3, commit=commit, structure=SMOOTH, on_nonfinite="propagate")
    case = case_of(config, length=8, d=2, width=2)
    state = case._replace(write=~marked([], [1], length=8)).scan()[1]
    masks = torch.stack([marked([1, 2], [5], length=8), marked([], [0, 6], length=8)])

    def scan(engine: str, own: Case, state: Any) -> Tensor:
        return own.scan(state, engine=engine, phi_params=NO_PARAMS)[0]

    ways = {
        "position": lambda engine: (
            lambda shift: scan(engine, case, state._replace(position=(state.position + shift) % 3))
        ),
        "write": lambda engine: lambda mask: scan(engine, case._replace(write=~mask), None),
        "reset": lambda engine: lambda mask: scan(engine, case._replace(reset=mask), None),
    }
    for name, way in ways.items():
        points = torch.arange(2) if name == "position" else masks
        got = torch.func.vmap(way("chunk"))(points)
        for index, point in enumerate(points):
            close(got[index], way("sequential")(point), 1e-12, name)


@pytest.mark.spec("ENG-CHUNK-D2")
@pytest.mark.parametrize("fields", [{}, {"retention": "soft_clip_of_a_user"}], ids=["dual", "built"])
def test_chunks_longer_than_a_step(fields, monkeypatch):
    """A chunk may be taken in several steps, whose gradients share its anchor."""
    monkeypatch.setattr("hecate.engine.chunk.engine.DUAL", 3)
    monkeypatch.setattr("hecate.engine.chunk.engine.BUILT", 3)
    config = config_of(structure=SMOOTH, algorithm="momentum", chunk=8, **fields)
    for masks in (False, True):
        case = case_of(config, length=19, d=2, width=2, masks=masks)
        expected = whole(case, engine="sequential")
        whole(case, engine="chunk").equals(expected)
        in_pieces(case, [2, 5, 13], engine="chunk").equals(expected)


# What it refuses.


@pytest.mark.spec("ENG-CHUNK-I6")
def test_a_chunk_of_one_token_is_refused():
    case = case_of(config_of())
    assert Engine.registry["chunk"].refuses(config_of(chunk=2)) is None
    with pytest.raises(ConfigError) as caught:
        case.scan(engine="chunk")
    for word in ("engine='chunk'", "use engine='auto' or 'sequential'", "chunk=1"):
        assert word in str(caught.value)


@pytest.mark.spec("ENG-CHUNK-I6")
def test_auto_takes_the_token_loop_where_resets_leave_too_little_in_a_chunk(caplog):
    case = case_of(config_of(chunk=4, structure=SMOOTH), length=12, d=2, width=2)
    for every, expected in ((1, "sequential"), (2, "chunk"), (4, "chunk")):
        reset = marked(*[list(range(0, 12, every))] * 2, length=12)
        with caplog.at_level("DEBUG", logger="hecate.engine"):
            case._replace(reset=reset).scan()
        assert f"engine {expected}" in caplog.messages[-1]
    chosen, reason = explain(Plan.sketch(case.config, length=12, steps=12))
    assert chosen == "sequential" and "12 chunks for 12 tokens" in reason


@pytest.mark.spec("ENG-CHUNK-I6")
def test_auto():
    for fields, expected in (
        ({"chunk": 8}, "chunk"),
        ({"chunk": 8, "commit": "chunk", "structure": SMOOTH}, "chunk"),
        ({}, "parallel"),
        ({"commit": "chunk"}, "sequential"),
        ({"structure": SMOOTH}, "sequential"),
    ):
        assert explain(Plan.sketch(config_of(**fields)))[0] == expected
    for fields in ({"retention": "soft_clip_of_a_user"}, {"structure": "diagonal_of_a_user"}):
        assert explain(Plan.sketch(config_of(chunk=8, **fields)))[0] == "chunk"
    chosen, reason = explain(Plan.sketch(config_of(chunk=8), length=1))
    assert (chosen, reason) == ("sequential", "a single token")
    with pytest.raises(ConfigError, match="unknown engine 'fast'"):
        choose(Plan.sketch(config_of()), "fast")
