"""One version: that of the package, of the changelog, of the citation and of what is built."""

from __future__ import annotations

import re
import tomllib
from datetime import date
from pathlib import Path

import yaml

import hecate

ROOT = Path(__file__).parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT, CITATION = PYPROJECT["project"], yaml.safe_load((ROOT / "CITATION.cff").read_text())
EXTRAS = PROJECT["optional-dependencies"]


def test_version_changelog_and_citation_agree():
    sections = re.findall(r"^## \[(.+?)\](?: - (.+))?$", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert sections[0] == ("Unreleased", "")
    assert sections[1] == (hecate.__version__, str(CITATION["date-released"]))
    assert CITATION["version"] == hecate.__version__
    dates = [date.fromisoformat(day) for _, day in sections[1:]]
    assert dates == sorted(dates, reverse=True) and len({name for name, _ in sections}) == len(sections)


def test_a_built_package_has_the_version_of_the_code():
    assert "version" not in PROJECT and PROJECT["dynamic"] == ["version"]
    assert PYPROJECT["tool"]["hatch"]["version"]["path"] == "hecate/__init__.py"


def test_extras_are_those_that_users_expect():
    assert {"cpu", "gpu", "cuda", "data", "hf", "peers", "track", "plot", "docs", "test", "all"} <= set(EXTRAS)
    assert EXTRAS["cuda"] == ["hecate-memory[gpu]"]
    assert {re.split(r"[>=;]", line)[0] for line in EXTRAS["gpu"]} == {"triton", "fla-core"}
    for line in (line for name in ("all", "cuda") for line in EXTRAS[name]):
        assert set(re.fullmatch(r"hecate-memory\[(.+)\]", line)[1].split(",")) <= set(EXTRAS)


TOLD = [
    ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md", ROOT / "constraints.txt",
    *(ROOT / "docs").rglob("*.md"), *(ROOT / "specs").glob("*.md"), *(ROOT / "notebooks").glob("*.ipynb"),
    *(path for folder in ("hecate", "studies", "tests") for path in (ROOT / folder).rglob("*.py")),
]  # fmt: skip


def test_nobody_is_told_to_install_the_package_of_another_project():
    """The package index has a testing library of 2015 under the name of what is imported here."""
    elsewhere = re.compile(r"install[ '\"\\]+hecate\b(?!-memory)|\bhecate\[[a-z]")
    found = [path for path in TOLD if elsewhere.search(path.read_text()) and path != Path(__file__)]
    assert len(TOLD) > 200 and not found
    assert elsewhere.search("pip install 'hecate[hf]'") and elsewhere.search("install hecate for it")


def test_the_package_is_not_published_under_the_name_that_is_imported():
    assert PROJECT["name"] == "hecate-memory" and PROJECT["scripts"] == {"hecate": "hecate.__main__:main"}
    assert {*PROJECT.get("urls", {}).values()} <= {CITATION.get("repository-code"), CITATION.get("url")}
    wheel = PROJECT["name"].replace("-", "_")
    assert f"/{wheel}-*.whl" in (ROOT / ".ci/run").read_text()


def test_an_install_line_names_an_extra_that_there_is():
    called = [re.findall(r"install_line\(['\"](\w+)['\"]\)", path.read_text()) for path in TOLD if path.suffix == ".py"]
    lines = [re.findall(r'install -c constraints\.txt (?:-e )?"\.\[(.+?)\]"', path.read_text()) for path in TOLD]
    named = [extra for found in (*called, *lines) for names in found for extra in names.split(",")]
    assert len(named) > 10 and {*named} - {"{extra}"} <= set(EXTRAS)
