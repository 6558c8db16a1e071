"""The specs hold together: examples run, ids are unique, exercised and cited truly."""

from __future__ import annotations

import re

import pytest

from tests.spec_files import (
    ROOT,
    SPEC_ID,
    SPECS,
    Example,
    examples,
    files,
    marked,
    marked_in_tests,
    run_example,
    stated,
    statements,
)

BLOCKS = [example for path in files() for example in examples(path)]
CONTRACT = ("purpose", "expects", "guarantees", "cost", "trade-off", "source")


@pytest.mark.parametrize("example", BLOCKS, ids=lambda example: example.name)
def test_worked_example(example: Example, monkeypatch: pytest.MonkeyPatch):
    assert re.search(r"^\s*(assert |raise |with pytest.raises)", example.source, re.MULTILINE)
    run_example(example, monkeypatch)


def test_ids_are_unique():
    names = [name for path in files() for name in statements(path.read_text())]
    assert names, "no statements found"
    assert not {name for name in names if names.count(name) > 1}


def malformed(text: str) -> list[str]:
    """Lines that look like statements, yet whose id the other checks would not see."""
    lines = [line for line in text.splitlines() if re.match(r"^\s*[-*] \*\*[A-Z0-9]+-[A-Z0-9-]+", line)]
    return [line for line in lines if not statements(line)]


def test_statements_are_well_formed():
    assert not [f"{path.name}: {line}" for path in files() for line in malformed(path.read_text())]


def test_every_statement_is_exercised():
    in_examples = {name for example in BLOCKS for name in SPEC_ID.findall(example.source)}
    missing = stated() - in_examples - marked_in_tests()
    assert not missing, f"neither marked in a test nor named in an example: {sorted(missing)}"


def test_markers_name_existing_statements():
    assert not marked_in_tests() - stated()


def test_sources_cite_existing_statements():
    cited = {
        f"{path.relative_to(ROOT)}: {name}"
        for path in (ROOT / "hecate").rglob("*.py")
        for name in SPEC_ID.findall(path.read_text())
        if name not in stated()
    }
    assert not cited, "\n".join(sorted(cited))
    for path in (ROOT / "hecate").rglob("*.py"):  # two brackets in a row are a link in Markdown
        assert not re.search(rf"{SPEC_ID.pattern}\] ?\[", path.read_text()), path


def unexampled(text: str) -> list[str]:
    """Second-level sections with statements but no python block after the last one."""
    sections = re.split(r"^## ", text, flags=re.MULTILINE)[1:]
    return [
        section.splitlines()[0]
        for section in sections
        if statements(section) and "```python" not in section.rsplit("\n- **", 1)[1]
    ]


def test_contract_comes_first_and_every_section_ends_with_a_worked_example():
    for path in files():
        text = path.read_text()
        before = text.split("\n- **", 1)[0].lower()
        assert [word for word in CONTRACT if word not in before] == [], path
        assert unexampled(text) == [], path


def test_specs_stay_short():
    assert sum(len(path.read_text().splitlines()) for path in SPECS.rglob("*.md")) <= 4067


def test_the_readers_themselves(tmp_path):
    text = "## A\n- **PHI-ELU-D1** x\n```python\nassert 1  # PHI-X-V2\n```\n## B\n- **PHI-ELU-D1** y\n"
    assert statements(text) == ["PHI-ELU-D1"] * 2
    assert unexampled(text) == ["B"]
    assert malformed("- **PHI-elu-D1** x") == [] and malformed("- **PHI-ELU-Q1** x")
    assert marked("@pytest.mark.spec('A-B-D1', 'A-B-I2')\ndef test(): ...") == {"A-B-D1", "A-B-I2"}
    path = tmp_path / "x.md"
    path.write_text(text)
    assert [(e.line, e.source) for e in examples(path)] == [(4, "assert 1  # PHI-X-V2\n")]
    path.write_text("```python\nimport math\n```\n" + text)
    assert [(e.line, e.setup) for e in examples(path)] == [(7, "import math\n")]
    path.write_text("```python\nassert 1\n")
    with pytest.raises(ValueError, match="never closed"):
        examples(path)
