"""Compilation ahead of a run, in several processes, whose caches on disk then serve the one process that times.

Compiling is most of a first run: Triton and Inductor need seconds to minutes for each case and system, on a core each,
while the GPU waits. Timing is done one process at a time, afterwards.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import NamedTuple

import torch

from . import forced_arch
from .cases import Case
from .inputs import make_inputs
from .progress import progress
from .suites.trial import attempt, forget, precision_of, stream_of, worded
from .systems import Mode, by_name

LEAST_JOBS = 3  # from how many on processes of their own are worth their start
MOST_WORKERS = 10  # each holds the tensors of a case


class Job(NamedTuple):
    """One case on a device, and what to compile for it: names of systems, each in some modes."""

    case: Case
    runs: tuple[tuple[str, tuple[Mode, ...]], ...]
    device: torch.device


def compile_ahead(title: str, jobs: Sequence[Job], deadline: float | None) -> None:
    """Run every job once, one for each pair of cores at a time; none begins after the deadline.

    Errors are printed and not recorded, because the timed run has them again, and records them.
    """
    workers = min(MOST_WORKERS, (os.cpu_count() or 1) // 2, len(jobs))
    if len(jobs) < LEAST_JOBS or workers < 2:
        return
    context = multiprocessing.get_context("spawn")
    with (
        progress(f"{title}: compiling in {workers} processes", len(jobs)) as bar,
        ProcessPoolExecutor(workers, context, _be_one_of_many) as pool,
    ):
        started = {pool.submit(_compile, job): job.case.name for job in jobs}
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        try:
            for done in as_completed(started, left):
                bar.case(started[done])
                problem = worded(error) if (error := done.exception()) else done.result()
                if problem:
                    bar.line(f"    {problem}")
                bar.done()
        except TimeoutError:
            bar.line("    the budget is spent")
            pool.shutdown(cancel_futures=True)


def _be_one_of_many() -> None:
    forced_arch.force_from_environment()
    torch.set_num_threads(1)
    # Inductor would start as many compilers of its own in every worker.
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"


def _compile(job: Job) -> str:
    """Run a job in a worker; return what kept it from running."""
    try:
        with stream_of(job.device), precision_of(job.case):
            inputs = make_inputs(job.case, job.device)
            for name, modes in job.runs:
                for mode in modes:
                    attempt(by_name(name), mode, job.case, inputs)
    except Exception as error:
        return worded(error)
    finally:
        forget(job.device)
    return ""
