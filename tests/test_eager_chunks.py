"""The chunked pair of the eager backend against the formula, with chunks so small that a call takes many."""

from __future__ import annotations

import math
import weakref
from itertools import product

import pytest
import torch
from accuracy import error
from dispatched import Products
from torch import Tensor

from flash_dmattn.reference import chunks, eager, formula, tiles
from flash_dmattn.reference.dropout import Dropout
from flash_dmattn.reference.yardstick import FLOOR, RATIO

INF = math.inf
B, HK, HQ, LQ, LK, D, DV = 2, 2, 4, 11, 13, 4, 3
SCALE = {"softmax_scale": 0.6}
SMALL = 6000  # bytes: a few rows and keys of one head


def tensors(dtype=torch.float64, seqlen_q=LQ, seqlen_k=LK, batch=B, heads_k=HK, heads=HQ, dim=D, dim_v=DV):
    q, dout = torch.randn(batch, seqlen_q, heads, dim), torch.randn(batch, seqlen_q, heads, dim_v)
    k, v = torch.randn(batch, seqlen_k, heads_k, dim), torch.randn(batch, seqlen_k, heads_k, dim_v)
    return [x.to(dtype) for x in (q, k, v, dout)] + [torch.randn(batch, heads, seqlen_q)]


def pair(q, k, v, dout, dlse, mask, bias, needs_grad=(True,) * 4, chunk_bytes=SMALL, **flags):
    out, lse = eager.forward(q, k, v, mask, bias, chunk_bytes=chunk_bytes, **flags)
    inputs = (dout, dlse, q, k, v, mask, bias, out, lse)
    return out, lse, *eager.backward(*inputs, chunk_bytes=chunk_bytes, needs_grad=needs_grad, **flags)


def exact(q, k, v, dout, dlse, mask, bias, dtype=torch.float64, **flags):
    q, k, v, dout = (x.to(dtype) for x in (q, k, v, dout))
    bias = None if bias is None else bias.double() if dtype == torch.float64 else bias
    leaves = [x.detach().requires_grad_() for x in (q, k, v, bias) if x is not None]
    out, lse = formula.attention(*leaves[:3], mask, *leaves[3:], **flags)
    outputs, cotangents = [out], [dout]
    if dlse is not None:
        outputs, cotangents = [out, lse], [dout, dlse.to(lse.dtype)]
    gradients = torch.autograd.grad(outputs, leaves, cotangents)
    return out, lse, *gradients, *([] if bias is not None else [None])


def assert_same(got, expected, rtol=1e-11, atol=1e-12):
    for x, y in zip(got, expected, strict=True):
        if y is None:
            assert x is None
        else:
            assert x.shape == y.shape
            torch.testing.assert_close(x, y, rtol=rtol, atol=atol)


class Watch(Products):
    """Count also the bytes alive at the worst moment among tensors made inside."""

    def __init__(self) -> None:
        super().__init__()
        self.alive = self.peak = 0
        self._references: dict[int, int] = {}
        self._outside: set[int] = set()

    def show(self, operator, args, result):
        super().show(operator, args, result)
        inputs = [x.untyped_storage()._cdata for x in args if isinstance(x, Tensor)]
        self._outside.update(storage for storage in inputs if storage not in self._references)
        for x in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(x, Tensor) and not any(x is a for a in args):
                self._hold(x)

    def _hold(self, x: Tensor) -> None:
        storage, size = x.untyped_storage()._cdata, x.untyped_storage().nbytes()
        if storage in self._outside:
            return
        self._references[storage] = self._references.get(storage, 0) + 1
        if self._references[storage] == 1:
            self.alive += size
            self.peak = max(self.peak, self.alive)
        weakref.finalize(x, self._release, storage, size)

    def _release(self, storage: int, size: int) -> None:
        self._references[storage] -= 1
        if self._references[storage] == 0:
            del self._references[storage]
            self.alive -= size


@pytest.mark.parametrize("chunk_bytes", [1, 3000, 40_000, 10**8])
@pytest.mark.parametrize("with_lse", [True, False])
def test_any_chunk_size(chunk_bytes, with_lse):
    torch.manual_seed(1)
    *inputs, dlse = tensors()
    inputs.append(dlse if with_lse else None)
    mask, bias = torch.rand(B, 1, LQ, LK) < 0.5, torch.randn(1, HQ, LQ, LK, dtype=torch.float64)
    for flags in ({**SCALE}, {**SCALE, "is_causal": True, "softcap": 1.1}, {"softmax_scale": 0.0}):
        got = pair(*inputs, mask, bias, chunk_bytes=chunk_bytes, **flags)
        assert_same(got, exact(*inputs, mask, bias, **flags))


@pytest.mark.parametrize("needs_grad", list(product((False, True), repeat=4)), ids=str)
@pytest.mark.parametrize("flags", [SCALE, {**SCALE, "softcap": 0.8}], ids=str)
@pytest.mark.parametrize("shape", [(1, HQ, LQ, LK), (1, 1, LQ, 1)], ids=str)
def test_only_what_is_needed_is_computed(needs_grad, shape, flags):
    torch.manual_seed(3)
    inputs = tensors()
    bias = torch.randn(shape, dtype=torch.float64)
    expected = exact(*inputs, None, bias, **flags)
    out, lse = eager.forward(*inputs[:3], None, bias, **flags)
    with Watch() as watch:
        got = eager.backward(inputs[3], inputs[4], *inputs[:3], None, bias, out, lse, needs_grad=needs_grad, **flags)
    assert_same(got, [x if needed else None for x, needed in zip(expected[2:], needs_grad)])
    need_q, need_k, need_v, need_bias = needs_grad
    need_ds = need_q or need_k or (need_bias and shape[3] > 1)
    # One chunk: the scores, dout @ v^T, and one product for each of dq, dk, dv.
    assert watch.products == (need_ds or need_v) + need_ds + need_q + need_k + need_v


@pytest.mark.parametrize("flags", [{}, {"is_causal": True}, {"window_size": (30, 0)}, {"softcap": 1.0}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_temporaries_stay_within_the_budget(flags, dtype):
    torch.manual_seed(6)
    length, budget = 300, 200_000
    inputs = tensors(dtype, length, length, dim=16, dim_v=8)
    full = B * HQ * length * length * 4
    for mask_shape, bias_shape in (((B, 1, length, length), (1, HQ, 1, length)), ((1, 1, length, length),) * 2):
        mask, bias = torch.rand(mask_shape) < 0.7, torch.randn(bias_shape, dtype=dtype)
        with Watch() as watch:
            out, lse = eager.forward(*inputs[:3], mask, bias, chunk_bytes=budget, **SCALE, **flags)
        kept = sum(x.nbytes for x in (out, lse))
        assert kept < watch.peak <= kept + budget, (watch.peak - kept, budget)
        arguments = (*inputs[3:], *inputs[:3], mask, bias, out, lse)
        with Watch() as watch:
            gradients = eager.backward(*arguments, chunk_bytes=budget, **SCALE, **flags)
        # lse and dlse without infinities; dk and dv of one head, and dbias, in fp32.
        kept = sum(x.nbytes for x in gradients) + 3 * lse.nbytes + length * (16 + 8) * 4 + 4 * bias.numel()
        assert watch.peak <= kept + budget, (watch.peak - kept, budget)
        assert kept + budget < full


def test_empty_chunks_are_skipped():
    torch.manual_seed(7)
    length = 1024
    inputs = tensors(torch.float32, length, length, batch=1, heads_k=1, heads=2)
    mask = torch.zeros(1, 2, length, length, dtype=torch.bool)
    mask[:, 0, :256, 256:512] = mask[:, 0, 768:, 512:] = mask[:, 0, 900:, :10] = True
    mask[:, 1, :256, :256] = True
    work = {}
    for name, (m, flags) in {
        "all": (None, {}),
        "causal": (None, {"is_causal": True}),
        "window": (None, {"window_size": (64, 64)}),
        "mask": (mask, {}),
        "none": (torch.zeros(1, 1, 1, 1, dtype=torch.bool), {}),
    }.items():
        with Watch() as watch:
            got = pair(*inputs, m, None, chunk_bytes=2**19, **SCALE, **flags)
        work[name] = watch.work
        if m is not None:
            expected = exact(*inputs, m, None, **SCALE, **flags)
            for x, y in zip(got[:5], expected):
                assert error(x, y) < 1e-5
    assert work["none"] == 0
    assert 0.5 * work["all"] < work["causal"] < 0.6 * work["all"]
    assert work["window"] < 0.25 * work["all"]
    # 256 x 512 twice of 1024 x 1024, and a few columns by one grain of 256 keys by 124 rows.
    assert 0.25 * work["all"] < work["mask"] < 0.33 * work["all"]


@pytest.mark.parametrize("of", ["dropout", "sink", "dropout and sink", "dropout, sink and softcap"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_split_rows_beside_dropout_and_a_sink(dtype, of):
    """In 16 bits delta of a split row is summed anew: of what is kept, with the share of the sink."""
    torch.manual_seed(16)
    *inputs, dlse = tensors(dtype)
    mask, bias = torch.rand(B, 1, LQ, LK) < 0.8, torch.randn(1, HQ, LQ, LK).to(dtype)
    flags = {**SCALE, "softcap": 1.5 if "softcap" in of else 0.0}
    if "dropout" in of:
        flags["dropout"] = Dropout(0.4, torch.tensor([1, 2]))
    if "sink" in of:
        flags["sink"] = torch.randn(HQ) + 1
    q, k, v, dout = (x.double() for x in inputs)
    exact_flags = {**flags, "sink": flags["sink"].double()} if "sink" in of else flags
    oracle = (
        *formula.attention(q, k, v, mask, bias.double(), **exact_flags),
        *formula.gradients(dout, dlse.double(), q, k, v, mask, bias.double(), **exact_flags),
    )
    # Each result is rounded once, from sums in fp32.
    limit = 1e-3 if dtype == torch.float16 else 2e-6
    for chunk_bytes in (1, SMALL, 10**8):
        results = pair(*inputs, dlse, mask, bias, needs_grad=(True,) * 5, chunk_bytes=chunk_bytes, **flags)
        for x, y in zip(results, oracle, strict=True):
            assert (x.double() - y).abs().max() <= limit * y.abs().max(), (chunk_bytes, x.shape)


# A batch of 5, 3 heads of k, 11 queries and 700 keys, in chunks that leave a smaller one at the end of each.
LAST = {"batch": 5, "heads_k": 3, "heads": 6, "seqlen_k": 700}
EXTENT = chunks.Extent(2, 2, 4, 300)
ONLY = {
    "entry": ((5, 1, 1, 1), 0, ([0], [3], [4], [3, 4])),
    "head of k": ((1, 3, 1, 1), 1, ([0], [1], [2])),
    "head": ((1, 6, 1, 1), 1, ([0], [3], [4], [5])),
    "row": ((1, 1, LQ, 1), 2, ([0], [7], [8], [10])),
    "key": ((1, 1, 1, 700), 3, ([0], [255], [256], [299], [300], [599], [600], [699])),
}


@pytest.mark.parametrize("dim", ONLY)
def test_the_last_smaller_chunk_of_each_dim(dim, monkeypatch):
    """A mask that allows only one entry, head, row or key, and one that leaves entries of a head and rows empty."""
    monkeypatch.setattr(chunks.Chunks, "_extent", lambda self, budget: EXTENT)
    torch.manual_seed(17)
    inputs = tensors(**LAST)
    bias = torch.randn(5, 6, 1, 700, dtype=torch.float64)
    shape, axis, places = ONLY[dim]
    other = torch.ones(5, 3, LQ, 1, dtype=torch.bool)
    other[1, 2] = other[4, :2] = other[:, :, 9] = False
    for place in places:
        mask = torch.zeros(shape, dtype=torch.bool)
        mask.index_fill_(axis, torch.tensor(place), True)
        for both in (mask, mask & (other.repeat_interleave(2, 1) if shape[1] == 6 else other)):
            assert_same(pair(*inputs, both, bias, **SCALE), exact(*inputs, both, bias, **SCALE))
    assert_same(pair(*inputs, other, bias, **SCALE), exact(*inputs, other, bias, **SCALE))


@pytest.mark.parametrize("value", [-1e4, 1e4, 3e6, torch.finfo(torch.float32).min])
@pytest.mark.parametrize("chunk_bytes", [1, 10**8])
def test_large_biases_do_not_lose_the_sum_in_lse(value, chunk_bytes):
    torch.manual_seed(9)
    inputs = tensors(torch.float32)
    bias = torch.full((B, HQ, LQ, LK), value)
    bias[:, 0] = torch.randn(LQ, LK)
    got = pair(*inputs, None, bias, chunk_bytes=chunk_bytes, **SCALE)
    oracle, plain = exact(*inputs, None, bias, **SCALE), exact(*inputs, None, bias, dtype=torch.float32, **SCALE)
    for x, y, z in zip(got, oracle, plain):
        assert error(x, y) <= RATIO * error(z, y) + FLOOR


def test_split_rows_are_normalised_again_where_lse_is_large():
    """The lse of 1e4 is rounded to 5e-4 in fp32; the probabilities of a row must sum to one all the same."""
    torch.manual_seed(12)
    q, k, v, _, _ = tensors(torch.float32, seqlen_q=3, batch=1, heads_k=1, heads=2)
    dout = torch.ones(1, 3, 2, DV)
    products = {}
    for value, chunk_bytes in product((100.0, 140.0, 1e4, -1e4), (1, 10**8)):
        bias = torch.full((1, 1, 1, LK), value)
        out, lse = eager.forward(q, k, v, None, bias, chunk_bytes=chunk_bytes, **SCALE)
        inputs = (dout, None, q, k, v, None, bias, out, lse)
        with Watch() as watch:
            _, _, dv, _ = eager.backward(
                *inputs, chunk_bytes=chunk_bytes, needs_grad=(False, False, True, False), **SCALE
            )
        products[value, chunk_bytes] = watch.products
        # dv = p^T @ 1: over the keys it sums to the number of rows of all query heads of the group.
        tolerance = 2e-6 if chunk_bytes > 1 or abs(value) > 128 else 1e-4
        torch.testing.assert_close(dv.sum(1), torch.full_like(dv[:, 0], 3 * 2), rtol=tolerance, atol=0)
    # Each chunk computes the scores and dv, and if rows are split and lse is large the scores once more.
    assert [products[value, 1] for value in (100.0, 140.0, 1e4, -1e4)] == [2 * 3 * LK, *[3 * 3 * LK] * 3]
    assert {products[value, 10**8] for value in (100.0, 140.0, 1e4, -1e4)} == {2}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_an_empty_row_among_split_rows(dtype):
    torch.manual_seed(13)
    length = 512
    inputs = tensors(dtype, length, length, batch=1, heads_k=1, heads=2)
    mask = torch.rand(1, 1, length, length) < 0.7
    mask[:, :, 100] = False
    bias = torch.randn(1, 2, 1, length).to(dtype)
    inputs[4][:, :, 100] = 0.0  # nothing comes back through the lse of an empty row
    got = pair(*inputs, mask, bias, chunk_bytes=60_000, **SCALE)
    oracle = exact(*inputs, mask, bias, **SCALE)
    plain = exact(*inputs, mask, bias, dtype=dtype, **SCALE)
    assert (got[1][:, :, 100] == -INF).all()
    for x, y, z in zip(got, oracle, plain, strict=True):
        assert error(x, y) <= RATIO * error(z, y) + FLOOR


@pytest.mark.parametrize("softcap", [0.0, 1.0])
@pytest.mark.parametrize("bias", [None, torch.randn(1, 2, 1, LK)], ids=["mask", "mask and bias"])
def test_both_ways_of_hiding_scores_agree(bias, softcap, monkeypatch):
    torch.manual_seed(10)
    inputs, mask = tensors(torch.float32), torch.rand(1, 1, LQ, LK) < 0.5
    results = []
    for adds_mask in (True, False):
        monkeypatch.setattr(tiles, "_adds_mask", lambda device, adds_mask=adds_mask: adds_mask)
        results.append(pair(*inputs, mask, bias, softcap=softcap, **SCALE))
    assert all(torch.equal(x, y) for x, y in zip(*results) if x is not None)
    expected = exact(*inputs, mask, bias, softcap=softcap, **SCALE)
    assert all(error(x, y) <= FLOOR for x, y in zip(results[0], expected) if x is not None)


def test_nothing_is_read_before_it_is_written():
    """Places of a bias that no chunk reaches have a gradient of zero."""
    torch.manual_seed(14)
    inputs = tensors(torch.float32)
    bias, mask = torch.randn(B, HQ, LQ, LK), torch.ones(B, 1, LQ, LK, dtype=torch.bool)
    mask[:, :, 4:8] = False
    torch.use_deterministic_algorithms(True)  # fills new memory with NaN
    try:
        for m, flags in (
            (None, {"is_causal": True}),
            (None, {"window_size": (1, 1)}),
            (None, {"window_size": (0, -1)}),
            (mask, {}),
        ):
            got = [x.double() for x in pair(*inputs, m, bias, chunk_bytes=1, **SCALE, **flags)]
            expected = exact(*inputs, m, bias, **SCALE, **flags)
            assert (expected[-1] == 0).any()
            assert_same(got, expected, rtol=1e-4, atol=1e-5)
    finally:
        torch.use_deterministic_algorithms(False)


def test_chunks_of_long_calls_keep_good_shapes():
    # The sums of dk and dv of one head outgrow the cache here; they must not shrink the chunk to single rows.
    for length in (16384, 131072):
        x = torch.empty(1, length, 8, 64, device="meta")
        actual = chunks.Chunks(x, x, x, None, False, None, chunks.DEFAULT_CHUNK_BYTES, 2, 128)
        actual.device = torch.device("cpu")
        extent = actual._extent(chunks.DEFAULT_CHUNK_BYTES)
        assert extent.rows == chunks.GOOD_ROWS and extent.keys >= chunks.GOOD_KEYS
        assert actual.chunk_bytes(extent) <= chunks.CPU_CHUNK_BYTES
