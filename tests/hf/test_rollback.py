"""Tokens taken back: `crop`, drafts of an assistant and of the prompt, beside what greedy decoding gives."""

from __future__ import annotations

import copy
import gc
import math
from typing import Any

import pytest
import torch

from hecate import states
from hecate.errors import ConfigError
from hecate.hf import HecateConfig, HecateForCausalLM
from hecate.models import HopeConfig, LanguageModel
from hecate.models.rollback import WINDOW, Recorded, advance
from hecate.rule import RULES as NAMED
from tests.hf.common import RULES, VOCABULARY, plain, takes_back, tokens
from tests.hf.test_graft import IDS, made, put

HOPE = HopeConfig(vocab_size=17, d_model=16, heads=2).model_dump(exclude={"vocab_size", "d_model", "heads", "layers"})
KINDS: dict[str, dict[str, Any]] = {
    **{name: RULES[name] for name in ("levels", "mag", "mlp")},
    "gated_delta": {"memory": "gated_delta"},
    "titans": {"memory": "titans"},
    "window": {"memory": "gated_delta", "attention": {"kind": "mal", "window": 4}},
    "attention": {"attention": {"kind": "attention"}},
    "hope": HOPE,
}


def some(*daily: str) -> Any:
    return pytest.mark.parametrize(
        "kind", [k if k in daily else pytest.param(k, marks=pytest.mark.slow) for k in KINDS]
    )


def of(kind: str, noise: float = 0.0, seed: int = 0) -> Any:
    """A model of this kind; with noise on its weights it drafts what the model often rejects."""
    sizes = {"vocab_size": VOCABULARY, "d_model": 16, "layers": 2, "heads": 2, "tie_embeddings": False}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = HecateForCausalLM(HecateConfig(model={**sizes, **KINDS.get(kind, {"memory": kind})})).eval()
    draws = torch.Generator().manual_seed(seed)
    for weight in model.parameters() if noise else ():
        if weight.numel() > 1:
            weight.data += noise * weight.data.std() * torch.randn(weight.shape, generator=draws)
    how = model.generation_config
    how.assistant_confidence_threshold, how.num_assistant_tokens, how.max_matching_ngram_size = 0, 5, 1
    how.num_assistant_tokens_schedule = "constant"
    return model


class Counted:
    """Counts of what a model is called with, drafts and what is taken back of them."""

    def __init__(self, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls = self.drafted = self.rejected = 0
        layer = type(model.new_cache().layers[0])
        crop = layer.crop

        def counted(own: Any, count: int) -> None:
            self.rejected -= count if own._layers["block"]() is model.model.lm.blocks[0] else 0
            crop(own, count)

        def seen(_: Any, args: Any, kwargs: Any) -> None:
            self.calls, self.drafted = self.calls + 1, self.drafted + kwargs["logits_to_keep"] - 1

        monkeypatch.setattr(layer, "crop", counted)
        model.register_forward_pre_hook(seen, with_kwargs=True)


def rejected(model: Any, assistant: Any, length: int, monkeypatch: pytest.MonkeyPatch) -> float:
    """The share of drafts taken back, of the kind of which more are; the text is that of greedy generation."""
    ids = tokens(1, 11)
    how: dict[str, Any] = {"max_new_tokens": length, "do_sample": False, "pad_token_id": 0}
    how["attention_mask"] = torch.ones_like(ids)
    expected = model.generate(ids, **how)
    wrong: list[float] = []
    how["pad_token_id"] = int(expected[0, 11])  # a token of the text may be that of the padding
    for drafts in ({"assistant_model": assistant}, {"prompt_lookup_num_tokens": 5}):
        with monkeypatch.context() as patch:
            count = Counted(model, patch)
            assert torch.equal(model.generate(ids, **how, **drafts), expected), drafts
        wrong += [count.rejected / count.drafted]
    return max(wrong)


@some("levels", "window")  # drafts of a memory alone follow below, and what other states take back
@pytest.mark.spec("HF-GEN-D2")
def test_drafts_that_are_often_wrong_give_what_greedy_gives(kind, monkeypatch):
    assert rejected(of(kind), of(kind, noise=0.6), 12, monkeypatch) >= 0.3


@pytest.mark.slow
@pytest.mark.parametrize("rule", NAMED)
@pytest.mark.spec("HF-GEN-D2")
def test_drafts_of_every_rule(rule, monkeypatch):
    length = 90 if rule == "memora" else 200  # rounding in it grows from 1e-13 to 1e-2 over tokens 105 to 135
    for seed in range(3):  # rules whose answers the weights move little take more noise to be wrong
        drafts = (of(rule, noise=noise, seed=seed) for noise in (0.6, 1.2, 2.4))
        assert any(rejected(of(rule), own, length, monkeypatch) >= 0.3 for own in drafts)


@some("gated_delta", "levels", "window", "hope")
@pytest.mark.spec("HF-CACHE-D3", "LM-BACK-D1")
def test_what_was_taken_back_was_never_seen(kind):
    model = of(kind)
    ids, more = tokens(2, 21 + 2 * WINDOW, seed=2), tokens(2, 5, seed=3)

    def after(cache: Any) -> torch.Tensor:
        return model(more, past_key_values=cache).logits

    with torch.no_grad():
        start = model(ids[:, :20], use_cache=True).past_key_values
        start.activate_past_recording()
        for count in (33, WINDOW):
            kept = 21 + WINDOW - count
            cache, never = copy.deepcopy(start), copy.deepcopy(start)
            model(ids[:, 20 : 21 + WINDOW], past_key_values=cache)  # one call, of which the first token is too old
            cache.crop(-count)
            model(ids[:, 20:kept], past_key_values=never)
            assert cache.get_seq_length() == never.get_seq_length() == kept
            torch.testing.assert_close(after(cache), after(never), rtol=0, atol=1e-9)
        # Over calls of several lengths, and twice.
        cache = copy.deepcopy(start)
        for lo, hi in ((20, 24), (24, 25), (25, 26), (26, 32), (32, 33)):
            model(ids[:, lo:hi], past_key_values=cache)
        cache.crop(-3)
        cache.crop(0)
        cache.crop(-7)
        never = copy.deepcopy(start)
        model(ids[:, 20:23], past_key_values=never)
        torch.testing.assert_close(after(cache), after(never), rtol=0, atol=1e-9)


@pytest.mark.spec("HF-CACHE-D3", "HF-PAD-D1")
def test_padding_and_rows_come_along():
    model, ids, more = of("levels"), tokens(3, 12), tokens(3, 4, seed=3)
    mask = torch.ones_like(ids)
    mask[0, :4], mask[1, 9:] = 0, 0  # in front, and as where generate fills up a row that has ended
    with torch.no_grad():
        for count in (1, 2, 4, 7):
            cache, never = model.new_cache(), model.new_cache()
            cache.activate_past_recording()
            for lo, hi in ((0, 5), (5, 10), (10, 12)):
                model(ids[:, lo:hi], attention_mask=mask[:, :hi], past_key_values=cache)
            model(ids[:, :-count], attention_mask=mask[:, :-count], past_key_values=never)
            for each in (cache, never):  # as beams are
                each.reorder_cache(torch.tensor([2, 0, 1]))
                each.batch_repeat_interleave(2)
                each.batch_select_indices(torch.tensor([0, 2, 4]))
            cache.crop(-count)
            assert torch.equal(cache.layers[0].written, never.layers[0].written)
            whole = torch.cat([mask[[2, 0, 1], :-count], torch.ones_like(more)], 1)
            found, wanted = (model(more, attention_mask=whole, past_key_values=each).logits for each in (cache, never))
            torch.testing.assert_close(found, wanted, rtol=0, atol=1e-9)


@pytest.mark.spec("HF-CACHE-D3")
def test_what_is_not_recorded_is_not_taken_back():
    gc.freeze()  # what is there already is not looked through below
    model, ids = of("gated_delta"), tokens(1, 90)
    cache = model.new_cache()
    assert not cache.is_croppable
    model(ids[:, :3], past_key_values=cache)
    with pytest.raises(ConfigError, match=r"crop\(-1\): .* has recorded nothing; call activate_past_recording"):
        cache.crop(-1)
    cache.crop(0)
    cache.activate_past_recording()
    assert cache.is_croppable
    with pytest.raises(ConfigError, match="1 tokens are to be taken back, and 0 are recorded"):
        cache.crop(-1)
    model(ids, past_key_values=cache)
    assert (
        cache.layers[0].memories["block"].calls[0].x.untyped_storage().nbytes() == WINDOW * 16 * 8
    )  # and not all of the inputs
    with pytest.raises(ConfigError, match=f"{WINDOW + 1} tokens are to be taken back, and {WINDOW} are recorded"):
        cache.crop(-WINDOW - 1)
    with pytest.raises(ConfigError, match="a length is not cropped to"):
        cache.crop(4)
    cache.crop(3 - WINDOW)
    assert cache.get_seq_length() == 96 - WINDOW and cache.layers[0].written.tolist() == [96 - WINDOW]
    del model
    gc.collect()
    gc.unfreeze()
    with pytest.raises(ConfigError, match="the model that wrote the cache is gone"):
        cache.crop(-1)


@pytest.mark.spec("HF-GEN-D2")
def test_right_drafts_save_calls_and_the_record_is_small(monkeypatch):
    model, ids = of("gated_delta"), tokens(1, 30)
    how: dict[str, Any] = {"max_new_tokens": 60, "do_sample": False, "pad_token_id": 0, "return_dict_in_generate": True}
    how["attention_mask"] = torch.ones_like(ids)
    expected = model.generate(ids, **how).sequences
    how["pad_token_id"] = int(expected[0, 30])  # a right draft may have the token of the padding
    count = Counted(model, monkeypatch)
    found = model.generate(ids, assistant_model=of("gated_delta"), **how)
    assert torch.equal(found.sequences, expected) and count.calls <= math.ceil(60 / 6) + 1 and count.rejected <= 5
    for layer in found.past_key_values.layers:
        state, inputs = states.bytes_of(layer.state), WINDOW * 16 * ids.new_zeros(1, dtype=torch.float64).itemsize
        recorded = sum(call.tokens for call in layer.memories["block"].calls)
        assert WINDOW <= recorded < 2 * WINDOW
        assert states.bytes_of(layer.memories["block"].calls) <= 2 * inputs + 2 * math.log2(WINDOW) * state
        assert all(call.x.untyped_storage().nbytes() == call.x.numel() * 8 for call in layer.memories["block"].calls)


@pytest.mark.spec("HF-GEN-D2")
def test_longer_drafts_than_the_window_are_taken_back_as_well():
    model, assistant, ids = of("gated_delta"), of("gated_delta", noise=0.6), tokens(1, 9)
    assistant.generation_config.num_assistant_tokens = 2 * WINDOW + 9
    how: dict[str, Any] = {"max_new_tokens": 2 * WINDOW + 20, "do_sample": False, "pad_token_id": 0}
    how["attention_mask"] = torch.ones_like(ids)
    expected = model.generate(ids, **how)
    how["stopping_criteria"] = [lambda found, _: torch.tensor([found.shape[1] >= 13])]  # after a draft or two
    found = model.generate(ids, assistant_model=assistant, **how)
    assert torch.equal(found, expected[:, : found.shape[1]]) and found.shape[1] >= 13


@pytest.mark.slow
@pytest.mark.spec("HF-GEN-D2")
def test_drafts_draw_from_the_model_s_distribution():
    model, assistant, ids = of("gated_delta"), of("gated_delta", noise=0.6), tokens(1, 5)
    how: dict[str, Any] = {"max_new_tokens": 3, "do_sample": True, "pad_token_id": 0, "top_k": 0}
    how["attention_mask"] = torch.ones_like(ids)
    with torch.no_grad():
        first = model(ids).logits[0, -1].softmax(-1)
        follow = model(torch.cat([ids.expand(17, -1), torch.arange(17)[:, None]], 1)).logits[:, -1].softmax(-1)
    expected, draws = first @ follow, 2000
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        seen = [int(model.generate(ids, assistant_model=assistant, **how)[0, 6]) for _ in range(draws)]
    counts = torch.bincount(torch.tensor(seen), minlength=17)
    chi = float(((counts - draws * expected) ** 2 / (draws * expected)).sum())
    assert chi < 45  # 16 degrees of freedom: one in 10,000 is above


@pytest.mark.parametrize("kind", ["gated_delta", "levels"])
@pytest.mark.spec("LM-BACK-D1")
def test_a_loop_of_one_s_own_takes_tokens_back(kind):
    model: LanguageModel = plain(of(kind))
    ids, wrong = tokens(1, 30), tokens(1, 6, seed=5)
    with torch.no_grad():
        state: Any = model.record()
        logits, state = model(ids, state)
        _, state = model(wrong, state)
        with pytest.raises(ConfigError, match="60 tokens are to be taken back, and 36 are recorded"):
            model.take_back(state, 60)
        with pytest.raises(ConfigError, match="tokens to take back must be an integer >= 0"):
            model.take_back(state, -1)
        back = model.take_back(state, 6)
        assert all(isinstance(each, Recorded) and each.tokens == 30 for each in back)
        alone, plainly = model(ids)
        assert torch.equal(alone, logits)
        found, wanted = model(wrong[:, :2], back)[0], model(wrong[:, :2], plainly)[0]
        assert torch.equal(found, wanted)  # a call that is taken back whole leaves no trace
        found = model(wrong[:, 4:], model.take_back(state, 2))[0]
        torch.testing.assert_close(found, model(torch.cat([ids, wrong], 1))[0][:, -2:], rtol=0, atol=1e-9)
        with pytest.raises(ConfigError, match="the state is not recorded"):
            model.take_back(plainly, 1)


@pytest.mark.spec("LM-BACK-D1")
def test_masks_are_those_of_the_calls_whether_joined_or_not():
    model, ids, draws = plain(of("gated_delta")), tokens(2, 24), torch.Generator().manual_seed(2)
    for layer in model.modules():
        if hasattr(layer, "inert"):
            layer.inert = True  # padding may stand anywhere
    write, reset = (torch.rand(2, 24, generator=draws) < share for share in (0.7, 0.2))
    with torch.no_grad():
        state: Any = model.record()
        for at in range(24):  # masks in some calls alone
            masks = {} if at % 5 == 0 else {"write_mask": write[:, at : at + 1], "reset_mask": reset[:, at : at + 1]}
            state = model(ids[:, at : at + 1], state, **masks)[1]
        assert any(call.tokens > 2 for call in state[0].calls)
        write[:, ::5], reset[:, ::5] = True, False
        for count in range(1, 24):
            never = model(ids[:, :-count], write_mask=write[:, :-count], reset_mask=reset[:, :-count])[1]
            found, wanted = (model(ids[:, :3], each)[0] for each in (model.take_back(state, count), never))
            torch.testing.assert_close(found, wanted, rtol=0, atol=1e-9)


@pytest.mark.spec("LM-BACK-D1")
def test_a_recorded_state_is_a_state(tmp_path):
    model = plain(of("levels"))
    with torch.no_grad():
        state: Any = model(tokens(2, 9), model.record())[1]
        for count in (1, 3, 2):
            state = model(tokens(2, count), state, write_mask=torch.tensor([[True], [count != 3]]).expand(2, count))[1]
        states.save(state, tmp_path / "state")
        loaded = states.stack([states.rows(states.load(tmp_path / "state"), [n]) for n in (1, 0)])
        for count in (0, 2, 5):
            found, wanted = (model.take_back(each, count) for each in (loaded, state))
            found, wanted = model(tokens(2, 2), found)[0], model(tokens(2, 2)[[1, 0]], wanted)[0]
            torch.testing.assert_close(found[[1, 0]], wanted, rtol=0, atol=1e-9) if count else None


def test_few_states_are_kept_however_short_the_calls():
    past, seen = Recorded(torch.zeros(1, 1), ()), 0

    def run(x: torch.Tensor, state: torch.Tensor, **_: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return x, state + x.sum(1)

    for step in range(400):
        _, past = advance(run, torch.ones(1, 1, 1), past, write_mask=None, reset_mask=None)
        seen += 1
        assert min(seen, WINDOW) <= past.tokens < 2 * WINDOW and len(past.calls) <= 2 * math.log2(WINDOW)
        assert past.calls[-1].tokens == 1 and float(past.calls[0].state) == seen - past.tokens, step


@pytest.mark.parametrize(("family", "how"), [
    ("llama", {"memory": "titans"}), ("mistral", {"memory": "gated_delta"}),
    pytest.param("llama", {"memory": "delta", "mode": "replace"}, marks=pytest.mark.slow),
])  # fmt: skip
@pytest.mark.spec("HF-GRAFT-I4")
def test_drafts_of_grafted_models(family, how):
    """As the model, whose memory is beside keys and values of all tokens or of a window, and as the assistant."""
    from transformers import DynamicCache

    model, drafter = (put(made(family), loud=loud, **how) for loud in (2.0, 1.0))
    for each in (model, drafter):
        own = each.generation_config
        own.assistant_confidence_threshold, own.num_assistant_tokens, own.max_matching_ngram_size = 0, 5, 1
    ask: dict[str, Any] = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0}
    ids = IDS[:1]
    expected = model.generate(ids, **ask)
    assert len(set(expected[0].tolist())) > 4
    for assistant in (drafter, copy.deepcopy(model)) if family == "llama" else (made(family),):
        assert torch.equal(model.generate(ids, assistant_model=assistant, **ask), expected)
    for drafts in ({"prompt_lookup_num_tokens": 5}, {"prompt_lookup_num_tokens": 5, "past_key_values": DynamicCache()}):
        assert torch.equal(model.generate(ids, **ask, **drafts), expected)
    if family != "mistral":
        takes_back(model, 1e-9)
        return
    with torch.no_grad():
        cache = model(IDS[:, :4]).past_key_values
        kept = copy.deepcopy(cache)
        cache.activate_past_recording()
        assert cache.is_croppable and not kept.is_croppable
        for part in (IDS[:, 4:7], IDS[:, 7:8], IDS[:, 4:5]):
            model(part, past_key_values=cache)
        cache.crop(-3)
        wanted = model(torch.cat([IDS[:, 4:6], IDS[:, 2:4]], 1), past_key_values=kept).logits[:, -2:]
        torch.testing.assert_close(model(IDS[:, 2:4], past_key_values=cache).logits, wanted, rtol=0, atol=1e-9)
        with pytest.raises(ConfigError, match="a length is not cropped to"):
            cache.crop(3)
        with pytest.raises(ConfigError, match="are to be taken back, and [24] are recorded"):
            cache.crop(-5)
        cache.crop(0)  # a window of keys is cut to what it needs, so that nothing before it can be had again
        with pytest.raises(ConfigError, match="1 tokens are to be taken back, and 0 are recorded"):
            cache.crop(-1)
