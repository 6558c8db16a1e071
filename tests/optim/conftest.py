"""What every test of optimisers takes for granted."""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Few features of short rows decode badly, and some maps are linear, which is not what these tests are about."""
    for item in items:
        if "tests/optim/" in item.path.as_posix():
            item.add_marker(pytest.mark.filterwarnings("ignore:lift 'pinv' misses", "ignore:phi sees"), append=False)
