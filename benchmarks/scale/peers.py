"""torch's own context parallelism, `torch.distributed.tensor.experimental.context_parallel`, on the same tensors."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from itertools import product

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from .calls import PEERS_IN_FULL, Bound, Work, names_of
from .measure import Group

Bind = Callable[[Group, Work], Bound]
KERNELS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}


def peers(device: torch.device, work: Work) -> list[tuple[str, Bind]]:
    """Each kernel that can run on the device, with each way of passing keys on; groups as they are or repeated.

    Long calls run beside the fastest of these alone.
    """
    kernels = KERNELS if device.type == "cuda" else {"flash": KERNELS["flash"]}
    forms = {"": False} if work.heads == work.kv_heads else {", grouped heads": True, ", repeated heads": False}
    ways = list(product(kernels, ("allgather", "alltoall"), forms.items()))
    if work.length > PEERS_IN_FULL:
        ways = [way for way in ways if way[:2] == ("cudnn", "allgather")][:1]
    return [
        (f"torch, {kernel}, {method}{form}", partial(bind, kernel, method, grouped))
        for kernel, method, (form, grouped) in ways
    ]


@lru_cache
def mesh_of(group: Group) -> DeviceMesh:
    """Return the ranks as a mesh of one dim, the same one for every call."""
    return init_device_mesh(group.device.type, (group.size,))


def bind(kernel: str, method: str, grouped: bool, group: Group, work: Work) -> Bound:
    """Return the call of this rank: head-tail shards, causal."""
    from torch.distributed.tensor.experimental import context_parallel
    from torch.distributed.tensor.experimental._attention import set_rotate_method

    set_rotate_method(method)
    mesh = mesh_of(group)
    positions = torch.arange(work.length, device=group.device)
    around = context_parallel(mesh, buffers=[positions], buffer_seq_dims=[0])
    with context_parallel(mesh, buffers=[positions], buffer_seq_dims=[0]):
        mine = positions.clone()  # the positions that torch gives this rank
    x = {name: tensor.index_select(1, mine) for name, tensor in work.tensors(group).items()}
    repeat = 1 if grouped else work.heads // work.kv_heads
    leaves = [x[name].requires_grad_() for name in ("q", "k", "v")]

    def heads_first(x: Tensor, times: int = 1) -> Tensor:
        return (x if times == 1 else x.repeat_interleave(times, 2)).transpose(1, 2)

    def call() -> Tensor:
        q, k, v = heads_first(leaves[0]), heads_first(leaves[1], repeat), heads_first(leaves[2], repeat)
        with sdpa_kernel(KERNELS[kernel]):
            # By its module, where context_parallel puts its own.
            out = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        return out.transpose(1, 2)

    ours = work.layout(group).positions(group.rank).to(group.device)
    order = mine.argsort()
    places = order[torch.searchsorted(mine[order], ours)]
    return Bound(call, leaves, x["dout"], names_of(leaves), places, around)
