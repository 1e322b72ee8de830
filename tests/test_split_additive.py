"""The mask in an additive tensor, against the formula in fp64; and which results are kept, and for how long."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from flash_dmattn import attention
from flash_dmattn.masks import split, split_additive
from flash_dmattn.reference import formula

B, H, L, D = 2, 3, 7, 16
VALUES = [-1e9, -1e6, -2.4e38, torch.finfo(torch.float32).min, -1e4, float("-inf")]


@pytest.fixture(autouse=True)
def nothing_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(split, "_splits", split.TensorCache())


@pytest.fixture
def splits(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The tensors that were split, rather than looked up."""
    seen: list[Tensor] = []
    original = split._split

    def counted(x: Tensor, *arguments: Any, **others: Any) -> Any:
        seen.append(x.detach().clone())
        return original(x, *arguments, **others)

    monkeypatch.setattr(split, "_split", counted)
    return seen


def hidden_keys(shape: tuple[int, ...] = (B, 1, L, L)) -> Tensor:
    """A random pattern in which each row has a visible key."""
    hidden = torch.rand(shape, generator=torch.Generator().manual_seed(3)) < 0.4
    hidden[..., 0] = False
    return hidden


def tensors() -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(B, L, H, D, dtype=torch.float64, generator=generator, requires_grad=True) for _ in range(3)]


def outcome(mask: Tensor | None, bias: Tensor | None, *others: Tensor) -> list[Tensor]:
    """The output, and the gradients of q, k and v and of `others`, by the formula in fp64."""
    q, k, v = tensors()
    out = formula.attention(q, k, v, mask, bias)[0]
    out.backward(torch.cos(torch.arange(out.numel(), dtype=out.dtype)).view(out.shape))
    gradients = [x.grad for x in (q, k, v, *others)]
    assert all(x is not None for x in gradients)
    return [out, *[x for x in gradients if x is not None]]


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("mixed", [False, True])
def test_the_split_is_the_formula(value: float, mixed: bool) -> None:
    hidden = hidden_keys()
    x = torch.zeros(B, H, L, L) if not mixed else torch.randn(B, H, L, L, generator=torch.Generator().manual_seed(1))
    x = x.masked_fill(hidden, value)
    mask, rest = split_additive(x)
    assert mask.dtype == torch.bool and torch.equal(mask, ~hidden.expand_as(mask))
    assert (rest is None) != mixed
    theirs = outcome(None, x.double())
    for ours, wanted in zip(outcome(mask, None if rest is None else rest.double()), theirs, strict=True):
        assert (ours - wanted).abs().max() < 1e-13


def test_a_value_that_is_no_mask_stays_a_bias() -> None:
    """-100, as Swin has it, hides a key only if the scores allow it."""
    x = torch.zeros(2, 4, 4).masked_fill(hidden_keys((4, 4)), -100.0)
    mask, rest = split_additive(x)
    assert bool(mask.all()) and rest is x
    mask, rest = split_additive(x, below=-100)
    assert torch.equal(mask, x == 0) and rest is None


def test_the_bound_that_the_docstring_states() -> None:
    """A hidden key that scores R higher than all visible ones had at most the weight n exp(R + below)."""
    scores = torch.tensor([0.0, 900.0], dtype=torch.float64)  # of a visible and a hidden key
    for below, weight in ((-1e3, 2 * torch.tensor(-100.0, dtype=torch.float64).exp()), (-1e4, 0.0)):
        lost = torch.softmax(scores + torch.tensor([0.0, below], dtype=torch.float64), 0)[1]
        assert lost <= weight
    assert torch.softmax(torch.tensor([0.0, 895.0 - 1e3]), 0)[1] == 0  # R + 104 < 1000, fp32


def test_rows_without_a_visible_key() -> None:
    """The formula, exactly, or zero. fp32 arithmetic is neither, which is why nothing imitates it."""
    x = torch.zeros(1, 1, L, L)
    x[..., 2, :] = -1e9
    x[..., 3, :] = torch.tensor([-1e9, -1e9, -2e9, -3e9, -1e9, -1e10, -1e9])  # whose largest values remain
    x[..., 4, :] = float("-inf")
    mask, rest = split_additive(x)
    assert rest is None
    assert mask[0, 0].tolist() == [
        [True] * L if row != 3 else [True, True, False, False, True, False, True] if row != 4 else []
        for row in range(4)
    ] + [[False] * L, [True] * L, [True] * L]
    exact = x.double()
    exact[..., 2, :] = 0
    exact[..., 3, :] += 1e9
    for ours, wanted in zip(outcome(mask, None), outcome(None, exact), strict=True):
        assert torch.equal(ours, wanted)

    mask, rest = split_additive(x, empty="zero")
    assert rest is None and not mask[..., 2:5, :].any() and mask.sum() == (L - 3) * L
    out, dq, _, _ = outcome(mask, None)
    assert not out[:, 2:5].any() and not dq[:, 2:5].any()


def test_a_row_of_one_value_with_a_bias_of_its_own() -> None:
    """The rest of a shifted row is exact: -1e9 + 64 is a number of fp32, 64 above -1e9."""
    x = torch.full((1, L), -1e9)
    x[0, 1] += 64
    mask, rest = split_additive(x)
    assert bool(mask.all()) and rest is not None and rest.tolist() == [[-64, 0, -64, -64, -64, -64, -64]]
    assert split_additive(x, empty="zero")[1] is None


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_dtypes(dtype: torch.dtype) -> None:
    """The rest keeps the dtype of x; fp16 has no -1e9, and its smallest number counts."""
    x = torch.tensor([[0.5, torch.finfo(dtype).min], [0.0, -1000.0]], dtype=dtype)
    mask, rest = split_additive(x)
    assert mask.tolist() == [[True, False], [True, False]]
    assert rest is not None and rest.dtype == dtype and rest.tolist() == [[0.5, 0.0], [0.0, 0.0]]
    assert split_additive(x, below=-1e30)[0][1].all()


def test_nan_and_infinity_stay_visible() -> None:
    x = torch.tensor([[float("nan"), -1e9], [float("inf"), -1e9], [float("nan"), float("-inf")]])
    for empty in ("softmax", "zero"):
        mask, rest = split_additive(x, empty=empty)
        assert mask.tolist() == [[True, False]] * 3
        assert rest is not None and rest[0, 0].isnan() and rest[1, 0] == float("inf") and not rest[:, 1].any()


@pytest.mark.parametrize("shape", [(L,), (1, L), (L, 1), (2, 1, 1, L), (0, L), (2, 0), (2, 3, 1, 4, L)])
def test_shapes(shape: tuple[int, ...]) -> None:
    x = torch.full(shape, -1e9)
    x[..., :1] = 0.0
    mask, rest = split_additive(x)
    assert mask.shape == x.shape and rest is None and torch.equal(mask, x == 0)
    mask, kept = split_additive(x, rest="keep")
    assert kept is not None and kept.shape == x.shape and not kept.any()


def test_expanded_dims_stay_expanded() -> None:
    x = torch.zeros(B, 1, 1, L).masked_fill(hidden_keys((B, 1, 1, L)), -1e9).expand(B, H, L, L)
    mask, rest = split_additive(x, rest="keep")
    assert rest is not None
    for part in (mask, rest):
        assert part.shape == x.shape and part.stride()[1:3] == (0, 0)


@pytest.mark.parametrize("empty", ["softmax", "zero"])
def test_the_gradient_of_x(empty: Any) -> None:
    """It is 0 in hidden places. A shifted row has the gradient of the formula, because a shift changes nothing."""
    x = torch.randn(1, H, L, L, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    x = x.masked_fill(hidden_keys(), -1e6)[:1].clone()
    exact = x.clone()
    x[..., 5, :] = -1e6
    exact[..., 5, :] = 0.0 if empty == "softmax" else float("-inf")
    x.requires_grad_()
    exact.requires_grad_()
    mask, rest = split_additive(x, empty=empty)
    assert rest is not None and not mask.requires_grad
    for ours, wanted in zip(outcome(mask, rest, x), outcome(None, exact, exact), strict=True):
        assert torch.allclose(ours, wanted, rtol=0, atol=1e-13)


def test_the_gradient_of_an_expanded_tensor_is_of_each_place() -> None:
    x = torch.zeros(L, requires_grad=True)
    wide = x.expand(3, L)
    wide.retain_grad()
    _, rest = split_additive(wide)
    assert rest is not None
    (rest * torch.arange(3.0)[:, None]).sum().backward()
    assert wide.grad is not None and wide.grad[:, 0].tolist() == [0, 1, 2]


def test_rest() -> None:
    """Values are read as `rest` says, and a wrong promise raises."""
    mixed = torch.tensor([[0.5, -1e9]])
    pure = torch.tensor([[0.0, -1e9]])
    assert split_additive(pure, rest="none")[1] is None
    with pytest.raises(ValueError, match=r'x has values above -1000.0 other than 0; rest="none" needs 0 there'):
        split_additive(mixed, rest="none")
    learned = pure.clone().requires_grad_()
    with pytest.raises(ValueError, match=r'x has a gradient, which rest="none" would lose'):
        split_additive(learned, rest="none")
    assert split_additive(learned)[1] is not None  # never read
    with torch.no_grad():
        assert split_additive(learned)[1] is None
        assert split_additive(learned, rest="none")[1] is None
    kept = split_additive(pure, rest="keep")[1]
    assert kept is not None and not kept.any()


def test_views_are_split_once(splits: list[Tensor]) -> None:
    """Each layer takes its own view of one mask."""
    x = torch.zeros(B, 1, L, L).masked_fill(hidden_keys(), -1e9)
    first = split_additive(x[..., :5])
    for _ in range(3):
        assert split_additive(x[..., :5])[0] is first[0]
    assert len(splits) == 1
    for other in (x[..., 1:6], x[..., :4], x.transpose(-1, -2)[..., :5, :], x[:1, ..., :5]):
        mask, _ = split_additive(other)
        assert torch.equal(mask, other == 0)
    assert len(splits) == 5
    split_additive(x[..., :5], -1e4)
    split_additive(x[..., :5], empty="zero")
    split_additive(x[..., :5], rest="keep")
    split_additive(x)
    assert len(splits) == 9


def test_a_tensor_that_has_changed_is_split_again() -> None:
    x = torch.tensor([[0.0, -1e9, 0.0]])
    assert split_additive(x)[0].tolist() == [[True, False, True]]
    x[0, 2] = -1e9
    assert split_additive(x)[0].tolist() == [[True, False, False]]
    assert split_additive(x[:, 1:])[0].tolist() == [[True, True]]  # no visible key: both of one value
    x[:, 1:].zero_()  # by another view
    assert split_additive(x[:, 1:], empty="zero")[0].all() and split_additive(x)[0].all()


def test_nothing_is_kept_of_a_tensor_that_ended(young_heap: None) -> None:
    """Its result is dropped, and no result keeps a tensor alive, even where the rest is x."""
    for values in ((0.0, -1e9), (0.5, -1e9), (0.5, 1.0)):
        x = torch.tensor([values])
        part = x[:, :]
        mask, rest = split_additive(part)
        alive = [weakref.ref(x), weakref.ref(mask)]
        assert len(split._splits) == 1
        del part, mask, rest
        gc.collect()
        assert alive[0]() is x and len(split._splits) == 1
        del x
        gc.collect()
        assert alive[0]() is None and alive[1]() is None and len(split._splits) == 0


def test_slices_without_end_are_bounded() -> None:
    """As a decoding loop takes them."""
    x = torch.zeros(300)
    for length in range(1, 300):
        split_additive(x[:length])
    assert len(split._splits) == split._splits.max_size == 64
    mask = split_additive(x[:299])[0]
    assert mask.shape == (299,)


def test_no_tensor_without_a_version_is_kept() -> None:
    import numpy

    with torch.inference_mode():
        x = torch.tensor([[0.0, -1e9]])
        assert split_additive(x)[1] is None
        x[0, 0] = -1e9
        assert split_additive(x, empty="zero")[0].tolist() == [[False, False]]
    array = numpy.zeros((1, 2), dtype=numpy.float32)
    shared = torch.from_numpy(array)
    assert split_additive(shared)[0].all()
    array[0, 1] = -1e9
    assert split_additive(shared)[0].tolist() == [[True, False]]
    learned = torch.zeros(1, 2, requires_grad=True)
    assert split_additive(learned)[1] is not split_additive(learned)[1]
    assert len(split._splits) == 0


def test_in_one_graph() -> None:
    def layer(q: Tensor, x: Tensor) -> Tensor:
        mask, rest = split_additive(x)
        assert rest is not None
        out = attention(q, q, q, mask, rest)
        assert isinstance(out, Tensor)
        return out

    torch._dynamo.reset()
    q = torch.randn(B, L, H, D)
    x = torch.randn(B, H, L, L).masked_fill(hidden_keys(), -1e9).requires_grad_()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)(q, x)
    (wanted,) = torch.autograd.grad(layer(q, x).square().sum(), x)
    (gradient,) = torch.autograd.grad(compiled.square().sum(), x)
    assert torch.allclose(compiled, layer(q, x), atol=1e-6) and torch.allclose(gradient, wanted, atol=1e-6)


def test_exported_with_a_dynamic_length() -> None:
    class Split(torch.nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
            return split_additive(x)

    x = torch.randn(2, L, L).masked_fill(hidden_keys((2, L, L)), -1e9)
    length = torch.export.Dim("length", min=2, max=64)
    program = torch.export.export(Split(), (x,), dynamic_shapes=({1: length, 2: length},)).module()
    other = torch.randn(2, 5, 5).masked_fill(hidden_keys((2, 5, 5)), -1e9)
    mask, rest = program(other)
    wanted, left = split_additive(other)
    assert left is not None and torch.equal(mask, wanted) and torch.equal(rest, left)


def test_transforms() -> None:
    """Under vmap nothing is read, and a tangent of x is one of the rest."""
    x = torch.randn(4, L, L).masked_fill(hidden_keys((4, L, L)), -1e9)
    x[2, 3] = -1e9
    mask, rest = torch.vmap(split_additive)(x)
    wanted, left = split_additive(x)
    assert left is not None and torch.equal(mask, wanted) and torch.equal(rest, left)
    assert torch.vmap(lambda x: split_additive(x, rest="none")[0])(torch.zeros(2, 3)).all()

    tangent = torch.randn(4, L, L)
    (_, moved) = torch.func.jvp(lambda x: split_additive(x)[1], (x,), (tangent,))
    assert torch.equal(moved, tangent.masked_fill(~wanted, 0))
    zeros = torch.zeros(2, 3)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(zeros, torch.ones(2, 3))
        dual_rest = split_additive(dual)[1]
        assert dual_rest is not None
        assert torch.equal(torch.autograd.forward_ad.unpack_dual(dual_rest).tangent, torch.ones(2, 3))
    gradient = torch.func.grad(lambda x: split_additive(x)[1].sum())(x)  # type: ignore[union-attr]
    assert torch.equal(gradient, wanted.to(gradient.dtype))
    meta, kept = split_additive(torch.zeros(2, 3, device="meta"))
    assert meta.is_meta and kept is not None and len(split._splits) == 1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_the_device_checks_a_promise(mode: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU whose assertion fails computes nothing more, so that a record of it takes its place."""
    asserted: list[bool] = []
    monkeypatch.setattr(torch, "_assert_async", lambda holds, message: asserted.append(bool(holds)))
    with mode():
        for x in (torch.tensor([0.0, -1e9]), torch.tensor([0.5, -1e9])):
            split_additive(x.cuda(), rest="none")
    assert asserted == [True, False]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"x": [0.0]}, TypeError, "x is a list; it needs to be a floating-point torch.Tensor"),
        (
            {"x": torch.ones(2, dtype=torch.bool)},
            TypeError,
            "x has dtype bool; it needs a floating-point dtype; a bool mask",
        ),
        ({"x": torch.ones(2, dtype=torch.int64)}, TypeError, "x has dtype int64; it needs a floating-point dtype$"),
        ({"x": torch.ones(())}, ValueError, r"x has shape \(\); it needs at least one dim"),
        ({"x": torch.ones(2).to_sparse()}, TypeError, "x has layout torch.sparse_coo"),
        ({"below": 0.0}, ValueError, "below is 0.0; it needs to be negative"),
        ({"below": float("nan")}, ValueError, "below is nan; it needs to be negative"),
        ({"below": "low"}, TypeError, "below is a str; it needs to be a negative number"),
        ({"empty": "mean"}, ValueError, "empty is 'mean'; it needs to be one of 'softmax', 'zero'"),
        ({"rest": "drop"}, ValueError, "rest is 'drop'; it needs to be one of 'auto', 'none', 'keep'"),
    ],
)
def test_refusals(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        split_additive(**{"x": torch.zeros(2), **arguments})
