"""A sample of the fuzz in every run, all of it when slow tests are asked for."""

from __future__ import annotations

import pytest

from tests.fuzz import configs, scans
from tests.fuzz.__main__ import run

SHORT = (0, 1, 2, 3, 5)
SAMPLE, PARTS, CASES = 40, 20, 150


pytestmark = pytest.mark.usefixtures("float32")


@pytest.mark.parametrize("part", range(2))
def test_a_sample(part: int) -> None:
    for seed in range(part, SAMPLE, 2):
        configs.check(seed)
        scans.check(seed, SHORT)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("what", ["configs", "scans"])
def test_everything(what: str, part: int) -> None:
    _, faults, _ = run(what, range(part * CASES, (part + 1) * CASES))
    assert not faults, "\n".join(faults)
