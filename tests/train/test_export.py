"""Weights out of a run and into another, without a pickle read."""

from __future__ import annotations

import json
import warnings

import pytest
import torch
from safetensors.torch import save_file

from hecate.errors import CheckpointError, ConfigError
from hecate.train import Checkpoint, open_model, open_run, save_checkpoint
from hecate.train.trained import export_weights, import_weights, read_weights

from .common import quiet_run, same_bits, tiny


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    torch.set_default_dtype(torch.float32)
    folder = tmp_path_factory.mktemp("run") / "it"
    quiet_run(tiny(budget={"steps": 4, "checkpoint_every": 2, "save": "async"}), folder)
    return folder


pytestmark = pytest.mark.usefixtures("float32")


@pytest.mark.spec("CKPT-ASYNC-D1")
def test_a_run_saves_behind_what_it_saves_at_once(run, tmp_path):
    config = tiny(budget={"steps": 4, "checkpoint_every": 2})
    quiet_run(config, tmp_path / "sync")
    for name in ("step_00000002", "step_00000004"):
        one, two = (folder / "checkpoints" / name / "tensors.safetensors" for folder in (run, tmp_path / "sync"))
        assert one.read_bytes() == two.read_bytes()


@pytest.mark.spec("CKPT-EXPORT-D1")
def test_each_format_has_the_weights_of_the_run(run, tmp_path):
    trainer, _ = open_run(run)
    expected = trainer.model.state_dict()
    one = export_weights(run, "safetensors", tmp_path / "one")
    assert same_bits(read_weights(one), expected) and same_bits(read_weights(one / "model.safetensors"), expected)
    assert (one / "config.yaml").read_bytes() == (run / "config.yaml").read_bytes()
    assert (one / "model.safetensors").stat().st_mode & 0o777 == (one / "config.yaml").stat().st_mode & 0o777
    two = export_weights(run, "torch", tmp_path / "two")
    assert same_bits(torch.load(two / "model.pt", weights_only=True), expected)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that this is one process
        three = export_weights(run / "checkpoints" / "step_00000004", "dcp", tmp_path / "three")
        from torch.distributed.checkpoint import FileSystemReader, load

        into = {name: torch.zeros_like(value) for name, value in expected.items()}
        load(into, storage_reader=FileSystemReader(three / "model"), no_dist=True)
    assert same_bits(into, read_weights(run, "newest")) and (three / "config.yaml").exists()
    with pytest.raises(CheckpointError, match="exists already; choose another --out"):
        export_weights(run, "torch", two)
    with pytest.raises(ConfigError, match="safetensors"):
        export_weights(run, "hf", tmp_path / "four")


@pytest.mark.spec("CKPT-EXPORT-D1")
def test_imported_weights_are_trained_on(run, tmp_path):
    expected = read_weights(run)
    weights = export_weights(run, "safetensors", tmp_path / "weights")
    made = import_weights(weights, tmp_path / "init")
    assert same_bits(read_weights(made), expected) and open_run(made)[1] == 0
    for opened in (open_run, open_model):
        with pytest.raises(CheckpointError, match="is an export, without a checkpoint; make a run of it with"):
            opened(weights)
    with pytest.raises(CheckpointError, match="is not a run folder: it has no config.yaml"):
        open_run(run / "checkpoints" / "step_00000004")
    config = tiny(budget={"steps": 4, "checkpoint_every": 2})
    done = quiet_run(config, made, resume=True)
    assert done.status == "finished" and not same_bits(read_weights(made, "newest"), expected)
    parts = tmp_path / "parts"
    parts.mkdir()
    names = sorted(expected)
    for number, chosen in enumerate((names[::2], names[1::2])):
        save_file({name: expected[name].clone() for name in chosen}, parts / f"{number}.safetensors")
    where = {name: f"{number % 2}.safetensors" for number, name in enumerate(names)}
    (parts / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    assert same_bits(read_weights(import_weights(parts, tmp_path / "again", tiny())), expected)
    with pytest.raises(CheckpointError, match="no config.yaml beside it"):
        import_weights(parts, tmp_path / "more")
    with pytest.raises(CheckpointError, match="belongs to another model config"):
        import_weights(weights, tmp_path / "more", tiny(model={"d_model": 16}))
    with pytest.raises(CheckpointError, match="exists already"):
        import_weights(weights, made)
    assert not (tmp_path / "more").exists()


@pytest.mark.spec("CKPT-EXPORT-D1")
def test_what_is_no_safetensors_is_refused_unread(run, tmp_path):
    (tmp_path / "model.pt").write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    (tmp_path / "odd.safetensors").write_bytes(b"short")
    for name, message in (
        ("model.pt", "is a pickle, which can run code"),
        ("odd.safetensors", "is truncated or not a safetensors file"),
        ("none.safetensors", "is missing; name a run folder"),
        ("", "model.safetensors is missing"),
    ):
        with pytest.raises(CheckpointError, match=message):
            read_weights(tmp_path / name)
    for text in ("[]", "{", json.dumps({"weight_map": {"w": "../model.safetensors"}})):
        (tmp_path / "model.safetensors.index.json").write_text(text)
        with pytest.raises(CheckpointError, match="is not an index of files in its folder"):
            read_weights(tmp_path)
    bare = save_checkpoint(tmp_path / "checkpoints", 1, Checkpoint({"w": torch.zeros(2)}, {}))
    with pytest.raises(CheckpointError, match="holds no model"):
        read_weights(bare)
