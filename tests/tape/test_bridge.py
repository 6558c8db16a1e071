"""The bridge to autograd, inside every transformation that torch offers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hecate.errors import ConfigError
from hecate.tape import Block, Run, Tensors, differentiate
from tests.tape.tape_blocks import APPLY, MODES, apply_forward, apply_vjp, checkpointed, layer, plain, relative, through


@pytest.mark.spec("TAPE-BRIDGE-I1")
@pytest.mark.parametrize("program", [plain, checkpointed])
def test_tape_and_torch_agree(program, point):
    results = []
    for mode in ("tape", "torch"):
        y = through(program, mode)(*point)
        first = torch.autograd.grad(y.sin().sum(), point, create_graph=True)
        second = torch.autograd.grad(sum(item.square().sum() for item in first), point)
        results.append((y, *first, *second))
    for mine, theirs in zip(*results, strict=True):
        assert relative(mine, theirs) < 1e-12


@pytest.mark.spec("TAPE-BRIDGE-I2")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("program", [plain, checkpointed])
def test_gradcheck(program, mode, point):
    f = through(program, mode)
    assert torch.autograd.gradcheck(f, point, check_batched_grad=True, fast_mode=False)
    assert torch.autograd.gradgradcheck(f, point, check_batched_grad=True, fast_mode=True)


@pytest.mark.spec("TAPE-BRIDGE-I2")
def test_func_grad_and_vmap_give_gradients_per_sample(point):
    def loss(matrix: Tensor, x: Tensor) -> Tensor:
        return through(checkpointed)(matrix, x).square().sum()

    together = torch.func.grad(loss, argnums=(0, 1))(*point)
    per_row = torch.func.vmap(torch.func.grad(loss, argnums=(0, 1)))(*point)
    shared = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(point[0][0], point[1])
    autograd = torch.autograd.grad(loss(*point), point)
    for a, b, c in zip(together, per_row, autograd, strict=True):
        assert relative(a, c) < 1e-12 and relative(b, c) < 1e-12
    for row in range(2):
        alone = torch.func.grad(loss)(point[0][0], point[1][row])
        assert relative(shared[row], alone) < 1e-12


@pytest.mark.spec("TAPE-BRIDGE-I2")
def test_jacrev_of_jacrev_equals_autograd_hessian(point):
    matrix, x = point[0][0].detach(), point[1][0].detach()
    hessian = torch.func.jacrev(torch.func.jacrev(lambda x: through(layer)(matrix, x)))(x)
    rows = [
        torch.autograd.functional.hessian(lambda x, row=row: through(layer, "torch")(matrix, x)[row], x)
        for row in range(3)
    ]
    assert relative(hessian, torch.stack(rows)) < 1e-12


@pytest.mark.spec("TAPE-BRIDGE-I2")
@pytest.mark.parametrize("mode", MODES)
def test_compile_in_one_graph(mode, point):
    f = through(checkpointed, mode)
    compiled = torch.compile(f, backend="aot_eager", fullgraph=True)
    got = torch.autograd.grad(compiled(*point).square().sum(), point)
    expected = torch.autograd.grad(f(*point).square().sum(), point)
    torch.compiler.reset()
    for mine, theirs in zip(got, expected, strict=True):
        assert relative(mine, theirs) < 1e-12


def test_forward_mode_belongs_to_torch(point):
    matrix, x = (item.detach() for item in point)
    way = torch.ones_like(x)
    jacobian = torch.func.jacrev(lambda x: through(plain)(matrix, x).sum(0))(x)
    for mode in ("torch", "auto"):
        _, slope = torch.func.jvp(lambda x, mode=mode: through(plain, mode)(matrix, x), (x,), (way,))
        torch.testing.assert_close(slope.sum(0), (jacobian * way).sum((-2, -1)))
    with pytest.raises(ConfigError, match="forward mode .* autodiff='tape'"):
        torch.func.jvp(lambda x: through(plain, "tape")(matrix, x), (x,), (way,))


@pytest.mark.spec("TAPE-BRIDGE-I4")
@pytest.mark.parametrize("mode", MODES)
def test_autocast_does_not_reach_inside(mode, point):
    seen = []

    def forward(matrix: Tensor, x: Tensor) -> tuple[Tensors, tuple[Tensor, Tensor]]:
        (y,), residuals = apply_forward(matrix, x)
        seen.append(y.dtype)
        return (y,), residuals

    def vjp(residuals: tuple[Tensor, Tensor], g: Tensor) -> Tensors:
        grads = apply_vjp(residuals, g)
        seen.append(grads[1].dtype)
        return grads

    matrix, x = (item.detach().float().requires_grad_() for item in point)
    island = Block("island", forward, vjp)
    clear = torch.autograd.grad(through(lambda run, *i: run(island, *i), mode)(matrix, x).sum(), matrix)
    with torch.autocast(x.device.type, dtype=torch.bfloat16):
        assert (matrix @ x.unsqueeze(-1)).dtype == torch.bfloat16
        y = through(lambda run, *i: run(island, *i), mode)(matrix, x)
        if mode != "torch":
            inside = torch.autograd.grad(y.sum(), matrix, retain_graph=True)
            assert torch.equal(inside[0], clear[0])
    assert torch.equal(torch.autograd.grad(y.sum(), matrix)[0], clear[0])
    assert set(seen) == {torch.float32}


@pytest.mark.parametrize("mode", MODES)
def test_none_integer_and_constant_inputs(mode, point):
    matrix, x = point
    pick = Block(
        "pick",
        lambda x, index, bias: ((x[..., index], index + 1, None), (x.shape, index)),
        lambda r, g, _: (torch.zeros(r[0]).index_add(-1, r[1], g), None, None),
    )

    def program(run: Run, matrix: Tensor, x: Tensor, index: Tensor, bias: Tensor | None) -> Tensors:
        (y,) = run(APPLY, matrix, x)
        return run(pick, y, index, bias)

    index = torch.tensor([2, 0, 2])
    y, after, none = differentiate(program, (matrix, x.detach(), index, None), mode)
    assert y.requires_grad and not after.requires_grad and none is None
    assert after.tolist() == [3, 1, 3]
    (got,) = torch.autograd.grad(y.sum(), matrix)
    weights = torch.tensor([1.0, 0.0, 2.0])
    torch.testing.assert_close(got, weights[:, None] * x.detach()[:, None, :])
    quiet = differentiate(program, (matrix.detach(), x.detach(), index, None), mode)[0]
    assert not quiet.requires_grad


@pytest.mark.spec("TAPE-BRIDGE-I5")
def test_inputs_changed_before_backward_are_an_error(point):
    matrix, x = point
    copy = x.detach().clone()
    y = through(plain)(matrix, copy)
    copy.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_unknown_autodiff_is_refused(point):
    with pytest.raises(ConfigError, match=r"autodiff must be one of .* got 'tpae'"):
        differentiate(plain, point, "tpae")


@pytest.mark.gpu
def test_autocast_island_follows_the_work_rather_than_the_index(point):
    matrix, x = (item.detach().float() for item in point)
    index = torch.tensor([0])  # on the CPU, and first

    def program(run: Run, index: Tensor, matrix: Tensor, x: Tensor) -> Tensors:
        return run(APPLY, matrix, x)

    with torch.autocast("cuda", dtype=torch.bfloat16):
        assert differentiate(program, (index, matrix, x))[0].dtype == torch.float32
