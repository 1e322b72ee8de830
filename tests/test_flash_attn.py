"""The functions of the package flash-attn: arguments, returns, values and gradients, against plain PyTorch."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from flash_dmattn import attention
from flash_dmattn.integrations import flash_attn as names
from flash_dmattn.integrations.flash_attn import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)
from flash_dmattn.reference import formula

HEADS, HEADS_K, DIM = 4, 2, 16
SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "scale": {"softmax_scale": 0.3},
    "causal": {"causal": True},
    "window": {"window_size": (3, 2)},
    "window to the left, as a list": {"window_size": [2, 0]},
    "window as a tensor": {"window_size": torch.tensor([3, 1]), "alibi_slopes": SLOPES},
    "softcap": {"softcap": 2.0, "causal": True},
    "ALiBi": {"alibi_slopes": SLOPES},
    "causal ALiBi": {"alibi_slopes": SLOPES, "causal": True},
    "ALiBi in a window": {"alibi_slopes": SLOPES, "window_size": (3, 0)},
    "ALiBi in a window with a later key": {"alibi_slopes": SLOPES, "window_size": (3, 1)},
    "ALiBi of each entry": {"alibi_slopes": torch.stack((SLOPES, SLOPES.flip(0))), "causal": True},
    "ALiBi of each entry both ways": {"alibi_slopes": torch.stack((SLOPES, SLOPES.flip(0)))},
    "deterministic": {"deterministic": True, "causal": True},
}
every_option = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)


def rows(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def plain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Any = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
) -> tuple[Tensor, Tensor]:
    """Compute (out, lse) of one entry: q (Lq, H, D), k and v (Lk, Hk, D); slopes (H,)."""
    bias = None
    if alibi_slopes is not None:
        distance = torch.arange(len(k)) - (torch.arange(len(q))[:, None] + len(k) - len(q))
        bias = -alibi_slopes[:, None, None].double() * distance.abs()
    flags = {
        "is_causal": causal,
        "softmax_scale": softmax_scale,
        "softcap": softcap,
        "window_size": tuple(map(int, window_size)),
    }
    out, lse = formula.attention(q[None], k[None], v[None], None, bias, **flags)
    return out[0], lse[0]


def each(options: dict[str, Any], entry: int) -> dict[str, Any]:
    slopes = options.get("alibi_slopes")
    return options if slopes is None or slopes.dim() == 1 else {**options, "alibi_slopes": slopes[entry]}


def assert_same(results: tuple[Tensor, ...], expected: tuple[Tensor, ...], leaves: tuple[Tensor, ...]) -> None:
    """Compare out, lse and the gradients of both."""
    weights = [torch.randn_like(x) for x in expected[:2]]
    for x, y in zip(results, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)  # slopes are float32
    grads = [
        torch.autograd.grad(sum((x * w).sum() for x, w in zip(pair, weights, strict=True)), leaves, retain_graph=True)
        for pair in (results, expected)
    ]
    for x, y in zip(*grads, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)


@every_option
@pytest.mark.parametrize("seqlen_q", (5, 9))
def test_dense_calls(options: dict[str, Any], seqlen_q: int) -> None:
    q, k, v = rows(2, seqlen_q, HEADS, DIM), rows(2, 9, HEADS_K, DIM), rows(2, 9, HEADS_K, DIM)
    out, lse, probabilities = flash_attn_func(q, k, v, return_attn_probs=True, **options)
    assert probabilities is None
    expected = [plain(q[i], k[i], v[i], **each(options, i)) for i in range(2)]
    assert_same((out, lse), tuple(map(torch.stack, zip(*expected, strict=True))), (q, k, v))
    assert flash_attn_func(q, k, v, **options).equal(out)


@every_option
def test_packed_sequences(options: dict[str, Any]) -> None:
    ends_q, ends_k = torch.tensor([0, 3, 8], dtype=torch.int32), torch.tensor([0, 7, 13], dtype=torch.int32)
    q, k, v = rows(8, HEADS, DIM), rows(13, HEADS_K, DIM), rows(13, HEADS_K, DIM)
    out, lse, _ = flash_attn_varlen_func(q, k, v, ends_q, ends_k, 5, 7, return_attn_probs=True, **options)
    parts = [
        plain(q[a:b], k[c:d], v[c:d], **each(options, i))
        for i, (a, b, c, d) in enumerate(((0, 3, 0, 7), (3, 8, 7, 13)))
    ]
    expected = torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts], 1)
    assert_same((out, lse), expected, (q, k, v))


def test_packed_arguments() -> None:
    q, k, v = rows(2, 6, 4, DIM), rows(2, 6, 4, DIM), rows(2, 6, 4, DIM)
    expected = flash_attn_func(q, k, v, 0.0, None, True)
    assert flash_attn_qkvpacked_func(torch.stack((q, k, v), 2), 0.0, None, True).equal(expected)
    assert flash_attn_kvpacked_func(q, torch.stack((k, v), 2), causal=True).equal(expected)
    ends = torch.tensor([0, 6, 12], dtype=torch.int32)
    flat = [x.flatten(0, 1) for x in (q, k, v)]
    packed = flash_attn_varlen_func(*flat, ends, ends, 6, 6, causal=True)
    torch.testing.assert_close(packed, expected.flatten(0, 1))
    assert flash_attn_varlen_qkvpacked_func(torch.stack(flat, 1), ends, 6, causal=True).equal(packed)
    kv = torch.stack(flat[1:], 1)
    assert flash_attn_varlen_kvpacked_func(flat[0], kv, ends, ends, 6, 6, causal=True).equal(packed)


@pytest.mark.parametrize("is_paged", (False, True), ids=("slots", "pages"))
@pytest.mark.parametrize("new", (0, 1, 3))
@pytest.mark.parametrize("name", ("plain", "causal", "window", "causal ALiBi", "ALiBi of each entry both ways"))
def test_caches(is_paged: bool, new: int, name: str) -> None:
    options, used = OPTIONS[name], [5, 11]
    q = torch.randn(2, max(new, 1), HEADS, DIM)
    k, v = torch.randn(2, 2, new, HEADS_K, DIM)
    caches = torch.randn(2, 2, 16, HEADS_K, DIM)
    full = [[torch.cat((caches[x, s, : used[s]], (k, v)[x][s])) for x in range(2)] for s in range(2)]
    table, stored = None, caches
    if is_paged:
        table = torch.tensor([[3, 0], [1, 2]], dtype=torch.int32)
        stored = torch.empty(2, 4, 8, HEADS_K, DIM)
        stored[:, table.long()] = caches.unflatten(2, (2, 8))
    news = (k, v) if new else (None, None)
    lengths = torch.tensor(used, dtype=torch.int32)
    out, lse = flash_attn_with_kvcache(
        q, *stored, *news, cache_seqlens=lengths, block_table=table, return_softmax_lse=True, **options
    )
    for s in range(2):
        expected = plain(q[s].double(), *(x.double() for x in full[s]), **each(options, s))
        torch.testing.assert_close((out[s].double(), lse[s].double()), expected, rtol=1e-4, atol=1e-4)
        for x in range(2):
            written = stored[x] if table is None else stored[x, table.long()].flatten(1, 2)
            assert written[s, : used[s] + new].equal(full[s][x])


def test_a_cache_of_one_length() -> None:
    q, (k, v) = torch.randn(2, 1, HEADS, DIM), torch.randn(2, 2, 16, HEADS_K, DIM)
    for lengths, used in (({"cache_seqlens": 7}, 7), ({}, 16)):
        out = flash_attn_with_kvcache(q, k, v, **lengths)
        torch.testing.assert_close(out, flash_attn_func(q, k[:, :used], v[:, :used]))


def test_a_call_with_pages_has_a_forward_pass_alone() -> None:
    """As in flash-attn: inputs may require grad, and a backward pass is refused."""
    q, pool = rows(3, HEADS, DIM), rows(2, 16, HEADS_K, DIM)
    ends = torch.tensor([0, 3], dtype=torch.int32), torch.tensor([0, 20], dtype=torch.int32)
    table = torch.tensor([[1, 0]], dtype=torch.int32)
    out = flash_attn_varlen_func(q, pool, pool, *ends, 3, 20, causal=True, block_table=table)
    keys = pool[table[0].long()].flatten(0, 1)[:20]
    torch.testing.assert_close(out, plain(q, keys, keys, causal=True)[0])
    with pytest.raises(RuntimeError, match="keys in pages have no gradients"):
        out.sum().backward()
    for needs in range(1, 8):  # whichever of q, k and v need one
        leaves = (x.detach().requires_grad_(bool(needs >> i & 1)) for i, x in enumerate((q, pool, pool.clone())))
        out, lse = flash_attn_varlen_func(*leaves, *ends, 3, 20, block_table=table, return_attn_probs=True)[:2]
        assert out.requires_grad and not lse.requires_grad
        with pytest.raises(RuntimeError, match="keys in pages have no gradients"):
            out.sum().backward()


def test_rows_without_keys() -> None:
    q, k = torch.randn(1, 4, 2, DIM), torch.randn(1, 2, 2, DIM)
    out, lse, _ = flash_attn_func(q, k, k, causal=True, return_attn_probs=True)
    assert not out[:, :2].any() and (lse[..., :2] == math.inf).all() and lse[..., 2:].isfinite().all()  # as there
    lse = flash_attn_with_kvcache(q, k, k, cache_seqlens=2, causal=True, return_softmax_lse=True)[1]
    assert (lse[..., :2] == math.inf).all() and lse[..., 2:].isfinite().all()
    q.requires_grad_()
    flash_attn_func(q, k, k, causal=True, return_attn_probs=True)[1][..., 2:].sum().backward()
    assert not q.grad[:, :2].any() and q.grad.isfinite().all()


def test_dropout() -> None:
    q = torch.randn(2, 8, HEADS, DIM)
    torch.manual_seed(3)
    first = flash_attn_func(q, q, q, 0.5)
    torch.manual_seed(3)
    assert flash_attn_func(q, q, q, dropout_p=0.5).equal(first) and not first.equal(flash_attn_func(q, q, q))


Q, CACHE = torch.zeros(2, 1, HEADS, DIM), torch.zeros(2, 8, HEADS_K, DIM)


@pytest.mark.parametrize(
    "named, error, message",
    (
        ({"rotary_cos": Q, "rotary_sin": Q}, NotImplementedError, "rotary_cos is set; .*rotate q and k"),
        ({"cache_batch_idx": Q}, NotImplementedError, "cache_batch_idx is set"),
        ({"cache_leftpad": Q}, NotImplementedError, "cache_leftpad is set"),
        ({"k": Q, "cache_seqlens": 3}, ValueError, "one of k and v is None"),
        ({"k": Q, "v": Q}, ValueError, "cache_seqlens is None"),
        ({"block_table": torch.zeros(2, 1, dtype=torch.int32)}, ValueError, "cache_seqlens is None"),
        (
            {"alibi_slopes": SLOPES[:3]},
            ValueError,
            r"alibi_slopes has .*\(3,\); it needs float32, and \(4,\) or \(2, 4\)",
        ),
        ({"alibi_slopes": 0.5}, TypeError, "alibi_slopes is a float; it needs to be a torch.Tensor"),
        ({"cache_seqlens": [3, 3]}, TypeError, "cache_seqlens is a list; it needs to be a torch.Tensor"),
        (
            {"cache_seqlens": torch.ones(2)},
            ValueError,
            r"cache_seqlens has shape \(2,\) and dtype float32; it needs int32",
        ),
        (
            {"cache_seqlens": torch.ones(9).int()},
            ValueError,
            r"cache_seqlens has shape \(9,\) and dtype int32; it needs",
        ),
        ({"window_size": 4}, TypeError, r"window_size is 4; it needs to be None or a pair \(left, right\)"),
        ({"alibi_slopes": SLOPES.double()}, ValueError, "alibi_slopes has dtype torch.float64"),
        ({"alibi_slopes": SLOPES.to("meta")}, ValueError, "alibi_slopes is on meta; it needs to be on the device of q"),
        ({"window_size": torch.tensor(4)}, TypeError, r"window_size is \(4,\); it needs to be None or a pair"),
        ({"cache_seqlens": True}, TypeError, r"cache_seqlens is True \(bool\); it needs to be an int"),
        ({"cache_seqlens": -1}, ValueError, "cache_seqlens is -1; it needs"),
        ({"cache_seqlens": 8, "k": CACHE, "v": CACHE}, ValueError, "cache_seqlens is 8 for entry 0, and k has 8 new"),
        ({"cu_seqlens_q": Q}, NotImplementedError, "cu_seqlens_q is set; .*flash_attn_varlen_func"),
        ({"cache_seqlens": 2**40}, ValueError, "cache_seqlens is 1099511627776; it needs"),
        ({"q": None}, TypeError, "q is a NoneType; it needs to be a torch.Tensor"),
        ({"k_cache": None}, TypeError, "k_cache is a NoneType; it needs to be a torch.Tensor"),
        ({"v_cache": [1], "cache_seqlens": 3}, TypeError, "v_cache is a list; it needs to be a torch.Tensor"),
        ({"k": [1], "v": CACHE, "cache_seqlens": 3}, TypeError, "k is a list; it needs to be a torch.Tensor"),
        ({"k": CACHE[0, 0, 0], "v": CACHE, "cache_seqlens": 3}, ValueError, r"k has shape \(16,\); it needs 4 dim"),
    ),
)
def test_refusals_of_caches(named: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        flash_attn_with_kvcache(**{"q": Q, "k_cache": CACHE, "v_cache": CACHE, **named})


def test_no_sequences_beside_slopes() -> None:
    none, q, k = torch.zeros(1, dtype=torch.int32), torch.randn(3, HEADS, DIM), torch.randn(3, HEADS_K, DIM)
    out, lse, _ = flash_attn_varlen_func(
        q, k, k, none, none, 0, 0, causal=True, alibi_slopes=SLOPES, return_attn_probs=True
    )
    assert not out.any() and (lse == math.inf).all()


def test_bounds_may_be_tensors() -> None:
    ends, q = torch.tensor([0, 5, 12], dtype=torch.int32), torch.randn(12, HEADS, DIM)
    longest = (ends[1:] - ends[:-1]).max()
    wanted = flash_attn_varlen_func(q, q, q, ends, ends, 7, 7, causal=True)
    assert flash_attn_varlen_func(q, q, q, ends, ends, longest, longest, causal=True).equal(wanted)
    qkv = q[:, None].expand(-1, 3, -1, -1)
    assert flash_attn_varlen_qkvpacked_func(qkv, ends, longest, causal=True).equal(wanted)
    with pytest.raises(TypeError, match="max_seqlen_q is a Tensor"):
        flash_attn_varlen_func(q, q, q, ends, ends, torch.tensor(7.0), 7)


def test_names_of_newer_versions() -> None:
    ends, q, sink = torch.tensor([0, 5, 12], dtype=torch.int32), torch.randn(12, HEADS, DIM), torch.randn(HEADS)
    dense = q[None]
    out = flash_attn_func(dense, dense, dense, learnable_sink=sink, num_splits=2, pack_gqa=True, attention_chunk=0)
    torch.testing.assert_close(out, attention(dense, dense, dense, sink=sink))
    causal = flash_attn_func(dense, dense, dense, causal=True)
    assert flash_attn_func(dense, dense, dense, window_size=(None, 0)).equal(causal)
    used = torch.tensor([3, 7], dtype=torch.int32)
    out = flash_attn_varlen_func(q, q, q, ends, ends, 7, 7, causal=True, seqused_q=used, seqused_k=used)
    alone = attention(dense[:, :3], dense[:, :3], dense[:, :3], is_causal=True)
    torch.testing.assert_close(out[:3], alone[0])
    assert not out[3:5].any()
    pool, table = torch.randn(2, 16, HEADS_K, DIM), torch.tensor([[1, 0], [0, 1]], dtype=torch.int32)
    paged = {"causal": True, "seqused_k": torch.tensor([20, 9], dtype=torch.int32)}
    first = flash_attn_varlen_func(q, pool, pool, ends, None, 7, 20, page_table=table, **paged)
    limits = torch.tensor([0, 20, 29], dtype=torch.int32)
    assert first.equal(flash_attn_varlen_func(q, pool, pool, ends, limits, 7, 20, causal=True, block_table=table))
    for named, message in (
        ({"attention_chunk": 4}, "attention_chunk is set; it needs to be 0 here: pass a mask"),
        ({"q_descale": sink}, "q_descale is set; it needs to be None here"),
    ):
        with pytest.raises(NotImplementedError, match=message):
            flash_attn_func(dense, dense, dense, **named)
    with pytest.raises(ImportError, match=r"apply_rotary_emb of flash-attn is not in .*apply_rotary"):
        from flash_dmattn.integrations.flash_attn import apply_rotary_emb  # noqa: F401
    assert not hasattr(names, "nothing") and names.__version__.startswith("2.")


@pytest.mark.parametrize(
    "call, name",
    (
        (lambda **named: flash_attn_func(Q, Q, Q, **named), "flash_attn_func"),
        (lambda **named: flash_attn_qkvpacked_func(Q[:, :, None].repeat(1, 1, 3, 1, 1), **named), "qkvpacked_func"),
        (lambda **named: flash_attn_kvpacked_func(Q, Q[:, :, None].repeat(1, 1, 2, 1, 1), **named), "kvpacked_func"),
        (lambda **named: flash_attn_with_kvcache(Q, CACHE, CACHE, **named), "flash_attn_with_kvcache"),
    ),
)
def test_a_wrong_name_is_answered_by_the_function_that_was_called(call: Any, name: str) -> None:
    with pytest.raises(TypeError, match=rf"{name}\(\) got an unexpected .* 'causl'; did you mean 'causal'"):
        call(causl=True)
    with pytest.raises(TypeError, match=rf"{name}\(\) .* 'attn_bias'; flash_dmattn.attention takes a mask and a bias"):
        call(attn_bias=Q)


def test_padding_is_taken_out_and_put_back() -> None:
    mask = torch.tensor([[1, 1, 0], [0, 1, 1], [0, 0, 0]])
    x = torch.randn(3, 3, HEADS, DIM, requires_grad=True)
    tokens, indices, edges, longest, used = names.unpad_input(x, mask)
    assert tokens.equal(x[mask.bool()]) and edges.tolist() == [0, 2, 4, 4] and edges.dtype == torch.int32
    assert (longest, used.tolist()) == (2, [2, 2, 0])
    back = names.pad_input(tokens, indices, 3, 3)
    assert back.equal(x * mask[..., None, None])
    back.sum().backward()
    assert x.grad.equal((mask[..., None, None] == 1).float().expand_as(x))
    assert names.index_first_axis(x.flatten(0, 1), indices).equal(tokens)
    _, indices, edges, _, used = names.unpad_input(x, mask, 1 - mask)
    assert edges.tolist() == [0, 3, 6, 9] and len(indices) == 9 and used.tolist() == [2, 2, 0]


def test_refusals() -> None:
    ends, tokens = torch.tensor([0, 2], dtype=torch.int32), Q[:, 0]
    for q, k in ((None, Q), (Q, None)):
        with pytest.raises(TypeError, match=r"[qk] is a NoneType; it needs to be a torch\.Tensor"):
            flash_attn_func(q, k, k, alibi_slopes=SLOPES)
    with pytest.raises(ValueError, match=r"q has shape \(16,\); it needs 4 dimensions"):
        flash_attn_func(Q[0, 0, 0], Q, Q, alibi_slopes=SLOPES)
    with pytest.raises(TypeError, match="dropout_p is a NoneType; it needs to be a number"):
        flash_attn_func(Q, Q, Q, None, return_attn_probs=True)
    with pytest.raises(TypeError, match=r"cu_seqlens_k is a list; it needs to be an int32 or int64 torch\.Tensor"):
        flash_attn_varlen_func(tokens, tokens, tokens, ends, [0, 2], 2, 2)
    with pytest.raises(ValueError, match=r"cu_seqlens_k has shape \(\); it needs 1 dimension"):
        flash_attn_varlen_func(tokens, tokens, tokens, ends, ends[1], 2, 2)
    with pytest.raises(TypeError, match="max_seqlen_q is None"):
        flash_attn_varlen_func(tokens, tokens, tokens, ends, ends, None, None, alibi_slopes=SLOPES)
    with pytest.raises(NotImplementedError, match="return_attn_probs is True with dropout_p"):
        flash_attn_func(Q, Q, Q, 0.1, return_attn_probs=True)
    with pytest.raises(TypeError, match="kv is a NoneType; it needs"):
        flash_attn_kvpacked_func(Q, None)
    with pytest.raises(ValueError, match=r"qkv has shape \(2, 1, 4, 16\); it needs 3 tensors in its third to last dim"):
        flash_attn_qkvpacked_func(Q)
