"""Invent a rule: one class with a loss gives gradients, kernels, YAML and checks.

    python write_a_rule.py

The attentional bias log cosh is quadratic for small errors and linear for large ones. Its loss is all we write: hecate
derives the step and its backward pass, proves them on every engine, prints kernels from the formula, and trains it.
"""

import argparse
import time
from typing import Literal

import torch

from hecate import MemoryConfig, memory_scan
from hecate.bias import Bias
from hecate.formula import bias_formula
from hecate.nn import Memory
from hecate.testing import check_rule

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--length", type=int, default=1024, help="tokens of the timing")
given = parser.parse_args()


class LogCosh(Bias):
    """log_cosh: ell = sum of scale log cosh(e / scale), e = pred - v."""

    kind: Literal["log_cosh"] = "log_cosh"
    scale: float = 1.0

    def loss(self, pred, target):
        size = (pred - target).abs() / self.scale
        return self.scale * (size + torch.nn.functional.softplus(-2 * size)).sum(-1)


rule = {"bias": {"kind": "log_cosh", "scale": 0.5}, "retention": "decay", "key_norm": "l2"}
check_rule(MemoryConfig.model_validate(rule))  # values and gradients of every engine against the token loop
print("checked: every engine that takes it agrees with the token loop, gradients too")
print("each number of a row by itself:", bias_formula(LogCosh()).coordinatewise)

shape = (1, given.length, 4, 64)
q, k, v = (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) for seed in range(3))


def seconds(config):
    inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    for _ in range(2):  # the first call compiles
        start = time.perf_counter()
        memory_scan(config, *inputs)[0].square().mean().backward()
    return time.perf_counter() - start


ours, huber = (seconds(MemoryConfig.model_validate({**rule, "bias": bias})) for bias in (rule["bias"], "huber"))
print(f"forward and backward over {given.length} tokens: {ours:.2f} s, huber, which ships with hecate, {huber:.2f} s")

layer = Memory(64, heads=2, config=rule)  # a layer, a level of a CMS, a model: it goes wherever rules go
y, state = layer(torch.randn(2, 32, 64))
print("a layer of it:", list(y.shape), f"with a state of {state.bytes / 1e3:.0f} kB")
