"""Models of transformers whose layers are delta rules or Mamba-2, on hecate's kernels: `adopt`, and `release` back.

A layer of transformers takes its kernels by name from the globals of its modeling module. An adopted one has a subclass
of its class whose forward is the same code over a copy of these globals in which the kernels are ours; instances get it
one by one, and everything else of theirs stays.
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any, Literal, NamedTuple, get_args

import torch
import transformers
from torch import Tensor, nn

from hecate.checks import expect_choice
from hecate.data import places_of
from hecate.engine import EngineName, memory_scan
from hecate.errors import ConfigError, ShapeError
from hecate.hf import kernels
from hecate.rule import Gates
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


class Told(nn.Module):
    """Mixin for a layer that is told where the documents of a row begin."""


class Adopted(Told):
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

    attributes = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(kind.__name__, (kind, Adopted), {**attributes, "forward": forward, "__reduce_ex__": _reduce})


def _namespace(name: str, known: dict[str, Any]) -> dict[str, Any]:
    """A modeling module's globals with our kernels in place of its own.

    They are those of a module that can be imported: torch.compile finds globals by their module's name."""
    name = f"hecate_adopted.{name}"
    while name in sys.modules:  # of another class, or of a module that was imported again
        name += "_"
    module = sys.modules[name] = ModuleType(name)
    theirs = {key: value for key, value in known.items() if key not in ("__name__", "__spec__", "__loader__")}
    module.__dict__.update(theirs | {key: ours for key, (_, _, ours) in KERNELS.items() if key in known and ours})
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
    layer_class = adopted(kind)
    return layer_class.__new__(layer_class)


def _reduce(self: Any, _: Any) -> tuple[Any, ...]:
    return _rebuilt, (official(type(self)),), self.__dict__


def become(layer: Any, kind: Any) -> None:
    """Gives a layer another class, and to what accelerate keeps of its forward that of the class."""
    before, layer.__class__ = type(layer).forward, kind
    for name in ("forward", "_old_forward"):
        if isinstance(method := layer.__dict__.get(name), MethodType) and method.__func__ is before:
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
    arguments = dict(zip(names, args, strict=False)) | kwargs
    tokens = arguments.get("input_ids")
    return arguments, arguments["inputs_embeds"] if tokens is None else tokens


def document_starts(arguments: Mapping[str, Any], tokens: Tensor) -> Tensor | None:
    """True `[B, T]` where another document begins in a row, None where none does.

    By `PACKING` or, as softmax layers go, by position_ids without attention_mask. `tokens` is `[B, T, ...]`.

    Raises:
        ConfigError: positions begin again in a row that goes on from a cache.
        ShapeError: cu_seq_lens_q of several rows, or seq_idx of another shape.
    """
    (rows, count), (borders, numbers) = tokens.shape[:2], [arguments.get(name) for name in PACKING]
    positions = arguments.get("position_ids")
    if borders is None and numbers is None and (positions is None or arguments.get("attention_mask") is not None):
        return None
    if borders is not None and rows != 1:
        raise ShapeError(f"cu_seq_lens_q packs documents into one row, and there are {rows}")
    if borders is None and numbers is not None:
        if numbers.shape != tokens.shape[:2]:
            raise ShapeError(f"seq_idx must be [B, T] = {[rows, count]}, got {list(numbers.shape)}")
        positions = torch.diff(numbers, prepend=numbers[:, :1]).eq(0).long().cumsum(1)  # steps of 1 within a document
    elif positions is not None and positions.dim() == 3 and positions.shape[0] == 4:
        positions = positions[0]  # of the text, ahead of those of pictures
    past = arguments.get("past_key_values") if numbers is None and borders is None else None
    if past is not None and positions is not None and not torch.compiler.is_compiling():
        if positions.dim() == 2 and bool(torch.diff(positions).le(0).any()):
            raise ConfigError(CACHED)
    how = {"cu_seq_lens_q": borders, "position_ids": positions, "past_key_values": past}
    return starts_of_documents(how, rows, count, tokens.device)


def starts_of_documents(arguments: dict[str, Any], rows: int, count: int, device: torch.device) -> Tensor | None:
    """Starts of other documents, as attention is told them, if there are any."""
    ends, position = arguments.get("cu_seq_lens_q"), arguments.get("position_ids")
    if ends is not None:
        starts = torch.zeros(rows * count + 1, dtype=torch.bool, device=device)
        starts[ends.to(device).long()] = True
        starts = starts[:-1].reshape(rows, count)
    elif arguments.get("past_key_values") is None and position is not None and position.dim() == 2 and count > 1:
        starts = torch.diff(position, prepend=position[:, :1] - 1).ne(1).expand(rows, -1).to(device)
    else:
        return None
    return starts if torch.compiler.is_compiling() or bool(starts[:, 1:].any()) else None


def masks_of(x: Tensor, attention_mask: Tensor | None, keywords: dict[str, Any], past: Any) -> dict[str, Tensor | None]:
    """Masks of x `[B, T, d_model]` by what transformers tells a layer; refuses documents in a cached row."""
    starts = keywords.get(STARTS)
    if starts is None:
        starts = document_starts({name: keywords.get(name) for name in PACKING}, x)
    if starts is not None and past is not None:
        raise ConfigError(CACHED)
    written = None if attention_mask is None else attention_mask[:, -x.shape[1] :].bool()
    return {"write_mask": written, "reset_mask": starts}


# Adoption.

Packed = Literal["positions", "given"]


class AdoptionWarning(UserWarning):
    """A part of an adopted model that goes on mixing the documents of a packed row."""


def layers_run(names: Sequence[str], what: str) -> str:
    """A line of a report: `3 layers run WHAT: first ... last`."""
    if len(names) == 1:
        return f"1 layer runs {what}: {names[0]}"
    return f"{len(names)} layers run {what}: {names[0]} ... {names[-1]}"


class Adoption(NamedTuple):
    """The report of `adopt`: `str` of it is for people.

    Fields:
        adopted: the rule of every layer that runs hecate's kernels, by the layer's name.
        left: why a layer that might was left as it is, by its name.
        leaks: parts of the model to which packed documents are one row, whatever its other layers do.
    """

    adopted: dict[str, str]
    left: dict[str, str]
    leaks: tuple[str, ...]

    def __str__(self) -> str:
        lines = []
        for rule in dict.fromkeys(self.adopted.values()):
            names = [name for name, kind in self.adopted.items() if kind == rule]
            lines.append(layers_run(names, rule))
        lines += [f"left as it is: {name} ({why})" for name, why in self.left.items()]
        return "\n".join(lines + [f"packed rows: {leak}" for leak in self.leaks])


def adopt(model: Any, *, engine: EngineName = "auto", packed: Packed = "positions") -> Adoption:
    """Runs the linear layers of a model of transformers on hecate's kernels, in place; the report says which.

        model = AutoModelForCausalLM.from_pretrained(folder)
        print(hecate.hf.adopt(model))

    Layers of the gated delta rule, KDA and Mamba-2, in whatever family transformers has them. The function stays what
    it was within rounding, and so do names, `generate`, caches, checkpointing, LoRA and `save_pretrained`; other
    models of the process are not touched. [HF-ADOPT-D1] Documents packed into one row are kept apart, which
    transformers does not do on a CPU: told by `cu_seq_lens_q` or `seq_idx`, or by positions. [HF-ADOPT-D2] A model that
    is adopted can be adopted again, with other arguments.

    Args:
        model: on its device, with its weights; it may be wrapped by peft or dispatched by accelerate.
        engine: of sequences, as in `memory_scan`; a token that follows a cache takes a step of its own.
        packed: "positions" takes a row whose `position_ids` begin again, without attention_mask and cache, for several
            documents, as the softmax layers do, and gives the positions of documents to a call without; "given" only
            goes by `cu_seq_lens_q` and `seq_idx`, and looks at no position.

    Raises:
        TypeError: `model` is no torch module.
        ConfigError: no such layer; kernels of transformers that are not those known; layers without weights or with
            quantised ones; an engine that cannot run a rule. The model is then as it was.

    Warns (`AdoptionWarning`) at a packed row of a model whose softmax layers are not told of documents.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"adopt takes a torch module, got a {type(model).__name__}; from_pretrained gives one")
    expect_choice(packed, "packed", get_args(Packed))
    layers: dict[str, tuple[Any, str]] = {}
    skipped: dict[str, str] = {}
    for name, module in model.named_modules():
        if (why := _foreign(module, official(type(module)))) is not None:
            skipped[name] = why
        elif (rule := rule_of(official(type(module)))) is not None:
            layers[name] = module, rule
    if not layers:
        said = "; ".join(f"{name}: {why}" for name, why in skipped.items())
        raise ConfigError(
            f"the {type(model).__name__} has no layer to adopt{f' ({said})' if said else ''}; transformers "
            f"{transformers.__version__} has them in {', '.join(families())}"
        )
    for name, (module, rule) in layers.items():
        _check_weights(name, module)
        _check_engine(module, rule, engine)
    pairs = [(module, adopted(official(type(module)))) for module, _ in layers.values()]
    for module, kind in pairs:
        become(module, kind)
        setattr(module, ENGINE, engine)
    leaks = hook_models(model, packed)
    rules = {name: rule for name, (_, rule) in layers.items()}
    return Adoption(rules, skipped, tuple(leak for leak in leaks.values() if leak is not None))


def release(model: Any) -> int:
    """Gives every adopted layer its own class back, to the bit; how many there were. [HF-ADOPT-I1]"""
    if not isinstance(model, nn.Module):
        raise TypeError(f"release takes a torch module, got a {type(model).__name__}")
    layers = [module for module in model.modules() if isinstance(module, Adopted)]
    for module in model.modules():
        _unhook(module)
    for layer in layers:
        become(layer, official(type(layer)))
        delattr(layer, ENGINE)
    hook_models(model)  # of layers that were upgraded
    return len(layers)


def _foreign(module: Any, kind: Any) -> str | None:
    """Reason why a layer that might be one of ours is left, None where nothing speaks against it."""
    forward = inspect.unwrap(getattr(kind, "forward", None))  # type: ignore[arg-type]
    if "mamba_selective_scan" in getattr(getattr(forward, "__code__", None), "co_names", ()):
        return "Mamba-1's scan, which no rule of ours is"
    patch = module.__dict__.get("_old_forward", module.__dict__.get("forward"))
    if isinstance(patch, MethodType) and patch.__func__ in (kind.forward, type(module).forward):
        patch = None
    here = isinstance(forward, FunctionType) and forward.__globals__["__name__"] == kind.__module__
    if (patch is None and here) or not re.fullmatch(r"transformers\.models\.\w+\.modeling_\w+", kind.__module__):
        return None
    if kind.__module__.split(".")[2] not in families() or not _takes_a_kernel(inspect.getsource(kind)):
        return None
    if not here:
        return f"the forward of its class comes from {forward.__module__}"
    return f"its forward is that of {getattr(patch, '__module__', None) or type(patch).__name__}, not of its class"


def _takes_a_kernel(source: str) -> bool:
    return any(f" {name}(" in source for name, kernel in KERNELS.items() if kernel.rule is not None)


@cache
def families() -> tuple[str, ...]:
    """The families of the installed transformers whose layers take kernels of ours, by its sources."""
    paths = Path(transformers.__file__).parent.glob("models/*/modeling_*.py")
    return tuple(sorted(path.parent.name for path in paths if _takes_a_kernel(path.read_text(encoding="utf-8"))))


def _check_weights(name: str, layer: Any) -> None:
    """Refuses a layer whose own weights, which kernels read, are not there or no floating point numbers."""
    for inside, part in (("", layer), ("conv1d.", layer.conv1d)):
        for field, weight in part.named_parameters(recurse=False):
            place = f"{name}.{inside}{field}"
            if weight.is_meta and not hasattr(part, "_hf_hook"):  # accelerate brings what it offloads
                raise ConfigError(f"{place} is on the meta device; load the weights, and adopt the model then")
            if weight.dtype not in FLOATS:
                raise ConfigError(f"{place} is quantised to {weight.dtype}; adopt reads it as it is, in floats")


def _check_engine(layer: nn.Module, rule: str, engine: EngineName) -> None:
    """Refuses an engine that cannot run a rule, as it would at the first call."""
    if engine != "auto":
        tokens = torch.zeros(1, 64, 1, 4, device=next(layer.parameters()).device)
        retain = tokens if rule == "kda" else tokens[..., 0]
        memory_scan(kernels.RULES[rule], tokens, tokens, tokens, Gates(lr=tokens[..., 0], retain=retain), engine=engine)


# Packed rows.


def _models(module: nn.Module) -> list[Any]:
    """The models of transformers in a module that have layers of ours, the outermost first."""
    models = [part for part in module.modules() if isinstance(part, transformers.PreTrainedModel)]
    return [part for part in models if any(isinstance(layer, Told) for layer in part.modules())]


def hook_models(model: nn.Module, packed: Packed = "positions") -> dict[Any, str | None]:
    """Lets the models of transformers in a module tell their layers of documents; why each mixes them, if it does."""
    leaks = {part: _mixes(part) for part in _models(model)}
    for part, leak in leaks.items():
        _unhook(part)
        if packed == "positions" and (leak is not None or not _inner(part)):
            part.register_forward_pre_hook(hand_starts, with_kwargs=True)
    return leaks


def _inner(model: nn.Module) -> list[str]:
    """The children of a model in which its layers have a model of their own."""
    return [name for name, child in model.named_children() if _models(child)]


def _mixes(model: Any) -> str | None:
    """Reason why documents of a row are mixed by a model of transformers that has adopted layers, None where they are
    not."""
    name, inner = type(model).__name__, _inner(model)
    source = inspect.getsource(inspect.unwrap(type(model).forward))
    if inner:  # arguments of a call, with calls among them
        hands = re.search(rf"self\.(?:{'|'.join(inner)})\((?:[^()]|\([^()]*\))*\*\*\w", source)
        return None if hands else f"{name} does not tell its layers of documents, which mix them; call its {inner[0]}"
    masks = re.search(r"create_(?!recurrent)\w*mask\w*\(", source)
    kinds = {*(getattr(model.config, "layer_types", None) or ())} - {"linear_attention"}
    attends = masks is not None or any("attention" in kind for kind in kinds)
    informed = masks is not None and re.search(r'"position_ids":|mask\w*\([^()]*position_ids=', source)
    return f"the softmax layers of {name} are not told of documents, and mix them" if attends and not informed else None


def _unhook(module: nn.Module) -> None:
    for key in [key for key, hook in module._forward_pre_hooks.items() if hook is hand_starts]:
        del module._forward_pre_hooks[key]
        module._forward_pre_hooks_with_kwargs.pop(key, None)


def hand_starts(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
    """A hook ahead of a model's forward: where documents begin among the keywords, which its layers hand on; and, where
    only `PACKING` says so, positions that begin again with each, by which softmax layers go."""
    arguments, tokens = called_with(model, args, kwargs)
    if (starts := document_starts(arguments, tokens)) is None:
        return None
    if not torch.compiler.is_compiling() and (leak := _mixes(model)) is not None:
        warnings.warn(f"a packed row: {leak}", AdoptionWarning, stacklevel=2)
    kwargs = {**kwargs, STARTS: starts}
    if arguments.get("position_ids") is None and arguments.get("attention_mask") is None:
        kwargs["position_ids"] = places_of(starts)
    return args, kwargs
