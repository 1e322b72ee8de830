"""Position biases and the layer with a pair bias against their formulas in loops, gradients of the tables included."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import flash_dmattn
from flash_dmattn.biases import t5_buckets
from flash_dmattn.nn import PairBiasAttention, RelativePositionBias, WindowPositionBias, alibi_slopes

SIZES = ((1, 1), (1, 7), (7, 1), (2, 3), (9, 9), (5, 40), (40, 5), (300, 300))


def filled(module: torch.nn.Module) -> torch.nn.Module:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, dtype=parameter.dtype, generator=generator))
    return module


def t5_bucket(distance: int, number: int, most: int, is_bidirectional: bool) -> int:
    """One bucket, as the paper's code has it."""
    first = 0
    if is_bidirectional:
        number //= 2
        first = number if distance > 0 else 0
        distance = abs(distance)
    else:
        distance = max(-distance, 0)
    exact = number // 2
    if distance < exact:
        return first + distance
    share = math.log(distance / exact) / math.log(most / exact)
    return first + min(exact + math.floor(share * (number - exact) + 1e-5), number - 1)


@pytest.mark.parametrize("is_bidirectional", (True, False))
@pytest.mark.parametrize(("num_buckets", "max_distance"), ((32, 128), (8, 20), (4, 3)))
def test_buckets(num_buckets: int, max_distance: int, is_bidirectional: bool) -> None:
    distances = range(-400, 401)
    wanted = [t5_bucket(d, num_buckets, max_distance, is_bidirectional) for d in distances]
    assert t5_buckets(torch.tensor(distances), num_buckets, max_distance, is_bidirectional).tolist() == wanted
    assert min(wanted) == 0 and max(wanted) == num_buckets - 1


@pytest.mark.parametrize("is_bidirectional", (True, False))
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), SIZES)
def test_relative_position_bias(seqlen_q: int, seqlen_k: int, is_bidirectional: bool) -> None:
    module = filled(RelativePositionBias(3, is_bidirectional=is_bidirectional, dtype=torch.float64))
    bias = module(seqlen_q, seqlen_k)
    assert bias.shape == (1, 3, seqlen_q, seqlen_k)
    distance = torch.arange(seqlen_k)[None, :] - (torch.arange(seqlen_q) + seqlen_k - seqlen_q)[:, None]
    table = module.weight.detach().clone().requires_grad_()
    wanted = table[t5_buckets(distance, 32, 128, is_bidirectional)].permute(2, 0, 1)[None]
    assert torch.equal(bias, wanted)
    dbias = torch.randn(bias.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    computed, expected = torch.autograd.grad(bias, module.weight, dbias), torch.autograd.grad(wanted, table, dbias)
    torch.testing.assert_close(computed, expected, rtol=1e-12, atol=1e-12)
    assert torch.equal(module().dense(seqlen_q, seqlen_k), wanted[0])


def test_one_length_is_both_and_none_is_empty() -> None:
    module = filled(RelativePositionBias(2))
    assert torch.equal(module(6), module(6, 6))
    for sizes in ((0, 4), (4, 0), (0, 0)):
        assert module(*sizes).shape == (1, 2, *sizes)


@pytest.mark.parametrize(("height", "width"), ((1, 1), (1, 4), (3, 2), (7, 7)))
def test_window_position_bias(height: int, width: int) -> None:
    module = filled(WindowPositionBias(height, width, 2, dtype=torch.float64))
    bias = module()
    places = [(y, x) for y in range(height) for x in range(width)]
    assert bias.shape == (1, 2, len(places), len(places)) and bias.is_contiguous()
    total = torch.zeros_like(module.weight)
    dbias = torch.randn(bias.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for i, (yi, xi) in enumerate(places):
        for j, (yj, xj) in enumerate(places):
            row = (yi - yj + height - 1) * (2 * width - 1) + xi - xj + width - 1
            assert torch.equal(bias[0, :, i, j], module.weight[row])
            total[row] += dbias[0, :, i, j]
    (computed,) = torch.autograd.grad(bias, module.weight, dbias)
    torch.testing.assert_close(computed, total, rtol=1e-12, atol=1e-12)


def test_alibi_slopes() -> None:
    assert alibi_slopes(1).tolist() == [2.0**-8]
    assert alibi_slopes(8).tolist() == [2.0**-n for n in range(1, 9)]
    # The numbers of its paper's code for 12 heads: all slopes of 8 heads, then every second one of 16.
    wanted = [2.0**-n for n in range(1, 9)] + [2.0 ** -(n + 0.5) for n in range(4)]
    torch.testing.assert_close(alibi_slopes(12), torch.tensor(wanted))


def test_gradients_are_deterministic_by_pytorchs_own_account() -> None:
    """Nothing on the way is among the operations that PyTorch refuses under deterministic algorithms."""
    torch.use_deterministic_algorithms(True)
    try:
        for module, sizes in ((RelativePositionBias(2), (20, 30)), (WindowPositionBias(4, 4, 2), ())):
            filled(module)
            first, second = (torch.autograd.grad(module(*sizes).sin().sum(), module.weight)[0] for _ in range(2))
            assert torch.equal(first, second)
    finally:
        torch.use_deterministic_algorithms(False)


def by_hand(layer: PairBiasAttention, x: Tensor, pair: Tensor, mask: Tensor | None) -> Tensor:
    """The layer by loops over entries and heads, from the formula of its docstring."""
    entries = []
    for b, row in enumerate(x):
        own = pair[b]
        mean, var = own.mean(-1, keepdim=True), own.var(-1, correction=0, keepdim=True)
        normed = (own - mean) / (var + layer.pair_norm.eps).sqrt() * layer.pair_norm.weight + layer.pair_norm.bias
        bias = normed @ layer.pair_proj.weight.T
        q, k, v = (row @ p.weight.T for p in (layer.q_proj, layer.k_proj, layer.v_proj))
        q = q + layer.q_proj.bias
        heads = []
        for h in range(layer.num_heads):
            part = slice(h * layer.head_dim, (h + 1) * layer.head_dim)
            scores = q[:, part] @ k[:, part].T * layer.head_dim**-0.5 + bias[:, :, h]
            if mask is not None:
                scores = scores.masked_fill(~mask[b], -math.inf)
                weights = torch.zeros_like(scores) if not mask[b].any() else scores.softmax(-1)
            else:
                weights = scores.softmax(-1)
            heads.append(weights @ v[:, part])
        out = torch.cat(heads, -1)
        if layer.gate_proj is not None:
            out = torch.sigmoid(row @ layer.gate_proj.weight.T) * out
        entries.append(out @ layer.o_proj.weight.T)
    return torch.stack(entries)


@pytest.mark.parametrize("is_gated", (True, False))
@pytest.mark.parametrize("masked", (True, False))
@pytest.mark.parametrize(
    ("batch", "pair_dims", "mask_dims"),
    (
        *(((3,), (3,), (3,)), ((3,), (1,), (3,)), ((2, 3), (2, 1), (2, 1)), ((2, 3), (1, 3), (2, 3))),
        *(((2, 3), (1, 1), (1, 3)), ((2, 3), (2, 3), (1, 1))),
    ),
)
def test_pair_bias_attention(
    batch: tuple[int, ...], pair_dims: tuple[int, ...], mask_dims: tuple[int, ...], masked: bool, is_gated: bool
) -> None:
    """Pairs and masks that rows share, and one entry of only padding."""
    layer = PairBiasAttention(12, 5, num_heads=3, head_dim=8, is_gated=is_gated, dtype=torch.float64)
    filled(layer)
    torch.manual_seed(1)
    x = torch.randn(*batch, 7, 12, dtype=torch.float64, requires_grad=True)
    pair = torch.randn(*pair_dims, 7, 7, 5, dtype=torch.float64, requires_grad=True)
    mask = torch.rand(*mask_dims, 7) < 0.6 if masked else None
    every = None
    if mask is not None:
        mask.view(-1, 7)[1:2] = False  # only padding, where rows do not share one mask
        every = mask.expand(*batch, 7).reshape(-1, 7)
    leaves = [x, pair, *layer.parameters()]
    result = layer(x, pair, mask)
    expected = by_hand(layer, x.reshape(-1, 7, 12), pair.expand(*batch, 7, 7, 5).reshape(-1, 7, 7, 5), every)
    torch.testing.assert_close(result, expected.view_as(x), rtol=1e-10, atol=1e-10)
    gradients = [torch.autograd.grad(out.view_as(x).sin().sum(), leaves) for out in (result, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-8, atol=1e-9)


def test_a_mask_may_have_the_form_of_attention() -> None:
    layer, (x, pair) = PairBiasAttention(12, 5, num_heads=3), (torch.randn(2, 7, 12), torch.randn(2, 7, 7, 5))
    mask = torch.tensor([[1.0] * 7, [1.0] * 4 + [0.0] * 3])
    with pytest.raises(TypeError, match=r"mask has dtype float32; it needs bool, True for a token: mask\.bool\(\)"):
        layer(x, pair, mask)
    wanted = layer(x, pair, mask.bool())
    assert layer(x, pair, flash_dmattn.masks.padding_mask(mask > 0.5)).equal(wanted)
    assert layer(x, pair, mask.bool()[:, None, None].expand(2, 3, 7, 7)).equal(wanted)
    rows = layer(x[:, None], pair[:, None], flash_dmattn.masks.padding_mask(mask > 0.5)[:, None])
    torch.testing.assert_close(rows[:, 0], wanted)


def test_pairs_that_rows_share_are_not_expanded(monkeypatch: pytest.MonkeyPatch) -> None:
    biases: list[Tensor] = []
    attend = flash_dmattn.attention
    monkeypatch.setattr(
        flash_dmattn,
        "attention",
        lambda q, k, v, mask, bias, **more: biases.append(bias) or attend(q, k, v, mask, bias),
    )
    layer = PairBiasAttention(8, 4, 2)
    layer(torch.randn(2, 50, 3, 8), torch.randn(2, 1, 3, 3, 4))
    assert biases[0].shape == (2, 1, 2, 3, 3) and biases[0].is_contiguous()


ERRORS: list[tuple[str, Callable[[], object]]] = [
    ("dim is 10 and num_heads 3, which does not divide it", lambda: PairBiasAttention(10, 4, 3)),
    ("dim is None", lambda: PairBiasAttention(None, 4, 2)),
    ("pair_dim is 0; it needs to be >= 1", lambda: PairBiasAttention(8, 0, 2)),
    ("num_heads is 0; it needs to be >= 1", lambda: PairBiasAttention(8, 4, 0)),
    ("head_dim is -3; it needs to be >= 1", lambda: PairBiasAttention(8, 4, 2, -3)),
    ("x is a list; it needs to be a torch.Tensor", lambda: PairBiasAttention(8, 4, 2)([1], torch.ones(1))),
    (
        "pair is a NoneType; it needs to be a torch.Tensor",
        lambda: PairBiasAttention(8, 4, 2)(torch.ones(2, 3, 8), None),
    ),
    (r"x has shape \(2, 8\)", lambda: PairBiasAttention(8, 4, 2)(torch.ones(2, 8), torch.ones(2, 3, 3, 4))),
    (
        r"pair has shape \(3, 3, 3, 4\); .* needs to be \(2 or 1, 3, 3, 4\)",
        lambda: PairBiasAttention(8, 4, 2)(torch.ones(2, 3, 8), torch.ones(3, 3, 3, 4)),
    ),
    (
        r"pair has shape \(2, 3, 3, 4\); .* needs to be \(2 or 1, 5 or 1, 3, 3, 4\)",
        lambda: PairBiasAttention(8, 4, 2)(torch.ones(2, 5, 3, 8), torch.ones(2, 3, 3, 4)),
    ),
    (
        r"mask has shape \(3,\); .* needs to be \(2 or 1, 3\)",
        lambda: PairBiasAttention(8, 4, 2)(
            torch.ones(2, 3, 8), torch.ones(2, 3, 3, 4), torch.ones(3, dtype=torch.bool)
        ),
    ),
    ("num_buckets is 7; with is_bidirectional", lambda: RelativePositionBias(2, num_buckets=7)),
    ("max_distance is 8; it needs to be >= 9", lambda: RelativePositionBias(2, max_distance=8)),
    ("seqlen_q is -1", lambda: RelativePositionBias(2)(-1)),
    ("seqlen_k is 4 without seqlen_q", lambda: RelativePositionBias(2)(seqlen_k=4)),
    ("height is 0", lambda: WindowPositionBias(0, 3, 2)),
    ("num_heads is 0", lambda: alibi_slopes(0)),
    ("is_gated is None; it needs to be True or False", lambda: PairBiasAttention(8, 4, 2, is_gated=None)),
    ("is_bidirectional is 'no'; it needs to be True or", lambda: RelativePositionBias(2, is_bidirectional="no")),
]


@pytest.mark.parametrize("message, call", ERRORS)
def test_errors(message: str, call: Callable[[], object]) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        call()
