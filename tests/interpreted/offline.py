"""Loop kernels compiled for a card that is not there: what each spills, in bytes, and its shared memory.

    python tests/interpreted/offline.py 90 64

prints a line of JSON for each kernel, of states D x D on sm_90. It runs where Triton does not interpret.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget

from hecate import MemoryConfig
from hecate.engine.triton import loop
from hecate.engine.triton.loops import formulas, rounded, warps

CONFIGS = {
    "elastic net": {"bias": "l2", "retention": "elastic_net", "algorithm": "momentum"},
    "sphere": {"bias": "huber", "retention": "sphere"},
    "lp and lq": {"bias": {"kind": "lp", "p": 3.0}, "retention": {"kind": "lq", "eps": 1e-3}},
    "kl and kl": {"bias": "kl", "retention": "kl", "algorithm": {"kind": "momentum", "nesterov": True}},
    "all": {
        "retention": {"kind": "norm_cap", "retention": {"kind": "kl", "signed": True}}, "algorithm": "delta_momentum",
        "decay_order": "before_gradient", "read": "before",
    },
}  # fmt: skip
NUMBERS = ["fa", "fb", "e", "c", "cap", "n0", "n1", "n2", "n3", "n4"]
INTEGERS = ["T", "H", "SEG"]


def compiled(kernel: triton.JITFunction, config: MemoryConfig, width: int, target: GPUTarget) -> triton.CompiledKernel:
    """A kernel of a config for states `width` x `width`."""
    own, every = formulas(config, single=True), config.read == "before"  # every gate and mask, or none
    tile = min(rounded(width), 64) if own.apart and kernel is loop.forward else rounded(width)
    constants = {
        "P": width, "V": width, "BP": rounded(width), "BV": tile, **own.flags, "KEEPS": True,
        "RETAIN": "channels" if every else "one", "VALUE": every, "MASK": every, "RESET": every, "APART": every,
        "DOCS": False,
    }  # fmt: skip
    names = kernel.arg_names
    constants = {name: item for name, item in constants.items() if name in names}
    kinds = dict.fromkeys(names, "*fp32") | dict.fromkeys(("write", "reset"), "*u8") | {"docs": "*i64"}
    kinds |= dict.fromkeys(NUMBERS, "fp32") | dict.fromkeys(INTEGERS, "i32") | dict.fromkeys(constants, "constexpr")
    aligned = {(at,): [["tt.divisibility", 16]] for at, name in enumerate(names) if kinds[name].startswith("*")}
    source = triton.compiler.ASTSource(
        kernel, {name: kinds[name] for name in names}, {(names.index(name),): item for name, item in constants.items()},
        aligned,
    )  # fmt: skip
    return triton.compile(source, target, {"num_warps": warps(tile, rounded(width))})


def spilled(kernel: triton.CompiledKernel, card: int) -> int:
    """Bytes of spill stores, as the assembler says."""
    assembler = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder, "kernel.ptx")
        text.write_text(kernel.asm["ptx"])
        name = f"sm_{card}" + ("a" if card == 90 else "")
        command = [assembler, "-v", f"--gpu-name={name}", text, "-o", Path(folder, "kernel.cubin")]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    return int(re.search(r"(\d+) bytes spill stores", said)[1])


def main(card: int, width: int) -> None:
    for name, config in CONFIGS.items():
        for kernel in (loop.forward, loop.backward):
            made = compiled(kernel, MemoryConfig.model_validate(config), width, GPUTarget("cuda", card, 32))
            found = {"spilled": spilled(made, card), "shared": made.metadata.shared, "warps": made.metadata.num_warps}
            print(json.dumps({"rule": name, "kernel": kernel.__name__, **found}), flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:3]))
