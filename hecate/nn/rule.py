"""What a layer holds for one memory: gates, parameters of phi, starting weights."""

from __future__ import annotations

import math
import warnings
from typing import Any

import torch
from torch import Tensor

from hecate.errors import StabilityWarning
from hecate.nn.conv import QKNorm, normalise_qk
from hecate.nn.gates import GateHeads
from hecate.nn.parameters import FeatureParameters, TensorDict, draw_normal, without_numbers
from hecate.phi import Params
from hecate.rule import MemoryConfig
from hecate.rule.state import slot_shapes
from hecate.sizes import check_shapes
from hecate.structure import Structure


class RuleParameters(FeatureParameters):
    """The learned side of a `MemoryConfig` for H heads with keys D and values V.

    `gates` come from x `[B, T, d_model]`; `phi_learned` and `phi_frozen` are the feature map's, `initial` the starting
    weights, trained or not.
    """

    def __init__(
        self,
        d_model: int,
        heads: int,
        config: MemoryConfig,
        *,
        d_key: int,
        d_value: int,
        learned_initial: bool,
        firing: bool = False,
        **place: Any,
    ) -> None:
        super().__init__()
        self.config, self.heads, self.d_value = config, heads, d_value
        self.gates = GateHeads(d_model, heads, config, d_key=d_key, firing=firing, **place)
        d_phi = config.feature_map.output_dim(d_key)
        start = config.structure.init(d_phi, d_value, heads=heads, **without_numbers(place["dtype"]))
        weights = {name: tuple(weight.shape[1:]) for name, weight in start.items()}
        slots = slot_shapes(config, weights, d_phi, d_value)
        check_shapes(slots, f"narrow the state of algorithm {config.algorithm.kind!r}", heads)
        self.hold_features(config.feature_map, heads, d_key, **place)
        self.initial = TensorDict(start, learned=learned_initial, **place)

    def draw_rule(self, source: torch.Generator, like: Tensor) -> None:
        """Everything anew from a generator, in the dtype and on the device of `like`."""
        place: dict[str, Any] = {"dtype": like.dtype, "device": like.device, "generator": source}
        self.gates.reset_parameters(source)
        self.draw_features(source, like)
        d_phi = self.config.feature_map.output_dim(self.phi_width)
        self.initial.copy_(self.config.structure.init(d_phi, self.d_value, heads=self.heads, **place))

    def warn_if_unstable(self, name: str, qk_norm: QKNorm) -> None:
        """Measures lr |phi(k)|^2 on random keys at the lr gate's ceiling."""
        warn_if_unstable(self.config, self, name, qk_norm)


def warn_if_unstable(
    config: MemoryConfig, held: FeatureParameters, name: str, qk_norm: QKNorm, erases: int = 1
) -> None:
    """Warns the layer's builder, four calls up, if lr |phi(k)|^2 times `erases`, the times that a write takes the key's
    direction out, allows divergence."""
    # An infinite key diverges wherever a key can.
    if config.step != "raw" or config.key_norm != "none" or config.diverging(math.inf) is None:
        return
    # 256 keys, fewer where phi is wide.
    count = max(8, min(256, 2**22 // (held.phi_heads * config.feature_map.output_dim(held.phi_width))))
    keys, params = random_keys(held, count, qk_norm)
    position = torch.zeros((), dtype=torch.int64, device="cpu") if config.feature_map.needs_position else None
    with torch.no_grad():
        phi = config.feature_map(keys, params, position=position)
    largest = config.diverging(float(phi.square().sum(-1).max()) * erases)
    if largest is not None:
        twice = "" if erases == 1 else f" times {erases} erases"
        warnings.warn(
            f"memory {name!r}: lr * |phi(k)|^2{twice} reaches {largest:.3g} at the ceiling "
            f"lr={config.algorithm.lr:g} of its gate (feature_map {config.feature_map.kind!r}, "
            f"qk_norm {qk_norm!r}, key_norm 'none'), and bias {config.bias.kind!r} may "
            f"diverge beyond {config.algorithm.stable_step:g}; set key_norm='l2', "
            "step='normalized' or a lower algorithm.lr",
            StabilityWarning,
            stacklevel=5,
        )


def random_keys(held: FeatureParameters, count: int, qk_norm: QKNorm) -> tuple[Tensor, Params]:
    """Keys `[count, H, D]` to measure phi at, the same ones every time, and phi's parameters; all in float64."""
    double: Any = {"dtype": torch.float64, "device": "cpu"}
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(count, held.phi_heads, held.phi_width, generator=generator, **double)
    params: Params = {
        "learned": {name: tensor.detach().to(**double) for name, tensor in held.phi_learned.tensors.items()},
        "frozen": {name: tensor.detach().to(**double) for name, tensor in held.phi_frozen.tensors.items()},
    }
    return normalise_qk(keys, qk_norm), params


def draw_answering(
    structure: Structure, initial: TensorDict, d_phi: int, d_value: int, source: torch.Generator, like: Tensor
) -> None:
    """Starting weights of a memory that has to answer before it is written: the structure's own, but N(0, 1/fan_in) for
    a linear one, whose own is zero, where it would answer nothing."""
    weights = initial.tensors
    if not structure.linear:
        place: dict[str, Any] = {"dtype": like.dtype, "device": like.device, "generator": source}
        initial.copy_(structure.init(d_phi, d_value, heads=len(next(iter(weights.values()))), **place))
        return
    fan_in = 1 if structure.diagonal else d_phi
    for weight in weights.values():
        draw_normal(weight, fan_in**-0.5, source)
