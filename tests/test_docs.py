"""The pages that are written by hand: their code runs, and what they cite exists."""

from __future__ import annotations

import importlib
import re

import pytest

from tests.hf.families import modeling
from tests.registries import restore_registries
from tests.spec_files import ROOT, SPEC_ID, Example, examples, run_example, stated

PAGES = sorted((ROOT / "docs" / "pages").glob("*.md"))
BLOCKS = [example for path in PAGES for example in examples(path)]


@pytest.mark.parametrize("example", BLOCKS, ids=lambda example: example.name)
def test_the_code_of_a_page_runs(example: Example, monkeypatch: pytest.MonkeyPatch):
    restore_registries(monkeypatch)
    if example.name.startswith("adopt"):
        modeling("qwen3_5")  # whatever kernels an import before this test has found
    run_example(example, monkeypatch)


def test_pages_cite_existing_statements():
    cited = {name for path in PAGES for name in SPEC_ID.findall(path.read_text())}
    assert cited and not cited - stated()


def test_every_named_rule_is_measured():
    """A row in each table of the page, in the order of the registry."""
    from hecate.rule import RULES

    tables = re.split(r"^\|[ :|-]+\|$", (ROOT / "docs/pages/rules.md").read_text(), flags=re.M)[1:]
    rows = [re.findall(r"^\| (\w+) \|", table, re.M) for table in tables]
    whole = [names for names in rows if len(names) > len(RULES) / 2]
    assert whole and all(names[: len(RULES)] == list(RULES) for names in whole), (
        "run `python -m studies cost-rules` and put its rows into docs/pages/rules.md"
    )


def test_the_page_of_rules_says_what_sets_layers_apart(monkeypatch: pytest.MonkeyPatch):
    from hecate.rule import RULES

    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    table = importlib.import_module("reference").layers_of_rules()
    assert (
        table.count("\n") == len(RULES) + 2
        and "| kda | SiLU of the output gate in place of a sigmoid (0.90) |" in table
    )
    assert "<!-- layers of the rules -->" in (ROOT / "docs/pages/rules.md").read_text()


def test_links_lead_somewhere():
    pages = [
        *PAGES,
        ROOT / "docs/landing.md",
        *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")),
    ]
    links = {(p, link) for p in pages for link in re.findall(r"\]\(([^)#]+)\)", p.read_text())}
    links = {
        pair for pair in links if "docs/reference" not in str((pair[0].parent / pair[1]).resolve())
    }  # made at build
    own = {(path, link) for path, link in links if not link.startswith("https://")}
    assert own and not [link for path, link in own if not (path.parent / link).exists()]


def test_limits_that_security_promises_are_those_of_the_code():
    from hecate.data import Text, shards, tokenizer
    from hecate.data.corpus import _AT_ONCE, MAX_DOCUMENT, MAX_LINE
    from hecate.train import checkpoint, document
    from hecate.variant import MAX_DEPTH

    text = (ROOT / "SECURITY.md").read_text()
    rows = dict(re.findall(r"^\| ([^|]+?) \| ([^|]+?) \| [^|]+ \|$", text, re.M))
    config = (document.MAX_BYTES >> 20, document.MAX_DEPTH, document.MAX_ALIASES, document.MAX_VALUES)
    assert rows["a config"] == "{} MiB, {} levels, {} aliases, {:,} values".format(*config)
    sizes = {
        "a document, unpacked": MAX_DOCUMENT, "a line of JSON, unpacked": MAX_LINE, "`tokens.json`": shards._MOST_BYTES,
        "text that is trained on in memory": Text.model_fields["max_bytes"].default,
    }  # fmt: skip
    assert {name: rows[name] for name in sizes} == {name: f"{size >> 20} MiB" for name, size in sizes.items()}
    assert rows["a page of Parquet, unpacked"] == f"{_AT_ONCE >> 20} MiB more than a document"
    assert rows["a vocabulary of token shards"] == f"{tokenizer.MOST:,} tokens"
    manifest = (checkpoint.MAX_BYTES >> 20, MAX_DEPTH, checkpoint.MAX_AXES)
    assert rows["a manifest"] == "{} MiB, {} levels, {} axes of a tensor, 64 bits of an integer".format(*manifest)


def test_security_is_in_the_source_distribution():
    import tomllib

    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]
    assert "/SECURITY.md" in build["targets"]["sdist"]["include"]


def test_pages_of_the_api_begin_with_a_summary(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    from reference import FIRST, cell, package

    for name, first in FIRST.items():
        assert set(first) <= set(importlib.import_module(name).__all__), name
    page = package("hecate.nn")
    table, full = page.split("```{eval-rst}")[1:]
    rows = re.findall(r"^\| \{py:obj\}`(\w+) <hecate\.nn\.\1>` \| (.+) \|$", table, re.MULTILINE)
    names = [row[0] for row in rows]
    assert names[: len(FIRST["hecate.nn"])] == list(FIRST["hecate.nn"])
    assert re.findall(r"\.\. auto(?:class|function):: hecate\.nn\.(\w+)", full) == names
    assert {"Memory", "SlidingState", "linear_attention"} <= set(names) and all(text for _, text in rows)
    assert cell("`x [B, T] | y_t` and a_b | [c]") == r"`x [B, T] \| y_t` and a\_b \| \[c\]"


def test_docstrings_become_what_sphinx_reads(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    from docstrings import as_rst

    given = ["A map: |x|*2, `a*b`s. y_ is", "", "    code = x * 2", "", "Cost: O(n)", "", "Args:", "    x: one * two"]
    assert as_rst(given) == [
        r"A map: \|x\|\*2, `a*b`\ s. y\_ is", "", "::", "", "    code = x * 2", "", "", "**Cost.** O(n)", "", "Args:",
        r"    x: one \* two",
    ]  # fmt: skip
    given = ["A map.", "", r"Formula: $a_1 = \frac{1}", "{2}$", "$b = |a|$", "Cost: O(n)"]
    found = [line for line in as_rst(given) if line]
    assert found == ["A map.", r".. math:: a_1 = \frac{1} {2}", ".. math:: b = |a|", "**Cost.** O(n)"]


def test_pages_name_existing_studies_and_variants():
    from hecate import phi
    from studies.study import studies

    text = "\n".join(path.read_text() for path in PAGES)
    for name in re.findall(r"python -m studies ([a-z][\w-]*)", text):
        assert name in ("all", "cost", *studies())
    assert not [name for name in re.findall(r"`phi\.(\w+)`", text) if not hasattr(phi, name)]
