"""Tiny models of every kind of state."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor, nn

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before transformers: nothing here asks a hub
pytest.importorskip("transformers", minversion="5")

from transformers import DynamicCache, StaticCache

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


def stirred(model: Any, size: float = 1.0, names: Any = None) -> Any:
    """The model with these parameters off their start, or with what grafts have put in: memories at work."""
    source = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if ".hecate." in name if names is None else name in names:
                p += size * p.shape[-1] ** -0.5 * torch.randn(p.shape, generator=source, dtype=p.dtype)
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


IDS = torch.randint(1, 61, (2, 40), generator=torch.Generator().manual_seed(0))


def off(ours: Tensor, theirs: Tensor) -> float:
    """The relative difference."""
    return ((ours.double() - theirs.double()).norm() / theirs.double().norm()).item()


def logits(model: Any, ids: Tensor = IDS, **given: Any) -> Tensor:
    with torch.no_grad():
        return model(input_ids=ids, use_cache=False, **given).logits


def in_pieces(model: Any, ids: Tensor, *sizes: int, cache: Any = None) -> Tensor:
    name = "cache_params" if "mamba2" in type(model).__module__ else "past_key_values"
    held = {name: DynamicCache(config=model.config.get_text_config()) if cache is None else cache}
    with torch.no_grad():
        return torch.cat([model(input_ids=part, **held).logits for part in ids.split(sizes, 1)], 1)


def tuned(model: Any, steps: int, ids: Tensor = IDS) -> list[float]:
    """Losses of some steps of what learns."""
    optimizer, losses = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-2), []
    for _ in range(steps):
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def goes_on(model: Any, within: float = 3e-6, *, static: bool = False, documents: bool = True) -> None:
    """Checks that answers are the same from caches, behind padding, in beams, and of documents in one row."""
    whole, mask = logits(model), torch.ones_like(IDS)
    caches = [DynamicCache(config=model.config)]
    caches += [DynamicCache(), StaticCache(config=model.config, max_cache_len=64)] if static else []
    for cache in caches:
        assert off(in_pieces(model, IDS, 20, 1, 2, 17, cache=cache), whole) < within
    mask[0, :11] = 0
    short, how = IDS[:, :20], {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    how["attention_mask"] = mask[:, :20]
    padded = logits(model, IDS, attention_mask=mask)  # where the mask is 0 a token is padding, whatever it is
    assert off(padded[0, 11:], logits(model, IDS[:1, 11:])[0]) < within and off(padded[1], whole[1]) < within
    for more in ({}, {"num_beams": 3, "num_return_sequences": 2}):
        assert torch.equal(model.generate(short, **how, **more), model.generate(short, use_cache=False, **how, **more))
    if static:
        found = model.generate(short, cache_implementation="static", **how)
        assert torch.equal(found, model.generate(short, use_cache=False, **how))
    if documents:
        alone = torch.cat([logits(model, part) for part in IDS[:1].split((13, 1, 2, 24), 1)], 1)
        positions = torch.cat([torch.arange(size) for size in (13, 1, 2, 24)]).unsqueeze(0)
        borders = torch.tensor([0, 13, 14, 16, 40], dtype=torch.int32)
        assert off(logits(model, IDS[:1], position_ids=positions), alone) < within
        assert off(logits(model, IDS[:1], position_ids=positions, cu_seq_lens_q=borders), alone) < within


@torch.no_grad()
def takes_back(model: Any, within: float = 3e-6) -> Any:
    """Checks that drafts are taken back, and that rows of a cache are sorted, chosen and repeated; a cache that has
    recorded."""

    def read(cache: Any, some: Tensor) -> Tensor:
        return model(input_ids=some, past_key_values=cache).logits

    whole, cache = logits(model), DynamicCache(config=model.config)
    read(cache, IDS[:, :20])
    cache.activate_past_recording()
    assert cache.is_croppable
    read(cache, IDS.flip(1)[:, :5])
    cache.crop(-5)
    assert off(read(cache, IDS[:, 20:28]), whole[:, 20:28]) < within
    read(cache, IDS.flip(1)[:, :1])
    cache.crop(-4)  # of the tokens ahead of the draft, too
    assert off(read(cache, IDS[:, 25:]), whole[:, 25:]) < within
    other = DynamicCache(config=model.config)
    read(other, IDS[:, :20])
    other.reorder_cache(torch.tensor([1, 0]))
    assert off(read(other, IDS.flip(0)[:, 20:25]), whole.flip(0)[:, 20:25]) < within
    other.batch_repeat_interleave(2)
    other.batch_select_indices(torch.tensor([1, 2]))  # of rows 1, 1, 0 and 0
    assert off(read(other, IDS.flip(0)[:, 25:]), whole.flip(0)[:, 25:]) < within
    return cache
