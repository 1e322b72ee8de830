"""Small calls of eager on a CPU take all scores at once, with the oracle's results; other calls take the chunks."""

from __future__ import annotations

import pytest
import torch

from flash_dmattn.reference import formula
from flash_dmattn.reference.at_once import attend_at_once, fits_at_once
from flash_dmattn.reference.eager import forward

B, HQ, HK = 2, 4, 2


def draw(seqlen_q: int, seqlen_k: int, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    sizes = ((seqlen_q, HQ, 8), (seqlen_k, HK, 8), (seqlen_k, HK, 5))
    return tuple(torch.randn(B, *size, dtype=dtype) for size in sizes)


@pytest.mark.parametrize("seqlen_q", [1, 5, 9])
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (3, -1), (2, 1)])
@pytest.mark.parametrize("added", [(), ("mask",), ("bias",), ("mask", "bias")])
def test_results_are_those_of_the_formula(seqlen_q: int, window: tuple[int, int], added: tuple[str, ...]) -> None:
    q, k, v = draw(seqlen_q, 9)
    mask = bias = None
    if "mask" in added:
        mask = torch.rand(B, HK, seqlen_q, 9) > 0.3
        mask |= torch.eye(9, dtype=torch.bool)[-seqlen_q:]
    if "bias" in added:
        bias = torch.randn(1, HQ, 1, 9, dtype=torch.float64)
    results = attend_at_once(q, k, v, mask, bias, window, 0.3)
    assert results is not None
    wanted = formula.attention(q, k, v, mask, bias, softmax_scale=0.3, window_size=window)
    for result, want in zip(results, wanted[:2], strict=True):
        torch.testing.assert_close(result, want)


def test_a_row_without_keys_is_empty_and_a_hidden_nan_is_left_to_the_chunks() -> None:
    q, k, v = draw(3, 9)
    mask = torch.ones(B, 1, 1, 9, dtype=torch.bool)
    mask[0, ..., 4] = False
    with_nan = k.clone()
    with_nan[0, 4] = torch.nan
    assert attend_at_once(q, with_nan, v, mask, None, (-1, -1), 0.3) is None
    out, _ = forward(q, with_nan, v, mask, softmax_scale=0.3)
    assert torch.allclose(out, formula.attention(q, k, v, mask, softmax_scale=0.3)[0])
    mask[1] = False
    results = attend_at_once(q, k, v, mask, None, (-1, -1), 0.3)
    assert results is not None
    for result, want in zip(results, formula.attention(q, k, v, mask, softmax_scale=0.3)[:2], strict=True):
        torch.testing.assert_close(result, want)
    assert not results[0][1].any() and results[1][1].isneginf().all()


@pytest.mark.parametrize(("kept", "fits"), [(900, True), (100, False)])
def test_a_long_mask_that_keeps_few_keys_leaves_the_others_out(kept: int, fits: bool) -> None:
    q, k, _ = draw(10, 1000, torch.float32)
    mask = (torch.arange(1000) < kept)[None, None, None]
    assert fits_at_once(mask, None, q, k, 2**28) is fits
    assert not fits_at_once(mask, None, q, k, 2**18)


def test_entries_that_share_a_mask_or_a_bias_take_the_chunks() -> None:
    """Entry b of the batch reads entry b % 2 of them."""
    q, k, v = (x.repeat(2, 1, 1, 1) for x in draw(5, 9))
    bias = torch.randn(2, 1, 5, 9, dtype=torch.float64)
    mask = torch.rand(2, 1, 5, 9) > 0.3
    assert not fits_at_once(mask, None, q, k, 2**28) and not fits_at_once(None, bias, q, k, 2**28)
    out, _ = forward(q, k, v, mask, bias, softmax_scale=0.3)
    wanted, _ = formula.attention(q, k, v, mask.repeat(2, 1, 1, 1), bias.repeat(2, 1, 1, 1), softmax_scale=0.3)
    torch.testing.assert_close(out, wanted)
