"""Tools of the command line: info and calibrate."""

import io
import os
import sys
from collections.abc import Callable

PROGRAM = "python -m flash_dmattn"


def require_torch(command: str) -> None:
    """Exit with one line and status 1 if torch cannot be imported."""
    try:
        import torch  # noqa: F401
    except (ImportError, OSError) as error:
        sys.exit(f"{PROGRAM} {command}: error: torch cannot be imported: {error}")


def run_piped(main: Callable[[], int]) -> int:
    """Return the exit status of `main`; 1 if the program that reads its output, such as `head`, has ended before."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # notebooks have another class
        # A damaged profile or a variable may have characters that stdout cannot encode.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        status = main()
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        # Python flushes stdout again at exit, and would report the error there.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
