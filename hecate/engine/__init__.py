"""Engines: ways to run the same semantics, the token loop being the truth."""

from hecate.engine.arguments import complete, document_starts
from hecate.engine.by_hand import ByHand, may_look
from hecate.engine.call import Call
from hecate.engine.chunk import predict
from hecate.engine.features import memory_features
from hecate.engine.given import check_mask, check_tokens
from hecate.engine.parameters import check_params
from hecate.engine.positions import counted, numbered, written_before
from hecate.engine.prepare import Sequence, to_tokens
from hecate.engine.quotients import DIVIDE, L2_NORM, SUM_NORM, largest, levelling, near_one, reach
from hecate.engine.scan import memory_scan
from hecate.engine.select import EngineName, check_exact, choose_engine, exact_engines
from hecate.engine.step import Stepper, memory_step, stepper
from hecate.engine.tokens import CONCAT

__all__ = [
    "CONCAT",
    "DIVIDE",
    "L2_NORM",
    "SUM_NORM",
    "ByHand",
    "Call",
    "EngineName",
    "Sequence",
    "Stepper",
    "check_exact",
    "check_mask",
    "check_params",
    "check_tokens",
    "choose_engine",
    "complete",
    "counted",
    "document_starts",
    "exact_engines",
    "largest",
    "levelling",
    "may_look",
    "memory_features",
    "memory_scan",
    "memory_step",
    "near_one",
    "numbered",
    "predict",
    "reach",
    "stepper",
    "to_tokens",
    "written_before",
]
