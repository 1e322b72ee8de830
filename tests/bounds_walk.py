"""Walk the compiled form of a kernel (TTIR, before layouts), and write down each access to memory as terms.

The walk goes once through each branch and each loop. A number that a loop carries is unknown, unless each step adds the
same to it. Floats are not followed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from bounds_numbers import Descriptor, Numbers, Pointer, Value
from bounds_terms import (
    TRUE,
    Term,
    add,
    at_most,
    axis,
    both,
    const,
    div,
    either,
    equal,
    less,
    mul,
    negation,
    parts,
    range_of,
    replaced,
    sub,
    sym,
)
from bounds_text import Block, NotFollowed, Op, bits_of, bytes_of, parsed, result_type, shape_of


class Loop(NamedTuple):
    """The number of a loop is from `begin` on, each `step`, below `end`."""

    number: Term
    begin: Term
    end: Term
    step: Term


class Repeat(NamedTuple):
    """Numbers that a loop without a name for each of its steps ends with, as a search does.

    It begins with `starts`, and replaces `numbers` by `made` while `condition` holds, or so many `times`.
    """

    numbers: tuple[Term, ...]
    starts: tuple[Term, ...]
    made: tuple[Term, ...]
    condition: Term
    times: Term | None


@dataclass(frozen=True)
class Access:
    """An access of the lanes of a tensor, or of one element, where `mask` and all of `path` hold."""

    kind: str  # load, store or atomic
    tensor: str
    place: Term
    size: int  # bytes of an element
    mask: Term
    path: tuple[Term, ...]
    loops: tuple[Loop, ...]
    text: str


@dataclass(kw_only=True)
class Walk(Numbers):
    """The state of a walk; `accesses` is its result.

    `values` makes the term of an integer that is loaded from a tensor, at a place in bytes. `prove` says whether
    conditions imply another one.
    """

    values: Callable[[str, Term, int], Term]
    prove: Callable[[Sequence[Term], Term], bool]
    accesses: list[Access] = field(default_factory=list)
    path: tuple[Term, ...] = ()
    loops: tuple[Loop, ...] = ()
    repeats: dict[Term, tuple[Repeat, int]] = field(default_factory=dict)
    is_trial: bool = False
    visited: int = 0
    # Memory

    def _tt_addptr(self, op: Op) -> None:
        pointer, by = self.operands(op.text)[:2]
        if not isinstance(pointer, Pointer) or not isinstance(by, Term):
            raise NotFollowed("a place that is no number")
        element = shape_of(op.text.rpartition(" : ")[2].split(", ")[0])[1]
        size = bytes_of(element[len("!tt.ptr<") : -1])
        offset = mul(by, const(size, 64), 64)
        self.bind(op, pointer.changed(lambda place: add(place, offset, 64)))

    def _tt_bitcast(self, op: Op) -> None:
        x = self.operands(op.text)[0]
        kind = result_type(op.text)
        is_number = isinstance(x, Term) and x.bits == bits_of(shape_of(kind)[1])
        self.bind(op, x if isinstance(x, Pointer) or is_number else self.fresh(kind, op.name))

    _arith_bitcast = _tt_bitcast

    def access(self, kind: str, op: Op, pointer: Value, mask: Value) -> tuple[Pointer, int, str]:
        if not isinstance(pointer, Pointer):
            raise NotFollowed("an access of an unknown place")
        place = op.text.rpartition(" : ")[2].lstrip("(").split(", ")[0]
        element = shape_of(place)[1][len("!tt.ptr<") : -1]
        size = bytes_of(element)
        condition = mask if isinstance(mask, Term) else TRUE
        for x in pointer.all:
            self.write_down(kind, x.tensor, x.place, size, both(condition, x.condition), op)
        return pointer, size, element

    def write_down(self, kind: str, tensor: str, place: Term, size: int, mask: Term, op: Op) -> None:
        if not self.is_trial:
            text = f"{op.name} {op.text}"
            self.accesses.append(Access(kind, tensor, place, size, mask, self.path, self.loops, text))

    def _tt_load(self, op: Op) -> None:
        operands = self.operands(op.text.partition(" : ")[0])
        mask = operands[1] if len(operands) > 1 else TRUE
        pointer, _, element = self.access("load", op, operands[0], mask)
        bits = bits_of(element)
        if bits is None or bits == 1:
            sizes = "x".join(map(str, shape_of(op.text.rpartition(" : ")[2])[0]))
            self.bind(op, None if bits is None else self.fresh(f"tensor<{sizes}xi1>" if sizes else "i1", "load"))
            return
        value: Value = self.values(pointer.tensor, pointer.place, bits)
        for x in pointer.others:
            value = self.merged(x.condition, self.values(x.tensor, x.place, bits), value)
        if len(operands) > 2:
            assert isinstance(mask, Term)
            value = self.merged(mask, value, operands[2])
        self.bind(op, value)

    def _tt_store(self, op: Op) -> None:
        operands = self.operands(op.text.partition(" : ")[0])
        self.access("store", op, operands[0], operands[2] if len(operands) > 2 else TRUE)

    def _tt_atomic_rmw(self, op: Op) -> None:
        operands = self.operands(op.text.partition(" : ")[0])
        self.access("atomic", op, operands[0], operands[2] if len(operands) > 2 else TRUE)
        self.bind(op, self.fresh(result_type(op.text), op.name))

    def _block(self, op: Op) -> None:
        """A block of a descriptor: the hardware leaves out what is beyond its edges."""
        descriptor, *first = self.operands(op.text.partition("]")[0])
        match = re.search(r"tensordesc<tensor<((?:\d+x)+)(\w+)", op.text)
        if not isinstance(descriptor, Descriptor) or match is None:
            raise NotFollowed("an unknown descriptor")
        size = bytes_of(match[2])
        place, mask = const(0), TRUE
        block = [int(n) for n in match[1].split("x") if n]
        for i, (begin, length, number, stride) in enumerate(
            zip(first, block, descriptor.shape, descriptor.strides, strict=True)
        ):
            assert isinstance(begin, Term)
            index = add(begin, axis(i, length), 64)
            mask = both(mask, both(at_most(const(0), index), less(index, const(number))))
            place = add(place, mul(index, const(stride * size), 64), 64)
        kind = "load" if op.name == "tt.descriptor_load" else "store"
        self.write_down(kind, descriptor.tensor, place, size, mask, op)
        if kind == "load":
            self.bind(op, self.fresh(result_type(op.text), op.name))

    _tt_descriptor_load = _tt_descriptor_store = _block

    # Regions

    def blocks(self, blocks: Sequence[Block], number: int = 0) -> list[Value]:
        """Run a block and those after it; returns what it yields."""
        labels = {block.label: i for i, block in enumerate(blocks)}
        self.visited += 1
        if self.visited > 2000:
            raise NotFollowed("too many branches")
        for op in blocks[number].ops:
            if op.name in ("scf.yield", "scf.condition"):
                return self.operands(op.text.partition(" : ")[0])
            if op.name == "cf.br":
                return self._jump(blocks, labels, op.text)
            if op.name == "cf.cond_br":
                condition, _, rest = op.text.partition(", ")
                first, second = re.findall(r"\^\w+(?:\([^)]*\))?", rest)
                truth = self.names[condition.strip()]
                assert isinstance(truth, Term)
                for which, target in ((truth, first), (negation(truth), second)):
                    self.under(which, lambda target=target: self._jump(blocks, labels, target))
                return []
            self.run(op)
        return []

    def _jump(self, blocks: Sequence[Block], labels: dict[str, int], target: str) -> list[Value]:
        match = re.match(r"\^(\w+)(?:\(([^):]*))?", target)
        assert match is not None
        number = labels[match[1]]
        passed = self.operands(match[2] or "")
        for (name, _), value in zip(blocks[number].arguments, passed, strict=True):
            self.names[name] = value
        return self.blocks(blocks, number)

    def under(self, condition: Term, run: Callable[[], Any]) -> Any:
        """Run something where a condition holds."""
        if condition.value == 0:
            return None
        before = self.path
        self.path = before if condition.value == 1 else (*before, condition)
        try:
            return run()
        finally:
            self.path = before

    def _scf_if(self, op: Op) -> None:
        condition = self.operands(op.text)[0]
        assert isinstance(condition, Term)
        sides: list[list[Value] | None] = [None, None]
        for side, (which, region) in enumerate(zip((condition, negation(condition)), op.regions, strict=False)):
            sides[side] = self.under(which, lambda region=region: self.blocks(region))
        for i, result in enumerate(op.results):
            left, right = sides
            if left is None or right is None:
                one = right if left is None else left
                assert one is not None
                self.names[result] = one[i]
            else:
                self.names[result] = self.merged(condition, left[i], right[i])

    def _carried(self, op: Op, first: list[Value], kinds: list[str]) -> list[Value]:
        if any(isinstance(x, Pointer) and x.others for x in first):
            raise NotFollowed("a loop that carries a pointer to one of two tensors")
        return [
            self.fresh(kind, f"{op.name} carries", tensor=x.tensor if isinstance(x, Pointer) else None)
            for x, kind in zip(first, kinds, strict=True)
        ]

    def _scf_for(self, op: Op) -> None:
        header = re.match(r"(%[\w$-]+) = (%[\w#$-]+) to (%[\w#$-]+) step (%[\w#$-]+)", op.text)
        assert header is not None
        begin, end, step = (self.names[name] for name in header.groups()[1:])
        assert isinstance(begin, Term) and isinstance(end, Term) and isinstance(step, Term)
        carried = re.search(r"iter_args\((.*?)\) -> \((.*?)\)  ", op.text)
        names: list[str] = []
        first: list[Value] = []
        kinds: list[str] = []
        if carried is not None:
            names, sources = (list(x) for x in zip(*re.findall(r"(%[\w$-]+) = (%[\w#$-]+)", carried[1]), strict=True))
            first = [self.names[name] for name in sources]
            kinds = re.findall(r"(?:[^,<]|<(?:[^<>]|<(?:[^<>]|<[^<>]*>)*>)*>)+", carried[2])
        if begin.lo >= end.hi:
            self.names.update(zip(op.results, first, strict=True))
            return
        number = sym(f"step {next(self.numbers)}", begin.bits, (begin.lo, max(end.hi - 1, begin.lo)))
        loop = Loop(number, begin, end, step)
        self.names[header[1]] = number
        inside = both(at_most(begin, number), less(number, end))
        if step.value != 1:
            turn = sym(f"turn {next(self.numbers)}", 64, (0, 2**31 - 1))
            inside = both(inside, equal(number, add(begin, mul(turn, step, 64), 64)))
        values = self._carried(op, first, kinds)
        outer = self.loops
        self.loops = (*outer, loop)
        try:
            if any(isinstance(x, (Term, Pointer)) for x in values):
                values = self._inductive(op, names, first, values, inside, loop)
            self.names.update(zip(names, values, strict=True))
            made = self.under(inside, lambda: self.blocks(op.regions[0])) or values
        finally:
            self.loops = outer
        after = self._carried(op, first, kinds)
        for i, (x, start) in enumerate(zip(values, first, strict=True)):
            if x == start:
                after[i] = start
            elif isinstance(x, Term) and isinstance(after[i], Term):
                low, high = min(x.lo, start.lo), max(x.hi, start.hi)  # type: ignore[union-attr]
                after[i] = self.fresh(kinds[i], f"{op.name} ends with", (low, high))
        times = div(sub(end, begin, 64), step, 64)
        self.remember(values, first, made, after, TRUE, times)
        self.names.update(zip(op.results, after, strict=True))

    def remember(
        self, values: list[Value], first: list[Value], made: list[Value], after: list[Value], condition: Term,
        times: Term | None,
    ) -> None:  # fmt: skip
        """Keep how numbers that a loop carries come about, and what a search says of its result.

        A search replaces a number by another for which a condition holds. So the condition holds for the result, or the
        result is what the search began with. The least of a number and others only falls.
        """
        which = [i for i, x in enumerate(values) if isinstance(x, Term) and x.op == "sym" and isinstance(made[i], Term)]
        numbers, starts, changed = (
            tuple(x for i in which if isinstance(x := source[i], Term)) for source in (values, first, made)
        )
        repeat = Repeat(numbers, starts, changed, condition, times)
        for place, i in enumerate(which):
            final, number, start, new = after[i], numbers[place], starts[place], changed[place]
            if not isinstance(final, Term) or final.op != "sym":
                continue
            self.repeats[final] = (repeat, place)
            if new.op in ("min", "max") and number in new.args:
                self.path = (*self.path, at_most(final, start) if new.op == "min" else at_most(start, final))
            if new.op == "choose" and number in new.args[1:]:
                is_first = new.args[1] is number
                other, holds = (new.args[2], negation(new.args[0])) if is_first else (new.args[1], new.args[0])
                told = replaced(holds, {other: final})
                if other.op != "const" and not (set(numbers) - {final}) & set(parts(told)):
                    self.path = (*self.path, either(equal(final, start), told))

    def _inductive(
        self, op: Op, names: list[str], first: list[Value], unknown: list[Value], inside: Term, loop: Loop
    ) -> list[Value]:
        """Tell what a loop carries: the same, a sum of equal parts, a number of an interval, or anything."""
        guesses = list(unknown)

        def tried(values: list[Value]) -> list[Value]:
            was_trial, self.is_trial = self.is_trial, True
            self.names.update(zip(names, values, strict=True))
            made = self.under(inside, lambda: self.blocks(op.regions[0]))
            self.is_trial = was_trial
            return made or list(values)

        left = []
        inner = {loop.number}
        turns = div(sub(loop.number, loop.begin, 64), loop.step, 64) if loop.step.lo > 0 else None
        for i, (start, x, y) in enumerate(zip(first, unknown, tried(unknown), strict=True)):
            if x is None or y == x:
                guesses[i] = start
                continue
            old, new, begin = (z.place if isinstance(z, Pointer) else z for z in (x, y, start))
            assert isinstance(old, Term) and isinstance(new, Term) and isinstance(begin, Term)
            if new.op == "add" and old in new.args and turns is not None:
                by = new.args[1] if new.args[0] is old else new.args[0]
                own = {z for z in parts(by) if z.op == "sym" and " carries " in str(z.name)}
                if not own and inner.isdisjoint(parts(by)):
                    place = add(begin, mul(turns, by, 64), old.bits)
                    guesses[i] = Pointer(x.tensor, place) if isinstance(x, Pointer) else place
                    continue
            if isinstance(x, Term):
                left.append(i)
        if left:
            kept = self._kept(op, left, first, guesses, lambda values: (inside, tried(values)))
            if kept != guesses:
                return kept
        for i in left:
            if isinstance(start := first[i], Term):
                guesses[i] = self._within(op, i, start, unknown, tried)
        return guesses

    def _within(
        self, op: Op, place: int, begin: Term, unknown: list[Value], tried: Callable[[list[Value]], list[Value]]
    ) -> Value:
        """A number that keeps an interval from step to step, if it does."""
        x = unknown[place]
        assert isinstance(x, Term)
        low, high = begin.lo, begin.hi
        for _ in range(2):
            guess = sym(f"{op.name} carries {next(self.numbers)}", x.bits, (low, high), x.args)
            made = tried([guess if i == place else y for i, y in enumerate(unknown)])[place]
            if not isinstance(made, Term):
                return x
            if low <= made.lo and made.hi <= high:
                return guess
            low, high = min(low, made.lo), max(high, made.hi)
        if low >= 0:  # it only grows
            guess = sym(f"{op.name} carries {next(self.numbers)}", x.bits, (low, range_of(x.bits)[1]), x.args)
            made = tried([guess if i == place else y for i, y in enumerate(unknown)])[place]
            if isinstance(made, Term) and made.raw[0] >= low:
                return guess
        return x

    def _kept(
        self, op: Op, which: list[int], first: list[Value], values: list[Value],
        step: Callable[[list[Value]], tuple[Term, list[Value]]],
    ) -> list[Value]:  # fmt: skip
        """Numbers that stay between the least and the greatest of those a loop begins with, or below the greatest."""
        starts = {i: x for i in which if isinstance(x := first[i], Term)}
        low, high = min(x.lo for x in starts.values()), max(x.hi for x in starts.values())
        guesses = list(values)
        for i, x in starts.items():
            lanes = y.args if isinstance(y := values[i], Term) else ()
            limit = high if x.hi == high else max(high - 1, x.hi)
            guesses[i] = sym(f"{op.name} carries {next(self.numbers)}", x.bits, (low, limit), lanes)
        was_trial, self.is_trial = self.is_trial, True
        condition, made = step(guesses)
        self.is_trial = was_trial
        for i in starts:
            x, y = guesses[i], made[i]
            if not isinstance(x, Term) or not isinstance(y, Term):
                return values
            kept = both(at_most(const(x.lo), y), at_most(y, const(x.hi)))
            if not self.prove((*self.path, condition), kept):
                return values
        return guesses

    def _scf_while(self, op: Op) -> None:
        names, sources = (list(x) for x in zip(*re.findall(r"(%[\w$-]+) = (%[\w#$-]+)", op.text), strict=True))
        first = [self.names[name] for name in sources]
        kinds = re.findall(r"tensor<[^>]*>|i\d+|f\d+|bf16", op.text.rpartition(" : ")[2].partition(" -> ")[0])
        values = self._carried(op, first, kinds)

        def step(guesses: list[Value]) -> tuple[Term, list[Value]]:
            self.names.update(zip(names, guesses, strict=True))
            condition, *passed = self.blocks(op.regions[0])
            assert isinstance(condition, Term)
            self.names.update(zip([name for name, _ in op.regions[1][0].arguments], passed, strict=True))
            return condition, self.under(condition, lambda: self.blocks(op.regions[1])) or guesses

        if all(isinstance(x, Term) for x in first):
            values = self._kept(op, list(range(len(first))), first, values, step)
        self.names.update(zip(names, values, strict=True))
        condition, *passed = self.blocks(op.regions[0])
        assert isinstance(condition, Term)
        self.names.update(zip([name for name, _ in op.regions[1][0].arguments], passed, strict=True))
        made = self.under(condition, lambda: self.blocks(op.regions[1])) or values
        self.names.update(zip(op.results, passed, strict=True))
        self.path = (*self.path, negation(condition))  # it has ended
        self.remember(values, first, made, values, condition, None)


def walked(
    text: str,
    arguments: Sequence[Value],
    programs: int,
    values: Callable[[str, Term, int], Term],
    prove: Callable[[Sequence[Term], Term], bool],
) -> Walk:
    """Walk a module whose function has these arguments, in a grid of so many programs."""
    header, blocks = parsed(text)
    walk = Walk(values=values, prove=prove)
    walk.names.update(zip([name for name, _ in header], arguments, strict=True))
    program = sym("program", 32, (0, max(programs - 1, 0)))
    walk._tt_get_program_id = lambda op: walk.bind(op, program)  # type: ignore[attr-defined]
    walk._tt_get_num_programs = lambda op: walk.bind(op, const(programs, 32))  # type: ignore[attr-defined]
    walk.blocks(blocks)
    return walk
