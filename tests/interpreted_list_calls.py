"""Calls with lists through `attention` and the Triton kernels, in Triton's interpreter, against eager in fp64.

Other tests call the kernels directly; these test the code before them: forms, strides, repeats, needs, rules.
"""

from __future__ import annotations

from functools import partial

import interpreter
import torch
from sequence_list_cases import BESIDE, PAGED
from test_lists import CASES, Case, ListBias, assert_close, leaves, results
from torch import Tensor

import flash_dmattn
from flash_dmattn import attention
from flash_dmattn.masks import PreparedMask

interpreter.admit_cpu()
number = 0


def check(lists: PreparedMask, given: list[Tensor], bias: Tensor | None = None, **flags: object) -> None:
    """Compare all results of triton in fp32 with results of eager in fp64."""
    global number

    def call(q: Tensor, k: Tensor, v: Tensor, values: Tensor, sink: Tensor, backend: str) -> object:
        added = ListBias(values) if bias is None else bias
        return attention(q, k, v, lists, added, sink=sink, return_lse=True, backend=backend, **flags)

    both = []
    for backend, dtype in (("triton", torch.float32), ("eager", torch.float64)):
        own = [x.detach().to(dtype).requires_grad_() for x in given]
        if bias is None:
            both.append(results(lambda *x, b=backend: call(*x, b), own))
        else:
            with torch.no_grad():
                both.append(list(call(*own, backend)))
    assert_close([x.double() for x in both[0]], [x.double() for x in both[1]], rtol=2e-4, atol=2e-5)
    number += 1


for case in CASES.values():
    if case.list_heads in (1, case.heads[1]) and case.block[1] in (1, 16):
        check(case.lists(case.index()), leaves(case, case.list_batch), softcap=1.5 if number % 2 else 0.0)
blocks = Case((4, 2), (21, 70), 3, (2, 16), 2, 4, by_query=False, list_batch=2)
check(blocks.lists(blocks.index()), leaves(blocks))
ascending = PreparedMask.from_topk_lists(torch.randn(1, 1, 9, 30), 6, is_causal=True)
plain = Case((4, 2), (9, 30), 6)
check(ascending, leaves(plain))
check(ascending, leaves(plain), torch.randn(2, 2, 1, 30))
check(ascending, leaves(plain), torch.randn(1, 1, 30).expand(1, 9, 30))

# Leading dims: lists of (1, 3), values of (2, 1); only some gradients; no lists of anything.
index = torch.randint(-1, 6, (1, 3, 1, 5, 4))
many = PreparedMask.from_lists(index, seqlen_k=6)
q, k = torch.randn(2, 3, 5, 2, 16), torch.randn(2, 3, 6, 1, 16)
values = torch.randn(2, 1, 1, 5, 4, requires_grad=True)
outs = [attention(q, k, k, many, ListBias(values), backend=backend) for backend in ("triton", "eager")]
assert_close(*([x, torch.autograd.grad(x.square().sum(), values)[0]] for x in outs), rtol=1e-4, atol=1e-5)
for lengths, entries in (((6, 8), 0), ((6, 8), 3), ((0, 8), 3), ((6, 0), 3)):
    empty = Case((4, 2), lengths, entries, is_causal=False)
    nothing = torch.full((empty.rows, entries), -1)
    check(PreparedMask.from_lists(nothing, seqlen_q=lengths[0], seqlen_k=lengths[1]), leaves(empty))

# Sequences: packed, padded, in pages; softcap, lengths that change, caches whose pages lie apart.
for case in BESIDE.values():
    call = case.build()
    softcap = 1.5 if number % 2 else 0.0
    both = []
    for backend, dtype in ("triton", torch.float32), ("eager", torch.float64):
        own = [x.detach().to(dtype).requires_grad_() for x in call.tensors]
        pair = ("triton", "eager") if backend == "triton" and case.block_k > 1 else backend
        both.append([x.double() for x in results(partial(call.together, backend=pair, softcap=softcap), own)])
    assert_close(*both, rtol=2e-4, atol=2e-5)
    number += 1
    if case.block_k > 1:  # values without a gradient
        both = []
        for backend, dtype in ("triton", torch.float32), ("eager", torch.float64):
            own = [x.detach().to(dtype).requires_grad_(n < 3) for n, x in enumerate(call.tensors)]
            out = call.together(*own, backend=backend)[0]
            both.append([x.double() for x in (out, *torch.autograd.grad(out.square().sum(), own[:3]))])
        assert_close(*both, rtol=2e-4, atol=2e-5)
        number += 1
for case in PAGED.values():
    for apart in (False, True):
        call = case._replace(head_dims=(8, 8)).build()
        own = [x.float() for x in call.tensors]
        if apart:  # keys and values of a page side by side
            own[1:3] = torch.stack(own[1:3], 1).unbind(1)
        got = call.together(*own, backend="triton")
        assert_close(list(got), [x.float() for x in call.alone(*call.tensors)], rtol=2e-4, atol=2e-5)
        number += 1
shorter = BESIDE["padded"].build()
assert shorter.lists.sequences is not None and shorter.lists.sequences.seqlens_k is not None
shorter.lists.sequences.seqlens_k.sub_(1).clamp_(min=0)
pair = [shorter.together(*(x.float() for x in shorter.tensors), backend=name) for name in ("triton", "eager")]
assert_close(list(pair[0]), list(pair[1]), rtol=2e-4, atol=2e-5)
number += 1

refused = {
    "list_blocks": {"mask": PreparedMask.from_lists(torch.zeros(1, 9, 2).long(), seqlen_k=30, block_size=(1, 8))},
    "list_heads": {"mask": PreparedMask.from_lists(torch.arange(36).view(1, 4, 9, 1) % 30, seqlen_k=30)},
    "list_dropout": {"mask": ascending, "dropout_p": 0.5},
    "list_bias": {"mask": ascending, "bias": torch.randn(9, 30)},
    "list_queries": {
        "mask": PreparedMask.from_lists(torch.zeros(1, 1, 2).long(), seqlen_q=9, seqlen_k=30, block_size=(256, 1))
    },
}
packed = BESIDE["packed, blocks"].build()
refused["list_sequences"] = {
    "tensors": packed.tensors,
    "mask": packed.lists,
    "bias": ListBias(packed.tensors[3].float().requires_grad_()),
}
cache = PAGED["one query"].build(torch.float32)
q, k, v, *_ = cache.tensors
apart = torch.stack((v, v), 1)[:, 0]
refused["list_pages"] = {"tensors": (q, k, apart), "mask": cache.lists}
for code, arguments in refused.items():
    own = arguments.pop("tensors", (torch.randn(1, 9, 4, 16), *torch.randn(2, 1, 30, 2, 16)))
    where = arguments["mask"].sequences
    own = [(x[0] if where is not None and where.layout == "packed" else x).float() for x in own[:3]]
    try:
        attention(*own, backend="triton", sequences=where, **arguments)
    except flash_dmattn.BackendUnsupportedError as error:
        assert [reason.code for reason in error.reasons] == [code], error
    else:
        raise AssertionError(code)
    number += 1
print(f"{number} passed, 0 failed")
