"""No cell of the product of all knobs is neither right nor refused."""

import pytest

from tests.product.cells import Cell, check_cell, every_rule, pairwise

PAIRS = pairwise()


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
