"""Tools for people on top of the library: the command line, info and calibrate."""

import io
import os
import sys
from collections.abc import Callable

PROGRAM = "python -m flash_dmattn"


def require_torch(command: str) -> None:
    """Leave with one line and status 1 where torch cannot be imported."""
    try:
        import torch  # noqa: F401
    except (ImportError, OSError) as error:
        sys.exit(f"{PROGRAM} {command}: error: torch cannot be imported: {error}")


def run_piped(main: Callable[[], int]) -> int:
    """Return the exit status of `main`; 1 if the reader of its output, such as `head`, has ended before."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # a notebook has another
        # A damaged profile or a variable may have characters that stdout cannot encode.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        status = main()
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        # Python flushes stdout once more at its end, and would complain there.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
