"""Tiny models of every kind of state."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor, nn

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before transformers: nothing here asks a hub
pytest.importorskip("transformers", minversion="5")

from hecate.hf import HecateConfig, HecateForCausalLM
from hecate.models import LanguageModel
from tests.serve.common import LEVELS

RULES: dict[str, dict[str, Any]] = {
    "decay": {"memory": {"retention": "decay"}, "tie_embeddings": False},
    "momentum": {"memory": {"retention": "decay", "algorithm": "momentum", "feature_map": "elu", "key_norm": "l2"}},
    "levels": {"levels": LEVELS},
    "mag": {"attention": {"kind": "mag"}},
    "mlp": {"memory": {"structure": "mlp", "chunk": 4, "algorithm": {"kind": "gd", "lr": 0.02}}},
}
KINDS = RULES | {"mac": {"attention": {"kind": "mac", "segment": 4}}}  # whose bits depend on how gradients are taken
VOCABULARY = 17
# By default what streams and what has levels; the rest goes the same ways.
SOME = [rule if rule in ("decay", "levels") else pytest.param(rule, marks=pytest.mark.slow) for rule in RULES]


def made(rule: str = "decay", **fields: Any) -> HecateForCausalLM:
    """An evaluated model of two layers, the same at every call, whose answers differ from token to token."""
    sizes = {"vocab_size": VOCABULARY, "d_model": 16, "layers": 2, "heads": 2}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return HecateForCausalLM(HecateConfig(model={**sizes, **KINDS[rule], **fields})).eval()


def moved(model: nn.Module) -> Any:
    """The same model with its tensors anew in memory: those of a file lie where the file has them, and a processor may
    sum a product in another order at another address."""
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data = tensor.data.clone()
    return model


def plain(model: HecateForCausalLM) -> LanguageModel:
    """The model that hecate has of it, apart from transformers."""
    own = LanguageModel(model.config.language_model)
    own.load_state_dict(model.model.lm.state_dict())
    return own.eval()


def tokens(rows: int, length: int, seed: int = 0) -> Tensor:
    return torch.randint(1, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(seed))


def same_bits(one: nn.Module, two: nn.Module) -> bool:
    a, b = one.state_dict(), two.state_dict()
    return a.keys() == b.keys() and all(a[k].dtype == b[k].dtype and torch.equal(a[k], b[k]) for k in a)
