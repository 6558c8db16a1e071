"""What torch's counter is told of memories, against products counted by hand."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from hecate.engine import flops, memory_scan, memory_step
from hecate.engine.scan import _scan
from hecate.nn import Memory
from hecate.rule import Gates, MemoryConfig, named_rule

B, T, H, D = 2, 6, 3, 8
TOKENS = B * T * H
MATRIX = 2 * D * D  # a product with a matrix of D x D
MLP = {"structure": {"kind": "mlp", "expansion": 2, "residual": False}, "algorithm": {"kind": "gd", "lr": 0.01}}
# By hand: predict, write and read; dot predicts nothing. A perceptron of D, 2 D, D has two layers of 2 D D weights: its
# step is a pass forward, one back through the second layer, and an outer product a layer.
CASES = {
    "hebbian": (named_rule("hebbian"), 2 * MATRIX),
    "delta": (named_rule("delta"), 3 * MATRIX),
    "gated_delta": (named_rule("gated_delta"), 3 * MATRIX),
    "momentum": (named_rule("titans_linear"), 3 * MATRIX),
    "mlp": (MemoryConfig.model_validate({**MLP, "bias": "l2"}), (4 + 2 + 4 + 4) * MATRIX),
    "phi": (MemoryConfig(feature_map={"kind": "linear", "d_phi": 4}, key_norm="l2"), 3 * MATRIX // 2 + 2 * MATRIX // 2),
}


def tokens(length: int = T, **how) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(B, length, H, D, generator=generator) for _ in range(3))
    return [x.requires_grad_(**how) for x in (q, k / k.norm(dim=-1, keepdim=True), v)] if how else [q, k, v]


def params_of(config):
    params = config.feature_map.init(D, heads=H, dtype=torch.float64)
    return params if params["learned"] or params["frozen"] else None


@pytest.mark.spec("ENG-FLOP-D1")
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("engine", ["auto", "sequential"])
def test_a_scan_counts_as_its_recurrence(name, engine):
    config, each = CASES[name]
    how = {"engine": engine, "phi_params": params_of(config)}
    given = tokens(requires_grad=True)
    plain = memory_scan(config, *given, **how)[0]
    wanted = torch.autograd.grad(plain.square().sum(), given)
    with FlopCounterMode(display=False) as counter:
        y, _ = memory_scan(config, *given, **how)
        assert counter.get_total_flops() == TOKENS * each
        grads = torch.autograd.grad(y.square().sum(), given)
    assert counter.get_total_flops() == 3 * TOKENS * each
    assert set(counter.get_flop_counts()["Global"]) == {"hecate.memory_scan"}
    torch.testing.assert_close([y, *grads], [plain, *wanted], rtol=1e-10, atol=1e-12)


@pytest.mark.spec("ENG-FLOP-D1")
def test_compiled_kernels_run_as_without_a_counter():
    pytest.importorskip("numba")
    config = named_rule("delta")
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        memory_scan(config, *tokens(), engine="compiled")
    assert counter.get_total_flops() == TOKENS * 3 * MATRIX


@pytest.mark.spec("ENG-FLOP-D1")
def test_streams_chunks_and_layers_add_up():
    config = named_rule("gated_delta")
    q, k, v = tokens()
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        _, state = memory_scan(config, q[:, :-2], k[:, :-2], v[:, :-2], Gates(lr=torch.full((B, T - 2, H), 0.5)))
        for t in (-2, -1):
            _, state = memory_step(config, q[:, t], k[:, t], v[:, t], state=state)
    assert counter.get_total_flops() == TOKENS * 3 * MATRIX
    # A chunk's gradients are taken at its start: as many products.
    mlp = CASES["mlp"][0].model_copy(update={"chunk": 4})
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        memory_scan(mlp, *tokens())
    assert counter.get_total_flops() == TOKENS * CASES["mlp"][1]

    model = nn.Sequential(nn.Linear(16, 16), Memory(16, 2, "delta"))
    x = torch.randn(1, 5, 16, generator=torch.Generator().manual_seed(0))
    with FlopCounterMode(display=False) as counter:
        model(x)[0].sum().backward()
    inside = counter.get_flop_counts()["Sequential.1"]
    assert inside["hecate.memory_scan"] == 3 * 5 * 2 * 6 * 8 * 8 and len(inside) > 1  # beside its projections
    assert "hecate.memory_scan" not in counter.get_flop_counts()["Sequential.0"]
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.spec("ENG-FLOP-D1")
@pytest.mark.parametrize("rule", ["titans", "omeganet", "large_chunk_ttt", "mesa", "delta_product"])
def test_three_tokens_of_a_chunk_tell_of_all(rule, monkeypatch):
    config = named_rule(rule).model_copy(update={"chunk": 8})
    each = (1, 19, config.writes, 2, 8) if config.writes > 1 else (1, 19, 2, 8)  # two chunks and three tokens
    q, k = torch.empty(1, 19, 2, 8, device="meta"), torch.empty(each, device="meta")

    def count() -> int:
        flops._of_tokens.cache_clear()
        return flops.scan_flops(_scan, config, q, k, k, None, None)

    found = count()
    monkeypatch.setattr(flops, "SAMPLE", 99)
    assert found == count() > 0


@pytest.mark.spec("ENG-FLOP-D1")
def test_a_chunk_commits_once():
    config = named_rule("large_chunk_ttt").model_copy(update={"chunk": 8})
    q = torch.empty(1, 19, 1, 8, device="meta")
    layer, square = 2 * 8 * 8, 2 * 8**3  # three weights of 8 x 8
    token = (3 + 3 + 1 + 3) * layer
    steps = 3 * 5 * 3 * square  # Newton and Schulz: X X^T, its square, and that by X
    assert [flops.scan_flops(_scan, config, *[q[:, :n]] * 3, None, None) for n in (7, 8, 19)] == [
        7 * token, 8 * token + steps, 19 * token + 2 * steps,
    ]  # fmt: skip


def test_without_numbers_a_scan_has_the_shapes_alone():
    config = named_rule("yaad")
    q, k, v = (x.detach().requires_grad_() for x in tokens(requires_grad=True))
    wanted, real = memory_scan(config, q, k, v)
    q, k, v = (x.detach().to("meta").requires_grad_() for x in (q, k, v))
    y, state = memory_scan(config, q, k, v)
    assert y.shape == wanted.shape and y.is_meta and y.dtype == wanted.dtype
    kept, wanted = ([x.shape for x in tree_leaves(each) if isinstance(x, torch.Tensor)] for each in (state, real))
    assert kept == wanted
    y.sum().backward()
    assert all(x.grad is not None and x.grad.shape == x.shape for x in (q, k, v))


@pytest.mark.spec("ENG-FLOP-D1")
def test_a_counter_asks_for_no_storage():
    shape = (1, 1 << 16, 4, 64)
    q = torch.empty(shape, device="meta")
    with FlopCounterMode(display=False) as counter:
        Memory(256, 4, "gated_delta", device="meta")(torch.empty(1, 1 << 16, 256, device="meta"))
    assert counter.get_flop_counts()["Global"]["hecate.memory_scan"] == 6 * q.numel() * 64
