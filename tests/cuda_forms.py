"""How the cuda backend sees a call on a Hopper GPU, said without one: its description, and the kernels it takes."""

from __future__ import annotations

import torch
from cases import NAMES, Case
from torch import Tensor

import flash_dmattn
from flash_dmattn.backends.cuda import backend as cuda
from flash_dmattn.backends.cuda import rules as cuda_rules
from flash_dmattn.problem import AttentionProblem, Need

ALL_UNITS = tuple((*dims, dtype) for dims in cuda.UNITS for dtype in (torch.float16, torch.bfloat16))
# A unit has a kernel for each of these with a mask and one without. A bias per query is "none": it moves lse alone.
BIAS_FORMS = ("none", "vector", "tile", "strided")
# The same of the backward kernels.
ALL_BACKWARD_UNITS = tuple(
    (*dims, dtype) for dims in cuda_rules.BACKWARD_UNITS for dtype in (torch.float16, torch.bfloat16)
)
BACKWARD_FORMS = ("none", "vector", "tile", "stored tile")
SUMMED = "summed tile"  # of head dims up to 128
PROCESSORS = 132  # of an H200


def described(case: Case, prepared: bool = False) -> AttentionProblem:
    """The forward pass of a case, contiguous and on sm_90."""
    q = (case.batch, case.seqlen_q, case.num_heads, case.head_dim)
    mask, bias = (None if letters is None else case.sizes(letters) for letters in (case.mask, case.bias))
    return flash_dmattn.explain_problem(
        q,
        kv_heads=case.num_heads_k,
        seqlen_k=case.seqlen_k,
        head_dim_v=case.head_dim_v or None,
        dtype=case.dtype,
        mask=mask,
        mask_prepared=prepared and mask is not None,
        bias=bias,
        bias_dtype=case.bias_dtype,
        return_lse=True,
        **case.flags(),
    ).problem


def differentiated(case: Case, deterministic: bool = False) -> AttentionProblem:
    """Both passes of a case, the same way."""
    need = Need(*(name in case.need for name in NAMES))
    return described(case)._replace(need=need, deterministic=deterministic)


def unit_of(case: Case) -> tuple[int, int, torch.dtype]:
    """The head dims and the dtype of the unit that serves a case where all are built."""
    return (*_smallest(cuda.UNITS, case), case.dtype)


def _smallest(units: tuple[tuple[int, int], ...], case: Case) -> tuple[int, int]:
    dims = case.head_dim, case.head_dim_v or case.head_dim
    return next(unit for unit in units if dims[0] <= unit[0] and dims[1] <= unit[1])


def bias_form(bias: Tensor | None, dtype: torch.dtype) -> str:
    """How the kernel reads a bias beside a q of that dtype, as `describe_bias` of csrc/api/forward.cpp decides it."""
    if bias is None or _is_broadcast(bias, 3):
        return "none"
    if _is_broadcast(bias, 2):
        return "vector"
    # The allocator's storages start on 512 bytes.
    aligned = bias.storage_offset() * bias.element_size() % 16 == 0
    rows = bias.stride(3) == 1 and all(_is_broadcast(bias, dim) or bias.stride(dim) % 8 == 0 for dim in range(3))
    return "tile" if bias.dtype == dtype and aligned and rows else "strided"


def backward_unit_of(case: Case) -> tuple[int, int, torch.dtype]:
    """The same of the backward pass."""
    return (*_smallest(cuda_rules.BACKWARD_UNITS, case), case.dtype)


def backward_form(problem: AttentionProblem) -> str:
    """How the backward kernel reads a bias, and what it does with its gradient, as csrc/api/backward.cpp decides it."""
    if problem.bias is None or problem.bias.broadcast()[3]:
        return "none"
    if problem.bias.broadcast()[2]:
        return "vector"
    if sums_in_clusters(problem):
        return SUMMED
    return "stored tile" if problem.need.bias and not shares_dbias(problem) else "tile"


def shares_dbias(problem: AttentionProblem) -> bool:
    """Whether the gradient of a bias per score is not stored by the main kernel's blocks, each its own.

    Heads or batch entries share it. Or there is a softcap beside head dims above 128, where all units are built.
    """
    p = problem
    per_score = p.need.bias and p.bias is not None and not any(p.bias.broadcast()[2:])
    stores_none = p.softcap > 0 and max(p.head_dim, p.head_dim_v) > 128
    return per_score and p.bias is not None and (stores_none or p.bias.shape[:2] != (p.batch, p.num_heads))


def sums_in_clusters(problem: AttentionProblem) -> bool:
    """Whether the main kernel's clusters sum it; else it has a kernel. As `clusters_of_batch` decides it."""
    p = problem
    if not shares_dbias(p) or p.bias is None or p.softcap > 0 or max(p.head_dim, p.head_dim_v) > 128:
        return False
    of_batch = p.bias.shape[:2] == (1, p.num_heads) and p.batch in (2, 4, 8)
    return of_batch and any(p.need[:3]) and (p.mask is None or p.mask.shape[0] == 1)


def takes_pairs_of_key_tiles(problem: AttentionProblem, processors: int = PROCESSORS) -> bool:
    """Whether blocks have two tiles of keys, as `pays_to_take_two` of csrc/api/backward.cpp decides it."""
    p = problem
    if backward_form(p) != "stored tile" or max(p.head_dim, p.head_dim_v) > 64 or p.softcap > 0:
        return False
    if p.mask is not None or p.is_causal or p.has_window:
        return False
    tiles, pairs = -(-p.seqlen_k // 128), -(-p.seqlen_k // 256)
    rounds = [-(-p.batch * p.num_heads_k * blocks // processors) for blocks in (tiles, pairs)]
    return 5 * rounds[1] <= 3 * rounds[0]


def whole_pairs(problem: AttentionProblem, processors: int = PROCESSORS) -> int:
    """Of how many pairs of batch and head of k a work has all query heads, as `count_full_group_pairs` decides it."""
    p = problem
    pairs, blocks = p.batch * p.num_heads_k, _key_blocks(p, processors)
    if p.num_heads == p.num_heads_k or pairs * blocks >= 8 * processors:
        return pairs
    if p.deterministic:
        return 0 if p.need.q else pairs
    if p.mask is None and (p.is_causal or p.has_window):
        return 0
    tiles_of_bias = p.bias if p.bias is not None and not any(p.bias.broadcast()[2:]) else None
    shares = any(x is not None and x.broadcast()[0] for x in (p.mask, tiles_of_bias))
    together = p.batch if sums_in_clusters(p) or (p.batch > 1 and shares) else 1
    return max(pairs * blocks // processors - 1, 0) * processors // blocks // together * together


def backward_works(problem: AttentionProblem) -> tuple[str, str]:
    """What a block works on, and how the blocks of an H200 share it, as csrc/api/backward.cpp decides it."""
    p = problem
    pairs, whole, heads = p.batch * p.num_heads_k, whole_pairs(p), "its own"
    if p.num_heads != p.num_heads_k:
        heads = "one of a group" if whole == 0 else "a group" if whole == pairs else "a group, then one"
    total = (whole + (pairs - whole) * p.num_heads // p.num_heads_k) * _key_blocks(p, PROCESSORS)
    if p.deterministic and p.need.q:
        return heads, "in order"
    if total <= PROCESSORS:
        return heads, "one each"
    is_even = p.mask is None and not p.is_causal and not p.has_window and heads != "a group, then one"
    return heads, "evenly" if is_even else "as they finish"


def _key_blocks(problem: AttentionProblem, processors: int) -> int:
    p = problem
    if takes_pairs_of_key_tiles(p, processors):
        return -(-p.seqlen_k // 256)
    return -(-p.seqlen_k // 128) * (1 if max(p.head_dim, p.head_dim_v) <= 128 else 2)


def _is_broadcast(x: Tensor, dim: int) -> bool:
    return x.shape[dim] == 1 or x.stride(dim) == 0
