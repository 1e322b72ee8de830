"""The kernel that adds the partial sums of the key-stationary kernel: dk, dv, and a dbias of one value per key."""

from __future__ import annotations

import triton
import triton.language as tl

from .tile_ops import KEYS, mask_head


@triton.jit
def backward_gather_kernel(
    dk_parts,
    dv_parts,
    dbias_parts,
    mask_data,
    mask_index,
    dk,
    dv,
    dbias,
    mask_strides,
    shape,
    owners,
    grid_tiles,
    BLOCK: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    MASK: tl.constexpr,
    NEED_K: tl.constexpr,
    NEED_V: tl.constexpr,
    NEED_BIAS: tl.constexpr,
):
    """Add the partial sums of one block of keys of one key-value head.

    dk, dv (B, Lk, Hk, D) and dbias fp32 (B, owners, Lk) are contiguous. Keys that a mask hides get zeros. The order of
    every sum is fixed.
    """
    program = tl.program_id(0)
    blocks = tl.cdiv(shape.seqlen_k, BLOCK)
    num_heads_k = shape.num_heads // shape.group
    keys = program % blocks * BLOCK + tl.arange(0, BLOCK)
    h_k = program // blocks % num_heads_k
    b = (program // blocks // num_heads_k).to(tl.int64)
    key_ok = keys < shape.seqlen_k
    dims = tl.arange(0, BLOCK_D)
    dims_v = tl.arange(0, BLOCK_DV)
    dim_ok = (dims < shape.head_dim)[None, :]
    dim_v_ok = (dims_v < shape.head_dim_v)[None, :]
    acc_dk = tl.zeros([BLOCK, BLOCK_D], tl.float32)
    acc_dv = tl.zeros([BLOCK, BLOCK_DV], tl.float32)
    members = owners // num_heads_k
    for member in range(0, members):
        owner = h_k * members + member
        places = keys
        kept = key_ok
        count = shape.seqlen_k
        if MASK == KEYS:
            _, prefix = mask_head(mask_data, mask_index, mask_strides, b, owner * (shape.num_heads // owners), MASK)
            count = tl.load(prefix + shape.seqlen_k)
            places = tl.load(prefix + keys, mask=key_ok, other=0)
            kept = key_ok & (tl.load(prefix + keys + 1, mask=key_ok, other=0) > places)
        tiles_n = tl.maximum(tl.cdiv(count, BLOCK_N), 1)
        acc_bias = tl.zeros([BLOCK], tl.float32)
        for part in range(0, grid_tiles // tiles_n):
            slot = part * tiles_n + places // BLOCK_N
            line = ((b * owners + owner) * grid_tiles + slot) * BLOCK_N + places % BLOCK_N
            if NEED_K:
                at = dk_parts + line[:, None] * shape.head_dim + dims[None, :]
                acc_dk += tl.load(at, mask=kept[:, None] & dim_ok, other=0.0)
            if NEED_V:
                at = dv_parts + line[:, None] * shape.head_dim_v + dims_v[None, :]
                acc_dv += tl.load(at, mask=kept[:, None] & dim_v_ok, other=0.0)
            if NEED_BIAS:
                acc_bias += tl.load(dbias_parts + line, mask=kept, other=0.0)
        if NEED_BIAS:
            tl.store(dbias + (b * owners + owner) * shape.seqlen_k + keys, acc_bias, mask=key_ok)
    row = ((b * shape.seqlen_k + keys) * num_heads_k + h_k)[:, None]
    if NEED_K:
        at = dk + row * shape.head_dim + dims[None, :]
        tl.store(at, acc_dk.to(dk.dtype.element_ty), mask=key_ok[:, None] & dim_ok)
    if NEED_V:
        at = dv + row * shape.head_dim_v + dims_v[None, :]
        tl.store(at, acc_dv.to(dv.dtype.element_ty), mask=key_ok[:, None] & dim_v_ok)
