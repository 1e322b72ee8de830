"""Context-parallel calls, drawn whole on every rank, run on the rank's part, and compared with one process."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from distributed_backend import registered
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import flash_dmattn
from flash_dmattn import distributed
from flash_dmattn.distributed import (
    SequenceLayout,
    ShardedMask,
    context_parallel_attention,
    exchange,
    explain_context_parallel,
)
from flash_dmattn.distributed import group as parallel_group
from flash_dmattn.distributed.group import agree, groups_of
from flash_dmattn.masks import topk_mask

# Which dims of (B, H, Lq, Lk) a bias has, heads "q" or "k"; and whether a rank has its rows, or its keys, alone.
BIASES = {
    "none": None,
    "full": ("b", "q", "i", "j"),
    "shared": ("", "q", "i", "j"),
    "group": ("b", "k", "i", "j"),
    "one_head": ("b", "", "i", "j"),
    "query": ("b", "q", "i", ""),
    "keys": ("b", "k", "", "j"),
    "keys_of_q": ("", "q", "", "j"),
    "head": ("", "q", "", ""),
    "sharded": ("b", "k", "", "s"),
    "sharded_one": ("b", "", "", "s"),
}
MASKS = {
    **BIASES,
    "prepared": ("b", "q", "i", "j"),
    "prepared_group": ("", "k", "i", "j"),
    "prepared_keys": ("b", "", "", "j"),
    "topk": ("b", "k", "i", "j"),  # the largest of the bias, which has keys
    "prepared_topk": ("b", "k", "i", "j"),
}

# Masks of a rank that makes a mistake.
MISTAKEN = {"wrong": lambda mask: mask[..., 1:], "numbers": lambda mask: mask.to(torch.float64)}


@dataclass(frozen=True)
class ParallelCase:
    """One call; `bias` and `mask` are names of `BIASES` and `MASKS`."""

    layout: str = "zigzag"
    bias: str = "none"
    mask: str = "none"
    causal: bool = False
    window: tuple[int, int] | None = None
    seqlen_q: int = 32
    seqlen_k: int = 32
    batch: int = 2
    heads: int = 4
    heads_k: int = 2
    dim: int = 4
    dim_v: int = 4
    needs: tuple[str, ...] = ("q", "k", "v", "bias", "sink")
    lse: bool = False
    softcap: float = 0.0
    scale: float | None = None
    sink: bool = False
    empty: bool = False
    strategy: str = "gather"
    reduce: bool = False
    groups: int | None = None
    exchange: torch.dtype | None = None
    dtype: torch.dtype = torch.float64
    bias_dtype: torch.dtype | None = None
    backend: Any = "auto"
    mesh: tuple[int, int] | None = None
    device: str = "cpu"
    seed: int = 0

    def layouts(self, size: int) -> tuple[SequenceLayout, SequenceLayout]:
        """Those of the queries and of the keys."""
        return layout_of(self.layout, self.seqlen_q, size), layout_of(self.layout, self.seqlen_k, size)


def layout_of(name: str, length: int, size: int) -> SequenceLayout:
    """A layout by its name."""
    if name == "balanced":
        work = [1.0 + (i * 7) % 5 for i in range(length // 4)]
        return SequenceLayout.balanced(work, length, size, pieces=2)
    return getattr(SequenceLayout, name)(length, size)  # type: ignore[no-any-return]


@dataclass
class Inputs:
    """The whole call, the same on every rank: leaves of the reference."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    bias: Tensor | None
    sink: Tensor | None
    dout: Tensor
    dlse: Tensor
    flags: dict[str, Any] = field(default_factory=dict)

    def floats(self) -> dict[str, Tensor]:
        named = {"q": self.q, "k": self.k, "v": self.v, "bias": self.bias, "sink": self.sink}
        return {name: x for name, x in named.items() if x is not None}


def dims_of_mask(case: ParallelCase) -> tuple[str, ...] | None:
    """The dims of a mask, those of one that goes wrong too."""
    return MASKS["full" if case.mask in MISTAKEN else case.mask]


def shape_of(dims: tuple[str, ...], case: ParallelCase) -> tuple[int, ...]:
    """The whole shape of a mask or bias."""
    sizes = {"b": case.batch, "q": case.heads, "k": case.heads_k, "i": case.seqlen_q, "j": case.seqlen_k}
    return tuple(sizes.get("j" if name == "s" else name, 1) for name in dims)


def draw(case: ParallelCase) -> Inputs:
    """The whole call, from the case's seed."""
    generator = torch.Generator().manual_seed(case.seed)

    def normal(*shape: int, dtype: torch.dtype = case.dtype) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(case.device, dtype)

    q = normal(case.batch, case.seqlen_q, case.heads, case.dim)
    k = normal(case.batch, case.seqlen_k, case.heads_k, case.dim)
    v = normal(case.batch, case.seqlen_k, case.heads_k, case.dim_v)
    dims, of_mask = BIASES[case.bias], dims_of_mask(case)
    bias = None if dims is None else normal(*shape_of(dims, case), dtype=case.bias_dtype or case.dtype)
    mask = None
    if of_mask is not None:
        mask = torch.rand(*shape_of(of_mask, case), generator=generator) > 0.25
        if case.mask.endswith("topk"):
            assert bias is not None
            mask = topk_mask(bias.cpu(), max(2, case.seqlen_k // 8), is_causal=case.causal)
        if case.empty:
            mask[..., : mask.shape[2] // 2, :] = False
        mask = mask.to(case.device)
    sink = normal(case.heads) if case.sink else None
    dout = normal(case.batch, case.seqlen_q, case.heads, case.dim_v)
    dlse = normal(case.batch, case.heads, case.seqlen_q).to(torch.promote_types(case.dtype, torch.float32))
    flags = {"is_causal": case.causal, "window_size": case.window, "softcap": case.softcap, "softmax_scale": case.scale}
    return Inputs(q, k, v, mask, bias, sink, dout, dlse, flags)


def leaves(case: ParallelCase, given: dict[str, Tensor]) -> dict[str, Tensor]:
    """The inputs that are floats as leaves, those that the case needs gradients of with them."""
    return {name: x.detach().clone().requires_grad_(name in case.needs) for name, x in given.items()}


def send_back(out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None) -> None:
    """Backward from out, and from lse where it is used; that of an empty row is -inf whatever the inputs are."""
    total = (out * dout).sum()
    if dlse is not None:
        total = total + torch.where(lse > -torch.inf, lse * dlse, torch.zeros_like(lse)).sum()
    total.backward()


def whole(case: ParallelCase, x: Inputs, backend: Any) -> dict[str, Tensor]:
    """Results and gradients of one call in this process."""
    given = leaves(case, x.floats())
    out, lse = flash_dmattn.attention(
        given["q"],
        given["k"],
        given["v"],
        x.mask,
        given.get("bias"),
        sink=given.get("sink"),
        return_lse=True,
        backend=backend,
        **x.flags,
    )
    if any(t.requires_grad for t in given.values()):
        send_back(out, lse, x.dout, x.dlse if case.lse else None)
    gradients = {f"d{name}": t.grad for name, t in given.items() if t.grad is not None}
    return {"out": out.detach(), "lse": lse.detach(), **gradients}


def local_bias(dims: tuple[str, ...], x: Tensor, layouts: tuple[SequenceLayout, SequenceLayout], rank: int) -> Tensor:
    """What a rank has of a mask or bias."""
    if dims[2]:
        x = layouts[0].shard(x, 2, rank)
    return layouts[1].shard(x, 3, rank) if dims[3] == "s" else x


def parallel(
    case: ParallelCase, x: Inputs, run: Callable[..., Any] = context_parallel_attention, **more: Any
) -> dict[str, Tensor]:
    """Results and gradients of this rank, of its own part."""
    rank, size = dist.get_rank(), dist.get_world_size()
    of_q, of_k = case.layouts(size)
    layouts, place = rows_of(case)
    own = {"q": of_q.shard(x.q, 1, rank), "k": of_k.shard(x.k, 1, rank), "v": of_k.shard(x.v, 1, rank)}
    if x.bias is not None:
        own["bias"] = local_bias(BIASES[case.bias] or (), x.bias, layouts, place)
    if x.sink is not None:
        own["sink"] = x.sink
    mask: Any = None if x.mask is None else local_bias(dims_of_mask(case) or (), x.mask, layouts, place)
    if case.mask in MISTAKEN:
        mask = MISTAKEN[case.mask](mask)
    flags = dict(x.flags)
    if case.mask.startswith("prepared"):
        band = {"is_causal": flags.pop("is_causal"), "window_size": flags.pop("window_size")}
        mask = ShardedMask.from_mask(mask, layouts[0], place, layout_k=layouts[1], **band)
    given = leaves(case, own)
    out, lse = run(
        given["q"],
        given["k"],
        given["v"],
        mask,
        given.get("bias"),
        sink=given.get("sink"),
        group=dist.group.WORLD if case.mesh is None else mesh_of(case.mesh, case.device),
        **{
            **flags,
            "layout": of_q,
            "layout_k": of_k,
            "return_lse": True,
            "strategy": case.strategy,
            "reduce_bias_grad": case.reduce,
            "head_groups": case.groups,
            "exchange_dtype": case.exchange,
            "backend": case.backend,
            **more,
        },
    )
    if any(t.requires_grad for t in given.values()):
        dlse = of_q.shard(x.dlse, 2, rank) if case.lse else None
        send_back(out, lse, of_q.shard(x.dout, 1, rank), dlse)
    gradients = {f"d{name}": t.grad for name, t in given.items() if t.grad is not None}
    return {"out": out.detach(), "lse": lse.detach(), **gradients}


@lru_cache
def mesh_of(sizes: tuple[int, int], device: str = "cpu") -> DeviceMesh:
    """A mesh of two dims, made once."""
    return dist.init_device_mesh(device.split(":")[0], sizes, mesh_dim_names=("outer", "inner"))


def rows_of(case: ParallelCase) -> tuple[tuple[SequenceLayout, SequenceLayout], int]:
    """The layouts of queries and keys by which masks and biases are shared, and this rank's place in them."""
    of_q, of_k = case.layouts(dist.get_world_size())
    if case.mesh is None:
        return (of_q, of_k), dist.get_rank()
    inner = case.mesh[1]
    return (of_q.joined(inner)[0], of_k.joined(inner)[0]), dist.get_rank() // inner


def part_of(case: ParallelCase, name: str, x: Tensor) -> Tensor:
    """What a rank should have of a whole result."""
    layouts, rank = case.layouts(dist.get_world_size()), dist.get_rank()
    if name in ("out", "dq"):
        return layouts[0].shard(x, 1, rank)
    if name == "lse":
        return layouts[0].shard(x, 2, rank)
    if name in ("dk", "dv"):
        return layouts[1].shard(x, 1, rank)
    return local_bias(BIASES[case.bias] or (), x, *rows_of(case)) if name == "dbias" else x


def is_partial(case: ParallelCase, name: str) -> bool:
    """Whether a rank's gradient is that of its own rows, and the whole is their sum."""
    dims = BIASES[case.bias] or ("",) * 4
    shared = name == "dsink" or (name == "dbias" and not dims[2] and dims[3] != "s")
    return shared and not case.reduce


def compared(case: ParallelCase) -> dict[str, float]:
    """The largest difference of each result between this rank and one process."""
    x = draw(case)
    wanted = whole(case, x, "eager")
    found = parallel(case, x)
    assert found.keys() == wanted.keys(), (found.keys(), wanted.keys())
    errors = {}
    for name, y in found.items():
        if is_partial(case, name):
            dist.all_reduce(y)
        elif case.mesh is not None and name == "dbias" and (BIASES[case.bias] or ())[2]:  # those of a rank's heads
            dist.all_reduce(y, group=mesh_of(case.mesh, case.device).get_group(1))
        z = part_of(case, name, wanted[name])
        assert y.shape == z.shape and y.dtype == z.dtype, (name, y.shape, z.shape, y.dtype, z.dtype)
        errors[name] = float(torch.where(y == z, torch.zeros_like(y), y - z).abs().max())  # -inf is equal to -inf
    return errors


def in_parts(case: ParallelCase) -> tuple[dict[str, float], dict[str, bool]]:
    """`compared` of a call in which ranks send what is read, and whether each result has the bits of all keys sent."""

    def call(*arguments: Any, **keywords: Any) -> Any:
        transfers = explain_context_parallel(*arguments, **keywords).forward_traffic
        assert {x.how for x in transfers if "keys" in x.what} == {how}, transfers
        return context_parallel_attention(*arguments, **keywords)

    x, how = draw(case), "all_to_all"
    found = parallel(case, x, run=call)
    with patch.object(distributed.call, "CLEAR_SHARE", -1):
        how = "all_gather"
        wanted = parallel(case, x, run=call)
    return compared(case), {name: torch.equal(y, wanted[name]) for name, y in found.items()}


def repeated(case: ParallelCase) -> bool:
    """Whether two runs are equal bit by bit."""
    x = draw(case)
    first, second = parallel(case, x), parallel(case, x)
    return all(torch.equal(first[name], second[name]) for name in first)


def compared_by_unpacking(case: ParallelCase) -> tuple[dict[str, float], set[str]]:
    """`compared` on the backend that reads prepared masks, and the forms in which masks came."""
    backend = registered()
    backend.forms.clear()
    return compared(replace(case, backend="unpacking")), set(backend.forms)


def decisions(case: ParallelCase) -> list[tuple[str, str | None]]:
    """The backends that a rank chose."""
    with flash_dmattn.config(record=(made := [])):
        parallel(case, draw(case))
    return [(d.forward, d.backward) for d in made]


def mistaken(
    case: ParallelCase, rank: int, change: dict[str, Any], keywords: dict[str, Any]
) -> tuple[set[tuple[str, str]], float]:
    """Return what a mistake of one rank raises, and the largest error of good calls.

    The mistake is made twice: in the first call of a class, and after a good one.

    Args:
        case: of the other ranks.
        rank: the one that makes the mistake.
        change: fields that differ in the case of this rank.
        keywords: arguments that differ in the call of this rank.
    """
    registered()  # so that there are two pairs to choose from
    is_wrong = dist.get_rank() == rank
    mine, more = (replace(case, **change), keywords) if is_wrong else (case, {})
    said, errors = set(), []
    for _ in range(2):
        said.add(raised(lambda: parallel(mine, draw(mine), **more)))
        errors += compared(case).values()
    return said, max(errors)


class Unlucky:
    """An argument at which validation breaks down."""

    def __eq__(self, other: object) -> bool:
        raise MemoryError("no memory")


def raised(call: Callable[[], Any]) -> tuple[str, str]:
    """The kind and the message of what a call raises."""
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error)
    return "nothing", ""


def mistaken_after_many(case: ParallelCase, number: int) -> tuple[str, str]:
    """Return what is raised where the last rank forgets causality after many good calls."""
    x = draw(case)
    for _ in range(number):
        parallel(case, x)
    mine = replace(case, causal=False) if dist.get_rank() == dist.get_world_size() - 1 else case
    return raised(lambda: parallel(mine, draw(mine)))


def mistaken_in_backward(case: ParallelCase, mistake: str) -> tuple[tuple[str, str], float]:
    """Return what another backward pass on the last rank raises, and the error of a good call.

    Two layers of one class are called, and most ranks go back through the second one. The last rank goes back through
    the first, or makes a third call, or asks the second one for fewer gradients and then goes back through the first.
    """
    wrong = dist.get_rank() == dist.get_world_size() - 1
    x, layers = draw(case), []

    def layer(*arguments: Any, **keywords: Any) -> Any:
        results = context_parallel_attention(*arguments, **keywords)
        layers.append((results[0], [t for t in (*arguments, keywords["sink"]) if t is not None and t.requires_grad]))
        return results[0].detach().requires_grad_(), results[1].detach()

    for _ in range(2):
        parallel(case, x, run=layer)

    def back(number: int, inputs: slice = slice(None)) -> None:
        out, needed = layers[number]
        torch.autograd.grad(out.sum(), needed[inputs], allow_unused=True)

    def wrong_one() -> None:
        if mistake == "order":
            back(0)
        elif mistake == "forward":
            parallel(case, x)
        else:
            back(1, slice(1))
            back(0)

    said = raised(wrong_one if wrong else lambda: back(1))
    return said, max(compared(case).values())


def mistaken_when_compiled(case: ParallelCase, change: dict[str, Any]) -> list[tuple[str, str]]:
    """Return what a compiled call raises where the last rank differs, when it is traced and when it runs again."""
    mine = replace(case, **change) if dist.get_rank() == dist.get_world_size() - 1 else case
    torch._dynamo.reset()
    compiled_call = torch.compile(context_parallel_attention, fullgraph=True, backend="aot_eager")
    return [raised(lambda: parallel(mine, draw(mine), run=compiled_call)) for _ in range(2)]


def compared_beside_a_device() -> tuple[list[str], int, int]:
    """Return what is raised over a group of a device alone, and how much is kept for it, meanwhile and afterwards."""

    def kept() -> int:
        gc.collect()
        return len(parallel_group._carriers) + len(parallel_group._calls)

    before = kept()
    group = dist.new_group(backend="cuda:gloo")
    groups = groups_of(group)
    kinds = []
    for _ in range(2):
        agree(groups, (("value", "one"),))
        kinds.append(raised(lambda: agree(groups, (("value", str(dist.get_rank())),)))[0])
    meanwhile = kept() - before
    dist.destroy_process_group(group)
    del group
    return kinds, meanwhile, kept() - before


def under_fake_tensors() -> tuple[tuple[int, ...], tuple[str, bool]]:
    """Return the shape of a result under fake tensors, and what this rank says of its own mistake there."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    over = {"group": dist.group.WORLD, "layout": SequenceLayout.zigzag(16, 2)}
    with FakeTensorMode():
        q = torch.empty(1, 8, 2, 4)
        out = context_parallel_attention(q, q, q, **over)
        kind, said = raised(lambda: context_parallel_attention(q, q, q, dropout_p=0.5, **over))
    return tuple(out.shape), (kind, said.startswith(f"rank {dist.get_rank()}: dropout_p is 0.5"))


def gradient_of_bias(case: ParallelCase) -> Tensor:
    """The gradient of the bias that a rank has."""
    return parallel(case, draw(case))["dbias"]


def compiled(case: ParallelCase) -> float:
    """The largest difference between a compiled call, in one graph, and the same call run; gradients too."""
    torch._dynamo.reset()
    x = draw(case)
    wanted = parallel(case, x)
    found = parallel(case, x, run=torch.compile(context_parallel_attention, fullgraph=True, backend="aot_eager"))
    assert found.keys() == wanted.keys()
    return max(float((found[name] - y).abs().max()) for name, y in wanted.items())


def check_operators(case: ParallelCase) -> list[str]:
    """`torch.library.opcheck` of every operator that a call and its backward pass run; their names."""
    seen: dict[str, tuple[Any, tuple[Any, ...]]] = {}

    class Recording(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if function.namespace == "flash_dmattn":
                seen.setdefault(str(function), (function, args))
            return function(*args, **(kwargs or {}))

    with Recording():
        parallel(case, draw(case))
    for function, given in seen.values():
        args = torch.utils._pytree.tree_map(lambda a: a.detach() if isinstance(a, Tensor) else a, given)
        torch.library.opcheck(function, args, test_utils=("test_schema", "test_faketensor", "test_aot_dispatch_static"))
    return sorted(seen)


def counted_bytes(case: ParallelCase) -> tuple[dict[str, tuple[int, int]], dict[str, tuple[int, int]]]:
    """What a rank's collectives are handed in each pass, (sent, received) bytes; and what is said of it before."""
    counts = {"forward": [0, 0], "backward": [0, 0]}
    at, said = "forward", {}

    def counting(collective: Callable[..., Any]) -> Callable[..., Any]:
        def run(received: Tensor, sent: Tensor, *rest: Any, **more: Any) -> Any:
            group = more["group"] if "group" in more else rest[0]
            size, rank = group.size(), group.rank()
            splits = more.get("input_split_sizes"), more.get("output_split_sizes")
            if "group" not in more:  # gathered: all of it goes to each of the others
                numbers = [(size - 1) * sent.numel(), received.numel() - sent.numel()]
            else:
                own = [x.numel() // size if of is None else of[rank] for x, of in zip((sent, received), splits)]
                numbers = [sent.numel() - own[0], received.numel() - own[1]]
            assert sent.dtype == received.dtype == torch.uint8
            counts[at] = [x + y for x, y in zip(counts[at], numbers)]
            return collective(received, sent, *rest, **more)

        return run

    def call(*arguments: Any, **keywords: Any) -> Any:
        nonlocal at
        found = explain_context_parallel(*arguments, **keywords)
        for name, transfers in (("forward", found.forward_traffic), ("backward", found.backward_traffic)):
            said[name] = (sum(x.sent for x in transfers), sum(x.received for x in transfers))
        results = context_parallel_attention(*arguments, **keywords)
        at = "backward"
        return results

    with (
        patch.object(exchange, "_all_gather", counting(exchange._all_gather)),
        patch.object(dist, "all_to_all_single", counting(dist.all_to_all_single)),
    ):
        parallel(case, draw(case), run=call)
    return {name: (sent, received) for name, (sent, received) in counts.items()}, said


def counted_flop(case: ParallelCase) -> int:
    """What torch's counter counts of a rank's call and its backward pass."""
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        parallel(case, draw(case))
    return int(counter.get_total_flops())
