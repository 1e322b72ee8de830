"""`python -m flash_dmattn calibrate --tiles`: check and time tiles of the Triton kernels, and put the fastest into the
profile.

Each class of tiles is compiled and checked in a separate process. Processes compile in parallel, and after an illegal
access in a kernel only that process cannot use the GPU any more. Then this process times the tiles that were right.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from typing import Any, Literal, NamedTuple, TextIO

import torch
from torch import Tensor

from ..api import attention
from ..dispatch import profiles
from ..dispatch.config import BackendName, invariant
from ..problem import device_arch
from ..reference.yardstick import FLOOR, RATIO
from ..triton_kernels import preferred_tiles
from ..triton_kernels.preferred_tiles import Sizes, class_name
from .calibrate import (
    MODE,
    EventTimer,
    Instruments,
    Progress,
    Timer,
    aligned,
    device_of,
    effect,
    fail,
    former,
    instruments_on,
    new_profile,
    save,
)
from .verify import error

CHECK_SHARE = 0.8  # of the time; after it no process goes on checking
CLASS_SECONDS = 0.6  # of repetitions for each class
LEAST_GAIN = 0.02  # a tile needs it to replace the tile of the table; a smaller gain may be noise
MOST_PROCESSES = 12
_PROCESS_BYTES = 3 << 30  # GPU memory that a process may need

BATCH, NUM_HEADS, SEQLEN, SEQLEN_BIAS = 2, 8, 4096, 2048
# For each kernel, gradients for which the backward pass runs it and as little else as possible. "product" also runs
# "keys", because it needs its results.
_NEEDED: dict[str, tuple[str, ...]] = {
    "forward": (),
    "keys": ("k", "v"),
    "queries": ("q",),
    "product": ("q", "bias"),
    "bias": ("bias",),
}


class TileClass(NamedTuple):
    """The tiles of one kernel for one row of head dims, with or without a bias of one value per score."""

    kernel: str
    row: int
    has_bias: bool

    @property
    def name(self) -> str:
        """Its name in profiles."""
        return class_name(*self)

    @property
    def needed(self) -> tuple[str, ...]:
        """Inputs for which the timed pass computes gradients; none if it is the forward pass."""
        needed = _NEEDED[self.kernel]
        return (*needed, "bias") if self.kernel == "keys" and self.has_bias else needed


def _classes() -> Iterator[TileClass]:
    """Yield classes, the most common ones first: if there is little time, the last ones are not measured."""
    for rows in ((64, 128), (256,)):
        for has_bias in (False, True):
            kernels = ("forward", "keys", "queries", *(("product", "bias") if has_bias else ()))
            yield from (TileClass(kernel, row, has_bias) for row in rows for kernel in kernels)


CLASSES = {each.name: each for each in _classes()}

# Sizes of a tile -> why it cannot be used, or "" if it was right. The first tile comes from the tile table.
Verdicts = dict[Sizes, str]


def run(chosen: int | Literal["cpu"], seconds: float) -> int:
    """Calibrate the tiles of the GPU of an index; return 1 if it cannot be measured or the profile not written."""
    if invariant():
        return fail(MODE)
    device, why = device_of(chosen)
    if device is None:
        return fail(why)
    try:
        import triton  # noqa: F401
    except ImportError as raised:
        return fail(f"--tiles times kernels of Triton, which cannot be imported: {raised}")
    check = partial(check_in_processes, device.index)
    return calibrate(instruments_on(device, check, Passes(device, EventTimer(device))), seconds, sys.stdout, sys.stderr)


def calibrate(instruments: Instruments, seconds: float, stream: TextIO, progress_stream: TextIO) -> int:
    """Measure with these instruments, print the table to `stream`, and add the fastest tiles to the profile."""
    gpu, arch = instruments.gpu, instruments.arch
    known = former(gpu, arch)
    done = {} if known is None else known.tiles
    left = [each for name, each in CLASSES.items() if name not in done] or list(CLASSES.values())
    stream.write(f"{gpu}, {arch}: tiles of {len(left)} classes in about {seconds:.0f} s, most of them compiling\n")
    timed = measured(instruments, left, seconds, progress_stream)
    if not timed:
        return fail(f"no class of tiles was checked within {seconds:.0f} s; give more with --seconds")
    tiles = {name: fastest(times) for name, times in timed.items() if any(isinstance(x, float) for x in times.values())}
    stream.write(f"\n{table(timed)}\n\n")
    profile = new_profile(gpu, arch, instruments.driver)
    if known is not None:
        profile = profile._replace(rows=known.rows, wrong=known.wrong)
    status = save(profile._replace(tiles={**done, **tiles}), stream)
    missing = [each.name for each in left if each.name not in timed]
    if status == 0:
        again = f"{len(missing)} classes were not reached in {seconds:.0f} s; a second run goes on with them"
        taken = (
            "triton takes these tiles from now on; the last bits of results differ from those of other tiles, not from "
            f"run to run. {profiles.COMMAND} times the backends with them"
        )
        stream.write(f"{effect(arch, again if missing else '', 'tiles', 'triton', taken)}\n")
    return status


# Sizes of a tile -> milliseconds, or why it was not timed.
Times = dict[Sizes, "float | str"]


def measured(
    instruments: Instruments, classes: Sequence[TileClass], seconds: float, progress_stream: TextIO
) -> dict[str, Times]:
    """Return the times by class, for the classes that can be measured in these seconds."""
    clock = instruments.clock
    started = clock()
    progress = Progress(progress_stream, 2 * len(classes), clock)
    checked: dict[TileClass, Verdicts] = {}
    for each, verdicts in instruments.check(classes, CHECK_SHARE * seconds):
        progress.step(f"checked {each.name}")
        checked[each] = verdicts
    timed: dict[str, Times] = {}
    for each in (each for each in classes if each in checked):
        if clock() - started > seconds:
            break
        progress.step(f"timing {each.name}")
        budget = CLASS_SECONDS / len(checked[each])
        timed[each.name] = {
            sizes: why or _time(instruments, each, sizes, budget) for sizes, why in checked[each].items()
        }
    progress.close()
    return timed


def _time(instruments: Instruments, each: TileClass, sizes: Sizes, seconds: float) -> float | str:
    """Return milliseconds, or the message if the GPU, which other programs may use, is out of memory."""
    try:
        return instruments.measure(each, sizes, seconds)
    except torch.OutOfMemoryError as raised:
        return message_of(raised)


def message_of(raised: Exception) -> str:
    """Return an exception as one short line."""
    return " ".join(f"{type(raised).__name__}: {raised}".split())[:120]


def fastest(times: Times) -> Sizes:
    """Return the tile to use: the first, from the tile table, unless it failed or another one is clearly faster."""
    known = {sizes: x for sizes, x in times.items() if isinstance(x, float)}
    best, default = min(known, key=lambda sizes: known[sizes]), next(iter(times))
    return default if known.get(default, math.inf) * (1 - LEAST_GAIN) <= known[best] else best


def table(timed: Mapping[str, Times]) -> str:
    """Return a table of the milliseconds of each tile of each class, and which tile is taken."""
    lines = [("class", "tile: queries x keys, warps, stages", "ms", "")]
    for name, times in timed.items():
        for sizes, x in times.items():
            tile = f"{sizes[0]} x {sizes[1]}, {sizes[2]}, {sizes[3]}"
            if isinstance(x, float):
                lines.append((name, tile, f"{x:.3f}", "taken" if sizes == fastest(times) else ""))
            else:
                lines.append((name, tile, "-", x))
            name = ""
    return "\n".join(aligned(lines))


@contextlib.contextmanager
def preferring(name: str, sizes: Sizes) -> Iterator[None]:
    """Use a tile for the kernels of a class, and the tile table for other kernels."""
    preferred_tiles.prefer(lambda arch: {name: sizes})
    try:
        yield
    finally:
        preferred_tiles.prefer(profiles.tiles_in_force)


def make_call(each: TileClass, device: torch.device, shrink: int = 1) -> dict[str, Any]:
    """Make the arguments of the call of a class: random tensors in bf16.

    Args:
        each: the class.
        device: of the tensors.
        shrink: divides the length, for tests.
    """
    generator = torch.Generator(device).manual_seed(0)
    seqlen = (SEQLEN_BIAS if each.has_bias else SEQLEN) // shrink

    def normal(name: str, *shape: int) -> Tensor:
        x = torch.randn(shape, generator=generator, dtype=torch.float32, device=device).to(torch.bfloat16)
        return x.requires_grad_(name in each.needed)

    call: dict[str, Any] = {name: normal(name, BATCH, seqlen, NUM_HEADS, each.row) for name in ("q", "k", "v")}
    if each.has_bias:
        # With one bias for the whole batch a separate kernel, "bias", computes dbias, and "queries" computes dq.
        batch = 1 if each.kernel in ("queries", "bias") else BATCH
        call["bias"] = normal("bias", batch, NUM_HEADS, seqlen, seqlen)
    else:
        call["is_causal"] = True
    return call


def make_pass(each: TileClass, call: Mapping[str, Any], backend: BackendName) -> Callable[[], tuple[Tensor, ...]]:
    """Return a function that runs the pass of a call with the kernel of a class, and returns its results."""

    def forward() -> tuple[Tensor, ...]:
        results = attention(**call, return_lse=True, backend=backend)
        assert isinstance(results, tuple)
        return results

    if not each.needed:
        return forward
    out, leaves = forward()[0], [call[name] for name in each.needed]
    # Not a gradient of ones, for which ds would be zero except for rounding.
    generator = torch.Generator(out.device).manual_seed(1)
    dout = torch.randn(out.shape, generator=generator, dtype=torch.float32, device=out.device).to(out.dtype)
    return lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True)


def check(each: TileClass, candidates: Sequence[Sizes], device: torch.device, shrink: int = 1) -> Verdicts:
    """Compare the errors of each tile with the errors of the first one, by the rule of accuracy.

    Errors are differences from eager PyTorch in fp32. A tile is right if its error is at most RATIO times the error of
    the first tile, plus FLOOR. After a tile that made the GPU unusable, the remaining tiles get no verdict.
    """
    call = make_call(each, device, shrink)
    exact_call = dict(call)
    for name, x in call.items():
        if isinstance(x, Tensor):
            exact_call[name] = x.detach().float().requires_grad_(x.requires_grad)
    exact = [x.detach() for x in make_pass(each, exact_call, "eager")()]
    verdicts: Verdicts = {}
    limits: list[float] = []
    run: Callable[[], tuple[Tensor, ...]] | None = None
    for sizes in candidates:
        try:
            with preferring(each.name, sizes):
                run = run or make_pass(each, call, "triton")
                errors = [error(x.detach(), y) for x, y in zip(run(), exact, strict=True)]
        except Exception as raised:  # any failure of a tile is a result here
            verdicts[sizes] = message_of(raised)
            if not limits or _is_broken(device):
                break
            continue
        limits = limits or [RATIO * x + FLOOR for x in errors]
        wrong = [f"{x:.1e} off, with a limit of {y:.1e}" for x, y in zip(errors, limits) if not x <= y]
        verdicts[sizes] = f"wrong: {wrong[0]}" if wrong else ""
    return verdicts


def _is_broken(device: torch.device) -> bool:
    """Return whether this process cannot use the GPU any more, after a kernel failed."""
    try:
        torch.cuda.synchronize(device)
    except RuntimeError:
        return True
    return False


class Passes:
    """Measures the kernel of a class: `passes(class, sizes, seconds)` returns milliseconds; keeps the last tensors."""

    def __init__(self, device: torch.device, timer: Timer, shrink: int = 1) -> None:
        self.device, self.timer, self.shrink = device, timer, shrink
        self.each: TileClass | None = None
        self.run: Callable[[], object] = lambda: None

    def __call__(self, each: TileClass, sizes: Sizes, seconds: float) -> float:
        with preferring(each.name, sizes):
            if each != self.each:
                self.run = make_pass(each, make_call(each, self.device, self.shrink), "triton")
                self.each = each
            self.run()
            return self.timer(self.run, seconds)


def check_in_processes(
    index: int, classes: Sequence[TileClass], seconds: float
) -> Iterator[tuple[TileClass, Verdicts]]:
    """Check each class in a separate process; cores and GPU memory limit the number of processes at once."""
    free, _ = torch.cuda.mem_get_info(index)
    count = max(1, min(os.cpu_count() or 1, MOST_PROCESSES, free // _PROCESS_BYTES))
    deadline = time.monotonic() + seconds

    def verdicts_of(each: TileClass) -> Verdicts | None:
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            return None
        command = [sys.executable, "-m", __name__, str(index), each.name]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=remaining)
        except subprocess.TimeoutExpired:
            return None
        return read_verdicts(done.stdout)

    with ThreadPoolExecutor(count) as pool:
        waiting = {pool.submit(verdicts_of, each): each for each in classes}
        try:
            for ended in as_completed(waiting):
                verdicts = ended.result()
                if verdicts:
                    yield waiting[ended], verdicts
        finally:
            pool.shutdown(wait=False, cancel_futures=True)  # otherwise Ctrl-C would wait until all classes are checked


def read_verdicts(text: str) -> Verdicts | None:
    """Return the verdicts that a process has printed; None if it has not printed any."""
    lines = text.splitlines()
    return {tuple(sizes): why for sizes, why in json.loads(lines[-1])} if lines else None


def main(index: str, name: str) -> None:
    """Check a class on the GPU of an index, and print the verdicts as one line of JSON."""
    from ..triton_kernels.tile_table import candidates

    each, device = CLASSES[name], torch.device("cuda", int(index))
    torch.cuda.set_device(device)
    tiles = candidates(each.kernel, each.row, device_arch(device), each.has_bias)
    print(json.dumps(list(check(each, [tile[:4] for tile in tiles], device).items())))


if __name__ == "__main__":
    main(*sys.argv[1:])
