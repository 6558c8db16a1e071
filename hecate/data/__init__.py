"""Training data: byte-level text and recall tasks, as an open family of configs."""

from hecate.data.base import IGNORED, Batch, DataConfig, Loader, Source, stream
from hecate.data.tasks import MQAR, Copy, Retrieval, Task, TaskSource
from hecate.data.text import Bundled, NGrams, Text, TextSource, fit_ngrams

__all__ = [
    "IGNORED", "MQAR", "Batch", "Bundled", "Copy", "DataConfig", "Loader", "NGrams", "Retrieval",
    "Source", "Task", "TaskSource", "Text", "TextSource", "fit_ngrams", "stream",
]  # fmt: skip
