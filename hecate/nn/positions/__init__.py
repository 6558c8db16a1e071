"""Positions in attention."""

from hecate.nn.positions.base import Position, PositionKind, Rotation
from hecate.nn.positions.circulant_string import CirculantString
from hecate.nn.positions.none import NoPosition
from hecate.nn.positions.relative import Relative
from hecate.nn.positions.rotary import Rotary
from hecate.nn.positions.rotate import rotated

__all__ = ["CirculantString", "NoPosition", "Position", "PositionKind", "Relative", "Rotary", "Rotation", "rotated"]
