"""Faults of the build and of loading what it made, seen without compiling anything."""

from __future__ import annotations

from .fault import Fault

_EXTENSION = "tests/test_cuda_extension.py::"

FAULTS: tuple[Fault, ...] = (
    Fault(
        "a pure wheel tells of the machine that built it",
        "setup.py",
        "bool(self.reason if self.editable_mode else self.output)",
        "bool(self.reason)",
        ("tests/test_packaging.py::test_a_wheel_that_nobody_tried_to_build_it_for_says_nothing_of_the_machine",),
    ),
    Fault(
        "a kernel whose matrix products are serialized is built all the same",
        "setup.py",
        "serialized = [kernel.name for kernel in kernels if kernel.is_serialized]",
        "serialized: list[str] = []",
        (f"{_EXTENSION}test_serialized_products_warn_and_stop_force",),
    ),
    Fault(
        "MAX_JOBS=0 is passed on to ninja, which takes it as no limit",
        "csrc/build_cuda.py",
        "if not wish.isdecimal() or int(wish) == 0:",
        "if not wish.isdecimal():",
        (f"{_EXTENSION}test_max_jobs_must_be_a_number",),
    ),
    Fault(
        "no job at all where memory is short",
        "csrc/build_cuda.py",
        "return max(1, min(len(os.sched_getaffinity(0)), memory // (GIB_PER_JOB << 30)))",
        "return min(len(os.sched_getaffinity(0)), memory // (GIB_PER_JOB << 30))",
        (f"{_EXTENSION}test_jobs_by_cores_and_memory",),
    ),
    Fault(
        "a head dim that does not exist is dropped in silence",
        "csrc/build_cuda.py",
        "if not named <= set(known):",
        "if not named & set(known):",
        (f"{_EXTENSION}test_unknown_head_dim_is_a_sentence",),
    ),
    Fault(
        "a call of head dims 192 and 128 takes the instance of 192",
        "csrc/build_cuda.py",
        "(192, 128), (192, 192), (256, 256))\nWIDE",
        "(192, 192), (192, 128), (256, 256))\nWIDE",
        (f"{_EXTENSION}test_first_unit_that_holds_a_call_is_the_smallest",),
    ),
    Fault(
        "spills that are only loaded are not counted",
        "csrc/build_cuda.py",
        "int(stores) + int(loads)",
        "int(stores)",
        (f"{_EXTENSION}test_ptxas_report",),
    ),
    Fault(
        "a nightly torch of the oldest release is refused",
        "flash_dmattn/backends/cuda/extension.py",
        'if Version(torch.__version__).release < Version(info["torch_target"]).release:',
        'if Version(torch.__version__) < Version(info["torch_target"]):',
        (f"{_EXTENSION}test_every_torch_from_the_target_fits",),
    ),
    Fault(
        "an extension of another version is loaded",
        "flash_dmattn/backends/cuda/extension.py",
        'if info["version"] != __version__:',
        "if False:",
        (f"{_EXTENSION}test_mismatch_is_a_sentence",),
    ),
    Fault(
        "FLASH_DMATTN_BUILD_CUDA=auto fails where nvcc is missing",
        "csrc/build_cuda.py",
        'if missing and wish == "force":',
        "if missing:",
        ("tests/test_packaging.py::test_what_a_build_lacks_is_said_before_it_starts",),
    ),
)
