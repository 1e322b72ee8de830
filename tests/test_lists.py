"""Masks of lists, values for their entries, and the selectors that make both: meaning, gradients, edges, errors."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from cases import DEVICE
from conftest import needs_triton, refusal_of
from forked import interpret
from sequence_list_cases import BESIDE, PAGED, SequenceLists
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._python_dispatch import TorchDispatchMode

import flash_dmattn
from flash_dmattn import Sequences, attention, biases, explain
from flash_dmattn.backends import eager
from flash_dmattn.biases import ListBias
from flash_dmattn.masks import (
    IndexScores,
    PreparedMask,
    combine,
    expand_blocks,
    mask_stats,
    sliding_window_mask,
    topk_mask,
)

F64 = torch.float64
from_lists, from_topk_lists = PreparedMask.from_lists, PreparedMask.from_topk_lists


class Case(NamedTuple):
    """Sizes of a call with lists; heads of the lists and of the values, and the rows of the values."""

    heads: tuple[int, int]
    lengths: tuple[int, int]
    entries: int
    block: tuple[int, int] = (1, 1)
    list_heads: int = 1
    value_heads: int = 1
    by_query: bool = True
    is_causal: bool = True
    window: tuple[int, int] | None = None
    list_batch: int = 1

    @property
    def rows(self) -> int:
        """Lists of a head."""
        return -(-self.lengths[0] // self.block[0])

    @property
    def blocks(self) -> int:
        """Blocks of keys."""
        return -(-self.lengths[1] // self.block[1])

    @property
    def band(self) -> dict[str, Any]:
        """Arguments of builders."""
        return {"is_causal": self.is_causal, "window_size": self.window}

    def index(self) -> Tensor:
        """A random index: entries twice, -1, later keys, an empty list and a list of one key."""
        made = torch.randint(-1, self.blocks, (self.list_batch, self.list_heads, self.rows, self.entries))
        made[:, :, self.rows // 2] = -1
        made[:, :, self.rows // 3] = self.blocks - 1
        return made

    def lists(self, index: Tensor) -> PreparedMask:
        """The mask of an index."""
        q, k = self.lengths
        return from_lists(index, seqlen_q=q, seqlen_k=k, block_size=self.block, **self.band)


CASES = {
    "one list for all heads": Case((4, 2), (21, 30), 7),
    "a list for each key head": Case((4, 2), (21, 30), 7, (1, 1), 2, 2, list_batch=2),
    "values of query heads": Case((4, 2), (21, 30), 7, (1, 1), 1, 4),
    "lists of query heads": Case((4, 2), (12, 9), 5, (1, 1), 4, 2, is_causal=False),
    "blocks of keys, the last one short": Case((4, 1), (20, 33), 3, (1, 8)),
    "blocks of both, values by list": Case((4, 2), (20, 33), 3, (8, 8), 2, 4, False, window=(9, -1)),
    "blocks of both, values by query": Case((3, 3), (19, 40), 4, (4, 4), 3, 3, True, False),
    "a window": Case((2, 1), (21, 30), 9, window=(5, 2), is_causal=False),
    "fewer keys than queries": Case((2, 2), (17, 6), 4),
    "fewer keys than entries": Case((2, 2), (5, 4), 9),
    "one entry": Case((2, 1), (9, 9), 1),
    "one query": Case((4, 2), (1, 30), 6),
}


def by_loops(case: Case, index: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """The mask without its band, and the bias, entry by entry: of equal entries the first one counts."""
    batch, heads = max(index.shape[0], values.shape[0]), case.heads[0]
    seqlen_q, seqlen_k = case.lengths
    allowed = torch.zeros(batch, heads, seqlen_q, seqlen_k, dtype=torch.bool)
    chosen = torch.zeros(batch, heads, seqlen_q, seqlen_k, dtype=torch.long)
    per_query = values.repeat_interleave(heads // values.shape[1], 1)
    if values.shape[2] != seqlen_q:
        per_query = per_query.repeat_interleave(case.block[0], 2)[:, :, :seqlen_q]
    for b in range(batch):
        for h in range(heads):
            for i in range(seqlen_q):
                own = index[b % index.shape[0], h * index.shape[1] // heads, i // case.block[0]]
                for slot in reversed(range(len(own))):
                    block = int(own[slot])
                    if block >= 0:
                        keys = slice(block * case.block[1], (block + 1) * case.block[1])
                        allowed[b, h, i, keys], chosen[b, h, i, keys] = True, slot
    bias = per_query.expand(batch, *per_query.shape[1:]).gather(3, chosen)
    return allowed, bias * allowed


def leaves(case: Case, batch: int = 2, dtype: torch.dtype = F64) -> list[Tensor]:
    """q, k, v, values and a sink, with gradients."""
    (heads, heads_k), (seqlen_q, seqlen_k) = case.heads, case.lengths
    rows = seqlen_q if case.by_query else case.rows
    shapes = (
        (batch, seqlen_q, heads, 8),
        (batch, seqlen_k, heads_k, 8),
        (batch, seqlen_k, heads_k, 6),
        (1, case.value_heads, rows, case.entries),
        (heads,),
    )
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


def results(call: Callable[..., tuple[Tensor, Tensor]], tensors: list[Tensor]) -> list[Tensor]:
    """out, lse and all gradients, of fixed gradients of both results."""
    out, lse = call(*tensors)
    sent = [torch.linspace(-1, 2, x.numel(), dtype=x.dtype).view(x.shape) for x in (out, lse)]
    finite = lse.masked_fill(lse == -torch.inf, 0.0)
    return [out, lse, *torch.autograd.grad((out, finite), tensors, sent)]


def assert_close(got: list[Tensor], wanted: list[Tensor], **tolerance: float) -> None:
    for name, x, y in zip(("out", "lse", "dq", "dk", "dv", "dvalues", "dsink"), got, wanted, strict=False):
        torch.testing.assert_close(x, y, msg=lambda text, name=name: f"{name}: {text}", **tolerance)


@pytest.fixture(params=(2**28, 20_000), ids=("one chunk", "many chunks"))
def chunks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Calls of eager in few or in many chunks."""
    eager.set_chunk_bytes(request.param)
    yield
    eager.set_chunk_bytes(eager.chunked.DEFAULT_CHUNK_BYTES)


@pytest.mark.parametrize("backend", ("eager", "reference"))
@pytest.mark.parametrize("name", CASES)
@pytest.mark.usefixtures("chunks")
def test_lists_are_the_mask_and_the_bias_that_they_stand_for(name: str, backend: Any) -> None:
    case = CASES[name]
    index, tensors = case.index(), leaves(case)
    lists = case.lists(index)

    def listed(q: Tensor, k: Tensor, v: Tensor, values: Tensor, sink: Tensor, softcap: float) -> Any:
        others: dict[str, Any] = {"sink": sink, "softcap": softcap, "return_lse": True, "backend": backend}
        return attention(q, k, v, lists, ListBias(values), **others)

    def dense(q: Tensor, k: Tensor, v: Tensor, values: Tensor, sink: Tensor, softcap: float) -> Any:
        mask, bias = by_loops(case, index, values)
        others: dict[str, Any] = {"sink": sink, "softcap": softcap, "return_lse": True, **case.band}
        return attention(q, k, v, mask, bias, backend="reference", **others)

    for softcap in (0.0, 1.5):
        got, wanted = (results(partial(call, softcap=softcap), tensors) for call in (listed, dense))
        assert_close(got, wanted)
    again = results(partial(listed, softcap=1.5), tensors)
    assert all(torch.equal(x, y) for x, y in zip(got, again, strict=True))


@pytest.mark.parametrize("name", CASES)
def test_a_mask_of_lists_is_the_mask_that_it_stands_for(name: str) -> None:
    case = CASES[name]
    index = case.index()
    lists = case.lists(index)
    heads = (case.list_heads, case.list_heads)
    mask, _ = by_loops(case._replace(heads=heads), index, torch.zeros(1, 1, case.lengths[0], case.entries))
    wanted = PreparedMask.from_mask(mask, seqlen_q=case.lengths[0], **case.band, as_tiles=True)
    assert lists.form == "lists" and lists.shape == mask.shape
    assert torch.equal(lists.dense(), wanted.dense())
    for start, stop in ((3, 11), (0, 1), (-2, None), (4, 4)):
        assert torch.equal(lists.dense(start, stop), wanted.dense()[:, :, start:stop])
    assert lists.stats() == mask_stats(combine(wanted.dense()), block_size=(128, 128))
    keys, count, slots = lists.tensors
    there = torch.arange(case.entries) < count[..., None]
    assert torch.equal(there, keys >= 0) and torch.equal(there, slots >= 0)
    assert (keys.diff(dim=-1)[there[..., 1:]] > 0).all()
    listed_keys = index.gather(3, slots.clamp(min=0).long())
    assert torch.equal(torch.where(there, listed_keys.int(), -1), keys)
    for x in (pickle.loads(pickle.dumps(lists)), copy.deepcopy(lists), lists.to("cpu")):
        assert torch.equal(x.dense(), lists.dense()) and x._call_key == lists._call_key
    assert lists.to("meta").device.type == "meta"


def test_of_equal_entries_the_first_counts_and_others_have_no_gradient() -> None:
    lists = from_lists(torch.tensor([[4, 2, 4, -1, 2, 0]]), seqlen_k=6)
    values = torch.tensor([[[1.0, 2.0, 30.0, 40.0, 50.0, 3.0]]], requires_grad=True)
    q = torch.zeros(1, 1, 1, 8)
    k = torch.zeros(1, 6, 1, 8)
    out, lse = attention(q, k, torch.eye(6).view(1, 6, 1, 6), lists, ListBias(values), return_lse=True)
    p = torch.tensor([3.0, 2.0, 1.0]).softmax(0)
    torch.testing.assert_close(out.flatten(), torch.tensor([p[0], 0, p[1], 0, p[2], 0]))
    lse.sum().backward()
    torch.testing.assert_close(values.grad.flatten(), torch.tensor([p[2], p[1], 0, 0, 0, p[0]]))


def test_a_call_of_lists_has_no_tensor_of_queries_times_keys() -> None:
    sizes: list[int] = []

    class Largest(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            made = function(*args, **(kwargs or {}))
            sizes.extend(
                x.numel() for x in (made if isinstance(made, (tuple, list)) else (made,)) if isinstance(x, Tensor)
            )
            return made

    length, entries = 512, 8
    q, k = torch.randn(2, 1, length, 1, 8, requires_grad=True)
    scores = IndexScores(torch.randn(1, length, 2, 4), torch.randn(1, length, 4), torch.rand(1, length, 2))
    lists = from_topk_lists(scores, entries, is_causal=True)
    values = torch.randn(1, 1, length, entries, requires_grad=True)
    eager.set_chunk_bytes(2**17)
    try:
        with Largest():
            prepared = from_lists(lists.index, seqlen_k=length, is_causal=True)
            attention(q, k, k, prepared, ListBias(values), backend="eager").sum().backward()
            scores.at(prepared)
    finally:
        eager.set_chunk_bytes(eager.chunked.DEFAULT_CHUNK_BYTES)
    assert values.grad is not None and max(sizes) < length * length // 4


# ---- Edges


def run_both(lists: PreparedMask, tensors: list[Tensor]) -> list[list[Tensor]]:
    """All results of eager and of the reference, of q, k, v, values and sink."""

    def call(q: Tensor, k: Tensor, v: Tensor, values: Tensor, sink: Tensor, backend: Any) -> Any:
        return attention(q, k, v, lists, ListBias(values), sink=sink, return_lse=True, backend=backend)

    return [results(partial(call, backend=backend), tensors) for backend in ("eager", "reference")]


@pytest.mark.parametrize("lengths", ((6, 8), (6, 0), (0, 8)))
@pytest.mark.parametrize("entries", (0, 3))
def test_lists_of_nothing(lengths: tuple[int, int], entries: int) -> None:
    case = Case((4, 2), lengths, entries, is_causal=False)
    lists = from_lists(torch.full((case.rows, entries), -1), seqlen_q=lengths[0], seqlen_k=lengths[1])
    tensors = leaves(case)
    for out, lse, *gradients, dsink in run_both(lists, tensors):
        assert not out.any() and torch.equal(lse, tensors[4].detach().view(1, 4, 1).expand_as(lse))
        assert not any(x.any() for x in gradients) and dsink.shape == (4,)
    assert lists.stats().empty_rows == lengths[0] and not lists.dense().any()


def test_one_key_that_every_query_lists() -> None:
    case = Case((4, 2), (40, 40), 2, is_causal=False)
    index = torch.full((1, 1, 40, 2), -1)
    index[..., 1] = 7
    lists, tensors = case.lists(index), leaves(case)
    got, wanted = run_both(lists, tensors)
    assert_close(got, wanted)
    assert got[3][:, 7].abs().min() > 0 and not got[3][:, :7].any() and not got[3][:, 8:].any()
    assert not got[5][..., 0].any()


def test_a_key_that_nobody_lists_reaches_nothing() -> None:
    case = Case((2, 2), (12, 20), 4, is_causal=False)
    index = case.index().clamp(max=18)
    lists, tensors = case.lists(index), leaves(case)
    wanted = run_both(lists, tensors)
    for hidden in (torch.nan, torch.inf):
        poisoned = [x.detach().clone() for x in tensors]
        for x in poisoned[1:3]:
            x[:, 19] = hidden
        eager_results = run_both(lists, [x.requires_grad_() for x in poisoned])[0]
        assert_close(eager_results, wanted[0])


def test_values_may_mask_and_may_be_nan() -> None:
    case = Case((2, 1), (6, 8), 3, is_causal=False)
    index = torch.stack([torch.randperm(8)[:3] for _ in range(6)])
    lists, tensors = from_lists(index, seqlen_k=8), leaves(case)
    with torch.no_grad():
        tensors[3][0, 0, 1] = -torch.inf  # a query without keys
        tensors[3][0, 0, 2, 0] = -torch.inf
    got, wanted = run_both(lists, tensors)
    assert_close(got, wanted)
    assert all(x.isfinite().all() for x in (got[0], *got[2:]))
    with torch.no_grad():
        tensors[3][0, 0, 4, 2] = torch.nan
    for out, *_ in run_both(lists, tensors):
        assert out[:, 4].isnan().all() and out[:, :4].isfinite().all() and out[:, 5:].isfinite().all()


def test_an_index_of_any_strides_and_dtype_and_values_that_are_expanded() -> None:
    case = Case((4, 2), (9, 12), 4, list_heads=2, list_batch=2)
    index = case.index()
    wanted = case.lists(index)
    for other in (index.to(torch.int16), index.mT.contiguous().mT, index.flip(3).flip(3)):
        assert all(torch.equal(x, y) for x, y in zip(case.lists(other).tensors, wanted.tensors, strict=True))
    shared = case.lists(index[:1].expand(5, -1, -1, -1))
    assert shared.shape[0] == 1  # expanded dims are not materialised
    tensors = leaves(case)
    values = torch.randn(1, 1, 1, 4, dtype=F64, requires_grad=True)
    calls = (values.expand(2, 4, 9, 4), values.expand(2, 4, 9, 4).contiguous())
    got, want = (
        torch.autograd.grad(attention(*tensors[:3], wanted, ListBias(x), backend="eager").square().sum(), values)[0]
        for x in calls
    )
    torch.testing.assert_close(got, want)


def test_chunks_that_begin_within_a_block() -> None:
    case = Case((2, 1), (300, 300), 5, (10, 16), value_heads=2, by_query=False)
    index, tensors = case.index(), leaves(case, 1)
    eager.set_chunk_bytes(40_000)
    try:
        got, wanted = run_both(case.lists(index), tensors)
    finally:
        eager.set_chunk_bytes(eager.chunked.DEFAULT_CHUNK_BYTES)
    assert_close(got, wanted)


# ---- Selectors


@pytest.mark.parametrize(
    ("shape", "k", "mask_shape", "local"),
    (
        ((2, 3, 20, 30), 4, None, 0),
        ((2, 3, 20, 30), 4, None, 3),
        ((1, 1, 20, 30), 40, None, 0),
        ((2, 1, 20, 30), 5, (1, 2, 20, 30), 0),
        ((1, 2, 20, 30), 5, (1, 1, 1, 30), 2),
        ((1, 1, 1, 30), 6, None, 0),
    ),
)
@pytest.mark.parametrize("is_causal", (True, False))
def test_topk_lists_are_the_top_k_mask(
    shape: tuple[int, ...], k: int, mask_shape: tuple[int, ...] | None, local: int, is_causal: bool
) -> None:
    scores = torch.randn(shape).round()  # with ties
    scores[..., 3], scores[..., 5] = -torch.inf, torch.nan
    mask = None if mask_shape is None else torch.rand(mask_shape) < 0.6
    if local and not is_causal:
        with pytest.raises(ValueError, match="local is"):
            from_topk_lists(scores, k, local=local)
        return
    lists = from_topk_lists(scores, k, seqlen_q=20, is_causal=is_causal, mask=mask, local=local)
    wanted = topk_mask(scores, k, seqlen_q=20, is_causal=is_causal, mask=mask)
    if local:
        visible = sliding_window_mask(20, 30, (local - 1, 0))
        visible = visible & (scores != -torch.inf)
        wanted = wanted | (visible if mask is None else visible & mask)
    assert torch.equal(lists.dense(), wanted.expand(lists.shape))
    assert torch.equal(lists.count, wanted.expand(lists.shape).sum(-1, dtype=torch.int32))
    assert (lists.keys.diff(dim=-1)[lists.keys[..., 1:] >= 0] > 0).all() and lists.index is lists.keys


@pytest.mark.parametrize("block", ((1, 8), (4, 8), (4, 1)))
def test_topk_lists_of_blocks(block: tuple[int, int]) -> None:
    seqlen_q, seqlen_k = 21, 37
    rows, blocks = -(-seqlen_q // block[0]), -(-seqlen_k // block[1])
    scores = torch.randn(2, 2, rows, blocks)
    lists = from_topk_lists(scores, 2, seqlen_q=seqlen_q, seqlen_k=seqlen_k, block_size=block, is_causal=True)
    last = (torch.arange(rows) * block[0] + block[0] - 1).clamp(max=seqlen_q - 1) + seqlen_k - seqlen_q
    seen = torch.arange(blocks) * block[1] <= last[:, None]
    chosen = topk_mask(scores, 2, mask=seen)
    wanted = PreparedMask.from_mask(expand_blocks(chosen, block, seqlen_q, seqlen_k), is_causal=True)
    assert torch.equal(lists.dense(), wanted.dense())
    values = scores.gather(3, lists.keys.clamp(min=0).long())
    assert values.shape[2:] == (rows, 2)


@pytest.mark.parametrize("relu", (True, False))
@pytest.mark.parametrize("elements", (1 << 22, 600))
def test_index_scores(relu: bool, elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from flash_dmattn.masks import index_scores
    from flash_dmattn.masks.prepared import lists as making

    monkeypatch.setattr(index_scores, "CHUNK_ELEMENTS", elements)
    monkeypatch.setattr(making, "CHUNK_ELEMENTS", elements)
    q, k, weights = (torch.randn(s, dtype=F64, requires_grad=True) for s in ((2, 25, 10, 4), (2, 30, 4), (2, 25, 10)))
    scores = IndexScores(q, k, weights, relu=relu, scale=0.7)
    products = 0.7 * torch.einsum("bihd,bjd->bihj", q, k)
    full = (weights[..., None] * (products.relu() if relu else products)).sum(2)[:, None]
    lists = from_topk_lists(scores, 6, is_causal=True)
    assert torch.equal(lists.dense(), topk_mask(full.detach(), 6, is_causal=True))
    for mask in (lists, from_lists(torch.randint(-1, 30, (1, 1, 25, 7)), seqlen_k=30)):
        got = scores.at(mask)
        wanted = full.gather(3, mask.index.clamp(min=0).long().expand(2, -1, -1, -1)).masked_fill(mask.index < 0, 0)
        torch.testing.assert_close(got, wanted)
        sent = torch.randn_like(got)
        pairs = (torch.autograd.grad(x, (q, k, weights), sent, retain_graph=True) for x in (got, wanted))
        for x, y in zip(*pairs, strict=True):
            torch.testing.assert_close(x, y)


def test_index_scores_with_leading_dims_and_of_blocks() -> None:
    q, k, weights = torch.randn(2, 3, 5, 2, 4), torch.randn(2, 3, 4, 4), torch.rand(2, 3, 5, 2)
    scores = IndexScores(q, k, weights)
    lists = from_topk_lists(scores, 2, seqlen_q=20, seqlen_k=29, block_size=(4, 8), is_causal=True)
    assert lists.shape == (6, 1, 20, 29) and lists.batch_dims == (2, 3)
    assert scores.at(lists).shape == (2, 3, 1, 5, 2)
    x = torch.randn(2, 3, 20, 2, 8)
    y = torch.randn(2, 3, 29, 1, 8)
    values = scores.at(lists)
    got = attention(x, y, y, lists, ListBias(values), backend="eager")
    torch.testing.assert_close(got, attention(x, y, y, lists, ListBias(values), backend="reference"))
    matrix = ListBias(values).dense(lists)
    torch.testing.assert_close(got, attention(x, y, y, lists, matrix, backend="reference"))
    empty = IndexScores(q[..., :0, :, :], k, weights[..., :0, :])
    assert empty.at(from_topk_lists(empty, 2, seqlen_q=0)).shape == (2, 3, 1, 0, 2)


@pytest.mark.parametrize("shape", ((2, 1, 2, 5, 6), (3, 1, 5, 1), (1, 3, 1, 1, 6), (5, 6)))
@pytest.mark.parametrize("shared", (False, True))
def test_a_bias_beside_chosen_values_with_leading_dims(shape: tuple[int, ...], shared: bool) -> None:
    q, k = torch.randn(2, 3, 5, 2, 4), torch.randn(2, 3, 6, 2, 4)
    lists = from_lists(torch.randint(-1, 6, (1, 5, 4) if shared else (2, 1, 1, 5, 4)), seqlen_k=6)
    values, bias = torch.randn(2, 3, 1, 5, 4, requires_grad=True), torch.randn(shape, requires_grad=True)
    outs = [
        attention(q, k, k, lists, added, backend="eager")
        for added in (ListBias(values, bias), ListBias(values, bias).dense(lists))
    ]
    own = lists.dense().view(*(() if shared else (2, 1)), 1, 5, 6)
    outs.append(attention(q, k, k, own, ListBias(values).dense(lists) + bias, backend="reference"))
    gradients = [torch.autograd.grad(out.square().sum(), (values, bias)) for out in outs]
    for out, grads in zip(outs[:2], gradients[:2], strict=True):
        for x, y in zip((out, *grads), (outs[2], *gradients[2]), strict=True):
            torch.testing.assert_close(x, y)
    with pytest.raises(ValueError, match=r"batch dims \(2, 3\), bias.bias \(2, 2\)"):
        attention(q, k, k, lists, ListBias(values, torch.zeros(2, 2, 1, 5, 6)))


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
def test_a_bias_and_chosen_values_of_16_bits_are_added_in_fp32(dtype: torch.dtype) -> None:
    q, k = torch.randn(1, 5, 1, 4, dtype=dtype), torch.randn(1, 6, 1, 4, dtype=dtype)
    lists = from_lists(torch.stack([torch.randperm(6)[:4] for _ in range(5)]), seqlen_k=6)
    values, bias = (10 + torch.randn(1, 1, 5, 4)).to(dtype), (10 + torch.randn(1, 1, 5, 6)).to(dtype)
    exact = ListBias(values.double()).dense(lists) + bias.double()
    wanted = attention(*(x.double() for x in (q, k, k)), lists, exact, return_lse=True)[1]
    for added in (ListBias(values, bias), ListBias(values, bias).dense(lists)):
        lse = attention(q, k, k, lists, added, return_lse=True, backend="eager")[1]
        torch.testing.assert_close(lse.double(), wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize("shape", ((2, 4, 1, 30), (1, 2, 25, 30), (25, 1), (1, 4, 25, 1), (30,)))
@pytest.mark.parametrize("block_q", (1, 4))
def test_a_bias_beside_chosen_values(shape: tuple[int, ...], block_q: int) -> None:
    if len(shape) == 1:
        shape = (1, *shape)
    rows = -(-25 // block_q)
    index = torch.randint(-1, 30, (1, 2, rows, 6))
    lists = from_lists(index, seqlen_q=25, seqlen_k=30, block_size=(block_q, 1), is_causal=True)
    tensors = [torch.randn(s, dtype=F64, requires_grad=True) for s in ((2, 25, 4, 8), (2, 1, rows, 6), shape)]
    k = torch.randn(2, 30, 2, 8, dtype=F64)

    def gradients(way: str) -> tuple[Tensor, ...]:
        q, values, bias = tensors
        by_head = bias.repeat_interleave(2, -3) if bias.dim() > 2 and bias.shape[-3] == 2 else bias
        if way == "with":
            out = attention(q, k, k, lists, ListBias(values, bias), backend="eager")
        else:
            both = ListBias(values).dense(lists).repeat_interleave(2, 1) + by_head
            made = ListBias(values, by_head).dense(lists)
            torch.testing.assert_close(made.repeat_interleave(4 // made.shape[1], 1), both)
            out = attention(q, k, k, lists.dense(), both, backend="reference")
        return out, *torch.autograd.grad(out.square().sum(), tensors)

    for x, y in zip(gradients("with"), gradients("dense"), strict=True):
        torch.testing.assert_close(x, y)


# ---- Ways through a call


def small() -> tuple[PreparedMask, list[Tensor], Callable[..., Tensor]]:
    """Lists, q, k and values, and a call of them."""
    lists = from_lists(torch.randint(-1, 6, (1, 1, 5, 4)), seqlen_k=6, is_causal=True)
    tensors = [torch.randn(s, dtype=F64, requires_grad=True) for s in ((1, 5, 2, 3), (1, 6, 1, 3), (1, 1, 5, 4))]

    def call(q: Tensor, k: Tensor, values: Tensor) -> Tensor:
        return attention(q, k, k, lists, ListBias(values), backend="eager")

    return lists, tensors, call


def test_second_derivatives() -> None:
    _, tensors, call = small()
    assert torch.autograd.gradgradcheck(call, tensors)
    blocks = from_lists(torch.tensor([[0, -1], [1, 0], [1, 1]]), seqlen_q=5, seqlen_k=6, block_size=(2, 4))
    values = torch.randn(1, 2, 3, 2, dtype=F64, requires_grad=True)
    q, k, _ = tensors
    assert torch.autograd.gradgradcheck(
        lambda q, k, values: attention(q, k, k, blocks, ListBias(values), backend="eager"), (q, k, values)
    )


def test_transforms_and_compilers() -> None:
    _, (q, k, values), call = small()
    wanted = torch.autograd.grad(call(q, k, values).sum(), values)[0]
    torch.testing.assert_close(torch.func.grad(lambda values: call(q, k, values).sum())(values), wanted)
    many = torch.randn(3, *q.shape, dtype=F64), torch.randn(3, *values.shape, dtype=F64)
    mapped = torch.vmap(lambda q, values: call(q, k, values))(*many)
    torch.testing.assert_close(mapped, torch.stack([call(q, k, values) for q, values in zip(*many, strict=True)]))
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    got = torch.autograd.grad(compiled(q, k, values).sum(), values)[0]
    torch.testing.assert_close(got, wanted)
    with torch.profiler.profile():  # calls go through the operator
        torch.testing.assert_close(torch.autograd.grad(call(q, k, values).sum(), values)[0], wanted)


def test_a_selector_trains_under_transforms_and_compilers() -> None:
    def call(x: Tensor) -> Tensor:
        scores = IndexScores(x, x[:, :, 0], x[..., 0])
        lists = from_topk_lists(scores, 3, is_causal=True)
        named = from_lists(lists.index.flip(3), seqlen_k=x.shape[1])
        per_key = x[:, :, 0, 0][:, None, None]
        return attention(x, x, x, lists, ListBias(scores.at(lists))) + attention(
            x, x, x, named, ListBias(scores.at(named), per_key)
        )

    def gradient(x: Tensor, of: Callable[[Tensor], Tensor] = call) -> Tensor:
        x = x.clone().requires_grad_()
        return torch.autograd.grad(of(x).square().sum(), x)[0]

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(call, backend=counter, fullgraph=True)
    for length in (6, 9, 11, 14):
        x = torch.randn(2, length, 2, 4, dtype=F64)
        torch.testing.assert_close(gradient(x, compiled), gradient(x))
    assert counter.frame_count == 2

    def dense(x: Tensor) -> Tensor:
        lists = from_topk_lists(IndexScores(x, x[:, :, 0], x[..., 0]), 3, is_causal=True)
        return ListBias(lists.index.to(x.dtype)).dense(lists)

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(dense, backend=counter, fullgraph=True)
    for length in (6, 9, 11, 14):
        x = torch.randn(2, length, 2, 4, dtype=F64)
        assert torch.equal(compiled(x), dense(x))
    assert counter.frame_count == 2
    torch.testing.assert_close(torch.func.grad(lambda x: call(x).square().sum())(x), gradient(x))


def test_an_index_may_have_any_integer_dtype() -> None:
    index = torch.tensor([[0, 3], [2, 1]])
    for dtype in (torch.uint8, torch.int8, torch.int16, torch.int32):
        assert torch.equal(from_lists(index.to(dtype), seqlen_k=4).dense(), from_lists(index, seqlen_k=4).dense())


def test_leading_dims() -> None:
    index = torch.randint(-1, 6, (1, 3, 1, 5, 4))
    lists = from_lists(index, seqlen_k=6)
    assert lists.batch_dims == (1, 3)
    q, k = torch.randn(2, 3, 5, 2, 3, dtype=F64), torch.randn(2, 3, 6, 1, 3, dtype=F64)
    values = torch.randn(2, 1, 1, 5, 4, dtype=F64, requires_grad=True)

    def one(a: int, b: int) -> Tensor:
        own = from_lists(index[0, b], seqlen_k=6)
        return attention(q[a, b][None], k[a, b][None], k[a, b][None], own, ListBias(values[a, 0]), backend="reference")[
            0
        ]

    wanted = torch.stack([torch.stack([one(a, b) for b in range(3)]) for a in range(2)])
    for backend in ("eager", "reference"):
        got = attention(q, k, k, lists, ListBias(values), backend=backend)
        torch.testing.assert_close(got, wanted)
        pair = (torch.autograd.grad(x.square().sum(), values, retain_graph=True)[0] for x in (got, wanted))
        torch.testing.assert_close(*pair)


def test_calls_of_other_lists_do_not_share_a_plan() -> None:
    q = torch.randn(1, 8, 1, 4, dtype=F64)
    values = torch.randn(1, 1, 8, 8, dtype=F64)
    index = torch.arange(8).expand(1, 1, 8, 8).flip(3)
    lists = from_lists(index, seqlen_k=8)
    reference = partial(attention, q, q, q, backend="reference")
    for bias in (ListBias(values), values, ListBias(values)):  # of one shape, since K is Lk
        got = attention(q, q, q, lists, bias, backend="eager")
        torch.testing.assert_close(got, reference(bias=values.flip(3) if isinstance(bias, ListBias) else values))
    for block in (1, 2, 4):
        own = from_lists(index[:, :, ::1] // block, seqlen_q=8, seqlen_k=8, block_size=(1, block), is_causal=True)
        torch.testing.assert_close(attention(q, q, q, own, backend="eager"), reference(is_causal=True))


def test_dropout_drops_what_it_drops_of_the_mask() -> None:
    case = CASES["a list for each key head"]
    index, tensors = case.index(), leaves(case)
    mask, bias = by_loops(case, index, tensors[3])
    outs = []
    for x, added in ((case.lists(index), ListBias(tensors[3])), (mask, bias)):
        torch.manual_seed(3)
        band = {} if isinstance(x, PreparedMask) else case.band
        outs.append(attention(*tensors[:3], x, added, dropout_p=0.4, backend="eager", **band))
    torch.testing.assert_close(*outs)


@pytest.mark.parametrize("name", ("cuda", "flex", "sdpa"))
def test_other_backends_refuse_lists_by_a_rule(name: str) -> None:
    lists, (q, k, values), _ = small()
    with pytest.raises(flash_dmattn.BackendError) as caught:
        attention(q, k, k, lists, ListBias(values), backend=name)
    codes = {reason.code for reason in caught.value.reasons}
    assert {"list_tiles" if name == "cuda" else "lists", "list_bias"} <= codes


@needs_triton
@pytest.mark.skipif(DEVICE == "cuda", reason="a GPU runs the kernels themselves")
def test_triton_serves_calls_with_lists() -> None:
    assert "46 passed, 0 failed" in interpret("interpreted_list_calls.py")


def test_explain_names_the_lists() -> None:
    lists, (q, k, values), _ = small()
    told = explain(q, k, k, lists, ListBias(values))
    assert told.forward == "eager" and "lists of 4 keys, (1, 1, 5, 6)" in str(told.problem)
    assert "list bias (1, 1, 5, 4) float64" in str(told.problem) and "dbias" in str(told.problem)
    blocks = from_lists(torch.tensor([[0], [1], [-1]]), seqlen_q=5, seqlen_k=6, block_size=(2, 4))
    assert "lists of 1 blocks of 4 keys for 2 queries" in str(explain(q, k, k, blocks).problem)


# ---- With sequences


@pytest.mark.parametrize("backend", ("eager", "reference"))
@pytest.mark.parametrize("name", BESIDE)
@pytest.mark.usefixtures("chunks")
def test_lists_beside_sequences_are_the_lists_of_each(name: str, backend: Any) -> None:
    call = BESIDE[name].build()
    tensors = [x.requires_grad_() for x in call.tensors]
    for softcap in (0.0, 1.5):
        got = results(partial(call.together, softcap=softcap, backend=backend), tensors)
        assert_close(got, results(partial(call.alone, softcap=softcap), tensors))
    again = results(partial(call.together, softcap=1.5, backend=backend), tensors)
    assert all(torch.equal(x, y) for x, y in zip(got, again, strict=True))


@pytest.mark.parametrize("backend", ("eager", "reference"))
@pytest.mark.parametrize("name", PAGED)
def test_lists_of_keys_in_pages(name: str, backend: Any) -> None:
    call = PAGED[name].build()
    for got, wanted in zip(call.together(*call.tensors, backend=backend), call.alone(*call.tensors), strict=True):
        torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("name", (*BESIDE, *PAGED))
def test_a_mask_of_lists_beside_sequences_is_the_mask_that_it_stands_for(name: str) -> None:
    case = {**BESIDE, **PAGED}[name]
    call = case.build()
    lists = call.lists
    assert lists.form == "lists" and lists.sequences is not None and lists.batch_dims == lists.shape[:1]
    dense, allowed = lists.dense(), 0
    for (entry, rows), (_, keys) in call.places:
        number = (rows.stop - (rows.start or 0), keys.stop - (keys.start or 0))
        own = call.index[min(entry, len(call.index) - 1), :, rows]
        if 0 in number:
            continue
        alone = from_lists(
            own,
            seqlen_q=number[0],
            seqlen_k=number[1],
            is_causal=case.is_causal,
            window_size=case.window,
            block_size=(1, case.block_k),
        )
        part = dense[entry, :, rows]
        assert torch.equal(part[..., : number[1]], alone.dense()[0]) and not part[..., number[1] :].any()
        allowed += int(part.sum())
    assert torch.equal(lists.dense(1, 4), dense[:, :, 1:4]) and int(dense.sum()) == allowed
    assert lists.stats().density == pytest.approx(allowed / max(1, dense.numel()))
    for x in (pickle.loads(pickle.dumps(lists)), lists.to("cpu")):
        assert torch.equal(x.dense(), dense) and x._call_key == lists._call_key
    assert torch.equal(torch.where(lists.index < 0, call.index.int(), lists.index), call.index.expand_as(lists.index))


def test_scores_of_packed_keys_at_lists() -> None:
    call = BESIDE["packed"].build()
    rows_q, rows_k = call.tensors[0].shape[1], call.tensors[1].shape[1]
    q, k, weights = (
        torch.randn(s, dtype=F64, requires_grad=True) for s in ((1, rows_q, 2, 4), (1, rows_k, 4), (1, rows_q, 2))
    )
    got = IndexScores(q, k, weights).at(call.lists)
    wanted = torch.zeros_like(got)
    for (_, rows), (_, keys) in call.places:
        if rows.start < rows.stop and keys.start < keys.stop:
            alone = from_lists(call.index[0, :, rows], seqlen_k=keys.stop - keys.start, is_causal=True)
            wanted[:, :, rows] = IndexScores(q[:, rows], k[:, keys], weights[:, rows]).at(alone)
    torch.testing.assert_close(got, wanted)
    assert got.abs().max() > 0
    sent = torch.randn_like(got)
    pairs = (torch.autograd.grad(x, (q, k, weights), sent) for x in (got, wanted))
    for x, y in zip(*pairs, strict=True):
        torch.testing.assert_close(x, y)
    with pytest.raises(ValueError, match="blocks of 4 keys with packed sequences; they need single keys"):
        IndexScores(q, k, weights).at(BESIDE["packed, blocks"]._replace(list_heads=1).build().lists)


@pytest.mark.parametrize("local", (0, 2))
@pytest.mark.parametrize("is_causal", (True, False))
def test_topk_lists_of_packed_keys_are_those_of_each_sequence(is_causal: bool, local: int) -> None:
    call = BESIDE["packed"].build()
    sequences, rows_q, rows_k = call.lists.sequences, call.tensors[0].shape[1], call.tensors[1].shape[1]
    scores = IndexScores(torch.randn(1, rows_q, 2, 4), torch.randn(1, rows_k, 4), torch.rand(1, rows_q, 2))
    full = torch.randn(2, rows_q, rows_k).round()
    for x in (scores, full):
        if local and not is_causal:
            with pytest.raises(ValueError, match="local is"):
                from_topk_lists(x, 3, local=local, sequences=sequences)
            continue
        lists = from_topk_lists(x, 3, is_causal=is_causal, local=local, sequences=sequences)
        dense, listed = lists.dense(), 0
        for (_, rows), (_, keys) in call.places:
            if rows.start == rows.stop or keys.start == keys.stop:
                continue
            own = full[:, rows, keys]
            if x is scores:
                own = IndexScores(scores.q[:, rows], scores.k[:, keys], scores.weights[:, rows])
            alone = from_topk_lists(own, 3, is_causal=is_causal, local=local).dense()[0]
            assert torch.equal(dense[0, :, rows, : keys.stop - keys.start], alone)
            listed += int(alone.sum())
        assert int(dense.sum()) == listed == int(lists.count.sum())
        again = from_lists(lists.index, seqlen_k=rows_k, sequences=sequences, is_causal=is_causal)
        assert torch.equal(again.keys, lists.keys) and torch.equal(again.count, lists.count)
    for other, told in ((SLOTS, "of padded sequences"), (TWO, r"for blocks \(1, 2\) of packed sequences")):
        size = {} if other is SLOTS else {"block_size": (1, 2), "seqlen_k": 6}
        with pytest.raises(ValueError, match=told):
            from_topk_lists(torch.zeros(5, 3 if size else 6), 2, sequences=other, **size)
    empty = IndexScores(torch.zeros(1, 3, 2, 4), torch.zeros(1, 5, 4), torch.zeros(1, 3, 2))
    assert (from_topk_lists(empty, 2, sequences=Sequences.packed(torch.tensor([0]))).keys == -1).all()


def test_ways_through_a_call_beside_sequences() -> None:
    call = SequenceLists("packed", (2, 1), ((2, 3), (0, 1), (3, 3)), 3, 1, 1, 2, spare=1).build()
    tensors = [x.requires_grad_() for x in call.tensors]

    def out_of(*tensors: Tensor, backend: Any = "eager") -> Tensor:
        return call.together(*tensors, backend=backend)[0]

    assert torch.autograd.gradgradcheck(out_of, tensors)
    wanted = torch.autograd.grad(out_of(*tensors).square().sum(), tensors)
    compiled = torch.compile(out_of, backend="aot_eager", fullgraph=True)
    for x, y in zip(torch.autograd.grad(compiled(*tensors).square().sum(), tensors), wanted, strict=True):
        torch.testing.assert_close(x, y)
    with torch.profiler.profile():  # calls go through the operator
        for x, y in zip(torch.autograd.grad(out_of(*tensors).square().sum(), tensors), wanted, strict=True):
            torch.testing.assert_close(x, y)
    plain = [x.detach() for x in tensors]
    along = [torch.randn_like(x) for x in plain]
    got, tangent = torch.func.jvp(out_of, tuple(plain), tuple(along))
    _, other = torch.func.jvp(partial(out_of, backend="reference"), tuple(plain), tuple(along))
    torch.testing.assert_close(got, out_of(*plain))
    torch.testing.assert_close(tangent, other)
    many = torch.randn(2, *plain[3].shape, dtype=F64)
    mapped = torch.vmap(lambda values: out_of(*plain[:3], values, plain[4]))(many)
    torch.testing.assert_close(mapped, torch.stack([out_of(*plain[:3], x, plain[4]) for x in many]))
    outs = []
    for backend in ("eager", "reference"):
        torch.manual_seed(3)
        outs.append(call.together(*plain, backend=backend, dropout_p=0.4)[0])
    torch.testing.assert_close(*outs)
    told = explain(
        plain[0][0], plain[1][0], plain[2][0], call.lists, ListBias(plain[3]), sequences=call.lists.sequences
    )
    assert told.forward == "eager" and "lists of 3 keys, (1, 1, 6, 8) of packed queries" in str(told.problem)
    assert "list bias (1, 2, 6, 3) float64 of packed queries" in str(told.problem)


def test_lists_of_no_sequence_and_of_nothing() -> None:
    nobody = Sequences.packed(torch.tensor([0]))
    empty = Sequences.packed(torch.tensor([0, 2]), torch.tensor([0, 0]))
    for sequences, entries, rows_k in ((nobody, 3, 5), (empty, 3, 5), (empty, 0, 5), (empty, 3, 0)):
        index = torch.full((1, 4, entries), -1)
        lists = from_lists(index, seqlen_k=rows_k, sequences=sequences, is_causal=True)
        q, k = torch.randn(4, 2, 3, dtype=F64), torch.randn(rows_k, 1, 3, dtype=F64)
        values, sink = torch.randn(1, 4, entries, dtype=F64, requires_grad=True), torch.randn(2, dtype=F64)
        for backend in ("eager", "reference"):
            others: dict[str, Any] = {"sink": sink, "return_lse": True, "backend": backend}
            out, lse = attention(q, k, k, lists, ListBias(values), sequences=sequences, **others)
            assert not out.any() and (lse[:, 2:] == -torch.inf).all()
            first = torch.full((2, 2), -torch.inf, dtype=F64) if sequences is nobody else sink[:, None].expand(2, 2)
            assert torch.equal(lse[:, :2], first)
            assert not torch.autograd.grad(out.sum(), values)[0].any()
        assert not lists.dense().any()


# ---- Errors

INDEX = torch.zeros(1, 1, 5, 4, dtype=torch.long)
TWO = Sequences.packed(torch.tensor([0, 2, 5]), torch.tensor([0, 1, 6]))
SLOTS = Sequences.padded(seqlens_k=torch.tensor([6, 3]))
VALUES = torch.zeros(1, 1, 5, 4)
listed: Callable[..., PreparedMask] = partial(from_lists, seqlen_k=6)
best: Callable[..., PreparedMask] = partial(from_topk_lists, torch.zeros(5, 6))
LISTS = listed(INDEX, is_causal=True)
BLOCKS = listed(INDEX[..., :3, :], seqlen_q=5, block_size=2)
THREE_HEADS = INDEX.expand(1, 3, 5, 4).contiguous()


def scores_of(*shapes: tuple[int, ...], k: Any = torch.float32) -> IndexScores:
    """Scores of q, k and weights of these shapes; `k`: a dtype of it, or what stands in its place."""
    q, own, weights = (torch.zeros(shape) for shape in shapes)
    return IndexScores(q, own.to(k) if isinstance(k, torch.dtype) else k, weights)


SCORES = scores_of((2, 5, 2, 4), (2, 6, 4), (2, 5, 2))
# Errors, and the calls that raise them.
MISTAKES: tuple[tuple[str, Callable[[], object]], ...] = (
    ("TypeError: index has dtype torch.float32", lambda: listed(torch.zeros(5, 4))),
    ("TypeError: index has type list", lambda: listed([[0]])),
    ("ValueError: .*it needs 2 dims or more", lambda: listed(INDEX[0, 0, 0])),
    ("ValueError: .*entry -2; each needs to be -1 or from 0 to 5", lambda: listed(INDEX - 2)),
    ("ValueError: .*entry 6; each needs to be -1 or from 0 to 5", lambda: listed(INDEX + 6)),
    ("ValueError: .*entry 2; each needs to be -1 or from 0 to 1", lambda: listed(INDEX + 2, block_size=(1, 4))),
    ("ValueError: seqlen_q is None; with lists for 2", lambda: listed(INDEX, block_size=2)),
    (
        "ValueError: index has 5 lists and seqlen_q is 20; it needs 10 lists",
        lambda: listed(INDEX, seqlen_q=20, block_size=(2, 1)),
    ),
    (r"ValueError: block_size\[0\] is 0", lambda: listed(INDEX, block_size=0)),
    ("ValueError: .*1; .*from 0 to 0", lambda: listed(INDEX + 1, sequences=TWO)),
    (
        r"ValueError: block_size\[0\] is 2; with sequences each query has a list of its own",
        lambda: listed(INDEX, block_size=(2, 1), sequences=TWO),
    ),
    (
        "ValueError: index has a batch of 2; with these sequences it needs 1",
        lambda: listed(INDEX.repeat(2, 1, 1, 1), sequences=TWO),
    ),
    (
        "ValueError: index has a batch of 3; with these sequences it needs 2",
        lambda: listed(INDEX.repeat(3, 1, 1, 1), sequences=SLOTS),
    ),
    ("ValueError: index has 5 lists and seqlen_q is 7", lambda: listed(INDEX, seqlen_q=7, sequences=TWO)),
    ("TypeError: sequences is a list", lambda: listed(INDEX, sequences=[0, 5])),
    ("ValueError: k is 0", lambda: best(0)),
    ("TypeError: scores has dtype int32", lambda: from_topk_lists(INDEX.int(), 1)),
    ("ValueError: seqlen_k is None; with blocks of 4 keys", lambda: best(1, block_size=(1, 4))),
    ("ValueError: scores have 6 columns; they need 3", lambda: best(1, seqlen_k=9, block_size=(1, 4))),
    ("ValueError: .*seqlen_k = 6", lambda: best(1, mask=torch.ones(5, 7, dtype=torch.bool))),
    (r"ValueError: .*k has shape \(1, 6, 3\)", lambda: scores_of((1, 5, 2, 4), (1, 6, 3), (1, 5, 2))),
    (r"ValueError: .*weights has shape \(1, 5\)", lambda: scores_of((1, 5, 2, 4), (1, 6, 4), (1, 5))),
    ("TypeError: k has dtype float64", lambda: scores_of((1, 5, 2, 4), (1, 6, 4), (1, 5, 2), k=F64)),
    ("TypeError: k is a NoneType", lambda: scores_of((1, 5, 2, 4), (1, 6, 4), (1, 5, 2), k=None)),
    (r"ValueError: q has shape \(1, 5, 2, 0\); its head_dim", lambda: scores_of((1, 5, 2, 0), (1, 6, 0), (1, 5, 2))),
    (r"ValueError: q has shape \(5, 2, 4\)", lambda: scores_of((5, 2, 4), (6, 4), (5, 2))),
    ("TypeError: lists is a Tensor", lambda: SCORES.at(torch.ones(5, 6, dtype=torch.bool))),
    ("ValueError: lists have 3 heads", lambda: SCORES.at(listed(THREE_HEADS))),
    ("ValueError: lists have a batch of 3", lambda: SCORES.at(listed(INDEX.repeat(3, 1, 1, 1)))),
    ("ValueError: lists have 4 rows for 6 keys", lambda: SCORES.at(listed(INDEX[:, :, :4]))),
    ("TypeError: scale is a str", lambda: IndexScores(SCORES.q, SCORES.k, SCORES.weights, scale="1")),
    ("TypeError: relu is 'yes'", lambda: IndexScores(SCORES.q, SCORES.k, SCORES.weights, relu="yes")),
    ("TypeError: mask is None", lambda: ListBias(VALUES).dense(None)),
    ("TypeError: bias.values is a NoneType", lambda: ListBias(None).dense(LISTS)),
    (r"ValueError: bias.values has shape \(1, 1, 5, 3\); .*4\)", lambda: ListBias(VALUES[..., :3]).dense(LISTS)),
    (r"ValueError: bias.values has shape \(1, 1, 3, 4\); ", lambda: ListBias(VALUES[:, :, :3]).dense(LISTS)),
    ("TypeError: bias.bias is a list", lambda: ListBias(VALUES, [0.0]).dense(LISTS)),
    ("TypeError: bias.bias has dtype int64", lambda: ListBias(VALUES, torch.zeros(5, 6).long()).dense(LISTS)),
    (
        r"ValueError: bias.bias has shape \(5, 4\); it needs to broadcast to .*\(1, 1, 5, 6\)",
        lambda: ListBias(VALUES, torch.zeros(5, 4)).dense(LISTS),
    ),
    (
        r"TypeError: bias is a ListBias of ranks.*bias.dense\(mask\)",
        lambda: biases.require_dense_bias(ListBias(VALUES), "of ranks that share a sequence"),
    ),
)


@pytest.mark.parametrize(("text", "call"), MISTAKES, ids=range(len(MISTAKES)))
def test_mistakes(text: str, call: Callable[[], object]) -> None:
    with pytest.raises((TypeError, ValueError)) as caught:
        call()
    assert re.match(text, f"{caught.typename}: {caught.value}")


# Errors, and the arguments that raise them in the place of lists and of no bias.
MISTAKES_OF_CALLS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("TypeError: mask is None and bias is a ListBias", {"mask": None, "bias": ListBias(VALUES)}),
    ("TypeError: mask is a Tensor", {"mask": torch.ones(5, 6, dtype=torch.bool), "bias": ListBias(VALUES)}),
    ("TypeError: bias.values is a NoneType", {"bias": ListBias(None)}),
    ("TypeError: bias.values has dtype int64", {"bias": ListBias(VALUES.long())}),
    (r"ValueError: .*entries of a list in \{4\}", {"bias": ListBias(VALUES[..., :3])}),
    (r"ValueError: .*queries or lists in \{5\}", {"bias": ListBias(VALUES[:, :, :3])}),
    (r"ValueError: .*queries or lists in \{3, 5\}", {"mask": BLOCKS, "bias": ListBias(VALUES[:, :, :4])}),
    (r"ValueError: .*heads in \{1, 2\}", {"bias": ListBias(VALUES.expand(1, 3, 5, 4))}),
    (r"ValueError: .*batch in \{1\}", {"bias": ListBias(VALUES.expand(3, 1, 5, 4))}),
    ("ValueError: bias.values has shape", {"bias": ListBias(VALUES[0, 0, 0])}),
    ("ValueError: bias.values has 2 batch dims", {"bias": ListBias(VALUES[None])}),
    (
        "ValueError: .*with lists of blocks of 2 keys",
        {"mask": BLOCKS, "bias": ListBias(VALUES[:, :, :3], torch.zeros(1, 6))},
    ),
    ("ValueError: bias.bias has shape", {"bias": ListBias(VALUES, torch.zeros(5, 7))}),
    ("TypeError: bias.bias is a float", {"bias": ListBias(VALUES, 1.0)}),
    ("TypeError: bias.bias has dtype int64", {"bias": ListBias(VALUES, torch.zeros(5, 6).long())}),
    (
        r"ValueError: bias.bias has shape \(3, 5, 6\)",
        {"bias": ListBias(VALUES.expand(1, 2, 5, 4), torch.zeros(3, 5, 6))},
    ),
    ("ValueError: bias.values has 2 batch dims", {"bias": ListBias(VALUES[None], torch.zeros(5, 6))}),
    ("ValueError: .*prepared for seqlen_q 4", {"mask": listed(INDEX[:, :, :4])}),
    ("ValueError: .*prepared for seqlen_k 7", {"mask": from_lists(INDEX, seqlen_k=7)}),
    ("ValueError: .*mask was prepared with is_causal=True", {"window_size": (2, -1)}),
    (r"ValueError: .*heads in \{1, 2\}", {"mask": listed(THREE_HEADS)}),
    ("ValueError: bias.values is on meta", {"bias": ListBias(VALUES.to("meta"))}),
)


@pytest.mark.parametrize(("text", "arguments"), MISTAKES_OF_CALLS, ids=range(len(MISTAKES_OF_CALLS)))
def test_mistakes_of_calls(text: str, arguments: dict[str, Any]) -> None:
    q, k = torch.zeros(1, 5, 2, 8), torch.zeros(1, 6, 1, 8)
    arguments = {"mask": LISTS, **arguments}
    error = refusal_of(lambda: attention(q, k, k, **arguments), lambda: attention(q, k, k, LISTS, ListBias(VALUES)))
    assert re.match(text, f"{type(error).__name__}: {error}")
    with pytest.raises(type(error), match=re.escape(str(error))):
        explain(q, k, k, **arguments)


PACKED, PADDED = (listed(INDEX, sequences=x) for x in (TWO, SLOTS))
MISTAKES_BESIDE_SEQUENCES: tuple[tuple[str, tuple[int, ...], dict[str, Any]], ...] = (
    (
        r"TypeError: .*PreparedMask of the form 'lists'; with sequences.*from_lists\(index, sequences=...\)",
        (1, 5),
        {"mask": LISTS, "sequences": Sequences.padded(seqlens_k=torch.tensor([5]))},
    ),
    (r"ValueError: .*prepared with sequences; it needs sequences=mask\.sequences", (1, 5), {"sequences": None}),
    ("ValueError: .*prepared for other Sequences than those of the call", (5,), {"sequences": copy.copy(TWO)}),
    ("ValueError: .*prepared for seqlen_q 5; it needs that of the call, 6", (6,), {}),
    ("ValueError: is_causal is True, but mask was prepared with", (5,), {"is_causal": True}),
    (
        r"ValueError: .*prepared with 3 heads; it needs one of \[1, 2\]",
        (5,),
        {"mask": listed(THREE_HEADS, sequences=TWO)},
    ),
    (r"ValueError: .*batch in \{1\}", (5,), {"bias": ListBias(VALUES.expand(2, 1, 5, 4))}),
    (r"ValueError: .*queries or lists in \{5\}", (5,), {"bias": ListBias(VALUES[:, :, :4])}),
    (
        r"ValueError: bias\.bias is set with lists of sequences; it needs to be None",
        (5,),
        {"bias": ListBias(VALUES, torch.zeros(5, 6))},
    ),
    (
        r"ValueError: .*batch in \{1, 2\}",
        (2, 5),
        {"mask": PADDED, "bias": ListBias(VALUES.expand(3, 1, 5, 4)), "sequences": SLOTS},
    ),
    (
        r"TypeError: v is a NoneType; it needs to be a torch.Tensor .*\(k\[..., :n\]",
        (1, 5),
        {"v": None, "mask": LISTS, "sequences": None},
    ),
)


@pytest.mark.parametrize(("text", "rows", "arguments"), MISTAKES_BESIDE_SEQUENCES, ids=range(11))
def test_mistakes_beside_sequences(text: str, rows: tuple[int, ...], arguments: dict[str, Any]) -> None:
    k = torch.zeros(*rows[:-1], 6, 2, 8)
    call = {"k": k, "v": k, "mask": PACKED, "sequences": TWO, **arguments}
    with pytest.raises((TypeError, ValueError)) as caught:
        attention(torch.zeros(*rows, 2, 8), **call)
    assert re.match(text, f"{caught.typename}: {caught.value}")


@pytest.mark.parametrize("backend", ("eager", "reference"))
@pytest.mark.parametrize("block", ((10**12, 16), (16, 10**12), (10**12, 10**12)), ids=str)
def test_a_block_may_be_longer_than_all(block: tuple[int, int], backend: str) -> None:
    """It is cut as the last block of any is, and takes no memory beyond it."""
    cut = tuple(min(size, n) for size, n in zip(block, (70, 90)))
    lists, blocks = -(-70 // cut[0]), -(-90 // cut[1])
    index = torch.randint(-1, blocks, (1, 1, lists, 2))
    q, k = torch.randn(1, 70, 2, 8), torch.randn(1, 90, 1, 8)
    values, scores = torch.randn(1, 1, lists, 2, requires_grad=True), torch.randn(1, lists, blocks)
    results = []
    for size in (block, cut):
        made = from_lists(index, seqlen_q=70, seqlen_k=90, block_size=size, is_causal=True)
        out = attention(q, k, k, made, ListBias(values), backend=backend)
        best = from_topk_lists(scores, 1, seqlen_q=70, seqlen_k=90, block_size=size, is_causal=True)
        gradients = torch.autograd.grad(out.square().sum(), values)
        results.append((made.dense(), best.dense(), ListBias(values).dense(made), out, *gradients))
    for x, y in zip(*results, strict=True):
        torch.testing.assert_close(x, y)
