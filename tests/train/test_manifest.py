"""Manifests whose digest is right and whose content is not: each is refused by name."""

from __future__ import annotations

import json
import os
from functools import cache

import pytest
import torch
from safetensors.torch import load_file, save_file

from hecate.errors import CheckpointError
from hecate.train import Checkpoint, Trainer, load_checkpoint, newest_checkpoint, open_run, save_checkpoint
from hecate.train.checkpoint import (
    SHARDED,
    _digest,
    best_checkpoint,
    describe_file,
    manifest_text,
    open_tensors,
    summary,
)
from hecate.train.config import ExperimentConfig

from .common import TINY_MODEL, same_bits, tiny

MODEL = "model/embedding.weight"
MOMENT = "optimizer/embedding.weight/exp_avg"
NAN = float("nan")


@cache
def fresh():
    """A trainer that nothing may change, and its parameters."""
    trainer = Trainer(tiny())
    return trainer, {name: value.clone() for name, value in trainer.model.state_dict().items()}


@cache
def after_a_step():
    trainer = Trainer(tiny())
    trainer.train_step()
    return trainer.checkpoint({"validation_loss": 1.0})


@pytest.fixture
def trained():
    return after_a_step()


@pytest.fixture
def saved(tmp_path, trained):
    return save_checkpoint(tmp_path / "checkpoints", 1, trained)


def forge(path, change, tensors=None):
    """Changes the content of a manifest, and the file of tensors, and makes the digest fit."""
    file = path / "manifest.json"
    document = json.loads(file.read_text())
    if tensors is not None:
        stored = load_file(path / "tensors.safetensors")
        tensors(stored)
        save_file(stored, path / "tensors.safetensors")
        document["content"]["tensors"] = {name: summary(item) for name, item in stored.items()}
    change(document["content"])
    try:
        document["digest"] = _digest(document["content"])
    except ValueError:  # NaN: no digest is right
        pass
    file.write_text(json.dumps(document))


def put(*path_and_value):
    """A change of one place of a content; a value `...` deletes."""
    *path, last, value = path_and_value

    def change(content):
        for key in path:
            content = content[key]
        if value is ...:
            del content[last]
        else:
            content[last] = value

    return change


def nested(depth):
    return {"x": nested(depth - 1)} if depth else 0


OPTIMIZER = ("facts", "optimizer")
UNREADABLE = [
    (put("facts", "metrics", "validation_loss", 10**400), "more than 64 bits"),
    (put("step", 10**30), "more than 64 bits"),
    (put("facts", "config", nested(900)), "nested more than 128 deep"),
    (put("tensors", MODEL, "shape", [1] * 3000), r"tensors\.model/embedding\.weight\.shape: "),
]
CONTENT = [
    *UNREADABLE,
    (put("step", -1), "step: must be >= 0, got -1"),
    (put("step", True), "step: must be an integer, got True"),
    (put("step", 1.5), "step: must be an integer"),
    (put("step", 3), r"facts\.step: must be the step 3, got 1"),
    (put("step", ...), "step: is required"),
    (put("extra", 1), "extra: unknown field"),
    (put("facts", []), "facts: must be a mapping"),
    (put("facts", ...), "facts: is required"),
    (put("aliases", []), "aliases: must be a mapping"),
    (put("aliases", "model/x", 3), "must be a text"),
    (put("aliases", "model/x", "model/y"), "must name a stored tensor"),
    (put("aliases", "model/x", "model/x"), "must name a stored tensor"),
    (put("aliases", {"model/x": "model/y", "model/y": "model/x"}), "must name a stored tensor"),
    (put("aliases", MODEL, MOMENT), "must name a stored tensor"),
    (put("aliases", "model/x", MODEL), "unknown tensor 'x'"),
    (put("tensors", {}), "does not hold the tensors of its manifest"),
    (put("tensors", None), "tensors: .*got None"),
    (put("tensors", MODEL, ...), "does not hold the tensors .*embedding"),
    (put("tensors", "../../x", {"dtype": "float32", "shape": [1], "sha256": "0" * 64}),
     r"does not hold the tensors .*\.\./\.\./x"),
    (put("tensors", MODEL, "file", "/etc/passwd"), "file: unknown field"),
    (put("tensors", MODEL, "dtype", "int3"), "has another dtype"),
    (put("tensors", MODEL, "dtype", 3), "dtype: must be a text"),
    (put("tensors", MODEL, "shape", [1, 128]), "has another shape"),
    (put("tensors", MODEL, "shape", [-16, -8]), "has another shape"),
    (put("tensors", MODEL, "shape", ["16"]), "must be an integer"),
    (put("tensors", MODEL, "sha256", "00"), "sha256: "),
    (put("tensors", MODEL, "sha256", "0" * 64), "has another sha256"),
    (put("facts", "cursor", "step", [NAN]), "truncated or not JSON"),
    (put("facts", "metrics", "validation_loss", NAN), "truncated or not JSON"),
    (put("facts", "metrics", "validation_loss", "low"), r"facts\.metrics\.validation_loss: "),
    (put("facts", "metrics", [1]), r"facts\.metrics: must be a mapping"),
    (put("facts", "step", ...), "step: is required"),
    (put("facts", "config", ...), "config: is required"),
    (put("facts", "config", "x"), "config: must be a mapping"),
    (put("facts", "config", {}), "another 'optim' "),
    (put("facts", "config", "optim", "optimizer", "kind", 7), "optimizer 7, this run has "),
    (put("facts", "config", "extra", 1), "a config that is not valid: extra"),
    (put(*OPTIMIZER, ...), "optimizer: is required"),
    (put(*OPTIMIZER, "groups", None), r"optimizer\.groups: "),
    (put(*OPTIMIZER, "groups", []), "other parameters than this model"),
    (put(*OPTIMIZER, "groups", 0, "params", ...), "other parameters"),
    (put(*OPTIMIZER, "groups", 0, "lr", "fast"), "lr must be a finite number"),
    (put(*OPTIMIZER, "groups", 0, "lr", True), "lr must be a finite number"),
    (put(*OPTIMIZER, "groups", 0, "betas", [0.9]), r"groups\.0\.betas is \[0\.9\] there and \[0\.9, 0\.95\] here"),
    (put(*OPTIMIZER, "groups", 0, "gain", 2), r"gain is 2 there and missing here"),
    (put(*OPTIMIZER, "groups", 0, "elapsed", 9), "elapsed must be within"),
    (put(*OPTIMIZER, "values", {"norm.weight": {"step": 1}}), "norm.weight.step is .int. there"),
    (put(*OPTIMIZER, "values", {"gone": {"step": 1}}), "not trained"),
    (put(*OPTIMIZER, "values", []), r"optimizer\.values: must be a mapping"),
    (put("facts", "cursor", {}), "the saved data cursor has seed=None"),
    (put("facts", "cursor", "step", -4), "cursor has step=-4, which must be"),
    (put("facts", "cursor", "step", "4"), "cursor has step='4'"),
    (put("tensors", MODEL, "shape", [1] * 64), "has another shape"),
    (put("tensors", MODEL, "shape", [1 << 62, 1 << 62]), "has another shape"),
    (put("facts", "pid", 4), "pid: unknown field"),
]  # fmt: skip

TENSORS = [
    (put(MODEL, ...), "lacks tensor 'embedding.weight'"),
    (put(MODEL, torch.zeros(3)), r"'embedding.weight' is \[3\] torch.float32, the model has \[16, 8\]"),
    (put(MODEL, torch.zeros(16, 8, dtype=torch.int64)), "is .* torch.int64, the model has .* torch.float64"),
    (put(MOMENT, ...), "the state of .*exp_avg is missing there and '"),
    (put(MOMENT, torch.zeros(3)), r"embedding\.weight\.exp_avg is "),
    (put(MOMENT, torch.zeros(16, 8, dtype=torch.int64)), r"embedding\.weight\.exp_avg is "),
    (put("rng/torch", ...), "no random state in tensor 'rng/torch'"),
    (put("rng/torch", torch.zeros(9)), "no random state in tensor"),
    (put("rng/torch", torch.zeros(9, dtype=torch.uint8)), "no random state in tensor"),
    (put("elsewhere", torch.zeros(2)), "unknown tensor 'elsewhere'"),
    (put("optimizer/gone/step", torch.zeros(())), "that is not trained"),
]  # fmt: skip


def refused(path, message):
    """Reading it, or restoring from it, is one error that names it; nothing has changed."""
    trainer, before = fresh()
    with pytest.raises(CheckpointError, match=message) as caught:
        trainer.restore(load_checkpoint(path), str(path))
    assert str(path) in str(caught.value)
    assert same_bits(before, trainer.model.state_dict()) and trainer.step == 0
    best_checkpoint(path.parent)  # whatever it holds, this is no traceback


@pytest.mark.spec("CKPT-READ-D3")
@pytest.mark.parametrize(("change", "message"), CONTENT)
def test_a_forged_content_is_refused(saved, change, message):
    forge(saved, change)
    refused(saved, message)


@pytest.mark.spec("CKPT-READ-D3")
@pytest.mark.parametrize(("change", "message"), TENSORS)
def test_forged_tensors_are_refused(saved, change, message):
    forge(saved, lambda content: None, tensors=change)
    refused(saved, message)


@pytest.mark.spec("CKPT-READ-D3")
@pytest.mark.parametrize(("text", "message"), [
    *((version, "has format version .*, which there never was; delete") for version in (0, -1, True, 1.0, "1", [1])),
    (None, "has format version None"),
    (b"[" * 100_000, "is truncated or not JSON"),
    (b'{"format": 1, "format": 2}', "format: given twice in one JSON object"),
    (b'{"x": 1' + b"0" * 5000 + b"}", "is truncated or not JSON"),
    (b'{"x": -Infinity}', "is truncated or not JSON"),
    (b"\xff\xfe", "is truncated or not JSON"),
    (b"", "is truncated or not JSON"),
])  # fmt: skip
def test_texts_and_versions_that_no_manifest_has_are_refused(saved, text, message):
    file = saved / "manifest.json"
    document = json.loads(file.read_text()) | {"version": text}
    file.write_bytes(text if isinstance(text, bytes) else json.dumps(document).encode())
    refused(saved, message)


@pytest.mark.spec("CKPT-READ-D3")
def test_a_manifest_is_not_read_beyond_its_size(saved):
    with (saved / "manifest.json").open("wb") as file:
        file.truncate(64 << 30)  # no block of it is on the disk
    refused(saved, "it has more than 256 MiB")


@pytest.mark.spec("CKPT-READ-D3", "CKPT-RESUME-D1")
@pytest.mark.parametrize("change", [change for change, _ in UNREADABLE])
def test_damage_of_any_kind_is_skipped_as_other_damage(saved, trained, change):
    later = save_checkpoint(saved.parent, 2, trained._replace(facts={**trained.facts, "step": 2}))
    forge(later, change)
    path, _, skipped = newest_checkpoint(saved.parent)
    assert path == saved and [item.path for item in skipped] == [later]


@pytest.mark.spec("CKPT-READ-D3")
def test_a_checkpoint_under_another_name_is_refused(saved):
    refused(saved.rename(saved.parent / "step_00000005"), "is of step 1; rename its folder to step_00000001")


@pytest.mark.spec("CKPT-READ-D4")
@pytest.mark.parametrize("part", ["", "step_00000001", "step_00000001/manifest.json",
                                  "step_00000001/tensors.safetensors"])  # fmt: skip
def test_a_link_out_of_the_run_is_refused(saved, tmp_path, part):
    inner = saved.parent / part
    inner.rename(tmp_path / "elsewhere")
    inner.symlink_to(tmp_path / "elsewhere")
    (tmp_path / "config.yaml").write_text("{}")
    for read in (lambda: newest_checkpoint(saved.parent), lambda: open_run(tmp_path)):
        with pytest.raises(CheckpointError, match="is a symbolic link, which may lead out of"):
            read()
    if not part:
        with pytest.raises(CheckpointError, match="is a symbolic link"):
            save_checkpoint(saved.parent, 2, Checkpoint({}, {}))


@pytest.mark.spec("CKPT-READ-D4")
@pytest.mark.parametrize("name", ["manifest.json", "tensors.safetensors"])
def test_a_pipe_is_not_waited_for(saved, name):
    (saved / name).unlink()
    os.mkfifo(saved / name)
    refused(saved, f"{name} is not a regular file; delete")
    with pytest.raises(CheckpointError, match="it is a pipe or a device"), open_tensors(saved / name):
        pass  # one that came after the check


@pytest.mark.spec("CKPT-WRITE-D2")
def test_a_manifest_is_canonical(saved, trained, tmp_path):
    text = (saved / "manifest.json").read_text()
    assert text == json.dumps(json.loads(text), indent=1, sort_keys=True) + "\n"
    turned = Checkpoint(dict(reversed(trained.tensors.items())), dict(reversed(trained.facts.items())))
    again = save_checkpoint(tmp_path / "again", 1, turned)
    assert (again / "manifest.json").read_text() == text


@pytest.mark.spec("CKPT-RESUME-D2")
def test_what_differs_is_named_with_both_values(trained):
    for fields, message in (
        ({"seed": 3}, r"was trained with another 'seed' \(seed is 0 there and 3 here\)"),
        ({"optim": {"lr": 0.5, "clip": None}},
         r"'optim' \(optim\.lr is 0\.003 there and 0\.5 here; optim\.clip is 1\.0 there and None"),
        ({"model": {"d_model": 16}}, r"another 'model' \(model\.d_model is 8 there and 16 here\)"),
        ({"data": {"kind": "copy"}}, "another 'data'"),
        ({"budget": {"batch_size": 5}}, "the saved data cursor has batch_size=4, this run has 5"),
    ):  # fmt: skip
        other = Trainer(tiny(**fields))
        before = {name: value.clone() for name, value in other.model.state_dict().items()}
        with pytest.raises(CheckpointError, match=f"^where.*{message}"):
            other.restore(trained, "where")
        assert same_bits(before, other.model.state_dict())


@pytest.mark.spec("CKPT-RESUME-D2")
def test_a_checkpoint_beyond_the_budget_is_refused():
    trainer = Trainer(tiny())
    trainer.step = trainer.loader.step = 21
    with pytest.raises(CheckpointError, match="at step 21, beyond budget.steps=20; give --steps"):
        Trainer(tiny()).restore(trainer.checkpoint(), "where")


def test_settings_that_an_older_version_had_not_are_its_defaults(trained):
    """The config of a checkpoint is read as any config: what it leaves out is the default."""
    config = json.loads(json.dumps(trained.facts["config"]))
    config["model"] = dict(TINY_MODEL)
    assert ExperimentConfig.model_validate(config).model == tiny().model
    resumed = Trainer(tiny())
    resumed.restore(trained._replace(facts={**trained.facts, "config": config}), "where")
    assert resumed.step == 1


SHARD = "shard-00001-model-00001-of-00001.safetensors"
WIDE = 1 << 40
SPREADS = {
    "dimensions": ([1] * 3000, r"tensors\.model/x\.shape: "),
    "beyond torch": ([0, 1 << 62, 1 << 62], r"tensors\.model/x\.shape: must be of at most"),
    "beyond 64 bits": ([0, 1 << 70], "more than 64 bits"),
    "more than the file": ([WIDE, 3], rf"files\.{SHARD}: must hold blocks of {12 * WIDE:,} bytes, got "),
    "negative": ([-2, 3], r"tensors\.model/x\.shape\[0\]: must be >= 0"),
}


@pytest.fixture
def blocks(tmp_path):
    """A checkpoint as many processes write it, of one block."""
    path = tmp_path / "step_00000001"
    path.mkdir()
    save_file({"model/x": torch.zeros(2, 3, dtype=torch.float32)}, path / SHARD)
    piece = {"file": SHARD, "offset": [0, 0], "shape": [2, 3]}
    tensors = {"model/x": {"dtype": "float32", "shape": [2, 3], "pieces": [piece]}}
    files = {SHARD: describe_file(path / SHARD).model_dump()}
    manifest = manifest_text(SHARDED, step=1, facts={}, aliases={}, files=files, tensors=tensors)
    (path / "manifest.json").write_text(manifest)
    return path


@pytest.mark.spec("CKPT-READ-D3")
@pytest.mark.parametrize("kind", SPREADS)
def test_forged_sizes_of_blocks_are_refused_before_anything_is_made(blocks, kind):
    shape, message = SPREADS[kind]
    assert load_checkpoint(blocks).tensors["model/x"].shape == (2, 3)

    def change(content):
        spread = content["tensors"]["model/x"]
        piece = {"file": SHARD, "offset": [0] * len(shape), "shape": shape}
        spread |= {"shape": shape, "pieces": [] if 0 in shape else [piece]}

    forge(blocks, change)
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(blocks)


@pytest.mark.spec("CKPT-READ-D3")
def test_blocks_are_not_put_together_beyond_memory(blocks, monkeypatch):
    monkeypatch.setattr("hecate.checks.memory_of", lambda _: 23)
    with pytest.raises(CheckpointError, match="has tensors: 24 bytes, more than the 23 bytes of memory that are here"):
        load_checkpoint(blocks)
