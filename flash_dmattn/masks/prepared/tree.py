"""`TreeMask`: which of the new tokens of a sequence each of them sees, as bits; all earlier keys are seen."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar, Literal

import torch

from ...problem import MaskView
from ..pad import pad
from ..saved import restore_tree
from .packing import WORD, unpack_words
from .types import call_key

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True, eq=False, repr=False)
class TreeMask:
    """A mask of the new tokens of sequences, of n each at most; it says nothing of the keys before them.

    Attributes:
        bits: int32 (S or 1, n, ceil(n / 32)), contiguous. Bit t % 32 of word t // 32 of row i says whether query i of
            a sequence attends to new token t, which is its key Lk - Lq + t. Bits past n are 0.
    """

    form: ClassVar[Literal["tree"]] = "tree"

    bits: torch.Tensor

    @property
    def shape(self) -> tuple[int, int, int]:
        """(S or 1, n, n)."""
        number, tokens, _ = self.bits.shape
        return number, tokens, tokens

    @property
    def device(self) -> torch.device:
        """Where its tensor is."""
        return self.bits.device

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Its fields that are tensors."""
        return (self.bits,)

    @property
    def view(self) -> MaskView:
        """What a kernel backend receives."""
        return MaskView(self.form, self.tensors)

    @cached_property
    def call_key(self) -> tuple[object, ...]:
        """Tell calls with such masks apart, whatever these allow; hashable."""
        return call_key(self)

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Self:
        """The same mask on a device, as `torch.Tensor.to` has it.

        >>> import torch
        >>> from flash_dmattn.masks import prepare_tree
        >>> prepare_tree(torch.eye(3, dtype=torch.bool)[None]).to("cpu")
        TreeMask(shape=(1, 3, 3), device='cpu')
        """
        return type(self)(self.bits.to(device, non_blocking=non_blocking))

    def unpacked(self) -> torch.Tensor:
        """The bool tensor (S or 1, n, n) that it was made of."""
        return unpack_tree(self.bits)

    def __reduce__(self) -> tuple[object, ...]:
        return restore_tree, (self.bits,)

    def __repr__(self) -> str:
        # Not the values: printing them waits for the device.
        return f"TreeMask(shape={self.shape}, device={str(self.device)!r})"


def prepare_tree(tree: torch.Tensor) -> TreeMask:
    """Packs the trees of drafts, for `attention(..., mask, sequences=...)`: one mask for all layers.

    The last n keys of a sequence are its new tokens, the queries of the call. The result stands for a mask of all keys,
    of which no backend that reads it makes one::

        mask = torch.ones(n, Lk, dtype=torch.bool)  # of one sequence: every earlier key is seen
        mask[:, Lk - n :] = tree

    Args:
        tree: bool (S or 1, n, n): whether query i of a sequence attends to its new token j. n is max_seqlen_q of the
            calls, which a shorter sequence uses the first rows and columns of; 1 in front is one tree for all.

    Returns:
        TreeMask, of n * n / 8 bytes for each tree.

    Raises:
        TypeError: not a bool tensor.
        ValueError: another rank, or other numbers of rows and columns.

    Example:
        >>> from flash_dmattn.masks import prepare_tree
        >>> chain = torch.ones(1, 4, 4, dtype=torch.bool).tril()  # what is_causal allows
        >>> prepare_tree(chain).bits.flatten().tolist()
        [1, 3, 7, 15]
    """
    if not isinstance(tree, torch.Tensor):
        raise TypeError(f"tree is a {type(tree).__name__} and must be a torch.bool tensor.")
    if tree.dtype != torch.bool:
        raise TypeError(f"tree has dtype {tree.dtype} and must be torch.bool, True = attend; pass tree != 0.")
    if tree.dim() != 3 or tree.shape[1] != tree.shape[2]:
        raise ValueError(f"tree has shape {tuple(tree.shape)} and must be (sequences or 1, new tokens, new tokens).")
    # As `pack_words`, which torch.compile cannot trace: it asks where tensors start in memory.
    words = pad(tree, (0, -tree.shape[2] % WORD)).unflatten(2, (-1, WORD)).long()
    shifts = torch.arange(WORD, device=tree.device)
    return TreeMask((words << shifts).sum(3).to(torch.int32))  # of a set bit 31 the lower half of an int64


def unpack_tree(bits: torch.Tensor) -> torch.Tensor:
    """The bool tensor (S or 1, n, n) of the bits of a `TreeMask`."""
    return unpack_words(bits, bits.shape[1])
