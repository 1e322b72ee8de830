"""Corners of the contract on every backend that take more than a case: layouts in memory, hidden keys, repeats."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from accuracy import GRADIENTS, assert_accurate, assert_empty_rows_ignore_dlse, run
from cases import Case
from conftest import Runner
from layouts import LAYOUTS, rearranged
from test_calls import check

import flash_dmattn
from flash_dmattn.backends import eager
from flash_dmattn.masks import PreparedMask
from flash_dmattn.reference import chunks

FULL, PER_KEY = ("B", "Hq", "Lq", "Lk"), ("1", "Hk", "1", "Lk")
RESULTS = ("out", "lse", *GRADIENTS)


CASE = Case(mask=FULL, bias=FULL, dlse=True, seqlen_q=13, seqlen_k=19)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "case",
    (
        CASE.with_(mask=None, bias=None),
        CASE.with_(is_causal=True),
        CASE.with_(mask=("1", "Hk", "1", "Lk"), bias=("B", "1", "Lq", "1")),
        CASE.with_(mask=("Lq", "Lk"), bias=("Hq", "1", "Lk")),
        CASE.with_(batch=1, num_heads=1, num_heads_k=1),
    ),
    ids=("no mask", "mask", "rows", "fewer dims", "one head"),
)
def test_layouts(backend: Runner, layout: str, case: Case) -> None:
    inputs = case.build()
    check(backend, case, inputs, rearranged(inputs, LAYOUTS[layout]))
    check(backend, case, inputs, replace(inputs, dout=LAYOUTS[layout](inputs.dout)))


@pytest.mark.parametrize("small", (("1", "Hq", "1", "Lk"), ("1", "1", "Lq", "Lk"), ("B", "1", "1", "1")), ids="-".join)
def test_expanded_tensors_equal_their_copies(backend: Runner, small: tuple[str, ...]) -> None:
    x = CASE.with_(mask=small, bias=small).build()
    shape = CASE.sizes(FULL)
    expanded = {"mask": x.mask.expand(shape), "bias": x.bias.expand(shape)}
    expanded |= {"k": x.k[:1].expand_as(x.k), "v": x.v[:, :, :1].expand_as(x.v)}
    expanded |= {"dout": x.dout[:, :, :1, :1].expand_as(x.dout)}
    copied = {name: y.contiguous() for name, y in expanded.items()}
    check(backend, CASE, replace(x, **copied), replace(x, **expanded))


def test_rows_of_minus_infinity_and_a_dout_of_zero(backend: Runner) -> None:
    x = CASE.build()
    x.bias[:, :, 2:5] = -torch.inf
    check(backend, CASE, x)
    case = CASE.with_(dlse=False)
    results = backend(case, replace(case.build(), dout=torch.zeros_like(x.dout)))
    assert not any(results[name].any() for name in GRADIENTS)


@pytest.mark.parametrize("bias", (("1", "Hk", "Lq", "1"), ("B", "1", "1", "Lk"), FULL))
def test_the_lse_of_an_empty_row_takes_no_gradient(backend: Runner, bias: tuple) -> None:
    case = Case(mask=("B", "1", "Lq", "Lk"), mask_kind="empty_rows", bias=bias)
    inputs = case.build()
    assert_empty_rows_ignore_dlse(backend.attention(case, inputs), case, inputs)


HIDING: dict[str, tuple[dict[str, Any], str]] = {
    "mask per key": ({"mask": ("B", "1", "1", "Lk")}, "bool"),
    "mask of all": ({"mask": FULL}, "bool"),
    "mask of few scores, which are all computed": ({"mask": FULL, "batch": 1}, "bool"),
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
    attention = partial(backend.attention(case, inputs), **case.flags())
    # The causal limit and the window hide the last 10 keys from all rows but the last 10; a mask from all.
    seen = slice(None) if inputs.mask is not None else slice(0, 160)
    expected, expected_lse = attention(inputs.q, inputs.k, inputs.v, inputs.mask, inputs.bias)
    out, lse = attention(inputs.q, spoiled, inputs.v, inputs.mask, inputs.bias)
    assert torch.equal(out[:, seen], expected[:, seen])
    assert torch.equal(lse[:, :, seen], expected_lse[:, :, seen])


def test_values_of_hidden_keys_have_no_say(backend: Runner) -> None:
    case = CASE.with_(mask=("B", "1", "1", "Lk"))
    x = case.build()
    hidden = ~x.mask[:, 0, 0]
    loud = {name: getattr(x, name).masked_fill(hidden[..., None, None], 1e4) for name in "kv"}
    results = backend.check(case, x, replace(x, **loud))
    assert not results["dk"][hidden].any() and not results["dv"][hidden].any()


@pytest.mark.parametrize("asked", ["argument", "torch"])
@pytest.mark.parametrize("chunk_bytes", [chunks.DEFAULT_CHUNK_BYTES, 60_000], ids=["whole rows", "split rows"])
def test_repeats_of_a_deterministic_call_on_eager_are_equal_bit_by_bit(asked: str, chunk_bytes: int) -> None:
    small = {"batch": 1, "num_heads": 2, "num_heads_k": 1, "dtype": torch.bfloat16}
    case = CASE.with_(bias=PER_KEY, seqlen_q=70, seqlen_k=300, **small)
    x = case.build()
    attention = partial(
        flash_dmattn.attention, return_lse=True, deterministic=True if asked == "argument" else None, backend="eager"
    )
    torch.use_deterministic_algorithms(asked == "torch")
    torch.set_num_threads(2)  # sums that several threads add to are what would differ
    eager.set_chunk_bytes(chunk_bytes)
    try:
        with flash_dmattn.config(record=(decisions := [])):
            first, *others = [run(attention, case, x) for _ in range(3)]
    finally:
        eager.set_chunk_bytes(chunks.DEFAULT_CHUNK_BYTES)
        torch.set_num_threads(1)
        torch.use_deterministic_algorithms(False)
    assert all(decision.problem.deterministic for decision in decisions)
    assert_accurate(first, case, x)
    for other in others:
        assert all(torch.equal(first[name], other[name]) for name in RESULTS)
