"""Products of fp32 on tensor cores: each number is split into a sum of two 16-bit pieces, whose products are exact.

x = a + b, each piece rounded to nearest, so that the difference x - a is exact. Three products, b*a', a*b' and a*a',
omit only the smallest one. The error is 1e-5 in bfloat16, and the error of fp32 in float16.

float16 has a small range, so the rows of a tile are divided by powers of two ("sizes") first, which is exact. Each row
has its size, because rows may differ by any factor. If the sum is over rows, as over keys in p @ v, the sizes are
applied to the columns of the other tile, whose rows then get new sizes. Within a row, numbers down to 2^-16 times the
maximum keep all bits of fp32, and smaller ones lose some. So the error of a product of two rows is relative to the
product of their maxima.

The products of each tile are summed separately, and the sums are added in fp32. Tensor cores round a sum toward zero at
each step: a single sum over 16,384 keys of one sign has 500 times the error of fp32.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from triton import knobs

from .tile_ops import load_tile

# The interpreter has no products of bfloat16. Products of the same numbers in fp32 have the same result.
_WIDENS: tl.constexpr = tl.constexpr(bool(knobs.runtime.interpret))
# The maximum of a row in float16 is scaled to below 2^15; a product of two rows is divided by this factor.
_UNDO: tl.constexpr = tl.constexpr(2.0**-28)
_MOST_SCALED: tl.constexpr = tl.constexpr(2.0**15)  # a bound of finite numbers, which keep their pieces
_MOST_BFLOAT16: tl.constexpr = tl.constexpr(3.3895313892515355e38)
_EXPONENT: tl.constexpr = tl.constexpr(0x7F800000)
_ONE: tl.constexpr = tl.constexpr(1 << 23)  # of the exponents of fp32
_LEAST: tl.constexpr = tl.constexpr(15 << 23)  # the least exponent of a size, whose factor is finite
_GREATEST: tl.constexpr = tl.constexpr(253 << 23)


@triton.jit
def _size_and_factor(bits):
    """Return the power of two of fp32 numbers, from their bits, and 2^14 divided by it; both are finite."""
    exponent = tl.maximum(bits & _EXPONENT, _LEAST)
    factor = _GREATEST - (exponent - _LEAST)
    return exponent.to(tl.float32, bitcast=True), factor.to(tl.float32, bitcast=True)


@triton.jit
def split(x, PRECISION: tl.constexpr):
    """Split a tile into (a, b, sizes), its pieces and the sizes of its rows; return it as is if no split is needed.

    inf and NaN do not count for sizes, so that the other numbers of the row keep their bits. Their first piece is cut
    to a number, and their second is inf or NaN. So inf is multiplied with the first piece of another number only, which
    has its sign. The second may have the other sign, and inf - inf is NaN.
    """
    if PRECISION == "fp16x3":
        # inf and NaN become negative, as the largest exponent and one more have the bit of the sign.
        bits = tl.max((x.to(tl.int32, bitcast=True) & 0x7FFFFFFF) + _ONE, 1)
        sizes, factors = _size_and_factor(tl.maximum(bits - _ONE, 0))
        x = x * factors[:, None]
        a = tl.minimum(tl.maximum(x, -_MOST_SCALED), _MOST_SCALED).to(tl.float16)
        return a, (x - a.to(tl.float32)).to(tl.float16), sizes
    elif PRECISION == "bf16x3":
        a = tl.minimum(tl.maximum(x, -_MOST_BFLOAT16), _MOST_BFLOAT16).to(tl.bfloat16)
        return a, (x - a.to(tl.float32)).to(tl.bfloat16), a
    else:
        return x, x, x


@triton.jit
def _halves(x):
    """Split numbers below 2^15 into two in float16."""
    a = x.to(tl.float16)
    return a, (x - a.to(tl.float32)).to(tl.float16)


@triton.jit
def load_pieces(
    x, strides, batch, b, h, first, rows, num_rows, dims, num_dims,
    BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, TMA: tl.constexpr, WIDE: tl.constexpr, CHECK_ROWS: tl.constexpr,
    CHECK_DIMS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Load a tile as `load_tile` does and split it, or load the pieces that `pack_pieces_kernel` has stored."""
    if PRECISION == "fp16x3" or PRECISION == "bf16x3":
        if x.dtype.element_ty != tl.float32:
            piece = tl.cast(batch, tl.int64) * strides.batch
            a = load_tile(
                x, strides, b, h, first, rows, num_rows, dims, num_dims,
                BLOCK, BLOCK_D, False, WIDE, CHECK_ROWS, CHECK_DIMS,
            )  # fmt: skip
            rest = load_tile(
                x + piece, strides, b, h, first, rows, num_rows, dims, num_dims,
                BLOCK, BLOCK_D, False, WIDE, CHECK_ROWS, CHECK_DIMS,
            )  # fmt: skip
            if PRECISION == "fp16x3":
                head = b * (strides.row // strides.head) + h
                sizes = (x + 2 * piece).to(tl.pointer_type(tl.float32)) + head * num_rows
                return a, rest, tl.load(sizes + rows, mask=rows < num_rows, other=0.0)
            else:
                return a, rest, a
        else:
            tile = load_tile(
                x, strides, b, h, first, rows, num_rows, dims, num_dims,
                BLOCK, BLOCK_D, False, WIDE, CHECK_ROWS, CHECK_DIMS,
            )  # fmt: skip
            return split(tile, PRECISION)
    else:
        tile = load_tile(
            x, strides, b, h, first, rows, num_rows, dims, num_dims,
            BLOCK, BLOCK_D, TMA, WIDE, CHECK_ROWS, CHECK_DIMS,
        )  # fmt: skip
        return split(tile, PRECISION)


class Packing(NamedTuple):
    """One tensor (B, L, H, D) of a launch that stores split tensors: its first program, its shape and strides.

    `width` is the length of a stored row.
    """

    programs: int
    batch: int
    seqlen: int
    num_heads: int
    head_dim: int
    stride_batch: int
    stride_row: int
    stride_head: int
    width: int


@triton.jit
def _pack(x, packed, packing, program, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr):
    """Split and store a block of rows that are consecutive in memory: the heads of a position, then of the next."""
    lines = packing.seqlen * packing.num_heads
    blocks = tl.cdiv(lines, BLOCK)
    b = (program // blocks).to(tl.int64)
    line = program % blocks * BLOCK + tl.arange(0, BLOCK)
    row = (line // packing.num_heads).to(tl.int64)
    h = (line % packing.num_heads).to(tl.int64)
    dims = tl.arange(0, BLOCK_D)
    inside = (line < lines)[:, None] & (dims < packing.head_dim)[None, :]
    at = b * packing.stride_batch + row * packing.stride_row + h * packing.stride_head
    tile = tl.load(x + at[:, None] + dims[None, :], mask=inside, other=0.0)
    a, rest, sizes = split(tile, PRECISION)
    entry = tl.cast(lines, tl.int64) * packing.width
    piece = entry * packing.batch
    at = packed + (b * entry + line.to(tl.int64) * packing.width)[:, None] + dims[None, :]
    tl.store(at, a, mask=inside)
    tl.store(at + piece, rest, mask=inside)
    if PRECISION == "fp16x3":
        place = (packed + 2 * piece).to(tl.pointer_type(tl.float32)) + (b * packing.num_heads + h) * packing.seqlen
        tl.store(place + row, sizes, mask=line < lines)


@triton.jit
def pack_pieces_kernel(
    k,
    v,
    q,
    dout,
    packed_k,
    packed_v,
    packed_q,
    packed_dout,
    packing_k,
    packing_v,
    packing_q,
    packing_dout,
    BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Split and store k and v, or also q and dout: (2, B, L, H, D), followed by the sizes in fp32, (B, H, L).

    Rows of D numbers begin at multiples of 16 bytes.
    """
    program = tl.program_id(0)
    if program < packing_v.programs:
        _pack(k, packed_k, packing_k, program, BLOCK, BLOCK_D, PRECISION)
    elif q is None or program < packing_q.programs:
        _pack(v, packed_v, packing_v, program - packing_v.programs, BLOCK, BLOCK_DV, PRECISION)
    elif program < packing_dout.programs:
        _pack(q, packed_q, packing_q, program - packing_q.programs, BLOCK, BLOCK_D, PRECISION)
    else:
        _pack(dout, packed_dout, packing_dout, program - packing_dout.programs, BLOCK, BLOCK_DV, PRECISION)


@triton.jit
def _dot(a, b, acc):
    if _WIDENS:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    else:
        return tl.dot(a, b, acc)


@triton.jit
def _chain(a, b, x, y):
    """Return the product of a + b and x + y, summed from the smallest term, without b * y."""
    s = _dot(b, x, None)
    s = _dot(a, y, s)
    return _dot(a, x, s)


@triton.jit
def product_of_rows(x, y, PRECISION: tl.constexpr):
    """Multiply each row of x with each row of y, x @ y^T; both are from `split`."""
    if PRECISION == "fp16x3":
        s = _chain(x[0], x[1], tl.trans(y[0]), tl.trans(y[1]))
        # Sizes are applied one after the other, because their product may overflow or be 0 although the result is
        # finite.
        return s * (y[2] * _UNDO)[None, :] * x[2][:, None]
    elif PRECISION == "bf16x3":
        return _chain(x[0], x[1], tl.trans(y[0]), tl.trans(y[1]))
    else:
        return tl.dot(x[0], tl.trans(y[0]), input_precision=PRECISION)


@triton.jit
def add_product(acc, weights, y, PRECISION: tl.constexpr):
    """Return acc + weights @ y: `weights` is in fp32, and y is from `split`."""
    if PRECISION == "fp16x3":
        weights = weights * y[2][None, :]
        sizes, factors = _size_and_factor(tl.max(tl.abs(weights), 1).to(tl.int32, bitcast=True))
        a, b = _halves(weights * factors[:, None])
        return acc + _chain(a, b, y[0], y[1]) * (sizes * _UNDO)[:, None]
    elif PRECISION == "bf16x3":
        w = split(weights, PRECISION)
        return acc + _chain(w[0], w[1], y[0], y[1])
    else:
        return tl.dot(weights.to(y[0].dtype), y[0], acc, input_precision=PRECISION)
