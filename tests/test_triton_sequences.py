"""The Triton kernels on sequences, called as a backend is: in Triton's interpreter, or on a GPU where there is one.

`test_sequences.py` has what `attention` makes of them; here bounds, strides and wrong tables are drawn that it refuses
on a CPU. FLASH_DMATTN_EXAMPLES asks for more draws.
"""

from __future__ import annotations

import os

import pytest
import torch
from cases import DEVICE
from conftest import needs_triton
from sequence_calls import draw

from flash_dmattn.problem.checks import find_packing

pytestmark = needs_triton

MORE = int(os.environ.get("FLASH_DMATTN_EXAMPLES", "0"))


@pytest.mark.skipif(DEVICE == "cuda", reason="a GPU runs the kernels themselves")
@pytest.mark.parametrize("part", ("drawn", "made"))
def test_in_the_interpreter(part: str) -> None:
    from forked import interpret

    assert " 0 failed" in interpret("triton_sequences.py", part, str(MORE))


@pytest.mark.skipif(DEVICE == "cpu", reason="the interpreter runs them all in one process")
@pytest.mark.parametrize(
    "check", ("accurate", "others", "bounds", "repeats", "few keys", "late", "sinks", "shares", "pages", "tiles")
)
def test_on_a_gpu(check: str) -> None:
    from triton_sequences import MADE, drawn

    failures = [outcome for outcome in (MADE[check]() if check in MADE else drawn(check, MORE or 60)) if outcome]
    assert not failures, f"{len(failures)} failed\n" + "\n".join(failures[:3])


@pytest.mark.skipif(DEVICE == "cuda", reason="a GPU runs the kernels; the bounds are those of the pinned Triton")
@pytest.mark.parametrize("name", ("64 packed, mask", "64 packed, tiles", "128 paged"))
def test_compiled_for_sm_90(name: str) -> None:
    """All forms for all GPUs are compiled by `compile_everything.py`, samples by `test_triton_gpus.py`."""
    from compiled_catalogue import SEQUENCES, catalogue, compiled

    entries = catalogue(("sm_90",), ("bf16",), (f"{SEQUENCES}{name}",))
    assert {entry.job.name for entry in entries} >= {"forward", "fill_gaps"}
    for entry in entries:
        result = compiled(entry)
        assert not result.problems, result.line


@pytest.mark.skipif(DEVICE == "cuda", reason="a GPU runs the kernels; what is made for sm_80 needs none")
def test_sums_of_short_sequences_are_as_long_as_the_row_of_a_fragment() -> None:
    """With a bool mask and dropout the 16 queries of one pass are too few on sm_80: dk and dv would be wrong."""
    from compiled_catalogue import SEQUENCES, catalogue, compiled

    variant = f"{SEQUENCES}64 packed, short, mask, dropout"
    (entry,) = catalogue(("sm_80",), ("bf16",), (f"backward_keys, {variant}",))
    result = compiled(entry)
    assert not result.problems, result.line


def test_calls_are_drawn_from_all_that_kernels_tell_apart() -> None:
    """Draws reach all that decides a kernel, because a draw that lost a form would pass every check."""
    seen: set[object] = set()
    for number in range(400):
        call = draw(number, None, (0, 1, 31, 33, 65), (torch.float32,), is_loose=True)
        spec = call.sequences.describe(call.q, call.k, call.v)
        seen.add(spec.layout)
        for name in ("mask", "bias"):
            x = getattr(call, name)
            seen.add((name, "none" if x is None else find_packing(name, x.shape, spec)))
        table = call.sequences.block_table
        seen.add(("wrong page", table is not None and bool((table >= call.k.shape[0]).any())))
        if call.lengths[0][0] > 64:
            seen.add("late")
        if call.bias is not None:
            heads = call.bias.shape[-3]
            seen.add(("head of bias", heads == call.q.shape[-2], heads == call.k.shape[-2]))
            seen.add(("expanded", 0 in call.bias.stride()))
    layouts = {"packed", "padded", "paged", "paged_packed"}
    packings = {(name, kind) for name in ("mask", "bias") for kind in ("none", "queries", "keys")}
    heads = {("head of bias", a, b) for a in (True, False) for b in (True, False)}
    assert layouts | packings | heads | {"late", ("expanded", True), ("wrong page", True)} <= seen


def test_lse_of_few_keys_is_turned_to_base_2_whatever_the_sequences() -> None:
    """Programs follow from rows: a tile of rows for each of 4096 sequences would be 40 times as many."""
    from compiled_triton import SequenceVariant, run_sequence_plans

    from flash_dmattn.triton_kernels.backward_delta import delta_kernel

    variant = SequenceVariant(64, batch=4096, seqlen_q=48, seqlen_k=48, total=4096 * 48)
    programs = {}
    run_sequence_plans(variant, "sm_90", lambda launch, *tensors: programs.update({launch.kernel: launch.grid[0]}))
    assert programs[delta_kernel] == variant.num_heads * (variant.total // 1024)
