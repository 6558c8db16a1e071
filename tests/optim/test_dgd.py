"""DGD: the minimiser it is, both readings of a batch, what its samples must account for."""

from __future__ import annotations

import gc
import pickle
from copy import deepcopy

import numpy as np
import pytest
import torch
from torch import nn

from hecate.errors import ConfigError
from hecate.optim import DGD
from hecate.optim.memories import Samples
from tests.optim.rules import draw
from tests.reference import optim_memories as reference


def layer(inputs: int = 5, outputs: int = 3, bias: bool = False, seed: int = 0) -> nn.Linear:
    made = nn.Linear(inputs, outputs, bias=bias)
    with torch.no_grad():
        made.weight.copy_(draw(outputs, inputs, seed=seed))
    return made


def attached(made: nn.Module, lr: float = 0.1, **options) -> DGD:
    optimizer = DGD(made.parameters(), lr, **options)
    optimizer.attach(made)
    return optimizer


def loss(y: torch.Tensor, target: torch.Tensor, reduction: str) -> torch.Tensor:
    each = 0.5 * (y - target).square().sum(-1)
    return each.mean() if reduction == "mean" else each.sum()


@pytest.mark.spec("OPT-DGD-D1")
def test_one_sample_is_minimised_exactly():
    made, x, g, lr = layer(), draw(5, seed=1), draw(3, seed=2), 0.3
    start = made.weight.detach().clone()
    optimizer = attached(made, lr)
    (made(x[None]) * g).sum().backward()
    optimizer.step()
    w = made.weight.detach().clone().requires_grad_()
    value = 0.5 * (w @ x + g).square().sum() + (w - start).square().sum() / (2 * lr)
    (slope,) = torch.autograd.grad(value, w)
    torch.testing.assert_close(slope, torch.zeros_like(slope), rtol=0, atol=1e-13)


@pytest.mark.spec("OPT-DGD-D1", "OPT-DGD-D2")
@pytest.mark.parametrize("decay", [0.0, 0.2])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("batch", ["mean", "sequential"])
def test_reference(batch, reduction, decay):
    made = layer()
    optimizer = attached(made, batch=batch, reduction=reduction, weight_decay=decay)
    plain, worst = made.weight.detach().numpy().copy(), 0.0
    for step in range(30):
        x, target = draw(2, 3, 5, seed=3 * step), draw(2, 3, 3, seed=3 * step + 1)
        optimizer.zero_grad()
        loss(made(x), target, reduction).backward()
        optimizer.step()
        rows = x.reshape(6, 5).numpy()
        grads = rows @ plain.T - target.reshape(6, 3).numpy()  # of each sample's own loss
        plain = reference.dgd(plain, rows, grads, 0.1, batch, decay)
        worst = max(worst, np.abs(made.weight.detach().numpy() - plain).max())
    assert worst <= 1e-12 * np.abs(plain).max()


@pytest.mark.spec("OPT-DGD-D2")
def test_sequences_longer_than_a_triangular_system():
    made, x = layer(), draw(600, 5, seed=1)
    start = made.weight.detach().numpy().copy()
    optimizer = attached(made, 0.01, batch="sequential", reduction="sum")
    grads = draw(600, 3, seed=2)
    (made(x) * grads).sum().backward()
    optimizer.step()
    found = reference.dgd(start, x.numpy(), grads.numpy(), 0.01, "sequential")
    np.testing.assert_allclose(made.weight.detach().numpy(), found, rtol=0, atol=1e-12)


@pytest.mark.spec("OPT-DGD-D2")
@pytest.mark.parametrize(("reduction", "sizes"), [("sum", [1, 1, 1, 1]), ("mean", [1, 3])], ids=["sum", "mean"])
@pytest.mark.parametrize("batch", ["mean", "sequential"])
def test_one_sample_has_one_reading_and_backward_passes_add_up(batch, reduction, sizes):
    """As a loop that accumulates has it, each loss is its share of the mean."""
    one, two, x, target = layer(), layer(), draw(4, 5, seed=1), draw(4, 3, seed=2)
    whole, parts = (attached(made, batch=batch, reduction=reduction) for made in (one, two))
    for _ in range(3):
        whole.zero_grad()
        parts.zero_grad()
        loss(one(x), target, reduction).backward()
        for a, b in zip(x.split(sizes), target.split(sizes), strict=True):
            share = len(a) / len(x) if reduction == "mean" else 1
            (share * loss(two(input=a), b, reduction)).backward()
        whole.step()
        parts.step()
    torch.testing.assert_close(one.weight, two.weight, rtol=1e-12, atol=1e-13)


@pytest.mark.spec("OPT-DGD-D1")
def test_the_printed_factor_is_exact_on_the_unit_sphere_alone():
    for length, close in ((1.0, True), (2.0, False)):
        made, g, lr = layer(), draw(3, seed=2), 0.3
        x = length * nn.functional.normalize(draw(5, seed=1), dim=0)
        start = made.weight.detach().clone()
        optimizer = attached(made, lr)
        (made(x[None]) * g).sum().backward()
        optimizer.step()
        c = lr / (1 + lr)
        printed = start - c * torch.outer(start @ x, x) - c * torch.outer(g, x)
        assert torch.allclose(printed, made.weight.detach(), rtol=0, atol=1e-12) == close


@pytest.mark.spec("OPT-DGD-D3")
def test_biases_descend_plainly_only_when_told_to():
    made = layer(bias=True)
    with pytest.raises(ConfigError, match="'bias'.*unattached='sgd'"):
        optimizer = DGD(made.named_parameters(), 0.1)
        optimizer.attach(made)
        made(draw(4, 5)).sum().backward()
        optimizer.step()
    start = made.bias.detach().clone()
    optimizer = attached(made, 0.1, unattached="sgd")
    optimizer.zero_grad()
    made(draw(4, 5)).sum().backward()
    optimizer.step()
    torch.testing.assert_close(made.bias.detach(), start - 0.4)


@pytest.mark.spec("OPT-DGD-D3")
def test_without_samples_it_refuses_and_changes_nothing():
    made = nn.Sequential(layer(), nn.Tanh(), layer(3, 2, seed=1))
    optimizer = DGD(made.named_parameters(), 0.1)
    made(draw(4, 5)).sum().backward()
    before = [p.detach().clone() for p in made.parameters()]
    with pytest.raises(ConfigError, match="'0.weight': call attach"):
        optimizer.step()
    optimizer.attach(made)
    with pytest.raises(ConfigError, match="0 passes seen by DGD do not make up the gradient"):
        optimizer.step()
    assert all(torch.equal(p, b) for p, b in zip(made.parameters(), before, strict=True))
    with pytest.raises(ConfigError, match="found no torch.nn.Linear"):
        optimizer.attach(nn.Tanh())


@pytest.mark.spec("OPT-DGD-D3")
@pytest.mark.parametrize("what", ["clipped", "kept", "module"])
def test_samples_must_make_up_the_gradient(what):
    made = layer()
    optimizer = attached(made)
    for _ in range(2):
        made(draw(4, 5)).sum().backward()
        if what == "module":
            made.zero_grad()
    if what == "clipped":
        made.weight.grad.mul_(0.5)
    if what == "module":
        made(draw(4, 5)).sum().backward()
    if what == "kept":  # two passes, both in the gradient and in the samples
        optimizer.step()
        return
    with pytest.raises(ConfigError, match="do not make up the gradient"):
        optimizer.step()


@pytest.mark.spec("OPT-DGD-D3")
def test_a_layer_used_twice_and_passes_without_gradient():
    made, x = layer(4, 4), draw(3, 4, seed=1)
    start = made.weight.detach().numpy().copy()
    optimizer = attached(made, reduction="sum")
    with torch.no_grad():
        made(x)
    middle = made(x)
    middle.retain_grad()
    (0.5 * made(middle).square().sum()).backward()
    inputs = np.concatenate([middle.detach().numpy(), x.numpy()])
    grads = np.concatenate([middle.detach().numpy() @ start.T, middle.grad.numpy()])
    optimizer.step()
    found = reference.dgd(start, inputs, grads, 0.1)
    np.testing.assert_allclose(made.weight.detach().numpy(), found, rtol=0, atol=1e-13)


@pytest.mark.spec("OPT-DGD-D3")
def test_samples_follow_a_gradient_that_is_a_multiple_of_them():
    """Clipped to a tenth, a step is that of a loss a tenth as large; what is no multiple is not."""
    one, two, x, target = layer(), layer(), draw(4, 5, seed=1), draw(4, 3, seed=2)
    clipped, small = attached(one, rescaled="follow"), attached(two)
    loss(one(x), target, "mean").backward()
    one.weight.grad.mul_(0.1)
    (0.1 * loss(two(x), target, "mean")).backward()
    clipped.step()
    small.step()
    torch.testing.assert_close(one.weight, two.weight, rtol=1e-12, atol=1e-13)
    one.weight.grad[0] *= 2
    with pytest.raises(ConfigError, match="do not make up the gradient"):
        clipped.step()


def test_maximize_and_removal_and_copies():
    one, two, x = layer(), layer(), draw(4, 5, seed=1)
    up, down = attached(one, maximize=True), attached(two)
    one(x).sum().backward()
    (-two(x).sum()).backward()
    up.step()
    down.step()
    assert torch.equal(one.weight, two.weight)
    copy = deepcopy(up)
    copy.zero_grad()
    copy.param_groups[0]["params"][0].grad = torch.ones(3, 5)
    with pytest.raises(ConfigError, match="0 passes"):
        copy.step()
    made = layer()
    optimizer = DGD(made.parameters(), 0.1)
    for handle in optimizer.attach(made):
        handle.remove()
    made(x).sum().backward()
    with pytest.raises(ConfigError, match="0 passes"):
        optimizer.step()


def test_zero_gradient_with_zero_answers_moves_nothing():
    made = layer()
    optimizer, start = attached(made), made.weight.detach().clone()
    (0 * made(torch.zeros(2, 5)).sum()).backward()
    optimizer.step()
    assert torch.equal(start, made.weight)


@pytest.mark.spec("OPT-BASE-V1")
@pytest.mark.parametrize("batch", ["mean", "sequential"])
def test_steps_differentiate(batch):
    x, target = draw(4, 5, seed=1), draw(4, 3, seed=2)

    def after(lr: torch.Tensor) -> torch.Tensor:
        made = layer()
        optimizer = DGD(made.parameters(), lr, batch=batch, differentiable=True, weight_decay=0.1)
        optimizer.attach(made)
        loss(made(x), target, "mean").backward()
        made.weight.requires_grad_(False)  # a leaf is written to
        optimizer.step()
        return made.weight

    assert torch.autograd.gradcheck(after, torch.tensor(0.1, requires_grad=True))


@pytest.mark.spec("OPT-DGD-D3")
def test_a_copy_of_a_layer_and_its_optimizer_is_attached():
    """It stepped by the gradient alone where `unattached` allows that."""
    made = layer()
    both, start = (made, attached(made, unattached="sgd")), made.weight.detach().clone()
    weights = []
    for each, optimizer in (deepcopy(both), both):
        each(draw(4, 5, seed=1)).sum().backward()
        optimizer.step()
        weights.append(each.weight.detach())
    assert torch.equal(*weights) and not torch.equal(weights[0], start)


@pytest.mark.spec("OPT-DGD-D3")
def test_samples_are_not_counted_twice():
    made = layer()
    optimizer = DGD(made.parameters(), 0.1)
    handles = optimizer.attach(made)
    with pytest.raises(ConfigError, match="attach would count samples twice"):
        optimizer.attach(nn.Sequential(made))
    for handle in handles:
        handle.remove()
    optimizer.attach(made)
    made(draw(4, 5, seed=1)).sum().backward()
    optimizer.step()


@pytest.mark.spec("OPT-DGD-D3")
@pytest.mark.parametrize("copied", [deepcopy, lambda each: pickle.loads(pickle.dumps(each))])
def test_a_copy_of_a_layer_alone_keeps_no_samples(copied):
    """Neither for the optimiser of the layer it comes from nor for nobody, which would be a leak."""
    gc.freeze()  # what is there already is not counted below
    made = layer()
    optimizer, x = attached(made), draw(4, 5, seed=1)
    made(x).sum().backward()
    alone = copied(made)
    before = sum(type(each) is Samples for each in gc.get_objects())
    for _ in range(3):
        alone(x).sum().backward()
    del made
    assert sum(type(each) is Samples for each in gc.get_objects()) == before > 0
    gc.unfreeze()
    optimizer.step()
    own = attached(alone)
    alone.zero_grad()
    alone(x).sum().backward()
    own.step()
    assert torch.equal(alone.weight, optimizer.param_groups[0]["params"][0])


@pytest.mark.spec("OPT-DGD-D3")
def test_copies_of_an_optimizer_keep_the_multiples_of_a_gradient():
    made = layer()
    optimizer = attached(made, rescaled="follow")
    made(draw(4, 5)).sum().backward()
    made.weight.grad.mul_(0.5)
    optimizer.step()
    copy = pickle.loads(pickle.dumps(optimizer))
    assert [float(scale) for scale in copy._scales.values()] == [pytest.approx(0.5)]
