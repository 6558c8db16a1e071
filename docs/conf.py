"""The site: one book of five parts, from the files of the repository where they lie.

    sphinx-build -W -c docs . site

Sphinx reads the repository itself, so links between README, pages, notebooks and specs are the same in both; nothing is
copied. What is made here: the pages of the API and of variants (`docs/reference`, not kept), the contents of the book,
which the landing page carries, and the list of errata.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any, get_type_hints

from pydantic import BaseModel
from sphinx.ext.napoleon import Config, GoogleDocstring
from sphinx.util.typing import stringify_annotation

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "docs")]

from docstrings import as_rst  # noqa: E402
from mathematics import add_mathml  # noqa: E402
from reference import equations_of_rules, layers_of_rules, write_reference  # noqa: E402

project, author, copyright = "hecate", "the hecate authors", "the hecate authors, Apache-2.0"
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.viewcode", "sphinx_copybutton"]
root_doc = "docs/landing"
include_patterns = [
    "*.md",
    "docs/landing.md",
    "docs/pages/*.md",
    "docs/reference/*.md",
    "notebooks/*.ipynb",
    "specs/*.md",
]
exclude_patterns = [".*", "**/.*", "hecate", "runs", "site", "studies", "tests", "build", "dist"]

html_theme = "furo"
html_title = "hecate"
html_static_path = ["static"]
html_css_files = ["hecate.css"]
html_js_files = [("hecate.js", {"defer": "defer"})]
html_extra_path = ["index.html"]  # leads to the landing page
html_show_sourcelink = html_copy_source = False
pygments_dark_style = "github-dark"
templates_path: list[str] = []

nb_execution_mode = "off"  # the tests run them; the site shows what they stored
myst_heading_anchors = 3
myst_enable_extensions = ["dollarmath"]
html_math_renderer = "mathml"  # what browsers read by themselves: no script and nothing to fetch
suppress_warnings = ["ref.python"]  # `bytes` in a signature is also the name of a state's property

default_role = "code"
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
autodoc_default_options = {"members": True, "imported-members": True, "show-inheritance": False}
autodoc_inherit_docstrings = False
SECTIONS = Config(
    napoleon_use_rtype=False,
    napoleon_custom_sections=[("Fields", "params_style"), ("Fields beside the knobs", "params_style")],
)
maximum_signature_line_length = 80
copybutton_exclude = ".linenos, .gp, .go"

LEARN = [
    "notebooks/quickstart", "notebooks/own_model", "notebooks/bring_your_model", "notebooks/own_task",
    "notebooks/choosing_phi", "notebooks/memory_per_level", "notebooks/phi_momentum", "notebooks/your_own_parts",
    "notebooks/reading_the_tape",
]  # fmt: skip
USE = ["guide", "recurrences", "memories", "text", "runs", "scale", "extend"]
MEASURED = ["speed", "quality", "gym", "rules", "optimisers", "studies", "others"]
THEORY = ["notation", "exact", "errata"]
ERRATUM = re.compile(r"^- \*\*([A-Z0-9-]+-E\d+)\*\*(.*?)(?=^- |^\s*$)", re.MULTILINE | re.DOTALL)


def parts() -> dict[str, list[str]]:
    """The five parts: a page that none of them names is a how-to, and a notebook is for learning."""
    named = {*USE, *MEASURED, *THEORY}
    others = sorted(path.stem for path in (ROOT / "docs/pages").glob("*.md") if path.stem not in named)
    more = sorted(f"notebooks/{path.stem}" for path in (ROOT / "notebooks").glob("*.ipynb"))
    return {
        "Learn": ["README", *LEARN, *(name for name in more if name not in LEARN)],
        "Use": [f"docs/pages/{name}" for name in (*USE, *others)],
        "Reference": [
            "docs/reference/settings",
            "docs/reference/variants",
            "docs/reference/api",
            "CONTRIBUTING",
            "SECURITY",
            "CHANGELOG",
        ],
        "Measured": [f"docs/pages/{name}" for name in MEASURED],
        "Theory": [*(f"docs/pages/{name}" for name in THEORY), "docs/reference/specs"],
    }


def contents() -> str:
    """The book's table of contents."""
    trees = [
        f"```{{toctree}}\n:hidden:\n:caption: {title}\n:maxdepth: 1\n\n"
        + "\n".join("Start here </README>" if name == "README" else f"/{name}" for name in names)
        for title, names in parts().items()
    ]
    return "\n```\n\n".join(trees) + "\n```\n"


def errata() -> str:
    """Every statement of the specs whose id ends in E and a number, with the document it is in."""
    lines = []
    for path in sorted((ROOT / "specs").glob("*.md")):
        found = ERRATUM.findall(path.read_text())
        lines += [f"- [{name}](../../specs/{path.name}) {' '.join(text.split())}" for name, text in found]
    return "\n".join(lines)


def complete(app: Any, name: str, content: list[str]) -> None:
    """Puts the contents behind the landing page, and the errata of specs into theirs."""
    if name == root_doc:
        content[0] += "\n\n" + contents()
    content[0] = content[0].replace("<!-- errata of the specs -->", errata())
    for mark, table in (("equations", equations_of_rules), ("layers", layers_of_rules)):
        if f"<!-- {mark} of the rules -->" in content[0]:
            content[0] = content[0].replace(f"<!-- {mark} of the rules -->", table())


def rendered(app: Any, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    """A docstring as Sphinx reads it; a property's is a sentence, whose colon parts no type from it."""
    kind = "method" if what in ("property", "attribute", "data") else what
    lines[:] = GoogleDocstring(as_rst(lines), SECTIONS, app, kind, name, thing, options).lines()


def fields(
    app: Any, what: str, name: str, thing: Any, options: Any, given: str, returns: str
) -> tuple[str, None] | None:
    """The constructor of a config: its fields, without the bounds that their types carry."""
    if not (isinstance(thing, type) and issubclass(thing, BaseModel)):
        return None
    hints, shown = get_type_hints(thing), []
    for name, field in thing.model_fields.items():
        default = "" if field.is_required() else f" = {field.get_default(call_default_factory=True)!r}"
        shown.append(f"{name}: {stringify_annotation(hints[name], 'smart', short_literals=True)}{default}")
    return f"({', '.join(shown)})", None


def elsewhere(app: Any, what: str, name: str, thing: Any, skip: bool, options: Any) -> bool | None:
    """Leaves out what another room defines, which stands on that room's page, and fields that tell but their place."""
    if (getattr(thing, "__doc__", None) or "").startswith("Alias for field number"):
        return True
    room = app.env.docname.rpartition("/")[2]
    home = getattr(thing, "__module__", None) or room
    return True if what == "module" and f"{home}.".startswith(f"{room}.") is False else None


def setup(app: Any) -> None:
    """Joins the build."""
    write_reference(ROOT)
    add_mathml(app)
    app.connect("source-read", complete)
    app.connect("autodoc-process-docstring", rendered)
    app.connect("autodoc-process-signature", fields)
    app.connect("autodoc-skip-member", elsewhere)
