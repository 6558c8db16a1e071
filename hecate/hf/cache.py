"""The states of memories in a cache of transformers.

A block's state is a pytree of tensors with a row for each sequence, whose tree may change (a reset adds to that of the
convolution) and whose tensors may grow (attention without a window). Layers for linear attention hold two tensors of
fixed shapes; so a layer here holds the pytree itself.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer

from hecate.errors import ConfigError, ShapeError
from hecate.models.rollback import WINDOW, Recorded, RecordedCall, advance, check_recorded, take_back
from hecate.states import each_row


def check_crop(tokens_to_remove: int, recording: bool) -> int:
    """The number of tokens that `crop` is to take back. [HF-CACHE-D3]

    Raises:
        ConfigError: a positive one, which once meant a length, and any where no past is recorded.
    """
    if tokens_to_remove > 0:
        raise ConfigError(f"crop({tokens_to_remove}): a length is not cropped to; crop(-n) takes n tokens back")
    if tokens_to_remove and not recording:
        raise ConfigError(
            f"crop({tokens_to_remove}): a memory takes back what it has recorded alone, and has recorded nothing; call "
            "activate_past_recording() ahead of the tokens, or keep a copy.deepcopy of the cache as it was before them"
        )
    return -tokens_to_remove


def recorded_by(layer: Callable[[], Any], past: Recorded, count: int) -> Any:
    """The layer that recorded the last `count` tokens, by what tells it without keeping it.

    Raises:
        ConfigError: fewer tokens are recorded, or the layer is gone.
    """
    check_recorded(past, count)
    if (found := layer()) is None:
        raise ConfigError("the model that wrote the cache is gone; keep it as long as the cache is cropped")
    return found


class StateLayer(CacheLayerMixin):
    """One block's state, the number of tokens it has been shown, and how many of them each row has written.

    States are replaced, never written in place: a copy of the cache stays what it was. [HF-CACHE-D1] While the past is
    recorded the last `window` tokens can be taken back by `crop`. [HF-CACHE-D3]
    """

    supports_early_init = False

    def __init__(self) -> None:
        super().__init__()
        self.record_past, self.window = False, WINDOW
        self.reset()

    @property
    def is_croppable(self) -> bool:
        """True while the past is recorded."""
        return self.record_past

    def reset(self) -> None:
        """Forgets everything."""
        self.state: Any = None
        self.calls: tuple[RecordedCall, ...] = ()
        self.written: Tensor | None = None
        self.seen = 0
        self.is_initialized = False
        self._block: Callable[[], Any] = lambda: None

    def activate_past_recording(self, tokens: int = WINDOW) -> None:
        """From now on the last `tokens` of them, or up to twice as many, can be taken back."""
        if not self.record_past:
            self.record_past, self.calls = True, ()
        self.window = max(self.window, tokens)

    def advance(
        self, block: Any, x: Tensor, write_mask: Tensor | None, reset_mask: Tensor | None, *, counts: bool
    ) -> Tensor:
        """The output `[B, T, d_model]` of the layer's block, whose state is kept, as is, where it `counts`, how many
        tokens of each row were no padding."""
        masks = {"write_mask": write_mask, "reset_mask": reset_mask}
        if self.record_past:
            y, (self.state, self.calls) = advance(block, x, Recorded(self.state, self.calls), self.window, **masks)
            self._block = weakref.ref(block)  # a copy of the cache has no copy of it
        else:
            y, self.state = block(x, self.state, **masks)
        if counts:
            before = torch.zeros(len(x), dtype=torch.int64, device=x.device) if self.written is None else self.written
            self.written = before + (x.shape[1] if write_mask is None else write_mask.sum(1))
        self.seen, self.is_initialized = self.seen + x.shape[1], True
        return y

    def get_seq_length(self) -> int:
        """Tokens that it has been shown, padding included."""
        return self.seen

    def get_max_length(self) -> int:
        """No bound."""
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """A mask over all tokens so far."""
        return self.seen + query_length, 0

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row n becomes what row `beam_idx[n]` was."""
        self._map(lambda t: t.index_select(0, beam_idx.to(t.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every row `repeats` times, one after the other."""
        self._map(lambda t: t.repeat_interleave(repeats, 0))

    def batch_select_indices(self, indices: Tensor) -> None:
        """These rows alone."""
        self._map(lambda t: t[indices.to(t.device)])

    def _map(self, change: Callable[[Tensor], Tensor]) -> None:
        self.state, self.written, self.calls = each_row((self.state, self.written, self.calls), change)

    def crop(self, tokens_to_remove: int) -> None:
        """Takes the last `-tokens_to_remove` tokens of every row back, padding among them. [HF-CACHE-D3]

        Raises:
            ConfigError: a positive number, more tokens than are recorded, and any while none are.
        """
        count = check_crop(tokens_to_remove, self.record_past)
        if not count:
            return
        past = Recorded(self.state, self.calls)
        block = recorded_by(self._block, past, count)
        after = take_back(partial(block, mlp=False), past, count)
        if self.written is not None:
            self.written = self.written - _taken(past, count)
        (self.state, self.calls), self.seen = after, self.seen - count

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> NoReturn:
        """Refused: a memory's state has no keys and values."""
        raise ConfigError("a memory's state has no keys and values: give past_key_values to a hecate model alone")

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused: a memory's state has no keys and values."""
        self.lazy_initialization(key_states, value_states)


def _taken(past: Recorded, count: int) -> Tensor:
    """The number of the last `count` tokens that each row has written `[B]`."""
    masks = [
        torch.ones_like(call.x[..., 0], dtype=torch.bool) if call.write_mask is None else call.write_mask
        for call in past.calls
    ]
    return torch.cat(masks, 1)[:, -count:].sum(1)


def no_continuous_batching(*_: Any, **__: Any) -> NoReturn:
    """In the place of a model's `init_continuous_batching`, by which `generate_batch` and all that is like it begin."""
    raise ConfigError(
        "continuous batching (generate_batch, cache_implementation='paged') keeps keys and values in pages, and a "
        "memory has a state of constant size instead: call generate with rows padded in front and an attention_mask"
    )


def state_layers(cache: Cache, count: int) -> list[StateLayer]:
    """The `count` layers of a cache; one that is new gets them in place of transformers' own. [HF-CACHE-D2]

    `ConfigError` for a cache of another model, and for one whose kind asks for what states do not do (static,
    quantized, offloaded).
    """
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
    """Mask of those of the last `length` tokens that are no padding, bool `[B, T]`; None if all are. [HF-PAD-D1]

    `mask` `[B, T]` is of these tokens, or of all so far. `ShapeError` where it is neither, `ConfigError` where it calls
    padding what a state has been written with: that cannot be taken back.
    """
    if mask is None:
        return None
    seen = 0 if past is None else past.seen
    if mask.dim() != 2 or mask.shape[1] not in (length, seen + length):
        shapes = f"[B, {length}]" + (f" or [B, {seen + length}]" if seen else "")
        raise ShapeError(
            f"attention_mask must be {shapes}, got {list(mask.shape)}; documents in one row are told apart by "
            "position_ids"
        )
    mask = mask != 0
    here = mask[:, mask.shape[1] - length :]
    if torch.compiler.is_compiling():
        return here.contiguous()
    if past is not None and past.written is not None and length > 1 and mask.shape[1] > length:
        hidden = (past.written - mask[:, :seen].sum(1)).nonzero()
        if len(hidden):
            raise ConfigError(
                f"attention_mask differs in row {int(hidden[0])} from what past_key_values was written with, as where "
                "generate filled a row up after its end: a memory cannot unwrite; continue such rows one by one, or "
                "without a cache"
            )
    return None if bool(here.all()) else here.contiguous()


def document_starts(
    positions: Tensor | None, borders: Tensor | None, written: Tensor | None, shape: torch.Size, past: StateLayer | None
) -> Tensor | None:
    """Where a token begins another document than the one before it in its row, bool `[B, T]`; None if none does.

    `borders` `[N + 1]` counts the tokens before each document of one row, `positions` begin at 0 in each. The first
    token of a new row needs no start. [HF-PACK-D1]
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
        here = torch.ones(shape, dtype=torch.bool, device=positions.device) if written is None else written
        before = here.cumsum(1) > here.long()
        starts = (positions == 0) & here & (before | continued)
    if torch.compiler.is_compiling():
        return starts
    return starts if bool(starts.any()) else None
