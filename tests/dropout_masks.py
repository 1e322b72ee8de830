"""Read from results of a backend what it dropped: all scores are equal, and v or dout is the identity."""

from __future__ import annotations

from unittest.mock import patch

import torch
from cases import DEVICE, Case
from torch import Tensor

from flash_dmattn import attention
from flash_dmattn import call as calls
from flash_dmattn.reference.dropout import Dropout, draw_key, key_of_part

# Queries and keys: of one tile and of several, whole ones and not; one of the two is the head dim of v.
SIZES = ((33, 60), (100, 128), (300, 40), (16, 16), (1, 70))


def dropped_case(seqlen_q: int, seqlen_k: int, num_heads_k: int = 2, p: float = 0.4) -> Case:
    """A call of two entries and four heads."""
    return Case(seqlen_q=seqlen_q, seqlen_k=seqlen_k, num_heads_k=num_heads_k, dropout_p=p, dtype=torch.float32, seed=9)


def kept_in(backend: object, case: Case, name: str, dtype: torch.dtype = torch.float32, **inputs: object) -> Tensor:
    """Which probabilities a backend keeps, bool (B, Hq, Lq, Lk), by out (Lk is the head dim of v) or by dv (Lq is).

    out[i, d] = p[i, d] and dv[j, d] = p[d, j] where v, or dout, is the identity. Heads of a group have different dims
    of dout, so that dv tells them apart.
    """
    batch, heads, heads_k = case.batch, case.num_heads, case.num_heads_k
    group = heads // heads_k
    how = {"dtype": dtype, "device": DEVICE}
    q = torch.zeros(batch, case.seqlen_q, heads, 16, **how)  # type: ignore[call-overload]
    k = torch.zeros(batch, case.seqlen_k, heads_k, 16, **how)  # type: ignore[call-overload]

    def identity(length: int, heads: int, dims: int) -> Tensor:
        x: Tensor = torch.eye(length, dims, **how)  # type: ignore[call-overload]
        return x[None, :, None].expand(batch, -1, heads, -1).contiguous()

    torch.manual_seed(case.seed)
    if name == "out":
        v = identity(case.seqlen_k, heads_k, case.seqlen_k)
        out = attention(q, k, v, dropout_p=case.dropout_p, backend=backend, **inputs)  # type: ignore[arg-type]
        assert isinstance(out, Tensor)
        return out.transpose(1, 2) != 0
    v = torch.zeros(batch, case.seqlen_k, heads_k, case.seqlen_q * group, **how).requires_grad_()  # type: ignore[call-overload]
    out = attention(q, k, v, dropout_p=case.dropout_p, backend=backend, **inputs)  # type: ignore[arg-type]
    dout = torch.zeros(batch, case.seqlen_q, heads, case.seqlen_q * group, **how)  # type: ignore[call-overload]
    for h in range(heads):
        first = h % group * case.seqlen_q
        dout[:, :, h, first : first + case.seqlen_q] = torch.eye(case.seqlen_q, **how)  # type: ignore[call-overload]
    assert isinstance(out, Tensor)
    (dv,) = torch.autograd.grad(out, v, dout)
    return dv.unflatten(3, (group, case.seqlen_q)).permute(0, 2, 3, 4, 1).flatten(1, 2) != 0


def drops_as_the_whole(backend: object, case: Case, name: str, dtype: torch.dtype = torch.float32) -> bool:
    """Whether a call that is a part of a larger one drops what that one drops there."""
    key = draw_key(torch.device(DEVICE))
    places = {"row": 48, "first_key": 2**31 - 512, "head": 3, "entry": 2**20}
    sizes = (case.batch, case.num_heads, case.seqlen_q, case.seqlen_k)
    firsts = (places["entry"], places["head"], places["row"], places["first_key"])
    wanted = Dropout(case.dropout_p, key).kept(*(slice(a, a + n) for a, n in zip(firsts, sizes, strict=True)))
    # Cut twice, as heads and then rows of a rank are.
    part = key_of_part(key_of_part(key, head=2, first_key=16), row=48, first_key=2**31 - 528, head=1, entry=2**20)
    with patch.object(calls, "draw_key", lambda device: part):
        return torch.equal(kept_in(backend, case, name, dtype), wanted)
