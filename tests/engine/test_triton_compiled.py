"""What the kernels of our own take of a card: compiled for it without one, as they are launched."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from hecate import Gates, MemoryConfig, memory_scan
from hecate.errors import install_line

triton = pytest.importorskip("triton", reason=f"the kernels need triton: {install_line('gpu')}")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = pytest.mark.skipif(INTERPRETED, reason="kernels are interpreted, not compiled")
KERNELS = ("forward", "walk", "tokens", "gates", "channel_tokens", "unit", "unit_back")
TYPES = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.uint8: "*u8", torch.int64: "*i64"}
SPILT = 512  # bytes that the backward may keep outside its registers
SHARED = {80: 163 * 1024, 90: 227 * 1024}  # bytes that a program may have on a card
RULES = {
    "delta": {"retention": "decay", "key_norm": "l2"},
    "kda": {"retention": "decay", "decay_order": "before_gradient", "key_norm": "l2"},
    "huber": {"bias": "huber", "retention": "decay", "algorithm": "momentum", "key_norm": "l2"},
    "elu": {"feature_map": "elu", "retention": "decay", "key_norm": "sum"},
}


class Noted:
    """In the place of a kernel: what it is launched with."""

    def __init__(self, kernel: Any, calls: list[tuple[Any, tuple[Any, ...], dict[str, Any]]]) -> None:
        self.kernel, self.calls = kernel, calls

    def __getitem__(self, grid: Any) -> Any:
        return lambda *given, **named: self.calls.append((self.kernel, given, named))


def launches(
    rule: dict[str, Any], width: int, dtype: torch.dtype, card: int, monkeypatch: pytest.MonkeyPatch
) -> list[Any]:
    """Kernels of one pass forward and backward, and what each is launched with."""
    from hecate.engine.triton import engine, launch

    calls: list[Any] = []
    monkeypatch.setattr(launch, "card_of", lambda device: card)
    for name in KERNELS:
        monkeypatch.setattr(launch, name, Noted(getattr(launch, name), calls))
    monkeypatch.setattr(engine, "interpreting", lambda: True)  # it takes tensors that are on no card
    q, k, v = (torch.randn(1, 100, 2, width).to(dtype).requires_grad_() for _ in range(3))
    gates = [torch.rand(1, 100, 2, dtype=dtype, requires_grad=True) for _ in range(3)]
    if rule is RULES["kda"]:  # retain of each channel
        gates[1] = torch.rand(1, 100, 2, width, dtype=dtype, requires_grad=True)
    # what nobody computes is not looked at
    config = MemoryConfig.model_validate({**rule, "on_nonfinite": "propagate"})
    y, _ = memory_scan(config, q, k, v, Gates(*gates[: 3 if config.algorithm.slots else 2]), engine="triton")
    y.sum().backward()
    return calls


def compiled(kernel: Any, given: tuple[Any, ...], named: dict[str, Any], card: int) -> Any:
    """A kernel's machine code for a card."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    options = {name: named.pop(name) for name in ("num_warps", "num_stages") if name in named}
    types, aligned = {}, {}
    for at, (name, item) in enumerate(zip(kernel.arg_names, given, strict=False)):
        if isinstance(item, torch.Tensor):
            types[name], aligned[at,] = TYPES[item.dtype], [["tt.divisibility", 16]]
        else:
            types[name] = "fp32" if isinstance(item, float) else "i32"
    types |= dict.fromkeys(named, "constexpr")
    fixed = {(kernel.arg_names.index(name),): item for name, item in named.items()}
    source = ASTSource(fn=kernel, signature=types, constexprs=fixed, attrs=aligned)
    return triton.compile(source, target=GPUTarget("cuda", card, 32), options=options)


def spills(code: Any, card: int, folder: Path) -> int:
    """Bytes that a program keeps outside its registers for want of them."""
    ptx = folder / "kernel.ptx"
    ptx.write_text(code.asm["ptx"])
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
    asked = [tool, "-v", f"--gpu-name=sm_{card}{'a' if card == 90 else ''}", ptx, "-o", folder / "kernel.cubin"]
    said = subprocess.run(asked, capture_output=True, text=True, check=True, timeout=120).stderr
    return int(re.findall(r"(\d+) bytes spill stores", said)[-1])


@pytest.mark.parametrize("rule", ["huber", "kda"])
def test_kernels_compile(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter takes what the compiler does not, such as a name for a pointer and then for a tile."""
    names = set()
    for kernel, given, named in launches(RULES[rule], 16, torch.float32, 90, monkeypatch):
        compiled(kernel, given, dict(named), 90)
        names.add(kernel.fn.__name__)
    assert names == {"forward", "walk", *(["channel_tokens"] if rule == "kda" else ["tokens", "gates"])}


@pytest.mark.slow
@pytest.mark.spec("ENG-TRITON-D4")
@pytest.mark.parametrize("rule", ["delta", "kda"])
def test_the_widest_keys_fit_a_card(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for kernel, given, named in launches(RULES[rule], 256, torch.float32, 90, monkeypatch):
        assert compiled(kernel, given, dict(named), 90).metadata.shared <= SHARED[90], kernel.fn.__name__


@pytest.mark.slow
@pytest.mark.spec("ENG-TRITON-D4")
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("card", SHARED)
@pytest.mark.parametrize("rule", RULES)
def test_kernels_fit_a_card(rule: str, card: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # products of bfloat16 values are made of one of TF32
    for kernel, given, named in launches(RULES[rule], 64, torch.bfloat16, card, monkeypatch):
        code = compiled(kernel, given, dict(named), card)
        spilt = spills(code, card, tmp_path)
        assert code.metadata.shared <= SHARED[card]
        assert spilt <= (0 if kernel.fn.__name__ in ("forward", "unit", "unit_back") else SPILT)
