"""Run a script and end its process at once: `python tests/run_and_exit.py SCRIPT ARGUMENTS`.

A thread of gloo that outlives the interpreter may abort a process that has done all it had to (pytorch/pytorch#179291).
"""

from __future__ import annotations

import os
import runpy
import sys
import traceback

if __name__ == "__main__":
    sys.argv = sys.argv[1:]
    status = 0
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if status:
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
