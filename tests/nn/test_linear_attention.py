"""Linear attention against a weight for every pair, in pieces, packed, padded, and refused."""

from functools import partial

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from hecate import MemoryState, memory_scan, memory_step
from hecate.errors import ConfigError, ShapeError
from hecate.nn import LinearAttention, LinearAttentionState, linear_attention
from hecate.rule import Gates
from tests.nn.attentions import masks_of
from tests.nn.layers import inputs as narrow
from tests.nn.layers import leaves, near, seeded, shaken
from tests.nn.linear_cases import MAPS, Case

D_MODEL, HEADS, LENGTH = 12, 4, 7

MASKS = [(), ("write",), ("reset",), ("write", "reset")]
either_way = pytest.mark.parametrize("causal", [True, False], ids=["causal", "all"])


@pytest.mark.spec("LIN-ATT-D1", "LIN-ATT-D2", "LIN-ATT-D4")
@pytest.mark.parametrize("feature_map", MAPS)
@either_way
def test_outputs_and_gradients_against_a_weight_for_every_pair(feature_map, causal):
    normalizer = "none" if feature_map == "identity" else "sum"
    for masks in MASKS if feature_map == "elu" else [(), ("write", "reset")]:
        Case(feature_map, causal=causal, masks=masks, normalizer=normalizer).check()


@pytest.mark.spec("LIN-ATT-D5")
@either_way
@pytest.mark.parametrize("heads, groups", [(4, 1), (3, 3)])
def test_shared_key_heads(causal, heads, groups):
    case = Case("t2r", causal=causal, heads=heads, groups=groups, masks=("write", "reset"))
    case.check()
    _, state = case.run()
    assert state.memory["weight"].shape == (2, groups, 3, 7)
    assert state.normalizer.memory["weight"].shape == (2, groups, 1, 7)


@pytest.mark.spec("LIN-ATT-D1")
@either_way
@pytest.mark.parametrize("normalizer, eps", [("none", 0.0), ("sum", 0.3)])
def test_normaliser(causal, normalizer, eps):
    Case(causal=causal, normalizer=normalizer, eps=eps, masks=("write", "reset")).check()


@pytest.mark.spec("LIN-ATT-D2")
@pytest.mark.parametrize("masks", [(), ("write",)])
@pytest.mark.parametrize("keys", [0, 1, 9])
def test_other_tokens(masks, keys):
    Case("relu", causal=False, keys=keys, masks=masks).check()


@pytest.mark.spec("LIN-ATT-D1")
@either_way
def test_every_engine_over_several_blocks(causal):
    engines = ("auto", "sequential", "parallel", "compiled") if causal else ("auto", "sequential")
    Case(batch=1, length=70, heads=2, groups=1, causal=causal, masks=("write", "reset")).check(engines=engines)


@pytest.mark.spec("LIN-ATT-D3")
@either_way
def test_a_query_without_weights_gets_zero(causal):
    q = torch.tensor([[1.0, -1.0], [-1.0, -1.0]]).view(1, 2, 1, 2).requires_grad_()
    k = torch.tensor([[-1.0, 1.0], [1.0, 1.0]]).view(1, 2, 1, 2).requires_grad_()
    v = torch.ones(1, 2, 1, 3, requires_grad=True)
    y, _ = linear_attention(q, k, v, "relu", causal=causal)
    assert torch.equal(y[0, :, 0, 0], torch.tensor([0.0 if causal else 1.0, 0.0]))
    grads = torch.autograd.grad(y.square().sum(), (q, k, v))
    assert all(grad.isfinite().all() for grad in grads)
    nothing = torch.zeros(1, 2, dtype=torch.bool)
    assert not linear_attention(q, k, v, causal=causal, write_mask=nothing)[0].any()


@pytest.mark.spec("LIN-ATT-I3")
@either_way
@pytest.mark.parametrize("positions", ["none", "rotary", "relative", {"kind": "relative", "form": "linear"}], ids=str)
def test_masked_keys_and_values_may_be_anything(causal, positions):
    masks = ("write",) if positions == "relative" else ("write", "reset")
    case = Case("t2r", causal=causal, masks=masks, positions=positions)
    shown, q = case.masks["write_mask"][..., None, None], case.qkv[0]
    zero, bad = ([torch.where(shown, x, to) for x in case.qkv[1:]] for to in (0.0, float("nan")))
    (y, state), (z, after) = (case.run(None, *pair) for pair in (zero, bad))
    assert all(map(torch.equal, leaves((z, after)), leaves((y, state))))
    wanted = [q, *case.qkv[1:], *case.learned]
    slopes = [torch.autograd.grad(item.square().sum(), wanted, allow_unused=True) for item in (y, z)]
    near(slopes[1], slopes[0], 0.0)
    assert not torch.where(shown, 0.0, slopes[1][1]).any()


@pytest.mark.spec("LIN-ATT-I3")
@either_way
def test_padding_moves_nothing_whatever_it_holds(causal):
    write = torch.tensor([[True, True, False, True, False]])
    x = narrow(1, 5, width=D_MODEL)
    layer = layer_of(causal=causal)
    y, state = layer(x, write_mask=write)
    slopes = []
    for garbage in (float("nan"), 1e6, 0.0):
        bad = torch.where(write.unsqueeze(-1), x, garbage).requires_grad_()
        z, after = layer(bad, write_mask=write)
        assert torch.equal(z[write], y[write])
        assert all(map(torch.equal, leaves(after), leaves(state)))
        slopes.append(torch.autograd.grad(z[write].square().sum(), [*layer.parameters(), bad]))
    near(slopes[1], slopes[2])  # what is not finite is read, as a query: 0 times it is no number
    assert not slopes[1][-1][~write].any()
    near(layer(x[write][None])[0], y[write][None])  # padding anywhere is as none


@pytest.mark.spec("LIN-ATT-I3")
def test_padding_of_a_context_moves_nothing_whatever_it_holds():
    layer = layer_of(causal=False, d_context=5)
    x, context = narrow(2, 3, width=D_MODEL), narrow(2, 4, width=5, seed=5)
    write = torch.tensor([[True, True, False, False], [True, False, True, True]])
    y, state = layer(x, context=context, write_mask=write)
    bad = torch.where(write.unsqueeze(-1), context, float("nan")).requires_grad_()
    z, after = layer(x, context=bad, write_mask=write)
    assert torch.equal(z, y) and all(map(torch.equal, leaves(after), leaves(state)))
    slope, *weights = torch.autograd.grad(z.square().sum(), [bad, *layer.parameters()])
    near(weights, list(torch.autograd.grad(y.square().sum(), list(layer.parameters()))))
    assert slope[~write].eq(0).all()
    for row in range(2):
        alone = layer(x[row : row + 1], context=context[row][write[row]][None])[0]
        near(alone, y[row : row + 1])


@pytest.mark.spec("LIN-ATT-I4")
@either_way
def test_lengths_of_packed_documents_are_resets_where_they_begin(causal):
    layer, x = layer_of(causal=causal), narrow(1, LENGTH, width=D_MODEL)
    reset = torch.zeros(1, LENGTH, dtype=torch.bool)
    reset[0, [2, 3]] = True
    near(layer(x, cu_seqlens=torch.tensor([0, 2, 3, 7])), layer(x, reset_mask=reset), 0.0)


def layer_of(*, seed=0, shake=0.3, **options):
    options = {"kv_heads": 2, "d_key": 5, "d_value": 3, **options}
    return shaken(LinearAttention(D_MODEL, HEADS, generator=seeded(seed), **options), seed + 1, shake)


STREAMS = {
    "elu": {},
    "none": {"normalizer": "none", "feature_map": "identity"},
    "cosformer": {"feature_map": MAPS["cosformer"]},
    "favor": {"feature_map": MAPS["favor"]},
    "before": {"positions": "rotary"},
    "numerator": {"positions": {"kind": "rotary", "where": "numerator"}},
    "string": {"positions": {"kind": "circulant_string", "where": "numerator"}},
    "polar": {"positions": {"kind": "polar", "base": 100.0}, "feature_map": "softplus"},
    "decay": {"positions": {"kind": "relative", "form": "linear"}},
}


@pytest.mark.spec("LIN-ATT-I1")
def test_a_context_in_pieces_and_its_state_read_again():
    layer = layer_of(causal=False, d_context=5)
    x, context = narrow(2, 3, width=D_MODEL), narrow(2, 6, width=5, seed=5)
    write = masks_of(2, 6)["write_mask"]
    y, state = layer(x, context=context, write_mask=write)
    held = None
    for at, end in ((0, 2), (2, 2), (2, 6)):
        _, held = layer(x[:, :0], held, context=context[:, at:end], write_mask=write[:, at:end])
    near(held, state)
    z, again = layer(x, held)
    near(z, y)
    near(again, held, 0.0)
    near(torch.cat([layer(part, held)[0] for part in x.split(1, 1)], 1), y)


@pytest.mark.spec("LIN-ATT-I1")
def test_without_order_a_state_adds_up():
    layer, x = layer_of(causal=False), narrow(2, LENGTH, width=D_MODEL)
    y, state = layer(x)
    _, first = layer(x[:, :3])
    z, both = layer(x[:, 3:], first)
    near(both, state)
    near(z, y[:, 3:])


@pytest.mark.spec("LIN-ATT-I1")
def test_the_state_is_small_detachable_and_wide():
    layer = layer_of().float()
    _, short = layer(narrow(2, 1, width=D_MODEL).float())
    _, long = layer(narrow(2, 90, width=D_MODEL).float())
    positions = 2 * 2 * 2 * 8  # which every state of a memory counts, that of its normaliser too
    assert short.bytes == long.bytes == 2 * 2 * (3 + 1) * 5 * 4 + positions
    assert long.memory["weight"].requires_grad and not long.detach().memory["weight"].requires_grad
    assert isinstance(long.detach(), LinearAttentionState) and LinearAttentionState is MemoryState
    low = layer.bfloat16()(narrow(2, 9, width=D_MODEL).bfloat16())
    assert low[0].dtype == torch.bfloat16 and low[1].normalizer.memory["weight"].dtype == torch.float32


@pytest.mark.spec("LIN-ATT-I1")
@pytest.mark.parametrize("name", ["elu", "none", "cosformer", "favor", "decay"])
def test_a_memory_goes_on_from_the_state_of_attention_and_back(name):
    layer, x = layer_of(kv_heads=HEADS, **STREAMS[name]), narrow(2, LENGTH, width=D_MODEL)
    whole, last = layer(x)
    _, state = layer(x[:, :3])
    rest = layer.asked(x[:, 3:], state)
    options = {"gates": rest.gates, "phi_params": rest.phi_params}
    y, after = memory_scan(rest.config, rest.q, rest.k, rest.v, **options, state=state)
    near(layer.out(y.flatten(-2)), whole[:, 3:])
    near(after, last)
    _, state = layer(x[:, :-1])
    if rest.gates.retain is not None:
        options["gates"] = Gates(retain=rest.gates.retain[:, -1])
    y, after = memory_step(rest.config, rest.q[:, -1], rest.k[:, -1], rest.v[:, -1], **options, state=state)
    near(layer.out(y.flatten(-2)), whole[:, -1])
    more = narrow(2, 2, width=D_MODEL)
    near(layer(more, after), layer(more, last))


@pytest.mark.spec("LIN-ATT-I5")
@pytest.mark.parametrize("engine", ["parallel", "compiled"])
def test_a_causal_backward_pass_keeps_no_state_per_token(engine):
    length, width = 256, 32
    q, k, v = (torch.randn(1, length, 1, width, generator=seeded(i)).requires_grad_() for i in range(3))
    kept = {}

    def keep(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes() // 8
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        linear_attention(q, k, v, engine=engine)
    states = length * width * width
    # Inputs, features, values with their 1, sums, quotient and masks: N C numbers each; and the
    # state of every 64th token.
    assert sum(kept.values()) <= 16 * length * (width + 1) + states // 64 * 1.1
    assert max(kept.values()) <= states // 16


@pytest.mark.spec("LIN-ATT-I6")
@pytest.mark.parametrize(
    ("name", "causal"), [*((name, True) for name in STREAMS), *((name, False) for name in ("elu", "string", "decay"))]
)
def test_second_derivatives(name, causal):
    sizes = {"kv_heads": 1, "d_key": 3, "d_value": 1, "generator": seeded()}
    layer = LinearAttention(4, 2, causal=causal, **sizes, **STREAMS[name])
    x = narrow(1, 3, width=4).requires_grad_()
    write = torch.tensor([[True, False, True]])

    def run(x):
        y, state = layer(x, write_mask=write)
        return y, state.memory["weight"]

    assert torch.autograd.gradcheck(run, (x,), fast_mode=True)
    assert torch.autograd.gradgradcheck(run, (x,), fast_mode=True)


LEARNING = {
    "t2r": {"feature_map": MAPS["t2r"]},
    "string": {"positions": "circulant_string"},
    "table": {"positions": {"kind": "relative", "max_distance": 3}},
    "decay": {"positions": {"kind": "relative", "form": "linear"}},
    "both": {"positions": {"kind": "relative", "max_distance": 3}, "causal": False},
}


@pytest.mark.spec("LIN-ATT-I6")
def test_names():
    layer = layer_of(feature_map="favor", positions="circulant_string")
    expected = layer.state_dict()
    weights = ["key_value.weight", "out.weight", "query.weight"]
    assert sorted(expected) == sorted([*weights, "phi_frozen.w", "position_params.circulant"])
    assert [name for name, _ in layer.named_buffers()] == ["phi_frozen.w"]
    assert expected["phi_frozen.w"].shape[0] == 2 and expected["phi_frozen.w"].std() > 0.1
    assert "kv_heads=2" in repr(layer) and "'favor'" in repr(layer)


@pytest.mark.spec("LIN-ATT-D6")
def test_dropout_drops_answers_of_heads_and_only_while_training():
    x = narrow(2, 50, width=D_MODEL)
    layer, plain = layer_of(dropout=0.5), layer_of()
    layer.out = plain.out = torch.nn.Identity()
    y, _ = plain(x)
    torch.manual_seed(0)
    z, _ = layer(x)
    dropped = z == 0
    near(z[~dropped], 2 * y[~dropped])
    # 1200 draws of one half: five standard deviations are 0.072.
    assert abs(float(dropped.double().mean()) - 0.5) < 0.072
    near(layer.eval()(x)[0], y, 0.0)


BUILDS = {
    "normalizer='sum' with feature_map 'identity'.*elu": {"feature_map": "identity"},
    "normalizer must be one of .*got 'mean'": {"normalizer": "mean"},
    "^eps: eps=0.1 .*normalizer is 'none'": {"normalizer": "none", "eps": 0.1},
    "eps must be a finite number >= 0, got -1": {"eps": -1},
    "causal must be True or False, got 1": {"causal": 1},
    "^kv_heads: kv_heads=3 does not divide heads=4": {"kv_heads": 3},
    "kv_heads must be an integer >= 1, got 0": {"kv_heads": 0},
    "d_context must be an integer >= 1, got 2.0": {"d_context": 2.0, "causal": False},
    r"dropout must be a number in \[0, 1\), got 1": {"dropout": 1},
    "causal=True with d_context=5": {"d_context": 5},
    "positions 'rotary' with d_context=5": {"d_context": 5, "causal": False, "positions": "rotary"},
    "feature_map 'cosformer' with d_context": {"d_context": 5, "causal": False, "feature_map": "cosformer"},
    "positions 'rotary' .*no pair": {"positions": "rotary", "d_key": 1},
    "unknown position kind 'rotery'.*rotary": {"positions": "rotery"},
    "unknown feature_map kind 'elo'.*elu": {"feature_map": "elo"},
    "engine='chunk' cannot run": {"engine": "chunk"},
    "autodiff must be one of": {"autodiff": "hand"},
}


@pytest.mark.spec("LIN-ATT-I7")
def test_builds_that_are_refused():
    for message, options in BUILDS.items():
        with pytest.raises(ConfigError, match=message):
            LinearAttention(D_MODEL, HEADS, **options)


def calls():
    x, context = narrow(2, 3, width=D_MODEL), narrow(2, 4, width=5)
    plain, all_, cross = layer_of(), layer_of(causal=False), layer_of(causal=False, d_context=5)
    other, polar = layer_of(normalizer="none"), layer_of(positions="polar", kv_heads=HEADS, normalizer="none")
    write, state = torch.ones(2, 3, dtype=torch.bool), plain(x)[1]
    sums, heads = state.memory["weight"], x[:, :, None]
    numbers = state.normalizer._replace(memory={"weight": 1})

    def ones(*shapes):
        return partial(linear_attention, *(torch.ones(*shape, 2) for shape in shapes))

    def bare(*rest, **options):
        return partial(linear_attention, heads, heads, heads, *rest, **options)

    return {
        "built for self-attention": partial(plain, x, context=context),
        "needs a context, or the state": partial(cross, x),
        "write_mask is over context": partial(cross, x, all_(x)[1], write_mask=write),
        r"context must be \[B, T, 5\]": partial(cross, x, context=x),
        r"write_mask must be bool .*\[2, 4\]": partial(cross, x, context=context, write_mask=write),
        "cannot be told apart in cross-attention": partial(cross, x, context=context, reset_mask=write),
        "causal=False with a state and reset_mask": partial(all_, x, state, reset_mask=write),
        "give cu_seqlens or state": partial(plain, x[:1], state, cu_seqlens=torch.tensor([0, 1, 3])),
        "cu_seqlens must rise": partial(plain, x[:1], cu_seqlens=torch.tensor([0, 4])),
        "cu_seqlens must be an integer tensor": partial(plain, x[:1], cu_seqlens=[0, 3]),
        r"state.normalizer must be None here, got torch.float64 \[2, 2, 1, 5\]": partial(other, x, state),
        r"state.memory\['weight'\] must be \[1, 2, 3, 5\]": partial(plain, x[:1], state),
        r"state.memory\['weight'\] must be \[2, 4, 3, 10\]": partial(polar, x, state._replace(normalizer=None)),
        r"state.memory\['weight'\] must be .*int64": partial(plain, x, tree_map_only(Tensor, Tensor.long, state)),
        "state.normalizer must be .*no tensor": partial(plain, x, state._replace(normalizer=numbers)),
        "state must hold sums alone, got .'momentum.weight'.": partial(
            plain, x, state._replace(slots={"momentum.weight": sums})
        ),
        "state must be the MemoryState that this attention": partial(plain, x, (x, x)),
        r"x must be \[B, T, 12\]": partial(plain, context),
        r"x must be \[B, T, 12\], got None": partial(plain, None),
        "write_mask must be bool .* no tensor": partial(plain, x, write_mask=[[True] * 3] * 2),
        "one query per key, got 3 queries and 4 keys": ones((1, 3, 1), (1, 4, 1), (1, 4, 1)),
        "2 key heads do not divide 3 query": ones((1, 3, 3), (1, 3, 2), (1, 3, 2)),
        "0 key heads do not divide 2": ones((1, 3, 2), (1, 3, 0), (1, 3, 0)),
        "rows of q, k|equal B": ones((1, 3, 1), (2, 3, 1), (2, 3, 1)),
        "'t2r' has parameters": bare(MAPS["t2r"]),
        "'circulant_string' need parameters": bare(positions="circulant_string"),
        "unknown engine 'fast'": bare(causal=False, engine="fast"),
        "autodiff must be one of": bare(causal=False, autodiff="fast"),
        "phi_params must be what": bare("elu", {"w": x}),
        "got 3": bare("elu", 3),
        "position_params must be a mapping": bare(positions="relative", position_params={"bias": 1}),
    }


@pytest.mark.spec("LIN-ATT-I7")
def test_calls_that_are_refused():
    for message, call in calls().items():
        with pytest.raises((ConfigError, ShapeError), match=message):
            call()
