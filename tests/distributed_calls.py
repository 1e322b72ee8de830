"""Context-parallel calls, drawn whole on every rank, run on the rank's part, and compared with one process."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import pairwise
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from accuracy import run
from cases import DEVICE, Case, Inputs, Numbers
from dispatched import Dispatched
from draws import Features
from draws import draw as draw_case
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import flash_dmattn
from flash_dmattn import Backend, Sequences, register_backend
from flash_dmattn.backends.protocol import Backward, Forward, Rule
from flash_dmattn.biases import Band, ListBias, Relative
from flash_dmattn.dispatch.registry import BACKENDS
from flash_dmattn.distributed import (
    SequenceLayout,
    ShardedMask,
    context_parallel_attention,
    exchange,
    explain_context_parallel,
    gather_sequence,
)
from flash_dmattn.distributed import call as parallel_call
from flash_dmattn.distributed import group as parallel_group
from flash_dmattn.distributed.group import agree, groups_of
from flash_dmattn.masks import PreparedMask, document_mask, topk_mask
from flash_dmattn.masks.prepared.storage import unpack_view
from flash_dmattn.problem import AttentionProblem, Gradients, MaskView
from flash_dmattn.problem.inputs import Inputs as Operands
from flash_dmattn.problem.inputs import Saved
from flash_dmattn.reference.dropout import Dropout

Letters = tuple[str, ...]

# The sizes of a bias by name. "Ls": a rank has only its own keys; with "Lq" it always has its own rows.
BIASES: dict[str, Letters | None] = {
    "none": None,
    "full": ("B", "Hq", "Lq", "Lk"),
    "shared": ("1", "Hq", "Lq", "Lk"),
    "group": ("B", "Hk", "Lq", "Lk"),
    "one_head": ("B", "1", "Lq", "Lk"),
    "query": ("B", "Hq", "Lq", "1"),
    "keys": ("B", "Hk", "1", "Lk"),
    "keys_of_q": ("1", "Hq", "1", "Lk"),
    "head": ("1", "Hq", "1", "1"),
    "sharded": ("B", "Hk", "1", "Ls"),
    "sharded_one": ("B", "1", "1", "Ls"),
}
FULL = BIASES["full"]
# The fields of a case for a mask by name.
MASKS: dict[str, dict[str, Any]] = {
    **{name: {"mask": letters} for name, letters in BIASES.items()},
    "prepared": {"mask": FULL, "prepared": True},
    "prepared_group": {"mask": ("1", "Hk", "Lq", "Lk"), "prepared": True},
    "prepared_keys": {"mask": ("B", "1", "1", "Lk"), "prepared": True},
    "topk": {"mask": BIASES["group"], "topk": True},
    "prepared_topk": {"mask": BIASES["group"], "topk": True, "prepared": True},
}
# Masks of a rank that makes a mistake.
MISTAKEN: dict[str, Callable[[Tensor], Tensor]] = {
    "wrong": lambda mask: mask[..., 1:],
    "numbers": lambda mask: mask.to(torch.float64),
}


class DocumentDropout(NamedTuple):
    """Dropout that counts rows and keys within each document, for probabilities of the whole sequence."""

    dropout: Dropout
    documents: tuple[int, ...]

    @property
    def scale(self) -> float:
        return self.dropout.scale

    def kept_of(self, p: Tensor) -> Tensor:
        """Whether each of the probabilities (1, Hk, G, L, L) is kept; True between documents."""
        kept = torch.ones_like(p, dtype=torch.bool)
        for number, (start, stop) in enumerate(pairwise(self.documents)):
            own = (..., slice(start, stop), slice(start, stop))
            kept[own] = self.dropout.starting_at(number).kept_of(p[own])
        return kept

    def apply(self, p: Tensor) -> Tensor:
        return torch.where(self.kept_of(p), p * self.scale, 0.0)


@dataclass(frozen=True)
class ParallelCase(Case):
    """A call whose sequence ranks share: of small sizes and in fp64, if nothing else is said.

    `lists`: letters of the batch and heads of lists, the mask then; `blocks`: their `block_size`; `relative`: values of
    their entries. `documents`: the bounds of packed sequences; `used`: how many tokens of each are used, all without.
    `lengths`: of padded entries, of queries (all without) and of keys. `prepared`: the mask is a `ShardedMask`. `topk`:
    it keeps the largest values of the bias. `mistake`: a name of `MISTAKEN`. `dropped`: the documents by which
    dropout counts, if a mask is in their place. The others are arguments of `context_parallel_attention`.
    """

    seqlen_q: int = 32
    seqlen_k: int = 32
    head_dim: int = 4
    dtype: torch.dtype = torch.float64
    needs_grad: Letters = ("q", "k", "v", "bias", "sink")
    layout: str = "zigzag"
    lists: Letters | None = None
    blocks: tuple[int, int] = (1, 1)
    documents: tuple[int, ...] = ()
    used: tuple[int, ...] = ()
    lengths: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
    dropped: tuple[int, ...] = ()
    prepared: bool = False
    topk: bool = False
    mistake: str = ""
    strategy: str = "gather"
    reduce: bool = False
    groups: int | None = None
    exchange: torch.dtype | None = None
    backend: Any = "auto"
    mesh: tuple[int, int] | None = None
    device: str = "cpu"

    def with_(self, **changes: Any) -> ParallelCase:
        """Change some fields; mask and bias may be names."""
        if isinstance(changes.get("bias"), str):
            changes["bias"] = BIASES[changes["bias"]]
        if isinstance(name := changes.get("mask"), str):
            plain = {"prepared": False, "topk": False}
            changes |= {"mask": FULL, "mistake": name} if name in MISTAKEN else plain | MASKS[name]
        return replace(self, **changes)

    @property
    def bias_letters(self) -> Letters | None:
        """The sizes of the bias by name; the last one of a bias by distance, which no rank shares, is "n"."""
        return self.bias if self.relative is None else (*self.relative.letters, "n")

    def sizes(self, letters: Letters) -> tuple[int, ...]:
        return tuple(
            -(-self.seqlen_q // self.blocks[0])
            if letter == "R"  # rows of lists
            else super(ParallelCase, self).sizes(("Lk" if letter == "Ls" else letter,))[0]
            for letter in letters
        )

    def passed(self, bias: Tensor | None) -> Any:
        """The bias as calls take it, from its tensor."""
        return super().passed(bias) if self.lists is None or bias is None else ListBias(bias)

    def dropout(self, device: torch.device | str = DEVICE) -> Any:
        """The dropout of the call, as the formula takes it."""
        dropout = super().dropout(device)
        return DocumentDropout(dropout, self.dropped) if dropout is not None and self.dropped else dropout

    def layouts(self, size: int) -> tuple[SequenceLayout, SequenceLayout]:
        """The layouts of the queries and of the keys."""
        return layout_of(self.layout, self.seqlen_q, size), layout_of(self.layout, self.seqlen_k, size)


P = ParallelCase().with_
# Biases by distance, by name.
DISTANCES = {
    "relative": Numbers(("1", "Hq", "1"), 97, 48, "error"),
    "relative, clamped": Numbers(("B", "Hk", "1"), 9, 6, "clamp"),
    "relative, one head": Numbers(("1", "1", "1"), 20, -3, "zero"),
    "relative as long as the keys of a rank": Numbers(("1", "Hq", "1"), 16, 8, "clamp"),
    "band": Numbers(("B", "Hq", "Lq"), 13, 9, "zero"),
    "band of groups": Numbers(("1", "Hk", "Lq"), 7, 20, "zero"),
}
# Values for the entries of lists.
ENTRIES = {name: Numbers(name, 7, 0, "") for name in (("B", "Hk", "Lq"), ("1", "Hq", "R"), ("B", "1", "R"))}


def layout_of(name: str, length: int, size: int) -> SequenceLayout:
    if name == "balanced":
        work = [1.0 + (i * 7) % 5 for i in range(length // 4)]
        return SequenceLayout.balanced(work, length, size, pieces=2)
    return getattr(SequenceLayout, name)(length, size)  # type: ignore[no-any-return]


# Features of random calls. All positions of 4 ranks in zigzag are multiples of 8.
SMALL: Features = {
    "batch": (1, 2),
    "seqlen_q": (8, 16, 32, 48),
    "seqlen_k": (8, 16, 32, 48),
    "num_heads_k": (1, 2, 4),
    "group": (1, 2),
    "head_dim": (4, 8),
    "head_dim_v": (0, 0, 3),
    "dtype": (torch.float64,),
    "bias_dtype": (None,),
    "mask": tuple(BIASES.values()),
    "mask_kind": ("random", "random", "empty_rows", "none_allowed"),
    "bias": tuple(BIASES.values()),
    "bias_kind": ("normal", "normal", "inf"),
    "window_size": (None, None, (5, 3), (6, -1), (-1, 2), (0, 0)),
    "logits": (1.0,),
    "sink": (None, None, "normal"),
    "sink_dtype": (None,),
    "dropout_p": (0.0,),
}


def draw_parallel(number: int, features: Features = SMALL) -> ParallelCase:
    rng = random.Random(number)
    case = draw_case(rng, features, number)
    shares_heads = case.bias is not None and case.bias[1] == "1" and case.bias[2] == "Lq"
    drawn = ParallelCase(
        **vars(case),
        layout=rng.choice(("zigzag", "contiguous", "balanced")),
        prepared=case.mask is not None and case.mask[3] != "Ls" and rng.random() < 0.3,
        reduce=rng.random() < 0.5,
        groups=None if shares_heads else rng.choice((None, 1, case.num_heads_k)),
        exchange=rng.choice((None, None, torch.promote_types(case.dtype, torch.float32))),
    )
    return draw_sequences(rng, drawn)


def draw_sequences(rng: random.Random, case: ParallelCase) -> ParallelCase:
    """Make some calls ones with packed documents or padded entries, and some ones with dropout."""
    kind = rng.choice(("", "", "packed", "padded"))
    if kind == "packed":
        bounds = (0, *sorted(rng.choices(range(case.seqlen_q + 1), k=rng.randrange(5))), case.seqlen_q)
        has_pairs = case.bias is not None and case.bias[2] == "Lq" and case.bias[3] != "1"
        bias = None if has_pairs else case.bias
        case = case.with_(documents=bounds, batch=1, seqlen_k=case.seqlen_q, mask=None, prepared=False, bias=bias)
    if kind == "padded":
        queries, keys = (
            tuple(rng.choice((length, rng.randint(0, length))) for _ in range(case.batch))
            for length in (case.seqlen_q, case.seqlen_k)
        )
        # Rows of no sequence have no sink, and empty rows of a mask have one.
        case = case.with_(lengths=(() if case.sink else queries, keys), prepared=False)
    return case.with_(dropout_p=0.0 if case.prepared else rng.choice((0.0, 0.0, 0.2)))


def draw(case: ParallelCase) -> Inputs:
    """The tensors of the whole sequence, the same on every rank."""
    x = case.build(case.device)
    if case.lists is not None:
        entries = 6 if case.relative is None else case.relative.number
        random = torch.Generator().manual_seed(case.seed)
        last = -(-case.seqlen_k // case.blocks[1])
        index = torch.randint(-1, last, (*case.sizes((*case.lists, "R")), entries), generator=random)
        return replace(x, mask=index.to(case.device))
    if not case.topk:
        return x
    assert x.bias is not None
    mask = topk_mask(x.bias.cpu(), max(2, case.seqlen_k // 8), is_causal=case.is_causal)
    return replace(x, mask=mask.to(case.device))


def results_of(function: Callable[..., Any], case: ParallelCase, x: Inputs) -> dict[str, Tensor]:
    """Results of a function with the call's signature, and the gradients that the case needs."""
    return {name: y for name, y in run(function, case, x).items() if y is not None}


def one_process(case: ParallelCase, x: Inputs, backend: Any = "eager") -> dict[str, Tensor]:
    """Results and gradients of one call in this process."""

    def call(q: Tensor, k: Tensor, v: Tensor, mask: Any, bias: Any, **flags: Any) -> Any:
        if case.documents and case.prepared:
            lengths = torch.tensor(case.documents).diff()
            mask = document_mask(torch.repeat_interleave(torch.arange(len(lengths)), lengths))
        if case.lists is not None:
            band = {name: flags.pop(name) for name in ("is_causal", "window_size")}
            sizes = {"seqlen_q": case.seqlen_q, "seqlen_k": case.seqlen_k, "block_size": case.blocks}
            mask = PreparedMask.from_lists(mask, **sizes, **band)
        return flash_dmattn.attention(q, k, v, mask, bias, return_lse=True, backend=backend, **flags)

    return results_of(with_sequences(case, call), case, x)


def with_sequences(case: ParallelCase, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls one with the sequences of a case: packed ones of a batch of 1, or padded entries."""
    if case.lengths[1]:
        used = [torch.tensor(lengths) if lengths else None for lengths in case.lengths]
        return partial(function, sequences=Sequences.padded(seqlens_q=used[0], seqlens_k=used[1]))
    if not case.documents or case.prepared:
        return function

    def call(q: Tensor, k: Tensor, v: Tensor, mask: Any, bias: Any, **flags: Any) -> Any:
        one = bias.squeeze(0) if isinstance(bias, Tensor) else bias
        if isinstance(bias, (Band, Relative)):
            one = bias._replace(values=bias.values.squeeze(0))
        used = torch.tensor(case.used) if case.used else None
        bounds = torch.tensor(case.documents)
        documents = Sequences.packed(bounds, seqlens_q=used, max_seqlen_q=int(bounds.diff().max()))
        out, lse = function(q[0], k[0], v[0], mask, one, sequences=documents, **flags)
        return out[None], lse[None]

    return call


def shard_scores(letters: Letters, x: Tensor, layouts: tuple[SequenceLayout, SequenceLayout], rank: int) -> Tensor:
    """Take a rank's part of a mask or bias."""
    if letters[2] == "R":
        share = layouts[0].length // x.shape[2]
        runs = tuple(tuple((a // share, b // share) for a, b in own) for own in layouts[0].intervals)
        return SequenceLayout(x.shape[2], runs).shard(x, 2, rank)
    if letters[2] == "Lq":
        x = layouts[0].shard(x, 2, rank)
    return layouts[1].shard(x, 3, rank) if letters[3] == "Ls" else x


def parallel(
    case: ParallelCase, x: Inputs, function: Callable[..., Any] = context_parallel_attention, **more: Any
) -> dict[str, Tensor]:
    """Results and gradients of this rank, of its own part."""
    rank = dist.get_rank()
    layout, layout_k = case.layouts(dist.get_world_size())
    layouts, place = row_layouts(case)

    def call(q: Tensor, k: Tensor, v: Tensor, mask: Any, bias: Tensor | None, **flags: Any) -> Any:
        if case.prepared or case.lists is not None:
            band = {name: flags.pop(name) for name in ("is_causal", "window_size")}
        if case.lists is not None:
            own = {"layout_k": layouts[1], "block_size": case.blocks}
            mask = ShardedMask.from_lists(mask, layouts[0], place, **own, **band)
        elif case.documents and case.prepared:
            documents = Sequences.packed(torch.tensor(case.documents))
            mask = ShardedMask.from_sequences(documents, layouts[0], place, **band)
        elif case.prepared:
            mask = ShardedMask.from_mask(mask, layouts[0], place, layout_k=layouts[1], **band)
        flags |= {"group": dist.group.WORLD if case.mesh is None else mesh_of(case.mesh, case.device)}
        flags |= {"layout": layout, "layout_k": layout_k, "return_lse": True, "strategy": case.strategy}
        flags |= {"reduce_bias_grad": case.reduce, "head_groups": case.groups, "exchange_dtype": case.exchange}
        if rank > 0:  # the key of dropout is drawn by rank 0
            torch.manual_seed(1000 + rank)
        return with_sequences(case, function)(q, k, v, mask, bias, **{**flags, "backend": case.backend, **more})

    mask, bias = (
        None if y is None or letters is None else shard_scores(letters, y, layouts, place)
        for y, letters in (
            (x.mask, case.mask if case.lists is None else (*case.lists, "R", "entries")),
            (x.bias, case.bias_letters),
        )
    )
    if case.mistake and mask is not None:
        mask = MISTAKEN[case.mistake](mask)
    dlse = None if x.dlse is None else layout.shard(x.dlse, 2, rank)
    q, k, v = layout.shard(x.q, 1, rank), layout_k.shard(x.k, 1, rank), layout_k.shard(x.v, 1, rank)
    return results_of(call, case, Inputs(q, k, v, mask, bias, layout.shard(x.dout, 1, rank), dlse, x.sink))


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
    if name in ("out", "dq", "lse"):
        return layouts[0].shard(x, 2 if name == "lse" else 1, rank)
    if name in ("dk", "dv"):
        return layouts[1].shard(x, 1, rank)
    letters = case.bias_letters
    return x if name == "dsink" or letters is None else shard_scores(letters, x, *row_layouts(case))


def is_partial(case: ParallelCase, name: str) -> bool:
    """Whether a rank's gradient counts only its own rows, so that the gradient of the call is their sum."""
    letters = case.bias_letters
    is_shared = letters is not None and letters[2] not in ("Lq", "R") and letters[3] != "Ls"
    return (name == "dsink" or (name == "dbias" and is_shared)) and not case.reduce


def errors_of(case: ParallelCase, x: Inputs, results: dict[str, Tensor]) -> dict[str, float]:
    """The largest difference of each result between this rank and one process."""
    letters = case.bias_letters
    wanted, has_rows = one_process(case, x), letters is not None and letters[2] in ("Lq", "R")
    assert results.keys() == wanted.keys(), (results.keys(), wanted.keys())
    errors = {}
    for name, y in results.items():
        if is_partial(case, name):
            dist.all_reduce(y)
        elif case.mesh is not None and name == "dbias" and has_rows:  # it counts only the rank's heads
            dist.all_reduce(y, group=mesh_of(case.mesh, case.device).get_group(1))
        z = shard_result(case, name, wanted[name])
        assert y.shape == z.shape and y.dtype == z.dtype, (name, y.shape, z.shape, y.dtype, z.dtype)
        difference = torch.where(y == z, torch.zeros_like(y), y - z).abs()  # -inf is equal to -inf
        errors[name] = float(difference.nan_to_num(nan=torch.inf).max())  # a NaN is no maximum to Python
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


def counted(case: ParallelCase, x: Inputs) -> tuple[dict[str, Tensor], set[str]]:
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
        results = parallel(case, x, call)
    # Where heads are traded a gradient of lse is announced, which a loss without lse never sends.
    passes = counts if case.dlse or case.strategy == "gather" else ("forward",)
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

    def _dense(self, problem: AttentionProblem, x: Operands) -> Operands:
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
    if _unpacking.backend.name not in BACKENDS:
        register_backend(_unpacking.backend)
    return _unpacking


def compared_by_unpacking(case: ParallelCase) -> tuple[dict[str, float], set[str]]:
    """`compared` on the backend that reads prepared masks, and the forms in which masks came."""
    backend = registered()
    backend.forms.clear()
    return compared(case.with_(backend="unpacking")), set(backend.forms)


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
    mine, more = (case.with_(**change), keywords) if is_wrong else (case, {})
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
    mine = case.with_(is_causal=False) if dist.get_rank() == dist.get_world_size() - 1 else case
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
        layers.append(
            (results[0], [t for t in (*arguments, keywords.get("sink")) if t is not None and t.requires_grad])
        )
        return results[0].detach().requires_grad_(), results[1].detach()

    for _ in range(2):
        parallel(case, x, layer)

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
    mine = case.with_(**change) if dist.get_rank() == dist.get_world_size() - 1 else case
    torch._dynamo.reset()
    compiled_call = torch.compile(context_parallel_attention, fullgraph=True, backend="aot_eager")
    return [raised(lambda: parallel(mine, draw(mine), compiled_call)) for _ in range(2)]


def compared_on_a_device_group() -> tuple[list[str], int, int]:
    """Return the error over a group of only a device, and how much is cached for it, meanwhile and afterwards."""

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


def second_derivative(strategy: str, backend: str) -> float | str:
    """Return how far the gradient of a gradient is from that of one process, or what is said of it."""
    layout = SequenceLayout.zigzag(16, dist.get_world_size())
    rank, group = dist.get_rank(), dist.group.WORLD
    torch.manual_seed(0)
    whole = [torch.randn(1, 16, 4, 8, dtype=torch.float64) for _ in range(3)]

    def second(*x: Tensor, **call: Any) -> Tensor:
        leaves = [y.detach().requires_grad_() for y in x]
        attend: Any = flash_dmattn.attention if not call else context_parallel_attention
        out = attend(*leaves, is_causal=True, **(call or {"backend": "eager"}))
        first = torch.autograd.grad(out.square().sum(), leaves, create_graph=True)
        return torch.stack(torch.autograd.grad(sum(y.square().sum() for y in first), leaves))

    own = [layout.shard(x, 1, rank) for x in whole]
    try:
        got = second(*own, group=group, layout=layout, strategy=strategy, backend=backend)
    except NotImplementedError as error:
        return str(error)
    return float((got - layout.shard(second(*whole), 2, rank)).abs().max())


def under_fake_tensors() -> tuple[tuple[int, ...], tuple[str, bool]]:
    """Return the shape of a result under fake tensors, and what this rank says of its own mistake there."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    over = {"group": dist.group.WORLD, "layout": SequenceLayout.zigzag(16, 2)}
    with FakeTensorMode():
        q = torch.empty(1, 8, 2, 4)
        out = context_parallel_attention(q, q, q, **over)
        kind, message = raised(lambda: context_parallel_attention(q, q, q, dropout_p=1.5, **over))
    return tuple(out.shape), (kind, message.startswith(f"rank {dist.get_rank()}: dropout_p is 1.5"))


def gathered(dtype: torch.dtype) -> tuple[bool, bool, tuple[str, str], bool]:
    """Return whether a gathered tensor and its gradient are right, what a mistake raises, and if they still are.

    They also are where one rank has no gradient of what was gathered.
    """
    layout, rank, size = SequenceLayout.zigzag(16, dist.get_world_size()), dist.get_rank(), dist.get_world_size()
    over = {"group": dist.group.WORLD, "layout": layout}
    torch.manual_seed(0)
    every, factors = torch.randn(3, 16, 5).to(dtype), torch.randn(size, 3, 16, 5).to(dtype)

    def equal(is_without: bool = False) -> tuple[bool, bool]:
        own = layout.shard(every, 1, rank).requires_grad_()
        result = gather_sequence(own, 1, **over)
        ((Without.apply(result) if is_without and rank == 0 else result) * factors[rank]).sum().backward()
        total = factors.float() if dtype == torch.bfloat16 else factors
        wanted = exchange.summed(list(total[int(is_without) :])).to(dtype)
        assert own.grad is not None
        return torch.equal(result, every), torch.equal(own.grad, layout.shard(wanted, 1, rank))

    results = equal()
    wrong = layout.shard(every, 1, rank)[..., : 4 + (rank > 0)]
    said = raised(lambda: gather_sequence(wrong, 1, **over))
    return *results, said, all(equal()) and all(equal(is_without=True))


class Without(torch.autograd.Function):
    """The same values, without a gradient."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Keep nothing."""

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> None:
        return None


def summed_beside_values() -> tuple[float, float, tuple[str, str]]:
    """Return how far gradients of values of lists, and of an added bias, are off, and what a mistake raises.

    The mistake is a bias without a gradient on the last rank.
    """
    torch.manual_seed(0)
    layout, rank, f64 = SequenceLayout.zigzag(32, dist.get_world_size()), dist.get_rank(), torch.float64
    q, k, v = torch.randn(3, 2, 32, 4, 8, dtype=f64)
    index = torch.randint(-1, 32, (2, 1, 32, 7))
    values = torch.randn(2, 4, 32, 7, dtype=f64)
    bias, own_bias = (torch.arange(32.0, dtype=f64).sin()[None].requires_grad_() for _ in range(2))
    own = layout.shard(values, 2, rank).requires_grad_()
    lists = ShardedMask.from_lists(layout.shard(index, 2, rank), layout, rank, is_causal=True)
    over = {"group": dist.group.WORLD, "layout": layout, "reduce_bias_grad": True}
    rows = [layout.shard(x, 1, rank) for x in (q, k, v)]
    wrong = own_bias.detach() if rank == dist.get_world_size() - 1 else own_bias
    said = raised(lambda: context_parallel_attention(*rows, lists, ListBias(own, wrong), **over))
    context_parallel_attention(*rows, lists, ListBias(own, own_bias), **over).square().sum().backward()
    lists_of_all = PreparedMask.from_lists(index, seqlen_k=32, is_causal=True)
    values.requires_grad_()
    flash_dmattn.attention(q, k, v, lists_of_all, ListBias(values, bias)).square().sum().backward()
    wanted = layout.shard(values.grad, 2, rank), bias.grad
    first, second = (float((x.grad - y).abs().max()) for x, y in zip((own, own_bias), wanted))
    return first, second, said


def gradient_of_bias(case: ParallelCase) -> Tensor:
    return parallel(case, draw(case))["dbias"]


def compiled(case: ParallelCase) -> float:
    """The largest difference between a compiled call, in one graph, and the same call run; gradients too."""
    torch._dynamo.reset()
    x = draw(case)
    wanted = parallel(case, x)
    results = parallel(case, x, torch.compile(context_parallel_attention, fullgraph=True, backend="aot_eager"))
    assert results.keys() == wanted.keys()
    return max(float((results[name] - y).abs().max()) for name, y in wanted.items())


def check_operators(case: ParallelCase) -> list[str]:
    """`torch.library.opcheck` of every operator that a call and its backward pass run; their names."""
    calls: dict[str, tuple[Any, tuple[Any, ...]]] = {}

    def record(operator: Any, arguments: Any, result: Any) -> None:
        if operator.namespace == "flash_dmattn":
            calls.setdefault(str(operator), (operator, arguments))

    with Dispatched(record):
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
