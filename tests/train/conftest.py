"""What tests of training share: figures are not drawn, which takes a second, but where a test is of them."""

import sys

import pytest


@pytest.fixture(autouse=True)
def no_figures(request, monkeypatch):
    if "figures" not in request.fixturenames:
        monkeypatch.setitem(sys.modules, "matplotlib.figure", None)


@pytest.fixture
def figures():
    return pytest.importorskip("matplotlib.figure")
