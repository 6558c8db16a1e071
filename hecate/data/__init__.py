"""Training data: byte-level text and recall tasks, as an open family of configs."""

from hecate.data.base import IGNORED, Batch, DataConfig, Source, stream
from hecate.data.bundled import Bundled
from hecate.data.copy import Copy
from hecate.data.loader import Loader
from hecate.data.mqar import MQAR
from hecate.data.ngram import NGrams, fit_ngrams
from hecate.data.retrieval import Retrieval
from hecate.data.task import Task, TaskSource
from hecate.data.text import Text, TextSource

__all__ = [
    "IGNORED", "MQAR", "Batch", "Bundled", "Copy", "DataConfig", "Loader", "NGrams", "Retrieval",
    "Source", "Task", "TaskSource", "Text", "TextSource", "fit_ngrams", "stream",
]  # fmt: skip
