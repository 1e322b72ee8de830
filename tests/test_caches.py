"""The bounded table of what was made once."""

from __future__ import annotations

import threading

import pytest

from flash_dmattn.caches import ClockCache


def test_what_is_in_use_outlasts_what_comes_once() -> None:
    """A model that trains, and decodes in between: each length is a class that never comes again."""
    table: ClockCache[str] = ClockCache(8)
    for name in ("a", "b", "c"):
        table.put(name, name)
    for length in range(200):
        table.put(length, "once")
        assert table.get("a") == "a"
        assert len(table) <= 8
    assert "b" not in table and 199 in table


def test_the_one_that_was_not_asked_for_the_longest_goes() -> None:
    table: ClockCache[int] = ClockCache(3)
    for key in range(3):
        table.put(key, key)
    table.get(0)
    table.put(3, 3)
    assert sorted(table) == [0, 2, 3]  # type: ignore[type-var]
    table.put(4, 4)
    assert sorted(table) == [0, 3, 4]  # type: ignore[type-var]
    for key in (0, 3, 4):
        table.get(key)
    table.put(5, 5)  # all were asked for: the oldest goes all the same
    assert len(table) == 3 and 5 in table


def test_a_table_of_one() -> None:
    table: ClockCache[int] = ClockCache(1)
    for key in range(3):
        table.put(key, key)
        assert table.get(key) == key and len(table) == 1


def test_a_value_is_made_once_and_replaced_by_a_newer_one() -> None:
    table: ClockCache[object] = ClockCache(2)
    made = table.get_or_make("key", object)
    assert table.get_or_make("key", object) is made and table.get("other") is None
    table.put("key", "newer")
    assert table.get("key") == "newer" and len(table) == 1
    table.clear()
    assert table.get("key") is None and not len(table)


def test_what_raises_is_not_remembered() -> None:
    table: ClockCache[float] = ClockCache(2)
    with pytest.raises(ZeroDivisionError):
        table.get_or_make("key", lambda: 1 / 0)
    assert "key" not in table and table.get_or_make("key", lambda: 1.0) == 1.0


def test_every_table_is_bounded() -> None:
    """Whatever a program meets, a table holds some thousands of values."""
    from flash_dmattn import call
    from flash_dmattn.backends.flex import graph
    from flash_dmattn.dispatch import plan
    from flash_dmattn.distributed import call as parallel_call

    tables = [call.plans, plan._passes, parallel_call._pairs, graph._compiled]
    assert all(1 <= table.max_size <= 4096 for table in tables)


def test_threads_share_a_table() -> None:
    table: ClockCache[int] = ClockCache(16)
    errors: list[Exception] = []

    def use(start: int) -> None:
        try:
            for step in range(2000):
                key = (start + step) % 40
                assert table.get_or_make(key, lambda key=key: key) == key  # type: ignore[misc]
                assert len(table) <= 16
                if step % 500 == 0:
                    table.clear()
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=use, args=(start,)) for start in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
