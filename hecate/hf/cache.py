"""The states of memories in a cache of transformers.

A block's state is a pytree of tensors with a row for each sequence. Its tree may change (a reset adds a tensor to the
convolution's state) and its tensors may grow (attention without a window). Cache layers of transformers for linear
attention hold two tensors of fixed shapes, so a layer here holds the pytree itself.
"""

from __future__ import annotations

import weakref
from abc import ABC
from collections.abc import Callable, Mapping
from functools import cache, partial
from types import MappingProxyType
from typing import Any, NoReturn

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer

from hecate.errors import ConfigError, ShapeError
from hecate.models.language_model import MemoryBlock
from hecate.models.rollback import WINDOW, Recorded, advance, check_recorded, take_back
from hecate.states import each_row

BLOCK = "block"
"""Key of the state of a hecate block in its cache layer."""
_NOTHING = Recorded(None, ())


# ABC makes the memory layout that of cache layers, so that their class can be changed to a subclass of this.
class Remembering(ABC):  # noqa: B024
    """Mixin for a cache layer that also holds the states of memories: pytrees with a row per sequence, by key.

    States are replaced, never written in place, so that a copy of the cache stays as it was. [HF-CACHE-D1]
    """

    # `is_compileable` is unchanged: by it, static layers say that they are longer than their content.
    memories: Mapping[str, Recorded] = MappingProxyType({})
    record_past = False
    window = WINDOW
    _layers: Mapping[str, Callable[[], Any]] = MappingProxyType({})

    @property
    def _base_layer(self) -> Any:
        """The layer without the mixin, by `super()`; None for a linear attention layer without content of its own."""
        initialized = vars(self).get("is_recurrent_states_initialized")
        bare = initialized is not None and not isinstance(self, CacheLayerMixin) and not any(initialized.values())
        return None if bare else super()

    @property
    def is_croppable(self) -> bool:
        """True while the past is recorded, if keys and values can be cropped, too."""
        return self.record_past and (self._base_layer is None or bool(self._base_layer.is_croppable))

    def activate_past_recording(self, tokens: int = WINDOW) -> None:
        """Records from now on at least the last `tokens` tokens, and up to twice as many, so that they can be taken
        back."""
        if self._base_layer is not None and hasattr(self._base_layer, "activate_past_recording"):
            self._base_layer.activate_past_recording()
        self.record_past, self.window = True, max(self.window, tokens)

    def answers(self, place: str, layer: Any, x: Tensor, **masks: Tensor | None) -> Tensor:
        """The output of a layer for x `[B, T, d_model]`, by its `with_states` if it has one; its state is stored here
        under the key `place`."""
        past, run = self.memories.get(place, _NOTHING), getattr(layer, "with_states", layer)
        if self.record_past:
            y, after = advance(run, x, past, self.window, **masks)
            self._layers = {**self._layers, place: weakref.ref(layer)}  # weak: copying a cache must not copy the layer
        else:
            y, state = run(x, past.state, **masks)
            after = Recorded(state, ())
        self.memories = {**self.memories, place: after}
        return y

    def _map(self, name: str, change: Callable[[Tensor], Tensor], *args: Any) -> None:
        """Calls a method of the base layer, and applies the same change to every state."""
        if hasattr(self._base_layer, name):
            getattr(self._base_layer, name)(*args)
        self.memories = each_row(dict(self.memories), change)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Replaces row n by row `beam_idx[n]`."""
        self._map("reorder_cache", lambda t: t.index_select(0, beam_idx.to(t.device)), beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats every row `repeats` times, the copies next to each other."""
        self._map("batch_repeat_interleave", lambda t: t.repeat_interleave(repeats, 0), repeats)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keeps only these rows."""
        self._map("batch_select_indices", lambda t: t[indices.to(t.device)], indices)

    def reset(self) -> None:
        """Empties the layer."""
        super().reset()  # type: ignore[misc]
        self.memories = {}

    def crop(self, tokens_to_remove: int) -> None:
        """Takes back the last `-tokens_to_remove` tokens of every row, including padding, from memories, keys and
        values. [HF-CACHE-D3, HF-GRAFT-I4]

        Raises:
            ConfigError: a positive number, which once meant a length; more tokens than are recorded, or any if nothing
                is recorded; a layer that has been deleted since it recorded them.
        """
        if tokens_to_remove > 0:
            raise ConfigError(f"crop({tokens_to_remove}): a length is not cropped to; crop(-n) takes n tokens back")
        if tokens_to_remove and not self.record_past:
            raise ConfigError(
                f"crop({tokens_to_remove}): a memory takes back what it has recorded alone, and has recorded nothing; "
                "call activate_past_recording() ahead of the tokens, or keep a copy.deepcopy of the cache as it was "
                "before them"
            )
        if count := -tokens_to_remove:
            runs = {place: self._run(place, count) for place in self.memories}
            self.memories = {place: take_back(runs[place], past, count) for place, past in self.memories.items()}
        if self.record_past and self._base_layer is not None:
            self._base_layer.crop(tokens_to_remove)
        if getattr(self, "is_sliding", False):  # only as many keys are left as its window needs
            self.memories = {name: past._replace(calls=()) for name, past in self.memories.items()}

    def _run(self, place: str, count: int) -> Any:
        """The layer that recorded the last `count` tokens of a state, as a function to run them again for the state."""
        check_recorded(self.memories[place], count)
        if (layer := self._layers.get(place, type(None))()) is None:
            raise ConfigError("the model that wrote the cache is gone; keep it as long as the cache is cropped")
        return partial(layer, mlp=False) if isinstance(layer, MemoryBlock) else getattr(layer, "with_states", layer)


@cache
def _remembering(kind: type) -> type:
    # A `_layer_type` would register the class in place of `kind`, for every cache made from then on.
    return type(f"Remembering{kind.__name__}", (Remembering, kind), {"_layer_type": None})


def remembering(layer: Any) -> Any:
    """The cache layer, after changing its class to one that holds the states of memories, too."""
    if not isinstance(layer, Remembering):
        layer.__class__ = _remembering(layer.__class__)
    return layer


def record_drafts(generation_config: Any, *layers: Any) -> None:
    """Makes the layers of an assistant's cache record all tokens of a draft, since all of them may be rejected."""
    if getattr(generation_config, "is_assistant", False):
        for layer in layers:
            layer.activate_past_recording((generation_config.max_new_tokens or 0) + 1)


class StateLayer(Remembering, CacheLayerMixin):
    """Cache layer with the state of one hecate layer, the number of tokens read, and how many of them each row has
    written.

    While the past is recorded, `crop` can take back the last `window` tokens. [HF-CACHE-D3]
    """

    supports_early_init = False
    _base_layer = None

    def __init__(self) -> None:
        super().__init__()
        self.reset()

    @property
    def state(self) -> Any:
        """The state after the last token; None before the first."""
        return self.memories[BLOCK].state

    def reset(self) -> None:
        """Empties the layer, and stops tracking which layer recorded what."""
        self.memories, self._layers = {BLOCK: _NOTHING}, {}
        self.written: Tensor | None = None
        self.seen = 0
        self.is_initialized = False

    def advance(
        self, block: Any, x: Tensor, write_mask: Tensor | None, reset_mask: Tensor | None, *, counts: bool
    ) -> Tensor:
        """The output `[B, T, d_model]` of the block; stores its state, and with `counts` adds up how many tokens of
        each row were not padding."""
        y = self.answers(BLOCK, block, x, write_mask=write_mask, reset_mask=reset_mask)
        if counts:
            before = torch.zeros(len(x), dtype=torch.int64, device=x.device) if self.written is None else self.written
            self.written = before + (x.shape[1] if write_mask is None else write_mask.sum(1))
        self.seen, self.is_initialized = self.seen + x.shape[1], True
        return y

    def get_seq_length(self) -> int:
        """Number of tokens read, including padding."""
        return self.seen

    def get_max_length(self) -> int:
        """-1: no limit."""
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of an attention mask: all tokens so far, from the first."""
        return self.seen + query_length, 0

    def _map(self, name: str, change: Callable[[Tensor], Tensor], *args: Any) -> None:
        super()._map(name, change, *args)
        self.written = None if self.written is None else change(self.written)

    def crop(self, tokens_to_remove: int) -> None:
        """Takes back tokens as `Remembering.crop` does, also from the counts."""
        past = self.memories[BLOCK]
        super().crop(tokens_to_remove)
        if tokens_to_remove and self.written is not None:
            self.written = self.written - _written_counts(past, -tokens_to_remove)
        self.seen += tokens_to_remove

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> NoReturn:
        """Raises `ConfigError`: a memory's state has no keys and values."""
        raise ConfigError("a memory's state has no keys and values: give past_key_values to a hecate model alone")

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> NoReturn:
        """Raises `ConfigError`: a memory's state has no keys and values."""
        self.lazy_initialization(key_states, value_states)


def _written_counts(past: Recorded, count: int) -> Tensor:
    """Number of the last `count` tokens that each row has written, `[B]`."""
    masks = [
        torch.ones_like(call.x[..., 0], dtype=torch.bool) if call.write_mask is None else call.write_mask
        for call in past.calls
    ]
    return torch.cat(masks, 1)[:, -count:].sum(1)


def no_continuous_batching(*_: Any, **__: Any) -> NoReturn:
    """Replacement for a model's `init_continuous_batching`, which `generate_batch` and similar methods call first."""
    raise ConfigError(
        "continuous batching (generate_batch, cache_implementation='paged') keeps keys and values in pages, and a "
        "memory has a state of constant size instead: call generate with rows padded in front and an attention_mask"
    )


def state_layers(cache: Cache, count: int) -> list[StateLayer]:
    """The `count` layers of a cache; in a new cache they replace transformers' own. [HF-CACHE-D2]

    `ConfigError` for a cache of another model, and for kinds of caches that states do not support (static, quantized,
    offloaded).
    """
    if not isinstance(cache, Cache):
        raise ShapeError(f"past_key_values must be a Cache of transformers, got a {type(cache).__name__}")
    strange = next((layer for layer in cache.layers if type(layer) not in (StateLayer, DynamicLayer)), None)
    if strange is not None or cache.offloading:
        kind = "is offloaded" if strange is None else f"has a {type(strange).__name__}"
        raise ConfigError(f"past_key_values {kind}; leave cache_implementation out, or give a DynamicCache")
    if any(type(layer) is DynamicLayer and layer.is_initialized for layer in cache.layers):
        raise ConfigError("past_key_values holds keys and values of another model; give a cache of its own")
    fresh = [layer for layer in cache.layers if not isinstance(layer, StateLayer)]
    if fresh or not cache.layers:
        cache.layers = [StateLayer() for _ in range(count)]
    if len(cache.layers) != count:
        raise ConfigError(f"past_key_values has {len(cache.layers)} layers, the model {count}; was it another model's?")
    return list(cache.layers)


def written_tokens(mask: Tensor | None, length: int, past: StateLayer | None) -> Tensor | None:
    """Mask of the last `length` tokens, bool `[B, T]`, False at padding; None if there is none. [HF-PAD-D1]

    `mask` `[B, T]` covers these tokens, or all so far. `ShapeError` if it is neither; `ConfigError` if it marks earlier
    tokens as padding that the state has already written, which cannot be undone.
    """
    if mask is None:
        return None
    count = 0 if past is None else past.seen
    if mask.dim() != 2 or mask.shape[1] not in (length, count + length):
        shapes = f"[B, {length}]" + (f" or [B, {count + length}]" if count else "")
        cure = "documents in one row are told apart by position_ids"
        raise ShapeError(f"attention_mask must be {shapes}, got {list(mask.shape)}; {cure}")
    mask = mask != 0
    here = mask[:, mask.shape[1] - length :]
    if torch.compiler.is_compiling():
        return here.contiguous()
    if past is not None and past.written is not None and length > 1 and mask.shape[1] > length:
        hidden = (past.written - mask[:, :count].sum(1)).nonzero()
        if len(hidden):
            raise ConfigError(
                f"attention_mask differs in row {int(hidden[0])} from what past_key_values was written with, as where "
                "generate filled a row up after its end: a memory cannot unwrite; continue such rows one by one, or "
                "without a cache"
            )
    return None if bool(here.all()) else here.contiguous()


def jumps(positions: Tensor) -> Tensor:
    """Mask `[B, T]` of tokens that do not follow the one before, by which transformers tells documents apart."""
    return torch.diff(positions, prepend=positions[:, :1] - 1).ne(1)


def document_starts(
    positions: Tensor | None, borders: Tensor | None, written: Tensor | None, shape: torch.Size, past: StateLayer | None
) -> Tensor | None:
    """Mask, bool `[B, T]`, True at the first token of every further document in a row; None if there is none.

    `borders` `[N + 1]` are the numbers of tokens before each document of a single row. `positions` start at 0 in each
    document; without a padding mask, any step other than 1 begins one, too. The first token of a new row is not marked.
    [HF-PACK-D1]
    """
    batch, length = shape
    continued = past is not None and past.seen > 0
    if borders is not None:
        if batch != 1 or int(borders[-1]) != length:
            raise ShapeError(
                f"cu_seq_lens_q must be of one row and end at its {length} tokens, got {batch} rows and "
                f"{int(borders[-1])} tokens"
            )
        starts = torch.zeros(1, length + 1, dtype=torch.bool, device=borders.device)
        starts[:, borders[:-1].long()] = True
        starts = starts[:, :length]
        if not continued:
            starts[:, 0] = False
    elif positions is None:
        return None
    else:
        starts = positions == 0
        if written is None:
            written, starts = torch.ones(shape, dtype=torch.bool, device=starts.device), starts | jumps(positions)
        before = written.cumsum(1) > written.long()
        starts = starts & written & (before | continued)
    return starts if torch.compiler.is_compiling() or bool(starts.any()) else None
