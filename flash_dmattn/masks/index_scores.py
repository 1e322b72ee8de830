"""`IndexScores`: the scores by which an indexer selects keys, without an (Lq, Lk) tensor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from ..problem import check_device, check_dtype, check_flag, check_floats, check_number
from .topk import CHUNK_ELEMENTS, recomputed, rectified, row_chunks

if TYPE_CHECKING:
    from .prepared.mask import PreparedMask
    from .prepared.storage import ListMask


@dataclass(frozen=True, eq=False, repr=False)
class IndexScores:
    """Scores of an indexer, which selects keys as in DeepSeek-V3.2: weighted sums over small heads.

    Equivalent PyTorch::

        products = scale * torch.einsum("bihd,bjd->bihj", q, k)
        scores = (weights[..., None] * (products.relu() if relu else products)).sum(2)  # (*batch, Lq, Lk)

    `PreparedMask.from_topk_lists` chooses keys by them, and `at` returns the scores of these keys, with gradients.

    Attributes:
        q: (*batch, Lq, H, D), float. With lists for blocks of queries, one row for each block.
        k: (*batch, Lk, D), in the dtype and on the device of q. With lists of blocks of keys, one row for each block.
        weights: (*batch, Lq, H), float.
        relu: whether negative products count as 0.
        scale: factor of the products; None means D ** -0.5.

    Raises:
        TypeError: a tensor has another type or dtype.
        ValueError: shapes or devices differ.

    Source: DeepSeek-AI, "DeepSeek-V3.2: Pushing the Frontier of Open Large Language Models", 2025, the indexer.

    Example:
        >>> from flash_dmattn.masks import IndexScores, PreparedMask
        >>> scores = IndexScores(torch.randn(1, 6, 2, 4), torch.randn(1, 6, 4), torch.rand(1, 6, 2))
        >>> lists = PreparedMask.from_topk_lists(scores, 3, is_causal=True)
        >>> scores.at(lists).shape
        torch.Size([1, 1, 6, 3])
    """

    q: Tensor
    k: Tensor
    weights: Tensor
    relu: bool = True
    scale: float | None = None

    def __post_init__(self) -> None:
        for name in ("q", "k", "weights"):
            x = getattr(self, name)
            check_floats(name, x)
            check_device(name, x.device, self.q.device)
        check_flag("relu", self.relu)
        if self.scale is not None:
            check_number("scale", self.scale)
        if self.q.dim() < 4:
            raise ValueError(
                f"q has shape {tuple(self.q.shape)}; it needs to be (*batch, seqlen_q, heads, head_dim), and packed "
                "tokens need a batch of 1"
            )
        if self.q.shape[-1] == 0:
            raise ValueError(f"q has shape {tuple(self.q.shape)}; its head_dim needs to be at least 1")
        check_dtype("k", self.k, self.q.dtype)
        batch, dim = tuple(self.q.shape[:-3]), self.q.shape[-1]
        if self.k.dim() != len(batch) + 2 or tuple(self.k.shape[:-2]) != batch or self.k.shape[-1] != dim:
            raise ValueError(f"k has shape {tuple(self.k.shape)}; it needs to be {batch} + (seqlen_k, {dim})")
        if self.weights.shape != self.q.shape[:-1]:
            raise ValueError(f"weights has shape {tuple(self.weights.shape)}; it needs {tuple(self.q.shape[:-1])}")

    @property
    def batch_dims(self) -> tuple[int, ...]:
        """The batch dims of q, which come before its queries."""
        return tuple(self.q.shape[:-3])

    def at(self, lists: PreparedMask) -> Tensor:
        """Return the scores of the keys in lists, with gradients of q, k and weights.

        Products are not saved: the backward pass recomputes them in chunks of queries, except under transforms of
        `torch.func`, which refuse checkpoints. Gradients are summed in a fixed order.

        Args:
            lists: from `PreparedMask.from_topk_lists`, or from `from_lists` with one list for all heads. Lists for
                packed sequences need to be of single keys; q, k and weights then have all tokens, with a batch of 1.

        Returns:
            (*batch, 1, R, K), in the dtype of q, for `biases.ListBias`: R lists with K entries each; 0 for an entry
            without a key.

        Raises:
            TypeError: `lists` is no mask of lists.
            ValueError: the lists are for another number of queries or keys, or differ by head.
        """
        if getattr(lists, "form", None) != "lists":
            raise TypeError(f"lists is a {type(lists).__name__}; it needs to be a PreparedMask of lists")
        mask: ListMask = lists  # type: ignore[assignment]
        index, (q, k, weights) = mask.index_of_rows, self._folded()
        batch, heads, number, places = index.shape
        blocks = -(-mask.seqlen_k // mask.block_size[1])
        if mask.spec is not None and mask.spec.packs_keys:
            if mask.block_size[1] > 1:
                raise ValueError(
                    f"lists are of blocks of {mask.block_size[1]} keys with packed sequences; they need single keys"
                )
            blocks = mask.spec.rows_k
        if heads != 1:
            raise ValueError(f"lists have {heads} heads; they need one, which all heads share")
        if batch not in (1, q.shape[0]):
            raise ValueError(f"lists have a batch of {batch}; they need 1 or that of q, {q.shape[0]}")
        if (number, blocks) != (q.shape[1], k.shape[1]):
            raise ValueError(
                f"lists have {number} rows for {blocks} keys or blocks; they need those of q and k, {q.shape[1]} and "
                f"{k.shape[1]}"
            )
        if blocks == 0 or q.numel() == 0:
            made = q.new_zeros(q.shape[0], 1, number, places) + (q.sum() + k.sum() + weights.sum()) * 0.0
            return made.unflatten(0, self.batch_dims)
        run = recomputed(self._chosen)
        step = max(1, CHUNK_ELEMENTS // max(1, q.shape[0] * places * max(q.shape[2], q.shape[3])))
        parts = [run(q[:, rows], k, weights[:, rows], index[:, 0, rows]) for rows in row_chunks(number, step)]
        return torch.cat(parts, 1).unsqueeze(1).unflatten(0, self.batch_dims)

    def _chosen(self, q: Tensor, k: Tensor, weights: Tensor, index: Tensor) -> Tensor:
        batch, number, dim = k.shape
        first = torch.arange(batch, device=k.device)[:, None, None] * number
        # Not by indexing, because its gradient is summed in no fixed order on some devices.
        taken = F.embedding(index.clamp(min=0).long() + first, k.reshape(-1, dim))
        products = rectified(torch.einsum("bihd,bikd->bihk", q, taken), dim, self.relu, self.scale)
        return (weights.to(q.dtype).unsqueeze(3) * products).sum(2).masked_fill(index < 0, 0.0)

    def _folded(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.q.flatten(0, -4), self.k.flatten(0, -3), self.weights.flatten(0, -3)
