"""Calls with DTensors, run by every rank of `distributed_workers`, against the same call of one process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

import flash_dmattn
from flash_dmattn.masks import PreparedMask

NAMES = ("q", "k", "v", "mask", "bias", "sink")


@dataclass(frozen=True)
class Call:
    """A call of float64 tensors. Placements are written "S0 R", one for each mesh dim; of q, they decide the mesh.

    `k` is the one of k and v, the same as of q where it is "". Sizes of masks and biases are whole shapes.
    """

    q: str
    k: str = ""
    batch: tuple[int, ...] = (3,)
    seqlen_q: int = 5
    seqlen_k: int = 7
    num_heads: int = 4
    num_heads_k: int = 2
    mask: tuple[int, ...] | None = None
    mask_on: str = ""
    bias: tuple[int, ...] | None = None
    bias_on: str = ""
    sink_on: str = ""
    needs: str = "q k v bias sink"
    flags: tuple[tuple[str, Any], ...] = ()
    dtypes: tuple[tuple[str, str], ...] = ()

    def tensors(self) -> dict[str, Tensor]:
        """The whole tensors, the same on every rank."""
        torch.manual_seed(0)
        float64 = {"dtype": torch.float64}
        tensors = {
            "q": torch.randn(*self.batch, self.seqlen_q, self.num_heads, 8, **float64),
            "k": torch.randn(*self.batch, self.seqlen_k, self.num_heads_k, 8, **float64),
            "v": torch.randn(*self.batch, self.seqlen_k, self.num_heads_k, 6, **float64),
        }
        if self.mask is not None:
            tensors["mask"] = torch.rand(self.mask) > 0.4
            tensors["mask"][..., -1, :] = False
        if self.bias is not None:
            tensors["bias"] = torch.randn(self.bias, **float64)
        if self.sink_on:
            tensors["sink"] = torch.randn(self.num_heads, **float64)
        for name, dtype in self.dtypes:
            tensors[name] = tensors[name].to(getattr(torch, dtype))
        for name in self.needs.split():
            if name in tensors:
                tensors[name].requires_grad_()
        return tensors

    def placements(self) -> dict[str, list[Placement]]:
        written = {"q": self.q, "k": self.k or self.q, "v": self.k or self.q, "mask": self.mask_on}
        written |= {"bias": self.bias_on, "sink": self.sink_on}
        return {name: parse(text) for name, text in written.items() if text}


def parse(text: str) -> list[Placement]:
    """Placements, "S1 R P" as [Shard(1), Replicate(), Partial()]."""
    kinds: dict[str, Callable[..., Placement]] = {"S": Shard, "R": Replicate, "P": Partial}
    return [kinds[word[0]](*map(int, word[1:])) for word in text.split()]


def spell(placements: tuple[Placement, ...]) -> str:
    """The other way round."""
    return " ".join(f"S{p.dim}" if isinstance(p, Shard) else type(p).__name__[0] for p in placements)


@lru_cache
def mesh_of(dims: int) -> DeviceMesh:
    """(2, 2), or one dim of it, on which each half of the ranks does the same."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    return mesh if dims == 2 else mesh["b"]


def distributed(tensors: dict[str, Tensor], placements: dict[str, list[Placement]]) -> dict[str, Tensor]:
    """The tensors as DTensors, leaves where those were."""
    mesh = mesh_of(len(placements["q"]))
    shared = {name: distribute_tensor(x.detach(), mesh, placements[name]) for name, x in tensors.items()}
    return {name: x.requires_grad_(tensors[name].requires_grad) for name, x in shared.items()}


def attend(tensors: dict[str, Tensor], flags: dict[str, Any]) -> tuple[Tensor, ...]:
    results = flash_dmattn.attention(**tensors, is_causal=True, **flags)
    if "return_aux" in flags:
        return results[0], *(x for x in results[1] if x is not None)
    return results if isinstance(results, tuple) else (results,)


def total(results: tuple[Tensor, ...]) -> Tensor:
    """A number that feels each of the results; a row of lse without keys has none."""
    out, *rest = results
    value = out.sin().sum()
    for x in rest:
        value = value + torch.where(x == -torch.inf, 0.0, x).cos().sum()
    return value


def compare(call: Call, compiled: bool = False) -> dict[str, tuple[str, float]]:
    """Return placements of each result and gradient, and how far it is from the result of one process."""
    tensors, flags = call.tensors(), dict(call.flags)
    shared = distributed(tensors, call.placements())
    wanted = attend(tensors, flags)
    if call.needs:
        total(wanted).backward()
    run = torch.compile(attend, backend="aot_eager", fullgraph=True) if compiled else attend
    results = run(shared, flags)
    if call.needs:
        total(results).backward()
    names = ("out", "lse", "probs") if len(results) < 4 else ("out", "lse", "max_scores", "entropy")
    pairs = dict(zip(names, zip(results, wanted, strict=True), strict=False))
    pairs |= {f"d{name}": (shared[name].grad, x.grad) for name, x in tensors.items() if x.requires_grad}
    return {name: (spell(x.placements), distance(x, y)) for name, (x, y) in pairs.items()}


def distance(x: Any, y: Tensor) -> float:
    """The largest difference, infinite where shapes, dtypes or strides of the whole differ."""
    if x.shape != y.shape or x.dtype != y.dtype or x.stride() != y.stride():
        return torch.inf
    same = x.full_tensor().detach(), y.detach()
    same = tuple(t.nan_to_num(neginf=-1e9) for t in same)
    return (same[0] - same[1]).abs().max().item() if y.numel() else 0.0


def refusal(call: Call, changes: dict[str, Any], ranks: tuple[int, ...] = (0, 1, 2, 3)) -> str:
    """The type and the words of what the call raises; a change, on `ranks`, is "plain", "other mesh" or a tensor."""
    tensors = distributed(call.tensors(), call.placements())
    mesh = mesh_of(1)
    for name, change in changes.items() if dist.get_rank() in ranks else ():
        if change == "plain":
            tensors[name] = tensors[name].to_local().detach()
        elif change == "other mesh":
            tensors[name] = distribute_tensor(
                tensors[name].full_tensor().detach(), mesh_of(2), [Replicate(), Replicate()]
            )
        elif change == "prepared":
            tensors[name] = PreparedMask.from_mask(torch.ones(3, 1, call.seqlen_q, call.seqlen_k, dtype=torch.bool))
        elif change == "partial":
            local = tensors[name].to_local().detach()
            tensors[name] = DTensor.from_local(local, mesh, [Partial()], run_check=False)
        else:
            tensors[name] = change
    try:
        attend(tensors, dict(call.flags))
    except (TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing is refused"


def refused_as_one_graph(call: Call) -> str:
    """Return the error of compiling the call with fullgraph=True."""
    shared = distributed(call.tensors(), call.placements())
    try:
        torch.compile(attend, backend="aot_eager", fullgraph=True)(shared, {})
    except (ValueError, torch._dynamo.exc.TorchDynamoException) as error:
        return str(error)
    return "nothing is refused"


def transformed(kind: str) -> str:
    """Return the error of a transform of torch.func over DTensors."""
    shared = distributed(Call("S2").tensors(), Call("S2").placements())
    q, k, v = (shared[name].detach() for name in ("q", "k", "v"))
    try:
        if kind == "vmap":
            torch.vmap(lambda q, k, v: flash_dmattn.attention(q[None], k[None], v[None]))(q, k, v)
        else:
            torch.func.grad(lambda bias: flash_dmattn.attention(q, k, v, bias=bias).sum())(q[:, :1, :, :7])
    except TypeError as error:
        return str(error)
    return "nothing is refused"


def prepared_for_all() -> float:
    """A prepared mask of one batch entry and head goes to every rank as it is."""
    call = Call("S0", mask=(5, 7), mask_on="R")
    tensors, flags = call.tensors(), {"return_lse": True}
    shared = distributed(tensors, call.placements())
    wanted = attend(tensors, flags)
    shared["mask"] = PreparedMask.from_mask(tensors["mask"], is_causal=True)
    return distance(attend(shared, flags)[0], wanted[0])


def gathered_keys() -> float:
    """k and v come out of a redistribution that is still under way."""
    call = Call("S0")
    tensors = call.tensors()
    shared = distributed(tensors, call.placements())
    shared |= {name: shared[name].redistribute(placements=[Replicate()], async_op=True) for name in ("k", "v")}
    with torch.no_grad():
        return distance(attend(shared, {})[0], attend(tensors, {})[0])


def steps(call: Call) -> tuple[str, float, float]:
    """Two steps of SGD on a bias that ranks share: the part of every rank, and the whole, against one process."""
    alone = {name: x.detach() for name, x in call.tensors().items()}
    shared = distributed(alone, call.placements())
    parameters = []
    for tensors in (alone, shared):
        bias = tensors["bias"] = torch.nn.Parameter(tensors["bias"])
        optimizer = torch.optim.SGD([bias], lr=0.5)
        for _ in range(2):
            optimizer.zero_grad()
            total(attend(tensors, {})).backward()
            optimizer.step()
        parameters.append(bias)
    wanted, together = parameters
    held = (together.to_local() - wanted).abs().max().item()
    return spell(together.grad.placements), held, distance(together.detach(), wanted)


def widened() -> tuple[bool, int]:
    """Return whether dbias of a 16 bit bias equals one process, and how many values rounding twice would change."""
    call = Call("S0", batch=(4,), seqlen_k=64, bias=(1, 4, 1, 64), bias_on="R", dtypes=(("bias", "bfloat16"),))
    alone = call.tensors()
    shared = distributed(alone, call.placements())
    for tensors in (alone, shared):
        attend(tensors, {})[0].sin().sum().backward()
    halves = []
    for half in (slice(0, 2), slice(2, 4)):
        part = {name: x.detach() if name == "bias" else x.detach()[half] for name, x in alone.items()}
        part["bias"].requires_grad_()
        attend(part, {})[0].sin().sum().backward()
        halves.append(part["bias"].grad)
    twice = halves[0] + halves[1]
    one = alone["bias"].grad
    return torch.equal(shared["bias"].grad.to_local(), one), int((twice != one).sum())


def repeated(call: Call) -> bool:
    """Whether two runs under deterministic=True agree bit for bit."""
    runs = []
    for _ in range(2):
        shared = distributed(call.tensors(), call.placements())
        total(attend(shared, {"deterministic": True})).backward()
        runs.append([x.grad.to_local() for x in shared.values() if x.requires_grad])
    return all(torch.equal(x, y) for x, y in zip(*runs, strict=True))


def explained(call: Call) -> tuple[int, int, str | None, str, list[tuple[int, int]]]:
    """(batch, heads) that `explain` speaks of, the backend, the strategy, and of each slice its queries and keys."""
    explanation = flash_dmattn.explain(**distributed(call.tensors(), call.placements()), **dict(call.flags))
    strategy, slices = getattr(explanation, "strategy", ""), getattr(explanation, "slices", ())
    sizes = [(part.seqlen_q, part.seqlen_k) for part in slices]
    return explanation.problem.batch, explanation.problem.num_heads, explanation.forward, strategy, sizes


def second() -> float:
    """Return how far the derivative of a squared gradient, through eager, is from one process."""
    call = Call("S0", bias=(1, 2, 1, 7), bias_on="R")
    results = []
    alone = call.tensors()
    for tensors in (alone, distributed(alone, call.placements())):
        (first,) = torch.autograd.grad(
            attend(tensors, {"backend": "eager"})[0].sin().sum(), tensors["bias"], create_graph=True
        )
        first.square().sum().backward()
        results.append(tensors["bias"].grad)
    return distance(results[1], results[0])
