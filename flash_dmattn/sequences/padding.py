"""From a padded batch to packed tokens, and back."""

from __future__ import annotations

import torch
from torch import Tensor

from .layout import Sequences


class Padding:
    """The padding of a batch: takes it out of tensors, and puts it back.

    What a model computes for each token, embeddings or MLPs, it then computes for real tokens alone; attention takes
    `sequences`. Making one waits for the device once, to count the tokens.

    Args:
        mask: (S, L), bool or 0/1 as tokenizers give it: which tokens are real. Padding may stand on either side, or
            between.

    Attributes:
        sequences: where the tokens of each sequence lie: `Sequences.packed` with max_seqlen_q and max_seqlen_k.
        indices: int64 (tokens,), the place of each in the flattened batch.

    Raises:
        TypeError: the mask is no tensor of bools or integers.
        ValueError: it has not two dims.

    >>> import torch, flash_dmattn
    >>> padding = flash_dmattn.sequences.Padding(torch.tensor([[1, 1, 1, 0], [0, 0, 1, 1]]))
    >>> x = torch.randn(2, 4, 2, 8)
    >>> tokens = padding.unpad(x)
    >>> tokens.shape
    torch.Size([5, 2, 8])
    >>> out = flash_dmattn.attention(tokens, tokens, tokens, is_causal=True, sequences=padding.sequences)
    >>> padding.pad(out).shape
    torch.Size([2, 4, 2, 8])
    """

    def __init__(self, mask: Tensor) -> None:
        if not isinstance(mask, Tensor) or mask.is_floating_point():
            kind = str(mask.dtype).removeprefix("torch.") if isinstance(mask, Tensor) else type(mask).__name__
            raise TypeError(f"mask is {kind}; it needs to be a torch.Tensor of bools or integers, 1 for real tokens")
        if mask.dim() != 2:
            raise ValueError(f"mask has shape {tuple(mask.shape)}; it needs (sequences, tokens)")
        real = mask != 0
        self._shape = (mask.shape[0], mask.shape[1])
        self.indices = real.flatten().nonzero().flatten()
        lengths = real.sum(1)
        edges = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
        self.sequences = Sequences.packed(edges, max_seqlen_q=mask.shape[1])

    def unpad(self, x: Tensor) -> Tensor:
        """(tokens, ...) of a tensor (S, L, ...); differentiable.

        Raises:
            ValueError: x has other sizes in front than the mask.
        """
        if tuple(x.shape[:2]) != self._shape:
            raise ValueError(f"x has shape {tuple(x.shape)}; it needs {self._shape} in front, as the mask")
        return x.flatten(0, 1)[self.indices]

    def pad(self, tokens: Tensor) -> Tensor:
        """(S, L, ...) of tokens (tokens, ...), with zeros for padding; differentiable.

        Raises:
            ValueError: there are more or fewer tokens than the mask has.
        """
        if tokens.shape[0] != self.indices.shape[0]:
            raise ValueError(f"tokens has {tokens.shape[0]} tokens; the mask has {self.indices.shape[0]}")
        flat = tokens.new_zeros((self._shape[0] * self._shape[1], *tokens.shape[1:]))
        return flat.index_copy(0, self.indices, tokens).unflatten(0, self._shape)

    def __reduce__(self) -> tuple[object, ...]:
        # For pickle, copy and `torch.save`.
        return restore_padding, (self._shape, self.indices, self.sequences)


def restore_padding(shape: tuple[int, int], indices: Tensor, sequences: Sequences) -> Padding:
    """Padding of its fields: what `torch.load` calls, also with `weights_only=True`, its default."""
    padding = Padding.__new__(Padding)
    padding._shape, padding.indices, padding.sequences = shape, indices, sequences
    return padding


torch.serialization.add_safe_globals([restore_padding])
