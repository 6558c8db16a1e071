"""titans-pytorch's `NeuralMemory` against `memory_scan`, in float64 and to rounding.

With norms and residuals off and the loss 1/2 |M(k) - v|^2 it computes Titans: exactly with chunks
and batches of one token, with gradients frozen at the start of a batch otherwise, and with one step
per chunk where chunks are longer.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hecate import Gates, MemoryConfig, memory_scan, structure
from hecate.errors import install_line
from tests.oracle import peers

pytestmark = [
    pytest.mark.oracle,
    pytest.mark.skipif(
        not peers.installed("titans-pytorch"), reason=f"titans-pytorch is not installed: {install_line('oracle')}"
    ),
    # Its dependencies script and annotate in ways that this torch deprecates.
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
]

BATCH, LENGTH, HEADS, WIDTH = 2, 12, 2, 4


def inputs() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    lead = (BATCH, LENGTH, HEADS)
    q, k, v = (torch.randn(*lead, WIDTH, generator=generator) for _ in range(3))
    lr, retain, momentum = (torch.rand(lead, generator=generator) for _ in range(3))
    return [q, k, v, 0.02 + 0.2 * lr, 0.5 + 0.4 * retain, 0.1 + 0.8 * momentum]


def weights(depth: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    if depth == 1:
        return {"weight": torch.randn(HEADS, WIDTH, WIDTH, generator=generator)}
    deep = structure.MLP(layers=depth, expansion=2)
    return deep.init(WIDTH, WIDTH, heads=HEADS, generator=generator, dtype=torch.float64)


def agrees(peer: peers.Titans, config: MemoryConfig, engine: str, given: list[Tensor]) -> None:
    """Outputs, last weights, and gradients of all inputs and starting weights."""
    start = weights(peer.depth)
    module = peer.build(WIDTH)

    def ours(q, k, v, lr, retain, momentum, **initial):
        kept = retain ** (1 / peer.chunk)
        gates = Gates(lr, kept, momentum)
        y, state = memory_scan(config, q, k, v, gates, initial=initial, engine=engine)
        return y, state.memory

    def theirs(*tensors, **initial):
        return peer.run(module, *tensors, **initial)

    found = []
    for run in (ours, theirs):
        leaves = [item.clone().requires_grad_() for item in given]
        initial = {name: item.clone().requires_grad_() for name, item in start.items()}
        y, last = run(*leaves, **initial)
        cotangent = torch.randn(y.shape, generator=torch.Generator().manual_seed(2))
        held = [*leaves, *initial.values()]
        if peer.chunk > 1:  # a chunk's gate is read at its tokens in different ways
            held = [*leaves[:4], *initial.values()]
        found.append([y, *last.values(), *torch.autograd.grad(y, held, cotangent)])
    for a, b in zip(*found, strict=True):
        assert b.norm() > 1e-3
        assert (a - b).norm() <= 1e-10 * b.norm()


@pytest.mark.parametrize("engine", ["sequential", "parallel", "compiled"])
def test_one_linear_layer_token_by_token(engine: str) -> None:
    config = MemoryConfig(retention="decay", algorithm="momentum", state_dtype="float64")
    agrees(peers.Titans(depth=1), config, engine, inputs())


@pytest.mark.parametrize(("engine", "batch"), [("sequential", 1), ("sequential", 4), ("chunk", 4)])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_gradients_frozen_at_the_start_of_a_batch(depth: int, engine: str, batch: int) -> None:
    peer = peers.Titans(depth=depth, expansion=2.0, batch=batch)
    agrees(peer, _frozen(depth, batch, "token"), engine, inputs())


@pytest.mark.parametrize("engine", ["sequential", "chunk"])
@pytest.mark.parametrize("depth", [1, 2])
def test_one_step_per_chunk(engine: str, depth: int) -> None:
    *given, retain, momentum = inputs()
    per_chunk = [gate[:, ::4].repeat_interleave(4, 1) for gate in (retain, momentum)]
    peer = peers.Titans(depth=depth, expansion=2.0, chunk=4, batch=4)
    agrees(peer, _frozen(depth, 4, "chunk"), engine, [*given, *per_chunk])


def _frozen(depth: int, chunk: int, commit: str) -> MemoryConfig:
    deep = {"kind": "mlp", "layers": depth, "expansion": 2, "activation": "gelu"}
    return MemoryConfig.model_validate(
        {
            "structure": "matrix" if depth == 1 else deep,
            "retention": {"kind": "decay", "towards": "zero"},
            "algorithm": "momentum",
            "chunk": chunk,
            "commit": commit,
            "state_dtype": "float64",
        }
    )
