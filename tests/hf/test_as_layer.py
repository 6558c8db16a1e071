"""Layers of hecate called as those of transformers and fla."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("transformers", minversion="5")

from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, StaticCache

from hecate.cms import CMS
from hecate.errors import ConfigError, ShapeError
from hecate.hf import AsLayer
from hecate.nn import LinearAttention, Memory
from tests.hf.common import off

SLOW = {"name": "slow", "period": 4, "memory": {"algorithm": {"kind": "gd", "lr": 0.1}}}
MADE: dict[str, Any] = {
    "memory": lambda: Memory(16, 2, "gated_delta"),
    "levels": lambda: CMS(16, 2, {"levels": [{"name": "fast"}, SLOW]}),
    "linear attention": lambda: LinearAttention(16, 2),
}
X = torch.randn(2, 12, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.mark.spec("HF-CALL-D1")
@pytest.mark.parametrize("kind", MADE)
def test_the_calls_of_others(kind):
    torch.manual_seed(0)
    layer = MADE[kind]().eval()
    with torch.no_grad():
        whole = layer(X)[0]
        attention, fla, output = (AsLayer(layer, 1, returns) for returns in ("attention", "fla", "output"))
        y, nothing = attention(hidden_states=X, position_embeddings=None, attention_mask=None, past_key_values=None)
        assert nothing is None and torch.equal(y, whole) and torch.equal(output(X), whole)
        y, _, past = fla(X, attention_mask=torch.ones(2, 12), past_key_values=None, use_cache=False)
        assert past is None and off(y, whole) < 1e-12
        cache = DynamicCache()
        pieces = [fla(part, past_key_values=cache, use_cache=True)[0] for part in X.split((5, 1, 6), 1)]
        assert off(torch.cat(pieces, 1), whole) < 1e-12 and cache.get_seq_length(1) == 12
        cache = DynamicCache(config=LlamaConfig(num_hidden_layers=2))
        cache.layers[1:] = [type(fla._state_layer(cache))()]
        cache.activate_past_recording()
        output(X[:, :8], cache_params=cache)
        output(X[:, :3], cache_params=cache)
        cache.layers[1].crop(-3)
        assert off(output(X[:, 8:], cache_params=cache), whole[:, 8:]) < 1e-12
        padding = torch.ones(2, 12)
        padding[0, :5] = 0
        assert off(output(X, padding)[0, 5:], layer(X[:1, 5:])[0][0]) < 1e-12
        alone = torch.cat([layer(part)[0] for part in X[:1].split((7, 5), 1)], 1)
        for borders in ({"cu_seqlens": torch.tensor([0, 7, 12])}, {"cu_seq_lens_q": torch.tensor([0, 7, 12])}):
            assert off(output(X[:1], **borders), alone) < 1e-12


@pytest.mark.spec("HF-CACHE-D3")
@pytest.mark.parametrize("kind", MADE)
def test_tokens_are_taken_back_from_the_middle_of_a_call(kind):
    layer, cache = AsLayer(MADE[kind]().eval(), returns="output"), DynamicCache()
    layer._state_layer(cache).activate_past_recording()
    with torch.no_grad():
        whole = layer(X)
        for part in X.split((5, 7), 1):
            layer(part, past_key_values=cache)
        cache.crop(-3)
        assert cache.get_seq_length() == 9 and cache.layers[0].written.tolist() == [9, 9]
        assert off(layer(X[:, 9:], past_key_values=cache), whole[:, 9:]) < 1e-12


@pytest.mark.spec("HF-CALL-D1")
def test_a_memory_in_the_place_of_attention():
    torch.manual_seed(0)
    sizes = {"vocab_size": 9, "hidden_size": 16, "intermediate_size": 8, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=2)).double().eval()
    model.model.layers[1].self_attn = AsLayer(Memory(16, 2, "gated_delta"), layer_idx=1)
    ids = torch.randint(1, 9, (1, 12))
    with torch.no_grad():
        whole, cache = model(ids, use_cache=False).logits, DynamicCache(config=model.config)
        pieces = [model(part, past_key_values=cache).logits for part in ids.split((5, 1, 1, 1, 1, 1, 1, 1), 1)]
    assert off(torch.cat(pieces, 1), whole) < 1e-12
    model.set_attn_implementation("eager")  # whose masks say of keys what is no padding, too
    with pytest.raises(ShapeError, match=r"attention_mask must be \[B, 12 or more\], 0 at padding, got"):
        model(ids)


@pytest.mark.spec("HF-CALL-D1")
def test_what_no_memory_takes_is_refused():
    layer, filled, keys = AsLayer(Memory(16, 2, "gated_delta")), DynamicCache(), torch.zeros(2, 1, 3, 4)
    filled.update(keys, keys, 0)
    static, documents = StaticCache(LlamaConfig(num_hidden_layers=1), max_cache_len=4), torch.tensor([0, 4, 12])
    with pytest.raises(ShapeError, match=r"attention_mask must be \[B, 12 or more\]"):
        layer(X, torch.ones(2, 1, 12, 12))
    for words, call in {
        "a memory has no attention weights": lambda: layer(X, output_attentions=True),
        "a row of several documents cannot fill a cache": lambda: layer(
            X[:1], past_key_values=DynamicCache(), cu_seqlens=documents
        ),
        "must be a DynamicCache of transformers, got a tuple": lambda: layer(X, past_key_values=((),)),
        "layer 0 of past_key_values is a DynamicLayer in use by another": lambda: layer(X, past_key_values=filled),
        "is a StaticLayer in use": lambda: layer(X, past_key_values=static),
        "layer_idx must be an integer >= 0, got -1": lambda: AsLayer(layer.layer, layer_idx=-1),
        "returns must be": lambda: AsLayer(layer.layer, 0, "all"),
    }.items():
        with pytest.raises(ConfigError, match=words):
            call()
