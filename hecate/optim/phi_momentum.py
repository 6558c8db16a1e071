"""Momentum on features of the gradient (draft)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from hecate.optim.base import (
    Group,
    MatrixOptimizer,
    State,
    check_choice,
    check_number,
    common_options,
    zeros_like_state,
)
from hecate.optim.lift import PhiRows
from hecate.optim.tensors import Bulk, pointwise
from hecate.phi import FeatureMap, Identity


class PhiMomentum(MatrixOptimizer):
    """phi_momentum: m <- momentum m + P phi~(g), w <- w - lr m."""

    structural = (*MatrixOptimizer.structural, "feature_map")

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        momentum: float | Tensor = 0.9,
        feature_map: FeatureMap | dict[str, Any] | str = Identity(),  # noqa: B008 - frozen
        **options: Any,
    ) -> None:
        given = {"lr": lr, "momentum": momentum, "feature_map": feature_map, **options}
        defaults = {"form": "torch", "nesterov": False, "dampening": 0.0, "decoupled": True}
        super().__init__(params, common_options(**defaults | given))

    def check(self, group: Group) -> None:
        group["feature_map"] = FeatureMap.model_validate(group["feature_map"]).model_dump()
        super().check(group)
        check_number(group, "momentum", high=1.0)
        check_choice(group, "form", ("torch", "hope"))

    def fresh_state(self, p: Tensor, group: Group) -> State:
        return {"momentum": zeros_like_state(p, group)}

    def update(
        self, group: Group, params: list[Tensor], grads: list[Tensor], states: list[State]
    ) -> None:
        bulk = Bulk(group["foreach"], group["differentiable"], states[0]["momentum"].dtype)
        lr, momentum = bulk.number(group["lr"]), bulk.number(group["momentum"])
        hope = group["form"] == "hope"
        grads = [g.to(s["momentum"].dtype) for g, s in zip(grads, states, strict=True)]
        if group["weight_decay"] and not group["decoupled"]:
            grads = bulk.sum(grads, params, group["weight_decay"])
        updates = self._updates(group, grads)
        held = bulk.decay([state["momentum"] for state in states], momentum)
        held = bulk.add(held, updates, -lr if hope else 1 - group["dampening"])
        for state, value in zip(states, held, strict=True):
            state["momentum"] = value
        values = params
        if group["weight_decay"] and group["decoupled"]:
            values = bulk.decay(values, 1 - lr * group["weight_decay"])
        if group["nesterov"]:
            held = bulk.sum(updates, held, momentum)
        values = bulk.add(values, held, 1 if hope else -lr)
        bulk.write(params, values)

    def _updates(self, group: Group, grads: list[Tensor]) -> list[Tensor]:
        feature_map = FeatureMap.model_validate(group["feature_map"])
        if isinstance(feature_map, Identity):
            return grads
        rows = PhiRows(feature_map)
        with torch.set_grad_enabled(group["differentiable"]):
            return pointwise(rows, grads)
