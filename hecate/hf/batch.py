"""`generate_batch` of a model of hecate: transformers' interface on the scheduler of `hecate.serve`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from transformers import GenerationConfig
from transformers.generation.continuous_batching.requests import GenerationOutput, RequestStatus

from hecate.errors import ConfigError, shorten
from hecate.serve import Request, Scheduler

# What of a GenerationConfig is read here, and what says nothing of tokens; anything else that is set is refused.
_READ = {"max_new_tokens", "max_length", "do_sample", "temperature", "top_k", "top_p", "eos_token_id"}
_SILENT = {
    "pad_token_id", "bos_token_id", "use_cache", "transformers_version", "disable_compile", "is_assistant",
    "return_dict_in_generate", "remove_invalid_values",
}  # fmt: skip


def generate_batch(
    model: Any, inputs: Sequence[Sequence[int]], config: GenerationConfig, *, max_batch: int = 16, seed: int = 0
) -> dict[str, GenerationOutput]:
    """Continuations of every prompt as `generate` makes them; one that fails says why in `error`. [HF-GEN-D3]

    Args:
        model: a `LanguageModel`.
        inputs: tokens of each prompt.
        config: with the settings of transformers filled in; those that change tokens in a way not known are refused.
        max_batch: prompts at once, a power of two.
        seed: of the draws of the first prompt, one more for each that follows.

    Raises:
        ConfigError: a prompt without tokens, or a setting that is not known here.
    """
    plain = GenerationConfig()
    plain.update(**plain._get_default_generation_params())
    for name, value in config.to_dict().items():
        silent = name in _READ | _SILENT or name.startswith("_") or "assistant" in name
        if not silent and value not in (None, False, getattr(plain, name, None)):
            raise ConfigError(f"generate_batch knows no {name} (got {shorten(value)}); leave it out or call generate")
    ends = config.eos_token_id
    how: dict[str, Any] = {"stop": frozenset([ends] if isinstance(ends, int) else ends or ())}
    how["temperature"] = (1.0 if config.temperature is None else config.temperature) if config.do_sample else 0.0
    how |= {"top_k": config.top_k or None, "top_p": config.top_p} if config.do_sample else {}
    born, requests = time.perf_counter(), []
    for number, prompt in enumerate(inputs):
        room = config.max_new_tokens
        if room is None:
            room = plain.max_length if config.max_length == plain.max_length else config.max_length - len(prompt)
        if room < 1:
            raise ConfigError(f"max_length {config.max_length} leaves no room after a prompt of {len(prompt)} tokens")
        requests.append(Request([int(token) for token in prompt], room, seed=seed + number, **how))
    training = model.training
    try:
        scheduler = Scheduler(model, max_batch=max_batch, max_queue=max(1, len(requests)))
        for request in requests:
            scheduler.submit(request)
        while scheduler.step():
            pass
    finally:
        model.train(training)
    found = {}
    for number, request in enumerate(requests):
        status = RequestStatus.FINISHED if request.error is None else RequestStatus.FAILED
        found[f"req_{number}"] = GenerationOutput(
            f"req_{number}", list(request.tokens), request.made, status=status, created_time=born,
            error=None if request.error is None else str(request.error), lifespan=(born, time.perf_counter()),
        )  # fmt: skip
    return found
