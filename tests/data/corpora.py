"""Token folders and files for tests, made without the library that they test where that matters."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from hecate.data.tokenize import tokenize

WORDS = ["one", "two", "three", "naive", "caf\u00e9", "\u65e5\u672c", "a", "of", "memory", "writes"]


def texts(count: int = 40, seed: int = 0, words: int = 30) -> list[str]:
    """Documents of random words."""
    rng = np.random.default_rng(seed)
    return [" ".join(rng.choice(WORDS, rng.integers(1, words))) for _ in range(count)]


def jsonl(path: Path, documents: list[str]) -> Path:
    path.write_text("".join(json.dumps({"id": n, "text": text}) + "\n" for n, text in enumerate(documents)))
    return path


def bytes_folder(folder: Path, documents: list[str] | None = None, **how) -> Path:
    """Shards of bytes, which need no library: several of them."""
    folder.mkdir(parents=True, exist_ok=True)
    source = jsonl(folder / "source.jsonl", texts() if documents is None else documents)
    tokenize([str(source)], folder / "tokens", tokenizer="bytes", **{"validation": 0.2, "shard_tokens": 1000} | how)
    return folder / "tokens"
