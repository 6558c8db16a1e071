"""MAC, MAG, MAL against loops over tokens; causal, in pieces, packed, padded, and refused."""

import copy

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from hecate.errors import ConfigError, ShapeError
from hecate.nn import AttentionConfig, Composed, Memory
from tests.nn.attentions import CONFIGS, D_MODEL, HEADS, HebbianLayer, composed_of, hebbian_of, masks_of, reference_of
from tests.nn.layers import in_pieces, leaves, near, near_with_slopes, seeded
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
    near_with_slopes(y, expected_of(layer, x, **masks), [x, *layer.parameters()])


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


def test_config_round_trip():
    for name, fields in CONFIGS.items():
        config = AttentionConfig.model_validate(fields)
        assert f"kind={fields['kind']}" in repr(composed_of(name))
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


BUILDS = {
    "kind 'attention' has no memory, got a HebbianLayer": ("attention", HebbianLayer),
    "kind 'mag' needs a memory layer, got None": ("mag", lambda: None),
    "d_model=16, but the memory layer's d_model is 12": ("mag", lambda: Memory(12, 2)),
}


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
def test_configs_builds_and_calls_that_are_refused():
    for message, fields in FIELDS.items():
        with pytest.raises(ConfigError, match=message):
            AttentionConfig(**fields)
    for message, (name, memory) in BUILDS.items():
        with pytest.raises(ConfigError, match=message):
            Composed(D_MODEL, HEADS, CONFIGS[name], memory())
    layers = {name: composed_of(name) for name in CONFIGS}
    for message, call in CALLS.items():
        with pytest.raises(ShapeError, match=message):
            call(layers)


@pytest.mark.spec("ATT-MAC-D1")
def test_segments_under_vmap_are_those_of_each_call():
    draws = seeded(3)
    memory = Memory(8, 2, "gated_delta", generator=draws)
    layer = Composed(8, 2, {"kind": "mac", "segment": 3}, memory, generator=draws)
    x = torch.randn(4, 2, 7, 8, generator=draws)
    write, reset = (torch.rand(4, 2, 7, generator=draws) < share for share in (0.7, 0.3))
    _, state = layer(x[0])

    def call(x, write, reset):
        y, first = layer(x, state, write_mask=write)
        return torch.cat([y, layer(x, first, write_mask=write, reset_mask=reset)[0]], 1)

    with sdpa_kernel(SDPBackend.MATH):  # torch has no other under vmap
        together = torch.func.vmap(call)(x, write, reset)
    near(together, torch.stack([call(*each) for each in zip(x, write, reset, strict=True)]))
