"""Streaming generation: one token in, one token out, constant state."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import nn

from hecate.errors import ConfigError


@torch.no_grad()
def generate(
    model: nn.Module,
    prompt: Sequence[int],
    tokens: int,
    *,
    temperature: float,
    generator: torch.Generator,
    device: torch.device | None = None,
) -> Iterator[int]:
    """Yields `tokens` ids drawn after `prompt`; temperature 0 takes the likeliest. [TRAIN-GEN-D1]

    The prompt is read once, then every token costs one step on the carried state, however long the text.
    """
    if not prompt:
        raise ConfigError("generation needs a prompt of at least one token; give --prompt a text")
    model.eval()
    state = None
    feed = torch.tensor([list(prompt)], device=device)
    for _ in range(tokens):
        logits, state = model(feed, state)
        last = logits[0, -1].float().cpu()
        if temperature == 0:
            choice = int(last.argmax())
        else:
            weights = torch.softmax(last / temperature, -1)
            choice = int(torch.multinomial(weights, 1, generator=generator))
        yield choice
        feed = torch.tensor([[choice]], device=device)
