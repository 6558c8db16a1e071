"""Run folders that somebody else has made: whatever they hold, nothing of the reader's is read, written or waited for,
and what they claim is held against this machine first."""

from __future__ import annotations

import json
import os
import resource
import shutil
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml

from hecate.compare.cells import RESULT
from hecate.compare.run import RECORDS, _Job, _Work
from hecate.errors import HecateError
from hecate.evals import evaluate_run
from hecate.files import read_whole, write_file
from hecate.microscope.report import report_run
from hecate.train import Trainer, open_model, open_run
from hecate.train.checkpoint import _digest
from hecate.train.run import check_folder
from hecate.train.trained import NAMES, export_weights, import_weights
from tests.clock import within

from .common import quiet_run, text_run, tiny

pytestmark = pytest.mark.usefixtures("figures")  # which the microscope's reports need
SECRET = "nothing in here is for others\n"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    torch.set_default_dtype(torch.float32)
    return text_run(tmp_path_factory.mktemp("made"), budget={"seq_len": 16, "steps": 4})


@pytest.fixture
def folder(made, tmp_path):
    """A copy of a run, and nothing else."""
    torch.set_default_dtype(torch.float32)
    return Path(shutil.copytree(made, tmp_path / "run"))


def again(folder, **how):
    return quiet_run(tiny(**settings(folder)), folder, resume=True, **how)


def settings(folder):
    own = folder / "config.yaml"
    config = yaml.safe_load(own.read_text()) if own.is_file() and not own.is_symlink() else tiny().model_dump()
    return {name: config[name] for name in ("data", "budget", "model", "optim")}


WAYS = {
    "train": again,
    "check": lambda run: check_folder(run, resume=True),
    "open_run": open_run,
    "open_model": open_model,
    "open a checkpoint": lambda run: open_model(next((run / "checkpoints").glob("step*"))),
    "export": lambda run: export_weights(run, "safetensors", run.parent / "out"),
    "import": lambda run: import_weights(run, run.parent / "out"),
    "report": report_run,
    "evals": lambda run: evaluate_run(run, ["niah"], lengths=[1024], samples=1),
}


def refused(way, folder, message):
    with within(10), pytest.raises(HecateError, match=message) as caught:
        WAYS[way](folder)
    assert str(folder) in str(caught.value) and "\n" not in str(caught.value)
    assert not (folder.parent / "out").exists()


@pytest.mark.spec("TRAIN-FOLDER-D1")
@pytest.mark.parametrize(
    ("way", "name"),  # one check of all names, which each way asks for
    [*(("train", name) for name in NAMES), *product(WAYS, ["metrics.jsonl"]), ("open_model", "checkpoints")],
)
def test_a_link_in_a_run_folder_leads_nowhere(folder, tmp_path, name, way):
    target = tmp_path / "elsewhere"
    inner = folder / name
    if inner.is_dir() or name in ("evals", "figures", "tensorboard", "wandb"):
        target.mkdir()
        (target / "step_00000099").mkdir()
        (target / "precious.png").write_text(SECRET)
        shutil.rmtree(inner, ignore_errors=True)
    else:
        target.write_text(SECRET)
        inner.unlink(missing_ok=True)
    inner.symlink_to(target)
    refused(way, folder, f"{name} is a symbolic link, which may lead out of the run; put what")
    kept = target / "precious.png" if target.is_dir() else target
    assert kept.read_text() == SECRET and inner.is_symlink()


@pytest.mark.spec("TRAIN-FOLDER-D1")
@pytest.mark.parametrize(
    ("way", "name"),
    [*product(["train"], ["metrics.jsonl", "config.yaml", "samples.txt", "tokenizer.json"]),
     *product(["open_model", "report", "export"], ["metrics.jsonl", "config.yaml"])],
)  # fmt: skip
def test_a_pipe_in_a_run_folder_is_not_waited_for(folder, name, way):
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    if name == "config.yaml" and way == "train":
        with pytest.raises(HecateError, match="is a pipe or a device"):
            check_folder(folder, resume=True)
    else:
        refused(way, folder, f"{name} is a pipe or a device; put a run's own file in its place")


@pytest.mark.spec("TRAIN-FOLDER-D1")
def test_the_command_line_touches_no_target_of_a_link(folder, hecate, tmp_path):
    target = tmp_path / "target"
    target.write_text(SECRET)
    (folder / "metrics.jsonl").unlink()
    (folder / "metrics.jsonl").symlink_to(target)
    out = ["--out", tmp_path / "out"]
    for argv in (
        ["train", "--out", folder, "--resume"], ["eval", folder], ["generate", folder], ["report", folder],
        ["export", folder, *out], ["export", folder, "--to", "hf", *out], ["import", folder, *out],
        ["eval", folder, "--lengths", "16"], ["eval", folder, "--tasks", "niah"],
    ):  # fmt: skip
        code, _, err = hecate(*argv)
        assert code == 2 and err.startswith(f"error: {folder}/metrics.jsonl is a symbolic link")
    assert target.read_text() == SECRET and not (tmp_path / "out").exists()


@pytest.mark.spec("TRAIN-FOLDER-D1")
@pytest.mark.parametrize("name", ["metrics.jsonl", "samples.txt", "config.yaml", "report.md", "env.json"])
def test_another_name_of_a_file_is_not_written_through(folder, tmp_path, name):
    """As snapshots have that share their files with the run."""
    other = tmp_path / "other"
    os.link(folder / name, other)
    before = other.read_bytes()
    fields = settings(folder)
    fields["budget"]["steps"] = 5
    config = tiny(**fields)
    assert quiet_run(config, folder, resume=True).step == 5
    assert other.read_bytes() == before != (folder / name).read_bytes() or name == "env.json"
    assert not (folder / name).samefile(other)


@pytest.mark.spec("TRAIN-FOLDER-D1")
def test_links_of_temporary_names_are_not_followed(tmp_path):
    target = tmp_path / "target"
    target.write_text(SECRET)
    (tmp_path / f".tmp-report.md-{os.getpid()}").symlink_to(target)
    write_file(tmp_path / "report.md", "text")
    assert target.read_text() == SECRET and (tmp_path / "report.md").read_text() == "text"


@pytest.mark.spec("TRAIN-FOLDER-D1")
def test_logs_of_a_comparison_are_not_written_through_links(tmp_path, monkeypatch):
    target = tmp_path / "target"
    target.write_text(SECRET)
    (tmp_path / "a.log").symlink_to(target)
    monkeypatch.setattr("subprocess.Popen", lambda *_, **__: "process")
    work = _Work(tmp_path, 1, (), None, None, print, 0)
    work._start(_Job(SimpleNamespace(label="a"), tiny(), tmp_path / "a"))
    assert target.read_text() == SECRET and not (tmp_path / "a.log").is_symlink()


@pytest.mark.spec("TRAIN-FOLDER-D1")
@pytest.mark.parametrize("way", WAYS)
def test_a_run_may_be_moved_and_reached_through_a_link(folder, tmp_path, way):
    moved = folder.rename(tmp_path / "elsewhere")
    (tmp_path / "run").symlink_to(moved)
    (moved / "notes").symlink_to(tmp_path)  # of the user's own, which nothing here follows
    WAYS[way](tmp_path / "run")


LARGE = {"d_model": 16384, "layers": 48, "heads": 64}


def claim(folder, model, where):
    """Has a run claim another model, in its config, in the facts of its checkpoints, or in both."""
    if where != "checkpoint":
        config = yaml.safe_load((folder / "config.yaml").read_text())
        config["model"] |= model
        (folder / "config.yaml").write_text(yaml.safe_dump(config))
    if where != "config":
        for file in folder.glob("checkpoints/*/manifest.json"):
            document = json.loads(file.read_text())
            document["content"]["facts"]["config"]["model"] |= model
            document["digest"] = _digest(document["content"])
            file.write_text(json.dumps(document))


@pytest.mark.spec("TRAIN-EST-D6")
@pytest.mark.parametrize(("way", "where"), [
    ("train", "both"), ("open_run", "both"), ("open_run", "config"), ("open_model", "both"),
    ("open_model", "checkpoint"), ("open a checkpoint", "both"), ("report", "both"), ("evals", "both"),
    ("import", "both"), ("import", "config"), ("export", "checkpoint"),
])  # fmt: skip
@pytest.mark.parametrize("large", [True, False])
def test_what_a_run_claims_is_held_against_the_machine_before_it_is_built(folder, way, where, large, monkeypatch):
    """What the machine cannot hold is refused by its memory, what it could by the numbers that are there."""
    if large:
        claim(folder, LARGE, where)
    else:
        monkeypatch.setattr("hecate.checks.memory_of", lambda _: 1 << 40)
        monkeypatch.setattr("hecate.train.estimate.memory_of", lambda _: 1 << 44)
        claim(folder, {"d_model": 8192}, where)
    built = []
    monkeypatch.setattr("hecate.nn.memory.Memory.__init__", _watched(built))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if large or way not in ("train", "import", "export"):
        with within(10), pytest.raises(HecateError, match="more than the|numbers of a model, whose config claims"):
            WAYS[way](folder)
        assert not any(built)
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300 << 10


def _watched(built):
    """Notes whether a memory is built where it takes storage."""
    from hecate.nn.memory import Memory

    real = Memory.__init__

    def init(self, *args, **how):
        real(self, *args, **how)
        built.append(not all(p.is_meta for p in self.parameters()))

    return init


@pytest.mark.spec("TRAIN-EST-D6")
def test_a_trainer_is_not_built_beyond_memory():
    with pytest.raises(HecateError, match="model: has .* parameters: .*GiB, more than the .* that are here; lower"):
        Trainer(tiny(model=LARGE))


@pytest.mark.spec("TRAIN-EST-D6")
def test_batches_that_a_run_is_scored_on_count_too(folder):
    config = yaml.safe_load((folder / "config.yaml").read_text())
    config["budget"] |= {"batch_size": 1 << 20, "seq_len": 1 << 20}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    with pytest.raises(HecateError, match="an evaluation takes .* batches of .* tokens: .* more than the"):
        open_run(folder)
    assert open_model(folder).step == 4  # what it is asked for takes none


@pytest.mark.spec("TRAIN-EST-D6")
@pytest.mark.parametrize("way", ["AutoModelForCausalLM", "HecateForCausalLM", "built"])
def test_a_folder_of_transformers_is_held_to_the_same(tmp_path, way):
    transformers = pytest.importorskip("transformers")
    import hecate.hf as hf
    from hecate.hf.model import ALIASES

    small = hf.HecateForCausalLM(hf.HecateConfig(model={"vocab_size": 16, "d_model": 8, "layers": 1, "heads": 2}))
    small.save_pretrained(tmp_path / "small")
    facts = json.loads((tmp_path / "small" / "config.json").read_text())
    facts["model"] |= {**LARGE, "vocab_size": 16}
    facts = {name: fact for name, fact in facts.items() if name not in ALIASES}  # as those that an older file lacks
    (tmp_path / "small" / "config.json").write_text(json.dumps(facts))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(HecateError, match="more than the .* of memory that are here"):
        if way == "built":
            hf.HecateForCausalLM(hf.HecateConfig.from_pretrained(tmp_path / "small"))
        else:
            kind = getattr(hf, way, None) or getattr(transformers, way)
            kind.from_pretrained(tmp_path / "small", ignore_mismatched_sizes=True)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300 << 10


@pytest.mark.spec("TRAIN-FOLDER-D1")
@pytest.mark.parametrize("name", ["metrics.jsonl", "samples.txt", "report.md"])
def test_a_file_with_holes_is_not_read_as_a_whole(folder, name, monkeypatch):
    assert read_whole.__defaults__ == (1 << 30,)
    monkeypatch.setattr(read_whole, "__defaults__", (1 << 20,))  # a GiB of zeros takes seconds
    with (folder / name).open("wb") as file:
        file.truncate(64 << 30)  # no block of it is on the disk
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(HecateError, match=f"cannot .*{name}.*: it has more than 1 MiB|cannot .*more than 1 MiB"):
        report_run(folder) if name == "report.md" else again(folder)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300 << 10
    assert (folder / name).stat().st_size == 64 << 30


@pytest.mark.spec("TRAIN-FOLDER-D1")
@pytest.mark.parametrize("result", [
    "[]", "{}", "7", '{"status": "finished"}', '{"status": "finished", "loss": "low", "seconds": 1}',
    '{"steps_per_second": null}', "[" * 100_000,
])  # fmt: skip
def test_results_of_a_comparison_that_are_none_are_one_error(tmp_path, result):
    work, job = _Work(tmp_path, 1, (), None, None, print, 0), _Job(None, tiny(), tmp_path / "a")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / RESULT).write_text(result)
    with pytest.raises(HecateError, match="cannot be read: .*; delete it and its run is finished anew"):
        work._read_result(job)
    (tmp_path / RECORDS).write_text(json.dumps({"run": "a", "result": 7}) + "\n")
    with pytest.raises(HecateError, match="cannot be read: .*; delete it, and runs without folders are run anew"):
        work._read_records()
