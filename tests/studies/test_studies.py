"""Every study's quick run, and the table, files and errors that studies share."""

from __future__ import annotations

import csv
import json
import math
import re
import sys

import pytest
import torch

from hecate.errors import CheckpointError, ConfigError, install_line
from studies import levels
from studies.__main__ import main
from studies.study import Result, Run, Spread, Study, progress, run_study, studies
from tests.studies import test_capacity, test_overwrite

SHOWN = {module.__name__.rpartition("_")[2]: module.quick_run_shows for module in (
    test_capacity, test_overwrite
)}  # fmt: skip
"""What the numbers of a quick run have to say."""
PNG = b"\x89PNG\r\n\x1a\n"


pytestmark = pytest.mark.usefixtures("float32")


COINS = "How often does a coin fall on its head?"


def coins(run):
    heads = []
    for seed in progress(run.seeds, "coins"):
        g = torch.Generator().manual_seed(seed)
        heads.append(torch.rand(10 if run.quick else 100, generator=g).lt(0.5).float().mean())

    def draw(figure):
        figure.subplots().plot(heads)

    share = Spread.of(heads)
    rows = [("fair", 0.5, share, 3), ("bent, or so", None, 0.25, None)]
    data = {"heads": torch.stack(heads).tolist(), "none": math.nan}
    columns = ("coin", "claimed", "heads (share)", "tosses")
    return Result(columns, rows, ["a note"], draw, data=data)


@pytest.fixture
def study(monkeypatch):
    """One small study more, as if it stood in a file of the folder."""
    made = Study("coins", COINS, coins, seeds=8)
    monkeypatch.setattr(levels, "COINS", made, raising=False)
    return made


def read(path):
    with path.open(newline="") as file:
        return list(csv.reader(file))


QUICK = [name for name in studies() if name != "gpu" and not name.startswith("cost-")]


# `.ci/run` runs `python -m studies all --quick`; here is the cheapest of those whose numbers have something to say.
@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n == "overwrite" else pytest.mark.slow) for n in QUICK])
def test_a_quick_run_of_every_study(name, tmp_path, capsys):
    before = torch.get_rng_state()
    result = run_study(name, quick=True, out=tmp_path)
    assert torch.equal(torch.get_rng_state(), before), "draws from the global generator"
    assert result.rows and result.notes and studies()[name].about[-1] in ".?"
    cells = [cell for row in result.rows for cell in row]
    values = [value for cell in cells for value in (cell[:2] if isinstance(cell, Spread) else [cell])]
    numbers = [value for value in values if isinstance(value, int | float)]
    assert numbers and all(math.isfinite(value) for value in numbers)
    assert any(isinstance(cell, Spread) and cell.standard_error > 0 for cell in cells)
    if name in SHOWN:
        SHOWN[name](result)
    out = capsys.readouterr().out
    assert "seeds 0 to 1" in out and all(str(row[0]) in out for row in result.rows)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        f"{name}-quick.{ending}" for ending in ("csv", "json", "png", "svg")
    ]
    table = read(tmp_path / f"{name}-quick.csv")
    assert len(table) == 1 + len(result.rows) and len({len(row) for row in table}) == 1
    facts = json.loads((tmp_path / f"{name}-quick.json").read_text())
    assert facts["seeds"] == [0, 1] and len(facts["rows"]) == len(result.rows)
    image = (tmp_path / f"{name}-quick.png").read_bytes()
    assert image.startswith(PNG) and len(image) > 10_000


@pytest.mark.slow
@pytest.mark.parametrize("name", ["capacity", "levels", "optim", "overwrite", "recall", "words"])
def test_the_same_seeds_give_the_same_files(name, tmp_path):
    for folder in ("first", "second"):
        run_study(name, quick=True, out=tmp_path / folder, figure=False)
    for ending in ("csv", "json"):
        first, second = ((tmp_path / folder / f"{name}-quick.{ending}").read_bytes() for folder in ("first", "second"))
        assert first == second


def test_the_files_say_what_the_table_says(study, tmp_path, capsys):
    result = run_study("coins", seeds=3, out=tmp_path / "deep" / "er")
    folder = tmp_path / "deep" / "er"
    share = result.rows[0][2]
    assert read(folder / "coins.csv") == [
        ["coin", "claimed", "heads (share)", "heads (share): standard error", "tosses"],
        ["fair", "0.5", repr(share.mean), repr(share.standard_error), "3"],
        ["bent, or so", "", "0.25", "", ""],
    ]
    facts = json.loads((folder / "coins.json").read_text())
    heads = {"mean": share.mean, "standard_error": share.standard_error, "seeds": 3}
    assert facts["rows"][0] == ["fair", 0.5, heads, 3]
    assert facts["rows"][1] == ["bent, or so", None, 0.25, None]
    assert facts["seeds"] == [0, 1, 2] and facts["quick"] is False
    assert len(facts["data"]["heads"]) == 3 and facts["data"]["none"] is None
    assert (folder / "coins.png").read_bytes().startswith(PNG)
    out, err = capsys.readouterr()
    assert out.splitlines()[:2] == ["coins: " + study.about, "seeds 0 to 2"]
    assert f"{share.mean:.3f}+-{share.standard_error:.3f}" in out and "- a note" in out
    assert err == "coins: 3\n"


def test_a_quick_run_replaces_no_full_one(study, tmp_path):
    run_study("coins", out=tmp_path, figure=False)
    full = (tmp_path / "coins.json").read_bytes()
    run_study("coins", quick=True, out=tmp_path, figure=False)
    assert (tmp_path / "coins.json").read_bytes() == full
    assert json.loads(full)["seeds"] == list(range(study.seeds))
    assert not list(tmp_path.glob("*.png"))


def test_what_is_kept_is_not_made_again(tmp_path, capsys):
    run = Run("coins", [0], out=tmp_path / "new")
    assert run._replace(quick=True).kept()("a", lambda: 1) == 1 and not run.out.exists()
    kept = run.kept()
    assert kept([0.1, {"b": None}], lambda: [math.inf, 2]) == kept([0.1, {"b": None}], lambda: 1 / 0) == [math.inf, 2]
    assert capsys.readouterr().err == ""
    again = run.kept()
    assert again([0.1, {"b": None}], lambda: 1 / 0) == [math.inf, 2] and again([0.1, {}], lambda: 3) == 3
    assert "1 results kept in " in capsys.readouterr().err
    assert len((run.out / "coins-runs.jsonl").read_text().splitlines()) == 2


def test_where_nothing_can_be_written_is_said(study, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="cannot write .*file/out: .*; choose another --out"):
        run_study("coins", out=tmp_path / "file" / "out", figure=False)


def test_the_command(study, tmp_path, capsys):
    main(["--list"])
    assert study.about in capsys.readouterr().out
    main(["coins", "--seeds", "1", "--out", str(tmp_path), "--no-figure"])
    assert (tmp_path / "coins.csv").exists()
    assert "seed 0\n" in capsys.readouterr().out
    with pytest.raises(SystemExit) as caught:
        main(["coin"])
    assert caught.value.code == 2
    err = capsys.readouterr().err
    assert "no study 'coin'. Did you mean 'coins'? Known: " in err and " coins, " in err and ", cost, all." in err
    assert "Did you mean 'coins'?" in err


def test_all_studies_run_one_after_the_other(study, tmp_path, monkeypatch, capsys):
    dice = study._replace(name="dice", about="And a die?")
    monkeypatch.setattr("studies.study.studies", lambda: {"coins": study, "dice": dice})
    main(["all", "--quick", "--out", str(tmp_path), "--no-figure"])
    assert {path.name for path in tmp_path.iterdir()} == {
        f"{name}-quick.{ending}" for name in ("coins", "dice") for ending in ("csv", "json")
    }
    out = capsys.readouterr().out
    assert out.index(study.about) < out.index(dice.about) < out.index("study  seconds")


def test_without_matplotlib_the_way_out_is_named_before_any_work(study, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match="--no-figure.*" + re.escape(install_line("plot"))):
        run_study("coins", out=tmp_path)
    assert not list(tmp_path.iterdir())
    run_study("coins", out=tmp_path, figure=False)


def test_spread():
    spread = Spread.of([1.0, 2.0, 3.0])
    assert spread == (2.0, 1 / math.sqrt(3), 3) and str(spread) == "2.000+-0.577"
    alone = Spread.of([0.5])
    assert math.isnan(alone.standard_error) and str(alone) == "0.500"


def test_faults_of_a_study_are_named(study, monkeypatch, capsys):
    with pytest.raises(ConfigError, match="row 1 of a result has 1 cells for 2 columns"):
        Result(("a", "b"), [(1, 2), (1,)], [], lambda figure: None)
    with pytest.raises(SystemExit):
        main(["coins", "--seeds", "0"])
    assert "--seeds must be in [1, 10000], got 0" in capsys.readouterr().err
    monkeypatch.setattr(levels, "OTHER", study._replace(about="?"), raising=False)
    with pytest.raises(ConfigError, match="two studies are called 'coins'; give that of studies.levels another name"):
        studies()
