"""Calls of one library by the other: layers of hecate as those of transformers and flash-linear-attention, and causal
models of transformers as those of hecate, in runs, evaluations and samples."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import signature
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer

from hecate.checks import described, expect_choice, expect_count, outside_vocabulary
from hecate.data import places_of
from hecate.errors import ConfigError, ShapeError
from hecate.hf.adopt import CACHED, masks_of
from hecate.hf.cache import StateLayer
from hecate.tape.bridge import without_autocast

Returns = Literal["attention", "fla", "output"]
CLOSE = 8  # units in the last place of the largest logit, by which rounding may differ between documents' neighbours

FAULTS = {  # of a model, by the mask that it does not keep to
    "reset_mask": "takes the documents of a row for one",
    "write_mask": "goes on from padding otherwise than from the row alone",
}


class AsLayer(nn.Module):
    """A layer of hecate in the place of an attention or a linear layer of transformers or fla. [HF-CALL-D1]

        block.self_attn = AsLayer(Memory(256, heads=4, config="titans"), layer_idx=3)
        y, _ = block.self_attn(hidden_states=x, attention_mask=padding, past_key_values=cache)

    Positions are not looked at. The state lies in layer `layer_idx` of the cache, a `StateLayer`, which it makes of one
    that is empty.

    Args:
        layer: `(x, state=None, *, write_mask, reset_mask) -> (y, state)`: `Memory`, `CMS`, compositions, blocks.
        layer_idx: its number in the model, from 0.
        returns: "attention" (y, None), as attention of transformers; "fla" (y, None, cache); "output" y.
    """

    def __init__(self, layer: nn.Module, layer_idx: int = 0, returns: Returns = "attention") -> None:
        super().__init__()
        expect_choice(returns, "returns", get_args(Returns))
        expect_count(layer_idx, "layer_idx", 0)
        self.layer, self.layer_idx, self.returns = layer, layer_idx, returns

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        cache_params: Any = None,
        **kwargs: Any,
    ) -> Any:
        """hidden_states `[B, T, d_model]`, attention_mask `[B, T]` or of all tokens so far, 0 where there is padding;
        documents of a row by `cu_seqlens`, `cu_seq_lens_q` or `seq_idx`; other keywords say nothing to a memory.

        Raises:
            ShapeError: a mask over keys, which does not say what is padding.
            ConfigError: attention weights are asked for; documents in a cached row; a layer of the cache that holds
                something else.
        """
        if kwargs.get("output_attentions"):
            raise ConfigError("output_attentions: a memory has no attention weights; leave it out")
        if attention_mask is not None and (
            attention_mask.dim() != 2 or attention_mask.shape[1] < hidden_states.shape[1]
        ):
            shape = f"[B, {hidden_states.shape[1]} or more]"
            raise ShapeError(f"attention_mask must be {shape}, 0 at padding, got {described(attention_mask)}")
        if kwargs.get("cu_seq_lens_q") is None:
            kwargs["cu_seq_lens_q"] = kwargs.get("cu_seqlens")
        past = cache_params if past_key_values is None else past_key_values
        masks = masks_of(hidden_states, attention_mask, kwargs, past)
        if past is None:
            y, _ = self.layer(hidden_states, None, **masks)
        else:
            y = self._held(past).advance(self.layer, hidden_states, **masks, counts=True)
        return {"attention": (y, None), "fla": (y, None, past), "output": y}[self.returns]

    def _held(self, cache: Any) -> StateLayer:
        """The layer of a cache that holds the state."""
        if not isinstance(cache, Cache) or cache.offloading:
            raise ConfigError(f"past_key_values must be a DynamicCache of transformers, got a {type(cache).__name__}")
        while len(cache.layers) <= self.layer_idx:
            cache.layers.append(DynamicLayer())
        held = cache.layers[self.layer_idx]
        if type(held) is DynamicLayer and not held.is_initialized:
            held = cache.layers[self.layer_idx] = StateLayer()
        if not isinstance(held, StateLayer):
            raise ConfigError(f"layer {self.layer_idx} of past_key_values is a {type(held).__name__} in use by another")
        return held


@dataclass(frozen=True)
class Read:
    """State of an `AsModel`: the cache of transformers, None where a document ended within the row, which nothing can
    follow; how many tokens it has read, and which of them `[B, T]` are there, None if all. No pytree: a cache is one
    thing."""

    cache: Any
    count: int
    written: Tensor | None


class AsModel(nn.Module):
    """A causal model of transformers called as a `LanguageModel` is: `(tokens, state) -> (logits, state)`. [HF-RUN-D1]

        model = AutoModelForCausalLM.from_pretrained(folder)
        hecate.hf.adopt(model)
        run_experiment(config, "runs/tuned", model=AsModel(model))  # resume=True goes on after a stop
        hecate.hf.save(model, "tuned")

    It is trained in place, adopted, upgraded, grafted, with LoRA of peft or as it is; parameters that are frozen stay
    so. Documents of a row are told to it by positions that begin again. Whether a model keeps them apart, and goes on
    from padding, it is asked with a few tokens when this is first needed.

    Args:
        model: of `AutoModelForCausalLM`, with its weights.

    Raises:
        TypeError: anything else.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        base = model.get_base_model() if hasattr(model, "get_base_model") else model
        causal = isinstance(base, PreTrainedModel) and base.can_generate()
        if not causal or getattr(base.config, "is_encoder_decoder", False):
            raise TypeError(f"AsModel takes a causal model of transformers, got a {type(base).__name__}")
        self.model = model
        self.past = "cache_params" if "cache_params" in signature(type(base).forward).parameters else "past_key_values"
        self._found: dict[str, bool] = {}

    @property
    def config(self) -> Any:
        """That of the model."""
        return self.model.config

    def forward(
        self, tokens: Tensor, state: Read | None = None, *, write_mask: Tensor | None = None,
        reset_mask: Tensor | None = None,
    ) -> tuple[Tensor, Read | None]:  # fmt: skip
        """Logits `[B, T, vocab]`, and the state after the last token: a cache of its own for every call, None where
        gradients are recorded. Masks are bool `[B, T]`: `write_mask` is False at padding, which stands in front,
        `reset_mask` True where a document begins.

        Raises:
            ConfigError: documents in a row of a model that would mix them, or behind a state; padding of a model that
                would not go on as the row alone; a model without a cache.
            ShapeError: padding between tokens, or tokens outside the vocabulary.
        """
        given: dict[str, Any] = {}
        count, seen = tokens.shape[1], 0 if state is None else state.count
        apart = reset_mask is not None and bool(reset_mask[:, 1:].any())
        written = None if state is None else state.written
        if state is not None and (state.cache is None or (reset_mask is not None and bool(reset_mask.any()))):
            raise ConfigError(CACHED)
        if write_mask is not None or written is not None:
            now = tokens.new_ones(tokens.shape, dtype=torch.bool) if write_mask is None else write_mask
            before = now.new_ones(len(now), seen) if written is None else written
            written = torch.cat([before, now], 1)
            if bool((written[:, :-1] & ~written[:, 1:]).any()):
                raise ShapeError(f"write_mask must be False in front alone, got {described(write_mask)}")
            if not written.all():
                self._expect("write_mask")
            places = written.long().cumsum(1).sub(1).clamp(min=0)
            given = {"attention_mask": written.long(), "position_ids": places[:, -count:]}
        if apart and reset_mask is not None:
            if given:
                raise ConfigError("reset_mask and write_mask: a row of several documents has no padding; leave one out")
            self._expect("reset_mask")
            given = {"position_ids": places_of(reset_mask)}
        keeps = not (apart or torch.is_grad_enabled())
        if state is not None:
            given[self.past] = copy.deepcopy(state.cache)  # which the call writes into
        try:
            found = self.model(input_ids=tokens, use_cache=keeps, **given)
        except IndexError as error:  # on the CPU, as in `LanguageModel.embedded`
            raise outside_vocabulary(tokens, self.model.get_input_embeddings().num_embeddings) or error from None
        if torch.is_grad_enabled():
            return found.logits, None
        cache = found.get(self.past) if keeps else None
        if keeps and cache is None:
            raise ConfigError(f"{self._name} returns no cache, and without one nothing can be read in pieces")
        return found.logits, Read(cache, seen + count, written)

    @property
    def _name(self) -> str:
        return type(self.config).__name__.removesuffix("Config")

    def _expect(self, mask: str) -> None:
        """Refuses a mask that the model does not keep to, by a few tokens of its own."""
        if mask not in self._found:
            try:
                with self._asked():
                    self._found[mask] = self._keeps_apart() if mask == "reset_mask" else self._goes_on()
            except (RuntimeError, ValueError, AttributeError, LookupError, TypeError):  # what transformers says of it
                self._found[mask] = False
        if not self._found[mask]:
            raise ConfigError(
                f"{mask}: the {self._name} model {FAULTS[mask]}; give each a row of its own, or `hecate.hf.adopt` the "
                "model before AsModel takes it, if its layers can be adopted"
            )

    @contextmanager
    def _asked(self) -> Iterator[None]:
        """The model without dropout and gradients, and without a warning of what is then refused."""
        modes = {part: part.training for part in self.model.modules()}
        try:
            self.model.eval()
            device = self.model.get_input_embeddings().weight.device
            with torch.no_grad(), without_autocast(device.type), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                yield
        finally:
            for part, mode in modes.items():
                part.training = mode

    def _few(self, *rows: list[int]) -> Tensor:
        embedding = self.model.get_input_embeddings()
        return torch.tensor(rows, device=embedding.weight.device) % embedding.num_embeddings

    def _keeps_apart(self) -> bool:
        """True if the second document of a row shows nothing of the first."""
        own = self._few([1, 2, 3, 4, 5, 6, 1, 3, 5, 2], [6, 5, 4, 1, 2, 2, 1, 3, 5, 2])
        starts = torch.zeros(own.shape, dtype=torch.bool, device=own.device)
        starts[:, [0, 6]] = True
        one, two = self.model(input_ids=own, position_ids=places_of(starts), use_cache=False).logits[:, 6:]
        return bool((one - two).abs().max() <= CLOSE * torch.finfo(one.dtype).eps * one.abs().max())

    def _goes_on(self) -> bool:
        """True if a padded row, and a token after it, are what the row alone is."""
        self._found["write_mask"] = True  # while it is asked
        row, more = self._few([1, 2, 3, 4, 5]), self._few([6])
        there = torch.arange(8, device=row.device)[None] >= 3
        padded, state = self.forward(torch.cat([row[:, :3], row], 1), write_mask=there)
        alone, other = self.forward(row)
        pairs = (padded[:, 3:], alone), (self.forward(more, state)[0], self.forward(more, other)[0])
        # Sums are in another order, whose rounding grows from layer to layer: half of the digits have to agree.
        return all(bool((a - b).abs().max() <= torch.finfo(a.dtype).eps ** 0.5 * b.abs().max()) for a, b in pairs)
