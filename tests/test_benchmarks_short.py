"""The benchmarks' group "short": its shapes, shifted windows, and cuEquivariance by a function of its signature."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch
from benchmark_systems import CPU
from torch import Tensor

from benchmarks import systems
from benchmarks.cases import CASES, Case, cases_of
from benchmarks.inputs import make_inputs, shifted_windows
from benchmarks.suites.trial import attempt
from benchmarks.systems import Mode, Needs, cuequivariance
from benchmarks.truth import errors, truth
from flash_dmattn.reference import formula

SHORT = cases_of("performance", ["short"])
GPU = torch.device("cuda")


def named(name: str) -> Case:
    return next(case for case in CASES if case.name == name)


def test_the_shapes() -> None:
    assert all(case.group == "short" and case.seqlen <= 1024 for case in SHORT)
    entries = [case.batch * case.heads for case in SHORT]
    assert min(entries) == 2 and max(entries) == 24576
    assert named("short-shifted-2048").shape == "2048,6,6,49,32"
    assert named("short-shifted-2048").what == ("mask (B,1,L,L): shifted windows, 8 x 8 an image, bias (1,Hq,L,L)")
    assert named("short-encoder-1k").what == "mask (B,1,1,L): padded lengths from L/4"
    assert named("short-t5-cross").shape == "32,12,12,128x512,64"


def test_shifted_windows() -> None:
    """Of an image of 3 x 3 windows of 4 x 4 tokens, rolled by half a window, as its definition has it: by regions."""
    side, windows = 4, 3
    image = torch.zeros(side * windows, side * windows)
    count = 0
    for rows in (slice(0, -side), slice(-side, -side // 2), slice(-side // 2, None)):
        for columns in (slice(0, -side), slice(-side, -side // 2), slice(-side // 2, None)):
            image[rows, columns] = count
            count += 1
    regions = image.unflatten(1, (windows, side)).unflatten(0, (windows, side)).transpose(1, 2).reshape(9, 16)
    expected = regions[:, None, :, None] == regions[:, None, None, :]
    found = shifted_windows(20, windows, side**2, CPU)
    assert found.shape == (20, 1, 16, 16)
    assert torch.equal(found[:9], expected) and torch.equal(found[9:18], expected)
    # Those of the design, of 7 x 7 tokens: 4 of the last.
    odd = shifted_windows(4, 2, 49, CPU)
    assert odd[0].all() and odd.diagonal(dim1=2, dim2=3).all()
    assert odd[1, 0, 0].view(7, 7).all(0).tolist() == [True] * 4 + [False] * 3


@pytest.mark.parametrize("case", SHORT, ids=lambda case: case.name)
def test_eager_is_right(case: Case) -> None:
    """Every case, cut to what a CPU runs."""
    inputs = make_inputs(case.reduced(64), CPU, torch.float32)
    trial = attempt(systems.by_name("eager"), Mode(), case.reduced(64), inputs)
    assert trial.has_backward and max(errors(trial.results, truth(inputs)).values()) < 1e-5


def triangle_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor,
    mask: Tensor | None = None,
    scale: float | None = None,
    return_aux: bool = False,
) -> Tensor:
    """What its documentation says: (B, N, H, L, D), a bias (B, 1, H, Lq, Lk), a mask (B, N, 1, 1, Lk)."""
    assert q.dim() == 5 and q.shape[0] == 1 and scale is None and not return_aux
    batch, rows, heads, seqlen_q, _ = q.shape
    seqlen_k = k.shape[3]
    assert bias.shape == (batch, 1, heads, seqlen_q, seqlen_k)
    assert mask is None or mask.shape == (batch, rows, 1, 1, seqlen_k)
    given = None if mask is None else mask[0]
    out, *_ = formula.attention(*(x[0].transpose(1, 2) for x in (q, k, v)), given, bias[0])
    return out.transpose(1, 2).unsqueeze(0)


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    made = ModuleType(cuequivariance.MODULE)
    monkeypatch.setattr(made, "triangle_attention", triangle_attention, raising=False)
    monkeypatch.setitem(sys.modules, cuequivariance.MODULE, made)
    return made


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize("name", ["short-pair-64", "short-triangle", "short-t5"])
def test_cuequivariance(name: str) -> None:
    case = named(name).reduced(64)
    inputs = make_inputs(case, CPU, torch.float32)
    (system,) = cuequivariance.SYSTEMS
    assert system.missing(GPU) == "" and system.missing(CPU) == "its kernels run on GPUs"
    trial = attempt(system, Mode(), case, inputs)
    assert trial.reason == "" and trial.has_backward and list(system.modes(case)) == ["call"]
    found = errors(trial.results, truth(inputs))
    assert list(found) == ["out", "dq", "dk", "dv", "dbias"] and max(found.values()) < 1e-5


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("causal-gqa", "it takes neither causality nor grouped heads"),
        ("short-vit-197", "it takes calls with a bias (1,Hq,L,L)"),
        ("bias-bhll-d64", "it takes calls with a bias (1,Hq,L,L)"),
        ("short-shifted-256", "it takes masks (B,1,1,L)"),
    ],
)
def test_what_cuequivariance_does_not_take(name: str, sentence: str) -> None:
    assert cuequivariance.needs(named(name), GPU) == Needs(sentence)


def test_without_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, cuequivariance.MODULE, None)
    said = cuequivariance.missing(GPU)
    assert said.startswith("cuequivariance_torch cannot be imported: ModuleNotFoundError: ")
