"""A bounded table of values that were made once for a key, and that are cheap to ask for."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class Remembered(Generic[T]):
    """Keep `most` values by key; one more replaces a value that was not asked for lately.

    The oldest value goes, unless it was asked for since it came, or since it was last spared: then it is spared, and is
    the newest from now on. So keys in use outlast any number of keys that come once. A hit leaves a mark and no more.
    An exact order of use would hash the key a second time, and keys here have some sixty numbers.

    Threads may use a table at once. A thread that asks while another one makes room may miss a value and make it anew.

    Args:
        most: how many values it holds, 1 at least.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._entries: dict[Hashable, tuple[T, list[bool]]] = {}
        self._lock = threading.Lock()

    def get(self, key: Hashable) -> T | None:
        """Return the value of a key, None where there is none."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        entry[1][0] = True
        return entry[0]

    def keep(self, key: Hashable, value: T) -> T:
        """Remember a value, in the place of an older one of its key; return it."""
        with self._lock:
            entries = self._entries
            entries.pop(key, None)
            while len(entries) >= self.most:
                oldest = next(iter(entries))
                entry = entries.pop(oldest)
                if entry[1][0]:
                    entry[1][0] = False
                    entries[oldest] = entry
            entries[key] = (value, [False])
        return value

    def find(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return the value of a key; make and remember it where there is none."""
        value = self.get(key)
        return self.keep(key, make()) if value is None else value

    def clear(self) -> None:
        """Forget all."""
        with self._lock:
            self._entries.clear()

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Hashable]:
        return iter(tuple(self._entries))

    def __contains__(self, key: Hashable) -> bool:
        return key in self._entries
