"""What calls ask of a device, counted on a CPU that is taken for one: the same numbers, launches within a budget, and
no wait for the device in default settings."""

from __future__ import annotations

import pytest
import torch

from hecate import Gates, MemoryConfig, memory_scan, named_rule
from hecate.nn import Memory
from tests.engine.test_parallel import RULES
from tests.engine.test_properties import in_pieces, whole
from tests.launches import as_on_a_device, counted
from tests.memories import case_of, config_of

WALKED = {
    **RULES,
    "l1": {"bias": {"kind": "l1"}, "retention": "decay"},
    "lp, momentum": {"bias": {"kind": "lp", "p": 1.5, "eps": 0.1}, "retention": "decay", "algorithm": "momentum"},
    "linear, decayed, momentum": {"bias": "dot", "retention": "decay", "algorithm": "momentum"},
    "delta, momentum": {"algorithm": "momentum", "key_norm": "l2"},
    "sum normaliser": {"bias": "dot", "feature_map": "elu", "normalizer": "sum"},
}
# Launches of so many tokens, forward and backward: what was counted, and a tenth more. Of fewer than 2048 where all
# goes token by token or chunk by chunk.
BUDGETS = {
    "delta": (MemoryConfig(key_norm="l2"), 2048, 105, 92),
    "gated delta": (named_rule("gated_delta"), 2048, 122, 152),
    "titans linear": (named_rule("titans_linear"), 2048, 142, 236),
    "kda": (named_rule("kda"), 2048, 230, 261),
    "huber": (MemoryConfig(bias="huber", key_norm="l2", retention="decay"), 256, 1000, 810),
    "ttt mlp": (MemoryConfig(structure={"kind": "mlp"}, key_norm="l2", chunk=16), 256, 437, 1120),
    "mlp, large chunks": (MemoryConfig(structure={"kind": "mlp"}, key_norm="l2", chunk=1024), 1024, 254, 616),
}


@pytest.mark.spec("ENG-PAR-D6")
@pytest.mark.parametrize("fields", WALKED.values(), ids=WALKED)
def test_the_walk_of_a_device_is_the_token_loop(fields):
    for channels in [False, True] if fields.get("retention") == "decay" else [False]:
        case = case_of(config_of(**fields), length=70, d=3, width=3, channels=channels, masks=True)
        expected = whole(case, engine="sequential")
        with as_on_a_device():
            for autodiff in ("tape", "torch"):
                whole(case, engine="parallel", autodiff=autodiff).equals(expected)
            in_pieces(case, [1, 17, 69], engine="parallel").equals(expected)


@pytest.mark.spec("ENG-LATE-D1")
@pytest.mark.parametrize("name", BUDGETS)
def test_launches_and_waits(name):
    config, length, most, most_back = BUDGETS[name]
    width = 4
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        drawn = torch.rand(1, length, 1, *shape, generator=generator, dtype=torch.float32)
        return drawn.requires_grad_()

    q, k, v = (draw(width) for _ in range(3))
    lr = (1e-3 * draw()).detach().requires_grad_()
    retain = draw(*[width] * (name == "kda")) if config.retention.uses_retain else None
    gates = Gates(lr, retain, draw() if config.algorithm.uses_momentum else None)
    config = config.model_copy(update={"on_nonfinite": "raise"})
    made = []

    def forward():
        made.append(memory_scan(config, q, k, v, gates, engine="parallel" if config.chunk == 1 else "chunk")[0])

    def backward():
        made[-1].backward(torch.ones_like(v))

    with as_on_a_device():
        memory_scan(config, q[:, :32], k[:, :32], v[:, :32], Gates(0.1))  # what is made once
        there, back = counted(forward), counted(backward)
    assert not there.waits and not back.waits
    assert 0.5 * most < there.launches <= most
    assert 0.5 * most_back < back.launches <= most_back


@pytest.mark.spec("ENG-LATE-D1")
@pytest.mark.parametrize("rule", ["delta", "retnet", "titans", "ttt_mlp", "large_chunk_ttt", "gsa", "omeganet"])
def test_layers_wait_for_nothing(rule):
    layer = Memory(8, heads=2, config=rule)
    x, held = torch.randn(1, 20, 8), []

    def step():
        y, state = layer(x, *held[-1:])
        y.square().sum().backward()
        held.append(state.detach())

    with as_on_a_device():
        step()
        assert not counted(step).waits
        assert not counted(step).waits


@pytest.mark.spec("STR-INIT-I1")
def test_the_start_of_a_deep_memory_is_drawn_once():
    config = MemoryConfig(structure={"kind": "mlp"}, key_norm="l2", state_dtype="float32")
    q, k, v = (torch.randn(2, 5, 3, 4, dtype=torch.float32) for _ in range(3))
    true = config.structure.init(4, 4, heads=3, dtype=torch.float32)
    with torch.inference_mode():  # autograd may save what is kept all the same
        memory_scan(config, q, k, v)
    first = memory_scan(config, q, k, v)[1].memory
    kept = {name: item.clone() for name, item in first.items()}
    for item in first.values():  # a state is the caller's
        item.fill_(7.0)
    wide = k.clone().requires_grad_()
    y, again = memory_scan(config, q, wide, v)
    y.sum().backward()
    for name, weight in true.items():
        assert torch.equal(again.memory[name], kept[name]) and again.memory[name].shape == (2, 3, *weight.shape[1:])
    nothing = memory_scan(config, q[:, :0], k[:, :0], v[:, :0])[1].memory
    for name, weight in true.items():
        assert torch.equal(nothing[name], weight.expand(2, *weight.shape))
        nothing[name].fill_(7.0)
    assert torch.equal(memory_scan(config, q[:, :0], k[:, :0], v[:, :0])[1].memory["w1"][1], true["w1"])
    with as_on_a_device():
        assert not counted(lambda: memory_scan(config, q, k, v)).waits
