"""The dynamic-mask attention layer against its formula in fp64: gradients, cache, padding, packed sequences, pages."""

from __future__ import annotations

import copy
import io
import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cases import DEVICE
from test_examples import load
from torch import Tensor

import flash_dmattn
from flash_dmattn import Sequences
from flash_dmattn.nn import DynamicMaskAttention, KVCache
from flash_dmattn.nn.positions import rotary_angles

HIDDEN, HEADS, HEADS_K, HEAD_DIM, LENGTH, KEEP = 24, 4, 2, 6, 17, 5
EXACT = {"rtol": 1e-9, "atol": 1e-11}


def id_of(options: dict[str, Any]) -> str:
    return "-".join(options) or "plain"


def make_layer(**options: object) -> DynamicMaskAttention:
    torch.manual_seed(0)
    arguments = {"keep_window_size": KEEP, "dtype": torch.float64, **options}
    layer = DynamicMaskAttention(HIDDEN, HEADS, HEADS_K, HEAD_DIM, **arguments)
    with torch.no_grad():
        for parameter in layer.parameters():  # the norms' gains and A start at one: any other number tests more
            if parameter.dim() == 1:
                parameter.uniform_(0.5, 1.5)
    return layer


def make_x(batch: int = 2, length: int = LENGTH) -> torch.Tensor:
    return torch.randn(batch, length, HIDDEN, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def rotate_by_complex_numbers(x: torch.Tensor, theta: float = 10000.0) -> torch.Tensor:
    """RoPE of (L, D), the textbook way: channels (c, c + D/2) are one complex number times exp(i * angle)."""
    length, half = x.shape[0], x.shape[1] // 2
    rows = []
    for position in range(length):
        angles = torch.tensor([position * theta ** (-2 * c / (2 * half)) for c in range(half)], dtype=torch.float64)
        turned = torch.complex(x[position, :half], x[position, half:]) * torch.polar(torch.ones_like(angles), angles)
        rows.append(torch.cat((turned.real, turned.imag)))
    return torch.stack(rows)


def by_hand(layer: DynamicMaskAttention, x: torch.Tensor) -> torch.Tensor:
    """The layer by loops over batch, heads and queries, from the formula in its docstring; shares no code with it."""
    groups = HEADS // HEADS_K
    batches = []
    for row in x:
        q, k, v = (row @ p.weight.T for p in (layer.q_proj, layer.k_proj, layer.v_proj))
        s = layer.score_scale * torch.log1p(torch.exp(v @ layer.score_proj.weight.T))
        heads = []
        for h in range(HEADS):
            own = slice((h // groups) * HEAD_DIM, (h // groups + 1) * HEAD_DIM)
            query, key = q[:, h * HEAD_DIM : (h + 1) * HEAD_DIM], k[:, own]
            if isinstance(layer.q_norm, torch.nn.RMSNorm):
                eps = torch.finfo(torch.float64).eps
                query = query / (query.square().mean(-1, keepdim=True) + eps).sqrt() * layer.q_norm.weight
                key = key / (key.square().mean(-1, keepdim=True) + eps).sqrt() * layer.k_norm.weight
            query, key = rotate_by_complex_numbers(query), rotate_by_complex_numbers(key)
            rows = []
            for i in range(len(row)):
                scores = s[: i + 1, h // groups]
                ranked = (scores.detach() * 4096).round()
                best = ranked.argsort(descending=True, stable=True)[: layer.keep_window_size]
                near = torch.arange(max(0, i + 1 - layer.local_window_size), i + 1)
                kept = torch.unique(torch.cat((best, near)))
                p = torch.softmax(layer.softmax_scale * (key[kept] @ query[i]) + scores[kept], 0)
                rows.append(p @ v[kept, own])
            heads.append(torch.stack(rows))
        batches.append(torch.cat(heads, -1) @ layer.o_proj.weight.T)
    return torch.stack(batches)


@pytest.mark.parametrize(
    "options",
    [{}, {"qk_norm": True}, {"softmax_scale": 0.3}, {"local_window_size": 3}, {"keep_window_size": 100}],
    ids=id_of,
)
def test_output_and_every_gradient_equal_the_formula(options):
    layer, x = make_layer(**options), make_x().requires_grad_()
    dout = torch.randn_like(x)
    out, expected = layer(x), by_hand(layer, x)
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-12)
    wanted = {"x": x, **dict(layer.named_parameters())}
    assert {"score_proj.weight", "score_scale"} < set(wanted)
    for name, got, exact in zip(
        wanted,
        torch.autograd.grad(out, wanted.values(), dout),
        torch.autograd.grad(expected, wanted.values(), dout),
        strict=True,
    ):
        assert exact.norm() > 0, name
        torch.testing.assert_close(got, exact, rtol=1e-9, atol=1e-11, msg=lambda text, name=name: f"{name}: {text}")


def test_full_attention_is_sdpa_and_has_no_score_parameters():
    layer, x = make_layer(keep_window_size=None), make_x()
    q, k, v, mask, bias = layer.attention_arguments(x)
    assert mask is None and bias is None and layer.key_scores(v) is None
    assert not any("score" in name for name, _ in layer.named_parameters())
    expected = F.scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True, enable_gqa=True
    )
    torch.testing.assert_close(layer(x), layer.o_proj(expected.transpose(1, 2).flatten(2)), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("options", [{}, {"keep_window_size": None}, {"local_window_size": 2}, {"qk_norm": True}])
@pytest.mark.parametrize("pieces", [[1] * LENGTH, [7] + [1] * 10, [3, 8, 1, 5], [LENGTH]], ids=str)
@pytest.mark.parametrize("is_padded", [False, True])
def test_decoding_from_the_cache_equals_the_full_forward(options, pieces, is_padded):
    layer, x = make_layer(**options).requires_grad_(False), make_x()
    cache = KVCache(max_length=4)  # smaller than the text: it has to grow, more than once
    real = torch.ones(2, LENGTH, dtype=torch.bool)
    real[0, : 4 * is_padded] = False
    steps = []
    for piece in x.split(pieces, dim=1):
        seen = cache.length + piece.shape[1]
        steps.append(layer(piece, real[:, :seen] if is_padded else None, cache))
    assert cache.length == LENGTH
    torch.testing.assert_close(torch.cat(steps, dim=1), layer(x, real if is_padded else None), rtol=1e-10, atol=1e-12)


def test_decoding_keeps_the_same_keys_where_equal_tokens_tie():
    layer = make_layer(dtype=torch.float32, keep_window_size=8).requires_grad_(False)
    generator = torch.Generator().manual_seed(2)
    alphabet = torch.randn(4, HIDDEN, generator=generator)
    for _ in range(10):
        x, cache = alphabet[torch.randint(4, (1, 100), generator=generator)], KVCache()
        decoded = [layer(piece, cache=cache) for piece in x.split([40] + [1] * 60, dim=1)]
        torch.testing.assert_close(torch.cat(decoded, dim=1), layer(x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_cache_emptied_by_truncate_takes_another_batch_and_dtype(dtype):
    layer, x = make_layer().requires_grad_(False), make_x()
    cache = KVCache(max_length=64)
    layer(x, cache=cache)
    cache.truncate(0)
    layer, other = layer.to(dtype), make_x(batch=3).to(dtype)
    steps = [layer(piece, cache=cache) for piece in other.split([9, 1, 7], dim=1)]
    assert steps[0].dtype == dtype and cache.length == LENGTH
    tolerance = {"rtol": 1e-10, "atol": 1e-12} if dtype == torch.float64 else {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(torch.cat(steps, dim=1), layer(other), **tolerance)


def test_a_cache_holds_what_cat_would_make_of_several_dtypes() -> None:
    """A prompt under autocast, a step without it, and the other way round: nothing is rounded."""
    pieces = [torch.randn(1, 3, 2, 4, dtype=dtype) for dtype in (torch.float32, torch.bfloat16, torch.float64)]
    for order in (pieces, pieces[::-1]):
        cache = KVCache(max_length=64)
        for piece in order:
            k, v, scores = cache.append(piece, 2 * piece, piece[..., 0])
        both = torch.cat(order, dim=1)
        assert k.dtype == both.dtype and k.equal(both) and v.equal(2 * both) and scores.equal(both[..., 0])


def test_a_cache_goes_from_one_mode_to_another() -> None:
    """A prompt in inference mode, and a step outside of it, where torch forbids to write to what was made inside."""
    layer, x, cache = make_layer().requires_grad_(False), make_x(), KVCache(max_length=64)
    steps = []
    for mode, piece in zip(
        (torch.inference_mode, torch.no_grad, torch.inference_mode, torch.enable_grad), x.split(5, 1)
    ):
        with mode():
            steps.append(layer(piece, cache=cache))
    torch.testing.assert_close(torch.cat(steps, dim=1), layer(x), **EXACT)


def test_a_refused_call_leaves_the_cache_as_it_was() -> None:
    layer, x, cache = make_layer().requires_grad_(False), make_x(), KVCache()
    layer(x[:, :9], cache=cache)
    for mask, error in ((torch.ones(2, 9, dtype=torch.long), ValueError), (torch.ones(2, 10), TypeError)):
        with pytest.raises(error, match="attention_mask has"):
            layer(x[:, 9:10], attention_mask=mask, cache=cache)
    assert cache.length == 9
    torch.testing.assert_close(layer(x[:, 9:], cache=cache), layer(x)[:, 9:], **EXACT)


@pytest.mark.parametrize("seqlen_q", [1, 4])
def test_scores_are_ranked_by_the_nearest_step(seqlen_q):
    """The last bits of a score may decide a product, but not the mask."""
    layer = make_layer(dtype=torch.float32, keep_window_size=1).requires_grad_(False)
    step = 2.0**-12

    def kept(first: float, second: float) -> list[bool]:
        scores = torch.tensor([0.0, first, second, 0.0])[None, :, None].expand(2, 4, HEADS_K)
        mask = layer._kept_keys(scores.transpose(1, 2).unsqueeze(2), seqlen_q, None)
        mask = mask if isinstance(mask, torch.Tensor) else mask.dense()
        assert mask.shape == (2, HEADS_K, seqlen_q, 4) and torch.equal(mask, mask[:1, :1].expand_as(mask))
        return mask[0, 0, -1].tolist()

    first_key, second_key = [False, True, False, False], [False, False, True, False]
    on_a_step = torch.tensor(1.0 + 77 * step)
    below, above = (float(torch.nextafter(on_a_step, torch.tensor(to))) for to in (0.0, 9.0))
    assert below < on_a_step < above
    assert kept(below, above) == first_key  # of equals the earliest
    assert kept(above, below) == first_key
    assert kept(float(on_a_step) - 0.4 * step, float(on_a_step) + 0.4 * step) == first_key
    assert kept(float(on_a_step) + 0.4 * step, float(on_a_step) + 0.6 * step) == second_key
    assert kept(float(on_a_step), float(on_a_step) + step) == second_key


OPTIONS = [{}, {"qk_norm": True, "projection_bias": True}, {"keep_window_size": None}, {"local_window_size": 3}]


@pytest.mark.parametrize("options", OPTIONS, ids=id_of)
@pytest.mark.parametrize("way", ["state_dict", "deepcopy", "torch.save"])
def test_a_copy_of_a_layer_does_what_the_layer_does(way, options):
    layer, x = make_layer(**options), make_x()
    if way == "state_dict":
        copied = copy.deepcopy(layer)
        copied.load_state_dict({name: torch.zeros_like(x) for name, x in layer.state_dict().items()})
        assert copied.load_state_dict(layer.state_dict(), strict=True) == ([], [])
    elif way == "deepcopy":
        copied = copy.deepcopy(layer)
    else:
        torch.save(layer, file := io.BytesIO())
        copied = torch.load(io.BytesIO(file.getvalue()), weights_only=False)
    assert repr(copied) == repr(layer)
    outputs, gradients = [], []
    for one in (layer, copied):
        out = one(x)
        outputs.append(out)
        gradients.append(torch.autograd.grad(out.square().sum(), list(one.parameters())))
    assert torch.equal(*outputs)
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
    with torch.no_grad():
        copied.o_proj.weight.zero_()
    assert torch.equal(layer(x), outputs[0]), "a copy shares no parameter"


def test_a_cache_forgets_a_draft_and_a_copy_goes_on_by_itself():
    layer, x = make_layer().requires_grad_(False), make_x()
    expected, cache = layer(x), KVCache()
    layer(x[:, :9], cache=cache)
    copies = [copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))]
    layer(torch.randn_like(x), cache=cache)
    cache.truncate(9)  # a draft is forgotten
    for copied in (cache, *copies):
        torch.testing.assert_close(layer(x[:, 9:], cache=copied), expected[:, 9:], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("options", [{}, {"keep_window_size": None}, {"local_window_size": 3}])
def test_padding_changes_nothing_for_the_real_tokens(side, options):
    layer, x = make_layer(**options), make_x(batch=1)
    padding = 100 * torch.randn(1, 6, HIDDEN, dtype=torch.float64)  # large, so that a padding key would win the top-k
    zeros, ones = torch.zeros(1, 6, dtype=torch.long), torch.ones(1, LENGTH, dtype=torch.long)
    left = side == "left"
    padded = torch.cat((padding, x) if left else (x, padding), dim=1)
    attention_mask = torch.cat((zeros, ones) if left else (ones, zeros), dim=1)
    out = layer(padded, attention_mask)
    real = slice(6, None) if left else slice(0, LENGTH)
    torch.testing.assert_close(out[:, real], layer(x), rtol=1e-9, atol=1e-11)
    if left:  # such a query sees only padding
        assert torch.equal(out[:, :6], torch.zeros_like(out[:, :6]))


@pytest.mark.parametrize("local_window_size", (0, 3))
@pytest.mark.parametrize("padded", (slice(0, 4), slice(-4, None)), ids=("left", "right"))
def test_the_arguments_that_it_tells_of_give_its_output(local_window_size, padded):
    """`forward` prepares intervals, `attention_arguments` makes a dense mask of the same keys."""
    layer, x = make_layer(local_window_size=local_window_size).requires_grad_(False), make_x()
    with torch.no_grad():
        x[0, padded] *= 100  # so that padding would win the top-k
    attention_mask = torch.ones(2, LENGTH, dtype=torch.bool)
    attention_mask[0, padded] = False
    q, k, v, mask, bias = layer.attention_arguments(x, attention_mask)
    out = flash_dmattn.attention(q, k, v, mask, bias, is_causal=True, softmax_scale=layer.softmax_scale)
    torch.testing.assert_close(layer.o_proj(out.flatten(2)), layer(x, attention_mask), rtol=1e-10, atol=1e-12)


def test_autocast_keeps_the_score_in_fp32_and_the_backend_is_passed_on():
    layer = DynamicMaskAttention(32, 4, 2, keep_window_size=4, backend="reference")
    with torch.autocast("cpu", dtype=torch.bfloat16), flash_dmattn.config(record=(decisions := [])):
        x = torch.randn(1, 9, 32)
        q, _, _, _, bias = layer.attention_arguments(x)
        out = layer(x)
    assert (q.dtype, bias.dtype, out.dtype) == (torch.bfloat16, torch.float32, torch.bfloat16)
    assert [decision.forward for decision in decisions] == ["reference"]


PACKED_OPTIONS: tuple[dict[str, Any], ...] = (
    *({}, {"keep_window_size": None}, {"local_window_size": 2}, {"keep_window_size": 99}, {"qk_norm": True}),
)
LENGTHS = (7, 0, 17, 1)


def make_tokens(count: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(count, HIDDEN, dtype=dtype, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("options", PACKED_OPTIONS, ids=id_of)
def test_packed_sequences_are_each_alone(options: dict[str, Any]) -> None:
    """Outputs, and every gradient; two tokens of no sequence follow the last one."""
    layer, tokens = make_layer(**options), sum(LENGTHS)
    x = make_tokens(tokens + 2).requires_grad_()
    edges = torch.tensor([0, *LENGTHS]).cumsum(0)
    out = layer(x, sequences=Sequences.packed(edges, max_seqlen_q=20))
    alone = torch.cat([layer(part[None])[0] for part in x[:tokens].split(LENGTHS) if len(part)])
    assert not out[tokens:].any()
    torch.testing.assert_close(out[:tokens], alone, **EXACT)
    leaves, dout = (x, *layer.parameters()), torch.randn_like(alone)
    gradients = torch.autograd.grad(out[:tokens], leaves, dout)
    torch.testing.assert_close(gradients, torch.autograd.grad(alone, leaves, dout), rtol=1e-8, atol=1e-10)


def test_slots_of_packed_sequences_are_used_in_part() -> None:
    layer, x = make_layer(), make_tokens(20)
    x[5:9] = x[17:] = torch.nan
    used = torch.tensor([5, 8])
    out = layer(x, sequences=Sequences.packed(torch.tensor([0, 9, 20]), max_seqlen_q=11, seqlens_q=used))
    for first, count in ((0, 5), (9, 8)):
        torch.testing.assert_close(out[first : first + count], layer(x[None, first : first + count])[0], **EXACT)


@pytest.mark.parametrize("options", PACKED_OPTIONS, ids=id_of)
def test_decoding_from_pages_equals_the_full_forward(options: dict[str, Any]) -> None:
    """The example of a server: a pool of NaN beforehand, and a draft that is rejected and written over."""
    layer = make_layer(**options).requires_grad_(False).to(DEVICE)
    cache = load("paged_decoding").PagedCache(layer, pages=14, page_size=4)
    for pool in (cache.k, cache.v, cache.scores):
        pool.fill_(torch.nan)
    table = torch.randperm(14, generator=torch.Generator().manual_seed(0))[:12].view(2, 6).to(DEVICE)
    texts = make_tokens(2 * 17).view(2, 17, HIDDEN).to(DEVICE)

    def step(x: Tensor, *lengths: int) -> Tensor:
        return cache.attend(layer, x, table[: len(x)], torch.tensor(lengths, device=DEVICE))

    step(texts[:1, :9], 9)
    step(texts[:, :4], 4, 4)
    step(10 * texts[:, 4:10], 10, 10)
    out = torch.cat([step(texts[:, n : n + new], n + new, n + new) for n, new in ((4, 1), (5, 6), (11, 6))], dim=1)
    torch.testing.assert_close(out, layer(texts)[:, 4:], **EXACT)


def test_no_sequences_and_no_tokens() -> None:
    layer = make_layer()
    none = Sequences.packed(torch.tensor([0]), max_seqlen_q=9)
    assert layer(make_tokens(0), sequences=none).shape == (0, HIDDEN)
    assert not layer(make_tokens(3), sequences=none).any()
    assert layer(make_tokens(0), sequences=Sequences.packed(torch.tensor([0, 0, 0]), max_seqlen_q=9)).shape == (
        0,
        HIDDEN,
    )


ROWS = torch.zeros(8, HIDDEN, dtype=torch.float64)
PACKED = Sequences.packed(torch.tensor([0, 3, 8]), max_seqlen_q=8)


def layer_call(x: Tensor, **arguments: Any) -> Callable[[], Any]:
    return lambda: make_layer().requires_grad_(False)(x, **arguments)


NEW = torch.zeros(2, 3, HEADS_K, HEAD_DIM)  # keys or values for a cache


def call_arguments(scores: Tensor | None, padding: Tensor | None = None, **options: Any) -> Any:
    return make_layer(**options).attention_call(NEW, NEW, NEW, scores, padding)


def cached_call(x: Tensor | None = None, **options: Any) -> Any:
    """Append x to the cache of a layer with other options, in which a text lies."""
    cache = KVCache()
    make_layer().requires_grad_(False)(make_x(), cache=cache)
    return make_layer(**options).requires_grad_(False)(make_x() if x is None else x, cache=cache)


BAD: dict[type[Exception], list[tuple[str, Callable[[], Any]]]] = {
    TypeError: [
        ("sequences is a list; it needs to be a flash_dmattn.Seq", layer_call(ROWS, sequences=[0, 8])),
        ("hidden_size is None", lambda: DynamicMaskAttention(None, 4)),
        ("num_heads is None", lambda: DynamicMaskAttention(24, None)),
        ("num_heads is 4.0", lambda: DynamicMaskAttention(24, 4.0)),
        ("num_heads_k is 2.0", lambda: DynamicMaskAttention(24, 4, 2.0)),
        ("head_dim is True", lambda: DynamicMaskAttention(24, 4, 2, True)),
        ("keep_window_size is 2.5 (float); it needs to be an int", lambda: make_layer(keep_window_size=2.5)),
        ("rope_theta is a NoneType; it needs to be a number", lambda: make_layer(rope_theta=None)),
        ("softmax_scale is a str; it needs to be a number", lambda: make_layer(softmax_scale="1")),
        ("qk_norm is None; it needs to be True or False", lambda: make_layer(qk_norm=None)),
        ("projection_bias is 'no'; it needs to be True or False", lambda: make_layer(projection_bias="no")),
        ("x is a list; it needs to be a torch.Tensor", layer_call([1.0])),
        ("x is a NoneType; it needs to be a torch.Tensor", layer_call(None, sequences=PACKED)),
        ("x has layout torch.sparse_coo; it needs a strided tensor", layer_call(make_x().to_sparse())),
        ("attention_mask is a list; it needs to be a bool or", layer_call(make_x(), attention_mask=[[1]])),
        ("attention_mask has dtype float32; it needs", layer_call(make_x(), attention_mask=torch.zeros(2, LENGTH))),
        ("cache is a list; it needs to be a KVCache", layer_call(make_x(), cache=[])),
        ("k is a NoneType; it needs to be a floating-point torch.Tensor", lambda: KVCache().append(None, NEW, None)),
        ("v is a NoneType; it needs to be a floating-point torch.Tensor", lambda: KVCache().append(NEW, None, None)),
        ("k has dtype int64; it needs a floating-point dtype", lambda: KVCache().append(NEW.long(), NEW, None)),
        ("length is True (bool); it needs to be an int", lambda: KVCache().truncate(True)),
    ],
    RuntimeError: [
        (
            "would lose the gradient of k, v or scores; decode under torch.no_grad()",
            lambda: make_layer()(make_x(), cache=KVCache()),
        )
    ],
    ValueError: [
        ("num_heads is 4; it needs to be a multiple of num_heads_k, 3", lambda: DynamicMaskAttention(24, 4, 3)),
        ("hidden_size is 0; it needs to be >= 1", lambda: DynamicMaskAttention(0, 4, head_dim=2)),
        ("num_heads is 0; it needs to be >= 1", lambda: DynamicMaskAttention(24, 0)),
        ("rope_theta is 0; it needs to be above 0", lambda: make_layer(rope_theta=0)),
        ("v has shape (2, 1, 2, 6); with k of shape (2, 3, 2, 6)", lambda: KVCache().append(NEW, NEW[:, :1], None)),
        ("v has shape (1, 3, 2, 6); with k of shape (2, 3, 2, 6)", lambda: KVCache().append(NEW, NEW[:1], None)),
        ("scores has shape (2, 1, 2); with k", lambda: KVCache().append(NEW, NEW, NEW[:, :1, :, 0])),
        ("k has shape (3, 2, 6); with k of shape", lambda: KVCache().append(NEW[0], NEW[0], None)),
        ("scores is None; a layer whose keep_window_size is 5 needs", lambda: call_arguments(None)),
        (
            "scores is a tensor; a layer whose keep_window_size is None needs None",
            lambda: call_arguments(NEW[..., 0], keep_window_size=None),
        ),
        (
            "padding has shape (2, 3); it needs to be (2 or 1, 1, 1, 3)",
            lambda: call_arguments(NEW[..., 0], NEW[..., 0, 0]),
        ),
        ("hidden_size is 33 and num_heads 4; their quotient, the head_dim", lambda: DynamicMaskAttention(33, 4)),
        ("hidden_size is 28 and num_heads 4; their quotient, the head_dim", lambda: DynamicMaskAttention(28, 4)),
        ("head_dim is 5; rotary positions need an even number", lambda: DynamicMaskAttention(24, 4, 2, 5)),
        ("keep_window_size is 0; it needs to be at least 1 key, or None", lambda: make_layer(keep_window_size=0)),
        ("local_window_size is -1; it needs to be >= 0", lambda: make_layer(local_window_size=-1)),
        ("x has shape (2, 17, 23); it needs to be (batch, length, 24)", layer_call(make_x()[..., 1:])),
        ("attention_mask has shape (2, 16); it needs to be", layer_call(make_x(), attention_mask=torch.ones(2, 16))),
        ("head_dim is 3", lambda: rotary_angles(torch.arange(2), 3)),
        ("k has shape (1, 17, 2, 6); the cache holds (2, 17, 2, 6)", lambda: cached_call(make_x()[:1])),
        ("scores is None; this cache was filled with a tensor: use", lambda: cached_call(keep_window_size=None)),
        ("length is 1; it needs to be 0 to 0", lambda: KVCache().truncate(1)),
        ("max_length is 0", lambda: KVCache(0)),
        (
            "attention_mask is a tensor; with sequences it needs to be None",
            layer_call(ROWS, attention_mask=torch.ones(1, 8), sequences=PACKED),
        ),
        (
            "sequences are padded; they need to be packed (pass attention_mask for padding;",
            layer_call(ROWS, sequences=Sequences.padded(seqlens_k=torch.tensor([1, 1]))),
        ),
        (
            "sequences are paged; they need to be packed (pass attention_mask for padding; examples/paged_decoding.py",
            layer_call(ROWS, sequences=Sequences.paged(torch.tensor([[0, 1]]), torch.tensor([5]))),
        ),
        (
            "cache is a KVCache; with packed sequences it needs to be None",
            layer_call(ROWS, cache=KVCache(), sequences=PACKED),
        ),
        (
            "x has shape (1, 8, 24); with these sequences it needs to be (tokens, 24)",
            layer_call(ROWS[None], sequences=PACKED),
        ),
        (
            "cu_seqlens_k differ from cu_seqlens_q; in self-attention they need to be the same",
            layer_call(ROWS, sequences=Sequences.packed(torch.tensor([0, 3]), torch.tensor([0, 4]), max_seqlen_k=4)),
        ),
        ("cu_seqlens_q ends with 8; x has 7 tokens", layer_call(ROWS[:7], sequences=PACKED)),
        (
            "sequences name no max_seqlen_k; a layer that keeps 5 keys needs it (Sequences.packed(..., max_seqlen",
            layer_call(ROWS, sequences=Sequences.packed(torch.tensor([0, 8]))),
        ),
    ],
}


@pytest.mark.parametrize("kind, message, call", [(kind, *row) for kind, rows in BAD.items() for row in rows])
def test_bad_input_is_refused_by_name(kind: type[Exception], message: str, call: Callable[[], Any]) -> None:
    with pytest.raises(kind, match=re.escape(message)):
        call()
