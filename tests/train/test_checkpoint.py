"""Checkpoints: complete or absent, verified, never pickled."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from hecate.errors import CheckpointError
from hecate.train import Checkpoint, checkpoints, load_checkpoint, newest_checkpoint, prune_checkpoints, save_checkpoint
from hecate.train.checkpoint import best_checkpoint

from .common import same_bits


def example(shift: float = 0.0, **metrics: float) -> Checkpoint:
    weight = torch.arange(6.0).reshape(2, 3) + shift
    tensors = {
        "a": weight,
        "tied": weight,
        "turned": weight.T,
        "scalar": torch.tensor(3, dtype=torch.int64),
        "half": torch.randn(5, generator=torch.Generator().manual_seed(0)).bfloat16(),
        "empty": torch.zeros(0, 4),
        "flag": torch.tensor([True, False]),
        "slice": torch.arange(10)[2:7:2],
    }
    return Checkpoint(tensors, {"note": "x", "metrics": metrics})


@pytest.mark.spec("CKPT-WRITE-D1", "CKPT-READ-D1")
def test_round_trip(tmp_path):
    written = example()
    path = save_checkpoint(tmp_path, 12, written)
    assert path.name == "step_00000012"
    assert sorted(p.name for p in path.iterdir()) == ["manifest.json", "tensors.safetensors"]
    assert [p.name for p in tmp_path.iterdir()] == [path.name]  # no temporary folder is left
    found = load_checkpoint(path)
    assert same_bits(found.tensors, written.tensors)
    assert found.facts == written.facts
    manifest = json.loads((path / "manifest.json").read_text())
    assert manifest["content"]["aliases"] == {"tied": "a"}


@pytest.mark.spec("CKPT-READ-D2")
def test_every_flipped_byte_is_noticed(tmp_path):
    path = save_checkpoint(tmp_path, 1, example())
    for name, every in (("tensors.safetensors", 7), ("manifest.json", 41)):
        file = path / name
        good = file.read_bytes()
        for place in range(0, len(good), every):
            flipped = bytearray(good)
            flipped[place] ^= 1
            file.write_bytes(flipped)
            with pytest.raises(CheckpointError, match=str(path)):
                load_checkpoint(path)
        file.write_bytes(good)
    load_checkpoint(path)


def _truncate(file):
    data = file.read_bytes()
    file.write_bytes(data[: len(data) // 2])


def _edit(change):
    def edit(file):
        document = json.loads(file.read_text())
        change(document)
        file.write_text(json.dumps(document))

    return edit


TENSORS, MANIFEST = "tensors.safetensors", "manifest.json"
DAMAGE = [
    (TENSORS, _truncate, "is truncated or not a safetensors file"),
    (TENSORS, Path.unlink, "is missing"),
    (TENSORS, lambda file: torch.save({"a": 1}, file), "is truncated or not a safetensors file"),  # a pickle
    (MANIFEST, _truncate, "is truncated or not JSON"),
    (MANIFEST, lambda file: file.write_text("[1]"), "is not a hecate-"),
    (MANIFEST, _edit(lambda found: found.update(format="elsewhere")), "is not a hecate-checkpoint manifest"),
    (MANIFEST, _edit(lambda found: found.update(version=3)),
     "format version 3, this hecate reads up to 2: upgrade"),
    (MANIFEST, _edit(lambda found: found["content"].update(step=99)), "is damaged: its digest does not match"),
]  # fmt: skip


@pytest.mark.spec("CKPT-READ-D2")
@pytest.mark.parametrize("number", range(len(DAMAGE)))
def test_damage_is_one_typed_error_with_file_and_remedy(tmp_path, number):
    name, damage, reason = DAMAGE[number]
    path = save_checkpoint(tmp_path, 3, example())
    damage(path / name)
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(path)
    message = str(caught.value)
    assert message.startswith(str(path / name)) and reason in message
    assert "upgrade hecate" in message or f"delete {path} and resume" in message


@pytest.mark.spec("CKPT-RESUME-D1")
def test_the_newest_sound_checkpoint_is_found_and_the_others_named(tmp_path):
    for step in (1, 2, 3):
        save_checkpoint(tmp_path, step, example(step))
    assert newest_checkpoint(tmp_path)[0].name == "step_00000003"
    (tmp_path / ".tmp-step_00000009-1").mkdir()  # a writer was killed
    (tmp_path / "step_00000004").mkdir()
    _truncate(tmp_path / "step_00000003" / TENSORS)
    path, found, skipped = newest_checkpoint(tmp_path)
    assert path.name == "step_00000002" and float(found.tensors["a"][0, 0]) == 2
    assert [item.path.name for item in skipped] == ["step_00000004", "step_00000003"]
    assert "is missing" in skipped[0].reason and "is truncated" in skipped[1].reason
    for step in (1, 2):
        (tmp_path / f"step_0000000{step}" / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match="no checkpoint in .* can be used"):
        newest_checkpoint(tmp_path)
    assert newest_checkpoint(tmp_path / "nowhere") is None


@pytest.mark.spec("CKPT-PRUNE-D1")
def test_pruning_keeps_the_newest_and_the_best(tmp_path):
    losses = {1: 5.0, 2: 1.0, 3: 4.0, 4: 1.5, 5: None, 10: 3.0}
    for step, loss in losses.items():
        metrics = {} if loss is None else {"validation_loss": loss}
        save_checkpoint(tmp_path, step, example(**metrics))
    (tmp_path / ".tmp-step_00000011-77").mkdir()
    assert best_checkpoint(tmp_path).name == "step_00000002"
    prune_checkpoints(tmp_path, 2)
    assert [int(p.name[5:]) for p in checkpoints(tmp_path)] == [2, 5, 10]
    assert not list(tmp_path.glob(".tmp*"))


@pytest.mark.spec("CKPT-WRITE-D3")
@pytest.mark.parametrize("failing", ["train.checkpoint.save_file", "files.sync"])
def test_a_failed_write_leaves_the_earlier_ones(tmp_path, monkeypatch, failing):
    save_checkpoint(tmp_path, 1, example())

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(f"hecate.{failing}", full)
    with pytest.raises(CheckpointError, match="cannot write checkpoint .*No space left on device"):
        save_checkpoint(tmp_path, 2, example())
    assert [p.name for p in tmp_path.iterdir()] == ["step_00000001"]
    load_checkpoint(tmp_path / "step_00000001")
