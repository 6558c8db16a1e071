"""Small models, what they answer alone, and a server over loopback."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from hecate.models import LanguageModel
from hecate.serve import Scheduler, Texts, plain_chat

LEVELS: list[dict[str, Any]] = [
    {"name": "fast", "memory": "titans_linear"},
    {
        "name": "slow",
        "period": 4,
        "memory": {"algorithm": {"kind": "gd", "lr": 0.1}, "feature_map": "elu", "key_norm": "l2"},
    },
]
KINDS: dict[str, dict[str, Any]] = {
    "gated_delta": {"memory": "gated_delta"},
    "titans": {"memory": "titans"},
    "levels": {"levels": LEVELS},
    "window": {"memory": "gated_delta", "attention": {"kind": "mag", "window": 6}},
}
TEXTS = Texts(lambda text: list(text.encode()), lambda ids: bytes(ids).decode(errors="replace"), plain_chat)


def made(kind: str = "gated_delta", seed: int = 0, **fields: Any) -> LanguageModel:
    """A model of bytes, the same at every call."""
    config = {"vocab_size": 256, "d_model": 16, "layers": 2, "heads": 2, "tie_embeddings": False, **KINDS[kind]}
    return LanguageModel(config | fields, generator=torch.Generator().manual_seed(seed)).eval()


@torch.no_grad()
def alone(model: LanguageModel, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
    """Greedy answers of so many tokens to the turns of a conversation, by the model itself."""
    state, answers = None, []
    for prompt in prompts:
        logits, state = model(torch.tensor([list(prompt)]), state)
        answer = [int(logits[0, -1].argmax())]
        for _ in range(count - 1):
            logits, state = model(torch.tensor([answer[-1:]]), state)
            answer.append(int(logits[0, -1].argmax()))
        _, state = model(torch.tensor([answer[-1:]]), state)
        answers.append(answer)
    return answers


def said(model: LanguageModel, texts: Sequence[str], count: int) -> list[str]:
    """The same as texts."""
    return [TEXTS.decode(ids) for ids in alone(model, [text.encode() for text in texts], count)]


def drawn(seed: int, *lengths: int) -> list[list[int]]:
    """Prompts of these lengths."""
    draws = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 256, (length,), generator=draws).tolist() for length in lengths]


def run(scheduler: Scheduler) -> None:
    """Until nothing is left to do."""
    while scheduler.step():
        pass


@contextmanager
def listening(application: Any) -> Iterator[str]:
    """Its address, on a free port of this machine."""
    import uvicorn

    from hecate.serve.server import _Uvicorn

    server = _Uvicorn(uvicorn.Config(application, port=0, log_level="critical", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    until = time.monotonic() + 30
    while not server.started and time.monotonic() < until:
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(30)
