"""`check_feature_map` must find what is wrong: one planted fault per map."""

from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from hecate import phi
from hecate.testing import check_feature_map


class Plain(phi.FeatureMap):
    """plain_of_checks: phi(x) = x per head times a weight, correct in every respect."""

    kind: Literal["plain_of_checks"] = "plain_of_checks"

    def init(self, d, *, heads=1, generator=None, dtype=torch.float32, device=None):
        return {"learned": {"w": torch.ones(heads, d, dtype=dtype)}, "frozen": {}}

    def features(self, x: Tensor, params: phi.Params) -> Tensor:
        return x * self.weight(x, params)

    def weight(self, x: Tensor, params: phi.Params) -> Tensor:
        w = params["learned"]["w"].to(x.dtype)
        return w[0] if w.shape[0] == 1 else w


def _trait(**declared: Any) -> dict[str, Callable]:
    return {"traits": lambda self: phi.Traits(**declared)}


def _of(f: Callable[[Tensor], Tensor], **declared: Any) -> dict[str, Callable]:
    return {"features": lambda self, x, params: self.weight(x, params) * f(x), **_trait(**declared)}


def _frozen_draw(self, d, *, heads=1, generator=None, dtype=torch.float32, device=None):
    fresh = Plain.init(self, d, heads=heads, dtype=dtype)
    return {**fresh, "frozen": {"b": torch.randn(1, d, dtype=dtype, generator=generator)}}


def _global_draw(self, d, *, heads=1, generator=None, dtype=torch.float32, device=None):
    return {"learned": {"w": torch.randn(heads, d, dtype=dtype)}, "frozen": {}}


def _useless(self, d, *, heads=1, generator=None, dtype=torch.float32, device=None):
    fresh = Plain.init(self, d, heads=heads, dtype=dtype)
    return {**fresh, "learned": {**fresh["learned"], "idle": torch.ones(heads, d, dtype=dtype)}}


def _forward(self, x: Tensor, params: phi.Params) -> tuple[Tensor, Any]:
    return x * self.weight(x, params), (x, params)


def _vjp(wrong: float, dtype: torch.dtype | None = None) -> Callable:
    def vjp(self, residuals: Any, g: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        x, params = residuals
        gw = (x * g).reshape(-1, *self.weight(x, params).shape).sum(0)
        shape = params["learned"]["w"].shape
        gw = gw.reshape(shape) if gw.numel() == shape.numel() else gw.sum(0).reshape(shape)
        return wrong * g * self.weight(x, params), {"w": gw.to(dtype or params["learned"]["w"].dtype)}

    return vjp


def _cut_off(self, residuals: Any, g: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    gx, grads = phi.FeatureMap.vjp(self, residuals, g)
    return gx.detach(), grads


FAULTS: dict[str, tuple[str, dict[str, Any]]] = {
    "wrong scale of gx": ("VJP of input 0", {"forward": _forward, "vjp": _vjp(1.001)}),
    "detached gx": ("second derivative", {"vjp": _cut_off}),
    "wrong dtype of a learned cotangent": ("cotangent", {"forward": _forward, "vjp": _vjp(1.0, torch.float32)}),
    "wrong width": ("d_phi", {"output_dim": lambda self, d: d + 1}),
    "not non-negative": ("non_negative", _trait(non_negative=True)),
    "kernel not non-negative": ("kernel_non_negative", _trait(kernel_non_negative=True)),
    "not even": ("not even", _trait(parity="even")),
    "not of degree 2": ("degree 2", _trait(degree=2)),
    "not bounded": (r"\|phi\|\^2 reached", _trait(norm_bound=1.0)),
    "numbers mixed": ("not componentwise", _of(lambda x: x.cumsum(-1), componentwise=True)),
    "numbers mixed alike": (
        "not componentwise",
        {
            "features": lambda self, x, params: (
                self.weight(x, params).mean(-1, keepdim=True) * x / (1 + x.abs().amax(-1, keepdim=True))
            ),
            **_trait(componentwise=True),
        },
    ),
    "a slope that grows": ("slope grows", _of(torch.square, bounded_slope=True)),
    "not rising": ("not rising everywhere", _of(torch.neg, rising="everywhere")),
    "a flat odd part": ("not rising odd_part", _of(torch.square, rising="odd_part")),
    "lengths kept": ("forget lengths", _of(torch.square, forgets_length=True)),
    "nothing linear": ("linear in x", _of(torch.tanh, linear_at=0)),
    "signs lost": ("decodes nothing", _of(torch.square, parity="even", decodes=True)),
    "positions ignored": ("no position matters", _trait(needs_position=True)),
    "positions unseen by the kernel check": (
        "kernel_non_negative",
        {
            "features": lambda self, x, params: (
                self.weight(x, params).abs() * x.abs() * (params["position"].unsqueeze(-1) / 50).cos().to(x.dtype)
            ),
            **_trait(needs_position=True, kernel_non_negative=True),
        },
    ),
    "nothing drawn": ("no seed changes", _trait(is_random=True)),
    "drawn without a word": ("declare is_random", {"init": _frozen_draw}),
    "global generator": ("global generator", {"init": _global_draw}),
    "idle parameter": ("idle", {"init": _useless}),
    "wrong dtype": ("float32", {"features": lambda self, x, params: x.double() * self.weight(x.double(), params)}),
    "low precision": (
        "evaluate in float32",
        {
            "features": lambda self, x, params: (
                (x.bfloat16() if x.dtype == torch.float32 else x) * self.weight(x, params)
            ).to(x.dtype)
        },
    ),
    "a norm at zero": (
        "x = 0",
        {"features": lambda self, x, params: self.weight(x, params) * x.square().sum(-1, keepdim=True).sqrt()},
    ),
    "heads mixed": (
        "head 0 differs",
        {"features": lambda self, x, params: (x * self.weight(x, params)) + x.mean(0).mean(0)},
    ),
    "in place": ("in-place", {"features": lambda self, x, p: x.mul_(self.weight(x, p)) * 1}),
    "epsilon near zero": (
        "not of degree 0",
        {
            "features": lambda self, x, params: (
                self.weight(x, params) * x / (x.square().sum(-1, keepdim=True) + 1e-12).sqrt()
            ),
            **_trait(degree=0),
        },
    ),
}


def _made(index: int, body: dict[str, Any]) -> phi.FeatureMap:
    kind = f"fault_{index}_of_checks"
    fields = {"kind": kind, "__annotations__": {"kind": Literal[kind]}, "__module__": __name__}
    return type(f"Fault{index}", (Plain,), {**fields, **body})()


@pytest.fixture(autouse=True)
def _forget_the_kinds():
    yield
    for kind in [k for k in phi.FeatureMap._registry if k.endswith("_of_checks")]:
        del phi.FeatureMap._registry[kind]


def test_right_maps_pass():
    check_feature_map(Plain())
    check_feature_map(_made(0, {"forward": _forward, "vjp": _vjp(1.0)}))


@pytest.mark.parametrize("what", FAULTS)
def test_fault_is_found(what):
    message, body = FAULTS[what]
    with pytest.raises((AssertionError, RuntimeError), match=message):
        check_feature_map(_made(1 + list(FAULTS).index(what), body))


def test_features_that_tell_nothing_back_are_found():
    class Told(phi.FeatureMap):
        kind: Literal["told_nothing"] = "told_nothing"
        promises = phi.Traits(decodes=True)

        def features(self, x: Tensor, params: phi.Params) -> Tensor:
            return (x * x).sum(-1, keepdim=True) + 0.0 * x

    with pytest.raises(AssertionError, match="nothing tells x back"):
        check_feature_map(Told(), smooth=False)
    check_feature_map(phi.Linear(d_phi=1), smooth=False)
