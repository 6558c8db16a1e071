"""Shapes without values: a scan on the meta device."""

from __future__ import annotations

import pytest
import torch

from hecate import MemoryConfig, memory_scan
from hecate.models import LanguageModel, LanguageModelConfig


@pytest.mark.parametrize("engine", ["auto", "sequential"])
@pytest.mark.parametrize(
    "fields", [{}, {"structure": "mlp"}, {"bias": "dot", "feature_map": "elu", "normalizer": "sum"}], ids=str
)
def test_scan_on_the_meta_device(fields, engine):
    x = torch.empty(2, 5, 3, 4, device="meta")
    y, state = memory_scan(MemoryConfig(**fields), x, x, x, engine=engine)
    assert y.shape == x.shape
    assert y.is_meta
    assert state.position.is_meta


def test_model_on_the_meta_device():
    config = LanguageModelConfig(vocab_size=16, d_model=16, heads=2)
    tokens = torch.zeros(2, 5, dtype=torch.long, device="meta")
    logits, _ = LanguageModel(config, device="meta")(tokens)
    assert logits.shape == (2, 5, 16)
    assert logits.is_meta
