"""The dynamic-mask layer on packed sequences, and the example that decodes from pages: as each sequence alone."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import DEVICE
from test_examples import load
from test_nn import HIDDEN, make_layer
from torch import Tensor

from flash_dmattn import Sequences
from flash_dmattn.nn import KVCache

OPTIONS: tuple[dict[str, Any], ...] = (
    *({}, {"keep_window_size": None}, {"local_window_size": 2}, {"keep_window_size": 99}, {"qk_norm": True}),
)
LENGTHS = (7, 0, 17, 1)
EXACT = {"rtol": 1e-9, "atol": 1e-11}


def id_of(options: dict[str, Any]) -> str:
    return "-".join(options) or "plain"


def make_tokens(count: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(count, HIDDEN, dtype=dtype, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("options", OPTIONS, ids=id_of)
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


@pytest.mark.parametrize("options", OPTIONS, ids=id_of)
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


def test_compiled_training_step() -> None:
    layer = make_layer(dtype=torch.float32)
    compiled = torch.compile(
        lambda x, cu: layer(x, sequences=Sequences.packed(cu, max_seqlen_q=12)), backend="aot_eager", fullgraph=True
    )
    x, edges = make_tokens(20, torch.float32).requires_grad_(), torch.tensor([0, 8, 20])
    out, expected = compiled(x, edges), layer(x, sequences=Sequences.packed(edges, max_seqlen_q=12))
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(*(torch.autograd.grad(y.sum(), x)[0] for y in (out, expected)))


ROWS = torch.zeros(8, HIDDEN, dtype=torch.float64)
PACKED = Sequences.packed(torch.tensor([0, 3, 8]), max_seqlen_q=8)


def layer_call(x: Tensor, **arguments: Any) -> Callable[[], Any]:
    return lambda: make_layer().requires_grad_(False)(x, **arguments)


BAD: dict[type[Exception], list[tuple[str, Callable[[], Any]]]] = {
    TypeError: [
        ("sequences is a list; it must be a flash_dmattn.Seq", layer_call(ROWS, sequences=[0, 8])),
    ],
    ValueError: [
        (
            "attention_mask is a tensor; beside sequences it must be None",
            layer_call(ROWS, attention_mask=torch.ones(1, 8), sequences=PACKED),
        ),
        (
            "sequences are padded; they must be packed (pass attention_mask for padding;",
            layer_call(ROWS, sequences=Sequences.padded(torch.tensor([1, 1]))),
        ),
        (
            "sequences are paged; they must be packed (pass attention_mask for padding; examples/paged_decoding.py",
            layer_call(ROWS, sequences=Sequences.paged(torch.tensor([[0, 1]]), torch.tensor([5]))),
        ),
        (
            "cache is a KVCache; beside packed sequences it must be None",
            layer_call(ROWS, cache=KVCache(), sequences=PACKED),
        ),
        (
            "x has shape (1, 8, 24); beside these sequences it must be (tokens, 24)",
            layer_call(ROWS[None], sequences=PACKED),
        ),
        (
            "cu_seqlens_k differ from cu_seqlens_q; in self-attention they must be the same",
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
