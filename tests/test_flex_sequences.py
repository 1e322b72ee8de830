"""Sequences on the flex backend: its results, what it compiles and how often, and its rules."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from cases import DEVICE
from flex_fixture import ROUNDED, ROUNDS_GRADIENTS, compiled_on_cpu, eager_flex
from sequence_calls import SequenceCall, Tokens, assert_accurate, draw, run, spoiled
from test_flex_graph import Counter
from torch import Tensor

from flash_dmattn import Sequences, attention
from flash_dmattn.backends.flex import backend as flex
from flash_dmattn.backends.flex import graph
from flash_dmattn.explanation import Explanation, explain_problem
from flash_dmattn.problem import SequenceSpec

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="flex on a GPU is checked by tests/flex_check.py")

SHORT, LONG = (0, 1, 2, 5, 17, 33), (0, 1, 31, 127, 128, 129, 300)


def drawn(number: int) -> SequenceCall:
    """A call that flex accepts; every third has sequences of more than a tile."""
    layout = ("packed", "packed", "padded")[number // 3 % 3]
    lengths = LONG if number % 3 == 0 else SHORT
    call = draw(number, layout, dtypes=(torch.float32,), lengths=lengths, head_dims=(16,))
    return replace(call, flags=call.flags | {"dropout_p": 0.0})


@pytest.mark.parametrize("part", range(6))
def test_random_calls_with_nan_in_all_rows_of_no_sequence(part: int) -> None:
    with eager_flex():
        for number in range(500 + part, 590, 6):
            call = drawn(number)
            assert_accurate(run(spoiled(call), "flex"), call)


FORMS = {
    **{f"by position {form}": form for form in itertools.product((1, 3), (1, 2, 4), (1, 140), (1, 130))},
    **{f"packed rows {form}": form for form in itertools.product((1, 2, 4), (301,), (1, 130))},
    **{f"packed keys {form}": form for form in ((1, 1, 171), (2, 1, 171), (4, 1, 171))},
}


def call_with(bias: tuple[int, ...], mask: tuple[int, ...] | None, **flags: Any) -> SequenceCall:
    """Three sequences, one without queries, with rows of none between and behind, a bias and a mask of these shapes."""
    generator = torch.Generator().manual_seed(sum(bias))

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    lengths = ((0, 139, 0, 120), (141, 0, 128, 9), (141, 133, 140, 30))
    sequences = Sequences.packed(
        torch.tensor([0, 141, 141, 280]), torch.tensor([0, 128, 140, 171]), max_seqlen_q=140, max_seqlen_k=130,
        seqlens_q=torch.tensor([139, 0, 133]), seqlens_k=torch.tensor([120, 9, 30]),
    )  # fmt: skip
    allowed = None if mask is None else torch.rand(mask, generator=generator) < 0.7
    numbers = {"is_causal": False, "window_size": None, "softcap": 0.0, "softmax_scale": None, "dropout_p": 0.0} | flags
    q, k, v = normal(301, 4, 16), normal(171, 2, 16), normal(171, 2, 24)
    tensors = (q, k, v, allowed, normal(*bias), normal(4))
    upstream, needs_grad = (normal(301, 4, 24), normal(4, 301)), ("q", "k", "v", "bias", "sink")
    return SequenceCall(*tensors, sequences, lengths, numbers, *upstream, needs_grad, f"call_with({bias}, {mask})")


@pytest.mark.parametrize("name", FORMS)
def test_every_form_of_a_bias_and_of_a_mask(name: str) -> None:
    """A bias of each form with a mask of the same one, and of another."""
    shapes = list(FORMS.values())
    other = shapes[(shapes.index(FORMS[name]) * 7 + 3) % len(shapes)]
    with eager_flex():
        for mask, flags in ((FORMS[name], {"is_causal": True}), (other, {"window_size": (60, 5), "softcap": 2.0})):
            call = call_with(FORMS[name], mask, **flags)
            assert_accurate(run(spoiled(call), "flex"), call)


def unread(call: SequenceCall) -> Tensor:
    """Mark the values of a bias that no pair of a sequence has."""
    tokens, ones = Tokens(call), torch.ones_like(call.bias).requires_grad_()
    pairs = tokens.scores(ones)
    same = tokens.q[:, :1] == tokens.k[:, 0]
    (read,) = torch.autograd.grad((pairs * same).sum(), ones)
    return read == 0


@pytest.mark.parametrize(
    "shape", [(3, 2, 140, 130), (1, 1, 140, 130), (3, 4, 1, 130), (2, 301, 130), (4, 1, 171)], ids=str
)
def test_nothing_is_read_where_there_is_no_pair(shape: tuple[int, ...]) -> None:
    """NaN in rows of no sequence, in what arrives there, and in values of a bias of no pair, changes no bit."""
    call = call_with(shape, None, is_causal=True)
    bad = spoiled(call)
    none = unread(call)
    is_empty = Tokens(call).q[:, 0] < 0
    assert is_empty.any() and (none.any() or shape[0] == 1)
    bad = replace(bad, bias=call.bias.masked_fill(none, torch.nan), dlse=call.dlse.masked_fill(is_empty, torch.nan))
    with eager_flex():
        wanted, results = run(call, "flex"), run(bad, "flex")
    for name, x in wanted.items():
        assert torch.equal(x, results[name]), name
    assert not results["dbias"][none].any()
    assert not results["out"][is_empty].any() and (results["lse"][:, is_empty] == -torch.inf).all()


@pytest.mark.skipif(ROUNDS_GRADIENTS, reason=ROUNDED)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "shape", [(1, 4, 140, 130), (2, 301, 130), (1, 2, 1, 130), (4, 1, 171), (3, 1, 140, 1)], ids=str
)
def test_a_bias_of_16_bits_has_its_gradient_summed_in_32(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    call = replace(call_with(shape, None), sink=None, needs_grad=("q", "k", "v", "bias")).to(dtype)
    call = replace(call, dlse=call.dlse.float())
    with eager_flex():
        assert_accurate(run(spoiled(call), "flex"), call)


@pytest.mark.parametrize("lengths", [((0, 0), (0, 0)), ((0, 2), (0, 0)), ((0, 0), (0, 3)), ((2, 0), (0, 3))], ids=str)
@pytest.mark.parametrize("spare", [0, 2])
@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_calls_without_a_pair(lengths: tuple[tuple[int, int], ...], spare: int, layout: str) -> None:
    """No query, no key, or none in one sequence; with a sink, and a bias that may have no elements."""
    used_q, used_k = (torch.tensor(n) for n in lengths)
    most_q, most_k = (int(n.max()) for n in (used_q, used_k))
    if layout == "packed":
        edges = [torch.nn.functional.pad(n.cumsum(0), (1, 0)) for n in (used_q, used_k)]
        sequences = Sequences.packed(*edges, max_seqlen_q=most_q, max_seqlen_k=most_k)
        shape_q, shape_k, shape_lse = (int(used_q.sum()) + spare,), (int(used_k.sum()) + spare,), ()
    else:
        sequences = Sequences.padded(used_k, used_q)
        most_q, most_k = most_q + spare, most_k + spare
        shape_q, shape_k, shape_lse = (2, most_q), (2, most_k), (2,)
    q = torch.randn(*shape_q, 4, 16, requires_grad=True)
    k, v = (torch.randn(*shape_k, 2, 16, requires_grad=True) for _ in range(2))
    bias, sink = (torch.randn(shape, requires_grad=True) for shape in ((1, 1, most_q, most_k), (4,)))
    leaves = (q, k, v, bias, sink)
    dout, dlse = torch.randn(q.shape), torch.randn(*shape_lse, 4, shape_q[-1])
    results = []
    for backend in ("flex", "eager"):
        with eager_flex():
            out, lse = attention(q, k, v, None, bias, sink=sink, sequences=sequences, return_lse=True, backend=backend)
            upstream = (dout, dlse.masked_fill(lse == -torch.inf, 0.0))
            results.append((out, lse, *torch.autograd.grad((out, lse), leaves, upstream)))
    for x, y in zip(*results, strict=True):
        torch.testing.assert_close(x, y)


def test_no_sequences_at_all() -> None:
    q, sink = torch.randn(3, 4, 16, requires_grad=True), torch.randn(4, requires_grad=True)
    none = Sequences.packed(torch.tensor([0]), max_seqlen_q=4)
    with eager_flex():
        out, lse = attention(q, q, q, sink=sink, sequences=none, return_lse=True, backend="flex")
    assert not out.any() and (lse == -torch.inf).all()
    for x in torch.autograd.grad(out.sum(), (q, sink)):
        assert not x.any()


# Compilations.


def one_class(seed: int, bias: str, mask: str) -> None:
    """A packed call, both passes, of lengths and a number of sequences that go by the seed."""
    rng = random.Random(seed)
    number = rng.randint(2, 7)
    used_q, used_k = ([rng.choice((0, 1, 5, 130, 260)) for _ in range(number)] + [3] for _ in range(2))
    edges = [torch.tensor([0, *itertools.accumulate(n)]) for n in (used_q, used_k)]
    most_q, most_k = max(used_q) + rng.choice((0, 3)), max(used_k) + rng.choice((0, 4))
    sequences = Sequences.packed(*edges, max_seqlen_q=most_q, max_seqlen_k=most_k)
    tokens_q, tokens_k = (int(edge[-1]) for edge in edges)
    shapes = {
        "shared": (1, 4, most_q, most_k),
        "by position": (number + 1, 1, most_q, most_k),
        "rows": (2, tokens_q, most_k),
        "keys": (4, 1, tokens_k),
    }
    q = torch.randn(tokens_q, 4, 16, requires_grad=True)
    k, v = (torch.randn(tokens_k, 2, 16, requires_grad=True) for _ in range(2))
    added = torch.randn(shapes[bias], requires_grad=True)
    allowed = None if mask == "none" else torch.rand(shapes[mask]) < 0.7
    call = {"is_causal": True, "sequences": sequences}
    results, wanted = (attention(q, k, v, allowed, added, **call, backend=name) for name in ("flex", "eager"))
    leaves = (q, k, v, added)
    tensors = ((out, *torch.autograd.grad(out.square().sum(), leaves)) for out in (results, wanted))
    for x, y in zip(*tensors, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("bias", "mask"), [("shared", "rows"), ("rows", "by position"), ("keys", "none")])
def test_new_lengths_and_numbers_of_sequences_settle_after_two_compilations(bias: str, mask: str) -> None:
    compilations = Counter()
    with eager_flex():
        for seed in range(12):
            one_class(seed, bias, mask)
    assert compilations() <= 2


@compiled_on_cpu
def test_compiled_nothing_of_one_sequence_reaches_another() -> None:
    """NaN in all other sequences and in rows of none leaves the bits of one as they were; tiles keep them apart."""
    assert graph.compiler == "inductor"
    generator = torch.Generator().manual_seed(8)
    q, k, v = (torch.randn(n, h, 16, generator=generator) for n, h in ((300, 4), (340, 2), (340, 2)))
    bias = torch.randn(4, 300, 200, generator=generator)
    cu_q, cu_k = torch.tensor([0, 40, 190, 295]), torch.tensor([0, 60, 250, 337])
    sequences = Sequences.packed(cu_q, cu_k, max_seqlen_q=150, max_seqlen_k=200)
    flags: dict[str, Any] = {"is_causal": True, "softcap": 3.0, "sequences": sequences}
    wanted = attention(q, k, v, None, bias, backend="flex", **flags)
    exact = attention(*(x.double() for x in (q, k, v)), None, bias.double(), backend="eager", **flags)
    assert (wanted - exact).norm() <= 1e-5 * exact.norm()
    assert not wanted[295:].any()
    bad = [x.clone() for x in (q, k, v, bias)]
    for x, rows in zip(bad, (slice(40, 190), *(slice(60, 250),) * 2), strict=False):
        kept = x[rows].clone()
        x.fill_(torch.nan)
        x[rows] = kept
    bad[3][:, :40], bad[3][:, 190:], bad[3][:, :, 190:] = torch.nan, torch.nan, torch.nan
    results = attention(*bad[:3], None, bad[3], backend="flex", **flags)
    assert torch.equal(results[40:190], wanted[40:190])
    assert not results[295:].any()


@compiled_on_cpu
def test_compiled_padded_slots_with_a_mask() -> None:
    generator = torch.Generator().manual_seed(9)
    q, k, v = (torch.randn(3, n, h, 16, generator=generator) for n, h in ((140, 4), (150, 2), (150, 2)))
    mask = torch.rand(3, 1, 140, 150, generator=generator) < 0.5
    used = torch.tensor([150, 9, 131])
    k[1, 9:], v[1, 9:], k[2, 131:], v[2, 131:] = (torch.nan,) * 4
    sequences = Sequences.padded(used, torch.tensor([140, 70, 129]))
    results = attention(q, k, v, mask, is_causal=True, sequences=sequences, backend="flex")
    exact = attention(q, k, v, mask, is_causal=True, sequences=sequences, backend="eager")
    torch.testing.assert_close(results, exact, rtol=1e-5, atol=1e-5)


@compiled_on_cpu
def test_compiled_inside_a_callers_graph() -> None:
    generator = torch.Generator().manual_seed(11)
    q, k, v = (torch.randn(40, h, 16, generator=generator) for h in (4, 2, 2))
    scores = torch.randn(1, 2, 25, 25, generator=generator)

    def layer(edges: Tensor, q: Tensor, k: Tensor, v: Tensor, scores: Tensor) -> Tensor:
        sequences = Sequences.packed(edges, max_seqlen_q=25)
        return 2 * attention(
            q + 1, k, v, scores > -1, scores.exp(), is_causal=True, sequences=sequences, backend=backend
        )

    backend, edges = "flex", torch.tensor([0, 15, 40])
    with torch.no_grad():
        results = torch.compile(layer, fullgraph=True)(edges, q, k, v, scores)
        backend = "eager"
        wanted = layer(edges, q, k, v, scores)
    torch.testing.assert_close(results, wanted, rtol=1e-5, atol=1e-5)


# Rules.


def explained(q: tuple[int, ...], spec: SequenceSpec, **call: Any) -> Explanation:
    return explain_problem(q, sequences=spec, device="sm_90", **call)


def test_explain_names_the_copies() -> None:
    spec = SequenceSpec("packed", 8, 8192, 8192, 2048, 2048)
    (verdict,) = (v for v in explained((1, 8192, 16, 64), spec, dtype="bf16").verdicts if v.backend == "flex")
    assert verdict.accepts
    # 8192 // 128 + 8 tiles of each; q, k, v and out; 4 lists of 72 x 72.
    assert (
        "copies q, k, v and out into rows of 128, none of which two sequences share, 72.0 MB, with 0.1 MB of lists"
        in (" ".join(verdict.notes))
    )


@pytest.mark.parametrize(
    ("change", "code", "text"),
    [
        (SequenceSpec("packed", 60000, 400000, 400000, 400000, 400000), "tile_lists", "has 3984765625 elements"),
        (SequenceSpec("packed", 1, 1 << 25, 1 << 25, 1 << 25, 1 << 25), "row_span", "spans 2147483648 elements"),
        (SequenceSpec("paged", 2, 1, 512, 1, 512, page_size=64), "paged", "paged is set"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_rules_of_sequences(change: SequenceSpec, code: str, text: str) -> None:
    rows = (change.number, change.rows_q) if change.has_pages else (1, change.rows_q)
    (verdict,) = (v for v in explained((*rows, 16, 64), change).verdicts if v.backend == "flex")
    (reason,) = (r for r in verdict.reasons if r.code == code)
    assert text in reason.text
    assert flex.probe().usable
