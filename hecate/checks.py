"""Descriptions of a caller's arguments, and the checks that all tensors, numbers and sizes go through.

A check raises a sentence: what was expected, and what was given. Sizes have one ceiling, held by arithmetic before
anything is allocated or repeated: one out of the question is a `ConfigError` with the bytes, the limit and the knob,
never the traceback of what would have allocated it. [VAR-SIZE-I1]
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
"""Largest width, vocabulary, batch or other size that a user sets."""
MAX_DEPTH = 1 << 10
"""Most layers, taps and whatever else is built or run one after another."""
MAX_NUMBERS = 1 << 31
"""Most numbers of one tensor: 8 GiB in float32."""
MAX_COUNT = (1 << 63) - 1
"""Largest of the counts that nothing is allocated for: a period, a number of steps, a limit."""

Size = Annotated[int, Field(le=MAX_SIZE)]
Depth = Annotated[int, Field(le=MAX_DEPTH)]
Count = Annotated[int, Field(le=MAX_COUNT)]


Called = TypeVar("Called", bound=Callable[..., Any])


def named(*fields: str, to: type | None = None) -> Callable[[Called], Called]:
    """Decorator of a function, or of a class for its constructor and `forward`: a keyword that it does not take is an
    `ArgumentError` that says what to write instead. `fields` are those of its argument `config`;
    other keywords, where it takes any, go `to` that class. [VAR-WORDS-I1]"""

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
        if issubclass(called, tuple):  # whose fields are the arguments of `__new__`
            setattr(called, "__new__", staticmethod(of_function(called.__new__, called.__name__)))  # noqa: B010
        for method, name in (("__init__", ""), ("forward", ".forward")):
            if method in vars(called):
                setattr(called, method, of_function(vars(called)[method], f"{called.__name__}{name}"))
        return called

    return decorated


def _not_taken(name: str, known: Sequence[str], keywords: Iterable[str], fields: Sequence[str]) -> ArgumentError:
    """The error for the first keyword that is not known, with what to write in its place."""
    word = next(word for word in keywords if word not in known)
    ours = next((item for item in (word, *MEANT.get(word, ())) if item in fields and item not in known), None)
    hint = "" if ours is None else f" It is a field of config: config={{{ours!r}: ...}}."
    return ArgumentError(f"{name} takes no argument {word!r}{not_known(word, known, hint)}")


def outside_vocabulary(tokens: Tensor, size: int) -> ShapeError | None:
    """The error for tokens that are not in 0..size - 1; None where all are."""
    least, most = map(int, tokens.aminmax())
    message = f"tokens must be in 0..{size - 1}, the vocabulary, got {least}..{most}"
    return None if 0 <= least and most < size else ShapeError(message)


def described(argument: object) -> str:
    """Dtype and shape of a tensor, else what it is, for an error."""
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
    """Refuses what is no tensor `[axes]`, such as "B T H D", of a dtype: by default any floating point one.

    `sizes` are those of its axes where they are known; `like` is the tensor on whose device it must be, called `other`.
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
    """Refuses what is no tensor of token ids `[B, T]`."""
    if not isinstance(tokens, Tensor) or tokens.dim() != 2 or tokens.dtype not in (torch.int64, torch.int32):
        raise ShapeError(f"{name} must be int64 or int32 [B, T], got {described(tokens)}")


TURNED = "; T and H look swapped: tokens are [B, T, H, D], of [B, H, T, D] give x.transpose(1, 2)"


def swapped(shape: Sequence[int], wanted: Sequence[int]) -> str:
    """Hint where [B, T, H] or [B, T] was wanted and [B, H, T] or [B, H] was found; else an empty text."""
    fits = len(shape) > 2 and len(wanted) > 2 and (shape[0], shape[2], shape[1]) == tuple(wanted[:3])
    return TURNED if fits and wanted[1] != wanted[2] else ""


def heads_for_tokens(shape: Sequence[int], wanted: Sequence[int], k: Tensor) -> str:
    """Hint where a shape has as many heads as keys `[B, T, H, D]` have tokens; else an empty text."""
    length, heads = k.shape[1:3]
    apart = [pair for pair in zip(shape, wanted, strict=False) if pair[0] != pair[1]]
    return TURNED if len(shape) == len(wanted) and apart == [(length, heads)] else ""


def warn_if_turned(q: Tensor, gates: Sequence[object] | None, stacklevel: int = 4) -> None:
    """Warns of queries that look like `[B, H, T, D]` in a call that has nothing else to tell T from H by.

    That is: at least 32 heads, more than one token and eight times as many heads as tokens, and no gate per token and
    head. One token of many heads is decoding, and a memory that starts empty has little to do with so few tokens."""
    _, length, heads, _ = q.shape
    if heads >= 32 and 1 < length <= heads // 8 and not any(isinstance(gate, Tensor) for gate in gates or ()):
        read = f"q of shape {list(q.shape)} is read as {length} tokens of {heads} heads{TURNED}"
        warnings.warn(f"{read}; a state, a mask or a gate [B, T, H] says that it is meant", LayoutWarning, stacklevel)


def expect_beside(tensor: Tensor, like: Tensor, name: str, other: str = "k") -> None:
    """Refuses a tensor on another device."""
    if tensor.device != like.device:
        raise ShapeError(f"{name} is on {tensor.device}, {other} on {like.device}; move them together")


def expect_count(count: object, name: str, least: int = 1) -> None:
    """Refuses what is no integer of at least `least`."""
    if type(count) is not int or count < least:
        raise ConfigError(f"{name} must be an integer >= {least}, got {shorten(count)}")


def expect_number(number: object, name: str, low: float = 0.0, high: float = math.inf) -> None:
    """Refuses what is no finite number from `low` to `high`."""
    if type(number) not in (int, float) or not low <= number <= high or number == math.inf:  # type: ignore[operator]
        bounds = f"a finite number >= {low:g}" if high == math.inf else f"in [{low:g}, {high:g}]"
        raise ConfigError(f"{name} must be {bounds}, got {shorten(number)}")


def expect_choice(choice: object, name: str, choices: Sequence[object]) -> None:
    """Refuses what is none of the choices."""
    if choice not in choices:
        raise ConfigError(f"{name} must be one of {', '.join(map(repr, choices))}, got {shorten(choice)}")


def expect_ids(ids: object, name: str) -> None:
    """Refuses what is no sequence of token ids."""
    if isinstance(ids, str) or not isinstance(ids, Sequence):
        cure = "give its .tolist()" if hasattr(ids, "tolist") else "a tokenizer's encode makes them"
        raise ConfigError(f"{name} must be token ids such as [72, 105], got {shorten(ids)}; {cure}")


def expect_taps(kernel: int, *path: str) -> int:
    """Taps of a short convolution, 0 for none; refuses what is no such integer, and one tap, which mixes nothing."""
    if type(kernel) is not int or kernel < 0 or kernel == 1:
        raise ConfigError(f"must be 0 (none) or at least 2, got {shorten(kernel)}", path)
    return check_size(kernel, "conv_kernel", "lower it", MAX_DEPTH)


Taps = Annotated[int, Field(ge=0, le=MAX_DEPTH), AfterValidator(expect_taps)]


def check_shapes(shapes: Mapping[str, tuple[int, ...]], cure: str, *lead: int) -> None:
    """Refuses tensors `[*lead, *shape]` of more than `MAX_NUMBERS` numbers; `cure`: what helps."""
    for name, shape in shapes.items():
        whole = (*lead, *shape)
        if math.prod(whole) > MAX_NUMBERS:
            raise ConfigError(
                f"{name!r} would be a tensor {list(whole)} of {readable(4 * math.prod(whole))} in "
                f"float32, more than the limit of {readable(4 * MAX_NUMBERS)}; {cure}"
            )


def check_size(size: int, what: str, cure: str, limit: int = MAX_SIZE) -> int:
    """The size, refused where it is no whole number or above the limit."""
    if not hasattr(size, "__index__") or size > limit:
        raise ConfigError(f"{what} must be a whole number up to {limit:,}, got {shorten(size)}; {cure}")
    return size


def check_room(
    needed: int, what: str, cure: str, *, device: str = "cpu", error: type[HecateError] = ConfigError
) -> None:
    """Refuses what takes more bytes than the machine has, before any of them is asked for; `cure`: what helps."""
    if needed > (here := memory_of(device)):
        raise error(f"{what}: {readable(needed)}, more than the {readable(here)} of memory that are here; {cure}")


def memory_of(device: str) -> int:
    """Bytes of memory that a device has, free or not."""
    if device == "cuda" and torch.cuda.is_available():
        return int(torch.cuda.mem_get_info()[1])
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # not on this platform
        return 1 << 40


def without_storage(
    shapes: Mapping[str, tuple[int, ...]], heads: int, dtype: torch.dtype, device: torch.device | str | None
) -> dict[str, Tensor] | None:
    """Tensors `[H, ...]` where the device is "meta", for which nothing is drawn; None elsewhere."""
    if device is None or torch.device(device).type != "meta":
        return None
    return {name: torch.empty(heads, *shape, dtype=dtype, device=device) for name, shape in shapes.items()}


def readable(count: float) -> str:
    """A number of bytes in words."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:,.4g} {unit}"
        count /= 1024
    return f"{count:,.4g} TiB"
