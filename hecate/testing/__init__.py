"""Checks for anyone who writes a feature map, a knob or a block."""

from hecate.testing.block import SIGNAL_FLOOR, check_streaming, check_vjp
from hecate.testing.feature_map import check_feature_map
from hecate.testing.rule import check_knobs, check_rule

__all__ = ["SIGNAL_FLOOR", "check_feature_map", "check_knobs", "check_rule", "check_streaming", "check_vjp"]
