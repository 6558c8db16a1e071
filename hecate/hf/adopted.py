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
from functools import cache
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hecate.errors import ConfigError, ShapeError
from hecate.hf import kernels

STARTS = "hecate_starts"
"""The keyword by which a model's layers hand on where documents begin."""
ENGINE = "hecate_engine"
"""The attribute and keyword of an adopted layer that names its engine."""

_DELTA = "query key value g beta initial_state output_final_state use_qk_l2norm_in_kernel kwargs"
_CHUNK = _DELTA.replace("beta", "beta chunk_size")
_UPDATE = "hidden_states conv_state weight bias activation"
_SCAN = "hidden_states dt A B C chunk_size D dt_bias initial_states dt_softplus dt_limit return_final_states kwargs"


class Kernel(NamedTuple):
    """A kernel of transformers: the parameters it is known by, the rule it runs, if it is that of a rule, and ours."""

    parameters: str
    rule: str | None
    ours: Callable[..., Any] | None


def _delta(rule: str) -> Callable[..., Any]:
    def kernel(
        query: Tensor, key: Tensor, value: Tensor, *, g: Tensor, beta: Tensor, initial_state: Tensor | None = None,
        output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False, hecate_starts: Tensor | None = None,
        hecate_engine: str = "auto", **_: Any,
    ) -> Any:  # fmt: skip
        return kernels.delta_rule(
            rule, query, key, value, g, beta, initial_state=initial_state, output_final_state=output_final_state,
            use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, starts=hecate_starts, engine=hecate_engine,
        )  # fmt: skip

    return kernel


def _conv(
    hidden_states: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, *,
    hecate_starts: Tensor | None = None, **_: Any,
) -> Tensor:  # fmt: skip
    return kernels.causal_conv(hidden_states, weight, bias, activation, starts=hecate_starts)


def _state_space(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, chunk_size: int, D: Tensor | None = None, *,
    dt_bias: Tensor | None, initial_states: Tensor | None, dt_softplus: bool, dt_limit: tuple[float, float],
    return_final_states: bool, hecate_starts: Tensor | None = None, hecate_engine: str = "auto", **_: Any,
) -> Any:  # fmt: skip
    return kernels.state_space(
        x, dt, A, B, C, D, dt_bias=dt_bias, initial_states=initial_states, dt_softplus=dt_softplus,
        dt_limit=dt_limit, return_final_states=return_final_states, starts=hecate_starts, engine=hecate_engine,
    )  # fmt: skip


def _no_shortcut(*_: Any, **__: Any) -> None:
    """A layer whose whole-layer kernel returns None goes the way of its parts."""


KERNELS: dict[str, Kernel] = {
    "torch_chunk_gated_delta_rule": Kernel(_CHUNK, "gated_delta", _delta("gated_delta")),
    "torch_recurrent_gated_delta_rule": Kernel(_DELTA, None, _delta("gated_delta")),
    "chunk_kimi_delta_attention": Kernel(_CHUNK, "kda", _delta("kda")),
    "recurrent_kimi_delta_attention": Kernel(_DELTA, None, _delta("kda")),
    "mamba2_chunk_scan": Kernel(_SCAN, "mamba2", _state_space),
    "causal_conv1d_fn": Kernel("hidden_states weight bias activation kwargs", None, _conv),
    "causal_conv1d_update": Kernel(_UPDATE, None, kernels.causal_conv_update),
    "mamba2_split_conv1d_scan_combined": Kernel(
        "zxbcdt conv1d_weight conv1d_bias dt_bias A D chunk_size initial_states dt_limit return_final_states "
        "activation rmsnorm_weight rmsnorm_eps outproj_weight outproj_bias headdim ngroups norm_before_gate kwargs",
        None, _no_shortcut,
    ),
    "mamba2_selective_state_update": Kernel("state hidden_states dt A B C D dt_bias dt_softplus z kwargs", None, None),
}  # fmt: skip
_WHOLE = {  # of a rule: all that a forward has to take
    "gated_delta": {"torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"},
    "kda": {"chunk_kimi_delta_attention", "recurrent_kimi_delta_attention"},
    "mamba2": {"mamba2_chunk_scan", "mamba2_split_conv1d_scan_combined", "mamba2_selective_state_update"},
}
_CONVOLUTION = {"causal_conv1d_fn", "causal_conv1d_update"}


class Adopted(nn.Module):
    """Mixin for a layer of transformers that runs hecate's kernels."""


def official(kind: type) -> type:
    """The class of transformers that an adopted class stands for; another class itself."""
    return kind.__mro__[1] if issubclass(kind, Adopted) else kind


def rule_of(kind: type) -> str | None:
    """The rule that layers of a class run, None where it is none of ours.

    Raises:
        ConfigError: its kernels are not those that are known, as in another version of transformers.
    """
    forward = inspect.unwrap(kind.forward) if hasattr(kind, "forward") else None
    if not isinstance(forward, FunctionType):
        return None
    names, known = set(forward.__code__.co_names), forward.__globals__
    rules = {kernel.rule for name in names & KERNELS.keys() & known.keys() if (kernel := KERNELS[name]).rule}
    if not rules:
        return None
    taken = names & KERNELS.keys()
    wanted = set.union(_CONVOLUTION, *(_WHOLE[rule] for rule in rules))
    unlike = sorted(taken ^ wanted)
    unlike += [n for n in sorted(taken & known.keys()) if _parameters(known[n]) != KERNELS[n].parameters]
    if _parameters(forward) != "self hidden_states cache_params attention_mask kwargs":
        unlike.append("forward")
    if len(rules) > 1 or unlike:
        import transformers

        raise ConfigError(
            f"{kind.__name__} of transformers {transformers.__version__} is not built as adopt knows it: "
            f"{', '.join(unlike) or 'two rules in one layer'} differ; nothing was changed"
        )
    return rules.pop()


def _parameters(function: Callable[..., Any]) -> str:
    return " ".join(inspect.signature(inspect.unwrap(function)).parameters)


@cache
def adopted(kind: type) -> type:
    """The class of adopted layers of a class, under its name."""
    core = _over(kind.forward, _namespace(kind.__module__, inspect.unwrap(kind.forward).__globals__))

    @functools.wraps(kind.forward)
    def forward(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        starts = kwargs.pop(STARTS, None)
        borders, numbers = kwargs.pop("cu_seq_lens_q", None), kwargs.pop("seq_idx", None)
        if starts is None and not (borders is None and numbers is None):
            starts = document_starts(borders, numbers, hidden_states.shape[:2])
        if starts is not None:
            if kwargs.get("cache_params", args[0] if args else None) is not None:
                raise ConfigError(
                    "a row of several documents cannot fill a cache or go on from one: the next token belongs to the "
                    "last document alone; set use_cache=False, or give the documents in rows of their own"
                )
            kwargs[STARTS] = starts
        return core(self, hidden_states, *args, **{ENGINE: self.hecate_engine}, **kwargs)

    own = {"forward": forward, "__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    return type(kind.__name__, (kind, Adopted), {**own, "__reduce_ex__": _reduce})


def _namespace(name: str, known: dict[str, Any]) -> dict[str, Any]:
    """A modeling module's globals with our kernels in place of its own.

    They are those of a module that can be imported: torch.compile finds globals by their module's name."""
    name = f"hecate_adopted.{name}"
    while name in sys.modules:  # of another class, or of a module that was imported again
        name += "_"
    module = ModuleType(name)
    own = {key: value for key, value in known.items() if key not in ("__name__", "__spec__", "__loader__")}
    ours = {key: kernel.ours for key, kernel in KERNELS.items() if key in known and kernel.ours is not None}
    module.__dict__.update(own | ours)
    sys.modules[name] = module
    return module.__dict__


def _over(function: Any, namespace: dict[str, Any]) -> Any:
    """A function, and those that decorate it, over other globals at its core."""
    inner = getattr(function, "__wrapped__", None)
    closure, home = function.__closure__, namespace
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


def become(layer: Any, kind: type) -> None:
    """Gives a layer another class, and to what accelerate keeps of its forward that of the class."""
    before = (type(layer).forward, kind.forward)
    layer.__class__ = kind
    for name in ("forward", "_old_forward"):
        if isinstance(kept := layer.__dict__.get(name), MethodType) and kept.__func__ in before:
            layer.__dict__[name] = MethodType(kind.forward, layer)


def document_starts(borders: Tensor | None, numbers: Tensor | None, shape: torch.Size) -> Tensor | None:
    """True `[B, T]` where another document begins in a row, None where none does: by `borders` `[documents + 1]`, tokens
    ahead of each document, or by `numbers` `[B, T]`, that of each token's document."""
    if borders is not None:
        if shape[0] != 1:
            raise ShapeError(f"cu_seq_lens_q packs documents into one row, and there are {shape[0]}")
        starts = torch.zeros(1, shape[1] + 1, dtype=torch.bool, device=borders.device)
        starts[:, borders.long()] = True
        starts = starts[:, :-1]
        starts[:, 0] = False
    elif numbers is not None:
        if numbers.shape != shape:
            raise ShapeError(f"seq_idx must be [B, T] = {list(shape)}, got {list(numbers.shape)}")
        starts = torch.cat([torch.zeros_like(numbers[:, :1], dtype=torch.bool), numbers[:, 1:] != numbers[:, :-1]], 1)
    else:
        return None
    return starts if torch.compiler.is_compiling() or bool(starts.any()) else None


def restarts(given: Mapping[str, Any], shape: torch.Size, *, cached: bool) -> Tensor | None:
    """True `[B, T]` where positions begin again, as the softmax layers of a model see documents; None where none do.

    Raises:
        ConfigError: they begin again in a row that goes on from a cache.
    """
    positions = given.get("position_ids")
    if positions is not None and positions.dim() == 3 and positions.shape[0] == 4:
        positions = positions[0]  # of the text, ahead of those of pictures
    if positions is None or positions.dim() != 2 or positions.shape[1] < 2 or given.get("attention_mask") is not None:
        return None
    if cached and torch.compiler.is_compiling():
        return None
    steps = torch.diff(positions, prepend=positions[:, :1] - 1)
    starts = (steps.le(0) if cached else steps.ne(1)).expand(shape)
    return starts if torch.compiler.is_compiling() or bool(starts.any()) else None
