"""Keys, values and biases put in a mask's order for kernels that know nothing of it, and gradients brought back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from flash_dmattn.backends.triton.key_order import Ordered
from flash_dmattn.masks import PreparedMask
from flash_dmattn.operators import describe_operands
from flash_dmattn.problem import Flags, NeedsGrad
from flash_dmattn.problem.inputs import Inputs
from flash_dmattn.reference import formula

B, HQ, HK, LQ, LK, D = 2, 4, 2, 70, 300, 8
BIASES = ((B, HQ, 1, LK), (1, HK, 1, LK), (1, 1, 1, LK), (B, HQ, LQ, 1), (1, HQ, 1, 1))


@pytest.fixture(autouse=True)
def memory_full_of_nan() -> Iterator[None]:
    """Fill allocated memory with NaN, so that what is not written shows."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("compact", [False, True])
@pytest.mark.parametrize("heads", [(1, 1), (2, 1), (1, HK), (2, HK)], ids=str)
@pytest.mark.parametrize("bias_shape", [None, *BIASES, "expanded over keys"], ids=str)
def test_gradients_by_key(bias_shape: Any, heads: tuple[int, int], compact: bool) -> None:
    """A bias that was expanded over keys has a gradient with a value for each; dead keys hold NaN, and get 0."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    keys = torch.rand(*heads, 1, LK, generator=generator) < 0.3
    scores = draw(*heads, 1, LK)
    prepared = PreparedMask.from_topk(scores, 20, is_causal=True, mask=keys, seqlen_q=LQ, reorder=True, compact=compact)
    assert prepared.num_places == (128 if compact else LK)
    dead = (prepared.start == prepared.stop).expand(B, HK, -1).transpose(1, 2)[..., None]
    q, dout = draw(B, LQ, HQ, D), draw(B, LQ, HQ, D)
    k, v = (draw(B, LK, HK, D) for _ in range(2))
    bias = None
    if bias_shape is not None:
        expanded = bias_shape == "expanded over keys"
        bias = draw(1, HQ, 1, 1).expand(1, HQ, 1, LK) if expanded else draw(*bias_shape)
    flags = Flags(-1, -1, 0.3, 0.0, False)
    with_nan = (x.masked_fill(dead, torch.nan) for x in (k, v))
    x = Inputs(q, *with_nan, prepared.view, bias)
    ordered = Ordered(describe_operands(x, flags, NeedsGrad(True, True, True, bias is not None)), x)
    words = ordered.inputs.mask.tensors[0]
    start, stop = words & 0xFFFFFFFF, words >> 32
    rows = torch.arange(LQ)[:, None]
    allowed = ((rows >= start[:, :, None]) & (rows < stop[:, :, None]))[..., : prepared.num_places]
    assert ordered.inputs.k.shape[1] == ordered.inputs.v.shape[1] == prepared.num_places

    def spread(x: Tensor | None) -> Tensor | None:
        """A bias for each query head, as the formula takes it, in fp64."""
        return None if x is None else x.double().repeat_interleave(HQ // x.shape[1] if x.shape[1] > 1 else 1, 1)

    def gradients(k: Tensor, v: Tensor, allowed: Tensor, bias: Tensor | None) -> list[Any]:
        actual = list(formula.gradients(dout, None, q, k, v, allowed, spread(bias), softmax_scale=0.3))
        if bias is not None:
            score_bias = torch.zeros(B, HQ, LQ, k.shape[1], dtype=torch.float64) + spread(bias)
            ds = formula.gradients(dout, None, q, k, v, allowed, score_bias, softmax_scale=0.3)[3]
            assert ds is not None
            if bias.shape[1] == HK:
                ds = ds.unflatten(1, (HK, -1)).sum(2)
            actual[3] = ds.sum_to_size(bias.shape)
        return actual

    dq, dk, dv, dbias = gradients(ordered.inputs.k, ordered.inputs.v, allowed, ordered.inputs.bias)
    actual = (dq, ordered.by_key(dk), ordered.by_key(dv), ordered.bias_by_key(dbias))
    wanted = gradients(k, v, prepared.dense(), bias)
    assert not actual[1].masked_select(dead).any() and not actual[2].masked_select(dead).any()
    # A bias that was put in order is fp32.
    for x, y, tolerance in zip(actual, wanted, (1e-6, 1e-6, 1e-6, 1e-5), strict=True):
        assert (x is None) == (y is None)
        if x is not None:
            torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance)
