"""Pages that the site takes from the project itself: README, specs, notebooks, variants, API.

Nothing is written twice: the files keep the places they have in the repository, so that their links
work in both, and the tables of variants come from `hecate list`.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from hecate.train.catalogue import FAMILIES, catalogue

ROOT = Path(__file__).parent.parent
PACKAGES = (
    "hecate", "hecate.phi", "hecate.structure", "hecate.bias", "hecate.retention",
    "hecate.algorithm", "hecate.rule", "hecate.engine", "hecate.tape", "hecate.nn", "hecate.cms",
    "hecate.optim", "hecate.models", "hecate.data", "hecate.train",
    "hecate.microscope", "hecate.testing", "hecate.errors", "hecate.variant",
)  # fmt: skip
COPIED = ("CHANGELOG.md", "CONTRIBUTING.md", "CITATION.cff", "LICENSE", "constraints.txt")
CODE = re.compile(r"(^```.*?^```|`[^`\n]+`)", re.MULTILINE | re.DOTALL)
ERRATUM = re.compile(r"^- \*\*([A-Z0-9-]+-E\d+)\*\*(.*?)(?=^- |^\s*$)", re.MULTILINE | re.DOTALL)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Fills in the parts of the navigation that follow from the folders."""
    filled = {
        "API": [f"api/{name}.md" for name in PACKAGES],
        "Specs": [f"specs/{path.name}" for path in sorted((ROOT / "specs").glob("*.md"))],
        "Notebooks": notebooks(),
    }
    for entry in config.nav or []:
        for title in entry:
            entry[title] = filled.get(title, entry[title])
    return config


@event_priority(100)  # before the plugin that turns notebooks into pages
def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages and the files that they show."""
    pages: dict[str, str] = {
        "index.md": (ROOT / "README.md").read_text().replace("(docs/pages/", "("),
        "variants.md": variants(),
        **{f"api/{name}.md": api(name) for name in PACKAGES},
        **{f"specs/{path.name}": spec(path) for path in (ROOT / "specs").glob("*.md")},
    }
    for name, text in pages.items():
        files.append(File.generated(config, name, content=text))
    kept = [ROOT / name for name in COPIED if (ROOT / name).exists()]
    for path in (*kept, *(ROOT / "notebooks").rglob("*")):
        if path.suffix in (".md", ".ipynb", ".png", ".svg", ".cff", ".txt", ""):
            if path.is_file() and ".ipynb_checkpoints" not in path.parts:
                name = path.relative_to(ROOT).as_posix()
                files.append(File(name, str(ROOT), config.site_dir, config.use_directory_urls))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Makes links of the repository those of the site, and lists the errata of the specs."""
    for there, here in {"README.md": "index.md", "specs)": "specs/phi.md)", "": ""}.items():
        markdown = markdown.replace(f"](../../{there}", f"]({here}")
    return markdown.replace("<!-- errata of the specs -->", errata())


def errata() -> str:
    """Every statement of the specs whose id ends in E and a number, with the document it is in."""
    lines = []
    for path in sorted((ROOT / "specs").glob("*.md")):
        found = ERRATUM.findall(spec(path))
        lines += [f"- [{name}](specs/{path.name}) {' '.join(text.split())}" for name, text in found]
    return "\n".join(lines)


def spec(path: Path) -> str:
    """A document whose `<a, b>` are inner products, not tags."""
    parts = CODE.split(path.read_text())
    return "".join(part if i % 2 else part.replace("<", "&lt;") for i, part in enumerate(parts))


def notebooks() -> list[str]:
    """The quickstart first, then the others by name."""
    names = sorted(path.name for path in (ROOT / "notebooks").glob("*.ipynb"))
    return [f"notebooks/{name}" for name in sorted(names, key=lambda name: name[:5] != "quick")]


def api(name: str) -> str:
    """The page of a package."""
    return f"# {name}\n\n::: {name}\n"


def variants() -> str:
    """Every family as `hecate list` prints it."""
    parts = ["# Variants\n\nWhat `hecate list` prints: formula, traits, gradient and paper.\n"]
    for family in FAMILIES:
        header, rows = catalogue(family)
        table: list[list[Any]] = [header, ["---"] * len(header), *rows]
        lines = ["| " + " | ".join(cell(text) for text in row) + " |" for row in table]
        parts.append(f"## {family}\n\n" + "\n".join(lines) + "\n")
    return "\n".join(parts)


def cell(text: str) -> str:
    """A text inside a table: no bar ends the cell, no star starts an emphasis."""
    return re.sub(r"([|*_<\[\]])", r"\\\1", str(text)) if text != "---" else text
