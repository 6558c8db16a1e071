"""A fast-weight programmer learns to recall: read pairs of tokens, then answer each key with its value.

    python fast_weight_recall.py --pairs 16 --phi elu --rule delta

The slow weights (embedding and projections) are trained; the fast ones are written at every token. A delta rule
corrects what a key answers already, a Hebbian sum adds to it: with more pairs than
`--width` (at most 32) the sum falls behind.
"""

import argparse

import torch
from torch import nn

from hecate.nn import Memory

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--pairs", type=int, default=16)
parser.add_argument("--width", type=int, default=32)
parser.add_argument("--phi", default="identity", help="a feature map: `hecate list phi`")
parser.add_argument("--rule", default="delta", help="a rule: `hecate list rules`")
parser.add_argument("--steps", type=int, default=600)
given = parser.parse_args()
VOCABULARY, BATCH = 64, 32


class Programmer(nn.Module):
    """Tokens [B, T] -> logits [B, T, VOCABULARY]: one memory between an embedding and a linear map."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, given.width)
        memory = {"kind": given.rule, "feature_map": given.phi}
        self.memory = Memory(given.width, heads=1, config=memory, generator=torch.Generator().manual_seed(0))
        self.norms = nn.ModuleList(nn.RMSNorm(given.width) for _ in range(2))
        self.head = nn.Linear(given.width, VOCABULARY)

    def forward(self, tokens):
        x = self.embedding(tokens)
        x = x + self.memory(self.norms[0](x))[0]
        return self.head(self.norms[1](x))


def batch(generator):
    """key value key value ... key key ...; targets are -100 but where a key is asked. Keys differ within a row."""
    half, width = VOCABULARY // 2, min(given.pairs, VOCABULARY // 2)
    keys = torch.stack([torch.randperm(half, generator=generator)[:width] for _ in range(BATCH)])
    values = torch.randint(half, VOCABULARY, keys.shape, generator=generator)
    order = torch.stack([torch.randperm(width, generator=generator) for _ in range(BATCH)])
    asked, answers = keys.gather(1, order), values.gather(1, order)
    pairs = torch.stack([keys, values], -1).flatten(1)
    targets = torch.cat([torch.full_like(pairs, -100), answers], 1)
    return torch.cat([pairs, asked], 1), targets


torch.manual_seed(0)
model, draws = Programmer(), torch.Generator().manual_seed(1)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for step in range(given.steps):
    tokens, targets = batch(draws)
    logits = model(tokens)
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 100 == 0 or step == given.steps - 1:
        right = (logits.argmax(-1) == targets)[targets >= 0].float().mean()
        print(f"step {step:4}  loss {loss.item():.3f}  recalled {right:.1%}  chance {2 / VOCABULARY:.1%}", flush=True)
