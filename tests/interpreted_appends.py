"""Run the kernel that writes to caches in Triton's interpreter: `python interpreted_appends.py <first> <writes>`."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator

import interpreted_triton  # noqa: F401 (which has Triton interpret)
from cache_write_calls import assert_written, draw
from outcomes import report
from quick_interpreter import make_quick

from flash_dmattn.triton_kernels import append


def outcomes(first: int, count: int) -> Iterator[str | None]:
    """What came of each write, every third of wrong tables: None, or why it failed."""
    for number in range(first, first + count):
        call = draw(number, number % 3 == 2)
        if call.write.is_empty:
            continue
        try:
            assert_written(call, append.write)
            yield None
        except Exception:  # the other writes still count
            yield f"{call.told}\n{traceback.format_exc(limit=-3)}"[:3000]


if __name__ == "__main__":
    make_quick()
    sys.exit(report(outcomes(int(sys.argv[1]), int(sys.argv[2]))))
