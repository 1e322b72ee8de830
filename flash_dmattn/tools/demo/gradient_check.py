"""The gradient check: one real call of a trained layer, on every backend, against the formula in fp64."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch

import flash_dmattn
from flash_dmattn.explanation import Explanation
from flash_dmattn.nn.dynamic_mask_attention import AttentionArguments
from flash_dmattn.reference import formula, yardstick

from .training import Block, ByteLanguageModel, autocast

RESULTS = ("out", "dq", "dk", "dv", "dbias")


class Call(NamedTuple):
    """One attention call met in training: its arguments, as leaves, and the gradient that came back to its output."""

    arguments: AttentionArguments
    softmax_scale: float
    dout: torch.Tensor

    def to(self, dtype: torch.dtype) -> Call:
        """The same call with q, k, v and dout in another dtype; the bias keeps its own, except in fp64."""
        q, k, v, mask, bias = self.arguments
        assert bias is not None
        bias_dtype = dtype if dtype == torch.float64 else bias.dtype
        q, k, v = (x.detach().to(dtype).requires_grad_() for x in (q, k, v))
        bias = bias.detach().to(bias_dtype).requires_grad_()
        return Call(AttentionArguments(q, k, v, mask, bias), self.softmax_scale, self.dout.to(dtype))

    def explain(self) -> Explanation:
        """The decision for this call."""
        return flash_dmattn.explain(*self.arguments, is_causal=True, softmax_scale=self.softmax_scale)

    def run(self, backend: str) -> torch.Tensor:
        """The output, (B, L, Hq, D)."""
        scale = self.softmax_scale
        return flash_dmattn.attention(*self.arguments, is_causal=True, softmax_scale=scale, backend=backend)

    def run_formula(self) -> torch.Tensor:
        """The output by the formula, in the dtype of q."""
        return formula.attention(*self.arguments, is_causal=True, softmax_scale=self.softmax_scale)[0]

    def gradients(self, out: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """dq, dk, dv, dbias for an output of this call."""
        q, k, v, _, bias = self.arguments
        assert bias is not None
        return torch.autograd.grad(out, (q, k, v, bias), self.dout)


class CheckedBackend(NamedTuple):
    """Relative error of each result of one backend beside the limit, or the reasons why it cannot train the call."""

    backend: str
    dtype: torch.dtype
    errors: dict[str, float]
    limits: dict[str, float]
    reasons: tuple[str, ...]

    @property
    def failed(self) -> tuple[str, ...]:
        """The results whose error is above the limit, or not a number."""
        return tuple(name for name in self.errors if not self.errors[name] <= self.limits[name])


def capture_call(
    model: ByteLanguageModel, windows: torch.Tensor, layer: int, dtype: torch.dtype = torch.float32
) -> Call:
    """Run one training batch and keep what one layer's attention was called with, and the gradient it got back.

    Args:
        model: with dynamic-mask attention; its gradients are cleared.
        windows: (B, L + 1) tokens.
        layer: index of the block.
        dtype: of autocast, float32 for none.
    """
    block = model.blocks[layer]
    assert isinstance(block, Block)
    attention = block.attention
    seen: dict[str, torch.Tensor] = {}

    def keep_input(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        seen["x"] = inputs[0]

    def keep_output(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        seen["out"] = inputs[0]
        seen["out"].retain_grad()

    handles = (
        attention.register_forward_pre_hook(keep_input),
        attention.o_proj.register_forward_pre_hook(keep_output),
    )
    try:
        with autocast(windows.device, dtype):
            model.loss(windows).backward()
            arguments = attention.attention_arguments(seen["x"].detach())
    finally:
        for handle in handles:
            handle.remove()
    model.zero_grad()
    dout = seen["out"].grad
    assert dout is not None
    # Gradients are linear in dout: unit size takes the loss's 1 / (B * L) out of the reach of fp16's underflow.
    dout = (dout / dout.float().square().mean().sqrt()).unflatten(-1, (attention.num_heads, attention.head_dim))
    return Call(arguments, attention.softmax_scale, dout).to(arguments.q.dtype)


def check_call(call: Call) -> list[CheckedBackend]:
    """Compare every backend with the formula in fp64, in the dtype of the call.

    A result x passes by the rule of `flash_dmattn.reference.yardstick`.

    Returns:
        First the formula in this dtype itself, whose errors are the yardstick, then every backend.
    """
    dtype = call.arguments.q.dtype
    exact = _results(call.to(torch.float64), Call.run_formula)
    plain = _errors(_plain_results(call), exact)
    limits = {name: yardstick.RATIO * error + yardstick.FLOOR for name, error in plain.items()}
    checked = [CheckedBackend("formula", dtype, plain, limits, ())]
    for verdict in call.explain().verdicts:
        if verdict.backend == "reference":  # the formula again, under its name as a backend
            continue
        errors: dict[str, float] = {}
        if verdict.accepts:
            errors = _errors(_results(call, partial(Call.run, backend=verdict.backend)), exact)
        # "device is cpu", without what follows and what to do: `explain` says that.
        reasons = tuple(reason.text.partition(";")[0] for reason in verdict.reasons)
        checked.append(CheckedBackend(verdict.backend, dtype, errors, limits, reasons))
    return checked


def _results(call: Call, run: Callable[[Call], torch.Tensor]) -> tuple[torch.Tensor, ...]:
    out = run(call)
    return out.detach(), *call.gradients(out)


def _plain_results(call: Call) -> tuple[torch.Tensor, ...]:
    q, k, v, mask, bias = (None if x is None else x.detach() for x in call.arguments)
    assert q is not None and k is not None and v is not None
    scale = call.softmax_scale
    gradients = yardstick.gradients(call.dout, None, q, k, v, mask, bias, is_causal=True, softmax_scale=scale)
    dq, dk, dv, dbias = gradients
    assert dbias is not None
    return call.run_formula().detach(), dq, dk, dv, dbias


def _errors(results: tuple[torch.Tensor, ...], exact: tuple[torch.Tensor, ...]) -> dict[str, float]:
    return {
        name: float((x.double() - x64).norm() / x64.norm())
        for name, x, x64 in zip(RESULTS, results, exact, strict=True)
    }
