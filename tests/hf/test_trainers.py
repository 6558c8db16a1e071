"""Tools that train and judge models of transformers do so with ours. Minutes in all: `-m slow`."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from hecate.hf import HecateForCausalLM, byte_tokenizer
from tests.hf.common import made, plain, tokens

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]  # their warnings are not ours
WORDS = ["the slow memory keeps", "what the fast one has", "forgotten at a border"]


@pytest.fixture(autouse=True)
def single():
    torch.set_default_dtype(torch.float32)


def sentences(count=24):
    """The same few sentences of bytes, over and over."""
    return [{"input_ids": list(WORDS[n % 3].encode())} for n in range(count)]


def collated(rows):
    """Padded behind, as Trainer's own collators do."""
    longest = max(len(row["input_ids"]) for row in rows)
    ids = torch.tensor([row["input_ids"] + [0] * (longest - len(row["input_ids"])) for row in rows])
    mask = torch.tensor([[1] * len(r["input_ids"]) + [0] * (longest - len(r["input_ids"])) for r in rows])
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def arguments(folder, kind: Any = None, **fields: Any):
    from transformers import TrainingArguments

    how = {"output_dir": str(folder), "use_cpu": True, "report_to": [], "disable_tqdm": True, "save_strategy": "no",
           "learning_rate": 1e-2, "lr_scheduler_type": "constant", "logging_steps": 1,
           "per_device_train_batch_size": 4, "max_steps": 12}  # fmt: skip
    return (kind or TrainingArguments)(**{**how, **fields})


def losses(trainer):
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


@pytest.mark.parametrize("rule", ["decay", "levels"])
@pytest.mark.spec("HF-TRAIN-D1")
def test_trainer_trains_judges_and_resumes(rule, tmp_path):
    from transformers import Trainer

    def trainer(**fields):
        how = arguments(tmp_path, save_strategy="steps", save_steps=6, gradient_checkpointing=True, **fields)
        return Trainer(made(rule, vocab_size=256), how, collated, sentences(), sentences(6))

    whole = trainer()
    whole.train()
    seen = losses(whole)
    assert seen[-1] < 0.7 * seen[0] and abs(seen[0] - math.log(256)) < 1.5
    judged = whole.evaluate()
    assert math.isfinite(judged["eval_loss"]) and whole.predict(sentences(3)).predictions.shape[-1] == 256
    expected = {name: p.clone() for name, p in whole.model.state_dict().items()}
    resumed = trainer()
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-6"))
    assert resumed.state.global_step == 12
    for name, value in resumed.model.state_dict().items():
        assert torch.equal(value, expected[name]), name
    again = HecateForCausalLM.from_pretrained(tmp_path / "checkpoint-12")
    assert all(torch.equal(v, expected[k]) for k, v in again.state_dict().items())


@pytest.mark.parametrize("rule", ["decay", "mlp"])
@pytest.mark.spec("HF-TRAIN-D1")
def test_trainer_in_bfloat16_goes_the_way_of_float32(rule, tmp_path):
    """Weights and states stay float32; 3 % are some four times the rounding of bfloat16, 2^-8, over a few products."""
    from transformers import Trainer

    seen = {}
    for low in (False, True):
        trainer = Trainer(made(rule, vocab_size=256), arguments(tmp_path, bf16=low, max_steps=4), collated, sentences())
        trainer.train()
        assert {p.dtype for p in trainer.model.parameters()} == {torch.float32}
        seen[low] = losses(trainer)
    assert seen[True] != seen[False] and seen[True] == pytest.approx(seen[False], rel=0.03)


@pytest.mark.spec("HF-TRAIN-D1", "HF-PACK-D1")
def test_a_collator_that_flattens_gives_the_loss_of_rows():
    from transformers import DataCollatorWithFlattening

    model, rows = made("levels", vocab_size=256), sentences(3)
    flat = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)(rows)
    apart, packed = model(**collated(rows)).loss, model(**flat).loss
    assert torch.allclose(apart, packed, rtol=1e-5)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.spec("HF-TRAIN-D1", "HF-LM-D1")
def test_trl_fine_tunes_packed_and_padded_rows(tied, tmp_path):
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    tokenizer = byte_tokenizer()
    tokenizer.eos_token = tokenizer.pad_token
    data = datasets.Dataset.from_list([{"text": WORDS[n % 3]} for n in range(24)])
    for packing in (False, True):
        how = arguments(tmp_path, trl.SFTConfig, packing=packing, max_length=64, bf16=False)
        trainer = trl.SFTTrainer(
            made("decay", vocab_size=256, tie_embeddings=tied), args=how, train_dataset=data, processing_class=tokenizer
        )
        trainer.train()
        assert losses(trainer)[-1] < 0.7 * losses(trainer)[0]


@pytest.mark.spec("HF-GEN-D1")
def test_the_harness_scores_texts_as_hecate_does():
    pytest.importorskip("lm_eval")
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    model, tokenizer = made("levels", vocab_size=256), byte_tokenizer()
    tokenizer.eos_token = tokenizer.pad_token  # the harness asks for one
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        judge = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=2, max_length=64)
    pairs = [("the slow", " memory"), ("a", " border that is long"), ("what", "!")]
    asked = [Instance("loglikelihood", {}, pair, n) for n, pair in enumerate(pairs)]
    own = plain(model)
    for (ahead, after), (score, _) in zip(pairs, judge.loglikelihood(asked, disable_tqdm=True), strict=True):
        ids = torch.tensor([list((ahead + after).encode())])
        with torch.no_grad():
            chances = own(ids)[0][0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        assert score == pytest.approx(float(chances[-len(after.encode()) :].sum()), rel=1e-4)
    how = {"until": ["\n"], "max_gen_toks": 5, "do_sample": False}
    texts = [Instance("generate_until", {}, (ahead, how), n) for n, (ahead, _) in enumerate(pairs)]
    for (ahead, _), found in zip(pairs, judge.generate_until(texts, disable_tqdm=True), strict=True):
        ids = torch.tensor([list(ahead.encode())])
        drawn = model.generate(ids, max_new_tokens=5, do_sample=False, pad_token_id=0, attention_mask=ids * 0 + 1)
        assert found == tokenizer.decode(drawn[0, ids.shape[1] :]).split("\n")[0]


SHARDED = """
import sys, torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.utils.fsdp_utils import fsdp2_prepare_model
from tests.hf.common import made, tokens

torch.set_num_threads(1)
accelerator, found = Accelerator(cpu=True), {}
# What `prepare` does with this plugin on GPUs; on a CPU it does not ask for one.
accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(
    fsdp_version=2, auto_wrap_policy="transformer_based_wrap", cpu_ram_efficient_loading=False
)
for tied in (True, False):
    model = fsdp2_prepare_model(accelerator, made("levels", tie_embeddings=tied).train())
    assert all(type(p).__name__ == "DTensor" for p in model.parameters())
    assert type(model.model.lm.blocks[0]).__name__ == "FSDPHecateBlock"
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    rows, seen = tokens(4, 9)[accelerator.process_index::2], []
    for _ in range(5):
        loss = model(rows, labels=rows).loss
        loss.backward()
        optimiser.step()
        optimiser.zero_grad()
        seen.append(accelerator.gather(loss.detach()[None]).mean().item())
    state = {name: value.full_tensor() for name, value in model.state_dict().items()}
    found[str(tied)] = {"losses": torch.tensor(seen), **state}
if accelerator.is_main_process:
    torch.save(found, sys.argv[1])
accelerator.end_training()
"""


@pytest.mark.spec("HF-TRAIN-D1")
def test_two_processes_share_the_parameters_by_accelerate(tmp_path):
    pytest.importorskip("accelerate")
    script = tmp_path / "sharded.py"
    script.write_text(SHARDED)
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    environment |= {"ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", script, tmp_path / "out"],
        env=environment, capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found = torch.load(tmp_path / "out", weights_only=True)
    for tied in (True, False):
        model, ids = made("levels", tie_embeddings=tied).train(), tokens(4, 9)
        optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
        expected = []
        for _ in range(5):
            loss = model(ids, labels=ids).loss
            loss.backward()
            optimiser.step()
            optimiser.zero_grad()
            expected.append(loss.item())
        seen = found[str(tied)]
        assert seen["losses"].tolist() == pytest.approx(expected, rel=1e-4) and expected[-1] < expected[0]
        for name, value in model.state_dict().items():
            assert torch.allclose(seen[name], value, atol=1e-4), name
