"""Sequences on the flex backend: its results, what it compiles and how often, and its rules."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from cases import DEVICE
from draws import FORMS as DENSE_FORMS
from flex_fixture import ROUNDED, ROUNDS_GRADIENTS, compiled_on_cpu, eager_flex
from sequence_calls import SequenceCall, Tokens, asking, assert_accurate, draw, run, spoiled, unread
from sequence_cases import SequenceCase
from test_flex_graph import Counter

from flash_dmattn import Sequences, attention
from flash_dmattn.backends.flex import backend as flex
from flash_dmattn.backends.flex import graph
from flash_dmattn.explanation import Explanation, explain_problem
from flash_dmattn.problem import SequenceSpec

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="a GPU runs `run_calls.py flex sequences`")

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
        for number in range(500 + part, 548, 6):
            call = asking(drawn(number), "flex")
            assert_accurate(run(spoiled(call), "flex"), call)


HEADS = ("1", "Hk", "Hq")
FORMS = {
    "-".join(form): form
    for form in (
        *DENSE_FORMS,
        *itertools.product(HEADS, ("Tq",), ("1", "Lk")),
        *itertools.product(HEADS, ("1",), ("Tk",)),
    )
}
# One sequence has no queries, and rows of none lie between and behind.
THREE = SequenceCase(
    **{"lengths": ((139, 120), (0, 9), (133, 30)), "spare": (2, 0, 7), "most": (140, 130), "head_dims": (16, 24)},
    dtype=torch.float32,
)


def call_with(bias: tuple[str, ...], mask: tuple[str, ...] | None, **flags: Any) -> SequenceCall:
    """A call of `THREE` with a bias and a mask of these shapes."""
    return THREE.with_(bias=bias, mask=mask).build(**flags)


@pytest.mark.parametrize("name", FORMS)
def test_every_form_of_a_bias_and_of_a_mask(name: str) -> None:
    shapes = list(FORMS.values())
    index = shapes.index(FORMS[name])
    mask = shapes[(index * 7 + 3) % len(shapes)]  # so that each form is a mask once, too
    flags = {"is_causal": True} if index % 2 else {"window_size": (60, 5), "softcap": 2.0}
    call = call_with(FORMS[name], mask, **flags)
    with eager_flex():
        assert_accurate(run(spoiled(call), "flex"), call)


@pytest.mark.parametrize("shape", ["B-Hk-Lq-Lk", "1-1-Lq-Lk", "B-Hq-1-Lk", "Hk-Tq-Lk", "Hq-1-Tk"])
def test_nothing_is_read_where_there_is_no_pair(shape: str) -> None:
    """NaN in rows of no sequence, in what arrives there, and in values of a bias of no pair, changes no bit."""
    call = call_with(FORMS[shape], None, is_causal=True)
    bad = spoiled(call)
    none = unread(call, call.bias)
    is_empty = Tokens(call).q[:, 0] < 0
    assert is_empty.any() and (none.any() or shape.startswith("1"))
    bad = replace(bad, bias=call.bias.masked_fill(none, torch.nan), dlse=call.dlse.masked_fill(is_empty, torch.nan))
    with eager_flex():
        wanted, results = run(call, "flex"), run(bad, "flex")
    for name, x in wanted.items():
        assert torch.equal(x, results[name]), name
    assert not results["dbias"][none].any()
    assert not results["out"][is_empty].any() and (results["lse"][:, is_empty] == -torch.inf).all()


@pytest.mark.skipif(ROUNDS_GRADIENTS, reason=ROUNDED)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", ["1-Hq-Lq-Lk", "Hk-Tq-Lk", "1-Hk-1-Lk", "Hq-1-Tk", "B-1-Lq-1"])
def test_a_bias_of_16_bits_has_its_gradient_summed_in_32(dtype: torch.dtype, shape: str) -> None:
    call = THREE.with_(bias=FORMS[shape], sink=None, dtype=dtype).build()
    with eager_flex():
        assert_accurate(run(spoiled(call), "flex"), call)


# Compilations.


def one_class(seed: int, bias: str, mask: str | None) -> None:
    """A packed call, both passes, of lengths and a number of sequences that go by the seed."""
    rng = random.Random(seed)
    lengths = [[rng.choice((0, 1, 5, 130, 260)) for _ in range(2)] for _ in range(rng.randint(2, 7))]
    pairs = (*((seqlen_q, seqlen_k) for seqlen_q, seqlen_k in lengths), (3, 3))
    most_q, most_k = (max(side) for side in zip(*pairs, strict=True))
    case = THREE.with_(lengths=pairs, spare=(), trailing=(0, 0), sink=None, dlse=False)
    case = case.with_(most=(most_q + rng.choice((0, 3)), most_k + rng.choice((0, 4))))
    call = case.with_(bias=FORMS[bias], mask=FORMS.get(mask or ""), seed=seed).build(is_causal=True)
    assert_accurate(run(call, "flex"), call)


@pytest.mark.parametrize(("bias", "mask"), [("1-Hq-Lq-Lk", "Hk-Tq-Lk"), ("Hk-Tq-Lk", "B-1-Lq-Lk"), ("Hq-1-Tk", None)])
def test_new_lengths_and_numbers_of_sequences_settle_after_two_compilations(bias: str, mask: str | None) -> None:
    compilations = Counter()
    with eager_flex():
        for seed in range(6):
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
