"""Training data: byte-level text and recall tasks, as an open family of configs."""

from hecate.data.base import IGNORED, Batch, DataConfig, Loader, Source, Task, TaskSource, stream
from hecate.data.copy import Copy
from hecate.data.mqar import MQAR
from hecate.data.retrieval import Retrieval
from hecate.data.text import Bundled, NGrams, Text, TextSource, fit_ngrams

__all__ = [
    "IGNORED", "MQAR", "Batch", "Bundled", "Copy", "DataConfig", "Loader", "NGrams", "Retrieval",
    "Source", "Task", "TaskSource", "Text", "TextSource", "fit_ngrams", "stream",
]  # fmt: skip
