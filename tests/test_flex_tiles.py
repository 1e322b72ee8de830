"""The tiles that the flex backend lays sequences out in, against brute force: rows, limits, tile lists, operator."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from test_flex_graph import listed
from torch import Tensor

from flash_dmattn import Sequences
from flash_dmattn.backends.flex import sequence_blocks
from flash_dmattn.backends.flex.blocks import BLOCK
from flash_dmattn.backends.flex.sequence_blocks import LaidOut, prepare_sequences
from flash_dmattn.backends.flex.tiles import extents
from flash_dmattn.problem import Packing, SequenceSpec


def dense_pairs(
    spec: SequenceSpec, bounds: Tensor, mask: Tensor | None, packing: Packing, window: tuple[int, int], laid: LaidOut
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


@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize(("packing", "shape"), [x[1:] for x in MASKS], ids=[x[0] for x in MASKS])
def test_tile_lists_and_limits_against_brute_force(
    packing: Packing, shape: tuple[int, ...] | None, window: tuple[int, int]
) -> None:
    cu_q, cu_k = torch.tensor([0, 300, 300, 557, 600, 857]), torch.tensor([0, 270, 274, 404, 404, 674])
    used = {"seqlens_q": torch.tensor([300, 0, 256, 43, 257]), "seqlens_k": torch.tensor([256, 4, 129, 0, 270])}
    sequences = Sequences.packed(cu_q, cu_k, max_seqlen_q=300, max_seqlen_k=270, **used)
    q, k = torch.zeros(860, 4, 1), torch.zeros(676, 2, 1)
    spec = sequences.spec(q, k, k)
    bounds = sequences.view(spec).bounds
    mask = None
    if shape is not None:
        generator = torch.Generator().manual_seed(sum(shape))
        # Whole stretches on and off, single elements flipped in some: every class of tile occurs.
        coarse = torch.rand(*shape[:2], -(-shape[2] // BLOCK), -(-shape[3] // BLOCK), generator=generator) < 0.6
        mask = coarse.repeat_interleave(BLOCK, 2).repeat_interleave(BLOCK, 3)[:, :, : shape[2], : shape[3]]
        mask = mask ^ (torch.rand(shape, generator=generator) < 1e-4)
    laid = prepare_sequences(bounds, mask, packing, extents(spec), window, 4)
    pairs = dense_pairs(spec, bounds, mask, packing, window, laid)
    check_lists(laid, pairs, 4)
    if mask is None:
        key = torch.arange(pairs.shape[2])
        assert laid.blocks.lower is not None and laid.blocks.upper is not None
        inside = (key >= laid.blocks.lower[:, None]) & (key <= laid.blocks.upper[:, None])
        assert torch.equal(inside, pairs[0])


def check_lists(laid: LaidOut, pairs: Tensor, num_heads: int) -> None:
    """What is allowed somewhere is listed once; tiles that are allowed everywhere as such; columns as rows."""
    lists = laid.blocks.lists
    assert lists is not None
    heads = lists.kv_num_blocks.shape[1]
    assert heads == (1 if pairs.shape[0] == 1 else num_heads)
    pairs = pairs.repeat_interleave(heads // pairs.shape[0], 0)
    tiles = pairs.unflatten(2, (-1, BLOCK)).unflatten(1, (-1, BLOCK))
    some, every = tiles.any(4).any(2), tiles.all(4).all(2)
    partial = listed(lists.kv_num_blocks, lists.kv_indices, some.shape[2])[0]
    full = listed(lists.full_kv_num_blocks, lists.full_kv_indices, some.shape[2])[0]
    assert torch.equal(full, every)
    assert not (partial & full).any() and not (some & ~(partial | full)).any()
    for by_row, counts, indices in (
        (partial, lists.q_num_blocks, lists.q_indices),
        (full, lists.full_q_num_blocks, lists.full_q_indices),
    ):
        assert torch.equal(listed(counts, indices, some.shape[1])[0], by_row.transpose(1, 2))
    for x in lists:
        assert x.dtype == torch.int32 and x.is_contiguous()


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
        sequences = Sequences.padded(torch.tensor(used[1]), torch.tensor(used[0]))
        shapes = [(number, max(1, *n), 2, 1) for n in slots]
    q, k = (torch.zeros(shape) for shape in shapes)
    spec = sequences.spec(q, k, k)
    bounds = sequences.view(spec).bounds
    laid = prepare_sequences(bounds, None, "none", extents(spec), window, 2)
    check_lists(laid, dense_pairs(spec, bounds, None, "none", window, laid), 2)
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
            # A row without a token beside them is where one of them is: kernels add NaN of theirs to a gradient there.
            others = own.view(-1, BLOCK).any(1).repeat_interleave(BLOCK)
            assert set(side.place[others].tolist()) <= set(range(n))


def test_wild_tables_leave_no_tensor() -> None:
    """Indices stay inside, whatever the tables say: a GPU does not check them."""
    for seed in range(30):
        generator = torch.Generator().manual_seed(seed)
        spread = 10 ** int(torch.randint(1, 9, (), generator=generator))
        wild = [torch.randint(-spread, spread, (n,), generator=generator, dtype=torch.int32) for n in (6, 6, 5, 5)]
        sequences = Sequences("packed", *wild)
        spec = SequenceSpec("packed", 5, 400, 300, 160, 200)
        bounds = sequences.bounds_of(spec)
        laid = prepare_sequences(bounds, torch.ones(5, 1, 160, 200, dtype=torch.bool), "none", extents(spec), (9, 0), 2)
        for side, tokens, most in ((laid.queries, 400, 160), (laid.keys, 300, 200)):
            for x, limit in ((side.token, tokens), (side.row, len(side.token)), (side.sequence, 5), (side.place, most)):
                assert int(x.min()) >= -1 and int(x.max()) < limit
            assert int(side.sequence.min()) >= 0 and int(side.place.min()) >= 0
        for x in laid.places:
            assert int(x.min()) >= 0
        assert int(laid.places.token.max()) < 400
        lists = laid.blocks.lists
        assert lists is not None
        for counts, indices in zip(lists[::2], lists[1::2], strict=True):
            assert int(counts.max()) <= indices.shape[3]
            assert int(indices.min()) >= 0
        assert int(lists.kv_indices.max()) < lists.q_indices.shape[2]
        assert int(lists.q_indices.max()) < lists.kv_indices.shape[2]


@pytest.mark.parametrize(("packing", "shape"), [x[1:] for x in MASKS], ids=[x[0] for x in MASKS])
def test_the_operator_is_what_it_tells_compilers(packing: Packing, shape: tuple[int, ...] | None) -> None:
    sequences = Sequences.packed(
        torch.tensor([0, 300, 300, 557, 600, 857]), torch.tensor([0, 270, 274, 404, 404, 674]), max_seqlen_q=300,
        max_seqlen_k=270,
    )  # fmt: skip
    q, k = torch.zeros(860, 4, 1), torch.zeros(676, 2, 1)
    spec = sequences.spec(q, k, k)
    queries, keys = (list(x) for x in extents(spec))
    mask = None if shape is None else torch.rand(shape) < 0.5
    given = (sequences.view(spec).bounds, mask, packing, queries, keys, 10, 0, 4)
    torch.library.opcheck(sequence_blocks._OPERATOR, given)


def test_layers_share_what_a_batch_needs_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """And it goes with the sequences; another window, or a table that has changed, has its own."""
    made: list[object] = []
    before = len(sequence_blocks._kept)
    prepared = sequence_blocks._prepared
    monkeypatch.setattr(sequence_blocks, "_prepared", lambda *given: made.append(given[5:7]) or prepared(*given))
    cu = torch.tensor([0, 30, 200], dtype=torch.int32)
    sequences = Sequences.packed(cu)
    q = torch.zeros(200, 2, 1)
    spec = sequences.spec(q, q, q)

    def of_layer(sequences: Sequences, window: tuple[int, int]) -> LaidOut:
        return prepare_sequences(sequences.view(spec).bounds, None, "none", extents(spec), window, 2)

    first = of_layer(sequences, (-1, 0))
    assert of_layer(sequences, (-1, 0)) is first and len(made) == 1
    assert of_layer(sequences, (9, 0)) is not first and made == [(-1, 0), (9, 0)]
    cu[1] = 40
    second = of_layer(sequences, (-1, 0))
    assert second is not first and len(made) == 3
    assert int((second.queries.sequence[second.queries.token >= 0] == 0).sum()) == 40
    del sequences, first, second
    assert len(sequence_blocks._kept) <= before
