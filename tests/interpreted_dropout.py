"""Compare what the Triton kernels drop bit for bit, in Triton's interpreter: `python interpreted_dropout.py`.

The tile functions by themselves against the formula's, in tiles of all shapes and far out, with the known answers of
Philox; and whole calls, forward and backward, on several tiles, in which a kernel has another reader of its mask.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import product

import interpreter
import torch
import triton
import triton.language as tl
from dropout_masks import dropped_case, drops_as_the_whole, kept_in
from outcomes import report
from test_dropout import KNOWN, case_mask, philox_of_integers

from flash_dmattn.masks import PreparedMask
from flash_dmattn.reference.dropout import Dropout as Whole
from flash_dmattn.reference.dropout import key_of_part, threshold_of
from flash_dmattn.triton_kernels import short_calls
from flash_dmattn.triton_kernels.dropout import Dropout, is_kept, philox_words


@triton.jit
def words_kernel(key, counters, out):
    a, b, c, d = tl.load(counters), tl.load(counters + 1), tl.load(counters + 2), tl.load(counters + 3)
    first, second, third, fourth = philox_words(key, d.to(tl.uint32), c.to(tl.uint32), b.to(tl.uint32), a.to(tl.uint32))
    tl.store(out, first.to(tl.int64))
    tl.store(out + 1, second.to(tl.int64))
    tl.store(out + 2, third.to(tl.int64))
    tl.store(out + 3, fourth.to(tl.int64))


@triton.jit
def kept_kernel(key, dropout, by_row, gathered, by_key, b, h, first, first_key, M: tl.constexpr, N: tl.constexpr):
    rows, keys = first + tl.arange(0, M), first_key + tl.arange(0, N)
    b, h = tl.cast(b, tl.int64), tl.cast(h, tl.int32)
    at = tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :]
    tl.store(by_row + at, is_kept(key, dropout, b, h, first, first_key, rows, keys, M, N, False, 1))
    # Keys of no order, which a set of keys has.
    turned = first_key + (N - 1) - tl.arange(0, N)
    tl.store(gathered + at, is_kept(key, dropout, b, h, first, first_key, rows, turned, M, N, True, 1))
    at = tl.arange(0, N)[:, None] * M + tl.arange(0, M)[None, :]
    tl.store(by_key + at, is_kept(key, dropout, b, h, first, first_key, rows, keys, M, N, False, 0))


def words() -> Iterator[str | None]:
    """Outcomes of the known answers."""
    for counters, key, wanted in KNOWN:
        out = torch.zeros(4, dtype=torch.int64)
        words_kernel[(1,)](torch.tensor(key), torch.tensor(counters), out)
        yield None if tuple(out.tolist()) == wanted else f"{counters} {key}: {out.tolist()}"


def tiles() -> Iterator[str | None]:
    """Outcomes of single tiles, some of them far out: of a call, and of a part of it that begins there."""
    words = (2**32 - 3, 12345)
    key = torch.tensor(words)
    places = ((0, 0, 0, 0), (3, 5, 48, 64), (2**20, 70_000, 2**31 - 128, 2**31 - 256))
    for (rows, keys), (b, h, first, first_key) in product(((16, 16), (16, 64), (64, 16), (128, 128)), places):
        # The first word of the tile is the threshold itself, which is kept.
        p = philox_of_integers((first_key // 2, first // 2, h, b), words)[0] / 2**32
        part = (slice(b, b + 1), slice(h, h + 1), slice(first, first + rows), slice(first_key, first_key + keys))
        wanted = Whole(p, key).kept(*part)[0, 0]
        key_there = key_of_part(key, row=first, first_key=first_key, head=h, entry=b)
        for own_key, place in ((key, (b, h, first, first_key)), (key_there, (0, 0, 0, 0))):
            made = [torch.zeros(shape, dtype=torch.bool) for shape in ((rows, keys), (rows, keys), (keys, rows))]
            kept_kernel[(1,)](own_key, Dropout(threshold_of(p), 1.0), *made, *place, rows, keys)
            same = [torch.equal(x, y) for x, y in zip(made, (wanted, wanted.flip(1), wanted.T), strict=True)]
            yield None if all(same) else f"{rows} x {keys} from {b, h, first, first_key}: {same}"


def calls() -> Iterator[str | None]:
    """Outcomes of whole calls: what out and dv say was dropped."""
    row = (torch.arange(60) % 3 != 1)[None]
    walking, short = (), (torch.float16,)
    ordered = PreparedMask.from_mask(row, seqlen_q=33, reorder=True)
    for tile, sms, dtypes, (seqlen_q, seqlen_k), mask in (
        (interpreter.Tile(16, 32, 4, 1), 1, walking, (33, 60), None),
        (interpreter.Tile(32, 16, 4, 1), 1, walking, (33, 60), None),
        (interpreter.Tile(64, 64, 4, 1), 1, walking, (33, 60), None),
        (interpreter.Tile(16, 32, 4, 1), 64, walking, (20, 150), None),  # programs share the keys
        (interpreter.Tile(32, 32, 4, 1), 1, walking, (33, 60), ordered),  # intervals, in an order that is not followed
        (interpreter.Tile(32, 32, 4, 1), 1, walking, (9, 60), row),  # a set of keys
        (interpreter.Tile(32, 32, 4, 1), 1, walking, (33, 60), row.expand(33, 60).clone()),  # tiles of bits
        (interpreter.Tile(16, 32, 4, 1), 1, short, (33, 60), None),
    ):
        short_calls.DTYPES = dtypes
        interpreter.set_up(tile, sms, 0)
        case = dropped_case(seqlen_q, seqlen_k, num_heads_k=4 if dtypes else 2)
        dtype = torch.float16 if dtypes else torch.float32
        wanted = case_mask(case) if mask is None else case_mask(case) & row
        for name in ("out", "dv"):
            kept = kept_in("triton", case, name, dtype, mask=mask)
            yield None if torch.equal(kept, wanted) else f"{name}: {tile}, {sms} SMs, {case.repro()}"
            if mask is None and seqlen_q == 33:
                agrees = drops_as_the_whole("triton", case, name, dtype)
                yield None if agrees else f"{name} of a part: {tile}, {case.repro()}"


def outcomes() -> Iterator[str | None]:
    """All of them."""
    yield from words()
    yield from tiles()
    yield from calls()


if __name__ == "__main__":
    interpreter.admit_cpu()
    sys.exit(report(outcomes()))
