"""Linear attention and its transformer with every weight formed, one sequence, one head at a time.

Plain torch on named weights, so that its gradients are a reference too: O(N^2), no sums of keys.
"""

import torch


def elu1(x):
    return torch.where(x > 0, x + 1, x.clamp(max=0).exp())


def who_sees_whom(write, reset, causal):
    """`[T, T]` bool: query t sees the written tokens of its document, causal: up to itself."""
    document = reset.long().cumsum(0)
    seen = (document[:, None] == document[None, :]) & write[None, :]
    places = torch.arange(len(write))
    return seen & (places[None, :] <= places[:, None]) if causal else seen


def weights_of(phi_q, phi_k, seen, eps=0.0):
    """Rows of phi(q).phi(k) over those seen, divided by their sum; 0 where that is 0."""
    raw = torch.where(seen, phi_q @ phi_k.mT, 0.0)
    total = raw.sum(-1, keepdim=True) + eps
    return torch.where(total > 0, raw / torch.where(total > 0, total, 1.0), 0.0)


def linear(w, name, x):
    y = x @ w[f"{name}.weight"].mT
    return y + w[f"{name}.bias"] if f"{name}.bias" in w else y


def attention(w, x, seen, heads, kv_heads, phi=elu1, *, eps=0.0, normalised=True):
    """The layer's output and its weights `[H, T, S]`; phi may depend on the key head."""
    width = w["query.weight"].shape[0] // heads
    q = linear(w, "query", x).reshape(len(x), heads, -1)
    k, v = (
        part.reshape(len(x), kv_heads, -1) for part in linear(w, "key_value", x).tensor_split([kv_heads * width], -1)
    )
    answers, weights = [], []
    for head in range(heads):
        own = head // (heads // kv_heads)
        features = phi if not isinstance(phi, list) else phi[own]
        phi_q, phi_k = features(q[:, head]), features(k[:, own])
        if normalised:
            weight = weights_of(phi_q, phi_k, seen, eps)
        else:
            weight = torch.where(seen, phi_q @ phi_k.mT, 0.0)
        answers.append(weight @ v[:, own])
        weights.append(weight)
    return linear(w, "out", torch.cat(answers, -1)), torch.stack(weights)


def norm(w, name, x):
    """With a bias layer norm, else the root mean square."""
    if f"{name}.bias" not in w:
        return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * w[f"{name}.weight"]
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() * w[f"{name}.weight"] + w[f"{name}.bias"]


def mlp(w, x):
    """With twice as many rows up as columns down gated by silu, else one layer of gelu."""
    up = linear(w, "up", norm(w, "norm", x))
    if up.shape[-1] == w["down.weight"].shape[-1]:
        return linear(w, "down", up * 0.5 * (1 + torch.erf(up / 2**0.5)))
    gate, value = up.chunk(2, -1)
    return linear(w, "down", gate / (1 + (-gate).exp()) * value)


def transformer(w, x, write, reset, *, layers, heads, kv_heads, causal, eps=0.0):
    """Outputs `[T, hidden]` of one sequence `[T, embed]`."""
    seen = who_sees_whom(write, reset, causal)
    h = linear(w, "project", x)
    for index in range(layers):
        own = {
            name.removeprefix(f"layers.{index}."): value
            for name, value in w.items()
            if name.startswith(f"layers.{index}.")
        }
        inner, hidden = (
            {n.removeprefix(part): t for n, t in own.items() if n.startswith(part)} for part in ("attention.", "mlp.")
        )
        h = h + attention(inner, norm(own, "norm", h), seen, heads, kv_heads, eps=eps)[0]
        if hidden:
            h = h + mlp(hidden, h)
    return norm(w, "norm", h)
