"""A matrix that learns keys from values and is read by its transpose."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from hecate import Gates, MemoryConfig, memory_scan, memory_step, named_rule
from hecate.cms import SelfReferenceConfig
from hecate.engine import exact_engines, predict
from hecate.engine.naive import naive
from hecate.errors import ConfigError
from hecate.nn import Memory
from hecate.rule import TokenGates
from tests.memories import close

B, T, H, P, V = 2, 37, 2, 4, 3
KEY: dict[str, Any] = {"structure": {"kind": "matrix", "learns": "key"}, "retention": "decay", "state_dtype": "float64"}


def draw() -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g, dtype=torch.float64)

    return {
        "q": normal(B, T, H, P),
        "k": normal(B, T, H, P),
        "v": torch.nn.functional.normalize(normal(B, T, H, V), dim=-1),
        "lr": normal(B, T, H).sigmoid(),
        "retain": normal(B, T, H).sigmoid() / 4 + 0.75,
        "retain_value": normal(B, T, H, V).sigmoid() / 2 + 0.5,
        "initial": normal(H, P, V),
    }


def scanned(config: MemoryConfig, given: dict[str, Tensor], channels: bool, **how: Any) -> tuple[Tensor, Tensor]:
    gates = Gates(given["lr"], given["retain"], retain_value=given["retain_value"] if channels else None)
    initial = {"weight": given["initial"]}
    y, state = memory_scan(config, given["q"], given["k"], given["v"], gates, initial=initial, **how)
    return y, state.memory["weight"]


@pytest.mark.spec("STR-MATRIX-D2")
@pytest.mark.parametrize("order", ["with_step", "before_gradient"])
def test_it_is_the_transpose_of_the_memory_with_keys_and_values_exchanged(order):
    config, given = MemoryConfig(**KEY, decay_order=order), draw()
    other = MemoryConfig.model_validate({**KEY, "structure": "matrix", "decay_order": order})
    kept = given["retain"].unsqueeze(-1) * given["retain_value"]
    state, rows, turned = None, [], {"weight": given["initial"]}
    for t in range(T):
        v, k, q = (given[name][:, t] for name in ("v", "k", "q"))
        start = {"initial": turned} if state is None else {"state": state}
        _, state = memory_step(other, v, v, k, Gates(given["lr"][:, t], kept[:, t]), **start)
        rows.append(torch.einsum("bhpv,bhp->bhv", state.memory["weight"], q))
    for engine in ("sequential", "parallel"):
        y, weight = scanned(config, given, True, engine=engine)
        close(y, torch.stack(rows, 1), 1e-13)
        close(weight, state.memory["weight"], 1e-13)
    fold = {name: item.transpose(1, 2).flatten(0, 1) for name, item in given.items() if name != "initial"}
    gates = TokenGates(fold["lr"], fold["retain"], torch.ones_like(fold["lr"]))
    weights = (given["initial"].repeat(B, 1, 1),)
    mine, (last,) = naive(config, fold["q"], fold["k"], fold["v"], gates, weights, retain_value=fold["retain_value"])
    close(mine.unflatten(0, (B, H)).transpose(1, 2), y, 1e-13)
    close(last.unflatten(0, (B, H)), weight, 1e-13)
    close(predict(config, (last,), fold["q"][:, -1:])[:, 0], mine[:, -1], 1e-13)


@pytest.mark.spec("STR-MATRIX-D2")
@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"algorithm": "rls"}, "algorithm 'rls' with structure 'matrix' with learns='key'"),
        ({"algorithm": "omega"}, "^structure.learns: 'key' lets them change places, and algorithm 'omega'"),
        ({"step": "implicit"}, "^structure.learns: with 'key' step='implicit' divides lr"),
        ({"normalizer": "max"}, "learns='key' is not a weighted sum of values"),
        ({"retention": {"kind": "decay", "channels": True}}, "decays channels of values; use gates.retain_value"),
    ],
    ids=str,
)
def test_what_cannot_go_with_it_is_refused(fields, sentence):
    with pytest.raises(ConfigError, match=sentence):
        MemoryConfig(**{**KEY, **fields})


@pytest.mark.spec("STR-MATRIX-D2")
def test_calls_that_cannot_be_are_refused():
    config, given = MemoryConfig(**KEY), draw()
    assert exact_engines(config) == ["parallel"]
    tokens = [given[name] for name in ("q", "k", "v")]
    with pytest.raises(ConfigError, match="engine='compiled' cannot run .* learns='key' is read by its transpose"):
        memory_scan(config, *tokens, engine="compiled")
    for gates, sentence in (
        (Gates(erase=0.5), "gates.erase is given, but structure 'matrix' with learns='key' writes along v"),
        (Gates(retain=torch.ones(B, T, H, P)), "learns='key' decays channels of values"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            memory_scan(config, *tokens, gates)
    with pytest.raises(ConfigError, match="a box answers with what it predicts; structure"):
        SelfReferenceConfig(memory=config)


def test_a_layer_of_oja_writes_along_unit_values():
    asked, *_ = Memory(6, H, named_rule("oja"), dtype=torch.float64).asked(torch.randn(B, T, 6, dtype=torch.float64))
    close(asked.v.norm(dim=-1), torch.ones(B, T, H, dtype=torch.float64), 1e-13)
    assert asked.gates.retain is None and asked.gates.retain_value.shape == (B, T, H, 3)
