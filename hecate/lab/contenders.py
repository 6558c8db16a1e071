"""The optimisers that are compared, what each costs, and what phi makes of a gradient of zero."""

from __future__ import annotations

import time
import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import SGD, AdamW, Optimizer

from hecate.errors import ConfigError
from hecate.lab.descents import CONTEXT, text_loss, text_model
from hecate.optim import M3, DeepMomentum, DeltaMomentum, KernelMomentum, Muon, PhiMomentum
from hecate.phi import FeatureMap

WAVE = {"kind": "random_fourier", "d_phi": 256}
KEPT: dict[str, Any] = {"momentum": 0.9, "on_nonfinite": "propagate"}  # a lost run shall show
FORMS: dict[str, dict[str, Any]] = {
    "literal": {"center": False, "odd": False},
    "centred": {"center": True, "odd": False},
    "odd": {"center": True, "odd": True},
}
NEEDED: dict[str, dict[str, Any]] = {  # fields without a default
    "compose": {"maps": ["tanh", "exp"]},
    "concat": {"maps": ["elu", "tanh"]},
    "hadamard": {"d_phi": 8},
    "linear": {"d_phi": 8},
    "mlp": {"d_hidden": 8},
    "normalise": {"inner": "exp"},
    "nystrom": {"num_centres": 4},
    "odd_lift": {"inner": "elu"},
    "polynomial": {"degree": 2},
    "polysketch": {"sketch": 8},
    "random_fourier": {"d_phi": 64},
    "random_maclaurin": {"d_phi": 64},
    "sorf": {"d_phi": 64},
    "t2r": {"d_phi": 8},
    "tensor_product": {"maps": ["elu", "tanh"]},
}


class Entrant(NamedTuple):
    """An optimiser but for its learning rate."""

    name: str
    kind: type[Optimizer]
    options: Mapping[str, Any]

    @property
    def is_memory(self) -> bool:
        """Whether it is of this package."""
        return not self.kind.__module__.startswith("torch.")

    def make(self, groups: list[dict[str, Any]]) -> Optimizer:
        """The optimiser of these groups."""
        return self.kind(groups, **self.options)


def _phi(name: str, feature_map: Any, **options: Any) -> Entrant:
    return Entrant(f"phi {name}", PhiMomentum, {**KEPT, "feature_map": feature_map, **options})


def _delta(reading: str) -> Entrant:
    return Entrant(f"delta {reading}", DeltaMomentum, {**KEPT, "erase": "lr", "reading": reading})


def _kernel(name: str, feature_map: Any) -> Entrant:
    options = {**KEPT, "feature_map": feature_map, "keys": "rows"}
    return Entrant(f"kernel {name}", KernelMomentum, options)


_STILL = {"momentum": 0.9, "weight_decay": 0.0}
ENTRANTS = (
    Entrant("SGD with momentum (torch)", SGD, {"momentum": 0.9}),
    Entrant("AdamW (torch)", AdamW, {"weight_decay": 0.0}),
    Entrant("Muon (torch)", torch.optim.Muon, _STILL),
    _phi("identity", "identity"),
    _phi("tanh", "tanh"),
    _phi("elu centred", "elu"),
    _phi("random Fourier pinv", WAVE, lift="pinv", input_scale="unit"),
    _phi("polynomial vjp", {"kind": "polynomial", "degree": 2}, lift="vjp", input_scale="unit"),
    _kernel("identity", "identity"),
    _kernel("random Fourier", WAVE),
    _delta("matrix"),
    _delta("scalar"),
    Entrant("deep", DeepMomentum, KEPT),
    Entrant("M3", M3, KEPT),
    Entrant("Muon", Muon, {**KEPT, **_STILL}),
)


def _stepped(entrant: Entrant) -> Optimizer:
    """The optimiser of a text model after one step."""
    params = text_model(0)
    g = torch.Generator().manual_seed(0)
    tokens, target = (torch.randint(256, s, generator=g) for s in ((128, CONTEXT), (128,)))
    text_loss(params, (tokens, target)).backward()
    optimizer = entrant.make([{"params": params, "lr": 1e-3}])
    optimizer.step()
    return optimizer


def state_bytes(entrant: Entrant) -> float:
    """Bytes of state per parameter of the text model."""
    optimizer = _stepped(entrant)
    held = [x for state in optimizer.state.values() for x in state.values()]
    size = sum(x.numel() * x.element_size() for x in held if isinstance(x, Tensor))
    return size / sum(p.numel() for group in optimizer.param_groups for p in group["params"])


def costs(steps: int = 10, repeats: int = 3) -> list[tuple[str, str]]:
    """CPU time of a step on the text model's matrices, over that of SGD with momentum.

    It differs from run to run, and so is printed, not filed.
    """
    times = []
    for entrant in ENTRANTS:
        optimizer, tries = _stepped(entrant), []
        for _ in range(repeats):
            start = time.process_time()
            for _ in range(steps):
                optimizer.step()
            tries.append(time.process_time() - start)
        times.append(max(min(tries), 1e-9))
    return [(e.name, f"{t / times[0]:.1f}") for e, t in zip(ENTRANTS, times, strict=True)]


def zero_gradient() -> dict[str, dict[str, float | str]]:
    """By kind of phi and form: how far PhiMomentum moves weights at gradient 0 in a step, over lr.

    Or why it refuses. The lift is the one that it chooses by itself.
    """
    found: dict[str, dict[str, float | str]] = {}
    for kind, variant in FeatureMap.variants().items():
        if variant.__module__.startswith("hecate."):
            found[kind] = {form: _moved(kind, options) for form, options in FORMS.items()}
    return found


def _moved(kind: str, options: Mapping[str, Any]) -> float | str:
    weights = torch.ones(3, 4, dtype=torch.float64)
    weights.grad = torch.zeros_like(weights)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the literal form moves weights is the question
        try:
            feature_map = FeatureMap.model_validate({"kind": kind, **NEEDED.get(kind, {})})
            optimizer = PhiMomentum([weights], 1.0, 0.9, feature_map, **options)
        except ConfigError as error:
            return str(error)
        optimizer.step()
    return float((weights - 1).abs().max())
