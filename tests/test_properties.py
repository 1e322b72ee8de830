"""Relations that hold whatever the numbers: permutations, shifts, splits, and equal ways of saying the same."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from accuracy import Results, assert_accurate, run
from cases import Case
from conftest import Runner

import flash_dmattn
from flash_dmattn.backends import eager
from flash_dmattn.reference import chunks

FULL = ("B", "Hq", "Lq", "Lk")
# In 16 bits two orders of the same sums differ by more than what these relations would notice.
CASE = Case(mask=FULL, bias=FULL, dlse=True, seqlen_q=11, seqlen_k=17, dtype=torch.float32)
NAMES = ("out", "lse", "dq", "dk", "dv", "dbias")


def assert_close(a: Results, b: Results, names: tuple[str, ...] = NAMES) -> None:
    for name in names:
        torch.testing.assert_close(a[name], b[name], rtol=1e-4, atol=1e-5, msg=lambda text, n=name: f"{n}: {text}")


def test_permuting_keys_permutes_their_gradients(backend: Runner) -> None:
    x = CASE.build()
    order = torch.randperm(CASE.seqlen_k, generator=torch.Generator().manual_seed(1)).to(x.q.device)
    moved = replace(x, k=x.k[:, order], v=x.v[:, order], mask=x.mask[..., order], bias=x.bias[..., order])
    a, b = backend(CASE, x), backend(CASE, moved)
    assert_close({**a, "dk": a["dk"][:, order], "dv": a["dv"][:, order], "dbias": a["dbias"][..., order]}, b)


def test_permuting_the_batch_permutes_everything(backend: Runner) -> None:
    x = CASE.build()
    flipped = replace(x, **{name: getattr(x, name).flip(0) for name in ("q", "k", "v", "mask", "bias", "dout", "dlse")})
    a, b = backend(CASE, x), backend(CASE, flipped)
    assert_close({name: a[name].flip(0) for name in NAMES}, b)


def test_a_constant_per_row_of_bias_changes_nothing_but_lse(backend: Runner) -> None:
    case = CASE.with_(dlse=False)
    x = case.build()
    shift = torch.randn(x.bias.shape[:3], generator=torch.Generator().manual_seed(2)).to(x.bias).unsqueeze(-1)
    a, b = backend(case, x), backend(case, replace(x, bias=x.bias + shift))
    assert_close(a, b, ("out", "dq", "dk", "dv", "dbias"))
    torch.testing.assert_close(a["lse"] + shift.squeeze(-1), b["lse"], rtol=1e-5, atol=1e-5)
    assert a["dbias"].sum(-1).abs().max() < 1e-5, "each row of dbias sums to zero"


def test_a_mask_equals_a_bias_of_minus_infinity(backend: Runner) -> None:
    x = CASE.build()
    a = backend(CASE, x)
    b = backend(CASE, replace(x, mask=None, bias=x.bias.masked_fill(~x.mask, -torch.inf)))
    assert_close(a, b)


def test_causal_and_window_equal_their_masks(backend: Runner) -> None:
    case = CASE.with_(mask=None, dlse=False, is_causal=True, window_size=(4, -1))
    x = case.build()
    i = torch.arange(11, device=x.q.device)[:, None] + 6
    j = torch.arange(17, device=x.q.device)
    as_mask = replace(x, mask=((j <= i) & (j >= i - 4))[None, None])
    assert_close(backend(case, x), backend(case.with_(is_causal=False, window_size=None), as_mask))


def test_grouped_heads_equal_repeated_heads(backend: Runner) -> None:
    x = CASE.build()
    group = CASE.num_heads // CASE.num_heads_k
    repeated = replace(x, k=x.k.repeat_interleave(group, 2), v=x.v.repeat_interleave(group, 2))
    a, b = backend(CASE, x), backend(CASE.with_(num_heads_k=CASE.num_heads), repeated)
    summed = {name: b[name].unflatten(2, (CASE.num_heads_k, group)).sum(3) for name in ("dk", "dv")}
    assert_close(a, {**b, **summed})


def test_key_value_heads_of_mask_and_bias_repeat_over_their_group(backend: Runner) -> None:
    case = CASE.with_(mask=("B", "Hk", "Lq", "Lk"), bias=("B", "Hk", "Lq", "Lk"))
    x = case.build()
    group = case.num_heads // case.num_heads_k
    a = backend(case, x)
    b = backend(CASE, replace(x, mask=x.mask.repeat_interleave(group, 1), bias=x.bias.repeat_interleave(group, 1)))
    assert_close(a, {**b, "dbias": b["dbias"].unflatten(1, (case.num_heads_k, group)).sum(2)})


def test_splitting_keys_and_merging_by_lse_is_the_whole(backend: Runner) -> None:
    case = CASE.with_(needs_grad=(), dlse=False)
    x = case.build()
    whole = backend(case, x)
    parts = []
    for start, stop in ((0, 6), (6, 17)):
        part = case.with_(seqlen_k=stop - start)
        keys = slice(start, stop)
        parts.append(
            backend(part, replace(x, k=x.k[:, keys], v=x.v[:, keys], mask=x.mask[..., keys], bias=x.bias[..., keys]))
        )
    lse = torch.logaddexp(parts[0]["lse"], parts[1]["lse"])
    weights = [(part["lse"] - lse).exp().transpose(1, 2).unsqueeze(-1).nan_to_num(0.0) for part in parts]
    out = sum(weight * part["out"] for weight, part in zip(weights, parts, strict=True))
    torch.testing.assert_close(whole["lse"], lse, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(whole["out"], out, rtol=1e-4, atol=1e-5)


def test_results_do_not_depend_on_values_behind_the_mask(backend: Runner) -> None:
    case = CASE.with_(mask=("B", "1", "1", "Lk"))
    x = case.build()
    hidden = ~x.mask[:, 0, 0]
    loud = replace(x, k=x.k.masked_fill(hidden[..., None, None], 1e4), v=x.v.masked_fill(hidden[..., None, None], 1e4))
    a, b = backend(case, x), backend(case, loud)
    assert_close(a, b)
    assert_accurate(b, case, x)
    assert (b["dk"][hidden] == 0).all() and (b["dv"][hidden] == 0).all()


@pytest.mark.parametrize("asked", ["argument", "torch"])
@pytest.mark.parametrize("chunk_bytes", [chunks.DEFAULT_CHUNK_BYTES, 60_000], ids=["whole rows", "split rows"])
def test_repeats_of_a_deterministic_call_on_eager_are_equal_bit_by_bit(asked: str, chunk_bytes: int) -> None:
    small = {"batch": 1, "num_heads": 2, "num_heads_k": 1, "dtype": torch.bfloat16}
    case = CASE.with_(bias=("1", "Hk", "1", "Lk"), seqlen_q=70, seqlen_k=300, **small)
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
        assert all(torch.equal(first[name], other[name]) for name in NAMES)


def test_the_same_call_gives_the_same_bits(backend: Runner) -> None:
    case = CASE.with_(bias=("1", "Hk", "1", "Lk"), dtype=torch.bfloat16)
    x = case.build()
    torch.use_deterministic_algorithms(True)
    try:
        a, b = backend(case, x), backend(case, x)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a[name], b[name]) for name in NAMES)
