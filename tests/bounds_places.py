"""Stores of two programs: the places of all stores of a launch, and whether two programs share one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from bounds_solve import PROVED, Verdict, name_of
from bounds_terms import Term, in_order, parts
from bounds_walk import Access, Repeat

MOST_PLACES = 1 << 22  # evaluated at once


class Unknown(Exception):
    """A term depends on what has no value here."""


class Held(NamedTuple):
    """The contents of tensors, and how loops make the numbers that they end with."""

    contents: Mapping[str, Any]
    repeats: Mapping[Term, tuple[Repeat, int]]


class Places:
    """The values of terms in a launch, as arrays: the dims are programs, then loops, then lanes."""

    def __init__(self, known: Mapping[Term, Any], held: Held) -> None:
        self.known, self.values, self.held = known, dict(known), held

    def know(self, x: Term, value: Any) -> None:
        self.known = {**self.known, x: value}
        self.values[x] = value

    def of(self, x: Term) -> Any:
        for part in reversed(in_order(x)):
            if part not in self.values:
                self.values[part] = self._one(part)
        return self.values[x]

    def _one(self, x: Term) -> Any:
        args = [self.values[y] for y in x.args]
        match x.op:
            case "const":
                return np.int64(x.lo) if x.bits > 1 else np.bool_(x.lo)
            case "load":
                values = self.held.contents.get(x.name)
                if values is None:
                    raise Unknown(f"values of `{x.name}`")
                return values[np.clip(args[0] // values.itemsize, 0, len(values) - 1)].astype(np.int64)
            case "sym" if x in self.held.repeats:
                repeat, place = self.held.repeats[x]
                return self._repeated(repeat)[place]
            case "add":
                return args[0] + args[1]
            case "sub":
                return args[0] - args[1]
            case "mul":
                return args[0] * args[1]
            case "div":
                return np.sign(args[0]) * (np.abs(args[0]) // np.maximum(args[1], 1))
            case "rem":
                return np.sign(args[0]) * (np.abs(args[0]) % np.maximum(args[1], 1))
            case "min":
                return np.minimum(*args)
            case "max":
                return np.maximum(*args)
            case "less":
                return args[0] < args[1]
            case "equal":
                return args[0] == args[1]
            case "not":
                return ~args[0]
            case "and":
                return args[0] & args[1]
            case "choose":
                return np.where(*args)
            case "cast":
                return args[0]
        raise Unknown(name_of(x))

    def _repeated(self, repeat: Repeat) -> list[Any]:
        """The numbers that a loop ends with."""
        numbers = [self.of(x) for x in repeat.starts]
        times = 64 if repeat.times is None else int(np.max(self.of(repeat.times), initial=0))
        if times > 64:
            raise Unknown("a loop of many steps")
        for _ in range(times):
            step = Places({**self.known, **dict(zip(repeat.numbers, numbers, strict=True))}, self.held)
            goes_on = step.of(repeat.condition)
            made = [np.where(goes_on, step.of(x), old) for x, old in zip(repeat.made, numbers, strict=True)]
            if all(np.array_equal(x, y) for x, y in zip(made, numbers, strict=True)):
                break
            numbers = made
        return numbers


def conjuncts(*conditions: Term) -> list[Term]:
    """Conditions that all hold, taken apart."""
    left, single = list(conditions), []
    while left:
        x = left.pop()
        if x.op == "and":
            left += x.args
        else:
            single.append(x)
    return single


def _factor(x: Term, lane: Term) -> int | None:
    """Return by how much a term grows from lane to lane; None where there is no such number."""
    if x is lane:
        return 1
    if lane not in set(parts(x)):
        return 0
    if x.op in ("add", "sub"):
        a, b = (_factor(y, lane) for y in x.args)
        return None if a is None or b is None else a + b if x.op == "add" else a - b
    if x.op == "mul" and x.args[1].value is not None:
        a = _factor(x.args[0], lane)
        return None if a is None else a * x.args[1].value
    return _factor(x.args[0], lane) if x.op == "cast" else None


class Stores(NamedTuple):
    """Stores of programs: who stores, at which byte, how many bytes from there on; all of them, or perhaps too many."""

    who: Any
    begin: Any
    width: int
    is_exact: bool


def stored(access: Access, programs: Any, held: Held) -> Stores:
    """List the stores of programs; a condition without a value here may hold."""
    lanes = sorted((x for x in parts(access.place, access.mask) if x.op == "axis"), key=lambda x: x.name[1:])
    # A loop below knows its turns.
    conditions = [x for x in conjuncts(access.mask, *access.path) if not any(_is_turn(y) for y in parts(x))]
    run, width = None, access.size
    for lane in lanes:
        own = [x for x in conditions if lane in set(parts(x))]
        others = {x for y in own for x in parts(y) if x.op in ("axis", "sym", "load")} - {lane}
        if _factor(access.place, lane) == access.size and not others:
            shown = Places({lane: np.arange(lane.hi + 1)}, Held({}, {})).of
            valid = np.ones(lane.hi + 1, bool)
            for x in own:
                valid = valid & shown(x)
            number = int(valid.sum())
            if valid[:number].all() and number:
                run, width = lane, access.size * number
                conditions = [x for x in conditions if x not in own]
                break
    dims = 1 + len(access.loops) + len(lanes)

    def along(values: Any, dim: int) -> Any:
        return np.reshape(values, [-1 if i == dim else 1 for i in range(dims)])

    program = next((x for x in parts(access.place, access.mask, *access.path) if x.name == "program"), None)
    values: dict[Term, Any] = {} if program is None else {program: along(programs, 0)}
    for i, lane in enumerate(lanes):
        values[lane] = np.int64(0) if lane is run else along(np.arange(lane.hi + 1), 1 + len(access.loops) + i)
    places = Places(values, held)
    inside = np.ones([1] * dims, bool)
    number_of_all = len(programs) * int(np.prod([x.hi + 1 for x in lanes if x is not run], dtype=np.int64))
    for i, loop in enumerate(access.loops):
        if loop.number not in set(parts(access.place, access.mask, *conditions)):
            continue
        begin, end, step = (places.of(x) for x in loop[1:])
        turns = int(np.max(np.maximum(end - begin + step - 1, 0) // step, initial=0))
        number_of_all *= max(turns, 1)
        if number_of_all > MOST_PLACES:
            raise Unknown("a launch of too many places")
        number = begin + step * along(np.arange(turns), 1 + i)
        places.know(loop.number, number)
        inside = inside & (number < end)
    if number_of_all > MOST_PLACES:
        raise Unknown("a launch of too many places")
    place, is_exact = places.of(access.place), True
    for x in conditions:
        try:
            inside = inside & places.of(x)
        except Unknown:
            is_exact = False
    shape = np.broadcast_shapes(np.shape(place), np.shape(inside), (len(programs), *[1] * (dims - 1)))
    inside = np.broadcast_to(inside, shape)
    who = np.broadcast_to(along(programs, 0), shape)[inside]
    return Stores(who, np.broadcast_to(place, shape)[inside], width, is_exact)


def _is_turn(x: Term) -> bool:
    return x.op == "sym" and str(x.name).startswith("turn ")


def conflict(accesses: Sequence[Access], programs: int, held: Held) -> tuple[Verdict, bool]:
    """Whether two programs store to one place, and whether all programs were looked at."""
    groups: dict[str, list[Access]] = {}
    for access in accesses:
        if access.kind == "store":
            groups.setdefault(access.tensor, []).append(access)
    complete = True
    for tensor, group in groups.items():
        chosen = np.arange(programs)
        while True:
            try:
                made = [stored(access, chosen, held) for access in group]
                break
            except Unknown as why:
                if "too many" not in str(why) or len(chosen) < 4:
                    return Verdict("undecided", f"stores to `{tensor}` depend on {why}"), complete
                complete = False
                half = len(chosen) // 4  # the first, those in the middle, and the last are neighbours in all dims
                middle = len(chosen) // 2
                pick = [chosen[: half // 2], chosen[middle : middle + half // 4], chosen[len(chosen) - half // 4 :]]
                chosen = np.concatenate(pick)
        who = np.concatenate([x.who for x in made])
        begin = np.concatenate([x.begin for x in made])
        end = begin + np.concatenate([np.full(len(x.who), x.width) for x in made])
        order = np.lexsort((who, begin))
        who, begin, end = who[order], begin[order], end[order]
        reach = np.maximum.accumulate(end) if len(end) else end
        meets = begin[1:] < reach[:-1]
        # Places of one program may meet. Where neighbours do, all who meet have to be one program.
        if (meets & (who[1:] != who[:-1])).any():
            i = int(np.argmax(meets & (who[1:] != who[:-1])))
            why = f"programs {who[i]} and {who[i + 1]} store to byte {begin[i + 1]} of `{tensor}`"
            word = "fault" if all(x.is_exact for x in made) else "undecided"
            return Verdict(word, f"two programs: {why}"), complete
    return PROVED, complete
