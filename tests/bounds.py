"""Show."""

from __future__ import annotations

import collections
import os
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from bounds_contracts import Arguments, Contracts  # noqa: E402
from bounds_solve import Checker, Held, Solver, Verdict, conflict  # noqa: E402
from bounds_terms import forget  # noqa: E402
from bounds_walk import NotFollowed, walked  # noqa: E402
from compiled_triton import Job  # noqa: E402


def check(job, text=None):
    forget()
    arguments = Arguments(job)
    contracts = Contracts(job, arguments)
    solver = Solver(contracts.facts)
    try:
        walk = walked(text or job.ttir(), arguments.values, arguments.programs, contracts.load, solver.prove)
    except NotFollowed as why:
        return [("walk", "", Verdict("undecided", str(why)))]
    checker = Checker(solver, arguments.sizes, lambda x: x.name in contracts.of)
    rows = []
    for access in walk.accesses:
        rows.append(("bounds", access, checker.in_bounds(access)))
        rows.append(("wraps", access, checker.no_wrap(access)))
        if not checker.is_reached(access):
            rows.append(("reached", access, Verdict("undecided", "never reached")))
    verdict, complete = conflict(walk.accesses, arguments.programs, Held(contracts.contents(0), walk.repeats))
    rows.append(("races", complete, verdict))
    return rows
