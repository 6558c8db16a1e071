"""Calls of the kernels: tensors as they lie, tiles for their widths, and the record between forward and backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from hecate.engine.tokens import Tokens, by_head
from hecate.engine.triton.back import gates, tokens, walk
from hecate.engine.triton.block import forward
from hecate.engine.triton.channels import channel_factors, channel_tokens
from hecate.engine.triton.factors import factors
from hecate.engine.triton.kernel import interpreting
from hecate.engine.triton.maps import unit, unit_back
from hecate.engine.triton.scan import pull, scan
from hecate.engine.triton.table import BLOCK, Documents, card_of, chunks_of, launched, walked
from hecate.engine.triton.tiles import tiles_of
from hecate.rule import MemoryConfig
from hecate.tape import Tensors, one, several

ROWS = 32  # of a norm's program


class Scan:
    """The inputs of one call: states `[N, V, P]` (slot None without momentum) and tokens, `[B, T, H, *]` as they lie;
    `[N, T, *]` are those of one head."""

    def __init__(
        self, config: MemoryConfig, exact: str, raw: bool, borders: tuple[int, ...] | None, inputs: Tensors
    ) -> None:
        """From memory, slots, initial memory and the fields of `Tokens`, flat; raw: keys and queries are no features
        yet; borders: of the documents that reset tells of, which then are walked side by side."""
        states = 1 + len(config.algorithm.slots)
        memory, *slots = several(inputs[:states])
        given = Tokens(*inputs[states + 1 :])  # type: ignore[arg-type]
        self.heads = given.lr.shape[2] if given.lr.dim() == 3 else 1
        self.memory, self.slot = memory.contiguous(), slots[0].contiguous() if slots else None
        self.restart = None if given.reset is None else one((inputs[states],)).contiguous()
        self.length = given.v.shape[1]
        (self.count, self.height, self.width), self.total = memory.shape, given.lr.numel()
        retain = given.retain if config.retention.uses_retain else None
        momentum = given.momentum if slots else None
        masks = [None if m is None else by_head(m, self.heads) if given.lr.dim() == 3 else m for m in given[6:8]]
        own = (given.phi_q, given.phi_k, given.phi_w, given.v, given.lr, retain, momentum)
        if borders is not None:
            masks[1] = None
        self.given = [None if x is None else x.detach().contiguous() for x in (*own, *masks)]
        self.channels = retain is not None and retain.dim() > given.lr.dim()
        self.bias = tiles_of(config.bias, turned=True)
        linear = self.bias.error or not self.bias.moves
        self.chunks = chunks_of(self.width, exact, channels=self.channels, linear=linear)
        self.segment = self.chunks.segment
        card, moving = card_of(memory.device), slots != []
        self.launches = launched(card, self.height, self.width, momentum=moving, whole=not self.bias.apart)
        self.walks = walked(
            card, self.height, self.width, momentum=moving, narrow=self.chunks.narrow, whole=not self.bias.apart
        )
        self.tiles = -(-self.height // self.launches.serial.tile)
        # The interpreter rounds nothing to bfloat16, and its products of it are wrong.
        self.dtype = torch.bfloat16 if self.chunks.narrow and not interpreting() else torch.float32
        self.documents = Documents.of(borders, self.length, self.segment, self.memory)
        self.flags: dict[str, Any] = {
            "P": self.width, "V": self.height, "BP": max(16, triton.next_power_of_2(self.width)),
            "MOVES": self.bias.moves, "RETAIN": retain is not None, "MOMENTUM": slots != [],
            "MASK": masks[0] is not None, "RESET": masks[1] is not None, "APART": given.phi_w is not None,
            "DECAYED": config.decay_order == "before_gradient", "EARLY_READ": config.read == "before",
            "EXACT": "tf32" if exact == "bf16" else exact,
            "PHI": _phi(config, self.width) if raw else ("same", 0.0, "none", 1.0), "DOCS": borders is not None,
        }  # fmt: skip

    @property
    def arguments(self) -> list[Tensor]:
        """q, k, kw, v, lr, retain, momentum, write, reset; v in place of what is not there."""
        return [self.given[3] if x is None else x.view(torch.uint8) if x.dtype == torch.bool else x for x in self.given]  # type: ignore[misc]

    def new(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Room for numbers."""
        return self.memory.new_empty(shape, dtype=dtype)

    @property
    def walking(self) -> dict[str, Any]:
        """What `factors`, `scan` and `pull` are told."""
        phi, norm = self.flags["PHI"], self.flags["PHI"][2]
        said = {name: self.flags[name] for name in ("P", "BP", "MOMENTUM", "MASK", "RESET", "APART", "EXACT", "DOCS")}
        if self.channels:
            phi, norm = ("same", 0.0, "none", 1.0), "none"  # of rows that `channel_factors` leaves
        return said | {
            "C": self.chunks.size, "SEG": self.segment, "HALVES": self.chunks.narrow, "CHANNELS": self.channels,
            "APART": said["APART"] or self.channels,
            "FORM": "target" if not self.bias.moves else "error" if self.bias.error else "rows",
            "DT": tl.bfloat16 if self.dtype == torch.bfloat16 else tl.float32,
            "MAP": (*phi[:2], "none", phi[3]) if self.chunks.narrow else (*phi[:2], norm, phi[3]),
        }  # fmt: skip

    def factors(self) -> tuple[Tensor, ...]:
        """What chunks do to themselves: pairs of tokens as predictions and as reads see them, and numbers."""
        q, k, kw, _, *gates, write, reset = self.arguments
        size, narrow, f = self.chunks.size, self.chunks.narrow, self.flags
        places = self.documents.segments * (self.segment // size) * self.count
        pairs = (places, 1 + narrow, size, size)
        lower, attend = self.new(*pairs, dtype=self.dtype), self.new(*pairs, dtype=self.dtype)
        numbers, ends = self.new(places, 8, size), self.new(places, 4)
        options = self.walks.factors.options | {"LOG": size.bit_length() - 1} | self.walking
        options |= {name: f[name] for name in ("APART", "DECAYED", "EARLY_READ")}
        del options["BV"]
        if self.channels:
            for name in ("CHANNELS", "MAP", "MOMENTUM"):
                del options[name]
            kq, kp, ke = (self.new(*k.shape, dtype=self.dtype) for _ in range(3))
            zq, zp = (torch.empty_like(kq), torch.empty_like(kp)) if f["RESET"] else (kq, kp)
            ends = self.new(places, 2, self.width)
            channel_factors[(places,)](
                q, k, kw, *gates[:2], write, reset, self.documents.spans, lower, attend, kq, kp, ke, zq, zp, ends,
                self.length, self.heads, self.count, PHI=f["PHI"], **options,
            )  # fmt: skip
            return kq, kp, ke, zq, zp, lower, attend, ends, ends
        del options["CHANNELS"]
        factors[(places,)](
            q, k, kw, *gates, write, reset, self.documents.spans, lower, attend, numbers, ends, self.length, self.heads,
            self.count, RETAIN=f["RETAIN"], FINE="tf32" if narrow else "tf32x3", SIZE=f["PHI"][2] if narrow else "none",
            **options,
        )  # fmt: skip
        return q, k, kw, q, k, lower, attend, numbers, ends

    @property
    def kept(self) -> tuple[int, ...]:
        """The shape of the states at every segment's start."""
        return self.documents.segments, self.count, self.height, self.width

    def forward(self, keeps: bool) -> tuple[Tensors, Tensors]:
        """Outputs and final states; and the record for `backward` if asked for."""
        v, write = self.arguments[3], self.arguments[7]
        memory, documents = self.memory, self.documents
        y, last = torch.empty_like(v), torch.empty_like(memory)
        slot = memory if self.slot is None else self.slot
        last_slot = last if self.slot is None else torch.empty_like(slot)
        apart = self.walks.apart
        us = self.new(*v.shape, dtype=self.dtype) if keeps and self.bias.moves else v
        states = self.new(*self.kept, dtype=self.dtype) if keeps or apart else memory
        slots = self.new(*self.kept, dtype=self.dtype) if (keeps or apart) and self.slot is not None else states
        restart = memory if self.restart is None else self.restart
        (*rows, lower, attend, numbers, ends), tiles = self.factors(), -(-self.height // self.walks.scan.tile)
        programs = (documents.programs * self.count, tiles), (documents.segments * self.count, tiles)
        told = documents.docs, documents.spans
        for grid, table, part in zip(programs, told, ("states", "outputs") if apart else ("all",)):  # noqa: B905
            scan[grid](
                *rows, v, write, table, lower, attend, numbers, ends, memory, slot, restart, y, us, states, slots, last,
                last_slot, self.length, self.heads, self.count, self.bias.cu, V=self.height,
                KEEPS=keeps or part == "states", PART=part, PSI=self.bias.psi, **self.walks.scan.staged, **self.walking,
            )  # fmt: skip
        finals = (last,) if self.slot is None else (last, last_slot)
        return (y, *finals), (us, states, slots) if keeps else ()

    def backward(self, record: Tensors, cotangents: Sequence[Tensor]) -> Tensors:
        """Cotangents of memory, slots, initial memory and the tokens."""
        preds, kept, kept_S = several(record)
        gy, *finals = (item.contiguous() for item in cotangents)
        q, k, kw, v, lr, *_, write, _ = self.arguments
        g1, y1 = finals[0], finals[-1]
        kept_G = torch.empty_like(kept)
        kept_Y = kept_G if self.slot is None else torch.empty_like(kept)
        moves = self.bias.moves
        gv, g0, y0 = torch.empty_like(v), self.documents.each(g1), self.documents.each(y1)
        us, es = (preds, gv) if self.bias.error else (self.new(*v.shape), self.new(*v.shape)) if moves else (v, v)
        gz = torch.empty_like(g0) if self.flags["RESET"] else g0
        numbers = (self.length, self.heads)
        *rows, lower, attend, weights, ends = self.factors()
        pull[(len(g0), -(-self.height // self.walks.pull.tile))](
            *rows, v, write, self.documents.docs, lower, attend, weights, ends, preds, gy, g1, y1, us, es, gv, kept_G,
            kept_Y, g0, y0, gz, *numbers, self.bias.cu, self.bias.cg, V=self.height, PSI=self.bias.psi,
            PULL=self.bias.pull, **self.walks.pull.staged, **self.walking,
        )  # fmt: skip
        gq, gk, glr = torch.empty_like(q), torch.empty_like(k), torch.empty_like(lr)
        gw = None if self.given[2] is None else torch.empty_like(kw)
        found = [None if x is None else torch.empty_like(x) for x in self.given[5:7]]
        grid, to_w = (self.documents.segments * self.count,), gk if gw is None else gw
        spans = self.documents.spans
        restart = self.memory if self.restart is None else self.restart
        g0, y0, gz = self.documents.met(g0, y0, gz)
        own = (g0,) if self.slot is None else (g0, y0)
        grads = (*own, None if self.restart is None else gz, gk, gq, gv, glr, *found, None, None, gw, None)
        if self.channels:
            channel_tokens[grid](
                *self.arguments, spans, restart, us, es, kept, gy, kept_G, gq, gk, to_w, glr, found[0], *numbers,
                self.count, C=BLOCK, **self.launches.serial.options, **self.flags,
            )  # fmt: skip
            return grads
        sums, ends = self.new(9, self.total), self.new(self.documents.segments, self.count, 4)
        for of in ("queries", "keys") if self.launches.apart else ("both",):
            tokens[grid](
                *self.arguments, spans, restart, us, es, kept, kept_S, gy, kept_G, kept_Y, gq, gk, to_w,
                glr, sums, ends, *numbers, self.count, self.total, OF=of, C=self.segment,
                **self.launches.tokens.options, **self.flags,
            )  # fmt: skip
        early = self.flags["EARLY_READ"] or (moves and not self.flags["DECAYED"])
        apart = self.launches.apart and self.slot is not None and early
        for to, parts in zip(found, (("ahead", "after") if apart else ("retain",), ("momentum",)), strict=True):
            for of in parts if to is not None else ():
                gates[grid](
                    *self.arguments, spans, us, es, gy, sums, ends, to, *numbers, self.count, self.total, OF=of,
                    C=self.segment, **self.launches.gates.options, **self.flags,
                )  # fmt: skip
        return grads


def _phi(config: MemoryConfig, width: int) -> tuple[str, float, str, float]:
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
