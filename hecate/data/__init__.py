"""Training data: byte-level text, token shards and synthetic tasks, as an open family of configs."""

from hecate.data.base import IGNORED, Batch, DataConfig, Loader, Source, Task, TaskSource, places_of, stream
from hecate.data.tasks import (
    MQAR,
    Copy,
    MADCompression,
    MADFuzzyRecall,
    MADMemorization,
    MADNoisyRecall,
    MADRecall,
    MADSelectiveCopy,
    ModularCounting,
    Parity,
    Permutations,
    Retrieval,
)  # fmt: skip
from hecate.data.text import Bundled, NGrams, Text, TextSource, fit_ngrams
from hecate.data.tokenizer import Bytes, FileTokenizer, Tokenizer
from hecate.data.tokens import Tokens, TokenSource

__all__ = [
    "IGNORED", "MQAR", "Batch", "Bundled", "Bytes", "Copy", "DataConfig", "FileTokenizer", "Loader", "MADCompression",
    "MADFuzzyRecall", "MADMemorization", "MADNoisyRecall", "MADRecall", "MADSelectiveCopy", "ModularCounting", "NGrams",
    "Parity", "Permutations", "Retrieval", "Source", "Task", "TaskSource", "Text", "TextSource", "TokenSource",
    "Tokenizer", "Tokens", "fit_ngrams", "places_of", "stream",
]  # fmt: skip
