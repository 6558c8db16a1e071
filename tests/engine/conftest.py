"""What tests of engines share."""

from __future__ import annotations

import pytest

from hecate.engine import Engine


@pytest.fixture
def others():
    """Leaves the registry as it was."""
    before = dict(Engine.registry)
    yield before
    Engine.registry.clear()
    Engine.registry.update(before)
