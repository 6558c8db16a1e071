"""Resuming with other settings where they are allowed, and beginning with the parameters of another run."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import save_file

from hecate.distributed import ParallelConfig, start
from hecate.errors import CheckpointError, ConfigError, HecateError
from hecate.train import Hooks, Trainer, checkpoints, load_checkpoint, load_experiment, open_model, run_experiment
from hecate.train.display import Display
from hecate.train.loggers import read_metrics
from hecate.train.state import allowing
from hecate.train.trained import begin_from
from tests.ranks import run_ranks

from .common import quiet_run, same_bits, tiny
from .worlds import experiment

TEN = {"budget": {"steps": 10}}
TEXT = {"data": {"kind": "bundled", "max_bytes": 1 << 16}, "sample": {"tokens": 2}}


def run(config, folder, **how):
    said = io.StringIO()
    result = run_experiment(config, folder, display=Display(Console(file=said, width=1000)), **how)
    return result, said.getvalue()


def last(folder: Path):
    return load_checkpoint(checkpoints(folder / "checkpoints")[-1])


@pytest.mark.spec("CKPT-ALLOW-D1", "CKPT-RESUME-D2")
def test_a_setting_that_is_named_may_differ_and_is_told(tmp_path):
    run(tiny(**TEN), tmp_path / "run")
    other = tiny(optim={"lr": 1e-4, "weight_decay": 0.3})
    both = "optim.lr,optim.weight_decay"
    for names, fields in (((), both), (["optim.lr"], "optim.weight_decay"), (["optim.weight_decay"], "optim.lr")):
        with pytest.raises(CheckpointError, match=rf"another 'optim' \({fields[:8]}.* --allow {fields}$"):
            run(other, tmp_path / "run", resume=True, allow=names)
    assert load_experiment(tmp_path / "run" / "config.yaml").optim.lr == 3e-3
    _, said = run(other, tmp_path / "run", resume=True, allow=["optim.lr", "optim.weight_decay"])
    assert "allowed: optim.lr was 0.003 and is 0.0001" in said
    records = read_metrics(tmp_path / "run" / "metrics.jsonl")
    (told,) = [r for r in records if r["event"] == "allow"]
    assert told["step"] == 10
    assert told["settings"] == {"optim.lr": [0.003, 0.0001], "optim.weight_decay": [0.1, 0.3]}
    rates = [r["lr"] for r in records if r["event"] == "train" and r["step"] > 10]
    assert rates == [other.optim.rate(n, 20) for n in range(10, 20)]
    assert load_experiment(tmp_path / "run" / "config.yaml") == other
    groups = last(tmp_path / "run").facts["optimizer"]["groups"]
    assert {g["weight_decay"] for g in groups} == {0.0, 0.3}


@pytest.mark.spec("CKPT-ALLOW-D1")
def test_what_was_allowed_once_needs_no_word_again(tmp_path):
    class Dies(Hooks):
        def on_step(self, trainer, record):
            raise KeyboardInterrupt

    run(tiny(**TEN), tmp_path / "run")
    before = last(tmp_path / "run")
    other = tiny(optim={"lr": 1e-4})
    with pytest.raises(KeyboardInterrupt):
        run(other, tmp_path / "run", resume=True, allow=["optim.lr"], hooks=[Dies()])
    kept = last(tmp_path / "run")
    assert same_bits(before.tensors, kept.tensors) and kept.facts["metrics"] == before.facts["metrics"]
    result, said = run(other, tmp_path / "run", resume=True)
    assert result.step == 20 and "allowed:" not in said
    lines = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    events = [(r["event"], r["step"]) for r in map(json.loads, lines)]
    assert [e for e in events if e[0] in ("allow", "resume")] == [("resume", 10), ("allow", 10)]
    assert [step for event, step in events if event == "train"] == list(range(1, 21))


@pytest.mark.spec("CKPT-ALLOW-D1")
def test_what_is_equal_changes_no_bit(tmp_path):
    names = ["optim", "model", "data", "seed", "budget.batch_size", "budget.seq_len", "init_from"]
    run(tiny(**TEN), tmp_path / "one")
    run(tiny(**TEN), tmp_path / "two")
    run(tiny(), tmp_path / "one", resume=True)
    _, said = run(tiny(), tmp_path / "two", resume=True, allow=names)
    one, two = last(tmp_path / "one"), last(tmp_path / "two")
    assert "allowed:" not in said and same_bits(one.tensors, two.tensors) and one.facts == two.facts


@pytest.mark.spec("CKPT-ALLOW-D1")
def test_another_batch_begins_where_nothing_was_read(tmp_path):
    run(tiny(**TEXT, budget={"steps": 10, "seq_len": 8}), tmp_path / "run")
    wider = tiny(**TEXT, budget={"batch_size": 12, "seq_len": 8})
    with pytest.raises(
        CheckpointError, match="cursor has batch_size=4, this run has 12.* or --allow budget.batch_size$"
    ):
        run(wider, tmp_path / "run", resume=True, allow=["budget.seq_len"])
    run(wider, tmp_path / "run", resume=True, allow=["budget.batch_size"])
    cursor = last(tmp_path / "run").facts["cursor"]
    assert cursor["batch_size"] == 12 and cursor["step"] == 10 + 10  # draws of a step, whose first rows are the same
    tokens = [r["tokens"] for r in read_metrics(tmp_path / "run/metrics.jsonl") if r["event"] == "train"]
    assert tokens[9] == 10 * 32 and tokens[-1] == 10 * 32 + 10 * 96


@pytest.mark.spec("CKPT-ALLOW-D1")
def test_other_data_may_be_allowed(tmp_path):
    (tmp_path / "a.txt").write_text("one text and another " * 40)
    (tmp_path / "b.txt").write_text("something else altogether " * 40)
    configs = [tiny(data={"kind": "text", "paths": [str(tmp_path / f"{x}.txt")]}, sample={"tokens": 2},
                    budget={"seq_len": 8, "steps": steps}) for x, steps in (("a", 10), ("b", 20))]  # fmt: skip
    run(configs[0], tmp_path / "run")
    with pytest.raises(CheckpointError, match=r"another 'data' \(data\.paths is "):
        run(configs[1], tmp_path / "run", resume=True)
    _, said = run(configs[1], tmp_path / "run", resume=True, allow=["data.paths"])
    assert "allowed: data.paths was [" in said and last(tmp_path / "run").facts["step"] == 20


@pytest.mark.spec("CKPT-ALLOW-D1", "CKPT-PRUNE-D1", "TRAIN-RUN-D4")
def test_the_best_checkpoint_is_the_best_on_the_data_that_the_run_is_on(tmp_path):
    text = {"a": "a" * 400, "b": "".join(map(str, range(500)))}  # nothing on b is as easy as all of a
    for name, content in text.items():
        (tmp_path / f"{name}.txt").write_text(content)
    for name, steps, allow in (("a", 10, []), ("b", 30, ["data.paths"])):
        config = tiny(data={"kind": "text", "paths": [str(tmp_path / f"{name}.txt")]}, sample={"tokens": 2},
                      budget={"seq_len": 8, "steps": steps}, optim={"lr": 0.1})  # fmt: skip
        run(config, tmp_path / "run", resume=name == "b", allow=allow)
    evals = {
        r["step"]: r["validation_loss"] for r in read_metrics(tmp_path / "run/metrics.jsonl") if r["event"] == "eval"
    }
    steps = [path.name for path in checkpoints(tmp_path / "run/checkpoints")]
    assert evals[10] > min(evals[20], evals[30]) and "step_00000010" not in steps  # scored anew on b at step 10
    assert open_model(tmp_path / "run").step == min((20, 30), key=evals.__getitem__)


@pytest.mark.spec("CKPT-ALLOW-D1")
def test_names_that_allow_nothing_are_refused(tmp_path):
    run(tiny(budget={"steps": 1}), tmp_path / "run")
    for folder, name, said in (
        ("new", "optim.lr", "--allow optim.lr is for a run that is resumed; give --resume as well"),
        ("run", "optim.rl", r"--allow 'optim.rl': an experiment has no such setting. Did you mean 'optim.lr'\?"),
        ("run", "lr", "--allow 'lr': an experiment has no such setting. Write its whole path"),
        ("run", "optim..lr", "--allow 'optim..lr': an experiment has no such setting"),
    ):
        with pytest.raises(ConfigError, match=said):
            run(tiny(), tmp_path / folder, resume=folder == "run", allow=[name])


@pytest.mark.spec("CKPT-ALLOW-D1")
def test_what_does_not_fit_stays_refused(tmp_path):
    run(tiny(**TEN), tmp_path / "run")
    with pytest.raises(CheckpointError, match=r"has no|lacks tensor|is \[|other parameters|own config"):
        run(tiny(model={"d_model": 16}), tmp_path / "run", resume=True, allow=["model"])
    kind = tiny(optim={"optimizer": "sgd"})
    with pytest.raises(CheckpointError, match="AdamW, this run uses SGD"):
        run(kind, tmp_path / "run", resume=True, allow=["optim"])


@pytest.mark.spec("TRAIN-INIT-D1")
@pytest.mark.parametrize("form", ["run", "checkpoint", "file", "bfloat16"])
def test_a_run_begins_with_stored_parameters(tmp_path, form):
    first, _ = run(tiny(**TEN), tmp_path / "first")
    path = checkpoints(first.folder / "checkpoints")[-1]
    given = {k.removeprefix("model/"): v for k, v in load_checkpoint(path).tensors.items() if k.startswith("model/")}
    where = {"run": first.folder, "checkpoint": path}.get(form, tmp_path / "weights.safetensors")
    if form == "bfloat16":
        given = {name: value.to(torch.bfloat16) for name, value in given.items()}
    if where.suffix:
        save_file({name: value.contiguous() for name, value in given.items()}, where)
    seen: dict[str, Any] = {}

    class Looks(Hooks):
        def on_checkpoint(self, trainer, path):
            seen.update({k: v.clone() for k, v in trainer.model.state_dict().items()})

    config = tiny(seed=5, init_from=str(where), budget={"steps": 2}, optim={"lr": 1e-300, "weight_decay": 0.0})
    _, said = run(config, tmp_path / "second", hooks=[Looks()])
    assert f"began from {where}: {len(given)} tensors" in said and "drawn anew" not in said
    assert same_bits(seen, {name: value.to(seen[name].dtype) for name, value in given.items()})


@pytest.mark.spec("TRAIN-INIT-D1")
def test_what_is_missing_or_left_over_is_told_and_what_does_not_fit_refused(tmp_path):
    own = dict(Trainer(tiny()).model.state_dict())
    names = sorted(own)
    part = {name: own[name].clone() + 1 for name in names[1:]} | {"more.weight": torch.zeros(2)}
    file = tmp_path / "part.safetensors"
    save_file(part, file)
    config = tiny(init_from=str(file), budget={"steps": 1})
    _, said = run(config, tmp_path / "a")
    assert f"not there, and drawn anew: {names[0]}\n" in said and "left over: more.weight\n" in said
    for tensors, message in (
        ({**part, names[1]: torch.zeros(1, 3)}, rf"tensor '{names[1]}' of .* is \[1, 3\], the model has \["),
        ({"x": torch.zeros(1)}, "no tensor of .* has a name of this model; there are x there"),
    ):
        save_file(tensors, file)
        with pytest.raises(CheckpointError, match=f"^init_from: {message}"):
            run(config, tmp_path / "b")
    file.write_bytes(b"no")
    with pytest.raises(CheckpointError, match=r"^init_from: .*part\.safetensors"):
        run(config, tmp_path / "d")
    with pytest.raises(CheckpointError, match="^init_from: "):
        run(tiny(init_from=str(tmp_path / "gone")), tmp_path / "e")


@pytest.mark.spec("TRAIN-INIT-D1")
def test_a_run_that_is_resumed_keeps_what_it_began_with(tmp_path):
    run(tiny(**TEN), tmp_path / "first")
    config = tiny(init_from=str(tmp_path / "first"))
    run(config.model_copy(update={"budget": config.budget.model_copy(update={"steps": 10})}), tmp_path / "second")
    with pytest.raises(CheckpointError, match=r"another 'init_from' \(init_from is '.*' there and None here\)"):
        run(tiny(), tmp_path / "second", resume=True)
    _, said = run(config, tmp_path / "second", resume=True)
    assert "began from" not in said and "resumed from" in said


def of_two(folder: str) -> dict[str, Any]:
    """On each of two ranks, sharded: a run from another one, resumed with another rate; and a file that is missing."""
    torch.set_default_dtype(torch.float64)
    heard: list[Any] = []

    class Hears(Hooks):
        def on_step(self, trainer, record):
            heard.append((record["step"], record["loss"], record["tokens"]))

        def on_checkpoint(self, trainer, path):
            heard.append(path.name)

    here, how = Path(folder), {"hooks": [Hears()]}
    with start(ParallelConfig(data=2), timeout=60.0) as world:
        begun = experiment(parallel={"data": 2}, init_from=str(here / "first"), budget={"steps": 10})
        quiet_run(begun, here / "two", world=world, **how)
        slower = experiment(parallel={"data": 2}, init_from=str(here / "first"), optim={"lr": 1e-3})
        found = quiet_run(slower, here / "two", world=world, resume=True, allow=["optim.lr"], **how)
        said = []
        for name in ("gone", f"{'ab'[world.rank]}.safetensors"):  # none has it, or each has another one
            try:
                begin_from(Trainer(experiment(parallel={"data": 2}), world=world), here / name)
            except HecateError as error:
                said.append(str(error))
    return {"heard": heard, "loss": found.score.loss if found.score else 0.0, "said": said}


@pytest.mark.spec("TRAIN-INIT-D1", "CKPT-ALLOW-D1", "TRAIN-HOOK-D1")
def test_two_processes_begin_and_go_on_as_one(tmp_path):
    torch.set_default_dtype(torch.float64)
    run(experiment(budget={"steps": 10}), tmp_path / "first")
    for name, shift in ("a", 0.0), ("b", 1.0):
        own = {key: x + shift for key, x in Trainer(experiment()).model.state_dict().items()}
        save_file(own, tmp_path / f"{name}.safetensors")
    from_it = {"init_from": str(tmp_path / "first")}
    run(experiment(**from_it, budget={"steps": 10}), tmp_path / "one")
    one, _ = run(experiment(**from_it, optim={"lr": 1e-3}), tmp_path / "one", resume=True, allow=["optim.lr"])
    wanted = [r["loss"] for r in read_metrics(tmp_path / "one/metrics.jsonl") if r["event"] == "train"]
    found = run_ranks(2, of_two, str(tmp_path))
    for rank in found:
        steps = [item for item in rank["heard"] if not isinstance(item, str)]
        assert [loss for _, loss, _ in steps] == pytest.approx(wanted, rel=0, abs=2e-6)  # of float32
        assert [tokens for _, _, tokens in steps] == [12 * 16 * n for n in range(1, 21)]
        names = [item for item in rank["heard"] if isinstance(item, str)]
        assert names == ["step_00000010", "step_00000010", "step_00000020"]  # once more under the other rate
        gone, other = rank["said"]
        assert gone.startswith("init_from: ") and "gone" in gone
        assert other.startswith("init_from.") and "on rank 1" in other
        assert rank["loss"] == pytest.approx(one.score.loss, rel=0, abs=2e-6)
    records = read_metrics(tmp_path / "two/metrics.jsonl")
    assert [r["step"] for r in records if r["event"] == "train"] == list(range(1, 21))


@pytest.mark.spec("CKPT-ALLOW-D1")
def test_another_period_may_be_allowed_and_advice_can_be_followed(tmp_path):
    run(tiny(**TEN, optim={"periods": {"embedding*": 2}}), tmp_path / "run")
    other = tiny(optim={"periods": {"embedding*": 5}})
    with pytest.raises(CheckpointError, match=r"embedding\* is 2 there and 5 here\).* --allow optim\.periods"):
        run(other, tmp_path / "run", resume=True)
    for optim in ({"optimizer": "sgd"}, {"periods": {}}, {"periods": {"blocks*": 2}}):  # no name would allow these
        with pytest.raises(CheckpointError, match="start another run with its parameters, by init_from$"):
            run(tiny(optim=optim), tmp_path / "run", resume=True)
    _, said = run(other, tmp_path / "run", resume=True, allow=["optim.periods"])
    assert "allowed: optim.periods was" in said
    assert {g["period"] for g in last(tmp_path / "run").facts["optimizer"]["groups"]} == {1, 5}


@pytest.mark.spec("CKPT-ALLOW-D1", "CKPT-RESUME-D2")
def test_advice_names_only_what_can_work(tmp_path):
    levels = {"periods": {"embedding.weight": 2}}  # a name with a dot, which no path could lead to
    run(tiny(**TEN, optim=levels), tmp_path / "run")
    for change, advice in (
        ({"model": {"layers": 2}, "optim": levels}, "start another run with its parameters, by init_from"),
        ({"model": {"d_model": 12}, "optim": levels}, "start another run"),
        ({"optim": {"periods": {"embedding.weight": 5}}}, "by name: --allow optim.periods"),
        ({"seed": 3, "optim": {"periods": {"embedding.weight": 5}, "lr": 1e-4}}, "by name: --allow optim.lr,seed"),
    ):
        with pytest.raises(CheckpointError, match=rf"; resume with the config of its run folder, or .*{advice}$"):
            run(tiny(**change), tmp_path / "run", resume=True)
        if "--allow" in advice:
            run(
                tiny(**change, budget={"steps": 11}), tmp_path / "run", resume=True, allow=advice.split()[-1].split(",")
            )


@pytest.mark.spec("CKPT-ALLOW-D1")
def test_a_window_longer_than_its_new_period_is_committed_by_the_next_step(tmp_path):
    configs = {period: tiny(optim={"periods": {"*": period}}) for period in (8, 6, 2, 1)}
    first = Trainer(configs[8])
    for _ in range(5):
        first.train_step()
    went = {}
    for period in (6, 2, 1):  # the sixth step completes a window of six, and one of six is too long for the others
        trainer = Trainer(configs[period])
        trainer.restore(allowing(first.checkpoint(), trainer, ["optim.periods"])[0], "checkpoint")
        again = Trainer(configs[period])
        again.restore(trainer.checkpoint(), "checkpoint")  # as written at once, so that no name is needed again
        for each in (trainer, again):
            each.train_step()
        assert same_bits(trainer.checkpoint().tensors, again.checkpoint().tensors)
        assert all(group["elapsed"] == 0 for o in trainer.optimizers.values() for group in o.param_groups)
        went[period] = trainer.model.state_dict()
    assert same_bits(went[2], went[6]) and same_bits(went[1], went[6])
    assert not same_bits(went[6], first.model.state_dict())
