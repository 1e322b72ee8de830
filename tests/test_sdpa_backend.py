"""Torch's kernels as backend "sdpa": gradients of calls without lse, the silent faults of these kernels, and the order.

On a GPU the calls run on its kernels. On a CPU emulations of these test what is around them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from accuracy import assert_accurate, run
from cases import DEVICE, Case, Inputs
from conftest import Runner
from torch import Tensor

import flash_dmattn
from flash_dmattn.backends.cuda import rules as cuda_rules
from flash_dmattn.backends.sdpa import backend, cuda, efficient
from flash_dmattn.dispatch import selection
from flash_dmattn.explanation import explain_description, explain_problem
from flash_dmattn.problem import AttentionProblem, NeedsGrad, SequenceSpec
from flash_dmattn.problem.inputs import Inputs as Operands
from flash_dmattn.problem.inputs import Saved
from flash_dmattn.reference import formula
from flash_dmattn.sequences import Sequences
from flash_dmattn.sequences.layout import token_places

QKV = ("q", "k", "v")
PLAIN = Case(seqlen_q=130, seqlen_k=197, num_heads=4, num_heads_k=4, head_dim=64, dtype=torch.bfloat16, needs_grad=QKV)
SCORES = ("B", "Hq", "Lq", "Lk")
CASES = {
    "plain": PLAIN,
    "fp16": PLAIN.with_(dtype=torch.float16),
    "more keys, causal": PLAIN.with_(is_causal=True),
    "more queries, causal": PLAIN.with_(seqlen_q=260, is_causal=True),
    "as many, causal": PLAIN.with_(seqlen_q=197, is_causal=True),
    "one query": PLAIN.with_(seqlen_q=1, is_causal=True),
    "one key": PLAIN.with_(seqlen_k=1),
    "window": PLAIN.with_(window_size=(40, 9)),
    "left window": PLAIN.with_(window_size=(40, -1), is_causal=True),
    "window, empty rows": PLAIN.with_(seqlen_q=260, window_size=(20, 0)),
    "groups": PLAIN.with_(num_heads_k=2),
    "one key-value head": PLAIN.with_(num_heads_k=1, is_causal=True),
    "scale": PLAIN.with_(softmax_scale=0.3),
    **{f"head dim {dim}": PLAIN.with_(head_dim=dim, is_causal=True) for dim in (8, 40, 128, 192, 256)},
    "fp32": PLAIN.with_(dtype=torch.float32),
    "fp32, causal": PLAIN.with_(dtype=torch.float32, is_causal=True),
    "head dim 20": PLAIN.with_(dtype=torch.float32, head_dim=20),
    "head dim 512": PLAIN.with_(head_dim=512),
    "another head dim of v": PLAIN.with_(head_dim_v=32),
    "bias": PLAIN.with_(bias=SCORES),
    "bias, causal": PLAIN.with_(bias=SCORES, is_causal=True),
    "bias of minus infinity": PLAIN.with_(bias=SCORES, bias_kind="inf"),
    **{
        f"bias {'-'.join(shape)}, dbias": PLAIN.with_(bias=shape, needs_grad=(*QKV, "bias"))
        for shape in (
            SCORES,
            ("1", "Hq", "Lq", "Lk"),
            ("B", "1", "Lq", "Lk"),
            ("1", "Hq", "1", "Lk"),
            ("B", "1", "Lq", "1"),
        )
    },
    "bias, dbias alone": PLAIN.with_(bias=("1", "1", "Lq", "Lk"), needs_grad=("bias",)),
    "fp32 bias, dbias": PLAIN.with_(dtype=torch.float32, bias=SCORES, needs_grad=(*QKV, "bias")),
}


def without_lse(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: Tensor | None, **flags: Any) -> Any:
    """(out, lse) of backend sdpa, by two calls: the first, which takes the gradients, returns no lse."""
    call = {"mask": mask, "bias": bias, "backend": "sdpa", **flags}
    refusal = flash_dmattn.explain(q, k, v, **call).error
    if refusal is not None:
        pytest.skip(refusal.partition("\n")[2])
    out = flash_dmattn.attention(q, k, v, **call)
    with torch.no_grad():
        return out, flash_dmattn.attention(q, k, v, return_lse=True, **call)[1]


@pytest.mark.parametrize("name", CASES)
def test_gradients_without_lse(name: str) -> None:
    """On GPUs a call that returns lse takes the gradients of another backend."""
    case = CASES[name]
    inputs = case.build()
    assert_accurate(run(without_lse, case, inputs), case, inputs)


# Calls of ours that some kernel of torch computes wrongly, without an error.

BASE = Case(num_heads=4, num_heads_k=4, head_dim=32, dtype=torch.float32)


def expanded(inputs: Inputs) -> Inputs:
    """The same with one key-value row for the whole batch, of stride 0."""
    return dataclasses.replace(inputs, k=inputs.k[:1].expand_as(inputs.k), v=inputs.v[:1].expand_as(inputs.v))


def transposed(inputs: Inputs) -> Inputs:
    """The same with head dims of another stride than 1."""
    return dataclasses.replace(inputs, **{name: getattr(inputs, name).mT.contiguous().mT for name in QKV})


def rows_of_min(inputs: Inputs) -> Inputs:
    """The same with a bias of finfo.min at every key of some queries, which rounds scores away."""
    assert inputs.bias is not None
    bias = inputs.bias.clone()
    bias[:, :, ::3] = torch.finfo(bias.dtype).min
    return dataclasses.replace(inputs, bias=bias)


FAULTS: dict[str, tuple[Case, Callable[[Inputs], Inputs]]] = {
    "fp32 mask with bf16": (BASE.with_(dtype=torch.bfloat16, bias_dtype=torch.float32, bias=SCORES), lambda x: x),
    "64 keys of 128, low lse": (
        BASE.with_(seqlen_q=192, seqlen_k=192, dtype=torch.bfloat16, bias=SCORES),
        lambda x: dataclasses.replace(x, bias=x.bias - 100),
    ),
    "few heads, one query": (
        BASE.with_(seqlen_q=1, seqlen_k=40, num_heads=2, num_heads_k=2, dtype=torch.bfloat16, bias=SCORES),
        lambda x: x,
    ),
    "expanded keys, one of 32": (BASE.with_(seqlen_q=33, seqlen_k=33, bias=SCORES, needs_grad=("q",)), expanded),
    "the mask alone needs a gradient": (BASE.with_(bias=SCORES, needs_grad=("bias",)), lambda x: x),
    "rows of another stride": (BASE.with_(bias=SCORES), transposed),
    "more queries than keys": (BASE.with_(seqlen_q=70, seqlen_k=33, bias=SCORES), lambda x: x),
    "keys that end in a unit": (BASE.with_(seqlen_q=197, seqlen_k=197, bias=SCORES, is_causal=True), lambda x: x),
    "scale below 0": (BASE.with_(seqlen_q=13, softmax_scale=-0.4, is_causal=True, bias=SCORES), lambda x: x),
    "huge scores": (BASE.with_(bias=SCORES, bias_kind="huge", needs_grad=QKV), lambda x: x),
    **{
        f"products of {size:g}{', causal' * is_causal}": (
            BASE.with_(seqlen_q=13, logits=size, is_causal=is_causal, needs_grad=QKV),
            lambda x: x,
        )
        for size in (1e19, 1e30)
        for is_causal in (False, True)
    },
    "rows of finfo.min": (BASE.with_(bias=SCORES, needs_grad=QKV), rows_of_min),
    "causal rows of finfo.min": (
        BASE.with_(seqlen_q=33, seqlen_k=33, is_causal=True, bias=SCORES, needs_grad=QKV),
        rows_of_min,
    ),
    "rows of finfo.min in 16 bits": (BASE.with_(dtype=torch.bfloat16, bias=SCORES, needs_grad=QKV), rows_of_min),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_torch_is_none_of_a_call(name: str) -> None:
    case, change = FAULTS[name]
    if change is rows_of_min and DEVICE != "cpu":
        pytest.skip("finfo.min counts as -inf there (docs/backends.md)")
    inputs = change(case.build())
    assert_accurate(Runner("sdpa")(case, inputs), case, inputs)


@pytest.mark.skipif(DEVICE == "cpu", reason="kernels on a CPU see it as the number it is")
def test_rows_of_finfo_min_are_empty_on_a_gpu() -> None:
    case = FAULTS["rows of finfo.min"][0]
    inputs = rows_of_min(case.build())
    assert inputs.bias is not None
    empty = dataclasses.replace(inputs, bias=inputs.bias.masked_fill(inputs.bias < -1e38, -torch.inf))
    assert_accurate(Runner("sdpa")(case, inputs), case, empty)


@pytest.mark.skipif(DEVICE != "cpu", reason="a mask is refused by a rule there")
def test_nan_in_hidden_keys_stays_hidden() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 6, 2, 8) for _ in range(3))
    mask = torch.rand(1, 1, 6, 6) < 0.5
    mask[..., 0], mask[..., 3] = True, False
    wanted = flash_dmattn.attention(q, k, v, mask, backend="sdpa")
    k[:, 3] = torch.nan
    assert torch.equal(flash_dmattn.attention(q, k, v, mask, backend="sdpa"), wanted)
    mask[..., 2, 3] = True
    out = flash_dmattn.attention(q, k, v, mask, backend="sdpa")
    assert out[:, 2].isnan().all() and torch.equal(out[:, 3:], wanted[:, 3:])


GREAT = Case(seqlen_q=34, seqlen_k=63, num_heads=4, num_heads_k=2, needs_grad=QKV, dlse=True)
UNCENTRED = (
    GREAT.with_(bias=("1", "1", "1", "1"), data="row -1e9"),
    GREAT.with_(bias=("B", "1", "Lq", "1"), data="key 1e9", dtype=torch.bfloat16),
    GREAT.with_(bias=("1", "Hq", "Lq", "Lk"), data="entry -1e9", mask=SCORES, mask_kind="empty_rows"),
    GREAT.with_(mask=SCORES, mask_kind="empty_rows", window_size=(20, 1), data="hidden nan k"),
    GREAT.with_(mask=SCORES, data="hidden inf k"),
    GREAT.with_(mask=("1", "1", "1", "Lk"), mask_kind="none_allowed", data="seen inf k"),
    GREAT.with_(window_size=(-1, 20), data="seen inf q"),
    GREAT.with_(window_size=(20, 1), data="seen nan k", dtype=torch.float16),
)


@pytest.mark.skipif(DEVICE != "cpu", reason="rules refuse such a bias or mask there")
@pytest.mark.parametrize("case", UNCENTRED, ids=str)
def test_gradients_beside_great_and_spoiled_numbers(case: Case) -> None:
    inputs = case.build()
    assert_accurate(Runner("sdpa")(case, inputs), case, inputs)


# Operators of GPUs, emulated: what they return is what docs/notes/torch_kernels.md says of them.


def _pair(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, **band: Any) -> tuple[Tensor, Tensor]:
    assert all(x.stride(3) == 1 and 0 not in x.stride() for x in (q, k, v))
    return formula.attention(q, k, v, None, bias, **band)


def flash_forward(
    q: Any, k: Any, v: Any, a: Any, b: Any, lq: int, lk: int, p: float, causal: bool, debug: bool, **n: Any
) -> Any:
    assert (a, b, p, debug) == (None, None, 0.0, False) and (lq, lk) == (q.shape[1], k.shape[1])
    window = (n.get("window_size_left", -1), n.get("window_size_right", -1))
    out, lse = _pair(q, k, v, None, is_causal=causal, window_size=window, softmax_scale=n["scale"])
    return out, lse.masked_fill(lse == -torch.inf, torch.inf), None, None, None


def flash_backward(dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, a: Any, b: Any, *rest: Any, **n: Any) -> Any:
    lengths, causal = rest[:2], rest[3]
    assert lengths == (q.shape[1], k.shape[1])
    window = (n.get("window_size_left", -1), n.get("window_size_right", -1))
    flags = {"is_causal": causal, "window_size": window, "softmax_scale": n["scale"]}
    return formula.gradients(dout, None, q, k, v, None, None, **flags)[:3]


def efficient_forward(
    q: Any, k: Any, v: Any, bias: Any, a: Any, b: Any, c: Any, d: Any, p: float, kind: int, lse: bool, *, scale: float
) -> Any:
    assert (a, b, c, d, p, lse) == (None, None, None, None, 0.0, True) and q.shape[2] == k.shape[2]
    readable(bias, q)
    out, lse_rows = _pair(q, k, v, bias, is_causal=kind == 2, softmax_scale=scale)
    padded = F.pad(lse_rows.masked_fill(lse_rows == -torch.inf, 0.0), (0, -q.shape[1] % 32), value=torch.inf)
    return out, padded, None, None, None, None


def readable(bias: Tensor | None, q: Tensor) -> None:
    """Fail where the kernel cannot read a bias."""
    if bias is not None:
        assert bias.shape[:3] == (q.shape[0], q.shape[2], q.shape[1]) and bias.dtype == q.dtype
        assert bias.stride(3) == 1 and all(stride % 8 == 0 for stride in bias.stride()[:3])


def efficient_backward(
    dout: Any, q: Any, k: Any, v: Any, bias: Any, out: Any, a: Any, b: Any, *rest: Any, scale: float
) -> Any:
    *lengths, lse, _, _, _, kind, _ = rest
    assert (
        tuple(lengths) == (q.shape[1], k.shape[1])
        and lse.shape[2] % 32 == 0
        and lse.isfinite()[..., : q.shape[1]].all()
    )
    readable(bias, q)
    return formula.gradients(dout, None, q, k, v, None, bias, is_causal=kind == 2, softmax_scale=scale)


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, forward, backward in (
        (cuda, flash_forward, flash_backward),
        (efficient, efficient_forward, efficient_backward),
    ):
        monkeypatch.setattr(module, "_FORWARD", forward)
        monkeypatch.setattr(module, "_BACKWARD", backward)


@pytest.mark.parametrize("name", CASES)
def test_what_is_around_the_operators_of_gpus(name: str, emulated: None) -> None:
    case = CASES[name]
    inputs = case.build("cpu")

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: None, bias: Tensor | None, **flags: Any) -> Any:
        problem = flash_dmattn.explain(q, k, v, bias=bias, device="sm_80", **flags).problem
        refused = backend.BACKEND.broken_rules(problem, ("forward", "backward"))
        if refused:
            pytest.skip(str(refused[0]))
        return OnEmulation.apply(problem, q, k, v, bias)

    assert_accurate(run(attend, case, inputs), case, inputs)


class OnEmulation(torch.autograd.Function):
    """Both passes of a problem of a GPU, on tensors of the CPU."""

    @staticmethod
    def forward(ctx: Any, problem: Any, *tensors: Tensor | None) -> Any:
        x = Operands(*(None if t is None else t.detach() for t in tensors[:3]), bias=tensors[3])
        ctx.problem, ctx.saved = problem, x
        out, lse = backend.BACKEND.plan_forward(problem._replace(needs_grad=NeedsGrad()))(x)
        ctx.out, ctx.lse = out, lse
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor, dlse: Any) -> Any:
        run_backward = backend.BACKEND.plan_backward(ctx.problem)
        return None, *run_backward(Saved(ctx.saved, ctx.out, ctx.lse), dout, None)


def packed_forward(q: Any, k: Any, v: Any, cu_q: Any, cu_k: Any, *rest: Any, scale: float) -> Any:
    longest, is_causal = rest[:2], rest[3]
    assert longest[0] > 1, "the kernel takes row i for sequence i"
    out, lse = torch.full_like(q, torch.nan), torch.full((q.shape[1], len(q)), torch.nan)
    for queries, keys in sequences_of(cu_q, cu_k, longest):
        flags = {"is_causal": is_causal, "softmax_scale": scale}
        results = formula.attention(q[None, queries], k[None, keys], v[None, keys], **flags)
        out[queries], lse[:, queries] = (x[0] for x in results)
    return out, lse.masked_fill(lse == -torch.inf, torch.inf), None, None, None


def packed_backward(
    dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, cu_q: Any, cu_k: Any, *rest: Any, **n: Any
) -> Any:
    gradients = [torch.full_like(x, torch.nan) for x in (q, k, v)]
    for queries, keys in sequences_of(cu_q, cu_k, rest[:2]):
        flags = {"is_causal": rest[3], "softmax_scale": n["scale"]}
        tensors = (dout[None, queries], None, q[None, queries], k[None, keys], v[None, keys])
        for x, own, part in zip(gradients, (queries, keys, keys), formula.gradients(*tensors, None, None, **flags)):
            x[own] = part[0]
    return gradients


def sequences_of(cu_q: Tensor, cu_k: Tensor, longest: tuple[int, int]) -> list[tuple[slice, slice]]:
    """Return the rows of each sequence; what is longer than a bound is not computed."""
    assert cu_q.dtype == cu_k.dtype == torch.int32 and cu_q.is_contiguous() and cu_k.is_contiguous()
    sides = [[slice(*edges) for edges in pairwise(cu.tolist())] for cu in (cu_q, cu_k)]
    return [pair for pair in zip(*sides) if all(s.stop - s.start <= most for s, most in zip(pair, longest))]


PACKED: dict[str, tuple[Sequences, int, int]] = {
    "self-attention": (Sequences.packed(torch.tensor([0, 5, 5, 12]), max_seqlen_q=7), 12, 12),
    "rows behind the last": (Sequences.packed(torch.tensor([0, 5, 12])), 15, 15),
    "more queries, and no keys": (Sequences.packed(torch.tensor([0, 9, 13]), torch.tensor([0, 4, 4])), 13, 6),
    "tokens that are not used": (
        Sequences.packed(
            torch.tensor([0, 8, 12]),
            torch.tensor([0, 6, 12]),
            max_seqlen_q=6,
            max_seqlen_k=6,
            seqlens_q=torch.tensor([2, 4]),
            seqlens_k=torch.tensor([6, 1]),
        ),
        12,
        12,
    ),
    "one query each": (Sequences.packed(torch.tensor([0, 1, 2]), torch.tensor([0, 4, 5]), max_seqlen_q=1), 3, 5),
    "none": (Sequences.packed(torch.tensor([0])), 4, 4),
    "no keys": (Sequences.packed(torch.tensor([0, 4]), torch.tensor([0, 0])), 4, 0),
}


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("name", PACKED)
def test_packed_sequences_around_the_operators_of_gpus(
    name: str, is_causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda, "_FORWARD", packed_forward)
    monkeypatch.setattr(cuda, "_BACKWARD", packed_backward)
    torch.manual_seed(0)
    sequences, rows_q, rows_k = PACKED[name]
    q, dout = torch.randn(2, rows_q, 4, 8, dtype=torch.float16)
    k, v = torch.randn(2, rows_k, 2, 8, dtype=torch.float16)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    call: dict[str, Any] = {"sequences": sequences, "is_causal": is_causal}
    explanation = flash_dmattn.explain(*leaves, **call, backend="sdpa", device="sm_80")
    assert (explanation.forward, explanation.backward) == ("sdpa", "sdpa")
    _, view = sequences.describe_with_view(q, k, v)
    x = Operands(*(t.detach()[None] for t in leaves), sequences=view)
    problem = explanation.problem
    out, lse = backend.BACKEND.plan_forward(problem)(x)
    gradients = backend.BACKEND.plan_backward(problem)(Saved(x, out, lse), dout[None], None)[:3]
    wanted = flash_dmattn.attention(*leaves, **call, return_lse=True, backend="eager")
    exact = (*wanted, *torch.autograd.grad(wanted[0], leaves, dout))
    for y, z in zip((out, lse, *gradients), exact, strict=True):
        assert y is not None and y.is_contiguous()
        torch.testing.assert_close(y[0], z, rtol=2e-3, atol=2e-3)


@pytest.mark.skipif(DEVICE == "cpu", reason="a rule refuses sequences there")
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(
    "heads_k, dim, dtype", [(4, 64, torch.bfloat16), (1, 128, torch.float16), (2, 256, torch.bfloat16)]
)
@pytest.mark.parametrize("rows", ["all used", "some unused", "one query each"])
def test_packed_sequences_on_a_gpu(rows: str, heads_k: int, dim: int, dtype: torch.dtype, is_causal: bool) -> None:
    """Rows of no sequence hold NaN. Some sequences have more queries than keys, and one has no key."""
    torch.manual_seed(0)
    edges_q, edges_k = ([0, 300, 300, 429, 430, 700, 760], [0, 130, 131, 260, 900, 1170, 1170])
    used: dict[str, Tensor] = {}
    if rows == "one query each":
        edges_q = list(range(7))
    if rows == "some unused":
        lengths = {"seqlens_q": [290, 0, 1, 1, 200, 60], "seqlens_k": [130, 1, 64, 640, 200, 0]}
        used = {name: torch.tensor(values, device=DEVICE) for name, values in lengths.items()}
    cu = [torch.tensor(edges, device=DEVICE) for edges in (edges_q, edges_k)]
    most = 1 if rows == "one query each" else 300
    sequences = Sequences.packed(*cu, max_seqlen_q=most, max_seqlen_k=640, **used)
    q, dout = torch.randn(2, 777, 4, dim, dtype=dtype, device=DEVICE)
    k, v = torch.randn(2, 1200, heads_k, dim, dtype=dtype, device=DEVICE)
    _, view = sequences.describe_with_view(q, k, v)
    inside_q, inside_k = (
        token_places(view.bounds[:, side].repeat(1, 2), 1, len(x), is_packed=True).is_used
        for side, x in (((0, 1), q), ((2, 3), k))
    )
    call: dict[str, Any] = {"sequences": sequences, "is_causal": is_causal}

    def run_on(name: str, *tensors: Tensor) -> tuple[Tensor, ...]:
        leaves = [x.detach().requires_grad_() for x in tensors]
        out = flash_dmattn.attention(*leaves, **call, backend=name)
        gradients = torch.autograd.grad(out, leaves, dout.to(out.dtype))
        with torch.no_grad():
            lse = flash_dmattn.attention(*leaves, **call, backend=name, return_lse=True)[1]
        return out, lse, *gradients

    exact = run_on("eager", *(x.double() for x in (q, k, v)))
    spoilt = (
        x.masked_fill(~inside[:, None, None], torch.nan) for x, inside in ((q, inside_q), (k, inside_k), (v, inside_k))
    )
    for x, wanted in zip(run_on("sdpa", *spoilt), exact, strict=True):
        assert torch.equal(x.isneginf(), wanted.isneginf())
        error = (x.double() - wanted).nan_to_num(0.0, 0.0, 0.0) if x.dim() == 2 else x.double() - wanted
        assert error.norm() <= 5e-3 * wanted.masked_fill(wanted.isinf(), 0.0).norm()


@pytest.mark.parametrize("module", [cuda, efficient])
def test_the_operators_have_these_arguments(module: Any) -> None:
    """torch 2.9 and later have them."""
    wanted = {cuda: ({"scale", "window_size_left", "window_size_right"}, 10, 14), efficient: ({"scale"}, 11, 16)}
    keywords, forward, backward_arguments = wanted[module]
    for operator, positional in ((module._FORWARD, forward), (module._BACKWARD, backward_arguments)):
        arguments = operator._schema.arguments
        assert sum(not x.kwarg_only for x in arguments) == positional
        assert keywords <= {x.name for x in arguments if x.kwarg_only}


# Rules and order

CALL: dict[str, Any] = {"q": (2, 1024, 16, 64), "dtype": "bf16"}
ROWS: dict[str, Any] = {"q": (1, 4096, 16, 64), "sequences": SequenceSpec("packed", 8, 4096, 4096, 1024, 1024)}
# More calls than the examples of the rules.
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "more queries, causal, bias": (
        {"device": "sm_80", "seqlen_k": 512, "is_causal": True, "bias": (1, 16, 1024, 512)},
        "gpu_band",
    ),
    "AMD, more keys, causal": ({"device": "gfx942", "seqlen_k": 2048, "is_causal": True}, "rocm"),
    "AMD, bias": ({"device": "gfx942", "bias": (1, 16, 1024, 1024)}, "rocm"),
    "AMD, packed": (ROWS | {"device": "gfx942"}, "sequences"),
    "packed on a CPU": (ROWS | {"device": "cpu"}, "sequences"),
    "a batch beyond the grid": ({"device": "sm_90", "q": (65536, 49, 4, 32), "dtype": "fp32"}, "gpu_grid"),
    "heads beyond the grid": ({"device": "sm_80", "q": (1, 8, 65536, 64)}, "gpu_grid"),
    "packed, gaps beyond the grid": (
        {**ROWS, "device": "sm_80", "sequences": SequenceSpec("packed", 2**15 + 1, 4096, 4096, 64, 64)},
        "gpu_grid",
    ),
    "packed, window": (ROWS | {"device": "sm_80", "window_size": (64, 0)}, "gpu_window"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_fault_or_a_lack_is_a_rule(name: str) -> None:
    call, code = REFUSED[name]
    (verdict,) = (x for x in explain_problem(**CALL | call).verdicts if x.backend == "sdpa")
    assert [reason.code for reason in verdict.reasons] == [code]


MASK, BIAS = {"mask": (1, 1, 1024, 1024)}, {"bias": (1, 16, 1024, 1024)}
FP32, FP32_DBIAS = {"dtype": "fp32"}, {"dtype": "fp32", **BIAS, "grad": True, "bias_grad": True}
ORDERS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "plain": ({}, ["sdpa", "flex", "triton"]),
    "causal, groups, gradients": ({"is_causal": True, "kv_heads": 4, "grad": True}, ["sdpa", "flex", "triton"]),
    "mask": (MASK, ["flex", "triton", "sdpa"]),
    "bias": (BIAS, ["flex", "triton", "sdpa"]),
    "dbias": (BIAS | {"bias_grad": True}, ["triton", "flex", "sdpa"]),
    "fp32": (FP32, ["sdpa", "flex", "triton"]),
    "fp32, dbias": (FP32_DBIAS, ["sdpa", "triton", "flex"]),
    "packed": (ROWS, ["triton", "sdpa", "flex"]),
    "packed, window": (ROWS | {"window_size": (64, 0)}, ["triton", "sdpa", "flex"]),
}


@pytest.mark.parametrize("device", ["sm_80", "sm_89", "sm_100", "sm_120", "gfx942"])
@pytest.mark.parametrize("name", ORDERS)
def test_the_order_of_auto_on_gpus_that_nobody_measured(name: str, device: str) -> None:
    call, order = ORDERS[name]
    if device == "gfx942" and name.startswith("fp32"):  # torch's kernel for fp32 is not there
        order = sorted(order, key=(["triton", "flex", "sdpa"] if "bias" in call else ["flex", "triton", "sdpa"]).index)
    explanation = explain_problem(**CALL | call | {"device": device})
    asked = [each.name for each, rules in selection.candidates(explanation.problem)]
    assert list(dict.fromkeys(x for x in asked if x in order)) == order
    assert asked[0] == "cuda" and asked[-2:] == ["eager", "reference"]
    if device != "gfx942":
        assert explanation.profile is not None and f"auto asks {', '.join(order)} in this order" in explanation.profile


@pytest.mark.parametrize("name", ORDERS)
def test_on_hopper_sdpa_comes_after_all_kernels_but_in_fp32_on_cuda_cores(name: str) -> None:
    problem = explain_problem(**CALL | ORDERS[name][0] | {"device": "sm_90"}).problem
    asked = [each.name for each, _ in selection.candidates(problem)]
    assert asked == ["cuda", "triton", "flex", "cuda", "sdpa", "eager", "reference"]
    problem = explain_problem(q=(4, 2048, 16, 256), dtype="fp32", device="sm_90").problem
    asked = [each.name for each, _ in selection.candidates(problem)]
    assert asked == ["cuda", "cuda", "sdpa", "triton", "flex", "eager", "reference"]


def with_tf32(problem: AttentionProblem) -> AttentionProblem:
    return problem._replace(flags=problem.flags._replace(allows_tf32=True))


OURS, TORCHS = ("triton", "triton"), ("sdpa", "sdpa")
# On a Hopper GPU and on another one, the backends of both passes of a call in fp32 whose products take no TF32.
IN_FP32: dict[str, tuple[dict[str, Any], tuple[str, str], tuple[str, str]]] = {
    "shared bias": ({"q": (8, 512, 16, 48), "bias": (1, 16, 512, 512)}, OURS, TORCHS),
    "plain": ({"q": (4, 2048, 16, 64)}, OURS, TORCHS),
    # Pieces of wide heads do not fit in registers.
    "wide": ({"q": (4, 2048, 16, 256)}, TORCHS, TORCHS),
    "wide, small": ({"q": (1, 512, 16, 256)}, OURS, TORCHS),
    "wide, decoding": ({"q": (512, 16, 16, 256), "seqlen_k": 2048}, OURS, TORCHS),
    # A gradient of a shared bias is made for each score first: 256 MiB are the most, unless the bias itself is larger.
    "triangle": ({"q": (256, 256, 4, 32), "bias": (1, 4, 256, 256)}, OURS, TORCHS),
    "larger triangle": ({"q": (257, 256, 4, 32), "bias": (1, 4, 256, 256)}, OURS, OURS),
    "own bias": ({"q": (257, 256, 4, 32), "bias": (257, 4, 256, 256)}, OURS, TORCHS),
    # Rules of sdpa refuse a pass; the next backend takes it.
    "wide, lse": ({"q": (4, 2048, 16, 256), "return_lse": True}, ("sdpa", "triton"), ("sdpa", "triton")),
    "wide, mask": ({"q": (4, 2048, 16, 256), "mask": (4, 1, 1, 2048)}, OURS, ("flex", "flex")),
    "many windows": ({"q": (65536, 49, 4, 32)}, OURS, ("flex", "flex")),
    "wide, groups": ({"q": (4, 2048, 16, 256), "kv_heads": 4}, OURS, ("flex", "flex")),
}


@pytest.mark.parametrize("name", IN_FP32)
def test_auto_takes_the_faster_kernel_in_fp32(name: str) -> None:
    call, on_hopper, elsewhere = IN_FP32[name]
    for device, wanted in (("sm_90", on_hopper), ("sm_80", elsewhere), ("sm_89", elsewhere), ("sm_120", elsewhere)):
        grad = {"grad": True, "bias_grad": "bias" in call}
        explanation = explain_problem(**call, **grad, dtype="fp32", device=device)
        assert (explanation.forward, explanation.backward) == wanted, device
        (verdict,) = (x for x in explanation.verdicts if x.backend == "sdpa")
        on_cores = device in ("sm_89", "sm_120") or name.startswith("wide")
        why = "triton multiplies on CUDA cores here" if on_cores else f"triton is not timed on {device}"
        leads = [f"auto asks it first in float32, because {why}" in note for note in verdict.notes]
        assert any(leads) == (wanted == TORCHS)
        allowed = explain_description(with_tf32(explanation.problem), "auto")
        assert allowed.forward == ("triton" if device == "sm_90" or "bias" in call else "flex")


HOW = {
    (False, "sm_90", 64): "by three products of float16 on tensor cores, with the error of float32",
    (False, "sm_80", 64): "by three products of float16 on tensor cores, with the error of float32",
    (False, "sm_80", 128): "on CUDA cores: a head dim is above 64, where pieces of 16 bits do not fit in registers",
    (False, "sm_90", 256): "on CUDA cores: a head dim is above 128, where pieces of 16 bits do not fit in registers",
    (False, "sm_89", 64): "on CUDA cores: pieces of 16 bits gain nothing on sm_89",
    (True, "sm_90", 64): "by three products of bfloat16 on tensor cores, with a relative error of about 1e-5",
    (True, "sm_89", 64): "in TF32 on tensor cores, with a relative error of about 1e-3",
}


@pytest.mark.parametrize("allows, device, dim", HOW)
def test_explain_says_how_fp32_is_multiplied(allows: bool, device: str, dim: int) -> None:
    problem = explain_problem(q=(4, 1024, 16, dim), dtype="fp32", device=device).problem
    explanation = explain_description(with_tf32(problem) if allows else problem, "triton")
    (verdict,) = (x for x in explanation.verdicts if x.backend == "triton")
    setting = f"torch's float32 matmul precision is {'high' if allows else 'highest'!r}"
    assert verdict.notes == (f"multiplies in float32 {HOW[allows, device, dim]} ({setting})",)


def test_a_call_in_fp32_goes_on_where_sdpa_is_switched_off() -> None:
    with flash_dmattn.config(disabled="sdpa"):
        for device, wanted in (("sm_90", "triton"), ("sm_80", "flex")):
            assert explain_problem(q=(4, 2048, 16, 64), dtype="fp32", device=device, grad=True).backward == wanted


# AlphaFold's models keep their pair bias in fp32 with q in 16 bits: no pass goes to a backend of last resort, none to
# flex if the bias has a gradient, and both go to the same backend.
BIAS_IN_FP32: dict[str, dict[str, Any]] = {
    "shared": {"q": (8, 512, 16, 48), "bias": (1, 16, 512, 512)},
    "own": {"q": (4, 2048, 16, 64), "bias": (4, 16, 2048, 2048)},
    "odd": {"q": (8, 509, 16, 64), "bias": (1, 16, 509, 509)},
    "wide": {"q": (4, 2048, 16, 256), "bias": (1, 16, 2048, 2048)},
    "masked": {"q": (256, 256, 4, 32), "bias": (1, 4, 256, 256), "mask": (256, 1, 1, 256)},
    "packed": {**ROWS, "bias": (1, 16, 1024, 1024)},
    "dropout": {"q": (8, 512, 16, 48), "bias": (1, 16, 512, 512), "dropout_p": 0.1},
    "fixed order": {"q": (8, 512, 16, 48), "bias": (1, 16, 512, 512), "deterministic": True},
}


@pytest.mark.parametrize("device", ["sm_80", "sm_89", "sm_90", "sm_100", "sm_120"])
@pytest.mark.parametrize("name", BIAS_IN_FP32)
def test_a_bias_in_fp32_beside_16_bits_has_kernels_for_both_passes(
    name: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_rules, "installed_instances", lambda: None)  # all, whatever is built here
    has_tiles = device == "sm_90" and name not in ("wide", "packed", "dropout")  # the kernels of cuda
    for dtype in ("bf16", "fp16"):
        call = {**BIAS_IN_FP32[name], "dtype": dtype, "bias_dtype": "fp32", "device": device}
        explanation = explain_problem(**call, grad=True, bias_grad=True)
        assert explanation.forward == explanation.backward == ("cuda" if has_tiles else "triton")


def chosen(**call: Any) -> tuple[str | None, str | None]:
    explanation = explain_problem(**CALL | {"device": "cpu", "dtype": "fp32", "grad": True} | call)
    return explanation.forward, explanation.backward


def test_the_choice_of_each_pass_on_a_cpu() -> None:
    small = (1, 8, 2, 16)
    assert chosen() == chosen(**MASK) == chosen(**BIAS) == ("sdpa", "sdpa")
    assert chosen(is_causal=True) == chosen(**BIAS, bias_grad=True) == ("sdpa", "eager")
    assert chosen(is_causal=True, **MASK) == ("eager", "eager") and chosen(is_causal=True, **BIAS) == ("sdpa", "eager")
    assert chosen(window_size=(9, 0)) == chosen(seqlen_k=2048, is_causal=True) == ("eager", "eager")
    assert chosen(q=small, window_size=(3, 0)) == chosen(q=small, is_causal=True) == ("sdpa", "sdpa")
    assert chosen(dtype="fp64") == chosen(dtype="bf16") == chosen(**MASK, mask_prepared=True) == ("eager", "eager")
    assert chosen(q=small, dtype="fp64") == chosen(q=small, dtype="bf16") == ("sdpa", "sdpa")
    assert chosen(q=(1, 64, 4, 64), dtype="bf16") == ("eager", "eager")


@pytest.mark.parametrize(
    "q, kv_heads, keys, backend_of_it",
    [
        ((1, 1, 32, 64), 8, 512, "sdpa"),  # little work
        ((1, 1, 32, 64), 8, 2048, "eager"),
        ((1, 1, 32, 128), 8, 2048, "sdpa"),  # four rows of a product
        ((1, 2, 32, 128), 8, 2048, "eager"),
        ((1, 16, 8, 64), 2, 512, "sdpa"),  # little work of each query
        ((1, 16, 32, 64), 8, 2048, "eager"),
        ((1, 17, 32, 64), 8, 2048, "sdpa"),  # many rows of a product
        ((1, 4, 32, 64), 16, 4096, "sdpa"),  # groups of two
    ],
)
@pytest.mark.parametrize("has_mask", [False, True])
def test_few_queries_of_groups_on_a_cpu(
    q: tuple[int, ...], kv_heads: int, keys: int, backend_of_it: str, has_mask: bool
) -> None:
    call: dict[str, Any] = {"q": q, "kv_heads": kv_heads, "seqlen_k": keys, "grad": False}
    if has_mask:
        call["mask"] = (1, 1, 1, keys)
    assert chosen(**call)[0] == backend_of_it


@pytest.mark.parametrize(
    "keys, key_mask, pair_mask",
    [(256, "sdpa", "sdpa"), (400, "eager", "eager"), (1024, "sdpa", "eager"), (4096, "sdpa", "sdpa")],
)
def test_causality_beside_a_mask_on_a_cpu(keys: int, key_mask: str, pair_mask: str) -> None:
    call: dict[str, Any] = {"q": (1, keys, 8, 64), "is_causal": True}
    assert chosen(**call, mask=(1, 1, 1, keys))[0] == key_mask
    assert chosen(**call, mask=(1, 1, keys, keys))[0] == pair_mask
    assert chosen(**call, bias=(1, 8, keys, keys))[0] == key_mask


@pytest.mark.parametrize(
    "keys, kv_heads, backend_of_it", [(512, 2, "eager"), (256, 2, "sdpa"), (512, 8, "sdpa"), (1024, 2, "sdpa")]
)
def test_causality_of_groups_on_a_cpu(keys: int, kv_heads: int, backend_of_it: str) -> None:
    assert chosen(q=(1, keys, 8, 64), kv_heads=kv_heads, is_causal=True)[0] == backend_of_it


def test_explain_names_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    def notes(**call: Any) -> tuple[str, ...]:
        (verdict,) = (x for x in explain_problem(**CALL | call).verdicts if x.backend == "sdpa")
        return verdict.notes

    impl = "current_flash_attention_impl"
    monkeypatch.setattr(torch.nn.attention, impl, lambda: None, raising=False)
    assert notes(device="sm_80") == ("runs FlashAttention-2 of torch",)
    monkeypatch.setattr(torch.nn.attention, impl, lambda: "FA4", raising=False)
    assert notes(device="sm_90") == ("runs FA4 of torch",)
    efficient, products = "runs torch's memory-efficient attention", " by three products of TF32 on tensor cores"
    assert notes(device="sm_80", dtype="fp32") == (
        f"{efficient}{products}; auto asks it first in float32, because triton is not timed on sm_80",
    )
    assert notes(device="sm_90", dtype="fp32", q=(1, 512, 16, 64)) == (efficient + products,)
    assert notes(device="sm_80", **BIAS) == (efficient,)
    assert notes(device="cpu", **MASK) == ("adds the mask to the scores, as 2.0 MB of bfloat16",)


@pytest.mark.parametrize("seqlen", [191, 192, 300, 1024, 1025])
def test_causal_blocks_join_to_whole_rows(seqlen: int) -> None:
    """Plain causal calls of 192 to 1024 queries run in blocks on a CPU."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, seqlen, heads, 16) for heads in (4, 2, 2))
    results = flash_dmattn.attention(q, k, v, is_causal=True, return_lse=True, backend="sdpa")
    wanted = flash_dmattn.attention(q, k, v, is_causal=True, return_lse=True, backend="eager")
    assert all(x.is_contiguous() for x in results)
    torch.testing.assert_close(results, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rows", [1, 40])
def test_padding_on_the_left_leaves_causal_rows_empty(rows: int) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 40, 2, 16) for _ in range(3))
    mask = (torch.arange(40) >= 7).expand(2, 1, rows, 40).clone()
    mask[1] = True
    out, lse = flash_dmattn.attention(q, k, v, mask, is_causal=True, return_lse=True, backend="sdpa")
    assert not out[0, :7].any() and lse[0, :, :7].isneginf().all()
    wanted = flash_dmattn.attention(q, k, v, mask, is_causal=True, return_lse=True, backend="eager")
    torch.testing.assert_close((out, lse), wanted, rtol=1e-5, atol=1e-5)
