"""Feature maps: the functions that take keys and queries to phi-space."""

from hecate.phi.arc_cosine import ArcCosine
from hecate.phi.base import FeatureMap, FeatureMapKind, Params, Traits
from hecate.phi.compose import Compose
from hecate.phi.concat import Concat
from hecate.phi.cosformer import CosFormer
from hecate.phi.crelu import CReLU
from hecate.phi.dpfp import DPFP
from hecate.phi.elu import ELU
from hecate.phi.exp import Exp
from hecate.phi.favor import Favor
from hecate.phi.gelu_shifted import GELUShifted
from hecate.phi.hadamard import Hadamard
from hecate.phi.hedgehog import Hedgehog
from hecate.phi.identity import Identity
from hecate.phi.leaky_relu_squared import LeakyReLUSquared
from hecate.phi.linear import Linear
from hecate.phi.mlp import MLP
from hecate.phi.normalise import Normalise
from hecate.phi.nystrom import Nystrom
from hecate.phi.odd_lift import OddLift
from hecate.phi.performer_relu import PerformerReLU
from hecate.phi.polynomial import Polynomial
from hecate.phi.polysketch import Polysketch
from hecate.phi.random_fourier import RandomFourier
from hecate.phi.random_maclaurin import RandomMaclaurin
from hecate.phi.rebased import Rebased
from hecate.phi.relu import ReLU
from hecate.phi.sigmoid import Sigmoid
from hecate.phi.softmax import Softmax
from hecate.phi.softplus import Softplus
from hecate.phi.sorf import SORF
from hecate.phi.squared_relu import SquaredReLU
from hecate.phi.t2r import T2R
from hecate.phi.tanh import Tanh
from hecate.phi.taylor import Taylor
from hecate.phi.tensor_product import TensorProduct

__all__ = [
    "DPFP",
    "ELU",
    "MLP",
    "SORF",
    "T2R",
    "ArcCosine",
    "CReLU",
    "Compose",
    "Concat",
    "CosFormer",
    "Exp",
    "Favor",
    "FeatureMap",
    "FeatureMapKind",
    "GELUShifted",
    "Hadamard",
    "Hedgehog",
    "Identity",
    "LeakyReLUSquared",
    "Linear",
    "Normalise",
    "Nystrom",
    "OddLift",
    "Params",
    "PerformerReLU",
    "Polynomial",
    "Polysketch",
    "RandomFourier",
    "RandomMaclaurin",
    "ReLU",
    "Rebased",
    "Sigmoid",
    "Softmax",
    "Softplus",
    "SquaredReLU",
    "Tanh",
    "Taylor",
    "TensorProduct",
    "Traits",
]
