"""What a model computes in transformers is what hecate computes: logits, padding, documents, losses, gradients."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

from hecate.errors import ConfigError, ShapeError
from tests.hf.common import KINDS, RULES, VOCABULARY, made, plain, tokens

CLOSE = {"rtol": 1e-9, "atol": 1e-10}  # float64, other splits of the same sums


@pytest.mark.parametrize("rule", KINDS)
@pytest.mark.spec("HF-MODEL-D1", "HF-LM-D1", "HF-PAD-D1", "HF-CACHE-D1")
def test_logits_and_states_are_those_of_the_language_model(rule):
    model, ids = made(rule), tokens(2, 11)
    own = plain(model)
    with torch.no_grad():
        expected, _ = own(ids)
        found = model(ids, use_cache=True, output_hidden_states=True)
        assert torch.equal(found.logits, expected)
        assert len(found.hidden_states) == 3 and torch.equal(own.logits(found.hidden_states[-1]), expected)
        assert torch.equal(model(inputs_embeds=model.get_input_embeddings()(ids)).logits, expected)
        assert torch.equal(model(ids, return_dict=False)[0], expected)
        assert torch.allclose(model(ids, logits_to_keep=2).logits, expected[:, -2:], **CLOSE)
        assert torch.allclose(model(ids, logits_to_keep=torch.tensor([0, 7])).logits, expected[:, [0, 7]], **CLOSE)
        # Tokens in three calls, of one, of four and of six.
        cache, parts = None, []
        for part in ids.split([1, 4, 6], 1):
            out = model(part, past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            parts.append(out.logits)
        assert torch.allclose(torch.cat(parts, 1), expected, **CLOSE) and cache.get_seq_length() == 11
        assert cache.layers[0].written.tolist() == [11, 11]
        # Row 0 is padded in front, in the middle and behind; what stands there is no token.
        mask = torch.tensor([[0, 0, 0, 1, 1, 0, 1, 1, 0], [1] * 9])
        padded = torch.full((2, 9), -100).masked_scatter(mask.bool(), torch.cat([ids[0, :4], ids[1, :9]]))
        alone, _ = own(ids[:1, :4])
        found = model(padded, attention_mask=mask, use_cache=True)
        assert torch.allclose(found.logits[0][mask[0].bool()], alone[0], **CLOSE)
        assert torch.allclose(found.logits[1], expected[1, :9], **CLOSE)
        after = model(ids[:, 9:10], past_key_values=found.past_key_values).logits[:, 0]
        assert torch.allclose(after[0], own(torch.cat([ids[0, :4], ids[0, 9:10]])[None])[0][0, -1], **CLOSE)
        assert torch.allclose(after[1], expected[1, 9], **CLOSE)


@pytest.mark.parametrize("rule", KINDS)
@pytest.mark.spec("HF-PACK-D1")
def test_documents_of_one_row_do_not_see_each_other(rule):
    model, ids = made(rule), tokens(1, 11)
    with torch.no_grad():
        apart = torch.cat([model(part).logits for part in ids.split([5, 1, 5], 1)], 1)
        borders = torch.tensor([0, 5, 6, 11])
        positions = torch.cat([torch.arange(5), torch.arange(1), torch.arange(5)])[None]
        assert torch.allclose(model(ids, cu_seq_lens_q=borders, cu_seq_lens_k=borders).logits, apart, **CLOSE)
        for begins in (0, 7):  # as softmax layers of transformers go: by steps that are not 1
            jumps = positions + begins * (torch.arange(11) >= 5)
            assert torch.allclose(model(ids, position_ids=jumps).logits, apart, **CLOSE)
        whole = model(ids).logits
        assert torch.equal(model(ids, position_ids=torch.arange(11)[None]).logits, whole)
        assert not torch.allclose(whole, apart, **CLOSE)
        # Zeros ahead of the first token are those of padding; a later call may begin a document, too.
        mask = torch.ones(1, 13, dtype=torch.long).index_fill(1, torch.arange(2), 0)
        padded = torch.cat([ids[:, :2], ids], 1)
        zeros = (mask.cumsum(1) - 1).clamp(min=0)
        assert torch.allclose(model(padded, mask, position_ids=zeros).logits[:, 2:], whole, **CLOSE)
        cache = model(ids[:, :5], use_cache=True).past_key_values
        found = model(ids[:, 5:], past_key_values=cache, position_ids=positions[:, 5:]).logits
        assert torch.allclose(found, apart[:, 5:], **CLOSE)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.spec("HF-LM-D1", "HF-TRAIN-D1")
def test_losses_and_gradients(rule):
    model, ids = made(rule).train(), tokens(2, 9)
    labels = ids.masked_fill(torch.arange(9) < 3, -100)
    own = plain(model)
    loss = nn.functional.cross_entropy(own(ids)[0][:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
    (loss / 20).backward()
    expected = {name: p.grad for name, p in own.named_parameters()}
    found = model(ids, labels=labels, num_items_in_batch=torch.tensor(20))
    assert torch.allclose(found.loss.double(), loss / 20, rtol=1e-5)  # transformers takes losses in float32
    assert found.past_key_values is None
    shifted = nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
    assert torch.equal(model(ids, shift_labels=shifted, num_items_in_batch=torch.tensor(20)).loss, found.loss)
    found.loss.backward()
    grads = {name: p.grad.clone() for name, p in model.model.lm.named_parameters()}
    assert grads.keys() == expected.keys()
    for name, grad in grads.items():
        assert torch.allclose(grad, expected[name], rtol=1e-4, atol=1e-6), name
    for reentrant in (False, True):
        model.zero_grad()
        model.activation_checkpointing_enable({"use_reentrant": reentrant})
        calls = count_calls(model)
        model(ids, labels=labels, num_items_in_batch=torch.tensor(20), use_cache=True).loss.backward()
        assert calls == [0, 1, 1, 0]  # forward, and again backward
        for name, p in model.model.lm.named_parameters():
            assert torch.equal(p.grad, grads[name]), name
        cache = made(rule)(ids, use_cache=True).past_key_values
        with pytest.raises(ConfigError, match="past_key_values and activation checkpointing"):
            model(ids, past_key_values=cache)
        model.activation_checkpointing_disable()


@pytest.mark.spec("HF-CACHE-D1")
def test_checkpointing_in_training_says_that_it_makes_no_cache(caplog):
    from transformers.utils import logging as their

    model, ids = made("momentum").train(), tokens(1, 4)
    model.activation_checkpointing_enable()
    their.get_logger("hecate.hf.model").warning_once.cache_clear()
    their.enable_propagation()
    try:
        with caplog.at_level(logging.WARNING, "hecate.hf.model"):
            assert model(ids).past_key_values is None and not caplog.records
            for _ in range(2):
                assert model(ids, use_cache=True).past_key_values is None
    finally:
        their.disable_propagation()
    assert len(caplog.records) == 1
    assert "use_cache=False" in caplog.text and "without a past" in caplog.text
    caplog.clear()
    assert model.eval()(ids, use_cache=True).past_key_values is not None and not caplog.records


def count_calls(model):
    """The numbers of the layers whose MLP is run, in order."""
    calls: list[int] = []
    for number, block in enumerate(model.model.lm.blocks):
        block.mlp.register_forward_pre_hook(lambda *_, number=number: calls.append(number))
    return calls


@pytest.mark.spec("HF-CACHE-D1")
def test_rows_of_a_cache_are_chosen_and_repeated():
    model, ids, more = made("levels"), tokens(3, 6), tokens(4, 2, seed=1)
    with torch.no_grad():
        cache = model(ids, use_cache=True).past_key_values
        cache.batch_select_indices(torch.tensor([2, 0]))
        cache.batch_repeat_interleave(2)
        whole = torch.cat([ids[[2, 2, 0, 0]], more], 1)
        assert torch.allclose(model(more, past_key_values=cache).logits, model(whole).logits[:, 6:], **CLOSE)
        cache.reset()
        assert cache.get_seq_length() == 0 and torch.equal(model(ids, past_key_values=cache).logits, model(ids).logits)


@pytest.mark.spec("HF-CACHE-D2", "HF-PAD-D1", "HF-PACK-D1", "HF-MODEL-D1")
def test_refusals_say_what_does_not_fit():
    from transformers import DynamicCache, StaticCache

    model, ids, zeros = made(), tokens(2, 5), torch.zeros(2, 5, 16)
    other, mask = DynamicCache(), torch.ones(2, 8, dtype=torch.long)
    other.update(torch.zeros(2, 2, 3, 4), torch.zeros(2, 2, 3, 4), 0)
    cache, static = model(ids, use_cache=True).past_key_values, StaticCache(config=model.config, max_cache_len=9)
    mask[1, 4] = 0  # the cache has written it
    beyond, cut, square = torch.tensor([[1, VOCABULARY]]), torch.tensor([0, 2, 4]), torch.ones(2, 1, 5, 5)
    for error, words, call in (
        (ConfigError, "either input_ids or inputs_embeds", lambda: model(ids, inputs_embeds=zeros)),
        (ShapeError, "input_ids must be int64 or int32", lambda: model(input_ids=ids.float())),
        (ShapeError, r"int64 or int32 \[B, T\], got torch.int64 \[5\]", lambda: model(input_ids=ids[0])),
        (ShapeError, "must be a Cache of transformers, got a tuple", lambda: model(ids, past_key_values=())),
        (ShapeError, "inputs_embeds must be", lambda: model(inputs_embeds=ids)),
        (ShapeError, r"\[B, T, d_model\], got \[5, 16\]", lambda: model(inputs_embeds=zeros[0])),
        (ConfigError, "no 'write_mask'", lambda: model(ids, write_mask=ids > 0)),
        (ConfigError, "no attention weights", lambda: model(ids, output_attentions=True)),
        (ShapeError, r"must be \[B, 5\], got \[2, 1, 5, 5\]; documents in one row", lambda: model(ids, square)),
        (ShapeError, r"must be \[B, 5\], got \[2, 4\]", lambda: model(ids, attention_mask=torch.ones(2, 4))),
        (ShapeError, "must be of one row and end at its 5 tokens", lambda: model(ids[:1], cu_seq_lens_q=cut)),
        (ShapeError, r"0\.\.16, the vocabulary, got 1\.\.17", lambda: model(beyond)),
        (ConfigError, "keys and values of another model", lambda: model(ids, past_key_values=other)),
        (ConfigError, "has 2 layers, the model 3", lambda: made(layers=3)(ids, past_key_values=cache)),
        (ConfigError, r"crop\(-2\): a memory takes back what it has recorded alone", lambda: cache.crop(-2)),
        (ConfigError, "has a StaticLayer", lambda: model(ids, past_key_values=static)),
        (ConfigError, "no keys and values", lambda: cache.update(ids, ids, 0)),
        (ConfigError, "attention_mask differs in row 1", lambda: model(ids[:, :3], mask, past_key_values=cache)),
    ):
        with pytest.raises(error, match=words):
            call()
