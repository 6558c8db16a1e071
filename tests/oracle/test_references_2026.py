"""fla-core's plain programs of the rules of 2025 and 2026 against our references.

They compute in float32 whatever they are given; here every type that they name is float64.
"""

from __future__ import annotations

import functools
import importlib.metadata
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hecate.errors import install_line
from tests.oracle import peers
from tests.reference import gates_2026 as heads
from tests.reference import papers_2025 as older
from tests.reference import papers_2026 as newer
from tests.reference.general_write import general_write
from tests.rule.draws import KEYS, VALUES, Array, Draw, one, same

pytestmark = [
    pytest.mark.oracle,
    pytest.mark.skipif(
        not (peers.installed("fla-core") and peers.installed("einops")),
        reason=f"fla-core is not installed: {install_line('oracle')}",
    ),
]

Pairs = Iterator[tuple[Any, Any]]


@functools.cache
def widened(operation: str) -> dict[str, Any]:
    path = importlib.metadata.distribution("fla-core").locate_file(f"fla/ops/{operation}/naive.py")
    source = Path(str(path)).read_text(encoding="utf-8").replace(".float()", ".double()")
    space: dict[str, Any] = {"__name__": "widened"}
    exec(compile(re.sub(r"torch\.float(32)?\b", "torch.float64", source), str(path), "exec"), space)  # its own source
    return space


def fla(operation: str, function: str, *inputs: Array, heads_first: bool = False, **options: Any) -> tuple[Array, ...]:
    """Outputs, and states with keys and values as here."""
    rows = [torch.as_tensor(np.ascontiguousarray(item))[None] for item in inputs]
    found = widened(operation)[function](
        *(item[:, None] if heads_first else item[:, :, None] for item in rows), **options
    )
    y, *states = found if isinstance(found, tuple) else (found,)
    y = y[0, 0] if heads_first else y[0, :, 0]
    return (y.numpy(), *(s[0, 0].T.numpy() for s in states if isinstance(s, torch.Tensor) and s.ndim == 4))


def fla_gated_delta_2(x: Draw) -> Pairs:
    gates = (np.log(x.channels), x.channels[::-1], x.value_channels)
    expected = newer.gated_delta_2(x.q, x.unit, x.v, x.channels, *gates[1:])
    for name in ("naive_recurrent_gdn2", "naive_chunk_gdn2"):
        yield fla("gdn2", name, x.q, x.unit, x.v, *gates, scale=1.0, output_final_state=True), expected


def fla_delta_product(x: Draw) -> Pairs:
    flat = x.ks.reshape(-1, KEYS) / 2, x.vs.reshape(-1, VALUES), np.log(x.keep), x.lrs.ravel()
    options = {"scale": 1.0, "num_householder": 3, "output_final_state": True}
    got = fla("gated_delta_product", "naive_recurrent_gated_delta_product", x.q, *flat, **options)
    yield got, older.gated_delta_product(x.q, x.ks / 2, x.vs, x.lrs, x.keep)


def fla_dplr(x: Draw) -> Pairs:
    a, b, w = 0.5 * x.unit_e, 0.5 * x.unit, x.channels
    expected, q = older.dplr(x.q, x.k, x.v, a, b, w), np.sqrt(KEYS) * x.q
    inputs = (q, x.k, x.v, a, b, np.log(w))
    yield fla("generalized_delta_rule/dplr", "dplr_recurrence", *inputs, heads_first=True), expected
    expected = older.dplr(x.q, x.k, x.v, a, b, np.ones_like(w))
    yield fla("generalized_delta_rule/iplr", "iplr_recurrence", *inputs[:5], heads_first=True), expected


def fla_comba(x: Draw) -> Pairs:
    inputs, options = (x.q, x.unit, x.v, 0.7 * x.unit), {"scale": 1.0, "output_final_state": True}
    got = fla("comba", "naive_recurrent_comba", *inputs, x.lr, np.log(x.keep), **options)
    yield got, older.comba(x.q, x.unit, x.v, x.keep, x.lr, 0.7)
    # Its chunked program reads the memory before the decay.
    got = fla("comba", "naive_chunk_comba", *inputs, np.log(x.keep), x.lr, **options)
    erase = np.broadcast_to(0.7 / x.keep[:, None, None], (x.length, 1, KEYS))
    yield got, general_write(x.q, *one(x.unit, x.v, x.lr), erase=erase, retain=x.keep[:, None])


def fla_preconditioned(x: Draw) -> Pairs:
    factor = newer.curvature(x.unit, x.gate, x.carry, center=-0.3)
    options = {"scale": 1.0, "output_final_state": True, "log_atk_scale": -0.3}
    inputs = (x.q, x.unit, x.v, np.log(x.gate), np.log(x.keep), x.carry, x.lr)
    got = fla("precond_gated_delta_rule", "naive_recurrent_precond_gated_delta_rule", *inputs, **options)
    yield got, newer.preconditioned_delta(x.unit_q, x.unit, x.v, factor, x.lr, x.keep)
    inputs = (x.q, x.unit, x.v, np.log(x.channels), np.log(x.gate), x.carry, x.lr)
    got = fla("precond_kda", "naive_recurrent_precond_kda", *inputs, **options)
    yield got, newer.preconditioned_delta(x.q, x.unit, x.v, factor, x.lr, x.channels)


def fla_mesa(x: Draw) -> Pairs:
    v, ridge = x.e, heads.mesa_ridge(x.q[0])
    program = widened("mesa_net")["naive_mesa_net_exact"]
    rows = [torch.as_tensor(item)[None, :, None] for item in (x.q, x.k, v, np.log(x.keep), x.lr)]
    y, h, g = program(*rows[:4], torch.as_tensor(ridge)[None], rows[4])
    yield (y[0, :, 0], g[0, 0].T, h[0, 0]), older.mesa(x.q, x.k, v, x.keep, x.lr, ridge)


def fla_momentum_delta(x: Draw) -> Pairs:
    alpha, mu, eta = x.keep, x.carry, 1 + x.gate
    inputs = (x.q, x.unit, x.v, np.log(alpha), np.log(mu), alpha[:, None] * x.unit, x.lr, eta)
    y, both = widened("momentum_delta_rule")["recurrent_momentum_delta_rule_ref"](
        *(torch.as_tensor(item)[None, :, None] for item in inputs), scale=1.0, output_final_state=True
    )
    expected = newer.momentum_delta(x.q, x.unit, x.v, alpha, x.lr, mu, eta)
    yield (y[0, :, 0], both[0, 0, 0].T, -both[1, 0, 0].T), expected


def fla_log_linear(x: Draw) -> Pairs:
    scale = heads.log_linear(x.rng.normal(size=(x.length, 5)), np.ones(5))
    got = fla("log_linear_attn", "naive_log_linear_attn", x.q, x.k, x.v, np.log(x.keep), scale)
    yield got, older.log_linear(x.q, x.k, x.v, x.keep, scale)[0]


def fla_slots(x: Draw) -> Pairs:
    slots = 2 * x.rng.normal(size=(x.length, 5))
    written, kept = heads.gsa(slots)
    inputs = (x.q, x.k, x.v)
    options = {"scale": 1.0, "heads_first": True}
    got = fla("gsa", "naive_recurrent_gsa", *inputs, written, np.log(kept), scale=1.0)
    yield got, older.gsa(x.q, x.k, x.v, written, kept)[0]
    yield fla("abc", "naive_recurrent_abc", *inputs, slots, **options)[0], older.abc(x.q, x.k, x.v, slots)
    root = np.sqrt(KEYS) * x.q
    got = fla("abc", "naive_cumsum_abc", root, x.k, x.v, slots, heads_first=True)
    yield got[0], older.abc(x.q, x.k, x.v, slots)


def fla_retention(x: Draw) -> Pairs:
    rows = [np.stack([item, item[::-1]]) for item in (x.q, x.k, x.v)]
    y = widened("retention")["naive_retention"](*(torch.as_tensor(item)[None] for item in rows))
    yield y[0], older.retention(*rows, heads.retnet(2))[0]


PROGRAMS = [
    fla_gated_delta_2,
    fla_delta_product,
    fla_dplr,
    fla_comba,
    fla_preconditioned,
    fla_mesa,
    fla_momentum_delta,
    fla_log_linear,
    fla_slots,
    fla_retention,
]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_fla(program):
    for got, expected in program(Draw()):
        same(got, expected)
