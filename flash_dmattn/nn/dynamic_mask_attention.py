"""The dynamic-mask attention layer and its cache. A learned score per key is the bias, and its top-k are the mask."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import flash_dmattn
from flash_dmattn.dispatch.config import BackendChoice
from flash_dmattn.masks import PreparedMask, topk_mask
from flash_dmattn.masks.arguments import integer
from flash_dmattn.masks.prepared.intervals import reorder_pays
from flash_dmattn.masks.prepared.operators import run_score_keys, run_topk_intervals
from flash_dmattn.problem import (
    check_device,
    check_flag,
    check_floats,
    check_number,
    check_strided,
    check_tensor,
    check_type,
    dtype_name,
    values_can_be_read,
)
from flash_dmattn.sequences import Sequences
from flash_dmattn.sequences.layout import token_places

from .positions import apply_rotary, rotary_angles

# Scores are rounded to the nearest multiple of this before they are compared, which is 0.02 % of an attention weight.
# Equal tokens have equal scores in a first layer, except for the last bits, which differ between a full forward and a
# decoding step. Without rounding these bits would decide which key is kept: in fp32, 4 of 10 texts of 100 tokens from
# an alphabet of 4 were decoded differently.
SCORE_STEP = 2.0**-12


def ranked(scores: Tensor) -> Tensor:
    """Return scores in multiples of `SCORE_STEP`, as a layer compares them."""
    return (scores / SCORE_STEP).round()


class KVCache:
    """Keys, values and key scores of the tokens that one layer has seen.

    Equivalent to ``torch.cat((old, new), dim=1)`` for each of k, v and scores, without a copy of the old: storage is
    allocated ahead, and doubled when it is full. One cache belongs to one layer.

    Args:
        max_length: number of tokens to allocate at the first `append`; the cache grows past it.

    >>> cache = KVCache(max_length=8)
    >>> k = v = torch.zeros(1, 3, 2, 4)
    >>> keys, values, scores = cache.append(k, v, torch.zeros(1, 3, 2))
    >>> cache.length, tuple(cache.append(k[:, :1], v[:, :1], torch.ones(1, 1, 2))[2].shape)
    (3, (1, 4, 2))
    """

    def __init__(self, max_length: int = 256) -> None:
        self.max_length = integer("max_length", max_length, 1)
        self.length = 0
        self._storage: tuple[Tensor | None, ...] = (None, None, None)

    def append(self, k: Tensor, v: Tensor, scores: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """Add tokens and return everything cached so far.

        Args:
            k: (B, L, Hk, D) new keys, already rotated to their positions.
            v: (B, L, Hk, Dv) new values.
            scores: (B, L, Hk) their key scores, or None in a layer with full attention.

        Returns:
            (k, v, scores) of all tokens, along dim 1, as views of the storage: valid until the next `append`.

        Raises:
            RuntimeError: a gradient is being recorded; the storage is written in place, which has no gradient.
            TypeError: k, v or scores is no tensor of floats.
            ValueError: the shapes of k, v and scores differ from one another; batch, heads, device or the presence of
                scores differ from the cached tokens. The cache is unchanged then.
        """
        new = (k, v, scores)
        self._check(k, v, scores)
        if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in new):
            raise RuntimeError("KVCache.append would lose the gradient of k, v or scores; decode under torch.no_grad()")
        if self.length:
            self._check_same_kind(new)
        end = self.length + k.shape[1]
        self._storage = tuple(
            None if x is None else self._extended(held if self.length else None, x, end)
            for held, x in zip(self._storage, new, strict=True)
        )
        self.length = end
        keys, values, key_scores = (None if held is None else held[:, :end] for held in self._storage)
        assert keys is not None and values is not None
        return keys, values, key_scores

    def truncate(self, length: int) -> None:
        """Forget every token from position ``length`` on, as after a rejected draft; the storage is kept.

        Raises:
            TypeError: length is no int.
            ValueError: length is negative, or the cache does not hold that number of tokens.

        >>> cache = KVCache()
        >>> _ = cache.append(torch.zeros(1, 5, 1, 2), torch.zeros(1, 5, 1, 2), None)
        >>> cache.truncate(2)
        >>> cache.length
        2
        """
        if integer("length", length) > self.length:
            raise ValueError(f"length is {length}; it needs to be 0 to {self.length}, the tokens that the cache holds")
        self.length = length

    def _extended(self, held: Tensor | None, x: Tensor, end: int) -> Tensor:
        dtype = x.dtype if held is None else torch.promote_types(held.dtype, x.dtype)
        if held is None or held.shape[1] < end or held.dtype != dtype or _is_read_only(held):
            capacity = max(end, self.max_length if held is None else 2 * held.shape[1])
            grown = x.new_empty((x.shape[0], capacity, *x.shape[2:]), dtype=dtype)
            if held is not None:
                grown[:, : self.length] = held[:, : self.length]
            held = grown
        held[:, self.length : end] = x
        return held

    @staticmethod
    def _check(k: Tensor, v: Tensor, scores: Tensor | None) -> None:
        """Refuse arguments that are no float tensors, and shapes other than k's."""
        for name, x, needs in (("k", k, "B, L, Hk, D"), ("v", v, "B, L, Hk, Dv"), ("scores", scores, "B, L, Hk")):
            if x is None and name == "scores":
                continue
            check_floats(name, x)
            assert x is not None
            if x.dim() != needs.count(",") + 1 or x.shape[:3] != k.shape[:3]:
                raise ValueError(
                    f"{name} has shape {tuple(x.shape)}; with k of shape {tuple(k.shape)} it needs to be ({needs})"
                )

    def _check_same_kind(self, new: tuple[Tensor | None, ...]) -> None:
        for name, held, x in zip(("k", "v", "scores"), self._storage, new, strict=True):
            if (held is None) != (x is None):
                has, needs = ("None", "a tensor") if x is None else ("a tensor", "None")
                raise ValueError(f"{name} is {has}; this cache was filled with {needs}: use one cache per layer")
            if held is None or x is None:
                continue
            if (held.shape[0], *held.shape[2:]) != (x.shape[0], *x.shape[2:]):
                raise ValueError(
                    f"{name} has shape {tuple(x.shape)}; the cache holds "
                    f"({held.shape[0]}, {self.length}, {', '.join(map(str, held.shape[2:]))}): only dim 1 may differ"
                )
            check_device(name, x.device, held.device, "the cache")


def _is_read_only(x: Tensor) -> bool:
    """Return whether torch forbids writing to x: it is a tensor of inference mode, and the mode is off."""
    return not torch.compiler.is_compiling() and x.is_inference() and not torch.is_inference_mode_enabled()


class AttentionArguments(NamedTuple):
    """The tensors that a layer passes to `flash_dmattn.attention`, in its order."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    bias: Tensor | None


class DynamicMaskAttention(nn.Module):
    """Causal self-attention in which every key-value head learns which keys to keep.

    Equivalent to, with one key-value head per query head and x of shape (B, L, hidden_size)::

        q, k, v = rope(x @ Wq), rope(x @ Wk), x @ Wv                      # (B, H, L, D)
        s = A * softplus(v_all_heads @ W)                                 # (B, H, 1, L): one score per key
        keep = topk_mask(s, keep_window_size, is_causal=True)             # (B, H, L, L): best keys of each prefix
        logits = q @ k.mT * softmax_scale + s                             # s takes a gradient, keep does not
        out = logits.masked_fill(~keep, -inf).softmax(-1) @ v
        return out @ Wo

    The choice of keys is learned through the bias: the score by which a key is kept is also added to its logits, so
    that W and A get gradients. Scores are rounded to multiples of 2**-12 before they are compared, and the earliest of
    equal keys comes first, so that decoding keeps the same keys as a full forward.
    ``keep_window_size=None`` removes score, bias and mask: the same class is then plain causal attention.

    Args:
        hidden_size: width of x.
        num_heads: query heads.
        num_heads_k: key-value heads, a divisor of num_heads; default num_heads.
        head_dim: channels per head, even; default hidden_size // num_heads.
        keep_window_size: number of keys that a query may see: the best by score of all keys up to its position. None
            for full attention.
        local_window_size: number of the last keys up to the query that are kept whatever their score, in addition to
            keep_window_size; 0 for the plain top-k.
        rope_theta: base of the rotary wavelengths.
        softmax_scale: factor of q @ k; default head_dim ** -0.5.
        qk_norm: whether to normalise q and k per head by their root mean square, with a learned gain, before the
            rotation.
        projection_bias: whether the 4 projections have a bias.
        backend: passed to `flash_dmattn.attention`.
        device, dtype: of the parameters.

    Shapes of the parameters besides q_proj, k_proj, v_proj, o_proj: score_proj.weight (Hk, Hk * D) is W,
    score_scale (Hk,) is A.

    Raises:
        TypeError: a size or a window is no int, rope_theta or softmax_scale no number, or a switch no bool.
        ValueError: heads that do not divide, an odd head_dim, a window below one key, or a rope_theta of 0 or below.

    Source: Shi et al., "Trainable Dynamic Mask Sparse Attention", 2025, as used by the Doge models; RoFormer for the
    positions; Ainslie et al., "GQA", 2023, for the grouped heads.

    >>> layer = DynamicMaskAttention(64, num_heads=4, num_heads_k=2, keep_window_size=8)
    >>> layer(torch.randn(2, 32, 64)).shape
    torch.Size([2, 32, 64])
    >>> layer.attention_arguments(torch.randn(2, 32, 64)).mask.sum(-1).max().item()
    8
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_heads_k: int | None = None,
        head_dim: int | None = None,
        *,
        keep_window_size: int | None = 2048,
        local_window_size: int = 0,
        rope_theta: float = 10000.0,
        softmax_scale: float | None = None,
        qk_norm: bool = False,
        projection_bias: bool = False,
        backend: BackendChoice = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        integer("hidden_size", hidden_size, 1)
        integer("num_heads", num_heads, 1)
        num_heads_k = num_heads if num_heads_k is None else integer("num_heads_k", num_heads_k, 1)
        if head_dim is None:
            head_dim = hidden_size // num_heads
            if hidden_size % num_heads or head_dim % 2:
                raise ValueError(
                    f"hidden_size is {hidden_size} and num_heads {num_heads}; their quotient, the head_dim, needs to "
                    "be even, for rotary positions: pass head_dim, or others"
                )
        integer("head_dim", head_dim)
        if num_heads % num_heads_k:
            raise ValueError(f"num_heads is {num_heads}; it needs to be a multiple of num_heads_k, {num_heads_k}")
        if head_dim < 2 or head_dim % 2:
            raise ValueError(f"head_dim is {head_dim}; rotary positions need an even number of at least 2")
        if keep_window_size is not None and integer("keep_window_size", keep_window_size) < 1:
            raise ValueError(
                f"keep_window_size is {keep_window_size}; it needs to be at least 1 key, or None for full attention"
            )
        integer("local_window_size", local_window_size)
        check_flag("qk_norm", qk_norm)
        check_flag("projection_bias", projection_bias)
        if isinstance(rope_theta, bool) or not isinstance(rope_theta, (int, float)):
            raise TypeError(f"rope_theta is a {type(rope_theta).__name__}; it needs to be a number")
        if not 0 < rope_theta < float("inf"):
            raise ValueError(f"rope_theta is {rope_theta}; it needs to be above 0, and finite")
        self.hidden_size, self.num_heads, self.num_heads_k, self.head_dim = (
            hidden_size,
            num_heads,
            num_heads_k,
            head_dim,
        )
        self.keep_window_size, self.local_window_size = keep_window_size, local_window_size
        self.rope_theta, self.backend = rope_theta, backend
        self.softmax_scale = head_dim**-0.5 if softmax_scale is None else check_number("softmax_scale", softmax_scale)

        where: dict[str, Any] = {"device": device, "dtype": dtype}
        self.q_proj = nn.Linear(hidden_size, num_heads * head_dim, bias=projection_bias, **where)
        self.k_proj = nn.Linear(hidden_size, num_heads_k * head_dim, bias=projection_bias, **where)
        self.v_proj = nn.Linear(hidden_size, num_heads_k * head_dim, bias=projection_bias, **where)
        self.o_proj = nn.Linear(num_heads * head_dim, hidden_size, bias=projection_bias, **where)
        self.q_norm = nn.RMSNorm(head_dim, **where) if qk_norm else nn.Identity()
        self.k_norm = nn.RMSNorm(head_dim, **where) if qk_norm else nn.Identity()
        if keep_window_size is not None:
            self.score_proj = nn.Linear(num_heads_k * head_dim, num_heads_k, bias=False, **where)
            # Ones, not zeros: at A = 0 all scores are equal, so top-k keeps the first keys, and W gets no gradient.
            self.score_scale = nn.Parameter(torch.ones(num_heads_k, **where))

    def forward(
        self,
        x: Tensor,
        attention_mask: Tensor | None = None,
        cache: KVCache | None = None,
        sequences: Sequences | None = None,
    ) -> Tensor:
        """Attend from every token of x to the tokens up to it, cached ones included.

        Equivalent to ``o_proj(flash_dmattn.attention(*attention_arguments(x, ...), is_causal=True).flatten(2))``.

        Args:
            x: (B, L, hidden_size), the new tokens; (T, hidden_size) where sequences pack them.
            attention_mask: (B, Lk) bool or integer, non-zero for a real token, zero for padding, on the left or the
                right; Lk counts the cached tokens too. None when there is no padding.
            cache: a `KVCache` of this layer, to which x is appended; None without decoding.
            sequences: `Sequences.packed(cu_seqlens_q, max_seqlen_q=...)`; tokens attend within their sequence.

        Returns:
            A tensor of x's shape and dtype. A query with only padding before it, and a token of no sequence, get
            o_proj(zeros).

        Raises:
            TypeError: an argument has the wrong type, or attention_mask has a float dtype.
            ValueError: x or attention_mask has the wrong shape, or arguments do not go together.
            RuntimeError: a gradient is recorded while there is a cache. After any error the cache is unchanged.

        >>> layer = DynamicMaskAttention(32, num_heads=2, keep_window_size=4).double().requires_grad_(False)
        >>> x, cache = torch.randn(1, 10, 32, dtype=torch.float64), KVCache()
        >>> steps = [layer(token, cache=cache) for token in x.split([7, 1, 1, 1], dim=1)]
        >>> torch.allclose(torch.cat(steps, dim=1), layer(x))
        True
        """
        if sequences is None:
            call = self.attention_call(*self._inputs(x, attention_mask, cache))
        else:
            call = self._packed_call(x, attention_mask, cache, sequences)
        out = flash_dmattn.attention(**call)
        assert isinstance(out, Tensor)
        return self.o_proj(out.flatten(-2))

    def project(self, x: Tensor, angles: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Project tokens to q, k and v, and rotate q and k to their positions.

        Args:
            x: (B, L, hidden_size), or without B.
            angles: (L, D // 2) or (B, L, D // 2) from `rotary_angles`.

        Returns:
            q (B, L, Hq, D), k and v (B, L, Hk, D), without B where x has none.

        >>> layer = DynamicMaskAttention(32, num_heads=4, num_heads_k=2)
        >>> [tuple(t.shape) for t in layer.project(torch.randn(1, 10, 32), torch.zeros(10, 4))]
        [(1, 10, 4, 8), (1, 10, 2, 8), (1, 10, 2, 8)]
        """
        q = apply_rotary(self.q_norm(self.q_proj(x).unflatten(-1, (self.num_heads, self.head_dim))), angles)
        k = apply_rotary(self.k_norm(self.k_proj(x).unflatten(-1, (self.num_heads_k, self.head_dim))), angles)
        return q, k, self.v_proj(x).unflatten(-1, (self.num_heads_k, self.head_dim))

    def attention_call(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scores: Tensor | None,
        padding: Tensor | None = None,
        query_index: Tensor | None = None,
    ) -> dict[str, Any]:
        """Make the arguments of this layer's call of `flash_dmattn.attention`.

        Use it with another cache than `KVCache`: call `project`, write to that cache, call `key_scores`, and then
        ``o_proj(flash_dmattn.attention(**layer.attention_call(...)).flatten(2))``.

        Args:
            q: (B, L, Hq, D), the last L positions.
            k, v: (B, Lk, Hk, D), all positions.
            scores: (B, Lk, Hk) from `key_scores`, or None with full attention.
            padding: (B or 1, 1, 1, Lk) bool, True for a real key; None where all are.
            query_index: (1,), the position of a single query among the keys if it is not the last one, as in a cache
                of fixed length. padding then needs to be False for the keys after it.

        Raises:
            ValueError: scores are passed with full attention, or None without; padding has another shape.

        >>> layer = DynamicMaskAttention(32, num_heads=2, keep_window_size=4)
        >>> q, k, v = layer.project(torch.randn(1, 10, 32), torch.zeros(10, 8))
        >>> call = layer.attention_call(q, k, v, layer.key_scores(v))
        >>> tuple(call["bias"].shape), tuple(flash_dmattn.attention(**call).shape)
        ((1, 2, 1, 10), (1, 10, 2, 16))
        """
        if (scores is None) != (self.keep_window_size is None):
            has, needs = ("None", "those of key_scores") if scores is None else ("a tensor", "None")
            raise ValueError(
                f"scores is {has}; a layer whose keep_window_size is {self.keep_window_size} needs {needs}"
            )
        if padding is not None and (padding.shape[1:] != (1, 1, k.shape[1]) or padding.shape[0] not in (1, len(k))):
            raise ValueError(
                f"padding has shape {tuple(padding.shape)}; it needs to be ({len(k)} or 1, 1, 1, {k.shape[1]})"
            )
        bias = None if scores is None else scores.transpose(1, 2).unsqueeze(2)
        mask = padding if bias is None else self._kept_keys(bias.detach(), q.shape[1], padding, query_index)
        return self._call(q, k, v, mask, bias)

    def attention_arguments(
        self, x: Tensor, attention_mask: Tensor | None = None, cache: KVCache | None = None
    ) -> AttentionArguments:
        """Compute the q, k, v, mask and bias of `forward`'s call, to look at or for another kernel.

        The mask is dense here. In `forward` it is a prepared mask, which has no element for each pair.

        Args:
            x: (B, L, hidden_size).
            attention_mask: (B, Lk), nonzero for real tokens, as in `forward`.
            cache: the keys and values of earlier tokens, to which x is appended, as in `forward`.

        Returns:
            q (B, L, Hq, D), k and v (B, Lk, Hk, D), mask (B, Hk, L, Lk) bool, bias (B, Hk, 1, Lk) in fp32 at least.
            The mask is (B, 1, 1, Lk), or None without padding, if every key up to the query is kept. The bias is None
            with full attention.

        >>> layer = DynamicMaskAttention(32, num_heads=4, num_heads_k=2, keep_window_size=4)
        >>> [tuple(t.shape) for t in layer.attention_arguments(torch.randn(1, 10, 32))]
        [(1, 10, 4, 8), (1, 10, 2, 8), (1, 10, 2, 8), (1, 2, 10, 10), (1, 2, 1, 10)]
        """
        call = self.attention_call(*self._inputs(x, attention_mask, cache))
        mask = call["mask"]
        mask = mask.dense() if isinstance(mask, PreparedMask) else mask
        return AttentionArguments(call["q"], call["k"], call["v"], mask, call["bias"])

    def _inputs(
        self, x: Tensor, attention_mask: Tensor | None, cache: KVCache | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
        """Compute the arguments of `attention_call`; scores are None with full attention."""
        check_tensor("x", x)
        check_strided("x", x)
        if x.dim() != 3 or x.shape[-1] != self.hidden_size:
            raise ValueError(f"x has shape {tuple(x.shape)}; it needs to be (batch, length, {self.hidden_size})")
        if cache is not None:
            check_type("cache", cache, KVCache, "a KVCache")
        past = 0 if cache is None else cache.length
        if attention_mask is not None:  # before the cache changes
            self._check_padding(attention_mask, (x.shape[0], past + x.shape[1]))
        positions = torch.arange(past, past + x.shape[1], device=x.device)
        q, k, v = self.project(x, rotary_angles(positions, self.head_dim, self.rope_theta))
        scores = self.key_scores(v)
        if cache is not None:
            k, v, scores = cache.append(k, v, scores)
        return q, k, v, scores, None if attention_mask is None else attention_mask.bool()[:, None, None, :]

    @staticmethod
    def _check_padding(attention_mask: Tensor, needed: tuple[int, int]) -> None:
        check_tensor("attention_mask", attention_mask, "a bool or integer torch.Tensor")
        if tuple(attention_mask.shape) != needed:
            raise ValueError(
                f"attention_mask has shape {tuple(attention_mask.shape)}; it needs to be (batch, keys) = {needed}, "
                "cached tokens included"
            )
        # A mask of floats is usually added to scores: 0 there is a real token, the opposite of this argument.
        if attention_mask.is_floating_point() or attention_mask.is_complex():
            raise TypeError(
                f"attention_mask has dtype {dtype_name(attention_mask.dtype)}; it needs bools or integers, "
                "non-zero for real tokens"
            )

    def _packed_call(
        self, x: Tensor, attention_mask: Tensor | None, cache: KVCache | None, sequences: Sequences
    ) -> dict[str, Any]:
        """Make the arguments of a call with packed sequences; positions count from the start of each sequence."""
        check_type("sequences", sequences, Sequences, "a flash_dmattn.Sequences")
        if attention_mask is not None:
            raise ValueError("attention_mask is a tensor; with sequences it needs to be None: they have no padding")
        if sequences.layout != "packed":
            raise ValueError(
                f"sequences are {sequences.layout}; they need to be packed (pass attention_mask for padding; "
                "examples/paged_decoding.py decodes from pages)"
            )
        if cache is not None:
            raise ValueError(f"cache is a {type(cache).__name__}; with packed sequences it needs to be None")
        check_tensor("x", x)
        check_strided("x", x)
        if x.dim() != 2 or x.shape[-1] != self.hidden_size:
            raise ValueError(
                f"x has shape {tuple(x.shape)}; with these sequences it needs to be (tokens, {self.hidden_size})"
            )
        like = x.unsqueeze(-2)  # as one head: the layout of sequences does not depend on heads
        spec, (bounds, _) = sequences.describe_with_view(like, like, like, names=("x", "x", "x"))
        if values_can_be_read(bounds) and not torch.equal(bounds[:, :2], bounds[:, 2:]):
            raise ValueError("cu_seqlens_k differ from cu_seqlens_q; in self-attention they need to be the same")
        is_empty = len(bounds) == 0 or x.numel() == 0
        sequence = positions = torch.zeros(x.shape[0], dtype=torch.long, device=x.device)
        if not is_empty:
            sequence, positions, _ = token_places(bounds, 1, x.shape[0], is_packed=True)
        q, k, v = self.project(x, rotary_angles(positions, self.head_dim, self.rope_theta))
        scores = self.key_scores(v)
        mask = bias = None
        if scores is not None and self.keep_window_size is not None:
            bias = scores.t().unsqueeze(1)
            if self.keep_window_size < spec.max_seqlen_k and not is_empty:
                if not spec.names_max[1]:
                    raise ValueError(
                        f"sequences name no max_seqlen_k; a layer that keeps {self.keep_window_size} keys needs it "
                        "(Sequences.packed(..., max_seqlen_q=...))"
                    )
                mask = self._select_packed_keys(scores.detach(), bounds, sequence, positions, spec.max_seqlen_k)
        return self._call(q, k, v, mask, bias) | {"sequences": sequences}

    def _call(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | PreparedMask | None, bias: Tensor | None
    ) -> dict[str, Any]:
        call = {"q": q, "k": k, "v": v, "mask": mask, "bias": bias, "is_causal": True}
        return call | {"softmax_scale": self.softmax_scale, "backend": self.backend}

    def key_scores(self, v: Tensor) -> Tensor | None:
        """Compute s = A * softplus(W v), by which each key-value head ranks keys.

        Args:
            v: (B, L, Hk, D) values, or without B.

        Returns:
            (B, L, Hk) scores, in fp32 at least; None with full attention.

        >>> layer = DynamicMaskAttention(8, num_heads=2)
        >>> layer.key_scores(torch.zeros(1, 1, 2, 4)).flatten().tolist() == [0.6931471824645996] * 2
        True
        """
        if self.keep_window_size is None:
            return None
        wanted = self.score_proj(v.flatten(-2))
        work_dtype = torch.promote_types(wanted.dtype, torch.float32)
        return self.score_scale.to(work_dtype) * F.softplus(wanted.to(work_dtype))

    def extra_repr(self) -> str:
        return (
            f"num_heads={self.num_heads}, num_heads_k={self.num_heads_k}, head_dim={self.head_dim}, "
            f"keep_window_size={self.keep_window_size}, local_window_size={self.local_window_size}, "
            f"backend={self.backend!r}"
        )

    def _kept_keys(
        self, scores: Tensor, seqlen_q: int, padding: Tensor | None, query_index: Tensor | None = None
    ) -> Tensor | PreparedMask | None:
        """Make the mask of the kept keys for the last seqlen_q positions: intervals, or a row of keys for one query."""
        assert self.keep_window_size is not None
        batch, _, _, seqlen_k = scores.shape
        if self.keep_window_size >= seqlen_k:
            return padding
        scores = ranked(scores)
        if seqlen_q == 1:
            # A single query may attend to every key, so there are no prefixes to sort.
            keep = topk_mask(scores, self.keep_window_size, mask=padding)
            if self.local_window_size == 0:
                return keep
            query = seqlen_k - 1 if query_index is None else query_index
            key = torch.arange(seqlen_k, device=scores.device)
            local = (key <= query) & (key > query - self.local_window_size)
            return keep | (local if padding is None else local & padding)
        kept = self.keep_window_size + self.local_window_size
        pays = reorder_pays(
            batch * self.num_heads, seqlen_q, seqlen_k, kept, is_causal=True, has_backward=torch.is_grad_enabled()
        )
        return PreparedMask.from_topk(
            scores,
            self.keep_window_size,
            is_causal=True,
            mask=padding,
            seqlen_q=seqlen_q,
            local=self.local_window_size,
            reorder=pays,
        )

    def _select_packed_keys(
        self, scores: Tensor, bounds: Tensor, sequence: Tensor, positions: Tensor, longest: int
    ) -> Tensor:
        """Make the mask (Hk, T, longest) of the kept keys; columns count from the start of each query's sequence.

        scores is (T, Hk). `sequence`, (T,), is the sequence of each token, and `positions`, (T,), its position there.
        """
        assert self.keep_window_size is not None
        keys = bounds[:, 2:3].long() + torch.arange(longest, device=scores.device)
        # (S, Hk, longest). Columns after the end of a sequence have other scores, which are in no prefix of a token.
        by_sequence = ranked(scores)[keys.clamp(max=len(scores) - 1)].transpose(1, 2)
        # A key that better ones have pushed out of the top-k never comes back: one interval of queries keeps it.
        order = run_score_keys(by_sequence[:, :, None], None)
        start, stop = run_topk_intervals(order, self.keep_window_size, longest, self.local_window_size)
        position = positions[:, None]
        # Head by head, because the comparison needs 4 bytes for each byte of the mask.
        rows = [(start[sequence, h] <= position) & (position < stop[sequence, h]) for h in range(start.shape[1])]
        return torch.stack(rows)
