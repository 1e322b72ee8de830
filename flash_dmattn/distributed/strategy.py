"""Which strategy a call takes, and why: keys are gathered, or heads traded for positions."""

from __future__ import annotations

from typing import Literal

Strategy = Literal["auto", "gather", "ulysses"]
STRATEGIES = ("auto", "gather", "ulysses")


def strategy_of(
    asked: str, num_heads: int, num_heads_k: int, size: int, has_rows: bool, share: float
) -> tuple[str, str]:
    """("gather" or "ulysses", why); W is the number of ranks there.

    Args:
        asked: `strategy` as it was given.
        num_heads, num_heads_k: of the whole call.
        size: number of ranks.
        has_rows: whether a mask or bias has rows of its own for each rank.
        share: of all keys, which gather would move.

    Raises:
        ValueError: there is no such strategy, or it cannot serve the call.
    """
    if asked not in STRATEGIES:
        raise ValueError(f"strategy is {asked!r}; it needs to be one of {', '.join(map(repr, STRATEGIES))}")
    if asked == "ulysses":
        if has_rows:
            raise ValueError(
                "strategy is 'ulysses', and a mask or bias has rows of this rank, which would have to move with the "
                "queries; strategy='gather' leaves them where they are"
            )
        check_heads(num_heads, num_heads_k, size)
    if asked != "auto":
        return asked, "it was asked for"
    if has_rows:
        return "gather", "a mask or bias has rows of this rank, which stay where they are"
    if not _heads_divide(num_heads, num_heads_k, size):
        return "gather", "the ranks do not divide the heads, as ulysses needs"
    # Gather moves 1.5 W / (G + 1) times the bytes of Ulysses, or a share of that.
    even = (num_heads // num_heads_k + 1) / 1.5
    if size * share > even:
        return "ulysses", "it sends less than gather: W > (Hq / Hk + 1) / 1.5"
    if size > even:
        return "gather", "ranks read so few keys of others that it sends less than ulysses"
    return "gather", "ulysses would send no less: W <= (Hq / Hk + 1) / 1.5"


def _heads_divide(num_heads: int, num_heads_k: int, size: int) -> bool:
    return num_heads % size == 0 and (num_heads_k % size == 0 or size % num_heads_k == 0)


def check_heads(num_heads: int, num_heads_k: int, size: int) -> None:
    """Refuse heads that `size` ranks cannot trade for positions.

    Raises:
        ValueError: they do not divide.
    """
    if not _heads_divide(num_heads, num_heads_k, size):
        raise ValueError(
            f"q has {num_heads} heads on {num_heads_k} key-value heads, and {size} ranks trade them; it needs heads of "
            "q that are a multiple of the ranks, and key-value heads that divide them or are divided by them: "
            "strategy='gather' over one dim needs nothing of the kind"
        )
