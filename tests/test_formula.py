"""The oracle itself: against loops over every (query, key), against autograd, and through two derivatives."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from flash_dmattn.reference import formula

INF = math.inf
FLAGS = {
    "plain": {},
    "causal": {"is_causal": True},
    "window": {"window_size": (2, 1)},
    "left window, causal": {"window_size": (1, -1), "is_causal": True},
    "right window": {"window_size": (-1, 0), "softmax_scale": 0.0},
    "softcap": {"softcap": 0.7, "softmax_scale": 1.3},
}


def random(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def tensors(seqlen_q: int, seqlen_k: int, heads: int = 4, heads_k: int = 2, batch: int = 2) -> tuple[Tensor, ...]:
    return random(batch, seqlen_q, heads, 3), random(batch, seqlen_k, heads_k, 3), random(batch, seqlen_k, heads_k, 2)


def by_loops(q, k, v, mask, bias, is_causal=False, softmax_scale=None, softcap=0.0, window_size=None):
    """The contract, one number at a time, in Python floats."""
    (batch, seqlen_q, heads, dim), (_, seqlen_k, heads_k, _) = q.shape, k.shape
    scale = dim**-0.5 if softmax_scale is None else softmax_scale
    left, right = window_size or (-1, -1)
    out, lse = torch.zeros(batch, seqlen_q, heads, v.shape[3]).double(), torch.full((batch, heads, seqlen_q), -INF)
    lse = lse.double()

    def read(x, b, h, i, j):
        shape = [1] * (4 - x.dim()) + list(x.shape)
        head = h // (heads // heads_k) if shape[1] == heads_k else h
        index = [0 if n == 1 else at for n, at in zip(shape, (b, head, i, j))]
        return x.reshape(shape)[tuple(index)].item()

    for b in range(batch):
        for h in range(heads):
            for i in range(seqlen_q):
                scores = {}
                for j in range(seqlen_k):
                    diagonal = i + seqlen_k - seqlen_q
                    s = scale * sum(x * y for x, y in zip(q[b, i, h].tolist(), k[b, j, h * heads_k // heads].tolist()))
                    s = softcap * math.tanh(s / softcap) if softcap else s
                    s += read(bias, b, h, i, j) if bias is not None else 0.0
                    inside = (left < 0 or j >= diagonal - left) and (right < 0 or j <= diagonal + right)
                    inside = inside and (not is_causal or j <= diagonal) and s > -INF
                    if inside and (mask is None or read(mask, b, h, i, j)):
                        scores[j] = s
                if scores:
                    top = max(scores.values())
                    total = sum(math.exp(s - top) for s in scores.values())
                    lse[b, h, i] = top + math.log(total)
                    for j, s in scores.items():
                        out[b, i, h] += math.exp(s - top) / total * v[b, j, h * heads_k // heads]
    return out, lse


@pytest.mark.parametrize("flags", FLAGS.values(), ids=FLAGS)
@pytest.mark.parametrize("lengths", [(4, 4), (2, 5), (5, 3), (1, 1), (3, 0), (0, 3)])
def test_formula_is_the_contract_by_loops(flags, lengths):
    torch.manual_seed(0)
    q, k, v = tensors(*lengths)
    seqlen_q, seqlen_k = lengths
    bias = random(2, 1, seqlen_k)
    bias[bias > 1.2] = -INF
    for mask in (None, torch.rand(2, 2, seqlen_q, 1) < 0.7, torch.rand(seqlen_q, seqlen_k) < 0.5):
        exact = by_loops(q, k, v, mask, bias, **flags)
        out, lse, probs = formula.attention(q, k, v, mask, bias, return_probs=True, **flags)
        torch.testing.assert_close(out, exact[0], rtol=1e-12, atol=1e-13)
        torch.testing.assert_close(lse, exact[1], rtol=1e-12, atol=1e-13)
        assert probs.shape == (2, 4, *lengths)
        torch.testing.assert_close(probs.sum(-1), (exact[1] > -INF).double())


def test_empty_batch():
    out, lse = formula.attention(*tensors(3, 4, batch=0))
    assert out.shape == (0, 3, 4, 2) and lse.shape == (0, 4, 3)


@pytest.mark.parametrize("flags", FLAGS.values(), ids=FLAGS)
@pytest.mark.parametrize("shape", [(2, 4, 5, 6), (1, 2, 1, 6), (2, 1, 5, 1), (5, 6), (1, 1, 1, 1)], ids=str)
def test_gradients_are_those_of_autograd(flags, shape):
    torch.manual_seed(1)
    inputs = [x.requires_grad_() for x in (*tensors(5, 6), random(*shape))]
    mask = torch.rand(2, 2, 5, 6) < 0.6
    mask[0, :, 2] = False
    out, lse = formula.attention(*inputs[:3], mask, inputs[3], **flags)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    exact = torch.autograd.grad((out, lse), inputs, (dout, dlse))
    # The loss of an empty row's lse has an infinite gradient; nothing of it may reach the inputs.
    dlse[lse == -INF] = INF
    for got, expected in zip(formula.gradients(dout, dlse, *inputs[:3], mask, inputs[3], **flags), exact):
        assert got.shape == expected.shape
        torch.testing.assert_close(got, expected, rtol=1e-11, atol=1e-12)
    assert formula.gradients(dout, None, *inputs[:3], mask, None, **flags)[3] is None


@pytest.mark.parametrize("flags", [{}, {"is_causal": True, "softcap": 0.8}, {"window_size": (1, 1)}], ids=str)
@pytest.mark.parametrize("shape", [(1, 2, 4, 3), (2, 1, 1, 3), (1, 1, 4, 1)], ids=str)
def test_two_derivatives_with_empty_rows(flags, shape):
    torch.manual_seed(2)
    q, k, v = tensors(4, 3, heads=2, heads_k=1)
    bias = random(*shape)
    bias[..., 0] = -INF if shape[3] > 1 else 0.0
    mask = torch.rand(2, 1, 4, 3) < 0.6
    mask[1, :, 1] = False
    # gradcheck cannot step away from -inf: only the finite part of the bias is an input.
    finite = bias > -INF

    def run(q, k, v, values):
        out, lse = formula.attention(q, k, v, mask, torch.where(finite, values, -INF), **flags)
        return out, lse.masked_fill(lse == -INF, 0.0)

    inputs = [x.requires_grad_() for x in (q, k, v, bias.masked_fill(~finite, 0.0))]
    assert torch.autograd.gradcheck(run, inputs)
    assert torch.autograd.gradgradcheck(run, inputs)


@pytest.mark.parametrize("flags", [{}, {"softcap": 0.8, "is_causal": True}], ids=str)
def test_derivative_of_gradients_is_the_second_derivative(flags):
    torch.manual_seed(3)
    mask = torch.rand(2, 2, 4, 3) < 0.6
    mask[0, :, 1] = False
    bias = random(1, 2, 1, 3)
    bias[..., 1] = -INF
    inputs = [x.requires_grad_() for x in (*tensors(4, 3, heads=2, heads_k=1), bias)]
    out, lse = formula.attention(*inputs[:3], mask, inputs[3], **flags)
    dout, dlse = torch.randn_like(out).requires_grad_(), torch.randn_like(lse).requires_grad_()
    first = torch.autograd.grad((out, lse), inputs, (dout, dlse), create_graph=True)
    weights = [torch.randn_like(x) for x in first]
    exact = torch.autograd.grad(first, [dout, dlse, *inputs], weights)

    def explicit(dout, dlse, q, k, v, bias):
        return formula.gradients(dout, dlse, q, k, v, mask, bias, **flags)

    _, pull = torch.func.vjp(explicit, dout, dlse, *inputs)
    for got, expected in zip(pull(tuple(weights)), exact):
        assert torch.isfinite(expected).all()
        torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("value", [1e4, -1e4, torch.finfo(torch.float32).min])
def test_large_biases_are_numbers(value):
    torch.manual_seed(4)
    q, k, v = (x.float().requires_grad_() for x in tensors(3, 4))
    bias = torch.full((1, 1, 3, 4), value).requires_grad_()
    out, lse = formula.attention(q, k, v, None, bias)
    assert torch.isfinite(out).all() and torch.isfinite(lse).all()
    if abs(value) > 1e30:
        # The scores vanish in the rounding of such a bias: what is left is the mean of the values.
        torch.testing.assert_close(out, v.mean(1, keepdim=True).repeat_interleave(2, 2).expand_as(out))
    for gradient in torch.autograd.grad(out.sum() + (lse - value).sum(), (q, k, v, bias)):
        assert torch.isfinite(gradient).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_rounds_products_and_probabilities_only(dtype):
    torch.manual_seed(5)
    q, k, v = (x.to(dtype) for x in tensors(4, 5, heads=2))
    out, lse, probs = formula.attention(q, k, v, return_probs=True)
    scores = (q.transpose(1, 2) @ k.permute(0, 2, 3, 1)).float() * 3**-0.5
    assert out.dtype == dtype and lse.dtype == probs.dtype == torch.float32
    torch.testing.assert_close(probs, scores.softmax(-1), rtol=1e-6, atol=1e-7)
    expected = (probs.to(dtype) @ v.transpose(1, 2)).transpose(1, 2)
    torch.testing.assert_close(out, expected, rtol=torch.finfo(dtype).eps, atol=0)
