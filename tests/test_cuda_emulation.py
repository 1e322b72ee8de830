"""The CUDA kernels on an emulated GPU: random and rare calls, packing, clusters, what the emulation notices."""

from __future__ import annotations

import fcntl
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from cases import DEVICE

TESTS = Path(__file__).parent
BUILD = TESTS / "emulation" / "build.py"
CASES = 70
HEAD_DIMS, DTYPES = "32,64,96,128", "bf16"


def _reasons() -> str:
    spec = importlib.util.spec_from_file_location("emulation_build", BUILD)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return "; ".join(module.reasons_not_to_build())


REASONS = _reasons()
pytestmark = [
    pytest.mark.skipif(DEVICE == "cuda", reason="a GPU runs the kernels themselves"),
    pytest.mark.skipif(bool(REASONS), reason=REASONS),
]


class Built(NamedTuple):
    """What `emulation/build.py` has made: the operators, and the program of mistakes."""

    extension: Path
    mistakes: Path


def run(*command: str | Path, **environment: str) -> str:
    """What a command prints, which has to end well."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, env={**os.environ, **environment})
    assert done.returncode == 0, f"exit {done.returncode}\n{done.stdout[-4000:]}{done.stderr[-2000:]}"
    return done.stdout


def run_tests(built: Built, file: str, *options: str, skipped: int = 0) -> None:
    """A file of tests on the emulated GPU: all pass but `skipped`, whose reasons are rules of that file."""
    command = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", TESTS / file, *options)
    said = run(*command, FLASH_DMATTN_EMULATED=str(built.extension))
    counts = {outcome: int(count) for count, outcome in re.findall(r"(\d+) (\w+)", said.splitlines()[-1])}
    assert counts.get("passed", 0) > 0 and counts.get("skipped", 0) == skipped, said[-2000:]


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


SYNTAX = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import build
print(*build.check_syntax(Path(sys.argv[2]), "192", "bf16"))
"""


def test_kernels_that_are_not_built_here_are_read(built: Built) -> None:
    """Those of the other head dims, as a compiler of C++ sees them: nvcc compiles them where all are built."""
    said = run(sys.executable, "-c", SYNTAX, BUILD.parent, built.extension.parent)
    forward = ["forward_d192_128_bf16", "forward_d192_bf16"]
    backward = [f"{name}_{dims}_bf16" for name in ("backward", "shared_dbias") for dims in ("d192_128", "d192")]
    assert said.split() == [*forward, *backward]


@pytest.mark.parametrize("first", range(0, 16000, 4000))
def test_random_calls(built: Built, first: int) -> None:
    said = run(sys.executable, TESTS / "emulated_cuda.py", built.extension, str(first), str(CASES))
    assert f"{CASES} passed, 0 failed" in said


def test_sequences(built: Built) -> None:
    said = run(sys.executable, TESTS / "emulated_sequences.py", built.extension, "0", "120")
    assert "120 passed, 0 failed" in said


def test_every_bias_of_sequences(built: Built) -> None:
    run_tests(built, "test_cuda_sequences.py", skipped=1)


def test_pages(built: Built) -> None:
    run_tests(built, "test_cuda_pages.py", skipped=1)


def test_decoding(built: Built) -> None:
    run_tests(built, "test_cuda_decoding.py")


def test_parts_of_a_batch(built: Built) -> None:
    run_tests(built, "test_cuda_parts.py")


def test_masks_of_one_row(built: Built) -> None:
    run_tests(built, "test_cuda_one_mask_row.py")


def test_a_bias_that_stays_in_shared_memory(built: Built) -> None:
    run_tests(built, "test_cuda_held_bias.py")


def test_dropout(built: Built) -> None:
    run_tests(built, "test_cuda_dropout.py")


def test_interval_masks(built: Built) -> None:
    said = run(sys.executable, TESTS / "interval_calls.py", built.extension, "0", "60")
    assert "60 passed, 0 failed" in said


def test_making_masks(built: Built) -> None:
    run_tests(built, "test_cuda_pack.py", skipped=2)


def test_key_blocks_of_whole_groups(built: Built) -> None:
    run_tests(built, "test_cuda_backward.py", "-k", "key_blocks_of_whole_groups and 64")


def test_a_gradient_that_clusters_sum(built: Built) -> None:
    """Of four blocks, whose works are handed out one after the other, in any order and in a fixed one."""
    run_tests(built, "test_cuda_backward.py", "-k", "what_clusters_are_asked_for")


def test_calls_by_hand(built: Built) -> None:
    run_tests(built, "test_cuda_arguments.py")


COUNT_CLUSTERS = """
import ctypes, sys, torch
count_clusters = ctypes.CDLL(sys.argv[1]).emulation_count_clusters
for cluster in (-1, 0, 1, 2, 8, 9, 16):
    found = ctypes.c_int(-1)
    print(cluster, count_clusters(cluster, ctypes.byref(found)), found.value)
"""


def test_counting_clusters_of_a_size_that_no_gpu_has(built: Built) -> None:
    """cudaErrorInvalidValue, 1, is the answer, not what lies behind the counts that are remembered."""
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


def test_a_gradient_inside_of_a_larger_tensor(built: Built) -> None:
    """All but the head dims that are not built here."""
    run_tests(built, "test_cuda_dbias_out.py", skipped=16)


def test_groups_first_and_then_heads(built: Built) -> None:
    """Works of whole groups, and of heads of which several add to dk and dv."""
    run_tests(built, "test_cuda_backward.py", "-k", "groups_first and (64 or two_tiles)")


def test_long_walks(built: Built) -> None:
    """In steps of 80 queries, whose dq is turned."""
    run_tests(built, "test_cuda_backward.py", "-k", "long_walks and 129")


def test_what_random_calls_reach_rarely(built: Built) -> None:
    run_tests(built, "test_cuda_rare.py")


def test_calls_that_nothing_watches(built: Built) -> None:
    """The passes that are ready for a class of calls, bit for bit as the operators."""
    run_tests(built, "test_plans.py", "-k", "bits and cuda", skipped=2)


def test_what_the_emulation_notices(built: Built) -> None:
    said = run(built.mistakes)
    found = {
        name: (int(right), error) for name, right, error in re.findall(r"(.*): (\d+) of 40 runs right; (.*)", said)
    }
    assert found.pop("none") == (40, "")
    assert len(found) == 9 and all(right < 40 for right, _ in found.values()), said
    for name, message in (
        ("never gives back", "no thread can go on"),
        ("lanes part", "a lane is at __ballot_sync while others of its warp are at __syncwarp"),
        ("never fences", "an accumulator that was waited for without wgmma_fence_operand"),
        ("leaves shared memory", "shared memory ends before address"),
        ("starts too early", "a thread does not wait for the kernel before"),
    ):
        assert found[name][0] == 0 and message in found[name][1], said
