"""The rules of the cuda backend on calls with sequences, which have kernels of their own."""

from __future__ import annotations

from ...problem import AttentionProblem, dtype_name, fits_tma, keys_of_query
from ..protocol import Rule
from .bias_rows import fits

_FEW_KEYS = 32
_SUMMED_KEYS = 64  # of a sequence, at most: its delta is summed from scores (csrc/sm90/sequences/few_keys.cu)
_COLUMNS = 8  # of dbias, written 16 bytes at a time
_MEAN_QUERIES = 128  # a tile of rows
_OTHER = 'use backend="triton"'
_PAIR = 'backend=("cuda", "triton") runs its forward pass and the backward pass of the other'


def _stores_dbias(p: AttentionProblem) -> bool:
    """Whether each score of packed queries has a place of its own in dbias."""
    return p.bias is not None and p.bias.shape[1] == p.num_heads and p.bias.shape[3] % _COLUMNS == 0


_BOX = 128  # keys, which a kernel reads at a time
_PAGE_SIZES = (16, 32, 64)  # and multiples of a box


def _reads_pages_of(p: AttentionProblem) -> bool:
    return p.sequences is None or p.sequences.page_size in _PAGE_SIZES or p.sequences.page_size % _BOX == 0


def _reads_pages(p: AttentionProblem) -> bool:
    """Whether TMA reads k and v in pages: rows of unit stride on 16 bytes, pages a whole number of rows apart."""
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
            "the kernels of sequences have causality and windows alone"
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
            "TMA reads pages a whole number of rows apart, of rows of unit stride that start on 16 bytes"
        ),
        _OTHER,
    ),
    Rule(
        "sequence_softcap",
        lambda p: p.softcap == 0,
        lambda p: f"softcap is {p.softcap}; the backward kernels of sequences have none",
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
            f"of {p.seqlen_k} keys a query attends {keys_of_query(p.seqlen_k, p.window)} at most; delta is taken from "
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
            f"{None if p.bias is None else tuple(p.bias.shape)}, is needed; of packed queries it is stored "
            "where query heads have one each, of rows of a multiple of 8 keys"
        ),
        _PAIR,
        passes=("backward",),
    ),
)

AUTO_RULES: tuple[Rule, ...] = (
    Rule(
        "short_sequences",
        lambda p: p.sequences is None or _mean_queries(p) >= _MEAN_QUERIES,
        lambda p: f"sequences have {_mean_queries(p):.0f} queries on the mean, less than the {_MEAN_QUERIES} of a tile",
        'backend="cuda" runs it all the same',
    ),
)
