"""Checkpoints: complete or absent, verified, never pickled."""

from __future__ import annotations

import json

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


@pytest.mark.spec("CKPT-WRITE-D2")
def test_two_writes_are_the_same_bytes(tmp_path):
    one, two = (save_checkpoint(tmp_path / "a", 1, example()), save_checkpoint(tmp_path / "b", 1, example()))
    for name in ("manifest.json", "tensors.safetensors"):
        assert (one / name).read_bytes() == (two / name).read_bytes()


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


def _truncate(path, name):
    data = (path / name).read_bytes()
    (path / name).write_bytes(data[: len(data) // 2])


def _edit(**changes):
    def edit(path, name):
        document = json.loads((path / name).read_text())
        (path / name).write_text(json.dumps(document | changes))

    return edit


def _content(path, name):
    document = json.loads((path / name).read_text())
    document["content"]["step"] = 99
    (path / name).write_text(json.dumps(document))


DAMAGE = {
    "truncated tensors": (
        "tensors.safetensors", _truncate, "is truncated or not a safetensors file"),
    "missing tensors": ("tensors.safetensors", lambda p, n: (p / n).unlink(), "is missing"),
    "pickle": (
        "tensors.safetensors", lambda p, n: torch.save({"a": 1}, p / n),
        "is truncated or not a safetensors file",
    ),
    "truncated manifest": ("manifest.json", _truncate, "is truncated or not JSON"),
    "foreign manifest": (
        "manifest.json", lambda p, n: (p / n).write_text("[1]"), "is not a hecate-"),
    "other format": (
        "manifest.json", _edit(format="elsewhere"), "is not a hecate-checkpoint manifest"),
    "newer version": (
        "manifest.json", _edit(version=3), "format version 3, this hecate reads up to 2: upgrade"
    ),
    "edited manifest": ("manifest.json", _content, "is damaged: its digest does not match"),
}  # fmt: skip


@pytest.mark.spec("CKPT-READ-D2")
@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_one_typed_error_with_file_and_remedy(tmp_path, kind):
    name, damage, reason = DAMAGE[kind]
    path = save_checkpoint(tmp_path, 3, example())
    damage(path, name)
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
    _truncate(tmp_path / "step_00000003", "tensors.safetensors")
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


def test_a_step_may_be_written_again(tmp_path):
    save_checkpoint(tmp_path, 1, example())
    path = save_checkpoint(tmp_path, 1, example(7.0))
    assert float(load_checkpoint(path).tensors["a"][0, 0]) == 7
    assert [p.name for p in tmp_path.iterdir()] == ["step_00000001"]


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
