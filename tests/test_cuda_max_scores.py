"""The maximum scores of rows from the forward kernels of cuda: every kind of kernel. On a GPU or the emulated one.

Kernels subtract a number from scores that may be smaller than the maximum, by up to 8 in powers of 2, and compare
scores by their bits. Random calls ask for maxima, too (`draws.asking`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import sequence_calls
import torch
from cases import DEVICE, Case, Inputs, Numbers
from conftest import Runner
from torch import Tensor

from flash_dmattn import AuxRequest, BackendUnsupportedError, attention
from flash_dmattn.backends.cuda import group_rows, passes
from flash_dmattn.masks import PreparedMask

pytestmark = pytest.mark.parametrize("backend", ("cuda",), indirect=True)

BASE = Case(batch=2, seqlen_q=150, seqlen_k=520, head_dim=64, dtype=torch.bfloat16, needs_grad=())
REQUEST = AuxRequest(lse=True, max_scores=True)
MASK = FULL = ("B", "Hq", "Lq", "Lk")
TILES, ROWS, KEYS = ("1", "Hk", "Lq", "Lk"), ("B", "Hq", "Lq", "1"), ("1", "Hk", "1", "Lk")
PADDING = ("B", "1", "1", "Lk")
CALLS: dict[str, dict[str, Any]] = {
    "dense": {},
    "causal": {"is_causal": True},
    "a window": {"window_size": (40, 9)},
    "groups": {"num_heads": 6, "num_heads_k": 2},
    "a softcap": {"softcap": 2.0},
    "a negative scale": {"softmax_scale": -0.7},
    "a scale of 0": {"softmax_scale": 0.0},
    "a sink": {"sink": "normal"},
    "bits of a mask": {"mask": MASK, "mask_kind": "empty_rows"},
    "padding": {"mask": PADDING},
    "a bias": {"bias": FULL},
    "a bias that heads share": {"bias": TILES},
    "a bias value by value": {"bias": FULL, "seqlen_k": 515},
    "a bias in fp32": {"bias": FULL, "bias_dtype": torch.float32},
    "a bias of keys": {"bias": KEYS},
    "a bias of queries": {"bias": ROWS},
    "a bias of queries, a sink": {"bias": ROWS, "sink": "normal"},
    "a bias of -inf": {"bias": FULL, "bias_kind": "inf"},
    "a bias and a mask": {"bias": FULL, "mask": MASK, "mask_kind": "empty_rows"},
    "a bias of keys and padding": {"bias": KEYS, "mask": PADDING},
    "a bias, a softcap, a sink": {"bias": FULL, "softcap": 2.0, "sink": "normal"},
    "a bias by distance": {"relative": Numbers(("1", "Hq", "1"), 257, 128, "clamp")},
    "few distances": {"relative": Numbers(("1", "Hq", "1"), 9, 4, "clamp"), "softmax_scale": 0.7},
    "few distances, a negative scale": {"relative": Numbers(("1", "Hq", "1"), 9, 4, "zero"), "softmax_scale": -0.7},
    "dropout": {"dropout_p": 0.3},
    "dropout and a bias": {"dropout_p": 0.3, "bias": FULL},
    "one query of a group": {"seqlen_q": 1, "num_heads": 6, "num_heads_k": 2},
    "one query, a bias": {"seqlen_q": 1, "num_heads": 6, "num_heads_k": 2, "bias": FULL},
    "three consumers": {"seqlen_q": 400},
    "fewer keys than rows": {"seqlen_q": 300, "seqlen_k": 130, "is_causal": True},
}


def built(case: Case, level: float = 0.0) -> Inputs:
    """The tensors of a case; the products of q and k are about `level` larger, in a feature that only they have."""
    inputs = case.build()
    q, k = inputs.q.clone(), inputs.k.clone()
    if level:
        q[..., 0], k[..., 0] = level, 1.0
    return replace(inputs, q=q, k=k)


def check(case: Case, level: float = 0.0, mask: Any = None, inputs: Inputs | None = None) -> None:
    """Compare with eager, whose scores are in fp32, too; out and lse have the bits of a call that does not ask."""
    x = built(case, level) if inputs is None else inputs
    flags: dict[str, Any] = {**case.flags(), **case.dropping(), "sink": x.sink}
    operands = (x.q, x.k, x.v, x.mask if mask is None else mask, case.passed(x.bias))

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
def test_every_kernel(backend: Runner, name: str) -> None:
    check(BASE.with_(**CALLS[name]))


LEVELS = (-3.0, -20.0, -300.0, 5.0, 2000.0)  # from -5.5 on kernels compare bits of negative scores
CLOSE = {"softmax_scale": 1.0, "logits": 0.02}  # scores are about their level


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", ("dense", "a bias", "a bias of keys", "few distances", "bits of a mask", "a sink"))
@pytest.mark.usefixtures("splits")
def test_rows_about_a_level(backend: Runner, name: str, level: float) -> None:
    """All scores of a row are negative, or great."""
    check(BASE.with_(**CALLS[name] | CLOSE), level)


@pytest.mark.parametrize("sign", (1, -1))
@pytest.mark.parametrize("name", ("dense", "a bias", "a sink"))
@pytest.mark.usefixtures("splits")
def test_a_maximum_that_rises_by_less_than_the_kernel_tells(backend: Runner, name: str, sign: int) -> None:
    """The scores of the later steps are larger by 2, for which nothing is rescaled."""
    case = BASE.with_(**CALLS[name] | CLOSE)
    inputs = built(case, 1.0)
    places = torch.arange(case.seqlen_k, device=DEVICE)[:, None]
    inputs.k[..., 0] = (sign * (1 - places // 128)).to(inputs.k.dtype)  # the last block of keys is walked first
    check(case, inputs=inputs)


@pytest.mark.parametrize("value", (torch.nan, torch.inf, -torch.inf))
@pytest.mark.parametrize("place", ("q", "k", "bias", "a bias of queries"))
@pytest.mark.usefixtures("splits")
def test_nan_and_inf_are_told(backend: Runner, place: str, value: float) -> None:
    case = BASE.with_(**CALLS.get(place, CALLS["a bias"] if place == "bias" else {}))
    inputs = built(case)
    x = {"q": inputs.q, "k": inputs.k}.get(place, inputs.bias)
    assert x is not None
    x[0, 3, 0, 0] = value
    operands = (inputs.q, inputs.k, inputs.v, None, inputs.bias)
    assert_equal(maxima("cuda", *operands), maxima("eager", *operands))


def test_what_no_row_sees_is_not_told(backend: Runner) -> None:
    """Hidden keys hold NaN, and a row without a key has -inf."""
    inputs = built(BASE)
    inputs.k[:, 200:] = torch.nan
    mask = (torch.arange(BASE.seqlen_k, device=DEVICE) < 200) & (torch.arange(150, device=DEVICE)[:, None] % 5 > 0)
    largest = maxima("cuda", inputs.q, inputs.k, inputs.v, mask)
    assert torch.equal(largest == -torch.inf, ~mask.any(1).expand_as(largest))
    assert not largest.isnan().any()


@pytest.mark.parametrize("form", ("tiles", "intervals", "lists", "parts"))
def test_forms_of_a_mask(backend: Runner, form: str) -> None:
    case = BASE.with_(seqlen_q=256, seqlen_k=512)
    i, j = torch.arange(256, device=DEVICE)[:, None], torch.arange(512, device=DEVICE)
    allowed = (j - i) % 7 < 3
    mask: Any = allowed
    if form == "intervals":
        mask = PreparedMask.from_mask((i >= j // 4).expand(2, 4, -1, -1), seqlen_q=256)
    elif form == "tiles":
        mask = PreparedMask.from_mask(allowed.expand(2, 4, -1, -1), seqlen_q=256)
    elif form == "lists":
        index = torch.tensor([[0, 2], [3, -1]], device=DEVICE)
        mask = PreparedMask.from_lists(index, seqlen_q=256, seqlen_k=512, block_size=(128, 128))
    elif form == "parts":  # (2, 2) batches, whose mask has one entry for each of the first
        x = case.with_(batch=4).build()
        tensors = [t.unflatten(0, (2, 2)) for t in (x.q, x.k, x.v)]
        shared = torch.stack((allowed, ~allowed))[:, None, None]
        assert_equal(maxima("cuda", *tensors, shared), maxima("eager", *tensors, shared))
        return
    check(case, mask=mask)


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
