"""Adapters of peft around our models: what they read of a config, and which layers they find."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.hf.common import made, tokens

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("default")  # its warnings are not ours


@pytest.mark.parametrize(("rule", "tied"), [("levels", False), ("mag", True), ("mlp", True)])  # that differ in layers
@pytest.mark.spec("HF-TRAIN-D1", "HF-LM-D1")
def test_all_linear_is_every_linear_layer_but_the_output_and_none_is_read_past_its_adapter(rule, tied):
    model, ids = made(rule, tie_embeddings=tied), tokens(2, 6)
    before, names = model(ids).logits, [name for name, _ in model.state_dict().items()]
    linear = {name for name, layer in model.named_modules() if isinstance(layer, nn.Linear)}
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM"))
    found = {name for name, layer in adapted.base_model.model.named_modules() if hasattr(layer, "lora_A")}
    assert found == linear - {"model.lm.head"} and len(found) > 4
    with torch.no_grad():
        assert torch.equal(adapted(ids).logits, before)
        for name, p in adapted.named_parameters():
            if "lora_B" in name:
                p.fill_(0.3)
                assert not torch.allclose(adapted(ids).logits, before, atol=1e-5), name
                p.zero_()
    assert list(made(rule, tie_embeddings=tied).state_dict()) == names


@pytest.mark.parametrize(("kind", "tied"), [("PromptTuningConfig", True), ("PromptEncoderConfig", False)])
@pytest.mark.spec("HF-TRAIN-D1", "HF-CONFIG-D1")
def test_virtual_tokens_are_learned_and_read(kind, tied):
    ids, how = tokens(2, 6), {"num_virtual_tokens": 3, "task_type": "CAUSAL_LM"}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        adapted = peft.get_peft_model(made(tie_embeddings=tied), getattr(peft, kind)(**how))
    config = adapted.active_peft_config
    assert (config.token_dim, config.num_layers, config.num_attention_heads) == (16, 2, 2)
    loss = adapted(ids, labels=ids).loss
    loss.backward()
    trained = {name for name, p in adapted.named_parameters() if p.grad is not None and p.grad.any()}
    assert trained and all("prompt_encoder" in name for name in trained)
    adapted.eval()
    with torch.no_grad():
        prompt = adapted.get_prompt(2)
        joined = torch.cat([prompt, adapted.get_input_embeddings()(ids)], 1)
        expected = adapted.base_model(inputs_embeds=joined).logits
        assert torch.allclose(adapted(ids).logits, expected)
        drawn = adapted.generate(input_ids=ids, max_new_tokens=1, do_sample=False, pad_token_id=0)
        assert torch.equal(drawn[:, -1], expected[:, -1].argmax(-1))
