"""Changes of a graft to a running model: the attention's class, the class of its cache layer, and one hook.

An attention keeps its place and the names of its weights; its class becomes a subclass with a memory. What the memory
carries from call to call lies in the attention's layer of the cache, whose class becomes a subclass that does to it
whatever happens to keys and values.
"""

from __future__ import annotations

import inspect
import weakref
from abc import ABC
from collections.abc import Callable, Mapping
from functools import cache
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache

from hecate.checks import described
from hecate.errors import ConfigError, ShapeError
from hecate.hf.cache import check_crop, recorded_by
from hecate.models.rollback import WINDOW, Recorded, advance, take_back
from hecate.nn import LayerState, Memory
from hecate.states import each_row

MASKS = "hecate_masks"
"""The keyword by which a model's layers hand `Masks` on."""
BRANCH = "hecate"
"""The name of the `Branch` in its attention."""


class Masks(NamedTuple):
    """Masks of the tokens of a call for memories, bool `[B, T]` each; None where it holds for none.

    Fields:
        write: False where a token is padding, which memories neither write nor count.
        reset: True where another document begins.
    """

    write: Tensor | None = None
    reset: Tensor | None = None


class Branch(nn.Module):
    """A memory and, beside attention, the gate behind it: one factor per channel, zero at first.

    In the dtype of its own weights, whatever the model's.
    """

    def __init__(self, memory: Memory, *, gated: bool, reused: tuple[str, ...] = ()) -> None:
        super().__init__()
        self.memory, self.reused = memory, reused
        weight = memory.out.weight
        zeros = torch.zeros(memory.d_model, dtype=weight.dtype, device=weight.device) if gated else None
        self.gate = None if zeros is None else nn.Parameter(zeros)

    def forward(self, x: Tensor, state: LayerState | None, masks: Masks) -> tuple[Tensor, LayerState]:
        """x `[B, T, d_model]` in any dtype; the answers in the memory's, and its state."""
        wide = x.to(self.memory.norm.dtype)
        if masks.write is not None:  # attention, which may have no key to look at there, answers padding with NaN
            wide = wide.masked_fill(~masks.write.unsqueeze(-1), 0)
        y, state = self.memory(wide, state, write_mask=masks.write, reset_mask=masks.reset)
        return (y if self.gate is None else self.gate * y), state

    def masked(
        self, x: Tensor, state: LayerState | None, *, write_mask: Tensor | None, reset_mask: Tensor | None
    ) -> tuple[Tensor, LayerState]:
        """The same by the names of the masks."""
        return self(x, state, Masks(write_mask, reset_mask))

    def extra_repr(self) -> str:
        """Names of the attention's weights that it began with."""
        return f"from {', '.join(self.reused)}" if self.reused else ""


_NOTHING = Recorded(None, ())


# Without ABC a cache layer could not become one: its layout would be another.
class Remembering(ABC):  # noqa: B024
    """Mixin for a cache layer: the states of memories beside its own, pytrees with a row per sequence, by their places.

    States are replaced, never written in place: a copy of the cache stays what it was.
    """

    # `is_compileable` stays: static layers tell by it that they are longer than what they hold.
    memories: Mapping[str, Recorded] = MappingProxyType({})
    record_past = False
    window = WINDOW
    _owners: Mapping[str, Callable[[], Any]] = MappingProxyType({})

    @property
    def _own(self) -> Any:
        """The layer without the mixin; None of one for linear attention that holds nothing of its own."""
        held = vars(self).get("is_recurrent_states_initialized")
        bare = held is not None and not isinstance(self, CacheLayerMixin) and not any(held.values())
        return None if bare else super()

    @property
    def is_croppable(self) -> bool:
        """True while the past is recorded, beside keys and values that can be cropped."""
        return self.record_past and (self._own is None or bool(self._own.is_croppable))

    def activate_past_recording(self, tokens: int = WINDOW) -> None:
        """From now on the last `tokens` of them, or up to twice as many, can be taken back."""
        if self._own is not None and hasattr(self._own, "activate_past_recording"):
            self._own.activate_past_recording()
        self.record_past, self.window = True, max(self.window, tokens)

    def answers(self, place: str, owner: Any, x: Tensor, masks: Masks) -> Tensor:
        """The answers of a memory, `owner.masked`, to x `[B, T, d_model]`; its state is kept."""
        past, named = self.memories.get(place, _NOTHING), {"write_mask": masks.write, "reset_mask": masks.reset}
        if self.record_past:
            y, after = advance(owner.masked, x, past, self.window, **named)
            self._owners = {**self._owners, place: weakref.ref(owner)}  # a copy of the cache has no copy of it
        else:
            y, state = owner.masked(x, past.state, **named)
            after = Recorded(state, ())
        self.memories = {**self.memories, place: after}
        return y

    def _map(self, name: str, function: Callable[[Tensor], Tensor], *args: Any) -> None:
        """Does to every state what a method does to the layer's own."""
        if hasattr(self._own, name):
            getattr(self._own, name)(*args)
        self.memories = each_row(dict(self.memories), function)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Rows in another order, as beams go on."""
        self._map("reorder_cache", lambda tensor: tensor.index_select(0, beam_idx.to(tensor.device)), beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every row `repeats` times."""
        self._map("batch_repeat_interleave", lambda tensor: tensor.repeat_interleave(repeats, 0), repeats)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Some rows alone."""
        self._map("batch_select_indices", lambda tensor: tensor[indices.to(tensor.device)], indices)

    def reset(self) -> None:
        """As before the first token."""
        super().reset()  # type: ignore[misc]
        self.memories = {}

    def crop(self, tokens_to_remove: int) -> None:
        """Takes the last `-tokens_to_remove` tokens back, memories, keys and values. [HF-GRAFT-I4]

        Raises:
            ConfigError: a positive number, more tokens than are recorded, and any while none are.
        """
        count = check_crop(tokens_to_remove, self.record_past)
        if count:
            owners = {n: recorded_by(self._owners.get(n, type(None)), past, count) for n, past in self.memories.items()}
            self.memories = {n: take_back(owners[n].masked, past, count) for n, past in self.memories.items()}
        if self.record_past and self._own is not None:
            self._own.crop(tokens_to_remove)
        if getattr(self, "is_sliding", False):  # its keys are now as many as its window needs
            self.memories = {name: past._replace(calls=()) for name, past in self.memories.items()}


@cache
def _remembering(kind: type) -> type:
    # `_layer_type` would put the class in the place of `kind` in every cache made from then on.
    return type(f"Remembering{kind.__name__}", (Remembering, kind), {"_layer_type": None})


def remembering(layer: Any) -> Any:
    """A cache layer, whose class from now on holds a memory's state, too."""
    if not isinstance(layer, Remembering):
        kind: Any = type(layer)
        layer.__class__ = _remembering(kind)
    return layer


def cache_layer(past: Any, index: int, place: str, read: int) -> Any:
    """The layer of a cache that holds the state of a memory, after the attention of the same layer took `read` tokens.

    Raises:
        ShapeError: it holds tokens that the memory has not read.
    """
    layer = remembering(past.layers[index])
    if place not in layer.memories and (held := int(layer.get_seq_length()) - read) > 0:
        raise ShapeError(
            f"past_key_values holds {held} tokens that the memory of layer {index} has not read; fill it with the "
            "grafted model, and leave prefix tuning out"
        )
    return layer


def prepare_cache(self: Any, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any) -> None:
    """`_prepare_cache_for_generation` of a grafted model: layers that hold states from the start, so that they record
    what they are told to."""
    type(self)._prepare_cache_for_generation(self, generation_config, model_kwargs, *args, **kwargs)
    past: Any = model_kwargs.get("past_key_values")
    if type(past) is not DynamicCache or past.offloading:
        return
    for index in [module.layer_idx for module in self.modules() if isinstance(module, Holder)]:
        while len(past.layers) <= index:  # of a DynamicCache() that was made without a config
            past.layers.append(past.layer_class_to_replicate())
        layer = remembering(past.layers[index])
        if getattr(generation_config, "is_assistant", False):  # what it drafts in one go may all be rejected
            layer.activate_past_recording((generation_config.max_new_tokens or 0) + 1)


class Holder(nn.Module):
    """Mixin for a part of a layer that has memories: their states lie in layer `layer_idx` of a cache."""

    layer_idx: int


class Grafted(Holder):
    """Mixin for an attention: its memory reads the same hidden states, without positions."""

    def _answers(self, x: Tensor, past: Any, masks: Masks) -> Tensor:
        """The memory's answers, behind the gate if there is one; the state goes into the cache."""
        branch = getattr(self, BRANCH)
        if past is None:
            return branch(x, None, masks)[0]
        return cache_layer(past, self.layer_idx, BRANCH, x.shape[1]).answers(BRANCH, branch, x, masks)

    def _handed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Masks]:
        """The cache and the masks among the arguments of a call; the masks are no longer there."""
        masks = kwargs.pop(MASKS, None)
        past = next((value for value in args if isinstance(value, Cache)), kwargs.get("past_key_values"))
        if masks is None:
            raise ConfigError(
                f"no masks reached the memory of layer {self.layer_idx}: its layer was called on its own, or does not "
                "hand its keywords on to its attention"
            )
        if past is not None and not isinstance(past, Cache):
            raise ShapeError(f"past_key_values must be a Cache of transformers, got a {type(past).__name__}")
        return past, masks


class Beside(Grafted):
    """Attention plus a memory."""

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """hidden_states `[B, T, d_model]`; what the attention returns, with the memory's answers added."""
        past, masks = self._handed(args, kwargs)
        y, *rest = super().forward(hidden_states, *args, **kwargs)
        return (y + self._answers(hidden_states, past, masks).to(y.dtype), *rest)


class InPlace(Grafted):
    """A memory in an attention's place, which keeps its weights, frozen and unused."""

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """hidden_states `[B, T, d_model]`; the memory's answers, and None for attention weights."""
        past, masks = self._handed(args, kwargs)
        if past is not None:
            self._count(past, hidden_states)
        return self._answers(hidden_states, past, masks).to(hidden_states.dtype), None

    def _count(self, past: Any, x: Tensor) -> None:
        """Keys and values of nothing, one number a token: a cache counts tokens by them."""
        layer = past.layers[self.layer_idx] if self.layer_idx < len(past.layers) else None
        made = getattr(layer, "keys", None)  # room that a static cache has made already has its shape
        heads, width = (1, 1) if made is None or made.dim() < 4 else (made.shape[1], made.shape[3])
        stub = x.new_zeros(x.shape[0], heads, x.shape[1], width)
        past.update(stub, stub, self.layer_idx)


@cache
def grafted(kind: type, base: type[Grafted]) -> type:
    """An attention's class with a memory beside it, or in its place."""
    return type(f"{base.__name__}{kind.__name__}", (base, kind), {})


def hand_masks(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], Any]:
    """A hook ahead of a decoder's forward: `Masks` among the keywords, which its layers hand on."""
    names = tuple(inspect.signature(type(model).forward).parameters)[1:] if args else ()
    given = dict(zip(names, args, strict=False)) | kwargs
    tokens = given.get("input_ids")
    tokens = given["inputs_embeds"] if tokens is None else tokens
    return args, {**kwargs, MASKS: _masks(given, tokens.shape[0], tokens.shape[1], tokens.device)}


def _masks(given: dict[str, Any], rows: int, count: int, device: torch.device) -> Masks:
    padding = given.get("attention_mask")
    if padding is not None:
        if not isinstance(padding, Tensor) or padding.dim() != 2 or padding.shape[1] < count:
            raise ShapeError(
                f"attention_mask must be [B, {count} or more], which tells memories what is padding, got "
                f"{described(padding)}"
            )
        start, past = padding.shape[1] - count, given.get("past_key_values")
        if start and past is not None:  # a mask may go on beyond these tokens, as far as a static cache has room
            start = min(start, int(past.get_seq_length()))
        write = padding[:, start : start + count].to(device).bool()
        # A look that waits for the device, but what is not masked is much faster.
        whole = not torch.compiler.is_compiling() and bool(write.all())
        return Masks() if whole else Masks(write)
    return Masks(None, starts_of_documents(given, rows, count, device))


def starts_of_documents(given: dict[str, Any], rows: int, count: int, device: torch.device) -> Tensor | None:
    """Where another document begins, as attention is told it, if one does."""
    ends, position = given.get("cu_seq_lens_q"), given.get("position_ids")
    if ends is not None:
        starts = torch.zeros(rows * count + 1, dtype=torch.bool, device=device)
        starts[ends.to(device).long()] = True
        starts = starts[:-1].reshape(rows, count)
    elif given.get("past_key_values") is None and position is not None and position.dim() == 2 and count > 1:
        starts = torch.diff(position, prepend=position[:, :1] - 1).ne(1).expand(rows, -1).to(device)
    else:
        return None
    return starts if torch.compiler.is_compiling() or bool(starts[:, 1:].any()) else None
