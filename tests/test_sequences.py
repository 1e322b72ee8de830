"""Packed, padded and paged sequences: values, gradients, what must not be read, and every refusal."""

from __future__ import annotations

import copy
import os
import pickle
from collections.abc import Callable
from dataclasses import fields, replace
from itertools import pairwise
from typing import Any

import draws
import pytest
import torch
from accuracy import chance_by_weights, error, probabilities
from cases import DEVICE
from conftest import Runner, refusal_of
from sequence_calls import LEAVES, ON_GPU, SequenceCall, asking, assert_accurate, draw, expected, run, spoiled
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.nested import nested_tensor_from_jagged

import flash_dmattn
from flash_dmattn import Sequences, attention, masks, nn
from flash_dmattn.explanation import explain_problem
from flash_dmattn.problem import FEATURES, SequenceSpec
from flash_dmattn.reference import formula
from flash_dmattn.reference.sequences import Batch
from flash_dmattn.reference.yardstick import FLOOR, RATIO
from flash_dmattn.sequences import append_to_cache

EXAMPLES = int(os.environ.get("FLASH_DMATTN_EXAMPLES", 120))


def skip_where_refused(backend: Runner, call: SequenceCall) -> None:
    needs = dict.fromkeys(call.needs_grad, True)
    arguments = {
        n: None if (x := getattr(call, n)) is None else x.detach().requires_grad_(needs.get(n, False)) for n in LEAVES
    }
    extra = {"sink": arguments["sink"], "sequences": call.sequences, "return_lse": True}
    explanation = flash_dmattn.explain(
        *(arguments[n] for n in "qkv"), call.mask, arguments["bias"], **extra, **call.flags
    )
    reasons = next(v.reasons for v in explanation.verdicts if v.backend == backend.name)
    if reasons:
        pytest.skip(f"{backend.name}: {reasons[0]}")


def draw_options(name: str) -> dict[str, Any]:
    """Arguments of a draw for a backend: long rows in 16 bits for kernels, fp64 too for PyTorch."""
    if name == "flex":
        return {**ON_GPU, "dtypes": (torch.float32,)}  # with a sink it rounds an out of 16 bits once more
    return {} if name in ("eager", "reference") else ON_GPU


@pytest.mark.parametrize("backend", ("eager", "triton", "cuda"), indirect=True)
@pytest.mark.parametrize("part", range(6))
def test_random_calls_beside_one_dense_call(backend: Runner, part: int) -> None:
    """All rows of no sequence hold NaN; test_flex_sequences.py has the calls of flex."""
    ran = 0
    for number in range(part, EXAMPLES, 6):
        call = draw(number, **draw_options(backend.name))
        call = asking(call, backend.name)
        try:
            skip_where_refused(backend, call)
        except pytest.skip.Exception:
            continue
        assert_accurate(run(spoiled(call), backend.name), call)
        ran += 1
    if ran == 0:
        pytest.skip(f"{backend.name}: its rules refuse all of these calls")


@pytest.fixture
def centred(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls by number keep the data that the test was written for."""
    monkeypatch.setattr(draws, "UNCENTRED", 0.0)


@pytest.mark.usefixtures("centred")
@pytest.mark.parametrize(("number", "name"), ((164, "dq"), (221, "dq"), (221, "dk"), (323, "dk")))
def test_gradients_of_few_rows_may_be_unlucky_and_not_wrong(number: int, name: str) -> None:
    """Deltas off by twice what rounding of out leaves in them pass with a lucky yardstick; by 6 times, not."""
    call = draw(number, dtypes=(torch.bfloat16,))
    assert call.flags["dropout_p"] == 0.0, "a GPU draws another dropout, and with it another yardstick"
    exact, in_dtype, dense = expected(call)
    outs = (x["out"].reshape(dense.dout.shape).double() for x in (exact, in_dtype))
    delta_error = (dense.dout * torch.sub(*outs)).square().sum(-1).sqrt().mT
    numbers = {k: x for k, x in call.flags.items() if k in ("softcap", "softmax_scale")}
    arguments = (dense.q, dense.k, dense.v, dense.mask, dense.bias)
    wanted = {"out", "lse", *(f"d{name}" for name in call.needs_grad)}
    results = {key: None if key not in wanted else x if key == "lse" else x.bfloat16() for key, x in exact.items()}
    for times, is_allowed in ((2.0, True), (6.0, False)):
        moved = -times * delta_error if dense.dlse is None else dense.dlse - times * delta_error
        dq, dk = formula.gradients(dense.dout, moved, *arguments, **numbers, sink=dense.sink)[:2]
        moved_gradient = (dq if name == "dq" else dk).reshape(exact[name].shape).bfloat16()
        if is_allowed:
            assert error(moved_gradient, exact[name]) > RATIO * error(in_dtype[name], exact[name]) + FLOOR
            assert_accurate({**results, name: moved_gradient}, call)
        else:
            with pytest.raises(AssertionError, match=f"{name}: error"):
                assert_accurate({**results, name: moved_gradient}, call)


@pytest.mark.usefixtures("centred")
@pytest.mark.parametrize("number", (17056, 164, 323, 12))
def test_a_few_weights_may_be_rounded_unluckily_and_not_wrong(number: int) -> None:
    """However weights fall between numbers of bfloat16, dv by rounded ones passes; with 5 times their errors, not."""
    call = draw(number, **ON_GPU | {"dtypes": (torch.bfloat16,)})
    call = replace(call, flags={**call.flags, "dropout_p": 0.0})
    exact, _, dense = expected(call)
    numbers = {k: x for k, x in call.flags.items() if k in ("softcap", "softmax_scale")}
    weights, _ = probabilities(dense, numbers)
    dout = dense.dout.unflatten(2, (dense.k.shape[2], -1))
    allowed = chance_by_weights(dense, numbers, None, torch.bfloat16)
    passed = {1: 0, 5: 0}
    random = torch.Generator().manual_seed(number)
    for step in range(40):  # weights of many sizes, as dropout scales them
        scale = 1 + step / 40
        signs = torch.randn(weights.shape, generator=random, dtype=torch.float64).sign()
        off = ((weights * scale).bfloat16().double() / scale - weights) * signs
        for times in passed:
            passed[times] += torch.einsum("bhgij,bihgd->bjhd", times * off, dout).norm().item() <= allowed
    assert passed[1] == 40 and passed[5] < 20
    assert exact["dv"] is not None and exact["dv"].norm() > 0


@pytest.mark.usefixtures("centred")
@pytest.mark.parametrize(("number", "name"), ((170, "dsink"), (1170, "dsink"), (612, "dbias")))
def test_sums_at_queries_beside_a_sink_in_16_bits(number: int, name: str) -> None:
    """One sum of many roundings may be further off than plain PyTorch is by luck, also with rows of no sequence."""
    call = draw(number, dtypes=ON_GPU["dtypes"][:2])
    assert call.sink is not None and name[1:] in call.needs_grad
    results = run(call, "eager")
    assert_accurate(results, call)
    result = results[name]
    assert result is not None
    with pytest.raises(AssertionError, match=f"{name}: error"):
        assert_accurate({**results, name: result * 1.1}, call)


def test_the_reference_is_differentiable() -> None:
    for number in range(40):
        call = draw(number, dtypes=(torch.float64,))
        assert_accurate(run(call, "reference"), call)


# Packed sequences with gaps behind them, whose calls have every gradient.
PACKED = (5, 12, 29)


def packed_call(number: int, backend: Runner) -> SequenceCall:
    call = draw(number, "packed", **draw_options(backend.name))
    call = replace(call, needs_grad=tuple(name for name in LEAVES if getattr(call, name) is not None))
    skip_where_refused(backend, call)
    return call


@pytest.mark.parametrize("number", PACKED)
def test_nothing_of_one_sequence_reaches_another(backend: Runner, number: int) -> None:
    """NaN in the others, in gaps, and in what arrives there, leaves one as it was, bit by bit."""
    if backend.name == "flex" and DEVICE == "cpu":
        pytest.skip("flex: FlexAttention's dense formula on a CPU multiplies v by the zeros of all that is masked")
    call = packed_call(number, backend)
    wanted, longest = run(call, backend.name), max(range(len(call.lengths)), key=lambda s: call.lengths[s][1])
    result = run(spoiled(call, scores=True, only=longest), backend.name)
    queries, keys = call.queries_of(longest), call.keys_of(longest)
    for name, rows in (("out", queries), ("dq", queries), ("dk", keys), ("dv", keys), ("lse", (slice(None), *queries))):
        assert torch.equal(result[name][rows], wanted[name][rows]), name
    if call.bias is not None and call.bias.shape[1:2] == call.q.shape[:1]:  # rows of packed queries
        assert torch.equal(result["dbias"][:, queries[0]], wanted["dbias"][:, queries[0]])


def test_bounds_on_lengths_change_no_result(backend: Runner) -> None:
    call = replace(packed_call(PACKED[0], backend), bias=None, mask=None, needs_grad=("q", "k", "v"))
    wanted = run(call, backend.name)
    for most in (500, None):
        sequences = replace(call.sequences, max_seqlen_q=most, max_seqlen_k=most)
        result = run(replace(call, sequences=sequences), backend.name)
        for name, y in wanted.items():
            assert y is None or torch.equal(y, result[name]), name


def test_a_compiled_call_follows_lengths_and_bounds() -> None:
    """One graph, whatever the number of sequences, their lengths and the bounds on them."""
    counter = CompileCounterWithBackend("eager")

    @torch.compile(fullgraph=True, dynamic=True, backend=counter)
    def step(q: Tensor, k: Tensor, v: Tensor, cu: Tensor, most: int) -> Tensor:
        return attention(q, k, v, is_causal=True, sequences=Sequences.packed(cu, max_seqlen_q=most))

    for edges in ([0, 3, 9, 20], [0, 11, 13, 24, 30, 41], [0, 17, 19]):
        most = max(b - a for a, b in pairwise(edges))
        q, k, v = torch.randn(3, edges[-1], 2, 8, requires_grad=True)
        cu = torch.tensor(edges, dtype=torch.int32)
        result = step(q, k, v, cu, most)
        wanted = attention(q, k, v, is_causal=True, sequences=Sequences.packed(cu))
        torch.testing.assert_close(result, wanted)
        torch.testing.assert_close(*(torch.autograd.grad(x.square().sum(), q)[0] for x in (result, wanted)))
    assert counter.frame_count <= 2


# Fake tensors: each makes the arguments of a call and its sequences, and is called with and without a mode of fakes.

LEAF: dict[str, Any] = {"requires_grad": True}


def fake_packed(edges: Tensor) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    bias = torch.zeros(2, 4, 5, 5, **LEAF)
    rows = torch.zeros(8, 4, 16, **LEAF), *(torch.zeros(8, 2, 16, **LEAF) for _ in range(2))
    return (*rows, None, bias), {"sequences": Sequences.packed(edges, max_seqlen_q=5), "is_causal": True}


def fake_padded(edges: Tensor) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    rows = torch.zeros(2, 5, 4, 16, **LEAF), *(torch.zeros(2, 9, 2, 16, **LEAF) for _ in range(2))
    return (*rows, torch.ones(2, 1, 5, 9, dtype=torch.bool)), {"sequences": Sequences.padded(seqlens_k=edges[1:])}


def fake_paged(edges: Tensor) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    sequences = Sequences.paged(torch.zeros(2, 2, dtype=torch.int32), edges[1:])
    cache = torch.zeros(4, 16, 2, 16), torch.zeros(4, 16, 2, 16)
    new = torch.zeros(2, 1, 2, 16)
    append_to_cache(*cache, new, new, sequences)
    return (torch.zeros(2, 1, 4, 16), *cache), {"sequences": sequences}


def fake_prepared(edges: Tensor) -> tuple[tuple[Any, ...], dict[str, Any]]:
    (q, k, v, *_), flags = fake_packed(edges)
    sequences = {"sequences": flags["sequences"]}
    mask = masks.PreparedMask.from_mask(torch.ones(1, 8, 5, dtype=torch.bool), seqlen_q=8, seqlen_k=8, **sequences)
    return (q, k, v, mask), sequences


def fake_nested(edges: Tensor) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    sizes = (4, 2, 2)
    return tuple(nested_tensor_from_jagged(torch.zeros(8, heads, 16, **LEAF), edges) for heads in sizes), {}


@pytest.mark.parametrize("inference", [False, True], ids=["", "inference"])
@pytest.mark.parametrize("call", [fake_packed, fake_padded, fake_paged, fake_prepared, fake_nested])
def test_fake_tensors_have_no_values_to_read(call: Callable[[Tensor], Any], inference: bool) -> None:
    def shapes() -> list[Any]:
        tensors, flags = call(torch.tensor([0, 3, 8], dtype=torch.int64))
        kinds: list[Any] = []
        for _ in range(2):  # a layer, and the next one
            results = [x.values() if x.is_nested else x for x in attention(*tensors, return_lse=True, **flags)]
            leaves = [x for x in tensors if isinstance(x, Tensor) and x.requires_grad]
            gradients = torch.autograd.grad(results[0].sum(), leaves) if results[0].requires_grad else ()
            both = (*results, *(x.values() if x.is_nested else x for x in gradients))
            kinds += [(x.shape, x.dtype, x.stride()) for x in both]
        return kinds

    with torch.inference_mode(inference):
        expected = shapes()
        with FakeTensorMode(shape_env=ShapeEnv()):
            assert shapes() == expected


def test_a_traced_layout_asks_for_no_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compilers cannot trace the question, and a fake tensor of a GPU stands for theirs."""
    asked: list[bool] = []
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: asked.append(True))
    monkeypatch.setattr(Sequences, "_make_view", lambda *_: None)  # which a torch without CUDA cannot trace on a GPU
    with FakeTensorMode():
        edges = torch.empty(3, dtype=torch.int32, device="cuda")
        q = torch.empty(8, 2, 16, device="cuda")
        Sequences.packed(edges, max_seqlen_q=5).describe_with_view(q, q, q)
    assert asked == []


def test_builders_of_masks_read_no_value_of_fake_tensors() -> None:
    with FakeTensorMode():
        edges = torch.tensor([0, 3, 8], dtype=torch.int32)
        assert masks.document_ids(torch.tensor([2, 0, 3]), total_length=6).shape == (6,)
        assert masks.padding_mask(torch.tensor([2, 9]), 6).shape == (2, 1, 1, 6)
        padding = masks.padding_mask(torch.tensor([2, 9]), 6)
        assert masks.PreparedMask.from_mask(padding, seqlen_q=6).shape == (2, 1, 1, 6)
        flat = torch.ones(35, dtype=torch.bool)  # which 3 * 3 + 5 * 5 would not be
        packed = Sequences.packed(edges, max_seqlen_q=5)
        assert masks.PreparedMask.from_ragged(flat, packed, seqlen_q=8, seqlen_k=8).shape == (1, 1, 8, 5)
        layer = nn.DynamicMaskAttention(16, 2, keep_window_size=4)
        assert layer(torch.zeros(8, 16), sequences=packed).shape == (8, 16)
        with pytest.raises(RuntimeError, match="fake tensors have no values"):
            attention(*torch.zeros(3, 8, 2, 16), sequences=packed, backend="reference")


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_what_changes_in_place_counts_from_the_next_call_on(dtype: torch.dtype) -> None:
    cu = torch.tensor([0, 3, 7], dtype=dtype)
    x, sequences = torch.randn(7, 2, 8, requires_grad=True), Sequences.packed(cu)
    first = attention(x, x, x, sequences=sequences)
    cu[1] = 5
    second = attention(x, x, x, sequences=sequences)
    torch.testing.assert_close(second, attention(x, x, x, sequences=Sequences.packed(torch.tensor([0, 5, 7]))))
    wanted = attention(x, x, x, sequences=Sequences.packed(torch.tensor([0, 3, 7])))
    torch.testing.assert_close(*(torch.autograd.grad(y.square().sum(), x)[0] for y in (first, wanted)))


def every_layout(dtype: torch.dtype) -> dict[str, Sequences]:
    """Sequences of every layout, which have every table between them."""
    lengths, edges = torch.tensor([2, 3], dtype=dtype), torch.tensor([0, 3, 7], dtype=dtype)
    table = torch.tensor([[0, 1], [2, 3]], dtype=dtype)
    return {
        "packed": Sequences.packed(edges, edges.clone(), seqlens_q=lengths, seqlens_k=lengths.clone()),
        "padded": Sequences.padded(seqlens_q=lengths.clone(), seqlens_k=lengths),
        "paged": Sequences.paged(table, lengths),
        "paged_packed": Sequences.paged(table, lengths, cu_seqlens_q=edges),
    }


# The caller's tensors, all of them.
TABLES = [
    (kind, name)
    for kind, one in every_layout(torch.int32).items()
    for name in [field.name for field in fields(one) if isinstance(getattr(one, field.name), Tensor)]
]


def arguments_of(kind: str) -> tuple[Tensor, Tensor]:
    """q and k of a call with `every_layout`."""
    q = torch.randn(7, 2, 8) if "packed" in kind else torch.randn(2, 4, 2, 8)
    return q, {"packed": torch.randn(7, 2, 8), "padded": torch.randn(2, 5, 2, 8)}.get(kind, torch.randn(4, 3, 2, 8))


@pytest.mark.parametrize("writer", ["torch", "NumPy", "NumPy, later"])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode], ids=lambda mode: mode.__name__)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize(("kind", "name"), TABLES)
def test_each_table_alone_is_followed(kind: str, name: str, dtype: torch.dtype, mode: Any, writer: str) -> None:
    """A layout is kept as long as no table changes, also where torch does not count changes."""
    with mode():
        sequences, (q, k) = every_layout(dtype)[kind], arguments_of(kind)
        changed: Any = getattr(sequences, name)
        if writer == "NumPy":
            changed = changed.numpy()
        kept = sequences.describe_with_view(q, k, k)[1]
        assert sequences.describe_with_view(q, k, k)[1] is kept
        before = [x.clone() for x in kept.tensors]
        if writer == "NumPy, later":
            changed = changed.numpy()
        changed[(1, 0) if changed.ndim == 2 else 1] -= 1
        view = sequences.describe_with_view(q, k, k)[1]
        assert view is not kept and sequences.describe_with_view(q, k, k)[1] is view
        anew = replace(sequences).describe_with_view(q, k, k)[1]
        assert all(torch.equal(x, y) for x, y in zip(view.tensors, anew.tensors, strict=True))
        assert not all(torch.equal(x, y) for x, y in zip(view.tensors, before, strict=True))


def test_packed_keys_may_have_used_lengths_alone() -> None:
    q, k, v = torch.randn(7, 4, 8), torch.randn(7, 2, 8), torch.randn(7, 2, 8)
    edges, used = torch.tensor([0, 3, 7]), torch.tensor([2, 4])
    got = attention(q, k, v, sequences=Sequences.packed(edges, seqlens_k=used))
    wanted = attention(q, k, v, sequences=Sequences.packed(edges, cu_seqlens_k=edges.clone(), seqlens_k=used))
    assert torch.equal(got, wanted)
    assert not torch.equal(got, attention(q, k, v, sequences=Sequences.packed(edges)))


@pytest.mark.parametrize("seed", range(20))
def test_bounds_never_leave_the_tensors(seed: int) -> None:
    """Whatever the tables say: kernels read by them without another look."""
    random = torch.Generator().manual_seed(seed)
    count, rows_q, rows_k, most = 5, 40, 30, 16

    def wild(*shape: int) -> Tensor:
        return torch.randint(-(2**31), 2**31 - 1, shape, generator=random, dtype=torch.int64).to(torch.int32) >> int(
            torch.randint(0, 27, (), generator=random)
        )

    sequences = Sequences("packed", wild(count + 1), wild(count + 1), wild(count), wild(count))
    spec = SequenceSpec("packed", count, rows_q, rows_k, most, most)
    bounds = sequences.make_bounds(spec)
    assert bounds.dtype == torch.int32
    for column, rows in ((0, rows_q), (2, rows_k)):
        first, length = bounds[:, column].long(), bounds[:, column + 1].long()
        assert (first >= 0).all() and (length >= 0).all() and (length <= most).all()
        assert (first + length <= rows).all() and (first[1:] >= (first + length)[:-1]).all()


def test_explain_tells_of_sequences() -> None:
    x, pool = torch.randn(8, 2, 16), torch.randn(3, 4, 2, 16)
    two = Sequences.packed(torch.tensor([0, 3, 8]))
    text = str(flash_dmattn.explain(x, x, x, sequences=two))
    assert "2 packed sequences of 8 queries and 8 keys" in text
    paged = Sequences.paged(torch.zeros(1, 2, dtype=torch.int32), torch.tensor([5]))
    text = str(flash_dmattn.explain(torch.randn(1, 1, 2, 16), pool, pool, sequences=paged))
    assert "1 paged sequences of 1 queries each and at most 8 keys in pages of 4" in text
    spec = SequenceSpec("packed", 3, 4096, 4096, 2048, 2048)
    padded = SequenceSpec("padded", 3, 4096, 4096, 4096, 4096)
    for each, shape, refusing in ((spec, (1, 4096, 16, 64), []), (padded, (3, 4096, 16, 64), ["sdpa"])):
        explanation = explain_problem(shape, sequences=each, device="sm_90")
        refused = {v.backend: [r.code for r in v.reasons] for v in explanation.verdicts}
        assert [name for name, reasons in refused.items() if "sequences" in reasons] == refusing
    assert explanation.problem.features == {"sequences"} and {"sequences", "paged"} <= set(FEATURES)
    spec = SequenceSpec("paged", 2, 1, 512, 1, 512, page_size=64)
    explanation = explain_problem((2, 1, 16, 64), sequences=spec, device="sm_90")
    (flex,) = (v for v in explanation.verdicts if v.backend == "flex")
    assert "paged" in [r.code for r in flex.reasons]


def cu(*values: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(values, dtype=dtype)


X, CACHE, POOL = torch.zeros(8, 2, 4), torch.zeros(2, 5, 2, 4), torch.zeros(3, 4, 2, 4)
TWO = Sequences.packed(cu(0, 3, 8), max_seqlen_q=5)
ONE_Q = torch.zeros(2, 1, 2, 4)


def paged(table: list[list[int]], lengths: list[int]) -> Sequences:
    return Sequences.paged(torch.tensor(table), torch.tensor(lengths))


# The error that each call raises.
BAD: dict[str, Callable[[], Any]] = {
    "TypeError: cu_seqlens_q is a list; it needs to be an int32 or int64": lambda: Sequences.packed([0, 3]),
    "TypeError: cu_seqlens_q is a NoneType": lambda: Sequences.packed(None),
    "TypeError: cu_seqlens_q has dtype float32; it needs int32 or int64": lambda: Sequences.packed(cu(0, 3).float()),
    "ValueError: cu_seqlens_q has shape (1, 2); it needs 1 dimension": lambda: Sequences.packed(cu(0, 3)[None]),
    "ValueError: cu_seqlens_q has shape (0,); it needs one entry more": lambda: Sequences.packed(cu()),
    "TypeError: max_seqlen_q is a Tensor; it needs to be an int": lambda: Sequences.packed(
        cu(0, 3), max_seqlen_q=torch.tensor(3)
    ),
    "TypeError: Sequences.padded() has an argument without a name; it needs names: write seqlens_q=... or seqlens_k": (
        lambda: Sequences.padded(cu(5, 5))  # type: ignore[call-arg, misc]
    ),
    "ValueError: max_seqlen_k is -1; it needs to be at least 0": lambda: Sequences.packed(cu(0, 3), max_seqlen_k=-1),
    "ValueError: cu_seqlens_k has 3 entries; of 1 sequences it needs 2": lambda: Sequences.packed(
        cu(0, 3), cu(0, 1, 2)
    ),
    "TypeError: layout is a Tensor; call Sequences.packed, Sequences.padded or Sequences.paged": lambda: Sequences(
        cu(0, 3)  # type: ignore[arg-type]
    ),
    "ValueError: cu_seqlens_q begins with 1; it needs to begin with 0: where sequences begin, no lengths": lambda: (
        Sequences.packed(cu(1, 3))
    ),
    "ValueError: cu_seqlens_q falls from 3 to 2 at sequence 1; it needs to ascend": lambda: Sequences.packed(
        cu(0, 3, 2)
    ),
    "ValueError: seqlens_q is 4 for sequence 0; it needs at least 0, and at most the 3 of its slot": lambda: (
        Sequences.packed(cu(0, 3), seqlens_q=cu(4))
    ),
    "ValueError: sequence 0 has 3 queries; max_seqlen_q says at most 2": lambda: Sequences.packed(
        cu(0, 3), max_seqlen_q=2
    ),
    "ValueError: cu_seqlens_q ends with 8; q has 7 tokens": lambda: attention(X[:7], X[:7], X[:7], sequences=TWO),
    "ValueError: seqlens_k is 6 for sequence 1; it needs at least 0, and at most the 5 of its slot": lambda: attention(
        ONE_Q, CACHE, CACHE, sequences=Sequences.padded(seqlens_k=cu(5, 6))
    ),
    "ValueError: block_table names page 3 for sequence 0; k has 3 pages": lambda: attention(
        ONE_Q, POOL, POOL, sequences=paged([[0, 3], [1, 9]], [5, 4])
    ),
    "TypeError: sequences is a Tensor; it needs to be a flash_dmattn.Sequences": lambda: attention(
        X, X, X, sequences=cu(0, 8)
    ),
    "ValueError: q has 4 dimensions, shape (1, 8, 2, 4); with packed sequences it needs 3, (queries of all": lambda: (
        attention(X[None], X, X, sequences=TWO)
    ),
    "ValueError: v has 4 dimensions": lambda: attention(X, X, X[None], sequences=TWO),
    "ValueError: q has 1 entries; it needs one for each sequence, 2": lambda: attention(
        CACHE[:1], CACHE[:1], CACHE[:1], sequences=Sequences.padded(seqlens_k=cu(5, 5))
    ),
    "ValueError: return_probs is True; calls with sequences have no tensor of all": lambda: attention(
        X, X, X, sequences=TWO, return_probs=True
    ),
    "ValueError: q requires grad; keys in pages have no gradients": lambda: attention(
        ONE_Q.clone().requires_grad_(), POOL, POOL, sequences=paged([[0], [1]], [1, 2])
    ),
    "ValueError: mask has 2 dimensions, shape (8, 8); with sequences it needs 4 dimensions": lambda: attention(
        X, X, X, torch.ones(8, 8, dtype=torch.bool), sequences=TWO
    ),
    (
        "ValueError: bias has 3 dimensions, shape (2, 5, 5); with sequences it needs 4 dimensions, "
        "(sequences, heads, max_seqlen_q, max_seqlen_k)"
    ): lambda: attention(
        CACHE, CACHE, CACHE, bias=torch.zeros(2, 5, 5), sequences=Sequences.padded(seqlens_k=cu(5, 5))
    ),
    (
        "ValueError: bias has shape (2, 2, 8, 5), read as (sequences, heads, max_seqlen_q, max_seqlen_k); it "
        "needs sequences in {1, 2}, heads in {1, 2}, max_seqlen_q in {1, 5} and max_seqlen_k in {1, 5}"
    ): lambda: attention(X, X, X, bias=torch.zeros(2, 2, 8, 5), sequences=TWO),
    (
        "ValueError: bias has shape (2, 1, 5), read as (heads, 1, keys of all sequences); it needs heads in "
        "{1, 2} and keys of all sequences in {1, 8}; by position in each sequence it has 4 dimensions, bias[None]"
    ): lambda: attention(X, X, X, bias=torch.zeros(2, 1, 5), sequences=TWO),
    (
        "ValueError: bias has shape (2, 2, 8, 8), read as (sequences, heads, max_seqlen_q, max_seqlen_k); it needs "
        "max_seqlen_q and max_seqlen_k, which the sequences do not name (Sequences.packed(..., max_seqlen_q=8, "
        "max_seqlen_k=8))"
    ): lambda: attention(X, X, X, bias=torch.zeros(2, 2, 8, 8), sequences=Sequences.packed(cu(0, 3, 8))),
    (
        "ValueError: bias has shape (1, 2, 5, 5), read as (sequences, heads, max_seqlen_q, max_seqlen_k); it needs "
        "max_seqlen_q and max_seqlen_k, which the sequences do not name (Sequences.packed(..., max_seqlen_q=5, "
        "max_seqlen_k=5))"
    ): lambda: attention(X, X, X, bias=torch.zeros(1, 2, 5, 5), sequences=Sequences.packed(cu(0, 3, 8))),
    (
        "ValueError: bias has shape (2, 8, 5), read as (heads, queries of all sequences, max_seqlen_k); it needs "
        "max_seqlen_k, which the sequences do not name (Sequences.packed(..., max_seqlen_k=5))"
    ): lambda: attention(X, X, X, bias=torch.zeros(2, 8, 5), sequences=Sequences.packed(cu(0, 3, 8))),
    (
        "ValueError: bias has shape (3, 2, 5, 5), read as (sequences, heads, max_seqlen_q, max_seqlen_k); it needs "
        "sequences in {1, 2} and heads in {1, 2}"
    ): lambda: attention(X, X, X, bias=torch.zeros(3, 2, 5, 5), sequences=Sequences.packed(cu(0, 3, 8))),
    (
        "ValueError: bias has shape (2, 5, 5), read as (heads, queries of all sequences, max_seqlen_k); it needs heads "
        "in {1, 2}, queries of all sequences in {1, 8} and max_seqlen_k in {1, 5}; by position in each sequence it has "
        "4 dimensions, bias[None]"
    ): lambda: attention(X, X, X, bias=torch.zeros(2, 5, 5), sequences=TWO),
    "TypeError: mask is a PreparedMask of the form 'tiles'; with sequences it needs to be a bool": lambda: attention(
        X, X, X, flash_dmattn.masks.PreparedMask.from_mask(torch.ones(8, 8, dtype=torch.bool)), sequences=TWO
    ),
}


@pytest.mark.parametrize("message", BAD)
def test_bad_input_is_refused_by_name(message: str) -> None:
    error = refusal_of(
        BAD[message], lambda: attention(X, X, X, sequences=TWO), inference="requires grad" not in message
    )
    assert f"{type(error).__name__}: {error}".startswith(message)


def test_one_row_beside_one_query_token() -> None:
    """It has the keys of the query's sequence, of max_seqlen_k, or packed keys."""
    q, k = torch.randn(1, 2, 4), torch.randn(9, 2, 4)
    sequences = Sequences.packed(cu(0, 0, 1), cu(0, 4, 9), max_seqlen_q=1, max_seqlen_k=5)
    alone = k[None, 4:]
    mask, bias = torch.tensor([[[True, False, True, True, False]]]), torch.randn(2, 1, 5)
    wanted = attention(q[None], alone, alone, mask, bias)[0]
    torch.testing.assert_close(attention(q, k, k, mask, bias, sequences=sequences), wanted)
    prepared = flash_dmattn.masks.PreparedMask.from_mask(mask, sequences=sequences, seqlen_q=1, seqlen_k=9)
    torch.testing.assert_close(attention(q, k, k, prepared, bias, sequences=sequences), wanted)
    packed = torch.nn.functional.pad(mask, (4, 0)), torch.nn.functional.pad(bias, (4, 0))
    torch.testing.assert_close(attention(q, k, k, *packed, sequences=sequences), wanted)


def test_check_reads_the_values() -> None:
    """A call on a GPU does not look at them."""
    wrong = Sequences("packed", cu(0, 5, 3), cu(0, 5, 3))
    with pytest.raises(ValueError, match="cu_seqlens_q falls from 5 to 3"):
        wrong.check()
    with pytest.raises(ValueError, match="cu_seqlens_q ends with 8; q has 5 tokens"):
        TWO.check(X[:5], X[:5])
    TWO.check()
    TWO.check(X, X)
    with pytest.raises(ValueError, match="block_table names page 3"):
        paged([[0, 3], [1, 9]], [5, 4]).check(ONE_Q, POOL)


@pytest.mark.parametrize("lengths", [(None, None), ((3, 5), (4, 2))], ids=("whole", "gaps"))
def test_nested_tensors_are_packed_sequences(lengths: Any) -> None:
    """Their lengths say how many tokens after each offset are used, of queries and of keys apart."""
    q, k, v = (torch.randn(n, h, 8, requires_grad=True) for n, h in ((9, 4), (11, 2), (11, 2)))
    offsets = torch.tensor([0, 4, 9]), torch.tensor([0, 5, 11])
    used_q, used_k = (None if used is None else torch.tensor(used) for used in lengths)
    nested = [nested_tensor_from_jagged(q, offsets[0], used_q)]
    nested += [nested_tensor_from_jagged(x, offsets[1], used_k) for x in (k, v)]
    out, lse = attention(*nested, is_causal=True, return_lse=True)
    sequences = Sequences.packed(*offsets, seqlens_q=used_q, seqlens_k=used_k)
    wanted, rows = attention(q, k, v, is_causal=True, sequences=sequences, return_lse=True)
    assert out.is_nested and torch.equal(out.values(), wanted) and torch.equal(lse.values(), rows)
    each = [4, 5] if used_q is None else used_q.tolist()  # tokens of the results, as of q
    assert [len(x) for x in out.unbind()] == [len(x) for x in nested[0].unbind()] == each
    assert [x.shape[1] for x in lse.unbind()] == each
    gradients = (torch.autograd.grad(x.square().sum(), (q, k, v)) for x in (out.values(), wanted))
    torch.testing.assert_close(*gradients)
    assert "2 packed sequences of 9 queries" in str(flash_dmattn.explain(*nested))


def test_nested_tensors_are_all_jagged() -> None:
    x = torch.nested.nested_tensor([torch.randn(n, 2, 8) for n in (2, 3)], layout=torch.jagged)
    with pytest.raises(TypeError, match="k is not nested, as others"):
        attention(x, torch.randn(5, 2, 8), x)
    strided = torch.nested.nested_tensor([torch.randn(n, 2, 8) for n in (2, 3)])
    with pytest.raises(TypeError, match=r"q is a nested tensor of layout torch.strided; it needs layout=torch.jagged"):
        attention(strided, strided, strided)
    with pytest.raises(ValueError, match=r"it needs \(sequences, ragged, heads, head_dim\)"):
        attention(x.transpose(1, 2), x, x)
    other = torch.nested.nested_tensor([torch.randn(n, 2, 8) for n in (2, 3)], layout=torch.jagged)
    with pytest.raises(ValueError, match=r"^v is a nested tensor with other offsets than k; it needs to share them"):
        attention(x, x, other)


def test_padding_is_taken_out_and_put_back() -> None:
    real = torch.rand(5, 7) < 0.6
    real[2] = False
    padding = flash_dmattn.sequences.Padding(real.long())
    x = torch.randn(5, 7, 3, requires_grad=True)
    tokens = padding.unpad(x)
    assert torch.equal(tokens, x[real])
    back = padding.pad(tokens)
    assert torch.equal(back, x.masked_fill(~real[:, :, None], 0.0))
    (gradient,) = torch.autograd.grad(back.sum(), x)
    assert torch.equal(gradient, real[:, :, None].expand_as(x).float())
    assert padding.sequences.cu_seqlens_q.diff().tolist() == real.sum(1).tolist()


def test_a_padding_of_inference_mode_serves_training() -> None:
    with torch.inference_mode():
        padding = flash_dmattn.sequences.Padding(torch.tensor([[1, 1, 0], [0, 1, 1]]))
    x = torch.randn(2, 3, 2, 8, requires_grad=True)
    tokens = padding.unpad(x)
    out = flash_dmattn.attention(tokens, tokens, tokens, is_causal=True, sequences=padding.sequences)
    (gradient,) = torch.autograd.grad(padding.pad(out).sum(), x)
    assert gradient.isfinite().all() and not gradient[0, 2].any()


def test_padding_names_what_does_not_fit() -> None:
    with pytest.raises(TypeError, match=r"mask is float32; it needs to be a torch\.Tensor of bools or integers"):
        flash_dmattn.sequences.Padding(torch.ones(2, 3))
    with pytest.raises(ValueError, match=r"mask has shape \(3,\); it needs \(sequences, tokens\)"):
        flash_dmattn.sequences.Padding(torch.ones(3, dtype=torch.bool))
    with pytest.raises(TypeError, match=r"mask is complex64; it needs to be a torch\.Tensor of bools or integers"):
        flash_dmattn.sequences.Padding(torch.ones(2, 3, dtype=torch.complex64))
    padding = flash_dmattn.sequences.Padding(torch.ones(2, 3, dtype=torch.bool))
    for name, call in (("x", padding.unpad), ("tokens", padding.pad)):
        with pytest.raises(TypeError, match=rf"{name} is a list; it needs to be a torch\.Tensor"):
            call([1.0])
        with pytest.raises(ValueError, match=rf"{name} is on meta; it needs to be on the device of the mask, cpu"):
            call(torch.ones(6, 2, device="meta"))
    with pytest.raises(ValueError, match=r"x has shape \(3, 2\); it needs \(2, 3\) in front"):
        padding.unpad(torch.ones(3, 2))
    with pytest.raises(ValueError, match=r"tokens has shape \(5, 2\); the mask has 6 tokens"):
        padding.pad(torch.ones(5, 2))
    with pytest.raises(ValueError, match=r"tokens has shape \(\); the mask has 6 tokens"):
        padding.pad(torch.ones(()))


def test_inference_mode() -> None:
    """Tensors that it makes have no versions, and cannot be saved for a backward pass."""
    x = torch.randn(7, 2, 8, device=DEVICE)
    outside = Sequences.packed(torch.tensor([0, 3, 7], dtype=torch.int32, device=DEVICE))
    wanted = attention(x, x, x, sequences=outside)
    with torch.inference_mode():
        torch.testing.assert_close(attention(x, x, x, sequences=outside), wanted)
        cu = torch.tensor([0, 3, 7], dtype=torch.int32, device=DEVICE)
        inside = Sequences.packed(cu)
        torch.testing.assert_close(attention(x, x, x, sequences=inside), wanted)
        cu[1] = 5
        moved = attention(x, x, x, sequences=inside)
    other = Sequences.packed(torch.tensor([0, 5, 7], device=DEVICE))
    torch.testing.assert_close(moved, attention(x, x, x, sequences=other))
    y = x.clone().requires_grad_()
    attention(y, y, y, sequences=outside).sum().backward()
    assert y.grad is not None


def test_copies_remember_nothing_of_the_original() -> None:
    x, cu = torch.randn(7, 2, 8), torch.tensor([0, 3, 7], dtype=torch.int32)
    sequences = Sequences.packed(cu)
    stale = attention(x, x, x, sequences=sequences)
    cu[1] = 5
    wanted = attention(x, x, x, sequences=Sequences.packed(torch.tensor([0, 5, 7])))
    assert not torch.equal(stale, wanted)
    copies = (copy.deepcopy(sequences), pickle.loads(pickle.dumps(sequences)), sequences.to("cpu"), replace(sequences))
    for one in (*copies, replace(Sequences.packed(cu.flip(0).flip(0)))):
        assert torch.equal(attention(x, x, x, sequences=one), wanted)
    changed = replace(sequences, cu_seqlens_q=torch.tensor([0, 1, 7], dtype=torch.int32))
    with pytest.raises(ValueError, match="ends with 9"):
        attention(x, x, x, sequences=replace(changed, cu_seqlens_k=torch.tensor([0, 1, 9], dtype=torch.int32)))


@pytest.mark.parametrize("pages", ((0, 4), (3, 0)), ids=("no pages", "pages of no keys"))
def test_a_pool_without_keys(serving: Runner, pages: tuple[int, int]) -> None:
    q, pool = torch.randn(1, 1, 2, 16, device=DEVICE), torch.randn(*pages, 2, 16, device=DEVICE)
    sequences = Sequences.paged(torch.zeros(1, 2, dtype=torch.int32, device=DEVICE), torch.tensor([0], device=DEVICE))
    out = attention(q, pool, pool, sequences=sequences, backend=serving.name)
    assert not out.any()


def test_no_bound_reaches_into_a_pool_without_pages() -> None:
    """Kernels take the nearest page that there is: of none there is no nearest."""
    pool = torch.zeros(0, 4, 2, 16)
    sequences = Sequences("paged", seqlens_k=cu(5), block_table=torch.zeros(1, 2, dtype=torch.int32))
    spec = sequences.describe(torch.zeros(1, 1, 2, 16), pool, pool)
    assert sequences.make_bounds(spec).tolist() == [[0, 1, 0, 0]]


def test_what_sequences_share_is_summed_in_fp32() -> None:
    """dbias of 200 sequences, which 16 bits on the way would leave off by several of its own."""
    number, queries, keys = 200, 2, 4
    torch.manual_seed(0)
    q, k, dout = torch.randn(number, queries, 1, 8), torch.randn(number, keys, 1, 8), torch.rand(number, queries, 1, 8)
    q, k, dout = (x.half().flatten(0, 1) for x in (q, k, dout))
    bias = torch.randn(1, 1, 1, keys).half().requires_grad_()
    cu_q, cu_k = (torch.arange(number + 1, dtype=torch.int32) * n for n in (queries, keys))
    sequences = Sequences.packed(cu_q, cu_k, max_seqlen_q=queries, max_seqlen_k=keys)
    attention(q, k, k, bias=bias, sequences=sequences, backend="eager").backward(dout)
    entries = [x.double().unflatten(0, (number, -1)) for x in (dout, q, k, k)]
    exact = formula.gradients(entries[0], None, *entries[1:], None, bias.detach().double())[3]
    assert (bias.grad.double() - exact).abs().max() < 1e-3 * exact.abs().max()


def test_the_loop_clamps_pages_that_are_not_there() -> None:
    """A call on a CPU refuses them; on a GPU nobody has looked."""
    batch = Batch(torch.tensor([[0, 1, 0, 6]]), torch.tensor([[-1, 1, 7]], dtype=torch.int32), False, False)
    pages = torch.arange(6.0).view(3, 2, 1, 1)
    assert batch.keys(pages, batch.sequences[0]).flatten().tolist() == [0, 1, 2, 3, 4, 5]
