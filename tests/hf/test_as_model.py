"""Models of transformers in runs of hecate: the calls of a model of hecate, training, resuming and the way back."""

from __future__ import annotations

import copy
import shutil
import sys
from itertools import pairwise
from typing import Any

import pytest
import torch
import transformers
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from hecate.data import IGNORED, Bundled
from hecate.errors import ConfigError, ShapeError
from hecate.evals import Evaluation, evaluate_tasks
from hecate.hf import AsModel, adopt, graft_mlp, save, upgrade
from hecate.hf.layers import Read
from hecate.hf.saved import byte_tokenizer
from hecate.models import LanguageModel
from hecate.train import Trainer, load_experiment, run_experiment
from hecate.train.trained import read_weights
from tests.data.corpora import bytes_folder, texts
from tests.hf.families import built
from tests.train.common import tiny

pytestmark = pytest.mark.spec("HF-RUN-D1")
FAMILIES = ("qwen3_5", "kimi_linear", "mamba2", "olmo_hybrid")
SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "vocab_size": 64}
LLAMA = SMALL | {"intermediate_size": 24, "num_attention_heads": 2, "vocab_size": 256}
ROUNDING = 1e-5  # of logits near 1 in float32, over some hundred additions


def llama() -> Any:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**LLAMA)).eval()


def bytes_model(**options: Any) -> Any:
    return built("qwen3_5", vocab_size=256, **options)


def close(one: torch.Tensor, two: torch.Tensor) -> None:
    torch.testing.assert_close(one, two, rtol=ROUNDING, atol=ROUNDING * float(two.abs().max()))


def drawn(*shape: int) -> torch.Tensor:
    return torch.randint(1, 61, shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_pieces_padding_and_documents_are_those_of_sequences_alone(family):
    model = built(family).eval()
    adopt(model)
    own, tokens = AsModel(model), drawn(2, 14)
    whole, state = own(tokens)
    assert torch.equal(whole, model(input_ids=tokens, use_cache=True).logits)
    _, before = own(tokens[:, :5])
    kept = [x.clone() for x in tensors_of(before)]
    for _ in range(2):  # a state is a value: going on from it leaves it as it was
        rest, _ = own(tokens[:, 5:6], before)
        close(rest, whole[:, 5:6])
    assert all(map(torch.equal, kept, tensors_of(before)))
    close(own(tokens[:, 6:], own(tokens[:, 5:6], before)[1])[0], whole[:, 6:])
    there = torch.arange(14) >= torch.tensor([[0], [4]])
    padded, state = own(tokens, write_mask=there)
    close(padded[1, 4:], own(tokens[1:, 4:])[0][0])
    close(own(tokens[:, :1], state)[0][1], own(torch.cat([tokens[1:, 4:], tokens[1:, :1]], 1))[0][0, -1:])
    starts = torch.zeros(2, 14, dtype=torch.bool)
    starts[:, 0] = starts[0, 6] = starts[1, 9] = True
    if family == "mamba2":  # a model that tells its layers of no documents
        with pytest.raises(ConfigError, match="reset_mask: the Mamba2 model takes the documents of a row for one"):
            own(tokens, reset_mask=starts)
        return
    packed, state = own(tokens, reset_mask=starts)
    with pytest.raises(ConfigError, match="several documents cannot fill a cache"):
        own(tokens[:, :1], state)
    for row, cut in enumerate((6, 9)):
        close(packed[row, :cut], own(tokens[row : row + 1, :cut])[0][0])
        close(packed[row, cut:], own(tokens[row : row + 1, cut:])[0][0])


def tensors_of(state: Read) -> list[torch.Tensor]:
    parts = [vars(layer) for layer in state.cache.layers]
    return [x for part in parts for x in part.values() if isinstance(x, torch.Tensor)]


def experiment() -> Any:
    budget = {"steps": 4, "seq_len": 32, "batch_size": 2, "eval_every": 2, "checkpoint_every": 2}
    return load_experiment("quickstart", ["sample.tokens=3", *(f"budget.{n}={value}" for n, value in budget.items())])


@pytest.mark.parametrize("change", ["adopted", "upgraded", "grafted"])  # the adopted one's output layer is tied
def test_a_run_trains_it_goes_on_to_the_bit_and_the_folder_is_that_of_transformers(change, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)  # a report without a figure

    def made() -> Any:
        model = llama() if change == "grafted" else bytes_model(tie_word_embeddings=change == "adopted")
        if change == "adopted":
            adopt(model)
        elif change == "upgraded":
            torch.manual_seed(1)
            upgrade(model, "momentum")
        elif change == "grafted":
            torch.manual_seed(1)
            graft_mlp(model, periods=(4,))
        return model

    source = Bundled(max_bytes=1 << 14).load()
    whole, again = made(), made()
    frozen = {name: p.clone() for name, p in whole.named_parameters() if not p.requires_grad}
    result = run_experiment(experiment(), tmp_path / "whole", model=AsModel(whole), source=source)
    shutil.copytree(tmp_path / "whole", tmp_path / "parted")
    shutil.rmtree(tmp_path / "parted" / "checkpoints" / "step_00000004")
    run_experiment(experiment(), tmp_path / "parted", model=AsModel(again), source=source, resume=True)
    for (name, one), two in zip(whole.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(one, two), name
    assert all(torch.equal(whole.get_parameter(name), p) for name, p in frozen.items())
    assert result.status == "finished"
    report = (tmp_path / "whole" / "report.md").read_text()
    assert "but for those of `model`: it was the caller's AsModel" in report and "model=...)" in report
    assert "d_model" not in report and "state per sequence" not in report and "hecate generate" not in report
    other = AsModel(made())
    other.load_state_dict(read_weights(tmp_path / "whole", "newest"))
    save(whole, tmp_path / "folder")
    tokens = drawn(1, 9)
    with torch.no_grad():
        close(other(tokens)[0], AsModel(whole.eval())(tokens)[0])
        if change == "adopted":
            official = AutoModelForCausalLM.from_pretrained(tmp_path / "folder").eval()
            assert not isinstance(official, LanguageModel)
            close(official(tokens).logits, whole(tokens).logits)


def test_tasks_ask_it_as_they_ask_a_model_of_hecate():
    model = llama()
    asked = Evaluation.model_validate({"kind": "niah", "forms": [1], "lengths": [512], "samples": 2})
    one, two = (evaluate_tasks(each, byte_tokenizer(), [asked]) for each in (model, AsModel(model)))
    assert one == two


def test_what_it_cannot_do_is_refused():
    with pytest.raises(TypeError, match="a causal model of transformers, got a Linear"):
        AsModel(torch.nn.Linear(2, 2))
    model = bytes_model()
    own, tokens = AsModel(model.eval()), drawn(1, 6)
    starts = torch.tensor([[True, False, False, True, False, False]])
    with pytest.raises(ConfigError, match="reset_mask: the Qwen3_5Text model takes the documents of a row for one"):
        own(tokens, reset_mask=starts)
    adopt(model)
    own = AsModel(model)
    with pytest.raises(ShapeError, match="write_mask must be False in front alone"):
        own(tokens, write_mask=~starts)
    with pytest.raises(ConfigError, match="reset_mask and write_mask"):
        own(tokens, reset_mask=starts, write_mask=torch.ones_like(starts))
    with pytest.raises(ShapeError, match=r"tokens must be in 0..255, the vocabulary, got 1..256"):
        own(torch.tensor([[1, 256]]))
    with torch.no_grad(), pytest.raises(ConfigError, match="several documents cannot fill a cache"):
        own(tokens, own(tokens)[1], reset_mask=starts)


def test_windows_that_carry_their_state_are_refused(tmp_path):
    folder = bytes_folder(tmp_path, texts(40))
    config = tiny(data={"kind": "tokens", "path": str(folder), "state": "carry"}, budget={"seq_len": 16})
    trainer = Trainer(config, model=AsModel(llama()))
    with pytest.raises(ConfigError, match=r"data.state: is 'carry', but the model returns no state"):
        trainer.train_step()


def test_documents_of_a_corpus_are_kept_apart_in_a_step(tmp_path):
    folder = bytes_folder(tmp_path, texts(40))
    config = tiny(data={"kind": "tokens", "path": str(folder)}, budget={"seq_len": 64})
    model = bytes_model()
    adopt(model)
    trainer = Trainer(config, model=AsModel(copy.deepcopy(model)))
    batch = Trainer(config, model=AsModel(copy.deepcopy(model))).loader.next()
    assert batch.resets is not None and bool(batch.resets[:, 1:].any())
    total, count = 0.0, 0
    for row, marks in enumerate(batch.resets):
        borders = [0, *(marks[1:].nonzero().flatten() + 1).tolist(), len(marks)]
        for first, last in pairwise(borders):
            out, targets = model(input_ids=batch.tokens[row : row + 1, first:last]), batch.targets[row, first:last]
            total += float(cross_entropy(out.logits[0].detach(), targets, ignore_index=IGNORED, reduction="sum"))
            count += int((targets != IGNORED).sum())
    assert trainer.train_step().loss == pytest.approx(total / count, rel=ROUNDING)


OTHERS = {  # sizes of a model, whether it mixes documents of a row, whether it minds padding in front
    "OPT": ({**SMALL, "ffn_dim": 24, "word_embed_proj_dim": 16, "num_attention_heads": 2}, True, False),
    "Bloom": ({**SMALL, "n_layer": 2, "n_head": 2}, True, True),  # which takes no positions
    "Mamba": ({**SMALL, "state_size": 4}, True, True),
    "FalconMamba": ({**SMALL, "state_size": 4}, True, True),
    "GPT2": ({"n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 64}, False, False),
    "Mistral": (
        {**SMALL, "intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 1, "sliding_window": 4},
        False, False,
    ),
}  # fmt: skip


@pytest.mark.parametrize("family", OTHERS)
@torch.no_grad()
def test_a_model_that_mixes_documents_or_minds_padding_is_refused(family):
    sizes, mixes, minds = OTHERS[family]
    model = getattr(transformers, f"{family}ForCausalLM", None) or getattr(transformers, f"{family}LMHeadModel")
    model = model(getattr(transformers, f"{family}Config")(**sizes)).eval()
    for p in model.parameters():
        p += 0.3 * torch.randn_like(p)
    own, tokens = AsModel(model), drawn(2, 14)
    starts, there = torch.zeros(2, 14, dtype=torch.bool), torch.arange(14) >= torch.tensor([[0], [4]])
    starts[0, 6] = True
    if mixes:
        with pytest.raises(ConfigError, match="reset_mask: .* takes the documents of a row for one"):
            own(tokens, reset_mask=starts)
    else:
        close(own(tokens, reset_mask=starts)[0][0, 6:], own(tokens[:1, 6:])[0][0])
    if minds:
        with pytest.raises(ConfigError, match="write_mask: .* goes on from padding otherwise"):
            own(tokens, write_mask=there)
    else:
        _, state = own(tokens, write_mask=there)
        close(own(tokens[:, :1], state)[0][1], own(torch.cat([tokens[1:, 4:], tokens[1:, :1]], 1))[0][0, -1:])
    _, state = own(tokens)
    close(own(tokens[:, :1], state)[0], own(torch.cat([tokens, tokens[:, :1]], 1))[0][:, -1:])


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # peft's
def test_lora_is_taken_the_output_layer_is_told_and_an_encoder_is_refused():
    peft = pytest.importorskip("peft")
    tuned = peft.get_peft_model(llama(), peft.LoraConfig(target_modules=["q_proj"], r=2))
    tokens = drawn(1, 5)
    with torch.no_grad():
        assert torch.equal(AsModel(tuned)(tokens)[0], tuned(input_ids=tokens, use_cache=True).logits)
    trainer = Trainer(load_experiment("quickstart", ["optim.optimizer.kind=muon"]), model=AsModel(llama()))
    taken = [name for group in trainer.optimizers["muon"].param_groups for name in group["param_names"]]
    assert taken and not any("head" in name or "embed" in name for name in taken)
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2, "vocab_size": 9}
    with pytest.raises(TypeError, match="a causal model of transformers, got a T5ForConditionalGeneration"):
        AsModel(transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes)))
