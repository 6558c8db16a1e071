"""Every rule, preset and level writes: when it is fresh, at token 300, and at token 1,024 its answer has a size."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import hecate
from hecate.cms.health import reading_lag, write_strength
from hecate.errors import ConfigError, ShapeError
from hecate.nn import Memory
from hecate.rule.config import RULES, MemoryConfig

PRESETS = Path(hecate.__file__).parent / "presets"
WRITES = 0.03
# Whose writes weigh less by design: the least that they move of an answer or error, and why.
LESS = {
    "linear_attention": (2e-3, "an average of 300 values moves by a 300th"),
    "abc": (2e-3, "a softmax over slots averages what each of them has got"),
    "raven": (2e-4, "a token is written to 32 slots, whose softmax over raw scores is nearly even"),
    "mesa": (0.02, "the gain of least squares falls as 1/t"),
    "gated_kalmanet": (0.02, "the gain of least squares"),
    "large_chunk_ttt": (0.02, "one step of one length for the 32 tokens of a chunk"),
}
# Tokens of a long period, as many of which a step sums up and is normalised by.
LONG = {
    "hope_170m.512": (6e-3, "one of 512 tokens"),
    "hope_170m.2K": (1e-3, "one of 2,048"),
    "lact_760m": (5e-4, "one step of one length for 2,048 tokens"),
}
# Sizes of answers at token 1,024, where they are no .05 to 5 times those of values, and why.
SIZES = {
    "hebbian": (0.05, 2000.0, "a sum of all tokens, of keys and queries of their own lengths"),
    "mamba3": (0.05, 60.0, "a sum that hardly forgets"),
    "retnet": (0.05, 30.0, "a sum over hundreds of tokens, of keys and queries of their own lengths"),
    "rwkv7": (0.05, 30.0, "keys are as long as they are, and are taken for what a layer norm undoes"),
    "linear_attention": (0.02, 5.0, "the average of a thousand random values is a thirtieth as long as they are"),
    "abc": (0.02, 5.0, "averages, as in linear attention"),
    "raven": (0.02, 5.0, "averages of what 32 slots have got"),
    "lact_760m": (0.02, 5.0, "one step of one length for 2,048 tokens"),
}


def levels(found: Any, path: str) -> Iterator[tuple[str, Any, int]]:
    """The memories of a preset, and their periods."""
    if isinstance(found, list):
        for item in found:
            yield from levels(item, f"{path}.{item['name']}" if isinstance(item, dict) and "name" in item else path)
    if not isinstance(found, dict):
        return
    for key, value in found.items():
        if key == "memory" and isinstance(value, dict | str):
            yield path, value, found.get("period", 1)
        else:
            yield from levels(value, f"{path}.{key}" if key in ("self_reference",) else path)


def presets() -> dict[str, tuple[Any, int]]:
    found = {}
    for path in sorted(PRESETS.rglob("*.yaml")):
        for name, memory, period in levels(yaml.safe_load(path.read_text()), path.stem):
            found[name] = (memory, period)
    return found


def measured(config: Any, places: tuple[int, ...], length: int, width: int = 96) -> tuple[Any, float]:
    """Strength at places, and |y| / |v| at the end of random tokens, of a fresh layer."""
    torch.manual_seed(0)
    layer = Memory(width, heads=3, config=config)
    with torch.no_grad():
        asked = layer.asked(torch.randn(1, length, width))[0]
        if asked.config.writes > 1:
            asked, places = asked.each_write(), tuple(asked.config.writes * (t + 1) - 1 for t in places)
        lag = reading_lag(asked)
        closing = [t // lag * lag + lag - 1 if lag > 1 else t for t in places]
        y = asked.scan()[0]
        last = asked.v[:, -1].norm(dim=-1).mean()
        return write_strength(asked, closing), float(y[:, -1].norm(dim=-1).mean() / last)


def test_presets_are_found():
    found = presets()
    assert {"hope.fast", "hope.slow", "cms.deep", "titans_170m", "tnt.global"} <= set(found)


# By day over as many tokens as the last place takes to be told; with `-m slow` over those of the statement.
every_length = pytest.mark.parametrize("length", [440, pytest.param(1024, marks=pytest.mark.slow)])


@pytest.mark.spec("NN-WRITE-I1")
@every_length
@pytest.mark.parametrize("name", sorted(set(RULES) - {"in_place_ttt"}))  # whose targets are 0 where it is fresh
def test_rules_write(name: str, length: int):
    found, size = measured(name, (8, 300), length)
    best = torch.stack([found.share, found.share_later, found.pull, found.pull_later]).amax(0)
    assert (best >= LESS.get(name, (WRITES,))[0]).all(), f"{name}: {found}"
    least, most, *_ = SIZES.get(name, (0.05, 5.0))
    assert least <= size <= most


@pytest.mark.spec("NN-WRITE-I1")
@every_length
@pytest.mark.parametrize("name", {repr(own): name for name, own in presets().items()}.values())  # each memory once
def test_presets_and_levels_write(name: str, length: int):
    memory, period = presets()[name]
    config = MemoryConfig.model_validate(memory)
    if period > 1:
        config = config.model_copy(update={"chunk": period, "commit": "chunk"})
    period = config.chunk if config.commit == "chunk" else 1
    if period > 2048:
        pytest.skip("two periods of that length take a minute; 2,048 stands for them")
    length, width = max(length, 2 * period + 40), 96 if config.structure.linear else 48
    found, size = measured(config, (8, 300) if period < 512 else (8,), length, width)
    best = torch.stack([found.share, found.share_later, found.pull, found.pull_later]).amax(0)
    assert (best >= LONG.get(name, (WRITES,))[0]).all(), f"{name}: {found}"
    least, most, *_ = SIZES.get(name, (0.05, 5.0))
    assert least <= size <= most


@pytest.mark.spec("NN-WRITE-D1")
def test_a_token_that_closes_a_chunk_weighs_as_any_other():
    """The first chunk of a delta memory moves its answers by lr v for every key of unit length, and at its end nothing
    else has happened."""
    fields = {"chunk": 4, "commit": "chunk", "read": "before", "algorithm": {"kind": "gd", "lr": 0.5}}
    asked = Memory(8, heads=2, config=MemoryConfig(**fields)).asked(torch.randn(3, 60, 8))[0]
    found = write_strength(asked, [3])
    assert found.pull == pytest.approx([0.25], abs=1e-5)


@pytest.mark.spec("NN-WRITE-D1")
def test_strength_is_that_of_the_formula():
    """A delta rule of lr 1/2 and unit keys takes half of every error, and pulls by half of what v is new."""
    source = torch.Generator().manual_seed(0)
    layer = Memory(8, heads=2, config=MemoryConfig(algorithm={"kind": "gd", "lr": 1.0}))
    asked = layer.asked(torch.randn(3, 60, 8, generator=source))[0]
    found = write_strength(asked, [5, 20])
    assert found.share == pytest.approx([0.5, 0.5], abs=1e-5)
    assert found.tokens.tolist() == [5, 20]
    with pytest.raises(ShapeError, match="below 28"):
        write_strength(asked, [28])
    assert write_strength(asked.between(0, 30, None)) is None


def test_several_writes_of_a_token_are_to_be_told_apart():
    asked = Memory(8, 2, "delta_product").asked(torch.randn(1, 70, 8))[0]
    with pytest.raises(ConfigError, match=r"one write per token, got writes=2; pass asked.each_write"):
        write_strength(asked)


def test_a_memory_that_is_printed_dead_is_dead():
    """Titans as printed, after its weights have gone to zero."""
    printed = {
        "kind": "titans", "step": "raw", "layer_v_norm": "none", "retention": {"kind": "decay", "towards": "zero"},
        "structure": {"kind": "mlp", "activation": "silu"}, "algorithm": {"kind": "momentum", "lr": 0.01},
    }  # fmt: skip
    found, size = measured(printed, (300,), 600)
    assert found.largest < 1e-3
    assert size < 1e-2
