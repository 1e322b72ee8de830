"""DeBERTa v2 and v3 of transformers on flash_dmattn: no scores of L x L, no gather of them, and no mask of L x L.

Layers with `output_attentions`, positions of the caller, or queries of another length run the original code. Dropout
draws other bits. A row without a visible key is the mean of all values, without dropout; with `empty="zero"` it is 0.
DeBERTa v1 and SEW-D have classes of their own, which stay as they are.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import attention
from ..biases import Projected
from ..definition import is_watched
from ..masks.split import Empty
from .patch import Patch

__all__ = ["disable", "enable"]

_MODULE = "transformers.models.deberta_v2.modeling_deberta_v2"
FORWARD = f"{_MODULE}:DisentangledSelfAttention.forward"
MASK = f"{_MODULE}:DebertaV2Encoder.get_attention_mask"
POSITIONS = f"{_MODULE}:DebertaV2Encoder.get_rel_pos"
LOG_BUCKET = f"{_MODULE}:make_log_bucket_position"

LogBucket = Callable[[Tensor, int, int], Tensor]


class _Mask(NamedTuple):
    """A mask as the encoder hands it to its layers.

    Attributes:
        keys: bool, True = attend, (B or 1, H or 1, L or 1, L).
        rows: whether a query counts and sees a key, (B or 1, L or 1, H or 1, 1).
    """

    keys: Tensor
    rows: Tensor

    @staticmethod
    def of(mask: Tensor) -> _Mask:
        """Take a mask of scores."""
        keys = mask.bool()[(None,) * (4 - mask.dim())]
        return _Mask(keys, keys.any(-1, keepdim=True).transpose(1, 2))

    def dense(self) -> Tensor:
        """Make the mask that the original layers take."""
        return self.keys & self.rows.transpose(1, 2)


def _make(originals: dict[str, Any], empty: Empty) -> dict[str, Any]:
    log_bucket: LogBucket = originals[LOG_BUCKET]

    def get_attention_mask(self: Any, attention_mask: Tensor) -> _Mask:
        if attention_mask.dim() > 2:
            return _Mask.of(originals[MASK](self, attention_mask))
        is_real = attention_mask.bool()
        return _Mask(is_real[:, None, None], is_real[:, :, None, None])

    def get_rel_pos(
        self: Any, hidden_states: Tensor, query_states: Tensor | None = None, relative_pos: Tensor | None = None
    ) -> Tensor | None:
        return relative_pos  # without one, layers have the positions of the model, which are differences

    def forward(
        self: Any,
        hidden_states: Tensor,
        attention_mask: Tensor | _Mask,
        output_attentions: bool = False,
        query_states: Tensor | None = None,
        relative_pos: Tensor | None = None,
        rel_embeddings: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        mask = attention_mask if isinstance(attention_mask, _Mask) else _Mask.of(attention_mask)
        queries = hidden_states if query_states is None else query_states
        length = hidden_states.shape[1]
        if output_attentions or relative_pos is not None or queries.shape[1] != length:
            result: tuple[Tensor, Tensor | None] = originals[FORWARD](
                self, hidden_states, mask.dense(), output_attentions, query_states, relative_pos, rel_embeddings
            )
            return result

        def heads(x: Tensor) -> Tensor:
            return x.unflatten(-1, (self.num_attention_heads, -1))

        q, k, v = heads(self.query_proj(queries)), heads(self.key_proj(hidden_states)), self.value_proj(hidden_states)
        v = heads(v)
        terms = [name for name in ("c2p", "p2c") if name in self.pos_att_type]
        bias: Projected | None = None
        if self.relative_attention:
            settings = self.pos_ebd_size, self.position_buckets, self.max_relative_positions, q.device
            rows = F.embedding(_places(log_bucket, length, *settings), self.pos_dropout(rel_embeddings))
            if "p2c" in terms:
                project = self.query_proj if self.share_att_key else self.pos_query_proj
                bias = Projected(k, heads(project(rows)).transpose(0, 1), length - 1, of="keys")
            if "c2p" in terms:
                project = self.key_proj if self.share_att_key else self.pos_key_proj
                bias = Projected(q, heads(project(rows)).transpose(0, 1), length - 1, plus=bias)
        dropout_p = self.dropout.p if self.dropout.training else 0.0
        scale = 1 / _root(q.shape[-1] * (1 + len(terms)), q.dtype)
        out = attention(q, k, v, mask.keys, bias, softmax_scale=scale, dropout_p=dropout_p)
        other = torch.zeros_like(v[:, :1]) if empty == "zero" else v.mean(1, keepdim=True)
        return torch.where(mask.rows, out, other).flatten(2), None

    return {MASK: get_attention_mask, POSITIONS: get_rel_pos, FORWARD: forward}


def _places(log_bucket: LogBucket, length: int, span: int, buckets: int, longest: int, device: torch.device) -> Tensor:
    """Return the row of the embeddings for each distance of a call, key minus query, in ascending order."""
    if is_watched():
        return _places_within(log_bucket, length - 1, span, buckets, longest, device)
    reach = 1 << (length - 1).bit_length()  # so few tables serve all lengths
    return _cached_places(log_bucket, reach, span, buckets, longest, device)[reach - length + 1 : reach + length]


@functools.lru_cache(maxsize=64)
def _cached_places(log_bucket: LogBucket, reach: int, *settings: Any) -> Tensor:
    with torch.inference_mode(False):
        places = _places_within(log_bucket, reach, *settings)
    if places.is_cuda:
        torch.cuda.current_stream(places.device).synchronize()  # once: other streams will read it
    return places


def _places_within(
    log_bucket: LogBucket, reach: int, span: int, buckets: int, longest: int, device: torch.device
) -> Tensor:
    before = reach - torch.arange(2 * reach + 1, device=device)  # query minus key
    if buckets > 0:
        before = log_bucket(before, buckets, longest).long()
    return (before + span).clamp(0, 2 * span - 1)


def _root(x: int, dtype: torch.dtype) -> float:
    """Return the root by which scores are divided: theirs is in fp32, and then in the dtype of the queries."""
    root = math.sqrt(x)
    for each in (torch.float32, dtype):
        mantissa, exponent = math.frexp(root)
        steps = 2 / torch.finfo(each).eps
        root = math.ldexp(round(mantissa * steps) / steps, exponent)
    return root


_patch = Patch("deberta", _make)
enable, disable = _patch.enable, _patch.disable
