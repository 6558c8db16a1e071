"""Checks of the knobs a memory is made of: bias, retention, algorithm and structure."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hecate.rule import MemoryConfig
from hecate.structure import Structure
from hecate.testing.vjp import check_vjp, require

RTOL = 1e-10


def check_knobs(
    config: MemoryConfig, *, d: int = 3, width: int = 3, smooth: bool = True, generator: torch.Generator | None = None
) -> None:
    """Checks the derivatives and declared traits of bias, retention, algorithm and structure."""
    generator = generator or torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    def gate(*shape: int) -> Tensor:
        return 0.2 + 0.7 * torch.rand(*shape, dtype=torch.float64, generator=generator)

    def check(block: Any, *inputs: Tensor) -> None:
        check_vjp(block, inputs, second_order=smooth, generator=generator)

    n, d_phi = 4, config.feature_map.output_dim(d)
    _check_bias(config, draw(64, width), draw(64, width), draw(64, width))
    check(config.bias.block(), draw(n, width), draw(n, width))
    memory = tuple(draw(n, *shape) / shape[-1] ** 0.5 for shape in config.structure.shapes(d_phi, width).values())
    p, u = draw(n, d_phi), draw(n, width)
    check(config.structure.predict_block(), p, *memory)
    check(config.structure.pullback_block(), p, u, *memory)
    check(config.structure.gradient_block(config.bias.block()), p, draw(n, width), *memory)
    _check_structure(config, memory, p, u)

    def slots_of(weight: Tensor) -> list[Tensor]:
        """Slots as writes leave them: not every tensor is one (a mean of squares is >= 0)."""
        sizes = config.algorithm.slot_shapes(tuple(weight.shape[1:])).values()
        slots = [torch.zeros(n, *size, dtype=torch.float64) for size in sizes]
        for _ in range(2):
            _, *slots = config.algorithm.direction(draw(*weight.shape), gate(n), gate(n), *slots)
        return slots

    shape = memory[0].shape
    check(config.algorithm.block(), draw(*shape), gate(n), gate(n), *slots_of(memory[0]))
    gates = [gate(n)]
    if config.retention.uses_retain and config.structure.linear:
        gates.append(gate(n, shape[-1]))
    start, grads = config.retention.start, [0.3 * draw(*weight.shape) for weight in memory]
    slots = [slot for weight in memory for slot in slots_of(weight)]
    for retain in gates:
        check(config.retention.block(), start(draw(*shape)), draw(*shape), retain)
        moved = config.retention.step(start(draw(*shape)), draw(*shape), retain)
        check(config.retention.weights_block(), moved)
        states = [start(draw(*weight.shape)) for weight in memory]
        check(config.rule.step_block(), gate(n), retain, gate(n), *grads, *states, *slots)
        _check_retention(config, draw(*shape), draw(*shape), retain)


def _check_bias(config: MemoryConfig, pred: Tensor, target: Tensor, way: Tensor) -> None:
    bias, name = config.bias, f"bias.{config.bias.kind}"
    point = pred.clone().requires_grad_()
    loss = bias.loss(point, target)
    require(loss.shape == pred.shape[:-1], f"{name}: loss of shape {list(loss.shape)}")
    (true,) = torch.autograd.grad(loss.sum(), point)
    close(f"{name}: grad against autograd of loss", bias.grad(pred, target), true)
    other = way.roll(1, 0)
    left = (bias.grad_jvp(pred, target, way) * other).sum(-1)
    right = (bias.grad_jvp(pred, target, other) * way).sum(-1)
    close(f"{name}: the Hessian is not symmetric", left, right)
    if bias.curvature is not None:
        most = (bias.grad_jvp(pred, target, way) * way).sum(-1) / way.square().sum(-1)
        require(
            bool((most <= bias.curvature + 1e-12).all()),
            f"{name}: declared curvature {bias.curvature:g}, found {float(most.max()):g}",
        )


def _check_structure(config: MemoryConfig, memory: tuple[Tensor, ...], p: Tensor, u: Tensor) -> None:
    structure, name = config.structure, f"structure.{config.structure.kind}"
    whole, _ = structure.predict_vjp(memory, p, u)
    for got, expected in zip(structure.pullback(memory, p, u), whole, strict=True):
        close(f"{name}: pullback against predict_vjp", got, expected)
    if structure.linear:
        doubled = structure.predict(tuple(2 * weight for weight in memory), p)
        close(f"{name}: declared linear in the weights", doubled, 2 * structure.predict(memory, p))
        wanted = (p.shape[-1],) if structure.diagonal else (u.shape[-1], p.shape[-1])
        require(
            [tuple(weight.shape[1:]) for weight in memory] == [wanted],
            f"{name}: declared linear, needs one weight [V, P], or [P] if diagonal",
        )
    if structure.diagonal:
        check_diagonal(name, structure, memory, p)


def check_diagonal(name: str, structure: Structure, memory: tuple[Tensor, ...], p: Tensor) -> None:
    """Moves the first coordinate of weight and p, which must leave the others of pred."""
    moved = [torch.cat([2 * item[..., :1] + 1, item[..., 1:]], -1) for item in (*memory, p)]
    pred, other = structure.predict(memory, p), structure.predict(tuple(moved[:-1]), moved[-1])
    require(structure.linear, f"{name}: declared diagonal, which only a linear structure can be")
    require(
        torch.equal(pred[..., 1:], other[..., 1:]), f"{name}: declared diagonal, but coordinates of the prediction mix"
    )


def _check_retention(config: MemoryConfig, memory: Tensor, direction: Tensor, retain: Tensor) -> None:
    retention, name = config.retention, f"retention.{config.retention.kind}"
    same = torch.equal(retention.weights(memory), memory)
    require(same or retention.dual, f"{name}: `weights` is a function of a dual state not declared")
    require(
        not (retention.linear and retention.dual),
        f"{name}: declared linear, but what is carried is a dual state, which only the step can be "
        "linear in: declare it additive",
    )
    if not retention.additive:
        return
    kept = retention.step(memory, torch.zeros_like(direction), retain)
    both = retention.step(2 * memory, direction, retain)
    added = direction if retention.linear else retention.centred(direction, retain)
    declared = "linear, so a M + D" if retention.linear else "additive, so a X + D"
    close(f"{name}: declared {declared}", both, 2 * kept + added)
    whole, left = (retention.weights(kept + item) for item in (direction, added))
    close(f"{name}: `centred` leaves out what the memory sees", left, whole)


def close(what: str, got: Tensor, expected: Tensor, signal: float = 1.0) -> None:
    """Raises unless the error is within `RTOL` of the expected norm, or of 1e-3 `signal`."""
    error = float((got - expected).detach().norm())
    scale = max(float(expected.detach().norm()), 1e-3 * signal)
    if not error <= RTOL * scale:
        raise AssertionError(f"{what}: error {error:.3e} against a norm of {scale:.3e}")
