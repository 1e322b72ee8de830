"""Corners of the contract on every backend: lengths of 0, 1 and odd, and every layout in memory."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from accuracy import assert_accurate, assert_empty_rows_ignore_dlse
from cases import DEVICE, Case
from conftest import Runner
from layouts import LAYOUTS, rearranged

import flash_dmattn
from flash_dmattn.masks import PreparedMask

FULL = ("B", "Hq", "Lq", "Lk")


@pytest.mark.parametrize("seqlen_q", (1, 2, 63, 65))
@pytest.mark.parametrize("seqlen_k", (1, 2, 63, 65))
@pytest.mark.parametrize("is_causal", (False, True))
def test_lengths(backend: Runner, seqlen_q: int, seqlen_k: int, is_causal: bool) -> None:
    case = Case(seqlen_q=seqlen_q, seqlen_k=seqlen_k, is_causal=is_causal, bias=("1", "Hk", "1", "Lk"), dlse=True)
    inputs = case.build()
    assert_accurate(backend(case, inputs), case, inputs)


@pytest.mark.parametrize("empty", ("batch", "seqlen_q", "seqlen_k"))
@pytest.mark.parametrize("is_causal", (False, True))
@pytest.mark.parametrize("forms", ((None, None), (FULL, FULL), (("1", "1", "1", "Lk"), ("1", "Hq", "Lq", "1"))))
def test_sizes_of_zero(backend: Runner, empty: str, is_causal: bool, forms: tuple) -> None:
    mask, bias = forms
    case = Case(is_causal=is_causal, mask=mask, bias=bias, dlse=True, **{empty: 0})
    inputs = case.build()
    results = backend(case, inputs)
    assert_accurate(results, case, inputs)
    if empty == "seqlen_k":
        assert (results["out"] == 0).all() and (results["lse"] == -torch.inf).all()
    for name in ("dq", "dk", "dv", "dbias"):
        assert results[name] is None or (results[name] == 0).all()


@pytest.mark.parametrize("bias", (("1", "Hk", "Lq", "1"), ("B", "1", "1", "Lk"), FULL))
def test_the_lse_of_an_empty_row_takes_no_gradient(backend: Runner, bias: tuple) -> None:
    case = Case(mask=("B", "1", "Lq", "Lk"), mask_kind="empty_rows", bias=bias)
    inputs = case.build()
    refusal = backend.refusal(case, inputs)
    if refusal is not None:
        pytest.skip(refusal)
    attention = partial(flash_dmattn.attention, return_lse=True, backend=backend.choice(case, inputs))
    assert_empty_rows_ignore_dlse(attention, case, inputs)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "forms",
    ((None, None), (FULL, FULL), (("1", "Hk", "1", "Lk"), ("B", "1", "Lq", "1")), (("Lq", "Lk"), ("Hq", "1", "Lk"))),
)
def test_layouts(backend: Runner, layout: str, forms: tuple) -> None:
    mask, bias = forms
    case = Case(mask=mask, bias=bias, dlse=True, is_causal=True, seqlen_q=13, seqlen_k=19)
    inputs = case.build()
    moved = rearranged(inputs, LAYOUTS[layout])
    assert_accurate(backend(case, moved), case, inputs)


@pytest.mark.parametrize("is_batch_1", (False, True))
def test_absurd_strides_on_sizes_of_one(backend: Runner, is_batch_1: bool) -> None:
    case = Case(batch=1 if is_batch_1 else 2, num_heads=1, num_heads_k=1, mask=FULL, bias=FULL)
    inputs = case.build()
    assert_accurate(backend(case, rearranged(inputs, LAYOUTS["absurd_strides"])), case, inputs)


@pytest.mark.parametrize("small", (("1", "Hq", "1", "Lk"), ("1", "1", "Lq", "Lk"), ("B", "1", "1", "1")))
def test_expanded_mask_and_bias_equal_their_copies(backend: Runner, small: tuple[str, ...]) -> None:
    case = Case(mask=small, bias=small)
    inputs = case.build()
    shape = case.sizes(FULL)
    expanded = replace(inputs, mask=inputs.mask.expand(shape), bias=inputs.bias.expand(shape))
    copied = replace(inputs, mask=expanded.mask.contiguous(), bias=expanded.bias.contiguous())
    exact = case.with_(mask=FULL, bias=FULL)
    results = backend(exact, expanded)
    assert results["dbias"].shape == shape
    assert_accurate(results, exact, copied)


HIDING: dict[str, tuple[dict[str, Any], str]] = {
    "mask per key": ({"mask": ("B", "1", "1", "Lk")}, "bool"),
    "mask of all": ({"mask": FULL}, "bool"),
    "mask beside a bias": ({"mask": FULL, "bias": ("1", "Hk", "1", "Lk")}, "bool"),
    "mask beside a softcap": ({"mask": FULL, "softcap": 2.0}, "bool"),
    "mask in 16 bits": ({"mask": FULL, "dtype": torch.float16}, "bool"),
    "prepared mask": ({"mask": FULL}, "prepared"),
    "prepared keys": ({"mask": ("B", "1", "1", "Lk")}, "prepared"),
    "prepared intervals": ({"mask": ("B", "1", "1", "Lk")}, "intervals"),
    "causal": ({"is_causal": True}, "bool"),
    "window": ({"window_size": (5, 0)}, "bool"),
}


@pytest.mark.parametrize("value", (torch.nan, torch.inf))
@pytest.mark.parametrize("name", HIDING)
def test_a_key_that_is_not_allowed_may_hold_anything(backend: Runner, name: str, value: float) -> None:
    changes, form = HIDING[name]
    # Rows of up to 128 keys on triton add the causal limit and the window to the scores: docs/masks.md.
    first = 50 if "mask" in changes else 170
    case = Case(needs_grad=(), seqlen_q=first + 20 * ("mask" in changes), seqlen_k=first + 10, **changes)
    inputs = case.build()
    if inputs.mask is not None:
        inputs.mask[..., first:] = False
    if form != "bool":
        rows = inputs.q.shape[1]
        inputs = replace(
            inputs, mask=PreparedMask.from_mask(inputs.mask, seqlen_q=rows, find_intervals=form == "intervals")
        )
    hidden = slice(first, None)
    spoiled = inputs.k.clone()
    spoiled[:, hidden] = value
    refusal = backend.refusal(case, inputs)
    if refusal is not None:
        pytest.skip(refusal)
    attention = partial(flash_dmattn.attention, return_lse=True, backend=backend.choice(case, inputs), **case.flags())
    # The causal limit and the window hide the last 10 keys from all rows but the last 10; a mask from all.
    seen = slice(None) if inputs.mask is not None else slice(0, 160)
    expected, expected_lse = attention(inputs.q, inputs.k, inputs.v, inputs.mask, inputs.bias)
    out, lse = attention(inputs.q, spoiled, inputs.v, inputs.mask, inputs.bias)
    assert torch.equal(out[:, seen], expected[:, seen])
    assert torch.equal(lse[:, :, seen], expected_lse[:, :, seen])


def test_expanded_keys_and_values(backend: Runner) -> None:
    case = Case(mask=FULL)
    inputs = case.build()
    shape = inputs.k.shape
    expanded = replace(inputs, k=inputs.k[:1].expand(shape), v=inputs.v[:, :, :1].expand(shape))
    copied = replace(expanded, k=expanded.k.contiguous(), v=expanded.v.contiguous())
    assert_accurate(backend(case, expanded), case, copied)


def test_dout_in_a_layout_of_its_own(backend: Runner) -> None:
    case = Case(bias=FULL)
    inputs = case.build()
    for layout in LAYOUTS.values():
        assert_accurate(backend(case, replace(inputs, dout=layout(inputs.dout))), case, inputs)
    expanded = replace(inputs, dout=inputs.dout[:, :, :1, :1].expand_as(inputs.dout))
    assert_accurate(backend(case, expanded), case, replace(expanded, dout=expanded.dout.contiguous()))


@pytest.mark.skipif(DEVICE == "cpu", reason="bfloat16 at realistic sizes is what a GPU is for")
@pytest.mark.parametrize("seqlen", (127, 128, 129, 1000, 1024))
@pytest.mark.parametrize("form", (None, FULL))
def test_gpu_sizes(backend: Runner, seqlen: int, form: tuple[str, ...] | None) -> None:
    case = Case(
        seqlen_q=seqlen,
        seqlen_k=seqlen + 40,
        head_dim=64,
        dtype=torch.bfloat16,
        is_causal=True,
        mask=form,
        mask_kind="empty_tiles",
        bias=("1", "Hk", "1", "Lk"),
    )
    inputs = case.build()
    assert_accurate(backend(case, inputs), case, inputs)
