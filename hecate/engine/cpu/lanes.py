"""Operators of vectors, and the names that printed formulas are made of: polynomials that stay in registers, where libm
goes number by number.

`+ - * /`, comparisons, `& |` and `abs` take vectors and numbers, which count in every place; a comparison makes a
`Mask`, which `where` chooses by. NaN and infinities are torch's: comparisons with NaN are false but for `!=`, and
no operator is contracted with another. In either float type and over its whole range `abs`, `sqrt` and `floor` are
exact, `log` and `log1p` within 1 unit in the last place, `exp`, `expm1`, `tanh`, `erf`, `power` and libm's `sin` and
`cos` within 1.5. [ENG-NUM-D8]
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from itertools import product, zip_longest
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic, lower_builtin, models, register_model, type_callable

from hecate.engine.cpu.vectors import Vector, _product, _spread, _sum, each, filled, inline, mad


class Mask(types.Type):
    """An answer for each number of a vector."""

    def __init__(self, of: Vector) -> None:
        self.of = of  # choosing between two mere numbers makes one, too
        super().__init__(name=f"Mask({of})")


@register_model(Mask)
class _MaskModel(models.PrimitiveModel):
    def __init__(self, manager: Any, mask: Mask) -> None:
        super().__init__(manager, mask, ir.VectorType(ir.IntType(1), mask.of.count))


# Operations, `(builder, *vectors)`, and how they join: as operators of Python, or as names.


def _operator(of: Any, operation: Callable[..., Any], count: int = 2, result: Any = None) -> None:
    def typed(*kinds: Any) -> Any:
        rest = {kind for kind in kinds if not isinstance(kind, types.Number)}
        known = len(rest) == 1 and all(isinstance(kind, Vector | Mask) for kind in rest)
        return each(operation, *kinds, result=result)[0].return_type if known else None

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return each(operation, *signature.args, result=result)[1](context, builder, signature, args)

    type_callable(of)(lambda context: (lambda a: typed(a)) if count == 1 else (lambda a, b: typed(a, b)))
    for kinds in product((Vector, Mask, types.Number), repeat=count):
        if set(kinds) != {types.Number}:
            lower_builtin(of, *kinds)(code)


def _named(operation: Callable[..., Any], count: int = 1) -> Any:
    forms = (
        lambda _, a: each(operation, a),
        lambda _, a, b: each(operation, a, b),
        lambda _, a, b, c: each(operation, a, b, c),
    )
    return intrinsic(forms[count - 1])


def _called(name: str) -> Callable[..., Any]:
    """An operation of LLVM on vectors."""

    def operation(builder: Any, *args: Any) -> Any:
        wide = args[0].type
        own = f"llvm.{name}.v{wide.count}f{32 if wide.element == ir.FloatType() else 64}"
        form = ir.FunctionType(wide, [wide] * len(args))
        return builder.call(builder.module.declare_intrinsic(own, fnty=form), args)

    return operation


def _number_by_number(name: str) -> Callable[..., Any]:
    """A function of libm, number by number."""

    def operation(builder: Any, x: Any) -> Any:
        one, y = x.type.element, ir.Constant(x.type, ir.Undefined)
        own = f"{name}f" if one == ir.FloatType() else name
        of = builder.module.globals.get(own) or ir.Function(builder.module, ir.FunctionType(one, [one]), own)
        for i in range(x.type.count):
            place = ir.Constant(ir.IntType(32), i)
            y = builder.insert_element(y, builder.call(of, [builder.extract_element(x, place)]), place)
        return y

    return operation


def _folded(combined: Callable[..., Any]) -> Callable[..., Any]:
    """All numbers of a vector combined, in every place of it."""

    def operation(builder: Any, x: Any) -> Any:
        whole, count = x.type, x.type.count
        while count := count // 2:  # each number with the one that lies so many places on
            places = ir.VectorType(ir.IntType(32), count)
            halves = (ir.Constant(places, [*range(start, start + count)]) for start in (0, count))
            x = combined(builder, *(builder.shuffle_vector(x, x, half) for half in halves))
        return _spread(builder, whole, builder.extract_element(x, ir.Constant(ir.IntType(32), 0)))

    return operation


def _larger(builder: Any, a: Any, b: Any) -> Any:
    """The larger of two, NaN if one of them is."""
    second = builder.or_(builder.fcmp_ordered("<", a, b), builder.fcmp_unordered("uno", b, b))
    return builder.select(second, b, a)


def _polynomial(single: Any, double: Any) -> Any:
    """With these coefficients, from the constant one on, in float32 and float64: in pairs, a shorter chain than one."""

    def operation(builder: Any, x: Any) -> Any:
        terms = [_all(x.type, c) for c in (single if x.type.element == ir.FloatType() else double)]
        square, y = builder.fmul(x, x), None
        for a, b in reversed([*zip_longest(terms[::2], terms[1::2])]):
            pair = a if b is None else _sum(builder, _product(builder, b, x), a)
            y = pair if y is None else _sum(builder, _product(builder, y, square), pair)
        return y

    return _named(operation)


for _of, _code in {"add": "fadd", "sub": "fsub", "mul": "fmul", "truediv": "fdiv"}.items():
    _operator(getattr(operator, _of), lambda builder, a, b, code=_code: getattr(builder, code)(a, b))
for _of, _code in {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "=="}.items():
    _operator(getattr(operator, _of), lambda builder, a, b, code=_code: builder.fcmp_ordered(code, a, b), result=Mask)
_operator(operator.ne, lambda builder, a, b: builder.fcmp_unordered("!=", a, b), result=Mask)
_operator(operator.and_, lambda builder, a, b: builder.and_(a, b), result=Mask)
_operator(operator.or_, lambda builder, a, b: builder.or_(a, b), result=Mask)
_operator(operator.neg, lambda builder, a: builder.fneg(a), count=1)
_operator(abs, _called("fabs"), count=1)

# a where the mask says so, else b; sums and the largest number, or NaN, come in every place.
where = _named(lambda builder, mask, a, b: builder.select(mask, a, b), 3)
sqrt, floor = _named(_called("sqrt")), _named(_called("floor"))
sin, cos = (_named(_number_by_number(name)) for name in ("sin", "cos"))
total = _named(_folded(lambda builder, a, b: builder.fadd(a, b)))
top, larger = _named(_folded(_larger)), _named(_larger, 2)
_fma, _signed = _named(_called("fma"), 3), _named(_called("copysign"), 2)
_like = _named(lambda builder, x, other: x, 2)  # x, a vector where the other is one


@intrinsic
def places(_: Any, x: Any) -> Any:
    """0, 1, 2, and so on, in as many places as x has."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return ir.Constant(context.get_value_type(x), [float(i) for i in range(x.count)])

    return x(x), code


@intrinsic
def first(_: Any, x: Any) -> Any:
    """The first number."""
    at = ir.Constant(ir.IntType(32), 0)
    return x.scalar(x), lambda context, builder, signature, args: builder.extract_element(args[0], at)


@inline
def true(mask, x, other):
    """x, of whose numbers all are true."""
    return x


# Bits of floats.


def _layout(vector: Any) -> tuple[Any, int, int]:
    """Integers as wide as its numbers, bits of a mantissa, and the bias of exponents."""
    single = vector.element == ir.FloatType()
    whole = ir.VectorType(ir.IntType(32 if single else 64), vector.count)
    return whole, 23 if single else 52, 127 if single else 1023


def _all(kind: Any, value: Any) -> Any:
    return ir.Constant(kind, [value] * kind.count)


# x 2^n, given t = n + 1.5 2^(bits of a mantissa), whose last bits are n: where x and the product are normal numbers by
# adding to the exponent, else by two factors that are normal numbers, so that the product is rounded once.


def _shift(builder: Any, x: Any, t: Any) -> Any:
    whole, bits, _ = _layout(x.type)
    n = builder.shl(builder.bitcast(t, whole), _all(whole, bits))
    return builder.bitcast(builder.add(builder.bitcast(x, whole), n), x.type)


def _scale(builder: Any, x: Any, t: Any) -> Any:
    whole, bits, bias = _layout(x.type)
    start = (bias + bits << bits) + (1 << bits - 1)
    n = builder.sub(builder.bitcast(t, whole), _all(whole, start - 2 * bias))
    half = builder.lshr(n, _all(whole, 1))
    for power in (half, builder.sub(n, half)):
        x = builder.fmul(x, builder.bitcast(builder.shl(power, _all(whole, bits)), x.type))
    return x


_shifted, _scaled = _named(_shift, 2), _named(_scale, 2)


@intrinsic
def _parts(_: Any, x: Any) -> Any:
    """n and m with x = m 2^n, m from sqrt(1/2) to sqrt(2), of a positive normal number."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind, (whole, bits, bias) = args[0].type, _layout(args[0].type)
        root = (bias - 1 << bits) + int((math.sqrt(2) - 1) * 2**bits)
        raw = builder.add(builder.bitcast(args[0], whole), _all(whole, (bias << bits) - root))
        m = builder.add(builder.and_(raw, _all(whole, (1 << bits) - 1)), _all(whole, root))
        # As the last bits of the mantissa of 2^bits, a whole number is a float at once.
        n = builder.or_(builder.lshr(raw, _all(whole, bits)), _all(whole, bias + bits << bits))
        n = builder.fsub(builder.bitcast(n, kind), _all(kind, float(2**bits + bias)))
        return context.make_tuple(builder, signature.return_type, [n, builder.bitcast(m, kind)])

    return types.UniTuple(x, 2)(x), code


@intrinsic
def _single(_: Any, x: Any) -> Any:
    """True of numbers in float32."""
    return types.boolean(x), lambda context, *_: context.get_constant(types.boolean, x.scalar.bitwidth == 32)


@intrinsic
def _cast(_: Any, x: Any, like: Any) -> Any:
    """x in the type of another vector, or in float64."""
    new = like if isinstance(like, Vector) else Vector(types.float64, x.vectors * 64 // x.scalar.bitwidth)

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        turned = builder.fptrunc if new.scalar == types.float32 else builder.fpext
        return args[0] if new == x else turned(args[0], context.get_value_type(new))

    return new(x, like), code


# Exponentials and logarithms. The polynomials: (e^r - 1 - r) / r^2 by r; (log(1 + s) - log(1 - s) - 2 s) / s^3 by s^2;
# half of that, its first term gone, over s^2; and of the least error
# (tanh x / x - 1) / x^2 by x^2 below 0.625, erf x / x - 1 by x^2 below 1, and - log(1 - erf x) by x - 1 above, up to
# where erf is 1: 4 and 6.

_grown = _polynomial([1 / math.factorial(n) for n in range(2, 8)], [1 / math.factorial(n) for n in range(2, 14)])
_bent = _polynomial([2 / n for n in (3, 5, 7, 9)], [2 / n for n in range(3, 24, 2)])
_bent_further = _polynomial([], [1 / n for n in range(5, 26, 2)])
_flattened = _polynomial(
    [-0.33333281942, 0.133314422, -0.05373971518, 0.02063908746, -0.005704987158],
    [-0.33333333333332855, 0.13333333333262091, -0.053968253931267707, 0.021869487576094674, -0.0088632210026308462,
     0.0035919891738098884, -0.0014549588779203056, 0.00058631653999073041, -0.00022856421017816242,
     7.7144365330290745e-5, -1.6072568924956317e-5],
)  # fmt: skip
_near = _polynomial(
    [0.12837916572, -0.37612625807, 0.11283584936, -0.026853802797, 0.0051883103482, -0.00080100440789,
     7.8533816074e-05],
    [0.12837916709551257, -0.37612638903183519, 0.11283791670944158, -0.026866170643107508, 0.0052239776060879948,
     -0.00085483259279364188, 0.00012055293537844502, -1.4924711588030736e-05, 1.6447123157171297e-06,
     -1.6206252012407701e-07, 1.3710723752362671e-08, -7.7790069989389134e-10],
)  # fmt: skip
_far = _polynomial(
    [1.8496055158, 2.6389668724, 0.84311767057, 0.041503300926, -0.0098951820142, 0.0018292041112,
     -0.00018633603134],
    [1.8496055099332482, 2.6389675142347886, 0.84310725635865913, 0.041561098042179376, -0.010033825378428979,
     0.0019779025938702747, -0.00023732259015685675, -2.6277563336572017e-05, 2.7158477075168212e-05,
     -9.6079583614269616e-06, 2.0587391470675993e-06, -1.4203128454215149e-07, -9.8061914026156788e-08,
     5.2270225708432205e-08, -1.498789787818468e-08, 2.8818092655750406e-09, -3.7100710914849345e-10,
     2.9071857792684834e-11, -1.0498529304345816e-12],
)  # fmt: skip


@inline
def _log2(x):
    """log 2 in two parts, of which whole numbers times the first are exact."""
    return (0.693138122558594, 9.0580006144e-06) if _single(x) else (0.6931471803691238, 1.9082149292705877e-10)


@inline
def _reduced(x, low, high):
    """Of x within these bounds t, as above, and r with x = n log 2 + r, and what r has lost."""
    x = where(x > high, high, where(x < low, low, x))
    (first, second), start = _log2(x), 12582912.0 if _single(x) else 6755399441055744.0
    t = mad(x, 1.4426950408889634, start)
    n = t - start
    near = mad(n, -first, x)
    r = mad(n, -second, near)
    return t, r, mad(n, -second, near - r)


@inline
def exp(x):
    """e^x."""
    single = _single(x)
    t, r, _ = _reduced(x, -104.0 if single else -746.0, 89.0 if single else 710.0)
    return _scaled(mad(r * r, _grown(r), r) + 1.0, t)


@inline
def normal_exp(x):
    """e^x, within [e^-87, e^88] in float32 and [e^-708, e^709] in float64: numbers that no processor is slow on."""
    single = _single(x)
    t, r, _ = _reduced(x, -87.0 if single else -708.0, 88.0 if single else 709.0)
    return _shifted(mad(r * r, _grown(r), r) + 1.0, t)


@inline
def quick_exp(x):
    """e^x, with 0 and infinity beyond what `normal_exp` knows."""
    low, high = (-87.0, 88.0) if _single(x) else (-708.0, 709.0)
    return where(x < low, 0.0, where(x > high, math.inf, normal_exp(x)))


@inline
def expm1(x):
    """e^x - 1, twice the half of it, which does not overflow."""
    t, r, lost = _reduced(x, -40.0, 89.0 if _single(x) else 710.0)
    half = _shifted(filled(x, 0.5), t)
    y = mad(half, mad(r * r, _grown(r), lost), mad(half, r, half - 0.5))
    return where(abs(x) < 1e-30, x, y + y)


@inline
def tanh(x):
    """tanh x, 1 - 2 / (e^2x + 1) from where that loses nothing."""
    a, z = abs(x), x * x
    far = 1.0 - 2.0 / (normal_exp(a + a) + 1.0)
    return where(a < 0.625, x * mad(z, _flattened(z), 1.0), _signed(far, x))


@inline
def erf(x):
    """The error function."""
    a, z, most = abs(x), x * x, 4.0 if _single(x) else 6.0
    beyond = where(a < 1.0, 1.0, where(a > most, most, a))
    far = 1.0 - normal_exp(-_far(beyond - 1.0))
    return where(a < 1.0, mad(x, _near(z), x), where(x == x, _signed(far, x), x))


@inline
def _all_parts(x):
    """n and m of any positive number."""
    least, up = (1.1754943508222875e-38, 24.0) if _single(x) else (2.2250738585072014e-308, 54.0)
    n, m = _parts(where(x < least, x * 2.0**up, x))
    return where(x < least, n - up, n), m


@inline
def _ends(x, y):
    """y where x is a positive number, else the logarithm of x."""
    return where(x == math.inf, x, where(x > 0.0, y, where(x == 0.0, -math.inf, math.nan)))


@inline
def _log(parts, rest):
    """log x + rest from n and m of x: with f = m - 1 and s = f/(2 + f), n log 2 + f - f^2/2 + s (f^2/2 + ..)."""
    (n, m), (high, low) = parts, _log2(parts[0])
    f = m - 1.0
    s, half = f / (f + 2.0), f * f * 0.5
    z = s * s
    bend = mad(s, mad(z, _bent(z), half), mad(n, low, rest))
    return mad(n, high, f - (half - bend))


@inline
def log(x):
    """log x."""
    return _ends(x, _log(_all_parts(x), 0.0))


@inline
def log1p(x):
    """log(1 + x), with what 1 + x loses by rounding."""
    u = x + 1.0
    lost = x - (u - 1.0)
    return where(x == 0.0, x, _ends(u, _log(_parts(u), lost / u)))


@inline
def _after(a, b):
    """a + b rounded, and what that loses where |b| <= |a|, a is 0, or a + b - a is exact."""
    c = a + b
    return c, b - (c - a)


@inline
def _log_in_two(x):
    """log x = n log 2 + 2 (s + s u), z = s^2, u = z (1/3 + z (1/5 + ..)), in float64 as a sum of two, to 2^-64."""
    (n, m), (high, low) = _all_parts(x), _log2(x)
    g, g_low = _after(1.0, m)
    f = m - 1.0
    s = f / g
    s_low = (_fma(-s, g, f) - s * g_low) / g
    z = s * s
    z_low = _fma(s, s, -z) + 2.0 * s * s_low
    t, t_low = _after(1 / 3, z * _bent_further(z))
    u = z * t
    u_low = _fma(z, t, -u) + (z * (t_low + 1.850371707708594e-17) + z_low * t)  # with what 1/3 has lost
    v = s * u
    a, a_low = _after(s, v)
    a_low = a_low + (s_low + (_fma(s, u, -v) + s * u_low + s_low * u))
    b, b_low = _after(n * high, a + a)
    return b, b_low + (2.0 * a_low + n * low)


@inline
def power(x, n):
    """x^n of vectors or numbers, in float64; there the logarithm is in two parts."""
    base, n = _like(x, n), _cast(_like(n, x), 0.0)
    x = _cast(base, 0.0)
    a = abs(x)
    if _single(base):
        y = exp(n * log(a))
    else:
        high, low = _log_in_two(a)
        high = _ends(a, high)
        p = n * high
        t, r, _ = _reduced(p, -750.0, 750.0)
        r = r + where(abs(p) < 750.0, _fma(n, high, -p) + n * low, 0.0)
        y = _scaled(mad(r * r, _grown(r), r) + 1.0, t)
    half, whole = n * 0.5, floor(n) == n
    y = where(whole & (floor(half) != half), _signed(y, x), where(whole | (x >= 0.0) | (a == math.inf), y, math.nan))
    return _cast(where((n == 0.0) | (x == 1.0) | (a == 1.0) & (abs(n) == math.inf), 1.0, y), base)


@inline
def quick_power(x, n):
    """x^n by e^(n log |x|), which loses as many digits as the exponent is large."""
    y, half = exp(n * log(abs(x))), n * 0.5
    signed = where(_like(floor(_like(half, x)) != half, x), -y, y)
    return where(x < 0.0, where(floor(_like(n, x)) == n, signed, math.nan), y)


@intrinsic
def _guessed(_: Any, x: Any) -> Any:
    """x^(-1/3) of a positive number, to a few bits: a third of its own."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        whole, _, _ = _layout(args[0].type)
        start = 1419967116 if x.scalar.bitwidth == 32 else 6142909891733356544
        third = builder.lshr(builder.bitcast(args[0], whole), _all(whole, 2))
        for shift in (2, 4, 8):  # 1/4 + 1/16 + ..., for processors do not divide vectors of integers
            third = builder.add(third, builder.lshr(third, _all(whole, shift)))
        return builder.bitcast(builder.sub(_all(whole, start), third), args[0].type)

    return x(x), code


@inline
def _thirds(x, n):
    """x^(n/3) of positive normal numbers by Halley's method for y^-3 = x, without quotients: an error e of x y^3
    becomes .52 e^3, from at most .3."""
    y = _guessed(x)
    for _ in range(2 if _single(x) else 3):
        e = 1.0 - (x * y) * (y * y)
        y = y + y * (e * (e * 0.2222222222222222 + 0.3333333333333333))
    return y if n == -1 else y * y if n == -2 else x * y * y if n == 1 else x * y


@inline
def thirds(x, n):
    """x^(n/3) for n = -2, -1, 1 and 2, of positive normal numbers; others as `quick_power` has them."""
    least = 1.1754943508222875e-38 if _single(x) else 2.2250738585072014e-308
    least_power, most = (0.0, math.inf) if n > 0 else (math.inf, 0.0)
    edge = where(x >= 0.0, where(x == math.inf, most, least_power), math.nan)
    return where((x >= least) & (x < math.inf), _thirds(x, n), edge)


@inline
def thirds_above(x, n):
    """The same of numbers that are normal, infinite or NaN."""
    return where(x == math.inf, math.inf if n > 0 else 0.0, _thirds(x, n))


NAMES = {
    "where": where, "abs": abs, "sqrt": sqrt, "exp": exp, "log": log, "log1p": log1p, "expm1": expm1, "tanh": tanh,
    "sin": sin, "cos": cos, "erf": erf, "floor": floor, "power": power, "total": total, "top": top,
}  # fmt: skip
