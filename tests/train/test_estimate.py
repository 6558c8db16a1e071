"""What a process of a world that is not there would hold, against torch's own sharding of it."""

from __future__ import annotations

import pytest
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from hecate.cli import show
from hecate.errors import ConfigError
from hecate.models import LanguageModel
from hecate.train import load_experiment
from hecate.train.estimate import check_memory, estimate_rows, flops_of, share_of, sizes_of, ways_of
from tests.clock import within
from tests.ranks import run_ranks

PRESETS = ("quickstart", "cms", "lm-35m-hope")


def parameters_of_one() -> list[int]:
    """What the first of 256 processes holds of each preset, where the other 255 are not there."""
    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=256)
    mesh = init_device_mesh("cpu", (32, 8), mesh_dim_names=("replicate", "data"))
    held = []
    for preset in PRESETS:
        model = LanguageModel(load_experiment(preset).model_for_data(), device="meta")
        for part in (*model.blocks, model):
            fully_shard(part, mesh=mesh)
        held.append(sum(p.to_local().numel() for p in model.parameters()))
    return held


@pytest.mark.spec("TRAIN-EST-D4")
def test_parameters_of_one_of_256_processes_are_those_of_fully_shard():
    wanted = [sizes_of(load_experiment(name), 8).own for name in PRESETS]
    assert run_ranks(1, parameters_of_one, patience=280) == [wanted]


def test_a_world_is_estimated_and_refused_with_what_to_turn():
    wide = ["parallel.data=8", "parallel.replicate=auto", "budget.accumulate=1", "budget.seq_len=256"]
    config = load_experiment("lm-35m", wide)
    assert share_of(config, 64) == (8, 2, 256)
    rows = dict(estimate_rows(config, 64))
    assert rows["each of 64 processes"] == "8 replicate, 8 data, 1 context" and "(12.5" in rows["parameters on one"]
    with pytest.raises(ConfigError, match=r"each of 64 processes takes at least .*raise budget.accumulate") as error:
        check_memory(config, 1 << 26, 64)
    assert "--mem-limit" in str(error.value)
    with pytest.raises(ConfigError, match=r"must be a multiple of the 96 processes that share it"):
        share_of(load_experiment("lm-35m"), 96)
    with pytest.raises(ConfigError, match=r"does not fit a world of 12 processes"):
        share_of(config, 12)


HEADED = "model.memory.gating={kind: heads, retain_value: {channels: true}}"


@pytest.mark.spec("CTX-WAY-D2")
@pytest.mark.parametrize(
    ("preset", "overrides", "ranks", "wanted"),
    [
        ("quickstart", (), 2, {"memory": "algebra"}),
        ("quickstart", ("model.memory=ttt_mlp",), 2, {"memory": "relay"}),
        ("quickstart", ("model.memory=ttt_mlp",), 3, {"memory": "heads"}),
        ("quickstart", ("model.memory=titans_linear", HEADED), 3, {"memory": "heads"}),
        ("cms", (), 3, {"memory.levels.0": "heads", "memory.levels.1": "algebra"}),
        ("lm-35m-hope", (), 4, {"memory": "relay", "levels.levels.0": "relay", "levels.levels.1": "relay"}),
        ("lm-35m-transformer", (), 4, {"memory.attention": "relay"}),
        ("quickstart", (), 1, {}),
    ],
)
def test_ways_over_a_context_are_told(preset, overrides, ranks, wanted, capsys):
    settings = [*overrides, f"parallel.context={ranks}", "budget.seq_len=64"]
    config = load_experiment(preset, settings)
    found = ways_of(config)
    assert {path: way.name for path, way in found.items()} == {f"blocks.0.{p}": name for p, name in wanted.items()}
    rows = dict(estimate_rows(config, ranks))
    show(preset, settings, engine=True)
    shown = capsys.readouterr().out
    for path, (name, reason) in found.items():
        assert rows[f"context of {path}"] == f"{name}: {reason}"
        assert f"{path} over {ranks} ranks: {name}: {reason}\n" in shown
    assert bool(found) == (" over " in shown) == any(key.startswith("context of") for key in rows)


@pytest.mark.parametrize(("name", "size"), [("lm-35m", 35e6), ("lm-130m", 130e6), ("lm-340m", 340e6), ("lm-1b", 1e9)])
def test_presets_are_as_large_as_their_names(name, size):
    assert abs(sizes_of(load_experiment(name)).parameters / size - 1) < 0.05


@pytest.mark.spec("TRAIN-EST-D5")
def test_work_of_a_token_by_hand():
    sizes = ["model.d_model=32", "model.heads=2", "model.layers=3", "model.mlp_ratio=0"]

    def beside_weights(*given: str, length: int = 64) -> float:
        config = load_experiment("quickstart", [*sizes, *given, f"budget.seq_len={length}"])
        return flops_of(config) - 2 * sizes_of(config).work

    each = 3 * 2 * 16  # layers, heads, width of a head
    gate = 3 * 2 * 32 * 2  # layers, a product of width by heads
    assert beside_weights("memory=delta") == 6 * 16 * each + gate
    assert beside_weights("memory=titans_linear") == 6 * 16 * each + 3 * gate
    attention = "model.attention={kind: attention}"
    assert beside_weights("model.memory={}", attention) == 4 * each * 64 / 2  # of a mean of 32 pairs two products
    assert beside_weights("model.memory={}", attention, length=128) == 4 * each * 128 / 2
    with within(20):
        flops_of(load_experiment("hope_170m"))  # 32,768 tokens and levels of thousands
