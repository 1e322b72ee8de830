"""The `torch.library` operators: schema, fakes that agree with the kernels in shape, stride and dtype, opcheck."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from dispatched import Dispatched
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map

import flash_dmattn
from flash_dmattn import Sequences, append_to_cache, operators
from flash_dmattn.gradients import spread
from flash_dmattn.masks import PreparedMask
from flash_dmattn.masks.prepared.operators import prepared_view
from flash_dmattn.operators import flat_flags
from flash_dmattn.problem import Flags, MaskChoice, NeedsGrad, causal_window

B, LQ, LK, HQ, HK, D, DV = 2, 3, 5, 4, 2, 8, 6
FORWARD = torch.ops.flash_dmattn.attention_forward.default
BACKWARD = torch.ops.flash_dmattn.attention_backward.default
PREPARE = torch.ops.flash_dmattn.prepare_mask.default
NO_MASK = ([], "none")
FLAGS = flat_flags(Flags(2, 0, 0.3, 1.5, False))
ASKING = flat_flags(Flags(2, 0, 0.3, 1.5, False, max_scores=True, entropy=True))
NO_SEQUENCES: list[Tensor] = []
SINK = torch.tensor([0.5, -torch.inf, 2.0, -1.0], dtype=torch.bfloat16)


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape).to(dtype)


def permuted(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Draw a tensor that lies as (batch, heads, seqlen, dim), from the second element of its storage on."""
    b, s, h, d = shape
    return torch.randn(b * h * s * d + 1)[1:].to(dtype).view(b, h, s, d).transpose(1, 2)


MASKS = {
    "no mask": None,
    "mask full": torch.rand(B, HQ, LQ, LK) > 0.4,
    "mask per key": torch.rand(B, 1, 1, LK) > 0.4,
    "mask expanded": (torch.rand(1, 1, LQ, LK) > 0.4).expand(B, HK, LQ, LK),
}
BIASES = {
    "no bias": None,
    "bias full": normal(B, HQ, LQ, LK),
    "bias fp64 per key": normal(1, HK, 1, LK, dtype=torch.float64),
    "bias transposed": normal(1, HQ, LK, LQ).transpose(2, 3),
    "bias expanded": normal(1, 1, 1, LK).expand(B, HQ, LQ, LK),
}


def forward_arguments(
    make: Any,
    mask: Tensor | None,
    bias: Tensor | None,
    dtype: torch.dtype,
    sink: Tensor | None = None,
    flags: tuple[Any, ...] = FLAGS,
) -> tuple[Any, ...]:
    q, k, v = make(B, LQ, HQ, D, dtype=dtype), make(B, LK, HK, D, dtype=dtype), make(B, LK, HK, DV, dtype=dtype)
    masked: tuple[Any, ...] = NO_MASK if mask is None else ([mask], "dense")
    return (q, k, v, *masked, bias, sink, NO_SEQUENCES, None, *flags, "eager", "")


def backward_arguments(
    make: Any,
    mask: Tensor | None,
    bias: Tensor | None,
    dtype: torch.dtype,
    needs_grad: NeedsGrad,
    dlse: bool,
    sink: Tensor | None = None,
    flags: tuple[Any, ...] = FLAGS,
) -> tuple[Any, ...]:
    arguments = forward_arguments(make, mask, bias, dtype, sink, flags)
    out, lse, largest, entropy = FORWARD(*arguments)
    assert (largest.numel() > 0) == (entropy.numel() > 0) == (flags is ASKING)
    sent = make(*out.shape, dtype=dtype), torch.randn_like(lse) if dlse else None
    rows = (torch.randn_like(entropy), entropy) if flags is ASKING else (None, None)
    return (*sent, rows[0], *arguments[:9], out, lse, rows[1], *flags, "eager", list(needs_grad))


def assert_fake_agrees(operator: Any, arguments: tuple[Any, ...]) -> None:
    """opcheck compares strides on GPUs only, so they are compared here."""
    real = operator(*arguments)
    with FakeTensorMode() as mode:
        fake = operator(*tree_map(lambda x: mode.from_tensor(x) if isinstance(x, Tensor) else x, arguments))
    assert len(fake) == len(real)
    for f, r in zip(fake, real):
        assert (f.shape, f.dtype, f.device) == (r.shape, r.dtype, r.device)
        assert f.stride() == r.stride(), f"the fake has strides {f.stride()}, the kernel {r.stride()}"


@pytest.mark.parametrize("make", [normal, permuted], ids=["contiguous", "permuted"])
@pytest.mark.parametrize("bias", BIASES)
@pytest.mark.parametrize("mask", MASKS)
def test_fakes_agree_with_what_runs(mask: str, bias: str, make: Any) -> None:
    inputs = MASKS[mask], BIASES[bias]
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        assert_fake_agrees(FORWARD, forward_arguments(make, *inputs, dtype))
        for needs_grad in (NeedsGrad(True, True, True, inputs[1] is not None), NeedsGrad(k=True), NeedsGrad(v=True)):
            assert_fake_agrees(BACKWARD, backward_arguments(make, *inputs, dtype, needs_grad, dlse=True))
        needs_grad = NeedsGrad(v=True, sink=True)
        assert_fake_agrees(BACKWARD, backward_arguments(make, *inputs, dtype, needs_grad, True, SINK))
        assert_fake_agrees(FORWARD, forward_arguments(make, *inputs, dtype, SINK, ASKING))
        assert_fake_agrees(BACKWARD, backward_arguments(make, *inputs, dtype, needs_grad, False, SINK, ASKING))


@pytest.mark.parametrize(
    "needs_grad", [NeedsGrad(*n) for n in itertools.product((False, True), repeat=5) if any(n)], ids=str
)
def test_backward_returns_the_gradients_asked_for_in_order(needs_grad: NeedsGrad) -> None:
    arguments = backward_arguments(
        permuted, MASKS["mask full"], BIASES["bias fp64 per key"], torch.float32, needs_grad, True, SINK
    )
    actual = BACKWARD(*arguments)
    everything = BACKWARD(*arguments[:-1], [True] * 5)
    assert len(actual) == sum(needs_grad)
    torch.testing.assert_close(actual, [g for g, needed in zip(everything, needs_grad) if needed])
    assert tuple(g is not None for g in spread(actual, needs_grad)) == needs_grad
    assert_fake_agrees(BACKWARD, arguments)


@pytest.mark.parametrize(
    ("mask", "bias", "make"),
    [
        ("no mask", "no bias", normal),
        ("mask full", "bias transposed", permuted),
        ("mask expanded", "bias expanded", permuted),
        ("mask per key", "bias fp64 per key", normal),
    ],
)
def test_opcheck(mask: str, bias: str, make: Any) -> None:
    inputs = MASKS[mask], BIASES[bias]
    arguments = forward_arguments(make, *inputs, torch.float32)
    torch.library.opcheck(FORWARD, arguments)
    # The mask, which takes no gradient, is in a list.
    differentiable = [x.clone().requires_grad_() if isinstance(x, Tensor) else x for x in arguments]
    torch.library.opcheck(FORWARD, tuple(differentiable))
    for needs_grad, dlse in ((NeedsGrad(True, True, True, inputs[1] is not None), True), (NeedsGrad(q=True), False)):
        torch.library.opcheck(BACKWARD, backward_arguments(make, *inputs, torch.float32, needs_grad, dlse))
    torch.library.opcheck(FORWARD, forward_arguments(make, *inputs, torch.float32, SINK))
    needs_grad = NeedsGrad(q=True, sink=True)
    torch.library.opcheck(BACKWARD, backward_arguments(make, *inputs, torch.float32, needs_grad, True, SINK))
    torch.library.opcheck(FORWARD, forward_arguments(make, *inputs, torch.float32, SINK, ASKING))
    torch.library.opcheck(BACKWARD, backward_arguments(make, *inputs, torch.float32, needs_grad, True, SINK, ASKING))


@pytest.mark.parametrize("sizes", [(0, 3, 5), (2, 0, 5), (2, 3, 0)], ids=["no batch", "no query", "no key"])
def test_fakes_agree_on_empty_inputs(sizes: tuple[int, int, int]) -> None:
    batch, seqlen_q, seqlen_k = sizes
    q, k, v = normal(batch, seqlen_q, HQ, D), normal(batch, seqlen_k, HK, D), normal(batch, seqlen_k, HK, DV)
    bias = normal(1, HQ, seqlen_q, seqlen_k)
    arguments = (q, k, v, *NO_MASK, bias, SINK, NO_SEQUENCES, None)
    assert_fake_agrees(FORWARD, (*arguments, *FLAGS, "eager", ""))
    assert_fake_agrees(FORWARD, (*arguments, *ASKING, "eager", ""))
    out, lse, *_ = FORWARD(*arguments, *FLAGS, "eager", "")
    sent = torch.ones_like(out), None, None
    assert_fake_agrees(BACKWARD, (*sent, *arguments, out, lse, None, *FLAGS, "eager", [True] * 5))


def test_schema_is_the_shared_one_and_mutates_nothing() -> None:
    for operator, schema in ((FORWARD, operators.FORWARD_SCHEMA), (BACKWARD, operators.BACKWARD_SCHEMA)):
        actual = operator._schema
        assert str(torch._C.parse_schema(f"{actual.name}{schema}")) == str(actual)
        assert not actual.is_mutable
        assert all(argument.alias_info is None for argument in (*actual.arguments, *actual.returns))
    *names, backward = [argument.name for argument in FORWARD._schema.arguments]
    assert backward == "backward"
    assert names == [argument.name for argument in BACKWARD._schema.arguments if argument.name in names]


def test_outputs_never_alias_inputs_or_each_other() -> None:
    for dtype, bias in ((torch.float32, normal(B, HQ, LQ, LK)), (torch.float64, None)):
        q, k, v = (torch.zeros(1, 1, 1, 1, dtype=dtype) for _ in range(3))
        if bias is not None:
            q, k, v = normal(B, LQ, HQ, D), normal(B, LK, HK, D), normal(B, LK, HK, DV)
        flags = flat_flags(Flags(-1, -1, 1.0, 0.0, False, max_scores=True, entropy=True))
        out, lse, *rows = FORWARD(q, k, v, *NO_MASK, bias, None, NO_SEQUENCES, None, *flags, "eager", "")
        needs_grad = [True, True, True, bias is not None, False]
        arguments = (q, k, v, *NO_MASK, bias, None, NO_SEQUENCES, None)
        gradients = BACKWARD(out, None, None, *arguments, out, lse, rows[1], *flags, "eager", needs_grad)
        storages = [x.untyped_storage().data_ptr() for x in (q, k, v, out, lse, *rows, *gradients)]
        assert len(set(storages)) == len(storages)


def random_mask(*shape: int) -> Tensor:
    return torch.rand(shape) > 0.4


def attended(mask: Any = None, tokens: int = 8, **flags: Any) -> None:
    """Call on one sequence of tokens, or with sequences, and go back."""
    leading = () if "sequences" in flags and flags["sequences"].layout == "packed" else (len(PADDED.seqlens_k),)
    q, k = (torch.randn(*leading, tokens, heads, 16, requires_grad=True) for heads in (4, 2))
    out, lse = flash_dmattn.attention(q, k, k, mask, return_lse=True, **flags)
    (out.sum() + lse.sum()).backward()


PACKED = Sequences.packed(torch.tensor([0, 3, 8]), max_seqlen_q=5)
PADDED = Sequences.padded(seqlens_k=torch.tensor([8, 5]))
PAGED = Sequences.paged(torch.tensor([[0, 2], [1, 3]]), torch.tensor([5, 8]))


def append(sequences: Sequences, cache: tuple[int, ...], new: tuple[int, ...]) -> None:
    append_to_cache(torch.zeros(*cache, 2, 8), torch.zeros(*cache, 2, 8), *torch.randn(2, *new, 2, 8), sequences)


# Calls that run the operators of the library; the tests above have the operators of plain calls.
RUNS: dict[str, Callable[[], object]] = {
    "dropout": lambda: attended(dropout_p=0.3),
    "packed": lambda: attended(random_mask(1, 8, 5), sequences=PACKED),
    "tree": lambda: attended(PreparedMask.from_tree(random_mask(2, 8, 8)), sequences=PADDED),
    "tiles of packed": lambda: PreparedMask.from_mask(random_mask(2, 8, 5), sequences=PACKED, seqlen_q=8, seqlen_k=8),
    "tiles of keys": lambda: PreparedMask.from_mask(random_mask(2, 1, 8), sequences=PACKED, seqlen_q=8, seqlen_k=8),
    "tiles of padded": lambda: PreparedMask.from_mask(
        random_mask(2, 1, 8, 8), sequences=PADDED, seqlen_q=8, seqlen_k=8, is_causal=True
    ),
    "ragged": lambda: PreparedMask.from_ragged(random_mask(34), PACKED, seqlen_q=8, seqlen_k=8, window_size=(3, 0)),
    "top-k": lambda: PreparedMask.from_topk(normal(2, 2, 1, 300), 5, is_causal=True, reorder=True, compact=True),
    "top-k in fp64": lambda: PreparedMask.from_topk(
        normal(1, 2, 1, 37, dtype=torch.float64), 5, seqlen_q=40, mask=random_mask(1, 2, 1, 37), reorder=False
    ),
    "top-k of no keys": lambda: PreparedMask.from_topk(normal(1, 2, 1, 0), 5, seqlen_q=3),
    "intervals in a mask": lambda: PreparedMask.from_mask(
        random_mask(2, 3, 1, 300).expand(-1, -1, 150, -1).contiguous(), find_intervals=True, reorder=True
    ),
    "caches in pages": lambda: append(PAGED, (4, 4), (2, 1)),
    "padded caches": lambda: append(PADDED, (2, 9), (2, 1)),
    "packed caches": lambda: append(Sequences.packed(torch.tensor([0, 1, 3]), torch.tensor([0, 4, 8])), (8,), (3,)),
}
RUN = {
    *("attention_forward", "attention_backward", "prepare_sequence_mask", "append_to_cache"),
    *("score_keys", "topk_intervals", "mask_intervals", "interval_walk"),
}


def test_opcheck_of_everything_that_runs() -> None:
    names: set[str] = set()
    for run in RUNS.values():
        calls: list[tuple[Any, Any]] = []

        def record(operator: Any, arguments: Any, result: Any, calls: list[Any] = calls) -> None:
            if operator.namespace == "flash_dmattn":
                calls.append((operator, tree_map(lambda x: x.detach() if isinstance(x, Tensor) else x, arguments)))

        with Dispatched(record) as seen:
            run()
        names.update(seen.names)
        for operator, arguments in calls:
            # Passes read lengths on the host: a tracer of shapes cannot run them.
            reads = "attention" in operator.name()
            checks = ("test_schema", "test_faketensor", *(() if reads else ("test_aot_dispatch_dynamic",)))
            torch.library.opcheck(operator, arguments, test_utils=checks)
    assert names >= RUN, RUN - names


TO_PREPARE = {
    "full": random_mask(2, 3, 140, 270),
    "transposed": random_mask(2, 3, 270, 140).transpose(2, 3),
    "heads last": random_mask(2, 140, 270, 3).permute(0, 3, 1, 2),
    "one key for all": random_mask(2, 1, 140, 1),
    "per key": random_mask(1, 3, 1, 270),
    "per key, heads last": random_mask(2, 1, 270, 3).permute(0, 3, 1, 2),
    "per key, of one head": random_mask(1, 1, 1, 1),
    "no head": random_mask(2, 0, 140, 270),
    "no query": random_mask(2, 3, 0, 270),
    "no key": random_mask(2, 3, 140, 0),
    "no key for all": random_mask(2, 3, 1, 0),
}


@pytest.mark.parametrize("band", [(False, (-1, -1)), (True, (30, -1))], ids=str)
@pytest.mark.parametrize("name", TO_PREPARE)
def test_operator_that_prepares_a_mask(name: str, band: tuple[bool, tuple[int, int]]) -> None:
    mask = TO_PREPARE[name]
    sizes = [full if size == 1 else size for size, full in zip(mask.shape[2:], (140, 270))]
    forms = {"keys": 3, "intervals": 6, "tiles": 4} if mask.shape[2] == 1 else {"tiles": 4}
    for (form, number), reorder in itertools.product(forms.items(), (False, True)):
        if reorder and form != "intervals":
            continue
        arguments = (mask, *sizes, *causal_window(*band), form, reorder)
        assert_fake_agrees(PREPARE, arguments)
        tensors = PREPARE(*arguments)
        assert len(tensors) == number
        assert all(x.is_contiguous() for x in tensors)
        storages = [x.untyped_storage().data_ptr() for x in (mask, *tensors) if x.numel()]
        assert len(set(storages)) == len(storages)
        torch.library.opcheck(PREPARE, arguments)


def test_expanded_dims_are_no_dims_of_the_prepared_mask() -> None:
    one = random_mask(1, 1, 140, 270)
    made = prepared_view(one.expand(2, 3, -1, -1), 140, 270, (-1, 0), MaskChoice("keys"))
    assert [x.shape[:2] for x in made.tensors] == [(1, 1)] * 4
    row = random_mask(2, 3, 1, 270)
    actual = prepared_view(row.expand(-1, -1, 140, -1), 140, 270, (-1, 0), MaskChoice("intervals", True))
    assert actual.form == "intervals"
    torch.testing.assert_close(actual.tensors, tuple(PREPARE(row, 140, 270, -1, 0, "intervals", True)))
