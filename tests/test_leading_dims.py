"""Leading batch dims: q, k, v of any rank from 4, masks and biases that broadcast over them, and `torch.vmap`."""

from __future__ import annotations

import itertools
import pickle
from typing import Any

import pytest
import torch
from flex_fixture import eager_flex
from leading_calls import DV, HK, LK, LQ, D, H, LeadingCall, assert_accurate, over_batches, results
from out_of_tree import KernelPair, registered, replaced
from torch import Tensor

import flash_dmattn
from flash_dmattn import call as calls
from flash_dmattn.backends import eager
from flash_dmattn.backends.protocol import Rule
from flash_dmattn.masks import PreparedMask
from flash_dmattn.reference import formula

# The leading dims of a mask or a bias by batch: shared ones stand before, after or between its own.
BATCHES = {(2, 3): [(2, 3), (2, 1), (1, 3), (1, 1)], (2, 3, 2): [(2, 1, 2), (1, 3, 1), (2, 3, 1), (1, 1, 2)]}
CASES = [(batch, dims) for batch, all_dims in BATCHES.items() for dims in all_dims]
SCORES = [(1, LQ, LK), (HK, LQ, LK), (H, 1, LK), (H, LQ, 1)]


def run(backend: Any) -> Any:
    return lambda *tensors, **flags: flash_dmattn.attention(*tensors, return_lse=True, backend=backend, **flags)


def check(call: LeadingCall, backend: Any = "eager") -> None:
    arguments = call.build()
    assert_accurate(results(run(backend), call, arguments), call, arguments)


@pytest.mark.parametrize("backend", ["eager", "reference"])
@pytest.mark.parametrize(("batch", "dims"), CASES, ids=str)
def test_every_sharing_of_mask_and_bias(batch: tuple[int, ...], dims: tuple[int, ...], backend: str) -> None:
    others = BATCHES[batch]
    for seed, ((mask_dims, scores), is_causal) in enumerate(
        zip(itertools.product(others, SCORES), itertools.cycle((False, True)))
    ):
        check(LeadingCall(batch, (*mask_dims, 1, LQ, LK), (*dims, *scores), is_causal=is_causal, seed=seed), backend)


@pytest.mark.parametrize("shape", [(LQ, LK), (H, LQ, LK), (3, 1, LQ, LK), (1, 3, H, 1, LK)], ids=str)
def test_a_mask_and_a_bias_of_fewer_dims_are_read_from_the_right(shape: tuple[int, ...]) -> None:
    check(LeadingCall((2, 3), shape, shape))


@pytest.mark.parametrize(("batch", "dims"), CASES, ids=str)
def test_a_prepared_mask_knows_its_leading_dims(batch: tuple[int, ...], dims: tuple[int, ...]) -> None:
    for rows in (1, LQ):
        call = LeadingCall(batch, (*dims, HK, rows, LK), (*batch[:1], *(1,) * (len(batch) - 1), 1, LQ, LK))
        arguments = call.build()
        mask = PreparedMask.from_mask(arguments["mask"], seqlen_q=LQ)
        assert mask.batch_dims == dims and mask.shape[0] == torch.Size(dims).numel()
        assert mask.to("meta").batch_dims == dims  # a copy, where "cpu" gives the mask itself
        for same in (mask, mask.to("cpu"), pickle.loads(pickle.dumps(mask))):
            assert same.batch_dims == dims
            assert_accurate(results(run("eager"), call, arguments, same), call, arguments)


def test_a_prepared_mask_beside_other_leading_dims_is_refused() -> None:
    mask = PreparedMask.from_mask(torch.rand(2, 1, 1, LQ, LK) < 0.5)
    q, k = torch.randn(2, LQ, H, D), torch.randn(2, LK, HK, D)
    with pytest.raises(ValueError, match=r"mask was prepared with leading dims \(2, 1\); q has one batch dim, 2"):
        flash_dmattn.attention(q, k, k, mask)
    q, k = torch.randn(3, 2, LQ, H, D), torch.randn(3, 2, LK, HK, D)
    with pytest.raises(ValueError, match=r"batch dim 0 in \{1, 3\}, batch dim 1 in \{1, 2\}"):
        flash_dmattn.attention(q, k, k, mask)
    mask = PreparedMask.from_mask(torch.rand(2, 2, 2, 1, LQ, LK) < 0.5)
    with pytest.raises(ValueError, match=r"mask was prepared with leading dims \(2, 2, 2\); those of q are \(3, 2\)"):
        flash_dmattn.attention(q, k, k, mask)


@pytest.mark.parametrize(
    ("mask", "bias"),
    [
        ((1, 3, 1, LQ, LK), (2, 1, H, LQ, LK)),
        ((2, 1, 1, LQ, LK), (1, 3, HK, 1, LK)),
        ((2, 1, HK, 1, LK), (2, 1, 1, LQ, 1)),
    ],
    ids=str,
)
def test_flex(mask: tuple[int, ...], bias: tuple[int, ...]) -> None:
    with eager_flex():
        check(LeadingCall((2, 3), mask, bias, dtype=torch.float32), "flex")


@pytest.mark.parametrize("nbytes", [6_000, 30_000, 10**6])
def test_chunks_of_eager_do_not_mix_entries(nbytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eager, "_chunk_bytes", nbytes)
    for mask_dims, bias_dims in itertools.product([(4, 1), (1, 3), (4, 3)], repeat=2):
        call = LeadingCall((4, 3), (*mask_dims, 1, 1, LK), (*bias_dims, 1, LQ, LK))
        arguments = call.build()
        arguments["mask"][:2, 0] = False
        assert_accurate(results(run("eager"), call, arguments), call, arguments)


@pytest.mark.parametrize("dims", [(4, 1, 4), (1, 4, 1), (4, 1, 1)], ids=str)
@pytest.mark.parametrize("backend", ["eager", "reference"])
def test_the_gradient_of_a_shared_bias_is_rounded_once(backend: str, dims: tuple[int, ...]) -> None:
    call = LeadingCall((4, 4, 4), None, (*dims, 1, 1, LK), dtype=torch.bfloat16)
    arguments = call.build()
    actual = results(run(backend), call, arguments)
    assert_accurate(actual, call, arguments)
    wide = results(run(backend), call, {**arguments, "bias": arguments["bias"].float()})
    assert torch.equal(actual[-1], wide[-1].bfloat16())


@pytest.mark.parametrize("backend", ["eager", "reference"])
@pytest.mark.parametrize("batch", [(0, 3), (3, 0), (2, 0, 3)], ids=str)
def test_an_empty_leading_dim(batch: tuple[int, ...], backend: str) -> None:
    for dims in itertools.product(*((1, size) for size in batch)):
        call = LeadingCall(batch, (*dims, 1, LQ, LK), (*dims, H, LQ, LK))
        arguments = call.build()
        actual = results(run(backend), call, arguments)
        assert actual[0].shape == (*batch, LQ, H, DV) and actual[1].shape == (*batch, H, LQ)
        for x, name in zip(actual[2:], ("q", "k", "v", "bias"), strict=True):
            assert x.shape == arguments[name].shape and not x.any()


# Copies


def copies(**changes: Any) -> tuple[str, ...]:
    q, k = torch.randn(2, 3, LQ, H, D), torch.randn(2, 3, LK, HK, D)
    arguments = {"q": q, "k": k, "v": k, **changes}
    return flash_dmattn.explain(**arguments, backend="eager").copies


def test_nothing_is_copied_that_folds() -> None:
    seen: list[Any] = []
    plan = eager.BACKEND.plan_forward

    def plan_forward(problem: Any) -> Any:
        return lambda inputs: (seen.extend(inputs), plan(problem)(inputs))[1]

    q, k = torch.randn(2, 3, LQ, H, D), torch.randn(2, 3, LK, HK, D)
    expanded = torch.randn(2, 1, 1, LQ, LK).expand(2, 3, H, LQ, LK)
    mask = (torch.rand(1, 3, 1, LQ, LK) < 0.5).expand(2, 3, H, LQ, LK)
    with replaced("eager", plan_forward=plan_forward):
        flash_dmattn.attention(q, k, k, mask, expanded, backend="eager")
    for x, arguments in zip((*seen[:3], seen[3].dense, seen[4]), (q, k, k, mask, expanded), strict=True):
        assert x.data_ptr() == arguments.data_ptr()
    assert seen[3].dense.shape == (3, H, LQ, LK) and seen[4].shape == (2, H, LQ, LK)
    assert copies(mask=mask, bias=expanded) == ()


def test_explain_tells_what_is_copied() -> None:
    swapped = torch.randn(3, 2, LK, HK, D).transpose(0, 1)
    strides = swapped.stride()[:2]
    assert copies(k=swapped) == (f"copies k: its leading dims (2, 3), of strides {strides}, have no one stride",)
    bias = torch.randn(2, 1, 1, LQ, LK).expand(2, 3, 1, LQ, LK)
    assert copies(bias=bias) == ()
    assert copies(bias=bias.clone(memory_format=torch.preserve_format).requires_grad_()) == ()
    leaf = torch.randn(2, 1, 1, LQ, LK, requires_grad=True)
    assert copies(bias=leaf.expand(2, 3, 1, LQ, LK))[0].startswith("copies bias: its leading dims (2, 3), of strides")
    q, k = torch.randn(2, 3, 2, LQ, H, D), torch.randn(2, 3, 2, LK, HK, D)
    told = flash_dmattn.explain(q, k, k, torch.rand(2, 1, 2, 1, LQ, LK) < 0.5)
    wanted = "copies mask: of its leading dims (2, 1, 2) a shared one lies between others, so it expands to (2, 3, 2)"
    assert told.copies == (wanted,) and wanted in str(told) and told.to_dict()["copies"] == [wanted]
    prepared = PreparedMask.from_mask(torch.rand(2, 1, 2, 1, LQ, LK) < 0.5)
    assert flash_dmattn.explain(q, k, k, prepared).copies == (wanted,)


def test_an_expanded_bias_has_a_gradient_in_each_of_its_elements() -> None:
    call = LeadingCall((2, 3), None, (2, 3, H, LQ, LK))
    arguments = call.build()
    arguments["bias"] = arguments["bias"][:, :1].expand(2, 3, H, LQ, LK)
    assert_accurate(results(run("eager"), call, arguments), call, arguments)


# Backends, dispatch


def test_a_backend_that_does_not_say_so_is_not_given_a_partly_shared_tensor() -> None:
    pair = KernelPair("ours")
    call = LeadingCall((2, 3), (1, 3, 1, LQ, LK), (2, 1, 1, LQ, LK))
    arguments = call.build()
    tensors = [arguments[name] for name in ("q", "k", "v", "mask", "bias")]
    with registered(pair, before="cuda"):
        with pytest.raises(flash_dmattn.BackendUnsupportedError) as caught:
            flash_dmattn.attention(*tensors, backend="ours")
        assert [reason.code for reason in caught.value.reasons] == ["shared_mask", "shared_bias"]
        assert "mask has 3 entries with a batch of 6; this backend takes 1 or all" in str(caught.value)
        flash_dmattn.attention(*tensors)
        assert pair.ran == []
        tensors[3], tensors[4] = tensors[3].expand(2, 3, 1, LQ, LK).contiguous(), tensors[4][:1]
        out = flash_dmattn.attention(*tensors, backend="ours")
        assert pair.ran == ["forward"]
        torch.testing.assert_close(out, over_batches(formula.attention)(*tensors)[0])


def test_calls_alike_are_described_once(monkeypatch: pytest.MonkeyPatch) -> None:
    described: list[int] = []
    describe = calls.describe
    monkeypatch.setattr(calls, "describe", lambda *x, **more: (described.append(1), describe(*x, **more))[1])
    for seed in range(3):
        check(LeadingCall((2, 3), None, (2, 1, 1, LQ, LK), seed=seed))
    assert len(described) == 1
    # One bias entry for each three in a row, then one for each third: alike but for the repeat.
    q, k = torch.randn(3, 3, LQ, H, D, dtype=torch.float64), torch.randn(3, 3, LK, HK, D, dtype=torch.float64)
    bias = torch.randn(3, 1, 1, LQ, LK, dtype=torch.float64)
    for x in (bias, bias.transpose(0, 1)):
        actual = flash_dmattn.attention(q, k, k, None, x, backend="eager")
        torch.testing.assert_close(actual, over_batches(formula.attention)(q, k, k, None, x)[0])
    assert len(described) == 3 and len(calls.plans) == 3


WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"k": torch.randn(2, 4, LK, HK, D)}, ValueError, r"k has shape .*, whose batch dim 1 is 4; it needs that of q, 3"),
    ({"v": torch.randn(1, 3, LK, HK, D)}, ValueError, r"v has shape .*, whose batch dim 0 is 1; it needs that of q, 2"),
    ({"k": torch.randn(2, LK, HK, D)}, ValueError, r"k has 4 dimensions, .*; it needs 5, as q of shape"),
    ({"k": None}, TypeError, r"k is a NoneType; it needs to be a torch.Tensor of 5 dimensions"),
    ({"v": torch.randn(2, 3, LK, 3, D)}, ValueError, r"v has 7 keys and 3 heads"),
    ({"bias": torch.randn(2, 2, 1, LQ, LK)}, ValueError, r"batch dim 0 in \{1, 2\}, batch dim 1 in \{1, 3\}, heads in"),
    ({"bias": torch.randn(3, LQ, LK)}, ValueError, r"bias has shape \(1, 1, 3, 5, 7\), read as \(batch dim 0,"),
    ({"bias": torch.randn(1, 2, 3, H, LQ, LK)}, ValueError, r"bias has 6 dimensions, .*; it needs 2 to 5, read from"),
    ({"bias": torch.randn(LK)}, ValueError, r"bias has 1 dimensions, .*; it needs 2 to 5"),
    ({"mask": torch.ones(3, 1, LQ, 6, dtype=torch.bool)}, ValueError, r"mask has shape .* seqlen_k in \{1, 7\}"),
    ({"mask": torch.ones(3, 1, LQ, LK)}, TypeError, r"mask has dtype float32; it needs bool"),
    ({"mask": [True]}, TypeError, r"mask is a list; it needs to be a bool torch.Tensor"),
]


@pytest.mark.parametrize(("changes", "kind", "message"), WRONG, ids=range(len(WRONG)))
def test_errors_name_the_argument_and_the_dim(changes: dict[str, Any], kind: type[Exception], message: str) -> None:
    q, k = torch.randn(2, 3, LQ, H, D), torch.randn(2, 3, LK, HK, D)
    for function in (flash_dmattn.attention, flash_dmattn.explain):
        with pytest.raises(kind, match=message):
            function(**{"q": q, "k": k, "v": k, **changes})  # type: ignore[operator]


# With the rest of torch


def test_vmap_in_a_graph() -> None:
    call = LeadingCall((2, 3), None, (1, 1, 1, LQ, LK))
    q, k, v, bias = (call.build()[name] for name in ("q", "k", "v", "bias"))

    def mapped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.vmap(lambda *arguments: flash_dmattn.attention(*arguments, None, bias[0], backend="eager"))(
            q, k, v
        )

    compiled = torch.compile(mapped, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(q, k, v), over_batches(formula.attention)(q, k, v, None, bias)[0])


# vmap

V, B = 3, 2


def f64(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


MAPPED = {
    "q": f64(V, B, LQ, H, 6, seed=0),
    "k": f64(V, B, LK, HK, 6, seed=1),
    "v": f64(V, B, LK, HK, 6, seed=2),
    "bias": f64(V, B, HK, LQ, LK, seed=3),
}
MASK = torch.rand(V, B, 1, LQ, LK, generator=torch.Generator().manual_seed(4)) < 0.6


def loss(backend: str) -> Any:
    def total(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Any) -> Tensor:
        out, lse = flash_dmattn.attention(q, k, v, mask, bias, return_lse=True, backend=backend)
        return out.sin().sum() + lse.masked_fill(lse == -torch.inf, 0.0).cos().sum()

    return total


def inputs(mapped: str, one_entry: bool = False) -> tuple[list[Tensor], tuple[int | None, ...]]:
    """The tensors, the named ones mapped, and their mapped dims."""
    dims = tuple(0 if name in mapped.split() else None for name in (*MAPPED, "mask"))
    tensors = [x if dim == 0 else x[0] for x, dim in zip((*MAPPED.values(), MASK), dims, strict=True)]
    if one_entry:
        tensors[3] = tensors[3][..., :1, :, :, :]
    return tensors, dims


def assert_same(function: Any) -> None:
    actual, wanted = (torch.utils._pytree.tree_leaves(function(backend)) for backend in ("eager", "reference"))
    assert len(actual) == len(wanted) > 0
    for x, y in zip(actual, wanted, strict=True):
        assert x.shape == y.shape
        torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-11)


WHICH = ["q k v bias mask", "q k v", "q", "q bias", "k v mask", "bias", "mask"]


@pytest.mark.parametrize("one_entry", [False, True])
@pytest.mark.parametrize("mapped", WHICH)
def test_vmap_and_per_sample_gradients(mapped: str, one_entry: bool) -> None:
    tensors, dims = inputs(mapped, one_entry)
    every = (0, 1, 2, 3)
    assert_same(lambda backend: torch.vmap(loss(backend), dims)(*tensors))
    assert_same(lambda backend: torch.vmap(torch.func.grad(loss(backend), every), dims)(*tensors))
    assert_same(lambda backend: torch.vmap(torch.func.grad(loss(backend), 3), dims)(*tensors))

    def total(backend: str) -> Any:
        return lambda *arguments: torch.vmap(loss(backend), dims)(*arguments).square().sum()

    assert_same(lambda backend: torch.func.grad(total(backend), every)(*tensors))
    for leaf in tensors[:4]:
        leaf.requires_grad_()
    assert_same(lambda backend: torch.autograd.grad(total(backend)(*tensors), tensors[:4]))
    for leaf in tensors[:4]:
        leaf.requires_grad_(False)


def test_vmap_over_other_dims_twice_and_of_leading_dims() -> None:
    (q, k, v, bias, mask), dims = inputs("q k v bias mask")
    moved = [x.movedim(0, dim) for x, dim in zip((q, k, v, bias, mask), (1, 2, -1, 3, -2))]
    assert_same(lambda backend: torch.vmap(loss(backend), (1, 2, -1, 3, -2))(*moved))
    twice = torch.vmap
    one = [x[:, :, None] for x in (q, k, v, bias, mask)]
    assert_same(
        lambda backend: twice(twice(torch.func.grad(loss(backend), (0, 3)), dims), (0, 0, 0, None, 0))(
            *one[:3], bias[0, :, None], one[4]
        )
    )
    dims_of_five = (0, 0, 0, None, None)
    assert_same(
        lambda backend: torch.vmap(torch.func.grad(loss(backend), (0, 3)), dims_of_five)(
            *one[:3], bias[0, :, None, :], mask[0, :1, None]
        )
    )


def test_gradients_of_one_output_alone_and_of_other_mapped_dims() -> None:
    """The gradients of out and lse are mapped each by its own dim, or one of them is not mapped."""
    (q, k, v, bias, _), _ = inputs("")
    leaves = (q, k, v, bias)

    def results(backend: str) -> Any:
        return lambda *x: flash_dmattn.attention(*x[:3], None, x[3], return_lse=True, backend=backend)

    few = tuple(x[:, :2] for x in (q, k, v)) + (bias[..., :2, :2],)
    assert_same(lambda backend: torch.func.jacrev(lambda *x: results(backend)(*x)[1], (0, 1, 2, 3))(*few))
    douts, dlses = f64(V, B, LQ, H, 6, seed=5), f64(V, B, H, LQ, seed=6)

    def mapped(backend: str, dims: tuple[int | None, int | None], pair: tuple[Tensor, Tensor]) -> Any:
        return torch.vmap(torch.func.vjp(results(backend), *leaves)[1], (dims,))(pair)

    assert_same(lambda backend: mapped(backend, (0, None), (douts, dlses[0])))
    assert_same(lambda backend: mapped(backend, (None, 0), (douts[0], dlses)))
    assert_same(lambda backend: mapped(backend, (2, 1), (douts.movedim(0, 2), dlses.movedim(0, 1))))


def test_vmap_is_one_call_for_all() -> None:
    batches: list[int] = []
    own = eager.BACKEND

    def counted(plan: Any) -> Any:
        return lambda problem: (batches.append(problem.batch), plan(problem))[1]

    tensors, dims = inputs("q k v")
    with replaced("eager", plan_forward=counted(own.plan_forward), plan_backward=counted(own.plan_backward)):
        torch.vmap(torch.func.grad(loss("eager"), (0, 3)), dims)(*tensors)
    assert batches == [V * B, V * B]


def test_vmap_of_a_backend_that_reads_no_part_of_a_batch_expands() -> None:
    pair = KernelPair("ours")
    (q, k, v, bias, mask), dims = inputs("q k v")
    with registered(pair, before="cuda"):
        wanted = torch.vmap(torch.func.grad(loss("reference"), (0, 3)), dims)(q, k, v, bias, mask)
        for backend, ran in (("auto", []), ("ours", ["forward", "backward"])):
            actual = torch.vmap(torch.func.grad(loss(backend), (0, 3)), dims)(q, k, v, bias, mask)
            torch.testing.assert_close(actual, wanted, rtol=1e-9, atol=1e-11)
            assert pair.ran == ran


def test_vmap_unpacks_a_mask_that_was_prepared_for_another_backend() -> None:
    small = Rule("small", lambda p: p.batch <= B, lambda p: f"batch is {p.batch}")
    pair = KernelPair("ours", rules=(small,), mask_forms=frozenset({"tiles", "intervals"}))
    tensors, dims = inputs("q k v bias mask")
    with registered(pair, before="cuda"):
        actual = torch.vmap(torch.func.grad(loss("auto"), (0, 1, 2, 3)), dims)(*tensors)
    assert pair.ran == []
    wanted = torch.vmap(torch.func.grad(loss("reference"), (0, 1, 2, 3)), dims)(*tensors)
    torch.testing.assert_close(actual, wanted, rtol=1e-9, atol=1e-11)
