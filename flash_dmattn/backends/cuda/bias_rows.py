"""A bias of one value per query and key whose rows TMA cannot read: when it is copied into rows that start on 16 bytes.

That costs nothing beside attention where batch entries share a small bias: one head of a window of 49 keys is 5 KB. A
bias as large as the scores is never copied for its strides: that would take its memory once more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from ...problem import AttentionProblem, Flags, bias_class, fits_tma

_COLUMNS = 8  # a row of 16-bit values starts on 16 bytes where rows are multiples of it
_SMALL = 4  # a copy is small where it is at most this part of q, k, v and out


def fits(shape: Sequence[int], strides: Sequence[int], itemsize: int) -> bool:
    """Whether TMA can read tiles of a bias that starts on 16 bytes; it has one value in a dim of stride 0."""
    held = [1 if stride == 0 else size for size, stride in zip(shape, strides, strict=True)]
    return fits_tma(held, strides, itemsize)


def _copied_values(shape: Sequence[int], strides: Sequence[int]) -> int:
    heads = 1 if strides[1] == 0 else shape[1]
    return heads * shape[2] * _padded(shape[3])


def _padded(keys: int) -> int:
    return -(-keys // _COLUMNS) * _COLUMNS


def is_small_and_shared(
    shape: Sequence[int], strides: Sequence[int], q_shape: Sequence[int], v_shape: Sequence[int]
) -> bool:
    """Whether all batch entries share a bias of the dtype of q, and a copy of it is small beside q, k, v and out.

    Args:
        shape, strides: of the bias.
        q_shape, v_shape: of q (batch, seqlen_q, num_heads, head_dim) and v (batch, seqlen_k, num_heads_k, head_dim_v).
    """
    batch, seqlen_q, num_heads, head_dim = q_shape
    _, seqlen_k, num_heads_k, head_dim_v = v_shape
    if batch == 1 or not (shape[0] == 1 or strides[0] == 0):
        return False
    others = batch * (seqlen_q * num_heads + seqlen_k * num_heads_k) * (head_dim + head_dim_v)
    return _SMALL * _copied_values(shape, strides) <= others


def copies_bias(p: AttentionProblem) -> bool:
    """Whether the backend copies the bias of a call, because of its strides, and reads tiles of the copy."""
    if p.bias is None or p.bias_class != "score" or p.bias.dtype != p.dtype:
        return False
    shape, strides, _ = p.bias
    if fits(shape, strides, p.dtype.itemsize):
        return False
    return is_small_and_shared(shape, strides, *_shapes(p))


def makes_dbias_of_any_rows(p: AttentionProblem) -> bool:
    """Whether rows of dbias may have any length: it is small, and written from sums that have rows of their own."""
    if p.bias is None or p.bias.shape[0] != 1:
        return False
    return is_small_and_shared(p.bias.shape, p.bias.strides, *_shapes(p))


def _shapes(p: AttentionProblem) -> tuple[Sequence[int], Sequence[int]]:
    q = (p.batch, p.seqlen_q, p.num_heads, p.head_dim)
    return q, (p.batch, p.seqlen_k, p.num_heads_k, p.head_dim_v)


def copy_note(p: AttentionProblem) -> str:
    """What `explain` says of the copy."""
    assert p.bias is not None
    shape, strides, dtype = p.bias
    size = _copied_values(shape, strides) * dtype.itemsize
    return (
        f"copies bias, of strides {tuple(strides)}, into rows of {_padded(shape[3])} keys, "
        f"{-(-size // 1024)} KB: TMA reads rows of unit stride that start on 16 bytes"
    )


def readable(bias: Tensor) -> Tensor:
    """A bias of any form, where it has one value per query and key in memory that TMA can read."""
    shape, strides = bias.shape, bias.stride()
    if bias_class(shape, strides) != "score":
        return bias
    if bias.data_ptr() % 16 == 0 and fits(shape, strides, bias.element_size()):
        return bias
    from ...masks.arguments import collapse  # importing flash_dmattn needs no masks

    values = collapse(bias)
    padded = values.new_empty((*values.shape[:3], _padded(values.shape[3])))
    return padded[..., : values.shape[3]].copy_(values).expand(shape)


def forward_bias(p: AttentionProblem) -> Callable[[Tensor], Tensor] | None:
    """Return what makes a bias readable for the forward pass, which reads a large one value by value; None for nothing.

    Kernels with dropout read no bias value by value.
    """
    if p.bias is None or p.bias_class != "score":
        return None
    is_small = p.bias.dtype == p.dtype and is_small_and_shared(p.bias.shape, p.bias.strides, *_shapes(p))
    return readable if is_small or p.dropout_p > 0 else None


def stores_into(dbias: Tensor, q: Tensor, flags: Flags) -> bool:
    """Whether kernels write dbias of one value per query and key to rows that lie in a larger tensor.

    The main kernel does, by TMA: that of a bias that nothing shares. With a softcap or dropout it has no kernels that
    store dbias at some head dims, and those that do it in its place want it contiguous.
    """
    if flags.softcap > 0 or flags.dropout_p > 0 or dbias.shape[:2] != (q.shape[0], q.shape[2]):
        return False
    starts = dbias.data_ptr() % 16 == 0 and dbias.shape[3] % _COLUMNS == 0
    return starts and fits_tma(dbias.shape, dbias.stride(), dbias.element_size())
