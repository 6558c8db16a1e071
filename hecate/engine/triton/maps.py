"""Maps of keys and queries as kernels read them: phi of each number, rows over their size; and their derivatives.

Kernels of blocks do it as they load a row, in any dtype as it lies, so that features are never stored; where something
comes between features and kernel, rows come to unit length in a launch of their own. [ENG-TRITON-D7]
"""

import triton
import triton.language as tl

# Arguments that 16 may divide or not in the same kernel: what is tried on a few tokens is what runs on many.
COUNTS = ("T", "H", "N", "total", "rows")
PLAIN = tl.constexpr((None, None, "none", 1.0))  # rows as they lie
LEAST = tl.constexpr(2.0**-126)  # whose inverse float32 has, and that of nothing less


@triton.jit
def over(size):
    """One over sizes of rows, finite for those that have no inverse in float32."""
    return 1.0 / tl.maximum(size, LEAST)


@triton.jit
def size_of(x, NORM: tl.constexpr):
    """(rows over their largest number, its size, the length ("l2") or sum of such rows), 1 of a row of zeros.

    Squares leave float32's range long before the rows do."""
    most = tl.max(tl.abs(x), 1)
    x = x * over(most)[:, None]
    if NORM == "l2":
        size = tl.sqrt(tl.sum(x * x, 1))
    else:
        size = tl.sum(x, 1)
    size = tl.where(size > 0, size, 1.0)
    return x, tl.where(most > 0, tl.maximum(most, LEAST), 1.0), size


@triton.jit
def sized(x, NORM: tl.constexpr):
    """Rows over their length ("l2") or sum, and these; a zero row stays zero."""
    x, most, size = size_of(x, NORM)
    return x * (1.0 / size)[:, None], size * most


@triton.jit
def sized_back(g, y, size):
    """(g - y (y . g)) / size for rows y over their length."""
    return (g - y * tl.sum(y * g, 1)[:, None]) * over(size)[:, None]


@triton.jit
def featured(x, there, PHI: tl.constexpr):
    """(rows of features, their sizes) of rows x, 0 where there is nothing. PHI: a printed map and its pullback, None
    for the identity, a norm, and what queries are multiplied by. A NaN stays one."""
    y, size = x, tl.sum(x * 0.0, 1) + 1.0
    VALUE: tl.constexpr = PHI[0]
    if VALUE is not None:
        y = tl.where(there, VALUE(x, 0.0), 0.0)
    NORM: tl.constexpr = PHI[2]  # Triton 3.6 hands an item of a tuple on as no constant
    if NORM != "none":
        y, size = sized(y, NORM)
    return y, size


@triton.jit
def featured_back(g, x, there, PHI: tl.constexpr):
    """The cotangent of rows x from that of their features."""
    if PHI[2] != "none":
        y, size = featured(x, there, PHI)
        if PHI[2] == "l2":
            g = sized_back(g, y, size)
        else:
            g = (g - tl.sum(y * g, 1)[:, None]) * over(size)[:, None]
    PULL: tl.constexpr = PHI[1]
    if PULL is not None:
        g = PULL(x, g, 0.0)
    return g


@triton.jit(do_not_specialize_on_alignment=COUNTS)
def unit(x, y, sizes, rows, T, H, sb, st, sh, D: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr):
    """Rows `[B, T, H, D]` of the strides given over their lengths, and these lengths."""
    r, o = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR), tl.arange(0, BD)
    inside = r < rows
    there = inside[:, None] & (o < D)[None, :]
    at = r // (T * H) * sb + r // H % T * st + r % H * sh
    found, size = sized(tl.load(x + at[:, None] + o[None, :], mask=there, other=0.0).to(tl.float32), "l2")
    tl.store(y + r[:, None] * D + o[None, :], found.to(y.dtype.element_ty), mask=there)
    tl.store(sizes + r, size, mask=inside)


@triton.jit(do_not_specialize_on_alignment=COUNTS)
def unit_back(x, sizes, g, gx, rows, T, H, sb, st, sh, D: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr):
    """The cotangent of rows from that of rows at unit length."""
    r, o = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR), tl.arange(0, BD)
    inside = r < rows
    there, own = inside[:, None] & (o < D)[None, :], r[:, None] * D + o[None, :]
    at = r // (T * H) * sb + r // H % T * st + r % H * sh
    size = tl.load(sizes + r, mask=inside, other=1.0)
    y = tl.load(x + at[:, None] + o[None, :], mask=there, other=0.0).to(tl.float32) / size[:, None]
    found = sized_back(tl.load(g + own, mask=there, other=0.0).to(tl.float32), y, size)
    tl.store(gx + own, found.to(gx.dtype.element_ty), mask=there)
