"""Parameters of layers: creation without drawing, draws from an explicit generator, and those of a feature map."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from hecate.checks import check_shapes
from hecate.distributed import overwrite
from hecate.errors import ConfigError, shorten
from hecate.phi import FeatureMap, Params


def source_of(generator: torch.Generator | None) -> torch.Generator:
    """The generator to draw from: the given one, or torch's default."""
    if generator is None:
        return torch.default_generator
    if not isinstance(generator, torch.Generator) or generator.device.type != "cpu":
        place = generator.device if isinstance(generator, torch.Generator) else shorten(generator)
        raise ConfigError(
            "generator must be a torch.Generator on the CPU, where parameters are drawn so that a "
            f"seed gives the same ones on every device, got {place}"
        )
    return generator


def sources_for(names: list[str], generator: torch.Generator | None) -> list[torch.Generator]:
    """A generator for each named part, seeded by its name and one draw, so that no part depends on the others."""
    base = int(torch.randint(2**62, (), generator=source_of(generator), device="cpu"))
    seeds = (hashlib.sha256(f"{base} {name}".encode()).digest()[:8] for name in names)
    return [torch.Generator().manual_seed(int.from_bytes(seed, "big") >> 1) for seed in seeds]


def draw_normal(weight: Tensor, std: float, generator: torch.Generator, mean: Tensor | float = 0.0) -> None:
    """Fills a parameter with N(mean, std^2): one seed, one draw, whatever its dtype and device."""
    draw = torch.randn(weight.shape, generator=generator, dtype=torch.float64, device="cpu")
    overwrite(weight, mean + draw * std)


def without_numbers(dtype: torch.dtype | None) -> dict[str, Any]:
    """Keywords for tensors that have a shape but no values, since nothing is drawn yet: the meta device."""
    return {"dtype": dtype or torch.get_default_dtype(), "device": "meta"}


def blank(layer: type[nn.Module], *sizes: int, device: torch.device | str | None = None, **options: Any) -> Any:
    """A torch layer created without drawing its weights; `ConfigError` if it could not fit into any memory."""
    check_shapes({layer.__name__: sizes}, "lower one of the two widths")
    place = torch.get_default_device() if device is None else device
    # As `nn.utils.skip_init`, whose `to_empty` loads sympy, for half a second, when it is first called.
    module = layer(*sizes, device="meta", **options)
    for name, p in list(module.named_parameters(recurse=False)):
        setattr(module, name, nn.Parameter(torch.empty(p.shape, dtype=p.dtype, device=place)))
    return module


_READ = {"Linear": {"weight", "bias"}, "RMSNorm": {"weight"}}  # parameters that one token reads, by class name


def unheard(*parts: tuple[nn.Module | None, type[nn.Module]]) -> bool:
    """True if each module (or None) runs exactly its class's `forward`: no subclass, hook, patch or parametrisation."""
    for part, kind in parts:
        attributes = {} if part is None else part.__dict__
        if attributes and (type(part) is not kind or attributes["_forward_hooks"] or attributes["_forward_pre_hooks"]):
            return False
        if attributes and (read := _READ.get(kind.__name__)) and not read <= attributes["_parameters"].keys():
            return False  # a computed weight, as of a parametrisation
        if "forward" in attributes or "_compiled_call_impl" in attributes:
            return False
    return not _has_any_global_hook()


def redraw(generator: torch.Generator | None, *layers: nn.Module | None) -> None:
    """Draws layers anew, in the order given: weights of linear layers and embeddings from N(0, 1 / width); norms start
    at one, biases at zero. Layers on the meta device stay as they are."""
    for layer in layers:
        if isinstance(layer, nn.RMSNorm | nn.LayerNorm):
            layer.reset_parameters()
        elif isinstance(layer, nn.Linear | nn.Embedding):
            if layer.weight.is_meta:
                continue
            draw_normal(layer.weight, layer.weight.shape[1] ** -0.5, source_of(generator))
            if isinstance(layer, nn.Linear) and layer.bias is not None:
                overwrite(layer.bias, torch.zeros(layer.bias.shape, device="cpu"))
        elif layer is not None and not isinstance(layer, nn.Dropout):
            layer.reset_parameters(generator)  # type: ignore[operator]


class TensorDict(nn.Module):
    """Named tensors as parameters or as buffers; names may hold dots, which torch forbids."""

    def __init__(self, like: dict[str, Tensor], *, learned: bool, **place: Any) -> None:
        super().__init__()
        self.names = {name: name.replace(".", "__") for name in like}
        for name, tensor in like.items():
            empty = torch.empty(tensor.shape, **place)
            if learned:
                self.register_parameter(self.names[name], nn.Parameter(empty))
            else:
                self.register_buffer(self.names[name], empty)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors by their own names."""
        tensors = {}
        for name, key in self.names.items():  # no comprehension, which is a frame in every call of a layer
            tensors[name] = getattr(self, key)
        return tensors

    def copy_(self, values: dict[str, Tensor]) -> None:
        """Overwrites the tensors."""
        for name, value in values.items():
            overwrite(getattr(self, self.names[name]), value)


class FeatureParameters(nn.Module):
    """The parameters of phi for `heads` heads with keys of width `d_key`: `phi_learned` trained, `phi_frozen`, the
    draws of a random map, as buffers."""

    def hold_features(self, feature_map: FeatureMap, heads: int, d_key: int, **place: Any) -> None:
        """Creates the parameters on a device and in a dtype, without values yet; `draw_features` fills them."""
        self._phi, self.phi_heads, self.phi_width = feature_map, heads, d_key
        params = feature_map.init(d_key, heads=heads, **without_numbers(place["dtype"]))
        self.has_params = bool(params["learned"] or params["frozen"])
        self.phi_learned = TensorDict(params["learned"], learned=True, **place)
        self.phi_frozen = TensorDict(params["frozen"], learned=False, **place)

    def draw_features(self, source: torch.Generator, like: Tensor) -> None:
        """Draws both anew from a generator, in the dtype and on the device of `like`."""
        place: dict[str, Any] = {"dtype": like.dtype, "device": like.device, "generator": source}
        params = self._phi.init(self.phi_width, heads=self.phi_heads, **place)
        self.phi_learned.copy_(params["learned"])
        self.phi_frozen.copy_(params["frozen"])

    @property
    def phi_params(self) -> Params:
        """Parameters of the feature map, as scans take them."""
        if not self.has_params:
            return {"learned": {}, "frozen": {}}
        return {"learned": self.phi_learned.tensors, "frozen": self.phi_frozen.tensors}
