"""No cell of the product of all knobs is neither right nor refused."""

import pytest
import torch

from hecate.testing.rule import _inputs, _run
from tests.nn.layers import seeded
from tests.product.cells import Cell, _agree, check_cell, every_rule, pairwise, validate

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


def test_rounding_excuses_no_error():
    """Gradients that rounding alone moves by 1e-10 are right, those off by 1e-8 are not."""
    cell = Cell("two_pass", "huber", "none", "newton_schulz", "tensor_product", "frozen")
    assert check_cell(cell).status == "passed"
    config = validate(cell)
    case = _inputs(config, 4, config.feature_map.output_dim(4), 1, 5, seeded())
    whole = _run(case, autodiff="torch")
    _agree(case, "itself", whole, whole)
    off = whole._replace(grads={name: grad * (1 + 1e-8) for name, grad in whole.grads.items()})
    with pytest.raises(AssertionError, match="gradient of"):
        _agree(case, "off", off, whole)
