"""Learned firing: idle tokens leave the memory alone, and the gate learns in the right sense."""

from typing import Literal

import pytest
import torch

from hecate import MemoryConfig, memory_scan
from hecate.algorithm.base import Algorithm, AlgorithmForm
from hecate.algorithm.descent import Descent
from hecate.cms import SelfReferenceConfig
from hecate.errors import ConfigError
from hecate.nn import GateHeads, Memory
from tests.cms.common import DELTA, LEVELS, cms_of, inputs, masks
from tests.cms.test_reference import compare
from tests.nn.layers import near, seeded

FIRING = [{**level, "firing": "learned"} for level in LEVELS]


@pytest.mark.spec("CMS-FIRE-D1")
@pytest.mark.parametrize("composition", ["sequential", "nested", "independent"])
def test_against_the_reference(composition):
    layer = cms_of(composition, levels=FIRING, shake=1.5)
    x, given = inputs(length=15), masks(length=15)
    fired = [memory.gates.values(x)["firing"] > 0.5 for memory in layer.memories]
    assert all(0.1 < part.double().mean() < 0.9 for part in fired)
    compare(layer, x, **given)


@pytest.mark.spec("CMS-FIRE-I1")
@pytest.mark.parametrize("period", [1, 4])
def test_idle_tokens_change_nothing_but_are_counted(period):
    level = {**LEVELS[0], "memory": DELTA, "firing": "learned", "period": period}
    layer = cms_of("independent", levels=[level])
    _, before = layer(inputs(length=8))
    with torch.no_grad():
        layer.memories[0].gates.weight["firing"].zero_()
        layer.memories[0].gates.bias["firing"].fill_(-1.0)
    y, after = layer(inputs(length=3, seed=7), before)
    mine, theirs = after.levels[0].memory, before.levels[0].memory
    near(mine.memory, theirs.memory, 0.0)
    assert (mine.position == 3 % period).all() and after.written.tolist() == [11, 11]
    if period > 1:
        assert all((total == 0).all() for n, total in mine.pending.items() if n != "retain")
        assert (mine.pending["retain"] == 1).all()
    assert y.abs().max() > 0.1  # it is read all the same


@pytest.mark.spec("CMS-FIRE-D1")
def test_levels_start_firing_and_firing_changes_nothing():
    plain, firing = (Memory(8, 2, DELTA, firing=firing, generator=seeded()) for firing in ("always", "learned"))
    x = inputs()
    assert (firing.gates.values(x)["firing"] == 0.75).all()
    assert torch.equal(plain(x)[0], firing(x)[0])
    grads = torch.autograd.grad(firing(x)[0].sum(), list(firing.gates.parameters()))
    assert all(g.abs().max() > 1e-9 for g in grads)


@pytest.mark.spec("CMS-FIRE-V1")
@pytest.mark.parametrize("logit", [1.0, -1.0], ids=["open", "shut"])
@pytest.mark.parametrize("target", [[0.0, 0.0], [2.0, -1.0]])
def test_the_chain_rule_by_hand(logit, target):
    """With M k = m, h moves y = (1 - h (1 - r)) m + h lr (v - m) by (r - 1) m + lr (v - m)."""
    lr, r, m, v = 0.5, 0.6, torch.tensor([1.0, -0.5]), torch.tensor([0.3, 2.0])
    config = MemoryConfig(retention="decay")
    gates = GateHeads(1, 1, config, firing=True)
    gates.reset_parameters()
    with torch.no_grad():
        gates.bias["retain"].fill_(torch.tensor(r / (1 - r)).log())
        gates.bias["firing"].fill_(logit)
    q = torch.tensor([1.0, 0.0]).reshape(1, 1, 1, 2)
    start = {"weight": torch.stack([m, 0 * m], 1).unsqueeze(0)}
    y, _ = memory_scan(config, q, q, v.reshape(1, 1, 1, 2), gates(q[..., 0, :1]), initial=start)
    loss = (y.flatten() - torch.tensor(target)).square().sum()
    (grad,) = torch.autograd.grad(loss, gates.bias["firing"])

    moved = (r - 1) * m + lr * (v - m)
    expected = m + moved if logit > 0 else m
    near(y.flatten(), expected)
    g = torch.sigmoid(torch.tensor(logit))
    near(grad.squeeze(), 2 * (expected - torch.tensor(target)) @ moved * g * (1 - g))


@pytest.mark.spec("CMS-FIRE-I2")
def test_rules_that_an_idle_token_would_change():
    for memory, match in (
        ({"algorithm": "adaptive"}, "algorithm 'adaptive'"),
        ({"retention": "elastic_net"}, "retention 'elastic_net'"),
    ):
        with pytest.raises(ConfigError, match=match):
            cms_of(levels=[{"name": "a", "memory": memory, "firing": "learned"}])
        with pytest.raises(ConfigError, match="one of"):
            Memory(8, 2, firing="sometimes")


@pytest.mark.spec("CMS-FIRE-I2", "SELF-ERASE-D1")
def test_an_algorithm_of_ones_own_is_asked_what_it_does(monkeypatch):
    """Firing and erasing twice go by the form that an algorithm declares, not by its name."""
    monkeypatch.setattr(Algorithm, "_registry", dict(Algorithm._registry))

    class Own(Descent):
        """own: D = -lr G."""

        kind: Literal["own"] = "own"

        @property
        def kernel(self):
            return AlgorithmForm()

    rule = MemoryConfig(algorithm=Own(lr=0.5), retention="decay")
    assert "firing" in Memory(8, 2, rule, firing="learned").gates.starts
    assert SelfReferenceConfig(memory=rule, erase="twice").erases == 2


@pytest.mark.spec("CMS-FIRE-V1")
@pytest.mark.parametrize("period", [1, 8])
def test_engines_agree_where_tokens_are_idle(period):
    """A gate of lr 0 and retain 1 has its true gradient in every engine."""
    level = {**LEVELS[0], "memory": DELTA, "firing": "learned", "period": period}
    x, found = inputs(length=48), []
    for engine in ("auto", "sequential"):
        layer = cms_of("independent", levels=[level], shake=1.5, engine=engine)
        y, _ = layer(x)
        found.append((y, *torch.autograd.grad(y.square().sum(), list(layer.parameters()))))
    fired = layer.memories[0].gates.values(x)["firing"] > 0.5
    assert 0.2 < fired.double().mean() < 0.8
    near(found[0], found[1], 1e-10)
