"""`SequenceCase`: a call with sequences of given lengths, with letters for the shapes of its mask and bias."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from cases import DEVICE
from sequence_calls import LEAVES, SequenceCall
from torch import Tensor

from flash_dmattn import Sequences
from flash_dmattn.problem import Layout

STANDARD = {"is_causal": False, "window_size": None, "softcap": 0.0, "softmax_scale": None, "dropout_p": 0.0}


@dataclass(frozen=True)
class SequenceCase:
    """The queries and keys of each sequence, where they lie, and the rest of a call; `build` draws its tensors.

    Letters mean what they mean in `cases.Case`: "B" stands for the number of sequences, "Lq" and "Lk" for the most
    queries and
    keys of one, and "Tq" and "Tk" for all packed queries and keys.
    """

    lengths: tuple[tuple[int, int], ...]
    layout: Layout = "packed"
    page_size: int = 16
    before: int = 0  # rows of no sequence before the first, of packed queries and of packed keys
    spare: tuple[int, ...] = ()  # the same after each
    trailing: tuple[int, int] = (5, 5)  # rows of packed queries, and of packed keys, after the last sequence
    most: tuple[int, int] | None = None  # queries and keys of a sequence; by default of the longest
    heads: tuple[int, int] = (4, 2)
    head_dims: tuple[int, int] = (64, 64)
    dtype: torch.dtype = torch.bfloat16
    bias_dtype: torch.dtype | None = None
    mask: tuple[str, ...] | None = None
    allowed: float = 0.7  # of the pairs, by a mask
    bias: tuple[str, ...] | None = None
    sink: torch.dtype | None = torch.float32
    dlse: bool = True
    needs_grad: tuple[str, ...] = LEAVES
    seed: int = 0

    def build(self, device: str = DEVICE, **flags: Any) -> SequenceCall:
        """The call, the same for the same case on every device; flags as `attention` takes them."""
        random, number = torch.Generator().manual_seed(self.seed), len(self.lengths)

        def normal(*shape: int, dtype: torch.dtype | None = None) -> Tensor:
            return torch.randn(shape, generator=random).to(device, dtype or self.dtype)

        def table(values: Sequence[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int32, device=device)

        used = [[pair[side] for pair in self.lengths] for side in (0, 1)]
        most_q, most_k = self.most or (max(used[0], default=0), max(used[1], default=0))
        spare = self.spare or (0,) * number
        slots = [[n + more for n, more in zip(side, spare, strict=True)] for side in used]
        edges = [list(accumulate(side, initial=self.before)) for side in slots]
        tokens = [edge[-1] + rows for edge, rows in zip(edges, self.trailing, strict=True)]
        packs_q, packs_k = self.layout in ("packed", "paged_packed"), self.layout == "packed"
        rows_q, rows_k = (tokens[0],) if packs_q else (number, most_q), (tokens[1],) if packs_k else (number, most_k)
        firsts = [edges[0] if packs_q else [0] * number, edges[1] if packs_k else [0] * number]
        if packs_k:
            bounds = {"max_seqlen_q": most_q, "max_seqlen_k": most_k}
            if any(spare):
                bounds |= {"seqlens_q": table(used[0]), "seqlens_k": table(used[1])}
            # `packed` refuses edges that do not begin with 0; kernels are handed bounds.
            make = partial(Sequences, "packed") if self.before else Sequences.packed
            sequences = make(*map(table, edges), **bounds)
        elif self.layout == "padded":
            sequences = Sequences.padded(seqlens_q=table(used[0]), seqlens_k=table(used[1]))
        else:  # pages lie in any order
            columns = -(-most_k // self.page_size) + 1
            rows_k = (number * columns + 2, self.page_size)
            pages = torch.randperm(rows_k[0], generator=random)[: number * columns].view(number, columns)
            queries = {"cu_seqlens_q": table(edges[0]), "max_seqlen_q": most_q} if packs_q else {}
            used[0] = used[0] if packs_q else [most_q] * number  # of every slot
            sequences = Sequences.paged(pages.int().to(device), table(used[1]), max_seqlen_k=most_k, **queries)
        heads, heads_k = self.heads
        sizes = {"B": number, "Hq": heads, "Hk": heads_k, "Lq": most_q, "Lk": most_k, "Tq": tokens[0], "Tk": tokens[1]}

        def shape(letters: tuple[str, ...]) -> tuple[int, ...]:
            return tuple(sizes.get(letter, 1) for letter in letters)

        mask = None if self.mask is None else (torch.rand(shape(self.mask), generator=random) < self.allowed).to(device)
        bias = None if self.bias is None else normal(*shape(self.bias), dtype=self.bias_dtype)
        absent = {name for name, x in (("bias", bias), ("sink", self.sink)) if x is None}
        is_paged = self.layout in ("paged", "paged_packed")  # and no kernel has their gradients
        needs_grad = () if is_paged else tuple(name for name in self.needs_grad if name not in absent)
        return SequenceCall(
            q=normal(*rows_q, heads, self.head_dims[0]),
            k=normal(*rows_k, heads_k, self.head_dims[0]),
            v=normal(*rows_k, heads_k, self.head_dims[1]),
            mask=mask,
            bias=bias,
            sink=None if self.sink is None else normal(heads, dtype=self.sink),
            sequences=sequences,
            lengths=tuple(zip(firsts[0], used[0], firsts[1], used[1], strict=False)),
            flags=STANDARD | flags,
            dout=normal(*rows_q, heads, self.head_dims[1]),
            dlse=normal(*rows_q[:-1], heads, rows_q[-1], dtype=torch.float32) if self.dlse and needs_grad else None,
            needs_grad=needs_grad,
            told=f"{self.repro()}.build({', '.join(f'{name}={x!r}' for name, x in flags.items())})",
        )

    def repro(self) -> str:
        """One line that rebuilds this case."""
        default = SequenceCase(())
        names = [f.name for f in fields(self) if getattr(self, f.name) != getattr(default, f.name)]
        return f"SequenceCase({', '.join(f'{name}={getattr(self, name)!r}' for name in names)})"

    def with_(self, **changes: Any) -> SequenceCase:
        """A copy with some fields changed."""
        return replace(self, **changes)
