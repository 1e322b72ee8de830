"""The flex backend's results, with gradients through the fixture, and its rules."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from flex_fixture import ROUNDED, ROUNDS_GRADIENTS, eager_flex
from torch import Tensor

import flash_dmattn
from flash_dmattn.backends.flex import backend as flex
from flash_dmattn.backends.flex.call import graph_module
from flash_dmattn.problem import Flags, NeedsGrad, TensorSpec
from flash_dmattn.reference import formula

B, HQ, HK, D, DV = 2, 4, 2, 16, 24


@pytest.fixture
def eager() -> Iterator[None]:
    with eager_flex():
        yield


def inputs(seqlen_q: int, seqlen_k: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    shapes = ((B, seqlen_q, HQ, D), (B, seqlen_k, HK, D), (B, seqlen_k, HK, DV))
    return tuple(torch.randn(shape, generator=generator).to(dtype) for shape in shapes)


def random_mask(*shape: int, keep: float = 0.6) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(sum(shape))) < keep


def random_bias(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def error(x: Tensor, exact: Tensor) -> float:
    # Equal infinities (the lse of an empty row) are compared by the caller; here they would be NaN.
    x, exact = x.detach(), exact.detach()
    finite = exact.isfinite()
    difference, size = (x.double() - exact)[finite].norm(), exact[finite].norm()
    return float(difference / size) if size > 0 else float(difference)


def formula_run(leaves: list[Tensor | None], mask: Tensor | None, dtype: torch.dtype, **flags: Any) -> list[Tensor]:
    q, k, v, bias = (None if x is None else x.detach().to(dtype).requires_grad_(x.requires_grad) for x in leaves)
    assert q is not None and k is not None and v is not None
    out, lse = formula.attention(q, k, v, mask, bias, **flags)
    return [out, lse, *gradients(out, lse, [q, k, v, bias])]


def gradients(out: Tensor, lse: Tensor, leaves: list[Tensor | None]) -> list[Tensor]:
    needed = [x for x in leaves if x is not None and x.requires_grad]
    generator = torch.Generator().manual_seed(7)
    dout = torch.randn(out.shape, generator=generator).to(out.dtype)
    dlse = torch.randn(lse.shape, generator=generator).to(lse.dtype)
    pairs = [(y, dy) for y, dy in ((out, dout), (lse, dlse)) if y.requires_grad]
    return list(torch.autograd.grad([y for y, _ in pairs], needed, [dy for _, dy in pairs]))


def check(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: Tensor | None, needs_grad: str = "qkvb", **flags: Any
) -> None:
    """out, lse and needed gradients under the accuracy rule: 1.5 x the formula's own error in that dtype + 1e-5."""
    leaves = [x if x is None else x.detach().requires_grad_(n in needs_grad) for n, x in zip("qkvb", (q, k, v, bias))]
    out, lse = flash_dmattn.attention(*leaves[:3], mask, leaves[3], return_lse=True, backend="flex", **flags)
    found = [out, lse, *gradients(out, lse, leaves)]
    exact = formula_run(leaves, mask, torch.float64, **flags)
    plain = formula_run(leaves, mask, q.dtype, **flags)
    empty = exact[1] == -torch.inf
    assert torch.equal(lse == -torch.inf, empty) and torch.all(out.transpose(1, 2)[empty] == 0)
    names = ["out", "lse", *(f"d{n}" for n, x in zip("qkvb", leaves) if x is not None and x.requires_grad)]
    assert len(names) == len(found) == len(exact)
    for name, x, x64, yardstick in zip(names, found, exact, plain, strict=True):
        assert x.shape == x64.shape and not x.isnan().any(), name
        assert error(x, x64) <= 1.5 * error(yardstick, x64) + 1e-5, name


BIAS_SHAPES = [(b, h, i, j) for b, h, i, j in itertools.product((1, B), (1, HK, HQ), (1, 37), (1, 45))]


@pytest.mark.parametrize("shape", BIAS_SHAPES, ids=str)
def test_bias_of_every_broadcast_shape(eager: None, shape: tuple[int, ...]) -> None:
    check(*inputs(37, 45), random_mask(B, 1, 37, 45), random_bias(*shape), is_causal=True)


@pytest.mark.parametrize("shape", BIAS_SHAPES, ids=str)
def test_mask_of_every_broadcast_shape(eager: None, shape: tuple[int, ...]) -> None:
    check(*inputs(37, 45), random_mask(*shape), random_bias(1, HK, 1, 45))


@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(150, 260), (260, 150), (1, 130), (129, 1), (128, 256)])
@pytest.mark.parametrize(
    "flags",
    [
        {"is_causal": True},
        {"window_size": (20, -1)},
        {"window_size": (-1, 3), "softcap": 2.0},
        {"window_size": (130, 5), "is_causal": True, "softmax_scale": 0.0},
        {"softcap": 1.5, "softmax_scale": 1.0},
    ],
    ids=str,
)
def test_band_softcap_and_scale(eager: None, seqlen_q: int, seqlen_k: int, flags: dict[str, Any]) -> None:
    check(*inputs(seqlen_q, seqlen_k), None, random_bias(B, 1, seqlen_q, 1), **flags)


def test_mask_that_empties_rows_and_tiles(eager: None) -> None:
    mask = random_mask(B, HK, 300, 270)
    mask[:, :, :140] = False
    mask[:, 1, :, 128:256] = False
    mask[1, :, 270:] = False
    check(*inputs(300, 270), mask, random_bias(1, HQ, 1, 270), is_causal=True)


def test_infinite_bias_masks(eager: None) -> None:
    bias = random_bias(B, 1, 40, 50)
    bias[:, :, 3] = -torch.inf
    bias[0, :, :, 20:] = -torch.inf
    bias[1, 0, 7, 1] = torch.finfo(torch.float32).min
    check(*inputs(40, 50), None, bias)


@pytest.mark.skipif(ROUNDS_GRADIENTS, reason=ROUNDED)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_with_fp32_dbias_accumulation(eager: None, dtype: torch.dtype) -> None:
    # 600 rows of batch 2 meet in one number: added up in 16 bits, its error would be many times the rule's.
    check(*inputs(300, 40, dtype), random_mask(1, 1, 300, 40), random_bias(1, HK, 1, 40).to(dtype))


@pytest.mark.parametrize("needs_grad", ["q", "k", "v", "b", "kb", "qv"])
def test_any_subset_of_gradients(eager: None, needs_grad: str) -> None:
    check(*inputs(37, 45), random_mask(1, 1, 37, 45), random_bias(1, HK, 1, 45), needs_grad=needs_grad)


@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (B, HK, 37, 1)], ids=str)
def test_out_does_not_depend_on_a_bias_of_one_number_per_query(eager: None, shape: tuple[int, ...]) -> None:
    bias = random_bias(*shape).requires_grad_()
    out = flash_dmattn.attention(*inputs(37, 45), None, bias, backend="flex")
    (dbias,) = torch.autograd.grad(out.square().sum(), bias)
    assert dbias.shape == bias.shape and not dbias.any()


def test_infinite_dlse_of_an_empty_row_stays_there(eager: None) -> None:
    q, k, v = (x.requires_grad_() for x in inputs(20, 30))
    mask = random_mask(1, 1, 20, 30)
    mask[..., 4, :] = False
    _, lse = flash_dmattn.attention(q, k, v, mask, return_lse=True, backend="flex")
    dlse = torch.where(lse == -torch.inf, torch.inf, 1.0)
    found = torch.autograd.grad(lse, (q, k, v), dlse)
    q64, k64, v64 = (x.detach().double().requires_grad_() for x in (q, k, v))
    lse64 = formula.attention(q64, k64, v64, mask)[1]
    exact = torch.autograd.grad(lse64, (q64, k64), dlse.double().nan_to_num(posinf=0.0))
    for x, x64 in zip(found, exact, strict=False):
        assert error(x, x64) <= 1e-5
    assert not found[2].any()


@pytest.mark.parametrize(("batch", "seqlen_q", "seqlen_k"), [(0, 3, 4), (2, 0, 4), (2, 3, 0)])
@pytest.mark.parametrize("needs_grad", [True, False])
def test_lengths_of_zero(eager: None, batch: int, seqlen_q: int, seqlen_k: int, needs_grad: bool) -> None:
    q, k, v = (
        torch.full((batch, n, 2, 16), torch.inf).requires_grad_(needs_grad) for n in (seqlen_q, seqlen_k, seqlen_k)
    )
    bias = torch.randn(1, 2, 1, seqlen_k).requires_grad_(needs_grad)
    out, lse = flash_dmattn.attention(q, k, v, None, bias, return_lse=True, backend="flex")
    assert out.shape == (batch, seqlen_q, 2, 16) and not out.any() and out.dtype == q.dtype
    assert lse.shape == (batch, 2, seqlen_q) and torch.all(lse == -torch.inf)
    if needs_grad:
        out.sum().backward()
        for x in (q, k, v, bias):
            assert x.grad is not None and x.grad.shape == x.shape and not x.grad.any()


def test_strides(eager: None) -> None:
    q, k, v = inputs(37, 45)
    q = q.transpose(1, 2).contiguous().transpose(1, 2)
    k = k.permute(3, 0, 1, 2).contiguous().permute(1, 2, 3, 0)
    v = torch.cat((v, v), 1)[:, ::2][:, :45]
    mask = random_mask(45, 37).t()[None, None].expand(B, HQ, 37, 45)
    bias = random_bias(2 * 45 + 1)[1::2].expand(B, 1, 37, 45)
    check(q, k, v, mask, bias, needs_grad="qkv")
    odd = torch.as_strided(random_bias(45), (1, 1, 1, 45), (7, 1 << 40, 3, 1))
    check(q, k, v, mask, odd)


def test_an_expanded_bias_has_a_gradient_at_each_place(eager: None) -> None:
    q, k, v = inputs(37, 45)
    base = random_bias(1, HK, 1, 45).requires_grad_()
    expanded = base.expand(B, HK, 37, 45)
    out = flash_dmattn.attention(q, k, v, None, expanded, backend="flex")
    at_expanded, at_base = torch.autograd.grad(out.square().sum(), (expanded, base))
    wide64 = expanded.detach().double().contiguous().requires_grad_()
    out64 = formula.attention(q.double(), k.double(), v.double(), None, wide64)[0]
    (exact,) = torch.autograd.grad(out64.square().sum(), wide64)
    assert error(at_expanded, exact) <= 1e-5
    assert error(at_base, exact.sum((0, 2), keepdim=True)) <= 1e-5


@pytest.mark.parametrize(
    ("change", "code", "text"),
    [
        ({"device": "mps"}, "device", "device is mps"),
        ({"dtype": torch.float64}, "dtype", "dtype is float64"),
        ({"head_dim": 8, "device": "cuda"}, "head_dim", "head dims are 8 and 24"),
        ({"head_dim_v": 320, "device": "cuda"}, "head_dim", "head dims are 16 and 320"),
        ({"needs_grad": NeedsGrad(k=True, bias=True)}, "cpu_backward", "gradients of k, bias are needed on CPU"),
        ({"return_lse": True}, "cpu_lse", "return_lse is set on CPU"),
        ({"mask": TensorSpec((2, 1, 3, 4), (1 << 31, 0, 4, 1), torch.bool)}, "mask_span", "mask spans 2147483660"),
        ({"bias": TensorSpec((1, 1, 1 << 16, 1 << 15), (0, 0, 1 << 15, 1), torch.float32)}, "bias_span", "2147483648"),
        ({"k_strides": (0, 1 << 30, 0, 1)}, "row_span", "one head of q, k or v spans 47244640272"),
        (
            {"flags": Flags(-1, -1, 1.0, 0.0, True), "needs_grad": NeedsGrad(bias=True)},
            "deterministic",
            "adds it up with atomics",
        ),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_every_rule_refuses_with_the_values_found(change: dict[str, Any], code: str, text: str) -> None:
    problem = flash_dmattn.explain(*inputs(37, 45), return_lse=False).problem
    rules = {rule.code: rule for rule in flex.RULES}
    assert all(rule.holds(problem) for rule in flex.RULES)
    broken = problem._replace(**change)
    assert not rules[code].holds(broken)
    assert text in rules[code].says(broken) and rules[code].hint


def test_spans_at_the_limit_are_accepted() -> None:
    rules = {rule.code: rule for rule in flex.RULES}
    problem = flash_dmattn.explain(*inputs(37, 45), return_lse=False).problem
    limit = TensorSpec((1, 1, 1, (1 << 31) - 1), (0, 0, 0, 1), torch.bool)
    expanded = TensorSpec((64, 64, 1 << 20, 1 << 20), (0, 0, 0, 1), torch.bool)
    for spec in (limit, expanded):
        assert rules["mask_span"].holds(problem._replace(mask=spec))
        assert rules["bias_span"].holds(problem._replace(bias=spec))


@pytest.mark.parametrize("without_gradients", (torch.no_grad, torch.inference_mode))
def test_inputs_that_require_gradients_where_none_is_recorded(
    without_gradients: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the hint of `cpu_backward` recommends; the refusal of FlexAttention itself stays in place here."""
    monkeypatch.setattr(graph_module(), "compiler", "eager")
    q, k, v, bias = (x.requires_grad_() for x in (*inputs(37, 45), random_bias(1, HK, 1, 45)))
    with without_gradients():
        out = flash_dmattn.attention(q, k, v, None, bias, backend="flex")
    assert not out.requires_grad
    exact = formula.attention(*(x.detach().double() for x in (q, k, v)), None, bias.detach().double())[0]
    assert error(out, exact) <= 1e-5


def test_refusal_names_who_accepts() -> None:
    q, k, v = inputs(5, 6)
    with pytest.raises(flash_dmattn.BackendUnsupportedError, match="no compiled backward pass") as caught:
        flash_dmattn.attention(q.requires_grad_(), k, v, backend="flex")
    assert "eager" in caught.value.accepted_by


def test_auto_on_cpu_prefers_eager() -> None:
    with flash_dmattn.config(record=(decisions := [])):
        flash_dmattn.attention(*inputs(5, 6))
    assert [decision.forward for decision in decisions] == ["eager"]


def test_notes_list_the_copies() -> None:
    q, k, v = inputs(5, 6)
    bias = random_bias(1, HK, 1, 6).bfloat16().requires_grad_()
    problem = flash_dmattn.validation.describe(q, k, v, None, bias, False, None, 0.0, None, False, False, False)[0]
    notes = flex.notes(problem._replace(device="cuda"))
    assert any("copies bias to float32" in note for note in notes) and any("atomics" in note for note in notes)
    assert flex.notes(problem._replace(bias=None, needs_grad=NeedsGrad())) == ()


def test_forward_mode_is_refused() -> None:
    """FlexAttention would drop the tangent."""
    q, k, v = (torch.randn(1, 8, 2, 16) for _ in range(3))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(q, torch.ones_like(q))
        with pytest.raises(NotImplementedError, match="'flex' has no forward-mode derivative"):
            flash_dmattn.attention(dual, k, v, backend="flex")


@pytest.mark.parametrize("capability, usable", [("AVX2", True), ("AVX512", True), ("NO AVX", False), ("SVE256", False)])
def test_flex_works_where_its_cpu_kernel_compiles(
    capability: str, usable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A CPU without AVX2 has no compiled FlexAttention: the probe says so before Inductor does."""
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    availability = flex._load()
    assert availability.usable is usable
    assert usable or f"torch serves this CPU as {capability}" in availability.reason
