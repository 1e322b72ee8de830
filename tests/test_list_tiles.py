"""Lists of whole tiles, which backends that walk tiles read as intervals."""

from __future__ import annotations

import emulated_cuda
import pytest
import torch
from cases import DEVICE
from torch import Tensor

import flash_dmattn
from flash_dmattn import attention, explain
from flash_dmattn.biases import ListBias
from flash_dmattn.dispatch.packers import around_extension
from flash_dmattn.dispatch.registry import BACKENDS
from flash_dmattn.masks import PreparedMask
from flash_dmattn.masks.prepared.operators import PYTORCH
from flash_dmattn.problem import make_band

# Lengths, block size, entries, batch entries and heads of the lists, causality, window.
CASES = {
    "causal": ((400, 400), (128, 128), 2, (1, 1), True, None),
    "more keys, no band": ((300, 650), (128, 128), 3, (2, 2), False, None),
    "blocks of several tiles": ((520, 780), (256, 384), 2, (1, 2), True, None),
    "a window": ((512, 640), (128, 128), 4, (1, 1), True, (200, 0)),
    "few queries": ((90, 256), (128, 128), 2, (1, 1), False, None),
}


def lists_of(name: str) -> PreparedMask:
    """Random lists of a case; one list has no entry."""
    (seqlen_q, seqlen_k), (block_q, block_k), entries, heads, is_causal, window = CASES[name]
    generator = torch.Generator().manual_seed(0)
    rows = -(-seqlen_q // block_q)
    index = torch.randint(-1, -(-seqlen_k // block_k), (*heads, rows, entries), generator=generator)
    index[0, 0, rows // 2] = -1
    band = {"is_causal": is_causal, "window_size": window}
    return PreparedMask.from_lists(
        index.to(DEVICE), seqlen_q=seqlen_q, seqlen_k=seqlen_k, block_size=(block_q, block_k), **band
    )


def walked(lists: Tensor, bounds: Tensor, shape: tuple[int, ...], by_rows: bool) -> Tensor:
    """The pairs that a kernel computes which walks lists of tiles, and reads bounds in partial tiles."""
    batch, heads, seqlen_q, seqlen_k = shape
    seen = torch.zeros(shape, dtype=torch.bool)
    rows = torch.arange(seqlen_q)[:, None]
    for b in range(batch):
        for h in range(heads):
            start, stop = bounds[b, h, :seqlen_k].unbind(-1)
            inside = (start <= rows) & (rows < stop)
            for line, (full, partial, *tiles) in enumerate(lists[b, h].tolist()):
                for number, tile in enumerate(tiles[: full + partial]):
                    i, j = (line, tile) if by_rows else (tile, line)
                    at = (b, h, slice(i * 128, i * 128 + 128), slice(j * 128, j * 128 + 128))
                    seen[at] = True if number < full else inside[at[2:]]
    return seen


@pytest.mark.parametrize("name", CASES)
def test_walks_of_the_listed_tiles_see_what_the_lists_say(name: str) -> None:
    mask = lists_of(name)
    lengths = mask.shape[2:]
    band = make_band(*lengths, (mask.window_size[0], 0 if mask.is_causal else mask.window_size[1]))
    tensors, _ = PYTORCH.tiles_of_lists(mask.tensors[0], mask.block_size, lengths, band)
    bounds, row_lists, col_lists = (x.cpu() for x in tensors[3:])
    assert all(x.is_contiguous() and x.dtype == torch.int32 for x in tensors)
    for lists, by_rows in ((row_lists, True), (col_lists, False)):
        assert torch.equal(walked(lists, bounds, mask.shape, by_rows), mask.dense().cpu())


@pytest.mark.parametrize("name", CASES)
def test_the_extension_makes_the_same_in_one_launch(name: str) -> None:
    if not BACKENDS["cuda"].probe().usable:
        pytest.skip("cuda does not work here")
    mask = lists_of(name)
    keys, lengths = mask.tensors[0], mask.shape[2:]
    for window in ((-1, -1), (-1, 0), (200, 0), (0, 0), (3, 130), (10**6, 10**6)):
        band = make_band(*lengths, window)
        wanted, _ = PYTORCH.tiles_of_lists(keys, mask.block_size, lengths, band)
        actual, (counters,) = around_extension(torch.ops.flash_dmattn).tiles_of_lists(
            keys, mask.block_size, lengths, band
        )
        assert not counters.any()
        for x, y in zip(actual, wanted, strict=True):
            assert x.shape == y.shape and x.is_contiguous() and torch.equal(x, y), window
        if DEVICE == "cpu":
            before = emulated_cuda.launches()
            torch.ops.flash_dmattn.cuda_listed_tiles(keys, *mask.block_size, *lengths, -1, 1)
            assert emulated_cuda.launches() == before + 1


@pytest.mark.parametrize("name", CASES)
def test_calls_on_cuda_are_those_of_the_mask(name: str) -> None:
    mask = lists_of(name)
    batch, _, seqlen_q, seqlen_k = mask.shape
    generator = torch.Generator().manual_seed(1)
    shapes = ((batch, seqlen_q, 4, 32), (batch, seqlen_k, 2, 32), (batch, seqlen_k, 2, 32))
    tensors = [torch.randn(x, generator=generator).to(DEVICE, torch.bfloat16).requires_grad_() for x in shapes]
    if not BACKENDS["cuda"].probe().usable:
        pytest.skip("cuda does not work here")
    assert "walks the listed tiles" in str(explain(*tensors, mask, backend="cuda"))
    results = []
    for each in (mask, PreparedMask.from_mask(mask.dense(), as_tiles=True)):
        out, lse = attention(*tensors, each, deterministic=True, return_lse=True, backend="cuda")
        sent = (torch.linspace(-1, 2, out.numel(), device=DEVICE).view(out.shape).bfloat16(), torch.ones_like(lse))
        results.append((out, lse, *torch.autograd.grad((out, lse), tensors, sent)))
    for x, y in zip(*results, strict=True):
        # Blocks may share the keys of a row otherwise, and then sums are in another order.
        torch.testing.assert_close(x, y, rtol=2**-7, atol=2**-9)


def test_cuda_refuses_lists_of_other_blocks_and_values() -> None:
    q, k = torch.randn(1, 256, 4, 32), torch.randn(1, 256, 2, 32)
    index = torch.zeros(1, 1, 2, 1, dtype=torch.long)
    for block in ((128, 128), (128, 64), (256, 128)):
        rows = 256 // block[0]
        lists = PreparedMask.from_lists(index[:, :, :rows], seqlen_q=256, seqlen_k=256, block_size=block)
        with pytest.raises(flash_dmattn.BackendError) as caught:
            attention(q, k, k, lists, ListBias(torch.zeros(1, 1, rows, 1)), backend="cuda")
        codes = {reason.code for reason in caught.value.reasons}
        assert "list_bias" in codes and ("list_tiles" in codes) == (block[1] == 64)
