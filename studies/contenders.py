"""The optimisers that are compared, what each costs, and what phi makes of a gradient of zero."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import SGD, AdamW, Optimizer

from hecate.errors import ConfigError
from hecate.optim import M3, DeepMomentum, DeltaMomentum, KernelMomentum, Muon, PhiMomentum
from hecate.optim.lift import choose
from hecate.phi import FeatureMap
from studies.lessons import BYTES, CONTEXT, text_loss, text_model
from studies.timing import cpu_times

ROUNDING = 1e-9  # updates of a gradient of zero below this are rounding
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
    "glu": {"d_hidden": 64},
    "linear": {"d_phi": 64},
    "mlp": {"d_hidden": 8},
    "normalise": {"inner": "exp"},
    "nystrom": {"num_centres": 16},
    "odd_lift": {"inner": "elu"},
    "polynomial": {"degree": 2},
    "polysketch": {"sketch": 8},
    "random_fourier": {"d_phi": 256},
    "random_maclaurin": {"d_phi": 64},
    "slay": {"nodes": 4, "m": 1},
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
        with warnings.catch_warnings():
            # Learning rates are chosen by trying them, large ones too.
            warnings.filterwarnings("ignore", "lift 'pinv' misses")
            return self.kind(groups, **self.options)


def maps() -> dict[str, FeatureMap]:
    """Every feature map of the library by kind, with fields that suit gradients."""
    found = FeatureMap.variants().items()
    ours = sorted(kind for kind, variant in found if variant.__module__.startswith("hecate."))
    return {k: FeatureMap.model_validate({"kind": k, **NEEDED.get(k, {})}) for k in ours}


def _phi(kind: str, feature_map: FeatureMap) -> Entrant:
    """The lift is the one that PhiMomentum chooses; what takes whole rows gets them at length 1."""
    scale = "none" if feature_map.traits().componentwise else "unit"
    options = {**KEPT, "feature_map": feature_map, "input_scale": scale, "max_decode_error": 1.0}
    return Entrant(f"phi {kind}", PhiMomentum, options)


def _scaled(kind: str, scale: str) -> Entrant:
    """A map of numbers with rows at one length: beside it without, what the scale does and what phi does."""
    options = {**KEPT, "feature_map": maps()[kind], "input_scale": scale}
    return Entrant(f"{scale} {kind}", PhiMomentum, options)


def _delta(reading: str) -> Entrant:
    return Entrant(f"delta {reading}", DeltaMomentum, {**KEPT, "erase": "lr", "reading": reading})


def _kernel(name: str, feature_map: Any) -> Entrant:
    options = {**KEPT, "feature_map": feature_map, "keys": "rows"}
    return Entrant(f"kernel {name}", KernelMomentum, options)


SCALED = (("identity", "unit"), ("identity", "rms"), ("tanh", "rms"), ("odd_lift", "rms"))
_STILL = {"momentum": 0.9, "weight_decay": 0.0}
ENTRANTS = (
    Entrant("SGD with momentum (torch)", SGD, {"momentum": 0.9}),
    Entrant("AdamW (torch)", AdamW, {"weight_decay": 0.0}),
    Entrant("Muon (torch)", torch.optim.Muon, _STILL),
    *(_phi(kind, phi) for kind, phi in maps().items() if not phi.needs_position),
    *(_scaled(*each) for each in SCALED),
    _kernel("identity", "identity"),
    _kernel("random_fourier", {"kind": "random_fourier", "d_phi": 256}),
    _delta("matrix"),
    _delta("scalar"),
    Entrant("deep", DeepMomentum, KEPT),
    Entrant("M3", M3, KEPT),
    Entrant("Muon", Muon, {**KEPT, **_STILL}),
)

QUICK = {
    *(entrant.name for entrant in ENTRANTS if not entrant.is_memory),
    "phi identity", "phi tanh", "phi polynomial", "phi random_fourier", "delta scalar", "deep",
}  # fmt: skip


def _stepped(entrant: Entrant) -> Optimizer:
    """The optimiser of a text model after one step."""
    params = text_model(0)
    g = torch.Generator().manual_seed(0)
    tokens, target = (torch.randint(BYTES, s, generator=g) for s in ((128, CONTEXT), (128,)))
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


def costs(entrants: Sequence[Entrant], rounds: int = 3) -> list[float]:
    """CPU time of a step on the text model's matrices, over that of the first."""
    times = cpu_times({entrant.name: _stepped(entrant).step for entrant in entrants}, rounds)
    least = [float(taken.min()) for taken in times.values()]
    return [t / least[0] for t in least]


class AtZero(NamedTuple):
    """What PhiMomentum, with the lift it chooses, makes of a gradient of zero."""

    kind: str
    lift: str
    value: float | None  # the largest feature of zero
    moved: dict[str, float | str]  # by form: how far weights move in a step, over lr; or a refusal

    @property
    def verdict(self) -> str:
        """Whether the literal form moves weights, and if not, why it cannot."""
        literal = self.moved["literal"]
        if self.value is None or isinstance(literal, str):
            return "refused"
        if literal > ROUNDING:
            return "moves"
        still = "phi(0) = 0" if self.value <= ROUNDING else "the lift takes phi(0) to 0"
        return f"cannot: {still}"


def zero_gradient() -> list[AtZero]:
    """Every phi of the library in every form."""
    return [_at_zero(kind, phi) for kind, phi in maps().items()]


def _at_zero(kind: str, phi: FeatureMap) -> AtZero:
    moved = {form: _moved(phi, options) for form, options in FORMS.items()}
    if phi.needs_position:
        return AtZero(kind, "none", None, moved)
    params = phi.init(4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    with torch.no_grad():
        value = phi(torch.zeros(1, 4, dtype=torch.float64), params).abs().max()
    return AtZero(kind, choose(phi), float(value), moved)


def _moved(phi: FeatureMap, options: Mapping[str, Any]) -> float | str:
    weights = torch.ones(3, 4, dtype=torch.float64)
    weights.grad = torch.zeros_like(weights)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the literal form moves weights is the question
        try:
            optimizer = PhiMomentum([weights], 1.0, 0.9, phi, **options)
        except ConfigError as error:
            return str(error)
        optimizer.step()
    return float((weights - 1).abs().max())
