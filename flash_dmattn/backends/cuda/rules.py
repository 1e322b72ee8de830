"""The rules of the cuda backend: the calls that its kernels support, the built kernels, and when auto uses triton."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

import torch

from ...definition import assume_constant
from ...problem import AttentionProblem, SequenceSpec, TensorSpec, dtype_name, fits_tma, keys_of_query
from ..mask_choice import prepared_form, reads_scores
from ..protocol import Rule
from . import extension
from .group_rows import group_shift
from .operands import (
    COLUMNS,
    FLOAT_TILE_DIM,
    copies_bias,
    copies_scores,
    fits,
    has_tile_kernels,
    makes_dbias_of_any_rows,
)
from .parts import part_size

# (head_dim, head_dim_v) that kernels are compiled for; a call uses the first pair that is large enough.
INSTANCES = ((32, 32), (64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256))
SEQUENCES_INSTANCES = ((64, 64), (128, 128))  # for both passes of calls with sequences
_DTYPES = {torch.float16: "fp16", torch.bfloat16: "bf16"}
_BIAS_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@cache
def installed_instances() -> frozenset[str] | None:
    """Return the names of the kernel instances in the extension, read without loading it; None without an extension."""
    try:
        path = extension.find()
        return None if path is None else frozenset(extension.build_info(path)["instances"])
    except extension.ExtensionMismatchError:  # the probe reports it
        return None


@assume_constant  # it reads a file
def _built_dims(dtype: torch.dtype) -> tuple[tuple[int, int], ...]:
    """Return the head dims that calls of this dtype can have. The `dtype` rule refuses unsupported dtypes."""
    return _head_dims(installed_instances(), dtype)


@cache
def _head_dims(instances: frozenset[str] | None, dtype: torch.dtype) -> tuple[tuple[int, int], ...]:
    if instances is None or dtype not in _DTYPES:
        return INSTANCES
    name = _DTYPES[dtype]  # the kernels of both passes are built together
    return tuple((d, d_v) for d, d_v in INSTANCES if f"forward_d{d}{f'_{d_v}' if d_v != d else ''}_{name}" in instances)


@assume_constant  # it reads a file
def _sequence_dims(dtype: torch.dtype) -> tuple[tuple[int, int], ...]:
    """Return the head dims that calls with sequences of this dtype can have; both passes are built together."""
    instances = installed_instances()
    if instances is None or dtype not in _DTYPES:
        return SEQUENCES_INSTANCES
    return tuple((d, dv) for d, dv in SEQUENCES_INSTANCES if f"forward_sequences_d{d}_{_DTYPES[dtype]}" in instances)


def _instance(p: AttentionProblem) -> tuple[int, int] | None:
    """Return the head dims of the kernels that serve the call; None if no kernels do."""
    fitting = ((d, d_v) for d, d_v in _built_dims(p.dtype) if p.head_dim <= d and p.head_dim_v <= d_v)
    return next(fitting, None)


def _sequence_instance(p: AttentionProblem) -> tuple[int, int] | None:
    """Return the same of the kernels of sequences."""
    return next(((d, d_v) for d, d_v in _sequence_dims(p.dtype) if p.head_dim <= d and p.head_dim_v <= d_v), None)


def _instances_text(p: AttentionProblem) -> str:
    dims = " or ".join(f"{d} and {d_v}" for d, d_v in _built_dims(p.dtype))
    if not dims:
        return f"this build has no kernels of {dtype_name(p.dtype)}"
    return f"the kernels that are built take multiples of 8 up to {dims}"


def _bias(p: AttentionProblem) -> TensorSpec:
    assert p.bias_tensor is not None
    return p.bias_tensor


def _reads_tiles(p: AttentionProblem) -> bool:
    """Return whether TMA can load the bias, or a copy of it; True without a bias."""
    if p.bias is None:
        return True
    return fits(p.bias.shape, p.bias.strides, p.bias.dtype.itemsize) or copies_bias(p)


def _differentiates_tiles(p: AttentionProblem) -> bool:
    """Return whether backward kernels read tiles of a bias of this dtype; True without a bias per query and key."""
    if p.bias_class != "score" or _bias(p).dtype == p.dtype:
        return True
    is_narrow = max(_instance(p) or INSTANCES[-1]) <= FLOAT_TILE_DIM
    return _bias(p).dtype == torch.float32 and is_narrow and p.softcap == 0


def _dbias_is_whole(p: AttentionProblem) -> bool:
    return p.dbias_class == "score" and p.bias is not None and p.bias.shape[:2] == (p.batch, p.num_heads)


_MANY_SCORES = 1 << 26


def _scores(p: AttentionProblem) -> int:
    return p.batch * p.num_heads * p.seqlen_q * p.seqlen_k


def _most_keys(p: AttentionProblem) -> int:
    return keys_of_query(p.seqlen_k, p.window)


_FEW_KEYS = 32
_ROWS = _KEYS = 128  # of a tile
_DROPOUT_DIMS = (64, 64)  # of the only kernels with dropout (csrc/sm90/backward/instances.h)
_RELATIVE_DIMS = ((64, 64), (128, 128))  # of the kernels with a bias by distance (csrc/sm90/forward/launch.h)
_PAIR = 'backend=("cuda", "triton") runs its forward pass and the backward pass of the other'

# The invariant mode leaves these calls to triton. Only facts decide that a sampler and a trainer share,
# so no length and no layout. Kernels of dense calls and of sequences have to sum alike.
_NOT_INVARIANT: tuple[tuple[str, Callable[[AttentionProblem], bool]], ...] = (
    ("a mask", lambda p: p.mask_form != "none"),
    ("a bias", lambda p: p.bias_tensor is not None),
    ("a softcap", lambda p: p.softcap > 0),
    ("dropout", lambda p: p.dropout_p > 0),
    ("max_scores", lambda p: p.flags.max_scores),
    ("entropy", lambda p: p.flags.entropy),
    # Out in 16 bits is not exact enough for the delta of so few keys; triton computes it from out in fp32.
    (f"a window of at most {_FEW_KEYS} keys", lambda p: min(p.window) >= 0 and sum(p.window) < _FEW_KEYS),
    (
        "head dims whose kernels are not those of sequences",
        lambda p: (
            p.head_dim % 8 > 0 or p.head_dim_v % 8 > 0 or _instance(p) is None or _instance(p) != _sequence_instance(p)
        ),
    ),
)


def _not_invariant(p: AttentionProblem) -> str:
    return ", ".join([name for name, is_used in _NOT_INVARIANT if is_used(p)])


def has_invariant_class(p: AttentionProblem) -> bool:
    """Return whether auto runs calls like this one on cuda in the invariant mode, whatever their lengths."""
    is_served = p.device == "cuda" and p.arch == "sm_90" and p.dtype in _DTYPES and not p.flags.sums
    return is_served and not _not_invariant(p)


# Kernels that write the largest scores are few: QK-clip, which asks for them, trains without these.
_WITHOUT_MAX_SCORES: tuple[tuple[str, Callable[[AttentionProblem], bool]], ...] = (
    *_NOT_INVARIANT[:2],
    ("dropout", lambda p: p.dropout_p > 0),
    ("pages", lambda p: p.sequences is not None and p.sequences.has_pages),
)


def _beside_max_scores(p: AttentionProblem) -> str:
    return ", ".join([name for name, is_used in _WITHOUT_MAX_SCORES if is_used(p)])


_backward = partial(Rule, hint=_PAIR, passes=("backward",))
_preference = partial(Rule, hint='backend="cuda" runs it all the same', calls="dense")

# Calls of the rules' examples: eight packed sequences of up to 2048 tokens, pages of 64 keys, a bias by distance.
_PACKED = {"q": (1, 8192, 16, 64), "sequences": SequenceSpec("packed", 8, 8192, 8192, 2048, 2048)}
_PAGED = {
    "q": (1, 512, 16, 64),
    "seqlen_k": 64,
    "sequences": SequenceSpec("paged_packed", 2, 512, 4096, 512, 4096, page_size=64),
}
_RELATIVE = {"bias": (16, 257), "by_distance": (128, "clamp", False)}

_RULES: tuple[Rule, ...] = (
    Rule(
        "invariant",
        lambda p: not p.flags.invariant or not _not_invariant(p),
        lambda p: f"config(invariant=True) is in force and the call has {_not_invariant(p)}, which the mode lacks here",
        'use backend="triton"',
        example={"q": (2, 4096, 16, 96), "invariant": True},
    ),
    Rule(
        "device",
        lambda p: p.device == "cuda",
        lambda p: f"device is {p.device}; the extension runs on NVIDIA GPUs",
        "move the tensors to a Hopper GPU",
        example={"device": "cpu"},
    ),
    Rule(
        "arch",
        lambda p: p.device != "cuda" or p.arch == "sm_90",
        lambda p: f"the GPU is {p.arch}; the kernels are written for sm_90a",
        "other GPUs are served by the other backends",
        example={"device": "sm_80"},
    ),
    Rule(
        "dtype",
        lambda p: p.dtype in _DTYPES,
        lambda p: f"dtype is {dtype_name(p.dtype)}; the tensor cores take float16 or bfloat16",
        "cast q, k and v",
        example={"dtype": "fp32"},
    ),
    Rule(
        "bias_dtype",
        lambda p: p.bias_tensor is None or p.bias_tensor.dtype in _BIAS_DTYPES,
        lambda p: f"bias has dtype {dtype_name(_bias(p).dtype)}; the scores are float32",
        "cast bias",
        example={"bias": (1, 16, 4096, 4096), "bias_dtype": "fp64"},
    ),
    Rule(
        "head_dim",
        lambda p: p.head_dim % 8 == 0 == p.head_dim_v % 8 and _instance(p) is not None,
        lambda p: f"head dims are {p.head_dim} and {p.head_dim_v} (v); {_instances_text(p)}",
        'use backend="triton"',
        calls="dense",
        example={"q": (2, 4096, 16, 100)},
    ),
    _backward(
        "rounded_delta",
        lambda p: p.flags.invariant or not 0 < _most_keys(p) <= _FEW_KEYS,
        lambda p: (
            f"a query attends to at most {_most_keys(p)} of {p.seqlen_k} keys; delta comes from out in 16 bits, "
            f"whose rounding shows in the gradients of up to {_FEW_KEYS} keys"
        ),
        calls="dense",
        example={"seqlen_k": 32},
    ),
    Rule(
        "list_tiles",
        lambda p: p.mask_form != "lists" or (p.flags.block_q % _ROWS == 0 and p.flags.block_k % _KEYS == 0),
        lambda p: (
            f"lists are of blocks of {p.flags.block_k} keys for {p.flags.block_q} queries; the kernels walk tiles of "
            f"{_KEYS} keys and {_ROWS} queries, and gather no keys"
        ),
        'use backend="triton"',
        example={"mask": (2, 1, 4096, 4096), "mask_form": "lists", "block_q": 1, "block_k": 64},
    ),
    Rule(
        "list_scores",
        lambda p: p.mask_form != "lists" or not reads_scores(p),
        lambda p: (
            f"bias has shape {tuple(_bias(p).shape)} with lists; kernels that read a value for any query and key "
            "need a bit for every pair"
        ),
        'use backend="eager"',
        example={"mask_form": "lists", "block_q": 128, "block_k": 128, "bias": (2, 16, 4096, 4096)},
    ),
    _backward(
        "tile_bias_dtype",
        _differentiates_tiles,
        lambda p: (
            f"bias has dtype {dtype_name(_bias(p).dtype)} with {dtype_name(p.dtype)}, head dims are {p.head_dim} and "
            f"{p.head_dim_v} (v), softcap is {p.softcap}; the backward kernels copy tiles of a bias per query and key "
            f"in the dtype of q, or in float32 at head dims up to {FLOAT_TILE_DIM} without a softcap"
        ),
        hint=f"cast bias, or {_PAIR}",
        calls="dense",
        example={"q": (2, 4096, 16, 128), "bias": (2, 16, 4096, 4096), "bias_dtype": "fp32"},
    ),
    _backward(
        "tile_bias_rows",
        lambda p: p.bias_class != "score" or _reads_tiles(p),
        lambda p: (
            f"bias has strides {tuple(_bias(p).strides)}; "
            "TMA reads rows of unit stride that start on 16 bytes, and a bias is only copied into such rows "
            "where it is small and batch entries share it, or has short rows and a value for each score"
        ),
        hint=f"pad its rows to a multiple of 8 keys, or {_PAIR}",
        calls="dense",
        example={"bias": (2, 16, 4096, 4095), "seqlen_k": 4095},
    ),
    _backward(
        "expanded_dbias",
        lambda p: p.dbias_class != "score" or p.bias_class == "score",
        lambda p: (
            f"the gradient of bias, of shape {tuple(_bias(p).shape)} and strides {tuple(_bias(p).strides)}, is needed; "
            "the backward kernels read tiles of a bias that is not expanded over queries or keys"
        ),
        example={"bias": (2, 16, 4096, 4096), "bias_strides": (2**16, 2**12, 0, 1), "bias_grad": True},
    ),
    _backward(
        "dbias_rows",
        lambda p: p.dbias_class != "score" or p.seqlen_k % 8 == 0 or makes_dbias_of_any_rows(p),
        lambda p: (
            f"the gradient of bias, of rows of {p.seqlen_k} keys, is needed; rows of it are written 16 bytes at a time "
            "unless it is small and batch entries share it, or rows are short and each score has its own"
        ),
        hint=f"pad k, v and bias to a multiple of 8 keys, or {_PAIR}",
        calls="dense",
        example={"q": (64, 129, 16, 64), "bias": (64, 16, 129, 129), "bias_grad": True, "softcap": 5.0},
    ),
    Rule(
        "max_scores_combination",
        lambda p: not (p.flags.max_scores and _beside_max_scores(p)),
        lambda p: (
            f"max_scores is set and the call has {_beside_max_scores(p)}, which the kernels that write it do not take"
        ),
        'use backend="triton"',
        passes=("forward",),
        example={"max_scores": True, "mask": (2, 1, 4096, 4096)},
    ),
    Rule(
        "relative_head_dim",
        lambda p: p.relative is None or _instance(p) in _RELATIVE_DIMS,
        lambda p: (
            f"bias is by distance and head dims are {p.head_dim} and {p.head_dim_v} (v); only the kernels of head dims "
            + " and ".join(str(d) for d, _ in _RELATIVE_DIMS)
            + " have one"
        ),
        'use backend="triton"',
        example={"q": (2, 4096, 16, 96), **_RELATIVE},
    ),
    Rule(
        "relative_combination",
        lambda p: p.relative is None or (p.dropout_p == 0 and p.sequences is None),
        lambda p: (
            "bias is by distance with "
            + (f"{p.batch} sequences" if p.dropout_p == 0 else f"dropout_p, which is {p.dropout_p}")
        ),
        'use backend="triton"',
        example={**_PACKED, **_RELATIVE},
    ),
    _backward(
        "relative_softcap",
        lambda p: p.relative is None or p.softcap == 0,
        lambda p: f"softcap is {p.softcap} and bias is by distance; no backward kernel has both",
        example={"softcap": 30.0, **_RELATIVE},
    ),
    Rule(
        "dropout_head_dim",
        lambda p: p.dropout_p == 0 or _instance(p) == _DROPOUT_DIMS,
        lambda p: (
            f"dropout_p is {p.dropout_p} and head dims are {p.head_dim} and {p.head_dim_v} (v); "
            f"only the kernels of head dim {_DROPOUT_DIMS[0]} have dropout"
        ),
        'use backend="triton"',
        example={"q": (2, 4096, 16, 128), "dropout_p": 0.1},
    ),
    Rule(
        "dropout_combination",
        lambda p: p.dropout_p == 0 or (p.softcap == 0 and p.sequences is None),
        lambda p: (
            f"dropout_p is {p.dropout_p} with " + ("sequences" if p.softcap == 0 else f"a softcap of {p.softcap}")
        ),
        'use backend="triton"',
        example={"dropout_p": 0.1, "softcap": 30.0},
    ),
    Rule(
        "dropout_bias",
        lambda p: p.dropout_p == 0 or p.bias_class != "score" or (_bias(p).dtype == p.dtype and _reads_tiles(p)),
        lambda p: (
            f"dropout_p is {p.dropout_p} and bias has dtype {dtype_name(_bias(p).dtype)} and strides "
            f"{_bias(p).strides}; the kernels with dropout read tiles in the dtype of q, {dtype_name(p.dtype)}, from "
            "rows of unit stride on 16 bytes"
        ),
        'cast bias, or use backend="triton"',
        example={"dropout_p": 0.1, "bias": (1, 16, 4096, 4096), "bias_dtype": "fp32"},
    ),
)

# Where the triton kernels are faster: docs/notes/cuda_rules.md has the figures of each bound. The kernels of cuda are
# persistent: they start later, and each row is computed by one SM, so they need work for all SMs.

_LONG = 4096  # keys: from this number on, the keys of short calls are split over blocks
_PAIRS_ENOUGH = 512  # work tiles of two key tiles: from this number on, pairs mean fewer waves on any GPU
_NARROW = 128  # head dim: wider calls have other backward kernels, and their keys are not split over blocks
# Calls of few queries, with groups of at least _GROUP heads that do not become rows. The tables have the least sizes at
# which cuda is faster, (heads of all entries, keys of a query): _WINDOWED for one query with a window, and _SEVERAL for
# up to _FEW_QUERIES without one.
_FEW_QUERIES, _GROUP = 16, 4
_WINDOWED = ((512, 128), (256, 1024), (32, 4096))
_SEVERAL = ((1024, 2048), (256, 4096), (32, 32768))


def _tiles_of_rows(p: AttentionProblem) -> int:
    return part_size(p) * p.num_heads * -(-p.seqlen_q // _ROWS)


def _has_two_key_tiles(p: AttentionProblem) -> bool:
    """Return whether work tiles have two key tiles on every GPU, for a call that stores dbias and has no mask.

    The extension decides it by the number of SMs (csrc/api/backward_schedule.h), which a problem does not have.
    """
    tiles = -(-p.seqlen_k // _KEYS)
    enough = part_size(p) * p.num_heads_k * tiles >= 2 * _PAIRS_ENOUGH
    return max(p.head_dim, p.head_dim_v) <= 64 and tiles % 2 == 0 and enough


def _least_tiles(p: AttentionProblem) -> int:
    """Return the least number of tiles of 128 queries for which cuda is as fast as triton."""
    if _serves_few_queries(p):
        return 1
    if p.mask_form == "intervals" or prepared_form(p, gathers=False).reorder:
        return 1  # triton reorders keys by many small operations, or gathers single keys
    widest = max(p.head_dim, p.head_dim_v)
    shares_keys = widest <= _NARROW and p.mask is None and not p.has_window and _reads_tiles(p)
    if shares_keys and p.bias_class == "score" and p.seqlen_k >= _LONG:
        return 16
    if shares_keys and widest > 64 and p.seqlen_k >= 2 * _LONG:
        return 4
    if widest > 64 or p.mask is not None or p.bias_class == "score":
        return 128
    return 256 if p.seqlen_k >= _LONG // 2 else 512


def _serves_few_queries(p: AttentionProblem) -> bool:
    """Return whether cuda is faster with few queries.

    With several queries, or one and a window, triton loads the keys once for each head of a group. cuda makes these
    heads rows of one tile, and loads the keys once. Other calls need enough keys and heads to make up for the later
    start of cuda. All need k and v that TMA can load, because a copy would take longer than attention.
    """
    plain = p.mask is None and p.bias_tensor is None and p.sink is None and p.softcap == 0 == p.dropout_p
    left, widest = p.window[0], max(p.head_dim, p.head_dim_v)
    reads_keys = all(fits_tma(shape, strides, p.dtype.itemsize) for shape, strides in p.rows[1:])
    is_group = p.num_heads >= _GROUP * p.num_heads_k and widest <= _NARROW
    if not (plain and is_group and reads_keys) or p.seqlen_q == 0 or any(p.needs_grad):
        return False
    if group_shift(p) > 0:
        return True
    if p.seqlen_q > _FEW_QUERIES:
        return False
    if p.seqlen_q == 1:
        keys, wins, least_dim = min(left + 1, p.seqlen_k), _WINDOWED, 0  # 0 keys without a window: never enough
    else:
        keys, wins, least_dim = p.seqlen_k if left < 0 else 0, _SEVERAL, 64
    heads = p.batch * p.num_heads
    is_large = any(heads >= least_heads and keys >= least_keys for least_heads, least_keys in wins)
    return is_large and widest > least_dim


def _fills_half_tiles(p: AttentionProblem) -> bool:
    """Return whether cuda is as fast although half of the rows of its tiles are empty."""
    narrow = max(p.head_dim, p.head_dim_v) <= _NARROW
    gains = any(p.needs_grad) or p.mask is not None or p.bias_class == "score"
    return 2 * p.seqlen_q >= _ROWS and p.seqlen_k > _KEYS and narrow and gains


def _adds_for_few_keys(p: AttentionProblem) -> bool:
    """Return whether triton is faster for so few keys: cuda clears, adds and converts each row of dq in fp32."""
    plain = p.mask is None and p.sink is None and not p.has_window and p.softcap == 0 == p.dropout_p
    gradients = p.needs_grad.q and (p.needs_grad.k or p.needs_grad.v)
    if not (plain and gradients and p.seqlen_q == p.seqlen_k and 96 < max(p.head_dim, p.head_dim_v) <= _NARROW):
        return False
    if p.bias is None:
        return 2 * _KEYS <= p.seqlen_k <= (448 if p.is_causal else 320) and _tiles_of_rows(p) >= 1536
    is_timed = not p.is_causal and p.seqlen_k % 64 == 0 and 512 <= p.seqlen_k <= 2048
    return is_timed and _dbias_is_whole(p) and _tiles_of_rows(p) >= 768


_AUTO_RULES: tuple[Rule, ...] = (
    _preference(
        "few_rows",
        lambda p: p.seqlen_q >= _ROWS or _fills_half_tiles(p) or _serves_few_queries(p),
        lambda p: f"seqlen_q is {p.seqlen_q}; a tile has {_ROWS} queries",
        example={"q": (64, 1, 16, 64), "seqlen_k": 4096},
    ),
    _preference(
        "few_tiles",
        lambda p: _tiles_of_rows(p) >= _least_tiles(p),
        lambda p: (
            f"there are {_tiles_of_rows(p)} tiles of {_ROWS} queries of a head; "
            f"from {_least_tiles(p)} on there is work enough for every SM"
        ),
        example={"q": (1, 256, 4, 128), "seqlen_k": 4096},
    ),
    _preference(
        # Triton has kernels of short rows for these calls.
        "narrow_heads",
        lambda p: p.mask is not None or p.seqlen_k > _KEYS or max(p.head_dim, p.head_dim_v) > 32,
        lambda p: f"head dims are {p.head_dim} and {p.head_dim_v} (v), of {p.seqlen_k} keys; triton is faster",
        example={"q": (2, 4096, 16, 32), "seqlen_k": 128},
    ),
    Rule(
        "bias_copies",
        lambda p: p.bias_class != "score" or _bias(p).dtype == p.dtype or (has_tile_kernels(p) and _reads_tiles(p)),
        lambda p: "bias is not of the dtype of q, so it is read value by value",
        'cast bias, or backend="cuda" runs it all the same',
        calls="dense",
        example={"q": (2, 4096, 16, 128), "bias": (2, 16, 4096, 4096), "bias_dtype": "fp32"},
    ),
    Rule(
        # The short-row kernels of triton use a bool mask without packing it.
        "short_mask",
        lambda p: p.mask_form != "dense" or p.seqlen_k > _KEYS or max(p.head_dim, p.head_dim_v) > 64,
        lambda p: f"there are {p.seqlen_k} keys, and preparing the mask takes longer than attention",
        'prepare the mask before, or backend="cuda" runs it all the same',
        calls="dense",
        example={"q": (64, 128, 16, 64), "mask": (64, 1, 1, 128)},
    ),
    # The rules below are for backward passes only.
    _preference(
        "few_keys",
        lambda p: p.seqlen_k > _KEYS,
        lambda p: f"there are {p.seqlen_k} keys, no more than the {_KEYS} of a tile",
        passes=("backward",),
        example={"seqlen_k": 128},
    ),
    _preference(
        "copied_scores",  # (256, 32, 129, 24), H200: 1.75, padded 1.42
        lambda p: not copies_scores(p) or _scores(p) >= _MANY_SCORES,
        lambda p: f"bias has {_scores(p)} values, in rows that the pass copies; triton is faster",
        passes=("backward",),
        example={"q": (8, 129, 16, 64), "bias": (8, 16, 129, 129), "bias_grad": True},
    ),
    _preference(
        "sums_for_few_keys",
        lambda p: not _adds_for_few_keys(p),
        lambda p: f"head dims are {p.head_dim} and {p.head_dim_v} (v), of {p.seqlen_k} keys; triton is faster",
        passes=("backward",),
        example={"q": (64, 256, 16, 128), "seqlen_k": 256},
    ),
    _preference(
        "fixed_order",
        lambda p: (
            p.softcap > 0  # the backward kernels of triton are slower then, and for large heads
            or max(p.head_dim, p.head_dim_v) > _NARROW
            or not (p.deterministic and p.needs_grad.q and _dbias_is_whole(p))
            or _has_two_key_tiles(p)
        ),
        lambda p: "deterministic is True and the gradient of bias, of a value per head and score, is needed too",
        passes=("backward",),
        example={"q": (1, 4096, 16, 64), "bias": (1, 16, 4096, 4096), "bias_grad": True, "deterministic": True},
    ),
)


# Calls with sequences have separate kernels. Some of the rules above apply to them, too.

_SUMMED_KEYS = 64  # up to this number of keys, delta is summed from scores (csrc/sm90/sequences/few_keys.cu)


_PAGE_SIZES = (16, 32, 64)  # and multiples of _KEYS, the key block of a kernel


def _spec(p: AttentionProblem) -> SequenceSpec:
    assert p.sequences is not None
    return p.sequences


def _reads_pages(p: AttentionProblem) -> bool:
    """Return whether TMA can load k and v in pages: aligned rows, and a stride of pages that is a multiple of
    theirs."""
    return all(
        fits_tma((2, 2, p.num_heads_k), strides, p.dtype.itemsize) and strides[0] % strides[1] == 0
        for strides in (p.k_strides, p.v_strides)
    )


# Queries of a sequence up to which the kernels of triton are faster. Their tiles have as many rows, of all heads of a
# group; so cuda is faster for chunks of queries and groups with more rows, on long keys and without gradients.
_SHORT, _LONG_KEYS = 64, 1024


def _mean_queries(p: AttentionProblem) -> float:
    return _spec(p).rows_q / (max(p.batch, 1) if _spec(p).packs_queries else 1)


def _is_chunk_of_rows(p: AttentionProblem) -> bool:
    keys = _spec(p).rows_k / (max(p.batch, 1) if _spec(p).packs_keys else 1)
    rows = _mean_queries(p) * (p.num_heads // max(p.num_heads_k, 1))
    return not any(p.needs_grad) and keys >= _LONG_KEYS and rows > _SHORT


RULES = (
    *_RULES,
    Rule(
        "sequence_head_dim",
        lambda p: p.head_dim % 8 == 0 == p.head_dim_v % 8 and _sequence_instance(p) is not None,
        lambda p: (
            f"head dims are {p.head_dim} and {p.head_dim_v} (v); "
            + (
                f"the kernels of sequences that are built take multiples of 8 up to {dims[-1][0]}"
                if (dims := _sequence_dims(p.dtype))
                else f"this build has no kernels of sequences of {dtype_name(p.dtype)}"
            )
        ),
        'use backend="triton"',
        calls="sequences",
        example={**_PACKED, "q": (1, 8192, 16, 192)},
    ),
    Rule(
        "sequence_mask",
        lambda p: p.mask is None,
        lambda p: (
            f"mask has shape {() if p.mask is None else tuple(p.mask.shape)}; "
            "the kernels of sequences support only causality and windows"
        ),
        'use backend="triton"',
        calls="sequences",
        example={**_PACKED, "mask": (8, 1, 2048, 2048)},
    ),
    Rule(
        "sequence_bias",
        lambda p: (
            p.bias_class != "score"
            or (_bias(p).dtype == p.dtype and fits(_bias(p).shape, _bias(p).strides, p.dtype.itemsize))
        ),
        lambda p: (
            f"bias, one value per query and key, has dtype {dtype_name(_bias(p).dtype)} and strides "
            f"{_bias(p).strides}; tiles are copied in the dtype of q, {dtype_name(p.dtype)}, from rows of unit stride "
            "on 16 bytes"
        ),
        "cast bias, or pad its rows to a multiple of 8 keys",
        calls="sequences",
        example={**_PACKED, "bias": (1, 16, 2048, 2048), "bias_dtype": "fp32"},
    ),
    Rule(
        "page_size",
        lambda p: not _spec(p).has_pages or _spec(p).page_size in _PAGE_SIZES or _spec(p).page_size % _KEYS == 0,
        lambda p: (
            f"pages have {_spec(p).page_size} keys; the kernels take {', '.join(map(str, _PAGE_SIZES))} or a multiple "
            f"of {_KEYS}"
        ),
        'use backend="triton"',
        calls="sequences",
        example={
            **_PAGED,
            "seqlen_k": 48,
            "sequences": SequenceSpec("paged_packed", 2, 512, 4096, 512, 4096, page_size=48),
        },
    ),
    Rule(
        "page_strides",
        lambda p: not _spec(p).has_pages or _reads_pages(p),
        lambda p: (
            f"k and v have strides {tuple(p.k_strides)} and {tuple(p.v_strides)}; "
            "TMA reads pages whose stride is a multiple of the stride of rows, and rows of unit stride that start on "
            "16 bytes"
        ),
        'use backend="triton"',
        calls="sequences",
        example={**_PAGED, "k_strides": (64 * 1024 + 8, 1024, 64, 1)},
    ),
    _backward(
        "sequence_softcap",
        lambda p: p.softcap == 0,
        lambda p: f"softcap is {p.softcap}; the backward kernels of sequences support none",
        calls="sequences",
        example={**_PACKED, "softcap": 30.0},
    ),
    _backward(
        "sequence_order",
        lambda p: p.flags.invariant or not (p.deterministic and p.needs_grad.q),
        lambda p: "deterministic is True; blocks add to dq as they finish",
        calls="sequences",
        example={**_PACKED, "deterministic": True},
    ),
    _backward(
        "sequence_window",
        lambda p: p.flags.invariant or p.seqlen_k <= _SUMMED_KEYS or keys_of_query(p.seqlen_k, p.window) > _FEW_KEYS,
        lambda p: (
            f"a query attends to at most {keys_of_query(p.seqlen_k, p.window)} of {p.seqlen_k} keys; delta comes from "
            f"out in 16 bits, whose rounding shows in the gradients of up to {_FEW_KEYS} keys"
        ),
        calls="sequences",
        example={**_PACKED, "window_size": (15, 0)},
    ),
    _backward(
        "sequence_dbias",
        lambda p: (
            p.dbias_class != "score"
            or p.flags.bias_packing == "none"
            or (_bias(p).shape[1] == p.num_heads and _bias(p).shape[3] % COLUMNS == 0)
        ),
        lambda p: (
            f"the gradient of bias, of shape {tuple(_bias(p).shape)}, is needed; with packed queries it needs a head "
            "for each query head, and rows of a multiple of 8 keys"
        ),
        calls="sequences",
        example={**_PACKED, "bias": (1, 8192, 2048), "bias_grad": True},
    ),
)
AUTO_RULES = (
    *_AUTO_RULES,
    _preference(
        "short_sequences",
        lambda p: _mean_queries(p) > _SHORT or _is_chunk_of_rows(p),
        lambda p: f"sequences have {_mean_queries(p):.0f} queries on average; triton is faster up to {_SHORT}",
        calls="sequences",
        example={"q": (1, 8192, 16, 64), "sequences": SequenceSpec("packed", 128, 8192, 8192, 64, 64)},
    ),
)
