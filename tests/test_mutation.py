"""The planted faults of `python -m tests.mutation` still fit the code."""

from collections import Counter
from pathlib import Path

import pytest

from tests.mutation.faults import FAULTS

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("path", sorted({fault.path for fault in FAULTS}))
def test_every_fault_can_be_planted(path):
    text = (ROOT / path).read_text()
    for fault in FAULTS:
        if fault.path == path:
            assert fault.planted(text) != text
            for target in fault.tests.split():
                assert (ROOT / target).exists()


def test_there_are_enough_faults_and_none_twice():
    assert len(FAULTS) >= 60
    assert max(Counter(fault[:3] for fault in FAULTS).values()) == 1
