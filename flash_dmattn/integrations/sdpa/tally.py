"""`Tally`: how many calls were served, and how many went on to torch for which reason."""

from __future__ import annotations

import threading
from collections import Counter

import torch


class Tally:
    """What became of the calls of F.scaled_dot_product_attention in one `with`; prints as a table.

    Attributes:
        served: how many `flash_dmattn.attention` computed.
        passed_on: how many torch computed, by reason, the most frequent first in print.

    Calls in compiled code are not counted: counting would be a side effect of the graph.

    >>> tally = Tally()
    >>> tally.count(None)
    >>> tally.count("no mask")
    >>> print(tally)
    F.scaled_dot_product_attention  calls
    flash_dmattn                        1
    torch: no mask                      1
    """

    def __init__(self) -> None:
        self.served = 0
        self.passed_on: Counter[str] = Counter()
        self._lock = threading.Lock()  # backward passes that recompute have threads of their own

    def count(self, reason: str | None) -> None:
        """Count one call; `reason` is why torch computes it, None where it does not."""
        if torch.compiler.is_compiling():
            return
        with self._lock:
            if reason is None:
                self.served += 1
            else:
                self.passed_on[reason] += 1

    def __str__(self) -> str:
        rows = [("F.scaled_dot_product_attention", "calls"), ("flash_dmattn", str(self.served))]
        rows += [(f"torch: {reason}", str(calls)) for reason, calls in self.passed_on.most_common()]
        left, right = (max(len(row[column]) for row in rows) for column in (0, 1))
        return "\n".join(f"{name:<{left}}  {calls:>{right}}" for name, calls in rows)

    __repr__ = __str__
