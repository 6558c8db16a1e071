"""Layers that answer by attention over a bounded number of slots."""

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, silu

from tests.reference.layers.parts import Layer, Weights, out, outer, qkv, scaled
from tests.reference.layers.sums import turned


def gsa(x: Tensor, w: Weights) -> Tensor:
    """Gated Slot Attention (arXiv 2409.07146), by the released layer: SiLU of q, k and v, every slot keeps
    sigmoid(W x)^(1/8), the rest of it is written, scores are not scaled."""
    q, k, v = (silu(item) for item in qkv(x, w, active=False))
    kept = torch.exp(logsigmoid(slot_logits(x, w)) / 8)
    y = attended(x, w, q, k, v, kept, 1 - kept)
    return out(x, silu(y) if "answers" in w.published else y, w)


def abc(x: Tensor, w: Weights) -> Tensor:
    """ABC (arXiv 2110.02488), by the released layer: every slot is the mean weighed by exp(W x), linear q, k and v,
    turned by their position (`turned`)."""
    q, k, v = qkv(x, w, active=False)
    if "turned" in w.published:
        q, k = turned(q), turned(k)
    weight = torch.exp(slot_logits(x, w).clamp(-32, 32))
    total = weight.cumsum(1)
    kept = torch.cat([torch.ones_like(total[:, :1]), total[:, :-1] / total[:, 1:]], 1)
    return out(x, attended(x, w, q / q.shape[-1] ** 0.5, k, v, kept, weight / total), w)


def slot_logits(x: Tensor, w: Weights) -> Tensor:
    return torch.einsum("btd,hsd->bths", x, w["slots.weight"])


def attended(x: Tensor, w: Weights, q: Tensor, k: Tensor, v: Tensor, kept: Tensor, code: Tensor) -> Tensor:
    """K <- K diag(kept) + k s^T, V alike, y = V softmax(K^T q); V starts at the layer's weights, K at 0."""
    keys, values, ys = torch.zeros_like(outer(k[:, 0], code[:, 0])), w["initial.weight"].expand(len(x), -1, -1, -1), []
    for t in range(x.shape[1]):
        keys = scaled(keys, kept[:, t]) + outer(k[:, t], code[:, t])
        values = scaled(values, kept[:, t]) + outer(v[:, t], code[:, t])
        share = torch.softmax(torch.einsum("bhps,bhp->bhs", keys, q[:, t]), -1)
        ys.append(torch.einsum("bhvs,bhs->bhv", values, share))
    return torch.stack(ys, 1)


LAYERS: dict[str, Layer] = {"gsa": gsa, "abc": abc}
