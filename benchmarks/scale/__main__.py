"""Context-parallel attention on the GPUs of one host, beside the same call on one GPU, and torch's context_parallel.

    export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1
    torchrun --nproc-per-node 2 -m benchmarks.scale --out DIR            # four minutes on four H200, some six on two
    torchrun --nproc-per-node 2 -m benchmarks.scale --out DIR --quick    # tiny sizes, on CPU with gloo
    python -m benchmarks.scale --report DIR                              # table and plot of what is there

Writes DIR/scale.json after every row, then scale.md and scale.png. Efficiency is the time of one GPU over W times the
time of W. Each system's output and gradients are compared with one GPU's, in the same run.
`python -m benchmarks.scale.predict --machine DIR/scale.json` reads "machine" in the JSON.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..files import write_whole
from . import peers, report
from .calls import IN_GRAPHS, QUICK, Bound, Sizes, Work, cases
from .measure import SIZES, Group, bandwidths, compare, time_graphs, time_passes

# Multicast of NVLink, switched off: the network adds nothing up here, and a fault of it takes the host with it.
REQUIRED = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}
SECONDS = 120  # a collective that takes longer hangs
Row = dict[str, Any]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="the folder to write")
    parser.add_argument(
        "--report", type=Path, metavar="DIR", help="write table and plot of DIR/scale.json, run nothing"
    )
    parser.add_argument("--quick", action="store_true", help="tiny sizes")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--only", nargs="+", metavar="WORD", help="cases with one of these words in their name")
    parser.add_argument("--no-peers", action="store_true", help="without torch's context_parallel")
    arguments = parser.parse_args()
    if arguments.report is not None:
        print(*report.write(json.loads((arguments.report / "scale.json").read_text()), arguments.report), sep="\n")
        return 0
    if arguments.out is None:
        parser.error("--out is needed: the folder to write")
    if "RANK" not in os.environ:
        parser.error("this process is no rank: start it with torchrun --nproc-per-node 2 -m benchmarks.scale")
    lacking = [f"{name}={value}" for name, value in REQUIRED.items() if os.environ.get(name) != value]
    if arguments.device == "cuda" and lacking:
        parser.error(f"multicast needs to be off: export {' '.join(lacking)}")
    if arguments.device == "cpu" and not arguments.quick:
        parser.error("on a CPU only --quick ends in time")
    return run(arguments)


def run(arguments: argparse.Namespace) -> int:
    """Run every case, on every rank; rank 0 writes."""
    group = start(arguments.device)
    started = time.monotonic()
    sizes = QUICK if arguments.quick else Sizes()
    content: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if arguments.device == "cuda" else "cpu",
        "world_size": group.size,
        "torch": torch.__version__,
        "quick": arguments.quick,
        "machine": {},
        "bandwidth": [],
        "rows": [],
    }

    def say(text: str) -> None:
        if group.rank == 0:
            print(f"[{time.monotonic() - started:5.0f} s] {text}", flush=True)

    def keep() -> None:
        if group.rank == 0:
            write_whole(arguments.out / "scale.json", json.dumps(content, indent=1) + "\n")

    for row in bandwidths(group, SIZES[:1] if arguments.quick else SIZES):
        content["bandwidth"].append(row)
        say(f"{row['collective']} of {row['mb']:g} MB a rank: {row['ms']:.3f} ms, {row['gbs']:.1f} GB/s received")
    keep()
    for work in cases(group, sizes):
        if arguments.only and not any(word in work.name for word in arguments.only):
            continue
        say(work.name)
        for row in rows_of(group, work, not arguments.no_peers):
            content["rows"].append(row)
            say(f"    {report.line(row)}")
            keep()
    content["machine"] = report.machine_of(content)
    keep()
    if group.rank == 0:
        print(*report.write(content, arguments.out), sep="\n", flush=True)
    wrong = [row for row in content["rows"] if row.get("right") is False]
    say(f"done; {len(wrong)} of {len(content['rows'])} rows differ from one GPU")
    dist.destroy_process_group()
    return 1 if any(row["system"].startswith("ours") for row in wrong) else 0


def start(device: str) -> Group:
    """Join the group that torchrun has made."""
    timeout = timedelta(seconds=SECONDS)
    if device == "cpu":
        torch.set_num_threads(1)
        dist.init_process_group("gloo", timeout=timeout)
        return Group(dist.get_rank(), dist.get_world_size(), torch.device("cpu"))
    place = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(place)
    dist.init_process_group("nccl", timeout=timeout, device_id=place)
    return Group(dist.get_rank(), dist.get_world_size(), place)


def rows_of(group: Group, work: Work, with_peers: bool) -> Iterator[Row]:
    """One GPU first, then ours for each number of head groups, then the peers."""
    about = {"case": work.name, "length": work.length, "heads": work.heads, "kv_heads": work.kv_heads}
    try:
        alone, wanted = one_gpu(group, work)
    except Exception as failure:  # memory, say: the other cases still count
        yield {**about, "system": "one GPU", "head_groups": None, "failed": said_of(failure)}
        return
    finally:
        free(group)
    systems: list[tuple[str, int | None, Callable[[], Bound]]] = [
        ("ours", groups, partial(work.shared, group, groups)) for groups in work.head_groups
    ]
    if work.is_plain and work.heads % group.size == 0:
        systems.append(("ours, heads traded", None, partial(work.shared, group, None, strategy="ulysses")))
    if work.is_plain and work.length <= IN_GRAPHS and group.device.type == "cuda":
        graphs = partial(work.shared, group, in_graphs=True)
        systems.append(("ours in CUDA graphs", 1, partial(graphs, 1)))
        if work.heads % group.size == 0:
            systems.append(("ours in CUDA graphs, heads traded", None, partial(graphs, None, strategy="ulysses")))
    if work.window_size is not None:
        systems.append(("ours, all keys sent", None, partial(work.shared, group, None, all_keys=True)))
    if with_peers and work.is_plain:
        systems += [(name, None, partial(bind, group, work)) for name, bind in peers.peers(group.device, work)]
    for system, groups, bind in systems:
        row: Row = {**about, "system": system, "head_groups": groups, **alone}
        try:
            row |= beside_one_gpu(group, bind, alone, wanted)
        except Exception as failure:  # of a peer, say: the others still count
            row["failed"] = said_of(failure)
        free(group)
        yield row


def beside_one_gpu(
    group: Group, bind: Callable[[], Bound], alone: dict[str, float], wanted: list[Tensor]
) -> dict[str, Any]:
    """Times, efficiency and errors of one system."""
    shared = bind()
    with shared.around:
        time_it = time_graphs if shared.in_graphs else time_passes
        times = time_it(group, shared.call, shared.leaves, shared.dout)
    share = {name: milliseconds / group.size for name, milliseconds in alone.items()}
    return {
        "forward_ms": times.forward,
        "backward_ms": times.backward,
        "efficiency": sum(share.values()) / (times.forward + times.backward),
        "forward_efficiency": share["one_forward_ms"] / times.forward,
        **compare(group, shared.names, times.results, wanted, shared.places),
    }


def one_gpu(group: Group, work: Work) -> tuple[dict[str, float], list[Tensor]]:
    """Return the times of one GPU, and of its results the rows that this rank has."""
    inputs = work.on_one_gpu(group)
    times = time_passes(group, inputs.call, inputs.leaves, inputs.dout)
    return {"one_forward_ms": times.forward, "one_backward_ms": times.backward}, work.rows_of_rank(group, times.results)


def said_of(failure: Exception) -> str:
    """Return a line for a row."""
    return f"{type(failure).__name__}: {failure}".split("\n")[0][:300]


def free(group: Group) -> None:
    """Give memory back between systems."""
    gc.collect()
    if group.device.type == "cuda":
        torch.cuda.empty_cache()


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)  # a thread of gloo that outlives the interpreter, in one run of ten, would end it by a signal
