"""`generate`: what it gives is what hecate draws itself, on every way that it takes."""

from __future__ import annotations

from copy import deepcopy
from itertools import product
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import hecate
from hecate.errors import ConfigError
from hecate.hf import byte_tokenizer
from hecate.train.evaluate import generate
from tests.hf.common import RULES, SOME, made, plain, tokens

GREEDY: dict[str, Any] = {"max_new_tokens": 7, "do_sample": False, "pad_token_id": 0}


def greedy(model, row, count=7):
    """By hecate's own loop."""
    drawn = generate(plain(model), row.tolist(), count, temperature=0, generator=torch.Generator())
    return torch.tensor([*row.tolist(), *drawn])


@pytest.mark.parametrize("rule", SOME)
@pytest.mark.spec("HF-GEN-D1", "HF-CACHE-D1", "HF-CACHE-D2")
def test_every_way_gives_the_same_tokens(rule):
    from transformers import DynamicCache

    model, ids = made(rule, tie_embeddings=False), tokens(2, 9)
    expected = torch.stack([greedy(model, row) for row in ids])
    assert len(set(expected[:, 9:].flatten().tolist())) > 2  # not one token over and over
    for how in (
        {}, {"use_cache": False}, {"prefill_chunk_size": 4}, {"past_key_values": DynamicCache()},
        {"past_key_values": DynamicCache(config=model.config)},
    ):  # fmt: skip
        assert torch.equal(model.generate(ids, **GREEDY, **how), expected), how
    # A shorter row is padded in front, by what is no token of the model.
    both, mask = ids.clone(), torch.ones_like(ids)
    both[0, :4], mask[0, :4] = 999, 0
    for how in ({}, {"prefill_chunk_size": 2}):
        found = model.generate(both, attention_mask=mask, **GREEDY, **how)
        assert torch.equal(found[0, 9:], greedy(model, ids[0, 4:])[5:]) and torch.equal(found[1], expected[1])
    # A conversation goes on, from a copy of its cache as well.
    cache = DynamicCache()
    first = model.generate(ids, past_key_values=cache, **GREEDY)
    kept = deepcopy(cache)
    more = torch.cat([first, ids[:, :3]], 1)
    whole = {"attention_mask": torch.ones_like(more)}
    again = torch.stack([greedy(model, row) for row in more])
    assert torch.equal(model.generate(more, past_key_values=cache, **whole, **GREEDY), again)
    assert torch.equal(model.generate(more, past_key_values=kept, **whole, **GREEDY), again)
    with pytest.raises(ConfigError, match="leave cache_implementation out"):
        model.generate(ids, cache_implementation="static", disable_compile=True, **GREEDY)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.spec("HF-GEN-D1")
def test_beams_and_samples(rule):
    model, ids = made(rule, tie_embeddings=False), tokens(2, 6)
    beams = {**GREEDY, "num_beams": 3, "num_return_sequences": 2}
    assert torch.equal(model.generate(ids, **beams), model.generate(ids, use_cache=False, **beams))
    drawn = []
    for cached in (True, False):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            drawn.append(model.generate(ids, use_cache=cached, do_sample=True, max_new_tokens=5, pad_token_id=0,
                                        num_return_sequences=2))  # fmt: skip
    assert torch.equal(*drawn) and not torch.equal(drawn[0][0], drawn[0][1])


@pytest.mark.spec("HF-GEN-D1")
def test_as_many_beams_as_there_are_ways_find_the_likeliest():
    model = made("momentum", vocab_size=4)
    ids = tokens(2, 5) % 4
    ways = torch.tensor(list(product(range(4), repeat=3)))
    own = plain(model)
    for row in ids:
        texts = torch.cat([row.expand(64, -1), ways], 1)
        with torch.no_grad():
            chances = own(texts)[0].log_softmax(-1)[:, 4:-1]
        best = texts[chances.gather(2, ways[..., None]).sum((1, 2)).argmax()]
        how: dict[str, Any] = {"num_beams": 16, "max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
        how["attention_mask"] = torch.ones_like(row[None])  # token 0 is one
        assert torch.equal(model.generate(row[None], **how)[0], best)


@pytest.mark.spec("HF-GEN-D1")
def test_what_was_filled_up_is_not_continued_by_a_cache():
    from transformers import DynamicCache

    model, ids = made(), tokens(2, 6)
    end = int(greedy(model, ids[0])[6])
    cache = DynamicCache()
    found = model.generate(ids, past_key_values=cache, **{**GREEDY, "eos_token_id": end})
    assert found[0, 7] == 0 and found[1, 7] != 0  # row 0 has ended at once
    more = torch.cat([found, ids[:, :2]], 1)
    mask = torch.ones_like(more)
    mask[0, 7 : found.shape[1]] = 0
    with pytest.raises(ConfigError, match="differs in row 0 .* continue such rows one by one, or without a cache"):
        model.generate(more, attention_mask=mask, past_key_values=cache, **GREEDY)
    alone = torch.cat([found[0, :7], ids[0, :2]])
    assert torch.equal(model.generate(more, attention_mask=mask, **GREEDY)[0, -7:], greedy(model, alone)[-7:])


@pytest.mark.parametrize("rule", ["momentum", "levels"])
@pytest.mark.spec("HF-GEN-D3")
def test_generate_batch_gives_what_generate_gives(rule):
    from transformers import GenerationConfig
    from transformers.generation.continuous_batching.requests import RequestStatus

    model = made(rule, tie_embeddings=False).train()
    prompts = [tokens(1, length, seed)[0].tolist() for seed, length in enumerate((3, 1, 15, 8, 5))]
    alone = [greedy(model, torch.tensor(prompt))[len(prompt) :].tolist() for prompt in prompts]
    end = alone[0][2]
    for how in ({}, {"eos_token_id": end}, {"eos_token_id": [end, 99]}, {"max_batch": 2}, {"warmup": False}):
        found = model.generate_batch(prompts, max_new_tokens=7, do_sample=False, **how)
        cut = [row[: row.index(end) + 1] if "eos_token_id" in how and end in row else row for row in alone]
        assert list(found) == [f"req_{n}" for n in range(5)] and [out.generated_tokens for out in found.values()] == cut
        assert all(out.is_finished() and out.status == RequestStatus.FINISHED for out in found.values())
        assert [out.prompt_ids for out in found.values()] == prompts
    assert model.training and model.generate_batch([]) == {}
    config = GenerationConfig(do_sample=True, max_new_tokens=5, top_k=0, temperature=0.9)
    drawn = [model.generate_batch(prompts, config, seed=seed)["req_1"].generated_tokens for seed in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert len(model.generate_batch([[1] * 4], max_length=9)["req_0"].generated_tokens) == 5
    assert len(model.generate_batch([[1] * 4])["req_0"].generated_tokens) == 20
    for how, match in (
        ({"num_beams": 2}, "knows no num_beams"), ({"repetition_penalty": 1.2}, "knows no repetition_penalty"),
        ({"stop_strings": ["a"]}, "knows no stop_strings"), ({"tokens": 3}, "knows no tokens"),
        ({"max_length": 2}, "leaves no room after a prompt of 3 tokens"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=match):
            model.generate_batch(prompts, do_sample=False, **how)
    with pytest.raises(ConfigError, match="a prompt must have at least one token"):
        model.generate_batch([[1], []])


@pytest.mark.spec("HF-GEN-D3")
def test_pages_of_keys_and_values_are_refused_before_they_are_made(caplog, monkeypatch):
    """transformers' own batching has none for a memory: it would log an error and answer nothing."""
    model, rows = made(), tokens(2, 4).tolist()
    assert not hasattr(model, "init_continuous_batching")  # what `transformers serve` asks
    with pytest.raises(ConfigError, match="call generate with rows padded in front and an attention_mask"):
        model.continuous_batching_context_manager().__enter__()
    with pytest.raises(ConfigError, match="knows no cache_implementation"):
        model.generate(tokens(2, 4), cache_implementation="paged", max_new_tokens=2)
    with pytest.raises(ConfigError, match="give its attention a window"):
        made("mag").generate_batch(rows, max_new_tokens=2)
    forward = type(model.model.lm).forward

    def spoilt(self: Any, ids: torch.Tensor, state: Any = None, **masks: Any) -> Any:
        logits, state = forward(self, ids, state, **masks)
        return torch.where((ids[:, -1:, None] == 3), float("nan"), logits), state

    monkeypatch.setattr(type(model.model.lm), "forward", spoilt)
    found = model.generate_batch([[1, 3], [1, 2]], max_new_tokens=1)
    assert found["req_0"].error and not found["req_0"].generated_tokens and found["req_1"].error is None
    assert "rror" not in caplog.text


@pytest.mark.spec("HF-GEN-D1", "HF-BYTES-D1")
def test_text_streams_and_pipelines(capsys):
    from transformers import TextStreamer, pipeline

    model, tokenizer = made(vocab_size=256), byte_tokenizer()
    how: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}
    given = tokenizer(["ab", "longer"], return_tensors="pt", padding=True)
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    found = model.generate(**given, **how)
    row = torch.tensor(list(b"ab"))
    assert torch.equal(found[0, 4:], greedy(model, row, 12))
    model.generate(**tokenizer("ab", return_tensors="pt"), streamer=TextStreamer(tokenizer), **how)
    text = tokenizer.decode(greedy(model, row, 12))
    assert capsys.readouterr().out == text + "\n"
    made_text = pipeline("text-generation", model=model, tokenizer=tokenizer)("ab", **how)
    assert made_text[0]["generated_text"] == tokenizer.decode(greedy(model, row, 12), skip_special_tokens=True)


@pytest.mark.parametrize("rule", SOME)
@pytest.mark.spec("TAPE-EXACT-D1", "HF-GEN-D1", "HF-CACHE-D3")
def test_within_exact_drafts_rows_and_a_cropped_cache_have_the_bits_of_greedy_alone(rule):
    model, drafter = made(rule).float(), made(rule, layers=1).float()
    model.generation_config.eos_token_id = None
    how: dict[str, Any] = {**GREEDY, "max_new_tokens": 8, "output_logits": True, "return_dict_in_generate": True}
    rows = [tokens(1, length, seed=length) for length in (11, 4, 8)]
    padded = torch.cat([F.pad(row, (11 - row.shape[1], 0)) for row in rows])
    mask = torch.cat([F.pad(torch.ones_like(row), (11 - row.shape[1], 0)) for row in rows])
    with hecate.exact():
        alone = [torch.stack(model.generate(row, **how).logits, 1) for row in rows]
        for drafts in ({"prompt_lookup_num_tokens": 5}, {"assistant_model": drafter}):
            found = torch.cat([y.flatten(0, -2) for y in model.generate(rows[0], **how, **drafts).logits])
            assert torch.equal(found[:8], alone[0][0])
        cache, other = model.new_cache(), model.new_cache()
        cache.activate_past_recording()
        model(torch.cat([rows[0], rows[1]], 1), past_key_values=cache)
        cache.crop(-3)
        model(torch.cat([rows[0], rows[1][:, :1]], 1), past_key_values=other)
        ends = [model(rows[2][:, :1], past_key_values=past).logits for past in (cache, other)]
        assert torch.equal(*ends)
        if rule == "mag":
            with pytest.raises(ConfigError, match="exact and window=None"):
                model.generate(padded, attention_mask=mask, **how)
            return
        together = torch.stack(model.generate(padded, attention_mask=mask, **how).logits, 1)
    assert all(torch.equal(together[n : n + 1], own) for n, own in enumerate(alone))
