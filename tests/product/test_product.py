"""No cell of the product of all knobs is neither right nor refused."""

import pytest
import torch

from tests.product.cells import Cell, check_cell, every_rule, pairwise

PAIRS = pairwise()


@pytest.fixture(autouse=True)
def users_default_dtype():
    """float32, as users have it: a scalar that takes it over spoils a state in float64."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    yield
    torch.set_default_dtype(before)


def name(cell: Cell) -> str:
    return "-".join(cell)


@pytest.mark.spec("RULE-PRODUCT-I1")
@pytest.mark.parametrize("cell", PAIRS, ids=name)
def test_pairs(cell):
    verdict = check_cell(cell)
    assert verdict.status in ("passed", "refused"), verdict.reason


@pytest.mark.slow
@pytest.mark.parametrize("part", range(20))
def test_every_rule(part):
    for cell in list(every_rule())[part::20]:
        verdict = check_cell(cell)
        assert verdict.status in ("passed", "refused"), (cell, verdict.reason)
