"""fla-core's plain torch references against `memory_scan`: outputs, final states, gradients.

The references compute in float32 whatever they are given. A recurrence over T tokens with terms of
order 1 collects at most T roundings of 2^-24 per product, and an output passes through a handful of
products: 16 T 2^-24 relative to the norm bounds it, for outputs and, twice that, for gradients,
which pass through the recurrence twice. The chunked delta rule keeps float64 and is held to 1e-10.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from hecate import Gates, MemoryConfig, memory_scan, named_rule
from hecate.errors import install_line
from tests.oracle import peers

pytestmark = [
    pytest.mark.oracle,
    pytest.mark.skipif(
        not (peers.installed("fla-core") and peers.installed("einops")),
        reason=f"fla-core is not installed: {install_line('oracle')}",
    ),
]

BATCH, LENGTH, HEADS, KEYS, VALUES = 2, 64, 2, 8, 6
FLOAT32 = 16 * LENGTH * 2.0**-24
ENGINES = ["sequential", "parallel", "compiled"]
Reference = Callable[..., tuple[Tensor, Tensor | None]]


def heads_first(function: Callable[..., Any], **options: Any) -> Reference:
    """A reference on `[B, H, T, ...]`, called with `[B, T, H, ...]`."""

    def run(*inputs: Tensor) -> tuple[Tensor, Tensor | None]:
        found = function(*(item.transpose(1, 2) for item in inputs), **options)
        y, state = found if isinstance(found, tuple) else (found, None)
        return y.transpose(1, 2), state

    return run


def linear(q, k, v):
    return peers.fla("linear_attn").naive_recurrent_linear_attn(q, k, v, output_final_state=True)


def linear_chunked(q, k, v):
    return peers.fla("linear_attn").naive_chunk_linear_attn(q, k, v), None


def normalised(q, k, v):
    y, (state, _) = peers.fla("linear_attn").naive_recurrent_linear_attn(
        *(torch.nn.functional.elu(item) + 1 for item in (q, k)), v, scale=1.0, output_final_state=True, normalize=True
    )
    return y, state


def delta(q, k, v, lr):
    return heads_first(peers.fla("delta_rule").delta_rule_recurrence)(q, k, v, lr)


def delta_chunked(q, k, v, lr):
    return heads_first(peers.fla("delta_rule").delta_rule_chunkwise)(q, k, v, lr)


def longhorn(q, k, v, lr):
    return delta(q, k, v, lr / (1 + lr * k.square().sum(-1)))


def gated(function: str, *, lr_first: bool) -> Reference:
    def run(q, k, v, lr, retain):
        gates = (lr, retain.log()) if lr_first else (retain.log(), lr)
        return getattr(peers.fla("gated_delta_rule"), function)(q, k, v, *gates, output_final_state=True)

    return run


def product(q, k, v, lr, retain):
    reference = peers.fla("gated_delta_product").naive_recurrent_gated_delta_product
    scale = q.shape[-1] ** -0.5
    return reference(q, k, v, retain.log(), lr, scale, output_final_state=True)


def kda(function: str) -> Reference:
    def run(q, k, v, lr, retain):
        return getattr(peers.fla("kda"), function)(q, k, v, retain.log(), lr, output_final_state=True)

    return run


def gla(q, k, v, retain):
    return peers.fla("gla").naive_recurrent_gla(q, k, v, retain.log(), output_final_state=True)


def simple_gla(function: str) -> Reference:
    def run(q, k, v, retain):
        options = {} if "parallel" in function else {"output_final_state": True}
        y, state = getattr(peers.fla("simple_gla"), function)(q, k, v, retain.log(), **options)
        return y, state if options else None

    return run


def retention(q, k, v):
    return heads_first(peers.fla("retention").naive_retention)(q, k, v)


def momentum(function: str, **options: Any) -> Reference:
    """Their M is our -S. Their chunks divide by products of momentum: short ones."""

    def run(q, k, v, lr, retain, momentum):
        y, state = getattr(peers.fla("momentum_delta_rule"), function)(
            q=q,
            k=k,
            v=v,
            p=k,
            log_alpha=retain.log(),
            log_mu=momentum.log(),
            beta=torch.ones_like(lr),
            eta=lr,
            output_final_state=True,
            **options,
        )
        return y, state[0]

    return run


SCALED = {"query_scale": "key_dim"}
CASES: dict[str, tuple[dict[str, Any], Reference, str]] = {
    # name: config, reference, gates in its order
    "linear": ({"bias": "dot", **SCALED}, linear, ""),
    "linear-chunked": ({"bias": "dot", **SCALED}, linear_chunked, ""),
    "linear-normalised": ({"bias": "dot", "feature_map": "elu", "normalizer": "sum"}, normalised, ""),
    "delta": (SCALED, delta, "l"),
    "delta-chunked": (SCALED, delta_chunked, "l"),
    "longhorn": ({"step": "implicit", **SCALED}, longhorn, "l"),
    "gated-delta": (
        {"retention": "decay", "decay_order": "before_gradient", **SCALED},
        gated("naive_recurrent_gated_delta_rule", lr_first=True),
        "lr",
    ),
    "gated-delta-chunked": (
        {"retention": "decay", "decay_order": "before_gradient", **SCALED},
        gated("naive_chunk_gated_delta_rule", lr_first=False),
        "lr",
    ),
    "gated-delta-product": ({"retention": "decay", "decay_order": "before_gradient", **SCALED}, product, "lr"),
    "kda": ({"retention": "decay", "decay_order": "before_gradient", **SCALED}, kda("naive_recurrent_kda"), "lc"),
    "kda-chunked": ({"retention": "decay", "decay_order": "before_gradient", **SCALED}, kda("naive_chunk_kda"), "lc"),
    "gla": ({"bias": "dot", "retention": "decay", **SCALED}, gla, "c"),
    "simple-gla": ({"bias": "dot", "retention": "decay", **SCALED}, simple_gla("naive_recurrent_simple_gla"), "r"),
    "simple-gla-chunked": ({"bias": "dot", "retention": "decay", **SCALED}, simple_gla("naive_chunk_simple_gla"), "r"),
    "simple-gla-parallel": (
        {"bias": "dot", "retention": "decay", **SCALED},
        simple_gla("naive_parallel_simple_gla"),
        "r",
    ),
    "momentum": (
        {"retention": "decay", "algorithm": "momentum", **SCALED},
        momentum("recurrent_momentum_delta_rule_ref"),
        "lrm",
    ),
    "momentum-chunked": (
        {"retention": "decay", "algorithm": "momentum", **SCALED},
        momentum("chunk_momentum_delta_rule_ref", chunk_size=8),
        "lrm",
    ),
}


def inputs_of(gates: str) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    lead = (BATCH, LENGTH, HEADS)
    q, k = (torch.nn.functional.normalize(torch.randn(*lead, KEYS, generator=generator), dim=-1) for _ in range(2))
    v = torch.randn(*lead, VALUES, generator=generator)
    made = {
        "l": 0.1 + 0.8 * torch.rand(lead, generator=generator),
        "r": 0.8 + 0.2 * torch.rand(lead, generator=generator),
        "c": 0.8 + 0.2 * torch.rand(*lead, KEYS, generator=generator),
        "m": 0.1 + 0.8 * torch.rand(lead, generator=generator),
    }
    return [q, k, v, *(made[name] for name in gates)]


def close(ours: Tensor, theirs: Tensor, bound: float, name: str) -> None:
    assert theirs.norm() > 1e-2, name
    error = float((ours - theirs).detach().norm() / theirs.detach().norm())
    assert error < bound, f"{name}: {error:.1e} >= {bound:.1e}"


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", list(CASES))
def test_agrees_with_the_reference(name: str, engine: str) -> None:
    fields, reference, gates = CASES[name]
    config = MemoryConfig.model_validate({"state_dtype": "float64", **fields})
    fixed = Gates(lr=None if "l" in gates else 1.0)
    names = {"l": "lr", "r": "retain", "c": "retain", "m": "momentum"}
    bound = 1e-10 if name == "delta-chunked" else FLOAT32

    def results(run: Callable[..., tuple[Tensor, Tensor | None]]) -> list[Tensor | None]:
        leaves = [item.clone().requires_grad_() for item in inputs_of(gates)]
        y, state = run(*leaves)
        cotangent = torch.randn(y.shape, generator=torch.Generator().manual_seed(1))
        return [y, state, *torch.autograd.grad(y, leaves, cotangent.to(y.dtype))]

    def ours(q, k, v, *given):
        chosen = {names[letter]: gate for letter, gate in zip(gates, given, strict=True)}
        y, state = memory_scan(config, q, k, v, fixed._replace(**chosen), engine=engine)
        return y, state.memory["weight"].mT

    labels = ["y", "state", "q", "k", "v", *gates]
    for label, a, b in zip(labels, results(ours), results(reference), strict=True):
        if b is not None:
            close(a, b, bound if label in ("y", "state") else 2 * bound, label)


@pytest.mark.parametrize("engine", ENGINES)
def test_retention_agrees_with_fixed_decays_per_head(engine: str) -> None:
    config = named_rule("retnet").model_copy(update={"state_dtype": "float64"})
    q, k, v = inputs_of("")
    decays = 1 - torch.pow(2.0, -5 - torch.arange(HEADS, dtype=torch.float64))
    retain = decays.expand(BATCH, LENGTH, HEADS)
    y, _ = memory_scan(config, q, k, v, Gates(lr=1.0, retain=retain), engine=engine)
    close(y, retention(q, k, v)[0], FLOAT32, "y")


def test_a_changed_convention_is_seen() -> None:
    """The bounds are tight enough to tell gated delta from decay beside the step."""
    q, k, v, lr, retain = inputs_of("lr")
    config = MemoryConfig.model_validate({"retention": "decay", **SCALED})
    y, _ = memory_scan(config, q, k, v, Gates(lr, retain))
    theirs, _ = CASES["gated-delta"][1](q, k, v, lr, retain)
    with pytest.raises(AssertionError, match="y"):
        close(y, theirs, FLOAT32, "y")
