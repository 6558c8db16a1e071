"""Parity of kernels on this machine: a trial on random tokens, results of kernel and reference, and verdicts on disk.

Each verdict is a file in Triton's cache, and is cleared with it. It holds for one rule, dtype, widths, card, versions
and text of the kernels, the bias's included; anything else is judged again. [ENG-TRITON-I3]
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from hashlib import sha256
from importlib.metadata import version
from itertools import repeat
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hecate.engine.tokens import Tokens
from hecate.files import make_folder, read_file, write_file
from hecate.tape import ByHand, Tensors

TRIAL = 150  # tokens: two blocks of a kernel and a remainder
_LOG = logging.getLogger("hecate.engine")
LONGEST = 1 << 16  # bytes of a verdict's file
Facts = dict[str, Any]


class Unrun(str):
    """Reason why a kernel did not run. The cause may be a lack of memory, so it holds for this process only."""

    __slots__ = ()


def trial(
    dtype: torch.dtype,
    device: str,
    shape: tuple[int, ...],
    *,
    slots: int = 0,
    flags: Sequence[str] = (),
    scale: float = 1.0,
    adverse: bool = False,
) -> tuple[Tensors, tuple[Tensor, ...]]:
    """Inputs of a kernel (memory, *slots, initial, *tokens) for one sequence of two heads, with numbers of a dtype, and
    cotangents. One head forgets little, the other much. flags: optional fields of `Tokens` to include, and "channels"
    for retain.
    scale is that of states, values, learning rates and momenta: at a small one no rule diverges. Random keys hide an
    inverse that loses digits: adverse keys come in runs of nearly equal and of equal ones, at lr 1 and retain 1, with
    gates of 0 among them. With "parted", one head keeps nearly all of a state from part to part."""
    height, width = shape
    lead = (1, TRIAL, 2)
    generator, channelwise = torch.Generator().manual_seed(0), "channels" in flags

    def draw(*size: int) -> Tensor:
        drawn = torch.randn(*size, generator=generator, dtype=torch.float32, device="cpu")
        return drawn.to(dtype).float().to(device)

    def keys() -> Tensor:
        return torch.nn.functional.normalize(draw(*lead, width), dim=-1).to(dtype).float()

    first = keys()
    gate = draw(*lead, width) if channelwise else draw(*lead)
    ways = draw(2, 2).new_tensor([[4.0, 1.0], [1.0, 3.0]])  # mean and spread per head
    mean, spread = (way.unsqueeze(-1) if channelwise else way for way in ways.T)
    lr = draw(*lead).sigmoid()
    states = [draw(2, height, width) for _ in range(2 + slots)]
    queries, values, retain = draw(*lead, width), draw(*lead, height), (mean + spread * gate).sigmoid()
    cotangents = (draw(*lead, height), *(draw(2, height, width) for _ in range(1 + slots)))
    momentum = draw(*lead).sigmoid() if slots else torch.zeros_like(lr)
    write = draw(*lead[:2]) < 1 if "write" in flags else None
    reset = draw(*lead[:2]) > 2 if "reset" in flags else None
    apart = keys() if "phi_w" in flags else None
    retain_value = (4 + draw(*lead, height)).sigmoid() if "retain_value" in flags else None
    if adverse:
        first[:, 9:41] = torch.nn.functional.normalize(first[:, 8:9] + first[:, 9:41] / 16, dim=-1).to(dtype).float()
        first[:, 41:80], lr[:, 9:80], retain[:, 9:80] = first[:, 8:9], 1.0, 1.0
        for gate in (retain, momentum):
            gate[:, [5, 63, 64, 128]] = 0
        momentum[:, [20, 127]] = 1.0 if slots else 0.0
    if "parted" in flags:
        retain[:, :, 0], lr[:, :, 0] = 1 - (1 - retain[:, :, 0]) / 512, lr[:, :, 0] / 16
        retain[:, [5, 63, 64, 128], 0] = 0.99
        momentum[:, :, 0] = 0.95 if slots else 0.0
    if scale != 1:
        states, values, lr, momentum = [scale * item for item in states], scale * values, scale * lr, scale * momentum
    return (*states, first, queries, values, lr, retain, momentum, write, reset, apart, retain_value), cotangents


def difference(
    found: Callable[[], Tensors],
    expected: Callable[[], Tensors],
    *,
    slots: int = 0,
    bound: float,
    against: str,
    plain: Callable[[], Tensors] | None = None,
    times: float = 2.0,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    names: Sequence[str] = (),
) -> str | None:
    """Reason why a kernel is not trusted: it fails, or one of its tensors is further than `bound` from the expected
    one, relative to the latter's norm. With `plain`, plain torch in the kernel's dtype, an error up to `times` that of
    `plain` passes too."""
    try:
        results = found()
    except Exception as error:  # compilers raise types of their own
        return Unrun(f"its kernel fails on {dtype} with widths {shape}: {error}")
    names = names or ("y", "state", *["slot"] * slots, "memory", *["slot"] * slots, "initial", *Tokens._fields)
    rounded = repeat(None) if plain is None else plain()
    for name, got, right, other in zip(names, results, expected(), rounded):  # noqa: B905
        if got is None or right is None or not right.any():
            continue
        distance, most = float((got - right).norm() / right.norm()), bound
        if other is not None:
            most = max(bound, times * float((other - right).norm() / right.norm()))
        if not distance <= most:
            return f"its kernel differs from {against} by {distance:.1e} in {name} on {dtype}, more than {most:.1e}"
    return None


def both_ways(kernel: ByHand, inputs: Tensors, cotangents: Sequence[Tensor]) -> Tensors:
    """Outputs of a kernel, and its cotangents of the inputs."""
    outputs, record = kernel.forward(inputs, True)
    return (*outputs, *kernel.vjp(inputs, record, cotangents))


def both_by_torch(kernel: ByHand, inputs: Tensors, cotangents: Sequence[Tensor]) -> Tensors:
    """The same in plain torch."""
    with torch.no_grad():  # no second derivatives
        return (*kernel.plain(*inputs), *kernel.by_autograd(inputs, cotangents))


def folder() -> Path:
    """Folder of verdicts, within Triton's cache."""
    home = Path(os.environ.get("TRITON_HOME") or Path.home())
    return Path(os.environ.get("TRITON_CACHE_DIR") or home / ".triton" / "cache") / "hecate-verdicts"


def here(device: str) -> Facts:
    """The card and the versions that a verdict holds for."""
    card = torch.cuda.get_device_name() if device == "cuda" else device
    return {"card": card, "torch": torch.__version__, "triton": version("triton"), "kernels": _text()}


def judged(facts: Facts, judge: Callable[[], str | None], own: Facts | None = None) -> str | None:
    """Reason why a kernel is not trusted, None if it is: from disk, or else from `judge` and then saved. Distrust is
    logged as a warning, and holds for the kernel's `own` facts only: another with other constants may pass."""
    both = [json.loads(json.dumps(facts | more)) for more in ({}, own or {})]  # as JSON reads them back
    known = [found for each in both if (found := _read(_path(each))) is not None and found["facts"] == each]
    if known:
        reason: str | None = known[-1]["reason"]
    else:
        reason = judge()
        if not isinstance(reason, Unrun):
            facts = both[reason is not None]
            _keep(_path(facts), {"facts": facts, "reason": reason})
    if reason is not None:
        _LOG.warning("a kernel is not used: %s", reason)
    return reason


def kept() -> Iterator[tuple[Facts, str | None]]:
    """Every verdict on disk: its facts, and the reason why that kernel is not trusted, None if it is."""
    for path in sorted(folder().glob("*.json")):
        if (verdict := _read(path)) is not None:
            yield verdict["facts"], verdict["reason"]


def _path(facts: Facts) -> Path:
    return folder() / f"{sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]}.json"


def _read(path: Path) -> dict[str, Any] | None:
    """A verdict; None if the file is missing or holds something else."""
    try:
        verdict = json.loads(read_file(path, LONGEST))
    except (OSError, ValueError):
        return None
    whole = isinstance(verdict, dict) and isinstance(verdict.get("facts"), dict) and "reason" in verdict
    return verdict if whole and isinstance(verdict["reason"], str | None) else None


def _keep(path: Path, found: dict[str, Any]) -> None:
    try:
        make_folder(path.parent)
        write_file(path, json.dumps(found, indent=1))
    except OSError as error:  # the next process judges again
        _LOG.info("verdicts of kernels cannot be kept in %s: %s", path.parent, error)


@cache
def _text() -> str:
    """A digest of the kernels and of the trial that they must pass."""
    digest = sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
