"""Launches of the block kernels: tensor arguments, tile sizes, and the record from forward to backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.compiler import CompiledKernel
from triton.runtime import driver

from hecate.engine.call import keep
from hecate.engine.tokens import Tokens, by_head
from hecate.engine.triton.back import gates, tokens
from hecate.engine.triton.channels import channel_borders, channel_factors, channel_pairs, channel_tokens
from hecate.engine.triton.factors import factors
from hecate.engine.triton.kernel import interpreting
from hecate.engine.triton.maps import unit, unit_back
from hecate.engine.triton.scan import pull, scan
from hecate.engine.triton.table import BLOCK, CHANNELS, Documents, Launch, card_of, chunks_of, least_of, walked
from hecate.engine.triton.tiles import map_of, tiles_of
from hecate.rule import MemoryConfig
from hecate.tape import Tensors, one, several

ROWS = 32  # rows per program of a norm
ALIGNED = 16  # bytes: Triton compiles for addresses that are multiples of it, or for any
SAME = (None, None, "none", 1.0)  # the identity map


class Form:
    """Shared by calls of one signature, without tensors: sizes, launches, flags and compiled kernels. [ENG-TRITON-D12]

    Triton looks up a kernel by all of its arguments, some 50 of which are the same in every call. A kernel found once
    is launched directly for any tensors that Triton would take for the same."""

    def __init__(self, config: MemoryConfig, exact: str, raw: bool, docs: bool, part: int, inputs: Tensors) -> None:
        """As for `Scan`; docs: whether there are borders."""
        states = 1 + len(config.algorithm.slots)
        fields = Tokens(*inputs[states + 1 :])  # type: ignore[arg-type]
        memory = one(inputs[:1])
        self.length, (self.count, self.height, self.width) = fields.v.shape[1], memory.shape
        self.parts, self.part, self.row = -(-self.length // part) if part else 0, part, self.length
        if part:  # parts are documents of one long row
            count = len(fields.v)
            self.count, self.length = self.count // count, count * self.length
        self.slots, self.decays = states > 1, config.retention.uses_retain
        self.channels = self.decays and fields.retain.dim() > fields.lr.dim()
        self.bias = tiles_of(config.bias, turned=True)
        linear, card = self.bias.error or not self.bias.moves, card_of(memory.device)
        self.chunks = chunks_of(self.width, exact, linear=linear)
        sizes, narrow = (card, self.height, self.width), self.chunks.narrow
        self.least = least = least_of(card, exact)
        self.walks = walked(*sizes, momentum=self.slots, narrow=narrow, whole=not self.bias.apart, least=least)
        # The interpreter does not round to bfloat16, and its bfloat16 products are wrong.
        self.dtype = torch.bfloat16 if narrow and not interpreting() else torch.float32
        phi = phi_of(config, self.width) if raw else SAME
        lie = exact == "bf16"  # rows are operands as stored, scaled by their sizes after products
        self.flags: dict[str, Any] = {
            "P": self.width, "V": self.height, "BP": max(least, triton.next_power_of_2(self.width)),
            "C": self.chunks.size, "SEG": self.chunks.segment, "LOG": self.chunks.size.bit_length() - 1,
            "MOVES": self.bias.moves, "RETAIN": self.decays, "MOMENTUM": self.slots,
            "FORM": "target" if not self.bias.moves else "error" if self.bias.error else "rows",
            "MASK": fields.write is not None, "RESET": fields.reset is not None and not docs,
            "APART": fields.phi_w is not None,
            "DECAYED": config.decay_order == "before_gradient", "EARLY_READ": config.read == "before",
            "CHANNELS": self.channels, "DOCS": docs or part > 0, "PARTS": part > 0, "HOLLOW": False,
            "STAGES": self.walks.stages, "PSI": self.bias.psi, "PULL": self.bias.pull,
            "EXACT": "tf32x3" if exact == "tf32x3" else "tf32", "FINE": "tf32" if lie else "tf32x3",
            "HALVES": narrow,
            "DT": tl.float32 if exact == "tf32x3" or interpreting() else tl.bfloat16,
            "PHI": phi, "MAP": (*phi[:2], "none" if lie else phi[2], phi[3]), "SIZE": phi[2] if lie else "none",
            "BARE": (*phi[:2], "none", phi[3]),
        }  # fmt: skip
        # Chunks of 16 tokens: products of fewer than 64 rows, or of float32, use other instructions of a card.
        full = {"DT": tl.float32, "EXACT": "tf32x3", "FINE": "tf32x3"}
        self.wide: dict[str, Any] = {} if narrow else full
        self.walk: dict[str, Any] = {} if self.bias.apart else self.wide
        self.interpreted = interpreting()
        self.kernels: dict[Any, tuple[Any, list[Any]]] = {}
        self.tables: dict[int, Documents] = {}  # tables of parts, by stream

    @classmethod
    def of(cls, config: MemoryConfig, exact: str, raw: bool, docs: bool, part: int, inputs: Tensors) -> Form:
        """The form cached in the config, or a new one."""
        looks: list[object] = [exact, raw, docs, part]
        for item in inputs:
            looks += (None,) if item is None else (item.shape, item.dtype)
        key = (*looks, one(inputs[:1]).device)
        form: Form | None = config.launches.get(key)
        if form is None:
            form = cls(config, exact, raw, docs, part, inputs)
            keep(config.launches, key, form)
        return form

    def told(self, kernel: Any, launch: Launch, **more: Any) -> dict[str, Any]:
        """The launch options of a kernel, and those flags that it takes."""
        flags = self.flags | {"BV": launch.tile} | more
        options = {"num_warps": launch.warps, "num_stages": 1}
        return options | {name: flags[name] for name in kernel.arg_names if name in flags}


class Given:
    """The inputs of one call as the kernels take them: states `[N, V, P]` (slot None without momentum) and tokens `[B,
    T, H, *]`; tokens `[N, T, *]` have one head."""

    def __init__(self, config: MemoryConfig, borders: tuple[int, ...] | None, inputs: Tensors) -> None:
        """inputs: memory, slots, initial memory and the fields of `Tokens`, flat; borders: of documents, which replace
        reset and run in parallel. Sets given: q, k, kw, v, lr, retain, momentum, write, reset, retain_value."""
        states = 1 + len(config.algorithm.slots)
        k, q, v, lr, retain, momentum, write, reset, kw, value = inputs[states + 1 :]
        shape = one((lr,)).shape
        self.heads = shape[2] if len(shape) == 3 else 1
        self.memory = one(inputs[:1]).contiguous()
        self.slot = one(inputs[1:2]).contiguous() if states > 1 else None
        self.restarts = reset is not None
        self.restart = one((inputs[states],)).contiguous() if self.restarts else self.memory
        masks = write, reset if borders is None else None
        by_heads = [m if m is None or len(shape) == 2 else by_head(m, self.heads) for m in masks]
        gates = retain if config.retention.uses_retain else None, momentum if states > 1 else None
        tensors = (q, k, kw, v, lr, *gates, *by_heads, value)
        self.given = [None if x is None else x.contiguous() for x in tensors]
        v = self.given[3]  # stands in for absent tensors
        self.arguments: list[Any] = [
            v if x is None else x.view(torch.uint8) if x.dtype == torch.bool else x for x in self.given
        ]


class Scan(Form, Given):
    """One call of the block kernels: its inputs, and the attributes of its form."""

    def __init__(
        self, config: MemoryConfig, exact: str, raw: bool, borders: tuple[int, ...] | None, part: int, inputs: Tensors
    ) -> None:
        """As for `Given`; raw: keys and queries are not features yet; part: tokens per part if each row runs in
        parallel parts, else 0."""
        vars(self).update(vars(Form.of(config, exact, raw, borders is not None, part, inputs)))
        Given.__init__(self, config, borders, inputs)
        self.documents, self.where = self._documents(borders), self._where()

    def _documents(self, borders: tuple[int, ...] | None) -> Documents:
        if not self.part:
            return Documents.of(borders, self.row, self.chunks.segment, self.memory)
        here, of = self.memory, (self.length // self.row, self.row, self.part, self.chunks.segment)
        if here.is_cuda and torch.cuda.is_current_stream_capturing():
            return Documents.parts(*of, here)  # the graph owns these tables
        # One table per stream: another stream could read it before it is written.
        stream = torch.cuda.current_stream(here.device).stream_id if here.is_cuda else 0
        if stream not in self.tables:
            keep(self.tables, stream, Documents.parts(*of, here))
        return self.tables[stream]

    def _where(self) -> Any:
        """The stream to launch cached kernels on; None if Triton would compile others for these tensors."""
        if self.interpreted:
            return None
        for item in (self.memory, self.slot, self.restart, *self.given):
            if item is not None and item.data_ptr() % ALIGNED:
                return None
        return stream_of(self.memory.device)

    def launch(self, kernel: Any, settings: Launch, grid: tuple[int, int, int], *given: Any, **more: Any) -> None:
        """Launches a kernel: the one cached in the form, or through Triton, which looks it up."""
        if self.where is None:
            kernel[grid](*given, **self.told(kernel, settings, **more))
            return
        at = (kernel.__name__, *more.items())
        entry = self.kernels.get(at)
        if entry is not None:
            compiled, flags = entry
            compiled[grid](*given, *flags, stream=self.where)
            return
        options = self.told(kernel, settings, **more)
        compiled = kernel[grid](*given, **options)
        if isinstance(compiled, CompiledKernel):
            self.kernels[at] = compiled, [options[name] for name in kernel.arg_names[len(given) :]]

    def new(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """An uninitialised tensor on the memory's device."""
        return self.memory.new_empty(shape, dtype=dtype)

    def factors(self) -> tuple[list[Tensor], list[Tensor], dict[str, Any]]:
        """(rows as the walks read them; pairs of tokens and coefficients of all chunks; flags for such rows)."""
        q, k, kw, _, *gates, write, reset, _ = self.arguments
        size = self.chunks.size
        places = self.documents.segments * (self.chunks.segment // size) * self.count
        pairs = [self.new(places, 1 + self.chunks.narrow, size, size, dtype=self.dtype) for _ in range(2)]
        lengths = (self.length, self.heads, self.count)
        if not self.channels:
            coefficients = [*pairs, self.new(places, 8, size), self.new(places, 4)]
            self.launch(
                factors, self.walks.factors, (places, 1, 1),
                q, k, kw, *gates, write, reset, self.documents.spans, *coefficients, *lengths,
            )  # fmt: skip
            return [q, k, kw, q, k], coefficients, {}
        scaled = [self.new(*k.shape, dtype=self.dtype) for _ in range(5 if self.flags["RESET"] else 3)]
        scaled, ends = (scaled * 2)[:5], self.new(places, 2, self.width)
        self.launch(
            channel_factors, self.walks.factors._replace(warps=8), (places, 1, 1),
            q, k, kw, *gates[:2], write, reset, self.documents.spans, *pairs, *scaled, ends, *lengths, **self.wide,
        )  # fmt: skip
        return scaled, [*pairs, ends, ends], {"APART": True, "MAP": SAME}

    def scanned(self, walk: tuple[Any, ...], memory: Tensor, slot: Tensor, *to: Tensor, PART: str, **more: Any) -> None:
        """Launches a PART of `scan` from first states; it fills y, u, saved states and last states (to)."""
        rows, coefficients, flags = walk
        v, write, documents = self.arguments[3], self.arguments[7], self.documents
        table, programs = documents.docs, documents.programs
        if PART == "outputs":  # all chunks in parallel
            table, programs = documents.spans, documents.segments
        grid = programs * self.count, -(-more.get("V", self.height) // self.walks.walk.tile), 1
        self.launch(
            scan, self.walks.walk, grid,
            *rows, v, write, table, *coefficients, memory, slot, self.restart, *to, self.length, self.heads, self.count,
            self.bias.cu, PART=PART, **flags, **self.walk, **more,
        )  # fmt: skip

    def ends(self, walk: tuple[Any, ...], memory: Tensor, slot: Tensor, **more: Any) -> tuple[Tensor, Tensor]:
        """The last states of all parts, from their first states."""
        v, last = self.arguments[3], torch.empty_like(memory)
        pair = last, torch.empty_like(memory) if self.slots else last
        self.scanned(walk, memory, slot, v, v, memory, slot, *pair, PART="ends", KEEPS=False, V=memory.shape[1], **more)
        return pair

    def moves(self, walk: tuple[Any, ...], none: Tensor) -> Tensor:
        """Transfer matrices of parts, from states that enter to states that leave, `[rows, parts, heads, n P, n P]` for
        n states; `none` are zero states."""
        if self.width != none.shape[1]:
            none = none.new_zeros(len(none), self.width, self.width)
        whole = none.clone()
        whole.diagonal(dim1=1, dim2=2).fill_(1.0)
        first = self.ends(walk, whole, none, HOLLOW=True)
        if not self.slots:
            return first[0]
        second = self.ends(walk, none, whole, HOLLOW=True)
        return torch.cat([torch.cat(first, -1), torch.cat(second, -1)], -2)

    def by_part(self, states: Sequence[Tensor]) -> Tensor:
        """States concatenated, in float64 and by part: `[parts, rows x heads, V, n P]`."""
        whole = beside(states).unflatten(0, (-1, self.parts, self.count)).transpose(0, 1)
        return whole.to(torch.float64, memory_format=torch.contiguous_format).flatten(1, 2)

    def entered(
        self, states: Sequence[Tensor], local: Sequence[Tensor], moves: Tensor, *, back: bool
    ) -> tuple[Tensor, Tensor]:
        """The memory and slot that enter each part. `states` enter the first; each part hands on its local result plus
        its transfer matrix (moves) applied to what entered. With back, cotangents go from the last part to the first,
        through the transposed matrices. In float64, which neither autocast nor TF32 rounds."""
        made, moved = self.by_part(local[: 1 + self.slots]).unbind(0), self.by_part([moves]).unbind(0)
        order = range(self.parts)[::-1] if back else range(self.parts)
        entering = [beside(states).double()]
        for part in order[:-1]:
            by = moved[part].mT if back else moved[part]
            entering.append(torch.baddbmm(made[part], entering[-1], by))
        each = [item.unflatten(0, (-1, self.count)) for item in (entering[::-1] if back else entering)]
        parts = torch.stack(each, 1).flatten(0, 2).split(self.width, -1)
        whole = [item.to(states[0].dtype, memory_format=torch.contiguous_format) for item in parts]
        return whole[0], whole[-1]

    def last_of(self, states: Sequence[Tensor], part: int) -> list[Tensor]:
        """Copies of one part's states in each row, so that those of other parts can be freed."""
        chosen = [item.unflatten(0, (-1, self.parts, self.count))[:, part] for item in states[: 1 + self.slots]]
        copies = [item.flatten(0, 1).clone() for item in chosen]
        return [copies[0], copies[-1]]

    def none(self) -> Tensor:
        """Zero states for all parts."""
        return self.memory.new_zeros(self.documents.programs * self.count, *self.memory.shape[1:])

    def forward(self, keeps: bool) -> tuple[Tensors, Tensors]:
        """Outputs and final states; and the record for `backward` if it keeps one."""
        v, walk = self.arguments[3], self.factors()
        memory, slot = self.memory, self.memory if self.slot is None else self.slot
        moves: Tensors = ()
        if self.parts:
            none = self.none()
            local, move = self.ends(walk, none, none), self.moves(walk, none)
            memory, slot = self.entered((memory, slot)[: 1 + self.slots], local, move, back=False)
            moves = (move,)
        y, last = torch.empty_like(v), torch.empty_like(memory)
        last_slot = last if self.slot is None else torch.empty_like(slot)
        us = self.new(*v.shape) if keeps and self.bias.moves else v
        shape = self.documents.segments, self.count, self.height, self.width
        states = self.new(*shape, dtype=self.dtype) if keeps or self.walks.apart else memory
        slots = states if self.slot is None or states is memory else torch.empty_like(states)
        for part in ("states", "outputs") if self.walks.apart else ("all",):
            self.scanned(walk, memory, slot, y, us, states, slots, last, last_slot, PART=part, KEEPS=keeps)
        if self.parts:
            last, last_slot = self.last_of((last, last_slot), -1)
        finals = (last,) if self.slot is None else (last, last_slot)
        return (y, *finals), (us, states, slots, *moves) if keeps else ()

    def met(self, first: Tensor, slot: Tensor, restart: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Cotangents of the rows' memories, slots and restart weights, from those of the programs."""
        if not self.parts:
            return self.documents.met(first, slot, restart)
        return *self.last_of((first, slot), 0), restart  # type: ignore[return-value]

    def backward(self, record: Tensors, cotangents: Sequence[Tensor]) -> Tensors:
        """Cotangents of memory, slots, initial memory and the tokens."""
        preds, kept, kept_S, *moved = record = several(record)
        gy, *finals = (item.contiguous() for item in cotangents)
        q, k, kw, v, lr, _, _, write, *_ = self.arguments
        if gy.dtype != v.dtype or any(item.data_ptr() % ALIGNED for item in (gy, *finals, *record)):
            self.where = None
        g1, y1 = finals[0], finals[-1]
        kept_G = torch.empty_like(kept)
        kept_Y = kept_G if self.slot is None else torch.empty_like(kept)
        gv = torch.empty_like(v)
        us, es = (self.new(*v.shape), self.new(*v.shape)) if self.bias.moves else (v, v)
        if self.bias.error:  # E is the cotangent of v, but in float32: that of lr is a difference of its terms
            us, gv = preds, es
        g0, y0, gz = (self.new(self.documents.programs * self.count, *g1.shape[1:]) for _ in range(3))
        numbers = (self.length, self.heads)
        rows, weights, flags = self.factors()

        def pulled(g1: Tensor, y1: Tensor) -> None:
            self.launch(
                pull, self.walks.walk, (len(g0), -(-self.height // self.walks.walk.tile), 1),
                *rows, v, write, self.documents.docs, *weights, preds, gy, g1, y1, us, es, gv, kept_G, kept_Y, g0, y0,
                gz, *numbers, self.bias.cu, self.bias.cg, **flags, **self.walk,
            )  # fmt: skip

        if self.parts:  # first with the cotangents of a part's own outputs, then with those of later parts, too
            none = self.none()
            pulled(none, none)
            g1, y1 = self.entered((g1, y1)[: 1 + self.slots], (g0, y0), moved[0], back=True)
        pulled(g1, y1)
        gq, gk, glr = torch.empty_like(q), torch.empty_like(k), torch.empty_like(lr)
        gw = None if self.given[2] is None else torch.empty_like(kw)
        g_gates = [None if x is None else torch.empty_like(x) for x in self.given[5:7]]
        grid, to_w = (self.documents.segments * self.count, 1, 1), gk if gw is None else gw
        spans, segment = self.documents.spans, self.chunks.segment
        g0, y0, gz, gv = *self.met(g0, y0, gz), gv.to(v.dtype)
        g_states = (g0,) if self.slot is None else (g0, y0)
        grads = (*g_states, gz if self.restarts else None, gk, gq, gv, glr, *g_gates, None, None, gw, None)
        if self.channels:
            self.channelled((us, es, kept, gy, kept_G), (gq, gk, to_w, glr, g_gates[0]))
            return grads
        sums, ends = self.new(8, lr.numel()), self.new(self.documents.segments, self.count, 4)
        counts = (*numbers, self.count, lr.numel())
        self.launch(
            tokens, self.walks.rows, grid,
            *self.arguments[:9], spans, self.restart, us, es, kept, kept_S, gy, kept_G, kept_Y, gq, gk, to_w, glr, sums,
            ends, *counts, C=segment,
        )  # fmt: skip
        if self.decays or self.slots:
            to = [v if x is None else x for x in g_gates]
            self.launch(
                gates, self.walks.rows, grid,
                *self.arguments[:9], spans, us, es, gy, sums, ends, *to, *counts, C=segment,
            )  # fmt: skip
        return grads

    def channelled(self, record: Tensors, cotangents: Tensors) -> None:
        """Fills the cotangents of queries, keys, written keys, lr and retain per channel, from what `pull` stored."""
        q, k, kw, v, lr, retain, _, write, reset, _ = self.arguments
        us, es, kept, gy, kept_G = record
        segment, places, launch = self.chunks.segment, self.documents.segments * self.count, self.walks.rows
        pieces, tile = segment // BLOCK, min(self.least if self.chunks.narrow else CHANNELS, self.flags["BP"])
        sums, overs = self.new(3, *k.shape), self.new(2, lr.numel())
        fresh = self.new(3, *k.shape) if self.flags["RESET"] else sums
        across = [self.new(places, 1 + self.chunks.narrow, segment, segment, dtype=self.dtype) for _ in range(2)]
        pairs, ends = self.new(2, places, segment, BLOCK), self.new(places, pieces, self.width)
        spans, numbers = self.documents.spans, (self.length, self.heads, self.count, lr.numel())
        logs = {"LOG": segment.bit_length() - 1, "PIECE": BLOCK.bit_length() - 1}
        sizes = {"C": segment, "TILE": tile, **logs, **self.wide}
        self.launch(
            channel_pairs, launch, (places, 1, 1),
            q, k, v, write, spans, us, es, gy, *across, pairs, overs, *numbers, **sizes,
        )  # fmt: skip
        self.launch(
            channel_borders, launch, (places * -(-self.width // tile), 1, 1),
            q, k, kw, v, lr, retain, write, reset, spans, self.restart, us, es, kept, gy, kept_G, *across, overs, sums,
            fresh, ends, *numbers, **sizes,
        )  # fmt: skip
        self.launch(
            channel_tokens, launch._replace(warps=max(1, self.flags["BP"] // 32)), (places * pieces, 1, 1),
            q, k, kw, lr, retain, write, reset, spans, pairs, sums, fresh, overs, ends, *cotangents, *numbers, C=BLOCK,
        )  # fmt: skip


def beside(states: Sequence[Tensor]) -> Tensor:
    """States concatenated along the last axis."""
    return states[0] if len(states) == 1 else torch.cat([*states], -1)


def stream_of(device: torch.device) -> int | None:
    """The current stream; None if it is not on the tensors' card."""
    if device.type != "cuda":  # kernels are compiled, but do not run
        return 0
    index = torch.cuda.current_device()
    return driver.active.get_current_stream(index) if index == device.index else None


def phi_of(config: MemoryConfig, width: int) -> tuple[Any, Any, str, float]:
    """(map, its pullback, norm, scale of queries) of a config; map and pullback are None for the identity."""
    there, back = SAME[:2] if config.forms.identity else map_of(config.feature_map)
    return there, back, config.key_norm, width**-0.5 if config.query_scale == "key_dim" else 1.0


def normed(inputs: Tensors) -> tuple[Tensors, Tensors]:
    """Rows of `[B, T, H, D]` at unit length in their dtype, and the record for `normed_vjp`."""
    x, where = _rows(inputs)
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    sizes = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
    unit[(triton.cdiv(sizes.numel(), ROWS),)](x, y, sizes, sizes.numel(), *where, **_tile(x))
    return (y,), (sizes,)


def normed_vjp(inputs: Tensors, record: Tensors, cotangents: Sequence[Tensor]) -> Tensors:
    """The cotangent of the rows, in their dtype."""
    x, where = _rows(inputs)
    sizes, gx = one(record), torch.empty_like(x, memory_format=torch.contiguous_format)
    unit_back[(triton.cdiv(sizes.numel(), ROWS),)](
        x, sizes, cotangents[0].contiguous(), gx, sizes.numel(), *where, **_tile(x)
    )
    return (gx,)


def _rows(inputs: Tensors) -> tuple[Tensor, tuple[int, ...]]:
    """Rows with a contiguous last axis; and T, H and the strides of all other axes."""
    x: Tensor = one(inputs).detach()
    x = x if x.stride(-1) == 1 else x.contiguous()
    return x, (*x.shape[1:3], *x.stride()[:3])


def _tile(x: Tensor) -> dict[str, int]:
    return {"D": x.shape[-1], "BR": ROWS, "BD": triton.next_power_of_2(x.shape[-1]), "num_warps": 4}
