"""What a feature map costs per token, and its hand-written derivative against autograd's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from hecate import phi
from studies.costs.cases import WIDTH
from studies.costs.harness import Row, Size, compare, forward_backward, timed

TOKENS = 4096


def maps(size: Size) -> Iterator[Row]:
    """Each map: forward, and forward with `vjp`, relative to autograd through the same formula."""
    tokens = size.short(TOKENS)
    x = torch.randn(tokens, WIDTH, generator=torch.Generator().manual_seed(0), dtype=torch.float32)
    chosen: list[tuple[phi.FeatureMap, Tensor]] = []
    for feature_map in _instances():
        # Widths of second order grow with the square: such maps are used on narrow keys.
        narrow = feature_map.output_dim(WIDTH) > 1000
        chosen.append((feature_map, 0.5 * x[:, : 16 if narrow else WIDTH].contiguous()))
    for feature_map, keys in chosen:
        yield _derivative(feature_map, keys, size)
    for feature_map, keys in chosen:
        yield _price(feature_map, keys, x, size)


def _instances() -> list[phi.FeatureMap]:
    """Every map of the library; those that need arguments get typical ones."""
    arguments = {
        "compose": {"maps": (phi.Linear(d_phi=WIDTH), phi.ELU())},
        "concat": {"maps": (phi.ELU(), phi.ReLU())},
        "glu": {"d_hidden": 2 * WIDTH},
        "linear": {"d_phi": WIDTH},
        "mlp": {"d_hidden": WIDTH},
        "normalise": {"inner": phi.ELU()},
        "odd_lift": {"inner": phi.ELU()},
        "nystrom": {"num_centres": 2 * WIDTH},
        "polynomial": {"degree": 2},
        "polysketch": {"sketch": 16},
        "random_fourier": {"d_phi": 2 * WIDTH},
        "slay": {"nodes": 4, "m": 2},
        "tensor_product": {"maps": (phi.Linear(d_phi=8), phi.Linear(d_phi=8))},
    }
    known = phi.FeatureMap.variants().items()
    return [
        variant(**arguments.get(kind, _width(variant)))
        for kind, variant in known
        if variant.__module__.startswith("hecate.")
    ]


def _width(variant: type[phi.FeatureMap]) -> dict[str, int]:
    names = [name for name, field in variant.model_fields.items() if field.is_required()]
    return {name: 2 * WIDTH for name in names if name == "d_phi"}


def _label(feature_map: phi.FeatureMap, keys: Tensor) -> str:
    width = keys.shape[-1]
    return f"{feature_map.kind}, {width} -> {feature_map.output_dim(width)}"


def _params(feature_map: phi.FeatureMap, keys: Tensor) -> phi.Params:
    params = feature_map.init(keys.shape[-1])
    if feature_map.needs_position:
        params["position"] = (torch.arange(keys.shape[0]) % 512).unsqueeze(1)
    return params


def _derivative(feature_map: phi.FeatureMap, keys: Tensor, size: Size) -> Row:
    params = _params(feature_map, keys)
    names = tuple(params["learned"])

    def with_learned(tensors: tuple[Tensor, ...]) -> phi.Params:
        return {**params, "learned": dict(zip(names, tensors, strict=True))}

    class ByHand(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, *learned: Tensor) -> Tensor:
            features, ctx.residuals = feature_map.forward(x, with_learned(learned))
            return features.detach()  # which may be a residual: no cycle

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> tuple[Tensor, ...]:
            gx, glearned = feature_map.vjp(ctx.residuals, g)
            return gx, *(glearned[name] for name in names)

    return compare(
        "phi",
        f"vjp of {_label(feature_map, keys)}",
        ByHand.apply,
        "autograd through the same forward",
        lambda x, *learned: feature_map(x, with_learned(learned)),
        [keys.unsqueeze(1), *params["learned"].values()],  # tokens of one head
        repeats=size.repeats,
        directions="b",
        tolerance=1e-4,
    )


def _price(feature_map: phi.FeatureMap, keys: Tensor, x: Tensor, size: Size) -> Row:
    params = _params(feature_map, keys)
    ours, plain = keys.unsqueeze(1), x.unsqueeze(1)

    def features(x: Tensor) -> Tensor:
        return feature_map(x, params)

    with torch.no_grad():
        alone = timed(lambda: features(ours), lambda: torch.relu(plain), size.repeats)
    trained = timed(forward_backward(features, [ours]), forward_backward(torch.relu, [plain]), size.repeats)
    each = 1e6 / len(keys)
    return Row(
        "phi",
        f"phi {_label(feature_map, keys)}",
        f"torch.relu of {WIDTH} features",
        forward=alone,
        both=trained,
        note=f"{each * alone.ours:.0f} and {each * trained.ours:.0f} ns per token",
    )
