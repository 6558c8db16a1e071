"""Figures hold what they claim to."""

from __future__ import annotations

import re
import sys

import numpy as np
import pytest
import torch

from hecate.errors import ConfigError, install_line
from hecate.microscope import MemoryView, View, draw
from hecate.microscope.report import _facts
from hecate.rule import Gates
from tests.memories import config_of
from tests.microscope.common import asked_of

pytest.importorskip("matplotlib.figure")


def axes_of(figure):
    return {axis.get_title(loc="left"): axis for axis in figure.axes}


@pytest.mark.spec("SCOPE-DRAW-D1")
def test_a_figure_shows_the_numbers():
    view = MemoryView("some memory", [asked_of(config_of(retention="decay"), length=9)])
    axes = axes_of(view.draw(row=1))
    for head in (0, 1):
        shown = axes[f"head {head}"].images[0].get_array()
        below = np.tril_indices(9)
        np.testing.assert_array_equal(shown[below], view.attention.map[1, head].numpy()[below])
        assert shown.mask[np.triu_indices(9, 1)].all()  # where no token looks there is no colour
    strip = next(axis for axis in view.draw(row=1).axes if axis.get_xlabel() == "start")
    start = view.attention.start[1, 0].norm(dim=-1)
    rest = (view.answers[1, :, 0] - view.attention.start[1, 0]).norm(dim=-1)
    np.testing.assert_allclose(strip.images[0].get_array()[:, 0], start / (start + rest))
    lines = {
        "memory: norm": view.norms["weight"][1].mean(0),
        "memory: effective rank": view.ranks["weight"][1].mean(0),
        "recall against age": view.recall.by_age(row=1).means.mean(0),
        "gates": view.gates["lr"][1].mean(1),
    }
    for title, expected in lines.items():
        np.testing.assert_allclose(axes[title].lines[0].get_ydata(), expected)
        assert axes[title].get_xlabel() and axes[title].get_ylabel()
    labels = [text.get_text() for text in axes["gates"].get_legend().get_texts()]
    assert labels == ["lr", "retain"]


@pytest.mark.spec("SCOPE-DRAW-D1")
@pytest.mark.parametrize("idle", [[0], [0, 1]], ids=["one head", "all heads"])
def test_heads_that_never_fire(idle):
    asked = asked_of(config_of(bias="dot"), length=9)
    lr = torch.full(asked.v.shape[:3], 0.5)
    lr[:, :, idle] = 0
    view = MemoryView("some memory", [asked._replace(gates=Gates(lr=lr))])
    axis = axes_of(view.draw())["recall against age"]
    facts = _facts(view)
    if len(idle) == 2:
        assert facts[2] == "nothing was written" == axis.texts[0].get_text()
        assert not axis.lines
        return
    expected = view.recall.by_age().means[1]
    np.testing.assert_allclose(axis.lines[0].get_ydata(), expected)
    assert facts[2] == f"{float(expected[0]):.2f} -> {float(expected[-1]):.2f}"


@pytest.mark.spec("SCOPE-DRAW-D1")
@pytest.mark.parametrize(
    "fields",
    [{"structure": "mlp"}, {"structure": "vector"}, {"bias": "dot", "feature_map": "elu"}],
    ids=["not linear", "diagonal", "all positive"],
)
def test_every_kind_of_memory_is_drawn(fields, tmp_path):
    view = MemoryView("m", [asked_of(config_of(**fields), length=5, width=3, heads=3)], points=3)
    figure = view.draw(heads=2)
    maps = [title for title in axes_of(figure) if title.startswith("head")]
    if fields["structure" if "structure" in fields else "bias"] == "mlp":
        assert not maps and "structure 'mlp' is not linear" in figure.get_suptitle()
    else:
        assert maps == ["head 0", "head 2"]
        return
    path = view.save(tmp_path / "m.png")
    assert path.read_bytes().startswith(b"\x89PNG") and {*tmp_path.iterdir()} == {path, tmp_path / "m.svg"}


def test_a_file_for_each_memory(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(MemoryView, "save", lambda self, path, **how: drawn.append(path) or path)
    one = MemoryView("a/b", [asked_of(length=3)], points=1)
    view = View({"a/b": one, "a b": one, "blocks.0.memory": one})
    folder = tmp_path / "deep" / "er"
    wanted = ["a_b", "a_b-2", "blocks.0.memory"]
    assert view.save(folder) == drawn == [folder / f"microscope-{name}.png" for name in wanted]
    assert folder.is_dir()


@pytest.mark.spec("SCOPE-DRAW-D1")
def test_rings_mark_what_stands_out():
    weights = torch.full((24, 24), 0.1).tril()
    weights[20, 3] = -2.0  # the sign does not matter
    weights[range(24), range(24)] = 9.0  # nor does a token's own weight
    weights[12:, 1] = 4.0
    weights[20, 1] = 0.1
    weights[8, 2] = 0.2  # more than usual, yet not 3 times
    rows, columns = draw.outstanding(weights)
    assert (rows.tolist(), columns.tolist()) == ([20], [3])  # and not one that all look at
    assert not draw.outstanding(torch.zeros(4, 4))[0].numel()
    for length, found in ((128, 1), (129, 0)):  # of longer maps rings would hide more
        single = torch.zeros(length, length)
        single[100, 40] = 1.0
        assert draw.outstanding(single)[0].numel() == found


def test_errors(monkeypatch):
    view = MemoryView("m", [asked_of(length=3)], points=1)
    with pytest.raises(ConfigError, match="there are 2 sequences, got row 2"):
        view.draw(row=2)
    with pytest.raises(ConfigError, match="at least one head"):
        view.draw(heads=0)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match="needs matplotlib.*" + re.escape(install_line("plot"))):
        view.draw()
