"""Performer attention: every weight formed, its draws and their schedule, one phi per stream."""

import math
from functools import partial

import pytest
import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from hecate.errors import ConfigError, ShapeError
from hecate.nn import PerformerAttention
from tests.nn.attentions import D_MODEL, HEADS, inputs, masks_of
from tests.nn.layers import near, seeded, shaken
from tests.reference import transformer as reference

LENGTH = 9
KERNELS = {
    "positive": {},
    "hyperbolic": {"kernel": "hyperbolic", "num_features": 6, "kv_heads": 1},
    "sqrt": {"norms": "sqrt", "orthogonal": False, "eps": 0.1},
    "relu": {"kernel": "relu", "num_features": 5},
    "relu_bare": {"kernel": "relu", "num_features": 2, "kernel_epsilon": 0.0},
    "trigonometric": {"kernel": "trigonometric", "normalizer": "none"},
}
every_kernel = pytest.mark.parametrize("options", KERNELS.values(), ids=KERNELS)


def layer_of(seed=0, **options):
    layer = shaken(PerformerAttention(D_MODEL, HEADS, generator=seeded(seed), **options))
    layer.d_model = D_MODEL  # for the laws of layers
    return layer


def features(kernel, epsilon, w, x):
    """phi of x `[T, D]` with projections w `[D, m]`, as the paper prints it."""
    d = x.shape[-1]
    if kernel == "relu":
        return ((x @ w).clamp(min=0) + epsilon) / w.shape[1] ** 0.5
    x = x / d**0.25
    z, half = x @ w, x.square().sum(-1, keepdim=True) / 2
    if kernel == "trigonometric":
        return half.exp() * torch.cat([z.cos(), z.sin()], -1) / w.shape[1] ** 0.5
    if kernel == "hyperbolic":
        return (-half).exp() * torch.cat([z.exp(), (-z).exp()], -1) / (2 * w.shape[1]) ** 0.5
    return (-half).exp() * z.exp() / w.shape[1] ** 0.5


def expected_of(layer, x, options, write_mask=None, reset_mask=None):
    """Outputs, and weights, of the reference."""
    inner = layer.attention
    write = torch.ones(x.shape[:2], dtype=torch.bool) if write_mask is None else write_mask
    reset = torch.zeros_like(write) if reset_mask is None else reset_mask
    epsilon = options.get("kernel_epsilon", 1e-3)
    phi = [partial(features, layer.kernel, epsilon, w) for w in inner.phi_params["frozen"]["w"]]
    sizes = {"heads": HEADS, "kv_heads": inner.kv_heads, "phi": phi, "eps": inner.eps}
    sizes["normalised"] = inner.normalizer == "sum"
    weights, ys = dict(inner.named_parameters()), []
    for row, *masks in zip(x, write, reset, strict=True):
        seen = reference.who_sees_whom(*masks, inner.causal)
        ys.append(reference.attention(weights, row, seen, **sizes))
    return tuple(torch.stack(part) for part in zip(*ys, strict=True))


@pytest.mark.spec("TRF-PERF-D1", "TRF-PERF-D2")
@every_kernel
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("masked", [False, True])
def test_against_every_weight_formed(options, causal, masked):
    layer, x = layer_of(causal=causal, **options), inputs().requires_grad_()
    masks = masks_of(2, LENGTH) if masked else {}
    y, _, weights = layer(x, return_attention=True, **masks)
    assert torch.equal(layer(x, **masks)[0], y)
    expected, formed = expected_of(layer, x, options, **masks)
    near(y, expected, 1e-10)
    near(weights, formed, 1e-10)
    probes = [torch.randn(part.shape, generator=seeded(4)) for part in (y, weights)]
    wanted = [x, *layer.parameters()]
    mine, theirs = (
        torch.autograd.grad(sum((a * b).sum() for a, b in zip(pair, probes, strict=True)), wanted)
        for pair in ((y, weights), (expected, formed))
    )
    near(mine, theirs, 1e-9)


@pytest.mark.spec("TRF-PERF-D2")
@every_kernel
@pytest.mark.parametrize("where", ["before", "numerator"])
def test_the_weights_are_those_that_the_output_used(options, where):
    rotary = {"kind": "rotary", "where": where}
    layer, x = layer_of(causal=False, positions=rotary, **options), inputs()
    answers = []
    hook = layer.attention.out.register_forward_pre_hook(lambda _, given: answers.append(given[0]))
    _, _, weights = layer(x, return_attention=True, **masks_of(2, LENGTH))
    hook.remove()
    inner = layer.attention
    v = inner.key_value(x).split(inner.splits, -1)[1].unflatten(-1, (inner.kv_heads, -1))
    v = v.transpose(1, 2).repeat_interleave(HEADS // inner.kv_heads, 1)
    near((weights @ v).transpose(1, 2).flatten(-2), answers[0], 1e-10)
    if inner.normalizer == "sum" and not inner.eps and where == "before":
        total = weights.sum(-1)
        assert bool((((total - 1).abs() < 1e-12) | (total == 0)).all())


def test_weights_over_a_context_and_what_is_padding_in_it():
    layer = layer_of(causal=False, d_context=5, num_features=7)
    x, context = inputs(), torch.randn(2, 4, 5, generator=seeded(3))
    write = torch.tensor([[True, True, False, True], [True] * 4])
    garbage = torch.where(write.unsqueeze(-1), context, math.nan)
    y, _, weights = layer(x, context=garbage, write_mask=write, return_attention=True)
    assert weights.shape == (2, HEADS, LENGTH, 4) and bool((weights[0, ..., 2] == 0).all())
    gradients = torch.autograd.grad(y.sum() + weights.square().sum(), list(layer.parameters()))
    assert all(bool(g.isfinite().all()) for g in gradients)


@pytest.mark.spec("TRF-PERF-D1", "TRF-HOP-R1")
def test_many_features_are_softmax_attention():
    counts, repeats, scaled = (256, 4096), 80, []
    for count in counts:
        layer = PerformerAttention(D_MODEL, HEADS, num_features=count, orthogonal=False, generator=seeded())
        x, inner = inputs(), layer.attention
        with torch.no_grad():
            inner.query.weight *= 0.4  # short vectors, whose features have light tails
            inner.key_value.weight[:D_MODEL] *= 0.4
            q = inner.query(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
            k, v = (
                part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in inner.key_value(x).split(inner.splits, -1)
            )
            soft = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            soft = inner.out(soft.transpose(1, 2).flatten(-2))
            squares = []
            for _ in range(repeats):
                squares.append((layer(x)[0] - soft).square().sum())
                layer.redraw()
        scaled.append(count * torch.stack(squares))
    # The variance is one number over d_phi, up to terms of its square.
    few, many = scaled
    error = ((few.var() + many.var()) / repeats).sqrt()
    assert abs(few.mean() - many.mean()) < 5 * error
    assert 5 * error < many.mean() < 0.5 * counts[1] * float(soft.square().sum())


@pytest.mark.spec("TRF-PERF-D1")
def test_the_number_of_features():
    for width in (1, 2, 8, 64):
        usual = max(width, int(width * math.log(width)))
        for kernel, expected in (("positive", usual), ("relu", usual), ("hyperbolic", usual + usual % 2)):
            layer = PerformerAttention(2 * width, 2, kernel=kernel, device="meta")
            assert layer.attention.feature_map.output_dim(width) == expected


def draws(layer):
    return layer.attention.phi_params["frozen"]["w"]


@pytest.mark.spec("TRF-PERF-I1")
def test_draws_are_a_function_of_seed_and_number():
    one, other = layer_of(redraw_every=2), layer_of(redraw_every=3, dropout=0.1)
    assert torch.equal(draws(one), draws(other))
    seen = [draws(one)]
    for step in range(1, 7):
        one.advance()
        if step % 2 == 0:
            seen.append(draws(one))
        assert torch.equal(draws(one), seen[-1]) and int(one.redraws) == step // 2
    for later in seen[1:]:
        other.redraw()
        assert torch.equal(draws(other), later)
    assert len({float(w.sum()) for w in seen}) == 4
    resumed = layer_of(5, redraw_every=2)
    resumed.load_state_dict(one.state_dict())
    for layer in (one, resumed):
        layer.advance()
        layer.advance()
    assert torch.equal(draws(resumed), draws(one)) and int(resumed.redraws) == 4 and int(resumed.steps) == 8
    assert not torch.equal(draws(layer_of(1)), seen[0])
    blocks = draws(one)[0] / draws(one)[0].norm(dim=0)  # orthogonal within a block of width D
    near((blocks.mT @ blocks)[:8, :8], torch.eye(8), 1e-10)
    kept = layer_of()
    kept.advance()
    assert torch.equal(draws(kept), seen[0]) and int(kept.steps) == 1


@pytest.mark.spec("TRF-PERF-I1")
def test_the_schedule_as_a_hook_of_an_optimizer():
    layer, x = layer_of(redraw_every=2), inputs()
    optimizer = torch.optim.SGD(layer.parameters(), 1e-3)
    optimizer.register_step_post_hook(lambda *_: layer.advance())
    first = draws(layer)
    for step in range(4):
        checkpoint(lambda x: layer(x)[0], x, use_reentrant=False).square().sum().backward()
        layer(x)  # calls do not count
        assert int(layer.redraws) == step // 2
        optimizer.step()
    assert not torch.equal(draws(layer), first)


@pytest.mark.spec("TRF-PERF-I2")
def test_no_redraw_in_evaluation_nor_within_a_stream():
    layer, x = layer_of(), inputs()
    y, state = layer(x[:, :5])
    near(layer(x[:, 5:], state)[0], layer(x)[0][:, 5:])
    layer.redraw()
    with pytest.raises(ShapeError, match="draws number 0, the layer is at 1"):
        layer(x[:, 5:], state)
    _, state = layer(x[:, :5])
    near(layer(x[:, 5:], state.detach())[0], layer(x)[0][:, 5:])
    layer.eval()
    before = draws(layer)
    for change in (layer.redraw, layer.advance):
        with pytest.raises(ConfigError, match="of a layer that is evaluated"):
            change()
    assert torch.equal(draws(layer), before) and int(layer.redraws) == 1
    y.sum().backward()  # of the first call, whose draws its graph still holds


@pytest.mark.spec("TRF-PERF-I1")
def test_a_redraw_before_the_backward_pass_leaves_its_gradient():
    layer, x = layer_of(), inputs()
    wanted = list(layer.parameters())
    expected = torch.autograd.grad(layer(x)[0].square().sum(), wanted)
    y, _ = layer(x)
    layer.redraw()
    near(torch.autograd.grad(y.square().sum(), wanted), expected)


@pytest.mark.spec("TRF-PERF-E1")
def test_what_cannot_be_built():
    for options, named in (
        ({"kernel": "cosine"}, "kernel must be one of"),
        ({"kernel": "trigonometric"}, "kernel='trigonometric' has negative weights"),
        ({"kernel": "hyperbolic", "num_features": 5}, "must be even"),
        ({"kernel_epsilon": 0.1}, "kernel_epsilon=0.1 is added to ReLU features"),
        ({"redraw_every": 0}, "redraw_every must be an integer >= 1 or None, got 0"),
        ({"dropout": 1.0}, "dropout"),
        ({"num_features": 0}, "num_features"),
        ({"feature_map": "elu"}, "feature_map is made of kernel"),
    ):
        with pytest.raises(ConfigError, match=named):
            PerformerAttention(D_MODEL, HEADS, **options)


def test_what_does_not_fit():
    layer, x = layer_of(), inputs()
    _, state = layer(x)
    with pytest.raises(ShapeError, match="must be the PerformerState"):
        layer(x, state.sums)
    for part in ("sums", "redraws"):  # a state without sums is no start from nothing
        with pytest.raises(ShapeError, match="must be the PerformerState"):
            layer(x, state._replace(**{part: None}))
    with pytest.raises(ConfigError, match="return_attention needs all tokens in one call"):
        layer(x, state, return_attention=True)
