"""topk_mask against a stable sort in plain Python, row by row: ties, -inf, NaN, short rows, every dtype and shape."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flash_dmattn.masks import PreparedMask, topk_mask
from flash_dmattn.masks import topk as topk_module

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
INF, NAN = math.inf, math.nan


def one_row(scores, allowed, k):
    """The k first of the allowed positions by (score descending, position ascending), NaN after every number."""
    order = [j for j in range(len(scores)) if allowed[j] and scores[j] != -INF]
    order.sort(key=lambda j: (1, 0.0, j) if math.isnan(scores[j]) else (0, -scores[j], j))
    return [j in order[:k] for j in range(len(scores))]


def brute_force(scores, k, is_causal=False, mask=None, seqlen_q=1):
    """topk_mask over full (B, H, Lq, Lk) shapes, one row at a time."""
    mask = torch.tensor(True) if mask is None else mask
    batch, heads, rows, seqlen_k = torch.broadcast_shapes(scores.shape, mask.shape, (1, 1, seqlen_q, 1))
    scores, mask = scores.expand(batch, heads, rows, seqlen_k), mask.expand(batch, heads, rows, seqlen_k)
    out = torch.zeros(batch, heads, rows, seqlen_k, dtype=torch.bool)
    for b in range(batch):
        for h in range(heads):
            for i in range(rows):
                allowed = mask[b, h, i].tolist()
                if is_causal:
                    allowed = [a and j <= i + seqlen_k - rows for j, a in enumerate(allowed)]
                out[b, h, i] = torch.tensor(one_row(scores[b, h, i].double().tolist(), allowed, k), dtype=torch.bool)
    return out


def tied_scores(*shape, seed=0, dtype=torch.float32):
    """Few distinct values, so that most rows have ties, with both zeros, NaN and both infinities."""
    values = torch.tensor([-INF, -2.5, -1.0, -0.0, 0.0, 0.0, 1.0, 1.0, 2.5, INF, NAN])
    index = torch.randint(len(values), shape, generator=torch.Generator().manual_seed(seed))
    return values[index].to(dtype)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("lengths", [(1, 6), (6, 6), (3, 11), (11, 3), (17, 17)])
@pytest.mark.parametrize("k", [1, 3, 40])
@pytest.mark.parametrize("chunk", [1, 50])
def test_chunks_of_scores_per_query(lengths, k, is_causal, chunk, monkeypatch):
    monkeypatch.setattr(topk_module, "CHUNK_ELEMENTS", chunk)
    scores = tied_scores(2, 2, *lengths)
    got = topk_mask(scores, k, is_causal=is_causal, seqlen_q=lengths[0])
    assert got.shape == scores.shape
    assert torch.equal(got, brute_force(scores, k, is_causal))


@settings(max_examples=400, deadline=None, derandomize=True)
@given(st.data())
def test_any_call_equals_brute_force(data):
    seqlen_q, seqlen_k = data.draw(st.integers(0, 8), "seqlen_q"), data.draw(st.integers(0, 12), "seqlen_k")
    batch, heads = data.draw(st.integers(0, 2), "batch"), data.draw(st.integers(1, 2), "heads")
    rows = data.draw(st.sampled_from([1, seqlen_q]), "rows of scores")
    value = st.one_of(st.sampled_from([0.0, -0.0, 1.0, -1.0, INF, -INF, NAN]), st.floats(width=16))
    count = batch * heads * rows * seqlen_k
    values = data.draw(st.lists(value, min_size=count, max_size=count), "scores")
    dtype = data.draw(st.sampled_from(DTYPES), "dtype")
    scores = torch.tensor(values, dtype=dtype).view(batch, heads, rows, seqlen_k)
    k, is_causal = data.draw(st.integers(1, 14), "k"), data.draw(st.booleans(), "is_causal")
    mask = None
    if data.draw(st.booleans(), "with mask"):
        shape = (1, 1, data.draw(st.sampled_from([1, seqlen_q]), "rows of mask"), seqlen_k)
        count = shape[2] * seqlen_k
        mask = torch.tensor(data.draw(st.lists(st.booleans(), min_size=count, max_size=count)), dtype=torch.bool)
        mask = mask.view(shape)
    got = topk_mask(scores, k, is_causal=is_causal, mask=mask, seqlen_q=seqlen_q)
    expected = brute_force(scores, k, is_causal, mask, seqlen_q if is_causal else 1)
    assert torch.equal(got, expected)


def test_result_is_no_larger_than_it_must_be():
    scores = torch.randn(2, 3, 1, 8)
    assert topk_mask(scores, 2).shape == (2, 3, 1, 8)
    assert topk_mask(scores, 2, seqlen_q=8).shape == (2, 3, 1, 8)
    assert topk_mask(scores, 2, mask=torch.ones(8, 8, dtype=torch.bool)).shape == (2, 3, 8, 8)
    # Expanded dims are broadcast dims: one row, one head and one batch element are computed.
    assert topk_mask(scores[:1, :1].expand(2, 3, 8, 8), 2).shape == (1, 1, 1, 8)
    assert topk_mask(scores[:, :1].expand(2, 3, 5, 8), 2, is_causal=True).shape == (2, 1, 5, 8)


@pytest.mark.parametrize("shape", [(4,), (1, 4), (2, 1, 4), (4, 4), (2, 4, 4), (3, 4), (2, 3, 4)])
def test_fewer_than_four_dims_are_read_from_the_right(shape):
    scores = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    four_dims = scores[(None,) * (4 - scores.dim())]
    says = {"seqlen_q": 3} if 3 in shape else {}
    assert torch.equal(topk_mask(scores, 2, **says), topk_mask(four_dims, 2))
    if says:
        mask = torch.ones(1, 1, 3, 4, dtype=torch.bool)
        assert torch.equal(topk_mask(scores, 2, mask=mask), topk_mask(four_dims, 2))


def test_heads_of_scores_and_mask_are_grouped():
    scores = torch.randn(1, 2, 1, 7, generator=torch.Generator().manual_seed(0))
    mask = torch.rand(1, 6, 7, 7, generator=torch.Generator().manual_seed(1)) < 0.7
    got = topk_mask(scores, 2, mask=mask)
    assert torch.equal(got, brute_force(scores.repeat_interleave(3, 1), 2, mask=mask))


def test_larger_prefixes_agree_with_the_chunked_selection():
    scores = torch.randn(1, 2, 1, 700, generator=torch.Generator().manual_seed(0)).round(decimals=1)
    every_row = scores.expand(1, 2, 700, 700).contiguous()
    assert torch.equal(topk_mask(scores, 64, is_causal=True), topk_mask(every_row, 64, is_causal=True))


def test_scores_that_require_grad_and_transposed_scores():
    scores = tied_scores(2, 6, 3).permute(0, 2, 1)[:, :, None].requires_grad_()
    got = topk_mask(scores, 2, is_causal=True)
    assert not got.requires_grad
    assert torch.equal(got, brute_force(scores.detach(), 2, True, seqlen_q=6))


@pytest.mark.parametrize("is_causal", [False, True])
def test_k_may_be_any_number_above_the_keys(is_causal):
    scores = torch.randn(1, 2, 1, 7)
    for k in (8, 2**63 - 1, 10**30):
        assert torch.equal(topk_mask(scores, k, is_causal=is_causal), topk_mask(scores, 7, is_causal=is_causal))
        prepared = PreparedMask.from_topk(scores, k, is_causal=is_causal, local=k if is_causal else 0)
        assert torch.equal(prepared.dense(), topk_mask(scores, 7, is_causal=is_causal).expand(1, 2, 7, 7))


ROW = torch.zeros(1, 2, 1, 4)
BAD_CALLS = [
    (lambda: topk_mask(ROW, 0), ValueError, r"^k is 0; it needs to be >= 1$"),
    (lambda: topk_mask(ROW, -3), ValueError, r"^k is -3; it needs to be >= 1$"),
    (lambda: topk_mask(ROW, 1.5), TypeError, r"k is 1\.5 \(float\); it needs to be an int >= 1"),
    (lambda: topk_mask(ROW, 1, is_causal=1), TypeError, r"is_causal is 1; it needs to be True or False"),
    (lambda: topk_mask(ROW.int(), 1), TypeError, r"scores has dtype int32; it needs a floating-point dtype"),
    (lambda: topk_mask([1.0], 1), TypeError, r"scores is a list; it needs to be a floating-point torch.Tensor"),
    (lambda: topk_mask(torch.tensor(1.0), 1), ValueError, r"scores is 0-D; it needs a dim of keys"),
    (lambda: topk_mask(ROW[None], 1), ValueError, r"scores has shape \(1, 1, 2, 1, 4\) \(5-D\).* at most 4 dims"),
    (
        lambda: topk_mask(ROW, 1, mask=torch.ones(4)),
        TypeError,
        r"mask has dtype torch\.float32; it needs to be torch\.bool",
    ),
    (lambda: topk_mask(ROW, 1, mask=torch.ones(5) > 0), ValueError, r"mask has 5 keys, scores 4; mask needs 1 or"),
    (lambda: topk_mask(ROW, 1, mask=torch.ones(3, 1, 1) > 0), ValueError, r"scores has 2 heads .* with 3 heads"),
    (
        lambda: topk_mask(ROW, 1, mask=(ROW > 0).to("meta")),
        ValueError,
        r"mask is on meta; it needs to be on the device of scores, cpu",
    ),
    (
        lambda: topk_mask(torch.zeros(3, 4), 1, mask=torch.ones(2, 4) > 0, seqlen_q=5),
        ValueError,
        r"numbers of queries differ: seqlen_q has 5, scores has 3, mask has 2",
    ),
    (
        lambda: topk_mask(torch.zeros(2, 3, 4), 1),
        ValueError,
        r"scores has shape \(2, 3, 4\), read from the right as \(H, Lq, Lk\): 3 queries of 4 keys; it needs seqlen_q=3"
        r", or 4 dims, scores\[:, :, None\], where the first dim is the batch",
    ),
    (
        lambda: topk_mask(torch.zeros(2, 4), 1, is_causal=True),
        ValueError,
        r"scores .* \(Lq, Lk\): 2 queries .* scores\[:, None, None\]",
    ),
    (
        lambda: topk_mask(ROW, 1, mask=torch.ones(2, 4) > 0),
        ValueError,
        r"mask has shape \(2, 4\), .* 4 keys; .* mask\[:, N",
    ),
]


@pytest.mark.parametrize(("call", "error", "message"), BAD_CALLS)
def test_errors(call, error, message):
    with pytest.raises(error, match=message):
        call()
