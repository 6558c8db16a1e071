"""The engine of our own kernels on machines without a card: what it refuses, and its kernels in the interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from itertools import product
from pathlib import Path

import pytest
import torch

from hecate import Gates, MemoryConfig, memory_scan
from hecate.engine import Engine, Plan, choose
from hecate.engine.call import Call
from hecate.engine.triton import engine, table
from hecate.errors import ConfigError, install_line

ROOT = Path(__file__).parents[2]
TRITON = Engine.registry["triton"]
WITH = pytest.mark.skipif(find_spec("triton") is None, reason=f"needs triton: {install_line('gpu')}")


@WITH
@pytest.mark.spec("ENG-TRITON-D1", "ENG-TRITON-D2", "ENG-TRITON-D5", "ENG-TRITON-D6", "ENG-TRITON-D9", "ENG-TRITON-I1")
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("marked", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
def test_kernels_in_the_interpreter(marked: str) -> None:
    """Has to be asked for before Triton is loaded: a process of its own."""
    asked = [sys.executable, "-m", "pytest", "tests/interpreted", "-x", "-m", marked, "-p", "no:cacheprovider"]
    own = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    own.pop("PYTEST_XDIST_WORKER", None)
    done = subprocess.run(asked, env=own, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout and "skipped" not in done.stdout


@pytest.mark.spec("ENG-TRITON-I2")
@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"chunk": 4}, "chunk=4"),
        ({"structure": "mlp"}, "structure 'mlp' has no kernel"),
        ({"algorithm": "rls"}, "algorithm 'rls' carries a matrix of keys"),
        ({"retention": "elastic_net", "algorithm": "adaptive"}, "algorithm 'adaptive' has several slots"),
        ({"state_dtype": "float64"}, "float32 state"),
    ],
)
def test_what_has_no_kernel_is_refused_where_a_layer_is_built(fields: dict[str, object], word: str) -> None:
    config = MemoryConfig.model_validate(fields)
    assert word in (TRITON.excludes(config) or "")
    q = torch.ones(1, 2, 1, 4)
    with pytest.raises(ConfigError, match="engine='triton' cannot run this memory exactly"):
        memory_scan(config, q, q, q, engine="triton")


@pytest.mark.spec("ENG-TRITON-I2")
def test_a_call_on_a_cpu_is_left_to_others() -> None:
    q = torch.ones(1, 2, 1, 4, dtype=torch.float32)
    assert choose(Plan.sketch(MemoryConfig(), length=1024)).name != "triton"
    with pytest.raises(ConfigError, match="run on a GPU, the tensors are on cpu"):
        memory_scan(MemoryConfig(), q, q, q, engine="triton")
    wide = torch.ones(1, 2, 1, 300, dtype=torch.float32)
    with pytest.raises(ConfigError, match="256 x 256, not 300 x 300"):
        memory_scan(MemoryConfig(), wide, wide, wide, engine="triton")
    with pytest.raises(ConfigError, match="16384 numbers in a loop, not 200 x 200"):
        memory_scan(MemoryConfig(retention="sphere"), *[wide[..., :200]] * 3, engine="triton")


@pytest.mark.spec("ENG-TRITON-I1")
@pytest.mark.parametrize(
    ("fields", "given", "flags"),
    [
        ({}, {}, ()),
        ({"on_nonfinite": "skip"}, {}, ("write",)),
        ({}, {"gates": Gates(erase=torch.ones(1, 2, 1, 4))}, ("phi_w",)),
        ({}, {"gates": Gates(write=torch.ones(1, 2, 1, 4))}, ("phi_w",)),
        ({}, {"reset_mask": torch.ones(1, 2, dtype=torch.bool)}, ("reset",)),
        ({"key_norm": "l2"}, {"dtype": torch.bfloat16}, ("narrow",)),
        ({"feature_map": "elu", "key_norm": "sum"}, {"dtype": torch.bfloat16}, ("narrow",)),
        ({"feature_map": "tanh", "key_norm": "l2"}, {"dtype": torch.bfloat16}, ("l2",)),
        ({"feature_map": "elu", "normalizer": "sum", "bias": "dot"}, {"dtype": torch.bfloat16}, ()),
        ({}, {"cu_seqlens": torch.tensor([0, 1, 2])}, ("reset", "packed")),
        ({"retention": "elastic_net"}, {}, ("loop",)),
        ({"retention": "decay"}, {"gates": Gates(retain=torch.ones(1, 2, 1, 4))}, ("channels",)),
        (
            {"retention": "decay", "algorithm": "momentum"},
            {"gates": Gates(retain=torch.ones(1, 2, 1, 4))},
            ("channels", "loop"),
        ),
        ({"retention": "decay"}, {"gates": Gates(retain_value=torch.ones(1, 2, 1, 4))}, ("retain_value", "loop")),
    ],
)
def test_the_kernel_that_is_tried_is_the_one_that_runs(fields, given, flags, monkeypatch) -> None:
    asked = []
    monkeypatch.setattr(engine, "interpreting", lambda: False)
    monkeypatch.setattr(engine, "find_spec", lambda name: name)
    monkeypatch.setattr(engine, "verdict", lambda *about: asked.append(about) or "it is not trusted")
    unfit = type(TRITON).unfit
    monkeypatch.setattr(type(TRITON), "unfit", lambda self, call: setattr(call, "device", "cuda") or unfit(self, call))
    given = dict(given)
    q = torch.ones(1, 2, 1, 4, dtype=given.pop("dtype", torch.float32))
    config = MemoryConfig(**fields)
    with pytest.raises(ConfigError, match="it is not trusted"):
        memory_scan(config, q, q, q, **given, engine="triton")
    assert [about[1] for about in asked] == [flags]
    made = config.model_dump() if "l2" not in flags and config.normalizer == "none" else MemoryConfig().model_dump()
    assert all(asked[0][0].model_dump()[name] == made[name] for name in ("feature_map", "key_norm"))


@pytest.mark.spec("ENG-TRITON-D3")
def test_many_short_documents_are_walked_through(monkeypatch) -> None:
    """Each has room for its states; in the loop for those of a segment."""
    asked = []
    monkeypatch.setattr(type(TRITON), "unfit", lambda self, call: asked.append(engine._borders(call)) or "enough")
    for retention, borders, known in (
        ("none", range(0, 200, 10), False), ("none", range(0, 2560, 128), True), ("none", [0, 3, 6, 9], True),
        ("sphere", range(0, 2560, 128), False), ("sphere", [0, 3, 6, 9], True),
    ):  # fmt: skip
        q = torch.ones(1, borders[-1], 1, 4, dtype=torch.float32)
        with pytest.raises(ConfigError, match="enough"):
            given = {"cu_seqlens": torch.tensor([*borders])}
            memory_scan(MemoryConfig(retention=retention), q, q, q, **given, engine="triton")
        assert (asked[-1] is not None) == known


@pytest.mark.spec("ENG-TRITON-D4", "ENG-TRITON-D10")
def test_every_card_and_width_has_launches() -> None:
    for card, width, momentum in product((75, 80, 89, 90, 100), (1, 64, 65, 128, 129, 256), (False, True)):
        for exact, linear in (("bf16", True), ("bf16", False), ("tf32x3", True)):
            chunks = table.chunks_of(width, exact, linear=linear)
            assert chunks.narrow == (exact == "bf16" and linear and width <= 128)
            assert chunks.segment % chunks.size == 0 and (chunks.size == chunks.segment) == chunks.narrow
            least = table.least_of(card, exact)
            assert least == (64 if exact == "bf16" and card >= 90 else 16)
            sizes = {"momentum": momentum, "narrow": chunks.narrow, "whole": not linear, "least": least}
            walks = table.walked(card, 200, width, **sizes)
            assert not walks.apart or chunks.narrow
            small = table.walked(card, 20, width, **sizes)
            assert small.rows.tile >= least and (not chunks.narrow or small.walk.tile >= least)
            assert (walks.walk.tile == 256) == (not linear)


def test_the_loop_costs_more_than_blocks() -> None:
    blocks, loop = (
        TRITON.cost(Plan.sketch(MemoryConfig(retention=name), length=512, device="cuda"))
        for name in ("decay", "sphere")
    )
    assert blocks < loop < Engine.registry["sequential"].cost(Plan.sketch(MemoryConfig(), length=512))


@pytest.mark.spec("ENG-TRITON-D11")
def test_rows_are_parted_where_memories_are_few_and_parts_are_trusted(monkeypatch) -> None:
    said: list[str | None] = [None]
    monkeypatch.setattr(engine, "interpreting", lambda: False)
    monkeypatch.setattr(engine, "_trusted", lambda plan, loops, *, parted: said[0] if parted else "asked of whole rows")

    def part(length: int, batch: int = 1, heads: int = 4, **fields) -> int:
        tokens = torch.empty(batch, length, heads, 64, dtype=torch.bfloat16)
        return engine._part(Call.of(MemoryConfig(retention="decay", **fields), tokens, tokens, tokens))

    assert part(8192) == part(8192, algorithm="momentum") == 1024 and part(1 << 15, heads=8) == 2048
    assert {part(8191), part(8192, batch=0), part(8192, heads=32), part(8192, bias="huber")} == {0}
    said[0] = "it differs from the token loop"
    assert part(8192) == 0
