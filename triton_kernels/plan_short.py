"""The plans of calls of short rows, and which calls they serve."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from flash_dmattn.gradients import key_gradient, query_gradient
from flash_dmattn.problem import (
    AttentionProblem,
    Gradients,
    MaskForm,
    MaskView,
    NeedsGrad,
    bias_class,
    device_arch,
)

from .kernel_launch import Launch
from .plan import Call
from .plan_slots import chunks_of, empty_slots, most_slots, plan_sum
from .short_backward import KEY_SUM, NO_DBIAS, SLOTS, STORE, short_backward_kernel
from .short_forward import short_forward_kernel
from .short_rows import DTYPES, MaskAccess, Walk
from .tile_ops import DENSE_ROW, NO_BIAS, TILE_BIAS, Strides

MASK_FORMS: frozenset[MaskForm] = frozenset({"none", "dense", "tiles", "intervals"})


class ShortTile(NamedTuple):
    """Queries and keys of a tile, warps of a program, and stages of its walk."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


class ShortCall(NamedTuple):
    """What decides whether a call has short rows, and its tiles."""

    arch: str
    seqlen_q: int
    seqlen_k: int
    group: int
    head_dim: int  # the larger of both
    dtype: torch.dtype
    mask_form: MaskForm

    @classmethod
    def of(cls, q: Tensor, k: Tensor, v: Tensor, mask: MaskView, arch: str | None = None) -> ShortCall:
        """Of the tensors of a call, on their device or as on another."""
        (_, seqlen_q, num_heads, head_dim), (_, seqlen_k, num_heads_k, head_dim_v) = q.shape, v.shape
        dims, group = max(head_dim, head_dim_v), num_heads // num_heads_k
        return cls(arch or device_arch(q.device), seqlen_q, seqlen_k, group, dims, q.dtype, mask.form)

    @classmethod
    def described(cls, p: AttentionProblem) -> ShortCall:
        """Of a call that is described."""
        dims, group = max(p.head_dim, p.head_dim_v), p.num_heads // p.num_heads_k
        return cls(p.arch, p.seqlen_q, p.seqlen_k, group, dims, p.dtype, p.mask_form)

    def serves_forward(self) -> bool:
        """Whether the forward kernel of short rows serves it."""
        return self.dtype in DTYPES and self.mask_form in MASK_FORMS and forward_tile(self) is not None

    def serves_backward(self) -> bool:
        """Whether the backward kernel does: no keys are shared by a group of heads."""
        served = self.dtype in DTYPES and self.mask_form in MASK_FORMS and self.group == 1
        return served and backward_tile(self) is not None


def _block(length: int) -> int:
    return max(32, triton.next_power_of_2(length))  # bits of a mask come in words of 32


def _fits(call: ShortCall, length: int) -> bool:
    # Other GPUs have not been measured, and the least of them have a fourth of the shared memory.
    is_large = call.arch in ("sm_90", "cpu")
    return length <= (128 if is_large else 64) and call.head_dim <= (128 if is_large else 64)


# Measured on an H200 (torch 2.11, Triton 3.6); docs/notes/short_rows.md has the cases, and the next best choices.
@functools.lru_cache(maxsize=4096)
def forward_tile(call: ShortCall) -> ShortTile | None:
    """The tile of the forward kernel; None where there is none."""
    if not _fits(call, call.seqlen_k):
        return None
    block_m, block_n = min(_block(call.seqlen_q), 64), _block(call.seqlen_k)
    num_warps = 4 if block_m == 64 else 2 if block_n == 128 else 1
    return ShortTile(block_m, block_n, num_warps, 1 if call.head_dim > 64 and block_n == 128 else 2)


@functools.lru_cache(maxsize=4096)
def backward_tile(call: ShortCall) -> ShortTile | None:
    """The tile of the backward kernel, whole rows and columns; None where there is none."""
    block_m, block_n = _block(call.seqlen_q), _block(call.seqlen_k)
    size = block_m * block_n
    if not _fits(call, max(call.seqlen_q, call.seqlen_k)) or (call.head_dim > 64 and size > 64 * 64):
        return None
    if size == 32 * 32:
        return ShortTile(block_m, block_n, 2 if call.head_dim <= 64 else 4, 2)
    if size <= 64 * 64:
        return ShortTile(block_m, block_n, 4, 2 if call.arch == "sm_90" else 1)
    return ShortTile(block_m, block_n, 8, 2)


# Whole rows, and whole columns: with the sums of dbias in its registers, the one tile of 128 x 128 leaves room for one
# program on an SM, which waits for all that it reads.
TWO_RUNS = ShortTile(64, 128, 4, 2), ShortTile(128, 64, 8, 2)
TWO_RUNS_FROM = 1024  # heads of entries: a chunk of fewer does not pay for the second run


def backward_tiles(call: ShortCall, dbias_kind: int, heads: int) -> tuple[ShortTile, ...]:
    """The tile of the one run of the backward kernel, or those of its two runs."""
    tile = backward_tile(call)
    assert tile is not None
    is_large = tile.block_m == tile.block_n == 128
    return TWO_RUNS if is_large and dbias_kind == SLOTS.value and heads >= TWO_RUNS_FROM else (tile,)


def _walk(call: Call, tiles: int, bounded: bool = False) -> tuple[Walk, int, int]:
    """The walk of a launch, its chunks and its programs."""
    bias, shape = call.bias, call.shape
    owners_b, owners_h = (1, 1) if bias is None else bias.shape[:2]
    owners = owners_b * owners_h
    most = None if not bounded or bias is None else most_slots(bias.numel())
    chunk, chunks = chunks_of(shape.batch * shape.num_heads // owners, owners * tiles, call.num_sms, most)
    return Walk(owners_b, owners_h, tiles, chunk), chunks, owners * tiles * chunks


def mask_tensors(mask: MaskView) -> tuple[Tensor | None, Tensor | None]:
    """What the kernels read of a mask: a bool tensor, its bits, or the first and last query of each key."""
    if mask.form == "none":
        return None, None
    if mask.form == "intervals":
        return mask.tensors[0], mask.tensors[1]
    return mask.tensors[0], None


def _access(call: Call) -> MaskAccess:
    data, _ = mask_tensors(call.mask)
    if data is None:
        return MaskAccess(0, 0, 0, 0, 1)
    strides = [0 if size == 1 else stride for size, stride in zip(data.shape, data.stride(), strict=True)]
    row, key = (0, 0) if call.mask.form == "intervals" else strides[2:]
    return MaskAccess(strides[0], strides[1], row, key, call.sharing(data))


def _numbers(call: Call, walk: Walk) -> tuple[Any, ...]:
    return (call.bias_strides(), _access(call), call.shape, walk, call.scale_log2)


def _constants(call: Call, tile: ShortTile, *read: Tensor) -> tuple[Any, ...]:
    bias = NO_BIAS.value if call.bias is None else TILE_BIAS.value  # of any shape: one that is expanded is read so too
    one_row = call.mask.form == "dense" and _access(call).row == 0
    mask_kind = DENSE_ROW.value if one_row else call.mask_kind
    return (
        *(tile.block_m, tile.block_n, call.block_d, call.block_dv, mask_kind, bias, call.flags.softcap > 0),
        *(*call.band, *call.pads, _is_wide(call, *read), call.precision, tile.num_stages),
    )


def _is_wide(call: Call, *read: Tensor) -> bool:
    """Whether offsets within one head of what is read need 64 bits."""
    spans = [x.shape[1] * x.stride(1) for x in read]
    for x in (call.bias, mask_tensors(call.mask)[0] if call.mask.form == "dense" else None):
        if x is not None:
            spans.append(sum(size * stride for size, stride in zip(x.shape[2:], x.stride()[2:], strict=True)))
    return max(spans) + 1024 > 2**31 - 1  # blocks reach beyond the ends


def _strides(*tensors: Tensor) -> tuple[Strides, ...]:
    return tuple(Strides(*x.stride()[:3]) for x in tensors)


def plan_short_forward(call: Call) -> Callable[..., None]:
    """How a class of calls makes out and lse: run(q, k, v, mask, bias, out, lse)."""
    q, k, v, shape = call.q, call.k, call.v, call.shape
    tile = forward_tile(ShortCall.of(q, k, v, call.mask, call.arch))
    assert tile is not None
    walk, _, programs = _walk(call, triton.cdiv(shape.seqlen_q, tile.block_m))
    launch = Launch(
        short_forward_kernel,
        programs,
        (*_strides(q, k, v), *_numbers(call, walk), call.flags.softcap),
        _constants(call, tile, q, k, v),
        {"num_warps": tile.num_warps},
    )
    return lambda q, k, v, mask, bias, out, lse: launch(q, k, v, bias, *mask_tensors(mask), out, lse)


def plan_short_backward(
    call: Call, dout: Tensor, dlse: Tensor | None, needs_grad: NeedsGrad
) -> Callable[..., Gradients]:
    """How a class of calls makes its gradients: run(dout, dlse, q, k, v, mask, bias, out, lse)."""
    need_q, need_k, need_v, need_bias = needs_grad
    q, k, v, bias, shape = call.q, call.k, call.v, call.bias, call.shape
    made_as = bias_class(bias.shape) if need_bias and bias is not None else "none"
    kind = NO_DBIAS
    if made_as == "key":
        kind = KEY_SUM
    elif made_as == "score" and bias is not None:
        kind = STORE if bias.shape[:2] == (shape.batch, shape.num_heads) else SLOTS
    tiles = backward_tiles(ShortCall.of(q, k, v, call.mask, call.arch), kind.value, shape.batch * shape.num_heads)
    launches = []
    slots = 1
    for tile in tiles if need_q or need_k or need_v or kind != NO_DBIAS else ():
        all_keys = tile.block_n >= shape.seqlen_k
        all_rows = tile.block_m >= shape.seqlen_q
        wants = (need_q and all_keys, need_k and all_rows, need_v and all_rows)
        dbias_here = kind if all_rows else NO_DBIAS
        num_tiles = triton.cdiv(shape.seqlen_q, tile.block_m) if all_keys else triton.cdiv(shape.seqlen_k, tile.block_n)
        walk, chunks, programs = _walk(call, num_tiles, dbias_here == SLOTS)
        if dbias_here == SLOTS:
            slots = chunks
        numbers = (
            *_strides(q, k, v, dout),
            (0, 0, 0) if dlse is None else tuple(dlse.stride()),
            *_numbers(call, walk),
            call.flags.softmax_scale,
            call.flags.softcap,
        )
        constants = (
            *_constants(call, tile, q, k, v, dout),
            all_keys,
            dlse is not None,
            len(tiles) > 1 and all_keys,
            *wants,
            dbias_here.value,
        )
        options = {"num_warps": tile.num_warps}
        launches.append(Launch(short_backward_kernel, programs, numbers, constants, options))
    add = plan_sum(slots, bias) if bias is not None else None

    def run(
        dout: Tensor,
        dlse: Tensor | None,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: MaskView,
        bias: Tensor | None,
        out: Tensor,
        lse: Tensor,
    ) -> Gradients:
        def empty(x: Tensor, needed: bool) -> Tensor | None:
            return torch.empty(x.shape, dtype=x.dtype, device=x.device) if needed else None

        def sums(*sizes: int) -> Tensor:
            return torch.empty(sizes, dtype=torch.float32, device=q.device)

        dq, dk, dv = empty(q, need_q), empty(k, need_k), empty(v, need_v)
        made = dbias = delta = None
        if bias is not None and kind == KEY_SUM:
            made = sums(shape.batch, shape.num_heads, shape.seqlen_k)
        elif bias is not None and kind != NO_DBIAS:
            dbias = empty(bias, True)
            made = empty_slots(slots, dbias)
        if len(launches) > 1:
            delta = sums(2, *lse.shape)
        for launch in launches:
            launch(q, k, v, bias, dout, lse, dlse, *mask_tensors(mask), delta, dq, dk, dv, made)
        if bias is not None and kind == KEY_SUM:
            dbias = key_gradient(bias, made, shape.num_heads)
        elif bias is not None and add is not None and dbias is not None:
            add(made, dbias)
        elif bias is not None and made_as == "query":
            dbias = query_gradient(bias, dlse, lse, shape.num_heads)
        return dq, dk, dv, dbias

    return run
