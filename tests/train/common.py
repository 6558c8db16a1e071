"""Tiny experiments, and a recurrent net with the call of a language model."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest
import torch
from torch import nn

from hecate.train import ExperimentConfig, run_experiment
from hecate.train.display import Display

TINY_MODEL = {"d_model": 8, "layers": 1, "heads": 2, "mlp_ratio": 1.0, "conv_kernel": 2}
TASK = {"kind": "mqar", "vocab_size": 16, "num_pairs": 2, "seq_len": 8}


def tiny(**fields) -> ExperimentConfig:
    """A few milliseconds per step; `budget` and other mappings are merged into the defaults."""
    budget = {"steps": 20, "batch_size": 4, "eval_every": 10, "eval_batches": 2} | {"checkpoint_every": 10}
    return ExperimentConfig.model_validate(
        {
            "name": "tiny",
            "model": TINY_MODEL | fields.pop("model", {}),
            "data": fields.pop("data", TASK),
            "budget": budget | fields.pop("budget", {}),
            "optim": {"warmup": 3} | fields.pop("optim", {}),
            **fields,
        }
    )


def quiet_run(config, folder, **how):
    """`run_experiment` without a word and without figures, which take a second to draw."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "matplotlib.figure", None)
        return run_experiment(config, folder, display=Display(quiet=True), **how)


def text_run(home, **fields):
    """The folder of a run on a text of its own, both in `home`."""
    (home / "text.txt").write_text("".join(f"line {n} of {n * n % 97}\n" for n in range(900)))
    data = {"kind": "text", "paths": [str(home / "text.txt")]}
    return quiet_run(tiny(data=data, **fields), home / "run").folder


class TiedGRU(nn.Module):
    """Embedding, GRU and a head that shares the embedding's weight; dropout draws globally."""

    def __init__(self, vocab: int = 16, width: int = 8, seed: int = 0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, width)
        self.rnn = nn.GRU(width, width, batch_first=True)
        self.drop = nn.Dropout(0.2)
        self.head = nn.Linear(width, vocab, bias=False)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.normal_(0, 0.3, generator=generator)
        self.head.weight = self.embedding.weight

    def forward(self, tokens, state=None):
        if self.training:
            self.seen += tokens.shape[0]
        x, state = self.rnn(self.drop(self.embedding(tokens)), state)
        return self.head(x), state


def end_as_killed() -> None:
    raise KeyboardInterrupt


class Interrupted(TiedGRU):
    """Calls something in the middle of one step of training."""

    def __init__(self, at: int, act: Callable[[], object] = end_as_killed) -> None:
        super().__init__()
        self.at, self.act, self.calls = at, act, 0

    def forward(self, tokens, state=None):
        self.calls += self.training
        if self.training and self.calls == self.at:
            self.act()
        return super().forward(tokens, state)


def same_bits(one, two) -> bool:
    return set(one) == set(two) and all(
        a.dtype == b.dtype and torch.equal(a, b) for a, b in ((one[k], two[k]) for k in one)
    )
