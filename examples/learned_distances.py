"""A relative position bias that learns: a student finds the bias of each distance that a teacher attends with.

The student sees the teacher's output alone. Its bias is a value for each head and distance, so that no tensor of
queries times keys exists in either pass, at any length.

The output is a table. Each length has the bytes of the values, and of a tensor with one value for each score. Then come
the student's loss before and after, and the largest difference of a learned value.

    python examples/learned_distances.py                  # a CPU, or a GPU where there is one
    python examples/learned_distances.py --quick --device cpu
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flash_dmattn import attention
from flash_dmattn.biases import Relative
from flash_dmattn.examples.demo import print_table

HEADS, HEAD_DIM, REACH = 4, 32, 8  # values of distances from -REACH to REACH, and of all beyond


def biased(q: Tensor, k: Tensor, v: Tensor, values: Tensor) -> Tensor:
    """Attend with a bias by distance; distances beyond the values get the first or the last one."""
    return attention(q, k, v, bias=Relative(values, zero=REACH, outside="clamp"))


def learn(length: int, steps: int, device: str) -> dict[str, Any]:
    """Train the values of a student at one length; return its losses and how far its values are off."""
    torch.manual_seed(0)
    teacher = torch.randn(HEADS, 2 * REACH + 1, device=device)
    student = torch.zeros_like(teacher).requires_grad_()
    optimizer = torch.optim.Adam([student], lr=0.1)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    losses = []
    for _ in range(steps):
        q, k, v = torch.randn(3, 2, length, HEADS, HEAD_DIM, device=device, dtype=dtype)
        with torch.no_grad():
            wanted = biased(q, k, v, teacher)
        loss = (biased(q, k, v, student) - wanted).float().square().mean() / wanted.float().square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    # A number added to all values of a head changes no probability.
    off = (student - student.mean(1, keepdim=True)) - (teacher - teacher.mean(1, keepdim=True))
    return {"losses": losses, "off": off.abs().max().item(), "bytes": student.numel() * student.element_size()}


def main(arguments: Sequence[str] | None = None) -> dict[int, dict[str, Any]]:
    """Learn at each length and print; return the numbers of the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="short sequences")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args(arguments)
    lengths = (32, 64) if options.quick else (512, 2048, 8192) if options.device == "cuda" else (128, 256)
    results = {length: learn(length, 150, options.device) for length in lengths}
    rows = []
    for length, x in results.items():
        dense = HEADS * length * length * 4
        losses = (f"{x['losses'][0]:.2e}", f"{x['losses'][-1]:.2e}")
        rows.append((str(length), f"{x['bytes']:,}", f"{dense:,}", *losses, f"{x['off']:.3f}"))
    head = ("length", "bytes of values", "bytes of a tensor", "first loss", "last loss", "largest difference")
    print_table("A bias by distance", head, rows)
    return results


if __name__ == "__main__":
    main()
