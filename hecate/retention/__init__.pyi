from hecate.retention.base import GateForm, Retention, RetentionKind
from hecate.retention.mirror import (
    KL,
    Bounded,
    Bregman,
    IdentityLink,
    Link,
    Lq,
    LqLink,
    MirrorRetention,
    SigmoidLink,
    SignedSoftmaxLink,
    SoftmaxLink,
)
from hecate.retention.primal import L2, Decay, ElasticNet, NoRetention, NormCap, Sphere

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
]
