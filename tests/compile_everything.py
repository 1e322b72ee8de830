"""Compile every Triton kernel for every GPU it is meant for, without one: `python tests/compile_everything.py --help`.

    python tests/compile_everything.py                          # all of it: some 4000 kernels, hours on two cores
    python tests/compile_everything.py --arch sm_86 --dtype bf16
    python tests/compile_everything.py --words forward 256      # kernels with these words in their description
    python tests/compile_everything.py --sample 3               # what a push compiles, and other samples

A line a kernel tells how far it is; the table at the end has, for each GPU, dtype and kernel, the most that one takes.
Triton keeps what it has compiled, so the same command goes on where the last one stopped. Exit status: 0; 1 where a
kernel does not compile, does not fit the GPU's shared memory, or spills more than its bound.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from compiled_catalogue import ARCHS, DTYPES, Entry, Result, catalogue, compiled, sample, table  # noqa: E402

_entries: list[Entry] = []  # for the workers, which are forked: a kernel cannot be sent to another process


def _compile(index: int) -> Result:
    return compiled(_entries[index])


def compile_all(entries: Sequence[Entry], workers: int) -> list[Result]:
    """Compile them in several processes, the slow ones first, and say of each what it takes."""
    _entries[:] = sorted(entries, key=lambda entry: entry.dtype == "fp32", reverse=True)
    results: list[Result] = []
    started = time.monotonic()
    with ProcessPoolExecutor(workers, get_context("fork")) as pool:
        for done in as_completed([pool.submit(_compile, index) for index in range(len(_entries))]):
            results.append(done.result())
            seconds = time.monotonic() - started
            left = seconds / len(results) * (len(_entries) - len(results))
            print(f"[{len(results)}/{len(_entries)}, {left:.0f} s left] {results[-1].line}", flush=True)
    return results


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Compile every Triton kernel for every GPU it is meant for.")
    parser.add_argument("--arch", nargs="+", choices=ARCHS, default=ARCHS)
    parser.add_argument("--dtype", nargs="+", choices=tuple(DTYPES), default=tuple(DTYPES))
    parser.add_argument("--words", nargs="+", default=(), help="only kernels with all of these in their description")
    parser.add_argument("--sample", type=int, metavar="N", help="only the N-th sample: each kernel once on each GPU")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    options = parser.parse_args(argv)
    entries = catalogue(options.arch, options.dtype, options.words)
    if options.sample is not None:
        entries = sample(entries, options.sample)
    if not entries:
        parser.error("no kernel has all of these words in its description")
    results = compile_all(entries, options.jobs)
    print(f"\n{table(results)}")
    wrong = [result for result in results if result.problems]
    print("\n".join(["", *(result.line for result in wrong), f"{len(results)} kernels, {len(wrong)} out of bounds"]))
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
