"""Fine-tune a Qwen3-Next model on a CPU: hecate runs its linear layers, peft adapts it, transformers has it back.

    python adopt_and_lora.py --steps 20        # a tiny model with random weights
    python adopt_and_lora.py --model FOLDER    # yours

Needs the extras `cpu` and `hf`, and `pip install peft`.
"""

import argparse
import time

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, Qwen3NextConfig

import hecate.hf

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", help="a folder of transformers")
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--length", type=int, default=256)
given = parser.parse_args()

torch.manual_seed(0)
if given.model:
    model = AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.float32)
else:
    config = Qwen3NextConfig(
        vocab_size=256, hidden_size=128, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
        intermediate_size=256, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=32,
        linear_value_head_dim=32, num_experts=0, mlp_only_layers=[0, 1, 2, 3],
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)

tokens = torch.randint(model.config.vocab_size, (1, given.length))


def seconds():
    """Of a forward and backward pass; the first call compiles kernels, which are kept on disk."""
    for _ in range(2):
        start = time.perf_counter()
        model(input_ids=tokens, labels=tokens).loss.backward()
        model.zero_grad()
    return time.perf_counter() - start


theirs = before = None
try:
    with torch.no_grad():
        before = model(input_ids=tokens).logits
    theirs = seconds()
except RuntimeError as error:  # with flash-linear-attention installed it asks for a GPU
    print(f"transformers alone does not run here: {error}")
print(hecate.hf.adopt(model))  # which layers, and what was left and why
ours = seconds()
if before is not None:
    with torch.no_grad():
        print(f"logits differ by {(model(input_ids=tokens).logits - before).abs().max():.1e}")
    print(f"forward and backward: {theirs:.2f} s by transformers, {ours:.2f} s adopted")

tuned = get_peft_model(model, LoraConfig(r=8, target_modules=["in_proj_qkvz", "out_proj", "q_proj", "v_proj"]))
tuned.print_trainable_parameters()
optimizer = torch.optim.AdamW([p for p in tuned.parameters() if p.requires_grad], lr=1e-3)
for step in range(given.steps):
    loss = tuned(input_ids=tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 5 == 0 or step == given.steps - 1:
        print(f"step {step:3}  loss {loss.item():.3f}", flush=True)

merged = tuned.merge_and_unload()
print("continues:", merged.generate(tokens[:, :8], max_new_tokens=8, do_sample=False)[0].tolist())
hecate.hf.release(merged)  # the official class again, to be saved and served anywhere
print("released:", type(merged).__name__)
