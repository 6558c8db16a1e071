"""No cell of the product of all knobs is neither right nor refused."""

from functools import cache

import pytest

from hecate.engine.naive import naive
from hecate.rule import MemoryConfig
from tests.product.cells import Cell, all_axes, every_rule, fieldwise, pairwise, runs, some_cells, validate
from tests.product.check import agree, check_cell, run, scan_of

MAPLESS = tuple(name for name in Cell._fields if name != "feature_map")


pytestmark = pytest.mark.usefixtures("float32")
"""float32, as users have it: a scalar that takes it over spoils a state in float64."""


@cache
def cells(cover: str) -> list[Cell]:
    """Where they are needed, as making them takes seconds."""
    # A seed with cells that engines of few rules run, too.
    covers = {"mapless": lambda: fieldwise(MAPLESS, seed=11), "all": fieldwise, "pairs": pairwise, "rules": every_rule}
    return list(covers[cover]())


def check(cells: list[Cell]) -> None:
    faults = {cell.name: verdict.reason for cell in cells if (verdict := check_cell(cell)).status == "fault"}
    assert not faults


@pytest.mark.spec("RULE-PRODUCT-I1")
@pytest.mark.parametrize("part", range(20))
def test_any_two_kinds_together(part):
    """phi meets a rule only through its values: here its kinds come along with those of all other axes."""
    check(cells("mapless")[part::20])


@pytest.mark.slow
@pytest.mark.parametrize("part", range(20))
@pytest.mark.parametrize("cover", ["all", "pairs", "rules"])
def test_every_kind_of_phi_too(cover, part):
    check(cells(cover)[part::20])


@pytest.mark.slow
def test_random_cells_are_refused_by_name():
    assert not [verdict for cell in some_cells(20_000) if getattr(verdict := validate(cell), "status", "") == "fault"]


@pytest.mark.spec("RULE-PRODUCT-I1")
def test_the_cover_covers():
    """Every kind of every axis is in a cell that runs, and a cell that is refused has two kinds that do not go."""
    running = [cell for cell in cells("mapless") if runs(cell)]
    for name, kinds in all_axes().items():
        assert {getattr(cell, name) for cell in running} == set(kinds), name
    assert all(isinstance(validate(cell), MemoryConfig) for cell in running)


def test_rounding_excuses_no_error():
    """Gradients that rounding alone moves by 1e-10 are right, those off by 1e-8 are not."""
    cell = Cell("two_pass", "huber", "none", "newton_schulz", "tensor_product", "frozen")
    assert check_cell(cell).status == "passed"
    case = scan_of(validate(cell))
    whole = run(case, autodiff="torch")
    agree(case, "itself", whole, whole)
    off = whole._replace(grads={name: grad * (1 + 1e-8) for name, grad in whole.grads.items()})
    with pytest.raises(AssertionError, match="gradient of"):
        agree(case, "off", off, whole)


def test_a_wrong_write_is_a_fault(monkeypatch):
    """A scan whose write is off by 1e-3 of the recurrence's is no pass."""
    cell = Cell("matrix", "l2", "decay", "gd", "identity", "token", gates="both")
    assert check_cell(cell).status == "passed"
    off = lambda *given, phi_w, **how: naive(*given, phi_w=1.001 * phi_w, **how)  # noqa: E731
    monkeypatch.setattr("tests.product.check.naive", off)
    verdict = check_cell(cell)
    assert verdict.status == "fault" and "recurrence" in verdict.reason
