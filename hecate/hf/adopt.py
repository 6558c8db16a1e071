"""Models of transformers whose layers are delta rules or Mamba-2, on hecate's kernels: `adopt`, and `release` back."""

from __future__ import annotations

import inspect
import re
import warnings
from functools import cache
from pathlib import Path
from types import FunctionType, MethodType
from typing import Any, Literal, NamedTuple, get_args

import torch
import transformers
from torch import nn

from hecate.checks import expect_choice
from hecate.data import places_of
from hecate.engine import EngineName, memory_scan
from hecate.errors import ConfigError
from hecate.hf.adopted import (
    ENGINE,
    FLOATS,
    KERNELS,
    STARTS,
    Adopted,
    adopted,
    become,
    called_with,
    document_starts,
    official,
    rule_of,
)
from hecate.hf.hosted import Hosted
from hecate.hf.kernels import RULES
from hecate.rule import Gates

Packed = Literal["positions", "given"]


class AdoptionWarning(UserWarning):
    """A part of an adopted model that goes on mixing the documents of a packed row."""


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
            names = [name for name, own in self.adopted.items() if own == rule]
            many = names[0] if len(names) == 1 else f"{names[0]} ... {names[-1]}"
            lines.append(f"{len(names)} {'layer runs' if len(names) == 1 else 'layers run'} {rule}: {many}")
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
    found: dict[str, tuple[Any, str]] = {}
    left: dict[str, str] = {}
    for name, module in model.named_modules():
        if (why := _foreign(module, official(type(module)))) is not None:
            left[name] = why
        elif (rule := rule_of(official(type(module)))) is not None:
            found[name] = module, rule
    if not found:
        said = "; ".join(f"{name}: {why}" for name, why in left.items())
        raise ConfigError(
            f"the {type(model).__name__} has no layer to adopt{f' ({said})' if said else ''}; transformers "
            f"{transformers.__version__} has them in {', '.join(families())}"
        )
    for name, (module, rule) in found.items():
        _check_weights(name, module)
        _check_engine(module, rule, engine)
    made = [(module, adopted(official(type(module)))) for module, _ in found.values()]
    for module, kind in made:
        become(module, kind)
        setattr(module, ENGINE, engine)
    leaks = hook_models(model, packed)
    rules = {name: rule for name, (_, rule) in found.items()}
    return Adoption(rules, left, tuple(leak for leak in leaks.values() if leak is not None))


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
    """Why a layer that might be one of ours is left, None where nothing speaks against it."""
    forward = inspect.unwrap(getattr(kind, "forward", None))  # type: ignore[arg-type]
    if "mamba_selective_scan" in getattr(getattr(forward, "__code__", None), "co_names", ()):
        return "Mamba-1's scan, which no rule of ours is"
    own = module.__dict__.get("_old_forward", module.__dict__.get("forward"))
    if isinstance(own, MethodType) and own.__func__ in (kind.forward, type(module).forward):
        own = None
    here = isinstance(forward, FunctionType) and forward.__globals__["__name__"] == kind.__module__
    if (own is None and here) or not re.fullmatch(r"transformers\.models\.\w+\.modeling_\w+", kind.__module__):
        return None
    if kind.__module__.split(".")[2] not in families() or not _takes_a_kernel(inspect.getsource(kind)):
        return None
    if not here:
        return f"the forward of its class comes from {forward.__module__}"
    return f"its forward is that of {getattr(own, '__module__', None) or type(own).__name__}, not of its class"


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
        for own, weight in part.named_parameters(recurse=False):
            place = f"{name}.{inside}{own}"
            if weight.is_meta and not hasattr(part, "_hf_hook"):  # accelerate brings what it offloads
                raise ConfigError(f"{place} is on the meta device; load the weights, and adopt the model then")
            if weight.dtype not in FLOATS:
                raise ConfigError(f"{place} is quantised to {weight.dtype}; adopt reads it as it is, in floats")


def _check_engine(layer: nn.Module, rule: str, engine: EngineName) -> None:
    """Refuses an engine that cannot run a rule, as it would at the first call."""
    if engine != "auto":
        tokens = torch.zeros(1, 64, 1, 4, device=next(layer.parameters()).device)
        retain = tokens if rule == "kda" else tokens[..., 0]
        memory_scan(RULES[rule], tokens, tokens, tokens, Gates(lr=tokens[..., 0], retain=retain), engine=engine)


# Packed rows.


def _models(module: nn.Module) -> list[Any]:
    """The models of transformers in a module that have layers of ours, the outermost first."""
    own = [part for part in module.modules() if isinstance(part, transformers.PreTrainedModel)]
    return [part for part in own if any(isinstance(layer, (Adopted, Hosted)) for layer in part.modules())]


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
    """Why documents of a row are mixed by a model of transformers that has adopted layers, None where they are not."""
    name, inner = type(model).__name__, _inner(model)
    source = inspect.getsource(inspect.unwrap(type(model).forward))
    if inner:  # arguments of a call, with calls among them
        hands = re.search(rf"self\.(?:{'|'.join(inner)})\((?:[^()]|\([^()]*\))*\*\*\w", source)
        return None if hands else f"{name} does not tell its layers of documents, which mix them; call its {inner[0]}"
    masks = re.search(r"create_(?!recurrent)\w*mask\w*\(", source)
    kinds = {*(getattr(model.config, "layer_types", None) or ())} - {"linear_attention"}
    attends = masks is not None or any("attention" in kind for kind in kinds)
    told = masks is not None and re.search(r'"position_ids":|mask\w*\([^()]*position_ids=', source)
    return f"the softmax layers of {name} are not told of documents, and mix them" if attends and not told else None


def _unhook(module: nn.Module) -> None:
    for key in [key for key, hook in module._forward_pre_hooks.items() if hook is hand_starts]:
        del module._forward_pre_hooks[key]
        module._forward_pre_hooks_with_kwargs.pop(key, None)


def hand_starts(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
    """A hook ahead of a model's forward: where documents begin among the keywords, which its layers hand on; and, where
    only `PACKING` says so, positions that begin again with each, by which softmax layers go."""
    given, tokens = called_with(model, args, kwargs)
    if (starts := document_starts(given, tokens)) is None:
        return None
    if not torch.compiler.is_compiling() and (leak := _mixes(model)) is not None:
        warnings.warn(f"a packed row: {leak}", AdoptionWarning, stacklevel=2)
    kwargs = {**kwargs, STARTS: starts}
    if given.get("position_ids") is None and given.get("attention_mask") is None:
        kwargs["position_ids"] = places_of(starts)
    return args, kwargs
