"""DTensors on GPUs (NCCL), or on a CPU (gloo): results and gradients no further from fp64 than on one GPU.

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
from dtensor_calls import parse, spell  # noqa: E402
from gpu_distributed import missing_of  # noqa: E402
from torch import Tensor  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.tensor import distribute_tensor  # noqa: E402

import flash_dmattn  # noqa: E402

# Placements of q, k and v; sizes of the bias as letters, and its placements.
CASES = (
    ("S0", None, ""),
    ("S0", ("1", "Hk", "1", "L"), "R"),
    ("S0", ("1", "H", "L", "L"), "R"),
    ("S0", ("B", "H", "L", "L"), "S0"),
    ("S2", ("1", "H", "1", "L"), "S1"),
    ("S2", ("B", "H", "L", "L"), "S1"),
    ("S2", ("1", "1", "L", "L"), "R"),
    ("S1", ("1", "H", "L", "L"), "S2"),
    ("S1", ("1", "H", "1", "L"), "S3"),
    ("R", ("1", "H", "L", "L"), "R"),
)
GENEROSITY, SLACK = 1.5, 1e-5  # of the rule of accuracy


def main() -> int:
    """Every case on every rank."""
    on_gpu = torch.cuda.is_available()
    missing = missing_of(os.environ) if on_gpu else []
    if missing or "RANK" not in os.environ:
        print(f"set {' '.join(missing)}" if missing else "start it with torchrun --nproc-per-node 2", file=sys.stderr)
        return 2
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    mesh = init_device_mesh(device.type, (int(os.environ["WORLD_SIZE"]),))
    sizes = {"B": 2 * mesh.size(), "L": 1024 if on_gpu else 64, "H": 8, "Hk": 4, "D": 64 if on_gpu else 16, "1": 1}
    failed = 0
    for number, (q_on, bias_shape, bias_on) in enumerate(CASES):
        torch.manual_seed(number)
        shapes = {"q": ("B", "L", "H", "D"), "k": ("B", "L", "Hk", "D"), "v": ("B", "L", "Hk", "D")}
        shapes |= {} if bias_shape is None else {"bias": bias_shape}
        tensors = {
            name: torch.randn([sizes[x] for x in shape], device=device, dtype=torch.bfloat16)
            for name, shape in shapes.items()
        }
        dout = torch.randn_like(tensors["q"])
        written = {name: bias_on if name == "bias" else q_on for name in tensors}
        shared = {name: distribute_tensor(x, mesh, parse(written[name])) for name, x in tensors.items()}
        exact = results({name: x.double() for name, x in tensors.items()}, dout.double(), "reference")
        alone = results(tensors, dout, "auto")
        sharded = results(shared, distribute_tensor(dout, mesh, parse(q_on)), "auto")
        wrong = [name for name in tensors if spell(sharded[f"d{name}"].placements) != written[name]]
        ratios = {}
        for name, x in sharded.items():
            error, least = (distance(y, exact[name]) for y in (x.full_tensor(), alone[name]))
            ratios[name] = error / (GENEROSITY * least + SLACK)
        passed = not wrong and max(ratios.values()) <= 1
        failed += not passed
        if mesh.get_rank() == 0:
            worst = max(ratios, key=lambda name: ratios[name])
            said = f"q {q_on}, bias {bias_shape} {bias_on}: {worst} has {ratios[worst]:.2f} of the error allowed"
            print("passed" if passed else "FAILED", said, f"placements of {wrong}" if wrong else "", flush=True)
    dist.destroy_process_group()
    return 1 if failed else 0


def results(tensors: dict[str, Tensor], dout: Tensor, backend: str) -> dict[str, Tensor]:
    """out and the gradients of a causal call."""
    leaves = {name: x.detach().requires_grad_() for name, x in tensors.items()}
    out = flash_dmattn.attention(**leaves, is_causal=True, backend=backend)
    out.backward(dout)
    return {"out": out.detach(), **{f"d{name}": x.grad for name, x in leaves.items()}}


def distance(x: Tensor, exact: Tensor) -> float:
    """||x - exact|| / ||exact||."""
    return ((x.double() - exact).norm() / exact.norm()).item()


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)  # a thread of gloo that outlives the interpreter, in one run of ten, would end it by a signal
