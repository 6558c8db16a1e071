"""Layers of transformers whose recurrence is hecate's: the same forward, over other kernels.

A layer of transformers takes its kernels by name from the globals of its modeling module. An adopted one has a subclass
of its class whose forward is the same code over a copy of these globals in which the kernels are ours; instances get it
one by one, and everything else of theirs stays.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Mapping
from functools import cache, partial
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn

from hecate.errors import ConfigError, ShapeError
from hecate.hf import kernels
from hecate.tape import steady

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
"""Dtypes of weights that are read as they are; others are quantised."""
STARTS, ENGINE = "hecate_starts", "hecate_engine"
"""Keywords of its kernels: where documents begin, and a layer's engine, which is its attribute, too."""


class Kernel(NamedTuple):
    """A kernel of transformers: the parameters it is known by, the rule whose layers take it, all of them if None, and
    ours; None leaves theirs."""

    parameters: str
    rule: str | None
    ours: Callable[..., Any] | None


_STEP = "query key value g beta initial_state output_final_state use_qk_l2norm_in_kernel kwargs"
_CHUNK = _STEP.replace("beta", "beta chunk_size")
_DELTA, _KDA = partial(kernels.delta_rule, "gated_delta"), partial(kernels.delta_rule, "kda")
KERNELS: dict[str, Kernel] = {
    "causal_conv1d_fn": Kernel("hidden_states weight bias activation kwargs", None, kernels.causal_conv),
    "causal_conv1d_update": Kernel("hidden_states conv_state weight bias activation", None, kernels.causal_conv_update),
    "torch_chunk_gated_delta_rule": Kernel(_CHUNK, "gated_delta", _DELTA),
    "torch_recurrent_gated_delta_rule": Kernel(_STEP, "gated_delta", _DELTA),
    "chunk_kimi_delta_attention": Kernel(_CHUNK, "kda", _KDA),
    "recurrent_kimi_delta_attention": Kernel(_STEP, "kda", _KDA),
    "mamba2_chunk_scan": Kernel(
        "hidden_states dt A B C chunk_size D dt_bias initial_states dt_softplus dt_limit return_final_states kwargs",
        "mamba2", kernels.state_space,
    ),
    "mamba2_split_conv1d_scan_combined": Kernel(  # a whole layer; one that returns None goes the way of its parts
        "zxbcdt conv1d_weight conv1d_bias dt_bias A D chunk_size initial_states dt_limit return_final_states "
        "activation rmsnorm_weight rmsnorm_eps outproj_weight outproj_bias headdim ngroups norm_before_gate kwargs",
        "mamba2", lambda *_, **__: None,
    ),
    "mamba2_selective_state_update": Kernel(
        "state hidden_states dt A B C D dt_bias dt_softplus z kwargs", "mamba2", None
    ),
}  # fmt: skip


class Adopted(nn.Module):
    """Mixin for a layer of transformers that runs hecate's kernels."""


def official(kind: Any) -> Any:
    """The class of transformers that an adopted class stands for; another class itself."""
    return kind.__mro__[1] if issubclass(kind, Adopted) else kind


def rule_of(kind: Any) -> str | None:
    """The rule that layers of a class run, None where it is none of ours.

    Raises:
        ConfigError: its kernels are not those that are known, as in another version of transformers.
    """
    forward = inspect.unwrap(kind.forward) if hasattr(kind, "forward") else None
    if not isinstance(forward, FunctionType):
        return None
    known = {name: forward.__globals__[name] for name in forward.__code__.co_names if name in forward.__globals__}
    taken = {name for name, item in known.items() if name in KERNELS or _is_hubs(item)}
    rules = {KERNELS[name].rule for name in taken & KERNELS.keys()} - {None}
    if not rules:
        return None
    unlike = taken ^ {name for name, kernel in KERNELS.items() if kernel.rule in (None, *rules)}
    unlike |= {name for name in taken & KERNELS.keys() if _parameters(known[name]) != KERNELS[name].parameters}
    if _parameters(forward) != "self hidden_states cache_params attention_mask kwargs":
        unlike.add("forward")
    if unlike or len(rules) > 1:
        raise ConfigError(
            f"{kind.__name__} of transformers {transformers.__version__} is not built as adopt knows it: "
            f"{', '.join(sorted(map(str, unlike or rules)))} differ; nothing was changed"
        )
    return rules.pop()


def _is_hubs(item: Any) -> bool:
    """True of a kernel of transformers: a function that it makes where it looks for those of other packages."""
    return getattr(item, "__globals__", {}).get("__name__") == "transformers.integrations.hub_kernels"


def _parameters(function: Callable[..., Any]) -> str:
    return " ".join(inspect.signature(inspect.unwrap(function)).parameters)


@cache
def adopted(kind: Any) -> Any:
    """The class of adopted layers of a class, under its name."""
    core = _over(kind.forward, _namespace(kind.__module__, inspect.unwrap(kind.forward).__globals__))

    @functools.wraps(kind.forward)
    def forward(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        if steady():
            raise ConfigError(
                "exact and adopt: adopted layers take a token by other kernels than many; release the model"
            )
        starts, packing = kwargs.pop(STARTS, None), {name: kwargs.pop(name, None) for name in PACKING}
        if starts is None:
            starts = document_starts(packing, hidden_states)
        if starts is not None and kwargs.get("cache_params", args[0] if args else None) is not None:
            raise ConfigError(CACHED)
        return core(self, hidden_states, *args, **{STARTS: starts, ENGINE: self.hecate_engine}, **kwargs)

    own = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(kind.__name__, (kind, Adopted), {**own, "forward": forward, "__reduce_ex__": _reduce})


def _namespace(name: str, known: dict[str, Any]) -> dict[str, Any]:
    """A modeling module's globals with our kernels in place of its own.

    They are those of a module that can be imported: torch.compile finds globals by their module's name."""
    name = f"hecate_adopted.{name}"
    while name in sys.modules:  # of another class, or of a module that was imported again
        name += "_"
    module = sys.modules[name] = ModuleType(name)
    own = {key: value for key, value in known.items() if key not in ("__name__", "__spec__", "__loader__")}
    module.__dict__.update(own | {key: ours for key, (_, _, ours) in KERNELS.items() if key in known and ours})
    return module.__dict__


def _over(function: Any, namespace: dict[str, Any]) -> Any:
    """A function, and those that decorate it, over other globals at its core."""
    inner, closure, home = getattr(function, "__wrapped__", None), function.__closure__, namespace
    if inner is not None:
        core, home = _over(inner, namespace), function.__globals__
        closure = tuple(CellType(core if cell.cell_contents is inner else cell.cell_contents) for cell in closure)
    again = FunctionType(function.__code__, home, function.__name__, function.__defaults__, closure)
    again.__kwdefaults__, again.__qualname__ = function.__kwdefaults__, function.__qualname__
    return again if inner is None else functools.update_wrapper(again, core)


def _rebuilt(kind: type) -> Any:
    found = adopted(kind)
    return found.__new__(found)


def _reduce(self: Any, _: Any) -> tuple[Any, ...]:
    return _rebuilt, (official(type(self)),), self.__dict__


def become(layer: Any, kind: Any) -> None:
    """Gives a layer another class, and to what accelerate keeps of its forward that of the class."""
    before, layer.__class__ = type(layer).forward, kind
    for name in ("forward", "_old_forward"):
        if isinstance(kept := layer.__dict__.get(name), MethodType) and kept.__func__ is before:
            layer.__dict__[name] = MethodType(kind.forward, layer)


# Documents of a row.

PACKING = ("cu_seq_lens_q", "seq_idx")
"""Keywords that say where documents begin whatever positions are: tokens ahead of each, the number of each token's."""
CACHED = (
    "a row of several documents cannot fill a cache or go on from one: the next token belongs to the last document "
    "alone; set use_cache=False, or give the documents in rows of their own"
)


def called_with(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[dict[str, Any], Tensor]:
    """The arguments of a model's call by name, and its tokens `[B, T, ...]`."""
    names = tuple(inspect.signature(type(model).forward).parameters)[1:] if args else ()
    given = dict(zip(names, args, strict=False)) | kwargs
    tokens = given.get("input_ids")
    return given, given["inputs_embeds"] if tokens is None else tokens


def document_starts(given: Mapping[str, Any], tokens: Tensor) -> Tensor | None:
    """True `[B, T]` where another document begins in a row, None where none does.

    By `PACKING` or, as softmax layers go, by position_ids without attention_mask. `tokens` is `[B, T, ...]`.

    Raises:
        ConfigError: positions begin again in a row that goes on from a cache.
        ShapeError: cu_seq_lens_q of several rows, or seq_idx of another shape.
    """
    (rows, count), (borders, numbers) = tokens.shape[:2], [given.get(name) for name in PACKING]
    positions = given.get("position_ids")
    if borders is None and numbers is None and (positions is None or given.get("attention_mask") is not None):
        return None
    if borders is not None and rows != 1:
        raise ShapeError(f"cu_seq_lens_q packs documents into one row, and there are {rows}")
    if borders is None and numbers is not None:
        if numbers.shape != tokens.shape[:2]:
            raise ShapeError(f"seq_idx must be [B, T] = {[rows, count]}, got {list(numbers.shape)}")
        positions = torch.diff(numbers, prepend=numbers[:, :1]).eq(0).long().cumsum(1)  # steps of 1 within a document
    elif positions is not None and positions.dim() == 3 and positions.shape[0] == 4:
        positions = positions[0]  # of the text, ahead of those of pictures
    past = given.get("past_key_values") if numbers is None and borders is None else None
    if past is not None and positions is not None and not torch.compiler.is_compiling():
        if positions.dim() == 2 and bool(torch.diff(positions).le(0).any()):
            raise ConfigError(CACHED)
    how = {"cu_seq_lens_q": borders, "position_ids": positions, "past_key_values": past}
    return starts_of_documents(how, rows, count, tokens.device)


def starts_of_documents(given: dict[str, Any], rows: int, count: int, device: torch.device) -> Tensor | None:
    """Where another document begins, as attention is told it, if one does."""
    ends, position = given.get("cu_seq_lens_q"), given.get("position_ids")
    if ends is not None:
        starts = torch.zeros(rows * count + 1, dtype=torch.bool, device=device)
        starts[ends.to(device).long()] = True
        starts = starts[:-1].reshape(rows, count)
    elif given.get("past_key_values") is None and position is not None and position.dim() == 2 and count > 1:
        starts = torch.diff(position, prepend=position[:, :1] - 1).ne(1).expand(rows, -1).to(device)
    else:
        return None
    return starts if torch.compiler.is_compiling() or bool(starts[:, 1:].any()) else None
