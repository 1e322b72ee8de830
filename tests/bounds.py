"""Hold the compiled form of every Triton kernel against its memory, without a GPU: `python tests/bounds.py --help`.

    python tests/bounds.py                              # every form for three GPUs, and other sizes of its call
    python tests/bounds.py --arch sm_90 --dtype bf16 --sizes catalogue
    python tests/bounds.py --words forward 256          # forms with these words in their description
    python tests/bounds.py --faults                     # plant faults in kernels, and see whether each is noticed
    python tests/bounds.py --out tests/results/bounds.json    # then `python tests/reliability.py` writes the page

Three questions about each launch: does an access leave its tensor, does a number that an address depends on leave its
32 or 64 bits, and do two programs store to one place? `bounds_walk.py` turns the compiled form into terms,
`bounds_contracts.py` says what the launch and its tables hold, `bounds_solve.py` and
`bounds_places.py` decide. Sizes and strides have the
numbers of the launch. Programs, loops, lanes and values of tables are symbols, so that an answer is for all of them.

Needs z3-solver. Exit status: 1 where there is a fault.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from bounds_contracts import Arguments, Contracts  # noqa: E402
from bounds_places import Held, conflict  # noqa: E402
from bounds_solve import PROVED, Checker, Solver, Verdict  # noqa: E402
from bounds_terms import forget  # noqa: E402
from bounds_walk import walked  # noqa: E402
from compiled_catalogue import ARCHS, DTYPES, SEQUENCES, Entry, catalogue  # noqa: E402
from compiled_triton import Job, SequenceVariant, Variant, jobs_of  # noqa: E402
from compiled_variants import SEQUENCE_VARIANTS, VARIANTS  # noqa: E402
from reliability import BOUNDS as QUESTIONS  # noqa: E402
from reliability import bounds_of  # noqa: E402

from benchmarks.machine import commit_of  # noqa: E402

WORDS = ("fault", "undecided", "sampled", "proved")  # the worst first
ARCHS_CHECKED = ("sm_80", "sm_90", "sm_100")
GREAT = 2**31


def three_less(variant: Variant) -> Variant:
    """Lengths that no block divides."""
    q, k = (n - 3 if n > 8 else n for n in (variant.seqlen_q, variant.seqlen_k))
    return replace(variant, seqlen_q=q, seqlen_k=k)


def many(variant: Variant) -> Variant:
    """So many entries that q, or k, has more than 2^31 elements."""
    entry = max(variant.seqlen_q * variant.num_heads, variant.seqlen_k * variant.num_heads_k) * variant.head_dim
    return replace(variant, batch=GREAT // entry + 2)


def long(variant: Variant) -> Variant:
    """So long that one entry has more than 2^31 elements; not where a bias or a bool has a value for each pair."""
    has_pairs = {"Lq", "Lk"} <= set(variant.bias or ()) or variant.mask == "dense"
    if has_pairs or variant.seqlen_q < 1024 or variant.seqlen_k < 1024:
        return variant
    length = GREAT // (variant.num_heads_k * variant.head_dim) + 5
    return replace(variant, batch=1, seqlen_q=length, seqlen_k=length)


SIZES: dict[str, Callable[[Variant], Variant]] = {"three less": three_less, "many": many, "long": long}


class Found(NamedTuple):
    """The result of one launch: a verdict on each question, the number of accesses, and of those nothing reaches."""

    label: str
    name: str
    key: str
    verdicts: dict[str, Verdict]
    accesses: int
    unreached: int
    seconds: float

    @property
    def lines(self) -> list[str]:
        return [f"{self.label}: {word.word}, {word.why}" for word in self.verdicts.values() if word.word != "proved"]


def worst(verdicts: Sequence[Verdict]) -> Verdict:
    return min(verdicts, key=lambda verdict: WORDS.index(verdict.word), default=PROVED)


def asked(job: Job, label: str = "", questions: Sequence[str] = QUESTIONS) -> Found:
    """Answer the three questions about a launch, or some of them."""
    started = time.monotonic()
    key = hashlib.sha256(job.key.encode()).hexdigest()[:16]
    try:
        verdicts, accesses, unreached = answers(job, questions)
    except Exception as why:  # a form that the walk cannot read is open, and others go on
        open_ = {question: Verdict("undecided", f"{question}: {why or 'the walk ends'}") for question in questions}
        verdicts, accesses, unreached = open_, 0, 0
    return Found(label or job.name, job.name, key, verdicts, accesses, unreached, time.monotonic() - started)


def answers(job: Job, questions: Sequence[str]) -> tuple[dict[str, Verdict], int, int]:
    """The verdicts on a launch, how many accesses it has, and how many of them nothing reaches."""
    forget()
    arguments = Arguments(job)
    contracts = Contracts(job, arguments)
    solver = Solver(contracts.facts)
    walk = walked(job.ttir(), arguments.values, arguments.programs, contracts.load, solver.prove)
    checker = Checker(solver, arguments.sizes, lambda x: x.name in contracts.of)

    def two_programs() -> Verdict:
        verdict, is_complete = conflict(walk.accesses, arguments.programs, Held(contracts.contents(0), walk.repeats))
        is_sample = verdict.word == "proved" and not is_complete
        return Verdict("sampled", "two programs: of some programs") if is_sample else verdict

    ask: dict[str, Callable[[], Verdict]] = {
        "outside": lambda: worst([checker.in_bounds(access) for access in walk.accesses]),
        "wraps": lambda: worst([checker.no_wrap(access) for access in walk.accesses]),
        "two programs": two_programs,
    }
    verdicts = {question: ask[question]() for question in questions}
    unreached = sum(not checker.is_reached(access) for access in walk.accesses)
    return verdicts, len(walk.accesses), unreached


Work = Callable[[], list[Entry]]  # launches, which a worker plans


def works(archs: Sequence[str], dtypes: Sequence[str], sizes: Sequence[str], words: Sequence[str]) -> list[Work]:
    """The catalogue of compiled kernels, and the launches of its calls at other sizes, bfloat16 on sm_90."""
    listed: list[Work] = []
    if "catalogue" in sizes:
        listed = [partial(list[Entry], [entry]) for entry in catalogue(archs, dtypes, words)]
    if "bf16" not in dtypes or "sm_90" not in archs:
        return listed
    calls = [(name, Variant(**fields)) for name, fields in VARIANTS.items()]
    for size in sizes:
        own = list(calls)
        if size == "three less":
            own += [(f"{SEQUENCES}{name}", SequenceVariant(**fields)) for name, fields in SEQUENCE_VARIANTS.items()]
        if size in SIZES:
            listed += [partial(resized, name, variant, size, words) for name, variant in own]
    return listed


def resized(name: str, variant: Variant, size: str, words: Sequence[str]) -> list[Entry]:
    """The launches of a call at another size, each once; none where it has that size."""
    other = SIZES[size](variant)
    jobs = {} if other == variant else {job.key: job for job in jobs_of(other, "sm_90")}
    dtype = "fp32" if variant.dtype.itemsize == 4 else "bf16"
    entries = [Entry(dtype, f"{name}, {size}", variant.head_dim, job) for job in jobs.values()]
    return [entry for entry in entries if all(word in entry.label for word in words)]


_works: list[Work] = []  # for the workers, which are forked


def _asked(index: int) -> list[Found]:
    return [asked(entry.job, entry.label) for entry in _works[index]()]


def ask_all(listed: Sequence[Work], workers: int) -> list[Found]:
    """Ask about all launches in several processes, and print what is not proved."""
    _works[:] = listed
    results: list[Found] = []
    started = time.monotonic()
    with ProcessPoolExecutor(workers, get_context("fork")) as pool:
        pending = [pool.submit(_asked, index) for index in range(len(_works))]
        for number, done in enumerate(as_completed(pending), 1):
            results += done.result()
            lines = [line for result in done.result() for line in result.lines]
            if lines or number % 25 == 0:
                left = (time.monotonic() - started) / number * (len(pending) - number)
                print(f"[{number}/{len(pending)}, {left:.0f} s left]", *lines, sep="\n", flush=True)
    return results


def summed(results: Sequence[Found]) -> dict[str, Any]:
    """For each kernel its forms and launches, and of each question how many forms have which verdict; and reasons."""
    kernels: dict[str, Any] = {}
    for name in sorted({result.name for result in results}):
        own = [result for result in results if result.name == name]
        forms = {result.key for result in own}
        row: dict[str, Any] = {"forms": len(forms), "launches": len(own)}
        for question in (*QUESTIONS, "all"):
            asked = QUESTIONS if question == "all" else (question,)
            by_form = {key: worst([r.verdicts[q] for r in own if r.key == key for q in asked]).word for key in forms}
            row[question] = dict(Counter(by_form.values()))
        reasons = {verdict.why for result in own for verdict in result.verdicts.values() if verdict.word == "undecided"}
        row["reasons"] = sorted(reasons)
        row["faults"] = sorted(line for result in own for line in result.lines if ": fault, " in line)
        row["accesses"], row["unreached"] = (sum(r[i] for r in own) for i in (4, 5))
        kernels[name] = row
    return kernels


def plant_all() -> int:
    """Plant each fault, and tell which stay unnoticed."""
    from bounds_faults import PLANTED, jobs_with, planted

    left = 0
    for fault in PLANTED:
        with planted(fault):
            verdict = asked(jobs_with(fault)[0], questions=(fault.question,)).verdicts[fault.question]
        left += verdict.word != "fault"
        print(f"{fault.kernel}, {fault.what}: {verdict.word}, {verdict.why}", flush=True)
    print(f"{len(PLANTED)} faults, {left} not noticed")
    return int(left > 0)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", nargs="+", choices=ARCHS, default=ARCHS_CHECKED)
    parser.add_argument("--dtype", nargs="+", choices=tuple(DTYPES), default=tuple(DTYPES))
    parser.add_argument("--sizes", nargs="+", choices=("catalogue", *SIZES), default=("catalogue", *SIZES))
    parser.add_argument("--words", nargs="+", default=(), help="only forms with all of these in their description")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--faults", action="store_true", help="plant faults in kernels instead")
    parser.add_argument("--out", type=Path, help="a file for the counts, JSON")
    options = parser.parse_args(argv)
    if options.faults:
        return plant_all()
    results = ask_all(works(options.arch, options.dtype, options.sizes, options.words), options.jobs)
    if not results:
        parser.error("no form has all of these words in its description")
    kernels = summed(results)
    print("\n".join(["", *bounds_of(kernels), ""]))
    for row in kernels.values():
        print(*row["faults"], sep="\n", end="\n" if row["faults"] else "")
    if options.out is not None:
        options.out.write_text(json.dumps({"commit": commit_of(ROOT), "kernels": kernels}, indent=1) + "\n")
    faults = sum(len(row["faults"]) for row in kernels.values())
    print(f"{len(results)} launches, {sum(result.seconds for result in results):.0f} s, {faults} faults")
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
