"""The validation shared by all backends: what is refused, with which exception and words, and what is not."""

from __future__ import annotations

import inspect
import math
import re
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from conftest import refusal_of
from out_of_tree import replace_backend
from torch import Tensor

import flash_dmattn
from flash_dmattn.dispatch.registry import BACKENDS
from flash_dmattn.problem.checks import OTHER_NAMES

B, LQ, LK, HQ, HK, D, DV = 2, 3, 5, 4, 2, 8, 6


def tensors(**changes: Any) -> dict[str, Any]:
    arguments = {"q": torch.randn(B, LQ, HQ, D), "k": torch.randn(B, LK, HK, D), "v": torch.randn(B, LK, HK, DV)}
    return {**arguments, **changes}


def true(*shape: int) -> Tensor:
    return torch.ones(shape, dtype=torch.bool)


INVALID: dict[str, tuple[dict[str, Any], type[Exception], tuple[str, ...]]] = {
    # what changes in a valid call: exception, words of the message
    "q no tensor": ({"q": [1.0]}, TypeError, ("q is a list", "torch.Tensor")),
    "k None": ({"k": None}, TypeError, ("k is a NoneType", "torch.Tensor")),
    "v no tensor": ({"v": 3}, TypeError, ("v is a int", "torch.Tensor")),
    "mask no tensor": ({"mask": [[True]]}, TypeError, ("mask is a list", "bool torch.Tensor")),
    "bias no tensor": ({"bias": 0.5}, TypeError, ("bias is a float", "floating-point torch.Tensor")),
    "bias a module": (
        {"bias": flash_dmattn.nn.RelativePositionBias(HQ)},
        TypeError,
        ("bias is a RelativePositionBias", "floating-point torch.Tensor; pass what it returns"),
    ),
    "heads first and a bias": (
        {**{name: torch.randn(B, HQ, 6, D) for name in "qkv"}, "bias": torch.randn(HQ, 6, 6)},
        ValueError,
        ("bias has shape (1, 4, 6, 6)", "heads in {1, 6}", "it fits if heads come first", "pass q.transpose(-2, -3)"),
    ),
    "heads last in a bias": (
        {"bias": torch.randn(B, LQ, LK, HQ)},
        ValueError,
        ("bias has shape (2, 3, 5, 4)", "it fits with its heads before its positions: bias.movedim(-1, -3)"),
    ),
    "a bias without the dim of rows": (
        {**dict.fromkeys("qkv", torch.randn(B, 3, LK, HQ, D)), "bias": torch.randn(B, HQ, LK, LK)},
        ValueError,
        ("bias has shape (1, 2, 4, 5, 5)", "it fits with a batch dim of 1 before its heads: bias.unsqueeze(-4)"),
    ),
    "heads first and other lengths": (
        {"q": torch.randn(B, HQ, 6, D), "k": torch.randn(B, HK, 7, D), "v": torch.randn(B, HK, 7, D)},
        ValueError,
        ("q has 6 heads and k has 7", "multiple of the heads of k", "if heads come first", "pass q.transpose(1, 2)"),
    ),
    "q 3-D": (
        {"q": torch.randn(LQ, HQ, D)},
        ValueError,
        ("q has 3 dimensions", "(3, 4, 8)", "needs 4", "; packed rows need sequences=Sequences.packed(cu_seqlens)"),
    ),
    "k 5-D": ({"k": torch.randn(1, B, LK, HK, D)}, ValueError, ("k has 5 dimensions", "needs 4")),
    "v 2-D": ({"v": torch.randn(LK, DV)}, ValueError, ("v has 2 dimensions", "needs 4")),
    "q int": ({"q": torch.ones(B, LQ, HQ, D, dtype=torch.int64)}, TypeError, ("q has dtype int64", "float16")),
    "q complex": ({"q": torch.ones(B, LQ, HQ, D, dtype=torch.complex64)}, TypeError, ("q has dtype complex64",)),
    "k dtype": ({"k": torch.randn(B, LK, HK, D).half()}, TypeError, ("k has dtype float16", "that of q, float32")),
    "v dtype": ({"v": torch.randn(B, LK, HK, DV).double()}, TypeError, ("v has dtype float64", "that of q, float32")),
    "k device": ({"k": torch.randn(B, LK, HK, D, device="meta")}, ValueError, ("k is on meta", "of q, cpu")),
    "v device": ({"v": torch.randn(B, LK, HK, DV, device="meta")}, ValueError, ("v is on meta", "of q, cpu")),
    "k batch": ({"k": torch.randn(1, LK, HK, D)}, ValueError, ("k has batch size 1", "that of q, 2")),
    "v batch": ({"v": torch.randn(3, LK, HK, DV)}, ValueError, ("v has batch size 3", "that of q, 2")),
    "v length": ({"v": torch.randn(B, LK + 1, HK, DV)}, ValueError, ("v has 6 keys and 2 heads", "of k, 5 and 2")),
    "v heads": ({"v": torch.randn(B, LK, 1, DV)}, ValueError, ("v has 5 keys and 1 heads", "those of k, 5 and 2")),
    "head dims": ({"q": torch.randn(B, LQ, HQ, D + 8)}, ValueError, ("k has head_dim 8", "that of q, 16")),
    "head dim 0": (
        {"q": torch.randn(B, LQ, HQ, 0), "k": torch.randn(B, LK, HK, 0)},
        ValueError,
        ("head dims 0", "at least 1"),
    ),
    "undividable heads": ({"q": torch.randn(B, LQ, 3, D)}, ValueError, ("q has 3 heads and k has 2", "multiple")),
    "no kv heads": (
        {"k": torch.randn(B, LK, 0, D), "v": torch.randn(B, LK, 0, DV)},
        ValueError,
        ("q has 4 heads and k has 0", "they need at least 1"),
    ),
    "mask float": ({"mask": torch.ones(LQ, LK)}, TypeError, ("mask has dtype float32", "needs bool", "bias")),
    "mask uint8": ({"mask": torch.ones(LQ, LK, dtype=torch.uint8)}, TypeError, ("mask has dtype uint8", "needs bool")),
    "mask grad": (
        {"mask": torch.ones(LQ, LK, requires_grad=True)},
        TypeError,
        ("mask requires grad", "never takes a gradient", "bias"),
    ),
    "bias bool": ({"bias": true(LQ, LK)}, TypeError, ("bias has dtype bool", "float16", "as mask")),
    "bias int": ({"bias": torch.ones(LQ, LK, dtype=torch.int32)}, TypeError, ("bias has dtype int32", "float16")),
    "mask device": ({"mask": true(LQ, LK).to("meta")}, ValueError, ("mask is on meta", "of q, cpu")),
    "bias device": ({"bias": torch.randn(LQ, LK, device="meta")}, ValueError, ("bias is on meta", "of q, cpu")),
    "mask 1-D": ({"mask": true(LK)}, ValueError, ("mask has 1 dimensions", "(5,)", "needs 2, 3 or 4")),
    "mask 5-D": ({"mask": true(1, B, HQ, LQ, LK)}, ValueError, ("mask has 5 dimensions", "needs 2, 3 or 4")),
    "bias 0-D": ({"bias": torch.tensor(1.0)}, ValueError, ("bias has 0 dimensions", "needs 2, 3 or 4")),
    "mask batch": ({"mask": true(3, 1, 1, LK)}, ValueError, ("mask has shape (3, 1, 1, 5)", "batch in {1, 2}")),
    "mask heads": ({"mask": true(1, 3, 1, LK)}, ValueError, ("mask has shape (1, 3, 1, 5)", "heads in {1, 2, 4}")),
    # 4 divides the heads of q, but neither q nor k has 4 heads
    "mask heads, a divisor": (
        {"q": torch.randn(B, LQ, 8, D), "mask": true(1, 4, 1, LK)},
        ValueError,
        ("mask has shape (1, 4, 1, 5)", "heads in {1, 2, 8}"),
    ),
    "bias heads, a divisor": (
        {"q": torch.randn(B, LQ, 12, D), "bias": torch.randn(1, 6, LQ, 1)},
        ValueError,
        ("bias has shape (1, 6, 3, 1)", "heads in {1, 2, 12}"),
    ),
    "mask queries": ({"mask": true(LQ + 1, LK)}, ValueError, ("mask has shape (1, 1, 4, 5)", "seqlen_q in {1, 3}")),
    "mask keys": ({"mask": true(1, LQ, LK - 1)}, ValueError, ("mask has shape (1, 1, 3, 4)", "seqlen_k in {1, 5}")),
    "bias batch": ({"bias": torch.randn(4, 1, 1, 1)}, ValueError, ("bias has shape (4, 1, 1, 1)", "batch in {1, 2}")),
    "bias heads": ({"bias": torch.randn(8, LQ, LK)}, ValueError, ("bias has shape (1, 8, 3, 5)", "heads in {1, 2, 4}")),
    "bias queries": ({"bias": torch.randn(LK, LK)}, ValueError, ("bias has shape (1, 1, 5, 5)", "seqlen_q in {1, 3}")),
    "bias keys": ({"bias": torch.randn(LQ, 0)}, ValueError, ("bias has shape (1, 1, 3, 0)", "seqlen_k in {1, 5}")),
    "softcap negative": ({"softcap": -1.0}, ValueError, ("softcap is -1.0", "at least 0")),
    "softcap infinite": ({"softcap": math.inf}, ValueError, ("softcap is inf", "finite")),
    "softcap nan": ({"softcap": math.nan}, ValueError, ("softcap is nan", "finite")),
    "softcap str": ({"softcap": "30"}, TypeError, ("softcap is a str", "number")),
    "softcap None": ({"softcap": None}, TypeError, ("softcap is a NoneType", "0.0 for none")),
    "softcap beyond float32": ({"softcap": 1e39}, ValueError, ("softcap is 1e+39", "finite in float32")),
    "softcap too small": ({"softcap": 1e-39}, ValueError, ("softcap is 1e-39", "larger", "divided by it in float32")),
    "softcap too small for the scale": (
        {"softcap": 1e-30, "softmax_scale": 1e10},
        ValueError,
        ("softcap is 1e-30 with softmax_scale 10000000000.0", "larger"),
    ),
    "scale beyond float32": ({"softmax_scale": -1e39}, ValueError, ("softmax_scale is -1e+39", "finite in float32")),
    "scale infinite": ({"softmax_scale": -math.inf}, ValueError, ("softmax_scale is -inf", "finite")),
    "scale nan": ({"softmax_scale": math.nan}, ValueError, ("softmax_scale is nan", "finite")),
    "scale str": ({"softmax_scale": "1"}, TypeError, ("softmax_scale is a str", "number or None")),
    "scale tensor": ({"softmax_scale": torch.tensor(1.0)}, TypeError, ("softmax_scale is a Tensor", "number or None")),
    "window int": ({"window_size": 3}, TypeError, ("window_size is 3", "pair (left, right)")),
    "window three": ({"window_size": (1, 2, 3)}, TypeError, ("window_size is (1, 2, 3)", "pair (left, right)")),
    "window float": ({"window_size": (1.0, 2)}, TypeError, ("window_size is (1.0, 2)", "ints")),
    "window bool": ({"window_size": (True, 2)}, TypeError, ("window_size is (True, 2)", "ints")),
    "window None side": ({"window_size": (None, 2)}, TypeError, ("window_size is (None, 2)", "ints")),
    "window below -1": ({"window_size": (4, -2)}, ValueError, ("window_size is (4, -2)", "at least -1")),
    "is_causal int": ({"is_causal": 1}, TypeError, ("is_causal is 1", "True or False")),
    "is_causal None": ({"is_causal": None}, TypeError, ("is_causal is None", "True or False")),
    "deterministic str": ({"deterministic": "yes"}, TypeError, ("deterministic is 'yes'", "True or False")),
    "return_lse int": ({"return_lse": 0}, TypeError, ("return_lse is 0", "True or False")),
    "return_probs tensor": (
        {"return_probs": torch.tensor(True)},
        TypeError,
        ("return_probs is tensor(True)", "True or False"),
    ),
    "backend unknown": ({"backend": "cudnn"}, ValueError, ("backend 'cudnn' is unknown", "'cuda'", "'eager'")),
    "backend None": ({"backend": None}, TypeError, ("backend is None", "pair (forward, backward)")),
    "backend list": ({"backend": ["eager", "eager"]}, TypeError, ("backend is ['eager', 'eager']", "pair")),
    "backend three": ({"backend": ("eager",) * 3}, TypeError, ("backend is ('eager', 'eager', 'eager')", "pair")),
    "pair unknown": ({"backend": ("eager", "nope")}, ValueError, ("backend 'nope' is unknown", "'triton'")),
    "no heads": (
        {name: torch.randn(B, n, 0, D) for name, n in (("q", LQ), ("k", LK), ("v", LK))},
        ValueError,
        ("q has 0 heads and k has 0; they need at least 1",),
    ),
    "another case": ({"backend": "SDPA"}, ValueError, ("backend 'SDPA' is unknown", "did you mean 'sdpa'?")),
    "pair auto": ({"backend": ("auto", "eager")}, ValueError, ("backend is ('auto', 'eager')", "a pair names")),
    "pair of one function": (
        {"backend": ("eager", "reference")},
        ValueError,
        ("backend is ('eager', 'reference')", "'reference' is one differentiable function", "two of", "'eager'"),
    ),
}


@pytest.fixture
def masked() -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch's: a prototype
        x = torch.randn(B, LQ, HQ, D)
        return torch.masked.masked_tensor(x, torch.ones_like(x, dtype=torch.bool))


@pytest.mark.parametrize("call", [flash_dmattn.attention, flash_dmattn.explain], ids=["attention", "explain"])
@pytest.mark.parametrize("name", ["q", "k", "v", "mask", "bias", "sink"])
@pytest.mark.parametrize("leading", [(), (1,)])
def test_tensors_without_strides_are_named(name: str, leading: tuple[int, ...], call: Any) -> None:
    dense = tensors(mask=true(LQ, LK), bias=torch.randn(LQ, LK), sink=torch.randn(HQ))
    if leading:
        dense |= {x: dense[x][None] for x in "qkv"}
    call(**dense)
    for layout, sparse in (("torch.sparse_coo", dense[name].to_sparse()), ("torch._mkldnn", None)):
        if sparse is None:
            if not torch.backends.mkldnn.is_available() or not dense[name].is_floating_point():
                continue
            sparse = dense[name].to_mkldnn()
        words = f"{name} has layout {layout}; it needs a strided tensor: {name}.to_dense()"
        with pytest.raises(TypeError, match=f"^{re.escape(words)}$"):
            call(**dense | {name: sparse})


@pytest.mark.parametrize("call", [flash_dmattn.attention, flash_dmattn.explain], ids=["attention", "explain"])
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_tensors_with_a_mask_of_their_own_are_named(name: str, call: Any, masked: Tensor) -> None:
    x = masked.get_data()
    with pytest.raises(TypeError, match=rf"^{name} is a MaskedTensor, .*{name}\.get_data\(\), with mask="):
        call(**dict.fromkeys("qkv", x) | {name: masked})


def test_tensors_without_strides_beside_sequences_and_for_a_prepared_mask() -> None:
    q = torch.randn(6, HQ, D)
    sequences = flash_dmattn.Sequences.packed(torch.tensor([0, 2, 6]))
    with pytest.raises(TypeError, match=r"^k has layout torch\.sparse_coo"):
        flash_dmattn.attention(q, q.to_sparse(), q, sequences=sequences)
    with pytest.raises(TypeError, match=r"^mask has layout torch\.sparse_coo"):
        flash_dmattn.masks.PreparedMask.from_mask(true(LQ, LK).to_sparse())


WRONG_NAMES = {
    "causal": "write is_causal=",
    "scale": "write softmax_scale=",
    "attn_bias": "write bias=",
    "attn_mask": "write mask= where it is bool, bias= where it is added to scores",
    "key_padding_mask": r"write mask=masks.padding_mask\(...\)",
    "need_weights": 'write return_probs= with backend="reference"',
    "cu_seqlens_q": r"write sequences=Sequences.packed\(...\)",
    "block_mask": r"write mask=PreparedMask.from_mask_mod\(...\)",
    "training": r"write dropout_p=0\.0 where it is False",
    "is_casual": r"did you mean is_causal\?",
    "softmax_scales": r"did you mean softmax_scale\?",
    "xyz": "it takes q, k, v, mask, bias, is_causal, .*, return_aux(, device)?",
}


@pytest.mark.parametrize("call", [flash_dmattn.attention, flash_dmattn.explain], ids=["attention", "explain"])
@pytest.mark.parametrize("name", WRONG_NAMES)
def test_a_keyword_of_another_library_is_answered_with_ours(name: str, call: Any) -> None:
    words = rf"^{call.__name__}\(\) got an unexpected keyword argument '{name}'; {WRONG_NAMES[name]}$"
    with pytest.raises(TypeError, match=words):
        call(**tensors(), **{name: None})


def test_what_to_write_is_something_that_attention_takes() -> None:
    known = inspect.signature(flash_dmattn.attention).parameters
    for name, hint in OTHER_NAMES.items():
        assert name not in known
        assert name == "enable_gqa" or all(word in known for word in re.findall(r"\b(\w+)=", hint)), hint


@pytest.mark.parametrize("leading", [(), (1,)])
def test_a_padding_mask_of_two_dims_is_told_what_it_is(leading: tuple[int, ...]) -> None:
    inputs = {name: x[(None,) * len(leading)] for name, x in tensors().items()}
    advice = r"; padding of \(\*batch, seqlen_k\) is mask\[..., None, None, :\]$"
    if not leading:
        advice = r"; padding of \(batch, seqlen_k\) is masks.padding_mask\(mask\)$"
    with pytest.raises(ValueError, match=advice):
        flash_dmattn.attention(**inputs, mask=true(B, LK))
    with pytest.raises(ValueError, match=advice):
        flash_dmattn.attention(**inputs, mask=true(*leading, B, LK))
    flash_dmattn.attention(**inputs, mask=true(*leading, B, LK)[..., None, None, :])
    with pytest.raises(ValueError, match=r"and seqlen_k in \{1, 5\}$"):
        flash_dmattn.attention(**inputs, mask=true(B + 2, LK))
    with pytest.raises(ValueError, match=r"; padding of \(\*batch, seqlen_k\) is bias\[..., None, None, :\]$"):
        flash_dmattn.attention(**inputs, bias=torch.randn(B, LK))
    flash_dmattn.attention(**inputs, bias=torch.randn(*leading, B, LK)[..., None, None, :])
    words = r"mask has dtype int64.*mask == 0 of 0 and -inf, masks.padding_mask\(mask\) of padding"
    with pytest.raises(TypeError, match=words):
        flash_dmattn.attention(**tensors(mask=true(B, LK).long()))
    flash_dmattn.attention(**inputs, mask=flash_dmattn.masks.padding_mask(true(B, LK)))


def test_explain_says_how_a_mask_is_read_that_could_be_padding() -> None:
    x = torch.randn(3, 3, HQ, D)
    note = (
        "reads mask of shape (3, 3) as (seqlen_q, seqlen_k); padding of (batch, seqlen_k) is masks.padding_mask(mask)"
    )
    assert note in str(flash_dmattn.explain(x, x, x, true(3, 3))).splitlines()
    for mask in (true(1, 3), true(3, 1, 1, 3), true(1, 3, 3), None):
        assert "padding_mask" not in str(flash_dmattn.explain(x, x, x, mask))
    assert "padding_mask" not in str(flash_dmattn.explain(x[:2], x[:2], x[:2], true(3, 3)))


@pytest.mark.parametrize("call", [flash_dmattn.attention, flash_dmattn.explain], ids=["attention", "explain"])
@pytest.mark.parametrize("name", INVALID)
def test_invalid_call_names_argument_found_and_needed(name: str, call: Any) -> None:
    changes, kind, words = INVALID[name]
    valid = tensors()
    error = refusal_of(lambda: call(**{**valid, **changes}), lambda: flash_dmattn.attention(**valid))
    assert type(error) is kind, repr(error)
    missing = [word for word in words if word not in str(error)]
    assert not missing, f"{missing} not in: {error}"
    assert "\n" not in str(error)


@pytest.mark.parametrize("name", ["q no tensor", "k None", "v no tensor", "k dtype", "q int", "q 3-D"])
def test_invalid_call_is_the_same_error_under_autocast(name: str) -> None:
    changes, kind, words = INVALID[name]
    if name == "k dtype":  # autocast makes fp16 and fp32 one dtype; fp64 it leaves alone
        changes, words = {"k": torch.randn(B, LK, HK, D).double()}, ("k has dtype float64", "that of q, bfloat16")
    with torch.autocast("cpu", torch.bfloat16), pytest.raises((TypeError, ValueError)) as caught:
        flash_dmattn.attention(**tensors(**changes))
    assert type(caught.value) is kind, repr(caught.value)
    assert all(word in str(caught.value) for word in words), caught.value


def test_validation_comes_before_any_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    probed: list[str] = []
    monkeypatch.setattr(BACKENDS, "table", BACKENDS.table)  # for it to be put back
    for name in BACKENDS:
        replace_backend(name, probe=lambda name=name: probed.append(name))
    for name in ("auto", "cuda", "flex", "eager"):
        with pytest.raises(ValueError, match="q has 3 heads and k has 2"):
            flash_dmattn.attention(**tensors(q=torch.randn(B, LQ, 3, D)), backend=name)
    assert probed == []


@pytest.mark.parametrize("backend", ["eager", "reference"])
@pytest.mark.parametrize(
    ("changes", "like"),
    [
        ({"softmax_scale": -1}, {"softmax_scale": -1.0}),
        ({"softcap": 2}, {"softcap": 2.0}),
        ({"window_size": [2, -1]}, {"window_size": (2, -1)}),
        ({"window_size": [-1, -1]}, {}),
        ({"window_size": (LQ + LK, LQ + LK)}, {}),
        ({"window_size": (10**30, 2**63 - 1)}, {}),
        ({"softmax_scale": np.float32(0.5), "softcap": np.int64(2)}, {"softmax_scale": 0.5, "softcap": 2.0}),
        ({"window_size": (np.int64(2), np.int32(-1)), "is_causal": np.bool_(True)}, {"window_size": (2, 0)}),
    ],
    ids=str,
)
def test_numbers_may_be_written_in_other_ways(changes: dict[str, Any], like: dict[str, Any], backend: str) -> None:
    arguments = tensors(bias=torch.randn(HK, LQ, LK))
    one, other = (flash_dmattn.attention(**arguments, **flags, backend=backend) for flags in (changes, like))
    assert torch.equal(one, other)
    pulled = [
        torch.func.grad(lambda q, flags=flags: flash_dmattn.attention(**arguments | {"q": q}, **flags).sum())
        for flags in (changes, like)
    ]  # transforms see operators, whose numbers have 64 bits
    assert torch.equal(*(pull(arguments["q"]) for pull in pulled))


def test_ints_of_numpy_are_sizes() -> None:
    five = np.int64(5)
    assert torch.equal(flash_dmattn.masks.causal_mask(five, five), flash_dmattn.masks.causal_mask(5, 5))
    sequences = flash_dmattn.Sequences.packed(torch.tensor([0, 2, 7]), max_seqlen_q=five)
    assert type(sequences.max_seqlen_q) is type(sequences.max_seqlen_k) is int
    x = torch.randn(7, 2, 8)
    assert flash_dmattn.attention(x, x, x, bias=torch.zeros(1, 1, 5, 5), sequences=sequences).shape == x.shape
    values = torch.randn(2, 9)
    shared = {"bias": flash_dmattn.biases.Relative(values, np.int64(4), "clamp")}
    as_int = {"bias": flash_dmattn.biases.Relative(values, 4, "clamp")}
    assert torch.equal(*(flash_dmattn.attention(x[None], x[None], x[None], **kind) for kind in (shared, as_int)))
    with pytest.raises(TypeError, match=r"is_causal is .*; it needs to be True or False"):
        flash_dmattn.attention(x[None], x[None], x[None], is_causal=np.int64(1))
