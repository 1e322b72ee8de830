"""The CUDA kernels on an emulated GPU: random and rare calls, packing, clusters, what the emulation notices."""

from __future__ import annotations

import fcntl
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import forked
import pytest
from by_path import load
from cases import DEVICE

TESTS = Path(__file__).parent
BUILD = TESTS / "emulation" / "build.py"
CASES = 50
HEAD_DIMS, DTYPES = "32,64,96,128,192", "bf16"
# Why a test is skipped there: kernels of other head dims, dtypes and backends, gradients that triton would make, and
# what a test says of CPU tensors.
SKIPPED = re.compile(
    r"the kernels that are built take|this build has no kernels of float16|^(flex|triton|sdpa)\b"
    r"|device is cpu; the kernels run on GPUs|on a CPU they are refused|masks on the CPU are \w+ by PyTorch"
)


REASONS = "; ".join(load(BUILD).reasons_not_to_build())
pytestmark = [
    pytest.mark.skipif(DEVICE == "cuda", reason="a GPU runs the kernels themselves"),
    pytest.mark.skipif(bool(REASONS), reason=REASONS),
]


class Built(NamedTuple):
    """The operators and the program of mistakes, as `emulation/build.py` has made them."""

    extension: Path
    mistakes: Path


def run(*command: str | Path) -> str:
    """Run a command: what it prints; it has to end well."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, f"exit {done.returncode}\n{done.stdout[-4000:]}{done.stderr[-2000:]}"
    return done.stdout


def run_tests(built: Built, *tests: str, most: int = 0) -> None:
    """Run tests on the emulated GPU, `most` cases of each if it is not 0; they skip what is not built for it."""
    variables = {"FLASH_DMATTN_EMULATED": str(built.extension), "FLASH_DMATTN_SAMPLE": str(most)}
    said = forked.run_pytest(*(str(TESTS / test) for test in tests), **variables)
    reasons = re.findall(r"^SKIPPED \[\d+\] \S+ (.*)$", said, re.MULTILINE)
    assert " passed" in said.splitlines()[-1] and all(SKIPPED.search(reason) for reason in reasons), said[-3000:]


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    base = tmp_path_factory.getbasetemp()
    # The workers of pytest-xdist have folders side by side; the first to come builds for all.
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "emulation"
    folder.mkdir(exist_ok=True)
    extension = folder / "emulated.so"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        run(sys.executable, BUILD, extension, "--folder", folder, "--head-dims", HEAD_DIMS, "--dtypes", DTYPES)
    return Built(extension, folder / "mistakes")


@pytest.mark.parametrize("first", range(0, 16000, 4000))
def test_random_calls(built: Built, first: int) -> None:
    run_calls(built, "dense", first, CASES)


def run_calls(built: Built, features: str, first: int, count: int) -> None:
    said = forked.run_script("run_calls.py", str(built.extension), features, str(first), str(count))
    assert f"{count} passed, 0 failed" in said


@pytest.mark.parametrize(("features", "count"), (("sequences", 50), ("intervals", 60)))
def test_random_calls_of_other_features(built: Built, features: str, count: int) -> None:
    run_calls(built, features, 0, count)


# Tests that run on a GPU in all of their cases; here as many cases of each as take about ten seconds together.
EMULATED: dict[str, tuple[int, tuple[str, ...]]] = {
    "sequences": (4, ("test_cuda_sequences.py",)),
    "decoding": (16, ("test_cuda_decoding.py",)),
    "parts of a batch": (4, ("test_cuda_parts.py",)),
    "masks of one row": (4, ("test_cuda_one_mask_row.py",)),
    "a bias in shared memory": (10, ("test_cuda_held_bias.py",)),
    "dropout": (6, ("test_cuda_dropout.py",)),
    "a bias by distance": (2, ("test_cuda_relative.py",)),
    "making masks": (4, ("test_cuda_pack.py",)),
    "largest scores": (4, ("test_cuda_max_scores.py",)),
    "calls by hand": (0, ("test_cuda_arguments.py",)),
    "dbias in a larger tensor": (2, ("test_cuda_dbias_out.py",)),
    "calls that random ones rarely are": (3, ("test_cuda_rare.py",)),
    "plans": (24, ("test_plans.py::test_both_ways_give_the_same_bits",)),
    "key blocks of whole groups": (12, ("test_cuda_backward.py::test_key_blocks_of_whole_groups_under_a_mask",)),
    "groups first": (
        1,
        (
            "test_cuda_backward.py::test_groups_first_and_then_heads",
            "test_cuda_backward.py::test_groups_first_of_two_tiles_of_keys",
        ),
    ),
    "clusters": (4, ("test_cuda_backward.py::test_what_clusters_are_asked_for",)),
    "a bias in fp32": (
        3,
        tuple(
            f"test_cuda_backward.py::test_{name}"
            for name in (
                "a_bias_in_fp32_under_every_mask",
                "lengths_and_gradients_of_a_bias_in_fp32",
                "values_of_a_bias_in_fp32",
                "rows_and_padding_beside_a_bias_in_fp32",
                "a_bias_in_fp32_is_not_rounded",
                "a_gradient_in_fp32_is_not_rounded",
            )
        ),
    ),
    "layouts": (2, ("test_cuda_backward.py::test_dout_in_a_layout_of_its_own",)),
    "lists of tiles": (0, ("test_list_tiles.py::test_calls_on_cuda_are_those_of_the_mask",)),
    "whole tiles of keys": (8, ("test_cuda_backward.py::test_whole_tiles_of_keys_of_wide_heads",)),
    "the invariant mode": (48, ("test_cuda_invariance.py",)),
    "long walks": (1, ("test_cuda_backward.py::test_long_walks",)),
}


@pytest.mark.parametrize("subject", EMULATED)
def test_on_the_emulated_gpu(built: Built, subject: str) -> None:
    most, tests = EMULATED[subject]
    run_tests(built, *tests, most=most)


COUNT_CLUSTERS = """
import ctypes, sys, torch
count_clusters = ctypes.CDLL(sys.argv[1]).emulation_count_clusters
for cluster in (-1, 0, 1, 2, 8, 9, 16):
    runs = ctypes.c_int(-1)
    print(cluster, count_clusters(cluster, ctypes.byref(runs)), runs.value)
"""


def test_counting_clusters_of_a_size_that_no_gpu_has(built: Built) -> None:
    """cudaErrorInvalidValue, 1, is the answer, not memory beyond the counts that are remembered."""
    said = run(sys.executable, "-c", COUNT_CLUSTERS, built.extension)
    assert said.splitlines() == ["-1 1 -1", "0 1 -1", "1 0 3", "2 0 1", "8 0 1", "9 1 -1", "16 1 -1"]


LAUNCH_OF_DRIVER = """
import ctypes, sys, torch
launch_of_driver = ctypes.CDLL(sys.argv[1]).emulation_launch_of_driver
print(*(launch_of_driver(driver, cluster) for driver in (12020, 12029, 12030, 13000) for cluster in (1, 4)))
"""


def test_an_old_driver_is_not_asked_to_start_kernels_early(built: Built) -> None:
    """Blocks in a cluster of the launch, negative where it may start early: as of the driver of CUDA 12.3."""
    said = run(sys.executable, "-c", LAUNCH_OF_DRIVER, built.extension)
    assert said.split() == ["1", "4", "1", "4", "-1", "-4", "-1", "-4"]


def test_what_the_emulation_notices(built: Built) -> None:
    said = run(built.mistakes)
    runs = {name: (int(right), error) for name, right, error in re.findall(r"(.*): (\d+) of 40 runs right; (.*)", said)}
    assert runs.pop("none") == (40, "")
    assert len(runs) == 10 and all(right < 40 for right, _ in runs.values()), said
    for name, message in (
        ("never gives back", "no thread can go on"),
        ("lanes part", "a lane is at __ballot_sync while others of its warp are at __syncwarp"),
        ("never fences", "an accumulator that was waited for without wgmma_fence_operand"),
        ("leaves shared memory", "shared memory ends before address"),
        ("never clears", "a kernel adds to memory that nobody has cleared"),
        ("starts too early", "a thread does not wait for the kernel before"),
    ):
        assert runs[name][0] == 0 and message in runs[name][1], said
