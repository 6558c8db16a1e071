"""Mathematics as MathML, which browsers show by themselves: docutils' own translation, without a script or a font."""

from __future__ import annotations

import re
from typing import Any

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml


def add_mathml(app: Any) -> None:
    """Makes `html_math_renderer = "mathml"` known."""
    app.add_html_math_renderer("mathml", (inline, None), (block, None))


# What docutils leaves to be said: an index stands beside a letter with an accent, not below; a bar is
# no operator; a function keeps its distance from what stands ahead of it, not from its argument.
INDEXED = re.compile(
    r"<munderover>\s*(<mi>[^<]*</mi>)(.*?)(<mo stretchy=\"false\">[\u02c6~\u02c9]</mo>)\s*</munderover>", re.DOTALL
)
BOTH = re.compile(r"<msup>\s*<msub>(<mover(?:(?!</?msub>).)*)</msub>\s*(<mi>[^<]*</mi>)\s*</msup>", re.DOTALL)
BAR = re.compile(r"<mo[^>]*>([|‖])</mo>")
WORD = re.compile(r"(</m(?!o|row)\w+>\s*)?<m[io][^>]*>([a-zA-Z]{2}[a-zA-Z_]*)</m[io]>")


def mathml(text: str, **how: bool) -> str:
    """A formula in LaTeX as MathML."""
    found = INDEXED.sub(r'<msub><mover accent="true">\1\3</mover>\2</msub>', tex2mathml(text, **how))
    found = WORD.sub(_apart, BOTH.sub(r"<msubsup>\1\2</msubsup>", found))
    return BAR.sub(r'<mo stretchy="false" lspace="0" rspace="0">\1</mo>', found)


def _apart(match: re.Match[str]) -> str:
    ahead, word = match.groups()
    space = f'{ahead}<mrow><mspace width="0.17em"></mspace>' if ahead else "<mrow>"
    return f"{space}<mi>{word}</mi></mrow>"


def inline(translator: Any, node: Any) -> None:
    """A formula in a line."""
    translator.body.append(mathml(node.astext()))
    raise nodes.SkipNode


def block(translator: Any, node: Any) -> None:
    """A formula by itself."""
    translator.body.append(f'<div class="math">{mathml(node.astext(), as_block=True)}</div>\n')
    raise nodes.SkipNode
