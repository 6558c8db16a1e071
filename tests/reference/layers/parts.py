"""What published layers have in common: projections, short convolutions, unit lengths, the way out."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import conv1d, gelu, pad, silu, softplus


class Weights(dict[str, Any]):
    """Tensors by name; `heads`, `config`, the rule's settings as plain numbers; differences that are taken back."""

    def __init__(self, items: dict[str, Any], heads: int, config: dict[str, Any], published: Iterable[str] = ()):
        super().__init__(items)
        self.heads, self.config, self.published = heads, config, frozenset(published)

    def as_published(self, *names: str) -> "Weights":
        return Weights(self, self.heads, self.config, names)


Layer = Callable[[Tensor, Weights], Tensor]


def unit(x: Tensor) -> Tensor:
    return x / torch.sqrt((x * x).sum(-1, keepdim=True) + 1e-12)


def root_mean(x: Tensor, eps: float = 1e-12) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps)


def projected(x: Tensor, w: Weights, name: str, *, active: bool = True) -> Tensor:
    """A projection `[B, T, H, D]` behind its convolution, if it has one, and SiLU where it is `active`."""
    y = x @ w[f"{name}.weight"].mT
    if f"{name}_conv.weight" in w and "conv" not in w.published and f"{name}_conv" not in w.published:
        y = convolved(y, w[f"{name}_conv.weight"])
        y = silu(y) if active else y
    return y.unflatten(-1, (w.heads, -1))


def convolved(x: Tensor, taps: Tensor) -> Tensor:
    """A causal depthwise convolution of x `[B, T, C]`, taps `[C, kernel]`."""
    padded = pad(x.mT, (taps.shape[1] - 1, 0))
    return conv1d(padded, taps.unsqueeze(1), groups=len(taps)).mT


def qkv(x: Tensor, w: Weights, *, active: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v `[B, T, H, D or V]`; values at the length that the config says, but not as published."""
    q, k, v = (projected(x, w, name, active=active) for name in "qkv")
    own = "none" if "values" in w.published else w.config.get("layer_v_norm", "none")
    return q, k, {"none": v, "l2": unit(v), "rms": root_mean(v)}[own]


def logits(x: Tensor, w: Weights, gate: str) -> Tensor:
    """W x + b of a gate, W of low rank or not, b where it has one."""
    inner = x @ w[f"{gate}.down"].mT if f"{gate}.down" in w else x
    weight = w[f"{gate}.weight"]
    made = (inner @ weight.flatten(0, -2).mT).unflatten(-1, weight.shape[:-1])
    return made + w[f"{gate}.bias"] if f"{gate}.bias" in w else made


def sigmoid_gate(x: Tensor, w: Weights, gate: str) -> Tensor:
    return torch.sigmoid(logits(x, w, gate))


def decay(x: Tensor, w: Weights, gate: str = "retain") -> Tensor:
    """exp(-A softplus(W x + b)), A = exp(rate) per head; of channels `[B, T, H, D]` where W has as many rows."""
    s = logits(x, w, gate)
    rate = w[f"{gate}.rate"].exp()
    if s.shape[-1] != w.heads:
        s, rate = s.unflatten(-1, (w.heads, -1)), rate.unsqueeze(-1)
    return torch.exp(-rate * softplus(s))


def lr_gate(x: Tensor, w: Weights) -> Tensor:
    """The ceiling times a sigmoid `[B, T, H]`."""
    return w.config["algorithm"]["lr"] * sigmoid_gate(x, w, "lr")


def start(x: Tensor, w: Weights, name: str = "weight") -> Tensor:
    """The memory before the first token `[B, H, V, P]`."""
    return w[f"initial.{name}"].expand(len(x), *w[f"initial.{name}"].shape)


def scaled(m: Tensor, retain: Tensor) -> Tensor:
    """A memory `[B, H, V, P]` times what a token keeps of it, `[B, H]` or of channels `[B, H, P]`."""
    return m * (retain.unsqueeze(2) if retain.dim() == 3 else retain[..., None, None])


def asked(m: Tensor, q: Tensor) -> Tensor:
    return torch.einsum("bhvp,bhp->bhv", m, q)


def outer(v: Tensor, k: Tensor) -> Tensor:
    return torch.einsum("bhv,bhp->bhvp", v, k)


def out(x: Tensor, y: Tensor, w: Weights, beside: Tensor | None = None) -> Tensor:
    """The norm of every head, the SiLU gate and the projection of answers `[B, T, H, V]`; in their place, as published
    layers have it, no norm (`norm`), one of all heads (`whole_norm`), one about the mean (`layer_norm`); no gate
    (`output_gate`), a sigmoid (`sigmoid_gate`), GELU (`gelu_gate`), or a gate ahead of one norm of all heads
    (`gate_ahead`). What is `beside` is added behind the norm."""
    published, gain = w.published, w["o_norm.weight"]
    gate = x @ w["g.weight"].mT if "g.weight" in w else None
    if "gate_ahead" in published:
        return (root_mean(y.flatten(-2) * silu(gate), 1e-6) * gain.flatten()) @ w["o.weight"].mT
    if "layer_norm" in published:
        y = y - y.mean(-1, keepdim=True)
    if "whole_norm" in published:
        y = root_mean(y.flatten(-2), 1e-6) * gain.flatten()
    else:
        y = (y if "norm" in published else root_mean(y, 1e-6) * gain).flatten(-2)
    y = y if beside is None else y + beside.flatten(-2)
    if gate is not None and "output_gate" not in published:
        act = torch.sigmoid if "sigmoid_gate" in published else gelu if "gelu_gate" in published else silu
        y = y * act(gate)
    return y @ w["o.weight"].mT
