"""Causal models of transformers called as those of hecate are: in runs, evaluations and samples."""

from __future__ import annotations

import copy
from inspect import signature
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hecate.checks import described
from hecate.errors import ConfigError, ShapeError
from hecate.hf.adopted import CACHED, Adopted, rule_of


class Read(NamedTuple):
    """State of an `AsModel`: the cache of transformers, and which tokens `[B, T]` so far are there, None if all."""

    cache: Any
    written: Tensor | None


class AsModel(nn.Module):
    """A causal model of transformers called as a `LanguageModel` is: `(tokens, state) -> (logits, state)`. [HF-RUN-D1]

        model = AutoModelForCausalLM.from_pretrained(folder)
        hecate.hf.adopt(model)
        run_experiment(config, "runs/tuned", model=AsModel(model))  # resume=True goes on after a stop
        hecate.hf.save(model, "tuned")

    It is trained in place, adopted, upgraded, grafted or as it is; parameters that are frozen stay so. Documents of a
    row are told to it by positions that begin again.

    Args:
        model: of `AutoModelForCausalLM`, with its weights.

    Raises:
        TypeError: anything else.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        if not (isinstance(model, PreTrainedModel) and model.can_generate()):
            raise TypeError(f"AsModel takes a causal model of transformers, got a {type(model).__name__}")
        self.model = model
        self.past = "cache_params" if "cache_params" in signature(type(model).forward).parameters else "past_key_values"

    @property
    def config(self) -> Any:
        """That of the model."""
        return self.model.config

    def forward(
        self, tokens: Tensor, state: Read | None = None, *, write_mask: Tensor | None = None,
        reset_mask: Tensor | None = None,
    ) -> tuple[Tensor, Read | None]:  # fmt: skip
        """Logits `[B, T, vocab]`, and the state after the last token: a cache of its own for every call, None where
        gradients are recorded or a document ends within a row. Masks are bool `[B, T]`: `write_mask` is False at
        padding, which stands in front, `reset_mask` True where a document begins.

        Raises:
            ConfigError: documents in a row of a model that would mix them, or behind a state.
            ShapeError: padding between tokens, or tokens outside the vocabulary.
        """
        given: dict[str, Any] = {}
        count = tokens.shape[1]
        apart = reset_mask is not None and bool(reset_mask[:, 1:].any())
        written = None if state is None else state.written
        if state is not None and reset_mask is not None and bool(reset_mask.any()):
            raise ConfigError(CACHED)
        if write_mask is not None or written is not None:
            now = tokens.new_ones(tokens.shape, dtype=torch.bool) if write_mask is None else write_mask
            if written is None and state is not None:
                written = now.new_ones(len(now), state.cache.get_seq_length())
            written = now if written is None else torch.cat([written, now], 1)
            if bool((written[:, :-1] & ~written[:, 1:]).any()):
                raise ShapeError(f"write_mask must be False in front alone, got {described(write_mask)}")
            places = written.long().cumsum(1).sub(1).clamp(min=0)
            given = {"attention_mask": written.long(), "position_ids": places[:, -count:]}
        if apart and reset_mask is not None:
            if given:
                raise ConfigError("reset_mask and write_mask: a row of several documents has no padding; leave one out")
            self._expect_apart()
            at = torch.arange(count, device=tokens.device)
            begun = torch.where(reset_mask, at, 0).cummax(1).values
            given = {"position_ids": at - begun}
        keeps = not (apart or torch.is_grad_enabled())
        if state is not None:
            given[self.past] = copy.deepcopy(state.cache)  # which the call writes into
        try:
            found = self.model(input_ids=tokens, use_cache=keeps, **given)
        except IndexError:  # on the CPU; a GPU reports it by itself, later and less clearly
            size, (least, most) = self.model.get_input_embeddings().num_embeddings, map(int, tokens.aminmax())
            if 0 <= least and most < size:
                raise
            message = f"tokens must be in 0..{size - 1}, the vocabulary, got {least}..{most}"
            raise ShapeError(message) from None
        return found.logits, Read(found[self.past], written) if keeps else None

    def _expect_apart(self) -> None:
        """Refuses documents in a row of a model whose layers would take them for one."""
        for name, module in self.model.named_modules():
            if not isinstance(module, Adopted) and rule_of(type(module)) is not None:
                raise ConfigError(
                    f"reset_mask: {name} of {type(self.model).__name__} takes the documents of a row for one; "
                    "`hecate.hf.adopt` the model first, or give each document a row of its own"
                )
