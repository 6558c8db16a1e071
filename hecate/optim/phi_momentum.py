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
from hecate.optim.tensors import Bulk, blocks, pointwise
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
        held = [state["momentum"] for state in states]
        bulk = Bulk(group["foreach"], group["differentiable"], held[0].dtype)
        if bulk.foreach:
            for block in blocks((params, grads, held), whole_rows=False):
                self._move(group, bulk, *block)
            return
        for state, value in zip(states, self._move(group, bulk, params, grads, held), strict=True):
            state["momentum"] = value

    def _move(
        self,
        group: Group,
        bulk: Bulk,
        params: list[Tensor],
        grads: list[Tensor],
        held: list[Tensor],
    ) -> list[Tensor]:
        lr, momentum = bulk.number(group["lr"]), bulk.number(group["momentum"])
        hope = group["form"] == "hope"
        if grads[0].dtype != held[0].dtype:
            grads = [g.to(m.dtype) for g, m in zip(grads, held, strict=True)]
        if group["weight_decay"] and not group["decoupled"]:
            grads = bulk.sum(grads, params, group["weight_decay"])
        updates = self._updates(group, grads)
        held = bulk.decay(held, momentum)
        held = bulk.add(held, updates, -lr if hope else 1 - group["dampening"])
        values = params
        if group["weight_decay"] and group["decoupled"]:
            values = bulk.decay(values, 1 - lr * group["weight_decay"])
        ahead = bulk.sum(updates, held, momentum) if group["nesterov"] else held
        values = bulk.add(values, ahead, 1 if hope else -lr)
        bulk.write(params, values)
        return held

    def _updates(self, group: Group, grads: list[Tensor]) -> list[Tensor]:
        feature_map = FeatureMap.model_validate(group["feature_map"])
        if isinstance(feature_map, Identity):
            return grads
        rows = PhiRows(feature_map)
        with torch.set_grad_enabled(group["differentiable"]):
            return pointwise(rows, grads)
