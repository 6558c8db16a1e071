"""Running models of transformers with delta-rule or Mamba-2 layers on hecate's kernels: `adopt`, undone by `release`.

A layer of transformers looks up its kernels by name in the globals of its modeling module. The class of an adopted
layer becomes a subclass whose forward is the same code over a copy of these globals, with hecate's kernels in it. Only
the adopted instances change, and only in their class.
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
from hecate.hf.cache import jumps
from hecate.rule import Gates
from hecate.tape import steady

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
"""Dtypes of weights that can be used directly; weights of others are quantised."""
STARTS, ENGINE = "hecate_starts", "hecate_engine"
"""Keywords of hecate's kernels: where documents begin, and the engine, which is also an attribute of the layer."""


class Kernel(NamedTuple):
    """A kernel of transformers: its expected parameters; the rule whose layers use it, None for all; and hecate's
    kernel, None to keep that of transformers."""

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
    "mamba2_split_conv1d_scan_combined": Kernel(  # a whole layer; on None the layer calls the kernels of its parts
        "zxbcdt conv1d_weight conv1d_bias dt_bias A D chunk_size initial_states dt_limit return_final_states "
        "activation rmsnorm_weight rmsnorm_eps outproj_weight outproj_bias headdim ngroups norm_before_gate kwargs",
        "mamba2", lambda *_, **__: None,
    ),
    "mamba2_selective_state_update": Kernel(
        "state hidden_states dt A B C D dt_bias dt_softplus z kwargs", "mamba2", None
    ),
}  # fmt: skip


class Told(nn.Module):
    """Mixin for a layer that gets a mask of where the documents of a row begin."""


class Adopted(Told):
    """Mixin for a layer of transformers that runs hecate's kernels."""


def official(kind: Any) -> Any:
    """The class of transformers that an adopted class was made from; any other class itself."""
    return kind.__mro__[1] if issubclass(kind, Adopted) else kind


def rule_of(kind: Any) -> str | None:
    """The rule that layers of a class run; None if it is not one that can be adopted.

    Raises:
        ConfigError: its kernels are not the expected ones, as in another version of transformers.
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
    """True if an object is a kernel of transformers: a function of its module `hub_kernels`."""
    return getattr(item, "__globals__", {}).get("__name__") == "transformers.integrations.hub_kernels"


def _parameters(function: Callable[..., Any]) -> str:
    return " ".join(inspect.signature(inspect.unwrap(function)).parameters)


@cache
def adopted(kind: Any) -> Any:
    """The class for adopted layers of a class, with the same name."""
    core = _over(kind.forward, _namespace(kind.__module__, inspect.unwrap(kind.forward).__globals__))

    @functools.wraps(kind.forward)
    def forward(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        if steady():
            raise ConfigError(
                "exact and adopt: adopted layers take a token by other kernels than many; release the model"
            )
        given = {name: kwargs.pop(name, None) for name in (STARTS, *PACKING)}
        starts = starts_in(given, hidden_states, kwargs.get("cache_params", args[0] if args else None))
        return core(self, hidden_states, *args, **{STARTS: starts, ENGINE: self.hecate_engine}, **kwargs)

    attributes = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(kind.__name__, (kind, Adopted), {**attributes, "forward": forward, "__reduce_ex__": _reduce})


def _namespace(name: str, known: dict[str, Any]) -> dict[str, Any]:
    """A copy of a modeling module's globals with hecate's kernels in it.

    It belongs to a module that can be imported, because torch.compile looks globals up by the module's name."""
    name = f"hecate_adopted.{name}"
    while name in sys.modules:  # the name is taken by another class, or by a module that was imported again
        name += "_"
    module = sys.modules[name] = ModuleType(name)
    theirs = {key: value for key, value in known.items() if key not in ("__name__", "__spec__", "__loader__")}
    module.__dict__.update(theirs | {key: ours for key, (_, _, ours) in KERNELS.items() if key in known and ours})
    return module.__dict__


def _over(function: Any, namespace: dict[str, Any]) -> Any:
    """A copy of a function, decorators included, in which the innermost function has other globals."""
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
    """Changes a layer's class, and the bound forward that accelerate may have stored in it."""
    before, layer.__class__ = type(layer).forward, kind
    for name in ("forward", "_old_forward"):
        if isinstance(method := layer.__dict__.get(name), MethodType) and method.__func__ is before:
            layer.__dict__[name] = MethodType(kind.forward, layer)


# Documents in a row.

PACKING = ("cu_seq_lens_q", "seq_idx")
"""Keywords that say where documents begin: the number of tokens before each document; each token's document number."""
CACHED = (
    "a row of several documents cannot fill a cache or go on from one: the next token belongs to the last document "
    "alone; set use_cache=False, or give the documents in rows of their own"
)


def called_with(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[dict[str, Any], Tensor]:
    """The arguments of a call of a model by name, and its tokens or embeddings `[B, T, ...]`."""
    names = tuple(inspect.signature(type(model).forward).parameters)[1:] if args else ()
    arguments = dict(zip(names, args, strict=False)) | kwargs
    tokens = arguments.get("input_ids")
    return arguments, arguments["inputs_embeds"] if tokens is None else tokens


def document_starts(arguments: Mapping[str, Any], tokens: Tensor) -> Tensor | None:
    """Mask `[B, T]`, True where another document begins in a row; None if none does.

    Documents are given by `PACKING`, or as for softmax layers by position_ids without attention_mask. `tokens` is `[B,
    T, ...]`.

    Raises:
        ConfigError: positions start again in a row that continues a cache.
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
        positions = positions[0]  # positions of the text; the others are those of images
    past = arguments.get("past_key_values") if numbers is None and borders is None else None
    if past is not None and positions is not None and not torch.compiler.is_compiling():
        if positions.dim() == 2 and bool(torch.diff(positions).le(0).any()):
            raise ConfigError(CACHED)
    how = {"cu_seq_lens_q": borders, "position_ids": positions, "past_key_values": past}
    return starts_of_documents(how, tokens)


def starts_of_documents(arguments: dict[str, Any], tokens: Tensor) -> Tensor | None:
    """Mask of where documents start, from the arguments that attention uses; None if there is only one document."""
    (rows, count), device = tokens.shape[:2], tokens.device
    ends, position = arguments.get("cu_seq_lens_q"), arguments.get("position_ids")
    if ends is not None:
        starts = torch.zeros(rows * count + 1, dtype=torch.bool, device=device)
        starts[ends.to(device).long()] = True
        starts = starts[:-1].reshape(rows, count)
    elif arguments.get("past_key_values") is None and position is not None and position.dim() == 2 and count > 1:
        starts = jumps(position).expand(rows, -1).to(device)
    else:
        return None
    return starts if torch.compiler.is_compiling() or bool(starts[:, 1:].any()) else None


def starts_in(keywords: dict[str, Any], x: Tensor, past: Any) -> Tensor | None:
    """`document_starts` from a layer's keywords in transformers; refuses documents in a cached row."""
    starts = keywords.get(STARTS)
    if starts is None:
        starts = document_starts({name: keywords.get(name) for name in PACKING}, x)
    if starts is not None and past is not None:
        raise ConfigError(CACHED)
    return starts


def masks_of(x: Tensor, attention_mask: Tensor | None, keywords: dict[str, Any], past: Any) -> dict[str, Tensor | None]:
    """Masks for x `[B, T, d_model]` from a layer's arguments in transformers; refuses documents in a cached row."""
    written = None if attention_mask is None else attention_mask[:, -x.shape[1] :].bool()
    return {"write_mask": written, "reset_mask": starts_in(keywords, x, past)}


# Adoption.

Packed = Literal["positions", "given"]


class AdoptionWarning(UserWarning):
    """A part of an adopted model still mixes the documents of a packed row."""


def layers_run(names: Sequence[str], what: str) -> str:
    """A line of a report: `3 layers run WHAT: first ... last`."""
    if len(names) == 1:
        return f"1 layer runs {what}: {names[0]}"
    return f"{len(names)} layers run {what}: {names[0]} ... {names[-1]}"


class Adoption(NamedTuple):
    """The report of `adopt`; `str` gives a readable text.

    Fields:
        adopted: the rule of every layer that runs hecate's kernels, by the layer's name.
        left: reasons why layers that look adoptable were not adopted, by name.
        leaks: parts of the model that mix packed documents, whatever the other layers do.
    """

    adopted: dict[str, str]
    left: dict[str, str]
    leaks: tuple[str, ...]

    def __str__(self) -> str:
        of_rule = {rule: [n for n, kind in self.adopted.items() if kind == rule] for rule in self.adopted.values()}
        lines = [layers_run(names, rule) for rule, names in of_rule.items()]
        lines += [f"left as it is: {name} ({why})" for name, why in self.left.items()]
        return "\n".join(lines + [f"packed rows: {leak}" for leak in self.leaks])


def adopt(model: Any, *, engine: EngineName = "auto", packed: Packed = "positions") -> Adoption:
    """Runs the linear layers of a model of transformers on hecate's kernels, in place; the report says which.

        model = AutoModelForCausalLM.from_pretrained(folder)
        print(hecate.hf.adopt(model))

    Adopts layers of the gated delta rule, KDA and Mamba-2, in any family of transformers. The model computes the same
    function up to rounding; names, `generate`, caches, checkpointing, LoRA and `save_pretrained` stay the same, and
    other models of the process are unaffected. [HF-ADOPT-D1] Documents packed into one row are kept apart, which
    transformers does not do on a CPU; they are given by `cu_seq_lens_q` or `seq_idx`, or by positions. [HF-ADOPT-D2] An
    adopted model can be adopted again, with other arguments.

    Args:
        model: on its device, with its weights; it may be wrapped by peft or dispatched by accelerate.
        engine: engine of sequences, as in `memory_scan`; a single token after a cache has its own kernels.
        packed: "positions" treats a row whose `position_ids` start again, without attention_mask and cache, as several
            documents, as the softmax layers do, and adds position_ids to calls that only give documents by keywords;
            "given" only uses `cu_seq_lens_q` and `seq_idx`, and ignores positions.

    Raises:
        TypeError: `model` is not a torch module.
        ConfigError: no such layer; kernels of transformers other than the known ones; layers without weights or with
            quantised ones; an engine that cannot run a rule. The model is then unchanged.

    Warns (`AdoptionWarning`) at a packed row of a model whose softmax layers are not told where documents begin.
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
        cure = f"transformers {transformers.__version__} has them in {', '.join(families())}"
        raise ConfigError(f"the {type(model).__name__} has no layer to adopt{f' ({said})' if said else ''}; {cure}")
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
    """Gives every adopted layer its original class back, so that results are again the same bits; returns the number of
    layers. [HF-ADOPT-I1]"""
    if not isinstance(model, nn.Module):
        raise TypeError(f"release takes a torch module, got a {type(model).__name__}")
    layers = [module for module in model.modules() if isinstance(module, Adopted)]
    for module in model.modules():
        _unhook(module)
    for layer in layers:
        become(layer, official(type(layer)))
        delattr(layer, ENGINE)
    hook_models(model)  # upgraded layers still need the hooks
    return len(layers)


def _foreign(module: Any, kind: Any) -> str | None:
    """Reason why a layer that looks adoptable cannot be adopted; None if there is no such reason."""
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
    """The families of the installed transformers with adoptable layers, found in its sources."""
    paths = Path(transformers.__file__).parent.glob("models/*/modeling_*.py")
    return tuple(sorted(path.parent.name for path in paths if _takes_a_kernel(path.read_text(encoding="utf-8"))))


def _check_weights(name: str, layer: Any) -> None:
    """Refuses a layer if weights that the kernels read are missing or not in floating point."""
    for inside, part in (("", layer), ("conv1d.", layer.conv1d)):
        for field, weight in part.named_parameters(recurse=False):
            place = f"{name}.{inside}{field}"
            if weight.is_meta and not hasattr(part, "_hf_hook"):  # accelerate loads offloaded weights when needed
                raise ConfigError(f"{place} is on the meta device; load the weights, and adopt the model then")
            if weight.dtype not in FLOATS:
                raise ConfigError(f"{place} is quantised to {weight.dtype}; adopt reads it as it is, in floats")


def _check_engine(layer: nn.Module, rule: str, engine: EngineName) -> None:
    """Refuses an engine that cannot run a rule, with the error of the first call."""
    if engine != "auto":
        tokens = torch.zeros(1, 64, 1, 4, device=next(layer.parameters()).device)
        retain = tokens if rule == "kda" else tokens[..., 0]
        memory_scan(kernels.RULES[rule], tokens, tokens, tokens, Gates(lr=tokens[..., 0], retain=retain), engine=engine)


# Rows of several documents.


def _models(module: nn.Module) -> list[Any]:
    """The models of transformers in a module that have adopted or hosted layers, outermost first."""
    models = [part for part in module.modules() if isinstance(part, transformers.PreTrainedModel)]
    return [part for part in models if any(isinstance(layer, Told) for layer in part.modules())]


def hook_models(model: nn.Module, packed: Packed = "positions") -> dict[Any, str | None]:
    """Registers hooks on the models of transformers in a module that pass the starts of documents to their layers;
    returns the reason why each model mixes documents, or None."""
    leaks = {part: _mixes(part) for part in _models(model)}
    for part, leak in leaks.items():
        _unhook(part)
        if packed == "positions" and (leak is not None or not _inner(part)):
            part.register_forward_pre_hook(hand_starts, with_kwargs=True)
    return leaks


def _inner(model: nn.Module) -> list[str]:
    """The children of a model that contain another model with such layers."""
    return [name for name, child in model.named_children() if _models(child)]


def _mixes(model: Any) -> str | None:
    """Reason why a model of transformers with adopted layers mixes the documents of a row; None if it does not."""
    name, inner = type(model).__name__, _inner(model)
    source = inspect.getsource(inspect.unwrap(type(model).forward))
    if inner:  # the pattern matches a call of the inner model that passes **kwargs on; arguments may contain calls
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
    """Pre-forward hook of a model: adds the mask of where documents begin to the keywords, which are passed on to its
    layers; and, if only `PACKING` is given, position_ids that start again in each document, for softmax layers."""
    arguments, tokens = called_with(model, args, kwargs)
    if (starts := document_starts(arguments, tokens)) is None:
        return None
    if not torch.compiler.is_compiling() and (leak := _mixes(model)) is not None:
        warnings.warn(f"a packed row: {leak}", AdoptionWarning, stacklevel=2)
    kwargs = {**kwargs, STARTS: starts}
    if arguments.get("position_ids") is None and arguments.get("attention_mask") is None:
        kwargs["position_ids"] = places_of(starts)
    return args, kwargs
