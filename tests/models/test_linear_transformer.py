"""The linear transformer: against every weight formed, in pieces, padded, counted, refused."""

import copy
import math
from itertools import pairwise

import pytest
import torch

from hecate.errors import ConfigError, ShapeError
from hecate.models import LinearTransformer, LinearTransformerConfig
from hecate.nn import LinearAttention
from tests.nn.attentions import masks_of
from tests.nn.layers import in_pieces, leaves, near, near_with_slopes, seeded, shaken
from tests.reference import transformer as reference

SMALL = {"embed_dim": 5, "hidden_size": 8, "num_heads": 2, "num_layers": 2, "dropout": 0.0}
LENGTH = 9
EDIFICE = {"norm": "layer", "mlp": "plain", "bias": True}


def model_of(seed=0, **fields):
    return shaken(LinearTransformer.build(**{**SMALL, **fields}, generator=seeded(seed)))


def inputs(batch=2, length=LENGTH, *, seed=2, width=5):
    return torch.randn(batch, length, width, generator=seeded(seed))


def expected_of(model, x, write_mask=None, reset_mask=None):
    c = model.config
    write = torch.ones(x.shape[:2], dtype=torch.bool) if write_mask is None else write_mask
    reset = torch.zeros_like(write) if reset_mask is None else reset_mask
    sizes = {"layers": c.num_layers, "heads": c.num_heads, "causal": c.causal, "eps": c.eps}
    sizes["kv_heads"] = c.kv_heads or c.num_heads
    w = dict(model.named_parameters())
    rows = zip(x, write, reset, strict=True)
    return torch.stack([reference.transformer(w, *row, **sizes) for row in rows])


@pytest.mark.spec("TRF-LIN-D1")
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("masked", "fields"),
    [
        (False, {}), (True, {}), (True, {"kv_heads": 1, "mlp_ratio": 0.0}), (False, {"num_layers": 3, "eps": 0.5}),
        (True, {**EDIFICE, "eps": 1e-6}), (False, {"norm": "layer"}), (False, {"mlp": "plain"}),
        (False, {"bias": True, "kv_heads": 1}),
    ],
    ids=str,
)  # fmt: skip
def test_against_every_weight_formed(causal, masked, fields):
    model = model_of(causal=causal, output="sequence", **fields)
    x, masks = inputs().requires_grad_(), masks_of(2, LENGTH) if masked else {}
    y, state = model(x, **masks)
    assert (state is None) == (not causal)
    near_with_slopes(y, expected_of(model, x, **masks), [x, *model.parameters()], 1e-9)


@pytest.mark.spec("TRF-LIN-I1", "TRF-LIN-I2")
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("fields", [{}, {"positions": {"kind": "relative", "form": "linear"}, "kv_heads": 1}], ids=str)
def test_any_split(fields, masked):
    """The last written token of a row is its answer, in whatever piece it comes; without one it is zero."""
    model, x = model_of(**fields), inputs()
    sequence = LinearTransformer(model.config.model_copy(update={"output": "sequence"}))
    sequence.load_state_dict(model.state_dict())
    masks = masks_of(2, LENGTH) if masked else {}
    whole, (last, state) = sequence(x, **masks)[0], model(x, **masks)
    for cuts in ([0, 1, 2, 2, 7], [*range(1, LENGTH)]):
        near(in_pieces(sequence, x, cuts, **masks)[0], whole, 1e-10)
        y, carried = None, None
        for at, end in pairwise([0, *cuts, LENGTH]):
            y, carried = model(x[:, at:end], carried, **{name: mask[:, at:end] for name, mask in masks.items()})
        near(y, last, 1e-10)
        near(carried, state, 1e-10)
    for row, answer in enumerate(last):
        near(answer, whole[row, masks["write_mask"][row].nonzero()[-1, 0] if masked else -1])
    nowhere = torch.zeros(2, LENGTH, dtype=torch.bool)
    assert not model(x, write_mask=nowhere)[0].any()


@pytest.mark.spec("TRF-LIN-I2")
def test_padding_that_is_not_finite_reaches_no_gradient():
    model, x = model_of(), inputs(2, 6)
    write = torch.arange(6).expand(2, -1) < 4
    padded = torch.where(write.unsqueeze(-1), x, math.nan).requires_grad_()
    model(padded, write_mask=write)[0].sum().backward()
    got = [weight.grad for weight in model.parameters()]
    model.zero_grad(set_to_none=True)
    model(x[:, :4])[0].sum().backward()
    for mine, weight in zip(got, model.parameters(), strict=True):
        near(mine, weight.grad, 1e-10)
    assert padded.grad[:, 4:].eq(0).all()


@pytest.mark.spec("TRF-LIN-I2")
@pytest.mark.parametrize("causal", [True, False])
def test_padding_anywhere_is_the_same_as_none(causal):
    model, x = model_of(causal=causal), inputs(1, 6)
    y, _ = model(x)
    for place in (0, 3, 6):
        padded = torch.cat([x[:, :place], 1e30 * torch.ones(1, 2, 5), x[:, place:]], 1)
        write = torch.ones(1, 8, dtype=torch.bool)
        write[:, place : place + 2] = False
        near(model(padded, write_mask=write)[0], y, 1e-10)
    nothing = torch.zeros(1, 6, dtype=torch.bool)
    assert bool((model(x, write_mask=nothing)[0] == 0).all())
    assert bool((model(x[:, :0])[0] == 0).all())


@pytest.mark.spec("TRF-LIN-E1")
def test_the_last_token_of_a_non_causal_model():
    x = inputs()
    for layers, same in ((1, True), (2, False)):
        causal = model_of(num_layers=layers)
        both = LinearTransformer(causal.config.model_copy(update={"causal": False}))
        both.load_state_dict(causal.state_dict())
        difference = float((both(x)[0] - causal(x)[0]).detach().norm())
        assert (difference < 1e-12) if same else (difference > 1e-3)
    causal = model_of(output="sequence")
    changed = x.index_fill(1, torch.tensor([5]), 9.0)
    assert torch.equal(causal(changed)[0][:, :5], causal(x)[0][:, :5])
    with pytest.raises(ShapeError, match="causal=False looks at a sequence as a whole"):
        _, state = causal(x)
        model_of(causal=False)(x, state)


def of_positions(positions, heads, width, causal):
    if positions.kind == "circulant_string":
        return heads * width
    if positions.kind == "relative":
        table = (1 if causal else 2) * positions.max_distance + 1
        return heads * (table if positions.form == "table" else 1)
    return 0


def count(c):
    """The formula, with the map's own parameters drawn to be counted."""
    width, kv = c.hidden_size, c.kv_heads or c.num_heads
    head = width // c.num_heads
    params = c.feature_map.init(head, heads=kv, generator=seeded())
    phi = sum(item.numel() for item in params["learned"].values())
    attention = 2 * width * width + 2 * width * kv * head + phi
    attention += of_positions(c.positions, kv, head, c.causal) + c.bias * (2 * width + 2 * kv * head)
    hidden, norm, ups = int(c.mlp_ratio * width), width * (1 + (c.norm == "layer")), 1 + (c.mlp == "gated")
    mlp = norm + (ups + 1) * width * hidden + c.bias * (ups * hidden + width) if hidden else 0
    return (c.embed_dim + c.bias) * width + c.num_layers * (norm + attention + mlp) + norm


COUNTED = [
    {"embed_dim": 1, "hidden_size": 4, "num_layers": 1},
    {"num_layers": 3, "mlp_ratio": 0.0, "bias": True, "output": "sequence"},
    {"hidden_size": 12, "kv_heads": 1, "mlp_ratio": 2.7, "feature_map": "relu", "positions": "rotary"},
    {"hidden_size": 20, "num_heads": 4, "kv_heads": 2, "norm": "layer", "mlp": "plain", "bias": True},
    {"hidden_size": 14, "feature_map": "hedgehog", "positions": "circulant_string"},
    {"feature_map": {"kind": "t2r", "d_phi": 5}, "positions": "relative", "causal": False},
    {"feature_map": {"kind": "hadamard", "d_phi": 3}, "normalizer": "none", "norm": "layer"},
    {"feature_map": {"kind": "mlp", "d_hidden": 3}, "normalizer": "none", "mlp": "plain"},
    {"feature_map": {"kind": "favor", "num_features": 6}, "positions": {"kind": "relative", "form": "linear"}},
    {"feature_map": "dpfp", "positions": "relative", "kv_heads": 1},
    {"feature_map": "taylor", "bias": True},
]


@pytest.mark.spec("TRF-LIN-D2")
@pytest.mark.parametrize("fields", COUNTED, ids=str)
def test_param_count_is_the_true_count(fields):
    options = {**SMALL, **fields}
    model, width = LinearTransformer.build(**options, generator=seeded()), options["hidden_size"]
    true = sum(item.numel() for item in model.parameters())
    assert LinearTransformer.param_count(**options) == true == count(model.config)
    assert LinearTransformer.output_size(**options) == width
    y, _ = model(inputs(2, 3, width=options["embed_dim"]))
    assert y.shape == ((2, 3, width) if options.get("output") == "sequence" else (2, width))


def test_other_dtypes_and_devices():
    narrow = LinearTransformer.build(**SMALL, generator=seeded(), dtype=torch.bfloat16)
    assert narrow(inputs().bfloat16())[0].dtype == torch.bfloat16
    assert LinearTransformer.build(**SMALL, device="meta")(inputs().to("meta"))[0].shape == (2, 8)


@pytest.mark.spec("TRF-LIN-D2")
def test_the_defaults_and_their_count():
    config = LinearTransformerConfig(embed_dim=287)
    assert (config.hidden_size, config.num_layers, config.num_heads) == (256, 4, 4)
    assert (config.dropout, config.window_size, config.output) == (0.1, None, "last")
    defaults = LinearTransformer.recommended_defaults()
    assert set(defaults) == {"hidden_size", "num_layers", "num_heads", "window_size", "dropout"}
    built = LinearTransformer.build(embed_dim=287, **defaults, device="meta")
    assert built.config == config.model_copy(update={"window_size": 60})
    # 287 x 256, then 4 x (4 x 256^2 + 3 x 256 x 1024 + 2 x 256), then 256
    assert LinearTransformer.param_count(embed_dim=287) == 73_472 + 4 * 1_049_088 + 256
    huge = LinearTransformer.param_count(embed_dim=8, hidden_size=2**14, num_heads=2**8)
    assert huge == 8 * 2**14 + 4 * (16 * 2**28 + 2 * 2**14) + 2**14  # no room for its weights
    with pytest.raises(ConfigError, match="hidden_size: .* 12 TiB .* limit of 8 GiB"):
        LinearTransformer.param_count(embed_dim=8, hidden_size=2**20, num_heads=2**14)


def test_a_model_with_biases_starts_where_one_without_them_does():
    plain, biased = (LinearTransformer.build(**SMALL, bias=bias, generator=seeded()) for bias in (False, True))
    near(biased(inputs())[0], plain(inputs())[0], 0.0)
    biased = shaken(biased)
    biased.reset_parameters(seeded())
    near(biased(inputs())[0], plain(inputs())[0], 0.0)


def test_a_layer_of_attention_takes_biases():
    layer = LinearAttention(8, 2, bias=True, generator=seeded())
    assert [name for name, _ in layer.named_parameters() if name.endswith("bias")] == [
        "query.bias", "key_value.bias", "out.bias",
    ]  # fmt: skip
    y, _ = layer(inputs(width=8))
    assert torch.equal(y, LinearAttention(8, 2, generator=seeded())(inputs(width=8))[0])


@pytest.mark.spec("TRF-LIN-I1")
@pytest.mark.parametrize(("fields", "kv"), [({}, 2), ({"kv_heads": 1}, 1)])
def test_the_state_is_the_sums_and_does_not_grow(fields, kv):
    model = model_of(feature_map={"kind": "dpfp", "nu": 1}, **fields)  # d_phi = 2 d = 8
    sizes = {model(inputs(1, length))[1].bytes for length in (1, 9, 40)}
    assert sizes == {8 * (2 * kv * 8 * (4 + 1) + 8) + 8 * 2 * kv * 2}  # and every state's two counts per head


def test_a_window_is_the_most_tokens_of_a_call():
    model, x = model_of(window_size=6), inputs(1, 9)
    with pytest.raises(ShapeError, match="x has 9 tokens, more than window_size=6"):
        model(x)
    _, state = model(x[:, :6])
    free = LinearTransformer(model.config.model_copy(update={"window_size": None}))
    free.load_state_dict(model.state_dict())
    near(model(x[:, 6:], state)[0], free(x)[0], 1e-10)


def test_autocast_rounds_layers_and_not_what_they_add_to():
    model, x = model_of(output="sequence").float(), inputs(1, 9).float()
    exact, _ = model(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):  # a warning is an error here
        y, state = model(x)
    assert y.dtype == torch.float32 and state.layers[0].memory["weight"].dtype == torch.float32
    assert 0 < (y - exact).norm() < 0.05 * exact.norm()


def test_dropout_acts_in_training_alone_on_what_layers_add():
    model, x = model_of(dropout=0.4, num_layers=1, mlp_ratio=0.0, output="sequence"), inputs(1, 3)
    plain = model.eval()(x)[0]
    assert torch.equal(model(x)[0], plain)
    near(plain, expected_of(model, x), 1e-10)
    model.train()
    kept = model.layers[0].attention(model.layers[0].norm(model.project(x)))[0] / 0.6
    torch.manual_seed(0)
    layer, h = model.layers[0], model.project(x)
    added = layer(h, None)[0] - h
    zero = added.abs() < 1e-15
    assert 0 < int(zero.sum()) < zero.numel()
    near(added[~zero], kept[~zero], 1e-12)


@pytest.mark.spec("TRF-LIN-I3")
def test_compiled_copied_detached():
    model, x = model_of(num_layers=1), inputs(1, 2)
    y, state = model(x)
    near(torch.compile(model, backend="eager", fullgraph=True)(x)[0], y)
    near(copy.deepcopy(model)(x)[0], y)
    assert state.last.requires_grad
    assert not any(item.requires_grad for item in leaves(state.detach()))


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"embed_dim": 0}, "embed_dim"),
        ({"embed_size": 4}, "embed_size.*Did you mean 'embed_dim'"),
        ({"num_heads": 3}, "num_heads: must divide hidden_size=8, got 3"),
        ({"dropout": 1.0}, "dropout: must be < 1"),
        ({"mlp_ratio": 0.05}, "gives no hidden unit"),
        ({"mlp": "plain", "mlp_ratio": 0}, "mlp: 'plain' with mlp_ratio=0, which leaves the MLP out"),
        ({"norm": "batch"}, "norm: must be 'rms' or 'layer'"),
        ({"window_size": 0}, "window_size"),
        ({"output": "mean"}, "output: must be 'last' or 'sequence'"),
        ({"kv_heads": 3}, "kv_heads"),
        ({"feature_map": "identity"}, "normalizer='sum' with feature_map 'identity'"),
    ],
)
def test_what_cannot_be_built(fields, named):
    with pytest.raises(ConfigError, match=named):
        LinearTransformer.build(**{**SMALL, **fields})
    with pytest.raises(ConfigError, match=named):
        LinearTransformer.param_count(**{**SMALL, **fields})


def test_embed_dim_is_required():
    with pytest.raises(ConfigError, match="embed_dim: is required"):
        LinearTransformer.build()


@pytest.mark.parametrize(
    ("named", "call"),
    {
        r"x must be \[B, T, 5\]": lambda model, state: model(inputs(width=4)),
        "state must be the TransformerState": lambda model, state: model(inputs(), state.layers),
        "for 3 sequences": lambda model, state: model(inputs(3), state),
        "of 3 layers": lambda model, state: model_of(num_layers=3)(inputs(), state),
        "output 'last'": lambda model, state: model(inputs(), model_of(output="sequence")(inputs())[1]),
    }.items(),
)
def test_what_does_not_fit(named, call):
    with pytest.raises(ShapeError, match=named):
        call(model_of(), model_of()(inputs())[1])
