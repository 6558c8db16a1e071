"""States of layers and models between calls, as values: moved, cut into rows, joined, repeated, saved.

A state is a pytree of tensors whose first axis is the batch; scalars `[]` apply to all rows. The functions take any
such pytree, for example the tuple of a language model or of your own module; a `State` has them as methods.
[STATE-TREE-D1]
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, Self, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as serialized
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from hecate.errors import CheckpointError, ConfigError, ShapeError, shorten
from hecate.files import refuse_pipe, write_file

Tree = TypeVar("Tree")
Rows = Tensor | Sequence[int] | slice
_FORMAT = "hecate.state.1"
_KINDS: dict[str, type[State]] = {}


class State:
    """Base, beside a NamedTuple of the fields, of every state in the library: `class LayerState(State, _Fields)`.

    Subclassing registers the class under its name for `load`, and as safe for torch.load with `weights_only=True`.
    [STATE-LOAD-I1]
    """

    __slots__ = ()
    wide: ClassVar[tuple[str, ...]] = ()
    """Fields whose tensors `to` keeps in at least float32."""
    whole: ClassVar[tuple[tuple[str, torch.dtype], ...] | None] = None
    """Fields whose tensors are integers or flags, with their dtype; the tensors of all other fields are floating point.
    None, the default, allows any real dtype in every field. [STATE-LOAD-I2]"""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        taken = _KINDS.get(cls.__name__)
        if taken is not None and (taken.__module__, taken.__qualname__) != (cls.__module__, cls.__qualname__):
            raise ConfigError(
                f"a state class {cls.__name__} exists already in {taken.__module__}; files tell states by this name, "
                "so give yours another"
            )
        if not hasattr(cls, "_fields") or "__slots__" not in vars(cls):
            raise ConfigError(f"{cls.__name__} must be `class {cls.__name__}(State, F)`, F a NamedTuple, with slots ()")
        _KINDS[cls.__name__] = cls
        torch.serialization.add_safe_globals([cls])
        pytree._register_namedtuple(cls, serialized_type_name=f"hecate.{cls.__name__}")  # in files of torch.export

    def _replace(self, **fields: Any) -> Self:
        """The same state with some fields replaced. It overrides NamedTuple's method, because not every supported
        version of torch.compile can return that one's result: it does not know its class."""
        return type(self)(**{**self._asdict(), **fields})  # type: ignore[attr-defined]

    @property
    def bytes(self) -> int:
        """Size of all tensors."""
        return bytes_of(self)

    def detach(self) -> Self:
        """As the function `detach`."""
        return detach(self)

    def to(self, *where: torch.device | str | torch.dtype) -> Self:
        """As the function `to`."""
        return to(self, *where)

    def rows(self, which: Rows) -> Self:
        """As the function `rows`."""
        return rows(self, which)

    def repeat(self, times: int) -> Self:
        """As the function `repeat`."""
        return repeat(self, times)

    @classmethod
    def stack(cls, states: Iterable[Self]) -> Self:
        """As the function `stack`."""
        return stack(states)

    def save(self, path: Path | str, model: str | None = None) -> None:
        """As the function `save`."""
        save(self, path, model)

    @classmethod
    def load(cls, path: Path | str, device: torch.device | str = "cpu", model: str | None = None) -> Self:
        """As the function `load`; refuses a state of another class."""
        state = load(path, device, model)
        if not isinstance(state, cls):
            raise CheckpointError(f"{path} holds a {type(state).__name__}, not a {cls.__name__}; load it as what it is")
        return state


class _ParkedFields(NamedTuple):
    state: Any
    scales: tuple[Tensor | None, ...]


class Parked(State, _ParkedFields):
    """A state in about half its bytes or fewer, for storage between calls: see `park`.

    Fields:
        state: the tree, its large tensors in float16.
        scales: for every leaf the factor `[]` that restores it, in its original dtype; None for unchanged leaves.
    """

    __slots__ = ()
    wide = ("scales",)  # they may be out of float16's range


def bytes_of(state: Any) -> int:
    """Size of all tensors of a state."""
    return sum(leaf.numel() * leaf.element_size() for leaf in leaves(state).values())


def detach(state: Tree) -> Tree:
    """The same state, detached from the autograd graph that produced it."""
    # Tensors that carry no gradient stay the same objects, so that facts cached for them remain known.
    return pytree.tree_map_only(Tensor, lambda x: x.detach() if x.is_floating_point() or x.is_complex() else x, state)


def clone(state: Tree) -> Tree:
    """A detached copy with its own storage: changing either in place leaves the other as it is."""
    return pytree.tree_map_only(Tensor, lambda item: item.detach().clone(), state)


def to(state: Tree, *where: torch.device | str | torch.dtype) -> Tree:
    """The state on a device, in a floating point dtype, or both. Integers keep their dtype, and contents of memories
    stay in at least float32, as in layers. [STATE-TO-D1]"""
    dtypes = [item for item in where if isinstance(item, torch.dtype)]
    devices = [item for item in where if not isinstance(item, torch.dtype)]
    if not where or len(dtypes) > 1 or len(devices) > 1 or not all(dtype.is_floating_point for dtype in dtypes):
        arguments = ", ".join(map(shorten, where))
        raise ConfigError(f"a state goes to a device, a floating point dtype or one of each, got ({arguments})")
    device = torch.device(devices[0]) if devices else None

    def moved(tree: Any, wide: bool) -> Any:
        if isinstance(tree, State):
            named = zip(tree._fields, tree, strict=True)  # type: ignore[attr-defined, call-overload]
            return type(tree)(*(moved(item, wide or name in tree.wide) for name, item in named))
        if isinstance(tree, Tensor):
            dtype = dtypes[0] if dtypes and tree.is_floating_point() else tree.dtype
            if wide and tree.is_floating_point():
                dtype = torch.promote_types(dtype, torch.float32)
            return tree.to(device=tree.device if device is None else device, dtype=dtype)
        inner, spec = pytree.tree_flatten(tree, is_leaf=lambda item: item is not tree)
        return tree if inner == [tree] else pytree.tree_unflatten([moved(item, wide) for item in inner], spec)

    return moved(state, False)


def park(state: Any) -> Parked:
    """The state for storage: tensors of more than two axes in float16, each divided by a power of two that puts its
    largest number below 2^15; the others, such as a length per head, unchanged. [STATE-PARK-D1]

    Numbers change by at most 2^-11 of themselves, or 2^-39 of the largest in their tensor if that is more; none
    overflows. Restore it with `unpark` to compute with it."""
    if isinstance(state, Parked):
        return clone(state)
    flat, spec = pytree.tree_flatten(clone(state))
    scales: list[Tensor | None] = [None] * len(flat)
    for place, item in enumerate(flat):
        if isinstance(item, Tensor) and item.dim() > 2 and item.is_floating_point() and item.itemsize > 2:
            largest = torch.where(item.isfinite(), item, 0).abs().amax() if item.numel() else item.new_zeros(())
            power = torch.frexp(largest).exponent.clamp(min=-100) - 15  # NaN and infinity stay as they are
            scale = scales[place] = torch.ldexp(torch.ones_like(largest), power)
            flat[place] = (item / scale).half()
    return Parked(pytree.tree_unflatten(flat, spec), tuple(scales))


def unpark(state: Any) -> Any:
    """The state that was parked, in its original dtypes, with its own storage; a copy of a state that is not parked.
    [STATE-PARK-D1]"""
    if not isinstance(state, Parked):
        return clone(state)
    flat, spec = pytree.tree_flatten(clone(state.state))
    if len(flat) != len(state.scales):
        raise CheckpointError(f"a parked state has a scale for each of {len(flat)} leaves, got {len(state.scales)}")
    pairs = [*zip(flat, state.scales, strict=True)]
    for x, scale in pairs:
        both = isinstance(x, Tensor) and isinstance(scale, Tensor) and x.is_floating_point()
        if scale is not None and not (both and scale.is_floating_point() and not scale.dim()):
            raise CheckpointError("a parked state has a floating point scale [] for a tensor of such numbers, or None")
    return pytree.tree_unflatten([x if scale is None else x.to(scale.dtype) * scale for x, scale in pairs], spec)


def rows(state: Tree, which: Rows) -> Tree:
    """Some rows of a batch, in any order and possibly repeated, chosen by indices `[N]`, a bool mask `[B]` or a slice,
    which gives views. [STATE-ROWS-I1]

    Raises:
        ShapeError: rows that the state does not have, or tensors that differ in their number of rows.
    """
    count = _batch(state)
    if isinstance(which, slice):
        return each_row(state, lambda item: item[which])
    try:
        index = torch.as_tensor(which)
        index = index.to(torch.int64) if not index.numel() else index
    except (TypeError, ValueError, RuntimeError):
        index = torch.empty((), dtype=torch.float32)
    if index.dim() != 1 or index.dtype not in (torch.bool, torch.int64, torch.int32):
        shown = f"{index.dtype} {list(index.shape)}" if isinstance(which, Tensor) else shorten(which)
        raise ShapeError(f"rows are whole numbers [N], a bool mask [B] or a slice, got {shown}; one row is [i]")
    if index.dtype == torch.bool:
        if len(index) != count:
            raise ShapeError(f"a mask of rows must be bool [{count}], one per sequence, got [{len(index)}]")
        index = index.nonzero().flatten()
    elif len(index) and not (-count <= int(index.min()) and int(index.max()) < count):
        raise ShapeError(f"rows {index.tolist()} of a state of {count} sequences")
    return each_row(state, lambda item: item[index.to(item.device)])


def repeat(state: Tree, times: int) -> Tree:
    """Every row repeated, the copies next to each other: `0 0 1 1`, as for beam search. [STATE-ROWS-I1]"""
    if type(times) is not int or times < 1:
        raise ConfigError(f"a state is repeated a whole number of times >= 1, got {shorten(times)}")
    _batch(state)
    return each_row(state, lambda item: item.repeat_interleave(times, 0))


def stack(states: Iterable[Tree]) -> Tree:
    """States of one layer or model, concatenated along the batch. [STATE-ROWS-I1]

    Raises:
        ShapeError: states that differ in more than their number of rows.
    """
    trees = list(states)
    if not trees:
        raise ShapeError("there are no states to stack; give at least one")
    named = [leaves(tree, "state") for tree in trees]
    for number, (tree, tensors) in enumerate(zip(trees, named, strict=True)):
        _batch(tree)
        if missing := sorted(tensors.keys() ^ named[0].keys()):
            has = (number if missing[0] in tensors else 0, 0 if missing[0] in tensors else number)
            raise ShapeError(f"state {has[0]} has {missing[0]}, state {has[1]} has none; were they made by one layer?")
        for path, item in tensors.items():
            first = named[0][path]
            if item.dtype != first.dtype or item.shape[1:] != first.shape[1:] or item.dim() != first.dim():
                raise ShapeError(
                    f"{path} is {item.dtype} {list(item.shape)} in state {number}, {first.dtype} {list(first.shape)} "
                    "in state 0; only the number of rows may differ"
                )
            if not item.dim() and not torch.equal(item, first):
                both = f"{item.item()} in state {number} and {first.item()} in state 0"
                raise ShapeError(f"{path} belongs to all rows, and is {both}; only states of equal ones can be stacked")

    def joined(path: Any, item: Any) -> Any:
        place = "state" + pytree.keystr(path)
        return torch.cat([flat[place] for flat in named]) if isinstance(item, Tensor) and item.dim() else item

    return pytree.tree_map_with_path(joined, trees[0])


def fingerprint(model: nn.Module) -> str:
    """SHA-256 of a model's config, if it has one, and of its parameters and buffers, as 64 hexadecimal digits: it
    identifies the model that a state belongs to. [STATE-MODEL-D1]"""
    digest = sha256(repr(getattr(model, "config", None)).encode())
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        whole = tensor.detach().cpu().contiguous().reshape(-1)
        digest.update(whole.view(torch.uint8).numpy().data if whole.numel() else b"")
    return digest.hexdigest()


def save(state: Any, path: Path | str, model: str | None = None) -> None:
    """Writes a state to one safetensors file, atomically: tensors by their path, the tree as JSON in the header.

    Tuples, lists, dicts with text keys, `State`s, tensors and None can be written; gradients are not. [STATE-LOAD-I1]
    `model`, the `fingerprint` of the model that it belongs to, is written to the header. [STATE-MODEL-D1]

    Raises:
        CheckpointError: anything that is not a state, or a file that cannot be written.
    """
    content = packed(state, model)
    try:
        write_file(Path(path), content)
    except OSError as error:
        raise CheckpointError(f"cannot write state {path}: {error.strerror or error}") from None


def packed(state: Any, model: str | None = None) -> bytes:
    """The content of the file that `save` writes; states that differ in nothing but their numbers give as many bytes.

    Raises:
        CheckpointError: anything that is not a state.
    """
    tensors: dict[str, Tensor] = {}
    tree = _description(state, "state", tensors, None)
    if not tensors:
        raise CheckpointError(f"a {type(state).__name__} without a tensor is no state; nothing was written")
    metadata = {"format": _FORMAT, "tree": json.dumps(tree)} | ({} if model is None else {"model": model})
    return serialized(tensors, metadata=metadata)


def load(path: Path | str, device: torch.device | str = "cpu", model: str | None = None) -> Any:
    """The state that `save` wrote, its tensors on a device. Nothing is unpickled. [STATE-LOAD-I1]

    Raises:
        CheckpointError: a file that is missing, damaged or not a state; with `model`, a `fingerprint`, a state of
            another model or one whose file names none. [STATE-MODEL-D1]
    """
    try:
        refuse_pipe(Path(path))
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            if model is not None and metadata.get("model") != model:
                whose = "another model's" if metadata.get("model") else "of a model that it does not tell"
                raise CheckpointError(f"state {path} is {whose}; begin a new one, or open it with the model it is of")
            tensors = {name: file.get_tensor(name).to(device, copy=True) for name in file.keys()}
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot read state {path}: {error}; name a file that states.save has written") from None
    try:
        if metadata.get("format") != _FORMAT:
            raise ValueError("it is of another kind")
        return _state_of(json.loads(metadata["tree"]), tensors, None)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} is not a state that hecate.states.save wrote: {error}") from None


_Dtype = torch.dtype | Literal["floating point"] | None
"""Dtype of the tensors of a field; None: any real dtype."""


def _description(tree: Any, path: str, tensors: dict[str, Tensor], wanted: _Dtype) -> Any:
    """A state as JSON. Its tensors are put into `tensors`, as clones: safetensors refuses tensors that share memory."""
    if tree is None:
        return None
    if isinstance(tree, Tensor):
        if fault := _misfit(tree, wanted):
            raise CheckpointError(f"{path} {fault}; it is no state that a layer has made")
        tensors[path] = tree.detach().cpu().clone(memory_format=torch.contiguous_format)
        return {"tensor": path}
    if isinstance(tree, State):
        fields = zip(tree._fields, tree, strict=True)  # type: ignore[attr-defined, call-overload]
        inner = {n: _description(x, f"{path}.{n}", tensors, _dtype_of(type(tree), n)) for n, x in fields}
        return {"state": type(tree).__name__, "fields": inner}
    if isinstance(tree, dict) and all(isinstance(key, str) for key in tree):
        return {"dict": {key: _description(item, f"{path}[{key!r}]", tensors, wanted) for key, item in tree.items()}}
    if type(tree) in (tuple, list):
        items = [_description(item, f"{path}[{i}]", tensors, wanted) for i, item in enumerate(tree)]
        return {type(tree).__name__: items}
    raise CheckpointError(
        f"{path} is {shorten(tree)}, a {type(tree).__name__}; a state is made of tensors, None, tuples, lists, dicts "
        "with texts as keys, and classes of hecate.states.State"
    )


def _state_of(tree: Any, tensors: Mapping[str, Tensor], wanted: _Dtype) -> Any:
    """The state of a JSON description; an invalid one raises ValueError, KeyError, TypeError or AttributeError."""
    if tree is None:
        return None
    if "tensor" in tree:
        tensor = tensors[tree["tensor"]]
        if fault := _misfit(tensor, wanted):
            raise ValueError(f"{shorten(tree['tensor'])} {fault}")
        return tensor
    if "dict" in tree:
        return {key: _state_of(item, tensors, wanted) for key, item in tree["dict"].items()}
    if "list" in tree or "tuple" in tree:
        items = [_state_of(item, tensors, wanted) for item in tree.get("list", tree.get("tuple"))]
        return items if "list" in tree else tuple(items)
    name, fields = tree["state"], tree["fields"]
    if name not in _KINDS:
        raise ValueError(f"it holds a {name}, a class that is not imported here")
    kind: Any = _KINDS[name]
    if fields.keys() != set(kind._fields):
        raise ValueError(f"a {name} has the fields {', '.join(kind._fields)}, not {', '.join(fields)}")
    return kind(**{field: _state_of(item, tensors, _dtype_of(kind, field)) for field, item in fields.items()})


def _dtype_of(kind: type[State], field: str) -> _Dtype:
    """Dtype of the tensors of a field."""
    return None if kind.whole is None else dict[str, _Dtype](kind.whole).get(field, "floating point")


def _misfit(tensor: Tensor, wanted: _Dtype) -> str | None:
    """Reason why a tensor's dtype is not the one wanted; None if it is."""
    fits = tensor.is_floating_point() if wanted == "floating point" else wanted in (None, tensor.dtype)
    if fits and not tensor.is_complex():
        return None
    return f"is {tensor.dtype}, where {wanted or 'real numbers'} must stand".replace("torch.", "")


def leaves(state: Any, root: str = "") -> dict[str, Tensor]:
    """Tensors of a state by their path, which begins with `root`."""
    pairs: list[tuple[Any, Any]] = pytree.tree_flatten_with_path(state)[0]
    return {root + pytree.keystr(path): leaf for path, leaf in pairs if isinstance(leaf, Tensor)}


def _batch(state: Any) -> int:
    """Number of rows of a state; refuses one without tensors `[B, ...]`, or whose tensors differ in B."""
    by_rows = [(path, leaf) for path, leaf in leaves(state, "state").items() if leaf.dim()]
    if not by_rows:
        raise ShapeError(f"a state is a pytree of tensors [B, ...], got {shorten(state)}")
    count = len(by_rows[0][1])
    for path, leaf in by_rows:
        if len(leaf) != count:
            raise ShapeError(f"{path} is {list(leaf.shape)}, not by the {count} rows of {by_rows[0][0]}")
    return count


def each_row(state: Tree, change: Callable[[Tensor], Tensor]) -> Tree:
    """The state with `change` applied to its tensors `[B, ...]`; scalars that apply to all rows stay."""
    return pytree.tree_map_only(Tensor, lambda item: change(item) if item.dim() else item, state)


def with_tensors(leaves: list[Any], spec: Any, tensors: Iterable[Tensor]) -> Any:
    """The flattened pytree with other tensors in place of its own, in order."""
    replacements = iter(tensors)
    return pytree.tree_unflatten([next(replacements) if isinstance(item, Tensor) else item for item in leaves], spec)
