"""Run random calls in one place, against the fp64 formula: `run_calls.py PLACE FEATURES FIRST COUNT [cpu]`.

PLACE is a backend, whose kernels run on a GPU, or a pair of them such as "cuda:triton". "interpreter" is Triton's
interpreter with the Triton kernels. A file that `emulation/build.py` has written is the emulated GPU with the CUDA
kernels. FEATURES is a key of `FEATURES`. COUNT calls run from number FIRST on; a call that a rule refuses does not
count. With "cpu" results are compared on the CPU, so that a sanitizer watches little but the kernels. With
`--data uncentred` every call has data that are not centred (`Case.data`). This is a process of its own, because places
change the backend.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
if __name__ == "__main__" and sys.argv[1:2] == ["interpreter"]:
    os.environ["TRITON_INTERPRET"] = "1"  # Triton decides at its import

import cache_write_calls  # noqa: E402
import draws  # noqa: E402
import kernel_calls  # noqa: E402
import sequence_calls  # noqa: E402
import sequence_pack_calls  # noqa: E402
import tangent_calls  # noqa: E402
import torch  # noqa: E402
import tree_calls  # noqa: E402
from accuracy import assert_accurate, run  # noqa: E402
from cases import DEVICE, Inputs  # noqa: E402
from descriptors import descriptors_wherever_they_serve  # noqa: E402
from draws import Drawn, placed, with_dead_keys_nan  # noqa: E402
from layouts import rearranged  # noqa: E402
from outcomes import outcome_of, report  # noqa: E402
from sequence_calls import SequenceCall, spoiled  # noqa: E402

import flash_dmattn  # noqa: E402
from flash_dmattn.backends.cuda import passes  # noqa: E402
from flash_dmattn.dispatch.registry import BACKENDS  # noqa: E402
from flash_dmattn.masks.prepared.storage import IntervalMask  # noqa: E402


class Check(NamedTuple):
    """A call in words, its check, and checks of simpler calls, one step each; see `fuzz.py`."""

    told: str
    run: Callable[[], object]
    simpler: Callable[[], Iterator[Check]] = lambda: iter(())


class Place:
    """A backend on the device of the tests, or a pair of them. `kind` decides the sizes of calls."""

    kind = "gpu"

    def __init__(self, backend: str, device: str = DEVICE, backward: str | None = None) -> None:
        self.backend, self.device, self.compares_on = backend, device, device
        self.passes = backend if backward is None else (backend, backward)

    def prepare(self, features: str, number: int) -> str:
        """Set up the machine for a call; in words, what it is."""
        return ""

    def finish(self) -> None:
        """Check what a call has left behind."""

    def repeats(self, drawn: Drawn) -> bool:
        """Whether a call runs a second time, maybe in another order of blocks."""
        return drawn.deterministic


class Interpreter(Place):
    """Triton's interpreter, on tiles of several shapes, and as if the GPU had more SMs than the call has programs."""

    kind = "interpreter"

    def __init__(self) -> None:
        super().__init__("triton", "cpu")
        import interpreter

        self.machine = interpreter
        interpreter.admit_cpu()
        interpreter.guard_outputs()

    def prepare(self, features: str, number: int) -> str:
        from flash_dmattn.triton_kernels import plan_pairs, plan_slots, short_calls

        machine, rng = self.machine, random.Random(f"machine {number}")
        short_calls.DTYPES = machine.EVERY_DTYPE if features == "short" else ()
        short_calls.TWO_RUNS_FROM = rng.choice((1, 1, 1024))
        plan_slots.PROGRAMS_PER_SM = plan_slots.PROGRAMS_WITH_SLOTS = rng.choice((1, 4, 8))
        settings = [rng.choice(machine.TILES), rng.choice(machine.NUM_SMS)]
        if features == "intervals":
            # Whole tiles of a mask are 128 x 128, and small blocks of them take the interpreter too long.
            settings = [machine.Tile(128, 64, 4, 1), 1]
        elif features == "wide":
            plan_pairs.SPACE = machine.SPACES[number % len(machine.SPACES)]
        elif features == "dense":
            settings += [rng.choice(machine.PARTS_BYTES), rng.choice(machine.FEW_PAIRS)]
        machine.set_up(*settings)
        return f"set_up{tuple(settings)}, {plan_slots.PROGRAMS_PER_SM} programs, pairs in {plan_pairs.SPACE} bytes"

    def finish(self) -> None:
        self.machine.assert_margins()


class EmulatedGpu(Place):
    """The emulated GPU of `emulation/`: of some number of SMs, and with its warps in some order."""

    kind = "emulated"

    def __init__(self, file: Path) -> None:
        super().__init__("cuda", "cpu")
        import emulated_cuda

        self.machine = emulated_cuda
        emulated_cuda.admit_cpu(file)

    def prepare(self, features: str, number: int) -> str:
        machine, self._rng = self.machine, random.Random(f"machine {number}")
        passes.NUM_KV_SPLITS = self._rng.choice(machine.NUM_KV_SPLITS)
        passes.NUM_DBIAS_CHUNKS = self._rng.choice(machine.NUM_DBIAS_CHUNKS)
        self._num_sms = self._rng.choice(machine.NUM_SMS)
        self._reorder()
        return f"{self._num_sms} SMs, {passes.NUM_KV_SPLITS} parts, {passes.NUM_DBIAS_CHUNKS} chunks"

    def repeats(self, drawn: Drawn) -> bool:
        self._reorder()
        return self._rng.random() < 0.3

    def _reorder(self) -> None:
        self.machine.configure(self._num_sms, self._rng.randrange(2**30))


def place_of(name: str) -> Place:
    """The place that a word or a file names."""
    if name == "interpreter":
        return Interpreter()
    if {"cuda", "triton"} & {*name.split(":")} and DEVICE == "cpu":
        raise SystemExit(f"{name} needs a GPU, and torch finds none")  # its rules would refuse every call
    forward, _, backward = name.partition(":")
    if forward in BACKENDS:
        return Place(forward, backward=backward or None)
    return EmulatedGpu(Path(name))


def check_case(place: Place, drawn: Drawn, mask: IntervalMask | None = None, *, inputs: Inputs | None = None) -> Check:
    """Every result is right, with no write outside of it; deterministic results have the same bits again.

    Args:
        place: of the call.
        drawn: the call.
        mask: an interval mask for it; dead keys hold NaN if k and v follow the order of the mask.
        inputs: its tensors, by default from its case.
    """
    case = drawn.case

    def check() -> None:
        x = case.build(place.device) if inputs is None else inputs
        if mask is None:
            operands = placed(drawn, x)
        else:
            x = replace(x, mask=mask.unpacked().to(place.device))
            operands = replace(with_dead_keys_nan(case, mask, x, place.passes), mask=mask.to(place.device))
        attention = partial(
            flash_dmattn.attention, return_lse=True, backend=place.passes, deterministic=drawn.deterministic
        )
        with descriptors_wherever_they_serve() if drawn.descriptors else nullcontext():
            results = run(attention, case, operands)
            place.finish()
            there = {name: None if x is None else moved(x, place.compares_on) for name, x in results.items()}
            assert_accurate(there, case.with_(key_device=place.device), on(place.compares_on, x))
            if not place.repeats(drawn):
                return
            again = run(attention, case, operands)
        # In one order whatever is asked for, if no atomics sum it.
        summed = ("dbias",) if mask is None and case.bias in draws.PER_SCORE else ()
        for name, x in results.items():
            if x is not None and (drawn.deterministic or name in ("out", "lse", *summed)):
                assert torch.allclose(x, again[name], rtol=0, atol=0, equal_nan=True), f"{name} moves"

    def simpler() -> Iterator[Check]:
        if mask is None and inputs is None:
            yield from (check_case(place, each) for each in draws.simpler(drawn))

    return Check(f"{case.repro()}\n  {drawn[1:]}, {mask}", check, simpler)


def moved(x: torch.Tensor, device: str) -> torch.Tensor:
    """Return x on the place that compares.

    Its memory is copied as it lies: a kernel that copies x would read what TMA has stored, and initcheck does not see
    that.
    """
    if x.device.type == device:
        return x
    assert device == "cpu"
    memory = x.untyped_storage().cpu()
    return torch.empty(0, dtype=x.dtype).set_(memory, x.storage_offset(), x.shape, x.stride())


def leave_tma_to_the_host() -> None:
    """Have the host copy rows that TMA has stored, where the cuda backend has torch copy them; see `moved`."""
    passes.copy_unpadded = lambda x, padded: x.copy_(moved(padded, "cpu")[..., : x.shape[3]])


def on(device: str, inputs: Inputs) -> Inputs:
    return rearranged(inputs, lambda x: x.to(device))


def dense(place: Place, number: int) -> Check | None:
    """A mask and a bias of any form, in any memory layout."""
    if place.kind == "interpreter":
        return check_case(place, draws.asking(draws.draw_interpreted(number), place.backend))
    drawn = draws.DRAWS[place.backend](number)
    if place.kind == "gpu":
        return check_case(place, drawn)
    drawn = drawn._replace(case=draws.smaller(drawn.case))
    return check_case(place, drawn) if place.machine.is_built(drawn.case) else None


def short(place: Place, number: int) -> Check:
    """Many entries with short rows, and biases that entries or heads share."""
    draw = draws.draw_short_interpreted if place.kind == "interpreter" else draws.draw_short
    drawn = draw(number)
    return check_case(place, draws.asking(drawn, place.backend))


def kernels(place: Place, number: int) -> Check:
    """One of the few calls that reach every kernel."""
    calls = kernel_calls.calls_of(place.backend)
    call, _ = calls[number % len(calls)]
    told, check, _ = check_case(place, call.drawn)

    def check_with_settings() -> None:
        with call.settings():
            check()

    return Check(f"{told}, {call[1:]}", check_with_settings)


def intervals(place: Place, number: int) -> Check:
    drawn, mask = draws.draw_intervals(number, draws.INTERVAL_SIZES[place.kind])
    return check_case(place, draws.asking(drawn, place.backend), mask)


def wide(place: Place, number: int) -> Check:
    if place.kind == "interpreter":
        lengths = {"seqlen_q": (1, 33, 130, 200, 290), "seqlen_k": (1, 17, 40, 140, 200)}
        sizes = {**draws.INTERPRETED, **lengths, "group": (1, 2), "num_heads_k": (1, 1, 2)}
        drawn = draws.draw_wide(number, sizes, (torch.float16,))._replace(deterministic=False)
        return check_case(place, draws.asking(drawn, place.backend))
    drawn = draws.draw_wide(number, draws.KERNELS, (torch.bfloat16, torch.float16))
    return check_case(place, draws.asking(drawn, place.backend))


INTERPRETED_LENGTHS = (0, 1, 5, 16, 17, 31, 32, 33, 40, 70)
SKEWED = (1, 1, 1, 1, 2, 2, 5, 100)  # so that a tile of packed rows is searched for
INTERPRETED_DIMS = (4, 16, 20)


def sequences(place: Place, number: int) -> Check:
    """Sequences in any layout, with NaN in all rows of none."""
    if place.backend == "cuda":
        call = sequence_calls.draw_cuda(number)
    elif place.kind == "interpreter":
        layout = random.Random(number).choice(sequence_calls.LAYOUTS)
        lengths = SKEWED if layout == "packed" and number % 2 else INTERPRETED_LENGTHS
        is_wide = number % 10 == 7
        dtypes = (torch.float16,) if is_wide else place.machine.EVERY_DTYPE
        call = sequence_calls.draw(number, layout, lengths, dtypes, (264, 512) if is_wide else INTERPRETED_DIMS)
    else:
        call = sequence_calls.draw(number, **by_backend(place, number, sequence_calls.ON_GPU))
    return check_sequences(place, sequence_calls.asking(call, place.backend))


def by_backend(place: Place, number: int, on_gpu: dict[str, Any]) -> dict[str, Any]:
    """The choices of a draw: PyTorch has no tiles, so short rows will do, in fp64 too; triton has wide head dims."""
    if place.backend in ("eager", "reference"):
        return {}
    is_wide = place.backend == "triton" and number % 8 == 7
    return on_gpu | ({"head_dims": (320, 512), "dtypes": (torch.bfloat16, torch.float16)} if is_wide else {})


def check_sequences(place: Place, call: SequenceCall) -> Check:
    """Every result is right, with no write outside of it."""

    def check() -> None:
        results = sequence_calls.run(spoiled(call), place.passes)
        place.finish()
        sequence_calls.assert_accurate(results, call)

    def simpler() -> Iterator[Check]:
        yield from (check_sequences(place, each) for each in sequence_calls.simpler(call))

    return Check(f"{call.told}, {call.flags}, gradients of {call.needs_grad}", check, simpler)


def trees(place: Place, number: int) -> Check:
    """Sequences with trees of new tokens; in the interpreter a chain has the bits of causality, too."""
    if place.kind != "interpreter":
        return check_sequences(place, tree_calls.draw(number, **by_backend(place, number, tree_calls.ON_GPU)))
    layout = random.Random(number).choice(("packed", "padded", "paged", "paged", "paged_packed"))
    call = tree_calls.draw(
        number,
        layout,
        # Every other one has a draft behind many keys, whose parts programs share.
        lengths=(1, 3, 5) if number % 2 else (0, 1, 5, 17, 33),
        lengths_k=(0, 1, 17, 32, 33, 70, 130),
        dtypes=place.machine.EVERY_DTYPE,
        head_dims=INTERPRETED_DIMS,
    )
    told, is_accurate, _ = check_sequences(place, call)

    def check() -> None:
        is_accurate()
        pair = (replace(each, needs_grad=()) for each in tree_calls.as_chain(spoiled(call)))
        chain, causal = (sequence_calls.run(each, "triton") for each in pair)
        for name in ("out", "lse"):
            assert torch.equal(chain[name], causal[name]), f"{name} of a chain is not that of causality"

    return Check(told, check)


def tangents(place: Place, number: int) -> Check | None:
    """A call in forward mode, every third with sequences, unless another backend computes its tangents."""
    rng, drawn = random.Random(number), None
    if number % 3 == 2:
        layout = rng.choice(sequence_calls.LAYOUTS)
        sizes = by_backend(place, 0, sequence_calls.ON_GPU)
        if place.kind == "interpreter":
            sizes = {"lengths": INTERPRETED_LENGTHS, "dtypes": place.machine.EVERY_DTYPE}
            sizes["head_dims"] = INTERPRETED_DIMS
        call = tangent_calls.sequences_call(number, sequence_calls.draw(number, layout, **sizes))
    elif number % 12 == 1:
        drawn, mask = draws.draw_intervals(number, draws.INTERVAL_SIZES[place.kind])
        call = tangent_calls.dense_call(number, drawn, place.device)
        call.others["mask"] = mask.to(place.device)
    else:
        drawn = draws.draw_interpreted(number) if place.kind == "interpreter" else draws.DRAWS[place.backend](number)
        call = tangent_calls.dense_call(number, drawn, place.device)
    if call.explain(place.backend).tangents != place.backend:
        return None

    def check() -> None:
        with ExitStack() as ways:
            if drawn is not None and drawn.descriptors:
                ways.enter_context(descriptors_wherever_they_serve())
            if place.kind == "interpreter" and number % 2:
                ways.enter_context(rows_of_tangents_apart())
            results = call.run(place.backend)
        place.finish()
        tangent_calls.assert_accurate(results, call)

    return Check(f"{call.told}, tangents of {list(call.tangents)}", check)


@contextmanager
def rows_of_tangents_apart() -> Iterator[None]:
    """Have kernels read tangents of q, k and v with strides of their own, with NaN between rows."""
    from flash_dmattn.triton_kernels import plan_tangents

    def apart(x: torch.Tensor | None, by: int) -> torch.Tensor | None:
        return x if x is None else torch.nn.functional.pad(x, (0, by), value=torch.nan)[..., :-by]

    def forward(x: Any, own: Any, *rest: Any) -> None:
        run(
            x,
            own._replace(**{name: apart(getattr(own, name), by) for name, by in (("q", 1), ("k", 2), ("v", 3))}),
            *rest,
        )

    run = plan_tangents.forward
    with mock.patch.object(plan_tangents, "forward", forward):
        yield


def appends(place: Place, number: int) -> Check | None:
    """Writes to caches, every third by wrong tables."""
    from flash_dmattn.triton_kernels import append

    call = cache_write_calls.draw(number, number % 3 == 2)
    if call.write.is_empty:
        return None
    return Check(call.told, lambda: cache_write_calls.assert_written(call, append.write))


def packs(place: Place, number: int) -> Check:
    """Masks of sequences, packed by kernels and by PyTorch."""
    return Check(*sequence_pack_calls.check_of(number))


FEATURES: dict[str, Callable[[Any, int], Check | None]] = {
    "dense": dense,
    "short": short,
    "kernels": kernels,
    "intervals": intervals,
    "wide": wide,
    "sequences": sequences,
    "trees": trees,
    "tangents": tangents,
    "appends": appends,
    "packs": packs,
}


def run_number(place: Place, features: str, number: int) -> tuple[Check, str | None] | None:
    """Run the call of a number. Return its check, and None or what failed; only None if a rule refuses the call."""
    check = FEATURES[features](place, number)
    if check is None:
        return None
    machine = place.prepare(features, number)
    try:
        return check, outcome_of(check.run, f"number {number}: {check.told}, {machine}")
    except flash_dmattn.BackendUnsupportedError:
        return None


def outcomes(place: Place, features: str, first: int, count: int) -> Iterator[str | None]:
    """Run calls from a number on until so many were served, and yield their outcomes."""
    for number in itertools.count(first):
        if count == 0:
            return
        ran = run_number(place, features, number)
        if ran is not None:
            yield ran[1]
            count -= 1


def main() -> int:
    """Run the calls of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("place")
    parser.add_argument("features", choices=FEATURES)
    parser.add_argument("first", type=int)
    parser.add_argument("count", type=int)
    parser.add_argument("compares_on", nargs="?", choices=("cpu",))
    parser.add_argument("--data", choices=draws.SHARES, default="any")
    options = parser.parse_args()
    draws.UNCENTRED = draws.SHARES[options.data]
    place = place_of(options.place)
    if options.compares_on is not None:
        place.compares_on = options.compares_on
        leave_tma_to_the_host()
    return report(outcomes(place, options.features, options.first, options.count))


if __name__ == "__main__":
    sys.exit(main())
