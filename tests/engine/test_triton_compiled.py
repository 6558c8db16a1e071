"""What the kernels of our own take of a card: compiled for it without one, as they are launched, by every Triton that
torch releases in use pair with."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from hecate.errors import install_line

if find_spec("triton") is None:
    pytest.skip(f"the kernels need triton: {install_line('gpu')}", allow_module_level=True)

from tests.engine.offline import BUDGETED, CASES, EVERY_WORD

ROOT = Path(__file__).parents[2]
OTHERS = ("3.6.0",)  # of torch 2.11; that of the tests pairs with theirs
HERE = "installed"
BY_DAY = {
    (HERE, 90): BUDGETED,
    (HERE, 80): tuple(name for name in EVERY_WORD if name != "kda_elu"),  # the longest to compile
    **{(version, 90): EVERY_WORD for version in OTHERS},
}
REGISTERS = 65536  # of a multiprocessor, dealt out to a thread in eights


class Card(NamedTuple):
    """Bytes of shared memory that a program may have, and that a multiprocessor has; and bytes that a thread of a walk,
    and of the others, may keep outside its registers beyond what a case may on sm_90, whose products take operands from
    shared memory."""

    most: int
    whole: int
    over: tuple[int, int] = (0, 0)


CARDS = {80: Card(163 * 1024, 164 * 1024, (32, 1568)), 90: Card(227 * 1024, 228 * 1024)}
# Programs that a multiprocessor of sm_90 holds at once, at states of 64 x 64 in bfloat16. One that walks a sequence
# waits for its own last result most of the time, so that two are twice as fast; a token in place is over at once.
BESIDE = {
    "channel_pairs": 1,
    "channel_borders": 1,
    "channel_tokens": 3,
    "tokens": 1,
    "gates": 1,
    "backward": 1,
    "factors": 1,
    "channel_factors": 1,
}
IN_PLACE = 4
# Instructions and barriers of a token in place, whose rows are summed up within a warp, but with gates of its keys.
AT_ONCE = {"in_place": (640, 2), "in_place_wide": (560, 2), "in_place_kda": (600, 2), "in_place_sum": (720, 24)}
# Instructions and barriers of a turn of 64 tokens of a walk, by its case. Rows one by one took 16540 and 728 forward.
TURNS = {
    "gated_delta_documents": {"scan": (1200, 24), "pull": (1100, 10)},
    "delta": {"scan": (1200, 24), "pull": (1100, 10)}, "gated_delta": {"scan": (1200, 24), "pull": (1100, 10)},
    "momentum": {"scan": (1400, 24), "pull": (1450, 14)}, "masks": {"scan": (1420, 24), "pull": (1600, 14)},
    "kda": {"scan": (1100, 24), "pull": (900, 10)},
    "wide": {"scan": (1600, 28), "pull": (1400, 14)}, "wide_momentum": {"scan": (1450, 24), "pull": (1600, 14)},
}  # fmt: skip


@cache
def other_triton(version: str) -> Path | str:
    """The folder of another Triton, filled once by pip; or why there is none."""
    folder = ROOT / ".cache" / f"triton-{version}"
    if folder.is_dir():
        return folder
    part = folder.with_name(f"{folder.name}-{os.getpid()}")
    asked = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-compile", "--target", part]
    done = subprocess.run([*asked, f"triton=={version}"], capture_output=True, text=True, timeout=240, check=False)
    if done.returncode:
        return f"Triton {version} cannot be installed beside: {done.stderr.strip().splitlines()[-1]}"
    part.rename(folder)
    return folder


def compiled(version: str, card: int, names: tuple[str, ...]) -> list[dict[str, Any]]:
    """A row for every kernel of some cases, by the compiler of a Triton."""
    own = {name: item for name, item in os.environ.items() if name != "TRITON_INTERPRET"}
    path = [str(ROOT)]
    if version != HERE:
        folder = other_triton(version)
        if isinstance(folder, str):
            (pytest.fail if os.environ.get("CI") else pytest.skip)(folder)
        path.insert(0, str(folder))
    own |= {"PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.engine.offline", str(card), *names]
    done = subprocess.run(command, env=own, cwd=ROOT, capture_output=True, text=True, timeout=1200, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    first, *rows = map(json.loads, done.stdout.splitlines())
    assert version in (HERE, first["triton"])
    assert [row for row in rows if "error" in row] == []
    assert {row["case"] for row in rows} == set(names)
    return rows


def expect_within_budget(row: dict[str, Any], card: int) -> None:
    case, walk = CASES[row["case"]], row["kernel"] in ("scan", "pull", "forward")
    of = 0 if row["kernel"] in ("forward", "scan", "one_token") else 1
    assert row["shared"] <= CARDS[card].most and row["short"] == 0, row
    assert case.spilt is None or row["stack"] <= case.spilt[of] + CARDS[card].over[of], row
    threads = 32 * row["warps"]
    by_registers = REGISTERS // (-(-row["registers"] // 8) * 8 * threads)
    by_memory = CARDS[card].whole // (row["shared"] + 1024)
    beside = case.beside if walk else BESIDE.get(row["kernel"], 4)
    beside = IN_PLACE if case.in_place else beside if case.spilt is not None else 1
    assert min(by_registers, by_memory) >= (beside if card == 90 else 1), row
    if card == 90 and case.in_place:
        instructions, barriers = AT_ONCE[row["case"]]
        assert row["instructions"] <= instructions and row["barriers"] <= barriers, row
    if card == 90 and walk and row["case"] in TURNS:
        instructions, barriers = TURNS[row["case"]][row["kernel"]]
        assert row["instructions"] <= instructions and row["barriers"] <= barriers, row
        assert row["local"] <= (0 if case.width == 64 and case.given != "masks" else 8), row
        assert row["waits"] <= row["products"] // 3, row


@pytest.mark.spec("ENG-TRITON-D4", "ENG-TRITON-D9")
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("version", "card"), BY_DAY)
def test_kernels_compile_and_fit_a_card(version: str, card: int) -> None:
    names = BY_DAY[version, card]
    rows = compiled(version, card, names)
    walked = {"factors": 1, "scan": 1, "pull": 1, "tokens": 1, "gates": 1}
    kernels = {
        "gated_delta_documents": walked, "every_name": walked,
        "momentum": {**walked, "scan": 2},  # states, and then outputs
        "kda_elu": {"scan": 1, "pull": 1, **{f"channel_{of}": 1 for of in ("factors", "pairs", "borders", "tokens")}},
        "sphere": {"forward": 1, "backward": 1}, "in_place": {"one_token": 1}, "in_place_wide": {"one_token": 1},
    }  # fmt: skip
    assert {name: Counter(row["kernel"] for row in rows if row["case"] == name) for name in names} == {
        name: kernels[name] for name in names
    }
    for row in rows:
        expect_within_budget(row, card)


@pytest.mark.slow
@pytest.mark.spec("ENG-TRITON-D4", "ENG-TRITON-D5")
@pytest.mark.timeout(1300)
@pytest.mark.parametrize("version", [HERE, *OTHERS])
@pytest.mark.parametrize("card", CARDS)
def test_every_kernel_compiles_and_fits_a_card(version: str, card: int) -> None:
    by_day = BY_DAY.get((version, card), ())
    for row in compiled(version, card, tuple(name for name in CASES if name not in by_day)):
        expect_within_budget(row, card)
