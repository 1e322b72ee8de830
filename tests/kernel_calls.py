"""Calls for compute-sanitizer: few and small ones, drawn so that together they reach every kernel of a backend.

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck python tests/run_calls.py cuda kernels 0 8 cpu

`run_calls.py PLACE kernels` runs them, numbered round and round. Results are compared on the CPU, so that the tool
watches little else than the kernels. Without caching every tensor is an allocation of its own, and an access beyond
its end is seen.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple, TypeVar
from unittest import mock

import draws
from accuracy import run
from cases import ALL, Case, Numbers
from cuda_forms import (
    NUM_SMS,
    WHOLE,
    backward_form,
    backward_works,
    bias_form,
    describe_on_meta,
    has_floats,
    instance_of,
    schedule_of,
)
from descriptors import descriptors_wherever_they_serve
from draws import BF16, FP16, FP32, KERNELS, Drawn, Features, draw
from out_of_tree import replaced, rules_without

import flash_dmattn
from flash_dmattn.backends.cuda import passes
from flash_dmattn.backends.cuda.backend import BACKEND as CUDA
from flash_dmattn.backends.cuda.operands import FLOAT_TILE_DIM
from flash_dmattn.backends.cuda.rules import INSTANCES
from flash_dmattn.backends.triton import passes as triton_passes
from flash_dmattn.caches import ClockCache
from flash_dmattn.dispatch.registry import choices_changed
from flash_dmattn.dispatch.selection import passes_of

FULL, TILES, EVERY_KEY = ("B", "Hq", "Lq", "Lk"), ("B", "Hk", "Lq", "Lk"), ("B", "1", "1", "Lk")
SHARED_BY_ENTRIES, SHARED_BY_ALL = ("1", "Hq", "Lq", "Lk"), ("1", "1", "Lq", "Lk")


class Sanitized(NamedTuple):
    """A call: `num_kv_splits` as `passes.NUM_KV_SPLITS` of cuda, `few_pairs`: triton reads its bool mask as it is."""

    drawn: Drawn
    num_kv_splits: int = 1
    few_pairs: bool = False

    @contextmanager
    def settings(self) -> Iterator[None]:
        """Run the call so."""
        few_pairs = triton_passes.FEW_PAIRS if self.few_pairs else 0  # at 0 every bool mask is packed
        with (
            mock.patch.object(passes, "NUM_KV_SPLITS", self.num_kv_splits),
            mock.patch.object(triton_passes, "FEW_PAIRS", few_pairs),
        ):
            choices_changed()
            yield


T = TypeVar("T")
Reached = set[tuple[Any, ...]]


def chosen(reached: Iterable[tuple[T, Reached]]) -> list[tuple[T, Reached]]:
    """Choose calls until nothing is left to reach: each is the first that reaches the most beyond those before it."""
    left, done, calls = list(reached), Reached(), []
    while left:
        left = [(call, new) for call, each in left if (new := each - done)]
        if left:
            calls.append(max(left, key=lambda each: len(each[1])))
            done |= calls[-1][1]
    return calls


# cuda

# More work than an H200 has SMs, or of a few long walks: who computes what then, and in which order.
WORKS: Features = {
    **draws.CUDA,
    "batch": (1, 2, 4, 8, 8, 9),
    "num_heads_k": (2, 2, 18, 45, 66),
    "group": (1, 2, 2, 4),
    "seqlen_q": (9, 65, 130, 193, 500),
    "seqlen_k": (72, 129, 130, 136, 257, 264, 384, 392, 504),
    "bias_dtype": (None,),
    "mask": (None, None, None, TILES, SHARED_BY_ALL),
    "mask_kind": ("empty_tiles",),
    "bias": (None, FULL, FULL, SHARED_BY_ENTRIES, SHARED_BY_ENTRIES),
    "bias_kind": ("normal",),
    "data": (),
    "softcap": (0.0, 0.0, 0.0, 5.0),
    "window_size": (None,),
    "needs_grad": (ALL,),
    "sink": (None,),
    "dropout_p": (0.0,),
}
# A bias that a block keeps for many entries: enough of them for 132 SMs, by three consumers and by four.
HELD = Case(batch=180, num_heads=3, num_heads_k=3, head_dim=32, dtype=BF16, bias=SHARED_BY_ENTRIES, needs_grad=())
HELD_CALLS = (HELD.with_(seqlen_q=130, seqlen_k=136), HELD.with_(seqlen_q=200, seqlen_k=72, sink="normal"))

# A bias by distance, whose values reach few of the tiles: by three consumers in parts, by two, with a mask, and with
# the gradient of the values.
DISTANCES = Numbers(("1", "Hq", "1"), 65, 32, "clamp")
RELATIVE = Case(num_heads=4, head_dim=64, dtype=BF16, seqlen_q=330, seqlen_k=410, relative=DISTANCES, needs_grad=())
RELATIVE_CALLS = (
    (RELATIVE, 3),
    (RELATIVE.with_(seqlen_q=120, is_causal=True, needs_grad=ALL), 1),
    (RELATIVE.with_(head_dim=128, dtype=FP16, mask=FULL, softcap=3.0), 1),
    (RELATIVE.with_(head_dim=128, dtype=FP16, mask=FULL, needs_grad=ALL), 1),
)

LARGEST = Case(dtype=BF16, seqlen_q=330, seqlen_k=410, needs_grad=(), aux=("max_scores",))


def drawn_of_cuda() -> Iterator[Sanitized]:
    """Candidates: the largest scores, small calls, a third with keys shared among blocks, then calls of much work."""
    for (head_dim, head_dim_v), splits in itertools.product(INSTANCES, (1, 3)):
        yield Sanitized(Drawn(LARGEST.with_(head_dim=head_dim, head_dim_v=head_dim_v)), splits)
    for number in range(2400):
        drawn = draws.draw_cuda(number)
        splits = random.Random(f"splits {number}").choice((1, 1, 3))
        yield Sanitized(drawn._replace(case=draws.smaller(drawn.case.with_(data="centred"))), splits)
    for number in range(2000):
        rng = random.Random(f"works {number}")
        head_dim, head_dim_v = rng.choice((*INSTANCES, *INSTANCES[:4]))
        dims = {"head_dim": (head_dim,), "head_dim_v": (head_dim_v,), "dtype": (BF16, FP16)}
        case = draw(rng, {**WORKS, **dims}, number)
        if case.batch * case.num_heads * case.seqlen_q * case.seqlen_k <= 120 * draws.MOST_SCORES:
            drawn = Drawn(case, deterministic=rng.random() < 0.5)
            yield Sanitized(drawn)
            if max(head_dim, head_dim_v) <= FLOAT_TILE_DIM and case.bias is not None:
                yield Sanitized(drawn._replace(case=case.with_(bias_dtype=FP32)))


def reached_by(call: Sanitized) -> Reached:
    """The kernels of cuda that a call reaches, and the ways in which its blocks share the work of its backward pass."""
    drawn = call.drawn
    case, has_mask, in_order = drawn.case, drawn.case.mask is not None, drawn.deterministic
    problem, bias = describe_on_meta(drawn)
    problem = problem._replace(flags=problem.flags._replace(deterministic=in_order))
    if CUDA.broken_rules(problem, passes_of(problem)):
        return Reached()
    instance = instance_of(case)
    dims, form = instance[:2], bias_form(bias, case)
    reached: Reached = {("forward", dims, form, has_mask), ("dtype", instance)}
    if call.num_kv_splits > 1:
        reached = {("parts", dims, form, has_mask)}
    if case.aux:
        reached.add(("largest", dims, call.num_kv_splits > 1))
    if not any(problem.needs_grad):
        return reached
    schedule, form = schedule_of(problem), backward_form(problem)
    is_shared = schedule.writer == "shared_dbias"
    if case.softcap > 0:
        return {*reached, ("capped", dims, form), ("capped sum", dims, is_shared)}
    if schedule.has_whole_tile(dims):
        form = WHOLE
    reached |= {("backward", instance, form, has_mask), ("order", dims, form, has_mask, in_order)}
    reached |= {("works", in_order, *backward_works(problem)), ("shared", instance, has_mask, is_shared)}
    if is_shared and has_floats(problem):
        reached.add(("shared floats", instance, has_mask))
    if is_shared:
        dtype = FP32 if has_floats(problem) else case.dtype
        reached.add(("slots", max(dims) > 128, dtype, schedule.slot_floats > 0, case.seqlen_k % 8 > 0))
    if schedule.writer == "clusters":
        tiles = case.batch * case.num_heads * -(-case.seqlen_k // 128)
        reached |= {("clusters", in_order, tiles > NUM_SMS), ("cluster", case.batch)}
    if schedule.has_two_key_tiles:  # the last block has one tile, or two
        reached.add(("pairs", in_order, case.num_heads > case.num_heads_k, case.seqlen_k % 256 > 128))
        reached.add(("forms of pairs", instance, form))
    return reached


# triton

# Lengths at every edge of a block; few queries or few keys, whose programs share a row.
TRITON: Features = {
    **KERNELS,
    "batch": (1, 2),
    "num_heads_k": (1, 2),
    "group": (1, 1, 2, 4),
    "seqlen_q": (1, 5, 9, 65, 130, 130, 257, 257, 520),
    "seqlen_k": (1, 33, 65, 130, 257, 264, 264, 520),
    "head_dim": (40, 64, 64, 128),
    "head_dim_v": (0, 0, 64),
    "dtype": (BF16, BF16, FP32),
    "mask": (None, TILES, FULL, EVERY_KEY, EVERY_KEY),
    "mask_kind": ("random", "empty_rows", "empty_tiles"),
    "bias": (None, FULL, FULL, *3 * (SHARED_BY_ENTRIES, SHARED_BY_ALL), ("1", "Hk", "1", "Lk"), ("B", "Hq", "Lq", "1")),
    "needs_grad": (ALL, ALL, ("k", "bias")),
    "data": (),
}


def drawn_of_triton() -> Iterator[Sanitized]:
    """Candidates: calls of all kinds, every fourth of short rows."""
    for number in range(400):
        rng = random.Random(f"triton {number}")
        if number % 4 == 0:
            drawn = draws.draw_short(number)
            yield Sanitized(drawn._replace(case=draws.smaller(drawn.case.with_(data="centred"))))
            continue
        layout, few_pairs = rng.choice((None, None, "offset_by_one")), rng.random() < 0.4
        case = draws.smaller(draw(rng, TRITON, number))
        yield Sanitized(Drawn(case, layout, descriptors=number % 2 == 1), few_pairs=few_pairs)


def launched(calls: Iterable[Sanitized]) -> Iterator[tuple[Sanitized, Reached]]:
    """Each call, and the kernels that an H200 would launch for it: with which mask, by descriptors, and so on."""
    from flash_dmattn.triton_kernels import kernel_launch, launch, plan

    reached, names = Reached(), set[str]()
    make = plan.Call.__init__

    def on_an_h200(self: plan.Call, *arguments: Any) -> None:
        make(self, *arguments)
        self.arch, self.num_sms = "sm_90", NUM_SMS

    def record(self: kernel_launch.Launch, *_: Any) -> None:
        constants = dict(zip(self.kernel.arg_names[-len(self.rest) :], self.rest, strict=True))
        names.add(self.kernel.__name__)
        reached.add(("mask", self.kernel.__name__, constants.get("MASK"), bool(self.descriptors)))

    attention = functools.partial(flash_dmattn.attention, return_lse=True, backend="triton")
    with (
        mock.patch.object(plan.Call, "__init__", on_an_h200),
        mock.patch.object(kernel_launch.Launch, "__call__", record),
        mock.patch.object(launch, "plans", ClockCache(4096)),
        replaced("triton", rules=rules_without("triton", "device")),
    ):
        for call in calls:
            case = call.drawn.case
            for table in (reached, names, launch.plans):
                table.clear()
            with call.settings(), descriptors_wherever_they_serve() if call.drawn.descriptors else nullcontext():
                run(attention, case, draws.placed(call.drawn, case.build("cpu")))
            has_band = case.is_causal or case.window_size is not None
            flags = (
                case.dtype,
                case.bias,
                has_band,
                case.softcap > 0,
                case.dropout_p > 0,
                case.sink,
                call.drawn.layout,
            )
            yield call, reached | {(name, n, flag) for name in names for n, flag in enumerate(flags)}


@functools.cache
def calls_of(backend: str) -> list[tuple[Sanitized, Reached]]:
    if backend == "triton":
        return chosen(launched(drawn_of_triton()))
    by_hand = [*((case, 1) for case in HELD_CALLS), *RELATIVE_CALLS]
    return [(Sanitized(Drawn(case), splits), Reached()) for case, splits in by_hand] + chosen(
        (call, reached_by(call)) for call in drawn_of_cuda()
    )
