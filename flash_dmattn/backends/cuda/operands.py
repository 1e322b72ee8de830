"""The operators of the extension, and their operands, which are copied if TMA cannot load their rows.

A bias of one value per query and key is copied if it is small and the same for all batch entries. One head of a window
of 49 keys has 5 KB. A bias with a value for each score is copied if rows are short. A larger bias is never copied,
because the copy would double its memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...problem import AttentionProblem, Flags, bias_class, collapse, fits_tma

# (inputs, out, lse) -> None; a fourth tensor gets the maximum scores of rows. It writes these tensors.
Attend = Callable[..., None]


class Kernels(NamedTuple):
    """The operators of the extension that a dense call launches."""

    attend: Callable[..., Any]
    differentiate: Callable[..., Any]
    gather_keys: Callable[..., list[Tensor]]
    interval_bits: Callable[..., Tensor]


@cache
def kernels() -> Kernels:
    """Look up the operators once: torch.ops takes a microsecond for each. The probe has loaded the extension."""
    operators = torch.ops.flash_dmattn
    return Kernels(
        operators.cuda_forward_kernel.default,
        operators.cuda_backward_kernel.default,
        operators.cuda_gather_keys.default,
        operators.cuda_interval_bits.default,
    )


def readable_rows(x: Tensor) -> Tensor:
    """Return a tensor (B, L, H, D) that TMA can load: x itself, or a contiguous copy."""
    is_readable = x.data_ptr() % 16 == 0 and fits_tma(x.shape, x.stride(), x.element_size())
    return x if is_readable else x.clone(memory_format=torch.contiguous_format)


def reader(
    shapes: Sequence[tuple[Sequence[int], Sequence[int]]], itemsize: int
) -> Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]:
    """Return a function that makes q, k and v of these shapes and strides readable for TMA, by copies if needed."""
    fits = all(fits_tma(shape, strides, itemsize) for shape, strides in shapes)

    def read(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if fits and (q.data_ptr() | k.data_ptr() | v.data_ptr()) % 16 == 0:
            return q, k, v
        return readable_rows(q), readable_rows(k), readable_rows(v)

    return read


FLOAT_TILE_DIM = 64  # head dims up to this have kernels with tiles of a bias in fp32 (csrc/sm90/bias_forms.h)
COLUMNS = 8  # rows of 16-bit values are aligned to 16 bytes if this divides their length
_SHARED_COPY_RATIO = 4  # a shared bias is copied if q, k, v and out have at least this multiple of its values
_MAX_COPY_RATIO = 4  # a bias with a value for each score is copied if it has at most this multiple of their values


def fits(shape: Sequence[int], strides: Sequence[int], itemsize: int) -> bool:
    """Return whether TMA can load tiles of a bias that starts on 16 bytes; a dim of stride 0 counts as size 1."""
    held = [1 if stride == 0 else size for size, stride in zip(shape, strides, strict=True)]
    return fits_tma(held, strides, itemsize)


def _copied_values(shape: Sequence[int], strides: Sequence[int]) -> int:
    batch, heads = (1 if stride == 0 else size for size, stride in zip(shape[:2], strides[:2], strict=True))
    return batch * heads * shape[2] * _padded(shape[3])


def _padded(keys: int) -> int:
    return -(-keys // COLUMNS) * COLUMNS


def _is_small_and_shared(p: AttentionProblem) -> bool:
    """Return whether a bias is the same for all batch entries, and small compared with q, k, v and out together."""
    assert p.bias is not None
    shape, strides, _ = p.bias
    if p.batch == 1 or not (shape[0] == 1 or strides[0] == 0):
        return False
    return _SHARED_COPY_RATIO * _copied_values(shape, strides) <= _operand_values(p)


def _operand_values(p: AttentionProblem) -> int:
    return p.batch * (p.seqlen_q * p.num_heads + p.seqlen_k * p.num_heads_k) * (p.head_dim + p.head_dim_v)


def _has_short_rows(p: AttentionProblem) -> bool:
    """Return whether a bias has a value for each score, and rows so short that a copy is cheap next to q, k, v and out.

    Graphs and molecules have such a bias. Loading it value by value takes longer than the copy.
    """
    assert p.bias is not None
    shape, strides, _ = p.bias
    is_whole = shape[:2] == (p.batch, p.num_heads) and 0 not in strides[:2]
    return is_whole and _copied_values(shape, strides) <= _MAX_COPY_RATIO * _operand_values(p)


def has_tile_kernels(p: AttentionProblem) -> bool:
    """Return whether kernels read tiles of a bias of this dtype; no backward kernel has fp32 beside a softcap."""
    assert p.bias is not None
    if p.bias.dtype == p.dtype:
        return True
    plain = p.dropout_p == 0 and p.sequences is None
    return p.bias.dtype == torch.float32 and plain and max(p.head_dim, p.head_dim_v) <= FLOAT_TILE_DIM


def copies_bias(p: AttentionProblem) -> bool:
    """Return whether the backend copies the bias of a call because of its strides, to load tiles of the copy."""
    if p.bias is None or p.bias_class != "score" or not has_tile_kernels(p):
        return False
    pays = _is_small_and_shared(p) or _has_short_rows(p)
    return pays and not fits(p.bias.shape, p.bias.strides, p.bias.dtype.itemsize)


def forward_copies_bias(p: AttentionProblem) -> bool:
    """Return whether the forward pass also uses tiles of a copy, instead of loading the bias value by value.

    For small head dims, kernels with tiles have more rows. With a mask, a copy would include values of hidden keys.
    """
    if not copies_bias(p):
        return False
    is_narrow = max(p.head_dim, p.head_dim_v) <= 32 and p.seqlen_k <= 256 and p.mask is None
    return _is_small_and_shared(p) or is_narrow


def copies_scores(p: AttentionProblem) -> bool:
    """Return whether the backward pass copies a bias with a value for each score, or its gradient."""
    if p.bias is None or p.bias_class != "score" or not _has_short_rows(p):
        return False
    return copies_bias(p) or (p.dbias_class == "score" and pads_dbias(p))


def makes_dbias_of_any_rows(p: AttentionProblem) -> bool:
    """Return whether rows of dbias may have any length, because dbias is copied from a padded buffer or from sums."""
    return p.bias is not None and ((p.bias.shape[0] == 1 and _is_small_and_shared(p)) or pads_dbias(p))


def pads_dbias(p: AttentionProblem) -> bool:
    """Return whether the main kernel stores dbias into padded rows, because its rows are no multiple of 16 bytes."""
    if p.bias is None or p.seqlen_k % COLUMNS == 0 or p.softcap > 0 or p.dropout_p > 0:
        return False
    return _has_short_rows(p)


def padded_rows(x: Tensor) -> Tensor:
    """Allocate a tensor like x with rows of a multiple of 16 bytes."""
    return x.new_empty((*x.shape[:3], _padded(x.shape[3])))


def copy_unpadded(x: Tensor, padded: Tensor) -> Tensor:
    """Fill x with the rows of a tensor that `padded_rows` allocated, and return it."""
    return x.copy_(padded[..., : x.shape[3]])


def copy_note(p: AttentionProblem) -> str:
    assert p.bias is not None
    shape, strides, dtype = p.bias
    size = _copied_values(shape, strides) * dtype.itemsize
    return (
        f"copies bias, of strides {tuple(strides)}, into rows of {_padded(shape[3])} keys, "
        f"{-(-size // 1024)} KB: TMA reads rows of unit stride that start on 16 bytes"
    )


def readable(bias: Tensor) -> Tensor:
    """Return a bias for the kernels: one of one value per query and key is copied if TMA cannot load it."""
    shape, strides = bias.shape, bias.stride()
    if bias_class(shape, strides) != "score":
        return bias
    if bias.data_ptr() % 16 == 0 and fits(shape, strides, bias.element_size()):
        return bias
    values = collapse(bias)
    return padded_rows(values)[..., : values.shape[3]].copy_(values).expand(shape)


def bias_reader(p: AttentionProblem) -> Callable[[Tensor], Tensor] | None:
    """Return `readable` for a class of calls, or None if their bias has not one value per query and key."""
    if p.bias is None or p.bias_class != "score":
        return None
    if not fits(p.bias.shape, p.bias.strides, p.bias.dtype.itemsize):
        return readable
    return lambda bias: bias if bias.data_ptr() % 16 == 0 else readable(bias)


def forward_bias(p: AttentionProblem) -> Callable[[Tensor], Tensor] | None:
    """Return the function that prepares a bias for the forward pass, or None.

    Kernels without dropout can load a bias value by value, and do so if it is large. Kernels with dropout cannot.
    """
    if p.bias is None or p.bias_class != "score":
        return None
    is_small = has_tile_kernels(p) and _is_small_and_shared(p)
    return bias_reader(p) if is_small or forward_copies_bias(p) or p.dropout_p > 0 else None


def stores_into(dbias: Tensor, q: Tensor, flags: Flags) -> bool:
    """Return whether kernels can write a dbias of one value per query and key into rows of a larger tensor.

    Only the main kernel can, by TMA. It supports a bias with a value for each entry and head, without softcap or
    dropout. Other kernels need a contiguous dbias.
    """
    if flags.softcap > 0 or flags.dropout_p > 0 or dbias.shape[:2] != (q.shape[0], q.shape[2]):
        return False
    starts = dbias.data_ptr() % 16 == 0 and dbias.shape[3] % COLUMNS == 0
    return starts and fits_tma(dbias.shape, dbias.stride(), dbias.element_size())
