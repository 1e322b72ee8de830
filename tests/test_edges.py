"""Corners of the contract on every backend that take more than a case: layouts in memory, hidden keys, repeats."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
import torch
from accuracy import GRADIENTS, Results, assert_accurate, assert_empty_rows_ignore_dlse, oracle, run
from cases import Case, Inputs
from conftest import Runner
from layouts import LAYOUTS, rearranged
from test_calls import check

import flash_dmattn
from flash_dmattn.backends import eager
from flash_dmattn.masks import PreparedMask
from flash_dmattn.reference import chunks, formula

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


# Backends that are held to "NaN and infinities" in docs/mathematics.md.
HELD_TO_NAN = ("eager", "sdpa", "flex", "reference", "triton", "cuda")
QKV = ("q", "k", "v")
SPOILT = Case(seqlen_q=20, seqlen_k=20, needs_grad=QKV)
SHORT = SPOILT.with_(seqlen_q=7, seqlen_k=7)
SPOILT_CALLS: dict[str, tuple[Case, tuple[str, ...]]] = {
    "plain": (SPOILT, QKV),
    "short rows": (SHORT, QKV),
    "causal": (SPOILT.with_(is_causal=True), QKV),
    "causal, in blocks": (SPOILT.with_(is_causal=True, batch=1, seqlen_q=193, seqlen_k=193), ("q", "k", "last of k")),
    "window": (SPOILT.with_(window_size=(5, 2)), QKV),
    "mask": (SPOILT.with_(mask=FULL, mask_kind="empty_rows"), QKV),
    "softcap": (SPOILT.with_(softcap=3.0), ("q", "k")),
    **{
        f"bias {'-'.join(shape)}, {name}": (case.with_(bias=shape, needs_grad=grads), (*QKV, "bias", "all of bias"))
        for name, case in (("full", SPOILT), ("short", SHORT), ("causal", SPOILT.with_(is_causal=True)))
        for shape, grads in (
            (FULL, (*QKV, "bias")),
            (("1", "1", "1", "Lk"), (*QKV, "bias")),
            (("B", "Hq", "Lq", "1"), QKV),  # its gradient is dlse, whatever the scores are
        )
    },
    "bias with a mask": (SPOILT.with_(mask=FULL, bias=PER_KEY), (*QKV, "bias")),
    "bias of -inf": (SPOILT.with_(bias=FULL, bias_kind="inf"), (*QKV, "bias")),
    "bias without a gradient": (SHORT.with_(bias=FULL, is_causal=True), ("q", "bias", "all of bias")),
    "sink": (SPOILT.with_(sink="normal", needs_grad=(*QKV, "sink")), (*QKV, "sink")),
}


def spoilt(inputs: Inputs, where: str, value: float) -> Inputs:
    """The inputs with a value in one place of a tensor, such as the middle query or the second key, or in all."""
    name = where.rpartition(" ")[2]
    x = getattr(inputs, name).clone()
    if where in ("sink", "all of bias"):
        x[1 if where == "sink" else slice(None)] = value
    elif where == "bias":
        x[0, -1, x.shape[2] // 2, min(1, x.shape[3] - 1)] = value
    else:
        x[0, {"q": x.shape[1] // 2, "last of k": -1}.get(where, 1), 1, 2] = value
    return replace(inputs, **{name: x})


@cache
def spoilt_call(name: str, where: str, value: float) -> tuple[Inputs, Results, Inputs, tuple[Any, ...]]:
    """The inputs of a call; its results, its inputs and the gradients of the plain formula in fp64."""
    case, _ = SPOILT_CALLS[name]
    inputs = spoilt(case.build(), where, value)
    x = case.in_formula(inputs.to(torch.float64))
    gradients = formula.gradients(x.dout, None, x.q, x.k, x.v, x.mask, x.bias, **case.flags(), sink=x.sink)
    return inputs, oracle(case, inputs), x, gradients


@pytest.mark.parametrize("value", (torch.nan, torch.inf, -torch.inf))
@pytest.mark.parametrize("name", SPOILT_CALLS)
@pytest.mark.parametrize("backend", HELD_TO_NAN, indirect=True)
def test_what_is_no_number_reaches_all_that_see_it(backend: Runner, name: str, value: float) -> None:
    """Out and lse are as in the formula. Gradients are no numbers where a bad row sees a pair, perhaps elsewhere."""
    case, places = SPOILT_CALLS[name]
    for where in places:
        inputs, exact, x, everywhere = spoilt_call(name, where, value)
        got = backend(case, inputs)
        keep = formula.allowed(inputs.mask, *case.sizes(("Lq", "Lk")), case.is_causal, case.window_size, x.q.device)
        keep = torch.ones((), dtype=torch.bool, device=x.q.device) if keep is None else keep
        keep = keep.expand(case.sizes(FULL))
        for result in ("out", "lse"):
            both = got[result], exact[result]
            if where == "v":  # a backend that skips a hidden key skips its value, too
                both = tuple(y[keep[..., 1]] if result == "lse" else y[keep[..., 1].mT] for y in both)
            kinds = [torch.stack((y.isnan(), y == torch.inf, y == -torch.inf)) for y in both]
            assert torch.equal(*kinds), f"{result} of {where}"
        bad_rows = ~exact["out"].isfinite().all(-1)
        pairs = keep & bad_rows.mT[..., None]
        seen_keys = pairs.any(2).unflatten(1, (case.num_heads_k, -1)).any(2).mT
        reached = {"dq": bad_rows, "dk": seen_keys, "dv": seen_keys}
        own_rows, own_keys = (~y.isfinite().all(-1) for y in (x.q, x.k + x.v))
        own_keys = own_keys | own_rows.any(1, keepdim=True).unflatten(2, (case.num_heads_k, -1)).any(3)
        own = {"dq": own_rows, "dk": own_keys, "dv": own_keys}
        if x.bias is not None:
            reached["dbias"] = formula.grouped(pairs.double(), case.num_heads_k, case.num_heads)
            reached["dbias"] = formula.bias_gradient(reached["dbias"], x.bias, case.num_heads) > 0
        for result, most in zip((*GRADIENTS, "dsink"), everywhere, strict=False):
            if got.get(result) is None:
                continue
            finite = [y.isfinite() for y in (got[result], exact[result], most)]
            if result in ("dq", "dk", "dv"):
                finite = [y.all(-1) for y in finite]
            broken, seen, hidden = (~y for y in finite)
            # FlexAttention makes p of +inf anew from its lse, which is +inf there (docs/backends.md).
            if not (result == "dv" and backend.name == "flex" and abs(value) == torch.inf):
                assert not (seen & reached.get(result, seen) & ~broken).any(), f"{result} of {where} is finite"
            assert not (broken & ~hidden & ~own.get(result, hidden)).any(), f"{result} of {where} is not finite"


HIDING: dict[str, tuple[dict[str, Any], str]] = {
    "mask per key": ({"mask": ("B", "1", "1", "Lk")}, "bool"),
    "mask of all": ({"mask": FULL}, "bool"),
    "mask of few scores, which are all computed": ({"mask": FULL, "batch": 1}, "bool"),
    "mask with a bias": ({"mask": FULL, "bias": ("1", "Hk", "1", "Lk")}, "bool"),
    "mask with a softcap": ({"mask": FULL, "softcap": 2.0}, "bool"),
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
