"""`python -m benchmarks`."""

from __future__ import annotations

import os
import sys

# The profiler, by which memory is counted on a CPU, reports its starts and stops on stderr unless told before torch is
# imported.
os.environ.setdefault("KINETO_LOG_LEVEL", "6")

from flash_dmattn.tools import run_piped

from .cli import main

if __name__ == "__main__":
    sys.exit(run_piped(main))
