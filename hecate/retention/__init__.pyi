from hecate.retention.base import GateForm, Retention, RetentionKind, StepForm
from hecate.retention.decay import L2, Decay, ElasticNet, NoRetention
from hecate.retention.links import IdentityLink, Link, LqLink, SigmoidLink, SignedSoftmaxLink, SoftmaxLink
from hecate.retention.mirror import KL, Bounded, Bregman, Lq, MirrorRetention
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
