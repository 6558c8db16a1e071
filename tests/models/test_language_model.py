"""The language model: sizes, streaming, refusals, and that it learns."""

import math

import pytest
import torch
from torch.nn.functional import cross_entropy

from hecate.errors import ConfigError, ShapeError
from hecate.models import LanguageModel, LanguageModelConfig
from tests.nn.layers import in_pieces, leaves, near, seeded

SMALL = {"vocab_size": 11, "d_model": 8, "heads": 2, "layers": 2}
GATED = {"retention": "decay", "algorithm": "momentum", "key_norm": "l2"}


def config_of(**fields):
    return LanguageModelConfig.model_validate({**SMALL, **fields})


def model_of(seed=0, dtype=None, device=None, **fields):
    return LanguageModel(config_of(**fields), generator=seeded(seed), dtype=dtype, device=device)


def tokens_of(batch=2, length=9, vocab=11, seed=1):
    return torch.randint(vocab, (batch, length), generator=seeded(seed))


def count(c):
    """The parameters of a model with a matrix memory and a feature map without parameters."""
    d, heads = c.d_model, c.heads
    key = d // heads if c.d_key is None else c.d_key
    value = d // heads if c.d_value is None else c.d_value
    mixed, out = heads * (2 * key + value), heads * value
    gates = 1 + c.memory.retention.uses_retain + c.memory.algorithm.uses_momentum
    hidden = int(c.mlp_ratio * d)
    memory = d * mixed + c.conv_kernel * mixed  # projections and taps
    memory += gates * heads * (d + 1) + d * out * c.output_gate + out  # gates, output gate, norm
    memory += out * d + c.learned_initial * out * key  # output projection, starting memory
    if c.feature_memory is not None:
        inner = 1 + c.feature_memory.retention.uses_retain + c.feature_memory.algorithm.uses_momentum
        memory += inner * heads * (d + 1) + heads * key * key
    block = d + memory + (d + 3 * d * hidden if hidden else 0)
    return c.vocab_size * d * (1 if c.tie_embeddings else 2) + c.layers * block + d


@pytest.mark.spec("LM-MODEL-D2")
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"memory": GATED},
        {"tie_embeddings": False, "layers": 3},
        {"mlp_ratio": 0.0},
        {"mlp_ratio": 1.3, "conv_kernel": 0, "output_gate": False},
        {"d_key": 3, "d_value": 5, "heads": 3, "learned_initial": False},
        {"d_key": 3, "d_value": 5, "heads": 3, "feature_memory": GATED},
    ],
    ids=str,
)
def test_parameter_count(fields):
    model = model_of(**fields)
    assert sum(item.numel() for item in model.parameters()) == count(model.config)


@pytest.mark.spec("LM-MODEL-D1")
def test_the_formula():
    model, tokens = model_of(memory=GATED), tokens_of()

    def rms(x, weight):
        return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight

    x = model.embedding.weight[tokens] * 8**0.5
    for block in model.blocks:
        x = x + block.memory(rms(x, block.memory_norm.weight))[0]
        gate, value = (rms(x, block.mlp.norm.weight) @ block.mlp.up.weight.mT).chunk(2, -1)
        x = x + (gate * torch.sigmoid(gate) * value) @ block.mlp.down.weight.mT
    expected = rms(x, model.norm.weight) @ model.embedding.weight.mT
    near(model(tokens)[0], expected)


@pytest.mark.spec("LM-MODEL-D2")
def test_tied_and_untied_head():
    tied, untied = model_of(), model_of(tie_embeddings=False)
    assert tied.head is None and "head.weight" not in tied.state_dict()
    assert untied.head.weight.shape == (11, 8)
    with torch.no_grad():
        untied.head.weight.zero_()
        assert untied(tokens_of())[0].abs().max() == 0
        tied.embedding.weight.zero_()
        assert tied(tokens_of())[0].abs().max() == 0


@pytest.mark.spec("LM-MODEL-I1")
def test_packed_and_padded():
    model, tokens = model_of(memory=GATED), tokens_of(1)
    reset = torch.zeros(1, 9, dtype=torch.bool)
    reset[0, [2, 3]] = True
    alone = torch.cat([model(tokens[:, a:b])[0] for a, b in ((0, 2), (2, 3), (3, 9))], 1)
    near(in_pieces(model, tokens, [1, 3, 6], reset_mask=reset)[0], alone)
    padded = torch.cat([torch.zeros(1, 4, dtype=torch.int64), tokens], 1)
    write = torch.arange(13).unsqueeze(0) >= 4
    near(model(padded, write_mask=write)[0][:, 4:], model(tokens)[0])


@pytest.mark.spec("LM-MODEL-I3")
def test_decoding_costs_the_same_however_long_the_past():
    model = model_of(memory=GATED)
    sizes, calls, state = [], [], None
    for length in (1, 7, 300):
        _, state = model(tokens_of(length=length), state)
        model(tokens_of(length=1), state)  # the first of its looks is checked
        with torch.profiler.profile() as profile:
            model(tokens_of(length=1), state)
        sizes.append(sum(layer.bytes for layer in state))
        calls.append(sum(event.count for event in profile.key_averages()))
    # Per layer, sequence and head: memory and momentum 4 x 4, a position; 3 inputs of 24 channels.
    assert sizes == [2 * 2 * (2 * (2 * 16 + 1) + 3 * 24) * 8] * 3
    assert len(set(calls)) == 1


@pytest.mark.spec("LM-MODEL-I4")
def test_scales_at_the_start():
    model = model_of(vocab_size=4000, d_model=64, layers=1, dtype=torch.float64)
    x = model.embedding(torch.arange(4000)).detach() * 8
    assert abs(float(x.square().mean()) - 1) < 5 * (2 / x.numel()) ** 0.5
    logits, _ = model(tokens_of(vocab=4000))
    loss = cross_entropy(logits.flatten(0, 1), tokens_of(vocab=4000, seed=7).flatten())
    # Logits of unit variance cost half a nat over the uniform guess, give or take their spread.
    assert abs(float(loss.detach()) - math.log(4000) - 0.5) < 5 / 18**0.5


@pytest.mark.spec("LM-MODEL-I5")
def test_autocast_loss_is_close_and_the_state_float32():
    model, tokens = model_of(memory=GATED, d_model=32, dtype=torch.float32), tokens_of(4, 64)
    losses = []
    for enabled in (False, True):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            logits, state = model(tokens)
        losses.append(cross_entropy(logits.float().flatten(0, 1), tokens.flatten()))
        losses[-1].backward()
        floats = [item for layer in state for item in leaves(layer.memory)]
        assert {item.dtype for item in floats} == {torch.float32, torch.int64}
    # Logits of unit size, rounded a dozen times to 8 bits; the mean over tokens is closer still.
    assert abs(float((losses[1] - losses[0]).detach())) < 12 * 2**-8
    assert all(torch.isfinite(item.grad).all() for item in model.parameters())


def copying(batch, generator):
    """Four random tokens again and again: after the first round each can be copied."""
    return torch.randint(8, (batch, 4), generator=generator).repeat(1, 4)


@pytest.mark.spec("LM-MODEL-I6")
def test_learns_to_copy():
    generator = seeded(3)
    model = model_of(vocab_size=8, d_model=32, layers=1, dtype=torch.float32, memory=GATED)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(60):
        tokens = copying(32, generator)
        logits, _ = model(tokens[:, :-1])
        loss = cross_entropy(logits[:, 4:].flatten(0, 1), tokens[:, 5:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    # A model that remembers nothing cannot get below log 8 = 2.08 nats.
    assert losses[0] > 2.0
    assert sum(losses[-5:]) / 5 < 1.0


REFUSED = {
    "vocab_size must be set": {"vocab_size": None},
    "heads: must divide d_model=8, got 3": {"heads": 3},
    "conv_kernel: must be 0 .none. or at least 2, got 1": {"conv_kernel": 1},
    "mlp_ratio: gives no hidden unit at d_model=8, got 0.1.*at least 0.125": {"mlp_ratio": 0.1},
    "mlp_ratio: must be >= 0.0, got -1.0": {"mlp_ratio": -1.0},
    "qk_norm: must be .*got 'L2'": {"qk_norm": "L2"},
    "memory: .*residual": {"memory": {"structure": {"kind": "mlp", "residual": True}}, "d_key": 3},
    "vocab_size: must be >= 2, got 1": {"vocab_size": 1},
}


@pytest.mark.spec("LM-MODEL-I7")
@pytest.mark.parametrize("message", REFUSED)
def test_configurations_that_are_refused(message):
    with pytest.raises(ConfigError, match=message):
        model_of(**REFUSED[message])


CALLS = {
    r"int64 or int32 \[B, T\], got torch.float64 \[2, 9\]": lambda m: m(tokens_of().double()),
    r"int64 or int32 \[B, T\], got torch.bool": lambda m: m(tokens_of() > 3),
    r"int64 or int32 \[B, T\], got torch.int64 \[9\]": lambda m: m(tokens_of()[0]),
    r"tokens must be in 0..10, the vocabulary, got -?\d+..11": lambda m: m(tokens_of() % 3 + 9),
    r"got -1..10": lambda m: m(torch.tensor([[-1, 10]])),
    r"state must hold .* each of 2 layers, got 1": lambda m: m(tokens_of(), m(tokens_of())[1][:1]),
    r"3 sequences, got \[2, 3, 24\]": lambda m: m(tokens_of(3), m(tokens_of())[1]),
    r"write_mask must be bool": lambda m: m(tokens_of(), write_mask=torch.ones(2, 9)),
}


@pytest.mark.spec("LM-MODEL-I7")
@pytest.mark.parametrize("message", CALLS)
def test_calls_that_are_refused(message):
    with pytest.raises(ShapeError, match=message):
        CALLS[message](model_of())


def test_int32_tokens_and_empty_sequences():
    model = model_of()
    near(model(tokens_of().int())[0], model(tokens_of())[0], 0.0)
    for batch, length in ((0, 3), (2, 0), (2, 1)):
        assert model(tokens_of(batch, length))[0].shape == (batch, length, 11)
