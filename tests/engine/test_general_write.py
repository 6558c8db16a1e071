"""Keys that erase and keys that write, decay of value channels, several writes a token: against the numpy loop, and
the engines against each other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from hecate import Gates, MemoryConfig, memory_scan, memory_step
from hecate.engine.naive import naive
from hecate.errors import ConfigError, ShapeError
from hecate.rule import TokenGates
from tests.memories import close

T, P, V = 21, 4, 3
DOUBLE = torch.float64


def draw(writes: int, seed: int = 0) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)

    def uniform(*shape: int, low: float = 0.0, high: float = 1.0) -> Tensor:
        return low + (high - low) * torch.rand(shape, generator=g, dtype=DOUBLE)

    return {
        "q": torch.randn(T, P, generator=g, dtype=DOUBLE),
        "k": torch.randn(T, writes, P, generator=g, dtype=DOUBLE) / 2,
        "v": torch.randn(T, writes, V, generator=g, dtype=DOUBLE),
        "lr": uniform(T, writes),
        "erase": uniform(T, writes, P, high=1.5),
        "write": uniform(T, writes, P, low=-0.5, high=1.5),
        "retain": uniform(T, P, low=0.5),
        "retain_value": uniform(T, V, low=0.4),
        "momentum": uniform(T, high=0.8),
        "initial": torch.randn(V, P, generator=g, dtype=DOUBLE),
    }


def batched(x: Tensor, writes: int, per_write: bool) -> Tensor:
    """One sequence of one head; without the axis of writes where there is one."""
    x = x[:, 0] if per_write and writes == 1 else x
    return x[None].unsqueeze(3 if per_write and writes > 1 else 2)


def scanned(
    config: MemoryConfig, given: dict[str, Tensor], names: tuple[str, ...], **how: Any
) -> tuple[Tensor, Tensor]:
    writes = config.writes
    own = {name: batched(given[name], writes, name in ("lr", "erase", "write")) for name in ("lr", *names)}
    tokens = (batched(given[name], writes, name != "q") for name in ("q", "k", "v"))
    y, state = memory_scan(config, *tokens, Gates(**own), initial={"weight": given["initial"][None]}, **how)
    return y[0, :, 0], state.memory["weight"][0, 0]


def test_steps_splits_and_naive_agree_with_the_scan():
    config = MemoryConfig(retention="decay", decay_order="before_gradient", writes=3)
    names = ("erase", "write", "retain", "retain_value")
    given = draw(3)
    y, memory = scanned(config, given, names)
    own = {name: batched(given[name], 3, name in ("lr", "erase", "write")) for name in ("lr", *names)}
    q, k, v = (batched(given[name], 3, name != "q") for name in ("q", "k", "v"))
    state, outputs = None, []
    for t in range(T):
        gates = Gates(**{name: gate[:, t] for name, gate in own.items()})
        start = {"initial": {"weight": given["initial"][None]}} if state is None else {}
        answer, state = memory_step(config, q[:, t], k[:, t], v[:, t], gates, state=state, **start)
        outputs.append(answer[0, 0])
    close(torch.stack(outputs), y, 1e-13)
    close(state.memory["weight"][0, 0], memory, 1e-13)

    def rows(name: str, width: tuple[int, ...]) -> Tensor:  # one write after the other
        first = given[name].unsqueeze(1)
        return torch.cat([first, torch.ones(T, 2, *width, dtype=DOUBLE)], 1).flatten(0, 1)[None]

    p, w = ((given[gate] * given["k"]).flatten(0, 1)[None] for gate in ("erase", "write"))
    gates = TokenGates(given["lr"].flatten()[None], rows("retain", (P,)), torch.zeros(1, 3 * T, dtype=DOUBLE))
    queries, values = given["q"].repeat_interleave(3, 0)[None], given["v"].flatten(0, 1)[None]
    start = (given["initial"][None],)
    single = config.single
    ours, (left,) = naive(single, queries, p, values, gates, start, phi_w=w, retain_value=rows("retain_value", (V,)))
    close(ours[0, 2::3], y, 1e-13)
    close(left[0], memory, 1e-13)


def test_an_erase_factor_of_zero_is_the_hebbian_write():
    given, q = draw(1), (1, T, 1)
    l2, dot = MemoryConfig(retention="decay"), MemoryConfig(retention="decay", bias="dot")
    tokens = [batched(given[name], 1, name != "q") for name in ("q", "k", "v")]
    y, _ = memory_scan(l2, *tokens, Gates(0.3, erase=0.0))
    close(y, memory_scan(dot, *tokens, Gates(torch.full(q, 0.3, dtype=DOUBLE)))[0], 1e-14)


def test_wide_queries_see_no_other_engine_by_chance():
    given = draw(1)
    with pytest.raises(ConfigError, match=r"does not know gates\.erase"):
        scanned(MemoryConfig(chunk=4), given, ("erase",), engine="chunk")
    with pytest.raises(ConfigError, match="a system of its own"):
        scanned(MemoryConfig(retention="decay"), given, ("retain_value",), engine="parallel")


@pytest.mark.parametrize(
    ("fields", "gates", "sentence"),
    [
        ({"bias": "dot"}, {"erase": 1.0}, "nothing to|never asks"),
        ({"structure": "mlp"}, {"write": 0.5}, "without a phi axis"),
        ({"algorithm": "implicit"}, {"erase": 0.5}, "makes its gradient"),
        ({"step": "normalized"}, {"write": 0.5}, "not the gain"),
        ({}, {"retain_value": torch.ones(1, T, 1, V)}, "takes no retain gate"),
        (
            {"retention": "decay", "chunk": 4, "commit": "chunk"},
            {"retain_value": torch.ones(1, T, 1, V)},
            "product of a chunk",
        ),
        ({"retention": "decay"}, {"floor": 1.0}, "no least divisor"),
        ({"feature_map": "elu", "normalizer": "sum"}, {"erase": 0.5}, "one sum of weights"),
    ],
    ids=lambda x: "-".join(map(str, x)) if type(x) is dict else "",
)
def test_gates_that_mean_nothing_are_refused_by_name(fields, gates, sentence):
    q, k, v = torch.ones(1, T, 1, P), torch.ones(1, T, 1, P), torch.ones(1, T, 1, V)
    with pytest.raises(ConfigError, match=sentence) as caught:
        memory_scan(MemoryConfig(**fields), q, k, v, Gates(**gates))
    assert f"gates.{next(iter(gates))}" in str(caught.value)


@pytest.mark.parametrize(
    ("gates", "sentence"),
    [
        ({"erase": torch.ones(1, T, 1, V)}, rf"\[B, T, H, {P}\] per phi channel, got"),
        ({"retain_value": torch.ones(1, T, 1, P)}, rf"\[B, T, H, {V}\] per value channel, got"),
        ({"retain_value": torch.ones(1, T, 1)}, "one value for all channels is gates.retain"),
        ({"write": torch.ones(1, T, 1, dtype=torch.int64)}, "floating point"),
        ({"retain_value": torch.full((1, T, 1, V), 1.5)}, r"in \[0, 1\], got 1.5 at batch row 0, token 0"),
    ],
    ids=lambda x: "-".join(x) if type(x) is dict else "",
)
def test_gates_of_the_wrong_width_are_told_apart_by_name(gates, sentence):
    q, k, v = torch.ones(1, T, 1, P), torch.ones(1, T, 1, P), torch.ones(1, T, 1, V)
    with pytest.raises((ShapeError, ConfigError), match=sentence):
        memory_scan(MemoryConfig(retention="decay"), q, k, v, Gates(**gates))


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"algorithm": "momentum"}, "carries a slot"),
        ({"algorithm": "omega"}, "remembers tokens"),
        ({"commit": "chunk"}, "one step per token"),
    ],
    ids=lambda x: "-".join(x.values()) if type(x) is dict else "",
)
def test_several_writes_without_a_meaning_are_refused(fields, sentence):
    with pytest.raises(ConfigError, match=f"writes: 2 writes a token.*{sentence}"):
        MemoryConfig(writes=2, **fields)


def test_writes_that_do_not_fit_are_refused():
    q, k, v = torch.ones(1, T, 1, P), torch.ones(1, T, 3, 1, P), torch.ones(1, T, 3, 1, V)
    with pytest.raises(ShapeError, match=r"with writes=2 k must be \[B, T, 2, H, D\]"):
        memory_scan(MemoryConfig(writes=2), q, k, v)
    with pytest.raises(ShapeError, match=r"gates.lr must be .* one for each of writes=3"):
        memory_scan(MemoryConfig(writes=3), q, k, v, Gates(torch.ones(1, T, 1)))
    with pytest.raises(ShapeError, match="gates.retain must be .*, once per token"):
        memory_scan(MemoryConfig(writes=3, retention="decay"), q, k, v, Gates(retain=torch.ones(1, 3 * T, 1)))


@pytest.mark.spec("RULE-FLOW-D1")
@pytest.mark.parametrize("size", [1e-7, 1e-2, 0.2, 0.3, 1.0, 30.0])
def test_flow_step_and_its_derivatives(size):
    from tests.reference.papers_2025 import efla

    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(T, width, generator=g, dtype=DOUBLE) for width in (P, P, V))
    k, lr = size * k, 2 * torch.rand(T, generator=g, dtype=DOUBLE)
    config = MemoryConfig(step="flow", state_dtype="float64")
    true, _ = efla(*(x.numpy() for x in (q, k, v, lr)))
    tokens = [x[None, :, None].requires_grad_() for x in (q, k, v)]
    y, _ = memory_scan(config, *tokens, Gates(lr[None, :, None]))
    close(y[0, :, 0], torch.from_numpy(true), 1e-12)
    if 1e-3 < size < 10:
        gates, few = lr[None, :4, None].requires_grad_(), [x.detach()[:, :4].requires_grad_() for x in tokens]
        assert torch.autograd.gradcheck(lambda q, k, v, lr: memory_scan(config, q, k, v, Gates(lr))[0], (*few, gates))


@pytest.mark.spec("RULE-MAX-D1")
@pytest.mark.parametrize("engine", ["sequential", "parallel"])
def test_the_larger_of_the_sum_of_weights_and_a_floor_divides(engine):
    from tests.reference.papers_2025 import mlstm

    given, i = draw(1), torch.randn(T, generator=torch.Generator().manual_seed(1), dtype=DOUBLE)
    config = MemoryConfig(bias="dot", retention="decay", normalizer="max", state_dtype="float64")
    q, k, v = (batched(given[name], 1, name != "q") for name in ("q", "k", "v"))
    f = given["momentum"]
    true, *_ = mlstm(*(x.numpy() for x in (given["q"], given["k"][:, 0], given["v"][:, 0], i, f)))
    y, _ = memory_scan(config, q, k, v, Gates(i.exp()[None, :, None], f[None, :, None]), engine=engine)
    close(y[0, :, 0], torch.from_numpy(true), 1e-13)
    floor = (2 * torch.rand(1, 5, 1, generator=torch.Generator().manual_seed(2), dtype=DOUBLE)).requires_grad_()
    leaves = [x.detach()[:, :5].requires_grad_() for x in (q, k, v)]
    assert torch.autograd.gradcheck(
        lambda q, k, v, floor: memory_scan(config, q, k, v, Gates(0.5, floor=floor), engine=engine)[0], (*leaves, floor)
    )
