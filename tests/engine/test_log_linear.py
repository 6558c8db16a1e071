"""Log-linear attention: a memory whose content is kept apart by age."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hecate.engine import as_plain, log_linear, log_linear_scan, memory_scan
from hecate.errors import ConfigError, NonFiniteError, ShapeError
from hecate.rule import Gates, MemoryConfig
from tests.reference import papers_2025 as reference

WAYS = ["sequential", "parallel"]
DELTA = {"bias": "l2", "retention": "decay", "decay_order": "before_gradient"}
RULES = {
    "dot": {"bias": "dot", "retention": "decay"},
    "delta": DELTA,
    "plain delta": {"bias": "l2"},
    "with step": {**DELTA, "decay_order": "with_step", "step": "normalized"},
    "before": {**DELTA, "read": "before"},
    "momentum": {"bias": "l2", "retention": "decay", "algorithm": "momentum"},
    "nesterov": {"bias": "dot", "retention": "decay", "algorithm": {"kind": "momentum", "nesterov": True}},
    "features": {**DELTA, "feature_map": "elu", "key_norm": "l2", "query_scale": "key_dim"},
    "positions": {**DELTA, "feature_map": "cosformer", "key_norm": "l2"},
    "channels": DELTA,
    "gated": DELTA,
    "value channels": DELTA,
    "two writes": {**DELTA, "writes": 2},
}
B, H, D, V = 2, 2, 4, 3


def draw(rule="delta", length=21, levels=7, seed=0):
    """A config, q, k, v, gates and lambda; keys of unit length."""
    generator, config = torch.Generator().manual_seed(seed), MemoryConfig(**RULES[rule])
    n = (config.writes,) if config.writes > 1 else ()

    def normal(*shape):
        return torch.randn(B, length, *shape, generator=generator)

    def share(*shape):
        return torch.rand(B, length, *shape, generator=generator)

    q, k, v = normal(H, D), torch.nn.functional.normalize(normal(*n, H, D), dim=-1), normal(*n, H, V)
    gates = {"lr": share(*n, H)}
    if config.retention.uses_retain:
        gates["retain"] = 0.7 + 0.3 * share(H, D) if rule == "channels" else 0.7 + 0.3 * share(H)
    if config.algorithm.uses_momentum:
        gates["momentum"] = 0.8 * share(H)
    if rule == "gated":
        gates |= {"erase": share(H, D), "write": normal(H)}
    if rule == "value channels":
        gates["retain_value"] = 0.5 + 0.5 * share(H, V)
    return config, q, k, v, Gates(**gates), torch.nn.functional.softplus(normal(H, levels))


def scanned(drawn, engine="parallel", **given):
    config, q, k, v, gates, scale = drawn
    return log_linear_scan(config, q, k, v, gates, scale=scale, engine=engine, **given)


def masks_of(length, seed=3):
    generator = torch.Generator().manual_seed(seed)
    write, reset = (torch.rand(B, length, generator=generator) for _ in range(2))
    return {"write_mask": write > 0.25, "reset_mask": reset > 0.93}


def same(a, b, rtol=1e-11):
    assert torch.allclose(a, b, rtol=0.0, atol=rtol * float(b.abs().max().clamp(min=1))), (a - b).abs().max()


@pytest.mark.parametrize("since", [0, 64, 3])
def test_blocks_leave_out_the_levels_that_hold_nothing_when_they_begin(monkeypatch, since):
    """From the first token on, or from a state at a border of blocks, the first seven of 64 tokens' own; else fewer."""
    *drawn, scale = draw(length=since + 128, levels=9)
    config, *tokens, gates = drawn
    state, counts, count = None, [], log_linear._empty
    if since:
        head = [item[:, :since] for item in tokens]
        early = Gates(*(None if gate is None else gate[:, :since] for gate in gates))
        _, state = log_linear_scan(config, *head, early, scale=scale[:, :since])
    monkeypatch.setattr(log_linear, "_empty", lambda entering: counts.append(count(entering)) or counts[-1])
    late = Gates(*(None if gate is None else gate[:, since:] for gate in gates))
    log_linear_scan(config, *(item[:, since:] for item in tokens), late, scale=scale[:, since:], state=state)
    assert counts == [1 if since == 3 else 7]


@pytest.mark.spec("ENG-TREE-D1")
@pytest.mark.parametrize("engine", WAYS)
@pytest.mark.parametrize("rule", ["dot", "delta"])
@pytest.mark.parametrize("length", [1, 8, 37])
def test_against_the_references(length, rule, engine):
    drawn = draw(rule, length)
    y, state = scanned(drawn, engine)
    for row in range(B):
        for head in range(H):
            q, k, v, scale = (item[row, :, head].numpy() for item in (*drawn[1:4], drawn[5]))
            gates = drawn[4]
            lr = gates.lr[row, :, head].numpy()
            if rule == "dot":  # whose step the reference leaves to v
                v = lr[:, None] * v
            given_ = (q, k, v, gates.retain[row, :, head].numpy(), scale, None if rule == "dot" else lr)
            expected, levels = reference.log_linear(*given_)
            same(y[row, :, head], torch.as_tensor(expected))
            same(y[row, :, head], torch.as_tensor(reference.log_linear_masks(*given_)))
            same(state.memory["weight"][row, head], torch.as_tensor(levels))
    assert state.position.tolist() == [[length] * H] * B


@pytest.mark.spec("ENG-TREE-D1")
@pytest.mark.parametrize("engine", WAYS)
@pytest.mark.parametrize("levels", [1, 2, 4])
def test_the_last_level_keeps_what_is_older(levels, engine):
    """As with more levels that are all read with the last one's weight."""
    config, q, k, v, gates, scale = draw(length=29)
    merged = torch.cat([scale[..., :levels], scale[..., levels - 1 :][..., :1].expand(B, 29, H, 7 - levels)], -1)
    whole, _ = log_linear_scan(config, q, k, v, gates, scale=merged, engine=engine)
    y, state = log_linear_scan(config, q, k, v, gates, scale=scale[..., :levels], engine=engine)
    same(y, whole)
    assert state.memory["weight"].shape == (B, H, levels, V, D)


@pytest.mark.spec("ENG-TREE-R1")
@pytest.mark.parametrize("masked", [False, True], ids=["", "masked"])
@pytest.mark.parametrize("engine", WAYS)
@pytest.mark.parametrize("rule", RULES)
def test_equal_weights_are_the_plain_rule(rule, engine, masked):
    if rule == "value channels" and engine == "parallel":
        engine = "auto"
    config, q, k, v, gates, scale = draw(rule, 70 if engine == "parallel" else 21)
    given_ = masks_of(q.shape[1]) if masked else {}
    given_["initial"] = {"weight": torch.randn(H, V, D * q.shape[-1] // D if rule != "positions" else 2 * D)}
    expected, plain = memory_scan(config, q, k, v, gates, **given_, engine="sequential")
    y, state = log_linear_scan(config, q, k, v, gates, scale=torch.ones_like(scale), engine=engine, **given_)
    same(y, expected)
    own = as_plain(state, scale.shape[-1])
    for kind, mine in ((plain.memory, own.memory), (plain.slots, own.slots)):
        for name, item in kind.items():
            same(mine[name], item)
    assert state.seen is None if plain.seen is None else torch.equal(state.seen, plain.seen)


@pytest.mark.spec("ENG-TREE-I1")
@pytest.mark.parametrize("masked", [False, True], ids=["", "masked"])
@pytest.mark.parametrize("rule", [rule for rule in RULES if rule != "value channels"])
def test_blocks_are_the_token_loop(rule, masked):
    """Across blocks, aligned with the tree or not, with a top that has merged and a state to go on from."""
    lengths, levels, found = ((150, 19), 5, {}) if masked else ((192, 70), 8, {})
    calls = [(draw(rule, length, levels, seed=length), masks_of(length) if masked else {}) for length in lengths]
    for engine in WAYS:
        state, found[engine] = None, []
        for drawn, masks in calls:
            y, state = scanned(drawn, engine, state=state, **masks)
            found[engine].append(y)
        found[engine] += [*state.memory.values(), *state.slots.values(), state.position.double()]
    for one, other in zip(*found.values(), strict=True):
        same(one, other)


@pytest.mark.spec("ENG-TREE-I1")
@settings(max_examples=12)
@given(
    cuts=st.lists(st.integers(0, 21), max_size=5),
    rule=st.sampled_from(["delta", "momentum", "before", "positions", "two writes"]),
    seed=st.integers(0, 9),
    engine=st.sampled_from([*WAYS, "auto"]),
)
def test_any_split(cuts, rule, seed, engine):
    config, q, k, v, gates, scale = drawn = draw(rule, seed=seed)
    masks = masks_of(21, seed)
    y, state = scanned(drawn, engine, **masks)
    pieces, last = [], None
    for at, end in zip([0, *sorted(cuts)], [*sorted(cuts), 21], strict=True):
        own = [item[:, at:end] for item in (q, k, v)]
        cut = Gates(*(None if gate is None else gate[:, at:end] for gate in gates))
        here = {name: mask[:, at:end] for name, mask in masks.items()}
        piece, last = log_linear_scan(config, *own, cut, scale=scale[:, at:end], state=last, engine=engine, **here)
        pieces.append(piece)
    same(torch.cat(pieces, 1), y)
    same(last.memory["weight"], state.memory["weight"])
    assert torch.equal(last.position, state.position)


@pytest.mark.spec("ENG-TREE-V1")
@pytest.mark.parametrize(("rule", "length"), [("dot", 67), ("delta", 140), ("momentum", 67), ("channels", 35)])
def test_gradients_are_those_of_the_token_loop(rule, length):
    found, masks = [], {} if rule == "delta" else masks_of(length)
    for engine, autodiff in (
        ("sequential", "torch"),
        ("sequential", "tape"),
        ("parallel", "torch"),
        ("parallel", "tape"),
    ):
        drawn = draw(rule, length, 9)
        leaves = [item.requires_grad_() for item in (*drawn[1:4], drawn[5], *drawn[4]) if item is not None]
        y, state = scanned(drawn, engine, autodiff=autodiff, **masks)
        total = y.square().sum() + state.memory["weight"].square().sum()
        found.append(torch.autograd.grad(total, leaves))
    for other in found[1:]:
        for mine, theirs in zip(other, found[0], strict=True):
            same(mine, theirs, 1e-10)


@pytest.mark.spec("ENG-TREE-V1")
@pytest.mark.parametrize("engine", WAYS)
def test_finite_differences(engine):
    config, q, k, v, gates, scale = draw("delta", 4, 3)
    leaves = [item[:1, :, :1].clone().requires_grad_() for item in (q, k, v, scale, gates.lr, gates.retain)]

    def outputs(q, k, v, scale, lr, retain):
        y, state = log_linear_scan(config, q, k, v, Gates(lr, retain), scale=scale, engine=engine)
        return y, state.memory["weight"]

    assert torch.autograd.gradcheck(outputs, leaves, fast_mode=True)
    assert torch.autograd.gradgradcheck(outputs, leaves, fast_mode=True)


REFUSED = [
    ({"chunk": 4}, "remembered state"),
    ({"structure": "mlp"}, "no rows for levels"),
    ({"structure": "vector"}, "no rows for levels"),
    ({"bias": "l1"}, "not affine"),
    ({"retention": "kl", "feature_map": "softmax"}, "not linear"),
    ({"algorithm": "adaptive"}, "not linear"),
    ({"normalizer": "sum", "feature_map": "elu"}, "one sum for all levels"),
    ({"on_nonfinite": "skip"}, "the tree has counted"),
]


@pytest.mark.spec("ENG-TREE-I2")
@pytest.mark.parametrize(("rule", "match"), REFUSED, ids=[match for _, match in REFUSED])
def test_refused_rules(rule, match):
    _, q, k, v, _, scale = draw()
    with pytest.raises(ConfigError, match=match):
        log_linear_scan(MemoryConfig(**rule), q, k, v, scale=scale)


@pytest.mark.spec("ENG-TREE-I2")
def test_refused_arguments():
    config, q, k, v, gates, scale = draw()
    with pytest.raises(ConfigError, match="engine must be one of"):
        log_linear_scan(config, q, k, v, gates, scale=scale, engine="chunk")
    with pytest.raises(ConfigError, match="retain_value"):
        scanned(draw("value channels"), "parallel")
    with pytest.raises(ShapeError, match="scale must be"):
        log_linear_scan(config, q, k, v, gates, scale=scale[:, 1:])
    _, state = log_linear_scan(config, q, k, v, gates, scale=scale)
    with pytest.raises(ShapeError, match="L = 3 levels"):
        log_linear_scan(config, q, k, v, gates, scale=scale[..., :3], state=state)
    _, plain = memory_scan(config, q, k, v, gates)
    with pytest.raises(ShapeError, match="L = 7 levels"):
        log_linear_scan(config, q, k, v, gates, scale=scale, state=plain)
    with pytest.raises(NonFiniteError, match="head 1, token 4"):
        v = v.clone()
        v[1, 4, 1] = np.inf
        log_linear_scan(config, q, k, v, gates, scale=scale)


@pytest.mark.spec("ENG-TREE-I1")
@pytest.mark.parametrize("engine", WAYS)
def test_no_tokens(engine):
    config, q, k, v, _, scale = drawn = draw(length=5)
    _, state = scanned(drawn, engine)
    none = [item[:, :0] for item in (q, k, v)]
    y, after = log_linear_scan(config, *none, scale=scale[:, :0], state=state, engine=engine)
    assert y.shape == (B, 0, H, V) and torch.equal(after.position, state.position)
    assert torch.equal(after.memory["weight"], state.memory["weight"])
    assert after.memory["weight"].data_ptr() != state.memory["weight"].data_ptr()
