"""Dense masks that `PreparedMask.from_mask(find_intervals=True)` takes for intervals: against loops, and its reads."""

from __future__ import annotations

import re
from typing import Any
from unittest import mock

import pytest
import torch
from cases import DEVICE
from dispatched import Dispatched
from mask_checks import BANDS, check_fields, runs, same
from torch import Tensor

import flash_dmattn
from flash_dmattn import masks
from flash_dmattn.masks import PreparedMask, topk_mask
from flash_dmattn.masks.prepared import packing
from flash_dmattn.masks.prepared.intervals import mask_intervals, order_saves
from flash_dmattn.masks.prepared.storage import IntervalMask, KeyMask, TileMask
from flash_dmattn.problem import Band, causal_window, make_band

SIZES = [(2, 3), (2, 1), (2, 9), (9, 2), (20, 20), (14, 31), (31, 14), (130, 260), (260, 130)]


def intervals_in(mask: Tensor, band: Band | None) -> tuple[Tensor, Tensor, Tensor]:
    bits, classes = packing.pack_mask(mask, band)
    return mask_intervals(bits, packing.list_tiles(classes)[0], mask.size(3))


def by_loops(mask: Tensor, band: Band | None) -> tuple[list[int], list[int], bool]:
    """Starts and stops of all keys, of all heads, and whether every key has one run."""
    starts, stops, is_intervals = [], [], True
    for head in mask.flatten(0, 1).tolist():
        for key in range(mask.size(3)):
            sees = [i for i, row in enumerate(head) if row[key] and (band is None or band.low <= key - i <= band.high)]
            starts.append(sees[0] if sees else 0)
            stops.append(sees[-1] + 1 if sees else 0)
            is_intervals &= sees == list(range(starts[-1], stops[-1]))
    return starts, stops, is_intervals


@pytest.mark.parametrize("band", BANDS, ids=str)
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), SIZES)
def test_runs_against_loops(seqlen_q: int, seqlen_k: int, band: dict[str, Any]) -> None:
    limits = make_band(
        seqlen_q, seqlen_k, causal_window(band.get("is_causal", False), band.get("window_size", (-1, -1)))
    )
    generator = torch.Generator().manual_seed(1)
    for flipped in (0.0, 0.002, 0.3):
        mask = runs(2, 3, seqlen_q, seqlen_k)
        mask ^= torch.rand(mask.shape, generator=generator) < flipped
        with mock.patch.object(packing, "CHUNK_ELEMENTS", 6 * seqlen_k * 7):  # seven rows at a time
            start, stop, numbers = intervals_in(mask, limits)
        wanted = by_loops(mask, limits)
        assert (start.flatten().tolist(), stop.flatten().tolist(), not numbers[0]) == wanted
        prepared = PreparedMask.from_mask(mask, seqlen_k=seqlen_k, find_intervals=True, reorder=bool(flipped), **band)
        assert type(prepared) is (IntervalMask if wanted[2] else TileMask)
        assert torch.equal(prepared.dense(), PreparedMask.from_mask(mask, seqlen_k=seqlen_k, **band).dense())
        if isinstance(prepared, IntervalMask):
            assert (prepared.start.flatten().tolist(), prepared.stop.flatten().tolist()) == wanted[:2]
            assert prepared.is_reordered == bool(flipped)
            check_fields(prepared)


def test_numbers() -> None:
    """Live keys of the fullest head, pairs, and tiles: by hand, and of masks without keys, queries or heads."""
    mask = torch.zeros(2, 2, 260, 300, dtype=torch.bool)
    mask[0, 1, 100:200, [5, 7, 250]] = True  # two rows of tiles by two columns
    mask[1, 0, 259, 299] = True
    mask[1, 1, :128, :128] = True
    start, stop, numbers = intervals_in(mask, None)
    assert start.dtype == stop.dtype == torch.int32 and start.is_contiguous() and stop.is_contiguous()
    assert numbers.dtype == torch.int64 and numbers.tolist() == [0, 128, 128**2 + 301, 6]
    mask[0, 1, 150, 5] = False
    assert intervals_in(mask, None)[2].tolist()[0] == 1
    for shape in ((2, 1, 0, 5), (1, 2, 5, 0), (0, 1, 3, 4), (1, 0, 3, 4)):
        start, stop, numbers = intervals_in(torch.ones(shape, dtype=torch.bool), None)
        assert numbers.tolist() == [0] * 4 and not start.any() and not stop.any()


@pytest.mark.parametrize(
    ("hole", "is_causal", "actual"),
    [
        ((3, 1), False, TileMask),
        ((7, 1), False, IntervalMask),
        ((2, 5), False, IntervalMask),
        ((2, 5), True, IntervalMask),
    ],
)
def test_one_pair_decides(hole: tuple[int, int], is_causal: bool, actual: type) -> None:
    """A causal mask lacks a pair inside, or the last query of a key, or allows a pair above the diagonal."""
    mask = torch.ones(8, 8, dtype=torch.bool).tril()
    mask[hole] ^= True
    if hole == (2, 5):
        mask[3:5, 5] = is_causal is False  # without the band the run has to go on to the diagonal
    assert type(PreparedMask.from_mask(mask, find_intervals=True, is_causal=is_causal)) is actual


def test_shapes_of_masks() -> None:
    """Expanded dims stay of size 1, leading ones fold, and a mask of one row becomes what it does without."""
    mask = runs(4, 2, 40, 50)
    assert PreparedMask.from_mask(mask[:1, :1].expand(3, 5, -1, -1), find_intervals=True).shape == (1, 1, 40, 50)
    folded = PreparedMask.from_mask(mask.view(2, 2, 2, 40, 50), find_intervals=True)
    assert isinstance(folded, IntervalMask) and folded.batch_dims == (2, 2)
    assert torch.equal(folded.dense(), mask)
    column = mask[..., :1]
    prepared = PreparedMask.from_mask(column, seqlen_k=50, is_causal=True, find_intervals=True)
    assert isinstance(prepared, IntervalMask)
    assert torch.equal(prepared.dense(), column & masks.causal_mask(40, 50))
    row = mask[:, :, :1]
    assert isinstance(PreparedMask.from_mask(row, seqlen_q=3, find_intervals=True), KeyMask)
    one, other = (PreparedMask.from_mask(row, seqlen_q=40, find_intervals=find) for find in (False, True))
    assert same(one, other)
    for shape in ((1, 2, 0, 5), (1, 2, 5, 0), (0, 2, 5, 5)):
        empty = PreparedMask.from_mask(torch.ones(shape, dtype=torch.bool), find_intervals=True)
        assert isinstance(empty, IntervalMask) and empty.dense().shape == shape


# An order of keys


def test_an_order_is_made_where_its_tiles_pay() -> None:
    """1024 of 8192 keys, scattered or in a window, and few keys: tiles are counted, not expected."""
    generator = torch.Generator().manual_seed(0)
    tiles = {}
    for name, scores in (
        ("scattered", torch.randn(1, 8, 1, 8192, generator=generator)),
        ("rising", torch.arange(8192.0).expand(1, 8, 1, -1)),  # the last 1024 keys of each prefix
    ):
        natural = PreparedMask.from_topk(scores, 1024, is_causal=True, reorder=False)
        pairs, active = int((natural.stop - natural.start).sum()), int(natural.row_lists[..., :2].sum())
        tiles[name] = order_saves(active, pairs, pairs / (natural.start.numel()), has_backward=False)
    assert tiles == {"scattered": True, "rising": False}
    assert not order_saves(10, 1000.0, 5.0, has_backward=True)

    mask = topk_mask(torch.randn(1, 1, 1, 300, generator=generator), 30, is_causal=True)
    for pays in (False, True):
        with mock.patch("flash_dmattn.masks.prepared.mask.order_saves", return_value=pays) as asked:
            actual = PreparedMask.from_mask(mask, find_intervals=True)
        assert isinstance(actual, IntervalMask) and actual.is_reordered is pays
        ((active, pairs, kept), argument) = asked.call_args
        assert (active, pairs, argument) == (6, int(mask.sum()), {"has_backward": False})
        assert kept == pytest.approx(float(mask.sum(-1).float().mean()))


# Reads that wait, and errors


def test_it_waits_once_and_only_if_it_is_asked_to() -> None:
    reads: list[torch.dtype] = []

    def show(operator: Any, arguments: Any, result: Any) -> None:
        if operator is torch.ops.aten._local_scalar_dense.default:
            reads.append(arguments[0].dtype)

    mask = runs(2, 3, 40, 50)
    for argument, reorder, number in ((mask, None, 1), (mask, True, 1), (mask ^ (torch.rand(40, 50) < 0.3), False, 1)):
        copies, copy = [], Tensor.tolist

        def tolist(x: Tensor, copies: list[Tensor] = copies, copy: Any = copy) -> Any:
            copies.append(x)
            return copy(x)

        reads.clear()
        with mock.patch.object(Tensor, "tolist", tolist), Dispatched(show):
            PreparedMask.from_mask(argument, find_intervals=True, reorder=reorder)
        assert len(copies) + len(reads) == number
    reads.clear()
    with Dispatched(show):
        PreparedMask.from_mask(mask, reorder=True)
        PreparedMask.from_topk(torch.randn(300), 5, is_causal=True, reorder=True)
        assert not reads
        PreparedMask.from_topk(torch.randn(300), 5, is_causal=True, compact=True)
    assert reads == [torch.int64]


def test_errors() -> None:
    mask = torch.ones(4, 4, dtype=torch.bool)
    with pytest.raises(ValueError, match=re.escape("find_intervals is True; with as_tiles=True it needs to be False")):
        PreparedMask.from_mask(mask, find_intervals=True, as_tiles=True)
    layout = flash_dmattn.Sequences.packed(torch.tensor([0, 4]), torch.tensor([0, 4]), max_seqlen_q=4, max_seqlen_k=4)
    with pytest.raises(ValueError, match=re.escape("find_intervals is True; with sequences it needs to be False")):
        PreparedMask.from_mask(mask, seqlen_q=4, seqlen_k=4, sequences=layout, find_intervals=True)
    with pytest.raises(TypeError, match="find_intervals is 1; it needs to be True or"):
        PreparedMask.from_mask(mask, find_intervals=1)  # type: ignore[call-overload]


def test_steps_are_operators_where_something_watches() -> None:
    """As in a graph; and what nothing watches comes out the same."""
    scores = torch.randn(1, 2, 1, 2048, generator=torch.Generator().manual_seed(0))
    mask = topk_mask(scores, 40, is_causal=True)
    with Dispatched() as seen:
        watched = PreparedMask.from_mask(mask, is_causal=True, find_intervals=True, reorder=True)
    assert seen.names == ["prepare_mask", "mask_intervals", "interval_walk"]
    with mock.patch.object(torch._ops.OpOverload, "__call__", side_effect=AssertionError("an operator ran")):
        other = PreparedMask.from_mask(mask, is_causal=True, find_intervals=True, reorder=True)
    assert same(watched, other)


def test_a_compiled_caller_goes_on_behind_the_answer() -> None:
    def masked(mask: Tensor, reorder: bool | None = None) -> Tensor:
        made = PreparedMask.from_mask(mask, find_intervals=True, reorder=reorder)
        return torch.stack((made.dense().sum(), made.tensors[3].long().sum())) + 1

    compiled = torch.compile(masked, backend="aot_eager")
    mask = runs(2, 3, 20, 30)
    assert compiled(mask).tolist()[0] == int(mask.sum()) + 1
    few = topk_mask(torch.randn(1, 1, 1, 1500, generator=torch.Generator().manual_seed(0)), 20, is_causal=True)
    assert PreparedMask.from_mask(few, find_intervals=True, reorder=True).tensors[2].size(2) < 750
    assert torch.equal(compiled(few, True), masked(few, True))


@pytest.mark.skipif(DEVICE == "cpu", reason="masks on the CPU are read by PyTorch")
@pytest.mark.parametrize("width", [1040, 1036, 1035])
def test_on_a_gpu(width: int) -> None:
    for flipped in (0.0, 1e-6, 0.5):
        mask = runs(2, 3, 1000, width)
        mask ^= torch.rand(mask.shape, generator=torch.Generator().manual_seed(0)) < flipped
        one, other = (
            PreparedMask.from_mask(x, is_causal=True, find_intervals=True, reorder=True)
            for x in (mask.to(DEVICE), mask)
        )
        assert type(one) is type(other)
        assert all(torch.equal(x.cpu(), y) for x, y in zip(one.tensors, other.tensors, strict=True))
