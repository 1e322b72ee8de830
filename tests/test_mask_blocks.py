"""Block masks, smoothing to blocks and statistics against loops over tiles."""

import dataclasses
import itertools

import pytest
import torch

from flash_dmattn import masks
from flash_dmattn.masks import blocks as blocks_module

CASES = [((1, 1), 1), ((4, 4), 2), ((5, 7), (2, 3)), ((7, 5), (3, 2)), ((3, 8), (1, 4)), ((6, 6), 16), ((9, 2), (4, 1))]


def random_mask(*shape, density=0.5, seed=0):
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < density


def tiles_of(seqlen_q, seqlen_k, block_size):
    """Slices of every tile of a (Lq, Lk) mask, in order."""
    block_q, block_k = (block_size, block_size) if isinstance(block_size, int) else block_size
    for i, j in itertools.product(range(0, seqlen_q, block_q), range(0, seqlen_k, block_k)):
        yield slice(i, min(i + block_q, seqlen_q)), slice(j, min(j + block_k, seqlen_k))


@pytest.mark.parametrize(("lengths", "block_size"), CASES)
def test_expand_blocks(lengths, block_size):
    block_q, block_k = (block_size, block_size) if isinstance(block_size, int) else block_size
    number_q, number_k = -(-lengths[0] // block_q), -(-lengths[1] // block_k)
    block_mask = random_mask(2, 3, number_q, number_k)
    got = masks.expand_blocks(block_mask, block_size, *lengths)
    expected = torch.zeros(2, 3, *lengths, dtype=torch.bool)
    for i, j in itertools.product(range(lengths[0]), range(lengths[1])):
        expected[:, :, i, j] = block_mask[:, :, i // block_q, j // block_k]
    assert torch.equal(got.expand_as(expected), expected)
    assert got.size(2) == (lengths[0] if number_q > 1 else 1)
    assert got.size(3) == (lengths[1] if number_k > 1 else 1)


def test_expand_blocks_broadcasts_and_takes_lengths_of_zero():
    per_key_block = random_mask(2, 1, 1, 4)
    assert masks.expand_blocks(per_key_block, 4, 100, 13).shape == (2, 1, 1, 13)
    assert masks.expand_blocks(torch.ones(0, 0, dtype=torch.bool), 4, 0, 0).shape == (1, 1, 0, 0)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("with_allowed", [False, True])
@pytest.mark.parametrize(("lengths", "block_size"), CASES)
def test_smooth_blocks_takes_the_majority_and_empties_no_row(lengths, block_size, with_allowed, is_causal):
    mask = random_mask(2, 2, *lengths, density=0.45, seed=3)
    allowed = random_mask(2, 1, 1, lengths[1], density=0.7, seed=4) if with_allowed else None
    got = masks.smooth_blocks(mask, block_size, is_causal=is_causal, allowed=allowed)
    limit = torch.ones_like(mask)
    if is_causal:
        limit &= torch.ones(lengths).tril(lengths[1] - lengths[0]).bool()
    if with_allowed:
        limit &= allowed
    for b, h in itertools.product(range(2), range(2)):
        expected = torch.zeros(lengths, dtype=torch.bool)
        for rows, keys in tiles_of(*lengths, block_size):
            attends = int((mask & limit)[b, h, rows, keys].sum())
            if 2 * attends > int(limit[b, h, rows, keys].sum()):
                expected[rows, keys] = limit[b, h, rows, keys]
        for i in range(lengths[0]):
            if not expected[i].any():
                expected[i] = (mask & limit)[b, h, i]
        assert torch.equal(got[b, h], expected)


@pytest.mark.parametrize("rows", [254, 255, 256, 257, 512])
def test_counts_of_tiles_with_as_many_rows_as_a_byte_counts(rows):
    counts = blocks_module.tile_counts(torch.ones(2, rows + 3, 5, dtype=torch.bool), (rows, 4))
    assert counts.tolist() == [[[4 * rows, rows], [12, 3]]] * 2


def test_smooth_blocks_groups_heads():
    mask, allowed = random_mask(1, 4, 6, 6), random_mask(1, 2, 6, 6, density=0.8, seed=1)
    got = masks.smooth_blocks(mask, 2, allowed=allowed)
    assert torch.equal(got, masks.smooth_blocks(mask, 2, allowed=allowed.repeat_interleave(2, 1)))
    assert not (got & ~allowed.repeat_interleave(2, 1)).any()


def test_smooth_blocks_broadcasts_with_allowed():
    mask, allowed = random_mask(2, 1, 1, 6), random_mask(1, 4, 5, 6, density=0.8, seed=1)
    full = masks.smooth_blocks(mask.expand(2, 4, 5, 6).contiguous(), 2, allowed=allowed, is_causal=True)
    assert torch.equal(masks.smooth_blocks(mask, 2, allowed=allowed, is_causal=True), full)


@pytest.mark.parametrize("chunk", [1, 40, 1 << 24])
@pytest.mark.parametrize(("lengths", "block_size"), CASES)
def test_stats(lengths, block_size, chunk, monkeypatch):
    monkeypatch.setattr(blocks_module, "CHUNK_ELEMENTS", chunk)
    mask = random_mask(2, 3, *lengths, density=0.6)
    mask[:, :, : lengths[0] // 2] = True
    mask[1, 2, -1] = False
    stats = masks.mask_stats(mask, block_size)
    tiles = [plane[tile] for plane in mask.flatten(0, 1) for tile in tiles_of(*lengths, block_size)]
    assert stats.density == pytest.approx(float(mask.double().mean()))
    assert stats.active_tile_fraction == pytest.approx(sum(bool(t.any()) for t in tiles) / len(tiles))
    assert stats.full_tile_fraction == pytest.approx(sum(bool(t.all()) for t in tiles) / len(tiles))
    assert stats.empty_rows == sum(not row.any() for row in mask.flatten(0, 2))
    assert stats.shape == tuple(mask.shape)


def test_stats_of_expanded_and_shortened_masks_are_those_of_the_full_ones():
    padding = masks.padding_mask([5, 0], 8)
    full = padding.expand(2, 3, 6, 8)
    assert masks.mask_stats(full, 4) == masks.mask_stats(full.contiguous(), 4)
    assert masks.mask_stats(full, 4).empty_rows == 18
    assert masks.mask_stats(padding, 4, seqlen_q=6) == masks.mask_stats(padding.expand(2, 1, 6, 8), 4)


def test_stats_of_nothing_and_their_text():
    assert masks.mask_stats(torch.ones(0, 4, dtype=torch.bool)).density == 0.0
    assert masks.mask_stats(torch.ones(4, 0, dtype=torch.bool)).empty_rows == 4
    assert str(masks.mask_stats(masks.causal_mask(4, 4), 2)) == (
        "1 x 1 x 4 x 4, density 62.5%, 2x2 tiles: 75.0% active, 25.0% full; empty rows 0 of 4"
    )


ONES = torch.ones(2, 2, dtype=torch.bool)
BAD_CALLS = [
    (lambda: masks.expand_blocks(ONES, 2, 5, 4), ValueError, r"2 blocks along seqlen_q .* needs 3, or 1, .* of 2"),
    (lambda: masks.expand_blocks(ONES, 2, 4, 5), ValueError, r"2 blocks along seqlen_k .* needs 3"),
    (lambda: masks.expand_blocks(ONES, 0, 4, 4), ValueError, r"block_size\[0\] is 0; it needs to be >= 1"),
    (lambda: masks.expand_blocks(ONES, "2", 4, 4), TypeError, r"block_size is '2'; it needs to be an int or a pair"),
    (lambda: masks.expand_blocks(ONES.int(), 2, 4, 4), TypeError, r"block_mask has dtype torch\.int32"),
    (lambda: masks.smooth_blocks(ONES, 1, is_causal="no"), TypeError, r"is_causal is 'no'; it needs to be True or"),
    (lambda: masks.smooth_blocks(ONES, (1, -1)), ValueError, r"block_size\[1\] is -1; it needs to be >= 1"),
    (
        lambda: masks.smooth_blocks(ONES, 1, allowed=ONES.new_ones(3, 1)),
        ValueError,
        r"allowed has seqlen_q = 3 .* has 2",
    ),
    (lambda: masks.smooth_blocks(ONES, 1, allowed=ONES.int()), TypeError, r"allowed has dtype torch\.int32"),
    (lambda: masks.mask_stats(ONES, seqlen_q=3), ValueError, r"mask has seqlen_q = 2 .* needs 3 or 1"),
]


@pytest.mark.parametrize(("call", "error", "message"), BAD_CALLS)
def test_errors(call, error, message):
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize("block", (10**12, (10**12, 16), (16, 10**12)), ids=str)
def test_a_block_may_be_longer_than_the_mask(block: int | tuple[int, int]) -> None:
    mask = torch.rand(2, 3, 70, 90) < 0.5
    cut = tuple(min(size, n) for size, n in zip(block if isinstance(block, tuple) else (block, block), (70, 90)))
    counted, wanted = masks.mask_stats(mask, block), masks.mask_stats(mask, cut)
    assert dataclasses.replace(counted, block_size=cut) == wanted
    assert torch.equal(masks.smooth_blocks(mask, block), masks.smooth_blocks(mask, cut))
