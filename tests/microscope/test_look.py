"""Looking at models: what is found is what they compute, and they stay as they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hecate.cms import CMS, CMSConfig, SelfReferential
from hecate.errors import ConfigError, ShapeError
from hecate.microscope import look
from hecate.models import LanguageModel, LanguageModelConfig, LinearTransformer
from hecate.nn import AttentionConfig, Composed, LinearAttention, Memory, PerformerAttention
from hecate.rule import memory_weights

GENTLE = {"retention": "decay", "algorithm": {"kind": "gd", "lr": 0.1}, "feature_map": "elu"}
LEVELS = [
    {"name": "fast", "memory": "titans_linear"},
    {"name": "slow", "period": 4, "memory": GENTLE | {"feature_map": "identity"}},
]
WIDTH, HEADS, TOKENS = 8, 2, 11


def drawn(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator)


def composed(kind: str, generator: torch.Generator, **fields: Any) -> Composed:
    memory = Memory(WIDTH, HEADS, "gated_delta", generator=generator, name="of " + kind)
    config = AttentionConfig(kind=kind, **fields)
    return Composed(WIDTH, HEADS, config, memory, generator=generator)


def levels(generator: torch.Generator, composition: str) -> CMS:
    config = CMSConfig(levels=LEVELS, composition=composition)
    return CMS(WIDTH, HEADS, config, generator=generator)


LAYERS: dict[str, Any] = {
    "memory": lambda g: Memory(WIDTH, HEADS, "gated_delta", generator=g),
    "features": lambda g: Memory(WIDTH, HEADS, "delta", feature_memory="titans_linear", generator=g),
    "projected": lambda g: Memory(
        WIDTH, HEADS, GENTLE | {"chunk": 4, "commit": "chunk"}, query_projection="sum", firing="learned", generator=g
    ),
    "sequential": lambda g: levels(g, "sequential"),
    "nested": lambda g: levels(g, "nested"),
    "mag": lambda g: composed("mag", g, window=4),
    "mal": lambda g: composed("mal", g, window=4),
    "mac": lambda g: composed("mac", g, segment=4),
}


def seen_outputs(layer: nn.Module, x: Tensor) -> dict[Memory, list[tuple[Any, Tensor, Tensor]]]:
    """What each memory layer was given and gave, call by call."""
    found: dict[Memory, list[tuple[Any, Tensor, Tensor]]] = {}

    def hook(module: Any, args: Any, kwargs: Any, output: Any) -> None:
        if kwargs.get("write_mask") is None or kwargs["write_mask"].any():
            found.setdefault(module, []).append((kwargs, args[0], output[0]))

    memories = [item for item in layer.modules() if isinstance(item, Memory)]
    handles = [item.register_forward_hook(hook, with_kwargs=True) for item in memories]
    with torch.no_grad():
        layer(x)
    for handle in handles:
        handle.remove()
    return {module: [call for call in calls if call[1].shape[1]] for module, calls in found.items()}


@pytest.mark.spec("SCOPE-LOOK-D1")
@pytest.mark.parametrize("name", LAYERS)
def test_what_is_seen_is_what_the_model_computes(name, generator):
    layer = LAYERS[name](generator)
    x = drawn(generator, 2, TOKENS, WIDTH)
    expected, view = seen_outputs(layer, x), look(layer, x)
    shown = [item for key, item in view.items() if not key.endswith("feature_memory")]
    assert len(shown) == len(expected) > 0
    for item, (memory, calls) in zip(shown, expected.items(), strict=True):
        given, y = (torch.cat([call[index] for call in calls], 1) for index in (1, 2))
        assert item.length == given.shape[1] == TOKENS
        with torch.no_grad():
            answers = nn.functional.rms_norm(item.answers, (memory.d_value,), eps=1e-6)
            gate = nn.functional.silu(memory.output_gate(given))
            finished = memory.out((answers * memory.norm).flatten(-2) * gate)
        torch.testing.assert_close(finished, y, rtol=1e-9, atol=1e-9)
        v = torch.cat([asked.v for asked in item.scans], 1)
        torch.testing.assert_close(item.attention.applied(v), item.answers, rtol=1e-9, atol=1e-9)


def test_a_call_that_goes_on_is_one_scan(generator):
    x = drawn(generator, 1, TOKENS, WIDTH)
    assert len(look(LAYERS["mac"](generator), x)["memory"].scans) == 1
    nested = look(LAYERS["nested"](generator), x)
    assert len(nested["slow"].scans) == 1
    fast = nested["fast"]
    assert [asked.v.shape[1] for asked in fast.scans] == [4, 4, 3]  # restarted at each commit
    assert not fast.attention.map[..., 4:, :4].any() and fast.attention.start[:, :, 4:].any()


@pytest.mark.spec("SCOPE-LOOK-D1")
def test_a_model_that_takes_no_state(generator):
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.memory = Memory(WIDTH, HEADS, "delta", generator=generator)

        def forward(self, x):
            return x + self.memory(x)[0]

    x, model = drawn(generator, 2, TOKENS, WIDTH), nn.Sequential(Block(), nn.Linear(WIDTH, 3))
    found, expected = look(model, x)["0.memory"].answers, look(model[0].memory, x)["memory"].answers
    assert torch.equal(found, expected)
    with pytest.raises(TypeError):
        look(model, x, state=model[0].memory(x)[1])


@pytest.mark.spec("SCOPE-RECALL-D1", "SCOPE-VIEW-D1")
@pytest.mark.parametrize("rule", ["gated_mesa", "gsa"])
def test_a_memory_that_is_read_by_more_than_phi_has_no_recall(rule, generator):
    layer, x = Memory(WIDTH, HEADS, rule, generator=generator), drawn(generator, 2, TOKENS, WIDTH)
    view = look(layer, x)
    last = memory_weights(view["memory"].config, layer(x)[1].memory)
    assert view["memory"].draw() is not None
    for name, weight in last.items():
        torch.testing.assert_close(view.norms["memory"][name][..., -1], weight.detach().flatten(2).norm(dim=2))
    assert view["memory"].times[-1] == TOKENS and view.ranks["memory"] and not view.recall
    with pytest.raises(ConfigError, match="memory has no recall: readout '[a-z]+' asks the memory other than by phi"):
        _ = view["memory"].recall


@pytest.mark.spec("SCOPE-LOOK-D1")
def test_names(generator):
    config = LanguageModelConfig(vocab_size=5, d_model=WIDTH, heads=HEADS, layers=2, levels=LEVELS, mlp_ratio=1.0)
    tokens = torch.arange(10).reshape(2, 5) % 5
    view = look(LanguageModel(config, generator=generator), tokens)
    assert list(view) == [f"blocks.{i}.memory.{name}" for i in (0, 1) for name in ("fast", "slow")]
    features = Memory(WIDTH, HEADS, "delta", feature_memory="delta", generator=generator)
    assert list(look(features, drawn(generator, 1, 3, WIDTH))) == ["memory", "feature_memory"]
    assert set(view.norms) == set(view.ranks) == set(view.gates) == set(view.recall) == set(view)
    assert set(view.attention) == set(view) and not view.refusals
    with pytest.raises(ConfigError, match="Did you mean 'blocks.0.memory.fast'"):
        view["blocks.0.memory.fats"]


def test_self_reference_is_shown_box_by_box(generator):
    layer = SelfReferential(WIDTH, HEADS, generator=generator)
    x = drawn(generator, 2, TOKENS, WIDTH)
    view = look(layer, x)
    assert list(view) == [f"boxes.{box}" for box in layer.boxes.written]
    memory = view["boxes.memory"]
    assert len(memory.scans) == 1 and set(view.attention) == {"boxes.memory"}
    with pytest.raises(ConfigError, match="box 'k' is asked what the layer is given"):
        _ = view["boxes.k"].attention
    # The last state of every box is the one that the layer returns.
    _, state = layer(x)
    held = state.boxes.memory["weight"].detach().unflatten(1, (-1, HEADS))
    for index, box in enumerate(layer.boxes.written):
        norm = view[f"boxes.{box}"].norms["weight"][:, :, -1]
        torch.testing.assert_close(norm, held[:, index].flatten(2).norm(dim=2))


@pytest.mark.spec("SCOPE-LOOK-I1")
@pytest.mark.parametrize("name", ["features", "nested", "mac"])
def test_a_model_stays_as_it_is(name, generator):
    layer = LAYERS[name](generator)
    x = drawn(generator, 2, TOKENS, WIDTH)
    next(layer.children()).eval()
    modes = [module.training for module in layer.modules()]
    before = {key: item.clone() for key, item in layer.state_dict().items()}
    expected, chance = layer(x)[0], torch.random.get_rng_state()
    view = look(layer, x)
    _ = view.norms, view.attention
    with pytest.raises(ShapeError):
        look(layer, x[..., :-1])
    assert modes == [module.training for module in layer.modules()]
    assert not any(module._forward_hooks for module in layer.modules())
    assert torch.equal(layer(x)[0], expected)
    assert all(torch.equal(item, before[key]) for key, item in layer.state_dict().items())
    assert torch.equal(chance, torch.random.get_rng_state())
    assert all(parameter.grad is None for parameter in layer.parameters())


@pytest.mark.parametrize("name", ["memory", "sequential", "mac"])
def test_looking_at_the_rest_from_a_state(name, generator):
    layer = LAYERS[name](generator)
    x = drawn(generator, 2, 12, WIDTH)
    whole, (_, state) = look(layer, x), layer(x[:, :7])
    rest = look(layer, x[:, 7:], state=state)
    assert list(rest) == list(whole)
    for key, item in rest.items():
        torch.testing.assert_close(item.answers, whole[key].answers[:, 7:])
        last, end = item.norms["weight"], whole[key].norms["weight"]
        torch.testing.assert_close(last[..., -1], end[..., -1])
        if name != "mac":  # whose segments go on from the state of their start
            tail = whole[key].attention.map[..., 7:, 7:]
            torch.testing.assert_close(item.attention.map, tail)


def test_masks(generator):
    layer, x = LAYERS["memory"](generator), drawn(generator, 1, 8, WIDTH)
    write, reset = torch.ones(1, 8, dtype=torch.bool), torch.zeros(1, 8, dtype=torch.bool)
    write[0, 2], reset[0, 5] = False, True
    view = look(layer, x, write_mask=write, reset_mask=reset)["memory"]
    found = view.attention.map[0, 0]
    assert not found[:, 2].any() and not found[5:, :5].any() and found[4, :2].any()
    recalled = view.recall.cosine[0, 0, -1]  # after 8 tokens: those of the second document
    assert recalled.isnan().tolist() == [True] * 5 + [False] * 3
    before = view.recall.cosine[0, 0, 5]
    assert before.isnan().tolist() == [False, False, True, False, False, True, True, True]


def test_tokens_that_do_not_fire_are_not_recalled(generator):
    layer = LAYERS["projected"](generator)
    with torch.no_grad():
        layer.gates.weight["firing"].normal_(generator=generator)
    view = look(layer, drawn(generator, 1, 16, WIDTH))["memory"]
    idle = view.gates["lr"][0] == 0
    assert 0 < idle.sum() < idle.numel()
    assert torch.equal(view.recall.cosine[0, :, -1].isnan(), idle.T)


def test_errors(generator):
    layer, x = LAYERS["memory"](generator), drawn(generator, 1, 3, WIDTH)
    recall, nothing = look(layer, x)["memory"].recall, torch.zeros(1, 3, dtype=torch.bool)
    for words, call in {
        "Linear has no memories to look at": lambda: look(nn.Linear(WIDTH, WIDTH), x),
        "no memory was written": lambda: look(layer, x, write_mask=nothing),
        "model must be an nn.Module, got None": lambda: look(None, x),
        "name: must be 'cosine'": lambda: recall.by_age("cosin"),
        "there are 1 sequences, got row 1": lambda: recall.by_age(row=1),
    }.items():
        with pytest.raises(ConfigError, match=words):
            call()
    for points in (0, 2.5, "2", True):
        with pytest.raises(ConfigError, match="points: must be an integer of at least 1"):
            look(layer, x, points=points)
    for given, words in ((x[:, :0], "no tokens to look at"), (x.tolist(), "x must be a tensor")):
        with pytest.raises(ShapeError, match=words):
            look(layer, given)


def test_a_compiled_model_is_looked_at_inside(generator):
    layer, x = LAYERS["memory"](generator), drawn(generator, 1, 3, WIDTH)
    wrapped = torch.compile(layer, backend="eager")
    assert torch.equal(look(wrapped, x)["memory"].answers, look(layer, x)["memory"].answers)


LINEAR = {
    "plain": {},
    "relu": {"kernel": "relu"},
    "unnormalised": {"normalizer": "none"},
    "shared": {"kv_heads": 1, "positions": "rotary"},
    "string": {"positions": "circulant_string", "d_key": 4},
    "relative": {"kv_heads": 1, "positions": {"kind": "relative", "form": "linear"}},
}


@pytest.mark.spec("SCOPE-LIN-D1")
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", LINEAR)
def test_linear_attention_is_a_memory_per_query_head(name, masked, generator):
    layer = PerformerAttention(WIDTH, HEADS, generator=generator, **LINEAR[name]).eval()
    x, masks = drawn(generator, 2, TOKENS, WIDTH), {}
    if masked:
        masks = {"write_mask": drawn(generator, 2, TOKENS) < 0.5}
        masks |= {"reset_mask": drawn(generator, 2, TOKENS) > 1}
    with torch.no_grad():
        _, state, weights = layer(x, return_attention=True, **masks)
    view = look(layer, x, **masks)["attention"]
    assert torch.allclose(view.attention.map, weights, rtol=1e-10, atol=1e-12)
    assert torch.allclose(view.norms["weight"][..., -1], norms_at_the_end(state))
    with torch.no_grad():
        half = layer(x[:, :5])[1]
        whole = layer(x)[1]
    view = look(layer, x[:, 5:], state=half)["attention"]
    assert torch.allclose(view.norms["weight"][..., 0], norms_at_the_end(half))
    assert torch.allclose(view.norms["weight"][..., -1], norms_at_the_end(whole))


def norms_at_the_end(state: Any) -> Tensor:
    found = state.sums.memory["weight"].flatten(2).norm(dim=2)
    return found.repeat_interleave(HEADS // found.shape[1], 1)


@pytest.mark.spec("SCOPE-LIN-D1")
def test_linear_attention_that_has_no_map_or_is_no_memory(generator):
    x = drawn(generator, 1, 5, WIDTH)
    view = look(LinearAttention(WIDTH, HEADS, eps=0.1, generator=generator), x)["memory"]
    assert view.refusal == "eps=0.1 is added to the sum of weights"
    decaying = {"positions": LINEAR["relative"]["positions"], "normalizer": "none"}
    layer = LinearAttention(WIDTH, HEADS, generator=generator, **decaying)
    assert look(layer, x)["memory"].refusal is None
    write = torch.arange(5).expand(1, -1) != 2
    assert "decayed once more" in look(layer, x, write_mask=write).refusals["memory"]
    for options in (
        {"causal": False},
        {"positions": "relative"},
        {"positions": {"kind": "rotary", "where": "numerator"}},
    ):
        with pytest.raises(ConfigError, match="no causal LinearAttention"):
            look(LinearAttention(WIDTH, HEADS, generator=generator, **options), x)


@pytest.mark.spec("SCOPE-LIN-D1")
def test_linear_attention_in_a_model(generator):
    model = LinearTransformer.build(embed_dim=3, hidden_size=8, num_heads=2, num_layers=2)
    view = look(model, drawn(generator, 1, 7, 3))
    assert list(view) == ["layers.0.attention", "layers.1.attention"]
    maps = view["layers.1.attention"].attention.map
    assert torch.allclose(maps.sum(-1), torch.ones(1, 2, 7)) and maps.triu(1).eq(0).all()
