"""Retention: how a memory keeps its past."""

from hecate.retention.base import GateForm, Retention, RetentionKind, StepForm
from hecate.retention.bounded import Bounded
from hecate.retention.bregman import Bregman
from hecate.retention.decay import Decay
from hecate.retention.elastic_net import ElasticNet
from hecate.retention.kl import KL
from hecate.retention.l2 import L2
from hecate.retention.links import IdentityLink, Link, LqLink, SigmoidLink, SignedSoftmaxLink, SoftmaxLink
from hecate.retention.lq import Lq
from hecate.retention.mirror import MirrorRetention
from hecate.retention.none import NoRetention
from hecate.retention.norm_cap import NormCap
from hecate.retention.sphere import Sphere

__all__ = [
    "KL",
    "L2",
    "Bounded",
    "Bregman",
    "Decay",
    "ElasticNet",
    "GateForm",
    "IdentityLink",
    "Link",
    "Lq",
    "LqLink",
    "MirrorRetention",
    "NoRetention",
    "NormCap",
    "Retention",
    "RetentionKind",
    "SigmoidLink",
    "SignedSoftmaxLink",
    "SoftmaxLink",
    "Sphere",
    "StepForm",
]
