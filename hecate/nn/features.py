"""A feature map's parameters as a layer holds them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hecate.nn.parameters import TensorDict
from hecate.phi import FeatureMap, Params


class FeatureParameters(nn.Module):
    """The parameters of phi for `heads` heads with keys of width `d_key`: `phi_learned` trained, `phi_frozen`, the
    draws of a random map, as buffers."""

    def hold_features(
        self,
        feature_map: FeatureMap,
        heads: int,
        d_key: int,
        *,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        """Makes room for the parameters; `draw_features` fills it."""
        self._phi, self._phi_heads, self.phi_width = feature_map, heads, d_key
        place: dict[str, Any] = {"device": device, "dtype": dtype}
        shapes: dict[str, Any] = {"dtype": dtype or torch.get_default_dtype(), "device": "meta"}
        params = feature_map.init(d_key, heads=heads, **shapes)
        self.phi_learned = TensorDict(params["learned"], learned=True, **place)
        self.phi_frozen = TensorDict(params["frozen"], learned=False, **place)

    def draw_features(self, source: torch.Generator, like: Tensor) -> None:
        """Both anew from a generator, in the dtype and on the device of `like`."""
        place: dict[str, Any] = {"dtype": like.dtype, "device": like.device, "generator": source}
        params = self._phi.init(self.phi_width, heads=self._phi_heads, **place)
        self.phi_learned.copy_(params["learned"])
        self.phi_frozen.copy_(params["frozen"])

    @property
    def phi_params(self) -> Params:
        """Parameters of the feature map, as scans take them."""
        return {"learned": self.phi_learned.tensors, "frozen": self.phi_frozen.tensors}
