"""Kernel backends on a GPU at sizes that 32 bits, a grid dimension or the memory budget would not hold.

Nobody evaluates the formula in fp64 at these sizes. So dout is zero but in a few rows of queries: then only those rows
decide every gradient, and out, lse, dq and dbias are compared in them, dk and dv whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from accuracy import GRADIENTS, Results, assert_accurate
from cases import DEVICE, Case, Inputs
from conftest import Runner
from gpu_calls import on_kernels, results, served
from torch import Tensor

pytestmark = on_kernels

BF16 = torch.bfloat16
SMALL = Case(batch=1, num_heads=1, num_heads_k=1, head_dim=64, dtype=BF16)
LONG = 50_000  # (LONG, LONG) has more than 2^31 elements, from row 42949 on
UNALIGNED = LONG - 1  # rows of bytes that no wide load and no descriptor takes


@pytest.fixture(autouse=True)
def memory_goes_back() -> Iterator[None]:
    """Other workers share the GPU: what a test held is free after it."""
    yield
    if DEVICE == "cuda":
        torch.cuda.empty_cache()


def needs(backend: Runner, gigabytes: float) -> None:
    """Skip where the backend has no GPU here, or the GPU has less memory free."""
    served(backend, SMALL)
    free = torch.cuda.mem_get_info()[0] / 1e9
    if free < gigabytes:
        pytest.skip(f"needs {gigabytes} GB of GPU memory and finds {free:.1f} GB free")


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=BF16, device=DEVICE)


def all_but_mask_and_bias(case: Case, rows: Tensor) -> Inputs:
    """q, k, v on the device, and a dout of those rows."""
    torch.manual_seed(case.seed)
    q = normal(case.batch, case.seqlen_q, case.num_heads, case.head_dim)
    k, v = (normal(case.batch, case.seqlen_k, case.num_heads_k, case.head_dim) for _ in range(2))
    dout = torch.zeros_like(q)
    dout[:, rows] = normal(case.batch, len(rows), case.num_heads, case.head_dim)
    return Inputs(q, k, v, None, None, dout, None)


def named(actual: list[Tensor]) -> Results:
    """The results by name, as `assert_accurate` takes them."""
    return {"dbias": None, **dict(zip(("out", "lse", *GRADIENTS), actual))}


def assert_rows_accurate(backend: Runner, case: Case, inputs: Inputs, rows: Tensor) -> None:
    """The rows of everything against fp64; no other row may have a gradient."""

    def rows_alone(x: Tensor | None, dim: int) -> Tensor | None:
        return x if x is None or x.shape[dim] == 1 else x.index_select(dim, rows)

    backend.attention(case, inputs)  # or a skip
    got = named(results(backend, case, inputs))
    dims = {"out": 1, "lse": 2, "dq": 1, "dbias": 2}
    for name in ("dq", "dbias"):
        x = got[name]
        assert x is None or not x.index_fill(dims[name], rows, 0.0).any(), f"{name} is not zero where dout is"
    some = replace(
        inputs,
        q=rows_alone(inputs.q, 1),
        dout=rows_alone(inputs.dout, 1),
        mask=rows_alone(inputs.mask, 2),
        bias=rows_alone(inputs.bias, 2),
    )
    in_rows = {name: rows_alone(x, dims[name]) if name in dims else x for name, x in got.items()}
    assert_accurate(in_rows, case.with_(seqlen_q=len(rows)), some)


def some_rows(length: int) -> Tensor:
    """The first, the last, those around the places where 2^31 elements or bytes of (LONG, LONG) end, and others."""
    rows = {0, 1, 127, 128, 21_474, 21_475, 42_948, 42_949, 42_950, 42_951, length - 129, length - 2, length - 1}
    return torch.tensor(sorted(rows), device=DEVICE)


@pytest.mark.parametrize(
    ("seqlen", "batch"),
    ((LONG, 1), (UNALIGNED, 1), (UNALIGNED, 2)),
    ids=("aligned", "unaligned", "shared by the batch"),
)
def test_bias_and_its_gradient(backend: Runner, seqlen: int, batch: int) -> None:
    needs(backend, 20)
    case = SMALL.with_(batch=batch, seqlen_q=seqlen, seqlen_k=seqlen, bias=("1", "1", "Lq", "Lk"))
    rows = some_rows(seqlen)
    inputs = replace(all_but_mask_and_bias(case, rows), bias=normal(1, 1, seqlen, seqlen))
    assert_rows_accurate(backend, case, inputs, rows)


@pytest.mark.parametrize("seqlen", (LONG, UNALIGNED))
def test_dense_mask(backend: Runner, seqlen: int) -> None:
    needs(backend, 12)
    case = SMALL.with_(seqlen_q=seqlen, seqlen_k=seqlen, mask=("1", "1", "Lq", "Lk"))
    rows = some_rows(seqlen)
    mask = torch.randint(0, 2, (1, 1, seqlen, seqlen), dtype=torch.uint8, device=DEVICE).view(torch.bool)
    mask[:, :, 20_000:30_000, 10_000:40_000] = False
    mask[:, :, 30_000:45_000, 10_000:40_000] = True
    mask[:, :, 42_950] = False
    assert_rows_accurate(backend, case, replace(all_but_mask_and_bias(case, rows), mask=mask), rows)


@pytest.mark.parametrize(
    ("stride", "key_mask"),
    ((1_080_000, False), (1_080_001, False), (1_080_001, True)),
    ids=("aligned", "unaligned", "kept keys"),
)
def test_rows_far_apart(backend: Runner, stride: int, key_mask: bool) -> None:
    """A head of q, k, v and dout spans more than 2^31 elements of one buffer, which holds all four."""
    needs(backend, 16)
    seqlen, num_heads = 2000, 10  # large enough to pay for tensor descriptors
    mask = ("1", "1", "1", "Lk") if key_mask else None
    case = SMALL.with_(
        seqlen_q=seqlen, seqlen_k=seqlen, num_heads=num_heads, num_heads_k=num_heads, mask=mask, is_causal=True
    )
    inputs = case.build()
    buffer = torch.empty(seqlen * stride, dtype=BF16, device=DEVICE).view(1, seqlen, stride)

    def moved(x: Tensor, place: int) -> Tensor:
        view = buffer[:, :, place : place + num_heads * 64].unflatten(2, (num_heads, 64))
        assert (seqlen - 1) * view.stride(1) > 2**31
        return view.copy_(x)

    q, k, v, dout = (moved(x, 1024 * i) for i, x in enumerate((inputs.q, inputs.k, inputs.v, inputs.dout)))
    far = replace(inputs, q=q, k=k, v=v, dout=dout)
    backend.attention(case, far)  # or a skip
    assert_accurate(named(results(backend, case, far)), case, inputs)


def test_many_elements_of_out(backend: Runner) -> None:
    needs(backend, 30)
    case = SMALL.with_(seqlen_q=131_200, seqlen_k=100, num_heads=128, num_heads_k=8, head_dim=128)
    assert case.seqlen_q * case.num_heads * case.head_dim > 2**31
    rows = torch.tensor([0, 65_535, 131_071, 131_072, 131_199], device=DEVICE)
    assert_rows_accurate(backend, case, all_but_mask_and_bias(case, rows), rows)


@pytest.mark.parametrize(
    "forms",
    (
        {"mask": ("B", "Hq", "Lq", "Lk"), "bias": ("B", "Hq", "Lq", "Lk")},
        {"mask": ("B", "Hq", "1", "Lk"), "bias": ("B", "Hq", "1", "Lk")},
        {"bias": ("1", "Hq", "Lq", "Lk"), "is_causal": True},
        {"bias": ("B", "Hq", "Lq", "Lk"), "seqlen_k": 8},  # rows of 16 bytes, which are copied as tiles
        {"bias": ("B", "Hk", "1", "Lk"), "is_causal": True},
    ),
    ids=("full", "per key", "shared", "aligned", "bias per key"),
)
def test_more_heads_than_a_grid_dimension_holds(backend: Runner, forms: dict[str, Any]) -> None:
    sizes = {"batch": 700, "num_heads": 100, "num_heads_k": 50, "seqlen_q": 3, "seqlen_k": 5, "head_dim": 16}
    case = SMALL.with_(**{**sizes, **forms})
    assert case.batch * case.num_heads > 65_535
    inputs = served(backend, case)
    assert_accurate(backend(case, inputs), case, inputs)


@pytest.mark.parametrize("batch", (1, 4), ids=("shared by the batch", "full"))
def test_peak_memory_with_a_bias(backend: Runner, batch: int) -> None:
    """Little more than what is returned: above all no second (B, Hq, Lq, Lk) buffer, and none for (1, ...)."""
    needs(backend, 6)
    seqlen = 2048
    case = SMALL.with_(
        batch=8 if batch == 1 else batch,
        seqlen_q=seqlen,
        seqlen_k=seqlen,
        num_heads=16,
        num_heads_k=16,
        bias=("1" if batch == 1 else "B", "Hq", "Lq", "Lk"),
    )
    inputs = replace(all_but_mask_and_bias(case, torch.arange(seqlen)), bias=normal(batch, 16, seqlen, seqlen))
    results(backend, case, inputs)  # what a first call allocates for good is not counted
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    returned = results(backend, case, inputs)
    peak = torch.cuda.max_memory_allocated() - before
    size = sum(x.numel() * x.element_size() for x in returned)
    limit = 1.1 * size
    if backend.choice(case, inputs) == "cuda":
        # dq in fp32, lse in base 2 and delta; the allocator may add up to a megabyte to each tensor.
        sums = 4 * (inputs.q.numel() + 2 * case.batch * case.num_heads * seqlen)
        limit = 1.02 * (size + sums)
    assert peak <= limit, f"{peak / 2**20:.0f} MB at the peak, {size / 2**20:.0f} MB returned"
