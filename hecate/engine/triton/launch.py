"""Calls of the kernels: tensors as they lie, tiles for their widths, and the record between forward and backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from hecate.engine.tokens import Tokens, by_head
from hecate.engine.triton.back import gates, tokens
from hecate.engine.triton.channels import channel_factors, channel_tokens
from hecate.engine.triton.factors import factors
from hecate.engine.triton.kernel import interpreting
from hecate.engine.triton.maps import unit, unit_back
from hecate.engine.triton.scan import pull, scan
from hecate.engine.triton.table import BLOCK, Documents, Launch, card_of, chunks_of, launched, walked
from hecate.engine.triton.tiles import tiles_of
from hecate.rule import MemoryConfig
from hecate.tape import Tensors, one, several

ROWS = 32  # of a norm's program
SAME = ("same", 0.0, "none", 1.0)  # of features


class Scan:
    """The inputs of one call: states `[N, V, P]` (slot None without momentum) and tokens, `[B, T, H, *]` as they lie;
    `[N, T, *]` are those of one head."""

    def __init__(
        self, config: MemoryConfig, exact: str, raw: bool, borders: tuple[int, ...] | None, part: int, inputs: Tensors
    ) -> None:
        """From memory, slots, initial memory and the fields of `Tokens`, flat; raw: keys and queries are no features
        yet; borders: of the documents that reset tells of, which then are walked side by side; part: tokens of the
        parts in which each row is walked side by side, or 0."""
        states = 1 + len(config.algorithm.slots)
        memory, *slots = several(inputs[:states])
        given = Tokens(*inputs[states + 1 :])  # type: ignore[arg-type]
        self.heads = given.lr.shape[2] if given.lr.dim() == 3 else 1
        self.memory, self.slot = memory.contiguous(), slots[0].contiguous() if slots else None
        self.restart = None if given.reset is None else one((inputs[states],)).contiguous()
        self.length = given.v.shape[1]
        (self.count, self.height, self.width), self.total = memory.shape, given.lr.numel()
        self.parts, row = -(-self.length // part) if part else 0, self.length
        if part:  # documents of one long row
            count = len(given.v)
            self.count, self.length = self.count // count, count * row
        retain = given.retain if config.retention.uses_retain else None
        momentum = given.momentum if slots else None
        masks = [None if m is None else by_head(m, self.heads) if given.lr.dim() == 3 else m for m in given[6:8]]
        own = (given.phi_q, given.phi_k, given.phi_w, given.v, given.lr, retain, momentum)
        if borders is not None:
            masks[1] = None
        self.given = [None if x is None else x.detach().contiguous() for x in (*own, *masks)]
        self.channels = retain is not None and retain.dim() > given.lr.dim()
        self.bias = tiles_of(config.bias, turned=True)
        linear, card = self.bias.error or not self.bias.moves, card_of(memory.device)
        self.chunks = chunks_of(self.width, exact, linear=linear)
        sizes, moving, narrow = (card, self.height, self.width), slots != [], self.chunks.narrow
        self.rest = launched(*sizes, momentum=moving)
        self.walks = walked(*sizes, momentum=moving, narrow=narrow, whole=not self.bias.apart)
        segment = self.chunks.segment
        if part:
            self.documents = Documents.parts(self.length // row, row, part, segment, self.memory)
        else:
            self.documents = Documents.of(borders, row, segment, self.memory)
        # The interpreter rounds nothing to bfloat16, and its products of it are wrong.
        self.dtype = torch.bfloat16 if narrow and not interpreting() else torch.float32
        phi = phi_of(config, self.width) if raw else SAME
        fine = "tf32" if exact == "bf16" else exact
        self.flags: dict[str, Any] = {
            "P": self.width, "V": self.height, "BP": max(16, triton.next_power_of_2(self.width)),
            "C": self.chunks.size, "SEG": self.chunks.segment, "LOG": self.chunks.size.bit_length() - 1,
            "MOVES": self.bias.moves, "RETAIN": retain is not None, "MOMENTUM": moving,
            "FORM": "target" if not self.bias.moves else "error" if self.bias.error else "rows",
            "MASK": masks[0] is not None, "RESET": masks[1] is not None, "APART": given.phi_w is not None,
            "DECAYED": config.decay_order == "before_gradient", "EARLY_READ": config.read == "before",
            "CHANNELS": self.channels, "DOCS": borders is not None or part > 0, "PARTS": part > 0, "HOLLOW": False,
            "PSI": self.bias.psi, "PULL": self.bias.pull,
            "EXACT": fine, "FINE": fine if narrow else "tf32x3", "HALVES": narrow,
            "DT": tl.bfloat16 if self.dtype == torch.bfloat16 else tl.float32,
            "PHI": phi, "MAP": (*phi[:2], "none" if narrow else phi[2], phi[3]), "SIZE": phi[2] if narrow else "none",
            "BARE": (*phi[:2], "none", phi[3]), "NORM": phi[2],
        }  # fmt: skip

    def told(self, kernel: Any, launch: Launch, **more: Any) -> dict[str, Any]:
        """The options of a kernel, and those flags that it asks for."""
        flags = self.flags | {"BV": launch.tile, "STAGES": launch.stages} | more
        own = {"num_warps": launch.warps, "num_stages": 1}
        return own | {name: flags[name] for name in kernel.arg_names if name in flags}

    @property
    def arguments(self) -> list[Tensor]:
        """q, k, kw, v, lr, retain, momentum, write, reset; v in place of what is not there."""
        return [self.given[3] if x is None else x.view(torch.uint8) if x.dtype == torch.bool else x for x in self.given]  # type: ignore[misc]

    def new(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Room for numbers."""
        return self.memory.new_empty(shape, dtype=dtype)

    @property
    def kept(self) -> tuple[int, ...]:
        """The shape of the states at every segment's start."""
        return self.documents.segments, self.count, self.height, self.width

    def factors(self) -> tuple[list[Tensor], list[Tensor], dict[str, Any]]:
        """Rows as walks read them; pairs of tokens and numbers of all chunks; and flags that go with such rows."""
        q, k, kw, _, *gates, write, reset = self.arguments
        size = self.chunks.size
        places = self.documents.segments * (self.chunks.segment // size) * self.count
        pairs = [self.new(places, 1 + self.chunks.narrow, size, size, dtype=self.dtype) for _ in range(2)]
        lengths = (self.length, self.heads, self.count)
        if not self.channels:
            found = [*pairs, self.new(places, 8, size), self.new(places, 4)]
            factors[(places,)](
                q, k, kw, *gates, write, reset, self.documents.spans, *found, *lengths,
                **self.told(factors, self.walks.factors),
            )  # fmt: skip
            return [q, k, kw, q, k], found, {}
        made = [self.new(*k.shape, dtype=self.dtype) for _ in range(5 if self.flags["RESET"] else 3)]
        made, ends = (made * 2)[:5], self.new(places, 2, self.width)
        channel_factors[(places,)](
            q, k, kw, *gates[:2], write, reset, self.documents.spans, *pairs, *made, ends, *lengths,
            **self.told(channel_factors, self.walks.factors),
        )  # fmt: skip
        return made, [*pairs, ends, ends], {"APART": True, "MAP": ("same", 0.0, "none", 1.0)}

    def by_row(self, states: Tensor) -> Tensor:
        """States of all parts, `[rows, parts, heads, V, P]`."""
        return states.unflatten(0, (-1, self.parts, self.count))

    def ends(self, walk: tuple[Any, ...], memory: Tensor, slot: Tensor, **more: Any) -> list[Tensor]:
        """The last states of all parts from their first ones."""
        rows, found, flags = walk
        v, write, height = self.arguments[3], self.arguments[7], memory.shape[1]
        last = [torch.empty_like(memory) for _ in (memory, slot)]
        scan[(self.documents.programs * self.count, -(-height // self.walks.scan.tile))](
            *rows, v, write, self.documents.docs, *found, memory, slot, memory, v, v, memory, slot, *last,
            self.length, self.heads, self.count, self.bias.cu,
            **self.told(scan, self.walks.scan, PART="ends", KEEPS=False, **flags, **({"V": height} | more)),
        )  # fmt: skip
        return last

    def moves(self, walk: tuple[Any, ...]) -> Tensor:
        """Matrices from the states that enter each part to those it hands on, side by side: `[rows, parts, heads, n P,
        n P]` of n states."""
        none = self.new(self.documents.programs * self.count, self.width, self.width).zero_()
        one = none + torch.eye(self.width, dtype=none.dtype, device=none.device)
        if self.slot is None:
            return self.by_row(self.ends(walk, one, none, HOLLOW=True)[0])
        found = self.ends(walk, one, none, HOLLOW=True), self.ends(walk, none, one, HOLLOW=True)
        return self.by_row(torch.cat([torch.cat(each, -1) for each in found], -2))

    def entered(self, states: Sequence[Tensor], local: Sequence[Tensor], moves: Tensor) -> tuple[Tensor, Tensor]:
        """The memory and slot that enter each part: `states` enter the first of a row, and a part hands on what it
        makes by itself (local) and, by its moves, of what entered. In float64, which neither autocast nor TF32 rounds.
        """
        count = 1 if self.slot is None else 2
        first, made = (torch.cat([*each[:count]], -1).double() for each in (states, local))
        found, made, moves = [first.unflatten(0, (-1, self.count))], self.by_row(made), moves.double()
        for part in range(self.parts - 1):
            found.append(made[:, part] + found[-1] @ moves[:, part])
        whole = torch.stack(found, 1).flatten(0, 2).to(states[0].dtype).split(self.width, -1)
        return whole[0].contiguous(), whole[-1].contiguous()

    def first(self, walk: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
        """The memory and slot that programs start at: those of the rows, or in parts what each part starts at."""
        slot = self.memory if self.slot is None else self.slot
        if not self.parts:
            return self.memory, slot
        none = self.new(self.documents.programs * self.count, *self.memory.shape[1:]).zero_()
        return self.entered((self.memory, slot), self.ends(walk, none, none), self.moves(walk))

    def last(self, walk: tuple[Any, ...], finals: Sequence[Tensor], local: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """The cotangents of the last memory and slot of each part, by those of a row's and those that parts alone leave
        of their first ones: what enters from behind, by the moves transposed."""
        turned = [self.by_row(item).flip(1).flatten(0, 2) for item in local]
        found = self.entered(finals, turned, self.moves(walk).flip(1).mT)
        first, last = (self.by_row(item).flip(1).flatten(0, 2).contiguous() for item in found)
        return first, last

    def forward(self, keeps: bool) -> tuple[Tensors, Tensors]:
        """Outputs and final states; and the record for `backward` if asked for."""
        v, write, documents = self.arguments[3], self.arguments[7], self.documents
        rows, found, flags = walk = self.factors()
        memory, slot = self.first(walk)
        y, last = torch.empty_like(v), torch.empty_like(memory)
        last_slot = last if self.slot is None else torch.empty_like(slot)
        apart = self.walks.apart
        us = self.new(*v.shape) if keeps and self.bias.moves else v
        states = self.new(*self.kept, dtype=self.dtype) if keeps or apart else memory
        slots = states if self.slot is None or states is memory else torch.empty_like(states)
        restart = memory if self.restart is None else self.restart
        tiles, grids = -(-self.height // self.walks.scan.tile), (documents.programs, documents.segments)
        parts = ("states", "outputs") if apart else ("all",)
        for part, table, programs in zip(parts, (documents.docs, documents.spans), grids):  # noqa: B905
            scan[(programs * self.count, tiles)](
                *rows, v, write, table, *found, memory, slot, restart, y, us, states, slots, last, last_slot,
                self.length, self.heads, self.count, self.bias.cu,
                **self.told(scan, self.walks.scan, PART=part, KEEPS=keeps, **flags),
            )  # fmt: skip
        if self.parts:  # those of the last parts, which do not keep the others'
            last, last_slot = (self.by_row(item)[:, -1].flatten(0, 1).clone() for item in (last, last_slot))
        finals = (last,) if self.slot is None else (last, last_slot)
        return (y, *finals), (us, states, slots) if keeps else ()

    def met(self, first: Tensor, slot: Tensor, restart: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Cotangents of the rows' memories, slots and of what they restart at, from those that programs leave."""
        if not self.parts:
            return self.documents.met(first, slot, restart)
        first, slot = (self.by_row(item)[:, 0].flatten(0, 1).clone() for item in (first, slot))
        return first, slot, restart

    def backward(self, record: Tensors, cotangents: Sequence[Tensor]) -> Tensors:
        """Cotangents of memory, slots, initial memory and the tokens."""
        preds, kept, kept_S = several(record)
        gy, *finals = (item.contiguous() for item in cotangents)
        q, k, kw, v, lr, *_, write, _ = self.arguments
        g1, y1 = finals[0], finals[-1]
        kept_G = torch.empty_like(kept)
        kept_Y = kept_G if self.slot is None else torch.empty_like(kept)
        moves = self.bias.moves
        gv = torch.empty_like(v)
        us, es = (self.new(*v.shape), self.new(*v.shape)) if moves else (v, v)
        if self.bias.error:  # whose E is the cotangent of v, but in float32: lr's is a difference of what it comes to
            us, gv = preds, es
        g0, y0, gz = (self.new(self.documents.programs * self.count, *g1.shape[1:]) for _ in range(3))
        numbers = (self.length, self.heads)
        rows, weights, flags = walk = self.factors()

        def pulled(g1: Tensor, y1: Tensor) -> None:
            pull[(len(g0), -(-self.height // self.walks.pull.tile))](
                *rows, v, write, self.documents.docs, *weights, preds, gy, g1, y1, us, es, gv, kept_G, kept_Y, g0, y0,
                gz, *numbers, self.bias.cu, self.bias.cg, **self.told(pull, self.walks.pull, **flags),
            )  # fmt: skip

        if self.parts:  # once for what each part's own outputs ask, and then from what those behind it ask, too
            pulled(torch.zeros_like(g0), torch.zeros_like(g0))
            g1, y1 = self.last(walk, (g1, y1), (g0, y0))
        pulled(g1, y1)
        gq, gk, glr = torch.empty_like(q), torch.empty_like(k), torch.empty_like(lr)
        gw = None if self.given[2] is None else torch.empty_like(kw)
        found = [None if x is None else torch.empty_like(x) for x in self.given[5:7]]
        grid, to_w = (self.documents.segments * self.count,), gk if gw is None else gw
        spans, segment = self.documents.spans, self.chunks.segment
        restart = self.memory if self.restart is None else self.restart
        g0, y0, gz, gv = *self.met(g0, y0, gz), gv.to(v.dtype)
        own = (g0,) if self.slot is None else (g0, y0)
        grads = (*own, None if self.restart is None else gz, gk, gq, gv, glr, *found, None, None, gw, None)
        if self.channels:
            channel_tokens[(grid[0] * (segment // BLOCK),)](
                *self.arguments, spans, restart, us, es, kept, gy, kept_G, gq, gk, to_w, glr, found[0], *numbers,
                self.count, **self.told(channel_tokens, self.rest.tokens, C=BLOCK, LOG=BLOCK.bit_length() - 1),
            )  # fmt: skip
            return grads
        sums, ends = self.new(9, self.total), self.new(self.documents.segments, self.count, 4)
        for of in ("queries", "keys") if self.rest.apart else ("both",):
            tokens[grid](
                *self.arguments, spans, restart, us, es, kept, kept_S, gy, kept_G, kept_Y, gq, gk, to_w, glr, sums,
                ends, *numbers, self.count, self.total, **self.told(tokens, self.rest.tokens, OF=of, C=segment),
            )  # fmt: skip
        early = self.flags["EARLY_READ"] or (moves and not self.flags["DECAYED"])
        apart = self.rest.apart and self.slot is not None and early
        for to, parts in zip(found, (("ahead", "after") if apart else ("retain",), ("momentum",)), strict=True):
            for of in parts if to is not None else ():
                gates[grid](
                    *self.arguments, spans, us, es, gy, sums, ends, to, *numbers, self.count, self.total,
                    **self.told(gates, self.rest.gates, OF=of, C=segment),
                )  # fmt: skip
        return grads


def phi_of(config: MemoryConfig, width: int) -> tuple[str, float, str, float]:
    """The map of a config, its number, its norm, and what queries are multiplied by."""
    form = config.forms.phi
    if form is None:
        raise TypeError("the engine was chosen without its refusal being asked")
    return *form, config.key_norm, width**-0.5 if config.query_scale == "key_dim" else 1.0


def normed(inputs: Tensors, dtype: torch.dtype) -> tuple[Tensors, Tensors]:
    """Rows of `[B, T, H, D]` at unit length in a dtype, and the record for `normed_vjp`."""
    x, where = _rows(inputs)
    y = torch.empty(x.shape, dtype=dtype, device=x.device)
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
    """Rows whose numbers lie side by side; T, H, and the strides of all other axes."""
    x: Tensor = one(inputs).detach()
    x = x if x.stride(-1) == 1 else x.contiguous()
    return x, (*x.shape[1:3], *x.stride()[:3])


def _tile(x: Tensor) -> dict[str, int]:
    return {"D": x.shape[-1], "BR": ROWS, "BD": triton.next_power_of_2(x.shape[-1]), "num_warps": 4}
