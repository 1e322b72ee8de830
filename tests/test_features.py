"""An argument of `attention` is served or refused, never dropped: what a backend lists is what it may be asked for."""

from __future__ import annotations

import inspect
from dataclasses import replace

import pytest
import torch
from conftest import refusal_of
from out_of_tree import KernelPair, registered

import flash_dmattn
from flash_dmattn.dispatch.registry import BACKENDS
from flash_dmattn.problem import FEATURES

LISTS = flash_dmattn.masks.PreparedMask.from_lists(torch.tensor([[0], [4], [-1]]), seqlen_k=5)
# How a call makes use of each argument.
USES = {
    "mask": {"mask": torch.ones(3, 5, dtype=torch.bool)},
    "bias": {"bias": torch.zeros(3, 5)},
    "is_causal": {"is_causal": True},
    "softcap": {"softcap": 2.0},
    "window_size": {"window_size": (1, -1)},
    "deterministic": {"deterministic": True},
    "return_lse": {"return_lse": True},
    "return_probs": {"return_probs": True},
    "max_scores": {"return_aux": flash_dmattn.AuxRequest(max_scores=True)},
    "entropy": {"return_aux": flash_dmattn.AuxRequest(entropy=True)},
    "sink": {"sink": torch.zeros(2)},
    "dropout_p": {"dropout_p": 0.5},
    "sequences": {"sequences": flash_dmattn.Sequences.padded(seqlens_k=torch.tensor([5]))},
    "paged": {"sequences": flash_dmattn.Sequences.paged(torch.tensor([[0]]), torch.tensor([5]))},
    "tree": {
        "sequences": flash_dmattn.Sequences.padded(seqlens_k=torch.tensor([5])),
        "mask": flash_dmattn.masks.PreparedMask.from_tree(torch.ones(1, 3, 3, dtype=torch.bool)),
    },
    "relative_bias": {"bias": flash_dmattn.biases.Relative(torch.zeros(2, 3), 1, "clamp")},
    "band_bias": {"bias": flash_dmattn.biases.Band(torch.zeros(2, 3, 4), 1)},
    "lists": {"mask": LISTS},
    "list_bias": {"mask": LISTS, "bias": flash_dmattn.biases.ListBias(torch.zeros(2, 3, 1))},
}
# No argument has only these: `return_aux` asks for statistics of rows. Pages are of sequences, a tree is a mask of
# sequences, lists are a mask, and a bias may be by distance or of lists.
PARTS: dict[str, set[str]] = {
    "max_scores": set(),
    "entropy": set(),
    "paged": {"sequences"},
    "tree": {"sequences", "mask"},
    "relative_bias": {"bias"},
    "band_bias": {"bias"},
    "lists": {"mask"},
    "list_bias": {"mask", "bias", "lists"},
}
# Every backend takes these: tensors, a factor that every call has, the choice itself, and a request of parts.
IN_EVERY_CALL = {"q", "k", "v", "softmax_scale", "backend", "return_aux"}


def call(**changes: object) -> object:
    q, k = torch.randn(1, 3, 2, 8), torch.randn(1, 5, 2, 8)
    return flash_dmattn.attention(q, k, k, **changes)  # type: ignore[arg-type]


def test_every_argument_is_a_feature() -> None:
    parameters = inspect.signature(flash_dmattn.attention).parameters
    arguments = {name for name, x in parameters.items() if x.kind is not x.VAR_KEYWORD}
    assert arguments - IN_EVERY_CALL == FEATURES.keys() - PARTS.keys()
    assert FEATURES.keys() == USES.keys()


@pytest.mark.parametrize("name", FEATURES)
def test_a_call_uses_the_features_that_it_names(name: str) -> None:
    with flash_dmattn.config(backend="reference", record=(decisions := [])):
        call()
        call(**USES[name])
    assert [decision.problem.features for decision in decisions] == [frozenset(), {name} | PARTS.get(name, set())]  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", FEATURES)
def test_what_a_backend_does_not_list_is_refused(name: str) -> None:
    pair = KernelPair("ours")
    pair.backend = replace(pair.backend, features=frozenset(FEATURES) - {"sink", name})
    with registered(pair, before="cuda"):
        x = torch.randn(1, 3, 2, 8)
        good = lambda: flash_dmattn.attention(x, x, x, backend="ours")
        error = refusal_of(lambda: call(**USES[name], backend="ours"), good, flash_dmattn.BackendUnsupportedError)
        assert f"- {name} is set; this backend" in str(error)
        assert [reason.code for reason in error.reasons] == [name]  # type: ignore[attr-defined]
        ran = len(pair.ran)
        with flash_dmattn.config(backend="reference" if name == "return_probs" else "auto"):
            call(**USES[name])
        assert len(pair.ran) == ran, "auto runs it although it does not have the feature"


def test_only_the_reference_returns_probabilities() -> None:
    assert [name for name, backend in BACKENDS.items() if "return_probs" in backend.features] == ["reference"]
