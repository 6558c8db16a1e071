"""What a model asks of its memories while it runs: hooks see, and change nothing."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from hecate.cms import CMS
from hecate.cms.self_reference import Boxes
from hecate.microscope.linear import asked_of, is_memory, state_of
from hecate.nn import LinearAttention, Memory
from hecate.nn.asked import Asked
from hecate.nn.feature_memory import FeatureMemory
from hecate.rule import Gates, MemoryState

Tree = TypeVar("Tree")


class Call(NamedTuple):
    """One call of one memory.

    Fields:
        asked: what it was asked.
        after: its state after the last token.
        unread: why its answers to q are not used; None if they are.
    """

    asked: Asked
    after: MemoryState
    unread: str | None = None


class _Seen(NamedTuple):
    """A module's call as a hook sees it."""

    module: nn.Module
    given: dict[str, Any]
    output: Any


def observed(model: nn.Module, run: Callable[[], Any]) -> dict[str, list[Call]]:
    """Runs a model without gradients, in evaluation mode; the calls of its memories by name.

    Modes and hooks are afterwards as they were. [SCOPE-LOOK-I1]
    """
    names = memory_names(model)
    seen: dict[str, list[_Seen]] = {name: [] for name in names.values()}

    def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        bound = inspect.signature(module.forward).bind(*args, **kwargs)
        seen[names[module]].append(_Seen(module, bound.arguments, output))

    modes = {module: module.training for module in model.modules()}
    handles = [module.register_forward_hook(hook, with_kwargs=True) for module in names]
    try:
        model.eval()
        with torch.no_grad():
            run()
    finally:
        for handle in handles:
            handle.remove()
        for module, training in modes.items():
            module.training = training
    calls: dict[str, list[Call]] = {}
    with torch.no_grad():
        for name, found in seen.items():
            for item in found:
                for part, call in _calls(item):
                    if not _idle(call.asked):
                        calls.setdefault(name + part, []).append(in_double(call))
    return calls


def memory_names(model: nn.Module) -> dict[nn.Module, str]:
    """Every memory below a model with its path; a level's number gives way to its name."""
    names: dict[nn.Module, str] = {}
    renamed: dict[str, str] = {}
    for path, module in model.named_modules():
        if isinstance(module, CMS):
            for index, level in enumerate(module.config.levels):
                renamed[_joined(path, f"levels.{index}")] = _joined(path, level.name)
        linear = isinstance(module, LinearAttention) and is_memory(module)
        if linear or isinstance(module, Memory | FeatureMemory | Boxes):
            first = next((old for old in renamed if (path + ".").startswith(old + ".")), None)
            name = path if first is None else renamed[first] + path.removeprefix(first)
            names[module] = name or "memory"
    return names


def joined(calls: list[Call]) -> list[Asked]:
    """Calls one after the other as few scans: a call that goes on where the last one stopped, in the very state,
    belongs to its scan."""
    scans: list[Asked] = []
    run: list[Call] = []
    for call in calls:
        if run and not _goes_on(run[-1], call):
            scans.append(_one([item.asked for item in run]))
            run = []
        run.append(call)
    if run:
        scans.append(_one([item.asked for item in run]))
    return scans


def in_double(tree: Tree) -> Tree:
    """A pytree with its numbers in float64, cut off from any graph."""

    def wide(x: Tensor) -> Tensor:
        return x.detach().double() if x.is_floating_point() else x.detach()

    return pytree.tree_map_only(Tensor, wide, tree)


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _idle(asked: Asked) -> bool:
    """Whether a call has no token to write: memory as context looks back that way."""
    write = asked.write_mask
    return asked.v.shape[1] == 0 or (write is not None and not bool(write.any()))


def _calls(seen: _Seen) -> Iterator[tuple[str, Call]]:
    """The calls of memories behind a call of a module, each with what its name is called by."""
    module, given, output = seen
    if isinstance(module, Memory):
        asked, _ = module.asked(**given)
        yield "", Call(asked, output[1].memory)
    elif isinstance(module, LinearAttention):
        asked, unread = asked_of(module, given)
        yield "", Call(asked, state_of(module, output[1]), unread)
    elif isinstance(module, FeatureMemory):
        masks = {name: given.get(name) for name in ("write_mask", "reset_mask")}
        q, k, gates = given["q"], given["k"], module.gates(given["x"])
        v = module.values(k)
        own: dict[str, Any] = {"phi_params": module.phi_params, "initial": module.initial.tensors}
        yield ("", Call(Asked(module.config, q, k, v, gates, state=given["state"], **own, **masks), output[2]))
    elif isinstance(module, Boxes):
        yield from _boxes(module, given, output[1])


def _boxes(boxes: Boxes, given: dict[str, Any], after: MemoryState) -> Iterator[tuple[str, Call]]:
    """Box by box; a box's values are what it was taught, which the boxes themselves answered."""
    how, width = given["how"], boxes.heads
    if given["k"].shape[1] == 0:  # the boxes are made, not written
        return
    for index, (box, v) in enumerate(zip(boxes.written, given["targets"], strict=True)):
        heads = slice(index * width, (index + 1) * width)
        state, last = (_heads(item, heads) for item in (how["state"], after))
        initial = {name: weight[heads] for name, weight in how["initial"].items()}
        call = Asked(
            boxes.config.memory,
            given["q"],
            given["k"],
            v,
            Gates(**given["gates"]),
            phi_params=boxes.params(),
            initial=initial,
            state=state,
            write_mask=how["write_mask"],
            reset_mask=how["reset_mask"],
        )
        unread = None if box == "memory" else f"box {box!r} is asked what the layer is given, not q"
        yield f".{box}", Call(call, last, unread)


def _heads(state: MemoryState, heads: slice) -> MemoryState:
    return pytree.tree_map_only(Tensor, lambda x: x[:, heads], state)


def _goes_on(last: Call, call: Call) -> bool:
    """Whether a call starts in the very state in which the last one ended."""
    state = call.asked.state
    if state is None or call.asked.config != last.asked.config:
        return False
    pairs = [pytree.tree_leaves(item) for item in (last.after, state)]
    return len(pairs[0]) == len(pairs[1]) and all(
        a is b or (isinstance(a, Tensor) and isinstance(b, Tensor) and torch.equal(a, b))
        for a, b in zip(*pairs, strict=True)
    )


def _one(pieces: list[Asked]) -> Asked:
    """Consecutive calls as one scan from the state of the first."""
    first = pieces[0]
    if len(pieces) == 1:
        return first
    q, k, v = (torch.cat([getattr(item, name) for item in pieces], 1) for name in "qkv")
    gates = Gates(*(_gate([item.gates[index] for item in pieces]) for index in range(3)))
    masks: dict[str, Any] = {
        name: joined_mask(pieces, name)
        for name in ("write_mask", "reset_mask")
        if any(getattr(item, name) is not None for item in pieces)
    }
    return first._replace(q=q, k=k, v=v, gates=gates, **masks)


def _gate(gates: list[Any]) -> Any:
    return torch.cat(gates, 1) if isinstance(gates[0], Tensor) else gates[0]


def joined_mask(pieces: list[Asked], name: str) -> Tensor:
    """`write_mask` or `reset_mask` of consecutive calls, `[B, T]`; None writes all, resets none."""
    masks = [getattr(item, name) for item in pieces]
    filled = (
        item.v.new_full(item.v.shape[:2], name == "write_mask", dtype=torch.bool) if mask is None else mask
        for mask, item in zip(masks, pieces, strict=True)
    )
    return torch.cat(list(filled), 1)
