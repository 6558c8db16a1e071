"""Only where Triton interprets, which it is told before it is loaded: a process of its own."""

import os
from types import SimpleNamespace

import numpy as np

# What lies beyond the true widths of a tile may overflow: it is masked, and a card does not mind.
np.seterr(over="ignore", invalid="ignore", divide="ignore")

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["test_*.py"]

if not collect_ignore_glob:
    import triton.language as tl
    from triton.runtime import interpreter

    # Triton would look through its whole language at every call of a function within a kernel, which takes longer than
    # the functions: here the language is the interpreter's throughout.
    if hasattr(interpreter, "_patch_lang") and hasattr(interpreter, "_LangPatchScope"):
        interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
        interpreter._patch_lang = lambda fn: interpreter._LangPatchScope()
