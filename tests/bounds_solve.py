"""Decide accesses: by intervals, by Z3, and for stores of two programs by their places in a launch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import z3
from bounds_terms import Term, const, either, less, negation, parts, range_of
from bounds_walk import Access, Repeat

# Numbers that a launch or a loop has, and not what a tensor holds.
OWN = ("program", "step ", "turn ")
Facts = Callable[[Term], Sequence[Term]]


class Verdict(NamedTuple):
    """An answer about an access: "proved", "fault" or "undecided", and why."""

    word: str
    why: str = ""


PROVED = Verdict("proved")


class Solver:
    """Z3 over terms; `facts` has what contracts say of a loaded value."""

    def __init__(self, facts: Facts, milliseconds: int = 4000) -> None:
        self.facts, self.milliseconds = facts, milliseconds
        self.made: dict[Term, Any] = {}
        self.known: dict[tuple[Term, bool], list[Any]] = {}
        self.answers: dict[Any, str] = {}
        self.model: Any = None
        self.asked = 0

    def of(self, x: Term) -> Any:
        """The term in Z3's language."""
        for part in reversed(_in_order(x)):
            if part not in self.made:
                self.made[part] = self._one(part)
        return self.made[x]

    def _one(self, x: Term) -> Any:
        args = [self.made[y] for y in x.args]
        match x.op:
            case "const":
                return z3.BoolVal(bool(x.lo)) if x.bits == 1 else z3.IntVal(x.lo)
            case "axis" | "sym":
                name = f"{x.name} {x.args} {len(self.made)}"
                return z3.Bool(name) if x.bits == 1 else z3.Int(name)
            case "load":
                return z3.Function(f"{x.name}:{x.bits}", z3.IntSort(), z3.IntSort())(z3.simplify(args[0], som=True))
            case "add":
                return args[0] + args[1]
            case "sub":
                return args[0] - args[1]
            case "mul":
                return args[0] * args[1]
            case "div":
                return z3.FreshInt("quotient")
            case "rem":
                return z3.FreshInt("rest")
            case "min":
                return z3.If(args[0] < args[1], args[0], args[1])
            case "max":
                return z3.If(args[0] > args[1], args[0], args[1])
            case "less":
                return args[0] < args[1]
            case "equal":
                return args[0] == args[1]
            case "not":
                return z3.Not(args[0])
            case "and":
                return z3.And(args[0], args[1])
            case "choose":
                return z3.If(args[0], args[1], args[2])
            case "cast":
                return args[0]
        raise AssertionError(x.op)

    def about(self, x: Term, is_quoted: bool) -> list[Any]:
        """Say all about a term, in Z3's language; without its own contract where another contract quotes it."""
        if (x, is_quoted) in self.known:
            return self.known[x, is_quoted]
        said: list[Any] = []
        self.known[x, is_quoted] = said
        me = self.of(x)
        if x.op in ("axis", "sym", "load") and x.bits > 1:
            said += [me >= x.lo, me <= x.hi]
        if x.op in ("div", "rem"):
            a, b = (self.of(y) for y in x.args)
            other = z3.FreshInt()
            q, r = (me, other) if x.op == "div" else (other, me)
            said.append(a == b * q + r)
            size = b if x.args[1].lo > 0 else z3.If(b > 0, b, -b)
            if x.args[0].lo >= 0:
                said += [r >= 0, r < size]
                if x.args[1].lo > 0:
                    said += [q >= 0, q <= x.args[0].hi]
            else:
                said += [z3.If(a >= 0, z3.And(r >= 0, r < size), z3.And(r <= 0, r > -size))]
        if x.op == "load" and not is_quoted:
            for fact in self.facts(x):
                said += [self.of(fact), *self.about_all(fact, is_quoted=True)]
        return said

    def about_all(self, *terms: Term, is_quoted: bool = False) -> list[Any]:
        return [fact for part in parts(*terms) for fact in self.about(part, is_quoted)]

    def check(self, *conditions: Term) -> str:
        """Whether there are numbers for which all of these hold: "sat", "unsat" or "unknown"."""
        if any(x.value == 0 for x in conditions):
            return "unsat"
        key = frozenset(id(x) for x in conditions)
        if key not in self.answers:
            solver = z3.Solver()
            solver.set("timeout", self.milliseconds)
            solver.add(*self.about_all(*conditions), *(self.of(x) for x in conditions))
            self.asked += 1
            self.answers[key] = str(solver.check())
            self.model = solver.model() if self.answers[key] == "sat" else None
        return self.answers[key]

    def prove(self, conditions: Sequence[Term], claim: Term) -> bool:
        return self.check(*conditions, negation(claim)) == "unsat"


def _in_order(x: Term) -> list[Term]:
    """The parts of a term, each before those inside of it."""
    order: list[Term] = []
    done: set[Term] = set()
    stack: list[tuple[Term, bool]] = [(x, False)]
    while stack:
        y, is_left = stack.pop()
        if is_left:
            order.append(y)
        elif y not in done:
            done.add(y)
            stack.append((y, True))
            stack += [(z, False) for z in y.args]
    return order[::-1]


def outside(x: Term, low: int, high: int) -> Term:
    wide = x if x.op == "const" else _widest(x)
    return either(less(wide, const(low)), less(const(high), wide))


def _widest(x: Term) -> Term:
    """The term without the limits of its type: comparisons of it are not decided by them."""
    if not x.may_wrap:
        return x
    copy = Term(x.op, x.args, x.name, 128, x.raw)
    return copy


# Words for a number without a contract, by the operation that made it.
NAMES = {"tt.scan": "a count of what is kept", "tt.reduce": "a count of what is kept", "tt.atomic_rmw": "an atomic"}
NAMES |= {"scf.while": "what a search ends with", "scf.for": "what a loop carries"}


def name_of(x: Term) -> str:
    """Where a number without a contract comes from."""
    name = str(x.name).split()[0]
    return NAMES.get(name, "single bits" if name.startswith("arith.") else str(x.name).rstrip(" 0123456789"))


def unknowns(terms: Sequence[Term], has_contract: Callable[[Term], bool]) -> list[str]:
    """Name the numbers in terms that no contract bounds."""
    names: dict[str, None] = {}
    for x in parts(*terms):
        if x.op == "load" and not has_contract(x):
            names[f"values of `{x.name}`"] = None
        elif x.op == "sym" and not str(x.name).startswith(OWN):
            names[name_of(x)] = None
    return sorted(names)


class Checker:
    """The questions that one kernel and one launch raise."""

    def __init__(self, solver: Solver, sizes: Mapping[str, int], has_contract: Callable[[Term], bool]) -> None:
        self.solver, self.sizes, self.has_contract = solver, sizes, has_contract

    def _answer(self, conditions: Sequence[Term], claim: Term, what: str) -> Verdict:
        """Whether the bad `claim` is impossible."""
        if claim.value == 0:
            return PROVED
        answer = self.solver.check(*conditions, claim)
        if answer == "unsat":
            return PROVED
        names = unknowns([*conditions, claim], self.has_contract)
        if answer == "unknown":
            return Verdict("undecided", f"{what}: the solver gives up" + (f" ({', '.join(names)})" if names else ""))
        if names:
            return Verdict("undecided", f"{what}: depends on {', '.join(names)}")
        return Verdict("fault", f"{what}: {self._example()}")

    def _example(self) -> str:
        model = self.solver.model
        if model is None:
            return "an example was seen before"
        words = {str(d): model[d] for d in model.decls() if str(d).startswith(("program", "step", "('axis'"))}
        return ", ".join(f"{name.partition(' ()')[0]} = {value}" for name, value in words.items())

    def in_bounds(self, access: Access) -> Verdict:
        last = self.sizes[access.tensor] - access.size
        return self._answer((*access.path, access.mask), outside(access.place, 0, last), "outside")

    def no_wrap(self, access: Access) -> Verdict:
        """No sum or product leaves the bits of its type, in the conditions, the mask, or the place under both."""
        worst = PROVED
        stages = [(access.path[:i], x) for i, x in enumerate(access.path)]
        stages += [(access.path, access.mask), ((*access.path, access.mask), access.place)]
        for conditions, term in stages:
            for part in parts(term, into_loads=False):
                if part.may_wrap and part.op in ("add", "sub", "mul", "cast", "div"):
                    verdict = self._answer(conditions, outside(part, *range_of(part.bits)), "wraps")
                    if verdict.word == "fault":
                        return verdict
                    worst = worst if verdict.word == "proved" else verdict
        return worst

    def is_reached(self, access: Access) -> bool:
        return self.solver.check(*access.path, access.mask) != "unsat"


# Stores of two programs

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
        for part in reversed(_in_order(x)):
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
