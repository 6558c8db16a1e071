"""Descriptions of a caller's arguments, and the checks that all tensors, numbers and sizes go through.

A check raises an error that says what was expected and what was given. Sizes have an upper limit, checked by
arithmetic before anything is allocated or repeated: an impossible size is a `ConfigError` that names the bytes, the
limit and the setting, never the traceback of a failed allocation. [VAR-SIZE-I1]
"""

from __future__ import annotations

import inspect
import math
import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from typing import Annotated, Any, TypeVar

import torch
from pydantic import AfterValidator, Field
from torch import Tensor

from hecate.errors import MEANT, ArgumentError, ConfigError, HecateError, LayoutWarning, ShapeError, not_known, shorten

MAX_SIZE = 1 << 20
"""Largest width, vocabulary, batch or other size that a user may set."""
MAX_DEPTH = 1 << 10
"""Largest number of layers, taps and anything else that is built or run one after another."""
MAX_NUMBERS = 1 << 31
"""Largest number of elements of one tensor: 8 GiB in float32."""
MAX_COUNT = (1 << 63) - 1
"""Largest count for which nothing is allocated: a period, a number of steps, a limit."""

Size = Annotated[int, Field(le=MAX_SIZE)]
Depth = Annotated[int, Field(le=MAX_DEPTH)]
Count = Annotated[int, Field(le=MAX_COUNT)]


Called = TypeVar("Called", bound=Callable[..., Any])


def named(*fields: str, to: type | None = None) -> Callable[[Called], Called]:
    """Decorator of a function, or of a class for its constructor and `forward`: an unknown keyword raises an
    `ArgumentError` that says what to write instead. `fields` are the fields of its argument `config`. If it takes any
    keywords and passes them on to a class, `to` is that class. [VAR-WORDS-I1]"""

    def of_function(function: Any, name: str) -> Any:
        taken = inspect.signature(function).parameters
        words = [word for word, parameter in taken.items() if parameter.kind is not parameter.VAR_KEYWORD]
        if len(words) < len(taken):
            if to is None:
                return function
            further = inspect.signature(getattr(to, function.__name__)).parameters
            words += [word for word in further if word not in words]
        known, words = frozenset(words), [word for word in words if word not in ("self", "_cls")]

        @wraps(function)
        def checked(*args: Any, **keywords: Any) -> Any:
            if keywords and not known.issuperset(keywords):
                raise _not_taken(name, words, keywords, fields)
            return function(*args, **keywords)

        return checked

    def decorated(called: Any) -> Any:
        if not isinstance(called, type):
            return of_function(called, called.__name__)
        if issubclass(called, tuple):  # a named tuple takes its fields in `__new__`
            setattr(called, "__new__", staticmethod(of_function(called.__new__, called.__name__)))  # noqa: B010
        for method, name in (("__init__", ""), ("forward", ".forward")):
            if method in vars(called):
                setattr(called, method, of_function(vars(called)[method], f"{called.__name__}{name}"))
        return called

    return decorated


def _not_taken(name: str, known: Sequence[str], keywords: Iterable[str], fields: Sequence[str]) -> ArgumentError:
    """The error for the first unknown keyword, with a hint on what to write in its place."""
    word = next(word for word in keywords if word not in known)
    ours = next((item for item in (word, *MEANT.get(word, ())) if item in fields and item not in known), None)
    hint = "" if ours is None else f" It is a field of config: config={{{ours!r}: ...}}."
    return ArgumentError(f"{name} takes no argument {word!r}{not_known(word, known, hint)}")


def outside_vocabulary(tokens: Tensor, size: int) -> ShapeError | None:
    """The error for tokens outside 0..size - 1; None if all are inside."""
    least, most = map(int, tokens.aminmax())
    message = f"tokens must be in 0..{size - 1}, the vocabulary, got {least}..{most}"
    return None if 0 <= least and most < size else ShapeError(message)


def described(argument: object) -> str:
    """Dtype and shape of a tensor, or the value and type of anything else, for an error."""
    if isinstance(argument, Tensor):
        return f"{argument.dtype} {list(argument.shape)}"
    return "None" if argument is None else f"{shorten(argument)} ({type(argument).__name__}), no tensor"


def expect(
    tensor: object,
    axes: str,
    *,
    name: str,
    sizes: Sequence[int] | None = None,
    dtype: torch.dtype | None = None,
    like: Tensor | None = None,
    other: str = "k",
) -> None:
    """Refuses anything but a tensor with these axes, such as "B T H D", and this dtype (default: any floating point).

    `sizes` are the sizes of its axes, if known; it must be on the device of `like`, which messages call `other`.
    """
    shape = "[" + ", ".join(axes.split()) + "]"
    if sizes is not None:
        shape = f"{shape} = {list(sizes)}"
    if dtype is not None:
        shape = f"{str(dtype).removeprefix('torch.')} {shape}"
    if not isinstance(tensor, Tensor):
        raise ShapeError(f"{name} must be a tensor {shape}, got {described(tensor)}")
    fits = tensor.dim() == len(axes.split()) if sizes is None else tuple(tensor.shape) == tuple(sizes)
    if not fits or (dtype is not None and tensor.dtype != dtype):
        raise ShapeError(f"{name} must be {shape}, got {list(tensor.shape) if dtype is None else described(tensor)}")
    if dtype is None and not tensor.is_floating_point():
        raise ShapeError(f"{name} must be floating point, got {tensor.dtype}")
    if like is not None:
        expect_beside(tensor, like, name, other)


def expect_tokens(tokens: object, name: str = "tokens") -> None:
    """Refuses anything but an int64 or int32 tensor of token ids `[B, T]`."""
    if not isinstance(tokens, Tensor) or tokens.dim() != 2 or tokens.dtype not in (torch.int64, torch.int32):
        raise ShapeError(f"{name} must be int64 or int32 [B, T], got {described(tokens)}")


TURNED = "; T and H look swapped: tokens are [B, T, H, D], of [B, H, T, D] give x.transpose(1, 2)"


def swapped(shape: Sequence[int], wanted: Sequence[int]) -> str:
    """Hint if [B, T, H] was wanted and [B, H, T] was given, with or without further axes; else an empty text."""
    fits = len(shape) > 2 and len(wanted) > 2 and (shape[0], shape[2], shape[1]) == tuple(wanted[:3])
    return TURNED if fits and wanted[1] != wanted[2] else ""


def heads_for_tokens(shape: Sequence[int], wanted: Sequence[int], k: Tensor) -> str:
    """Hint if a shape differs from the one wanted only in that its size for the heads is the number of tokens of the
    keys `[B, T, H, D]`; else an empty text."""
    length, heads = k.shape[1:3]
    apart = [pair for pair in zip(shape, wanted, strict=False) if pair[0] != pair[1]]
    return TURNED if len(shape) == len(wanted) and apart == [(length, heads)] and length > 1 else ""


def warn_if_turned(q: Tensor, gates: Sequence[object] | None, stacklevel: int = 4) -> None:
    """Warns of queries that look like `[B, H, T, D]`, if no other argument of the call tells T from H.

    They do with at least 32 heads, more than one token, and at least eight times as many heads as tokens, unless a gate
    is given per token and head. A single token of many heads is decoding, and so few tokens are rarely all that a
    memory is given when it starts empty."""
    _, length, heads, _ = q.shape
    if heads >= 32 and 1 < length <= heads // 8 and not any(isinstance(gate, Tensor) for gate in gates or ()):
        read = f"q of shape {list(q.shape)} is read as {length} tokens of {heads} heads{TURNED}"
        warnings.warn(f"{read}; a state, a mask or a gate [B, T, H] says that it is meant", LayoutWarning, stacklevel)


def expect_beside(tensor: Tensor, like: Tensor, name: str, other: str = "k") -> None:
    """Refuses a tensor that is not on the device of `like`."""
    if tensor.device != like.device:
        raise ShapeError(f"{name} is on {tensor.device}, {other} on {like.device}; move them together")


def expect_count(count: object, name: str, least: int = 1) -> None:
    """Refuses anything but an integer >= `least`."""
    if type(count) is not int or count < least:
        raise ConfigError(f"{name} must be an integer >= {least}, got {shorten(count)}")


def expect_number(number: object, name: str, low: float = 0.0, high: float = math.inf) -> None:
    """Refuses anything but a finite number from `low` to `high`."""
    if type(number) not in (int, float) or not low <= number <= high or number == math.inf:  # type: ignore[operator]
        bounds = f"a finite number >= {low:g}" if high == math.inf else f"in [{low:g}, {high:g}]"
        raise ConfigError(f"{name} must be {bounds}, got {shorten(number)}")


def expect_choice(choice: object, name: str, choices: Sequence[object]) -> None:
    """Refuses anything that is not one of the choices."""
    if choice not in choices:
        raise ConfigError(f"{name} must be one of {', '.join(map(repr, choices))}, got {shorten(choice)}")


def expect_ids(ids: object, name: str) -> None:
    """Refuses a text, a tensor or anything else that is not a sequence of token ids."""
    if isinstance(ids, str) or not isinstance(ids, Sequence):
        cure = "give its .tolist()" if hasattr(ids, "tolist") else "a tokenizer's encode makes them"
        raise ConfigError(f"{name} must be token ids such as [72, 105], got {shorten(ids)}; {cure}")


def expect_taps(kernel: int, *path: str) -> int:
    """Number of taps of a short convolution, 0 for none; refuses a negative number, and 1, which mixes no tokens."""
    if type(kernel) is not int or kernel < 0 or kernel == 1:
        raise ConfigError(f"must be 0 (none) or at least 2, got {shorten(kernel)}", path)
    return check_size(kernel, "conv_kernel", "lower it", MAX_DEPTH)


Taps = Annotated[int, Field(ge=0, le=MAX_DEPTH), AfterValidator(expect_taps)]


def check_shapes(shapes: Mapping[str, tuple[int, ...]], cure: str, *lead: int) -> None:
    """Refuses tensors `[*lead, *shape]` of more than `MAX_NUMBERS` elements; `cure` is the remedy in the message."""
    for name, shape in shapes.items():
        whole = (*lead, *shape)
        if math.prod(whole) > MAX_NUMBERS:
            size = f"{readable(4 * math.prod(whole))} in float32"
            limit = f"more than the limit of {readable(4 * MAX_NUMBERS)}"
            raise ConfigError(f"{name!r} would be a tensor {list(whole)} of {size}, {limit}; {cure}")


def check_size(size: int, what: str, cure: str, limit: int = MAX_SIZE) -> int:
    """The size; refuses one that is not a whole number or exceeds the limit."""
    if not hasattr(type(size), "__index__") or size > limit:
        raise ConfigError(f"{what} must be a whole number up to {limit:,}, got {shorten(size)}; {cure}")
    return size


def check_room(
    needed: int, what: str, cure: str, *, device: str = "cpu", error: type[HecateError] = ConfigError
) -> None:
    """Refuses to go on if more bytes are needed than the device has in all, before they are allocated; `cure` is the
    remedy in the message."""
    if needed > (here := memory_of(device)):
        raise error(f"{what}: {readable(needed)}, more than the {readable(here)} of memory that are here; {cure}")


def memory_of(device: str) -> int:
    """Total memory of a device in bytes, free or not."""
    if device == "cuda" and torch.cuda.is_available():
        return int(torch.cuda.mem_get_info()[1])
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # not on this platform
        return 1 << 40


def without_storage(
    shapes: Mapping[str, tuple[int, ...]], heads: int, dtype: torch.dtype, device: torch.device | str | None
) -> dict[str, Tensor] | None:
    """Empty tensors `[H, ...]` if the device is "meta", on which nothing is drawn; None on any other."""
    if device is None or torch.device(device).type != "meta":
        return None
    return {name: torch.empty(heads, *shape, dtype=dtype, device=device) for name, shape in shapes.items()}


def readable(count: float) -> str:
    """A number of bytes as text, in the largest fitting unit."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:,.4g} {unit}"
        count /= 1024
    return f"{count:,.4g} TiB"
