"""Attention over lists on the Triton kernels, in Triton's interpreter, against autograd of the dense formula."""

from __future__ import annotations

import pytest
import torch
from cases import DEVICE
from conftest import needs_triton
from forked import interpret

pytestmark = [
    needs_triton,
    pytest.mark.skipif(DEVICE == "cuda", reason="a GPU runs the kernels themselves"),
]


@pytest.mark.parametrize("first", (0, 1000))
def test_random_calls(first: int) -> None:
    assert "16 passed, 0 failed" in interpret("interpreted_lists.py", "random", str(first), "16")


# Calls of each kind.
EDGES = {"sizes": 16, "wide heads": 8, "rounded out": 5, "shares": 4, "best keys": 12, "great": 12}


@pytest.mark.parametrize("kind", EDGES)
def test_edges(kind: str) -> None:
    assert f"{EDGES[kind]} passed, 0 failed" in interpret("interpreted_lists.py", kind)


@pytest.mark.parametrize(
    ("arch", "dtype", "head_dim", "keys_each", "fits"),
    [
        ("sm_90", torch.float32, 256, 128, False),
        ("sm_90", torch.float32, 192, 128, False),
        ("sm_90", torch.float32, 256, 64, True),
        ("sm_90", torch.bfloat16, 256, 128, True),
        ("sm_120", torch.bfloat16, 256, 128, False),
        ("sm_120", torch.bfloat16, 128, 128, True),
    ],
)
def test_a_block_whose_keys_do_not_fit_goes_by_rows(
    monkeypatch: pytest.MonkeyPatch, arch: str, dtype: torch.dtype, head_dim: int, keys_each: int, fits: bool
) -> None:
    """A program for a block keeps its k and v in shared memory."""
    from flash_dmattn.triton_kernels import list_calls

    monkeypatch.setattr(list_calls, "device_arch", lambda device: arch)
    q, k = (torch.empty(1, heads, 512, head_dim, dtype=dtype, device="meta") for heads in (4, 1))
    keys = torch.empty(1, 1, 512, 2, dtype=torch.int32, device="meta")
    flags = list_calls.ListFlags(1.0, 0.0, -1, -1, 1, keys_each, head_dim)
    call = list_calls.ListCall(q, k, k, keys, None, None, None, None, flags)
    assert call.takes_inverse_lists is fits


@pytest.mark.parametrize("arch", ("sm_90", "sm_100"))
def test_the_largest_kernels_of_latent_heads_fit(arch: str) -> None:
    from compiled_triton import list_jobs

    from flash_dmattn.triton_kernels.gpus import shared_bytes

    jobs = {job.key: job for job in list_jobs(arch, 576) if job.name in ("list_forward", "list_product")}
    assert len(jobs) == 4
    for job in jobs.values():
        assert job.compile().shared <= shared_bytes(arch)
