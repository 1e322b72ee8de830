"""The rules of the cuda backend on calls with sequences, which have kernels of their own."""

from __future__ import annotations

from ...problem import AttentionProblem, dtype_name, fits_tma, keys_of_query
from ..protocol import Rule
from .bias_rows import fits

_FEW_KEYS = 32
_SUMMED_KEYS = 64  # up to so many keys of a sequence, delta is summed from scores (csrc/sm90/sequences/few_keys.cu)
_COLUMNS = 8  # of a row of dbias, which is written 16 bytes at a time
_MEAN_QUERIES = 128  # the rows of a tile
_OTHER = 'use backend="triton"'
_PAIR = 'backend=("cuda", "triton") runs its forward pass and the backward pass of the other'


def _stores_dbias(p: AttentionProblem) -> bool:
    """Return whether dbias of packed queries has an element for each score, so that nothing is summed."""
    return p.bias is not None and p.bias.shape[1] == p.num_heads and p.bias.shape[3] % _COLUMNS == 0


_BOX = 128  # keys that a kernel reads at a time
_PAGE_SIZES = (16, 32, 64)  # supported, and multiples of _BOX


def _reads_pages_of(p: AttentionProblem) -> bool:
    return p.sequences is None or p.sequences.page_size in _PAGE_SIZES or p.sequences.page_size % _BOX == 0


def _reads_pages(p: AttentionProblem) -> bool:
    """Return whether TMA reads k and v in pages: rows of unit stride on 16 bytes, and the stride of pages a multiple
    of the stride of rows."""
    return all(
        fits_tma((2, 2, p.num_heads_k), strides, p.dtype.itemsize) and strides[0] % strides[1] == 0
        for strides in (p.k_strides, p.v_strides)
    )


def _mean_queries(p: AttentionProblem) -> float:
    if p.sequences is None:
        return p.seqlen_q
    return p.sequences.rows_q / (max(p.batch, 1) if p.sequences.packs_queries else 1)


RULES: tuple[Rule, ...] = (
    Rule(
        "sequence_mask",
        lambda p: p.mask is None,
        lambda p: (
            f"mask has shape {None if p.mask is None else tuple(p.mask.shape)}; "
            "the kernels of sequences support only causality and windows"
        ),
        _OTHER,
    ),
    Rule(
        "sequence_bias",
        lambda p: (
            p.bias_class != "score"
            or p.bias is None
            or (p.bias.dtype == p.dtype and fits(p.bias.shape, p.bias.strides, p.dtype.itemsize))
        ),
        lambda p: (
            "bias, one value per query and key, has "
            + ("no dtype" if p.bias is None else f"dtype {dtype_name(p.bias.dtype)} and strides {p.bias.strides}")
            + f"; tiles are copied in the dtype of q, {dtype_name(p.dtype)}, from rows of unit stride on 16 bytes"
        ),
        "cast bias, or pad its rows to a multiple of 8 keys",
    ),
    Rule(
        "page_size",
        lambda p: p.sequences is None or not p.sequences.has_pages or _reads_pages_of(p),
        lambda p: (
            f"pages have {0 if p.sequences is None else p.sequences.page_size} keys; the kernels take "
            f"{', '.join(map(str, _PAGE_SIZES))} or a multiple of {_BOX}"
        ),
        _OTHER,
    ),
    Rule(
        "page_strides",
        lambda p: p.sequences is None or not p.sequences.has_pages or _reads_pages(p),
        lambda p: (
            f"k and v have strides {tuple(p.k_strides)} and {tuple(p.v_strides)}; "
            "TMA reads pages whose stride is a multiple of the stride of rows, and rows of unit stride that start on "
            "16 bytes"
        ),
        _OTHER,
    ),
    Rule(
        "sequence_softcap",
        lambda p: p.softcap == 0,
        lambda p: f"softcap is {p.softcap}; the backward kernels of sequences support none",
        _PAIR,
        passes=("backward",),
    ),
    Rule(
        "sequence_order",
        lambda p: not (p.deterministic and p.needs_grad.q),
        lambda p: "deterministic is True; blocks add to dq as they finish",
        _PAIR,
        passes=("backward",),
    ),
    Rule(
        "sequence_window",
        lambda p: p.seqlen_k <= _SUMMED_KEYS or keys_of_query(p.seqlen_k, p.window) > _FEW_KEYS,
        lambda p: (
            f"a query attends to at most {keys_of_query(p.seqlen_k, p.window)} of {p.seqlen_k} keys; delta comes from "
            f"out in 16 bits, whose rounding shows in the gradients of up to {_FEW_KEYS} keys"
        ),
        _PAIR,
        passes=("backward",),
    ),
    Rule(
        "sequence_dbias",
        lambda p: p.dbias_class != "score" or p.flags.bias_packing == "none" or _stores_dbias(p),
        lambda p: (
            "the gradient of bias, of shape "
            f"{None if p.bias is None else tuple(p.bias.shape)}, is needed; with packed queries it needs a "
            "head for each query head, and rows of a multiple of 8 keys"
        ),
        _PAIR,
        passes=("backward",),
    ),
)

AUTO_RULES: tuple[Rule, ...] = (
    Rule(
        "short_sequences",
        lambda p: p.sequences is None or _mean_queries(p) >= _MEAN_QUERIES,
        lambda p: f"sequences have {_mean_queries(p):.0f} queries on average, less than the {_MEAN_QUERIES} of a tile",
        'backend="cuda" runs it all the same',
    ),
)
