"""Bounded caches: of values by key, and of values computed from tensors."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, Generic, TypeVar

from torch import Tensor

from .definition import is_transformed
from .problem import counts_changes

T = TypeVar("T")


class ClockCache(Generic[T]):
    """Cache up to `max_size` values by key, and evict by second chance (the clock algorithm).

    A hit only sets a mark on the entry. To make room, the oldest entry is evicted if it has no mark; if it has one, it
    loses the mark and becomes the newest. So keys in use outlast any number of keys that are used once. A true LRU
    would hash the key again at each hit, which is slow: keys have about sixty fields here.

    It is thread-safe. A thread that looks up a key while another thread evicts may miss an entry, and computes its
    value again.

    Args:
        max_size: the largest number of values, at least 1.
    """

    def __init__(self, max_size: int) -> None:
        self.max_size = max_size
        self._entries: dict[Hashable, tuple[T, list[bool]]] = {}
        self._lock = threading.Lock()

    def get(self, key: Hashable) -> T | None:
        entry = self._entries.get(key)
        if entry is None:
            return None
        entry[1][0] = True
        return entry[0]

    def put(self, key: Hashable, value: T) -> T:
        with self._lock:
            entries = self._entries
            entries.pop(key, None)
            while len(entries) >= self.max_size:
                oldest = next(iter(entries))
                entry = entries.pop(oldest)
                if entry[1][0]:
                    entry[1][0] = False
                    entries[oldest] = entry
            entries[key] = (value, [False])
        return value

    def get_or_make(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return the value of a key; make and store it if there is none."""
        value = self.get(key)
        return self.put(key, make()) if value is None else value

    def clear(self) -> None:
        with self._lock:
            self._entries.clear()

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Hashable]:
        return iter(tuple(self._entries))

    def __contains__(self, key: Hashable) -> bool:
        return key in self._entries


class TensorCache:
    """Cache of values computed from tensors: each is kept while its tensors live, and computed again if they change.

    A value is not kept if torch does not count the changes of a tensor, or under a transform of `torch.func`, because
    tensors end with the transform. The oldest values are evicted if there are more than `max_size`, because a loop over
    slices of one tensor would fill memory.
    """

    def __init__(self, max_size: int = 64) -> None:
        self.max_size = max_size
        self._entries: dict[object, tuple[object, Any, list[weakref.ref[Tensor]]]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: object, tensors: Sequence[Tensor], make: Callable[[], Any]) -> Any:
        """Return the result of `make`, which computes it from these tensors; `key` contains their ids."""
        if is_transformed() or not all(map(counts_changes, tensors)):
            return make()
        version = [x._version for x in tensors]
        entry = self._entries.get(key)
        if entry is None or entry[0] != version:
            refs = [weakref.ref(x, lambda _: self._entries.pop(key, None)) for x in tensors]
            value = make()
            # No lock: a tensor may be freed, and remove its entry, in the middle of any line here.
            for oldest in list(self._entries)[: max(0, len(self._entries) + 1 - self.max_size)]:
                self._entries.pop(oldest, None)
            entry = self._entries[key] = version, value, refs
        return entry[1]
