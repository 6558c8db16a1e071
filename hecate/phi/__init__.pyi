from hecate.phi.base import FeatureMap, FeatureMapKind, MapForm, Params, Traits
from hecate.phi.combinators import Compose, Concat, Normalise, OddLift, TensorProduct
from hecate.phi.elementwise import (
    ELU,
    Exp,
    GELUShifted,
    Identity,
    LeakyReLU,
    LeakyReLUSquared,
    ReLU,
    Sigmoid,
    Softplus,
    SquaredReLU,
    Tanh,
)
from hecate.phi.gaussian import SORF, Nystrom, RandomFourier
from hecate.phi.learned import GLU, MLP, T2R, Hadamard, Hedgehog, Linear, Softmax
from hecate.phi.performer import ArcCosine, Favor, PerformerReLU
from hecate.phi.polynomial import Polynomial, Rebased, Taylor
from hecate.phi.random_polynomial import SLAY, Polysketch, RandomMaclaurin
from hecate.phi.rectified import DPFP, CosFormer, CReLU

__all__ = [
    "DPFP",
    "ELU",
    "GLU",
    "MLP",
    "SLAY",
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
    "LeakyReLU",
    "LeakyReLUSquared",
    "Linear",
    "MapForm",
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
