"""Vectors for the kernels of the compiled engine: explicit SIMD, as numba has none.

`Lanes` is a vector of 64 bytes of one float type, or of some times as many: a whole row of a state. LLVM splits what is
wider than its registers.
The compiler contracts a product and a sum into one rounding and reorders nothing else, so NaN and infinities stay what
they are. Arrays are flat and C-contiguous; nothing checks bounds.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic, models, register_model

BYTES = 64

# numba's cache on disk watches the file of a function alone, hence a name after all of them.
_DIGEST = hashlib.sha256(
    b"".join(
        Path(__file__).with_name(f"{name}.py").read_bytes() for name in ("lanes", "rows", "kernels", "fours", "narrow")
    )
).hexdigest()[:12]

helper = njit(error_model="numpy", no_cfunc_wrapper=True, no_cpython_wrapper=True)
inline = njit(error_model="numpy", no_cfunc_wrapper=True, no_cpython_wrapper=True, forceinline=True)


def kernel(function: Callable[..., Any]) -> Any:
    """Compiled when first called; kept on disk where there is a place for it."""
    function.__qualname__ = f"{function.__name__}_{_DIGEST}"
    options = {"nogil": True, "error_model": "numpy", "no_cfunc_wrapper": True}
    try:
        return njit(cache=True, **options)(function)
    except RuntimeError:  # no folder to write to
        return njit(**options)(function)


class Lanes(types.Type):
    """Vectors of 64 bytes of one float type, side by side."""

    def __init__(self, scalar: Any, vectors: int = 1) -> None:
        self.scalar = scalar
        self.vectors = vectors
        super().__init__(name=f"Lanes({scalar}, {vectors})")

    @property
    def count(self) -> int:
        """Numbers in it."""
        return self.vectors * BYTES * 8 // int(self.scalar.bitwidth)


@register_model(Lanes)
class _LanesModel(models.PrimitiveModel):
    def __init__(self, manager: Any, lanes: Lanes) -> None:
        element = manager.lookup(lanes.scalar).get_value_type()
        super().__init__(manager, lanes, ir.VectorType(element, lanes.count))


def _pointer(context: Any, builder: Any, array: Any, lanes: Lanes, value: Any, at: Any) -> Any:
    data = context.make_array(array)(context, builder, value).data
    return builder.bitcast(builder.gep(data, [at]), context.get_value_type(lanes).as_pointer())


@intrinsic
def lanes(_: Any, array: Any) -> Any:
    """Numbers in a vector of this array's type."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return context.get_constant(types.intp, Lanes(array.dtype).count)

    return types.intp(array), code


@intrinsic
def load(_: Any, array: Any, at: Any) -> Any:
    """A vector from an array."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = _pointer(context, builder, array, signature.return_type, *args)
        return builder.load(pointer, align=array.dtype.bitwidth // 8)

    return Lanes(array.dtype)(array, types.intp), code


@intrinsic
def load_row(_: Any, array: Any, at: Any, width: Any) -> Any:
    """As many vectors from an array as the tuple `width` is long."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = _pointer(context, builder, array, signature.return_type, *args[:2])
        return builder.load(pointer, align=array.dtype.bitwidth // 8)

    return Lanes(array.dtype, len(width))(array, types.intp, width), code


@intrinsic
def load_like(_: Any, array: Any, at: Any, row: Any) -> Any:
    """As many vectors from an array as another row has."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = _pointer(context, builder, array, row, *args[:2])
        return builder.load(pointer, align=array.dtype.bitwidth // 8)

    return row(array, types.intp, row), code


@intrinsic
def store(_: Any, array: Any, at: Any, value: Any) -> Any:
    """A vector or a row into an array."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = _pointer(context, builder, array, value, *args[:2])
        builder.store(args[2], pointer, align=array.dtype.bitwidth // 8)
        return context.get_dummy_value()

    return types.void(array, types.intp, value), code


def _splat(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    vector = context.get_value_type(signature.return_type)
    start = ir.Constant(vector, ir.Undefined)
    first = builder.insert_element(start, args[1], ir.Constant(ir.IntType(32), 0))
    zeros = ir.Constant(ir.VectorType(ir.IntType(32), vector.count), None)
    return builder.shuffle_vector(first, start, zeros)


@intrinsic
def splat(_: Any, array: Any, value: Any) -> Any:
    """A number in every place of a vector of this array's type."""
    return Lanes(array.dtype)(array, array.dtype), _splat


@intrinsic
def splat_row(_: Any, row: Any, value: Any) -> Any:
    """A number in every place of a row like this one."""
    return row(row, row.scalar), _splat


@intrinsic
def number(_: Any, like: Any, value: Any) -> Any:
    """A number in the type of another: a literal would widen float32."""
    return like(like, like), lambda context, builder, signature, args: args[1]


@intrinsic
def mul(_: Any, a: Any, b: Any) -> Any:
    """a b."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.fmul(*args, flags=("contract",))

    return a(a, a), code


@intrinsic
def add(_: Any, a: Any, b: Any) -> Any:
    """a + b."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.fadd(*args, flags=("contract",))

    return a(a, a), code


@intrinsic
def mad(_: Any, a: Any, b: Any, c: Any) -> Any:
    """a b + c."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        product = builder.fmul(args[0], args[1], flags=("contract",))
        return builder.fadd(product, args[2], flags=("contract",))

    return a(a, a, a), code


@intrinsic
def shrunk(_: Any, a: Any, threshold: Any) -> Any:
    """a, every number of it moved towards 0 by a threshold, and to 0 from within it."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        high = _splat(context, builder, signature, args)
        low = builder.fsub(ir.Constant(high.type, None), high)
        below = builder.fcmp_ordered("<", args[0], low)
        part = builder.select(below, low, args[0])
        part = builder.select(builder.fcmp_ordered(">", args[0], high), high, part)
        return builder.fsub(args[0], part)

    return a(a, a.scalar), code


@intrinsic
def alive(_: Any, g: Any, a: Any) -> Any:
    """g where a is not 0, else 0."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        zero = ir.Constant(args[0].type, None)
        return builder.select(builder.fcmp_ordered("!=", args[1], zero), args[0], zero)

    return g(g, g), code


@intrinsic
def along(_: Any, a: Any, b: Any) -> Any:
    """a b of two rows, their vectors summed up to one."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        size = context.get_value_type(signature.return_type).count
        total = None
        for start in range(0, a.count, size):
            mask = ir.Constant(ir.VectorType(ir.IntType(32), size), [*range(start, start + size)])
            x, y = (builder.shuffle_vector(item, item, mask) for item in args)
            product = builder.fmul(x, y, flags=("contract",))
            total = product if total is None else builder.fadd(product, total, flags=("contract",))
        return total

    return Lanes(a.scalar)(a, a), code


@intrinsic
def sums(_: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
    """The sums over four vectors, folded together: half the vector, then a quarter, and so on."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        def fold(x: Any, y: Any, groups: int) -> Any:
            both = range(2 * x.type.count if y is not x else x.type.count)
            size = len(both) // groups
            halves = []
            for half in range(2):
                picked = [i for i in both if (i % size) // (size // 2) == half]
                mask = ir.Constant(ir.VectorType(ir.IntType(32), len(picked)), picked)
                halves.append(builder.shuffle_vector(x, y, mask))
            return builder.fadd(*halves, flags=("contract",))

        vector = fold(fold(args[0], args[1], 2), fold(args[2], args[3], 2), 4)
        while vector.type.count > 4:
            vector = fold(vector, vector, 4)
        picked = [builder.extract_element(vector, ir.Constant(ir.IntType(32), i)) for i in range(4)]
        return context.make_tuple(builder, signature.return_type, picked)

    return types.UniTuple(a.scalar, 4)(a, a, a, a), code
