"""Centred features (draft)."""

from __future__ import annotations

import torch
from torch import Tensor

from hecate.phi import FeatureMap


class PhiRows:
    """phi(g) - phi(0), componentwise."""

    def __init__(self, feature_map: FeatureMap) -> None:
        self.feature_map = feature_map

    def __call__(self, g: Tensor) -> Tensor:
        features = self.feature_map(g)
        if self.feature_map.parity == "odd":
            return features
        return features - self.feature_map(torch.zeros(1, dtype=g.dtype, device=g.device))
