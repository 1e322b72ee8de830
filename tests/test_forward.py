"""out and lse of every backend: mask and bias in every broadcast form, causal, window, softcap, scale, heads."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from accuracy import GRADIENTS, assert_accurate
from cases import DEVICE, Case, Inputs
from conftest import Runner

from flash_dmattn.masks import PreparedMask

DTYPES = (torch.float32, torch.bfloat16, torch.float16) + ((torch.float64,) if DEVICE == "cpu" else ())
SHAPES = tuple(itertools.product(("1", "B"), ("1", "Hk", "Hq"), ("1", "Lq"), ("1", "Lk")))
WINDOWS = ((-1, -1), (0, 0), (3, -1), (-1, 2), (4, 1), (100, 100), (0, 5), (2**40, 0), (1, 2**31 - 1))


def check(backend: Runner, case: Case) -> None:
    inputs = case.build()
    assert_accurate(backend(case, inputs), case, inputs)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("is_causal", (False, True))
def test_dense(backend: Runner, dtype: torch.dtype, is_causal: bool) -> None:
    check(backend, Case(seqlen_q=33, seqlen_k=65, dtype=dtype, is_causal=is_causal, needs_grad=()))


@pytest.mark.parametrize("shape", SHAPES, ids="-".join)
@pytest.mark.parametrize("kind", ("random", "empty_rows", "empty_tiles"))
def test_mask(backend: Runner, shape: tuple[str, ...], kind: str) -> None:
    check(backend, Case(mask=shape, mask_kind=kind, needs_grad=()))


@pytest.mark.parametrize("shape", SHAPES, ids="-".join)
def test_bias(backend: Runner, shape: tuple[str, ...]) -> None:
    check(backend, Case(bias=shape, needs_grad=()))


@pytest.mark.parametrize("letters", (("Lq", "Lk"), ("1", "Lk"), ("Lq", "1"), ("Hk", "Lq", "Lk"), ("Hq", "1", "Lk")))
def test_fewer_dimensions_are_read_from_the_right(backend: Runner, letters: tuple[str, ...]) -> None:
    check(backend, Case(mask=letters, bias=letters, needs_grad=()))


@pytest.mark.parametrize("kind", ("none_allowed", "all_allowed", "empty_rows"))
@pytest.mark.parametrize("is_causal", (False, True))
def test_rows_with_nothing_allowed_are_zero(backend: Runner, kind: str, is_causal: bool) -> None:
    case = Case(
        mask=("B", "Hq", "Lq", "Lk"), mask_kind=kind, is_causal=is_causal, seqlen_q=17, seqlen_k=9, needs_grad=()
    )
    inputs = case.build()
    results = backend(case, inputs)
    assert_accurate(results, case, inputs)
    empty = results["lse"] == -torch.inf
    assert (results["out"].transpose(1, 2)[empty] == 0).all()
    if is_causal:
        assert empty[:, :, :8].all(), "with more queries than keys the first rows see nothing"


@pytest.mark.parametrize("lengths", ((9, 9), (5, 21), (21, 5), (1, 13), (13, 1)))
@pytest.mark.parametrize("window_size", WINDOWS)
@pytest.mark.parametrize("is_causal", (False, True))
def test_window(backend: Runner, lengths: tuple[int, int], window_size: tuple[int, int], is_causal: bool) -> None:
    seqlen_q, seqlen_k = lengths
    check(
        backend, Case(seqlen_q=seqlen_q, seqlen_k=seqlen_k, window_size=window_size, is_causal=is_causal, needs_grad=())
    )


@pytest.mark.parametrize("softcap", (0.5, 30.0))
@pytest.mark.parametrize("bias", (None, ("1", "Hq", "Lq", "Lk")))
def test_softcap_comes_before_the_bias(backend: Runner, softcap: float, bias: tuple[str, ...] | None) -> None:
    check(backend, Case(softcap=softcap, bias=bias, logits=5.0, needs_grad=()))


@pytest.mark.parametrize("softmax_scale", (0.0, 1.0, -0.3, 0.01))
def test_softmax_scale(backend: Runner, softmax_scale: float) -> None:
    check(backend, Case(softmax_scale=softmax_scale, bias=("B", "Hq", "Lq", "Lk"), needs_grad=()))


@pytest.mark.parametrize("heads", ((4, 4), (8, 2), (6, 1), (12, 4)))
def test_grouped_heads(backend: Runner, heads: tuple[int, int]) -> None:
    num_heads, num_heads_k = heads
    check(
        backend,
        Case(
            num_heads=num_heads,
            num_heads_k=num_heads_k,
            mask=("B", "Hk", "Lq", "Lk"),
            bias=("1", "Hq", "1", "Lk"),
            needs_grad=(),
        ),
    )


@pytest.mark.parametrize(
    "dims", ((8, 8), (24, 24), (64, 64), (96, 96), (128, 64), (192, 128), (16, 40), (512, 512), (320, 64))
)
def test_head_dims(backend: Runner, dims: tuple[int, int]) -> None:
    head_dim, head_dim_v = dims
    check(backend, Case(head_dim=head_dim, head_dim_v=head_dim_v, bias=("B", "1", "Lq", "Lk"), needs_grad=()))


@pytest.mark.parametrize("bias_kind", ("inf", "min", "huge"))
@pytest.mark.parametrize("bias_dtype", (torch.float32, torch.bfloat16, torch.float16), ids=str)
@pytest.mark.parametrize("mask", (None, ("B", "1", "Lq", "Lk")))
def test_extreme_biases(backend: Runner, bias_kind: str, bias_dtype: torch.dtype, mask: tuple[str, ...] | None) -> None:
    if bias_kind == "huge" and bias_dtype == torch.float16:
        bias_kind = "min"  # 1e4 times a normal value is beyond float16
    check(
        backend,
        Case(bias=("1", "Hq", "Lq", "Lk"), bias_kind=bias_kind, bias_dtype=bias_dtype, mask=mask, needs_grad=()),
    )


def test_a_row_of_minus_infinity_is_an_empty_row(backend: Runner) -> None:
    case = Case(bias=("B", "Hq", "Lq", "Lk"), needs_grad=())
    inputs = case.build()
    inputs.bias[:, :, 2:5] = -torch.inf
    results = backend(case, inputs)
    assert (results["lse"][:, :, 2:5] == -torch.inf).all() and (results["out"][:, 2:5] == 0).all()
    assert_accurate(results, case, inputs)


@pytest.mark.parametrize("logits", (1e2, 1e3, 1e4))
@pytest.mark.parametrize("seqlen_k", (31, 64, 65))
def test_huge_logits(backend: Runner, logits: float, seqlen_k: int) -> None:
    case = Case(logits=logits, seqlen_k=seqlen_k, bias=("B", "Hq", "Lq", "Lk"), needs_grad=())
    if case.dtype == torch.float16:
        case = case.with_(logits=min(logits, 2e3))  # plain PyTorch's products are float16, where those of 1e4 overflow
    check(backend, case)


FULL, ROWS, KEYS = ("B", "Hq", "Lq", "Lk"), ("1", "Hk", "Lq", "1"), ("B", "1", "1", "Lk")
# Everything that a call may have, two by two.
IN_INFERENCE = {
    "causal": Case(is_causal=True, softcap=2.0),
    "window": Case(window_size=(3, 1), bias=ROWS),
    "mask": Case(mask=FULL, mask_kind="empty_rows", bias=KEYS),
    "mask of one row": Case(mask=KEYS, bias=FULL),
    "bias in other bits": Case(bias=("1", "Hq", "Lq", "Lk"), bias_dtype=torch.bfloat16, softmax_scale=-0.3),
    "one query": Case(seqlen_q=1, num_heads=6, mask=("B", "Hk", "1", "Lk"), bias=KEYS),
    "sink": Case(sink="normal", mask=FULL, is_causal=True),
    "dropout": Case(dropout_p=0.4, bias=FULL),
    "16 bits": Case(dtype=torch.bfloat16, mask=("B", "1", "Lq", "Lk"), bias=ROWS),
}


@pytest.mark.parametrize("prepares", (False, True), ids=("", "prepared"))
@pytest.mark.parametrize("name", IN_INFERENCE)
def test_inference_mode(backend: Runner, name: str, prepares: bool) -> None:
    """Tensors and prepared masks that are made inside of it and outside give the same bits; training goes on behind."""
    case = IN_INFERENCE[name]
    if prepares and case.mask is None:
        pytest.skip("there is no mask to prepare")

    def made() -> Inputs:
        inputs, lengths = case.build(), {"seqlen_q": case.seqlen_q, "seqlen_k": case.seqlen_k}
        if not prepares or inputs.mask is None:
            return inputs
        return replace(inputs, mask=PreparedMask.from_mask(inputs.mask, is_causal=case.is_causal, **lengths))

    outside, forward = made(), case.with_(needs_grad=())
    wanted = backend(forward, outside)
    with torch.inference_mode():
        inside = made()
        for inputs in (inside, outside, inside):
            results = backend(forward, inputs)
            assert torch.equal(results["out"], wanted["out"]) and torch.equal(results["lse"], wanted["lse"])
    results = backend(forward, inside)
    assert torch.equal(results["out"], wanted["out"]) and torch.equal(results["lse"], wanted["lse"])
    assert_accurate(wanted, forward, case.build())
    refused = backend.refusal(case, outside)
    if refused is None:
        trained = backend(case, outside)
        assert all(trained[n] is not None for n in GRADIENTS if n != "dbias" or case.bias is not None)
        assert_accurate(trained, case, case.build())
