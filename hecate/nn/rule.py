"""What a layer holds for a rule: parameters of phi, gates, starting weights, and a look at whether steps diverge."""

from __future__ import annotations

import math
import warnings
from typing import Any

import torch
from torch import Tensor

from hecate.checks import check_shapes
from hecate.engine import Sequence, to_tokens
from hecate.errors import StabilityWarning
from hecate.nn.conv import QKNorm, normalise_qk
from hecate.nn.gates import GateHeads
from hecate.nn.parameters import FeatureParameters, TensorDict, draw_normal, without_numbers
from hecate.phi import Params
from hecate.rule import MemoryConfig
from hecate.rule.state import slot_shapes
from hecate.tape import execute
from hecate.tape.bridge import without_autocast


class HeldRule(FeatureParameters):
    """A rule and the parameters of its phi, for memories that share them.

    `erases` is how often a write takes the key's direction out of a memory.
    """

    rule: MemoryConfig
    erases = 1

    @property
    def d_phi(self) -> int:
        """The width of phi."""
        return self.rule.feature_map.output_dim(self.phi_width)

    def random_keys(self, count: int, qk_norm: QKNorm) -> tuple[Tensor, Params]:
        """Keys `[count, H, D]` to measure phi at, the same ones every time, and phi's parameters; all in float64."""
        double: Any = {"dtype": torch.float64, "device": "cpu"}
        generator = torch.Generator().manual_seed(0)
        keys = torch.randn(count, self.phi_heads, self.phi_width, generator=generator, **double)
        params: Params = {
            "learned": {name: tensor.detach().to(**double) for name, tensor in self.phi_learned.tensors.items()},
            "frozen": {name: tensor.detach().to(**double) for name, tensor in self.phi_frozen.tensors.items()},
        }
        return normalise_qk(keys, qk_norm), params

    def warn_if_unstable(self, name: str, qk_norm: QKNorm) -> None:
        """Warns the layer's builder, three calls up, if lr |phi(k)|^2 times `erases`, measured on random keys at the lr
        gate's ceiling, allows divergence."""
        rule, algorithm = self.rule, self.rule.algorithm
        # An infinite key diverges wherever a key can.
        if rule.step != "raw" or rule.key_norm != "none" or rule.diverging(math.inf) is None:
            return
        # 256 keys, fewer where phi is wide.
        keys, params = self.random_keys(max(8, min(256, 2**22 // (self.phi_heads * self.d_phi))), qk_norm)
        position = torch.zeros((), dtype=torch.int64, device="cpu") if rule.feature_map.needs_position else None
        with torch.no_grad():
            phi = rule.feature_map(keys, params, position=position)
        largest = rule.diverging(float(phi.square().sum(-1).max()) * self.erases)
        if largest is not None:
            twice = "" if self.erases == 1 else f" times {self.erases} erases"
            warnings.warn(
                f"memory {name!r}: lr * |phi(k)|^2{twice} reaches {largest:.3g} at the ceiling lr={algorithm.lr:g} of "
                f"its gate (feature_map {rule.feature_map.kind!r}, qk_norm {qk_norm!r}, key_norm 'none'), and bias "
                f"{rule.bias.kind!r} may diverge beyond {algorithm.stable_step:g}; set key_norm='l2', "
                "step='normalized' or a lower algorithm.lr",
                StabilityWarning,
                stacklevel=4,
            )

    def draw_answering(self, initial: TensorDict, d_value: int, source: torch.Generator, like: Tensor) -> None:
        """Starting weights of a memory that has to answer before it is written: the structure's own, but N(0, 1/fan_in)
        for a linear one, whose own is zero, where it would answer nothing."""
        structure = self.rule.structure
        if not structure.linear:
            place: dict[str, Any] = {"dtype": like.dtype, "device": like.device, "generator": source}
            initial.copy_(structure.init(self.d_phi, d_value, heads=self.phi_heads, **place))
            return
        for weight in initial.tensors.values():
            draw_normal(weight, 1.0 if structure.diagonal else self.d_phi**-0.5, source)


class RuleParameters(HeldRule):
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
        self.config, self.rule, self.heads, self.d_value = config, config, heads, d_value
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
        self.initial.copy_(self.config.structure.init(self.d_phi, self.d_value, heads=self.heads, **place))


def features_of(
    config: MemoryConfig, q: Tensor, k: Tensor, params: Params, lr: float = 1.0, **given: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """phi(q), phi(k) and lr as a scan computes them, after key_norm, query_scale and step; q, k `[B, T, H, D]`, `given`
    are the fields `write` and `position` of a scan's inputs."""
    dtype = torch.promote_types(k.dtype, config.dtype)
    gate = torch.ones(k.shape[:3], dtype=dtype, device=k.device)
    with without_autocast(k.device.type):
        tokens = to_tokens(config, Sequence(q, k, k, lr * gate, gate, gate, **given), params, dtype, execute)
    return tokens.phi_q, tokens.phi_k, tokens.lr
