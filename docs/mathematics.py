"""Mathematics as MathML, which browsers show by themselves: docutils' own translation, without a script or a font."""

from __future__ import annotations

from typing import Any

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml


def add_mathml(app: Any) -> None:
    """Makes `html_math_renderer = "mathml"` known."""
    app.add_html_math_renderer("mathml", (inline, None), (block, None))


def inline(translator: Any, node: Any) -> None:
    """A formula in a line."""
    translator.body.append(tex2mathml(node.astext()))
    raise nodes.SkipNode


def block(translator: Any, node: Any) -> None:
    """A formula by itself."""
    translator.body.append(f'<div class="math">{tex2mathml(node.astext(), as_block=True)}</div>\n')
    raise nodes.SkipNode
