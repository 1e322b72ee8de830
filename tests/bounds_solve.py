"""Decide accesses by intervals and by Z3."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import z3
from bounds_terms import Term, const, either, in_order, less, negation, parts, range_of
from bounds_walk import Access

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

    def __init__(self, facts: Facts, milliseconds: int = 20000) -> None:
        self.facts, self.milliseconds = facts, milliseconds
        self.made: dict[Term, Any] = {}
        self.known: dict[tuple[Term, bool], list[Any]] = {}
        self.answers: dict[Any, str] = {}
        self.model: Any = None
        self.asked = 0

    def of(self, x: Term) -> Any:
        """The term in Z3's language."""
        for part in reversed(in_order(x)):
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
