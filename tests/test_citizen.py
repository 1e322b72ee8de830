"""A good citizen of PyTorch: meta tensors, lazy submodules, saved masks, FLOP counts, names in profiles."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import forked
import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import flash_dmattn
from flash_dmattn import masks
from flash_dmattn.dispatch import config, registry
from flash_dmattn.distributed import SequenceLayout, ShardedMask
from flash_dmattn.problem import allowed_pairs

B, LQ, LK, HQ, HK, D, DV = 2, 7, 11, 4, 2, 16, 24


def python(code: str) -> str:
    """Return what a process prints in which nothing but the code has imported anything of this package."""
    (done,) = forked.run([({}, code)])
    assert done.status == 0, done.said
    return done.said.strip()


def qkv(device: str = "cpu", dtype: torch.dtype = torch.float32) -> list[Tensor]:
    shapes = ((B, LQ, HQ, D), (B, LK, HK, D), (B, LK, HK, DV))
    return [torch.randn(shape).to(device, dtype).requires_grad_() for shape in shapes]


# Meta tensors

MASKS = {
    "no mask": lambda device: None,
    "dense": lambda device: torch.ones(B, 1, LQ, LK, dtype=torch.bool, device=device),
    "keys": lambda device: torch.ones(B, 1, 1, LK, dtype=torch.bool, device=device),
    "prepared tiles": lambda device: masks.PreparedMask.from_mask(
        torch.ones(B, 1, LQ, LK, dtype=torch.bool, device=device), is_causal=True
    ),
    "prepared keys": lambda device: masks.PreparedMask.from_mask(
        torch.ones(B, 1, 1, LK, dtype=torch.bool, device=device), seqlen_q=LQ, is_causal=True
    ),
}
BIASES: dict[str, tuple[int, ...] | None] = {"no bias": None, "score": (1, HQ, LQ, LK), "key": (B, HK, 1, LK)}


def layout(x: Tensor) -> tuple[Any, ...]:
    return x.shape, x.stride(), x.dtype


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("bias", BIASES)
@pytest.mark.parametrize("mask", MASKS)
def test_meta_tensors_give_the_layout_of_real_ones(mask: str, bias: str, dtype: torch.dtype) -> None:
    actual: dict[str, list[tuple[Any, ...]]] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for device in ("cpu", "meta"):
            leaves = qkv(device, dtype)
            added = BIASES[bias]
            if added is not None:
                leaves.append(torch.zeros(added, device=device, requires_grad=True))
            with flash_dmattn.config(record=(decisions := [])):
                results = flash_dmattn.attention(
                    *leaves[:3], MASKS[mask](device), *leaves[3:], is_causal=True, return_lse=True
                )
            gradients = torch.autograd.grad(results, leaves, [torch.ones_like(x) for x in results])
            assert {x.device.type for x in (*results, *gradients)} == {device}
            assert [(d.forward, d.backward) for d in decisions] == [("eager", "eager")]
            actual[device] = [layout(x) for x in (*results, *gradients)]
    assert actual["meta"] == actual["cpu"]
    out, lse = actual["meta"][:2]
    assert out[:2] == ((B, LQ, HQ, DV), (LQ * HQ * DV, HQ * DV, DV, 1)) and lse[0] == (B, HQ, LQ)
    assert lse[2] == (torch.float64 if dtype == torch.float64 else torch.float32)


@pytest.mark.parametrize("policy", ["warn", "error"])
def test_a_call_on_meta_is_no_fallback(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config.process, "fallback", policy)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        out = flash_dmattn.attention(*qkv("meta"))
    assert (out.device.type, out.shape) == ("meta", (B, LQ, HQ, DV))


def test_explain_says_that_meta_tensors_are_not_computed_with() -> None:
    explanation = flash_dmattn.explain(*qkv("meta"))
    assert (explanation.forward, explanation.backward) == ("eager", "eager")
    (eager,) = (verdict for verdict in explanation.verdicts if verdict.backend == "eager")
    assert eager.notes == ("returns only shapes, strides and dtypes: meta tensors hold no values",)
    assert not any(v.notes for v in flash_dmattn.explain(*qkv()).verdicts if v.backend == "eager")


@pytest.mark.parametrize("name", ["cuda", "triton", "flex"])
def test_a_backend_of_other_devices_refuses_meta_by_name(name: str) -> None:
    with pytest.raises(flash_dmattn.BackendError, match="device is meta"):
        flash_dmattn.attention(*qkv("meta"), backend=name)


# Submodules


def test_nn_is_an_attribute_that_is_imported_on_first_use() -> None:
    code = """
import sys, flash_dmattn
print("flash_dmattn.nn" in sys.modules, "nn" in dir(flash_dmattn), "masks" in dir(flash_dmattn))
print(flash_dmattn.nn.DynamicMaskAttention.__name__, flash_dmattn.masks.causal_mask.__name__)
print("flash_dmattn.nn" in sys.modules)
"""
    assert python(code).splitlines() == ["False True True", "DynamicMaskAttention causal_mask", "True"]


def test_an_attribute_that_nobody_has_is_an_error() -> None:
    with pytest.raises(AttributeError, match="module 'flash_dmattn' has no attribute 'frobnicate'"):
        flash_dmattn.frobnicate  # noqa: B018
    assert dir(flash_dmattn) == sorted(flash_dmattn.__all__)


# Saved masks

PREPARED = {
    "tiles": lambda: masks.PreparedMask.from_mask(
        torch.rand(2, 1, 150, 140) < 0.4, is_causal=True, window_size=(90, -1)
    ),
    "keys": lambda: masks.PreparedMask.from_mask(torch.rand(2, 1, 1, 140) < 0.4, seqlen_q=15, window_size=(90, 3)),
    "intervals": lambda: masks.PreparedMask.from_topk(
        torch.randn(2, 1, 1, 140), 30, seqlen_q=150, is_causal=True, reorder=True
    ),
}


def test_a_loaded_mask_follows_map_location(tmp_path: Path) -> None:
    mask = PREPARED["tiles"]()
    assert torch.device("cpu") in mask._call_key[-1]  # what is cached belongs to this device
    torch.save(mask, tmp_path / "mask.pt")
    loaded = torch.load(tmp_path / "mask.pt", weights_only=True, map_location="meta")
    assert loaded.device.type == "meta" and loaded.device in loaded._call_key[-1]


def test_a_mask_is_loaded_where_only_the_package_is_imported(tmp_path: Path) -> None:
    torch.save(PREPARED["keys"](), tmp_path / "mask.pt")
    code = f"import torch, flash_dmattn; print(torch.load({str(tmp_path / 'mask.pt')!r}, weights_only=True).form)"
    assert python(code) == "keys"


LAYOUT = SequenceLayout.zigzag(16, 2)
SAVED: dict[str, Callable[[], Any]] = {
    **PREPARED,
    "Padding": lambda: flash_dmattn.sequences.Padding(torch.tensor([[1, 1, 0], [0, 1, 1]])),
    "Sequences.packed": lambda: flash_dmattn.Sequences.packed(torch.tensor([0, 3, 8])),
    "Sequences.padded": lambda: flash_dmattn.Sequences.padded(seqlens_k=torch.tensor([3, 8])),
    "Sequences.paged": lambda: flash_dmattn.Sequences.paged(torch.tensor([[0, 1]]), torch.tensor([5])),
    "leading dims": lambda: PREPARED["tiles"]().expand_batch((3, 2)),
    "with sequences": lambda: masks.PreparedMask.from_mask(
        torch.rand(1, 1, 5, 5) < 0.5,
        sequences=flash_dmattn.Sequences.packed(torch.tensor([0, 3, 8]), max_seqlen_q=5),
        seqlen_q=8,
        seqlen_k=8,
        is_causal=True,
    ),
    "TreeMask": lambda: masks.PreparedMask.from_tree(torch.ones(1, 3, 3, dtype=torch.bool).tril()),
    "SequenceLayout": lambda: LAYOUT,
    "ShardedMask": lambda: ShardedMask.from_mask(torch.rand(1, 1, 8, 16) < 0.5, LAYOUT, 1, is_causal=True),
}


def fields_of(x: Any) -> list[Any]:
    """The fields of an object, without what it remembers of calls and properties."""
    if isinstance(x, (list, tuple)):
        return [field for part in x for field in fields_of(part)]
    if isinstance(x, (torch.Tensor, int, str, type(None), torch.device)):
        return [x]
    names = [f.name for f in dataclasses.fields(x) if f.init] if dataclasses.is_dataclass(x) else vars(x)
    return [field for name in names for field in fields_of(getattr(x, name))]


@pytest.mark.parametrize("way", ["torch.load", "pickle", "deepcopy"])
@pytest.mark.parametrize("name", SAVED)
def test_what_a_program_keeps_beside_its_tensors_is_saved_and_loaded(name: str, way: str, tmp_path: Path) -> None:
    want = SAVED[name]()
    if way == "torch.load":
        torch.save([want], tmp_path / "kept.pt")
        (got,) = torch.load(tmp_path / "kept.pt", weights_only=True)
    else:
        got = copy.deepcopy(want) if way == "deepcopy" else pickle.loads(pickle.dumps(want))
    assert type(got) is type(want)
    for x, y in zip(fields_of(got), fields_of(want), strict=True):
        assert torch.equal(x, y) if isinstance(y, torch.Tensor) else x == y
    if name in PREPARED:
        q, k = torch.randn(2, want.seqlen_q, 2, 8), torch.randn(2, 140, 2, 8)
        assert torch.equal(*(flash_dmattn.attention(q, k, k, mask) for mask in (got, want)))


def test_a_saved_mask_of_another_form_is_refused() -> None:
    class Saved:
        def __reduce__(self) -> tuple[object, ...]:
            restore, (_, fields) = PREPARED["tiles"]().__reduce__()
            return restore, ("dense", fields)

    with pytest.raises(ValueError, match=r"form is 'dense'; it needs to be one of \['intervals', 'keys', .*'tiles'"):
        copy.deepcopy(Saved())


# Defaults of torch

GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(2, 24, 2, 8, generator=GENERATOR)
SCORES = torch.randn(2, 1, 24, 24, generator=GENERATOR)
INDEX = torch.tensor([[0, -1], [1, 0], [0, 2], [1, 3]])
SLOPES = torch.tensor([0.5, 0.25])
TOKENS, USED = X.flatten(0, 1), torch.tensor([5, 24])
PACKED = flash_dmattn.Sequences.packed(torch.tensor([0, 5, 48]))
TABLE, POOL = torch.tensor([[2, 0], [1, 3]]), X.view(4, 12, 2, 8)


def with_derivatives(call: Callable[..., Any], *leaves: Tensor) -> tuple[Any, ...]:
    """Return the results of a call, and their first and second derivatives."""
    leaves = tuple(x.detach().requires_grad_() for x in leaves)
    out = call(*leaves)
    first = torch.autograd.grad(out.square().sum(), leaves, create_graph=True)
    second = torch.autograd.grad(sum(x.square().sum() for x in first), leaves, allow_unused=True)
    return out, *first, *(x for x in second if x is not None)


def self_attention(x: Tensor, *arguments: Any, **options: Any) -> Any:
    return flash_dmattn.attention(x, x, x, *arguments, **options)


def batched_gradients(x: Tensor) -> tuple[Tensor, ...]:
    x = x.detach().requires_grad_()
    out, lse = self_attention(x, return_lse=True)
    sent = torch.ones(3, *out.shape, device="cpu", dtype=x.dtype), torch.ones(3, *lse.shape, device="cpu")
    return torch.autograd.grad((out, lse), x, sent, is_grads_batched=True)


def masks_of_transformers() -> list[Any]:
    mask_function = pytest.importorskip("flash_dmattn.integrations.transformers.mask_function")
    options: dict[str, Any] = {"is_causal": True, "device": "cpu"}
    made = [
        mask_function.LayerMask((2, 1, 24, 24), USED[:, None, None, None] > torch.arange(24, device="cpu"), **options),
        mask_function.LayerMask((2, 1, 24, 24), documents=(SCORES[:, 0, 0] > 0).cumsum(1), **options),
        mask_function.LayerMask((2, 1, 24, 24), blocks=(SCORES[:, 0, 0] > 0).cumsum(1), **options),
        mask_function.LayerMask((1, 1, 24, 24), documents=(SCORES[:1, 0, 0] > 0).cumsum(1), **options),
        mask_function.LayerMask((2, 1, 1, 24), used=torch.tensor(5, device="cpu"), **options),
    ]
    return [(mask.arguments(False), mask.first_keys()) for mask in made]


def appended(sequences: flash_dmattn.Sequences, cache: Tensor, new: Tensor) -> Tensor:
    cache = cache.clone()
    flash_dmattn.append_to_cache(cache, None, new, None, sequences)
    return cache


# Calls whose tensors are on a CPU, with the numbers that they hold in float32.
CALLS: dict[str, Callable[[], Any]] = {
    **{
        f"{name} on {backend}": lambda options=options, backend=backend: with_derivatives(
            lambda x: self_attention(x, backend=backend, **options), X
        )
        for backend in ("auto", "eager", "reference")
        for name, options in {
            "plain": {},
            "causal": {"is_causal": True},
            "window": {"window_size": (5, 0)},
            "softcap": {"softcap": 2.0},
            "mask": {"mask": SCORES > 0},
            "key mask": {"mask": USED[:, None, None, None] > torch.arange(24)},
            "bias": {"bias": SCORES},
            "bias in 16 bits": {"bias": SCORES.bfloat16()},
            "sink": {"sink": SLOPES},
            "relative": {"bias": flash_dmattn.biases.Relative(SCORES[0, :, 0, :5], 2, "clamp")},
            "padded": {"sequences": flash_dmattn.Sequences.padded(seqlens_k=USED)},
        }.items()
    },
    "packed": lambda: with_derivatives(lambda x: self_attention(x, sequences=PACKED), TOKENS),
    "paged": lambda: flash_dmattn.attention(X, POOL, POOL, sequences=flash_dmattn.Sequences.paged(TABLE, USED)),
    "a cache": lambda: appended(
        flash_dmattn.Sequences.padded(seqlens_q=torch.tensor([2, 1], device="cpu"), seqlens_k=USED), X, X[:, :2]
    ),
    "padding": lambda: flash_dmattn.sequences.Padding(X[..., 0, 0] > 0).unpad(X),
    "many intervals": lambda: with_derivatives(
        lambda x: self_attention(x, masks.PreparedMask.from_topk(LONG[0, :, 0, 0], 32, is_causal=True)), LONG
    ),
    "forward mode": lambda: torch.func.jvp(lambda x: self_attention(x, SCORES > 0, SCORES), (X,), (X,)),
    "vmap": lambda: torch.vmap(lambda x: self_attention(x, is_causal=True))(X[:, None]),
    "batched gradients": lambda: batched_gradients(X),
    "explain": lambda: [str(flash_dmattn.explain(X, X, X, SCORES > 0, bias=SCORES))],
    "causal_mask": lambda: masks.causal_mask(3, 4, device="cpu"),
    "prefix_lm_mask": lambda: [masks.prefix_lm_mask(2, 3, 4, device="cpu"), masks.prefix_lm_mask(USED, 24, 24)],
    "padding_mask": lambda: [masks.padding_mask(USED, 24), masks.padding_mask(INDEX.abs())],
    "document masks": lambda: masks.document_mask(masks.document_ids(USED, total_length=30)),
    "topk_mask": lambda: masks.topk_mask(SCORES, 3),
    "blocks": lambda: [masks.expand_blocks(SCORES > 0, 2, 48, 48), masks.smooth_blocks(SCORES > 0, 2)],
    "mask_stats": lambda: [str(masks.mask_stats(SCORES > 0))],
    "from_mask": lambda: [
        masks.PreparedMask.from_mask(SCORES > 0),
        masks.PreparedMask.from_mask(SCORES[:, :, :1] > 0, seqlen_q=9),
    ],
    "from_blocks": lambda: masks.PreparedMask.from_blocks(SCORES > 0, 128, 3072, 3072),
    "from_mask_mod": lambda: masks.PreparedMask.from_mask_mod(lambda b, h, i, j: i >= j, 30, 30, device="cpu"),
    "from_documents": lambda: masks.PreparedMask.from_documents(masks.document_ids(USED)),
    "from_mask of lengths": lambda: masks.PreparedMask.from_mask(masks.padding_mask(USED, 24), seqlen_q=24),
    "from_intervals": lambda: masks.PreparedMask.from_intervals(USED - 5, USED, 24),
    "from_topk": lambda: masks.PreparedMask.from_topk(SCORES[:, :, :1], 3, is_causal=True),
    "from_lists": lambda: masks.PreparedMask.from_lists(INDEX, seqlen_k=4, is_causal=True),
    "from_topk_lists": lambda: masks.PreparedMask.from_topk_lists(SCORES, 3, is_causal=True),
    "IndexScores": lambda: masks.PreparedMask.from_topk_lists(
        masks.IndexScores(X, X[:, :, 0], torch.ones(2, 24, 2, device="cpu", dtype=torch.float32)), 3
    ),
    "ListBias": lambda: with_derivatives(
        lambda x: flash_dmattn.attention(
            X[:, :4],
            X[:, :4],
            X[:, :4],
            masks.PreparedMask.from_lists(INDEX, seqlen_k=4),
            flash_dmattn.biases.ListBias(x),
        ),
        SCORES[:, :, :4, :2],
    ),
    "from_tree": lambda: masks.PreparedMask.from_tree(SCORES[0, :, :3, :3] > 0),
    "t5": lambda: flash_dmattn.biases.t5(SCORES[0, 0, :, :2]),
    "alibi": lambda: flash_dmattn.biases.alibi(SLOPES, 24),
    "alibi_slopes": lambda: flash_dmattn.nn.alibi_slopes(6, device="cpu"),
    "from_function": lambda: flash_dmattn.biases.from_function(lambda d: d.abs().float(), 24, 24, device="cpu"),
    "DynamicMaskAttention": lambda: with_derivatives(LAYER, X.flatten(2)),
    "transformers": masks_of_transformers,
}
LONG = torch.randn(1, 2048, 2, 16, generator=GENERATOR)
LAYER = flash_dmattn.nn.DynamicMaskAttention(16, 2, keep_window_size=4)


def tensors_of(x: Any) -> list[Any]:
    if isinstance(x, (list, tuple)):
        return [each for part in x for each in tensors_of(part)]
    if isinstance(x, (Tensor, str, int, type(None))):
        return [x]
    return tensors_of(x._tensors if isinstance(x, flash_dmattn.Sequences) else x.tensors)


@pytest.mark.parametrize("name", CALLS)
def test_no_call_looks_at_the_default_device_or_dtype_of_torch(name: str) -> None:
    registry.choices_changed()
    with torch.device("meta"):  # first: a plan is made here, and what it keeps serves the calls below
        on_meta = tensors_of(CALLS[name]())
    expected = tensors_of(CALLS[name]())
    torch.set_default_dtype(torch.float64)
    try:
        registry.choices_changed()
        in_float64 = tensors_of(CALLS[name]())
    finally:
        torch.set_default_dtype(torch.float32)
    assert len(on_meta) == len(in_float64) == len(expected) > 0
    for x, y, want in zip(on_meta, in_float64, expected, strict=True):
        if isinstance(want, Tensor):
            assert x.device == y.device == want.device
            assert x.dtype == y.dtype == want.dtype
            assert torch.equal(x, want)
            assert torch.equal(y, want)
        else:
            assert x == y == want


# FLOP

BANDS: dict[str, tuple[dict[str, Any], tuple[int, int]]] = {
    "full": ({}, (-1, -1)),
    "causal": ({"is_causal": True}, (-1, 0)),
    "window": ({"window_size": (3, 1)}, (3, 1)),
    "left": ({"window_size": (2, -1)}, (2, -1)),
    "beyond": ({"window_size": (99, 99)}, (99, 99)),
}


def brute_force(seqlen_q: int, seqlen_k: int, left: int, right: int) -> int:
    rows = torch.arange(seqlen_q)[:, None] + seqlen_k - seqlen_q
    keys = torch.arange(seqlen_k)
    allowed = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool)
    if left >= 0:
        allowed &= keys >= rows - left
    if right >= 0:
        allowed &= keys <= rows + right
    return int(allowed.sum())


def test_allowed_pairs_are_counted_without_counting() -> None:
    limits = (-1, 0, 1, 2, 5, 20)
    for seqlen_q, seqlen_k, left, right in itertools.product((0, 1, 2, 5, 9), (0, 1, 3, 5, 12), limits, limits):
        want = brute_force(seqlen_q, seqlen_k, left, right)
        assert allowed_pairs(seqlen_q, seqlen_k, (left, right)) == want, (seqlen_q, seqlen_k, left, right)


@pytest.mark.parametrize("needed", ["qkvb", "q", "k", "v", "b", "qk", "qkv"])
@pytest.mark.parametrize("band", BANDS)
def test_flop_of_both_passes(band: str, needed: str) -> None:
    flags, window = BANDS[band]
    q, k, v = (x.detach().requires_grad_(name in needed) for name, x in zip("qkv", qkv(), strict=True))
    bias = torch.randn(1, HQ, LQ, LK, requires_grad="b" in needed)
    mask = torch.rand(LQ, LK) < 0.5  # on the device: its pairs count whole
    with FlopCounterMode(display=False) as counter:
        out = flash_dmattn.attention(q, k, v, mask, bias, **flags)
        forward = counter.get_total_flops()
        out.sum().backward()
    pairs = B * HQ * brute_force(LQ, LK, *window)
    assert forward == pairs * (2 * D + 2 * DV)
    per_pair = 2 * D + ("v" in needed) * 2 * DV + (len({"q", "k"} & set(needed))) * 2 * D
    per_pair += 2 * DV if set(needed) & set("qkb") else 0
    assert counter.get_total_flops() - forward == pairs * per_pair
    names = {str(name) for name in counter.get_flop_counts()["Global"]}
    assert names == {"flash_dmattn.attention_forward", "flash_dmattn.attention_backward"}


@pytest.mark.parametrize("before", ["", "find_spec", "made first", "torch.utils.flop_counter"])
def test_flop_are_counted_whatever_comes_before(before: str) -> None:
    code = f"""
import importlib.util, sys, torch
finders = list(sys.meta_path)
if {before!r} == "torch.utils.flop_counter":
    import torch.utils.flop_counter
import flash_dmattn
loaded = "torch.utils.flop_counter" in sys.modules
if {before!r} == "find_spec":
    importlib.util.find_spec("torch.utils.flop_counter")
from torch.utils.flop_counter import FlopCounterMode
x = torch.randn(1, 4, 2, 8, requires_grad=True)
outer, inner = FlopCounterMode(display=False), FlopCounterMode(display=False)
if {before!r} == "made first":
    flash_dmattn.attention(x, x, x)
with outer:
    with inner:
        out = flash_dmattn.attention(x, x, x)
    out.sum().backward()
print(loaded, inner.get_total_flops(), outer.get_total_flops(), sys.meta_path == finders)
"""
    forward = 4 * 8 * 2 * 4 * 4
    assert python(code) == f"{before == 'torch.utils.flop_counter'} {forward} {forward * 7 // 2} True"
