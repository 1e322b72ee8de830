"""The calls that are timed: of one GPU with whole tensors, and of a rank with its share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

import flash_dmattn
from flash_dmattn import Sequences
from flash_dmattn.biases import ListBias
from flash_dmattn.distributed import SequenceLayout, ShardedMask, context_parallel_attention
from flash_dmattn.distributed import call as parallel_call
from flash_dmattn.masks import PreparedMask, topk_mask

from .measure import Group


@dataclass(frozen=True)
class Sizes:
    """Sizes of the cases."""

    lengths: tuple[int, ...] = (16384, 32768, 65536, 131072)
    long: tuple[int, ...] = (262144, 524288)  # grouped heads alone: one GPU takes 13 s for both passes of the last
    heads: tuple[tuple[int, int], ...] = ((32, 8), (32, 32))
    head_dim: int = 128
    head_groups: tuple[int | None, ...] = (1, 2, 4)
    biased: tuple[int, int, int] = (16384, 16, 4)  # length, heads, key-value heads: its bias takes 8.6 GB
    sparse: tuple[int, int, int] = (32768, 32, 8)
    kept: int = 2048
    windowed: tuple[int, int, int] = (131072, 32, 8)
    window: int = 4096
    packed: tuple[int, int, int] = (65536, 32, 8)
    document: int = 4096  # mean length of a document
    padded: tuple[int, int, int] = (32768, 32, 8)
    listed: tuple[int, int, int] = (32768, 32, 2)
    dropped: tuple[int, int, int] = (32768, 16, 16)
    dtype: torch.dtype = torch.bfloat16


QUICK = Sizes(
    lengths=(256,),
    long=(),
    heads=((4, 2), (4, 4)),
    head_dim=16,
    head_groups=(1, 2),
    biased=(128, 4, 2),
    sparse=(256, 4, 2),
    kept=32,
    windowed=(1024, 4, 2),
    window=64,
    packed=(256, 4, 2),
    document=32,
    padded=(256, 4, 2),
    listed=(256, 4, 2),
    dropped=(256, 4, 2),
    dtype=torch.float32,
)
# A rate, for heads of DROPPED_DIM: cuda has kernels with dropout for these alone.
DROPOUT, DROPPED_DIM = 0.1, 64
ENTRIES = 4  # of a padded batch
IN_GRAPHS = 32768  # longer calls do not wait for the host
PEERS_IN_FULL = 65536  # longer calls run beside the fastest form of a peer alone


class Bound(NamedTuple):
    """One system's call.

    Attributes:
        call: what to run.
        leaves, dout: the inputs whose gradients are taken, and the gradient of out.
        names: of out and the gradients.
        places: where our rows stand among the rows of the system, None where they are the same.
        around: what both passes run inside of.
        in_graphs: whether passes are replayed as CUDA graphs.
    """

    call: Callable[[], Tensor]
    leaves: list[Tensor]
    dout: Tensor
    names: tuple[str, ...]
    places: Tensor | None = None
    around: AbstractContextManager[Any] = nullcontext()
    in_graphs: bool = False


@dataclass(frozen=True)
class Work:
    """One case.

    Attributes:
        kind: "plain", "window", "bias" (B, Hq, L, L) with its gradient, or "topk" with a bias of the keys. "packed" are
            documents in one sequence, "padded" entries of lengths in equal steps. "lists" are single keys with values
            of their entries. "dropout" drops the same on one GPU and on ranks. All are causal.
    """

    kind: str
    length: int
    heads: int
    kv_heads: int
    head_dim: int
    head_groups: tuple[int | None, ...]
    kept: int
    window: int
    document: int
    dtype: torch.dtype

    @property
    def name(self) -> str:
        """Its name in rows and for --only."""
        names = {
            "plain": "causal",
            "bias": "causal, bias (B,Hq,L,L)",
            "topk": f"top-{self.kept}, bias (B,Hq,1,L)",
            "window": f"window {self.window}",
            "packed": f"documents of {self.document}",
            "packed, dropout": f"documents of {self.document}, dropout {DROPOUT}",
            "padded": f"{ENTRIES} padded entries",
            "lists": f"lists of {self.kept} keys, bias of entries",
            "dropout": f"dropout {DROPOUT}",
        }
        return f"{names[self.kind]}, {self.length}, {self.heads} on {self.kv_heads}"

    @property
    def is_plain(self) -> bool:
        """Whether peers can do it."""
        return self.kind == "plain"

    @property
    def is_masked(self) -> bool:
        """Whether it has a mask, which is prepared with causality in it."""
        return self.kind in ("topk", "lists")

    @property
    def window_size(self) -> tuple[int, int] | None:
        """The window of the call, causal besides."""
        return (self.window, -1) if self.kind == "window" else None

    @property
    def dropout_p(self) -> float:
        return DROPOUT if self.kind in ("dropout", "packed, dropout") else 0.0

    @property
    def is_packed(self) -> bool:
        return self.kind in ("packed", "packed, dropout")

    @property
    def lengths(self) -> Tensor:
        """The lengths of padded entries, from an eighth of all positions on."""
        return torch.linspace(self.length // 8, self.length, ENTRIES).int()

    def layout(self, group: Group) -> SequenceLayout:
        work = None
        if self.is_packed:
            lengths = self.bounds().diff().tolist()
            work = torch.cat([torch.arange(n) + 1 for n in lengths])
        elif self.kind == "padded":
            positions = torch.arange(self.length)
            work = ((positions + 1) * (positions < self.lengths[:, None])).sum(0)
        if work is not None:
            return SequenceLayout.balanced(work.tolist(), self.length, group.size, pieces=4)
        return SequenceLayout.zigzag(self.length, group.size)

    def bounds(self) -> Tensor:
        """Where documents begin, and the last one ends: at random places, so that lengths differ as in a corpus."""
        draw = torch.Generator().manual_seed(1)
        inner = torch.randperm(self.length - 1, generator=draw)[: self.length // self.document - 1] + 1
        return torch.cat([torch.tensor([0]), inner.sort().values, torch.tensor([self.length])])

    def sequences(self, group: Group) -> Sequences | None:
        if self.kind == "padded":
            used = self.lengths.to(group.device)
            return Sequences.padded(seqlens_q=used, seqlens_k=used)
        return Sequences.packed(self.bounds().to(group.device)) if self.is_packed else None

    def tensors(self, group: Group) -> dict[str, Tensor]:
        """q, k, v and dout, and the bias where there is one: whole, and the same on every rank."""
        generator = torch.Generator(group.device).manual_seed(self.length + self.kv_heads)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, dtype=self.dtype, device=group.device, generator=generator)

        tensors = {
            name: normal(ENTRIES if self.kind == "padded" else 1, self.length, heads, self.head_dim)
            for name, heads in (("q", self.heads), ("k", self.kv_heads), ("v", self.kv_heads), ("dout", self.heads))
        }
        if self.kind == "bias":
            tensors["bias"] = normal(1, self.heads, self.length, self.length)
        elif self.kind == "topk":
            tensors["bias"] = normal(1, self.heads, 1, self.length)
        elif self.kind == "lists":
            tensors["bias"] = normal(1, self.kv_heads, self.length, self.kept)
        return tensors

    def index(self, group: Group) -> Tensor:
        """Return the lists of a whole call, (1, 1, L, K): keys anywhere before each query."""
        generator = torch.Generator(group.device).manual_seed(1)
        drawn = torch.rand(1, 1, self.length, self.kept, device=group.device, generator=generator)
        seen = torch.arange(1, self.length + 1, device=group.device)[:, None]
        return (drawn * seen).to(torch.int32).minimum(seen - 1)

    def added(self, bias: list[Tensor]) -> list[Any]:
        """The bias as calls take it, from its tensor."""
        return [ListBias(x) if self.kind == "lists" else x for x in bias]

    def mask_rows(self, group: Group, rows: Tensor | None = None) -> Tensor:
        """Return the mask of a whole call, (1, Hk, L, L), or some rows of it."""
        generator = torch.Generator(group.device).manual_seed(1)
        scores = torch.randn(self.kv_heads, 1, self.length, device=group.device, generator=generator)
        mask = topk_mask(scores, self.kept, is_causal=True)
        return mask if rows is None else mask.index_select(2, rows)

    def on_one_gpu(self, group: Group) -> Bound:
        """Return the call of one GPU."""
        x = self.tensors(group)
        mask = None
        if self.kind == "lists":
            mask = PreparedMask.from_lists(self.index(group), seqlen_k=self.length, is_causal=True)
        elif self.is_masked:
            mask = PreparedMask.from_mask(self.mask_rows(group), is_causal=True)
        sequences = self.sequences(group)
        leaves = [x[name].requires_grad_() for name in ("q", "k", "v", "bias") if name in x]
        q, k, v, *bias = leaves

        def call() -> Tensor:
            tokens = (q[0], k[0], v[0]) if self.is_packed else (q, k, v)
            flags: dict[str, Any] = {"is_causal": True, "window_size": self.window_size, "sequences": sequences}
            if self.dropout_p > 0:
                torch.manual_seed(1)
                flags["dropout_p"] = self.dropout_p
            out = flash_dmattn.attention(*tokens, mask, *self.added(bias), **flags)
            assert isinstance(out, Tensor)
            return out.view(q.shape)

        return Bound(call, leaves, x["dout"], names_of(leaves))

    def shared(
        self,
        group: Group,
        head_groups: int | None,
        *,
        strategy: Literal["gather", "ulysses"] = "gather",
        all_keys: bool = False,
        in_graphs: bool = False,
    ) -> Bound:
        """Return the call of this rank; with `all_keys` every key is sent, also under a window."""
        layout, x = self.layout(group), self.tensors(group)
        x = {name: self._share(layout, name, tensor, group.rank) for name, tensor in x.items()}
        mask = None
        if self.kind == "lists":
            lists = layout.shard(self.index(group), 2, group.rank)
            mask = ShardedMask.from_lists(lists, layout, group.rank, is_causal=True)
        elif self.is_masked:
            rows = self.mask_rows(group, layout.positions(group.rank).to(group.device))
            mask = ShardedMask.from_mask(rows, layout, group.rank, is_causal=True)
        leaves = [x[name].requires_grad_() for name in ("q", "k", "v", "bias") if name in x]
        q, k, v, *bias = leaves
        world, sequences = dist.group.WORLD, self.sequences(group)
        assert world is not None

        def call() -> Tensor:
            tokens = (q[0], k[0], v[0]) if self.is_packed else (q, k, v)
            if self.dropout_p > 0:
                torch.manual_seed(1 + group.rank)
            out = context_parallel_attention(
                *tokens,
                mask,
                *self.added(bias),
                group=world,
                layout=layout,
                strategy=strategy,
                head_groups=head_groups,
                is_causal=mask is None,
                window_size=self.window_size,
                sequences=sequences,
                dropout_p=self.dropout_p,
            )
            assert isinstance(out, Tensor)
            return out.view(q.shape)

        around = patch.object(parallel_call, "CLEAR_SHARE", -1.0) if all_keys else nullcontext()
        return Bound(call, leaves, x["dout"], names_of(leaves), around=around, in_graphs=in_graphs)

    def rows_of_rank(self, group: Group, results: Sequence[Tensor]) -> list[Tensor]:
        """out and the gradients of one GPU, where this rank has them."""
        layout, names = self.layout(group), ("dout", "q", "k", "v", "bias")
        return [self._share(layout, name, x.detach(), group.rank) for name, x in zip(names, results, strict=False)]

    def _share(self, layout: SequenceLayout, name: str, x: Tensor, rank: int) -> Tensor:
        # A bias of the keys is shared as they are, one of the scores by its rows.
        dim = 1 if name != "bias" else 3 if self.kind == "topk" else 2
        return layout.shard(x.detach(), dim, rank).contiguous()


def names_of(leaves: Sequence[Tensor]) -> tuple[str, ...]:
    """out, and of each leaf its gradient."""
    return ("out", "dq", "dk", "dv", "dbias")[: len(leaves) + 1]


def cases(group: Group, sizes: Sizes) -> Iterator[Work]:
    """Yield every case; those whose bias or mask takes long to make come last."""
    rest: dict[str, Any] = {"head_dim": sizes.head_dim, "kept": sizes.kept, "window": sizes.window}
    rest |= {"document": sizes.document, "dtype": sizes.dtype}
    for length in sizes.lengths:
        for heads, kv_heads in sizes.heads:
            yield Work("plain", length, heads, kv_heads, head_groups=sizes.head_groups, **rest)
    for length in sizes.long:
        yield Work("plain", length, *sizes.heads[0], head_groups=(1,), **rest)
    yield Work("window", *sizes.windowed, head_groups=(None,), **rest)
    yield Work("bias", *sizes.biased, head_groups=(None,), **rest)
    yield Work("topk", *sizes.sparse, head_groups=(None,), **rest)
    yield Work("packed", *sizes.packed, head_groups=(None,), **rest)
    yield Work("padded", *sizes.padded, head_groups=(None,), **rest)
    yield Work("lists", *sizes.listed, head_groups=(None,), **rest)
    rest["head_dim"] = min(DROPPED_DIM, sizes.head_dim)
    for kind in ("dropout", "packed, dropout"):
        yield Work(kind, *sizes.dropped, head_groups=(None,), **rest)
