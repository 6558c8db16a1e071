"""Feature maps: the functions that take keys and queries to phi-space."""

from hecate.phi.base import FeatureMap, FeatureMapKind, Params, Traits
from hecate.phi.compose import Compose
from hecate.phi.concat import Concat
from hecate.phi.dpfp import DPFP
from hecate.phi.elu import ELU
from hecate.phi.exp import Exp
from hecate.phi.favor import Favor
from hecate.phi.gelu_shifted import GELUShifted
from hecate.phi.identity import Identity
from hecate.phi.leaky_relu_squared import LeakyReLUSquared
from hecate.phi.linear import Linear
from hecate.phi.mlp import MLP
from hecate.phi.normalise import Normalise
from hecate.phi.odd_lift import OddLift
from hecate.phi.performer_relu import PerformerReLU
from hecate.phi.polynomial import Polynomial
from hecate.phi.random_fourier import RandomFourier
from hecate.phi.relu import ReLU
from hecate.phi.softplus import Softplus
from hecate.phi.squared_relu import SquaredReLU
from hecate.phi.taylor import Taylor

__all__ = [
    "DPFP",
    "ELU",
    "MLP",
    "Compose",
    "Concat",
    "Exp",
    "Favor",
    "FeatureMap",
    "FeatureMapKind",
    "GELUShifted",
    "Identity",
    "LeakyReLUSquared",
    "Linear",
    "Normalise",
    "OddLift",
    "Params",
    "PerformerReLU",
    "Polynomial",
    "RandomFourier",
    "ReLU",
    "Softplus",
    "SquaredReLU",
    "Taylor",
    "Traits",
]
