"""One version: that of the package, of the changelog, of the citation and of what is built."""

from __future__ import annotations

import re
import tomllib
from datetime import date
from pathlib import Path

import yaml

import hecate

ROOT = Path(__file__).parent.parent


def test_version_changelog_and_citation_agree():
    sections = re.findall(r"^## \[(.+?)\](?: - (.+))?$", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert sections[0] == ("Unreleased", "")
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert sections[1] == (hecate.__version__, str(citation["date-released"]))
    assert citation["version"] == hecate.__version__
    dates = [date.fromisoformat(day) for _, day in sections[1:]]
    assert dates == sorted(dates, reverse=True) and len({name for name, _ in sections}) == len(sections)


def test_a_built_package_has_the_version_of_the_code():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "version" not in project["project"] and project["project"]["dynamic"] == ["version"]
    assert project["tool"]["hatch"]["version"]["path"] == "hecate/__init__.py"


def test_extras_are_those_that_users_expect():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert {"cpu", "gpu", "cuda", "data", "hf", "peers", "track", "plot", "docs", "test", "all"} <= set(extras)
    assert extras["cuda"] == ["hecate[gpu]"]
    assert {re.split(r"[>=;]", line)[0] for line in extras["gpu"]} == {"triton", "fla-core"}
    for line in (line for name in ("all", "cuda") for line in extras[name]):
        assert set(re.fullmatch(r"hecate\[(.+)\]", line)[1].split(",")) <= set(extras)
