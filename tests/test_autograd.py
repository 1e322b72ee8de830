"""Derivatives through the one call: first and second, lse, functorch, checkpoint, threads, and what is refused."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from out_of_tree import KernelPair, registered
from torch import Tensor

import flash_dmattn
from flash_dmattn.call import prepare_call, run_call
from flash_dmattn.problem import AttentionProblem, Gradients, Numbers
from flash_dmattn.problem.inputs import Saved

B, LQ, LK, HQ, HK, D, DV = 2, 2, 3, 4, 2, 2, 3


def fp64(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, dtype=torch.float64, generator=generator, requires_grad=True)


def leaves(bias_shape: tuple[int, ...] = (1, HK, 1, LK)) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return fp64(B, LQ, HQ, D), fp64(B, LK, HK, D, seed=1), fp64(B, LK, HK, DV, seed=2), fp64(*bias_shape, seed=3)


def some_empty_rows() -> Tensor:
    mask = torch.tensor([[True, False, True], [False, True, True]]).repeat(B, HQ, 1, 1)
    mask[0, 1, 1] = False
    mask[1, :, 0] = False
    return mask


def finite(lse: Tensor) -> Tensor:
    return lse.masked_fill(lse == -torch.inf, 0.0)


def function(mask: Tensor | None = None, **flags: Any) -> Callable[..., tuple[Tensor, Tensor]]:
    def run(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = flash_dmattn.attention(q, k, v, mask, bias, return_lse=True, **{"backend": "eager", **flags})
        return out, finite(lse)

    return run


def loss(*tensors: Tensor, **flags: Any) -> Tensor:
    out, lse = function(some_empty_rows(), **flags)(*tensors)
    return out.sin().sum() + lse.cos().sum()


def test_gradcheck_of_expanded_inputs() -> None:
    run = function(some_empty_rows())

    def expanded(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        k, v = k.expand(B, LK, HK, D), v.expand(B, LK, HK, DV)
        return run(q.expand(B, LQ, HQ, D), k, v, bias.expand(B, HQ, LQ, LK))

    inputs = fp64(1, LQ, 1, D), fp64(B, 1, HK, D, seed=1), fp64(1, LK, HK, 1, seed=2), fp64(1, 1, LQ, LK, seed=3)
    assert torch.autograd.gradcheck(expanded, inputs)
    assert torch.autograd.gradgradcheck(expanded, inputs, fast_mode=True)


@pytest.mark.parametrize("needs_grad", [n for r in range(1, 5) for n in itertools.combinations(range(4), r)], ids=str)
def test_second_derivative_of_every_subset(needs_grad: tuple[int, ...]) -> None:
    inputs = [x.detach().requires_grad_(i in needs_grad) for i, x in enumerate(leaves())]
    wanted = [inputs[i] for i in needs_grad]
    actual, expected = [], []
    for results, backend in ((actual, "eager"), (expected, "reference")):
        first = torch.autograd.grad(loss(*inputs, backend=backend), wanted, create_graph=True)
        results += first
        results += torch.autograd.grad(sum(g.sin().sum() for g in first), wanted)
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-11)


Differentiated = tuple[Tensor, Tensor | None, Gradients]


class Seen(KernelPair):
    """A pair that keeps what its backward passes receive and return."""

    def __init__(self, name: str, seen: list[Differentiated]) -> None:
        super().__init__(name)
        self.seen = seen

    def plan_backward(self, problem: AttentionProblem) -> Any:
        run = super().plan_backward(problem)

        def backward(saved: Saved, dout: Tensor, dlse: Tensor | None) -> Gradients:
            gradients = run(saved, dout, dlse)
            self.seen.append((dout, dlse, gradients))
            return gradients

        return backward


def test_bias_alone_gets_a_gradient_and_nothing_else_is_computed() -> None:
    q, k, v, bias = leaves()
    seen: list[Differentiated] = []
    with registered(Seen("ours", seen)):
        loss(q.detach(), k.detach(), v.detach(), bias, backend="ours").backward()
    ((_, _, gradients),) = seen
    assert [g is not None for g in gradients] == [False, False, False, True, False]  # the last: of a sink
    again = leaves()
    torch.testing.assert_close(bias.grad, torch.autograd.grad(loss(*again, backend="reference"), again[3])[0])
    assert q.grad is None


@pytest.mark.parametrize("create_graph", [False, True], ids=["once", "twice"])
@pytest.mark.parametrize("used", ["out", "lse", "both"])
def test_an_output_that_is_not_used_costs_its_gradient_nothing(used: str, create_graph: bool) -> None:
    """The backend is handed None for dlse, by which it leaves lse out; dout is what every kernel reads."""
    seen: list[Differentiated] = []
    inputs = leaves()
    with registered(Seen("ours", seen)):
        out, lse = function(some_empty_rows(), backend="ours")(*inputs)
        parts = {"out": (out,), "lse": (lse,), "both": (out, lse)}[used]
        torch.autograd.grad(sum(x.sum() for x in parts), inputs, create_graph=create_graph)
    ((dout, dlse, _),) = seen
    assert (dlse is None) == (used == "out")
    assert torch.equal(dout, torch.zeros_like(out) if used == "lse" else torch.ones_like(out))


def test_no_gradient_no_graph() -> None:
    inputs = leaves()
    ours = KernelPair("ours")
    with registered(ours), torch.no_grad():
        assert loss(*inputs, backend="ours").grad_fn is None
    with torch.inference_mode():
        assert not loss(*inputs).requires_grad
    assert loss(*(x.detach() for x in inputs)).grad_fn is None
    assert ours.ran == ["forward"]


@pytest.mark.parametrize("backend", ("auto", "eager"))
def test_what_inference_mode_made_is_named_where_it_cannot_train(backend: str) -> None:
    q = torch.randn(1, 8, 2, 16, requires_grad=True)
    with torch.inference_mode():
        mask, other = torch.ones(1, 1, 8, 8, dtype=torch.bool).tril(), torch.randn(1, 8, 2, 16)
        prepared, sink = flash_dmattn.masks.PreparedMask.from_mask(mask), torch.zeros(2)
    for arguments, named in (
        ({"mask": mask}, "mask"),
        ({"mask": prepared, "k": other}, "k and mask"),
        ({"bias": torch.zeros(8, 8), "sink": sink}, "sink"),
    ):
        call = {"q": q, "k": q, "v": q, "backend": backend, **arguments}
        message = rf"^{named} made in torch.inference_mode\(\) cannot be saved for a backward pass; make it outside"
        with pytest.raises(RuntimeError, match=message):
            flash_dmattn.attention(**call)
        with torch.no_grad():
            flash_dmattn.attention(**call)
    flash_dmattn.attention(q, q, q, mask.clone(), backend=backend).sum().backward()


def test_a_tensor_that_outlived_a_transform_passes_its_gradient_on() -> None:
    q, k, v = (torch.randn(1, 8, 2, 16, requires_grad=True) for _ in range(3))
    kept: list[Tensor] = []
    torch.func.grad(lambda x: (kept.append(x), x.sum())[1])(q)
    gradients = torch.autograd.grad(flash_dmattn.attention(kept[0], k, v, backend="eager").square().sum(), (q, k, v))
    expected = torch.autograd.grad(flash_dmattn.attention(q, k, v, backend="eager").square().sum(), (q, k, v))
    assert all(map(torch.equal, gradients, expected))


def test_second_derivative_of_a_kernel_backend_is_refused_with_a_way_out() -> None:
    inputs = leaves()
    once = torch.autograd.grad(loss(*inputs, backend="reference"), inputs)
    with registered(KernelPair("ours")):
        for backend in ("ours", ("eager", "ours")):
            first = torch.autograd.grad(loss(*inputs, backend=backend), inputs, create_graph=True)
            torch.testing.assert_close(first, once, rtol=1e-10, atol=1e-12)
            with pytest.raises(NotImplementedError, match=r"'ours' has no second derivative.*backend=.eager"):
                first[3].square().sum().backward()
        # The pair's backward decides: eager's own serves a forward of any kernel.
        first = torch.autograd.grad(loss(*inputs, backend=("ours", "eager")), inputs, create_graph=True)
        second = torch.autograd.grad(first[0].square().sum(), inputs)
    again = torch.autograd.grad(loss(*inputs, backend="reference"), inputs, create_graph=True)
    expected = torch.autograd.grad(again[0].square().sum(), inputs)
    torch.testing.assert_close(second, expected, rtol=1e-9, atol=1e-11)


# Batched gradients, by the transform of torch that is older than torch.func

BATCHED: dict[str, dict[str, Any]] = {
    "bias and mask": {"mask": some_empty_rows()},
    "sink": {"sink": fp64(HQ, seed=4), "is_causal": True, "softcap": 2.0},
    "dropout": {"dropout_p": 0.4},
    "sequences": {"sequences": flash_dmattn.Sequences.padded(torch.tensor([3, 1]), torch.tensor([1, 2]))},
}


@pytest.mark.parametrize("backend", ["auto", "eager", "reference"])
@pytest.mark.parametrize("name", BATCHED)
def test_batched_gradients_are_those_of_each(name: str, backend: str) -> None:
    flags = BATCHED[name]
    inputs = [*leaves(), *([flags["sink"]] if "sink" in flags else [])]
    generator = torch.Generator().manual_seed(5)
    for create_graph, used in itertools.product((False, True), ((0,), (1,), (0, 1))):
        torch.manual_seed(0)
        results = flash_dmattn.attention(*inputs[:3], bias=inputs[3], return_lse=True, backend=backend, **flags)
        results = [results[index] for index in used]
        many = [torch.randn(3, *x.shape, dtype=x.dtype, generator=generator) for x in results]
        options: dict[str, Any] = {"create_graph": create_graph, "allow_unused": True}
        mapped = torch.autograd.grad(results, inputs, many, retain_graph=True, is_grads_batched=True, **options)
        each = [
            torch.autograd.grad(results, inputs, [x[index] for x in many], retain_graph=True, **options)
            for index in range(3)
        ]
        expected = [None if x[0] is None else torch.stack(x) for x in zip(*each, strict=True)]
        torch.testing.assert_close(list(mapped), expected, rtol=1e-10, atol=1e-12)
        if create_graph and backend != "auto":
            seconds = [
                torch.autograd.grad(sum(x.sin().sum() for x in first if x is not None), inputs, **options)
                for first in (expected, mapped)
            ]
            torch.testing.assert_close(seconds[1], seconds[0], rtol=1e-9, atol=1e-11)


def test_batched_gradients_of_rows_with_heads_first() -> None:
    q, k, v, _ = (x.transpose(1, 2) for x in leaves())
    for _ in range(2):  # the first call of a class, and another
        out, _ = run_call(prepare_call(q, k, v, None, None, None, None, Numbers(), heads_first=True), "eager")
        many = torch.randn(3, *out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(6))
        mapped = torch.autograd.grad(out, (q, k, v), many, retain_graph=True, is_grads_batched=True)
        each = [torch.autograd.grad(out, (q, k, v), x, retain_graph=True) for x in many]
        torch.testing.assert_close(mapped, tuple(torch.stack(x) for x in zip(*each, strict=True)))
