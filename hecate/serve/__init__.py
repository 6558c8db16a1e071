"""Serving models of memories: many requests in one batch, states of shared prefixes, a memory for each user.

    scheduler = Scheduler(model, prefixes=PrefixCache())
    request = scheduler.submit(Request(tokens))

`hecate serve FOLDER` serves OpenAI's clients with it; the server, `application`, needs the extra `serve`.
"""

from __future__ import annotations

import importlib
from typing import Any

from hecate.serve.kept import Memories, PrefixCache
from hecate.serve.protocol import Limits, Texts, plain_chat
from hecate.serve.scheduler import QueueFull, Request, Scheduler

__all__ = [
    "Limits",
    "Memories",
    "PrefixCache",
    "QueueFull",
    "Request",
    "Scheduler",
    "Texts",
    "application",
    "plain_chat",
]


def __getattr__(name: str) -> Any:
    if name != "application":
        raise AttributeError(f"module 'hecate.serve' has no attribute {name!r}")
    return getattr(importlib.import_module("hecate.serve.server"), name)
