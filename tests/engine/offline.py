"""What kernels take of a card that is not there: each launch compiles for it, is noted, and runs nothing.

    python -m tests.engine.offline 90 gated_delta kda

prints a line of JSON for each kernel that these cases launch on sm_90, or for the case that failed. Arguments are those
that the engine itself gives, so that they are specialised as on a card. With another Triton ahead on PYTHONPATH it is
that one which compiles.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver, jit

from hecate import Gates, MemoryConfig, memory_scan, stepper
from hecate.bias import Bias
from hecate.engine.triton import engine, launch

SIZES = ((150, 2), (96, 16))  # tokens and heads of a case: as a kernel is tried, and as it runs; one kernel serves both


class EveryName(Bias):
    """offline_every_name: no loss, but formulas that call all that a printed bias may call."""

    kind: Literal["offline_every_name"] = "offline_every_name"
    a: float = 0.7

    def grad(self, pred: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        e = pred - target
        near = torch.where(e.isnan() | (e > self.a), torch.tanh(e), torch.sin(e) * torch.cos(target))
        far = torch.erf(e) + torch.expm1(-e.abs()) + torch.log1p(e.abs()) + (1 + e.abs()).pow(self.a).log()
        return near * far + e.floor() * target.exp()

    def grad_vjp(self, pred: torch.Tensor, target: torch.Tensor, g: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        e = pred - target
        pulled = g / (1 + e.square().mean(-1, keepdim=True)).sqrt() + e.amax(-1, keepdim=True)
        return pulled, torch.where(e == 0, torch.inf + e, torch.nan)


del Bias._registry["offline_every_name"]  # it is passed as a value: tests of all known kinds need not know it


class Case(NamedTuple):
    """A rule, what a call gives it, and what its kernels may take."""

    rule: dict[str, Any]
    width: int = 64
    dtype: torch.dtype = torch.bfloat16
    channels: bool = False  # retain of each phi channel
    # Of "masks", "documents", "parts" of a long row, "values" (retain of each value), "keys" (erased and written ones).
    given: str = ""
    in_place: bool = False  # one token, by a stepper
    spilt: tuple[int, int] | None = (0, 512)  # bytes outside a thread's registers, of a walk forward and of the others
    beside: int = 2  # programs of a walk that a multiprocessor of sm_90 holds at least


DECAY = {"retention": "decay", "key_norm": "l2"}
LOOP = (0, 0)
MORE = (0, 1024)  # of momenta and features
CASES = {
    # block kernels
    "dot": Case({"bias": "dot", "feature_map": "elu", "key_norm": "sum"}),
    "delta": Case({"key_norm": "l2"}),
    "gated_delta": Case(DECAY),
    "gated_delta_documents": Case(DECAY, given="documents"),
    "momentum_parts": Case({**DECAY, "algorithm": "momentum"}, given="parts", spilt=MORE, beside=1),
    "kda": Case({**DECAY, "decay_order": "before_gradient"}, channels=True, spilt=(0, 1792), beside=1),
    "wide_kda": Case({**DECAY, "decay_order": "before_gradient"}, width=128, channels=True, spilt=(64, 1792), beside=1),
    "kda_elu": Case({"retention": "decay", "feature_map": "elu", "key_norm": "sum"}, channels=True, spilt=(0, 1792)),
    "kda_masks": Case(
        {**DECAY, "read": "before"}, channels=True, given="masks keys", spilt=(320, 1792), beside=1
    ),
    "momentum": Case({**DECAY, "algorithm": "momentum"}, spilt=MORE, beside=1),
    "every_name": Case(
        {**DECAY, "bias": EveryName(), "algorithm": "momentum", "feature_map": "relu"}, spilt=(320, 1024)
    ),
    "huber_momentum": Case(
        {**DECAY, "bias": "huber", "algorithm": "momentum", "feature_map": "squared_relu"}, spilt=MORE
    ),
    "kl": Case({"bias": "kl", "retention": "decay"}, spilt=(64, 512)),
    "tanh": Case({**DECAY, "feature_map": "tanh"}, spilt=MORE),  # keys come to unit length in a launch of their own
    "masks": Case({**DECAY, "algorithm": "momentum", "read": "before"}, given="masks", spilt=(64, 1024), beside=1),
    "wide": Case(DECAY, width=128, spilt=(16, 768), beside=1),
    "wide_momentum": Case({**DECAY, "algorithm": "momentum"}, width=128, spilt=None),
    "float32": Case(DECAY, dtype=torch.float32, spilt=(32, 1536)),
    "widest": Case(DECAY, width=256, dtype=torch.float32, spilt=None),
    "widest_kda": Case(
        {**DECAY, "decay_order": "before_gradient"}, width=256, dtype=torch.float32, channels=True, spilt=None
    ),
    # loop kernels
    "elastic_net": Case({"retention": "elastic_net", "algorithm": "momentum"}, dtype=torch.float32, spilt=LOOP),
    "sphere": Case({"bias": "huber", "retention": "sphere"}, spilt=LOOP),
    "lp_lq": Case({"bias": {"kind": "lp", "p": 3.0}, "retention": {"kind": "lq", "eps": 1e-3}}, spilt=(0, 40)),
    "ftrl": Case({**DECAY, "algorithm": {"kind": "ftrl", "l1": 0.02}}, spilt=LOOP),
    "kl_kl": Case({"bias": "kl", "retention": "kl", "algorithm": {"kind": "momentum", "nesterov": True}}, spilt=LOOP),
    "every_gate": Case(
        {
            "retention": {"kind": "norm_cap", "retention": {"kind": "kl", "signed": True}},
            "algorithm": "delta_momentum", "decay_order": "before_gradient", "read": "before",
        },
        dtype=torch.float32, channels=True, given="masks documents values keys", spilt=(0, 768), beside=1,
    ),
    "in_place": Case({**DECAY, "algorithm": "momentum"}, in_place=True, spilt=LOOP),
    "in_place_wide": Case(DECAY, width=128, dtype=torch.float32, in_place=True, spilt=LOOP),
    "in_place_kda": Case(
        {**DECAY, "decay_order": "before_gradient"}, width=128, channels=True, in_place=True, spilt=LOOP
    ),
    "in_place_sum": Case(
        {"bias": "huber", "feature_map": "elu", "key_norm": "sum"}, width=128, given="keys", in_place=True, spilt=LOOP
    ),
}  # fmt: skip
# Every kernel: as fast as it has to be, and with all that a Triton may take amiss, which are names of biases, maps and
# norms, a momentum, retain of each channel, a token.
BUDGETED = ("gated_delta_documents", "momentum", "kda_elu", "sphere", "in_place", "in_place_wide")
EVERY_WORD = ("every_name", "kda_elu", "sphere", "in_place")


class NoDriver:
    """In the place of Triton's: a card of an architecture, which runs nothing."""

    def __init__(self, card: int) -> None:
        self.card = card

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.card, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def noting(card: int) -> list[tuple[str, Any]]:
    """From here on launches compile for a card and are noted, each kernel once: its name and what the compiler made."""
    noted: dict[int, tuple[str, Any]] = {}
    launched = jit.JITFunction.run

    def run(self: Any, *given: Any, grid: Any, warmup: bool, **named: Any) -> Any:
        made = launched(self, *given, grid=grid, warmup=True, **named)
        noted.setdefault(id(made), (self.__name__, made))
        made.module, made._run = made, lambda *given: None  # loaded, as it were: it may be launched without a look
        return made

    driver.set_active(NoDriver(card))
    jit.JITFunction.run = run
    engine.interpreting = lambda: True  # it takes tensors that are on no card, and trusts its kernels
    launch.card_of = lambda device: card
    return noted.values()


def call(case: Case, length: int, heads: int) -> None:
    """A pass forward and backward, or a token in place."""
    engine._part = lambda plan: 64 if "parts" in case.given else 0
    config = MemoryConfig.model_validate({**case.rule, "on_nonfinite": "propagate"})
    lead, width = (1, length, heads), case.width

    def drawn(*shape: int) -> torch.Tensor:
        return torch.rand(*shape).to(case.dtype).requires_grad_()

    q, k, v = (drawn(*lead, width) for _ in range(3))
    one = [drawn(*lead) for _ in range(2)]
    decays = config.retention.uses_retain
    retain = drawn(*lead, width) if case.channels else one[1]
    more: dict[str, Any] = {"momentum": drawn(*lead)} if config.algorithm.uses_momentum else {}
    if "values" in case.given:
        more["retain_value"] = drawn(*lead, width)
    if "keys" in case.given:
        more |= {"erase": drawn(*lead, width), "write": drawn(*lead, width)}
    gates = Gates(one[0], retain if decays else None, **more)
    masks: dict[str, Any] = {}
    if "masks" in case.given:
        masks["write_mask"] = torch.arange(length)[None] % 7 > 0
    if "documents" in case.given:
        masks["cu_seqlens"] = torch.tensor([0, 40, 41, length])
    elif "masks" in case.given:
        masks["reset_mask"] = torch.arange(length)[None] % 11 == 0
    if case.in_place:
        with torch.no_grad():
            now = Gates(*(None if x is None else x[:, 0] for x in gates))
            stepper(config, in_place=True)(q[:, 0], k[:, 0], v[:, 0], now)
        return
    y, _ = memory_scan(config, q, k, v, gates, engine="triton", **masks)
    y.sum().backward()


def resources(made: Any) -> dict[str, int]:
    """Registers of a thread, bytes that it keeps outside them for want of more, and what `counted` counts."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        usage, code = (
            subprocess.run([tool, of, file.name], capture_output=True, text=True, check=True, timeout=60).stdout
            for of in ("-res-usage", "-sass")
        )
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    if found is None:
        raise AssertionError(f"cuobjdump tells no registers: {usage}")
    # Products read such rows of 16 bits past their end, as compilers in use make them (triton#11366).
    short = re.findall(r"nvmma_shared<\{swizzlingByteWidth = (?:0|32|64),[^}]*elementBitWidth = 16", made.asm["ttgir"])
    return {"registers": int(found[1]), "stack": int(found[2]), "short": len(short), **counted(code)}


def counted(code: str) -> dict[str, int]:
    """Instructions, barriers, products of a warp group, waits for these and accesses outside registers, of the longest
    loop of an assembly, or of all of it where there is none."""
    lines = [(int(at, 16), said) for at, said in re.findall(r"^\s+/\*([0-9a-f]{4,})\*/\s+(.*?);", code, re.M)]
    back = [(int(to[1], 16), at) for at, said in lines if (to := re.search(r"BRA\S*\s+.*?(0x[0-9a-f]+)", said))]
    loops = [(start, end) for start, end in back if start < end]
    start, end = max(loops, key=lambda loop: loop[1] - loop[0], default=(0, lines[-1][0]))
    body = [re.sub(r"^@!?U?P\d+\s+", "", said).split()[0] for at, said in lines if start <= at <= end]

    def of(name: str) -> int:
        return sum(op == name or op.startswith(f"{name}.") for op in body)

    local = of("LDL") + of("STL")
    return {
        "instructions": len(body),
        "barriers": of("BAR"),
        "products": of("HGMMA"),
        "waits": of("WARPGROUP.DEPBAR"),
        "local": local,
    }


def said(error: BaseException) -> str:
    """By the function that an error is of, and not by those that call it."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {error}"


def rows(card: int, names: list[str]) -> Iterator[dict[str, Any]]:
    """Of every kernel of some cases, once."""
    noted, told = noting(card), 0
    for name in names:
        start = sum(os.times()[:4])
        try:
            for size in SIZES:
                call(CASES[name], *size)
        except Exception as error:
            yield {"case": name, "error": said(error)}
        for kernel, made in list(noted)[told:]:
            yield {
                "case": name,
                "kernel": kernel,
                "shared": made.metadata.shared,
                "warps": made.metadata.num_warps,
                **resources(made),
            }
        told = len(noted)
        print(f"{name}: {sum(os.times()[:4]) - start:.1f} s", file=sys.stderr)


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print(json.dumps({"triton": triton.__version__}))
    for row in rows(int(sys.argv[1]), sys.argv[2:] or list(CASES)):
        print(json.dumps(row), flush=True)
