"""Sums of probabilities by key and by listed key, and the loss of a selector, against p in fp64."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cases import DEVICE, Case
from conftest import needs_triton
from forked import interpret
from statistics_calls import (
    TRITON_CALLS,
    check_key_sums,
    check_sequences,
    exact_list_sums,
    judge,
    listed,
    plain_list_sums,
)
from torch import Tensor

import flash_dmattn
from flash_dmattn import BackendUnsupportedError, Sequences, attention, biases, statistics
from flash_dmattn.backends.cuda import rules as cuda_rules
from flash_dmattn.dispatch.selection import select_pair
from flash_dmattn.explanation import explain_problem
from flash_dmattn.masks import IndexScores, PreparedMask
from flash_dmattn.problem import NeedsGrad, replaced

CALLS, LIST_CALLS, SEQUENCE_CALLS = 70, 60, 50


@pytest.mark.parametrize("heads", ("k", "q"))
def test_key_sums_of_random_calls(heads: Any) -> None:
    for number in range(CALLS):
        check_key_sums(number, heads)


def test_key_sums_of_sequences_in_every_layout() -> None:
    layouts = {check_sequences(number) for number in range(SEQUENCE_CALLS)}
    assert layouts - {None} == {"packed", "padded", "paged", "paged_packed"}


def test_sums_of_keys_add_up() -> None:
    """A row gives its weight, less the share of its sink, once; a row without keys gives nothing."""
    case = Case(mask=("B", "1", "Lq", "Lk"), mask_kind="empty_rows", sink="normal", softcap=3.0)
    x = case.build("cpu")
    shared: dict[str, Any] = {"softcap": 3.0, "sink": x.sink}
    _, lse = attention(x.q, x.k, x.v, x.mask, return_lse=True, **shared)
    weights = torch.rand(lse.shape)
    share = torch.exp(x.sink[:, None] - lse)
    sums = statistics.key_sums(x.q, x.k, lse, x.mask, weights=weights, heads="q", **shared)
    torch.testing.assert_close(sums.sum(-1), (weights * (1 - share)).sum(-1))
    grouped = statistics.key_sums(x.q, x.k, lse, x.mask, weights=weights, **shared)
    torch.testing.assert_close(grouped, sums.unflatten(1, (2, 2)).sum(2))
    ones = statistics.key_sums(x.q, x.k, lse, x.mask, **shared)
    torch.testing.assert_close(ones, statistics.key_sums(x.q, x.k, lse, x.mask, weights=torch.ones_like(lse), **shared))
    last = torch.zeros_like(lse)
    last[..., -1:] = 1.0
    at_last = {"weights": last, "is_causal": True, **shared}
    alone = statistics.key_sums(x.q[:, -1:], x.k, lse[..., -1:], x.mask[:, :, -1:], is_causal=True, **shared)
    torch.testing.assert_close(statistics.key_sums(x.q, x.k, lse, x.mask, **at_last), alone)


def test_other_keys_count_by_weights() -> None:
    """Keys that a call does not have, as docstrings say."""
    q, k = torch.randn(1, 5, 4, 8), torch.randn(1, 9, 2, 8)
    _, lse_of_all = attention(q, k, k, return_lse=True)
    (_, first), (_, rest) = (attention(q, part, part, return_lse=True) for part in k.split(6, 1))
    sums = statistics.key_sums(q, k[:, :6], first, weights=torch.exp(first - first.logaddexp(rest)))
    torch.testing.assert_close(sums, statistics.key_sums(q, k, lse_of_all)[..., :6])
    lists = PreparedMask.from_lists(torch.arange(6).expand(5, -1), seqlen_k=9)
    teacher = statistics.list_sums(q, k, first, lists, weights=torch.exp(first - lse_of_all))
    torch.testing.assert_close(teacher.sum(2).flatten(), sums.sum(1).flatten())


@pytest.mark.parametrize("has_bias", (False, True))
def test_rows_without_keys_count_nothing(has_bias: bool) -> None:
    """Their weight may be NaN, as the weight for other keys is that they do not see either."""
    case = Case(mask=("B", "1", "Lq", "Lk"), mask_kind="empty_rows", bias=("1", "Hq", "Lq", "Lk") if has_bias else None)
    x = case.build("cpu")
    _, lse = attention(x.q, x.k, x.v, x.mask, x.bias, return_lse=True)
    weights = torch.exp(lse - lse.logaddexp(torch.full_like(lse, -torch.inf)))
    assert weights.isnan().any()
    sums = statistics.key_sums(x.q, x.k, lse, x.mask, x.bias, weights=weights)
    torch.testing.assert_close(sums, statistics.key_sums(x.q, x.k, lse, x.mask, x.bias))


def test_a_call_of_attention_leaves_no_plan_for_sums() -> None:
    """The same call, with a column of zeros for v and a bias of zeros, has no backward pass."""
    q, k = torch.randn(1, 5, 2, 8), torch.randn(1, 7, 2, 8)
    with torch.no_grad():
        _, lse = attention(q, k, torch.zeros(1, 7, 2, 1), None, torch.zeros(1, 2, 1, 7), return_lse=True)
    torch.testing.assert_close(statistics.key_sums(q, k, lse).sum(), torch.tensor(10.0))


@pytest.mark.parametrize("has_lists", (False, True))
def test_sums_of_many_rows_in_float16(has_lists: bool) -> None:
    """One key gets 70000, which float16 does not hold."""
    q, k = torch.zeros(1, 35000, 2, 8, dtype=torch.float16), torch.zeros(1, 1, 1, 8, dtype=torch.float16)
    lse = torch.zeros(1, 2, 35000)
    mask = PreparedMask.from_lists(torch.zeros(35000, 1, dtype=torch.long), seqlen_k=1) if has_lists else None
    for heads, wanted in (("k", [70000.0]), ("q", [35000.0, 35000.0])):
        sums = statistics.key_sums(q, k, lse, mask, heads=heads)  # type: ignore[arg-type]
        torch.testing.assert_close(sums.flatten(), torch.tensor(wanted), rtol=2**-11, atol=0.0)


def test_list_sums_of_random_calls() -> None:
    for number in range(LIST_CALLS):
        case = listed(number)
        inputs, mask, bias = case.build()
        shared: dict[str, Any] = {"softcap": case.softcap, "sink": inputs.sink, "backend": "eager"}
        _, lse = attention(inputs.q, inputs.k, inputs.v, mask, bias, return_lse=True, **shared)
        weights = torch.rand(lse.shape, generator=torch.Generator().manual_seed(number)).to(lse)
        got = statistics.list_sums(inputs.q, inputs.k, lse, mask, bias, weights=weights, **shared)
        exact, plain = exact_list_sums(case, weights), plain_list_sums(case, weights)
        judge(got, exact, plain, exact, lse, inputs.q, str(case))


def test_lists_of_latent_heads_run_on_triton() -> None:
    """Both the call and its teacher, whose values are one column."""
    q, k = (torch.empty(1, 6, heads, 576, dtype=torch.bfloat16) for heads in (16, 1))
    lists = PreparedMask.from_lists(torch.zeros(6, 4, dtype=torch.long), seqlen_k=6)
    for width in (512, 1):
        v = k[..., :width].clone().requires_grad_()
        explained = flash_dmattn.explain(q, k, v, lists, device="sm_90")
        assert (explained.forward, explained.backward) == ("triton", "triton")


@pytest.mark.parametrize(("heads", "heads_k"), ((64, 8), (16, 1), (4, 4)))
def test_sums_run_on_backends_that_say_so(heads: int, heads_k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A column of v for each head of a group is as wide as values that cuda takes, but in fp32."""
    monkeypatch.setattr(cuda_rules, "installed_instances", lambda: None)
    described = {"kv_heads": heads_k, "head_dim_v": heads // heads_k, "return_lse": True, "grad": True}
    problem = explain_problem((1, 4096, heads, 128), is_causal=True, device="sm_90", **described).problem
    asked = replaced(problem, needs_grad=NeedsGrad(v=True), flags=replaced(problem.flags, sums=True))
    chosen = select_pair(asked, "auto")
    assert (chosen.forward.name, chosen.backward and chosen.backward.name) == ("triton", "triton")


@pytest.mark.parametrize("value", (torch.inf, torch.nan))
def test_a_weight_that_is_no_number_stays_in_its_head(value: float) -> None:
    q, k = torch.randn(1, 5, 4, 8), torch.randn(1, 7, 2, 8)
    _, lse = attention(q, k, k, return_lse=True)
    weights = torch.ones(1, 4, 5)
    weights[0, 1, 2] = value
    sums = statistics.key_sums(q, k, lse, weights=weights, heads="q")
    assert sums[:, [0, 2, 3]].isfinite().all() and not sums[:, 1].isfinite().any()


def test_list_sums_add_up_to_the_heads_of_a_list() -> None:
    q, k = torch.randn(2, 6, 4, 8), torch.randn(2, 9, 2, 8)
    index = torch.rand(2, 2, 6, 9).argsort(-1)[..., :4]
    index[:, :, 2] = -1
    lists = PreparedMask.from_lists(index, seqlen_k=9)
    _, lse = attention(q, k, k, lists, return_lse=True)
    teacher = statistics.list_sums(q, k, lse, lists)
    wanted = torch.full((2, 2, 6), 2.0)
    wanted[:, :, 2] = 0.0
    torch.testing.assert_close(teacher.sum(-1), wanted)
    assert torch.equal(teacher[:, :, 2], torch.zeros(2, 2, 4))


def test_heads_share_values_by_groups() -> None:
    """Lists of each query head, and values of each key-value head."""
    q, k, values = torch.randn(1, 5, 4, 8), torch.randn(1, 9, 2, 8), 3 * torch.randn(2, 5, 3)
    lists = PreparedMask.from_lists(torch.rand(1, 4, 5, 9).argsort(-1)[..., :3], seqlen_k=9)
    shared, own = (biases.ListBias(x) for x in (values, values.repeat_interleave(2, 0)))
    _, lse = attention(q, k, k, lists, own, return_lse=True)
    torch.testing.assert_close(*(statistics.list_sums(q, k, lse, lists, bias) for bias in (shared, own)))


@pytest.mark.parametrize("layout", ("packed", "padded"))
def test_list_sums_beside_sequences(layout: str) -> None:
    """Each sequence has the teacher of a call of its own, in the shape of the scores of a selector."""
    lengths, dim = (5, 0, 1, 8), 8
    q, k = torch.randn(14, 4, dim), torch.randn(14, 2, dim)
    edges = torch.tensor((0, *lengths)).cumsum(0)
    if layout == "packed":
        sequences = Sequences.packed(edges, max_seqlen_q=8)
        selector = torch.randn(1, 14, 2, 4), torch.randn(1, 14, 4), torch.rand(1, 14, 2)
        own_q, own_k = q, k
    else:
        sequences = Sequences.padded(seqlens_q=torch.tensor(lengths), seqlens_k=torch.tensor(lengths))
        selector = torch.randn(4, 8, 2, 4), torch.randn(4, 8, 4), torch.rand(4, 8, 2)
        own_q, own_k = (
            torch.stack([F.pad(part, (0, 0, 0, 0, 0, 8 - len(part)), value=torch.nan) for part in x.split(lengths)])
            for x in (q, k)
        )
    scores, sizes = IndexScores(*selector), (1, 1, 14, 3) if layout == "packed" else (4, 1, 8, 3)
    used = torch.tensor(lengths)
    number = used.repeat_interleave(used)[:, None] if layout == "packed" else used.view(4, 1, 1, 1)
    index = (torch.rand(sizes) * (number + 1)).long() - 1
    lists = PreparedMask.from_lists(index, seqlen_q=sizes[2], seqlen_k=sizes[2], is_causal=True, sequences=sequences)
    _, lse = attention(own_q, own_k, own_k.nan_to_num(), lists, return_lse=True, sequences=sequences)
    teacher = statistics.list_sums(own_q, own_k, lse, lists, sequences=sequences)
    assert teacher.shape == scores.at(lists).shape
    for s, (first, length) in enumerate(zip(edges, lengths)):
        rows, at = slice(first, first + length), (0, 0) if layout == "packed" else (s, 0)
        places = rows if layout == "packed" else slice(0, length)
        index = lists.index[at][places].long()
        own = PreparedMask.from_lists(index, seqlen_k=length, is_causal=True)
        one_q, one_k = q[None, rows], k[None, rows]
        _, lse = attention(one_q, one_k, one_k, own, return_lse=True)
        torch.testing.assert_close(teacher[at][places], statistics.list_sums(one_q, one_k, lse, own)[0, 0])
    loss = statistics.selector_loss(scores.at(lists), teacher, lists)
    assert loss.shape == teacher.shape[:1] + teacher.shape[2:3] and loss.isfinite().all() and (loss > -1e-6).all()


def test_batch_dims() -> None:
    q, k, bias = torch.randn(2, 3, 5, 4, 8), torch.randn(2, 3, 7, 2, 8), torch.randn(2, 1, 1, 5, 7)
    lists = PreparedMask.from_lists(torch.randint(-1, 7, (2, 3, 1, 5, 4)), seqlen_k=7)
    flat_lists = PreparedMask.from_lists(lists.index.long(), seqlen_k=7)
    for mask, added, flat_mask in ((None, None, None), (None, bias, None), (lists, None, flat_lists)):
        _, lse = attention(q, k, k, mask, added, return_lse=True)
        flat_bias = None if added is None else added.expand(2, 3, 1, 5, 7).flatten(0, 1)
        flat = (q.flatten(0, 1), k.flatten(0, 1), lse.flatten(0, 1), flat_mask, flat_bias)
        sums = statistics.key_sums(q, k, lse, mask, added)
        torch.testing.assert_close(sums, statistics.key_sums(*flat).unflatten(0, (2, 3)))
        if mask is not None:
            teacher, scores = statistics.list_sums(q, k, lse, mask), torch.randn(2, 3, 1, 5, 4)
            flat_teacher = statistics.list_sums(*flat[:4])
            torch.testing.assert_close(teacher, flat_teacher.unflatten(0, (2, 3)))
            loss = statistics.selector_loss(scores.flatten(0, 1), flat_teacher, flat_mask)
            torch.testing.assert_close(statistics.selector_loss(scores, teacher, mask), loss.unflatten(0, (2, 3)))


@pytest.mark.parametrize("sizes", ((1, 0, 5), (1, 5, 0), (0, 5, 5), (2, 1, 1)))
def test_sizes_of_nothing_and_of_one(sizes: tuple[int, int, int]) -> None:
    batch, seqlen_q, seqlen_k = sizes
    q, k = torch.randn(batch, seqlen_q, 4, 8), torch.randn(batch, seqlen_k, 2, 8)
    for bias in (None, torch.randn(1, 4, seqlen_q, seqlen_k)):
        _, lse = attention(q, k, k, None, bias, return_lse=True)
        for heads, number in (("k", 2), ("q", 4)):
            sums = statistics.key_sums(q, k, lse, None, bias, heads=heads)  # type: ignore[arg-type]
            wanted = torch.full((batch, number, seqlen_k), float(seqlen_q * 4 // number) if seqlen_k == 1 else 0.0)
            torch.testing.assert_close(sums, wanted)
    lists = PreparedMask.from_lists(torch.full((batch, 1, seqlen_q, 2), min(seqlen_k, 1) - 1), seqlen_k=seqlen_k)
    _, lse = attention(q, k, k, lists, return_lse=True)
    teacher = statistics.list_sums(q, k, lse, lists)
    assert teacher.shape == (batch, 1, seqlen_q, 2)
    torch.testing.assert_close(teacher.sum(), torch.tensor(4.0 * batch * seqlen_q if seqlen_k else 0.0))


def test_results_have_no_gradient_and_equal_bits() -> None:
    q, k = torch.randn(2, 40, 4, 8, requires_grad=True), torch.randn(2, 50, 2, 8, requires_grad=True)
    bias = biases.Relative(torch.randn(4, 100, requires_grad=True), 60)
    lists = PreparedMask.from_lists(torch.randint(-1, 50, (40, 6)), seqlen_k=50)
    values = biases.ListBias(torch.randn(1, 40, 6, requires_grad=True))
    for function, mask, added in (
        (statistics.key_sums, None, None),
        (statistics.key_sums, None, bias),
        (statistics.key_sums, lists, values),
        (statistics.list_sums, lists, values),
    ):
        out, lse = attention(q, k, k, mask, added, return_lse=True)
        results = [function(q, k, lse, mask, added, deterministic=True) for _ in range(2)]  # type: ignore[operator]
        assert torch.equal(*results) and not results[0].requires_grad
        with torch.inference_mode():
            assert torch.equal(function(q, k, lse, mask, added), results[0])  # type: ignore[operator]
        out.sum().backward()  # the calls have left the graph of attention as it was


def test_transforms_and_compilers() -> None:
    q, k, weights = torch.randn(3, 2, 5, 4, 8), torch.randn(3, 2, 7, 2, 8), torch.rand(3, 2, 4, 5)
    _, lse = attention(q, k, k, is_causal=True, return_lse=True)

    def sums(q: Tensor, k: Tensor, lse: Tensor, weights: Tensor) -> Tensor:
        return statistics.key_sums(q, k, lse, weights=weights, heads="q", is_causal=True)

    wanted = torch.stack([sums(*each) for each in zip(q, k, lse, weights)])
    torch.testing.assert_close(torch.vmap(sums)(q, k, lse, weights), wanted)
    gradient = torch.func.grad(lambda q: sums(q, k[0], lse[0], weights[0]).sum() + q.sum())(q[0])
    assert torch.equal(gradient, torch.ones_like(q[0]))
    compiled = torch.compile(sums, backend="eager", fullgraph=torch.__version__ >= "2.11")
    torch.testing.assert_close(compiled(q[0], k[0], lse[0], weights[0]), wanted[0])
    with torch.autocast("cpu", torch.bfloat16):
        low = sums(q[0], k[0], lse[0], weights[0])
    assert low.dtype == torch.float32 and 0 < (low - wanted[0]).abs().max() < 0.1


@needs_triton
def test_on_triton() -> None:
    if DEVICE == "cpu":
        said = interpret("statistics_calls.py")
    else:  # CUDA does not begin anew in a forked process
        script = Path(__file__).with_name("statistics_calls.py")
        said = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=True).stdout
    assert f"{10 + 2 * len(TRITON_CALLS)} passed, 0 failed" in said


def arguments(**changes: Any) -> dict[str, Any]:
    """Arguments of `key_sums` that are right but for some changes."""
    q, k = torch.zeros(2, 5, 4, 8), torch.zeros(2, 7, 2, 8)
    return {"q": q, "k": k, "lse": torch.zeros(2, 4, 5), **changes}


LISTS = PreparedMask.from_lists(torch.zeros(2, 1, 5, 3, dtype=torch.long), seqlen_k=7)
BAD_KEY_SUMS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "lse of another shape": ({"lse": torch.zeros(2, 5, 4)}, ValueError, r"lse has shape .* needs \(2, 4, 5\)"),
    "lse in 16 bits": ({"lse": torch.zeros(2, 4, 5).half()}, TypeError, "lse has dtype float16; it needs float32"),
    "lse in 64 bits": ({"lse": torch.zeros(2, 4, 5).double()}, TypeError, "lse has dtype float64; it needs float32"),
    "no lse": ({"lse": None}, TypeError, "lse is a NoneType; it needs to be a floating-point torch.Tensor"),
    "weights that broadcast": ({"weights": torch.ones(4, 1)}, ValueError, r"weights.expand\(2, 4, 5\)"),
    "weights of another shape": ({"weights": torch.ones(2, 5, 4)}, ValueError, "weights has shape"),
    "weights of bools": ({"weights": torch.ones(2, 4, 5) > 0}, TypeError, "weights has dtype bool"),
    "heads": ({"heads": "x"}, ValueError, "heads is 'x'; it needs to be \"k\" or \"q\""),
    "q of two dims": ({"q": torch.zeros(5, 8)}, ValueError, "q has shape"),
    "q nested": ({"q": torch.nested.nested_tensor([torch.zeros(2, 4, 8)] * 2)}, TypeError, "nested tensor"),
    "k of other heads": ({"k": torch.zeros(2, 7, 3, 8)}, ValueError, "heads of q need to be a multiple"),
    "a mask of numbers": ({"mask": torch.zeros(5, 7)}, TypeError, "mask has dtype float32"),
    "the formula": ({"backend": "reference"}, BackendUnsupportedError, "the call sums probabilities"),
    "a kernel that refuses": ({"backend": "sdpa"}, BackendUnsupportedError, "the call sums probabilities"),
}  # fmt: skip
BAD_LIST_SUMS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "no lists": ({"lists": torch.ones(5, 7) > 0}, TypeError, "lists is a Tensor; it needs"),
    "lists for other keys": ({"k": torch.zeros(2, 8, 2, 8)}, ValueError, "seqlen_k 7; it needs that of the call, 8"),
    "a bias by distance": ({"bias": biases.Relative(torch.zeros(1, 20), 9)}, TypeError, "bias is a Relative"),
    "values of other lists": ({"bias": biases.ListBias(torch.zeros(1, 5, 4))}, ValueError, "bias.values has shape"),
    "values of other heads": ({"bias": biases.ListBias(torch.zeros(3, 5, 3))}, ValueError, "bias.values has"),
    "weights": ({"weights": torch.ones(4, 5)}, ValueError, "weights has shape"),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD_KEY_SUMS)
def test_key_sums_refuses_in_words(what: str) -> None:
    changes, error, message = BAD_KEY_SUMS[what]
    with pytest.raises(error, match=message):
        statistics.key_sums(**arguments(**changes))


@pytest.mark.parametrize("what", BAD_LIST_SUMS)
def test_list_sums_refuses_in_words(what: str) -> None:
    changes, error, message = BAD_LIST_SUMS[what]
    with pytest.raises(error, match=message):
        statistics.list_sums(**arguments(lists=LISTS, **changes) if "lists" not in changes else arguments(**changes))


def test_pages_are_refused_where_lists_or_prepared_masks_name_them() -> None:
    pages = Sequences.paged(torch.tensor([[0, 1]]), torch.tensor([7]), max_seqlen_k=8)
    q, k, lse = torch.zeros(1, 1, 4, 8), torch.zeros(2, 4, 2, 8), torch.zeros(1, 4, 1)
    lists = PreparedMask.from_lists(torch.zeros(1, 1, 1, 3, dtype=torch.long), seqlen_k=8)
    with pytest.raises(ValueError, match="list_sums needs packed or padded keys"):
        statistics.list_sums(q, k, lse, lists, sequences=pages)
    prepared = PreparedMask.from_lists(
        torch.zeros(1, 1, 1, 3, dtype=torch.long), sequences=pages, seqlen_q=1, seqlen_k=8
    )
    with pytest.raises(ValueError, match="prepared for keys in pages"):
        statistics.key_sums(q, k, lse, prepared, sequences=pages)


def loss_inputs(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, PreparedMask]:
    """Scores, a teacher and lists: some lists have few keys, the same key twice, or none."""
    random_numbers = torch.Generator().manual_seed(0)
    index = torch.rand(2, 1, 6, 9, generator=random_numbers).argsort(-1)[..., :4]
    index[0, 0, 1, 2:] = -1
    index[1, 0, 2] = -1
    index[1, 0, 3, 1] = index[1, 0, 3, 0]
    lists = PreparedMask.from_lists(index, seqlen_k=9)
    scores = torch.randn(2, 1, 6, 4, generator=random_numbers, dtype=dtype)
    teacher = torch.rand(2, 1, 6, 4, generator=random_numbers, dtype=dtype).masked_fill(lists.index < 0, 0.0)
    teacher[0, 0, 4, 1] = 0.0  # its key has probability 0
    teacher[1, 0, 5] = 0.0  # nothing is taught
    return scores, teacher, lists


def test_selector_loss_is_the_divergence() -> None:
    scores, teacher, lists = loss_inputs()
    loss = statistics.selector_loss(scores, teacher, lists)
    for b, i in ((0, 0), (0, 1), (0, 4), (1, 3)):
        kept = lists.index[b, 0, i] >= 0
        tau = teacher[b, 0, i][kept] / teacher[b, 0, i].sum()
        wanted = F.kl_div(scores[b, 0, i][kept].log_softmax(-1), tau, reduction="sum")
        torch.testing.assert_close(loss[b, i], wanted)
    assert loss[1, 2] == 0.0 == loss[1, 5]
    same = statistics.selector_loss(teacher.clamp_min(1e-300).log(), 7.0 * teacher, lists)
    torch.testing.assert_close(same, torch.zeros_like(same))  # whoever imitates it has none, whatever its scale is


def test_selector_loss_has_a_gradient_and_no_nan() -> None:
    scores, teacher, lists = loss_inputs()
    assert torch.autograd.gradcheck(lambda x: statistics.selector_loss(x, teacher, lists), scores.requires_grad_())
    assert torch.autograd.gradgradcheck(lambda x: statistics.selector_loss(x, teacher, lists), scores)
    (wanted,) = torch.autograd.grad(statistics.selector_loss(scores, teacher, lists).sum(), scores)
    taught = (teacher.sum(-1, keepdim=True) > 0) & (lists.index >= 0)
    tau = teacher / teacher.sum(-1, keepdim=True)
    pi = scores.masked_fill(lists.index < 0, -torch.inf).softmax(-1)
    torch.testing.assert_close(wanted, torch.where(taught, pi - tau, 0.0))
    spoiled = torch.where(lists.index < 0, torch.nan, scores).detach().requires_grad_()
    bad_teacher = torch.where(lists.index < 0, torch.nan, teacher).requires_grad_()
    loss = statistics.selector_loss(spoiled, bad_teacher, lists)
    loss.sum().backward()
    assert torch.equal(spoiled.grad, wanted) and bad_teacher.grad is None
    for x in (1e30, -1e30):
        assert statistics.selector_loss(torch.full_like(teacher, x), teacher, lists).isfinite().all()


def test_selector_loss_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    scores, teacher, lists = loss_inputs(torch.float32)
    scores = scores.bfloat16().requires_grad_()
    results = []
    for elements in (statistics.CHUNK_ELEMENTS, 20):
        monkeypatch.setattr(statistics, "CHUNK_ELEMENTS", elements)
        loss = statistics.selector_loss(scores, teacher, lists)
        results.append((loss, *torch.autograd.grad(loss.sum(), scores)))
    assert results[0][0].dtype == torch.float32
    assert all(torch.equal(x, y) for x, y in zip(*results))


BAD_LOSS: dict[str, tuple[tuple[Any, ...], type[Exception], str]] = {
    "scores of other lists": ((torch.zeros(2, 1, 5, 4), torch.zeros(2, 1, 5, 4), LISTS), ValueError, "scores has"),
    "scores of three dims": ((torch.zeros(1, 5, 3), torch.zeros(1, 5, 3), LISTS), ValueError, "scores has shape"),
    "a teacher of others": ((torch.zeros(2, 1, 5, 3), torch.zeros(1, 1, 5, 3), LISTS), ValueError, "teacher has shape"),
    "a teacher of ints": ((torch.zeros(2, 1, 5, 3), torch.zeros(2, 1, 5, 3).int(), LISTS), TypeError, "has dtype"),
    "no lists": ((torch.zeros(2, 1, 5, 3), torch.zeros(2, 1, 5, 3), None), TypeError, "lists is a NoneType"),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD_LOSS)
def test_selector_loss_refuses_in_words(what: str) -> None:
    passed, error, message = BAD_LOSS[what]
    with pytest.raises(error, match=message):
        statistics.selector_loss(*passed)


def test_a_selector_learns_the_teacher() -> None:
    """Gradients go through the scores of a selector and not through its teacher."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 24, 2, 8, generator=generator, requires_grad=True) for _ in range(3))
    index = [torch.randn(1, 24, *dims, generator=generator, requires_grad=True) for dims in ((2, 4), (4,), (2,))]
    optimizer, losses = torch.optim.Adam(index, lr=0.05), []
    for _ in range(30):
        scores = IndexScores(*index, relu=False)
        lists = PreparedMask.from_topk_lists(scores, 8, is_causal=True)
        _, lse = attention(q, k, v, lists, return_lse=True)
        loss = statistics.selector_loss(scores.at(lists), statistics.list_sums(q, k, lse, lists), lists).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0] and q.grad is None and k.grad is None


def test_the_module_is_public() -> None:
    assert "statistics" in dir(flash_dmattn) and flash_dmattn.statistics is statistics
    assert random.choice(statistics.__all__) in vars(statistics)
