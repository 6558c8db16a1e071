"""Momentum as a memory of gradients, through a feature map: what tanh does where gradients have heavy tails.

    python phi_momentum.py --freedom 1.5

A linear regression whose gradients carry Student noise. With `input_scale="rms"` gradients of usual size meet the
straight part of tanh and outliers its bounds, which is clipping entry by entry; without it small gradients all meet
the straight part, and tanh is the identity.
"""

import argparse

import torch

from hecate.optim import PhiMomentum

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--freedom", type=float, default=1.5, help="degrees of freedom; 30 is nearly Gaussian")
parser.add_argument("--steps", type=int, default=2000)
given = parser.parse_args()
WIDTH, RATES = 50, (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1)

OPTIMISERS = {
    "SGD with momentum": lambda p, lr: torch.optim.SGD(p, lr, momentum=0.9),
    "clipped SGD": lambda p, lr: torch.optim.SGD(p, lr, momentum=0.9),
    "AdamW": lambda p, lr: torch.optim.AdamW(p, lr, betas=(0.9, 0.95), weight_decay=0.0),
    "phi-momentum, identity": lambda p, lr: PhiMomentum(p, lr, momentum=0.9, input_scale="rms"),
    "phi-momentum, tanh": lambda p, lr: PhiMomentum(p, lr, momentum=0.9, feature_map="tanh", input_scale="rms"),
}


def distance(name, lr, seed):
    """|w - w*|^2 / |w*|^2 after all steps, from w = 0; the rate falls to 0 by a cosine."""
    draws = torch.Generator().manual_seed(seed)
    target = torch.randn(WIDTH, generator=draws)
    noise = torch.distributions.StudentT(given.freedom)
    w = torch.nn.Parameter(torch.zeros(WIDTH))
    optimizer = OPTIMISERS[name]([w], lr)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, given.steps)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        outliers = noise.sample((given.steps, WIDTH))
    for step in range(given.steps):
        x = torch.randn(16, WIDTH, generator=draws)
        w.grad = (x.T @ (x @ (w - target).detach())) / 16 + outliers[step]
        if name == "clipped SGD":
            torch.nn.utils.clip_grad_norm_([w], 1.0)
        optimizer.step()
        schedule.step()
    return ((w - target).square().sum() / target.square().sum()).item()


print(f"Student noise of {given.freedom:g} degrees of freedom; the rate of each chosen on another seed")
for name in OPTIMISERS:
    best = min(RATES, key=lambda lr: distance(name, lr, 100))
    found = torch.tensor([distance(name, best, seed) for seed in range(5)])
    print(f"{name:24} rate {best:g}  distance {found.mean():.4f} +- {found.std():.4f}", flush=True)
