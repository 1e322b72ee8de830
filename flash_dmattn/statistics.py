"""Statistics of the probabilities of a call, computed from its lse, without a tensor of queries times keys.

`key_sums` is the probability that each key receives: the measure by which SnapKV and H2O evict keys. `list_sums` is the
probability of each listed key, summed over heads: the teacher of a selector. `selector_loss` compares the two.

Both sums are gradients of a call whose values are zeros. Where out has the gradient w, the gradient of v sums p * w
over queries. Where lse has the gradient w, and out has none, the gradient of a score is p * w, and the gradient of a
value for an entry of a list sums these over heads. So the backward passes of triton and eager compute both.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from .biases import Bias, ListBias
from .call import differentiate_call, prepare_call
from .definition import is_dtensor
from .masks.topk import CHUNK_ELEMENTS, recomputed, row_chunks
from .problem import NeedsGrad, RawFlags, check_device, check_floats, check_tensor, dtype_name
from .reference.lists import sum_blocks
from .sequences import Sequences

if TYPE_CHECKING:
    from .dispatch.config import BackendChoice
    from .masks import PreparedMask
    from .masks.prepared.storage import ListMask
    from .validation import PreparedCall

__all__ = ["key_sums", "list_sums", "selector_loss"]

# A sum of 2 ** 15 probabilities does not overflow float16, whose maximum is 65504.
_LOG2_OF_MOST_ROWS = 15


def key_sums(
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    mask: Tensor | PreparedMask | None = None,
    bias: Bias | None = None,
    *,
    weights: Tensor | None = None,
    heads: Literal["k", "q"] = "k",
    is_causal: bool = False,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    window_size: tuple[int, int] | None = None,
    deterministic: bool | None = None,
    backend: BackendChoice = "auto",
    sink: Tensor | None = None,
    sequences: Sequences | None = None,
) -> Tensor:
    """Sum the probability that each key receives over the queries.

    Equivalent PyTorch, with p (B, Hq, Lq, Lk) of `attention(..., return_probs=True)`::

        sums = (weights[..., None] * p).sum(2)                  # heads="q"
        sums = sums.unflatten(1, (Hk, Hq // Hk)).sum(2)         # heads="k"

    The result has no gradient. Probabilities are before dropout, as lse is, so pass the same arguments with and without
    dropout.

    Args:
        q, k, mask, bias, is_causal, softmax_scale, softcap, window_size, sink, sequences: as passed to `attention`.
        lse: (B, Hq, Lq), as `attention` returns it for the same arguments. Any backend may have computed it. It must
            not include keys outside of the call. To count them, pass `weights=torch.exp(lse - lse.logaddexp(other))`,
            with `other` the lse of these keys.
        weights: (B, Hq, Lq), any float dtype, the weight of each query. The default is 1.
        heads: "k" adds the sums of the query heads of a group. "q" returns a sum for each query head.
        deterministic, backend: as in `attention`. Only triton and eager have a backward pass for such narrow values.

    Returns:
        (B, Hk, Lk), or (B, Hq, Lk) with heads="q", in fp32 (fp64 for fp64). Without a sink, `sums.sum(-1)` is the sum
        of the weights of queries that have a key. With sequences it is (H, Tk) for packed keys, and (S, H, Lk) for
        padded ones. For keys in pages, which are copied, it is (S, H, n) by position, with n the least of max_seqlen_k
        and the slots of a row of the block table.

        In 16 bits with lists, weights and sums are rounded to the dtype of q, so in float16 a weight has to be below
        65504.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: shapes, devices or values do not fit.
        BackendUnsupportedError, BackendUnavailableError: as in `attention`.

    Sources: Li et al., SnapKV: LLM knows what you are looking for before generation (2024); Zhang et al., H2O:
    heavy-hitter oracle for efficient generative inference of large language models (2023).

    Example:
        >>> import torch
        >>> from flash_dmattn import attention, statistics
        >>> q, k, v = torch.randn(1, 6, 4, 8), torch.randn(1, 6, 2, 8), torch.randn(1, 6, 2, 8)
        >>> out, lse = attention(q, k, v, is_causal=True, return_lse=True)
        >>> sums = statistics.key_sums(q, k, lse, is_causal=True)
        >>> sums.shape, sums.sum(-1).round().tolist()  # 6 queries of 2 heads each
        (torch.Size([1, 2, 6]), [[12.0, 12.0]])
    """
    if heads not in ("k", "q"):
        raise ValueError(f'heads is {heads!r}; it needs to be "k" or "q"')
    lse, weights = _check_rows(q, k, lse, weights)
    q, k = q.detach(), k.detach()
    pages = sequences is not None and sequences.block_table is not None
    if sequences is not None and pages:
        k, sequences = _without_pages(k, mask, sequences)
    flags: _Flags = (is_causal, softmax_scale, softcap, window_size, deterministic)
    num_heads, num_heads_k = q.shape[-2], k.shape[-2]
    shape = (*k.shape[:-3], num_heads if heads == "q" else num_heads_k, k.shape[-3])
    # A column of v for each head of a group, so that heads stay separate.
    columns = num_heads // max(num_heads_k, 1) if heads == "q" else 1
    call = _prepare(q, k, mask, bias, sink, sequences, flags, columns)
    # The kernels of lists take dout in the dtype of q.
    dtype = call.q.dtype if getattr(mask, "form", None) == "lists" else lse.dtype
    sums = _weighted_columns(call, backend, lse, weights, columns, dtype).reshape(shape)
    if pages and q.dim() == 3:
        assert sequences is not None and sequences.max_seqlen_k is not None
        return sums.view(shape[0], sequences.number, sequences.max_seqlen_k).transpose(0, 1)
    return sums


def list_sums(
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    lists: PreparedMask,
    bias: Tensor | ListBias | None = None,
    *,
    weights: Tensor | None = None,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    deterministic: bool | None = None,
    backend: BackendChoice = "auto",
    sink: Tensor | None = None,
    sequences: Sequences | None = None,
) -> Tensor:
    """Sum the probabilities of listed keys over the query heads of a list.

    Equivalent PyTorch, for single keys, one list of each query for all heads, and p of
    `attention(..., lists, return_probs=True)`::

        index = lists.index                                     # (B, 1, Lq, K), -1 where a list has no more keys
        sums = p.sum(1, keepdim=True).gather(-1, index.clamp(min=0)).masked_fill(index < 0, 0)

    The result has no gradient: it is the target of `selector_loss`. Probabilities are those before dropout, as lse is.

    Args:
        q, k, softmax_scale, softcap, sink, sequences: as passed to `attention`.
        lse: (B, Hq, Lq), as `attention` returns it with these lists. Any backend may have computed it. For
            probabilities among more keys, with lse `wider`, pass `weights=torch.exp(lse - wider)`.
        lists: the mask of that call.
        bias: the bias of that call, a tensor or a `ListBias`. A tensor has the limits of `ListBias.bias`.
        weights: (B, Hq, Lq), any float dtype, the weight of each query in each head. The default is 1.
        deterministic, backend: as in `attention`. Only triton and eager have a backward pass for such narrow values.

    Returns:
        (*batch, Hm, R, K) in fp32 (fp64 for fp64), shaped as the scores that `IndexScores.at(lists)` returns: Hm is the
        number of heads of the lists, R of lists, K of their entries; packed queries have a batch of 1. An entry sums
        over the queries of its list and the keys of its block. It is 0 for entries without a key, for hidden keys, and
        for repeated keys. Without a sink an entry of one query and head adds up to 1 over K.

    Raises:
        TypeError: an argument has the wrong type or dtype, or bias is by distance.
        ValueError: shapes, devices or values do not match, or keys are in pages.
        BackendUnsupportedError, BackendUnavailableError: as in `attention`.

    Source: DeepSeek-AI, "DeepSeek-V3.2: Pushing the Frontier of Open Large Language Models", 2025, training of the
    indexer.

    Example:
        >>> import torch
        >>> from flash_dmattn import attention, statistics
        >>> from flash_dmattn.masks import PreparedMask
        >>> q, k, v = torch.randn(3, 1, 4, 2, 8)
        >>> lists = PreparedMask.from_lists(torch.tensor([[0, -1], [1, 0], [2, 2], [1, 3]]), seqlen_k=4)
        >>> out, lse = attention(q, k, v, lists, return_lse=True)
        >>> teacher = statistics.list_sums(q, k, lse, lists)
        >>> teacher.sum(-1).round().tolist(), teacher[0, 0, 2].round().tolist()  # two heads; a key that is named twice
        ([[[2.0, 2.0, 2.0, 2.0]]], [2.0, 0.0])
    """
    mask = _lists(lists)
    lse, weights = _check_rows(q, k, lse, weights)
    if sequences is not None and sequences.block_table is not None:
        raise ValueError("sequences have keys in pages; list_sums needs packed or padded keys, and lists for these")
    batch = tuple(q.shape[:-3]) if q.dim() > 3 else (1,)
    values = _values(bias, mask, batch, lse.dtype)
    flags = (False, softmax_scale, softcap, None, deterministic)
    call = _prepare(q.detach(), k.detach(), mask, ListBias(values), sink, sequences, flags)
    sums = _differentiate(call, backend, lse, weights)
    heads, number, places = mask.keys.shape[1:]
    if sums.shape[2] != number:
        sums = sum_blocks(sums, 2, mask.block_size[0], 0)
    if sums.shape[1] != heads:
        sums = sums.unflatten(1, (heads, -1)).sum(2)
    return sums.reshape(*batch, heads, number, places)


def selector_loss(scores: Tensor, teacher: Tensor, lists: PreparedMask) -> Tensor:
    """Compute the KL divergence of a selector from its teacher, for each list.

    Equivalent PyTorch, where every list has K keys and the teacher no zeros::

        tau = teacher / teacher.sum(-1, keepdim=True)
        loss = F.kl_div(scores.log_softmax(-1), tau, reduction="none").sum((-3, -1))

    The gradient of the scores is softmax(scores) - tau over the entries of a list. Entries without a key have gradient
    0, whatever their scores and their teacher are. So has a list whose teacher is 0 everywhere, and its loss is 0. The
    backward pass recomputes temporaries, in chunks of lists.

    Args:
        scores: (*batch, Hm, R, K), float: of `IndexScores.at(lists)`, or the values of a `ListBias`.
        teacher: the same shape, float, of `list_sums`; a target without a gradient. Its scale does not matter. Where
            tensor parallelism splits heads, add the teachers of all ranks first.
        lists: the mask that both are for.

    Returns:
        (*batch, R), in fp32 (fp64 for fp64), added up over the Hm heads of the lists.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: shapes or devices do not match.

    Example:
        >>> import torch
        >>> from flash_dmattn import statistics
        >>> from flash_dmattn.masks import PreparedMask
        >>> lists = PreparedMask.from_lists(torch.tensor([[0, -1], [1, 0]]), seqlen_k=2)
        >>> scores = torch.zeros(1, 1, 2, 2, requires_grad=True)
        >>> loss = statistics.selector_loss(scores, torch.tensor([[[[2.0, 0.0], [1.5, 0.5]]]]), lists)
        >>> loss.sum().backward()
        >>> loss.detach().abs(), scores.grad
        (tensor([[0.0000, 0.1308]]), tensor([[[[ 0.0000,  0.0000],
                  [-0.2500,  0.2500]]]]))
    """
    mask = _lists(lists)
    for name, x in (("scores", scores), ("teacher", teacher)):
        check_floats(name, x)
        check_device(name, x.device, mask.device, "lists")
    sizes = mask.keys.shape
    batch = math.prod(scores.shape[:-3])
    if scores.dim() < 4 or scores.shape[-3:] != sizes[1:] or sizes[0] not in (1, batch):
        raise ValueError(
            f"scores has shape {tuple(scores.shape)}; it needs (*batch, heads, lists, entries), {tuple(sizes)}"
        )
    if teacher.shape != scores.shape:
        raise ValueError(
            f"teacher has shape {tuple(teacher.shape)}; it needs the shape of scores, {tuple(scores.shape)}"
        )
    hidden = (mask.index < 0).expand(batch, *sizes[1:])
    flat = scores.flatten(0, -4), teacher.detach().flatten(0, -4), hidden
    step = max(1, CHUNK_ELEMENTS // max(1, batch * sizes[1] * sizes[3]))
    run = recomputed(_divergence)
    parts = [run(*(x[:, :, rows] for x in flat)) for rows in row_chunks(sizes[2], step)]
    return torch.cat(parts, 1).unflatten(0, scores.shape[:-3])


def _divergence(scores: Tensor, teacher: Tensor, hidden: Tensor) -> Tensor:
    """Return the loss of some lists, (B, R): sum of tau ln tau - tau a, and lse(a) where the teacher is not 0."""
    dtype = torch.promote_types(torch.promote_types(scores.dtype, teacher.dtype), torch.float32)
    teacher = teacher.to(dtype).masked_fill(hidden, 0.0)
    total = teacher.sum(-1, keepdim=True)
    is_taught = total != 0
    tau = teacher / total.masked_fill(~is_taught, 1.0)
    # F.kl_div multiplies 0 by -inf at entries without a key.
    a = scores.to(dtype).masked_fill(hidden, -torch.inf).masked_fill(~is_taught, 0.0)
    cross = (tau * a.masked_fill(tau == 0, 0.0)).sum(-1)
    loss = torch.special.xlogy(tau, tau).sum(-1) - cross + a.logsumexp(-1) * is_taught.squeeze(-1)
    return loss.sum(1)


_Flags = tuple[bool, float | None, float, tuple[int, int] | None, bool | None]


def _check_rows(q: Any, k: Any, lse: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor]:
    """Check a tensor with a value for each query and head, and return it without gradients."""
    for name, x in (("q", q), ("k", k)):
        check_tensor(name, x)
        if is_dtensor(x):
            raise TypeError(
                f"{name} is a DTensor; it needs to be a plain tensor, the heads of this rank: {name}.to_local()"
            )
        if x.is_nested:
            raise TypeError(
                f"{name} is a nested tensor; it needs to be {name}.values(), with "
                "sequences=Sequences.packed(q.offsets(), k.offsets())"
            )
        if x.dim() < 3:
            raise ValueError(f"{name} has shape {tuple(x.shape)}; it needs (*batch, seqlen, num_heads, head_dim)")
    *batch, rows, num_heads, _ = q.shape
    wanted = (*batch, num_heads, rows)
    for name, x in (("lse", lse), ("weights", weights)):
        if x is None and name == "weights":
            continue
        check_floats(name, x)
        assert isinstance(x, Tensor)
        check_device(name, x.device, q.device)
        if tuple(x.shape) != wanted:
            expand = f" ({name}.expand{wanted})" if _broadcasts(x, wanted) else ""
            raise ValueError(
                f"{name} has shape {tuple(x.shape)}; it needs {wanted}, a number for each query of each head{expand}"
            )
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    if lse.dtype != dtype:
        raise TypeError(
            f"lse has dtype {dtype_name(lse.dtype)}; it needs {dtype_name(dtype)}, as attention returns it for "
            f"{dtype_name(q.dtype)}"
        )
    lse = lse.detach()
    if weights is None:
        return lse, lse.new_ones(()).expand(lse.shape)
    # A row without keys does not count, even if its weight is NaN, as exp(-inf - -inf) is.
    return lse, weights.detach().to(dtype).masked_fill(lse == -torch.inf, 0.0)


def _broadcasts(x: Tensor, shape: tuple[int, ...]) -> bool:
    sizes = zip(reversed(x.shape), reversed(shape))
    return x.dim() <= len(shape) and all(size in (1, wanted) for size, wanted in sizes)


def _prepare(
    q: Tensor,
    k: Tensor,
    mask: Any,
    bias: Any,
    sink: Tensor | None,
    sequences: Sequences | None,
    flags: _Flags,
    columns: int = 1,
) -> PreparedCall:
    """Normalise a call whose values are `columns` columns of zeros, without gradients."""
    is_causal, softmax_scale, softcap, window_size, deterministic = flags
    raw_flags = RawFlags(is_causal, softmax_scale, softcap, window_size, deterministic, return_lse=True)
    if isinstance(bias, Tensor):
        bias = bias.detach()
    elif isinstance(bias, tuple):  # all other kinds of bias are tuples of tensors and numbers
        bias = type(bias)(*(x.detach() if isinstance(x, Tensor) else x for x in bias))
    sink = sink.detach() if isinstance(sink, Tensor) else sink
    v = k.new_zeros(*k.shape[:-1], columns)
    with torch.no_grad():
        return prepare_call(q, k, v, mask, bias, sink, sequences, raw_flags)


def _rows_of(call: PreparedCall, x: Tensor) -> Tensor:
    """Fold the batch dims of a tensor with a value for each query and head, as in the call."""
    *batch, rows, num_heads, _ = call.q.shape
    return x.reshape(*batch, num_heads, rows)


def _differentiate(call: PreparedCall, backend: BackendChoice, lse: Tensor, weights: Tensor) -> Tensor:
    """Return the gradient of the bias of a call if lse has the gradient `weights`."""
    dout = call.q.new_zeros(*call.q.shape[:-1], 1)
    rows = (_rows_of(call, lse), dout, _rows_of(call, weights))
    dbias = differentiate_call(call, backend, *rows, NeedsGrad(bias=True))[3]
    assert dbias is not None
    return dbias


def _weighted_columns(
    call: PreparedCall, backend: BackendChoice, lse: Tensor, weights: Tensor, columns: int, dtype: torch.dtype
) -> Tensor:
    """Return the gradient of v if out has the gradient `weights` in a dtype, (..., Hk, columns, Lk).

    Column h has the weights of head h of a group, or one column has the weights of all heads of a group.
    """
    rows, num_heads = call.q.shape[-3:-1]
    scale = 1.0
    if dtype == torch.float16:
        added = max(1, rows * (num_heads // call.k.shape[-2] // columns))
        scale = 2.0 ** max(0, math.ceil(math.log2(added)) - _LOG2_OF_MOST_ROWS)
        weights = weights / scale
    dout = _rows_of(call, weights).to(dtype).mT.unsqueeze(-1)
    if columns > 1:
        is_own = torch.eye(columns, dtype=torch.bool, device=dout.device).repeat(num_heads // columns, 1)
        dout = torch.where(is_own, dout, 0.0)  # a product with 0 would give inf and NaN to the other heads
    dv = differentiate_call(call, backend, _rows_of(call, lse), dout, None, NeedsGrad(v=True))[2]
    assert dv is not None
    return dv.to(lse.dtype).movedim(-3, -1) * scale


def _without_pages(k: Tensor, mask: Any, sequences: Sequences) -> tuple[Tensor, Sequences]:
    """Copy keys from their pages, one sequence after another, because backward passes do not support pages."""
    table, lengths = sequences.block_table, sequences.seqlens_k
    assert table is not None and lengths is not None
    if getattr(mask, "spec", None) is not None:
        raise ValueError("mask was prepared for keys in pages; key_sums needs the bool tensor that it was made of")
    if k.dim() != 4:
        raise ValueError(f"k has shape {tuple(k.shape)}; keys in pages need (pages, page_size, num_heads, head_dim)")
    k = k.detach()
    pages = k[table.clamp(0, k.shape[0] - 1).long()] if k.shape[0] > 0 else k.new_zeros(len(table), 0, *k.shape[1:])
    rows = pages.flatten(1, 2)[:, : sequences.max_seqlen_k]
    if sequences.cu_seqlens_q is None:
        return rows, Sequences.padded(seqlens_k=lengths)
    most = rows.shape[1]
    first = torch.arange(sequences.number + 1, device=k.device) * most
    packed = Sequences.packed(
        sequences.cu_seqlens_q, first, max_seqlen_q=sequences.max_seqlen_q, max_seqlen_k=most, seqlens_k=lengths
    )
    return rows.flatten(0, 1), packed


def _lists(lists: Any) -> ListMask:
    if getattr(lists, "form", None) != "lists":
        raise TypeError(f"lists is a {type(lists).__name__}; it needs to be a PreparedMask of lists")
    mask: ListMask = lists
    return mask


def _values(bias: Any, lists: ListMask, batch: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return the value of a bias for each entry of lists, (*batch, heads, rows, K), with a gradient for each entry."""
    _, heads, number, places = lists.keys.shape
    if not (bias is None or isinstance(bias, (Tensor, ListBias))):
        raise TypeError(
            f"bias is a {type(bias).__name__}; list_sums needs a tensor or a ListBias: bias.dense(seqlen_q, seqlen_k)"
        )
    if not isinstance(bias, ListBias):
        bias = ListBias(torch.zeros(1, 1, number, places, dtype=dtype, device=lists.device), bias)
    values = bias.with_bias(lists).detach()
    values = values[(None,) * (3 + len(batch) - values.dim())]
    most = max(heads, values.shape[-3])
    if values.shape[-3] > 1 and most % values.shape[-3] == 0:
        values = values.repeat_interleave(most // values.shape[-3], -3)
    try:
        values = values.expand(*batch, most, *values.shape[-2:])
    except RuntimeError:
        raise ValueError(
            f"bias.values has shape {tuple(values.shape)}; it needs to broadcast to {(*batch, most, number, places)}"
        ) from None
    return values.to(dtype, copy=True, memory_format=torch.contiguous_format)
