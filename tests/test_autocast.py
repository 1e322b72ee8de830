"""Autocast: q, k and v follow its dtype, bias and the softmax keep theirs, and the gradients come back in each."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import flash_dmattn

BACKENDS = ["eager", "reference"]


def leaves(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = (2, 9, 4, 16), (2, 11, 2, 16), (2, 11, 2, 16), (1, 2, 1, 11)
    return [torch.randn(shape).to(torch.bfloat16).to(dtype).requires_grad_() for shape in shapes]


def call(inputs: list[Tensor], backend: str) -> tuple[Tensor, Tensor]:
    q, k, v, bias = inputs
    return flash_dmattn.attention(q, k, v, None, bias, is_causal=True, return_lse=True, backend=backend)


def gradients(out: Tensor, lse: Tensor, inputs: list[Tensor]) -> tuple[Tensor, ...]:
    weight = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view(out.shape)
    return torch.autograd.grad((out.double() * weight).sum() + lse.double().cos().sum(), inputs)


@pytest.mark.parametrize("inside", [True, False], ids=["backward inside", "backward outside"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_call_under_autocast_is_the_call_on_cast_tensors(backend: str, inside: bool) -> None:
    inputs, cast = leaves(), [*leaves(torch.bfloat16)[:3], leaves()[3]]
    with torch.autocast("cpu", torch.bfloat16):
        out, lse = call(inputs, backend)
        if inside:
            actual = gradients(out, lse, inputs)
    if not inside:
        actual = gradients(out, lse, inputs)
    assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
    assert [g.dtype for g in actual] == [torch.float32] * 4
    want_out, want_lse = call(cast, backend)
    want = gradients(want_out, want_lse, cast)
    assert [g.dtype for g in want] == [torch.bfloat16] * 3 + [torch.float32]
    assert torch.equal(out, want_out) and torch.equal(lse, want_lse)
    # The values above are numbers of bf16, so the same went in: nothing inside may have been rounded further.
    assert all(torch.equal(a, b.float()) for a, b in zip(actual, want))


def test_second_derivative_under_autocast() -> None:
    def second(inputs: list[Tensor], backend: str) -> tuple[Tensor, ...]:
        out, lse = call(inputs, backend)
        first = torch.autograd.grad(out.double().sin().sum() + lse.double().sum(), inputs, create_graph=True)
        return torch.autograd.grad(sum(g.double().sin().sum() for g in first), inputs)

    with torch.autocast("cpu", torch.bfloat16):
        actual, plain = second(leaves(), "eager"), second(leaves(), "reference")
    exact = second(leaves(torch.float64), "reference")
    for name, x, y, x64 in zip(("q", "k", "v", "bias"), actual, plain, exact):
        error, limit = (((g - x64).norm() / x64.norm()).item() for g in (x, y))
        assert error <= 1.5 * limit + 1e-5, f"{name}: {error}, plain PyTorch {limit}"


def test_fp64_is_left_alone() -> None:
    inputs, again = leaves(torch.float64), leaves(torch.float64)
    with torch.autocast("cpu", torch.bfloat16):
        out, lse = call(inputs, "eager")
        actual = gradients(out, lse, inputs)
    want_out, want_lse = call(again, "eager")
    assert out.dtype == torch.float64
    assert torch.equal(out, want_out) and torch.equal(lse, want_lse)
    assert all(torch.equal(a, b) for a, b in zip(actual, gradients(want_out, want_lse, again)))


def test_half_and_float_mix_under_autocast_alone() -> None:
    q, k, v, bias = leaves()
    with pytest.raises(TypeError, match="k has dtype bfloat16; it needs that of q, float32"):
        call([q, k.bfloat16(), v, bias], "eager")
    with torch.autocast("cpu", torch.bfloat16):
        mixed, plain = call([q, k.bfloat16(), v.half(), bias], "eager"), call([q, k, v, bias], "eager")
    assert torch.equal(mixed[0], plain[0])


def test_autocast_of_another_device_or_switched_off_changes_nothing() -> None:
    inputs = leaves()
    with torch.autocast("cpu", torch.bfloat16), torch.autocast("cpu", enabled=False):
        assert call(inputs, "eager")[0].dtype == torch.float32
    with torch.autocast("cpu", torch.float16):
        assert call(inputs, "eager")[0].dtype == torch.float16
