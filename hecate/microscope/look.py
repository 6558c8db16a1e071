"""Observing a model while it reads: hooks record the calls of its memories, and change nothing."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from hecate.cms import CMS
from hecate.cms.self_referential import Boxes
from hecate.errors import ConfigError, ShapeError, shorten
from hecate.microscope.view import MemoryView, View, in_double, joined_mask
from hecate.nn import LinearAttention, Memory
from hecate.nn.rule import FeatureMemory, ScanArguments
from hecate.rule import Gates, MemoryState
from hecate.train.evaluate import evaluating


def look(
    model: nn.Module,
    x: Tensor,
    *,
    state: Any = None,
    write_mask: Tensor | None = None,
    reset_mask: Tensor | None = None,
    points: int = 64,
) -> View:
    """Records the calls of every memory of a model or layer while it reads x. [SCOPE-LOOK-D1]

        view = look(model, tokens)
        view["blocks.0.memory"].attention.map   # [B, H, T, T]
        view["blocks.0.memory"].save("memory.png")

    The model runs once, in evaluation mode and without gradients, and its mode is restored. The calls of its memories
    are then repeated in float64, so that results show the rule rather than rounding errors.
    Every `nn.Memory` is found wherever it is: alone, as a level of a CMS, beside attention; so are feature memories,
    and the boxes of self-referential ones, with the boxes' targets as values. If a token has several writes, each is
    shown as a token. The sums of a causal `nn.LinearAttention` (also inside `PerformerAttention`) are shown as a memory
    per query head; with positions in the numerator or in a table they are not a memory, and are left out.

    Args:
        model: a model of tokens or a layer of `x [B, T, d_model]`, called as
            `model(x, state, write_mask=..., reset_mask=...)`, with only the masks that are given, and with
            a state (None included) only if it takes one.
        x: the tokens or inputs that it reads.
        state: the state to start from.
        write_mask, reset_mask: bool `[B, T]`.
        points: largest number of moments at which states are analysed, besides the start.

    Raises:
        ConfigError: a model without memories, or none of them was written.
        ShapeError: no tokens.
    """
    model = getattr(model, "_orig_mod", model)  # hooks do not run inside torch.compile's wrapper
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model must be an nn.Module, got {shorten(model)}")
    if type(points) is not int or points < 1:
        raise ConfigError(f"must be an integer of at least 1, got {shorten(points)}", path=("points",))
    names = memory_names(model)
    if not names:
        raise ConfigError(
            f"{type(model).__name__} has no memories to look at: there is no hecate.nn.Memory, CMS or SelfReferential "
            "below it, and no causal LinearAttention with positions outside of a table and of the numerator"
        )
    if not isinstance(x, Tensor):
        raise ShapeError(f"x must be a tensor of tokens, got {shorten(x)}")
    if x.dim() < 2 or 0 in x.shape:
        raise ShapeError(f"there are no tokens to look at: x is {list(x.shape)}")
    masks = {"write_mask": write_mask, "reset_mask": reset_mask}
    arguments = {name: mask for name, mask in masks.items() if mask is not None}
    places = [p for p in inspect.signature(model.forward).parameters.values() if p.kind <= p.VAR_POSITIONAL]
    given = (x,) if state is None and len(places) == 1 else (x, state)  # nn.Sequential takes no state
    calls = _observe(model, names, lambda: model(*given, **arguments))
    if not calls:
        raise ConfigError("no memory was written: write_mask leaves out every token")
    return View({name: MemoryView(name, _scans_of(run), points, unread=run[0].unread) for name, run in calls.items()})


class Call(NamedTuple):
    """One call of one memory: its arguments, the state after it, and the reason if its answers to q are not used."""

    asked: ScanArguments
    after: MemoryState
    unread: str | None = None


def memory_names(model: nn.Module) -> dict[nn.Module, str]:
    """Every memory in a model with its path, in which numbers of levels are replaced by their names."""
    names: dict[nn.Module, str] = {}
    renamed: dict[str, str] = {}
    for path, module in model.named_modules():
        if isinstance(module, CMS):
            for index, level in enumerate(module.config.levels):
                renamed[f"{path}.levels.{index}".lstrip(".")] = f"{path}.{level.name}".lstrip(".")
        linear = isinstance(module, LinearAttention) and module.is_memory
        if linear or isinstance(module, Memory | FeatureMemory | Boxes):
            first = next((old for old in renamed if (path + ".").startswith(old + ".")), None)
            name = path if first is None else renamed[first] + path.removeprefix(first)
            names[module] = name or "memory"
    return names


def _observe(model: nn.Module, names: dict[nn.Module, str], run: Callable[[], Any]) -> dict[str, list[Call]]:
    """Runs a model without gradients, in evaluation mode; returns the calls of its memories, by name.

    Modes and hooks are restored afterwards. [SCOPE-LOOK-I1]
    """
    records: dict[nn.Module, list[tuple[dict[str, Any], Any]]] = {module: [] for module in names}

    def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        bound = inspect.signature(module.forward).bind(*args, **kwargs)
        records[module].append((bound.arguments, output))

    with ExitStack() as undo:
        undo.enter_context(evaluating(model))
        for module in names:
            undo.enter_context(module.register_forward_hook(hook, with_kwargs=True))
        run()
    calls: dict[str, list[Call]] = {}
    with torch.no_grad():
        for module, record in records.items():
            for arguments, output in record:
                for suffix, call in _calls(module, arguments, output):
                    # Calls that write no token, such as reads of memory as context, are left out.
                    write = call.asked.write_mask
                    if call.asked.v.shape[1] and (write is None or bool(write.any())):
                        calls.setdefault(names[module] + suffix, []).append(in_double(call))
    return calls


def _calls(module: nn.Module, arguments: dict[str, Any], output: Any) -> Iterator[tuple[str, Call]]:
    """The calls of memories in a call of a module, each with a suffix for its name."""
    if isinstance(module, Memory):
        asked, unread = module.seen(**arguments)
        if asked.config.writes > 1:
            asked = asked.each_write()
        yield "", Call(asked, output[1].memory, unread)
    elif isinstance(module, LinearAttention):
        asked, unread = module.asked(**arguments), None
        if module.eps:
            unread = f"eps={module.eps:g} is added to the sum of weights"
        elif module.positions.weighs_distance and module.normalizer == "none" and asked.write_mask is not None:
            unread = "a masked token reads the memory decayed once more than it is"
        yield "", Call(asked, module.per_query_head(output[1]), unread)
    elif isinstance(module, FeatureMemory):
        masks = {name: arguments["how"].get(name) for name in ("write_mask", "reset_mask")}
        q, k, gates = arguments["q"], arguments["k"], module.gates(arguments["x"])
        start = {"phi_params": module.phi_params, "initial": module.initial.tensors, "state": arguments["state"]}
        yield "", Call(ScanArguments(module.config, q, k, module.values(k), gates, **start, **masks), output[2])
    elif isinstance(module, Boxes):
        yield from _boxes(module, arguments, output[1])


def _boxes(boxes: Boxes, arguments: dict[str, Any], after: MemoryState) -> Iterator[tuple[str, Call]]:
    """The calls of each box; a box's values are its targets, which the boxes themselves have computed."""
    how, width = arguments["how"], boxes.heads
    if arguments["k"].shape[1] == 0:  # this call only creates the boxes
        return
    for index, (box, v) in enumerate(zip(boxes.written, arguments["targets"], strict=True)):
        heads = slice(index * width, (index + 1) * width)
        state, last = (pytree.tree_map_only(Tensor, lambda x: x[:, heads], item) for item in (how["state"], after))  # noqa: B023
        initial = {name: weight[heads] for name, weight in how["initial"].items()}
        masks = {name: how[name] for name in ("write_mask", "reset_mask")}
        gates, start = Gates(**arguments["gates"]), {"phi_params": boxes.params(), "initial": initial, "state": state}
        call = ScanArguments(boxes.config.memory, arguments["q"], arguments["k"], v, gates, **start, **masks)
        unread = None if box == "memory" else f"box {box!r} is asked what the layer is given, not q"
        yield f".{box}", Call(call, last, unread)


def _scans_of(calls: list[Call]) -> list[ScanArguments]:
    """Calls joined into as few scans as possible: a call that starts in the state in which the previous one ended
    belongs to the same scan."""
    scans: list[list[ScanArguments]] = []
    for index, call in enumerate(calls):
        if index and _goes_on(calls[index - 1], call):
            scans[-1].append(call.asked)
        else:
            scans.append([call.asked])
    return [_join(run) for run in scans]


def _goes_on(last: Call, call: Call) -> bool:
    """True if a call has the previous one's config and starts in the state in which that ended."""
    state = call.asked.state
    if state is None or call.asked.config != last.asked.config:
        return False
    ended, started = (pytree.tree_leaves(item) for item in (last.after, state))
    return len(ended) == len(started) and all(
        a is b or (isinstance(a, Tensor) and isinstance(b, Tensor) and torch.equal(a, b))
        for a, b in zip(ended, started, strict=True)
    )


def _join(run: list[ScanArguments]) -> ScanArguments:
    tokens = ([asked.q, asked.k, asked.v, *asked.gates] for asked in run)
    q, k, v, *gates = (torch.cat(x, 1) if isinstance(x[0], Tensor) else x[0] for x in zip(*tokens, strict=True))
    given = [name for name in ("write_mask", "reset_mask") if any(getattr(asked, name) is not None for asked in run)]
    masks: dict[str, Any] = {name: joined_mask(run, name) for name in given}
    return run[0]._replace(q=q, k=k, v=v, gates=Gates(*gates), **masks)
