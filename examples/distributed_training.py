"""A small decoder trained with FSDP2 and context parallelism, beside the same training in one process.

    torchrun --nproc-per-node 2 examples/distributed_training.py            # on CPU, some ten seconds
    torchrun --nproc-per-node 4 examples/distributed_training.py --dp 2     # 2 x 2: batch and sequence
    torchrun --nproc-per-node 2 examples/distributed_training.py --device cuda

Each rank has its rows of each sequence, in zigzag: the layers work on those, and attention gathers the keys.
Parameters, with the slopes of a learned bias among them, are sharded over all ranks by FSDP2, on one flattened mesh
dim: two dims would mean replicas. The loss of a rank is the mean over its tokens. FSDP2 takes the mean of the gradients
of all ranks, which is the gradient of the mean over all tokens, since every rank has as many.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

import torch
import torch.distributed as dist
from einops import rearrange
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy

from flash_dmattn import attention
from flash_dmattn.distributed import SequenceLayout, context_parallel_attention
from flash_dmattn.nn.positions import apply_rotary, rotary_angles

VOCABULARY, LENGTH, BATCH = 32, 128, 4
DIM, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 64, 2, 4, 2, 16


class Share:
    """The rows of the sequence that this process has: all rows, or the share of its rank in a mesh dim."""

    def __init__(self, mesh: DeviceMesh | None = None, device: str = "cpu") -> None:
        self.mesh = mesh
        self.layout = SequenceLayout.zigzag(LENGTH, 1 if mesh is None else mesh.size())
        self.rank = 0 if mesh is None else mesh.get_local_rank()
        self.positions = self.layout.positions(self.rank).to(device)
        self.all_positions = torch.arange(LENGTH, device=device)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        """Causal attention of these rows over all keys."""
        if self.mesh is None:
            return attention(q, k, v, None, bias, is_causal=True)
        return context_parallel_attention(q, k, v, None, bias, group=self.mesh, layout=self.layout, is_causal=True)


class Block(nn.Module):
    """Attention, with a slope of distance for each head that is learned, and a multilayer perceptron."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.RMSNorm(DIM), nn.RMSNorm(DIM)])
        self.queries = nn.Linear(DIM, HEADS * HEAD_DIM, bias=False)
        self.keys_values = nn.Linear(DIM, 2 * KV_HEADS * HEAD_DIM, bias=False)
        self.output = nn.Linear(HEADS * HEAD_DIM, DIM, bias=False)
        self.perceptron = nn.Sequential(nn.Linear(DIM, 4 * DIM), nn.GELU(), nn.Linear(4 * DIM, DIM))
        self.slopes = nn.Parameter(0.1 * torch.arange(1.0, HEADS + 1))

    def forward(self, x: Tensor, share: Share) -> Tensor:
        normed = self.norms[0](x)
        angles = rotary_angles(share.positions, HEAD_DIM)  # by position, not by row
        q = apply_rotary(rearrange(self.queries(normed), "b l (h d) -> b l h d", h=HEADS), angles)
        k, v = rearrange(self.keys_values(normed), "b l (kv h d) -> kv b l h d", kv=2, h=KV_HEADS)
        # (H, rows, keys): this rank's rows, over all keys. Only the gradient of the slopes leaves the rank.
        distance = share.positions[:, None] - share.all_positions
        bias = -self.slopes[:, None, None] * distance
        out = share.attend(q, apply_rotary(k, angles), v, bias)
        x = x + self.output(rearrange(out, "b l h d -> b l (h d)"))
        return x + self.perceptron(self.norms[1](x))


class Decoder(nn.Module):
    """Embedding, blocks, logits."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, DIM)
        self.blocks = nn.ModuleList([Block() for _ in range(LAYERS)])
        self.norm = nn.RMSNorm(DIM)
        self.logits = nn.Linear(DIM, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor, share: Share) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, share)
        return self.logits(self.norm(x))


def batch(step: int) -> Tensor:
    """(BATCH, LENGTH + 1) tokens that count upwards, with some noise: the same on every rank."""
    generator = torch.Generator().manual_seed(step)
    start = torch.randint(VOCABULARY, (BATCH, 1), generator=generator)
    counted = (start + torch.arange(LENGTH + 1)) % VOCABULARY
    noise = torch.rand(counted.shape, generator=generator) < 0.05
    return torch.where(noise, torch.randint(VOCABULARY, counted.shape, generator=generator), counted)


def train(model: nn.Module, share: Share, rows: slice, steps: int, device: str) -> list[float]:
    """The loss of each step over the tokens of this process: entries `rows` of the batch, positions of `share`."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for step in range(steps):
        tokens = batch(step)[rows].to(device)
        # Labels are shifted before they are shared: the next token may be on another rank.
        inputs, labels = (share.layout.shard(x, 1, share.rank) for x in (tokens[:, :-1], tokens[:, 1:]))
        loss = cross_entropy(model(inputs, share).flatten(0, 1), labels.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def new_model(device: str) -> Decoder:
    """The same parameters each time."""
    torch.manual_seed(0)
    return Decoder().to(device)


def main(arguments: Sequence[str] | None = None) -> None:
    """Train both ways, and print a row for each step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--dp", type=int, default=1, help="ranks that share the batch; the others share the sequence")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    options = parser.parse_args(arguments)
    if "RANK" not in os.environ:
        parser.error(
            "this process is no rank: start it with torchrun --nproc-per-node 2 examples/distributed_training.py"
        )
    size = int(os.environ["WORLD_SIZE"])
    if options.dp < 1 or size % options.dp or BATCH % options.dp:
        parser.error(f"--dp is {options.dp}; it needs to divide the {size} ranks and the batch of {BATCH}")
    if options.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.set_num_threads(1)
    # By name: where there is a GPU, a mesh of CPUs would get the group of GPUs.
    dist.init_process_group("nccl" if options.device == "cuda" else "gloo")
    mesh = init_device_mesh(options.device, (options.dp, size // options.dp), mesh_dim_names=("dp", "cp"))
    everyone = mesh["dp", "cp"]._flatten("dp_cp")

    model = new_model(options.device)
    for block in model.blocks:
        fully_shard(block, mesh=everyone)
    fully_shard(model, mesh=everyone)
    mine = BATCH // options.dp
    first = mesh["dp"].get_local_rank() * mine
    share = Share(mesh["cp"], options.device)
    losses = torch.tensor(train(model, share, slice(first, first + mine), options.steps, options.device))
    losses = losses.to(options.device)
    dist.all_reduce(losses)  # each rank has the mean of its own tokens
    losses /= size

    if dist.get_rank() == 0:
        alone = train(
            new_model(options.device), Share(device=options.device), slice(None), options.steps, options.device
        )
        print(f"{options.dp} x {size // options.dp} ranks: batch x sequence of {LENGTH}")
        print("step  distributed  one process  difference")
        for step, (together, single) in enumerate(zip(losses.tolist(), alone, strict=True)):
            print(f"{step:4d}  {together:11.6f}  {single:11.6f}  {together - single:10.1e}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
