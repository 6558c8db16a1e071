"""A sample of the fuzz in every run, all of it when slow tests are asked for."""

from __future__ import annotations

import pytest
import torch

from tests.fuzz import configs, scans

SHORT = (0, 1, 2, 3, 5)
PARTS, CASES = 20, 150


@pytest.fixture(autouse=True)
def users_default_dtype():
    """float32, as users have it."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    yield
    torch.set_default_dtype(before)


@pytest.mark.parametrize("part", range(4))
def test_a_sample_of_configurations(part):
    for seed in range(part * 15, (part + 1) * 15):
        configs.check(seed)


@pytest.mark.parametrize("part", range(4))
def test_a_sample_of_scans(part):
    for seed in range(part * 15, (part + 1) * 15):
        scans.check(seed, SHORT)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_configurations(part):
    assert not faults(configs.check, part)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_scans(part):
    assert not faults(scans.check, part)


def faults(check, part: int) -> list[str]:
    """Every seed that fails, so that one run tells all."""
    found = []
    for seed in range(part * CASES, (part + 1) * CASES):
        try:
            check(seed)
        except Exception as error:
            found.append(f"seed {seed}: {type(error).__name__}: {error}"[:300])
    return found
