"""Refusals of a context-parallel call, and its choices: strategy, head groups, one pair of backends for all ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed_calls import Without, for_few_keys
from gpu_distributed import REQUIRED, missing_of
from out_of_tree import registered
from torch.distributed.device_mesh import DeviceMesh

import flash_dmattn
from flash_dmattn import Sequences
from flash_dmattn.biases import Band, ListBias, Relative
from flash_dmattn.caches import ClockCache
from flash_dmattn.distributed import (
    SequenceLayout,
    ShardedMask,
    context_parallel_attention,
    explain_context_parallel,
    gather_sequence,
    use_context_parallel,
)
from flash_dmattn.distributed import call as parallel_call
from flash_dmattn.distributed.call import ParallelCall, Request, choose_backends
from flash_dmattn.distributed.exchange import sum_gradient
from flash_dmattn.distributed.group import Members, context_in_force
from flash_dmattn.masks import IndexScores, PreparedMask
from flash_dmattn.problem import RawFlags

LAYOUT = SequenceLayout.zigzag(16, 1)


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def tensors(rows: int = 16, heads: int = 4, heads_k: int = 2, dim: int = 8, **flags: Any) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(2, rows, h, dim, **flags) for h in (heads, heads_k, heads_k)]


def attend(*arguments: Any, **keywords: Any) -> Any:
    q, k, v, *others = arguments if len(arguments) >= 3 else tensors()
    return context_parallel_attention(q, k, v, *others, **{"group": dist.group.WORLD, "layout": LAYOUT, **keywords})


def mask_of(layout: SequenceLayout = LAYOUT, rank: int = 0, batch: int = 1, heads: int = 1, **flags: Any) -> Any:
    return ShardedMask.from_mask(
        torch.ones(batch, heads, layout.local_length, layout.length, dtype=torch.bool), layout, rank, **flags
    )


band = Band(torch.ones(4, 1, 3), 1)


PADDED = Sequences.padded(seqlens_k=torch.tensor([16, 9]))
PAGED = Sequences.paged(torch.zeros(2, 1, dtype=torch.int64), torch.tensor([16, 9]))


def tokens() -> list[torch.Tensor]:
    return [x[0] for x in tensors()]


def documents(cu_k: tuple[int, ...] = (0, 7, 16)) -> Sequences:
    return Sequences.packed(torch.tensor((0, 7, 16)), torch.tensor(cu_k))


def relative(number: int) -> Relative:
    return Relative(torch.ones(4, number), 5)


def values_of(heads: int, entries: int = 3) -> ListBias:
    return ListBias(torch.ones(1, heads, 16, entries, requires_grad=True))


def lists_of(
    rows: int = 16, entry: int = 0, layout: SequenceLayout = LAYOUT, rank: int = 0, **more: Any
) -> ShardedMask:
    return ShardedMask.from_lists(torch.full((rows, 3), entry), layout, rank, **more)


UNEVEN = SequenceLayout(12, (((0, 4),), ((4, 6), (10, 12)), ((6, 10),)))
INDEX_SCORES = IndexScores(torch.rand(2, 2, 16, 1, 4), torch.rand(2, 2, 16, 4), torch.rand(2, 2, 16, 1))


def best_of(scores: Any, layout: SequenceLayout = LAYOUT, **more: Any) -> ShardedMask:
    return ShardedMask.from_topk_lists(scores, 2, layout, 0, **more)


def mesh_of(dims: int) -> DeviceMesh:
    return dist.init_device_mesh("cpu", (1,) * dims)


def jagged() -> list[torch.Tensor]:
    return [torch.nested.nested_tensor([x[0]], layout=torch.jagged) for x in tensors()]


REFUSED: dict[type[Exception], list[tuple[str, Callable[[], Any]]]] = {
    ValueError: [
        (r"q has shape \(2, 16, 4, 8\); with sequences it needs", lambda: attend(sequences=documents())),
        ("k has type int; with", lambda: attend(tokens()[0], 3, 4, sequences=documents())),
        (
            "sequences end at 16; ranks that share a sequence need the bounds of all of it, up to 32",
            lambda: ShardedMask.from_sequences(documents(), SequenceLayout.zigzag(32, 1), 0),
        ),
        ("sequences are paged; ranks that", lambda: attend(sequences=PAGED)),
        (
            "sequences are padded; documents need",
            lambda: ShardedMask.from_sequences(PADDED, SequenceLayout.zigzag(32, 1), 0),
        ),
        (r"q has shape \(16, 4, 8\); with sequences it needs", lambda: attend(*tokens(), sequences=PADDED)),
        (
            "q has 2 entries; it needs one for each sequence, 1",
            lambda: attend(sequences=Sequences.padded(seqlens_k=torch.tensor([16]))),
        ),
        (
            "seqlens_k has 17; it needs at most the 16 positions",
            lambda: attend(sequences=Sequences.padded(seqlens_k=torch.tensor([16, 17]))),
        ),
        (
            "seqlens_q has 18; it needs at most the 16 positions",
            lambda: attend(
                sequences=Sequences.padded(seqlens_q=torch.tensor([18, 3]), seqlens_k=torch.tensor([16, 1]))
            ),
        ),
        (
            "mask is a ShardedMask with sequences; it needs to be None or a bool tensor",
            lambda: attend(*tensors(), mask_of(), sequences=PADDED),
        ),
        (
            "values for distances -7 to 1; it needs those of the call, -8 to 15",
            lambda: attend(*tensors(), None, Relative(torch.ones(4, 9), 7), sequences=PADDED),
        ),
        ("sequences have other keys than queries", lambda: attend(*tokens(), sequences=documents(cu_k=(0, 9, 16)))),
        ("mask is a Tensor with sequences", lambda: attend(*tokens(), torch.ones(16, 16) > 0, sequences=documents())),
        (
            r"bias has shape \(4, 16, 16\); with sequences over ranks",
            lambda: attend(*tokens(), None, torch.ones(4, 16, 16), sequences=documents()),
        ),
        (
            "layout_k is not layout; with",
            lambda: attend(*tokens(), sequences=documents(), layout_k=SequenceLayout.zigzag(32, 1)),
        ),
        (
            "layout has an interval from 24 on, and dropout_p is 0.1; with a ShardedMask it needs to begin at a "
            "multiple of 16",
            lambda: describe(2, dropout_p=0.1, mask=mask_of(SequenceLayout.zigzag(32, 2), batch=2)),
        ),
        (
            "dropout_p is 0.1 with a ShardedMask of documents; it needs to be 0.0: dropout counts rows",
            lambda: attend(*tensors(), ShardedMask.from_sequences(documents(), LAYOUT, 0), dropout_p=0.1),
        ),
        ("q is a nested tensor; context parallelism shares one", lambda: attend(*jagged())),
        ("q has 3 dimensions", lambda: attend(*[x[0] for x in tensors()])),
        ("q has 8 rows; it needs the 16 that each of 1 ranks has of 16", lambda: attend(*tensors(8))),
        ("k has 8 rows and q has 16; layout_k needs", lambda: attend(tensors()[0], *tensors(8)[1:])),
        ("v has 8 rows; it needs the 16", lambda: attend(*tensors()[:2], tensors(8)[2])),
        ("layout is for 2 ranks; it needs the 1", lambda: attend(layout=SequenceLayout.zigzag(16, 2))),
        ("layout_k is for 2 ranks", lambda: attend(layout_k=SequenceLayout.zigzag(16, 2))),
        ("other layouts", lambda: attend(*tensors(), mask_of(SequenceLayout.zigzag(32, 1)))),
        (
            "mask was prepared for rank 1; this is rank 0",
            lambda: describe(2, mask=mask_of(SequenceLayout.zigzag(32, 2), 1)),
        ),
        (r"mask has shape \(3, 1, 16, 16\)", lambda: attend(*tensors(), mask_of(batch=3))),
        (r"batch in \{1, 2\}, heads", lambda: attend(*tensors(), mask_of(heads=3))),
        ("is_causal is True and window_size is", lambda: attend(*tensors(), mask_of(), is_causal=True)),
        ("brings its own limits", lambda: attend(*tensors(), mask_of(), window_size=(1, 1))),
        (r"bias has shape \(1, 1, 16, 7\)", lambda: attend(*tensors(), None, torch.ones(16, 7))),
        ("strategy is 'ring'; it needs to be one of 'auto'", lambda: attend(strategy="ring")),
        (
            "strategy='gather' leaves them where they are",
            lambda: attend(*tensors(), torch.ones(16, 16, dtype=torch.bool), strategy="ulysses"),
        ),
        ("4 heads on 2 key-value heads, and 3", lambda: describe(3, strategy="ulysses")),
        ("head_groups is 3; it needs to divide the 2", lambda: attend(head_groups=3)),
        (
            "has one gradient for all heads, which one call has to sum; it needs to be 1",
            lambda: attend(*tensors(), None, torch.ones(1, 16, 16, requires_grad=True), head_groups=2),
        ),
        ("bias has values for distances -5 to 9; it needs", lambda: attend(*tensors(), None, relative(15))),
        ("has one gradient for all heads", lambda: attend(*tensors(), lists_of(), values_of(1), head_groups=2)),
        (r"bias.values has shape \(1, 4, 16, 2\)", lambda: attend(*tensors(), lists_of(), values_of(4, entries=2))),
        (
            "bias is a Band, and each rank has 1 row",
            lambda: describe(2, 1, bias=band, layout=SequenceLayout.contiguous(2, 2)),
        ),
        ("index has 8 lists; it needs 16, of the 16 rows", lambda: lists_of(rows=8)),
        ("index has 1 dimensions", lambda: ShardedMask.from_lists(torch.zeros(3).long(), LAYOUT, 0)),
        ("index has an entry 16; each needs to be -1 or from 0 to 15", lambda: lists_of(entry=16)),
        (
            "3 queries share a list; layout needs intervals",
            lambda: lists_of(rows=4, layout=SequenceLayout.zigzag(20, 2), block_size=(3, 1)),
        ),
        (
            "begins at key 128 on rank 1; block_size needs blocks of keys that divide it, not 3",
            lambda: lists_of(256, layout=SequenceLayout.contiguous(512, 2), block_size=(1, 3), window_size=(3, 0)),
        ),
        (
            "rows 4 to 6 are of rank 1, and 4 queries share a list",
            lambda: lists_of(rows=1, layout=UNEVEN, block_size=(4, 1)),
        ),
        ("bias is a ListBias with sequences", lambda: attend(*tokens(), None, values_of(4), sequences=documents())),
        (
            "bias is a ListBias with sequences",
            lambda: attend(*tokens(), lists_of(), values_of(4), sequences=documents()),
        ),
        (
            "scores have 8 columns; they need 16, a block of 1 of all 16 keys",
            lambda: best_of(torch.rand(8, 8), layout=SequenceLayout.contiguous(16, 2), is_causal=True),
        ),
        ("scores have 16 columns; they need 8, a block of 2", lambda: best_of(torch.rand(16, 16), block_size=(1, 2))),
        ("scores has 1 dimensions", lambda: best_of(torch.rand(16))),
        ("scores.q has batch dims", lambda: best_of(INDEX_SCORES)),
        ("scores has 8 lists; it needs 16", lambda: best_of(torch.rand(8, 16))),
        ("exchange_dtype is torch.int8; it needs to be", lambda: attend(exchange_dtype=torch.int8)),
        ("'flex' is one differentiable function; context", lambda: attend(backend="flex")),
        (r"mask has shape \(8, 16\)", lambda: ShardedMask.from_mask(torch.ones(8, 16) > 0, LAYOUT, 0)),
        ("mask has 1 dimensions", lambda: ShardedMask.from_mask(torch.ones(16) > 0, LAYOUT, 0)),
        ("group is a mesh of 3 dims; it needs one or two", lambda: attend(group=mesh_of(3))),
        (
            "strategy is 'gather'; over a mesh of two dims it needs to be 'auto'",
            lambda: attend(group=mesh_of(2), strategy="gather"),
        ),
        (
            "layout is for 2 ranks; it needs the 1 of the group",
            lambda: attend(group=mesh_of(2), layout=SequenceLayout.zigzag(16, 2)),
        ),
        (
            "layout_k is for 2 ranks; it needs the 1",
            lambda: attend(group=mesh_of(2), layout_k=SequenceLayout.zigzag(16, 2)),
        ),
        ("q has 8 rows; it needs the 16", lambda: attend(*tensors(8), group=mesh_of(2))),
        ("q has 3 dimensions", lambda: attend(*[x[0] for x in tensors()], group=mesh_of(2))),
        (
            "mask was prepared with 4 heads; over a mesh of two dims",
            lambda: attend(*tensors(), mask_of(heads=4), group=mesh_of(2)),
        ),
        (
            "bias has 3 heads; it needs 1, 2 or 4",
            lambda: attend(*tensors(), None, torch.ones(3, 1, 16), group=mesh_of(2)),
        ),
        (r"sink has shape \(3,\)", lambda: attend(group=mesh_of(2), sink=torch.ones(3))),
    ],
    TypeError: [
        ("sequences is a int; it needs", lambda: attend(*tokens(), sequences=3)),
        ("return_probs", lambda: attend(return_probs=True)),
        ("q is a NoneType", lambda: attend(None, None, None)),
        ("group is a NoneType; it needs to be a torch.distributed", lambda: attend(group=None)),
        ("layout is a int; it needs to be a SequenceLayout", lambda: attend(layout=16)),
        ("layout_k is a int", lambda: attend(layout_k=16)),
        (
            "mask is a PreparedMask, of whole",
            lambda: attend(*tensors(), PreparedMask.from_mask(torch.ones(16, 16) > 0)),
        ),
        ("mask has dtype float32; it needs bool", lambda: attend(*tensors(), torch.ones(16, 16))),
        ("mask is None and bias is a ListBias; mask needs", lambda: attend(*tensors(), None, values_of(4))),
        ("mask is a TileMask and bias is a ListBias", lambda: attend(*tensors(), mask_of(), values_of(4))),
        ("index has dtype torch.float32; it needs", lambda: ShardedMask.from_lists(torch.zeros(16, 2), LAYOUT, 0)),
        ("scores is a list; it needs", lambda: best_of([[1.0]])),
        ("head_groups is 1.0", lambda: attend(head_groups=1.0)),
        ("reduce_bias_grad is 1; it needs to be True or False", lambda: attend(reduce_bias_grad=1)),
        ("layout is a int; it needs to be a", lambda: attend(group=mesh_of(2), layout=3)),
        ("layout_k is a int; it needs to", lambda: attend(group=mesh_of(2), layout_k=3)),
    ],
    flash_dmattn.BackendError: [("device is cpu", lambda: attend(backend="cuda"))],
}


@pytest.mark.parametrize("kind, message, call", [(kind, *row) for kind, rows in REFUSED.items() for row in rows])
def test_what_is_refused_is_explained_with_the_same_error(
    kind: type[Exception], message: str, call: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(kind, match=message) as refusal:
        call()

    def explained(*arguments: Any, **keywords: Any) -> None:
        explanation = explain_context_parallel(*arguments, **keywords)
        if explanation.error is not None:
            raise flash_dmattn.BackendUnsupportedError(explanation.error, backend="")

    monkeypatch.setitem(globals(), "context_parallel_attention", explained)
    with pytest.raises(kind) as in_explanation:
        call()
    same = str(in_explanation.value).replace("explain_context_parallel()", "context_parallel_attention()")
    assert str(refusal.value).removeprefix("rank 0: ") == same


def test_bounds_are_read_once_for_all_layers_and_again_after_a_change(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    of = ShardedMask._of_documents
    monkeypatch.setattr(ShardedMask, "_of_documents", lambda *x, **more: made.append(1) or of(*x, **more))
    cu_seqlens, x = torch.tensor([0, 7, 16]), tokens()
    sequences = Sequences.packed(cu_seqlens)
    first = attend(*x, sequences=sequences, is_causal=True)
    attend(*x, sequences=sequences, is_causal=True)
    cu_seqlens[1] = 9
    second = attend(*x, sequences=sequences, is_causal=True)
    attend(*x, sequences=sequences, is_causal=True)
    assert len(made) == 2 and not torch.equal(first, second)
    torch.testing.assert_close(second, flash_dmattn.attention(*x, sequences=sequences, is_causal=True))
    attend(*x, sequences=sequences)
    assert len(made) == 3


def test_in_inference_mode_a_call_reads_bounds_once(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    monkeypatch.setattr("flash_dmattn.distributed.documents.listed", lambda x: read.append(1) or x.tolist())
    with torch.inference_mode():  # torch does not count changes of what is made in it
        sequences = Sequences.packed(torch.tensor([0, 7, 16]), seqlens_q=torch.tensor([7, 5]))
        attend(*tokens(), sequences=sequences, sink=torch.zeros(4), return_lse=True)
    assert len(read) == 2  # the bounds and the lengths, which keys share


def test_a_call_in_inference_mode_keeps_nothing_that_a_backward_pass_saves() -> None:
    sequences = Sequences.packed(torch.tensor([0, 7, 16]), seqlens_q=torch.tensor([7, 5]))
    flags: dict[str, Any] = {"sequences": sequences, "sink": torch.zeros(4), "return_lse": True}
    with torch.inference_mode():
        attend(*tokens(), **flags)
    q, k, v = (x.requires_grad_() for x in tokens())
    lse = attend(q, k, v, **flags)[1]
    lse.masked_fill(lse == -torch.inf, 0).sum().backward()
    assert q.grad is not None


def test_masks_of_documents_are_on_the_device_of_q() -> None:
    """The host reads bounds, wherever they are; a mask that was made elsewhere is refused."""
    x = [y.to("meta") for y in tokens()]
    assert attend(*x, sequences=documents(), strategy="gather", sink=torch.zeros(4, device="meta")).is_meta
    batch = [y.to("meta") for y in tensors()]
    with pytest.raises(ValueError, match="mask is on cpu; it needs to be on the device of q, meta"):
        attend(*batch, ShardedMask.from_sequences(documents(), LAYOUT, 0))
    one = ShardedMask.from_sequences(Sequences.packed(torch.tensor([0, 16])), LAYOUT, 0)
    assert attend(*batch, one).is_meta


@pytest.fixture
def unwritten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is NaN until something is written."""
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *x, **more: empty(*x, **more).fill_(torch.nan))


@pytest.mark.usefixtures("unwritten")
@pytest.mark.parametrize("strategy", ["gather", "ulysses"])
@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
def test_padding_is_not_read_and_its_rows_are_written(strategy: str, dropout_p: float) -> None:
    q, k, v = (x.double() for x in tensors())
    sink, used = (
        torch.ones(4, dtype=torch.float64),
        Sequences.padded(seqlens_q=torch.tensor([16, 5]), seqlens_k=torch.tensor([0, 9])),
    )
    for x, length in ((q, 5), (k, 9), (v, 9)):
        x[1, length:] = torch.nan
    k[0], v[0] = torch.nan, torch.nan
    results = []
    for call in (lambda *x, **more: attend(*x, strategy=strategy, **more), flash_dmattn.attention):
        torch.manual_seed(0)
        leaves = [x.detach().requires_grad_() for x in (q, k, v, sink)]
        flags = {"sink": leaves[3], "sequences": used, "is_causal": True, "dropout_p": dropout_p, "return_lse": True}
        out, lse = call(*leaves[:3], **flags)
        loss = out.square().sum() + torch.where(lse > -torch.inf, lse, 0).sum()
        results.append([out, lse, *torch.autograd.grad(loss, leaves)])
    for one, other in zip(*results):
        torch.testing.assert_close(one, other)
    out, lse, *gradients = results[0]
    assert bool((out[1, 5:] == 0).all()) and bool((lse[1, :, 5:] == -torch.inf).all())
    assert torch.equal(lse[0], sink.expand(16, 4).T) and all(bool(x.isfinite().all()) for x in gradients)


@pytest.mark.usefixtures("unwritten")
def test_a_document_with_dropout_reads_no_other() -> None:
    cut = Sequences.packed(torch.tensor([0, 3, 9, 16]), seqlens_q=torch.tensor([3, 4, 7]))
    x = [y.double() for y in tokens()]
    for y in x:
        y[3:7] = torch.nan
    leaves = [y.requires_grad_() for y in x]
    out, lse = attend(*leaves, sequences=cut, dropout_p=0.3, strategy="gather", return_lse=True, is_causal=True)
    assert bool(out[:3].isfinite().all()) and bool(out[9:].isfinite().all()) and bool(out[3:7].isnan().all())
    assert bool((out[7:9] == 0).all()) and bool((lse[:, 7:9] == -torch.inf).all())
    gradients = torch.autograd.grad(out[9:].sum(), leaves)
    assert all(bool(y[9:].isfinite().all()) and bool((y[:3] == 0).all()) for y in gradients)


def test_the_gradient_of_a_bias_of_padded_entries_is_rounded_once() -> None:
    torch.manual_seed(0)
    q, k, v, dout = torch.randn(4, 16, 16, 4, 8).bfloat16()
    used = Sequences.padded(seqlens_k=torch.randint(9, 17, (16,)))
    gradients = []
    for call in (partial(attend, strategy="gather"), flash_dmattn.attention):
        bias = torch.ones(1, 4, 16, 16, dtype=torch.bfloat16, requires_grad=True)
        out = call(q, k, v, None, bias, sequences=used)
        gradients.append(torch.autograd.grad(out, bias, dout)[0].float())
    one, other = gradients
    assert float((one - other).norm() / other.norm()) < 1e-4


@pytest.mark.parametrize("strategy", ["gather", "ulysses"])
def test_distances_cover_the_longest_document(strategy: str) -> None:
    x = [y.double().requires_grad_() for y in tokens()]
    values = torch.randn(4, 17, dtype=torch.float64, requires_grad=True)

    def gradients(out: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return out, *torch.autograd.grad(out.square().sum(), (*x, values))

    own = attend(*x, None, Relative(values, 8), sequences=documents(), strategy=strategy)
    bounded = Sequences.packed(torch.tensor((0, 7, 16)), max_seqlen_q=9)  # the length that `attention` checks
    wanted = flash_dmattn.attention(*x, None, Relative(values, 8), sequences=bounded)
    for one, other in zip(gradients(own), gradients(wanted)):
        torch.testing.assert_close(one, other)
    # A kernel reads values also for hidden pairs of two documents, which are farther apart.
    rows = {"group": dist.group.WORLD, "layout": LAYOUT, "sequences": documents(), "strategy": strategy}
    assert "clamped" in str(explain_context_parallel(*x, None, Relative(values, 8), **rows).problem)
    with pytest.raises(ValueError, match="values for distances -8 to 7; it needs those of the call, -8 to 8"):
        attend(*x, None, Relative(values[:, :16], 8), sequences=documents(), strategy=strategy)


def test_other_documents_compile_to_another_graph() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(context_parallel_attention, fullgraph=True, backend="aot_eager")
    for bounds in ((0, 7, 16), (0, 3, 9, 16), (0, 16)):
        mask = ShardedMask.from_sequences(Sequences.packed(torch.tensor(bounds)), LAYOUT, 0, is_causal=True)
        assert mask.documents[::2] == bounds[:-1]
        out = compiled(*tensors(), mask, group=dist.group.WORLD, layout=LAYOUT)
        torch.testing.assert_close(out, attend(*tensors(), mask))


def test_what_cannot_be_gathered_is_refused() -> None:
    x, world = torch.ones(1, 16), dist.group.WORLD
    for dim in (0, 2):
        with pytest.raises(ValueError, match=rf"x has shape \(1, 16\) and dim is {dim}, which needs the 16 positions"):
            gather_sequence(x, dim, group=world, layout=LAYOUT)
    with pytest.raises(ValueError, match="dim is -3; it needs to be >= -2"):
        gather_sequence(x, -3, group=world, layout=LAYOUT)
    for unfit in (None, 0.0):
        with pytest.raises(TypeError, match=f"dim is {unfit} .*; it needs to be an int"):
            gather_sequence(x, unfit, group=world, layout=LAYOUT)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="x has dtype complex64; it needs a real one"):
        gather_sequence(x.to(torch.complex64), 1, group=world, layout=LAYOUT)
    with pytest.raises(ValueError, match="group is a mesh of 2 dims; gather_sequence needs one"):
        gather_sequence(x, 1, group=mesh_of(2), layout=LAYOUT)
    with pytest.raises(TypeError, match="layout is a int"):
        gather_sequence(x, 1, group=world, layout=16)  # type: ignore[arg-type]
    assert torch.equal(gather_sequence(x, -1, group=mesh_of(1), layout=LAYOUT), x)


def test_a_gradient_of_nothing_is_sent_as_zeros() -> None:
    x = torch.ones(1, 16, requires_grad=True)
    members = Members(dist.group.WORLD.group_name, 1, 0)
    for same in (gather_sequence(x, 1, group=dist.group.WORLD, layout=LAYOUT), sum_gradient(x, members, 1)):
        (gradient,) = torch.autograd.grad(Without.apply(same).sum(), x)
        assert torch.equal(gradient, torch.zeros(1, 16))
    q, k, v = (x.requires_grad_() for x in tensors())
    for strategy in ("gather", "ulysses"):
        (dq,) = torch.autograd.grad(Without.apply(attend(q, k, v, strategy=strategy)).sum(), q)
        assert torch.equal(dq, torch.zeros_like(q))


@pytest.mark.parametrize("dims", [1, 2])
def test_a_mesh_is_a_group(dims: int) -> None:
    q, k, v = tensors()
    out = attend(q, k, v, group=mesh_of(dims), is_causal=True)
    torch.testing.assert_close(out, flash_dmattn.attention(q, k, v, is_causal=True))


def test_a_second_derivative_is_refused() -> None:
    q, k, v = (x.requires_grad_() for x in tensors())
    (dq,) = torch.autograd.grad(attend(q, k, v).square().sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="context_parallel_attention has no second derivative"):
        dq.sum().backward()


def test_gradients_of_lse_alone() -> None:
    q, k, v = (x.requires_grad_() for x in tensors(dtype=torch.float64))
    gradients = torch.autograd.grad(attend(q, k, v, return_lse=True)[1].square().sum(), (q, k, v))
    wanted = torch.autograd.grad(
        flash_dmattn.attention(q, k, v, return_lse=True)[1].square().sum(), (q, k, v), allow_unused=True
    )
    for x, y in zip(gradients, wanted):
        torch.testing.assert_close(x, torch.zeros_like(x) if y is None else y)


def test_autocast() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        assert attend().dtype == torch.bfloat16


def describe(
    size: int,
    rows: int = 16,
    strategy: str = "auto",
    mask: Any = None,
    head_groups: int | None = None,
    bias: Any = None,
    layout: SequenceLayout | None = None,
    dropout_p: float = 0.0,
    **sizes: int,
) -> ParallelCall:
    """A causal call of rank 0 of a group that need not exist."""
    q, k, v = (x.requires_grad_() for x in tensors(rows, **sizes))
    layout = SequenceLayout.zigzag(rows * size, size) if layout is None else layout
    groups = (Members("none", size, 0),)
    numbers = RawFlags(is_causal=not isinstance(mask, ShardedMask), dropout_p=dropout_p)
    rest = (layout, None, strategy, head_groups, False, None, numbers, None, 0)
    return Request(q, k, v, mask, bias, None, groups, *rest).describe()


def test_heads_go_in_one_group_unless_asked_for_more() -> None:
    sizes = {"heads": 16, "heads_k": 8, "dim": 1, "strategy": "gather"}
    assert describe(2, 128 * 40, **sizes).head_groups == 1
    assert describe(2, 128, head_groups=8, **sizes).head_groups == 8


@pytest.fixture
def picky() -> Iterator[None]:
    """Two backends that auto prefers to sdpa and eager; for some calls only the second serves every slice."""
    with registered(for_few_keys("first", most=40), for_few_keys("second", most=128), before="sdpa"):
        yield


def names(call: ParallelCall, backend: Any = "auto") -> tuple[str, str | None]:
    forward, backward = choose_backends(call, backend)
    return forward.name, None if backward is None else backward.name


def test_one_pair_serves_every_slice_of_every_rank(picky: None) -> None:
    # Rank 0 alone would have chosen another: its slices have 8 and 32 keys, and slices of rank 1 have 16 and 24.
    assert {p.seqlen_k for p in describe(2, strategy="gather").problems()} == {8, 24, 32}
    assert names(describe(2, strategy="gather")) == ("first", "first")
    assert names(describe(4, strategy="gather")) == ("second", "second")
    assert names(describe(16, strategy="gather")) == ("sdpa", "sdpa")
    with torch.no_grad():
        assert names(describe(4, strategy="gather")) == ("second", None)


def test_a_choice_is_made_anew_where_backends_change() -> None:
    assert names(describe(2, strategy="gather")) == ("sdpa", "sdpa")
    with registered(for_few_keys("first", most=40), before="sdpa"):
        assert names(describe(2, strategy="gather")) == ("first", "first")
    assert names(describe(2, strategy="gather")) == ("sdpa", "sdpa")


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """An entry for each choice that is made anew."""
    made: list[int] = []
    choose = parallel_call._choose_pair
    monkeypatch.setattr(parallel_call, "_pairs", ClockCache(16))
    monkeypatch.setattr(
        parallel_call, "_choose_pair", lambda problems, backend: made.append(1) or choose(problems, backend)
    )
    return made


@pytest.mark.parametrize("what", ["problem", "layout", "head_groups", "sends_parts", "requested", "disabled"])
def test_a_choice_is_remembered_for_all_that_decides_it(what: str, chosen: list[int]) -> None:
    call = describe(2, strategy="gather")
    changes = {
        "problem": {"problem": call.problem._replace(head_dim=16)},
        "layout": {"layout": SequenceLayout.contiguous(32, 2)},
        "head_groups": {"head_groups": 2},
        "sends_parts": {"sends_parts": True},
    }
    for _ in range(2):
        choose_backends(call, "auto")
    assert len(chosen) == 1
    with flash_dmattn.config(disabled="flex") if what == "disabled" else nullcontext():
        choose_backends(call._replace(**changes.get(what, {})), "eager" if what == "requested" else "auto")
    assert len(chosen) == 2


def test_a_named_backend_has_to_serve_every_slice(picky: None) -> None:
    with pytest.raises(flash_dmattn.BackendUnsupportedError, match="there are 48 keys"):
        names(describe(4, strategy="gather"), "first")
    assert names(describe(4, strategy="gather"), ("second", "eager")) == ("second", "eager")


def test_a_decision_is_recorded_once() -> None:
    with flash_dmattn.config(record=(decisions := [])):
        attend(is_causal=True, strategy="gather")
    assert [(d.forward, d.backward) for d in decisions] == [("sdpa", None)]


def test_a_context_is_that_of_its_thread_and_ends() -> None:
    seen: list[object] = []
    assert context_in_force() is None
    with use_context_parallel(dist.group.WORLD, LAYOUT) as layout:
        assert layout is LAYOUT
        inner = SequenceLayout.contiguous(8, 1)
        with use_context_parallel(dist.group.WORLD, inner):
            now = context_in_force()
            assert now is not None and now.layout is inner
        now = context_in_force()
        assert now is not None and now.layout is LAYOUT and now.group is dist.group.WORLD
        thread = threading.Thread(target=lambda: seen.append(context_in_force()))
        thread.start()
        thread.join()
    assert context_in_force() is None and seen == [None]
    with use_context_parallel(mesh_of(2), LAYOUT):
        now = context_in_force()
        assert now is not None and now.rank == 0
    with pytest.raises(ValueError, match="group is a mesh of 3 dims; it needs one or two"):
        use_context_parallel(mesh_of(3), LAYOUT)
    with pytest.raises(ValueError, match="layout is for 2 ranks"):
        use_context_parallel(dist.group.WORLD, SequenceLayout.zigzag(8, 2))


def test_what_gpu_tests_need_is_asked_for() -> None:
    assert missing_of(REQUIRED) == []
    assert missing_of({**REQUIRED, "NCCL_NVLS_ENABLE": "1"}) == ["NCCL_NVLS_ENABLE=0"]
    assert len(missing_of({})) == 3
