"""Terms: the integers of a compiled kernel as functions of its program, of the lanes of its tensors, and of its loads.

A term has the value of unbounded integers, and an interval around it. A sum or a product that may leave the bits of its
type is marked by its interval (`may_wrap`); whoever uses it has to show that it does not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

Interval = tuple[int, int]


class Term:
    """A number, or a truth value where `bits` is 1. Terms that look alike are one object.

    `op` is "const", "axis" (a lane of a tensor), "sym" (anything of an interval), "load" (a value of a tensor, whose
    place in bytes is its argument), or an operation on `args`. `raw` is the interval before the type cuts it.
    """

    __slots__ = ("args", "bits", "hi", "lo", "name", "op", "raw")

    def __init__(self, op: str, args: tuple[Term, ...], name: Any, bits: int, raw: Interval) -> None:
        self.op, self.args, self.name, self.bits, self.raw = op, args, name, bits, raw
        least, most = range_of(bits)
        self.lo, self.hi = max(raw[0], least), min(raw[1], most)

    @property
    def may_wrap(self) -> bool:
        return self.raw != (self.lo, self.hi)

    @property
    def value(self) -> int | None:
        """The number, of a constant."""
        return self.lo if self.op == "const" else None

    # The language of contracts: numbers of 64 bits.

    def __add__(self, other: Term | int) -> Term:
        return add(self, term(other), 64)

    def __sub__(self, other: Term | int) -> Term:
        return sub(self, term(other), 64)

    def __mul__(self, other: Term | int) -> Term:
        return mul(self, term(other), 64)

    def __floordiv__(self, other: Term | int) -> Term:
        return div(self, term(other), 64)

    def __mod__(self, other: Term | int) -> Term:
        return rem(self, term(other), 64)

    def __lt__(self, other: Term | int) -> Term:
        return less(self, term(other))

    def __le__(self, other: Term | int) -> Term:
        return negation(less(term(other), self))

    def __and__(self, other: Term) -> Term:
        return both(self, other)

    def __or__(self, other: Term) -> Term:
        return either(self, other)

    def __invert__(self) -> Term:
        return negation(self)

    def __repr__(self) -> str:
        if self.op == "const":
            return str(self.lo)
        if self.op in ("axis", "sym"):
            return str(self.name)
        return f"{self.name or self.op}({', '.join(map(repr, self.args))})"


_terms: dict[Any, Term] = {}


def forget() -> None:
    """Drop all terms, before another kernel."""
    _terms.clear()


def range_of(bits: int) -> Interval:
    return (0, 1) if bits == 1 else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)


def _make(op: str, args: tuple[Term, ...], name: Any, bits: int, raw: Interval) -> Term:
    key = (op, tuple(map(id, args)), name, bits)
    if key not in _terms:
        _terms[key] = Term(op, args, name, bits, raw)
    return _terms[key]


def const(value: int, bits: int = 64) -> Term:
    return _make("const", (), value, bits, (value, value))


TRUE, FALSE = Term("const", (), 1, 1, (1, 1)), Term("const", (), 0, 1, (0, 0))


def term(x: Term | int) -> Term:
    return x if isinstance(x, Term) else const(x)


def truth(value: bool) -> Term:
    return TRUE if value else FALSE


def axis(number: int, size: int) -> Term:
    """The place of a lane along one dim of a tensor."""
    return _make("axis", (), ("axis", number, size), 32, (0, size - 1)) if size > 1 else const(0, 32)


def sym(name: Any, bits: int, interval: Interval | None = None, lanes: tuple[Term, ...] = ()) -> Term:
    """A number that may be anything in its interval; one for each lane."""
    return _make("sym", lanes, name, bits, interval or range_of(bits))


def load(tensor: str, place: Term, bits: int, interval: Interval | None = None) -> Term:
    return _make("load", (place,), tensor, bits, interval or range_of(bits))


def _quotient(x: int, y: int) -> int:
    """Divide towards zero, as kernels do."""
    return x // y if (x >= 0) == (y > 0) else -(-x // y)


def add(x: Term, y: Term, bits: int) -> Term:
    if x.value is not None and y.value is not None:
        return const(x.value + y.value, bits)
    if y.value == 0:
        return x
    if x.value == 0:
        return y
    return _make("add", (x, y), None, bits, (x.lo + y.lo, x.hi + y.hi))


def sub(x: Term, y: Term, bits: int) -> Term:
    if x is y:
        return const(0, bits)
    if y.value is not None:
        return add(x, const(-y.value, bits), bits)
    return _make("sub", (x, y), None, bits, (x.lo - y.hi, x.hi - y.lo))


def mul(x: Term, y: Term, bits: int) -> Term:
    if x.value is not None:
        x, y = y, x
    if y.value is not None:
        if x.value is not None:
            return const(x.value * y.value, bits)
        if y.value in (0, 1):
            return x if y.value else const(0, bits)
    corners = [a * b for a in (x.lo, x.hi) for b in (y.lo, y.hi)]
    return _make("mul", (x, y), None, bits, (min(corners), max(corners)))


def div(x: Term, y: Term, bits: int) -> Term:
    if y.value is not None and y.value != 0:
        if x.value is not None:
            return const(_quotient(x.value, y.value), bits)
        if y.value == 1:
            return x
        ends = (_quotient(x.lo, y.value), _quotient(x.hi, y.value))
        return _make("div", (x, y), None, bits, (min(ends), max(ends)))
    most = max(abs(x.lo), abs(x.hi))
    least = 0 if x.lo >= 0 and y.lo >= 0 else -most
    return _make("div", (x, y), None, bits, (least, most))


def rem(x: Term, y: Term, bits: int) -> Term:
    if x.lo >= 0 and y.lo > x.hi:
        return x
    if y.value is not None and y.value != 0 and x.value is not None:
        return const(x.value - y.value * _quotient(x.value, y.value), bits)
    if y.value == 1:
        return const(0, bits)
    most = min(max(abs(y.lo), abs(y.hi)) - 1, max(abs(x.lo), abs(x.hi)))
    return _make("rem", (x, y), None, bits, (0 if x.lo >= 0 else -most, most if x.hi > 0 else 0))


def least(x: Term, y: Term, bits: int) -> Term:
    if x is y or x.hi <= y.lo:
        return x
    if y.hi <= x.lo:
        return y
    return _make("min", (x, y), None, bits, (min(x.lo, y.lo), min(x.hi, y.hi)))


def most(x: Term, y: Term, bits: int) -> Term:
    if x is y or x.lo >= y.hi:
        return x
    if y.lo >= x.hi:
        return y
    return _make("max", (x, y), None, bits, (max(x.lo, y.lo), max(x.hi, y.hi)))


def less(x: Term, y: Term) -> Term:
    if x.hi < y.lo:
        return TRUE
    return FALSE if x.lo >= y.hi else _make("less", (x, y), None, 1, (0, 1))


def at_most(x: Term, y: Term) -> Term:
    return negation(less(y, x))


def equal(x: Term, y: Term) -> Term:
    if x is y or (x.value is not None and x.value == y.value):
        return TRUE
    if x.bits == 1 and y.bits == 1:
        return either(both(x, y), both(negation(x), negation(y)))
    return FALSE if x.hi < y.lo or y.hi < x.lo else _make("equal", (x, y), None, 1, (0, 1))


def negation(x: Term) -> Term:
    if x.value is not None:
        return truth(not x.value)
    return x.args[0] if x.op == "not" else _make("not", (x,), None, 1, (0, 1))


def both(x: Term, y: Term) -> Term:
    if x.value is not None:
        return y if x.value else FALSE
    if y.value is not None:
        return x if y.value else FALSE
    return x if x is y else _make("and", (x, y), None, 1, (0, 1))


def either(x: Term, y: Term) -> Term:
    return negation(both(negation(x), negation(y)))


def choose(condition: Term, x: Term, y: Term) -> Term:
    """x where the condition holds, else y."""
    if condition.value is not None or x is y:
        return x if condition.value or x is y else y
    if x.bits == 1:
        return either(both(condition, x), both(negation(condition), y))
    return _make("choose", (condition, x, y), None, x.bits, (min(x.lo, y.lo), max(x.hi, y.hi)))


def with_bits(x: Term, bits: int) -> Term:
    """The same number in another type: it may not fit a narrower one."""
    if x.value is not None:
        return const(x.value, bits)
    if x.bits == bits:
        return x
    return x if x.bits < bits else _make("cast", (x,), None, bits, (x.lo, x.hi))


_BUILD: dict[str, Callable[..., Term]] = {"add": add, "sub": sub, "mul": mul, "div": div, "rem": rem}
_BUILD |= {"min": least, "max": most, "cast": with_bits}
_CONDITIONS: dict[str, Callable[..., Term]] = {"less": less, "equal": equal, "not": negation, "and": both}
_CONDITIONS |= {"choose": choose}


def rebuilt(x: Term, args: tuple[Term, ...]) -> Term:
    """The same operation on other arguments."""
    if args == x.args:
        return x
    if x.op in _BUILD:
        return _BUILD[x.op](*args, x.bits)
    if x.op in _CONDITIONS:
        return _CONDITIONS[x.op](*args)
    return _make(x.op, args, x.name, x.bits, x.raw)


def replaced(x: Term, others: Mapping[Term, Term], done: dict[Term, Term] | None = None) -> Term:
    """The term with others in the place of some."""
    done = {} if done is None else done
    if x not in done:
        done[x] = others[x] if x in others else rebuilt(x, tuple(replaced(y, others, done) for y in x.args))
    return done[x]


def parts(*terms: Term, into_loads: bool = True) -> Iterator[Term]:
    """Every term inside of terms, once; of a load its place too, or nothing more."""
    left, seen = list(terms), set[Term]()
    while left:
        x = left.pop()
        if x not in seen:
            seen.add(x)
            yield x
            if into_loads or x.op != "load":
                left += x.args


def in_order(x: Term) -> list[Term]:
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
