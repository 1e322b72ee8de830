"""Dropout of the probabilities: which are dropped, the same in every backend and pass, and all that follows from it."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from cases import ALL, DEVICE, Case
from conftest import Runner
from dropout_masks import SIZES, dropped_case, drops_as_the_whole, kept_in
from torch import Tensor
from torch.func import grad, vmap

import flash_dmattn
from flash_dmattn.explanation import explain_problem
from flash_dmattn.reference import dropout as reference
from flash_dmattn.reference.dropout import Dropout, draw_key, philox

BASE = Case(seqlen_q=37, seqlen_k=45, dropout_p=0.3, dlse=True)
FULL, SHARED, PER_KEY = ("B", "Hq", "Lq", "Lk"), ("1", "Hq", "Lq", "Lk"), ("1", "Hk", "1", "Lk")
CASES = {
    "plain": BASE,
    "bias per score": BASE.with_(bias=FULL, mask=("B", "1", "Lq", "Lk"), mask_kind="empty_rows"),
    "bias that entries share": BASE.with_(bias=SHARED, is_causal=True),
    "no key is allowed": BASE.with_(mask=("1", "1", "Lq", "Lk"), mask_kind="none_allowed", bias=PER_KEY),
    "sink and empty rows": BASE.with_(
        sink="inf", mask=("B", "1", "Lq", "Lk"), mask_kind="empty_rows", needs_grad=(*ALL, "sink")
    ),
    "many keys": BASE.with_(seqlen_q=70, seqlen_k=300, bias=SHARED),
    "one query": BASE.with_(seqlen_q=1, seqlen_k=600, num_heads=6),
    "nearly all is dropped": BASE.with_(dropout_p=0.98, bias=FULL),
    "nearly nothing is dropped": BASE.with_(dropout_p=1e-10, bias=FULL),
    "all is dropped": BASE.with_(dropout_p=1.0, bias=FULL),
    "no keys": BASE.with_(seqlen_k=0),
    "no queries": BASE.with_(seqlen_q=0),
    "no batch": BASE.with_(batch=0),
    "the gradient of v alone": BASE.with_(needs_grad=("v",)),
    "the gradient of the bias alone": BASE.with_(needs_grad=("bias",), bias=SHARED, dlse=False),
}


@pytest.mark.parametrize("name", CASES)
def test_dropout_beside_everything_else(backend: Runner, name: str) -> None:
    backend.check(CASES[name])


# Random123's own vectors, tests/kat_vectors of its sources.
KNOWN = (
    ((0,) * 4, (0,) * 2, (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)),
    ((2**32 - 1,) * 4, (2**32 - 1,) * 2, (0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0x4DFCCABA, 0x190A87F0, 0xC47362BA, 0xB6B5242A),
    ),
)


@pytest.mark.parametrize("counters, key, words", KNOWN)
def test_known_answers_of_philox(counters: tuple[int, ...], key: tuple[int, ...], words: tuple[int, ...]) -> None:
    actual = philox(tuple(map(torch.tensor, counters)), tuple(map(torch.tensor, key)))  # type: ignore[arg-type]
    assert tuple(x.item() for x in actual) == words == philox_of_integers(counters, key)


def philox_of_integers(counters: tuple[int, ...], key: tuple[int, ...]) -> tuple[int, ...]:
    """The same with Python's integers, of any length."""
    (a, b, c, d), (k, m), word = counters, key, 2**32
    for _ in range(7):
        x, y = a * 0xD2511F53, c * 0xCD9E8D57
        a, b, c, d = y // word ^ b ^ k, y % word, x // word ^ d ^ m, x % word
        k, m = (k + 0x9E3779B9) % word, (m + 0xBB67AE85) % word
    return a, b, c, d


@pytest.mark.parametrize("p", (0.3, 0.5, 1 - 2**-40))
def test_what_is_kept_follows_from_the_place_of_each(p: float) -> None:
    """Bit for bit as integers have it, wherever a part of the call begins, beyond 2^31 elements too."""
    dropout, rng = Dropout(p, torch.tensor([2**32 - 5, 77]), first_entry=3), torch.Generator().manual_seed(0)
    for first in ((0, 0, 0, 0), (2**20, 70_000, 2**31 - 40, 2**31 - 60), (1, 2, 13, 5)):
        sizes = (2, 3, 37, 50)
        kept = dropout.kept(*(slice(a, a + n) for a, n in zip(first, sizes, strict=True)))
        assert kept.shape == sizes and kept.dtype == torch.bool
        for _ in range(100):
            at = tuple(int(torch.randint(n, (), generator=rng)) for n in sizes)
            b, h, i, j = (a + x for a, x in zip(first, at, strict=True))
            words = philox_of_integers((j // 16 * 8 + j % 8, i // 16 * 8 + i % 8, h, b + 3), (2**32 - 5, 77))
            assert kept[at] == (words[i // 8 % 2 * 2 + j // 8 % 2] >= math.floor(p * 2**32)), (b, h, i, j)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_each_pass_drops_what_the_formula_drops(backend: Runner, sizes: tuple[int, int]) -> None:
    """out and dv, whose head dim is the number of keys or of queries."""
    for name, case in (("out", dropped_case(*sizes)), ("dv", dropped_case(*sizes[::-1]))):
        backend.attention(case, case.build())  # or a skip
        assert torch.equal(kept_in(backend.choice(case, case.build()), case, name), case_mask(case))
        if backend.name == "eager":
            assert torch.equal(kept_in("reference", case, name), case_mask(case))


def test_a_part_of_a_call_drops_what_the_whole_call_drops_there(backend: Runner) -> None:
    for name, sizes in (("out", (300, 40)), ("dv", (40, 300))):
        case = dropped_case(*sizes)
        backend.attention(case, case.build())  # or a skip
        assert drops_as_the_whole(backend.choice(case, case.build()), case, name)
        if backend.name == "eager":
            assert drops_as_the_whole("reference", case, name)


def case_mask(case: Case) -> Tensor:
    dropout = case.dropout()
    assert dropout is not None
    sizes = (case.batch, case.num_heads, case.seqlen_q, case.seqlen_k)
    return dropout.kept(*(slice(0, n) for n in sizes))


def test_statistics_of_what_is_kept() -> None:
    """The rate in every head, and that heads, entries, calls and the words of one counter have nothing in common."""
    for p in (0.1, 0.5):
        parts = [Dropout(p, draw_key(torch.device("cpu"))).kept(*map(slice, (0,) * 4, (3, 4, 256, 256))) for _ in "12"]
        kept = torch.stack(parts).flatten(0, 2)
        n = kept[0].numel()
        deviation = math.sqrt(p * (1 - p) / n)
        assert ((kept.double().mean((1, 2)) - (1 - p)).abs() < 5 * deviation).all()
        same = p * p + (1 - p) ** 2
        spread = 5 * math.sqrt(same * (1 - same) / n)
        for x, y in itertools.combinations(kept, 2):
            assert abs((x == y).double().mean() - same) < spread
        for by_row, by_key in ((8, 0), (0, 8), (8, 8), (1, 0), (0, 1), (16, 0), (0, 16), (16, 16), (1, -1)):
            shifted = kept.roll((by_row, by_key), (1, 2))
            assert abs((kept == shifted).double().mean() - same) < spread


def rows(*shape: int, **how: Any) -> Tensor:
    return torch.randn(shape, device=DEVICE, **how)


def call(p: float = 0.3, seed: int | None = None, **changes: Any) -> Tensor:
    made = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(2, n, h, 16, generator=made).to(DEVICE) for n, h in ((33, 4), (40, 2), (40, 2)))
    if seed is not None:
        torch.manual_seed(seed)
    out: Tensor = flash_dmattn.attention(q, k, v, dropout_p=p, **changes)
    return out


def test_the_generator_of_torch_decides() -> None:
    first, second = call(seed=3), call()
    assert torch.equal(first, call(seed=3)) and torch.equal(second, call())
    assert not torch.equal(first, second) and not torch.equal(first, call(seed=4))


def test_no_dropout_draws_nothing() -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    without, zero, integer = call(0.0), call(0), call(0.0, backend="reference")
    assert torch.equal(before, torch.get_rng_state()) and torch.equal(without, zero)
    torch.testing.assert_close(without, integer)
    assert not call(1).any()


@pytest.mark.parametrize("backend", ("eager", "reference"))
def test_a_map_drops_as_its_randomness_says(backend: str) -> None:
    """As `F.dropout` under `torch.vmap`: the same in each, another in each, or an error."""
    one, k = torch.randn(1, 20, 2, 8), torch.randn(1, 30, 2, 8)
    many = one.expand(3, -1, -1, -1, -1).contiguous()

    def loss(q: Tensor) -> Tensor:
        out: Tensor = flash_dmattn.attention(q, k, k, dropout_p=0.5, backend=backend)
        return out.square().sum()

    for function in (lambda q: flash_dmattn.attention(q, k, k, dropout_p=0.5, backend=backend), grad(loss)):
        torch.manual_seed(0)
        same = vmap(function, randomness="same")(many)
        torch.manual_seed(0)
        torch.testing.assert_close(same[0], function(one))
        torch.testing.assert_close(same[1:], same[:1].expand_as(same[1:]))
        different = vmap(function, randomness="different")(many)
        assert not any(torch.equal(x, y) for x, y in itertools.combinations(different, 2))
        with pytest.raises(RuntimeError, match="called random operation while in randomness error mode"):
            vmap(function)(many)


def test_leading_dims_are_entries_in_their_order() -> None:
    q, k = rows(2, 3, 20, 4, 8), rows(2, 3, 25, 2, 8)
    flat = [x.flatten(0, 1) for x in (q, k, k)]
    bias = rows(2, 1, 4, 20, 25)
    torch.manual_seed(0)
    out = flash_dmattn.attention(q, k, k, None, bias, dropout_p=0.3)
    torch.manual_seed(0)
    bias = bias.expand(2, 3, -1, -1, -1).flatten(0, 1)
    torch.testing.assert_close(out.flatten(0, 1), flash_dmattn.attention(*flat, None, bias, dropout_p=0.3))


def test_probabilities_are_shown_without_dropout() -> None:
    q = torch.randn(1, 9, 2, 8)
    flags = {"return_probs": True, "backend": "reference"}
    (_, wanted), (out, probs) = (flash_dmattn.attention(q, q, q, dropout_p=p, **flags) for p in (0.0, 0.5))  # type: ignore[arg-type]
    assert torch.equal(probs, wanted)
    assert not torch.allclose(out, torch.einsum("bhij,bjhd->bihd", probs, q))


def test_lse_is_without_dropout() -> None:
    q = torch.randn(1, 9, 2, 8)
    lse = [flash_dmattn.attention(q, q, q, dropout_p=p, return_lse=True, backend="eager")[1] for p in (0.0, 0.5, 1.0)]
    assert torch.equal(lse[0], lse[1]) and torch.equal(lse[0], lse[2])


WRONG = {
    "negative": (-0.1, ValueError, "dropout_p is -0.1; it needs to be a probability, from 0 to 1"),
    "more than 1": (1.5, ValueError, "dropout_p is 1.5; it needs to be a probability"),
    "NaN": (math.nan, ValueError, "dropout_p is nan; it needs to be a probability"),
    "a tensor": (torch.tensor(0.1), TypeError, "dropout_p is a Tensor; it needs to be a number from 0 to 1"),
    "a flag": (True, TypeError, "dropout_p is a bool; it needs to be a number from 0 to 1"),
    "None": (None, TypeError, "dropout_p is a NoneType; it needs to be a number from 0 to 1"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_no_probability_is_refused(name: str) -> None:
    p, kind, message = WRONG[name]
    for _ in range(2):  # of a call that is looked up, too
        with pytest.raises(kind, match=message):  # type: ignore[arg-type]
            call(p)  # type: ignore[arg-type]


def test_who_serves_dropout() -> None:
    big = {"q": (8, 1024, 12, 64), "is_causal": True, "grad": True}
    with flash_dmattn.config(disabled="cuda"):
        chosen = explain_problem(**big, dropout_p=0.1)  # type: ignore[arg-type]
    assert (chosen.forward, chosen.backward) == ("triton", "triton")
    refused = {verdict.backend: [reason.code for reason in verdict.reasons] for verdict in chosen.verdicts}
    assert "dropout_p" in refused["flex"]
    assert not any("dropout_p" in refused[name] for name in ("cuda", "triton", "eager", "reference"))
    assert "dropout_p 0.1" in str(chosen) and "dropout_p" not in str(explain_problem(**big).problem)  # type: ignore[arg-type]
    with pytest.raises(flash_dmattn.BackendUnsupportedError, match="- dropout_p is set; this backend does not have it"):
        call(backend="flex")
    padding = explain_problem(**big, dropout_p=0.1, mask=(8, 1, 1, 1024))  # type: ignore[arg-type]
    assert not any("in the order of kept keys" in note for x in padding.verdicts for note in x.notes)


def test_threshold_and_scale() -> None:
    """A word equal to the threshold is kept."""
    word = philox_of_integers((0, 0, 0, 0), (1, 2))[0]
    for p, keeps in ((word / 2**32, True), ((word + 1) / 2**32, False)):
        assert Dropout(p, torch.tensor([1, 2])).kept(*(slice(0, 1),) * 4).item() is keeps
    assert reference.threshold_of(0.5) == 2**31 and reference.threshold_of(1e-11) == 0
    assert reference.threshold_of(0.1) == math.floor(0.1 * 2**32)
    assert reference.threshold_of(1.0) == reference.threshold_of(1 - 2**-40) == 2**32 - 1
    assert reference.scale_of(0.75) == 4.0 and reference.scale_of(1.0) == 0.0
