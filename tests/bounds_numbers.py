"""Numbers of a compiled kernel: each operation on integers, and on the shapes of tensors, as terms."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from bounds_terms import (
    FALSE,
    TRUE,
    Interval,
    Term,
    add,
    at_most,
    axis,
    both,
    choose,
    const,
    div,
    either,
    equal,
    least,
    less,
    most,
    mul,
    negation,
    range_of,
    rem,
    replaced,
    sub,
    sym,
    with_bits,
)
from bounds_text import NotFollowed, Op, bits_of, result_type, shape_of


class Pointer(NamedTuple):
    """A place in the memory of an argument, in bytes; `others` has further ones, each where its condition holds."""

    tensor: str
    place: Term
    condition: Term = TRUE
    others: tuple[Pointer, ...] = ()

    @property
    def all(self) -> tuple[Pointer, ...]:
        return (self, *self.others)

    def changed(self, how: Callable[[Term], Term], where: Callable[[Term], Term] = lambda x: x) -> Pointer:
        """The same with other places, and other conditions."""
        first, *others = (Pointer(x.tensor, how(x.place), where(x.condition)) for x in self.all)
        return first._replace(others=tuple(others))


class Descriptor(NamedTuple):
    """A tensor that the tensor memory accelerator loads and stores blocks of."""

    tensor: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]


Value = Term | Pointer | Descriptor | None  # None: a float, or something else that is not followed

_ARITHMETIC: dict[str, Callable[[Term, Term, int], Term]] = {
    "arith.addi": add,
    "arith.subi": sub,
    "arith.muli": mul,
    "arith.divsi": div,
    "arith.remsi": rem,
    "arith.minsi": least,
    "arith.maxsi": most,
}
_UNSIGNED = {"arith.divui": "arith.divsi", "arith.remui": "arith.remsi", "arith.minui": "arith.minsi"}
_UNSIGNED |= {"arith.maxui": "arith.maxsi"}
_NO_RESULT = ("tt.assert", "gpu.barrier", "tt.print", "llvm.intr.assume", "tt.return")


@dataclass(kw_only=True)
class Numbers:
    """The values of names so far; an operation binds its results."""

    names: dict[str, Value] = field(default_factory=dict)
    numbers: Iterator[int] = field(default_factory=itertools.count)

    def fresh(self, kind: str, why: str, interval: Interval | None = None, tensor: str | None = None) -> Value:
        """Something unknown of a type."""
        sizes, element = shape_of(kind)
        lanes = tuple(axis(i, size) for i, size in enumerate(sizes) if size > 1)
        if element.startswith("!tt.ptr"):
            if tensor is None:
                raise NotFollowed(f"a pointer from {why}")
            return Pointer(tensor, sym(f"{why} {next(self.numbers)}", 64, lanes=lanes))
        bits = bits_of(element)
        return None if bits is None else sym(f"{why} {next(self.numbers)}", bits, interval, lanes)

    # One operation

    def operands(self, text: str) -> list[Value]:
        return [self.names[name] for name in re.findall(r"%[\w#$-]+", text)]

    def run(self, op: Op) -> None:
        method = getattr(self, f"_{op.name.replace('.', '_')}", None)
        if method is not None:
            method(op)
            return
        if op.name in _NO_RESULT:
            return
        if op.name in _ARITHMETIC or op.name in _UNSIGNED:
            self._arithmetic(op)
            return
        kind = op.text.rpartition(" -> ")[2] if " -> " in op.text else result_type(op.text)
        kinds = [kind] if len(op.results) == 1 else kind.strip("()").split(", ")
        for result, each in zip(op.results, kinds, strict=False):
            self.names[result] = self.fresh(each, op.name)

    def bind(self, op: Op, value: Value) -> None:
        self.names[op.results[0]] = value

    def _arithmetic(self, op: Op) -> None:
        x, y = self.operands(op.text)[:2]
        kind = result_type(op.text)
        bits = bits_of(shape_of(kind)[1])
        if not (isinstance(x, Term) and isinstance(y, Term)) or bits is None:
            raise NotFollowed(f"{op.name} of what is no number")
        name = op.name
        if name in _UNSIGNED:
            if x.lo < 0 or y.lo < 0:
                self.bind(op, self.fresh(kind, name))
                return
            name = _UNSIGNED[name]
        if bits == 1:
            self.bind(op, self.fresh(kind, name))
        else:
            self.bind(op, _ARITHMETIC[name](x, y, bits))

    def _arith_constant(self, op: Op) -> None:
        kind = "i1" if op.text in ("true", "false") else result_type(op.text)
        bits = bits_of(shape_of(kind)[1])
        match = re.match(r"(?:dense<)?(-?\d+|true|false|\"0x\w+\")", op.text)
        if bits is None or match is None:
            self.bind(op, None if bits is None else self.fresh(kind, "constants"))
            return
        number = {"true": 1, "false": 0}.get(match[1])
        self.bind(op, (TRUE if number else FALSE) if number is not None else const(int(match[1]), bits))

    def _arith_cmpi(self, op: Op) -> None:
        x, y = self.operands(op.text)[:2]
        relation = op.text.split(",")[0]
        kind = result_type(op.text)
        if not (isinstance(x, Term) and isinstance(y, Term)):
            raise NotFollowed("a comparison of pointers")
        if relation[0] == "u" and (x.lo < 0 or y.lo < 0):
            sizes = "x".join(map(str, shape_of(kind)[0]))
            self.bind(op, self.fresh(f"tensor<{sizes}xi1>" if sizes else "i1", "a comparison without signs"))
            return
        relations = {"lt": less, "le": at_most, "gt": lambda a, b: less(b, a), "ge": lambda a, b: at_most(b, a)}
        if relation in ("eq", "ne"):
            same = equal(x, y)
            self.bind(op, same if relation == "eq" else negation(same))
        else:
            self.bind(op, relations[relation[1:]](x, y))

    def _arith_cmpf(self, op: Op) -> None:
        sizes = "x".join(map(str, shape_of(result_type(op.text))[0]))
        self.bind(op, self.fresh(f"tensor<{sizes}xi1>" if sizes else "i1", "a comparison of floats"))

    def _bitwise(self, op: Op) -> None:
        x, y = self.operands(op.text)[:2]
        kind = result_type(op.text)
        bits = bits_of(shape_of(kind)[1])
        assert isinstance(x, Term) and isinstance(y, Term) and bits is not None
        if x.value is not None and y.value is None:
            x, y = y, x
        if bits == 1:
            made = {"arith.andi": both, "arith.ori": either, "arith.xori": lambda a, b: negation(equal(a, b))}
            self.bind(op, made[op.name](x, y))
            return
        is_low = y.value is not None and y.value >= 0 and not y.value & (y.value + 1)  # the bits below some bit
        if op.name == "arith.andi" and is_low and x.lo >= 0:
            self.bind(op, rem(x, const(y.lo + 1, bits), bits))
        elif op.name == "arith.andi" and (x.lo >= 0 or y.lo >= 0):
            top = min(z.hi for z in (x, y) if z.lo >= 0)
            self.bind(op, self.fresh(kind, op.name, (0, top)))
        elif x.lo >= 0 and y.lo >= 0:
            self.bind(op, self.fresh(kind, op.name, (0, 2 ** max(x.hi, y.hi).bit_length() - 1)))
        else:
            self.bind(op, self.fresh(kind, op.name))

    _arith_andi = _arith_ori = _arith_xori = _bitwise

    def _shift(self, op: Op) -> None:
        x, y = self.operands(op.text)[:2]
        kind = result_type(op.text)
        bits = bits_of(shape_of(kind)[1])
        assert isinstance(x, Term) and isinstance(y, Term) and bits is not None
        if y.value is not None and op.name == "arith.shli" and y.value < 63:
            if x.op in ("const", "axis", "add", "mul"):  # numbers; anything else is bits
                self.bind(op, mul(x, const(2**y.value, bits), bits))
                return
        elif x.lo >= 0 and y.value is not None and y.value < 63:
            self.bind(op, div(x, const(2**y.value, bits), bits))
            return
        elif op.name == "arith.shrsi" and y.value is not None:
            self.bind(op, self.fresh(kind, op.name, (x.lo >> y.value, x.hi >> y.value)))
            return
        interval = (min(x.lo, 0), max(x.hi, 0)) if op.name == "arith.shrsi" else None
        if op.name == "arith.shrui" and y.value:
            interval = (0, 2 ** (bits - y.value) - 1)
        self.bind(op, self.fresh(kind, op.name, interval))

    _arith_shli = _arith_shrsi = _arith_shrui = _shift

    def _arith_extsi(self, op: Op) -> None:
        self._widened(op, -1)

    def _arith_extui(self, op: Op) -> None:
        self._widened(op, 1)

    def _widened(self, op: Op, one: int) -> None:
        x = self.operands(op.text)[0]
        bits = bits_of(shape_of(result_type(op.text))[1])
        assert isinstance(x, Term) and bits is not None
        if x.bits == 1:
            self.bind(op, choose(x, const(one, bits), const(0, bits)))
        elif one == 1 and x.lo < 0:
            self.bind(op, self.fresh(result_type(op.text), op.name, (0, 2**x.bits - 1)))
        else:
            self.bind(op, with_bits(x, bits))

    def _arith_trunci(self, op: Op) -> None:
        x = self.operands(op.text)[0]
        kind = result_type(op.text)
        bits = bits_of(shape_of(kind)[1])
        assert isinstance(x, Term) and bits is not None
        is_bits = bits < 32 or (x.op in ("sym", "load") and (x.lo, x.hi) == range_of(x.bits))
        self.bind(op, self.fresh(kind, "bits") if is_bits else with_bits(x, bits))

    def _arith_select(self, op: Op) -> None:
        condition, x, y = self.operands(op.text)[:3]
        assert isinstance(condition, Term)
        self.bind(op, self.merged(condition, x, y))

    def merged(self, condition: Term, x: Value, y: Value) -> Value:
        if isinstance(x, Pointer) and isinstance(y, Pointer):
            if x.tensor == y.tensor and not x.others and not y.others:
                return Pointer(x.tensor, choose(condition, x.place, y.place))
            left = x.changed(lambda z: z, lambda z: both(condition, z))
            right = y.changed(lambda z: z, lambda z: both(negation(condition), z))
            return left._replace(others=(*left.others, *right.all))
        return choose(condition, x, y) if isinstance(x, Term) and isinstance(y, Term) else None

    # Shapes

    def _same(self, op: Op) -> None:
        self.bind(op, self.operands(op.text)[0])

    _tt_splat = _tt_broadcast = _tt_unsplat = _ttg_convert_layout = _same

    def lanes(self, value: Value, others: dict[Term, Term]) -> Value:
        if isinstance(value, Pointer):
            return value.changed(lambda x: replaced(x, others), lambda x: replaced(x, others))
        return replaced(value, others) if isinstance(value, Term) else None

    def _tt_expand_dims(self, op: Op) -> None:
        match = re.search(r"axis = (\d+)", op.text)
        assert match is not None
        sizes, _ = shape_of(result_type(op.text))
        number = int(match[1])
        moved = {axis(i - 1, size): axis(i, size) for i, size in enumerate(sizes) if i > number and size > 1}
        self.bind(op, self.lanes(self.operands(op.text)[0], moved))

    def _tt_trans(self, op: Op) -> None:
        match = re.search(r"order = array<i32: ([\d, ]+)>", op.text)
        assert match is not None
        sizes, _ = shape_of(result_type(op.text))
        order = [int(i) for i in match[1].split(",")]
        moved = {axis(old, sizes[new]): axis(new, sizes[new]) for new, old in enumerate(order) if sizes[new] > 1}
        self.bind(op, self.lanes(self.operands(op.text)[0], moved))

    def _tt_reshape(self, op: Op) -> None:
        before, _ = shape_of(op.text.rpartition(" : ")[2].partition(" -> ")[0])
        after, _ = shape_of(result_type(op.text))
        place = const(0, 32)
        for i, size in enumerate(after):
            place = add(mul(place, const(size, 32), 32), axis(i, size), 32)
        moved, below = {}, 1
        for i in reversed(range(len(before))):
            if before[i] > 1:
                moved[axis(i, before[i])] = rem(div(place, const(below, 32), 32), const(before[i], 32), 32)
            below *= before[i]
        self.bind(op, self.lanes(self.operands(op.text)[0], moved))

    def _tt_make_range(self, op: Op) -> None:
        end, start = (int(i) for i in re.findall(r"(?:end|start) = (\d+)", op.text))
        self.bind(op, add(axis(0, end - start), const(start, 32), 32))

    def _tt_reduce(self, op: Op) -> None:
        sizes, _ = shape_of(op.text.rpartition(" : (")[2].partition(") -> ")[0].split(", ")[0])
        match = re.search(r"axis = (\d+)", op.text)
        assert match is not None
        number = sizes[int(match[1])]
        names = re.findall(r"%[\w#$-]+", op.text)
        kinds = [kind.strip() for kind in result_type(op.text).strip("()").split(", ")]
        inside = op.regions[0][0].ops
        for result, name, kind in zip(op.results, names, kinds, strict=False):
            x, interval = self.names[name], None
            if isinstance(x, Term) and len(op.results) == 1 and x.bits > 1:
                if any(i.name == "arith.addi" for i in inside):
                    least_, most_ = range_of(x.bits)
                    interval = (max(number * x.lo, least_), min(number * x.hi, most_))
                elif all(i.name in ("arith.minsi", "arith.maxsi", "tt.reduce.return") for i in inside):
                    interval = (x.lo, x.hi)
            self.names[result] = self.fresh(kind, op.name, interval)

    def _tt_scan(self, op: Op) -> None:
        x = self.operands(op.text)[0]
        kind, interval = result_type(op.text), None
        sizes, _ = shape_of(kind)
        match = re.search(r"axis = (\d+)", op.text)
        assert match is not None
        if isinstance(x, Term) and op.regions[0][0].ops[0].name == "arith.addi" and x.bits > 1:
            number = sizes[int(match[1])]
            least_, most_ = range_of(x.bits)
            interval = (max(min(x.lo, number * x.lo), least_), min(max(x.hi, number * x.hi), most_))
        self.bind(op, self.fresh(kind, op.name, interval))
