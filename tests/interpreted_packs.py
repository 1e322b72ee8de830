"""Pack masks beside sequences in Triton's interpreter: `python interpreted_packs.py <first> <calls>`."""

from __future__ import annotations

import sys

import interpreted_triton  # noqa: F401 (which has Triton interpret)
from outcomes import report
from quick_interpreter import make_quick
from sequence_pack_calls import outcomes

if __name__ == "__main__":
    make_quick()
    first, count = (int(number) for number in sys.argv[1:])
    sys.exit(report(outcomes(range(first, first + count))))
