"""Positions in attention."""

from hecate.nn.positions.base import NoPosition, Position, PositionKind
from hecate.nn.positions.relative import Relative
from hecate.nn.positions.rotations import CirculantString, Rotary, Rotation, rotated

__all__ = ["CirculantString", "NoPosition", "Position", "PositionKind", "Relative", "Rotary", "Rotation", "rotated"]
