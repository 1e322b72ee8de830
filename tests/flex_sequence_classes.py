"""Classes of calls with sequences for `tests/flex_check.py`: each is compiled once or twice, whatever its lengths."""

from __future__ import annotations

import random
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from sequence_calls import SequenceCall
from torch import Tensor

from flash_dmattn import Sequences
from flash_dmattn.problem import dtype_name

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


class SequenceClass(NamedTuple):
    """One class of calls.

    A form is a word and letters: "position" with "b" (one for each sequence), "i", "j"; "rows", of packed queries, with
    "j"; "keys", packed. Each may have "h" (Hq heads) or "k" (Hk heads).
    """

    dtype: torch.dtype
    heads: tuple[int, int]
    dims: tuple[int, int]
    layout: str
    mask: str | None
    bias: str | None
    needs_grad: tuple[str, ...]
    flags: str

    def __str__(self) -> str:
        return (
            f"{self.layout} {dtype_name(self.dtype)} H{self.heads[0]}/{self.heads[1]} D{self.dims[0]}/{self.dims[1]} "
            f"mask {self.mask} bias {self.bias} d[{' '.join(self.needs_grad)}] {self.flags}"
        )


ALL, QKV = ("q", "k", "v", "bias"), ("q", "k", "v")
# Sinks in fp32 alone: beside 16 bits out is rounded once more, which the rule of accuracy does not know.
CLASSES = (
    SequenceClass(BF16, (4, 2), (64, 64), "packed", None, None, QKV, "causal"),
    SequenceClass(BF16, (4, 2), (64, 64), "packed", None, "position hij", ALL, "causal lse"),
    SequenceClass(FP32, (4, 4), (64, 64), "packed", "rows kj", "keys h", (*ALL, "sink"), "causal lse sink"),
    SequenceClass(FP16, (6, 2), (80, 64), "packed", "position bij", "rows kj", ALL, "window lse"),
    SequenceClass(BF16, (4, 1), (128, 128), "packed", "keys ", "position bkij", ALL, "softcap causal lse"),
    SequenceClass(BF16, (4, 4), (64, 64), "packed", "rows ", "position hj", ALL, "lse"),
    SequenceClass(FP32, (4, 2), (32, 48), "packed", "position bhj", "rows h", (*ALL, "sink"), "window lse sink"),
    SequenceClass(BF16, (8, 2), (64, 64), "padded", None, "position ij", ALL, "causal lse"),
    SequenceClass(BF16, (4, 2), (64, 64), "padded", "position bij", None, QKV, "causal"),
    SequenceClass(FP32, (2, 2), (16, 16), "padded", "position bi", "position bhij", (*ALL, "sink"), "lse sink"),
    SequenceClass(BF16, (4, 2), (64, 64), "packed", "rows kj", "rows hj", (), "causal lse"),
    SequenceClass(BF16, (8, 1), (64, 64), "one query", None, "position hj", (), "causal lse"),
)
LENGTHS = (0, 1, 31, 64, 127, 128, 129, 200, 300, 520)


def shape_of(form: str, call: dict[str, int], heads: tuple[int, int]) -> tuple[int, ...]:
    """The shape of a form; `call` has number, most_q, most_k, tokens_q and tokens_k."""
    word, letters = form.split(" ")
    h = heads[0] if "h" in letters else heads[1] if "k" in letters else 1
    if word == "keys":
        return h, 1, call["tokens_k"]
    j = call["most_k"] if "j" in letters else 1
    if word == "rows":
        return h, call["tokens_q"], j
    return call["number"] if "b" in letters else 1, h, call["most_q"] if "i" in letters else 1, j


def draw(kind: SequenceClass, rng: random.Random, device: str) -> SequenceCall:
    """A random call of a class: another number of sequences, other lengths, rows of no sequence in half of them."""
    torch.manual_seed(rng.randrange(2**31))
    number = rng.randint(2, 6)
    used_q = [1 if kind.layout == "one query" else rng.choice(LENGTHS) for _ in range(number)]
    used_k = [rng.choice(LENGTHS) for _ in range(number)]
    used_q[0], used_k[0] = max(used_q[0], 1), max(used_k[0], 31)
    spare = rng.random() < 0.5
    slots_q, slots_k = ([n + (rng.choice((0, 1, 40)) if spare else 0) for n in side] for side in (used_q, used_k))
    edges_q, edges_k = ([0, *accumulate(side)] for side in (slots_q, slots_k))
    most = {"most_q": max(2, *used_q), "most_k": max(used_k) + rng.choice((0, 8))}

    def table(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    if kind.layout == "packed":
        tokens = {"tokens_q": edges_q[-1] + 3, "tokens_k": edges_k[-1] + 5}
        sequences = Sequences.packed(
            table(edges_q),
            table(edges_k),
            max_seqlen_q=most["most_q"],
            max_seqlen_k=most["most_k"],
            seqlens_q=table(used_q),
            seqlens_k=table(used_k),
        )
        shape_q, shape_k = (tokens["tokens_q"],), (tokens["tokens_k"],)
        firsts_q, firsts_k = edges_q, edges_k
    else:
        most["most_q"] = 1 if kind.layout == "one query" else most["most_q"]
        tokens = {"tokens_q": 0, "tokens_k": 0}
        sequences = Sequences.padded(table(used_k), table(used_q))
        shape_q, shape_k = (number, most["most_q"]), (number, most["most_k"])
        firsts_q = firsts_k = [0] * number
    (heads, heads_k), (dim, dim_v) = kind.heads, kind.dims

    def normal(*shape: int, dtype: torch.dtype = kind.dtype) -> Tensor:
        return torch.randn(shape, device=device).to(dtype)

    sizes = {"number": number} | most | tokens
    mask = bias = None
    if kind.mask is not None:
        mask = torch.rand(shape_of(kind.mask, sizes, kind.heads), device=device) < rng.choice((0.3, 0.9))
    if kind.bias is not None:
        bias = normal(*shape_of(kind.bias, sizes, kind.heads))
    flags: dict[str, Any] = {"is_causal": "causal" in kind.flags, "window_size": None, "softmax_scale": None}
    flags |= {"softcap": 2.5 if "softcap" in kind.flags else 0.0, "dropout_p": 0.0}
    if "window" in kind.flags:
        flags["window_size"] = (rng.randint(0, 300), rng.choice((0, 20)))
    of_rows = (heads, *shape_q) if len(shape_q) == 1 else (number, heads, shape_q[1])
    return SequenceCall(
        normal(*shape_q, heads, dim),
        normal(*shape_k, heads_k, dim),
        normal(*shape_k, heads_k, dim_v),
        mask,
        bias,
        normal(heads) if "sink" in kind.flags else None,
        sequences,
        tuple(zip(firsts_q, used_q, firsts_k, used_k, strict=False)),
        flags,
        normal(*shape_q, heads, dim_v),
        normal(*of_rows, dtype=FP32) if "lse" in kind.flags else None,
        kind.needs_grad,
        str(kind),
    )
