"""MAC, MAG, MAL against loops over tokens; causal, in pieces, packed, padded, and refused."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

from hecate.errors import ConfigError, ShapeError
from hecate.nn import AttentionConfig, Composed, Memory
from tests.nn.attentions import CONFIGS, D_MODEL, HEADS, HebbianLayer, composed_of, hebbian_of, masks_of, reference_of
from tests.nn.layers import in_pieces, leaves, near, seeded
from tests.nn.layers import inputs as narrow
from tests.reference.attention import gate, mac, sliding

LENGTH = 11
WITH_MEMORY = [name for name in CONFIGS if name != "attention"]
every_kind = pytest.mark.parametrize("name", CONFIGS)
every_memory = pytest.mark.parametrize("name", WITH_MEMORY)


def inputs(batch=2, length=LENGTH, *, seed=2):
    return narrow(batch, length, seed=seed, width=D_MODEL)


def numbers(state):
    return [leaf.double() for leaf in leaves(state)]


def expected_of(layer, x, write_mask=None, reset_mask=None):
    """The reference, with the layer's parameters, around the memory by hand."""
    config, attention = layer.config, reference_of(layer.attention)
    write = torch.ones(x.shape[:2], dtype=torch.bool) if write_mask is None else write_mask
    reset = torch.zeros_like(write) if reset_mask is None else reset_mask
    if config.kind == "attention":
        kind = weight = memory = None
    else:
        kind, weight, memory = layer.gate.kind, layer.gate.weight, hebbian_of(layer.memory)

    def one(row, w, r):
        if config.kind == "attention":
            return sliding(attention, row, config.window, w, r)
        if config.kind == "mac":
            return mac(attention, memory, kind, weight, row, config.segment, w, r)
        answer = memory.run(row, w, r)
        if config.kind == "mal":
            return sliding(attention, gate(kind, weight, row, answer), config.window, w, r)
        return gate(kind, weight, sliding(attention, row, config.window, w, r), answer)

    return torch.stack([one(*row) for row in zip(x, write, reset, strict=True)])


@pytest.mark.spec("ATT-MAG-D1", "ATT-MAC-D1", "ATT-GATE-D1")
@every_kind
@pytest.mark.parametrize("masked", [False, True])
def test_against_a_loop(name, masked):
    memory = None if name == "attention" else HebbianLayer()
    layer, x = composed_of(name, memory), inputs().requires_grad_()
    masks = masks_of(2, LENGTH) if masked else {}
    y, _ = layer(x, **masks)
    expected = expected_of(layer, x, **masks)
    near(y, expected, 1e-10)
    probe = torch.randn(y.shape, generator=seeded(4))
    wanted = [x, *layer.parameters()]
    near(
        list(torch.autograd.grad((y * probe).sum(), wanted)),
        list(torch.autograd.grad((expected * probe).sum(), wanted)),
        1e-10,
    )


@pytest.mark.spec("ATT-MAC-D2")
def test_mac_reads_a_memory_with_a_convolution_token_by_token():
    layer, x = composed_of("mac"), inputs(1)
    attention, memory = reference_of(layer.attention), layer.memory
    _, now = memory(x[:, :0])
    start, before, ys = now, [], []
    for token in x.unbind(1):
        empty = start._replace(conv=torch.zeros_like(start.conv))
        h, _ = memory(token[None], empty, write_mask=torch.zeros(1, 1, dtype=torch.bool))
        before.append((h[0, 0], token[0]))
        seen = [(item, len(before) - 1 - i) for i, pair in enumerate(before) for item in pair]
        a = attention(token[0], attention.persistent + seen)
        answer, now = memory(a[None, None], now)
        ys.append(gate("multiply", layer.gate.weight, a, answer[0, 0]))
        if len(before) == 4:
            start, before = now, []
    near(layer(x)[0][0], torch.stack(ys), 1e-10)


@pytest.fixture(scope="module")
def layers():
    """One layer per kind: hypothesis runs many examples on each."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    made = {name: composed_of(name) for name in CONFIGS}
    torch.set_default_dtype(before)
    return made


rows_of = st.lists(st.booleans(), min_size=2 * LENGTH, max_size=2 * LENGTH)


@pytest.mark.spec("ATT-COMP-I1")
@every_kind
@settings(max_examples=15)
@given(cuts=st.lists(st.integers(0, LENGTH), max_size=LENGTH), write=st.none() | rows_of, reset=st.none() | rows_of)
def test_any_split(layers, name, cuts, write, reset):
    x, given_masks = inputs(), {"write_mask": write, "reset_mask": reset}
    masks = {n: None if m is None else torch.tensor(m).view(2, -1) for n, m in given_masks.items()}
    y, state = layers[name](x, **masks)
    pieces, last = in_pieces(layers[name], x, cuts, **masks)
    near(pieces, y, what="y")
    near(numbers(last), numbers(state), what="state")


@pytest.mark.spec("ATT-COMP-I1")
@every_kind
def test_token_by_token_and_its_gradients(layers, name):
    layer, x = layers[name], inputs()
    parameters = list(layer.parameters())
    y, state = layer(x)
    pieces, last = in_pieces(layer, x, list(range(LENGTH)))
    near(pieces, y)
    near(numbers(last), numbers(state))
    whole = torch.autograd.grad(y.square().sum(), parameters)
    near(torch.autograd.grad(pieces.square().sum(), parameters), whole, 1e-10)


@pytest.mark.spec("ATT-COMP-I2")
@every_kind
@pytest.mark.parametrize("at", range(0, LENGTH, 2))
def test_a_changed_token_changes_nothing_before_it(layers, name, at):
    x = inputs(length=2 * LENGTH)
    _, state = layers[name](x[:, :LENGTH])  # the memory has something to say
    y, _ = layers[name](x[:, LENGTH:], state)
    changed = x[:, LENGTH:].clone()
    changed[:, at] += 1.0
    moved = (layers[name](changed, state)[0] - y).abs().amax(-1)
    assert (moved[:, :at] == 0).all()
    assert (moved[:, at] > 1e-3).all()


@pytest.mark.spec("ATT-COMP-I1")
@every_kind
def test_packed_documents_equal_separate_runs(layers, name):
    layer, x = layers[name], inputs(1)
    reset = torch.zeros(1, LENGTH, dtype=torch.bool)
    reset[0, [2, 3, 8]] = True
    parts = [layer(x[:, a:b]) for a, b in ((0, 2), (2, 3), (3, 8), (8, LENGTH))]
    y, state = layer(x, reset_mask=reset)
    near(y, torch.cat([part for part, _ in parts], 1))
    more = inputs(1, 7, seed=9)
    near(layer(more, state)[0], layer(more, parts[-1][1])[0])


@pytest.mark.spec("ATT-COMP-I1")
@every_kind
def test_masked_tokens_take_no_place(name):
    layer, x = composed_of(name, None if name == "attention" else HebbianLayer()), inputs(1)
    write = torch.rand(1, LENGTH, generator=seeded(3)) < 0.6
    y, state = layer(x, write_mask=write)
    alone, last = layer(x[write].unsqueeze(0))
    near(y[write].unsqueeze(0), alone)
    nowhere = torch.zeros(1, 6, dtype=torch.bool)
    _, after = layer(inputs(1, 6, seed=8), state, write_mask=nowhere)
    if layer.attention.window is not None:
        near(numbers(state), numbers(last))
        near(numbers(after), numbers(state), 0.0)
    more = inputs(1, 3, seed=6)
    near(layer(more, after)[0], layer(more, last)[0])


@pytest.mark.spec("ATT-GATE-I1")
@every_memory
def test_an_empty_memory_leaves_attention_whole(name):
    class Empty(HebbianLayer):
        def forward(self, x, state=None, **masks):
            return torch.zeros_like(x), x.new_zeros(len(x), 1)

    layer, x = composed_of(name, Empty()), inputs()
    y, _ = layer(x)
    if layer.config.kind == "mac":
        a, _ = layer.attention(x[:, :3], beside=torch.zeros_like(x[:, :3]))
        y = y[:, :3]
    else:
        a, _ = layer.attention(x)
    if layer.config.gate != "paper":
        near(y, a)
    elif layer.config.kind == "mal":
        near(y, layer.attention(torch.zeros_like(x))[0])
    else:
        scaled = a / (a.square().mean(-1, keepdim=True) + 1e-6).sqrt()
        near(y, scaled * layer.gate.weight[0] / 2)


@pytest.mark.spec("ATT-SLIDE-I4")
@every_kind
def test_every_parameter_learns_from_a_cold_start(name):
    layer = composed_of(name, shake=0.0)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1e-2)
    waiting = {name for name, _ in layer.named_parameters()}
    for _ in range(2):
        optimizer.zero_grad()
        layer(inputs())[0].sub(inputs(seed=5)).square().mean().backward()
        waiting -= {n for n, p in layer.named_parameters() if p.grad.norm() > 1e-9}
        optimizer.step()
    assert not waiting


@pytest.mark.spec("ATT-COMP-I1")
def test_the_layer_is_of_the_protocol_itself():
    inner = composed_of("attention")
    for name in ("mag", "mac"):
        layer, x = composed_of(name, copy.deepcopy(inner)), inputs()
        masks = masks_of(2, LENGTH)
        y, state = layer(x, **masks)
        pieces, last = in_pieces(layer, x, [1, 4, 5], **masks)
        near(pieces, y)
        near(numbers(last), numbers(state))


@pytest.mark.spec("ATT-COMP-I1")
@every_kind
def test_no_sequence_no_token_one_token(layers, name):
    for batch, length in ((0, 3), (2, 0), (0, 0), (2, 1)):
        for masks in ({}, masks_of(batch, length)):
            y, state = layers[name](inputs(batch, length), **masks)
            assert y.shape == (batch, length, D_MODEL)
            assert layers[name](inputs(batch, 1), state)[0].shape == (batch, 1, D_MODEL)


@pytest.mark.spec("ATT-COMP-I1")
@every_kind
def test_state_is_a_pytree_that_detaches_and_does_not_grow(layers, name):
    early = inputs().requires_grad_()
    _, state = layers[name](early)
    y, _ = layers[name](inputs(seed=3), state)
    (through,) = torch.autograd.grad(y.square().sum(), early)
    assert through.norm() > 1e-6
    assert not any(item.requires_grad for item in leaves(state.detach()))
    near(layers[name](inputs(seed=3), state.detach())[0], y, 0.0)
    if layers[name].attention.window is not None:
        assert layers[name](inputs(length=1))[1].bytes == state.bytes
    assert state.bytes == sum(item.numel() * item.element_size() for item in leaves(state))


@every_kind
def test_inputs_are_not_mutated(layers, name):
    x, masks = inputs(), masks_of(2, LENGTH)
    _, state = layers[name](x, **masks)
    given_tensors = [x, *masks.values(), *leaves(state)]
    before = [item.clone() for item in given_tensors]
    layers[name](x, state, **masks)[0].sum().backward()
    assert all(torch.equal(a, b) for a, b in zip(given_tensors, before, strict=True))


@pytest.mark.spec("ATT-SLIDE-I4")
@pytest.mark.parametrize("name", ["mag", "mal_paper", "mac"])
def test_checkpoint_and_copies(name):
    layer, x = composed_of(name), inputs().requires_grad_()
    wanted = [x, *layer.parameters()]
    plain = torch.autograd.grad(layer(x)[0].square().sum(), wanted)
    checkpoint(lambda x: layer(x)[0], x, use_reentrant=False).square().sum().backward()
    near([item.grad for item in wanted], list(plain), 1e-13)
    twin = composed_of(name, seed=9)
    twin.load_state_dict(copy.deepcopy(layer).state_dict(), strict=True)
    near(twin(x)[0], layer(x)[0], 0.0)


@pytest.mark.spec("ATT-SLIDE-I4")
@pytest.mark.parametrize("name", ["mag", "mal", "mac"])
def test_autocast(name):
    layer, x = composed_of(name, shake=0.0).float(), inputs().float()
    expected, _ = layer(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, state = in_pieces(layer, x, [3, 6])
    y.float().square().sum().backward()
    assert all(torch.isfinite(item.grad).all() for item in layer.parameters())
    assert state.memory.memory.memory["weight"].dtype == torch.float32
    # Attention, memory and gate each round about six times.
    near(y.float() / expected.norm(), expected / expected.norm(), 18 * 2**-8)


@pytest.mark.spec("ATT-SLIDE-I4")
@pytest.mark.parametrize("name", ["mag", "mal"])
def test_compile(name):
    torch._dynamo.reset()
    layer, x = composed_of(name), inputs()
    y, _ = torch.compile(layer, backend="aot_eager", fullgraph=True)(x)
    near(y, layer(x)[0])


@pytest.mark.spec("ATT-SLIDE-I4")
@every_memory
def test_meta_then_materialised_equals_built(name):
    def built(device):
        source = seeded()
        memory = Memory(D_MODEL, 2, generator=seeded(), device=device)
        layer = Composed(D_MODEL, HEADS, CONFIGS[name], memory, generator=source, device=device).to_empty(device="cpu")
        layer.reset_parameters(seeded())
        return layer

    before = torch.get_rng_state()
    near(built("meta").state_dict(), built("cpu").state_dict(), 0.0)
    assert torch.equal(torch.get_rng_state(), before)
    assert f"kind={CONFIGS[name]['kind']}" in repr(built("cpu"))


def test_config_round_trip():
    for fields in CONFIGS.values():
        config = AttentionConfig.model_validate(fields)
        assert AttentionConfig.model_validate(config.model_dump()) == config
        assert AttentionConfig.model_validate_json(config.model_dump_json()) == config


FIELDS = {
    "window: is 8, but kind 'mac' attends within segment=4": {"kind": "mac", "segment": 4, "window": 8},
    "segment: is None, but kind 'mac' needs it": {"kind": "mac"},
    "segment: is 4, but only kind 'mac' has segments, not 'mag'.*window": {"segment": 4},
    "gate: is 'add', but kind 'attention' has no memory": {"kind": "attention", "gate": "add"},
    "kind: must be 'mac', 'mag', 'mal' or 'attention', got 'moc'": {"kind": "moc"},
    "window: must be >= 1, got 0": {"window": 0},
    "persistents: unknown field.*persistent": {"persistents": 1},
}


@pytest.mark.spec("ATT-SLIDE-I5")
@pytest.mark.parametrize("message", FIELDS)
def test_configs_that_are_refused(message):
    with pytest.raises(ConfigError, match=message):
        AttentionConfig(**FIELDS[message])


BUILDS = {
    "kind 'attention' has no memory, got a HebbianLayer": ("attention", HebbianLayer),
    "kind 'mag' needs a memory layer, got None": ("mag", lambda: None),
    "d_model=16, but the memory layer's d_model is 12": ("mag", lambda: Memory(12, 2)),
}


@pytest.mark.spec("ATT-SLIDE-I5")
@pytest.mark.parametrize("message", BUILDS)
def test_builds_that_are_refused(message):
    name, memory = BUILDS[message]
    with pytest.raises(ConfigError, match=message):
        Composed(D_MODEL, HEADS, CONFIGS[name], memory())


class Unlike(HebbianLayer):
    """A memory whose state is one for all sequences."""

    def forward(self, x, state=None, **masks):
        return x, torch.zeros(7)


CALLS = {
    r"x must be \[B, T, 16\]": lambda layers: layers["mag"](narrow()),
    "composed: state must be the ComposedState.*got LayerState": lambda layers: layers["mag"](
        inputs(), layers["mag"](inputs())[1].memory
    ),
    "composed: state.start must be None for kind 'mag'": lambda layers: layers["mag"](
        inputs(), layers["mac"](inputs())[1]
    ),
    "composed: state.memory must not be None for kind 'mag'": lambda layers: layers["mag"](
        inputs(), layers["attention"](inputs())[1]
    ),
    r"composed: state.place must be \[3\], got \[2\]": lambda layers: layers["mac"](
        inputs(3), layers["mac"](inputs())[1]
    ),
    r"state.keys must be \[3, 4, 1, 2, 8\]": lambda layers: layers["attention"](
        inputs(3), layers["attention"](inputs())[1]
    ),
    "'mac' .* must have 2 rows, one per sequence; that of Unlike holds .7.": lambda layers: composed_of(
        "mac", Unlike()
    )(inputs()),
}


@pytest.mark.spec("ATT-SLIDE-I5")
@pytest.mark.parametrize("message", CALLS)
def test_calls_that_are_refused(layers, message):
    with pytest.raises(ShapeError, match=message):
        CALLS[message](layers)
