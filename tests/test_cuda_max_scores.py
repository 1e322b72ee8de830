"""The maximum scores of rows from the forward kernels of cuda: every kind of kernel. On a GPU or the emulated one.

Kernels subtract a number from scores that may be smaller than the maximum, by up to 8 in powers of 2, and compare
scores by their bits. Random calls ask for maxima, too (`draws.asking`).
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import sequence_calls
import torch
from cases import DEVICE, Case, Inputs
from conftest import Runner
from torch import Tensor

from flash_dmattn import AuxRequest, BackendUnsupportedError, attention
from flash_dmattn.backends.cuda import group_rows, passes
from flash_dmattn.backends.cuda.rules import INSTANCES

pytestmark = pytest.mark.parametrize("backend", ("cuda",), indirect=True)

BASE = Case(batch=2, seqlen_q=150, seqlen_k=520, head_dim=64, dtype=torch.bfloat16, needs_grad=())
REQUEST = AuxRequest(lse=True, max_scores=True)
CALLS: dict[str, dict[str, Any]] = {
    "dense": {},
    "causal": {"is_causal": True},
    "a window": {"window_size": (40, 9)},
    "groups": {"num_heads": 6, "num_heads_k": 2},
    "a softcap": {"softcap": 2.0},
    "a negative scale": {"softmax_scale": -0.7},
    "a scale of 0": {"softmax_scale": 0.0},
    "a sink": {"sink": "normal"},
    "one query of a group": {"seqlen_q": 1, "num_heads": 6, "num_heads_k": 2},
    "three consumers": {"seqlen_q": 400},
    "fewer keys than rows": {"seqlen_q": 300, "seqlen_k": 130, "is_causal": True},
    "one key": {"seqlen_k": 1},
    "no key": {"seqlen_k": 0},
}


def built(case: Case, level: float = 0.0) -> Inputs:
    """The tensors of a case; the products of q and k are about `level` larger, in a feature that only they have."""
    inputs = case.build()
    q, k = inputs.q.clone(), inputs.k.clone()
    if level:
        q[..., 0], k[..., 0] = level, 1.0
    return replace(inputs, q=q, k=k)


def check(case: Case, level: float = 0.0, inputs: Inputs | None = None) -> None:
    """Compare with eager, whose scores are in fp32, too; out and lse have the bits of a call that does not ask."""
    x = built(case, level) if inputs is None else inputs
    flags: dict[str, Any] = {**case.flags(), **case.dropping(), "sink": x.sink}
    operands = (x.q, x.k, x.v, x.mask, case.passed(x.bias))

    def run(backend: Any, **asked: Any) -> Any:
        torch.manual_seed(case.seed)
        return attention(*operands, backend=backend, **flags, **asked)

    out, aux = run("cuda", return_aux=REQUEST)
    assert_equal(aux.max_scores, run("eager", return_aux=REQUEST)[1].max_scores)
    for got, plain in zip((out, aux.lse), run("cuda", return_lse=True), strict=True):
        assert torch.equal(got, plain)


def maxima(backend: Any, *operands: Any) -> Tensor:
    asked: dict[str, Any] = {"backend": backend, "return_aux": REQUEST}
    largest: Tensor = attention(*operands, **asked)[1].max_scores
    return largest


def assert_equal(got: Tensor, want: Tensor) -> None:
    """Equal but for the order in which 64 products are summed in fp32."""
    assert got.dtype == torch.float32 and got.shape == want.shape
    torch.testing.assert_close(got, want, rtol=3e-6, atol=3e-6, equal_nan=True)


@pytest.fixture(autouse=True)
def where_it_runs(backend: Runner) -> None:
    """Skip where the backend does not work."""
    refusal = backend.refusal(BASE, BASE.build())
    if refusal is not None:
        pytest.skip(refusal)


@pytest.fixture(params=(1, 3), ids=("whole", "3 splits"))
def splits(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls whose keys one block walks, or three blocks, which combine what each has."""
    monkeypatch.setattr(passes, "NUM_KV_SPLITS", request.param)


@pytest.mark.usefixtures("splits")
@pytest.mark.parametrize("name", CALLS)
def test_calls(backend: Runner, name: str) -> None:
    check(BASE.with_(**CALLS[name]))


@pytest.mark.usefixtures("splits")
@pytest.mark.parametrize("dims", INSTANCES, ids=str)
@pytest.mark.parametrize("queries", (150, 400))
def test_kernels_of_all_head_dims(backend: Runner, dims: tuple[int, int], queries: int) -> None:
    case = BASE.with_(head_dim=dims[0], head_dim_v=dims[1], seqlen_q=queries, is_causal=True)
    refusal = backend.refusal(case, case.build())
    if refusal is not None:
        pytest.skip(refusal)
    check(case)


CLOSE = {"softmax_scale": 1.0, "logits": 0.02}  # scores are about their level


@pytest.mark.parametrize("level", (-3.0, -20.0, -300.0, 5.0, 2000.0))  # about -3 thresholds are positive
@pytest.mark.parametrize("name", ("dense", "causal", "a sink"))
@pytest.mark.usefixtures("splits")
def test_rows_about_a_level(backend: Runner, name: str, level: float) -> None:
    """All scores of a row are negative, or great."""
    check(BASE.with_(**CALLS[name] | CLOSE), level)


@pytest.mark.parametrize("levels", list(itertools.permutations((-9.0, -2.0, 0.0, 1.0, 3.0), 3)), ids=str)
@pytest.mark.parametrize("scale", (1.0, -1.0))
@pytest.mark.usefixtures("splits")
def test_scores_that_change_from_step_to_step(backend: Runner, levels: tuple[float, ...], scale: float) -> None:
    """The scores of a step are one number, of either sign in the rows of a warp; a scale of -1 makes -0 of 0."""
    case = BASE.with_(softmax_scale=scale, seqlen_k=384)
    inputs = built(case)
    for x in (inputs.q, inputs.k):
        x.zero_()
    inputs.q[..., 0] = 1 - torch.arange(case.seqlen_q, device=DEVICE)[:, None] % 3  # 1, 0 and -1
    inputs.k[..., 0] = torch.tensor(levels, device=DEVICE).repeat_interleave(128)[:, None].to(inputs.k.dtype)
    check(case, inputs=inputs)


# The GPU makes no negative NaN; the emulated one does, and a kernel only tells of it in a row without inf.
NEGATIVE_NAN = float(torch.tensor(torch.nan).copysign(torch.tensor(-1.0)))
SPECIAL = {"nan": torch.nan, "-nan": NEGATIVE_NAN, "inf": torch.inf, "-inf": -torch.inf, "nan beside inf": torch.nan}


@pytest.mark.parametrize("name", SPECIAL)
@pytest.mark.parametrize("place", ("q", "k"))
@pytest.mark.usefixtures("splits")
def test_nan_and_inf_are_told(backend: Runner, place: str, name: str) -> None:
    """Blocks of keys are walked from the last on, so maxima are there before key 4."""
    inputs = built(BASE)
    if name == "nan beside inf":
        inputs.k[0, 3, 0, 1] = torch.inf
    getattr(inputs, place)[0, 4, 0, 0] = SPECIAL[name]
    operands = (inputs.q, inputs.k, inputs.v)
    assert_equal(maxima("cuda", *operands), maxima("eager", *operands))


def test_what_no_row_sees_is_not_told(backend: Runner) -> None:
    inputs = built(BASE)
    inputs.k[:, 500:] = torch.nan
    operands: dict[str, Any] = {"is_causal": True, "return_aux": REQUEST}
    largest = attention(inputs.q, inputs.k, inputs.v, backend="cuda", **operands)[1].max_scores
    assert torch.equal(largest.isnan(), (torch.arange(150, device=DEVICE) >= 130).expand_as(largest))


REFUSED: dict[str, dict[str, Any]] = {
    "a mask": {"mask": ("B", "1", "Lq", "Lk")},
    "a bias": {"bias": ("1", "Hk", "1", "Lk")},
    "dropout": {"dropout_p": 0.1},
}


@pytest.mark.parametrize("name", REFUSED)
def test_calls_whose_kernels_write_none(backend: Runner, name: str) -> None:
    case = BASE.with_(**REFUSED[name])
    assert backend.refusal(case, case.build()) is None
    with pytest.raises(BackendUnsupportedError, match=f"max_scores is set and the call has {name}"):
        check(case)


def test_rows_of_a_group_are_several_queries(backend: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_rows, "LEAST_KEYS", 0)
    monkeypatch.setattr(group_rows, "MANY_KEYS", 0)
    for queries in (2, 7, 40):
        check(BASE.with_(seqlen_q=queries, num_heads=8, num_heads_k=2, is_causal=True))


@pytest.mark.parametrize("part", range(4))
def test_sequences(backend: Runner, part: int) -> None:
    """Rows of no sequence have -inf, whatever lies there."""
    ran = 0
    for number in range(part, 48, 4):
        drawn = replace(sequence_calls.draw_cuda(number), aux=("max_scores",), needs_grad=(), dlse=None)
        if drawn.data != "centred":
            continue
        try:
            got, want = (sequence_calls.run(sequence_calls.spoiled(drawn), each) for each in ("cuda", "eager"))
        except BackendUnsupportedError:  # a mask, or another dtype of the bias
            continue
        assert_equal(got["max_scores"], want["max_scores"])
        ran += 1
    assert ran > 0


def test_gradients_are_those_of_a_call_that_does_not_ask(backend: Runner) -> None:
    x = BASE.build()
    leaves = [t.detach().requires_grad_() for t in (x.q, x.k, x.v)]
    out, aux = attention(*leaves, backend="cuda", return_aux=REQUEST)
    assert not aux.max_scores.requires_grad
    first = torch.autograd.grad(out, leaves, x.dout)
    second = torch.autograd.grad(attention(*leaves, backend="cuda"), leaves, x.dout)
    for a, b in zip(first[1:], second[1:], strict=True):  # atomics sum dq
        assert torch.equal(a, b)
