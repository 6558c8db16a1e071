"""Attention and its compositions with a memory, token by token for one sequence, in float64."""

from typing import Any, NamedTuple

import torch


class Mixed(NamedTuple):
    """A token, and what its convolution makes of the projections of it and those before it."""

    x: Any
    q: Any
    kv: Any


def turned(x, steps, base=10_000.0):
    """The first half of the last axis as complex numbers, each turned by its own speed."""
    pairs = x.shape[-1] // 4
    z = torch.complex(x[..., :pairs], x[..., pairs : 2 * pairs])
    angle = torch.tensor([steps * base ** (-i / pairs) for i in range(pairs)], dtype=torch.float64)
    z = z * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([z.real, z.imag, x[..., 2 * pairs :]], -1)


class Attention:
    """softmax(q.k / sqrt(D)) v, one query at a time, over an explicit list of inputs."""

    def __init__(self, weights, heads, kv_heads, *, rotary, norm):
        self.w, self.heads, self.kv_heads = weights, heads, kv_heads
        self.rotary, self.norm = rotary, norm

    def _unit(self, x):
        return x / (x.square().mean(-1, keepdim=True) + 1e-12).sqrt() if self.norm else x

    def mixed(self, xs, write, reset):
        """All tokens of a row behind the convolution, tap by tap: silu(sum_j w_j x_(t-j)) over the document, where a
        masked token is zero to those after it."""
        taps = self.w["conv.weight"]
        rows = [torch.cat([self.w["query.weight"] @ x, self.w["key_value.weight"] @ x]) for x in xs]
        found, first = [], 0
        for t, x in enumerate(xs):
            first = t if reset[t] else first
            total = taps[0] * rows[t]
            for j in range(1, min(len(taps), t - first + 1)):
                total = total + taps[j] * rows[t - j] * float(write[t - j])
            total = total / (1 + (-total).exp())
            found.append(Mixed(x, total[: len(x)], total[len(x) :]))
        return found

    def __call__(self, x, seen):
        """The answer to x over (input, places behind the query) pairs; no place: persistent."""
        given = x if isinstance(x, Mixed) else Mixed(x, self.w["query.weight"] @ x, None)
        x = given.x
        width = len(x) // self.heads
        q = self._unit(given.q.reshape(self.heads, width))
        if self.norm:
            q = q * self.w["gain"]
        answers = []
        both = [(s.kv if isinstance(s, Mixed) else self.w["key_value.weight"] @ s).chunk(2) for s, _ in seen]
        for head in range(self.heads):
            own = head // (self.heads // self.kv_heads)
            scores, values = [], []
            for (k, v), (_, behind) in zip(both, seen, strict=True):
                k = self._unit(k.reshape(self.kv_heads, width)[own])
                if self.rotary and behind is not None:
                    k = turned(k, -behind)
                if self.rotary and behind is None:
                    k = torch.cat([torch.zeros(width // 2), k[width // 2 :]])
                scores.append(q[head] @ k / width**0.5)
                values.append(v.reshape(self.kv_heads, width)[own])
            if not scores:
                answers.append(torch.zeros(width))
                continue
            weight = torch.stack(scores).exp()
            answers.append((weight / weight.sum()) @ torch.stack(values))
        y = torch.stack(answers)
        if "norm" in self.w:
            gate = self.w["output_gate.weight"] @ x
            y = y / (y.square().mean(-1, keepdim=True) + 1e-6).sqrt() * self.w["norm"]
            y = y * (gate / (1 + (-gate).exp())).reshape(y.shape)
        return self.w["out.weight"] @ y.flatten()

    @property
    def persistent(self):
        return [(token, None) for token in self.w.get("tokens", [])]


def sliding(attention, xs, window, write, reset):
    """Every token over persistent tokens and the last `window` places, masked tokens aside."""
    ys, before = [], []
    for t, x in enumerate(attention.mixed(xs, write, reset) if "conv.weight" in attention.w else xs):
        before = [] if reset[t] else before
        reach = before[len(before) - (window - 1) :] if window and len(before) >= window else before
        seen = [(other, len(reach) - i) for i, other in enumerate(reach)]
        if write[t]:
            seen.append((x, 0))
            before = [*before, x]
        ys.append(attention(x, attention.persistent + seen))
    return torch.stack(ys)


class Hebbian:
    """M <- 0.9 M + (V x)(K x)^T, asked with Q x after the write."""

    def __init__(self, q, k, v):
        self.q, self.k, self.v = q, k, v

    @property
    def start(self):
        return torch.zeros(len(self.v), len(self.k))

    def write(self, memory, x):
        return 0.9 * memory + torch.outer(self.v @ x, self.k @ x)

    def read(self, memory, x):
        return memory @ (self.q @ x)

    def run(self, xs, write, reset):
        memory, ys = self.start, []
        for t, x in enumerate(xs):
            memory = self.start if reset[t] else memory
            memory = self.write(memory, x) if write[t] else memory
            ys.append(self.read(memory, x))
        return torch.stack(ys)


def gate(kind, weight, carrier, answer):
    def rms(x):
        return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()

    if kind == "multiply":
        return carrier * (1 + (weight[0] * answer).tanh())
    if kind == "add":
        return carrier + weight[0] * answer
    if kind == "paper":
        return rms(carrier) * weight[0] / (1 + (-rms(answer) * weight[1]).exp())
    return answer


def mac(attention, memory, kind, weight, xs, segment, write, reset):
    """h from the memory at the segment's start, attention over what came, write and read."""
    ys, now = [], memory.start
    start, before = now, []
    for t, x in enumerate(xs):
        if reset[t]:
            now, before = memory.start, []
            start = now
        h = memory.read(start, x)
        own = [*before, (h, x)] if write[t] else before
        place = len(before)
        seen = [(item, place - i) for i, pair in enumerate(own) for item in pair]
        a = attention(x, attention.persistent + seen)
        if write[t]:
            now, before = memory.write(now, a), own
        ys.append(gate(kind, weight, a, memory.read(now, a)))
        if len(before) == segment:
            start, before = now, []
    return torch.stack(ys)
