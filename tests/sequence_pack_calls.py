"""Random masks of sequences, to be packed by kernels and by PyTorch, which have to agree in every bit."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple
from unittest import mock

import sequence_calls
import torch
from cases import DEVICE
from torch import Tensor

from flash_dmattn.masks.prepared.packing import MaskPacking, pack_sequences
from flash_dmattn.problem import Layout, SequenceSpec, collapse

# Around the edges of words and of tiles.
LENGTHS = (0, 1, 31, 32, 33, 127, 128, 129, 300)
LAYOUTS: tuple[Layout, ...] = ("packed", "packed", "packed", "padded", "paged", "paged_packed")
WINDOWS = ((-1, -1), (-1, -1), (-1, 0), (-1, 0), (3, 0), (40, 9), (0, 0), (-1, 130), (200, -1), (2**62, 0), (5, 2**40))
NAMES = ("bits", "classes", "row_lists", "col_lists")
MARGIN = 2048


class PackCall(NamedTuple):
    """The arguments of `pack_sequences`; `mask_bytes`: of the mask, any but 0 for True."""

    mask_bytes: Tensor
    bounds: Tensor
    mask_packing: MaskPacking
    spec: SequenceSpec
    window: tuple[int, int]
    told: str

    def packed_by(self, pack: Callable[..., list[Tensor]]) -> list[Tensor]:
        return pack(self.mask_bytes.view(torch.bool), *self[1:5])

    def wanted(self) -> list[Tensor]:
        """By PyTorch, which takes bools of 0 and 1."""
        return pack_sequences(self.mask_bytes != 0, *self[1:5])


def draw(number: int) -> PackCall:
    """The call of a number: sequences of `sequence_calls`, mostly with gaps that `attention` would refuse."""
    rng, generator = random.Random(f"pack {number}"), torch.Generator().manual_seed(number)
    is_loose = number % 10 > 0
    call = sequence_calls.draw(number, rng.choice(LAYOUTS), LENGTHS, (torch.float32,), (1,), is_loose=is_loose)
    spec, bounds = (
        call.sequences.describe(call.q, call.k, call.v),
        torch.tensor(call.lengths, dtype=torch.int32).view(-1, 4),
    )
    max_q, max_k, count = spec.max_seqlen_q, spec.max_seqlen_k, spec.number
    if rng.random() < 0.6:  # rows that loads of several bytes may read
        width = rng.choice((4, 16, 16))
        max_k = -(-max_k // width) * width
        spec = spec._replace(max_seqlen_k=max_k, rows_k=spec.rows_k if spec.packs_keys else max_k)

    packings: list[MaskPacking] = ["none", "none", "ragged", "tree"]
    packings += spec.packs_queries * ["queries"] * 5 + spec.packs_keys * ["keys"] * 2  # type: ignore[assignment]
    packing, heads = rng.choice(packings), rng.choice((1, 1, 2, 3))
    entries, i, j = rng.choice((1, max(count, 1))), rng.choice((1, max_q, max_q)), rng.choice((1, max_k, max_k))
    shape = (entries, heads, i, j)
    if packing == "queries":
        shape = (1, heads, rng.choice((1, spec.rows_q, spec.rows_q)), j)
    elif packing == "keys":
        shape = (1, heads, 1, spec.rows_k)
    elif packing == "ragged":
        pairs = sum(n * m for _, n, _, m in call.lengths)
        shape = (1, heads, 1, max(pairs - rng.choice((0, 0, 0, 40)), rng.choice((0, 1))))  # some may be missing
    elif packing == "tree":
        heads = 1
        shape = (entries, 1, max_q, max_q)
    mask = torch.rand(shape, generator=generator) < rng.choice((0.5, 0.05, 1.0))
    for allowed in (True, False):
        row, key = (rng.randrange(300) for _ in range(2))
        mask[..., row : row + 260, key : key + 260] = allowed
    laid, how = random_strides(mask, rng)
    window = rng.choice(WINDOWS)
    told = f"draw({number}): {packing} {tuple(shape)} {how}, {spec}, window {window}"
    return PackCall(laid, bounds.to(DEVICE), packing, spec, window, told)


def random_strides(mask: Tensor, rng: random.Random) -> tuple[Tensor, str]:
    """The same bools as bytes in other strides, inside of an allocation of bytes that are True, collapsed."""
    how = rng.choice(
        ("contiguous", "contiguous", "shifted", "odd rows", "wide rows", "transposed", "thirds", "expanded")
    )
    mask = mask.to(DEVICE)
    laid = mask.to(torch.uint8) * rng.choice((1, 1, 2, 128, 255))
    if mask.numel() == 0:
        return laid, "empty"
    entries, heads, rows, keys = mask.shape
    if how in ("shifted", "odd rows", "wide rows"):
        width = keys + {"shifted": 0, "odd rows": 1, "wide rows": 16 + -keys % 16}[how]
        start = rng.choice((1, 4, 16)) if how == "shifted" else 16
        storage = torch.ones(start + entries * heads * rows * width + 64, dtype=torch.uint8, device=mask.device)
        inside = storage[start : start + entries * heads * rows * width].view(entries, heads, rows, width)[..., :keys]
        laid = inside.copy_(laid)
    elif how == "transposed":
        laid = laid.mT.contiguous().mT
    elif how == "thirds":
        laid = laid.repeat_interleave(3, dim=3)[..., ::3]
    elif how == "expanded":
        dim = rng.randrange(4)
        laid = laid.narrow(dim, 0, 1).expand(laid.shape)
    laid = collapse(laid)
    # A dim of size 1 may have any stride.
    strides = [rng.choice((s, 7, 10**12 + 1)) if n == 1 else s for n, s in zip(laid.shape, laid.stride(), strict=True)]
    return laid.as_strided(laid.shape, strides), how


@contextmanager
def guarded() -> Iterator[None]:
    """Have `torch.empty` and `torch.zeros` allocate between margins, which have to keep their value."""
    made: list[tuple[Tensor, int]] = []

    def empty(*shape: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
        sizes = torch.Size(shape if isinstance(shape[0], int) else shape[0])
        unpadded = torch.full((sizes.numel() + 2 * MARGIN,), 77, dtype=dtype, device=device)
        made.append((unpadded, sizes.numel()))
        return unpadded[MARGIN : MARGIN + sizes.numel()].view(sizes)

    with mock.patch.multiple(torch, empty=empty, zeros=lambda *shape, **how: empty(*shape, **how).zero_()):
        yield
    for unpadded, size in made:
        outside = torch.cat((unpadded[:MARGIN], unpadded[MARGIN + size :]))
        assert bool((outside == 77).all()), "written beside a tensor"


def assert_same(call: PackCall, pack: Callable[..., list[Tensor]]) -> None:
    """All tensors have every bit of PyTorch's; every element is written, and none outside of them."""
    wanted = call.wanted()
    with guarded() if call.spec.number and call.mask_bytes.numel() else nullcontext():
        actual = call.packed_by(pack)
    for name, x, y in zip(NAMES, actual, wanted, strict=True):
        assert x.dtype == y.dtype and x.shape == y.shape and x.is_contiguous(), f"{name}: {x.shape}, not {y.shape}"
        assert torch.equal(x, y), f"{name} differs in {int((x != y).sum())} of {x.numel()} places"


def check_of(number: int) -> tuple[str, Callable[[], None]]:
    """The call of a number in words, and its check on the Triton kernels."""
    from flash_dmattn.triton_kernels import mask_pack, sequence_pack

    call = draw(number)
    strips, block = dict(mask_pack.STRIP), mask_pack.LIST_BLOCK
    # Several strips and several steps of a list, which masks this small would have one of.
    if DEVICE == "cpu" and random.Random(number).random() < 0.5:
        strips, block = dict.fromkeys(strips, (128, 4)), 2

    def check() -> None:
        with mock.patch.multiple(sequence_pack, STRIP=strips, LIST_BLOCK=block):
            assert_same(call, sequence_pack.pack_sequences)

    return call.told, check
