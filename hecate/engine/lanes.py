"""Vectors for the kernels of the compiled engine: explicit SIMD, as numba has none.

`Lanes` is a vector of 64 bytes of one float type, which LLVM splits where registers are narrower.
The compiler contracts a product and a sum into one rounding and reorders nothing else, so NaN and
infinities stay what they are. Arrays are flat and C-contiguous; nothing checks bounds.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic, models, register_model

BYTES = 64


class Lanes(types.Type):
    """A vector of 64 bytes of one float type."""

    def __init__(self, scalar: Any) -> None:
        self.scalar = scalar
        super().__init__(name=f"Lanes({scalar})")

    @property
    def count(self) -> int:
        """Numbers in a vector."""
        return BYTES * 8 // int(self.scalar.bitwidth)


@register_model(Lanes)
class _LanesModel(models.PrimitiveModel):
    def __init__(self, manager: Any, lanes: Lanes) -> None:
        element = manager.lookup(lanes.scalar).get_value_type()
        super().__init__(manager, lanes, ir.VectorType(element, lanes.count))


def _pointer(context: Any, builder: Any, array: Any, value: Any, at: Any) -> Any:
    data = context.make_array(array)(context, builder, value).data
    vector = context.get_value_type(Lanes(array.dtype))
    return builder.bitcast(builder.gep(data, [at]), vector.as_pointer())


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
        pointer = _pointer(context, builder, array, *args)
        return builder.load(pointer, align=array.dtype.bitwidth // 8)

    return Lanes(array.dtype)(array, types.intp), code


@intrinsic
def store(_: Any, array: Any, at: Any, value: Any) -> Any:
    """A vector into an array."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = _pointer(context, builder, array, *args[:2])
        builder.store(args[2], pointer, align=array.dtype.bitwidth // 8)
        return context.get_dummy_value()

    return types.void(array, types.intp, Lanes(array.dtype)), code


@intrinsic
def splat(_: Any, array: Any, value: Any) -> Any:
    """A number in every place of a vector of this array's type."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        vector = context.get_value_type(signature.return_type)
        first = builder.insert_element(
            ir.Constant(vector, ir.Undefined), args[1], ir.Constant(ir.IntType(32), 0)
        )
        zeros = ir.Constant(ir.VectorType(ir.IntType(32), vector.count), None)
        return builder.shuffle_vector(first, ir.Constant(vector, ir.Undefined), zeros)

    return Lanes(array.dtype)(array, array.dtype), code


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
