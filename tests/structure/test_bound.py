"""The bound of the curvature that a step is normalised by: against Jacobians, its derivative, its row sums."""

from __future__ import annotations

import pytest
import torch

from hecate import MemoryConfig, structure
from hecate.errors import ConfigError
from hecate.structure import Layered
from hecate.structure.bound import FLOOR, KEYS, lengths, unbounded
from hecate.structure.graph import INPUT, Act, Add, Apply, Graph, Linear, evaluate

N, C, K, WIDTH = 2, 5, 4, 4
STRUCTURES = {
    "matrix": structure.Matrix(),
    "two layers": structure.MLP(activation="tanh"),
    "three layers": structure.MLP(layers=3, activation="silu", bias=True),
    "norm, one layer": structure.MLP(layers=1, residual=True, norm="layer"),
    "norm, bias": structure.MLP(residual=True, norm="layer", bias=True),
    "relu": structure.MLP(activation="relu"),
    "gated": structure.GatedMLP(),
}
CASES = pytest.mark.parametrize("made", STRUCTURES.values(), ids=STRUCTURES)


def drawn(made: Layered, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    source = torch.Generator().manual_seed(seed)

    def draw(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return (scale * torch.randn(*shape, generator=source, dtype=torch.float64)).requires_grad_()

    weights = [draw(N, *shape, scale=1.5 * shape[-1] ** -0.5) for shape in made.shapes(WIDTH, WIDTH).values()]
    keys = torch.nn.functional.pad(draw(N, K, WIDTH).detach(), (0, 1), value=1.0)
    keys[0, 0, -1] = 0  # one that there was not
    return draw(N, C, WIDTH), keys.requires_grad_(), weights


def jacobian(made: Layered, weights: list[torch.Tensor], p: torch.Tensor) -> torch.Tensor:
    """d pred / d weights `[V, all]` of one key `[P]`, by autograd."""

    def pred(*given: torch.Tensor) -> torch.Tensor:
        return evaluate(made.graph(), [w.unsqueeze(0) for w in given], p[None, None])[-1][0, 0]

    found = torch.autograd.functional.jacobian(pred, tuple(w.detach() for w in weights))
    return torch.cat([item.reshape(WIDTH, -1) for item in found], 1)


@pytest.mark.spec("STR-BOUND-D1")
@CASES
def test_a_token_alone_is_bounded_by_its_jacobian(made: Layered):
    p, keys, weights = drawn(made)
    (c,), _ = lengths(made.graph(), 1).forward(p[:, :1], None, keys[:, :0], *weights)
    for n in range(N):
        j = jacobian(made, [w[n] for w in weights], p[n, 0])
        largest, bound = torch.linalg.eigvalsh(j @ j.T)[-1].item(), 1 / c[n, 0].item() - FLOOR
        assert largest <= bound * (1 + 1e-9)
        if len(weights) == 1 and made.kind == "matrix":
            assert bound == pytest.approx(largest, rel=1e-5)


@pytest.mark.spec("STR-BOUND-D1")
@CASES
def test_row_sums_bound_what_a_chunk_does(made: Layered):
    """Sums of both directions make whole rows of the Gram matrix of all J_t, whose largest eigenvalue is below the
    largest of them."""
    p, keys, weights = drawn(made)
    empty, block = torch.zeros_like(keys), lengths(made.graph(), 1)
    forth, back = (block.forward(x, None, empty, *weights)[0][0] for x in (p, p.flip(1)))
    alone = torch.cat([block.forward(p[:, t : t + 1], None, keys[:, :0], *weights)[0][0] for t in range(C)], 1)
    whole = 1 / forth + 1 / back.flip(1) - 1 / alone - FLOOR
    for n in range(N):
        j = torch.cat([jacobian(made, [w[n] for w in weights], p[n, t]) for t in range(C)])
        assert torch.linalg.eigvalsh(j @ j.T)[-1] <= whole[n].max() * (1 + 1e-5)


@CASES
def test_derivative_by_hand(made: Layered):
    p, keys, weights = drawn(made, 1)
    write = torch.tensor([[1, 0, 1, 1, 0], [1, 1, 1, 0, 1]], dtype=torch.bool)
    for mask, before in ((None, keys), (None, keys[:, :0]), (write, keys)):
        block, tokens = lengths(made.graph(), 2), p if before.shape[1] else p[:, :1]
        (c,), residuals = block.forward(tokens, mask, before, *weights)
        g = torch.randn(c.shape, generator=torch.Generator().manual_seed(2), dtype=c.dtype)
        gp, _, gkeys, *gweights = block.vjp(residuals, g)
        found = torch.autograd.grad((c * g).sum(), (p, *weights, keys), allow_unused=True)
        assert found[0].abs().max() > 1e-4
        mine = (torch.nn.functional.pad(gp, (0, 0, 0, C - gp.shape[1])), *gweights, gkeys)
        for own, wanted in zip(mine, found, strict=True):
            if wanted is not None and own is not None:
                assert (own - wanted).abs().max() <= 1e-10 * wanted.abs().max()
    smooth = made.kind != "mlp" or made.activation != "relu"
    if smooth:
        few = [item.detach()[:, :2].clone().requires_grad_() for item in (p,)]

        def scalar(x: torch.Tensor, *ws: torch.Tensor) -> torch.Tensor:
            return lengths(made.graph(), 1).forward(x, None, keys.detach(), *ws)[0][0]

        assert torch.autograd.gradcheck(scalar, (*few, *weights), atol=1e-7, fast_mode=True)


def test_which_tokens_count():
    """Against a loop over pairs: the last K that were written and itself."""
    made = STRUCTURES["two layers"]
    p, keys, weights = drawn(made)
    write = torch.tensor([[1, 0, 1, 1, 0], [1, 1, 1, 0, 1]], dtype=torch.bool)

    def alone(n: int, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        own = [w[n] for w in weights]
        h = torch.tanh(own[0] @ x)
        b = ((1 - h**2) ** 2 * own[1].square().sum(0)).sum()
        return (b + 1e-6).sqrt() * x, (torch.tensor(1.0) + 1e-6).sqrt() * h

    for mask in (None, write):
        (c,), _ = lengths(made.graph(), 3).forward(p, mask, keys, *weights)
        for n in range(N):
            stream = [alone(n, x[:-1]) if x[-1] > 0 else None for x in keys[n]]
            for t in range(C):
                own = alone(n, p[n, t])
                near = [item for item in stream[-K:] if item is not None]
                total = sum((a @ b).abs() for other in (*near, own) for a, b in zip(own, other, strict=True))
                assert c[n, t].item() == pytest.approx(1 / (3 * (FLOOR + total.item())), rel=1e-6)
                if mask is None or mask[n, t]:
                    stream.append(own)


def test_last_keys():
    p, keys, _ = drawn(STRUCTURES["matrix"])
    write = torch.tensor([[1, 0, 1, 1, 1], [0, 0, 0, 0, 1]], dtype=torch.bool)
    (new,), residuals = KEYS.forward(keys, p, write)
    assert torch.equal(new[0, :, :-1], p[0, [0, 2, 3, 4]])
    assert torch.equal(new[1], torch.cat([keys[1, 1:], torch.nn.functional.pad(p[1, 4:], (0, 1), value=1.0)]))
    g = torch.randn_like(new)
    gkeys, gp, _ = KEYS.vjp(residuals, g)
    wanted = torch.autograd.grad((new * g).sum(), (keys, p))
    assert torch.equal(gkeys, wanted[0])
    assert torch.equal(gp, wanted[1])


def test_what_has_no_bound_is_refused():
    class Odd(Act):
        name = "odd"
        bound = property(doc="none")

    twice = Graph((Linear(0, INPUT), Apply(Act("tanh"), (1,)), Linear(1, 2), Linear(2, 2), Apply(Add(), (3, 4))))
    assert "two nodes use" in unbounded(twice)
    for fields, sentence in (
        ({"algorithm": {"kind": "omega", "window": 2}}, "descends a loss of its own"),
        ({"chunk": 4, "decay_order": "before_gradient", "retention": "decay"}, "weights of its own"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            MemoryConfig(structure="mlp", step="normalized", **fields)
