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


def heads_of(x, weight, heads):
    return (x @ weight.mT).reshape(len(x), heads, -1)


def attention(w, x, seen, heads, kv_heads, phi=elu1, *, eps=0.0, normalised=True):
    """The layer's output and its weights `[H, T, S]`; phi may depend on the key head."""
    width = w["query.weight"].shape[0] // heads
    q = heads_of(x, w["query.weight"], heads)
    k = heads_of(x, w["key_value.weight"][: kv_heads * width], kv_heads)
    v = heads_of(x, w["key_value.weight"][kv_heads * width :], kv_heads)
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
    return torch.cat(answers, -1) @ w["out.weight"].mT, torch.stack(weights)


def rms(x, weight):
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight


def transformer(w, x, write, reset, *, layers, heads, kv_heads, causal, eps=0.0):
    """Outputs `[T, hidden]` of one sequence `[T, embed]`."""
    seen = who_sees_whom(write, reset, causal)
    h = x @ w["project.weight"].mT
    for index in range(layers):
        own = {
            name.removeprefix(f"layers.{index}."): value
            for name, value in w.items()
            if name.startswith(f"layers.{index}.")
        }
        inner = {n.removeprefix("attention."): t for n, t in own.items() if "attention" in n}
        h = h + attention(inner, rms(h, own["norm.weight"]), seen, heads, kv_heads, eps=eps)[0]
        if "mlp.up.weight" in own:
            gate, value = (rms(h, own["mlp.norm.weight"]) @ own["mlp.up.weight"].mT).chunk(2, -1)
            h = h + (gate / (1 + (-gate).exp()) * value) @ own["mlp.down.weight"].mT
    return rms(h, w["norm.weight"])
