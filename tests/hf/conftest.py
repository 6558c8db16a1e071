"""Draws of every test from its own start, whichever tests ran before it."""

import pytest
import torch


@pytest.fixture(autouse=True)
def own_draws():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield
