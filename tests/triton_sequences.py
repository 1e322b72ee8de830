"""What has to hold of the Triton kernels on sequences: `python triton_sequences.py <check> [<calls> [<first>]]`.

A check is a key of CHECKS or MADE, or "drawn" or "made" for all of these. Without a GPU `test_triton_sequences.py` runs
it so, in Triton's interpreter; with one that file calls the same checks. Calls are made as a backend receives them,
with bounds that the front end need not make.
"""

from __future__ import annotations

import itertools
import random
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from cases import DEVICE

if DEVICE == "cpu":
    import interpreted_triton as base
from layouts import LAYOUTS as STRIDES
from outcomes import report
from sequence_calls import expected
from sequence_views import ViewCall, assert_accurate, draw, moved, spoiled
from sequence_views import run as run_view

from flash_dmattn.backends.triton import passes
from flash_dmattn.backends.triton.backend import BACKEND
from flash_dmattn.operators import describe_operands
from flash_dmattn.problem import Flags, NeedsGrad, Packing
from flash_dmattn.problem.inputs import Inputs, Saved

# Around the edges of tiles: those of the interpreter have 16 to 64 rows.
LENGTHS = (0, 1, 16, 31, 32, 33, 65) if DEVICE == "cpu" else (0, 1, 31, 32, 33, 127, 128, 129, 300)
DTYPES = (torch.float32, torch.float16) if DEVICE == "cpu" else (torch.float32, torch.float16, torch.bfloat16)


TILE_LENGTHS = (0, 1, 33, 127, 128, 129, 200, 300)  # around the edges of tiles of a packed mask
FAR = 100_000  # beyond what a tile before the first sequence would reach
LATE_BIASES: tuple[tuple[Packing, tuple[int, int, int, int]], ...] = (
    ("queries", (1, 2, 300, 64)),
    ("none", (2, 2, 300, 40)),
    ("keys", (1, 2, 1, 300)),
    ("queries", (1, 1, 300, 64)),
    ("none", (1, 2, 1, 64)),
)


def run(call: ViewCall) -> dict[str, Any]:
    """The results of the kernels; in the interpreter nothing may be written beside them."""
    if DEVICE == "cpu":
        base._allocated.clear()
    results = run_view(call, BACKEND)
    if DEVICE == "cpu":
        base.assert_margins()
    return results


def set_up(rng: random.Random) -> None:
    """Other tiles, and another number of SMs, for the calls to come."""
    if DEVICE == "cpu":
        base.set_up(rng.choice(base.TILES), rng.choice(base.NUM_SMS), 0)


def each(
    check: Callable[[ViewCall, random.Random], None], first: int, count: int, **given: Any
) -> Iterator[str | None]:
    """The outcomes of a check of drawn calls."""
    for number in range(first, first + count):
        rng = random.Random(number)
        call = draw(number, LENGTHS, DTYPES, **given)
        set_up(rng)
        try:
            check(call, rng)
            yield None
        except Exception:  # the other calls still count
            yield f"{call.told} {call.flags.layout}\n{traceback.format_exc(limit=-4)}"[:3000]


def is_accurate(call: ViewCall, rng: random.Random) -> None:
    """NaN wherever no sequence reads, and any strides: every result as fp64 has it."""
    bad, strides = spoiled(call), rng.choice((None, *STRIDES))
    assert_accurate(run(bad if strides is None else moved(bad, strides)), call)


def ignores_others(call: ViewCall, rng: random.Random) -> None:
    """NaN in all sequences but one changes no bit of it, nor of rows of none."""
    if any(x is not None and 0 in x.stride() for x in (call.mask, call.bias)) or len(call.bounds) == 1:
        return
    s = rng.randrange(len(call.bounds))
    alone = spoiled(call, s)
    wanted, found = run(call), run(alone)
    entry, rows = call.rows_of(s)
    at, keys = call.keys_of(s)
    places = {
        "out": (entry, rows),
        "lse": (entry, slice(None), rows),
        "dq": (entry, rows),
        "dk": (at, keys),
        "dv": (at, keys),
    }
    for name, place in places.items():
        if wanted[name] is not None:
            assert torch.equal(wanted[name][place], found[name][place]), name


def follows_lengths_alone(call: ViewCall, rng: random.Random) -> None:
    """Larger bounds on the lengths change no bit of any result."""
    flags = call.flags
    larger = flags._replace(
        max_seqlen_q=flags.max_seqlen_q + rng.choice((1, 77, 1000)) * flags.packs_queries,
        max_seqlen_k=flags.max_seqlen_k + rng.choice((1, 77, 1000)) * flags.packs_keys,
    )
    no_scores = replace(call, mask=None, bias=None, needs=call.needs._replace(bias=False))  # their shapes name them
    packing = {"mask_packing": "none", "bias_packing": "none"}
    wanted = run(replace(no_scores, flags=flags._replace(**packing)))
    found = run(replace(no_scores, flags=larger._replace(**packing)))
    for name, x in wanted.items():
        assert x is None or torch.equal(x, found[name]), name


def is_a_dense_call(call: ViewCall, rng: random.Random) -> None:
    """Sequences of equal lengths, one behind the other, have the results of the entries of a batch."""
    count, seqlen_q, seqlen_k, heads, heads_k, dim = 3, *rng.choice(((33, 65), (16, 1), (1, 70))), 4, 2, 16
    f = call.flags
    left, right, scale, cap = f.left, f.right, f.softmax_scale, f.softcap
    normal = torch.Generator().manual_seed(rng.randrange(1000))

    def x(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=normal).to(DEVICE, call.q.dtype)

    q, k, v = x(count, seqlen_q, heads, dim), x(count, seqlen_k, heads_k, dim), x(count, seqlen_k, heads_k, dim)
    bias, dout = x(count, heads, seqlen_q, seqlen_k), x(count, seqlen_q, heads, dim)
    needs = NeedsGrad(True, True, True, True)
    dense = Flags(left, right, scale, cap, True)
    entries = Inputs(q, k, v, bias=bias)
    problem = describe_operands(entries, dense, needs)
    out, lse = passes.plan_forward(problem)(entries)
    wanted = (out, lse, *passes.plan_backward(problem)(Saved(entries, out, lse), dout, None))
    bounds = tuple((s * seqlen_q, seqlen_q, s * seqlen_k, seqlen_k) for s in range(count))
    flags = dense._replace(layout="packed", max_seqlen_q=seqlen_q, max_seqlen_k=seqlen_k)
    flat = [y.flatten(0, 1)[None] for y in (q, k, v)]
    packed = ViewCall(
        *flat, None, bias, None, bounds, None, flags, dout.flatten(0, 1)[None], None, needs, "equal lengths"
    )
    found = run(packed)
    found["lse"] = found["lse"].view(heads, count, seqlen_q).transpose(0, 1)
    limit = 2e-5 if call.q.dtype == torch.float32 else 2e-2 if call.q.dtype == torch.bfloat16 else 4e-3
    for name, y in zip(("out", "lse", "dq", "dk", "dv", "dbias"), wanted, strict=True):
        torch.testing.assert_close(found[name].reshape(y.shape), y, atol=limit, rtol=limit)


def repeats(call: ViewCall, rng: random.Random) -> None:
    """A second run has the same bits."""
    wanted, found = run(call), run(call)
    for name, x in wanted.items():
        assert x is None or torch.equal(x, found[name]), name


CHECKS = {
    "accurate": is_accurate,
    "others": ignores_others,
    "bounds": follows_lengths_alone,
    "dense": is_a_dense_call,
    "repeats": repeats,
}


def few_keys() -> Iterator[str | None]:
    """Outcomes of asking whether the rounding of out to 16 bits stays out of gradients of few keys.

    dbias, in fp32, feels no other rounding of 16 bits.
    """
    for seqlen_k, window in ((2, -1), (32, -1), (96, 3)):
        for packing, shape in (("queries", (1, 2, 80, seqlen_k)), ("none", (1, 2, 40, seqlen_k)), ("keys", None)):
            set_up(random.Random(seqlen_k))
            normal = torch.Generator().manual_seed(seqlen_k)

            def x(*shape: int, dtype: torch.dtype = torch.float16, normal: Any = normal) -> torch.Tensor:
                return torch.randn(shape, generator=normal).to(DEVICE, dtype)

            flags = Flags(
                window, 0 if window >= 0 else -1, 0.25, 0.0, True, 1, 1, "packed", 40, seqlen_k, "none", packing
            )
            call = ViewCall(
                x(1, 80, 2, 16), x(1, 2 * seqlen_k, 1, 16), x(1, 2 * seqlen_k, 1, 16), None,
                x(*(shape or (1, 2, 1, 2 * seqlen_k)), dtype=torch.float32), None,
                ((0, 40, 0, seqlen_k), (40, 40, seqlen_k, seqlen_k)), None, flags,
                x(1, 80, 2, 16), None, NeedsGrad(True, True, True, True), f"few keys {seqlen_k} {window} {packing}",
            )  # fmt: skip
            dbias, exact = run(call)["dbias"].cpu().double(), expected(call.public())[0]["dbias"]
            off = (dbias.view(exact.shape) - exact).norm().item() / max(exact.norm().item(), 1e-3)
            # Sums over the rows of a column keep the rounding of fp32 sums.
            yield None if off < 5e-6 else f"{call.told}: dbias is off by {off:.1e}"


def late_calls() -> Iterator[str | None]:
    """Outcomes of calls whose first sequence begins behind the first tile, with zeroed outputs between margins."""
    normal, zeros = torch.Generator().manual_seed(0), torch.zeros
    margins: list[tuple[torch.Tensor, int]] = []

    def x(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=normal).to(DEVICE)

    def guarded(*shape: Any, dtype: torch.dtype = torch.float32, device: Any = None) -> torch.Tensor:
        sizes = torch.Size(shape if isinstance(shape[0], int) else shape[0])
        whole = torch.full((sizes.numel() + 2 * FAR,), 7.0, dtype=dtype, device=device)
        margins.append((whole, sizes.numel()))
        return whole[FAR : FAR + sizes.numel()].zero_().view(sizes)

    for packing, shape in LATE_BIASES:
        seqlen_k = shape[3] if packing != "keys" else 64
        flags = Flags(-1, -1, 0.25, 0.0, True, 1, 1, "packed", 300, seqlen_k, "none", packing)
        bounds = ((200, 33, 200, 40), (240, 20, 250, 33))
        call = ViewCall(
            x(1, 300, 2, 16), x(1, 300, 1, 16), x(1, 300, 1, 16), None, x(*shape), None, bounds, None, flags,
            x(1, 300, 2, 16), None, NeedsGrad(True, True, True, True), f"late, {packing} {shape}",
        )  # fmt: skip
        if DEVICE == "cpu":
            base.set_up(base.TILES[0], 1, 0)
        torch.zeros = guarded
        try:
            results = run_view(call, BACKEND)
        finally:
            torch.zeros = zeros
        try:
            assert_accurate(results, call)
            for whole, size in margins:
                assert bool((whole[:FAR] == 7).all() and (whole[FAR + size :] == 7).all()), "written beside an output"
            yield None
        except AssertionError as failure:
            yield f"{call.told}\n{failure}"
        margins.clear()


def sinks_beside_gaps() -> Iterator[str | None]:
    """Outcomes of two calls with the gradient of a sink and rows of no sequence, which a few draws may all lack."""

    def is_one(number: int) -> bool:
        call = draw(number, LENGTHS, DTYPES, 3)
        rows = call.q.shape[0] * call.q.shape[1]
        return call.needs.sink and 0 < sum(length for _, length, _, _ in call.bounds) < rows

    for number in itertools.islice(filter(is_one, itertools.count()), 2):
        yield from each(is_accurate, number, 1, most=3)


def pages_between_blocks() -> Iterator[str | None]:
    """Outcomes of pages that are longer than a block of keys and end inside of one, with 16 and with 3 queries."""
    normal = torch.Generator().manual_seed(0)

    def x(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=normal).to(DEVICE)

    lengths = (193, 97, 48)
    for page_size, seqlen_q in itertools.product((48, 96, 160), (16, 3)):
        pages_each = -(-max(lengths) // page_size)
        order = torch.randperm(3 * pages_each, generator=normal).view(3, pages_each)
        flags = Flags(-1, 0, 0.25, 0.0, True, 1, 1, "paged", seqlen_q, pages_each * page_size)
        k, v = x(3 * pages_each, page_size, 1, 16), x(3 * pages_each, page_size, 1, 16)
        call = ViewCall(
            x(3, seqlen_q, 2, 16), k, v, None, None, None, tuple((0, seqlen_q, 0, n) for n in lengths),
            order.to(DEVICE, torch.int32), flags, x(3, seqlen_q, 2, 16), None, NeedsGrad(),
            f"{seqlen_q} queries, pages of {page_size}",
        )  # fmt: skip
        set_up(random.Random(page_size))
        try:
            assert_accurate(run(call), call)
            yield None
        except AssertionError as failure:
            yield f"{call.told}\n{failure}"


def _sums_scores(call: ViewCall) -> bool:
    """Whether sequences or heads share the gradient of a bias of one value per score."""
    bias = call.bias
    if not call.needs.bias or bias is None or bias.shape[2] == 1 or bias.shape[3] == 1:
        return False
    return len(call.bounds) > 1 and (bias.shape[1] < call.q.shape[2] or bias.shape[0] == 1)


def _has_lists_by_group(call: ViewCall) -> bool:
    """Whether all heads of a group are one tile, and each group has lists of its own."""
    assert call.mask is not None
    return 1 < call.mask.shape[1] == call.k.shape[2] < call.q.shape[2] and call.table is not None


# What some of the calls with masks of tiles have to be; the others are any.
TILE_KINDS: tuple[tuple[tuple[int, ...], Callable[[ViewCall], bool]], ...] = (
    (TILE_LENGTHS, lambda call: True),
    (TILE_LENGTHS, _sums_scores),
    ((0, 1, 5, 16), lambda call: True),
    ((1, 5, 16), _has_lists_by_group),
)


def masks_of_tiles(count: int = 16, first: int = 0) -> Iterator[str | None]:
    """Outcomes of calls whose mask is prepared, with tiles of which all pairs, some or none are allowed."""
    for kind, (lengths, is_one) in enumerate(TILE_KINDS):
        drawn = (draw(number, lengths, DTYPES, 3, TILE_LENGTHS) for number in itertools.count(first + kind * 100_000))
        for call in itertools.islice((call for call in drawn if call.mask is not None and is_one(call)), count // 4):
            rng = random.Random(call.told)
            assert call.mask is not None
            mask = call.mask.contiguous()
            for allowed in (True, False, True, False):
                rows, keys = (slice(x, x + rng.choice((130, 300))) for x in (rng.randrange(300), rng.randrange(300)))
                mask[..., rows, keys] = allowed
            set_up(rng)
            try:
                is_accurate(replace(call, mask=mask, prepares=True), rng)
                yield None
            except Exception:  # the other calls still count
                yield f"{call.told} {call.flags.layout}\n{traceback.format_exc(limit=-4)}"[:3000]


MADE = {
    "few keys": few_keys,
    "late": late_calls,
    "sinks": sinks_beside_gaps,
    "pages": pages_between_blocks,
    "tiles": masks_of_tiles,
}
# In the interpreter, where a draw takes a second.
DRAWS = {"accurate": 12, "others": 3, "bounds": 3, "dense": 1, "repeats": 2}


def drawn(check: str, count: int) -> Iterator[str | None]:
    """The outcomes of a check of the first calls."""
    return each(CHECKS[check], 0, count)


def main(what: str, count: int = 0, first: int = 0) -> int:
    """Run all that are drawn or made, or one check, on outputs that are NaN before; returns the exit status."""
    base.admit_cpu()
    torch.empty, torch.empty_like = base.guarded_empty, lambda x: base.guarded_empty(x.shape, dtype=x.dtype)
    if what == "drawn":
        return report(outcome for check, few in DRAWS.items() for outcome in drawn(check, count or few))
    if what == "made":
        return report(outcome for made in MADE.values() for outcome in made())
    return report(MADE[what]() if what in MADE else each(CHECKS[what], first, count))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], *(int(number) for number in sys.argv[2:])))
