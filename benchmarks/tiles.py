"""Times tile choices of the Triton kernels, proposes the rows of their table that are faster, and may write them.

    python -m benchmarks sweep tiles --list
    python -m benchmarks sweep tiles d256 fp32-d64 --kernels forward keys
    python -m benchmarks sweep tiles d128 --write
    python -m benchmarks sweep tiles --small     # the tiles of this GPU beside those that serve any GPU

Every choice is checked against the choice in the table before it is timed. Compiling takes longest, so processes share
it. The tiles of the CUDA kernels are constants of their templates (csrc/sm90/forward/traits.h), chosen by hand.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

from flash_dmattn.problem import MaskView

TABLE = Path(__file__).resolve().parent.parent / "triton_kernels" / "tile_table.py"
SHARED_BYTES = 232448  # of one program on sm_90
TOLERANCE = {torch.bfloat16: 1e-2, torch.float32: 1e-5}


class Case(NamedTuple):
    """A row of a table, and the call that decides it."""

    table: str
    row: int
    batch: int
    heads: int
    heads_k: int
    seqlen: int
    head_dim: int
    is_causal: bool = False
    mask: str = ""
    bias: str = ""
    dtype: torch.dtype = torch.bfloat16


CASES = {
    "d32": Case("_SM90", 32, 4, 32, 32, 4096, 32),
    "d64": Case("_SM90", 64, 4, 32, 32, 4096, 64),
    "d128": Case("_SM90", 128, 4, 16, 16, 4096, 128),
    "d256": Case("_SM90", 256, 4, 8, 8, 4096, 256),
    "bias-d64": Case("_SM90_BIAS", 64, 4, 16, 16, 2048, 64, bias="full"),
    "bias-d128": Case("_SM90_BIAS", 128, 1, 16, 16, 4096, 128, bias="full"),
    "shared-bias-d64": Case("_SM90_BIAS", 64, 8, 16, 16, 2048, 64, bias="shared"),
    "tiles-d64": Case("_SM90_TILES", 64, 1, 16, 4, 16384, 64, mask="blocks"),
    "tiles-d128": Case("_SM90_TILES", 128, 1, 16, 4, 16384, 128, mask="blocks"),
    "keys-d64": Case("_SM90_KEYS", 64, 8, 16, 16, 4096, 64, mask="keys"),
    "keys-d128": Case("_SM90_KEYS", 128, 8, 16, 16, 4096, 128, mask="keys"),
    "fp32-d64": Case("_SM90_FP32", 64, 2, 8, 8, 2048, 64, dtype=torch.float32),
    "fp32-d128": Case("_SM90_FP32", 128, 2, 8, 8, 2048, 128, dtype=torch.float32),
    "d512": Case("_SM90_WIDE", 512, 1, 32, 32, 4096, 512, is_causal=True),
    "bias-d512": Case("_SM90_WIDE", 512, 1, 8, 8, 4096, 512, bias="full"),
    "shared-bias-d512": Case("_SM90_WIDE", 512, 4, 8, 8, 2048, 512, bias="shared"),
}
# Classes without a row of their own in the tables of sm_90, which `--small` times as well.
OTHERS = {
    **{f"causal-d{d}": Case("", d, 2, 2048 // d, 2048 // d, 4096, d, is_causal=True) for d in (64, 128, 256)},
    "bias-d256": Case("", 256, 1, 8, 8, 2048, 256, bias="full"),
    "shared-bias-d128": Case("", 128, 4, 16, 16, 2048, 128, bias="shared"),
    "shared-bias-d256": Case("", 256, 4, 8, 8, 2048, 256, bias="shared"),
    "tiles-d256": Case("", 256, 1, 8, 4, 8192, 256, mask="blocks"),
    "keys-d256": Case("", 256, 4, 8, 8, 4096, 256, mask="keys"),
}
KERNELS = ("forward", "keys", "queries", "product", "bias")


def kernels_of(case: Case) -> tuple[str, ...]:
    """Return the kernels that a case runs."""
    if case.head_dim > 256:  # whose gradients take the tiles of `pair_tiles`
        return ("forward", "bias") if case.bias == "shared" else ("forward",)
    return ("forward", "keys", *{"full": ("product",), "shared": ("queries", "bias")}.get(case.bias, ("queries",)))


def candidates(case: Case, kernel: str) -> Iterator[tuple[int, int, int, int]]:
    """Yield tiles that may be good: registers hold their sums and scores and are well used, and their stages fit."""
    width = case.dtype.itemsize
    for block_m, block_n, num_warps, num_stages in product((32, 64, 128), (32, 64, 128), (4, 8), (1, 2, 3, 4)):
        threads = 32 * num_warps
        scores = block_m * block_n / threads
        is_wide = case.head_dim > 256
        rows = {"keys": 2 * block_n, "bias": 0}.get(kernel, block_m)  # whose sums are kept
        streamed = {"keys": block_m, "bias": block_m + block_n}.get(kernel, block_n)
        # With 128 queries each program of the forward kernel has half of the columns of v.
        columns = case.head_dim // 2 if is_wide and kernel == "forward" and block_m == 128 else case.head_dim
        shared = streamed * case.head_dim * width * (1 if kernel == "product" else 2) * num_stages
        if (4 if is_wide else 8) <= scores <= 64 and rows * columns / threads <= 160 and shared <= SHARED_BYTES:
            yield block_m, block_n, num_warps, num_stages


def inputs(case: Case) -> tuple[list[Tensor], MaskView, Tensor | None]:
    """q, k, v, dout; the mask packed; the bias."""
    from flash_dmattn import masks

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=case.dtype, device="cuda", generator=generator)

    generator = torch.Generator("cuda").manual_seed(0)
    c = case
    rows = [random(c.batch, c.seqlen, heads, c.head_dim) for heads in (c.heads, c.heads_k, c.heads_k, c.heads)]
    packed = MaskView()
    if c.mask == "blocks":
        blocks = torch.rand(1, c.heads_k, c.seqlen // 128, c.seqlen // 128, device="cuda", generator=generator) < 0.1
        packed = masks.PreparedMask.from_blocks(blocks, 128, c.seqlen, c.seqlen).view
    elif c.mask == "keys":
        lengths = torch.randint(1, c.seqlen + 1, (c.batch,), device="cuda", generator=generator)
        packed = masks.PreparedMask.from_mask(
            masks.padding_mask(lengths, c.seqlen), seqlen_q=c.seqlen, reorder=False
        ).view
    batch = {"full": c.batch, "shared": 1}.get(c.bias)
    return rows, packed, None if batch is None else random(batch, c.heads, c.seqlen, c.seqlen)


def runner(case: Case, kernel: str, tensors: Any) -> Callable[[], list[Tensor]]:
    """Return a function that runs one kernel of a case with the current tile."""
    from flash_dmattn.problem import Flags
    from flash_dmattn.triton_kernels import plan_backward, plan_forward
    from flash_dmattn.triton_kernels.backward_keys import NO_DBIAS, STORE
    from flash_dmattn.triton_kernels.plan import Call

    (q, k, v, dout), packed, bias = tensors
    flags = Flags(-1, 0 if case.is_causal else -1, case.head_dim**-0.5, 0.0, False)
    call = Call(q, k, v, packed, bias, flags)
    out, lse = torch.empty_like(q), q.new_empty(case.batch, case.heads, case.seqlen, dtype=torch.float32)
    run = plan_forward.plan_forward(call)
    if kernel == "forward":
        return lambda: [run(q, k, v, packed, bias, None, out, lse, None), out][1:]
    run(q, k, v, packed, bias, None, out, lse, None)
    delta_of = plan_backward.plan_delta(call, dout, None, call.has_few_keys)
    read = (q, k, v, bias, dout, *delta_of(dout, out, None, lse, None))
    if kernel == "keys":
        kind = STORE if case.bias == "full" else NO_DBIAS
        keys = plan_backward.plan_keys(call, dout, True, True, kind.value)
        return lambda: [x for x in keys(read, packed, None, None) if x is not None]
    if kernel == "product":
        _, _, dbias = plan_backward.plan_keys(call, dout, True, True, STORE.value)(read, packed, None, None)
        queries_of = plan_backward.plan_product(call, bias)
        return lambda: [queries_of(q, k, dbias, packed)]
    if kernel == "bias":
        shared = plan_backward.plan_bias(call, dout, bias)
        return lambda: [shared(read, packed, None, None, None)]
    queries, dq = plan_backward.plan_queries(call, dout), torch.empty_like(q)
    return lambda: [queries(read, packed, None, None, None, dq), dq][1:]


def with_tile(case: Case, kernel: str, tile: tuple[int, ...], tensors: Any) -> Callable[[], list[Tensor]]:
    """Return the same with a tile of our choice."""
    from flash_dmattn.triton_kernels import plan, tile_table

    plan.tile_of = lambda name, *a, **b: tile_table.Tile(*tile) if name == kernel else tile_table.tile_of(name, *a, **b)
    try:
        return runner(case, kernel, tensors)
    finally:
        plan.tile_of = tile_table.tile_of


def jobs(names: list[str], kernels: list[str]) -> list[tuple[str, str, tuple[int, int, int, int]]]:
    """Everything to try, in order."""
    return [(n, k, t) for n in names for k in kernels_of(CASES[n]) if k in kernels for t in candidates(CASES[n], k)]


def compile_share(chosen: list[tuple[str, str, Any]], index: int, count: int) -> None:
    """Compile every count-th job into Triton's cache."""
    made: dict[str, Any] = {}
    for name, kernel, tile in chosen[index::count]:
        if name not in made:
            made = {name: inputs(CASES[name])}
        try:
            with_tile(CASES[name], kernel, tile, made[name])()
        except Exception as error:  # a tile that cannot run is reported where it is timed
            print(f"{name} {kernel} {tile}: {str(error).splitlines()[0][:100]}", file=sys.stderr)


def sweep(names: list[str], kernels: list[str], processes: int) -> dict[tuple[str, str], list[tuple[float, Any]]]:
    """Return milliseconds of every tile of every case and kernel, fastest first; a table is printed as it grows."""
    from triton.testing import do_bench

    started = time.monotonic()
    chosen = [*names, "--kernels", *kernels, "--processes", str(processes)]
    command = [sys.executable, "-m", "benchmarks", "sweep", "tiles", *chosen]
    shares = [subprocess.Popen([*command, "--share", str(i)], stderr=subprocess.DEVNULL) for i in range(processes)]
    for share in shares:
        share.wait()
    print(f"compiled in {time.monotonic() - started:.0f} s", flush=True)
    timed: dict[tuple[str, str], list[tuple[float, Any]]] = {}
    for name in names:
        case, tensors = CASES[name], inputs(CASES[name])
        for kernel in (k for k in kernels_of(case) if k in kernels):
            wanted = [x.clone() for x in runner(case, kernel, tensors)()]
            times = timed[name, kernel] = []
            for tile in candidates(case, kernel):
                try:
                    run = with_tile(case, kernel, tile, tensors)
                    error = max(float((x - y).norm() / y.norm()) for x, y in zip(run(), wanted, strict=True))
                    if not error < TOLERANCE[case.dtype]:
                        print(f"{name} {kernel} {tile}: wrong, {error:.0e} from the tile of the table", flush=True)
                        continue
                    times.append((do_bench(run, warmup=5, rep=30, return_mode="median"), tile))
                except Exception as error:
                    print(f"{name} {kernel} {tile}: {str(error).splitlines()[0][:100]}", flush=True)
            times.sort()
            print(f"{name} {kernel}: " + "; ".join(f"{ms:.3f} {tile}" for ms, tile in times[:5]), flush=True)
    return timed


def compare_with_small() -> None:
    """Print the milliseconds of kernels with the tile that serves any GPU, and with this GPU's, where these differ."""
    from triton.testing import do_bench

    from flash_dmattn.triton_kernels import plan, tile_table

    line = "{:18} {:8} {:>16} {:>8} {:>16} {:>8} {:>6}"
    print(line.format("case", "kernel", "of any GPU", "ms", "of this GPU", "ms", "ratio"), flush=True)
    for name, case in {**CASES, **OTHERS}.items():
        if case.dtype == torch.float32 or case.head_dim > max(tile_table._SMALL):
            continue
        tensors = inputs(case)
        small = next(tile for row, tile in tile_table._SMALL.items() if case.head_dim <= row)
        for kernel in kernels_of(case):
            own: dict[str, Any] = {}

            def recorded(kind: str, *call: Any, own: dict[str, Any] = own, **more: Any) -> Any:
                own[kind] = tile_table.tile_of(kind, *call, **more)
                return own[kind]

            with mock.patch.object(plan, "tile_of", recorded):
                run = runner(case, kernel, tensors)
            if own[kernel] == small:
                continue
            milliseconds = []
            for each in (with_tile(case, kernel, small, tensors), run):
                each()
                milliseconds.append(do_bench(each, warmup=20, rep=100, return_mode="median"))
            tiles = ["{}x{} {} {}".format(*tile) for tile in (small, own[kernel])]
            before, now = milliseconds
            print(
                line.format(name, kernel, tiles[0], f"{before:.3f}", tiles[1], f"{now:.3f}", f"{now / before:.2f}"),
                flush=True,
            )


def rewritten(source: str, table: str, kernel: str, row: int, tile: tuple[int, ...], reason: str) -> str:
    """Return the table's source with one row replaced; a table without kernels has one row for all of them."""
    start = source.index(f"\n{table} = {{")
    inner = source.find(f'\n    "{kernel}": {{', start)
    end = source.index("\n}", start)
    start = inner if 0 <= inner < end else start
    replaced, count = re.subn(
        rf"(\n\s*{row}: )Tile\([^)]*\),[^\n]*", rf"\g<1>Tile{tile},  # {reason}", source[start:end], count=1
    )
    if not count:
        raise ValueError(f"{table} has no row {row} for {kernel!r} in {TABLE}; add one and run again")
    return source[:start] + replaced + source[end:]


def proposal(name: str, kernel: str, times: list[tuple[float, Any]]) -> tuple[tuple[int, ...], str]:
    """Return the fastest tile of a case and kernel, and the comment for the table."""
    (ms, tile), *others = times
    reason = f"{ms:.3f} ms, {name} of benchmarks/tiles.py"
    return tile, reason + (f"; {others[0][0]:.3f} for {others[0][1]}" if others else "")


def run(args: argparse.Namespace) -> int:
    """Search what the arguments choose, and print the rows that the fastest tiles make."""
    names = args.names or list(CASES)
    if args.list:
        for name, case in CASES.items():
            print(f"{name:16} {case.table:12} {' '.join(kernels_of(case))}")
        return 0
    if not torch.cuda.is_available():
        print("sweep tiles: torch finds no GPU on this machine.", file=sys.stderr)
        return 2
    if args.small:
        compare_with_small()
        return 0
    if args.share is not None:
        compile_share(jobs(names, args.kernels), args.share, args.processes)
        return 0
    timed = sweep(names, args.kernels, args.processes)
    for (name, kernel), times in timed.items():
        if not times:
            print(f"{name} {kernel}: no tile ran")
            continue
        case = CASES[name]
        tile, reason = proposal(name, kernel, times)
        print(f"{case.table} {kernel!r} {case.row}: Tile{tile},  # {reason}")
        if args.write:
            TABLE.write_text(rewritten(TABLE.read_text(), case.table, kernel, case.row, tile, reason))
    return 0


def add_parser(searches: Any) -> None:
    command = searches.add_parser("tiles", help="tiles of the Triton kernels")
    command.add_argument("names", nargs="*", choices=[*CASES, []], metavar="CASE", help="cases; all of them by default")
    command.add_argument("--kernels", nargs="+", choices=KERNELS, default=list(KERNELS))
    command.add_argument("--processes", type=int, default=12, help="that compile")
    command.add_argument("--write", action="store_true", help=f"write the fastest tiles to {TABLE.name}")
    command.add_argument(
        "--small", action="store_true", help="time the tiles of this GPU beside those that serve any GPU, in all cases"
    )
    command.add_argument("--list", action="store_true", help="print the cases")
    command.add_argument("--share", type=int, help=argparse.SUPPRESS)
    command.set_defaults(run=run)
