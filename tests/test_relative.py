"""Biases by distance: their matrix, every way through a call, and their errors; test_random has random calls."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from conftest import refusal_of
from dispatched import bytes_made
from flex_fixture import eager_flex
from torch import Tensor

import flash_dmattn
from flash_dmattn import Sequences, attention, biases
from flash_dmattn.backends import eager
from flash_dmattn.biases import Band, Relative
from flash_dmattn.masks import PreparedMask
from flash_dmattn.reference.distances import Distances, dense, distance_sums

F64 = torch.float64


def value_at(values: Tensor, place: int, outside: str) -> Tensor:
    n = values.shape[-1]
    if 0 <= place < n or outside == "clamp":
        return values[..., min(max(place, 0), n - 1)]
    assert outside == "zero"
    return values[..., 0] * 0


def by_loops(bias: Relative | Band, seqlen_q: int, seqlen_k: int) -> Tensor:
    """The matrix of a bias, score by score."""
    rows: list[Tensor] = []
    for i in range(seqlen_q):
        values = bias.values if isinstance(bias, Relative) else bias.values[..., i, :]
        places = (bias.zero + j - (i + seqlen_k - seqlen_q) for j in range(seqlen_k))
        rows.append(torch.stack([value_at(values, place, bias.outside) for place in places], -1))
    return torch.stack(rows, -2)


LENGTHS = ((1, 1), (1, 6), (6, 1), (5, 8), (8, 5), (7, 7))


@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), LENGTHS)
@pytest.mark.parametrize("has_rows", (False, True))
def test_dense_is_the_matrix_of_the_values(seqlen_q: int, seqlen_k: int, has_rows: bool) -> None:
    for number in (1, 4, 30):
        for zero in (-9, -1, 0, number // 2, number - 1, number + 7):
            for outside in ("zero", "clamp"):
                shape = (2, 3, seqlen_q, number) if has_rows else (2, 3, number)
                values = torch.randn(shape, dtype=F64, requires_grad=True)
                bias = (Band if has_rows else Relative)(values, zero, outside)  # type: ignore[arg-type]
                made, wanted = bias.dense(seqlen_q, seqlen_k), by_loops(bias, seqlen_q, seqlen_k)
                assert torch.equal(made, wanted)
                sent = torch.randn_like(made)
                gradients = [torch.autograd.grad(x, values, sent)[0] for x in (made, wanted)]
                torch.testing.assert_close(*gradients)
                four = values if has_rows else values[:, :, None]
                sums = distance_sums(sent, Distances(four, zero, outside == "clamp"))
                torch.testing.assert_close(sums.view(shape), gradients[1])


@pytest.mark.parametrize("bias", [Relative(torch.zeros(2, 3), 1), Band(torch.zeros(2, 4, 3), 1)])
def test_a_sum_with_a_mask_of_floats_is_told_what_to_make(bias: Relative | Band) -> None:
    told = r"no tensor; to add to it, make one: bias\.dense\(seqlen_q, seqlen_k\)"
    with pytest.raises(TypeError, match=told):
        bias + torch.zeros(4, 4)
    with pytest.raises(TypeError, match=told):
        torch.zeros(4, 4) + bias


@pytest.mark.parametrize("lengths", ((0, 4), (4, 0), (0, 0)))
def test_dense_without_scores_has_a_gradient_of_zeros(lengths: tuple[int, int]) -> None:
    values = torch.ones(2, 1, 3, 5, dtype=F64, requires_grad=True)
    made = dense(Distances(values, 2, True), *lengths)
    assert made.shape == (2, 1, *lengths)
    assert torch.equal(torch.autograd.grad(made.sum(), values)[0], torch.zeros_like(values))


def tensors(*shape: int, dtype: torch.dtype = F64, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v of (*batch, Lq, Lk, Hq, Hk, D)."""
    *batch, seqlen_q, seqlen_k, heads, heads_k, dim = shape
    random = torch.Generator().manual_seed(seed)
    sizes = ((seqlen_q, heads, dim), *2 * ((seqlen_k, heads_k, dim),))
    q, k, v = (torch.randn(*batch, *size, generator=random, dtype=dtype).requires_grad_() for size in sizes)
    return q, k, v


def results_of(call: Any, inputs: tuple[Tensor, ...], values: Tensor, *, return_lse: bool = True) -> tuple[Tensor, ...]:
    """out, lse and the gradients of inputs and values."""
    out, lse = call(*inputs)
    random = torch.Generator().manual_seed(1)
    sent = [torch.randn(x.shape, generator=random, dtype=x.dtype) for x in (out, lse)]
    lse = torch.where(lse > -torch.inf, lse, 0.0)
    return out, lse, *torch.autograd.grad((out, lse), (*inputs, values), sent)


def assert_as_dense(inputs: tuple[Tensor, ...], bias: Relative | Band, **options: Any) -> None:
    """A call is as with the matrix of the bias, gradients of the values included."""
    lengths = inputs[0].shape[-3], inputs[1].shape[-3]

    def call(q: Tensor, k: Tensor, v: Tensor, by_matrix: bool = False) -> Any:
        torch.manual_seed(2)
        passed = bias.dense(*lengths) if by_matrix else bias
        return attention(q, k, v, bias=passed, return_lse=True, **options)

    made = results_of(call, inputs, bias.values)
    wanted = results_of(lambda *x: call(*x, by_matrix=True), inputs, bias.values)
    for x, y in zip(made, wanted, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-8, atol=1e-9)


def relative(*shape: int, zero: int, outside: Any = "clamp") -> Relative:
    return Relative(torch.randn(shape, dtype=F64, requires_grad=True), zero, outside)


def band(*shape: int, zero: int) -> Band:
    return Band(torch.randn(shape, dtype=F64, requires_grad=True), zero)


@pytest.mark.parametrize("backend", ("eager", "reference"))
@pytest.mark.parametrize(
    ("batch", "values"),
    (((2, 3), (4, 9)), ((2, 3), (3, 4, 9)), ((2, 3), (2, 1, 2, 9)), ((2, 3, 2), (2, 1, 2, 1, 9)), ((3,), (3, 2, 9))),
)
def test_leading_dims(backend: Any, batch: tuple[int, ...], values: tuple[int, ...]) -> None:
    inputs = tensors(*batch, 7, 10, 4, 2, 8)
    assert_as_dense(inputs, relative(*values, zero=3), is_causal=True, backend=backend)
    assert_as_dense(inputs, band(*values[:-1], 7, values[-1], zero=3), backend=backend)


@pytest.mark.parametrize("bias", (relative(1, 31, zero=12), band(2, 2, 60, 31, zero=12)), ids=("relative", "band"))
@pytest.mark.parametrize("chunk_bytes", (60_000, 2**28))
def test_masks_that_eager_reads_in_place_gather_keys(bias: Any, chunk_bytes: int, monkeypatch: Any) -> None:
    monkeypatch.setattr(eager, "_chunk_bytes", chunk_bytes)
    monkeypatch.setattr("flash_dmattn.reference.chunks.FEW_SCORES", 0)
    inputs = tensors(2, 60, 90, 4, 2, 8)
    random = torch.Generator().manual_seed(3)
    few = torch.rand(2, 1, 1, 90, generator=random) < 0.3
    tiles = torch.rand(2, 4, 60, 90, generator=random) < 0.5
    options: tuple[dict[str, Any], ...] = (
        {"mask": few},
        {"mask": tiles, "softcap": 3.0},
        {"mask": PreparedMask.from_mask(tiles, seqlen_q=60, seqlen_k=90, is_causal=True)},
        {"mask": PreparedMask.from_mask(few, seqlen_q=60, seqlen_k=90)},
        {"window_size": (20, 4), "sink": torch.randn(4, dtype=F64)},
        {"mask": few, "dropout_p": 0.4},
    )
    for option in options:
        assert_as_dense(inputs, bias, backend="eager", **option)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_flex_reads_a_value_for_each_distance(dtype: torch.dtype) -> None:
    random = torch.Generator().manual_seed(0)
    values = torch.randn(2, 1, 4, 9, generator=random, dtype=F64).to(dtype).requires_grad_()
    q, k, v = (x.detach().float().requires_grad_() for x in tensors(2, 3, 40, 150, 4, 2, 16))
    for outside in ("clamp", "zero"):
        bias = Relative(values, 3, outside)  # type: ignore[arg-type]

        def call(backend: Any, q: Tensor, k: Tensor, v: Tensor, bias: Any = bias) -> Any:
            return attention(q, k, v, bias=bias, is_causal=True, return_lse=True, backend=backend)

        with eager_flex():
            made = results_of(partial(call, "flex"), (q, k, v), values)
        for x, y in zip(made, results_of(partial(call, "eager"), (q, k, v), values), strict=True):
            rounding = 0.0 if x.dtype == torch.float32 else 2**-7
            torch.testing.assert_close(x, y, rtol=1e-5 + rounding, atol=1e-5)


def test_triton_counts_values_in_32_bits() -> None:
    q = torch.empty(1, 8, 2, 16, device="meta", dtype=torch.bfloat16)
    for number in (2**31 - 1, 2**31):
        bias = Relative(torch.empty(2, number, device="meta", dtype=torch.bfloat16), 4, "clamp")
        verdicts = {x.backend: x for x in flash_dmattn.explain(q, q, q, bias=bias, device="sm_90").verdicts}
        assert [reason.code for reason in verdicts["triton"].reasons] == ["values_span"] * (number == 2**31)


def test_flex_refuses_what_it_does_not_read() -> None:
    q, k, v = (x.detach().float() for x in tensors(2, 5, 8, 4, 2, 16))
    sequences = Sequences.padded(seqlens_k=torch.tensor([8, 3]))
    for options, code in (
        ({"bias": Band(torch.ones(4, 5, 9), 4)}, "band_bias"),
        ({"bias": Relative(torch.ones(4, 9), 4, "clamp"), "sequences": sequences}, "relative_sequences"),
    ):
        with pytest.raises(flash_dmattn.BackendUnsupportedError) as caught:
            attention(q, k, v, backend="flex", **options)  # type: ignore[arg-type]
        assert [reason.code for reason in caught.value.reasons] == [code]


def ragged(lengths: tuple[tuple[int, int], ...]) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """Ends of the queries and of the keys of packed sequences, and their q, k and v."""
    ends = [torch.tensor([0, *x]).cumsum(0).int() for x in zip(*lengths, strict=True)]
    inputs = tensors(int(ends[0][-1]), int(ends[1][-1]), 4, 2, 8)
    return ends[0], ends[1], inputs


RAGGED = ((5, 9), (5, 9), (0, 3), (7, 7), (1, 20), (6, 2))


@pytest.mark.parametrize("backend", ("eager", "reference"))
@pytest.mark.parametrize(
    "bias",
    (relative(4, 7, zero=3), relative(6, 1, 7, zero=5), band(2, 24, 7, zero=5), band(6, 4, 7, 7, zero=3)),
    ids=("shared", "each", "packed band", "band by position"),
)
def test_distances_are_within_each_sequence(backend: Any, bias: Any) -> None:
    ends_q, ends_k, inputs = ragged(RAGGED)
    sequences = Sequences.packed(ends_q, ends_k, max_seqlen_q=7, max_seqlen_k=20)
    is_packed = bias.values.shape[-2] == 24

    def own(s: int, rows: int) -> Any:
        values = bias.values
        if is_packed:
            return bias._replace(values=values[:, int(ends_q[s]) : int(ends_q[s + 1])])
        values = values[s] if len(values) == len(RAGGED) else values
        return bias._replace(values=values[:, :rows] if isinstance(bias, Band) else values)

    def one_by_one(q: Tensor, k: Tensor, v: Tensor) -> Any:
        each = []
        for s, (rows, keys) in enumerate(RAGGED):
            places = slice(ends_q[s], ends_q[s + 1]), slice(ends_k[s], ends_k[s + 1])
            part = (q[places[0]][None], k[places[1]][None], v[places[1]][None])
            matrix = own(s, rows).dense(rows, keys)
            each.append(attention(*part, bias=matrix, is_causal=True, return_lse=True, backend="eager"))
        return torch.cat([x[0][0] for x in each]), torch.cat([x[1][0] for x in each], 1)

    def at_once(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return attention(q, k, v, bias=bias, sequences=sequences, is_causal=True, return_lse=True, backend=backend)

    for x, y in zip(results_of(at_once, inputs, bias.values), results_of(one_by_one, inputs, bias.values), strict=True):
        torch.testing.assert_close(x, y)


class Model(torch.nn.Module):
    """A call with a table of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(32, 4))

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, bias=biases.t5(self.weight, max_distance=20))


def test_exported_programs_take_any_length() -> None:
    model, inputs = Model(), tensors(2, 24, 24, 4, 2, 8, dtype=torch.float32)
    length = torch.export.Dim("length", min=2, max=512)
    program = torch.export.export(model, inputs, dynamic_shapes=({1: length},) * 3)
    other = tensors(2, 40, 40, 4, 2, 8, dtype=torch.float32, seed=1)
    made, wanted = program.module()(*other), model(*other)
    torch.testing.assert_close(made, wanted)
    (own,) = [x for name, x in program.module().named_parameters() if name == "weight"]
    pairs = ((program.module()(*other), own), (wanted, model.weight))
    torch.testing.assert_close(*(torch.autograd.grad(x.square().sum(), y)[0] for x, y in pairs))


def test_no_tensor_has_all_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not in either pass, also where the values are as long as the call."""
    monkeypatch.setattr(eager, "_chunk_bytes", 200_000)
    length = 700
    inputs = tensors(1, length, length, 1, 1, 8, dtype=torch.float32)
    for bias in (
        Relative(torch.randn(1, 2 * length - 1, requires_grad=True), length - 1),
        Band(torch.randn(1, length, 8, requires_grad=True), 7),
    ):

        def run(bias: Any = bias) -> None:
            out = attention(*inputs, bias=bias, backend="eager")
            torch.autograd.grad(out.sum(), (*inputs, bias.values))

        assert max(bytes_made(run)) < 4 * length * length / 5


def test_gradients_repeat_bit_by_bit_and_sum_to_dlse() -> None:
    inputs = tensors(2, 130, 140, 4, 2, 16, dtype=torch.float32)
    bias = Relative(torch.randn(2, 33, requires_grad=True), 16, "clamp")

    def gradients() -> tuple[Tensor, ...]:
        out, lse = attention(*inputs, bias=bias, return_lse=True, deterministic=True)
        random = torch.Generator().manual_seed(0)
        sent = [torch.randn(x.shape, generator=random) for x in (out, lse)]
        return sent[1], *torch.autograd.grad((out, lse), (*inputs, bias.values), sent)

    first, second = gradients(), gradients()
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))
    # A number added to all values adds it to every lse, and changes no probability.
    torch.testing.assert_close(first[-1].sum(), first[0].sum(), rtol=1e-4, atol=1e-3)


def test_the_values_of_t5() -> None:
    weight = torch.randn(32, 3, dtype=F64, requires_grad=True)
    for is_bidirectional in (True, False):
        made = biases.t5(weight, is_bidirectional=is_bidirectional, max_distance=50)
        assert made.values.shape == (3, 101 if is_bidirectional else 51) and made.outside == "clamp"
        distance = torch.arange(90) - torch.arange(80)[:, None] - 10
        rows = biases.t5_buckets(distance, 32, 50, is_bidirectional)
        wanted = weight[rows].permute(2, 0, 1)
        assert torch.equal(made.dense(80, 90), wanted)
        sent = torch.randn_like(wanted)
        gradients = [torch.autograd.grad(x, weight, sent)[0] for x in (made.dense(80, 90), wanted)]
        torch.testing.assert_close(*gradients)


def test_the_values_of_functions() -> None:
    slopes = torch.tensor([0.5, 0.25], requires_grad=True)
    distance = torch.arange(7) - torch.arange(5)[:, None] - 2
    wanted = -slopes[:, None, None] * distance.abs()
    assert torch.equal(biases.alibi(slopes, 5, 7).dense(5, 7), wanted)
    assert biases.alibi(slopes.half(), 3).values.dtype == torch.float32
    assert biases.alibi(slopes, 0, 0).dense(0, 0).shape == (2, 0, 0)
    made = biases.from_function(lambda d: torch.stack([d, d.square()]), -6, 4)
    assert torch.equal(made.dense(5, 7)[1], distance.square().float())
    with pytest.raises(ValueError, match="low is 2 and high is 1; low needs to be at most high"):
        biases.from_function(torch.abs, 2, 1)


def test_distances_that_the_call_does_not_have_need_no_value() -> None:
    q, k, v = tensors(1, 5, 8, 2, 2, 8)
    exact = relative(2, 8, zero=7, outside="error")  # distances from -7 to 0
    attention(q, k, v, bias=exact, is_causal=True)
    attention(q, k, v, bias=relative(2, 6, zero=3, outside="error"), window_size=(3, 2))
    mask = PreparedMask.from_mask(torch.ones(5, 8, dtype=torch.bool), seqlen_q=5, seqlen_k=8, is_causal=True)
    attention(q, k, v, mask, bias=exact)
    attention(q[:, :0], k, v, bias=relative(2, 1, zero=90, outside="error"))
    good = lambda: attention(q, k, v, bias=exact, is_causal=True)
    error = refusal_of(lambda: attention(q, k, v, bias=exact), good)
    assert str(error) == (
        'bias has values for distances -7 to 0; it needs those of the call, -7 to 4 (or outside="clamp", or "zero")'
    )


@pytest.mark.parametrize("zero", (10**30, -(10**30)))
@pytest.mark.parametrize("outside", ("clamp", "zero"))
def test_zero_may_lie_anywhere(zero: int, outside: Any) -> None:
    q, k, v = tensors(3, 5, 8, 4, 2, 8)
    values = torch.randn(4, 9, dtype=q.dtype)

    def grads(zero: int) -> Tensor:  # transforms see operators, whose numbers have 64 bits
        square = lambda values: attention(q, k, v, bias=Relative(values, zero, outside)).square().sum()
        return torch.func.grad(square)(values)

    torch.testing.assert_close(grads(zero), grads(100 if zero > 0 else -100))


WRONG: tuple[tuple[Any, type[Exception], str], ...] = (
    (Relative([[1.0]], 0), TypeError, "bias.values is a list; it needs to be a floating-point torch.Tensor"),  # type: ignore[arg-type]
    (Relative(torch.ones(2, 3, dtype=torch.int64), 0), TypeError, "bias.values has dtype int64; it needs float16"),
    (Relative(torch.ones(2, 3), 1.0), TypeError, "bias.zero is a float; it needs to be an int"),  # type: ignore[arg-type]
    (Relative(torch.ones(2, 3), True), TypeError, "bias.zero is a bool; it needs to be an int"),
    (Relative(torch.ones(2, 3), 1, "wrap"), ValueError, "bias.outside is 'wrap'; it needs to be one of 'error'"),  # type: ignore[arg-type]
    (
        Band(torch.ones(4, 5, 9), 4, "error"),
        ValueError,
        "bias.outside is 'error'; it needs to be one of 'clamp', 'zero'",
    ),  # type: ignore[arg-type]
    (
        Band(torch.ones(4, 6, 9), 4, "clamp"),
        ValueError,
        "it needs batch in {1, 3}, heads in {1, 2, 4} and seqlen_q in {5}",
    ),
    (
        Band(torch.ones(1, 3, 4, 5, 9), 4, "clamp"),
        ValueError,
        "bias.values has more batch dims than q, whose batch dims",
    ),
    (Relative(torch.ones(3), 1), ValueError, "bias.values has 1 dimensions, shape (3,); a Relative needs 2 or more"),
    (Band(torch.ones(2, 3), 1), ValueError, "bias.values has 2 dimensions, shape (2, 3); a Band needs 3 or more"),
    (Relative(torch.ones(2, 0), 1), ValueError, "bias.values has shape (2, 0), of no distance"),
    (Relative(torch.ones(3, 9), 4, "clamp"), ValueError, "bias.values has shape (1, 3, 9), read as (batch, heads, dis"),
    (Relative(torch.ones(2, 4, 9), 4, "clamp"), ValueError, "it needs batch in {1, 3} and heads in {1, 2, 4}"),
    (Relative(torch.ones(1, 3, 4, 9), 4, "clamp"), ValueError, "bias.values has 2 batch dims; it needs at most that"),
    (Band(torch.ones(4, 6, 9), 4), ValueError, "it needs batch in {1, 3}, heads in {1, 2, 4} and seqlen_q in {5}"),
    (Relative(torch.ones(4, 9, device="meta"), 4, "clamp"), ValueError, "bias.values is on meta; it needs to be on"),
)


# Errors of builders, and the calls that raise them.
WRONG_BUILDERS: tuple[tuple[Callable[[], object], type[Exception], str], ...] = (
    (lambda: biases.t5(None), TypeError, "weight is a NoneType; it needs to be a floating-point torch.Tensor"),  # type: ignore[arg-type]
    (lambda: biases.t5(torch.ones(32, 2).long()), TypeError, "weight has dtype int64; it needs a floating"),
    (lambda: biases.t5(torch.ones(32, 2), is_bidirectional=1), TypeError, "is_bidirectional is 1; it needs to be"),  # type: ignore[arg-type]
    (lambda: biases.t5(torch.ones(32)), ValueError, "weight has shape (32,); it needs (buckets, heads), 4 buckets"),
    (lambda: biases.t5(torch.ones(33, 2)), ValueError, "weight has 33 buckets; with is_bidirectional it needs an even"),
    (lambda: biases.t5(torch.ones(3, 2)), ValueError, "weight has shape (3, 2); it needs (buckets, heads), 4 buckets"),
    (lambda: biases.alibi([1.0], 4), TypeError, "slopes is a list; it needs to be a floating-point torch.Tensor"),  # type: ignore[arg-type]
    (lambda: biases.alibi(torch.ones(2, 1), 4), ValueError, "slopes has shape (2, 1); it needs (heads,)"),
    (lambda: biases.alibi(torch.ones(2), -1), ValueError, "seqlen_q is -1; it needs to be >= 0"),
    (lambda: biases.alibi(torch.ones(2), 4, 4.0), TypeError, "seqlen_k is 4.0 (float); it needs to be an int"),  # type: ignore[arg-type]
    (lambda: biases.from_function(None, -3, 3), TypeError, "function is a NoneType; it needs to be a function"),  # type: ignore[arg-type]
    (lambda: biases.from_function(torch.abs, 0.0, 3), TypeError, "low is 0.0 (float); it needs to be an int"),  # type: ignore[arg-type]
    (lambda: biases.from_function(torch.abs, 0, "3"), TypeError, "high is '3' (str); it needs to be an int"),  # type: ignore[arg-type]
    (lambda: biases.from_function(lambda x: 1.0, -3, 3), TypeError, "function returns a float; it needs to return"),  # type: ignore[arg-type, return-value]
    (lambda: biases.from_function(lambda x: x[:2], -3, 3), ValueError, "function returns shape (2,); it needs to"),
    (lambda: relative(2, 9, zero=4).dense(-1, 3), ValueError, "seqlen_q is -1; it needs to be >= 0"),
    (lambda: relative(2, 9, zero=4).dense(1, None), TypeError, "seqlen_k is None (NoneType); it needs to be an int"),  # type: ignore[arg-type]
)


@pytest.mark.parametrize(("call", "kind", "says"), WRONG_BUILDERS, ids=range(len(WRONG_BUILDERS)))
def test_wrong_arguments_of_builders_are_named(call: Callable[[], object], kind: type[Exception], says: str) -> None:
    with pytest.raises(kind) as caught:
        call()
    assert says in str(caught.value)


@pytest.mark.parametrize(("bias", "kind", "says"), WRONG, ids=range(len(WRONG)))
def test_wrong_biases_are_named(bias: Any, kind: type[Exception], says: str) -> None:
    q, k, v = tensors(3, 5, 8, 4, 2, 8)
    good = lambda: attention(q, k, v, bias=relative(4, 9, zero=4)._replace(values=torch.ones(4, 9)))
    assert says in str(refusal_of(lambda: attention(q, k, v, bias=bias), good, kind))


def test_leading_dims_that_do_not_fit_are_named() -> None:
    q, k, v = tensors(2, 3, 5, 8, 4, 2, 8)
    for values, says in (
        (torch.ones(3, 1, 4, 9), "read as (batch dim 0, batch dim 1, heads, distances)"),
        (torch.ones(1, 2, 3, 4, 9), "bias.values has more leading dims than q, whose batch dims are (2, 3)"),
    ):
        with pytest.raises(ValueError) as caught:
            attention(q, k, v, bias=Relative(values, 4, "clamp"))
        assert says in str(caught.value)


def test_bands_beside_sequences_need_the_rows_that_they_have() -> None:
    ends_q, ends_k, (q, k, v) = ragged(RAGGED)
    sequences = Sequences.packed(ends_q, ends_k)
    for values, says in (
        (torch.ones(4, 23, 7), "seqlen_q in {24}"),
        (torch.ones(6, 4, 7, 7), "it needs max_seqlen_q, which the sequences do not name"),
    ):
        with pytest.raises(ValueError) as caught:
            attention(q, k, v, bias=Band(values, 3), sequences=sequences)
        assert says in str(caught.value)


def test_explain_names_the_distances_and_who_refuses_them() -> None:
    q, k, v = (x.detach().float() for x in tensors(2, 5, 8, 4, 2, 8))
    explained = flash_dmattn.explain(q, k, v, bias=Relative(torch.ones(4, 9), 4, "clamp"))
    assert "relative bias (1, 4, 9) float32 (distances -4 to 4, clamped)" in str(explained.problem)
    assert "band bias (2, 1, 5, 9) float32 (distances -8 to 0, else 0)" in str(
        flash_dmattn.explain(q, k, v, bias=Band(torch.ones(2, 1, 5, 9), 8)).problem
    )
    with pytest.raises(flash_dmattn.BackendUnsupportedError) as caught:
        attention(q, k, v, bias=Relative(torch.ones(4, 9), 4, "clamp"), backend="sdpa")
    assert (
        "relative_bias is set; this backend does not have it (bias.dense(seqlen_q, seqlen_k) is a tensor that it takes)"
        in str(caught.value)
    )
    with pytest.raises(ValueError, match=r"bias.values has 5 queries; it needs seqlen_q of them, 4"):
        Band(torch.ones(1, 5, 9), 8).dense(4, 8)


def test_calls_of_other_numbers_do_not_share_a_plan() -> None:
    q, k, v = tensors(1, 5, 8, 2, 2, 8)
    values = torch.randn(2, 3, dtype=F64)
    choices = (Relative(values, 1, "clamp"), Relative(values, 2, "clamp"), Relative(values, 1, "zero"))
    made = [attention(q, k, v, bias=bias) for _ in range(2) for bias in choices]
    wanted = [attention(q, k, v, bias=bias.dense(5, 8)) for bias in choices]
    for x, y in zip(made, wanted * 2, strict=True):
        torch.testing.assert_close(x, y)
