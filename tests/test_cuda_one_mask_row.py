"""Masks with one row for all queries, padding and its like: beside them cuda has work tiles of more rows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from cases import DEVICE, Case, Inputs
from conftest import Runner
from out_of_tree import replaced, rules_without
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import flash_dmattn
from flash_dmattn.backends.cuda import passes
from flash_dmattn.backends.cuda import rules as cuda_rules
from flash_dmattn.backends.cuda.operands import Kernels
from flash_dmattn.backends.protocol import Availability
from flash_dmattn.masks import PreparedMask, padding_mask

FULL = ("1", "Hq", "Lq", "Lk")
BIASES = {"no bias": None, "per key": ("1", "Hk", "1", "Lk"), "per score": FULL, "of entries": ("B", "Hq", "Lq", "Lk")}
FORMS = ("bool", "expanded", "prepared", "tiles")
BASE = Case(batch=3, seqlen_k=304, num_heads_k=4, mask=("B", "1", "1", "Lk"), dtype=torch.bfloat16, dlse=True)


def padded(case: Case) -> Inputs:
    """Its tensors; of the keys an entry sees none, whole tiles and some, or all."""
    lengths = torch.tensor([0, 140, case.seqlen_k], device=DEVICE)
    return replace(case.build(), mask=padding_mask(lengths[-case.batch :], case.seqlen_k))


def in_form(mask: Tensor, case: Case, form: str) -> Any:
    """The mask as a call has it."""
    if form == "bool":
        return mask
    if form == "expanded":
        return mask.expand(-1, -1, case.seqlen_q, -1)
    band = {"is_causal": case.is_causal, "window_size": case.window_size}
    return PreparedMask.from_mask(mask, seqlen_q=case.seqlen_q, as_tiles=form == "tiles", **band)


def attention(*arguments: Any, **flags: Any) -> Any:
    return flash_dmattn.attention(*arguments, return_lse=True, backend="cuda", **flags)


def check(backend: Runner, case: Case, inputs: Inputs, form: str = "bool") -> None:
    assert inputs.mask is not None
    backend.check(case, inputs, replace(inputs, mask=in_form(inputs.mask, case, form)))


# One, two and three tiles of 64 rows in the last of 192; 256 and more of a head dim of 32.
@pytest.mark.parametrize("seqlen_q", (129, 300, 385, 577))
@pytest.mark.parametrize("bias", BIASES)
@pytest.mark.parametrize("head_dim", (32, 64))
@pytest.mark.parametrize("backend", ("cuda",), indirect=True)
def test_padding(backend: Runner, head_dim: int, bias: str, seqlen_q: int) -> None:
    case = BASE.with_(head_dim=head_dim, seqlen_q=seqlen_q, bias=BIASES[bias])
    check(backend, case, padded(case))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("bias", ("no bias", "per score"))
@pytest.mark.parametrize("heads", ("1", "Hk", "Hq"))
@pytest.mark.parametrize("head_dim", (32, 64))
@pytest.mark.parametrize("backend", ("cuda",), indirect=True)
def test_any_keys(backend: Runner, head_dim: int, heads: str, bias: str, form: str) -> None:
    """Keys that lie scattered, of each head, of groups; few are seen, and tiles without one."""
    case = BASE.with_(head_dim=head_dim, seqlen_q=200 if head_dim == 32 else 300, seqlen_k=488, num_heads_k=2)
    case = case.with_(mask=("B", heads, "1", "Lk"), bias=BIASES[bias], needs_grad=(), dlse=False)
    inputs = case.build()
    assert inputs.mask is not None
    inputs.mask[..., 128:256] = False
    inputs.mask[1:, ..., 304:] = False
    inputs.mask[2] = True
    check(backend, case, inputs, form)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("band", ({"is_causal": True}, {"window_size": (70, 20)}), ids=str)
@pytest.mark.parametrize("backend", ("cuda",), indirect=True)
def test_beside_a_band(backend: Runner, band: dict[str, Any], form: str) -> None:
    """Then each row of tiles has a list of its own."""
    case = BASE.with_(head_dim=32, seqlen_q=300, needs_grad=(), dlse=False, **band)
    check(backend, case, padded(case), form)


@pytest.mark.parametrize("bias", ("no bias", "per score"))
@pytest.mark.parametrize("backend", ("cuda",), indirect=True)
def test_rows_of_their_own(backend: Runner, bias: str) -> None:
    """Some rows of tiles list tiles that others do not: work tiles are the tiles of the mask."""
    case = BASE.with_(
        head_dim=32, seqlen_q=300, mask=("B", "1", "Lq", "Lk"), bias=BIASES[bias], needs_grad=(), dlse=False
    )
    inputs = case.build()
    assert inputs.mask is not None
    inputs.mask[:, :, :128, :128] = False
    inputs.mask[:, :, 128:, 128:] = False
    check(backend, case, inputs)


@pytest.mark.parametrize("backend", ("cuda",), indirect=True)
def test_a_sink_a_softcap_and_splits_of_keys(backend: Runner) -> None:
    for changes in ({"sink": "normal"}, {"softcap": 3.0}, {"batch": 1, "num_heads": 2, "num_heads_k": 2}):
        case = BASE.with_(head_dim=64, seqlen_q=300, seqlen_k=1100, needs_grad=("q", "k", "v"), **changes)
        check(backend, case, padded(case))


@pytest.mark.parametrize("bias", ("no bias", "per score"))
@pytest.mark.parametrize("backend", ("cuda",), indirect=True)
def test_the_same_bits_as_work_tiles_of_a_tile_of_the_mask(
    backend: Runner, bias: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At head dim 64 both walk 128 keys a step, in the same order, where no keys are split."""
    case = BASE.with_(head_dim=64, seqlen_q=300, bias=BIASES[bias], needs_grad=(), dlse=False)
    inputs = padded(case)
    check(backend, case, inputs)
    monkeypatch.setattr(passes, "NUM_KV_SPLITS", 1)
    assert inputs.mask is not None
    mask = in_form(inputs.mask, case, "prepared" if bias == "no bias" else "tiles")
    masks = mask, replace(mask, one_row=False)
    one, each = (attention(inputs.q, inputs.k, inputs.v, mask, inputs.bias) for mask in masks)
    for x, y in zip(one, each, strict=True):
        assert torch.equal(x, y)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """Whether the forward kernel hears that its mask has one row, call by call; on CPU tensors, it computes nothing."""
    if DEVICE == "cuda":
        pytest.skip("a GPU runs the kernels themselves")
    heard: list[bool] = []
    kernels = Kernels(lambda *arguments: heard.append(arguments[-4]), *[None] * 4)  # three numbers follow
    monkeypatch.setattr(passes, "kernels", lambda: kernels)
    monkeypatch.setattr(cuda_rules, "installed_instances", lambda: None)
    with replaced("cuda", probe=lambda: Availability(True), rules=rules_without("cuda", "device")):
        yield heard


def test_what_the_kernel_is_told(told: list[bool]) -> None:
    """Only where no band makes the rows differ; also through the operator, which a mode sees."""
    q, k = (torch.randn(2, n, 4, 64, dtype=torch.bfloat16) for n in (300, 260))
    rows = torch.rand(2, 1, 300, 260) < 0.5
    keys = rows[:, :, :1]
    prepared = PreparedMask.from_mask(keys, seqlen_q=300)
    masks = {
        "one row": (keys, True),
        "expanded": (keys.expand(-1, 4, 300, -1), True),
        "prepared": (prepared, True),
        "moved": (prepared.to("cpu").expand_batch((2,)), True),
        "tiles": (PreparedMask.from_mask(keys, seqlen_q=300, as_tiles=True), True),
        "each its row": (rows, False),
        "prepared rows": (PreparedMask.from_mask(rows), False),
        "found": (PreparedMask.from_mask(keys.expand(-1, -1, 300, -1).contiguous(), find_intervals=True), False),
    }
    bands: tuple[dict[str, Any], ...] = ({}, {"window_size": (300, 300)}, {"is_causal": True}, {"window_size": (50, 3)})
    for name, (mask, expected) in masks.items():
        for band in bands if isinstance(mask, Tensor) else bands[:1]:
            for watch in (nullcontext(), FlopCounterMode(display=False)):
                told.clear()
                with torch.no_grad(), watch:
                    attention(q, k, k, mask, **band)
                assert told == [expected and band in bands[:2]], (name, band, watch)
    told.clear()
    attention(q, k, k, PreparedMask.from_mask(keys, seqlen_q=300, is_causal=True))
    assert told == [False]
