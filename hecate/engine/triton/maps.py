"""Feature maps of keys and queries in kernels: elementwise phi, then rows over their size; and the derivatives.

Block kernels apply them as they load a row, in its stored dtype, so that features are never stored. Where another step
comes between features and kernel, rows are normalised in a launch of their own. [ENG-TRITON-D7]
"""

import triton
import triton.language as tl

# Not specialised on divisibility by 16: the kernel tried on a few tokens is the one that runs on many.
COUNTS = ("T", "H", "N", "total", "rows")
PLAIN = tl.constexpr((None, None, "none", 1.0))  # rows as stored
LEAST = tl.constexpr(2.0**-126)  # the least normal float32: its reciprocal is finite


@triton.jit
def over(size):
    """Reciprocals of the sizes of rows, finite for sizes too small to have one in float32."""
    return 1.0 / tl.maximum(size, LEAST)


@triton.jit
def size_of(x, NORM: tl.constexpr):
    """(rows over their largest magnitude, that magnitude, the length ("l2") or sum of such rows); 1 for a row of zeros.

    Squares leave float32's range long before the rows do, hence the scaling."""
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
    """Rows over their length ("l2") or sum, and that size; a zero row stays zero."""
    x, most, size = size_of(x, NORM)
    return x * (1.0 / size)[:, None], size * most


@triton.jit
def sized_back(g, y, size):
    """(g - y (y . g)) / size for rows y over their length."""
    return (g - y * tl.sum(y * g, 1)[:, None]) * over(size)[:, None]


@triton.jit
def featured(x, there, PHI: tl.constexpr):
    """(features, their sizes) of rows x, 0 where the mask is false. PHI: a printed map and its pullback, None for the
    identity, the norm, and the scale of queries. A NaN stays one."""
    y, size = x, tl.sum(x * 0.0, 1) + 1.0
    VALUE: tl.constexpr = PHI[0]
    if VALUE is not None:
        y = tl.where(there, VALUE(x, 0.0), 0.0)
    NORM: tl.constexpr = PHI[2]  # Triton 3.6 does not pass a tuple's item on as a constant
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
    """Divides rows `[B, T, H, D]` of the given strides by their lengths, and stores both."""
    r, o = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR), tl.arange(0, BD)
    inside = r < rows
    there = inside[:, None] & (o < D)[None, :]
    at = r // (T * H) * sb + r // H % T * st + r % H * sh
    found, size = sized(tl.load(x + at[:, None] + o[None, :], mask=there, other=0.0).to(tl.float32), "l2")
    tl.store(y + r[:, None] * D + o[None, :], found.to(y.dtype.element_ty), mask=there)
    tl.store(sizes + r, size, mask=inside)


@triton.jit(do_not_specialize_on_alignment=COUNTS)
def unit_back(x, sizes, g, gx, rows, T, H, sb, st, sh, D: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr):
    """The cotangent of rows, from that of the rows at unit length."""
    r, o = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR), tl.arange(0, BD)
    inside = r < rows
    there, own = inside[:, None] & (o < D)[None, :], r[:, None] * D + o[None, :]
    at = r // (T * H) * sb + r // H % T * st + r % H * sh
    size = tl.load(sizes + r, mask=inside, other=1.0)
    y = tl.load(x + at[:, None] + o[None, :], mask=there, other=0.0).to(tl.float32) / size[:, None]
    found = sized_back(tl.load(g + own, mask=there, other=0.0).to(tl.float32), y, size)
    tl.store(gx + own, found.to(gx.dtype.element_ty), mask=there)
