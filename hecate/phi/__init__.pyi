from hecate.phi.base import FeatureMap, FeatureMapKind, Params, Traits
from hecate.phi.combinators import Compose, Concat, Normalise, OddLift, TensorProduct
from hecate.phi.elementwise import (
    ELU,
    Exp,
    GELUShifted,
    Identity,
    LeakyReLUSquared,
    ReLU,
    Sigmoid,
    Softplus,
    SquaredReLU,
    Tanh,
)
from hecate.phi.favor import Favor
from hecate.phi.learned import MLP, T2R, Hadamard, Linear
from hecate.phi.nystrom import Nystrom
from hecate.phi.polynomial import Polynomial, Rebased, Taylor
from hecate.phi.random_fourier import SORF, RandomFourier
from hecate.phi.random_polynomial import Polysketch, RandomMaclaurin
from hecate.phi.random_relu import ArcCosine, PerformerReLU
from hecate.phi.rectified import DPFP, CosFormer, CReLU
from hecate.phi.softmax import Hedgehog, Softmax

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
