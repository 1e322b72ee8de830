"""Rows of the invariant mode on cuda, whose bits nothing around them changes. On a GPU or the emulated one."""

from __future__ import annotations

import os
import random
from typing import Any

import pytest
import torch
from cases import DEVICE
from conftest import Runner
from invariant_rows import draw

import flash_dmattn
from flash_dmattn import Sequences

pytestmark = pytest.mark.parametrize("backend", ("cuda",), indirect=True)

# One to six key blocks of 128, which one block of threads walks in the mode, or several without it.
LENGTHS = (2, 31, 64, 130, 256, 300, 513, 700)


@pytest.mark.parametrize("number", range(200))
def test_rows_have_equal_bits_in_many_surroundings(number: int, backend: Runner) -> None:
    if "FLASH_DMATTN_EMULATED" in os.environ:
        import emulated_cuda

        emulated_cuda.configure(random.Random(number).choice(emulated_cuda.NUM_SMS), number)
    drawn: Any = draw(number, DEVICE, "cuda", LENGTHS)
    assert not any(drawn.counts.values()), str(drawn)


LENGTHS_OF_KEYS = (1, 130, 299, 64)


@pytest.mark.parametrize("window", ((-1, -1), (100, 0)), ids=("whole", "window"))
@pytest.mark.parametrize("layout", ("paged", "packed pages", "padded", "packed"))
def test_decoding_has_the_bits_of_a_call_alone(layout: str, window: tuple[int, int], backend: Runner) -> None:
    """One query of each sequence, whose heads of a group become rows where it sees all keys."""
    number, heads, heads_k, dim, slots, page = len(LENGTHS_OF_KEYS), 6, 2, 64, 320, 16
    torch.manual_seed(0)
    q, k, v = (
        torch.randn(number, rows, h, dim, device=DEVICE).bfloat16() for rows, h in ((1, heads), *[(slots, heads_k)] * 2)
    )
    lengths, each = torch.tensor(LENGTHS_OF_KEYS, device=DEVICE), torch.arange(number + 1, device=DEVICE)
    pages = torch.randperm(number * slots // page, device=DEVICE).view(number, -1)
    pools = [x.new_zeros(number * slots // page, page, heads_k, dim) for x in (k, v)]
    for pool, x in zip(pools, (k, v), strict=True):
        pool[pages] = x.unflatten(1, (-1, page))
    tokens = [torch.cat([x[i, :n] for i, n in enumerate(LENGTHS_OF_KEYS)]) for x in (k, v)]
    bounds = torch.cat([each[:1], lengths.cumsum(0)])
    rows: Any = {
        "paged": lambda: (q, *pools, Sequences.paged(pages, lengths)),
        "packed pages": lambda: (q[:, 0], *pools, Sequences.paged(pages, lengths, cu_seqlens_q=each, max_seqlen_q=1)),
        "padded": lambda: (q, k, v, Sequences.padded(seqlens_q=torch.ones_like(lengths), seqlens_k=lengths)),
        "packed": lambda: (q[:, 0], *tokens, Sequences.packed(each, bounds, max_seqlen_q=1, max_seqlen_k=299)),
    }
    settings: Any = {"is_causal": True, "window_size": window, "return_lse": True, "backend": "cuda"}
    with flash_dmattn.config(invariant=True):
        *operands, sequences = rows[layout]()
        out, lse = flash_dmattn.attention(*operands, sequences=sequences, **settings)
        for i, n in enumerate(LENGTHS_OF_KEYS):
            own, own_lse = flash_dmattn.attention(q[i : i + 1], k[i : i + 1, :n], v[i : i + 1, :n], **settings)
            assert torch.equal(out[i].flatten(), own.flatten())
            assert torch.equal((lse[i] if lse.dim() == 3 else lse[:, i]).flatten(), own_lse.flatten())
