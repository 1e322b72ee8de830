"""What the cuda backend does around its kernels, without a GPU: operators of plain PyTorch stand in for theirs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accuracy import assert_accurate
from cases import ALL, NAMES, Case, Inputs
from layouts import LAYOUTS, offset, rearranged
from out_of_tree import replaced
from torch import Tensor

from flash_dmattn.backends.cuda import bias_rows, passes
from flash_dmattn.backends.cuda.group_rows import Attend, plan_group_rows
from flash_dmattn.backends.cuda.kernels import Kernels
from flash_dmattn.backends.mask_choice import interval_walk, reads_scores
from flash_dmattn.backends.protocol import Availability
from flash_dmattn.dispatch import packers
from flash_dmattn.dispatch.plan import backward_pass
from flash_dmattn.dispatch.registry import BACKENDS
from flash_dmattn.masks import PreparedMask
from flash_dmattn.masks.prepared import operators as preparation
from flash_dmattn.masks.prepared import packing
from flash_dmattn.masks.prepared.storage import IntervalMask
from flash_dmattn.operators import describe_operands
from flash_dmattn.problem import AttentionProblem, Band, Flags, Gradients, MaskView, NeedsGrad, causal_window
from flash_dmattn.problem import inputs as attention
from flash_dmattn.reference import formula
from flash_dmattn.reference.sinks import row_delta

BASE = Case(seqlen_q=150, seqlen_k=264, head_dim=8, num_heads=4, num_heads_k=2, dtype=torch.float32, dlse=True)
TILE = packing.TILE


def can_copy(x: Tensor) -> bool:
    """Whether TMA can read rows of x, 16-bit values as which these fp32 ones count."""
    walks = [stride for size, stride in zip(x.shape[:3], x.stride()[:3]) if size > 1 and stride > 0]
    return x.data_ptr() % 16 == 0 and x.stride(3) == 1 and all(stride % 8 == 0 for stride in walks)


class Operators:
    """The operators of the extension, their arguments checked; `calls` holds those of the backward pass."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []
        self.sink: Tensor | None = None  # the kernels have it from lse, the formula behind them has not

    def allowed(self, q: Tensor, k: Tensor, mask: list[Tensor], low: int, high: int) -> Tensor:
        """The mask that a kernel sees: bits of the tiles that its lists name, or the band."""
        seqlen_q, seqlen_k = q.shape[1], k.shape[1]
        i, j = torch.arange(seqlen_q)[:, None], torch.arange(seqlen_k)
        if not mask:
            return ((low <= j - i) & (j - i <= high))[None, None]
        first, row_lists, lists = mask
        if first.size(3) == 2:
            start, stop = first[:, :, None, :seqlen_k].unbind(-1)
            dense = (i >= start) & (i < stop)
        else:
            dense = packing.unpack_words(first, seqlen_k)
        visited = torch.zeros(*lists.shape[:3], packing.tiles(seqlen_q), dtype=torch.bool)  # (.., keys, queries)
        for place in torch.cartesian_prod(*(torch.arange(n) for n in lists.shape[:3])):
            b, h, column = place.tolist()
            full, partial, *order = lists[b, h, column].tolist()
            visited[b, h, column, order[: full + partial]] = True
        # A tile of keys counts those before it in the row of a tile of queries, which may come in any order.
        counts = row_lists[..., 0] + row_lists[..., 1]
        assert torch.equal(counts, visited.sum(2).to(counts.dtype)), "rows name other tiles than columns"
        spread = visited.mT.repeat_interleave(TILE, 2).repeat_interleave(TILE, 3)[:, :, :seqlen_q, :seqlen_k]
        assert not (dense & ~spread).any(), "the lists leave out a tile"
        return dense

    def differentiate(
        self,
        dout: Tensor,
        dlse: Tensor | None,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: list[Tensor],
        order: Tensor | None,
        bias: Tensor | None,
        out: Tensor,
        lse: Tensor,
        dq: Tensor | None,
        dk: Tensor | None,
        dv: Tensor | None,
        dbias: Tensor | None,
        sums: Tensor | None,
        delta: Tensor | None,
        low: int,
        high: int,
        softmax_scale: float,
        softcap: float,
        deterministic: bool,
        num_dbias_chunks: int,
        dropout: Tensor | None,
        dropout_p: float,
    ) -> None:
        """`cuda_backward_kernel`: all of dbias is written, 0 where nothing is allowed."""
        self.calls.append({"dq": dq, "dk": dk, "dv": dv, "dbias": dbias, "sums": sums, "deterministic": deterministic})
        self.calls[-1] |= {"order": order, "delta": delta, "mask": mask}
        assert dropout is None and dropout_p == 0.0
        assert order is None or dq is not None or not deterministic
        assert all(can_copy(x) for x in (dout, q, k, v)) and out.is_contiguous() and lse.is_contiguous()
        allowed = self.allowed(q, k, mask, low, high)
        per_score = bias is not None and all(bias.shape[dim] > 1 and bias.stride(dim) > 0 for dim in (2, 3))
        assert not per_score or can_copy(bias)
        assert not per_score or not mask or mask[0].size(3) > 2, "beside a bias per score the kernels read bits"
        scores = torch.zeros(q.shape[0], q.shape[2], q.shape[1], k.shape[1])
        if bias is not None:
            repeat = q.shape[2] // bias.shape[1] if bias.shape[1] > 1 else 1
            scores = scores + bias.repeat_interleave(repeat, 1)
        flags = {"softmax_scale": softmax_scale, "softcap": softcap, "sink": self.sink}
        if delta is not None:
            assert delta.is_contiguous() and delta.dtype == torch.float32
            delta.copy_(row_delta(dout, out, dlse, lse))
        allowed_each = allowed.expand(-1, -1, *scores.shape[2:])
        found = list(formula.gradients(dout, dlse, q, k, v, allowed_each, scores, **flags))
        if order is not None:  # by place; what the kernels return is by key
            each = order.long().expand(q.shape[0], k.shape[2], -1)
            for n in (1, 2):
                place = each.mT[..., None].expand(found[n].shape)
                found[n] = torch.empty_like(found[n]).scatter_(1, place, found[n])
            of_heads = each.repeat_interleave(q.shape[2] // k.shape[2], 1)[:, :, None].expand(found[3].shape)
            found[3] = torch.empty_like(found[3]).scatter_(3, of_heads, found[3])
            assert sums is None or not sums.any(), "the kernels add to them"
        for to, x in zip((dq, dk, dv), found[:3], strict=True):
            if to is not None:
                assert to.is_contiguous()
                to.copy_(x)
        ds = found[3]
        if sums is not None:
            assert sums.dtype == torch.float32
            sums.copy_(ds.sum(2))
        if dbias is not None:
            assert dbias.is_contiguous()
            if dbias.shape[:2] != ds.shape[:2]:
                ds = ds.unflatten(1, (dbias.shape[1], -1)).sum(2).sum_to_size(dbias.shape)
            dbias.copy_(ds)


def gather_keys(k: Tensor, v: Tensor, order: Tensor, bounds: Tensor) -> tuple[Tensor, ...]:
    """`cuda_gather_keys`: zeros for dead keys."""
    each = order.long().expand(k.shape[0], k.shape[2], -1).mT[..., None]
    start, stop = bounds[:, :, : order.shape[2]].unbind(-1)
    dead = (start >= stop).expand(k.shape[0], k.shape[2], -1).mT[..., None]
    return tuple(x.gather(1, each.expand(-1, -1, -1, x.shape[3])).masked_fill(dead, 0.0) for x in (k, v))


def gather_bias(bias: Tensor, order: Tensor) -> Tensor:
    """`cuda_gather_bias`."""
    bias, heads = bias[:, :, :1], max(bias.shape[1], order.shape[1])
    bias, order = (x.repeat_interleave(heads // x.shape[1], 1) for x in (bias, order))
    batch = max(bias.shape[0], order.shape[0])
    return bias.float().expand(batch, -1, 1, -1).gather(3, order.long()[:, :, None].expand(batch, -1, -1, -1))


def interval_bits(bounds: Tensor, seqlen_q: int) -> Tensor:
    """`cuda_interval_bits`."""
    start, stop = bounds[:, :, None].unbind(-1)
    rows = torch.arange(seqlen_q)[:, None]
    return packing.pack_words((rows >= start) & (rows < stop))


@pytest.fixture
def operators(monkeypatch: pytest.MonkeyPatch) -> Iterator[Operators]:
    """The stand-ins, with memory that is not written full of NaN."""
    found = Operators()
    kernels = Kernels(None, found.differentiate, gather_keys, gather_bias, interval_bits)
    monkeypatch.setattr(passes, "kernels", lambda: kernels)
    torch.use_deterministic_algorithms(True)
    try:
        yield found
    finally:
        torch.use_deterministic_algorithms(False)


def differentiate(
    x: attention.Inputs, dout: Tensor, dlse: Tensor | None, flags: Flags, needs_grad: NeedsGrad, allowed: Tensor | None
) -> tuple[Tensor, Tensor, Gradients]:
    """(out, lse, gradients) of a call, the gradients from the backend."""
    numbers = {"softmax_scale": flags.softmax_scale, "softcap": flags.softcap}
    window = {"window_size": flags.window}
    out, lse = formula.attention(x.q, x.k, x.v, allowed, x.bias, **numbers, **window, sink=x.sink)
    dlse = None if dlse is None else dlse.masked_fill(lse == -torch.inf, 0.0)
    run = backward_pass(BACKENDS["cuda"], describe_operands(x, flags, needs_grad))
    return out, lse, run(attention.Saved(x, out, lse), dout, dlse)


def check(
    case: Case, given: Inputs | None = None, mask: MaskView | None = None, *, deterministic: bool = False
) -> None:
    """The gradients that the backend returns for a case, by the accuracy rule."""
    inputs = case.build("cpu")
    x = inputs if given is None else given
    inputs = replace(inputs, mask=x.mask)
    if mask is None:
        mask = MaskView() if x.mask is None else MaskView("dense", (x.mask,))
    flags = flags_of(case, deterministic)
    needs_grad = NeedsGrad(*(name in case.needs_grad and (name != "bias" or x.bias is not None) for name in NAMES))
    needs_grad = needs_grad._replace(sink=x.sink is not None and "sink" in case.needs_grad)
    tensors = attention.Inputs(x.q, x.k, x.v, mask, x.bias, x.sink)
    out, lse, gradients = differentiate(tensors, x.dout, x.dlse, flags, needs_grad, x.mask)
    names = ("dq", "dk", "dv", "dbias") + ("dsink",) * (x.sink is not None)
    assert_accurate({"out": out, "lse": lse, **dict(zip(names, gradients, strict=True))}, case, inputs)


def flags_of(case: Case, deterministic: bool = False) -> Flags:
    """The numbers of a case."""
    window = causal_window(case.is_causal, case.window_size or (-1, -1))
    scale = case.head_dim**-0.5 if case.softmax_scale is None else case.softmax_scale
    return Flags(*window, scale, case.softcap, deterministic)


BIASES = (
    None,
    ("B", "Hq", "Lq", "Lk"),
    ("1", "Hq", "Lq", "Lk"),
    ("B", "Hk", "Lq", "Lk"),
    ("1", "1", "Lq", "Lk"),
    ("B", "Hq", "1", "Lk"),
    ("1", "Hk", "1", "Lk"),
    ("B", "1", "1", "Lk"),
    ("B", "Hk", "Lq", "1"),
    ("1", "1", "1", "1"),
)


@pytest.mark.parametrize("bias", BIASES, ids=str)
@pytest.mark.parametrize("mask", (None, ("1", "Hk", "Lq", "Lk")), ids=str)
@pytest.mark.parametrize("is_causal", (False, True))
def test_gradients(
    bias: tuple[str, ...] | None, mask: tuple[str, ...] | None, is_causal: bool, operators: Operators
) -> None:
    check(BASE.with_(bias=bias, mask=mask, mask_kind="empty_tiles", is_causal=is_causal))
    assert len(operators.calls) == 1


@pytest.mark.parametrize("sink", ("normal", "inf", "huge"))
def test_delta_serves_what_is_made_of_it(sink: str, operators: Operators) -> None:
    """dsink, and dbias of one value per query: alone they take no other kernel, and no mask."""
    for bias in (None, ("B", "Hk", "Lq", "1"), ("B", "Hq", "Lq", "Lk")):
        for needs_grad in (("sink",), ("bias",), (*ALL, "sink"), ("q", "bias"), ("v",)):
            case = BASE.with_(sink=sink, bias=bias, needs_grad=needs_grad, mask=("1", "Hk", "Lq", "Lk"))
            operators.sink = case.build("cpu").sink
            operators.calls.clear()
            check(case)
            per_query = "bias" in needs_grad and bias is not None and bias[3] == "1"
            (call,) = operators.calls or [{"delta": None}]
            assert (call["delta"] is not None) == ("sink" in needs_grad or per_query)
            if needs_grad == ("sink",) or (needs_grad == ("bias",) and per_query):
                assert not call["mask"] and all(call[name] is None for name in ("dq", "dk", "dv", "dbias", "sums"))


def test_a_softcap_reaches_the_kernels(operators: Operators) -> None:
    for bias in BIASES:
        check(BASE.with_(bias=bias, softcap=0.5))


def test_a_bias_that_is_read_but_takes_no_gradient(operators: Operators) -> None:
    for heads in ("1", "Hk", "Hq"):
        check(BASE.with_(bias=("B", heads, "Lq", "Lk"), needs_grad=("q", "k", "v"), window_size=(30, 5)))


@pytest.mark.parametrize("needs_grad", (*((name,) for name in NAMES), ("k", "bias"), ALL), ids=str)
@pytest.mark.parametrize("bias", [bias for bias in BIASES if bias is not None], ids=str)
def test_only_what_is_needed_is_computed(
    needs_grad: tuple[str, ...], bias: tuple[str, ...], operators: Operators
) -> None:
    check(BASE.with_(bias=bias, needs_grad=needs_grad))
    per_query = bias[3] == "1"
    assert len(operators.calls) == (0 if per_query and needs_grad == ("bias",) else 1)
    for call in operators.calls:
        kernels_bias = "bias" in needs_grad and not per_query
        assert [call[f"d{name}"] is not None for name in "qkv"] == [name in needs_grad for name in "qkv"]
        assert (call["sums"] is not None) == (kernels_bias and bias[2] == "1")
        assert (call["dbias"] is not None) == (kernels_bias and bias[2] != "1")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_the_copy_engine_cannot_read_is_copied(layout: str, operators: Operators) -> None:
    case = BASE.with_(bias=("B", "Hq", "1", "Lk"))
    check(case, rearranged(case.build("cpu"), LAYOUTS[layout]))


@pytest.mark.parametrize("start", (1, 4, 7))
@pytest.mark.parametrize("seqlen_k", (264, 263))
def test_a_bias_that_starts_between_16_bytes_is_copied(start: int, seqlen_k: int, operators: Operators) -> None:
    case = BASE.with_(seqlen_k=seqlen_k, bias=("1", "Hq", "Lq", "Lk"), needs_grad=("q", "k", "v"))
    inputs = case.build("cpu")
    frame = torch.full((1, 4, 150, 272), torch.nan)
    shared = offset(frame, start)[..., :seqlen_k]
    shared.copy_(inputs.bias)
    expanded = shared.expand(2, -1, -1, -1)
    copy = bias_rows.readable(expanded)
    assert can_copy(copy) and copy.stride(0) == 0 and torch.equal(copy, expanded)
    assert (copy.data_ptr() == shared.data_ptr()) == (start % 4 == 0)  # values of 4 bytes
    check(case, replace(inputs, bias=shared))


@pytest.mark.parametrize("seqlen_k", (49, 264))
@pytest.mark.parametrize("heads", ("1", "Hk"))
def test_a_bias_of_rows_that_start_anywhere_is_copied_where_it_is_small(
    heads: str, seqlen_k: int, operators: Operators
) -> None:
    """What TMA reads starts on 16 bytes, and holds nothing else of the memory round the bias."""
    case = BASE.with_(batch=8, head_dim=64, seqlen_k=seqlen_k, bias=("1", heads, "Lq", "Lk"))
    inputs = case.build("cpu")
    frame = torch.full((*inputs.bias.shape[:3], seqlen_k | 1), torch.nan)
    shared = frame[..., :seqlen_k].copy_(inputs.bias)

    def read_bias(bias: Tensor, q: Tensor, v: Tensor) -> Tensor:
        ready = bias_rows.forward_bias(describe_operands(attention.Inputs(q, v, v, bias=bias), flags_of(case)))
        return bias if ready is None else ready(bias)

    for bias in (shared, shared.expand(8, -1, -1, -1), inputs.bias.mT.contiguous().mT):
        read = read_bias(bias, inputs.q, inputs.v)
        assert can_copy(read) and torch.equal(read, bias) and (read.shape[0] == 1 or read.stride(0) == 0)
    # Beside few entries of few columns; not shared; of another dtype.
    assert read_bias(shared, inputs.q[:2, ..., :8], inputs.v[:2, ..., :8]) is shared
    assert read_bias(shared, inputs.q[:1], inputs.v[:1]) is shared
    assert read_bias(shared, inputs.q.half(), inputs.v.half()) is shared
    check(case, replace(inputs, bias=shared))


def test_dout_that_is_expanded_is_copied(operators: Operators) -> None:
    case = BASE.with_(batch=1)
    inputs = case.build("cpu")
    ones = torch.ones(1, 1, 1, 1).expand(inputs.dout.shape)
    tensors = attention.Inputs(inputs.q, inputs.k, inputs.v)
    _, _, found = differentiate(tensors, ones, None, flags_of(case), NeedsGrad(True, True, True), None)
    wanted = formula.gradients(ones, None, inputs.q, inputs.k, inputs.v)
    for x, y in zip(found[:3], wanted[:3], strict=True):
        torch.testing.assert_close(x, y)


def test_prepared_masks_are_read_as_they_are(operators: Operators, monkeypatch: pytest.MonkeyPatch) -> None:
    case = BASE.with_(mask=("B", "1", "Lq", "Lk"), mask_kind="empty_rows", bias=("B", "Hq", "Lq", "Lk"), is_causal=True)
    inputs = case.build("cpu")
    prepared = PreparedMask.from_mask(inputs.mask, seqlen_q=case.seqlen_q, seqlen_k=case.seqlen_k, is_causal=True)
    monkeypatch.setattr(operators, "calls", [])
    check(case, inputs, prepared.view)
    assert len(operators.calls) == 1


@pytest.mark.parametrize("bias", BIASES, ids=str)
@pytest.mark.parametrize("heads", ((1, 1), (2, 1), (1, 2), (2, 2)), ids=str)
def test_an_interval_mask_is_read_in_its_order(
    bias: tuple[str, ...] | None, heads: tuple[int, int], operators: Operators
) -> None:
    case = BASE.with_(bias=bias)
    scores = torch.randn(*heads, 1, case.seqlen_k, generator=torch.Generator().manual_seed(1))
    prepared = PreparedMask.from_topk(scores, 20, is_causal=True, seqlen_q=case.seqlen_q, reorder=True)
    check(case, replace(case.build("cpu"), mask=prepared.unpacked()), prepared.view)
    per_score = bias is not None and bias[2:] == ("Lq", "Lk")
    assert (operators.calls[0]["order"] is None) == per_score


@pytest.mark.parametrize("bias", BIASES, ids=str)
@pytest.mark.parametrize("heads", ((1, 1), (2, 1), (1, 2), (2, 2)), ids=str)
@pytest.mark.parametrize("deterministic", (False, True))
def test_an_order_of_few_places(
    bias: tuple[str, ...] | None, heads: tuple[int, int], deterministic: bool, operators: Operators
) -> None:
    """Kernels see as many keys as there are places; other keys get zeros."""
    case = BASE.with_(bias=bias)
    generator = torch.Generator().manual_seed(1)
    scores = torch.randn(*heads, 1, case.seqlen_k, generator=generator)
    keys = torch.rand(*heads, 1, case.seqlen_k, generator=generator) < 0.3
    prepared = PreparedMask.from_topk(scores, 20, is_causal=True, mask=keys, seqlen_q=case.seqlen_q, compact=True)
    assert prepared.num_places == 128
    check(case, replace(case.build("cpu"), mask=prepared.unpacked()), prepared.view, deterministic=deterministic)
    call = operators.calls[0]
    assert (call["order"] is None) == (bias is not None and bias[2:] == ("Lq", "Lk"))
    if call["order"] is not None:
        assert call["order"].shape == prepared.order.shape and call["dk"].shape[1] == call["dv"].shape[1] == 128
        assert torch.equal(call["order"], torch.arange(128, dtype=torch.int32).expand_as(prepared.order))


def test_a_mask_for_each_head_of_a_group_keeps_keys_in_their_own_order(operators: Operators) -> None:
    scores = torch.randn(1, BASE.num_heads, 1, BASE.seqlen_k, generator=torch.Generator().manual_seed(1))
    prepared = PreparedMask.from_topk(scores, 20, is_causal=True, seqlen_q=BASE.seqlen_q, reorder=True)
    check(BASE, replace(BASE.build("cpu"), mask=prepared.unpacked()), prepared.view)
    assert operators.calls[0]["order"] is None


def test_a_bias_per_key_that_is_expanded_follows_an_order_if_it_takes_no_gradient(operators: Operators) -> None:
    """Its gradient would have a value for each score."""
    case = BASE.with_(bias=("B", "Hq", "1", "Lk"), needs_grad=("q", "k", "v"))
    scores = torch.randn(1, 1, 1, case.seqlen_k, generator=torch.Generator().manual_seed(1))
    view = PreparedMask.from_topk(scores, 20, is_causal=True, seqlen_q=case.seqlen_q, reorder=True).view
    inputs = case.build("cpu")
    assert inputs.bias is not None
    expanded = inputs.bias.expand(-1, -1, case.seqlen_q, -1)
    mask = IntervalMask(case.seqlen_q, case.seqlen_k, *view.tensors).unpacked()
    check(case, replace(inputs, mask=mask, bias=expanded), view)
    assert operators.calls[0]["order"] is not None
    for bias, needs_dbias in ((expanded, True), (expanded.contiguous(), False)):
        tensors = attention.Inputs(inputs.q, inputs.k, inputs.v, view, bias)
        problem = describe_operands(tensors, flags_of(case), NeedsGrad(bias=needs_dbias))
        assert interval_walk(problem, view).order is None and reads_scores(problem)


@pytest.mark.parametrize("needs_grad", (("k",), ("bias",), ("q", "v")), ids=str)
def test_the_sums_of_dq_fix_the_order_of_the_others(needs_grad: tuple[str, ...], operators: Operators) -> None:
    """Where keys come in an order and it is to be deterministic, dq is summed though nobody asks for it."""
    case = BASE.with_(bias=("1", "Hk", "1", "Lk"), needs_grad=needs_grad)
    scores = torch.randn(1, 2, 1, case.seqlen_k, generator=torch.Generator().manual_seed(1))
    prepared = PreparedMask.from_topk(scores, 20, is_causal=True, seqlen_q=case.seqlen_q, reorder=True)
    check(case, replace(case.build("cpu"), mask=prepared.unpacked()), prepared.view, deterministic=True)
    assert operators.calls[0]["dq"] is not None and operators.calls[0]["order"] is not None


@pytest.mark.parametrize("sizes", ({"batch": 0}, {"seqlen_q": 0}, {"seqlen_k": 0}), ids=str)
def test_nothing_to_attend(sizes: dict[str, int], operators: Operators) -> None:
    for bias in BIASES:
        check(BASE.with_(bias=bias, **sizes))
    assert not operators.calls


# Who packs a mask


@pytest.mark.parametrize(
    ("is_cuda", "arch", "disabled", "usable", "packs"),
    (
        (True, "sm_90", (), True, True),
        (True, "sm_90", ("triton",), True, True),
        (True, "sm_90", ("cuda",), True, False),
        (True, "sm_90", (), False, False),
        (True, "sm_80", (), True, False),
        (True, "gfx942", (), True, False),
        (False, "cpu", (), True, False),
    ),
)
def test_the_extension_packs_where_it_works(
    is_cuda: bool,
    arch: str,
    disabled: tuple[str, ...],
    usable: bool,
    packs: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(packers, "device_arch", lambda device: arch)
    monkeypatch.setattr(packers, "disabled", lambda: disabled)
    with replaced("cuda", probe=lambda: Availability(usable)):
        assert packers.packs_by_extension(SimpleNamespace(is_cuda=is_cuda, device="cuda:0")) == packs


@pytest.mark.parametrize("shape", ((2, 1, 150, 300), (1, 2, 150, 1)), ids=str)
@pytest.mark.parametrize("is_causal", (False, True))
def test_its_operator_receives_the_whole_mask_and_the_band(
    shape: tuple[int, ...], is_causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    mask = torch.rand(shape) < 0.4
    wanted = preparation.prepare(mask, 150, 300, -1, 0 if is_causal else -1, "tiles", False)

    def pack(dense: Tensor, low: int, high: int, has_band: bool) -> list[Tensor]:
        assert dense.shape == (*shape[:2], 150, 300)
        bits, classes = packing.pack_mask(dense, Band(low, high) if has_band else None)
        return [bits, classes, *packing.list_tiles(classes)]

    monkeypatch.setattr(packers, "packs_by_extension", lambda tensor: True)
    names = ("cuda_pack_mask", "cuda_interval_tiles", "cuda_topk_intervals", "cuda_key_order")
    extension = SimpleNamespace(**dict.fromkeys(names, SimpleNamespace(default=pack)))
    monkeypatch.setattr(packers, "_extension_packer", lambda: packers.around_extension(extension))
    found = preparation.prepare(mask, 150, 300, -1, 0 if is_causal else -1, "tiles", False)
    assert all(torch.equal(x, y) for x, y in zip(found, wanted, strict=True))


@pytest.mark.parametrize("bias", (None, ("B", "Hq", "1", "Lk"), ("1", "1", "1", "1")), ids=str)
def test_the_heads_of_a_group_read_the_keys_in_sight_of_one_query(bias: tuple[str, ...] | None) -> None:
    case = BASE.with_(seqlen_q=1, bias=bias, window_size=(30, 5))
    inputs = case.build("cpu")
    x = attention.Inputs(inputs.q, inputs.k, inputs.v, bias=inputs.bias)

    def plan(p: AttentionProblem) -> Attend:
        def attend(x: attention.Inputs, out: Tensor, lse: Tensor) -> None:
            assert x.q.shape == (p.batch, 2, 2, 8) and x.k.shape[1] == x.v.shape[1] == p.seqlen_k == 31
            for to, value in zip((out, lse), formula.attention(x.q, x.k, x.v, None, x.bias)[:2], strict=True):
                to.copy_(value)

        return attend

    wanted = formula.attention(x.q, x.k, x.v, None, x.bias, window_size=(30, 5))[:2]
    results = [torch.empty_like(w, memory_format=torch.contiguous_format) for w in wanted]
    plan_group_rows(describe_operands(x, flags_of(case)), plan)(x, *results)
    torch.testing.assert_close(results, list(wanted))
