"""Feature maps: the functions that take keys and queries to phi-space."""

from hecate.phi.base import FeatureMap, FeatureMapKind, Params, Traits
from hecate.phi.elu import ELU
from hecate.phi.favor import Favor
from hecate.phi.identity import Identity
from hecate.phi.performer_relu import PerformerReLU
from hecate.phi.random_fourier import RandomFourier

__all__ = [
    "ELU",
    "Favor",
    "FeatureMap",
    "FeatureMapKind",
    "Identity",
    "Params",
    "PerformerReLU",
    "RandomFourier",
    "Traits",
]
