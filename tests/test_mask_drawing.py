"""The picture of a mask: every pixel's colour, what pooling keeps, its texts, and what it refuses."""

import sys

import pytest
import torch

from flash_dmattn import Sequences, masks
from flash_dmattn.examples import draw_mask

pytest.importorskip("matplotlib")

SCORES = torch.randn(2, 2, 1, 50, generator=torch.Generator().manual_seed(0))
LONE_KEY = tuple(m + (a - m) / 3 for m, a in zip(draw_mask.PARTIAL_MASKED, draw_mask.PARTIAL_ATTENDS, strict=True))


def pixels(figure):
    """The RGB picture that the figure shows."""
    return torch.tensor(figure.axes[0].images[0].get_array())


def assert_color(pixel, rgb):
    torch.testing.assert_close(pixel.double(), torch.tensor(rgb, dtype=torch.float64), atol=0.01, rtol=0)


@pytest.mark.parametrize("block_size", [1, 2, (3, 4), 128])
def test_pixels_of_a_small_mask_are_its_tokens_coloured_by_tile(block_size):
    mask = torch.rand(7, 9, generator=torch.Generator().manual_seed(0)) < 0.5
    mask[:4, :4] = True
    mask[3:, 6:] = False
    picture = pixels(draw_mask.show(mask, block_size=block_size))
    assert picture.shape == (7, 9, 3)
    block_q, block_k = (block_size, block_size) if isinstance(block_size, int) else block_size
    for i in range(7):
        for j in range(9):
            top, left = i // block_q * block_q, j // block_k * block_k
            tile = mask[top : top + block_q, left : left + block_k]
            partial = draw_mask.PARTIAL_ATTENDS if mask[i, j] else draw_mask.PARTIAL_MASKED
            rgb = draw_mask.FULL_TILE if tile.all() else partial if tile.any() else draw_mask.EMPTY_TILE
            assert_color(picture[i, j], rgb)


def test_large_masks_are_pooled_and_a_lone_key_stays_visible():
    mask = torch.zeros(4000, 3001, dtype=torch.bool)
    mask[1777, 2999] = True
    mask[:512, :512] = True
    figure = draw_mask.show(mask, block_size=256)
    picture = pixels(figure)
    assert picture.shape == (667, 751, 3)  # 6 x 4 tokens a pixel
    assert_color(
        picture[1777 // 6, 2999 // 4], tuple(c + (d - c) / 36 for c, d in zip(LONE_KEY, draw_mask.PARTIAL_ATTENDS))
    )
    assert_color(picture[0, 0], draw_mask.FULL_TILE)
    assert_color(picture[600, 600], draw_mask.EMPTY_TILE)
    # The axes stay in tokens.
    assert figure.axes[0].images[0].get_extent() == [0, 3001, 4000, 0]


def test_batch_head_and_lengths_choose_the_plane():
    mask = torch.zeros(2, 3, 1, 4, dtype=torch.bool)
    mask[1, 2, 0, 1] = True
    picture = pixels(draw_mask.show(mask, batch=1, head=2, seqlen_q=5, block_size=1))
    assert picture.shape == (5, 4, 3)
    assert_color(picture[4, 1], draw_mask.FULL_TILE)
    assert_color(pixels(draw_mask.show(mask, batch=1, head=1, block_size=1))[0, 1], draw_mask.EMPTY_TILE)
    # A mask shared by all heads is the mask of any head.
    assert_color(pixels(draw_mask.show(mask[1:, 2:], batch=7, head=7, block_size=1))[0, 1], draw_mask.FULL_TILE)


@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_of_a_mask_beside_sequences_one_is_drawn(layout):
    lengths = torch.tensor([3, 0, 5])
    mask = torch.rand(3, 2, 5, 5, generator=torch.Generator().manual_seed(0)) < 0.5
    if layout == "packed":
        sequences, rows = Sequences.packed(torch.tensor([0, 3, 3, 8]), max_seqlen_q=5), 8
    else:
        sequences, rows = Sequences.padded(seqlens_q=lengths, seqlens_k=lengths), 5
    prepared = masks.PreparedMask.from_mask(mask, sequences=sequences, seqlen_q=rows, seqlen_k=rows, is_causal=True)
    for number, n in ((0, 3), (2, 5)):
        for head in (0, 1):
            figure = draw_mask.show(prepared, batch=number, head=head, block_size=2)
            own = draw_mask.show(mask[number, head, :n, :n].tril(), block_size=2)
            assert torch.equal(pixels(figure), pixels(own))
            assert figure.axes[0].get_title() == own.axes[0].get_title()
    for arguments, message in (
        ({"batch": 3}, r"batch is 3 and mask has 3 \(shape .*\); it needs to be < 3"),
        ({"batch": 1}, r"mask has a sequence 1 of shape \(0, 0\): there is nothing to draw"),
        ({"head": 2}, "head is 2 and mask has 2"),
        ({"seqlen_k": 4}, r"mask has seqlen_k = 3 .* needs 4 or 1"),
    ):
        with pytest.raises(ValueError, match=message):
            draw_mask.show(prepared, **arguments)


PREPARED = {
    "intervals": masks.PreparedMask.from_topk(SCORES, 5, is_causal=True, reorder=True),
    "tiles": masks.PreparedMask.from_mask(masks.topk_mask(SCORES, 5, is_causal=True)),
    "lengths": masks.PreparedMask.from_mask(masks.padding_mask([20, 50], 50), seqlen_q=50, is_causal=True),
}


@pytest.mark.parametrize("kind", PREPARED)
def test_a_prepared_mask_is_drawn_as_its_dense_mask(kind):
    prepared = PREPARED[kind]
    head = min(1, prepared.shape[1] - 1)
    actual, expected = (draw_mask.show(x, block_size=16, batch=1, head=head) for x in (prepared, prepared.dense()))
    assert actual.axes[0].get_title() == expected.axes[0].get_title()
    assert torch.equal(pixels(actual), pixels(expected))
    with pytest.raises(ValueError, match="batch is 2 and mask has 2"):
        draw_mask.show(prepared, batch=2)
    with pytest.raises(ValueError, match=r"mask has seqlen_q = 50 .* needs 49 or 1"):
        draw_mask.show(prepared, seqlen_q=49)


def test_nothing_to_draw():
    no_queries = masks.PreparedMask.from_mask(masks.padding_mask([3], 5), seqlen_q=0)
    for nothing in (masks.PreparedMask.from_intervals([0], [1], 0), no_queries):
        with pytest.raises(ValueError, match="there is nothing to draw"):
            draw_mask.show(nothing)


def test_saves_a_png_and_draws_in_given_axes(tmp_path):
    from matplotlib.figure import Figure

    figure = Figure()
    left, right = figure.subplots(1, 2)
    assert draw_mask.show(masks.causal_mask(8, 8), ax=right, path=tmp_path / "mask.png") is figure
    assert not left.images and len(right.images) == 1 and right.get_legend() is not None
    assert (tmp_path / "mask.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"draw_mask needs matplotlib, .* pip install matplotlib") as caught:
        draw_mask.show(masks.causal_mask(2, 2))
    assert caught.value.__cause__ is not None


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"mask": torch.ones(2, 2)}, TypeError, r"mask has dtype torch\.float32; it needs to be torch\.bool"),
        ({"batch": 2}, ValueError, r"batch is 2 and mask has 2 \(shape \(2, 3, 4, 4\)\); it needs to be < 2"),
        ({"head": 3}, ValueError, r"head is 3 and mask has 3"),
        ({"head": -1}, ValueError, r"head is -1; it needs to be >= 0"),
        ({"block_size": 0}, ValueError, r"block_size\[0\] is 0; it needs to be >= 1"),
        ({"seqlen_k": 9}, ValueError, r"mask has seqlen_k = 4 .* needs 9 or 1"),
        ({"mask": torch.ones(3, 0, dtype=torch.bool)}, ValueError, r"nothing to draw; every dim needs to be >= 1"),
    ],
)
def test_errors(arguments, error, message):
    with pytest.raises(error, match=message):
        draw_mask.show(**{"mask": torch.ones(2, 3, 4, 4, dtype=torch.bool), **arguments})
