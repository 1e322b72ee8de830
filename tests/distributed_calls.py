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
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import flash_dmattn
from flash_dmattn import Backend, register_backend
from flash_dmattn.backends.protocol import Backward, Forward, Rule
from flash_dmattn.dispatch.registry import BACKENDS
from flash_dmattn.distributed import (
    SequenceLayout,
    ShardedMask,
    context_parallel_attention,
    exchange,
    explain_context_parallel,
)
from flash_dmattn.distributed import call as parallel_call
from flash_dmattn.distributed import group as parallel_group
from flash_dmattn.distributed.group import agree, groups_of
from flash_dmattn.masks import topk_mask
from flash_dmattn.masks.prepared.storage import unpack_view
from flash_dmattn.problem import AttentionProblem, Gradients, MaskView
from flash_dmattn.problem.inputs import Inputs, Saved

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

    @property
    def bias_dims(self) -> tuple[str, ...]:
        """The dims of the bias, empty without one."""
        return BIASES[self.bias] or ()

    @property
    def mask_dims(self) -> tuple[str, ...]:
        """The dims of the mask, also of one that a rank gets wrong; empty without one."""
        return MASKS["full" if self.mask in MISTAKEN else self.mask] or ()

    def layouts(self, size: int) -> tuple[SequenceLayout, SequenceLayout]:
        """The layouts of the queries and of the keys."""
        return layout_of(self.layout, self.seqlen_q, size), layout_of(self.layout, self.seqlen_k, size)


def layout_of(name: str, length: int, size: int) -> SequenceLayout:
    """A layout by its name."""
    if name == "balanced":
        work = [1.0 + (i * 7) % 5 for i in range(length // 4)]
        return SequenceLayout.balanced(work, length, size, pieces=2)
    return getattr(SequenceLayout, name)(length, size)  # type: ignore[no-any-return]


@dataclass
class WholeCall:
    """The tensors of the whole sequence, the same on every rank: leaves of the reference."""

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


def draw(case: ParallelCase) -> WholeCall:
    """Draw the call from the case's seed."""
    generator = torch.Generator().manual_seed(case.seed)
    sizes = {"b": case.batch, "q": case.heads, "k": case.heads_k, "i": case.seqlen_q, "j": case.seqlen_k}

    def normal(*shape: int, dtype: torch.dtype = case.dtype) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(case.device, dtype)

    def shape_of(dims: tuple[str, ...]) -> tuple[int, ...]:
        return tuple(sizes.get("j" if name == "s" else name, 1) for name in dims)

    q = normal(case.batch, case.seqlen_q, case.heads, case.dim)
    k = normal(case.batch, case.seqlen_k, case.heads_k, case.dim)
    v = normal(case.batch, case.seqlen_k, case.heads_k, case.dim_v)
    bias = normal(*shape_of(case.bias_dims), dtype=case.bias_dtype or case.dtype) if case.bias_dims else None
    mask = None
    if case.mask_dims:
        mask = torch.rand(*shape_of(case.mask_dims), generator=generator) > 0.25
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
    return WholeCall(q, k, v, mask, bias, sink, dout, dlse, flags)


def leaves(case: ParallelCase, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copy tensors to leaves, which require gradients where the case needs them."""
    return {name: x.detach().clone().requires_grad_(name in case.needs) for name, x in tensors.items()}


def results_of(
    inputs: dict[str, Tensor], out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None
) -> dict[str, Any]:
    """Go backward from out, and from lse where it is used; return results and gradients."""
    if any(x.requires_grad for x in inputs.values()):
        total = (out * dout).sum()
        if dlse is not None:  # the lse of an empty row is -inf whatever the inputs are
            total = total + torch.where(lse > -torch.inf, lse * dlse, torch.zeros_like(lse)).sum()
        total.backward()
    gradients = {f"d{name}": x.grad for name, x in inputs.items() if x.grad is not None}
    return {"out": out.detach(), "lse": lse.detach(), **gradients}


def one_process(case: ParallelCase, x: WholeCall, backend: Any) -> dict[str, Tensor]:
    """Results and gradients of one call in this process."""
    inputs = leaves(case, x.floats())
    out, lse = flash_dmattn.attention(
        inputs["q"],
        inputs["k"],
        inputs["v"],
        x.mask,
        inputs.get("bias"),
        sink=inputs.get("sink"),
        return_lse=True,
        backend=backend,
        **x.flags,
    )
    return results_of(inputs, out, lse, x.dout, x.dlse if case.lse else None)


def shard_scores(dims: tuple[str, ...], x: Tensor, layouts: tuple[SequenceLayout, SequenceLayout], rank: int) -> Tensor:
    """Take a rank's part of a mask or bias."""
    if dims[2]:
        x = layouts[0].shard(x, 2, rank)
    return layouts[1].shard(x, 3, rank) if dims[3] == "s" else x


def parallel(
    case: ParallelCase, x: WholeCall, run: Callable[..., Any] = context_parallel_attention, **more: Any
) -> dict[str, Tensor]:
    """Results and gradients of this rank, of its own part."""
    rank, size = dist.get_rank(), dist.get_world_size()
    layout, layout_k = case.layouts(size)
    layouts, place = row_layouts(case)
    own = {"q": layout.shard(x.q, 1, rank), "k": layout_k.shard(x.k, 1, rank), "v": layout_k.shard(x.v, 1, rank)}
    if x.bias is not None:
        own["bias"] = shard_scores(case.bias_dims, x.bias, layouts, place)
    if x.sink is not None:
        own["sink"] = x.sink
    mask: Any = None if x.mask is None else shard_scores(case.mask_dims, x.mask, layouts, place)
    if case.mask in MISTAKEN:
        mask = MISTAKEN[case.mask](mask)
    flags = dict(x.flags)
    if case.mask.startswith("prepared"):
        band = {"is_causal": flags.pop("is_causal"), "window_size": flags.pop("window_size")}
        mask = ShardedMask.from_mask(mask, layouts[0], place, layout_k=layouts[1], **band)
    inputs = leaves(case, own)
    out, lse = run(
        inputs["q"],
        inputs["k"],
        inputs["v"],
        mask,
        inputs.get("bias"),
        sink=inputs.get("sink"),
        group=dist.group.WORLD if case.mesh is None else mesh_of(case.mesh, case.device),
        **{
            **flags,
            "layout": layout,
            "layout_k": layout_k,
            "return_lse": True,
            "strategy": case.strategy,
            "reduce_bias_grad": case.reduce,
            "head_groups": case.groups,
            "exchange_dtype": case.exchange,
            "backend": case.backend,
            **more,
        },
    )
    dlse = layout.shard(x.dlse, 2, rank) if case.lse else None
    return results_of(inputs, out, lse, layout.shard(x.dout, 1, rank), dlse)


@lru_cache
def mesh_of(sizes: tuple[int, int], device: str = "cpu") -> DeviceMesh:
    """A mesh of two dims, made once."""
    return dist.init_device_mesh(device.split(":")[0], sizes, mesh_dim_names=("outer", "inner"))


def row_layouts(case: ParallelCase) -> tuple[tuple[SequenceLayout, SequenceLayout], int]:
    """The layouts of queries and keys by which masks and biases are shared, and this rank's place in them."""
    layout, layout_k = case.layouts(dist.get_world_size())
    if case.mesh is None:
        return (layout, layout_k), dist.get_rank()
    inner = case.mesh[1]
    return (layout.joined(inner)[0], layout_k.joined(inner)[0]), dist.get_rank() // inner


def shard_result(case: ParallelCase, name: str, x: Tensor) -> Tensor:
    """Take a rank's part of a result of one process."""
    layouts, rank = case.layouts(dist.get_world_size()), dist.get_rank()
    if name in ("out", "dq"):
        return layouts[0].shard(x, 1, rank)
    if name == "lse":
        return layouts[0].shard(x, 2, rank)
    if name in ("dk", "dv"):
        return layouts[1].shard(x, 1, rank)
    return shard_scores(case.bias_dims, x, *row_layouts(case)) if name == "dbias" else x


def is_partial(case: ParallelCase, name: str) -> bool:
    """Whether a rank's gradient counts its own rows alone, so that the gradient of the call is their sum."""
    dims = case.bias_dims or ("",) * 4
    shared = name == "dsink" or (name == "dbias" and not dims[2] and dims[3] != "s")
    return shared and not case.reduce


def errors_of(case: ParallelCase, x: WholeCall, results: dict[str, Tensor]) -> dict[str, float]:
    """The largest difference of each result between this rank and one process."""
    wanted = one_process(case, x, "eager")
    assert results.keys() == wanted.keys(), (results.keys(), wanted.keys())
    errors = {}
    for name, y in results.items():
        if is_partial(case, name):
            dist.all_reduce(y)
        elif case.mesh is not None and name == "dbias" and case.bias_dims[2]:  # it counts the rank's heads alone
            dist.all_reduce(y, group=mesh_of(case.mesh, case.device).get_group(1))
        z = shard_result(case, name, wanted[name])
        assert y.shape == z.shape and y.dtype == z.dtype, (name, y.shape, z.shape, y.dtype, z.dtype)
        errors[name] = float(torch.where(y == z, torch.zeros_like(y), y - z).abs().max())  # -inf is equal to -inf
    return errors


def compared(case: ParallelCase) -> dict[str, float]:
    """`errors_of` a call whose collectives carry the bytes that were announced."""
    x = draw(case)
    return errors_of(case, x, counted(case, x)[0])


def compared_in_parts(case: ParallelCase) -> tuple[dict[str, float], dict[str, bool]]:
    """`compared` of a call in which ranks send what is read, and whether each result has the bits of all keys sent."""
    x = draw(case)
    results, collectives = counted(case, x)
    assert collectives == {"all_to_all"}, collectives
    with patch.object(parallel_call, "CLEAR_SHARE", -1):
        every_key, collectives = counted(case, x)
    assert collectives == {"all_gather"}, collectives
    equal = {name: torch.equal(y, every_key[name]) for name, y in results.items()}
    return errors_of(case, x, results), equal


def counted(case: ParallelCase, x: WholeCall) -> tuple[dict[str, Tensor], set[str]]:
    """Results of a call whose collectives are handed the bytes that were announced, and what brings keys."""
    counts = {"forward": (0, 0), "backward": (0, 0)}
    step, announced, collectives = "forward", {}, set()

    def counting(collective: Callable[..., Any]) -> Callable[..., Any]:
        def run(received: Tensor, sent: Tensor, *rest: Any, **more: Any) -> Any:
            group = more["group"] if "group" in more else rest[0]
            size, rank = group.size(), group.rank()
            splits = more.get("input_split_sizes"), more.get("output_split_sizes")
            if "group" not in more:  # gathered: all of it goes to each of the others
                numbers = ((size - 1) * sent.numel(), received.numel() - sent.numel())
            else:
                own = [
                    y.numel() // size if split is None else split[rank] for y, split in zip((sent, received), splits)
                ]
                numbers = (sent.numel() - own[0], received.numel() - own[1])
            assert sent.dtype == received.dtype == torch.uint8
            counts[step] = (counts[step][0] + numbers[0], counts[step][1] + numbers[1])
            return collective(received, sent, *rest, **more)

        return run

    def call(*arguments: Any, **keywords: Any) -> Any:
        nonlocal step
        explanation = explain_context_parallel(*arguments, **keywords)
        collectives.update(x.how for x in explanation.forward_traffic if "keys" in x.what)
        said = {"forward": explanation.forward_traffic, "backward": explanation.backward_traffic}
        for name, transfers in said.items():
            announced[name] = (sum(x.sent for x in transfers), sum(x.received for x in transfers))
        results = context_parallel_attention(*arguments, **keywords)
        step = "backward"
        return results

    with (
        patch.object(exchange, "_all_gather", counting(exchange._all_gather)),
        patch.object(dist, "all_to_all_single", counting(dist.all_to_all_single)),
    ):
        results = parallel(case, x, run=call)
    # Where heads are traded a gradient of lse is announced, which a loss without lse never sends.
    passes = counts if case.lse or case.strategy == "gather" else ("forward",)
    assert all(counts[name] == announced[name] for name in passes), (counts, announced)
    return results, collectives


def repeated(case: ParallelCase) -> bool:
    """Whether two runs are equal bit by bit."""
    x = draw(case)
    (first, _), (second, _) = counted(case, x), counted(case, x)
    return all(torch.equal(first[name], second[name]) for name in first)


class Unpacking:
    """A backend that reads prepared masks, as kernels do, and computes as eager does: it runs where there is no GPU.

    Every mask has to arrive in a prepared form and of the sizes of its call; `forms` lists these.
    """

    def __init__(self, name: str = "unpacking", rules: tuple[Rule, ...] = ()) -> None:
        self.forms: set[str] = set()
        self.backend = Backend(
            name=name,
            plan_forward=self._plan_forward,
            plan_backward=self._plan_backward,
            features=BACKENDS["eager"].features - {"sequences", "paged", "dropout_p"},
            rules=rules,
            mask_forms=frozenset({"tiles", "keys", "intervals"}),
        )

    def _plan_forward(self, problem: AttentionProblem) -> Forward:
        run = BACKENDS["eager"].plan_forward(problem)
        return lambda inputs: run(self._dense(problem, inputs))

    def _plan_backward(self, problem: AttentionProblem) -> Backward:
        plan = BACKENDS["eager"].plan_backward
        assert plan is not None
        run = plan(problem)

        def backward(saved: Saved, dout: Tensor, dlse: Tensor | None, *, dbias_out: Tensor | None = None) -> Gradients:
            assert saved.out.is_contiguous() and saved.lse.is_contiguous()
            return run(saved._replace(inputs=self._dense(problem, saved.inputs)), dout, dlse)

        return backward

    def _dense(self, problem: AttentionProblem, x: Inputs) -> Inputs:
        """The same inputs with a bool mask."""
        mask = x.mask
        assert (problem.k_strides, problem.v_strides) == (x.k.stride(), x.v.stride())
        assert mask.form == problem.mask_form
        self.forms.add(mask.form)
        if mask.form == "none":
            return x
        assert all(t.is_contiguous() for t in mask.tensors)
        dense = unpack_view(mask, problem.seqlen_q, problem.seqlen_k)
        assert problem.mask is not None and dense.shape == problem.mask.shape
        return x._replace(mask=MaskView("dense", (dense,)))


def for_few_keys(name: str, most: int) -> Backend:
    """The same for calls of at most so many keys."""
    return Unpacking(
        name, (Rule("keys", lambda p: p.seqlen_k <= most, lambda p: f"there are {p.seqlen_k} keys"),)
    ).backend


_unpacking = Unpacking()


def registered() -> Unpacking:
    """The backend, registered in this process."""
    if _unpacking.backend.name not in BACKENDS:
        register_backend(_unpacking.backend)
    return _unpacking


def compared_by_unpacking(case: ParallelCase) -> tuple[dict[str, float], set[str]]:
    """`compared` on the backend that reads prepared masks, and the forms in which masks came."""
    backend = registered()
    backend.forms.clear()
    return compared(replace(case, backend="unpacking")), set(backend.forms)


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
    raised_errors, errors = set(), []
    for _ in range(2):
        raised_errors.add(raised(lambda: parallel(mine, draw(mine), **more)))
        errors += compared(case).values()
    return raised_errors, max(errors)


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
    is_wrong = dist.get_rank() == dist.get_world_size() - 1
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

    error = raised(wrong_one if is_wrong else lambda: back(1))
    return error, max(compared(case).values())


def mistaken_when_compiled(case: ParallelCase, change: dict[str, Any]) -> list[tuple[str, str]]:
    """Return what a compiled call raises where the last rank differs, when it is traced and when it runs again."""
    mine = replace(case, **change) if dist.get_rank() == dist.get_world_size() - 1 else case
    torch._dynamo.reset()
    compiled_call = torch.compile(context_parallel_attention, fullgraph=True, backend="aot_eager")
    return [raised(lambda: parallel(mine, draw(mine), run=compiled_call)) for _ in range(2)]


def compared_on_a_device_group() -> tuple[list[str], int, int]:
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
        kind, message = raised(lambda: context_parallel_attention(q, q, q, dropout_p=0.5, **over))
    return tuple(out.shape), (kind, message.startswith(f"rank {dist.get_rank()}: dropout_p is 0.5"))


def gradient_of_bias(case: ParallelCase) -> Tensor:
    """The gradient of the bias that a rank has."""
    return parallel(case, draw(case))["dbias"]


def compiled(case: ParallelCase) -> float:
    """The largest difference between a compiled call, in one graph, and the same call run; gradients too."""
    torch._dynamo.reset()
    x = draw(case)
    wanted = parallel(case, x)
    results = parallel(case, x, run=torch.compile(context_parallel_attention, fullgraph=True, backend="aot_eager"))
    assert results.keys() == wanted.keys()
    return max(float((results[name] - y).abs().max()) for name, y in wanted.items())


def check_operators(case: ParallelCase) -> list[str]:
    """`torch.library.opcheck` of every operator that a call and its backward pass run; their names."""
    calls: dict[str, tuple[Any, tuple[Any, ...]]] = {}

    class Recording(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if function.namespace == "flash_dmattn":
                calls.setdefault(str(function), (function, args))
            return function(*args, **(kwargs or {}))

    with Recording():
        parallel(case, draw(case))
    for function, arguments in calls.values():
        args = torch.utils._pytree.tree_map(lambda a: a.detach() if isinstance(a, Tensor) else a, arguments)
        torch.library.opcheck(function, args, test_utils=("test_schema", "test_faketensor", "test_aot_dispatch_static"))
    return sorted(name.split(".")[1] for name in calls)


def counted_flop(case: ParallelCase) -> int:
    """FLOP of a rank's call and its backward pass, as torch's counter counts them."""
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        parallel(case, draw(case))
    return int(counter.get_total_flops())
