"""Attention layers for tests, a memory simple enough to follow by hand, and their reference."""

import torch
from torch import nn

from hecate.nn import Composed, Memory, SlidingAttention
from tests.nn.layers import inputs as narrow
from tests.nn.layers import seeded, shaken
from tests.reference.attention import Attention, Hebbian

D_MODEL, HEADS = 16, 2


def inputs(batch=2, length=9, *, seed=2):
    return narrow(batch, length, seed=seed, width=D_MODEL)


def sliding_of(window=5, *, seed=0, shake=0.3, **options):
    return shaken(SlidingAttention(D_MODEL, HEADS, window=window, generator=seeded(seed), **options), shake=shake)


class HebbianLayer(nn.Module):
    """The reference's memory as a layer; its state is the memory itself."""

    d_model = D_MODEL

    def __init__(self, seed=3):
        super().__init__()
        draws = torch.randn(3, D_MODEL, D_MODEL, generator=seeded(seed)) / D_MODEL**0.5
        self.q, self.k, self.v = (nn.Parameter(draw) for draw in draws)

    def forward(self, x, state=None, *, write_mask=None, reset_mask=None):
        memory, ys = x.new_zeros(len(x), D_MODEL, D_MODEL) if state is None else state, []
        for t, token in enumerate(x.unbind(1)):
            if reset_mask is not None:
                memory = torch.where(reset_mask[:, t, None, None], 0.0, memory)
            added = 0.9 * memory + torch.einsum("bi,bj->bij", token @ self.v.mT, token @ self.k.mT)
            if write_mask is not None:
                added = torch.where(write_mask[:, t, None, None], added, memory)
            memory = added
            ys.append(torch.einsum("bij,bj->bi", memory, token @ self.q.mT))
        return torch.stack(ys, 1) if ys else x, memory


CONFIGS = {
    "mag": {"kind": "mag", "window": 5},
    "mag_paper": {"kind": "mag", "window": 5, "persistent": 2, "gate": "paper"},
    "mag_add": {"kind": "mag", "gate": "add", "kv_heads": 1},
    "mal": {"kind": "mal", "window": 5, "persistent": 2},
    "mal_paper": {"kind": "mal", "window": 3, "gate": "paper"},
    "mac": {"kind": "mac", "segment": 4, "persistent": 2},
    "mac_add": {"kind": "mac", "segment": 3, "gate": "add", "rotary": False},
    "mac_paper": {"kind": "mac", "segment": 5, "gate": "paper", "qk_norm": "none"},
    "attention": {"kind": "attention", "window": 5, "persistent": 1},
}


def composed_of(name, memory=None, *, seed=0, shake=0.3):
    """A layer of `CONFIGS` around a memory, by default nn.Memory with its convolution."""
    config = CONFIGS[name]
    if memory is None and config["kind"] != "attention":
        rule = {"retention": "decay", "key_norm": "l2"}
        memory = Memory(D_MODEL, 2, rule, generator=seeded(seed + 5))
    return shaken(Composed(D_MODEL, HEADS, config, memory, generator=seeded(seed)), shake=shake)


def reference_of(layer):
    """The reference of a `SlidingAttention`."""
    return Attention(
        dict(layer.named_parameters()), layer.heads, layer.kv_heads, rotary=layer.rotary, norm=layer.qk_norm == "rms"
    )


def hebbian_of(layer):
    return Hebbian(layer.q, layer.k, layer.v)


def masks_of(batch, length, *, seed=7, write=0.7, reset=0.1):
    generator = seeded(seed)
    return {
        "write_mask": torch.rand(batch, length, generator=generator) < write,
        "reset_mask": torch.rand(batch, length, generator=generator) < reset,
    }
