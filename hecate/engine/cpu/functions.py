"""Quotients, roots, exponentials and logarithms of vectors: polynomials that stay in registers, where libm goes number
by number.

Errors are a few units in the last place, of either float type; NaN stays NaN. [ENG-NUM-D8]
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from hecate.engine.cpu.vectors import Vector, add, each, inline, mad, mul


@intrinsic
def div(_: Any, a: Any, b: Any) -> Any:
    """a / b."""
    return each(lambda builder, a, b: builder.fdiv(a, b), a, b)


@intrinsic
def larger(_: Any, a: Any, b: Any) -> Any:
    """max(a, b), a where it is NaN."""
    return each(lambda builder, a, b: builder.select(builder.fcmp_ordered("<", a, b), b, a), a, b)


@intrinsic
def smaller(_: Any, a: Any, b: Any) -> Any:
    """min(a, b), a where it is NaN."""
    return each(lambda builder, a, b: builder.select(builder.fcmp_ordered(">", a, b), b, a), a, b)


@intrinsic
def reaching(_: Any, a: Any, b: Any, c: Any) -> Any:
    """c where a >= b, else 0."""

    def operation(builder: Any, a: Any, b: Any, c: Any) -> Any:
        return builder.select(builder.fcmp_ordered(">=", a, b), c, ir.Constant(c.type, None))

    return each(operation, a, b, c)


def _called(name: str) -> Any:
    """An operation that LLVM has for vectors."""

    def operation(builder: Any, x: Any) -> Any:
        kind = "f32" if x.type.element == ir.FloatType() else "f64"
        of = builder.module.declare_intrinsic(
            f"llvm.{name}.v{x.type.count}{kind}", fnty=ir.FunctionType(x.type, [x.type])
        )
        return builder.call(of, [x])

    return operation


@intrinsic
def root(_: Any, x: Any) -> Any:
    """sqrt(x)."""
    return each(_called("sqrt"), x)


@intrinsic
def size(_: Any, x: Any) -> Any:
    """|x|."""
    return each(_called("fabs"), x)


@intrinsic
def _whole(_: Any, x: Any) -> Any:
    """x rounded to a whole number."""
    return each(_called("rint"), x)


@intrinsic
def signed(_: Any, x: Any, sign: Any) -> Any:
    """x >= 0 with the sign of another, 0 where that is 0."""

    def operation(builder: Any, x: Any, sign: Any) -> Any:
        zero = ir.Constant(x.type, None)
        below = builder.select(builder.fcmp_ordered("<", sign, zero), builder.fneg(x), zero)
        return builder.select(builder.fcmp_unordered(">", sign, zero), x, below)

    return each(operation, x, sign)


def _layout(vector: Any) -> tuple[Any, int, int]:
    """Integers as wide as its numbers, bits of a mantissa, and the bias of exponents."""
    single = vector.element == ir.FloatType()
    whole = ir.VectorType(ir.IntType(32 if single else 64), vector.count)
    return whole, 23 if single else 52, 127 if single else 1023


@intrinsic
def _scaled(_: Any, x: Any, n: Any) -> Any:
    """x 2^n for a whole number n within the range of exponents."""

    def operation(builder: Any, x: Any, n: Any) -> Any:
        whole, bits, bias = _layout(x.type)
        power = builder.add(builder.fptosi(n, whole), ir.Constant(whole, [bias] * x.type.count))
        power = builder.shl(power, ir.Constant(whole, [bits] * x.type.count))
        return builder.fmul(x, builder.bitcast(power, x.type))

    return each(operation, x, n)


@intrinsic
def _parts(_: Any, x: Any) -> Any:
    """n and m with x = m 2^n, m in [1, 2), of a positive normal number."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        (value,) = args
        whole, bits, bias = _layout(value.type)
        raw, count = builder.bitcast(value, whole), value.type.count
        n = builder.lshr(raw, ir.Constant(whole, [bits] * count))
        n = builder.sitofp(builder.sub(n, ir.Constant(whole, [bias] * count)), value.type)
        m = builder.and_(raw, ir.Constant(whole, [(1 << bits) - 1] * count))
        m = builder.or_(m, ir.Constant(whole, [bias << bits] * count))
        return context.make_tuple(builder, signature.return_type, [n, builder.bitcast(m, value.type)])

    return types.UniTuple(x, 2)(x), code


@intrinsic
def _single(_: Any, x: Any) -> Any:
    """True if numbers are float32."""
    vector = x if isinstance(x, Vector) else x.dtype
    single = vector.scalar.bitwidth == 32
    return types.boolean(x), lambda context, *_: context.get_constant(types.boolean, single)


@inline
def exp(x):
    """e^x, within [e^-87, e^88] in float32 and [e^-708, e^709] in float64."""
    single = _single(x)
    x = smaller(larger(x, -87.0 if single else -708.0), 88.0 if single else 709.0)
    n = _whole(mul(x, 1.4426950408889634))
    # log 2 in two parts, of which n times the first is exact.
    r = mad(n, -0.693359375 if single else -0.6931471803691238, x)
    r = mad(n, 2.12194440e-4 if single else -1.9082149292705877e-10, r)
    if single:
        y = mad(r, 1 / 5040, 1 / 720)
    else:
        y = mad(r, 1 / 6227020800, 1 / 479001600)
        y = mad(y, r, 1 / 39916800)
        y = mad(y, r, 1 / 3628800)
        y = mad(y, r, 1 / 362880)
        y = mad(y, r, 1 / 40320)
        y = mad(y, r, 1 / 5040)
        y = mad(y, r, 1 / 720)
    y = mad(y, r, 1 / 120)
    y = mad(y, r, 1 / 24)
    y = mad(y, r, 1 / 6)
    y = mad(y, r, 0.5)
    return _scaled(add(mad(y, mul(r, r), r), 1.0), n)


@inline
def log(x):
    """log x of a positive normal number: with m = x 2^-n and s = (m - 1)/(m + 1), n log 2 + 2 atanh s."""
    n, m = _parts(x)
    high = reaching(m, 1.4142135623730951, add(mul(m, 0.0), 1.0))
    n, m = add(n, high), mad(mul(m, -0.5), high, m)
    s = div(add(m, -1.0), add(m, 1.0))
    z = mul(s, s)
    if _single(x):
        y = mad(z, 1 / 11, 1 / 9)
    else:
        y = mad(z, 1 / 23, 1 / 21)
        y = mad(y, z, 1 / 19)
        y = mad(y, z, 1 / 17)
        y = mad(y, z, 1 / 15)
        y = mad(y, z, 1 / 13)
        y = mad(y, z, 1 / 11)
        y = mad(y, z, 1 / 9)
    y = mad(y, z, 1 / 7)
    y = mad(y, z, 1 / 5)
    y = mad(y, z, 1 / 3)
    y = mad(mul(y, z), s, s)
    return mad(n, 0.693147180559945309, add(y, y))
