"""Calls with a mask in any form under torch.func, checkpoint, second derivatives and torch.compile."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from conftest import needs_inductor
from mask_forms import FORMS, LQ, PREPARED, B, assert_same, both_registered, leaves, results
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

import flash_dmattn
from flash_dmattn.masks import PreparedMask


@pytest.fixture(autouse=True)
def both_backends() -> Iterator[None]:
    with both_registered():
        yield


def loss(*tensors: Tensor, mask: Any, **flags: Any) -> Tensor:
    q, k, v, bias = tensors
    return flash_dmattn.attention(q, k, v, mask, bias, **flags).sin().sum()


@pytest.mark.parametrize("form", ["full", "per key"])
def test_second_derivative(form: str) -> None:
    mask = FORMS[form]
    prepared = PreparedMask.from_mask(mask, seqlen_q=LQ, is_causal=True)
    actual: dict[str, list[Tensor]] = {}
    for name, flags in (
        ("prepared", {"mask": prepared, "backend": "eager"}),
        ("dense", {"mask": mask, "is_causal": True, "backend": "reference"}),
    ):
        arguments = leaves()
        first = torch.autograd.grad(loss(*arguments, **flags), arguments, create_graph=True)
        actual[name] = [*first, *torch.autograd.grad(sum(g.sin().sum() for g in first), arguments)]
    assert_same(actual["prepared"], actual["dense"])


@pytest.mark.parametrize("mask", [FORMS["full"], FORMS["per key"], None], ids=["tiles", "keys", "none"])
def test_second_derivative_of_a_backend_without_one_is_refused(mask: Tensor | None) -> None:
    arguments = leaves()
    first = torch.autograd.grad(
        loss(*arguments, mask=mask, backend=PREPARED.backend.name), arguments, create_graph=True
    )
    assert_same(list(first), list(torch.autograd.grad(loss(*arguments, mask=mask, backend="reference"), arguments)))
    with pytest.raises(NotImplementedError, match=f"{PREPARED.backend.name}. has no second derivative"):
        first[0].sum().backward()


@pytest.mark.parametrize("backend", ["eager", PREPARED.backend.name])
@pytest.mark.parametrize("form", ["full", "per key"])
def test_functional_gradient_and_checkpoint(form: str, backend: str) -> None:
    mask, arguments = FORMS[form], leaves()
    expected = torch.autograd.grad(loss(*arguments, mask=mask, backend="reference"), arguments)
    for given_mask in (mask, PreparedMask.from_mask(mask, seqlen_q=LQ)):

        def run(*tensors: Tensor, mask: Any = given_mask) -> Tensor:
            return loss(*tensors, mask=mask, backend=backend)

        plain = [x.detach() for x in arguments]
        assert_same(list(torch.func.grad(run, argnums=(0, 1, 2, 3))(*plain)), list(expected))
        for use_reentrant in (False, True):
            value = checkpoint(run, *arguments, use_reentrant=use_reentrant)
            again = [x.grad for x in arguments]
            assert again == [None] * 4
            value.backward()
            assert_same([x.grad for x in arguments], list(expected))
            for x in arguments:
                x.grad = None


def test_vmap_over_a_call_without_gradients() -> None:
    q, k, v, bias = (x.detach() for x in leaves())
    prepared = PreparedMask.from_mask(FORMS["full"])
    many = torch.stack([FORMS["full"], ~FORMS["full"]])
    per_bias = torch.func.vmap(lambda b: flash_dmattn.attention(q, k, v, prepared, b, backend=PREPARED.backend.name))
    expected = flash_dmattn.attention(q, k, v, FORMS["full"], bias, backend="reference")
    assert_same([per_bias(torch.stack([bias, bias]))[1]], [expected])
    per_mask = torch.func.vmap(lambda m: flash_dmattn.attention(q, k, v, m, bias, backend="eager"))
    assert_same([per_mask(many)[0]], [expected])


# torch.compile


@pytest.mark.parametrize("backend", ["eager", PREPARED.backend.name])
@pytest.mark.parametrize("form", ["queries and keys", "per key", "expanded queries"])
@pytest.mark.parametrize("how", ["dense", "prepared inside", "prepared outside"])
def test_one_graph(how: str, form: str, backend: str) -> None:
    mask = FORMS[form]

    def call(q: Tensor, k: Tensor, v: Tensor, mask: Any, bias: Tensor) -> tuple[Tensor, Tensor]:
        if how == "prepared inside":
            mask = PreparedMask.from_mask(mask, seqlen_q=q.shape[1], is_causal=True)
        is_causal = how == "dense"
        return flash_dmattn.attention(q, k, v, mask, bias, is_causal=is_causal, return_lse=True, backend=backend)

    torch._dynamo.reset()
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    given_mask = PreparedMask.from_mask(mask, seqlen_q=LQ, is_causal=True) if how == "prepared outside" else mask
    arguments = leaves()
    expected = results(arguments, mask, is_causal=True, backend="reference")
    q, k, v, bias = arguments
    for _ in range(2):
        out, lse = compiled(q, k, v, given_mask, bias)
        total = out.sin().sum() + lse.masked_fill(lse == -torch.inf, 0.0).cos().sum()
        assert_same([out, lse, *torch.autograd.grad(total, arguments)], expected)
    with torch.no_grad():
        assert_same(list(compiled(q, k, v, given_mask, bias)), expected[:2])


def test_another_prepared_mask_compiles_nothing_and_takes_effect() -> None:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    q, k, v, bias = (x.detach() for x in leaves())
    compiled = torch.compile(lambda m: flash_dmattn.attention(q, k, v, m, bias), backend=counter, fullgraph=True)
    for mask in (FORMS["full"], ~FORMS["full"], FORMS["none allowed"].expand(B, -1, -1, -1).contiguous()):
        expected = flash_dmattn.attention(q, k, v, mask, bias, backend="reference")
        assert_same([compiled(PreparedMask.from_mask(mask))], [expected])
    assert counter.frame_count == 1


@needs_inductor
@pytest.mark.parametrize("mask", [FORMS["full"], FORMS["expanded queries"]], ids=["tiles", "keys"])
def test_inductor_relies_on_the_fakes(mask: Tensor) -> None:
    """Prepared inside the graph from an expression, for both passes, beside fused kernels."""

    def among_others(scores: Tensor, *arguments: Tensor) -> tuple[Tensor, ...]:
        q, k, v, bias = arguments
        out = flash_dmattn.attention(q, k, v, scores > 0.5, bias, is_causal=True, backend=PREPARED.backend.name)
        prepared = PreparedMask.from_mask(scores > 0.5, window_size=(9, -1))
        return torch.relu(out) + flash_dmattn.attention(q, k, v, prepared, bias, backend="eager")

    torch._dynamo.reset()
    compiled = torch.compile(among_others, fullgraph=True)
    actual, expected = [], []
    for answers, function in ((expected, among_others), (actual, compiled)):
        arguments = leaves()
        out = function(mask.to(torch.float64), *arguments)
        answers += [out, *torch.autograd.grad(out.sin().sum(), arguments)]
    assert_same(actual, expected)
