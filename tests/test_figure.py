"""Figures of one look: the same bytes every time, legible on light and dark paper, settings of others untouched."""

from __future__ import annotations

import re
import sys
from itertools import pairwise

import pytest

from hecate.errors import ConfigError
from hecate.figure import COLOURS, GREY, INK, _dark, figure_type, finish, images, write_images

matplotlib = pytest.importorskip("matplotlib")
COLOURED = re.compile(r"(fill|stroke): (#[0-9a-f]{6})")


def draw(figure):
    axes = figure.subplots()
    for index, colour in enumerate(COLOURS):
        axes.plot([1, 2, 3], [index, 2 * index, 1 + 1e-3 * index], color=colour, label=f"curve {index}")
    axes.plot([1, 2], [1, float("nan")], label="ends early")
    axes.axhline(2, color=GREY, label="level")
    finish(axes, "title", "x", "y")


def luminance(colour):
    """Relative, as WCAG 2 has it."""
    parts = (int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5))
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(first, second):
    low, high = sorted((luminance(first), luminance(second)))
    return (high + 0.05) / (low + 0.05)


def test_the_same_bytes_every_time_and_settings_stay_what_a_user_made_them():
    with matplotlib.rc_context({"axes.grid": False, "font.size": 31.0}):
        before = dict(matplotlib.rcParams)
        found = images((5, 3), draw)
        assert dict(matplotlib.rcParams) == before
    assert found == images((5, 3), draw)
    assert list(found) == ["png", "svg"] and found["png"].startswith(b"\x89PNG")
    assert b"<dc:date>" not in found["svg"] and b">curve 3</text>" in found["svg"]
    assert b'id="id0"' in found["svg"] and not re.search(rb'id="[a-zA-Z]+[0-9a-f]{10}"', found["svg"])


def test_every_colour_has_its_own_on_dark_paper():
    svg = images((5, 3), draw)["svg"].decode()
    style = svg[svg.index("<style>@media") : svg.index("</style>")]
    body = svg[svg.index("</style>") :]
    used = set(COLOURED.findall(body))
    assert {("fill", "#ffffff"), ("stroke", COLOURS[0]), ("fill", INK)} <= used
    for what, colour in used:
        assert f'[style*="{what}: {colour}"]{{{what}:{_dark(colour)}!important}}' in style
    paper = _dark("#ffffff")
    assert contrast(_dark(INK), paper) > 7 and contrast(INK, "#ffffff") > 7  # WCAG's AAA of text
    assert contrast(_dark(GREY), paper) > 3 and all(contrast(_dark(colour), paper) > 3 for colour in COLOURS)
    assert len(set(map(_dark, COLOURS))) == len(COLOURS)


def test_names_of_curves_that_end_together_stand_apart():
    found = []
    images((5, 3), lambda figure: found.append(figure) or draw(figure))
    found[0].draw_without_rendering()  # at its own size again
    names = found[0].axes[0].texts
    assert {text.get_text() for text in names} == {*(f"curve {index}" for index in range(7)), "ends early", "level"}
    boxes = sorted((matplotlib.text.Text.get_window_extent(text) for text in names), key=lambda box: box.y0)
    assert all(low.y1 <= high.y0 for low, high in pairwise(boxes))
    assert all(box.x0 > found[0].axes[0].get_window_extent().x1 for box in boxes)


def test_a_legend_stands_below_where_there_is_more_than_curves_or_no_room_beside():
    found = []

    def bars(figure):
        axes = figure.subplots()
        axes.bar([1, 2], [3, 4], label="bars")
        axes.errorbar([1, 2], [3, 4], 0.1, label="curve")
        finish(axes, "", "", "")
        found.append(axes)

    images((4, 3), bars)
    plain = figure_type()(figsize=(4, 3))
    draw(plain)
    for axes in (*found, *plain.axes):
        assert axes.get_legend() and not axes.texts


def test_files_have_a_name_and_its_endings(tmp_path):
    given = {"png": b"1", "svg": b"2"}
    for name in ("microscope-blocks.0.memory", "a.png", "b.svg"):
        paths = write_images(tmp_path / name, given)
        stem = name.removesuffix(".png").removesuffix(".svg")
        assert [path.name for path in paths] == [f"{stem}.png", f"{stem}.svg"]
        assert [path.read_bytes() for path in paths] == [b"1", b"2"]


def test_without_matplotlib_there_are_none(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert figure_type() is None and images((5, 3), draw) == {}
    with pytest.raises(ConfigError, match=r"a picture needs matplotlib, which is not installed"):
        figure_type("a picture")
