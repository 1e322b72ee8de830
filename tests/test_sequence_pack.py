"""Masks of sequences packed by Triton: every bit as in PyTorch, and the calls that pack theirs."""

from __future__ import annotations

import importlib.util
import os
from types import SimpleNamespace

import pytest
import torch
from cases import DEVICE
from forked import interpret
from sequence_pack_calls import check_of, draw
from test_mask_pack_interpreter import frugal

import flash_dmattn
from flash_dmattn import Sequences
from flash_dmattn.backends.eager import BACKEND as EAGER
from flash_dmattn.backends.mask_choice import choose_form, view_of
from flash_dmattn.backends.triton.backend import BACKEND as TRITON
from flash_dmattn.dispatch import packers
from flash_dmattn.explanation import Explanation, explain_problem
from flash_dmattn.masks import PreparedMask
from flash_dmattn.problem import SequenceSpec

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
without_gpu = pytest.mark.skipif(DEVICE == "cuda", reason="a GPU runs the kernels themselves")
on_a_gpu = pytest.mark.skipif(DEVICE == "cpu", reason="kernels run on a GPU; the interpreter has a test of its own")

CALLS = 72  # in the interpreter


@needs_triton
@without_gpu
def test_random_masks() -> None:
    assert f"{CALLS} passed, 0 failed" in interpret("run_calls.py", "interpreter", "packs", "0", str(CALLS))


@needs_triton
@without_gpu
@pytest.mark.parametrize(("what", "number"), (("far", 40), ("calls", 4), ("transformed", 8), ("layer", 1), ("off", 1)))
def test_offsets_beyond_int32_and_ways_through_a_call(what: str, number: int) -> None:
    assert f"{number} passed, 0 failed" in interpret("interpreted_packs.py", what)


@needs_triton
@on_a_gpu
def test_random_masks_on_a_gpu() -> None:
    for number in range(int(os.environ.get("FLASH_DMATTN_EXAMPLES", "200"))):
        told, check = check_of(number)
        print(told)  # pytest shows the last one with a failure
        check()


def packed_example() -> SimpleNamespace:
    """Three documents with a mask of packed rows, and what a call makes of it."""
    edges = torch.tensor([0, 300, 420, 900], dtype=torch.int32, device=DEVICE)
    q, k, v, dout = (torch.randn(900, 4, 64, device=DEVICE, dtype=torch.bfloat16) for _ in range(4))
    mask = torch.rand(2, 900, 480, device=DEVICE) < 0.4

    def step() -> list[torch.Tensor]:
        leaves = [x.detach().requires_grad_() for x in (q, k[:, :2], v[:, :2])]
        sequences = Sequences.packed(edges, max_seqlen_q=480)
        out = flash_dmattn.attention(*leaves, mask, is_causal=True, sequences=sequences, backend="triton")
        assert isinstance(out, torch.Tensor)
        return [out.detach(), *torch.autograd.grad(out, leaves, dout)]

    return SimpleNamespace(step=step, mask=mask, edges=edges)


@on_a_gpu
def test_nothing_waits_for_the_device() -> None:
    call = packed_example()
    wanted = call.step()
    try:
        torch.cuda.set_sync_debug_mode("error")
        actual = call.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(map(torch.equal, actual, wanted))


@on_a_gpu
def test_a_graph_follows_masks_and_lengths() -> None:
    call = packed_example()
    call.step()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        call.step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        actual = call.step()
    for edges in ([0, 100, 480, 900], [0, 470, 480, 800]):
        call.edges.copy_(torch.tensor(edges))
        call.mask.copy_(torch.rand(call.mask.shape) < 0.2)
        graph.replay()
        assert all(map(torch.equal, actual, call.step()))


def problem_of(
    rows: tuple[int, ...] = (1, 500, 300), most: tuple[int, int] = (300, 300), device: str = "sm_90", **more: object
) -> Explanation:
    """A call with a bool mask of three packed sequences of 500 tokens in all."""
    spec = SequenceSpec("packed", 3, 500, 500, *most)
    return explain_problem(
        (1, 500, 2, 16), device=device, mask=rows, sequences=spec, grad=True, backend="triton", **more
    )


PREPARES = "packs the bool mask as bits and lists of tiles, once a call: PreparedMask.from_mask(mask, sequences=...)"
READS = "reads the bool mask as it is, and skips nothing for it: PreparedMask.from_mask(mask, sequences=...)"


@pytest.mark.parametrize(
    ("changes", "packs"),
    [
        ({}, True),
        ({"device": "sm_80"}, True),
        ({"rows": (2, 500, 129), "most": (17, 129)}, True),
        ({"device": "gfx942"}, False),  # PyTorch would pack it
        ({"rows": (1, 500, 128), "most": (300, 128)}, False),  # one tile of keys
        ({"most": (16, 300)}, False),  # few queries
        ({"rows": (1, 500, 1)}, False),  # a value for each query
        ({"rows": (1, 1, 500)}, False),  # for each key
        ({"rows": (3, 1, 300, 300)}, False),  # by position
    ],
)
def test_which_masks_are_packed_by_the_call(changes: dict[str, object], packs: bool) -> None:
    explained = problem_of(**changes)  # type: ignore[arg-type]
    problem = explained.problem
    assert problem.mask is not None
    for backward in (None, TRITON, EAGER):
        assert choose_form(problem, TRITON, backward).form == ("sequence_tiles" if packs else "dense")
    notes = next(verdict.notes for verdict in explained.verdicts if verdict.backend == "triton")
    assert notes[0].startswith(PREPARES if packs else READS)


def test_an_expanded_mask_is_not_packed() -> None:
    """One row for all queries, or one value for all keys, however it is written."""
    sequences = Sequences.packed(torch.tensor([0, 200, 500]), max_seqlen_q=300)
    q = torch.zeros(500, 2, 16)
    for mask in (torch.ones(1, 1, 300, dtype=torch.bool), torch.ones(1, 500, 1, dtype=torch.bool)):
        problem = flash_dmattn.explain(q, q, q, mask.expand(1, 500, 300), sequences=sequences).problem
        assert problem.flags.mask_packing == "queries" and choose_form(problem, TRITON, TRITON).form == "dense"


def test_tiles_of_a_call_are_those_of_a_prepared_mask() -> None:
    sequences = Sequences.packed(torch.tensor([0, 200, 500]), max_seqlen_q=300)
    q, mask = torch.zeros(500, 2, 16), torch.rand(2, 500, 300) < 0.3
    problem = flash_dmattn.explain(q, q, q, mask, is_causal=True, sequences=sequences).problem
    view = view_of(problem, choose_form(problem, TRITON, TRITON), mask[None], sequences.describe_with_view(q, q, q)[1])
    tiles = PreparedMask.from_mask(mask, is_causal=True, sequences=sequences, seqlen_q=500, seqlen_k=500)
    assert view.form == "sequence_tiles" and all(map(torch.equal, view.tensors, tiles.tensors))


@needs_triton
def test_who_packs() -> None:
    """The kernels on GPUs of NVIDIA, whoever packs dense masks there; PyTorch on GPUs of AMD and elsewhere."""
    from flash_dmattn.triton_kernels import sequence_pack

    nvidia, amd = packers._triton_packer("sm_"), packers._triton_packer("gfx")
    assert nvidia is not None and nvidia.pack_sequences is sequence_pack.pack_sequences
    assert amd is not None and amd.pack_sequences is packers.operators.PYTORCH.pack_sequences
    names = ("pack_mask", "key_mask", "listed_tiles", "interval_tiles", "topk_intervals", "key_order")
    operators = SimpleNamespace(**{f"cuda_{name}": SimpleNamespace(default=None) for name in names})
    assert packers.around_extension(operators).pack_sequences is sequence_pack.pack_sequences


@needs_triton
@without_gpu
@pytest.mark.parametrize("arch", ("sm_80", "sm_90"))
def test_compiled(arch: str) -> None:
    """Masks are read and bits written as wide as they may be."""
    from compiled_triton import sequence_packing_jobs

    widths = {16: {"v4.b32"}, 4: set(), 1: {"b8"}}  # in addition to bounds, of 4 bytes
    seen = set()
    for job in {job.key: job for job in sequence_packing_jobs(arch)}.values():
        kernel, constants, loads, stores = frugal(job)
        if kernel.name == "pack_sequences":
            assert loads - {"b32", "b64"} == widths[constants["VEC"]], constants
            assert stores == {"v4.b32", "b8"}, constants
            seen |= {("VEC", constants["VEC"]), ("KIND", constants["KIND"]), ("band", constants["HAS_BAND"])}
    assert {("VEC", n) for n in (1, 4, 16)} | {("KIND", n) for n in range(3)} | {("band", True)} <= seen


def test_masks_are_drawn_of_all_that_kernels_tell_apart() -> None:
    """Draws reach all that decides a kernel: a draw that lost a form would pass every check."""
    seen: set[object] = set()
    for number in range(CALLS):
        call = draw(number)
        spec, shape = call.spec, call.mask_bytes.shape
        lengths = {n for row in call.bounds.tolist() for n in (row[1], row[3])}
        seen |= {spec.layout, call.mask_packing, call.window, *lengths, ("sequences", spec.number)}
        seen.add(("rows", call.mask_packing, shape[2] > 1, shape[3] > 1))
        if call.mask_bytes.numel():
            seen |= {("byte", int(call.mask_bytes.max())), ("far", max(call.mask_bytes.stride()) > 10**12)}
        if spec.number and spec.packs_queries:
            seen.add(("late", int(call.bounds[0, 0]) > 128))
    layouts = {"packed", "padded", "paged", "paged_packed"}
    forms = {("rows", kind, i, j) for kind in ("none", "queries") for i in (True, False) for j in (True, False)}
    others = {("byte", 255), ("far", True), ("late", True), *(("sequences", n) for n in (0, 1, 9, 40))}
    assert layouts | {"keys", "ragged", "tree"} | forms | others | {0, 1, 31, 32, 33, 127, 128, 129, 300} <= seen
