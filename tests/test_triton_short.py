"""Which calls the kernels of short rows serve, how work is shared out, and that they read a bool mask as it is."""

from __future__ import annotations

import pytest
import torch
from conftest import needs_triton
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from flash_dmattn.backends.mask_choice import choose_form
from flash_dmattn.backends.triton import passes
from flash_dmattn.backends.triton.backend import BACKEND as TRITON
from flash_dmattn.explanation import explain_problem
from flash_dmattn.problem import MaskView

pytestmark = needs_triton

HALF = torch.bfloat16


def rows(batch: int, seqlen: int, heads: int, dim: int, dtype: torch.dtype = HALF) -> torch.Tensor:
    return torch.empty(batch, seqlen, heads, dim, dtype=dtype, device="meta")


@pytest.mark.parametrize(
    "seqlen_q, seqlen_k, heads_k, dim, dtype, arch, forward, backward",
    (
        (49, 49, 4, 32, HALF, "sm_90", True, True),
        (128, 128, 4, 64, HALF, "sm_90", True, True),
        (64, 64, 4, 128, HALF, "sm_90", True, True),
        (128, 128, 4, 128, HALF, "sm_90", True, False),  # its sums would spill
        (128, 129, 4, 64, HALF, "sm_90", False, False),
        (500, 77, 4, 64, HALF, "sm_90", True, False),  # a forward pass takes queries in tiles
        (49, 49, 2, 32, HALF, "sm_90", True, False),  # dk and dv of a group are sums over heads
        (49, 49, 4, 32, torch.float32, "sm_90", False, False),
        (49, 49, 4, 192, HALF, "sm_90", False, False),
        (64, 64, 4, 64, HALF, "sm_86", True, True),
        (65, 65, 4, 64, HALF, "sm_86", False, False),
    ),
)
def test_calls_that_are_served(
    seqlen_q: int, seqlen_k: int, heads_k: int, dim: int, dtype: torch.dtype, arch: str, forward: bool, backward: bool
) -> None:
    from flash_dmattn.triton_kernels.short_calls import ShortCall

    q, k = rows(2, seqlen_q, 4, dim, dtype), rows(2, seqlen_k, heads_k, dim, dtype)
    call = ShortCall.of(q, k, k, MaskView(), arch)
    assert (call.serves_forward(), call.serves_backward()) == (forward, backward)
    kept = MaskView("keys", (torch.empty(0),) * 3)
    assert not ShortCall.of(q, k, k, kept, arch).serves_forward()


def test_symbolic_lengths() -> None:
    """A compiler that runs the operator on fake tensors asks with symbols, which cannot be hashed."""
    from flash_dmattn.triton_kernels.short_calls import ShortCall

    mode = FakeTensorMode(shape_env=ShapeEnv())
    sizes = [DimDynamic.STATIC, DimDynamic.DYNAMIC, DimDynamic.STATIC, DimDynamic.STATIC]
    context = StatelessSymbolicContext(dynamic_sizes=sizes)
    q = mode.from_tensor(torch.empty(2, 49, 4, 32, dtype=HALF), symbolic_context=context)
    assert isinstance(q.shape[1], torch.SymInt)
    call = ShortCall.of(q, q, q, MaskView(), "sm_90")
    assert call.serves_forward() and call.serves_backward()


@pytest.mark.parametrize("members, programs", ((1, 1), (2048, 6), (4096, 12), (3, 500), (100, 2000), (1, 0x7FFF)))
@pytest.mark.parametrize("slots", (None, 1, 7))
def test_chunks_cover_every_head_once(members: int, programs: int, slots: int | None) -> None:
    from flash_dmattn.triton_kernels.plan_slots import PROGRAMS_PER_SM, chunks_of

    chunk, chunks = chunks_of(members, programs, 132, slots)
    assert chunk * (chunks - 1) < members <= chunk * chunks
    assert chunks == 1 or programs * chunks <= PROGRAMS_PER_SM * 132
    assert slots is None or chunks <= slots


def test_slots_take_little_memory() -> None:
    from flash_dmattn.triton_kernels.plan_slots import MAX_SLOT_BYTES, most_slots

    assert most_slots(6 * 49 * 49) * 6 * 49 * 49 * 4 <= MAX_SLOT_BYTES
    assert most_slots(2**40) == 1


@pytest.mark.parametrize("seqlen_k, heads_k, form", ((49, 4, "dense"), (49, 2, "tiles"), (200, 4, "tiles")))
def test_a_mask_of_short_rows_is_not_prepared(
    seqlen_k: int, heads_k: int, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(passes, "FEW_PAIRS", 0)
    call = {"seqlen_k": seqlen_k, "kv_heads": heads_k, "mask": (2, 1, 49, seqlen_k), "grad": True}
    problem = explain_problem((2, 49, 4, 32), device="sm_90", **call).problem
    assert choose_form(problem, TRITON, TRITON).form == form
