"""Linear attention as one weight for every pair of tokens, in torch for its gradients."""

from math import pi

import torch


def counts(write, reset):
    """The number of tokens written before each one, since the last reset, row by row."""
    rows = []
    for w, r in zip(write.tolist(), reset.tolist(), strict=True):
        row, count = [], 0
        for written, starts in zip(w, r, strict=True):
            count = 0 if starts else count
            row.append(count)
            count += int(written)
        rows.append(row)
    return rows


def sees(write, reset, length, causal):
    """Whether query t of a row sees key s."""
    rows = []
    for w, r in zip(write.tolist(), reset.tolist(), strict=True):
        document = [sum(r[: t + 1]) for t in range(len(r))]
        rows.append(
            [
                [w[s] and (s <= t or not causal) and (not any(r) or document[s] == document[t]) for s in range(len(w))]
                for t in range(length)
            ]
        )
    return rows


def elu(x, place):
    return torch.where(x > 0, x + 1, x.exp())


def relu(x, place):
    return x.clamp(min=0)


def identity(x, place):
    return x


def cosformer(largest):
    def phi(x, place):
        angle = torch.tensor(pi * place / (2 * largest))
        return torch.cat([x.clamp(min=0) * angle.cos(), x.clamp(min=0) * angle.sin()])

    return phi


def exponential(weight):
    """exp of a linear map, one matrix per head; x knows its head by `phi.head`."""
    return lambda x, place: (x @ weight).exp()


def rotary(x, place, base=10_000.0):
    """Every pair (c, c + P) as one complex number."""
    pairs = len(x) // 2
    z = torch.complex(x[:pairs], x[pairs : 2 * pairs])
    speed = torch.tensor([base ** (-c / pairs) for c in range(pairs)])
    z = z * torch.polar(torch.ones_like(speed), place * speed)
    return torch.cat([z.real, z.imag, x[2 * pairs :]])


def polar(x, place, base, offset=0.0):
    """Every channel as the length of one complex number."""
    angle = torch.tensor([place * base ** (-c / len(x)) for c in range(len(x))]) + offset
    z = torch.polar(torch.ones_like(angle), angle) * x
    return torch.cat([z.real, z.imag])


def string(column):
    """exp(i (C - C^T)) as a matrix exponential of the whole matrix."""
    size = len(column)

    def turn(x, place):
        index = torch.arange(size)
        circulant = column[(index[:, None] - index[None]) % size]
        return torch.linalg.matrix_exp(place * (circulant - circulant.T)) @ x

    return turn


def table(bias, causal):
    """exp(b) of a distance, b constant beyond the table's ends."""
    largest = len(bias) - 1 if causal else len(bias) // 2

    def factor(distance):
        near = max(-largest, min(largest, distance))
        return bias[near if causal else near + largest].exp()

    return factor


def linear(logit):
    return lambda distance: torch.sigmoid(logit) ** abs(distance)


def attention(
    q, k, v, phi, *, causal, normalised=True, write=None, reset=None, eps=0.0, turn=None, turn_key=None,
    where="before", factor=None,
):  # fmt: skip
    """y `[B, T, H, V]`; phi, turn, turn_key (None: as turn) and factor are lists of one function per key head."""
    turn_key = turn if turn_key is None else turn_key
    batch, length, heads = q.shape[:3]
    keys, groups = k.shape[1:3]
    write = torch.ones(batch, keys, dtype=torch.bool) if write is None else write
    reset = torch.zeros(batch, keys, dtype=torch.bool) if reset is None else reset
    seen, place = sees(write, reset, length, causal), counts(write, reset)
    rows = []
    for b in range(batch):
        for t in range(length):
            for h in range(heads):
                g = h // (heads // groups)

                def feature(x, at, turn=turn, g=g):
                    before = x if turn is None or where != "before" else turn[g](x, at)
                    plain = phi[g](before, at)
                    turned = turn is not None and where == "numerator"
                    return plain, turn[g](plain, at) if turned else plain

                total, weights = torch.zeros(v.shape[-1]), torch.zeros(())
                at = place[b][t] if keys == length else 0
                plain_q, turned_q = feature(q[b, t, h], at)
                for s in range(keys):
                    if not seen[b][t][s]:
                        continue
                    plain_k, turned_k = feature(k[b, s, g], place[b][s], turn_key)
                    scale = 1.0 if factor is None else factor[g](at - place[b][s])
                    total = total + scale * (turned_q @ turned_k) * v[b, s, g]
                    weights = weights + scale * (plain_q @ plain_k)
                weights = weights + eps
                if normalised:
                    dead = float(weights.detach()) <= 0
                    total = torch.zeros_like(total) if dead else total / weights
                rows.append(total)
    if not rows:
        return torch.zeros(batch, length, heads, v.shape[-1])
    return torch.stack(rows).reshape(batch, length, heads, -1)


def of_scores(scores, v, causal):
    """Means `[T, V]` under weights relu(scores) `[T, S]`, row by row; a row without weight gives 0."""
    rows = []
    for t, row in enumerate(scores):
        weights = torch.stack([s.clamp(min=0) if j <= t or not causal else 0 * s for j, s in enumerate(row)])
        total = weights.sum()
        rows.append((weights @ v) / total if total > 0 else 0 * v[0])
    return torch.stack(rows)


def quadratic_relu(q, k, v, *, causal=True):
    """relu(Q K^T) V over its row sums, for one head: q, k `[T, D]`, v `[T, V]`. Every pair has to be visited."""
    return of_scores(q @ k.mT, v, causal)


def additive_relative(q, k, v, bias, *, causal=True):
    """relu(Q K^T + B) V over its row sums, for one head, B[t, s] = bias(t - s): positions as text has them."""
    between = torch.tensor([[float(bias(t - s)) for s in range(len(k))] for t in range(len(q))])
    return of_scores(q @ k.mT + between, v, causal)
