"""Engines: ways to run the same semantics, the token loop being the truth.

Every file and folder here is imported, and with it the engines that it defines are registered: a new one needs no other
edit.
"""

from importlib import import_module
from pkgutil import iter_modules

from hecate.engine.arguments import check_mask, check_params, check_tokens, document_starts
from hecate.engine.call import Call, Inputs, Plan, complete, numbered
from hecate.engine.chunk import predict
from hecate.engine.cpu import lies, load_kernels, padded, share_out
from hecate.engine.engine import Engine, EngineName, TokenEngine, check_exact, choose, exact_engines, explain, verdicts
from hecate.engine.features import DIVIDE, L2_NORM, SUM_NORM, to_tokens
from hecate.engine.log_linear import MOST_LEVELS, as_plain, log_linear_scan, tree_refusal
from hecate.engine.one_token import TokenForm, short_way, token_form
from hecate.engine.reductions import one_write_each
from hecate.engine.scan import (
    Stepper,
    as_loop,
    memory_features,
    memory_scan,
    memory_step,
    scan_answers,
    scan_arguments,
    stepper,
)
from hecate.engine.tokens import counted, written_before
from hecate.engine.triton.parity import kept as kernel_verdicts

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")

__all__ = [
    "DIVIDE",
    "L2_NORM",
    "MOST_LEVELS",
    "SUM_NORM",
    "Call",
    "Engine",
    "EngineName",
    "Inputs",
    "Plan",
    "Stepper",
    "TokenEngine",
    "TokenForm",
    "as_loop",
    "as_plain",
    "check_exact",
    "check_mask",
    "check_params",
    "check_tokens",
    "choose",
    "complete",
    "counted",
    "document_starts",
    "exact_engines",
    "explain",
    "kernel_verdicts",
    "lies",
    "load_kernels",
    "log_linear_scan",
    "memory_features",
    "memory_scan",
    "memory_step",
    "numbered",
    "one_write_each",
    "padded",
    "predict",
    "scan_answers",
    "scan_arguments",
    "share_out",
    "short_way",
    "stepper",
    "to_tokens",
    "token_form",
    "tree_refusal",
    "verdicts",
    "written_before",
]
