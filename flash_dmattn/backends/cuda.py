"""The CUDA extension for Hopper: a forward pass, and a backward pass for most calls; triton completes the rest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import extension, ops
from ..problem import AttentionProblem, fits_copy_engine
from .cuda_rules import AUTO_RULES, RULES, UNITS
from .gradients import key_gradient, query_gradient, zero_gradients
from .protocol import Availability, Gradients

__all__ = ["AUTO_RULES", "MASK_FORM", "NAME", "RULES", "UNITS", "backward", "forward", "notes", "probe"]

NAME = "cuda"
MASK_FORM = "prepared"
# How many blocks share the keys of a piece of work that would leave others without one: 0 has the operator estimate it
# (csrc/api/num_splits.h); 1 is none. Another number is for `python -m benchmarks.key_parts` and for tests.
KEY_PARTS = 0

_found: Availability | None = None


def probe() -> Availability:
    """Whether the compiled extension can be loaded; the first result is remembered."""
    global _found
    if _found is None:
        _found = _load()
    return _found


def _load() -> Availability:
    try:
        loaded = extension.load()
    except extension.ExtensionMismatchError as error:
        return Availability(False, str(error), "rebuild it, or install what it needs: docs/building.md", error)
    except Exception as error:  # a broken installation raises anything; a probe reports it
        if isinstance(error, ModuleNotFoundError) and error.name == extension.NAME:
            return Availability(False, str(error), "build it: docs/building.md", error)
        return Availability(False, f"the CUDA extension cannot be loaded: {error}", "rebuild it", error)
    driver, runtime = loaded.cuda_versions()
    if driver // 1000 < runtime // 1000:
        return Availability(
            False,
            f"the driver is of CUDA {_dotted(driver)}; the extension holds the runtime of {_dotted(runtime)}",
            "update the driver, or build the extension with an older nvcc",
        )
    return Availability(True)


def _dotted(version: int) -> str:
    """13000 as 13.0, as CUDA counts."""
    return f"{version // 1000}.{version % 1000 // 10}"


def notes(problem: AttentionProblem) -> tuple[str, ...]:
    """Copies that a call makes."""
    p = problem
    return tuple(
        f"copies {name}, of strides {tuple(strides)}: the copy engine reads rows of unit stride that start on 16 bytes"
        for name, shape, strides in (
            ("q", (p.batch, p.seqlen_q, p.num_heads, p.head_dim), p.q_strides),
            ("k", (p.batch, p.seqlen_k, p.num_heads_k, p.head_dim), p.k_strides),
            ("v", (p.batch, p.seqlen_k, p.num_heads_k, p.head_dim_v), p.v_strides),
        )
        if not (strides[3] == 1 and fits_copy_engine(shape, strides, p.dtype.itemsize))
    )


def _rows(x: Tensor) -> Tensor:
    # The smallest copy that the copy engine can read is that of the one tensor.
    strides = x.stride()
    readable = strides[3] == 1 and x.data_ptr() % 16 == 0 and fits_copy_engine(x.shape, strides, x.element_size())
    return x if readable else x.clone(memory_format=torch.contiguous_format)


def _tiles(bias: Tensor) -> Tensor:
    """A bias of any form, where it is one per query and key as the copy engine can read it."""
    if bias.data_ptr() % 16 == 0 or any(bias.shape[dim] == 1 or bias.stride(dim) == 0 for dim in (2, 3)):
        return bias
    values = _kernels().collapse(bias)
    padded = values.new_empty((*values.shape[:3], -(-values.shape[3] // 8) * 8))
    return padded[..., : values.shape[3]].copy_(values).expand(bias.shape)


class _Kernels(NamedTuple):
    """What a call uses: the extension's operators, and what prepares a mask and folds a band."""

    attend: Callable[..., Any]
    differentiate: Callable[..., Any]
    make_band: Callable[..., Any]
    collapse: Callable[..., Tensor]
    pack_tiles: Callable[..., list[Tensor]]


_found_kernels: _Kernels | None = None


def _kernels() -> _Kernels:
    # Looked up once: torch.ops takes a microsecond to find an operator, and importing flash_dmattn needs no masks.
    global _found_kernels
    if _found_kernels is None:
        from ..masks.broadcast import collapse
        from ..masks.packing import make_band
        from ..masks.preparation import pack_tiles

        operators = torch.ops.flash_dmattn  # the probe has loaded the extension
        attend, differentiate = operators.cuda_forward_kernel.default, operators.cuda_backward_kernel.default
        _found_kernels = _Kernels(attend, differentiate, make_band, collapse, pack_tiles)
    return _found_kernels


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: list[Tensor],
    bias: Tensor | None,
    is_causal: bool,
    window_size: list[int],
    softmax_scale: float,
    softcap: float,
    deterministic: bool,
) -> tuple[Tensor, Tensor]:
    out, lse = ops.empty_outputs(q, v)
    seqlen_q, seqlen_k = q.shape[1], k.shape[1]
    if seqlen_k == 0:
        return out.zero_(), lse.fill_(-torch.inf)
    if out.numel() == 0:
        return out, lse
    kernels = _kernels()
    left, right = window_size
    band = kernels.make_band(seqlen_q, seqlen_k, is_causal, (left, right))
    low, high = (-seqlen_q, seqlen_k) if band is None else band
    if len(mask) == 1:
        mask = kernels.pack_tiles(kernels.collapse(mask[0]), seqlen_q, seqlen_k, band)
    rows = [mask[0], mask[2]] if mask else []
    kernels.attend(_rows(q), _rows(k), _rows(v), rows, bias, out, lse, low, high, softmax_scale, softcap, KEY_PARTS)
    return out, lse


def _backward(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: list[Tensor],
    bias: Tensor | None,
    out: Tensor,
    lse: Tensor,
    is_causal: bool,
    window_size: list[int],
    softmax_scale: float,
    softcap: float,
    deterministic: bool,
    need: list[bool],
) -> Gradients:
    seqlen_q, seqlen_k, num_heads_k = q.shape[1], k.shape[1], k.shape[2]
    if out.numel() == 0 or seqlen_k == 0:
        return zero_gradients((q, k, v, bias), need)
    kernels = _kernels()
    left, right = window_size
    band = kernels.make_band(seqlen_q, seqlen_k, is_causal, (left, right))
    low, high = (-seqlen_q, seqlen_k) if band is None else band
    dq, dk, dv = (ops.empty_gradient(x) if needed else None for x, needed in zip((q, k, v), need[:3], strict=True))
    dbias = stored = sums = None
    if bias is not None and need[3]:
        if bias.shape[3] == 1:
            dbias = query_gradient(bias, dlse, lse, num_heads_k)
        elif bias.shape[2] == 1:
            sums = torch.empty((*lse.shape[:2], seqlen_k), dtype=torch.float32, device=q.device)
        else:
            # Of one value for each head the kernel may write just the tiles that it visits; a shared gradient is whole.
            is_whole = bias.shape[:2] == lse.shape[:2]
            allocate = torch.zeros if is_whole and (mask or band is not None) else torch.empty
            dbias = stored = allocate(bias.shape, dtype=bias.dtype, device=bias.device)
    if any(x is not None for x in (dq, dk, dv, stored, sums)):
        if len(mask) == 1:
            mask = kernels.pack_tiles(kernels.collapse(mask[0]), seqlen_q, seqlen_k, band)
        tiles = [mask[0], *mask[2:]] if mask else []
        tensors = (_rows(dout), dlse, _rows(q), _rows(k), _rows(v), tiles, None if bias is None else _tiles(bias))
        results = (out.contiguous(), lse.contiguous(), dq, dk, dv, stored, sums)
        kernels.differentiate(*tensors, *results, low, high, softmax_scale, softcap, deterministic)
    if bias is not None and sums is not None:
        dbias = key_gradient(bias, sums, num_heads_k)
    return dq, dk, dv, dbias


forward, backward = ops.define_pair(NAME, _forward, _backward)
