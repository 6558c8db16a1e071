"""How docstrings become pages: headed paragraphs, and the fields of configs as a signature."""

from __future__ import annotations

import re
from typing import Any

import griffe

HEADED = re.compile(r"\n(Shapes?|VJP|Traits|Cost|Warning|References?|Origin|Units|Errors|Source): ", re.MULTILINE)


class Docstrings(griffe.Extension):
    """Changes docstrings as griffe has read them from the sources, before they are rendered."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """A paragraph each for `Shapes:`, `VJP:` and so on, which are lines in the sources."""
        if obj.docstring is not None:
            obj.docstring.value = HEADED.sub(r"\n\n**\1.** ", obj.docstring.value)

    def on_class(self, *, cls: griffe.Class, **_: Any) -> None:
        """A class whose constructor takes its annotated fields says so in its first lines."""
        if cls.docstring is None or "__init__" in cls.members:
            return
        fields = [
            f"    {name}: {member.annotation}" + (f" = {member.value}" if member.value else "")
            for name, member in cls.members.items()
            if isinstance(member, griffe.Attribute)
            and member.annotation is not None
            and not name.startswith("_")
            and "ClassVar" not in str(member.annotation)
            and "property" not in member.labels
        ]
        if fields:
            listing = ",\n".join(fields)
            code = f"```python\n{cls.name}(\n{listing},\n)\n```\n\n"
            first, _, rest = cls.docstring.value.partition("\n\n")
            cls.docstring.value = f"{first}\n\n{code}{rest}"
