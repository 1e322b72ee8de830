"""Recipes of docs/biases.md: attention of models with relative positions, against the classes of transformers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flash_dmattn import attention
from flash_dmattn.biases import Projected

transformers = pytest.importorskip("transformers")

B, L, H, D = 2, 17, 2, 8
KEEP = torch.arange(L) < torch.tensor([[L], [11]])
F64 = torch.float64


def assert_as_the_class(layer: nn.Module, x: Tensor, theirs: Any, ours: Any, rows: Tensor) -> None:
    """out where queries count, and the gradients of x and of all parameters; the classes compute some steps in fp32."""
    results = []
    for call in (theirs, ours):
        out = call()[rows]
        sent = torch.randn(out.shape, generator=torch.Generator().manual_seed(0), dtype=F64)
        leaves = [x, *layer.parameters()]
        gradients = torch.autograd.grad(out, leaves, sent, allow_unused=True)
        results.append(
            [out, *(torch.zeros_like(p) if g is None else g for g, p in zip(gradients, leaves, strict=True))]
        )
    for made, wanted in zip(*results, strict=True):
        torch.testing.assert_close(made, wanted, rtol=2e-5, atol=2e-5)


def drawn(layer: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    layer = layer.double().eval()
    for p in layer.parameters():
        nn.init.normal_(p, std=0.3)
    return layer


def inputs() -> Tensor:
    return torch.randn(B, L, H * D, generator=torch.Generator().manual_seed(1), dtype=F64).requires_grad_()


def test_parakeet() -> None:
    from transformers.models.parakeet.modeling_parakeet import ParakeetEncoderAttention

    config: Any = SimpleNamespace(
        hidden_size=H * D, num_attention_heads=H, num_key_value_heads=H, attention_dropout=0.0, attention_bias=True,
        _attn_implementation="eager",
    )  # fmt: skip
    layer, x = drawn(ParakeetEncoderAttention(config, 0)), inputs()
    emb = torch.randn(1, 2 * L - 1, H * D, dtype=F64)
    mask = KEEP[:, None, None].expand(-1, 1, L, -1)  # in fp64 rows that see nothing are NaN there

    def ours() -> Tensor:
        q, k, v = (p(x).view(B, L, H, D) for p in (layer.q_proj, layer.k_proj, layer.v_proj))
        table = layer.relative_k_proj(emb).view(-1, H, D).transpose(0, 1)
        out = attention(q + layer.bias_u, k, v, mask, Projected(q + layer.bias_v, table, zero=L - 1))
        return layer.o_proj(out.flatten(2))

    assert_as_the_class(layer, x, lambda: layer(x, emb.expand(B, -1, -1), mask)[0], ours, KEEP)


@pytest.mark.parametrize("kind", ("relative_key", "relative"))
def test_wav2vec2_bert(kind: str) -> None:
    from transformers.models.wav2vec2_bert.modeling_wav2vec2_bert import Wav2Vec2BertSelfAttention

    config: Any = SimpleNamespace(
        hidden_size=H * D, num_attention_heads=H, position_embeddings_type=kind, attention_dropout=0.0,
        left_max_position_embeddings=6, right_max_position_embeddings=3, _attn_implementation="eager",
    )  # fmt: skip
    layer, x = drawn(Wav2Vec2BertSelfAttention(config)), inputs()
    emb = torch.randn(1, 2 * L - 1, H * D, dtype=F64)
    keys = KEEP[:, None, None]

    def ours() -> Tensor:
        q, k, v = (p(x).view(B, L, H, D) for p in (layer.linear_q, layer.linear_k, layer.linear_v))
        if kind == "relative_key":
            bias = Projected(q, layer.distance_embedding.weight[None], zero=6, outside="clamp")
        else:
            table = layer.linear_pos(emb).view(-1, H, D).transpose(0, 1)
            q, bias = q + layer.pos_bias_u, Projected(q + layer.pos_bias_v, table, zero=L - 1)
        return layer.linear_out(attention(q, k, v, keys, bias).flatten(2))

    hidden = torch.zeros(B, 1, 1, L, dtype=F64).masked_fill(~keys, -torch.inf)
    theirs = lambda: layer(x, hidden, emb)[0]
    assert_as_the_class(layer, x, theirs, ours, torch.ones(B, L, dtype=torch.bool))


@pytest.mark.parametrize("shares", (False, True))
def test_deberta_v2(shares: bool) -> None:
    from transformers.models.deberta_v2.modeling_deberta_v2 import DisentangledSelfAttention, make_log_bucket_position

    buckets, longest = 8, 12
    config: Any = SimpleNamespace(
        hidden_size=H * D, num_attention_heads=H, relative_attention=True, position_buckets=buckets,
        max_relative_positions=longest, pos_att_type=["c2p", "p2c"], share_att_key=shares, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0, max_position_embeddings=32,
    )  # fmt: skip
    layer, x = drawn(DisentangledSelfAttention(config)), inputs()
    emb = torch.randn(2 * buckets, H * D, dtype=F64)
    mask = (KEEP[:, None, :] & KEEP[:, :, None])[:, None]

    def ours() -> Tensor:
        q, k, v = (p(x).view(B, L, H, D) for p in (layer.query_proj, layer.key_proj, layer.value_proj))
        reach = torch.arange(-longest, longest + 1)  # key minus query; the table of their model has query minus key
        rows = (make_log_bucket_position(-reach, buckets, longest) + buckets).clamp(0, 2 * buckets - 1).long()
        key_rows = layer.key_proj if shares else layer.pos_key_proj
        query_rows = layer.query_proj if shares else layer.pos_query_proj
        to_keys, to_queries = (F.embedding(rows, p(emb)).view(-1, H, D).transpose(0, 1) for p in (key_rows, query_rows))
        other = Projected(k, to_queries, longest, "clamp", of="keys")
        bias = Projected(q, to_keys, longest, "clamp", plus=other)
        return attention(q, k, v, mask, bias, softmax_scale=(3 * D) ** -0.5).flatten(2)

    assert_as_the_class(layer, x, lambda: layer(x, mask, rel_embeddings=emb)[0], ours, KEEP)


def test_sam_by_head_dims() -> None:
    from transformers.models.sam.modeling_sam import SamVisionAttention

    side = 4
    config: Any = SimpleNamespace(
        hidden_size=H * D, num_attention_heads=H, attention_dropout=0.0, qkv_bias=True, use_rel_pos=True,
        image_size=side, patch_size=1, _attn_implementation="eager",
    )  # fmt: skip
    layer = drawn(SamVisionAttention(config, window_size=0))
    random = torch.Generator().manual_seed(1)
    grid = torch.randn(B, side, side, H * D, generator=random, dtype=F64).requires_grad_()

    def ours() -> Tensor:
        q, k, v = layer.qkv(grid).reshape(B, side * side, 3, H, D).unbind(2)
        r = torch.arange(side)
        pixels, place = q.unflatten(1, (side, side)), r[:, None] - r + side - 1
        by_row = torch.einsum("brchd,rkd->brchk", pixels, layer.rel_pos_h[place]).flatten(1, 2)
        by_column = torch.einsum("brchd,ckd->brchk", pixels, layer.rel_pos_w[place]).flatten(1, 2)
        at = torch.arange(side * side)
        marks = torch.cat((F.one_hot(at // side, side), F.one_hot(at % side, side)), -1).to(k.dtype)
        wide_q = torch.cat((q, D**0.5 * by_row, D**0.5 * by_column), -1)
        wide_k = torch.cat((k, marks[:, None].expand(B, -1, H, -1)), -1)
        return layer.proj(attention(wide_q, wide_k, v, softmax_scale=D**-0.5).reshape(B, side, side, -1))

    every = torch.ones(B, side, side, dtype=torch.bool)
    assert_as_the_class(layer, grid, lambda: layer(grid)[0], ours, every)
