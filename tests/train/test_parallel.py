"""Several processes train what one process trains."""

from __future__ import annotations

import io
import json
import logging
import os
import sys
import warnings
from contextlib import chdir, redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils import _pytree as pytree

from hecate.cli import main
from hecate.distributed import ParallelConfig, World, gathered, start
from hecate.errors import ConfigError, NonFiniteError, ParallelError
from hecate.train import ExperimentConfig, Trainer, dump_experiment, load_checkpoint
from hecate.train.checkpoint import Checkpoint
from hecate.train.estimate import ways_of
from hecate.train.evaluate import evaluate, model_health
from hecate.train.trainer import context_of
from tests.ranks import run_ranks
from tests.train.common import quiet_run
from tests.train.worlds import OF_LEVELS, PLAIN, TASK, agree, experiment, many, meshed, one_process, whole

SHARDED, COPIED, BOTH = {}, {"data": 1, "replicate": "auto"}, {"replicate": 2}
PIECES = {"data": 1, "context": 2}

# A loss is summed in float32, of numbers around 4, by every process in another order: some units in the last place.
LOSS = 4e-6


def tour() -> dict[str, Any]:
    """Every check of two processes that is no curve, by one pair of them."""
    warnings.simplefilter("ignore")
    torch.set_default_dtype(torch.float64)
    found: dict[str, Any] = {}
    with start(ParallelConfig(), timeout=60.0) as world:
        for name, parallel in {"sharded": SHARDED, "copied": COPIED}.items():
            config = experiment(parallel=parallel)
            mesh = meshed(world, config)
            found[name] = {
                "nan": refused_nan(Trainer(config, world=mesh)),
                "states": states_of(config, mesh),
                "saved": interrupted(config, mesh),
                "one row": list(one_row(Trainer(config, world=mesh))),
                "low": low(parallel, mesh),
            }
        config = experiment(parallel=PIECES)
        mesh = meshed(world, config)
        found["pieces"] = {"saved": interrupted(config, mesh), "low": low(PIECES, mesh)}
        found["disagreements"] = disagreements(world)
        found["starts"] = starts_of_some(world)
    return found


def refused_nan(trainer: Trainer) -> list[tuple[str, bool]]:
    """What a NaN on rank 1 alone raises, in its logits, then in its gradient; whether parameters stayed."""
    found, rank = [], trainer.world.rank

    def spoil_value(_: Any, __: Any, output: Any) -> Any:
        return (output[0] * float("nan") if rank == 1 else output[0], output[1])

    def spoil_gradient(_: Any, __: Any, output: Any) -> None:
        if rank == 1:
            output[0].register_hook(lambda g: g * float("nan"))

    before = whole(trainer)
    for spoil in (spoil_value, spoil_gradient):
        handle = trainer.model.register_forward_hook(spoil)
        try:
            trainer.train_step()
            found.append(("nothing", False))
        except NonFiniteError as error:
            after = whole(trainer)
            found.append((str(error), all(np.array_equal(before[key], after[key]) for key in before)))
        handle.remove()
    trainer.train_step()  # and goes on together
    return found


def states_of(config: Any, world: World) -> list[Any]:
    """The state of each memory after this rank's rows of a batch."""
    trainer = Trainer(config, world=world)
    batch = trainer.loader.next()
    with torch.no_grad():
        _, state = trainer.model(batch.tokens)
    return [leaf.numpy() for leaf in pytree.tree_leaves(state) if isinstance(leaf, torch.Tensor)]


def interrupted(config: Any, world: World) -> dict[str, Any]:
    """A run that is saved after two steps and goes on, beside one that is restored there."""
    first = Trainer(config, world=world)
    for _ in range(2):
        first.train_step()
    saved = first.checkpoint()
    tensors = {name: gathered(value).numpy().copy() for name, value in saved.tensors.items()}
    second = Trainer(config, world=world)
    second.restore(saved, "it")
    losses = [[trainer.train_step().loss for _ in range(2)] for trainer in (first, second)]
    same = all(np.array_equal(a, b) for a, b in zip(whole(first).values(), whole(second).values(), strict=True))
    return {"losses": losses, "same": same, "tensors": tensors, "facts": saved.facts, "after": whole(first)}


def one_row(trainer: Trainer) -> Any:
    """The score of a batch with fewer rows than there are ranks."""
    (batch,) = trainer.source.validation_batches(1, 16, 1)
    return evaluate(trainer.model, [batch.part(range(1))], trainer.device, world=trainer.world)


def low(parallel: dict[str, Any], world: World) -> dict[str, Any]:
    """Training in bfloat16, of parameters that stay float32."""
    torch.set_default_dtype(torch.float32)
    try:
        config = experiment(parallel=parallel, budget={"precision": "bfloat16", "recompute": 2, "accumulate": 2})
        trainer = Trainer(config, world=world)
        losses = [trainer.train_step().loss for _ in range(2)]
        _, state = trainer.model(trainer.loader.next().tokens)
        leaves = [leaf for leaf in pytree.tree_leaves(state[0].memory) if isinstance(leaf, torch.Tensor)]
        kinds = {str(leaf.dtype) for leaf in leaves if leaf.is_floating_point()}
        return {
            "losses": losses,
            "state": sorted(kinds),
            "held": sorted({str(p.dtype) for p in whole(trainer).values()}),
        }
    finally:
        torch.set_default_dtype(torch.float64)


def starts_of_some(world: World) -> Any:
    """Losses where documents start in the first half of the rows alone, with a level that no window of is closed
    otherwise; and which of the levels are dead."""
    given = experiment("levels", parallel=SHARDED, optim=PLAIN).model_dump(mode="json")
    given["model"]["levels"][2]["period"] = 64
    config = ExperimentConfig.model_validate(given)
    trainer = Trainer(config, world=meshed(world, config))
    take, first = trainer.loader.next, 6 * world.rank

    def take_with_starts() -> Any:
        batch = take()
        rows = first + torch.arange(len(batch.tokens))[:, None]
        return batch._replace(resets=(rows < 6) & (torch.arange(batch.tokens.shape[1]) == 3))

    trainer.loader.next = take_with_starts  # type: ignore[method-assign]
    losses = [trainer.train_step().loss for _ in range(3)]
    health = model_health(trainer.model, trainer.source, 16, trainer.device)
    return losses, {name: [level.dead for level in levels] for name, levels in health.items()}


def disagreements(world: World) -> list[str]:
    """What ranks with another config each are told."""
    found = []
    for own in ({"optim": {"lr": 0.01 + world.rank}}, {"seed": world.rank}, {"model_dtype": world.rank}):
        try:
            if "model_dtype" in own:
                torch.set_default_dtype((torch.float64, torch.float32)[world.rank])
                own = {}
            Trainer(experiment(**own), world=world)
        except ParallelError as error:
            found.append(str(error))
        finally:
            torch.set_default_dtype(torch.float64)
    return found


@pytest.fixture(scope="module")
def toured() -> list[dict[str, Any]]:
    return run_ranks(2, tour)


def told(cases: dict[str, Any]) -> dict[str, set[str]]:
    """`many` in float64, and the ways that scans have told of themselves as they ran."""
    log, said = logging.getLogger("hecate.distributed"), set[str]()
    handler = logging.Handler()
    handler.emit = lambda record: said.add(record.args[3])  # type: ignore[index,method-assign]
    log.addHandler(handler)
    log.setLevel(logging.DEBUG)
    try:
        return {"found": many(torch.float64, cases), "ways": said}
    finally:
        log.removeHandler(handler)
        log.setLevel(logging.NOTSET)


AGAIN = {"accumulate": 2, "recompute": "full"}


@pytest.mark.spec("DIST-STEP-D1", "DIST-SHARD-D1", "DIST-SHARD-D2", "DIST-COPY-D1", "DIST-EVAL-D1")
@pytest.mark.spec("CTX-TRAIN-I1", "CTX-WAY-D2")
@pytest.mark.parametrize("steps", [3, pytest.param(20, marks=pytest.mark.slow)])
def test_two_processes_train_as_one(steps: int):
    """The third step is the first at the whole rate, and the first after a period of two."""
    cases = {
        "delta, sharded": (experiment("delta", budget={"accumulate": 3}), steps),
        "titans, copied": (experiment("titans", parallel=COPIED, budget={"accumulate": 2}), steps),
        "levels, copied": (experiment("levels", parallel=COPIED, optim=PLAIN), steps),
        "mlp, sharded": (experiment("mlp", budget={"recompute": "full"}), steps),
        "favor, sharded": (
            experiment("favor", optim={"optimizer": "muon", "periods": {"blocks.0.*": 2}}),
            min(steps, 6),
        ),
    }
    pieces = {
        "delta, pieces": (experiment("delta", parallel=PIECES), min(steps, 5)),
        "levels, pieces": (experiment("levels", parallel=PIECES, budget=AGAIN), min(steps, 5)),
    }
    ranks, alone = run_ranks(2, told, cases | pieces), one_process(torch.float64, cases | pieces)
    for some, within in ((cases, 1e-12), (pieces, 1e-11)):
        agree({name: alone[name] for name in some}, [rank["found"] for rank in ranks], within)
    ways = {way.name for config, _ in pieces.values() for way in ways_of(config).values()}
    assert [rank["ways"] for rank in ranks] == [ways, ways]


@pytest.mark.slow
@pytest.mark.spec("CTX-TRAIN-I1", "CTX-GRAD-D1")
@pytest.mark.parametrize(
    ("size", "parallel"),
    [
        *((size, shape) for size in (2, 4) for shape in (SHARDED, COPIED)), (3, SHARDED), (4, BOTH),
        *((size, {"data": 1, "context": size}) for size in (2, 3, 4)),
        (4, {"data": 2, "context": 2}), (4, {"data": 1, "replicate": 2, "context": 2}),
    ],
)  # fmt: skip
def test_every_world_trains_as_one(size: int, parallel: dict[str, Any]):
    budget = {"accumulate": 1 if size == 4 else 2}
    cases = {
        model: (experiment(model, parallel=parallel, budget=budget, optim=PLAIN), 20)
        for model in ("delta", "titans", "levels", "mlp", "hedgehog")
    }
    if "context" in parallel:
        # Norms between levels multiply rounding: a last bit of the start moves their weights by 3e-10 in eight steps.
        cases["levels"] = experiment("levels", parallel=parallel, budget=AGAIN, optim=PLAIN), 5
        del cases["hedgehog"]
    ranks = run_ranks(size, many, torch.float64, cases, patience=280)
    agree(one_process(torch.float64, cases), ranks, 1e-12)
    slow = PLAIN | {"lr": 1e-3}  # parameters move by some hundredths, and rounding in gradients with them
    cases = {model: (experiment(model, parallel=parallel, optim=slow), 20) for model in ("delta", "titans", "mlp")}
    ranks = run_ranks(size, many, torch.float32, cases, patience=280)
    agree(one_process(torch.float32, cases), ranks, 1e-6)


@pytest.mark.spec("DIST-NAN-D1")
@pytest.mark.parametrize("shape", ["sharded", "copied"])
def test_a_nan_of_one_rank_stops_all_before_the_step(toured, shape):
    for found in toured:
        (value, kept), (gradient, still) = found[shape]["nan"]
        assert kept and still
        assert value.startswith("step 1: on rank 1, the loss is nan")
        assert gradient.startswith("step 1: the gradient norm is nan")


@pytest.mark.spec("DIST-STATE-D1")
@pytest.mark.parametrize("shape", ["sharded", "copied"])
def test_states_belong_to_rows(toured, shape):
    """No collective touches them: those of each rank are the rows of one process."""
    alone = states_of(experiment(), World.alone())
    mine = [each[shape]["states"] for each in toured]
    assert len(alone) == len(mine[0]) > 2
    for whole_state, *parts in zip(alone, *mine, strict=True):
        rows = np.concatenate(parts) if whole_state.ndim else parts[0]
        assert np.allclose(rows, whole_state, rtol=0, atol=1e-12)


@pytest.mark.spec("DIST-SAVE-D1", "CTX-TRAIN-I1", "CKPT-RESUME-I1")
@pytest.mark.parametrize("shape", ["sharded", "copied", "pieces"])
def test_a_checkpoint_of_several_goes_on_in_any_world(toured, shape):
    saved = toured[0][shape]["saved"]
    assert saved["same"] and saved["losses"][0] == saved["losses"][1]
    trainer = Trainer(experiment())
    trainer.restore(Checkpoint({k: torch.tensor(v) for k, v in saved["tensors"].items()}, saved["facts"]), "it")
    for _ in range(2):
        trainer.train_step()
    within = 1e-8 if shape == "pieces" else 1e-12  # of pieces the loss, in float32, is summed in another order
    for name, value in whole(trainer).items():
        assert np.allclose(value, saved["after"][name], rtol=0, atol=within)


@pytest.mark.spec("DIST-EVAL-D1")
def test_fewer_rows_than_ranks_are_scored(toured):
    alone = one_row(Trainer(experiment()))
    assert alone.labels > 0
    for found in toured:
        for shape in ("sharded", "copied"):
            assert np.allclose(found[shape]["one row"], list(alone), rtol=0, atol=LOSS)


@pytest.mark.spec("DIST-LOW-D1")
def test_bfloat16_is_of_parameters_in_passes_alone(toured):
    alone = low({}, World.alone())
    exact = many(torch.float32, {"": (experiment(), 2)})[""]["losses"]
    assert not np.allclose(alone["losses"], exact, rtol=0, atol=1e-5)  # it is another arithmetic
    for found in (alone, *(each[shape]["low"] for each in toured for shape in ("sharded", "copied", "pieces"))):
        assert found["held"] == ["float32"] and found["state"] == ["torch.float32"]
        # 8 bits of significand in what blocks hand on
        assert np.allclose(found["losses"], exact, rtol=0, atol=0.05)


@pytest.mark.spec("DIST-STEP-D1", "TRAIN-RUN-D5")
@pytest.mark.filterwarnings("ignore::hecate.errors.StabilityWarning")
def test_documents_that_start_on_one_rank_alone(toured):
    losses, health = starts_of_some(World.alone())
    assert len(health) == 2
    for found in toured:
        assert np.allclose(found["starts"][0], losses, rtol=0, atol=LOSS) and found["starts"][1] == health


@pytest.mark.spec("TRAIN-RUN-D5")
@pytest.mark.filterwarnings("ignore::hecate.errors.StabilityWarning")
def test_levels_of_a_run_in_bfloat16_are_reported():
    trainer = Trainer(experiment("levels", budget={"precision": "bfloat16"}))
    assert len(model_health(trainer.model, trainer.source, 16, trainer.device)) == 2


@pytest.mark.spec("DIST-WORLD-D2")
def test_ranks_that_differ_are_told_where(toured):
    for found in toured:
        lr, seed, dtype = found["disagreements"]
        assert lr.startswith("config.optim.lr is 1.01 on rank 1 and 0.01 on rank 0")
        assert seed.startswith("config.seed is 1 on rank 1 and 0 on rank 0")
        assert dtype.startswith("data.dtype is 'torch.float32' on rank 1")


@pytest.mark.spec("DIST-STEP-D1")
def test_parts_of_a_batch_and_recomputed_blocks_change_nothing():
    budgets = {"plain": {}, "parts": {"accumulate": 4}, "again": {"recompute": 2}}
    found = many(torch.float64, {name: (experiment("levels", budget=own, optim=PLAIN), 3)
                                 for name, own in budgets.items()})  # fmt: skip
    assert found["again"]["losses"] == found["plain"]["losses"]
    for name, value in found["plain"]["after"].items():
        assert np.array_equal(found["again"]["after"][name], value)
        assert np.allclose(found["parts"]["after"][name], value, rtol=0, atol=OF_LEVELS)


@pytest.mark.slow
@pytest.mark.spec("DIST-BLOCK-D1")
def test_compiled_blocks_train_as_plain_ones():
    found = []
    for compiled in ("none", "block"):
        budget = {"compile": compiled, "recompute": 2}
        found.append(many(torch.float64, {"": (experiment("titans", budget=budget), 4)})[""])
    for name, value in found[0]["after"].items():
        assert np.allclose(found[1]["after"][name], value, rtol=0, atol=1e-10)


@pytest.mark.spec("DIST-BLOCK-D1", "DIST-STEP-D1")
def test_what_cannot_be_is_refused():
    for fields, message in (
        ({"budget": {"accumulate": 5}}, "budget.accumulate: must divide batch_size=12, got 5"),
        ({"budget": {"accumulate": 2}, "optim": {"optimizer": "dgd"}}, "'dgd' steps by the samples of one backward"),
        ({"parallel": {"data": "auto", "replicate": "auto"}}, "parallel.replicate: data is auto, too"),
    ):
        with pytest.raises(ConfigError, match=message.replace(".", r"\.")):
            Trainer(experiment(**fields))


@pytest.mark.spec("CTX-TRAIN-I1")
@pytest.mark.parametrize(
    ("ranks", "budget", "words"),
    [(2, {"compile": "block"}, "budget.compile='block' compiles blocks"), (32, {}, "sequences of 16 tokens cannot be")],
)
def test_what_ranks_cannot_share_is_refused(ranks, budget, words):
    world: Any = SimpleNamespace(extent=lambda axis: ranks, mesh=object())
    with pytest.raises(ConfigError, match=f"parallel.context: is {ranks}, and {words}"):
        context_of(experiment("delta", budget=budget), world)


def test_blocks_are_needed_where_they_are_asked_for():
    for setting in ({"recompute": "full"}, {"compile": "block"}):
        with pytest.raises(ConfigError, match="works on blocks, and Linear has none"):
            Trainer(experiment(budget=setting), model=torch.nn.Linear(2, 2))


def attempt(folder: str, port: int, number: int) -> tuple[Any, str]:
    """One attempt of the processes of a launch, whose store outlives them: how it ends, and what is printed."""
    launch = {"RESTART_COUNT": str(number), "USE_AGENT_STORE": "True", "RUN_ID": "it"}
    os.environ["MASTER_PORT"] = str(port)
    os.environ.update({f"TORCHELASTIC_{name}": value for name, value in launch.items()})
    sys.modules["matplotlib.figure"] = None  # type: ignore[assignment]
    step, said = Trainer.train_step, io.StringIO()

    def dying(self: Trainer) -> Any:
        if self.step == 13 and number == 0:
            raise RuntimeError("died")
        return step(self)

    with pytest.MonkeyPatch.context() as patch, redirect_stdout(said), chdir(folder):
        patch.setattr(Trainer, "train_step", dying)
        try:
            main(["train", "it.yaml"])
            return "returned", ""
        except SystemExit as end:
            return end.code, said.getvalue()


@pytest.mark.spec("DIST-RUN-D1", "DIST-RUN-D2")
def test_a_launch_goes_on_after_its_processes_have_died(tmp_path):
    config = it(tmp_path)
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert run_ranks(2, attempt, str(tmp_path), store.port, 0) == [(1, "")] * 2
    (code, said), other = run_ranks(2, attempt, str(tmp_path), store.port, 1)
    assert code == 0 and said.count("finished at step 20") == 1 and other == (0, "")
    went_on(tmp_path, config)


def it(folder: Path) -> Any:
    """The experiment that a launch trains, as a file."""
    torch.set_default_dtype(torch.float32)
    config = experiment("delta", data=TASK, sample={"every": 10})
    (folder / "it.yaml").write_text(dump_experiment(config))
    return config


def went_on(folder: Path, config: Any) -> None:
    """One run, which went on from its checkpoint, beside one of one process."""
    assert [path.name for path in (folder / "runs").iterdir()] == ["worlds"]
    there = [json.loads(line) for line in (folder / "runs/worlds/metrics.jsonl").read_text().splitlines()]
    alone = quiet_run(config, folder / "alone")
    here = [json.loads(line) for line in (folder / "alone/metrics.jsonl").read_text().splitlines()]
    assert [r["step"] for r in there if r["event"] == "train"] == list(range(1, 21)) and alone.step == 20
    assert [r["step"] for r in there if r["event"] == "resume"] == [10]
    for event, facts in {"train": ("loss", "grad_norm"), "eval": ("validation_loss", "accuracy")}.items():
        pairs = zip(*([r for r in each if r["event"] == event] for each in (there, here)), strict=True)
        for one, two in pairs:
            # AdamW divides by roots of squares, so rounding grows with the steps.
            assert np.allclose([one[f] for f in facts], [two[f] for f in facts], rtol=0, atol=1e-4), (one, two)
    written = {path.name for path in (folder / "runs/worlds").iterdir()}
    assert written == {path.name for path in (folder / "alone").iterdir()}


def gone_on(folder: str, parallel: dict[str, Any], steps: int) -> dict[str, Any]:
    """A run that goes on with what another world has left, saving behind itself."""
    warnings.simplefilter("ignore")
    config = chained(steps, parallel)
    with start(config.parallel, timeout=60.0) as world:
        resume = (Path(folder) / "config.yaml").exists()
        world.any(False)  # rank 0 writes it
        quiet_run(config, Path(folder), resume=resume, world=world)
        run = Trainer(config, world=world)
        path = Path(folder) / "checkpoints" / f"step_{steps:08d}"
        run.restore(load_checkpoint(path), str(path))
        return whole(run)


def chained(steps: int, parallel: dict[str, Any]) -> Any:
    budget = {"steps": steps, "save": "async", "checkpoint_every": 2, "eval_every": 100}
    return experiment("titans", parallel=parallel, budget=budget, optim=PLAIN | {"schedule": "constant"})


@pytest.mark.slow
@pytest.mark.spec("CKPT-SHARD-D2", "CKPT-ASYNC-D1", "DIST-SAVE-D1")
def test_a_run_goes_on_in_one_world_after_another(tmp_path):
    """HSDP, then shards of three, then pieces of sequences, then shards and pieces, then one process, each after
    another; numbers are those of one process that never stopped, but for the rounding of its loss in float32."""
    both, pieces = {"replicate": 2, "data": 2}, {"data": 1, "context": 2}
    worlds = [(4, both), (3, {"data": 3}), (2, pieces), (4, {"data": 2, "context": 2}), (1, {"data": 1})]
    for number, (size, parallel) in enumerate(worlds, 1):
        given = str(tmp_path / "run"), parallel, 4 * number
        ranks = run_ranks(size, gone_on, *given, dtype=torch.float64)
    torch.set_default_dtype(torch.float64)
    alone = Trainer(chained(20, {"data": 1}), world=World.alone())
    for _ in range(20):
        alone.train_step()
    for name, value in whole(alone).items():
        assert np.allclose(ranks[0][name], value, rtol=0, atol=1e-6), name
