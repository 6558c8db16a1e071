"""Every map in a memory: the engine that `auto` picks agrees with the token loop."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hecate import Gates, MemoryConfig, memory_scan
from hecate.phi import ELU, ArcCosine, Compose, Identity, Linear, PerformerReLU, Polynomial
from hecate.phi.base import project, project_vjp
from tests.memories import close, same_state
from tests.phi.examples import examples, named

ALL = [*examples(), ArcCosine(order=0, num_features=8)]
FIRST = {instance.kind: instance for instance in reversed(ALL)}.values()


@pytest.mark.parametrize(
    ("instance", "bias"),
    [
        *((instance, ("dot", "l2")[at % 2]) for at, instance in enumerate(ALL)),
        *((instance, "dot") for instance in FIRST if ALL.index(instance) % 2),
    ],
    ids=lambda given: given if isinstance(given, str) else named(given),
)
def test_engines_agree(instance, bias):
    # Normalised features keep a delta rule stable; a sum normaliser needs a kernel >= 0.
    config = MemoryConfig(
        bias=bias,
        retention="decay",
        feature_map=instance,
        key_norm="l2",
        normalizer="sum" if bias == "dot" and instance.non_negative else "none",
        state_dtype="float64",
    )
    source = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 9, 2, d, generator=source) for d in (5, 5, 3))
    gates = Gates(0.5 * torch.rand(2, 9, 2, generator=source), torch.full((2, 9, 2), 0.9))
    params = instance.init(5, heads=2, generator=source, dtype=torch.float64)
    y, state = memory_scan(config, q, k, v, gates, phi_params=params)
    expected, final = memory_scan(config, q, k, v, gates, phi_params=params, engine="sequential")
    assert bool(y.isfinite().all()) and float(y.norm()) > 1e-3
    close(y, expected, 1e-10, "outputs")
    same_state(state, final, 1e-10)


@pytest.mark.parametrize(
    "instance",
    [
        ELU(),
        Identity(),
        PerformerReLU(num_features=7),
        Polynomial(degree=2, coefficients="learned"),
        Polynomial(degree=2),
        Compose(maps=(Linear(d_phi=6), ELU())),
    ],
    ids=named,
)
def test_autograd_through_a_scan_takes_the_derivative_by_hand(instance, monkeypatch):
    source = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 6, 2, 4, generator=source).double() / 2 for _ in range(3))
    gates = Gates(torch.full((2, 6, 2), 0.1, dtype=torch.float64))
    config = MemoryConfig(bias="l2", feature_map=instance, state_dtype="float64")
    drawn = instance.init(4, heads=2, generator=source, dtype=torch.float64)
    frozen, names = drawn["frozen"], [*drawn["learned"]]
    by_hand, calls = type(instance).vjp, []

    def counted(self, residuals, g):
        calls.append(self)
        return by_hand(self, residuals, g)

    monkeypatch.setattr(type(instance), "vjp", counted)

    def gradients(engine, autodiff):
        leaves = [item.clone().requires_grad_() for item in (q, k, *drawn["learned"].values())]
        params = {"learned": dict(zip(names, leaves[2:], strict=True)), "frozen": frozen}
        options = {"phi_params": params, "engine": engine, "autodiff": autodiff}
        y, _ = memory_scan(config, leaves[0], leaves[1], v, gates, **options)
        first = torch.autograd.grad(y.square().sum(), leaves, create_graph=True)
        second = torch.autograd.grad(sum(g.square().sum() for g in first), leaves)
        return *first, *second

    found, expected = gradients("parallel", "torch"), gradients("sequential", "tape")
    for index, (a, b) in enumerate(zip(found, expected, strict=True)):
        close(a, b, 1e-9, f"gradient {index}")
    calls.clear()
    y, _ = memory_scan(config, q.requires_grad_(), k.requires_grad_(), v, gates, phi_params=drawn)
    y.sum().backward()
    # Of keys and of queries; the identity is a view, which needs none.
    assert calls.count(instance) == (0 if isinstance(instance, Identity) else 2)


def test_a_projection_per_head_builds_no_matrix_per_token():
    source = torch.Generator().manual_seed(0)
    x, w = (torch.randn(shape, generator=source) for shape in ((50, 3, 4), (3, 4, 5)))
    largest = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            largest.extend(item.untyped_storage().nbytes() for item in tree_leaves(out))
            return out

    with Watch():
        y = project(x, w)
        gx, gw = project_vjp(x, w, y)
    assert max(largest) == y.nbytes
    close(y, torch.einsum("thd,hdp->thp", x, w), 1e-6, "product")
    close(gx, torch.einsum("thp,hdp->thd", y, w), 1e-6, "cotangent of x")
    close(gw, torch.einsum("thd,thp->hdp", x, y), 1e-6, "cotangent of w")
