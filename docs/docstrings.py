"""How docstrings, which are Markdown, become what Sphinx reads: headed paragraphs, code, signs that mean nothing."""

from __future__ import annotations

import re
from collections.abc import Sequence

HEADED = re.compile(r"^(Shapes?|VJP|Traits|Cost|Warning|References?|Origin|Units|Source): ")
EQUATION = re.compile(r"\$([^$]+)\$")
SECTION = re.compile(r"^\s*[A-Z][a-z ]+:$")
MATH = ".. math:: "
CODE = re.compile(r"(`[^`]+`)")
SIGN = re.compile(r"([*|\\]|(?<=\w)_(?!\w))")


def as_rst(lines: Sequence[str]) -> list[str]:
    """A docstring's lines: a paragraph each for `Shapes:`, `VJP:` and so on, which are lines in the sources; indented
    code marked as code; equations as such; stars, bars and trailing underscores outside of code as themselves."""
    found: list[str] = []
    code = section = False
    for line in with_equations(lines):
        indented = line.startswith("    ")
        if SECTION.match(line):
            section = True
        elif line and not indented:
            section = False
        if line.startswith(MATH):
            found += ["", line, ""]
            continue
        starts = indented and not section and (not found or not found[-1].strip())
        if starts and not code:
            found += ["::", ""]
            code = True
        elif line.strip() and not indented:
            code = False
        if code:
            found.append(line)
            continue
        if heading := HEADED.match(line):
            found += ["", f"**{heading[1]}.** {escaped(line[heading.end() :])}"]
        else:
            found.append(escaped(line))
    return found


def with_equations(lines: Sequence[str]) -> list[str]:
    """The lines, with those of the section `Formula:`, where an equation may run over several, as one of mathematics
    for each equation."""
    start = next((i for i, line in enumerate(lines) if line.startswith("Formula: ")), len(lines))
    end = next((i for i, line in enumerate(lines) if i > start and (not line or HEADED.match(line))), len(lines))
    return [*lines[:start], *(MATH + found for found in EQUATION.findall(" ".join(lines[start:end]))), *lines[end:]]


def escaped(line: str) -> str:
    """A line whose signs outside of code stand for themselves, with code that ends before a letter set apart."""
    parts = [part if i % 2 else SIGN.sub(r"\\\1", part) for i, part in enumerate(CODE.split(line))]
    for i in range(2, len(parts), 2):
        parts[i] = f"\\ {parts[i]}" if parts[i][:1].isalnum() else parts[i]
    return "".join(parts)
