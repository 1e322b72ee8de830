"""A bounded cache whose hits are cheap."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class Remembered(Generic[T]):
    """Cache up to `most` values by key, and evict by second chance (the clock algorithm).

    A hit only sets a mark on the entry. To make room, the oldest entry is evicted if it has no mark; if it has one, it
    loses the mark and becomes the newest. So keys in use outlast any number of keys that are used once. A true LRU
    would hash the key again at each hit, and keys here have about sixty numbers.

    It is thread-safe. A thread that looks up a key while another one evicts may miss an entry, and makes its value
    again.

    Args:
        most: the most values, at least 1.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._entries: dict[Hashable, tuple[T, list[bool]]] = {}
        self._lock = threading.Lock()

    def get(self, key: Hashable) -> T | None:
        entry = self._entries.get(key)
        if entry is None:
            return None
        entry[1][0] = True
        return entry[0]

    def keep(self, key: Hashable, value: T) -> T:
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
        """Return the value of a key; make and store it if there is none."""
        value = self.get(key)
        return self.keep(key, make()) if value is None else value

    def clear(self) -> None:
        with self._lock:
            self._entries.clear()

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Hashable]:
        return iter(tuple(self._entries))

    def __contains__(self, key: Hashable) -> bool:
        return key in self._entries
