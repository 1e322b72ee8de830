"""torch's own context parallelism, `torch.distributed.tensor.experimental.context_parallel`, on the same tensors."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from .calls import Bound, Work, names_of
from .measure import Group

Bind = Callable[[Group, Work], Bound]
KERNELS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}


def peers(device: torch.device) -> list[tuple[str, Bind]]:
    """Each kernel that can run on the device, with each way of passing keys on."""
    kernels = KERNELS if device.type == "cuda" else {"flash": KERNELS["flash"]}
    return [
        (f"torch, {kernel}, {method}", partial(bind, kernel, method))
        for kernel in kernels
        for method in ("allgather", "alltoall")
    ]


def bind(kernel: str, method: str, group: Group, work: Work) -> Bound:
    """The call of this rank: head-tail shards, causal; key-value heads are repeated, as its ring kernels need."""
    from torch.distributed.tensor.experimental import context_parallel
    from torch.distributed.tensor.experimental._attention import set_rotate_method

    set_rotate_method(method)
    mesh = init_device_mesh(group.device.type, (group.size,))
    positions = torch.arange(work.length, device=group.device)
    around = context_parallel(mesh, buffers=[positions], buffer_seq_dims=[0])
    with context_parallel(mesh, buffers=[positions], buffer_seq_dims=[0]):
        mine = positions.clone()  # which of them torch gives this rank
    x = {name: tensor.index_select(1, mine) for name, tensor in work.tensors(group).items()}
    repeat = work.heads // work.kv_heads
    leaves = [x[name].requires_grad_() for name in ("q", "k", "v")]

    def heads_first(x: Tensor, times: int = 1) -> Tensor:
        return x.repeat_interleave(times, 2).transpose(1, 2)

    def call() -> Tensor:
        q, k, v = heads_first(leaves[0]), heads_first(leaves[1], repeat), heads_first(leaves[2], repeat)
        with sdpa_kernel(KERNELS[kernel]):
            # By its module, where context_parallel puts its own.
            return functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)

    ours = work.layout(group).positions(group.rank).to(group.device)
    order = mine.argsort()
    places = order[torch.searchsorted(mine[order], ours)]
    return Bound(call, leaves, x["dout"], names_of(leaves), places, around)
