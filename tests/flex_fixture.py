"""The flex backend on FlexAttention's own dense formula, which has a backward pass on CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import pytest
import torch
from out_of_tree import replaced, rules_without
from packaging.version import Version

from flash_dmattn.backends.flex import backend as flex

Test = TypeVar("Test", bound=Any)

# Only the CPU kernel lacks these: the formula writes lse and has a backward pass.
LIFTED = ("cpu_backward", "cpu_lse")
# The formula multiplies dout by v, and adds up out * dout, in the dtype of q up to PyTorch 2.9, in fp32 since.
ROUNDS_GRADIENTS = Version(torch.__version__) < Version("2.10.0.dev0")
ROUNDED = "flex on a CPU: FlexAttention's dense formula computes gradients of 16 bits in 16 bits before PyTorch 2.10"


def compiled_on_cpu(test: Test) -> Test:
    """Mark a test that compiles the CPU kernel: one at a time, and none where the backend does not work."""
    works = flex._load()
    skipped = pytest.mark.skipif(not works.usable, reason=f"flex: {works.reason}")(test)
    return pytest.mark.xdist_group("flex_compile")(skipped)


@contextmanager
def eager_flex() -> Iterator[None]:
    """Within it, `backend="flex"` on CPU traces as ever but runs FlexAttention's own dense formula, gradients included.

    Four things are changed and put back: the graph compiler (dynamo's "eager" instead of Inductor), two refusals of
    `torch.nn.attention.flex_attention`, and the two rules that only the CPU kernel needs. Torch refuses gradients and
    maximum scores on a CPU.
    """
    import torch.nn.attention.flex_attention as torch_flex

    from flash_dmattn.backends.flex import graph as flex_graph

    validate, options, compiler = torch_flex._validate_device, torch_flex._apply_kernel_options, flex_graph.compiler

    def options_with_maxima(*arguments: Any) -> Any:
        *others, request = arguments
        maxima = request is not None and request.max_scores
        made = options(*others, request if request is None else request._replace(max_scores=False))
        made["OUTPUT_MAX"] = maxima
        return made

    torch_flex._validate_device = lambda query, key, value: None
    torch_flex._apply_kernel_options = options_with_maxima
    flex_graph.compiler = "eager"
    try:
        with replaced("flex", rules=rules_without("flex", *LIFTED)):
            yield
    finally:
        torch_flex._validate_device, torch_flex._apply_kernel_options, flex_graph.compiler = validate, options, compiler
