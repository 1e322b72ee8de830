"""DTensors on GPUs (NCCL), or on a CPU (gloo): results and gradients under the rule of accuracy, and their placements.

    NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1 \\
        torchrun --nproc-per-node 2 tests/gpu_dtensor.py
    CUDA_VISIBLE_DEVICES= torchrun --nproc-per-node 2 tests/gpu_dtensor.py     # small sizes, on a CPU

One line for each case. Exit status: 0; 1 where a case failed; 2 where it did not start.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parent
sys.path[:0] = [str(TESTS.parent), str(TESTS)]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from accuracy import GRADIENTS, assert_accurate  # noqa: E402
from cases import ALL, Case  # noqa: E402
from dtensor_calls import parse, spell  # noqa: E402
from gpu_distributed import missing_of  # noqa: E402
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh  # noqa: E402
from torch.distributed.tensor import distribute_tensor  # noqa: E402

import flash_dmattn  # noqa: E402

# Placements of q, k and v; sizes of the bias, and its placements.
CASES = (
    ("S0", None, ""),
    ("S0", ("1", "Hk", "1", "Lk"), "R"),
    ("S0", ("1", "Hq", "Lq", "Lk"), "R"),
    ("S0", ("B", "Hq", "Lq", "Lk"), "S0"),
    ("S2", ("1", "Hq", "1", "Lk"), "S1"),
    ("S2", ("B", "Hq", "Lq", "Lk"), "S1"),
    ("S2", ("1", "1", "Lq", "Lk"), "R"),
    ("S1", ("1", "Hq", "Lq", "Lk"), "S2"),
    ("S1", ("1", "Hq", "1", "Lk"), "S3"),
    ("R", ("1", "Hq", "Lq", "Lk"), "R"),
)


def main() -> int:
    on_gpu = torch.cuda.is_available()
    missing = missing_of(os.environ) if on_gpu else []
    if missing or "RANK" not in os.environ:
        print(f"set {' '.join(missing)}" if missing else "start it with torchrun --nproc-per-node 2", file=sys.stderr)
        return 2
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    mesh = init_device_mesh(device.type, (int(os.environ["WORLD_SIZE"]),))
    length, head_dim = (1024, 64) if on_gpu else (64, 16)
    sizes = {"batch": 2 * mesh.size(), "seqlen_q": length, "seqlen_k": length, "head_dim": head_dim}
    failed = 0
    for number, (q_on, bias, bias_on) in enumerate(CASES):
        case = Case(**sizes, num_heads=8, num_heads_k=4, dtype=torch.bfloat16, bias=bias, is_causal=True, seed=number)
        said = judge(case, mesh, str(device), {**dict.fromkeys("qkv", q_on), "bias": bias_on})
        failed += bool(said)
        if mesh.get_rank() == 0:
            print("FAILED" if said else "passed", f"q {q_on}, bias {bias} {bias_on}", said, flush=True)
    dist.destroy_process_group()
    return 1 if failed else 0


def judge(case: Case, mesh: DeviceMesh, device: str, placed: dict[str, str]) -> str:
    """Say what is wrong with results, gradients and placements of a call with DTensors; nothing if all is well."""
    x = case.build(device)
    leaves = {
        name: distribute_tensor(y, mesh, parse(placed[name])).requires_grad_()
        for name, y in zip(ALL, (x.q, x.k, x.v, x.bias), strict=True)
        if y is not None
    }
    out, lse = flash_dmattn.attention(**leaves, is_causal=True, return_lse=True)
    out.backward(distribute_tensor(x.dout, mesh, parse(placed["q"])))
    gradients = {f"d{name}": y.grad for name, y in leaves.items()}
    wrong = [name for name, y in gradients.items() if spell(y.placements) != placed[name[1:]]]
    results = {name: y.detach().full_tensor() for name, y in {"out": out, "lse": lse, **gradients}.items()}
    try:
        assert_accurate({**dict.fromkeys(GRADIENTS), **results}, case, x)
    except AssertionError as error:
        return str(error)
    return f"placements of {wrong}" if wrong else ""


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)  # a thread of gloo that outlives the interpreter, in one run of ten, would end it by a signal
