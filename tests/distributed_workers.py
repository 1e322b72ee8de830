"""Processes of a gloo group on this machine, started once for all tests, which run functions on every rank at once."""

from __future__ import annotations

import atexit
import importlib
import os
import subprocess
import sys
import tempfile
import time
import traceback
from functools import lru_cache
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parent
SECONDS = 120  # a call that takes longer hangs
SECONDS_LEFT = 10  # for the others, once a rank has failed


def torchrun(ranks: int, *arguments: str) -> str:
    """Run a program of this repository on so many ranks, without a GPU, and return what it prints."""
    environment = {**os.environ, "PYTHONPATH": str(TESTS.parent), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(ranks),
        *arguments,
    ]
    done = subprocess.run(command, cwd=TESTS.parent, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


class WorkerError(AssertionError):
    """A rank raised, or did not answer; the message has the traceback."""


class Workers:
    """`size` processes, each a rank of a gloo group, one thread each."""

    def __init__(self, size: int) -> None:
        self.size = size
        context = get_context("spawn")
        place = tempfile.mkdtemp()
        self._ends: list[Connection] = []
        self._processes: list[BaseProcess] = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            arguments = (rank, size, f"file://{place}/store", theirs, [str(TESTS.parent), str(TESTS)])
            process = context.Process(target=serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._ends.append(ours)
            self._processes.append(process)
        atexit.register(self.stop)

    def run(self, function: str, *arguments: Any) -> list[Any]:
        """Run "module.function" on each rank, and return its results.

        Raises:
            WorkerError: a rank raised, or did not answer in time; then all of them are stopped.
        """
        for end in self._ends:
            end.send((function, arguments))
        answers: dict[int, tuple[bool, Any]] = {}
        deadline = time.monotonic() + SECONDS
        while len(answers) < self.size:
            waiting = [end for rank, end in enumerate(self._ends) if rank not in answers]
            ready = wait(waiting, max(0.0, deadline - time.monotonic()))
            for end in ready:
                rank = self._ends.index(end)  # type: ignore[arg-type]
                try:
                    answers[rank] = end.recv()  # type: ignore[union-attr]
                except EOFError:
                    answers[rank] = (True, "the process has ended")
            if not ready:
                answers |= {r: (True, "no answer in time") for r in range(self.size) if r not in answers}
                self.stop()
                workers.cache_clear()
            elif any(failed for failed, _ in answers.values()):  # the others may be waiting for it
                deadline = min(deadline, time.monotonic() + SECONDS_LEFT)
        if any(failed for failed, _ in answers.values()):
            lines = (f"rank {rank} of {self.size}: {answers[rank][1]}" for rank in range(self.size))
            raise WorkerError(f"{function}\n" + "\n".join(lines))
        return [answers[rank][1] for rank in range(self.size)]

    def stop(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()


@lru_cache
def workers(size: int) -> Workers:
    """The workers of that size, the same ones for every test of the process."""
    return Workers(size)


def serve(rank: int, size: int, store: str, end: Connection, path: list[str]) -> None:
    """Run in a worker what it is sent, until it is stopped."""
    os.environ["OMP_NUM_THREADS"] = "1"
    sys.path[:0] = path
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size)
    while True:
        try:
            function, arguments = end.recv()
        except EOFError:
            return
        module, _, name = function.rpartition(".")
        try:
            end.send((False, getattr(importlib.import_module(module), name)(*arguments)))
        except Exception:
            end.send((True, traceback.format_exc()))
