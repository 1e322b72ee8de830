"""How the cuda backend sees a call on a Hopper GPU, said without one: its description, and the kernels it takes."""

from __future__ import annotations

import ctypes
import functools
from typing import Any, NamedTuple

import torch
from cases import NAMES, Case
from compiled_header import compiled
from draws import Drawn
from layouts import LAYOUTS, offset
from torch import Tensor

from flash_dmattn.backends.cuda.operands import FLOAT_TILE_DIM
from flash_dmattn.backends.cuda.rules import INSTANCES
from flash_dmattn.biases import ByDistance
from flash_dmattn.explanation import explain_problem
from flash_dmattn.problem import AttentionProblem, NeedsGrad, TensorSpec, make_band

ALL_INSTANCES = tuple((*dims, dtype) for dims in INSTANCES for dtype in (torch.float16, torch.bfloat16))
# An instance has a kernel for each of these, with a mask and without. A bias per query is "none": it only shifts lse.
BIAS_FORMS = ("none", "vector", "tile", "strided")
# The same of the backward kernels.
BACKWARD_FORMS = ("none", "vector", "tile", "stored tile")
# The same for a bias in fp32, at head dims up to 64.
FLOAT_FORMS, BACKWARD_FLOAT_FORMS = ("float tile",), ("float tile", "stored float tile")
SUMMED = "summed tile"  # of head dims up to 128
WHOLE = "whole tile of keys"  # without mask and bias, of head dims 192 and 128
NUM_SMS = 132  # of an H200


def described(case: Case, prepared: bool = False, **more: Any) -> AttentionProblem:
    """The forward pass of a case, contiguous and on sm_90, or what more arguments of `explain_problem` say."""
    q = (case.batch, case.seqlen_q, case.num_heads, case.head_dim)
    mask, bias = (None if letters is None else case.sizes(letters) for letters in (case.mask, case.bias))
    by_distance = None
    if case.relative is not None:
        letters, number, zero, outside = case.relative
        sizes = case.sizes(letters)
        has_rows = letters[2] == "Lq"
        bias, by_distance = (*sizes[: 2 + has_rows], number), ByDistance(zero, outside, has_rows)
    return explain_problem(
        q,
        kv_heads=case.num_heads_k,
        seqlen_k=case.seqlen_k,
        head_dim_v=case.head_dim_v or None,
        dtype=case.dtype,
        mask=mask,
        mask_prepared=prepared and mask is not None,
        bias=bias,
        bias_dtype=case.bias_dtype,
        sink=case.sink is not None,
        by_distance=by_distance,
        **{"return_lse": True, **case.flags(), **more},
    ).problem


def differentiated(case: Case, deterministic: bool = False) -> AttentionProblem:
    """Both passes of a case, the same way."""
    needs_grad = NeedsGrad(*(name in case.needs_grad for name in NAMES))
    problem = described(case)
    return problem._replace(needs_grad=needs_grad, flags=problem.flags._replace(deterministic=deterministic))


def describe_on_meta(drawn: Drawn) -> tuple[AttentionProblem, Tensor | None]:
    """The description of a drawn call of cuda, gradients included, its bias as it lies in memory, and the bias."""
    case, bias = drawn.case, None
    problem = described(case, drawn.prepared)._replace(
        needs_grad=NeedsGrad(*(name in case.needs_grad for name in NAMES))
    )
    if case.bias is not None:
        bias = torch.empty(case.sizes(case.bias), dtype=case.bias_dtype or case.dtype, device="meta")
        bias = offset(bias, drawn.offset) if drawn.layout is None else LAYOUTS[drawn.layout](bias)
        problem = problem._replace(bias=TensorSpec(bias.shape, bias.stride(), bias.dtype))
    return problem, bias


def instance_of(case: Case) -> tuple[int, int, torch.dtype]:
    """The head dims and the dtype of the instance that serves a case where all are built."""
    return (*_smallest(INSTANCES, _head_dims(case)), case.dtype)


def _smallest(instances: tuple[tuple[int, int], ...], dims: tuple[int, int]) -> tuple[int, int]:
    return next(instance for instance in instances if dims[0] <= instance[0] and dims[1] <= instance[1])


def _head_dims(case: Case) -> tuple[int, int]:
    return case.head_dim, case.head_dim_v or case.head_dim


def forms_of(forms: tuple[str, ...], floats: tuple[str, ...], dims: tuple[int, ...]) -> tuple[str, ...]:
    """The forms of a bias that an instance of these head dims has kernels for."""
    return (*forms, *floats) if max(dims) <= FLOAT_TILE_DIM else forms


def bias_form(bias: Tensor | None, case: Case) -> str:
    """How the kernel of a case reads this bias, as `describe_bias` of csrc/api/forward.cpp decides it."""
    if bias is None or _is_broadcast(bias, 3):
        return "none"
    if _is_broadcast(bias, 2):
        return "vector"
    # The allocator's storages start on 512 bytes.
    aligned = bias.storage_offset() * bias.element_size() % 16 == 0
    steps = [bias.stride(dim) * bias.element_size() for dim in range(3) if not _is_broadcast(bias, dim)]
    if bias.stride(3) != 1 or not aligned or any(step % 16 for step in steps):
        return "strided"
    has_floats = bias.dtype == torch.float32 and case.dropout_p == 0 and max(_head_dims(case)) <= FLOAT_TILE_DIM
    return "tile" if bias.dtype == case.dtype else "float tile" if has_floats else "strided"


class Schedule(NamedTuple):
    """`BackwardSchedule` of csrc/api/backward_schedule.h, and who writes dbias: its `DbiasWriter` in snake case."""

    writer: str
    block_n: int
    full_group_pairs: int
    summed_pairs: int
    num_work_tiles: int
    blocks_decide: bool  # which key blocks have whole groups, of a mask
    completes_dq: bool  # a work tile has all keys
    is_ordered: bool
    tiles_differ: bool
    chunks: int  # of a dbias that the shared_dbias kernel sums, else 0
    slot_floats: int  # of one of them; 0 if that kernel writes dbias itself

    @property
    def has_two_key_tiles(self) -> bool:
        """Whether a work tile has two tiles of keys."""
        return self.block_n == 256

    def has_whole_tile(self, dims: tuple[int, int]) -> bool:
        """Whether a work tile has a whole tile of keys, by the kernel of its own of the instance of these head dims."""
        return max(dims) > 128 and self.block_n == 128


WRITERS = ("none", "main", "clusters", "shared_dbias")
SOURCE = """
#include <iterator>

#include "api/backward_schedule.h"
using namespace flash_dmattn;
extern "C" void schedule(const int64_t* sizes, const int* flags, int64_t num_sms, int64_t* result) {
  BackwardCall call{sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], sizes[5], sizes[6], sizes[7], sizes[8], sizes[9],
                    sizes[10], sizes[11], flags[0] != 0, flags[1] != 0, flags[2] != 0, flags[3] != 0, flags[4] != 0,
                    flags[5] != 0, flags[6] != 0, flags[7] != 0, flags[8] != 0, flags[9] != 0, flags[10] != 0,
                    flags[11] != 0};
  const DbiasWriter writer = dbias_writer(call);
  const BackwardSchedule found = schedule_backward(call, writer, num_sms);
  const DbiasSchedule of_dbias =
      writer == DbiasWriter::kSharedDbias ? schedule_dbias(call, 0, num_sms) : DbiasSchedule{};
  const int64_t values[] = {static_cast<int64_t>(writer), found.block_n, found.full_group_pairs, found.summed_pairs,
                            found.num_work_tiles, found.blocks_decide, found.completes_dq,
                            found.is_ordered, found.tiles_differ, of_dbias.chunks,
                            of_dbias.has_slots ? of_dbias.slot_floats : 0};
  std::copy(std::begin(values), std::end(values), result);
}
"""


@functools.lru_cache(maxsize=1)
def _library() -> ctypes.CDLL:
    return compiled(SOURCE)


def schedule_of(problem: AttentionProblem, num_sms: int = NUM_SMS, *, has_key_order: bool = False) -> Schedule:
    """How the extension schedules the backward pass of a call, on a GPU with room for clusters.

    Args:
        has_key_order: whether k and v come in the order of an interval mask.
    """
    p = problem
    head_dims = _smallest(INSTANCES, (p.head_dim, p.head_dim_v))
    per_score = p.bias is not None and not any(p.bias.broadcast()[2:])
    bias = p.bias.shape if p.bias is not None and per_score else (0, 0)
    dbias = bias[:2] if p.needs_grad.bias else (0, 0)
    sizes = (
        p.batch,
        p.num_heads,
        p.num_heads_k,
        p.seqlen_q,
        p.seqlen_k,
        *head_dims,
        *dbias,
        0 if p.mask is None else p.mask.shape[0],
        *(make_band(p.seqlen_q, p.seqlen_k, p.window) or (-p.seqlen_q, p.seqlen_k)),
    )
    shares = p.batch > 1 and (bias[0] == 1 or (p.mask is not None and p.mask.shape[0] == 1))
    flags = (
        has_key_order,
        p.is_causal or p.has_window,
        p.softcap > 0,
        p.deterministic,
        p.needs_grad.q,
        p.needs_grad.k or p.needs_grad.v,
        p.mask is not None and p.num_heads_k % p.mask.shape[1] == 0,
        shares,
        p.bias_class == "key",
        p.bias is not None and not p.bias.broadcast()[3],
        p.flags.invariant,
        has_floats(p) and p.needs_grad.bias,
    )
    result = (ctypes.c_int64 * len(Schedule._fields))()
    _library().schedule((ctypes.c_int64 * len(sizes))(*sizes), (ctypes.c_int * len(flags))(*flags), num_sms, result)
    writer, block_n, full, summed, tiles, decide, completes, is_ordered, differ, *dbias_fields = result
    flags_found = (bool(completes), bool(is_ordered), bool(differ))
    return Schedule(WRITERS[writer], block_n, full, summed, tiles, bool(decide), *flags_found, *dbias_fields)


def has_floats(problem: AttentionProblem) -> bool:
    """Whether a call has a bias of one value per query and key in fp32."""
    return problem.bias_class == "score" and problem.bias is not None and problem.bias.dtype == torch.float32


def backward_form(problem: AttentionProblem) -> str:
    """How the main backward kernel reads a bias, and what it does with its gradient."""
    if problem.bias is None or problem.bias.broadcast()[3]:
        return "none"
    if problem.bias.broadcast()[2]:
        return "vector"
    tile = "float tile" if has_floats(problem) else "tile"
    return {"main": f"stored {tile}", "clusters": SUMMED}.get(schedule_of(problem).writer, tile)


def backward_works(problem: AttentionProblem) -> tuple[str, str]:
    """The unit of work of a block, and how the blocks of an H200 share all units."""
    schedule, heads = schedule_of(problem), "its own"
    if problem.num_heads != problem.num_heads_k:
        full, summed = schedule.full_group_pairs > 0, schedule.summed_pairs > 0
        heads = "a group, then one" if full and summed else "a group" if full else "one of a group"
    if schedule.is_ordered:
        return heads, "in order"
    if schedule.num_work_tiles <= NUM_SMS:
        return heads, "one each"
    return heads, "as they finish" if schedule.tiles_differ else "evenly"


def _is_broadcast(x: Tensor, dim: int) -> bool:
    return x.shape[dim] == 1 or x.stride(dim) == 0
