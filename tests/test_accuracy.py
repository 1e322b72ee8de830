"""The accuracy rule allows more than the error of plain PyTorch in few rows, where rounding is a matter of luck."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from accuracy import (
    Results,
    assert_accurate,
    chance_by_delta,
    chance_by_ds,
    error,
    oracle,
    probabilities,
    rows_apart,
    run,
    yardstick,
)
from cases import Case, Inputs

import flash_dmattn
from flash_dmattn.reference import formula
from flash_dmattn.reference.yardstick import FLOOR, RATIO

FEW = Case(seqlen_q=7, seqlen_k=128, num_heads=2, num_heads_k=1, head_dim=128, dtype=torch.bfloat16, dlse=True)


def with_deltas_off(
    times: float, inputs: Inputs, exact: Results, in_dtype: Results, random: torch.Generator
) -> torch.Tensor:
    """dbias in fp64 where the delta of each row is off: by `times` what rounding of its out leaves, at random."""
    x, out, rounded = inputs.to(torch.float64), exact["out"], in_dtype["out"]
    assert out is not None and rounded is not None and x.dlse is not None
    size = (x.dout * (rounded.double() - out)).square().sum(-1).sqrt().mT
    off = times * size * torch.randn(size.shape, generator=random, dtype=torch.float64)
    dbias = formula.gradients(x.dout, x.dlse - off, x.q, x.k, x.v, x.mask, x.bias)[3]
    assert dbias is not None
    return dbias


@pytest.mark.parametrize("bias", (("1", "Hk", "1", "Lk"), ("B", "Hq", "Lq", "1"), ("1", "Hq", "Lq", "Lk")), ids=str)
def test_dbias_of_few_rows_may_be_unlucky_and_not_wrong(bias: tuple[str, ...]) -> None:
    """Deltas off by what rounding of out leaves in them pass, however they fall; by 20 times as much, hardly ever."""
    case = FEW.with_(bias=bias)
    inputs = case.build("cpu")
    exact, in_dtype = oracle(case, inputs), yardstick(case, inputs)
    assert exact["out"] is not None and in_dtype["out"] is not None and exact["dbias"] is not None
    allowed = chance_by_delta("dbias", inputs, case.flags(), exact["out"], in_dtype["out"])
    random = torch.Generator().manual_seed(1)
    passed = {1: 0, 20: 0}
    for times in (1, 20) * 40:
        dbias = with_deltas_off(times, inputs, exact, in_dtype, random)
        passed[times] += (dbias - exact["dbias"]).norm().item() <= allowed
    assert passed[1] == 40 and passed[20] < 10


def test_dbias_passes_beside_a_lucky_yardstick() -> None:
    """Rows that attend five keys: the error of plain PyTorch itself may be any small number."""
    unlucky = refused = 0
    for seed in range(30):
        case = FEW.with_(bias=("1", "Hk", "1", "Lk"), needs_grad=("bias",), seed=seed)
        inputs = replace(case.build("cpu"), mask=(torch.arange(128) < 5).view(1, 1, 1, 128))
        exact, in_dtype = oracle(case, inputs), yardstick(case, inputs)
        near, far = (
            with_deltas_off(times, inputs, exact, in_dtype, torch.Generator().manual_seed(seed)) for times in (1, 20)
        )
        assert exact["dbias"] is not None and in_dtype["dbias"] is not None
        unlucky += error(near, exact["dbias"]) > RATIO * error(in_dtype["dbias"], exact["dbias"]) + FLOOR
        assert_accurate({"dbias": near.bfloat16()}, case, inputs)
        try:
            assert_accurate({"dbias": far.bfloat16()}, case, inputs)
        except AssertionError as error_of_far:
            assert "dbias: error" in str(error_of_far)
            refused += 1
    assert unlucky > 0 and refused > 20


@pytest.mark.parametrize("data", ("centred", "steps 30"))
def test_dk_of_rows_that_are_alike_may_be_unlucky_and_not_wrong(data: str) -> None:
    """Equal rows of q move dk along one direction, so that all of its error is one sum; other rows move it apart."""
    case = FEW.with_(bias=None, data=data, seqlen_q=60, softcap=5.0)
    inputs = case.build("cpu")
    exact, in_dtype = oracle(case, inputs), yardstick(case, inputs)
    assert exact["out"] is not None and in_dtype["out"] is not None
    x, (weights, slope) = inputs.to(torch.float64), probabilities(inputs.to(torch.float64), case.flags())
    assert slope is not None
    p = weights * slope * case.head_dim**-0.5
    deltas = (x.dout * (in_dtype["out"].double() - exact["out"])).square().sum(-1)
    number = rows_apart(p, x.q, deltas)
    assert number > 30 if data == "centred" else number < 1.5 * case.num_heads
    allowed = chance_by_delta("dk", inputs, case.flags(), exact["out"], in_dtype["out"])
    random = torch.Generator().manual_seed(1)
    passed = {1: 0, 20: 0}
    for times in (1, 20) * 40:
        off = torch.randn(deltas.shape, generator=random, dtype=torch.float64) * times * deltas.sqrt()
        moved = x.q.mul(off.unsqueeze(-1)).unflatten(2, (p.shape[1], -1))
        passed[times] += torch.einsum("bhgij,bihgd->bjhd", p, moved).norm().item() <= allowed
    assert passed[1] == 40 and passed[20] < 10


@pytest.mark.parametrize("data", ("centred", "steps 30"))
@pytest.mark.parametrize("name", ("dq", "dk"))
def test_rounding_of_ds_may_be_unlucky_and_not_wrong(name: str, data: str) -> None:
    """ds rounded once to 16 bits, by any part of a step, passes; 20 times as much hardly ever."""
    case = FEW.with_(bias=("B", "Hq", "Lq", "Lk"), data=data, seqlen_q=60)
    inputs = case.build("cpu")
    x = inputs.to(torch.float64)
    ds = formula.gradients(x.dout, x.dlse, x.q, x.k, x.v, x.mask, x.bias)[3]
    assert ds is not None
    ds = ds.unflatten(1, (case.num_heads_k, -1)) * case.head_dim**-0.5
    allowed = chance_by_ds(name, inputs, case.flags(), None, case.dtype)
    random = torch.Generator().manual_seed(1)
    passed = {1: 0, 20: 0}
    for times in (1, 20) * 40:
        parts = torch.rand(ds.shape, generator=random, dtype=torch.float64) - 0.5
        off = times * torch.finfo(case.dtype).eps * parts * ds
        moved = (
            torch.einsum("bhgij,bjhd->bihgd", off, x.k).flatten(2, 3)
            if name == "dq"
            else torch.einsum("bhgij,bihgd->bjhd", off, x.q.unflatten(2, (case.num_heads_k, -1)))
        )
        passed[times] += moved.norm().item() <= allowed
    assert passed[1] == 40 and passed[20] < 10


@pytest.mark.parametrize("data", ("centred", "seen inf v"))
def test_a_small_row_may_not_be_off_in_fp32(data: str) -> None:
    """A row without much of the norm, off by 1e-5 of itself."""
    case = Case(seqlen_q=40, seqlen_k=50, dtype=torch.float32, data=data)
    inputs = case.build("cpu")
    results = run(partial(flash_dmattn.attention, return_lse=True, backend="eager"), case, inputs)
    assert_accurate(results, case, inputs)
    out = results["out"]
    assert out is not None
    sizes = out.norm(dim=-1).nan_to_num(torch.inf, torch.inf).flatten()
    out.view(-1, out.shape[-1])[sizes.argmin()] *= 1 + 1.2e-5
    with pytest.raises(AssertionError, match="out: error of a row"):
        assert_accurate(results, case, inputs)


def test_out_of_equal_weights_may_be_unlucky_and_not_wrong() -> None:
    """Weights that are rounded just above a power of two pass like the ones just below; 8 times their errors do not."""
    case = FEW.with_(seqlen_q=1, seqlen_k=257, softmax_scale=2e-6, dtype=torch.float16, needs_grad=())
    inputs = case.build("cpu")
    x = inputs.to(torch.float64)
    exact, in_dtype = oracle(case, inputs)["out"], yardstick(case, inputs)["out"]
    assert exact is not None and in_dtype is not None
    weights, _ = probabilities(x, case.flags())
    unlucky = refused = 0
    for size in torch.linspace(257, 514, 30).tolist():
        off = (weights * size).half().double() / size - weights
        near, far = (
            torch.einsum("bhgij,bjhd->bihgd", weights + times * off, x.v).view(exact.shape).half() for times in (1, 8)
        )
        unlucky += error(near, exact) > RATIO * error(in_dtype, exact) + FLOOR
        assert_accurate({"out": near}, case, inputs)
        try:
            assert_accurate({"out": far}, case, inputs)
        except AssertionError as error_of_far:
            assert "out: error" in str(error_of_far)
            refused += 1
    assert unlucky > 0 and refused > 20


FEW_KEPT = Case(
    seqlen_q=130,
    seqlen_k=300,
    num_heads=2,
    head_dim=64,
    dtype=torch.bfloat16,
    bias=("B", "Hq", "Lq", "Lk"),
    bias_dtype=torch.float32,
    needs_grad=("q", "k", "v", "bias"),
)


def few_kept(case: Case, kept: int) -> Inputs:
    """The tensors of a case whose queries keep so many keys each, by a mask."""
    scores = torch.rand(1, 1, case.seqlen_q, case.seqlen_k, generator=torch.Generator().manual_seed(case.seed))
    mask = scores >= scores.topk(kept).values[..., -1:]
    inputs = case.build()
    return replace(inputs, mask=mask.to(inputs.q.device))


def bound_of_delta(case: Case, x: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """p (B, Hq, Lq, Lk), and what delta of each row (B, Hq, Lq, 1) may be off by: docs/mathematics.md, Rounding."""
    p = probabilities(x, case.flags())[0].flatten(1, 2)
    terms = torch.einsum("bihd,bjhd->bhij", x.dout.abs(), x.v.abs())
    return p, torch.finfo(case.dtype).eps * (p * terms).sum(-1, keepdim=True)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=str)
@pytest.mark.parametrize("kept", (2, 5, 40))
def test_delta_of_a_rounded_out_has_a_bound_that_few_keys_come_near(kept: int, dtype: torch.dtype) -> None:
    """Weights are rounded, then out: a row is off by a hundredth of the bound, a few by a twentieth and more."""
    case = FEW_KEPT.with_(dtype=dtype)
    x = few_kept(case, kept).to(torch.float64)
    p, bound = bound_of_delta(case, x)
    top = p.amax(-1, keepdim=True)
    weights = (p / top).to(dtype).double() * top
    exact, rounded = (torch.einsum("bhij,bjhd->bihd", w, x.v) for w in (p, weights))
    off = (x.dout * (rounded.to(dtype).double() - exact)).sum(-1).mT.unsqueeze(-1).abs()
    share = (off / bound).flatten()
    assert 0.05 < share.max() <= 1 and share.median() > 0.01


@pytest.mark.parametrize("kept", (1, 2, 5))
def test_dbias_of_few_kept_keys_is_off_by_no_more_than_that(backend: Any, kept: int) -> None:
    """Each value of it by p times the bound, not only all of them together."""
    inputs = few_kept(FEW_KEPT, kept)
    got = backend(FEW_KEPT, inputs)["dbias"].double()
    exact, x = oracle(FEW_KEPT, inputs)["dbias"], inputs.to(torch.float64)
    assert exact is not None
    p, bound = bound_of_delta(FEW_KEPT, x)
    terms = torch.einsum("bihd,bjhd->bhij", x.dout.abs(), x.v.abs())
    assert ((got - exact).abs() <= p * (bound + 1e-4 * terms) + 1e-6).all()


GREAT = Case(bias=("B", "Hq", "Lq", "Lk"), bias_dtype=torch.float32, data="row -1e9", seqlen_q=20, seqlen_k=40)


def results_of(case: Case) -> tuple[Inputs, Results]:
    """The tensors of a case, and its results on eager."""
    inputs = case.build()
    return inputs, run(partial(flash_dmattn.attention, return_lse=True, backend="eager"), case, inputs)


@pytest.mark.parametrize("data", ("row -1e6", "row -1e9", "entry -1e30", "key 1e9"))
def test_rows_of_great_scores_have_a_probability(data: str) -> None:
    """Results pass as they are; those of great rows do not at three times or a third of it, nor do all others then."""
    inputs, results = results_of(GREAT.with_(data=data, seed=2))
    case = GREAT.with_(data=data, seed=2)
    assert_accurate(results, case, inputs)
    is_great = results["lse"].abs() > 1e5
    assert is_great.any()
    for name, rows in (("out", is_great), ("dq", is_great), ("lse", ~is_great), ("out", ~is_great)):
        for factor in (3.0, 1 / 3):
            by = torch.where(rows, factor, 1.0) if name == "lse" else torch.where(rows, factor, 1.0).mT.unsqueeze(-1)
            if torch.equal(results[name] * by, results[name]):
                continue  # one key has all of p, and nothing passes through to q; or no row is ordinary
            with pytest.raises(AssertionError, match=f"{name}: error"):
                assert_accurate({**results, name: results[name] * by}, case, inputs)
    with pytest.raises(AssertionError, match="dv: error"):
        assert_accurate({**results, "dv": results["dv"] * 3}, case, inputs)


def test_a_constant_of_each_row_may_leave_its_scores() -> None:
    """All scores of a row are equal after adding 1e30, in fp64 too; a backend that adds it only to lse is as right."""
    case = Case(dtype=torch.bfloat16, bias=("B", "1", "Lq", "1"), bias_dtype=torch.float32, data="key 1e30")
    case = case.with_(seqlen_k=176, head_dim=96, window_size=(-1, 2), needs_grad=("q",), seed=198)
    inputs = case.build("cpu")
    plain = yardstick(case.with_(bias=None, data="centred"), replace(inputs, bias=None))
    assert plain["out"] is not None and plain["dq"] is not None and plain["lse"] is not None
    assert inputs.bias is not None
    lse = plain["lse"] + inputs.bias.view(case.batch, 1, case.seqlen_q)
    results: Results = {"out": plain["out"], "dq": plain["dq"], "lse": lse}
    assert_accurate(results, case, inputs)
    for name in ("out", "dq"):
        with pytest.raises(AssertionError, match=f"{name}: error"):
            assert_accurate({**results, name: plain[name] * 1.02}, case, inputs)


def test_great_means_allow_no_wrong_softmax() -> None:
    """Scores of -1e4 in bfloat16: products rounded to 16 bits would be off by tens, and allow any p."""
    case = Case(dtype=torch.bfloat16, data="opposite 10000", seqlen_q=60, seqlen_k=80, head_dim=64)
    inputs, results = results_of(case)
    assert_accurate(results, case, inputs)
    for name in ("out", "dk", "dv"):
        with pytest.raises(AssertionError, match=f"{name}: error"):
            assert_accurate({**results, name: results[name] * 1.1}, case, inputs)


def test_a_nan_is_neither_lost_nor_made() -> None:
    """A row that sees one has it in all results; a product with a probability of 0 may have one or not."""
    case = Case(mask=("B", "1", "1", "Lk"), bias=("1", "Hq", "Lq", "Lk"), dlse=True, seqlen_q=20, seqlen_k=40)
    for data in ("seen nan q", "seen nan k", "seen inf bias", "hidden nan k", "hidden inf v", "hidden nan bias"):
        inputs, results = results_of(case.with_(data=data))
        assert_accurate(results, case.with_(data=data), inputs)
        for name in ("out", "lse", "dq", "dk", "dv", "dbias"):
            lost, made = (results[name].nan_to_num(0.0, 0.0), results[name].clone())
            made.view(-1)[0] = torch.nan
            if data.startswith("seen") and not torch.equal(lost, results[name]):
                with pytest.raises(AssertionError, match=f"{name}: NaN lost in [1-9]"):
                    assert_accurate({**results, name: lost}, case.with_(data=data), inputs)
            if name in ("lse", "out") and not results[name].view(-1)[0].isnan() and data != "hidden inf v":
                with pytest.raises(AssertionError, match=f"{name}: NaN lost in 0 places, made in 1"):
                    assert_accurate({**results, name: made}, case.with_(data=data), inputs)
