"""Positions in attention."""

from hecate.nn.positions.base import Position, PositionKind, Rotation
from hecate.nn.positions.none import NoPosition
from hecate.nn.positions.rotary import Rotary
from hecate.nn.positions.rotate import rotated

__all__ = [
    "NoPosition",
    "Position",
    "PositionKind",
    "Rotary",
    "Rotation",
    "rotated",
]
