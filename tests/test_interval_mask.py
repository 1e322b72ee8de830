"""Interval masks: fields, order and statistics against loops; top-k against the dense mask; memory, waiting, errors."""

from __future__ import annotations

import itertools
import math
import pickle
import random
import re
from typing import Any

import pytest
import torch
from dispatched import bytes_made
from mask_checks import BANDS, by_place, check_fields, check_stats, in_band, same
from torch import Tensor
from torch._subclasses import FakeTensorMode

from flash_dmattn import masks
from flash_dmattn.masks import PreparedMask, topk_mask
from flash_dmattn.masks.prepared.intervals import (
    MOST_HEADS_OF_CODES,
    hilbert_codes,
    key_order,
    places_for,
    reorder_pays,
)
from flash_dmattn.masks.topk import topk_stops

INF, NAN = math.inf, math.nan
# Few distinct values, so that most rows have ties.
VALUES = torch.tensor([-INF, -2.5, -1.0, -0.0, 0.0, 0.0, 1.0, 1.0, 2.5, INF, NAN])


# Top-k


def random_scores(rng: random.Random, seqlen_k: int) -> Tensor:
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    shape = (rng.choice([0, 1, 1, 2, 2]), rng.randint(1, 2), 1, seqlen_k)
    dtype = rng.choice([torch.float16, torch.bfloat16, torch.float32, torch.float64])
    if rng.random() < 0.3:
        return torch.randn(shape, generator=generator).to(dtype)
    return VALUES[torch.randint(len(VALUES), shape, generator=generator)].to(dtype)


def random_mask(rng: random.Random, scores: Tensor) -> Tensor | None:
    if rng.random() < 0.5:
        return None
    shape = (rng.choice([1, scores.size(0)]), rng.choice([1, scores.size(1), 2 * scores.size(1)]), 1)
    keys = rng.choice([1, scores.size(3), scores.size(3)])
    return torch.rand((*shape, keys), generator=torch.Generator().manual_seed(rng.randrange(2**31))) < 0.6


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("is_causal", [False, True])
def test_top_k_is_that_of_the_dense_mask(seed: int, is_causal: bool) -> None:
    rng = random.Random(f"{seed} {is_causal}")
    for _ in range(12):
        seqlen_q, seqlen_k = rng.randint(0, 24), rng.randint(0, 24)
        scores, k = random_scores(rng, seqlen_k), rng.choice([1, 2, 3, 5, 8, 13, 40])
        mask = random_mask(rng, scores)
        local = rng.choice([0, 0, 1, 2, 7, 50]) if is_causal else 0
        keywords: dict[str, Any] = {"is_causal": is_causal, "mask": mask, "seqlen_q": seqlen_q}
        reorder = rng.choice([None, False, True])
        compact = reorder is True and rng.random() < 0.5
        prepared = PreparedMask.from_topk(scores, k, local=local, reorder=reorder, compact=compact, **keywords)
        expected = topk_mask(scores, k, **keywords)
        if local:
            allowed = scores != -INF
            window = masks.sliding_window_mask(seqlen_q, seqlen_k, (local - 1, 0))
            expected = masks.combine(
                expected, masks.combine(allowed if mask is None else masks.combine(allowed, mask), window), op="or"
            )
        assert torch.equal(prepared.dense(), expected.expand(-1, -1, seqlen_q, -1)), (scores, k, keywords, local)
        assert prepared.is_causal is is_causal and prepared.window_size == (-1, -1)
        check_fields(prepared)


@pytest.mark.parametrize("lengths", [(700, 700), (300, 700), (700, 300)])
def test_longer_prefixes_with_ties(lengths: tuple[int, int]) -> None:
    scores = torch.randn(2, 2, 1, lengths[1], generator=torch.Generator().manual_seed(0)).round(decimals=1)
    prepared = PreparedMask.from_topk(scores, 64, is_causal=True, seqlen_q=lengths[0], reorder=True)
    assert torch.equal(prepared.dense(), topk_mask(scores, 64, is_causal=True, seqlen_q=lengths[0]))
    check_fields(prepared)


def test_the_earliest_of_a_tie_stays_and_the_two_zeros_tie() -> None:
    assert topk_stops(torch.tensor([[5, 5, 5, 5], [1, 2, 3, 4]]), 2).tolist() == [[4, 4, 2, 3], [2, 3, 4, 4]]
    prepared = PreparedMask.from_topk(torch.tensor([-0.0, 0.0, 1.0, 0.0]), 2, is_causal=True)
    assert prepared.stop.tolist() == [[[4, 2, 4, 0]]]


def test_expanded_scores_count_once_and_none_is_kept_alive() -> None:
    scores = torch.randn(1, 1, 1, 40).requires_grad_()
    prepared = PreparedMask.from_topk(scores.expand(3, 4, 40, 40), 5, is_causal=True)
    assert prepared.shape == (1, 1, 40, 40) and not any(x.requires_grad for x in prepared.tensors)


def test_local_keys_are_those_that_are_allowed() -> None:
    scores = torch.tensor([1.0, -INF, 0.0, 3.0, 2.0])
    mask = torch.tensor([True, True, True, True, False])
    prepared = PreparedMask.from_topk(scores, 1, is_causal=True, mask=mask, local=2)
    assert (prepared.start.flatten().tolist(), prepared.stop.flatten().tolist()) == ([0, 0, 2, 3, 0], [3, 0, 4, 5, 0])


# Intervals


@pytest.mark.parametrize("band", BANDS, ids=str)
@pytest.mark.parametrize(
    ("seqlen_q", "seqlen_k"),
    [
        *((0, 3), (3, 0), (1, 9), (9, 1), (20, 20), (14, 31), (31, 14)),
        *((1, 130), (127, 129), (128, 128), (129, 127), (300, 256), (256, 300), (500, 700)),
    ],
)
def test_intervals_by_comparison(seqlen_q: int, seqlen_k: int, band: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(seqlen_q)
    start, stop = torch.randint(-5, seqlen_q + 6, (2, 2, 3, seqlen_k), generator=generator)
    start[0, 0], stop[0, 0], stop[0, 1] = 0, seqlen_q, 0  # every pair, and none
    start[1, 0, : seqlen_k // 2], stop[1, 0] = seqlen_q // 3, seqlen_q - seqlen_q // 3
    stop[0, 2], start[1, 2] = seqlen_q, 0  # of tiles that would be full each a row or more of some key is missing
    i = torch.arange(seqlen_q)[:, None]
    allowed = (i >= start[..., None, :]) & (i < stop[..., None, :]) & in_band(seqlen_q, seqlen_k, **band)
    for reorder in (False, True):
        prepared = PreparedMask.from_intervals(start, stop, seqlen_q, reorder=reorder, **band)
        assert torch.equal(prepared.dense(), allowed) and torch.equal(prepared.unpacked(), allowed)
        assert torch.equal(prepared.dense(2, 7), allowed[:, :, 2:7])
        assert torch.equal(prepared.dense(-3), allowed[:, :, -3:])
        check_fields(prepared)
        check_stats(prepared, by_place(prepared))
        assert prepared.is_reordered == (reorder or seqlen_k == 0)
        wanted = band.get("is_causal", False), band.get("window_size", (-1, -1))
        assert (prepared.is_causal, prepared.window_size) == wanted


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int32, torch.int64])
def test_dtypes_of_limits_do_not_wrap(dtype: torch.dtype) -> None:
    start, stop = torch.tensor([0, 100, 7], dtype=dtype), torch.tensor([100, 127, 3], dtype=dtype)
    prepared = PreparedMask.from_intervals(start, stop, 1000)
    assert (prepared.start.flatten().tolist(), prepared.stop.flatten().tolist()) == ([0, 100, 0], [100, 127, 0])
    prepared = PreparedMask.from_intervals(start, stop, 1000, window_size=(900, 900))
    assert (prepared.start.flatten().tolist(), prepared.stop.flatten().tolist()) == ([97, 100, 0], [100, 127, 0])


def test_limits_broadcast_and_lists_do() -> None:
    start = torch.tensor([[[1]], [[2]]])  # a batch of two, one key for all
    stop = torch.tensor([[4, 5, 6], [3, 3, 3]])  # two heads, three keys
    prepared = PreparedMask.from_intervals(start, stop, 6)
    assert prepared.shape == (2, 2, 6, 3)
    assert prepared.start[:, 1].tolist() == [[1, 1, 1], [2, 2, 2]] and prepared.stop[1, 0].tolist() == [4, 5, 6]
    assert PreparedMask.from_intervals([1, 2], [[3], [4]], 9).stop.tolist() == [[[3, 3], [4, 4]]]
    shared = PreparedMask.from_intervals(torch.tensor([0, 1]).expand(4, 5, 2), [2, 2], 2)
    assert shared.shape == (1, 1, 2, 2)


def test_limits_that_change_later_change_no_mask() -> None:
    start, stop = torch.zeros(1, 1, 4, dtype=torch.int32), torch.full((1, 1, 4), 3, dtype=torch.int32)
    prepared = PreparedMask.from_intervals(start, stop, 4)
    start += 2
    stop -= 3
    assert prepared.start.tolist() == [[[0] * 4]] and prepared.stop.tolist() == [[[3] * 4]]


# Order


def curve_position(x: int, y: int, bits: int) -> int:
    """The same curve by recursion: which quarter, then where in it, in its own turn."""
    if bits == 0:
        return 0
    half = 1 << (bits - 1)
    right, upper = x >= half, y >= half
    x, y = x % half, y % half
    quarter = {(False, False): 0, (False, True): 1, (True, True): 2, (True, False): 3}[right, upper]
    if quarter == 0:
        x, y = y, x
    elif quarter == 3:
        x, y = half - 1 - y, half - 1 - x
    return quarter * half * half + curve_position(x, y, bits - 1)


def test_codes_walk_the_square_in_steps_of_one() -> None:
    side = torch.arange(256)
    x, y = side.repeat_interleave(256), side.repeat(256)
    codes = hilbert_codes(x, y, 8)
    order = codes.argsort()
    assert torch.equal(codes[order], torch.arange(1 << 16))
    assert bool((x[order].diff().abs() + y[order].diff().abs() == 1).all())
    for point in range(0, 1 << 16, 997):
        assert int(codes[point]) == curve_position(int(x[point]), int(y[point]), 8)


@pytest.mark.parametrize("seqlen_q", [1, 9, 300, 70_000])
def test_order_is_a_stable_sort_of_each_head(seqlen_q: int) -> None:
    generator = torch.Generator().manual_seed(seqlen_q)
    start, stop = (torch.randint(0, seqlen_q + 1, (2, 3, 400), generator=generator) for _ in range(2))
    order = key_order(start, stop, seqlen_q)
    assert order.dtype == torch.int32 and order.is_contiguous()
    for b, h in itertools.product(range(2), range(3)):
        begins, ends = start[b, h].tolist(), stop[b, h].tolist()

        def code(j: int, begins: list[int] = begins, ends: list[int] = ends) -> tuple[bool, int]:
            x, y = (value * 256 // (seqlen_q + 1) for value in (begins[j], ends[j]))
            return (True, 0) if begins[j] >= ends[j] else (False, curve_position(x, y, 8))

        assert order[b, h].tolist() == sorted(range(400), key=code)


def test_order_of_positions_beyond_int32() -> None:
    seqlen_q = 2**31 - 1
    start = torch.tensor([[[0, 3 * 2**28, 3]]], dtype=torch.int32)
    stop = torch.tensor([[[2**30, seqlen_q, 2**30 + 5]]], dtype=torch.int32)
    assert key_order(start, stop, seqlen_q).tolist() == [[[0, 2, 1]]]


def test_order_of_more_heads_than_codes_of_32_bits_have_room_for() -> None:
    start, stop = torch.randint(0, 9, (2, 1, MOST_HEADS_OF_CODES + 2, 5), generator=torch.Generator().manual_seed(0))
    order = key_order(start, stop, 8)
    for head in (0, MOST_HEADS_OF_CODES - 1, MOST_HEADS_OF_CODES, MOST_HEADS_OF_CODES + 1):
        one = slice(head, head + 1)
        assert torch.equal(order[:, one], key_order(start[:, one], stop[:, one], 8))


def test_where_an_order_pays() -> None:
    def pays(length: int, kept: int = 1024, heads: int = 16, **keywords: Any) -> bool:
        return reorder_pays(heads, length, length, kept, **{"is_causal": True, "has_backward": False, **keywords})

    assert [pays(n) for n in (2048, 4096, 8192)] == [False, False, True]
    assert [pays(n, has_backward=True) for n in (2048, 4096)] == [False, True]
    assert [pays(n, heads=4) for n in (4096, 16384)] == [False, True]
    assert not pays(8192, kept=8192) and not pays(8192, kept=0) and not pays(0) and pays(8192, is_causal=False)
    decoding = [reorder_pays(16, 1, n, 1024, is_causal=True, has_backward=False) for n in (16384, 65536)]
    assert decoding == [False, True]
    # Fewer queries than keys, and more: as many pairs count as there are, no more.
    assert reorder_pays(16, 8192, 32768, 1024, is_causal=True, has_backward=False)
    assert not reorder_pays(1, 10**6, 128, 64, is_causal=True, has_backward=True)


def test_top_k_reorders_where_it_pays_unless_it_is_told() -> None:
    def is_reordered(length: int, heads: int = 16, requires_grad: bool = False, **keywords: Any) -> bool:
        scores = torch.zeros(1, heads, 1, length, device="meta", requires_grad=requires_grad)
        return PreparedMask.from_topk(scores, 1024, is_causal=True, **keywords).is_reordered

    assert [is_reordered(n) for n in (4096, 8192)] == [False, True]
    assert is_reordered(4096, requires_grad=True)
    with torch.no_grad():
        assert not is_reordered(4096, requires_grad=True)
    assert is_reordered(128, reorder=True) and not is_reordered(8192, reorder=False)
    assert not PreparedMask.from_intervals([0] * 9, [9] * 9, 9).is_reordered


# Places only for live keys


def test_how_many_places() -> None:
    places = {0: 256, 1: 256, 256: 256, 257: 512, 8192: 8192, 8193: 16384, 16384: 16384}
    assert {live: places_for(live, 16384) for live in places} == places
    assert places_for(8000, 2**20) == 16384 and places_for(130, 1000) == 256 and places_for(1, 255) == 255
    assert [places_for(0, n) for n in (0, 1, 256)] == [0, 1, 128]


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("seqlen_q", [1, 128, 700])
def test_places_of_live_keys(seqlen_q: int, is_causal: bool) -> None:
    """Two batch entries and heads have live keys of their own; the greatest number of them counts."""
    generator = torch.Generator().manual_seed(seqlen_q)
    scores = torch.randn(2, 2, 1, 700, generator=generator)
    mask = torch.rand(2, 2, 1, 700, generator=generator) < torch.tensor([[0.1, 0.3], [0.02, 0.0]])[:, :, None, None]
    keywords: dict[str, Any] = {"is_causal": is_causal, "mask": mask, "seqlen_q": seqlen_q}
    every_key, compact = (
        PreparedMask.from_topk(scores, 90, reorder=True, compact=few, **keywords) for few in (False, True)
    )
    live = int((every_key.start < every_key.stop).sum(-1).max())
    assert compact.num_places == -(-live // 128) * 128 <= 256 and every_key.num_places == 700
    check_fields(compact)
    assert compact.is_reordered and torch.equal(compact.order, every_key.order[:, :, : compact.num_places])
    assert torch.equal(compact.start, every_key.start) and torch.equal(compact.stop, every_key.stop)
    assert compact.stats() == every_key.stats() and torch.equal(compact.dense(), every_key.dense())
    again = pickle.loads(pickle.dumps(compact))
    assert same(again, compact)
    start, stop = every_key.start, every_key.stop
    other = PreparedMask.from_intervals(start, stop, seqlen_q, is_causal=is_causal, reorder=True, compact=True)
    assert same(other, compact)
    # Intervals that are recognised in a dense mask have been counted already.
    if seqlen_q > 1:
        actual = PreparedMask.from_mask(every_key.dense(), is_causal=is_causal, find_intervals=True, reorder=True)
        assert same(actual, compact)


def test_no_places_are_left_out_where_most_keys_are_live() -> None:
    scores = torch.arange(700.0)  # rising: each key is kept for a while
    every_key, compact = (
        PreparedMask.from_topk(scores, 30, is_causal=True, reorder=True, compact=few) for few in (False, True)
    )
    assert same(every_key, compact)
    for shape, seqlen_q in (((1, 2, 1, 500), 0), ((0, 2, 1, 500), 5)):
        check_fields(PreparedMask.from_topk(torch.zeros(shape), 3, is_causal=True, seqlen_q=seqlen_q, compact=True))


# Memory, and what it waits for


@pytest.mark.parametrize("is_causal", [False, True])
def test_nothing_of_queries_times_keys_is_made(is_causal: bool) -> None:
    scores = torch.randn(1, 2, 1, 4096, generator=torch.Generator().manual_seed(0))
    mask = torch.rand(1, 2, 1, 4096) < 0.9
    every_key = scores[0, :, 0].view(torch.int32)

    def run() -> None:
        local = 10 * is_causal
        # The mode does not see into operators.
        key_order(torch.zeros_like(every_key)[None], topk_stops(every_key, 64)[None], 4096)
        prepared = PreparedMask.from_topk(scores, 64, is_causal=is_causal, mask=mask, local=local, reorder=True)
        PreparedMask.from_intervals(prepared.start, prepared.stop, 4096, window_size=(100, 0), reorder=True)

    made = bytes_made(run)
    assert len(made) > 50 and max(made) <= 8 * 2 * 2 * 4096  # in int64: two heads, a start and a stop for each key


def test_building_reads_no_value() -> None:
    """Fake tensors raise where a value decides anything, which on a GPU is where the host would wait."""
    with FakeTensorMode():
        stops = topk_stops(torch.ones(4, 300, dtype=torch.int32), 20)
        assert key_order(torch.zeros_like(stops)[None], stops[None], 200).shape == (1, 4, 300)
        scores, keys = torch.randn(2, 2, 1, 300), torch.ones(2, 1, 1, 300, dtype=torch.bool)
        prepared = PreparedMask.from_topk(scores, 20, is_causal=True, mask=keys, local=4, seqlen_q=200, reorder=True)
        assert prepared.shape == (2, 2, 200, 300) and prepared.order.shape == (2, 2, 300)
        assert PreparedMask.from_topk(scores, 20).dense().shape == (2, 2, 300, 300)
        assert (
            PreparedMask.from_intervals(prepared.start, prepared.stop, 200, window_size=(9, 9)).shape == prepared.shape
        )


# Errors


ROW, LIMITS = torch.zeros(1, 2, 1, 4), torch.zeros(3, dtype=torch.int32)
BAD: list[tuple[str, tuple[Any, ...], dict[str, Any], type[Exception], str]] = [
    ("topk", (ROW, 0), {}, ValueError, "k is 0; it needs to be >= 1"),
    ("topk", (ROW, 2.0), {}, TypeError, "k is 2.0 (float); it needs to be an int >= 1"),
    ("topk", (ROW.int(), 1), {}, TypeError, "scores has dtype int32; it needs a floating-point dtype"),
    (
        "topk",
        (torch.zeros(2, 3, 4), 1),
        {},
        ValueError,
        "scores has 3 rows (as 4-D, shape (1, 2, 3, 4)); it needs one for all queries; what depends on the query "
        "makes no intervals: use PreparedMask.from_mask(topk_mask(...))",
    ),
    ("topk", (ROW, 1), {"mask": torch.ones(4, 4) > 0}, ValueError, "mask has 4 rows (as 4-D, shape (1, 1, 4, 4))"),
    ("topk", (ROW, 1), {"mask": torch.ones(5) > 0}, ValueError, "mask has 5 keys, scores 4"),
    ("topk", (ROW, 1), {"mask": torch.ones(4)}, TypeError, "mask has dtype torch.float32"),
    ("topk", (ROW, 1), {"seqlen_q": -1}, ValueError, "seqlen_q is -1; it needs to be >= 0"),
    ("topk", (ROW, 1), {"local": -1, "is_causal": True}, ValueError, "local is -1; it needs to be >= 0"),
    ("topk", (ROW, 1), {"local": 2}, ValueError, "local is 2 and is_causal is False"),
    ("topk", (ROW, 1), {"is_causal": 1}, TypeError, "is_causal is 1; it needs to be True"),
    ("topk", (ROW, 1), {"reorder": 1}, TypeError, "reorder is 1; it needs to be True or"),
    ("topk", (ROW, 1), {"reorder": False, "compact": True}, ValueError, "compact is True and reorder is False; only"),
    ("topk", (ROW, 1), {"compact": 1}, TypeError, "compact is 1; it needs to be True"),
    ("intervals", ([0], [1], 4), {"compact": True}, ValueError, "compact is True and reorder is False"),
    ("intervals", ([0.5], [1], 4), {}, TypeError, "start has dtype torch.float32"),
    ("intervals", ([0], torch.ones(4), 4), {}, TypeError, "stop has dtype torch.float32"),
    ("intervals", (torch.tensor(0), [1], 4), {}, ValueError, "start has shape () (0-D); it needs to be 1-D or"),
    ("intervals", ([0], ROW.int(), 4), {}, ValueError, "stop has shape (1, 2, 1, 4) (4-D); it needs to be 1-D"),
    (
        "intervals",
        ([0, 0, 0], [1, 1], 4),
        {},
        ValueError,
        "stop has seqlen_k = 2 (shape (1, 1, 2)) and start has 3 (shape (1, 1, 3)); they need to be equal, or one",
    ),
    ("intervals", (LIMITS[:2, None], LIMITS[:, None], 4), {}, ValueError, "stop has heads = 3"),
    (
        "intervals",
        (LIMITS.to("meta"), [1], 4),
        {},
        ValueError,
        "stop is on cpu; it needs to be on the device of start, meta",
    ),
    ("intervals", ([0], [1], -1), {}, ValueError, "seqlen_q is -1; it needs to be >= 0"),
    ("intervals", ([0], [1], 4), {"is_causal": 1}, TypeError, "is_causal is 1"),
    ("intervals", ([0], [1], 4), {"window_size": (-2, 0)}, ValueError, "at least -1"),
    ("intervals", ([0], [1], 4), {"reorder": None}, TypeError, "reorder is None"),
]


@pytest.mark.parametrize(("kind", "arguments", "options", "error", "message"), BAD)
def test_errors(
    kind: str, arguments: tuple[Any, ...], options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=re.escape(message)):
        getattr(PreparedMask, f"from_{kind}")(*arguments, **options)
