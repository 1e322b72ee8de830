"""Calls that are alike are described once, and only those: what a class of calls is told apart by."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from key_parts import check_covered, check_told_apart, tensor_changes, under_other_settings
from out_of_tree import KernelPair, registered
from ready_backend import ready_pair
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

import flash_dmattn
from flash_dmattn import call
from flash_dmattn.biases import ByDistance
from flash_dmattn.call import PreparedCall
from flash_dmattn.dispatch import selection
from flash_dmattn.masks import PreparedMask
from flash_dmattn.problem import RawFlags, Repeats, SequenceSpec

Q, K = (2, 6, 4, 8), (2, 9, 2, 8)


@pytest.fixture(autouse=True)
def as_in_a_new_process(untouched_settings: None) -> Iterator[None]:
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def described(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for each call that was described, which is validated and has a backend chosen with it."""
    calls: list[int] = []
    describe = call.describe

    def counted(*arguments: Any, **more: Any) -> Any:
        calls.append(1)
        return describe(*arguments, **more)

    monkeypatch.setattr(call, "describe", counted)
    return calls


def inputs() -> dict[str, Any]:
    """A call: q, k, v, a mask and a bias of two dimensions."""
    torch.manual_seed(0)
    q, k, v = torch.randn(Q), torch.randn(K), torch.randn(K)
    return {"q": q, "k": k, "v": v, "mask": torch.rand(6, 9) > 0.3, "bias": torch.randn(6, 9)}


def attend(**changes: Any) -> Any:
    return flash_dmattn.attention(**{**inputs(), **changes})


def test_calls_that_are_alike_are_described_once(described: list[int]) -> None:
    first = attend(return_lse=True, window_size=(3, 3))
    for _ in range(2):
        torch.testing.assert_close(attend(return_lse=True, window_size=(3, 3)), first, rtol=0, atol=0)
    assert len(described) == 1
    # Another mask and another bias of the same form are read, not remembered.
    others = {"mask": torch.rand(6, 9) > 0.6, "bias": torch.randn(6, 9)}
    want = attend(**others, backend="reference")
    torch.testing.assert_close(attend(**others, return_lse=True)[0], want)
    assert len(described) == 3


SPEC = SequenceSpec("padded", 2, 6, 9, 6, 9)
BY_DISTANCE = ByDistance(2, "clamp", False)
NUMBERS = RawFlags(False, 0.5, 1.0, (3, 4), False, False, False, 0.25, False, False)
OTHER_NUMBERS: dict[str, tuple[Any, ...]] = {
    "is_causal": (True, 0),
    "softmax_scale": (0.25, None),
    "softcap": (2.0, 1),
    "window_size": ((3, 5), (2, 4), None, (3.0, 4), (3, 4.0)),
    "deterministic": (True, None),
    "return_lse": (True, 0),
    "return_probs": (True, 0),
    "dropout_p": (0.5, 1),
    "max_scores": (True, 0),
    "entropy": (True, 0),
}
OTHER_LAYOUTS: dict[str, tuple[Any, ...]] = {
    "arrival": ("heads_first",),
    "repeats": (*(Repeats()._replace(**{name: 7}) for name in Repeats._fields), None),
    "leading": ((2, 2), (4, 1), None),
    "spec": (
        SPEC._replace(layout="paged"),
        *(SPEC._replace(**{name: 77}) for name in ("number", "rows_q", "rows_k", "max_seqlen_q", "max_seqlen_k")),
        SPEC._replace(names_max=(False, False)),
        SPEC._replace(page_size=3),
        None,
    ),
    "by_distance": (ByDistance(1, "clamp", False), ByDistance(2, "zero", False), ByDistance(2, "clamp", True), None),
    "is_list_bias": (True,),
}
TENSORS = ("q", "k", "v", "mask", "bias", "sink")
# `spec` describes the tensors of sequences; the others say how results are handed over, not what runs.
NOT_IN_KEY = ("sequences", "jagged", "copies")


def whole_call() -> PreparedCall:
    """A call in one form with all that a call may have."""
    q, k, v = torch.randn(Q), torch.randn(K), torch.randn(K)
    mask, bias = torch.ones(1, 4, 6, 9) > 0, torch.randn(1, 4, 6, 9)
    return PreparedCall(
        q, k, v, mask, bias, torch.zeros(4), NUMBERS, "rows", Repeats(), (2, 1), SPEC, by_distance=BY_DISTANCE
    )


def key_of(one: PreparedCall, backend: Any = "auto") -> Any:
    key = call._key(one, backend, call.blocks.now)
    assert key is not None
    return key


def changed_calls() -> dict[str, tuple[PreparedCall, Any]]:
    """Calls that differ from `whole_call` in one thing, and the backend that is asked for, by name."""
    one = whole_call()
    changed: dict[str, PreparedCall] = {}
    for name in TENSORS:
        for what, other in tensor_changes(getattr(one, name)).items():
            changed[f"{name}, {what}"] = one._replace(**{name: other})
    for name, others in OTHER_NUMBERS.items():
        changed |= {f"{name} {x}": one._replace(raw_flags=one.raw_flags._replace(**{name: x})) for x in others}
    for name, others in OTHER_LAYOUTS.items():
        changed |= {f"{name} {x}": one._replace(**{name: x}) for x in others}
    changed |= {f"no {name}": one._replace(**{name: None}) for name in ("mask", "bias", "sink")}
    # With the strides of a plain one.
    changed |= {f"{name}, layout": one._replace(**{name: getattr(one, name).to_mkldnn()}) for name in "qkv"}
    assert isinstance(one.mask, Tensor)
    changed["another form of mask"] = one._replace(mask=PreparedMask.from_mask(one.mask))
    backends = {f"backend {other}": (one, other) for other in ("eager", ("eager", "eager"))}
    return {**{name: (other, "auto") for name, other in changed.items()}, **backends}


def test_every_field_of_a_call_is_changed_by_some_change() -> None:
    assert set(OTHER_NUMBERS) == set(RawFlags._fields)
    assert {*TENSORS, "raw_flags", *OTHER_LAYOUTS, *NOT_IN_KEY} == set(PreparedCall._fields)


@pytest.mark.parametrize("change", changed_calls())
def test_each_input_alone_changes_the_key(change: str) -> None:
    check_told_apart(key_of(whole_call()), key_of(*changed_calls()[change]))


def test_each_setting_alone_changes_the_key() -> None:
    key = key_of(whole_call())
    for other in under_other_settings(lambda: key_of(whole_call())):
        check_told_apart(key, other)


def test_no_part_of_the_key_is_without_a_change() -> None:
    key, changed = key_of(whole_call()), [key_of(*one) for one in changed_calls().values()]
    check_covered(key, [*changed, *under_other_settings(lambda: key_of(whole_call()))])


def test_a_mask_of_a_kind_that_has_no_key_is_no_call_without_one() -> None:
    """An error in making a key is one: a call that is never remembered would only be slow."""

    class Prepared:
        tensors = ()

    with pytest.raises(AttributeError, match="_call_key"):
        key_of(whole_call()._replace(mask=Prepared()))  # type: ignore[arg-type]


def test_grad_mode_makes_another_class(described: list[int]) -> None:
    q = inputs()["q"].requires_grad_()
    assert attend(q=q).requires_grad
    with torch.no_grad():
        assert not attend(q=q).requires_grad
    with torch.inference_mode():
        assert not attend(q=q).requires_grad
    assert attend(q=q).requires_grad
    assert len(described) == 2  # inference mode is no grad


def test_settings_outside_of_the_call_are_noticed(described: list[int]) -> None:
    def ran() -> tuple[str, bool]:
        with flash_dmattn.config(record=(decisions := [])):
            attend()
        attend()
        return decisions[0].forward, decisions[0].problem.deterministic

    assert ran() == ("sdpa", False)
    with flash_dmattn.config(backend="reference"):
        assert ran() == ("reference", False)
    flash_dmattn.config.set(backend="reference")
    assert ran() == ("reference", False)
    with pytest.raises(flash_dmattn.BackendUnavailableError), flash_dmattn.config(disabled="reference"):
        attend()
    flash_dmattn.config.set(backend="auto")
    torch.use_deterministic_algorithms(True)
    assert ran() == ("sdpa", True)
    attend(backend="eager")
    with flash_dmattn.config(disabled="eager"), pytest.raises(flash_dmattn.BackendUnavailableError):
        attend(backend="eager")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert attend().dtype == torch.bfloat16
    assert attend().dtype == torch.float32


def test_what_is_remembered_runs_on_the_backend_of_its_time() -> None:
    attend(backend="auto")
    ours = KernelPair("ours")
    with registered(ours, before="sdpa"):
        attend()
        attend()
    attend()
    assert ours.ran == ["forward", "forward"]


@pytest.mark.parametrize(
    ("good", "bad", "error"),
    [
        ({"is_causal": True}, {"is_causal": 1}, TypeError),
        ({"return_lse": False}, {"return_lse": 0}, TypeError),
        ({"deterministic": False}, {"deterministic": 0}, TypeError),
        ({"softmax_scale": 1.0}, {"softmax_scale": True}, TypeError),
        ({"softcap": 0.0}, {"softcap": False}, TypeError),
        ({"window_size": (1, 1)}, {"window_size": (1, True)}, TypeError),
        ({"window_size": (1, 1)}, {"window_size": (1.0, 1)}, TypeError),
        ({}, {"q": None}, TypeError),
        ({}, {"k": torch.nested.nested_tensor([torch.zeros(K[1:]), torch.zeros(5, *K[2:])])}, RuntimeError),
        ({}, {"bias": "none"}, TypeError),
        ({}, {"backend": ["eager"]}, TypeError),
        ({}, {"backend": "nope"}, ValueError),
    ],
)
def test_what_only_equals_a_valid_argument_is_refused(
    good: dict[str, Any], bad: dict[str, Any], error: type[Exception], described: list[int]
) -> None:
    attend(**good)
    for _ in range(2):
        with pytest.raises(error):
            attend(**bad)
    assert len(described) == 3
    attend(**good)
    assert len(described) == 3


def test_what_may_not_be_looked_up_is_described(described: list[int]) -> None:
    """Tensors whose sizes may be symbols, and a sequence that may be changed by being read."""

    class Window(list):  # type: ignore[type-arg]
        pass

    arguments = inputs()
    for _ in range(2):
        attend(window_size=Window([1, 2]))
        torch.vmap(lambda q: flash_dmattn.attention(q, arguments["k"], arguments["v"]))(arguments["q"][None])
        with FakeTensorMode():
            attend()
    assert len(described) == 6
    assert not len(call.plans)


def flops_counted() -> FlopCounterMode:
    return FlopCounterMode(display=False)


def test_a_plan_is_made_once_for_calls_that_are_alike() -> None:
    """By the backend, too: watched calls and calls that nothing watches share their passes."""
    with ready_pair() as ours:
        for watch in (nullcontext, nullcontext, flops_counted, flops_counted):
            arguments = inputs()
            arguments["q"].requires_grad_()
            with watch():
                flash_dmattn.attention(**arguments, backend="ready").sum().backward()
        assert ours.ways == ["forward", "backward"] * 4
        assert ours.shown == ["forward", "backward"] * 2
        assert [direction for direction, _ in ours.planned] == ["forward", "backward"]


PREPARED = {
    "the same again": (lambda mask: PreparedMask.from_mask(mask, seqlen_q=6, seqlen_k=9), 1),
    "another mask of its form": (lambda mask: PreparedMask.from_mask(~mask, seqlen_q=6, seqlen_k=9), 1),
    "with a band": (lambda mask: PreparedMask.from_mask(mask, seqlen_q=6, seqlen_k=9, is_causal=True), 2),
    "with more heads": (
        lambda mask: PreparedMask.from_mask(mask.expand(2, 4, 6, 9).clone(), seqlen_q=6, seqlen_k=9),
        2,
    ),
    "one row for all queries": (lambda mask: PreparedMask.from_mask(mask[:1], seqlen_q=6, seqlen_k=9), 2),
    "dense": (lambda mask: mask, 2),
}


@pytest.mark.parametrize("change", PREPARED)
def test_calls_with_prepared_masks_are_remembered_by_the_form_of_the_mask(change: str, described: list[int]) -> None:
    mask = inputs()["mask"]
    prepare, classes = PREPARED[change]
    attend(mask=PreparedMask.from_mask(mask, seqlen_q=6, seqlen_k=9))
    actual = attend(mask=prepare(mask))
    assert len(described) == classes
    torch.testing.assert_close(actual, attend(mask=prepare(mask), backend="reference"))


def test_no_tensor_is_held(young_heap: None) -> None:
    arguments = inputs()
    arguments["bias"].requires_grad_()
    flash_dmattn.attention(**arguments).sum().backward()
    alive = [weakref.ref(x) for x in arguments.values()]
    assert len(call.plans)
    del arguments
    gc.collect()
    assert not any(x() is not None for x in alive)


def test_a_fallback_is_reported_as_the_policy_says_at_the_time_of_a_call(
    described: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(call, "falls_back", lambda *_: True)
    monkeypatch.setattr(selection, "_warned", set())
    with warnings.catch_warnings(), flash_dmattn.config(fallback="silent"):
        warnings.simplefilter("error")
        attend()
    with pytest.warns(flash_dmattn.FallbackWarning):
        attend()
    with pytest.raises(flash_dmattn.BackendUnsupportedError), flash_dmattn.config(fallback="error"):
        attend()
    assert len(described) == 3  # the plan keeps the policy of a block, which binds derivatives in other threads


@pytest.mark.parametrize("form", ["dense", "sequence_tiles", "tree"])
def test_calls_with_masks_beside_sequences_are_remembered(form: str, described: list[int], young_heap: None) -> None:
    x, cu = torch.randn(12, 2, 8), torch.tensor([0, 5, 12])
    sequences = flash_dmattn.Sequences.packed(cu, max_seqlen_q=7)
    mask: Any = torch.rand(1, 12, 7) > 0.3
    if form == "sequence_tiles":
        mask = PreparedMask.from_mask(mask, sequences=sequences, seqlen_q=12, seqlen_k=12)
    elif form == "tree":
        mask = PreparedMask.from_tree(torch.ones(1, 7, 7, dtype=torch.bool).tril())
    got = [flash_dmattn.attention(x, x, x, mask, sequences=sequences) for _ in range(3)]
    assert len(described) == 1
    wanted = flash_dmattn.attention(x, x, x, mask, sequences=sequences, backend="reference")
    torch.testing.assert_close(got, [wanted] * 3)
    assert not isinstance(mask, Tensor) or form == "dense"
    # The key holds no tensor: neither of the mask nor of its sequences.
    alive = [weakref.ref(t) for t in (mask.tensors if form != "dense" else (mask,))] + [weakref.ref(sequences)]
    del mask, sequences
    gc.collect()
    assert not any(t() is not None for t in alive)


def test_a_mask_with_other_leading_dims_is_refused_whatever_ran_before(described: list[int]) -> None:
    q = torch.randn(6, 32, 2, 16)
    allowed = torch.rand(6, 1, 32, 32) < 0.5
    good, bad = PreparedMask.from_mask(allowed), PreparedMask.from_mask(allowed.view(2, 3, 1, 32, 32))
    for _ in range(2):
        with pytest.raises(ValueError, match="prepared with leading dims"):
            flash_dmattn.attention(q, q, q, bad)
        flash_dmattn.attention(q, q, q, good)
