"""Weighted sums of values, y_t = sum_s c_(t-s) (q_t.k_s) v_s: running, over everything, from both sides, by distance.

Keys k `[B, S, G, P]` and values v `[B, S, G, V]` are features and what they stand for; queries
`[B, T r, G, P]` come with the r queries of a key head's group side by side. The sums of a causal pass run in a memory
with bias dot, whose engines keep states of a few tokens and make the others again in the backward pass.
"""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from hecate.engine import EngineName, memory_scan, written_before
from hecate.rule import Gates, MemoryConfig, MemoryState
from hecate.tape import Autodiff

Read = Literal["after", "before"]


def memory_of_sums(*, decays: bool, **fields: Any) -> MemoryConfig:
    """The memory that sums: it does not look at values, so what is not finite shows in the outputs, as in other
    attention."""
    retention = "decay" if decays else "none"
    return MemoryConfig(bias="dot", retention=retention, on_nonfinite="propagate", **fields)


MEMORIES = {
    (read, decays): memory_of_sums(read=read, decays=decays) for read in ("after", "before") for decays in (False, True)
}


def state_of_sums(weight: Tensor, total: Tensor | None = None, seen: Tensor | None = None) -> MemoryState:
    """The state of a memory of weights `[B, G, V, P]`, and of its normaliser `[B, G, 1, P]`."""
    place = torch.zeros(weight.shape[:2], dtype=torch.int64, device=weight.device)
    normalizer = None if total is None else MemoryState({"weight": total}, {}, {}, {}, place)
    return MemoryState({"weight": weight}, {}, {}, {}, place, normalizer, seen)


class Sums(NamedTuple):
    """How the sums of a call are made: the same for those of values and of weights.

    Fields:
        causal: whether a query sees the keys up to its own, or all of its document.
        write, reset: masks `[B, S]`.
        retain: what is kept per token, `[B, S, G]`.
        factors: c of every distance: see `Position.factors`.
        engine, autodiff, name: passed to `memory_scan`.
    """

    causal: bool
    write: Tensor | None
    reset: Tensor | None
    retain: Tensor | None = None
    factors: Tensor | None = None
    engine: EngineName = "auto"
    autodiff: Autodiff = "auto"
    name: str = "attention"

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, start: Tensor | None) -> tuple[Tensor, Tensor]:
        """y `[B, T r, G, V]`, and the state `[B, G, V, P]` after the last token."""
        if self.factors is not None:  # nothing of fixed size sums up the past
            return self.by_distance(q, k, v, self.factors), v.new_zeros(len(v), *v.shape[2:], 0)
        if self.causal:
            return self.running(q, k, v, start)
        if self.reset is None and self.retain is None:
            return self.over_all(q, k, v, start)
        return self.from_both_sides(q, k, v, start)

    def running(
        self, q: Tensor, k: Tensor, v: Tensor, start: Tensor | None, *, read: Read = "after"
    ) -> tuple[Tensor, Tensor]:
        """Sums over the tokens up to each one, and the state after the last.

        The r queries of a group are r tokens to the memory, of which one is written. With `retain` a token j written
        tokens away weighs retain^j; a memory decays as it is written, so to who reads it without or before a write the
        last token is one nearer than it should be.
        """
        group = q.shape[1] // k.shape[1] if k.shape[1] else 1
        write, reset, retain = self.write, self.reset, self.retain
        writes = torch.ones(k.shape[:2], dtype=torch.bool, device=k.device) if write is None else write
        if retain is not None:
            nearer = (writes if read == "before" else ~writes).unsqueeze(-1)
            decay = torch.where(nearer, retain, 1.0).repeat_interleave(group, 1)
            q, retain = q * decay.unsqueeze(-1), retain.repeat_interleave(group, 1)
        if group > 1:
            # Who reads before the write comes before the writer.
            writer = 0 if read == "after" else group - 1
            k, v, write = (_spread(x, writer, group) for x in (k, v, writes))
            reset = None if reset is None else _spread(reset, 0, group)
        y, after = memory_scan(
            MEMORIES[read, retain is not None],
            q,
            k,
            v,
            Gates(retain=retain),
            state=None if start is None else state_of_sums(start),
            write_mask=write,
            reset_mask=reset,
            engine=self.engine,
            autodiff=self.autodiff,
            name=self.name,
        )
        return y, after.memory["weight"]

    def over_all(self, q: Tensor, k: Tensor, v: Tensor, start: Tensor | None) -> tuple[Tensor, Tensor]:
        """Sums over all written tokens, the same for every query: O((T + S) P V)."""
        held = torch.einsum("bsgv,bsgp->bgvp", v, written(k, self.write))
        held = held if start is None else held + start
        return torch.einsum("btgp,bgvp->btgv", q, held), held

    def from_both_sides(self, q: Tensor, k: Tensor, v: Tensor, start: Tensor | None) -> tuple[Tensor, Tensor]:
        """Sums over the whole document of each token: what runs up to it, and what runs back to it."""
        y, after = self.running(q, k, v, start)
        reset = self.reset
        if reset is not None:  # backwards a document starts with its last token
            reset = torch.cat([reset[:, 1:], torch.ones_like(reset[:, :1])], 1)
        write, reset, retain = (None if x is None else x.flip(1) for x in (self.write, reset, self.retain))
        back = self._replace(write=write, reset=reset, retain=retain)
        later, _ = back.running(q.flip(1), k.flip(1), v.flip(1), None, read="before")
        return y + later.flip(1), after

    def by_distance(self, q: Tensor, k: Tensor, v: Tensor, factors: Tensor) -> Tensor:
        """Sums with a weight per distance, as convolutions by FFT.

        Masked tokens count for no distance: the convolution runs over the written ones, moved together, and a query
        reads it where it stands among them. A masked query stands where the next written token does, which it may not
        see, so a causal convolution leaves out distance 0; a token's own product is added. [ATT-REL-D2]
        """
        batch, length = k.shape[:2]
        if not q.numel() or not v.numel():
            return q.new_zeros(*q.shape[:3], v.shape[-1])
        q = q.unflatten(1, (length, -1))
        place, own = None, q.new_zeros(())
        if self.causal:
            weight = torch.einsum("btrgp,btgp->btrg", q, written(k, self.write)) * factors[:, 0]
            own = torch.einsum("btrg,btgv->btrgv", weight, v)
        if self.write is not None:
            k, order = written(k, self.write), (~self.write).int().argsort(dim=1, stable=True)
            k, v = (x.take_along_dim(order[..., None, None], 1) for x in (k, v))
            zero = torch.zeros(batch, dtype=torch.int64, device=k.device)
            place = written_before(zero, self.write, None, length)
        products = torch.einsum("bsgv,bsgp->gvpbs", v, k)
        sums = _convolved(products, _kernel(factors, length, causal=self.causal))
        if place is not None:
            sums = sums.take_along_dim(place[None, None, None], -1)
        return (torch.einsum("btrgp,gvpbt->btrgv", q, sums) + own).flatten(1, 2)


def written(x: Tensor, write: Tensor | None) -> Tensor:
    """x `[B, S, G, *]` with zeros for masked tokens, which may hold garbage, too bad even to be multiplied by 0."""
    return x if write is None else torch.where(write[..., None, None], x, 0.0)


def _spread(x: Tensor, place: int, group: int) -> Tensor:
    """`[B, S, ...]` as `[B, S * group, ...]`: every token at one place of its group, else 0."""
    zero = torch.zeros_like(x)
    return torch.stack([x if index == place else zero for index in range(group)], 2).flatten(1, 2)


def _kernel(factors: Tensor, length: int, *, causal: bool) -> Tensor:
    """c as a circular kernel of 2 T entries, `[G, 2 T]`: distance n at place n mod 2 T."""
    zero = torch.zeros_like(factors[:, :1])
    if causal:
        return torch.cat([zero, factors[:, 1:], zero.expand(-1, length)], -1)
    past, future = factors[:, length - 1 :], factors[:, : length - 1]
    return torch.cat([past, zero, future], -1)


def _convolved(x: Tensor, kernel: Tensor) -> Tensor:
    """x `[G, V, P, B, T]` convolved over T with kernels `[G, 2 T]`, in float64, because rounding errors are shares of
    what all tokens sum to, beside which the first sums are small; what rounding leaves of a sum that is 0 is 0, because
    a normaliser has to tell."""
    length, dtype = x.shape[-1], x.dtype
    x, kernel = x.double(), kernel[:, None, None, None].double()
    spectrum = torch.fft.rfft(x, n=2 * length) * torch.fft.rfft(kernel)
    sums = torch.fft.irfft(spectrum, n=2 * length)[..., :length]
    # No sum exceeds the product of norms, and three transforms lose less than this share of it.
    share = 4 * torch.finfo(x.dtype).eps * math.log2(4 * length)
    noise = share * x.norm(dim=-1, keepdim=True) * kernel.norm(dim=-1, keepdim=True)
    return (sums - torch.where(sums.abs() <= noise, sums, 0.0).detach()).to(dtype)
