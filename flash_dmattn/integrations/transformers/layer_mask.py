"""`LayerMask`: what the mask function returns and every layer of a forward receives; never (Lq, Lk)."""

from __future__ import annotations

from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from ... import Sequences, masks
from ...masks import PreparedMask

# Where kernels read prepared masks; elsewhere they would be unpacked again.
PREPARING_DEVICES = ("cuda",)


class MaskArguments(NamedTuple):
    """The arguments of `attention` that a mask becomes."""

    mask: Tensor | PreparedMask | None = None
    is_causal: bool = False
    window_size: tuple[int, int] | None = None
    sequences: Sequences | None = None


class LayerMask(BlockMask):
    """Padding, documents, causality, a window and the used part of a static cache, for all layers of one forward.

    A BlockMask in name alone: of masks that come back, as those that generate() makes for a static cache, transformers
    lets 4-D tensors and BlockMasks through and takes anything else for 2-D padding.

    Args:
        shape: (B, 1, Lq, Lk), that of the tensor it stands for.
        padding: (B, 1, 1, Lk) bool, True = attend, or None.
        documents: (B, L), the document of each token in ascending runs, or None; Lq == Lk then.
        is_causal, window: as in `attention`, aligned to the last key, or the last one that is used.
        used: how many keys there are up to the last query, an int or a tensor of one; None for all Lk.
    """

    def __init__(
        self,
        shape: tuple[int, int, int, int],
        padding: Tensor | None = None,
        documents: Tensor | None = None,
        is_causal: bool = False,
        window: tuple[int, int] | None = None,
        used: int | Tensor | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        # Not super().__init__(), which wants the tables of FlexAttention.
        self._shape, self._device = shape, device
        self.padding, self.documents = padding, documents
        self.is_causal, self.window, self.used = is_causal, window, used
        self._found: dict[bool, MaskArguments] = {}

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(B, 1, Lq, Lk)."""
        return self._shape

    @property
    def ndim(self) -> int:
        """4, as of the tensor it stands for."""
        return 4

    def dim(self) -> int:
        """4, as of the tensor it stands for."""
        return 4

    def size(self, dim: int | None = None) -> Any:
        """As of a tensor."""
        return self._shape if dim is None else self._shape[dim]

    def numel(self) -> int:
        """As of a tensor."""
        return self._shape[0] * self._shape[2] * self._shape[3]

    def contiguous(self) -> LayerMask:
        """Itself: generate() calls it on the mask of a static cache."""
        return self

    def to(self, device: torch.device | str, *args: Any, **kwargs: Any) -> LayerMask:
        """The same on a device; hooks that spread a model over devices call it."""
        padding = None if self.padding is None else self.padding.to(device)
        documents = None if self.documents is None else self.documents.to(device)
        used = self.used.to(device) if isinstance(self.used, Tensor) else self.used
        return LayerMask(self._shape, padding, documents, self.is_causal, self.window, used, device)

    def __getitem__(self, index: object) -> NoReturn:
        raise TypeError(
            "the attention mask is a flash_dmattn LayerMask, which has no values to index; a model that does so needs "
            'attn_implementation="sdpa"'
        )

    def __repr__(self) -> str:
        given = [name for name in ("padding", "documents", "used") if getattr(self, name) is not None]
        held = ", ".join(given) or "no tensors"
        return f"LayerMask({self._shape}, {held}, is_causal={self.is_causal}, window={self.window})"

    __str__ = __repr__

    def arguments(self, with_bias: bool) -> MaskArguments:
        """What `attention` receives, made by the first layer that asks and kept for the others.

        Args:
            with_bias: whether the call has a bias. One for each pair of tokens does not fit packed sequences.
        """
        found = self._found.get(with_bias)
        if found is None:
            found = self._found[with_bias] = self._make(with_bias)
        return found

    def _make(self, with_bias: bool) -> MaskArguments:
        batch, _, seqlen_q, _ = self._shape
        if self.documents is not None:
            # Counting documents waits for the device, and a compiled graph cannot.
            if batch > 1 or with_bias or self.padding is not None or torch.compiler.is_compiling():
                return MaskArguments(self._intervals(self.documents))
            return MaskArguments(None, self.is_causal, self.window, packed_documents(self.documents[0]))
        if self.used is not None:
            return MaskArguments(self.padding, self.is_causal, self.window, self._padded(self.used))
        if self.padding is not None and self.padding.device.type in PREPARING_DEVICES:
            band: dict[str, Any] = {"is_causal": self.is_causal, "window_size": self.window}
            # Bits beside a bias, which passes of all layers would make of intervals anew.
            return MaskArguments(
                masks.PreparedMask.from_mask(self.padding, seqlen_q=seqlen_q, as_tiles=with_bias, **band)
            )
        return MaskArguments(self.padding, self.is_causal, self.window)

    def _padded(self, used: int | Tensor) -> Sequences:
        batch = self._shape[0]
        if isinstance(used, Tensor):
            return Sequences.padded(used.to(self._device).reshape(1).expand(batch).contiguous())
        return Sequences.padded(torch.full((batch,), used, dtype=torch.int32, device=self._device))

    def _intervals(self, documents: Tensor) -> PreparedMask:
        """Each key is seen by the queries of its own document, which are one run of them."""
        begins = _starts(documents)
        ends = documents.shape[1] - _starts(documents.flip(1)).flip(1)
        if self.padding is not None:
            ends = ends.masked_fill(~self.padding[:, 0, 0], 0)  # before it begins: nobody sees it
        return masks.PreparedMask.from_intervals(
            begins[:, None], ends[:, None], documents.shape[1], is_causal=self.is_causal, window_size=self.window
        )


def _starts(documents: Tensor) -> Tensor:
    """(B, L): the index at which the document of each token begins."""
    index = torch.arange(documents.shape[1], device=documents.device)
    begins = torch.diff(documents, prepend=documents[:, :1] - 1, dim=1) != 0
    return torch.where(begins, index, 0).cummax(1).values


def packed_documents(documents: Tensor) -> Sequences:
    """The documents (L,) of one row as packed sequences; waits for the device, to count them."""
    begins = torch.diff(documents, prepend=documents[:1] - 1).nonzero().flatten()
    limits = torch.cat([begins, begins.new_full((1,), documents.shape[0])]).to(torch.int32)
    return Sequences.packed(limits, max_seqlen_q=int(limits.diff().max()) if documents.shape[0] else 0)
