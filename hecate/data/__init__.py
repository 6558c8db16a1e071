"""Training data: byte-level text, token shards and recall tasks, as an open family of configs."""

from hecate.data.base import IGNORED, Batch, DataConfig, Loader, Source, stream
from hecate.data.tasks import MQAR, Copy, Retrieval, Task, TaskSource
from hecate.data.text import Bundled, NGrams, Text, TextSource, fit_ngrams
from hecate.data.tokenizer import Bytes, FileTokenizer, Tokenizer
from hecate.data.tokens import Tokens, TokenSource

__all__ = [
    "IGNORED", "MQAR", "Batch", "Bundled", "Bytes", "Copy", "DataConfig", "FileTokenizer", "Loader", "NGrams",
    "Retrieval", "Source", "Task", "TaskSource", "Text", "TextSource", "TokenSource", "Tokenizer", "Tokens",
    "fit_ngrams", "stream",
]  # fmt: skip
