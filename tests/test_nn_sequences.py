"""The dynamic-mask layer on packed sequences and on caches in pages: as each sequence alone, and every refusal."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import DEVICE
from test_nn import HEAD_DIM, HEADS_K, HIDDEN, make_layer
from torch import Tensor

from flash_dmattn import Sequences
from flash_dmattn.nn import DynamicMaskAttention, KVCache, PagedKVCache

OPTIONS: tuple[dict[str, Any], ...] = (
    *({}, {"keep_window_size": None}, {"local_window_size": 2}, {"keep_window_size": 99}, {"qk_norm": True}),
)
LENGTHS = (7, 0, 17, 1)
EXACT = {"rtol": 1e-9, "atol": 1e-11}


def of_options(options: dict[str, Any]) -> str:
    return "-".join(options) or "plain"


def make_tokens(count: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(count, HIDDEN, dtype=dtype, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("options", OPTIONS, ids=of_options)
def test_packed_sequences_are_each_alone(options: dict[str, Any]) -> None:
    """Outputs, and every gradient; behind the last sequence stand two tokens of none."""
    layer, tokens = make_layer(**options), sum(LENGTHS)
    x = make_tokens(tokens + 2).requires_grad_()
    edges = torch.tensor([0, *LENGTHS]).cumsum(0)
    out = layer(x, sequences=Sequences.packed(edges, max_seqlen_q=20))
    alone = torch.cat([layer(part[None])[0] for part in x[:tokens].split(LENGTHS) if len(part)])
    assert not out[tokens:].any()
    torch.testing.assert_close(out[:tokens], alone, **EXACT)
    leaves, dout = (x, *layer.parameters()), torch.randn_like(alone)
    found = torch.autograd.grad(out[:tokens], leaves, dout)
    torch.testing.assert_close(found, torch.autograd.grad(alone, leaves, dout), rtol=1e-8, atol=1e-10)


def test_slots_of_packed_sequences_are_used_in_part() -> None:
    layer, x = make_layer(), make_tokens(20)
    x[5:9] = x[17:] = torch.nan
    used = torch.tensor([5, 8])
    out = layer(x, sequences=Sequences.packed(torch.tensor([0, 9, 20]), max_seqlen_q=11, seqlens_q=used))
    for first, count in ((0, 5), (9, 8)):
        torch.testing.assert_close(out[first : first + count], layer(x[None, first : first + count])[0], **EXACT)


def decode(layer: DynamicMaskAttention, texts: list[Tensor], chunks: list[list[int]], packs: bool) -> list[Tensor]:
    """The outputs of each text, which comes in chunks, as many tokens of each as a list says."""
    has_scores, dtype = layer.keep_window_size is not None, layer.q_proj.weight.dtype
    cache = PagedKVCache(14, 4, HEADS_K, HEAD_DIM, has_scores=has_scores, dtype=dtype, device=DEVICE)
    for pool in (cache.k, cache.v, cache.scores):
        if pool is not None:
            pool.fill_(torch.nan)
    table = torch.randperm(14, generator=torch.Generator().manual_seed(0))[:12].view(2, 6).to(DEVICE)
    lengths, found = [0] * len(texts), [[] for _ in texts]
    for news in chunks:
        x = torch.cat([text[n : n + new] for text, n, new in zip(texts, lengths, news, strict=True)])
        lengths = [n + new for n, new in zip(lengths, news, strict=True)]
        of_keys = torch.tensor(lengths, device=DEVICE)
        if packs:
            edges = torch.tensor([0, *news], device=DEVICE).cumsum(0)
            sequences = Sequences.paged(table, of_keys, cu_seqlens_q=edges, max_seqlen_q=max(news))
        else:
            sequences, x = Sequences.paged(table, of_keys), x.view(len(news), news[0], HIDDEN)
        out = layer(x, cache=cache, sequences=sequences)
        assert out.shape == x.shape
        for each, part in zip(found, out.flatten(0, -2).split(news), strict=True):
            each.append(part)
    return [torch.cat(each) for each in found]


@pytest.mark.parametrize("options", OPTIONS, ids=of_options)
@pytest.mark.parametrize(
    ("chunks", "packs"),
    [([[3, 9], [0, 1], [1, 1], [5, 6]], True), ([[4, 4], [1, 1], [1, 1], [3, 3]], False)],
    ids=("packed", "by slots"),
)
def test_decoding_from_pages_equals_the_full_forward(
    options: dict[str, Any], chunks: list[list[int]], packs: bool
) -> None:
    """A cache of NaN beforehand: what no sequence has written is not read."""
    layer = make_layer(**options).requires_grad_(False).to(DEVICE)
    counts = [sum(news[s] for news in chunks) for s in range(2)]
    texts = list(make_tokens(sum(counts)).to(DEVICE).split(counts))
    for text, out in zip(texts, decode(layer, texts, chunks, packs), strict=True):
        torch.testing.assert_close(out, layer(text[None])[0], **EXACT)


def test_nothing_of_a_rejected_draft_stays() -> None:
    """Keys behind seqlens_k do not exist, and are written anew."""
    layer, x = make_layer().requires_grad_(False), make_tokens(12)[None]
    cache = PagedKVCache(3, 8, HEADS_K, HEAD_DIM, dtype=torch.float64)

    def step(new: Tensor, length: int) -> Tensor:
        return layer(new, cache=cache, sequences=Sequences.paged(torch.tensor([[2, 0]]), torch.tensor([length])))

    step(x[:, :6], 6)
    step(10 * x[:, 6:10], 10)
    torch.testing.assert_close(step(x[:, 6:], 12), layer(x)[:, 6:], **EXACT)


def test_no_sequences_and_no_tokens() -> None:
    layer = make_layer()
    none = Sequences.packed(torch.tensor([0]), max_seqlen_q=9)
    assert layer(make_tokens(0), sequences=none).shape == (0, HIDDEN)
    assert not layer(make_tokens(3), sequences=none).any()
    assert layer(make_tokens(0), sequences=Sequences.packed(torch.tensor([0, 0, 0]), max_seqlen_q=9)).shape == (
        0,
        HIDDEN,
    )


def test_compiled_training_step() -> None:
    layer = make_layer(dtype=torch.float32)
    compiled = torch.compile(
        lambda x, cu: layer(x, sequences=Sequences.packed(cu, max_seqlen_q=12)), backend="aot_eager", fullgraph=True
    )
    x, edges = make_tokens(20, torch.float32).requires_grad_(), torch.tensor([0, 8, 20])
    found, wanted = compiled(x, edges), layer(x, sequences=Sequences.packed(edges, max_seqlen_q=12))
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(*(torch.autograd.grad(y.sum(), x)[0] for y in (found, wanted)))


X, ROWS = torch.zeros(2, 1, HIDDEN, dtype=torch.float64), torch.zeros(8, HIDDEN, dtype=torch.float64)
PACKED = Sequences.packed(torch.tensor([0, 3, 8]), max_seqlen_q=8)
PAGES = Sequences.paged(torch.tensor([[0, 1], [2, 3]]), torch.tensor([5, 3]))


def layer_call(x: Tensor, **given: Any) -> Callable[[], Any]:
    return lambda: make_layer().requires_grad_(False)(x, **given)


def cache(**given: Any) -> PagedKVCache:
    return PagedKVCache(4, 4, HEADS_K, HEAD_DIM, dtype=torch.float64, **given)


BAD: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "no sequences": (
        layer_call(ROWS, sequences=[0, 8]),
        TypeError,
        "sequences is a list; it must be a flash_dmattn.Seq",
    ),
    "padding": (
        layer_call(ROWS, attention_mask=torch.ones(1, 8), sequences=PACKED),
        ValueError,
        "attention_mask is a tensor; beside sequences it must be None",
    ),
    "padded": (
        layer_call(X, sequences=Sequences.padded(torch.tensor([1, 1]))),
        ValueError,
        "sequences are padded; they must be packed or paged (or pass attention_mask",
    ),
    "cache of packed": (
        layer_call(ROWS, cache=KVCache(), sequences=PACKED),
        ValueError,
        "cache is a KVCache; beside packed sequences it must be None",
    ),
    "no pages": (
        layer_call(X, sequences=PAGES),
        ValueError,
        "cache is a NoneType; beside paged sequences it must be a PagedKVCache",
    ),
    "no table": (
        layer_call(X, cache=cache()),
        ValueError,
        "cache is a PagedKVCache and sequences is None; it needs Sequences.paged",
    ),
    "rank": (
        layer_call(ROWS[None], sequences=PACKED),
        ValueError,
        "x has shape (1, 8, 24); beside these sequences it must be (tokens, 24)",
    ),
    "other keys": (
        layer_call(ROWS, sequences=Sequences.packed(torch.tensor([0, 3]), torch.tensor([0, 4]), max_seqlen_k=4)),
        ValueError,
        "cu_seqlens_k differ from cu_seqlens_q; in self-attention they must be the same",
    ),
    "tokens": (
        layer_call(ROWS[:7], sequences=PACKED),
        ValueError,
        "cu_seqlens_q ends with 8; x has 7 tokens",
    ),
    "bound": (
        layer_call(ROWS, sequences=Sequences.packed(torch.tensor([0, 8]))),
        ValueError,
        "sequences name no max_seqlen_k; a layer that keeps 5 keys needs it (Sequences.packed(..., max_seqlen_q=...))",
    ),
    "scores": (
        layer_call(X, cache=cache(has_scores=False), sequences=PAGES),
        ValueError,
        "scores is a tensor; this cache needs None (has_scores is False)",
    ),
    "gradients": (
        lambda: make_layer()(X, cache=cache(), sequences=PAGES),
        ValueError,
        "k requires grad; what is written to a cache has no gradient",
    ),
    "sizes": (lambda: PagedKVCache(4, 0, 2, 8), ValueError, "page_size is 0; it must be at least 1"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused_by_name(name: str) -> None:
    call, kind, message = BAD[name]
    with pytest.raises(kind, match=re.escape(message)):
        call()
