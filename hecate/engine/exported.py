"""`memory_scan` under torch.export: one operator whatever the length and the batch, and what it is a loop of.

torch.export traces a program once and keeps it for every size, whereas engines are chosen and blocks are cut by size.
So a scan is one node, `hecate::memory_scan`, which runs the engines where the program runs; other runtimes, which do
not know the operator, get `as_loop` in its place: torch's own scan of the program of one token.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from hecate.engine.arguments import document_starts
from hecate.engine.triton.ops import config_of, recorded
from hecate.engine.whole import whole_scan
from hecate.errors import ConfigError
from hecate.rule import Gates, MemoryConfig, MemoryState

_TIMED = ("gates", "write_mask", "reset_mask")  # [B, T, ...], beside q, k and v

pytree._register_namedtuple(Gates, serialized_type_name="hecate.Gates")


def exporting(q: Any) -> bool:
    """True while torch.export traces."""
    there = torch.compiler.is_exporting() and not torch.compiler.is_dynamo_compiling()
    return there and isinstance(q, Tensor) and q.dim() == 4


def exported_scan(
    config: MemoryConfig, q: Tensor, k: Tensor, v: Tensor, gates: Gates | None, *, tape: Any = None,
    cu_seqlens: Tensor | None = None, reset_mask: Tensor | None = None, engine: str, autodiff: str, name: str,
    **given: Any,
) -> tuple[Tensor, MemoryState]:  # fmt: skip
    """`memory_scan` as a call of the operator. [ENG-EXPORT-D1]"""
    if tape is not None:
        raise ConfigError("a tape records calls, and torch.export makes none; leave tape out")
    if cu_seqlens is not None:
        reset_mask = document_starts(reset_mask, cu_seqlens, k, going_on=given["state"] is not None)
    tree = {"q": q, "k": k, "v": v, "gates": gates, "reset_mask": reset_mask, **given}
    leaves, spec = pytree.tree_flatten(tree)
    told = {
        "config": config.model_dump_json(include=set(MemoryConfig.model_fields)),
        "how": {"engine": engine, "autodiff": autodiff, "name": name},
        "tree": pytree.treespec_dumps(spec),
        "numbers": [None if isinstance(leaf, Tensor) else [leaf] for leaf in leaves],
    }
    call = json.dumps(told)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    return _built(call, tensors, memory_scan_operator(call, tensors))


def scan_arguments(call: str, tensors: Sequence[Tensor]) -> tuple[MemoryConfig, dict[str, Any], dict[str, Any]]:
    """The config, the arguments by name, and engine, autodiff and name of a call of the operator."""
    told, rest = json.loads(call), iter(tensors)
    leaves = [next(rest) if number is None else number[0] for number in told["numbers"]]
    tree = pytree.tree_unflatten(leaves, pytree.treespec_loads(told["tree"]))
    return config_of(told["config"]), tree, told["how"]


def scan_answers(y: Tensor, state: MemoryState) -> list[Tensor]:
    """Outputs of the operator: y and the state's tensors, in order."""
    return [leaf for leaf in pytree.tree_leaves((y, state)) if isinstance(leaf, Tensor)]


def _first(call: str, tensors: Sequence[Tensor]) -> tuple[Tensor, MemoryState]:
    """y and the state after one token of one sequence, the form of every call; in a thread, of which nobody traces
    anything."""
    config, tree, _ = scan_arguments(call, tensors)
    weights = config.structure.shapes(config.feature_map.output_dim(tree["k"].shape[-1]), tree["v"].shape[-1])

    def few(path: Any, x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        name, *rest = (getattr(key, "key", None) for key in path)
        lead = {"phi_params": (), "initial": (), "state": (1,)}.get(str(name), (1, 1))
        own = x.shape[x.dim() - 1 - len(weights[str(rest[0])]) :] if name == "initial" else x.shape[len(lead) :]
        return torch.zeros(*lead, *own, dtype=x.dtype, device=x.device)

    def answers() -> tuple[Tensor, MemoryState]:
        given = pytree.tree_map_with_path(few, tree)
        return whole_scan(config.model_copy(update={"on_nonfinite": "propagate"}), **given, engine="sequential")

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(answers).result()


def _built(call: str, tensors: Sequence[Tensor], outputs: Sequence[Tensor]) -> tuple[Tensor, MemoryState]:
    """y and the state of the operator's outputs."""
    leaves, spec = pytree.tree_flatten(_first(call, tensors))
    rest = iter(outputs)
    found = pytree.tree_unflatten([next(rest) if isinstance(leaf, Tensor) else leaf for leaf in leaves], spec)
    return cast(tuple[Tensor, MemoryState], found)


@torch.library.custom_op("hecate::memory_scan", mutates_args=())
def memory_scan_operator(call: str, tensors: Sequence[Tensor]) -> list[Tensor]:
    """y and the tensors of the state."""
    config, tree, how = scan_arguments(call, tensors)
    own = {item.untyped_storage().data_ptr() for item in tensors}
    found = scan_answers(*whole_scan(config, **tree, **how))
    return [item.clone() if item.untyped_storage().data_ptr() in own else item.contiguous() for item in found]


@memory_scan_operator.register_fake
def _(call: str, tensors: Sequence[Tensor]) -> list[Tensor]:
    q = scan_arguments(call, tensors)[1]["q"]
    y, *state = scan_answers(*_first(call, tensors))
    shapes = [(y, (*q.shape[:2], *y.shape[2:])), *((x, (*q.shape[:1], *x.shape[1:])) for x in state)]
    return [q.new_empty(shape, dtype=like.dtype) for like, shape in shapes]


@torch.library.custom_op("hecate::memory_scan_backward", mutates_args=())
def _backward_operator(call: str, tensors: Sequence[Tensor], cotangents: Sequence[Tensor | None]) -> list[Tensor]:
    """Cotangents of the tensors, zero-sized for whole numbers and flags; the forward pass runs once more."""
    config, tree, how = scan_arguments(call, tensors)
    with recorded(), torch.enable_grad():
        own = [item.detach().requires_grad_(item.is_floating_point()) for item in tensors]
        config, tree, how = scan_arguments(call, own)
        found = scan_answers(*whole_scan(config, **tree, **how))
        pairs = [(y, g) for y, g in zip(found, cotangents, strict=True) if g is not None and y.requires_grad]
        moving = [item for item in own if item.requires_grad]
        ys, gs = zip(*pairs, strict=True)
        grads = iter(torch.autograd.grad(ys, moving, gs, allow_unused=True, materialize_grads=True))
    return [next(grads).clone() if item.requires_grad else item.new_empty(0) for item in own]


@_backward_operator.register_fake
def _(call: str, tensors: Sequence[Tensor], cotangents: Sequence[Tensor | None]) -> list[Tensor]:
    return [item.new_empty(item.shape if item.is_floating_point() else (0,)) for item in tensors]


def _setup(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    ctx.call, tensors = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, cotangents: Sequence[Tensor | None]) -> tuple[None, list[Tensor | None]]:
    own = ctx.saved_tensors
    found = _backward_operator(ctx.call, list(own), list(cotangents))
    return None, [g if item.is_floating_point() else None for item, g in zip(own, found, strict=True)]


memory_scan_operator.register_autograd(_backward, setup_context=_setup)


def as_loop(call: str, tensors: Sequence[Tensor]) -> list[Tensor]:
    """The operator as `torch.ops.higher_order.scan` of the program of one token, for runtimes without it.
    [ENG-EXPORT-D2]"""
    config, tree, _ = scan_arguments(call, tensors)
    timed = {name: tree.pop(name) for name in ("q", "k", "v", *_TIMED)}
    state = tree.pop("state")
    each, each_spec = pytree.tree_flatten(timed)
    rows = [item.transpose(0, 1).contiguous() for item in each if isinstance(item, Tensor)]
    fixed, fixed_spec = pytree.tree_flatten(tree)
    further = [item for item in fixed if isinstance(item, Tensor)]

    def filled(leaves: list[Any], spec: Any, found: Sequence[Tensor]) -> Any:
        rest = iter(found)
        return pytree.tree_unflatten([next(rest) if isinstance(x, Tensor) else x for x in leaves], spec)

    def one(tokens: list[Tensor], held: Any, own: Sequence[Tensor]) -> tuple[Tensor, MemoryState]:
        given = filled(each, each_spec, [item.unsqueeze(1) for item in tokens])
        return whole_scan(
            config, **given, **filled(fixed, fixed_spec, own), state=held, engine="sequential", autodiff="torch"
        )

    if state is None:  # as after a token that was not written: a program has a state from its first token on
        state = _begun(call, tensors)
    held, held_spec = pytree.tree_flatten(state)
    start = [item for item in held if isinstance(item, Tensor)]

    def step(*given: Tensor) -> list[Tensor]:
        before, rest = given[: len(start)], given[len(start) :]
        tokens, own = rest[: len(rows)], rest[len(rows) :]
        y, after = one(list(tokens), filled(held, held_spec, before), own)
        return [*(item.clone() for item in scan_answers(y, after)[1:]), y.squeeze(1)]

    if type(rows[0].shape[0]) is int and rows[0].shape[0] == 1:
        *after, y = step(*start, *(item[0] for item in rows), *further)
        return [y.unsqueeze(1), *after]
    found = torch.ops.higher_order.scan(step, start, rows, tuple(further))
    return [found[-1].transpose(0, 1), *found[:-1]]


def _begun(call: str, tensors: Sequence[Tensor]) -> MemoryState:
    """The state ahead of the first token: that after one that is not written."""
    config, tree, _ = scan_arguments(call, tensors)
    q = tree["q"]
    given = {n: pytree.tree_map_only(Tensor, lambda x: x[:, :1], tree[n]) for n in ("q", "k", "v", *_TIMED)}
    given |= {"write_mask": torch.zeros_like(q[:, :1, 0, 0], dtype=torch.bool), "reset_mask": None}
    rest = {name: tree[name] for name in ("phi_params", "initial")}
    return whole_scan(config, **given, **rest, engine="sequential", autodiff="torch")[1]
