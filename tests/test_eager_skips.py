"""Eager computes no score of keys that no query of a block sees: the work of both passes, and their results."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from dispatched import Products
from torch import Tensor

import flash_dmattn
from flash_dmattn.masks import PreparedMask
from flash_dmattn.reference import eager, formula
from flash_dmattn.sequences import Sequences

HK, HQ, D, LENGTH = 2, 4, 16, 1024


@contextmanager
def counting() -> Iterator[Products]:
    """Count what the chunked passes do; around a call a dispatch mode would see no more than the operator."""
    counted = Products()

    def watched(run: Any) -> Any:
        def inside(*args: Any, **kwargs: Any) -> Any:
            with counted:
                return run(*args, **kwargs)

        return inside

    with (
        mock.patch.object(eager, "forward", watched(eager.forward)),
        mock.patch.object(eager, "backward", watched(eager.backward)),
    ):
        yield counted


def leaves(length: int = LENGTH, batch: int = 1, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    shapes = [(batch, length, heads, D) for heads in (HQ, HK, HK)]
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


def count(inputs: list[Tensor], mask: Any, bias: Tensor | None = None, **more: Any) -> tuple[list[Tensor], Products]:
    """Return out and the gradients of a call of eager, and what both passes did."""
    with counting() as counted:
        out = flash_dmattn.attention(*inputs, mask, bias, backend="eager", **more)
        wanted = [*inputs, *([] if bias is None else [bias])]
        gradients = torch.autograd.grad(out, wanted, torch.ones_like(out))
    return [out, *gradients], counted


def expected(inputs: list[Tensor], mask: Tensor, bias: Tensor | None = None) -> list[Tensor]:
    out, _ = formula.attention(*inputs, mask, bias, softmax_scale=D**-0.5)
    wanted = [*inputs, *([] if bias is None else [bias])]
    return [out, *torch.autograd.grad(out, wanted, torch.ones_like(out))]


def block_diagonal(size: int) -> Tensor:
    documents = torch.arange(LENGTH) // size
    return (documents[:, None] == documents)[None, None]


def prepared(name: str) -> PreparedMask:
    if name == "top-k":
        return PreparedMask.from_topk(torch.randn(1, HK, 1, LENGTH), 32, is_causal=True, seqlen_q=LENGTH)
    if name == "window":
        return PreparedMask.from_mask(torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool), window_size=(40, 0))
    if name == "documents":
        return PreparedMask.from_mask(block_diagonal(100), is_causal=True)
    scattered = torch.zeros(1, HK, LENGTH, LENGTH, dtype=torch.bool)
    scattered[:, 0, :, 3::50] = scattered[:, 1, :, 7::50] = True
    scattered[:, :, 200:260] = False
    return PreparedMask.from_mask(scattered)


@pytest.mark.parametrize(
    ("name", "bias_shape"),
    [
        *((name, shape) for name in ("top-k", "window", "documents") for shape in (None, (1, HK, 1, LENGTH))),
        *(("scattered", shape) for shape in (None, (1, HQ, LENGTH, LENGTH))),
    ],
    ids=str,
)
def test_prepared_masks_cost_what_is_seen(name: str, bias_shape: tuple[int, ...] | None) -> None:
    torch.manual_seed(0)
    inputs, mask = leaves(), prepared(name)
    bias = None if bias_shape is None else torch.randn(bias_shape, dtype=torch.float64, requires_grad=True)
    _, every = count(inputs, None, bias)
    results, counted = count(inputs, mask, bias)
    assert counted.work < {"window": 0.2, "documents": 0.25, "top-k": 0.25, "scattered": 0.03}[name] * every.work
    if bias_shape is None:
        assert counted.largest < LENGTH * LENGTH / 2, "no tensor of one element for each pair"
    for x, y in zip(results, expected(inputs, mask.dense(), bias), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("bias_shape", [(1, HK, 1, 256), (1, HQ, 256, 256), (1, 1, 256, 1)], ids=str)
def test_a_call_of_one_chunk_sums_dbias_of_gathered_keys(bias_shape: tuple[int, ...]) -> None:
    torch.manual_seed(7)
    inputs, bias = leaves(256), torch.randn(bias_shape, dtype=torch.float64, requires_grad=True)
    mask = torch.rand(1, 1, 256, 256) < 0.5
    mask[..., torch.rand(256) < 0.6] = False
    results, counted = count(inputs, mask, bias)
    assert counted.products == 7, "two of the forward pass, five of the backward pass"
    for x, y in zip(results, expected(inputs, mask, bias), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("kept", [1, 64, 700])
def test_one_row_for_all_queries_gathers_its_kept_keys(kept: int) -> None:
    torch.manual_seed(1)
    inputs = leaves()
    mask = torch.zeros(1, 1, 1, LENGTH, dtype=torch.bool)
    mask[..., torch.randperm(LENGTH)[:kept]] = True
    _, every = count(inputs, None)
    for form in (mask, PreparedMask.from_mask(mask, seqlen_q=LENGTH)):
        results, counted = count(inputs, form)
        assert counted.work == kept / LENGTH * every.work
        for x, y in zip(results, expected(inputs, mask), strict=True):
            torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-11)


def test_one_query_of_a_long_cache_computes_its_kept_keys() -> None:
    torch.manual_seed(2)
    q, k, v = torch.randn(2, 1, HQ, D), torch.randn(2, 32768, HK, D), torch.randn(2, 32768, HK, D)
    mask = torch.zeros(2, 1, 1, 32768, dtype=torch.bool)
    mask[0, ..., 100:150] = mask[1, ..., ::800] = True
    k[:, 4000:4001], v[:, 32767:] = math.nan, math.nan
    k[1, 4000] = v[1, 4000] = 0.0
    with counting() as counted:
        out = flash_dmattn.attention(q, k, v, mask, backend="eager")
    # Two products of 50 and 41 keys in the entries of the batch.
    assert counted.work == 2 * HQ * D * (50 + 41)
    exact, _ = formula.attention(q, *(x.nan_to_num() for x in (k, v)), mask, softmax_scale=D**-0.5)
    torch.testing.assert_close(out, exact)


def test_keys_that_nobody_sees_may_hold_anything() -> None:
    torch.manual_seed(5)
    inputs = leaves(dtype=torch.float32)
    mask = torch.rand(1, 1, LENGTH, LENGTH) < 0.3
    mask[..., 200:900] = False
    results, _ = count(inputs, mask)
    spoilt = [x.detach().clone().requires_grad_() for x in inputs]
    with torch.no_grad():
        spoilt[1][:, 200:900], spoilt[2][:, 200:900] = math.nan, math.inf
    for form in (mask, PreparedMask.from_mask(mask)):
        for x, y in zip(count(spoilt, form)[0], results, strict=True):
            assert torch.equal(x, y)


@pytest.mark.parametrize("bias_heads", [None, 1, HK, HQ])
@pytest.mark.parametrize("lengths", [(400, 400), (370, 400), (400, 340)], ids=str)
@pytest.mark.parametrize("batch, mask_batch, mask_heads", [(1, 1, HK), (2, 1, 1), (2, 2, HK)])
def test_blocks_of_few_keys_are_one_call(
    batch: int, mask_batch: int, mask_heads: int, lengths: tuple[int, int], bias_heads: int | None
) -> None:
    torch.manual_seed(8)
    seqlen_q, seqlen_k = lengths
    q = torch.randn(batch, seqlen_q, HQ, D, dtype=torch.float64, requires_grad=True)
    wanted = [q, *leaves(seqlen_k, batch)[1:]]
    if bias_heads is not None:
        wanted.append(torch.randn(batch, bias_heads, 1, seqlen_k, dtype=torch.float64, requires_grad=True))
    kept = torch.randn(mask_batch, mask_heads, 1, seqlen_k)
    mask = PreparedMask.from_topk(kept, 20, is_causal=True, seqlen_q=seqlen_q)
    out, lse = formula.attention(*wanted[:3], mask.dense(), *wanted[3:], softcap=3.0, softmax_scale=D**-0.5)
    upstream = torch.randn_like(out), torch.randn_like(lse)
    finite_lse = lse.masked_fill(lse == -math.inf, 0.0)
    exact = (out, lse, *torch.autograd.grad((out, finite_lse), wanted, upstream))
    call: dict[str, Any] = {"softcap": 3.0, "return_lse": True, "backend": "eager"}
    with counting() as counted:
        results = flash_dmattn.attention(*wanted[:3], mask, *wanted[3:], **call)
        gradients = torch.autograd.grad(results, wanted, upstream)
    assert counted.products <= 2 * 7, "two of the forward pass, five of the backward pass, of one chunk or two"
    for x, y in zip((*results, *gradients), exact, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-11)


def test_blocks_of_few_keys_read_the_bias_of_their_entry() -> None:
    """Two of four entries share a bias, and all of them a mask; in fp32, whose calls can be one of blocks."""
    torch.manual_seed(8)
    q, k, v = (x.detach().unflatten(0, (2, 2)).requires_grad_() for x in leaves(400, 4, torch.float32))
    bias = torch.randn(2, 1, 1, 1, 400, requires_grad=True)
    mask = PreparedMask.from_topk(torch.randn(1, HK, 1, 400), 20, is_causal=True, seqlen_q=400)
    results = []
    for own, backend in ((bias, "eager"), (bias.expand(2, 2, 1, 1, 400), "reference")):
        out = flash_dmattn.attention(q, k, v, mask if backend == "eager" else mask.dense(), own, backend=backend)
        results.append([out, *torch.autograd.grad(out.square().sum(), (q, k, v, bias))])
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)


def test_a_block_of_few_keys_reads_no_other_key() -> None:
    torch.manual_seed(9)
    q, k, v = (x.detach() for x in leaves(dtype=torch.float32))
    mask = PreparedMask.from_topk(torch.arange(LENGTH, 0, -1.0).view(1, 1, 1, -1), 20, is_causal=True, seqlen_q=LENGTH)
    wanted = flash_dmattn.attention(q, k, v, mask, backend="eager")
    k[:, 20:], v[:, 20:] = math.nan, math.inf  # the first keys are the best ones
    assert torch.equal(flash_dmattn.attention(q, k, v, mask, backend="eager"), wanted)


@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize("is_prepared", [False, True])
def test_sequences_of_equal_lengths_are_one_call(layout: str, is_prepared: bool) -> None:
    torch.manual_seed(6)
    number, length = 6, 32
    q, k, v = (x.detach() for x in leaves(length, number))
    mask = torch.rand(number, 1, length, length) < 0.5
    wanted, _ = formula.attention(q, k, v, mask, None, is_causal=True, softmax_scale=D**-0.5)
    lengths = torch.full((number,), length)
    if layout == "padded":
        sequences, rows = Sequences.padded(seqlens_k=lengths), (q, k, v)
    else:
        sequences = Sequences.packed(torch.arange(number + 1) * length, max_seqlen_q=length)
        rows = tuple(x.flatten(0, 1) for x in (q, k, v))
    inputs: Any = mask
    if is_prepared:
        sizes = {"seqlen_q": rows[0].shape[-3], "seqlen_k": rows[1].shape[-3]}
        inputs = PreparedMask.from_mask(mask, is_causal=True, sequences=sequences, **sizes)
    with counting() as counted:
        out = flash_dmattn.attention(*rows, inputs, sequences=sequences, is_causal=not is_prepared, backend="eager")
    assert counted.products == 2, "the scores and out of all sequences at once"
    torch.testing.assert_close(out.view(wanted.shape), wanted, rtol=1e-10, atol=1e-11)
