"""Calls that the predecessor answered wrongly, named by their fault; test_calls.py has none like them.

Every backend runs them, the interpreted one included.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from cases import Case, Inputs

DENSE = ("B", "Hq", "Lq", "Lk")

CALLS: dict[str, Case] = {
    "gradients after a skipped tile": Case(
        batch=1, seqlen_q=300, seqlen_k=300, num_heads=2, num_heads_k=1, bias=("1", "Hq", "1", "Lk"), dlse=True
    ),
    "softcap after the scale": Case(softcap=3.0, softmax_scale=0.7, bias=DENSE),
    "a row of tiles without a key": Case(batch=1, seqlen_q=300, seqlen_k=300, num_heads=2, num_heads_k=2, bias=DENSE),
    "no key of a row in its first tile": Case(batch=1, seqlen_q=150, seqlen_k=150, num_heads=2, window_size=(20, 0)),
    "no key of a row in its first tile, as a mask": Case(batch=1, seqlen_q=150, seqlen_k=150, num_heads=2),
    "a head dim that is no multiple of 8": Case(head_dim=20, bias=DENSE, seqlen_q=33, seqlen_k=37),
    "another head dim of the values": Case(head_dim=12, head_dim_v=20),
    # 24**-0.5 is no power of two: in 16 bit the scaled q of the forward and the scaled k of the backward differ.
    "a scale that is no power of two": Case(
        head_dim=24, dtype=torch.float16, logits=8.0, batch=1, seqlen_q=33, seqlen_k=40, bias=DENSE
    ),
    "sums of a bias gradient in 16 bit": Case(
        batch=2, seqlen_q=70, seqlen_k=17, num_heads=4, num_heads_k=4, dtype=torch.float16, bias=("1", "1", "1", "Lk")
    ),
    "an odd number of keys": Case(seqlen_k=33, mask=("1", "Hk", "Lq", "Lk"), bias=DENSE),
}


def build(name: str) -> tuple[Case, Inputs]:
    case = CALLS[name]
    inputs = case.build()
    i, j = torch.arange(case.seqlen_q)[:, None], torch.arange(case.seqlen_k)
    mask = None
    if name == "gradients after a skipped tile":
        mask = torch.tensor([[1, 0, 1], [0, 1, 0], [1, 0, 0]], dtype=torch.bool)[i // 128, j // 128]
    elif name == "a row of tiles without a key":
        mask = torch.tensor([[0, 1, 1], [0, 0, 0], [1, 1, 0]], dtype=torch.bool)[i // 128, j // 128]
    elif name == "no key of a row in its first tile, as a mask":
        mask = (j <= i) & (j >= i - 20)
    if mask is not None:
        inputs = replace(inputs, mask=mask[None, None].to(inputs.q.device))
    if name == "an odd number of keys":  # expanded, which is no reason to copy it
        mask, bias = inputs.mask, inputs.bias
        assert mask is not None and bias is not None
        inputs = replace(inputs, mask=mask.expand(case.batch, -1, -1, -1), bias=bias[:1].expand(case.batch, -1, -1, -1))
    return case, inputs
