"""The subcommands of `python -m flash_dmattn`, one module each; none needs torch to be imported."""

import sys

PROGRAM = "python -m flash_dmattn"


def require_torch(command: str) -> None:
    """Leave with one line and status 1 where torch cannot be imported."""
    try:
        import torch  # noqa: F401
    except (ImportError, OSError) as error:
        sys.exit(f"{PROGRAM} {command}: error: torch cannot be imported: {error}")
