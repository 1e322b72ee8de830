"""Kernels that make biases, in Triton's interpreter: `interpreted_projected.py kernels`, `gathers` or `calls`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import Any
from unittest import mock

import torch
from interpreter import TILES, admit_cpu, assert_margins, dot_of_tensor_cores, guard_outputs, set_up
from out_of_tree import replace_backend
from outcomes import outcome_of, report
from projected_cases import (
    BANDS,
    GATHERS,
    SHAPES,
    assert_accurate,
    assert_bands,
    assert_gathers,
    assert_products,
    by_gather,
    draw,
    in_fp64,
    with_gradients,
    with_positions,
)
from torch import Tensor
from triton.runtime.interpreter import InterpreterBuilder

from flash_dmattn import attention, bias_makers, projected
from flash_dmattn.backends.eager import BACKEND as EAGER
from flash_dmattn.gradients import with_dbias
from flash_dmattn.triton_kernels import bands as band_kernels
from flash_dmattn.triton_kernels import gathers as gather_kernels
from flash_dmattn.triton_kernels import positions as kernels

MOST = 150  # vectors and keys: as many blocks of 16 vectors, whose rows are 4 apart, as 300 have on a GPU


def computes_products(shape: tuple[int, int, int, int, int], by_keys: bool, dtype: torch.dtype, most: int) -> None:
    assert_products(shape, by_keys, dtype, most)
    assert_margins()


def stays_finite() -> None:
    """Scores beyond the largest number of float16 become that number."""
    x, rows = torch.full((1, 5, 1, 16), 300.0).half(), torch.full((1, 9, 16), 300.0).half()
    for sign in (1, -1):
        greatest = torch.full((1, 1, 5, 5), sign * 65504.0)
        made = kernels.Products(sign * rows, 1.0, False, 1, (1, 5, 5)).scores(x)
        assert torch.equal(made.float(), greatest)
        kernels.Products(sign * rows, 1.0, True, 1, (1, 5, 5)).add_scores(x, made)
        assert torch.equal(made.float(), greatest)


def kernel_calls() -> Iterator[str | None]:
    guard_outputs()
    for number, ((heads, length, others, *rest), by_keys) in enumerate(product(SHAPES, (False, True))):
        shape = (heads, min(length, MOST), min(others, MOST), *rest)
        dtype, most = (torch.float16, torch.float32)[number % 2], (16, 64)[number // 2 % 2]
        set_up()
        yield outcome_of(
            partial(computes_products, shape, by_keys, dtype, most), f"{shape}, {by_keys=}, {dtype}, {most}"
        )
    for by_keys in (False, True):
        set_up()
        with (
            mock.patch.object(kernels, "select_precision", lambda *_: "fp16x3"),
            mock.patch.object(InterpreterBuilder, "create_dot", dot_of_tensor_cores),
        ):
            products = partial(computes_products, (2, 37, 50, 20, 2), by_keys, torch.float32, 16)
            yield outcome_of(products, f"pieces, {by_keys=}")
    yield outcome_of(stays_finite, "great scores")


def gathers(shape: Any, dtype: torch.dtype) -> None:
    assert_gathers(shape, dtype)
    assert_margins()


def bands(shape: Any, dtype: torch.dtype) -> None:
    assert_bands(shape, dtype)
    assert_margins()


def gather_calls() -> Iterator[str | None]:
    guard_outputs()
    for number, band in enumerate(BANDS):
        dtype = (torch.float16, torch.float32)[number % 2]
        set_up()
        yield outcome_of(partial(bands, band, dtype), f"band {band}, {dtype}")
    for number, shape in enumerate(GATHERS):
        dtype = (torch.float16, torch.float32)[number % 2]
        set_up()
        yield outcome_of(partial(gathers, shape, dtype), f"{shape}, {dtype}")


def answers(seed: int, dtype: torch.dtype, has_positions: bool = False) -> None:
    case = draw(seed, dtype, (17, 40), softcap=has_positions)
    case = with_positions(case, seed) if has_positions else case
    q, k, v, mask, bias, options = case
    assert_accurate(case, attention(q, k, v, mask, bias, return_lse=True, backend="triton", **options))


def answers_short(seed: int) -> None:
    """Lengths of 1 and 3, where some gradients are 0: against the formula, in fp32."""
    case = draw(seed, torch.float32, (1, 3), softcap=False)
    exact = in_fp64(case)
    q, k, v, mask, bias, options = case
    results = attention(q, k, v, mask, bias, return_lse=True, backend="triton", **options)
    wanted = with_gradients(by_gather(exact), exact.leaves)
    for x, y in zip(with_gradients(results, case.leaves), wanted, strict=True):
        torch.testing.assert_close(x.double(), y, rtol=1e-4, atol=1e-4)


def stores(seed: int, dtype: torch.dtype) -> None:
    """A backend may store the gradient of the scores in the workspace, as cuda does."""
    case, stored = draw(seed, dtype, (17, 40), softcap=False), []
    q, k, v, mask, bias, options = case

    def plan_backward(problem: Any) -> Any:
        run = EAGER.plan_backward(problem)  # type: ignore[misc]

        def backward(saved: Any, dout: Tensor, dlse: Any, *, dbias_out: Tensor | None = None, **more: Any) -> Any:
            assert dbias_out is not None and dbias_out.shape == saved.inputs.bias.shape
            stored.append(dbias_out)
            return with_dbias(run(saved, dout, dlse, **more), dbias_out)

        return backward

    replace_backend("eager", plan_backward=plan_backward, stores_dbias=True)
    try:
        results = attention(q, k, v, mask, bias, return_lse=True, backend="eager", **options)
        assert_accurate(case, results)
    finally:
        replace_backend("eager", plan_backward=EAGER.plan_backward, stores_dbias=False)
    assert stored and all(x.stride(2) % 16 == 0 for x in stored)


def calls() -> Iterator[str | None]:
    admit_cpu()
    bias_makers.products_of = lambda x: kernels.Products  # type: ignore[assignment]
    bias_makers.bands_of = lambda x: band_kernels.Bands  # type: ignore[assignment]
    bias_makers.gathers_of = lambda x: gather_kernels.Gathers  # type: ignore[assignment]
    for seed, workspace in zip(range(24), 8 * (1, 5000, 2**28), strict=True):
        projected.WORKSPACE_BYTES = workspace
        set_up(TILES[0])
        dtype = (torch.float32, torch.float16)[seed // 3 % 2]
        yield outcome_of(partial(answers, seed, dtype), f"seed {seed}, {dtype}, {workspace=}")
        yield outcome_of(partial(answers, seed, dtype, True), f"positions, seed {seed}, {dtype}, {workspace=}")
        if seed < 8:
            yield outcome_of(partial(answers_short, seed), f"short, seed {seed}, {workspace=}")
            yield outcome_of(partial(stores, seed, dtype), f"stored, seed {seed}, {dtype}, {workspace=}")


if __name__ == "__main__":
    sys.exit(report({"kernels": kernel_calls, "gathers": gather_calls, "calls": calls}[sys.argv[1]]()))
