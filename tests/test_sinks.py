"""Attention sinks: a logit of every query head without a value, its gradient, and all that is called with one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import ALL, DEVICE, Case
from conftest import Runner
from torch import Tensor

import flash_dmattn
from flash_dmattn.reference import formula

WITH_SINK = (*ALL, "sink")
BASE = Case(seqlen_q=37, seqlen_k=45, sink="normal", needs_grad=WITH_SINK, dlse=True)
FULL, PER_KEY, PER_QUERY = ("B", "Hq", "Lq", "Lk"), ("1", "Hk", "1", "Lk"), ("B", "Hq", "Lq", "1")
CASES = {
    "plain": BASE,
    "empty rows": BASE.with_(mask=("B", "1", "Lq", "Lk"), mask_kind="empty_rows"),
    "no key is allowed": BASE.with_(mask=("1", "1", "Lq", "Lk"), mask_kind="none_allowed", bias=PER_KEY),
    "bias per query": BASE.with_(bias=PER_QUERY, mask=("B", "Hk", "Lq", "Lk"), mask_kind="empty_rows"),
    "one bias for all": BASE.with_(bias=("1", "1", "1", "1"), is_causal=True),
    "none for some heads": BASE.with_(sink="inf", mask=("B", "1", "Lq", "Lk"), mask_kind="empty_rows", bias=PER_QUERY),
    "huge": BASE.with_(sink="huge", mask=("B", "1", "Lq", "Lk"), mask_kind="empty_rows", bias=PER_QUERY),
    "alone": BASE.with_(needs_grad=("sink",), bias=FULL),
    "with others": BASE.with_(needs_grad=("v", "sink"), sink_dtype=torch.float64),
    "without its gradient": BASE.with_(needs_grad=ALL, bias=PER_QUERY),
    "no keys": BASE.with_(seqlen_k=0, bias=PER_QUERY),
    "no queries": BASE.with_(seqlen_q=0),
    "no batch": BASE.with_(batch=0),
    "one query of a group": BASE.with_(seqlen_q=1, seqlen_k=600, num_heads=6, is_causal=True),
    "many keys": BASE.with_(seqlen_q=70, seqlen_k=300, bias=PER_QUERY),
}


@pytest.mark.parametrize("name", CASES)
def test_a_sink_beside_everything_else(backend: Runner, name: str) -> None:
    backend.check(CASES[name])


def test_a_sink_is_a_key_of_zeros_whose_score_is_the_sink() -> None:
    """The oracle against itself: one more key, of v 0, seen by every row."""
    case = BASE.with_(dtype=torch.float64, bias=("1", "Hq", "1", "Lk"), mask=FULL, mask_kind="empty_rows")
    x = case.build()
    assert x.mask is not None and x.bias is not None and x.sink is not None and x.dlse is not None
    sink, bias = x.sink.requires_grad_(), x.bias.requires_grad_()

    def longer(t: Tensor) -> Tensor:
        return torch.cat([t, torch.zeros_like(t[:, :1])], 1)

    mask = torch.cat([x.mask, torch.ones_like(x.mask[..., :1])], -1)
    scores = torch.cat([bias.expand(-1, -1, 1, -1), sink.view(1, -1, 1, 1)], -1)
    wanted = formula.attention(x.q, longer(x.k), longer(x.v), mask, scores)
    actual = formula.attention(x.q, x.k, x.v, x.mask, bias, sink=sink)
    torch.testing.assert_close(actual, wanted)
    key_gradients = torch.autograd.grad(wanted, (bias, sink), (x.dout, x.dlse))
    torch.testing.assert_close(torch.autograd.grad(actual, (bias, sink), (x.dout, x.dlse)), key_gradients)
    _, _, _, dbias, dsink = formula.gradients(x.dout, x.dlse, x.q, x.k, x.v, x.mask, bias, sink=sink)
    torch.testing.assert_close((dbias, dsink), key_gradients)


def test_rows_without_keys_have_the_lse_of_their_sink(backend: Runner) -> None:
    case = CASES["no key is allowed"].with_(sink_dtype=torch.float32)
    inputs = case.build()
    assert inputs.sink is not None and inputs.dlse is not None
    results = backend(case, inputs)
    out, lse, dsink = results["out"], results["lse"], results["dsink"]
    assert out is not None and lse is not None and dsink is not None
    assert not out.any() and torch.equal(lse, inputs.sink[:, None].expand(lse.shape))
    torch.testing.assert_close(dsink, inputs.dlse.sum((0, 2)))
    assert all(not results[name].any() for name in ("dq", "dk", "dv", "dbias"))  # type: ignore[union-attr]


@pytest.mark.parametrize("bias", (None, PER_QUERY, FULL), ids=("no bias", "per query", "per score"))
def test_minus_infinity_is_no_sink(backend: Runner, bias: tuple[str, ...] | None) -> None:
    case = BASE.with_(bias=bias, mask=("B", "1", "Lq", "Lk"), mask_kind="empty_rows", sink=None, needs_grad=ALL)
    inputs = case.build()
    wanted = backend(case, inputs)
    none = torch.full((case.num_heads,), -torch.inf, dtype=case.dtype, device=DEVICE)
    with_none = type(inputs)(**{**vars(inputs), "sink": none})
    actual = backend(case.with_(needs_grad=WITH_SINK), with_none)
    dsink = actual.pop("dsink")
    assert dsink is not None and not dsink.any()
    for name, x in actual.items():
        y = wanted[name]
        assert (x is None and y is None) or (x is not None and y is not None and torch.equal(x, y)), name


def call_of(**changes: Any) -> Any:
    q, k = torch.randn(2, 3, 4, 8), torch.randn(2, 5, 2, 8)
    return flash_dmattn.attention(q, k, k, **changes)


WRONG = {
    "no tensor": (0.5, TypeError, "sink is a float; it needs to be a floating-point torch.Tensor of shape (4,)"),
    "integers": (torch.zeros(4, dtype=torch.int64), TypeError, "sink has dtype int64; it needs float16, bfloat16, "),
    "complex": (torch.zeros(4, dtype=torch.complex64), TypeError, "sink has dtype complex64; it needs float16"),
    "heads of k": (torch.zeros(2), ValueError, "sink has shape (2,); it needs (4,): one logit for each head of q"),
    "one for all": (torch.zeros(1), ValueError, "sink has shape (1,); it needs (4,): one logit for each head of q (si"),
    "a number": (
        torch.tensor(0.0),
        ValueError,
        "sink has shape (); it needs (4,): one logit for each head of q (sink.",
    ),
    "two dims": (torch.zeros(1, 4), ValueError, "sink has shape (1, 4); it needs (4,): one logit for each head of q"),
    "elsewhere": (torch.zeros(4, device="meta"), ValueError, "sink is on meta; it needs to be on the device of q, cpu"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_no_sink_is_named(name: str) -> None:
    sink, error, text = WRONG[name]
    with pytest.raises(error) as caught:  # type: ignore[call-overload]
        call_of(sink=sink)
    assert text in str(caught.value)


def test_autocast_leaves_a_sink_its_dtype() -> None:
    q, sink = torch.randn(1, 3, 2, 8), torch.randn(2, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = flash_dmattn.attention(q, q, q, sink=sink)
    out.sum().backward()
    assert out.dtype == torch.bfloat16 and sink.grad is not None and sink.grad.dtype == torch.float32


def test_more_batch_dims_share_a_sink() -> None:
    q, k, sink = torch.randn(2, 3, 5, 4, 8), torch.randn(2, 3, 7, 2, 8), torch.randn(4, requires_grad=True)
    out, lse = flash_dmattn.attention(q, k, k, sink=sink, return_lse=True)
    wanted = flash_dmattn.attention(q.flatten(0, 1), k.flatten(0, 1), k.flatten(0, 1), sink=sink, return_lse=True)
    torch.testing.assert_close((out.flatten(0, 1), lse.flatten(0, 1)), wanted)


def test_probabilities_leave_the_sink_its_share() -> None:
    q, sink = torch.randn(1, 3, 2, 8, dtype=torch.float64), torch.randn(2, dtype=torch.float64)
    flags = {"return_lse": True, "return_probs": True, "backend": "reference", "sink": sink}
    _, lse, probs = flash_dmattn.attention(q, q, q, is_causal=True, **flags)  # type: ignore[arg-type]
    torch.testing.assert_close(probs.sum(-1), 1 - torch.exp(sink[:, None] - lse))
