"""The launch of the attention kernels: what the tensors of a call become as kernel arguments."""

from __future__ import annotations

import contextlib
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from flash_dmattn.masks.packing import TILE, TileLists, make_band

from .backward_bias import backward_bias_kernel
from .backward_delta import delta_kernel
from .backward_keys import backward_keys_kernel
from .backward_queries import backward_queries_kernel
from .forward import forward_kernel
from .mask_pack import list_tiles, pack_mask
from .tile_ops import KEY_BIAS, LOG2E, NO_BIAS, ROW_BIAS, TILE_BIAS
from .tile_table import tile_of

Gradients = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]


class Flags(NamedTuple):
    """The numbers of a call that are no tensors."""

    is_causal: bool
    window_size: tuple[int, int]
    softmax_scale: float
    softcap: float


class Packed(NamedTuple):
    """A mask as the kernels read it, the band folded in."""

    bits: Tensor
    classes: Tensor
    lists: TileLists


def pack(mask: Tensor | None, q: Tensor, k: Tensor, flags: Flags) -> Packed | None:
    """Pack a 4-D bool mask, its query and key dims expanded where they are 1."""
    if mask is None:
        return None
    seqlen_q, seqlen_k = q.shape[1], k.shape[1]
    mask = mask.expand(-1, -1, seqlen_q, seqlen_k)
    for dim in (0, 1):
        if mask.stride(dim) == 0 and mask.shape[dim] > 1:
            mask = mask.narrow(dim, 0, 1)
    bits, classes = pack_mask(mask, make_band(seqlen_q, seqlen_k, flags.is_causal, flags.window_size))
    return Packed(bits, classes, list_tiles(classes))


class Call:
    """The arguments that all kernels of one call share."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: Tensor | None, flags: Flags) -> None:
        # The kernels read rows of unit stride; the smallest copy that gives them is that of the one tensor.
        self.q, self.k, self.v = (x if x.stride(3) == 1 or x.shape[3] == 1 else x.contiguous() for x in (q, k, v))
        self.bias, self.flags = bias, flags
        self.batch, self.seqlen_q, self.num_heads, self.head_dim = q.shape
        _, self.seqlen_k, self.num_heads_k, self.head_dim_v = v.shape
        self.group = self.num_heads // self.num_heads_k
        # Equal, or both at least 64: with 32 and 16 the forward kernel that Triton 3.6 makes for unaligned rows reads
        # beyond its shared memory (found by compute-sanitizer on an H200), and out is wrong.
        padded_d, padded_dv = _padded(self.head_dim), _padded(self.head_dim_v)
        self.block_d, self.block_dv = max(padded_d, min(padded_dv, 64)), max(padded_dv, min(padded_d, 64))
        self.capability = torch.cuda.get_device_capability(q.device) if q.is_cuda else None
        self.packed = pack(mask, q, k, flags)
        left, right = flags.window_size
        self.left, self.right = left, 0 if flags.is_causal else right
        self.bias_kind, self.bias_strides = _bias_kind(bias)
        # Any tensor stands in for one that a kernel does not read.
        self.unread = self.q

    def bias_arguments(self) -> tuple[Any, ...]:
        """Strides of bias, and how many query heads share one head of it."""
        return (*self.bias_strides, self._sharing(self.bias))

    def mask_arguments(self, columns: bool = False) -> tuple[Any, ...]:
        """Strides of bits and of one list, the length of a list, and how many query heads share one head of mask."""
        if self.packed is None:
            return (0, 0, 0, 0, 0, 0, 1)
        bits, classes, _ = self.packed
        strides = _broadcast_strides(bits)[:3]
        counts = classes.shape[3] if columns else classes.shape[2]
        length = classes.shape[2] if columns else classes.shape[3]
        per_batch = 0 if classes.shape[0] == 1 else classes.shape[1] * counts
        per_head = 0 if classes.shape[1] == 1 else counts
        return (*strides, per_batch, per_head, length, self._sharing(classes))

    def _sharing(self, x: Tensor | None) -> int:
        return self.group if x is not None and x.shape[1] == self.num_heads_k else 1

    def lists(self, columns: bool = False) -> tuple[Tensor, ...]:
        """bits, full counts, partial counts, indices."""
        if self.packed is None:
            return (self.unread,) * 4
        bits, _, lists = self.packed
        if columns:
            return bits, lists.col_full_count, lists.col_partial_count, lists.col_indices
        return bits, lists.row_full_count, lists.row_partial_count, lists.row_indices

    def strides(self, *tensors: Tensor) -> tuple[int, ...]:
        """Batch, length and head strides of (B, L, H, D) tensors."""
        return tuple(stride for x in tensors for stride in x.stride()[:3])

    def options(self, kernel: str) -> dict[str, Any]:
        """Constants of a kernel."""
        has_mask = self.packed is not None
        tile = tile_of(
            kernel,
            self.q.dtype,
            max(self.block_d, self.block_dv),
            self.capability,
            has_mask=has_mask,
            has_tile_bias=self.bias_kind == TILE_BIAS.value,
        )
        return {
            "BLOCK_M": tile.block_m,
            "BLOCK_N": tile.block_n,
            "BLOCK_D": self.block_d,
            "BLOCK_DV": self.block_dv,
            "TILE": TILE,
            "HAS_MASK": has_mask,
            "BIAS": self.bias_kind,
            "SOFTCAP": self.flags.softcap > 0,
            # The band is part of a packed mask.
            "LEFT": self.left >= 0 and not has_mask,
            "RIGHT": self.right >= 0 and not has_mask,
            "PAD_D": self.block_d != self.head_dim,
            "PAD_DV": self.block_dv != self.head_dim_v,
            "PRECISION": "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee",
            "num_warps": tile.num_warps,
            "num_stages": tile.num_stages,
        }

    def on_device(self) -> contextlib.AbstractContextManager[object]:
        """Triton launches on the current device, which may be another one."""
        return torch.cuda.device(self.q.device) if self.q.is_cuda else contextlib.nullcontext()


def _padded(dim: int) -> int:
    return max(16, triton.next_power_of_2(dim))


def _broadcast_strides(x: Tensor) -> list[int]:
    # A dim of size 1 may have any stride; it is read for every index.
    return [0 if size == 1 else stride for size, stride in zip(x.shape, x.stride(), strict=True)]


def _bias_kind(bias: Tensor | None) -> tuple[int, list[int]]:
    if bias is None:
        return NO_BIAS.value, [0, 0, 0, 0]
    strides = _broadcast_strides(bias)
    if strides[3] == 0:
        return ROW_BIAS.value, strides
    return (KEY_BIAS if strides[2] == 0 else TILE_BIAS).value, strides


def _descriptor(x: Tensor, block_n: int, block_d: int) -> TensorDescriptor:
    batch, seqlen, heads, dim = x.shape
    strides = [x.stride(0), x.stride(2), x.stride(1), 1]
    return TensorDescriptor(x, [batch, heads, seqlen, dim], strides, [1, 1, block_n, block_d])


def _fits_tma(x: Tensor) -> bool:
    # Of the tensor memory accelerator: addresses and strides in units of 16 bytes, strides that are not 0.
    units = [stride * x.element_size() for stride in x.stride()[:3]]
    return x.data_ptr() % 16 == 0 and all(0 < unit < 2**40 and unit % 16 == 0 for unit in units)


def forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: Tensor | None, out: Tensor, lse: Tensor, flags: Flags
) -> None:
    """Write out (B, Lq, Hq, Dv) and lse (B, Hq, Lq), both contiguous."""
    call = Call(q, k, v, mask, bias, flags)
    options = call.options("forward")
    k_argument: Any = call.k
    v_argument: Any = call.v
    tma = call.capability == (9, 0) and q.dtype != torch.float32 and _fits_tma(call.k) and _fits_tma(call.v)
    if tma:
        k_argument = _descriptor(call.k, options["BLOCK_N"], call.block_d)
        v_argument = _descriptor(call.v, options["BLOCK_N"], call.block_dv)
    size, softcap = abs(flags.softmax_scale), flags.softcap
    grid = (triton.cdiv(call.seqlen_q, options["BLOCK_M"]) * call.batch * call.num_heads,)
    with call.on_device():
        forward_kernel[grid](
            call.q,
            k_argument,
            v_argument,
            call.unread if bias is None else bias,
            *call.lists(),
            out,
            lse,
            *call.strides(call.q, call.k, call.v),
            *call.bias_arguments(),
            *call.mask_arguments(),
            size / softcap if softcap > 0 else size * LOG2E.value,
            -1.0 if flags.softmax_scale < 0 else 1.0,
            softcap,
            call.seqlen_q,
            call.seqlen_k,
            call.num_heads,
            call.group,
            call.head_dim,
            call.head_dim_v,
            call.left,
            call.right,
            **options,
            TMA=tma,
        )


def backward(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    out: Tensor,
    lse: Tensor,
    flags: Flags,
    need: tuple[bool, bool, bool, bool],
) -> Gradients:
    """The gradients asked for; every sum is taken in fp32, in a fixed order, and rounded once."""
    need_q, need_k, need_v, need_bias = need
    call = Call(q, k, v, mask, bias, flags)
    if dout.stride(3) != 1 and dout.shape[3] != 1:
        dout = dout.contiguous()
    delta, lse_log2 = torch.empty_like(lse), torch.empty_like(lse)
    block_m = 32
    scale = flags.softmax_scale
    with call.on_device():
        delta_kernel[(triton.cdiv(call.seqlen_q, block_m) * call.batch * call.num_heads,)](
            dout,
            out,
            lse if dlse is None else dlse,
            lse,
            delta,
            lse_log2,
            *call.strides(dout),
            *(lse if dlse is None else dlse).stride(),
            call.seqlen_q,
            call.num_heads,
            call.head_dim_v,
            BLOCK_M=block_m,
            BLOCK_DV=call.block_dv,
            HAS_DLSE=dlse is not None,
        )
        shared = (
            scale / flags.softcap if flags.softcap > 0 else scale * LOG2E.value,
            scale,
            flags.softcap,
            call.batch,
            call.seqlen_q,
            call.seqlen_k,
            call.num_heads,
            call.group,
            call.head_dim,
            call.head_dim_v,
            call.left,
            call.right,
        )
        read = (call.q, call.k, call.v, call.unread if bias is None else bias, dout, lse_log2, delta)
        strides = (*call.strides(call.q, call.k, call.v, dout), *call.bias_arguments())
        per_key = need_bias and bias is not None and bias.shape[2] == 1 and bias.shape[3] > 1
        per_row = need_bias and bias is not None and bias.shape[3] == 1
        per_score = need_bias and bias is not None and not per_key and not per_row
        dbias: Tensor | None = None
        dk = dv = dq = None
        if need_k or need_v or per_key:
            dk, dv, dbias = _backward_keys(call, read, strides, shared, need_k, need_v, bias if per_key else None)
        if per_row and bias is not None:
            dbias = _row_gradient(bias, dlse, lse, call)
        full = (call.batch, call.num_heads, call.seqlen_q, call.seqlen_k)
        stored = per_score and bias is not None and bias.shape == full
        if need_q or stored:
            dq = torch.empty(q.shape, dtype=q.dtype, device=q.device) if need_q else None
            if stored and bias is not None:
                # Tiles that no program visits stay zero.
                dbias = torch.zeros(full, dtype=bias.dtype, device=q.device)
            options = call.options("queries")
            backward_queries_kernel[(triton.cdiv(call.seqlen_q, options["BLOCK_M"]) * call.batch * call.num_heads,)](
                *read,
                *call.lists(),
                call.unread if dq is None else dq,
                dbias if stored else call.unread,
                *strides,
                *call.mask_arguments(),
                *shared,
                **options,
                NEED_Q=need_q,
                NEED_BIAS=stored,
            )
        if per_score and not stored and bias is not None:
            dbias = _shared_gradient(call, read, strides, shared, bias)
    return dq, dk, dv, dbias


def _backward_keys(
    call: Call,
    read: tuple[Tensor, ...],
    strides: tuple[int, ...],
    shared: tuple[Any, ...],
    need_k: bool,
    need_v: bool,
    bias: Tensor | None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """dk, dv, and the gradient of a bias of one value per key where one is given."""
    # A bias with a head for each query head needs its sums apart.
    split = call.group > 1 and bias is not None and bias.shape[1] == call.num_heads
    owners = call.num_heads if split else call.num_heads_k
    device = call.q.device

    def gradient(x: Tensor) -> Tensor:
        batch, seqlen, _, dim = x.shape
        return torch.empty((batch, seqlen, owners, dim), dtype=torch.float32 if split else x.dtype, device=device)

    dk = gradient(call.k) if need_k else None
    dv = gradient(call.v) if need_v else None
    sums = None
    if bias is not None:
        sums = torch.empty((call.batch, owners, call.seqlen_k), dtype=torch.float32, device=device)
    options = call.options("keys")
    backward_keys_kernel[(triton.cdiv(call.seqlen_k, options["BLOCK_N"]) * call.batch * owners,)](
        *read,
        *call.lists(columns=True),
        *(call.unread if x is None else x for x in (dk, dv, sums)),
        *strides,
        *call.mask_arguments(columns=True),
        *shared,
        **options,
        NEED_K=need_k,
        NEED_V=need_v,
        NEED_BIAS=bias is not None,
        SPLIT_HEADS=split,
    )
    if split:
        dk, dv = (x if x is None else x.unflatten(2, (call.num_heads_k, -1)).sum(3).to(call.k.dtype) for x in (dk, dv))
    dbias = None
    if bias is not None and sums is not None:
        dbias = sums.sum_to_size((bias.shape[0], bias.shape[1], call.seqlen_k)).view(bias.shape).to(bias.dtype)
    return dk, dv, dbias


def _row_gradient(bias: Tensor, dlse: Tensor | None, lse: Tensor, call: Call) -> Tensor:
    """The gradient of a bias of one value per query: it shifts lse and leaves p as it is, so it is the reduced dlse."""
    if dlse is None:
        return torch.zeros(bias.shape, dtype=bias.dtype, device=bias.device)
    rows = dlse.to(torch.float32).masked_fill(lse == -torch.inf, 0.0)
    if bias.shape[1] == call.num_heads_k and call.group > 1:
        rows = rows.unflatten(1, (call.num_heads_k, -1)).sum(2)
    return rows.sum_to_size(bias.shape[:3]).view(bias.shape).to(bias.dtype)


def _shared_gradient(
    call: Call, read: tuple[Tensor, ...], strides: tuple[int, ...], shared: tuple[Any, ...], bias: Tensor
) -> Tensor:
    """The gradient of a bias of one value per score that batch entries or heads share."""
    dbias = torch.empty(bias.shape, dtype=bias.dtype, device=bias.device)
    options = call.options("bias")
    tiles = triton.cdiv(call.seqlen_q, options["BLOCK_M"]) * triton.cdiv(call.seqlen_k, options["BLOCK_N"])
    bits, classes = (call.unread, call.unread) if call.packed is None else call.packed[:2]
    backward_bias_kernel[(tiles * bias.shape[0] * bias.shape[1],)](
        *read,
        bits,
        classes,
        dbias,
        *strides,
        *call.mask_arguments(),
        *shared,
        bias_batch=bias.shape[0],
        bias_heads=bias.shape[1],
        **options,
    )
    return dbias
