"""Train a language model of memories on the bytes of your text, and let it write.

    python train_on_your_text.py book.txt --memory gated_delta --steps 500

Without a file it reads the text that ships with Python. `hecate train` does the same from a config, with checkpoints.
"""

import argparse
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy

from hecate.data import Bundled
from hecate.models import LanguageModel

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("text", nargs="?", type=Path)
parser.add_argument("--memory", default="gated_delta", help="a rule: `hecate list rules` names them all")
parser.add_argument("--steps", type=int, default=500)
parser.add_argument("--lr", type=float, default=4e-3)
given = parser.parse_args()
LENGTH, BATCH = 256, 8

if given.text is None:
    source = Bundled().load()
    train, held_out = (torch.tensor(part, dtype=torch.long) for part in (source.train, source.validation))
else:
    text = torch.frombuffer(bytearray(given.text.read_bytes()), dtype=torch.uint8).long()
    train, held_out = text[: len(text) * 9 // 10], text[len(text) * 9 // 10 :]


def batch(of, generator):
    """Inputs and the bytes that follow them, both [BATCH, LENGTH]."""
    first = torch.randint(len(of) - LENGTH - 1, (BATCH, 1), generator=generator)
    rows = of[first + torch.arange(LENGTH + 1)]
    return rows[:, :-1], rows[:, 1:]


def loss_of(model, of, generator):
    x, y = batch(of, generator)
    logits, _ = model(x)  # the second is the state after the last byte, to go on from
    return cross_entropy(logits.flatten(0, 1), y.flatten())


draws = torch.Generator().manual_seed(0)
model = LanguageModel(
    {"vocab_size": 256, "d_model": 96, "layers": 2, "heads": 3, "memory": given.memory}, generator=draws
)
optimizer = torch.optim.AdamW(model.parameters(), lr=given.lr, betas=(0.9, 0.95), weight_decay=0.1)
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, given.lr, total_steps=given.steps, pct_start=0.1)
for step in range(given.steps):
    loss = loss_of(model, train, draws)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    schedule.step()
    if step % 50 == 0 or step == given.steps - 1:
        print(f"step {step:4}  loss {loss.item():.3f} nats a byte", flush=True)

model.eval()
with torch.no_grad():
    judge = torch.Generator().manual_seed(1)
    print(f"held out: {sum(loss_of(model, held_out, judge).item() for _ in range(8)) / 8:.3f} nats a byte")
    logits, state = model(held_out[None, :64])
    written = []
    for _ in range(200):  # a byte costs the same however long the text
        byte = torch.multinomial((logits[:, -1] / 0.7).softmax(-1), 1, generator=judge)
        written.append(byte.item())
        logits, state = model(byte, state)
print(bytes(held_out[:64].tolist()).decode(errors="replace"), "->", bytes(written).decode(errors="replace"))
