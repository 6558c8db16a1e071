"""Memories that forget towards their start, and steps normalised by what writes do to one another."""

from __future__ import annotations

import pytest
import torch

from hecate import Gates, MemoryConfig, memory_scan, named_rule
from hecate.errors import ConfigError
from tests.memories import case_of, close, config_of, reference_scan


@pytest.mark.spec("RET-START-D2")
@pytest.mark.parametrize("towards", ["start", "zero"])
def test_all_forgotten_is_the_start(towards: str):
    case = case_of(config_of(structure="mlp", retention={"kind": "decay", "towards": towards}))
    _, state = case._replace(gates=Gates(lr=0.0, retain=0.0)).scan()
    for name, weight in state.memory.items():
        assert torch.equal(weight, (towards == "start") * case.initial[name].expand_as(weight))


def test_what_is_left_out_and_what_is_refused():
    assert MemoryConfig(structure="mlp", retention="decay").retention.towards == "start"
    assert MemoryConfig(retention="decay").retention.towards is None
    assert not MemoryConfig(retention="decay").retention.anchored
    anchored = {"kind": "decay", "towards": "start"}
    for fields, sentence in (
        ({"bias": "dot", "feature_map": "elu", "normalizer": "sum"}, "no weighted sum"),
        ({"writes": 2}, "go back at each of them"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            MemoryConfig(retention=anchored, **fields)
    with pytest.raises(ConfigError, match="towards the start"):
        memory_scan(MemoryConfig(retention=anchored), *[torch.zeros(1, 2, 1, 4)] * 3, engine="parallel")
    with pytest.raises(ConfigError, match="dampening"):
        MemoryConfig(algorithm={"kind": "momentum", "dampening": True, "bounded": False})


@pytest.mark.spec("RULE-STEP-I3")
@pytest.mark.parametrize("stream", ["of many keys", "of one pair"])
@pytest.mark.parametrize("momentum", [None, 0.9], ids=["gd", "momentum"])
@pytest.mark.parametrize("chunk", [1, 16])
def test_no_stream_diverges(chunk: int, momentum: float | None, stream: str):
    """18 streams: keys of length .1, 1 and 6, values of .1, 1 and 20, starts of 1 and 5 times their draw. A raw step
    of .1 diverges in most of them. What the first chunk, which has no keys before it, may add to an error is lr times
    the sum of 1/t over its tokens; it must not grow beyond."""
    lr = 1.5
    algorithm = {"kind": "gd", "lr": lr}
    if momentum is not None:
        algorithm = {"kind": "momentum", "lr": lr, "momentum": momentum, "dampening": True}
    config = MemoryConfig(
        structure={"kind": "mlp", "activation": "tanh", "last": 0.1}, retention={"kind": "decay", "retain": 0.9999},
        algorithm=algorithm, step="normalized", chunk=chunk, on_nonfinite="propagate",
    )  # fmt: skip
    source = torch.Generator().manual_seed(0)
    unit = [torch.nn.functional.normalize(torch.randn(1, 600, 18, 16, generator=source), dim=-1) for _ in range(2)]
    if stream == "of one pair":
        unit = [item[:, :1].expand_as(item) for item in unit]
    sizes = torch.cartesian_prod(
        torch.tensor([0.1, 1.0, 6.0]), torch.tensor([0.1, 1.0, 20.0]), torch.tensor([1.0, 5.0])
    )
    k, v = unit[0] * sizes[:, :1], unit[1] * sizes[:, 1:2]
    initial = {name: w * sizes[:, 2, None, None] for name, w in config.structure.init(16, 16, heads=18).items()}
    with torch.no_grad():
        y, _ = memory_scan(config, k, k, v, initial=initial)
    error, before = (y - v).norm(dim=-1)[0, -100:].mean(0), (y - v).norm(dim=-1)[0, 0]
    transient = 1 + lr * sum(1 / t for t in range(1, chunk + 1))
    assert torch.isfinite(y).all()
    assert (error <= transient * torch.maximum(before, sizes[:, 1])).all()
    if stream == "of one pair":
        assert (error <= 0.5 * sizes[:, 1]).all()


@pytest.mark.spec("RULE-OLD-I1")
def test_configs_of_earlier_versions_keep_their_numbers():
    """As 0.2 wrote `titans` out, and a deep memory with step 'normalized'."""
    written = {
        "structure": {"kind": "mlp", "layers": 2, "expansion": 4, "activation": "silu", "residual": False,
                      "norm": "none", "norm_eps": 1e-6, "bias": False},
        "bias": {"kind": "l2"},
        "retention": {"kind": "decay", "retain": 0.99, "channels": False, "rank": None, "gate": "sigmoid"},
        "algorithm": {"lr": 0.01, "momentum": 0.9, "kind": "momentum", "nesterov": False, "bounded": True},
        "feature_map": {"kind": "identity"}, "gating": {"kind": "none"}, "readout": {"kind": "direct"},
        "chunk": 1, "writes": 1, "commit": "token", "read": "after", "decay_order": "with_step", "normalizer": "none",
        "key_norm": "l2", "query_scale": "none", "step": "raw", "state_dtype": "float32", "on_nonfinite": "raise",
    }  # fmt: skip
    config = MemoryConfig.model_validate(written)
    assert config.retention.towards == "zero"
    assert config.layer_v_norm == "none"
    assert not config.blocks
    assert not config.algorithm.dampens
    assert MemoryConfig.model_validate(config.model_dump()) == config
    old = MemoryConfig.model_validate({**written, "step": "normalized", "retention": {"kind": "none"}})
    assert old.step == "key_normalized"
    assert MemoryConfig.model_validate(old.model_dump()) == old
    # The recurrence of 0.2.
    case = case_of(config.model_copy(update={"state_dtype": "float64"}))
    close(case.scan(engine="sequential", autodiff="torch")[0], reference_scan(case)[0], 1e-12)
    new = named_rule("titans")
    assert MemoryConfig.model_validate(new.model_dump()) == new
    assert MemoryConfig.model_validate(new.model_dump(mode="json")) == new
