"""Models of transformers whose layers are delta rules or Mamba-2, on hecate's kernels: `adopt`, and `release` back."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import MethodType
from typing import Any, Literal, NamedTuple, get_args

import torch
import transformers
from torch import Tensor, nn

from hecate.checks import expect_choice
from hecate.engine import EngineName, memory_scan
from hecate.errors import ConfigError
from hecate.hf.adopted import (
    ENGINE,
    KERNELS,
    STARTS,
    Adopted,
    adopted,
    become,
    document_starts,
    official,
    restarts,
    rule_of,
)
from hecate.hf.kernels import RULES
from hecate.rule import Gates

Packed = Literal["positions", "given"]
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


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
        raise TypeError(f"adopt takes a torch module, got a {type(model).__name__}")
    expect_choice(packed, "packed", get_args(Packed))
    found: dict[str, tuple[Any, str]] = {}
    left: dict[str, str] = {}
    for name, module in model.named_modules():
        kind = official(type(module))
        if (why := _foreign(module, kind)) is not None:
            left[name] = why
        elif (rule := rule_of(kind)) is not None:
            found[name] = module, rule
    if not found:
        raise ConfigError(_none_of_ours(model, left))
    for name, (module, rule) in found.items():
        _check_weights(name, module)
        _check_engine(module, rule, engine)
    made = [(module, adopted(official(type(module)))) for module, _ in found.values()]
    for module, kind in made:
        become(module, kind)
        setattr(module, ENGINE, engine)
    leaks = []
    for part in [m for m in model.modules() if isinstance(m, transformers.PreTrainedModel) and any(_decoders(m))]:
        leaks += [] if (leak := _mixes(part)) is None else [leak]
        _unhook(part)
        if packed == "positions" and (leak is not None or any(part is decoder for decoder in _decoders(part))):
            part.register_forward_pre_hook(hand_starts, with_kwargs=True)
    return Adoption({name: rule for name, (_, rule) in found.items()}, left, tuple(leaks))


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
    return len(layers)


def _foreign(module: nn.Module, kind: type) -> str | None:
    """Why a layer that could be one of ours is not, None otherwise."""
    name = kind.__name__
    if name not in _layers().get(kind.__module__.split(".")[-2] if "." in kind.__module__ else "", ()):
        return _not_covered(kind)
    forward = kind.forward
    if inspect.unwrap(forward).__globals__["__name__"] != kind.__module__:
        return f"the forward of its class comes from {inspect.unwrap(forward).__module__}"
    own = module.__dict__.get("_old_forward", module.__dict__.get("forward"))
    if own is None or (isinstance(own, MethodType) and own.__func__ in (forward, type(module).forward)):
        return None
    return f"its forward is that of {getattr(own, '__module__', None) or type(own).__name__}, not of its class"


def _not_covered(kind: type) -> str | None:
    forward = inspect.unwrap(kind.forward) if hasattr(kind, "forward") else None
    names = getattr(getattr(forward, "__code__", None), "co_names", ())
    return "Mamba-1's scan, which no rule of ours is" if "mamba_selective_scan" in names else None


@cache
def _layers() -> dict[str, tuple[str, ...]]:
    """The layers of the installed transformers that take a kernel of ours, by family, read from its sources."""
    scans = [name for name, kernel in KERNELS.items() if kernel.rule is not None]
    found = {}
    for path in sorted(Path(transformers.__file__).parent.glob("models/*/modeling_*.py")):
        text = path.read_text(encoding="utf-8")
        if any(f"def {name}(" in text for name in scans):
            parts = re.split(r"^class (\w+)", text, flags=re.M)[1:]
            own = [name for name, body in zip(parts[::2], parts[1::2], strict=True) if _takes(body, scans)]
            found[path.parent.name] = tuple(own)
    return found


def _takes(body: str, names: list[str]) -> bool:
    return any(re.search(rf"^ .*\b{name}\(", body, re.M) for name in names)


def families() -> tuple[str, ...]:
    """The families of the installed transformers whose layers `adopt` takes."""
    return tuple(_layers())


def _none_of_ours(model: nn.Module, left: dict[str, str]) -> str:
    said = "; ".join(f"{name}: {why}" for name, why in left.items())
    return (
        f"the {type(model).__name__} has no layer to adopt{f' ({said})' if said else ''}; transformers "
        f"{transformers.__version__} has them in {', '.join(families())}"
    )


def _check_weights(name: str, layer: nn.Module) -> None:
    """Refuses a layer whose own weights, which kernels read, are not there or no floating point numbers."""
    for inside, part in (("", layer), ("conv1d.", layer.conv1d)):
        for own, weight in part.named_parameters(recurse=False):
            place = f"{name}.{inside}{own}"
            if weight.is_meta and not hasattr(part, "_hf_hook"):  # accelerate brings what it offloads
                raise ConfigError(f"{place} is on the meta device; load the weights, and adopt the model then")
            if weight.dtype not in _FLOATS:
                raise ConfigError(f"{place} is quantised to {weight.dtype}; adopt reads it as it is, in floats")


def _check_engine(layer: nn.Module, rule: str, engine: str) -> None:
    """Refuses an engine that cannot run a rule, as it would at the first call."""
    if engine == "auto":
        return
    weight = next(layer.parameters())
    tokens = torch.zeros(1, 64, 1, 4, device=weight.device)
    retain = tokens if RULES[rule].retention.channels else tokens[..., 0]
    memory_scan(RULES[rule], tokens, tokens, tokens, Gates(lr=tokens[..., 0], retain=retain), engine=engine)


def _decoders(model: nn.Module) -> Iterator[nn.Module]:
    """The innermost models of transformers that have adopted layers."""
    for module in model.modules():
        if isinstance(module, transformers.PreTrainedModel):
            inner = [m for m in module.modules() if m is not module and isinstance(m, transformers.PreTrainedModel)]
            below = {layer for m in inner for layer in m.modules()}
            if any(isinstance(layer, Adopted) and layer not in below for layer in module.modules()):
                yield module


def _mixes(model: nn.Module) -> str | None:
    """Why documents of a row are mixed by a model of transformers that has adopted layers, None where they are not."""
    name, inner = type(model).__name__, [n for n, child in model.named_children() if any(_decoders(child))]
    if any(model is decoder for decoder in _decoders(model)):
        masks = [call for call in _calls(type(model)) if re.fullmatch(r"create_\w*mask\w*", call.name)]
        softmax = [call for call in masks if call.name != "create_recurrent_attention_mask"]
        kinds = {*(getattr(model.config, "layer_types", None) or ())} - {"linear_attention"}
        attends = bool(softmax) or any("attention" in kind for kind in kinds)
        if attends and not any(call.positions for call in softmax):
            return f"the softmax layers of {name} are not told of documents, and mix them"
    elif not any(call.keywords for call in _calls(type(model)) if call.name in inner):
        return f"{name} does not tell its layers of documents, which mix them; call its {inner[0]}"
    return None


class _Call(NamedTuple):
    name: str
    positions: bool
    keywords: bool


@cache
def _calls(kind: type) -> tuple[_Call, ...]:
    """Calls in a forward: whom by name, if with position_ids, if with keywords that are handed on."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(kind.forward))))
    keys = {item.value for node in ast.walk(tree) if isinstance(node, ast.Dict) for item in node.keys
            if isinstance(item, ast.Constant)}  # fmt: skip
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            handed = any(keyword.arg is None for keyword in node.keywords)
            positions = any(keyword.arg == "position_ids" for keyword in node.keywords)
            found.append(_Call(name, positions or (handed and "position_ids" in keys), handed))
    return tuple(found)


def _unhook(module: nn.Module) -> None:
    for key in [key for key, hook in module._forward_pre_hooks.items() if hook is hand_starts]:
        del module._forward_pre_hooks[key]
        module._forward_pre_hooks_with_kwargs.pop(key, None)


def hand_starts(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
    """A hook ahead of a decoder's forward: where documents begin among the keywords, which its layers hand on."""
    names = tuple(inspect.signature(type(model).forward).parameters)[1:] if args else ()
    given = dict(zip(names, args, strict=False)) | kwargs
    borders, numbers, past = (given.get(name) for name in ("cu_seq_lens_q", "seq_idx", "past_key_values"))
    tokens = given.get("input_ids")
    shape = (given["inputs_embeds"] if tokens is None else tokens).shape[:2]
    if borders is None and numbers is None:
        starts = restarts(given, shape, cached=past is not None)
    else:
        starts = document_starts(borders, numbers, shape)
    if starts is None:
        return None
    if not torch.compiler.is_compiling() and (leak := _mixes(model)) is not None:
        warnings.warn(f"a packed row: {leak}", AdoptionWarning, stacklevel=2)
    kwargs = {**kwargs, STARTS: starts}
    if given.get("position_ids") is None and given.get("attention_mask") is None:
        kwargs["position_ids"] = _positions(starts)
    return args, kwargs


def _positions(starts: Tensor) -> Tensor:
    """`[B, T]`, from 0 in every document: softmax layers keep apart what begins again."""
    places = torch.arange(starts.shape[1], device=starts.device).expand(starts.shape)
    return places - torch.where(starts, places, 0).cummax(1).values
