"""Tile lists, limits and rows that the flex backend makes from masks and sequences, against brute force."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import flash_dmattn
from flash_dmattn import Sequences
from flash_dmattn.backends.flex import blocks
from flash_dmattn.backends.flex import sequences as flex_sequences
from flash_dmattn.backends.flex.blocks import BLOCK, dense_tensors, make_limits
from flash_dmattn.backends.flex.sequences import SequenceBlocks, sequence_blocks, side_sizes
from flash_dmattn.problem import AttentionProblem, Packing, SequenceSpec


def coarse_mask(*shape: int) -> Tensor:
    """A mask with tiles on and off, and single elements flipped in some: every class of tile occurs."""
    generator = torch.Generator().manual_seed(sum(shape))
    coarse = torch.rand(*shape[:2], -(-shape[2] // BLOCK), -(-shape[3] // BLOCK), generator=generator) < 0.6
    mask = coarse.repeat_interleave(BLOCK, 2).repeat_interleave(BLOCK, 3)[:, :, : shape[2], : shape[3]]
    return mask ^ (torch.rand(shape, generator=generator) < 1e-4)


def listed(counts: Tensor, indices: Tensor) -> Tensor:
    """The tiles that a list names, bool (B, H, rows, columns); each once, in order."""
    tiles = torch.zeros(indices.shape, dtype=torch.bool)
    for position in itertools.product(*map(range, counts.shape)):
        named = indices[position][: counts[position]].tolist()
        assert named == sorted(set(named))
        tiles[position][named] = True
    return tiles


def check_lists(lists: Sequence[Tensor], pairs: Tensor, is_exact: bool = True) -> None:
    """Lists name every tile of bool pairs (B, H, Lq, Lk) that has one, full tiles as such, columns as rows.

    Without `is_exact` they may name a tile without a pair as partly allowed.
    """
    edges = [-n % BLOCK for n in pairs.shape[2:]]

    def tiles(outside: bool) -> Tensor:
        padded = torch.nn.functional.pad(pairs, (0, edges[1], 0, edges[0]), value=outside)
        return padded.unflatten(3, (-1, BLOCK)).unflatten(2, (-1, BLOCK))

    some, every = tiles(False).any(5).any(3), tiles(True).all(5).all(3)
    partial, full, partial_columns, full_columns = (listed(*lists[n : n + 2]) for n in (0, 2, 4, 6))
    assert torch.equal(full.expand_as(every), every)
    assert not (partial & full).any() and not (some & ~(partial | full)).any()
    assert not is_exact or torch.equal((partial | full).expand_as(some), some)
    assert torch.equal(partial_columns, partial.mT) and torch.equal(full_columns, full.mT)
    for x in lists:  # the kernels compute offsets as if contiguous
        assert x.dtype == torch.int32 and x.stride() == torch.empty(x.shape).stride()


def within(limits: tuple[int | None, int | None], seqlen_q: int, seqlen_k: int) -> Tensor:
    """The pairs that limits on key - query allow, bool (Lq, Lk)."""
    distance = torch.arange(seqlen_k) - torch.arange(seqlen_q)[:, None]
    lower, upper = limits
    allowed = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool) if lower is None else distance >= lower
    return allowed if upper is None else allowed & (distance <= upper)


# Dense calls.

MASK_SHAPES = [None, *itertools.product((1, 2), (1, 2, 4), (1, 300), (1, 270)), (2, 2, 256, 384), (1, 1, 5, 7)]


@pytest.mark.parametrize("limits", [(None, None), (None, -30), (-140, None), (-50, 90), (500, 400)], ids=str)
@pytest.mark.parametrize("shape", MASK_SHAPES, ids=str)
def test_tile_lists(shape: tuple[int, ...] | None, limits: tuple[int | None, int | None]) -> None:
    mask = None if shape is None else coarse_mask(*shape)
    batch, heads, *lengths = (1, 1, 1, 1) if shape is None else shape
    seqlen_q, seqlen_k = (n if n > 1 else m for n, m in zip(lengths, (300, 270), strict=True))
    lists = dense_tensors(mask, *limits, 4, seqlen_q, seqlen_k, torch.device("cpu"), batch, 1)[:8]
    assert lists[1].shape[:2] == (batch, 1 if heads == 1 else 4)
    pairs = within(limits, seqlen_q, seqlen_k)[None, None]
    if mask is not None:
        pairs = pairs & mask.repeat_interleave(lists[1].shape[1] // heads, 1)
    # A tile where mask and limits each allow something counts as partly allowed.
    check_lists(lists, pairs, is_exact=mask is None or limits == (None, None))


@pytest.mark.parametrize(
    ("seqlen_q", "seqlen_k", "is_causal", "window_size", "limits"),
    [
        (5, 9, True, None, (None, 4)),
        (9, 5, True, (2, 7), (-6, -4)),
        (1, 9, True, None, (None, None)),
        (9, 9, False, (8, 8), (None, None)),
        (9, 9, False, (7, 0), (-7, 0)),
        (9, 9, False, (10**12, -1), (None, None)),
    ],
)
def test_limits(
    seqlen_q: int, seqlen_k: int, is_causal: bool, window_size: Any, limits: tuple[int | None, int | None]
) -> None:
    q, k = torch.zeros(1, seqlen_q, 1, 16), torch.zeros(1, seqlen_k, 1, 16)
    problem = flash_dmattn.explain(q, k, k, is_causal=is_causal, window_size=window_size).problem
    assert make_limits(problem) == limits


# Sequences.


def problem_of(spec: SequenceSpec, packing: Packing, window: tuple[int, int], num_heads: int) -> AttentionProblem:
    """Describe a call with these sequences."""
    x = torch.zeros(1, 1, num_heads, 1)
    problem = flash_dmattn.explain(x, x, x).problem
    flags = problem.flags._replace(left=window[0], right=window[1], mask_packing=packing, sequences=spec)
    return problem._replace(flags=flags)


def dense_pairs(
    spec: SequenceSpec,
    bounds: Tensor,
    mask: Tensor | None,
    packing: Packing,
    window: tuple[int, int],
    laid: SequenceBlocks,
) -> Tensor:
    """(heads, rows of queries, rows of keys): the pairs that a call allows, by a loop over its pairs of tokens."""
    heads = 1 if mask is None else mask.shape[1]
    pairs = torch.zeros(heads, len(laid.queries.token), len(laid.keys.token), dtype=torch.bool)
    for s, (first_q, len_q, first_k, len_k) in enumerate(bounds.tolist()):
        start_q, start_k = (
            first if is_packed else s * rows
            for first, is_packed, rows in (
                (first_q, spec.packs_queries, spec.rows_q),
                (first_k, spec.packs_keys, spec.rows_k),
            )
        )
        i, j = torch.arange(len_q)[:, None], torch.arange(len_k)[None]
        allowed = torch.ones(heads, len_q, len_k, dtype=torch.bool)
        middle = i + len_k - len_q
        if window[0] >= 0:
            allowed &= j >= middle - window[0]
        if window[1] >= 0:
            allowed &= j <= middle + window[1]
        if mask is not None:
            entry = mask[s if packing == "none" and mask.shape[0] > 1 else 0]
            rows = i + (first_q if packing == "queries" else 0) if mask.shape[2] > 1 else i * 0
            columns = j + (first_k if packing == "keys" else 0) if mask.shape[3] > 1 else j * 0
            allowed &= entry[:, rows, columns]
        at_q = laid.queries.row[start_q : start_q + len_q].long()
        at_k = laid.keys.row[start_k : start_k + len_k].long()
        pairs[:, at_q[:, None], at_k[None]] = allowed
    return pairs


WINDOWS = ((-1, -1), (-1, 0), (100, 0), (20, 150))
MASKS: tuple[tuple[str, Packing, tuple[int, ...] | None], ...] = (
    ("none", "none", None),
    ("by position", "none", (5, 2, 300, 270)),
    ("by position, shared", "none", (1, 1, 300, 270)),
    ("by position, of keys", "none", (5, 4, 1, 270)),
    ("by position, of queries", "none", (1, 2, 300, 1)),
    ("of sequences", "none", (5, 1, 1, 1)),
    ("rows", "queries", (1, 2, 860, 270)),
    ("query", "queries", (1, 1, 860, 1)),
    ("keys", "keys", (1, 4, 1, 676)),
)


def five_sequences() -> tuple[Tensor, SequenceSpec]:
    """Return bounds and description of sequences in 860 queries and 676 keys, with tokens of no sequence."""
    cu_q, cu_k = torch.tensor([0, 300, 300, 557, 600, 857]), torch.tensor([0, 270, 274, 404, 404, 674])
    used = {"seqlens_q": torch.tensor([300, 0, 256, 43, 257]), "seqlens_k": torch.tensor([256, 4, 129, 0, 270])}
    sequences = Sequences.packed(cu_q, cu_k, max_seqlen_q=300, max_seqlen_k=270, **used)
    q, k = torch.zeros(860, 4, 1), torch.zeros(676, 2, 1)
    spec, view = sequences.describe_with_view(q, k, k)
    return view.bounds, spec


@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize(("packing", "shape"), [x[1:] for x in MASKS], ids=[x[0] for x in MASKS])
def test_tile_lists_and_limits_of_sequences(
    packing: Packing, shape: tuple[int, ...] | None, window: tuple[int, int]
) -> None:
    bounds, spec = five_sequences()
    mask = None if shape is None else coarse_mask(*shape)
    laid = sequence_blocks(problem_of(spec, packing, window, 4), bounds, mask)
    pairs = dense_pairs(spec, bounds, mask, packing, window, laid)
    check_sequence_lists(laid, pairs, 4)
    if mask is None:
        key = torch.arange(pairs.shape[2])
        assert laid.blocks.lower is not None and laid.blocks.upper is not None
        inside = (key >= laid.blocks.lower[:, None]) & (key <= laid.blocks.upper[:, None])
        assert torch.equal(inside, pairs[0])


def check_sequence_lists(laid: SequenceBlocks, pairs: Tensor, num_heads: int) -> None:
    lists = laid.blocks.lists
    assert lists is not None
    heads = lists[0].shape[1]
    assert heads == (1 if pairs.shape[0] == 1 else num_heads)
    check_lists(lists, pairs.repeat_interleave(heads // pairs.shape[0], 0)[None], is_exact=False)


@pytest.mark.parametrize("seed", range(30))
def test_layouts_of_random_sequences(seed: int) -> None:
    """Each token has a row, its row has it, no tile has tokens of two sequences, and bounds hold what they bound."""
    rng = random.Random(seed)
    number, window = rng.randint(1, 7), rng.choice(WINDOWS)
    slots = [[rng.choice((0, 1, 60, 127, 128, 129, 300)) for _ in range(number)] for _ in range(2)]
    used = [[n if rng.random() < 0.5 else rng.randint(0, n) for n in side] for side in slots]
    named = {f"max_seqlen_{side}": max(n) + rng.choice((0, 200)) for side, n in zip("qk", slots) if rng.random() < 0.6}
    if rng.random() < 0.6:
        edges = [torch.tensor([0, *itertools.accumulate(n)]) for n in slots]
        sequences = Sequences.packed(*edges, **named, seqlens_q=torch.tensor(used[0]), seqlens_k=torch.tensor(used[1]))
        shapes = [(max(1, int(edge[-1]) + rng.choice((0, 3))), 2, 1) for edge in edges]
    else:
        sequences = Sequences.padded(seqlens_q=torch.tensor(used[0]), seqlens_k=torch.tensor(used[1]))
        shapes = [(number, max(1, *n), 2, 1) for n in slots]
    q, k = (torch.zeros(shape) for shape in shapes)
    spec, (bounds, _) = sequences.describe_with_view(q, k, k)
    laid = sequence_blocks(problem_of(spec, "none", window, 2), bounds, None)
    check_sequence_lists(laid, dense_pairs(spec, bounds, None, "none", window, laid), 2)
    for side, lengths, x in ((laid.queries, used[0], q), (laid.keys, used[1], k)):
        tokens = side.token[side.token >= 0]
        assert len(tokens) == sum(lengths) == int((side.row >= 0).sum())
        assert torch.equal(side.row[tokens.long()], (side.token >= 0).nonzero().flatten().to(torch.int32))
        assert len(side.row) == x.shape[:-2].numel()
        by_tile = side.sequence.view(-1, BLOCK)
        assert torch.equal(by_tile, by_tile[:, :1].expand_as(by_tile))
        for s, n in enumerate(lengths):
            own = (side.sequence == s) & (side.token >= 0)
            assert side.place[own].tolist() == list(range(n))
            # A row without a token has the position of one of them: kernels add NaN of theirs to a gradient there.
            in_used_tile = own.view(-1, BLOCK).any(1).repeat_interleave(BLOCK)
            assert set(side.place[in_used_tile].tolist()) <= set(range(n))


def test_wild_tables_leave_no_tensor() -> None:
    """Indices stay inside, whatever the tables say: a GPU does not check them."""
    for seed in range(30):
        generator = torch.Generator().manual_seed(seed)
        spread = 10 ** int(torch.randint(1, 9, (), generator=generator))
        wild = [torch.randint(-spread, spread, (n,), generator=generator, dtype=torch.int32) for n in (6, 6, 5, 5)]
        sequences = Sequences("packed", *wild)
        spec = SequenceSpec("packed", 5, 400, 300, 160, 200)
        bounds = sequences.make_bounds(spec)
        mask = torch.ones(5, 1, 160, 200, dtype=torch.bool)
        laid = sequence_blocks(problem_of(spec, "none", (9, 0), 2), bounds, mask)
        for side, tokens, most in ((laid.queries, 400, 160), (laid.keys, 300, 200)):
            for x, limit in ((side.token, tokens), (side.row, len(side.token)), (side.sequence, 5), (side.place, most)):
                assert int(x.min()) >= -1 and int(x.max()) < limit
            assert int(side.sequence.min()) >= 0 and int(side.place.min()) >= 0
        places = laid.blocks.places
        assert places is not None and int(places.token.max()) < 400
        for x in places:
            assert int(x.min()) >= 0
        lists = laid.blocks.lists
        assert lists is not None
        for counts, indices in zip(lists[::2], lists[1::2], strict=True):
            assert int(counts.max()) <= indices.shape[3]
            assert int(indices.min()) >= 0
        assert int(lists[1].max()) < lists[5].shape[2] and int(lists[5].max()) < lists[1].shape[2]


@pytest.mark.parametrize(("packing", "shape"), [x[1:] for x in MASKS], ids=[x[0] for x in MASKS])
def test_the_operator_is_what_it_tells_compilers(packing: Packing, shape: tuple[int, ...] | None) -> None:
    bounds, spec = five_sequences()
    mask = None if shape is None else torch.rand(shape) < 0.5
    arguments = (bounds, mask, packing, *map(list, side_sizes(spec)), 10, 0, 4)
    torch.library.opcheck(flex_sequences._SEQUENCES, arguments)


@pytest.mark.parametrize("limits", [(None, 0), (-40, None), (-9, 30)], ids=str)
@pytest.mark.parametrize("shape", [None, (2, 2, 300, 270), (1, 4, 1, 270)], ids=str)
def test_the_dense_operator_is_what_it_tells_compilers(
    shape: tuple[int, ...] | None, limits: tuple[int | None, int | None]
) -> None:
    mask = None if shape is None else torch.rand(shape) < 0.5
    torch.library.opcheck(blocks._DENSE, (mask, *limits, 4, 300, 270, torch.device("cpu"), 4, 2))


def test_layers_share_what_a_batch_needs_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """And it goes with the sequences; another window, or a table that has changed, has its own."""
    made: list[object] = []
    before = len(flex_sequences._kept)
    make = flex_sequences._sequence_tensors
    monkeypatch.setattr(
        flex_sequences, "_sequence_tensors", lambda *arguments: made.append(arguments[5:7]) or make(*arguments)
    )
    cu = torch.tensor([0, 30, 200], dtype=torch.int32)
    sequences = Sequences.packed(cu)
    q = torch.zeros(200, 2, 1)
    spec = sequences.describe(q, q, q)

    def layer(sequences: Sequences, window: tuple[int, int]) -> SequenceBlocks:
        return sequence_blocks(
            problem_of(spec, "none", window, 2), sequences.describe_with_view(q, q, q)[1].bounds, None
        )

    first = layer(sequences, (-1, 0))
    assert layer(sequences, (-1, 0)) is first and len(made) == 1
    assert layer(sequences, (9, 0)) is not first and made == [(-1, 0), (9, 0)]
    cu[1] = 40
    second = layer(sequences, (-1, 0))
    assert second is not first and len(made) == 3
    assert int((second.queries.sequence[second.queries.token >= 0] == 0).sum()) == 40
    del sequences, first, second
    assert len(flex_sequences._kept) <= before
