"""Rows at unit length, y = x / |x|, and their derivative, a launch each.

x is read in any dtype as it lies, heads and tokens at any stride, and y is float32: no cast, no copy, and none of the
torch operations that a norm safe at both ends of the range is made of. [ENG-TRITON-D7]
"""

import triton
import triton.language as tl


@triton.jit
def unit(x, y, sizes, rows, T, H, sb, st, sh, D: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr):
    """Rows `[B, T, H, D]` of the strides given over their lengths, and these lengths; a zero row stays zero.

    Squares leave float32's range long before the rows do: they are taken of a row over its largest number."""
    r, o = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR), tl.arange(0, BD)
    inside = r < rows
    there = inside[:, None] & (o < D)[None, :]
    at = r // (T * H) * sb + r // H % T * st + r % H * sh
    a = tl.load(x + at[:, None] + o[None, :], mask=there, other=0.0).to(tl.float32)
    most = tl.max(tl.abs(a), 1)
    most = tl.where(most > 0, most, 1.0)
    a = a / most[:, None]
    size = tl.sqrt(tl.sum(a * a, 1))
    size = tl.where(size > 0, size, 1.0)
    tl.store(y + r[:, None] * D + o[None, :], a / size[:, None], mask=there)
    tl.store(sizes + r, size * most, mask=inside)


@triton.jit
def unit_back(y, sizes, g, gx, rows, D: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr):
    """(g - y (y . g)) / size."""
    r, o = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR), tl.arange(0, BD)
    inside = r < rows
    there, at = inside[:, None] & (o < D)[None, :], r[:, None] * D + o[None, :]
    u = tl.load(y + at, mask=there, other=0.0)
    own = tl.load(g + at, mask=there, other=0.0).to(tl.float32)
    size = tl.load(sizes + r, mask=inside, other=1.0)
    found = (own - u * tl.sum(u * own, 1)[:, None]) / size[:, None]
    tl.store(gx + at, found.to(gx.dtype.element_ty), mask=there)
