"""What the cuda backend does around its kernels, without a GPU: operators of plain PyTorch stand in for theirs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accuracy import assert_accurate
from cases import ALL, NAMES, Case, Inputs
from layouts import LAYOUTS, offset, rearranged
from torch import Tensor

from flash_dmattn.backends.cuda import backend as cuda
from flash_dmattn.dispatch import packers
from flash_dmattn.masks import prepare_mask
from flash_dmattn.masks.broadcast import collapse
from flash_dmattn.masks.prepared import operator as preparation
from flash_dmattn.masks.prepared import packing
from flash_dmattn.problem import Band, Flags, MaskView, NeedsGrad, causal_window
from flash_dmattn.reference import formula

BASE = Case(seqlen_q=150, seqlen_k=264, head_dim=8, num_heads=4, num_heads_k=2, dtype=torch.float32, dlse=True)
TILE = packing.TILE


def can_copy(x: Tensor) -> bool:
    """Whether TMA can read rows of x, 16-bit values as which these fp32 ones count."""
    walks = [stride for size, stride in zip(x.shape[:3], x.stride()[:3]) if size > 1 and stride > 0]
    return x.data_ptr() % 16 == 0 and x.stride(3) == 1 and all(stride % 8 == 0 for stride in walks)


class Operators:
    """The operators of the extension, their arguments checked; `calls` holds those of the backward pass."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def allowed(self, q: Tensor, k: Tensor, mask: list[Tensor], low: int, high: int) -> Tensor:
        """The mask that a kernel sees: bits of the tiles that its lists name, or the band."""
        seqlen_q, seqlen_k = q.shape[1], k.shape[1]
        i, j = torch.arange(seqlen_q)[:, None], torch.arange(seqlen_k)
        if not mask:
            return ((low <= j - i) & (j - i <= high))[None, None]
        bits, row_lists, lists = mask
        dense = packing.unpack_words(bits, seqlen_k)
        visited = torch.zeros(*lists.shape[:3], packing.tiles(seqlen_q), dtype=torch.bool)  # (.., keys, queries)
        for place in torch.cartesian_prod(*(torch.arange(n) for n in lists.shape[:3])):
            b, h, column = place.tolist()
            full, partial, *order = lists[b, h, column].tolist()
            visited[b, h, column, order[: full + partial]] = True
        # A tile of keys counts those before it in the row of a tile of queries, which may come in any order.
        counts = row_lists[..., 0] + row_lists[..., 1]
        assert torch.equal(counts, visited.sum(2).to(counts.dtype)), "rows name other tiles than columns"
        spread = visited.mT.repeat_interleave(TILE, 2).repeat_interleave(TILE, 3)[:, :, :seqlen_q, :seqlen_k]
        assert not (dense & ~spread).any(), "the lists leave out a tile"
        return dense

    def differentiate(
        self,
        dout: Tensor,
        dlse: Tensor | None,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: list[Tensor],
        bias: Tensor | None,
        out: Tensor,
        lse: Tensor,
        dq: Tensor | None,
        dk: Tensor | None,
        dv: Tensor | None,
        dbias: Tensor | None,
        sums: Tensor | None,
        low: int,
        high: int,
        softmax_scale: float,
        softcap: float,
        deterministic: bool,
    ) -> None:
        """`cuda_backward_kernel`: a tile of a dbias of every head is written where some of it is allowed."""
        self.calls.append({"dq": dq, "dk": dk, "dv": dv, "dbias": dbias, "sums": sums, "deterministic": deterministic})
        assert all(can_copy(x) for x in (dout, q, k, v)) and out.is_contiguous() and lse.is_contiguous()
        allowed = self.allowed(q, k, mask, low, high)
        per_score = bias is not None and all(bias.shape[dim] > 1 and bias.stride(dim) > 0 for dim in (2, 3))
        assert not per_score or can_copy(bias)
        scores = torch.zeros(q.shape[0], q.shape[2], q.shape[1], k.shape[1])
        if bias is not None:
            repeat = q.shape[2] // bias.shape[1] if bias.shape[1] > 1 else 1
            scores = scores + bias.repeat_interleave(repeat, 1)
        flags = {"softmax_scale": softmax_scale, "softcap": softcap}
        allowed_each = allowed.expand(-1, -1, *scores.shape[2:])
        found = formula.gradients(dout, dlse, q, k, v, allowed_each, scores, **flags)
        for to, x in zip((dq, dk, dv), found[:3], strict=True):
            if to is not None:
                assert to.is_contiguous()
                to.copy_(x)
        ds = found[3]
        if sums is not None:
            assert sums.dtype == torch.float32
            sums.copy_(ds.sum(2))
        if dbias is not None:
            assert dbias.is_contiguous()
            if dbias.shape[:2] != ds.shape[:2]:
                shared = ds.unflatten(1, (dbias.shape[1], -1)).sum(2)
                dbias.copy_(shared.sum_to_size(dbias.shape))
                return
            for row in range(0, q.shape[1], TILE):
                for key in range(0, k.shape[1], TILE):
                    tile = (..., slice(row, row + TILE), slice(key, key + TILE))
                    if allowed[tile].any():
                        dbias[tile] = ds[tile]


@pytest.fixture
def operators(monkeypatch: pytest.MonkeyPatch) -> Iterator[Operators]:
    """The stand-ins, with memory that is not written full of NaN."""
    found = Operators()
    kernels = cuda._Kernels(None, found.differentiate, collapse, preparation.pack_tiles)
    monkeypatch.setattr(cuda, "_found_kernels", kernels)
    torch.use_deterministic_algorithms(True)
    try:
        yield found
    finally:
        torch.use_deterministic_algorithms(False)


def check(case: Case, given: Inputs | None = None, mask: MaskView | None = None) -> None:
    """The gradients that the backend returns for a case, by the accuracy rule."""
    inputs = case.build("cpu")
    x = inputs if given is None else given
    if mask is None:
        mask = MaskView() if x.mask is None else MaskView("dense", (x.mask,))
    flags = case.flags()
    out, lse = formula.attention(x.q, x.k, x.v, x.mask, x.bias, **flags)
    window = causal_window(case.is_causal, case.window_size or (-1, -1))
    scale = formula.default_scale(x.q, case.softmax_scale)
    needs_grad = NeedsGrad(*(name in case.needs_grad and (name != "bias" or x.bias is not None) for name in NAMES))
    dlse = None if x.dlse is None else x.dlse.masked_fill(lse == -torch.inf, 0.0)
    gradients = cuda._backward(
        x.dout, dlse, x.q, x.k, x.v, mask, x.bias, out, lse, Flags(*window, scale, case.softcap, False), needs_grad
    )
    names = ("dq", "dk", "dv", "dbias")
    assert_accurate({"out": out, "lse": lse, **dict(zip(names, gradients, strict=True))}, case, inputs)


BIASES = (
    None,
    ("B", "Hq", "Lq", "Lk"),
    ("1", "Hq", "Lq", "Lk"),
    ("B", "Hk", "Lq", "Lk"),
    ("1", "1", "Lq", "Lk"),
    ("B", "Hq", "1", "Lk"),
    ("1", "Hk", "1", "Lk"),
    ("B", "1", "1", "Lk"),
    ("B", "Hk", "Lq", "1"),
    ("1", "1", "1", "1"),
)


@pytest.mark.parametrize("bias", BIASES, ids=str)
@pytest.mark.parametrize("mask", (None, ("1", "Hk", "Lq", "Lk")), ids=str)
@pytest.mark.parametrize("is_causal", (False, True))
def test_gradients(
    bias: tuple[str, ...] | None, mask: tuple[str, ...] | None, is_causal: bool, operators: Operators
) -> None:
    check(BASE.with_(bias=bias, mask=mask, mask_kind="empty_tiles", is_causal=is_causal))
    assert len(operators.calls) == 1


def test_a_softcap_reaches_the_kernels(operators: Operators) -> None:
    for bias in BIASES:
        check(BASE.with_(bias=bias, softcap=0.5))


def test_a_bias_that_is_read_but_takes_no_gradient(operators: Operators) -> None:
    for heads in ("1", "Hk", "Hq"):
        check(BASE.with_(bias=("B", heads, "Lq", "Lk"), needs_grad=("q", "k", "v"), window_size=(30, 5)))


@pytest.mark.parametrize("needs_grad", (*((name,) for name in NAMES), ("k", "bias"), ALL), ids=str)
@pytest.mark.parametrize("bias", [bias for bias in BIASES if bias is not None], ids=str)
def test_only_what_is_needed_is_computed(
    needs_grad: tuple[str, ...], bias: tuple[str, ...], operators: Operators
) -> None:
    check(BASE.with_(bias=bias, needs_grad=needs_grad))
    per_query = bias[3] == "1"
    assert len(operators.calls) == (0 if per_query and needs_grad == ("bias",) else 1)
    for call in operators.calls:
        kernels_bias = "bias" in needs_grad and not per_query
        assert [call[f"d{name}"] is not None for name in "qkv"] == [name in needs_grad for name in "qkv"]
        assert (call["sums"] is not None) == (kernels_bias and bias[2] == "1")
        assert (call["dbias"] is not None) == (kernels_bias and bias[2] != "1")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_the_copy_engine_cannot_read_is_copied(layout: str, operators: Operators) -> None:
    case = BASE.with_(bias=("B", "Hq", "1", "Lk"))
    check(case, rearranged(case.build("cpu"), LAYOUTS[layout]))


@pytest.mark.parametrize("start", (1, 4, 7))
@pytest.mark.parametrize("seqlen_k", (264, 263))
def test_a_bias_that_starts_between_16_bytes_is_copied(start: int, seqlen_k: int, operators: Operators) -> None:
    case = BASE.with_(seqlen_k=seqlen_k, bias=("1", "Hq", "Lq", "Lk"), needs_grad=("q", "k", "v"))
    inputs = case.build("cpu")
    frame = torch.full((1, 4, 150, 272), torch.nan)
    shared = offset(frame, start)[..., :seqlen_k]
    shared.copy_(inputs.bias)
    expanded = shared.expand(2, -1, -1, -1)
    copy = cuda._tiles(expanded)
    assert can_copy(copy) and copy.stride(0) == 0 and torch.equal(copy, expanded)
    assert (copy.data_ptr() == shared.data_ptr()) == (start % 4 == 0)  # values of 4 bytes
    check(case, replace(inputs, bias=shared))


def test_dout_that_is_expanded_is_copied(operators: Operators) -> None:
    case = BASE.with_(batch=1)
    inputs = case.build("cpu")
    ones = replace(inputs, dout=torch.ones(1, 1, 1, 1).expand(inputs.dout.shape))
    out, lse = formula.attention(inputs.q, inputs.k, inputs.v)
    flags = Flags(-1, -1, formula.default_scale(inputs.q, None), 0.0, False), NeedsGrad(True, True, True, False)
    found = cuda._backward(ones.dout, None, inputs.q, inputs.k, inputs.v, MaskView(), None, out, lse, *flags)
    wanted = formula.gradients(ones.dout, None, inputs.q, inputs.k, inputs.v)
    for x, y in zip(found[:3], wanted[:3], strict=True):
        torch.testing.assert_close(x, y)


def test_prepared_masks_are_read_as_they_are(operators: Operators, monkeypatch: pytest.MonkeyPatch) -> None:
    case = BASE.with_(mask=("B", "1", "Lq", "Lk"), mask_kind="empty_rows", bias=("B", "Hq", "Lq", "Lk"), is_causal=True)
    inputs = case.build("cpu")
    prepared = prepare_mask(inputs.mask, seqlen_q=case.seqlen_q, seqlen_k=case.seqlen_k, is_causal=True)
    monkeypatch.setattr(operators, "calls", [])
    check(case, inputs, prepared.view)
    assert len(operators.calls) == 1


@pytest.mark.parametrize("sizes", ({"batch": 0}, {"seqlen_q": 0}, {"seqlen_k": 0}), ids=str)
def test_nothing_to_attend(sizes: dict[str, int], operators: Operators) -> None:
    for bias in BIASES:
        check(BASE.with_(bias=bias, **sizes))
    assert not operators.calls


# Who packs a mask


@pytest.mark.parametrize(
    ("is_cuda", "arch", "disabled", "usable", "packs"),
    (
        (True, "sm_90", (), True, True),
        (True, "sm_90", ("triton",), True, True),
        (True, "sm_90", ("cuda",), True, False),
        (True, "sm_90", (), False, False),
        (True, "sm_80", (), True, False),
        (True, "gfx942", (), True, False),
        (False, "cpu", (), True, False),
    ),
)
def test_the_extension_packs_where_it_works(
    is_cuda: bool,
    arch: str,
    disabled: tuple[str, ...],
    usable: bool,
    packs: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(packers, "device_arch", lambda device: arch)
    monkeypatch.setattr(packers.process, "disabled", disabled)
    monkeypatch.setattr(cuda, "probe", lambda: SimpleNamespace(usable=usable))
    assert packers.packs_by_extension(SimpleNamespace(is_cuda=is_cuda, device="cuda:0")) == packs


@pytest.mark.parametrize("shape", ((2, 1, 150, 300), (1, 2, 150, 1)), ids=str)
@pytest.mark.parametrize("is_causal", (False, True))
def test_its_operator_receives_the_whole_mask_and_the_band(
    shape: tuple[int, ...], is_causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    mask = torch.rand(shape) < 0.4
    wanted = preparation.prepare(mask, 150, 300, -1, 0 if is_causal else -1)

    def pack(dense: Tensor, low: int, high: int, has_band: bool) -> list[Tensor]:
        assert dense.shape == (*shape[:2], 150, 300)
        bits, classes = packing.pack_mask(dense, Band(low, high) if has_band else None)
        return [bits, classes, *packing.list_tiles(classes)]

    monkeypatch.setattr(packers, "packs_by_extension", lambda tensor: True)
    monkeypatch.setattr(packers, "_extension_packer", lambda: packers.around_extension(pack))
    found = preparation.prepare(mask, 150, 300, -1, 0 if is_causal else -1)
    assert all(torch.equal(x, y) for x, y in zip(found, wanted, strict=True))
