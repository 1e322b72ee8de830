"""The types that a user's program sees: mypy reads this file as part of `make lint`, and pytest runs it.

A wrong `assert_type` is an error of mypy, and so is a `type: ignore` of a line without one.
"""

from __future__ import annotations

import inspect
import typing
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import assert_type

import flash_dmattn
from flash_dmattn import attention, biases, masks, nn
from flash_dmattn.api import Options
from flash_dmattn.distributed import SequenceLayout, context_parallel_attention
from flash_dmattn.distributed.api import ParallelOptions
from flash_dmattn.explanation import Explanation

Results = tuple[Tensor, ...]
Q = torch.randn(1, 6, 2, 8)


def test_results_of_attention() -> None:
    by_formula: typing.Literal["reference"] = "reference"
    out = assert_type(attention(Q, Q, Q, is_causal=True), Tensor)
    assert out.square().shape == Q.shape
    out, lse = assert_type(attention(Q, Q, Q, return_lse=True, softmax_scale=0.5), tuple[Tensor, Tensor])
    assert lse.shape == (1, 2, 6)
    out, probs = assert_type(attention(Q, Q, Q, return_probs=True, backend=by_formula), tuple[Tensor, Tensor])
    assert probs.shape == (1, 2, 6, 6)
    both = attention(Q, Q, Q, return_lse=True, return_probs=True, backend=by_formula)
    assert_type(both, tuple[Tensor, Tensor, Tensor])
    assert [x.shape for x in both] == [out.shape, lse.shape, probs.shape]
    asked = flash_dmattn.AuxRequest(max_scores=True)
    out, aux = assert_type(attention(Q, Q, Q, return_aux=asked), tuple[Tensor, flash_dmattn.AuxOutput])
    assert_type(aux.max_scores, Tensor | None)
    maybe: flash_dmattn.AuxRequest | None = asked if out.numel() else None
    assert_type(attention(Q, Q, Q, return_aux=maybe), Tensor | tuple[Tensor, flash_dmattn.AuxOutput])


@pytest.mark.parametrize("return_lse", [False, True])
def test_results_of_attention_with_a_flag_that_is_a_variable(return_lse: bool) -> None:
    results = attention(Q, Q, Q, return_lse=return_lse)
    assert_type(results, Tensor | Results)
    assert isinstance(results, tuple) == return_lse


def in_parallel(group: dist.ProcessGroup, layout: SequenceLayout, return_lse: bool) -> None:
    """Only for mypy: a group has several processes."""
    assert_type(context_parallel_attention(Q, Q, Q, group=group, layout=layout, is_causal=True), Tensor)
    results = context_parallel_attention(Q, Q, Q, group=group, layout=layout, return_lse=True)
    assert_type(results, tuple[Tensor, Tensor])
    either = context_parallel_attention(Q, Q, Q, group=group, layout=layout, return_lse=return_lse)
    assert_type(either, Tensor | tuple[Tensor, Tensor])
    context_parallel_attention(Q, Q, Q, group=group)  # type: ignore[call-overload]


def test_a_wrong_keyword_is_an_error_for_mypy_too() -> None:
    with pytest.raises(TypeError, match="write is_causal="):
        attention(Q, Q, Q, causal=True)  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="write is_causal="):
        flash_dmattn.explain(Q, Q, Q, causal=True)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="is_causal is 1"):
        attention(Q, Q, Q, is_causal=1)  # type: ignore[call-overload]
    with pytest.raises(ValueError, match="did you mean 'cuda'"):
        attention(Q, Q, Q, backend="cudaa")  # type: ignore[call-overload]
    with pytest.raises(ValueError, match="did you mean 'eager'"):
        flash_dmattn.config.set(backend=("triton", "eagre"))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="did you mean 'sdpa'"):
        nn.PairBiasAttention(8, 4, 2, backend="spda")(torch.randn(1, 6, 8), torch.randn(1, 6, 6, 4))  # type: ignore[arg-type]


def test_a_backend_that_a_program_registers_has_a_name_for_mypy() -> None:
    name = flash_dmattn.register_backend(
        flash_dmattn.Backend("mine", lambda problem: lambda inputs: (inputs.q, inputs.q))
    )
    try:
        assert_type(attention(Q, Q, Q, backend=name), Tensor)
        pair: flash_dmattn.BackendChoice = (name, "eager")
        assert pair == ("mine", "eager")
    finally:
        flash_dmattn.unregister_backend(name)


def test_what_else_a_user_has_a_type_of() -> None:
    mask = assert_type(masks.causal_mask(6, 6), Tensor)
    assert_type(masks.combine(mask, masks.padding_mask([6], 6)), Tensor | None)
    prepared = masks.PreparedMask.from_mask(mask)
    assert_type(attention(Q, Q, Q, prepared), Tensor)
    assert_type(flash_dmattn.explain(Q, Q, Q, mask), Explanation)
    assert_type(flash_dmattn.available_backends(), tuple[str, ...])
    assert_type(flash_dmattn.Sequences.packed(torch.tensor([0, 6])), flash_dmattn.Sequences)
    assert_type(nn.RelativePositionBias(2).forward(6), Tensor)
    assert_type(nn.RelativePositionBias(2).forward(), biases.Relative)
    layer = nn.PairBiasAttention(8, 4, 2)
    assert_type(layer.forward(torch.randn(1, 6, 8), torch.randn(1, 6, 6, 4)), Tensor)


@pytest.mark.parametrize(
    "call, options, decide",
    [
        (attention, Options, {"return_lse", "return_probs", "return_aux"}),
        (context_parallel_attention, ParallelOptions, {"return_lse", "group", "layout"}),
    ],
)
def test_the_overloads_have_every_keyword(call: typing.Callable[..., object], options: type, decide: set[str]) -> None:
    keywords = {name: x for name, x in inspect.signature(call).parameters.items() if x.kind is x.KEYWORD_ONLY}
    assert {name: x.annotation for name, x in keywords.items() if name not in decide} == {
        name: x.__forward_arg__ for name, x in options.__annotations__.items()
    }


def test_the_package_says_that_it_is_typed() -> None:
    assert Path(flash_dmattn.__file__).with_name("py.typed").is_file()
    assert all(hasattr(flash_dmattn, name) for name in flash_dmattn.__all__)
