"""Building blocks of the kernels: vectors with explicit SIMD, as numba has none.

`Vector` is one of 64 bytes of one float type, or some of them side by side: a whole row of a state. LLVM splits what is
wider than its registers. Rows of a state go in fours, so that what they share is loaded once: `mul`, `add`, `mad`
and `along` take vectors, four vectors, and numbers, which count in every place.

The compiler contracts a product and a sum into one rounding and reorders nothing else, so NaN and infinities stay what
they are. Arrays are flat and C-contiguous; nothing checks bounds. [ENG-NUM-D1]
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic, models, register_model
from numba.np.arrayobj import populate_array

from hecate.engine.cpu.disk import compiled

BYTES = 64
ROWS = 4
ONE = (0,)  # the width of a single vector
FOUR = ()  # and of one of four numbers alone


OPTIONS = {"error_model": "numpy", "_nrt": False, "no_cfunc_wrapper": True, "no_cpython_wrapper": True}
helper, inline = njit(**OPTIONS), njit(**OPTIONS, forceinline=True)


kernel = partial(compiled, no_cfunc_wrapper=True)


class Vector(types.Type):
    """Vectors of 64 bytes of one float type, side by side; of none of them, four numbers."""

    def __init__(self, scalar: Any, vectors: int = 1) -> None:
        self.scalar = scalar
        self.vectors = vectors
        super().__init__(name=f"Vector({scalar}, {vectors})")

    @property
    def count(self) -> int:
        """Numbers in it."""
        return self.vectors * BYTES * 8 // int(self.scalar.bitwidth) or ROWS


@register_model(Vector)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager: Any, vector: Vector) -> None:
        element = manager.lookup(vector.scalar).get_value_type()
        super().__init__(manager, vector, ir.VectorType(element, vector.count))


@intrinsic
def per_vector(_: Any, array: Any) -> Any:
    """Numbers in a vector of this array's type."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return context.get_constant(types.intp, Vector(array.dtype).count)

    return types.intp(array), code


def _pointer(context: Any, builder: Any, array: Any, vector: Vector, value: Any, at: Any) -> Any:
    data = context.make_array(array)(context, builder, value).data
    return builder.bitcast(builder.gep(data, [at]), context.get_value_type(vector).as_pointer())


def _array_at(context: Any, builder: Any, kind: Any, data: Any, size: Any) -> Any:
    """The array of a type of so many numbers from a pointer on."""
    made, step = context.make_array(kind)(context, builder), context.get_constant(types.intp, kind.dtype.bitwidth // 8)
    populate_array(made, data=data, shape=[size], strides=[step], itemsize=step, meminfo=None)
    return made._getvalue()


@intrinsic
def part(_: Any, array: Any, index: Any, count: Any) -> Any:
    """The index-th so many numbers of an array, which has to outlive them."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        value, place, size = args
        data = builder.gep(context.make_array(array)(context, builder, value).data, [builder.mul(place, size)])
        return _array_at(context, builder, array, data, size)

    return array(array, types.intp, types.intp), code


@intrinsic
def raw(_: Any, like: Any, address: Any) -> Any:
    """The array of the type of `like` that starts at an address."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = builder.inttoptr(args[1], context.get_value_type(like.dtype).as_pointer())
        return _array_at(context, builder, like, data, context.get_constant(types.intp, 1 << 40))

    return like(like, types.intp), code


@intrinsic
def call(_: Any, address: Any, arguments: Any) -> Any:
    """Calls the compiled function at an address, which returns nothing, with a tuple of arguments. numba takes tens of
    microseconds to be handed a function as such."""
    kinds = [types.unliteral(kind) for kind in arguments]

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = context.call_conv.get_function_type(types.none, kinds)
        values = [builder.extract_value(args[1], index) for index in range(len(kinds))]
        function = builder.inttoptr(args[0], kind.as_pointer())
        context.call_conv.call_function(builder, function, types.none, kinds, values)
        return context.get_dummy_value()

    return types.void(types.intp, types.Tuple(kinds)), code


@intrinsic
def load(_: Any, array: Any, at: Any, width: Any) -> Any:
    """As many vectors from an array as the tuple `width` is long, or as the vector `width` has."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = _pointer(context, builder, array, signature.return_type, *args[:2])
        # Rows of a caller's tensor begin anywhere: no more than a number's alignment is promised.
        return builder.load(pointer, align=array.dtype.bitwidth // 8)

    vector = width if isinstance(width, Vector) else Vector(array.dtype, len(width))
    return vector(array, types.intp, width), code


@intrinsic
def load_rows(_: Any, array: Any, at: Any, P: Any, width: Any) -> Any:
    """The same place of four rows, each of P numbers; None of None."""
    if isinstance(array, types.NoneType):
        return types.none(array, at, P, width), lambda context, *_: context.get_dummy_value()
    vector = Vector(array.dtype, len(width))

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        value, place, step, _ = args
        rows = []
        for _ in range(ROWS):
            pointer = _pointer(context, builder, array, vector, value, place)
            rows.append(builder.load(pointer, align=array.dtype.bitwidth // 8))
            place = builder.add(place, step)
        return context.make_tuple(builder, signature.return_type, rows)

    return types.UniTuple(vector, ROWS)(array, types.intp, types.intp, width), code


@intrinsic
def store(_: Any, array: Any, at: Any, value: Any) -> Any:
    """A vector into an array."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = _pointer(context, builder, array, value, *args[:2])
        builder.store(args[2], pointer, align=array.dtype.bitwidth // 8)
        return context.get_dummy_value()

    return types.void(array, types.intp, value), code


def _spread(builder: Any, vector: Any, number: Any) -> Any:
    start = ir.Constant(vector, ir.Undefined)
    first = builder.insert_element(start, number, ir.Constant(ir.IntType(32), 0))
    return builder.shuffle_vector(first, start, ir.Constant(ir.VectorType(ir.IntType(32), vector.count), None))


@intrinsic
def filled(_: Any, like: Any, value: Any) -> Any:
    """A number in every place of one vector of an array's type, or of a vector like this one."""
    vector = like if isinstance(like, Vector) else Vector(like.dtype)

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _spread(builder, context.get_value_type(vector), args[1])

    return vector(like, vector.scalar), code


@intrinsic
def number(_: Any, like: Any, value: Any) -> Any:
    """A number in the type of another: a literal would widen float32."""
    return like(like, like), lambda context, builder, signature, args: args[1]


def each(operation: Callable[..., Any], *given: Any, result: Any = None) -> Any:
    """An operation of vectors of these types; of fours of them row by row, of numbers in every place."""
    kinds = [item.dtype if isinstance(item, types.UniTuple) else item for item in given]
    fours = [isinstance(item, types.UniTuple) for item in given]
    vector = next(kind for kind in (getattr(kind, "of", kind) for kind in kinds) if isinstance(kind, Vector))
    own = result(vector) if result else vector
    whole = types.UniTuple(own, ROWS) if any(fours) else own

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        def row(index: int) -> Any:
            inputs = []
            for value, kind, four in zip(args, kinds, fours, strict=True):
                value = builder.extract_value(value, index) if four else value
                if isinstance(kind, types.Number):
                    wide = context.get_value_type(vector)
                    value = _spread(builder, wide, context.cast(builder, value, kind, vector.scalar))
                inputs.append(value)
            return operation(builder, *inputs)

        rows = [row(index) for index in range(ROWS if any(fours) else 1)]
        return context.make_tuple(builder, whole, rows) if any(fours) else rows[0]

    return whole(*given), code


def _product(builder: Any, a: Any, b: Any) -> Any:
    # `contract` alone: a product and a sum may be one rounding, sums keep their order.
    return builder.fmul(a, b, flags=("contract",))


def _sum(builder: Any, a: Any, b: Any) -> Any:
    return builder.fadd(a, b, flags=("contract",))


@intrinsic
def mul(_: Any, a: Any, b: Any) -> Any:
    """a b."""
    return each(_product, a, b)


@intrinsic
def add(_: Any, a: Any, b: Any) -> Any:
    """a + b."""
    return each(_sum, a, b)


@intrinsic
def mad(_: Any, a: Any, b: Any, c: Any) -> Any:
    """a b + c."""
    return each(lambda builder, a, b, c: _sum(builder, _product(builder, a, b), c), a, b, c)


@intrinsic
def total(_: Any, w: Any, a: Any) -> Any:
    """The sum of four products, number by number: (w_1 a_1 + w_0 a_0) + (w_3 a_3 + w_2 a_2)."""
    fours, multiply = each(_product, w, a)

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        products = multiply(context, builder, fours, args)
        p, q, r, s = (builder.extract_value(products, index) for index in range(ROWS))
        return _sum(builder, _sum(builder, q, p), _sum(builder, s, r))

    return fours.return_type.dtype(w, a), code


@intrinsic
def along(_: Any, a: Any, b: Any) -> Any:
    """a b, the vectors of a row summed up to one."""

    def operation(builder: Any, a: Any, b: Any) -> Any:
        total = None
        for start in range(0, a.type.count, a.type.count // vectors):
            mask = ir.Constant(ir.VectorType(ir.IntType(32), size), [*range(start, start + size)])
            product = _product(builder, *(builder.shuffle_vector(item, item, mask) for item in (a, b)))
            total = product if total is None else _sum(builder, product, total)
        return total

    row = b if isinstance(b, Vector) else b.dtype
    vectors, size = row.vectors, row.count // row.vectors
    return each(operation, a, b, result=lambda vector: Vector(vector.scalar))


@intrinsic
def sums(_: Any, rows: Any) -> Any:
    """The sums over four vectors, folded together: half the vector, then a quarter, and so on."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        def fold(x: Any, y: Any, groups: int) -> Any:
            # Halves of two vectors are added side by side: four sums take hardly more steps than one.
            both = range(2 * x.type.count if y is not x else x.type.count)
            size = len(both) // groups
            halves = []
            for half in range(2):
                picked = [i for i in both if (i % size) // (size // 2) == half]
                mask = ir.Constant(ir.VectorType(ir.IntType(32), len(picked)), picked)
                halves.append(builder.shuffle_vector(x, y, mask))
            return _sum(builder, *halves)

        a, b, c, d = (builder.extract_value(args[0], index) for index in range(ROWS))
        vector = fold(fold(a, b, 2), fold(c, d, 2), 4)
        while vector.type.count > 4:
            vector = fold(vector, vector, 4)
        picked = [builder.extract_element(vector, ir.Constant(ir.IntType(32), i)) for i in range(ROWS)]
        return context.make_tuple(builder, signature.return_type, picked)

    return types.UniTuple(rows.dtype.scalar, ROWS)(rows), code


@inline
def store_rows(A, o, P, rows):
    """The same place of four rows."""
    a, b, c, d = rows
    store(A, o, a)
    store(A, o + P, b)
    store(A, o + 2 * P, c)
    store(A, o + 3 * P, d)


@inline
def zeros(like):
    """Four vectors of zeros."""
    zero = filled(like, 0.0)
    return zero, zero, zero, zero


@inline
def get(x, at):
    """Four numbers."""
    return x[at], x[at + 1], x[at + 2], x[at + 3]


@inline
def put(x, at, u):
    """Four numbers into an array."""
    x[at], x[at + 1], x[at + 2], x[at + 3] = u


@inline
def times(w, u):
    """Four numbers times one."""
    u0, u1, u2, u3 = u
    return w * u0, w * u1, w * u2, w * u3


@inline
def scores(u, d):
    """The sum of four products of numbers."""
    return u[0] * d[0] + u[1] * d[1] + u[2] * d[2] + u[3] * d[3]


@intrinsic
def out_of_line(_: Any) -> Any:
    """Keeps the function that says so a call in those that call it: compiled once, not once per caller."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.function.attributes.discard("alwaysinline")  # of a caller that is inlined itself
        builder.function.attributes.add("noinline")
        return context.get_dummy_value()

    return types.void(), code


@helper
def copy(source, target):
    """target = source, as long as the target."""
    count, wide = target.size, per_vector(target)
    for o in range(0, count - wide + 1, wide):
        store(target, o, load(source, o, ONE))
    for o in range(count - count % wide, count):
        target[o] = source[o]


@helper
def fill(target, value):
    """The same number everywhere."""
    count, wide, row = target.size, per_vector(target), filled(target, value)
    for o in range(0, count - wide + 1, wide):
        store(target, o, row)
    for o in range(count - count % wide, count):
        target[o] = value


@inline
def first_token(n, heads, T):
    """The first token of a memory in `[B, T, heads]`: its tokens are `heads` apart."""
    return n // heads * heads * T + n % heads


@inline
def learned(errs, preds, v):
    """u of four coordinates: pred - v, or -v without errs."""
    (p0, p1, p2, p3), (v0, v1, v2, v3) = preds, v
    return (p0 - v0, p1 - v1, p2 - v2, p3 - v3) if errs is not None else (-v0, -v1, -v2, -v3)
