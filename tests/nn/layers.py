"""Small layers for tests, and comparisons of what they return."""

import copy
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from hecate import MemoryConfig
from hecate.nn import LayerState, Memory
from hecate.rule import RULES

D_MODEL, HEADS, D_KEY, D_VALUE = 12, 2, 6, 4

OTHER_RULES: dict[str, dict[str, Any]] = {
    "momentum": {"retention": "decay", "algorithm": "momentum", "bias": "dot"},
    "l2_momentum": {"retention": "decay", "algorithm": "momentum", "key_norm": "l2"},
    "frozen": {"key_norm": "l2", "chunk": 3, "retention": "decay"},
    "commit": {"key_norm": "l2", "chunk": 3, "commit": "chunk", "retention": "decay"},
    "before": {"key_norm": "l2", "read": "before"},
    "normalized": {"step": "normalized", "feature_map": "elu", "normalizer": "sum"},
    "sum": {"feature_map": "elu", "key_norm": "sum", "query_scale": "key_dim"},
    "lp": {"bias": {"kind": "lp", "p": 1.5, "eps": 0.1}, "key_norm": "l2"},
    "huber": {"bias": {"kind": "huber", "delta": 0.7}, "key_norm": "l2"},
    "deep": {"structure": {"kind": "mlp", "expansion": 1}, "algorithm": {"kind": "momentum", "lr": 0.1}, "chunk": 2},
}


def rules() -> dict[str, MemoryConfig]:
    """The rules of the literature and the conventions that they leave out."""
    own = {name: MemoryConfig.model_validate(fields) for name, fields in OTHER_RULES.items()}
    return {**{name: rule.config for name, rule in RULES.items()}, **own}


def own_layers() -> dict[str, MemoryConfig]:
    """Rules in whose layers more happens than in a plain one's; a scan's own laws are checked where rules are."""
    few = ("gated_delta", "kda", "linear_attention", "titans", "ttt_linear", "memora", "omeganet", *OTHER_RULES)
    return {
        name: config
        for name, config in rules().items()
        if name in few or not config.gating.plain or config.writes > 1 or config.readout.kind != "direct"
    }


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def shaken(layer: Any, seed: int = 1, shake: float = 0.3) -> Any:
    """The layer with parameters off their starting values."""
    generator = seeded(seed)
    with torch.no_grad():
        for parameter in layer.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter += shake * noise / parameter.shape[-1] ** 0.5
    return layer


def layer_of(config: Any = None, *, seed: int = 0, shake: float = 0.3, **options: Any) -> Memory:
    """A layer whose parameters are off their starting values, so that no gate is a constant."""
    adds = isinstance(config, MemoryConfig) and getattr(config.structure, "residual", False)
    options = {"d_key": D_KEY, "d_value": D_KEY if adds else D_VALUE, **options}
    return shaken(Memory(D_MODEL, HEADS, config, generator=seeded(seed), **options), seed + 1, shake)


def inputs(batch: int = 2, length: int = 7, *, seed: int = 2, width: int = D_MODEL) -> Tensor:
    return torch.randn(batch, length, width, generator=seeded(seed))


def in_pieces(layer: torch.nn.Module, x: Tensor, cuts: list[int], **masks: Tensor | None) -> tuple[Tensor, Any]:
    """The layer over x cut at the given places, each piece from the state of the last."""
    state, ys = None, []
    borders = [0, *sorted(cuts), x.shape[1]]
    for at, end in pairwise(borders):
        own = {n: None if mask is None else mask[:, at:end] for n, mask in masks.items()}
        y, state = layer(x[:, at:end], state, **own)
        ys.append(y)
    return torch.cat(ys, 1), state


def leaves(tree: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def near(got: Any, expected: Any, tolerance: float = 1e-12, what: str = "") -> None:
    """Trees of tensors agree: the error in norm, relative to the norm of the truth or 1."""
    mine, layout = pytree.tree_flatten(got)
    theirs, expected_layout = pytree.tree_flatten(expected)
    assert layout == expected_layout, what
    for a, b in zip(mine, theirs, strict=True):
        if a is None or b is None:
            assert a is b, what
            continue
        assert a.shape == b.shape, f"{what}: {list(a.shape)} against {list(b.shape)}"
        a, b = a.detach().double(), b.detach().double()
        error, size = float((a - b).norm()), float(b.norm())
        assert error <= tolerance * max(size, 1.0), f"{what}: {error:.2e} against {size:.2e}"


def near_with_slopes(y: Tensor, expected: Tensor, inputs: list[Tensor], slopes: float = 1e-10) -> None:
    """Two outputs agree, and so do their gradients for a random cotangent."""
    near(y, expected, 1e-10)
    probe = torch.randn(y.shape, generator=seeded(4))
    near(*(torch.autograd.grad((item * probe).sum(), inputs) for item in (y, expected)), slopes, "gradients")


def same_memory(got: LayerState, expected: LayerState, tolerance: float = 1e-12) -> None:
    near(got.memory, expected.memory, tolerance, "memory")
    near(got.conv, expected.conv, tolerance, "conv")


def untouched(layer: torch.nn.Module, steps: int = 2, length: int = 7, **options: Any) -> list[str]:
    """Parameters that a layer fresh from its initialisation never gets a gradient for."""
    optimizer = torch.optim.SGD(layer.parameters(), lr=1e-2)
    names = dict.fromkeys(name for name, _ in layer.named_parameters())
    x, target = (inputs(length=length, width=int(layer.d_model), seed=seed) for seed in (4, 5))
    for _ in range(steps):
        optimizer.zero_grad()
        layer(x, **options)[0].sub(target).square().mean().backward()
        for name, parameter in layer.named_parameters():
            if parameter.grad is not None and parameter.grad.norm() > 1e-9:
                names.pop(name, None)
        optimizer.step()
    return list(names)


def drawn_alike(build: Callable[..., Any]) -> Any:
    """The layer of seed 0, after one seed has given one layer, whatever way it was made and whatever torch draws."""
    torch.manual_seed(1)
    before = torch.get_rng_state()
    layer = build()
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    late, loaded, twin = build(device="meta"), build(seed=1), copy.deepcopy(layer)
    assert {item.device.type for item in late.state_dict().values()} == {"meta"}
    late.to_empty(device="cpu").reset_parameters(seeded())
    assert not all(map(torch.equal, leaves(loaded.state_dict()), leaves(layer.state_dict())))
    loaded.load_state_dict(layer.state_dict())
    for other in (build(), late, loaded, twin):
        near(dict(other.state_dict()), dict(layer.state_dict()), 0.0)
    with torch.no_grad():
        for item in leaves(dict(twin.state_dict())):
            item += 1
    narrow = dict(build(dtype=torch.bfloat16).state_dict())
    near(narrow, {name: item.to(narrow[name].dtype) for name, item in layer.state_dict().items()}, 0.0)
    near(dict(build().state_dict()), dict(layer.state_dict()), 0.0)
    return layer
